//! `wieldy trust`: shows what the configuration that came with a folder would do, and records that a person trusts it.

use std::path::Path;

use anyhow::{Context, anyhow};
use serde::Serialize;
use serde_json::json;
use wieldy::Variable;

use crate::args::TrustArgs;
use crate::config::{self, Config, Environment, FILE_NAME, MANIFEST_BYTES_MAX, Records, Shown, Trust, read_regular};
use crate::exit::{Exit, Failure};
use crate::output::{Printer, counted, shown_in_line};
use crate::{assemble, confirm, history, upstreams};

pub(crate) fn run(args: &TrustArgs, environment: &Environment, printer: &Printer) -> Result<Exit, Failure> {
    let records = Records::of(environment);
    if args.list {
        return list(&records, printer);
    }
    if args.revoke {
        return revoke(&args.dir, &records, printer);
    }
    // All files are looked up as a command started in that folder would do it.
    let moved = std::env::set_current_dir(&args.dir);
    moved.with_context(|| format!("cannot go to `{}`", args.dir.display())).map_err(Failure::usage)?;
    let config = Config::of_folder(environment)?;
    let files = survey(&config, &records);
    for path in &config.folder.untrusted {
        printer.tell(&format!(
            "warning: `{}` is ignored, because it cannot be read or the files are too large",
            shown_in_line(&path.to_string_lossy())
        ));
    }
    let is_trusted = files.iter().all(|file| file.trust == Trust::Trusted);
    if !printer.json {
        show(&files, environment, printer)?;
    }
    if !is_trusted && !args.yes && !is_agreed(printer)? {
        return Ok(Exit::Denied);
    }
    if !is_trusted {
        for file in files.iter().filter(|file| file.trust != Trust::Trusted) {
            // Trust the bytes that were shown, even if the file has changed meanwhile.
            let bytes = &config.folder.read[Path::new(&file.name)];
            records
                .add(Path::new(&file.name), bytes)
                .map_err(|error| Failure::broken(error).hint("`--config FILE` needs no trust"))?;
        }
        printer.tell(&format!("trusted: {}, in the present form", counted(files.len(), "file")));
    }
    if printer.json {
        printer.json(&json!({ "trusted": files }))?;
    }
    Ok(Exit::Success)
}

/// A file that came with the folder, and its effects.
#[derive(Debug, Serialize)]
struct Surveyed {
    #[serde(skip)]
    name: String,
    path: String,
    /// The trust before this command.
    #[serde(rename = "was")]
    trust: Trust,
    does: Vec<String>,
}

/// Returns all files that came with the folder, with their effects in words.
fn survey(config: &Config, records: &Records) -> Vec<Surveyed> {
    let read = config.folder.read.iter();
    read.map(|(name, bytes)| {
        let does = if name == Path::new(FILE_NAME) {
            of_configuration(config)
        } else if config.mcp.files.contains(name) {
            of_servers(name, config)
        } else {
            of_manifest(name, config)
        };
        let path = std::path::absolute(name).unwrap_or_else(|_| name.clone());
        let name = name.to_string_lossy().into_owned();
        let trust = records.trust(Path::new(&name), bytes);
        Surveyed { path: path.to_string_lossy().into(), name, trust, does }
    })
    .collect()
}

fn of_configuration(config: &Config) -> Vec<String> {
    // Variables of a server are shown, because they can change which program runs. Only likely secrets are redacted.
    let value = |shown: &Shown| {
        let (is_variable, name) = (shown.key.contains(".env."), shown.key.rsplit('.').next().unwrap_or_default());
        match shown.value.as_str().filter(|_| is_variable) {
            Some(text) if !history::is_secret(name, text) => {
                wieldy::redact::text(&shown.value.to_string()).into_owned()
            }
            _ => config::without_secret(&shown.key, &shown.value).to_string(),
        }
    };
    let keys = config.folder.keys.iter().map(|shown| format!("sets {} = {}", shown.key, value(shown)));
    let servers = config.mcp.servers.iter().filter_map(|server| {
        let words = std::iter::once(server.command.as_ref()?).chain(&server.args);
        let level = server.isolation.unwrap_or(config.isolation);
        let rights = if level == wieldy::Level::None { ", with all your rights" } else { "" };
        Some(format!("runs {} as the MCP server `{}`, isolation {level}{rights}", command_line(words), server.name))
    });
    keys.chain(servers).collect()
}

fn of_servers(path: &Path, config: &Config) -> Vec<String> {
    match upstreams::read(path, config) {
        Err(failure) => vec![format!("cannot be used: {}", failure.error().message)],
        Ok(servers) => servers
            .iter()
            .map(|server| match &server.command {
                Some(command) => {
                    let words = std::iter::once(command).chain(&server.args);
                    let level = config.isolation;
                    let rights = if level == wieldy::Level::None { ", with all your rights" } else { "" };
                    let folder = server.cwd.as_ref().map(|folder| format!(" in {folder}")).unwrap_or_default();
                    let given = given(server.env.iter().map(|(name, text)| variable(name, text)));
                    let (line, name) = (command_line(words), &server.name);
                    format!("runs {line}{folder} as the MCP server `{name}`, isolation {level}{rights}{given}")
                }
                None => {
                    let url = server.url.as_deref().unwrap_or_default();
                    format!("takes tools from {} as the MCP server `{}`", wieldy::redact::text(url), server.name)
                }
            })
            .collect(),
    }
}

fn of_manifest(path: &Path, config: &Config) -> Vec<String> {
    let manifest = match assemble::read_manifest(path, config) {
        Err(failure) => return vec![format!("cannot be used: {}", failure.error().message)],
        Ok((_, problems)) if !problems.is_empty() => return vec![format!("cannot be used: {}", problems[0])],
        Ok((manifest, _)) => manifest,
    };
    let tool = |tool: &wieldy::ManifestTool| match &tool.command {
        Some(command) => {
            let words = std::iter::once(&command.program).chain(&command.arguments);
            let given = given(command.environment.iter().map(|(name, value)| match value {
                Variable::InFile(in_file) => format!("{name} from the file {}", in_file.file.display()),
                Variable::Text(text) => variable(name, text),
            }));
            format!("adds the tool `{}`, which runs {}{given}", tool.spec.name, command_line(words))
        }
        None => format!("defines the tool `{}`", tool.spec.name),
    };
    manifest.tools.iter().map(tool).collect()
}

/// Formats a variable of a program, with a likely secret redacted.
fn variable(name: &str, text: &str) -> String {
    match history::is_secret(name, text) && !text.contains("${") {
        true => format!("{name}=***"),
        false => format!("{name}={}", wieldy::redact::text(text)),
    }
}

/// Formats the list of variables after the command that gets them.
fn given(variables: impl Iterator<Item = String>) -> String {
    let variables: Vec<String> = variables.collect();
    if variables.is_empty() { String::new() } else { format!(" with {}", variables.join(", ")) }
}

/// Formats a command so that the end of each word is visible.
fn command_line<'a>(words: impl Iterator<Item = &'a String>) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,{}".contains(c);
    let word = |word: &String| match !word.is_empty() && word.chars().all(is_plain) {
        true => word.clone(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    };
    format!("`{}`", words.map(word).collect::<Vec<_>>().join(" "))
}

fn show(files: &[Surveyed], environment: &Environment, printer: &Printer) -> Result<(), Failure> {
    if files.is_empty() {
        printer.tell("there is nothing to trust: this folder has neither a wieldy.toml nor .wieldy/tools");
    }
    for file in files {
        let state = match file.trust {
            Trust::New => "not trusted yet",
            Trust::Changed => "changed since it was trusted",
            Trust::Trusted => "trusted",
        };
        printer.line(&format!("{}: {state}", shown_in_line(&file.path)))?;
        for line in &file.does {
            printer.line(&format!("  {}", shown_in_line(line)))?;
        }
        if file.name == FILE_NAME {
            let own = environment.config_folder().map(|folder| folder.join(FILE_NAME)).filter(|own| own.exists());
            if let Some(own) = own {
                printer.line(&format!("  replaces {}", shown_in_line(&own.to_string_lossy())))?;
            }
        }
    }
    Ok(())
}

/// Asks the person, or refuses if no terminal is attached.
fn is_agreed(printer: &Printer) -> Result<bool, Failure> {
    if !printer.can_ask() {
        let told = anyhow!("a person must agree to this, and there is no terminal to ask");
        return Err(Failure { exit: Exit::Denied, ..Failure::usage(told).hint("`--yes` agrees beforehand") });
    }
    confirm::ask("trust this? [y/N] ").map_err(|error| Failure::broken(anyhow!(error)))
}

fn list(records: &Records, printer: &Printer) -> Result<Exit, Failure> {
    let stands = |path: &str| match read_regular(Path::new(path), MANIFEST_BYTES_MAX) {
        Err(_) => "gone",
        Ok(bytes) if records.trust(Path::new(path), &bytes) == Trust::Trusted => "trusted",
        Ok(_) => "changed",
    };
    let all: Vec<_> = records.all().into_iter().map(|record| (stands(&record.path), record)).collect();
    if printer.json {
        let told = all.iter().map(
            |(state, record)| json!({ "path": record.path, "state": state, "blake3": record.blake3, "at": record.at }),
        );
        printer.json(&told.collect::<Vec<_>>())?;
        return Ok(Exit::Success);
    }
    for (state, record) in &all {
        printer.line(&format!("{state:7}  {}", shown_in_line(&record.path)))?;
    }
    if all.is_empty() {
        printer.tell("nothing is trusted");
    }
    Ok(Exit::Success)
}

fn revoke(folder: &Path, records: &Records, printer: &Printer) -> Result<Exit, Failure> {
    let revoked = records.revoke(folder).map_err(Failure::broken)?;
    if printer.json {
        printer.json(&json!({ "revoked": revoked }))?;
    }
    printer.tell(&format!("forgot the trust in {}", counted(revoked.len(), "file")));
    Ok(Exit::Success)
}

/// Records the trust in a file that this command has just written. Prints a warning if that fails.
pub(super) fn remember(path: &Path, bytes: &[u8], environment: &Environment, printer: &Printer) {
    if let Err(error) = Records::of(environment).add(path, bytes) {
        printer.tell(&format!("warning: {}", shown_in_line(&format!("the file is not trusted: {error:#}"))));
    }
}
