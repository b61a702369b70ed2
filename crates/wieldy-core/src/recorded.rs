//! Recorded results: the part of a call's result that the history stores. It is made before the closing event is
//! recorded, so that no other call waits while secrets are searched.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::call::{Content, ToolResult};
use crate::redact::{self, Redacted};
use crate::shown::NOT_KEPT;
use crate::trace::cut;

/// The part of a call's result that the history stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResultRecording {
    /// Nothing.
    None,
    /// The beginning and the end: 4 KiB of the text, or of the structured answer if there is no text.
    #[default]
    Head,
    /// All that the result has. Output that moved to an artifact stays there.
    Whole,
}

/// Maximum number of bytes of a result's head and tail together.
const HEAD_BYTES_MAX: usize = 4 * 1024;

/// The part of a result that the history stores, without secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedResult {
    /// The result as JSON: `text`, `structured`, `blocks` and `artifact`, each if the result has it.
    pub json: String,
    /// The hash of `json`.
    pub hash: blake3::Hash,
}

impl RecordedResult {
    /// Returns the part of a result to store, or `None` if there is nothing to store. `arguments` are those of the
    /// call, whose secrets are hidden.
    pub(crate) fn of(result: &ToolResult, recording: ResultRecording, arguments: &Redacted) -> Option<Self> {
        let is_whole = match recording {
            ResultRecording::None => return None,
            ResultRecording::Head => false,
            ResultRecording::Whole => true,
        };
        let mut stored = Map::new();
        let text = shown_text(result, arguments);
        let has_text = !text.is_empty();
        if has_text {
            let text = if is_whole { text } else { cut(&text, HEAD_BYTES_MAX) };
            stored.insert("text".into(), text.into());
        }
        if let Some(structured) = result.structured.as_ref().filter(|_| is_whole || !has_text) {
            stored.insert("structured".into(), shown_structured(structured, is_whole, arguments));
        }
        let blocks: Vec<Value> = result.content.iter().filter_map(outline).collect();
        if !blocks.is_empty() {
            stored.insert("blocks".into(), blocks.into());
        }
        if stored.is_empty() && result.artifact.is_none() {
            return None;
        }
        if let Some(artifact) = &result.artifact {
            stored.insert("artifact".into(), json!(artifact));
        }
        let json = serde_json::to_string(&stored).expect("texts and numbers are JSON");
        Some(Self { hash: blake3::hash(json.as_bytes()), json })
    }
}

/// Returns all text of a result without secrets.
fn shown_text(result: &ToolResult, arguments: &Redacted) -> String {
    let mut texts = result.content.iter().filter_map(|block| match block {
        Content::Text { text } if !text.is_empty() => Some(text.as_str()),
        _ => None,
    });
    let Some(first) = texts.next() else { return String::new() };
    if arguments.is_parted() {
        return NOT_KEPT.to_owned();
    }
    let mut shown = arguments.text(first).into_owned();
    let alone = shown.len();
    texts.for_each(|text| shown.push_str(&arguments.text(text)));
    // A secret may be split between two blocks.
    if shown.len() > alone {
        shown = arguments.text(&shown).into_owned();
    }
    if result.artifact.is_some() { without_cut_words(shown) } else { shown }
}

/// The note between the head and the tail of an output that moved to an artifact.
const CUT_NOTE: (&str, &str, &str) = ("\n… ", " bytes left out; ", " …\n");
/// Maximum number of bytes of a word that is removed beside a cut.
const CUT_WORD_BYTES_MAX: usize = 512;

/// Removes the words beside the place where an output was cut, because a secret may have been cut in two there, and the
/// rest of a private key after it.
fn without_cut_words(text: String) -> String {
    let (begin, middle, end) = CUT_NOTE;
    let Some(at) = text.find(middle) else { return text };
    let Some(from) = text[..at].rfind(begin) else { return text };
    let Some(to) = text[at..].find(end).map(|length| at + length + end.len()) else { return text };
    let is_space = |c: char| c.is_whitespace();
    let head_from = text.floor_char_boundary(from.saturating_sub(CUT_WORD_BYTES_MAX));
    let tail_to = text.ceil_char_boundary((to + CUT_WORD_BYTES_MAX).min(text.len()));
    let head = text[head_from..from].rfind(is_space).map_or(head_from, |space| head_from + space);
    let tail = text[to..tail_to].find(is_space).map_or(tail_to, |space| to + space);
    let tail = tail.max(to + redact::end_of_cut_key(&text[to..]));
    format!("{}{}{}", &text[..head], &text[from..to], &text[tail..])
}

/// Returns a structured answer without secrets. One that is too long for a head becomes a text that is cut.
fn shown_structured(structured: &Value, is_whole: bool, arguments: &Redacted) -> Value {
    let mut shown = redact::value(structured).into_owned();
    arguments.hide_in(&mut shown);
    if is_whole {
        return shown;
    }
    let json = shown.to_string();
    if json.len() > HEAD_BYTES_MAX { cut(&json, HEAD_BYTES_MAX).into() } else { shown }
}

/// Returns the type and the size of a block that is not text.
fn outline(block: &Content) -> Option<Value> {
    let bytes = block.bytes();
    Some(match block {
        Content::Text { .. } => return None,
        Content::Image { mime_type, .. } => json!({"type": "image", "mimeType": short(mime_type), "bytes": bytes}),
        Content::Audio { mime_type, .. } => json!({"type": "audio", "mimeType": short(mime_type), "bytes": bytes}),
        Content::Resource { .. } => json!({"type": "resource", "bytes": bytes}),
        Content::ResourceLink { .. } => json!({"type": "resource_link", "bytes": bytes}),
    })
}

/// Returns a type's name without secrets and at a bounded length: servers may send anything.
fn short(mime_type: &str) -> String {
    redact::text(mime_type).chars().take(100).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::artifact::ArtifactId;
    use crate::error::{CallError, Code};

    const ARTIFACT: &str = "artifact:01a1e3820bee7cc398c4dc0c0c07398f";

    fn result(content: Vec<Content>, structured: Option<Value>) -> ToolResult {
        let (id, now) = (crate::call::ExecutionId::next(), jiff::Timestamp::now());
        let mut result = ToolResult::failed(id, "t".into(), now, CallError::new(Code::ExecutionError, "no"));
        (result.content, result.structured) = (content, structured);
        result
    }

    fn recorded(result: &ToolResult, recording: ResultRecording) -> Option<Value> {
        let arguments = Redacted::new(Arc::new(json!({"password": "rosebud-1941"})), None);
        let recorded = RecordedResult::of(result, recording, &arguments)?;
        assert_eq!(recorded.hash, blake3::hash(recorded.json.as_bytes()));
        Some(serde_json::from_str(&recorded.json).expect("it is JSON"))
    }

    #[test]
    fn other_blocks_than_text_are_recorded_by_type_and_size() {
        let image = Content::Image { data: "aGk=".into(), mime_type: "image/png".into() };
        let link = Content::ResourceLink { uri: "file:///a".into(), name: "a".into(), more: Map::new() };
        let answer = result(vec![Content::text("one "), image, link, Content::text("two")], Some(json!({"n": 1})));
        let blocks =
            json!([{"type": "image", "mimeType": "image/png", "bytes": 4}, {"type": "resource_link", "bytes": 12}]);
        assert_eq!(
            recorded(&answer, ResultRecording::Head),
            Some(json!({"text": "one two", "blocks": blocks})),
            "the text says what the structured answer says"
        );
        assert_eq!(
            recorded(&answer, ResultRecording::Whole),
            Some(json!({"text": "one two", "structured": {"n": 1}, "blocks": blocks}))
        );
        assert_eq!(recorded(&answer, ResultRecording::None), None);
        let structured = result(vec![], Some(json!({"n": 1})));
        assert_eq!(recorded(&structured, ResultRecording::Head), Some(json!({"structured": {"n": 1}})));
        for recording in [ResultRecording::Head, ResultRecording::Whole] {
            assert_eq!(recorded(&result(vec![], None), recording), None, "nothing was answered");
            assert_eq!(recorded(&result(vec![Content::text("")], None), recording), None);
        }
    }

    // Shows: D9.5
    #[test]
    fn a_result_is_redacted_as_a_whole_and_then_cut() {
        // The secret lies across the place of the cut.
        let text = "a".repeat(2010) + " rosebud-1941 rosebud-1941 rosebud-1941 " + &"é".repeat(5000);
        let answer = result(vec![Content::text(text.clone())], None);
        let head = recorded(&answer, ResultRecording::Head).expect("it has text")["text"].to_string();
        assert!(head.len() <= HEAD_BYTES_MAX + 4 && !head.contains("rosebud") && !head.contains("1941"), "{head}");
        assert!(head.starts_with("\"aaa") && head.contains(" bytes left out …") && head.ends_with("éé\""), "{head}");
        let whole = recorded(&answer, ResultRecording::Whole).expect("it has text");
        assert_eq!(whole, json!({"text": text.replace("rosebud-1941", "[redacted]")}));
        let parts = result(vec![Content::text("rosebud-"), Content::text("1941")], None);
        assert_eq!(recorded(&parts, ResultRecording::Head), Some(json!({"text": "[redacted]"})));
        let structured = result(vec![], Some(json!({"token": "x", "a": vec!["rosebud-1941"; 1000]})));
        let head = recorded(&structured, ResultRecording::Head).expect("it has an answer");
        let cut = head["structured"].as_str().expect("it is cut");
        assert!(cut.starts_with(r#"{"token":"[redacted]","a":["[redacted]","#) && cut.len() <= HEAD_BYTES_MAX, "{cut}");
        let whole = recorded(&structured, ResultRecording::Whole).expect("it has an answer");
        assert_eq!(whole, json!({"structured": {"token": "[redacted]", "a": vec!["[redacted]"; 1000]}}));
    }

    #[test]
    fn words_beside_a_cut_are_not_recorded() {
        let cut = |text: &str, artifact: bool| {
            let mut answer = result(vec![Content::text(text)], None);
            answer.artifact = artifact.then(|| ARTIFACT.parse::<ArtifactId>().expect("an id"));
            recorded(&answer, ResultRecording::Whole).expect("it has text")["text"].as_str().map(str::to_owned)
        };
        let note = format!("\n… 9 of 99 bytes left out; the whole is {ARTIFACT} …\n");
        let text = format!("the key: rosebud{note}-1941 is\nsecret");
        assert_eq!(cut(&text, true), Some(format!("the key:{note} is\nsecret")));
        assert_eq!(cut(&text, false), Some(text.clone()), "the words of a file that has such a line");
        assert_eq!(cut(&format!("rosebud{note}-1941"), true), Some(note.clone()));
        let key = format!("one two{note}MIIE\nvQIB\n-----END PRIVATE KEY-----\nthree");
        assert_eq!(cut(&key, true), Some(format!("one{note}\nthree")));
        assert_eq!(cut("no cut", true), Some("no cut".into()));
    }
}
