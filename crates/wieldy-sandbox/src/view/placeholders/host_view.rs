//! Placeholders that a plan needs, and a view of the host's files that leaves out those of other sandboxes.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::view::host::{Disk, entry_of};
use crate::view::placeholders::{Marked, Placeholder, is_marked, mark};
use crate::view::plan::{Entry, Look, Making, Plan, PlannedPlaceholder, Step, Wanted};
use rustix::fs::OFlags;
use wieldy_core::secrets::Held;

/// A plan, and the placeholders that the fork server must make for it.
pub(crate) struct Planned {
    pub(crate) steps: Vec<Step>,
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) placeholders: Vec<Placeholder>,
}

impl Planned {
    pub(crate) fn new(plan: Plan) -> Self {
        let Plan { steps, placeholders, environment } = plan;
        let placeholders = placeholders_for(placeholders);
        let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Self { steps, environment, placeholders }
    }
}

/// Returns the placeholders of a plan, and remembers them as ours for later plans.
pub(crate) fn placeholders_for(placeholders: Vec<PlannedPlaceholder>) -> Vec<Placeholder> {
    let places: Vec<Placeholder> = placeholders.into_iter().map(placeholder_of).collect();
    remember(&places, &mut ours());
    places
}

fn placeholder_of(PlannedPlaceholder { path, held }: PlannedPlaceholder) -> Placeholder {
    let content = match held {
        Held::Folder => None,
        Held::File(content) => Some(content.to_owned()),
    };
    Placeholder { path, content }
}

/// A placeholder of this process.
#[derive(Debug, Default)]
struct OwnPlaceholder {
    /// The content of a file; none for a folder.
    content: Option<String>,
    /// The stamp at the last check that found it unchanged, if any later change would give another one.
    seen: Option<Stamp>,
}

/// The device and inode of a file, and the seconds and nanoseconds of its last change.
pub(crate) type Stamp = ((u64, u64), (i64, i64));

/// Locks the list of all placeholders that fork servers of this process were asked to make. Some may be gone.
fn ours() -> MutexGuard<'static, HashMap<PathBuf, OwnPlaceholder>> {
    /// The number of placeholders above which missing ones are forgotten: more than all workspaces in use have.
    const OURS_MAX: usize = 20_000;
    static OURS: LazyLock<Mutex<HashMap<PathBuf, OwnPlaceholder>>> = LazyLock::new(Mutex::default);
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    if ours.len() > OURS_MAX {
        ours.retain(|path, _| path.symlink_metadata().is_ok());
    }
    ours
}

fn remember(placeholders: &[Placeholder], ours: &mut HashMap<PathBuf, OwnPlaceholder>) {
    for Placeholder { path, content } in placeholders {
        let known = ours.get(path).is_some_and(|known| known.content == *content);
        if !known {
            ours.insert(path.clone(), OwnPlaceholder { content: content.clone(), seen: None });
        }
    }
}

/// The files of this host without the placeholders of other sandboxes, ours or another executor's. Those may be removed
/// at any time, so a new sandbox must ask for them itself.
pub(crate) struct HostWithoutPlaceholders<'a> {
    /// The folders that may contain placeholders.
    pub(crate) roots: Vec<&'a Path>,
}

impl Look for HostWithoutPlaceholders<'_> {
    fn entry(&self, path: &Path) -> Option<Entry> {
        let found = path.symlink_metadata().ok()?;
        let entry = entry_of(path, &found)?;
        let may_be_held = || self.roots.iter().any(|root| path.starts_with(root));
        let is_held = || may_be_held() && is_untouched(path, Some(stamp_of(&found)), &mut ours());
        let is_only_held = !matches!(entry, Entry::Link { .. }) && is_held();
        (!is_only_held).then_some(entry)
    }

    fn names(&self, folder: &Path, wanted: Wanted) -> Vec<String> {
        Disk.names(folder, wanted)
    }

    fn deep_secrets(&self, workspace: &Path) -> Vec<PathBuf> {
        Disk.deep_secrets(workspace)
    }

    fn is_held(&self, path: &Path) -> bool {
        self.entry(path).is_none() && path.symlink_metadata().is_ok()
    }

    fn making(&self, folder: &Path) -> Making {
        Disk.making(folder)
    }
}

/// Returns true if a path with this stamp is an unchanged placeholder. One of ours that is gone counts, too: its last
/// sandbox has just ended.
fn is_untouched(path: &Path, stamp: Option<Stamp>, ours: &mut HashMap<PathBuf, OwnPlaceholder>) -> bool {
    let Some(held) = ours.get(path) else {
        return match mark(path) {
            None => false,
            Some(_) if path.is_dir() => has_only_placeholders(path, ours),
            Some(content) => is_file_of(path, &content).unwrap_or(false),
        };
    };
    // Reading the content takes much longer than comparing stamps.
    if stamp.is_some() && held.seen == stamp {
        return true;
    }
    // Our placeholder was removed, and a person made a file or folder of their own.
    if is_marked(path) == Marked::No {
        return false;
    }
    let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let is_alone = match &held.content {
        Some(content) => is_file_of(path, content.as_bytes()).unwrap_or_else(|error| is_gone(&error)),
        None => match fs::read_dir(path) {
            Ok(mut entries) => match entries.next() {
                None => true,
                Some(first) => {
                    let mut all = std::iter::once(first).chain(entries);
                    return all.all(|entry| entry.is_ok_and(|entry| is_untouched_now(&entry.path(), ours)));
                }
            },
            Err(error) => is_gone(&error),
        },
    };
    if let (true, Some(held)) = (is_alone, ours.get_mut(path)) {
        held.seen = stamp.filter(|(_, (seconds, _))| is_long_ago(*seconds));
    }
    is_alone
}

fn is_untouched_now(path: &Path, ours: &mut HashMap<PathBuf, OwnPlaceholder>) -> bool {
    is_untouched(path, stamp(path), ours)
}

/// Returns true if a folder contains only unchanged placeholders.
fn has_only_placeholders(folder: &Path, ours: &mut HashMap<PathBuf, OwnPlaceholder>) -> bool {
    let all = fs::read_dir(folder);
    all.is_ok_and(|mut all| all.all(|entry| entry.is_ok_and(|entry| is_untouched_now(&entry.path(), ours))))
}

/// Returns true if a path is a file with this content. It never waits for a pipe, and reads only regular files.
fn is_file_of(path: &Path, content: &[u8]) -> io::Result<bool> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let mut file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() || found.len() != content.len() as u64 {
        return Ok(false);
    }
    let mut read = vec![0; content.len()];
    Ok(file.read_exact(&mut read).is_ok() && read == content)
}

pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    fs::symlink_metadata(path).ok().map(|found| stamp_of(&found))
}

pub(crate) fn stamp_of(found: &fs::Metadata) -> Stamp {
    ((found.dev(), found.ino()), (found.ctime(), found.ctime_nsec()))
}

/// Returns true if any change from now on gets a later time than this.
pub(crate) fn is_long_ago(seconds: i64) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    i64::try_from(now).is_ok_and(|now| seconds + 1 < now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::placeholders::make;

    #[test]
    fn a_placeholder_is_untouched_until_something_is_written_into_it() {
        let world = tempfile::tempdir().unwrap();
        let held = |name: &str, content: Option<&str>| Placeholder {
            path: world.path().join(name),
            content: content.map(str::to_owned),
        };
        let places = [held("around", None), held("around/folder", None), held("file", Some("a")), held("gone", None)];
        assert_eq!([0, 1, 2].map(|place| make(&places[place]).unwrap()), [true; 3]);
        let mut ours = HashMap::new();
        remember(&places, &mut ours);
        let look = |ours: &mut _| places.each_ref().map(|place| is_untouched_now(&place.path, ours));
        // The answers are the same before and after the content is no longer read.
        while ours[&places[1].path].seen.is_none() || ours[&places[2].path].seen.is_none() {
            assert_eq!(look(&mut ours), [true; 4]);
            std::thread::yield_now();
        }
        assert_eq!(look(&mut ours), [true; 4]);
        remember(&places, &mut ours);
        assert!(ours[&places[1].path].seen.is_some());
        fs::write(places[1].path.join("new"), "").unwrap();
        assert_eq!(look(&mut ours), [false, false, true, true]);
        fs::write(&places[2].path, "b").unwrap();
        assert_eq!(look(&mut ours), [false, false, false, true]);
        // The check does not wait for a pipe.
        fs::remove_file(&places[2].path).unwrap();
        let pipe = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &places[2].path, pipe, rustix::fs::Mode::RUSR, 0).unwrap();
        assert_eq!(look(&mut ours), [false, false, false, true]);
        fs::remove_file(places[1].path.join("new")).unwrap();
        assert_eq!(look(&mut ours), [true, true, false, true]);
        assert!(!is_untouched_now(world.path(), &mut ours));
        // A folder of the user's own.
        fs::create_dir(&places[3].path).unwrap();
        assert_eq!(look(&mut ours), [true, true, false, false]);
    }
}
