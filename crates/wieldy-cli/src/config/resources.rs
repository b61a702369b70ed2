//! The section `resources`: the limits of single tools, and checks against the maxima.

use std::collections::BTreeMap;

use wieldy::ToolLimits;

use super::file::{FileResourceLimits, FileResources, FileToolResources};
use super::layers::{ConfigError, Layers, Origin};
use super::{conflict, origin_of};

/// Resolves the limits of single tools.
pub(super) fn limits_of_tools(tools: &BTreeMap<String, FileToolResources>) -> BTreeMap<String, ToolLimits> {
    let max = |tool: &FileToolResources| tool.max.as_ref().map(FileResourceLimits::limits).unwrap_or_default();
    let limits = |tool: &FileToolResources| ToolLimits { limits: tool.limits(), max: max(tool) };
    tools.iter().map(|(name, tool)| (name.clone(), limits(tool))).collect()
}

/// Returns the mistakes of limits that are above their own maximum.
pub(super) fn limits_above_maximum(layers: &Layers, resources: &FileResources) -> Vec<ConfigError> {
    let max = resources.max.clone().unwrap_or_default();
    let of_tools = resources.tools.iter().flatten();
    let mut pairs = vec![("resources".to_owned(), resources.limits(), max.limits())];
    pairs.extend(of_tools.map(|(name, tool)| {
        let max = tool.max.clone().unwrap_or_default();
        (format!("resources.tools.{name}"), tool.limits(), max.limits())
    }));
    let mut mistakes = Vec::new();
    for (section, limits, max) in pairs {
        for ((name, limit), (_, max)) in limits.named().into_iter().zip(max.named()) {
            let Some((limit, max)) = limit.zip(max).filter(|(limit, max)| limit > max) else { continue };
            let (key, per) = key_of_limit(name);
            let keys = [format!("{section}.{key}"), format!("{section}.max.{key}")];
            // A flag asks for one call: the call is refused, with the limit.
            if matches!(origin_of(layers, &keys[0]), Origin::Flag(flag) if flag == "--cpu" || flag == "--memory") {
                continue;
            }
            let message = format!("`{}` is {}, more than `{}`, which is {}", keys[0], limit / per, keys[1], max / per);
            mistakes.push(conflict(layers, [&keys[0], &keys[1]], message, None));
        }
    }
    mistakes
}

/// Returns the key of a limit in the configuration, and what one of its unit is.
pub(crate) fn key_of_limit(name: &str) -> (String, u64) {
    match name.strip_suffix("_bytes") {
        Some(resource) => (format!("{resource}-mb"), 1024 * 1024),
        None => (name.replace('_', "-"), 1),
    }
}
