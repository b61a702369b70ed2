//! `wieldy code`: calls the code tools and prints their answers for people. Each place is written as `PATH:LINE`, which
//! terminals and editors open.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::sync::Arc;

use indicatif::ProgressBar;
use serde_json::{Map, Value, json};
use wieldy::{Body, Call, Executor, Observer, Seen, ToolResult, visible};

use super::batch::progress_bar;
use super::request;
use crate::args::{CodeArgs, CodeCommand, FindArgs, MapArgs, RefsArgs, SearchArgs};
use crate::config::{Config, Environment};
use crate::exit::{Exit, Failure};
use crate::history::{History, Tasks};
use crate::interrupt::{CANCELLING, Interrupts};
use crate::output::{Printer, counted, shown, shown_in_line};
use crate::{assemble, confirm, history, in_runtime, log, upstreams};

const PATH: &str = "35";
const NUMBER: &str = "32";
const NAME: &str = "1";
const FAINT: &str = "2";

pub(crate) fn run(
    args: &CodeArgs,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let (tool, arguments) = call_of(&args.command);
    let history = History::open(config, Tasks::Forgotten)?;
    let work = async {
        let progress = progress_bar(100, "{bar:30} {pos}% {msg}");
        let confirmer = confirm::confirmer(args.run().yes, printer, &progress);
        let work = assemble::Work::default();
        let executor = assemble::executor(config, environment, confirmer, history.as_ref(), work)?;
        let servers = upstreams::open_for(&[tool], config, environment, &executor).await?;
        let ended = call(args, Call::new(tool, arguments), config, &executor, &progress, printer).await;
        servers.close().await;
        ended
    };
    let ended = in_runtime(work);
    history::close(history, ended)
}

async fn call(
    args: &CodeArgs,
    call: Call,
    config: &Config,
    executor: &Executor,
    progress: &ProgressBar,
    printer: &Printer,
) -> Result<Exit, Failure> {
    request::tell_of_session(args.run(), printer);
    let caller = request::caller(args.run());
    let call = call.by(Arc::clone(&caller)).with(request::options(args.run()));
    let mut interrupts = Interrupts::listen()?;
    let work = async {
        let id = executor.spawn(call);
        let cancel = || _ = executor.cancel(id, &caller);
        let result = async {
            tokio::select! {
                result = executor.wait(id, &caller) => result,
                never = follow(executor.observe(id, &caller), progress) => match never {},
            }
        };
        interrupts.watch(result, cancel, CANCELLING, printer).await
    };
    let result = log::with_events(&config.log, executor, work).await.expect("a call that was just begun is known");
    progress.finish_and_clear();
    if printer.json {
        printer.json(&result)?;
    } else {
        print(&args.command, &result, printer)?;
    }
    printer.call_error(&result);
    Ok(result.error.as_deref().map_or(Exit::Success, Exit::of))
}

/// Shows how far the index is, once the tool says so, for as long as it is polled.
async fn follow(mut events: Observer, progress: &ProgressBar) -> Infallible {
    while let Some(seen) = events.next().await {
        let Seen::Event(event) = seen else { continue };
        if let Body::CallProgress { percent: Some(percent), message, .. } = &event.body {
            progress.set_message(shown_in_line(message.as_deref().unwrap_or_default()));
            progress.set_position(percent.round() as u64);
        }
    }
    std::future::pending().await
}

/// Returns the tool and its arguments.
fn call_of(command: &CodeCommand) -> (&'static str, Value) {
    match command {
        CodeCommand::Search(SearchArgs { query, path, language, mode, tests, context, limit, cursor, .. }) => {
            let query = query.join(" ");
            let all = json!({
                "query": query, "scope": path, "language": language, "mode": mode, "tests": tests, "context": context,
                "limit": limit, "cursor": cursor,
            });
            ("search_code", given(all))
        }
        CodeCommand::Find(FindArgs { symbol, path, kind, limit, .. }) => {
            ("find_definition", given(json!({ "symbol": symbol, "scope": path, "kind": kind, "limit": limit })))
        }
        CodeCommand::Refs(RefsArgs { symbol, path, kind, confidence, limit, .. }) => {
            let kinds = Some(kind).filter(|kinds| !kinds.is_empty());
            let all = json!({
                "symbol": symbol, "scope": path, "kinds": kinds, "confidence": confidence, "limit": limit,
            });
            ("find_references", given(all))
        }
        CodeCommand::Map(MapArgs { path, max_tokens, focus, tests, .. }) => {
            let (focus, tests) = (Some(focus).filter(|focus| !focus.is_empty()), tests.then_some(true));
            let all = json!({ "scope": path, "max_tokens": max_tokens, "focus": focus, "tests": tests });
            ("get_repo_map", given(all))
        }
    }
}

/// Returns the arguments that were given: the tool has defaults for the others.
fn given(all: Value) -> Value {
    let Value::Object(all) = all else { return all };
    Value::Object(all.into_iter().filter(|(_, value)| !value.is_null()).collect::<Map<_, _>>())
}

/// Prints an answer for people. A tool's text is printed where its answer is not of the known form.
fn print(command: &CodeCommand, result: &ToolResult, printer: &Printer) -> Result<(), Failure> {
    let colours = Colours(printer.stdout_has_colours());
    let answer = result.structured.as_ref().unwrap_or(&Value::Null);
    let text = match command {
        CodeCommand::Search(_) => list(answer, "results").map(|hits| hits.iter().map(|hit| colours.hit(hit)).collect()),
        CodeCommand::Find(_) => colours.definitions(answer),
        CodeCommand::Refs(_) => {
            list(answer, "references").map(|found| found.iter().map(|one| colours.reference(one)).collect())
        }
        CodeCommand::Map(_) => None,
    };
    match text {
        Some(text) if text.is_empty() => printer.tell(&shown(&result.text())),
        Some(text) => printer.data(text.as_bytes())?,
        None => printer.tool_text(&result.text())?,
    }
    summary(command, answer, printer);
    Ok(())
}

/// Tells people how much there is beyond what is printed, and if the index is not complete.
fn summary(command: &CodeCommand, answer: &Value, printer: &Printer) {
    let shown = ["results", "references"].iter().find_map(|key| list(answer, key)).map_or(0, Vec::len);
    let total = answer["total"].as_u64().unwrap_or_default();
    if let (CodeCommand::Search(_) | CodeCommand::Refs(_), true) = (command, shown > 0 && total > shown as u64) {
        let more = match answer["cursor"].as_str() {
            Some(cursor) => format!("`--cursor {}` shows the next, `--limit` more at once", shown_in_line(cursor)),
            None => "`--limit` shows more".to_owned(),
        };
        printer.tell(&format!("{shown} of {}; {more}", counted(total as usize, "find")));
    }
    if answer["index"]["complete"] == false {
        let (indexed, files) = (&answer["index"]["indexed"], &answer["index"]["files"]);
        printer.tell(&format!("not complete: {indexed} of {files} files are indexed; repeat the command to go on"));
    }
}

/// The colours of an answer, if there are any.
struct Colours(bool);

impl Colours {
    fn paint(&self, text: &str, colour: &str) -> String {
        let text = shown_in_line(text);
        if self.0 { format!("\x1b[{colour}m{text}\x1b[0m") } else { text }
    }

    /// Writes a line of a file, whose tabs stay.
    fn line(&self, line: &str, is_match: bool) -> String {
        let line = visible(line.trim_end_matches('\n'));
        if self.0 && is_match { format!("\x1b[{NAME}m{line}\x1b[0m") } else { line.into_owned() }
    }

    /// Writes `PATH:LINE`.
    fn place(&self, thing: &Value) -> String {
        let (path, line) = (self.paint(text(thing, "path"), PATH), thing["line"].as_u64().unwrap_or_default());
        format!("{path}:{}", self.paint(&line.to_string(), NUMBER))
    }

    /// Writes a find of `search_code`: its place and definition, then its lines.
    fn hit(&self, hit: &Value) -> String {
        let symbol = hit["symbol"].as_str().map(|symbol| format!("  {}", self.paint(symbol, NAME)));
        let kind = hit["kind"].as_str().map(|kind| format!(" {}", self.paint(kind, FAINT)));
        let mut out = format!("{}{}{}\n", self.place(hit), symbol.unwrap_or_default(), kind.unwrap_or_default());
        let first = hit["text_line"].as_u64().unwrap_or_default();
        let line = hit["line"].as_u64().filter(|line| hit["end_line"].as_u64() == Some(*line));
        for (number, text) in (first..).zip(text(hit, "text").split('\n')) {
            let is_match = Some(number) == line;
            let text = self.line(text, is_match);
            let mark = if is_match { ':' } else { '-' };
            writeln!(out, "{}{mark}{text}", self.paint(&format!("{number:>5}"), NUMBER)).expect("a text takes it");
        }
        out.push('\n');
        out
    }

    /// Writes the answer of `find_definition`: the best definition with its source, then the others.
    fn definitions(&self, answer: &Value) -> Option<String> {
        answer["path"].as_str()?;
        let mut out = self.definition(answer);
        for line in text(answer, "source").lines() {
            writeln!(out, "    {}", self.line(line, false)).expect("a text takes it");
        }
        let others = list(answer, "definitions").into_iter().flatten();
        let best = (&answer["path"], &answer["line"]);
        for other in others.filter(|other| (&other["path"], &other["line"]) != best) {
            out.push_str(&self.definition(other));
        }
        Some(out)
    }

    fn definition(&self, definition: &Value) -> String {
        let signature = match text(definition, "signature") {
            "" => text(definition, "name"),
            signature => signature,
        };
        let kind = self.paint(text(definition, "kind"), FAINT);
        format!("{}  {} {kind}\n", self.place(definition), self.paint(signature, NAME))
    }

    /// Writes a reference in one line, with its column.
    fn reference(&self, reference: &Value) -> String {
        let column = reference["column"].as_u64().map(|column| format!(":{column}")).unwrap_or_default();
        let about: Vec<&str> = ["kind", "confidence"].map(|key| text(reference, key)).into_iter().collect();
        let line = self.line(text(reference, "text").trim(), false);
        format!("{}{column}: {line}  {}\n", self.place(reference), self.paint(&about.join(", "), FAINT))
    }
}

fn text<'a>(thing: &'a Value, key: &str) -> &'a str {
    thing[key].as_str().unwrap_or_default()
}

fn list<'a>(answer: &'a Value, key: &str) -> Option<&'a Vec<Value>> {
    answer[key].as_array()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_written_with_places_that_terminals_open() {
        let plain = Colours(false);
        let hit = json!({
            "path": "a\u{1b}.rs", "line": 2, "end_line": 2, "text": "one\ntwo\nthree", "text_line": 1, "symbol": "f",
            "kind": "function",
        });
        assert_eq!(plain.hit(&hit), "a\\u{1b}.rs:2  f function\n    1-one\n    2:two\n    3-three\n\n");
        let definition = json!({
            "path": "a.rs", "line": 1, "kind": "function", "signature": "fn f()", "source": "fn f() {\n}",
            "definitions": [{"path": "b.rs", "line": 3, "kind": "method", "signature": "fn f(&self)"}],
        });
        let expected = "a.rs:1  fn f() function\n    fn f() {\n    }\nb.rs:3  fn f(&self) method\n";
        assert_eq!(plain.definitions(&definition).as_deref(), Some(expected));
        let reference = json!({
            "path": "a.rs", "line": 7, "column": 5, "text": "  f();", "kind": "call", "confidence": "exact",
        });
        assert_eq!(plain.reference(&reference), "a.rs:7:5: f();  call, exact\n");
        assert_eq!(Colours(true).place(&reference), "\u{1b}[35ma.rs\u{1b}[0m:\u{1b}[32m7\u{1b}[0m");
        assert_eq!(plain.definitions(&json!({"total": 0})), None);
    }
}
