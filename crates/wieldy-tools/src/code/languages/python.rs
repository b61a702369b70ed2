//! Python.

use tree_sitter::Node;

use crate::code::rules::{CALL, IMPORT, INHERIT, Mode, READ, TYPE, Table, WRITE};
use crate::code::tree::{Kind, Visibility};
use crate::code::walker::{ScopeKind, Walker};

/// Maximum number of targets of one assignment.
const TARGETS_MAX: usize = 1000;

pub(super) static TABLE: Table = Table {
    shared: false,
    names: &[("identifier", READ)],
    modes: &[
        ("call", "function", CALL),
        ("call", "arguments", READ),
        ("argument_list", "", Mode::Same),
        ("attribute", "object", READ),
        ("attribute", "attribute", Mode::Same),
        ("subscript", "subscript", READ),
        ("keyword_argument", "name", Mode::No),
        ("keyword_argument", "value", READ),
        ("class_definition", "superclasses", INHERIT),
        ("class_definition", "body", READ),
        ("parameters", "", Mode::No),
        ("lambda_parameters", "", Mode::No),
        ("default_parameter", "name", Mode::No),
        ("default_parameter", "value", READ),
        ("typed_parameter", "type", TYPE),
        ("typed_default_parameter", "name", Mode::No),
        ("typed_default_parameter", "type", TYPE),
        ("typed_default_parameter", "value", READ),
        ("type", "", TYPE),
        ("assignment", "left", WRITE),
        ("augmented_assignment", "left", WRITE),
        ("named_expression", "name", WRITE),
        ("for_statement", "left", WRITE),
        ("for_in_clause", "left", WRITE),
        ("as_pattern_target", "", WRITE),
        ("delete_statement", "", WRITE),
        ("pattern_list", "", Mode::Same),
        ("tuple_pattern", "", Mode::Same),
        ("list_pattern", "", Mode::Same),
        ("list_splat_pattern", "", Mode::Same),
        ("expression_list", "", Mode::Same),
        ("tuple", "", Mode::Same),
        ("import_statement", "", IMPORT),
        ("import_from_statement", "", IMPORT),
        ("future_import_statement", "", IMPORT),
        ("aliased_import", "alias", Mode::No),
        ("case_pattern", "", Mode::Bind),
        ("class_pattern", "", TYPE),
        ("keyword_pattern", "", Mode::No),
        ("type_parameter", "", Mode::No),
    ],
    definitions: &[],
    hooks: &[
        ("module", module),
        ("function_definition", function),
        ("class_definition", class),
        ("assignment", assignment),
        ("type_alias_statement", alias),
        ("import_statement", import),
        ("import_from_statement", import_from),
    ],
    comments: &["comment"],
    attributes: &["decorator"],
    bodies: &[],
    visibility,
};

fn visibility(_: &Walker<'_>, _: Node<'_>, name: &str) -> Visibility {
    let private = name.starts_with('_') && !(name.starts_with("__") && name.ends_with("__"));
    if private { Visibility::Private } else { Visibility::Public }
}

fn module<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    if let Some(text) = docstring(node) {
        walker.document_file(text);
    }
}

fn function<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    define(walker, node, Kind::Function);
}

fn class<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    define(walker, node, Kind::Class);
}

fn define<'t>(walker: &mut Walker<'t>, node: Node<'t>, kind: Kind) {
    let Some(name) = node.child_by_field_name("name") else { return };
    walker.define(node, name, kind);
    if let Some(text) = node.child_by_field_name("body").and_then(docstring)
        && let Some(definition) = walker.last_definition()
    {
        definition.doc = Some((text.start_position().row as u32 + 1, text.end_position().row as u32 + 1));
    }
}

/// Returns the string that a body begins with.
fn docstring(body: Node<'_>) -> Option<Node<'_>> {
    let mut cursor = body.walk();
    let first = body.named_children(&mut cursor).find(|child| child.kind() != "comment")?;
    let text = first.named_child(0).filter(|_| first.kind() == "expression_statement")?;
    (text.kind() == "string").then_some(text)
}

/// Records names of modules, attributes of classes, and attributes that methods set on their object.
fn assignment<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(left) = node.child_by_field_name("left") else { return };
    let mut todo = vec![left];
    let mut targets = 0;
    while let Some(target) = todo.pop() {
        targets += 1;
        if targets > TARGETS_MAX {
            return;
        }
        match target.kind() {
            "identifier" => name(walker, node, target),
            "attribute" => own_attribute(walker, node, target),
            "pattern_list" | "tuple_pattern" | "list_pattern" | "list_splat_pattern" => {
                let mut cursor = target.walk();
                let inner: Vec<_> = target.named_children(&mut cursor).take(TARGETS_MAX).collect();
                todo.extend(inner.into_iter().rev());
            }
            _ => {}
        }
    }
}

fn name<'t>(walker: &mut Walker<'t>, node: Node<'t>, target: Node<'t>) {
    let text = walker.text_of(target);
    let kind = match walker.scope().kind {
        ScopeKind::Type if in_enum(walker) && node.child_by_field_name("right").is_some() => Kind::Variant,
        ScopeKind::Type => Kind::Field,
        ScopeKind::Module if !text.chars().any(char::is_lowercase) => Kind::Const,
        ScopeKind::Module => Kind::Variable,
        ScopeKind::Function | ScopeKind::Value => return,
    };
    walker.add_once(node, target, kind);
}

fn in_enum(walker: &Walker<'_>) -> bool {
    let bases = walker.around().and_then(|class| class.signature.split_once('(')).map_or("", |(_, bases)| bases);
    let mut bases = bases.split(|letter: char| !letter.is_alphanumeric());
    bases.any(|base| ["Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"].contains(&base))
}

fn own_attribute<'t>(walker: &mut Walker<'t>, node: Node<'t>, target: Node<'t>) {
    let (Some(object), Some(attribute)) =
        (target.child_by_field_name("object"), target.child_by_field_name("attribute"))
    else {
        return;
    };
    let in_method = walker.around().is_some_and(|around| around.kind == Kind::Method);
    if in_method && walker.text_of(object) == "self" {
        walker.add_to_class(node, attribute);
    }
}

fn alias<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let name = node.child_by_field_name("left").and_then(|left| left.named_child(0));
    if let Some(name) = name.filter(|name| name.kind() == "identifier") {
        walker.define(node, name, Kind::Type);
    }
}

fn import<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let mut cursor = node.walk();
    for name in node.children_by_field_name("name", &mut cursor) {
        let (path, alias) = aliased(walker, name);
        match alias {
            Some(alias) => walker.import(&alias, &path, "", true, name),
            None => walker.import(path.split('.').next().unwrap_or(&path), &path, "", true, name),
        }
    }
}

fn import_from<'t>(walker: &mut Walker<'t>, node: Node<'t>) {
    let Some(module) = node.child_by_field_name("module_name").map(|module| plain(walker, module)) else { return };
    let mut cursor = node.walk();
    for name in node.children_by_field_name("name", &mut cursor) {
        let (original, alias) = aliased(walker, name);
        walker.import(alias.as_deref().unwrap_or(&original), &module, &original, true, name);
    }
    let mut cursor = node.walk();
    if node.named_children(&mut cursor).any(|child| child.kind() == "wildcard_import") {
        walker.import("*", &module, "*", true, node);
    }
}

fn aliased<'t>(walker: &Walker<'t>, name: Node<'t>) -> (String, Option<String>) {
    let alias = name.child_by_field_name("alias").map(|alias| walker.text_of(alias));
    (plain(walker, name.child_by_field_name("name").unwrap_or(name)), alias)
}

fn plain<'t>(walker: &Walker<'t>, node: Node<'t>) -> String {
    walker.text_of(node).split_whitespace().collect()
}
