//! Tests that the proxy passes requests, responses and tunnels on without loss.

use std::collections::BTreeMap;
use std::io::ErrorKind;

use wieldy_sandbox::proxy::{SystemResolver, environment};

use super::*;

/// Returns a listener for the host's side, its authority, and a proxy that allows it.
async fn listen() -> (TcpListener, String, World) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authority = format!("good.example:{}", listener.local_addr().unwrap().port());
    let world = World::new(&[format!("{authority}=private")]).await;
    (listener, authority, world)
}

#[tokio::test]
async fn a_request_reaches_the_host_without_what_is_meant_for_the_proxy() {
    let host = Host::named("hello").await;
    let good = format!("good.example:{}", host.port());
    let world = World::new(&[format!("{good}=private")]).await;
    let head = format!(
        "GET http://{good}/a?b HTTP/1.1\r\nHost: {good}\r\nProxy-Authorization: Basic c2VjcmV0\r\nConnection: X-Hop\r\n\
         X-Hop: 1\r\nCookie: a=b\r\n\r\n"
    );
    assert_eq!(world.ask(head).await, page_passed("hello"));
    assert_eq!(
        host.heard(),
        [format!("GET /a?b HTTP/1.1\r\nhost: {good}\r\nCookie: a=b\r\nconnection: close\r\n\r\n")]
    );
}

#[tokio::test]
async fn bodies_are_passed_on_whole_and_no_byte_more() {
    let (listener, good, world) = listen().await;
    let cases = [
        ("Content-Length: 3\r\n\r\nabcGARBAGE", "content-length: 3\r\nconnection: close\r\n\r\nabc"),
        (
            "Transfer-Encoding: Chunked\r\n\r\n3;x=y\r\nabc\r\n00A \r\n0123456789\r\n0\r\nTrailer: x\r\n\r\nGARBAGE",
            "transfer-encoding: chunked\r\nconnection: close\r\n\r\n3\r\nabc\r\na\r\n0123456789\r\n0\r\n\r\n",
        ),
        ("\r\nGARBAGE", "connection: close\r\n\r\n"),
    ];
    for (sent, expected) in cases {
        let ask = world.ask(format!("PUT http://{good}/ HTTP/1.1\r\nHost: {good}\r\n{sent}"));
        let serve = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let expected = format!("PUT / HTTP/1.1\r\nhost: {good}\r\n{expected}");
            let mut heard = vec![0; expected.len()];
            stream.read_exact(&mut heard).await.unwrap();
            assert_eq!(String::from_utf8(heard).unwrap(), expected);
            stream.write_all(page("done").as_bytes()).await.unwrap();
            assert_eq!(read_all(&mut stream).await, "");
        };
        assert_eq!(tokio::join!(ask, serve).0, page_passed("done"));
    }
}

#[tokio::test]
async fn a_body_that_is_not_what_was_announced_never_ends_for_the_host() {
    let (listener, good, world) = listen().await;
    let head = format!("PUT http://{good}/ HTTP/1.1\r\nHost: {good}\r\nTransfer-Encoding: chunked\r\n\r\n");
    for body in [
        "3\r\nabcd\r\n0\r\n\r\n",
        "+3\r\nabc\r\n0\r\n\r\n",
        "zz\r\n",
        "\r\n",
        "3\nabc\r\n0\r\n\r\n",
        "fffffffffffffffff\r\n",
        "3\r\r\nabc\r\n0\r\n\r\n",
    ] {
        let ask = world.ask(format!("{head}{body}"));
        let serve = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            read_all(&mut stream).await
        };
        let (answer, heard) = tokio::join!(ask, serve);
        assert_eq!(status(&answer).0, "400", "{body:?}");
        assert!(!heard.ends_with("0\r\n\r\n"), "{body:?}");
    }
    // A body that ends too early.
    let mut client = world.connect().await;
    let head = format!("PUT http://{good}/ HTTP/1.1\r\nHost: {good}\r\nContent-Length: 4\r\n\r\nabc");
    client.write_all(head.as_bytes()).await.unwrap();
    client.shutdown().await.unwrap();
    let (_host, _) = listener.accept().await.unwrap();
    assert_eq!(status(&read_all(&mut client).await).0, "400");
}

#[tokio::test]
async fn responses_are_passed_on_in_each_framing() {
    let close = "connection: close\r\n\r\n";
    let cases = [
        ("GET", "HTTP/1.1 200 OK\r\n\r\nuntil the end".to_owned(), format!("HTTP/1.1 200 OK\r\n{close}until the end")),
        (
            "GET",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nKeep-Alive: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\nGARBAGE"
                .to_owned(),
            format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n{close}5\r\nhello\r\n0\r\n\r\n"),
        ),
        ("GET", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokGARBAGE".to_owned(), page_passed("ok")),
        (
            "HEAD",
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n".to_owned(),
            format!("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n{close}"),
        ),
        (
            "GET",
            "HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_owned(),
            format!("HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n{}", page_passed("ok")),
        ),
    ];
    for (method, response, expected) in cases {
        let host = Host::new(move |_| response.clone()).await;
        let good = format!("good.example:{}", host.port());
        let world = World::new(&[format!("{good}=private")]).await;
        assert_eq!(world.ask(format!("{method} http://{good}/ HTTP/1.1\r\nHost: {good}\r\n\r\n")).await, expected);
    }
}

#[tokio::test]
async fn a_host_that_asks_the_client_to_continue_is_heard() {
    let (listener, good, world) = listen().await;
    let mut client = world.connect().await;
    let head =
        format!("PUT http://{good}/ HTTP/1.1\r\nHost: {good}\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    let (mut host, _) = listener.accept().await.unwrap();
    read_head(&mut host).await;
    host.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.unwrap();
    assert_eq!(read_head(&mut client).await, "HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"body").await.unwrap();
    let mut body = [0; 4];
    host.read_exact(&mut body).await.unwrap();
    assert_eq!(&body, b"body");
    // The host keeps the connection open; the response ends after its `Content-Length`.
    host.write_all(page("done").as_bytes()).await.unwrap();
    assert_eq!(read_all(&mut client).await, page_passed("done"));
}

#[tokio::test]
async fn a_tunnel_carries_bytes_both_ways_and_each_end_apart() {
    let (listener, good, world) = listen().await;
    // The first bytes of the tunnel come with the request, as some clients send them.
    let mut client = world.connect().await;
    client.write_all(format!("CONNECT {good} HTTP/1.1\r\nHost: {good}\r\n\r\nearly ").as_bytes()).await.unwrap();
    assert_eq!(read_head(&mut client).await, ESTABLISHED);
    let (mut host, _) = listener.accept().await.unwrap();
    host.write_all(b"greeting ").await.unwrap();
    client.write_all(&[0, 255, b'\n']).await.unwrap();
    client.shutdown().await.unwrap();
    let mut heard = Vec::new();
    host.read_to_end(&mut heard).await.unwrap();
    assert_eq!(heard, b"early \0\xff\n");
    // The client has ended its side, and still receives.
    host.write_all(b"late").await.unwrap();
    drop(host);
    assert_eq!(read_all(&mut client).await, "greeting late");
}

#[tokio::test]
async fn a_name_without_address_and_a_host_that_is_not_there_are_bad_gateways() {
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let list = [format!("127.0.0.1:{}", nobody.port()), "lost.example".into(), "empty.example".into()];
    let world = World::with_names(&list, |name| match name {
        "empty.example" => Ok(Vec::new()),
        _ => Err(ErrorKind::NotFound.into()),
    })
    .await;
    let bad = |text: &str| answer("502 Bad Gateway", "", text);
    assert_eq!(world.get("lost.example").await, bad("cannot resolve `lost.example`: entity not found"));
    assert_eq!(world.get("empty.example").await, bad("cannot resolve `empty.example`: it has no address"));
    let refused = format!("cannot connect to {nobody}: Connection refused (os error 111)");
    assert_eq!(world.get(&nobody.to_string()).await, bad(&refused));
    assert_eq!(world.refusals(), []);
}

#[tokio::test]
async fn the_next_address_is_tried_when_one_does_not_answer() {
    let host = Host::named("second").await;
    let good = format!("good.example:{}", host.port());
    let world = World::with_names(&[format!("{good}=private")], |_| {
        Ok(vec!["127.0.0.9".parse().unwrap(), "127.0.0.1".parse().unwrap()])
    })
    .await;
    assert_eq!(world.get(&good).await, page_passed("second"));
}

#[tokio::test]
async fn the_system_resolves_names_by_default() {
    let host = Host::named("local").await;
    let list = [format!("localhost:{}=private", host.port())];
    let addresses = SystemResolver.resolve("localhost").await.unwrap();
    assert!(addresses.contains(&"127.0.0.1".parse().unwrap()), "{addresses:?}");
    let world = World::with_resolver(&list, Arc::new(SystemResolver)).await;
    assert_eq!(world.get(&format!("localhost:{}", host.port())).await, page_passed("local"));
}

#[test]
fn commands_are_told_of_the_proxy() {
    let (proxy, own) = ("http://127.0.0.1:3128", "localhost,127.0.0.1,::1");
    let expected = [
        ("http_proxy", proxy),
        ("https_proxy", proxy),
        ("all_proxy", proxy),
        ("no_proxy", own),
        ("HTTP_PROXY", proxy),
        ("HTTPS_PROXY", proxy),
        ("ALL_PROXY", proxy),
        ("NO_PROXY", own),
    ];
    let expected: BTreeMap<_, _> = expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    assert_eq!(environment(3128), expected);
}
