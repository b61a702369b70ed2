//! [`Vault`]: one folder of notes, and the only way in which the vault tools open its files.
//!
//! The vault of a folder inside the workspace shares the workspace's handle, read marks and locks, so that `Edit` and
//! `vault_write` know of each other. Names that begin with a dot are no part of a vault.

use std::borrow::Cow;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use blake3::Hash;
use cap_std::fs::Metadata;
use wieldy_core::name::{did_you_mean, near_misses};
use wieldy_core::secrets::{HIDDEN, PROTECTED};
use wieldy_core::{FileRules, Run};

use super::graph::Graph;
use super::markdown::NoteFacts;
use super::names::{is_note, last, stem, workspace_path};
use super::projects::VaultOptions;
use crate::files::{
    FileError, FileLocation, GivenPath, Guard, LastLink, MissingFolders, Workspace, WorkspaceError, read_whole,
};
use crate::index::{Ask, Index, IndexOptions, IndexState, View};

/// Maximum number of names in a path of a vault.
const DEPTH_MAX: usize = 64;

/// A folder of notes.
pub(crate) struct Vault {
    /// The workspace through which files are opened and written.
    pub(crate) workspace: Arc<Workspace>,
    /// The vault's folder in that workspace; empty for the root.
    pub(crate) folder: String,
    /// The vault's folder as a root of its own, for the index.
    pub(crate) root: Arc<Workspace>,
    /// The folder of the executor's own workspace, where relative rules start.
    rules_start: PathBuf,
    /// Absolute paths that are hidden besides those of the rules.
    hidden: Vec<PathBuf>,
    index: Index<NoteFacts>,
    graph: Mutex<Option<Arc<Graph>>>,
    /// The folder for unfinished moves.
    pub(crate) state: Option<PathBuf>,
}

/// A file of a vault that was read.
pub(crate) struct ReadFile {
    pub(crate) content: Vec<u8>,
    pub(crate) hash: Hash,
    pub(crate) metadata: Metadata,
    /// The name of the file in read marks.
    pub(crate) key: String,
}

impl Vault {
    pub(crate) fn open(main: &Arc<Workspace>, folder: &Path, options: &VaultOptions) -> Result<Self, WorkspaceError> {
        let state = options.state.as_deref();
        let root = Arc::new(Workspace::open(folder)?);
        let inside = root.path().strip_prefix(main.path()).ok().and_then(Path::to_str).map(str::to_owned);
        let (workspace, folder) = match inside {
            Some(folder) => (main.clone(), folder),
            None => (root.clone(), String::new()),
        };
        let index_options = IndexOptions { ignored: true, ..IndexOptions::new("vault") };
        let index = Index::new(root.clone(), state.map(Path::to_owned), index_options);
        let (rules_start, state) = (main.path().to_owned(), state.map(Path::to_owned));
        let hidden = options.hidden.clone();
        Ok(Self { workspace, folder, root, rules_start, hidden, index, graph: Mutex::default(), state })
    }

    /// Returns the rules of a run for the vault's own root: those that start at the workspace hold for the same files.
    fn rules_of_root<'a>(&self, rules: &'a FileRules) -> Cow<'a, FileRules> {
        if self.root.path() == self.rules_start {
            return Cow::Borrowed(rules);
        }
        let mut rules = rules.clone();
        for paths in [&mut rules.hidden, &mut rules.protected, &mut rules.own] {
            let whole: Vec<PathBuf> =
                paths.iter().filter(|path| path.is_relative()).map(|path| self.rules_start.join(path)).collect();
            paths.extend(whole);
        }
        rules.hidden.extend(self.hidden.iter().cloned());
        // The workspace of this executor may lie in the vault.
        rules.hidden.extend(HIDDEN.iter().map(|name| self.rules_start.join(name)));
        rules.protected.extend(PROTECTED.iter().map(|name| self.rules_start.join(name.path)));
        Cow::Owned(rules)
    }

    /// Returns the rules of a run for the workspace through which files are opened.
    pub(crate) fn rules<'a>(&self, run: &'a Run) -> Cow<'a, FileRules> {
        let rules = &*run.confinement().files;
        if Arc::ptr_eq(&self.workspace, &self.root) { self.rules_of_root(rules) } else { Cow::Borrowed(rules) }
    }

    /// Looks at all files, and returns their present state.
    pub(crate) fn look<T>(
        &self,
        run: &Run,
        then: impl FnOnce(&View<NoteFacts>, &Graph, &Ask<'_>) -> T,
    ) -> Result<(T, IndexState), FileError> {
        let rules = self.rules_of_root(&run.confinement().files);
        let guard = self.root.guard(&rules);
        let ask = Ask::of_run(&guard, run);
        let view = self.index.refresh(&ask)?;
        let held = self.graph.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let graph = match held.filter(|graph| graph.generation == view.generation()) {
            Some(graph) => graph,
            None => {
                let graph = Arc::new(Graph::of(&view, &ask));
                if view.state().complete {
                    *self.graph.lock().unwrap_or_else(PoisonError::into_inner) = Some(graph.clone());
                }
                graph
            }
        };
        let result = then(&view, &graph, &ask);
        self.index.keep(&ask);
        if run.stop().is_cancelled() {
            return Err(FileError::Stopped);
        }
        Ok((result, view.state()))
    }

    /// Checks a path of the vault, and returns it in its plain form; empty for the vault's folder.
    pub(crate) fn plain(&self, text: &str) -> Result<String, FileError> {
        let given = self.root.given(text)?;
        let mut names = Vec::new();
        for part in given.relative().components() {
            match part {
                Component::CurDir => {}
                Component::Normal(name) => names.push(name.to_string_lossy()),
                _ => return Err(FileError::Outside { path: text.to_owned() }),
            }
        }
        if let Some(name) = names.iter().find(|name| name.starts_with('.')) {
            return Err(FileError::refused(
                format!("`{name}` begins with a dot, and such names are no part of the vault"),
                "give the path of a note in the vault, such as `folder/note.md`",
            ));
        }
        // Notes in deeper folders would be in no index.
        if names.len() > DEPTH_MAX {
            return Err(FileError::refused(
                format!("the path has {} names, and in a vault it may have at most {DEPTH_MAX}", names.len()),
                "give a path with fewer folders",
            ));
        }
        Ok(names.join("/"))
    }

    /// Returns a plain path as one of the workspace.
    pub(crate) fn given(&self, path: &str) -> Result<GivenPath, FileError> {
        self.workspace.given(&workspace_path(&self.folder, path))
    }

    /// Returns a path of the workspace as one of the vault, or refuses it if it is outside: a symbolic link can lead to
    /// another folder of the workspace.
    fn inner(&self, path: &Path, shown: &str) -> Result<String, FileError> {
        let inner = path.strip_prefix(&self.folder).ok();
        let is_shown = |inner: &&Path| {
            inner
                .components()
                .all(|part| matches!(part, Component::Normal(name) if !name.as_encoded_bytes().starts_with(b".")))
        };
        let inner = inner.filter(is_shown).ok_or_else(|| FileError::Outside { path: shown.to_owned() })?;
        Ok(inner.to_string_lossy().into_owned())
    }

    /// Reads a file by its plain path.
    pub(crate) fn read(&self, guard: &Guard<'_>, path: &str) -> Result<ReadFile, FileError> {
        let given = self.given(path)?;
        let (mut file, metadata) = self.workspace.open_file(&given, guard)?;
        let key = self.workspace.key(&given)?;
        self.inner(Path::new(&key), path)?;
        // The path may lead elsewhere by now, so the open file counts.
        if let Some(real) = self.workspace.current_path(&file) {
            self.inner(&real, path)?;
        }
        let content = read_whole(&mut file, path)?;
        Ok(ReadFile { hash: blake3::hash(&content), content, metadata, key })
    }

    /// Refuses a path that leads out of the vault, or at which nothing may be made, changed or removed.
    pub(crate) fn check_place(&self, guard: &Guard<'_>, path: &str) -> Result<(), FileError> {
        for name in self.workspace.names_of(&workspace_path(&self.folder, path)) {
            self.inner(Path::new(&name), path)?;
            guard.check_changed(Path::new(&name))?;
        }
        Ok(())
    }

    /// Finds the place of a file that is written, by its plain path.
    pub(crate) fn locate(
        &self,
        guard: &Guard<'_>,
        path: &str,
        folders: MissingFolders,
    ) -> Result<FileLocation, FileError> {
        let given = self.given(path)?;
        // This check comes before folders are made.
        self.check_place(guard, path)?;
        let place = self.workspace.locate(&given, folders, LastLink::Target, guard)?;
        self.inner(Path::new(&place.key), path)?;
        if let Some(real) = self.workspace.current_path(&place.folder) {
            self.inner(&real.join(&place.name), path)?;
        }
        Ok(place)
    }

    /// Records the content that a session sees now, and reports if it saw another one before.
    pub(crate) fn note_seen(&self, run: &Run, project: &str, key: &str, hash: Hash) -> Option<Hash> {
        let seen = self.workspace.reads.note(run.caller(), key, hash).filter(|seen| *seen != hash)?;
        run.source_stale_in(Some(project), key, &seen.to_string(), Some(&hash.to_string()));
        Some(seen)
    }

    /// Refuses to change a file that the session saw with another content.
    pub(crate) fn refuse_stale(&self, run: &Run, project: &str, key: &str, hash: Hash) -> Result<(), FileError> {
        match self.workspace.reads.seen(run.caller(), key) {
            Some(seen) if seen != hash => {
                run.source_stale_in(Some(project), key, &seen.to_string(), Some(&hash.to_string()));
                Err(FileError::Stale { path: key.to_owned() })
            }
            _ => Ok(()),
        }
    }
}

/// Returns the error for a note that is not there, with similar names.
pub(crate) fn missing(graph: &Graph, wanted: &str) -> FileError {
    let name = last(stem(wanted));
    let names: Vec<&str> = graph.names.stems().collect();
    let same: Vec<&str> = names.iter().copied().filter(|other| last(other).eq_ignore_ascii_case(name)).collect();
    let near = match same.as_slice() {
        [] => {
            let near = near_misses(name, names.iter().copied().map(last));
            let paths: Vec<&str> =
                near.iter().filter_map(|near| names.iter().copied().find(|other| last(other) == *near)).collect();
            did_you_mean(&paths)
        }
        same => did_you_mean(&same[..same.len().min(3)]),
    };
    let near = near.unwrap_or_else(|| "look for it with `vault_search` or `vault_list`".to_owned());
    FileError::Missing { path: wanted.to_owned(), near: Some(near) }
}

/// Adds the end of a note's name where it is missing.
pub(crate) fn note_path(path: &str) -> String {
    if is_note(path) { path.to_owned() } else { format!("{path}{}", super::names::NOTE_END) }
}
