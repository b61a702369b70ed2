//! Finds the traceback of a Python, Node or Rust program at the end of its output.

/// Maximum number of lines that may follow a traceback: a message of several lines, or a last word of a parent process.
const LINES_AFTER_MAX: usize = 10;
/// Maximum number of lines between an error's first line and its first frame.
const MESSAGE_LINES_MAX: usize = 10;

/// The first line of a Python traceback.
const PYTHON: &str = "Traceback (most recent call last):";
/// The lines between two tracebacks of one chain of Python exceptions.
const PYTHON_CHAIN: [&str; 2] = [
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
];

/// Returns the traceback that a program's output ends with, if there is one.
pub(super) fn traceback(output: &str) -> Option<&str> {
    let output = output.trim_end();
    let mut lines = Vec::new();
    let mut start = 0;
    for line in output.split_inclusive('\n') {
        lines.push((start, line.trim_end()));
        start += line.len();
    }
    let lines: Lines<'_> = &lines;
    // The last one to begin is the one that the program ended with.
    let first = [python(lines), node(lines), rust(lines)].into_iter().flatten().max()?;
    Some(&output[lines[first].0..])
}

/// The lines of a text, each with its position.
type Lines<'a> = &'a [(usize, &'a str)];

fn python(lines: Lines<'_>) -> Option<usize> {
    let begins = |line: &str| line.trim_start_matches([' ', '|', '+']).trim_start_matches("Exception Group ") == PYTHON;
    let last = lines.iter().rposition(|(_, line)| begins(line))?;
    let is_frame = |line: &str| line.starts_with([' ', '\t']);
    let frames = lines[last + 1..].iter().take_while(|(_, line)| is_frame(line)).count();
    if frames == 0 || lines.len() - (last + 1 + frames) > 1 + LINES_AFTER_MAX {
        return None;
    }
    // Go back over the exceptions that this one was raised from.
    let mut first = last;
    while let Some(link) = lines[..first].iter().rposition(|(_, line)| !line.is_empty())
        && PYTHON_CHAIN.contains(&lines[link].1)
        && let Some(earlier) = lines[..link].iter().rposition(|(_, line)| begins(line))
    {
        first = earlier;
    }
    Some(first)
}

fn node(lines: Lines<'_>) -> Option<usize> {
    let is_frame = |line: &str| line.starts_with("    at ");
    let last = lines.iter().rposition(|(_, line)| is_frame(line))?;
    // The properties of the error and Node's version may follow.
    if lines.len() - 1 - last > LINES_AFTER_MAX {
        return None;
    }
    let frames = lines[..=last].iter().rev().take_while(|(_, line)| is_frame(line)).count();
    let first_frame = last + 1 - frames;
    let is_named = |line: &str| {
        let name = line.trim_start_matches("Uncaught ").split([':', ' ', '[']).next().unwrap_or_default();
        name.ends_with("Error") || name.ends_with("Exception")
    };
    let above = lines[..first_frame].iter().enumerate().rev().take(MESSAGE_LINES_MAX);
    let mut first = above.clone().find(|(_, (_, line))| is_named(line)).map(|(place, _)| place)?;
    // Node prints the line of code first, and marks the place in it.
    let mark = lines[..first].iter().rposition(|(_, line)| !line.is_empty());
    if let Some(mark) = mark.filter(|mark| *mark >= 2 && lines[*mark].1.trim_matches(['^', ' ', '\t']).is_empty()) {
        first = mark - 2;
    }
    Some(first)
}

fn rust(lines: Lines<'_>) -> Option<usize> {
    let begins = |line: &str| line.starts_with("thread '") && line.contains(" panicked at ");
    let first = lines.iter().rposition(|(_, line)| begins(line))?;
    let after = &lines[first + 1..];
    // The message comes first, then a backtrace or a note on how to get one.
    let is_known = |line: &str| line.starts_with("note: ") || line == "stack backtrace:" || is_rust_frame(line);
    let known = after.iter().rposition(|(_, line)| is_known(line)).map_or(0, |last| last + 1);
    (after.len() - known <= LINES_AFTER_MAX).then_some(first)
}

/// Returns true for `   3: core::panicking::panic` and `             at src/main.rs:2:5`.
fn is_rust_frame(line: &str) -> bool {
    let text = line.trim_start();
    let number = text.split(':').next().unwrap_or_default();
    text.len() < line.len()
        && (text.starts_with("at ") || !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAINED: &str = "Traceback (most recent call last):\n  File \"a.py\", line 2, in f\n    1/0\nZeroDivisionError: division by zero\n\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n  File \"a.py\", line 4, in <module>\n    raise ValueError(\n    ...<2 lines>...\n    )\nValueError: no\nnot at all";
    const GROUP: &str = "  + Exception Group Traceback (most recent call last):\n  |   File \"a.py\", line 1, in <module>\n  | ExceptionGroup: two (1 sub-exception)\n  +-+---------------- 1 ----------------\n    | ValueError: 1\n    +------------------------------------";
    const NODE: &str = "/w/a.js:1\nfunction f(){ throw new TypeError(\"no\") }\n              ^\n\nTypeError: no\n    at f (/w/a.js:1:21)\n    at node:internal/main:3:4 {\n  code: 'E_NO'\n}\n\nNode.js v20.19.2";
    const RUST: &str = "thread 'main' (812) panicked at src/main.rs:2:5:\nindex out of bounds\nnote: run with `RUST_BACKTRACE=1` environment variable to display a backtrace";
    const RUST_LONG: &str = "thread 'main' panicked at src/main.rs:2:5:\nno\nstack backtrace:\n   0: rust_begin_unwind\n             at /rustc/library/std/src/panicking.rs:1:5\n   1: main::main\n             at ./src/main.rs:2:5\n   2: a\n   3: b\n   4: c\n   5: d\n   6: e\n   7: f\nnote: Some details are omitted, run with `RUST_BACKTRACE=full` for a verbose backtrace.";

    #[test]
    fn a_traceback_at_the_end_is_found_whole() {
        for trace in [CHAINED, GROUP, NODE, RUST, RUST_LONG] {
            assert_eq!(traceback(trace), Some(trace));
            let text = format!("warming up\n{RUST}\nmore: 1\n\n{trace}\n\n");
            assert_eq!(traceback(&text), Some(trace));
        }
    }

    #[test]
    fn a_traceback_that_the_program_survived_is_none_of_its_end() {
        for trace in [CHAINED, NODE, RUST, RUST_LONG] {
            let text = format!("{trace}\n{}", "goes on\n".repeat(12));
            assert_eq!(traceback(&text), None, "{trace}");
        }
    }

    #[test]
    fn other_text_is_no_traceback() {
        for text in ["", "\n", "error: no\n", "Traceback (most recent call last):", "    at home", "x\n    at home"] {
            assert_eq!(traceback(text), None, "{text:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_the_search_panic(
            parts in proptest::collection::vec(proptest::sample::select(vec![
                "é\n", "\n", "    at x\n", "Error: é\n", "^\n", PYTHON, "\n  File\n", "thread 'é' panicked at x\n", "   1: é\n",
                PYTHON_CHAIN[0], "\r\n",
            ]), 0..12)
        ) {
            let text = parts.concat();
            if let Some(found) = traceback(&text) {
                proptest::prop_assert!(text.trim_end().ends_with(found));
            }
        }
    }
}
