//! The ordering of a batch, the number of its calls that run at once, and the limit that holds it below the number
//! asked for.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::batch::Batch;
use crate::build::Inner;
use crate::policy::Plan;
use crate::registry::Registered;

/// The ordering of a batch's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchMode {
    /// Concurrent, except that conflicting calls keep their order.
    #[default]
    Smart,
    /// Concurrent, even if calls conflict.
    Parallel,
    /// One after the other.
    Sequential,
}

impl std::str::FromStr for BatchMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "smart" => Ok(Self::Smart),
            "parallel" => Ok(Self::Parallel),
            "sequential" => Ok(Self::Sequential),
            other => Err(format!("`{other}` is not `smart`, `parallel` or `sequential`")),
        }
    }
}

/// The limit that holds fewer calls of a batch at once than were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConcurrencyLimit {
    /// [`Plan::parallel_max`] of the caller's plan.
    PlanParallelMax,
    /// [`Plan::slots`] of the caller's plan.
    PlanSlots,
    /// [`Limits::calls_running_per_agent_max`](crate::Limits::calls_running_per_agent_max).
    CallsRunningPerAgentMax,
    /// [`Limits::calls_running_max`](crate::Limits::calls_running_max).
    CallsRunningMax,
    /// [`Constraints::concurrency_max`](crate::Constraints::concurrency_max) of the batch's tools.
    ToolConcurrencyMax,
}

impl ConcurrencyLimit {
    /// Returns the limit as written in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PlanParallelMax => "plan_parallel_max",
            Self::PlanSlots => "plan_slots",
            Self::CallsRunningPerAgentMax => "calls_running_per_agent_max",
            Self::CallsRunningMax => "calls_running_max",
            Self::ToolConcurrencyMax => "tool_concurrency_max",
        }
    }
}

/// The ordering of a batch, and how many of its calls run at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Concurrency {
    pub(crate) mode: BatchMode,
    /// Maximum number of calls that are begun and not over. Those of them that wait for a slot do not run.
    pub(crate) begun_max: usize,
    /// Maximum number of calls that run at once.
    pub(crate) running_max: usize,
    /// The number that was asked for and its limit, if fewer run at once.
    pub(crate) reduced: Option<(usize, ConcurrencyLimit)>,
}

impl Concurrency {
    /// Settles how many calls run at once. Only a number or an ordering that the batch names can be reduced: its
    /// defaults are no wish.
    pub(crate) fn settle(engine: &Inner, batch: &Batch, plan: &Plan, tools: &LimitedTools) -> Self {
        let wish = batch.max_concurrency.unwrap_or(Batch::MAX_CONCURRENCY).max(1);
        let parallel_max = plan.parallel_max.unwrap_or(usize::MAX).max(1);
        let slots = match plan.slots {
            Some(_) => ConcurrencyLimit::PlanSlots,
            None => ConcurrencyLimit::CallsRunningPerAgentMax,
        };
        let limits = [
            (parallel_max, ConcurrencyLimit::PlanParallelMax),
            (engine.agent_slots(&batch.caller) as usize, slots),
            (engine.admission.limits().calls_running_max as usize, ConcurrencyLimit::CallsRunningMax),
            (tools.at_once(batch.calls.len()), ConcurrencyLimit::ToolConcurrencyMax),
        ];
        let (held, by) = limits.into_iter().min_by_key(|(max, _)| *max).expect("there are four");
        let wanted_mode = batch.mode.unwrap_or_default();
        let is_sequential = wanted_mode == BatchMode::Sequential;
        let is_fewer = batch.max_concurrency.is_some() && held < wish;
        let is_one_by_one = batch.mode.is_some() && held == 1 && wish > 1;
        Self {
            mode: if parallel_max == 1 { BatchMode::Sequential } else { wanted_mode },
            begun_max: wish.min(parallel_max),
            running_max: if is_sequential { 1 } else { wish.min(held) },
            reduced: (!is_sequential && (is_fewer || is_one_by_one)).then_some((wish, by)),
        }
    }
}

/// The tools of a batch that may run a limited number of calls at once.
#[derive(Debug, Default)]
pub(crate) struct LimitedTools {
    /// The calls and the limit of each such tool.
    calls: HashMap<String, (usize, usize)>,
}

impl LimitedTools {
    /// Counts a call of the tool.
    pub(crate) fn count(&mut self, tool: &Registered) {
        if let Some(max) = tool.spec().constraints.concurrency_max {
            self.calls.entry(tool.spec().name.clone()).or_insert((0, max as usize)).0 += 1;
        }
    }

    /// Returns how many of the calls can run at once: any number if no tool holds one back.
    fn at_once(&self, calls: usize) -> usize {
        let held_back: usize = self.calls.values().map(|(calls, max)| calls.saturating_sub(*max)).sum();
        if held_back == 0 { usize::MAX } else { calls - held_back }
    }
}
