//! Tests attempts to reach hosts that are not listed, each with a harmless twin that must work.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::AsyncWriteExt;
use wieldy_sandbox::proxy::Reason;

use super::*;

/// Requests each host in both ways, and returns those with an unexpected answer.
async fn unexpected(world: &World, hosts: &[String], expected: &[(&str, &str)]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for host in hosts {
        let plain = world.get(host).await;
        let (tunnel, _) = world.tunnel(host).await;
        for answer in [plain, tunnel] {
            if !expected.contains(&status(&answer)) {
                found.push((host.clone(), answer));
            }
        }
    }
    found
}

#[tokio::test]
async fn addresses_that_are_not_public_are_refused_before_connecting() {
    let trap = Host::named("trap").await;
    let port = trap.port();
    let world = World::new(&["good.example:*=private".into()]).await;
    let literals = [
        "127.0.0.1",
        "127.8.9.10",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.254",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "100.100.100.200",
        "168.63.129.16",
        "0.0.0.0",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "192.0.2.1",
        "198.18.0.1",
        "[::1]",
        "[::]",
        "[fc00::1]",
        "[fd00:ec2::254]",
        "[fe80::1]",
        "[ff02::1]",
        "[::7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "[2001:0:7f00:1::]",
        "[2001:db8::1]",
    ];
    let hosts: Vec<String> = literals.iter().map(|host| format!("{host}:{port}")).collect();
    assert_eq!(unexpected(&world, &hosts, &[("403", "private-address")]).await, []);
    let refused: Vec<_> = world.refusals().into_iter().map(|refusal| (refusal.host, refusal.port)).collect();
    let expected: Vec<_> =
        literals.iter().flat_map(|host| [host, host]).map(|host| ((*host).to_owned(), port)).collect();
    assert_eq!(refused, expected);
    assert_eq!(trap.heard(), [""; 0]);

    assert_eq!(world.get(&format!("good.example:{port}")).await, page_passed("trap"));
}

#[tokio::test]
async fn a_listed_address_is_reached_and_its_neighbours_are_not() {
    let host = Host::named("local").await;
    let port = host.port();
    let world = World::new(&[format!("127.0.0.1:{port}")]).await;
    assert_eq!(world.get(&format!("127.0.0.1:{port}")).await, page_passed("local"));
    assert_eq!(world.tunnel(&format!("127.0.0.1:{port}")).await.0, ESTABLISHED);
    let others = [format!("127.0.0.2:{port}"), format!("[::1]:{port}"), format!("0.0.0.0:{port}")];
    assert_eq!(unexpected(&world, &others, &[("403", "private-address")]).await, []);
    assert_eq!(unexpected(&world, &["127.0.0.1:1".into()], &[("403", "port")]).await, []);
}

/// Every name resolves to the trap, and every name below `example.com` is allowed: only the check of the spelling
/// protects the trap.
#[tokio::test]
async fn odd_spellings_of_hosts_are_refused() {
    let trap = Host::named("trap").await;
    let port = trap.port();
    let list = ["*.example.com:*=private", "*.com:*=private", "127.0.0.1:*", "[::1]:*", "local.example:*=private"];
    let world = World::new(&list.map(String::from)).await;
    let spellings = [
        "127.1",
        "127.0.1",
        "0x7f000001",
        "0X7F.1",
        "0x7f.0.0.1",
        "2130706433",
        "017700000001",
        "0177.0.0.1",
        "127.0.0.01",
        "127.0.0.1.",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[0:0:0:0:0:ffff:127.0.0.1]",
        "[::1%25lo]",
        "[::1%lo]",
        "a.example.com.",
        "a..example.com",
        ".example.com",
        "%61.example.com",
        "a%2eexample.com",
        "127.0.0.1%2f",
        "%31%32%37.0.0.1",
        "user@a.example.com",
        "user:password@a.example.com",
        "a.example.com@evil.example",
        "a.example.com:80@evil.example",
        "a.example.com\\@evil.example",
        "evil.example\\.example.com",
        "a_b.example.com",
        "-a.example.com",
        "*.example.com",
        "a.example.com:443:443",
        "a.example.com,b.example.com",
        "a.example.com;b",
        "a.example.com&b",
        "[a.example.com]",
        "::1",
    ];
    let hosts: Vec<String> = spellings.iter().map(|host| format!("{host}:{port}")).collect();
    assert_eq!(unexpected(&world, &hosts, &[("403", "spelling")]).await, []);
    assert_eq!(world.refusals().len(), 2 * hosts.len());

    // These are not valid as a target, or are another target than they look like.
    let confused = [
        "a.example.com#evil.example",
        "#@a.example.com",
        "a.example.com evil",
        "a.example.com\tevil",
        "a.example.com\nevil",
        "a.example.com\r\nX: y",
        "a.example.com\0",
        "ä.example.com",
        "a。example.com",
        "a．example.com",
        "ａ.example.com",
        "①②⑦.⓪.⓪.①",
        "",
        " ",
        "a.example.com:0",
        "a.example.com:+80",
        "a.example.com:080",
        "a.example.com:65536",
        "a.example.com:",
        "a.example.com:80/..@evil",
        "a.example.com:8O",
    ];
    let confused = confused.map(String::from);
    assert_eq!(unexpected(&world, &confused, &[("403", "spelling"), ("400", "")]).await, []);
    assert_eq!(trap.heard(), [""; 0]);

    for twin in ["A.Example.COM", "127.0.0.1", "xn--a-ecp.com", "local.example"] {
        assert_eq!(world.get(&format!("{twin}:{port}")).await, page_passed("trap"), "{twin}");
        assert_eq!(world.tunnel(&format!("{twin}:{port}")).await.0, ESTABLISHED, "{twin}");
    }
}

/// P-WEB-09.
#[tokio::test]
async fn a_star_does_not_match_within_a_label() {
    let trap = Host::named("trap").await;
    let port = trap.port();
    let world = World::new(&[format!("*.example.com:{port}=private")]).await;
    let others = ["evilexample.com", "example.com.evil", "a.example.com.evil", "example.com", "a.example.co", "com"];
    let hosts = others.map(|host| format!("{host}:{port}"));
    assert_eq!(unexpected(&world, &hosts, &[("403", "not-listed")]).await, []);
    assert_eq!(trap.heard(), [""; 0]);
    assert_eq!(world.get(&format!("a.b.example.com:{port}")).await, page_passed("trap"));
}

#[tokio::test]
async fn a_refusal_tells_the_client_what_was_refused_and_how_to_allow_it() {
    let world = World::new(&["good.example".into()]).await;
    let text = "evil.example:443 was refused: the `network` list does not name it; to allow it, add `evil.example` to the list";
    let expected = answer("403 Forbidden", "x-wieldy-refused: not-listed\r\n", text);
    assert_eq!(world.ask("CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n").await, expected);
    let refusal = Refusal { host: "evil.example".into(), port: 443, reason: Reason::NotListed };
    assert_eq!(world.refusals(), [refusal]);
    // The proxy reads the body of a refused request for a while, so that the client gets no reset.
    let mut client = world.connect().await;
    let head = "POST http://evil.example:443/ HTTP/1.1\r\nHost: evil.example:443\r\nContent-Length: 500000\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(read_all(&mut client).await, expected);
    for _ in 0..5 {
        client.write_all(&[b'x'; 100_000]).await.unwrap();
    }
}

// Shows: B9.3
#[tokio::test]
async fn each_hop_of_a_redirect_is_checked() {
    let inside = Host::named("metadata").await;
    let inside_port = inside.port();
    // /N redirects to /N+1, and /last to a host that is not allowed.
    let host = Host::new(move |head| {
        let path = head.split(' ').nth(1).unwrap();
        let host = head.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
        let location = match path {
            "/5" => format!("http://127.0.0.2:{inside_port}/"),
            "/loop" => format!("http://{host}/loop"),
            hop => format!("http://{host}/{}", hop[1..].parse::<u32>().unwrap() + 1),
        };
        format!("HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n")
    })
    .await;
    let world = World::new(&[format!("hops.example:{}=private", host.port())]).await;
    // Follows redirects as a client would, and returns their number and the last answer.
    let follow = async |begin: &str| {
        let mut url = format!("http://hops.example:{}{begin}", host.port());
        for hop in 0..10 {
            let authority = url["http://".len()..].split('/').next().unwrap();
            let answer = world.ask(format!("GET {url} HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await;
            match answer.lines().find_map(|line| line.strip_prefix("Location: ")) {
                Some(location) => url = location.to_owned(),
                None => return (hop, answer[9..12].to_owned()),
            }
        }
        (10, "given up".to_owned())
    };
    assert_eq!(follow("/5").await, (1, "403".to_owned()));
    assert_eq!(follow("/1").await, (5, "403".to_owned()));
    assert_eq!(follow("/loop").await, (10, "given up".to_owned()));
    assert_eq!(inside.heard(), [""; 0]);
    let refusal =
        Refusal { host: "127.0.0.2".into(), port: inside_port, reason: Reason::Private("127.0.0.2".parse().unwrap()) };
    assert_eq!(world.refusals(), [refusal.clone(), refusal]);
}

/// 127.0.0.1 is granted and so plays a public address; 127.0.0.2 is not granted.
#[tokio::test]
async fn a_name_that_changes_its_address_gains_nothing() {
    let outside = Host::named("outside").await;
    let port = outside.port();
    let inside = Host::at(format!("127.0.0.2:{port}").parse().unwrap(), |_| page("inside")).await;
    let answers = ["127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.2"];
    let answers = Mutex::new(VecDeque::from(answers.map(|address| address.parse::<IpAddr>().unwrap())));
    let world = World::with_names(&[format!("127.0.0.1:{port}"), format!("turncoat.example:{port}")], move |_| {
        Ok(vec![answers.lock().unwrap().pop_front().unwrap()])
    })
    .await;
    let name = format!("turncoat.example:{port}");
    // A second lookup for the connection would already have used the second answer.
    assert_eq!(world.get(&name).await, page_passed("outside"));
    assert_eq!(status(&world.get(&name).await), ("403", "private-address"));
    assert_eq!(world.tunnel(&name).await.0, ESTABLISHED);
    assert_eq!(status(&world.tunnel(&name).await.0), ("403", "private-address"));
    assert_eq!(inside.heard(), [""; 0]);
    let refusal =
        Refusal { host: "turncoat.example".into(), port, reason: Reason::Private("127.0.0.2".parse().unwrap()) };
    assert_eq!(world.refusals(), [refusal.clone(), refusal]);
}

#[tokio::test]
async fn one_private_address_among_the_answers_spoils_all() {
    let host = Host::named("outside").await;
    let port = host.port();
    let world = World::with_names(&[format!("127.0.0.1:{port}"), format!("mixed.example:{port}")], |_| {
        Ok(vec!["127.0.0.1".parse().unwrap(), "::ffff:127.0.0.1".parse().unwrap()])
    })
    .await;
    assert_eq!(status(&world.get(&format!("mixed.example:{port}")).await), ("403", "private-address"));
    assert_eq!(host.heard(), [""; 0]);
}

#[tokio::test]
async fn a_name_is_resolved_only_if_it_is_listed() {
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = asked.clone();
    let world = World::with_names(&["good.example".into()], move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
        Ok(Vec::new())
    })
    .await;
    // A name can carry data out, so it must not even be resolved.
    assert_eq!(status(&world.get("c2VjcmV0.evil.example").await), ("403", "not-listed"));
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    assert_eq!(status(&world.get("good.example").await).0, "502");
    assert_eq!(asked.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_second_request_on_a_connection_is_not_read() {
    let host = Host::named("host").await;
    let good = format!("good.example:{}", host.port());
    let world = World::new(&[format!("{good}=private")]).await;
    let first = format!("GET http://{good}/1 HTTP/1.1\r\nHost: {good}\r\nConnection: keep-alive\r\n");
    let seconds = [
        "GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n".to_owned(),
        format!("GET http://{good}/2 HTTP/1.1\r\nHost: {good}\r\n\r\n"),
        "CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n".to_owned(),
        "GET /2 HTTP/1.1\r\nHost: evil.example\r\n\r\n".to_owned(),
    ];
    for second in seconds {
        for body in ["\r\n", "Content-Length: 3\r\n\r\nabc", "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"]
        {
            assert_eq!(world.ask(format!("{first}{body}{second}")).await, page_passed("host"));
        }
    }
    let heads: Vec<_> = host.heard().iter().map(|head| head.lines().next().unwrap().to_owned()).collect();
    assert_eq!(heads, ["GET /1 HTTP/1.1"; 12]);
    assert_eq!(world.refusals(), []);
}

#[tokio::test]
async fn smuggled_requests_are_refused() {
    let host = Host::named("host").await;
    let good = format!("good.example:{}", host.port());
    let world = World::new(&[format!("{good}=private")]).await;
    let lines = [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Content-Length: 5\r\nContent-Length: 50",
        "Content-Length: 5, 5",
        "Content-Length: +5",
        "Content-Length: 99999999999999999999",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: \x0bchunked",
        "Transfer-Encoding : chunked",
        "X: a\r\n Transfer-Encoding: chunked",
        "X: a\nTransfer-Encoding: chunked",
        "X: a\rTransfer-Encoding: chunked",
        "Host: evil.example",
    ];
    for line in lines {
        let head = format!("POST http://{good}/ HTTP/1.1\r\nHost: {good}\r\n{line}\r\n\r\n0\r\n\r\n");
        assert_eq!(status(&world.ask(&head).await).0, "400", "{line:?}");
    }
    assert_eq!(status(&world.ask(format!("GET http://{good}/ HTTP/1.1\r\nHost: evil.example\r\n\r\n")).await).0, "400");
    assert_eq!(host.heard(), [""; 0]);
}

#[tokio::test]
async fn requests_that_are_not_for_a_proxy_are_refused() {
    let host = Host::named("host").await;
    let good = format!("good.example:{}", host.port());
    let world = World::new(&[format!("{good}=private")]).await;
    let heads = [
        format!("GET / HTTP/1.1\r\nHost: {good}\r\n\r\n"),
        format!("GET https://{good}/ HTTP/1.1\r\nHost: {good}\r\n\r\n"),
        format!("GET ftp://{good}/ HTTP/1.1\r\nHost: {good}\r\n\r\n"),
        format!("GET file://{good}/etc/passwd HTTP/1.1\r\nHost: {good}\r\n\r\n"),
        format!("GET gopher://{good}/ HTTP/1.1\r\nHost: {good}\r\n\r\n"),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
        "\x16\x03\x01\x02\x00\x01\n\n".to_owned(),
        "\x05\x01\x00\r\n\r\n".to_owned(),
    ];
    for head in heads {
        assert_eq!(status(&world.ask(&head).await).0, "400", "{head:?}");
    }
    assert_eq!(host.heard(), [""; 0]);
}

#[tokio::test]
async fn a_resolver_that_panics_opens_nothing() {
    let world = World::with_names(&["good.example".into()], |_| panic!("no")).await;
    assert_eq!(world.get("good.example").await, "");
    assert_eq!(status(&world.get("evil.example").await).0, "403");
}
