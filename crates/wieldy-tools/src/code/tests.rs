//! The trees of a sample in each language, whole; and hostile files.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::language::Language;
use super::parse::{FILE_BYTES_MAX, extract};
use super::tree::{FileTree, NoTree};

/// More than any sample needs, even on a busy machine without optimisation.
const PATIENT: Duration = Duration::from_secs(60);

/// Returns all of a tree as lines of text.
fn shown(tree: &FileTree) -> String {
    let mut text = format!("{} lines{}, doc {:?}\n", tree.lines, if tree.broken { ", broken" } else { "" }, tree.doc);
    for one in &tree.definitions {
        let container = one.container.as_ref().map(|name| format!("{name} > ")).unwrap_or_default();
        let lines = format!("{}:{} ({}-{})", one.line, one.column, one.start_line, one.end_line);
        let doc = one.doc.map(|(first, last)| format!(" doc {first}-{last}")).unwrap_or_default();
        let declared = if one.declared { " declared" } else { "" };
        let kind = one.kind.name();
        let seen = format!("{:?}", one.visibility).to_lowercase();
        let _ = writeln!(text, "{kind} {container}{} {lines} {seen}{declared}{doc} | {}", one.name, one.signature);
    }
    for one in &tree.imports {
        let reexport = if one.reexport { " reexport" } else { "" };
        let _ =
            writeln!(text, "import {} = {:?} of {:?} line {}{reexport}", one.local, one.original, one.module, one.line);
    }
    let (mut line, mut separator) = (0, "");
    for one in &tree.occurrences {
        if one.line != line {
            let _ = write!(text, "{separator}{}:", one.line);
            (line, separator) = (one.line, "\n");
        }
        let within = one.within.map_or("", |index| &tree.definitions[index as usize].name);
        let member = if one.member { "." } else { "" };
        let _ = write!(text, " {member}{} {}@{}<{within}>", tree.names[one.name as usize], one.kind.name(), one.column);
    }
    text
}

fn tree_of(language: Language, sample: &str) -> FileTree {
    extract(language, sample.as_bytes(), PATIENT, &CancellationToken::new()).expect("it is small")
}

macro_rules! samples {
    ($($language:ident $name:ident $file:literal,)*) => {
        const SAMPLES: &[(Language, &str)] = &[$((Language::$language, include_str!(concat!("fixtures/", $file))),)*];
        $(
            #[test]
            fn $name() {
                let tree = tree_of(Language::$language, include_str!(concat!("fixtures/", $file)));
                insta::assert_snapshot!(shown(&tree));
            }
        )*
    };
}

samples! {
    Rust the_tree_of_rust_is_whole "sample.rs.txt",
    Python the_tree_of_python_is_whole "sample.py.txt",
    Javascript the_tree_of_javascript_is_whole "sample.js.txt",
    Typescript the_tree_of_typescript_is_whole "sample.ts.txt",
    Tsx the_tree_of_tsx_is_whole "sample.ts.txt",
    Go the_tree_of_go_is_whole "sample.go.txt",
    Java the_tree_of_java_is_whole "sample.java.txt",
    C the_tree_of_c_is_whole "sample.c.txt",
    Cpp the_tree_of_cpp_is_whole "sample.cpp.txt",
    Ruby the_tree_of_ruby_is_whole "sample.rb.txt",
    Php the_tree_of_php_is_whole "sample.php.txt",
    CSharp the_tree_of_c_sharp_is_whole "sample.cs.txt",
    Bash the_tree_of_bash_is_whole "sample.sh.txt",
}
