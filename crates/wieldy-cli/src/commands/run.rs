//! `wieldy run`: runs a program in a sandbox, attached to the user's terminal or pipes.

use std::io::{self, IsTerminal, Read, Write};
use std::sync::{Arc, Mutex, OnceLock};

use indicatif::ProgressBar;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use serde_json::{Value, json};
use tokio::sync::Notify;
use wieldy::{Attached, Call, Code, Executor, Feed, OutputSink, Stdin, Stream, ToolResult};

use super::request;
use crate::args::ProgramArgs;
use crate::config::{Config, Environment};
use crate::exit::{Exit, Failure};
use crate::history::{History, Tasks};
use crate::interrupt::{CANCELLING, Interrupts};
use crate::output::Printer;
use crate::{assemble, confirm, history, in_runtime, log};

// Exit codes besides the program's own, as `timeout`, `docker run`, `env` and shells use them.
const TIMED_OUT: Exit = Exit::Program(124);
pub(crate) const NOT_RUN: Exit = Exit::Program(125);
const NOT_EXECUTABLE: Exit = Exit::Program(126);
const NOT_FOUND: Exit = Exit::Program(127);
const CANCELLED: Exit = Exit::Program(130);
/// The exit code of a program killed by SIGPIPE.
const PIPE_CLOSED: Exit = Exit::Program(141);
const SIGNALLED: i64 = 128;

/// The maximal number of rows and of columns that a tool may be asked for.
const TERMINAL_MAX: u16 = 1000;
const READ_BYTES: usize = 8 * 1024;

pub(crate) fn run(
    args: &ProgramArgs,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let person = Arc::new(Person::new(printer));
    let input = Arc::clone(&person);
    let tool = Attached::new(assemble::tool_environment(config, environment), move || input.attach());
    // The history outlives the runtime, so that it gets the last records of running calls.
    let fork_server = wieldy::EarlyForkServer::start();
    let history = History::open(config, Tasks::Forgotten)?;
    let work = async {
        let _fork_server = fork_server;
        let confirmer = confirm::confirmer(args.run.yes, printer, &ProgressBar::hidden());
        let work = assemble::Work {
            output: (!printer.json).then(|| Arc::clone(&person) as _),
            program: Some(Arc::new(tool)),
            ..assemble::Work::default()
        };
        let executor = assemble::executor(config, environment, confirmer, history.as_ref(), work)?;
        call(args, config, &executor, &person, printer).await
    };
    let ended = in_runtime(work);
    history::close(history, ended)
}

async fn call(
    args: &ProgramArgs,
    config: &Config,
    executor: &Executor,
    person: &Person,
    printer: &Printer,
) -> Result<Exit, Failure> {
    request::warn_of_no_isolation(config, printer);
    request::tell_of_session(&args.run, printer);
    let caller = request::caller(&args.run);
    let mut arguments = json!({ "command": args.command });
    if let Some(terminal) = person.terminal() {
        arguments["terminal"] = terminal;
    }
    let call = Call::new("Run", arguments).by(Arc::clone(&caller)).with(request::options(&args.run));

    let mut interrupts = Interrupts::listen()?;
    let work = async {
        let id = executor.spawn(call);
        let cancel = || {
            person.detach();
            executor.cancel(id, &caller);
        };
        let result = async {
            let ended = executor.wait(id, &caller);
            tokio::pin!(ended);
            tokio::select! {
                result = &mut ended => (result, false),
                () = person.left.notified() => {
                    executor.cancel(id, &caller);
                    (ended.await, true)
                }
            }
        };
        interrupts.watch(result, cancel, CANCELLING, printer).await
    };
    let (result, has_left) = log::with_events(&config.log, executor, work).await;
    let result = result.expect("a call that was just begun is known");
    person.detach();
    if printer.json {
        printer.json(&result)?;
    }
    printer.notes(&result.notes, result.notes_waiting);
    executor.confirm_notes(&result.notes);
    if has_left {
        return Ok(PIPE_CLOSED);
    }
    // The program itself has printed why it failed.
    if result.error.as_ref().is_some_and(|error| error.code != Code::NonzeroExit) {
        printer.call_error(&result);
    }
    Ok(exit(&result))
}

/// Returns the program's own exit code, or the one for the reason why there is none.
fn exit(result: &ToolResult) -> Exit {
    let error = result.error.as_deref();
    match error.map(|error| error.code) {
        Some(Code::Timeout) => return TIMED_OUT,
        Some(Code::Cancelled) => return CANCELLED,
        _ => {}
    }
    let ended = |key: &str| result.structured.as_ref().and_then(|structured| structured[key].as_i64());
    let code = ended("exit_code").or_else(|| ended("signal").map(|signal| SIGNALLED + signal));
    match (code.and_then(|code| u8::try_from(code).ok()), error) {
        (Some(code), _) => Exit::Program(code),
        (None, None) => Exit::Success,
        (None, Some(error)) if !error.details.contains_key("program") => NOT_RUN,
        (None, Some(error)) if error.code == Code::FileNotFound => NOT_FOUND,
        (None, Some(_)) => NOT_EXECUTABLE,
    }
}

/// The user's side of the program: standard input, output and error.
struct Person {
    /// True if all three streams are a terminal, so that the program gets one too.
    has_terminal: bool,
    feed: OnceLock<Feed>,
    /// The original settings of the terminal, while they are changed.
    saved: Mutex<Option<Termios>>,
    /// Notified when the reader of standard output is gone.
    left: Notify,
}

impl Person {
    fn new(printer: &Printer) -> Self {
        let has_terminal = !printer.json && printer.can_ask() && printer.stdout_is_terminal();
        Self { has_terminal, feed: OnceLock::new(), saved: Mutex::default(), left: Notify::new() }
    }

    /// Returns the terminal for the program, of the same size as the user's.
    fn terminal(&self) -> Option<Value> {
        let size = self.has_terminal.then(|| tcgetwinsize(io::stdout()).ok())?;
        let sized = |count: u16, usual: u16| if count == 0 { usual } else { count.min(TERMINAL_MAX) };
        let (rows, columns) = size.map_or((24, 80), |size| (sized(size.ws_row, 24), sized(size.ws_col, 80)));
        Some(json!({ "rows": rows, "columns": columns }))
    }

    /// Starts to forward the input. From now on the program's terminal turns keys into signals, and the user's one does
    /// not.
    fn attach(&self) -> Stdin {
        if self.has_terminal
            && let Ok(settings) = tcgetattr(io::stdin())
        {
            let mut raw = settings.clone();
            raw.make_raw();
            *self.saved() = Some(settings);
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &raw);
        }
        // In `wieldy run -- COMMAND | less`, the pager reads the keys.
        if !self.has_terminal && io::stdin().is_terminal() && !io::stdout().is_terminal() {
            return Stdin::Nothing;
        }
        Stdin::Live(self.feed.get_or_init(read_input).clone())
    }

    /// Restores the settings of the terminal.
    fn detach(&self) {
        if let Some(settings) = self.saved().take() {
            let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &settings);
        }
    }

    fn saved(&self) -> std::sync::MutexGuard<'_, Option<Termios>> {
        self.saved.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for Person {
    fn drop(&mut self) {
        self.detach();
    }
}

/// Reads standard input on a thread, which ends with the process: a read from a terminal cannot be cancelled.
fn read_input() -> Feed {
    let (sender, feed) = Feed::new();
    std::thread::spawn(move || {
        let mut buffer = [0; READ_BYTES];
        while let Ok(count @ 1..) = io::stdin().lock().read(&mut buffer) {
            if sender.blocking_send(buffer[..count].to_vec()).is_err() {
                break;
            }
        }
    });
    feed
}

impl OutputSink for Person {
    fn write(&self, stream: Stream, bytes: &[u8]) {
        // A slow reader must block the program, but not the runtime's timers.
        let written = tokio::task::block_in_place(|| match stream {
            Stream::Stdout => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(bytes).and_then(|()| stdout.flush())
            }
            Stream::Stderr => io::stderr().write_all(bytes),
        });
        if written.is_err() && stream == Stream::Stdout {
            self.left.notify_one();
        }
    }
}
