//! Tests of the HTTP server with requests written by hand.
#![allow(clippy::unwrap_used, reason = "a test may")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use wieldy_core::Caller;
use wieldy_server::{HttpOptions, HttpServer, Token};

/// A server that answers `/who` with the caller and the details of the request.
struct World {
    address: SocketAddr,
    stop: CancellationToken,
    served: JoinHandle<()>,
}

impl World {
    async fn new(change: impl FnOnce(&mut HttpOptions)) -> Self {
        let mut options = HttpOptions::new("127.0.0.1:0".parse().unwrap());
        change(&mut options);
        let server = HttpServer::bind(options).await.unwrap().route("/who", who);
        let server = server.route_with_unread_body("/unread", who);
        let (address, stop) = (server.address(), CancellationToken::new());
        let told = stop.clone();
        let served = tokio::spawn(async move { server.serve(told.cancelled(), async {}).await });
        Self { address, stop, served }
    }

    /// Sends a request with additional headers. Returns the status, the challenge if there is one, and the body.
    async fn ask(&self, path: &str, headers: &[&str], body: &str) -> String {
        let mut head = format!("POST {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
        if !headers.iter().any(|header| header.to_lowercase().starts_with("host:")) {
            head.push_str(&format!("Host: {}\r\n", self.address));
        }
        headers.iter().for_each(|header| head.push_str(&format!("{header}\r\n")));
        self.send(&format!("{head}\r\n{body}")).await
    }

    async fn send(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        read(stream).await
    }

    async fn end(self) {
        self.stop.cancel();
        self.served.await.unwrap();
    }
}

async fn read(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let challenge = head.lines().find(|line| line.starts_with("www-authenticate"));
    let status = head.lines().next().unwrap_or_default().trim_start_matches("HTTP/1.1 ");
    [Some(status), challenge, Some(body)].into_iter().flatten().collect::<Vec<_>>().join(" | ")
}

async fn who(request: Request) -> String {
    let caller = request.extensions().get::<Arc<Caller>>().unwrap().agent.clone();
    let secret = request.headers().get("authorization").is_some();
    match axum::body::to_bytes(request.into_body(), usize::MAX).await {
        Ok(body) => format!("{caller}, {} bytes{}", body.len(), if secret { ", and the secret" } else { "" }),
        Err(error) => format!("{caller}, {error}"),
    }
}

fn two_tokens(options: &mut HttpOptions) {
    options.tokens = vec![Token::new("s3cret-a", Caller::agent("ada")), Token::new("s3cret-b", Caller::agent("bob"))];
}

#[tokio::test]
async fn without_tokens_this_machine_may_call_and_no_web_page() {
    let world = World::new(|options| options.origins = vec!["https://good.example".into()]).await;
    let port = world.address.port();
    assert_eq!(world.ask("/who", &[], "abc").await, "200 OK | local, 3 bytes");
    for host in ["localhost".to_owned(), format!("localhost:{port}"), format!("[::1]:{port}"), "LOCALHOST".into()] {
        assert_eq!(world.ask("/who", &[&format!("Host: {host}")], "").await, "200 OK | local, 0 bytes", "{host}");
    }
    let not_us = r#"403 Forbidden | {"error":{"message":"this server does not serve that host name"}}"#;
    for host in ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""] {
        assert_eq!(world.ask("/who", &[&format!("Host: {host}")], "").await, not_us, "{host}");
        assert_eq!(world.ask("/health", &[&format!("Host: {host}")], "").await, not_us, "{host}");
    }
    assert_eq!(world.ask("/who", &["Host: localhost", "Host: evil.example"], "").await, not_us);
    let same = format!("Origin: http://{}", world.address);
    assert_eq!(world.ask("/who", &[&same], "").await, "200 OK | local, 0 bytes");
    assert_eq!(world.ask("/who", &["Origin: https://good.example"], "").await, "200 OK | local, 0 bytes");
    for origin in ["https://evil.example", "null", "http://localhost:1", "https://good.example.evil.example"] {
        assert_eq!(
            world.ask("/who", &[&format!("Origin: {origin}")], "").await,
            r#"403 Forbidden | {"error":{"message":"web pages of that origin may not call this server"}}"#,
            "{origin}"
        );
    }
    world.end().await;
}

#[tokio::test]
async fn every_request_needs_a_token_if_tokens_are_configured() {
    let world = World::new(two_tokens).await;
    assert_eq!(world.ask("/who", &["Authorization: Bearer s3cret-a"], "").await, "200 OK | ada, 0 bytes");
    assert_eq!(world.ask("/who", &["authorization: bearer s3cret-b"], "").await, "200 OK | bob, 0 bytes");
    assert_eq!(
        world.ask("/who", &[], "").await,
        r#"401 Unauthorized | www-authenticate: Bearer | {"error":{"message":"send a token as `Authorization: Bearer …`"}}"#
    );
    for wrong in ["Bearer s3cret-", "Bearer s3cret-aa", "Bearer", "Bearer ", "Basic czpz", "s3cret-a"] {
        assert_eq!(
            world.ask("/who", &[&format!("Authorization: {wrong}")], "").await,
            r#"401 Unauthorized | www-authenticate: Bearer error="invalid_token" | {"error":{"message":"the token is not known"}}"#,
            "{wrong}"
        );
    }
    let health = world.send("GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
    assert_eq!(health, format!(r#"200 OK | {{"status":"ok","version":"{}"}}"#, env!("CARGO_PKG_VERSION")));
    assert_eq!(
        world.ask("/nowhere", &["Authorization: Bearer s3cret-a"], "").await,
        r#"404 Not Found | {"error":{"message":"there is nothing at this address"}}"#
    );
    assert!(world.ask("/nowhere", &[], "").await.starts_with("401 "), "a stranger learns not even that");
    world.end().await;
}

#[tokio::test]
async fn a_public_address_needs_a_token() {
    let everywhere: SocketAddr = "0.0.0.0:0".parse().unwrap();
    let refused = HttpServer::bind(HttpOptions::new(everywhere)).await.err().unwrap();
    assert_eq!(refused.to_string(), "other machines can reach 0.0.0.0:0, so a token is required");
    let mut options = HttpOptions::new(everywhere);
    two_tokens(&mut options);
    HttpServer::bind(options).await.unwrap();
}

#[tokio::test]
async fn bodies_and_heads_have_a_size_and_a_time() {
    let world = World::new(|options| {
        options.body_bytes_max = 10;
        options.head_timeout = Duration::from_millis(200);
        options.body_timeout = Duration::from_millis(200);
    })
    .await;
    let too_large = r#"413 Payload Too Large | {"error":{"message":"the body is too large"}}"#;
    assert_eq!(world.ask("/who", &[], "0123456789").await, "200 OK | local, 10 bytes");
    assert_eq!(world.ask("/who", &[], "0123456789x").await, too_large);
    let chunked = "POST /who HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(world.send(&format!("{chunked}b\r\n0123456789x\r\n0\r\n\r\n")).await, too_large);
    let slow = "POST /who HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 5\r\n\r\nab";
    assert_eq!(
        world.send(slow).await,
        r#"408 Request Timeout | {"error":{"message":"the body did not arrive in time"}}"#
    );
    assert_eq!(world.ask("/unread", &[], "0123456789x").await, "200 OK | local, 11 bytes");
    assert_eq!(
        world.send(&slow.replace("/who", "/unread")).await,
        "200 OK | local, the body did not arrive in time",
        "the route gets an error and not half a body"
    );
    assert_eq!(world.send("POST /who HTTP/1.1\r\nHost: loc").await, " | ", "half a head is no request");
    world.end().await;
}

#[tokio::test]
async fn silent_connections_do_not_block_others_for_ever() {
    let world = World::new(|options| {
        options.connections_max = 2;
        options.head_timeout = Duration::from_millis(300);
    })
    .await;
    let _silent = [TcpStream::connect(world.address).await.unwrap(), TcpStream::connect(world.address).await.unwrap()];
    assert_eq!(world.ask("/who", &[], "").await, "200 OK | local, 0 bytes");
    world.end().await;
}

#[tokio::test]
async fn a_server_that_stops_still_answers_while_it_winds_down() {
    let server = HttpServer::bind(HttpOptions::new("127.0.0.1:0".parse().unwrap())).await.unwrap().route("/who", who);
    let address = server.address();
    let (stop, ended) = (CancellationToken::new(), CancellationToken::new());
    let (told, winding) = (stop.clone(), ended.clone());
    let served = tokio::spawn(async move { server.serve(told.cancelled(), winding.cancelled()).await });
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let mut first = [0; 15];
    stream.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");
    stop.cancel();
    while TcpStream::connect(address).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await.unwrap();
    let rest = read(stream).await;
    assert!(rest.contains("503 Service Unavailable") && rest.contains(r#""status":"stopping""#), "{rest}");
    ended.cancel();
    served.await.unwrap();
}
