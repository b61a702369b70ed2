//! One request of HTTP and its answer: over connections that are kept, with bounds for all that is read. What never reached the
//! server is told apart from what may have.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::Stream;
use http::uri::PathAndQuery;
use http::{HeaderValue, StatusCode, Uri, header};
use http_body::Body as _;
use http_body_util::{BodyExt, Full};
use reqwest::Url;

use super::events;
use super::failure::{Failure, http_status};
use super::line::{Body, Lines};

/// How large one message may be.
pub(super) const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;
/// How much is read of an answer that is only looked at for what went wrong.
const COMPLAINT_BYTES_MAX: usize = 64 * 1024;
/// How often a request is sent elsewhere within the server.
const HOPS_MAX: usize = 3;

pub(super) type Request = http::Request<Full<Bytes>>;
pub(super) type Response = http::Response<Body>;

/// Where a server is, and the connections to it.
pub(super) struct Place {
    url: Url,
    uri: Uri,
    /// The name that it is asked for by.
    host: HeaderValue,
    lines: Arc<Lines>,
}

impl Place {
    pub(super) fn new(url: Url) -> Result<Self, String> {
        let uri: Uri = url.as_str().parse().map_err(|error| format!("`{url}` is no address: {error}"))?;
        // Without the name and password that some addresses have.
        let host = uri.authority().map_or("", |whole| whole.as_str().rsplit('@').next().unwrap_or_default());
        let host = HeaderValue::from_str(host).map_err(|_| format!("`{url}` is no address"))?;
        Ok(Self { url, uri, host, lines: Arc::default() })
    }

    /// Sends the request that `make` makes. It is followed to where the server sends it within itself if that keeps the message
    /// whole: others must not get what is sent along.
    pub(super) async fn send(&self, make: impl Fn() -> Request) -> Result<Response, Failure> {
        let response = self.send_to(&self.uri, &make).await?;
        match response.status().is_redirection() {
            true => Box::pin(self.follow(make, response)).await,
            false => Ok(response),
        }
    }

    /// Sends a request to some place within the server.
    async fn send_to(&self, uri: &Uri, make: impl Fn() -> Request) -> Result<Response, Failure> {
        let path = uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let make = || {
            let mut request = make();
            *request.uri_mut() = path.clone().into();
            request.headers_mut().insert(header::HOST, self.host.clone());
            request
        };
        self.lines.send(uri, make).await
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
                (Some(next), Some(uri)) if keeps_the_message && hop < HOPS_MAX && next.origin() == here.origin() => {
                    (next.clone(), uri)
                }
                _ => return Err(redirected(status, &here, next.as_ref())),
            };
            // The connection is used again only when all was read.
            glimpse(response).await;
            response = self.send_to(&uri, &make).await?;
            here = next;
        }
        Ok(response)
    }
}

fn redirected(status: StatusCode, here: &Url, next: Option<&Url>) -> Failure {
    let place = match next.map(Url::origin) {
        Some(origin) if origin == here.origin() => "itself".to_owned(),
        Some(origin) => format!("`{}`", origin.ascii_serialization()),
        None => "nowhere".to_owned(),
    };
    let told = format!("it redirects to {place} by {}, which is not followed", http_status(status.as_u16()));
    // By these two the message is to be sent again as it is, so that nothing was done with it here.
    match status {
        StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT => Failure::Configuration(told.into()),
        _ => Failure::Redirected(told.into()),
    }
}

/// What an error came from.
pub(super) fn innermost<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a (dyn std::error::Error + 'static) {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost
}

/// All of an answer.
pub(super) async fn read(response: Response) -> Result<Bytes, Failure> {
    let mut body = response.into_body();
    let too_large = || Failure::transport(events::TOO_LARGE);
    let length = body.size_hint().lower();
    if length > MESSAGE_BYTES_MAX as u64 {
        return Err(too_large());
    }
    let Some(first) = piece(&mut body).await? else { return Ok(Bytes::new()) };
    let Some(mut next) = piece(&mut body).await? else {
        // Most answers come in one piece.
        return Ok(first);
    };
    let mut all = BytesMut::with_capacity((length as usize).max(first.len() + next.len()));
    all.extend_from_slice(&first);
    loop {
        if all.len() + next.len() > MESSAGE_BYTES_MAX {
            return Err(too_large());
        }
        all.extend_from_slice(&next);
        match piece(&mut body).await? {
            Some(piece) => next = piece,
            None => return Ok(all.freeze()),
        }
    }
}

/// The next piece of an answer.
async fn piece(body: &mut Body) -> Result<Option<Bytes>, Failure> {
    while let Some(frame) = body.frame().await {
        match frame.map(http_body::Frame::into_data) {
            Ok(Ok(piece)) => return Ok(Some(piece)),
            // Something that follows an answer.
            Ok(Err(_)) => {}
            Err(error) => return Err(Failure::transport(format!("the connection broke: {}", innermost(&error)))),
        }
    }
    Ok(None)
}

/// As much of an answer as is looked at where it is none. Mostly this is all of it, so that the connection can be used again.
pub(super) async fn glimpse(response: Response) -> Vec<u8> {
    let (mut body, mut all) = (response.into_body(), Vec::new());
    while let Ok(Some(piece)) = piece(&mut body).await {
        let room = COMPLAINT_BYTES_MAX - all.len();
        all.extend_from_slice(&piece[..piece.len().min(room)]);
        if piece.len() > room {
            break;
        }
    }
    all
}

/// The pieces of an answer that has no end that is known.
pub(super) fn pieces(response: Response) -> impl Stream<Item = Result<Bytes, hyper::Error>> + Send + 'static {
    response.into_body().into_data_stream()
}
