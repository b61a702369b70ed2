//! Java.

use tree_sitter::Node;

use crate::code::rules::{CALL, IMPORT, INHERIT, Mode, READ, TYPE, Table, WRITE};
use crate::code::tree::{Kind, Visibility};
use crate::code::walker::Walker;

pub(super) static TABLE: Table = Table {
    shared: false,
    names: &[("identifier", READ), ("type_identifier", TYPE)],
    modes: &[
        ("method_invocation", "object", READ),
        ("method_invocation", "name", CALL),
        ("object_creation_expression", "type", CALL),
        ("field_access", "object", READ),
        ("field_access", "field", Mode::Same),
        ("generic_type", "", Mode::Same),
        ("type_arguments", "", TYPE),
        ("superclass", "", INHERIT),
        ("super_interfaces", "", INHERIT),
        ("extends_interfaces", "", INHERIT),
        ("formal_parameter", "name", Mode::No),
        ("spread_parameter", "", Mode::No),
        ("catch_formal_parameter", "name", Mode::No),
        ("inferred_parameters", "", Mode::No),
        ("lambda_expression", "parameters", Mode::No),
        ("type_parameter", "", Mode::No),
        ("type_bound", "", TYPE),
        ("variable_declarator", "name", Mode::Same),
        ("variable_declarator", "value", READ),
        ("local_variable_declaration", "declarator", WRITE),
        ("field_declaration", "declarator", WRITE),
        ("enhanced_for_statement", "name", WRITE),
        ("resource", "name", WRITE),
        ("assignment_expression", "left", WRITE),
        ("update_expression", "", WRITE),
        ("import_declaration", "", IMPORT),
        ("package_declaration", "", Mode::No),
        ("annotation", "name", READ),
        ("marker_annotation", "name", READ),
        ("element_value_pair", "key", Mode::No),
        ("labeled_statement", "", READ),
        ("break_statement", "", Mode::No),
        ("continue_statement", "", Mode::No),
        ("class_body", "", READ),
    ],
    definitions: &[
        ("class_declaration", Kind::Class),
        ("record_declaration", Kind::Class),
        ("interface_declaration", Kind::Trait),
        ("annotation_type_declaration", Kind::Trait),
        ("annotation_type_element_declaration", Kind::Method),
        ("enum_declaration", Kind::Enum),
        ("enum_constant", Kind::Variant),
        ("method_declaration", Kind::Method),
        ("constructor_declaration", Kind::Method),
        ("compact_constructor_declaration", Kind::Method),
    ],
    hooks: &[
        ("field_declaration", fields),
        ("constant_declaration", fields),
        ("import_declaration", import),
        ("record_declaration", components),
    ],
    comments: &["line_comment", "block_comment"],
    attributes: &["annotation", "marker_annotation"],
    bodies: &["class_body", "interface_body", "enum_body", "annotation_type_body", "block", "constructor_body"],
    visibility,
};

fn visibility(walker: &Walker<'_>, node: Node<'_>, _: &str) -> Visibility {
    let mut cursor = node.walk();
    let modifiers = node.children(&mut cursor).find(|child| child.kind() == "modifiers");
    let words: Vec<String> = modifiers.map_or(Vec::new(), |modifiers| {
        let mut cursor = modifiers.walk();
        modifiers.children(&mut cursor).filter(|word| !word.is_named()).map(|word| walker.text_of(word)).collect()
    });
    let has = |wanted: &str| words.iter().any(|word| word == wanted);
    if has("public") || node.kind() == "enum_constant" {
        Visibility::Public
    } else if has("private") {
        Visibility::Private
    } else if walker.around().is_some_and(|around| around.kind == Kind::Trait) {
        Visibility::Public
    } else {
        Visibility::Internal
    }
}

fn fields<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let mut cursor = node.walk();
    let constant = node.kind() == "constant_declaration" || {
        let mut cursor = node.walk();
        let modifiers = node.children(&mut cursor).find(|child| child.kind() == "modifiers");
        let text = modifiers.map(|modifiers| walker.text_of(modifiers)).unwrap_or_default();
        text.contains("static") && text.contains("final")
    };
    for declarator in node.children_by_field_name("declarator", &mut cursor) {
        if let Some(name) = declarator.child_by_field_name("name") {
            walker.add(node, name, if constant { Kind::Const } else { Kind::Field });
        }
    }
}

/// Records the components of a record: they are its fields.
fn components<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(list) = node.child_by_field_name("parameters") else { return };
    let mut cursor = list.walk();
    for part in list.named_children(&mut cursor).filter(|part| part.kind() == "formal_parameter") {
        if let Some(name) = part.child_by_field_name("name") {
            walker.add(part, name, Kind::Field);
        }
    }
}

fn import<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let mut cursor = node.walk();
    let (mut path, mut all) = (String::new(), false);
    for child in node.named_children(&mut cursor) {
        match child.kind() {
            "scoped_identifier" | "identifier" => path = walker.text_of(child),
            "asterisk" => all = true,
            _ => {}
        }
    }
    if all {
        walker.import("*", &path, "*", false, node);
    } else if let Some((module, name)) = path.rsplit_once('.') {
        walker.import(name, module, name, false, node);
    }
}
