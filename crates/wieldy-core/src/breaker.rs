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

    /// Returns the state after a run that succeeded or failed.
    fn after(self, went_well: bool, policy: BreakerPolicy, now: Instant) -> Self {
        match (self, went_well) {
            (_, true) => Self::Closed { failures: 0 },
            (Self::Closed { failures }, false) if failures + 1 < policy.failures_max => {
                Self::Closed { failures: failures + 1 }
            }
            (_, false) => Self::Open { until: now + policy.open_for },
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
    told: bool,
    tries: bool,
}

impl Breakers {
    pub(crate) fn new(policy: BreakerPolicy) -> Self {
        Self { policy, states: Mutex::new(HashMap::new()), count: AtomicUsize::new(0) }
    }

    pub(crate) fn enter<'a>(&'a self, tool: &'a ToolName) -> Result<Passage<'a>, CallError> {
        let mut tries = false;
        if self.any()
            && let Some(state) = self.lock().get_mut(tool)
        {
            *state = state.enter(Instant::now()).map_err(|wait| {
                CallError::new(
                    Code::CircuitOpen,
                    format!("`{tool}` failed too often in a row and is left alone for a while"),
                )
                .suggest("use another tool, or try again later")
                .after(wait)
            })?;
            tries = *state == BreakerState::Trying;
        }
        Ok(Passage { breakers: self, tool, told: false, tries })
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
    /// Reports the outcome: `Some(true)` if the tool works, `Some(false)` if it is in trouble, `None` if the run shows
    /// neither.
    pub(crate) fn tell(mut self, went_well: Option<bool>) {
        let Some(went_well) = went_well else { return };
        self.told = true;
        let (breakers, policy) = (self.breakers, self.breakers.policy);
        if went_well {
            if breakers.any() {
                breakers.change(|states| {
                    states.remove(self.tool);
                });
            }
        } else if policy.failures_max > 0 {
            breakers.change(|states| {
                let state = states.entry(self.tool.clone()).or_insert(BreakerState::Closed { failures: 0 });
                *state = state.after(false, policy, Instant::now());
            });
        }
    }
}

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        // The trial call ended without a result, so the next call may try.
        if self.tries && !self.told {
            let open = BreakerState::Open { until: Instant::now() };
            self.breakers.change(|states| {
                states.insert(self.tool.clone(), open);
            });
        }
    }
}

/// Returns the verdict of a run on the tool: false if the tool is in trouble, true if it works (even if this call was
/// wrong), `None` if the run shows neither.
pub(crate) fn verdict(failure: Option<&CallError>) -> Option<bool> {
    match failure.map(|error| error.code) {
        None => Some(true),
        Some(
            Code::Timeout
            | Code::SandboxCreationFailed
            | Code::SandboxCrashed
            | Code::TransportFailed
            | Code::UpstreamProtocolError
            | Code::OutputSchemaMismatch
            | Code::ExecutionError,
        ) => Some(false),
        Some(Code::UpstreamApi) => Some(!failure.is_some_and(|error| error.retryable)),
        Some(Code::Cancelled | Code::Configuration) => None,
        Some(_) => Some(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(times: u32, breakers: &Breakers, tool: &ToolName) {
        for _ in 0..times {
            breakers.enter(tool).expect("still closed").tell(Some(false));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_tool_that_fails_in_a_row_is_left_alone_and_tried_by_one() {
        let breakers = Breakers::new(BreakerPolicy { failures_max: 3, open_for: Duration::from_secs(10) });
        let tool = ToolName::new("flaky").expect("a name");
        failing(2, &breakers, &tool);
        breakers.enter(&tool).expect("closed").tell(Some(true));
        failing(3, &breakers, &tool);
        let refused = breakers.enter(&tool).err().expect("open");
        assert_eq!((refused.code, refused.retry_after()), (Code::CircuitOpen, Some(Duration::from_secs(10))));

        tokio::time::advance(Duration::from_secs(10)).await;
        let trying = breakers.enter(&tool).expect("one may try");
        assert!(breakers.enter(&tool).is_err(), "and only one");
        drop(trying);
        breakers.enter(&tool).expect("the next may try where the first went away").tell(Some(false));
        assert!(breakers.enter(&tool).is_err(), "it failed, so it is open again");

        tokio::time::advance(Duration::from_secs(10)).await;
        breakers.enter(&tool).expect("one may try").tell(Some(true));
        assert_eq!(breakers.states(), []);
    }

    #[test]
    fn a_wrong_call_says_nothing_bad_about_the_tool() {
        assert_eq!(verdict(Some(&CallError::new(Code::NonzeroExit, ""))), Some(true));
        assert_eq!(verdict(Some(&CallError::new(Code::TransportFailed, ""))), Some(false));
        assert_eq!(verdict(Some(&CallError::new(Code::Cancelled, ""))), None);
    }
}
