//! Schemas: compiled once, and safe to use although strangers wrote them.
//!
//! A schema may come from a manifest or a foreign server. It is never followed to a file or an address, it
//! cannot loop, and it has a size; what breaks one of these rules is refused when the tool is registered.

use std::collections::{HashMap, HashSet};

use jsonschema::Validator;
use serde_json::{Map, Value, json};

/// How large a schema may be, written as JSON.
const BYTES_MAX: usize = 1024 * 1024;
/// How deep a schema may be nested.
const DEPTH_MAX: usize = 128;

/// A compiled schema.
pub(crate) struct Schema {
    validator: Validator,
    raw: Value,
    has_defaults: bool,
}

/// Why a schema cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemaError {
    /// Not an object, or not for objects.
    #[error("a tool's schema must be a JSON object that describes an object, not {0}")]
    NotAnObject(String),
    /// Larger or deeper than any honest schema.
    #[error("the schema is too large: at most {BYTES_MAX} bytes and {DEPTH_MAX} levels")]
    TooLarge,
    /// A reference that leaves the schema.
    #[error("the reference `{target}` at `{at}` leaves the schema; only references within it (`#/…`) are followed")]
    ForeignReference {
        /// Where it stands.
        at: String,
        /// Where it points.
        target: String,
    },
    /// References that lead back to themselves without consuming anything.
    #[error("the references at `{0}` lead back to themselves, so checking a value would never end")]
    Loop(String),
    /// What the schema language itself says.
    #[error("the schema is not valid at `{at}`: {message}")]
    Invalid {
        /// Where.
        at: String,
        /// What.
        message: String,
    },
}

impl Schema {
    /// Checks and compiles a schema. No schema at all stands for an object with any properties.
    pub(crate) fn compile(raw: &Value) -> Result<Self, SchemaError> {
        let raw = if raw.is_null() { json!({"type": "object"}) } else { raw.clone() };
        match raw.get("type") {
            _ if !raw.is_object() => return Err(SchemaError::NotAnObject(kind_of(&raw).into())),
            None => {}
            Some(Value::String(kind)) if kind == "object" => {}
            Some(kind) => return Err(SchemaError::NotAnObject(kind.to_string())),
        }
        check_safe(&raw)?;
        Self::compile_any(raw)
    }

    /// Checks and compiles a schema for any kind of value.
    pub(crate) fn compile_output(raw: &Value) -> Result<Self, SchemaError> {
        check_safe(raw)?;
        Self::compile_any(raw.clone())
    }

    fn compile_any(raw: Value) -> Result<Self, SchemaError> {
        let validator = jsonschema::options().build(&raw).map_err(|error| SchemaError::Invalid {
            at: error.instance_path().to_string(),
            message: error.masked().to_string(),
        })?;
        let has_defaults = has_key(&raw, "default");
        Ok(Self { validator, raw, has_defaults })
    }

    pub(crate) fn validator(&self) -> &Validator {
        &self.validator
    }

    /// Whether values that leave something out may get it filled in.
    pub(crate) fn has_defaults(&self) -> bool {
        self.has_defaults
    }

    pub(crate) fn root(&self) -> &Value {
        &self.raw
    }

    /// The schema itself, or what it refers to within the same document.
    pub(crate) fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        let mut current = schema;
        // A chain that is longer is a loop, and loops were refused.
        for _ in 0..DEPTH_MAX {
            let Some(pointer) = current.get("$ref").and_then(Value::as_str).and_then(|target| target.strip_prefix('#'))
            else {
                return current;
            };
            match self.raw.pointer(pointer) {
                Some(next) => current = next,
                None => return current,
            }
        }
        current
    }
}

/// What a value is, in the words of JSON.
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

/// Refuses what would be dangerous to compile or to use.
fn check_safe(raw: &Value) -> Result<(), SchemaError> {
    if measure(raw, DEPTH_MAX, BYTES_MAX).is_none() {
        return Err(SchemaError::TooLarge);
    }
    let mut places = Places::default();
    places.walk(raw, String::new(), "")?;
    places.check_loops()
}

/// What was seen in a value of a bounded size on the one walk through it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Measured {
    /// Whether a number is written with a fraction.
    pub(crate) has_float: bool,
}

/// Walks a value that is at most so deep and, roughly, so many bytes large; `None` where it is not. Itself safe for any
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
    fits(value, depth_max, &mut bytes_left, &mut seen).then_some(seen)
}

/// The subschemas of a schema by their JSON pointer, with those that apply to the very same value.
#[derive(Default)]
struct Places {
    same_value: HashMap<String, Vec<String>>,
    anchors: HashMap<String, String>,
}

impl Places {
    /// Notes a subschema and all below it. `base` is where the schema with an id of its own begins that it is part of:
    /// references within it start there.
    fn walk(&mut self, schema: &Value, at: String, base: &str) -> Result<(), SchemaError> {
        let Value::Object(map) = schema else { return Ok(()) };
        let has_id = ["$id", "id"].iter().any(|keyword| map.get(*keyword).is_some_and(Value::is_string));
        let own = at.clone();
        let base = if has_id { own.as_str() } else { base };
        let mut same = Vec::new();
        for keyword in ["$anchor", "$dynamicAnchor"] {
            if let Some(Value::String(name)) = map.get(keyword) {
                self.anchors.insert(format!("{base}#{name}"), at.clone());
            }
        }
        for (key, value) in map {
            let here = format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
            match (key.as_str(), value) {
                ("$ref" | "$dynamicRef" | "$recursiveRef", Value::String(target)) => match target.strip_prefix('#') {
                    Some(pointer) => {
                        let pointer = percent_decoded(pointer);
                        let mark = if pointer.is_empty() || pointer.starts_with('/') { "" } else { "#" };
                        // Drafts differ in what is an id, so both readings count.
                        same.extend([base, ""].map(|base| format!("{base}{mark}{pointer}")));
                    }
                    None => return Err(SchemaError::ForeignReference { at: here, target: target.clone() }),
                },
                ("allOf" | "anyOf" | "oneOf", Value::Array(branches)) => {
                    for (index, branch) in branches.iter().enumerate() {
                        same.push(format!("{here}/{index}"));
                        self.walk(branch, format!("{here}/{index}"), base)?;
                    }
                }
                ("not" | "if" | "then" | "else", value) => {
                    same.push(here.clone());
                    self.walk(value, here, base)?;
                }
                ("dependentSchemas" | "dependencies", Value::Object(branches)) => {
                    for (name, branch) in branches {
                        let branch_at = format!("{here}/{}", name.replace('~', "~0").replace('/', "~1"));
                        same.push(branch_at.clone());
                        self.walk(branch, branch_at, base)?;
                    }
                }
                // Plain data: what looks like a reference in it is none.
                ("enum" | "const" | "default" | "examples", _) => {}
                (_, Value::Object(inner)) => self.walk_inner(inner, value, here, base)?,
                (_, Value::Array(items)) => {
                    for (index, item) in items.iter().enumerate() {
                        self.walk(item, format!("{here}/{index}"), base)?;
                    }
                }
                _ => {}
            }
        }
        self.same_value.insert(at, same);
        Ok(())
    }

    /// A keyword's object is a schema, or a map of schemas such as `properties`; both are walked alike.
    fn walk_inner(
        &mut self,
        inner: &Map<String, Value>,
        value: &Value,
        at: String,
        base: &str,
    ) -> Result<(), SchemaError> {
        let is_map = ["properties", "patternProperties", "$defs", "definitions"].iter().any(|word| at.ends_with(word));
        if !is_map {
            return self.walk(value, at, base);
        }
        for (name, schema) in inner {
            self.walk(schema, format!("{at}/{}", name.replace('~', "~0").replace('/', "~1")), base)?;
        }
        Ok(())
    }

    fn check_loops(&self) -> Result<(), SchemaError> {
        let mut done = HashSet::new();
        for start in self.same_value.keys() {
            // Depth first with an explicit stack: `path` holds the places between `start` and here.
            let (mut open, mut path) = (vec![(start.as_str(), 0_usize)], Vec::<&str>::new());
            while let Some((at, depth)) = open.pop() {
                while path.len() > depth {
                    done.insert(path.pop().expect("it is longer than `depth`"));
                }
                if path.contains(&at) {
                    return Err(SchemaError::Loop(format!("#{at}")));
                }
                if done.contains(at) {
                    continue;
                }
                path.push(at);
                for target in self.same_value.get(at).into_iter().flatten() {
                    let target = self.anchors.get(target).unwrap_or(target);
                    open.push((target, depth + 1));
                }
            }
            done.extend(path);
        }
        Ok(())
    }
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let hex = tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match (first, hex.and_then(|hex| u8::from_str_radix(hex, 16).ok())) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(schema: Value) -> String {
        Schema::compile(&schema).err().map_or_else(|| "accepted".into(), |error| error.to_string())
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
    fn schemas_that_loop_are_refused_and_recursive_ones_are_not() {
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
        assert!(schema.validator().is_valid(&json!({"left": {"right": {}}})));
        assert!(!schema.validator().is_valid(&json!({"left": {"middle": {}}})));
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
            r#"the schema is not valid at `/properties/a/type`: value is not valid under any of the schemas listed in the 'anyOf' keyword"#
        );
        assert!(refused(json!({"properties": {"a": {"pattern": "("}}})).starts_with("the schema is not valid"));
    }
}
