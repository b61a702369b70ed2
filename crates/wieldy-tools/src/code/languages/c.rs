//! C and C++.

use tree_sitter::Node;

use crate::code::rules::{CALL, INHERIT, Mode, READ, TYPE, Table, WRITE};
use crate::code::tree::{Kind, Visibility};
use crate::code::walker::{ScopeKind, Walker};

/// Maximum number of declarators inside each other: `int *(*name[3])(void)` has four.
const DECLARATORS_MAX: usize = 64;

pub(super) static TABLE: Table = Table {
    shared: true,
    names: &[
        ("identifier", READ),
        ("field_identifier", READ),
        ("type_identifier", TYPE),
        ("namespace_identifier", READ),
    ],
    modes: &[
        ("call_expression", "function", CALL),
        ("field_expression", "argument", READ),
        ("field_expression", "field", Mode::Same),
        ("assignment_expression", "left", WRITE),
        ("update_expression", "argument", WRITE),
        ("subscript_expression", "", READ),
        ("pointer_expression", "", READ),
        ("declaration", "declarator", WRITE),
        ("init_declarator", "declarator", Mode::Same),
        ("init_declarator", "value", READ),
        ("pointer_declarator", "declarator", Mode::Same),
        ("parenthesized_declarator", "", Mode::Same),
        ("array_declarator", "declarator", Mode::Same),
        ("array_declarator", "size", READ),
        ("function_declarator", "declarator", Mode::Same),
        ("function_declarator", "parameters", READ),
        ("parameter_declaration", "declarator", Mode::No),
        ("parameter_declaration", "type", TYPE),
        ("preproc_params", "", Mode::No),
        ("goto_statement", "", Mode::No),
        ("field_designator", "", WRITE),
        ("qualified_identifier", "scope", READ),
        ("qualified_identifier", "name", Mode::Same),
        ("template_function", "name", Mode::Same),
        ("template_type", "name", Mode::Same),
        ("template_method", "name", Mode::Same),
        ("template_argument_list", "", TYPE),
        ("base_class_clause", "", INHERIT),
        ("reference_declarator", "", Mode::Same),
        ("destructor_name", "", Mode::No),
        ("optional_parameter_declaration", "declarator", Mode::No),
        ("optional_parameter_declaration", "default_value", READ),
        ("type_parameter_declaration", "", Mode::No),
        ("for_range_loop", "declarator", WRITE),
    ],
    definitions: &[
        ("preproc_def", Kind::Macro),
        ("preproc_function_def", Kind::Macro),
        ("enumerator", Kind::Variant),
        ("namespace_definition", Kind::Module),
        ("alias_declaration", Kind::Type),
        ("concept_definition", Kind::Type),
    ],
    hooks: &[
        ("function_definition", function),
        ("declaration", declaration),
        ("field_declaration", fields),
        ("struct_specifier", record),
        ("class_specifier", record),
        ("union_specifier", record),
        ("enum_specifier", record),
        ("type_definition", typedef),
        ("preproc_include", include),
        ("using_declaration", using),
        ("access_specifier", access),
    ],
    comments: &["comment"],
    attributes: &["attribute_declaration"],
    bodies: &[
        "compound_statement",
        "field_declaration_list",
        "enumerator_list",
        "preproc_arg",
        "field_initializer_list",
    ],
    visibility,
};

fn visibility(walker: &Walker<'_>, node: Node<'_>, _: &str) -> Visibility {
    if walker.scope().kind == ScopeKind::Type {
        return walker.scope().visibility.unwrap_or(Visibility::Public);
    }
    if has_storage(walker, node, "static") { Visibility::Private } else { Visibility::Public }
}

fn has_storage(walker: &Walker<'_>, node: Node<'_>, word: &str) -> bool {
    let mut cursor = node.walk();
    let mut first = node.children(&mut cursor).take(8);
    first.any(|child| child.kind() == "storage_class_specifier" && walker.text_of(child) == word)
}

/// A name inside its declarators.
struct Declared<'t> {
    name: Node<'t>,
    /// The container that the name is qualified with: `Server` in `void Server::run()`.
    owner: Option<String>,
    is_function: bool,
}

/// Goes through pointers, arrays and functions to the name that a declarator declares.
fn declared<'t>(walker: &Walker<'t>, mut node: Node<'t>) -> Option<Declared<'t>> {
    let (mut is_function, mut owner) = (false, None::<String>);
    for _ in 0..DECLARATORS_MAX {
        match node.kind() {
            "identifier" | "field_identifier" | "type_identifier" | "destructor_name" | "operator_name"
            | "operator_cast" => return Some(Declared { name: node, owner, is_function }),
            "function_declarator" => {
                node = node.child_by_field_name("declarator")?;
                // `(*name)(…)` is a pointer, not a function.
                is_function = node.kind() != "parenthesized_declarator";
            }
            "qualified_identifier" => {
                let scope = node.child_by_field_name("scope").map(|scope| walker.text_of(scope)).unwrap_or_default();
                let scope = scope.split('<').next().unwrap_or_default().to_owned();
                owner = Some(match owner {
                    Some(owner) if owner.len() < 200 => format!("{owner}::{scope}"),
                    _ => scope,
                });
                node = node.child_by_field_name("name")?;
            }
            "template_function" => node = node.child_by_field_name("name")?,
            "parenthesized_declarator" | "reference_declarator" | "attributed_declarator" => {
                let mut cursor = node.walk();
                node = node.named_children(&mut cursor).find(|child| child.kind() != "ms_call_modifier")?;
            }
            _ => node = node.child_by_field_name("declarator")?,
        }
    }
    None
}

fn function<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(found) = node.child_by_field_name("declarator").and_then(|of| declared(walker, of)) else { return };
    let kind = if found.owner.is_some() { Kind::Method } else { Kind::Function };
    walker.define(node, found.name, kind);
    if let (Some(owner), Some(definition)) = (found.owner, walker.last_definition()) {
        definition.container = Some(match definition.container.take() {
            Some(outer) => format!("{outer}::{owner}").into(),
            None => owner.into(),
        });
    }
}

/// Records the declarations of a file or a namespace; those in functions are variables of the function.
fn declaration<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let in_type = walker.scope().kind == ScopeKind::Type;
    if walker.scope().kind != ScopeKind::Module && !in_type {
        return;
    }
    let is_extern = has_storage(walker, node, "extern");
    let mut cursor = node.walk();
    let is_const = node.children(&mut cursor).take(8).any(|child| {
        child.kind() == "type_qualifier" && matches!(walker.text_of(child).as_str(), "const" | "constexpr")
    });
    let mut cursor = node.walk();
    for declarator in node.children_by_field_name("declarator", &mut cursor) {
        let Some(found) = declared(walker, declarator) else { continue };
        let kind = match (found.is_function, in_type) {
            (true, true) => Kind::Method,
            (true, false) => Kind::Function,
            (false, true) => Kind::Field,
            (false, false) if is_const => Kind::Const,
            (false, false) => Kind::Variable,
        };
        walker.add(node, found.name, kind);
        if (found.is_function || is_extern)
            && let Some(definition) = walker.last_definition()
        {
            definition.declared = true;
        }
    }
}

fn fields<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let mut cursor = node.walk();
    for declarator in node.children_by_field_name("declarator", &mut cursor) {
        let Some(found) = declared(walker, declarator) else { continue };
        walker.add(node, found.name, if found.is_function { Kind::Method } else { Kind::Field });
        if found.is_function
            && let Some(definition) = walker.last_definition()
        {
            definition.declared = true;
        }
    }
}

fn record<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    // Without a body it is only a use of the type.
    if node.child_by_field_name("body").is_none() {
        return;
    }
    let kind = match node.kind() {
        "class_specifier" => Kind::Class,
        "enum_specifier" => Kind::Enum,
        _ => Kind::Struct,
    };
    let name = node.child_by_field_name("name");
    match name {
        Some(name) if matches!(name.kind(), "type_identifier" | "identifier") => walker.define(node, name, kind),
        Some(name) => walker.enter_block(walker.text_of(name).chars().take(80).collect()),
        // `typedef struct { … } Name;`
        None => match typedef_name(walker, node) {
            Some(name) => walker.enter_block(name),
            None => return,
        },
    }
    if kind == Kind::Class {
        walker.scope_mut().visibility = Some(Visibility::Private);
    }
}

fn typedef_name<'t>(walker: &Walker<'t>, node: Node<'t>) -> Option<String> {
    let outer = node.parent().filter(|outer| outer.kind() == "type_definition")?;
    let found = declared(walker, outer.child_by_field_name("declarator")?)?;
    Some(walker.text_of(found.name).chars().take(80).collect())
}

fn typedef<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let body = node.child_by_field_name("type");
    let kind = match body.filter(|body| body.child_by_field_name("body").is_some()).map(|body| body.kind()) {
        Some("struct_specifier" | "union_specifier") => Kind::Struct,
        Some("enum_specifier") => Kind::Enum,
        _ => Kind::Type,
    };
    let mut cursor = node.walk();
    for declarator in node.children_by_field_name("declarator", &mut cursor) {
        if let Some(found) = declared(walker, declarator) {
            walker.add(node, found.name, kind);
        }
    }
}

fn access<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let visibility = match walker.text_of(node).as_str() {
        "private" => Visibility::Private,
        "protected" => Visibility::Internal,
        _ => Visibility::Public,
    };
    if walker.scope().kind == ScopeKind::Type
        && node.parent().is_some_and(|outer| outer.kind() == "field_declaration_list")
    {
        walker.scope_mut().visibility = Some(visibility);
    }
}

fn include<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    if let Some(path) = node.child_by_field_name("path").map(|path| walker.text_of(path)) {
        walker.import("*", path.trim_matches(['"', '<', '>']), "*", true, node);
    }
}

fn using<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(path) = node.named_child(0).map(|path| walker.text_of(path)) else { return };
    if let Some((module, name)) = path.rsplit_once("::") {
        walker.import(name, module, name, false, node);
    }
}
