//! Compares the definitions and references of a tree of Python with those of CPython's own parser.
//!
//! Usage: `code_truth FOLDER [NAME...]`, in a source tree such as that of Django. It needs `python3`.

use std::collections::BTreeSet;
use std::error::Error;
use std::io::{Write as _, stdout};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use wieldy_tools::code::tree_of_file;

/// The names whose references are compared if none are given: classes, functions, methods and common words.
const NAMES: [&str; 20] = [
    "reverse",
    "ModelAdmin",
    "as_view",
    "Form",
    "save",
    "QuerySet",
    "get_object_or_404",
    "filter",
    "HttpResponse",
    "ValidationError",
    "settings",
    "gettext_lazy",
    "Field",
    "connection",
    "objects",
    "render",
    "cached_property",
    "ContentType",
    "name",
    "override_settings",
];

/// Places that the truth, the trees, or both have.
#[derive(Default)]
struct Score {
    both: usize,
    only_truth: Vec<String>,
    only_trees: Vec<String>,
}

impl Score {
    fn add(&mut self, path: &str, truth: &BTreeSet<(String, u64)>, found: &BTreeSet<(String, u64)>) {
        self.both += truth.intersection(found).count();
        let shown = |(name, line): &(String, u64)| format!("{path}:{line}: {name}");
        self.only_truth.extend(truth.difference(found).map(shown));
        self.only_trees.extend(found.difference(truth).map(shown));
    }

    fn write(&self, title: &str) -> std::io::Result<()> {
        let share = |missing: usize| self.both as f64 / (self.both + missing).max(1) as f64;
        let (precision, recall) = (share(self.only_trees.len()), share(self.only_truth.len()));
        let mut out = stdout().lock();
        writeln!(out, "{title}: {} in both, precision {precision:.4}, recall {recall:.4}", self.both)?;
        for place in self.only_truth.iter().take(5) {
            writeln!(out, "  missing {place}")?;
        }
        for place in self.only_trees.iter().take(5) {
            writeln!(out, "  too much {place}")?;
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: code_truth FOLDER [NAME...]")?;
    let given: Vec<String> = arguments.collect();
    let names: Vec<&str> = if given.is_empty() { NAMES.to_vec() } else { given.iter().map(String::as_str).collect() };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/code_truth.py");
    let truth = Command::new("python3").arg(script).arg(&folder).args(&names).output()?;
    let (mut definitions, mut references) = (Score::default(), Score::default());
    let (mut spent, mut slow, mut bytes) = (Duration::ZERO, 0, 0);
    for line in truth.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let truth: Value = serde_json::from_slice(line)?;
        let path = truth["path"].as_str().unwrap_or_default();
        let content = std::fs::read(path)?;
        let begun = Instant::now();
        let tree = tree_of_file(Path::new(path), &content);
        spent += begun.elapsed();
        bytes += content.len();
        let Some(tree) = tree else {
            slow += 1;
            continue;
        };
        definitions.add(path, &pairs(&truth["definitions"]), &defined(&tree));
        references.add(path, &pairs(&truth["references"]), &referred(&tree, &names));
    }
    definitions.write("definitions")?;
    references.write("references")?;
    let megabytes = bytes as f64 / 1e6;
    writeln!(stdout(), "{megabytes:.1} MB in {:.2} s, {slow} files without a tree", spent.as_secs_f64())?;
    Ok(())
}

fn pairs(list: &Value) -> BTreeSet<(String, u64)> {
    let pairs = list.as_array().into_iter().flatten();
    pairs.map(|pair| (pair[0].as_str().unwrap_or_default().to_owned(), pair[1].as_u64().unwrap_or(0))).collect()
}

fn defined(tree: &Value) -> BTreeSet<(String, u64)> {
    let all = tree["definitions"].as_array().into_iter().flatten();
    all.map(|one| (one["name"].as_str().unwrap_or_default().to_owned(), one["line"].as_u64().unwrap_or(0))).collect()
}

fn referred(tree: &Value, names: &[&str]) -> BTreeSet<(String, u64)> {
    let all = tree["occurrences"].as_array().into_iter().flatten();
    let name =
        |one: &Value| tree["names"][one["name"].as_u64().unwrap_or(0) as usize].as_str().unwrap_or("").to_owned();
    let all = all.map(|one| (name(one), one["line"].as_u64().unwrap_or(0)));
    all.filter(|(name, _)| names.contains(&name.as_str())).collect()
}
