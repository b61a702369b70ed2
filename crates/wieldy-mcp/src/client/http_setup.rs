//! Sets up HTTP for a server: its URL, the headers of every request, TLS, and the HTTP clients made from them.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use reqwest::Url;
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::common::client_side_sse::ExponentialBackoff;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;

use super::http_request::{Request, Target};
use super::http_transport::HttpTransport;
use super::login::Bearer;
use super::settings::Address;

/// The longest time to open a connection.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest pause before a broken stream is resumed.
const RESUME_DELAY_MAX: Duration = Duration::from_secs(30);
/// Headers that MCP and HTTP set themselves, so that an operator must not.
const RESERVED: [&str; 10] = [
    "accept",
    "connection",
    "content-length",
    "content-type",
    "host",
    "last-event-id",
    "mcp-protocol-version",
    "mcp-session-id",
    "te",
    "transfer-encoding",
];

/// Returns the HTTP transport of a server, and the SDK's transport built on it.
pub(super) fn transport(
    address: &Address,
    calls_max: usize,
) -> Result<(HttpTransport, StreamableHttpClientTransport<HttpTransport>), String> {
    let (url, headers) = (url(address)?, headers(address)?);
    // A configured `Authorization` header takes precedence over a stored login.
    let login = address.login.clone().filter(|_| !headers.contains_key(header::AUTHORIZATION));
    let http = HttpTransport::new(Target::new(url.clone())?, headers, login.map(|login| Bearer::new(url, login)));
    let mut config =
        StreamableHttpClientTransportConfig::with_uri(address.url.as_str()).max_concurrent_requests(calls_max);
    config.retry_config = Arc::new(resume_backoff());
    Ok((http.clone(), StreamableHttpClientTransport::with_client(http, config)))
}

/// Returns the backoff between attempts to resume a broken stream.
pub(super) fn resume_backoff() -> ExponentialBackoff {
    let mut backoff = ExponentialBackoff::default();
    backoff.max_delay = Some(RESUME_DELAY_MAX);
    backoff
}

/// Parses the server's URL.
pub(super) fn url(address: &Address) -> Result<Url, String> {
    let url = Url::parse(&address.url).map_err(|error| format!("`{}` is not a URL: {error}", address.url))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(format!("`{}` begins with neither http:// nor https://", address.url));
    }
    Ok(url)
}

/// Builds the headers that are sent with every request.
fn headers(address: &Address) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (name, value) in &address.headers {
        let header = HeaderName::try_from(name).map_err(|_| format!("`{name}` is not a header name"))?;
        if RESERVED.contains(&header.as_str()) {
            return Err(format!("the header `{name}` cannot be set: wieldy sets it itself"));
        }
        headers.insert(header, secret_value(name, value)?);
    }
    if let Some(bearer) = &address.bearer {
        headers.insert(header::AUTHORIZATION, secret_value("Authorization", &format!("Bearer {bearer}"))?);
    }
    Ok(headers)
}

/// Builds a header value that may be a secret, so the error does not quote it.
fn secret_value(name: &str, value: &str) -> Result<HeaderValue, String> {
    let mut value =
        HeaderValue::try_from(value).map_err(|_| format!("the value of the header `{name}` cannot be sent"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Returns the `Bearer` challenge with which a server answers a request without a token. `None` if the server asks for
/// no token.
pub(super) async fn challenge(address: &Address) -> Option<String> {
    let (target, mut headers) = (Target::new(url(address).ok()?).ok()?, headers(address).ok()?);
    headers.insert(header::ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let make = || {
        let mut request = Request::new(r#"{"jsonrpc":"2.0","id":0,"method":"ping"}"#.into());
        *request.method_mut() = Method::POST;
        request.headers_mut().clone_from(&headers);
        request
    };
    let answer = tokio::time::timeout(CONNECT_TIMEOUT, target.send(make)).await.ok()?.ok()?;
    if answer.status() != StatusCode::UNAUTHORIZED {
        return None;
    }
    let mut said = answer.headers().get_all(header::WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok());
    said.find(|said| said.get(..6).is_some_and(|scheme| scheme.eq_ignore_ascii_case("bearer"))).map(str::to_owned)
}

/// Returns the common settings of our `reqwest` clients. MCP messages do not use `reqwest`.
pub(super) fn builder() -> Result<reqwest::ClientBuilder, String> {
    Ok(reqwest::Client::builder()
        .tls_backend_preconfigured(tls()?)
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .no_proxy())
}

/// Builds a TLS configuration with the machine's root certificates.
pub(super) fn tls() -> Result<rustls::ClientConfig, String> {
    static TLS: OnceLock<Result<rustls::ClientConfig, String>> = OnceLock::new();
    let make = || {
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| format!("cannot set up TLS: {error}"))?;
        Ok(builder.with_root_certificates(roots).with_no_client_auth())
    };
    TLS.get_or_init(make).clone()
}
