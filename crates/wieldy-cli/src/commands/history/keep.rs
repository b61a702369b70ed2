//! Maintenance of the history: backups, copies to another place, and pruning of old records.

use std::path::Path;

use anyhow::anyhow;
use serde_json::json;
use wieldy::{Retention, Store, StoreError};

use super::filter;
use crate::config::{self, Config};
use crate::exit::{Exit, Failure};
use crate::history::{Tasks, WHERE_HISTORY_IS, existing, failed, journal_options};
use crate::output::Printer;

/// Formats a size for people.
pub(crate) fn human_size(bytes: u64) -> String {
    super::table::size(i64::try_from(bytes).unwrap_or(i64::MAX))
}

/// Opens the history, which must exist.
fn there(config: &Config) -> Result<Store, Failure> {
    let told = || anyhow!("nothing has been recorded yet, so there is no history");
    let nothing = || Failure::broken(told()).hint(WHERE_HISTORY_IS);
    existing(config)?.ok_or_else(nothing)
}

/// Converts the error of a copy, with a hint for another target.
fn refused(error: StoreError, hint: &str, config: &Config) -> Failure {
    match failed(error, config) {
        usage if usage.exit == Exit::WrongUsage => usage.hint(hint),
        broken => broken,
    }
}

/// Copies the history into a new file.
pub(super) fn backup(file: &Path, config: &Config, printer: &Printer) -> Result<Exit, Failure> {
    let hint = "name a file that does not exist yet: a backup is never replaced";
    there(config)?.backup(file).map_err(|error| refused(error, hint, config))?;
    if printer.json {
        printer.json(&json!({ "written": file }))?;
    } else {
        printer.tell(&format!("wrote `{}`", file.display()));
    }
    Ok(Exit::Success)
}

/// Copies the history to another address.
pub(super) fn copy(url: &str, config: &Config, printer: &Printer) -> Result<Exit, Failure> {
    let address = config::address(url).map_err(|message| Failure::usage(anyhow!(message)))?;
    let hint = "name another address without a history";
    if config.history.address.as_ref() == Some(&address) {
        return Err(Failure::usage(anyhow!("the history already has this address")).hint(hint));
    }
    let store = there(config)?;
    let target = Store::open(&address).map_err(|error| {
        let hint = error.suggestion();
        Failure::broken(error).hint(hint)
    })?;
    let copied = store.copy_to(&target).map_err(|error| refused(error, hint, config))?;
    if printer.json {
        printer.json(&copied)?;
    } else {
        printer.tell(&format!("copied {} records of {} calls to {address}", copied.records, copied.executions));
    }
    Ok(Exit::Success)
}

/// The limits for pruning, as typed.
pub(super) struct How<'a> {
    pub(super) older_than: Option<&'a str>,
    pub(super) larger_than: Option<&'a str>,
    pub(super) dry: bool,
}

/// Drops old records.
pub(super) fn prune(how: &How<'_>, config: &Config, printer: &Printer) -> Result<Exit, Failure> {
    let age = how.older_than.map(filter::age).transpose().map_err(|message| filter::wrong("--older-than", &message))?;
    let bytes =
        how.larger_than.map(filter::bytes).transpose().map_err(|message| filter::wrong("--larger-than", &message))?;
    let retention = match (age, bytes) {
        (None, None) => config.history.retention(),
        (age_max, bytes_max) => Retention { age_max, bytes_max, ..Retention::default() },
    };
    if retention == Retention::default() {
        let told = anyhow!("nothing is dropped: neither a flag nor the configuration sets a limit");
        return Err(Failure::usage(told).hint("`--older-than 90d` or `--larger-than 1GB`; see `history.keep-days` too"));
    }
    let store = there(config)?;
    let pruned = if how.dry {
        store.prunable(&retention)
    } else {
        store.prune(&retention, &journal_options(config, Tasks::Forgotten))
    };
    let pruned = pruned.map_err(|error| failed(error, config))?;
    if printer.json {
        printer.json(&pruned)?;
        return Ok(Exit::Success);
    }
    let (would, size) = (if how.dry { "would drop" } else { "dropped" }, human_size(pruned.bytes));
    let results = if pruned.results > 0 { format!(" and {} more results", pruned.results) } else { String::new() };
    printer.tell(&format!(
        "{would} {} records of {} calls{results}; the history takes {size}",
        pruned.records, pruned.executions
    ));
    if let Some(most) = retention.bytes_max.filter(|most| !how.dry && pruned.bytes > *most) {
        let most = human_size(most);
        printer.tell(&format!("that is more than {most}: the rest belongs to open calls or to the tables themselves"));
    }
    Ok(Exit::Success)
}
