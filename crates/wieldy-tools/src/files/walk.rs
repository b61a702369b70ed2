//! Walking through the workspace: folder by folder, in order, without what `.gitignore` names.
//!
//! The walk goes by handles: a folder is opened in the handle of the one above it and symbolic links are not
//! followed, so whoever exchanges folders meanwhile cannot lead it out. The rules are those of the `ignore` crate;
//! its own walker opens by path, and would wait for ever on a pipe named `.gitignore`.

use std::ffi::OsString;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cap_std::fs::{Dir, File, FileType, Metadata};
use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use tokio_util::sync::CancellationToken;

use super::guard::Guard;
use super::path::joined;
use super::workspace::{open_plain, open_plain_folder};

/// How many entries one walk looks at.
const ENTRIES_MAX: usize = 1_000_000;
/// How deep a walk goes; each level costs an open handle.
const DEPTH_MAX: u32 = 100;
/// More than this of the files of rules that hold for a folder is not read: rules take much more memory than text.
const RULES_BYTES_MAX: usize = 256 * 1024;
/// The files that hold rules; the later wins.
const RULES_FILES: [&str; 2] = [".gitignore", ".ignore"];

/// What a walk shows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WalkOptions {
    /// How many levels of folders; 1 means the first folder only.
    pub(crate) depth: u32,
    /// Whether names that begin with a dot are shown.
    pub(crate) hidden: bool,
    /// Whether ignored files are shown.
    pub(crate) ignored: bool,
}

/// Something in the workspace.
pub(crate) struct Entry {
    /// The path from the root.
    pub(crate) path: PathBuf,
    pub(crate) file_type: FileType,
    folder: Arc<Dir>,
    name: OsString,
}

impl Entry {
    /// Opens it to read, if it still is no symbolic link.
    pub(crate) fn open(&self) -> io::Result<File> {
        open_plain(&self.folder, Path::new(&self.name))
    }

    /// Its size, where that can be seen.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.metadata().map(|metadata| metadata.len())
    }

    /// Its size, times and type, where they can be seen.
    pub(crate) fn metadata(&self) -> Option<Metadata> {
        self.folder.symlink_metadata(&self.name).ok()
    }
}

/// All entries below a folder, each folder before what is in it, names in order.
pub(crate) struct Walk<'a> {
    options: WalkOptions,
    guard: &'a Guard<'a>,
    stop: &'a CancellationToken,
    frames: Vec<Frame>,
    seen: usize,
    /// Whether the walk ended before everything was shown.
    cut: bool,
    /// True if there were folders below the deepest that it enters.
    too_deep: bool,
}

/// A folder that the walk is in.
struct Frame {
    path: PathBuf,
    folder: Arc<Dir>,
    rules: Arc<Rules>,
    names: std::vec::IntoIter<(OsString, FileType)>,
}

impl<'a> Walk<'a> {
    /// A walk through the folder at `path`; `root` is the workspace's, whose rules hold for all below it.
    pub(crate) fn new(
        root: &Dir,
        folder: Dir,
        path: &Path,
        options: WalkOptions,
        guard: &'a Guard<'_>,
        stop: &'a CancellationToken,
    ) -> io::Result<Self> {
        let mut walk = Self { options, guard, stop, frames: Vec::new(), seen: 0, cut: false, too_deep: false };
        let rules = if options.ignored { Arc::default() } else { Rules::above(root, path) };
        let frame = walk.enter(path.to_owned(), folder, rules)?;
        walk.frames.push(frame);
        Ok(walk)
    }

    /// Tells which limit kept the walk from showing everything, if one did.
    pub(crate) fn left_out(&self) -> Option<String> {
        if self.stop.is_cancelled() {
            Some("the call was stopped before all folders were read".to_owned())
        } else if self.cut {
            Some(format!("only the first {ENTRIES_MAX} files and folders were looked at; give a `path` further down"))
        } else if self.too_deep {
            let told = "folders more than {} levels down were left out; give a `path` further down to look there";
            Some(told.replace("{}", &DEPTH_MAX.to_string()))
        } else {
            None
        }
    }

    fn enter(&mut self, path: PathBuf, folder: Dir, above: Arc<Rules>) -> io::Result<Frame> {
        let mut names = Vec::new();
        for entry in folder.entries()? {
            self.seen += 1;
            if self.seen > ENTRIES_MAX || self.stop.is_cancelled() {
                self.cut = true;
                break;
            }
            // An entry that cannot be looked at is as good as not there.
            if let Ok(entry) = entry
                && let Ok(file_type) = entry.file_type()
            {
                names.push((entry.file_name(), file_type));
            }
        }
        names.sort_unstable_by(|one, other| one.0.cmp(&other.0));
        let rules = if self.options.ignored { above } else { Rules::of(&folder, &path, above) };
        Ok(Frame { path, folder: Arc::new(folder), rules, names: names.into_iter() })
    }

    fn shows(&self, rules: &Rules, path: &Path, name: &OsString, file_type: FileType) -> bool {
        let hidden = name.as_encoded_bytes().starts_with(b".");
        match rules.matched(path, file_type.is_dir()) {
            Some(Verdict::Ignored) => false,
            Some(Verdict::Wanted) => true,
            // Nobody who asks for hidden files means the inside of a repository's store.
            None => !hidden || (self.options.hidden && (self.options.ignored || name != ".git")),
        }
    }
}

impl Iterator for Walk<'_> {
    type Item = Entry;

    fn next(&mut self) -> Option<Entry> {
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
                // A folder that is gone, closed to us or no folder any more is shown without what is in it.
                if depth >= DEPTH_MAX {
                    self.too_deep = true;
                } else if let Ok(frame) = open_plain_folder(&folder, Path::new(&name))
                    .and_then(|inside| self.enter(path.clone(), inside, rules))
                {
                    self.frames.push(frame);
                }
            }
            return Some(Entry { path, file_type, folder, name });
        }
    }
}

/// The rules of a folder and of those above it; the nearest that says anything decides.
#[derive(Default)]
struct Rules {
    path: PathBuf,
    own: Vec<Gitignore>,
    above: Option<Arc<Rules>>,
    /// The size of the rules, with those of the folders above.
    bytes: usize,
}

enum Verdict {
    Ignored,
    Wanted,
}

impl Rules {
    /// The rules of the workspace's root and of the folders between it and `path`.
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

    /// The rules of one folder, on top of those above it.
    fn of(folder: &Dir, path: &Path, above: Arc<Self>) -> Arc<Self> {
        let mut bytes = above.bytes;
        let own: Vec<_> = RULES_FILES.iter().filter_map(|name| rules_in(folder, Path::new(name), &mut bytes)).collect();
        if own.is_empty() { above } else { Arc::new(Self { path: path.to_owned(), own, above: Some(above), bytes }) }
    }

    fn matched(&self, path: &Path, is_folder: bool) -> Option<Verdict> {
        let below = path.strip_prefix(&self.path).unwrap_or(path);
        for rules in self.own.iter().rev() {
            match rules.matched(below, is_folder) {
                Match::None => {}
                Match::Ignore(_) => return Some(Verdict::Ignored),
                Match::Whitelist(_) => return Some(Verdict::Wanted),
            }
        }
        self.above.as_ref().and_then(|above| above.matched(path, is_folder))
    }
}

/// The rules in a file, as far as there is room for more.
fn rules_in(folder: &Dir, name: &Path, bytes: &mut usize) -> Option<Gitignore> {
    let file = open_plain(folder, name).ok().filter(|file| file.metadata().is_ok_and(|found| found.is_file()))?;
    let mut text = Vec::new();
    file.take(RULES_BYTES_MAX.saturating_sub(*bytes) as u64).read_to_end(&mut text).ok()?;
    *bytes += text.len();
    let mut builder = GitignoreBuilder::new("");
    for line in String::from_utf8_lossy(&text).lines() {
        // A line that is no rule is passed over, as git does.
        let _ = builder.add_line(None, line);
    }
    builder.build().ok()
}
