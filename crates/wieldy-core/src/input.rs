//! Validation: checks a model's arguments and turns them into an [`Input`].
//!
//! Policy, the confirming person and the tool all get exactly this [`Input`].

use std::sync::Arc;

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::{JsonType, ValidationError};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::call::ExecutionId;
use crate::error::{CallError, Code};
use crate::name::{did_you_mean, near_misses};
use crate::schema::{Allowance, Measured, Schema, Spent, kind_of, measure, spend};

/// Maximum nesting depth of arguments.
pub const ARGUMENTS_DEPTH_MAX: usize = 128;
/// Maximum size of arguments in bytes, written as JSON.
pub const ARGUMENTS_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Maximum number of violations reported at once.
const VIOLATIONS_MAX: usize = 50;
/// Maximum number of correction rounds. A string that was parsed as JSON may need corrections itself.
const CORRECTIONS_MAX: usize = 16;

/// The proof that arguments fit the tool's schema. Made only by [`Input::check`].
#[derive(Debug, Clone)]
pub struct Input {
    execution: ExecutionId,
    value: Arc<Value>,
}

impl Input {
    /// Checks arguments. Fills in defaults, corrects values that have exactly one other reading, and reports every
    /// violation at once.
    pub(crate) fn check(
        execution: ExecutionId,
        schema: &Schema,
        arguments: &Arc<Value>,
        size: Measured,
        allowance: Allowance,
    ) -> Result<Result<Self, Violations>, Spent> {
        let checked = schema.within(allowance, || check(schema, arguments, size))?;
        Ok(checked.map(|value| Self { execution, value }))
    }

    /// Returns the arguments that the tool will get.
    pub fn value(&self) -> &Value {
        &self.value
    }

    pub(crate) fn shared(&self) -> &Arc<Value> {
        &self.value
    }

    pub(crate) fn execution(&self) -> ExecutionId {
        self.execution
    }
}

fn check(schema: &Schema, arguments: &Arc<Value>, size: Measured) -> Result<Arc<Value>, Violations> {
    // The usual case: nothing to fill in, nothing to correct, nothing to copy.
    let as_it_is = !schema.has_defaults() && arguments.is_object() && !size.has_float;
    if as_it_is && schema.is_valid(arguments) {
        return Ok(Arc::clone(arguments));
    }
    let mut value = match &**arguments {
        Value::Null => json!({}),
        Value::Object(_) => Value::clone(arguments),
        other => return Err(Violations::one("", format!("the arguments must be an object, not {}", kind_of(other)))),
    };
    let mut bytes_left = ARGUMENTS_BYTES_MAX.saturating_sub(size.bytes);
    // A correction can reveal further errors, so each round checks again.
    for _ in 0..CORRECTIONS_MAX {
        complete(schema, schema.root(), &mut value, &mut bytes_left).ok_or_else(too_large)?;
        let corrections: Vec<_> = schema.errors(&value).iter().filter_map(correction).collect();
        if corrections.is_empty() {
            break;
        }
        let replaced = corrections.into_iter().filter(|(pointer, new)| replace(&mut value, pointer, new)).count();
        // Only nulls in lists are left, which cannot be removed. Another round would find the same.
        if replaced == 0 {
            break;
        }
        let size = check_size(&value)?; // a string that was parsed as JSON may itself be deep
        bytes_left = ARGUMENTS_BYTES_MAX.saturating_sub(size.bytes);
    }
    let errors = schema.errors(&value);
    if errors.is_empty() {
        return Ok(Arc::new(value));
    }
    Err(Violations(errors.iter().take(VIOLATIONS_MAX).map(|error| Violation::of(error, schema)).collect()))
}

/// Refuses arguments that are too large or too deep to process. Cheap and safe for any value.
pub(crate) fn check_size(arguments: &Value) -> Result<Measured, Violations> {
    measure(arguments, ARGUMENTS_DEPTH_MAX, ARGUMENTS_BYTES_MAX).ok_or_else(too_large)
}

pub(crate) fn too_large() -> Violations {
    let message =
        format!("the arguments are too large: at most {ARGUMENTS_BYTES_MAX} bytes and {ARGUMENTS_DEPTH_MAX} levels");
    Violations::one("", message)
}

/// Returns the error for arguments whose check would cost too much work.
pub(crate) fn too_costly() -> CallError {
    CallError::new(Code::ValidationFailed, "checking the arguments against the tool's input schema takes too much work")
        .suggest(
            "send smaller or simpler arguments; if small ones are refused too, report it as a bug of the tool's schema",
        )
}

/// Parses arguments as a model wrote them. Empty text counts as no arguments.
pub fn parse_arguments(text: &str) -> Result<Value, Violations> {
    if text.len() > ARGUMENTS_BYTES_MAX {
        return Err(Violations::one("", format!("the arguments are too large: at most {ARGUMENTS_BYTES_MAX} bytes")));
    }
    if text.trim().is_empty() {
        return Ok(json!({}));
    }
    serde_json::from_str(text).map_err(|error| Violations::one("", format!("the arguments are not JSON: {error}")))
}

/// All violations of the input schema in one call's arguments.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(|violation| violation.to_string()).collect::<Vec<_>>().join("; "))]
pub struct Violations(pub Vec<Violation>);

/// One violation of the input schema.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// The place of the violation: a JSON pointer into the arguments.
    pub pointer: String,
    /// The description. It never contains the value itself, which may be a secret.
    pub message: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.pointer.as_str() {
            "" => f.write_str(&self.message),
            pointer => write!(f, "`{pointer}`: {}", self.message),
        }
    }
}

impl Violations {
    pub(crate) fn one(pointer: &str, message: String) -> Self {
        Self(vec![Violation { pointer: pointer.into(), message }])
    }
}

impl From<Violations> for CallError {
    fn from(violations: Violations) -> Self {
        CallError::new(Code::ValidationFailed, violations.to_string())
            .suggest("correct the arguments to fit the tool's input schema and call again")
            .detail("violations", json!(violations.0))
    }
}

impl Violation {
    fn of(error: &ValidationError<'_>, schema: &Schema) -> Self {
        let pointer = error.instance_path().to_string();
        let message = match error.kind() {
            ValidationErrorKind::AdditionalProperties { unexpected } => {
                let listed = unexpected.iter().take(VIOLATIONS_MAX).map(|name| {
                    let name: String = name.chars().take(64).flat_map(char::escape_debug).collect();
                    let near = near_misses(&name, property_names(schema, error.schema_path().as_str()));
                    match did_you_mean(&near) {
                        Some(hint) => format!("there is no argument `{name}` ({hint})"),
                        None => format!("there is no argument `{name}`"),
                    }
                });
                let mut listed: Vec<String> = listed.collect();
                if unexpected.len() > VIOLATIONS_MAX {
                    listed.push(format!("and {} more", unexpected.len() - VIOLATIONS_MAX));
                }
                listed.join("; ")
            }
            ValidationErrorKind::Required { property } => format!("{property} is required").replace('"', "`"),
            ValidationErrorKind::AnyOf { .. }
            | ValidationErrorKind::OneOfNotValid { .. }
            | ValidationErrorKind::Enum { .. }
            | ValidationErrorKind::Constant { .. } => match possible_values(schema, &pointer) {
                Some(values) => format!("the value is not one of {values}"),
                None => error.masked_with("the value").to_string(),
            },
            _ => error.masked_with("the value").to_string(),
        };
        Self { pointer, message }
    }
}

/// Returns the values that an argument may have, if its schema lists them.
fn possible_values(schema: &Schema, pointer: &str) -> Option<String> {
    const SHOWN_MAX: usize = 30;
    let mut at = schema.root();
    for name in pointer.split('/').skip(1) {
        let here = schema.resolve(at);
        let of_array = || here.get("items").filter(|_| name.bytes().all(|byte| byte.is_ascii_digit()));
        at = here.get("properties").and_then(|properties| properties.get(name)).or_else(of_array)?;
    }
    let mut values = Vec::new();
    list_values(schema, at, 0, &mut values)?;
    let count = values.len();
    let mut shown: Vec<String> = values.into_iter().take(SHOWN_MAX).collect();
    if count > shown.len() {
        shown.push(format!("{} more", count - shown.len()));
    }
    (!shown.is_empty()).then(|| shown.join(", "))
}

/// Adds the values that a schema lists. Returns `None` if it allows others too.
fn list_values(schema: &Schema, at: &Value, depth: usize, values: &mut Vec<String>) -> Option<()> {
    const DEPTH_MAX: usize = 4;
    const VALUES_MAX: usize = 1000;
    const VALUE_BYTES_MAX: usize = 100;
    let here = schema.resolve(at);
    let shown = |value: &Value| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        (text.len() <= VALUE_BYTES_MAX).then(|| format!("`{text}`"))
    };
    spend(1);
    if depth > DEPTH_MAX || values.len() > VALUES_MAX {
        return None;
    }
    if let Some(list) = here.get("enum").and_then(Value::as_array) {
        for value in list.iter().take(VALUES_MAX) {
            values.push(shown(value)?);
        }
        return Some(());
    }
    if let Some(value) = here.get("const") {
        values.push(shown(value)?);
        return Some(());
    }
    if here.get("type").and_then(Value::as_str) == Some("null") {
        return Some(());
    }
    let branches = here.get("anyOf").or_else(|| here.get("oneOf")).and_then(Value::as_array)?;
    branches.iter().try_for_each(|branch| list_values(schema, branch, depth + 1, values))
}

/// Returns the property names beside the `additionalProperties` keyword at `schema_path`.
fn property_names<'a>(schema: &'a Schema, schema_path: &str) -> Vec<&'a str> {
    let parent = schema_path.rsplit_once('/').map_or("", |(parent, _)| parent);
    let properties = schema.root().pointer(parent).and_then(|parent| parent.get("properties"));
    properties.and_then(Value::as_object).map(|map| map.keys().map(String::as_str).collect()).unwrap_or_default()
}

/// Fills in defaults, and turns numbers such as `1.0` into integers if the schema wants integers. The size of defaults
/// is subtracted from `bytes_left`. Returns `None` if they do not fit.
fn complete(schema: &Schema, subschema: &Value, value: &mut Value, bytes_left: &mut usize) -> Option<()> {
    spend(1);
    let subschema = schema.resolve(subschema);
    match value {
        Value::Object(map) => {
            for (name, property) in subschema.get("properties").and_then(Value::as_object).into_iter().flatten() {
                spend(1);
                match (map.get_mut(name), schema.resolve(property).get("default").or(property.get("default"))) {
                    (Some(present), _) => complete(schema, property, present, bytes_left)?,
                    (None, Some(default)) => {
                        let size = measure(default, ARGUMENTS_DEPTH_MAX, *bytes_left)?;
                        *bytes_left = bytes_left.checked_sub(size.bytes + name.len())?;
                        map.insert(name.clone(), default.clone());
                    }
                    (None, None) => {}
                }
            }
        }
        Value::Array(items) => {
            if let Some(item_schema) = subschema.get("items") {
                for item in items {
                    complete(schema, item_schema, item, bytes_left)?;
                }
            }
        }
        Value::Number(number) if subschema.get("type") == Some(&json!("integer")) => {
            if let Some(whole) = number.as_f64().filter(|n| number.is_f64() && n.fract() == 0.0 && n.abs() < 9e15) {
                *value = json!(whole as i64);
            }
        }
        _ => {}
    }
    Some(())
}

/// Returns the only other reading of a value of the wrong type, if there is exactly one: its JSON pointer and the new
/// value. `None` as the new value means that the argument is left out.
fn correction(error: &ValidationError<'_>) -> Option<(String, Option<Value>)> {
    let ValidationErrorKind::Type { kind } = error.kind() else { return None };
    let wanted: Vec<JsonType> = match kind {
        TypeKind::Single(kind) => vec![*kind],
        TypeKind::Multiple(kinds) => kinds.iter().collect(),
    };
    let pointer = error.instance_path().to_string();
    let text = match error.instance().as_ref() {
        Value::String(text) => text.trim(),
        // Models write null for an optional argument that they do not use.
        Value::Null if !pointer.is_empty() => return Some((pointer, None)),
        _ => return None,
    };
    let read = |kind: &JsonType| -> Option<Value> {
        match kind {
            JsonType::Boolean => matches!(text, "true" | "false").then(|| json!(text == "true")),
            JsonType::Integer => text.parse::<i64>().ok().filter(|n| n.to_string() == text).map(|n| json!(n)),
            JsonType::Number => {
                let number = serde_json::from_str::<Value>(text).ok().filter(Value::is_number);
                number.filter(|number| number.as_f64().is_some_and(f64::is_finite))
            }
            JsonType::Array => serde_json::from_str::<Value>(text).ok().filter(Value::is_array),
            JsonType::Object => serde_json::from_str::<Value>(text).ok().filter(Value::is_object),
            JsonType::Null | JsonType::String => None,
        }
    };
    let mut readings: Vec<Value> = wanted.iter().filter_map(read).collect();
    readings.dedup();
    match readings.as_slice() {
        [_] => Some((pointer, readings.pop())),
        _ => None,
    }
}

/// Replaces the value at `pointer`, or removes it if `new` is `None`. Returns true if that was possible.
fn replace(value: &mut Value, pointer: &str, new: &Option<Value>) -> bool {
    if let Some(new) = new {
        return value.pointer_mut(pointer).is_some_and(|place| {
            *place = new.clone();
            true
        });
    }
    let Some((parent, key)) = pointer.rsplit_once('/') else { return false };
    let key = key.replace("~1", "/").replace("~0", "~");
    match value.pointer_mut(parent) {
        Some(Value::Object(map)) => map.shift_remove(&key).is_some(),
        _ => false,
    }
}

/// Writes JSON with sorted keys and no spaces, so that equal values give equal bytes.
pub(crate) fn canonical(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Object(map) => canonical_object(map, out),
        Value::Array(items) => {
            out.push(b'[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(b',');
                }
                canonical(item, out);
            }
            out.push(b']');
        }
        plain => serde_json::to_writer(out, plain).expect("a plain value is always writable to memory"),
    }
}

fn canonical_object(map: &Map<String, Value>, out: &mut Vec<u8>) {
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_unstable_by_key(|(key, _)| *key);
    out.push(b'{');
    for (index, (key, value)) in entries.into_iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        serde_json::to_writer(&mut *out, key).expect("a text is always writable to memory");
        out.push(b':');
        canonical(value, out);
    }
    out.push(b'}');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(schema: Value, arguments: Value) -> Result<Value, String> {
        let schema = Schema::compile(&schema).expect("a good schema");
        let size = check_size(&arguments).map_err(|violations| violations.to_string())?;
        Input::check(ExecutionId::next(), &schema, &Arc::new(arguments), size, Allowance::ON_WORKER)
            .map_err(|Spent| too_costly().to_string())?
            .map(|input| input.value().clone())
            .map_err(|violations| violations.to_string())
    }

    fn schema() -> Value {
        json!({
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "lines": {"type": "integer", "minimum": 1},
                "ratio": {"type": "number"},
                "deep": {"type": "boolean", "default": false},
                "tags": {"type": "array", "items": {"type": "integer"}},
                "nested": {"$ref": "#/$defs/nested"},
                "either": {"type": ["integer", "boolean"]},
            },
            "required": ["path"],
            "additionalProperties": false,
            "$defs": {"nested": {"type": "object", "properties": {"size": {"type": "integer", "default": 7}}}},
        })
    }

    #[test]
    fn defaults_are_filled_in_at_every_level() {
        assert_eq!(
            checked(schema(), json!({"path": "a", "nested": {}})),
            Ok(json!({"path": "a", "nested": {"size": 7}, "deep": false}))
        );
    }

    #[test]
    fn values_with_one_possible_reading_are_corrected() {
        for (given, wanted) in [
            (json!({"lines": "5"}), json!({"lines": 5})),
            (json!({"lines": 5.0}), json!({"lines": 5})),
            (json!({"ratio": "0.5"}), json!({"ratio": 0.5})),
            (json!({"deep": "true"}), json!({"deep": true})),
            (json!({"tags": "[1, 2]"}), json!({"tags": [1, 2]})),
            (json!({"tags": ["1", 2.0]}), json!({"tags": [1, 2]})),
            (json!({"nested": "{\"size\": \"3\"}"}), json!({"nested": {"size": 3}})),
            (json!({"either": "true"}), json!({"either": true})),
            (json!({"lines": null}), json!({})),
        ] {
            let mut given = given;
            given["path"] = json!("a");
            let mut wanted = wanted;
            wanted["path"] = json!("a");
            if wanted.get("deep").is_none() {
                wanted["deep"] = json!(false);
            }
            assert_eq!(checked(schema(), given.clone()), Ok(wanted), "{given}");
        }
    }

    #[test]
    fn ambiguous_values_are_reported_with_all_other_violations() {
        assert_eq!(
            checked(
                schema(),
                json!({"pth": "a", "lines": "05", "ratio": "NaN", "deep": "yes", "tags": ["x"], "either": "x"})
            ),
            Err("`/lines`: the value is not of type \"integer\"; \
                 `/ratio`: the value is not of type \"number\"; \
                 `/deep`: the value is not of type \"boolean\"; \
                 `/tags/0`: the value is not of type \"integer\"; \
                 `/either`: the value is not of types \"boolean\", \"integer\"; \
                 there is no argument `pth` (did you mean `path`?); \
                 `path` is required"
                .into())
        );
        assert_eq!(
            checked(schema(), json!({"path": "a", "lines": 0})),
            Err("`/lines`: the value is less than the minimum of 1".into())
        );
        assert_eq!(checked(schema(), json!({"path": 5})), Err("`/path`: the value is not of type \"string\"".into()));
        assert_eq!(
            checked(schema(), json!({"path": "a", "lnes": 1, "dep": true})),
            Err("there is no argument `lnes` (did you mean `lines`?); there is no argument `dep` (did you mean `deep`?)"
                .into())
        );
        assert_eq!(checked(schema(), json!([1])), Err("the arguments must be an object, not an array".into()));
    }

    #[test]
    fn a_violation_never_shows_the_value() {
        let message = checked(schema(), json!({"path": "a", "lines": "hunter2"})).expect_err("not a number");
        assert!(!message.contains("hunter2"), "{message}");
    }

    #[test]
    fn arguments_that_are_no_json_or_too_large_or_too_deep_are_refused() {
        let parse = |text: &str| parse_arguments(text).map_err(|violations| violations.to_string());
        assert_eq!(parse(" "), Ok(json!({})));
        assert_eq!(
            parse("{"),
            Err("the arguments are not JSON: EOF while parsing an object at line 1 column 1".into())
        );
        let deep = "[".repeat(10_000) + &"]".repeat(10_000);
        assert_eq!(
            parse(&deep),
            Err("the arguments are not JSON: recursion limit exceeded at line 1 column 128".into())
        );
        let large = format!("\"{}\"", "x".repeat(100_000_000));
        assert_eq!(parse(&large), Err("the arguments are too large: at most 16777216 bytes".into()));
        let mut nested = json!(1);
        for _ in 0..1_000 {
            nested = json!([nested]);
        }
        assert!(check_size(&nested).is_err());
        assert_eq!(check_size(&json!({"a": [1]})), Ok(Measured { has_float: false, bytes: 13 }));
        assert_eq!(check_size(&json!({"a": [1, {"b": 0.5}]})), Ok(Measured { has_float: true, bytes: 22 }));
    }

    #[test]
    fn large_wrong_arguments_cost_no_more_than_reading_them() {
        let began = std::time::Instant::now();
        let message =
            checked(schema(), json!({"path": "a", "tags": vec![Value::Null; 300_000]})).expect_err("no numbers");
        assert!(message.starts_with("`/tags/0`: the value is not of type"), "{}", &message[..100]);
        let unknown: Map<String, Value> = (0..100_000).map(|n| (format!("unknown{n}"), json!(1))).collect();
        let message = checked(schema(), Value::Object(unknown)).expect_err("no such arguments");
        assert!(message.len() < 10_000, "{} bytes", message.len());
        assert!(message.contains("and 99950 more"), "{message}");
        assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
    }

    #[test]
    fn defaults_do_not_make_arguments_larger_than_they_may_be() {
        let item = json!({"type": "object", "properties": {"a": {"default": "x".repeat(1000)}}});
        let schema = json!({"type": "object", "properties": {"list": {"type": "array", "items": item}}});
        let filled = checked(schema.clone(), json!({"list": [{}, {}]})).expect("two are not many");
        assert_eq!(filled, json!({"list": [{"a": "x".repeat(1000)}, {"a": "x".repeat(1000)}]}));
        assert_eq!(
            checked(schema, json!({"list": vec![json!({}); 100_000]})),
            Err("the arguments are too large: at most 16777216 bytes and 128 levels".into())
        );
    }

    #[test]
    fn texts_that_are_read_as_json_do_not_get_deeper_than_arguments_may_be() {
        let tree = json!({"type": "object", "properties": {"a": {"$ref": "#"}}});
        let mut deep = json!({});
        for _ in 0..12 {
            deep = json!({ "a": deep.to_string() });
            for _ in 0..100 {
                deep = json!({ "a": deep });
            }
        }
        assert!(checked(tree, deep).expect_err("too deep").starts_with("the arguments are too large"));
    }

    #[test]
    fn canonical_bytes_do_not_depend_on_the_order_of_keys() {
        let bytes = |value: Value| {
            let mut out = Vec::new();
            canonical(&value, &mut out);
            String::from_utf8(out).expect("JSON is text")
        };
        assert_eq!(
            bytes(json!({"b": [1, {"d": null, "c": "\n"}], "a": 1.5})),
            r#"{"a":1.5,"b":[1,{"c":"\n","d":null}]}"#
        );
    }

    proptest::proptest! {
        #[test]
        fn parsing_never_panics(text in "\\PC{0,200}") {
            let _ = parse_arguments(&text);
        }

        #[test]
        fn checking_checked_arguments_again_changes_nothing(lines in proptest::option::of("[0-9]{1,3}"), deep in proptest::option::of("true|false|x")) {
            let mut arguments = json!({"path": "a"});
            if let Some(lines) = lines { arguments["lines"] = json!(lines); }
            if let Some(deep) = deep { arguments["deep"] = json!(deep); }
            if let Ok(once) = checked(schema(), arguments) {
                proptest::prop_assert_eq!(checked(schema(), once.clone()), Ok(once));
            }
        }
    }
}
