//! Manifests: reads tool definitions from files, without any Rust.
//!
//! Three forms are supported: wieldy's own form in TOML, the same in JSON, and the function-calling JSON of models'
//! APIs, which has definitions only. All problems of a file are reported at once, each with its place. A file that is
//! not valid TOML or JSON at all reports only that one problem.

mod file;
mod variable;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::mistakes::{key_at, read_table};
use crate::name::{ToolName, hint_for_unknown_key, in_plain_words, near_misses};
use crate::schema::Schema;
use crate::spelling::alias_mistakes;
use crate::tool::ToolSpec;

use file::FileTool;
pub use variable::{Variable, VariableFile};

/// Maximum size of a manifest in bytes.
const BYTES_MAX: usize = 16 * 1024 * 1024;

/// The tools of one file.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// The tools, in the order of the file.
    pub tools: Vec<ManifestTool>,
}

/// One tool of a manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct ManifestTool {
    /// The tool's declaration.
    pub spec: ToolSpec,
    /// The program that runs it; `None` if the file has definitions only.
    pub command: Option<CommandSpec>,
    /// The line of the file on which the tool starts, if known.
    pub line: Option<usize>,
}

/// The program behind a command tool. Arguments hold placeholders such as `{path}`; no shell is involved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandSpec {
    /// The program.
    pub program: String,
    /// Its arguments, with placeholders.
    pub arguments: Vec<String>,
    /// The text of its stdin, with placeholders; empty if `None`.
    pub stdin: Option<String>,
    /// Environment variables, beside those that the executor passes on from its own environment.
    pub environment: BTreeMap<String, Variable>,
    /// The working directory, relative to the workspace.
    pub folder: Option<String>,
    /// The form of its output.
    pub output: OutputForm,
    /// True if a non-zero exit code is worth another attempt: the author set both `idempotent = true` and `retries`.
    pub repeats_failures: bool,
}

/// The form of a command's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OutputForm {
    /// Text, as it is.
    #[default]
    Text,
    /// JSON, which becomes the structured answer.
    Json,
}

/// All problems of a manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ManifestError(pub Vec<Problem>);

/// One problem of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The line of the file, if known.
    pub line: Option<usize>,
    /// The tool, if known.
    pub tool: Option<String>,
    /// The description of the problem.
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

/// Makes a problem, with the parser's message in plain words.
fn problem(line: Option<usize>, tool: Option<String>, message: &str) -> Problem {
    let plain = in_plain_words(message);
    let message = match hint_for_unknown_key(message) {
        // The hint names the right key, so the list of all keys is not needed.
        Some(hint) => format!("{}; {hint}", plain.split(", expected ").next().unwrap_or(&plain)),
        None => plain,
    };
    Problem { line, tool, message }
}

impl Manifest {
    /// Reads a manifest in TOML.
    pub fn from_toml(text: &str) -> Result<Self, ManifestError> {
        into_result(Self::survey_toml(text))
    }

    /// Reads a manifest in JSON: wieldy's own form `{"tools": […]}`, or a list of functions as models' APIs take it.
    pub fn from_json(text: &str) -> Result<Self, ManifestError> {
        into_result(Self::survey_json(text))
    }

    /// Reads as much as possible of a manifest in TOML, and reports every problem.
    pub fn survey_toml(text: &str) -> (Self, Vec<Problem>) {
        let none = Self { tools: Vec::new() };
        if let Some(too_large) = check_size(text) {
            return (none, vec![too_large]);
        }
        let line = |error: &toml::de::Error| error.span().map(|span| line_at(text, span.start));
        let table = match toml::de::DeTable::parse(text) {
            Ok(table) => table.into_inner(),
            Err(error) => return (none, vec![problem(line(&error), None, error.message())]),
        };
        let (mut tools, mut problems) = (Vec::new(), Vec::new());
        for (key, value) in table {
            let at = line_at(text, key.span().start);
            if key.get_ref() != "tool" {
                problems.push(problem(Some(at), None, &format!("unknown field `{}`, expected `tool`", key.get_ref())));
                continue;
            }
            let toml::de::DeValue::Array(items) = value.into_inner() else {
                problems.push(problem(Some(at), None, "`tool` must be a list; write `[[tool]]`"));
                continue;
            };
            for (index, item) in items.into_iter().enumerate() {
                let (span, item) = (item.span(), item.into_inner());
                let at = line_at(text, span.start);
                let toml::de::DeValue::Table(table) = item else {
                    problems.push(problem(Some(at), None, "a tool must be a table; write `[[tool]]`"));
                    continue;
                };
                let name = table.get("name").and_then(|name| name.get_ref().as_str()).map(shown_name);
                let mistake = |error: &toml::de::Error| {
                    let key = error.span().and_then(|span| key_at(&table, span.start));
                    let mut reported = problem(line(error).or(Some(at)), name.clone(), error.message());
                    // The message already names an unknown key.
                    if let Some(key) = key.filter(|_| !error.message().starts_with("unknown field")) {
                        reported.message = format!("`{key}`: {}", reported.message);
                    }
                    reported
                };
                let (tool, mistakes) = read_table::<FileTool>(toml::Spanned::new(span, table.clone()));
                let unknown = unknown_keys(mistakes.iter().map(toml::de::Error::message));
                let given = |key: &str| table.contains_key(key) || may_mean(&unknown, key);
                problems.extend(mistakes.iter().map(mistake));
                let missing = FileTool::missing(given);
                problems.extend(missing.iter().map(|message| problem(Some(at), name.clone(), message)));
                tools.extend(tool.map(|mut tool| {
                    tool.stand_in(index, given);
                    (Some(at), tool)
                }));
            }
        }
        let (manifest, more) = Self::resolve(tools.into_iter());
        problems.extend(more);
        (manifest, problems)
    }

    /// Reads as much as possible of a manifest in JSON, and reports every problem.
    pub fn survey_json(text: &str) -> (Self, Vec<Problem>) {
        let none = Self { tools: Vec::new() };
        if let Some(too_large) = check_size(text) {
            return (none, vec![too_large]);
        }
        let line = |error: &serde_json::Error| Some(error.line()).filter(|line| *line > 0);
        let value: Value = match serde_json::from_str(text) {
            Ok(value) => value,
            Err(error) => return (none, vec![problem(line(&error), None, &without_place(&error))]),
        };
        let own = value.get("tools").and_then(Value::as_array).filter(|tools| !tools.iter().any(is_function));
        if let Some(own) = own {
            let (mut tools, mut problems) = (Vec::new(), Vec::new());
            let unknown = value.as_object().into_iter().flat_map(Map::keys).filter(|key| *key != "tools");
            problems
                .extend(unknown.map(|key| problem(None, None, &format!("unknown field `{key}`, expected `tools`"))));
            for (index, value) in own.iter().enumerate() {
                let name = value.get("name").and_then(Value::as_str).map(shown_name);
                let (tool, mistakes) = read_json(value.clone());
                let unknown = unknown_keys(mistakes.iter().map(String::as_str));
                let given = |key: &str| value.get(key).is_some() || may_mean(&unknown, key);
                let missing = if value.is_object() { FileTool::missing(given) } else { Vec::new() };
                problems.extend(mistakes.iter().chain(&missing).map(|message| problem(None, name.clone(), message)));
                tools.extend(tool.map(|mut tool| {
                    tool.stand_in(index, given);
                    (None, tool)
                }));
            }
            // Parses the text once more: only this parser knows the line, and only of the first mistake.
            if let Err(error) = serde_json::from_str::<JsonFile>(text) {
                let message = problem(None, None, &without_place(&error)).message;
                let first = problems.iter_mut().find(|problem| problem.message == message);
                first.into_iter().for_each(|first| first.line = line(&error));
            }
            let (manifest, more) = Self::resolve(tools.into_iter());
            problems.extend(more);
            return (manifest, problems);
        }
        let functions = match value.get("tools").or(value.get("functions")).unwrap_or(&value) {
            Value::Array(functions) => functions,
            _ => return (none, vec![problem(None, None, "neither `{\"tools\": […]}` nor a list of functions")]),
        };
        let functions = functions.iter().enumerate().map(|(index, function)| from_function(index, function));
        Self::gather(functions.map(|(spec, wrong)| (ManifestTool { spec, command: None, line: None }, wrong)))
    }

    fn resolve(tools: impl Iterator<Item = (Option<usize>, FileTool)>) -> (Self, Vec<Problem>) {
        let resolved = tools.map(|(line, tool)| {
            let (spec, command, wrong) = tool.resolve();
            let name = shown_name(&spec.name);
            let wrong = wrong.into_iter().map(|message| Problem { line, tool: Some(name.clone()), message }).collect();
            (ManifestTool { spec, command: Some(command), line }, wrong)
        });
        Self::gather(resolved)
    }

    /// Collects the tools with the problems of each, and checks each tool's declaration.
    fn gather(tools: impl Iterator<Item = (ManifestTool, Vec<Problem>)>) -> (Self, Vec<Problem>) {
        let (mut read, mut problems) = (Vec::<ManifestTool>::new(), Vec::new());
        for (tool, wrong) in tools {
            problems.extend(wrong);
            problems.extend(check(&tool.spec, tool.line));
            if read.iter().any(|other| other.spec.name == tool.spec.name) {
                let message = "there is another tool of this name in the file".into();
                problems.push(Problem { line: tool.line, tool: Some(tool.spec.name.clone()), message });
            }
            read.push(tool);
        }
        (Self { tools: read }, problems)
    }
}

fn into_result((manifest, problems): (Manifest, Vec<Problem>)) -> Result<Manifest, ManifestError> {
    if problems.is_empty() { Ok(manifest) } else { Err(ManifestError(problems)) }
}

/// The top level of wieldy's own form of JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonFile {
    #[expect(dead_code, reason = "only its mistakes matter")]
    tools: Vec<FileTool>,
}

/// Reads one tool of a JSON file and lists its mistakes. A key at fault is removed, and the rest is read again.
fn read_json(mut tool: Value) -> (Option<FileTool>, Vec<String>) {
    let mut mistakes = Vec::new();
    for _ in 0..20 {
        let message = match FileTool::deserialize(&tool) {
            Ok(tool) => return (Some(tool), mistakes),
            Err(error) => without_place(&error),
        };
        let unknown = unknown_key(&message).map(str::to_owned);
        let at_fault = unknown.or_else(|| unreadable_key(tool.as_object()?));
        mistakes.push(message);
        let is_taken_out = match (at_fault, tool.as_object_mut()) {
            (Some(key), Some(tool)) => tool.shift_remove(&key).is_some(),
            _ => false,
        };
        if !is_taken_out {
            break;
        }
    }
    (None, mistakes)
}

/// Returns the first key of a tool that cannot be read even alone.
fn unreadable_key(tool: &Map<String, Value>) -> Option<String> {
    let alone = |key: &String, value: &Value| Value::Object(Map::from_iter([(key.clone(), value.clone())]));
    tool.iter().find(|(key, value)| FileTool::deserialize(alone(key, value)).is_err()).map(|(key, _)| key.clone())
}

/// Returns the unknown keys that these error messages name.
fn unknown_keys<'a>(messages: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    messages.filter_map(unknown_key).collect()
}

fn unknown_key(message: &str) -> Option<&str> {
    Some(message.strip_prefix("unknown field `")?.split_once('`')?.0)
}

/// Returns true if one of the unknown keys may be this key, misspelled.
fn may_mean(unknown: &[&str], key: &str) -> bool {
    unknown.iter().any(|unknown| !near_misses(unknown, [key]).is_empty())
}

/// Returns the message without "at line 1 column 2".
fn without_place(error: &serde_json::Error) -> String {
    error.to_string().split(" at line ").next().unwrap_or_default().to_owned()
}

/// Escapes and shortens an unchecked name, for messages.
fn shown_name(name: &str) -> String {
    name.chars().take(64).flat_map(char::escape_debug).collect()
}

fn check_size(text: &str) -> Option<Problem> {
    let message = || format!("the file has {} bytes; at most {BYTES_MAX} are read", text.len());
    (text.len() > BYTES_MAX).then(|| problem(None, None, &message()))
}

fn line_at(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset.min(text.len())].iter().filter(|byte| **byte == b'\n').count() + 1
}

/// Reports the problems for which registering the tool would fail, while its line in the file is known.
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
            let hint = crate::name::did_you_mean(&near_misses(argument, known));
            let hint = hint.map(|hint| format!("; {hint}")).unwrap_or_default();
            messages.push(format!("there is no argument `{argument}`{hint}"));
        }
    }
    messages.extend(alias_mistakes(spec));
    let zeroes = spec.limits.zeroes().into_iter().chain(spec.limits_max.zeroes());
    messages.extend(zeroes.map(|name| format!("the limit `{name}` is 0, so it could never run")));
    for ((name, limit), (_, max)) in spec.limits.named().into_iter().zip(spec.limits_max.named()) {
        if limit.zip(max).is_some_and(|(limit, max)| limit > max) {
            messages.push(format!("the limit `{name}` is higher in `limits` than in `limits-max`"));
        }
    }
    let tool = shown_name(&spec.name);
    messages.into_iter().map(|message| Problem { line, tool: Some(tool.clone()), message }).collect()
}

fn is_function(value: &Value) -> bool {
    ["function", "parameters", "input_schema"].iter().any(|key| value.get(key).is_some())
}

/// Reads a function as models' APIs take it, bare or wrapped, with `agent_scope` and `category` beside or inside it.
/// The list holds its problems.
fn from_function(index: usize, value: &Value) -> (ToolSpec, Vec<Problem>) {
    let function = value.get("function").unwrap_or(value);
    let found = |key: &str| function.get(key).or(value.get(key));
    let mut wrong = Vec::new();
    let mut text = |key: &str| match found(key)? {
        Value::String(text) => Some(text.clone()),
        _ => {
            wrong.push(format!("`{key}` must be a text"));
            None
        }
    };
    let (name, description, category) = (text("name"), text("description"), text("category"));
    if found("name").is_none() {
        wrong.push("a function needs a `name`".into());
    }
    let shown = name.as_deref().map_or_else(|| format!("#{}", index + 1), shown_name);
    let name = name.unwrap_or_else(|| format!("unnamed-{}", index + 1));
    let mut spec = ToolSpec::new(name, description.unwrap_or_default());
    spec.input_schema = function.get("parameters").or(function.get("input_schema")).cloned().unwrap_or(Value::Null);
    spec.category = category.unwrap_or(spec.category);
    spec.agent_scopes = match found("agent_scope") {
        None => Vec::new(),
        Some(Value::String(scope)) => vec![scope.clone()],
        Some(list) => serde_json::from_value(list.clone()).unwrap_or_else(|_| {
            wrong.push("`agent_scope` must be a text or a list of texts".into());
            Vec::new()
        }),
    };
    let problem = |message| Problem { line: None, tool: Some(shown.clone()), message };
    (spec, wrong.into_iter().map(problem).collect())
}
