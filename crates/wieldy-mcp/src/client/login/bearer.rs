//! The bearer token of a login, renewed before it expires.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use http::HeaderValue;
use reqwest::Url;
use rmcp::transport::auth::{AuthError, OAuthClientConfig};
use wieldy_core::redact;

use super::super::failure::Failure;
use super::super::settings::LoginSettings;
use super::login_file::{FileCredentialStore, LoginFile, Token};
use super::{manager, with_secret};

/// A token that expires sooner than this is renewed.
const RENEW_BEFORE: Duration = Duration::from_secs(60);

/// The number of token generations that stay redacted. Older tokens are worthless.
const GENERATIONS_HIDDEN: usize = 3;

/// The bearer token of one server. It is sent to no other server.
pub(in crate::client) struct Bearer {
    url: Url,
    settings: LoginSettings,
    state: RwLock<TokenState>,
    /// The secrets that are redacted because of this login, oldest first.
    hidden: Mutex<VecDeque<Vec<String>>>,
    /// Held during a renewal.
    renewing: tokio::sync::Mutex<()>,
}

/// The cached state of the token.
#[derive(Clone)]
enum TokenState {
    /// The login file was not read yet.
    Unknown,
    /// There is no login.
    Nothing,
    Token(Token),
}

impl Bearer {
    pub(in crate::client) fn new(url: Url, settings: LoginSettings) -> Self {
        Self {
            url,
            settings,
            state: RwLock::new(TokenState::Unknown),
            hidden: Mutex::default(),
            renewing: tokio::sync::Mutex::default(),
        }
    }

    /// Returns the token, renewed if it is about to expire. `None` without a login.
    pub(in crate::client) async fn token(&self) -> Result<Option<HeaderValue>, Failure> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner).clone();
        match state {
            TokenState::Token(token) if is_fresh(&token) => Ok(Some(token.header)),
            TokenState::Nothing => Ok(None),
            TokenState::Token(token) => self.renewed(Some(&token.header)).await,
            TokenState::Unknown => match self.stored()?.and_then(|login| login.token()) {
                Some(token) if is_fresh(&token) => Ok(Some(self.remember(token))),
                Some(token) => self.renewed(Some(&token.header)).await,
                None => {
                    self.set(TokenState::Nothing);
                    Ok(None)
                }
            },
        }
    }

    /// Returns another token than the refused one. `None` without a login.
    pub(in crate::client) async fn renewed(
        &self,
        refused: Option<&HeaderValue>,
    ) -> Result<Option<HeaderValue>, Failure> {
        let _alone = self.renewing.lock().await;
        // A new login or another process may have replaced the token meanwhile.
        let Some(login) = self.stored()? else {
            self.store_wanted();
            return Ok(None);
        };
        match login.token() {
            None => {
                self.set(TokenState::Nothing);
                Err(Failure::NeedsLogin)
            }
            Some(token) if Some(&token.header) != refused && is_fresh(&token) => Ok(Some(self.remember(token))),
            Some(token) => {
                self.renew(&login).await?;
                let renewed = self.stored()?.and_then(|login| login.token());
                let renewed = renewed.filter(|renewed| renewed.header != token.header);
                renewed.map(|token| self.remember(token)).map(Some).ok_or(Failure::NeedsLogin)
            }
        }
    }

    /// Requests a new token and stores it.
    async fn renew(&self, login: &LoginFile) -> Result<(), Failure> {
        let Some(credentials) = &login.credentials else { return Err(Failure::NeedsLogin) };
        let (id, settings) = (&credentials.client_id, &self.settings);
        let secret = match &settings.client_id {
            Some(configured) if configured != id => return Err(Failure::NeedsLogin),
            Some(_) => settings.client_secret.as_deref(),
            None => login.client_secret.as_deref(),
        };
        let renewed = async {
            let mut manager = manager(&self.url, settings).await?;
            manager.set_credential_store(FileCredentialStore::new(&self.url, settings, login.client_secret.clone()));
            let found = manager.resolve_metadata().await?.metadata;
            // A refresh token goes only to the issuer that gave it.
            if found.issuer != credentials.issuer {
                return Err(AuthError::AuthorizationRequired);
            }
            manager.set_metadata(found);
            manager.configure_client(with_secret(OAuthClientConfig::new(id, self.url.as_str()), secret))?;
            manager.refresh_token().await.map(drop)
        };
        renewed.await.map_err(|error| match error {
            AuthError::AuthorizationRequired | AuthError::TokenRefreshRejected(_) => Failure::NeedsLogin,
            error => {
                let told = redact::text(&error.to_string()).into_owned();
                let told = &told[..told.floor_char_boundary(500)];
                Failure::unreached(format!("its login could not be renewed: {told}"))
            }
        })
    }

    /// Reads the login file of this server.
    fn stored(&self) -> Result<Option<LoginFile>, Failure> {
        let file = &self.settings.file;
        let login = LoginFile::read(file).map_err(|error| {
            Failure::Configuration(format!("its login cannot be read from `{}`: {error}", file.display()).into())
        })?;
        let login = login.and_then(|login| login.of(&self.url));
        login.iter().for_each(|login| self.hide(login.secrets()));
        Ok(login)
    }

    /// Redacts these secrets, and stops redacting those of older generations.
    fn hide(&self, secrets: Vec<String>) {
        let mut hidden = self.hidden.lock().unwrap_or_else(PoisonError::into_inner);
        if hidden.back() == Some(&secrets) {
            return;
        }
        for secret in &secrets {
            redact::hide(secret);
        }
        hidden.push_back(secrets);
        let old = if hidden.len() > GENERATIONS_HIDDEN { hidden.pop_front() } else { None };
        for secret in old.into_iter().flatten().filter(|old| !hidden.iter().flatten().any(|secret| secret == old)) {
            redact::unhide(&secret);
        }
    }

    /// Stores that the server asks for a login, for `LoginState::of`.
    fn store_wanted(&self) {
        self.set(TokenState::Nothing);
        if let Err(error) = LoginFile::new(&self.url, None, None).write(&self.settings.file) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(target: "wieldy::mcp", error, "cannot store that a server requires a login");
        }
    }

    fn remember(&self, token: Token) -> HeaderValue {
        let header = token.header.clone();
        self.set(TokenState::Token(token));
        header
    }

    fn set(&self, state: TokenState) {
        *self.state.write().unwrap_or_else(PoisonError::into_inner) = state;
    }
}

fn is_fresh(token: &Token) -> bool {
    token.until.is_none_or(|until| until > SystemTime::now() + RENEW_BEFORE)
}
