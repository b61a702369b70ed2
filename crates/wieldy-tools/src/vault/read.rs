//! `vault_read`: reads a note, by its path or as a link names it.

use std::sync::Arc;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use wieldy_core::{Confinement, Content, Outcome, Run, RunError, Tool, ToolSpec};

use super::folder::{ReadFile, Vault, missing};
use super::graph::Graph;
use super::link::split_place;
use super::markdown::NoteFacts;
use super::names::{folded, is_note};
use super::projects::Vaults;
use crate::files::{Editable, FileError, blocking, decode};
use crate::index::IndexState;

/// A tool that reads a note.
pub(crate) struct VaultRead {
    vaults: Arc<Vaults>,
}

/// A note to read.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct VaultReadArgs {
    /// The note: `folder/note.md`, or as a link names it: `Note`, `Note#Heading`, `Note^block`, an alias.
    #[schemars(length(min = 1, max = 4096))]
    path: String,
    /// The vault.
    #[serde(default = "super::default_project")]
    #[schemars(length(min = 1, max = 100))]
    project_id: String,
    /// Further parts of the answer: the links from other notes.
    #[serde(default)]
    include: Vec<Include>,
}

#[derive(Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Include {
    Backlinks,
}

impl VaultRead {
    pub(crate) fn new(vaults: Arc<Vaults>) -> Self {
        Self { vaults }
    }
}

impl Tool for VaultRead {
    type Args = VaultReadArgs;

    fn spec(&self) -> ToolSpec {
        super::spec("vault_read", "Reads a note of the vault with its properties and links.", 10)
            .scope("oracle")
            .read_only()
            .permission("files.read")
            .reads("path")
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        // A link text may mean any note, and the links of a note depend on all names.
        let _ = thing;
        self.vaults.names_of("")
    }

    async fn run(&self, args: VaultReadArgs, run: &Run) -> Result<Outcome, RunError> {
        let (vaults, run) = (self.vaults.clone(), run.clone());
        blocking(move || {
            let vault = vaults.of(run.caller(), &args.project_id)?;
            super::moving::finish_moves(&vault, &run)?;
            Ok(read(&vault, &args, &run)?)
        })
        .await
    }
}

/// A note that was found, and the place in it.
struct Found {
    file: usize,
    place: Option<Place>,
    ambiguous: bool,
}

enum Place {
    Heading(String),
    Block(String),
}

fn read(vault: &Vault, args: &VaultReadArgs, run: &Run) -> Result<Outcome, FileError> {
    let rules = vault.rules(run);
    let guard = vault.workspace.guard(&rules);
    let (answer, index) = vault.look(run, |_, graph, _| {
        let found = find(vault, graph, &args.path)?;
        let path = graph.names.path(found.file).to_owned();
        let file = vault.read(&guard, &path).map_err(|error| match error {
            FileError::Missing { .. } => missing(graph, &path),
            error => error,
        })?;
        let backlinks = args.include.contains(&Include::Backlinks).then(|| backlinks(graph, found.file));
        let links = Links::of(graph, &path, &file.content);
        Ok::<_, FileError>((found, path, file, backlinks, links))
    })?;
    let (found, path, file, backlinks, links) = answer?;
    let seen = vault.note_seen(run, &args.project_id, &file.key, file.hash);
    let (text, facts) = (links.text, links.facts);
    let content = match &found.place {
        None => text[facts.body..].to_owned(),
        Some(place) => part(&text, &facts, place, &path)?,
    };
    let title = facts.title.clone().unwrap_or_else(|| super::names::stem(super::names::last(&path)).to_owned());
    let mut answer = json!({
        "path": path,
        "project_id": args.project_id,
        "content": content,
        "metadata": metadata(&facts, &file, &title),
        "links": links.shown,
        "links_total": facts.links.len(),
        "backlinks": backlinks.clone().unwrap_or_default(),
        "index": index,
    });
    if found.ambiguous {
        answer["ambiguous"] = json!(true);
    }
    if let Some(seen) = seen {
        answer["stale"] = json!({"previous_hash": seen.to_string(), "current_hash": file.hash.to_string()});
    }
    let mut outcome = Outcome::text(content).structured(answer);
    let notes = notes(&found, &path, args, &facts, seen.is_some(), backlinks.as_deref(), &index);
    outcome.content.extend(notes.into_iter().map(|note| Content::text(format!("\n{note}"))));
    Ok(outcome)
}

/// Returns lines on the note for facts that its text does not show.
fn notes(
    found: &Found,
    path: &str,
    args: &VaultReadArgs,
    facts: &NoteFacts,
    is_stale: bool,
    backlinks: Option<&[Value]>,
    index: &IndexState,
) -> Vec<String> {
    let mut notes = Vec::new();
    if args.path != path {
        notes.push(format!("[this is `{path}`]"));
    }
    if found.ambiguous {
        notes.push(format!("[several notes have this name; `{path}` is the one that such a link means]"));
    }
    if is_stale {
        notes.push("[the note changed since this session last read or wrote it]".to_owned());
    }
    if !facts.properties.is_empty() {
        notes.push(format!("[properties: {}]", Value::Object(facts.properties.clone())));
    }
    notes.extend(facts.problem.as_ref().map(|problem| format!("[{problem}]")));
    if let Some(backlinks) = backlinks {
        let shown: Vec<String> = backlinks
            .iter()
            .map(|link| format!("{}:{}", link["path"].as_str().unwrap_or_default(), link["line"]))
            .collect();
        notes
            .push(format!("[linked from: {}]", if shown.is_empty() { "no note".to_owned() } else { shown.join(", ") }));
    }
    notes.extend(super::note_on_index(index));
    notes
}

/// Finds a note by its path, as a link names it, or by an alias.
fn find(vault: &Vault, graph: &Graph, wanted: &str) -> Result<Found, FileError> {
    if let Ok(path) = vault.plain(wanted)
        && let Some(file) = graph.names.position(&path)
    {
        return note(graph, file, None, false);
    }
    let inner = wanted.trim().trim_start_matches('!');
    let inner = inner.strip_prefix("[[").and_then(|inner| inner.strip_suffix("]]")).unwrap_or(inner);
    let inner = inner.split('|').next().unwrap_or_default();
    let (name, place) = split_place(inner);
    let (name, place) = match (place, name.rsplit_once('^')) {
        (Some(place), _) => {
            let place = match place.strip_prefix('^') {
                Some(block) => Place::Block(block.to_owned()),
                None => Place::Heading(place.to_owned()),
            };
            (name, Some(place))
        }
        (None, Some((name, block))) => (name, Some(Place::Block(block.to_owned()))),
        (None, None) => (name, None),
    };
    let name = vault.plain(name)?;
    if let Some(target) = graph.names.resolve("", &name, false).filter(|_| !name.is_empty()) {
        return note(graph, target.file, place, target.ambiguous);
    }
    let alias = folded(&name);
    let mut named =
        graph.notes().filter(|(_, facts)| facts.aliases.iter().any(|own| folded(own) == alias)).map(|(file, _)| file);
    match named.next() {
        Some(file) => note(graph, file, place, named.next().is_some()),
        None => Err(missing(graph, &name)),
    }
}

fn note(graph: &Graph, file: usize, place: Option<Place>, ambiguous: bool) -> Result<Found, FileError> {
    let path = graph.names.path(file);
    if !is_note(path) {
        return Err(FileError::refused(
            format!("`{path}` is no note: the names of notes end in `.md`"),
            "give the path of a note; `vault_list` shows them",
        ));
    }
    Ok(Found { file, place, ambiguous })
}

/// Returns the text of a section, or of the paragraph of a block.
fn part(text: &str, facts: &NoteFacts, place: &Place, path: &str) -> Result<String, FileError> {
    match place {
        Place::Heading(wanted) => {
            let heading = facts.heading(wanted).ok_or_else(|| no_heading(facts, wanted, path))?;
            let section = facts.section(heading, text.len());
            Ok(text[facts.headings[heading].start..section.end].to_owned())
        }
        Place::Block(wanted) => {
            let found = facts.blocks.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted));
            let (_, start) = found.ok_or_else(|| {
                let names: Vec<&str> = facts.blocks.iter().map(|(name, _)| name.as_str()).take(20).collect();
                FileError::refused(
                    format!("`{path}` has no block `{wanted}`"),
                    if names.is_empty() {
                        "it has no named blocks".to_owned()
                    } else {
                        format!("its blocks: {}", names.join(", "))
                    },
                )
            })?;
            let end = text[*start..].find('\n').map_or(text.len(), |at| start + at);
            let line = text[*start..end].trim_start();
            let is_item = line.starts_with(['-', '*', '+']) || line.starts_with(|c: char| c.is_ascii_digit());
            let above = text[..*start].rfind("\n\n").map_or(facts.body, |at| at + 2).max(facts.body);
            let start = if is_item || above > *start { *start } else { above };
            Ok(text[start..end].to_owned())
        }
    }
}

/// Returns the error for a missing heading, with those that there are.
pub(crate) fn no_heading(facts: &NoteFacts, wanted: &str, path: &str) -> FileError {
    let shown = |heading: &super::markdown::Heading| format!("`{}`", heading.text);
    let names: Vec<String> = facts.headings.iter().map(shown).take(30).collect();
    FileError::refused(
        format!("`{path}` has no heading `{wanted}`"),
        if names.is_empty() { "it has no headings".to_owned() } else { format!("its headings: {}", names.join(", ")) },
    )
}

/// Maximum number of links, and of backlinks, in an answer.
const LINKS_MAX: usize = 1000;
/// Maximum size of the names and paths of these.
const LINKS_BYTES_MAX: usize = 256 * 1024;

/// The links of the text as it is now, which may be newer than the index.
struct Links {
    text: String,
    facts: NoteFacts,
    shown: Vec<Value>,
}

impl Links {
    fn of(graph: &Graph, path: &str, content: &[u8]) -> Self {
        let text = match Editable::of(content) {
            Ok(editable) if std::str::from_utf8(content).is_ok() => editable.text,
            // Text in an unknown encoding is shown as well as possible.
            _ => decode(content, None).map(|decoded| decoded.text.into_owned()).unwrap_or_default(),
        };
        let facts = NoteFacts::of(&text);
        let shown = facts.links.iter().take(LINKS_MAX).map(|link| {
            let target = graph.names.resolve(path, &link.path, link.kind.is_markdown());
            let place = link.place.as_ref().map(|place| format!("#{place}")).unwrap_or_default();
            let mut shown =
                json!({"target": format!("{}{place}", link.path), "line": link.line, "resolved": target.is_some()});
            if let Some(target) = target {
                shown["path"] = json!(graph.names.path(target.file));
                if target.ambiguous {
                    shown["ambiguous"] = json!(true);
                }
            }
            if link.embed {
                shown["embed"] = json!(true);
            }
            shown
        });
        let shown = within(shown);
        Self { shown, text, facts }
    }
}

fn backlinks(graph: &Graph, file: usize) -> Vec<Value> {
    let shown = |(note, index): &(usize, usize)| {
        let facts = graph.facts[*note].as_ref()?;
        Some(
            json!({"path": graph.names.path(*note), "title": graph.title(*note), "line": facts.links.get(*index)?.line}),
        )
    };
    within(graph.links_in[file].iter().take(LINKS_MAX).filter_map(shown))
}

/// Returns the first values, as far as their paths and names fit into an answer.
fn within(values: impl Iterator<Item = Value>) -> Vec<Value> {
    let mut bytes_left = LINKS_BYTES_MAX;
    let size = |value: &Value| {
        let texts = value.as_object().into_iter().flat_map(|map| map.values()).filter_map(Value::as_str);
        32 + texts.map(str::len).sum::<usize>()
    };
    let fits = |value: &Value| {
        let left = bytes_left.checked_sub(size(value));
        bytes_left = left.unwrap_or(0);
        left.is_some()
    };
    values.take_while(fits).collect()
}

fn metadata(facts: &NoteFacts, file: &ReadFile, title: &str) -> Value {
    let time = |time: std::io::Result<cap_std::time::SystemTime>| {
        let time = Timestamp::try_from(time.ok()?.into_std()).ok()?;
        Some(time.to_string())
    };
    let sources = match facts.properties.get("sources") {
        Some(Value::Array(sources)) => sources.clone(),
        Some(Value::Null) | None => Vec::new(),
        Some(source) => vec![source.clone()],
    };
    let mut metadata = Map::from_iter([
        ("title".to_owned(), json!(title)),
        ("tags".to_owned(), json!(facts.tags)),
        ("aliases".to_owned(), json!(facts.aliases)),
        ("properties".to_owned(), Value::Object(facts.properties.clone())),
        ("created".to_owned(), json!(time(file.metadata.created()))),
        ("modified".to_owned(), json!(time(file.metadata.modified()))),
        ("hash".to_owned(), json!(file.hash.to_string())),
        ("sources".to_owned(), json!(sources)),
    ]);
    if let Some(problem) = &facts.problem {
        metadata.insert("problem".to_owned(), json!(problem));
    }
    Value::Object(metadata)
}
