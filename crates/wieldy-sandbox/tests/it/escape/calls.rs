//! Tests promise 7: system calls that programs do not need are refused, with any arguments.

use wieldy_core::{Level, Place};

use super::arena::Arena;
use super::syscalls::{self, Numbers};

/// The variable that makes this test binary the attack program. Without it, that test does nothing.
///
/// Run it as `WIELDY_TEST_ATTACK=syscalls <test binary> --exact escape::calls::attack_program --nocapture`.
const VARIABLE: &str = "WIELDY_TEST_ATTACK";

#[test]
fn attack_program() {
    let which = match std::env::var(VARIABLE).as_deref() {
        Ok("syscalls") => Some(Numbers::All),
        Ok("low syscalls") => Some(Numbers::Low),
        _ => None,
    };
    if let Some(which) = which {
        let found = syscalls::attack(which);
        let printed: String = found.iter().map(|(name, errno)| format!("{name}={errno}\n")).collect();
        std::io::Write::write_all(&mut std::io::stdout(), printed.as_bytes()).unwrap();
    }
}

#[test]
fn the_attack_program_says_how_each_attempt_went() {
    let ran = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "escape::calls::attack_program", "--nocapture"])
        .env(VARIABLE, "syscalls")
        .output()
        .unwrap();
    let said = syscalls::parse(&String::from_utf8_lossy(&ran.stdout));
    let said: Vec<_> = said.iter().map(|(name, _)| name.as_str()).collect();
    let wanted: Vec<_> = syscalls::expected(Numbers::All).into_iter().map(|(name, _)| name).collect();
    assert_eq!(said, wanted);
}

/// P-SBX-06.
#[tokio::test]
async fn each_forbidden_call_is_refused_inside_of_a_sandbox() {
    let mut arena = Arena::new().with_program();
    arena.environment.insert(VARIABLE.into(), "syscalls".into());
    for place in [Place::Own, Arena::session("one")] {
        let said = arena.run(place, "/attack --exact escape::calls::attack_program --nocapture").await;
        let wanted: Vec<_> =
            syscalls::expected(Numbers::All).into_iter().map(|(name, errno)| (name.to_owned(), errno)).collect();
        assert_eq!(syscalls::parse(&said), wanted);
    }
}

/// In a container, calls refused for their arguments fail with `ENOSYS`, and a number of another architecture kills the
/// caller.
#[tokio::test]
async fn each_forbidden_call_is_refused_inside_of_a_container() {
    let Some(arena) = Arena::of(Level::Runc) else { return };
    let mut arena = arena.with_program();
    arena.environment.insert(VARIABLE.into(), "low syscalls".into());
    let said = arena.run(Place::Own, "/attack --exact escape::calls::attack_program --nocapture").await;
    let refusals = [libc::EPERM, libc::ENOSYS, libc::EOPNOTSUPP];
    // Every kind of refusal is equal here; the errors of the twins are the kernel's own.
    let coarse = |name: &str, errno: i32| {
        let is_refusal = !name.starts_with("twin") && refusals.contains(&errno);
        (name.to_owned(), if is_refusal { libc::EPERM } else { errno })
    };
    let wanted: Vec<_> =
        syscalls::expected(Numbers::Low).into_iter().map(|(name, errno)| coarse(name, errno)).collect();
    let found: Vec<_> = syscalls::parse(&said).iter().map(|(name, errno)| coarse(name, *errno)).collect();
    assert_eq!(found, wanted);
}
