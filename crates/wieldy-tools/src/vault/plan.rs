//! The plan of a move: written down before the first note changes, so that a move survives the end of its process.
//!
//! Notes are replaced one by one and the file moves last. A plan that is still there at the next use is completed if
//! every note is either as before or as planned; else it is put aside, and reported once.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cap_std::fs::Dir;
use rustix::fs::{FlockOperation, RenameFlags, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use wieldy_core::Run;

use super::folder::Vault;
use super::names::workspace_path;
use super::rewrite::{Edit, applied, undone};
use crate::failpoint;
use crate::files::{FileError, FileLocation, Guard, MissingFolders, save};

/// Maximum size of a plan.
const PLAN_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// The longest wait for another process that moves notes of the same vault.
const WAIT_MAX: Duration = Duration::from_secs(8);

/// A move that was decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    /// The vault's folder, to notice a plan of another one.
    pub(crate) root: PathBuf,
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) notes: Vec<PlannedNote>,
}

/// A note whose links change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlannedNote {
    /// The path before the move.
    pub(crate) path: String,
    pub(crate) old_hash: String,
    pub(crate) new_hash: String,
    pub(crate) edits: Vec<Edit>,
}

/// The right to move notes of a vault: only one process has it at a time.
pub(crate) struct MoveLock {
    /// The plan's file, unless there is no state folder.
    plan: Option<PathBuf>,
    _lock: Option<File>,
}

impl MoveLock {
    /// Waits for the lock.
    pub(crate) fn take(vault: &Vault, run: &Run) -> Result<Self, FileError> {
        let Some(folder) = &vault.state else { return Ok(Self { plan: None, _lock: None }) };
        let folder = folder.join("vault");
        let failed = |source| FileError::io("write the plan of a move to", "the state folder", source);
        DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(failed)?;
        let name = name_of(vault);
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true).mode(0o600);
        let lock = options.open(folder.join(format!("{name}.lock"))).map_err(failed)?;
        let begun = Instant::now();
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK) if run.stop().is_cancelled() => return Err(FileError::Stopped),
                Err(Errno::WOULDBLOCK) if begun.elapsed() < WAIT_MAX => std::thread::sleep(Duration::from_millis(5)),
                Err(Errno::WOULDBLOCK) => {
                    return Err(FileError::refused("another move in this vault takes long", "try again in a moment"));
                }
                Err(error) => return Err(failed(error.into())),
            }
        }
        Ok(Self { plan: Some(folder.join(format!("{name}.plan"))), _lock: Some(lock) })
    }

    /// Writes the plan down.
    fn store(&self, plan: &Plan) -> Result<(), FileError> {
        let Some(path) = &self.plan else { return Ok(()) };
        let stored = || -> std::io::Result<()> {
            let draft = path.with_extension("draft");
            let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&draft)?;
            file.write_all(&serde_json::to_vec(plan)?)?;
            file.sync_all()?;
            failpoint::reach("vault.drafted");
            fs::rename(&draft, path)?;
            path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
        };
        stored().map_err(|source| FileError::io("write the plan of a move to", "the state folder", source))
    }

    fn remove(&self) {
        // A plan that stays is found done at the next use.
        let _ = self.plan.as_ref().map(fs::remove_file);
    }

    /// Returns the plan that another process left behind, if there is one.
    fn left_behind(&self) -> Option<Plan> {
        let mut text = Vec::new();
        File::open(self.plan.as_ref()?).ok()?.take(PLAN_BYTES_MAX).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Puts a plan aside that cannot be completed, so that the next use begins anew.
    fn put_aside(&self) {
        let _ = self.plan.as_ref().map(|plan| fs::rename(plan, plan.with_extension("failed")));
    }
}

fn name_of(vault: &Vault) -> String {
    let hash = blake3::hash(vault.root.path().as_os_str().as_encoded_bytes());
    hash.to_hex()[..32].to_owned()
}

/// Returns true if a move may have been left unfinished. Costs one look at the state folder.
pub(crate) fn may_be_unfinished(vault: &Vault) -> bool {
    let plan = vault.state.as_ref().map(|folder| folder.join("vault").join(format!("{}.plan", name_of(vault))));
    plan.is_some_and(|plan| plan.exists())
}

/// Completes a move that another process left unfinished, if every note fits its plan. Else the error says which does
/// not.
pub(crate) fn finish(vault: &Vault, run: &Run, lock: &MoveLock) -> Result<(), FileError> {
    let is_there = lock.plan.as_ref().is_some_and(|plan| plan.exists());
    if !is_there {
        return Ok(());
    }
    let Some(plan) = lock.left_behind().filter(|plan| plan.root == vault.root.path()) else {
        lock.put_aside();
        return Err(FileError::refused(
            "the plan of an interrupted move in this vault cannot be read, and was put aside",
            "look for links that lead nowhere; the next call works as usual",
        ));
    };
    let (from, to) = (exists(vault, &plan.from), exists(vault, &plan.to));
    if to && !from {
        lock.remove();
        return Ok(());
    }
    let rules = vault.rules(run);
    let guard = vault.workspace.guard(&rules);
    let completed = match from && !to {
        true => plan.complete(vault, run, &guard),
        false => Err(FileError::refused(format!("`{}` and `{}` are not as they were", plan.from, plan.to), "")),
    };
    if let Err(problem) = completed {
        // The disk may be full now, and not at the next use.
        if matches!(problem, FileError::Io { .. } | FileError::Stopped) {
            return Err(problem);
        }
        lock.put_aside();
        return Err(FileError::refused(
            format!("a move of `{}` to `{}` was interrupted and cannot be completed: {problem}", plan.from, plan.to),
            "compare the notes that link to it, then move it again; the next call works as usual",
        ));
    }
    lock.remove();
    run.warn(format!("completed the interrupted move of `{}` to `{}`", plan.from, plan.to));
    Ok(())
}

fn exists(vault: &Vault, path: &str) -> bool {
    vault.root.root().symlink_metadata(path).is_ok()
}

/// The reason why a move did not happen, or only in part.
pub(crate) struct NotMoved {
    pub(crate) error: FileError,
    /// True if a note changed since the plan was made, and nothing was written yet.
    pub(crate) is_outdated: bool,
    /// True if some notes are already written.
    pub(crate) is_partial: bool,
}

/// Carries a new plan out.
pub(crate) fn carry_out(vault: &Vault, run: &Run, lock: &MoveLock, plan: &Plan) -> Result<(), NotMoved> {
    let before = |error| NotMoved { is_outdated: matches!(error, FileError::Stale { .. }), error, is_partial: false };
    let rules = vault.rules(run);
    let guard = vault.workspace.guard(&rules);
    let places = plan.open(vault, &guard).map_err(before)?;
    let ends = [&plan.from, &plan.to].map(|path| workspace_path(&vault.folder, path));
    let keys = places.iter().map(|place| &place.key).chain(&ends);
    let _alone = vault.workspace.lock_all_for_writing(keys.map(String::as_str));
    plan.check(&places, false).map_err(before)?;
    failpoint::reach("vault.checked");
    lock.store(plan).map_err(before)?;
    failpoint::reach("vault.planned");
    drop(places);
    plan.run(vault, run, &guard).map_err(|error| {
        let is_partial = plan.undo(vault, run, &guard).is_err();
        if !is_partial {
            lock.remove();
        }
        NotMoved { error, is_outdated: false, is_partial }
    })?;
    lock.remove();
    failpoint::reach("vault.done");
    Ok(())
}

impl Plan {
    /// Finds the places of all notes, as the rules of the run allow it.
    fn open(&self, vault: &Vault, guard: &Guard<'_>) -> Result<Vec<FileLocation>, FileError> {
        let place = |note: &PlannedNote| vault.locate(guard, &vault.plain(&note.path)?, MissingFolders::Refuse);
        self.notes.iter().map(place).collect()
    }

    /// Completes the plan that another process left, if everything fits it.
    fn complete(&self, vault: &Vault, run: &Run, guard: &Guard<'_>) -> Result<(), FileError> {
        let paths = self.notes.iter().map(|note| &note.path).chain([&self.from, &self.to]);
        for path in paths {
            // The plan comes from a file, so its paths are checked as those of a caller are.
            if vault.plain(path)? != *path {
                return Err(FileError::Outside { path: path.clone() });
            }
            vault.check_place(guard, path)?;
        }
        self.check(&self.open(vault, guard)?, true)?;
        self.run(vault, run, guard)
    }

    /// Checks that every note is as before the move or, if that may have begun, as after it.
    fn check(&self, places: &[FileLocation], may_be_done: bool) -> Result<(), FileError> {
        for (note, place) in self.notes.iter().zip(places) {
            let hash = place.hash()?.map(|hash| hash.to_string()).unwrap_or_default();
            if hash != note.old_hash && !(may_be_done && hash == note.new_hash) {
                return Err(FileError::Stale { path: note.path.clone() });
            }
        }
        Ok(())
    }

    /// Replaces the notes that are not replaced yet, then moves the file.
    fn run(&self, vault: &Vault, run: &Run, guard: &Guard<'_>) -> Result<(), FileError> {
        for note in &self.notes {
            replace(vault, run, guard, note)?;
            failpoint::reach("vault.note");
        }
        failpoint::reach("vault.moving");
        self.rename(vault, run, guard)?;
        failpoint::reach("vault.moved");
        Ok(())
    }

    /// Gives the replaced notes their old text back, after the file could not be moved.
    fn undo(&self, vault: &Vault, run: &Run, guard: &Guard<'_>) -> Result<(), FileError> {
        for note in &self.notes {
            let (old_hash, new_hash) = (note.new_hash.clone(), note.old_hash.clone());
            let undo = PlannedNote { path: note.path.clone(), old_hash, new_hash, edits: undone(&note.edits) };
            replace(vault, run, guard, &undo)?;
        }
        Ok(())
    }

    fn rename(&self, vault: &Vault, run: &Run, guard: &Guard<'_>) -> Result<(), FileError> {
        let from = vault.locate(guard, &self.from, MissingFolders::Refuse)?;
        let to = vault.locate(guard, &self.to, MissingFolders::Create)?;
        let failed = |source| FileError::io("move", &self.from, source);
        match rustix::fs::renameat_with(&from.folder, &from.name, &to.folder, &to.name, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Err(taken(&self.to)),
            // Not every filesystem supports a rename that replaces nothing.
            Err(Errno::INVAL | Errno::NOSYS) => {
                if to.folder.symlink_metadata(&to.name).is_ok() {
                    return Err(taken(&self.to));
                }
                from.folder.rename(&from.name, &to.folder, &to.name).map_err(failed)?;
            }
            Err(error) => return Err(failed(error.into())),
        }
        // The file is in place. Syncing the folders, so that this survives a power cut too, is only an attempt.
        for folder in [&to.folder, &from.folder] {
            let _ = folder.try_clone().and_then(|folder| Dir::reopen_dir(&folder)?.into_std_file().sync_all());
        }
        if let Some(seen) = vault.workspace.reads.forget(run.caller(), &from.key) {
            vault.workspace.reads.note(run.caller(), &to.key, seen);
        }
        Ok(())
    }
}

/// Replaces a note by its planned text, unless that is done.
fn replace(vault: &Vault, run: &Run, guard: &Guard<'_>, note: &PlannedNote) -> Result<(), FileError> {
    let place = vault.locate(guard, &note.path, MissingFolders::Refuse)?;
    let stale = || FileError::Stale { path: note.path.clone() };
    let existing = place.existing()?.ok_or_else(stale)?;
    if existing.hash.to_string() == note.new_hash {
        return Ok(());
    }
    let content = existing.content.as_deref().and_then(|content| applied(content, &note.edits)).ok_or_else(stale)?;
    if existing.hash.to_string() != note.old_hash || blake3::hash(&content).to_string() != note.new_hash {
        return Err(stale());
    }
    save(&place, &content, Some(&existing))?;
    note_own_change(vault, run, &place.key, &note.old_hash, blake3::hash(&content));
    Ok(())
}

/// Records the change of a note for a session that knew its content.
fn note_own_change(vault: &Vault, run: &Run, key: &str, old: &str, new: blake3::Hash) {
    let reads = &vault.workspace.reads;
    if reads.seen(run.caller(), key).is_some_and(|seen| seen.to_string() == old) {
        reads.note(run.caller(), key, new);
    }
}

/// Returns the error for a path that is in use.
pub(crate) fn taken(path: &str) -> FileError {
    FileError::refused(format!("there is already `{path}`"), "choose a path that is not in use")
}

/// Returns true if a path is below a folder, or the folder itself.
pub(crate) fn is_within(path: &str, folder: &str) -> bool {
    Path::new(path).starts_with(folder)
}
