//! Manifests: tools that come from a file and need no Rust.
//!
//! Three forms are read: our own in TOML, the same in JSON, and the function-calling JSON of models' APIs, which
//! has definitions only. What cannot be read ends the reading; all other problems of a file are reported at once, each
//! with its place.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::attempt::RetryPolicy;
use crate::confinement::ResourceLimits;
use crate::duration::parse_duration;
use crate::input::Input;
use crate::name::{ToolName, hint_for_unknown_key};
use crate::run::Run;
use crate::schema::Schema;
use crate::tool::{Annotations, AnyTool, CachePolicy, Constraints, Footprint, Outcome, Provider, RunError, ToolSpec};

/// How large a manifest may be.
const BYTES_MAX: usize = 16 * 1024 * 1024;

/// The tools of one file.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// In the order of the file.
    pub tools: Vec<ManifestTool>,
}

/// One tool of a manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct ManifestTool {
    /// What it declares.
    pub spec: ToolSpec,
    /// The program that runs it; none where the file has definitions only.
    pub command: Option<CommandSpec>,
    /// The line in the file that it starts at, where that is known.
    pub line: Option<usize>,
}

/// The program behind a command tool. Arguments hold placeholders such as `{path}`; no shell is involved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandSpec {
    /// The program.
    pub program: String,
    /// Its arguments, with placeholders.
    pub arguments: Vec<String>,
    /// What it reads, with placeholders; nothing where absent.
    pub stdin: Option<String>,
    /// What its environment has beside the allowed part of the executor's.
    pub environment: BTreeMap<String, String>,
    /// Where it starts, relative to the workspace.
    pub folder: Option<String>,
    /// What its output is.
    pub output: OutputForm,
}

/// What a command's output is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OutputForm {
    /// Text, as it is.
    #[default]
    Text,
    /// JSON, which becomes the structured answer.
    Json,
}

/// Everything that is wrong with a manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ManifestError(pub Vec<Problem>);

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where: the line in the file, where that is known.
    pub line: Option<usize>,
    /// Which tool, where that is known.
    pub tool: Option<String>,
    /// What.
    pub message: String,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if let Some(tool) = &self.tool {
            write!(f, "tool `{tool}`: ")?;
        }
        f.write_str(&self.message)
    }
}

impl ManifestError {
    fn one(line: Option<usize>, message: String) -> Self {
        let message = match hint_for_unknown_key(&message) {
            // Whoever is told which key was meant need not read the list of all of them.
            Some(hint) => format!("{}; {hint}", message.split(", expected ").next().unwrap_or(&message)),
            None => message,
        };
        Self(vec![Problem { line, tool: None, message }])
    }
}

impl Manifest {
    /// Reads a manifest in TOML.
    pub fn from_toml(text: &str) -> Result<Self, ManifestError> {
        check_size(text)?;
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct File {
            #[serde(default)]
            tool: Vec<toml::Spanned<FileTool>>,
        }
        let file: File = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| line_at(text, span.start));
            ManifestError::one(line, error.message().to_owned())
        })?;
        let tools = file.tool.into_iter().map(|tool| (Some(line_at(text, tool.span().start)), tool.into_inner()));
        Self::resolve(tools)
    }

    /// Reads a manifest in JSON: our own form `{"tools": […]}`, or a list of functions as models' APIs take it.
    pub fn from_json(text: &str) -> Result<Self, ManifestError> {
        check_size(text)?;
        let unreadable = |error: serde_json::Error| {
            let line = Some(error.line()).filter(|line| *line > 0);
            let message = error.to_string();
            let message = message.split(" at line ").next().unwrap_or_default().to_owned();
            ManifestError::one(line, message)
        };
        let value: Value = serde_json::from_str(text).map_err(unreadable)?;
        if value.get("tools").is_some_and(|tools| tools.as_array().is_some_and(|tools| !tools.iter().any(is_function)))
        {
            #[derive(Deserialize)]
            #[serde(deny_unknown_fields)]
            struct File {
                tools: Vec<FileTool>,
            }
            // Read again from the text, so that mistakes have a line.
            let file: File = serde_json::from_str(text).map_err(unreadable)?;
            return Self::resolve(file.tools.into_iter().map(|tool| (None, tool)));
        }
        let functions = match value.get("tools").or(value.get("functions")).unwrap_or(&value) {
            Value::Array(functions) => functions,
            _ => return Err(ManifestError::one(None, "neither `{\"tools\": […]}` nor a list of functions".into())),
        };
        let functions: Vec<_> =
            functions.iter().enumerate().map(|(index, function)| from_function(index, function)).collect();
        Self::gather(functions.into_iter().map(|spec| (None, spec.map(|spec| (spec, None)))))
    }

    fn resolve(tools: impl Iterator<Item = (Option<usize>, FileTool)>) -> Result<Self, ManifestError> {
        Self::gather(tools.map(|(line, tool)| (line, tool.resolve(line))))
    }

    fn gather(
        tools: impl Iterator<Item = (Option<usize>, Result<(ToolSpec, Option<CommandSpec>), Vec<Problem>>)>,
    ) -> Result<Self, ManifestError> {
        let (mut good, mut problems) = (Vec::<ManifestTool>::new(), Vec::new());
        for (line, tool) in tools {
            match tool {
                Ok((spec, command)) => {
                    problems.extend(check(&spec, line));
                    if good.iter().any(|other| other.spec.name == spec.name) {
                        let message = "there is another tool of this name in the file".into();
                        problems.push(Problem { line, tool: Some(spec.name.clone()), message });
                    }
                    good.push(ManifestTool { spec, command, line });
                }
                Err(more) => problems.extend(more),
            }
        }
        if problems.is_empty() { Ok(Self { tools: good }) } else { Err(ManifestError(problems)) }
    }
}

fn check_size(text: &str) -> Result<(), ManifestError> {
    if text.len() <= BYTES_MAX {
        return Ok(());
    }
    Err(ManifestError::one(None, format!("the file has {} bytes; at most {BYTES_MAX} are read", text.len())))
}

fn line_at(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset.min(text.len())].iter().filter(|byte| **byte == b'\n').count() + 1
}

/// What registering the tool would refuse, found while its place in the file is known.
fn check(spec: &ToolSpec, line: Option<usize>) -> Vec<Problem> {
    let mut messages = Vec::new();
    for name in std::iter::once(&spec.name).chain(&spec.aliases) {
        messages.extend(ToolName::new(name).err().map(|error| error.to_string()));
    }
    messages.extend(Schema::compile(&spec.input_schema).err().map(|error| error.to_string()));
    if let Some(output) = &spec.output_schema {
        messages.extend(Schema::compile_output(output).err().map(|error| error.to_string()));
    }
    let properties = spec.input_schema.get("properties").and_then(Value::as_object);
    let footprint = spec.footprint.iter().flat_map(|footprint| footprint.reads.iter().chain(&footprint.writes));
    for argument in footprint.chain(&spec.sensitive).filter(|argument| !argument.starts_with('/')) {
        if properties.is_none_or(|properties| !properties.contains_key(argument)) {
            let known = properties.into_iter().flat_map(Map::keys).map(String::as_str);
            let hint = crate::name::did_you_mean(&crate::name::near_misses(argument, known));
            let hint = hint.map(|hint| format!("; {hint}")).unwrap_or_default();
            messages.push(format!("there is no argument `{argument}`{hint}"));
        }
    }
    messages.extend(spec.limits.zeroes().iter().map(|name| format!("the limit `{name}` is 0, so it could never run")));
    let tool: String = spec.name.chars().take(64).flat_map(char::escape_debug).collect();
    messages.into_iter().map(|message| Problem { line, tool: Some(tool.clone()), message }).collect()
}

/// A tool as people write it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct FileTool {
    name: String,
    description: String,
    title: Option<String>,
    version: Option<String>,
    category: Option<String>,
    command: Vec<String>,
    stdin: Option<String>,
    #[serde(default)]
    environment: BTreeMap<String, String>,
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
    scopes: Vec<String>,
    cache: Option<FileDuration>,
    retries: Option<u32>,
    #[serde(default)]
    sensitive: Vec<String>,
    reads: Option<Vec<String>>,
    writes: Option<Vec<String>>,
    #[serde(default)]
    aliases: Vec<String>,
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
    fn resolve(self, line: Option<usize>) -> Result<(ToolSpec, Option<CommandSpec>), Vec<Problem>> {
        let problem = |message: &str| vec![Problem { line, tool: Some(self.name.clone()), message: message.into() }];
        let input_schema = match (&self.arguments, &self.input_schema) {
            (Some(_), Some(_)) => return Err(problem("has both `arguments` and `input-schema`; one says it all")),
            (Some(arguments), None) => schema_from(arguments).map_err(|message| problem(&message))?,
            (None, Some(schema)) => schema.clone(),
            (None, None) => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        };
        let [program, arguments @ ..] = self.command.as_slice() else {
            return Err(problem("`command` is empty; it names the program and its arguments"));
        };
        if program.is_empty() {
            return Err(problem("`command` names no program"));
        }
        let megabytes = |count: Option<u64>| count.map(|count| count.saturating_mul(1024 * 1024));
        let cautious = Annotations::default();
        let read_only = self.read_only.unwrap_or(false);
        let spec = ToolSpec {
            name: self.name.clone(),
            title: self.title,
            description: self.description,
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
            limits: ResourceLimits {
                cpu_millicores: self.limits.cpu_millicores,
                memory_bytes: megabytes(self.limits.memory_mb),
                processes: self.limits.processes,
                open_files: self.limits.open_files,
                disk_bytes: megabytes(self.limits.disk_mb),
                disk_files: self.limits.disk_files,
                output_bytes: megabytes(self.limits.output_mb),
            },
            agent_scopes: self.scopes,
            cache: self.cache.map(|ttl| CachePolicy { ttl: ttl.0 }),
            retry: self.retries.map(|retries| RetryPolicy { retries, ..RetryPolicy::default() }),
            sensitive: self.sensitive,
            footprint: (self.reads.is_some() || self.writes.is_some())
                .then(|| Footprint { reads: self.reads.unwrap_or_default(), writes: self.writes.unwrap_or_default() }),
            aliases: self.aliases,
            provider: Provider::Command,
        };
        let command = CommandSpec {
            program: program.clone(),
            arguments: arguments.to_vec(),
            stdin: self.stdin,
            environment: self.environment,
            folder: self.folder,
            output: self.output,
        };
        Ok((spec, Some(command)))
    }
}

/// The schema of `[tool.arguments]`: each a schema of its own, with `required = true` inside.
fn schema_from(arguments: &Map<String, Value>) -> Result<Value, String> {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for (name, schema) in arguments {
        let Value::Object(schema) = schema else {
            return Err(format!("the argument `{name}` must be a table such as {{ type = \"string\" }}"));
        };
        let mut schema = schema.clone();
        match schema.shift_remove("required") {
            None | Some(Value::Bool(false)) => {}
            Some(Value::Bool(true)) => required.push(json!(name)),
            Some(_) => return Err(format!("`required` of the argument `{name}` is true or false")),
        }
        properties.insert(name.clone(), Value::Object(schema));
    }
    Ok(json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false}))
}

fn is_function(value: &Value) -> bool {
    ["function", "parameters", "input_schema"].iter().any(|key| value.get(key).is_some())
}

/// A function as models' APIs take it, bare or wrapped, with `agent_scope` and `category` beside or inside.
fn from_function(index: usize, value: &Value) -> Result<ToolSpec, Vec<Problem>> {
    let function = value.get("function").unwrap_or(value);
    let problem = |message: String| {
        let tool = function.get("name").and_then(Value::as_str).map(|name| name.chars().take(64).collect());
        vec![Problem { line: None, tool: tool.or(Some(format!("#{}", index + 1))), message }]
    };
    let text = |key: &str| match function.get(key).or(value.get(key)) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(problem(format!("`{key}` must be a text"))),
    };
    let name = text("name")?.ok_or_else(|| problem("a function needs a `name`".into()))?;
    let mut spec = ToolSpec::new(name, text("description")?.unwrap_or_default());
    spec.input_schema = function.get("parameters").or(function.get("input_schema")).cloned().unwrap_or(Value::Null);
    if let Some(category) = text("category")? {
        spec.category = category;
    }
    let scopes = function.get("agent_scope").or(value.get("agent_scope"));
    spec.agent_scopes = match scopes {
        None => Vec::new(),
        Some(Value::String(scope)) => vec![scope.clone()],
        Some(list) => serde_json::from_value(list.clone())
            .map_err(|_| problem("`agent_scope` must be a text or a list of texts".into()))?,
    };
    Ok(spec)
}

/// A definition whose implementation is not there: it can be seen, and says what to do when it is called.
pub struct Unbound {
    spec: ToolSpec,
    needs: String,
}

impl Unbound {
    /// A tool that needs something configured, in words such as "a GitHub token (`github.token`)".
    pub fn tool(spec: ToolSpec, needs: impl Into<String>) -> Arc<dyn AnyTool> {
        Arc::new(Self { spec, needs: needs.into() })
    }
}

impl AnyTool for Unbound {
    fn spec(&self) -> ToolSpec {
        self.spec.clone()
    }

    fn run<'a>(&'a self, _input: &'a Input, _run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        let told = format!("`{}` is defined, but what it needs is not configured", self.spec.name);
        Box::pin(async move { Err(RunError::configuration(told, format!("configure {}", self.needs))) })
    }
}
