//! `Delete`: removes a file, a symbolic link or a folder.

use std::io;
use std::path::Path;
use std::sync::Arc;

use cap_std::fs::Dir;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::error::{FileError, blocking};
use super::guard::Guard;
use super::stale::{note_gone, refuse_stale};
use super::workspace::{FileLocation, LastLink, MissingFolders, Workspace, open_plain_folder};

/// Maximum depth of a folder that is removed at once. Each level costs an open handle.
const DEPTH_MAX: u32 = 100;

/// A tool that deletes a file, a symbolic link or a folder of the workspace.
pub struct Delete {
    workspace: Arc<Workspace>,
}

/// A path to delete.
#[derive(Deserialize, JsonSchema)]
pub struct DeleteArgs {
    /// The file, link or folder, relative to the workspace.
    path: String,
    /// Also delete the contents of a folder.
    #[serde(default)]
    recursive: bool,
}

impl Delete {
    /// Creates the tool for this workspace.
    pub fn new(workspace: Arc<Workspace>) -> Self {
        Self { workspace }
    }
}

impl Tool for Delete {
    type Args = DeleteArgs;

    fn spec(&self) -> ToolSpec {
        super::changing(
            "Delete",
            "DeleteFile",
            "Deletes a file or an empty folder; with `recursive`, a folder and all that is in it. \
             Of a symbolic link only the link goes.",
        )
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.workspace.names_of(thing)
    }

    fn respell(&self, arguments: &Value, _: &Confinement) -> Vec<(String, String)> {
        self.workspace.respell(arguments, &[])
    }

    async fn run(&self, args: DeleteArgs, run: &Run) -> Result<Outcome, RunError> {
        let (workspace, run) = (self.workspace.clone(), run.clone());
        Ok(blocking(move || delete(&workspace, &args, &run)).await?)
    }
}

/// The reason of a failure, and the number of entries that are already removed.
struct NotDeleted {
    error: FileError,
    removed: u64,
}

impl From<FileError> for NotDeleted {
    fn from(error: FileError) -> Self {
        Self { error, removed: 0 }
    }
}

impl From<NotDeleted> for RunError {
    fn from(NotDeleted { error, removed }: NotDeleted) -> Self {
        let mut error = RunError::from(error);
        if removed > 0 {
            error.effect_possible = true;
            error.error.message.push_str(&format!(" ({removed} entries below it are already deleted)"));
        }
        error
    }
}

fn delete(workspace: &Workspace, args: &DeleteArgs, run: &Run) -> Result<Outcome, NotDeleted> {
    let guard = &workspace.guard(&run.confinement().files);
    let place = find(workspace, args, guard, run)?;
    let _alone = workspace.lock_for_writing(&place.key);
    let name = Path::new(&place.name);
    let metadata = place.folder.symlink_metadata(name);
    let metadata = metadata.map_err(|source| FileError::io("look at", &place.key, source))?;
    let removed = if metadata.is_dir() {
        if args.recursive {
            let real = workspace
                .current_path(&place.folder)
                .map_or_else(|| place.key.clone().into(), |above| above.join(name));
            check_all(guard, &place.folder, name, &real, 0)?;
        }
        let mut removal = Removal { removed: 0, stop: run.stop() };
        removal.folder(&place, args.recursive).map_err(|error| NotDeleted { error, removed: removal.removed })?;
        removal.removed
    } else {
        // A file that the session never read need not be read to be deleted.
        if workspace.reads.seen(run.caller(), &place.key).is_some()
            && let Some(current) = place.hash()?
        {
            refuse_stale(workspace, run, &place, current)?;
        }
        place.folder.remove_file(name).map_err(|source| FileError::io("delete", &place.key, source))?;
        1
    };
    workspace.reads.forget(run.caller(), &place.key);
    let slash = if metadata.is_dir() { "/" } else { "" };
    let count = if removed > 1 { format!(", {removed} entries") } else { String::new() };
    Ok(Outcome::text(format!("deleted `{}{slash}`{count}", place.key))
        .structured(json!({ "path": place.key, "removed": removed })))
}

fn find(workspace: &Workspace, args: &DeleteArgs, guard: &Guard<'_>, run: &Run) -> Result<FileLocation, FileError> {
    let given = workspace.given(&args.path)?;
    let place = match workspace.locate(&given, MissingFolders::Refuse, LastLink::Itself, guard) {
        // A path without a last name is the root, or ends with `..`.
        Err(FileError::Kind { is: "a folder", .. }) => {
            return Err(FileError::refused(
                format!("`{given}` is the workspace itself, or ends with `..`"),
                "give the path of the file or folder to delete, such as `old/notes.txt`",
            ));
        }
        place => place?,
    };
    if let Err(error) = place.folder.symlink_metadata(&place.name) {
        if error.kind() == io::ErrorKind::NotFound {
            note_gone(workspace, run, &place.key);
        }
        return Err(workspace.suggest_near(guard, &given, FileError::io("delete", &given, error)));
    }
    Ok(place)
}

/// Refuses to remove a folder with a protected path in it, before anything is removed. `path` is the folder's own path.
fn check_all(guard: &Guard<'_>, above: &Dir, name: &Path, path: &Path, depth: u32) -> Result<(), FileError> {
    let failed = |source| FileError::io("look into", path.display(), source);
    if depth == DEPTH_MAX {
        return Err(failed(io::Error::other(format!("it is more than {DEPTH_MAX} folders deep"))));
    }
    let folder = open_plain_folder(above, name).map_err(failed)?;
    for entry in folder.entries().map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let (name, inner) = (entry.file_name(), path.join(entry.file_name()));
        guard.check_changed(&inner)?;
        if entry.file_type().map_err(failed)?.is_dir() {
            check_all(guard, &folder, Path::new(&name), &inner, depth + 1)?;
        }
    }
    Ok(())
}

/// The removal of a folder, and the number of entries removed so far.
struct Removal<'a> {
    removed: u64,
    stop: &'a CancellationToken,
}

impl Removal<'_> {
    fn folder(&mut self, place: &FileLocation, recursive: bool) -> Result<(), FileError> {
        let failed = |source| FileError::io("delete", &place.key, source);
        let name = Path::new(&place.name);
        match place.folder.remove_dir(name) {
            Ok(()) => {
                self.removed += 1;
                Ok(())
            }
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOTEMPTY) && recursive => {
                self.tree(&place.folder, name, 0).map_err(failed)
            }
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOTEMPTY) => Err(FileError::refused(
                format!("`{}` is a folder that is not empty", place.key),
                "set `recursive` to delete it with all that is in it",
            )),
            Err(error) => Err(failed(error)),
        }
    }

    /// Removes the contents of a folder, then the folder. A symbolic link is removed and not followed.
    fn tree(&mut self, above: &Dir, name: &Path, depth: u32) -> io::Result<()> {
        if depth == DEPTH_MAX {
            return Err(io::Error::other(format!("it is more than {DEPTH_MAX} folders deep")));
        }
        let folder = open_plain_folder(above, name)?;
        for entry in folder.entries()? {
            if self.stop.is_cancelled() {
                return Err(io::Error::other("the run was stopped"));
            }
            let entry = entry?;
            let name = entry.file_name();
            if entry.file_type()?.is_dir() {
                self.tree(&folder, Path::new(&name), depth + 1)?;
            } else {
                folder.remove_file(&name)?;
                self.removed += 1;
            }
        }
        above.remove_dir(name)?;
        self.removed += 1;
        Ok(())
    }
}
