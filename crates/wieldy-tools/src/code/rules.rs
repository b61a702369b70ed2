//! [`Rules`]: a language's grammar, and the meaning of its nodes.
//!
//! Each language describes its nodes in a [`Table`] by names. [`Rules`] is the same by numbers, made once, so that a
//! walk looks nothing up by name.

use tree_sitter::Node;

use super::tree::{Kind, Use, Visibility};
use super::walker::Walker;

/// The meaning of an identifier at some place of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// A reference of this kind.
    As(Use),
    /// A name that a pattern binds, unless it begins with a capital letter: then it is a constant.
    Bind,
    /// A call if a parenthesis or `!` follows, else a read: an identifier in the arguments of a macro.
    Guess,
    /// Not a reference: a definition's name, a parameter, a label, a keyword argument.
    No,
    /// The same as around the node.
    Same,
}

/// Reads of an identifier.
pub(crate) const READ: Mode = Mode::As(Use::Read);
/// Assignments.
pub(crate) const WRITE: Mode = Mode::As(Use::Write);
/// Calls.
pub(crate) const CALL: Mode = Mode::As(Use::Call);
/// Types.
pub(crate) const TYPE: Mode = Mode::As(Use::Type);
/// Base classes and implemented traits.
pub(crate) const INHERIT: Mode = Mode::As(Use::Inherit);
/// Imports.
pub(crate) const IMPORT: Mode = Mode::As(Use::Import);

/// A function that is called for a node before its children are walked.
pub(crate) type Hook = for<'t> fn(&mut Walker<'t>, Node<'t>);

/// The nodes of a language, by their names.
pub(crate) struct Table {
    /// True if several grammars share the table, so that some of them lack some of the nodes.
    pub(crate) shared: bool,
    /// The leaves that are names, and the kind of reference that a leaf is where nothing around it says more.
    pub(crate) names: &'static [(&'static str, Mode)],
    /// The mode of a node's children: the node, the field (empty: all other children), the mode.
    pub(crate) modes: &'static [(&'static str, &'static str, Mode)],
    /// The nodes that define the name in their field `name`.
    pub(crate) definitions: &'static [(&'static str, Kind)],
    /// The nodes that need a function of their own.
    pub(crate) hooks: &'static [(&'static str, Hook)],
    /// The comments.
    pub(crate) comments: &'static [&'static str],
    /// Attributes and decorators: they stand before a definition and do not belong to its signature.
    pub(crate) attributes: &'static [&'static str],
    /// The bodies of definitions, where a signature ends, in addition to the field `body`.
    pub(crate) bodies: &'static [&'static str],
    /// Returns the visibility of a definition.
    pub(crate) visibility: for<'t> fn(&Walker<'t>, Node<'t>, &str) -> Visibility,
}

/// The nodes of a language, by their numbers.
pub(crate) struct Rules {
    grammar: tree_sitter::Language,
    pub(crate) visibility: for<'t> fn(&Walker<'t>, Node<'t>, &str) -> Visibility,
    nodes: Vec<NodeRule>,
}

/// The rules of one kind of nodes.
#[derive(Default, Clone)]
pub(crate) struct NodeRule {
    pub(crate) name: Option<Mode>,
    pub(crate) definition: Option<Kind>,
    pub(crate) hook: Option<Hook>,
    pub(crate) comment: bool,
    pub(crate) attribute: bool,
    pub(crate) body: bool,
    pub(crate) fields: Vec<(u16, Mode)>,
    pub(crate) others: Option<Mode>,
}

impl Rules {
    /// Translates a table. Names that the grammar does not have are an error of ours.
    pub(crate) fn new(grammar: tree_sitter::Language, table: &Table) -> Self {
        let mut nodes = vec![NodeRule::default(); grammar.node_kind_count()];
        let mut each = |kind: &str, set: &mut dyn FnMut(&mut NodeRule)| {
            // A kind may have several numbers.
            let mut known = false;
            for (id, node) in nodes.iter_mut().enumerate() {
                let id = id as u16;
                if grammar.node_kind_is_named(id) && grammar.node_kind_for_id(id) == Some(kind) {
                    known = true;
                    set(node);
                }
            }
            debug_assert!(known || table.shared, "the grammar has no `{kind}`");
        };
        for (kind, mode) in table.names {
            each(kind, &mut |node| node.name = Some(*mode));
        }
        for (kind, definition) in table.definitions {
            each(kind, &mut |node| node.definition = Some(*definition));
        }
        for (kind, hook) in table.hooks {
            each(kind, &mut |node| node.hook = Some(*hook));
        }
        table.comments.iter().for_each(|kind| each(kind, &mut |node| node.comment = true));
        table.attributes.iter().for_each(|kind| each(kind, &mut |node| node.attribute = true));
        table.bodies.iter().for_each(|kind| each(kind, &mut |node| node.body = true));
        for (kind, field, mode) in table.modes {
            if field.is_empty() {
                each(kind, &mut |node| node.others = Some(*mode));
                continue;
            }
            let field_id = grammar.field_id_for_name(field);
            debug_assert!(field_id.is_some() || table.shared, "the grammar has no field `{field}`");
            let Some(field_id) = field_id else { continue };
            each(kind, &mut |node| node.fields.push((field_id.get(), *mode)));
        }
        Self { grammar, visibility: table.visibility, nodes }
    }

    /// Returns the grammar.
    pub(crate) fn grammar(&self) -> &tree_sitter::Language {
        &self.grammar
    }

    /// Returns the rules of a kind of nodes. `ERROR` has a number beyond the table.
    pub(crate) fn node(&self, kind: u16) -> Option<&NodeRule> {
        self.nodes.get(usize::from(kind))
    }
}

impl NodeRule {
    /// Returns the mode of a child in this field, where the node itself has the mode `around`.
    pub(crate) fn child(&self, field: Option<u16>, around: Mode) -> Mode {
        let own = field.and_then(|field| self.fields.iter().find(|(id, _)| *id == field)).map(|(_, mode)| *mode);
        match own.or(self.others) {
            Some(Mode::Same) => around,
            Some(mode) => mode,
            // These reach all that is inside.
            None if matches!(around, Mode::No | Mode::Bind | TYPE | INHERIT | IMPORT) => around,
            None => READ,
        }
    }
}
