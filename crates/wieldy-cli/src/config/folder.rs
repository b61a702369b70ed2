//! The configuration that came with the folder of a command: `wieldy.toml`, `.wieldy/tools`, and the files that this
//! `wieldy.toml` names. Each file is read once: the bytes that are compared with the trusted ones are the bytes that
//! are used.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};

use super::trust::{TOOLS_MAX, read_regular};
use super::{Config, Environment, FILE_BYTES_MAX, FILE_NAME, Origin, Records, Shown, Trust, is_placeholder};
use crate::exit::Failure;
use crate::output::{counted, shown_in_line};

/// The folder of a project for files of this program.
pub(crate) const PROJECT_FOLDER: &str = ".wieldy";

/// The maximal size of a manifest: one byte more than core accepts, so that core reports the error.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 16 * 1024 * 1024 + 1;
/// The maximal number of bytes to read of all files of a folder together.
const READ_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// The maximal number of names in a warning.
const NAMES_MAX: usize = 8;

/// The configuration that came with a folder, and its trust.
#[derive(Debug, Default)]
pub(crate) struct Folder {
    /// The trust of its `wieldy.toml`, if it has one that is used.
    pub(crate) trust: Option<Trust>,
    /// The keys of that file which are not on the safe list, with their raw values.
    pub(crate) keys: Vec<Shown>,
    /// The mistakes in such keys of an untrusted file.
    pub(super) mistakes: Vec<String>,
    /// The trusted files of `.wieldy/tools`.
    pub(crate) tools: Vec<PathBuf>,
    /// The ignored files other than `wieldy.toml`.
    pub(crate) untrusted: Vec<PathBuf>,
    /// The files that were read, with their bytes.
    pub(crate) read: BTreeMap<PathBuf, Vec<u8>>,
}

impl Folder {
    /// Returns the keys that are ignored until the file is trusted.
    pub(crate) fn ignored(&self) -> &[Shown] {
        if self.trust == Some(Trust::Trusted) { &[] } else { &self.keys }
    }

    /// Returns the warning for a person at the terminal, or `None` if nothing is ignored.
    pub(crate) fn warning(&self) -> Option<String> {
        let mut parts = Vec::new();
        let keys = families(self.ignored());
        if keys.is_empty() && !self.mistakes.is_empty() {
            parts.push(format!("{} in `{FILE_NAME}`", counted(self.mistakes.len(), "mistake")));
        }
        if !keys.is_empty() {
            parts.push(format!("{} of `{FILE_NAME}` ({})", counted(self.ignored().len(), "key"), listed(&keys)));
        }
        let files: Vec<String> =
            self.untrusted.iter().map(|path| format!("`{}`", shown_in_line(&path.to_string_lossy()))).collect();
        if !files.is_empty() {
            parts.push(listed(&files));
        }
        let hint = "`wieldy trust` shows what it would do, and asks";
        (!parts.is_empty()).then(|| {
            format!("this folder's own configuration is not trusted and is ignored: {}; {hint}", parts.join(", "))
        })
    }

    /// Returns the note for MCP clients. It contains no text of the folder, because models would take it for wieldy's.
    pub(crate) fn note(&self) -> Option<String> {
        let (keys, files) = (self.ignored().len(), self.untrusted.len());
        let keys = (keys > 0).then(|| format!("{} of its {FILE_NAME}", counted(keys, "key")));
        let files = (files > 0).then(|| counted(files, "other file"));
        let parts: Vec<String> = [keys, files].into_iter().flatten().collect();
        (!parts.is_empty()).then(|| {
            format!(
                "The configuration that came with this folder is ignored, because no person has trusted it: {}. \
                 Tools and servers that it would add are missing. To look at it and trust it, a person runs `wieldy trust`.",
                parts.join(" and ")
            )
        })
    }
}

/// Returns the names of keys, with one name for all keys of a server, a token or a plan.
fn families(keys: &[Shown]) -> Vec<String> {
    let family = |shown: &Shown| {
        let words: Vec<&str> = shown.key.split('.').collect();
        let length = match words[..] {
            ["mcp", "servers", ..] | ["serve", "tokens", ..] | ["threads", "projects", ..] => 3,
            ["plans", ..] => 2,
            _ => words.len(),
        };
        shown_in_line(&words[..length.min(words.len())].join("."))
    };
    let mut all: Vec<String> = keys.iter().map(family).collect();
    all.dedup();
    all
}

fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(NAMES_MAX);
    let mut text = names[..names.len() - more].join(", ");
    if more > 0 {
        text += &format!(" and {more} more");
    }
    text
}

/// Reads the folder's `wieldy.toml`. The one in the user's configuration folder is the user's own, so it is skipped
/// here.
pub(super) fn file(environment: &Environment) -> Result<Option<(PathBuf, Vec<u8>)>, Failure> {
    let path = PathBuf::from(FILE_NAME);
    let is_users =
        environment.config_folder().and_then(|folder| folder.canonicalize().ok()) == Path::new(".").canonicalize().ok();
    if is_users || !path.exists() || is_placeholder(&path) {
        return Ok(None);
    }
    let doing = || format!("cannot read the configuration `{}`", path.display());
    let read = || {
        let bytes = read_regular(&path, FILE_BYTES_MAX + 1)?;
        anyhow::ensure!(bytes.len() as u64 <= FILE_BYTES_MAX, "it is larger than {FILE_BYTES_MAX} bytes");
        Ok(bytes)
    };
    let hint = "it must be a text file that you may read; `--config FILE` names another";
    let bytes = read().with_context(doing).map_err(|error: anyhow::Error| Failure::usage(error).hint(hint))?;
    Ok(Some((path, bytes)))
}

/// Decodes the bytes of a file as text.
pub(super) fn text<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a str, Failure> {
    std::str::from_utf8(bytes).map_err(|error| {
        let told = anyhow!("it is not UTF-8 text: {error}");
        Failure::usage(told.context(format!("cannot read the configuration `{}`", path.display())))
    })
}

impl Config {
    /// Finds the other files that came with the folder, and removes the untrusted ones from the configuration.
    pub(super) fn look_at_folder(&mut self, records: Option<&Records>) {
        let is_folders =
            |key: &str| self.folder.trust.is_some() && self.origin(key) == Some(&Origin::File(FILE_NAME.into()));
        let named = [is_folders("tools.manifests"), is_folders("mcp.files")];
        let folder = &mut self.folder;
        for (paths, _) in [&mut self.manifests, &mut self.mcp.files].into_iter().zip(named).filter(|(_, named)| *named)
        {
            paths.retain(|path| folder.counts(path, records));
        }
        for path in own_tools() {
            if folder.counts(&path, records) {
                folder.tools.push(path);
            }
        }
    }
}

impl Folder {
    /// Reads a file if it is trusted, and records its name if not. Without records every readable file is trusted.
    fn counts(&mut self, path: &Path, records: Option<&Records>) -> bool {
        let room = READ_BYTES_MAX.saturating_sub(self.read.values().map(|bytes| bytes.len() as u64).sum());
        let is_known = records.is_none_or(|records| records.knows(path));
        let bytes = is_known.then(|| read_regular(path, MANIFEST_BYTES_MAX.min(room)));
        match bytes {
            Some(Ok(bytes)) if room > 0 && records.is_none_or(|it| it.trust(path, &bytes) == Trust::Trusted) => {
                self.read.insert(path.to_owned(), bytes);
                true
            }
            _ => {
                self.untrusted.push(path.to_owned());
                false
            }
        }
    }
}

/// Returns the manifests in `.wieldy/tools`, sorted.
fn own_tools() -> Vec<PathBuf> {
    let Ok(entries) = Path::new(PROJECT_FOLDER).join("tools").read_dir() else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).take(TOOLS_MAX).collect();
    found.retain(|path| is_manifest(path));
    found.sort_unstable();
    found
}

/// Returns true for a file with the name of a manifest.
pub(crate) fn is_manifest(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|extension| extension == "toml" || extension == "json")
}
