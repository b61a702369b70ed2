//! Offers artifacts as MCP resources: the whole output of a call, for callers of its tenant.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use rmcp::ErrorData;
use rmcp::model::{
    CacheScope, ListResourceTemplatesResult, ListResourcesResult, MetaObject, PaginatedRequestParams,
    ReadResourceResult, Resource, ResourceContents, ResourceTemplate,
};
use serde_json::json;
use wieldy_core::{ArtifactId, Caller};

use super::Shared;
use super::catalogue::page;
use crate::convert::{self, ARTIFACT_SCHEME};

/// Maximum number of listed artifacts. Older ones can still be read.
const RECENT_MAX: usize = 1000;
/// The `_meta` key that says which part of an artifact this is.
const META_PART: &str = "wieldy/part";
/// The time for which a client may cache a resource. An artifact never changes, but it may be deleted.
const FRESH_MS: u64 = 60_000;

/// The artifacts that recent results named.
#[derive(Default)]
pub(crate) struct RecentArtifacts {
    named: Mutex<VecDeque<(ArtifactId, Option<String>)>>,
}

impl RecentArtifacts {
    /// Records that a result named an artifact to a caller.
    pub(crate) fn add(&self, id: ArtifactId, caller: &Caller) {
        let mut named = self.named.lock().expect("no code panics while it holds the names");
        if named.iter().any(|(other, _)| *other == id) {
            return;
        }
        if named.len() == RECENT_MAX {
            named.pop_front();
        }
        named.push_back((id, caller.tenant.clone()));
    }

    fn of(&self, caller: &Caller) -> Vec<ArtifactId> {
        let named = self.named.lock().expect("no code panics while it holds the names");
        named.iter().filter(|(_, tenant)| *tenant == caller.tenant).map(|(id, _)| *id).collect()
    }
}

/// Returns the result of `resources/list`, oldest first, which is the order of the ids.
pub(crate) fn list(
    shared: &Shared,
    caller: &Caller,
    request: Option<PaginatedRequestParams>,
    is_modern: bool,
) -> Result<ListResourcesResult, ErrorData> {
    let mut ids = shared.recent.of(caller);
    ids.sort_unstable();
    let all: Vec<Resource> = ids.into_iter().map(convert::artifact).collect();
    let (mut resources, next_cursor) = page(&all, |resource| &resource.uri, request, shared.options.page)?;
    resources.retain_mut(|resource| {
        let info =
            parse(&resource.uri).ok().and_then(|part| shared.executor.artifacts().describe(part.id, caller).ok());
        resource.size = info.as_ref().map(|info| info.kept_bytes);
        info.is_some()
    });
    let ttl_ms = is_modern.then_some(0);
    let cache_scope = is_modern.then_some(CacheScope::Private);
    Ok(ListResourcesResult { resources, next_cursor, ttl_ms, cache_scope, ..ListResourcesResult::default() })
}

/// Returns the result of `resources/templates/list`.
pub(crate) fn templates() -> ListResourceTemplatesResult {
    let template = ResourceTemplate::new(format!("{ARTIFACT_SCHEME}{{id}}{{?offset,length}}"), "artifact")
        .with_title("The whole output of a call")
        .with_description("Results name the artifact if their output was too large; `offset` and `length` are bytes");
    ListResourceTemplatesResult { resource_templates: vec![template], ..ListResourceTemplatesResult::default() }
}

/// Returns the result of `resources/read`: the artifact, or as much of it as one response may have.
pub(crate) async fn read(shared: &Shared, caller: Arc<Caller>, uri: String) -> Result<ReadResourceResult, ErrorData> {
    let none = || ErrorData::resource_not_found("there is no such resource", Some(json!({"uri": uri})));
    let part = parse(&uri).map_err(|wrong| match wrong {
        UriError::Address => none(),
        UriError::Part => ErrorData::invalid_params("`offset` and `length` are numbers of bytes", None),
    })?;
    let (artifacts, length_max) = (Arc::clone(shared.executor.artifacts()), shared.options.resource_bytes_max);
    let length = part.length.unwrap_or(u64::MAX).min(length_max);
    let look = move || {
        let info = artifacts.describe(part.id, &caller)?;
        Ok::<_, wieldy_core::artifact::ArtifactError>((info, artifacts.read(part.id, &caller, part.offset, length)?))
    };
    let read = tokio::task::spawn_blocking(look).await;
    let (info, bytes) = read.ok().and_then(Result::ok).ok_or_else(none)?;
    let end = part.offset.saturating_add(bytes.len() as u64);
    let mut meta = MetaObject::new();
    let next = (end < info.kept_bytes && !bytes.is_empty()).then_some(end);
    meta.insert(META_PART.into(), json!({"offset": part.offset, "end": end, "of": info.kept_bytes, "next": next}));
    let is_whole = bytes.len() as u64 == info.kept_bytes;
    let contents = match String::from_utf8(bytes) {
        Ok(text) => ResourceContents::text(text, uri),
        // A part may cut a character at either end. It is still text.
        Err(bytes) => match text_within(bytes.as_bytes()).filter(|_| !is_whole) {
            Some(text) => ResourceContents::text(text, uri),
            None => ResourceContents::blob(convert::base64(bytes.as_bytes()), uri)
                .with_mime_type("application/octet-stream"),
        },
    };
    let mut result = ReadResourceResult::new(vec![contents.with_meta(meta)]);
    (result.ttl_ms, result.cache_scope) = (Some(FRESH_MS), Some(CacheScope::Private));
    Ok(result)
}

/// A part of an artifact.
#[derive(Debug, PartialEq)]
struct ArtifactPart {
    id: ArtifactId,
    offset: u64,
    length: Option<u64>,
}

#[derive(Debug, PartialEq)]
enum UriError {
    Address,
    Part,
}

fn parse(uri: &str) -> Result<ArtifactPart, UriError> {
    let rest = uri.strip_prefix(ARTIFACT_SCHEME).ok_or(UriError::Address)?;
    let (id, query) = rest.split_once('?').unwrap_or((rest, ""));
    let mut part = ArtifactPart { id: id.parse().map_err(|_| UriError::Address)?, offset: 0, length: None };
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').ok_or(UriError::Part)?;
        let value = value.parse().map_err(|_| UriError::Part)?;
        match name {
            "offset" => part.offset = value,
            "length" => part.length = Some(value),
            _ => return Err(UriError::Part),
        }
    }
    Ok(part)
}

/// Decodes a part of a longer text, without incomplete characters at its ends.
fn text_within(bytes: &[u8]) -> Option<String> {
    let start = bytes.iter().take(3).take_while(|byte| **byte & 0b1100_0000 == 0b1000_0000).count();
    let text = &bytes[start..];
    match std::str::from_utf8(text) {
        Ok(text) => Some(text.to_owned()),
        // No length means that the input ends within a character.
        Err(error) if error.error_len().is_none() => {
            Some(String::from_utf8_lossy(&text[..error.valid_up_to()]).into_owned())
        }
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_text_is_text_and_other_bytes_are_not() {
        let text = "aäb€c".as_bytes();
        let within = |range: std::ops::Range<usize>| text_within(&text[range]);
        assert_eq!(within(0..2).as_deref(), Some("a"));
        assert_eq!(within(2..6).as_deref(), Some("b"));
        assert_eq!(within(5..8).as_deref(), Some("c"));
        assert_eq!(text_within(b"a\xffb"), None);
    }

    #[test]
    fn an_address_names_an_artifact_and_a_part_of_it() {
        let id = ArtifactId::next();
        let at = |rest: &str| parse(&format!("wieldy://artifact/{}{rest}", id.bare()));
        assert_eq!(at(""), Ok(ArtifactPart { id, offset: 0, length: None }));
        assert_eq!(at("?offset=5&length=7"), Ok(ArtifactPart { id, offset: 5, length: Some(7) }));
        assert_eq!(at("?offset=-5"), Err(UriError::Part));
        assert_eq!(at("?what=5"), Err(UriError::Part));
        assert_eq!(at("/../x"), Err(UriError::Address));
        assert_eq!(parse("file:///etc/passwd"), Err(UriError::Address));
    }
}
