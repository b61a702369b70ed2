//! The page of the table of proof, in Markdown.

use std::fmt::Write;

use super::{Demand, Proof, Section, Table};

/// The length of the bars in the summary.
const BAR: usize = 10;

const HEAD: &str = "\
# Requirements

The demands on wieldy, each with the tests that show it. A demand without such a test is *not yet* done.

This page is generated: `cargo xtask requirements` makes it from `requirements.toml` beside it and from the marks
`// Shows: A3.1` above the tests, and `cargo xtask tidy` checks that they agree. The letters are the sides from which
the system was described: A calls and batches, B sandboxes, C tools, D rights and history, E MCP and results,
X ideas of our own. A number with a point is a part of a demand. The name of a test is its sentence with `_` between
the words.

";

/// Returns the text of the page.
pub(super) fn written(table: &Table, proofs: &[Proof<'_>]) -> String {
    let mut page = HEAD.to_owned();
    page += "| section | done | not yet | |\n| --- | ---: | ---: | --- |\n";
    let (mut done_in_all, mut count) = (0, 0);
    for section in &table.section {
        let done = section.demand.iter().filter(|demand| demand.not_yet.is_none()).count();
        let all = section.demand.len();
        (done_in_all, count) = (done_in_all + done, count + all);
        let _ = writeln!(page, "| {} | {done} | {} | {} |", link(section), all - done, bar(done, all));
    }
    let open = count - done_in_all;
    let _ = writeln!(page, "| **all** | **{done_in_all}** | **{open}** | {} |", bar(done_in_all, count));
    for section in &table.section {
        let _ = write!(page, "\n## {}\n\n| | demand | door | shown by |\n| --- | --- | --- | --- |\n", section.title);
        for demand in &section.demand {
            let (id, text, doors) = (&demand.id, cell(&demand.text), demand.doors.join(", "));
            let _ = writeln!(page, "| **{id}** | {text} | {doors} | {} |", shown_by(demand, proofs));
        }
    }
    page
}

/// Returns the tests of a demand as links, or the reason why there is none yet.
fn shown_by(demand: &Demand, proofs: &[Proof<'_>]) -> String {
    if let Some(reason) = &demand.not_yet {
        return format!("*not yet:* {}", cell(reason));
    }
    let shown = proofs.iter().filter(|proof| proof.id == demand.id);
    let links = shown.map(|proof| format!("[{}](../../{})", proof.test.replace('_', " "), proof.path));
    links.collect::<Vec<_>>().join("<br>")
}

/// Returns a link to the table of a section. GitHub names headings by their words in lower case.
fn link(section: &Section) -> String {
    let anchor: String =
        section.title.to_lowercase().chars().filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-').collect();
    format!("[{}](#{})", section.title, anchor.replace(' ', "-"))
}

fn bar(done: usize, all: usize) -> String {
    let full = done * BAR / all.max(1);
    format!("{}{}", "▰".repeat(full), "▱".repeat(BAR - full))
}

/// Returns a text as a table takes it.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}
