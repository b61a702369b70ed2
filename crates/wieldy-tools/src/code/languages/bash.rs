//! Bash and other shells.

use tree_sitter::Node;

use crate::code::rules::{CALL, READ, Table, WRITE};
use crate::code::tree::{Kind, Visibility};
use crate::code::walker::{ScopeKind, Walker};

pub(super) static TABLE: Table = Table {
    shared: false,
    names: &[("variable_name", READ)],
    modes: &[
        ("for_statement", "variable", WRITE),
        ("variable_assignment", "name", WRITE),
        ("variable_assignment", "value", READ),
    ],
    definitions: &[("function_definition", Kind::Function)],
    hooks: &[("command_name", command_name), ("variable_assignment", assignment), ("command", command)],
    comments: &["comment"],
    attributes: &[],
    bodies: &["compound_statement"],
    visibility: |_, _, _| Visibility::Public,
};

/// Records the name of a command, if it is one plain word.
fn command_name<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    if let Some(word) = node.named_child(0).filter(|word| word.kind() == "word") {
        walker.occur(word, CALL);
    }
}

/// Records the variables of the script.
fn assignment<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(name) = node.child_by_field_name("name") else { return };
    if walker.scope().kind == ScopeKind::Module && name.kind() == "variable_name" {
        walker.add_once(node, name, Kind::Variable);
    }
}

fn command<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(name) = node.child_by_field_name("name").map(|name| walker.text_of(name)) else { return };
    if name != "source" && name != "." {
        return;
    }
    if let Some(path) = node.child_by_field_name("argument").map(|path| walker.text_of(path)) {
        walker.import("*", path.trim_matches(['"', '\'']), "*", true, node);
    }
}
