//! Tests the proxy with real sockets: clients and hosts on loopback, and names that resolve as a test sets.

mod attacks;
mod bounds;
mod passing;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use wieldy_sandbox::proxy::{Allowed, Proxy, Refusal, Resolve};

/// A proxy and its refusals.
struct World {
    proxy: Proxy,
    address: SocketAddr,
    refusals: Arc<Mutex<Vec<Refusal>>>,
}

impl World {
    /// Starts a proxy that allows these hosts; all names resolve to 127.0.0.1.
    async fn new(allowed: &[String]) -> Self {
        Self::with_names(allowed, |_| Ok(vec!["127.0.0.1".parse().unwrap()])).await
    }

    async fn with_names(
        allowed: &[String],
        names: impl Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync + 'static,
    ) -> Self {
        Self::with_resolver(allowed, Arc::new(Names(names))).await
    }

    async fn with_resolver(allowed: &[String], resolver: Arc<dyn Resolve>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let refusals = Arc::new(Mutex::new(Vec::new()));
        let heard = refusals.clone();
        let refused = Arc::new(move |refusal| heard.lock().unwrap().push(refusal));
        let proxy = Proxy::serve(listener, Allowed::new(allowed).unwrap(), resolver, refused);
        Self { proxy, address, refusals }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends these bytes and returns the whole answer.
    async fn ask(&self, bytes: impl AsRef<[u8]>) -> String {
        let mut client = self.connect().await;
        client.write_all(bytes.as_ref()).await.unwrap();
        read_all(&mut client).await
    }

    /// Requests a page by an absolute URL, with a matching header `Host` where possible.
    async fn get(&self, authority: &str) -> String {
        self.ask(format!("GET http://{authority}/ HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await
    }

    /// Requests a tunnel, and returns the head of the answer with the connection.
    async fn tunnel(&self, authority: &str) -> (String, TcpStream) {
        let mut client = self.connect().await;
        let head = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
        client.write_all(head.as_bytes()).await.unwrap();
        (read_head(&mut client).await, client)
    }

    fn refusals(&self) -> Vec<Refusal> {
        std::mem::take(&mut self.refusals.lock().unwrap())
    }
}

/// A resolver with the answers of a test.
struct Names<F>(F);

impl<F: Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync + 'static> Resolve for Names<F> {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move { (self.0)(name) })
    }
}

/// A host that answers each connection once, and stores the received heads.
struct Host {
    address: SocketAddr,
    heard: Arc<Mutex<Vec<String>>>,
    accepting: JoinHandle<()>,
}

impl Host {
    async fn new(response: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        Self::at("127.0.0.1:0".parse().unwrap(), response).await
    }

    async fn at(address: SocketAddr, response: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let tape = heard.clone();
        let accepting = tokio::spawn(async move {
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                let head = read_head(&mut client).await;
                let response = response(&head);
                tape.lock().unwrap().push(head);
                // The client may be gone already.
                let _ = client.write_all(response.as_bytes()).await;
            }
        });
        Self { address, heard, accepting }
    }

    /// Starts a host that answers with its name.
    async fn named(name: &'static str) -> Self {
        Self::new(move |_| page(name)).await
    }

    fn port(&self) -> u16 {
        self.address.port()
    }

    fn heard(&self) -> Vec<String> {
        std::mem::take(&mut self.heard.lock().unwrap())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

fn page(text: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len())
}

/// Returns the page as the proxy passes it on.
fn page_passed(text: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}", text.len())
}

/// Returns an answer of the proxy itself.
fn answer(status: &str, header: &str, text: &str) -> String {
    let text = format!("wieldy: {text}\n");
    format!(
        "HTTP/1.1 {status}\r\n{header}content-type: text/plain; charset=utf-8\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n{text}",
        text.len()
    )
}

async fn read_all(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    String::from_utf8(bytes).unwrap()
}

/// Reads until an empty line or the end.
async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8(head).unwrap()
}

/// Returns the status of an answer, and the reason in its header.
fn status(answer: &str) -> (&str, &str) {
    let reason =
        answer.split_once("x-wieldy-refused: ").map_or("", |(_, rest)| rest.lines().next().unwrap_or_default());
    (answer.get(9..12).unwrap_or_default(), reason)
}

const ESTABLISHED: &str = "HTTP/1.1 200 Connection established\r\n\r\n";
