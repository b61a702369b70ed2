//! [`Walker`]: walks a syntax tree once and collects definitions, imports and occurrences.
//!
//! The walk uses a cursor and its own stack, never recursion: hostile files nest deeper than a thread's stack.

use std::collections::{HashMap, HashSet};

use tree_sitter::{Node, Tree};

use super::language::Language;
use super::rules::{Mode, READ, Rules};
use super::tree::{Definition, FileTree, Import, Kind, Occurrence, Use, Visibility};

/// Maximum length of a signature.
const SIGNATURE_BYTES_MAX: usize = 240;
/// Maximum length of the signature of a constant or field, which may have a long value.
const VALUE_BYTES_MAX: usize = 120;
/// Maximum length of a name. Longer ones are no names that anyone asks for.
const NAME_BYTES_MAX: usize = 256;

/// A walk through the tree of one file.
pub(crate) struct Walker<'t> {
    pub(crate) text: &'t [u8],
    pub(crate) language: Language,
    rules: &'static Rules,
    tree: FileTree,
    /// The number of each name in the tree.
    numbers: HashMap<&'t [u8], u32>,
    scopes: Vec<Scope>,
    /// The beginnings of definitions' names that the walk has yet to reach.
    ahead: Vec<usize>,
    comment: Option<Comment>,
    /// The last row of the last leaf that is no comment.
    row_before: Option<usize>,
    column: ColumnMark,
    depth: usize,
}

/// A definition, or a block such as `impl`, that the walk is in.
pub(crate) struct Scope {
    depth: usize,
    pub(crate) kind: ScopeKind,
    definition: Option<u32>,
    container: Option<Box<str>>,
    /// The variables and fields that were seen in it, so that a second assignment is no second definition.
    seen: HashSet<Box<str>>,
    /// The visibility of what follows, in languages that set it for all that follows.
    pub(crate) visibility: Option<Visibility>,
}

/// A kind of scopes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScopeKind {
    Module,
    /// A class, trait, enum or an `impl` block: functions in it are methods.
    Type,
    Function,
    /// A constant, a field or the like.
    Value,
}

/// Comment lines in a row.
struct Comment {
    first_row: usize,
    last_row: usize,
    /// The last row of the comment or of the attributes after it.
    reach: usize,
}

/// A place of a line whose column is known. Lines may be long, so counting goes on from here.
struct ColumnMark {
    line_start: usize,
    at: usize,
    column: u32,
}

/// The parent of the node that the walk is at.
struct Frame {
    kind: u16,
    mode: Mode,
}

/// Walks the tree of a file.
pub(crate) fn walk(language: Language, rules: &'static Rules, tree: &Tree, text: &[u8]) -> FileTree {
    let lines = text.iter().filter(|byte| **byte == b'\n').count()
        + usize::from(text.last().is_some_and(|last| *last != b'\n'));
    let collected = FileTree {
        language,
        lines: lines as u32,
        broken: tree.root_node().has_error(),
        doc: None,
        definitions: Vec::new(),
        imports: Vec::new(),
        names: Vec::new(),
        occurrences: Vec::new(),
    };
    let mut walker = Walker {
        text,
        language,
        rules,
        tree: collected,
        numbers: HashMap::new(),
        scopes: vec![Scope::new(0, ScopeKind::Module, None, None)],
        ahead: Vec::new(),
        comment: None,
        row_before: None,
        column: ColumnMark { line_start: 0, at: 0, column: 1 },
        depth: 0,
    };
    walker.run(tree);
    walker.tree
}

impl Scope {
    fn new(depth: usize, kind: ScopeKind, definition: Option<u32>, container: Option<Box<str>>) -> Self {
        Self { depth, kind, definition, container, seen: HashSet::new(), visibility: None }
    }
}

impl<'t> Walker<'t> {
    fn run(&mut self, tree: &'t Tree) {
        let mut cursor = tree.walk();
        let mut frames: Vec<Frame> = Vec::new();
        let mut mode = READ;
        loop {
            let node = cursor.node();
            self.depth = frames.len();
            self.enter(node, mode);
            if cursor.goto_first_child() {
                frames.push(Frame { kind: node.kind_id(), mode });
            } else {
                self.row_before = Some(node.end_position().row).filter(|_| !self.is_comment(node)).or(self.row_before);
                loop {
                    self.leave(frames.len());
                    if cursor.goto_next_sibling() {
                        break;
                    }
                    if !cursor.goto_parent() {
                        return;
                    }
                    frames.pop();
                }
            }
            let Some(parent) = frames.last() else { return };
            mode = self.rules.node(parent.kind).map_or(READ, |rule| {
                let field = if rule.fields.is_empty() { None } else { cursor.field_id() };
                rule.child(field.map(|field| field.get()), parent.mode)
            });
        }
    }

    fn enter(&mut self, node: Node<'t>, mode: Mode) {
        let rules = self.rules;
        let Some(rule) = rules.node(node.kind_id()) else { return };
        if rule.comment {
            self.meet_comment(node);
        }
        if rule.attribute
            && let Some(comment) = &mut self.comment
            && comment.reach + 1 >= node.start_position().row
        {
            comment.reach = node.end_position().row;
        }
        if let Some(leaf) = rule.name {
            self.occur(node, if mode == READ { leaf } else { mode });
        }
        if let Some(kind) = rule.definition
            && let Some(name) = node.child_by_field_name("name")
        {
            self.define(node, name, kind);
        }
        if let Some(hook) = rule.hook {
            hook(self, node);
        }
    }

    /// Ends the scopes that were entered at this depth.
    fn leave(&mut self, depth: usize) {
        while self.scopes.len() > 1 && self.scopes.last().is_some_and(|scope| scope.depth >= depth) {
            self.scopes.pop();
        }
    }

    fn is_comment(&self, node: Node<'_>) -> bool {
        self.rules.node(node.kind_id()).is_some_and(|rule| rule.comment)
    }

    fn meet_comment(&mut self, node: Node<'_>) {
        let (first, mut last) = (node.start_position().row, node.end_position().row);
        // Some grammars count the line break to the comment.
        if node.end_position().column == 0 && last > first {
            last -= 1;
        }
        match &mut self.comment {
            _ if self.row_before == Some(first) => return,
            Some(comment) if comment.last_row + 1 >= first && comment.reach == comment.last_row => {
                (comment.last_row, comment.reach) = (last, last);
            }
            comment => *comment = Some(Comment { first_row: first, last_row: last, reach: last }),
        }
        // Comments at the top are the file's, until a definition takes them.
        if self.tree.definitions.is_empty() && self.row_before.is_none() {
            self.tree.doc =
                self.comment.as_ref().map(|comment| (comment.first_row as u32 + 1, comment.last_row as u32 + 1));
        }
    }

    /// Takes the comment that ends right before this row.
    fn take_doc(&mut self, row: usize) -> Option<(u32, u32)> {
        let comment = self.comment.take_if(|comment| comment.reach + 1 >= row && comment.reach <= row)?;
        let doc = (comment.first_row as u32 + 1, comment.last_row as u32 + 1);
        if self.tree.doc == Some(doc) && !self.is_file_doc(comment.first_row) {
            self.tree.doc = None;
        }
        (self.tree.doc != Some(doc)).then_some(doc)
    }

    /// Returns true for Rust's `//!`.
    fn is_file_doc(&self, row: usize) -> bool {
        let line = self.text.split(|byte| *byte == b'\n').nth(row).unwrap_or_default();
        line.trim_ascii_start().starts_with(b"//!")
    }

    /// Records an identifier.
    pub(crate) fn occur(&mut self, node: Node<'t>, mode: Mode) {
        if let Some(index) = self.ahead.iter().position(|start| *start == node.start_byte()) {
            self.ahead.swap_remove(index);
            return;
        }
        let bytes = &self.text[node.byte_range()];
        let kind = match mode {
            Mode::As(kind) => kind,
            Mode::Bind if bytes.first().is_some_and(u8::is_ascii_uppercase) => Use::Read,
            Mode::Bind => Use::Write,
            Mode::Guess if matches!(self.text.get(node.end_byte()), Some(b'(' | b'!')) => Use::Call,
            Mode::Guess => Use::Read,
            Mode::No | Mode::Same => return,
        };
        // A placeholder or an argument of a shell function is no name.
        if bytes.len() > NAME_BYTES_MAX
            || bytes == b"_"
            || bytes == b"."
            || bytes.first().is_none_or(u8::is_ascii_digit)
        {
            return;
        }
        let names = &mut self.tree.names;
        let name = *self.numbers.entry(bytes).or_insert_with(|| {
            names.push(String::from_utf8_lossy(bytes).into());
            names.len() as u32 - 1
        });
        let (line, column) = self.place(node);
        let member = self.follows_member_mark(node.start_byte());
        let within = self.scopes.iter().rev().find_map(|scope| scope.definition);
        self.tree.occurrences.push(Occurrence { name, line, column, kind, member, within });
    }

    /// Returns true if the text before this place ends with `.`, `->` or `::`.
    fn follows_member_mark(&self, start: usize) -> bool {
        let before = &self.text[start.saturating_sub(2)..start];
        (before.ends_with(b".") && before != b"..") || before.ends_with(b"->") || before.ends_with(b"::")
    }

    /// Returns the line and the column of a node's beginning.
    fn place(&mut self, node: Node<'_>) -> (u32, u32) {
        let (start, point) = (node.start_byte(), node.start_position());
        let line_start = start.saturating_sub(point.column);
        let mark = &mut self.column;
        if mark.line_start != line_start || mark.at > start {
            *mark = ColumnMark { line_start, at: line_start, column: 1 };
        }
        let letters = self.text[mark.at..start].iter().filter(|byte| **byte & 0xc0 != 0x80).count();
        *mark = ColumnMark { line_start, at: start, column: mark.column + letters as u32 };
        (point.row as u32 + 1, mark.column)
    }

    /// Returns the text of a node, with invalid UTF-8 replaced.
    pub(crate) fn text_of(&self, node: Node<'_>) -> String {
        String::from_utf8_lossy(&self.text[node.byte_range()]).into_owned()
    }

    /// Returns the innermost scope.
    pub(crate) fn scope(&self) -> &Scope {
        self.scopes.last().expect("the scope of the file is never left")
    }

    /// Returns the innermost scope, to change it.
    pub(crate) fn scope_mut(&mut self) -> &mut Scope {
        self.scopes.last_mut().expect("the scope of the file is never left")
    }

    /// Returns the definition around this place.
    pub(crate) fn around(&self) -> Option<&Definition> {
        self.scope().definition.map(|index| &self.tree.definitions[index as usize])
    }

    /// Records a definition whose scope is the node, and enters it.
    pub(crate) fn define(&mut self, node: Node<'t>, name: Node<'t>, kind: Kind) {
        let in_type = self.scope().kind == ScopeKind::Type;
        let kind = if kind == Kind::Function && in_type { Kind::Method } else { kind };
        let Some(index) = self.add(node, name, kind) else { return };
        let scope = match kind {
            Kind::Function | Kind::Method | Kind::Macro => ScopeKind::Function,
            Kind::Class | Kind::Struct | Kind::Enum | Kind::Trait => ScopeKind::Type,
            Kind::Module => ScopeKind::Module,
            _ => ScopeKind::Value,
        };
        let own = &self.tree.definitions[index as usize];
        let container = match &own.container {
            Some(container) => format!("{container}{}{}", self.language.separator(), own.name),
            None => own.name.to_string(),
        };
        self.scopes.push(Scope::new(self.depth, scope, Some(index), Some(container.into())));
    }

    /// Records a definition that has no scope of its own.
    pub(crate) fn add(&mut self, node: Node<'t>, name: Node<'t>, kind: Kind) -> Option<u32> {
        let bytes = &self.text[name.byte_range()];
        if bytes.is_empty() || bytes.len() > NAME_BYTES_MAX || name.is_missing() {
            return None;
        }
        let text = String::from_utf8_lossy(bytes).into_owned();
        let (first, end) = self.signature_range(node);
        let signature = shortened(&self.text[first.start_byte()..end.max(first.start_byte())], kind);
        let doc = self.take_doc(node.start_position().row);
        let visibility = (self.rules.visibility)(self, node, &text);
        let (line, column) = self.place(name);
        let scope = self.scope();
        let definition = Definition {
            name: text.into(),
            kind,
            container: scope.container.clone(),
            parent: self.scopes.iter().rev().find_map(|scope| scope.definition),
            line,
            column,
            start_line: first.start_position().row as u32 + 1,
            end_line: last_row(node) as u32 + 1,
            signature,
            visibility,
            doc,
            declared: false,
        };
        self.ahead.push(name.start_byte());
        self.tree.definitions.push(definition);
        Some(self.tree.definitions.len() as u32 - 1)
    }

    /// Records a variable or field the first time it is assigned in the innermost scope. Returns false for later ones.
    pub(crate) fn add_once(&mut self, node: Node<'t>, name: Node<'t>, kind: Kind) -> bool {
        let text: Box<str> = self.text_of(name).into();
        self.scope_mut().seen.insert(text) && self.add(node, name, kind).is_some()
    }

    /// Records a field that a method assigns through its own object, the first time in the class.
    pub(crate) fn add_to_class(&mut self, node: Node<'t>, name: Node<'t>) {
        let Some(depth) = self.scopes.iter().rposition(|scope| scope.kind == ScopeKind::Type) else { return };
        let text: Box<str> = self.text_of(name).into();
        if !self.scopes[depth].seen.insert(text) {
            return;
        }
        let inner = self.scopes.split_off(depth + 1);
        self.add(node, name, Kind::Field);
        // The assignment is a reference as well.
        self.ahead.pop();
        self.scopes.extend(inner);
    }

    /// Enters a block that holds members of a type that is defined elsewhere.
    pub(crate) fn enter_block(&mut self, container: String) {
        let outer = self.scope().container.clone();
        let container = match outer {
            Some(outer) => format!("{outer}{}{container}", self.language.separator()),
            None => container,
        };
        self.scopes.push(Scope::new(self.depth, ScopeKind::Type, None, Some(container.into())));
    }

    /// Ends the signature of the last definition, which is this node, at this byte.
    pub(crate) fn end_signature(&mut self, node: Node<'t>, end: usize) {
        let text = self.text.get(node.start_byte()..end).unwrap_or_default();
        if let Some(definition) = self.tree.definitions.last_mut() {
            definition.signature = shortened(text, definition.kind);
        }
    }

    /// Returns the last definition, to correct it.
    pub(crate) fn last_definition(&mut self) -> Option<&mut Definition> {
        self.tree.definitions.last_mut()
    }

    /// Records the documentation of the file.
    pub(crate) fn document_file(&mut self, node: Node<'_>) {
        self.tree.doc = Some((node.start_position().row as u32 + 1, node.end_position().row as u32 + 1));
    }

    /// Records an import.
    pub(crate) fn import(&mut self, local: &str, module: &str, original: &str, reexport: bool, at: Node<'_>) {
        if local.len().max(module.len()).max(original.len()) > 4 * NAME_BYTES_MAX {
            return;
        }
        self.tree.imports.push(Import {
            local: local.into(),
            module: module.into(),
            original: original.into(),
            reexport,
            line: at.start_position().row as u32 + 1,
        });
    }

    /// Returns the node at which a signature begins, and the byte where it ends.
    fn signature_range(&self, node: Node<'t>) -> (Node<'t>, usize) {
        let mut cursor = node.walk();
        let (mut first, mut end) = (None, node.end_byte());
        for child in node.children(&mut cursor) {
            let rule = self.rules.node(child.kind_id());
            if first.is_none() && !rule.is_some_and(|rule| rule.attribute || rule.comment) {
                first = Some(self.after_annotations(child));
            }
            if rule.is_some_and(|rule| rule.body) {
                end = end.min(child.start_byte());
                break;
            }
        }
        // The fields of a tuple struct belong to its signature.
        let body = node.child_by_field_name("body").filter(|body| body.kind() != "ordered_field_declaration_list");
        if let Some(body) = body {
            end = end.min(body.start_byte());
        }
        (first.unwrap_or(node), end)
    }

    /// Returns the first modifier that is no annotation. Java has both in one node.
    fn after_annotations(&self, node: Node<'t>) -> Node<'t> {
        if node.kind() != "modifiers" {
            return node;
        }
        let mut cursor = node.walk();
        let plain = node
            .children(&mut cursor)
            .find(|child| !self.rules.node(child.kind_id()).is_some_and(|rule| rule.attribute || rule.comment));
        plain.or_else(|| node.next_sibling()).unwrap_or(node)
    }
}

/// Returns the last row of a node. Some grammars count the line break after it.
fn last_row(node: Node<'_>) -> usize {
    let end = node.end_position();
    if end.column == 0 && end.row > node.start_position().row { end.row - 1 } else { end.row }
}

/// Returns the text in one line, without what opens a body, and cut if it is long.
fn shortened(bytes: &[u8], kind: Kind) -> Box<str> {
    let bytes_max = match kind {
        Kind::Const | Kind::Variable | Kind::Field | Kind::Variant => VALUE_BYTES_MAX,
        _ => SIGNATURE_BYTES_MAX,
    };
    let cut = &bytes[..bytes.len().min(2 * bytes_max)];
    let text = String::from_utf8_lossy(cut);
    let mut line = String::new();
    for word in text.split_whitespace() {
        let tight = line.is_empty() || line.ends_with(['(', '[']) || word.starts_with([')', ']']);
        if !tight {
            line.push(' ');
        }
        line.push_str(word);
    }
    // A list of arguments over several lines ends with a comma.
    let mut line = line.replace(",)", ")");
    if line.len() > bytes_max || cut.len() < bytes.len() {
        let end = line.floor_char_boundary(bytes_max);
        line.truncate(end);
        line.push('…');
        return line.into();
    }
    let end = line.trim_end_matches(|letter: char| letter.is_whitespace() || matches!(letter, '{' | ';' | ',')).len();
    line.truncate(end);
    if line.ends_with(':') && !line.ends_with("::") {
        line.pop();
    }
    line.truncate(line.trim_end_matches(" =>").trim_end_matches(" =").len());
    line.into()
}
