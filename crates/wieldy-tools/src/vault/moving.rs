//! `vault_move`: moves a note, another file or a folder, and changes the links to it in all notes.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::folder::{Vault, missing, note_path};
use super::graph::Graph;
use super::names::{Names, is_note, last};
use super::plan::{self, MoveLock, NotMoved, Plan, PlannedNote, carry_out, is_within, may_be_unfinished, taken};
use super::projects::Vaults;
use super::rewrite::{Rewrite, applied, with_old};
use super::write::check_name;
use crate::files::{FileError, Guard, WalkOptions, blocking};

/// A tool that moves notes.
pub(crate) struct VaultMove {
    vaults: Arc<Vaults>,
}

/// A move.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct VaultMoveArgs {
    /// The note, file or folder.
    #[schemars(length(min = 1, max = 4096))]
    path: String,
    /// The new path. One that ends in `/` is the folder that it moves into.
    #[schemars(length(min = 1, max = 4096))]
    new_path: String,
    /// The vault.
    #[serde(default = "super::default_project")]
    #[schemars(length(min = 1, max = 100))]
    project_id: String,
    /// Change the links of all notes, so that they lead to the same notes as before.
    #[serde(default = "yes")]
    update_links: bool,
    /// Only say what would change.
    #[serde(default)]
    dry_run: bool,
}

fn yes() -> bool {
    true
}

impl VaultMove {
    pub(crate) fn new(vaults: Arc<Vaults>) -> Self {
        Self { vaults }
    }
}

impl Tool for VaultMove {
    type Args = VaultMoveArgs;

    fn spec(&self) -> ToolSpec {
        let description = "Moves or renames a note or folder of the vault, and changes all links to it.";
        let mut spec = super::spec("vault_move", description, 10).permission("files.write").writes("path");
        spec.annotations.destructive = false;
        spec.idempotent()
    }

    fn names_of(&self, _: &str, _: &Confinement) -> Vec<String> {
        // Links to it may be in any note.
        self.vaults.names_of("")
    }

    async fn run(&self, args: VaultMoveArgs, run: &Run) -> Result<Outcome, RunError> {
        let (vaults, run) = (self.vaults.clone(), run.clone());
        blocking(move || {
            let vault = vaults.of(run.caller(), &args.project_id)?;
            move_it(&vault, &args, &run)
        })
        .await
    }
}

/// Completes a move that another process left unfinished.
pub(crate) fn finish_moves(vault: &Vault, run: &Run) -> Result<(), FileError> {
    if !may_be_unfinished(vault) || !run.caller().permissions.holds("files.write") {
        return Ok(());
    }
    plan::finish(vault, run, &MoveLock::take(vault, run)?)
}

fn move_it(vault: &Vault, args: &VaultMoveArgs, run: &Run) -> Result<Outcome, RunError> {
    let lock = MoveLock::take(vault, run)?;
    plan::finish(vault, run, &lock)?;
    let mut again = true;
    loop {
        if let Some(outcome) = already_moved(vault, args, run)? {
            return Ok(outcome);
        }
        let planned = vault.look(run, |_, graph, _| planned(vault, graph, args, run))?;
        let (planned, index) = (planned.0?, planned.1);
        if !index.complete {
            return Err(FileError::refused("the vault is not read completely yet", "ask again").into());
        }
        if args.dry_run {
            return Ok(planned.outcome(args));
        }
        match carry_out(vault, run, &lock, &planned.plan) {
            Ok(()) => return Ok(planned.outcome(args)),
            Err(NotMoved { is_outdated: true, .. }) if again => again = false,
            Err(NotMoved { error, is_partial, .. }) => {
                let mut error = RunError::from(error);
                if is_partial {
                    error.effect_possible = true;
                    error.error.message.push_str(" (some links are already changed)");
                }
                return Err(error);
            }
        }
    }
}

/// Returns the answer for a move that was made before, so that a call can be repeated.
fn already_moved(vault: &Vault, args: &VaultMoveArgs, run: &Run) -> Result<Option<Outcome>, FileError> {
    let rules = vault.rules(run);
    let guard = vault.workspace.guard(&rules);
    // A hidden file must look like a missing one.
    let is_there =
        |path: &str| vault.check_place(&guard, path).is_ok() && vault.root.root().symlink_metadata(path).is_ok();
    let (from, mut to) = (vault.plain(&args.path)?, vault.plain(&args.new_path)?);
    if args.new_path.ends_with('/') {
        to = super::names::workspace_path(&to, last(&from));
    }
    let pairs = [(from.clone(), to.clone()), (note_path(&from), note_path(&to))];
    if pairs.iter().any(|(from, _)| is_there(from)) || from.is_empty() {
        return Ok(None);
    }
    let moved = pairs.into_iter().find(|(_, to)| !to.is_empty() && is_note(to) && is_there(to));
    Ok(moved.map(|(from, to)| {
        let text = format!("nothing to move: `{to}` is there, and there is no `{from}`");
        Outcome::text(text).structured(json!({
            "status": "ok", "project_id": args.project_id, "moved": [], "updated": [], "dry_run": args.dry_run,
        }))
    }))
}

/// A move with everything that it changes.
struct Planned {
    plan: Plan,
    moved: Vec<(String, String)>,
    unresolved: (usize, usize),
    /// Notes whose links are not known.
    unread: Vec<String>,
}

impl Planned {
    fn outcome(&self, args: &VaultMoveArgs) -> Outcome {
        let updated: Vec<Value> = self
            .plan
            .notes
            .iter()
            .map(|note| json!({"path": self.now(&note.path), "links": note.edits.len()}))
            .collect();
        let links: usize = self.plan.notes.iter().map(|note| note.edits.len()).sum();
        let (before, after) = self.unresolved;
        let verb = if args.dry_run { "would move" } else { "moved" };
        let mut text = format!("{verb} `{}` to `{}`", self.plan.from, self.plan.to);
        let (links, notes) = (super::counted(links, "link"), super::counted(updated.len(), "note"));
        let done = if args.dry_run { "would change" } else { "changed" };
        text.push_str(&format!("; {links} in {notes} {done}"));
        for note in self.plan.notes.iter().take(50) {
            text.push_str(&format!("\n  {} ({})", self.now(&note.path), note.edits.len()));
        }
        if before != after {
            text.push_str(&format!("\n[links that lead nowhere: {before} before, {after} after]"));
        }
        if !self.unread.is_empty() {
            text.push_str(&format!("\n[links in these files are not known: {}]", self.unread.join(", ")));
        }
        let moved: Vec<Value> = self.moved.iter().map(|(from, to)| json!({"from": from, "to": to})).collect();
        Outcome::text(text).structured(json!({
            "status": "ok",
            "project_id": args.project_id,
            "moved": moved,
            "updated": updated,
            "unresolved_before": before,
            "unresolved_after": after,
            "unread": self.unread,
            "dry_run": args.dry_run,
        }))
    }

    /// Returns the path of a note after the move.
    fn now(&self, path: &str) -> String {
        moved_path(path, &self.plan.from, &self.plan.to).unwrap_or_else(|| path.to_owned())
    }
}

/// Returns the new path of a file that moves.
fn moved_path(path: &str, from: &str, to: &str) -> Option<String> {
    if path == from {
        return Some(to.to_owned());
    }
    super::below(from, path).map(|rest| format!("{to}/{rest}"))
}

fn planned(vault: &Vault, graph: &Graph, args: &VaultMoveArgs, run: &Run) -> Result<Planned, FileError> {
    let rules = vault.rules(run);
    let guard = vault.workspace.guard(&rules);
    let (from, to, is_folder) = ends(vault, graph, args, &guard)?;
    let paths = (0..graph.names.len()).map(|file| graph.names.path(file).to_owned());
    let mut moved = Vec::new();
    let after: Vec<String> = paths
        .map(|path| match moved_path(&path, &from, &to) {
            Some(new) => {
                moved.push((path, new.clone()));
                new
            }
            None => path,
        })
        .collect();
    let after = Names::new(after);
    check_rules(vault, (run, &guard), &from, is_folder, &moved)?;
    let rewrite = Rewrite::of(graph, &after, args.update_links)?;
    let mut notes = Vec::new();
    for (note, edits) in &rewrite.edits {
        let path = graph.names.path(*note).to_owned();
        let file = vault.read(&guard, &path)?;
        let is_known = graph.hashes[*note] == Some(file.hash);
        let edits = with_old(&file.content, edits).filter(|_| is_known);
        let new = edits.and_then(|edits| Some((applied(&file.content, &edits)?, edits)));
        let (new, edits) = new.ok_or_else(|| FileError::Stale { path: path.clone() })?;
        notes.push(PlannedNote {
            path,
            old_hash: file.hash.to_string(),
            new_hash: blake3::hash(&new).to_string(),
            edits,
        });
    }
    if !is_folder {
        let file = vault.read(&guard, &from)?;
        vault.refuse_stale(run, &args.project_id, &file.key, file.hash)?;
    }
    let unread = graph.unread.iter().map(|file| graph.names.path(*file).to_owned()).collect();
    let plan = Plan { root: vault.root.path().to_owned(), from, to, notes };
    let unresolved = (rewrite.unresolved_before, rewrite.unresolved_after);
    Ok(Planned { plan, moved, unresolved, unread })
}

/// Returns the old path, the new one, and if it is a folder.
fn ends(
    vault: &Vault,
    graph: &Graph,
    args: &VaultMoveArgs,
    guard: &Guard<'_>,
) -> Result<(String, String, bool), FileError> {
    let given = vault.plain(&args.path)?;
    let kind = |path: &str| vault.root.root().symlink_metadata(path).ok();
    let known = [given.clone(), note_path(&given)].into_iter().find(|path| graph.names.position(path).is_some());
    let is_folder = known.is_none() && kind(&given).is_some_and(|found| found.is_dir());
    if given.is_empty() || (known.is_none() && !is_folder) {
        return Err(missing(graph, &given));
    }
    let from = known.unwrap_or(given);
    let mut to = vault.plain(&args.new_path)?;
    if args.new_path.ends_with('/') {
        to = super::names::workspace_path(&to, last(&from));
    } else if !is_folder && is_note(&from) {
        to = note_path(&to);
    }
    check_name(&to)?;
    if to.is_empty() || to == from {
        return Err(FileError::refused(format!("`{from}` is there already"), "give another `new_path`"));
    }
    if is_folder && is_within(&to, &from) {
        return Err(FileError::refused(format!("`{to}` is inside `{from}`"), "give a path outside the folder"));
    }
    // A place that leads outside or is hidden or protected is refused before anything is told of it.
    vault.check_place(guard, &to)?;
    if kind(&to).is_some() {
        return Err(taken(&to));
    }
    if let Some((above, _)) = to
        .match_indices('/')
        .map(|(at, _)| to.split_at(at))
        .find(|(above, _)| kind(above).is_some_and(|found| found.is_file()))
    {
        return Err(FileError::Kind { path: above.to_owned(), is: "a file", wanted: "a folder" });
    }
    if let Some(twin) = graph.names.twin(&to).filter(|twin| *twin != from) {
        return Err(taken(twin));
    }
    Ok((from, to, is_folder))
}

/// Refuses to move hidden and protected files: under another name, they might no longer be so.
fn check_rules(
    vault: &Vault,
    (run, guard): (&Run, &Guard<'_>),
    from: &str,
    is_folder: bool,
    moved: &[(String, String)],
) -> Result<(), FileError> {
    let given = vault.given(from)?;
    for path in moved.iter().flat_map(|(old, new)| [old.as_str(), new.as_str()]).chain([from]) {
        vault.check_place(guard, path)?;
    }
    if is_folder {
        let options = WalkOptions { depth: u32::MAX, hidden: true, ignored: true };
        let mut walk = vault.workspace.walk(&given, options, guard, run.stop())?;
        for entry in walk.by_ref() {
            guard.check_changed(&entry.path)?;
        }
        if walk.note_on_limits().is_some() {
            return Err(FileError::refused(
                format!("`{from}` has too many files or levels to move at once"),
                "move the folders in it one by one",
            ));
        }
    }
    Ok(())
}
