//! The tool lists for MCP clients and their search index. They are built once per generation of the registry, set of
//! scopes and plan, and then shared.

use std::sync::{Arc, Mutex, OnceLock};

use rmcp::ErrorData;
use rmcp::model::{CacheScope, ListToolsResult, PaginatedRequestParams, Tool};
use wieldy_core::{Caller, Denied, Held, Registered, ToolFilter};

use super::meta::{self, SearchIndex};
use super::{Expose, Shared};
use crate::convert;

/// Maximum number of cached lists, one for each set of scopes and plan. Callers have few different ones.
const LISTS_MAX: usize = 64;
/// The time for which a client may cache a list.
const FRESH_MS: u64 = 60_000;
/// The prefix of a cursor.
const AFTER: &str = "after:";

/// The cache of tool lists.
#[derive(Default)]
pub(crate) struct Catalogue {
    cache: Mutex<ListCache>,
}

#[derive(Default)]
struct ListCache {
    generation: u64,
    lists: Vec<(ListKey, Arc<VisibleTools>)>,
}

/// The facts of a caller that decide which tools it sees: its scopes and its plan.
type ListKey = (Held, Option<String>);

/// The tools that callers with the same scopes and plan see.
pub(crate) struct VisibleTools {
    /// The listed tools, sorted by name.
    pub(crate) listed: Vec<Tool>,
    /// The listed tools with arguments that are copied into headers.
    with_header_params: Vec<Tool>,
    /// All visible tools, listed or found by search.
    tools: Vec<Arc<Registered>>,
    index: OnceLock<SearchIndex>,
}

impl VisibleTools {
    /// Returns the tools that match the words best.
    pub(crate) fn search(&self, words: &str, count: usize) -> Vec<&Arc<Registered>> {
        let index = self.index.get_or_init(|| SearchIndex::new(self.tools.iter().map(|tool| tool.spec())));
        index.best(words, count).into_iter().map(|at| &self.tools[at]).collect()
    }
}

impl VisibleTools {
    /// Returns the tool of this name if header copies of its arguments must be compared.
    pub(crate) fn with_header_params(&self, name: &str) -> Option<&Tool> {
        self.with_header_params.iter().find(|tool| tool.name == name)
    }
}

/// Returns true if a schema names headers for arguments.
fn names_headers(tool: &Tool) -> bool {
    serde_json::to_string(&*tool.input_schema).is_ok_and(|schema| schema.contains(r#""x-mcp-header""#))
}

impl Catalogue {
    /// Returns the tools that the caller sees.
    pub(crate) fn visible_to(&self, shared: &Shared, caller: &Caller) -> Arc<VisibleTools> {
        let registry = shared.executor.registry();
        // Read before the tools: otherwise an outdated list could be cached under the new generation.
        let generation = registry.generation();
        let mut cache = self.cache.lock().expect("no code panics while it holds the lists");
        if cache.generation != generation {
            *cache = ListCache { generation, lists: Vec::new() };
        }
        if let Some((_, seen)) =
            cache.lists.iter().find(|((scopes, plan), _)| (scopes, plan) == (&caller.scopes, &caller.plan))
        {
            return Arc::clone(seen);
        }
        let mut tools = registry.list(caller, &ToolFilter::default());
        let own = meta::tools(shared, caller);
        // A tool with the name of one of our own could not be called.
        tools.retain(|tool| shared.options.expose.shows(tool) && own.iter().all(|own| own.name != tool.spec().name));
        // With a plan that is not configured every call is refused, and its error tells so; an empty list would not.
        let is_outside =
            |tool: &Registered| matches!(shared.executor.check_plan(caller, tool), Err(Denied::Tool { .. }));
        tools.retain(|tool| !is_outside(tool));
        let mut listed = own;
        if !shared.options.expose.by_search {
            listed.extend(tools.iter().map(|tool| convert::tool(tool.spec())));
        }
        listed.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let with_header_params = listed.iter().filter(|tool| names_headers(tool)).cloned().collect();
        let seen = Arc::new(VisibleTools { listed, with_header_params, tools, index: OnceLock::new() });
        if cache.lists.len() == LISTS_MAX {
            cache.lists.remove(0);
        }
        cache.lists.push(((caller.scopes.clone(), caller.plan.clone()), Arc::clone(&seen)));
        seen
    }
}

impl Expose {
    fn shows(&self, tool: &Registered) -> bool {
        let spec = tool.spec();
        let is_named = |name: &String| match name.strip_suffix('*') {
            Some(beginning) => spec.name.starts_with(beginning),
            None => *name == spec.name,
        };
        (self.names.is_empty() || self.names.iter().any(is_named))
            && (self.categories.is_empty() || self.categories.contains(&spec.category))
            && (self.providers.is_empty() || self.providers.contains(&spec.provider.to_string()))
    }
}

/// Returns one page of a sorted list, and the cursor of the next page.
pub(crate) fn page<T: Clone>(
    all: &[T],
    name: impl Fn(&T) -> &str,
    request: Option<PaginatedRequestParams>,
    size: usize,
) -> Result<(Vec<T>, Option<String>), ErrorData> {
    let start = match request.and_then(|request| request.cursor) {
        None => 0,
        Some(cursor) => {
            let unknown = || ErrorData::invalid_params("the cursor is not from this server", None);
            let last = cursor.strip_prefix(AFTER).ok_or_else(unknown)?;
            all.partition_point(|one| name(one) <= last)
        }
    };
    let end = all.len().min(start.saturating_add(size));
    let next = (end < all.len()).then(|| format!("{AFTER}{}", name(&all[end - 1])));
    Ok((all[start..end].to_vec(), next))
}

/// Returns the result of `tools/list`.
pub(crate) fn listed(
    tools: &[Tool],
    request: Option<PaginatedRequestParams>,
    size: usize,
    is_modern: bool,
) -> Result<ListToolsResult, ErrorData> {
    let (tools, next_cursor) = page(tools, |tool| &tool.name, request, size)?;
    let ttl_ms = is_modern.then_some(FRESH_MS);
    // Other callers may have other scopes.
    let cache_scope = is_modern.then_some(CacheScope::Private);
    Ok(ListToolsResult { tools, next_cursor, ttl_ms, cache_scope, ..ListToolsResult::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other_and_survive_changes() {
        let all = ["a", "b", "c", "d", "e"];
        let at = |cursor: &str| Some(PaginatedRequestParams::default().with_cursor(Some(cursor.to_owned())));
        let page = |all: &[&'static str], request| page(all, |name| name, request, 2);
        assert_eq!(page(&all, None), Ok((vec!["a", "b"], Some("after:b".into()))));
        assert_eq!(page(&all, at("after:b")), Ok((vec!["c", "d"], Some("after:d".into()))));
        assert_eq!(page(&all, at("after:d")), Ok((vec!["e"], None)));
        assert_eq!(page(&["a", "c", "d"], at("after:b")), Ok((vec!["c", "d"], None)), "the last one is gone");
        let wrong = page(&all, at("b")).expect_err("not ours");
        assert_eq!((wrong.code.0, &*wrong.message), (-32602, "the cursor is not from this server"));
    }
}
