//! A tool as people write it in a manifest, and its conversion to a [`ToolSpec`] and a [`CommandSpec`].

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{CommandSpec, OutputForm, Variable};
use crate::attempt::Backoff;
use crate::confinement::ResourceLimits;
use crate::duration::parse_duration;
use crate::tool::{Annotations, CachePolicy, Constraints, Footprint, Provider, ToolSpec};

/// A tool as people write it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct FileTool {
    name: Option<String>,
    description: Option<String>,
    title: Option<String>,
    version: Option<String>,
    category: Option<String>,
    command: Option<Vec<String>>,
    stdin: Option<String>,
    #[serde(default)]
    environment: BTreeMap<String, Variable>,
    folder: Option<String>,
    #[serde(default)]
    output: OutputForm,
    arguments: Option<Map<String, Value>>,
    input_schema: Option<Value>,
    output_schema: Option<Value>,
    read_only: Option<bool>,
    destructive: Option<bool>,
    idempotent: Option<bool>,
    open_world: Option<bool>,
    #[serde(default)]
    permissions: Vec<String>,
    #[serde(default)]
    confirm: bool,
    timeout: Option<FileDuration>,
    timeout_max: Option<FileDuration>,
    silence: Option<FileDuration>,
    output_bytes_max: Option<u64>,
    concurrency_max: Option<std::num::NonZeroU32>,
    #[serde(default)]
    limits: FileLimits,
    #[serde(default)]
    limits_max: FileLimits,
    #[serde(default)]
    scopes: Vec<String>,
    cache: Option<FileDuration>,
    retries: Option<u32>,
    retry_delay: Option<FileDuration>,
    retry_backoff: Option<Backoff>,
    #[serde(default)]
    sensitive: Vec<String>,
    results: Option<FileResults>,
    reads: Option<Vec<String>>,
    writes: Option<Vec<String>>,
    #[serde(default)]
    aliases: Vec<String>,
    #[serde(default)]
    argument_aliases: BTreeMap<String, String>,
}

/// The part of the results that the history stores: a definition may only say `none`.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FileResults {
    None,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct FileLimits {
    cpu_millicores: Option<u64>,
    memory_mb: Option<u64>,
    processes: Option<u64>,
    open_files: Option<u64>,
    disk_mb: Option<u64>,
    disk_files: Option<u64>,
    output_mb: Option<u64>,
}

impl FileLimits {
    fn resolve(&self) -> ResourceLimits {
        // More bytes than a number holds are no limit either.
        let bytes = |megabytes: Option<u64>| megabytes.map(|megabytes| megabytes.saturating_mul(1024 * 1024));
        ResourceLimits {
            cpu_millicores: self.cpu_millicores,
            memory_bytes: bytes(self.memory_mb),
            processes: self.processes,
            open_files: self.open_files,
            disk_bytes: bytes(self.disk_mb),
            disk_files: self.disk_files,
            output_bytes: bytes(self.output_mb),
        }
    }
}

/// A duration as people write it: `"30s"`, or a number of seconds.
#[derive(Debug, Clone, Copy)]
struct FileDuration(Duration);

impl<'de> Deserialize<'de> for FileDuration {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Text(String),
            Whole(i64),
            Fraction(f64),
        }
        let text = match Form::deserialize(deserializer) {
            Ok(Form::Text(text)) => text,
            Ok(Form::Whole(number)) => number.to_string(),
            Ok(Form::Fraction(number)) => number.to_string(),
            Err(_) => {
                return Err(serde::de::Error::custom("a duration is a text such as `30s` or a number of seconds"));
            }
        };
        parse_duration(&text).map(Self).map_err(serde::de::Error::custom)
    }
}

impl FileTool {
    /// Lists the missing keys. `given` is true for a key that the file has, or that a misspelled key may stand for.
    pub(super) fn missing(given: impl Fn(&str) -> bool) -> Vec<String> {
        let missing = ["name", "description", "command"].into_iter().filter(|key| !given(key));
        missing.map(|key| format!("missing field `{key}`")).collect()
    }

    /// Fills in harmless values for keys that are missing or cannot be read, so that the rest can be checked.
    pub(super) fn stand_in(&mut self, index: usize, given: impl Fn(&str) -> bool) {
        let has_arguments = self.arguments.is_some() || self.input_schema.is_some();
        if !has_arguments && (given("arguments") || given("input-schema")) {
            self.forget_mentions();
        }
        self.name.get_or_insert_with(|| format!("unnamed-{}", index + 1));
        self.command.get_or_insert_with(|| vec!["true".into()]);
    }

    /// Removes every mention of an argument: without the list of arguments, no mention can be checked.
    fn forget_mentions(&mut self) {
        (self.reads, self.writes, self.stdin) = (None, None, None);
        self.sensitive.clear();
        self.argument_aliases.clear();
        self.command = Some(vec!["true".into()]);
    }

    /// Converts the tool, and lists its problems.
    pub(super) fn resolve(mut self) -> (ToolSpec, CommandSpec, Vec<String>) {
        let mut wrong = Vec::new();
        let has_program = self.command.as_ref().is_some_and(|command| !command.is_empty());
        let is_named = self.command.iter().flatten().next().is_some_and(|program| !program.is_empty());
        match (has_program, is_named) {
            (false, _) => wrong.push("`command` is empty; it names the program and its arguments".into()),
            (true, false) => wrong.push("`command` names no program".into()),
            (true, true) => {}
        }
        let input_schema = match (self.arguments.take(), self.input_schema.take()) {
            (Some(_), Some(schema)) => {
                wrong.push("has both `arguments` and `input-schema`; use only one of them".into());
                self.forget_mentions();
                schema
            }
            (Some(arguments), None) => schema_from(&arguments, &mut wrong),
            (None, Some(schema)) => schema,
            (None, None) => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        };
        let mut words = self.command.take().unwrap_or_default().into_iter();
        let command = CommandSpec {
            program: words.next().filter(|program| !program.is_empty()).unwrap_or_else(|| "true".into()),
            arguments: words.collect(),
            stdin: self.stdin.take(),
            environment: std::mem::take(&mut self.environment),
            folder: self.folder.take(),
            output: self.output,
            repeats_failures: self.idempotent == Some(true) && self.retries.is_some(),
        };
        (self.spec(input_schema), command, wrong)
    }

    fn spec(self, input_schema: Value) -> ToolSpec {
        let cautious = Annotations::default();
        let read_only = self.read_only.unwrap_or(false);
        ToolSpec {
            name: self.name.unwrap_or_default(),
            title: self.title,
            description: self.description.unwrap_or_default(),
            version: self.version.unwrap_or_else(|| "1".into()),
            category: self.category.unwrap_or_else(|| "command".into()),
            input_schema,
            output_schema: self.output_schema,
            annotations: Annotations {
                read_only,
                destructive: self.destructive.unwrap_or(!read_only),
                idempotent: self.idempotent.unwrap_or(read_only),
                open_world: self.open_world.unwrap_or(cautious.open_world),
            },
            required_permissions: self.permissions,
            requires_confirmation: self.confirm,
            constraints: Constraints {
                timeout: self.timeout.map(|duration| duration.0),
                timeout_max: self.timeout_max.map(|duration| duration.0),
                silence: self.silence.map(|duration| duration.0),
                output_bytes_max: self.output_bytes_max,
                concurrency_max: self.concurrency_max.map(Into::into),
            },
            limits: self.limits.resolve(),
            limits_max: self.limits_max.resolve(),
            agent_scopes: self.scopes,
            cache: self.cache.map(|ttl| CachePolicy { ttl: ttl.0 }),
            retry: None,
            retries: self.retries,
            retry_delay: self.retry_delay.map(|duration| duration.0),
            backoff: self.retry_backoff,
            sensitive: self.sensitive,
            private_result: matches!(self.results, Some(FileResults::None)),
            footprint: (self.reads.is_some() || self.writes.is_some())
                .then(|| Footprint { reads: self.reads.unwrap_or_default(), writes: self.writes.unwrap_or_default() }),
            aliases: self.aliases,
            weak_aliases: Vec::new(),
            argument_aliases: self.argument_aliases,
            provider: Provider::Command,
        }
    }
}

/// Builds the schema of `[tool.arguments]`. Each argument is a schema of its own, with `required = true` inside.
fn schema_from(arguments: &Map<String, Value>, wrong: &mut Vec<String>) -> Value {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for (name, schema) in arguments {
        let mut schema = schema.clone();
        let is_required = match schema.as_object_mut().map(|schema| schema.shift_remove("required")) {
            Some(None | Some(Value::Bool(false))) => false,
            Some(Some(Value::Bool(true))) => true,
            Some(Some(_)) => {
                wrong.push(format!("`required` of the argument `{name}` is true or false"));
                true
            }
            None => {
                wrong.push(format!("the argument `{name}` must be a table such as {{ type = \"string\" }}"));
                schema = json!({});
                true
            }
        };
        if is_required {
            required.push(json!(name));
        }
        properties.insert(name.clone(), schema);
    }
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}
