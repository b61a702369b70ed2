//! Authorization: decides whether this caller may make this call with these arguments.
//!
//! [`Policy::authorize`] checks permissions and the plan, which need no arguments. [`Policy::judge`] then asks each
//! [`Check`] about the checked input. The strictest answer wins; a check that fails, panics or times out denies.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::call::{Caller, ExecutionId};
use crate::confinement::ResourceLimits;
use crate::error::{CallError, Code};
use crate::input::Input;
use crate::tool::ToolSpec;

/// A rule that decides whether a call may run. The result does not depend on the order of checks.
pub trait Check: Send + Sync + 'static {
    /// Returns the check's name, for denials.
    fn name(&self) -> &str;

    /// Decides about the call. An error says why the check cannot decide, and denies the call.
    fn check<'a>(&'a self, question: &'a Question<'a>) -> BoxFuture<'a, Result<Decision, String>>;
}

/// The call that a check decides about.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// The caller.
    pub caller: &'a Caller,
    /// The tool.
    pub tool: &'a ToolSpec,
    /// The arguments, exactly as they will run.
    pub arguments: &'a Value,
}

/// The answer of a check. Later variants are stricter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Decision {
    /// The call may run.
    Allow,
    /// A person must agree first.
    Ask {
        /// The reason.
        reason: String,
    },
    /// The call is refused.
    Deny {
        /// The rule that denies it.
        rule: String,
        /// The reason.
        reason: String,
    },
}

/// The limits of a caller's plan, and the tools that it includes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Plan {
    /// Maximum number of calls in a batch; any number if `None`.
    pub batch_max: Option<usize>,
    /// Maximum number of calls of a batch that run at once: 1 means one after the other, `None` any number.
    pub parallel_max: Option<usize>,
    /// Maximum number of running calls of each agent: 0 means no limit of its own, `None` that of the executor
    /// ([`calls_running_per_agent_max`](crate::Limits::calls_running_per_agent_max)).
    pub slots: Option<u32>,
    /// The names of the included tools, where `*` at the end stands for any ending; all tools if empty.
    #[serde(default)]
    pub tools: Vec<String>,
    /// The scopes whose tools are included, besides the tools without a scope; all tools if empty.
    #[serde(default)]
    pub scopes: Vec<String>,
    /// The most that a call may have of each resource.
    #[serde(default)]
    pub resources: ResourceLimits,
    /// True if observers also see progress, warnings and retries.
    pub full_events: bool,
}

impl Plan {
    /// The plan of a caller without one.
    pub const UNLIMITED: Self = Self {
        batch_max: None,
        parallel_max: None,
        slots: None,
        tools: Vec::new(),
        scopes: Vec::new(),
        resources: ResourceLimits::NONE,
        full_events: true,
    };

    /// Returns true if callers with this plan may use the tool. A plan with both tools and scopes includes a tool only
    /// if both do.
    pub fn includes(&self, tool: &ToolSpec) -> bool {
        let is_named = |name: &String| match name.strip_suffix('*') {
            Some(beginning) => tool.name.starts_with(beginning),
            None => *name == tool.name,
        };
        let scopes = &tool.agent_scopes;
        (self.tools.is_empty() || self.tools.iter().any(is_named))
            && (self.scopes.is_empty() || scopes.is_empty() || scopes.iter().any(|scope| self.scopes.contains(scope)))
    }
}

/// Permissions, plans and checks.
pub struct Policy {
    checks: Vec<Arc<dyn Check>>,
    plans: BTreeMap<String, Plan>,
    check_timeout: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        let plan = |batch_max, parallel_max, slots, full_events| Plan {
            batch_max,
            parallel_max,
            slots: Some(slots),
            full_events,
            ..Plan::UNLIMITED
        };
        let plans = [
            ("Core", plan(Some(5), Some(1), 4, false)),
            ("WriterPro", plan(Some(20), Some(1), 4, false)),
            ("Teams", plan(Some(50), Some(10), 10, true)),
            ("Enterprise", plan(None, None, 0, true)),
        ];
        Self {
            checks: Vec::new(),
            plans: plans.into_iter().map(|(name, plan)| (name.to_owned(), plan)).collect(),
            check_timeout: Duration::from_secs(5),
        }
    }
}

/// The proof that a caller may use a tool at all. Made only by [`Policy::authorize`].
#[derive(Debug)]
pub(crate) struct Authorized {
    execution: ExecutionId,
}

/// The proof that a caller may use a tool with these arguments. Made only by [`Policy::judge`] and [`Policy::unasked`].
#[derive(Debug)]
pub struct Grant {
    execution: ExecutionId,
    ask: Option<String>,
}

impl Grant {
    pub(crate) fn execution(&self) -> ExecutionId {
        self.execution
    }

    /// Returns the reason for which a person must be asked first, if there is one.
    pub(crate) fn ask(&self) -> Option<&str> {
        self.ask.as_deref()
    }
}

/// The reason why a call is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The caller lacks permissions.
    #[error("`{tool}` requires the permission `{}`, which this caller does not hold", missing.join("`, `"))]
    Permission {
        /// The tool.
        tool: String,
        /// The permissions that the caller lacks.
        missing: Vec<String>,
    },
    /// The caller's plan is not configured, so its limits are unknown.
    #[error("the plan `{plan}` is not configured; there {}", plans(known))]
    UnknownPlan {
        /// The plan.
        plan: String,
        /// The configured plans.
        known: Vec<String>,
    },
    /// The caller's plan does not include the tool.
    #[error("the plan `{plan}` does not include `{tool}`{}", plans_with(with))]
    Tool {
        /// The plan.
        plan: String,
        /// The tool.
        tool: String,
        /// The plans that include it.
        with: Vec<String>,
    },
    /// The batch is larger than the caller's plan allows.
    #[error("a batch of {size} calls is over the limit of {limit} of the plan `{plan}`")]
    Batch {
        /// The plan.
        plan: String,
        /// The number of calls in the batch.
        size: usize,
        /// Maximum number of calls that the plan allows.
        limit: usize,
    },
    /// A check denied the call.
    #[error("denied by `{rule}`: {reason}")]
    Rule {
        /// The rule.
        rule: String,
        /// The reason.
        reason: String,
    },
}

/// Lists the configured plans in words.
fn plans(known: &[String]) -> String {
    match known {
        [] => "is none".into(),
        known => format!("are `{}`", known.join("`, `")),
    }
}

/// Lists the plans that include a tool in words.
fn plans_with(with: &[String]) -> String {
    match with {
        [] => "; no plan does".into(),
        [one] => format!("; the plan `{one}` does"),
        with => format!("; the plans `{}` do", with.join("`, `")),
    }
}

impl From<Denied> for CallError {
    fn from(denied: Denied) -> Self {
        let message = denied.to_string();
        match denied {
            Denied::Permission { missing, .. } => CallError::new(Code::PermissionDenied, message)
                .suggest("use another tool, or ask the operator to grant the permission")
                .detail("missing_permissions", json!(missing)),
            Denied::UnknownPlan { plan, .. } => CallError::new(Code::PlanLimitExceeded, message)
                .suggest("ask the operator to configure the plan")
                .detail("plan", plan),
            Denied::Tool { plan, tool, with } => CallError::new(Code::PlanLimitExceeded, message)
                .suggest(match with.is_empty() {
                    true => "use another tool, or ask the operator to include this one in a plan",
                    false => "use another tool, or ask the operator for one of the plans that include it",
                })
                .detail("plan", plan)
                .detail("tool", tool)
                .detail("plans", json!(with)),
            Denied::Batch { plan, size, limit } => CallError::new(Code::PlanLimitExceeded, message)
                .suggest(format!("split the batch into parts of at most {limit} calls"))
                .detail("plan", plan)
                .detail("size", size)
                .detail("limit", limit),
            Denied::Rule { rule, .. } => CallError::new(Code::PermissionDenied, message)
                .suggest("do it another way, or ask the operator to change the rule")
                .detail("rule", rule),
        }
    }
}

impl Policy {
    /// Returns the same policy with one more check.
    #[must_use]
    pub fn with_check(mut self, check: Arc<dyn Check>) -> Self {
        self.checks.push(check);
        self
    }

    /// Returns the plans by name; those of [`Policy::default`] are Core, WriterPro, Teams and Enterprise.
    pub fn plans(&self) -> &BTreeMap<String, Plan> {
        &self.plans
    }

    /// Returns the same policy with a plan added or replaced: no key of the plan before is kept.
    #[must_use]
    pub fn with_plan(mut self, name: &str, plan: Plan) -> Self {
        self.plans.insert(name.to_owned(), plan);
        self
    }

    /// Checks the tool's required permissions and the caller's plan, which need no arguments.
    pub(crate) fn authorize(
        &self,
        execution: ExecutionId,
        caller: &Caller,
        tool: &ToolSpec,
    ) -> Result<Authorized, Denied> {
        self.check_tool(caller, tool)?;
        let missing: Vec<String> =
            tool.required_permissions.iter().filter(|name| !caller.permissions.holds(name)).cloned().collect();
        if missing.is_empty() {
            Ok(Authorized { execution })
        } else {
            Err(Denied::Permission { tool: tool.name.clone(), missing })
        }
    }

    /// Returns the grant at once if there are no checks to ask.
    pub(crate) fn unasked(&self, authorized: &Authorized, input: &Input) -> Option<Grant> {
        assert_eq!(authorized.execution, input.execution(), "a proof belongs to one call");
        self.checks.is_empty().then_some(Grant { execution: authorized.execution, ask: None })
    }

    /// Asks every check about the exact arguments that will run.
    pub(crate) async fn judge(
        &self,
        authorized: Authorized,
        caller: &Caller,
        tool: &ToolSpec,
        input: &Input,
    ) -> Result<Grant, Denied> {
        assert_eq!(authorized.execution, input.execution(), "a proof belongs to one call");
        let question = Question { caller, tool, arguments: input.value() };
        let mut strictest = Decision::Allow;
        for check in &self.checks {
            strictest = strictest.max(self.ask(&**check, &question).await);
        }
        match strictest {
            Decision::Allow => Ok(Grant { execution: authorized.execution, ask: None }),
            Decision::Ask { reason } => Ok(Grant { execution: authorized.execution, ask: Some(reason) }),
            Decision::Deny { rule, reason } => Err(Denied::Rule { rule, reason }),
        }
    }

    async fn ask(&self, check: &dyn Check, question: &Question<'_>) -> Decision {
        let answer = AssertUnwindSafe(async { check.check(question).await }).catch_unwind();
        let reason = match tokio::time::timeout(self.check_timeout, answer).await {
            Ok(Ok(Ok(decision))) => return decision,
            Ok(Ok(Err(reason))) => format!("the check failed: {reason}"),
            Ok(Err(_)) => "the check panicked".into(),
            Err(_) => format!("the check did not answer within {:?}", self.check_timeout),
        };
        Decision::Deny { rule: check.name().to_owned(), reason }
    }

    /// Returns the caller's plan.
    pub(crate) fn plan(&self, caller: &Caller) -> Result<&Plan, Denied> {
        static NONE: Plan = Plan::UNLIMITED;
        match &caller.plan {
            None => Ok(&NONE),
            Some(name) => self
                .plans
                .get(name)
                .ok_or_else(|| Denied::UnknownPlan { plan: name.clone(), known: self.plans.keys().cloned().collect() }),
        }
    }

    /// Returns an error if the caller's plan does not include the tool.
    pub(crate) fn check_tool(&self, caller: &Caller, tool: &ToolSpec) -> Result<(), Denied> {
        if self.plan(caller)?.includes(tool) {
            return Ok(());
        }
        let with = self.plans.iter().filter(|(_, plan)| plan.includes(tool)).map(|(name, _)| name.clone()).collect();
        Err(Denied::Tool { plan: caller.plan.clone().unwrap_or_default(), tool: tool.name.clone(), with })
    }

    /// Returns the caller's plan, or an error if a batch of this size exceeds it.
    pub(crate) fn check_batch(&self, caller: &Caller, size: usize) -> Result<&Plan, Denied> {
        let plan = self.plan(caller)?;
        match plan.batch_max {
            Some(limit) if size > limit => {
                Err(Denied::Batch { plan: caller.plan.clone().unwrap_or_default(), size, limit })
            }
            _ => Ok(plan),
        }
    }
}
