//! The connection pool of one server. The task that sends a request also polls its connection until the body is read.
//! No connection task has to be woken, which `hyper_util`'s pooled client would need. Idle connections stay in the pool
//! for a while.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Uri;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{Connection, SendRequest, handshake};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tower_service::Service;

use super::failure::Failure;
use super::http_request::{Request, Response, innermost};
use super::http_setup::{CONNECT_TIMEOUT, tls};

/// The longest time that a connection stays idle in the pool, and the maximum number of idle connections.
const IDLE_TIME_MAX: Duration = Duration::from_secs(90);
const IDLE_COUNT_MAX: usize = 64;
/// The interval at which unusable idle connections are closed.
const CLOSE_INTERVAL: Duration = Duration::from_secs(5);
/// The longest time for the unread rest of a body to arrive. After that its connection is not reused.
const DRAIN_TIME_MAX: Duration = Duration::from_millis(50);
/// TCP keepalive: the idle time before the first probe and between probes, and the number of probes.
/// `TCP_USER_TIMEOUT`: the longest time for sent data to be acknowledged.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(15);
const KEEPALIVE_TRIES: u32 = 3;
const UNACKED_MAX: Duration = Duration::from_secs(30);

/// The hyper connection, which drives requests and responses when polled.
type HyperConnection = Connection<MaybeHttpsStream<TokioIo<TcpStream>>, Full<Bytes>>;

/// One HTTP/1 connection, which carries one request at a time.
struct HttpConnection {
    sender: SendRequest<Full<Bytes>>,
    /// `None` once the connection has ended. Dropping it wakes the waiting request or body with an error.
    driver: Option<Pin<Box<HyperConnection>>>,
}

impl HttpConnection {
    async fn connect(to: Uri) -> Result<Self, Failure> {
        let mut connector = connector().map_err(|why| Failure::Configuration(why.into()))?.clone();
        let made = tokio::time::timeout(CONNECT_TIMEOUT, connector.call(to)).await;
        let io = made.map_err(|_| Failure::unreached("no connection could be made in time"))?;
        let io = io.map_err(|error| {
            Failure::unreached(format!("no connection could be made: {}", innermost(error.as_ref())))
        })?;
        let (sender, driver) = handshake(io).await.map_err(|error| broken(&error))?;
        Ok(Self { sender, driver: Some(Box::pin(driver)) })
    }

    /// Polls the connection.
    fn drive(&mut self, context: &mut Context<'_>) {
        // The cause of the end reaches the caller as the error of the request or the body.
        if self.driver.as_mut().is_some_and(|driver| driver.as_mut().poll(context).is_ready()) {
            self.driver = None;
        }
    }

    /// Returns true if a request can be sent.
    fn is_ready(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        self.driver.is_some() && self.sender.is_ready()
    }

    async fn send(&mut self, request: Request) -> hyper::Result<http::Response<Incoming>> {
        let mut answer = pin!(self.sender.send_request(request));
        poll_fn(|context| {
            self.drive(context);
            answer.as_mut().poll(context)
        })
        .await
    }
}

/// Returns the failure of a request that was sent and got no response. It leaves out the URL, which may hold a secret.
fn broken(error: &hyper::Error) -> Failure {
    Failure::transport(format!("the connection broke: {}", innermost(error)))
}

/// The idle connections to one server.
#[derive(Default)]
pub(super) struct HttpPool {
    idle: Mutex<Vec<IdleConnection>>,
    /// True while a task closes unusable connections. Changed only under the lock of the connections.
    has_closer: AtomicBool,
}

struct IdleConnection {
    connection: HttpConnection,
    /// The unread rest of the last body.
    rest: Option<Incoming>,
    since: Instant,
}

/// Tells if an idle connection can carry another request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reuse {
    /// Never: it is closed, broken, or was idle for too long.
    Dead,
    /// Not yet: the rest of the last body is still arriving.
    Draining,
    /// Now.
    Ready,
}

impl IdleConnection {
    /// Reads what has arrived of the last body and returns whether the connection can be reused.
    fn reuse(&mut self) -> Reuse {
        let mut context = Context::from_waker(Waker::noop());
        if self.since.elapsed() > IDLE_TIME_MAX {
            return Reuse::Dead;
        }
        while let Some(rest) = &mut self.rest {
            self.connection.drive(&mut context);
            match Pin::new(rest).poll_frame(&mut context) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(Some(Err(_))) => return Reuse::Dead,
                Poll::Ready(None) => self.rest = None,
                Poll::Pending if self.since.elapsed() < DRAIN_TIME_MAX => return Reuse::Draining,
                Poll::Pending => return Reuse::Dead,
            }
        }
        if self.connection.is_ready() { Reuse::Ready } else { Reuse::Dead }
    }
}

impl HttpPool {
    /// Sends a request. If the pooled connection turns out to be closed before the request went out, another one is
    /// used.
    pub(super) async fn send(self: &Arc<Self>, to: &Uri, make: impl Fn() -> Request) -> Result<Response, Failure> {
        while let Some(mut connection) = self.take_ready() {
            match connection.send(make()).await {
                Ok(answer) => return Ok(self.into_response(answer, connection)),
                Err(error) if error.is_canceled() => {}
                Err(error) => return Err(broken(&error)),
            }
        }
        let mut connection = Box::pin(HttpConnection::connect(to.clone())).await?;
        match connection.send(make()).await {
            Ok(answer) => Ok(self.into_response(answer, connection)),
            Err(error) if error.is_canceled() => Err(Failure::unreached("the connection was closed at once")),
            Err(error) => Err(broken(&error)),
        }
    }

    fn into_response(self: &Arc<Self>, head: http::Response<Incoming>, connection: HttpConnection) -> Response {
        head.map(|incoming| {
            let rest = Some((connection, incoming));
            Body { rest, pool: Arc::clone(self), skips_rest: Arc::default() }
        })
    }

    /// Takes a usable connection, the most recently used one first.
    fn take_ready(&self) -> Option<HttpConnection> {
        let mut idle = self.idle();
        for at in (0..idle.len()).rev() {
            match idle[at].reuse() {
                Reuse::Ready => return Some(idle.remove(at).connection),
                Reuse::Draining => {}
                Reuse::Dead => drop(idle.remove(at)),
            }
        }
        None
    }

    fn put_back(self: &Arc<Self>, connection: HttpConnection, rest: Option<Incoming>) {
        let mut idle = self.idle();
        if idle.len() >= IDLE_COUNT_MAX || connection.driver.is_none() {
            return;
        }
        idle.push(IdleConnection { connection, rest, since: Instant::now() });
        if let Ok(runtime) = Handle::try_current()
            && !self.has_closer.swap(true, Ordering::Relaxed)
        {
            runtime.spawn(close_dead(Arc::downgrade(self)));
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<IdleConnection>> {
        self.idle.lock().expect("no code panics while it holds the connections")
    }
}

/// Closes unusable idle connections until there are no idle ones.
async fn close_dead(pool: Weak<HttpPool>) {
    loop {
        tokio::time::sleep(CLOSE_INTERVAL).await;
        let Some(pool) = pool.upgrade() else { return };
        let mut idle = pool.idle();
        idle.retain_mut(|one| one.reuse() != Reuse::Dead);
        if idle.is_empty() {
            pool.has_closer.store(false, Ordering::Relaxed);
            return;
        }
    }
}

/// A response body. Read to its end, it returns its connection to the pool. Dropped earlier, it closes the connection,
/// unless the reader said that the rest does not matter.
pub(super) struct Body {
    rest: Option<(HttpConnection, Incoming)>,
    pool: Arc<HttpPool>,
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
        let Some((connection, incoming)) = &mut self.rest else { return Poll::Ready(None) };
        connection.drive(context);
        let frame = std::task::ready!(Pin::new(incoming).poll_frame(context));
        if frame.is_none()
            && let Some((mut connection, _)) = self.rest.take()
            && connection.is_ready()
        {
            self.pool.put_back(connection, None);
        }
        Poll::Ready(frame)
    }

    fn size_hint(&self) -> SizeHint {
        self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), |(_, incoming)| incoming.size_hint())
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Some((connection, incoming)) = self.rest.take()
            && self.skips_rest.load(Ordering::Relaxed)
        {
            self.pool.put_back(connection, Some(incoming));
        }
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
    use super::*;

    /// The server closes the connection just before a request goes out: the error says that it did not go out.
    #[tokio::test]
    async fn a_request_over_a_closed_connection_fails_at_once() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to: Uri = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
        let (connection, accepted) = tokio::join!(HttpConnection::connect(to), listener.accept());
        let mut connection = connection.unwrap();
        assert!(connection.is_ready());
        drop(accepted);
        tokio::time::sleep(Duration::from_millis(50)).await;
        let request = Request::new(Full::default());
        let sent = tokio::time::timeout(Duration::from_secs(10), connection.send(request)).await;
        let error = sent.expect("the request fails without waiting").expect_err("the connection is closed");
        assert!(error.is_canceled(), "{error:?}");
        assert!(!connection.is_ready());
    }

    #[tokio::test]
    async fn a_reused_connection_has_only_one_task() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to: Uri = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
        let (connection, accepted) = tokio::join!(HttpConnection::connect(to), listener.accept());
        let pool = Arc::new(HttpPool::default());
        pool.put_back(connection.unwrap(), None);
        for _ in 0..10 {
            let connection = pool.take_ready().expect("the connection is free");
            assert!(pool.take_ready().is_none(), "it is used");
            pool.put_back(connection, None);
        }
        assert_eq!(Handle::current().metrics().num_alive_tasks(), 1);
        drop(accepted);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(pool.take_ready().is_none(), "the server has closed it");
        tokio::time::pause();
        tokio::time::advance(CLOSE_INTERVAL * 2).await;
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert_eq!(Handle::current().metrics().num_alive_tasks(), 0, "the task has ended");
    }
}
