//! A server that is reached by HTTP: who it is, and how connections to it are made.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use reqwest::Url;
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::common::client_side_sse::ExponentialBackoff;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;

use super::login::Bearer;
use super::settings::Address;
use super::wire::Wire;

/// How long a connection may take to be made.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long it takes at most until a stream that broke is asked for again.
const RESUME_DELAY_MAX: Duration = Duration::from_secs(30);
/// What MCP and HTTP say themselves in each request.
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

/// The way to a server, and the SDK's transport that takes it.
pub(super) fn transport(
    address: &Address,
    calls_max: usize,
) -> Result<(Wire, StreamableHttpClientTransport<Wire>), String> {
    let (url, headers) = (url(address)?, headers(address)?);
    // What the operator says who we are counts more than what somebody logged in as.
    let login = address.login.clone().filter(|_| !headers.contains_key(header::AUTHORIZATION));
    let wire = Wire::new(client()?, url.clone(), headers, login.map(|login| Bearer::new(url, login)));
    let mut config =
        StreamableHttpClientTransportConfig::with_uri(address.url.as_str()).max_concurrent_requests(calls_max);
    config.retry_config = Arc::new(resume());
    Ok((wire.clone(), StreamableHttpClientTransport::with_client(wire, config)))
}

/// How long it takes until a stream that broke is asked for again.
pub(super) fn resume() -> ExponentialBackoff {
    let mut resume = ExponentialBackoff::default();
    resume.max_delay = Some(RESUME_DELAY_MAX);
    resume
}

/// Where it is.
pub(super) fn url(address: &Address) -> Result<Url, String> {
    let url = Url::parse(&address.url).map_err(|error| format!("`{}` is no address: {error}", address.url))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(format!("`{}` begins with neither http:// nor https://", address.url));
    }
    Ok(url)
}

/// What is sent along with every request.
fn headers(address: &Address) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (name, value) in &address.headers {
        let header = HeaderName::try_from(name).map_err(|_| format!("`{name}` is no name of a header"))?;
        if RESERVED.contains(&header.as_str()) {
            return Err(format!("the header `{name}` is not ours to set"));
        }
        headers.insert(header, secret_value(name, value)?);
    }
    if let Some(bearer) = &address.bearer {
        headers.insert(header::AUTHORIZATION, secret_value("Authorization", &format!("Bearer {bearer}"))?);
    }
    Ok(headers)
}

/// The value may be a secret, so the error does not say it.
fn secret_value(name: &str, value: &str) -> Result<HeaderValue, String> {
    let mut value =
        HeaderValue::try_from(value).map_err(|_| format!("the value of the header `{name}` cannot be sent"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// What a server says to somebody whom it does not know: where to log in, and for what. Nothing where it does not mind.
pub(super) async fn challenge(address: &Address) -> Option<String> {
    let asked = client().ok()?.post(url(address).ok()?).headers(headers(address).ok()?);
    let asked = asked
        .header(header::ACCEPT, "application/json, text/event-stream")
        .header(header::CONTENT_TYPE, "application/json")
        .body(r#"{"jsonrpc":"2.0","id":0,"method":"ping"}"#)
        .timeout(CONNECT_TIMEOUT);
    let answer = asked.send().await.ok()?;
    if answer.status() != reqwest::StatusCode::UNAUTHORIZED {
        return None;
    }
    let mut said = answer.headers().get_all(header::WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok());
    said.find(|said| said.get(..6).is_some_and(|scheme| scheme.eq_ignore_ascii_case("bearer"))).map(str::to_owned)
}

/// The client of all servers; it keeps connections for the next request.
fn client() -> Result<reqwest::Client, String> {
    static CLIENT: OnceLock<Result<reqwest::Client, String>> = OnceLock::new();
    let make = || {
        let builder = builder()?.redirect(reqwest::redirect::Policy::custom(within_the_same_server));
        builder.build().map_err(|error| format!("no HTTP client can be made: {error}"))
    };
    CLIENT.get_or_init(make).clone()
}

/// What all our clients of HTTP have in common.
pub(super) fn builder() -> Result<reqwest::ClientBuilder, String> {
    static TLS: OnceLock<Result<rustls::ClientConfig, String>> = OnceLock::new();
    let make = || {
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| format!("no TLS can be had: {error}"))?;
        Ok(builder.with_root_certificates(roots).with_no_client_auth())
    };
    let tls = TLS.get_or_init(make).clone()?;
    Ok(reqwest::Client::builder()
        .tls_backend_preconfigured(tls)
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .no_proxy())
}

/// Follows a redirect that keeps the message whole and goes to nobody else: others must not get what is sent along.
fn within_the_same_server(attempt: reqwest::redirect::Attempt<'_>) -> reqwest::redirect::Action {
    const HOPS_MAX: usize = 3;
    let keeps_the_message = matches!(attempt.status().as_u16(), 307 | 308);
    let is_the_same = attempt.previous().first().is_some_and(|first| first.origin() == attempt.url().origin());
    if keeps_the_message && is_the_same && attempt.previous().len() <= HOPS_MAX {
        attempt.follow()
    } else {
        attempt.stop()
    }
}
