//! Our own tools, for tools and calls: wait for a result, and search, describe and call tools without all of them in a
//! model's context. They are answered here and not recorded, unless an option of the request is wrong. A call that
//! `tool_call` makes is recorded as a call of that tool.

use std::collections::HashMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use rmcp::model::{CallToolResult, ContentBlock, JsonObject, Tool, ToolAnnotations};
use serde_json::{Value, json};
use wieldy_core::{BatchId, CallError, Caller, Code, ExecutionId, ToolSpec};

use super::batch_tool::{self, BATCH};
use super::follow::{RESULT_WAIT, still_running, unknown_call};
use super::peer::PeerClient;
use super::words::{expand, words};
use super::{BatchCalls, Shared};
use crate::convert;

const TOOL_SEARCH: &str = "tool_search";
const TOOL_DESCRIBE: &str = "tool_describe";
const TOOL_CALL: &str = "tool_call";

/// The default and the maximum number of search results.
const FOUND: usize = 5;
const FOUND_MAX: usize = 20;
/// Maximum length of a description in a search result.
const DESCRIPTION_CHARS_MAX: usize = 200;

/// One of our own tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetaTool {
    Wait,
    Search,
    Describe,
    Call,
    Batch,
}

/// A call to make instead: the tool's name and its arguments.
type WantedCall = (String, Option<JsonObject>);

impl MetaTool {
    /// Returns our tool of this name, if it is offered.
    pub(crate) fn named(name: &str, shared: &Shared, caller: &Caller) -> Option<Self> {
        let options = &shared.options;
        match name {
            RESULT_WAIT => options.patience.map(|_| Self::Wait),
            TOOL_SEARCH => options.expose.by_search.then_some(Self::Search),
            TOOL_DESCRIBE => options.expose.by_search.then_some(Self::Describe),
            TOOL_CALL => options.expose.by_search.then_some(Self::Call),
            BATCH => has_batch(shared, caller).then_some(Self::Batch),
            _ => None,
        }
    }

    /// Returns the response, or the call to make instead.
    pub(crate) async fn answer(
        self,
        shared: &Shared,
        arguments: Option<JsonObject>,
        caller: &Arc<Caller>,
        client: &PeerClient,
    ) -> Result<WantedCall, CallToolResult> {
        let mut arguments = arguments.unwrap_or_default();
        match self {
            Self::Wait => Err(wait(shared, &arguments, caller, client).await),
            Self::Search => Err(search(shared, &arguments, caller)),
            Self::Describe => Err(describe(shared, &arguments, caller)),
            // A batch needs more than its arguments, so the door itself answers it.
            Self::Batch => Err(invalid("a batch is a request of its own")),
            Self::Call => {
                let Some(Value::String(name)) = arguments.remove("name") else {
                    return Err(invalid("`name` must be the name of a tool"));
                };
                match arguments.remove("arguments") {
                    None | Some(Value::Null) => Ok((name, None)),
                    Some(Value::Object(inner)) => Ok((name, Some(inner))),
                    Some(_) => Err(invalid("`arguments` must be an object")),
                }
            }
        }
    }
}

/// Returns true if the tool `batch` is ours for this caller. A registered tool of this very name keeps it, and a server's
/// tool that has it as its short name does not.
fn has_batch(shared: &Shared, caller: &Caller) -> bool {
    let registered = shared.executor.registry().find(BATCH, caller);
    let keeps_name = registered.is_ok_and(|tool| {
        let spec = tool.spec();
        std::iter::once(&spec.name).chain(&spec.aliases).any(|name| name == BATCH)
    });
    shared.options.batch != BatchCalls::Off && !keeps_name
}

/// Returns the definitions of our own tools for a caller.
pub(crate) fn tools(shared: &Shared, caller: &Caller) -> Vec<Tool> {
    let options = &shared.options;
    let tool = |name: &'static str, description: &'static str, properties: Value, required: Value| {
        let schema = json!({
            "type": "object", "properties": properties, "required": required, "additionalProperties": false,
        });
        Tool::new(name, description, convert::object(&schema))
    };
    let reading = ToolAnnotations::new().read_only(true).destructive(false).idempotent(true).open_world(false);
    let mut tools = Vec::new();
    if let Some(patience) = options.patience {
        let properties = json!({
            "id": {"type": "string", "description": "The id that the answer named"},
            "timeout": {
                "type": "number", "minimum": 0, "maximum": patience.as_secs_f64(),
                "description": "How many seconds to wait at most",
            },
        });
        let description = "Waits for the result of a call that was answered with `is still running`";
        tools.push(tool(RESULT_WAIT, description, properties, json!(["id"])).with_annotations(reading.clone()));
    }
    if options.expose.by_search {
        let properties = json!({
            "query": {"type": "string", "description": "What the tool should do, in a few words"},
            "limit": {"type": "integer", "minimum": 1, "maximum": FOUND_MAX},
        });
        let description = "Finds tools by what they do; most tools are not listed and can only be found this way";
        tools.push(tool(TOOL_SEARCH, description, properties, json!(["query"])).with_annotations(reading.clone()));
        let named = json!({"type": "string", "description": "A name that the search found"});
        let description = "Tells what a tool does and which arguments it takes";
        let properties = json!({"name": named});
        tools.push(tool(TOOL_DESCRIBE, description, properties, json!(["name"])).with_annotations(reading));
        let arguments = json!({"type": "object", "description": "As `tool_describe` tells"});
        let properties = json!({"name": named, "arguments": arguments});
        tools.push(tool(TOOL_CALL, "Calls a tool", properties, json!(["name"])));
    }
    if has_batch(shared, caller) {
        tools.extend(batch_tool::definition(options.batch));
    }
    tools
}

async fn wait(shared: &Shared, arguments: &JsonObject, caller: &Arc<Caller>, client: &PeerClient) -> CallToolResult {
    let given = arguments.get("id").and_then(Value::as_str).unwrap_or_default();
    let Ok(id) = ExecutionId::from_str(given) else { return invalid("`id` must be the id of a call") };
    let patience = shared.options.patience.unwrap_or(Duration::MAX);
    let wanted = match arguments.get("timeout") {
        None => Some(patience),
        Some(timeout) => timeout.as_f64().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
    };
    let Some(wanted) = wanted else { return invalid("`timeout` must be a number of seconds") };
    let batch = BatchId::from_str(given).ok().and_then(|id| shared.batches.get(id, caller));
    if let Some(batch) = batch {
        return tokio::select! {
            answer = batch.response(shared) => answer,
            () = tokio::time::sleep(wanted.min(patience)) => batch.handle(),
            // A client that cancels ends the waiting, not the batch.
            () = client.gone.cancelled() => batch.handle(),
        };
    }
    let Some(task) = shared.executor.task(id, caller) else { return unknown_call(id) };
    let waited = tokio::select! {
        waited = tokio::time::timeout(wanted.min(patience), shared.executor.wait(id, caller)) => waited,
        // A client that cancels ends the waiting, not the call.
        () = client.gone.cancelled() => Ok(None),
    };
    match waited {
        Ok(Some(result)) => {
            if let Some(artifact) = result.artifact {
                shared.recent.add(artifact, caller);
            }
            convert::call_result(Arc::unwrap_or_clone(result), client.is_modern)
        }
        Ok(None) => unknown_call(id),
        Err(_) => still_running(shared, id, &task.tool, caller, false),
    }
}

fn search(shared: &Shared, arguments: &JsonObject, caller: &Caller) -> CallToolResult {
    let Some(query) = arguments.get("query").and_then(Value::as_str) else { return invalid("`query` must be a text") };
    let limit = match arguments.get("limit") {
        None => FOUND,
        Some(limit) => match limit.as_u64() {
            Some(limit) if limit > 0 => usize::try_from(limit).unwrap_or(FOUND_MAX).min(FOUND_MAX),
            _ => return invalid("`limit` must be a whole number of at least 1"),
        },
    };
    let seen = shared.catalogue.visible_to(shared, caller);
    let lines = seen.search(query, limit).into_iter().map(|tool| {
        let spec = tool.spec();
        let description: String = spec.description.chars().take(DESCRIPTION_CHARS_MAX).collect();
        format!("{}: {description}", spec.name)
    });
    let text = lines.collect::<Vec<_>>().join("\n");
    one_text(if text.is_empty() { "no tool fits these words".to_owned() } else { text })
}

fn describe(shared: &Shared, arguments: &JsonObject, caller: &Caller) -> CallToolResult {
    let Some(name) = arguments.get("name").and_then(Value::as_str) else {
        return invalid("`name` must be the name of a tool");
    };
    let found = shared.executor.registry().find(name, caller).map_err(CallError::from);
    let allowed =
        found.and_then(|tool| shared.executor.check_plan(caller, &tool).map(|()| tool).map_err(CallError::from));
    match allowed {
        Ok(tool) => one_text(json!(convert::tool(tool.spec())).to_string()),
        Err(refused) => convert::refusal(&refused),
    }
}

/// Returns a result with one text block.
fn one_text(text: String) -> CallToolResult {
    CallToolResult::success(vec![ContentBlock::text(text)])
}

fn invalid(message: &str) -> CallToolResult {
    convert::refusal(&CallError::new(Code::ValidationFailed, message))
}

/// Maximum length of a query, because each word is compared with every tool.
const QUERY_CHARS_MAX: usize = 1000;

/// The search index: ranks tools by BM25, so rare words and short texts count more.
pub(crate) struct SearchIndex {
    tools: Vec<WordCounts>,
    /// The number of tools that have each word.
    tools_with: HashMap<String, usize>,
    length_average: f64,
}

/// The weighted word counts of a tool's texts.
struct WordCounts {
    counts: HashMap<String, f64>,
    length: f64,
}

impl SearchIndex {
    /// BM25's `k1` (how fast repeated words count less) and `b` (how much long texts are penalized).
    const K: f64 = 1.2;
    const B: f64 = 0.75;

    pub(crate) fn new<'a>(specs: impl Iterator<Item = &'a ToolSpec>) -> Self {
        let tools: Vec<WordCounts> = specs.map(WordCounts::of).collect();
        let mut tools_with = HashMap::new();
        for word in tools.iter().flat_map(|tool| tool.counts.keys()) {
            *tools_with.entry(word.clone()).or_default() += 1;
        }
        let length_average = tools.iter().map(|tool| tool.length).sum::<f64>() / (tools.len().max(1) as f64);
        Self { tools, tools_with, length_average }
    }

    /// Returns the indexes of the matching tools, best first. Synonyms count half as much as the query's own words.
    pub(crate) fn best(&self, query: &str, count: usize) -> Vec<usize> {
        let query: String = query.chars().take(QUERY_CHARS_MAX).collect();
        let wanted = expand(&query);
        let score =
            |tool: &WordCounts| wanted.iter().map(|(word, weight)| weight * self.score(tool, word)).sum::<f64>();
        let mut found: Vec<(usize, f64)> = self.tools.iter().map(score).enumerate().collect();
        found.retain(|(_, score)| *score > 0.0);
        found.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        found.into_iter().take(count).map(|(at, _)| at).collect()
    }

    fn score(&self, tool: &WordCounts, word: &str) -> f64 {
        let (Some(count), Some(with)) = (tool.counts.get(word), self.tools_with.get(word)) else { return 0.0 };
        let (all, with) = (self.tools.len() as f64, *with as f64);
        let rarity = (1.0 + (all - with + 0.5) / (with + 0.5)).ln();
        let length = 1.0 - Self::B + Self::B * tool.length / self.length_average;
        rarity * count * (Self::K + 1.0) / (count + Self::K * length)
    }
}

impl WordCounts {
    fn of(spec: &ToolSpec) -> Self {
        let mut found = Self { counts: HashMap::new(), length: 0.0 };
        // A name says most in the fewest words.
        found.add(&spec.name, 3.0);
        found.add(spec.title.as_deref().unwrap_or_default(), 2.0);
        found.add(&spec.aliases.join(" "), 2.0);
        found.add(&spec.weak_aliases.join(" "), 1.0);
        found.add(&spec.description, 1.0);
        found.add(&spec.category, 1.0);
        for (name, schema) in spec.input_schema["properties"].as_object().into_iter().flatten() {
            found.add(name, 1.0);
            found.add(schema["description"].as_str().unwrap_or_default(), 0.5);
        }
        found
    }

    fn add(&mut self, text: &str, weight: f64) {
        for word in words(text) {
            *self.counts.entry(word).or_default() += weight;
            self.length += weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(query: &str) -> Vec<&'static str> {
        let tools = [
            ("Read", "Reads a text file, whole or a range of its lines"),
            ("Write", "Writes a text file"),
            ("git__commit", "Records changes of the repository"),
            ("create_issue", "Opens a new issue in the tracker with a title and a text"),
            ("listIssues", "Lists the issues of a tracker"),
        ];
        let index = SearchIndex::new(tools.map(|(name, told)| ToolSpec::new(name, told)).iter());
        index.best(query, 3).into_iter().map(|at| tools[at].0).collect()
    }

    #[test]
    fn the_search_lists_the_best_tools_first() {
        assert_eq!(found("read file"), ["Read", "Write"]);
        assert_eq!(found("list issues"), ["listIssues", "create_issue"]);
        // "Create" is a synonym of "write", so `Write` comes last.
        assert_eq!(found("creating an issue"), ["create_issue", "listIssues", "Write"]);
        assert_eq!(found("committing to git"), ["git__commit"]);
        assert_eq!(found("quantum"), Vec::<&str>::new());
        assert_eq!(found(""), Vec::<&str>::new());
        assert_eq!(found(&format!("{} read file", "quantum ".repeat(1000))), Vec::<&str>::new());
    }
}
