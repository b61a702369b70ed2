//! The circuit breaker: a tool that fails again and again is left alone for a while.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use crate::error::{CallError, Code};
use crate::name::ToolName;

/// When a breaker opens and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerPolicy {
    /// How many failures in a row open it; 0 switches breakers off.
    pub failures_max: u32,
    /// How long the tool is left alone before one call may try again.
    pub open_for: Duration,
}

impl Default for BreakerPolicy {
    fn default() -> Self {
        Self { failures_max: 10, open_for: Duration::from_secs(30) }
    }
}

/// How a breaker stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum BreakerState {
    /// Calls go through.
    Closed {
        /// Failures in a row so far.
        failures: u32,
    },
    /// Calls are refused.
    Open {
        /// Until when.
        #[serde(skip)]
        until: Instant,
    },
    /// One call tries whether the tool works again.
    Trying,
}

impl BreakerState {
    /// Whether a call may go through now, and how the breaker stands then; or how long to wait.
    fn enter(self, now: Instant) -> Result<Self, Duration> {
        match self {
            Self::Closed { .. } => Ok(self),
            Self::Open { until } if now >= until => Ok(Self::Trying),
            Self::Open { until } => Err(until - now),
            // The one that tries will tell; meanwhile nobody else needs to find out.
            Self::Trying => Err(Duration::from_secs(1)),
        }
    }

    /// How the breaker stands after a call that went well, or did not.
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

/// A breaker per tool.
#[derive(Debug)]
pub(crate) struct Breakers {
    policy: BreakerPolicy,
    /// Only tools that failed last; the others are closed without a failure.
    states: Mutex<HashMap<ToolName, BreakerState>>,
    /// How many these are: while there are none, nobody needs to look.
    count: AtomicUsize,
}

/// A call that went through a breaker and must tell how it went; dropped without a word, it counts as nothing learnt.
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

    /// The breakers that are not closed or have failures to remember.
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
    /// Tells how the run went: `Some(false)` where the tool itself is in trouble, `None` where nothing was learnt.
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
        // The one that tried went away without an answer: the next one may try.
        if self.tries && !self.told {
            let open = BreakerState::Open { until: Instant::now() };
            self.breakers.change(|states| {
                states.insert(self.tool.clone(), open);
            });
        }
    }
}

/// What a failure says about the tool: in trouble, or fine and only this call was wrong.
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
