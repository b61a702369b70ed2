//! Directory walks: lists the workspace folder by folder, in order, without the files that `.gitignore` excludes.
//!
//! The walk uses handles: each folder is opened through the handle of its parent and symbolic links are not followed,
//! so a concurrent exchange of folders cannot lead it outside. The rules are those of the `ignore` crate. Its own
//! walker opens by path, and would block for ever on a pipe named `.gitignore`.

use std::ffi::OsString;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cap_std::fs::{Dir, File, FileType, Metadata};
use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use rustix::fs::{AtFlags, Stat, statat};
use tokio_util::sync::CancellationToken;

use super::guard::Guard;
use super::path::joined;
use super::workspace::{open_plain, open_plain_folder};

/// Maximum number of entries that one walk reads.
const ENTRIES_MAX: usize = 1_000_000;
/// Maximum depth of a walk. Each level costs an open handle.
const DEPTH_MAX: u32 = 100;
/// Maximum bytes of rule files that are read for a folder: compiled rules take much more memory than text.
const RULES_BYTES_MAX: usize = 256 * 1024;
/// The files that hold rules. The later one takes precedence.
const RULES_FILES: [&str; 2] = [".gitignore", ".ignore"];

/// The options of a walk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WalkOptions {
    /// Number of folder levels; 1 means the first folder only.
    pub(crate) depth: u32,
    /// True to show names that begin with a dot.
    pub(crate) hidden: bool,
    /// True to show ignored files.
    pub(crate) ignored: bool,
}

/// An entry of a folder in the workspace.
pub(crate) struct WalkEntry {
    /// The path from the root.
    pub(crate) path: PathBuf,
    pub(crate) file_type: FileType,
    folder: Arc<Dir>,
    name: OsString,
}

impl WalkEntry {
    /// Opens the file for reading, unless it has become a symbolic link.
    pub(crate) fn open(&self) -> io::Result<File> {
        open_plain(&self.folder, Path::new(&self.name))
    }

    /// Returns its size, if it can be read.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.metadata().map(|metadata| metadata.len())
    }

    /// Returns its status in one system call, if it can be read.
    pub(crate) fn stat(&self) -> Option<Stat> {
        statat(&self.folder, &*self.name, AtFlags::SYMLINK_NOFOLLOW).ok()
    }

    /// Returns its size, times and type, if they can be read.
    pub(crate) fn metadata(&self) -> Option<Metadata> {
        self.folder.symlink_metadata(&self.name).ok()
    }
}

/// A walk over all entries below a folder, each folder before its contents, names in order.
pub(crate) struct FolderWalk<'a> {
    options: WalkOptions,
    guard: &'a Guard<'a>,
    stop: &'a CancellationToken,
    frames: Vec<Frame>,
    seen: usize,
    /// True if the walk ended before everything was shown.
    cut: bool,
    /// True if there were folders below the deepest that it enters.
    too_deep: bool,
}

/// A folder that the walk has entered.
struct Frame {
    path: PathBuf,
    folder: Arc<Dir>,
    rules: Arc<IgnoreRules>,
    names: std::vec::IntoIter<(OsString, FileType)>,
}

impl<'a> FolderWalk<'a> {
    /// Starts a walk through the folder at `path`. `root` is the workspace's root, whose rules apply to everything
    /// below.
    pub(crate) fn new(
        root: &Dir,
        folder: Dir,
        path: &Path,
        options: WalkOptions,
        guard: &'a Guard<'_>,
        stop: &'a CancellationToken,
    ) -> io::Result<Self> {
        let mut walk = Self { options, guard, stop, frames: Vec::new(), seen: 0, cut: false, too_deep: false };
        let rules = if options.ignored { Arc::default() } else { IgnoreRules::above(root, path) };
        let frame = walk.enter(path.to_owned(), folder, rules)?;
        walk.frames.push(frame);
        Ok(walk)
    }

    /// Returns a note on the limit that kept the walk from showing everything, if one did.
    pub(crate) fn note_on_limits(&self) -> Option<String> {
        if self.stop.is_cancelled() {
            Some("the call was stopped before all folders were read".to_owned())
        } else if self.cut {
            Some(format!("only the first {ENTRIES_MAX} files and folders were looked at; give a `path` further down"))
        } else if self.too_deep {
            let note = "folders more than {} levels down were left out; give a `path` further down to look there";
            Some(note.replace("{}", &DEPTH_MAX.to_string()))
        } else {
            None
        }
    }

    fn enter(&mut self, path: PathBuf, folder: Dir, above: Arc<IgnoreRules>) -> io::Result<Frame> {
        let mut names = Vec::new();
        for entry in folder.entries()? {
            self.seen += 1;
            if self.seen > ENTRIES_MAX || self.stop.is_cancelled() {
                self.cut = true;
                break;
            }
            // An entry that cannot be read counts as missing.
            if let Ok(entry) = entry
                && let Ok(file_type) = entry.file_type()
            {
                names.push((entry.file_name(), file_type));
            }
        }
        names.sort_unstable_by(|one, other| one.0.cmp(&other.0));
        let rules = if self.options.ignored { above } else { IgnoreRules::of(&folder, &path, above) };
        Ok(Frame { path, folder: Arc::new(folder), rules, names: names.into_iter() })
    }

    fn shows(&self, rules: &IgnoreRules, path: &Path, name: &OsString, file_type: FileType) -> bool {
        let hidden = name.as_encoded_bytes().starts_with(b".");
        match rules.matched(path, file_type.is_dir()) {
            Some(IgnoreVerdict::Ignored) => false,
            Some(IgnoreVerdict::Wanted) => true,
            // A caller that asks for hidden files does not want the contents of `.git`.
            None => !hidden || (self.options.hidden && (self.options.ignored || name != ".git")),
        }
    }
}

impl Iterator for FolderWalk<'_> {
    type Item = WalkEntry;

    fn next(&mut self) -> Option<WalkEntry> {
        loop {
            if self.cut || self.stop.is_cancelled() {
                self.cut |= !self.frames.is_empty();
                return None;
            }
            let depth = self.frames.len() as u32;
            let frame = self.frames.last_mut()?;
            let Some((name, file_type)) = frame.names.next() else {
                self.frames.pop();
                continue;
            };
            let path = joined(&frame.path, Path::new(&name));
            let (folder, rules) = (frame.folder.clone(), frame.rules.clone());
            if !self.shows(&rules, &path, &name, file_type) || self.guard.is_placeholder(&path) {
                continue;
            }
            if file_type.is_dir() && depth < self.options.depth && self.guard.check_shown(&path).is_ok() {
                // A folder that is gone, not readable or not a folder any more is shown without its contents.
                if depth >= DEPTH_MAX {
                    self.too_deep = true;
                } else if let Ok(frame) = open_plain_folder(&folder, Path::new(&name))
                    .and_then(|inside| self.enter(path.clone(), inside, rules))
                {
                    self.frames.push(frame);
                }
            }
            return Some(WalkEntry { path, file_type, folder, name });
        }
    }
}

/// The rules of a folder and of its parents. The nearest rule that matches decides.
#[derive(Default)]
struct IgnoreRules {
    path: PathBuf,
    own: Vec<Gitignore>,
    above: Option<Arc<IgnoreRules>>,
    /// The size of the rules, including those of the parents.
    bytes: usize,
}

enum IgnoreVerdict {
    Ignored,
    Wanted,
}

impl IgnoreRules {
    /// Returns the rules of the workspace's root and of the folders between it and `path`.
    fn above(root: &Dir, path: &Path) -> Arc<Self> {
        let mut bytes = 0;
        let own = rules_in(root, Path::new(".git/info/exclude"), &mut bytes).into_iter().collect();
        let mut rules = Arc::new(Self { own, bytes, ..Self::default() });
        if path == Path::new(".") {
            return rules;
        }
        let Ok(mut folder) = root.try_clone() else { return rules };
        let mut above = PathBuf::from(".");
        for part in path.components() {
            rules = Self::of(&folder, &above, rules);
            match folder.open_dir(part.as_os_str()) {
                Ok(next) => folder = next,
                Err(_) => break,
            }
            above = joined(&above, Path::new(&part));
        }
        rules
    }

    /// Returns the rules of one folder, in addition to those of its parents.
    fn of(folder: &Dir, path: &Path, above: Arc<Self>) -> Arc<Self> {
        let mut bytes = above.bytes;
        let own: Vec<_> = RULES_FILES.iter().filter_map(|name| rules_in(folder, Path::new(name), &mut bytes)).collect();
        if own.is_empty() { above } else { Arc::new(Self { path: path.to_owned(), own, above: Some(above), bytes }) }
    }

    fn matched(&self, path: &Path, is_folder: bool) -> Option<IgnoreVerdict> {
        let below = path.strip_prefix(&self.path).unwrap_or(path);
        for rules in self.own.iter().rev() {
            match rules.matched(below, is_folder) {
                Match::None => {}
                Match::Ignore(_) => return Some(IgnoreVerdict::Ignored),
                Match::Whitelist(_) => return Some(IgnoreVerdict::Wanted),
            }
        }
        self.above.as_ref().and_then(|above| above.matched(path, is_folder))
    }
}

/// Reads the rules in a file, up to the remaining number of bytes.
fn rules_in(folder: &Dir, name: &Path, bytes: &mut usize) -> Option<Gitignore> {
    let file = open_plain(folder, name).ok().filter(|file| file.metadata().is_ok_and(|found| found.is_file()))?;
    let mut text = Vec::new();
    file.take(RULES_BYTES_MAX.saturating_sub(*bytes) as u64).read_to_end(&mut text).ok()?;
    *bytes += text.len();
    let mut builder = GitignoreBuilder::new("");
    for line in String::from_utf8_lossy(&text).lines() {
        // An invalid line is skipped, as git does.
        let _ = builder.add_line(None, line);
    }
    builder.build().ok()
}
