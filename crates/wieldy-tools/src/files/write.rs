//! `Write`: writes a whole file.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::error::{FileError, blocking};
use super::stale::refuse_stale;
use super::workspace::{ExistingFile, FileLocation, LastLink, MissingFolders, Workspace};
use super::{diff, save};

/// A tool that writes a file of the workspace, and replaces an old one.
pub struct Write {
    workspace: Arc<Workspace>,
}

/// A file to write.
#[derive(Deserialize, JsonSchema)]
pub struct WriteArgs {
    /// The file, relative to the workspace.
    path: String,
    /// The whole new content.
    content: String,
    /// Create missing folders on the path.
    #[serde(default = "yes")]
    create_folders: bool,
    /// Write only if the file's content still has this hash from `Read`.
    expect_hash: Option<String>,
}

fn yes() -> bool {
    true
}

impl Write {
    /// Creates the tool for this workspace.
    pub fn new(workspace: Arc<Workspace>) -> Self {
        Self { workspace }
    }
}

impl Tool for Write {
    type Args = WriteArgs;

    fn spec(&self) -> ToolSpec {
        super::changing(
            "Write",
            "WriteFile",
            "Writes a text file, new or in place of the old content, whole or not at all. \
             To change parts of a file, use `Edit`.",
        )
        .weak_alias("write_file")
        .idempotent()
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.workspace.names_of(thing)
    }

    fn respell(&self, arguments: &Value, _: &Confinement) -> Vec<(String, String)> {
        self.workspace.respell(arguments, &[])
    }

    async fn run(&self, args: WriteArgs, run: &Run) -> Result<Outcome, RunError> {
        let (workspace, run) = (self.workspace.clone(), run.clone());
        Ok(blocking(move || write(&workspace, &args, &run)).await?)
    }
}

fn write(workspace: &Workspace, args: &WriteArgs, run: &Run) -> Result<Outcome, FileError> {
    let given = workspace.given(&args.path)?;
    if given.names_folder() {
        return Err(FileError::Kind { path: args.path.clone(), is: "a folder", wanted: "a file" });
    }
    let folders = if args.create_folders { MissingFolders::Create } else { MissingFolders::Refuse };
    let place = workspace
        .locate(&given, folders, LastLink::Target, &workspace.guard(&run.confinement().files))
        .map_err(|error| match error {
            FileError::Missing { path, .. } => FileError::NoFolder { path },
            other => other,
        })?;
    let _alone = workspace.lock_for_writing(&place.key);
    let existing = place.existing()?;
    if let Some(expected) = &args.expect_hash {
        check_expected(&place, existing.as_ref(), expected)?;
    }
    if let Some(existing) = &existing {
        refuse_stale(workspace, run, &place, existing.hash)?;
    }
    let content = args.content.as_bytes();
    if run.stop().is_cancelled() {
        return Err(FileError::Stopped);
    }
    save::save(&place, content, existing.as_ref())?;

    let hash = blake3::hash(content);
    workspace.reads.note(run.caller(), &place.key, hash);
    let changes = match &existing {
        None => diff::unified(&place.key, None, content),
        Some(ExistingFile { content: Some(old), .. }) => diff::unified(&place.key, Some(old), content),
        Some(ExistingFile { content: None, .. }) => "[too large for a diff]\n".to_owned(),
    };
    let message = format!("wrote `{}`, {} bytes", place.key, content.len());
    // The caller knows the content of a new file. Changes to an old file are worth showing.
    let text = match &existing {
        None => format!("{message} (new)"),
        Some(_) if changes.is_empty() => format!("{message} (unchanged)"),
        Some(_) => format!("{message}\n\n{changes}"),
    };
    Ok(Outcome::text(text).structured(json!({
        "path": place.key,
        "bytes": content.len(),
        "created": existing.is_none(),
        "hash": hash.to_string(),
        "diff": changes,
    })))
}

fn check_expected(place: &FileLocation, existing: Option<&ExistingFile>, expected: &str) -> Result<(), FileError> {
    let is = match existing {
        Some(existing) if existing.hash.to_string().eq_ignore_ascii_case(expected) => return Ok(()),
        Some(existing) => format!("its hash is {}", existing.hash),
        None => "it is not there".to_owned(),
    };
    Err(FileError::refused(
        format!("`{}` is not what was expected: {is}", place.key),
        "read it again, then repeat the change on the new content",
    ))
}
