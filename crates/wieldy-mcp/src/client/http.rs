//! A server that is reached by HTTP.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use reqwest::header::{HeaderName, HeaderValue};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;

use super::settings::Address;

/// How long a connection may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The way to a server.
pub(super) fn transport(
    address: &Address,
    calls_max: usize,
) -> Result<StreamableHttpClientTransport<reqwest::Client>, String> {
    let url = reqwest::Url::parse(&address.url).map_err(|error| format!("`{}` is no address: {error}", address.url))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(format!("`{}` begins with neither http:// nor https://", address.url));
    }
    let mut headers = HashMap::new();
    for (name, value) in &address.headers {
        let header = HeaderName::try_from(name).map_err(|_| format!("`{name}` is no name of a header"))?;
        // The value may be a secret, so the error does not say it.
        let value = HeaderValue::try_from(value).map_err(|_| format!("the value of the header `{name}` is none"))?;
        headers.insert(header, value);
    }
    let mut config = StreamableHttpClientTransportConfig::with_uri(url.as_str())
        .max_concurrent_requests(calls_max)
        .custom_headers(headers);
    config.auth_header.clone_from(&address.bearer);
    Ok(StreamableHttpClientTransport::with_client(client()?, config))
}

/// The client of all servers; it keeps connections for the next request.
fn client() -> Result<reqwest::Client, String> {
    static CLIENT: OnceLock<Result<reqwest::Client, String>> = OnceLock::new();
    CLIENT.get_or_init(|| build().map_err(|error| format!("no HTTP client can be made: {error}"))).clone()
}

fn build() -> Result<reqwest::Client, Box<dyn std::error::Error>> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let tls = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(reqwest::Client::builder()
        .tls_backend_preconfigured(tls)
        .redirect(reqwest::redirect::Policy::custom(within_the_same_server))
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .no_proxy()
        .build()?)
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
