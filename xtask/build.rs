//! Collects the Rust snippets of the README and of the guide into one file, which `tests/guide.rs` compiles.
//!
//! A snippet is the body of an async function whose arguments are the names that the pages assume. A snippet with a
//! `main` of its own becomes a module.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// The names that pages assume, as arguments.
const KNOWN: &str = "executor: Executor, call: Call, caller: Caller, id: ExecutionId, result: ToolResult, name: &str, \
                     workspace: &Path, database_password: String, drop_table: DropTable";

fn main() {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("..");
    let mut code = String::new();
    for page in pages(&root) {
        println!("cargo::rerun-if-changed={}", page.display());
        let text = fs::read_to_string(&page).expect("a page can be read");
        let stem = page.file_stem().expect("a page has a name").to_string_lossy().to_lowercase().replace('-', "_");
        for (number, snippet) in (1..).zip(snippets(&text)) {
            let name = format!("page_{stem}_{number}");
            let fails_as_tool = snippet.contains("return Err(");
            let error = if fails_as_tool { "RunError" } else { "Box<dyn std::error::Error>" };
            let _ = if snippet.contains("fn main(") {
                writeln!(code, "mod {name} {{\n{snippet}}}")
            } else {
                writeln!(code, "async fn {name}({KNOWN}) -> Result<(), {error}> {{\n{snippet}\n;Ok(())\n}}")
            };
        }
    }
    let out = env::var("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&out).join("guide.rs"), code).expect("the folder for output can be written");
}

/// Returns the README and the pages of the guide.
fn pages(root: &Path) -> Vec<PathBuf> {
    println!("cargo::rerun-if-changed={}", root.join("docs/guide").display());
    let guide = fs::read_dir(root.join("docs/guide")).expect("there is a guide");
    let mut pages: Vec<PathBuf> = guide.flatten().map(|entry| entry.path()).collect();
    pages.sort();
    pages.push(root.join("README.md"));
    pages
}

/// Returns the Rust code blocks of a page, including those that doc tests skip.
fn snippets(text: &str) -> Vec<String> {
    let (mut found, mut open): (Vec<String>, Option<String>) = (Vec::new(), None);
    for line in text.lines() {
        match &mut open {
            Some(_) if line == "```" => found.extend(open.take()),
            Some(snippet) => *snippet += &format!("{line}\n"),
            None if line.starts_with("```rust") => open = Some(String::new()),
            None => {}
        }
    }
    found
}
