//! Tests that denials of files and hosts are found in the output of real programs, and that other failures are not
//! reported as denials.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use wieldy_core::{Command, Denial, Ended, FileRules, Level, Mount, Place, Terminal};

use crate::escape::arena::Arena;
use crate::world::Printed;

const SYSTEM: &str = "it is read-only in a sandbox, as all of the system is; write to the workspace or to `/tmp`";
const MOUNTED: &str = "it is mounted read-only; `sandbox.mounts` is where an operator makes it writable";
const PROTECTED: &str =
    "it is protected, since programs outside obey it; it can be changed only outside of the sandbox";
const HELD: &str = "it contains a hidden or protected path, so it can be neither moved nor removed";
const HIDDEN: &str =
    "it is hidden, as secrets and the executor's own files are; `sandbox.shown` is where an operator shows a secret";
const OUTSIDE: &str = "it is not in the sandbox; `sandbox.mounts` is where an operator brings it in";

/// Makes a test of each function for the native level and for containers of runc and gVisor.
macro_rules! levels {
    ($($name:ident)*) => {
        mod native {
            $(#[tokio::test] async fn $name() { super::$name($crate::escape::arena::Arena::new()).await })*
        }
        mod runc {
            $(#[tokio::test] async fn $name() { super::in_containers(wieldy_core::Level::Runc, super::$name).await })*
        }
        mod gvisor {
            $(#[tokio::test] async fn $name() { super::in_containers(wieldy_core::Level::Gvisor, super::$name).await })*
        }
    };
}

async fn in_containers(level: Level, test: impl AsyncFnOnce(Arena)) {
    if let Some(arena) = Arena::of(level) {
        test(arena).await;
    }
}

levels! {
    denials_by_the_plan_are_reported_with_their_rule
    ordinary_failures_of_a_command_are_no_breaches
    on_a_terminal_it_is_seen_as_well
    whom_a_command_without_a_network_cannot_reach_is_reported
}

/// Adds a git repository, a secret and a read-only mount to the workspace.
fn furnished(mut arena: Arena) -> Arena {
    let workspace = &arena.workspace;
    for folder in [".git/objects", ".git/refs", ".git/hooks", "sub"] {
        fs::create_dir_all(workspace.join(folder)).unwrap();
    }
    fs::write(workspace.join(".git/HEAD"), "ref: refs/heads/main\n").unwrap();
    fs::write(workspace.join(".git/config"), "[core]\n\trepositoryformatversion = 0\n").unwrap();
    fs::write(workspace.join(".env"), &arena.canary).unwrap();
    let data = arena.root.join("data");
    fs::create_dir(&data).unwrap();
    fs::write(data.join("file"), "text").unwrap();
    fs::set_permissions(data.join("file"), fs::Permissions::from_mode(0o666)).unwrap();
    let mount = Mount { source: data, target: "/mnt/data".into(), writable: false };
    arena.confinement.files = Arc::new(FileRules { mounts: vec![mount], ..FileRules::default() });
    arena
}

fn denial(path: &str, reason: &str) -> Denial {
    Denial::Filesystem { path: path.into(), reason: reason.into() }
}

async fn denials_by_the_plan_are_reported_with_their_rule(arena: Arena) {
    let arena = furnished(arena);
    let session = arena.confinement(Arena::session("one"));
    for (script, path, reason) in [
        ("touch /etc/new", "/etc/new", SYSTEM),
        ("cd /; touch /bin/new", "/bin/new", SYSTEM),
        ("echo x > /usr/new", "/usr/new", SYSTEM),
        ("echo x > /etc/hosts", "/etc/hosts", SYSTEM),
        ("rm /usr/bin/env", "/usr/bin/env", SYSTEM),
        ("python3 -c 'open(\"/usr/new\", \"w\")'", "/usr/new", SYSTEM),
        ("sh -c 'echo x > /usr/new'", "/usr/new", SYSTEM),
        ("rm /mnt/data/file", "/mnt/data/file", MOUNTED),
        ("echo x > /mnt/data/file", "/mnt/data/file", MOUNTED),
        ("echo x > .git/hooks/pre-commit", ".git/hooks/pre-commit", PROTECTED),
        ("mkdir -p .vscode/inner", ".vscode/inner", PROTECTED),
        ("git config user.name x", ".git/config", PROTECTED),
        ("mv .git other", ".git", HELD),
        ("cat .env", ".env", HIDDEN),
        ("cat sub/../.env", ".env", HIDDEN),
        ("python3 -c 'open(\".env\")'", ".env", HIDDEN),
        ("cat /etc/shadow", "/etc/shadow", HIDDEN),
        ("cat /srv/plans/old", "/srv/plans/old", OUTSIDE),
        ("cat < /home/ada/plans", "/home/ada/plans", OUTSIDE),
        ("python3 -c 'open(\"/srv/plans\")'", "/srv/plans", OUTSIDE),
        ("mkdir /new", "/new", OUTSIDE),
        ("cat .env 2>&1", ".env", HIDDEN),
    ] {
        let ran = arena.run_in(&session, script).await.unwrap();
        assert!(matches!(ran.exit.ended, Ended::Code(1..)), "{script}: {ran:?}");
        assert_eq!(ran.exit.denials, [denial(path, reason)], "{script}: {ran:?}");
    }
    let all = "for name in a b c d e f; do touch /etc/$name; done; for name in a b c d e f; do touch /etc/$name; done; exit 3";
    let ran = arena.run_in(&arena.confinement, all).await.unwrap();
    assert_eq!(ran.exit.denials, ["c", "d", "e", "f"].map(|name| denial(&format!("/etc/{name}"), SYSTEM)));
}

async fn ordinary_failures_of_a_command_are_no_breaches(arena: Arena) {
    let arena = furnished(arena);
    let session = arena.confinement(Arena::session("one"));
    for script in [
        "exit 3",
        "echo 'it went wrong' >&2; exit 1",
        // Ordinary permissions, and missing files.
        "echo x > own; chmod 000 own; cat own",
        "mkdir -p closed; chmod 000 closed; touch closed/new",
        "cat none",
        "cat /tmp/none",
        "cat /usr/none",
        "cat ../none",
        // Every user may read it, so the denial is about executing.
        "/etc/passwd",
        // The plan allows these paths, so the message is ignored.
        "echo \"touch: cannot touch 'own': Read-only file system\" >&2; exit 1",
        "echo \"touch: cannot touch '/tmp/own': Read-only file system\" >&2; exit 1",
        // Standard output is ignored if there is standard error.
        "echo \"touch: cannot touch '/etc/new': Read-only file system\"; echo failed >&2; exit 1",
        // The end by a signal shows that the denial was not the reason.
        "touch /etc/new; kill -9 $$",
    ] {
        let ran = arena.run_in(&session, script).await.unwrap();
        assert!(!matches!(ran.exit.ended, Ended::Code(0)), "{script}: {ran:?}");
        assert_eq!(ran.exit.denials, [], "{script}: {ran:?}");
        let _ = fs::set_permissions(arena.workspace.join("closed"), fs::Permissions::from_mode(0o700));
    }
    // A command that succeeds has no denial either.
    let fine = arena.run_in(&session, "touch /etc/new; cat .env; true").await.unwrap();
    assert!(fine.stderr.contains("/etc/new") && fine.stderr.contains(".env"), "{fine:?}");
    assert_eq!((fine.exit.ended, fine.exit.denials), (Ended::Code(0), vec![]));
    let file = "/etc/.pwd.lock";
    if fs::metadata(file).is_ok_and(|found| found.permissions().mode() & 0o777 == 0o600) {
        let ran = arena.run_in(&session, &format!("cat {file}")).await.unwrap();
        assert!(ran.stderr.ends_with("Permission denied\n"), "{ran:?}");
        assert_eq!((ran.exit.ended, ran.exit.denials), (Ended::Code(1), vec![]));
    }
}

async fn on_a_terminal_it_is_seen_as_well(arena: Arena) {
    let arena = furnished(arena);
    let script = "printf '\\033[31m'; echo first; touch /etc/new; printf '\\033[0m'; exit 4";
    let command = Command {
        program: "bash".into(),
        arguments: vec!["-c".into(), script.into()],
        environment: arena.environment.clone(),
        folder: "sub".into(),
        stdin: wieldy_core::Stdin::Nothing,
        terminal: Some(Terminal { rows: 24, columns: 80 }),
    };
    let printed = Arc::<Printed>::default();
    let (confinement, stop) = (arena.confinement(Place::Own), Default::default());
    let exit = arena.sandbox.execute(&command, &confinement, printed.clone(), stop).await.unwrap();
    assert_eq!((exit.ended, exit.denials), (Ended::Code(4), vec![denial("/etc/new", SYSTEM)]), "{}", printed.stdout());
    assert_ne!(exit.sandbox.level, Level::None);
}

async fn whom_a_command_without_a_network_cannot_reach_is_reported(arena: Arena) {
    let refused = |host: &str| {
        vec![Denial::Network { host: host.into(), port: None, reason: "no-network".into(), shared: false }]
    };
    let unnamed = "a host without a name";
    for (script, wanted) in [
        ("python3 -c 'import socket; socket.create_connection((\"example.com\", 80))'", refused(unnamed)),
        ("python3 -c 'import socket; socket.create_connection((\"192.0.2.1\", 80))'", refused(unnamed)),
        ("git ls-remote https://example.com/x", refused("example.com")),
        // No denial if the command succeeds, or fails for another reason.
        ("git ls-remote https://example.com/x; true", vec![]),
        ("python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 1))'", vec![]),
    ] {
        let ran = arena.run_in(&arena.confinement(Place::Own), script).await.unwrap();
        assert_eq!(ran.exit.denials, wanted, "{script}: {ran:?}");
    }
}
