//! `Read`: returns the text of a file, whole or some lines of it.

use std::num::NonZeroU32;
use std::sync::Arc;

use encoding_rs::Encoding;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::{Confinement, Content, Outcome, Run, RunError, Tool, ToolSpec};

use super::error::{FileError, blocking};
use super::stale::note_gone;
use super::text::{self, Decoded};
use super::workspace::{LastLink, MissingFolders, Workspace, read_whole};

/// Maximum bytes of text in one answer. Further calls can read the rest.
const TEXT_BYTES_MAX: usize = 64 * 1024;

/// A tool that reads a text file from the workspace.
pub struct Read {
    workspace: Arc<Workspace>,
}

/// A file to read.
#[derive(Deserialize, JsonSchema)]
pub struct ReadArgs {
    /// The file, relative to the workspace.
    path: String,
    /// The first line to read, counted from 1.
    from_line: Option<NonZeroU32>,
    /// Number of lines to read; without it, all that follow.
    lines: Option<NonZeroU32>,
    /// The file's encoding, such as `windows-1252`, if it is neither UTF-8 nor marked by a byte order mark.
    encoding: Option<String>,
}

impl Read {
    /// Creates the tool for this workspace.
    pub fn new(workspace: Arc<Workspace>) -> Self {
        Self { workspace }
    }
}

impl Tool for Read {
    type Args = ReadArgs;

    fn spec(&self) -> ToolSpec {
        super::reading(
            "Read",
            "ReadFile",
            "Reads a text file, or some lines of it. The text comes as it is, without line numbers, \
             so that parts of it can be given to `Edit`.",
        )
        .weak_alias("read_file")
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.workspace.names_of(thing)
    }

    fn respell(&self, arguments: &Value, _: &Confinement) -> Vec<(String, String)> {
        self.workspace.respell(arguments, &[])
    }

    async fn run(&self, args: ReadArgs, run: &Run) -> Result<Outcome, RunError> {
        let (workspace, run) = (self.workspace.clone(), run.clone());
        Ok(blocking(move || read(&workspace, &args, &run)).await?)
    }
}

fn read(workspace: &Workspace, args: &ReadArgs, run: &Run) -> Result<Outcome, FileError> {
    let given = workspace.given(&args.path)?;
    let wanted = args.encoding.as_deref().map(encoding).transpose()?;
    let guard = &workspace.guard(&run.confinement().files);
    let (mut file, _) = workspace.open_file(&given, guard).inspect_err(|error| {
        if matches!(error, FileError::Missing { .. })
            && let Ok(place) = workspace.locate(&given, MissingFolders::Refuse, LastLink::Itself, guard)
        {
            note_gone(workspace, run, &place.key);
        }
    })?;
    let content = read_whole(&mut file, &given.to_string())?;
    let Ok(decoded) = text::decode(&content, wanted) else {
        return Err(FileError::Binary { path: given.to_string(), bytes: content.len() });
    };
    let part = LineRange::of(&decoded.text, args.from_line.map_or(1, NonZeroU32::get), args.lines.map(NonZeroU32::get));
    let part = part.map_err(|total| {
        FileError::refused(format!("`{given}` has only {total} lines"), format!("give a `from_line` from 1 to {total}"))
    })?;

    let hash = blake3::hash(&content);
    let seen = workspace.reads.note(run.caller(), &workspace.key(&given)?, hash);
    let changed = seen.filter(|seen| *seen != hash);
    if let Some(seen) = changed {
        run.source_stale(&given.to_string(), &seen.to_string(), Some(&hash.to_string()));
    }
    let mut outcome = Outcome::text(part.text).structured(json!({
        "path": given.to_string(),
        "from_line": part.from_line,
        "lines": part.lines,
        "total_lines": part.total_lines,
        "bytes": content.len(),
        "encoding": decoded.encoding.name(),
        "hash": hash.to_string(),
        "changed": changed.is_some(),
    }));
    outcome.partial = part.cut;
    if changed.is_some() {
        let line = "[the file changed since this session last read or wrote it]";
        // The note begins a line of its own, and other notes follow it.
        let ends_a_line = part.text.is_empty() || part.text.ends_with('\n');
        outcome.content.push(Content::text(if ends_a_line { format!("{line}\n") } else { format!("\n{line}\n") }));
    }
    outcome.content.extend(notes(&part, &decoded).into_iter().map(Content::text));
    Ok(outcome)
}

/// Returns notes on the text for facts that it does not show itself.
fn notes(part: &LineRange<'_>, decoded: &Decoded<'_>) -> Vec<String> {
    let mut notes = Vec::new();
    if part.cut {
        let (last, next) = (part.from_line + part.lines.saturating_sub(1), part.from_line + part.lines);
        notes.push(match part.lines {
            0 => format!("\n[line {} is too long; this is only its beginning]", part.from_line),
            _ => format!("[this ends after line {last} of {}; read on with `from_line` {next}]", part.total_lines),
        });
    }
    if decoded.lossy {
        let name = decoded.encoding.name();
        notes.push(format!(
            "\n[bytes that mean nothing in {name} are shown as \u{FFFD}; give the `encoding` to read them]"
        ));
    }
    notes
}

fn encoding(label: &str) -> Result<&'static Encoding, FileError> {
    Encoding::for_label(label.as_bytes()).ok_or_else(|| {
        FileError::refused(
            format!("`{label}` is not an encoding that we know"),
            "give a name such as `utf-8`, `windows-1252`, `utf-16le` or `shift_jis`",
        )
    })
}

/// Some lines of a text.
#[derive(Debug, PartialEq, Eq)]
struct LineRange<'a> {
    text: &'a str,
    from_line: usize,
    /// The number of whole lines.
    lines: usize,
    total_lines: usize,
    /// True if not all requested lines fit.
    cut: bool,
}

impl<'a> LineRange<'a> {
    /// Returns `lines` lines from `from_line` on. If `from_line` is after the last line, the error is the number of
    /// lines.
    fn of(text: &'a str, from_line: u32, lines: Option<u32>) -> Result<Self, usize> {
        let total_lines = text.split_inclusive('\n').count();
        let from_line = from_line as usize;
        if from_line > total_lines.max(1) {
            return Err(total_lines);
        }
        let start: usize = text.split_inclusive('\n').take(from_line - 1).map(str::len).sum();
        let rest = &text[start..];
        let (mut end, mut whole) = (0, 0);
        let wanted = lines.map_or(usize::MAX, |lines| lines as usize);
        for line in rest.split_inclusive('\n').take(wanted) {
            if end + line.len() > TEXT_BYTES_MAX {
                let text = if whole == 0 { text::cut(line, TEXT_BYTES_MAX) } else { &rest[..end] };
                return Ok(Self { text, from_line, lines: whole, total_lines, cut: true });
            }
            end += line.len();
            whole += 1;
        }
        Ok(Self { text: &rest[..end], from_line, lines: whole, total_lines, cut: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(text: &str, from_line: u32, lines: Option<u32>) -> Result<(&str, usize, usize, bool), usize> {
        LineRange::of(text, from_line, lines).map(|part| (part.text, part.lines, part.total_lines, part.cut))
    }

    #[test]
    fn lines_are_counted_from_one_and_keep_their_ends() {
        let text = "a\r\nb\nc";
        assert_eq!(part(text, 1, None), Ok((text, 3, 3, false)));
        assert_eq!(part(text, 1, Some(1)), Ok(("a\r\n", 1, 3, false)));
        assert_eq!(part(text, 2, Some(9)), Ok(("b\nc", 2, 3, false)));
        assert_eq!(part(text, 4, None), Err(3));
        assert_eq!(part("", 1, None), Ok(("", 0, 0, false)));
        assert_eq!(part("", 2, None), Err(0));
    }

    #[test]
    fn too_much_text_ends_after_a_line_and_a_line_too_long_where_no_character_is_torn() {
        let line = format!("{}\n", "x".repeat(TEXT_BYTES_MAX / 2));
        let text = line.repeat(3);
        assert_eq!(part(&text, 1, None), Ok((line.as_str(), 1, 3, true)));
        assert_eq!(part(&text, 3, None), Ok((line.as_str(), 1, 3, false)));
        let long = format!("x{}", "é".repeat(TEXT_BYTES_MAX));
        assert_eq!(part(&long, 1, None).map(|(text, ..)| text.len()), Ok(TEXT_BYTES_MAX - 1));
    }
}
