//! Runs a test in a process of its own, for tests that change their process permanently.

/// Runs the test `name` again in a process of its own. Returns true in that process, where the test should go on.
pub(crate) fn in_own_process(name: &str) -> bool {
    const VARIABLE: &str = "WIELDY_TEST_ALONE";
    if std::env::var(VARIABLE).as_deref() == Ok(name) {
        return true;
    }
    let output = std::process::Command::new(std::env::current_exe().expect("a test binary is a file"))
        .args(["--exact", name, "--nocapture"])
        .env(VARIABLE, name)
        .output()
        .expect("a test binary can be run again");
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    text.lines().filter(|line| line.starts_with(SAID)).for_each(|line| say(line.trim_start_matches(SAID)));
    false
}

const SAID: &str = "said: ";

/// Prints a line to standard error of the test run, also from a process of its own.
pub(crate) fn say(line: &str) {
    use std::io::Write;
    writeln!(std::io::stderr(), "{SAID}{line}").expect("someone listens");
}
