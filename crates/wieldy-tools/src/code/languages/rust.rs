//! Rust.

use tree_sitter::Node;

use crate::code::rules::{CALL, IMPORT, INHERIT, Mode, READ, TYPE, Table, WRITE};
use crate::code::tree::{Kind, Visibility};
use crate::code::walker::Walker;

/// Maximum number of names in one `use`.
const NAMES_MAX: usize = 10_000;

pub(super) static TABLE: Table = Table {
    shared: false,
    names: &[
        ("identifier", READ),
        ("field_identifier", READ),
        ("type_identifier", TYPE),
        ("shorthand_field_identifier", READ),
    ],
    modes: &[
        ("call_expression", "function", CALL),
        ("generic_function", "function", Mode::Same),
        ("generic_function", "type_arguments", TYPE),
        ("macro_invocation", "macro", CALL),
        ("token_tree", "", Mode::Guess),
        ("token_repetition", "", Mode::Guess),
        ("field_expression", "value", READ),
        ("field_expression", "field", Mode::Same),
        ("scoped_identifier", "path", READ),
        ("scoped_identifier", "name", Mode::Same),
        ("scoped_type_identifier", "path", READ),
        ("scoped_type_identifier", "name", Mode::Same),
        ("generic_type", "type", Mode::Same),
        ("generic_type", "type_arguments", TYPE),
        ("struct_expression", "name", TYPE),
        ("field_initializer", "field", WRITE),
        ("field_initializer", "value", READ),
        ("struct_pattern", "type", TYPE),
        ("tuple_struct_pattern", "type", READ),
        ("field_pattern", "name", READ),
        ("let_declaration", "pattern", Mode::Bind),
        ("let_condition", "pattern", Mode::Bind),
        ("match_arm", "pattern", Mode::Bind),
        ("match_arm", "value", READ),
        ("match_pattern", "condition", READ),
        ("for_expression", "pattern", Mode::Bind),
        ("parameter", "pattern", Mode::No),
        ("closure_parameters", "", Mode::No),
        ("assignment_expression", "left", WRITE),
        ("compound_assignment_expr", "left", WRITE),
        ("lifetime", "", Mode::No),
        ("label", "", Mode::No),
        ("type_parameter", "name", Mode::No),
        ("const_parameter", "name", Mode::No),
        ("trait_item", "bounds", INHERIT),
        ("impl_item", "trait", INHERIT),
        ("impl_item", "type", TYPE),
        ("type_arguments", "", TYPE),
        ("type_binding", "name", READ),
        ("use_declaration", "argument", IMPORT),
        ("use_as_clause", "path", IMPORT),
        ("use_as_clause", "alias", Mode::No),
        ("extern_crate_declaration", "name", IMPORT),
        ("extern_crate_declaration", "alias", Mode::No),
        ("macro_rule", "left", Mode::No),
        ("array_expression", "", READ),
        ("block", "", READ),
    ],
    definitions: &[
        ("function_item", Kind::Function),
        ("function_signature_item", Kind::Function),
        ("struct_item", Kind::Struct),
        ("union_item", Kind::Struct),
        ("enum_item", Kind::Enum),
        ("enum_variant", Kind::Variant),
        ("trait_item", Kind::Trait),
        ("field_declaration", Kind::Field),
        ("const_item", Kind::Const),
        ("static_item", Kind::Const),
        ("type_item", Kind::Type),
        ("associated_type", Kind::Type),
        ("macro_definition", Kind::Macro),
    ],
    hooks: &[
        ("mod_item", module),
        ("impl_item", implementation),
        ("use_declaration", uses),
        ("extern_crate_declaration", extern_crate),
    ],
    comments: &["line_comment", "block_comment"],
    attributes: &["attribute_item", "inner_attribute_item"],
    bodies: &["field_declaration_list", "enum_variant_list", "declaration_list", "macro_rule"],
    visibility,
};

fn visibility(walker: &Walker<'_>, node: Node<'_>, _: &str) -> Visibility {
    let mut cursor = node.walk();
    let modifier = node.children(&mut cursor).take(16).find(|child| child.kind() == "visibility_modifier");
    match modifier.map(|modifier| walker.text_of(modifier)) {
        Some(text) if text == "pub" => Visibility::Public,
        Some(_) => Visibility::Internal,
        None if node.kind() == "enum_variant" => Visibility::Public,
        None if walker.around().is_some_and(|around| around.kind == Kind::Trait) => Visibility::Public,
        None => walker.scope().visibility.unwrap_or(Visibility::Private),
    }
}

fn module<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(name) = node.child_by_field_name("name") else { return };
    walker.define(node, name, Kind::Module);
    if node.child_by_field_name("body").is_none()
        && let Some(definition) = walker.last_definition()
    {
        definition.declared = true;
    }
}

fn implementation<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(of) = node.child_by_field_name("type") else { return };
    let name = type_name(walker, of);
    walker.enter_block(name);
    if node.child_by_field_name("trait").is_some() {
        walker.scope_mut().visibility = Some(Visibility::Public);
    }
}

/// Returns the name of a type without its parameters, path and references.
fn type_name<'t>(walker: &Walker<'t>, mut node: Node<'t>) -> String {
    for _ in 0..8 {
        let inner = match node.kind() {
            "generic_type" | "reference_type" | "pointer_type" => node.child_by_field_name("type"),
            "scoped_type_identifier" => node.child_by_field_name("name"),
            "dynamic_type" => node.child_by_field_name("trait"),
            _ => None,
        };
        match inner {
            Some(inner) => node = inner,
            None => break,
        }
    }
    walker.text_of(node).chars().take(80).collect()
}

fn uses<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(argument) = node.child_by_field_name("argument") else { return };
    let mut cursor = node.walk();
    let reexport = node.children(&mut cursor).any(|child| child.kind() == "visibility_modifier");
    let mut todo = vec![(String::new(), argument)];
    let mut names = 0;
    while let Some((prefix, node)) = todo.pop() {
        names += 1;
        if names > NAMES_MAX || prefix.len() > 1000 {
            return;
        }
        let path = |field| node.child_by_field_name(field).map(|path| join(&prefix, &walker.text_of(path)));
        match node.kind() {
            "scoped_use_list" => {
                let Some(list) = node.child_by_field_name("list") else { continue };
                todo.push((path("path").unwrap_or(prefix), list));
            }
            "use_list" => {
                let mut cursor = node.walk();
                let children: Vec<_> = node.named_children(&mut cursor).collect();
                todo.extend(children.into_iter().rev().map(|child| (prefix.clone(), child)));
            }
            "use_wildcard" => {
                let module = node.named_child(0).map_or(prefix.clone(), |of| join(&prefix, &walker.text_of(of)));
                walker.import("*", &module, "*", reexport, node);
            }
            "use_as_clause" => {
                let (Some(path), Some(alias)) = (path("path"), node.child_by_field_name("alias")) else { continue };
                let alias = walker.text_of(alias);
                bring(walker, &path, Some(&alias), reexport, node);
            }
            "identifier" | "scoped_identifier" | "self" | "crate" | "super" => {
                let path = join(&prefix, &walker.text_of(node));
                bring(walker, &path, None, reexport, node);
            }
            _ => {}
        }
    }
}

/// Records the import of a path such as `a::b::Name`, or `a::b::self`.
fn bring<'t>(walker: &mut Walker<'t>, path: &str, alias: Option<&str>, reexport: bool, node: Node<'t>) {
    let path = path.strip_suffix("::self").unwrap_or(path);
    let (module, name) = path.rsplit_once("::").unwrap_or(("", path));
    walker.import(alias.unwrap_or(name), module, name, reexport, node);
}

fn join(prefix: &str, path: &str) -> String {
    let path: String = path.split_whitespace().collect();
    if prefix.is_empty() { path } else { format!("{prefix}::{path}") }
}

fn extern_crate<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(name) = node.child_by_field_name("name").map(|name| walker.text_of(name)) else { return };
    let alias = node.child_by_field_name("alias").map(|alias| walker.text_of(alias));
    walker.import(alias.as_deref().unwrap_or(&name), &name, "", false, node);
}
