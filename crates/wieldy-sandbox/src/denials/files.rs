//! Finds out which files a command was refused. The kernel reports this only to the program, which may print it.
//!
//! When a command has failed, the end of its output is searched for the C library's error messages and the path beside
//! them. A denial is reported if the plan of the sandbox refuses this access; a file whose permissions do not allow it
//! is no denial. A program that prints such messages falsely deceives only the reader of its own result.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use wieldy_core::{Command, Confinement, Denial, Ended, OutputSink, Stream};

use super::network;
use crate::supervise::supervisor::DEFAULT_PATH;
use crate::view::host::{NOT_SHOWN, on_host};
use crate::view::path_lookup::{PathAccess, ReadOnly, access_to};
use crate::view::plan::{Step, host, without_dots};

/// The number of bytes at the end of the output that are searched.
const TAIL_BYTES: usize = 4 * 1024;

/// The maximum number of denials found in a command's output. Only the last ones are reported, which are the nearest
/// to its end.
const BREACHES_MAX: usize = 4;

/// The maximum length of a reported path. Longer paths are dropped, not cut: a part of a secret would not be recognized
/// as one.
const PATH_BYTES_MAX: usize = 1024;

/// The exit code of shells for a program that cannot be executed; then a denial says nothing about writing.
const NOT_EXECUTABLE: i32 = 126;

/// Folders that every host has, and no sandbox shows by itself. A path that is missing elsewhere most likely does not
/// exist.
const KEPT_BACK: [&str; 7] = ["/boot", "/home", "/media", "/mnt", "/root", "/srv", "/var"];

/// A sink that passes output on and keeps the end of it.
pub(crate) struct FileDenials<'a> {
    output: &'a dyn OutputSink,
    stdout: Mutex<Tail>,
    stderr: Mutex<Tail>,
}

#[derive(Default)]
struct Tail {
    bytes: Vec<u8>,
    /// True if earlier bytes were dropped.
    is_cut: bool,
}

impl<'a> FileDenials<'a> {
    pub(crate) fn new(output: &'a dyn OutputSink) -> Self {
        Self { output, stdout: Mutex::default(), stderr: Mutex::default() }
    }

    /// Returns the denials of a command that ended like this: accesses that the plan of its sandbox or its network
    /// refused.
    pub(crate) fn denials(
        self,
        ended: Ended,
        command: &Command,
        confinement: &Confinement,
        steps: &[Step],
    ) -> Vec<Denial> {
        let code = match ended {
            Ended::Code(code) if code != 0 => code,
            Ended::Code(_) | Ended::Signal(_) => return Vec::new(),
        };
        let text = self.text();
        let workspace = confinement.workspace.canonicalize().unwrap_or_else(|_| confinement.workspace.clone());
        let search = command.environment.get("PATH").map_or(DEFAULT_PATH, String::as_str);
        let place = Place { workspace: &workspace, folder: &workspace.join(&command.folder), steps, code, search };
        let mut denials = place.denials(&text);
        denials.extend(network::denials(&text, &confinement.network));
        denials.split_off(denials.len().saturating_sub(BREACHES_MAX))
    }

    /// Returns the end of stderr, or of stdout if stderr is empty (on a terminal, or if both are one stream).
    fn text(self) -> String {
        let of = |tail: Mutex<Tail>| tail.into_inner().unwrap_or_else(PoisonError::into_inner);
        let tail = Some(of(self.stderr)).filter(|tail| !tail.bytes.is_empty()).unwrap_or_else(|| of(self.stdout));
        let from = tail.bytes.len().saturating_sub(TAIL_BYTES);
        let text = without_escapes(&String::from_utf8_lossy(tail.bytes.get(from..).unwrap_or_default()));
        // The first line may have lost its beginning.
        let is_whole = from == 0 && !tail.is_cut;
        if is_whole { text } else { text.split_once('\n').map_or("", |(_, rest)| rest).to_owned() }
    }
}

impl OutputSink for FileDenials<'_> {
    fn write(&self, stream: Stream, bytes: &[u8]) {
        let tail = match stream {
            Stream::Stdout => &self.stdout,
            Stream::Stderr => &self.stderr,
        };
        tail.lock().unwrap_or_else(PoisonError::into_inner).push(bytes);
        self.output.write(stream, bytes);
    }
}

impl Tail {
    /// Appends bytes, and drops old ones before the tail exceeds twice its length.
    fn push(&mut self, bytes: &[u8]) {
        let end = bytes.get(bytes.len().saturating_sub(TAIL_BYTES)..).unwrap_or_default();
        let surplus = self.bytes.len().saturating_sub(TAIL_BYTES);
        if end.len() < bytes.len() || self.bytes.len() + end.len() > 2 * TAIL_BYTES {
            self.bytes.drain(..surplus);
            self.is_cut = true;
        }
        self.bytes.extend_from_slice(end);
    }
}

/// The surroundings of a command that ended with this code.
struct Place<'a> {
    workspace: &'a Path,
    folder: &'a Path,
    steps: &'a [Step],
    code: i32,
    /// The folders in which the command looked for programs.
    search: &'a str,
}

impl Place<'_> {
    fn denials(&self, text: &str) -> Vec<Denial> {
        let mut denials: Vec<Denial> = Vec::new();
        for denial in error_lines(text).into_iter().filter_map(|line| self.denial(&line)) {
            if !denials.contains(&denial) {
                denials.push(denial);
            }
        }
        denials
    }

    /// Returns the denial that an error line is about, if the plan is the reason.
    fn denial(&self, line: &ErrorLine<'_>) -> Option<Denial> {
        if line.path.len() > PATH_BYTES_MAX {
            return None;
        }
        if line.word == Word::NoProgram {
            return self.missing_program(line.path);
        }
        let path = without_dots(&self.folder.join(line.path));
        let access_to = access_to(self.steps, &path);
        let is_refused = match line.word {
            Word::ReadOnly => access_to != PathAccess::Open && access_to != PathAccess::Held,
            Word::Busy => matches!(
                access_to,
                PathAccess::Held | PathAccess::Hidden | PathAccess::ReadOnly { why: ReadOnly::Protected, .. }
            ),
            Word::Denied => match &access_to {
                PathAccess::Hidden | PathAccess::Outside => true,
                // All users may read the file, so the command was denied writing.
                PathAccess::ReadOnly { host, .. } => {
                    self.code != NOT_EXECUTABLE && host.as_deref().is_none_or(everybody_may_read)
                }
                PathAccess::Open | PathAccess::Held | PathAccess::Kernel => false,
            },
            // In the sandbox, a path that is not shown looks like a missing one. The report does not reveal the
            // difference: only the path counts, not the host's files.
            Word::Missing => {
                access_to == PathAccess::Outside
                    && KEPT_BACK.iter().any(|folder| Path::new(line.path).starts_with(folder))
            }
            Word::NoProgram => false,
        };
        let reason = is_refused.then(|| self.reason(&access_to, &path))??;
        let path =
            path.strip_prefix(self.workspace).ok().filter(|inner| !inner.as_os_str().is_empty()).unwrap_or(&path);
        Some(Denial::Filesystem { path: shown(&path.to_string_lossy()), reason: reason.into() })
    }

    /// Returns the reason why the plan refuses a path.
    fn reason(&self, access: &PathAccess, path: &Path) -> Option<&'static str> {
        let is_mounted =
            |access_to: &PathAccess| matches!(access_to, PathAccess::ReadOnly { why: ReadOnly::Mounted, .. });
        let is_of_workspace = is_mounted(access) && path.starts_with(self.workspace);
        if is_of_workspace && is_mounted(&access_to(self.steps, self.workspace)) {
            return Some(Denial::WORKSPACE_IS_READ_ONLY);
        }
        reason(access)
    }

    /// Returns the denial of a command that did not find a program, if the host has it and the sandbox does not show
    /// it.
    fn missing_program(&self, name: &str) -> Option<Denial> {
        let found = on_host(name, self.search)?;
        let real = found.canonicalize().unwrap_or_else(|_| found.clone());
        // The host's program may be in a folder that is private in the sandbox.
        let is_shown =
            |path: &Path| access_to(self.steps, path) != PathAccess::Hidden && host(self.steps, path).is_some();
        let path = [found, real].into_iter().find(|path| !is_shown(path))?;
        Some(Denial::Filesystem { path: shown(&path.to_string_lossy()), reason: NOT_SHOWN.into() })
    }
}

fn reason(access_to: &PathAccess) -> Option<&'static str> {
    Some(match access_to {
        PathAccess::Open => return None,
        PathAccess::Held => "it contains a hidden or protected path, so it can be neither moved nor removed",
        PathAccess::ReadOnly { why: ReadOnly::System, .. } => {
            "it is read-only in a sandbox, as all of the system is; write to the workspace or to `/tmp`"
        }
        PathAccess::ReadOnly { why: ReadOnly::Mounted, .. } => {
            "it is mounted read-only; `sandbox.mounts` is where an operator makes it writable"
        }
        PathAccess::ReadOnly { why: ReadOnly::Protected, .. } => {
            "it is protected, since programs outside obey it; it can be changed only outside of the sandbox"
        }
        PathAccess::Hidden => {
            "it is hidden, as secrets and the executor's own files are; `sandbox.shown` is where an operator shows a secret"
        }
        PathAccess::Kernel => "it is the kernel's, and read-only in a sandbox",
        PathAccess::Outside => "it is not in the sandbox; `sandbox.mounts` is where an operator brings it in",
    })
}

/// Returns true if all users may read a file, or find out that it is missing.
fn everybody_may_read(path: &Path) -> bool {
    let allows = |found: io::Result<fs::Metadata>, mode| found.is_ok_and(|found| found.mode() & mode == mode);
    let is_readable = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        found => allows(found, 0o004),
    };
    let existing = path.ancestors().skip(1).map(fs::metadata).skip_while(Result::is_err);
    is_readable && existing.into_iter().all(|folder| allows(folder, 0o001))
}

/// Returns a path as text with control characters escaped, which a terminal would obey.
fn shown(path: &str) -> String {
    path.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// An error message in the output, and the path beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ErrorLine<'a> {
    word: Word,
    path: &'a str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    ReadOnly,
    Denied,
    Missing,
    Busy,
    /// A program was not found.
    NoProgram,
}

/// Messages of the C library, which most languages use; some write them in lower case.
const WORDS: [(&str, Word); 7] = [
    ("read-only file system", Word::ReadOnly),
    ("permission denied", Word::Denied),
    ("no such file or directory", Word::Missing),
    ("device or resource busy", Word::Busy),
    // Shells, and programs in Go.
    ("command not found", Word::NoProgram),
    (": not found", Word::NoProgram),
    ("executable file not found", Word::NoProgram),
];

/// Returns all error lines in a text, in order. A word that was taken for a path by mistake does no harm: the plan
/// decides about it, too.
fn error_lines(text: &str) -> Vec<ErrorLine<'_>> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        let small = line.to_ascii_lowercase();
        for (words, word) in WORDS {
            let Some(at) = small.rfind(words) else { continue };
            let (before, after) =
                (line.get(..at).unwrap_or_default(), line.get(at + words.len()..).unwrap_or_default());
            let mut paths = paths_after(after);
            if paths.is_empty() {
                paths = paths_before(before);
            }
            if paths.is_empty() {
                paths = paths_above(lines.get(..number).unwrap_or_default());
            }
            found.extend(paths.into_iter().map(|path| ErrorLine { word, path }));
        }
    }
    found
}

/// Returns paths that follow the message: `: '/path'` (Python), `, open '/path'` (Node), `: /path` (zsh), ` @
/// rb_sysopen - /path (…)` (Ruby).
fn paths_after(after: &str) -> Vec<&str> {
    if let Some(rest) = after.strip_prefix(": ") {
        let paths = quoted(rest);
        return if paths.is_empty() { vec![rest.trim()] } else { paths };
    }
    if let Some(rest) = after.strip_prefix(", ") {
        return quoted(rest);
    }
    let named = after.strip_prefix(" @ ").and_then(|rest| rest.split_once(" - "));
    named.map(|(_, path)| path.rsplit_once(" (").map_or(path, |(path, _)| path)).into_iter().collect()
}

/// Returns paths before the message: `cannot move 'one' to 'other': ` (coreutils), `line 1: path: `, `cannot create
/// path: ` (shells), `open path: ` (Go), `path (` (Java), `path: Cannot open: ` (tar).
fn paths_before(before: &str) -> Vec<&str> {
    let before = before.trim_end_matches([' ', ':', '(', '[']);
    let mut parts = before.rsplit(": ");
    let Some(part) = parts.find(|part| !part.starts_with("Cannot ")) else { return Vec::new() };
    let paths = quoted(part);
    match part.trim().rsplit_once(' ') {
        _ if !paths.is_empty() => paths,
        Some((_, last)) => vec![part.trim(), last],
        None if part.trim().is_empty() => Vec::new(),
        None => vec![part.trim()],
    }
}

/// Returns paths in the sentence above a line that has only the message and its number: "failed to write `path`",
/// "Caused by:" (cargo).
fn paths_above<'a>(lines: &[&'a str]) -> Vec<&'a str> {
    let above = lines.iter().rev().filter(|line| !matches!(line.trim(), "" | "Caused by:"));
    above.take(1).flat_map(|line| quoted(line)).collect()
}

/// Returns the texts in quotation marks. An apostrophe inside a word opens none.
fn quoted(text: &str) -> Vec<&str> {
    const MARKS: [(char, char); 5] = [('\'', '\''), ('"', '"'), ('`', '`'), ('‘', '’'), ('“', '”')];
    let mut found = Vec::new();
    let (mut rest, mut previous) = (text, None);
    while let Some(c) = rest.chars().next() {
        let inner = rest.get(c.len_utf8()..).unwrap_or_default();
        let is_opening = previous.is_none_or(|c: char| !c.is_alphanumeric());
        let mark = MARKS.iter().find(|(open, _)| *open == c && is_opening);
        let end = mark.and_then(|(_, close)| Some((inner.find(*close)?, close.len_utf8())));
        rest = match end {
            Some((end, width)) => {
                found.extend(inner.get(..end).filter(|path| !path.is_empty()));
                inner.get(end + width..).unwrap_or_default()
            }
            None => inner,
        };
        previous = Some(c);
    }
    found
}

/// Removes terminal escape sequences, such as colours, from a text.
fn without_escapes(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut parts = text.split("\u{1b}[");
    plain.push_str(parts.next().unwrap_or_default());
    for part in parts {
        let end = part.find(|c: char| ('@'..='~').contains(&c));
        plain.push_str(end.and_then(|end| part.get(end + 1..)).unwrap_or_default());
    }
    plain
}

#[cfg(test)]
mod tests;
