//! Tests the proxy with clients and hosts that are slow, endless, many or gone. Paused time advances when all tasks are
//! idle.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::{join_all, pending};
use tokio::time::{Instant, sleep, timeout};

use super::*;

/// Returns a listener for the host's side, its authority, and a proxy that allows it.
async fn listen() -> (TcpListener, String, World) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authority = listener.local_addr().unwrap().to_string();
    let world = World::new(std::slice::from_ref(&authority)).await;
    (listener, authority, world)
}

async fn tunnelled() -> (TcpStream, TcpStream, World) {
    let (listener, authority, world) = listen().await;
    let (head, client) = world.tunnel(&authority).await;
    assert_eq!(head, ESTABLISHED);
    (client, listener.accept().await.unwrap().0, world)
}

/// Closes a connection with a reset.
fn reset(stream: TcpStream) {
    stream.set_zero_linger().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_head_that_does_not_come_in_time_is_given_up() {
    let world = World::new(&[]).await;
    for first in ["", "GET http://h/ HTTP/1.1\r\n"] {
        let begin = Instant::now();
        assert_eq!(
            world.ask(first).await,
            answer("408 Request Timeout", "", "the head of the request did not come in time")
        );
        assert_eq!(begin.elapsed().as_secs(), 10);
    }
    // A byte now and then does not extend the time.
    let (mut reader, mut writer) = world.connect().await.into_split();
    let drip = tokio::spawn(async move {
        while writer.write_all(b"x").await.is_ok() {
            sleep(Duration::from_secs(1)).await;
        }
    });
    let begin = Instant::now();
    let mut heard = vec![0; 12];
    reader.read_exact(&mut heard).await.unwrap();
    assert_eq!((heard, begin.elapsed().as_secs()), (b"HTTP/1.1 408".to_vec(), 10));
    drip.abort();
}

#[tokio::test]
async fn an_endless_head_is_cut_off() {
    let world = World::new(&[]).await;
    for filler in ["X: a\r\n", "a", "X: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n "] {
        let head = format!("GET http://h/ HTTP/1.1\r\n{}", filler.repeat(100_000 / filler.len()));
        let expected = "the head of the request has more than 16384 bytes";
        assert_eq!(world.ask(head).await, answer("431 Request Header Fields Too Large", "", expected));
    }
    let (listener, authority, world) = listen().await;
    let ask = world.get(&authority);
    let serve = async {
        let (mut host, _) = listener.accept().await.unwrap();
        let filler = format!("HTTP/1.1 200 OK\r\n{}", "X: a\r\n".repeat(100_000));
        // The proxy closes the connection meanwhile.
        let _ = host.write_all(filler.as_bytes()).await;
    };
    assert_eq!(status(&tokio::join!(ask, serve).0).0, "502");
}

#[tokio::test(start_paused = true)]
async fn a_resolver_that_does_not_answer_is_given_up() {
    struct Silent;
    impl Resolve for Silent {
        fn resolve<'a>(&'a self, _: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
            Box::pin(pending())
        }
    }
    let world = World::with_resolver(&["good.example".into()], Arc::new(Silent)).await;
    let expected = answer("502 Bad Gateway", "", "cannot resolve `good.example`: no answer in time");
    assert_eq!(world.get("good.example").await, expected);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_stands_still_is_closed() {
    let (mut client, mut host, _world) = tunnelled().await;
    // The tunnel stays open while bytes flow in either direction.
    for _ in 0..3 {
        sleep(Duration::from_secs(200)).await;
        host.write_all(b"x").await.unwrap();
        assert_eq!(client.read_u8().await.unwrap(), b'x');
    }
    let begin = Instant::now();
    assert_eq!(read_all(&mut client).await, "");
    assert_eq!(begin.elapsed().as_secs(), 300);
    assert_eq!(read_all(&mut host).await, "");

    let (listener, authority, world) = listen().await;
    let (answer, _host) = tokio::join!(world.get(&authority), listener.accept());
    assert_eq!(status(&answer).0, "504");
}

#[tokio::test]
async fn a_tunnel_ends_when_its_client_or_host_disconnects() {
    let (client, mut host, _world) = tunnelled().await;
    drop(client);
    assert_eq!(read_all(&mut host).await, "");
    let (client, mut host, _world) = tunnelled().await;
    reset(client);
    assert!(matches!(host.read(&mut [0]).await, Ok(0) | Err(_)));
    let (mut client, host, _world) = tunnelled().await;
    drop(host);
    assert_eq!(read_all(&mut client).await, "");
    let (mut client, host, _world) = tunnelled().await;
    reset(host);
    assert!(matches!(client.read(&mut [0]).await, Ok(0) | Err(_)));
}

#[tokio::test]
async fn a_request_ends_when_its_client_or_host_disconnects() {
    let (listener, authority, world) = listen().await;
    let head = format!("PUT http://{authority}/ HTTP/1.1\r\nHost: {authority}\r\n");
    // The client is gone: while it should wait, or in the middle of its body.
    for rest in ["\r\n", "Content-Length: 10\r\n\r\nabc", "Transfer-Encoding: chunked\r\n\r\n5\r\nabc"] {
        let mut client = world.connect().await;
        client.write_all(format!("{head}{rest}").as_bytes()).await.unwrap();
        let (mut host, _) = listener.accept().await.unwrap();
        read_head(&mut host).await;
        drop(client);
        let heard = read_all(&mut host).await;
        assert!(["", "abc", "5\r\nabc"].contains(&&*heard), "{heard:?}");
    }
    // The host is gone: before its response, or in the middle of it.
    for (response, expected) in [
        ("", answer("502 Bad Gateway", "", "the host gave no response: unexpected end of file")),
        ("HTTP/1.1 200 OK\r\n", answer("502 Bad Gateway", "", "the host gave no response: unexpected end of file")),
        ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", page_passed("123456789").replace("123456789", "abc")),
    ] {
        let serve = async {
            let (mut host, _) = listener.accept().await.unwrap();
            read_head(&mut host).await;
            host.write_all(response.as_bytes()).await.unwrap();
        };
        assert_eq!(tokio::join!(world.get(&authority), serve).0, expected);
    }
}

#[tokio::test]
async fn a_client_that_waits_after_its_request_was_answered_sees_the_end() {
    let (listener, authority, world) = listen().await;
    let mut client = world.connect().await;
    // The host answers before the body has arrived, and reads no further.
    let head = format!("PUT http://{authority}/ HTTP/1.1\r\nHost: {authority}\r\nContent-Length: 1000000\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    let (mut host, _) = listener.accept().await.unwrap();
    read_head(&mut host).await;
    host.write_all(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n").await.unwrap();
    let expected = "HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    assert_eq!(read_all(&mut client).await, expected);
}

#[tokio::test(start_paused = true)]
async fn the_sixty_fifth_connection_waits_for_its_turn() {
    let (listener, authority, world) = listen().await;
    let mut tunnels = Vec::new();
    for _ in 0..64 {
        let (head, client) = world.tunnel(&authority).await;
        assert_eq!(head, ESTABLISHED);
        tunnels.push((client, listener.accept().await.unwrap().0));
    }
    let mut waiting = Box::pin(world.get("evil.example"));
    assert!(timeout(Duration::from_secs(60), &mut waiting).await.is_err());
    tunnels.pop();
    assert_eq!(status(&waiting.await).0, "403");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_connections_are_all_served_and_no_more_than_allowed_at_once() {
    let (listener, authority, world) = listen().await;
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let peak = most.clone();
    let serving = tokio::spawn(async move {
        loop {
            let (mut host, _) = listener.accept().await.unwrap();
            let (now, peak) = (now.clone(), peak.clone());
            tokio::spawn(async move {
                peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                read_head(&mut host).await;
                now.fetch_sub(1, Ordering::SeqCst);
                host.write_all(page("ok").as_bytes()).await.unwrap();
            });
        }
    });
    let answers = join_all((0..1000).map(|_| world.get(&authority))).await;
    assert_eq!(answers, vec![page_passed("ok"); 1000]);
    assert!((1..=64).contains(&most.load(Ordering::SeqCst)), "{most:?} at once");
    serving.abort();
}

/// Returns the peak memory of this process in bytes. Each test has a process of its own.
fn memory_peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

#[tokio::test(start_paused = true)]
async fn a_hundred_megabytes_pass_through_a_few() {
    const CHUNK: usize = 64 * 1024;
    const CHUNKS: usize = 1600;
    let (mut client, mut host, _world) = tunnelled().await;
    let mut buffer = vec![0; CHUNK];
    let before = memory_peak();
    let written = Arc::new(AtomicUsize::new(0));
    let counter = written.clone();
    let writing = tokio::spawn(async move {
        let chunk = vec![7; CHUNK];
        for _ in 0..CHUNKS {
            host.write_all(&chunk).await.unwrap();
            counter.fetch_add(CHUNK, Ordering::Relaxed);
        }
    });
    // The client does not read. Paused time advances only once all tasks wait, so all buffers on the way are full then.
    sleep(Duration::from_secs(1)).await;
    assert!(written.load(Ordering::Relaxed) < CHUNK * CHUNKS, "the host was not held back");
    let mut read = 0;
    loop {
        match client.read(&mut buffer).await.unwrap() {
            0 => break,
            length => read += length,
        }
    }
    writing.await.unwrap();
    assert_eq!(read, CHUNK * CHUNKS);
    let grown = memory_peak() - before;
    assert!(grown < 4 * 1024 * 1024, "{grown} bytes more");
}

#[tokio::test]
async fn dropping_the_proxy_ends_everything() {
    let (listener, authority, world) = listen().await;
    let (_, mut tunnel) = world.tunnel(&authority).await;
    let (mut host, _) = listener.accept().await.unwrap();
    let mut waiting = world.connect().await;
    waiting
        .write_all(format!("GET http://{authority}/ HTTP/1.1\r\nHost: {authority}\r\n\r\n").as_bytes())
        .await
        .unwrap();
    let (mut asked, _) = listener.accept().await.unwrap();
    read_head(&mut asked).await;
    let mut silent = world.connect().await;
    drop(world.proxy);
    for stream in [&mut tunnel, &mut host, &mut waiting, &mut asked, &mut silent] {
        assert!(matches!(stream.read(&mut [0]).await, Ok(0) | Err(_)));
    }
    let error = TcpStream::connect(world.address).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}
