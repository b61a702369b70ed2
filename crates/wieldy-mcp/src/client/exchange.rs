//! One request of HTTP and its answer: over connections that are kept, with bounds for all that is read. What never reached the
//! server is told apart from what may have.

use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::Stream;
use http::{StatusCode, Uri, header};
use http_body::Body as _;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use reqwest::Url;
use tower_service::Service;

use super::events;
use super::failure::{Failure, http_status};
use super::http::{CONNECT_TIMEOUT, tls};

/// How large one message may be.
pub(super) const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;
/// How much is read of an answer that is only looked at for what went wrong.
const COMPLAINT_BYTES_MAX: usize = 64 * 1024;
/// How often a request is sent elsewhere within the server.
const HOPS_MAX: usize = 3;
/// How long a connection that nobody needs is kept.
const IDLE_MAX: Duration = Duration::from_secs(90);
/// When the other end of a connection that says nothing is asked whether it is still there, how often, and until when it must
/// have taken what was sent.
const ALIVE_AFTER: Duration = Duration::from_secs(15);
const ALIVE_TRIES: u32 = 3;
const TAKEN_WITHIN: Duration = Duration::from_secs(30);

pub(super) type Request = http::Request<Full<Bytes>>;
pub(super) type Response = http::Response<Incoming>;
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Where a server is, in both forms that are needed.
pub(super) struct Place {
    url: Url,
    uri: Uri,
}

impl Place {
    pub(super) fn new(url: Url) -> Result<Self, String> {
        let uri = url.as_str().parse().map_err(|error| format!("`{url}` is no address: {error}"))?;
        Ok(Self { url, uri })
    }

    /// Sends the request that `make` makes. It is followed to where the server sends it within itself if that keeps the message
    /// whole: others must not get what is sent along.
    pub(super) async fn send(&self, make: impl Fn() -> Request) -> Result<Response, Failure> {
        let client = client().map_err(|why| Failure::Configuration(why.into()))?;
        let mut request = make();
        *request.uri_mut() = self.uri.clone();
        let response = client.request(request).await.map_err(|error| unsent(&error))?;
        match response.status().is_redirection() {
            true => Box::pin(self.follow(client, make, response)).await,
            false => Ok(response),
        }
    }

    async fn follow(
        &self,
        client: &Client,
        make: impl Fn() -> Request,
        mut response: Response,
    ) -> Result<Response, Failure> {
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
            let mut request = make();
            *request.uri_mut() = uri;
            response = client.request(request).await.map_err(|error| unsent(&error))?;
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
    let status = http_status(status.as_u16());
    Failure::Configuration(format!("it redirects to {place} by {status}, which is not followed").into())
}

/// Why a request has no answer, without its address: that may hold a secret.
fn unsent(error: &legacy::Error) -> Failure {
    let innermost = innermost(error);
    match error.is_connect() {
        true if innermost.is::<tokio::time::error::Elapsed>() => {
            Failure::unreached("no connection could be made in time")
        }
        true => Failure::unreached(format!("no connection could be made: {innermost}")),
        false => Failure::transport(format!("the connection broke: {innermost}")),
    }
}

fn innermost<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a (dyn std::error::Error + 'static) {
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
async fn piece(body: &mut Incoming) -> Result<Option<Bytes>, Failure> {
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

type Client = legacy::Client<Connector, Full<Bytes>>;

/// The client of all servers; it keeps connections for the next request.
fn client() -> Result<&'static Client, &'static str> {
    static CLIENT: OnceLock<Result<Client, String>> = OnceLock::new();
    let make = || {
        let mut plain = HttpConnector::new();
        plain.enforce_http(false);
        plain.set_nodelay(true);
        plain.set_keepalive(Some(ALIVE_AFTER));
        plain.set_keepalive_interval(Some(ALIVE_AFTER));
        plain.set_keepalive_retries(Some(ALIVE_TRIES));
        #[cfg(target_os = "linux")]
        plain.set_tcp_user_timeout(Some(TAKEN_WITHIN));
        let secure = HttpsConnectorBuilder::new().with_tls_config(tls()?).https_or_http().enable_http1();
        let mut builder = legacy::Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE_MAX);
        Ok(builder.build(Connector(secure.wrap_connector(plain))))
    };
    CLIENT.get_or_init(make).as_ref().map_err(String::as_str)
}

/// Makes connections, or gives up in time.
#[derive(Clone)]
struct Connector(HttpsConnector<HttpConnector>);

impl Service<Uri> for Connector {
    type Response = <HttpsConnector<HttpConnector> as Service<Uri>>::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let made = tokio::time::timeout(CONNECT_TIMEOUT, self.0.call(to));
        Box::pin(async { made.await? })
    }
}
