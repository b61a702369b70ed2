//! Converts between MCP's types and ours: tools, results and content blocks, in both directions.
//!
//! The rule for results: some clients show their model only the structured content, some all blocks, some only the
//! first block. So a tool of ours answers with one block of text and no structured content, and each client's model
//! gets the whole output once. The structured content goes into `_meta`, for programs. A result of an MCP server behind
//! wieldy is passed on as the server sent it.

use std::sync::Arc;

use rmcp::ErrorData;
use rmcp::model::{
    Annotations, CallToolResult, ContentBlock, EmbeddedResource, JsonObject, MetaObject, Resource, Tool,
    ToolAnnotations,
};
use serde_json::{Map, Value, json};
use wieldy_core::{
    ArtifactId, CallError, Category, Code, Content, DueNote, NoteId, PassedOn, Provider, ToolResult, ToolSpec,
    present_error, present_notes,
};

/// The `_meta` key of the execution id of the call.
pub(crate) const META_EXECUTION: &str = "wieldy/execution";
/// The `_meta` key of the whole error of a failed call.
pub(crate) const META_ERROR: &str = "wieldy/error";
/// The `_meta` key of the structured content of a tool of ours.
pub(crate) const META_STRUCTURED: &str = "wieldy/structured";
/// The `_meta` key of the URI of the artifact that holds the whole output.
pub(crate) const META_ARTIFACT: &str = "wieldy/artifact";
/// The `_meta` key that names the MCP server a result came from: its text is not to be trusted.
pub(crate) const META_UNTRUSTED: &str = "wieldy/untrusted";
/// The `_meta` key of the notes that the agent left for itself and that are in the text.
pub(crate) const META_NOTES: &str = "wieldy/notes";
/// The beginning of every artifact's URI.
pub(crate) const ARTIFACT_SCHEME: &str = "wieldy://artifact/";

/// The `_meta` key of a call's labels, in its request and in its result.
pub(crate) const META_LABELS: &str = "wieldy/labels";

/// The prefix of all our `_meta` keys.
const OURS: &str = "wieldy/";
/// The text of an empty answer.
const EMPTY: &str = "(empty)";

/// Converts a tool to the form in which MCP lists it.
pub(crate) fn tool(spec: &ToolSpec) -> Tool {
    let mut tool = Tool::new(spec.name.clone(), spec.description.clone(), schema(&spec.input_schema));
    tool.title.clone_from(&spec.title);
    tool.output_schema = output_schema(spec).map(schema);
    let hints = spec.annotations;
    tool.with_annotations(
        ToolAnnotations::new()
            .read_only(hints.read_only)
            .destructive(hints.destructive)
            .idempotent(hints.idempotent)
            .open_world(hints.open_world),
    )
}

/// Returns the output schema that clients are shown. Only tools of MCP servers have one, and MCP allows only objects. A
/// tool of ours sends no structured content, and clients refuse an answer without structured content if a schema was
/// listed.
pub(crate) fn output_schema(spec: &ToolSpec) -> Option<&Value> {
    let schema = spec.output_schema.as_ref().filter(|schema| schema["type"] == "object");
    schema.filter(|_| matches!(spec.provider, Provider::Mcp(_)))
}

/// Converts a schema to MCP's form: an object with a `type`.
fn schema(schema: &Value) -> Arc<JsonObject> {
    let mut schema = schema.as_object().cloned().unwrap_or_default();
    schema.entry("type").or_insert_with(|| "object".into());
    Arc::new(schema)
}

/// Converts a result. In revisions before 2026-07-28 the structured content of an MCP server must be an object.
pub(crate) fn call_result(result: ToolResult, is_modern: bool) -> CallToolResult {
    let is_upstream = result.provider.starts_with("mcp:");
    let PassedOn { meta: mut notes, blocks: mut notes_on_blocks } =
        result.passed_on.map(|notes| *notes).unwrap_or_default();
    // An upstream server must not set keys that are ours.
    notes.retain(|name, _| !name.starts_with(OURS));
    let mut meta = MetaObject(notes);
    meta.insert(META_EXECUTION.into(), result.execution_id.to_string().into());
    if is_upstream {
        meta.insert(META_UNTRUSTED.into(), (*result.provider).into());
    }
    if !result.labels.is_empty() {
        meta.insert(META_LABELS.into(), result.labels.into());
    }
    if let Some(error) = &result.error {
        meta.insert(META_ERROR.into(), json!(error));
    }
    if let Some(id) = result.artifact {
        meta.insert(META_ARTIFACT.into(), artifact_uri(id).into());
    }
    // The server's own error text is passed on unchanged. We write the text of every other error.
    let is_reported_by_tool =
        |error: &CallError| is_upstream && error.code == Code::ToolReportedError && !result.content.is_empty();
    let failure = result.error.as_deref().filter(|error| !is_reported_by_tool(error));
    let cut = result.artifact.map(|id| cut_note(id, &result.content));
    let has_something = !result.content.is_empty() || result.structured.is_none();
    let content = if is_upstream && failure.is_none() && has_something {
        match cut {
            Some(cut) => headed(cut, result.content),
            None => result.content,
        }
    } else {
        one_text(failure, cut, result.content, result.structured.as_ref())
    };
    if failure.is_some() {
        notes_on_blocks.clear();
    }
    let mut content = content;
    if !result.notes.is_empty() {
        add_notes(&mut content, &result.notes, result.notes_waiting);
        meta.insert(META_NOTES.into(), json!(result.notes));
    }
    let noted = |(place, content): (usize, Content)| match notes_on_blocks.remove(&place) {
        Some(notes) => with_notes(block(content), notes),
        None => block(content),
    };
    let blocks = content.into_iter().enumerate().map(noted).collect();
    let is_error = result.error.is_some();
    let mut answer = if is_error { CallToolResult::error(blocks) } else { CallToolResult::success(blocks) };
    if is_upstream {
        answer.structured_content = result.structured.filter(|structured| is_modern || structured.is_object());
    } else if let Some(structured) = result.structured {
        meta.insert(META_STRUCTURED.into(), structured);
    }
    answer.meta = Some(meta);
    answer
}

/// Adds the agent's own notes at the end of the first text: some clients show nothing else.
fn add_notes(content: &mut Vec<Content>, notes: &[DueNote], waiting: usize) {
    let notes = present_notes(notes, waiting);
    let first = content.iter_mut().find_map(|block| if let Content::Text { text } = block { Some(text) } else { None });
    match first {
        Some(text) => {
            if !text.is_empty() && !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(&notes);
        }
        None => content.push(Content::text(notes)),
    }
}

/// Returns the ids of the notes in an answer.
pub(crate) fn note_ids(answer: &CallToolResult) -> Vec<NoteId> {
    let notes = answer.meta.as_ref().and_then(|meta| meta.get(META_NOTES)).and_then(Value::as_array);
    let ids = notes.into_iter().flatten().filter_map(|note| note["id"].as_str()?.parse().ok());
    ids.collect()
}

/// Marks the answer of a tool with an output schema as an error if its structured content is too large to be sent.
/// Clients discard a success without structured content.
pub(crate) fn without_promised(mut answer: CallToolResult) -> CallToolResult {
    let why = "[The call succeeded. Its structured content is too large to be sent, and clients refuse a success without it, so \
               this is marked as an error.]";
    match answer.content.first_mut() {
        Some(ContentBlock::Text(first)) => first.text = format!("{why}\n{}", first.text),
        _ => answer.content.insert(0, ContentBlock::text(why)),
    }
    answer.is_error = Some(true);
    answer
}

/// Returns a note that says how much of an answer is cut and how to read the whole. Clients cut long texts in the
/// middle, which is where the cut text has its own note.
fn cut_note(id: ArtifactId, content: &[Content]) -> String {
    let named = id.to_string();
    let note = |line: &str| Some(line.strip_prefix("… ")?.strip_suffix(" …")?.to_owned());
    let texts = content.iter().filter_map(|block| if let Content::Text { text } = block { Some(text) } else { None });
    // Output cannot forge this line: the artifact's id is made when the output is cut.
    let note = texts.flat_map(|text| text.lines()).filter_map(note).find(|note| note.ends_with(&named));
    let note = note.unwrap_or_else(|| format!("the whole is {named}"));
    format!("[{note}: read it with `GetArtifact`, by `offset` or `pattern`]")
}

/// Puts a line in front of an answer. If the first block is text, the line goes into that block: some clients show only
/// the first block of an error.
fn headed(line: String, mut content: Vec<Content>) -> Vec<Content> {
    match content.first_mut() {
        Some(Content::Text { text }) => *text = format!("{line}\n{text}"),
        _ => content.insert(0, Content::text(line)),
    }
    content
}

/// Joins the error and all text of an answer to one block. Images and other blocks follow. The line `cut` comes before
/// the output. An answer without blocks becomes its structured content as text, and one without any content becomes
/// `(empty)`.
fn one_text(
    failure: Option<&CallError>,
    cut: Option<String>,
    content: Vec<Content>,
    structured: Option<&Value>,
) -> Vec<Content> {
    let (texts, mut blocks): (Vec<Content>, Vec<Content>) =
        content.into_iter().partition(|block| matches!(block, Content::Text { .. }));
    let output = match structured {
        Some(structured) if texts.is_empty() && blocks.is_empty() && failure.is_none() => structured.to_string(),
        _ => Content::text_of(&texts),
    };
    let output = match cut {
        Some(cut) => format!("{cut}\n{output}"),
        None => output,
    };
    let text = match failure {
        None => output,
        Some(error) if output.is_empty() => present_error(error, ""),
        Some(error) => format!("{}\nOutput so far:\n{output}", present_error(error, &output)),
    };
    // Some clients treat an answer without blocks as a mistake, and their models get nothing.
    let text = if text.is_empty() && blocks.is_empty() { EMPTY.to_owned() } else { text };
    if !text.is_empty() {
        blocks.insert(0, Content::text(text));
    }
    blocks
}

/// Returns the error of a task that did not run to an answer: the runtime or the protocol failed. A tool that reports
/// its own failure has answered.
pub(crate) fn broken(result: &ToolResult) -> Option<ErrorData> {
    let error = result.error.as_ref()?;
    let is_broken = error.code.category() == Category::RuntimeError || error.code == Code::UpstreamProtocolError;
    is_broken.then(|| ErrorData::internal_error(present_error(error, ""), Some(json!(error))))
}

/// Returns an error that belongs to no recorded call.
pub(crate) fn refusal(error: &CallError) -> CallToolResult {
    let mut answer = CallToolResult::error(vec![ContentBlock::text(present_error(error, ""))]);
    let mut meta = MetaObject::new();
    meta.insert(META_ERROR.into(), json!(error));
    answer.meta = Some(meta);
    answer
}

/// Returns the URI under which clients read an artifact.
fn artifact_uri(id: ArtifactId) -> String {
    format!("{ARTIFACT_SCHEME}{}", id.bare())
}

/// Describes an artifact as a resource.
pub(crate) fn artifact(id: ArtifactId) -> Resource {
    Resource::new(artifact_uri(id), id.to_string()).with_description("the whole output")
}

/// Converts a content block to MCP's form. The kinds are the same. An embedded resource that is not valid in MCP
/// becomes text.
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
            let fallback = (uri.clone(), name.clone());
            more.insert("uri".into(), uri.into());
            more.insert("name".into(), name.into());
            ContentBlock::ResourceLink(
                serde_json::from_value(Value::Object(more)).unwrap_or_else(|_| Resource::new(fallback.0, fallback.1)),
            )
        }
    }
}

/// Converts an MCP block to our form. Returns `None` for kinds that we do not know.
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

/// Takes the annotations and the `_meta` out of a block. A resource link keeps its own.
pub(crate) fn take_notes(block: &mut ContentBlock) -> Map<String, Value> {
    let mut notes = Map::new();
    let Some((annotations, meta)) = notes_mut(block) else { return notes };
    if let Some(annotations) = annotations.take() {
        notes.insert("annotations".into(), json!(annotations));
    }
    if let Some(meta) = meta.take() {
        notes.insert("_meta".into(), Value::Object(meta.0));
    }
    notes
}

/// Puts annotations and `_meta` back into a block.
fn with_notes(mut block: ContentBlock, mut notes: Map<String, Value>) -> ContentBlock {
    if let Some((annotations, meta)) = notes_mut(&mut block) {
        *annotations = notes.remove("annotations").and_then(|notes| serde_json::from_value(notes).ok());
        *meta = notes.remove("_meta").and_then(|notes| serde_json::from_value(notes).ok());
    }
    block
}

fn notes_mut(block: &mut ContentBlock) -> Option<(&mut Option<Annotations>, &mut Option<MetaObject>)> {
    match block {
        ContentBlock::Text(text) => Some((&mut text.annotations, &mut text.meta)),
        ContentBlock::Image(image) => Some((&mut image.annotations, &mut image.meta)),
        ContentBlock::Audio(audio) => Some((&mut audio.annotations, &mut audio.meta)),
        ContentBlock::Resource(embedded) => Some((&mut embedded.annotations, &mut embedded.meta)),
        _ => None,
    }
}

/// Returns a value of MCP's as a JSON object.
pub(crate) fn object(thing: &impl serde::Serialize) -> Map<String, Value> {
    match serde_json::to_value(thing) {
        Ok(Value::Object(object)) => object,
        _ => Map::new(),
    }
}

/// Encodes bytes as base64, as MCP transports them.
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
    fn every_kind_of_block_survives_a_round_trip() {
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
    fn invalid_resources_are_shown_as_text() {
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
