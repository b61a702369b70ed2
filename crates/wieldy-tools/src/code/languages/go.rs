//! Go.

use tree_sitter::Node;

use crate::code::rules::{CALL, IMPORT, Mode, READ, TYPE, Table, WRITE};
use crate::code::tree::{Kind, Visibility};
use crate::code::walker::{ScopeKind, Walker};

pub(super) static TABLE: Table = Table {
    shared: false,
    names: &[("identifier", READ), ("field_identifier", READ), ("type_identifier", TYPE), ("package_identifier", READ)],
    modes: &[
        ("call_expression", "function", CALL),
        ("call_expression", "type_arguments", TYPE),
        ("selector_expression", "operand", READ),
        ("selector_expression", "field", Mode::Same),
        ("qualified_type", "package", READ),
        ("qualified_type", "name", Mode::Same),
        ("generic_type", "type", Mode::Same),
        ("generic_type", "type_arguments", TYPE),
        ("parameter_declaration", "name", Mode::No),
        ("parameter_declaration", "type", TYPE),
        ("variadic_parameter_declaration", "name", Mode::No),
        ("variadic_parameter_declaration", "type", TYPE),
        ("type_parameter_declaration", "name", Mode::No),
        ("type_parameter_declaration", "type", TYPE),
        ("short_var_declaration", "left", WRITE),
        ("assignment_statement", "left", WRITE),
        ("inc_statement", "", WRITE),
        ("dec_statement", "", WRITE),
        ("range_clause", "left", WRITE),
        ("expression_list", "", Mode::Same),
        ("var_spec", "name", WRITE),
        ("var_spec", "type", TYPE),
        ("const_spec", "name", WRITE),
        ("const_spec", "type", TYPE),
        ("field_declaration", "type", TYPE),
        ("composite_literal", "type", TYPE),
        ("import_spec", "name", Mode::No),
        ("import_declaration", "", IMPORT),
        ("package_clause", "", Mode::No),
    ],
    definitions: &[("function_declaration", Kind::Function), ("method_elem", Kind::Method)],
    hooks: &[
        ("method_declaration", method),
        ("type_spec", type_spec),
        ("type_alias", type_spec),
        ("const_spec", const_spec),
        ("var_spec", var_spec),
        ("field_declaration", fields),
        ("import_spec", import),
    ],
    comments: &["comment"],
    attributes: &[],
    bodies: &["block", "field_declaration_list", "method_elem"],
    visibility,
};

fn visibility(_: &Walker<'_>, _: Node<'_>, name: &str) -> Visibility {
    if name.starts_with(char::is_uppercase) { Visibility::Public } else { Visibility::Internal }
}

fn method<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(name) = node.child_by_field_name("name") else { return };
    let receiver = node.child_by_field_name("receiver").map(|receiver| walker.text_of(receiver));
    walker.define(node, name, Kind::Method);
    // `(s *Server[T])` → `Server`
    let text = receiver.unwrap_or_default();
    let text = text.trim_matches(['(', ')', ' ']).split('[').next().unwrap_or_default();
    let owner = text.rsplit([' ', '*']).next().filter(|owner| !owner.is_empty() && owner.len() < 200);
    if let Some(definition) = walker.last_definition() {
        definition.container = owner.map(Into::into);
    }
}

fn type_spec<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let (Some(name), Some(of)) = (node.child_by_field_name("name"), node.child_by_field_name("type")) else { return };
    let kind = match of.kind() {
        "struct_type" => Kind::Struct,
        "interface_type" => Kind::Trait,
        _ => Kind::Type,
    };
    walker.define(node, name, kind);
    match of.kind() {
        "struct_type" => walker.end_signature(node, of.start_byte() + "struct".len()),
        "interface_type" => walker.end_signature(node, of.start_byte() + "interface".len()),
        _ => {}
    }
    if let Some(definition) = walker.last_definition()
        && !definition.signature.starts_with("type ")
    {
        definition.signature = format!("type {}", definition.signature).into();
    }
}

fn const_spec<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    names(walker, node, Kind::Const);
}

fn var_spec<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    names(walker, node, Kind::Variable);
}

/// Records the names of the package.
fn names<'t>(walker: &mut Walker<'t>, node: Node<'t>, kind: Kind) {
    if walker.scope().kind != ScopeKind::Module {
        return;
    }
    let mut cursor = node.walk();
    for name in node.children_by_field_name("name", &mut cursor) {
        if name.kind() == "identifier" && walker.text_of(name) != "_" {
            walker.add(node, name, kind);
        }
    }
}

fn fields<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let mut cursor = node.walk();
    for name in node.children_by_field_name("name", &mut cursor) {
        walker.add(node, name, Kind::Field);
    }
}

fn import<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(path) = node.child_by_field_name("path").map(|path| walker.text_of(path)) else { return };
    let path = path.trim_matches(['"', '`']);
    let name = node.child_by_field_name("name").map(|name| walker.text_of(name));
    match name.as_deref() {
        Some("_") => {}
        Some(".") => walker.import("*", path, "*", false, node),
        Some(name) => walker.import(name, path, "", false, node),
        None => {
            // The last part is the package's name by custom; a version number is none.
            let mut parts = path.rsplit('/');
            let last = parts.next().unwrap_or(path);
            let version = last.strip_prefix('v').is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()));
            let local = if version { parts.next().unwrap_or(last) } else { last };
            walker.import(local, path, "", false, node);
        }
    }
}
