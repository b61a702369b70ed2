//! The guard: authenticates callers and checks the host and origin of each request. Permissions of a caller are checked
//! elsewhere.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use futures_util::stream::{self, StreamExt};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::time::{Instant, timeout_at};
use wieldy_core::Caller;

use crate::{HttpOptions, error_response};

/// The answer to a body that does not arrive in time.
const LATE: &str = "the body did not arrive in time";

/// The hash of a secret that a caller must show, and the caller that it stands for.
#[derive(Debug, Clone)]
pub struct Token {
    hash: blake3::Hash,
    caller: Arc<Caller>,
}

impl Token {
    /// Makes the token of a caller.
    pub fn new(secret: &str, caller: Caller) -> Self {
        Self { hash: blake3::hash(secret.as_bytes()), caller: Arc::new(caller) }
    }
}

/// The conditions that requests must fulfil.
pub(crate) struct RequestGuard {
    options: HttpOptions,
    /// The host names that clients may use for this server. `None` accepts any: other machines reach it and no name is
    /// configured.
    hosts: Option<Vec<String>>,
}

/// The reason why a request is refused.
enum Refusal {
    Host,
    Origin,
    NoToken,
    WrongToken,
}

impl RequestGuard {
    pub(crate) fn new(options: HttpOptions, address: SocketAddr) -> Self {
        let is_local = address.ip().is_loopback();
        let named = options.hosts.iter().map(|host| bare(host).to_ascii_lowercase());
        let local = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).into_iter().chain([address.ip().to_string()]);
        let hosts = (is_local || !options.hosts.is_empty()).then(|| named.chain(local).collect());
        Self { options, hosts }
    }

    /// Returns the caller on whose behalf the request is made, or the reason to refuse it.
    fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<Arc<Caller>, Refusal> {
        let host = self.host(uri, headers).ok_or(Refusal::Host)?;
        if let Some(origin) = headers.get(header::ORIGIN)
            && !self.is_allowed(origin, &host)
        {
            return Err(Refusal::Origin);
        }
        if self.options.tokens.is_empty() {
            return Ok(Arc::clone(&self.options.open_to));
        }
        let shown = headers.get(header::AUTHORIZATION).ok_or(Refusal::NoToken)?;
        let secret = bearer(shown).ok_or(Refusal::WrongToken)?;
        let hash = blake3::hash(secret);
        // All tokens are compared, each in constant time, so that the response time reveals nothing.
        let mut found = None;
        for token in &self.options.tokens {
            if token.hash == hash {
                found = Some(&token.caller);
            }
        }
        found.map(Arc::clone).ok_or(Refusal::WrongToken)
    }

    /// Returns the host named by the request, if it is one of ours. A web page can make its own name resolve to this
    /// server.
    fn host(&self, uri: &Uri, headers: &HeaderMap) -> Option<Authority> {
        let mut named = headers.get_all(header::HOST).iter();
        let host: Authority = match (named.next(), named.next()) {
            (Some(host), None) => host.to_str().ok()?.parse().ok()?,
            (None, None) => uri.authority()?.clone(),
            _ => return None,
        };
        let name = bare(host.host()).to_ascii_lowercase();
        let is_ours = self.hosts.as_ref().is_none_or(|hosts| hosts.contains(&name));
        is_ours.then_some(host)
    }

    /// Returns true if a web page may call: one of this server, or one that the settings name.
    fn is_allowed(&self, origin: &HeaderValue, host: &Authority) -> bool {
        let Ok(origin) = origin.to_str() else { return false };
        let named = |allowed: &String| allowed.trim_end_matches('/').eq_ignore_ascii_case(origin);
        origin.strip_prefix("http://").is_some_and(|page| page.eq_ignore_ascii_case(host.as_str()))
            || self.options.origins.iter().any(named)
    }
}

/// Returns the host without the brackets of an IPv6 address.
fn bare(host: &str) -> &str {
    let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    inner.filter(|inner| inner.parse::<IpAddr>().is_ok()).unwrap_or(host)
}

/// Returns the text after `Bearer`.
fn bearer(header: &HeaderValue) -> Option<&[u8]> {
    let (scheme, secret) = header.as_bytes().split_at_checked(7)?;
    let secret = secret.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !secret.is_empty()).then_some(secret)
}

/// Lets a request pass with its caller and a body whose time is bounded, or answers with a refusal.
pub(crate) async fn pass(State(guard): State<Arc<RequestGuard>>, mut request: Request, next: Next) -> Response {
    let is_open = request.uri().path() == "/health";
    let caller = match guard.check(request.uri(), request.headers()) {
        Ok(caller) => Some(caller),
        Err(Refusal::NoToken | Refusal::WrongToken) if is_open => None,
        Err(refused) => return refusal(&refused),
    };
    // The routes do not need the secret, so it is removed before they could leak it.
    request.headers_mut().remove(header::AUTHORIZATION);
    if let Some(caller) = caller {
        request.extensions_mut().insert(caller);
    }
    next.run(request.map(|body| timed(body, guard.options.body_timeout))).await
}

/// Returns the body with an error at its end if it does not arrive in time.
fn timed(body: Body, limit: Duration) -> Body {
    let deadline = Instant::now() + limit;
    Body::from_stream(stream::unfold(Some(body.into_data_stream()), move |rest| async move {
        let mut rest = rest?;
        match timeout_at(deadline, rest.next()).await {
            Ok(chunk) => Some((chunk?.map_err(io::Error::other), Some(rest))),
            Err(_) => Some((Err(io::Error::new(io::ErrorKind::TimedOut, LATE)), None)),
        }
    }))
}

/// Reads the whole body of a request for a route, or answers that it is too large or late.
pub(crate) async fn read_whole(State(bytes_max): State<usize>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match Limited::new(body, bytes_max).collect().await {
        Ok(body) => next.run(Request::from_parts(parts, Body::from(body.to_bytes()))).await,
        Err(error) if error.is::<LengthLimitError>() => {
            error_response(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large")
        }
        Err(_) => error_response(StatusCode::REQUEST_TIMEOUT, LATE),
    }
}

fn refusal(refused: &Refusal) -> Response {
    let (code, message, challenge) = match refused {
        Refusal::Host => (StatusCode::FORBIDDEN, "this server does not serve that host name", None),
        Refusal::Origin => (StatusCode::FORBIDDEN, "web pages of that origin may not call this server", None),
        Refusal::NoToken => (StatusCode::UNAUTHORIZED, "send a token as `Authorization: Bearer …`", Some("Bearer")),
        Refusal::WrongToken => {
            (StatusCode::UNAUTHORIZED, "the token is not known", Some("Bearer error=\"invalid_token\""))
        }
    };
    let mut response = error_response(code, message);
    if let Some(challenge) = challenge {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
    }
    response
}
