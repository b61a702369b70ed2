//! `vault_create_index`: writes a page that links to all notes of a folder, between two markers of its own.

use std::num::NonZeroU32;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::folder::{Vault, note_path};
use super::graph::Graph;
use super::names::{Names, folder, is_note, last, stem, workspace_path};
use super::projects::Vaults;
use super::write::check_name;
use crate::files::{Editable, FileError, MissingFolders, blocking, save, unified};

const BEGIN: &str = "<!-- wieldy:index -->";
const END: &str = "<!-- /wieldy:index -->";
/// Maximum number of notes on a page.
const ENTRIES_MAX: usize = 10_000;

/// A tool that writes index pages.
pub(crate) struct VaultCreateIndex {
    vaults: Arc<Vaults>,
}

/// An index page.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct VaultCreateIndexArgs {
    /// The folder whose notes are linked.
    #[serde(default = "super::here")]
    #[schemars(length(min = 1, max = 4096))]
    folder: String,
    /// The vault.
    #[serde(default = "super::default_project")]
    #[schemars(length(min = 1, max = 100))]
    project_id: String,
    /// Number of folder levels.
    #[serde(default = "all_levels")]
    #[schemars(range(min = 1, max = 100))]
    depth: NonZeroU32,
    /// A nested list, a table, or a map of contents with one heading for each folder.
    #[serde(default)]
    style: PageStyle,
    /// The title of a new page.
    #[schemars(length(min = 1, max = 1000))]
    title: Option<String>,
    /// The page; by default `index.md` in the folder.
    #[schemars(length(min = 1, max = 4096))]
    path: Option<String>,
}

/// The form of an index page.
#[derive(Deserialize, JsonSchema, Default, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PageStyle {
    #[default]
    List,
    Table,
    Moc,
}

fn all_levels() -> NonZeroU32 {
    NonZeroU32::new(100).expect("not zero")
}

impl VaultCreateIndex {
    pub(crate) fn new(vaults: Arc<Vaults>) -> Self {
        Self { vaults }
    }
}

impl Tool for VaultCreateIndex {
    type Args = VaultCreateIndexArgs;

    fn spec(&self) -> ToolSpec {
        let description = "Writes or updates a page with links to all notes of a vault's folder. \
                           Text around its markers is kept.";
        let mut spec = super::spec("vault_create_index", description, 20).permission("files.write").writes("folder");
        spec.annotations.destructive = false;
        spec.idempotent()
    }

    fn names_of(&self, _: &str, _: &Confinement) -> Vec<String> {
        self.vaults.names_of("")
    }

    async fn run(&self, args: VaultCreateIndexArgs, run: &Run) -> Result<Outcome, RunError> {
        let (vaults, run) = (self.vaults.clone(), run.clone());
        blocking(move || {
            let vault = vaults.of(run.caller(), &args.project_id)?;
            super::moving::finish_moves(&vault, &run)?;
            Ok(create(&vault, &args, &run)?)
        })
        .await
    }
}

fn create(vault: &Vault, args: &VaultCreateIndexArgs, run: &Run) -> Result<Outcome, FileError> {
    let below = vault.plain(&args.folder)?;
    let path = match &args.path {
        Some(path) => note_path(&vault.plain(path)?),
        None => workspace_path(&below, "index.md"),
    };
    check_name(&path)?;
    let (page, index) = vault.look(run, |_, graph, _| {
        let entries = entries(graph, &below, args.depth.get() as usize, &path);
        if entries.is_empty() && !below.is_empty() && args.path.is_none() {
            return Err(super::no_folder(graph, &below));
        }
        if entries.len() > ENTRIES_MAX {
            return Err(FileError::refused(
                format!("`{below}` has {} notes, more than the {ENTRIES_MAX} of one page", entries.len()),
                "make pages of the folders in it, or set `depth`",
            ));
        }
        Ok((Page { graph, entries: &entries, folder: &below, path: &path }.text(args.style), entries.len()))
    })?;
    let (block, count) = page?;
    if !index.complete {
        return Err(FileError::refused("the vault is not read completely yet", "ask again"));
    }
    let rules = vault.rules(run);
    let place = vault.locate(&vault.workspace.guard(&rules), &path, MissingFolders::Create)?;
    let _alone = vault.workspace.lock_for_writing(&place.key);
    let existing = place.existing()?;
    let old = existing.as_ref().and_then(|existing| existing.content.as_deref()).unwrap_or_default();
    let mut editable = Editable::of(old).map_err(|_| FileError::Binary { path: path.clone(), bytes: old.len() })?;
    let title = args
        .title
        .clone()
        .unwrap_or_else(|| if below.is_empty() { "Index".to_owned() } else { last(&below).to_owned() });
    let new = with_block(&editable.text, &block, &title, &path)?;
    if new != editable.text && !editable.accepts(&new) {
        return Err(FileError::refused(format!("`{path}` is not UTF-8"), "convert the note to UTF-8 first"));
    }
    editable.text = new;
    let content = editable.into_bytes();
    let unchanged = existing.is_some() && content == old;
    if !unchanged {
        if let Some(existing) = &existing {
            vault.refuse_stale(run, &args.project_id, &place.key, existing.hash)?;
        }
        save(&place, &content, existing.as_ref())?;
        vault.workspace.reads.note(run.caller(), &place.key, blake3::hash(&content));
    }
    let done = if unchanged { "is up to date" } else { "written" };
    let diff = if unchanged { String::new() } else { unified(&path, existing.as_ref().map(|_| old), &content) };
    let text = format!(
        "`{path}` {done}, {}\n{}",
        super::counted(count, "note"),
        if existing.is_some() { diff } else { String::new() }
    );
    Ok(Outcome::text(text.trim_end().to_owned()).structured(json!({
        "status": "ok",
        "path": path,
        "project_id": args.project_id,
        "entries": count,
        "hash": blake3::hash(&content).to_string(),
        "unchanged": unchanged,
    })))
}

/// Returns the notes of the folder within the depth, in order of their paths, without the page itself.
fn entries(graph: &Graph, below: &str, depth: usize, page: &str) -> Vec<usize> {
    let mut entries: Vec<usize> = (0..graph.names.len())
        .filter(|file| {
            let path = graph.names.path(*file);
            let levels = super::below(below, path).map(|rest| rest.split('/').count());
            is_note(path) && path != page && levels.is_some_and(|levels| levels <= depth)
        })
        .collect();
    // Notes of a folder come before those of the folders in it.
    entries.sort_by_key(|file| {
        let path = graph.names.path(*file);
        let folders: Vec<String> = folder(path).split('/').map(super::names::folded).collect();
        (folders, super::names::folded(last(path)), *file)
    });
    entries
}

/// The contents of an index page.
struct Page<'a> {
    graph: &'a Graph,
    entries: &'a [usize],
    folder: &'a str,
    path: &'a str,
}

impl Page<'_> {
    fn text(&self, style: PageStyle) -> String {
        let lines = match style {
            PageStyle::List => self.list(),
            PageStyle::Table => self.table(),
            PageStyle::Moc => self.map(),
        };
        lines.join("\n")
    }

    /// Returns a link to the note. A page that is new is no file of the graph yet, which changes no other name unless
    /// it has the same.
    fn link(&self, file: usize, bar: &str) -> String {
        let names: &Names = &self.graph.names;
        let path = names.path(file);
        let title: String = self.graph.title(file).chars().filter(|c| !"[]|\n\r".contains(*c)).collect();
        let is_own_name = last(stem(path)).eq_ignore_ascii_case(last(stem(self.path)));
        let old = if is_own_name { stem(path) } else { "x" };
        let target = names.link_to(self.path, file, old, false);
        if target.contains(super::link::NOT_IN_NAMES) {
            let target = super::link::encoded(&format!("/{path}"));
            return format!("[{title}]({target})");
        }
        if target == title || title.trim().is_empty() {
            return format!("[[{target}]]");
        }
        format!("[[{target}{bar}{}]]", title.trim())
    }

    fn sub_folder(&self, file: usize) -> &str {
        folder(super::below(self.folder, self.graph.names.path(file)).unwrap_or_default())
    }

    fn list(&self) -> Vec<String> {
        let (mut lines, mut open): (Vec<String>, Vec<&str>) = (Vec::new(), Vec::new());
        for file in self.entries {
            let parts: Vec<&str> = self.sub_folder(*file).split('/').filter(|part| !part.is_empty()).collect();
            let same = open.iter().zip(&parts).take_while(|(one, other)| one == other).count();
            for (level, part) in parts.iter().enumerate().skip(same) {
                lines.push(format!("{}- {part}/", "  ".repeat(level)));
            }
            lines.push(format!("{}- {}", "  ".repeat(parts.len()), self.link(*file, "|")));
            open = parts;
        }
        lines
    }

    fn table(&self) -> Vec<String> {
        let mut lines = vec!["| Note | Folder | Tags |".to_owned(), "| --- | --- | --- |".to_owned()];
        lines.extend(self.entries.iter().map(|file| {
            let tags = self.graph.facts[*file].iter().flat_map(|facts| &facts.tags);
            let tags: Vec<String> = tags.map(|tag| format!("#{}", tag.replace('|', "\\|"))).collect();
            let folder = self.sub_folder(*file).replace('|', "\\|");
            format!("| {} | {folder} | {} |", self.link(*file, "\\|"), tags.join(" "))
        }));
        lines
    }

    fn map(&self) -> Vec<String> {
        let (mut lines, mut open): (Vec<String>, Option<&str>) = (Vec::new(), None);
        for file in self.entries {
            let folder = self.sub_folder(*file);
            if open != Some(folder) {
                if !folder.is_empty() {
                    lines.extend([String::new(), format!("## {folder}"), String::new()]);
                }
                open = Some(folder);
            }
            lines.push(format!("- {}", self.link(*file, "|")));
        }
        lines
    }
}

/// Returns the page with the block between its markers. A page without markers gets them at its end.
fn with_block(old: &str, block: &str, title: &str, path: &str) -> Result<String, FileError> {
    let eol = if old.contains("\r\n") { "\r\n" } else { "\n" };
    let block = format!("{BEGIN}\n\n{block}\n\n{END}").replace('\n', eol);
    let begin = old.find(BEGIN);
    let end = begin.and_then(|begin| old[begin..].find(END).map(|at| begin + at + END.len()));
    match (begin, end) {
        (Some(begin), Some(end)) => Ok([&old[..begin], &block, &old[end..]].concat()),
        (Some(_), None) => Err(FileError::refused(
            format!("`{path}` has `{BEGIN}` without `{END}` after it"),
            "ask a person to mend the page, or choose another `path`",
        )),
        (None, _) if old.is_empty() => {
            let title: String = title.chars().filter(|c| !c.is_control()).collect();
            Ok(format!("# {title}\n\n{block}\n"))
        }
        (None, _) => {
            let end = if old.ends_with('\n') { "" } else { eol };
            Ok([old, end, eol, &block, eol].concat())
        }
    }
}
