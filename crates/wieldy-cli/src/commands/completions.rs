//! `wieldy completions`: a script that completes this command's words in a shell.

use clap::CommandFactory;

use crate::args::{Arguments, CompletionsArgs};
use crate::exit::{Exit, Failure};
use crate::output::Printer;

pub(crate) fn run(args: &CompletionsArgs, printer: &Printer) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Arguments::command(), "wieldy", &mut script);
    printer.data(&script)?;
    Ok(Exit::Success)
}
