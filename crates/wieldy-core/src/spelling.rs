//! The spelling of arguments: replaces aliases of their names, and other spellings of the same value, when a call is
//! opened.
//!
//! The first record of a call, its footprint, its cache key, its checks and its confirmation know only the result.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::confinement::Confinement;
use crate::error::{CallError, Code};
use crate::registry::Registered;
use crate::tool::{Provider, ToolSpec};

/// Replaces aliases by the real names of the arguments, and values by their usual spelling. Arguments that cannot be
/// renamed stay as they are.
pub(crate) fn spell(
    tool: &Registered,
    arguments: &mut Arc<Value>,
    confinement: &Confinement,
) -> Result<(), Box<CallError>> {
    if let Value::Object(given) = &**arguments
        && given.keys().any(|name| tool.spec.argument_aliases.contains_key(name))
    {
        check_names(given, &tool.spec.argument_aliases)?;
        if let Value::Object(map) = Arc::make_mut(arguments) {
            rename(map, &tool.spec.argument_aliases);
        }
    }
    let respelled = || tool.tool.respell(arguments, confinement);
    // A tool is foreign code: if it panics, the arguments stay as they are.
    let respelled = std::panic::catch_unwind(AssertUnwindSafe(respelled)).unwrap_or_default();
    for (name, text) in respelled {
        if let Some(value) = Arc::make_mut(arguments).get_mut(&name) {
            *value = Value::String(text);
        }
    }
    Ok(())
}

/// Refuses arguments in which two names stand for the same argument.
fn check_names(given: &Map<String, Value>, aliases: &BTreeMap<String, String>) -> Result<(), Box<CallError>> {
    let mut seen = BTreeMap::new();
    for name in given.keys() {
        let real = aliases.get(name).unwrap_or(name);
        let Some(earlier) = seen.insert(real, name) else { continue };
        let (alias, other) = if name == real { (earlier, name) } else { (name, earlier) };
        let message = format!("`/{alias}`: it is another name for `{real}`, and `{other}` is given too");
        let error = CallError::new(Code::ValidationFailed, message);
        return Err(Box::new(error.suggest(format!("give only `{real}`"))));
    }
    Ok(())
}

/// Replaces the aliases among the names, which keep their places.
fn rename(map: &mut Map<String, Value>, aliases: &BTreeMap<String, String>) {
    let renamed = std::mem::take(map).into_iter().map(|(name, value)| match aliases.get(&name) {
        Some(real) => (real.clone(), value),
        None => (name, value),
    });
    *map = renamed.collect();
}

/// Lists the reasons why the aliases of a tool's arguments cannot be used.
pub(crate) fn alias_mistakes(spec: &ToolSpec) -> Vec<String> {
    if spec.argument_aliases.is_empty() {
        return Vec::new();
    }
    if let Provider::Mcp(server) = &spec.provider {
        return vec![format!("the definition of a server's tool cannot have aliases of arguments, and `{server}` has")];
    }
    let properties = spec.input_schema.get("properties").and_then(Value::as_object);
    let is_argument = |name: &String| properties.is_some_and(|properties| properties.contains_key(name));
    let mistake = |(alias, name): (&String, &String)| match (is_argument(alias), is_argument(name)) {
        (true, _) => Some(format!("the alias `{alias}` is itself an argument")),
        (false, false) => Some(format!("the alias `{alias}` stands for `{name}`, and there is no such argument")),
        (false, true) => None,
    };
    spec.argument_aliases.iter().filter_map(mistake).collect()
}
