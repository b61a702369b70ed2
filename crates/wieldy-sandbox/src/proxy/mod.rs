//! Lets programs of a sandbox reach a list of hosts: a proxy for HTTP that checks every connection.
//!
//! It takes `CONNECT HOST:PORT` and plain requests (`GET http://HOST/PATH`), and nothing else. For each, in this order:
//! the head is read strictly (`http.rs`); the host must be on the list (`names.rs`); its name is resolved once, here;
//! every address of it must be public, or granted (`addresses.rs`); only these addresses are connected to. So a name
//! that resolves differently the second time gains nothing, and a redirect is one more request that is checked in the
//! same way.
//!
//! A connection carries one request: bytes after it are not read. On any error, nothing is passed on. TLS passes
//! unchanged: of a tunnel the proxy knows the requested host, not the one that is named inside.

mod addresses;
mod flow;
mod http;
mod names;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout, timeout_at};

use flow::{Activity, Broken};
use http::{Body, Order, Rejected, Request, Response};
use names::{Authority, Host};

pub use names::{Allowed, InvalidEntry, Reason, Refusal};

/// The maximum number of connections that are served at once; the rest wait in the listener's queue.
const CONNECTIONS_MAX: usize = 64;

/// The maximum time that a client may take to send the head of its request.
const HEAD_TIME_MAX: Duration = Duration::from_secs(10);

/// The maximum time for resolving a name; `CONNECT_TIME_MAX` is for connecting afterwards.
const RESOLVE_TIME_MAX: Duration = Duration::from_secs(10);
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);

/// The maximum number of a host's addresses that are tried.
const ADDRESSES_TRIED_MAX: usize = 8;

/// The maximum number of heads before the one of the final response.
const INTERIM_RESPONSES_MAX: usize = 16;

/// The pause after a connection could not be accepted, as when all descriptors are in use.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A running proxy. Dropping it ends it at once, with all its connections.
#[derive(Debug)]
pub struct Proxy {
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Serves the connections of `listener` until dropped. Calls `refused` for each refusal; it must not block.
    ///
    /// Needs a Tokio runtime with I/O and time.
    pub fn serve(
        listener: TcpListener,
        allowed: Allowed,
        resolver: Arc<dyn Resolve>,
        refused: Arc<dyn Fn(Refusal) + Send + Sync>,
    ) -> Self {
        let gate = Arc::new(Gate { allowed, resolver, refused });
        Self { accepting: tokio::spawn(accept(listener, gate)) }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The task owns the set of connections, and dropping the set aborts each of them.
        self.accepting.abort();
    }
}

/// A resolver of host names.
pub trait Resolve: Send + Sync + 'static {
    /// Returns all addresses of the name, which is in lower case and never an address itself.
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
}

/// A resolver that works like the other programs of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move { Ok(tokio::net::lookup_host((name, 0)).await?.map(|address| address.ip()).collect()) })
    }
}

/// Returns the variables that send a command to the proxy on this port of its own loopback.
///
/// Programs differ in which of them they read, and in which case.
pub fn environment(port: u16) -> BTreeMap<String, String> {
    let proxy = format!("http://127.0.0.1:{port}");
    let own = "localhost,127.0.0.1,::1".to_owned();
    let proxied = ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"];
    let direct = ["no_proxy", "NO_PROXY"];
    let proxied = proxied.map(|name| (name.to_owned(), proxy.clone()));
    proxied.into_iter().chain(direct.map(|name| (name.to_owned(), own.clone()))).collect()
}

async fn accept(listener: TcpListener, gate: Arc<Gate>) {
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        if connections.len() >= CONNECTIONS_MAX {
            connections.join_next().await;
            continue;
        }
        match listener.accept().await {
            Ok((client, _)) => {
                let gate = gate.clone();
                connections.spawn(async move { gate.serve(client).await });
            }
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// The end of a request that got no response from a host.
enum Failure {
    /// The client is gone, or has received a part of a response already.
    Gone,
    /// An answer of the proxy itself: this status and this explanation.
    Status(&'static str, String),
    Refused(Refusal),
}

impl From<Rejected> for Failure {
    fn from(rejected: Rejected) -> Self {
        match rejected {
            Rejected::Malformed(problem) => Self::Status("400 Bad Request", problem.to_owned()),
            Rejected::Refused(refusal) => Self::Refused(refusal),
        }
    }
}

/// The checks for every connection.
struct Gate {
    allowed: Allowed,
    resolver: Arc<dyn Resolve>,
    refused: Arc<dyn Fn(Refusal) + Send + Sync>,
}

impl Gate {
    async fn serve(&self, mut client: TcpStream) {
        // If it cannot be set, small writes are only delayed.
        let _ = client.set_nodelay(true);
        let answer = match self.steps(&mut client).await {
            Ok(Passed::Forwarded) => return flow::close(client).await,
            Ok(Passed::Tunnel { early, host }) => {
                // Both connections are closed, however the tunnel ends.
                let _ = flow::tunnel(early, client, host).await;
                return;
            }
            Err(Failure::Gone) => return,
            Err(Failure::Status(status, text)) => answer(status, "", &text),
            Err(Failure::Refused(refusal)) => {
                let header = format!("x-wieldy-refused: {}\r\n", refusal.reason.as_str());
                let text = refusal.to_string();
                (self.refused)(refusal);
                answer("403 Forbidden", &header, &text)
            }
        };
        if client.write_all(answer.as_bytes()).await.is_ok() {
            flow::close(client).await;
        }
    }

    /// Handles one request, and leaves early if it is refused.
    async fn steps(&self, client: &mut TcpStream) -> Result<Passed, Failure> {
        let (head, early) = read_request(client).await?;
        let request = Request::parse(&head)?;
        let addresses = self.check(&request.target).await?;
        let mut host = connect(&request.target, &addresses).await?;
        match request.order {
            Order::Tunnel => {
                client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await.map_err(|_| Failure::Gone)?;
                Ok(Passed::Tunnel { early, host })
            }
            Order::Forward { head, body, is_head } => {
                forward(&head, body, is_head, early, client, &mut host).await?;
                Ok(Passed::Forwarded)
            }
        }
    }

    /// Checks name and addresses, and returns the addresses to connect to.
    async fn check(&self, target: &Authority) -> Result<Vec<IpAddr>, Failure> {
        let refuse = |reason| Failure::Refused(target.refuse(reason));
        let reach = self.allowed.admit(&target.host, target.port).map_err(refuse)?;
        let name = match &target.host {
            Host::Address(address) => return Ok(vec![*address]),
            Host::Name(name) => name,
        };
        let unresolved =
            |problem: &str| Failure::Status("502 Bad Gateway", format!("cannot resolve `{name}`: {problem}"));
        let addresses = match timeout(RESOLVE_TIME_MAX, self.resolver.resolve(name)).await {
            Err(_) => return Err(unresolved("no answer in time")),
            Ok(Err(error)) => return Err(unresolved(&error.to_string())),
            Ok(Ok(addresses)) if addresses.is_empty() => return Err(unresolved("it has no address")),
            Ok(Ok(addresses)) => addresses,
        };
        self.allowed.check(&addresses, target.port, reach).map_err(refuse)?;
        Ok(addresses)
    }
}

/// The result of a request that was let through.
enum Passed {
    Forwarded,
    Tunnel { early: Vec<u8>, host: TcpStream },
}

fn answer(status: &str, header: &str, text: &str) -> String {
    let length = text.len() + "wieldy: \n".len();
    format!(
        "HTTP/1.1 {status}\r\n{header}content-type: text/plain; charset=utf-8\r\ncontent-length: {length}\r\n\
         connection: close\r\n\r\nwieldy: {text}\n"
    )
}

async fn read_request(client: &mut TcpStream) -> Result<(Vec<u8>, Vec<u8>), Failure> {
    match timeout(HEAD_TIME_MAX, flow::read_head(Vec::new(), client)).await {
        Ok(Ok(head)) => Ok(head),
        Ok(Err(error)) if error.kind() == io::ErrorKind::FileTooLarge => {
            let text = format!("the head of the request has more than {} bytes", http::HEAD_BYTES_MAX);
            Err(Failure::Status("431 Request Header Fields Too Large", text))
        }
        Ok(Err(_)) => Err(Failure::Gone),
        Err(_) => Err(Failure::Status("408 Request Timeout", "the head of the request did not come in time".into())),
    }
}

/// Connects to the first of these addresses that answers; each gets its share of the time.
async fn connect(target: &Authority, addresses: &[IpAddr]) -> Result<TcpStream, Failure> {
    let deadline = Instant::now() + CONNECT_TIME_MAX;
    let tried = &addresses[..addresses.len().min(ADDRESSES_TRIED_MAX)];
    let mut problem = ("502 Bad Gateway", "it has no address".to_owned());
    for (number, address) in tried.iter().enumerate() {
        let share = deadline.duration_since(Instant::now()) / (tried.len() - number) as u32;
        let connecting = TcpStream::connect(SocketAddr::new(*address, target.port));
        problem = match timeout_at(Instant::now() + share, connecting).await {
            Ok(Ok(host)) => {
                // If it cannot be set, small writes are only delayed.
                let _ = host.set_nodelay(true);
                return Ok(host);
            }
            Ok(Err(error)) => ("502 Bad Gateway", error.to_string()),
            Err(_) => ("504 Gateway Timeout", "no answer in time".to_owned()),
        };
    }
    let (status, problem) = problem;
    Err(Failure::Status(status, format!("cannot connect to {}:{}: {problem}", target.host, target.port)))
}

/// Sends a request on, and its response back. The response may come, and end, while the request is still being sent.
async fn forward(
    head: &[u8],
    body: Body,
    is_head: bool,
    early: Vec<u8>,
    client: &mut TcpStream,
    host: &mut TcpStream,
) -> Result<(), Failure> {
    let activity = Activity::new();
    let mut begun = false;
    let (client_reader, mut client_writer) = client.split();
    let (host_reader, mut host_writer) = host.split();
    let mut client_reader = flow::rest(early, client_reader);
    let ended = {
        let request = async {
            host_writer.write_all(head).await.map_err(Broken::Writing)?;
            flow::pass_body(body, &mut client_reader, &mut host_writer, &activity).await?;
            // Pass on the end of the client's data: many servers notice by it that the client no longer waits.
            if flow::said_no_more(&mut client_reader).await {
                host_writer.shutdown().await.map_err(Broken::Writing)?;
            }
            Ok(())
        };
        let response = respond(is_head, host_reader, &mut client_writer, &mut begun, &activity);
        activity.watch(exchange(request, response)).await
    };
    match ended {
        Ok(()) => Ok(()),
        Err(_) if begun => Err(Failure::Gone),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            Err(Failure::Status("504 Gateway Timeout", "the host did not answer in time".into()))
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            Err(Failure::Status("400 Bad Request", "the body is not what the head of the request announces".into()))
        }
        Err(error) => Err(Failure::Status("502 Bad Gateway", format!("the host gave no response: {error}"))),
    }
}

/// Waits for the end of the response. Fails if the client breaks off its request.
async fn exchange(
    request: impl Future<Output = Result<(), Broken>>,
    response: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    let (mut request, mut response) = (pin!(request), pin!(response));
    tokio::select! {
        biased;
        result = &mut response => result,
        result = &mut request => match result {
            // A host that reads no more may have answered already.
            Ok(()) | Err(Broken::Writing(_)) => response.await,
            Err(Broken::Reading(error)) => Err(io::Error::new(io::ErrorKind::InvalidInput, error)),
        },
    }
}

/// Passes a response on; `begun` is set once the client gets a part of the final one.
async fn respond(
    is_head: bool,
    mut host: tokio::net::tcp::ReadHalf<'_>,
    client: &mut tokio::net::tcp::WriteHalf<'_>,
    begun: &mut bool,
    activity: &Activity,
) -> io::Result<()> {
    let mut early = Vec::new();
    for _ in 0..INTERIM_RESPONSES_MAX {
        let (head, more) = flow::read_head(early, &mut host).await?;
        let response = Response::parse(&head, is_head).map_err(io::Error::other)?;
        *begun |= response.body.is_some();
        client.write_all(&response.head).await?;
        if let Some(body) = response.body {
            flow::pass_body(body, &mut flow::rest(more, host), client, activity).await?;
            return Ok(());
        }
        early = more;
    }
    Err(io::Error::other("there were too many interim responses"))
}
