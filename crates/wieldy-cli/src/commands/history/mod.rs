//! `wieldy history`: lists past calls, shows the events of one, and prints statistics.

mod filter;
mod keep;
pub(super) mod table;

use anyhow::anyhow;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::json;
use wieldy::{Execution, Page, Query, RecordedEvent, Store};

use crate::args::{FilterArgs, HistoryArgs, HistoryCommand};
use crate::config::Config;
use crate::exit::{Exit, Failure};
use crate::history::{existing, failed};
use crate::output::{Printer, counted, shown_in_line};

pub(crate) use keep::human_size;

/// The minimal length of an id on the command line.
const ID_LENGTH_MIN: usize = 8;
/// The maximal number of calls to name if several ids match.
const CANDIDATES_MAX: usize = 5;

pub(crate) fn run(args: &HistoryArgs, config: &Config, printer: &Printer) -> Result<Exit, Failure> {
    match &args.command {
        None => list(args, config, printer),
        Some(HistoryCommand::Show { id }) => show(id, config, printer),
        Some(HistoryCommand::Stats { filter, by }) => stats(filter, by, config, printer),
        Some(HistoryCommand::Backup { file }) => keep::backup(file, config, printer),
        Some(HistoryCommand::Copy { url }) => keep::copy(url, config, printer),
        Some(HistoryCommand::Prune { older_than, larger_than, dry_run }) => {
            let how =
                keep::How { older_than: older_than.as_deref(), larger_than: larger_than.as_deref(), dry: *dry_run };
            keep::prune(&how, config, printer)
        }
    }
}

/// Lists calls, latest first.
fn list(args: &HistoryArgs, config: &Config, printer: &Printer) -> Result<Exit, Failure> {
    let cursor = args.cursor.as_deref().map(str::parse).transpose();
    let cursor = cursor.map_err(|message: String| filter::wrong("--cursor", &message))?;
    let query = Query { cursor, ..filter::query(&args.filter)? };
    let page = match existing(config)? {
        Some(store) => store.search(&query, args.limit as usize).map_err(|error| failed(error, config))?,
        None => Page { executions: Vec::new(), next: None, results: None },
    };
    if printer.json {
        printer.json(&page)?;
        return Ok(Exit::Success);
    }
    if let Some(index) = page.results.filter(|index| index.waiting > 0) {
        printer.tell(&format!(
            "note: the answers of the latest {} are not searched yet; search again in a moment",
            counted(index.waiting as usize, "record")
        ));
    }
    if page.executions.is_empty() {
        printer.tell(told_of_none(&query));
        return Ok(Exit::Success);
    }
    let now = Timestamp::now().to_zoned(TimeZone::system());
    let text = table::calls(&page.executions, &now, printer.width(), printer.stdout_has_colours());
    printer.data(text.as_bytes())?;
    if let Some(next) = page.next {
        printer.tell(&format!("more: --cursor {next}"));
    }
    Ok(Exit::Success)
}

/// Returns the message for an empty result.
fn told_of_none(query: &Query) -> &'static str {
    if *query == Query::default() { "nothing has been recorded yet" } else { "no call fits" }
}

/// Prints all details of one call.
fn show(id: &str, config: &Config, printer: &Printer) -> Result<Exit, Failure> {
    let store = existing(config)?;
    let found = store.map(|store| find(&store, id, config)).transpose()?.flatten();
    let Some((call, events)) = found else {
        let told = anyhow!("no call has the id `{}`", shown_in_line(id));
        let hint = "`wieldy history` lists the latest calls with their ids";
        return Err(Failure { exit: Exit::InvalidCall, ..Failure::usage(told).hint(hint) });
    };
    if printer.json {
        printer.json(&json!({ "execution": call, "events": events }))?;
    } else {
        let text = table::call(&call, &events, &TimeZone::system(), printer.stdout_has_colours());
        printer.data(text.as_bytes())?;
    }
    Ok(Exit::Success)
}

/// Finds the only call whose id is, or starts with, `id`.
fn find(store: &Store, id: &str, config: &Config) -> Result<Option<(Execution, Vec<RecordedEvent>)>, Failure> {
    let invalid = |told: anyhow::Error| Failure { exit: Exit::InvalidCall, ..Failure::usage(told) };
    if id.len() < ID_LENGTH_MIN {
        let told = anyhow!("`{}` is too short for an id", shown_in_line(id));
        return Err(invalid(told).hint(format!("give at least {ID_LENGTH_MIN} characters of it")));
    }
    let found = store.find(id, CANDIDATES_MAX + 1).map_err(|error| failed(error, config))?;
    match found.as_slice() {
        [] => Ok(None),
        [one] => store.show(*one).map_err(|error| failed(error, config)),
        many => {
            let mut names: Vec<String> = many.iter().take(CANDIDATES_MAX).map(|id| format!("`{id}`")).collect();
            if many.len() > CANDIDATES_MAX {
                names.push("others".into());
            }
            let told = anyhow!("the ids of several calls begin with `{}`", shown_in_line(id));
            Err(invalid(told).hint(format!("it may be {}", names.join(", "))))
        }
    }
}

/// Prints statistics of calls.
fn stats(args: &FilterArgs, by: &str, config: &Config, printer: &Printer) -> Result<Exit, Failure> {
    let (query, by) = (filter::query(args)?, filter::grouping(by)?);
    let stats = match existing(config)? {
        Some(store) => store.stats(&query, by).map_err(|error| failed(error, config))?,
        None => Vec::new(),
    };
    if printer.json {
        printer.json(&json!({ "stats": stats }))?;
    } else if stats.is_empty() {
        printer.tell(told_of_none(&query));
    } else {
        printer.data(table::stats(&stats, printer.width(), printer.stdout_has_colours()).as_bytes())?;
    }
    Ok(Exit::Success)
}
