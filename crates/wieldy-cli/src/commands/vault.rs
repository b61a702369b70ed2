//! `wieldy vault`: calls the vault tools, and prints their answers for people.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use serde_json::{Map, Value, json};
use wieldy::{Content, ToolResult};

use super::arguments::arguments;
use super::call::run_shown;
use crate::args::{BesideArgs, CallArgs, RunArgs, VaultArgs, VaultCommand};
use crate::config::{Config, Environment};
use crate::exit::{Exit, Failure};
use crate::live::Live;
use crate::output::{Printer, shown, shown_in_line};

/// Maximum size of a text from a file or standard input.
const BODY_BYTES_MAX: u64 = 32 * 1024 * 1024;

pub(crate) fn run(
    args: VaultArgs,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let (tool, mut given) = call_of(&args.command)?;
    given.retain(|_, value| !value.is_null());
    let (project, run) = on(args.command);
    given.insert("project_id".to_owned(), json!(project));
    let root = config.vault.projects.get(&project).map(|found| found.root.clone());
    let page = Page { root: root.filter(|root| !root.to_string_lossy().contains('{')), printer };
    let call = CallArgs {
        tool: tool.to_owned(),
        pairs: Vec::new(),
        args: Some(Value::Object(given).to_string()),
        run,
        in_background: false,
        confirm: false,
        idempotency_key: None,
        for_model: false,
        max_chars: None,
        max_tokens: None,
        no_header: false,
        beside: BesideArgs { context: None, metadata: None },
    };
    run_shown(&call, config, environment, printer, &|result, live| {
        if let Some(text) = page.text(result) {
            return printer.data(text.as_bytes());
        }
        if !result.is_success() || &*result.tool == "vault_read" {
            return page.note(result, live);
        }
        live.print_rest(result)?;
        // The answer is one line or more, and ends without a line end.
        if printer.stdout_is_terminal() { Ok(()) } else { printer.data(b"\n") }
    })
}

/// Returns the project and the options of the call.
fn on(command: VaultCommand) -> (String, RunArgs) {
    let on = match command {
        VaultCommand::Read { on, .. }
        | VaultCommand::Write { on, .. }
        | VaultCommand::Search { on, .. }
        | VaultCommand::List { on, .. }
        | VaultCommand::Move { on, .. }
        | VaultCommand::Index { on, .. } => on,
    };
    (on.project, on.run)
}

/// Returns the tool of a command, and its arguments; null stands for one that is not given.
fn call_of(command: &VaultCommand) -> Result<(&'static str, Map<String, Value>), Failure> {
    let (tool, given) = match command {
        VaultCommand::Read { path, backlinks, .. } => {
            ("vault_read", json!({"path": path, "include": backlinks.then_some(["backlinks"])}))
        }
        VaultCommand::Write { path, body, mode, heading, title, property, if_hash, .. } => {
            let properties = (!property.is_empty()).then(|| arguments(None, property)).transpose()?;
            let given = json!({
                "path": path, "body": text(body)?, "mode": mode, "heading": heading, "title": title,
                "properties": properties, "if_hash": if_hash,
            });
            ("vault_write", given)
        }
        VaultCommand::Search { query, limit, folder, cursor, .. } => {
            ("vault_search", json!({"query": query.join(" "), "limit": limit, "folder": folder, "cursor": cursor}))
        }
        VaultCommand::List { folder, depth, sort, tag, cursor, .. } => {
            ("vault_list", json!({"folder": folder, "depth": depth, "sort": sort, "tag": tag, "cursor": cursor}))
        }
        VaultCommand::Move { path, new_path, dry_run, keep_links, .. } => {
            let update_links = !keep_links;
            (
                "vault_move",
                json!({"path": path, "new_path": new_path, "dry_run": dry_run, "update_links": update_links}),
            )
        }
        VaultCommand::Index { folder, depth, style, title, page, .. } => {
            let given = json!({"folder": folder, "depth": depth, "style": style, "title": title, "path": page});
            ("vault_create_index", given)
        }
    };
    let Value::Object(given) = given else { unreachable!("an object") };
    Ok((tool, given))
}

/// Reads the text of a note from the command line, a file or standard input.
fn text(body: &str) -> Result<String, Failure> {
    let read = |source: &mut dyn Read| {
        let mut text = String::new();
        source.take(BODY_BYTES_MAX + 1).read_to_string(&mut text)?;
        anyhow::ensure!(text.len() as u64 <= BODY_BYTES_MAX, "it is larger than {BODY_BYTES_MAX} bytes");
        Ok(text)
    };
    let text = match body.strip_prefix('@') {
        _ if body == "-" => read(&mut std::io::stdin().lock()).context("cannot read the text from standard input"),
        Some(path) => std::fs::File::open(path)
            .map_err(anyhow::Error::new)
            .and_then(|mut file| read(&mut file))
            .with_context(|| format!("cannot read the text from `{path}`")),
        None => Ok(body.to_owned()),
    };
    text.map_err(|error: anyhow::Error| Failure::usage(anyhow!(error)))
}

/// The form of answers for people: paths that a terminal can open, and colours.
struct Page<'a> {
    root: Option<PathBuf>,
    printer: &'a Printer,
}

impl Page<'_> {
    /// Returns the text for a list of notes; other answers are shown as they are.
    fn text(&self, result: &ToolResult) -> Option<String> {
        let answer = result.structured.as_ref().filter(|_| result.is_success())?;
        let (notes, is_search) = match &*result.tool {
            "vault_search" => (answer["results"].as_array()?, true),
            "vault_list" => (answer["notes"].as_array()?, false),
            _ => return None,
        };
        let mut text: String =
            notes.iter().map(|note| if is_search { self.found(note) } else { self.listed(note) }).collect();
        if notes.is_empty() {
            text.push_str("no notes\n");
        }
        if answer["matched"] == "any" && !notes.is_empty() {
            text.push_str(&self.dim("no note has all of the words; these have some\n"));
        }
        if let Some(cursor) = answer["cursor"].as_str() {
            text.push_str(&self.dim(&format!("{} notes in all; go on with --cursor {cursor}\n", answer["total"])));
        }
        if answer["index"]["complete"] == false {
            text.push_str(&self.dim("not all notes were read yet; ask again\n"));
        }
        Some(text)
    }

    /// Prints the text of a note as data, and what wieldy says about it as messages.
    fn note(&self, result: &ToolResult, live: &Live) -> Result<(), Failure> {
        let content = result.structured.as_ref().and_then(|answer| answer["content"].as_str());
        let Some(content) = content else { return live.print_rest(result) };
        self.printer.tool_text(content)?;
        for block in result.content.iter().skip(1) {
            self.printer.tell(&shown(Content::text_of(std::slice::from_ref(block)).trim()));
        }
        Ok(())
    }

    fn found(&self, note: &Value) -> String {
        let place = format!("{}:{}", self.path(note), note["line"]);
        let heading =
            note["heading"].as_str().map(|heading| format!("  {}", shown_in_line(heading))).unwrap_or_default();
        let snippet = shown_in_line(note["snippet"].as_str().unwrap_or_default());
        format!("{}  {}{}\n    {snippet}\n", self.coloured(&place, "35"), self.title(note), self.dim(&heading))
    }

    fn listed(&self, note: &Value) -> String {
        let tags = note["tags"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let tags: String = tags.map(|tag| format!(" #{}", shown_in_line(tag))).collect();
        format!("{}  {}{}\n", self.coloured(&self.path(note), "35"), self.title(note), self.coloured(&tags, "36"))
    }

    fn title(&self, note: &Value) -> String {
        self.coloured(&shown_in_line(note["title"].as_str().unwrap_or_default()), "1")
    }

    /// Returns the note's path from the current folder, or the whole path.
    fn path(&self, note: &Value) -> String {
        let path = Path::new(note["path"].as_str().unwrap_or_default());
        let whole = self.root.as_ref().map_or_else(|| path.to_owned(), |root| root.join(path));
        let here = std::env::current_dir().ok();
        let below = here.and_then(|here| whole.strip_prefix(here).ok().map(Path::to_owned));
        shown_in_line(&below.unwrap_or(whole).to_string_lossy())
    }

    fn dim(&self, text: &str) -> String {
        self.coloured(text, "2")
    }

    fn coloured(&self, text: &str, colour: &str) -> String {
        let is_plain = text.is_empty() || !self.printer.stdout_has_colours();
        if is_plain { text.to_owned() } else { format!("\x1b[{colour}m{text}\x1b[0m") }
    }
}
