//! The HTTP server: checks the caller and the origin of each request and limits connections.
//!
//! [`guard`] decides for each request whether it may pass and on whose behalf it is made. It does not decide what a
//! caller may do. [`HttpServer`] accepts connections, limits their number, and shuts down gracefully. The program that
//! starts it adds the routes.

mod guard;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use wieldy_core::Caller;

use guard::RequestGuard;
pub use guard::Token;

/// The time that open connections have to end after everything else has ended.
const CLOSING_PATIENCE: Duration = Duration::from_secs(2);
/// The pause after a failed accept, which happens when file descriptors run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The settings of the HTTP server.
#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// The address to listen at; port 0 lets the system choose one.
    pub listen: SocketAddr,
    /// The tokens of callers. Without any, every user of this machine may call, as `open_to`.
    pub tokens: Vec<Token>,
    /// The caller on whose behalf calls are made if there are no tokens.
    pub open_to: Arc<Caller>,
    /// Further host names that clients may use for this server.
    pub hosts: Vec<String>,
    /// Web pages that may call, as `https://example.com`.
    pub origins: Vec<String>,
    /// The maximal size of a request's body, in bytes. A route with unread bodies has a limit of its own.
    pub body_bytes_max: usize,
    /// The maximal number of connections.
    pub connections_max: usize,
    /// The time that the head of a request may take to arrive.
    pub head_timeout: Duration,
    /// The time that the body of a request may take to arrive.
    pub body_timeout: Duration,
}

impl HttpOptions {
    /// Returns settings that accept only this machine, at `listen`.
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            listen,
            tokens: Vec::new(),
            open_to: Arc::new(Caller::local()),
            hosts: Vec::new(),
            origins: Vec::new(),
            body_bytes_max: 4 * 1024 * 1024,
            connections_max: 512,
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
        }
    }
}

/// The reason why the server cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// Other machines could call without a token.
    #[error("other machines can reach {0}, so a token is required")]
    NoToken(SocketAddr),
    /// The server cannot listen at the address.
    #[error("cannot listen at {0}")]
    Listen(SocketAddr, #[source] io::Error),
}

/// An HTTP server that listens, with its routes.
pub struct HttpServer {
    listener: TcpListener,
    address: SocketAddr,
    options: HttpOptions,
    routes: Router,
    stopping: Arc<AtomicBool>,
}

impl HttpServer {
    /// Binds the address. Requests are answered only by [`HttpServer::serve`].
    pub async fn bind(options: HttpOptions) -> Result<Self, HttpError> {
        if options.tokens.is_empty() && !options.listen.ip().is_loopback() {
            return Err(HttpError::NoToken(options.listen));
        }
        let failed = |error| HttpError::Listen(options.listen, error);
        let listener = TcpListener::bind(options.listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let stopping = Arc::new(AtomicBool::new(false));
        let error_response = Arc::clone(&stopping);
        let routes = Router::new().route("/health", get(move || health(error_response.load(Ordering::Acquire))));
        Ok(Self { listener, address, options, routes, stopping })
    }

    /// Returns the address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Adds a route behind the guard. Each request carries an `Arc<Caller>` among its extensions, and its whole body.
    #[must_use]
    pub fn route<F, R, A>(mut self, path: &str, answer: F) -> Self
    where
        F: Fn(Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = A> + Send,
        A: IntoResponse + 'static,
    {
        let whole = axum::middleware::from_fn_with_state(self.options.body_bytes_max, guard::read_whole);
        self.routes = self.routes.route(path, any(answer).layer(whole));
        self
    }

    /// Adds a route behind the guard that reads bodies itself and must limit their size. Reading fails when
    /// `body_timeout` is over.
    #[must_use]
    pub fn route_with_unread_body<F, R, A>(mut self, path: &str, answer: F) -> Self
    where
        F: Fn(Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = A> + Send,
        A: IntoResponse + 'static,
    {
        self.routes = self.routes.route(path, any(answer));
        self
    }

    /// Serves until `stop`. Then accepts no new connection, still answers the open ones until `wind_down` ends, and
    /// closes them.
    pub async fn serve(self, stop: impl Future<Output = ()>, wind_down: impl Future<Output = ()>) {
        let options = self.options;
        let room = Arc::new(Semaphore::new(options.connections_max));
        let head_timeout = options.head_timeout;
        let guard = Arc::new(RequestGuard::new(options, self.address));
        let app = self.routes.fallback(not_found).layer(axum::middleware::from_fn_with_state(guard, guard::pass));
        let graceful = GracefulShutdown::new();
        tokio::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                accepted = accept(&self.listener, &room) => accepted,
            };
            match accepted {
                Ok((stream, permit)) => connection(stream, permit, app.clone(), &graceful, head_timeout),
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        self.stopping.store(true, Ordering::Release);
        drop(self.listener);
        wind_down.await;
        let _ = tokio::time::timeout(CLOSING_PATIENCE, graceful.shutdown()).await;
    }
}

/// Returns the next connection, once the number of open ones allows it.
async fn accept(listener: &TcpListener, room: &Arc<Semaphore>) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(room).acquire_owned().await.expect("the semaphore is never closed");
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok((stream, permit))
}

/// Serves one connection in a task of its own.
fn connection(
    stream: TcpStream,
    permit: OwnedSemaphorePermit,
    app: Router,
    graceful: &GracefulShutdown,
    head_timeout: Duration,
) {
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_timeout).max_buf_size(64 * 1024);
    let served = graceful.watch(http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app)));
    tokio::spawn(async move {
        // A client that disconnected is no error.
        if let Err(error) = served.await {
            tracing::debug!(error = &error as &dyn std::error::Error, "a connection ended");
        }
        drop(permit);
    });
}

async fn health(is_stopping: bool) -> Response {
    let (code, status) =
        if is_stopping { (StatusCode::SERVICE_UNAVAILABLE, "stopping") } else { (StatusCode::OK, "ok") };
    (code, axum::Json(json!({"status": status, "version": env!("CARGO_PKG_VERSION")}))).into_response()
}

async fn not_found() -> Result<Response, Infallible> {
    Ok(error_response(StatusCode::NOT_FOUND, "there is nothing at this address"))
}

/// Builds an error response that programs and people can read.
fn error_response(code: StatusCode, message: &str) -> Response {
    (code, axum::Json(json!({"error": {"message": message}}))).into_response()
}
