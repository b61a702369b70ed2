//! What is kept of a login: a file for each server, which nobody but its owner can read.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use http::HeaderValue;
use reqwest::Url;
use rmcp::transport::auth::{AuthError, CredentialRefreshGuard, CredentialStore, StoredCredentials};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use wieldy_core::redact;

use super::super::settings::LoginSettings;

/// How large the file may be.
const BYTES_MAX: u64 = 1024 * 1024;
const VERSION: u32 = 1;

/// The file as it is written.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Kept {
    version: u32,
    /// The server that it is for. Nobody else gets it.
    url: String,
    /// What proves who we are, where we registered ourselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) client_secret: Option<String>,
    /// Nothing where a login is wanted.
    pub(super) credentials: Option<StoredCredentials>,
}

/// What is sent along.
#[derive(Clone)]
pub(super) struct Token {
    pub(super) header: HeaderValue,
    /// Until when it is taken, as far as is known.
    pub(super) until: Option<SystemTime>,
}

impl Kept {
    pub(super) fn new(url: &Url, client_secret: Option<String>, credentials: Option<StoredCredentials>) -> Self {
        Self { version: VERSION, url: url.as_str().to_owned(), client_secret, credentials }
    }

    /// It, if it is for this server.
    pub(super) fn of(self, url: &Url) -> Option<Self> {
        Some(self).filter(|kept| kept.url == url.as_str())
    }

    pub(super) fn read(path: &Path) -> io::Result<Option<Self>> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut text = String::new();
        file.take(BYTES_MAX).read_to_string(&mut text)?;
        let kept: Self = serde_json::from_str(&text)?;
        if kept.version != VERSION {
            let told = format!("the file has version {}, and this program knows {VERSION}", kept.version);
            return Err(io::Error::new(io::ErrorKind::InvalidData, told));
        }
        Ok(Some(kept))
    }

    /// Writes the whole file or nothing of it.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        self.secrets().iter().for_each(|secret| {
            redact::hide(secret);
        });
        if let Some(folder) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let new = path.with_extension(format!("{}.new", std::process::id()));
        let _ = fs::remove_file(&new);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        let written = serde_json::to_vec_pretty(self)?;
        file.write_all(&written)?;
        file.sync_all()?;
        fs::rename(new, path)
    }

    pub(super) fn remove(path: &Path) -> io::Result<bool> {
        match fs::remove_file(path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// One of the texts of the answer by which the login was made.
    fn text(&self, name: &str) -> Option<String> {
        let response = self.credentials.as_ref()?.token_response.as_ref()?;
        let response = serde_json::to_value(response).ok()?;
        response.get(name).and_then(Value::as_str).map(str::to_owned)
    }

    /// What is sent along. Nothing if it is none that can be.
    pub(super) fn token(&self) -> Option<Token> {
        let text = self.text("access_token")?;
        let mut header = HeaderValue::try_from(format!("Bearer {text}")).ok()?;
        header.set_sensitive(true);
        let credentials = self.credentials.as_ref()?;
        let response = serde_json::to_value(credentials.token_response.as_ref()?).ok()?;
        let lasts = response.get("expires_in").and_then(Value::as_u64);
        let until = lasts.zip(credentials.token_received_at).map(|(lasts, received)| {
            SystemTime::UNIX_EPOCH + Duration::from_secs(received.saturating_add(lasts).min(u64::from(u32::MAX)))
        });
        Some(Token { header, until })
    }

    /// What nobody may see.
    pub(super) fn secrets(&self) -> Vec<String> {
        let texts = ["access_token", "refresh_token", "id_token"].into_iter().filter_map(|name| self.text(name));
        texts.chain(self.client_secret.clone()).collect()
    }
}

/// Keeps the login to one server.
pub(super) struct Keeper {
    url: Url,
    file: PathBuf,
    client_secret: Option<String>,
}

impl Keeper {
    pub(super) fn new(url: &Url, settings: &LoginSettings, client_secret: Option<String>) -> Self {
        Self { url: url.clone(), file: settings.file.clone(), client_secret }
    }

    fn failed(&self) -> impl Fn(io::Error) -> AuthError {
        move |error| AuthError::CredentialStoreError(format!("`{}`: {error}", self.file.display()))
    }
}

#[async_trait]
impl CredentialStore for Keeper {
    async fn load(&self) -> Result<Option<StoredCredentials>, AuthError> {
        let kept = Kept::read(&self.file).map_err(self.failed())?;
        Ok(kept.and_then(|kept| kept.of(&self.url)?.credentials))
    }

    async fn save(&self, credentials: StoredCredentials) -> Result<(), AuthError> {
        let kept = Kept::new(&self.url, self.client_secret.clone(), Some(credentials));
        if !kept.text("token_type").is_some_and(|kind| kind.eq_ignore_ascii_case("bearer")) {
            return Err(AuthError::InvalidTokenType("it is none that is sent along with requests".into()));
        }
        if kept.token().is_none() {
            return Err(AuthError::TokenExchangeFailed("the token cannot be sent along with requests".into()));
        }
        kept.write(&self.file).map_err(self.failed())
    }

    async fn clear(&self) -> Result<(), AuthError> {
        Kept::remove(&self.file).map(drop).map_err(self.failed())
    }

    /// From now on a login is wanted.
    async fn on_refresh_token_rejected(&self, refused: &StoredCredentials) -> Result<(), AuthError> {
        let Some(kept) = Kept::read(&self.file).map_err(self.failed())? else { return Ok(()) };
        let refused = Kept::new(&self.url, None, Some(refused.clone()));
        if kept.text("refresh_token") == refused.text("refresh_token") {
            Kept::new(&self.url, None, None).write(&self.file).map_err(self.failed())?;
        }
        Ok(())
    }

    /// One process at a time: a token that renews may be good for once only.
    async fn acquire_refresh_guard(&self) -> Result<Option<CredentialRefreshGuard>, AuthError> {
        let path = self.file.with_extension("lock");
        let locked = tokio::task::spawn_blocking(move || {
            let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
            file.lock()?;
            Ok(file)
        });
        let locked = locked.await.map_err(|error| AuthError::CredentialStoreError(error.to_string()))?;
        Ok(Some(CredentialRefreshGuard::new(locked.map_err(self.failed())?)))
    }
}
