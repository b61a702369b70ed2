//! Synchronizes two copies of a workspace: the executor's, which wins conflicts, and a guest's.
//!
//! Both sides store how each file looked when they last agreed, and so know what has changed since. The guest sends its
//! changes first, and the executor makes them where it may: not if a path is hidden or protected, and not if the file
//! changed on this side as well. Then the executor sends its own changes, and those that the guest must undo.
//!
//! Files, folders and links are synchronized with their permissions. Owners, times, extended attributes and everything
//! else are not, and a file with several names becomes several files. Names that are not UTF-8 are skipped. No link is
//! ever followed, on either side.

mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Uid};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use wieldy_core::Denial;

use self::files::{Aside, Content, contains, is_plain, leads_to, send_content};
use super::frames::{self, Kind, invalid, shown};

/// Maximum depth of folders; deeper ones are not read.
const DEPTH_MAX: usize = 64;

/// Maximum number of refused changes that one sync reports.
const BREACHES_MAX: usize = 64;

/// Maximum number of refused changes in one sync; a guest with more does not work correctly.
const REFUSALS_MAX: usize = 10_000;

/// The reason to refuse a change to a file that was also changed on this side.
const CHANGED: &str = "it was also changed outside of the sandbox meanwhile, and that change was kept";

/// The reason for root to refuse a change to a file that the owner of the workspace may not be allowed to touch.
const FOREIGN: &str = "it belongs to another user than the workspace";

/// Every path in a workspace, with its stamp when it was last read.
pub(super) type Manifest = BTreeMap<String, Stamp>;

/// The state of a file, folder or link. That of a folder does not depend on the files in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    kind: StampKind,
    permissions: u32,
    bytes: u64,
    changed: [i64; 4],
    number: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum StampKind {
    File,
    Folder,
    Link,
}

/// A change of a file, folder or link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// The path, relative to the workspace.
    pub(super) path: String,
    pub(super) now: Now,
}

/// The new state of a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Now {
    Gone,
    Folder {
        permissions: u32,
    },
    /// A file, whose content follows.
    File {
        permissions: u32,
    },
    Link {
        target: String,
    },
}

/// A workspace on one side.
pub(super) struct Tree {
    root: OwnedFd,
    /// The user and group that own its files, if not ours.
    owner: Option<(u32, u32)>,
    /// Paths that the other side never sees.
    hidden: Vec<String>,
    /// True for the guest's copy, in which a folder is removed with everything in it.
    is_copy: bool,
}

impl Tree {
    /// Opens the guest's copy, whose files belong to `owner`.
    pub(super) fn copy(folder: &Path, owner: Option<(u32, u32)>) -> io::Result<Self> {
        Ok(Self { root: open_root(folder)?, owner, hidden: Vec::new(), is_copy: true })
    }

    /// Reads the state of every path, and fails if there are more than `files_max`. Skips hidden paths and names that
    /// are not UTF-8.
    pub(super) fn look(&self, files_max: usize) -> io::Result<Manifest> {
        let mut found = Manifest::new();
        self.look_into("", DEPTH_MAX, files_max, &mut found)?;
        Ok(found)
    }

    fn look_into(&self, folder: &str, depth: usize, files_max: usize, found: &mut Manifest) -> io::Result<()> {
        let opened = match self.open_at(folder, OFlags::DIRECTORY | OFlags::RDONLY) {
            // It was removed, or we may not read it.
            Err(_) if !folder.is_empty() => return Ok(()),
            opened => opened?,
        };
        let names: Vec<_> = Dir::read_from(&opened)?.collect::<Result<_, _>>()?;
        for entry in names {
            let Ok(name) = entry.file_name().to_str() else { continue };
            if name == "." || name == ".." {
                continue;
            }
            if let Some(aside) = Aside::parse(name) {
                if !self.is_copy && aside.is_left() {
                    let _ = rustix::fs::unlinkat(&opened, name, AtFlags::empty());
                }
                continue;
            }
            let path = if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") };
            if contains(&self.hidden, &path) || self.is_foreign(&opened, name) {
                continue;
            }
            let Some(stamp) = stamp(&opened, name)? else { continue };
            let is_folder = stamp.kind == StampKind::Folder;
            found.insert(path.clone(), stamp);
            if found.len() > files_max {
                return Err(io::Error::other(format!("there are more than {files_max} files in the workspace")));
            }
            if is_folder && depth > 0 {
                self.look_into(&path, depth - 1, files_max, found)?;
            }
        }
        Ok(())
    }

    /// Opens a path below the root without following any link.
    fn open_at(&self, path: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let path = if path.is_empty() { "." } else { path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve)?)
    }

    /// Sends the state of these paths: first the removed ones, inner paths before outer ones, and then the others,
    /// outer paths first.
    pub(super) fn send(&self, stream: &mut impl Write, paths: &BTreeSet<String>) -> io::Result<()> {
        let entries = paths.iter().map(|path| self.entry(path)).collect::<io::Result<Vec<_>>>()?;
        for entry in entries.iter().rev().filter(|entry| entry.now == Now::Gone) {
            frames::tell(stream, Kind::Entry, entry)?;
        }
        for entry in entries.iter().filter(|entry| entry.now != Now::Gone) {
            match entry.now {
                Now::File { .. } => match self.open_at(&entry.path, OFlags::RDONLY | OFlags::NONBLOCK) {
                    Ok(file) if !self.is_foreign(&file, "") => {
                        frames::tell(stream, Kind::Entry, entry)?;
                        send_content(stream, file)?;
                    }
                    // It was removed, which the next sync notices, or we may not read it.
                    _ => continue,
                },
                _ => frames::tell(stream, Kind::Entry, entry)?,
            }
        }
        frames::send(stream, Kind::Done, &[])
    }

    fn entry(&self, path: &str) -> io::Result<Entry> {
        let gone = Entry { path: path.to_owned(), now: Now::Gone };
        let Ok((folder, name)) = self.parent(path) else { return Ok(gone) };
        if self.leads_through_foreign(path) {
            return Ok(gone);
        }
        let Some(stamp) = stamp(&folder, name)? else { return Ok(gone) };
        let now = match stamp.kind {
            StampKind::File => Now::File { permissions: stamp.permissions },
            StampKind::Folder => Now::Folder { permissions: stamp.permissions },
            StampKind::Link => {
                match rustix::fs::readlinkat(&folder, name, Vec::new()).map(|target| target.into_string()) {
                    Ok(Ok(target)) => Now::Link { target },
                    _ => Now::Gone,
                }
            }
        };
        Ok(Entry { now, ..gone })
    }

    fn parent<'a>(&self, path: &'a str) -> io::Result<(OwnedFd, &'a str)> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.open_at(folder, OFlags::DIRECTORY | OFlags::PATH)?, name))
    }

    /// Returns true if an entry of a folder, or for an empty name the folder itself, belongs to another user than the
    /// workspace. Always false if we are not root.
    fn is_foreign(&self, folder: impl AsFd, name: &str) -> bool {
        let Some((owner, _)) = self.owner.filter(|_| !self.is_copy) else { return false };
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
        rustix::fs::statat(folder, name, flags).is_ok_and(|found| found.st_uid != owner)
    }

    /// Returns true if a path or a folder on the way to it is foreign.
    fn leads_through_foreign(&self, path: &str) -> bool {
        if self.owner.is_none() || self.is_copy {
            return false;
        }
        let ends = path.match_indices('/').map(|(end, _)| end).chain([path.len()]);
        ends.filter_map(|end| self.parent(path.get(..end)?).ok()).any(|(folder, name)| self.is_foreign(folder, name))
    }

    /// Makes a received change, with the content of a file from `content`. Fails if `expected` is given and the path
    /// looks different now.
    fn apply(
        &self,
        entry: &Entry,
        expected: Option<Option<&Stamp>>,
        content: &mut Content<'_, impl Read>,
    ) -> io::Result<()> {
        let (folder, name) = self.parent(&entry.path)?;
        if self.leads_through_foreign(&entry.path) {
            return Err(io::Error::other(FOREIGN));
        }
        let check = || -> io::Result<Option<StampKind>> {
            let there = stamp(&folder, name)?;
            match expected {
                Some(expected) if there.as_ref() != expected => Err(io::Error::other(CHANGED)),
                _ => Ok(there.map(|stamp| stamp.kind)),
            }
        };
        let there = check()?;
        let remove = || match there {
            None => Ok(()),
            Some(StampKind::Folder) if self.is_copy => remove_all(&folder, name, DEPTH_MAX),
            Some(StampKind::Folder) => Ok(rustix::fs::unlinkat(&folder, name, AtFlags::REMOVEDIR)?),
            Some(_) => Ok(rustix::fs::unlinkat(&folder, name, AtFlags::empty())?),
        };
        match &entry.now {
            Now::Gone => remove(),
            Now::Folder { permissions } => {
                if there != Some(StampKind::Folder) {
                    remove()?;
                    rustix::fs::mkdirat(&folder, name, Mode::from_raw_mode(0o700))?;
                }
                let made = self.open_at(&entry.path, OFlags::DIRECTORY | OFlags::RDONLY)?;
                self.give(&made)?;
                Ok(rustix::fs::fchmod(&made, permitted(*permissions))?)
            }
            Now::Link { target } => {
                remove()?;
                rustix::fs::symlinkat(target.as_str(), &folder, name)?;
                let (user, group) = self.owner();
                Ok(rustix::fs::chownat(&folder, name, user, group, AtFlags::SYMLINK_NOFOLLOW)?)
            }
            Now::File { permissions } => {
                // In a temporary file: the old one stays complete until the new one is.
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let (aside, file) = loop {
                    let aside = Aside::next();
                    match rustix::fs::openat(&folder, aside.as_str(), flags, Mode::from_raw_mode(0o600)) {
                        Err(Errno::EXIST) => {}
                        file => break (aside, file?),
                    }
                };
                let mut file = std::fs::File::from(file);
                let mut put = || -> io::Result<()> {
                    content.copy_to(&mut file)?;
                    // Checked again: the guest may have taken any time to send the content.
                    check()?;
                    self.give(&file)?;
                    rustix::fs::fchmod(&file, permitted(*permissions))?;
                    if there == Some(StampKind::Folder) {
                        remove()?;
                    }
                    Ok(rustix::fs::renameat(&folder, aside.as_str(), &folder, name)?)
                };
                put().inspect_err(|_| {
                    let _ = rustix::fs::unlinkat(&folder, aside.as_str(), AtFlags::empty());
                })
            }
        }
    }

    fn give(&self, made: impl AsFd) -> io::Result<()> {
        let (user, group) = self.owner();
        Ok(rustix::fs::fchown(made, user, group)?)
    }

    fn owner(&self) -> (Option<Uid>, Option<Gid>) {
        (self.owner.map(|(user, _)| Uid::from_raw(user)), self.owner.map(|(_, group)| Gid::from_raw(group)))
    }

    fn stamp_of(&self, path: &str) -> Option<Stamp> {
        let (folder, name) = self.parent(path).ok()?;
        stamp(&folder, name).ok()?
    }
}

fn open_root(folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(folder, flags, Mode::empty())?)
}

/// Removes a folder with everything in it.
fn remove_all(folder: impl AsFd, name: &str, depth: usize) -> io::Result<()> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(&folder, name, flags, Mode::empty())?;
    for entry in Dir::read_from(&opened)?.collect::<Result<Vec<_>, _>>()? {
        let inner = entry.file_name();
        if inner == c"." || inner == c".." {
            continue;
        }
        match rustix::fs::unlinkat(&opened, inner, AtFlags::empty()) {
            Err(Errno::ISDIR) if depth > 0 => {
                let inner = inner.to_str().map_err(io::Error::other)?;
                remove_all(&opened, inner, depth - 1)?;
            }
            removed => removed?,
        }
    }
    Ok(rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)?)
}

/// Returns the permissions to synchronize, without set-user-id, set-group-id and sticky bits.
fn permitted(permissions: u32) -> Mode {
    Mode::from_raw_mode(permissions & 0o777)
}

/// Returns the state of a path; `None` if it is missing or is no file, folder or link.
fn stamp(folder: impl AsFd, name: &str) -> io::Result<Option<Stamp>> {
    let found: Stat = match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        found => found?,
    };
    let kind = match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => StampKind::File,
        FileType::Directory => StampKind::Folder,
        FileType::Symlink => StampKind::Link,
        _ => return Ok(None),
    };
    let permissions = if kind == StampKind::Link { 0 } else { found.st_mode & 0o777 };
    if kind == StampKind::Folder {
        return Ok(Some(Stamp { kind, permissions, bytes: 0, changed: [0; 4], number: 0 }));
    }
    let changed = [found.st_mtime, found.st_mtime_nsec as i64, found.st_ctime, found.st_ctime_nsec as i64];
    Ok(Some(Stamp { kind, permissions, bytes: found.st_size as u64, changed, number: found.st_ino }))
}

/// Returns the paths whose state has changed.
fn changes(before: &Manifest, now: &Manifest) -> BTreeSet<String> {
    let paths = before.keys().chain(now.keys());
    paths.filter(|path| before.get(*path) != now.get(*path)).cloned().collect()
}

/// The limits of the data that one sync may receive.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub(super) bytes: u64,
    pub(super) files: usize,
    /// The length of all paths together.
    pub(super) path_bytes: usize,
}

/// The result of received changes: the new state of each changed path, and the reasons for refusals.
#[derive(Default)]
struct Received {
    applied: BTreeMap<String, Option<Stamp>>,
    refused: Vec<(String, String)>,
    /// The growth of all changed files together, in bytes.
    growth: i64,
}

/// The conditions of the executor for a guest's changes.
struct Terms<'a> {
    /// The state of the executor's copy at the beginning.
    now: &'a Manifest,
    /// Returns the reason to refuse a change, if any.
    why_not: &'a dyn Fn(&Entry) -> Option<&'static str>,
    /// Maximum growth of all files together, in bytes.
    growth_max: i64,
}

/// Receives changes up to [`Kind::Done`]. For those of a guest, `terms` are given.
fn receive(tree: &Tree, stream: &mut impl Read, mut room: Room, terms: Option<&Terms<'_>>) -> io::Result<Received> {
    let mut received = Received::default();
    loop {
        let frame = frames::receive(stream)?;
        if frame.kind == Kind::Done {
            return Ok(received);
        }
        let entry: Entry = frame.expect(Kind::Entry)?.message()?;
        room.files = room.files.checked_sub(1).ok_or_else(|| invalid("more files than there is room for"))?;
        if !is_plain(&entry.path) {
            return Err(invalid(&format!("the path `{}`, which is not valid in a workspace", shown(&entry.path))));
        }
        let left = room.path_bytes.checked_sub(entry.path.len());
        room.path_bytes = left.ok_or_else(|| invalid("more paths than there is room for"))?;
        // The guest may change again what it has changed in this sync.
        let expected = terms.map(|terms| match received.applied.get(&entry.path) {
            Some(made) => made.as_ref(),
            None => terms.now.get(&entry.path),
        });
        let bytes_before = expected.flatten().map_or(0, |stamp| signed(stamp.bytes));
        let growth_left = terms.map_or(i64::MAX, |terms| terms.growth_max.saturating_sub(received.growth));
        let bytes_max = u64::try_from(growth_left.saturating_add(bytes_before)).unwrap_or(0);
        let is_over = !matches!(entry.now, Now::File { .. });
        let mut content = Content { stream, room: &mut room.bytes, bytes_max, is_over };
        let reason = match terms.and_then(|terms| (terms.why_not)(&entry)) {
            Some(reason) => Some(reason.to_owned()),
            None => tree.apply(&entry, expected, &mut content).err().map(|error| error.to_string()),
        };
        // If the stream itself failed, this fails as well and ends the sync.
        content.pass_over()?;
        match reason {
            None => {
                let stamp = tree.stamp_of(&entry.path);
                let bytes_now = stamp.as_ref().map_or(0, |stamp| signed(stamp.bytes));
                received.growth = received.growth.saturating_add(bytes_now - bytes_before);
                received.applied.insert(entry.path, stamp);
            }
            Some(_) if terms.is_some() && received.refused.len() >= REFUSALS_MAX => {
                return Err(invalid("too many changes that it may not make"));
            }
            Some(reason) => received.refused.push((entry.path, reason)),
        }
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Returns the size of all files together.
fn total(manifest: &Manifest) -> i64 {
    manifest.values().fold(0, |sum: i64, stamp| sum.saturating_add(signed(stamp.bytes)))
}

fn note(manifest: &mut Manifest, applied: BTreeMap<String, Option<Stamp>>) {
    for (path, stamp) in applied {
        match stamp {
            Some(stamp) => drop(manifest.insert(path, stamp)),
            None => drop(manifest.remove(&path)),
        }
    }
}

/// The executor's side.
pub(super) struct Ours {
    tree: Tree,
    /// Paths that the guest may not change.
    protected: Vec<String>,
    agreed: Manifest,
    /// The limits of one sync.
    room: Room,
    /// Maximum number of bytes that the guest may add in all.
    growth_max: i64,
    /// The bytes that the guest has added so far; negative if it has removed more.
    growth: i64,
}

impl Ours {
    /// Opens a workspace that was never synchronized, to which the guest may add as much as `room` allows. If we are
    /// root, files of the guest will belong to the workspace's owner.
    pub(super) fn new(workspace: &Path, hidden: Vec<String>, protected: Vec<String>, room: Room) -> io::Result<Self> {
        let root = open_root(workspace)?;
        let found = rustix::fs::fstat(&root)?;
        let owner = rustix::process::geteuid().is_root().then_some((found.st_uid, found.st_gid));
        let tree = Tree { root, owner, hidden, is_copy: false };
        Ok(Self { tree, protected, agreed: Manifest::new(), room, growth_max: signed(room.bytes), growth: 0 })
    }

    /// Returns the size of a disk for the workspace and for everything that the guest may add. From then on, one sync
    /// receives no more than that.
    pub(super) fn measure(&mut self) -> io::Result<u64> {
        // For the file system itself. A quarter is added for it, too.
        const OWN_BYTES: u64 = 32 << 20;
        let there: u64 = self.tree.look(self.room.files)?.values().map(|stamp| stamp.bytes).sum();
        let whole = self.room.bytes.saturating_add(there).saturating_add(OWN_BYTES);
        self.room.bytes = whole.saturating_add(whole / 4);
        Ok(self.room.bytes)
    }

    /// Synchronizes both sides, and returns the changes of the guest that were refused. Blocks.
    pub(super) fn sync(&mut self, stream: &mut (impl Read + Write)) -> io::Result<Vec<Denial>> {
        frames::send(stream, Kind::Sync, &[])?;
        let mut now = self.tree.look(self.room.files)?;
        // Bytes that were removed on this side may be added by the guest again.
        let removed = total(&self.agreed).saturating_sub(total(&now)).max(0);
        self.growth = self.growth.saturating_sub(removed).max(self.growth.min(0));
        let why_not = |Entry { path, now: wanted }: &Entry| {
            if contains(&self.tree.hidden, path) {
                return Some("it is hidden from programs");
            }
            if contains(&self.protected, path) {
                return Some("it is protected");
            }
            let is_here = now.get(path).map(|stamp| stamp.kind);
            let stays_folder =
                matches!(wanted, Now::Folder { .. }) && matches!(is_here, None | Some(StampKind::Folder));
            if !stays_folder && (leads_to(&self.protected, path) || leads_to(&self.tree.hidden, path)) {
                return Some("it contains, or may later contain, a protected or hidden path");
            }
            if path.split('/').any(|name| Aside::parse(name).is_some()) {
                return Some("such names are for files that are being written");
            }
            (now.get(path) != self.agreed.get(path)).then_some(CHANGED)
        };
        let growth_max = self.growth_max.saturating_sub(self.growth);
        let terms = Terms { now: &now, why_not: &why_not, growth_max };
        let Received { applied, refused, growth } = receive(&self.tree, stream, self.room, Some(&terms))?;
        self.growth = self.growth.saturating_add(growth);
        let mut outgoing = changes(&self.agreed, &now);
        note(&mut now, applied);
        outgoing.extend(refused.iter().map(|(path, _)| path.clone()).filter(|path| !contains(&self.tree.hidden, path)));
        self.tree.send(stream, &outgoing)?;
        frames::receive(stream)?.expect(Kind::Done)?;
        self.agreed = now;
        let told = |(path, reason): (String, String)| Denial::Filesystem { path: shown(&path), reason };
        Ok(refused.into_iter().take(BREACHES_MAX).map(told).collect())
    }
}

/// Answers a sync on the guest's side: sends its changes since `agreed`, and then receives those of the executor.
/// Returns the state that both sides agree on.
pub(super) fn answer(tree: &Tree, stream: &mut (impl Read + Write), agreed: &Manifest) -> io::Result<Manifest> {
    const ALL: Room = Room { bytes: u64::MAX, files: usize::MAX, path_bytes: usize::MAX };
    let mut now = tree.look(ALL.files)?;
    tree.send(stream, &changes(agreed, &now))?;
    let Received { applied, refused, .. } = receive(tree, stream, ALL, None)?;
    note(&mut now, applied);
    if let Some((path, reason)) = refused.first() {
        let told = format!("the guest could not take `{path}`: {reason}");
        frames::send(stream, Kind::Failed, told.as_bytes())?;
        return Err(io::Error::other(told));
    }
    frames::send(stream, Kind::Done, &[])?;
    Ok(now)
}

#[cfg(test)]
mod tests;
