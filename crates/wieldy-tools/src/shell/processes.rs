//! Background processes: started by one call of a session, read, written to and stopped by later ones.
//!
//! [`Processes`] stores them under the session that started them, so that other sessions do not see them. A process
//! ends when it is stopped, with the session's sandbox, when the session has not used it for long, and with the
//! executor.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use wieldy_core::{
    Background, CallError, Code, Command, Exit, Feed, OutputSink, ResourceLimits, RunError, SessionKey, Stdin, Stream,
};

/// Maximum number of processes that one session runs at once.
pub const PROCESSES_MAX: usize = 16;
/// Maximum number of stored processes of all sessions, including those that have ended.
const STORED_MAX: usize = 256;
/// Maximum bytes of output that are stored for the next read.
pub const UNREAD_BYTES_MAX: usize = 1024 * 1024;
/// The time after which a process is stopped if its session does not use the shell tools.
const IDLE_MAX: Duration = Duration::from_secs(60 * 60);

/// The background processes of all sessions. Dropping it stops them.
pub struct Processes {
    sessions: Mutex<HashMap<SessionKey, SessionProcesses>>,
    stop: CancellationToken,
    _ends_all: DropGuard,
}

/// The processes that one session has started, by number.
#[derive(Default)]
struct SessionProcesses {
    started: u64,
    processes: BTreeMap<u64, Arc<Process>>,
}

/// A background process.
pub(super) struct Process {
    pub(super) id: String,
    /// The command line, for people.
    pub(super) command: String,
    pub(super) has_terminal: bool,
    /// The resource limits under which it runs.
    pub(super) limits: ResourceLimits,
    unread: Mutex<UnreadOutput>,
    /// The state. Also signals new output.
    state: watch::Sender<ProcessState>,
    stdin: Mutex<Option<mpsc::Sender<Vec<u8>>>>,
    stop: CancellationToken,
    touched: Mutex<Instant>,
}

/// The state of a process.
#[derive(Debug, Clone)]
pub(super) enum ProcessState {
    Running,
    Ended(Box<Exit>),
    /// The process was not started, or was lost with its sandbox.
    Lost(Box<CallError>),
}

/// Output that has not been read: the newest bytes, and the number of lost bytes before them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct UnreadOutput {
    pub(super) bytes: VecDeque<u8>,
    pub(super) lost: u64,
}

impl Default for Processes {
    fn default() -> Self {
        let stop = CancellationToken::new();
        Self { sessions: Mutex::default(), _ends_all: stop.clone().drop_guard(), stop }
    }
}

impl Processes {
    /// Starts a process for a session. `command` is run, and `shown` is its text for people.
    pub(super) fn start(
        &self,
        background: Background,
        mut command: Command,
        shown: String,
    ) -> Result<Arc<Process>, RunError> {
        let (sender, feed) = Feed::new();
        if let Stdin::Bytes(bytes) = std::mem::replace(&mut command.stdin, Stdin::Live(feed)) {
            let _ = sender.try_send(bytes); // nothing was sent before it, so there is room
        }
        let process = {
            let mut sessions = lock(&self.sessions);
            make_room(&mut sessions, background.session())?;
            let session = sessions.entry(background.session().clone()).or_default();
            session.started += 1;
            let process = Arc::new(Process {
                id: format!("p{}", session.started),
                command: shown,
                has_terminal: command.terminal.is_some(),
                limits: background.limits(),
                unread: Mutex::default(),
                state: watch::Sender::new(ProcessState::Running),
                stdin: Mutex::new(Some(sender)),
                stop: self.stop.child_token(),
                touched: Mutex::new(Instant::now()),
            });
            session.processes.insert(session.started, Arc::clone(&process));
            process
        };
        tokio::spawn(Arc::clone(&process).run(background, command));
        Ok(process)
    }

    /// Returns the session's processes, the oldest first.
    pub(super) fn list(&self, session: &SessionKey) -> Vec<Arc<Process>> {
        let sessions = lock(&self.sessions);
        sessions.get(session).map(|session| session.processes.values().cloned().collect()).unwrap_or_default()
    }

    /// Returns the session's process of this id.
    pub(super) fn find(&self, session: &SessionKey, id: &str) -> Result<Arc<Process>, RunError> {
        self.touch(session);
        let processes = self.list(session);
        let known: Vec<&str> = processes.iter().map(|process| process.id.as_str()).collect();
        let found = processes.iter().find(|process| process.id == id).cloned();
        found.ok_or_else(|| {
            let message = format!("this session has no process `{id}` in the background");
            let error = CallError::new(Code::InvalidInput, message);
            RunError::from(error.suggest(match known.as_slice() {
                [] => "start one by `Bash` with `background`".to_owned(),
                known => format!("there is {}", known.join(", ")),
            }))
        })
    }

    /// Records that the session is still active.
    pub(super) fn touch(&self, session: &SessionKey) {
        for process in self.list(session) {
            *lock(&process.touched) = Instant::now();
        }
    }
}

/// Removes processes that have ended to make room for one more, the oldest first. Running ones are never removed.
fn make_room(sessions: &mut HashMap<SessionKey, SessionProcesses>, session: &SessionKey) -> Result<(), RunError> {
    for session in sessions.values_mut() {
        session.processes.retain(|_, process| process.is_running() || process.idle_for() < IDLE_MAX);
    }
    // The numbers of a session start again only when all its processes are gone.
    sessions.retain(|_, session| !session.processes.is_empty());
    if let Some(own) = sessions.get_mut(session)
        && own.processes.len() >= PROCESSES_MAX
    {
        let ended = own.processes.iter().find(|(_, process)| !process.is_running()).map(|(number, _)| *number);
        let Some(ended) = ended else {
            let message =
                format!("this session has {PROCESSES_MAX} processes in the background, and may not have more");
            return Err(RunError::from(CallError::new(Code::ResourceLimitExceeded, message))
                .suggest("stop one of them by `ProcessStop`; `ProcessList` shows them")
                .before_effect());
        };
        own.processes.remove(&ended);
    }
    let kept: usize = sessions.values().map(|session| session.processes.len()).sum();
    if kept >= STORED_MAX {
        let message =
            format!("all sessions together have {STORED_MAX} processes in the background, and may not have more");
        return Err(RunError::from(CallError::new(Code::ResourceLimitExceeded, message)).before_effect());
    }
    Ok(())
}

impl Process {
    async fn run(self: Arc<Self>, background: Background, command: Command) {
        let output: Arc<dyn OutputSink> = Arc::clone(&self) as _;
        let executing = background.execute(&command, output, self.stop.clone());
        tokio::pin!(executing);
        let ended = loop {
            tokio::select! {
                ended = &mut executing => break ended,
                () = self.wait_until_idle(), if !self.stop.is_cancelled() => self.stop.cancel(),
            }
        };
        lock(&self.stdin).take();
        self.state.send_replace(match ended {
            Ok(exit) => ProcessState::Ended(Box::new(exit)),
            Err(error) => ProcessState::Lost(Box::new(error)),
        });
    }

    async fn wait_until_idle(&self) {
        while let Some(left) = IDLE_MAX.checked_sub(self.idle_for()) {
            tokio::time::sleep(left.max(Duration::from_millis(1))).await;
        }
    }

    fn idle_for(&self) -> Duration {
        lock(&self.touched).elapsed()
    }

    pub(super) fn state(&self) -> ProcessState {
        self.state.borrow().clone()
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(*self.state.borrow(), ProcessState::Running)
    }

    /// Asks the process to end. It may take its grace time.
    pub(super) fn stop(&self) {
        self.stop.cancel();
    }

    /// Waits until the process has ended.
    pub(super) async fn wait_until_ended(&self) {
        let mut state = self.state.subscribe();
        let _ = state.wait_for(|state| !matches!(state, ProcessState::Running)).await;
    }

    /// Waits until there is something to read, or the process has ended.
    pub(super) async fn wait_for_output(&self) {
        let mut state = self.state.subscribe();
        let _ = state.wait_for(|state| !matches!(state, ProcessState::Running) || self.unread_bytes() > 0).await;
    }

    pub(super) fn unread_bytes(&self) -> usize {
        lock(&self.unread).bytes.len()
    }

    /// Takes the unread output. An incomplete character at the end stays until the rest of it comes.
    pub(super) fn take_unread(&self) -> UnreadOutput {
        let is_running = self.is_running();
        let mut unread = lock(&self.unread);
        let mut taken = std::mem::take(&mut *unread);
        if is_running {
            let rest = taken.bytes.len() - incomplete_character_bytes(taken.bytes.make_contiguous());
            unread.bytes = taken.bytes.split_off(rest);
        }
        taken
    }

    /// Writes to the process's input. Waits while the input is full.
    pub(super) async fn write(&self, bytes: Vec<u8>) -> Result<(), RunError> {
        let sender = lock(&self.stdin).clone();
        let gone = || {
            let message = format!("`{}` does not read input any more: it has ended, or its input was closed", self.id);
            RunError::invalid_input(message)
        };
        sender.ok_or_else(gone)?.send(bytes).await.map_err(|_| gone())
    }

    /// Ends the process's input.
    pub(super) async fn end_input(&self) {
        if self.has_terminal {
            // The terminal stays open, so send the character by which its user ends the input.
            let _ = self.write(END_OF_TRANSMISSION.to_vec()).await;
        } else {
            lock(&self.stdin).take();
        }
    }
}

/// The character that ends the input at a terminal.
pub(super) const END_OF_TRANSMISSION: &[u8] = b"\x04";

impl OutputSink for Process {
    fn write(&self, _: Stream, bytes: &[u8]) {
        lock(&self.unread).add(bytes);
        self.state.send_modify(|_| ());
    }
}

impl UnreadOutput {
    fn add(&mut self, bytes: &[u8]) {
        let kept = bytes.get(bytes.len().saturating_sub(UNREAD_BYTES_MAX)..).unwrap_or_default();
        let surplus = (self.bytes.len() + kept.len()).saturating_sub(UNREAD_BYTES_MAX);
        self.bytes.drain(..surplus);
        self.bytes.extend(kept);
        self.lost += (surplus + bytes.len() - kept.len()) as u64;
    }
}

/// Returns the number of bytes at the end that are the beginning of a character.
fn incomplete_character_bytes(bytes: &[u8]) -> usize {
    let last = bytes.get(bytes.len().saturating_sub(3)..).unwrap_or_default();
    (1..=last.len())
        .find(|count| {
            let end = &last[last.len() - count..];
            std::str::from_utf8(end).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
        })
        .unwrap_or(0)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_output_is_kept_and_the_rest_is_counted() {
        let mut unread = UnreadOutput::default();
        unread.add(&vec![b'a'; UNREAD_BYTES_MAX - 2]);
        unread.add(b"bcde");
        assert_eq!((unread.bytes.len(), unread.lost), (UNREAD_BYTES_MAX, 2));
        assert!(unread.bytes.iter().rev().take(4).eq(b"edcb"));
        unread.add(&vec![b'x'; UNREAD_BYTES_MAX + 3]);
        assert_eq!((unread.bytes.len(), unread.lost), (UNREAD_BYTES_MAX, 2 + UNREAD_BYTES_MAX as u64 + 3));
        assert!(unread.bytes.iter().all(|byte| *byte == b'x'));
    }

    #[test]
    fn an_incomplete_character_is_detected() {
        let whole = "é€😀".as_bytes();
        let begun: Vec<usize> = (0..=whole.len()).map(|count| incomplete_character_bytes(&whole[..count])).collect();
        assert_eq!(begun, [0, 1, 0, 1, 2, 0, 1, 2, 3, 0]);
        assert_eq!(incomplete_character_bytes(b"\xff\xfe"), 0, "bytes that are not text are not held back");
    }
}
