//! The border between MCP's words and ours: what answers are made of, in both directions.

use rmcp::model::{ContentBlock, EmbeddedResource, Resource};
use serde_json::{Map, Value};
use wieldy_core::Content;

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
fn object(thing: &impl serde::Serialize) -> Map<String, Value> {
    match serde_json::to_value(thing) {
        Ok(Value::Object(object)) => object,
        _ => Map::new(),
    }
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
}
