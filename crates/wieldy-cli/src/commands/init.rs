//! `wieldy init`: a commented configuration to begin with.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};

use anyhow::anyhow;

use crate::args::InitArgs;
use crate::config::{FILE_NAME, TEMPLATE};
use crate::exit::{Exit, Failure};
use crate::output::Printer;

pub(crate) fn run(args: &InitArgs, printer: &Printer) -> Result<Exit, Failure> {
    let mut how = OpenOptions::new();
    // Made in one step, so that a file which appears meanwhile is not overwritten either.
    let how = if args.force { how.write(true).create(true).truncate(true) } else { how.write(true).create_new(true) };
    let written = how.open(FILE_NAME).and_then(|mut file| file.write_all(TEMPLATE.as_bytes()));
    match written {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            Err(Failure::usage(anyhow!("`{FILE_NAME}` is there already")).hint("`--force` replaces it"))
        }
        Err(error) => Err(Failure::broken(anyhow::Error::new(error).context(format!("cannot write `{FILE_NAME}`")))),
        Ok(()) if printer.json => printer.json(&serde_json::json!({ "written": FILE_NAME })).map(|()| Exit::Success),
        Ok(()) => {
            printer.tell(&format!("wrote `{FILE_NAME}`; `wieldy config show` prints what holds"));
            Ok(Exit::Success)
        }
    }
}
