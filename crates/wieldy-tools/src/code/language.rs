//! [`Language`]: the languages with a grammar, and how a file's language is found.

use std::path::Path;

use serde::{Deserialize, Serialize};

/// Number of bytes that are looked at to tell C from C++ and to read a `#!` line.
const HEAD_BYTES: usize = 16 * 1024;

/// A language whose files have syntax trees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Language {
    Rust,
    Python,
    Javascript,
    Typescript,
    Tsx,
    Go,
    Java,
    C,
    Cpp,
    Ruby,
    Php,
    CSharp,
    Bash,
}

/// Each language with its name and the endings of its files.
const LANGUAGES: [(Language, &str, &[&str]); 13] = [
    (Language::Rust, "rust", &["rs"]),
    (Language::Python, "python", &["py", "pyi", "pyw"]),
    (Language::Javascript, "javascript", &["js", "jsx", "mjs", "cjs"]),
    (Language::Typescript, "typescript", &["ts", "mts", "cts"]),
    (Language::Tsx, "tsx", &["tsx"]),
    (Language::Go, "go", &["go"]),
    (Language::Java, "java", &["java"]),
    (Language::C, "c", &["c"]),
    (Language::Cpp, "cpp", &["cc", "cpp", "cxx", "c++", "hpp", "hh", "hxx", "h++", "ipp", "tpp"]),
    (Language::Ruby, "ruby", &["rb", "rake", "gemspec", "ru"]),
    (Language::Php, "php", &["php", "phtml"]),
    (Language::CSharp, "c_sharp", &["cs", "csx"]),
    (Language::Bash, "bash", &["sh", "bash"]),
];

impl Language {
    /// Returns the language of a file by its path and, where the path is not enough, by the beginning of its content.
    pub(crate) fn of(path: &Path, head: &[u8]) -> Option<Self> {
        let Some(ending) = path.extension().and_then(|ending| ending.to_str()) else {
            return Self::of_script(head);
        };
        let ending = ending.to_ascii_lowercase();
        if ending == "h" {
            return Some(if looks_like_cpp(&head[..head.len().min(HEAD_BYTES)]) { Self::Cpp } else { Self::C });
        }
        LANGUAGES.iter().find(|(.., endings)| endings.contains(&ending.as_str())).map(|(language, ..)| *language)
    }

    /// Returns the language by the program that a `#!` line names.
    fn of_script(head: &[u8]) -> Option<Self> {
        let line = head.strip_prefix(b"#!")?;
        let line = &line[..line.len().min(256)];
        let line = std::str::from_utf8(line.split(|byte| *byte == b'\n').next()?).ok()?;
        let mut words = line.split_whitespace().map(|word| word.rsplit('/').next().unwrap_or(word));
        let program = words.find(|word| *word != "env" && !word.starts_with('-') && !word.contains('='))?;
        match program.trim_end_matches(|letter: char| letter.is_ascii_digit() || letter == '.') {
            "python" | "pypy" => Some(Self::Python),
            "bash" | "sh" | "dash" | "ksh" => Some(Self::Bash),
            "ruby" => Some(Self::Ruby),
            "php" => Some(Self::Php),
            "node" => Some(Self::Javascript),
            _ => None,
        }
    }

    /// Returns its name in answers.
    pub(crate) fn name(self) -> &'static str {
        LANGUAGES[self as usize].1
    }

    /// Returns the text between the names of a container and its member.
    pub(crate) fn separator(self) -> &'static str {
        match self {
            Self::Rust | Self::Cpp | Self::Php => "::",
            _ => ".",
        }
    }
}

/// Returns true if a header has words that C does not have.
fn looks_like_cpp(head: &[u8]) -> bool {
    let text = String::from_utf8_lossy(head);
    text.lines().any(|line| {
        let line = line.trim_start();
        ["class ", "namespace ", "template<", "template <", "public:", "private:", "protected:", "using "]
            .iter()
            .any(|word| line.starts_with(word))
            || line.starts_with("#include <") && line.contains("string>")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_language_is_found_by_ending_program_and_content() {
        let of = |path: &str, head: &str| Language::of(Path::new(path), head.as_bytes()).map(Language::name);
        for (path, head, language) in [
            ("a/b.rs", "", Some("rust")),
            ("a.PY", "", Some("python")),
            ("run", "#!/usr/bin/env -S FOO=1 python3.11 -u\n", Some("python")),
            ("run", "#!/bin/sh\n", Some("bash")),
            ("run", "", None),
            ("a.h", "int f(void);\n", Some("c")),
            ("a.h", "#pragma once\nnamespace a {\n}\n", Some("cpp")),
            ("a.txt", "#!/bin/sh\n", None),
            ("x.tsx", "", Some("tsx")),
        ] {
            assert_eq!(of(path, head), language, "{path}");
        }
    }

    #[test]
    fn each_language_stands_at_its_own_place_in_the_table() {
        for (place, (language, name, _)) in LANGUAGES.iter().enumerate() {
            assert_eq!((*language as usize, language.name()), (place, *name));
        }
    }
}
