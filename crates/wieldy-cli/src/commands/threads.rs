//! `wieldy threads`: lists, reads, searches and writes threads by the tools that agents use.

use std::io::Read as _;
use std::sync::Arc;

use anyhow::Context;
use indicatif::ProgressBar;
use jiff::{Timestamp, Zoned};
use serde_json::{Map, Value, json};
use wieldy::{Call, Caller, ToolResult, visible};

use super::history::table::{Column, short_time, table};
use crate::args::{ThreadsArgs, ThreadsCaller, ThreadsCommand, ThreadsStatus};
use crate::config::{Config, Environment};
use crate::exit::{Exit, Failure};
use crate::history::{History, Tasks};
use crate::output::{Printer, counted, shown_in_line};
use crate::{account, assemble, confirm, history, in_runtime};

/// Maximal size of an entry that is read from standard input: more than the tool takes, so that the tool refuses it.
const CONTENT_BYTES_MAX: u64 = 1024 * 1024;

pub(crate) fn run(
    args: &ThreadsArgs,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let (tool, mut arguments) = call_of(&args.command)?;
    if let (Some(project), Value::Object(arguments)) = (&args.caller.project, &mut arguments) {
        arguments.insert("project_id".into(), json!(project));
    }
    let history = History::open(config, Tasks::Forgotten)?;
    let ended = in_runtime(async {
        let confirmer = confirm::confirmer(false, printer, &ProgressBar::hidden());
        let work = assemble::Work::default();
        let executor = assemble::executor(config, environment, confirmer, history.as_ref(), work)?;
        let result = executor.call(Call::new(tool, arguments).by(caller(&args.caller))).await;
        print(&args.command, &result, printer)
    });
    history::close(history, ended)
}

fn caller(args: &ThreadsCaller) -> Arc<Caller> {
    let user = Some(args.user.clone().unwrap_or_else(account::name));
    Arc::new(Caller { agent: args.agent.clone(), user, tenant: args.tenant.clone(), ..Caller::local() })
}

/// Returns the tool of a command and its arguments.
fn call_of(command: &ThreadsCommand) -> Result<(&'static str, Value), Failure> {
    let (tool, arguments) = match command {
        ThreadsCommand::List { status, limit, cursor } => {
            let status = match status {
                ThreadsStatus::Open => "open",
                ThreadsStatus::Closed => "closed",
                ThreadsStatus::All => "all",
            };
            ("thread_list", json!({"status": status, "limit": limit, "cursor": cursor}))
        }
        ThreadsCommand::Read { thread, limit, latest, after, before, kind } => {
            let order = if *latest { "desc" } else { "asc" };
            let arguments = json!({"thread_id": thread, "limit": limit, "order": order, "after": after,
                                   "before": before, "entry_type": kind});
            ("thread_read", arguments)
        }
        ThreadsCommand::Seek { query, limit, since, kind, thread } => {
            let arguments =
                json!({"query": query, "limit": limit, "since": since, "entry_type": kind, "thread_id": thread});
            ("thread_seek", arguments)
        }
        ThreadsCommand::Push { thread, content, kind, title, reply_to, key } => {
            let content = if content == "-" { standard_input()? } else { content.clone() };
            let arguments = json!({"thread_id": thread, "content": content, "entry_type": kind, "title": title,
                                   "reply_to": reply_to, "key": key});
            ("thread_push", arguments)
        }
    };
    let Value::Object(arguments) = arguments else { unreachable!("all of them are objects") };
    let given: Map<String, Value> = arguments.into_iter().filter(|(_, value)| !value.is_null()).collect();
    Ok((tool, Value::Object(given)))
}

fn standard_input() -> Result<String, Failure> {
    let mut text = String::new();
    let read = std::io::stdin().lock().take(CONTENT_BYTES_MAX).read_to_string(&mut text);
    read.context("cannot read the entry from standard input")
        .map_err(|error| Failure::usage(error).hint("give text in UTF-8"))?;
    Ok(text)
}

/// Prints the answer for people, or the structured answer for programs.
fn print(command: &ThreadsCommand, result: &ToolResult, printer: &Printer) -> Result<Exit, Failure> {
    if let Some(error) = result.error.as_deref() {
        printer.call_error(result);
        if printer.json {
            printer.json(&json!({ "error": error }))?;
        }
        return Ok(Exit::of(error));
    }
    // A very large answer is in an artifact, which the text names.
    let Some(answer) = &result.structured else {
        return printer.tool_text(&result.text()).map(|()| Exit::Success);
    };
    if printer.json {
        return printer.json(answer).map(|()| Exit::Success);
    }
    let now = Zoned::now();
    let page = Pages { now: &now, colours: printer.stdout_has_colours(), width: printer.width() };
    let text = match command {
        ThreadsCommand::List { .. } => page.list(answer),
        ThreadsCommand::Read { .. } => page.entries(answer),
        ThreadsCommand::Seek { .. } => page.found(answer),
        ThreadsCommand::Push { .. } => format!("{}\n", visible(&result.text())),
    };
    printer.data(text.as_bytes())?;
    tell_more(command, answer, printer);
    Ok(Exit::Success)
}

/// Tells how to read on, and if nothing was found.
fn tell_more(command: &ThreadsCommand, answer: &Value, printer: &Printer) {
    let is_empty = |name: &str| answer[name].as_array().is_some_and(Vec::is_empty);
    let cursor = match &answer["cursor"] {
        Value::Null => None,
        Value::String(cursor) => Some(cursor.clone()),
        cursor => Some(cursor.to_string()),
    };
    match (command, cursor) {
        (ThreadsCommand::List { .. }, Some(cursor)) => printer.tell(&format!("more: `--cursor {cursor}`")),
        (ThreadsCommand::Read { latest: false, .. }, Some(cursor)) => {
            printer.tell(&format!("more: `--after {cursor}`"))
        }
        (ThreadsCommand::Read { .. }, Some(cursor)) => printer.tell(&format!("more: `--before {cursor}`")),
        (ThreadsCommand::List { .. }, None) if is_empty("threads") => printer.tell("no thread fits"),
        (ThreadsCommand::Seek { .. }, None) if is_empty("results") => {
            printer.tell("no entry has all these words; try fewer, or the beginning of one, such as `migrat*`");
        }
        _ => {}
    }
}

/// The way in which answers are shown to people.
struct Pages<'a> {
    now: &'a Zoned,
    colours: bool,
    width: usize,
}

impl Pages<'_> {
    /// Formats a line for each thread.
    fn list(&self, answer: &Value) -> String {
        let threads = items(answer, "threads");
        if threads.is_empty() {
            return String::new();
        }
        let column = |name: &'static str| threads.iter().map(move |thread| one_line(&thread[name]));
        let text = |thread: &&Value| match thread["title"].as_str() {
            Some(title) => format!("{}: {}", shown_in_line(title), one_line(&thread["last_line"])),
            None => one_line(&thread["last_line"]),
        };
        let columns = [
            Column::new("LAST", threads.iter().map(|thread| self.time(&thread["last_at"]))),
            Column::new("THREAD", column("thread_id")),
            Column::new("STATUS", column("status")),
            Column::number("ENTRIES", column("entries")),
            Column::new("LAST ENTRY", threads.iter().collect::<Vec<_>>().iter().map(text)),
        ];
        table(&columns, self.width, |row, column| match (self.colours, column) {
            (true, 1) => Some("1"),
            (true, 2) => Some(if threads[row]["status"] == "open" { "32" } else { "33" }),
            _ => None,
        })
    }

    /// Formats the entries of a thread.
    fn entries(&self, answer: &Value) -> String {
        let title = answer["title"].as_str().map(|title| format!("  {}", shown_in_line(title))).unwrap_or_default();
        let total = usize::try_from(answer["total"].as_u64().unwrap_or_default()).unwrap_or(usize::MAX);
        let total = counted(total, "entry").replace("entrys", "entries");
        let thread = self.coloured(&one_line(&answer["thread_id"]), "1");
        let mut text = format!("{thread}{title}  ({}, {total})\n", one_line(&answer["status"]));
        for entry in items(answer, "entries") {
            let reply = entry["reply_to"].as_u64().map(|seq| format!("  answers #{seq}")).unwrap_or_default();
            let heading = format!("  {}  {}{reply}", one_line(&entry["author"]), self.time(&entry["at"]));
            text.push_str(&format!("\n{}{heading}\n", self.number_and_type(entry)));
            for line in visible(entry["content"].as_str().unwrap_or_default()).trim_end().lines() {
                text.push_str(&format!("    {line}\n"));
            }
        }
        text
    }

    /// Formats the entries that were found.
    fn found(&self, answer: &Value) -> String {
        let mut text = String::new();
        for found in items(answer, "results") {
            let thread = self.coloured(&one_line(&found["thread_id"]), "1");
            let heading = format!("{thread}  {}  {}", self.number_and_type(found), self.time(&found["at"]));
            let snippet = one_line(&found["snippet"]);
            // On a terminal, matches are bold.
            let snippet = match self.colours {
                false => snippet,
                true => {
                    let parts = snippet.split("**").enumerate();
                    parts.map(|(n, part)| if n % 2 == 1 { self.coloured(part, "1;33") } else { part.into() }).collect()
                }
            };
            text.push_str(&format!("{heading}\n    {snippet}\n"));
        }
        text
    }

    fn number_and_type(&self, entry: &Value) -> String {
        let kind = one_line(&entry["type"]);
        let colour = match kind.as_str() {
            "decision" | "result" => "32",
            "question" => "33",
            "error" => "31",
            "close" | "reopen" => "35",
            _ => "36",
        };
        format!("#{} {}", entry["seq"], self.coloured(&kind, colour))
    }

    fn time(&self, value: &Value) -> String {
        let time = value.as_str().and_then(|text| text.parse::<Timestamp>().ok());
        time.map(|time| short_time(time, self.now)).unwrap_or_default()
    }

    fn coloured(&self, text: &str, colour: &str) -> String {
        if self.colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

fn items<'a>(answer: &'a Value, name: &str) -> &'a [Value] {
    answer[name].as_array().map(Vec::as_slice).unwrap_or_default()
}

fn one_line(value: &Value) -> String {
    match value {
        Value::String(text) => shown_in_line(text),
        value => value.to_string(),
    }
}
