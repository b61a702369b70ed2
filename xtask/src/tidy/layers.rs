//! Rules about the layers of `wieldy-sandbox`: which of its modules may import which.

use super::lex::{code_of, line_of, words};
use super::{Problem, Tree};

/// The sources of the crate, and the folder of its levels in them.
const SOURCES: &str = "crates/wieldy-sandbox/src/";
const LEVELS: &str = "levels/";

/// The files that put levels and layers together.
const ROOTS: [&str; 3] = ["lib.rs", "levels/mod.rs", "probe/"];

/// A level imports layers and never another level; a layer imports no level. Both name the module that an item is
/// from: through the root of the crate everything could be had.
pub(super) fn levels_import_layers(tree: &Tree) -> Vec<Problem> {
    let paths = tree.matching(SOURCES, ".rs").filter_map(|file| file.path.strip_prefix(SOURCES));
    let levels: Vec<&str> = paths.filter_map(level_of).collect();
    let mut problems = Vec::new();
    for file in tree.matching(SOURCES, ".rs") {
        let path = file.path.strip_prefix(SOURCES).unwrap_or_default();
        if ROOTS.iter().any(|root| path.starts_with(root)) {
            continue;
        }
        let code = code_of(&file.text);
        let mut tell = |at, message: String| problems.push(Problem::new(&file.path, line_of(&code, at), message));
        // The first `super` of a path stands for all of them.
        let above = words(&code, "super").filter(|at| !code[..*at].ends_with("super::"));
        for at in words(&code, "levels").chain(above) {
            let mut parts = code[at..].split("::").map(|part| word_at(part.trim_start_matches('{')));
            let first = parts.next();
            let other = parts.find(|part| *part != "super").unwrap_or_default();
            let is_level = first == Some("levels") || levels.contains(&other);
            match level_of(path) {
                Some(own) if is_level && other != own => {
                    tell(
                        at,
                        format!("the level `{own}` may not import from the level `{other}`: a level imports layers"),
                    );
                }
                None if first == Some("levels") => tell(at, format!("a layer may not import from the level `{other}`")),
                _ => {}
            }
        }
        for at in words(&code, "crate") {
            let imported = code[at..].strip_prefix("crate::").unwrap_or_default();
            let group = imported.strip_prefix('{').and_then(|inner| inner.split('}').next());
            let items = group.map_or_else(|| vec![imported], |inner| inner.split(',').collect());
            if items.iter().any(|item| item.trim_start().starts_with(char::is_uppercase)) {
                tell(at, "import this from the module that it is in, not from the root of the crate".into());
            }
        }
    }
    problems
}

/// Returns the level that a source file belongs to.
fn level_of(path: &str) -> Option<&str> {
    let inner = path.strip_prefix(LEVELS)?;
    let name = inner.split('/').next()?.trim_end_matches(".rs");
    (name != "mod").then_some(name)
}

/// Returns the identifier that a text begins with.
fn word_at(text: &str) -> &str {
    text.split(|character: char| !character.is_alphanumeric() && character != '_').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::found;
    use super::*;

    #[test]
    fn a_level_that_imports_another_level_is_found() {
        let oci = "use crate::levels::native::warm; // levels::native\nuse crate::levels::oci::idmap;\nuse crate::view::plan;\n";
        let inner = "use super::runtime;\nuse super::super::native::warm;\nuse crate::{Native, sys};\n";
        let files = [
            ("crates/wieldy-sandbox/src/lib.rs", "pub use levels::native::Native;\n"),
            ("crates/wieldy-sandbox/src/probe/levels.rs", "use crate::Native;\nuse crate::levels::none;\n"),
            ("crates/wieldy-sandbox/src/levels/mod.rs", "pub use self::native::Native;\n"),
            ("crates/wieldy-sandbox/src/levels/none.rs", "use crate::pool::Pool;\n"),
            ("crates/wieldy-sandbox/src/levels/native/warm.rs", "use super::plan::{self, Step};\n"),
            ("crates/wieldy-sandbox/src/levels/oci/mod.rs", oci),
            ("crates/wieldy-sandbox/src/levels/oci/inner.rs", inner),
            ("crates/wieldy-sandbox/src/view/plan.rs", "use crate::levels::native;\n"),
        ];
        let other = "the level `oci` may not import from the level `native`: a level imports layers";
        assert_eq!(
            found(levels_import_layers, &files),
            [
                format!("crates/wieldy-sandbox/src/levels/oci/mod.rs:1: {other}"),
                format!("crates/wieldy-sandbox/src/levels/oci/inner.rs:2: {other}"),
                "crates/wieldy-sandbox/src/levels/oci/inner.rs:3: import this from the module that it is in, not from the root of the crate".into(),
                "crates/wieldy-sandbox/src/view/plan.rs:1: a layer may not import from the level `native`".into(),
            ]
        );
    }
}
