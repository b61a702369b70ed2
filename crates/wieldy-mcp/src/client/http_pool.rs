//! The connections to one server: `hyper_util`'s pooled client, and a body whose unread rest does not cost the
//! connection.
//!
//! An earlier pool of our own polled connections without tasks of their own. It was not worth its 180 lines: calls that
//! are answered by JSON cost the same, calls that are answered one at a time by event streams 38 instead of 48 µs of
//! processor time (`--example cost_client`).

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::Uri;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tower_service::Service;

use super::failure::Failure;
use super::http_request::{Request, Response, innermost};
use super::http_setup::{CONNECT_TIMEOUT, tls};

/// The longest time that a connection stays idle in the pool, and the maximum number of idle connections.
const IDLE_TIME_MAX: Duration = Duration::from_secs(90);
const IDLE_COUNT_MAX: usize = 64;
/// The longest time for the unread rest of a body to arrive. After that its connection is not reused.
const DRAIN_TIME_MAX: Duration = Duration::from_millis(50);
/// TCP keepalive: the idle time before the first probe and between probes, and the number of probes.
/// `TCP_USER_TIMEOUT`: the longest time for sent data to be acknowledged.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(15);
const KEEPALIVE_TRIES: u32 = 3;
const UNACKED_MAX: Duration = Duration::from_secs(30);

/// The connections to one server.
#[derive(Default)]
pub(super) struct HttpPool(OnceLock<Client<TimedConnector, Full<Bytes>>>);

impl HttpPool {
    /// Sends a request. If a pooled connection turns out to be closed before the request went out, another one is used.
    pub(super) async fn send(&self, to: &Uri, mut request: Request) -> Result<Response, Failure> {
        let client = match self.0.get() {
            Some(client) => client,
            None => {
                let client = new_client().map_err(|why| Failure::Configuration(why.into()))?;
                self.0.get_or_init(|| client)
            }
        };
        *request.uri_mut() = to.clone();
        let response = client.request(request).await.map_err(|error| failure(&error))?;
        Ok(response.map(|rest| Body { rest: Some(rest), skips_rest: Arc::default() }))
    }
}

/// Returns the failure of a request without a response. It leaves out the URL, which may hold a secret.
fn failure(error: &Error) -> Failure {
    let cause = innermost(error);
    if error.is_connect() {
        return Failure::unreached(format!("no connection could be made: {cause}"));
    }
    match cause.downcast_ref::<hyper::Error>() {
        Some(cause) if cause.is_canceled() => Failure::unreached("the connection was closed at once"),
        _ => Failure::transport(format!("the connection broke: {cause}")),
    }
}

/// A response body. Read to its end, its connection returns to the pool. Dropped earlier, the connection is closed,
/// unless the reader said that the rest does not matter.
pub(super) struct Body {
    rest: Option<Incoming>,
    skips_rest: Arc<AtomicBool>,
}

impl Body {
    /// Returns the flag by which a reader says that the rest of the body does not matter.
    pub(super) fn skip_rest_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.skips_rest)
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(rest) = &mut self.rest else { return Poll::Ready(None) };
        let frame = std::task::ready!(Pin::new(rest).poll_frame(context));
        if frame.is_none() {
            self.rest = None;
        }
        Poll::Ready(frame)
    }

    fn size_hint(&self) -> SizeHint {
        self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        let Some(rest) = self.rest.take().filter(|_| self.skips_rest.load(Ordering::Relaxed)) else { return };
        let mut rest = Box::pin(rest);
        // Usually the end is there already, so that no task is needed.
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(frame) = rest.as_mut().poll_frame(&mut context) {
            if !matches!(frame, Some(Ok(_))) {
                return;
            }
        }
        if let Ok(runtime) = Handle::try_current() {
            let drain = async move { while let Some(Ok(_)) = rest.frame().await {} };
            runtime.spawn(tokio::time::timeout(DRAIN_TIME_MAX, drain));
        }
    }
}

fn new_client() -> Result<Client<TimedConnector, Full<Bytes>>, &'static str> {
    let mut client = Client::builder(TokioExecutor::new());
    client.pool_idle_timeout(IDLE_TIME_MAX).pool_max_idle_per_host(IDLE_COUNT_MAX).pool_timer(TokioTimer::new());
    Ok(client.build(TimedConnector(connector()?.clone())))
}

/// A connector whose TCP and TLS handshakes have a time limit together.
#[derive(Clone)]
struct TimedConnector(HttpsConnector<HttpConnector>);

type Connected = Result<MaybeHttpsStream<TokioIo<TcpStream>>, Box<dyn std::error::Error + Send + Sync>>;

impl Service<Uri> for TimedConnector {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = BoxFuture<'static, Connected>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, self.0.call(to));
        Box::pin(async { connecting.await.unwrap_or_else(|_| Err("it took too long".into())) })
    }
}

/// Returns the connector for all servers.
fn connector() -> Result<&'static HttpsConnector<HttpConnector>, &'static str> {
    static CONNECTOR: OnceLock<Result<HttpsConnector<HttpConnector>, String>> = OnceLock::new();
    let make = || {
        let mut plain = HttpConnector::new();
        plain.enforce_http(false);
        plain.set_nodelay(true);
        plain.set_keepalive(Some(KEEPALIVE_AFTER));
        plain.set_keepalive_interval(Some(KEEPALIVE_AFTER));
        plain.set_keepalive_retries(Some(KEEPALIVE_TRIES));
        #[cfg(target_os = "linux")]
        plain.set_tcp_user_timeout(Some(UNACKED_MAX));
        let secure = HttpsConnectorBuilder::new().with_tls_config(tls()?).https_or_http().enable_http1();
        Ok(secure.wrap_connector(plain))
    };
    CONNECTOR.get_or_init(make).as_ref().map_err(String::as_str)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// The listener accepts the connection and never answers. Time is paused, so no test waits for the limit.
    #[tokio::test(start_paused = true)]
    async fn a_server_that_hangs_in_the_tls_handshake_is_unreached() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to: Uri = format!("https://{}/", listener.local_addr().unwrap()).parse().unwrap();
        let pool = HttpPool::default();
        let send = tokio::time::timeout(2 * CONNECT_TIMEOUT, pool.send(&to, Request::new(Full::default())));
        let Err(failure) = send.await.expect("the handshake has a limit") else { panic!("there is no answer") };
        let told = "no connection could be made: it took too long";
        assert!(matches!(&failure, Failure::Unreached(text) if &**text == told), "{failure:?}");
    }
}
