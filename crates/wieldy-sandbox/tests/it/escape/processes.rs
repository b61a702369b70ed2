//! Tests promise 6: a command sees and reaches only the processes of its own call.

use std::process::{Child, Stdio};
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use wieldy_core::Place;

use super::arena::{Arena, say};
use super::syscalls::landlock_version;
use crate::world::Printed;

/// A process of the machine that attacks try to find, read or kill.
struct Victim(Child);

impl Victim {
    fn new(canary: &str) -> Self {
        let child = std::process::Command::new("sleep").arg("1000").env("SECRET", canary).stdout(Stdio::null()).spawn();
        Self(child.unwrap())
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Returns attacks by signals within a session, if Landlock restricts signals. If not, such signals only end that
/// session's sandbox, as `ending.rs` tests. Signals to processes outside fail everywhere.
fn signals(attacks: &'static str) -> &'static str {
    match landlock_version() {
        6.. => attacks,
        old => {
            say(&format!(
                "signals to a supervisor and to other calls of the session: Landlock {old} lets them through"
            ));
            ""
        }
    }
}

/// P-SBX-08; P-SBX-09 for the first process.
#[tokio::test]
async fn processes_of_the_machine_are_neither_seen_nor_signalled_nor_read() {
    let arena = Arena::new();
    let mut victim = Victim::new(&arena.canary);
    let ids = format!("{} {}", victim.0.id(), std::process::id());
    let signals = signals("attack kill -9 $id; attack kill -STOP $id; attack kill -0 $id");
    let script = format!(
        r#"
        for id in {ids}; do
            attack test -e /proc/$id
            attack kill -0 $id
            attack kill -9 $id
            attack cat /proc/$id/environ
        done
        attack grep -as 'canary of' /proc/[0-9]*/environ
        # Its own supervisor and the sandbox's first process are there, but closed.
        for id in 1 $PPID; do
            {signals}
            attack cat /proc/$id/environ
            attack cat /proc/$id/maps
            attack head -c 1 /proc/$id/mem
            attack ls /proc/$id/fd/
            attack ls /proc/$id/cwd/
            attack ls /proc/$id/root/
            attack cat /proc/$id/auxv
            attack cat /proc/$id/syscall
            attack cat /proc/$id/stack
            attack cat /proc/$id/io
            attack readlink /proc/$id/ns/user
            attack python3 -c "import os,ctypes; exit(ctypes.CDLL(None).ptrace(16, $id, 0, 0) & 1)"
            attack prlimit --pid $id --nofile=1:1
        done
        attack kill -9 -1
        twin bash -c 'sleep 100 & kill -9 $!'
        twin cat /proc/self/environ
        twin ls /proc/self/fd/
        twin test "$(cat /proc/1/comm)" = wieldy-init
        "#
    );
    arena.attack(&script.replace("attack kill -9 -1\n", "")).await;
    assert!(victim.0.try_wait().unwrap().is_none(), "the victim was killed");
    // A signal to all processes reaches only those of the caller's own call.
    let ran =
        arena.run_in(&arena.confinement(Arena::session("one")), "sleep 1000 & kill -TERM -1; sleep 0.1; echo on").await;
    drop(ran);
    arena.attack("twin true").await;
    assert!(victim.0.try_wait().unwrap().is_none(), "the victim was killed");
}

/// P-SBX-09.
#[tokio::test]
async fn the_environment_is_the_commands_own() {
    let mut arena = Arena::new();
    arena.environment.insert("GIVEN".into(), "by the caller".into());
    let mark = arena.mark.clone();
    let said = arena.run(Place::Own, "env -u SHLVL -u _ -u PWD -u OLDPWD | sort").await;
    let wanted = format!(
        "GIT_TEMPLATE_DIR=/run/git-templates\nGIVEN=by the caller\nHOME=/home/agent\nLOGNAME=agent\nMARK={mark}\n\
         PATH=/usr/local/bin:/usr/bin:/bin\nUSER=agent\n"
    );
    assert_eq!(said, wanted);
}

#[tokio::test]
async fn two_calls_of_a_session_cannot_touch_each_other() {
    let arena = Arc::new(Arena::new());
    let (printed, stop) = (Arc::<Printed>::default(), CancellationToken::new());
    let victim = tokio::spawn({
        let (arena, printed, stop) = (arena.clone(), printed.clone(), stop.clone());
        async move {
            let script = "export SECRET='canary of a call'; bash -c 'echo ready $$; exec sleep 1000'; echo killed";
            arena.run_stoppable(&arena.confinement(Arena::session("one")), script, &printed, stop).await
        }
    });
    printed.contains("ready").await;
    let id = printed.stdout().trim_start_matches("ready ").trim().to_owned();
    let signals = signals("attack kill -0 $id; attack kill -9 $id");
    let script = format!(
        r#"
        twin test "$(cat /proc/{id}/comm)" = sleep
        for id in {id} $(ps -eo pid= 2>/dev/null | grep -vE "^ *(1|$$|$PPID|$BASHPID)$" | head -0); do
            {signals}
            attack cat /proc/$id/environ
            attack readlink /proc/$id/fd/1
            attack cat /proc/$id/fd/0
            attack head -c 1 /proc/$id/mem
            attack cat /proc/$id/maps
            attack prlimit --pid $id --nofile=1:1
            attack bash -c "echo x > /proc/$id/fd/1"
            attack python3 -c "import ctypes; exit(ctypes.CDLL(None).ptrace(16, $id, 0, 0) & 1)"
        done
        echo done"#
    );
    let ran = arena.run_in(&arena.confinement(Arena::session("one")), &script).await.unwrap();
    assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("done\n", ""));
    stop.cancel();
    let ran = victim.await.unwrap().unwrap();
    assert_eq!(ran.stdout, format!("ready {id}\n"));
}
