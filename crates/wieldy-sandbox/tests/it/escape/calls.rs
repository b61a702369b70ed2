//! Promise 7: system calls that programs do not need are refused, whatever their arguments.

use wieldy_core::Place;

use super::arena::Arena;
use super::syscalls;

/// The attack program: this test binary, run again with this variable set. Without it, there is nothing to do.
///
/// Run it as `WIELDY_TEST_ATTACK=syscalls <test binary> --exact escape::calls::attack_program --nocapture`.
const VARIABLE: &str = "WIELDY_TEST_ATTACK";

#[test]
fn attack_program() {
    if std::env::var(VARIABLE).as_deref() == Ok("syscalls") {
        let found = syscalls::attack();
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
    let wanted: Vec<_> = syscalls::expected().into_iter().map(|(name, _)| name).collect();
    assert_eq!(said, wanted);
}

#[tokio::test]
async fn each_forbidden_call_is_refused_inside_of_a_sandbox() {
    let mut arena = Arena::new().with_program();
    arena.environment.insert(VARIABLE.into(), "syscalls".into());
    for place in [Place::Own, Arena::session("one")] {
        let said = arena.run(place, "/attack --exact escape::calls::attack_program --nocapture").await;
        let wanted: Vec<_> = syscalls::expected().into_iter().map(|(name, errno)| (name.to_owned(), errno)).collect();
        assert_eq!(syscalls::parse(&said), wanted);
    }
}
