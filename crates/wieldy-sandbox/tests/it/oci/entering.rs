//! Tests both ways to start a command in a gVisor sandbox: by its control socket, or by `runsc exec` if the socket
//! cannot be reached.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use wieldy_core::{Ended, Feed, Level, Sandbox, SandboxError, Stdin, Terminal};
use wieldy_sandbox::OciOptions;

use super::{Driver, OTHERS, find, is_there, session};
use crate::world::{PATIENCE, World, eventually};

/// Makes a test of each function for each of the ways.
macro_rules! by_each_way {
    ($($name:ident)*) => {
        mod by_socket {
            $(#[tokio::test] async fn $name() { super::$name(super::Way::Socket).await })*
        }
        mod by_program {
            $(#[tokio::test] async fn $name() { super::$name(super::Way::Program).await })*
        }
    };
}

by_each_way! {
    a_command_reads_what_is_written_to_it_while_it_runs
    leftover_processes_of_a_command_are_killed_without_a_wait
    a_command_has_its_grace_time
    a_program_that_cannot_be_started_is_reported_with_its_reason
    an_interrupt_key_reaches_the_foreground_process
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Socket,
    Program,
}

/// A driver that starts commands in only one of the ways.
struct OneWay {
    driver: Driver,
    /// A network namespace of the runtime alone, so that the executor cannot reach the socket of a sandbox.
    elsewhere: Option<Elsewhere>,
}

struct Elsewhere {
    keeper: Child,
    runtime: tempfile::TempDir,
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

impl OneWay {
    async fn new(way: Way) -> Option<Self> {
        if !is_there(Level::Gvisor) {
            return None;
        }
        if way == Way::Socket {
            return Some(Self { driver: Driver::new(Level::Gvisor)?, elsewhere: None });
        }
        let keeper = Command::new("unshare").args(["--net", "sleep", "1000"]).spawn().unwrap();
        let elsewhere = Elsewhere { keeper, runtime: tempfile::tempdir().unwrap() };
        let network = PathBuf::from(format!("/proc/{}/ns/net", elsewhere.keeper.id()));
        let own = fs::read_link("/proc/self/ns/net").unwrap();
        let is_another = || fs::read_link(&network).is_ok_and(|other| other != own);
        eventually(PATIENCE, "there is another network", is_another).await;
        let program = elsewhere.runtime.path().join("runsc");
        fs::write(&program, format!("#!/bin/sh\nexec nsenter --net={} runsc \"$@\"\n", network.display())).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let driver = Driver::with(Level::Gvisor, |options| OciOptions { program: Some(program), ..options })?;
        Some(Self { driver, elsewhere: Some(elsewhere) })
    }

    /// Returns a command in a session.
    fn bash(&self, script: &str) -> World {
        let mut world = self.driver.bash(script);
        world.confinement.place = session("s");
        world
    }

    /// Drops the driver, after a check that it used this way: `runsc exec` cannot distinguish an exit code from a
    /// signal.
    async fn close(self, last: World) {
        let by = if self.elsewhere.is_some() { Ended::Signal(9) } else { Ended::Code(137) };
        let world = self.driver.bash_beside(&last, "exit 137");
        assert_eq!(world.run().await.unwrap().ended, by);
        drop((last, world));
        self.driver.close().await;
    }
}

async fn a_command_reads_what_is_written_to_it_while_it_runs(way: Way) {
    let Some(one_way) = OneWay::new(way).await else { return };
    let (feeder, feed) = Feed::new();
    let mut world = one_way.bash("while read line; do echo \"got $line\"; done; echo end >&2");
    world.command.stdin = Stdin::Live(feed);
    let (world, running) = world.start();
    for line in ["one\n", "two\n"] {
        feeder.send(line.into()).await.unwrap();
        world.printed.contains(&format!("got {line}")).await;
    }
    drop(feeder);
    assert_eq!(running.await.unwrap().unwrap().ended, Ended::Code(0));
    let printed = (world.printed.stdout(), world.printed.stderr());
    assert_eq!(printed, ("got one\ngot two\n".to_owned(), "end\n".to_owned()));
    one_way.close(std::sync::Arc::into_inner(world).unwrap()).await;
}

/// The processes fork twice, open sessions, ignore signals and keep the command's output open.
async fn leftover_processes_of_a_command_are_killed_without_a_wait(way: Way) {
    let Some(one_way) = OneWay::new(way).await else { return };
    let world = one_way.bash(
        "(trap '' TERM; setsid setsid bash -c 'trap \"\" TERM HUP; (sleep 1000 &); exec sleep 1000' &); \
         (while :; do (sleep 0.01); done &) 2>/dev/null; echo bye; exit 4",
    );
    let began = Instant::now();
    assert_eq!(world.run().await.unwrap().ended, Ended::Code(4));
    assert_eq!(world.printed.stdout(), "bye\n");
    assert!(began.elapsed() < PATIENCE / 2);
    assert_eq!(one_way.driver.bash_beside(&world, OTHERS).output().await, "");
    assert_eq!(one_way.driver.oci.list().len(), 1, "the sandbox itself is still there");
    one_way.close(world).await;
}

async fn a_command_has_its_grace_time(way: Way) {
    let Some(one_way) = OneWay::new(way).await else { return };
    let stopped = async |script: &str, grace| {
        let (world, running) = one_way.bash(script).grace(grace).start();
        world.printed.contains("ready").await;
        world.stop.cancel();
        let ended = running.await.unwrap().unwrap().ended;
        (std::sync::Arc::into_inner(world).unwrap(), ended)
    };
    let script = "trap 'sleep 0.1; echo saved; exit 3' TERM; echo ready; while :; do sleep 0.01; done";
    let (world, ended) = stopped(script, PATIENCE).await;
    assert_eq!((ended, world.printed.stdout().as_str()), (Ended::Code(3), "ready\nsaved\n"));
    drop(world);
    let script = "trap '' TERM; echo ready; while :; do sleep 0.01; done";
    let (world, ended) = stopped(script, Duration::from_millis(200)).await;
    assert_eq!((ended, world.printed.stdout().as_str()), (Ended::Signal(9), "ready\n"));
    one_way.close(world).await;
}

async fn a_program_that_cannot_be_started_is_reported_with_its_reason(way: Way) {
    let Some(one_way) = OneWay::new(way).await else { return };
    let world = one_way.bash("true");
    for (program, kind, reason) in [
        (
            "no-such-program",
            std::io::ErrorKind::NotFound,
            "error finding executable \"no-such-program\" in PATH [/usr/local/bin /usr/bin /bin]: no such file or directory",
        ),
        ("/no/such", std::io::ErrorKind::NotFound, "failed to load /no/such: no such file or directory"),
        ("/usr", std::io::ErrorKind::PermissionDenied, "failed to load /usr: permission denied"),
        ("/etc/passwd", std::io::ErrorKind::PermissionDenied, "failed to load /etc/passwd: permission denied"),
    ] {
        let mut world = one_way.driver.bash_beside(&world, "");
        world.command.program = program.into();
        match world.run().await.unwrap_err() {
            SandboxError::Start { program: told, source } => {
                assert_eq!((told.as_str(), source.kind()), (program, kind));
                let told = source.to_string();
                match way {
                    Way::Socket => assert_eq!(told, reason),
                    Way::Program => assert!(told.ends_with(reason), "{told}"),
                }
            }
            other => panic!("{program}: {other:?}"),
        }
    }
    one_way.close(world).await;
}

/// The shell is in the background process group of the terminal, and its child in the foreground.
async fn an_interrupt_key_reaches_the_foreground_process(way: Way) {
    let Some(one_way) = OneWay::new(way).await else { return };
    let (feeder, feed) = Feed::new();
    let script = "set -m; stty size; bash -c 'trap \"echo caught; exit 5\" INT; echo ready; while :; do sleep 0.01; done'; \
                  echo $?; stty -isig -echo; echo raw; head -c 1 | od -An -tx1";
    let mut world = one_way.bash(script);
    world.command.terminal = Some(Terminal { rows: 30, columns: 100 });
    world.command.stdin = Stdin::Live(feed);
    let (world, running) = world.start();
    world.printed.contains("ready").await;
    feeder.send(b"\x03".to_vec()).await.unwrap();
    world.printed.contains("raw").await;
    feeder.send(b"\x03\n".to_vec()).await.unwrap();
    assert_eq!(running.await.unwrap().unwrap().ended, Ended::Code(0));
    assert_eq!(world.printed.stdout(), "30 100\r\nready\r\n^Ccaught\r\n5\r\nraw\r\n 03\r\n");
    one_way.close(std::sync::Arc::into_inner(world).unwrap()).await;
}

#[tokio::test]
async fn a_code_is_told_from_a_signal() {
    let Some(one_way) = OneWay::new(Way::Socket).await else { return };
    let world = one_way.bash("true");
    for (script, ended) in [
        ("exit 0", Ended::Code(0)),
        ("exit 130", Ended::Code(130)),
        ("exit 255", Ended::Code(255)),
        ("kill -9 $$", Ended::Signal(9)),
        ("kill -SEGV $$", Ended::Signal(11)),
        ("exec sh -c 'kill $$'", Ended::Signal(15)),
    ] {
        let world = one_way.driver.bash_beside(&world, script);
        assert_eq!(world.run().await.unwrap().ended, ended, "{script}");
    }
    one_way.close(world).await;
}

/// Without an answer the running processes are unknown, so all of them must end.
#[tokio::test]
async fn a_sandbox_that_does_not_answer_any_more_is_ended() {
    let Some(one_way) = OneWay::new(Way::Socket).await else { return };
    let (world, running) = one_way.bash("echo ready; sleep 1000").start();
    world.printed.contains("ready").await;
    let container = one_way.driver.oci.list()[0].sandbox.id.0.clone();
    let pid = fs::read_to_string(find(one_way.driver.state.path(), &container).join("pid")).unwrap();
    assert!(Command::new("kill").args(["-STOP", pid.trim()]).status().unwrap().success());
    world.stop.cancel();
    let lost = running.await.unwrap();
    assert!(matches!(lost, Err(SandboxError::Crashed { .. })), "{lost:?}");
    one_way.close(std::sync::Arc::into_inner(world).unwrap()).await;
}
