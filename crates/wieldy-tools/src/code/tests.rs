//! The trees of a sample in each language, whole; and hostile files.

use std::fmt::Write as _;
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

/// Returns the tree within the usual budget.
fn usual(language: Language, text: &[u8]) -> Result<FileTree, NoTree> {
    extract(language, text, super::parse::PARSE_TIME_MAX, &CancellationToken::new())
}

/// Checks the rules that hold for the tree of any file.
fn assert_sound(tree: &FileTree, text: &[u8]) {
    let lines = text.iter().filter(|byte| **byte == b'\n').count() as u32 + 1;
    let count = tree.definitions.len() as u32;
    for (index, one) in tree.definitions.iter().enumerate() {
        assert!(one.line >= 1 && one.line <= lines && one.end_line <= lines, "{one:?}");
        assert!(one.parent.is_none_or(|parent| (parent as usize) < index), "{one:?}");
        assert!(one.signature.len() < 400 && !one.signature.contains('\n'), "{one:?}");
    }
    for one in &tree.occurrences {
        assert!((one.name as usize) < tree.names.len() && one.line >= 1 && one.line <= lines, "{one:?}");
        assert!(one.within.is_none_or(|within| within < count), "{one:?}");
    }
    assert_eq!(tree.arounds().len(), tree.definitions.len());
}

#[test]
fn a_million_brackets_and_deep_nesting_end_in_time_in_each_language() {
    // Less than the usual budget, because there are many cases. Each ends soon after it, or is done before.
    let budget = Duration::from_millis(15);
    for (language, _) in SAMPLES {
        for pattern in ["(", "[", "{", "<", "f(", "\"", "x=(", "fn f(){"] {
            let text = pattern.repeat((FILE_BYTES_MAX - 1) / pattern.len());
            match extract(*language, text.as_bytes(), budget, &CancellationToken::new()) {
                Ok(tree) => assert_sound(&tree, text.as_bytes()),
                Err(reason) => assert_eq!(reason, NoTree::Slow, "{pattern:?}"),
            }
        }
        let (open, close) = ("(".repeat(20_000), ")".repeat(20_000));
        let text = format!("x = {open}name{close};\n");
        if let Ok(tree) = extract(*language, text.as_bytes(), 20 * budget, &CancellationToken::new()) {
            assert_sound(&tree, text.as_bytes());
        }
    }
}

#[test]
fn a_file_that_is_too_large_is_not_parsed() {
    let line = vec![b'x'; 100 * 1024 * 1024];
    assert_eq!(usual(Language::Rust, &line), Err(NoTree::Large));
    let long = format!("fn main() {{ {} }}", "call(1); ".repeat(20_000));
    let tree = extract(Language::Rust, long.as_bytes(), PATIENT, &CancellationToken::new()).expect("it is not large");
    assert_eq!((tree.occurrences.len(), tree.occurrences[19_999].column), (20_000, 13 + 19_999 * 9));
}

#[test]
fn a_stopped_call_stops_parsing() {
    let stop = CancellationToken::new();
    stop.cancel();
    let text = "fn f() { g(); }\n".repeat(20_000);
    assert_eq!(extract(Language::Rust, text.as_bytes(), PATIENT, &stop), Err(NoTree::Stopped));
    assert_eq!(extract(Language::Rust, text.as_bytes(), Duration::ZERO, &CancellationToken::new()), Err(NoTree::Slow));
    assert!(usual(Language::Rust, b"fn f() {}").is_ok(), "the parser of this thread works again");
}

#[test]
fn damaged_files_never_break_the_walk() {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move |max: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % max as u64) as usize
    };
    for (language, sample) in SAMPLES {
        for round in 0..60 {
            let mut text = sample.as_bytes().to_vec();
            match round % 4 {
                0 => text.truncate(next(text.len())),
                1 => (0..10).for_each(|_| {
                    let at = next(text.len());
                    text[at] = next(256) as u8;
                }),
                2 => {
                    let (from, to) = (next(text.len()), next(text.len()));
                    text.drain(from.min(to)..from.max(to));
                }
                _ => {
                    let part = text[next(text.len())..].to_vec();
                    let at = next(text.len());
                    text.splice(at..at, part);
                }
            }
            let tree = extract(*language, &text, PATIENT, &CancellationToken::new()).expect("it is small");
            assert_sound(&tree, &text);
        }
        for text in [&b""[..], b"\n", b"\xff\xfe\x00", b"\xef\xbb\xbf", b"\r\r\r", "\u{1f600}\u{301}".as_bytes()] {
            assert_sound(&extract(*language, text, PATIENT, &CancellationToken::new()).expect("it is small"), text);
        }
    }
}

#[test]
fn columns_count_characters_and_survive_invalid_text() {
    let tree = tree_of(Language::Python, "\u{e4}\u{4f60} = \u{fc}ber(\"\u{1f600}\", second)\n");
    let found: Vec<_> = tree.occurrences.iter().map(|one| (&*tree.names[one.name as usize], one.column)).collect();
    assert_eq!(found, [("\u{fc}ber", 6), ("second", 16)]);
    let tree = usual(Language::Python, b"x = \xff\xfe; y = z\n").expect("it is small");
    assert!(tree.broken && tree.names.iter().any(|name| &**name == "z"), "{tree:?}");
}

#[test]
fn a_tree_survives_the_snapshot_of_the_index() {
    for (language, sample) in SAMPLES {
        let tree = tree_of(*language, sample);
        let bytes = postcard::to_stdvec(&tree).expect("it is plain data");
        assert_eq!(postcard::from_bytes::<FileTree>(&bytes).expect("it is whole"), tree);
    }
}
