//! From a command to the order that a berth is given: what can be refused is refused before anybody is bothered.

use std::io;

use wieldy_core::{Command, Confinement};

use crate::wire::{RunLimits, RunOrder};

/// The order for a command. The error says what is wrong with which thing.
pub(crate) fn prepare(command: &Command, confinement: &Confinement) -> io::Result<RunOrder> {
    without_nul(&command.program, "the program's path")?;
    for word in &command.arguments {
        without_nul(word, "an argument")?;
    }
    for (name, value) in &command.environment {
        if name.is_empty() || name.contains('=') {
            return Err(invalid(format!("`{name}` cannot be the name of an environment variable")));
        }
        without_nul(name, "an environment variable")?;
        without_nul(value, "an environment variable")?;
    }
    let limits = &confinement.limits;
    Ok(RunOrder {
        program: command.program.clone(),
        arguments: command.arguments.clone(),
        environment: command.environment.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
        workspace: confinement.workspace.clone(),
        folder: confinement.workspace.join(&command.folder),
        grace_ms: u64::try_from(confinement.grace.as_millis()).unwrap_or(u64::MAX),
        terminal: command.terminal.map(|terminal| (terminal.rows, terminal.columns)),
        is_raw: false,
        limits: RunLimits { open_files: limits.open_files, ..RunLimits::default() },
    })
}

fn without_nul(text: &str, what: &str) -> io::Result<()> {
    if text.contains('\0') { Err(invalid(format!("{what} contains a zero byte"))) } else { Ok(()) }
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}
