//! Rate limits and quotas: bounds the calls of an agent, a tenant or a tool in a time window.
//!
//! A call counts against all limits that apply to it or, if one of them refuses it, against none. So all limits are
//! checked under one lock before the first one counts.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Mutex;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::call::Caller;
use crate::error::{CallError, Code};
use crate::name::ToolName;

/// A limit of calls per time window, counted separately for each agent, tenant or tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rate {
    /// The unit that is counted separately.
    pub per: Per,
    /// The only tool whose calls count; all tools if `None`.
    pub tool: Option<String>,
    /// Maximum number of calls in a window.
    pub calls: NonZeroU32,
    /// The length of the window.
    pub window: Duration,
    /// The way of counting.
    pub kind: RateKind,
}

/// The unit for which calls are counted separately.
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

/// The way in which calls are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RateKind {
    /// An even flow: used calls come back bit by bit.
    Rate,
    /// An allowance: all calls come back when the window ends.
    Quota,
}

/// All rate limits and quotas of an executor.
pub(crate) struct Rates {
    rates: Vec<Rate>,
    /// The counts of each limit.
    counts: Mutex<Vec<RateCounts>>,
}

/// The counts of one limit, separate for each key. An absent key has used nothing.
#[derive(Default)]
struct RateCounts {
    used: HashMap<String, KeyUsage>,
    /// The number of keys above which expired keys are removed.
    sweep_at: usize,
}

/// The usage of one key.
#[derive(Clone, Copy)]
struct KeyUsage {
    /// For a rate: the time at which everything has come back. For a quota: the end of its window.
    until: Instant,
    /// For a quota: the number of calls in the window.
    calls: u32,
}

impl Rates {
    pub(crate) fn new(rates: Vec<Rate>) -> Self {
        let counts = rates.iter().map(|_| RateCounts::default()).collect();
        Self { rates, counts: Mutex::new(counts) }
    }

    /// Counts one call, or returns an error with the time to wait. A refused call counts nowhere.
    pub(crate) fn count(&self, caller: &Caller, tool: &ToolName) -> Result<(), CallError> {
        if self.rates.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let mut counts = self.counts.lock().expect("no code panics while it holds the counts");
        let mut counted = Vec::with_capacity(self.rates.len());
        let mut refused: Option<(&Rate, Duration)> = None;
        for (place, rate) in self.rates.iter().enumerate().filter(|(_, rate)| rate.holds_for(tool)) {
            let key = rate.key(caller, tool);
            match rate.after_one_more(counts[place].used.get(&key).copied(), now) {
                Ok(used) => counted.push((place, key, used)),
                // Report the longest wait: after it, all limits allow the call.
                Err(wait) if refused.is_none_or(|(_, longest)| wait > longest) => refused = Some((rate, wait)),
                Err(_) => {}
            }
        }
        if let Some((rate, wait)) = refused {
            return Err(rate_error(rate, wait));
        }
        for (place, key, used) in counted {
            counts[place].set(key, used, now);
        }
        Ok(())
    }
}

impl RateCounts {
    fn set(&mut self, key: String, used: KeyUsage, now: Instant) {
        const KEYS_MIN: usize = 10_000;
        self.used.insert(key, used);
        // An expired key is the same as an absent one.
        if self.used.len() > self.sweep_at.max(KEYS_MIN) {
            self.used.retain(|_, used| used.until > now);
            self.sweep_at = self.used.len() * 2;
        }
    }
}

impl Rate {
    fn holds_for(&self, tool: &ToolName) -> bool {
        self.tool.as_ref().is_none_or(|only| only == tool.as_str())
    }

    fn key(&self, caller: &Caller, tool: &ToolName) -> String {
        let tenant = caller.tenant.as_deref().unwrap_or_default();
        match self.per {
            Per::Agent => format!("{tenant}\0{}", caller.agent),
            Per::Tenant => tenant.to_owned(),
            Per::Tool => tool.to_string(),
        }
    }

    /// Returns the usage of a key after one more call now, or the time which that call has to wait.
    fn after_one_more(&self, used: Option<KeyUsage>, now: Instant) -> Result<KeyUsage, Duration> {
        let used = used.filter(|used| used.until > now).unwrap_or(KeyUsage { until: now, calls: 0 });
        match self.kind {
            RateKind::Rate => {
                // The generic cell rate algorithm: each call takes its share of the window, and the sum of the shares
                // may not reach beyond the window's end. If the window is too short to divide, no caller can reach the
                // rate.
                let share = (self.window / self.calls.get()).max(Duration::from_nanos(1));
                let until = used.until + share;
                let wait = until.duration_since(now).saturating_sub(share * self.calls.get());
                if wait.is_zero() { Ok(KeyUsage { until, ..used }) } else { Err(wait) }
            }
            RateKind::Quota if used.calls == 0 => Ok(KeyUsage { until: now + self.window, calls: 1 }),
            RateKind::Quota if used.calls < self.calls.get() => Ok(KeyUsage { calls: used.calls + 1, ..used }),
            RateKind::Quota => Err(used.until.duration_since(now)),
        }
    }
}

fn rate_error(rate: &Rate, wait: Duration) -> CallError {
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

    // Shows: A10
    #[tokio::test(start_paused = true)]
    async fn a_rate_comes_back_bit_by_bit_and_apart_for_each_agent() {
        let rates = rates(RateKind::Rate, 2);
        assert_eq!([counted(&rates, "a"), counted(&rates, "a")], [Ok(()), Ok(())]);
        assert_eq!(counted(&rates, "a"), Err(Duration::from_secs(5)));
        assert_eq!(counted(&rates, "b"), Ok(()));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!([counted(&rates, "a"), counted(&rates, "a")], [Ok(()), Err(Duration::from_secs(5))]);
    }

    // Shows: A10
    #[tokio::test(start_paused = true)]
    async fn a_quota_comes_back_when_its_window_is_over() {
        let rates = rates(RateKind::Quota, 2);
        assert_eq!([counted(&rates, "a"), counted(&rates, "a")], [Ok(()), Ok(())]);
        tokio::time::advance(Duration::from_secs(6)).await;
        assert_eq!(counted(&rates, "a"), Err(Duration::from_secs(4)));
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!([counted(&rates, "a"), counted(&rates, "a")], [Ok(()), Ok(())]);
    }

    // Shows: A10
    #[tokio::test(start_paused = true)]
    async fn the_agents_of_a_tenant_share_its_rate_and_other_tenants_have_their_own() {
        let once = Rate {
            per: Per::Tenant,
            tool: None,
            calls: NonZeroU32::MIN,
            window: Duration::from_secs(10),
            kind: RateKind::Rate,
        };
        let rates = Rates::new(vec![once]);
        let tool = ToolName::new("t").expect("a name");
        let counted = |agent: &str, tenant: &str| {
            let caller = Caller { tenant: Some(tenant.to_owned()), ..Caller::agent(agent) };
            rates.count(&caller, &tool).map_err(|error| error.message)
        };
        assert_eq!(counted("ada", "acme"), Ok(()));
        let used_up = "the rate limit of 1 calls in 10s per tenant is used up".to_owned();
        assert_eq!(counted("bob", "acme"), Err(used_up));
        assert_eq!(counted("ada", "other"), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn an_exceeded_rate_names_the_limit() {
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

    #[tokio::test(start_paused = true)]
    async fn a_call_that_one_limit_refuses_is_counted_by_none() {
        for kind in [RateKind::Rate, RateKind::Quota] {
            let rate = |tool: Option<&str>, calls, kind| Rate {
                per: Per::Agent,
                tool: tool.map(str::to_owned),
                calls: NonZeroU32::new(calls).expect("not zero"),
                window: Duration::from_secs(10),
                kind,
            };
            // The wider limits come before and after the narrow one that refuses.
            let rates = Rates::new(vec![rate(None, 3, kind), rate(Some("t"), 1, RateKind::Quota), rate(None, 3, kind)]);
            let count = |tool: &str| {
                let error = rates.count(&Caller::agent("a"), &ToolName::new(tool).expect("a name")).err()?;
                Some(error.message)
            };
            assert_eq!(count("t"), None);
            for _ in 0..5 {
                assert_eq!(count("t").as_deref(), Some("the quota of 1 calls of `t` in 10s per agent is used up"));
            }
            assert_eq!([count("other"), count("other")], [None, None], "two of three are left, with {kind:?}");
            assert!(count("other").is_some());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_wait_of_all_refusing_limits_is_reported() {
        let rate = |window| Rate {
            per: Per::Agent,
            tool: None,
            calls: NonZeroU32::MIN,
            window: Duration::from_secs(window),
            kind: RateKind::Quota,
        };
        let rates = Rates::new(vec![rate(5), rate(60), rate(20)]);
        assert_eq!([counted(&rates, "a"), counted(&rates, "a")], [Ok(()), Err(Duration::from_secs(60))]);
    }

    #[tokio::test(start_paused = true)]
    async fn expired_keys_are_removed() {
        let rates = rates(RateKind::Rate, 2);
        let count = |range: std::ops::Range<u32>| range.map(|n| counted(&rates, &n.to_string())).all(|c| c.is_ok());
        assert!(count(0..10_000));
        tokio::time::advance(Duration::from_secs(6)).await;
        assert!(count(10_000..10_001));
        assert_eq!(rates.counts.lock().expect("whole")[0].used.len(), 1);
    }
}
