//! The clocks of a call: the limits for waiting and running, and the attempt clock learnt from a tool's past runs.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::call::Options;
use crate::error::{CallError, Code, duration_ms};
use crate::flight::Flight;
use crate::name::ToolName;
use crate::tool::ToolSpec;

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

/// The clock that ran out, apart from the queue clock, which ends in `admit.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    Attempt,
    /// The attempt clock of a call that waits for the identical run of another call.
    Shared,
    Total,
    Silence,
}

impl Clock {
    /// Returns the error of a call that this clock ended after a while, because its limit is `limit`.
    pub(crate) fn error(self, after: Duration, limit: Duration, repeatable: bool) -> CallError {
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
                format!("the run was stopped because it gave no output and no progress for {seconds:.3} s"),
                "make the tool report progress, or allow a longer silence",
            ),
        };
        CallError::new(Code::Timeout, message)
            .suggest(suggestion)
            .retryable(repeatable)
            .detail("clock", name)
            .detail("after_ms", duration_ms(after))
            .detail("timeout_ms", duration_ms(limit))
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

    /// Waits until a clock of the run runs out. Returns that clock, the time after which it ended the run, and its
    /// limit.
    pub(crate) async fn run_out(&self, flight: &Flight, since: Instant) -> (Clock, Duration, Duration) {
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
                    if let Some(silence) = self.silence.filter(|silence| last_sign.elapsed() >= *silence) {
                        return (Clock::Silence, last_sign.elapsed(), silence);
                    }
                }
                _ => {
                    tokio::time::sleep_until(end).await;
                    let began = if clock == Clock::Total { flight.opened } else { since };
                    return (clock, end - began, end - began);
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

    // Shows: A2.1
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
