//! Rules about Rust sources.

use super::lex::{code_of, item_length, line_of, without_tests, words};
use super::{File, Problem, Tree};

/// The maximal number of non-blank lines in a file without a reason, not counting its tests.
const FILE_LINES_MAX: usize = 500;

/// The maximal number of lines in a function without a reason.
const FUNCTION_LINES_MAX: usize = 70;

/// Files that may be longer, each with the reason.
const LONG_FILES: &[(&str, &str)] = &[];

/// Functions that may be longer, by file and name, each with the reason.
const LONG_FUNCTIONS: &[(&str, &str, &str)] = &[];

/// Checks that `unsafe` is used only in the system files of `wieldy-sandbox` and in attacks.
pub(super) fn unsafe_only_in_the_sandbox(tree: &Tree) -> Vec<Problem> {
    let home = |path: &str| {
        let is_system = path.ends_with("/sys.rs");
        let is_attack = path.starts_with("crates/wieldy-sandbox/tests/it/escape/");
        is_attack || path.starts_with("crates/wieldy-sandbox/src/") && is_system
    };
    each_place(tree, |file| {
        let code = code_of(&file.text);
        let places = if home(&file.path) { Vec::new() } else { words(&code, "unsafe").collect() };
        (code, places, "`unsafe` belongs in `sys.rs` of wieldy-sandbox")
    })
}

/// Checks that no test is ignored.
pub(super) fn no_ignored_test(tree: &Tree) -> Vec<Problem> {
    each_place(tree, |file| {
        let code = code_of(&file.text);
        let places = code.match_indices("#[ignore").map(|(at, _)| at).collect();
        (code, places, "mend the test or remove it; a test that needs what is not here skips itself aloud")
    })
}

/// Checks that no unfinished code is committed.
pub(super) fn nothing_unfinished(tree: &Tree) -> Vec<Problem> {
    each_place(tree, |file| {
        let code = code_of(&file.text);
        let left_over = ["todo", "unimplemented", "dbg"].into_iter().flat_map(|name| {
            words(&code, name).filter(|at| code[at + name.len()..].starts_with('!')).collect::<Vec<_>>()
        });
        let places = left_over.collect();
        (code, places, "`todo!`, `unimplemented!` or `dbg!` is left over")
    })
}

/// Checks that code outside of tests has no `unwrap`. `expect` states the fact that makes it safe; `unwrap` states
/// nothing.
pub(super) fn no_unwrap_outside_tests(tree: &Tree) -> Vec<Problem> {
    each_place(tree, |file| {
        let code = shipped_code(file);
        let places = code.match_indices(".unwrap()").map(|(at, _)| at).collect();
        (code, places, "use `?`, or `expect` with the fact that makes it safe")
    })
}

/// Checks that a file over its budget has a reason, and that a file with a reason is over its budget.
pub(super) fn no_long_file(tree: &Tree) -> Vec<Problem> {
    long_files(tree, LONG_FILES)
}

fn long_files(tree: &Tree, reasons: &[(&str, &str)]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for file in tree.matching("", ".rs").filter(|file| !is_test_file(&file.path)) {
        let of_tests = test_lines(&file.text);
        let lines =
            file.text.lines().zip(of_tests).filter(|(line, of_test)| !of_test && !line.trim().is_empty()).count();
        let has_reason = reasons.iter().any(|(path, _)| *path == file.path);
        let message = match (lines > FILE_LINES_MAX, has_reason) {
            (true, false) => format!("{lines} lines without blanks and tests, over {FILE_LINES_MAX}: is it one thing?"),
            (false, true) => "no longer too long: take it out of LONG_FILES".into(),
            _ => continue,
        };
        problems.push(Problem::new(&file.path, 0, message));
    }
    problems
}

/// Checks that a function over its budget has a reason.
pub(super) fn no_long_function(tree: &Tree) -> Vec<Problem> {
    long_functions(tree, LONG_FUNCTIONS)
}

fn long_functions(tree: &Tree, reasons: &[(&str, &str, &str)]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for file in tree.matching("", ".rs") {
        let code = shipped_code(file);
        for at in words(&code, "fn") {
            let after = code[at + 2..].trim_start();
            let name = after.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
            let lines = code[at..at + item_length(&code[at..])].matches('\n').count() + 1;
            let has_reason = reasons.iter().any(|(path, function, _)| *path == file.path && *function == name);
            // `fn` without a name is a function pointer type.
            if !name.is_empty() && lines > FUNCTION_LINES_MAX && !has_reason {
                let message = format!("`{name}` has {lines} lines, over {FUNCTION_LINES_MAX}: does it do one thing?");
                problems.push(Problem::new(&file.path, line_of(&code, at), message));
            }
        }
    }
    problems
}

/// Returns true if the whole file is a test.
fn is_test_file(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs")
}

/// Returns the code that ships: no comments, no contents of literals, no tests.
fn shipped_code(file: &File) -> String {
    if is_test_file(&file.path) { String::new() } else { without_tests(&code_of(&file.text)) }
}

/// Returns for each line whether it belongs to a test. A comment belongs to the code before it.
fn test_lines(text: &str) -> Vec<bool> {
    let code = code_of(text);
    let shipped = without_tests(&code);
    let mut of_test = false;
    let mut lines = Vec::new();
    for (all, shipped) in code.lines().zip(shipped.lines()) {
        if !all.trim().is_empty() {
            of_test = shipped.trim().is_empty();
        }
        lines.push(of_test);
    }
    lines
}

/// Returns a problem for each place that `look` finds in a Rust file. `look` returns the code, the byte positions and
/// the message.
fn each_place(tree: &Tree, look: impl Fn(&File) -> (String, Vec<usize>, &'static str)) -> Vec<Problem> {
    let mut problems = Vec::new();
    for file in tree.matching("", ".rs") {
        let (code, places, message) = look(file);
        problems.extend(places.into_iter().map(|at| Problem::new(&file.path, line_of(&code, at), message)));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::super::found;
    use super::*;

    #[test]
    fn unsafe_is_found_outside_its_files() {
        let source = "// unsafe\nfn f() { unsafe { g() } }\n";
        let message = "`unsafe` belongs in `sys.rs` of wieldy-sandbox";
        assert_eq!(
            found(
                unsafe_only_in_the_sandbox,
                &[
                    ("crates/wieldy-core/src/sys.rs", source),
                    ("crates/wieldy-sandbox/src/pool.rs", source),
                    ("crates/wieldy-sandbox/src/sys.rs", source),
                    ("crates/wieldy-sandbox/tests/it/escape/claim.rs", source),
                ]
            ),
            [
                format!("crates/wieldy-core/src/sys.rs:2: {message}"),
                format!("crates/wieldy-sandbox/src/pool.rs:2: {message}"),
            ]
        );
    }

    #[test]
    fn an_ignored_test_is_found() {
        let problems = found(no_ignored_test, &[("a.rs", "#[test]\n#[ignore = \"slow\"]\nfn t() {}\n")]);
        assert_eq!(problems.len(), 1);
        assert!(problems[0].starts_with("a.rs:2: "), "{problems:?}");
    }

    #[test]
    fn what_is_left_over_is_found() {
        let source =
            "fn a() { todo!() }\nfn b() { unimplemented!(\"x\") }\nfn c() { dbg!(1); not_dbg!(1); \"todo!\" }\n";
        let lines: Vec<usize> = nothing_unfinished(&Tree::of(&[("a.rs", source)])).iter().map(|p| p.line).collect();
        assert_eq!(lines, [1, 2, 3]);
    }

    #[test]
    fn unwrap_is_found_outside_of_tests() {
        let source = "/// x.unwrap()\nfn a() { x.unwrap(); }\n#[cfg(test)]\nmod tests { fn b() { x.unwrap(); } }\n";
        let message = "use `?`, or `expect` with the fact that makes it safe";
        assert_eq!(
            found(no_unwrap_outside_tests, &[("src/a.rs", source), ("crates/x/tests/it/main.rs", source)]),
            [format!("src/a.rs:2: {message}")]
        );
    }

    #[test]
    fn a_long_file_needs_a_reason_and_a_reason_needs_a_long_file() {
        let long = "// a line\n".repeat(FILE_LINES_MAX + 1);
        let with_tests =
            format!("fn a() {{}}\n#[cfg(test)]\nmod tests {{\n{}}}\n", "fn b() {}\n".repeat(FILE_LINES_MAX));
        let tree = Tree::of(&[("long.rs", &long), ("fine.rs", &with_tests)]);
        let problems = |reasons| long_files(&tree, reasons).iter().map(Problem::to_string).collect::<Vec<_>>();
        assert_eq!(problems(&[]), ["long.rs:1: 501 lines without blanks and tests, over 500: is it one thing?"]);
        assert_eq!(problems(&[("long.rs", "a table")]), Vec::<String>::new());
        assert_eq!(
            problems(&[("long.rs", "a table"), ("fine.rs", "was a table")]),
            ["fine.rs:1: no longer too long: take it out of LONG_FILES"]
        );
    }

    #[test]
    fn a_long_function_needs_a_reason() {
        let source = format!("type F = fn(u8);\nfn short() {{}}\n\nfn long(f: fn()) {{\n{}}}\n", "f();\n".repeat(70));
        let tree = Tree::of(&[("a.rs", &source)]);
        let problems = |reasons| long_functions(&tree, reasons).iter().map(Problem::to_string).collect::<Vec<_>>();
        assert_eq!(problems(&[]), ["a.rs:4: `long` has 72 lines, over 70: does it do one thing?"]);
        assert_eq!(problems(&[("a.rs", "long", "one table")]), Vec::<String>::new());
    }
}
