//! Finds the subschemas of a schema, and bounds how many of them apply to the same value.
//!
//! Checking one value against a subschema also checks it against all subschemas that its `allOf`, `$ref` and the like
//! refer to, so a few lines that double forty times cause a trillion checks. [`Subschemas::check`] follows each of
//! these references once, adds up the subschemas, and refuses schemas that have too many or that loop.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use super::SchemaError;

/// Maximum number of subschemas that apply to one value.
pub(super) const EXPANDED_MAX: u64 = 10_000;
/// The longest chain of subschemas without a step into the value. It is bounded because the validator is recursive.
pub(super) const CHAIN_MAX: u32 = 64;
/// Maximum total length of the JSON pointers to all keywords: the validator stores each.
const POINTERS_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Maximum number of different patterns of a schema.
pub(super) const PATTERNS_MAX: usize = 1000;

/// The subschemas of a schema, by their address in memory.
pub(super) struct Subschemas<'a> {
    root: &'a Value,
    by_address: HashMap<*const Value, Subschema<'a>>,
    /// The anchors by name. Each is stored with the schema with an id that contains it, and with its own schema.
    anchors: HashMap<&'a str, Vec<(*const Value, &'a Value)>>,
    patterns: HashSet<&'a str>,
    patterns_beside_max: usize,
    pointers_bytes: usize,
}

#[derive(Default)]
struct Subschema<'a> {
    /// Subschemas that apply to the very same value.
    same: Vec<&'a Value>,
    references: Vec<Reference<'a>>,
    /// True for keywords such as `unevaluatedItems`, which check all of `same` once more.
    has_unevaluated: bool,
    state: ExpansionState,
}

struct Reference<'a> {
    target: String,
    is_dynamic: bool,
    base: &'a Value,
}

#[derive(Default, Clone, Copy)]
enum ExpansionState {
    #[default]
    Unseen,
    Open,
    Done(Expansion),
}

/// The size of a subschema with everything included that applies to the same value.
#[derive(Clone, Copy)]
struct Expansion {
    count: u64,
    chain: u32,
}

impl<'a> Subschemas<'a> {
    /// Collects all subschemas. Refuses references that leave the schema.
    pub(super) fn of(root: &'a Value) -> Result<Self, SchemaError> {
        let mut subschemas = Self {
            root,
            by_address: HashMap::new(),
            anchors: HashMap::new(),
            patterns: HashSet::new(),
            patterns_beside_max: 0,
            pointers_bytes: 0,
        };
        subschemas.walk(root, root, 0)?;
        Ok(subschemas)
    }

    /// Returns the different patterns.
    pub(super) fn patterns(&self) -> impl Iterator<Item = &'a str> {
        self.patterns.iter().copied()
    }

    /// Returns the maximum number of patterns that each property of an object is matched with.
    pub(super) fn patterns_beside_max(&self) -> usize {
        self.patterns_beside_max
    }

    /// Collects a subschema and all below it. `base` is the nearest enclosing schema with an id: references are
    /// resolved from there. `above` is the length of the pointer to the subschema.
    fn walk(&mut self, schema: &'a Value, base: &'a Value, above: usize) -> Result<(), SchemaError> {
        let Value::Object(map) = schema else { return Ok(()) };
        if self.by_address.contains_key(&std::ptr::from_ref(schema)) {
            return Ok(());
        }
        let has_id = ["$id", "id"].iter().any(|keyword| map.get(*keyword).is_some_and(Value::is_string));
        let base = if has_id { schema } else { base };
        let mut subschema = Subschema::default();
        for keyword in ["$anchor", "$dynamicAnchor"] {
            if let Some(Value::String(name)) = map.get(keyword) {
                self.anchors.entry(name).or_default().push((base, schema));
            }
        }
        self.pointers_bytes += above + map.keys().map(|key| above + key.len() + 1).sum::<usize>();
        if self.pointers_bytes > POINTERS_BYTES_MAX {
            return Err(SchemaError::TooLarge);
        }
        for (key, value) in map {
            let here = above + key.len() + 1;
            match (key.as_str(), value) {
                ("$ref" | "$dynamicRef" | "$recursiveRef", Value::String(target)) => match target.strip_prefix('#') {
                    Some(pointer) => {
                        let is_dynamic = key != "$ref";
                        subschema.references.push(Reference { target: percent_decoded(pointer), is_dynamic, base });
                    }
                    None => {
                        let at = format!("{}/{key}", self.pointer_to(schema));
                        return Err(SchemaError::ForeignReference { at, target: target.clone() });
                    }
                },
                ("allOf" | "anyOf" | "oneOf", Value::Array(branches)) => {
                    subschema.same.extend(branches);
                    branches.iter().try_for_each(|branch| self.walk(branch, base, here))?;
                }
                ("not" | "if" | "then" | "else", value) => {
                    subschema.same.push(value);
                    self.walk(value, base, here)?;
                }
                ("dependentSchemas" | "dependencies", Value::Object(branches)) => {
                    subschema.same.extend(branches.values());
                    self.walk_all(branches, base, here)?;
                }
                ("pattern", Value::String(pattern)) => _ = self.patterns.insert(pattern),
                ("patternProperties", Value::Object(inner)) => {
                    self.patterns.extend(inner.keys().map(String::as_str));
                    self.patterns_beside_max = self.patterns_beside_max.max(inner.len());
                    self.walk_all(inner, base, here)?;
                }
                ("properties" | "$defs" | "definitions", Value::Object(inner)) => self.walk_all(inner, base, here)?,
                // Plain data: a `$ref` in it is not a reference, unless another reference leads there.
                ("enum" | "const" | "default" | "examples", _) => {}
                (_, Value::Object(_)) => {
                    subschema.has_unevaluated |= key.starts_with("unevaluated");
                    self.walk(value, base, here)?;
                }
                (_, Value::Array(items)) => items.iter().try_for_each(|item| self.walk(item, base, here))?,
                ("unevaluatedProperties" | "unevaluatedItems", _) => subschema.has_unevaluated = true,
                _ => {}
            }
        }
        self.by_address.insert(schema, subschema);
        Ok(())
    }

    fn walk_all(&mut self, named: &'a Map<String, Value>, base: &'a Value, above: usize) -> Result<(), SchemaError> {
        named.iter().try_for_each(|(name, schema)| self.walk(schema, base, above + name.len() + 1))
    }

    /// Refuses schemas that would be too much work for any value.
    pub(super) fn check(&mut self) -> Result<(), SchemaError> {
        // A reference may lead to subschemas that were not collected before, so repeat.
        loop {
            let is_unseen = |(at, subschema): (&*const Value, &Subschema)| {
                matches!(subschema.state, ExpansionState::Unseen).then_some(*at)
            };
            let unseen: Vec<*const Value> = self.by_address.iter().filter_map(is_unseen).collect();
            if unseen.is_empty() {
                break;
            }
            unseen.into_iter().try_for_each(|at| self.expand(at, 0).map(drop))?;
        }
        if self.patterns.len() > PATTERNS_MAX { Err(SchemaError::TooManyPatterns) } else { Ok(()) }
    }

    /// Adds up the subschemas that one subschema leads to. Goes no deeper than [`CHAIN_MAX`].
    fn expand(&mut self, at: *const Value, depth: u32) -> Result<Expansion, SchemaError> {
        let Some(subschema) = self.by_address.get_mut(&at) else { return Ok(Expansion { count: 1, chain: 1 }) };
        match subschema.state {
            ExpansionState::Done(expanded) if depth + expanded.chain <= CHAIN_MAX => return Ok(expanded),
            ExpansionState::Open => return Err(SchemaError::Loop(format!("#{}", self.pointer_to(at)))),
            ExpansionState::Unseen if depth < CHAIN_MAX => {}
            _ => return Err(SchemaError::TooLargeExpanded(format!("#{}", self.pointer_to(at)))),
        }
        subschema.state = ExpansionState::Open;
        let times = if subschema.has_unevaluated { 2 } else { 1 };
        let (references, mut targets) =
            (std::mem::take(&mut subschema.references), std::mem::take(&mut subschema.same));
        for reference in &references {
            targets.extend(self.targets(reference)?);
        }
        let mut own = Expansion { count: 1, chain: 1 };
        for target in targets {
            let other = self.expand(target, depth + 1)?;
            own.count = own.count.saturating_add(other.count.saturating_mul(times));
            own.chain = own.chain.max(other.chain + 1);
        }
        if own.count > EXPANDED_MAX {
            return Err(SchemaError::TooLargeExpanded(format!("#{}", self.pointer_to(at))));
        }
        if let Some(subschema) = self.by_address.get_mut(&at) {
            subschema.state = ExpansionState::Done(own);
        }
        Ok(own)
    }

    /// Finds the targets of a reference. JSON Schema drafts disagree on the meaning of an id, so both readings count. A
    /// dynamic reference may lead to every anchor of its name.
    fn targets(&mut self, reference: &Reference<'a>) -> Result<Vec<&'a Value>, SchemaError> {
        let Reference { target, is_dynamic, base } = reference;
        let mut found: Vec<&'a Value> = Vec::new();
        if target.is_empty() || target.starts_with('/') {
            found.extend([*base, self.root].iter().filter_map(|base| base.pointer(target)));
        } else {
            let bases = [std::ptr::from_ref(*base), std::ptr::from_ref(self.root)];
            let named = self.anchors.get(target.as_str()).into_iter().flatten();
            found.extend(named.filter(|(base, _)| *is_dynamic || bases.contains(base)).map(|(_, schema)| schema));
        }
        found.dedup_by_key(|value| std::ptr::from_ref(*value));
        // A value that looked like plain data becomes a schema when a reference leads there.
        for target in &found {
            self.walk(target, base, reference.target.len())?;
        }
        Ok(found)
    }

    /// Returns the JSON pointer to a subschema, for messages.
    fn pointer_to(&self, at: *const Value) -> String {
        fn find(value: &Value, at: *const Value, path: &mut Vec<String>) -> bool {
            if std::ptr::eq(value, at) {
                return true;
            }
            let mut inner: Box<dyn Iterator<Item = (String, &Value)>> = match value {
                Value::Object(map) => Box::new(map.iter().map(|(key, value)| (key.clone(), value))),
                Value::Array(items) => Box::new(items.iter().enumerate().map(|(n, value)| (n.to_string(), value))),
                _ => return false,
            };
            inner.any(|(key, value)| {
                path.push(key);
                let found = find(value, at, path);
                if !found {
                    path.pop();
                }
                found
            })
        }
        let mut path = Vec::new();
        find(self.root, at, &mut path);
        path.iter().map(|key| format!("/{}", key.replace('~', "~0").replace('/', "~1"))).collect()
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
