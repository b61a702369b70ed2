//! `wieldy init`: writes a commented configuration to start from.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::anyhow;

use super::trust;
use crate::args::InitArgs;
use crate::config::{Environment, FILE_NAME, TEMPLATE};
use crate::exit::{Exit, Failure};
use crate::output::Printer;

/// Writes the template to the file that `--config` names, or to the current folder.
pub(crate) fn run(
    args: &InitArgs,
    into: Option<&Path>,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let path = into.unwrap_or(Path::new(FILE_NAME));
    let shown = path.display();
    // Remove placeholders that a killed executor left here.
    wieldy::sweep_placeholders(Path::new("."), &[]);
    let mut how = OpenOptions::new();
    // `create_new` is atomic, so a file that appears meanwhile is not overwritten either. A sandbox's placeholder may
    // be replaced.
    let replaces = args.force || wieldy::is_placeholder(path);
    let how = if replaces { how.write(true).create(true).truncate(true) } else { how.write(true).create_new(true) };
    let written = how.open(path).and_then(|mut file| file.write_all(TEMPLATE.as_bytes()));
    match written {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            return Err(Failure::usage(anyhow!("`{shown}` already exists")).hint("`--force` replaces it"));
        }
        Err(error) => {
            return Err(Failure::broken(anyhow::Error::new(error).context(format!("cannot write `{shown}`"))));
        }
        Ok(()) => {}
    }
    trust::remember(path, TEMPLATE.as_bytes(), environment, printer);
    if printer.json {
        printer.json(&serde_json::json!({ "written": path }))?;
    } else {
        printer.tell(&format!("wrote `{shown}`; `wieldy config show` prints the effective configuration"));
        if into.is_none() {
            printer.tell("after each change, run `wieldy trust` so that it is used");
        }
    }
    Ok(Exit::Success)
}
