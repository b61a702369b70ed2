//! Runs one attempt under the clocks of its call, and decides if and when another attempt follows.

use std::fmt;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::admit::Slot;
use crate::call::{Content, Options};
use crate::clock::{Clocks, TIMEOUT_MAX};
use crate::error::{CallError, Code};
use crate::flight::Flight;
use crate::input::Input;
use crate::outcome::{Outcome, RunError};
use crate::policy::Grant;
use crate::run::Run;
use crate::tool::{Annotations, AnyTool};
use crate::trace;

/// The result of one attempt.
#[derive(Debug)]
pub(crate) struct AttemptResult {
    /// The outcome to return. If the attempt failed, the failure is in it.
    pub(crate) outcome: Box<Outcome>,
    /// True if the run may have changed something.
    pub(crate) effect_possible: bool,
}

impl AttemptResult {
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
) -> AttemptResult {
    let input = ready.input;
    let since = Instant::now();
    // The call of `run` is inside the async block, so that its panics are caught too.
    let mut work = pin!(async { tool.run(input, run).await.map(Box::new) });
    let polled = poll_fn(|context| {
        trace::forget_place();
        work.as_mut().poll(context)
    });
    let work = AssertUnwindSafe(polled).catch_unwind();
    tokio::pin!(work);
    let (answer, cut_short) = tokio::select! {
        biased;
        done = &mut work => match flight.cancelled() {
            None => {
                run.show_rest();
                return result_of(done);
            }
            // The tool saw the cancellation at the same time, so its answer may be incomplete.
            Some(cause) => (Some(done), cause.error()),
        },
        error = flight.wait_until_cancelled() => (None, error),
        (clock, after, limit) = clocks.run_out(flight, since) => {
            (None, clock.error(after, limit, annotations.repeatable()))
        }
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
    AttemptResult { outcome: Box::new(outcome.failed(cut_short)), effect_possible }
}

type CaughtRun = Result<Result<Box<Outcome>, RunError>, Box<dyn std::any::Any + Send>>;

fn result_of(done: CaughtRun) -> AttemptResult {
    match done {
        Ok(Ok(outcome)) => AttemptResult { outcome, effect_possible: true },
        Ok(Err(RunError { error, effect_possible })) => AttemptResult::failed(*error, effect_possible),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into());
            let mut error = CallError::new(Code::ExecutionError, "the tool panicked").detail("panic", text);
            error.trace = trace::take_place();
            AttemptResult::failed(
                error.suggest("this is a bug in the tool; report it, and do not repeat the call"),
                true,
            )
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backoff {
    /// Doubles each time, minus a random part of up to one half, so that many callers do not retry at the same moment.
    Exponential,
    /// The base times one, two, three, and so on.
    Linear,
}

impl FromStr for Backoff {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "exponential" => Ok(Self::Exponential),
            "linear" => Ok(Self::Linear),
            other => Err(format!("`{other}` is not `exponential` or `linear`")),
        }
    }
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
pub(crate) fn delay_if_repeatable(
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

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    // Shows: A3.1
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
}
