//! `wieldy audit`: verifies that the recorded history was not changed, and prints its signed end and public key.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use serde_json::json;
use wieldy::{SignedHead, Signer, Store, ThreadVerdict, Verdict};

use super::batch::progress_bar;
use crate::args::AuditCommand;
use crate::config::Config;
use crate::exit::{Exit, Failure};
use crate::history::{WHERE_HISTORY_IS, existing, failed, key, threads};
use crate::output::{Printer, counted, shown};

pub(crate) fn run(command: &AuditCommand, config: &Config, printer: &Printer) -> Result<Exit, Failure> {
    match command {
        AuditCommand::Verify { anchor, key } => verify(anchor, key.as_deref(), config, printer),
        AuditCommand::Head { output } => head(output.as_deref(), config, printer),
        AuditCommand::Key => {
            let signer = signer(config)?;
            if printer.json {
                printer.json(&json!({ "key": signer.key() }))?;
            } else {
                printer.line(signer.key())?;
            }
            Ok(Exit::Success)
        }
    }
}

/// Opens the history, which must exist: a missing one cannot be verified.
fn there(config: &Config) -> Result<Store, Failure> {
    let nothing = || Failure::broken(anyhow!("there is no history, so nothing can be verified")).hint(WHERE_HISTORY_IS);
    existing(config)?.ok_or_else(nothing)
}

fn signer(config: &Config) -> Result<Signer, Failure> {
    let Some(path) = key(config) else {
        return Err(Failure::usage(anyhow!("there is no state folder, so there is no key"))
            .hint("`--state DIR` names a folder"));
    };
    Signer::open(&path).map_err(|error| failed(error, config))
}

fn verify(anchors: &[PathBuf], key: Option<&str>, config: &Config, printer: &Printer) -> Result<Exit, Failure> {
    let anchors = anchors.iter().map(|path| anchor(path)).collect::<Result<Vec<_>, _>>()?;
    if let Some(key) = key
        && (key.len() != 64 || !key.bytes().all(|byte| byte.is_ascii_hexdigit()))
    {
        let told = anyhow!("`--key`: a public key has 64 hexadecimal digits");
        return Err(Failure::usage(told).hint("`wieldy audit key` prints it"));
    }
    let key = key.map(str::to_ascii_lowercase);
    let store = there(config)?;
    let (records, _) = store.extent().map_err(|error| failed(error, config))?;
    let bar = progress_bar(usize::try_from(records).unwrap_or(usize::MAX), "{bar:40} {pos}/{len} records");
    let verdict = store.verify(&anchors, key.as_deref(), &mut |checked| bar.set_position(checked));
    bar.finish_and_clear();
    let verdict = verdict.map_err(|error| failed(error, config))?;
    let threads = threads_verdict(key.as_deref(), config)?;
    if printer.json {
        let mut told = json!(verdict);
        threads.iter().for_each(|threads| told["threads"] = json!(threads));
        printer.json(&told)?;
    }
    let early = anchors.len().saturating_sub(usize::try_from(verdict.anchors).unwrap_or(usize::MAX));
    if verdict.problem.is_none() && early > 0 {
        let told = format!("cannot check {} from before the oldest record that is kept", counted(early, "anchor"));
        printer.tell(&format!("warning: {told}; `wieldy audit head` makes a new one"));
    }
    let mut exit = Exit::Success;
    match &verdict.problem {
        None if printer.json => {}
        None => printer.line(&whole(&verdict))?,
        Some(problem) => {
            let told = anyhow!("the trail is broken at record {}: {}", problem.seq, shown(&problem.what));
            let hint = "the records before it are unchanged; compare with a backup";
            printer.tell_failure(&Failure::broken(told).hint(hint));
            exit = Exit::ToolFailed;
        }
    }
    match threads.as_ref().map(|threads| (threads, &threads.problem)) {
        Some((_, Some(problem))) => {
            let told = anyhow!("the threads are broken: {}", shown(&problem.to_string()));
            printer.tell_failure(&Failure::broken(told).hint("compare with a backup"));
            exit = Exit::ToolFailed;
        }
        Some((threads, None)) if !printer.json => printer.line(&whole_threads(threads))?,
        _ => {}
    }
    Ok(exit)
}

/// Verifies the threads beside the history, if there are any.
fn threads_verdict(key: Option<&str>, config: &Config) -> Result<Option<ThreadVerdict>, Failure> {
    let Some(threads) = threads(config) else { return Ok(None) };
    let bar = progress_bar(0, "{pos} entries of threads");
    let verdict = threads.verify(key, &mut |checked| bar.set_position(checked));
    bar.finish_and_clear();
    verdict.map_err(|error| failed(error, config))
}

/// Reads a signed end of the trail from a file.
fn anchor(path: &Path) -> Result<SignedHead, Failure> {
    let read = || -> anyhow::Result<SignedHead> {
        let text = std::fs::read_to_string(path)?;
        serde_json::from_str(&text).context("it is not what `wieldy audit head` prints")
    };
    let hint = "name a file that `wieldy audit head --output FILE` wrote";
    let told = read().with_context(|| format!("cannot read the anchor `{}`", path.display()));
    told.map_err(|error| Failure::usage(error).hint(hint))
}

/// Formats the result of a successful verification.
fn whole(verdict: &Verdict) -> String {
    let count = |count: u64, thing: &str| counted(usize::try_from(count).unwrap_or(usize::MAX), thing);
    let mut text = format!(
        "the trail is whole: {}, {}, {}",
        count(verdict.records, "record"),
        count(verdict.executions, "call"),
        count(verdict.heads, "signature")
    );
    for (number, what) in [(verdict.anchors, "anchor"), (verdict.open, "open call")] {
        if number > 0 {
            text.push_str(&format!(", {}", count(number, what)));
        }
    }
    if verdict.dropped > 0 {
        text.push_str(&format!("; {} before them dropped by retention", count(verdict.dropped, "record")));
    }
    text
}

/// Formats the result of a successful verification of threads.
fn whole_threads(verdict: &ThreadVerdict) -> String {
    let ThreadVerdict { threads, entries, signed, .. } = verdict;
    let count = |count: &u64| usize::try_from(*count).unwrap_or(usize::MAX);
    let entries = match entries {
        1 => "1 entry".to_owned(),
        entries => format!("{entries} entries"),
    };
    format!(
        "the threads are whole: {}, {entries}, {}",
        counted(count(threads), "thread"),
        counted(count(signed), "signature")
    )
}

fn head(output: Option<&Path>, config: &Config, printer: &Printer) -> Result<Exit, Failure> {
    let store = there(config)?;
    let head = store.sign_head(&signer(config)?).map_err(|error| failed(error, config))?;
    let Some(path) = output else {
        printer.json(&head)?;
        return Ok(Exit::Success);
    };
    let text = serde_json::to_string(&head).expect("a head is plain data") + "\n";
    let written = OpenOptions::new().write(true).create_new(true).open(path);
    match written.and_then(|mut file| file.write_all(text.as_bytes())) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let told = anyhow!("`{}` already exists", path.display());
            Err(Failure::usage(told).hint("name a file that does not exist yet: an anchor is never replaced"))
        }
        Err(error) => {
            Err(Failure::broken(anyhow::Error::new(error).context(format!("cannot write `{}`", path.display()))))
        }
        Ok(()) if printer.json => printer.json(&json!({ "written": path })).map(|()| Exit::Success),
        Ok(()) => {
            printer.tell(&format!(
                "wrote `{}`; store it where no program that writes the history can change it",
                path.display()
            ));
            Ok(Exit::Success)
        }
    }
}
