//! The border between MCP's words and ours: what answers are made of, in both directions.

use std::sync::Arc;

use rmcp::ErrorData;
use rmcp::model::{
    CallToolResult, ContentBlock, EmbeddedResource, JsonObject, MetaObject, Resource, Tool, ToolAnnotations,
};
use serde_json::{Map, Value, json};
use wieldy_core::{ArtifactId, CallError, Category, Code, Content, ToolResult, ToolSpec};

/// Under this name a result says in its `_meta` which call it is the result of.
pub(crate) const META_EXECUTION: &str = "wieldy/execution";
/// Under this name a failed result has the whole error in its `_meta`.
pub(crate) const META_ERROR: &str = "wieldy/error";
/// Under this name the result of another MCP server's tool says in its `_meta` whose words it has.
pub(crate) const META_UNTRUSTED: &str = "wieldy/untrusted";
/// What the addresses of artifacts begin with.
pub(crate) const ARTIFACT_SCHEME: &str = "wieldy://artifact/";

/// A tool as MCP lists it.
pub(crate) fn tool(spec: &ToolSpec) -> Tool {
    let mut tool = Tool::new(spec.name.clone(), spec.description.clone(), schema(&spec.input_schema));
    tool.title.clone_from(&spec.title);
    // MCP knows only objects as answers; what else a tool promises is checked and not announced.
    let is_object = |schema: &&Value| schema["type"] == "object";
    tool.output_schema = spec.output_schema.as_ref().filter(is_object).map(schema);
    let hints = spec.annotations;
    tool.with_annotations(
        ToolAnnotations::new()
            .read_only(hints.read_only)
            .destructive(hints.destructive)
            .idempotent(hints.idempotent)
            .open_world(hints.open_world),
    )
}

/// A schema as MCP wants it: an object that says so.
fn schema(schema: &Value) -> Arc<JsonObject> {
    let mut schema = schema.as_object().cloned().unwrap_or_default();
    schema.entry("type").or_insert_with(|| "object".into());
    Arc::new(schema)
}

/// A result as MCP writes it; in revisions before 2026-07-28 a structured answer must be an object.
pub(crate) fn answer(result: ToolResult, is_modern: bool) -> CallToolResult {
    let mut content: Vec<ContentBlock> = Vec::with_capacity(result.content.len() + 1);
    if let Some(error) = &result.error {
        let has_output = !result.content.is_empty();
        content.push(ContentBlock::text(told(error, if has_output { "\nOutput so far:\n" } else { "" })));
    }
    content.extend(result.content.into_iter().map(block));
    if let Some(structured) = result.structured.as_ref().filter(|_| content.is_empty()) {
        content.push(ContentBlock::text(structured.to_string()));
    }
    if let Some(id) = result.artifact {
        content.push(ContentBlock::ResourceLink(artifact(id)));
    }
    let mut meta = MetaObject::new();
    meta.insert(META_EXECUTION.into(), result.execution_id.to_string().into());
    if result.provider.starts_with("mcp:") {
        meta.insert(META_UNTRUSTED.into(), (*result.provider).into());
    }
    if let Some(error) = &result.error {
        meta.insert(META_ERROR.into(), json!(error));
    }
    let is_error = result.error.is_some();
    let mut answer = if is_error { CallToolResult::error(content) } else { CallToolResult::success(content) };
    answer.structured_content = result.structured.filter(|structured| is_modern || structured.is_object());
    answer.meta = Some(meta);
    answer
}

/// Why a task has no answer of its tool's, if it is so: it broke, or the protocol did. A tool that could not do what it was asked has
/// answered.
pub(crate) fn broken(result: &ToolResult) -> Option<ErrorData> {
    let error = result.error.as_ref()?;
    let is_broken = error.code.category() == Category::RuntimeError || error.code == Code::UpstreamProtocolError;
    is_broken.then(|| ErrorData::internal_error(told(error, ""), Some(json!(error))))
}

/// An error that belongs to no call on record.
pub(crate) fn refusal(error: &CallError) -> CallToolResult {
    let mut answer = CallToolResult::error(vec![ContentBlock::text(told(error, ""))]);
    let mut meta = MetaObject::new();
    meta.insert(META_ERROR.into(), json!(error));
    answer.meta = Some(meta);
    answer
}

/// An error for a model: its code, what happened, and what can be done.
fn told(error: &CallError, then: &str) -> String {
    let suggestion = error.suggestion.as_ref().map(|suggestion| format!("\nSuggestion: {suggestion}"));
    format!("Error {error}{}{then}", suggestion.unwrap_or_default())
}

/// Where an artifact can be read.
pub(crate) fn artifact(id: ArtifactId) -> Resource {
    Resource::new(format!("{ARTIFACT_SCHEME}{}", id.bare()), id.to_string()).with_description("the whole output")
}

/// A block of an answer as MCP writes it. The kinds are the same; one that others wrote and that is none becomes text.
pub(crate) fn block(content: Content) -> ContentBlock {
    match content {
        Content::Text { text } => ContentBlock::text(text),
        Content::Image { data, mime_type } => ContentBlock::image(data, mime_type),
        Content::Audio { data, mime_type } => ContentBlock::audio(data, mime_type),
        Content::Resource { resource } => match serde_json::from_value(resource.clone()) {
            Ok(contents) => ContentBlock::Resource(EmbeddedResource::new(contents)),
            Err(_) => ContentBlock::text(resource.to_string()),
        },
        Content::ResourceLink { uri, name, mut more } => {
            let told = (uri.clone(), name.clone());
            more.insert("uri".into(), uri.into());
            more.insert("name".into(), name.into());
            ContentBlock::ResourceLink(
                serde_json::from_value(Value::Object(more)).unwrap_or_else(|_| Resource::new(told.0, told.1)),
            )
        }
    }
}

/// A block of an answer in our words; nothing of a kind that we do not know.
pub(crate) fn content(block: ContentBlock) -> Option<Content> {
    Some(match block {
        ContentBlock::Text(text) => Content::Text { text: text.text },
        ContentBlock::Image(image) => Content::Image { data: image.data, mime_type: image.mime_type },
        ContentBlock::Audio(audio) => Content::Audio { data: audio.data, mime_type: audio.mime_type },
        ContentBlock::Resource(embedded) => Content::Resource { resource: object(&embedded.resource).into() },
        ContentBlock::ResourceLink(link) => {
            let mut more = object(&link);
            more.remove("uri");
            more.remove("name");
            Content::ResourceLink { uri: link.uri, name: link.name, more }
        }
        _ => return None,
    })
}

/// What MCP says of something, as JSON.
pub(crate) fn object(thing: &impl serde::Serialize) -> Map<String, Value> {
    match serde_json::to_value(thing) {
        Ok(Value::Object(object)) => object,
        _ => Map::new(),
    }
}

/// Bytes as text, as MCP wants them.
pub(crate) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let bits = three.iter().chain([0; 2].iter()).take(3).fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte));
        for place in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place <= three.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_kind_of_block_comes_back_as_it_went() {
        let blocks = json!([
            {"type": "text", "text": "hi"},
            {"type": "image", "data": "aGk=", "mimeType": "image/png"},
            {"type": "audio", "data": "aGk=", "mimeType": "audio/wav"},
            {"type": "resource", "resource": {"uri": "test://a", "mimeType": "text/plain", "text": "there"}},
            {"type": "resource", "resource": {"uri": "test://b", "mimeType": "application/pdf", "blob": "aGk="}},
            {"type": "resource_link", "uri": "file:///a", "name": "a", "title": "A", "mimeType": "text/plain", "size": 3},
        ]);
        let theirs: Vec<ContentBlock> = serde_json::from_value(blocks.clone()).unwrap();
        let ours: Vec<Content> = theirs.into_iter().filter_map(content).collect();
        assert_eq!(serde_json::to_value(&ours).unwrap(), blocks);
        let back: Vec<ContentBlock> = ours.into_iter().map(block).collect();
        assert_eq!(serde_json::to_value(&back).unwrap(), blocks);
    }

    #[test]
    fn what_is_no_resource_is_shown_as_text() {
        let odd = Content::Resource { resource: json!({"odd": true}) };
        assert_eq!(block(odd), ContentBlock::text(r#"{"odd":true}"#));
    }

    #[test]
    fn bytes_become_text_as_everywhere() {
        let pairs =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("\u{ff}>?", "w78+Pw==")];
        for (bytes, text) in pairs {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}
