//! Runs one attempt under the four clocks of its call, and decides if and when another attempt follows.

use std::collections::HashMap;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use serde::Serialize;
use tokio::time::Instant;

use crate::admit::Slot;
use crate::call::{Content, Options};
use crate::error::{CallError, Code, duration_ms};
use crate::flight::Flight;
use crate::input::Input;
use crate::name::ToolName;
use crate::outcome::{Outcome, RunError};
use crate::policy::Grant;
use crate::run::Run;
use crate::tool::{Annotations, AnyTool, ToolSpec};

/// The time that one run may take if neither call, tool nor settings say otherwise.
pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// The longest that one run may take.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The four clocks of a call, resolved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clocks {
    /// The longest wait for a slot.
    pub(crate) queue: Duration,
    /// The longest duration of one run.
    pub(crate) attempt: Duration,
    /// The time at which the caller stops waiting.
    pub(crate) deadline: Option<Instant>,
    /// The longest time that a run may produce no output and no progress.
    pub(crate) silence: Option<Duration>,
}

/// The clock that ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    Attempt,
    /// The attempt clock of a call that waits for the identical run of another call.
    Shared,
    Total,
    Silence,
}

impl Clock {
    pub(crate) fn error(self, after: Duration, repeatable: bool) -> CallError {
        let seconds = after.as_secs_f64();
        let (name, message, suggestion) = match self {
            Self::Attempt => (
                "attempt",
                format!("the run was stopped after {seconds:.3} s"),
                "give it more time, or ask for less at once",
            ),
            Self::Shared => (
                "attempt",
                format!("the same call runs already, and did not end within {seconds:.3} s"),
                "call it again later to get its result, or give it more time",
            ),
            Self::Total => (
                "total",
                format!("the caller's deadline passed after {seconds:.3} s"),
                "set a later deadline, or ask for less at once",
            ),
            Self::Silence => (
                "silence",
                format!("the run was stopped because it showed no sign of life for {seconds:.3} s"),
                "make the tool report progress, or allow a longer silence",
            ),
        };
        CallError::new(Code::Timeout, message)
            .suggest(suggestion)
            .retryable(repeatable)
            .detail("clock", name)
            .detail("after_ms", duration_ms(after))
    }
}

impl Clocks {
    /// Resolves the clocks. The attempt clock is the first of: the call's, the user's setting for the tool, the learnt
    /// one, the tool's own, the executor's default. The tool's maximum caps it.
    pub(crate) fn new(
        options: &Options,
        spec: &ToolSpec,
        defaults: &ClockDefaults,
        learnt: Option<Duration>,
        opened: Instant,
    ) -> Self {
        let constraints = &spec.constraints;
        let timeout_max = constraints.timeout_max.unwrap_or(TIMEOUT_MAX).min(TIMEOUT_MAX);
        let by_setting = || defaults.timeouts.get(&spec.name).copied();
        let attempt =
            options.timeout.or_else(by_setting).or(learnt).or(constraints.timeout).unwrap_or(defaults.timeout);
        Self {
            queue: options.queue_timeout.unwrap_or(defaults.queue).min(TIMEOUT_MAX),
            attempt: attempt.min(timeout_max),
            deadline: options.deadline.map(|deadline| opened + deadline.min(TIMEOUT_MAX)),
            silence: options.silence.or(constraints.silence).map(|silence| silence.min(TIMEOUT_MAX)),
        }
    }

    /// Returns the time at which a call that began to wait at `since` must stop waiting.
    pub(crate) fn queue_end(&self, since: Instant) -> Instant {
        let end = since + self.queue;
        self.deadline.map_or(end, |deadline| end.min(deadline))
    }

    /// Waits until a clock of the run runs out, and returns that clock.
    async fn run_out(&self, flight: &Flight, since: Instant) -> (Clock, Duration) {
        let attempt_end = since + self.attempt;
        let (end, clock) = match self.deadline {
            Some(deadline) if deadline < attempt_end => (deadline, Clock::Total),
            _ => (attempt_end, Clock::Attempt),
        };
        loop {
            let quiet_until = self.silence.map(|silence| flight.last_sign_of_life().max(since) + silence);
            match quiet_until {
                Some(quiet_until) if quiet_until < end => {
                    tokio::time::sleep_until(quiet_until).await;
                    let last_sign = flight.last_sign_of_life().max(since);
                    if Some(last_sign.elapsed()) >= self.silence {
                        return (Clock::Silence, last_sign.elapsed());
                    }
                }
                _ => {
                    tokio::time::sleep_until(end).await;
                    let began = if clock == Clock::Total { flight.opened } else { since };
                    return (clock, end - began);
                }
            }
        }
    }
}

/// The clocks for calls that set none.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClockDefaults {
    pub(crate) timeout: Duration,
    pub(crate) queue: Duration,
    /// The user's own timeouts, by tool.
    pub(crate) timeouts: HashMap<String, Duration>,
}

/// The result of one attempt.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The outcome to return. If the attempt failed, the failure is in it.
    pub(crate) outcome: Box<Outcome>,
    /// True if the run may have changed something.
    pub(crate) effect_possible: bool,
}

impl Ended {
    fn failed(error: CallError, effect_possible: bool) -> Self {
        Self { outcome: Box::new(Outcome::default().failed(error)), effect_possible }
    }
}

/// The proofs that running a tool requires, all of one call.
pub(crate) struct Ready<'a> {
    input: &'a Input,
    _slot: &'a Slot,
}

impl<'a> Ready<'a> {
    /// Combines the proofs. Panics if they belong to different calls: such a bug must not run anything.
    pub(crate) fn new(grant: &Grant, input: &'a Input, slot: &'a Slot) -> Self {
        assert_eq!(grant.execution(), input.execution(), "a proof belongs to one call");
        assert_eq!(grant.execution(), slot.execution(), "a proof belongs to one call");
        Self { input, _slot: slot }
    }
}

/// Runs the tool once under its clocks. The run is over when this returns, however it ended.
pub(crate) async fn attempt(
    ready: Ready<'_>,
    tool: &dyn AnyTool,
    annotations: Annotations,
    run: &Run,
    flight: &Flight,
    clocks: &Clocks,
) -> Ended {
    let input = ready.input;
    let since = Instant::now();
    // The call of `run` is inside the async block, so that its panics are caught too.
    let work = AssertUnwindSafe(async { tool.run(input, run).await.map(Box::new) }).catch_unwind();
    tokio::pin!(work);
    let (answer, cut_short) = tokio::select! {
        biased;
        done = &mut work => match flight.cancelled() {
            None => {
                run.show_rest();
                return answered(done);
            }
            // The tool saw the cancellation at the same time, so its answer may be incomplete.
            Some(cause) => (Some(done), cause.error()),
        },
        error = flight.stopped() => (None, error),
        (clock, after) = clocks.run_out(flight, since) => (None, clock.error(after, annotations.repeatable())),
    };
    // Ask the tool to stop, and give it time to end its processes. After that, it is dropped.
    run.stop().cancel();
    let patience = run.confinement().grace.saturating_add(Duration::from_secs(2));
    let late = match answer {
        Some(done) => Some(done),
        None => tokio::time::timeout(patience, &mut work).await.ok(),
    };
    run.show_rest();
    // A tool that reports that it had not started may be retried, even if it is not idempotent.
    let effect_possible = !matches!(late, Some(Ok(Err(RunError { effect_possible: false, .. }))));
    let is_late = cut_short.code == Code::Timeout;
    let mut cut_short = if is_late && !effect_possible { cut_short.retryable(true) } else { cut_short };
    let so_far = match late {
        Some(Ok(Ok(outcome))) if !outcome.content.is_empty() || outcome.usage.is_some() => *outcome,
        // An artifact store is foreign code: if it panics, its output is lost but the call goes on.
        _ => std::panic::catch_unwind(AssertUnwindSafe(|| run.captured())).unwrap_or_default(),
    };
    if let Some(limit) = so_far.failure.as_ref().filter(|error| is_late && error.code == Code::ResourceLimitExceeded) {
        // A run that hit a resource limit often hangs, so report the limit with the timeout.
        cut_short.message = format!("{}, and {}", cut_short.message, limit.message);
        cut_short.details.extend((*limit.details).clone());
    }
    let content =
        so_far.content.into_iter().filter(|block| !matches!(block, Content::Text { text } if text.is_empty()));
    let outcome = Outcome { content: content.collect(), partial: true, ..so_far };
    Ended { outcome: Box::new(outcome.failed(cut_short)), effect_possible }
}

type Done = Result<Result<Box<Outcome>, RunError>, Box<dyn std::any::Any + Send>>;

fn answered(done: Done) -> Ended {
    match done {
        Ok(Ok(outcome)) => Ended { outcome, effect_possible: true },
        Ok(Err(RunError { error, effect_possible })) => Ended::failed(*error, effect_possible),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into());
            let error = CallError::new(Code::ExecutionError, "the tool panicked").detail("panic", text);
            Ended::failed(error.suggest("this is a bug in the tool; report it, and do not repeat the call"), true)
        }
    }
}

/// The rules for retrying failed runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RetryPolicy {
    /// The number of retries after the first run.
    pub retries: u32,
    /// The delay before the first retry.
    #[serde(rename = "base_ms", with = "crate::duration::plain")]
    pub base: Duration,
    /// The longest delay.
    #[serde(rename = "cap_ms", with = "crate::duration::plain")]
    pub cap: Duration,
    /// The growth of delays.
    pub backoff: Backoff,
}

/// The growth of delays from one retry to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Backoff {
    /// Doubles each time, minus a random part of up to one half, so that many callers do not retry at the same moment.
    Exponential,
    /// The base times one, two, three, and so on.
    Linear,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { retries: 2, base: Duration::from_secs(1), cap: Duration::from_secs(30), backoff: Backoff::Exponential }
    }
}

impl RetryPolicy {
    /// The policy without any retry.
    pub const NEVER: Self = Self { retries: 0, base: Duration::ZERO, cap: Duration::ZERO, backoff: Backoff::Linear };

    /// Returns the delay before attempt `next` (2 or more). `chance`, from 0 to 1, sets the random part.
    pub fn delay(&self, next: u32, chance: f64) -> Duration {
        let repetition = next.saturating_sub(1).max(1);
        match self.backoff {
            Backoff::Linear => self.base.saturating_mul(repetition).min(self.cap),
            Backoff::Exponential => {
                let doubled =
                    self.base.saturating_mul(1_u32.checked_shl(repetition - 1).unwrap_or(u32::MAX)).min(self.cap);
                doubled - (doubled / 2).mul_f64(chance.clamp(0.0, 1.0))
            }
        }
    }
}

/// The caller's predicate for errors that are worth a retry.
#[derive(Clone)]
pub struct RetryIf(Arc<dyn Fn(&CallError) -> bool + Send + Sync>);

impl RetryIf {
    /// Creates the predicate. `worth` is asked only about errors that are safe to retry.
    pub fn new(worth: impl Fn(&CallError) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(worth))
    }
}

impl fmt::Debug for RetryIf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RetryIf")
    }
}

/// Returns the delay before the next attempt, or `None` if no attempt may follow.
pub(crate) fn next_delay(
    policy: &RetryPolicy,
    options: &Options,
    error: &CallError,
    repeatable: bool,
    attempt: u32,
    deadline: Option<Instant>,
) -> Option<Duration> {
    // A run that may have had an effect is never repeated, even if the caller asks for it.
    if !repeatable || attempt > policy.retries || matches!(error.code, Code::Cancelled) {
        return None;
    }
    // A panic of the predicate means no.
    let worth = match &options.retry_if {
        Some(RetryIf(worth)) => std::panic::catch_unwind(AssertUnwindSafe(|| worth(error))).unwrap_or(false),
        None => error.retryable,
    };
    let delay = policy.delay(attempt + 1, fastrand::f64());
    let delay = error.retry_after().map_or(delay, |asked| asked.max(delay));
    // Do not wait past the deadline or, without one, for longer than the longest possible run.
    let left = deadline.map_or(TIMEOUT_MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
    (worth && delay < left).then_some(delay)
}

/// The durations of a tool's past runs, used to set its attempt clock. Only runs that ended by themselves count.
#[derive(Debug)]
pub(crate) struct Timings {
    policy: DynamicTimeout,
    runs: Mutex<HashMap<ToolName, Vec<Duration>>>,
}

/// The rules that derive a tool's attempt clock from its past runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamicTimeout {
    /// The number of finished runs needed before the clock is derived.
    pub runs_min: usize,
    /// The multiple of the 99th percentile that a run may take.
    pub factor: f64,
    /// The shortest derived clock.
    pub at_least: Duration,
    /// The longest derived clock.
    pub at_most: Duration,
}

impl Default for DynamicTimeout {
    fn default() -> Self {
        Self { runs_min: 20, factor: 3.0, at_least: Duration::from_secs(1), at_most: Duration::from_secs(600) }
    }
}

impl Timings {
    const RUNS_KEPT: usize = 128;

    pub(crate) fn new(policy: DynamicTimeout, known: &HashMap<String, Vec<Duration>>) -> Self {
        let timings = Self { policy, runs: Mutex::default() };
        for (tool, durations) in known {
            let Ok(tool) = ToolName::new(tool) else { continue };
            durations.iter().for_each(|took| timings.learn(&tool, *took));
        }
        timings
    }

    pub(crate) fn learn(&self, tool: &ToolName, took: Duration) {
        let mut runs = self.runs.lock().expect("no code panics while it holds the runs");
        let runs = runs.entry(tool.clone()).or_default();
        if runs.len() == Self::RUNS_KEPT {
            runs.remove(0);
        }
        runs.push(took);
    }

    /// Returns the attempt clock derived from the tool's past runs, if there are enough.
    pub(crate) fn timeout(&self, tool: &ToolName) -> Option<Duration> {
        let runs = self.runs.lock().expect("no code panics while it holds the runs");
        let mut runs = runs.get(tool).filter(|runs| runs.len() >= self.policy.runs_min)?.clone();
        runs.sort_unstable();
        let slow = runs.get((runs.len() * 99 / 100).min(runs.len().saturating_sub(1)))?;
        let DynamicTimeout { factor, at_least, at_most, .. } = self.policy;
        // A factor that gives no valid duration (negative, NaN, too large) falls back to the upper bound.
        let wanted = Duration::try_from_secs_f64(slow.as_secs_f64() * factor).unwrap_or(at_most);
        Some(wanted.min(at_most).max(at_least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn trap_the_exponential_backoff_really_is() {
        let policy = RetryPolicy { retries: 9, base: SECOND, cap: 20 * SECOND, backoff: Backoff::Exponential };
        let longest: Vec<_> = (2..8).map(|next| policy.delay(next, 0.0).as_secs()).collect();
        assert_eq!(longest, [1, 2, 4, 8, 16, 20]);
        assert_eq!(policy.delay(4, 1.0), 2 * SECOND, "jitter takes away up to a half");
        assert_eq!(policy.delay(u32::MAX, 0.0), 20 * SECOND);
        let linear = RetryPolicy { backoff: Backoff::Linear, ..policy };
        assert_eq!((2..6).map(|next| linear.delay(next, 0.7).as_secs()).collect::<Vec<_>>(), [1, 2, 3, 4]);
    }

    #[test]
    fn the_attempt_clock_is_resolved_in_order_and_capped() {
        let mut defaults = ClockDefaults { timeout: 30 * SECOND, queue: SECOND, timeouts: HashMap::new() };
        let mut spec = ToolSpec::new("t", "").timeout(10 * SECOND);
        let wound = |options: &Options, spec: &ToolSpec, defaults: &ClockDefaults| {
            Clocks::new(options, spec, defaults, None, Instant::now()).attempt.as_secs()
        };
        let plain = Options::default();
        assert_eq!(wound(&plain, &ToolSpec::new("t", ""), &defaults), 30, "the executor's default");
        assert_eq!(wound(&plain, &spec, &defaults), 10, "the tool's own");
        defaults.timeouts.insert("t".into(), 7 * SECOND);
        assert_eq!(wound(&plain, &spec, &defaults), 7, "the user's setting for the tool");
        let asked = Options { timeout: Some(Duration::MAX), ..plain };
        assert_eq!(wound(&asked, &spec, &defaults), TIMEOUT_MAX.as_secs(), "never more than a day");
        spec.constraints.timeout_max = Some(20 * SECOND);
        assert_eq!(wound(&asked, &spec, &defaults), 20, "the call's, capped by the tool's maximum");
    }

    #[test]
    fn a_dynamic_timeout_needs_history_and_has_bounds() {
        let timings = Timings::new(
            DynamicTimeout { runs_min: 3, factor: 2.0, at_least: SECOND, at_most: 10 * SECOND },
            &HashMap::new(),
        );
        let tool = ToolName::new("t").expect("a name");
        timings.learn(&tool, 2 * SECOND);
        timings.learn(&tool, 3 * SECOND);
        assert_eq!(timings.timeout(&tool), None);
        timings.learn(&tool, 2 * SECOND);
        assert_eq!(timings.timeout(&tool), Some(6 * SECOND));
        timings.learn(&tool, 100 * SECOND);
        assert_eq!(timings.timeout(&tool), Some(10 * SECOND));
        for _ in 0..200 {
            timings.learn(&tool, Duration::from_millis(1));
        }
        assert_eq!(timings.timeout(&tool), Some(SECOND));
    }
}
