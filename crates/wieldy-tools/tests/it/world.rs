//! A workspace in a temporary folder, a secret beside it, and an executor with all file tools.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{Body, Call, Caller, Executor, FileRules, MemoryJournal, ToolResult};
use wieldy_tools::{CodeOptions, Workspace, code_tools, file_tools};

/// The text of the secret, which must never be in a result, and never change.
pub(crate) const CANARY: &str = "canary-7c1f";

pub(crate) struct World {
    folder: tempfile::TempDir,
    executor: Executor,
    journal: Arc<MemoryJournal>,
    caller: Arc<Caller>,
}

impl World {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for name in ["ws", "ws-secret", "outside"] {
            fs::create_dir(folder.path().join(name)).expect("a folder");
        }
        for name in ["ws-secret/secret.txt", "outside/secret.txt"] {
            fs::write(folder.path().join(name), CANARY).expect("a file");
        }
        Self::at(folder.path().join("ws"), folder)
    }

    /// Returns the same world with other file rules.
    pub(crate) fn ruled(self, files: FileRules) -> Self {
        Self::under(files, self.path(""), self.folder)
    }

    /// Creates a world whose workspace is another folder.
    pub(crate) fn at(root: PathBuf, folder: tempfile::TempDir) -> Self {
        Self::under(FileRules::default(), root, folder)
    }

    fn under(files: FileRules, root: PathBuf, folder: tempfile::TempDir) -> Self {
        let workspace = Arc::new(Workspace::open(&root).expect("the folder is there"));
        let state = folder.path().join("state");
        let journal = Arc::new(MemoryJournal::default());
        let mut builder = Executor::builder().tools(file_tools(workspace.clone()));
        builder = builder.tools(code_tools(workspace, Some(state), CodeOptions::default()));
        builder.journal = journal.clone();
        builder.workspace = root;
        builder.files = files;
        let executor = builder.build().expect("the tools have different names");
        Self { folder, executor, journal, caller: Arc::new(Caller::local()) }
    }

    /// Returns a caller with another session in the same world.
    pub(crate) fn session(&self, session: &str) -> Visitor<'_> {
        Visitor { world: self, caller: Arc::new(Caller { session: Some(session.into()), ..Caller::local() }) }
    }

    pub(crate) fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Returns a path in the workspace, for access without the tools.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join("ws").join(path)
    }

    pub(crate) fn outside(&self, path: &str) -> PathBuf {
        self.folder.path().join("outside").join(path)
    }

    /// Writes a file, and makes the folders it needs.
    pub(crate) fn put(&self, path: &str, content: impl AsRef<[u8]>) -> &Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("it is in the workspace")).expect("folders");
        fs::write(path, content).expect("a file");
        self
    }

    pub(crate) fn link(&self, path: &str, target: impl AsRef<Path>) -> &Self {
        std::os::unix::fs::symlink(target, self.path(path)).expect("a link");
        self
    }

    pub(crate) fn content(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).expect("a text file")
    }

    pub(crate) async fn call(&self, tool: &str, arguments: Value) -> ToolResult {
        self.executor.call(Call::new(tool, arguments).by(self.caller.clone())).await
    }

    /// Makes a call that must succeed, and returns its text.
    pub(crate) async fn text(&self, tool: &str, arguments: Value) -> String {
        let result = self.call(tool, arguments).await;
        assert!(result.is_success(), "{:?}", result.error);
        result.text()
    }

    /// Makes a call that must fail, and returns its error as `code: message (suggestion)`.
    pub(crate) async fn refusal(&self, tool: &str, arguments: Value) -> String {
        refusal(&self.call(tool, arguments).await)
    }

    /// Returns the stale files that were reported, and if each still exists.
    pub(crate) fn stale(&self) -> Vec<(String, bool)> {
        let events = self.journal.events();
        let stale = events.iter().filter_map(|event| match &event.body {
            Body::SourceStale { path, current_hash, .. } => Some((path.clone(), current_hash.is_some())),
            _ => None,
        });
        stale.collect()
    }

    /// Returns the names of all entries in the workspace, to check that nothing is left behind.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("")).expect("the workspace");
        let mut names: Vec<_> =
            entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Asserts that nothing outside the workspace was touched.
    pub(crate) fn assert_outside_untouched(&self) {
        for folder in ["outside", "ws-secret"] {
            let folder = self.folder.path().join(folder);
            let names: Vec<_> =
                fs::read_dir(&folder).expect("still there").map(|entry| entry.expect("an entry").file_name()).collect();
            assert_eq!(names, ["secret.txt"]);
            assert_eq!(fs::read_to_string(folder.join("secret.txt")).expect("still there"), CANARY);
        }
    }
}

/// A caller with a session of its own.
pub(crate) struct Visitor<'a> {
    world: &'a World,
    caller: Arc<Caller>,
}

impl Visitor<'_> {
    pub(crate) async fn call(&self, tool: &str, arguments: Value) -> ToolResult {
        self.world.executor.call(Call::new(tool, arguments).by(self.caller.clone())).await
    }
}

pub(crate) fn refusal(result: &ToolResult) -> String {
    let error = result.error.as_ref().unwrap_or_else(|| panic!("it went well: {}", result.text()));
    let suggestion = error.suggestion.as_ref().map(|text| format!("\n({text})")).unwrap_or_default();
    format!("{}: {}{suggestion}", error.code, error.message)
}

/// Returns the parts of a result that a tool decides.
pub(crate) fn whole(result: &ToolResult) -> String {
    let texts: Vec<String> =
        result.content.iter().map(|block| wieldy_core::Content::text_of(std::slice::from_ref(block))).collect();
    let shown = json!({
        "status": result.status, "content": texts, "structured": result.structured, "partial": result.partial,
        "error": result.error.as_ref().map(|_| refusal(result)),
    });
    serde_json::to_string_pretty(&shown).expect("plain data")
}
