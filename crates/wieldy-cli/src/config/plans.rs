//! The section `plans`: the limits of each plan, and checks of the names of its tools.

use std::collections::BTreeMap;

use wieldy::{Caller, Executor, Plan};

use super::file::{FilePlan, FileResourceLimits};
use super::layers::{ConfigError, Layers};
use super::value::Whole;
use super::{Config, number, origin_of, small};

impl From<&Plan> for FilePlan {
    /// Writes down a shipped plan, which has neither tools nor scopes nor resources of its own.
    fn from(plan: &Plan) -> Self {
        Self {
            batch_max: plan.batch_max.map(|count| Whole(count as u64)),
            parallel_max: plan.parallel_max.map(|count| Whole(count as u64)),
            slots: plan.slots.map(|slots| Whole(slots.into())),
            full_events: Some(plan.full_events),
            ..Self::default()
        }
    }
}

/// Resolves a plan.
pub(super) fn plan(plan: &FilePlan) -> Plan {
    Plan {
        batch_max: number(plan.batch_max).map(|count| count as usize),
        parallel_max: number(plan.parallel_max).map(|count| count as usize),
        slots: plan.slots.map(|slots| small(Some(slots))),
        tools: plan.tools.clone().unwrap_or_default(),
        scopes: plan.scopes.clone().unwrap_or_default(),
        resources: plan.resources.as_ref().map(FileResourceLimits::limits).unwrap_or_default(),
        full_events: plan.full_events.unwrap_or(true),
    }
}

/// Returns the mistakes of names that no tool can have.
pub(super) fn impossible_names(layers: &Layers, plans: &BTreeMap<String, FilePlan>) -> Vec<ConfigError> {
    let can_begin = |name: &str| name.chars().all(|sign| sign.is_ascii_alphanumeric() || "_-".contains(sign));
    let is_possible = |name: &str| match name.strip_suffix('*') {
        Some(beginning) => can_begin(beginning),
        None => !name.is_empty() && can_begin(name),
    };
    let mistake = |(plan, name): (&String, &String)| {
        let key = format!("plans.{plan}.tools");
        ConfigError {
            place: origin_of(layers, &key).to_string(),
            message: format!("`{key}`: `{name}` is not the name of a tool"),
            hint: Some("a name has letters, digits, `_` and `-`; `*` may stand at its end".into()),
            keys: vec![key],
        }
    };
    let names = plans.iter().flat_map(|(plan, file)| file.tools.iter().flatten().map(move |name| (plan, name)));
    names.filter(|(_, name)| !is_possible(name)).map(mistake).collect()
}

/// Refuses a plan with an alias of a tool, because plans are compared with the names of tools. All tools but those of
/// MCP servers must be registered.
pub(crate) fn check_names(config: &Config, executor: &Executor) -> Result<(), ConfigError> {
    let caller = Caller::local();
    for (plan, name) in config.plans.iter().flat_map(|(plan, limits)| limits.tools.iter().map(move |name| (plan, name)))
    {
        let Ok(tool) = executor.registry().find(name, &caller) else { continue };
        let real = &tool.spec().name;
        if real != name {
            let key = format!("plans.{plan}.tools");
            return Err(ConfigError {
                place: config.origin(&key).map(ToString::to_string).unwrap_or_default(),
                message: format!("`{key}`: `{name}` is another name for `{real}`"),
                hint: Some(format!("write `{real}`; plans include tools by their real names")),
                keys: vec![key],
            });
        }
    }
    Ok(())
}
