//! Fake tools, journals and sandboxes whose behaviour tests choose.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    AnyTool, CallError, Code, Command, Confinement, Ended, Event, Exit, Input, Journal, JournalError, Level,
    MemoryJournal, Outcome, OutputSink, Receipt, Run, RunError, Sandbox, SandboxChange, SandboxError, SandboxId,
    SandboxRef, Stream, ToolSpec, Usage,
};

/// The behaviour of a puppet in one run.
#[derive(Debug, Clone)]
pub enum Act {
    /// Answers with the arguments as text.
    Echo,
    /// Answers with this.
    Say(&'static str),
    /// Fails with this code; the flag says whether the tool may have changed something.
    Fail(Code, bool),
    /// Fails with a transport error that asks for a retry no earlier than after this time.
    Busy(Duration),
    /// Panics.
    Panic,
    /// Takes this long, and then answers with the arguments.
    Take(Duration),
    /// Never ends, and ignores cancellation.
    Hang,
    /// Prints this, then waits to be stopped, and answers with what it printed.
    PrintAndWait(&'static str),
    /// Reports progress this many times at this interval, and then answers.
    Tick(u32, Duration),
    /// Answers with this structured value.
    Give(Value),
}

/// A tool that plays one act per run, and the last act for all further runs.
pub struct Puppet {
    spec: ToolSpec,
    acts: Mutex<VecDeque<Act>>,
    strings: Arc<Strings>,
}

/// The record of a puppet's runs.
#[derive(Debug, Default)]
pub struct Strings {
    runs: AtomicUsize,
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Strings {
    /// Returns the number of runs that began.
    pub fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    /// Returns the largest number of runs at once.
    pub fn most_at_once(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }

    /// Returns the number of runs under way.
    pub fn now(&self) -> usize {
        self.now.load(Ordering::SeqCst)
    }
}

impl Puppet {
    /// Makes a puppet and its strings.
    #[expect(clippy::new_ret_no_self, reason = "a puppet is nothing without its strings")]
    pub fn new(spec: ToolSpec, acts: impl IntoIterator<Item = Act>) -> (Arc<dyn AnyTool>, Arc<Strings>) {
        let strings = Arc::new(Strings::default());
        let puppet = Self { spec, acts: Mutex::new(acts.into_iter().collect()), strings: Arc::clone(&strings) };
        (Arc::new(puppet), strings)
    }

    /// Makes a read-only puppet that plays one act.
    pub fn reading(name: &str, act: Act) -> Arc<dyn AnyTool> {
        Self::new(ToolSpec::new(name, "reads").read_only(), [act]).0
    }

    /// Makes a puppet that may change things and plays one act.
    pub fn writing(name: &str, act: Act) -> Arc<dyn AnyTool> {
        Self::new(ToolSpec::new(name, "writes"), [act]).0
    }
}

/// Counts a run until it is dropped.
struct Counted(Arc<Strings>);

impl Counted {
    fn new(strings: &Arc<Strings>) -> Self {
        strings.runs.fetch_add(1, Ordering::SeqCst);
        let now = strings.now.fetch_add(1, Ordering::SeqCst) + 1;
        strings.most.fetch_max(now, Ordering::SeqCst);
        Self(Arc::clone(strings))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

impl AnyTool for Puppet {
    fn spec(&self) -> ToolSpec {
        self.spec.clone()
    }

    fn run<'a>(&'a self, input: &'a Input, run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        let act = {
            let mut acts = self.acts.lock().expect("no test panics while it holds the acts");
            if acts.len() > 1 { acts.pop_front() } else { acts.front().cloned() }
        };
        Box::pin(async move {
            let _counted = Counted::new(&self.strings);
            let echo = || Ok(Outcome::text(input.value().to_string()));
            match act.unwrap_or(Act::Echo) {
                Act::Echo => echo(),
                Act::Say(text) => Ok(Outcome::text(text)),
                Act::Give(value) => Ok(Outcome::default().structured(value)),
                Act::Fail(code, effect_possible) => {
                    let error = RunError::from(CallError::new(code, "told to fail"));
                    Err(RunError { effect_possible, ..error })
                }
                Act::Busy(wait) => Err(RunError::from(CallError::new(Code::TransportFailed, "busy").after(wait))),
                Act::Panic => panic!("told to panic"),
                Act::Take(time) => {
                    tokio::time::sleep(time).await;
                    echo()
                }
                Act::Hang => std::future::pending().await,
                Act::PrintAndWait(text) => {
                    run.output(Stream::Stdout, text.as_bytes());
                    run.stop().cancelled().await;
                    Ok(run.captured())
                }
                Act::Tick(times, apart) => {
                    for tick in 1..=times {
                        tokio::time::sleep(apart).await;
                        run.progress(f64::from(tick) * 100.0 / f64::from(times), format!("tick {tick}"));
                    }
                    echo()
                }
            }
        })
    }
}

/// A journal that can be switched to refuse records.
#[derive(Default)]
pub struct FailingJournal {
    kept: MemoryJournal,
    refusing: AtomicBool,
}

impl FailingJournal {
    /// Makes the journal refuse records, or accept them again.
    pub fn refuse(&self, refusing: bool) {
        self.refusing.store(refusing, Ordering::SeqCst);
    }

    /// Returns the records that it stored.
    pub fn events(&self) -> Vec<Arc<Event>> {
        self.kept.events()
    }
}

impl Journal for FailingJournal {
    fn append(&self, event: &Arc<Event>) -> Receipt {
        if self.refusing.load(Ordering::SeqCst) {
            return Receipt::Refused(JournalError("the disk is full".into()));
        }
        self.kept.append(event)
    }

    fn next_seq(&self) -> u64 {
        self.kept.next_seq()
    }
}

/// A journal on a disk that hangs: it accepts every record, and none ever becomes durable.
pub struct HangingJournal;

impl Journal for HangingJournal {
    fn append(&self, event: &Arc<Event>) -> Receipt {
        Receipt::Pending(event.seq)
    }

    fn wait_until_stored(&self, _: u64) -> BoxFuture<'_, Result<(), JournalError>> {
        Box::pin(std::future::pending())
    }

    fn next_seq(&self) -> u64 {
        1
    }
}

/// A sandbox without processes: it prints the program and its arguments.
pub struct FakeSandbox;

impl Sandbox for FakeSandbox {
    fn level(&self) -> Level {
        Level::None
    }

    fn execute<'a>(
        &'a self,
        command: &'a Command,
        _confinement: &'a Confinement,
        output: Arc<dyn OutputSink>,
        _stop: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>> {
        Box::pin(async move {
            output.write(Stream::Stdout, command.arguments.join(" ").as_bytes());
            let sandbox = SandboxRef { id: SandboxId("fake".into()), level: Level::None };
            Ok(Exit { ended: Ended::Code(0), usage: Usage::default(), sandbox, overrun: None, denials: Vec::new() })
        })
    }
}

type Listener = Arc<dyn Fn(SandboxChange) + Send + Sync>;

/// A level without processes, whose sandboxes are made and gone when a test says so.
#[derive(Clone, Default)]
pub struct Announcer(Arc<OnceLock<Listener>>);

impl Announcer {
    /// Reports that a sandbox was made.
    pub fn made(&self, id: &str) {
        self.report(SandboxChange::Created(announced(id)));
    }

    /// Reports that a sandbox is gone.
    pub fn gone(&self, id: &str) {
        self.report(SandboxChange::Destroyed(announced(id)));
    }

    fn report(&self, change: SandboxChange) {
        self.0.get().expect("an executor listens to this level")(change);
    }
}

fn announced(id: &str) -> SandboxRef {
    SandboxRef { id: SandboxId(id.into()), level: Level::Native }
}

impl Sandbox for Announcer {
    fn level(&self) -> Level {
        Level::Native
    }

    fn execute<'a>(
        &'a self,
        _command: &'a Command,
        _confinement: &'a Confinement,
        _output: Arc<dyn OutputSink>,
        _stop: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>> {
        Box::pin(async { Err(SandboxError::creation_because("this level runs nothing")) })
    }

    fn listen(&self, listener: Listener) {
        let _ = self.0.set(listener);
    }
}
