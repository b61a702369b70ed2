//! Tests the parsing of heads, and what is refused.

use proptest::prelude::*;

use super::super::names::Host;
use super::*;

fn malformed(head: &str) -> bool {
    matches!(Request::parse(head.as_bytes()), Err(Rejected::Malformed(_)))
}

#[test]
fn a_request_is_written_anew() {
    let head = "POST http://Example.com:8080/a?b=c HTTP/1.1\r\nHost: example.com:8080\r\nAccept: */*\r\n\
        Proxy-Authorization: Basic c2VjcmV0\r\nProxy-Connection: keep-alive\r\nConnection: keep-alive, X-Hop , content-length\r\n\
        X-Hop: 1\r\nTE: trailers\r\nUpgrade: h2c\r\nContent-Length: 5\r\nX-Bytes: \u{e9}\r\n\r\n";
    let request = Request::parse(head.as_bytes()).unwrap();
    let expected = "POST /a?b=c HTTP/1.1\r\nhost: example.com:8080\r\nAccept: */*\r\nX-Bytes: \u{e9}\r\n\
        content-length: 5\r\nconnection: close\r\n\r\n";
    let Order::Forward { head, body, is_head } = request.order else { panic!("not a tunnel") };
    assert_eq!(String::from_utf8(head).unwrap(), expected);
    assert_eq!((body, is_head), (Body::Length(5), false));
    assert_eq!(request.target, Authority { host: Host::Name("example.com".into()), port: 8080 });
}

#[test]
fn plain_requests_are_accepted() {
    for (head, path) in [
        ("GET http://h HTTP/1.0\r\n\r\n", "GET / HTTP/1.0"),
        ("GET http://h?q HTTP/1.1\r\nHost: h\r\n\r\n", "GET /?q HTTP/1.1"),
        ("GET HTTP://H:80/ HTTP/1.1\r\nhost:h:80 \r\n\r\n", "GET / HTTP/1.1"),
        ("DELETE http://h/%0d%0a\\@x HTTP/1.1\r\nHost: H\r\n\r\n", "DELETE /%0d%0a\\@x HTTP/1.1"),
    ] {
        let Ok(Request { order: Order::Forward { head, .. }, .. }) = Request::parse(head.as_bytes()) else {
            panic!("refused: {head}")
        };
        assert_eq!(String::from_utf8(head).unwrap().lines().next(), Some(path));
    }
    for head in [
        "CONNECT h:443 HTTP/1.1\r\nHost: h:443\r\n\r\n",
        "CONNECT h:443 HTTP/1.1\r\nHost: h\r\n\r\n",
        "CONNECT h:443 HTTP/1.0\r\n\r\n",
        "CONNECT h:443 HTTP/1.1\r\nHost: h:443\r\nContent-Length: 0\r\n\r\n",
    ] {
        let target = Authority { host: Host::Name("h".into()), port: 443 };
        assert_eq!(Request::parse(head.as_bytes()), Ok(Request { target, order: Order::Tunnel }));
    }
}

#[test]
fn ambiguous_and_malformed_requests_are_refused() {
    let lines = [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Content-Length: 5\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5, 5",
        "Content-Length: +5",
        "Content-Length: -5",
        "Content-Length: 0x5",
        "Content-Length: 5 5",
        "Content-Length:",
        "Content-Length: 18446744073709551616",
        "Content-Length: 5;",
        "Content-Length: ５",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: identity",
        "Transfer-Encoding: \u{b}chunked",
        "Transfer-Encoding:",
        "Host: h",
        "Host: other",
        "X: a\r\n b",
        "X: a\r\n\tb",
        "X: a\rb",
        "X: a\nY: b",
        "X: a\n",
        "X: \0",
        "X : a",
        " X: a",
        ": a",
        "X",
        "X\u{e9}: a",
        "X: a\r\n\r\r\nY: b",
        "X: a\r",
    ];
    for line in lines {
        for first in ["GET http://h/ HTTP/1.1", "CONNECT h:443 HTTP/1.1"] {
            assert!(malformed(&format!("{first}\r\nHost: h\r\n{line}\r\n\r\n")), "{first} {line:?}");
        }
    }
    for head in [
        "GET http://h/ HTTP/1.1\r\n\r\n",
        "GET http://h/ HTTP/1.1\r\nHost: other\r\n\r\n",
        "GET http://h/ HTTP/1.1\r\nHost:\r\n\r\n",
        "GET http://h:81/ HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET http://h/ HTTP/1.1\r\nHost: h, other\r\n\r\n",
        "GET http://h/ HTTP/1.1\r\nHost: x@h\r\n\r\n",
        "GET http://h/ HTTP/1.1\r\n host: h\r\n\r\n",
        "GET http://h/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET h HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET //h/ HTTP/1.1\r\nHost: h\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET https://h/ HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET ftp://h/ HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET file:///etc/passwd HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET gopher://h/ HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET http:/h/ HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET http://h/#x HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET http://h/\u{e9} HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET http://h/ HTTP/2.0\r\nHost: h\r\n\r\n",
        "GET http://h/ HTTP/1.2\r\nHost: h\r\n\r\n",
        "GET http://h/\r\n\r\n",
        "GET  http://h/ HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET http://h/ a HTTP/1.1\r\nHost: h\r\n\r\n",
        "GET http://h/ HTTP/1.1\nHost: h\n\n",
        "\r\n\r\n",
        "CONNECT h:443 HTTP/1.1\r\nHost: other:443\r\n\r\n",
        "CONNECT h:443 HTTP/1.1\r\nHost: h:80\r\n\r\n",
        "CONNECT h:443 HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\n",
        "\u{16}\u{3}\u{1}\r\n\r\n",
        "\u{5}\u{1}\r\n\r\n",
    ] {
        assert!(malformed(head), "{head:?}");
    }
    let many = "X: a\r\n".repeat(HEADERS_MAX);
    assert!(malformed(&format!("GET http://h/ HTTP/1.1\r\nHost: h\r\n{many}\r\n")));
}

#[test]
fn a_response_is_written_anew() {
    let parse = |head: &str, to_head| {
        let response = Response::parse(head.as_bytes(), to_head)?;
        Ok::<_, &str>((String::from_utf8(response.head).unwrap(), response.body))
    };
    let text = |text: &str| text.to_owned();
    assert_eq!(
        parse(
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: keep-alive, X\r\nKeep-Alive: 5\r\nX: 1\r\nSet-Cookie: a\r\n\r\n",
            false
        ),
        Ok((
            text("HTTP/1.1 200 OK\r\nSet-Cookie: a\r\ncontent-length: 3\r\nconnection: close\r\n\r\n"),
            Some(Body::Length(3))
        ))
    );
    assert_eq!(
        parse("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", true),
        Ok((text("HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\n"), Some(Body::Length(0))))
    );
    assert_eq!(
        parse("HTTP/1.0 200 Fine\r\n\r\n", false),
        Ok((text("HTTP/1.1 200 Fine\r\nconnection: close\r\n\r\n"), Some(Body::UntilEnd)))
    );
    assert_eq!(parse("HTTP/1.1 100 Continue\r\n\r\n", false), Ok((text("HTTP/1.1 100 Continue\r\n\r\n"), None)));
    assert_eq!(
        parse("HTTP/1.1 204 None\r\n\r\n", false),
        Ok((text("HTTP/1.1 204 None\r\nconnection: close\r\n\r\n"), Some(Body::Length(0))))
    );
    for bad in [
        "HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\nX: 1\n\n",
        "SSH-2.0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: 1\r\n 2\r\n\r\n",
        "HTTP/1.1 000 OK\r\n\r\n",
    ] {
        assert!(parse(bad, false).is_err(), "{bad:?}");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_the_readers_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Request::parse(&bytes);
        let _ = Response::parse(&bytes, false);
    }

    #[test]
    fn a_forwarded_head_is_exactly_one_plain_request(
        target in "(http://h|HTTP://h:80|http://|)[a-z0-9:@\\[\\]%#?/\\\\\r\n -]{0,20}",
        name in "(?i:host|content-length|transfer-encoding|connection|x)[ \r\n\t]?",
        value in "[a-z0-9,;: \r\n\t\0]{0,12}|chunked",
    ) {
        let head = format!("GET {target} HTTP/1.1\r\nHost: h\r\n{name}: {value}\r\n\r\n");
        if let Ok(Request { order: Order::Forward { head, .. }, target }) = Request::parse(head.as_bytes()) {
            prop_assert_eq!(target.host, Host::Name("h".into()));
            check_lines(&head).unwrap();
            let ends = head.windows(4).filter(|bytes| bytes == b"\r\n\r\n").count();
            prop_assert_eq!(ends, 1);
            let mut headers = [EMPTY_HEADER; 16];
            let mut parsed = httparse::Request::new(&mut headers);
            prop_assert!(parsed.parse(&head).unwrap().is_complete());
            let hosts: Vec<_> = Headers(parsed.headers).values("host").collect();
            let host: &[u8] = if target.port == 80 { b"h" } else { hosts[0] };
            prop_assert_eq!(hosts, vec![host]);
        }
    }
}
