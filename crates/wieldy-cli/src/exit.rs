//! The end of the program: the exit codes that scripts rely on, and [`Failure`], the error of a command that cannot go
//! on.

use std::process::ExitCode;

use wieldy::{CallError, Category, Code};

/// The exit codes; part of the stable surface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Success,
    ToolFailed,
    WrongUsage,
    InvalidCall,
    Denied,
    Timeout,
    Cancelled,
    Broken,
    /// The end of `wieldy run`: the program's own exit code, or one of the module `run`.
    Program(u8),
}

impl Exit {
    /// Returns the number that the process ends with.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::ToolFailed => 1,
            Self::WrongUsage => 2,
            Self::InvalidCall => 3,
            Self::Denied => 4,
            Self::Timeout => 5,
            Self::Cancelled => 6,
            Self::Broken => 7,
            Self::Program(code) => code,
        }
    }

    /// Returns the exit code of a call that ended with this error.
    pub(crate) fn of(error: &CallError) -> Self {
        match error.code {
            Code::ToolNotFound | Code::ValidationFailed => Self::InvalidCall,
            code if code.category() == Category::PermissionError => Self::Denied,
            Code::Timeout => Self::Timeout,
            Code::Cancelled => Self::Cancelled,
            Code::SandboxCreationFailed
            | Code::SandboxCrashed
            | Code::OutcomeUnknown
            | Code::JournalFailed
            | Code::TransportFailed
            | Code::UpstreamProtocolError => Self::Broken,
            Code::Configuration => Self::WrongUsage,
            _ => Self::ToolFailed,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// The reason why a command could not go on, with a hint.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    pub(crate) why: Why,
    pub(crate) hint: Option<String>,
}

/// An error of the command line itself, or of the executor.
#[derive(Debug)]
pub(crate) enum Why {
    Own(anyhow::Error),
    Call(Box<CallError>),
}

impl Failure {
    /// Returns a failure that the person who typed the command or wrote the configuration can fix.
    pub(crate) fn usage(error: impl Into<anyhow::Error>) -> Self {
        Self { exit: Exit::WrongUsage, why: Why::Own(error.into()), hint: None }
    }

    /// Returns a failure of this machine.
    pub(crate) fn broken(error: impl Into<anyhow::Error>) -> Self {
        Self { exit: Exit::Broken, why: Why::Own(error.into()), hint: None }
    }

    /// Returns the failure as the error of a call, for programs.
    pub(crate) fn error(&self) -> CallError {
        let own = match &self.why {
            Why::Call(error) => return CallError::clone(error),
            Why::Own(own) => own,
        };
        let code = if self.exit == Exit::WrongUsage { Code::Configuration } else { Code::ExecutionError };
        let causes: Vec<String> = own.chain().map(ToString::to_string).collect();
        let error = CallError::new(code, causes.join(": "));
        match &self.hint {
            Some(hint) => error.suggest(hint.as_str()),
            None => error,
        }
    }

    /// Adds a hint to the failure.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        Self { exit: Exit::of(&error), hint: error.suggestion.clone(), why: Why::Call(Box::new(error)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: E3.2
    #[test]
    fn every_error_code_has_the_documented_exit_code() {
        let exits: Vec<String> =
            Code::ALL.iter().map(|code| format!("{code}={}", Exit::of(&CallError::new(*code, "")).code())).collect();
        insta::assert_snapshot!(exits.join(" "), @"E3001=3 E3002=3 E3003=4 E3004=4 E3005=4 E3006=4 E3007=1 E3008=1 E3101=7 E3102=1 E3103=5 E3104=4 E3105=4 E3106=1 E3107=7 E3108=1 E3109=6 E3110=7 E3111=7 E3201=7 E3202=7 E3203=1 E3204=1 E3301=2 E3302=1 E3303=1 E3304=1 E3900=1");
    }
}
