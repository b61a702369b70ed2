//! Tests promise 8: sandboxes do not see each other, and share nothing but a common workspace.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use wieldy_core::{Place, Sandbox};

use super::arena::Arena;
use crate::world::Printed;

const LEAVE: &str = r#"
    for place in /tmp /var/tmp /dev/shm $HOME /run/user; do mkdir -p $place 2>/dev/null; echo 'canary of a neighbour' > $place/left 2>/dev/null; done
    python3 -c '
import ctypes, os
libc = ctypes.CDLL(None)
id = libc.shmget(4711, 4096, 0o1666)
libc.semget(4711, 1, 0o1666); libc.msgget(4711, 0o1666)
libc.mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o666, None)'
    exec python3 -u -c '
import socket, time
l = socket.socket(socket.AF_UNIX); l.bind("\0left"); l.listen()
t = socket.create_server(("127.0.0.1", 4711))
print("ready"); time.sleep(1000)'
"#;

const LOOK: &str = r#"
    attack grep -rs canary /tmp /var/tmp /dev/shm /run $HOME --exclude=.said
    attack python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect("\0left")'
    attack bash -c 'echo x > /dev/tcp/127.0.0.1/4711'
    attack grep -q 4711 /proc/sysvipc/shm /proc/sysvipc/sem /proc/sysvipc/msg
    attack grep -q python /proc/[0-9]*/comm
    echo done
"#;

#[tokio::test]
async fn two_sessions_see_nothing_of_each_other() {
    let arena = Arc::new(Arena::new());
    let (printed, stop) = (Arc::<Printed>::default(), CancellationToken::new());
    let victim = tokio::spawn({
        let (arena, printed, stop) = (arena.clone(), printed.clone(), stop.clone());
        async move { arena.run_stoppable(&arena.confinement(Arena::session("victim")), LEAVE, &printed, stop).await }
    });
    printed.contains("ready").await;
    for place in [Arena::session("attacker"), Place::Own] {
        assert_eq!(arena.run(place, LOOK).await, "done\n");
    }
    // Twin: the session still has the files in its private folders, and all share the workspace.
    let twin = "twin grep -q canary /tmp/left; twin grep -q canary /dev/shm/left; twin grep -q python /proc/[0-9]*/comm; echo shared > shared; echo done";
    assert_eq!(arena.run(Arena::session("victim"), twin).await, "done\n");
    assert_eq!(arena.run(Arena::session("attacker"), "cat shared").await, "shared\n");
    stop.cancel();
    victim.await.unwrap().unwrap();
}

#[tokio::test]
async fn nothing_is_left_to_the_next_sandbox_of_the_same_session() {
    let arena = Arena::new();
    let left = LEAVE.replace("time.sleep(1000)", "0");
    arena.run_in(&arena.confinement(Arena::session("one")), &left).await.unwrap();
    let id = arena.native.list()[0].sandbox.id.clone();
    assert!(arena.native.destroy(&id).await);
    assert_eq!(arena.run(Arena::session("one"), LOOK).await, "done\n");
}

#[tokio::test]
async fn sessions_of_other_agents_and_tenants_are_other_sandboxes() {
    use wieldy_core::SessionKey;
    let arena = Arena::new();
    let key = |tenant: Option<&str>, agent: &str| {
        Place::Session(SessionKey { tenant: tenant.map(str::to_owned), agent: agent.into(), session: "same".into() })
    };
    arena.run(key(Some("a"), "x"), "echo canary > /tmp/left").await;
    for place in [key(Some("b"), "x"), key(Some("a"), "y"), key(None, "x")] {
        assert_eq!(arena.run(place, "attack cat /tmp/left; echo done").await, "done\n");
    }
    assert_eq!(arena.run(key(Some("a"), "x"), "cat /tmp/left").await, "canary\n");
}
