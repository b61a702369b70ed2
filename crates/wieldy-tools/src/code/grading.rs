//! Grading: how sure it is that an identifier refers to a definition.
//!
//! Nothing here knows types. A reference is *exact* if the text proves it: the definition's own file, an import that
//! leads to it, the name of its type or module before it. It is *likely* if no other definition has the name, and
//! goes by the *name* alone otherwise.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::asking::Question;
use super::definition::Found;
use super::language::Language;
use super::modules::Modules;
use super::tree::{FileTree, Import, Kind, Occurrence, Use};
use crate::index::FileId;

/// The certainty of a reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum Confidence {
    /// The text proves it.
    Exact,
    /// No other definition has the name.
    Likely,
    /// Only the name is the same.
    Name,
}

impl Confidence {
    /// Returns its name in answers.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Likely => "likely",
            Self::Name => "name",
        }
    }
}

/// The definitions that references are wanted of, and the others of the same name.
pub(super) struct Targets {
    /// The files of the wanted definitions.
    files: HashSet<FileId>,
    /// The files of other definitions with the name.
    others: HashSet<FileId>,
    /// The innermost containers of the wanted definitions.
    containers: HashSet<String>,
    /// True if a wanted definition can be named without its container.
    is_bare: bool,
    /// True if no other definition has the name.
    is_only: bool,
    is_known: bool,
    /// The wanted definitions of each file, by the lines of the definitions around them, in which alone they are seen.
    local: Option<(FileId, u32, u32)>,
    folders: HashSet<std::path::PathBuf>,
}

impl Targets {
    /// Creates the targets from the wanted and all definitions of a name.
    pub(super) fn new(question: &Question<'_>, wanted: &[Found], all: &[Found]) -> Self {
        let files: HashSet<FileId> = wanted.iter().map(|one| one.id).collect();
        let is_wanted = |one: &Found| wanted.iter().any(|other| other.id == one.id && other.index == one.index);
        let others: Vec<&Found> = all.iter().filter(|one| !is_wanted(one)).collect();
        let innermost = |one: &Found| one.definition().container.as_deref().map(|path| last_name(path).to_owned());
        let containers: HashSet<String> = wanted.iter().filter_map(innermost).collect();
        let is_bare = wanted.iter().any(|one| {
            let parent = one.definition().parent.map(|parent| one.tree.definitions[parent as usize].kind);
            one.definition().container.is_none() || matches!(parent, Some(Kind::Module | Kind::Function | Kind::Method))
        });
        // A declaration and its definition are one thing, and so are the arms of an `if` that define the same.
        let key = |one: &Found| {
            (one.definition().container.clone(), one.definition().declared || one.tree.language == Language::C)
        };
        let kinds: HashSet<_> = all.iter().filter(|one| !one.definition().declared).map(key).collect();
        let places: HashSet<FileId> = all.iter().filter(|one| !one.definition().declared).map(|one| one.id).collect();
        let is_only = others.is_empty() && kinds.len() <= 1 && places.len() <= 1;
        let local = match wanted {
            [one] => one.definition().parent.map(|parent| &one.tree.definitions[parent as usize]).and_then(|around| {
                let inside = matches!(around.kind, Kind::Function | Kind::Method);
                inside.then_some((one.id, around.start_line, around.end_line))
            }),
            _ => None,
        };
        let folders =
            wanted.iter().filter_map(|one| question.path(one.id).parent()).map(std::path::Path::to_owned).collect();
        let others = others.into_iter().map(|one| one.id).filter(|id| !files.contains(id)).collect();
        Self { files, others, containers, is_bare, is_only, is_known: !wanted.is_empty(), local, folders }
    }
}

/// The grades of the references in one file.
pub(super) struct FileGrades<'a> {
    question: &'a Question<'a>,
    modules: &'a Modules<'a>,
    targets: &'a Targets,
    id: FileId,
    tree: &'a FileTree,
    /// The lead of each import of the name, by its local name.
    imports: HashMap<&'a str, Lead>,
    /// The lead of imports of all names of a module.
    glob: Option<Lead>,
    /// True if the file imports all names of a wanted definition's type: `use Kind::*`.
    has_members: bool,
    /// True if the file defines a wanted definition's type itself.
    has_container: bool,
}

/// The target of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lead {
    Wanted,
    Other,
    Unknown,
}

impl<'a> FileGrades<'a> {
    /// Follows the imports of a file that matter for the name.
    pub(super) fn new(
        question: &'a Question<'a>,
        modules: &'a Modules<'a>,
        targets: &'a Targets,
        name: &str,
        (id, tree): (FileId, &'a FileTree),
    ) -> Self {
        let mut grades = Self {
            question,
            modules,
            targets,
            id,
            tree,
            imports: HashMap::new(),
            glob: None,
            has_members: false,
            has_container: tree.definitions.iter().any(|one| targets.containers.contains(&*one.name)),
        };
        for import in &tree.imports {
            let is_of_name = *import.local == *name || *import.original == *name;
            if is_of_name || targets.containers.contains(&*import.local) {
                let lead = grades.lead(import);
                grades.imports.insert(&import.local, lead);
            } else if &*import.local == "*" && targets.containers.contains(last_name(&import.module)) {
                grades.has_members |= grades.lead(import) == Lead::Wanted;
            } else if &*import.local == "*" && !targets.files.contains(&id) && grades.glob != Some(Lead::Wanted) {
                let lead = grades.lead(import);
                grades.glob = Some(lead);
            }
        }
        grades
    }

    fn lead(&self, import: &Import) -> Lead {
        if self.modules.leads_to(self.id, self.tree, import, &self.targets.files) {
            Lead::Wanted
        } else if !self.targets.others.is_empty()
            && self.modules.leads_to(self.id, self.tree, import, &self.targets.others)
        {
            Lead::Other
        } else {
            Lead::Unknown
        }
    }

    /// Returns other names under which the file imports the wanted definition.
    pub(super) fn aliases(&self, name: &str) -> Vec<&'a str> {
        let renamed = |import: &&'a Import| *import.original == *name && *import.local != *name;
        let wanted = self.tree.imports.iter().filter(renamed).map(|import| &*import.local);
        wanted.filter(|local| self.imports.get(local) == Some(&Lead::Wanted)).collect()
    }

    /// Returns other names under which the file passes the wanted definition on.
    pub(super) fn passed_on(&self, name: &str) -> Vec<&'a str> {
        let aliases = self.aliases(name);
        let passes = |import: &&'a Import| import.reexport && aliases.contains(&&*import.local);
        self.tree.imports.iter().filter(passes).map(|import| &*import.local).collect()
    }

    /// Returns how sure it is that an occurrence is of a wanted definition, and `None` if it is of another one.
    pub(super) fn grade(&self, at: usize, name: &str) -> Option<Confidence> {
        let occurrence = &self.tree.occurrences[at];
        if !self.targets.is_known {
            return Some(Confidence::Name);
        }
        if let Some((file, first, last)) = self.targets.local {
            let inside = file == self.id && (first..=last).contains(&occurrence.line);
            if inside {
                return Some(Confidence::Exact);
            }
        }
        let lead = match (occurrence.kind, occurrence.member) {
            (Use::Import, _) => self.lead_of_statement(occurrence, name),
            (_, true) => self.lead_of_member(at),
            (_, false) => self.lead_of_bare(name),
        };
        match lead {
            Lead::Wanted => Some(Confidence::Exact),
            Lead::Other => None,
            Lead::Unknown if self.targets.is_only => Some(Confidence::Likely),
            Lead::Unknown => Some(Confidence::Name),
        }
    }

    fn lead_of_statement(&self, occurrence: &Occurrence, name: &str) -> Lead {
        let near =
            self.tree.imports.iter().filter(|import| {
                (*import.original == *name || *import.local == *name) && import.line == occurrence.line
            });
        let leads: Vec<Lead> = near.filter_map(|import| self.imports.get(&*import.local).copied()).collect();
        leads.iter().copied().find(|lead| *lead == Lead::Wanted).or(leads.first().copied()).unwrap_or(Lead::Unknown)
    }

    fn lead_of_bare(&self, name: &str) -> Lead {
        if let Some(lead) = self.imports.get(name) {
            return *lead;
        }
        let is_own = self.targets.files.contains(&self.id);
        if is_own && self.targets.is_bare && self.targets.local.is_none() {
            return Lead::Wanted;
        }
        if !self.targets.is_bare {
            return if self.has_members { Lead::Wanted } else { Lead::Unknown };
        }
        if self.targets.others.contains(&self.id) {
            let top = self.tree.definitions.iter().any(|one| *one.name == *name && one.container.is_none());
            return if top { Lead::Other } else { Lead::Unknown };
        }
        // The files of a package see each other's names.
        let by_folder = matches!(self.tree.language, Language::Go | Language::Java);
        let folder = self.question.path(self.id).parent();
        if by_folder && folder.is_some_and(|folder| self.targets.folders.contains(folder)) {
            return Lead::Wanted;
        }
        self.glob.filter(|lead| *lead == Lead::Wanted).unwrap_or(Lead::Unknown)
    }

    /// Grades `receiver.name` by its receiver.
    fn lead_of_member(&self, at: usize) -> Lead {
        let Some(receiver) = self.receiver(at) else { return Lead::Unknown };
        let within = self.tree.occurrences[at].within.map(|index| &self.tree.definitions[index as usize]);
        if matches!(receiver, "self" | "Self" | "this" | "cls") {
            let container = within.and_then(|within| within.container.as_deref()).map(last_name);
            let inside = container.is_some_and(|container| self.targets.containers.contains(container));
            return if inside && self.has_container { Lead::Wanted } else { Lead::Unknown };
        }
        if self.targets.containers.contains(receiver) {
            let known = self.has_container || self.imports.get(receiver) == Some(&Lead::Wanted);
            return if known { Lead::Wanted } else { Lead::Unknown };
        }
        if !self.targets.is_bare {
            return Lead::Unknown;
        }
        // A module before the name: `models.Form`, `walk::Frame`.
        let import = self.tree.imports.iter().find(|import| *import.local == *receiver);
        import.map_or(Lead::Unknown, |import| self.lead(import))
    }

    /// Returns the name right before a member.
    fn receiver(&self, at: usize) -> Option<&str> {
        let own = &self.tree.occurrences[at];
        let before = self.tree.occurrences[at.checked_sub(1)?];
        let name = &self.tree.names[before.name as usize];
        let gap = own.column.checked_sub(before.column + name.chars().count() as u32)?;
        (before.line == own.line && (1..=2).contains(&gap)).then_some(name)
    }
}

/// Returns the innermost name of a container.
pub(super) fn last_name(container: &str) -> &str {
    container.rsplit(['.', ':']).next().unwrap_or(container)
}
