//! The address of a PostgreSQL server, and connections to it, with TLS.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::{Client, Config, NoTls, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::error::StoreError;

/// The timeout of a connection attempt.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The server that an address names.
#[derive(Clone)]
pub(super) struct Server {
    config: Config,
    /// A file with the root certificates to trust, instead of those of the system.
    roots: Option<PathBuf>,
}

impl Server {
    /// Parses an address as libpq does. Of libpq's TLS options, `sslrootcert` is known, and `verify-ca` and
    /// `verify-full` mean `require`: a certificate is always verified.
    pub(super) fn parse(url: &str) -> Result<Self, StoreError> {
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let mut options = Vec::new();
        let mut roots = None;
        for option in query.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("sslrootcert", path)) if path != "system" => roots = Some(PathBuf::from(unescape(path))),
                Some(("sslrootcert", _)) => {}
                Some(("sslmode", "verify-ca" | "verify-full")) => options.push("sslmode=require"),
                Some(("sslmode", "allow")) => options.push("sslmode=prefer"),
                _ => options.push(option),
            }
        }
        let plain = if options.is_empty() { base.to_owned() } else { format!("{base}?{}", options.join("&")) };
        let mut config: Config = plain.parse().map_err(|error: tokio_postgres::Error| {
            // The cause names the option and not its value.
            let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            StoreError::Address(format!("the address of the history's server cannot be read: {why}"))
        })?;
        if config.get_hosts().is_empty() {
            return Err(StoreError::Address("the address of the history names no server".into()));
        }
        config.connect_timeout(*config.get_connect_timeout().unwrap_or(&CONNECT_TIMEOUT));
        // A machine that is gone sends nothing: after ten seconds the connection counts as lost.
        config.tcp_user_timeout(Duration::from_secs(5)).keepalives_idle(Duration::from_secs(4));
        config.keepalives_interval(Duration::from_secs(2)).keepalives_retries(3);
        if config.get_application_name().is_none() {
            config.application_name("wieldy");
        }
        Ok(Self { config, roots })
    }

    /// Returns the address without its password.
    pub(super) fn redacted(&self) -> String {
        let mut shown = "postgres://".to_owned();
        if let Some(user) = self.config.get_user() {
            let _ = write!(shown, "{user}@");
        }
        for (at, host) in self.config.get_hosts().iter().enumerate() {
            let host = match host {
                Host::Tcp(name) => name.clone(),
                Host::Unix(path) => path.display().to_string(),
            };
            let ports = self.config.get_ports();
            let port = ports.get(at).or_else(|| ports.first()).map(|port| format!(":{port}")).unwrap_or_default();
            let _ = write!(shown, "{}{host}{port}", if at == 0 { "" } else { "," });
        }
        if let Some(name) = self.config.get_dbname() {
            let _ = write!(shown, "/{name}");
        }
        shown
    }

    /// Connects. The connection is driven by a task of the current runtime, which passes the error that ends it to
    /// `end`.
    pub(super) async fn connect(&self, end: impl FnOnce(String) + Send + 'static) -> Result<Client, String> {
        if self.config.get_ssl_mode() == SslMode::Disable || !self.is_remote() {
            return self.config.connect(NoTls).await.map(|(client, io)| drive(client, io, end)).map_err(error_text);
        }
        let secured = match self.tls() {
            Ok(tls) => self.config.connect(tls).await.map_err(error_text),
            Err(error) => Err(format!("no TLS: {error}")),
        };
        match secured {
            Ok((client, io)) => Ok(drive(client, io, end)),
            // `prefer` accepts a connection without TLS, as everywhere in PostgreSQL; `require` does not.
            Err(why) if self.config.get_ssl_mode() == SslMode::Prefer && why.contains("TLS") => {
                let mut plain = self.config.clone();
                plain.ssl_mode(SslMode::Disable);
                let (client, io) = plain.connect(NoTls).await.map_err(error_text)?;
                tracing::warn!(why, "the connection to the history's server is not encrypted");
                Ok(drive(client, io, end))
            }
            Err(why) => Err(why),
        }
    }

    /// Returns true if some of the hosts can be reached by a network only.
    fn is_remote(&self) -> bool {
        self.config.get_hosts().iter().any(|host| matches!(host, Host::Tcp(_)))
    }

    fn tls(&self) -> Result<MakeRustlsConnect, String> {
        let mut roots = RootCertStore::empty();
        match &self.roots {
            Some(path) => {
                let failed = |error: &dyn std::fmt::Display| format!("cannot use `{}`: {error}", path.display());
                for certificate in CertificateDer::pem_file_iter(path).map_err(|error| failed(&error))? {
                    let certificate = certificate.map_err(|error| failed(&error))?;
                    roots.add(certificate).map_err(|error| failed(&error))?;
                }
            }
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(|error| error.to_string())?.with_root_certificates(roots).with_no_client_auth();
        Ok(MakeRustlsConnect::new(config))
    }
}

fn drive<S>(
    client: Client,
    io: tokio_postgres::Connection<Socket, S>,
    end: impl FnOnce(String) + Send + 'static,
) -> Client
where
    S: tokio_postgres::tls::TlsStream + Unpin + Send + 'static,
{
    tokio::spawn(async move {
        if let Err(error) = io.await {
            end(error_text(error));
        }
    });
    client
}

/// Returns the server's message, or the error with its causes.
#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
pub(super) fn error_text(error: tokio_postgres::Error) -> String {
    if let Some(said) = error.as_db_error() {
        return format!("the server says: {}", said.message());
    }
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        let _ = write!(text, ": {error}");
        cause = error.source();
    }
    text
}

/// Decodes `%2F` and the like.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        let digits = more.get(..2).filter(|_| *first == b'%').and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &more[2..];
            }
            None => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_without_its_password() {
        let shown = |url: &str| Server::parse(url).map(|server| server.redacted());
        let of = |text: &str| Ok(text.to_owned());
        assert_eq!(
            shown("postgres://ann:hunter2@db.example:5433/work?sslmode=verify-full"),
            of("postgres://ann@db.example:5433/work")
        );
        assert_eq!(shown("postgresql://db/work?password=hunter2&user=ann"), of("postgres://ann@db:5432/work"));
        assert_eq!(
            shown("postgres://ann:hunter2@%2Frun%2Fpostgresql/work"),
            of("postgres://ann@/run/postgresql:5432/work")
        );
        assert_eq!(
            shown("postgres://a,b/work?sslrootcert=%2Fetc%2Fca.pem&sslmode=require"),
            of("postgres://a:5432,b:5432/work")
        );
    }

    #[test]
    fn an_address_that_cannot_be_read_is_refused_without_its_secrets() {
        let refused = |url: &str| Server::parse(url).err().map(|error| error.to_string());
        let read = "the address of the history's server cannot be read";
        assert_eq!(
            refused("postgres://a:hunter2@b/c?sslmode=hunter2"),
            Some(format!("{read}: invalid value for option `sslmode`"))
        );
        assert_eq!(
            refused("postgres://a:hunter2@b:hunter2/c"),
            Some(format!("{read}: invalid value for option `port`"))
        );
        assert_eq!(refused("postgres:///work"), Some("the address of the history names no server".into()));
    }
}
