//! Ruby.

use tree_sitter::Node;

use crate::code::rules::{CALL, INHERIT, Mode, READ, Table, WRITE};
use crate::code::tree::{Kind, Visibility};
use crate::code::walker::{ScopeKind, Walker};

pub(super) static TABLE: Table = Table {
    shared: false,
    names: &[("identifier", READ), ("constant", READ)],
    modes: &[
        ("call", "receiver", READ),
        ("call", "method", CALL),
        ("call", "arguments", READ),
        ("scope_resolution", "scope", READ),
        ("scope_resolution", "name", Mode::Same),
        ("superclass", "", INHERIT),
        ("method_parameters", "", Mode::No),
        ("block_parameters", "", Mode::No),
        ("lambda_parameters", "", Mode::No),
        ("optional_parameter", "name", Mode::No),
        ("optional_parameter", "value", READ),
        ("keyword_parameter", "name", Mode::No),
        ("keyword_parameter", "value", READ),
        ("assignment", "left", WRITE),
        ("operator_assignment", "left", WRITE),
        ("left_assignment_list", "", WRITE),
        ("for", "pattern", WRITE),
        ("exception_variable", "", WRITE),
        ("undef", "", READ),
    ],
    definitions: &[("module", Kind::Module), ("class", Kind::Class)],
    hooks: &[
        ("method", method),
        ("singleton_method", method),
        ("assignment", assignment),
        ("call", call),
        ("identifier", word),
    ],
    comments: &["comment"],
    attributes: &[],
    bodies: &["body_statement"],
    visibility: |walker, _, _| walker.scope().visibility.unwrap_or(Visibility::Public),
};

fn method<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(name) = node.child_by_field_name("name") else { return };
    let in_type = walker.around().is_some_and(|around| matches!(around.kind, Kind::Class | Kind::Module));
    walker.define(node, name, if in_type { Kind::Method } else { Kind::Function });
}

/// Records constants.
fn assignment<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let at_top = matches!(walker.scope().kind, ScopeKind::Module | ScopeKind::Type);
    if let Some(name) = node.child_by_field_name("left").filter(|name| name.kind() == "constant" && at_top) {
        walker.add_once(node, name, Kind::Const);
    }
}

/// Records what calls in a class body declare: attributes, required files, included modules.
fn call<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let (Some(method), None) = (node.child_by_field_name("method"), node.child_by_field_name("receiver")) else {
        return;
    };
    let Some(arguments) = node.child_by_field_name("arguments") else { return };
    let method = walker.text_of(method);
    let mut cursor = arguments.walk();
    let given: Vec<_> = arguments.named_children(&mut cursor).take(200).collect();
    match method.as_str() {
        "require" | "require_relative" | "load" => {
            if let Some(text) = given.first().filter(|text| text.kind() == "string") {
                let path = walker.text_of(*text);
                let path = path.trim_matches(['"', '\'']).to_owned();
                let path = if method == "require_relative" { format!("./{path}") } else { path };
                walker.import("*", &path, "*", true, node);
            }
        }
        "attr_accessor" | "attr_reader" | "attr_writer" if walker.scope().kind == ScopeKind::Type => {
            for symbol in given.into_iter().filter(|symbol| symbol.kind() == "simple_symbol") {
                walker.add(node, symbol, Kind::Field);
                if let Some(definition) = walker.last_definition() {
                    definition.name = definition.name.trim_start_matches(':').into();
                    definition.column += 1;
                }
            }
        }
        _ => {}
    }
}

/// Follows `private` and its like, which count for all that comes after.
fn word<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    if walker.scope().kind != ScopeKind::Type {
        return;
    }
    let visibility = match walker.text.get(node.byte_range()).unwrap_or_default() {
        b"private" => Visibility::Private,
        b"protected" => Visibility::Internal,
        b"public" => Visibility::Public,
        _ => return,
    };
    if node.parent().is_some_and(|outer| outer.kind() == "body_statement") {
        walker.scope_mut().visibility = Some(visibility);
    }
}
