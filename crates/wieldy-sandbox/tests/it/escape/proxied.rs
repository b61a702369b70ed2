//! Tests promise 4 with a list of hosts: only these are reached, through the executor's proxy, and there is no other
//! way out.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use wieldy_core::{Denial, Level, Network, Place};

use super::arena::Arena;

/// Starts a web server that answers `hello`. Returns its port and its number of requests.
fn server() -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, asked) = (listener.local_addr().unwrap().port(), Arc::new(AtomicUsize::new(0)));
    let count = asked.clone();
    // The thread ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello");
        }
    });
    (port, asked)
}

// Shows: B9.3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listed_hosts_are_reached_and_no_others() {
    reaches_listed_hosts_and_no_others(Arena::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listed_hosts_are_reached_from_a_container_and_no_others() {
    for level in [Level::Runc, Level::Gvisor] {
        if let Some(arena) = Arena::of(level) {
            reaches_listed_hosts_and_no_others(arena).await;
        }
    }
}

/// P-WEB-10.
async fn reaches_listed_hosts_and_no_others(mut arena: Arena) {
    let ((allowed, asked), (other, never_asked)) = (server(), server());
    arena.confinement.network = Network::Hosts(vec![format!("127.0.0.1:{allowed}")]);
    // `head` is run again where a read fails: on a busy machine gVisor's reads of sockets may end with EAGAIN.
    let script = format!(
        r#"
        proxy=${{http_proxy#http://}}; host=${{proxy%:*}}; port=${{proxy#*:}}
        ask() {{ exec 7<>/dev/tcp/$host/$port; printf "$1" >&7; timeout 5 bash -c 'until head -c 400 <&7; do :; done' 2>&1; exec 7<&-; }}
        through() {{ ask "GET http://$1/ HTTP/1.1\r\nHost: $1\r\nConnection: close\r\n\r\n" | grep -q hello; }}
        tunnel() {{ exec 7<>/dev/tcp/$host/$port; printf "CONNECT $1 HTTP/1.1\r\nHost: $1\r\n\r\n" >&7; IFS= read -t 5 -r line <&7; exec 7<&-; [[ $line == *' 200 '* ]]; }}
        fetch() {{ timeout 8 python3 -c "import urllib.request as u; u.getproxies = lambda: {{'http': '$http_proxy'}}; u.proxy_bypass = lambda h: False
print(u.build_opener(u.ProxyHandler({{'http': '$http_proxy'}})).open('$1').read())"; }}
        twin through 127.0.0.1:{allowed}
        twin tunnel 127.0.0.1:{allowed}
        twin fetch http://127.0.0.1:{allowed}/
        attack through 127.0.0.1:{other}
        attack tunnel 127.0.0.1:{other}
        attack fetch http://127.0.0.1:{other}/
        attack through localhost:{other}
        attack tunnel 169.254.169.254:80
        attack tunnel example.com:443
        # Without the proxy there is no way.
        attack timeout 3 bash -c 'echo x > /dev/tcp/127.0.0.1/{allowed}'
        attack timeout 3 bash -c 'echo x > /dev/tcp/127.0.0.1/{other}'
        attack timeout 3 bash -c 'echo x > /dev/tcp/192.0.2.1/80'
        attack timeout 8 python3 -c "import urllib.request as u; u.build_opener(u.ProxyHandler({{}})).open('http://127.0.0.1:{allowed}/')"
        attack timeout 3 python3 -c 'import socket; socket.getaddrinfo("example.com", 80)'
        echo done"#
    );
    for place in [Place::Own, Arena::session("one")] {
        let before = asked.load(Ordering::SeqCst);
        let ran = arena.run_in(&arena.confinement(place), &script).await.unwrap();
        assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("done\n", ""));
        assert_eq!(asked.load(Ordering::SeqCst) - before, 3);
        let refused: Vec<_> = ran
            .exit
            .denials
            .iter()
            .map(|denial| match denial {
                Denial::Network { host, port, .. } => (host.as_str(), port.unwrap_or_default()),
                denial => panic!("{denial:?}"),
            })
            .collect();
        let wanted = [
            ("127.0.0.1", other),
            ("127.0.0.1", other),
            ("127.0.0.1", other),
            ("localhost", other),
            ("169.254.169.254", 80),
            ("example.com", 443),
        ];
        assert_eq!(refused, wanted);
    }
    assert_eq!(never_asked.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn names_are_matched_whole() {
    let mut arena = Arena::new();
    arena.confinement.network = Network::Hosts(vec!["*.example.com".into()]);
    let script = r#"
        proxy=${http_proxy#http://}; host=${proxy%:*}; port=${proxy#*:}
        for name in evilexample.com example.com.evil example.com xn--example.com 'a.example.com@evil' '[::1]' 127.1 0x7f.1 2130706433; do
            exec 7<>/dev/tcp/$host/$port
            printf "CONNECT $name:443 HTTP/1.1\r\nHost: $name:443\r\n\r\n" >&7
            timeout 5 head -1 <&7 | grep ' 200 ' && echo "GOT THROUGH: $name"
            exec 7<&-
        done
        echo done"#;
    assert_eq!(arena.run(Place::Own, script).await, "done\n");
}
