//! Front matter: the YAML properties at the head of a note, read within limits and edited by byte ranges.
//!
//! The text is never written anew from parsed values: an edit replaces the lines of single keys and leaves every other
//! byte. The result is parsed again, and an edit that changed anything else is refused.

use std::ops::Range;

use serde_json::{Map, Value};
use serde_saphyr::{Budget, DuplicateKeyPolicy, Options};

use super::yaml_text::comment_start;

/// Maximum size of front matter that is read.
pub(crate) const FRONT_MATTER_BYTES_MAX: usize = 64 * 1024;
/// Maximum nesting of values.
const DEPTH_MAX: usize = 32;
/// Maximum number of values.
const NODES_MAX: usize = 10_000;

/// The place of front matter in the text of a note.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Block {
    /// The YAML between the two fences.
    pub(crate) yaml: Range<usize>,
    /// Everything up to the body: the fences too.
    pub(crate) whole: Range<usize>,
}

/// Returns the front matter of a note, whose text has no byte order mark.
pub(crate) fn find(text: &str) -> Option<Block> {
    let first = text.split_inclusive('\n').next()?;
    if first.trim_end() != "---" || !first.ends_with('\n') {
        return None;
    }
    let mut start = first.len();
    for line in text[first.len()..].split_inclusive('\n') {
        let end = start + line.len();
        if line.trim_end() == "---" {
            return Some(Block { yaml: first.len()..start, whole: 0..end });
        }
        start = end;
    }
    None
}

/// Reads the properties. The error says why they cannot be read.
pub(crate) fn parse(yaml: &str) -> Result<Map<String, Value>, String> {
    if yaml.len() > FRONT_MATTER_BYTES_MAX {
        return Err(format!("the front matter has {} bytes, more than {FRONT_MATTER_BYTES_MAX}", yaml.len()));
    }
    let mut budget = Budget::default();
    budget.max_depth = DEPTH_MAX;
    budget.flow_nesting_limit = DEPTH_MAX;
    budget.max_nodes = NODES_MAX;
    budget.max_events = 4 * NODES_MAX;
    budget.max_documents = 1;
    // An alias repeats what an anchor holds, so a few lines can stand for gigabytes.
    budget.max_anchors = 0;
    budget.max_aliases = 0;
    budget.max_merge_keys = 0;
    let mut options = Options::default();
    options.budget = Some(budget);
    options.with_snippet = false;
    options.duplicate_keys = DuplicateKeyPolicy::Error;
    match serde_saphyr::from_str_with_options::<Option<Map<String, Value>>>(yaml, options) {
        Ok(properties) => Ok(properties.unwrap_or_default()),
        Err(error) => {
            let message = error.to_string().replace(['\n', '\r'], " ");
            Err(format!("the front matter cannot be read: {}", crate::files::cut(&message, 200)))
        }
    }
}

/// Returns the text with these properties set, or removed where the value is null. The error says why that cannot be
/// done by editing single keys.
pub(crate) fn set(text: &str, changes: &Map<String, Value>) -> Result<String, String> {
    if changes.is_empty() {
        return Ok(text.to_owned());
    }
    let eol = if text.contains("\r\n") { "\r\n" } else { "\n" };
    let block = find(text);
    let yaml = block.as_ref().map_or("", |block| &text[block.yaml.clone()]);
    let before = parse(yaml)?;
    let mut edited = yaml.to_owned();
    for (key, value) in changes {
        if before.get(key).unwrap_or(&Value::Null) != value {
            edited = set_one(&edited, key, value, eol);
        }
    }
    let mut wanted = before;
    for (key, value) in changes {
        match value {
            Value::Null => drop(wanted.shift_remove(key)),
            value => drop(wanted.insert(key.clone(), value.clone())),
        }
    }
    if parse(&edited)? != wanted {
        return Err("the front matter is written in a way in which single properties cannot be changed".to_owned());
    }
    Ok(match block {
        Some(block) => [&text[..block.yaml.start], &edited, &text[block.yaml.end..]].concat(),
        None if edited.is_empty() => text.to_owned(),
        None => ["---", eol, &edited, "---", eol, text].concat(),
    })
}

fn set_one(yaml: &str, key: &str, value: &Value, eol: &str) -> String {
    let found = entries(yaml).into_iter().find(|entry| entry.key == key);
    let Some(entry) = found else {
        return if value.is_null() { yaml.to_owned() } else { format!("{yaml}{}", rendered(key, value, "", eol)) };
    };
    let old = &yaml[entry.lines.clone()];
    let one_line = old.trim_end_matches(['\r', '\n']);
    // A comment behind a value of one line stays.
    let comment = if one_line.contains('\n') { None } else { comment_start(one_line, entry.value_start) };
    let comment = comment.map(|start| &one_line[start..]).unwrap_or_default();
    let new = if value.is_null() { String::new() } else { rendered(key, value, comment, eol) };
    [&yaml[..entry.lines.start], &new, &yaml[entry.lines.end..]].concat()
}

/// A top-level key with its lines.
struct Entry {
    key: String,
    lines: Range<usize>,
    /// The start of the value in the first line.
    value_start: usize,
}

/// Returns the top-level keys with their lines. Comments and empty lines before a key belong to no key.
fn entries(yaml: &str) -> Vec<Entry> {
    let (mut entries, mut start): (Vec<Entry>, usize) = (Vec::new(), 0);
    for line in yaml.split_inclusive('\n') {
        let end = start + line.len();
        if let Some((key, value_start)) = key_of(line) {
            entries.push(Entry { key, lines: start..end, value_start });
        } else if let Some(entry) = entries.last_mut()
            && !line.trim().is_empty()
            && !line.starts_with('#')
        {
            entry.lines.end = end;
        }
        start = end;
    }
    entries
}

/// Returns the key of a line that begins a top-level entry, and the start of its value.
fn key_of(line: &str) -> Option<(String, usize)> {
    let first = line.chars().next()?;
    if first.is_whitespace() || "#-?[]{},&*!|>%@`".contains(first) {
        return None;
    }
    if first == '"' || first == '\'' {
        let close = line[1..].find(first)? + 2;
        let rest = line[close..].trim_start().strip_prefix(':')?;
        return (!line[..close].contains('\\')).then(|| (line[1..close - 1].to_owned(), line.len() - rest.len()));
    }
    let colon = line
        .match_indices(':')
        .map(|(at, _)| at)
        .find(|at| line[at + 1..].chars().next().is_none_or(char::is_whitespace))?;
    Some((line[..colon].trim_end().to_owned(), colon + 1))
}

fn rendered(key: &str, value: &Value, comment: &str, eol: &str) -> String {
    let key = scalar(&Value::String(key.to_owned()));
    let space = if comment.is_empty() { "" } else { " " };
    match value {
        Value::Array(items) if !items.is_empty() && items.iter().all(|item| !item.is_array() && !item.is_object()) => {
            let items: String = items.iter().map(|item| format!("  - {}{eol}", scalar(item))).collect();
            format!("{key}:{space}{comment}{eol}{items}")
        }
        value => format!("{key}: {}{space}{comment}{eol}", scalar(value)),
    }
}

/// Returns a value in one line. JSON is YAML, so everything that is not a plain word is written as JSON.
fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) if is_plain(text) => text.clone(),
        value => value.to_string(),
    }
}

/// Returns true if YAML reads the text as the same text without quotes.
fn is_plain(text: &str) -> bool {
    const WORDS: [&str; 11] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"];
    text.starts_with(|c: char| c.is_alphabetic())
        && text.chars().all(|c| c.is_alphanumeric() || " _-./".contains(c))
        && !text.ends_with(' ')
        && !WORDS.contains(&text.to_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn changes(value: Value) -> Map<String, Value> {
        value.as_object().expect("an object").clone()
    }

    #[test]
    fn front_matter_begins_on_the_first_line_and_ends_at_the_next_fence() {
        for (text, yaml) in [
            ("---\na: 1\n---\nbody", Some("a: 1\n")),
            ("---\r\na: 1\r\n---\r\nbody", Some("a: 1\r\n")),
            ("---\n---\n", Some("")),
            ("--- \na: 1\n---", Some("a: 1\n")),
            ("\n---\na: 1\n---\n", None),
            ("---\na: 1\n", None),
            ("----\na: 1\n---\n", None),
            ("---", None),
            ("", None),
        ] {
            assert_eq!(find(text).map(|block| &text[block.yaml]), yaml, "{text:?}");
        }
    }

    #[test]
    fn hostile_front_matter_is_refused_within_the_limits() {
        let bomb = "a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n";
        assert!(parse(bomb).is_err(), "anchors are not expanded");
        assert!(parse("a: &x 1\n").is_err());
        assert!(parse(&format!("a: {}{}", "[".repeat(5000), "]".repeat(5000))).is_err());
        let deep: String = (0..60).map(|level| format!("{}k:\n", "  ".repeat(level))).collect();
        assert!(parse(&deep).is_err());
        assert!(parse(&"k: v\n".repeat(300_000)).is_err());
        assert!(parse("a: 1\na: 2\n").is_err(), "a key that stands twice");
        assert!(parse("- a\n- b\n").is_err(), "no properties");
        assert!(parse("a: [\n").is_err());
        assert_eq!(parse("# only a comment\n"), Ok(Map::new()));
        assert_eq!(parse(""), Ok(Map::new()));
        let read = parse("title: Über\ntags: [a, b]\ndate: 2024-01-02\nn: 3\nok: true\n").expect("plain YAML");
        let wanted = json!({"title": "Über", "tags": ["a", "b"], "date": "2024-01-02", "n": 3, "ok": true});
        assert_eq!(Value::Object(read), wanted);
    }

    #[test]
    fn an_edit_changes_the_lines_of_its_key_and_no_other_byte() {
        let text = "---\r\n# mine\r\ntitle:   Old  # why\r\ntags:\r\n- a\r\n- b\r\n\r\n# end\r\n\"odd key\": {x: 1}\r\n---\r\nbody\r\n";
        let edited = set(text, &changes(json!({"title": "New one"}))).expect("a simple edit");
        assert_eq!(edited, text.replace("title:   Old  # why", "title: New one # why"));
        let edited = set(text, &changes(json!({"tags": ["c", "d e: f"]}))).expect("a list");
        let wanted = text.replace("- a\r\n- b\r\n", "  - c\r\n  - \"d e: f\"\r\n");
        assert_eq!(edited, wanted);
        let edited = set(text, &changes(json!({"tags": null, "odd key": 2}))).expect("two edits");
        let wanted = text.replace("tags:\r\n- a\r\n- b\r\n", "").replace("\"odd key\": {x: 1}", "odd key: 2");
        assert_eq!(edited, wanted);
        assert_eq!(set(text, &changes(json!({"title": "Old", "none": null}))).as_deref(), Ok(text));
        let edited = set(text, &changes(json!({"new": "yes"}))).expect("a new key");
        assert_eq!(edited, text.replace("---\r\nbody", "new: \"yes\"\r\n---\r\nbody"));
    }

    #[test]
    fn a_note_without_front_matter_gets_it_and_one_that_cannot_be_edited_is_refused() {
        assert_eq!(set("body\n", &changes(json!({"a": 1}))).as_deref(), Ok("---\na: 1\n---\nbody\n"));
        assert_eq!(set("body\n", &changes(json!({"a": null}))).as_deref(), Ok("body\n"));
        assert!(set("---\n{a: 1}\n---\n", &changes(json!({"b": 1}))).is_err());
        assert!(set("---\na: [\n---\n", &changes(json!({"b": 1}))).is_err());
        let text = "---\na: |\n  text\n  b: no key\nb: 1\n---\n";
        assert_eq!(set(text, &changes(json!({"b": 2}))).as_deref(), Ok(&*text.replace("b: 1", "b: 2")));
    }
}
