//! The circuit breaker: refuses calls of a tool for a while after it failed many times in a row.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use crate::error::{CallError, Code};
use crate::name::ToolName;

/// The rules for opening and closing a breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerPolicy {
    /// The number of failures in a row that opens the breaker; 0 switches breakers off.
    pub failures_max: u32,
    /// The time that the breaker stays open before one call may try the tool again.
    pub open_for: Duration,
}

impl Default for BreakerPolicy {
    fn default() -> Self {
        Self { failures_max: 10, open_for: Duration::from_secs(30) }
    }
}

/// The state of a breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum BreakerState {
    /// Calls pass.
    Closed {
        /// The number of failures in a row so far.
        failures: u32,
    },
    /// Calls are refused.
    Open {
        /// The time from which one call may try the tool again.
        #[serde(skip)]
        until: Instant,
    },
    /// Half open: one call tries the tool, and the others are refused.
    Trying,
}

impl BreakerState {
    /// Returns the state after a call is let through, or the time to wait if the call is refused.
    fn enter(self, now: Instant) -> Result<Self, Duration> {
        match self {
            Self::Closed { .. } => Ok(self),
            Self::Open { until } if now >= until => Ok(Self::Trying),
            Self::Open { until } => Err(until - now),
            // The outcome of the trial call decides, so other calls wait a moment.
            Self::Trying => Err(Duration::from_secs(1)),
        }
    }

    /// Returns the state after a run that failed.
    fn after_failure(self, policy: BreakerPolicy, now: Instant) -> Self {
        match self {
            Self::Closed { failures } if failures + 1 < policy.failures_max => Self::Closed { failures: failures + 1 },
            _ => Self::Open { until: now + policy.open_for },
        }
    }
}

/// The circuit breakers, one per tool.
#[derive(Debug)]
pub(crate) struct Breakers {
    policy: BreakerPolicy,
    /// The states of tools whose last run failed. All other tools are closed with no failures.
    states: Mutex<HashMap<ToolName, BreakerState>>,
    /// The number of `states`. At 0, calls skip the lock.
    count: AtomicUsize,
}

/// A guard for a call that passed a breaker and must report its outcome. Dropped without a report, it counts as no
/// evidence.
pub(crate) struct Passage<'a> {
    breakers: &'a Breakers,
    tool: &'a ToolName,
    reported: bool,
    is_trial: bool,
}

impl Breakers {
    pub(crate) fn new(policy: BreakerPolicy) -> Self {
        Self { policy, states: Mutex::new(HashMap::new()), count: AtomicUsize::new(0) }
    }

    pub(crate) fn enter<'a>(&'a self, tool: &'a ToolName) -> Result<Passage<'a>, CallError> {
        let mut is_trial = false;
        if self.any()
            && let Some(state) = self.lock().get_mut(tool)
        {
            *state = state.enter(Instant::now()).map_err(|wait| {
                CallError::new(
                    Code::CircuitOpen,
                    format!("the circuit breaker of `{tool}` is open: it failed too often in a row"),
                )
                .suggest("use another tool, or try again later")
                .after(wait)
            })?;
            is_trial = *state == BreakerState::Trying;
        }
        Ok(Passage { breakers: self, tool, reported: false, is_trial })
    }

    /// Returns the breakers that are not closed, or that count failures.
    pub(crate) fn states(&self) -> Vec<(ToolName, BreakerState)> {
        self.lock().iter().map(|(tool, state)| (tool.clone(), *state)).collect()
    }

    fn change(&self, change: impl FnOnce(&mut HashMap<ToolName, BreakerState>)) {
        let mut states = self.lock();
        change(&mut states);
        self.count.store(states.len(), Ordering::Release);
    }

    fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ToolName, BreakerState>> {
        self.states.lock().expect("no code panics while it holds the states")
    }
}

impl Passage<'_> {
    /// Reports the outcome of the run.
    pub(crate) fn report(mut self, verdict: Verdict) {
        let (breakers, policy) = (self.breakers, self.breakers.policy);
        self.reported = verdict != Verdict::Unclear;
        match verdict {
            Verdict::Works if breakers.any() => breakers.change(|states| {
                states.remove(self.tool);
            }),
            Verdict::Fails if policy.failures_max > 0 => breakers.change(|states| {
                let state = states.entry(self.tool.clone()).or_insert(BreakerState::Closed { failures: 0 });
                *state = state.after_failure(policy, Instant::now());
            }),
            Verdict::Works | Verdict::Fails | Verdict::Unclear => {}
        }
    }
}

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        // The trial call ended without a result, so the next call may try.
        if self.is_trial && !self.reported {
            let open = BreakerState::Open { until: Instant::now() };
            self.breakers.change(|states| {
                states.insert(self.tool.clone(), open);
            });
        }
    }
}

/// The evidence of one run about the tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The tool works, even if this call was wrong.
    Works,
    /// The tool is in trouble.
    Fails,
    /// The run shows neither.
    Unclear,
}

/// Returns the verdict of a run that ended with this failure, or without one.
pub(crate) fn verdict(failure: Option<&CallError>) -> Verdict {
    let Some(failure) = failure else { return Verdict::Works };
    match failure.code {
        Code::Timeout
        | Code::SandboxCreationFailed
        | Code::SandboxCrashed
        | Code::TransportFailed
        | Code::UpstreamProtocolError
        | Code::OutputSchemaMismatch
        | Code::ExecutionError => Verdict::Fails,
        Code::UpstreamApi if failure.retryable => Verdict::Fails,
        Code::Cancelled | Code::Configuration => Verdict::Unclear,
        _ => Verdict::Works,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(times: u32, breakers: &Breakers, tool: &ToolName) {
        for _ in 0..times {
            breakers.enter(tool).expect("still closed").report(Verdict::Fails);
        }
    }

    // Shows: A8
    #[tokio::test(start_paused = true)]
    async fn a_breaker_opens_after_failures_in_a_row_and_lets_one_call_try() {
        let breakers = Breakers::new(BreakerPolicy { failures_max: 3, open_for: Duration::from_secs(10) });
        let tool = ToolName::new("flaky").expect("a name");
        failing(2, &breakers, &tool);
        breakers.enter(&tool).expect("closed").report(Verdict::Works);
        failing(3, &breakers, &tool);
        let refused = breakers.enter(&tool).err().expect("open");
        assert_eq!((refused.code, refused.retry_after()), (Code::CircuitOpen, Some(Duration::from_secs(10))));

        tokio::time::advance(Duration::from_secs(10)).await;
        let trying = breakers.enter(&tool).expect("one may try");
        assert!(breakers.enter(&tool).is_err(), "and only one");
        drop(trying);
        breakers.enter(&tool).expect("the next may try where the first went away").report(Verdict::Fails);
        assert!(breakers.enter(&tool).is_err(), "it failed, so it is open again");

        tokio::time::advance(Duration::from_secs(10)).await;
        breakers.enter(&tool).expect("one may try").report(Verdict::Works);
        assert_eq!(breakers.states(), []);
    }

    #[test]
    fn a_wrong_call_does_not_count_against_the_tool() {
        assert_eq!(verdict(Some(&CallError::new(Code::NonzeroExit, ""))), Verdict::Works);
        assert_eq!(verdict(Some(&CallError::new(Code::TransportFailed, ""))), Verdict::Fails);
        assert_eq!(verdict(Some(&CallError::new(Code::Cancelled, ""))), Verdict::Unclear);
    }
}
