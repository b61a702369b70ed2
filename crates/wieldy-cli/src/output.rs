//! The output: data to standard output, messages to standard error, colours only on a terminal.
//!
//! Text from other sources (tools, manifests, file names) is shown with its control characters escaped, so that it can
//! neither move the cursor nor imitate a line of wieldy's.

use std::io::{self, ErrorKind, IsTerminal, Write};

use wieldy::{CallError, Code, DueNote, ToolResult, present_notes, visible};
pub(crate) use wieldy::{shown, shown_in_line};

use crate::exit::{Failure, Why};

/// The printer, which all output goes through.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Printer {
    pub(crate) json: bool,
    stdout_is_terminal: bool,
    stdout_has_colours: bool,
    stderr_has_colours: bool,
}

impl Printer {
    pub(crate) fn new(json: bool) -> Self {
        let colours_wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
            && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        Self {
            json,
            stdout_is_terminal: io::stdout().is_terminal(),
            stdout_has_colours: colours_wanted && io::stdout().is_terminal(),
            stderr_has_colours: colours_wanted && io::stderr().is_terminal(),
        }
    }

    pub(crate) fn stdout_has_colours(&self) -> bool {
        self.stdout_has_colours
    }

    pub(crate) fn stderr_has_colours(&self) -> bool {
        self.stderr_has_colours
    }

    /// Returns true if a person can be asked at a terminal.
    pub(crate) fn can_ask(&self) -> bool {
        io::stdin().is_terminal() && io::stderr().is_terminal()
    }

    pub(crate) fn stdout_is_terminal(&self) -> bool {
        self.stdout_is_terminal
    }

    /// Returns the width of standard output in characters, unlimited if it is not a terminal.
    pub(crate) fn width(&self) -> usize {
        let columns = || rustix::termios::tcgetwinsize(io::stdout()).ok().map(|size| usize::from(size.ws_col));
        let known = self.stdout_is_terminal.then(columns).flatten().filter(|columns| *columns > 0);
        known.unwrap_or(usize::MAX)
    }

    /// Prints a line of data.
    pub(crate) fn line(&self, text: &str) -> Result<(), Failure> {
        self.data(format!("{text}\n").as_bytes())
    }

    /// Prints a value as one line of JSON.
    pub(crate) fn json(&self, value: &impl serde::Serialize) -> Result<(), Failure> {
        self.line(&serde_json::to_string(value).expect("what we print is plain data"))
    }

    /// Prints a tool's output: byte for byte for programs, escaped and with a final line end for people.
    pub(crate) fn tool_text(&self, text: &str) -> Result<(), Failure> {
        if !self.stdout_is_terminal {
            return self.data(text.as_bytes());
        }
        let text = visible(text);
        let end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
        self.data(format!("{text}{end}").as_bytes())
    }

    /// Prints data. A reader that closes the pipe early, as `head` does, has enough, so that is no failure.
    pub(crate) fn data(&self, bytes: &[u8]) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(Failure::broken(anyhow::Error::new(error).context("cannot write to standard output")))
            }
            _ => Ok(()),
        }
    }

    /// Prints a message to standard error. Write errors are ignored.
    pub(crate) fn tell(&self, text: &str) {
        let _ = writeln!(io::stderr(), "{text}");
    }

    /// Prints why a command could not go on; with `--json` also as data on standard output.
    pub(crate) fn failure(&self, failure: &Failure) {
        self.tell_failure(failure);
        if self.json {
            let _ = self.json(&serde_json::json!({ "error": failure.error() }));
        }
    }

    /// Prints the same for people only: standard output already has an answer.
    pub(crate) fn tell_failure(&self, failure: &Failure) {
        match &failure.why {
            Why::Own(error) => {
                self.error(None, &error.to_string());
                for cause in error.chain().skip(1) {
                    self.tell(&format!("  caused by: {}", shown(&cause.to_string())));
                }
            }
            Why::Call(error) => self.error(Some(error.code), &error.message),
        }
        self.hint(failure.hint.as_deref());
    }

    /// Prints the notes of a result, unless the result is printed as JSON.
    pub(crate) fn notes(&self, notes: &[DueNote], waiting: usize) {
        if !self.json && !notes.is_empty() {
            self.tell(present_notes(notes, waiting).trim_end());
        }
    }

    /// Prints why a call failed, with a hint.
    pub(crate) fn call_error(&self, result: &ToolResult) {
        if let Some(error) = &result.error {
            self.error(Some(error.code), &error.message);
            self.hint(hint_for(error, &result.tool).as_deref());
        }
    }

    fn error(&self, code: Option<Code>, message: &str) {
        let code = code.map(|code| format!("[{code}]")).unwrap_or_default();
        let label = self.coloured(&format!("error{code}"), "1;31");
        self.tell(&format!("{label}: {}", shown(message)));
    }

    pub(crate) fn hint(&self, hint: Option<&str>) {
        if let Some(hint) = hint {
            self.tell(&format!("{}: {}", self.coloured("hint", "1;36"), shown(hint)));
        }
    }

    fn coloured(&self, text: &str, colour: &str) -> String {
        if self.stderr_has_colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Returns the hint for a call's error on the command line; by default the executor's own suggestion.
pub(crate) fn hint_for(error: &CallError, tool: &str) -> Option<String> {
    let own = || error.suggestion.clone();
    match error.code {
        Code::SandboxCreationFailed if error.details.contains_key("level") => {
            let doctor = "`wieldy doctor` shows which levels work here";
            Some(own().map_or(doctor.into(), |own| format!("{own}; {doctor}")))
        }
        Code::ConfirmationRequired => Some("`--yes` agrees to it".into()),
        Code::ToolNotFound if error.details.get("near").is_some_and(|near| near == &serde_json::json!([])) => {
            Some("`wieldy tools` lists all tools".into())
        }
        Code::ValidationFailed if error.details.contains_key("violations") => {
            Some(format!("`wieldy tools show {tool}` prints its arguments"))
        }
        // The person at the terminal has cancelled the call, and knows why.
        Code::Cancelled if error.details.get("cause").is_some_and(|cause| cause == "caller" || cause == "batch") => {
            None
        }
        Code::Timeout => own().map(|own| format!("{own}; see `--timeout`, `--deadline` and `--silence`")),
        _ => own(),
    }
}

/// Formats a count with its noun: "1 call", "2 calls".
pub(crate) fn counted(count: usize, thing: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {thing}{plural}")
}
