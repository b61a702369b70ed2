//! The stored login: one file per server, readable only by its owner.

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

/// Maximum size of the file.
const BYTES_MAX: u64 = 1024 * 1024;
const VERSION: u32 = 1;

/// The contents of the file.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct LoginFile {
    version: u32,
    /// The server's URL. The login is used for no other server.
    url: String,
    /// The client secret of our dynamic registration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) client_secret: Option<String>,
    /// `None` if the server asks for a login.
    pub(super) credentials: Option<StoredCredentials>,
}

/// The token that is sent with requests.
#[derive(Clone)]
pub(super) struct Token {
    pub(super) header: HeaderValue,
    /// The expiry, if it is known.
    pub(super) until: Option<SystemTime>,
}

impl LoginFile {
    pub(super) fn new(url: &Url, client_secret: Option<String>, credentials: Option<StoredCredentials>) -> Self {
        Self { version: VERSION, url: url.as_str().to_owned(), client_secret, credentials }
    }

    /// Returns the login if it belongs to this server.
    pub(super) fn of(self, url: &Url) -> Option<Self> {
        Some(self).filter(|login| login.url == url.as_str())
    }

    pub(super) fn read(path: &Path) -> io::Result<Option<Self>> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut text = String::new();
        file.take(BYTES_MAX).read_to_string(&mut text)?;
        let login: Self = serde_json::from_str(&text)?;
        if login.version != VERSION {
            let told = format!("the file has version {}, and this program knows {VERSION}", login.version);
            return Err(io::Error::new(io::ErrorKind::InvalidData, told));
        }
        Ok(Some(login))
    }

    /// Writes the file atomically.
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

    /// Returns a string field of the token response.
    fn text(&self, name: &str) -> Option<String> {
        let response = self.credentials.as_ref()?.token_response.as_ref()?;
        let response = serde_json::to_value(response).ok()?;
        response.get(name).and_then(Value::as_str).map(str::to_owned)
    }

    /// Returns the token. `None` if it cannot be a header value.
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

    /// Returns the secrets, for redaction.
    pub(super) fn secrets(&self) -> Vec<String> {
        let texts = ["access_token", "refresh_token", "id_token"].into_iter().filter_map(|name| self.text(name));
        texts.chain(self.client_secret.clone()).collect()
    }
}

/// The SDK's credential store of one server, on top of the file.
pub(super) struct FileCredentialStore {
    url: Url,
    file: PathBuf,
    client_secret: Option<String>,
}

impl FileCredentialStore {
    pub(super) fn new(url: &Url, settings: &LoginSettings, client_secret: Option<String>) -> Self {
        Self { url: url.clone(), file: settings.file.clone(), client_secret }
    }

    fn failed(&self) -> impl Fn(io::Error) -> AuthError {
        move |error| AuthError::CredentialStoreError(format!("`{}`: {error}", self.file.display()))
    }
}

#[async_trait]
impl CredentialStore for FileCredentialStore {
    async fn load(&self) -> Result<Option<StoredCredentials>, AuthError> {
        let login = LoginFile::read(&self.file).map_err(self.failed())?;
        Ok(login.and_then(|login| login.of(&self.url)?.credentials))
    }

    async fn save(&self, credentials: StoredCredentials) -> Result<(), AuthError> {
        let login = LoginFile::new(&self.url, self.client_secret.clone(), Some(credentials));
        if !login.text("token_type").is_some_and(|kind| kind.eq_ignore_ascii_case("bearer")) {
            return Err(AuthError::InvalidTokenType("the token type must be `Bearer`".into()));
        }
        if login.token().is_none() {
            return Err(AuthError::TokenExchangeFailed("the token cannot be sent in a header".into()));
        }
        login.write(&self.file).map_err(self.failed())
    }

    async fn clear(&self) -> Result<(), AuthError> {
        LoginFile::remove(&self.file).map(drop).map_err(self.failed())
    }

    /// Records that a new login is needed.
    async fn on_refresh_token_rejected(&self, refused: &StoredCredentials) -> Result<(), AuthError> {
        let Some(login) = LoginFile::read(&self.file).map_err(self.failed())? else { return Ok(()) };
        let refused = LoginFile::new(&self.url, None, Some(refused.clone()));
        if login.text("refresh_token") == refused.text("refresh_token") {
            LoginFile::new(&self.url, None, None).write(&self.file).map_err(self.failed())?;
        }
        Ok(())
    }

    /// Locks out other processes: a refresh token may be valid only once.
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
