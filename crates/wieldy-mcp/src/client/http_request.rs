//! Sends one HTTP request and reads its response: over pooled connections, with a size limit on everything read.
//! Failures tell a request that never reached the server apart from one that may have.
//!
//! It uses hyper without `reqwest`, which was half of the cost of a call (see `hyper-rustls` in the workspace's
//! `Cargo.toml`).

use bytes::{Bytes, BytesMut};
use futures_util::Stream;
use http::{HeaderValue, StatusCode, Uri, header};
use http_body::Body as _;
use http_body_util::{BodyExt, Full};
use reqwest::Url;

use super::failure::{Failure, http_status};
use super::http_pool::{Body, HttpPool};
use super::sse;

/// Maximum size of one message from a server over HTTP.
pub(super) const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Maximum number of bytes read of an error response.
const ERROR_BODY_BYTES_MAX: usize = 64 * 1024;
/// Maximum number of redirects followed for one request.
const REDIRECTS_MAX: usize = 3;

pub(super) type Request = http::Request<Full<Bytes>>;
pub(super) type Response = http::Response<Body>;

/// A server's URL and the pool of connections to it.
pub(super) struct Target {
    url: Url,
    uri: Uri,
    /// The `Host` header.
    host: HeaderValue,
    pool: HttpPool,
}

impl Target {
    pub(super) fn new(url: Url) -> Result<Self, String> {
        let uri: Uri = url.as_str().parse().map_err(|error| format!("`{url}` is not a URL: {error}"))?;
        // User name and password, which some URLs have, are cut off.
        let host = uri.authority().map_or("", |whole| whole.as_str().rsplit('@').next().unwrap_or_default());
        let host = HeaderValue::from_str(host).map_err(|_| format!("`{url}` is not a URL"))?;
        Ok(Self { url, uri, host, pool: HttpPool::default() })
    }

    /// Sends the request that `make` builds. Follows a redirect only within the same origin and only if it repeats the
    /// message unchanged: other servers must not get our headers.
    pub(super) async fn send(&self, make: impl Fn() -> Request) -> Result<Response, Failure> {
        let response = self.send_to(&self.uri, &make).await?;
        match response.status().is_redirection() {
            true => Box::pin(self.follow(make, response)).await,
            false => Ok(response),
        }
    }

    /// Sends a request to a URI of the same server.
    async fn send_to(&self, uri: &Uri, make: impl Fn() -> Request) -> Result<Response, Failure> {
        let mut request = make();
        request.headers_mut().insert(header::HOST, self.host.clone());
        self.pool.send(uri, request).await
    }

    async fn follow(&self, make: impl Fn() -> Request, mut response: Response) -> Result<Response, Failure> {
        let mut here = self.url.clone();
        for hop in 0.. {
            let status = response.status();
            if !status.is_redirection() {
                break;
            }
            let location = response.headers().get(header::LOCATION).and_then(|location| location.to_str().ok());
            let next = location.and_then(|location| here.join(location).ok());
            let keeps_the_message = matches!(status, StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT);
            let (next, uri) = match (&next, next.as_ref().and_then(|next| next.as_str().parse::<Uri>().ok())) {
                (Some(next), Some(uri))
                    if keeps_the_message && hop < REDIRECTS_MAX && next.origin() == here.origin() =>
                {
                    (next.clone(), uri)
                }
                _ => return Err(not_followed(status, &here, next.as_ref())),
            };
            // Reading the whole body lets the connection go back to the pool.
            read_beginning(response).await;
            response = self.send_to(&uri, &make).await?;
            here = next;
        }
        Ok(response)
    }
}

fn not_followed(status: StatusCode, here: &Url, next: Option<&Url>) -> Failure {
    let to = match next.map(Url::origin) {
        Some(origin) if origin == here.origin() => "itself".to_owned(),
        Some(origin) => format!("`{}`", origin.ascii_serialization()),
        None => "nowhere".to_owned(),
    };
    let told = format!("it redirects to {to} with {}, which wieldy does not follow", http_status(status.as_u16()));
    // 307 and 308 ask for the same message elsewhere, so the server did nothing with it here.
    match status {
        StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT => Failure::Configuration(told.into()),
        _ => Failure::Redirected(told.into()),
    }
}

/// Returns the root cause of an error.
pub(super) fn innermost<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a (dyn std::error::Error + 'static) {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost
}

/// Reads a whole response body.
pub(super) async fn read(response: Response) -> Result<Bytes, Failure> {
    let mut body = response.into_body();
    let too_large = || Failure::transport(sse::TOO_LARGE);
    let length = body.size_hint().lower();
    if length > MESSAGE_BYTES_MAX as u64 {
        return Err(too_large());
    }
    let Some(first) = next_piece(&mut body).await? else { return Ok(Bytes::new()) };
    let Some(mut next) = next_piece(&mut body).await? else {
        // Most bodies come in one piece and need no copy.
        return Ok(first);
    };
    let mut all = BytesMut::with_capacity((length as usize).max(first.len() + next.len()));
    all.extend_from_slice(&first);
    loop {
        if all.len() + next.len() > MESSAGE_BYTES_MAX {
            return Err(too_large());
        }
        all.extend_from_slice(&next);
        match next_piece(&mut body).await? {
            Some(piece) => next = piece,
            None => return Ok(all.freeze()),
        }
    }
}

/// Reads the next piece of a body.
async fn next_piece(body: &mut Body) -> Result<Option<Bytes>, Failure> {
    while let Some(frame) = body.frame().await {
        match frame.map(http_body::Frame::into_data) {
            Ok(Ok(piece)) => return Ok(Some(piece)),
            // Trailers are ignored.
            Ok(Err(_)) => {}
            Err(error) => return Err(Failure::transport(format!("the connection broke: {}", innermost(&error)))),
        }
    }
    Ok(None)
}

/// Reads the beginning of an error response. Usually this is the whole body, so the connection goes back to the pool.
pub(super) async fn read_beginning(response: Response) -> Vec<u8> {
    let (mut body, mut all) = (response.into_body(), Vec::new());
    while let Ok(Some(piece)) = next_piece(&mut body).await {
        let room = ERROR_BODY_BYTES_MAX - all.len();
        all.extend_from_slice(&piece[..piece.len().min(room)]);
        if piece.len() > room {
            break;
        }
    }
    all
}

/// Returns a body as a stream of pieces.
pub(super) fn pieces(response: Response) -> impl Stream<Item = Result<Bytes, hyper::Error>> + Send + 'static {
    response.into_body().into_data_stream()
}
