//! OAuth login to a server, as MCP specifies it. A person does it once ([`Login`], [`LoginRedirect`]). The tokens are
//! stored in a file and renewed from then on ([`Bearer`]).

mod bearer;
mod login_file;
mod redirect;
mod ssrf_guard;

use std::sync::Arc;

use reqwest::Url;
use rmcp::transport::auth::{AuthError, AuthorizationManager, OAuthClientConfig};

use self::login_file::{FileCredentialStore, LoginFile};
use self::ssrf_guard::GuardedClient;
use super::http_setup;
use super::settings::{Address, LoginSettings};

pub(super) use self::bearer::Bearer;
pub use self::redirect::LoginRedirect;

/// The reason why a login failed.
#[derive(Debug, thiserror::Error)]
pub enum LoginError {
    /// The server has no usable URL, or nowhere to store a login.
    #[error("{0}")]
    Address(String),
    /// The server's OAuth metadata is missing or invalid.
    #[error("it does not say how to log in")]
    Metadata(#[source] AuthError),
    /// The login page is not one that a browser should open.
    #[error("its login page must not be opened: {0}")]
    Page(String),
    /// Dynamic client registration failed.
    #[error("wieldy could not register with the authorization server")]
    Register(#[source] AuthError),
    /// The person or the authorization server refused.
    #[error("the login was refused: {0}")]
    Refused(String),
    /// The redirect belongs to another login.
    #[error("this is the answer to another login")]
    State,
    /// The redirect has no code.
    #[error("this is not the answer to a login")]
    NoAnswer,
    /// The code was refused, or the token is unusable.
    #[error("the login was not completed")]
    Exchange(#[source] AuthError),
    /// The login file cannot be changed.
    #[error("cannot store the login in `{file}`")]
    Keep {
        /// The file.
        file: std::path::PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// The login state of a server, known without asking the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LoginState {
    /// A login is stored.
    LoggedIn,
    /// The server asks for a login, and none is stored.
    Wanted,
}

impl LoginState {
    /// Returns the login state of the server at an address.
    pub fn of(address: &Address) -> Option<Self> {
        let login = address.login.as_ref()?;
        let url = http_setup::url(address).ok()?;
        let login_file = LoginFile::read(&login.file).ok()??.of(&url)?;
        Some(if login_file.token().is_some() { Self::LoggedIn } else { Self::Wanted })
    }
}

/// A login that waits for a person.
pub struct Login {
    manager: AuthorizationManager,
    page: String,
    state: String,
}

impl Login {
    /// Discovers the authorization server and prepares the login. The browser will be redirected to `redirect`.
    pub async fn begin(address: &Address, redirect: &str) -> Result<Self, LoginError> {
        let url = http_setup::url(address).map_err(LoginError::Address)?;
        let Some(settings) = &address.login else {
            return Err(LoginError::Address("there is no file to store a login in".into()));
        };
        let mut manager = manager(&url, settings).await.map_err(LoginError::Metadata)?;
        let challenge = http_setup::challenge(address).await;
        let found = manager.resolve_metadata_from_challenge(challenge.as_deref()).await;
        let found = found.map_err(LoginError::Metadata)?.metadata;
        ssrf_guard::UrlRules::new(&url, settings.private)
            .check(&found.authorization_endpoint)
            .map_err(LoginError::Page)?;
        manager.set_metadata(found);
        let scopes = match settings.scopes.as_slice() {
            [] => manager.select_initial_scopes(&[]).await,
            scopes => scopes.to_vec(),
        };
        let scopes: Vec<&str> = scopes.iter().map(String::as_str).collect();
        let client = match &settings.client_id {
            Some(id) => {
                let client = with_secret(OAuthClientConfig::new(id, redirect), settings.client_secret.as_deref());
                manager.configure_client(client.clone()).map_err(LoginError::Metadata)?;
                client
            }
            None => manager.register_client("wieldy", redirect, &scopes).await.map_err(LoginError::Register)?,
        };
        // The configured client secret stays in the configuration.
        let secret = client.client_secret.filter(|_| settings.client_id.is_none());
        manager.set_credential_store(FileCredentialStore::new(&url, settings, secret));
        let page = manager.get_authorization_url(&scopes).await.map_err(LoginError::Metadata)?;
        let parsed = Url::parse(&page).map_err(|error| LoginError::Page(error.to_string()))?;
        let state = parsed.query_pairs().filter(|(name, _)| name == "state").last();
        let state = state.map(|(_, state)| state.into_owned()).ok_or(LoginError::State)?;
        Ok(Self { manager, page, state })
    }

    /// Returns the page to open. It begins with `http://` or `https://` and has only characters that a URL may have.
    pub fn page(&self) -> &str {
        &self.page
    }

    /// Returns true if this URL is the redirect of this login, successful or not.
    pub fn is_answered_by(&self, redirected: &str) -> bool {
        Url::parse(redirected).is_ok_and(|url| self.has_my_state(&url))
    }

    fn has_my_state(&self, url: &Url) -> bool {
        let mut states = url.query_pairs().filter(|(name, _)| name == "state");
        states.next().is_some_and(|(_, state)| state == self.state.as_str()) && states.next().is_none()
    }

    /// Exchanges the code in the redirect URL for tokens and stores them.
    pub async fn finish(self, redirected: &str) -> Result<(), LoginError> {
        let url = Url::parse(redirected.trim()).map_err(|_| LoginError::NoAnswer)?;
        if !self.has_my_state(&url) {
            return Err(LoginError::State);
        }
        let find = |name: &str| url.query_pairs().find(|(key, _)| key == name).map(|(_, value)| value.into_owned());
        if let Some(error) = find("error") {
            let told = find("error_description").map(|told| format!("{error}: {told}")).unwrap_or(error);
            return Err(LoginError::Refused(told[..told.floor_char_boundary(500)].to_owned()));
        }
        let code = find("code").ok_or(LoginError::NoAnswer)?;
        wieldy_core::redact::hide(&code);
        let issuer = find("iss");
        let done = self.manager.exchange_code_for_token_with_issuer(&code, &self.state, issuer.as_deref()).await;
        done.map(drop).map_err(LoginError::Exchange)
    }

    /// Deletes the login of a server. Returns false if there was none.
    pub fn forget(address: &Address) -> Result<bool, LoginError> {
        let Some(settings) = &address.login else { return Ok(false) };
        let failed = |source| LoginError::Keep { file: settings.file.clone(), source };
        LoginFile::remove(&settings.file).map_err(failed)
    }
}

/// Makes the SDK's OAuth manager with our guarded HTTP client.
async fn manager(url: &Url, settings: &LoginSettings) -> Result<AuthorizationManager, AuthError> {
    let client = GuardedClient::new(url, settings.private).map_err(AuthError::InternalError)?;
    AuthorizationManager::new_with_oauth_http_client(url.clone(), Arc::new(client)).await
}

fn with_secret(client: OAuthClientConfig, secret: Option<&str>) -> OAuthClientConfig {
    match secret {
        Some(secret) => {
            wieldy_core::redact::hide(secret);
            client.with_client_secret(secret)
        }
        None => client,
    }
}
