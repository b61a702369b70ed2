//! JSON schemas: checked and compiled once, and safe to use even if their author is not trusted.
//!
//! A schema may come from a manifest or a foreign server. References to files or addresses are never followed, loops
//! are refused, and its size is bounded, as written and with its references expanded (`subschemas.rs`). A schema that
//! breaks one of these rules is refused when its tool is registered. Checking a value costs a bounded amount of work
//! (`meter.rs`).

mod meter;
mod patterns;
mod subschemas;

use std::sync::OnceLock;

use jsonschema::{PatternOptions, ValidationError, Validator};
use serde_json::{Value, json};

pub(crate) use meter::{Allowance, Spent, spend};
use meter::{Metered, Priced, Prices};
use patterns::Price;
use subschemas::{CHAIN_MAX, EXPANDED_MAX, PATTERNS_MAX, Subschemas};

use crate::name::{did_you_mean, near_misses};

/// Maximum size of a schema in bytes, written as JSON.
const BYTES_MAX: usize = 1024 * 1024;
/// Maximum nesting depth of a schema.
const DEPTH_MAX: usize = 128;

/// Maximum memory of all compiled patterns of a schema.
const PATTERNS_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Maximum memory of one compiled pattern.
const PATTERN_BYTES_MAX: usize = 1024 * 1024;
/// Maximum number of backtracking steps of a pattern with look-around. Beyond it the value counts as wrong.
const PATTERN_STEPS_MAX: usize = 100_000;
/// Maximum work for listing violations, each of which takes memory.
const VIOLATIONS_UNITS_MAX: u64 = 200_000;

/// A checked schema. It is compiled when its tool is registered or, for built-in tools, on first use.
pub(crate) struct Schema {
    validator: OnceLock<Result<Validator<Metered>, SchemaError>>,
    pattern_bytes_max: usize,
    raw: Value,
    has_defaults: bool,
    prices: Prices,
}

/// The reason why a schema cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemaError {
    /// The schema is not an object, or does not describe objects.
    #[error("a tool's schema must be a JSON object that describes an object, not {0}")]
    NotAnObject(String),
    /// The schema is larger or deeper than any honest schema.
    #[error("the schema is too large: at most {BYTES_MAX} bytes and {DEPTH_MAX} levels")]
    TooLarge,
    /// The schema is short, but its references expand to far too many subschemas.
    #[error(
        "too much applies to the same value at `{0}` when references are followed: at most {EXPANDED_MAX} subschemas, \
         and {CHAIN_MAX} in a row"
    )]
    TooLargeExpanded(String),
    /// The schema has more patterns than any honest schema.
    #[error("the schema has too many patterns: at most {PATTERNS_MAX} different ones")]
    TooManyPatterns,
    /// A reference leads outside the schema.
    #[error("the reference `{target}` at `{at}` leaves the schema; only references within it (`#/…`) are followed")]
    ForeignReference {
        /// The place of the reference.
        at: String,
        /// Its target.
        target: String,
    },
    /// References lead back to themselves without a step into the value.
    #[error("the references at `{0}` lead back to themselves, so checking a value would never end")]
    Loop(String),
    /// The schema violates the JSON Schema standard.
    #[error("the schema is not valid at `{at}`: {message}")]
    Invalid {
        /// The place in the schema.
        at: String,
        /// The problem.
        message: String,
    },
}

impl Schema {
    /// Checks and compiles a schema. `null` stands for an object with any properties.
    pub(crate) fn compile(raw: &Value) -> Result<Self, SchemaError> {
        Self::check(raw)?.compiled()
    }

    /// Checks and compiles a schema for any kind of value.
    pub(crate) fn compile_output(raw: &Value) -> Result<Self, SchemaError> {
        Self::check_output(raw)?.compiled()
    }

    /// Checks a schema as [`Schema::compile`] does, but compiles it only when the first value is checked against it. If
    /// it does not compile then, no value fits.
    pub(crate) fn check(raw: &Value) -> Result<Self, SchemaError> {
        let raw = if raw.is_null() { json!({"type": "object"}) } else { raw.clone() };
        match raw.get("type") {
            _ if !raw.is_object() => return Err(SchemaError::NotAnObject(kind_of(&raw).into())),
            None => {}
            Some(Value::String(kind)) if kind == "object" => {}
            Some(kind) => return Err(SchemaError::NotAnObject(kind.to_string())),
        }
        Self::check_any(raw)
    }

    /// Checks a schema for any kind of value in the same way.
    pub(crate) fn check_output(raw: &Value) -> Result<Self, SchemaError> {
        Self::check_any(raw.clone())
    }

    fn check_any(raw: Value) -> Result<Self, SchemaError> {
        if measure(&raw, DEPTH_MAX, BYTES_MAX).is_none() {
            return Err(SchemaError::TooLarge);
        }
        let mut subschemas = Subschemas::of(&raw)?;
        subschemas.check()?;
        let prices = Prices {
            property: 1 + subschemas.patterns_beside_max() as u64,
            patterns: Price::of(subschemas.patterns()),
        };
        let pattern_bytes_max = (PATTERNS_BYTES_MAX / subschemas.patterns().count().max(1)).min(PATTERN_BYTES_MAX);
        let has_defaults = has_key(&raw, "default");
        Ok(Self { validator: OnceLock::new(), pattern_bytes_max, raw, has_defaults, prices })
    }

    /// Compiles the schema now.
    fn compiled(self) -> Result<Self, SchemaError> {
        self.validator().map_err(Clone::clone)?;
        Ok(self)
    }

    fn validator(&self) -> Result<&Validator<Metered>, &SchemaError> {
        let compiled = self.validator.get_or_init(|| {
            let patterns = PatternOptions::fancy_regex()
                .backtrack_limit(PATTERN_STEPS_MAX)
                .size_limit(self.pattern_bytes_max)
                .dfa_size_limit(self.pattern_bytes_max);
            let options = jsonschema::options_for::<Metered>().with_pattern_options(patterns);
            options.build(&self.raw).map_err(|error| {
                let at = error.instance_path().to_string();
                let message = wrong_type(&self.raw, &at).unwrap_or_else(|| error.masked().to_string());
                SchemaError::Invalid { at, message }
            })
        });
        compiled.as_ref()
    }

    /// Runs a check against this schema within a work allowance.
    pub(crate) fn within<T>(&self, allowance: Allowance, check: impl FnOnce() -> T) -> Result<T, Spent> {
        meter::within(allowance, self.prices, check)
    }

    /// Returns true if the value fits. Must be called within [`Schema::within`], like everything that reads values.
    pub(crate) fn is_valid(&self, value: &Value) -> bool {
        self.validator().is_ok_and(|validator| validator.is_valid(Priced(value)))
    }

    /// Returns all violations of a value, or only the first if listing all would cost too much.
    pub(crate) fn errors<'a>(&'a self, value: &'a Value) -> Vec<ValidationError<'a>> {
        if self.is_valid(value) {
            return Vec::new();
        }
        let validator = match self.validator() {
            Ok(validator) => validator,
            Err(error) => return vec![ValidationError::custom(error.to_string())],
        };
        let all = || validator.iter_errors(Priced(value)).collect();
        let first = || Vec::from_iter(validator.validate(Priced(value)).err());
        meter::at_most(VIOLATIONS_UNITS_MAX, all)
            .or_else(|Spent| meter::at_most(10 * VIOLATIONS_UNITS_MAX, first))
            .unwrap_or_else(|Spent| {
                vec![ValidationError::custom("the value does not fit, and is too large to say where")]
            })
    }

    /// Returns the place and the reason of the first violation, if the value does not fit.
    pub(crate) fn misfit(&self, value: &Value, allowance: Allowance) -> Result<Option<String>, Spent> {
        self.within(allowance, || {
            let errors = self.errors(value);
            errors.first().map(|error| format!("at `{}`: {}", error.instance_path(), error.masked()))
        })
    }

    /// Returns true if the schema has defaults, which fill in missing properties.
    pub(crate) fn has_defaults(&self) -> bool {
        self.has_defaults
    }

    pub(crate) fn root(&self) -> &Value {
        &self.raw
    }

    /// Returns the schema itself, or the target of its reference within the same document.
    pub(crate) fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        let mut current = schema;
        // Longer chains are refused at registration.
        for _ in 0..CHAIN_MAX {
            let Some(pointer) = current.get("$ref").and_then(Value::as_str).and_then(|target| target.strip_prefix('#'))
            else {
                return current;
            };
            spend(1 + pointer.len() / 8);
            match self.raw.pointer(pointer) {
                Some(next) => current = next,
                None => return current,
            }
        }
        current
    }
}

/// Describes a wrong value of `type` in words. The meta-schema's own error only says that no alternative fits.
fn wrong_type(raw: &Value, at: &str) -> Option<String> {
    const TYPES: [&str; 7] = ["string", "number", "integer", "boolean", "object", "array", "null"];
    // In a list of types, the pointer ends with the index of the wrong one.
    let listed = at.rsplit_once('/').filter(|(_, last)| last.parse::<usize>().is_ok());
    let schema = listed.map_or(at, |(above, _)| above).strip_suffix("/type")?;
    let unknown = match raw.pointer(schema)?.get("type")? {
        Value::Array(kinds) => kinds.iter().find(|kind| !kind.as_str().is_some_and(|kind| TYPES.contains(&kind)))?,
        kind => kind,
    };
    let near = unknown.as_str().and_then(|unknown| did_you_mean(&near_misses(unknown, TYPES)));
    let near = near.map(|near| format!("; {near}")).unwrap_or_default();
    let shown: String = unknown.to_string().trim_matches('"').chars().take(64).collect();
    Some(format!("`{shown}` is no type; the types are {}{near}", TYPES.join(", ")))
}

/// Returns the JSON name of a value's kind.
pub(crate) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn has_key(value: &Value, key: &str) -> bool {
    match value {
        Value::Object(map) => map.contains_key(key) || map.values().any(|value| has_key(value, key)),
        Value::Array(items) => items.iter().any(|item| has_key(item, key)),
        _ => false,
    }
}

/// The facts that [`measure`] collects on its one walk through a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Measured {
    /// True if a number is written with a fraction.
    pub(crate) has_float: bool,
    /// The rough size in bytes, written as JSON.
    pub(crate) bytes: usize,
}

/// Measures a value of at most this depth and, roughly, this many bytes. Returns `None` if it is larger. Safe for any
/// value, because it goes no deeper than that.
pub(crate) fn measure(value: &Value, depth_max: usize, bytes_max: usize) -> Option<Measured> {
    fn fits(value: &Value, levels_left: usize, bytes_left: &mut usize, seen: &mut Measured) -> bool {
        let own = match value {
            Value::String(text) => text.len() + 2,
            Value::Object(map) => map.keys().map(|key| key.len() + 4).sum(),
            _ => 4,
        };
        let Some(left) = bytes_left.checked_sub(own) else { return false };
        *bytes_left = left;

        match value {
            Value::Array(items) => {
                levels_left > 0 && items.iter().all(|item| fits(item, levels_left - 1, bytes_left, seen))
            }
            Value::Object(map) => {
                levels_left > 0 && map.values().all(|item| fits(item, levels_left - 1, bytes_left, seen))
            }
            Value::Number(number) => {
                seen.has_float |= number.is_f64();
                true
            }
            _ => true,
        }
    }
    let (mut bytes_left, mut seen) = (bytes_max, Measured::default());
    let fits = fits(value, depth_max, &mut bytes_left, &mut seen);
    fits.then_some(Measured { bytes: bytes_max - bytes_left, ..seen })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(schema: Value) -> String {
        Schema::compile(&schema).err().map_or_else(|| "accepted".into(), |error| error.to_string())
    }

    #[test]
    fn no_value_fits_a_schema_that_fails_on_first_use() {
        let schema = Schema::check(&json!({"type": "object", "required": 3})).expect("only its form was looked at");
        assert_eq!(fits(&schema, &json!({})), Ok(false));
        let errors = schema.within(Allowance::ON_WORKER, || schema.errors(&json!({})).len());
        assert_eq!(errors, Ok(1));
    }

    fn fits(schema: &Schema, value: &Value) -> Result<bool, Spent> {
        schema.within(Allowance::ON_WORKER, || schema.is_valid(value))
    }

    #[test]
    fn references_to_files_and_addresses_are_refused() {
        for target in ["file:///etc/passwd", "http://127.0.0.1:1/x", "other.json", "//host/x"] {
            assert_eq!(
                refused(json!({"type": "object", "properties": {"a": {"$ref": target}}})),
                format!(
                    "the reference `{target}` at `/properties/a/$ref` leaves the schema; \
                     only references within it (`#/…`) are followed"
                )
            );
        }
        assert_eq!(refused(json!({"type": "object", "properties": {"a": {"default": {"$ref": "x"}}}})), "accepted");
    }

    #[test]
    fn a_reference_smuggled_past_the_walk_is_still_not_followed() {
        // `x-odd` is no keyword, so the walk treats it as a schema; `dependencies` is from an older draft.
        let raw = json!({"type": "object", "dependencies": {"a": {"$ref": "http://127.0.0.1:1/x"}}});
        assert!(refused(raw).contains("leaves the schema"));
    }

    #[test]
    fn endless_reference_loops_are_refused_and_recursive_schemas_are_not() {
        let looped = "lead back to themselves, so checking a value would never end";
        for schema in [
            json!({"$ref": "#"}),
            json!({"allOf": [{"$ref": "#"}]}),
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}),
            json!({"not": {"$ref": "#/$defs/x"}, "$defs": {"x": {"if": {"$ref": "#/$defs/x"}}}}),
            json!({"$ref": "#me", "$anchor": "me"}),
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": {"$ref": "#"}}}),
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"default": {"$ref": "#"}}}),
            json!({"dependentSchemas": {"a": {"$ref": "#"}}}),
            json!({"allOf": [{
                "$id": "http://inner/", "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            }]}),
            json!({"allOf": [{"$id": "http://inner/", "$ref": "#me", "$defs": {"a": {"$anchor": "me", "$ref": "#"}}}]}),
        ] {
            assert!(refused(schema.clone()).ends_with(looped), "{schema}");
        }
        let tree = json!({
            "type": "object",
            "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}},
            "additionalProperties": false
        });
        let schema = Schema::compile(&tree).expect("a tree consumes a level at each step");
        assert_eq!(fits(&schema, &json!({"left": {"right": {}}})), Ok(true));
        assert_eq!(fits(&schema, &json!({"left": {"middle": {}}})), Ok(false));
    }

    /// Builds a schema with this many levels, each made of references to the next.
    fn levels(count: usize, level: impl Fn(Value) -> Value) -> Value {
        let next = |n: usize| level(json!({"$ref": format!("#/$defs/l{n}")}));
        let mut defs: serde_json::Map<String, Value> = (0..count).map(|n| (format!("l{n}"), next(n + 1))).collect();
        defs.insert(format!("l{count}"), json!({"type": ["object", "integer"]}));
        json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/l0"}}, "$defs": defs})
    }

    #[test]
    fn schemas_that_double_often_are_refused_and_rarely_are_not() {
        let doublings: [fn(Value) -> Value; 10] = [
            |next| json!({"allOf": [next, next]}),
            |next| json!({"anyOf": [next, next]}),
            |next| json!({"oneOf": [{"not": next}, next]}),
            |next| json!({"if": next, "then": next}),
            |next| json!({"if": true, "else": next, "not": next}),
            |next| json!({"dependentSchemas": {"a": next, "b": next}}),
            |next| json!({"dependencies": {"a": next, "b": next}}),
            |next| json!({"unevaluatedProperties": false, "allOf": [next], "anyOf": [next]}),
            |next| json!({"unevaluatedItems": {"type": "integer"}, "allOf": [next]}),
            |next| json!({"$ref": next["$ref"], "allOf": [next]}),
        ];
        for (index, doubling) in doublings.into_iter().enumerate() {
            for count in [30, 40] {
                let message = refused(levels(count, doubling));
                assert!(message.starts_with("too much applies to the same value at `#/"), "{index}: {message}");
            }
            assert_eq!(refused(levels(3, doubling)), "accepted", "{index}");
        }
        // Hidden under a key that holds no schemas, until a reference leads there.
        let hidden = levels(30, |next| json!({"allOf": [next, next]})).to_string().replace("$defs", "examples");
        let message = refused(serde_json::from_str(&hidden).expect("JSON"));
        assert!(message.starts_with("too much applies"), "{message}");
        let message = refused(levels(100, |next| next));
        assert!(message.starts_with("too much applies"), "a long chain: {message}");
    }

    #[test]
    fn schemas_that_double_from_level_to_level_of_the_value_are_accepted_and_cost_what_the_value_costs() {
        let wide: [fn(Value) -> Value; 4] = [
            |next| json!({"properties": {"a": next, "b": next}}),
            |next| json!({"items": next, "contains": next}),
            |next| json!({"additionalProperties": next, "patternProperties": {"^a": next}}),
            |next| json!({"unevaluatedProperties": next, "properties": {"a": next}}),
        ];
        for wide in wide {
            let schema = Schema::compile(&levels(40, wide)).expect("a level at each step");
            assert_eq!(fits(&schema, &json!({"x": {"a": {"b": {"a": 1}}}})), Ok(true));
        }
    }

    #[test]
    fn a_check_that_would_not_end_is_ended() {
        // Each level of the value is checked twice as often as the one above it.
        let twice = json!({"anyOf": [{"properties": {"a": {"$ref": "#/$defs/t"}}}, {"properties": {"a": {"$ref": "#/$defs/t"}}}]});
        let twice = json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {
            "t": {"type": "object", "properties": {"a": {"type": "object"}}, "anyOf": twice["anyOf"]},
        }});
        let schema = Schema::compile(&twice).expect("it consumes a level at each step");
        let mut deep = json!(1);
        for _ in 0..100 {
            deep = json!({ "a": deep });
        }
        let message = schema.within(Allowance::ON_WORKER, || schema.errors(&deep).len());
        assert!(message.is_err() || message.is_ok_and(|count| count > 0), "{message:?}");
        assert_eq!(fits(&schema, &json!({"a": {"a": {"a": {}}}})), Ok(true));
        // Many options, many values: a million times a hundred thousand.
        let options: Vec<Value> = (0..100_000).map(|n| json!(n)).collect();
        let schema = json!({"properties": {"a": {"items": {"not": {"enum": options}}}}});
        let schema = Schema::compile(&schema).expect("long, and honest");
        let _ = fits(&schema, &json!({ "a": vec![json!("x"); 1_000_000] }));
        // Many patterns, many properties.
        let patterns: serde_json::Map<String, Value> =
            (0..900).map(|n| (format!("^(a|b)*x{n}$"), json!(true))).collect();
        let schema =
            Schema::compile(&json!({"patternProperties": patterns, "additionalProperties": false})).expect("many");
        let many: serde_json::Map<String, Value> = (0..300_000).map(|n| (format!("ab{n}"), json!(1))).collect();
        let _ = fits(&schema, &Value::Object(many));
    }

    #[test]
    fn a_check_does_not_use_up_the_stack() {
        // Sixty steps for each of a hundred levels of the value.
        let mut defs: serde_json::Map<String, Value> =
            (0..30).map(|n| (format!("c{n}"), json!({"allOf": [{"$ref": format!("#/$defs/c{}", n + 1)}]}))).collect();
        defs.insert("c30".into(), json!({"properties": {"a": {"$ref": "#/$defs/c0"}}}));
        let schema = json!({"properties": {"a": {"$ref": "#/$defs/c0"}}, "$defs": defs});
        let schema = Schema::compile(&schema).expect("it consumes a level at each step");
        let mut deep = json!({});
        for _ in 0..125 {
            deep = json!({ "a": deep });
        }
        assert_eq!(fits(&schema, &deep), Err(Spent));
        assert_eq!(fits(&schema, &json!({"a": {"a": {}}})), Ok(true));
    }

    #[test]
    fn patterns_take_bounded_time_and_memory() {
        let with = |pattern: &str| json!({"properties": {"a": {"type": "string", "pattern": pattern}}});
        let message = refused(with("([a-z0]{900}){1000}"));
        assert!(message.starts_with("the schema is not valid at `"), "{message}");
        let many: serde_json::Map<String, Value> =
            (0..500).map(|n| (format!("p{n}"), json!({"pattern": format!("[a-z0]{{{}}}", 1000 + n)}))).collect();
        let message = refused(json!({ "properties": many }));
        assert!(message.starts_with("the schema is not valid at `"), "{message}");
        let many: serde_json::Map<String, Value> =
            (0..5000).map(|n| (format!("p{n}"), json!({"pattern": format!("^x{n}")}))).collect();
        assert_eq!(
            refused(json!({ "properties": many })),
            "the schema has too many patterns: at most 1000 different ones"
        );
        // Look-around is legitimate, endless backtracking is not: a value that exceeds the limit does not fit.
        let schema = Schema::compile(&with("^(?=.*[A-Z])(?!.*secret).{1,500}$")).expect("honest");
        assert_eq!(fits(&schema, &json!({"a": "Hello"})), Ok(true));
        assert_eq!(fits(&schema, &json!({"a": "Hello secret"})), Ok(false));
        let schema = Schema::compile(&with("^(?=a)(a|a)*(a|a)*\\1b$")).expect("it can be compiled");
        assert_eq!(fits(&schema, &json!({"a": "a".repeat(2_000)})), Ok(false));
    }

    #[test]
    fn texts_that_cost_a_pattern_too_much_end_the_check() {
        let with = |pattern: &str| {
            Schema::compile(&json!({"properties": {"a": {"pattern": pattern}}})).expect("it can be compiled")
        };
        let long = |length| json!({"a": "a".repeat(length)});
        let in_place = |schema: &Schema, value: &Value| schema.within(Allowance::IN_PLACE, || schema.is_valid(value));
        for (pattern, length) in [("(?=[ab]*a[ab]{3000}c)x", 10_000), ("[ab]*a[ab]{7000}c", 600_000)] {
            let schema = with(pattern);
            assert_eq!((in_place(&schema, &long(length)), fits(&schema, &long(length))), (Err(Spent), Err(Spent)));
            assert_eq!(in_place(&schema, &long(4)), Ok(false), "{pattern}");
        }
        let names = json!({"patternProperties": {"[ab]*a[ab]{7000}c": {}}});
        let names = Schema::compile(&names).expect("it can be compiled");
        assert_eq!(fits(&names, &json!({"a".repeat(600_000): 1})), Err(Spent));
        // Ordinary patterns check short texts in place, and long texts on a thread of their own.
        for pattern in ["^[a-z]+$", r"^https?:\/\/[^\s]+$", r"^\d{4}-\d\d-\d\d$", "^a.{0,20}"] {
            assert!(in_place(&with(pattern), &long(40)).is_ok(), "{pattern}");
        }
        assert_eq!(fits(&with("^[a-z]+$"), &long(1_000_000)), Ok(true));
    }

    #[test]
    fn long_names_in_schemas_are_not_copied_again_and_again() {
        let inner: serde_json::Map<String, Value> = (0..30_000).map(|n| (format!("p{n}"), json!({}))).collect();
        let schema = json!({"properties": {"n".repeat(500_000): {"properties": inner}}});
        assert_eq!(Schema::compile(&schema).err(), Some(SchemaError::TooLarge));
    }

    #[test]
    fn absurd_schemas_are_refused() {
        let mut deep = json!({"type": "object"});
        for _ in 0..500 {
            deep = json!({"type": "object", "properties": {"a": deep}});
        }
        assert_eq!(Schema::compile(&deep).err(), Some(SchemaError::TooLarge));
        let wide = json!({"type": "object", "description": "x".repeat(2 * BYTES_MAX)});
        assert_eq!(Schema::compile(&wide).err(), Some(SchemaError::TooLarge));
        assert_eq!(refused(json!("x")), "a tool's schema must be a JSON object that describes an object, not a string");
        assert_eq!(
            refused(json!({"type": "array"})),
            "a tool's schema must be a JSON object that describes an object, not \"array\""
        );
        assert_eq!(
            refused(json!({"type": "object", "properties": {"a": {"type": "strnig"}}})),
            r#"the schema is not valid at `/properties/a/type`: `strnig` is no type; the types are string, number, integer, boolean, object, array, null; did you mean `string`?"#
        );
        assert!(refused(json!({"properties": {"a": {"pattern": "("}}})).starts_with("the schema is not valid"));
    }
}
