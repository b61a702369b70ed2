//! `Edit`: replaces exact text in a file by other text.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::error::{FileError, blocking};
use super::replace::{ReplaceError, Replacement, replace};
use super::stale::{note_gone, refuse_stale};
use super::text::{self, Editable};
use super::workspace::{ExistingFile, FILE_BYTES_MAX, LastLink, MissingFolders, Workspace};
use super::{diff, save};

/// Maximum bytes of the similar text that is shown if the old text is not found.
const NEAR_BYTES_MAX: usize = 2000;

/// A tool that replaces exact text in a file of the workspace.
pub struct Edit {
    workspace: Arc<Workspace>,
}

/// A replacement.
#[derive(Deserialize, JsonSchema)]
pub struct EditArgs {
    /// The file, relative to the workspace.
    path: String,
    /// The text to replace, exactly as it is in the file, white space and line ends included.
    #[schemars(length(min = 1))]
    old: String,
    /// The text to put in its place.
    new: String,
    /// Replace every occurrence, if there are several.
    #[serde(default)]
    replace_all: bool,
}

impl Edit {
    /// Creates the tool for this workspace.
    pub fn new(workspace: Arc<Workspace>) -> Self {
        Self { workspace }
    }
}

impl Tool for Edit {
    type Args = EditArgs;

    fn spec(&self) -> ToolSpec {
        super::changing(
            "Edit",
            "EditFile",
            "Replaces exact text in a file. The old text must occur exactly once, unless `replace_all` is set; \
             take enough of its surroundings to make it so.",
        )
        .weak_alias("edit_file")
        .argument_alias("old_string", "old")
        .argument_alias("new_string", "new")
        .reads("path")
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.workspace.names_of(thing)
    }

    fn respell(&self, arguments: &Value, _: &Confinement) -> Vec<(String, String)> {
        self.workspace.respell(arguments, &[])
    }

    async fn run(&self, args: EditArgs, run: &Run) -> Result<Outcome, RunError> {
        let (workspace, run) = (self.workspace.clone(), run.clone());
        Ok(blocking(move || edit(&workspace, &args, &run)).await?)
    }
}

fn edit(workspace: &Workspace, args: &EditArgs, run: &Run) -> Result<Outcome, FileError> {
    let given = workspace.given(&args.path)?;
    let guard = workspace.guard(&run.confinement().files);
    let place = workspace.locate(&given, MissingFolders::Refuse, LastLink::Target, &guard)?;
    let _alone = workspace.lock_for_writing(&place.key);
    let Some(existing) = place.existing()? else {
        note_gone(workspace, run, &place.key);
        return Err(workspace.suggest_near(&guard, &given, FileError::Missing { path: given.to_string(), near: None }));
    };
    refuse_stale(workspace, run, &place, existing.hash)?;
    let old = whole(&place.key, &existing)?;
    let Ok(mut editable) = Editable::of(old) else {
        return Err(FileError::Binary { path: place.key.clone(), bytes: old.len() });
    };
    if !editable.accepts(&args.old) || !editable.accepts(&args.new) {
        return Err(FileError::refused(
            format!("`{}` is not UTF-8, so only ASCII text can be replaced in it", place.key),
            "convert the file to UTF-8 first",
        ));
    }
    let bytes_max = FILE_BYTES_MAX as usize;
    let Replacement { text, count } = replace(&editable.text, &args.old, &args.new, args.replace_all, bytes_max)
        .map_err(|reason| refusal(&place.key, reason))?;
    editable.text = text;
    let content = editable.into_bytes();
    if run.stop().is_cancelled() {
        return Err(FileError::Stopped);
    }
    save::save(&place, &content, Some(&existing))?;

    let hash = blake3::hash(&content);
    workspace.reads.note(run.caller(), &place.key, hash);
    let changes = diff::unified(&place.key, Some(old), &content);
    let times = if count == 1 { "once".to_owned() } else { format!("{count} times") };
    Ok(Outcome::text(format!("edited `{}`, replaced {times}\n\n{changes}", place.key)).structured(json!({
        "path": place.key,
        "replaced": count,
        "bytes": content.len(),
        "hash": hash.to_string(),
        "diff": changes,
    })))
}

fn whole<'a>(path: &str, existing: &'a ExistingFile) -> Result<&'a [u8], FileError> {
    existing.content.as_deref().ok_or_else(|| FileError::TooLarge {
        path: path.to_owned(),
        bytes: existing.metadata.len(),
        bytes_max: FILE_BYTES_MAX,
    })
}

fn refusal(path: &str, reason: ReplaceError) -> FileError {
    match reason {
        ReplaceError::Empty => {
            FileError::refused("the old text is empty", "give the text to replace; to write a whole file, use `Write`")
        }
        ReplaceError::Same => {
            FileError::refused("the old text and the new one are the same", "give a new text that differs")
        }
        ReplaceError::Absent { near: None } => FileError::refused(
            format!("the old text does not occur in `{path}`"),
            "read the file and copy the text exactly, white space included",
        ),
        ReplaceError::Absent { near: Some(near) } => FileError::refused(
            format!(
                "the old text does not occur in `{path}`; line {} differs from it only in white space:\n{}",
                near.line,
                text::cut(&near.text, NEAR_BYTES_MAX),
            ),
            "copy the text exactly as it stands there, white space included",
        ),
        ReplaceError::Several { count, lines } => {
            let more = if lines.len() < count { ", …" } else { "" };
            let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
            FileError::refused(
                format!("the old text occurs {count} times in `{path}`, on lines {}{more}", lines.join(", ")),
                "take in more of the surroundings of the place you mean, or set `replace_all`",
            )
        }
        ReplaceError::TooLarge { bytes } => {
            FileError::TooLarge { path: path.to_owned(), bytes: bytes as u64, bytes_max: FILE_BYTES_MAX }
        }
    }
}
