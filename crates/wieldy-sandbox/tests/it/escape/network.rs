//! Tests promise 4: without a network, a command reaches no address, no name and no socket of the machine.

use std::io::ErrorKind;
use std::net::{TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use wieldy_core::{Network, Place};

use super::arena::{Arena, say};
use super::syscalls::landlock_version;

/// Listening sockets of the machine that must not be reached.
struct Listeners {
    tcp: Vec<TcpListener>,
    udp: UdpSocket,
    unix: Vec<UnixListener>,
}

impl Listeners {
    fn new(arena: &Arena) -> Self {
        let abstract_name = SocketAddr::from_abstract_name(&arena.mark).unwrap();
        // The machine may have no IPv6.
        let tcp: Vec<_> =
            ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0"].into_iter().filter_map(|a| TcpListener::bind(a).ok()).collect();
        let udp = UdpSocket::bind("0.0.0.0:0").unwrap();
        let unix = vec![
            UnixListener::bind_addr(&abstract_name).unwrap(),
            UnixListener::bind(arena.root.join("engine.sock")).unwrap(),
        ];
        tcp.iter().for_each(|listener| listener.set_nonblocking(true).unwrap());
        unix.iter().for_each(|listener| listener.set_nonblocking(true).unwrap());
        udp.set_nonblocking(true).unwrap();
        Self { tcp, udp, unix }
    }

    fn ports(&self) -> String {
        self.tcp.iter().map(|listener| listener.local_addr().unwrap().port().to_string()).collect::<Vec<_>>().join(" ")
    }

    /// Asserts that no connection and no message came.
    fn saw_nothing(&self) {
        for listener in &self.tcp {
            assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        }
        for listener in &self.unix {
            assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        }
        assert_eq!(self.udp.recv(&mut [0; 16]).unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}

/// Returns addresses of this machine, its neighbours and the internet.
fn addresses() -> String {
    let found = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    let own = found.map_or(String::new(), |address| address.ip().to_string());
    format!("127.0.0.1 127.0.0.2 localhost 0.0.0.0 ::1 ::ffff:127.0.0.1 169.254.169.254 192.0.2.1 {own}")
}

/// P-SBX-03, P-SBX-04.
// Shows: B9.3
#[tokio::test]
async fn no_host_is_reached_from_a_sandbox_without_a_network() {
    let arena = Arena::new();
    let listeners = Listeners::new(&arena);
    let (ports, addresses) = (listeners.ports(), addresses());
    let udp = listeners.udp.local_addr().unwrap().port();
    let (mark, root) = (&arena.mark, arena.root.display());
    let script = format!(
        r#"
        for address in {addresses}; do
            for port in {ports} 22; do attack timeout 2 bash -c "echo x > /dev/tcp/$address/$port"; done
        done
        cat > /tmp/try.py <<'END'
import socket, sys, os
kind, rest = sys.argv[1], sys.argv[2:]
def got(reply): sys.exit(0 if reply else 1)
if kind == "udp":
    family = socket.AF_INET6 if ":" in rest[0] else socket.AF_INET
    s = socket.socket(family, socket.SOCK_DGRAM); s.sendto(b"x", (rest[0], int(rest[1]))); sys.exit(0)
if kind == "icmp": socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP).sendto(b"\x08\0\xf7\xff\0\0\0\0", (rest[0], 0))
if kind == "raw": socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
if kind == "raw6": socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58)
if kind == "packet": socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)
if kind == "vsock": socket.socket(40, socket.SOCK_STREAM).connect((2, 1))
if kind == "bluetooth": socket.socket(31, socket.SOCK_RAW, 1)
if kind == "netfilter": socket.socket(16, socket.SOCK_RAW, 12)
if kind == "uevent": socket.socket(16, socket.SOCK_RAW, 15)
if kind == "abstract": socket.socket(socket.AF_UNIX).connect("\0" + rest[0])
if kind == "path": socket.socket(socket.AF_UNIX).connect(rest[0])
if kind == "name": socket.getaddrinfo(rest[0], 80)
if kind == "own":
    listener = socket.create_server(("127.0.0.1", 0)); socket.create_connection(listener.getsockname()).send(b"x")
if kind == "own6":
    listener = socket.create_server(("::1", 0), family=socket.AF_INET6); socket.create_connection(listener.getsockname()[:2]).send(b"x")
if kind == "pair":
    l = socket.socket(socket.AF_UNIX); l.bind("\0own"); l.listen(); socket.socket(socket.AF_UNIX).connect("\0own")
if kind == "veth":
    # A request for a new interface, which needs rights over the network.
    s = socket.socket(16, socket.SOCK_RAW, 0); s.bind((0, 0))
    s.send(bytes.fromhex("200000001000050601000000000000000000000000000000000000000000000000"[:64])); r = s.recv(4096)
    sys.exit(0 if int.from_bytes(r[16:20], "little", signed=True) == 0 else 1)
END
        try="timeout 5 python3 /tmp/try.py"
        for address in 192.0.2.1 169.254.169.254 255.255.255.255 2001:db8::1 224.0.0.1; do attack $try udp $address {udp}; done
        $try udp 127.0.0.1 {udp} >/dev/null 2>&1 # goes to its own loopback, where nobody is
        for kind in raw raw6 packet vsock bluetooth netfilter uevent veth; do attack $try $kind; done
        attack $try icmp 192.0.2.1
        attack $try abstract {mark}
        attack $try path {root}/engine.sock
        for path in /run/docker.sock /var/run/docker.sock /run/dbus/system_bus_socket /run/systemd/private /run/containerd/containerd.sock; do attack $try path $path; done
        for name in example.com localhost.example dns.google; do attack $try name $name; done
        attack bash -c 'ls /sys/class/net'
        attack test "$(wc -l < /proc/net/dev)" != 3
        attack test -n "$(tail -n +2 /proc/net/route)"
        twin $try own
        twin $try name localhost
        twin $try pair
        "#
    );
    arena.attack(&script).await;
    listeners.saw_nothing();
}

#[tokio::test]
async fn with_an_open_network_sockets_without_a_path_are_still_out_of_reach() {
    let mut arena = Arena::new();
    arena.confinement.network = Network::Open;
    let listeners = Listeners::new(&arena);
    let port = listeners.tcp[0].local_addr().unwrap().port();
    // Abstract sockets belong to the network namespace. Landlock restricts them from version 6 on; before, nothing
    // does.
    let connect = match landlock_version() {
        6.. => {
            format!("attack python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"\\0{}\")'", arena.mark)
        }
        old => {
            say(&format!("sockets without a path on an open network: Landlock {old} lets them through"));
            String::new()
        }
    };
    let script = format!(
        r#"
        {connect}
        attack python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'
        twin timeout 5 bash -c 'echo x > /dev/tcp/127.0.0.1/{port}'
        echo done"#
    );
    assert_eq!(arena.run(Place::Own, &script).await, "done\n");
    assert!(listeners.tcp[0].accept().is_ok(), "the twin has reached us");
    listeners.saw_nothing();
}
