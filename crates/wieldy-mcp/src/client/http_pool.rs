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
const IDLE_MAX: Duration = Duration::from_secs(90);
const KEPT_MAX: usize = 64;
/// The interval at which unusable idle connections are closed.
const TIDY_EVERY: Duration = Duration::from_secs(5);
/// The longest time for the unread rest of a body to arrive. After that its connection is not reused.
const REST_MAX: Duration = Duration::from_millis(50);
/// TCP keepalive: the idle time before the first probe and between probes, and the number of probes.
/// `TCP_USER_TIMEOUT`: the longest time for sent data to be acknowledged.
const ALIVE_AFTER: Duration = Duration::from_secs(15);
const ALIVE_TRIES: u32 = 3;
const TAKEN_WITHIN: Duration = Duration::from_secs(30);

/// The hyper connection, which drives requests and responses when polled.
type HyperConnection = Connection<MaybeHttpsStream<TokioIo<TcpStream>>, Full<Bytes>>;

/// One HTTP/1 connection, which carries one request at a time.
struct HttpConnection {
    sender: SendRequest<Full<Bytes>>,
    /// `None` once the connection has ended. Dropping it wakes the waiting request or body with an error.
    connection: Option<Pin<Box<HyperConnection>>>,
}

impl HttpConnection {
    async fn new(to: Uri) -> Result<Self, Failure> {
        let mut connector = connector().map_err(|why| Failure::Configuration(why.into()))?.clone();
        let made = tokio::time::timeout(CONNECT_TIMEOUT, connector.call(to)).await;
        let io = made.map_err(|_| Failure::unreached("no connection could be made in time"))?;
        let io = io.map_err(|error| {
            Failure::unreached(format!("no connection could be made: {}", innermost(error.as_ref())))
        })?;
        let (sender, connection) = handshake(io).await.map_err(|error| broken(&error))?;
        Ok(Self { sender, connection: Some(Box::pin(connection)) })
    }

    /// Polls the connection.
    fn advance(&mut self, context: &mut Context<'_>) {
        // The cause of the end reaches the caller as the error of the request or the body.
        if self.connection.as_mut().is_some_and(|connection| connection.as_mut().poll(context).is_ready()) {
            self.connection = None;
        }
    }

    /// Returns true if a request can be sent.
    fn is_ready(&mut self) -> bool {
        self.advance(&mut Context::from_waker(Waker::noop()));
        self.connection.is_some() && self.sender.is_ready()
    }

    async fn send(&mut self, request: Request) -> hyper::Result<http::Response<Incoming>> {
        let mut answer = pin!(self.sender.send_request(request));
        poll_fn(|context| {
            self.advance(context);
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
    kept: Mutex<Vec<IdleConnection>>,
    /// True while a task closes unusable connections. Changed only under the lock of the connections.
    is_tidied: AtomicBool,
}

struct IdleConnection {
    line: HttpConnection,
    /// The unread rest of the last body.
    rest: Option<Incoming>,
    since: Instant,
}

impl IdleConnection {
    /// Returns `None` if the connection is unusable, `Some(false)` if it may become usable, `Some(true)` if it is.
    fn is_of_use(&mut self) -> Option<bool> {
        let mut context = Context::from_waker(Waker::noop());
        if self.since.elapsed() > IDLE_MAX {
            return None;
        }
        while let Some(rest) = &mut self.rest {
            self.line.advance(&mut context);
            match Pin::new(rest).poll_frame(&mut context) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(Some(Err(_))) => return None,
                Poll::Ready(None) => self.rest = None,
                Poll::Pending => return (self.since.elapsed() < REST_MAX).then_some(false),
            }
        }
        self.line.is_ready().then_some(true)
    }
}

impl HttpPool {
    /// Sends a request. If the pooled connection turns out to be closed before the request went out, another one is
    /// used.
    pub(super) async fn send(self: &Arc<Self>, to: &Uri, make: impl Fn() -> Request) -> Result<Response, Failure> {
        while let Some(mut line) = self.take() {
            match line.send(make()).await {
                Ok(answer) => return Ok(self.whole(answer, line)),
                Err(error) if error.is_canceled() => {}
                Err(error) => return Err(broken(&error)),
            }
        }
        let mut line = Box::pin(HttpConnection::new(to.clone())).await?;
        match line.send(make()).await {
            Ok(answer) => Ok(self.whole(answer, line)),
            Err(error) if error.is_canceled() => Err(Failure::unreached("the connection was closed at once")),
            Err(error) => Err(broken(&error)),
        }
    }

    fn whole(self: &Arc<Self>, answer: http::Response<Incoming>, line: HttpConnection) -> Response {
        answer.map(|incoming| {
            let rest = Some((line, incoming));
            Body { rest, lines: Arc::clone(self), is_enough: Arc::default() }
        })
    }

    /// Takes a usable connection, the most recently used one first.
    fn take(&self) -> Option<HttpConnection> {
        let mut kept = self.kept();
        for at in (0..kept.len()).rev() {
            match kept[at].is_of_use() {
                Some(true) => return Some(kept.remove(at).line),
                Some(false) => {}
                None => drop(kept.remove(at)),
            }
        }
        None
    }

    fn keep(self: &Arc<Self>, line: HttpConnection, rest: Option<Incoming>) {
        let mut kept = self.kept();
        if kept.len() >= KEPT_MAX || line.connection.is_none() {
            return;
        }
        kept.push(IdleConnection { line, rest, since: Instant::now() });
        if let Ok(runtime) = Handle::try_current()
            && !self.is_tidied.swap(true, Ordering::Relaxed)
        {
            runtime.spawn(tidy(Arc::downgrade(self)));
        }
    }

    fn kept(&self) -> MutexGuard<'_, Vec<IdleConnection>> {
        self.kept.lock().expect("no code panics while it holds the connections")
    }
}

/// Closes unusable idle connections until there are no idle ones.
async fn tidy(lines: Weak<HttpPool>) {
    loop {
        tokio::time::sleep(TIDY_EVERY).await;
        let Some(lines) = lines.upgrade() else { return };
        let mut kept = lines.kept();
        kept.retain_mut(|one| one.is_of_use().is_some());
        if kept.is_empty() {
            lines.is_tidied.store(false, Ordering::Relaxed);
            return;
        }
    }
}

/// A response body. Read to its end, it returns its connection to the pool. Dropped earlier, it closes the connection,
/// unless the reader said that the rest does not matter.
pub(super) struct Body {
    rest: Option<(HttpConnection, Incoming)>,
    lines: Arc<HttpPool>,
    is_enough: Arc<AtomicBool>,
}

impl Body {
    /// Returns the flag by which a reader says that the rest of the body does not matter.
    pub(super) fn enough(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_enough)
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some((line, incoming)) = &mut self.rest else { return Poll::Ready(None) };
        line.advance(context);
        let frame = std::task::ready!(Pin::new(incoming).poll_frame(context));
        if frame.is_none()
            && let Some((mut line, _)) = self.rest.take()
            && line.is_ready()
        {
            self.lines.keep(line, None);
        }
        Poll::Ready(frame)
    }

    fn size_hint(&self) -> SizeHint {
        self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), |(_, incoming)| incoming.size_hint())
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Some((line, incoming)) = self.rest.take()
            && self.is_enough.load(Ordering::Relaxed)
        {
            self.lines.keep(line, Some(incoming));
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
        plain.set_keepalive(Some(ALIVE_AFTER));
        plain.set_keepalive_interval(Some(ALIVE_AFTER));
        plain.set_keepalive_retries(Some(ALIVE_TRIES));
        #[cfg(target_os = "linux")]
        plain.set_tcp_user_timeout(Some(TAKEN_WITHIN));
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
    async fn a_request_over_a_connection_that_was_closed_is_told_so_at_once() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to: Uri = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
        let (line, accepted) = tokio::join!(HttpConnection::new(to), listener.accept());
        let mut line = line.unwrap();
        assert!(line.is_ready());
        drop(accepted);
        tokio::time::sleep(Duration::from_millis(50)).await;
        let request = Request::new(Full::default());
        let sent = tokio::time::timeout(Duration::from_secs(10), line.send(request)).await;
        let error = sent.expect("nobody waits for what will not come").expect_err("nobody is there to answer");
        assert!(error.is_canceled(), "{error:?}");
        assert!(!line.is_ready());
    }

    #[tokio::test]
    async fn however_often_a_connection_is_used_one_task_looks_after_it() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to: Uri = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
        let (line, accepted) = tokio::join!(HttpConnection::new(to), listener.accept());
        let lines = Arc::new(HttpPool::default());
        lines.keep(line.unwrap(), None);
        for _ in 0..10 {
            let line = lines.take().expect("nobody uses it");
            assert!(lines.take().is_none(), "it is used");
            lines.keep(line, None);
        }
        assert_eq!(Handle::current().metrics().num_alive_tasks(), 1);
        drop(accepted);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(lines.take().is_none(), "the server has closed it");
        tokio::time::pause();
        tokio::time::advance(TIDY_EVERY * 2).await;
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert_eq!(Handle::current().metrics().num_alive_tasks(), 0, "there is nothing left to look after");
    }
}
