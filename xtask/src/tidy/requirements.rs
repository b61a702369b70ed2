//! The table of proof: every demand on wieldy, and the tests that show it.
//!
//! The demands are in [`DEMANDS`]. A comment `// Shows: A3.1, B12` directly above a test names the demands that the
//! test shows. `cargo xtask requirements` makes [`PAGE`] from both, and the rule here checks that they agree.

mod page;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::lex::{line_of, words};
use super::{File, Problem, Tree};

/// The demands in our own words.
const DEMANDS: &str = "docs/reference/requirements.toml";
/// The generated page.
const PAGE: &str = "docs/reference/requirements.md";
/// The start of a mark.
const MARK: &str = "// Shows: ";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    section: Vec<Section>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Section {
    title: String,
    demand: Vec<Demand>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Demand {
    /// The number, such as `A8`, or `A3.1` for the first part of `A3`.
    id: String,
    text: String,
    /// The ways into wieldy through which the demand holds.
    doors: Vec<String>,
    /// The reason why the demand does not hold yet. A demand without it is done, and needs a test.
    not_yet: Option<String>,
}

/// A test that shows a demand.
struct Proof<'a> {
    id: &'a str,
    path: &'a str,
    /// The line of the mark, from 1.
    line: usize,
    test: &'a str,
}

/// Writes the page anew.
pub(crate) fn write(root: &Path) -> Result<()> {
    let tree = Tree::read(root)?;
    let text = tree.file(DEMANDS).with_context(|| format!("there is no `{DEMANDS}`"))?.text.as_str();
    let table: Table = toml::from_str(text).with_context(|| format!("cannot read `{DEMANDS}`"))?;
    let (proofs, _) = proofs(&tree);
    std::fs::write(root.join(PAGE), page::written(&table, &proofs)).with_context(|| format!("cannot write `{PAGE}`"))
}

/// Checks that every demand that is done has a test, that every mark names a demand that is done, and that the page is
/// up to date.
pub(super) fn every_demand_is_shown(tree: &Tree) -> Vec<Problem> {
    let text = match tree.require(DEMANDS) {
        Ok(text) => text,
        Err(problem) => return vec![problem],
    };
    let table: Table = match toml::from_str(text) {
        Ok(table) => table,
        Err(error) => {
            let line = error.span().map_or(0, |span| line_of(text, span.start));
            return vec![Problem::new(DEMANDS, line, error.message())];
        }
    };
    let mut problems = misnumbered(&table, text);
    let (proofs, unusable) = proofs(tree);
    problems.extend(unusable);
    for proof in &proofs {
        let message = match table.demands().find(|demand| demand.id == proof.id) {
            None => format!("{DEMANDS} has no demand `{}`", proof.id),
            Some(demand) if demand.not_yet.is_some() => format!("`{}` is `not-yet` in {DEMANDS}", proof.id),
            Some(_) => continue,
        };
        problems.push(Problem::new(proof.path, proof.line, message));
    }
    for demand in table.demands().filter(|demand| demand.not_yet.is_none()) {
        let id = &demand.id;
        if !proofs.iter().any(|proof| proof.id == id) {
            let message = format!("no test shows `{id}`: mark one by `{MARK}{id}`, or say `not-yet`");
            problems.push(Problem::new(DEMANDS, line_with(text, id, 1), message));
        }
    }
    if tree.file(PAGE).is_none_or(|page| page.text != page::written(&table, &proofs)) {
        problems.push(Problem::new(PAGE, 0, "the page is not up to date: run `cargo xtask requirements`"));
    }
    problems
}

/// Returns the marks of all tests, in the order of the files, and those marks that have no test.
fn proofs(tree: &Tree) -> (Vec<Proof<'_>>, Vec<Problem>) {
    let (mut proofs, mut problems) = (Vec::new(), Vec::new());
    for file in tree.matching("", ".rs") {
        for (index, line) in file.text.lines().enumerate() {
            let Some(ids) = line.trim().strip_prefix(MARK) else { continue };
            match test_below(file, index + 1) {
                Some(test) => {
                    proofs.extend(ids.split(", ").map(|id| Proof { id, path: &file.path, line: index + 1, test }))
                }
                None => {
                    let message = "there is no test directly below this mark";
                    problems.push(Problem::new(&file.path, index + 1, message));
                }
            }
        }
    }
    (proofs, problems)
}

/// Returns the name of the test that begins after so many lines: a function with the attribute of tests, or one whose
/// name is in a list elsewhere in the file, for a macro that makes the tests.
fn test_below(file: &File, lines: usize) -> Option<&str> {
    let mut has_attribute = false;
    for line in file.text.lines().skip(lines).map(str::trim) {
        if line.starts_with("//") {
            continue;
        }
        if line.starts_with("#[") {
            has_attribute |= line.contains("test");
        } else if let Some((_, after)) = line.split_once("fn ") {
            let name = after.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
            return (has_attribute || words(&file.text, name).count() > 1).then_some(name);
        } else {
            return None;
        }
    }
    None
}

/// Returns the demands whose number is malformed, used twice or missing.
fn misnumbered(table: &Table, text: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    // The parts of each numbered demand; a demand without parts has the part 0.
    let mut numbers: BTreeMap<(char, usize), BTreeSet<usize>> = BTreeMap::new();
    for demand in table.demands() {
        let id = &demand.id;
        let Some((letter, number, part)) = split(id) else {
            let message = format!("`{id}` is no number such as `A3` or `A3.1`");
            problems.push(Problem::new(DEMANDS, line_with(text, id, 1), message));
            continue;
        };
        if !numbers.entry((letter, number)).or_default().insert(part) {
            problems.push(Problem::new(DEMANDS, line_with(text, id, 2), format!("there is another demand `{id}`")));
        }
    }
    for (&(letter, number), parts) in &numbers {
        if number > 1 && !numbers.contains_key(&(letter, number - 1)) {
            problems.push(Problem::new(DEMANDS, 0, format!("there is no `{letter}{}`", number - 1)));
        }
        for &part in parts.iter().filter(|part| **part > 1 && !parts.contains(&(**part - 1))) {
            problems.push(Problem::new(DEMANDS, 0, format!("there is no `{letter}{number}.{}`", part - 1)));
        }
    }
    problems
}

/// Returns the letter, number and part of `A3.1`. The part of `A3` is 0.
fn split(id: &str) -> Option<(char, usize, usize)> {
    let letter = id.chars().next().filter(char::is_ascii_uppercase)?;
    let (number, part) = id[1..].split_once('.').unwrap_or((&id[1..], "0"));
    Some((letter, number.parse().ok()?, part.parse().ok()?))
}

/// Returns the number, from 1, of the line with the n-th demand of this number.
fn line_with(text: &str, id: &str, nth: usize) -> usize {
    let line = format!("id = \"{id}\"");
    text.lines().enumerate().filter(|(_, text)| *text == line).nth(nth - 1).map_or(0, |(index, _)| index + 1)
}

impl Table {
    fn demands(&self) -> impl Iterator<Item = &Demand> {
        self.section.iter().flat_map(|section| &section.demand)
    }
}

#[cfg(test)]
mod tests {
    use super::super::found;
    use super::*;

    const TWO: &str = "[[section]]\ntitle = \"Calls\"\n\n\
        [[section.demand]]\nid = \"A1\"\ntext = \"A call has a result | always\"\ndoors = [\"library\", \"MCP\"]\n\n\
        [[section.demand]]\nid = \"A2\"\ntext = \"A call is fast\"\ndoors = [\"library\"]\nnot-yet = \"it is slow\"\n";
    const SHOWN: &str = "/// Tests it.\n// Shows: A1\n// It has a fn of its own.\n#[tokio::test(start_paused = true)]\nasync fn a_call_has_a_result() {}\n";
    const TEST: &str = "crates/wieldy-core/tests/it/calls.rs";

    /// Returns the page for these demands and this file of tests.
    fn page_of(demands: &str, tests: &str) -> String {
        let tree = Tree::of(&[(DEMANDS, demands), (TEST, tests)]);
        page::written(&toml::from_str(demands).unwrap(), &proofs(&tree).0)
    }

    /// Returns the problems of these demands and tests with an up-to-date page.
    fn problems(demands: &str, tests: &str) -> Vec<String> {
        let page = page_of(demands, tests);
        found(every_demand_is_shown, &[(DEMANDS, demands), (PAGE, &page), (TEST, tests)])
    }

    #[test]
    fn a_done_demand_with_a_test_and_another_that_is_not_yet_done_are_fine() {
        assert_eq!(problems(TWO, SHOWN), [""; 0]);
    }

    #[test]
    fn a_done_demand_without_a_test_is_found() {
        assert_eq!(
            problems(TWO, ""),
            ["docs/reference/requirements.toml:5: no test shows `A1`: mark one by `// Shows: A1`, or say `not-yet`"]
        );
    }

    #[test]
    fn a_mark_of_an_unknown_demand_and_of_one_that_is_not_yet_done_are_found() {
        let tests = format!("{SHOWN}\n// Shows: A2, Z9\n#[test]\nfn it_is_fast() {{}}\n");
        assert_eq!(
            problems(TWO, &tests),
            [
                "crates/wieldy-core/tests/it/calls.rs:7: `A2` is `not-yet` in docs/reference/requirements.toml",
                "crates/wieldy-core/tests/it/calls.rs:7: docs/reference/requirements.toml has no demand `Z9`",
            ]
        );
    }

    #[test]
    fn a_mark_above_anything_but_a_test_is_found() {
        let tests = format!(
            "{SHOWN}\n// Shows: A1\nfn helper() {{}}\n\n// Shows: A1\n\n#[test]\nfn below_a_blank() {{}}\n\n// Shows: A1\n\
             async fn listed() {{}}\non_each_database!(listed);\n"
        );
        assert_eq!(
            problems(TWO, &tests),
            [
                "crates/wieldy-core/tests/it/calls.rs:7: there is no test directly below this mark",
                "crates/wieldy-core/tests/it/calls.rs:10: there is no test directly below this mark",
            ]
        );
        assert_eq!(
            proofs(&Tree::of(&[(TEST, &tests)])).0.iter().map(|proof| proof.test).collect::<Vec<_>>(),
            ["a_call_has_a_result", "listed"]
        );
    }

    #[test]
    fn a_gap_in_the_numbers_and_a_number_that_is_used_twice_are_found() {
        let demands: String = ["A1", "A3.1", "A3.3", "A3.1", "B"]
            .map(|id| format!("[[section.demand]]\nid = \"{id}\"\ntext = \"\"\ndoors = []\nnot-yet = \"no\"\n"))
            .concat();
        assert_eq!(
            problems(&format!("[[section]]\ntitle = \"\"\n{demands}"), ""),
            [
                "docs/reference/requirements.toml:19: there is another demand `A3.1`",
                "docs/reference/requirements.toml:24: `B` is no number such as `A3` or `A3.1`",
                "docs/reference/requirements.toml:1: there is no `A2`",
                "docs/reference/requirements.toml:1: there is no `A3.2`",
            ]
        );
    }

    #[test]
    fn a_page_that_is_not_up_to_date_is_found() {
        let old = page_of(TWO, "");
        assert_eq!(
            found(every_demand_is_shown, &[(DEMANDS, TWO), (PAGE, &old), (TEST, SHOWN)]),
            ["docs/reference/requirements.md:1: the page is not up to date: run `cargo xtask requirements`"]
        );
    }

    #[test]
    fn demands_that_cannot_be_read_are_found() {
        let demands = "[[section]]\ntitle = \"\"\ndemand = []\nwhat = 1\n";
        let found = found(every_demand_is_shown, &[(DEMANDS, demands)]);
        assert!(found.len() == 1 && found[0].contains("unknown field `what`"), "{found:?}");
    }

    #[test]
    fn the_page_is_a_table_for_each_section_under_a_summary() {
        let page = page_of(TWO, SHOWN);
        let tables = page.split_once("\n| section").unwrap().1;
        assert_eq!(
            tables,
            " | done | not yet | |\n| --- | ---: | ---: | --- |\n\
             | [Calls](#calls) | 1 | 1 | ▰▰▰▰▰▱▱▱▱▱ |\n\
             | **all** | **1** | **1** | ▰▰▰▰▰▱▱▱▱▱ |\n\
             \n## Calls\n\n\
             | | demand | door | shown by |\n| --- | --- | --- | --- |\n\
             | **A1** | A call has a result \\| always | library, MCP | [a call has a result](../../crates/wieldy-core/tests/it/calls.rs) |\n\
             | **A2** | A call is fast | library | *not yet:* it is slow |\n"
        );
    }
}
