//! The tools as MCP lists them: made once for each change of the registry and each set of scopes, and shared from then on.

use std::sync::{Arc, Mutex};

use rmcp::ErrorData;
use rmcp::model::{CacheScope, ListToolsResult, PaginatedRequestParams, Tool};
use wieldy_core::{Caller, Held, Registry, ToolFilter};

use crate::convert;

/// How many sets of scopes are remembered: as many as there are kinds of callers, which are few.
const KINDS_MAX: usize = 64;
/// For how long a client may take a list for true without asking again.
const FRESH_MS: u64 = 60_000;
/// What the place where a page begins starts with.
const AFTER: &str = "after:";

/// The lists that were made.
#[derive(Default)]
pub(crate) struct Catalogue {
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    generation: u64,
    lists: Vec<(Held, Arc<[Tool]>)>,
}

impl Catalogue {
    /// All tools that the caller sees, by name.
    pub(crate) fn tools(&self, registry: &Registry, caller: &Caller) -> Arc<[Tool]> {
        // Asked for before the tools are: a list that is older than it says would stay for ever.
        let generation = registry.generation();
        let mut kept = self.kept.lock().expect("no code panics while it holds the lists");
        if kept.generation != generation {
            *kept = Kept { generation, lists: Vec::new() };
        }
        if let Some((_, tools)) = kept.lists.iter().find(|(scopes, _)| *scopes == caller.scopes) {
            return Arc::clone(tools);
        }
        let tools: Arc<[Tool]> =
            registry.list(caller, &ToolFilter::default()).iter().map(|tool| convert::tool(tool.spec())).collect();
        if kept.lists.len() == KINDS_MAX {
            kept.lists.remove(0);
        }
        kept.lists.push((caller.scopes.clone(), Arc::clone(&tools)));
        tools
    }
}

/// One page of a list that is in the order of its names, and where the next one begins.
pub(crate) fn page<T: Clone>(
    all: &[T],
    name: impl Fn(&T) -> &str,
    request: Option<PaginatedRequestParams>,
    size: usize,
) -> Result<(Vec<T>, Option<String>), ErrorData> {
    let start = match request.and_then(|request| request.cursor) {
        None => 0,
        Some(cursor) => {
            let unknown = || ErrorData::invalid_params("the cursor is not one of this server's", None);
            let last = cursor.strip_prefix(AFTER).ok_or_else(unknown)?;
            all.partition_point(|one| name(one) <= last)
        }
    };
    let end = all.len().min(start.saturating_add(size));
    let next = (end < all.len()).then(|| format!("{AFTER}{}", name(&all[end - 1])));
    Ok((all[start..end].to_vec(), next))
}

/// The answer to `tools/list`.
pub(crate) fn listed(
    tools: &[Tool],
    request: Option<PaginatedRequestParams>,
    size: usize,
    is_modern: bool,
) -> Result<ListToolsResult, ErrorData> {
    let (tools, next_cursor) = page(tools, |tool| &tool.name, request, size)?;
    let ttl_ms = is_modern.then_some(FRESH_MS);
    // Others may have other scopes.
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
        assert_eq!((wrong.code.0, &*wrong.message), (-32602, "the cursor is not one of this server's"));
    }
}
