//! `vault_write`: writes a note or a part of it. The properties that are not named stay byte for byte.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::folder::{Vault, missing, note_path};
use super::front_matter;
use super::link::NOT_IN_NAMES;
use super::markdown::NoteFacts;
use super::projects::Vaults;
use super::read::no_heading;
use crate::files::{
    Editable, ExistingFile, FILE_BYTES_MAX, FileError, FileLocation, MissingFolders, blocking, save, unified,
};

/// Maximum length of the name of a property.
const KEY_BYTES_MAX: usize = 200;

/// A tool that writes a note.
pub(crate) struct VaultWrite {
    vaults: Arc<Vaults>,
}

/// A note to write.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct VaultWriteArgs {
    /// The note, such as `folder/note.md`.
    #[schemars(length(min = 1, max = 4096))]
    path: String,
    /// The text, without properties.
    body: String,
    /// The title, as a property.
    #[schemars(length(min = 1, max = 1000))]
    title: Option<String>,
    /// The vault.
    #[serde(default = "super::default_project")]
    #[schemars(length(min = 1, max = 100))]
    project_id: String,
    /// The part that is written: by default all of the note, in place of what it had.
    #[serde(default)]
    mode: Mode,
    /// The heading of the section, for `section`; `A#B` for B below A.
    #[schemars(length(min = 1, max = 1000))]
    heading: Option<String>,
    /// Properties to set; null removes one.
    properties: Option<Map<String, Value>>,
    /// Write only if the note still has this hash.
    #[schemars(length(min = 1, max = 100))]
    if_hash: Option<String>,
}

/// The part of a note that is written.
#[derive(Deserialize, JsonSchema, Default, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    /// A new note; refused if there is one.
    Create,
    /// The whole text, new or in place of the old one.
    #[default]
    Replace,
    /// Text at the end.
    Append,
    /// Text at the beginning.
    Prepend,
    /// The text below one heading.
    Section,
}

impl VaultWrite {
    pub(crate) fn new(vaults: Arc<Vaults>) -> Self {
        Self { vaults }
    }
}

impl Tool for VaultWrite {
    type Args = VaultWriteArgs;

    fn spec(&self) -> ToolSpec {
        let description =
            "Writes a note of the vault: a new one, all of its text, or a part. Other properties are kept.";
        super::spec("vault_write", description, 10).scope("oracle").permission("files.write").writes("path")
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.vaults.names_of(&note_path(thing))
    }

    async fn run(&self, args: VaultWriteArgs, run: &Run) -> Result<Outcome, RunError> {
        let (vaults, run) = (self.vaults.clone(), run.clone());
        blocking(move || {
            let vault = vaults.of(run.caller(), &args.project_id)?;
            super::moving::finish_moves(&vault, &run)?;
            Ok(write(&vault, &args, &run)?)
        })
        .await
    }
}

fn write(vault: &Vault, args: &VaultWriteArgs, run: &Run) -> Result<Outcome, FileError> {
    let changes = changes(args)?;
    let path = target(vault, run, &args.path)?;
    let folders = if matches!(args.mode, Mode::Section) { MissingFolders::Refuse } else { MissingFolders::Create };
    let rules = vault.rules(run);
    let place = vault.locate(&vault.workspace.guard(&rules), &path, folders)?;
    let _alone = vault.workspace.lock_for_writing(&place.key);
    let existing = place.existing()?;
    check(vault, args, run, &place, existing.as_ref(), &path)?;
    let old = match &existing {
        Some(existing) => existing.content.as_deref().ok_or_else(|| too_large(&path, existing.metadata.len()))?,
        None => &[],
    };
    let mut editable = Editable::of(old).map_err(|_| FileError::Binary { path: path.clone(), bytes: old.len() })?;
    let text = edited(&editable.text, args, &changes, &path)?;
    if text != editable.text && !editable.accepts(&args.body) {
        return Err(FileError::refused(
            format!("`{path}` is not UTF-8, so only ASCII text can be put into it"),
            "convert the note to UTF-8 first",
        ));
    }
    let facts = NoteFacts::of(&text);
    editable.text = text;
    let content = editable.into_bytes();
    if content.len() as u64 > FILE_BYTES_MAX {
        return Err(too_large(&path, content.len() as u64));
    }
    if run.stop().is_cancelled() {
        return Err(FileError::Stopped);
    }
    if content != old || existing.is_none() {
        save(&place, &content, existing.as_ref())?;
    }
    let hash = blake3::hash(&content);
    vault.workspace.reads.note(run.caller(), &place.key, hash);
    drop(_alone);
    // The note is written: an index that cannot be made now is no reason to say otherwise.
    let unresolved = unresolved(vault, run, &path, &facts).unwrap_or_default();
    let diff = unified(&path, existing.as_ref().map(|_| old), &content);
    Ok(answer(&path, args, existing.is_none(), &hash.to_string(), content.len(), &unresolved, &diff))
}

fn answer(
    path: &str,
    args: &VaultWriteArgs,
    created: bool,
    hash: &str,
    bytes: usize,
    unresolved: &[String],
    diff: &str,
) -> Outcome {
    let mut text = match (created, diff.is_empty()) {
        (true, _) => format!("wrote `{path}`, {bytes} bytes (new)"),
        (false, true) => format!("wrote `{path}`, {bytes} bytes (unchanged)"),
        (false, false) => format!("wrote `{path}`, {bytes} bytes\n\n{diff}"),
    };
    if !unresolved.is_empty() {
        text.push_str(&format!("\n[links that lead to no note yet: {}]", unresolved.join(", ")));
    }
    Outcome::text(text).structured(json!({
        "status": "ok",
        "path": path,
        "project_id": args.project_id,
        "created": created,
        "hash": hash,
        "bytes": bytes,
        "links_unresolved": unresolved,
        "diff": diff,
    }))
}

/// Returns the path of the note. One whose name differs only in case or Unicode form is the same note.
fn target(vault: &Vault, run: &Run, text: &str) -> Result<String, FileError> {
    if text.ends_with('/') {
        return Err(FileError::Kind { path: text.to_owned(), is: "a folder", wanted: "a file" });
    }
    let path = note_path(&vault.plain(text)?);
    if path == super::names::NOTE_END {
        return Err(FileError::Kind { path: text.to_owned(), is: "a folder", wanted: "a file" });
    }
    let (known, _) = vault.look(run, |_, graph, _| match graph.names.position(&path) {
        Some(_) => Some(path.clone()),
        None => graph.names.twin(&path).map(str::to_owned),
    })?;
    match known {
        Some(known) => Ok(known),
        None => check_name(&path).map(|()| path),
    }
}

/// Refuses names that no link could name.
pub(crate) fn check_name(path: &str) -> Result<(), FileError> {
    let Some(found) = path.chars().find(|c| NOT_IN_NAMES.contains(c)) else { return Ok(()) };
    Err(FileError::refused(
        format!("`{path}` has the character `{found}`, which has another meaning in links"),
        "give the note a name without any of `[ ] # ^ | \\`",
    ))
}

fn check(
    vault: &Vault,
    args: &VaultWriteArgs,
    run: &Run,
    place: &FileLocation,
    existing: Option<&ExistingFile>,
    path: &str,
) -> Result<(), FileError> {
    match existing {
        Some(_) if args.mode == Mode::Create => {
            return Err(FileError::refused(
                format!("there is already a note `{path}`"),
                "choose another path, or write with `mode` replace, append, prepend or section",
            ));
        }
        None if args.mode == Mode::Section => {
            return Err(vault.look(run, |_, graph, _| missing(graph, path))?.0);
        }
        _ => {}
    }
    let hash = existing.map(|existing| existing.hash.to_string());
    if let Some(wanted) = &args.if_hash
        && hash.as_ref().is_none_or(|hash| !hash.eq_ignore_ascii_case(wanted))
    {
        let is = hash.map_or("it is not there".to_owned(), |hash| format!("its hash is {hash}"));
        return Err(FileError::refused(
            format!("`{path}` is not what was expected: {is}"),
            "read it again, then repeat the change on the new text",
        ));
    }
    existing.map_or(Ok(()), |existing| vault.refuse_stale(run, &args.project_id, &place.key, existing.hash))
}

/// Returns the properties that are set.
fn changes(args: &VaultWriteArgs) -> Result<Map<String, Value>, FileError> {
    if (args.mode == Mode::Section) != args.heading.is_some() {
        return Err(FileError::refused(
            "`heading` and the mode `section` belong together",
            "set `mode` to section and `heading` to the heading whose text is replaced",
        ));
    }
    let mut changes = args.properties.clone().unwrap_or_default();
    if let Some(title) = &args.title {
        changes.insert("title".to_owned(), json!(title));
    }
    let is_key =
        |key: &String| !key.trim().is_empty() && key.len() <= KEY_BYTES_MAX && !key.chars().any(char::is_control);
    match changes.keys().find(|key| !is_key(key)) {
        Some(key) => Err(FileError::refused(
            format!("`{}` cannot be the name of a property", key.escape_debug()),
            format!("give names of 1 to {KEY_BYTES_MAX} bytes without control characters"),
        )),
        None => Ok(changes),
    }
}

/// Returns the new text of the note.
fn edited(old: &str, args: &VaultWriteArgs, changes: &Map<String, Value>, path: &str) -> Result<String, FileError> {
    let eol = if old.contains("\r\n") { "\r\n" } else { "\n" };
    let body = if eol == "\r\n" { args.body.replace("\r\n", "\n").replace('\n', eol) } else { args.body.clone() };
    let facts = NoteFacts::of(old);
    let (head, rest) = old.split_at(facts.body);
    let ended = |text: &str| if text.is_empty() || text.ends_with('\n') { "" } else { eol };
    let mut all = changes.clone();
    let text = match args.mode {
        Mode::Create | Mode::Replace => {
            // A body with front matter of its own sets these properties too.
            let own = front_matter::find(&body);
            let (own, below) = match &own {
                Some(block) if !head.is_empty() => {
                    (front_matter::parse(&body[block.yaml.clone()]).map_err(invalid(path))?, &body[block.whole.end..])
                }
                _ => (Map::new(), body.as_str()),
            };
            for (key, value) in own {
                all.entry(key).or_insert(value);
            }
            [head, ended(head), below].concat()
        }
        Mode::Append => [old, ended(old), &body].concat(),
        Mode::Prepend => [head, ended(head), &body, ended(&body), rest].concat(),
        Mode::Section => {
            let wanted = args.heading.as_deref().unwrap_or_default();
            let heading = facts.heading(wanted).ok_or_else(|| no_heading(&facts, wanted, path))?;
            let section = facts.section(heading, old.len());
            let (above, below) = (&old[..section.start], &old[section.end..]);
            let first = if old[section.clone()].starts_with(['\r', '\n']) { eol } else { "" };
            let body = body.trim_matches(['\r', '\n']);
            let last = if below.is_empty() { "" } else { eol };
            [above, ended(above), first, body, eol, last, below].concat()
        }
    };
    front_matter::set(&text, &all).map_err(invalid(path))
}

fn invalid(path: &str) -> impl Fn(String) -> FileError + '_ {
    move |problem| {
        FileError::refused(
            format!("the properties of `{path}` cannot be changed: {problem}"),
            "write the note without `title` and `properties`, or ask a person to mend its front matter",
        )
    }
}

fn too_large(path: &str, bytes: u64) -> FileError {
    FileError::TooLarge { path: path.to_owned(), bytes, bytes_max: FILE_BYTES_MAX }
}

/// Returns the links that lead to no file.
fn unresolved(vault: &Vault, run: &Run, path: &str, facts: &NoteFacts) -> Result<Vec<String>, FileError> {
    let (mut links, _) = vault.look(run, |_, graph, _| {
        let is_lost =
            |link: &&super::link::Link| graph.names.resolve(path, &link.path, link.kind.is_markdown()).is_none();
        facts.links.iter().filter(is_lost).map(|link| link.path.clone()).collect::<Vec<_>>()
    })?;
    let mut seen = std::collections::HashSet::new();
    links.retain(|link| seen.insert(link.clone()));
    Ok(links)
}
