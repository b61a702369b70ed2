//! Rate limits and quotas: how many calls an agent, a tenant or a tool may have in some time.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Mutex;
use std::time::Duration;

use governor::clock::Clock;
use governor::middleware::NoOpMiddleware;
use governor::nanos::Nanos;
use governor::state::keyed::DashMapStateStore;
use governor::{Quota as Pace, RateLimiter};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::call::Caller;
use crate::error::{CallError, Code};
use crate::name::ToolName;

/// So many calls in so much time, counted apart for each agent, tenant or tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rate {
    /// What is counted apart.
    pub per: Per,
    /// Only calls to this tool count; all where absent.
    pub tool: Option<String>,
    /// How many calls.
    pub calls: NonZeroU32,
    /// In how much time.
    pub window: Duration,
    /// How they are counted.
    pub kind: RateKind,
}

/// What calls are counted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Per {
    /// Each agent of each tenant.
    Agent,
    /// Each tenant.
    Tenant,
    /// Each tool.
    Tool,
}

/// How calls are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RateKind {
    /// An even flow: what was used comes back bit by bit.
    Rate,
    /// An allowance: all of it comes back when the window is over.
    Quota,
}

/// All rate limits and quotas of an executor.
pub(crate) struct Rates(Vec<Limiter>);

struct Limiter {
    rate: Rate,
    counter: Counter,
}

enum Counter {
    Flow(Box<RateLimiter<String, DashMapStateStore<String>, PausableClock, NoOpMiddleware<Nanos>>>),
    Allowance(Mutex<HashMap<String, (Instant, u32)>>),
}

impl Rates {
    pub(crate) fn new(rates: Vec<Rate>) -> Self {
        let limiter = |rate: Rate| {
            let counter = match rate.kind {
                RateKind::Quota => Counter::Allowance(Mutex::default()),
                RateKind::Rate => {
                    // A window too short to divide means a rate nobody can reach.
                    let every = (rate.window / rate.calls.get()).max(Duration::from_nanos(1));
                    let pace = Pace::with_period(every).expect("it is not zero").allow_burst(rate.calls);
                    Counter::Flow(Box::new(RateLimiter::new(pace, DashMapStateStore::default(), PausableClock::new())))
                }
            };
            Limiter { rate, counter }
        };
        Self(rates.into_iter().map(limiter).collect())
    }

    /// Counts one call, or says how long to wait.
    pub(crate) fn count(&self, caller: &Caller, tool: &ToolName) -> Result<(), CallError> {
        for Limiter { rate, counter } in &self.0 {
            if rate.tool.as_ref().is_some_and(|only| only != tool.as_str()) {
                continue;
            }
            let tenant = caller.tenant.as_deref().unwrap_or_default();
            let key = match rate.per {
                Per::Agent => format!("{tenant}\0{}", caller.agent),
                Per::Tenant => tenant.to_owned(),
                Per::Tool => tool.to_string(),
            };
            counter.count(key, rate).map_err(|wait| over(rate, wait))?;
        }
        Ok(())
    }
}

impl Counter {
    fn count(&self, key: String, rate: &Rate) -> Result<(), Duration> {
        match self {
            Self::Flow(limiter) => {
                let checked = limiter.check_key(&key);
                // Keys that are as good as new need not be remembered.
                if limiter.len() > 10_000 {
                    limiter.retain_recent();
                }
                checked.map_err(|not_until| not_until.wait_time_from(limiter.clock().now()))
            }
            Self::Allowance(used) => {
                let mut used = used.lock().expect("no code panics while it holds the counts");
                let now = Instant::now();
                if used.len() > 10_000 {
                    used.retain(|_, (began, _)| now.duration_since(*began) < rate.window);
                }
                let (began, count) = used.entry(key).or_insert((now, 0));
                if now.duration_since(*began) >= rate.window {
                    (*began, *count) = (now, 0);
                }
                if *count >= rate.calls.get() {
                    return Err(rate.window - now.duration_since(*began));
                }
                *count += 1;
                Ok(())
            }
        }
    }
}

fn over(rate: &Rate, wait: Duration) -> CallError {
    let (what, kind) = match rate.kind {
        RateKind::Rate => ("rate limit", "rate"),
        RateKind::Quota => ("quota", "quota"),
    };
    let per = match rate.per {
        Per::Agent => "agent",
        Per::Tenant => "tenant",
        Per::Tool => "tool",
    };
    let only = rate.tool.as_ref().map(|tool| format!(" of `{tool}`")).unwrap_or_default();
    let message = format!("the {what} of {} calls{only} in {:?} per {per} is used up", rate.calls, rate.window);
    CallError::new(Code::RateLimited, message)
        .suggest(format!("wait {:.1} s and call again", wait.as_secs_f64()))
        .detail("kind", kind)
        .detail("per", per)
        .after(wait)
}

/// Tokio's clock, which tests can stop.
#[derive(Debug, Clone)]
struct PausableClock {
    start: Instant,
}

impl PausableClock {
    fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Clock for PausableClock {
    type Instant = Nanos;

    fn now(&self) -> Nanos {
        self.start.elapsed().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(kind: RateKind, calls: u32) -> Rates {
        let calls = NonZeroU32::new(calls).expect("not zero");
        Rates::new(vec![Rate { per: Per::Agent, tool: None, calls, window: Duration::from_secs(10), kind }])
    }

    fn counted(rates: &Rates, agent: &str) -> Result<(), Duration> {
        let tool = ToolName::new("t").expect("a name");
        rates.count(&Caller::agent(agent), &tool).map_err(|error| error.retry_after().expect("a wait"))
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_comes_back_bit_by_bit_and_apart_for_each_agent() {
        let rates = rates(RateKind::Rate, 2);
        assert_eq!([counted(&rates, "a"), counted(&rates, "a")], [Ok(()), Ok(())]);
        assert_eq!(counted(&rates, "a"), Err(Duration::from_secs(5)));
        assert_eq!(counted(&rates, "b"), Ok(()));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!([counted(&rates, "a"), counted(&rates, "a")], [Ok(()), Err(Duration::from_secs(5))]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_quota_comes_back_when_its_window_is_over() {
        let rates = rates(RateKind::Quota, 2);
        assert_eq!([counted(&rates, "a"), counted(&rates, "a")], [Ok(()), Ok(())]);
        tokio::time::advance(Duration::from_secs(6)).await;
        assert_eq!(counted(&rates, "a"), Err(Duration::from_secs(4)));
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!([counted(&rates, "a"), counted(&rates, "a")], [Ok(()), Ok(())]);
    }

    #[tokio::test(start_paused = true)]
    async fn being_over_says_which_limit_and_how_long() {
        let rates = rates(RateKind::Quota, 1);
        let tool = ToolName::new("t").expect("a name");
        let caller = Caller::agent("a");
        rates.count(&caller, &tool).expect("the first");
        let error = rates.count(&caller, &tool).expect_err("the second");
        assert_eq!(
            (error.code, error.message.as_str(), error.retryable),
            (Code::RateLimited, "the quota of 1 calls in 10s per agent is used up", true)
        );
    }
}
