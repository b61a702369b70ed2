//! `wieldy batch`: several calls together, from a file or standard input.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Deserialize;
use serde_json::Value;
use wieldy::name::hint_for_unknown_key;
use wieldy::{
    Batch, BatchCall, BatchId, BatchResult, Body, Call, CallError, Caller, Event, Executor, Options, Seen, ToolResult,
};

use super::arguments::Beside;
use super::request;
use crate::args::BatchArgs;
use crate::config::{Config, Environment};
use crate::exit::{Exit, Failure};
use crate::history::{History, Tasks};
use crate::interrupt::{CANCELLING, Interrupts};
use crate::output::{Printer, counted, hint_for, shown, shown_in_line};
use crate::{assemble, confirm, history, in_runtime, log, upstreams};

/// The maximal size of a batch as JSON, in bytes.
const BATCH_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// A correct call, with every key, for messages.
const CORRECT_LINE: &str =
    r#"{"id": "b", "tool": "Read", "arguments": {"path": "notes.txt"}, "after": ["a"], "idempotency_key": "k"}"#;

/// The interval for redrawing the progress bar with the elapsed time.
const TICK: Duration = Duration::from_millis(200);

/// A call of a batch as people write it.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    id: Option<String>,
    #[serde(alias = "name")]
    tool: String,
    #[serde(default, alias = "args")]
    arguments: Value,
    #[serde(default)]
    after: Vec<String>,
    idempotency_key: Option<String>,
}

pub(crate) fn run(
    args: &BatchArgs,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let entries = read(&args.file)?;
    let beside = Beside::of(&args.beside)?;
    // The history outlives the runtime, so that it gets the last records of running calls.
    let history = History::open(config, Tasks::Forgotten)?;
    let work = async {
        let progress = progress_bar(entries.len(), "{bar:30} {pos}/{len} {elapsed} {wide_msg}");
        let confirmer = confirm::confirmer(args.run.yes, printer, &progress);
        let many = assemble::Work::many_calls();
        let executor = assemble::executor(config, environment, confirmer, history.as_ref(), many)?;
        let tools: Vec<&str> = entries.iter().map(|entry| entry.tool.as_str()).collect();
        let servers = upstreams::open_for(&tools, config, environment, &executor).await?;
        let ended = batch(args, (entries, beside), config, &executor, &progress, printer).await;
        servers.close().await;
        ended
    };
    let ended = in_runtime(work);
    history::close(history, ended)
}

async fn batch(
    args: &BatchArgs,
    (entries, beside): (Vec<Entry>, Beside),
    config: &Config,
    executor: &Executor,
    progress: &ProgressBar,
    printer: &Printer,
) -> Result<Exit, Failure> {
    request::warn_of_no_isolation(config, printer);
    request::tell_of_session(&args.run, printer);

    let options = request::options(&args.run);
    let calls = entries.into_iter().map(|entry| {
        let options = Options { idempotency_key: entry.idempotency_key, ..options.clone() };
        BatchCall {
            call: Call { call_id: entry.id, ..beside.on(Call::new(entry.tool, entry.arguments).with(options)) },
            after: entry.after,
        }
    });
    let batch = Batch {
        calls: calls.collect(),
        caller: request::caller(&args.run),
        mode: args.mode,
        max_concurrency: args.max_concurrency.map(|count| count as usize),
        stop_on_error: args.stop_on_error,
    };

    let mut interrupts = Interrupts::listen()?;
    let work = async {
        let caller = Arc::clone(&batch.caller);
        let (id, result) = executor.spawn_batch(batch);
        let cancel = || _ = executor.cancel(id, &caller);
        let shown = follow(executor, id, &caller, progress);
        // The batch does not wait for the progress bar.
        let result = async {
            tokio::select! { result = result => result, never = shown => match never {} }
        };
        interrupts.watch(result, cancel, CANCELLING, printer).await
    };
    let result = log::with_events(&config.log, executor, work).await;
    progress.finish_and_clear();
    let result = result?;
    if let Some(note) = result.summary.note_on_concurrency(args.run.plan.as_deref()) {
        printer.tell(&note);
    }
    print(&result, printer)?;
    for ToolResult { notes, notes_waiting, .. } in &result.results {
        printer.notes(notes, *notes_waiting);
        executor.confirm_notes(notes);
    }
    // The error of a skipped call only repeats the error of the call that caused it.
    let was_skipped = |error: &&CallError| error.details.get("cause").is_some_and(|cause| cause == "skipped");
    let errors = || result.results.iter().filter_map(|result| result.error.as_deref());
    let first_failed = errors().find(|error| !was_skipped(error)).or_else(|| errors().next());
    Ok(first_failed.map_or(Exit::Success, Exit::of))
}

/// Returns a progress bar on standard error, hidden unless that is a terminal.
pub(crate) fn progress_bar(length: usize, template: &str) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template).expect("the template is a constant");
    ProgressBar::with_draw_target(Some(length as u64), ProgressDrawTarget::stderr()).with_style(style)
}

/// Shows the progress of the batch, the elapsed time and the running tools, for as long as it is polled.
async fn follow(executor: &Executor, id: BatchId, caller: &Caller, progress: &ProgressBar) -> Infallible {
    let mut events = executor.observe_batch(id, caller);
    let mut running: Vec<Arc<Event>> = Vec::new();
    progress.reset_elapsed();
    progress.enable_steady_tick(TICK);
    while let Some(seen) = events.next().await {
        let Seen::Event(event) = seen else { continue };
        let is_same = |other: &Arc<Event>| other.subject.execution == event.subject.execution;
        if event.body.closing().is_some() {
            running.retain(|other| !is_same(other));
            progress.inc(1);
        } else if matches!(event.body, Body::CallStarted { .. }) && !running.iter().any(is_same) {
            running.push(event);
        } else {
            continue;
        }
        let names = running.iter().filter_map(|event| event.subject.tool.as_deref()).map(shown_in_line);
        progress.set_message(names.collect::<Vec<_>>().join(", "));
    }
    std::future::pending().await
}

/// Prints a block per call, in the order of the calls, or with `--json` all results at once.
fn print(batch: &BatchResult, printer: &Printer) -> Result<(), Failure> {
    if printer.json {
        printer.json(batch)?;
    } else {
        for (place, result) in batch.results.iter().enumerate() {
            let id = result.call_id.as_deref().map_or_else(|| format!("#{}", place + 1), shown_in_line);
            printer.line(&format!("[{id}] {}: {}", shown_in_line(&result.tool), result.status))?;
            print_answer(result, printer)?;
        }
    }
    let summary = &batch.summary;
    printer.tell(&format!(
        "{} in {:.3} s: {} succeeded, {} failed, {} skipped",
        counted(summary.total, "call"),
        summary.duration_ms / 1000.0,
        summary.succeeded,
        summary.failed,
        summary.skipped
    ));
    Ok(())
}

fn print_answer(result: &ToolResult, printer: &Printer) -> Result<(), Failure> {
    let text = result.text();
    printer.tool_text(&text)?;
    // The next block starts on a new line, even if standard output is a pipe.
    if !text.is_empty() && !text.ends_with('\n') && !io::stdout().is_terminal() {
        printer.line("")?;
    }
    if let Some(error) = &result.error {
        printer.line(&format!("error[{}]: {}", error.code, shown(&error.message)))?;
        if let Some(hint) = hint_for(error, &result.tool) {
            printer.line(&format!("hint: {}", shown(&hint)))?;
        }
    }
    Ok(())
}

fn read(file: &str) -> Result<Vec<Entry>, Failure> {
    let mut text = String::new();
    let read = match file {
        "-" => io::stdin().lock().take(BATCH_BYTES_MAX + 1).read_to_string(&mut text),
        path => File::open(path).and_then(|file| file.take(BATCH_BYTES_MAX + 1).read_to_string(&mut text)),
    };
    let name = if file == "-" { "standard input" } else { file };
    let unread = |error| Failure::usage(error).hint("name a text file that you may read; `-` is standard input");
    read.with_context(|| format!("cannot read the batch from `{name}`")).map_err(unread)?;
    if text.len() as u64 > BATCH_BYTES_MAX {
        let told = anyhow!("the batch in `{name}` is larger than {BATCH_BYTES_MAX} bytes");
        return Err(Failure::usage(told).hint("make several batches of it, one after the other"));
    }
    parse(&text).map_err(|(line, message)| {
        let form = format!("a batch is a JSON array of such objects, or one per line: {CORRECT_LINE}");
        let hint = hint_for_unknown_key(&message).map_or_else(|| form.clone(), |near| format!("{near} {form}"));
        Failure::usage(anyhow!("{name}:{line}: {message}")).hint(hint)
    })
}

/// Parses the calls of a JSON array, or of one object per line. The error is the line of the first mistake and its
/// message.
fn parse(text: &str) -> Result<Vec<Entry>, (usize, String)> {
    let said = |error: &serde_json::Error| {
        let text = error.to_string();
        text.rsplit_once(" at line ").map_or(text.clone(), |(said, _)| said.to_owned())
    };
    if text.trim_start().starts_with('[') {
        return serde_json::from_str(text).map_err(|error| (error.line(), said(&error)));
    }
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(index, line)| serde_json::from_str(line).map_err(|error| (index + 1, said(&error)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_and_lines_are_the_same_batch() {
        let array = r#"[{"id":"a","tool":"Read","arguments":{"path":"x"}},
                        {"tool":"List","after":["a"]}]"#;
        let lines = "{\"id\":\"a\",\"tool\":\"Read\",\"arguments\":{\"path\":\"x\"}}\n\n{\"tool\":\"List\",\"after\":[\"a\"]}\n";
        assert_eq!(parse(array), parse(lines));
        assert_eq!(parse(array), parse(&array.replace("\"tool\"", "\"name\"").replace("\"arguments\"", "\"args\"")));
        assert_eq!(parse(array).unwrap().len(), 2);
        assert_eq!(parse(" \n"), Ok(Vec::new()));
    }

    #[test]
    fn a_mistake_is_told_with_its_line() {
        for (text, line, message) in [
            (
                "[{\"tool\":\"a\"},\n{\"tol\":\"b\"}]",
                2,
                "unknown field `tol`, expected one of `id`, `name`, `tool`, `args`, `arguments`, `after`, `idempotency_key`",
            ),
            ("{\"tool\":\"a\"}\n{\"id\":\"b\"}", 2, "missing field `tool`"),
            ("{\"tool\":\"a\"}\n\n{tool}", 3, "key must be a string"),
            ("{\"tool\":5}", 1, "invalid type: integer `5`, expected a string"),
            ("[{\"tool\":\"a\"}", 1, "EOF while parsing a list"),
            ("hello", 1, "expected value"),
        ] {
            assert_eq!(parse(text), Err((line, message.to_owned())), "{text}");
        }
        let deep = format!("{{\"tool\":\"a\",\"arguments\":{}", "[".repeat(10_000));
        assert_eq!(parse(&deep), Err((1, "recursion limit exceeded".to_owned())));
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_reading_a_batch_panic(text in "[\\[{]?(\\PC|[\\n{}\\[\\]:,\"]){0,60}") {
            if let Err((line, _)) = parse(&text) {
                proptest::prop_assert!(line <= text.lines().count().max(1) + 1);
            }
        }
    }
}
