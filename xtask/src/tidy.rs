//! Tidy: the rules of this repository that no compiler knows.
//!
//! A rule is a function from the [`Tree`] to the problems it found. It has no other input, so its test is a small tree
//! with a mistake in it. A remark that reviewers made three times becomes a rule here.

mod docs;
mod layers;
mod lex;
mod prose;
mod requirements;
mod rust;
mod shape;

use std::fmt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

pub(crate) use requirements::write as write_requirements;

type Rule = fn(&Tree) -> Vec<Problem>;

/// The rules, with the names that are printed with their problems.
const RULES: &[(&str, Rule)] = &[
    ("star", shape::star),
    ("layers", layers::levels_import_layers),
    ("lints", shape::lints),
    ("unsafe", rust::unsafe_only_in_the_sandbox),
    ("ignored test", rust::no_ignored_test),
    ("unfinished", rust::nothing_unfinished),
    ("unwrap", rust::no_unwrap_outside_tests),
    ("long file", rust::no_long_file),
    ("long function", rust::no_long_function),
    ("plain comments", prose::comments_are_plain),
    ("long line", prose::markdown_lines_fit),
    ("machine path", docs::no_machine_path),
    ("links", docs::links_resolve),
    ("error pages", docs::a_page_per_error_code),
    ("events", docs::every_event_is_documented),
    ("guide", docs::the_guide_links_its_pages),
    ("decisions", docs::decisions_are_numbered_and_listed),
    ("requirements", requirements::every_demand_is_shown),
    ("changelog", docs::the_changelog_has_an_unreleased_section),
];

/// Applies every rule to the repository, and fails if one reports a problem.
pub(crate) fn run(root: &Path) -> Result<()> {
    let tree = Tree::read(root)?;
    let mut count = 0;
    for (name, rule) in RULES {
        for problem in rule(&tree) {
            eprintln!("{problem} [{name}]");
            count += 1;
        }
    }
    if count > 0 {
        bail!("{count} problem(s) found by tidy");
    }
    eprintln!("tidy: {} rules, {} files, no problem", RULES.len(), tree.files.len());
    Ok(())
}

/// The files that are or will be committed, and the workspace's metadata from cargo.
pub(crate) struct Tree {
    files: Vec<File>,
    /// The output of `cargo metadata --no-deps`.
    metadata: Value,
}

pub(crate) struct File {
    /// The path from the root, with slashes.
    path: String,
    text: String,
}

impl Tree {
    fn read(root: &Path) -> Result<Self> {
        let list = output(root, "git", &["ls-files", "-z", "--cached", "--others", "--exclude-standard"])?;
        let mut paths: Vec<&str> = list.split('\0').filter(|path| !path.is_empty()).collect();
        paths.sort_unstable();
        paths.dedup();
        let mut files = Vec::new();
        for path in paths {
            match std::fs::read(root.join(path)) {
                // Pictures and other binary files have a name, for links, and an empty text.
                Ok(bytes) => files.push(File { path: path.into(), text: String::from_utf8(bytes).unwrap_or_default() }),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {} // removed, not yet committed
                Err(error) => return Err(error).with_context(|| format!("cannot read `{path}`")),
            }
        }
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
        let metadata = output(root, &cargo, &["metadata", "--no-deps", "--format-version", "1"])?;
        Ok(Self { files, metadata: serde_json::from_str(&metadata).context("cannot read cargo's metadata")? })
    }

    fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    /// Returns the files whose path starts with `start` and ends with `end`.
    fn matching<'a>(&'a self, start: &'a str, end: &'a str) -> impl Iterator<Item = &'a File> {
        self.files.iter().filter(move |file| file.path.starts_with(start) && file.path.ends_with(end))
    }

    /// Returns the text of a required file, or the problem that it is missing.
    fn require(&self, path: &str) -> Result<&str, Problem> {
        self.file(path).map(|file| file.text.as_str()).ok_or_else(|| Problem::new(path, 0, "the file is missing"))
    }
}

fn output(root: &Path, program: &str, arguments: &[&str]) -> Result<String> {
    let line = || format!("{program} {}", arguments.join(" "));
    let output = Command::new(program).args(arguments).current_dir(root).output();
    let output = output.with_context(|| format!("cannot start `{}`", line()))?;
    if !output.status.success() {
        bail!("`{}` ended with {}: {}", line(), output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{}` printed something other than text", line()))
}

/// A mistake and its place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    path: String,
    /// The line, from 1; 0 if the problem concerns the whole file.
    line: usize,
    message: String,
}

impl Problem {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.into(), line, message: message.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line.max(1), self.message)
    }
}

#[cfg(test)]
impl Tree {
    /// Makes a tree of these files, for the tests of rules.
    fn of(files: &[(&str, &str)]) -> Self {
        let files = files.iter().map(|(path, text)| File { path: (*path).into(), text: (*text).into() }).collect();
        Self { files, metadata: Value::Null }
    }
}

/// Applies a rule to these files and returns the problems as the command prints them.
#[cfg(test)]
fn found(rule: Rule, files: &[(&str, &str)]) -> Vec<String> {
    rule(&Tree::of(files)).iter().map(Problem::to_string).collect()
}
