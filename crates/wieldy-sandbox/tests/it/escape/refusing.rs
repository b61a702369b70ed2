//! Tests promise 11: if a sandbox cannot be made completely, the call fails with the reason, and never runs in a weaker
//! one.

use std::process::Command;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use wieldy_core::{Place, SandboxError};

use super::arena::{Arena, say};
use super::syscalls::landlock_version;
use crate::world::{PATIENCE, below, eventually, in_own_process};

/// Needs a kernel without Landlock, as one of the machines of `cargo xtask vm` has.
#[tokio::test]
async fn with_landlock_switched_off_nothing_runs() {
    if landlock_version() > 0 {
        return say("a kernel without Landlock: this one has it");
    }
    let arena = Arena::new();
    for place in [Place::Own, Arena::session("one")] {
        let refused = arena.run_in(&arena.confinement(place), "touch ran").await.unwrap_err();
        assert!(matches!(refused, SandboxError::Creation { .. }), "{refused:?}");
        let wanted =
            "Landlock: this kernel's Landlock is switched off; add `landlock` to `lsm=` on the kernel's command line";
        assert_eq!(refused.reason(), wanted);
    }
    assert!(!arena.workspace.join("ran").exists());
}

/// P-SBX-19: without user namespaces there is no native level.
#[test]
fn without_user_namespaces_nothing_runs() {
    const NAME: &str = "escape::refusing::without_user_namespaces_nothing_runs";
    const VARIABLE: &str = "WIELDY_TEST_WITHOUT";
    if std::env::var_os(VARIABLE).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        return runtime.block_on(async {
            let arena = Arena::new();
            for place in [Place::Own, Arena::session("one")] {
                let refused = arena.run_in(&arena.confinement(place), "touch ran").await.unwrap_err();
                assert!(matches!(refused, SandboxError::Creation { .. }), "{refused:?}");
                let wanted = "making namespaces: No space left on device (os error 28), as `user.max_user_namespaces` is 0; \
                              as root: `sysctl -w user.max_user_namespaces=65536`";
                assert_eq!(refused.reason(), wanted);
            }
            assert!(!arena.workspace.join("ran").exists());
        });
    }
    // In a new user namespace whose limit of further user namespaces is 0.
    let inner = format!(
        "echo 0 > /proc/sys/user/max_user_namespaces && exec {} --exact {NAME} --nocapture",
        std::env::current_exe().unwrap().display()
    );
    let ran = Command::new("unshare")
        .args(["--user", "--map-user=1000", "--map-group=1000", "--keep-caps", "bash", "-c", &inner])
        .env(VARIABLE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
    assert!(ran.status.success() && said.contains("1 passed"), "{said}");
}

/// P-SBX-19: without Landlock there is no native level either. The test simulates a kernel without it.
#[test]
fn without_landlock_nothing_runs() {
    if landlock_version() == 0 {
        return say("a kernel that forgets Landlock: this one has none");
    }
    if !in_own_process("escape::refusing::without_landlock_nothing_runs") {
        return;
    }
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime().block_on(async {
        let arena = Arena::new();
        assert_eq!(arena.run(Place::Own, "echo with").await, "with\n");
        let is_over = || below(std::process::id() as i32).is_empty();
        eventually(PATIENCE, "whoever could know it is gone", is_over).await;
    });
    let unknown = [(libc::SYS_landlock_create_ruleset, Vec::new())].into();
    let (allowed, refused) = (SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32));
    let filter = SeccompFilter::new(unknown, allowed, refused, std::env::consts::ARCH.try_into().unwrap()).unwrap();
    seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
    runtime().block_on(async {
        let arena = Arena::new();
        for place in [Place::Own, Arena::session("one")] {
            let refused = arena.run_in(&arena.confinement(place), "touch ran").await.unwrap_err();
            assert!(matches!(refused, SandboxError::Creation { .. }), "{refused:?}");
            let wanted =
                "Landlock: this kernel has no Landlock; build it with CONFIG_SECURITY_LANDLOCK, or take a newer one";
            assert_eq!(refused.reason(), wanted);
        }
        assert!(!arena.workspace.join("ran").exists());
    });
}

#[tokio::test]
async fn unsuitable_workspaces_are_refused_with_the_reason() {
    let mut arena = Arena::new();
    let state = arena.root.join("state");
    for (workspace, wanted) in [
        (
            "/".into(),
            "`/` belongs to the system and cannot be a workspace; choose a folder of the project's own".to_owned(),
        ),
        (
            "/etc".into(),
            "`/etc` belongs to the system and cannot be a workspace; choose a folder of the project's own".into(),
        ),
        (
            "/tmp".into(),
            "`/tmp` belongs to the system and cannot be a workspace; choose a folder of the project's own".into(),
        ),
        (
            state.clone(),
            format!(
                "`{}` belongs to the system and cannot be a workspace; choose a folder of the project's own",
                state.display()
            ),
        ),
        ("/no/such".into(), "the workspace `/no/such`: No such file or directory (os error 2)".into()),
    ] {
        arena.confinement.workspace = workspace;
        let refused = arena.run_in(&arena.confinement(Place::Own), "true").await.unwrap_err();
        assert!(matches!(refused, SandboxError::Creation { .. }), "{refused:?}");
        assert_eq!(refused.reason(), wanted);
    }
}

#[tokio::test]
async fn a_sandbox_that_is_not_there_is_not_replaced_by_another() {
    let arena = Arena::new();
    let place = Place::Sandbox(wieldy_core::SandboxId("native-1-1".into()));
    let refused = arena.run_in(&arena.confinement(place), "true").await.unwrap_err();
    assert_eq!(
        refused.message(),
        "cannot make a sandbox: there is no sandbox `native-1-1`; it was destroyed, or never made"
    );
}
