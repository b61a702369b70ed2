//! Attacks on the sandbox, each beside a twin that does no harm and must work.

#[expect(unsafe_code, reason = "an attack makes system calls that no library offers")]
pub(crate) mod syscalls;

/// The attack program: this test binary, run again with this variable set. Without it, there is nothing to do.
///
/// Run it as `WIELDY_TEST_ATTACK=syscalls <test binary> --exact escape::attack_program --nocapture`.
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
        .args(["--exact", "escape::attack_program", "--nocapture"])
        .env(VARIABLE, "syscalls")
        .output()
        .unwrap();
    let said = syscalls::parse(&String::from_utf8_lossy(&ran.stdout));
    let said: Vec<_> = said.iter().map(|(name, _)| name.as_str()).collect();
    let wanted: Vec<_> = syscalls::expected().into_iter().map(|(name, _)| name).collect();
    assert_eq!(said, wanted);
}
