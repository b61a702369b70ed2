//! Unified diffs of changed files, bounded in size and in the time they take.

use std::time::Duration;

use similar::TextDiff;

use super::text;

/// Maximum size of a text that is compared. Beyond it a diff helps no reader, and would take long.
const TEXT_BYTES_MAX: usize = 1024 * 1024;
const DIFF_BYTES_MAX: usize = 16 * 1024;
const TIME_MAX: Duration = Duration::from_millis(250);

/// Returns the changes from `old` (`None` for a new file) to `new`, in the form of `diff -u`; empty without changes.
pub(crate) fn unified(path: &str, old: Option<&[u8]>, new: &[u8]) -> String {
    let before = old.unwrap_or_default();
    if before.len().max(new.len()) > TEXT_BYTES_MAX {
        return "[too large for a diff]\n".to_owned();
    }
    let header = if old.is_some() { path } else { "/dev/null" };
    between((header, before), (path, new))
}

/// Returns the changes from one named text to another, in the form of `diff -u`. The caller bounds both texts.
pub(crate) fn between((old_name, old): (&str, &[u8]), (new_name, new): (&str, &[u8])) -> String {
    let (Ok(before), Ok(after)) = (text::decode(old, None), text::decode(new, None)) else {
        return "[binary content]\n".to_owned();
    };
    let diff = TextDiff::configure().timeout(TIME_MAX).diff_lines(&*before.text, &*after.text);
    bounded(diff.unified_diff().header(old_name, new_name).to_string())
}

fn bounded(mut diff: String) -> String {
    if diff.len() > DIFF_BYTES_MAX {
        let head = text::cut(&diff, DIFF_BYTES_MAX);
        let end = head.rfind('\n').map_or(head.len(), |at| at + 1);
        let left = diff[end..].lines().count();
        diff.truncate(end);
        if !diff.ends_with('\n') {
            diff.push('\n');
        }
        diff.push_str(&format!("[{left} more lines of the diff]\n"));
    }
    diff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_shown_with_its_surroundings() {
        let diff = unified("a.txt", Some(b"1\n2\n3\n4\n5\n6\n"), b"1\n2\n3\n4\nfive\n6");
        insta::assert_snapshot!(diff, @r"
        --- a.txt
        +++ a.txt
        @@ -2,5 +2,5 @@
         2
         3
         4
        -5
        -6
        +five
        +6
        \ No newline at end of file
        ");
        assert_eq!(unified("a.txt", None, b"x\n"), "--- /dev/null\n+++ a.txt\n@@ -0,0 +1 @@\n+x\n");
        assert_eq!(unified("a.txt", Some(b"x"), b"x"), "");
        assert_eq!(unified("a.txt", Some(b"x"), b"\0"), "[binary content]\n");
    }

    #[test]
    fn a_large_diff_is_cut_after_a_line() {
        let many: String = (0..10_000).map(|number| format!("{number}\n")).collect();
        let diff = unified("a.txt", None, many.as_bytes());
        assert!(diff.len() < DIFF_BYTES_MAX + 100 && diff.ends_with(" more lines of the diff]\n"), "{}", diff.len());
        let shown = diff.lines().count() - 4;
        assert!(diff.ends_with(&format!("[{} more lines of the diff]\n", 10_000 - shown)));
        let one = unified("a.txt", None, "x".repeat(50_000).as_bytes());
        assert!(one.len() < DIFF_BYTES_MAX + 100, "a single line is cut too");
    }
}
