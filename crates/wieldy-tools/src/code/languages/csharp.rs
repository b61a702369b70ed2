//! C#.

use tree_sitter::Node;

use crate::code::rules::{CALL, IMPORT, INHERIT, Mode, READ, TYPE, Table, WRITE};
use crate::code::tree::{Kind, Visibility};
use crate::code::walker::{ScopeKind, Walker};

pub(super) static TABLE: Table = Table {
    shared: false,
    names: &[("identifier", READ)],
    modes: &[
        ("invocation_expression", "function", CALL),
        ("member_access_expression", "expression", READ),
        ("member_access_expression", "name", Mode::Same),
        ("member_binding_expression", "name", Mode::Same),
        ("object_creation_expression", "type", CALL),
        ("generic_name", "", Mode::Same),
        ("type_argument_list", "", TYPE),
        ("qualified_name", "qualifier", Mode::Same),
        ("qualified_name", "name", Mode::Same),
        ("base_list", "", INHERIT),
        ("argument_list", "", READ),
        ("argument", "name", Mode::No),
        ("parameter", "name", Mode::No),
        ("parameter", "type", TYPE),
        ("parameter_list", "name", Mode::No),
        ("parameter_list", "type", TYPE),
        ("implicit_parameter", "", Mode::No),
        ("type_parameter", "name", Mode::No),
        ("variable_declaration", "type", TYPE),
        ("variable_declarator", "name", WRITE),
        ("variable_declarator", "", READ),
        ("method_declaration", "returns", TYPE),
        ("local_function_statement", "type", TYPE),
        ("property_declaration", "type", TYPE),
        ("cast_expression", "type", TYPE),
        ("foreach_statement", "left", WRITE),
        ("foreach_statement", "type", TYPE),
        ("catch_declaration", "type", TYPE),
        ("catch_declaration", "name", WRITE),
        ("declaration_expression", "name", WRITE),
        ("declaration_expression", "type", TYPE),
        ("declaration_pattern", "name", WRITE),
        ("declaration_pattern", "type", TYPE),
        ("assignment_expression", "left", WRITE),
        ("using_directive", "", IMPORT),
        ("using_directive", "name", Mode::No),
        ("namespace_declaration", "name", Mode::No),
        ("file_scoped_namespace_declaration", "name", Mode::No),
        ("nullable_type", "", Mode::Same),
        ("array_type", "", Mode::Same),
        ("attribute", "name", READ),
    ],
    definitions: &[
        ("class_declaration", Kind::Class),
        ("record_declaration", Kind::Class),
        ("struct_declaration", Kind::Struct),
        ("interface_declaration", Kind::Trait),
        ("enum_declaration", Kind::Enum),
        ("enum_member_declaration", Kind::Variant),
        ("delegate_declaration", Kind::Type),
        ("method_declaration", Kind::Method),
        ("constructor_declaration", Kind::Method),
        ("destructor_declaration", Kind::Method),
        ("local_function_statement", Kind::Function),
        ("property_declaration", Kind::Field),
        ("event_declaration", Kind::Field),
    ],
    hooks: &[("variable_declarator", field), ("using_directive", using), ("record_declaration", components)],
    comments: &["comment"],
    attributes: &["attribute_list"],
    bodies: &["declaration_list", "enum_member_declaration_list", "block", "accessor_list", "arrow_expression_clause"],
    visibility,
};

fn visibility(walker: &Walker<'_>, node: Node<'_>, _: &str) -> Visibility {
    let mut cursor = node.walk();
    let modifiers = node.children(&mut cursor).filter(|child| child.kind() == "modifier").take(16);
    let words: Vec<String> = modifiers.map(|modifier| walker.text_of(modifier)).collect();
    let has = |wanted: &str| words.iter().any(|word| word == wanted);
    if has("public") || node.kind() == "enum_member_declaration" {
        Visibility::Public
    } else if has("private") {
        Visibility::Private
    } else if has("internal") || has("protected") {
        Visibility::Internal
    } else {
        match walker.around().map(|around| around.kind) {
            Some(Kind::Trait) => Visibility::Public,
            Some(Kind::Class | Kind::Struct) => Visibility::Private,
            _ => Visibility::Internal,
        }
    }
}

/// Records the fields and constants of a type; other declarators are variables of a function.
fn field<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(name) = node.child_by_field_name("name").filter(|_| walker.scope().kind == ScopeKind::Type) else {
        return;
    };
    let outer = node.parent().and_then(|list| list.parent());
    let Some(outer) = outer.filter(|outer| matches!(outer.kind(), "field_declaration" | "event_field_declaration"))
    else {
        return;
    };
    let mut cursor = outer.walk();
    let is_const = outer
        .children(&mut cursor)
        .any(|child| child.kind() == "modifier" && matches!(walker.text_of(child).as_str(), "const"));
    walker.add(outer, name, if is_const { Kind::Const } else { Kind::Field });
}

/// Records the parameters of a record: they are its properties.
fn components<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let mut cursor = node.walk();
    let Some(list) = node.named_children(&mut cursor).find(|child| child.kind() == "parameter_list") else { return };
    let mut cursor = list.walk();
    for part in list.named_children(&mut cursor).filter(|part| part.kind() == "parameter") {
        if let Some(name) = part.child_by_field_name("name")
            && walker.add(part, name, Kind::Field).is_some()
            && let Some(definition) = walker.last_definition()
        {
            definition.visibility = Visibility::Public;
        }
    }
}

fn using<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let alias = node.child_by_field_name("name");
    let mut cursor = node.walk();
    let path =
        node.named_children(&mut cursor).filter(|child| Some(child.id()) != alias.map(|alias| alias.id())).last();
    let Some(path) = path.map(|path| walker.text_of(path)) else { return };
    match alias.map(|alias| walker.text_of(alias)) {
        Some(alias) => {
            let (module, name) = path.rsplit_once('.').unwrap_or(("", &path));
            walker.import(&alias, module, name, false, node);
        }
        None => walker.import("*", &path, "*", false, node),
    }
}
