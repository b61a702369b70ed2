//! PHP.

use tree_sitter::Node;

use crate::code::rules::{CALL, IMPORT, INHERIT, Mode, READ, TYPE, Table, WRITE};
use crate::code::tree::{Kind, Visibility};
use crate::code::walker::Walker;

pub(super) static TABLE: Table = Table {
    shared: false,
    names: &[("name", READ)],
    modes: &[
        ("function_call_expression", "function", CALL),
        ("member_call_expression", "object", READ),
        ("member_call_expression", "name", CALL),
        ("nullsafe_member_call_expression", "object", READ),
        ("nullsafe_member_call_expression", "name", CALL),
        ("scoped_call_expression", "scope", READ),
        ("scoped_call_expression", "name", CALL),
        ("object_creation_expression", "", CALL),
        ("arguments", "", READ),
        ("argument", "name", Mode::No),
        ("argument", "", READ),
        ("member_access_expression", "object", READ),
        ("member_access_expression", "name", Mode::Same),
        ("scoped_property_access_expression", "scope", READ),
        ("class_constant_access_expression", "", READ),
        ("qualified_name", "", Mode::Same),
        ("variable_name", "", Mode::Same),
        ("named_type", "", TYPE),
        ("base_clause", "", INHERIT),
        ("class_interface_clause", "", INHERIT),
        ("use_declaration", "", INHERIT),
        ("simple_parameter", "name", Mode::No),
        ("simple_parameter", "type", TYPE),
        ("simple_parameter", "default_value", READ),
        ("variadic_parameter", "name", Mode::No),
        ("property_promotion_parameter", "type", TYPE),
        ("assignment_expression", "left", WRITE),
        ("augmented_assignment_expression", "left", WRITE),
        ("update_expression", "argument", WRITE),
        ("namespace_use_declaration", "", IMPORT),
        ("namespace_use_clause", "alias", Mode::No),
        ("namespace_name", "", Mode::Same),
        ("namespace_definition", "name", Mode::No),
    ],
    definitions: &[
        ("class_declaration", Kind::Class),
        ("interface_declaration", Kind::Trait),
        ("trait_declaration", Kind::Trait),
        ("enum_declaration", Kind::Enum),
        ("enum_case", Kind::Variant),
        ("function_definition", Kind::Function),
        ("method_declaration", Kind::Method),
    ],
    hooks: &[
        ("property_element", property),
        ("property_promotion_parameter", property),
        ("const_element", constant),
        ("namespace_use_declaration", uses),
    ],
    comments: &["comment"],
    attributes: &["attribute_list"],
    bodies: &["declaration_list", "enum_declaration_list", "compound_statement"],
    visibility,
};

fn visibility(walker: &Walker<'_>, node: Node<'_>, _: &str) -> Visibility {
    // The modifiers of a property or constant stand in the declaration around its element.
    let node = match node.kind() {
        "property_element" | "const_element" => node.parent().unwrap_or(node),
        _ => node,
    };
    let mut cursor = node.walk();
    let modifier = node.children(&mut cursor).take(16).find(|child| child.kind() == "visibility_modifier");
    match modifier.map(|modifier| walker.text_of(modifier)).as_deref() {
        Some("private") => Visibility::Private,
        Some("protected") => Visibility::Internal,
        _ => Visibility::Public,
    }
}

fn property<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(variable) = node.child_by_field_name("name") else { return };
    let name = variable.named_child(0).filter(|_| variable.kind() == "variable_name").unwrap_or(variable);
    walker.add(node.parent().filter(|_| node.kind() == "property_element").unwrap_or(node), name, Kind::Field);
    // A parameter of the constructor that is a property belongs to the class.
    if node.kind() == "property_promotion_parameter"
        && let Some(definition) = walker.last_definition()
        && let Some((class, _)) = definition.container.as_deref().and_then(|path| path.rsplit_once("::"))
    {
        definition.container = Some(class.into());
    }
}

fn constant<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    if let Some(name) = node.named_child(0).filter(|name| name.kind() == "name") {
        walker.add(node.parent().unwrap_or(node), name, Kind::Const);
    }
}

fn uses<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let mut cursor = node.walk();
    let mut prefix = String::new();
    let mut todo: Vec<Node<'t>> = node.named_children(&mut cursor).collect();
    todo.reverse();
    while let Some(child) = todo.pop() {
        match child.kind() {
            "namespace_name" => prefix = format!("{}\\", walker.text_of(child)),
            "namespace_use_group" => {
                let mut cursor = child.walk();
                todo.extend(child.named_children(&mut cursor).collect::<Vec<_>>().into_iter().rev());
            }
            "namespace_use_clause" => {
                let Some(path) = child.named_child(0).map(|path| format!("{prefix}{}", walker.text_of(path))) else {
                    continue;
                };
                let alias = child.child_by_field_name("alias").map(|alias| walker.text_of(alias));
                let path = path.trim_start_matches('\\');
                let (module, name) = path.rsplit_once('\\').unwrap_or(("", path));
                walker.import(alias.as_deref().unwrap_or(name), module, name, false, child);
            }
            _ => {}
        }
    }
}
