//! Rules about the documents, and about the agreement of code and documents.

use super::lex::line_of;
use super::{File, Problem, Tree};

const ERROR_CODES: &str = "crates/wieldy-core/src/error.rs";
const EVENT_NAMES: &str = "crates/wieldy-core/src/event.rs";
const EVENTS_PAGE: &str = "docs/reference/events.md";

/// Checks that no file names a folder of a developer's machine.
pub(super) fn no_machine_path(tree: &Tree) -> Vec<Problem> {
    // In pieces, so that this file passes its own rule.
    let folders = ["root", "home", "work"].map(|folder| format!("/{folder}/"));
    let mut problems = Vec::new();
    for file in &tree.files {
        for folder in &folders {
            for (at, _) in file.text.match_indices(folder.as_str()) {
                // After a name it is in the middle of another path.
                let before = file.text[..at].chars().next_back();
                let user = &file.text[at + folder.len()..];
                // Ada is the person of the examples, `agent` the user of a sandbox.
                let is_example = user.starts_with("ada") || user.starts_with("agent");
                if !is_example && !before.is_some_and(|c| c.is_alphanumeric() || "_-./~*}])".contains(c)) {
                    let message = format!("`{folder}…` is a path of somebody's machine");
                    problems.push(Problem::new(&file.path, line_of(&file.text, at), message));
                }
            }
        }
    }
    problems
}

/// Checks that every relative link leads to a file or folder of the repository.
pub(super) fn links_resolve(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for file in tree.matching("", ".md") {
        for (line, target) in links(&file.text) {
            let path = target.split('#').next().unwrap_or_default();
            if path.is_empty() || path.contains("://") || path.starts_with("mailto:") {
                continue;
            }
            let resolved = resolve(&file.path, path);
            let exists = resolved.as_ref().is_some_and(|path| {
                tree.files.iter().any(|file| file.path == *path || file.path.starts_with(&format!("{path}/")))
            });
            if !exists {
                problems.push(Problem::new(&file.path, line, format!("the link `{target}` leads nowhere")));
            }
        }
    }
    problems
}

/// Checks that every error code has a page with its name, every page a code, and that the index lists them all.
pub(super) fn a_page_per_error_code(tree: &Tree) -> Vec<Problem> {
    let source = match tree.require(ERROR_CODES) {
        Ok(source) => source,
        Err(problem) => return vec![problem],
    };
    let codes = error_codes(source);
    let mut problems = Vec::new();
    if codes.is_empty() {
        problems.push(Problem::new(ERROR_CODES, 0, "no error code is found here any more: mend this rule"));
    }
    let index = tree.file("docs/errors/README.md").map(|file| file.text.as_str()).unwrap_or_default();
    for (line, code, name) in &codes {
        let page = format!("docs/errors/{code}.md");
        match tree.file(&page) {
            None => problems.push(Problem::new(ERROR_CODES, *line, format!("`{code}` has no page `{page}`"))),
            Some(file) if !file.text.starts_with(&format!("# {code} {name}\n")) => {
                problems.push(Problem::new(&page, 1, format!("the page must begin with `# {code} {name}`")));
            }
            Some(_) => {}
        }
        if !index.contains(&format!("({code}.md)")) {
            problems.push(Problem::new("docs/errors/README.md", 0, format!("`{code}` is not in the index")));
        }
    }
    for file in tree.matching("docs/errors/", ".md").filter(|file| !file.path.ends_with("/README.md")) {
        let code = file_stem(file);
        if !codes.iter().any(|(_, known, _)| *known == code) {
            problems.push(Problem::new(&file.path, 0, format!("there is no error code `{code}`")));
        }
    }
    problems
}

/// Checks that the reference contains the name of every event.
pub(super) fn every_event_is_documented(tree: &Tree) -> Vec<Problem> {
    let (source, page) = match (tree.require(EVENT_NAMES), tree.require(EVENTS_PAGE)) {
        (Ok(source), Ok(page)) => (source, page),
        (Err(problem), _) | (_, Err(problem)) => return vec![problem],
    };
    let mut problems = Vec::new();
    let mut seen: Vec<&str> = Vec::new();
    for (index, line) in source.lines().enumerate() {
        for name in line.split('"').skip(1).step_by(2).filter(|text| is_event_name(text)) {
            if !seen.contains(&name) && !page.contains(&format!("`{name}`")) {
                problems.push(Problem::new(EVENT_NAMES, index + 1, format!("`{name}` is not in {EVENTS_PAGE}")));
            }
            seen.push(name);
        }
    }
    if seen.is_empty() {
        problems.push(Problem::new(EVENT_NAMES, 0, "no event name is found here any more: mend this rule"));
    }
    problems
}

/// Checks that the guide's index links every page of the guide.
pub(super) fn the_guide_links_its_pages(tree: &Tree) -> Vec<Problem> {
    every_page_is_linked(tree, "docs/guide/")
}

/// Checks that decision records are `NNNN-title.md`, one per number, and that their index links them all.
pub(super) fn decisions_are_numbered_and_listed(tree: &Tree) -> Vec<Problem> {
    const FOLDER: &str = "docs/decisions/";
    let mut problems = every_page_is_linked(tree, FOLDER);
    let mut numbers: Vec<&str> = Vec::new();
    for file in tree.matching(FOLDER, ".md").filter(|file| !file.path.ends_with("/README.md")) {
        let number = file_stem(file).split('-').next().unwrap_or_default();
        if number.len() != 4 || !number.bytes().all(|byte| byte.is_ascii_digit()) {
            problems.push(Problem::new(&file.path, 0, "a decision's name starts with its number: `0007-title.md`"));
        } else if numbers.contains(&number) {
            problems.push(Problem::new(&file.path, 0, format!("there is another decision {number}")));
        }
        numbers.push(number);
    }
    problems
}

/// Checks that the changelog has a section for unreleased changes.
pub(super) fn the_changelog_has_an_unreleased_section(tree: &Tree) -> Vec<Problem> {
    let text = match tree.require("CHANGELOG.md") {
        Ok(text) => text,
        Err(problem) => return vec![problem],
    };
    let there = text.lines().any(|line| line.starts_with("## [Unreleased]") || line.starts_with("## Unreleased"));
    if there { Vec::new() } else { vec![Problem::new("CHANGELOG.md", 0, "there is no `## [Unreleased]` section")] }
}

fn every_page_is_linked(tree: &Tree, folder: &str) -> Vec<Problem> {
    let index = format!("{folder}README.md");
    let text = match tree.require(&index) {
        Ok(text) => text,
        Err(problem) => return vec![problem],
    };
    let linked: Vec<String> = links(text).into_iter().filter_map(|(_, target)| resolve(&index, &target)).collect();
    let pages = tree.matching(folder, ".md").filter(|file| file.path != index);
    let missing = pages.filter(|file| !linked.contains(&file.path));
    missing.map(|file| Problem::new(&index, 0, format!("`{}` is not linked", file.path))).collect()
}

/// Returns the line, code and name of each error code in the source of core. Each is written as `… = "E3103",
/// "TIMEOUT", …`.
fn error_codes(source: &str) -> Vec<(usize, &str, &str)> {
    let mut codes = Vec::new();
    for (index, line) in source.lines().enumerate() {
        if let [start, code, between, name, ..] = line.split('"').collect::<Vec<_>>()[..]
            && start.trim_end().ends_with('=')
            && between.trim() == ","
            && code.len() == 5
            && code.starts_with('E')
        {
            codes.push((index + 1, code, name));
        }
    }
    codes
}

fn is_event_name(text: &str) -> bool {
    let families = ["tool.", "sandbox.", "source.", "agent."];
    families.iter().any(|family| text.starts_with(family))
        && text.len() > text.find('.').map_or(0, |dot| dot + 1)
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'.' || byte == b'_')
}

/// Returns the links `[text](target)` of a page with their lines, without those in code.
fn links(markdown: &str) -> Vec<(usize, String)> {
    let mut links = Vec::new();
    let mut in_block = false;
    for (index, line) in markdown.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        }
        if in_block {
            continue;
        }
        // Text between backticks has no links; the even pieces are outside of them.
        let prose: String =
            line.split('`').enumerate().map(|(piece, text)| if piece % 2 == 0 { text } else { "x" }).collect();
        for after in prose.split("](").skip(1) {
            if let Some(end) = after.find(')') {
                let target = after[..end].split_whitespace().next().unwrap_or_default();
                links.push((index + 1, target.trim_matches(['<', '>']).to_owned()));
            }
        }
    }
    links
}

/// Returns the target of a relative link as a path from the root, or `None` if it leaves the repository.
fn resolve(from: &str, target: &str) -> Option<String> {
    let target = target.split('#').next().unwrap_or_default();
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

fn file_stem(file: &File) -> &str {
    file.path.rsplit('/').next().unwrap_or_default().trim_end_matches(".md")
}

#[cfg(test)]
mod tests {
    use super::super::found;
    use super::*;

    #[test]
    fn a_path_of_a_machine_is_found_and_a_path_in_the_repository_is_not() {
        let bad = ["# title\nsee `/", "root/x`, net/", "work/y and ~/", "home/z, not `/", "home/ada`\n"].concat();
        let folder = ["/", "root/"].concat();
        assert_eq!(
            found(no_machine_path, &[("a.md", &bad)]),
            [format!("a.md:2: `{folder}…` is a path of somebody's machine")]
        );
    }

    #[test]
    fn a_link_that_leads_nowhere_is_found() {
        let page = "[a](b.md#x) [b](../README.md) [c](https://x.example) [d](#here) `[e](no.md)`\n\
                    ```\n[f](no.md)\n```\n[g](gone.md) [h](../../outside.md) [folder](sub)\n";
        assert_eq!(
            found(links_resolve, &[("docs/a.md", page), ("docs/b.md", ""), ("README.md", ""), ("docs/sub/c.md", "")]),
            ["docs/a.md:5: the link `gone.md` leads nowhere", "docs/a.md:5: the link `../../outside.md` leads nowhere",]
        );
    }

    #[test]
    fn codes_and_pages_fit_each_other() {
        let source =
            "codes! {\n    A = \"E3001\", \"NOT_THERE\", X, Y, false;\n    B = \"E3002\", \"BAD\", X, Y, false;\n}\n";
        assert_eq!(
            found(
                a_page_per_error_code,
                &[
                    (ERROR_CODES, source),
                    ("docs/errors/E3002.md", "# E3002 GOOD\n"),
                    ("docs/errors/E9999.md", "# E9999 OLD\n"),
                    ("docs/errors/README.md", "[E3002](E3002.md)"),
                ]
            ),
            [
                "crates/wieldy-core/src/error.rs:2: `E3001` has no page `docs/errors/E3001.md`",
                "docs/errors/README.md:1: `E3001` is not in the index",
                "docs/errors/E3002.md:1: the page must begin with `# E3002 BAD`",
                "docs/errors/E9999.md:1: there is no error code `E9999`",
            ]
        );
    }

    #[test]
    fn an_event_without_a_word_in_the_reference_is_found() {
        let source =
            "Self::A => \"tool.call.pending\",\nSelf::B => \"source.stale\",\n\"tool.call.pending\", \"tool.\"\n";
        assert_eq!(
            found(every_event_is_documented, &[(EVENT_NAMES, source), (EVENTS_PAGE, "| `tool.call.pending` |")]),
            ["crates/wieldy-core/src/event.rs:2: `source.stale` is not in docs/reference/events.md"]
        );
    }

    #[test]
    fn a_page_that_the_guide_does_not_link_is_found() {
        assert_eq!(
            found(
                the_guide_links_its_pages,
                &[("docs/guide/README.md", "[1](01-a.md)"), ("docs/guide/01-a.md", ""), ("docs/guide/02-b.md", "")]
            ),
            ["docs/guide/README.md:1: `docs/guide/02-b.md` is not linked"]
        );
    }

    #[test]
    fn a_decision_without_a_number_of_its_own_is_found() {
        let index = "[1](0001-a.md) [2](0001-b.md) [3](third.md)";
        assert_eq!(
            found(
                decisions_are_numbered_and_listed,
                &[
                    ("docs/decisions/README.md", index),
                    ("docs/decisions/0001-a.md", ""),
                    ("docs/decisions/0001-b.md", ""),
                    ("docs/decisions/third.md", ""),
                ]
            ),
            [
                "docs/decisions/0001-b.md:1: there is another decision 0001",
                "docs/decisions/third.md:1: a decision's name starts with its number: `0007-title.md`",
            ]
        );
    }

    #[test]
    fn a_changelog_without_an_unreleased_section_is_found() {
        assert_eq!(
            found(the_changelog_has_an_unreleased_section, &[("CHANGELOG.md", "# Changelog\n## [0.1.0]\n")]),
            ["CHANGELOG.md:1: there is no `## [Unreleased]` section"]
        );
        let good = "# Changelog\n\n## [Unreleased]\n";
        assert!(found(the_changelog_has_an_unreleased_section, &[("CHANGELOG.md", good)]).is_empty());
    }
}
