//! [`FileTree`]: what one source file defines, imports and mentions.

use serde::{Deserialize, Serialize};

use super::language::Language;

/// The definitions, imports and identifiers of one file, in the order of the text. Lines and columns count from 1,
/// columns in characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileTree {
    pub(crate) language: Language,
    /// The number of lines.
    pub(crate) lines: u32,
    /// True if the grammar does not understand all of the file. The rest is here all the same.
    pub(crate) broken: bool,
    /// The lines of the documentation of the file itself.
    pub(crate) doc: Option<(u32, u32)>,
    pub(crate) definitions: Vec<Definition>,
    pub(crate) imports: Vec<Import>,
    /// The names of the occurrences, each once.
    pub(crate) names: Vec<Box<str>>,
    pub(crate) occurrences: Vec<Occurrence>,
}

/// A definition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Definition {
    pub(crate) name: Box<str>,
    pub(crate) kind: Kind,
    /// The names of the definitions around it, joined as the language joins them: `Model.Meta`, `walk::Frame`.
    pub(crate) container: Option<Box<str>>,
    /// The index of the definition around it. Methods of an `impl` block have a container but no definition around.
    pub(crate) parent: Option<u32>,
    /// The place of the name.
    pub(crate) line: u32,
    pub(crate) column: u32,
    /// The lines of the whole definition, without attributes and decorators.
    pub(crate) start_line: u32,
    pub(crate) end_line: u32,
    /// The text up to the body, in one line.
    pub(crate) signature: Box<str>,
    pub(crate) visibility: Visibility,
    /// The lines of its documentation.
    pub(crate) doc: Option<(u32, u32)>,
    /// True for a declaration without a body, such as a prototype in C.
    pub(crate) declared: bool,
}

/// A kind of definitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Function,
    Method,
    Class,
    Struct,
    Enum,
    Variant,
    /// A trait or an interface.
    Trait,
    Field,
    Const,
    Macro,
    Module,
    Type,
    Variable,
}

impl Kind {
    /// Returns its name in answers.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Function => "function",
            Self::Method => "method",
            Self::Class => "class",
            Self::Struct => "struct",
            Self::Enum => "enum",
            Self::Variant => "variant",
            Self::Trait => "trait",
            Self::Field => "field",
            Self::Const => "const",
            Self::Macro => "macro",
            Self::Module => "module",
            Self::Type => "type",
            Self::Variable => "variable",
        }
    }
}

/// The reach of a definition, as its text says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Visibility {
    Public,
    /// Visible in the package, the crate, the module or to subclasses.
    Internal,
    Private,
}

/// A name that a file takes from another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Import {
    /// The name in this file; `*` for all names of the module.
    pub(crate) local: Box<str>,
    /// The module, as the file writes it.
    pub(crate) module: Box<str>,
    /// The name in the module; empty if the module itself is imported, `*` for all.
    pub(crate) original: Box<str>,
    /// True if other files can take the name from this file.
    pub(crate) reexport: bool,
    pub(crate) line: u32,
}

/// An identifier that refers to something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Occurrence {
    /// The index of the name in [`FileTree::names`].
    pub(crate) name: u32,
    pub(crate) line: u32,
    pub(crate) column: u32,
    pub(crate) kind: Use,
    /// True after a `.`, `->` or `::`: the identifier is a member of something else.
    pub(crate) member: bool,
    /// The index of the definition around it.
    pub(crate) within: Option<u32>,
}

/// A kind of references.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Use {
    Call,
    Import,
    Type,
    Inherit,
    Read,
    Write,
}

impl Use {
    /// Returns its name in answers.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Call => "call",
            Self::Import => "import",
            Self::Type => "type",
            Self::Inherit => "inherit",
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The reason why a file has no tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum NoTree {
    /// Parsing took longer than its budget.
    Slow,
    /// The file is larger than [`super::parse::FILE_BYTES_MAX`].
    Large,
    /// The call was stopped.
    Stopped,
}
