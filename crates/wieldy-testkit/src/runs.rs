//! The agreement between tests and `cargo xtask test`: counts of long tests, and reports of skips.

use std::io::Write;

/// Returns how often a long test repeats its work: `full` where `WIELDY_TEST_COUNTS` is `full`, and `short` otherwise.
pub fn count(short: usize, full: usize) -> usize {
    match std::env::var("WIELDY_TEST_COUNTS").as_deref() {
        Ok("full") => full,
        _ => short,
    }
}

/// Reports that the running test, or a part of it, is skipped, on standard error and in the file that `WIELDY_SKIPS`
/// names. `cargo xtask test` prints these reports, and in CI fails for a reason that is not accepted.
pub fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
    let Some(path) = std::env::var_os("WIELDY_SKIPS") else { return };
    let test = std::env::var("NEXTEST_TEST_NAME").ok();
    let test = test.or_else(|| std::thread::current().name().map(str::to_owned)).unwrap_or_default();
    // One write of one line, so that tests in several processes do not mix their lines.
    let line = format!("{test}\t{}\n", why.replace('\n', " "));
    let reported = std::fs::OpenOptions::new().append(true).create(true).open(path);
    reported.and_then(|mut file| file.write_all(line.as_bytes())).expect("skips can be reported");
}
