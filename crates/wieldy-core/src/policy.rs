//! Authorization: may this caller do this, with these arguments?
//!
//! [`Policy::enter`] asks what needs no arguments, [`Policy::judge`] asks the [`Check`]s about the checked input.
//! The strictest answer wins; a check that fails, panics or does not answer in time denies.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::call::{Caller, ExecutionId};
use crate::error::{CallError, Code};
use crate::input::Input;
use crate::tool::ToolSpec;

/// One opinion on whether a call may run. The order of checks cannot matter.
pub trait Check: Send + Sync + 'static {
    /// The check's name, for denials.
    fn name(&self) -> &str;

    /// Decides, or says why it cannot, which denies.
    fn check<'a>(&'a self, question: &'a Question<'a>) -> BoxFuture<'a, Result<Decision, String>>;
}

/// What a check is asked.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// Who wants it.
    pub caller: &'a Caller,
    /// Which tool.
    pub tool: &'a ToolSpec,
    /// With exactly what: the arguments that will run.
    pub arguments: &'a Value,
}

/// What a check answers; later ones are stricter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Decision {
    /// Go on.
    Allow,
    /// Ask a person first.
    Ask {
        /// Why.
        reason: String,
    },
    /// Refuse.
    Deny {
        /// Which rule says so.
        rule: String,
        /// Why.
        reason: String,
    },
}

/// What a plan allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Plan {
    /// How many calls a batch may have; none means any number.
    pub batch_max: Option<usize>,
    /// How many calls of a batch may run at once; 1 means one after the other, none any number.
    pub parallel_max: Option<usize>,
    /// Whether observers see progress, warnings and retries too.
    pub full_events: bool,
}

impl Plan {
    /// What a caller without a plan gets.
    pub const UNLIMITED: Self = Self { batch_max: None, parallel_max: None, full_events: true };
}

/// Permissions, plans and checks.
pub struct Policy {
    checks: Vec<Arc<dyn Check>>,
    plans: BTreeMap<String, Plan>,
    check_timeout: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        let plan = |batch_max, parallel_max, full_events| Plan { batch_max, parallel_max, full_events };
        let plans = [
            ("Core", plan(Some(5), Some(1), false)),
            ("WriterPro", plan(Some(20), Some(1), false)),
            ("Teams", plan(Some(50), Some(10), true)),
            ("Enterprise", Plan::UNLIMITED),
        ];
        Self {
            checks: Vec::new(),
            plans: plans.into_iter().map(|(name, plan)| (name.to_owned(), plan)).collect(),
            check_timeout: Duration::from_secs(5),
        }
    }
}

/// The proof that a caller may use a tool at all. Made only by [`Policy::enter`].
#[derive(Debug)]
pub(crate) struct Entry {
    execution: ExecutionId,
}

/// The proof that a caller may use a tool with these arguments. Made only by [`Policy::judge`].
#[derive(Debug)]
pub struct Grant {
    execution: ExecutionId,
    ask: Option<String>,
}

impl Grant {
    pub(crate) fn execution(&self) -> ExecutionId {
        self.execution
    }

    /// Why a person must be asked first, if so.
    pub(crate) fn ask(&self) -> Option<&str> {
        self.ask.as_deref()
    }
}

/// Why a call is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The caller lacks permissions.
    #[error("`{tool}` requires the permission `{}`, which this caller does not hold", missing.join("`, `"))]
    Permission {
        /// The tool.
        tool: String,
        /// What is missing.
        missing: Vec<String>,
    },
    /// The caller's plan is not known, so its limits are not either.
    #[error("the plan `{plan}` is not configured; there {}", plans(known))]
    UnknownPlan {
        /// The plan.
        plan: String,
        /// The plans there are.
        known: Vec<String>,
    },
    /// The caller's plan has no room for this.
    #[error("a batch of {size} calls is over the limit of {limit} of the plan `{plan}`")]
    Batch {
        /// The plan.
        plan: String,
        /// How many there are.
        size: usize,
        /// How many there may be.
        limit: usize,
    },
    /// A rule says no.
    #[error("denied by `{rule}`: {reason}")]
    Rule {
        /// Which.
        rule: String,
        /// Why.
        reason: String,
    },
}

/// The plans there are, in words.
fn plans(known: &[String]) -> String {
    match known {
        [] => "is none".into(),
        known => format!("are `{}`", known.join("`, `")),
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
    /// The same policy with one more check.
    #[must_use]
    pub fn with_check(mut self, check: Arc<dyn Check>) -> Self {
        self.checks.push(check);
        self
    }

    /// The same policy with a plan added or replaced.
    #[must_use]
    pub fn with_plan(mut self, name: &str, plan: Plan) -> Self {
        self.plans.insert(name.to_owned(), plan);
        self
    }

    /// Asks what needs no arguments: the permissions that the tool requires and the caller's plan.
    pub(crate) fn enter(&self, execution: ExecutionId, caller: &Caller, tool: &ToolSpec) -> Result<Entry, Denied> {
        self.plan(caller)?;
        let missing: Vec<String> =
            tool.required_permissions.iter().filter(|name| !caller.permissions.holds(name)).cloned().collect();
        if missing.is_empty() {
            Ok(Entry { execution })
        } else {
            Err(Denied::Permission { tool: tool.name.clone(), missing })
        }
    }

    /// The grant of what passed the entry, where there are no checks to ask.
    pub(crate) fn unasked(&self, entry: &Entry, input: &Input) -> Option<Grant> {
        assert_eq!(entry.execution, input.execution(), "a proof belongs to one call");
        self.checks.is_empty().then_some(Grant { execution: entry.execution, ask: None })
    }

    /// Asks every check about exactly what will run.
    pub(crate) async fn judge(
        &self,
        entry: Entry,
        caller: &Caller,
        tool: &ToolSpec,
        input: &Input,
    ) -> Result<Grant, Denied> {
        assert_eq!(entry.execution, input.execution(), "a proof belongs to one call");
        let question = Question { caller, tool, arguments: input.value() };
        let mut strictest = Decision::Allow;
        for check in &self.checks {
            strictest = strictest.max(self.ask(&**check, &question).await);
        }
        match strictest {
            Decision::Allow => Ok(Grant { execution: entry.execution, ask: None }),
            Decision::Ask { reason } => Ok(Grant { execution: entry.execution, ask: Some(reason) }),
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

    /// The limits of the caller's plan.
    pub(crate) fn plan(&self, caller: &Caller) -> Result<Plan, Denied> {
        match &caller.plan {
            None => Ok(Plan::UNLIMITED),
            Some(name) => self
                .plans
                .get(name)
                .copied()
                .ok_or_else(|| Denied::UnknownPlan { plan: name.clone(), known: self.plans.keys().cloned().collect() }),
        }
    }

    /// Whether the caller's plan has room for a batch of this size.
    pub(crate) fn check_batch(&self, caller: &Caller, size: usize) -> Result<Plan, Denied> {
        let plan = self.plan(caller)?;
        match plan.batch_max {
            Some(limit) if size > limit => {
                Err(Denied::Batch { plan: caller.plan.clone().unwrap_or_default(), size, limit })
            }
            _ => Ok(plan),
        }
    }
}
