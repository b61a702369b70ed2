//! The places of files in a project: tests, foreign code, and languages by file ending.

use std::path::Path;

/// The languages that have a name, each with the endings of its files.
const LANGUAGES: [(&str, &[&str]); 13] = [
    ("bash", &["sh", "bash"]),
    ("c", &["c", "h"]),
    ("c_sharp", &["cs", "csx"]),
    ("cpp", &["cc", "cpp", "cxx", "c++", "hpp", "hh", "hxx", "h++", "ipp", "tpp", "h"]),
    ("go", &["go"]),
    ("java", &["java"]),
    ("javascript", &["js", "jsx", "mjs", "cjs"]),
    ("php", &["php", "phtml"]),
    ("python", &["py", "pyi", "pyw"]),
    ("ruby", &["rb", "rake", "gemspec", "ru"]),
    ("rust", &["rs"]),
    ("tsx", &["tsx"]),
    ("typescript", &["ts", "mts", "cts", "tsx"]),
];

/// Folders of tests.
const TEST_FOLDERS: [&str; 11] =
    ["__tests__", "e2e", "fixtures", "spec", "specs", "t", "test", "test_data", "testdata", "testing", "tests"];
/// Folders of code that others wrote or that programs made.
const FOREIGN_FOLDERS: [&str; 9] = [
    "bower_components",
    "dist",
    "extern",
    "external",
    "node_modules",
    "site-packages",
    "third_party",
    "vendor",
    "vendored",
];

/// Returns the endings of a language's files. Returns `None` if no language has this name.
pub(crate) fn endings_of(language: &str) -> Option<&'static [&'static str]> {
    let name = match language.to_ascii_lowercase().as_str() {
        "sh" | "shell" => "bash".to_owned(),
        "c++" => "cpp".to_owned(),
        "c#" | "csharp" | "c-sharp" => "c_sharp".to_owned(),
        "golang" => "go".to_owned(),
        name => name.to_owned(),
    };
    LANGUAGES.iter().find(|(known, _)| *known == name).map(|(_, endings)| *endings)
}

/// Returns the names of all languages.
pub(crate) fn languages() -> impl Iterator<Item = &'static str> {
    LANGUAGES.iter().map(|(name, _)| *name)
}

/// Returns true if a file of this path is a test, or data of one.
pub(crate) fn is_test(path: &Path) -> bool {
    let is_folder = path.parent().into_iter().flat_map(Path::iter).any(|name| is_among(&TEST_FOLDERS, name));
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let lower = stem.to_ascii_lowercase();
    is_folder
        || matches!(lower.as_str(), "test" | "tests" | "conftest")
        || lower.starts_with("test_")
        || ["_test", "_tests", "_spec", ".test", ".spec"].iter().any(|end| lower.ends_with(end))
        || ["Test", "Tests", "IT"].iter().any(|end| stem.len() > end.len() && is_camel_end(stem, end))
}

/// Returns true if a file of this path is code that others wrote or that programs made.
pub(crate) fn is_foreign(path: &Path) -> bool {
    path.parent().into_iter().flat_map(Path::iter).any(|name| is_among(&FOREIGN_FOLDERS, name))
}

fn is_among(names: &[&str], name: &std::ffi::OsStr) -> bool {
    name.to_str().is_some_and(|name| names.contains(&name))
}

/// Returns true for names such as `ParserTest`, and not for `LATEST`.
fn is_camel_end(stem: &str, end: &str) -> bool {
    stem.strip_suffix(end)
        .is_some_and(|rest| rest.ends_with(|last: char| last.is_ascii_lowercase() || last.is_numeric()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_known_by_their_folders_and_names() {
        for path in
            ["tests/a.rs", "a/__tests__/b.js", "test_a.py", "a_test.go", "a.spec.ts", "x/ParserTest.java", "tests.rs"]
        {
            assert!(is_test(Path::new(path)), "{path}");
        }
        for path in ["src/a.rs", "latest.py", "LATEST.md", "contest/a.rs", "Test.java.txt", "attest.go", "testing.py"] {
            assert!(!is_test(Path::new(path)), "{path}");
        }
        assert!(is_foreign(Path::new("a/vendor/b.go")) && !is_foreign(Path::new("vendor.rs")));
    }

    #[test]
    fn languages_are_known_by_their_names() {
        assert_eq!(endings_of("Rust"), Some(&["rs"][..]));
        assert_eq!((endings_of("c#"), endings_of("cobol")), (Some(&["cs", "csx"][..]), None));
    }
}
