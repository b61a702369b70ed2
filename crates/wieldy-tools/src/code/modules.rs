//! [`Modules`]: the files that an import means.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::path::{Component, Path, PathBuf};

use super::asking::{Question, nearness};
use super::language::Language;
use super::tree::{FileTree, Import};
use crate::index::FileId;

/// Maximum number of files that one module may mean.
const TARGETS_MAX: usize = 16;
/// Maximum number of re-exports between an import and the definition.
const STEPS_MAX: usize = 6;
/// Maximum number of files that are looked at on the way. Headers of C include each other without end.
const STOPS_MAX: usize = 64;

/// The modules of a workspace, for one question.
pub(super) struct Modules<'a> {
    question: &'a Question<'a>,
    /// The files by the last name of their module.
    by_name: OnceCell<HashMap<String, Vec<FileId>>>,
    /// The files by folder.
    by_folder: OnceCell<HashMap<PathBuf, Vec<FileId>>>,
}

/// A file on the way from an import to a definition.
struct Stop {
    file: FileId,
    /// The name that is looked for in it; `None` for any.
    name: Option<Box<str>>,
    /// The re-exports up to here, each with its line.
    steps: Vec<(FileId, u32)>,
}

impl<'a> Modules<'a> {
    /// Creates the modules of a question's view. Nothing is looked up before it is needed.
    pub(super) fn new(question: &'a Question<'a>) -> Self {
        Self { question, by_name: OnceCell::new(), by_folder: OnceCell::new() }
    }

    /// Returns the files that the module of an import means; none if it is not in the workspace.
    pub(super) fn of(&self, from: FileId, tree: &FileTree, import: &Import) -> Vec<FileId> {
        let mut found = match tree.language {
            Language::Python => self.python(from, import),
            Language::Rust => self.rust(from, import),
            Language::Javascript | Language::Typescript | Language::Tsx => self.javascript(from, import),
            Language::Go => self.go(import),
            Language::C | Language::Cpp | Language::Bash | Language::Ruby => self.by_path(from, tree.language, import),
            Language::Java | Language::Php | Language::CSharp => self.by_class(from, import),
        };
        found.truncate(TARGETS_MAX);
        found
    }

    /// Returns true if an import leads to one of these files, directly or by the re-exports of other modules.
    pub(super) fn leads_to(&self, from: FileId, tree: &FileTree, import: &Import, targets: &HashSet<FileId>) -> bool {
        self.way(from, tree, import, targets).is_some()
    }

    /// Returns the files between an import and one of these files, and `None` if the import does not lead there.
    pub(super) fn way(
        &self,
        from: FileId,
        tree: &FileTree,
        import: &Import,
        targets: &HashSet<FileId>,
    ) -> Option<Vec<(FileId, u32)>> {
        let mut seen = HashSet::from([from]);
        let name = Some(import.original.clone()).filter(|name| &**name != "*");
        let stop = |file| Stop { file, name: name.clone(), steps: Vec::new() };
        let mut todo: Vec<Stop> = self.of(from, tree, import).into_iter().map(stop).collect();
        while let Some(Stop { file, name, steps }) = todo.pop() {
            if targets.contains(&file) {
                return Some(steps);
            }
            if steps.len() >= STEPS_MAX || seen.len() >= STOPS_MAX || !seen.insert(file) {
                continue;
            }
            for (_, tree) in self.question.trees(&[file]) {
                let passes = |import: &&Import| {
                    import.reexport && (name.is_none() || &*import.local == "*" || Some(&import.local) == name.as_ref())
                };
                for next in tree.imports.iter().filter(passes).take(TARGETS_MAX) {
                    let steps: Vec<_> = steps.iter().copied().chain([(file, next.line)]).collect();
                    let name = if &*next.local == "*" { name.clone() } else { Some(next.original.clone()) };
                    let stop = |file| Stop { file, name: name.clone(), steps: steps.clone() };
                    todo.extend(self.of(file, &tree, next).into_iter().map(stop));
                }
            }
        }
        None
    }

    fn by_name(&self) -> &HashMap<String, Vec<FileId>> {
        self.by_name.get_or_init(|| {
            let mut all: HashMap<String, Vec<FileId>> = HashMap::new();
            for (id, entry) in self.question.view.files() {
                let names = super::asking::module_names(&entry.path);
                all.entry(names.last().cloned().unwrap_or_default()).or_default().push(id);
            }
            all
        })
    }

    fn in_folder(&self, folder: &Path) -> &[FileId] {
        let folders = self.by_folder.get_or_init(|| {
            let mut all: HashMap<PathBuf, Vec<FileId>> = HashMap::new();
            for (id, entry) in self.question.view.files() {
                all.entry(entry.path.parent().unwrap_or(Path::new("")).to_owned()).or_default().push(id);
            }
            all
        });
        folders.get(folder).map_or(&[], Vec::as_slice)
    }

    fn file(&self, path: &Path) -> Option<FileId> {
        self.question.view.find(&plain(path)?)
    }

    /// Returns the files whose module ends with these names, nearest to the importing file first.
    fn ending_with(&self, from: FileId, names: &[&str], endings: &[&str]) -> Vec<FileId> {
        let Some(last) = names.last() else { return Vec::new() };
        let own = self.question.path(from);
        let ends = |id: &&FileId| {
            let path = self.question.path(**id);
            let ending = path.extension().unwrap_or_default().to_string_lossy();
            let module = super::asking::module_names(path);
            endings.contains(&&*ending)
                && module.len() >= names.len()
                && module[module.len() - names.len()..].iter().zip(names).all(|(one, other)| one == other)
        };
        let found: Vec<FileId> = self.by_name().get(*last).into_iter().flatten().filter(ends).copied().collect();
        // Of several trees with the same names, the one that the importing file is in is meant.
        let near = found.iter().map(|id| nearness(own, self.question.path(*id))).max().unwrap_or(0);
        found.into_iter().filter(|id| nearness(own, self.question.path(*id)) == near).collect()
    }

    fn python(&self, from: FileId, import: &Import) -> Vec<FileId> {
        let module = &*import.module;
        let dots = module.len() - module.trim_start_matches('.').len();
        let names: Vec<&str> = module[dots..].split('.').filter(|name| !name.is_empty()).collect();
        let submodule = Some(&*import.original).filter(|name| !name.is_empty() && *name != "*");
        if dots > 0 {
            let Some(folder) = self.question.path(from).ancestors().nth(dots) else { return Vec::new() };
            let base = names.iter().fold(folder.to_owned(), |base, name| base.join(name));
            let mut found = self.python_module(&base);
            if let Some(name) = submodule {
                found.extend(self.python_module(&base.join(name)));
            }
            return found;
        }
        let endings = &["py", "pyi"];
        let mut found = self.ending_with(from, &names, endings);
        if let Some(name) = submodule {
            let longer: Vec<&str> = names.iter().copied().chain([name]).collect();
            found.extend(self.ending_with(from, &longer, endings));
        }
        found
    }

    fn python_module(&self, base: &Path) -> Vec<FileId> {
        let files = [
            base.with_extension("py"),
            base.join("__init__.py"),
            base.with_extension("pyi"),
            base.join("__init__.pyi"),
        ];
        files.iter().filter_map(|file| self.file(file)).collect()
    }

    /// Returns the file of a module, or of the longest part of its path that is a file: the rest are modules and
    /// types inside.
    fn rust(&self, from: FileId, import: &Import) -> Vec<FileId> {
        let own = self.question.path(from);
        let mut names: Vec<&str> = import.module.split("::").filter(|name| !name.is_empty()).collect();
        // `use name;` and `use name as other;` name a module or a crate by themselves.
        names.push(&import.original);
        names.retain(|name| !name.is_empty() && *name != "*");
        let (root, below) = crate_of(own);
        let first = names.first().copied().unwrap_or_default();
        let base: PathBuf = match first {
            "crate" => root.clone(),
            "self" | "super" => {
                let ups = names.iter().take_while(|name| **name == "super").count();
                let kept = below.len().saturating_sub(ups);
                below[..kept].iter().fold(root.clone(), |base, name| base.join(name))
            }
            _ => {
                let own_module = below.iter().fold(root.clone(), |base, name| base.join(name));
                if self.rust_module(&own_module.join(first)).is_some() || self.rust_module(&root.join(first)).is_some()
                {
                    let here = self.rust_module(&own_module.join(first)).is_some();
                    if here { own_module } else { root.clone() }
                } else {
                    return self.rust_crate(own, first).map_or(Vec::new(), |root| self.rust_file(&root, &names[1..]));
                }
            }
        };
        let skipped = names.iter().take_while(|name| matches!(**name, "crate" | "self" | "super")).count();
        self.rust_file(&base, &names[skipped..])
    }

    fn rust_file(&self, base: &Path, names: &[&str]) -> Vec<FileId> {
        for kept in (0..=names.len()).rev() {
            let path = names[..kept].iter().fold(base.to_owned(), |base, name| base.join(name));
            if let Some(file) = self.rust_module(&path) {
                return vec![file];
            }
        }
        Vec::new()
    }

    fn rust_module(&self, path: &Path) -> Option<FileId> {
        let files = [path.with_extension("rs"), path.join("mod.rs"), path.join("lib.rs"), path.join("main.rs")];
        files.iter().find_map(|file| self.file(file))
    }

    /// Returns the source folder of another crate of the workspace, by the name of its folder.
    fn rust_crate(&self, own: &Path, name: &str) -> Option<PathBuf> {
        let roots = self.by_name().get("src").into_iter().flatten().map(|id| self.question.path(*id));
        let named =
            roots.filter(|path| path.ends_with("src/lib.rs")).filter_map(|path| path.parent()).filter(|source| {
                let folder = source.parent().and_then(|folder| folder.file_name()).unwrap_or_default();
                folder.to_string_lossy().replace('-', "_") == name
            });
        named.max_by_key(|source| nearness(own, source)).map(Path::to_owned)
    }

    fn javascript(&self, from: FileId, import: &Import) -> Vec<FileId> {
        if !import.module.starts_with('.') {
            return Vec::new();
        }
        let Some(folder) = self.question.path(from).parent() else { return Vec::new() };
        let base = folder.join(&*import.module);
        let stem = match base.extension().and_then(|ending| ending.to_str()) {
            Some("js" | "jsx" | "mjs" | "cjs") => base.with_extension(""),
            _ => base.clone(),
        };
        let endings = ["ts", "tsx", "d.ts", "js", "jsx", "mjs", "cjs", "mts"];
        let with = |base: &Path, ending: &str| PathBuf::from(format!("{}.{ending}", base.display()));
        let direct = endings.iter().map(|ending| with(&stem, ending));
        let index = endings.iter().map(|ending| base.join(format!("index.{ending}")));
        [base.clone()].into_iter().chain(direct).chain(index).filter_map(|path| self.file(&path)).take(1).collect()
    }

    /// Returns the files of the folder that ends an import path, the longest that there is.
    fn go(&self, import: &Import) -> Vec<FileId> {
        let parts: Vec<&str> = import.module.split('/').collect();
        for skipped in 0..parts.len() {
            let folder: PathBuf = parts[skipped..].iter().collect();
            let files = self.in_folder(&folder);
            let files: Vec<FileId> = files
                .iter()
                .copied()
                .filter(|id| self.question.path(*id).extension().is_some_and(|ending| ending == "go"))
                .collect();
            if !files.is_empty() {
                return files;
            }
        }
        Vec::new()
    }

    fn by_path(&self, from: FileId, language: Language, import: &Import) -> Vec<FileId> {
        let module = if language == Language::Ruby && !import.module.ends_with(".rb") {
            format!("{}.rb", import.module)
        } else {
            import.module.to_string()
        };
        let folder = self.question.path(from).parent().unwrap_or(Path::new(""));
        if let Some(file) = self.file(&folder.join(&module)) {
            return vec![file];
        }
        let Some(wanted) = plain(Path::new(&module)) else { return Vec::new() };
        let names = super::asking::module_names(&wanted);
        let ends = |id: &FileId| self.question.path(*id).ends_with(&wanted);
        match names.last() {
            Some(last) => {
                self.by_name().get(last).into_iter().flatten().copied().filter(ends).take(TARGETS_MAX).collect()
            }
            None => Vec::new(),
        }
    }

    /// Returns the files that are named like the imported class.
    fn by_class(&self, from: FileId, import: &Import) -> Vec<FileId> {
        if matches!(&*import.original, "*" | "") {
            return Vec::new();
        }
        let own = self.question.path(from).extension().unwrap_or_default().to_string_lossy();
        self.ending_with(from, &[&import.original], &[&own])
    }
}

/// Returns the source folder of the crate that a Rust file is in, and the names of its module below.
fn crate_of(path: &Path) -> (PathBuf, Vec<String>) {
    let folder = path.ancestors().find(|above| above.file_name().is_some_and(|name| name == "src"));
    let root = folder.or_else(|| path.parent()).unwrap_or(Path::new("")).to_owned();
    let below = path.strip_prefix(&root).unwrap_or(path).with_extension("");
    let mut names: Vec<String> =
        below.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
    if matches!(names.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        names.pop();
    }
    (root, names)
}

/// Resolves `.` and `..` in a path. Returns `None` if it leads outside.
fn plain(path: &Path) -> Option<PathBuf> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                if !plain.pop() {
                    return None;
                }
            }
            Component::Normal(name) => plain.push(name),
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(plain)
}
