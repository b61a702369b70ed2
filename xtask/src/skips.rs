//! The tests that skipped themselves: collected over all stages, printed at the end, and an error in CI.
//!
//! A test reports a skip through `wieldy_testkit::skip`, which appends a line to the file that [`VARIABLE`] names.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The environment variable with the path of the file that tests report their skips to.
const VARIABLE: &str = "WIELDY_SKIPS";
/// The reasons for a skip that CI accepts, each with the explanation why CI cannot run the test.
const ACCEPTED: &str = ".config/skips.json";

/// The skips of one run.
pub(crate) struct Skips {
    file: PathBuf,
    accepted: Vec<String>,
}

impl Skips {
    /// Makes an empty file for the skips of this run.
    pub(crate) fn begin(root: &Path) -> Result<Self> {
        let file = root.join("target/skips");
        fs::create_dir_all(root.join("target")).context("cannot make `target`")?;
        fs::write(&file, "").context("cannot write `target/skips`")?;
        let text = fs::read_to_string(root.join(ACCEPTED)).with_context(|| format!("cannot read `{ACCEPTED}`"))?;
        Ok(Self { file, accepted: accepted_in(&text)? })
    }

    /// Returns the variable that tells tests where to report.
    pub(crate) fn variable(&self) -> (&'static str, &Path) {
        (VARIABLE, &self.file)
    }

    /// Prints how many tests skipped themselves for which reason. In CI, fails for a reason that is not accepted.
    pub(crate) fn report(&self, ci: bool) -> Result<()> {
        let text = fs::read_to_string(&self.file).context("cannot read `target/skips`")?;
        let counted = count(&text);
        if counted.is_empty() {
            eprintln!("no test skipped itself");
        }
        for (why, tests) in &counted {
            eprintln!("SKIPPED {} time(s): {why}: {}", tests.len(), tests.join(", "));
        }
        let refused: Vec<&String> = counted.iter().map(|(why, _)| why).filter(|why| !self.accepts(why)).collect();
        if ci && !refused.is_empty() {
            bail!("in CI no test may skip itself for these reasons, which are not in {ACCEPTED}: {refused:?}");
        }
        Ok(())
    }

    fn accepts(&self, why: &str) -> bool {
        self.accepted.iter().any(|accepted| accepted == why)
    }
}

/// Returns each reason of a report with the names of its tests.
fn count(text: &str) -> Vec<(String, Vec<&str>)> {
    let mut counted: Vec<(String, Vec<&str>)> = Vec::new();
    for (test, why) in text.lines().filter_map(|line| line.split_once('\t')) {
        match counted.iter_mut().find(|(known, _)| known == why) {
            Some((_, tests)) if tests.contains(&test) => {}
            Some((_, tests)) => tests.push(test),
            None => counted.push((why.to_owned(), vec![test])),
        }
    }
    counted
}

/// Reads the accepted reasons. Each needs an explanation.
fn accepted_in(text: &str) -> Result<Vec<String>> {
    let table: BTreeMap<String, String> =
        serde_json::from_str(text).with_context(|| format!("`{ACCEPTED}` is not a table of reasons"))?;
    for (why, because) in &table {
        if because.trim().is_empty() {
            bail!("`{ACCEPTED}`: `{why}` has no explanation");
        }
    }
    Ok(table.into_keys().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skips(report: &str) -> (tempfile::TempDir, Skips) {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join(".config")).unwrap();
        fs::write(root.path().join(ACCEPTED), r#"{"no `x` here": "no registry has it"}"#).unwrap();
        let skips = Skips::begin(root.path()).unwrap();
        fs::write(&skips.file, report).unwrap();
        (root, skips)
    }

    #[test]
    fn reasons_are_counted_with_their_tests() {
        let counted = count("a::b\tno `x` here\na::b\tno `x` here\nc\tno `x` here\nd\tneeds root\n");
        assert_eq!(counted, [("no `x` here".into(), vec!["a::b", "c"]), ("needs root".into(), vec!["d"])]);
    }

    #[test]
    fn in_ci_a_skip_without_an_accepted_reason_fails() {
        let (_root, accepted) = skips("a\tno `x` here\n");
        accepted.report(true).unwrap();
        let (_root, refused) = skips("a\tno `x` here\nb\tneeds root\n");
        refused.report(false).unwrap();
        let error = refused.report(true).unwrap_err().to_string();
        assert!(error.ends_with(r#"which are not in .config/skips.json: ["needs root"]"#), "{error}");
    }

    #[test]
    fn an_accepted_reason_needs_an_explanation() {
        assert!(accepted_in(r#"{"no `x` here": ""}"#).is_err());
        assert!(accepted_in(r#"{"no `x` here": 1}"#).is_err());
    }
}
