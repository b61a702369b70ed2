//! The resource limits of a call: what its processes get, the most it may ask for, and where both come from.
//!
//! A call gets the defaults of its tool or of the executor. It may ask for other limits, up to the smallest of the
//! maxima that apply to it. More than that is refused before anything runs.

use serde::{Deserialize, Serialize};

use crate::build::ExecutorBuilder;
use crate::call::{Caller, SandboxRef};
use crate::confinement::ResourceLimits;
use crate::error::{CallError, Code};
use crate::executor::Executor;
use crate::registry::Registered;
use crate::sandbox::{Level, SandboxId};

/// The resource limits that the operator sets for one tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ToolLimits {
    /// The limits of its processes if a call asks for nothing. They replace those of the tool's definition.
    pub limits: ResourceLimits,
    /// The most that a call of the tool may ask for.
    pub max: ResourceLimits,
}

/// The origin of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitOrigin {
    /// [`ExecutorBuilder::resource_limits`].
    Executor,
    /// The tool's definition.
    Tool,
    /// The operator's limits for the tool.
    OperatorForTool,
    /// The built-in maximum for calls, [`ResourceLimits::CALL_MAX`].
    BuiltIn,
    /// The machine, which has no more.
    Machine,
    /// [`ExecutorBuilder::resource_limits_max`].
    ExecutorMax,
    /// The maximum in the tool's definition.
    ToolMax,
    /// The operator's maximum for the tool.
    OperatorMaxForTool,
    /// The caller's plan.
    Plan,
    /// The sandbox or session that the call runs in.
    Parent,
}

/// One limit of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CallLimit {
    /// The limit's name, as in [`ResourceLimits`].
    pub limit: &'static str,
    /// The value that holds if the call asks for nothing; no limit if `None`.
    pub value: Option<u64>,
    /// The origin of the value.
    pub from: LimitOrigin,
    /// The most that a call may ask for; any amount if `None`.
    pub max: Option<u64>,
    /// The origin of the maximum.
    pub max_from: LimitOrigin,
}

impl CallLimit {
    /// Returns the value for a call that asks for this much, or the refusal.
    fn asked(&self, asked: Option<u64>) -> Result<Option<u64>, CallError> {
        match asked {
            None => Ok(self.value),
            Some(asked) if self.max.is_some_and(|max| asked > max) => Err(self.refusal(asked)),
            Some(_) => Ok(asked),
        }
    }

    fn refusal(&self, asked: u64) -> CallError {
        let allowed = self.max.unwrap_or_default();
        let whose = match self.max_from {
            LimitOrigin::Executor | LimitOrigin::ExecutorMax | LimitOrigin::BuiltIn => "of this executor",
            LimitOrigin::Tool | LimitOrigin::ToolMax | LimitOrigin::OperatorForTool => "of the tool",
            LimitOrigin::OperatorMaxForTool => "of the operator for the tool",
            LimitOrigin::Machine => "of the machine",
            LimitOrigin::Plan => "of the caller's plan",
            LimitOrigin::Parent => "of the sandbox that the call runs in",
        };
        let [asked_text, allowed_text] = [asked, allowed].map(|amount| amount_of(self.limit, amount));
        let limit = self.limit;
        let message = format!("the call asks for {asked_text} of `{limit}`, and the maximum {whose} is {allowed_text}");
        CallError::new(Code::ResourceLimitExceeded, message)
            .suggest(format!("ask for at most {allowed_text}; a higher maximum is the operator's to give"))
            .detail("limit", limit)
            .detail("asked", asked)
            .detail("allowed", allowed)
            .detail("held_by", serde_json::json!(self.max_from))
    }
}

/// Formats an amount of the limited resource with its unit. Bytes are shown in MiB too.
pub(crate) fn amount_of(limit: &str, amount: u64) -> String {
    if !limit.ends_with("_bytes") {
        return amount.to_string();
    }
    format!("{:.1} MiB ({amount} bytes)", amount as f64 / f64::from(1 << 20))
}

/// The sandbox that a call ran in, and the limits that held there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsedSandbox {
    /// The sandbox's id.
    pub id: SandboxId,
    /// The isolation that was really obtained.
    pub level: Level,
    /// The limits of the call's processes.
    #[serde(default)]
    pub limits: ResourceLimits,
}

impl UsedSandbox {
    /// Returns the sandbox with the limits of one call.
    pub fn new(sandbox: SandboxRef, limits: ResourceLimits) -> Self {
        Self { id: sandbox.id, level: sandbox.level, limits }
    }

    /// Returns the sandbox without the limits of the call.
    pub fn reference(&self) -> SandboxRef {
        SandboxRef { id: self.id.clone(), level: self.level }
    }
}

/// The limits that apply to a call, by their origin.
struct LimitSources {
    defaults: [(ResourceLimits, LimitOrigin); 3],
    /// Maxima that also lower the defaults.
    maxima: [(ResourceLimits, LimitOrigin); 4],
    parent: ResourceLimits,
    machine: ResourceLimits,
    executor_max: ResourceLimits,
}

impl LimitSources {
    /// Settles the limit at this place of [`ResourceLimits::named`].
    fn settle(&self, at: usize) -> CallLimit {
        let (limit, parent) = self.parent.named()[at];
        let of = |(limits, origin): &(ResourceLimits, LimitOrigin)| Some((limits.named()[at].1?, *origin));
        let lower = |one: (u64, LimitOrigin), other: (u64, LimitOrigin)| if other.0 < one.0 { other } else { one };
        let held = self.maxima.iter().filter_map(of).reduce(lower);
        let default = self.defaults.iter().filter_map(of).next();
        let parent = parent.map(|parent| (parent, LimitOrigin::Parent));
        let own = default.into_iter().chain(held).reduce(lower);
        let value = own.map(|own| parent.into_iter().fold(own, lower));
        // The operator's own defaults may be above the built-in maximum: then a call may ask for as much.
        let machine = self.machine.named()[at].1.map(|has| (has, LimitOrigin::Machine));
        let built_in = of(&(ResourceLimits::CALL_MAX, LimitOrigin::BuiltIn));
        let built_in = built_in.map(|max| machine.into_iter().fold(max, lower));
        let higher = |one: (u64, LimitOrigin), other: (u64, LimitOrigin)| if other.0 > one.0 { other } else { one };
        let usual = default.and_then(|_| self.defaults.iter().filter_map(of).chain(built_in).reduce(higher));
        let usual = usual.filter(|_| self.executor_max.named()[at].1.is_none());
        let max = usual.into_iter().chain(held).chain(parent).reduce(lower);
        let parts = |part: Option<(u64, LimitOrigin)>| (part.map(|(value, _)| value), part.map(|(_, from)| from));
        let ((value, from), (max, max_from)) = (parts(value), parts(max));
        let [from, max_from] = [from, max_from].map(|origin| origin.unwrap_or(LimitOrigin::Executor));
        CallLimit { limit, value, from, max, max_from }
    }
}

impl Executor {
    /// Returns the limits of a call of the tool by this caller, each with its maximum and the origins of both.
    pub fn call_limits(&self, caller: &Caller, tool: &Registered) -> Vec<CallLimit> {
        let sources = self.limit_sources(caller, tool);
        (0..ResourceLimits::default().named().len()).map(|at| sources.settle(at)).collect()
    }

    /// Returns the limits of a call that asks for these, or the refusal of the first that is too high.
    pub(crate) fn limits_of_call(
        &self,
        caller: &Caller,
        tool: &Registered,
        asked: &ResourceLimits,
    ) -> Result<ResourceLimits, CallError> {
        let sources = self.limit_sources(caller, tool);
        let mut values = asked.named().map(|(_, asked)| asked);
        for (at, value) in values.iter_mut().enumerate() {
            *value = sources.settle(at).asked(*value)?;
        }
        Ok(ResourceLimits::of(values))
    }

    /// Returns true if calls of the tool by this caller have the executor's own limits, as most calls do.
    pub(crate) fn has_usual_limits(&self, caller: &Caller, tool: &Registered) -> bool {
        let engine = &*self.inner;
        let plan = engine.policy.plan(caller).map_or(ResourceLimits::NONE, |plan| plan.resources);
        [tool.spec.limits, tool.spec.limits_max, plan].iter().all(|limits| *limits == ResourceLimits::NONE)
            && !engine.tool_limits.contains_key(tool.name.as_str())
            && self.limits_of_place(caller) == ResourceLimits::NONE
    }

    fn limit_sources(&self, caller: &Caller, tool: &Registered) -> LimitSources {
        let (engine, spec) = (&*self.inner, &tool.spec);
        let by_operator = engine.tool_limits.get(tool.name.as_str()).copied().unwrap_or_default();
        let plan = engine.policy.plan(caller).map_or(ResourceLimits::NONE, |plan| plan.resources);
        LimitSources {
            defaults: [
                (by_operator.limits, LimitOrigin::OperatorForTool),
                (spec.limits.at_most(engine.machine), LimitOrigin::Tool),
                (engine.confinement.limits, LimitOrigin::Executor),
            ],
            maxima: [
                (engine.limits_max, LimitOrigin::ExecutorMax),
                (by_operator.max, LimitOrigin::OperatorMaxForTool),
                (spec.limits_max, LimitOrigin::ToolMax),
                (plan, LimitOrigin::Plan),
            ],
            parent: self.limits_of_place(caller),
            machine: engine.machine,
            executor_max: engine.limits_max,
        }
    }

    /// Returns the limits that all processes of the caller's sandbox or session share.
    fn limits_of_place(&self, caller: &Caller) -> ResourceLimits {
        let engine = &*self.inner;
        match (&caller.parent_sandbox, &caller.session) {
            (None, None) => ResourceLimits::NONE,
            (None, Some(_)) => engine.confinement.place_limits,
            (Some(id), _) => {
                let mut all = engine.sandboxes.values().flat_map(|sandbox| sandbox.list());
                all.find(|one| one.sandbox.id == *id).map_or(ResourceLimits::NONE, |one| one.limits)
            }
        }
    }
}

impl ExecutorBuilder {
    /// Sets the resource limits of one tool.
    #[must_use]
    pub fn tool_limits(mut self, tool: impl Into<String>, limits: ToolLimits) -> Self {
        self.tool_limits.insert(tool.into(), limits);
        self
    }
}
