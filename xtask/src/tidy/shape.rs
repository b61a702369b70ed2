//! Rules about the shape of the workspace: the dependencies between crates, and the lints that every crate must have.

use super::{Problem, Tree};

/// The crates around the core. They depend on the core and not on each other.
const RING: [&str; 7] =
    ["wieldy-sandbox", "wieldy-store", "wieldy-tools", "wieldy-mcp", "wieldy-flow", "wieldy-cluster", "wieldy-server"];

/// Checks the star: the core depends on none of our crates, a ring crate on the core alone. Tests may use others.
pub(super) fn star(tree: &Tree) -> Vec<Problem> {
    let packages = tree.metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let ours: Vec<&str> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    let mut problems = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let may_know: &[&str] = match name {
            "wieldy-core" => &[],
            name if RING.contains(&name) => &["wieldy-core"],
            _ => continue, // the edge plugs all of them together
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let other = dependency["name"].as_str().unwrap_or_default();
            let in_tests_only = dependency["kind"] == "dev";
            if ours.contains(&other) && !in_tests_only && !may_know.contains(&other) {
                let message = format!("`{name}` may not depend on `{other}`: every arrow points at wieldy-core");
                problems.push(Problem::new(&format!("crates/{name}/Cargo.toml"), 0, message));
            }
        }
    }
    problems
}

/// Checks that every crate forbids unsafe code, in the workspace's lints or its own. Only `wieldy-sandbox` has lints
/// that allow it.
pub(super) fn lints(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    let root_forbids = tree.file("Cargo.toml").is_some_and(|root| has(&root.text, "[workspace.lints.rust]", FORBID));
    for file in tree.matching("", "/Cargo.toml").filter(|file| has(&file.text, "[package]", "name")) {
        let inherits = root_forbids && has(&file.text, "[lints]", "workspace = true");
        let forbids = has(&file.text, "[lints.rust]", FORBID);
        let is_sandbox = file.path == "crates/wieldy-sandbox/Cargo.toml" && file.text.contains("[lints.rust]");
        if !(inherits || forbids || is_sandbox) {
            let message = "say `[lints] workspace = true`, or forbid `unsafe_code` in a `[lints.rust]` table";
            problems.push(Problem::new(&file.path, 0, message));
        }
    }
    problems
}

const FORBID: &str = "unsafe_code = \"forbid\"";

/// Returns true if a line that starts with `wanted` is under the heading `section` of a manifest.
fn has(manifest: &str, section: &str, wanted: &str) -> bool {
    let mut inside = false;
    manifest.lines().map(str::trim).any(|line| {
        if line.starts_with('[') {
            inside = line == section;
        }
        inside && line.starts_with(wanted)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::found;
    use super::*;

    #[test]
    fn a_ring_crate_that_knows_its_neighbour_is_found() {
        let package = |name: &str, dependencies: &[(&str, Value)]| {
            let dependencies: Vec<Value> =
                dependencies.iter().map(|(name, kind)| json!({"name": name, "kind": kind})).collect();
            json!({"name": name, "dependencies": dependencies})
        };
        let mut tree = Tree::of(&[]);
        tree.metadata = json!({"packages": [
            package("wieldy-core", &[("serde", Value::Null), ("wieldy-testkit", json!("dev"))]),
            package("wieldy-sandbox", &[("wieldy-core", Value::Null)]),
            package("wieldy-tools", &[
                ("wieldy-core", Value::Null),
                ("wieldy-sandbox", Value::Null),
                ("wieldy-testkit", json!("dev")),
                ("wieldy", json!("build")),
            ]),
            package("wieldy", &[("wieldy-tools", Value::Null), ("wieldy-sandbox", Value::Null)]),
            package("wieldy-testkit", &[("wieldy-core", Value::Null)]),
        ]});
        let problems: Vec<String> = star(&tree).iter().map(Problem::to_string).collect();
        assert_eq!(
            problems,
            [
                "crates/wieldy-tools/Cargo.toml:1: `wieldy-tools` may not depend on `wieldy-sandbox`: every arrow points at wieldy-core",
                "crates/wieldy-tools/Cargo.toml:1: `wieldy-tools` may not depend on `wieldy`: every arrow points at wieldy-core",
            ]
        );
    }

    #[test]
    fn a_crate_that_forbids_nothing_is_found() {
        let root = "[workspace.lints.rust]\nunsafe_code = \"forbid\" # why\n";
        let package = "[package]\nname = \"x\"\n";
        let problems = found(
            lints,
            &[
                ("Cargo.toml", root),
                ("crates/a/Cargo.toml", &format!("{package}[lints]\nworkspace = true\n")),
                ("crates/b/Cargo.toml", &format!("{package}[lints.rust]\nunsafe_code = \"forbid\"\n")),
                ("crates/c/Cargo.toml", &format!("{package}[dependencies]\nworkspace = true\n")),
                ("crates/wieldy-sandbox/Cargo.toml", &format!("{package}[lints.rust]\nmissing_docs = \"warn\"\n")),
            ],
        );
        assert_eq!(
            problems,
            [
                "crates/c/Cargo.toml:1: say `[lints] workspace = true`, or forbid `unsafe_code` in a `[lints.rust]` table"
            ]
        );
    }
}
