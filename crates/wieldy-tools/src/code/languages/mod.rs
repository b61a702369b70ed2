//! The twelve languages: one table of nodes each, and the functions for nodes that a table cannot describe.

use std::sync::OnceLock;

use super::language::Language;
use super::rules::{Rules, Table};

mod bash;
mod c;
mod csharp;
mod go;
mod java;
mod javascript;
mod php;
mod python;
mod ruby;
mod rust;

/// Returns the rules of a language, made at the first use.
pub(super) fn rules(language: Language) -> &'static Rules {
    static ALL: [OnceLock<Rules>; 13] = [const { OnceLock::new() }; 13];
    ALL[language as usize].get_or_init(|| {
        let (grammar, table): (tree_sitter::Language, &Table) = match language {
            Language::Rust => (tree_sitter_rust::LANGUAGE.into(), &rust::TABLE),
            Language::Python => (tree_sitter_python::LANGUAGE.into(), &python::TABLE),
            Language::Javascript => (tree_sitter_javascript::LANGUAGE.into(), &javascript::TABLE),
            Language::Typescript => (tree_sitter_typescript::LANGUAGE_TYPESCRIPT.into(), &javascript::TABLE),
            Language::Tsx => (tree_sitter_typescript::LANGUAGE_TSX.into(), &javascript::TABLE),
            Language::Go => (tree_sitter_go::LANGUAGE.into(), &go::TABLE),
            Language::Java => (tree_sitter_java::LANGUAGE.into(), &java::TABLE),
            Language::C => (tree_sitter_c::LANGUAGE.into(), &c::TABLE),
            Language::Cpp => (tree_sitter_cpp::LANGUAGE.into(), &c::TABLE),
            Language::Ruby => (tree_sitter_ruby::LANGUAGE.into(), &ruby::TABLE),
            Language::Php => (tree_sitter_php::LANGUAGE_PHP.into(), &php::TABLE),
            Language::CSharp => (tree_sitter_c_sharp::LANGUAGE.into(), &csharp::TABLE),
            Language::Bash => (tree_sitter_bash::LANGUAGE.into(), &bash::TABLE),
        };
        Rules::new(grammar, table)
    })
}
