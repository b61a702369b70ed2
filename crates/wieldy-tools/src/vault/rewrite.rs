//! Rewriting links for a move: which bytes of which notes change, so that every link means the same file as before.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::graph::Graph;
use super::link::{Link, LinkKind};
use super::names::Names;
use crate::files::{Editable, FileError};

/// New bytes for a part of a note's text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Edit {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// The text before and after.
    pub(crate) old: String,
    pub(crate) new: String,
}

/// The edits of a move.
#[derive(Debug, Default)]
pub(crate) struct Rewrite {
    /// The edits of each note, by the note's position.
    pub(crate) edits: BTreeMap<usize, Vec<Edit>>,
    /// The numbers of links that lead to no file, before and after.
    pub(crate) unresolved_before: usize,
    pub(crate) unresolved_after: usize,
}

impl Rewrite {
    /// Finds the links that would mean another file, or more than one, under the names after the move.
    pub(crate) fn of(graph: &Graph, after: &Names, update_links: bool) -> Result<Self, FileError> {
        let mut rewrite = Self { unresolved_before: graph.unresolved(), ..Self::default() };
        for (note, facts) in graph.notes() {
            let from = after.path(note);
            for (link, before) in facts.links.iter().zip(&graph.links[note]) {
                let now = after.resolve(from, &link.path, link.kind.is_markdown());
                let Some(before) = before else {
                    rewrite.unresolved_after += usize::from(now.is_none());
                    continue;
                };
                let is_same = now.is_some_and(|now| now.file == before.file && (!now.ambiguous || before.ambiguous));
                if is_same {
                    continue;
                }
                if !update_links {
                    rewrite.unresolved_after += usize::from(now.is_none());
                    continue;
                }
                let path = after.link_to(from, before.file, &link.path, link.kind.is_markdown());
                let new = written(link, &path).ok_or_else(|| unwritable(graph.names.path(note), link, &path))?;
                let edit = Edit { start: link.start, end: link.end, old: String::new(), new };
                rewrite.edits.entry(note).or_default().push(edit);
            }
        }
        Ok(rewrite)
    }
}

fn written(link: &Link, path: &str) -> Option<String> {
    // A path with a scheme in front would be an address.
    let path = match link.kind {
        LinkKind::Markdown | LinkKind::MarkdownAngle if super::link::is_external(path) => format!("./{path}"),
        _ => path.to_owned(),
    };
    link.kind.written(&path)
}

fn unwritable(note: &str, link: &Link, path: &str) -> FileError {
    FileError::refused(
        format!("the link to `{}` in line {} of `{note}` cannot be written as `{path}`", link.path, link.line),
        "choose a path without `[ ] # ^ | \\`, or set `update_links` to false",
    )
}

/// Completes the edits by the text that they replace.
pub(crate) fn with_old(content: &[u8], edits: &[Edit]) -> Option<Vec<Edit>> {
    let editable = Editable::of(content).ok()?;
    let whole = |edit: &Edit| Some(Edit { old: editable.text.get(edit.start..edit.end)?.to_owned(), ..edit.clone() });
    edits.iter().map(whole).collect()
}

/// Returns the edits that undo these.
pub(crate) fn undone(edits: &[Edit]) -> Vec<Edit> {
    let (mut before, mut after) = (0, 0);
    let undo = |edit: &Edit| {
        after += edit.start - before;
        let start = after;
        (before, after) = (edit.end, after + edit.new.len());
        Edit { start, end: after, old: edit.new.clone(), new: edit.old.clone() }
    };
    edits.iter().map(undo).collect()
}

/// Returns the content of a note with its edits, or `None` if they do not fit it.
pub(crate) fn applied(content: &[u8], edits: &[Edit]) -> Option<Vec<u8>> {
    let mut editable = Editable::of(content).ok()?;
    if edits.iter().any(|edit| !editable.accepts(&edit.new)) {
        return None;
    }
    let mut text = String::with_capacity(editable.text.len());
    let mut done = 0;
    for edit in edits {
        let kept = editable.text.get(done..edit.start).filter(|_| edit.start <= edit.end)?;
        text.push_str(kept);
        text.push_str(&edit.new);
        done = edit.end;
    }
    text.push_str(editable.text.get(done..)?);
    editable.text = text;
    Some(editable.into_bytes())
}
