//! JavaScript, TypeScript and TSX.

use tree_sitter::Node;

use crate::code::rules::{CALL, IMPORT, INHERIT, Mode, READ, TYPE, Table, WRITE};
use crate::code::tree::{Kind, Visibility};
use crate::code::walker::{ScopeKind, Walker};

pub(super) static TABLE: Table = Table {
    shared: true,
    names: &[
        ("identifier", READ),
        ("property_identifier", READ),
        ("private_property_identifier", READ),
        ("shorthand_property_identifier", READ),
        ("shorthand_property_identifier_pattern", WRITE),
        ("type_identifier", TYPE),
    ],
    modes: &[
        ("class_heritage", "", INHERIT),
        ("field_definition", "property", Mode::No),
        ("arrow_function", "parameter", Mode::No),
        ("formal_parameters", "", Mode::No),
        ("call_expression", "function", CALL),
        ("call_expression", "arguments", READ),
        ("new_expression", "constructor", CALL),
        ("arguments", "", READ),
        ("member_expression", "object", READ),
        ("member_expression", "property", Mode::Same),
        ("subscript_expression", "", READ),
        ("assignment_expression", "left", WRITE),
        ("augmented_assignment_expression", "left", WRITE),
        ("update_expression", "argument", WRITE),
        ("variable_declarator", "name", WRITE),
        ("object_pattern", "", Mode::Same),
        ("array_pattern", "", Mode::Same),
        ("rest_pattern", "", Mode::Same),
        ("pair_pattern", "key", READ),
        ("pair_pattern", "value", Mode::Same),
        ("assignment_pattern", "left", Mode::Same),
        ("assignment_pattern", "right", READ),
        ("object_assignment_pattern", "left", Mode::Same),
        ("object_assignment_pattern", "right", READ),
        ("for_in_statement", "left", WRITE),
        ("catch_clause", "parameter", WRITE),
        ("catch_clause", "body", READ),
        ("pair", "key", Mode::No),
        ("pair", "value", READ),
        ("import_statement", "", IMPORT),
        ("import_specifier", "name", IMPORT),
        ("import_specifier", "alias", Mode::No),
        ("namespace_import", "", Mode::No),
        ("namespace_export", "", Mode::No),
        ("export_specifier", "name", IMPORT),
        ("export_specifier", "alias", Mode::No),
        ("jsx_opening_element", "name", CALL),
        ("jsx_self_closing_element", "name", CALL),
        ("jsx_closing_element", "", Mode::No),
        ("jsx_attribute", "", Mode::No),
        ("jsx_expression", "", READ),
        ("statement_block", "", READ),
        ("class_body", "", READ),
        ("extends_clause", "", INHERIT),
        ("extends_clause", "type_arguments", TYPE),
        ("implements_clause", "", INHERIT),
        ("extends_type_clause", "", INHERIT),
        ("generic_type", "name", Mode::Same),
        ("generic_type", "type_arguments", TYPE),
        ("nested_type_identifier", "module", READ),
        ("nested_type_identifier", "name", Mode::Same),
        ("type_arguments", "", TYPE),
        ("type_annotation", "", TYPE),
        ("type_parameter", "name", Mode::No),
        ("type_parameter", "constraint", TYPE),
        ("required_parameter", "pattern", Mode::No),
        ("required_parameter", "type", TYPE),
        ("required_parameter", "value", READ),
        ("optional_parameter", "pattern", Mode::No),
        ("optional_parameter", "type", TYPE),
        ("optional_parameter", "value", READ),
        ("type_predicate", "name", READ),
        ("index_signature", "name", Mode::No),
        ("decorator", "", READ),
    ],
    definitions: &[
        ("function_declaration", Kind::Function),
        ("generator_function_declaration", Kind::Function),
        ("function_signature", Kind::Function),
        ("class_declaration", Kind::Class),
        ("abstract_class_declaration", Kind::Class),
        ("method_definition", Kind::Method),
        ("method_signature", Kind::Method),
        ("abstract_method_signature", Kind::Method),
        ("public_field_definition", Kind::Field),
        ("property_signature", Kind::Field),
        ("interface_declaration", Kind::Trait),
        ("type_alias_declaration", Kind::Type),
        ("enum_declaration", Kind::Enum),
        ("enum_assignment", Kind::Variant),
        ("internal_module", Kind::Module),
        ("module", Kind::Module),
    ],
    hooks: &[
        ("variable_declarator", variable),
        ("assignment_expression", assignment),
        ("pair", pair),
        ("import_statement", import),
        ("export_statement", export),
        ("enum_body", variants),
        ("field_definition", field),
    ],
    comments: &["comment"],
    attributes: &["decorator"],
    bodies: &["class_body", "statement_block", "interface_body", "object_type", "enum_body"],
    visibility,
};

/// Returns public for exports and members, internal for other names of the module.
fn visibility(walker: &Walker<'_>, node: Node<'_>, name: &str) -> Visibility {
    if name.starts_with('#') {
        return Visibility::Private;
    }
    let mut cursor = node.walk();
    let modifier = node.children(&mut cursor).take(8).find(|child| child.kind() == "accessibility_modifier");
    match modifier.map(|modifier| walker.text_of(modifier)).as_deref() {
        Some("private") => return Visibility::Private,
        Some("protected") => return Visibility::Internal,
        _ => {}
    }
    let exported = |node: Node<'_>| node.kind() == "export_statement";
    let outer = node.parent();
    let around = [outer, outer.and_then(|outer| outer.parent())];
    let member = walker.scope().kind == ScopeKind::Type || walker.scope().kind == ScopeKind::Value;
    let public =
        member || walker.scope().visibility == Some(Visibility::Public) || around.into_iter().flatten().any(exported);
    if public { Visibility::Public } else { Visibility::Internal }
}

fn kind_of_value(value: Option<Node<'_>>) -> Option<Kind> {
    match value?.kind() {
        "arrow_function" | "function_expression" | "generator_function" => Some(Kind::Function),
        "class" => Some(Kind::Class),
        _ => None,
    }
}

fn variable<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(name) = node.child_by_field_name("name") else { return };
    let value = node.child_by_field_name("value");
    if let Some(module) = value.and_then(|value| required(walker, value)) {
        return require(walker, name, &module, node);
    }
    if name.kind() != "identifier" {
        return;
    }
    let at_top = walker.scope().kind == ScopeKind::Module;
    let kind = match kind_of_value(value) {
        Some(kind) => kind,
        None if !at_top => return,
        None if node.parent().is_some_and(|outer| walker.text_of(outer).starts_with("const")) => Kind::Const,
        None => Kind::Variable,
    };
    define(walker, node, name, kind, value);
}

/// Records a definition whose value may be a function, so that its signature ends where the function's body begins.
fn define<'t>(walker: &mut Walker<'t>, node: Node<'t>, name: Node<'t>, kind: Kind, value: Option<Node<'t>>) {
    walker.define(node, name, kind);
    if let Some(body) = value.and_then(|value| value.child_by_field_name("body")) {
        walker.end_signature(node, body.start_byte());
    }
}

/// Returns the module of `require("module")`.
fn required<'t>(walker: &Walker<'t>, value: Node<'t>) -> Option<String> {
    let function = value.child_by_field_name("function").filter(|_| value.kind() == "call_expression")?;
    let arguments = value.child_by_field_name("arguments").filter(|_| walker.text_of(function) == "require")?;
    arguments.named_child(0).filter(|argument| argument.kind() == "string").map(|text| unquoted(walker, text))
}

fn require<'t>(walker: &mut Walker<'t>, name: Node<'t>, module: &str, node: Node<'t>) {
    if name.kind() == "identifier" {
        let local = walker.text_of(name);
        return walker.import(&local, module, "", false, node);
    }
    let mut cursor = name.walk();
    for part in name.named_children(&mut cursor) {
        let (original, local) = match part.kind() {
            "shorthand_property_identifier_pattern" => (Some(part), Some(part)),
            "pair_pattern" => (part.child_by_field_name("key"), part.child_by_field_name("value")),
            _ => continue,
        };
        if let (Some(original), Some(local)) = (original, local) {
            let (original, local) = (walker.text_of(original), walker.text_of(local));
            walker.import(&local, module, &original, false, part);
        }
    }
}

/// Records functions and classes that are assigned: `exports.name = …`, `Type.prototype.name = …`, `this.name = …`.
fn assignment<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let (Some(left), right) = (node.child_by_field_name("left"), node.child_by_field_name("right")) else { return };
    let Some(name) = left.child_by_field_name("property").filter(|_| left.kind() == "member_expression") else {
        return;
    };
    let object = left.child_by_field_name("object");
    let object_text = object.map(|object| walker.text_of(object)).unwrap_or_default();
    if object_text == "this" && walker.around().is_some_and(|around| around.kind == Kind::Method) {
        return walker.add_to_class(node, name);
    }
    let exported = object_text == "exports" || object_text == "module.exports";
    let kind = match kind_of_value(right) {
        Some(kind) => kind,
        None if exported && walker.scope().kind == ScopeKind::Module => Kind::Variable,
        None => return,
    };
    let owner = object_text.strip_suffix(".prototype").filter(|owner| owner.len() < 100).map(str::to_owned);
    let kind = if owner.is_some() && kind == Kind::Function { Kind::Method } else { kind };
    define(walker, node, name, kind, right);
    if let Some(definition) = walker.last_definition() {
        definition.container = owner.map(Into::into).or(definition.container.take());
        if exported {
            definition.visibility = Visibility::Public;
        }
    }
}

/// Records functions in an object: `{ name: () => … }`.
fn pair<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let (Some(name), value) = (node.child_by_field_name("key"), node.child_by_field_name("value")) else { return };
    if name.kind() == "property_identifier" && kind_of_value(value) == Some(Kind::Function) {
        define(walker, node, name, Kind::Method, value);
    }
}

fn field<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    if let Some(name) = node.child_by_field_name("property") {
        walker.define(node, name, Kind::Field);
    }
}

/// Records the members of an enum that have no value.
fn variants<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let mut cursor = node.walk();
    for name in node.children_by_field_name("name", &mut cursor) {
        walker.add(name, name, Kind::Variant);
    }
}

fn unquoted<'t>(walker: &Walker<'t>, text: Node<'t>) -> String {
    walker.text_of(text).trim_matches(['"', '\'', '`']).to_owned()
}

fn import<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(module) = node.child_by_field_name("source").map(|source| unquoted(walker, source)) else { return };
    let mut cursor = node.walk();
    let Some(clause) = node.named_children(&mut cursor).find(|child| child.kind() == "import_clause") else {
        return;
    };
    let mut cursor = clause.walk();
    for part in clause.named_children(&mut cursor) {
        match part.kind() {
            "identifier" => {
                let local = walker.text_of(part);
                walker.import(&local, &module, "default", false, part);
            }
            "namespace_import" => {
                let local = part.named_child(0).map(|name| walker.text_of(name)).unwrap_or_default();
                walker.import(&local, &module, "", false, part);
            }
            _ => specifiers(walker, part, &module, false),
        }
    }
}

fn specifiers<'t>(walker: &mut Walker<'t>, list: Node<'t>, module: &str, reexport: bool) {
    let mut cursor = list.walk();
    for part in list.named_children(&mut cursor) {
        let Some(original) = part.child_by_field_name("name").map(|name| walker.text_of(name)) else { continue };
        let alias = part.child_by_field_name("alias").map(|alias| walker.text_of(alias));
        walker.import(alias.as_deref().unwrap_or(&original), module, &original, reexport, part);
    }
}

fn export<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(module) = node.child_by_field_name("source").map(|source| unquoted(walker, source)) else { return };
    let mut cursor = node.walk();
    let children: Vec<_> = node.children(&mut cursor).take(16).collect();
    for child in children {
        match child.kind() {
            "*" => walker.import("*", &module, "*", true, node),
            "export_clause" => specifiers(walker, child, &module, true),
            "namespace_export" => {
                let local = child.named_child(0).map(|name| walker.text_of(name)).unwrap_or_default();
                walker.import(&local, &module, "", true, node);
            }
            _ => {}
        }
    }
}
