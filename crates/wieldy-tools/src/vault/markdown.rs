//! Notes as data: the links, headings, tags and blocks of a note, with their places in its text.
//!
//! Code, comments, formulas and HTML hold neither links nor tags. Places are byte offsets in the text after a byte
//! order mark.

use std::ops::Range;

use pulldown_cmark::{Event, LinkType, Options, Parser, Tag, TagEnd};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::front_matter;
use super::link::{Link, LinkKind, decoded, is_external, split_place};
use super::yaml_text;

/// Maximum number of links of a note that are read; the rest is ignored.
const LINKS_MAX: usize = 50_000;

/// The facts about one note.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct NoteFacts {
    /// The title by the front matter or the first heading of level 1.
    pub(crate) title: Option<String>,
    pub(crate) tags: Vec<String>,
    pub(crate) aliases: Vec<String>,
    #[serde(with = "as_text")]
    pub(crate) properties: Map<String, Value>,
    /// The reason why the front matter cannot be read.
    pub(crate) problem: Option<String>,
    pub(crate) headings: Vec<Heading>,
    pub(crate) links: Vec<Link>,
    /// The names of blocks, such as `intro` for a line that ends in `^intro`, with the start of the line.
    pub(crate) blocks: Vec<(String, usize)>,
    /// The start of the body.
    pub(crate) body: usize,
}

/// A heading.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Heading {
    pub(crate) level: u8,
    pub(crate) text: String,
    /// The start of its first line, and the end of its last one with the line end.
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl NoteFacts {
    /// Reads a note, whose text has no byte order mark.
    pub(crate) fn of(text: &str) -> Self {
        let mut facts = Self::default();
        let lines = Lines::of(text);
        if let Some(block) = front_matter::find(text) {
            facts.body = block.whole.end;
            let yaml = &text[block.yaml.clone()];
            match front_matter::parse(yaml) {
                Ok(properties) => facts.properties = properties,
                Err(problem) => facts.problem = Some(problem),
            }
            if yaml.len() <= front_matter::FRONT_MATTER_BYTES_MAX {
                property_links(yaml, block.yaml.start, &lines, &mut facts.links);
            }
        }
        Body::read(text, &lines, &mut facts);
        facts.take_properties();
        facts.links.truncate(LINKS_MAX);
        facts
    }

    /// Takes title, tags and aliases of the front matter over.
    fn take_properties(&mut self) {
        let text = |key: &str| self.properties.get(key).and_then(Value::as_str).filter(|text| !text.trim().is_empty());
        let title = text("title").map(str::to_owned);
        let first = || self.headings.iter().find(|heading| heading.level == 1).map(|heading| heading.text.clone());
        self.title = title.or_else(first);
        let mut tags: Vec<String> = ["tags", "tag"].iter().flat_map(|key| self.texts(key, &[',', ' '])).collect();
        tags.iter_mut().for_each(|tag| *tag = tag.trim_start_matches('#').to_owned());
        tags.append(&mut self.tags);
        let mut seen = std::collections::HashSet::new();
        tags.retain(|tag| !tag.is_empty() && seen.insert(tag.to_lowercase()));
        self.tags = tags;
        self.aliases = ["aliases", "alias"].iter().flat_map(|key| self.texts(key, &[','])).collect();
    }

    /// Returns the texts of a property that is one text or a list. One text is split at the separators.
    pub(crate) fn texts(&self, key: &str, separators: &[char]) -> Vec<String> {
        let plain = |value: &Value| match value {
            Value::String(text) => Some(text.trim().to_owned()),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        };
        match self.properties.get(key) {
            Some(Value::Array(items)) => items.iter().filter_map(plain).filter(|text| !text.is_empty()).collect(),
            Some(Value::String(text)) => {
                text.split(separators).map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
            }
            Some(value) => plain(value).into_iter().collect(),
            None => Vec::new(),
        }
    }

    /// Returns the heading that a place such as `A#B` names: `B` below `A`.
    pub(crate) fn heading(&self, place: &str) -> Option<usize> {
        let (mut from, mut level, mut found) = (0, 0, None);
        for part in place.split('#').filter(|part| !part.trim().is_empty()) {
            let wanted = comparable(part);
            let rest = self.headings.iter().enumerate().skip(from);
            // The section of the heading before ends at the next heading of its level.
            let index = rest
                .take_while(|(_, heading)| heading.level > level)
                .find(|(_, heading)| comparable(&heading.text) == wanted)?
                .0;
            (from, level, found) = (index + 1, self.headings[index].level, Some(index));
        }
        found
    }

    /// Returns the bytes below a heading, up to the next heading of its level or a higher one.
    pub(crate) fn section(&self, heading: usize, text_bytes: usize) -> Range<usize> {
        let level = self.headings[heading].level;
        let next = self.headings[heading + 1..].iter().find(|next| next.level <= level);
        self.headings[heading].end..next.map_or(text_bytes, |next| next.start)
    }

    /// Returns the heading above a place in the text.
    pub(crate) fn heading_above(&self, at: usize) -> Option<&Heading> {
        self.headings.iter().rev().find(|heading| heading.start <= at)
    }
}

/// Properties in a snapshot of the index: as one text, because its form needs types that are known before.
mod as_text {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use serde_json::{Map, Value};

    pub(super) fn serialize<S: Serializer>(properties: &Map<String, Value>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&serde_json::to_string(properties).unwrap_or_default())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Map<String, Value>, D::Error> {
        serde_json::from_str(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

/// Returns a heading as links name it: case and punctuation do not count.
fn comparable(heading: &str) -> String {
    let plain: String = heading.chars().map(|c| if c.is_alphanumeric() { c } else { ' ' }).collect();
    super::names::folded(&plain.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The starts of the lines of a text.
pub(crate) struct Lines(Vec<usize>);

impl Lines {
    pub(crate) fn of(text: &str) -> Self {
        Self(std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect())
    }

    /// Returns the number of the line with this byte, from 1.
    pub(crate) fn number(&self, at: usize) -> usize {
        self.0.partition_point(|start| *start <= at)
    }

    /// Returns the start of the line with this byte.
    fn start(&self, at: usize) -> usize {
        self.0[self.number(at) - 1]
    }
}

/// Adds the wikilinks in the strings of the front matter.
fn property_links(yaml: &str, offset: usize, lines: &Lines, links: &mut Vec<Link>) {
    for (range, style) in yaml_text::texts(yaml) {
        let text = &yaml[range.clone()];
        let mut from = 0;
        while let Some(open) = text[from..].find("[[").map(|at| from + at) {
            let Some(close) = text[open..].find("]]").map(|at| open + at) else { break };
            // The last two brackets before the end open the link.
            let open = text[open..close].rfind("[[").map_or(open, |at| open + at);
            from = close + 2;
            let whole = open..close + 2;
            if let Some(link) = wikilink(text, whole, |written| style.meant(written)) {
                let at = offset + range.start;
                let kind = LinkKind::Property(style);
                let line = lines.number(at + link.start);
                links.push(Link { kind, start: at + link.start, end: at + link.end, line, ..link });
            }
        }
    }
}

/// Reads a wikilink at these bytes of the text.
fn wikilink(text: &str, whole: Range<usize>, meant: impl Fn(&str) -> String) -> Option<Link> {
    let written = &text[whole.clone()];
    let embed = written.starts_with('!');
    let open = whole.start + written.find("[[")? + 2;
    let inner = &text[open..whole.end.checked_sub(2)?];
    if inner.contains(['\n', '\r']) || inner.contains("[[") {
        return None;
    }
    let target = inner.split('|').next()?;
    // In a table, the bar is written as `\|`.
    let target = if inner.len() > target.len() { target.strip_suffix('\\').unwrap_or(target) } else { target };
    let (path, place) = split_place(target);
    let start = open + (path.len() - path.trim_start().len());
    let path = path.trim();
    if path.is_empty() && place.is_none() {
        return None;
    }
    Some(Link {
        kind: LinkKind::Wiki,
        embed,
        start,
        end: start + path.len(),
        path: meant(path),
        place: place.map(|place| meant(place.trim())),
        line: 0,
    })
}

/// The body of a note while it is read.
struct Body<'a> {
    text: &'a str,
    lines: &'a Lines,
    /// The ranges of plain text: no code, formulas, HTML or links.
    plain: Vec<Range<usize>>,
    /// Open links, each with its start, its kind and the end of the last thing in it.
    open: Vec<OpenLink>,
    heading: Option<(u8, String, Range<usize>)>,
    code: bool,
}

struct OpenLink {
    link_type: LinkType,
    destination: String,
    embed: bool,
    whole: Range<usize>,
    text_end: usize,
}

impl<'a> Body<'a> {
    fn read(text: &'a str, lines: &'a Lines, facts: &mut NoteFacts) {
        let options = Options::ENABLE_TABLES
            | Options::ENABLE_FOOTNOTES
            | Options::ENABLE_STRIKETHROUGH
            | Options::ENABLE_TASKLISTS
            | Options::ENABLE_MATH
            | Options::ENABLE_WIKILINKS;
        let offset = facts.body;
        let parser = Parser::new_ext(&text[offset..], options);
        let definitions: Vec<Range<usize>> =
            parser.reference_definitions().iter().map(|(_, definition)| definition.span.clone()).collect();
        let mut body = Self { text, lines, plain: Vec::new(), open: Vec::new(), heading: None, code: false };
        let mut links = Vec::new();
        for (event, range) in parser.into_offset_iter() {
            body.take(event, range.start + offset..range.end + offset, facts, &mut links);
        }
        for span in definitions {
            links.extend(body.definition(span.start + offset..span.end + offset));
        }
        body.join_plain();
        let comments = body.comments();
        let is_in_comment = |at: usize| {
            let before = comments.partition_point(|comment| comment.start <= at);
            before > 0 && comments[before - 1].contains(&at)
        };
        links.retain(|link| !is_in_comment(link.start));
        facts.headings.retain(|heading| !is_in_comment(heading.start));
        body.tags_and_blocks(facts, &is_in_comment);
        facts.links.append(&mut links);
        facts.links.sort_by_key(|link| link.start);
        facts.links.dedup_by_key(|link| (link.start, link.end));
    }

    fn take(&mut self, event: Event<'_>, range: Range<usize>, facts: &mut NoteFacts, links: &mut Vec<Link>) {
        if !matches!(event, Event::End(TagEnd::Link | TagEnd::Image)) {
            self.open.iter_mut().for_each(|open| open.text_end = open.text_end.max(range.end.min(open.whole.end)));
        }
        match event {
            Event::Start(Tag::Link { link_type, dest_url, .. }) => self.begin(link_type, &dest_url, false, range),
            Event::Start(Tag::Image { link_type, dest_url, .. }) => self.begin(link_type, &dest_url, true, range),
            Event::End(TagEnd::Link | TagEnd::Image) => {
                let link = self.open.pop().and_then(|open| self.link(&open));
                links.extend(link);
            }
            Event::Start(Tag::CodeBlock(_)) => self.code = true,
            Event::End(TagEnd::CodeBlock) => self.code = false,
            Event::Start(Tag::Heading { level, .. }) => self.heading = Some((level as u8, String::new(), range)),
            Event::End(TagEnd::Heading(_)) => self.end_heading(facts),
            Event::Text(_) if self.code => {}
            Event::Text(text) => {
                if let Some((_, heading, _)) = &mut self.heading {
                    heading.push_str(&text);
                }
                if self.open.is_empty() {
                    self.plain.push(range);
                }
            }
            Event::Code(text) | Event::InlineMath(text) => {
                if let Some((_, heading, _)) = &mut self.heading {
                    heading.push_str(&text);
                }
            }
            _ => {}
        }
    }

    fn begin(&mut self, link_type: LinkType, destination: &str, embed: bool, whole: Range<usize>) {
        // Begins below its own text, which may be empty.
        let text_end = whole.start + if embed { 2 } else { 1 };
        self.open.push(OpenLink { link_type, destination: destination.to_owned(), embed, whole, text_end });
    }

    fn link(&self, open: &OpenLink) -> Option<Link> {
        match open.link_type {
            LinkType::WikiLink { .. } => {
                let link = wikilink(self.text, open.whole.clone(), str::to_owned)?;
                Some(Link { embed: open.embed, line: self.lines.number(open.whole.start), ..link })
            }
            LinkType::Inline => {
                let after = &self.text[open.text_end..open.whole.end];
                let start = open.text_end + after.find("](")? + 2;
                let link = self.destination(start, open.whole.end - 1)?;
                // Escapes other than `%20` are too rare to be changed; such a link is left alone.
                let is_same = self.text[link.0.clone()] == open.destination;
                is_same.then(|| self.markdown(link.0, link.1, open.embed)).flatten()
            }
            _ => None,
        }
    }

    /// Finds the bytes of a destination that begins at or after `start`, and whether it is in angle brackets.
    fn destination(&self, start: usize, end: usize) -> Option<(Range<usize>, bool)> {
        let text = self.text.get(start..end)?;
        let start = start + (text.len() - text.trim_start().len());
        let text = text.trim_start();
        if let Some(inner) = text.strip_prefix('<') {
            let close = inner.find('>')?;
            return Some((start + 1..start + 1 + close, true));
        }
        let mut depth = 0_u32;
        let stop = text.char_indices().find(|(_, c)| {
            match c {
                '(' => depth += 1,
                ')' if depth == 0 => return true,
                ')' => depth -= 1,
                _ => {}
            }
            c.is_whitespace()
        });
        Some((start..start + stop.map_or(text.len(), |(at, _)| at), false))
    }

    fn markdown(&self, range: Range<usize>, angle: bool, embed: bool) -> Option<Link> {
        let written = &self.text[range.clone()];
        if written.is_empty() || is_external(written) {
            return None;
        }
        let (path, place) = split_place(written);
        Some(Link {
            kind: if angle { LinkKind::MarkdownAngle } else { LinkKind::Markdown },
            embed,
            start: range.start,
            end: range.start + path.len(),
            path: decoded(path),
            place: place.map(decoded),
            line: self.lines.number(range.start),
        })
    }

    /// Returns the link of a definition such as `[name]: path`.
    fn definition(&self, span: Range<usize>) -> Option<Link> {
        let text = &self.text[span.clone()];
        if text.starts_with("[^") {
            return None;
        }
        let start = span.start + text.find("]:")? + 2;
        let (range, angle) = self.destination(start, span.end)?;
        self.markdown(range, angle, false)
    }

    fn end_heading(&mut self, facts: &mut NoteFacts) {
        let Some((level, text, range)) = self.heading.take() else { return };
        let start = self.lines.start(range.start);
        // The range of some headings ends before the line end.
        let end = match self.text[..range.end].ends_with('\n') {
            true => range.end,
            false => self.text[range.end..].find('\n').map_or(self.text.len(), |at| range.end + at + 1),
        };
        facts.headings.push(Heading { level, text: text.trim().to_owned(), start, end });
    }

    /// Joins neighbouring ranges: the parser splits text at characters that might have a meaning.
    fn join_plain(&mut self) {
        let mut joined: Vec<Range<usize>> = Vec::with_capacity(self.plain.len());
        for range in self.plain.drain(..) {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        self.plain = joined;
    }

    /// Returns the comments `%%…%%`. One that opens a line and is never closed goes to the end of the note.
    fn comments(&self) -> Vec<Range<usize>> {
        let mut marks = Vec::new();
        for range in &self.plain {
            let text = &self.text[range.clone()];
            marks.extend(text.match_indices("%%").map(|(at, _)| range.start + at));
        }
        let mut comments: Vec<Range<usize>> =
            marks.as_chunks::<2>().0.iter().map(|[open, close]| *open..*close + 2).collect();
        if let [open] = marks.as_chunks::<2>().1
            && self.text[self.lines.start(*open)..*open].trim().is_empty()
        {
            comments.push(*open..self.text.len());
        }
        comments
    }

    fn tags_and_blocks(&self, facts: &mut NoteFacts, is_in_comment: &dyn Fn(usize) -> bool) {
        for range in &self.plain {
            let text = &self.text[range.clone()];
            for (at, _) in text.match_indices('#') {
                let before = self.text[..range.start + at].chars().next_back();
                let tag: String = text[at + 1..]
                    .chars()
                    .take_while(|c| c.is_alphanumeric() || "_-/".contains(*c) || !c.is_ascii() && !c.is_whitespace())
                    .collect();
                let is_tag = before.is_none_or(char::is_whitespace) && tag.chars().any(|c| !c.is_ascii_digit());
                if is_tag && !is_in_comment(range.start + at) {
                    facts.tags.push(tag.trim_end_matches('/').to_owned());
                }
            }
            for (at, _) in text.match_indices('^') {
                let place = range.start + at;
                let is_apart = self.text[..place].chars().next_back().is_none_or(char::is_whitespace);
                let line = self.text[place + 1..].lines().next().unwrap_or_default().trim_end();
                let is_name = !line.is_empty() && line.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
                if is_apart && is_name && !is_in_comment(place) {
                    facts.blocks.push((line.to_owned(), self.lines.start(place)));
                }
            }
        }
    }
}
