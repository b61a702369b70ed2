//! The vault tools, called through a real executor.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod confined;
mod kill;
mod large;
mod moving;
mod owners;
mod random;
mod reading;
mod searching;
mod writing;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{Body, Call, Caller, Executor, FileRules, MemoryJournal, ToolResult};
use wieldy_tools::{VaultOptions, VaultProject, Workspace, file_tools, vault_tools};

use crate::world::refusal;

/// A workspace with a vault in its folder `notes`, another vault outside it, and a state folder.
pub(crate) struct VaultWorld {
    pub(crate) folder: tempfile::TempDir,
    executor: Executor,
    journal: Arc<MemoryJournal>,
}

impl VaultWorld {
    pub(crate) fn new() -> Self {
        Self::with(|_| {}, FileRules::default())
    }

    /// Creates a world with changed options and these rules.
    pub(crate) fn with(change: impl FnOnce(&mut VaultOptions), files: FileRules) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["ws/notes", "ws/other", "outside", "state", "owned"] {
            fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        Self::at(folder, change, files)
    }

    /// Creates a world in a folder that is there already.
    pub(crate) fn at(folder: tempfile::TempDir, change: impl FnOnce(&mut VaultOptions), files: FileRules) -> Self {
        let mut options = options(folder.path());
        change(&mut options);
        let (executor, journal) = executor(folder.path(), options, files);
        Self { folder, executor, journal }
    }

    /// Returns a path in the default vault.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join("ws/notes").join(path)
    }

    /// Writes a file of the default vault.
    pub(crate) fn put(&self, path: &str, content: impl AsRef<[u8]>) -> &Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    pub(crate) fn content(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).unwrap()
    }

    pub(crate) async fn by(&self, caller: Caller, tool: &str, arguments: Value) -> ToolResult {
        self.executor.call(Call::new(tool, arguments).by(Arc::new(caller))).await
    }

    pub(crate) async fn call(&self, tool: &str, arguments: Value) -> ToolResult {
        self.by(Caller::local(), tool, arguments).await
    }

    /// Makes a call that must succeed, and returns its structured answer.
    pub(crate) async fn answer(&self, tool: &str, arguments: Value) -> Value {
        let result = self.call(tool, arguments).await;
        assert!(result.is_success(), "{tool}: {:?}", result.error);
        result.structured.unwrap()
    }

    pub(crate) async fn refusal(&self, tool: &str, arguments: Value) -> String {
        refusal(&self.call(tool, arguments).await)
    }

    /// Returns the reports of stale files: path, project and the two hashes.
    pub(crate) fn stale(&self) -> Vec<(String, Option<String>, String, Option<String>)> {
        let stale = |event: &wieldy_core::Event| match &event.body {
            Body::SourceStale { path, project_id, previous_hash, current_hash, .. } => {
                Some((path.clone(), project_id.clone(), previous_hash.clone(), current_hash.clone()))
            }
            _ => None,
        };
        self.journal.events().iter().filter_map(|event| stale(event)).collect()
    }
}

/// Returns the options of a world in this folder.
pub(crate) fn options(folder: &Path) -> VaultOptions {
    let project = |root: PathBuf| VaultProject { root, ..VaultProject::default() };
    VaultOptions {
        projects: BTreeMap::from([
            ("default".to_owned(), project("notes".into())),
            ("outside".to_owned(), project(folder.join("outside"))),
        ]),
        state: Some(folder.join("state")),
        has_tokens: false,
        hidden: vec![folder.join("outside/settings.md")],
    }
}

pub(crate) fn executor(folder: &Path, options: VaultOptions, files: FileRules) -> (Executor, Arc<MemoryJournal>) {
    let root = folder.join("ws");
    let workspace = Arc::new(Workspace::open(&root).unwrap());
    let journal = Arc::new(MemoryJournal::default());
    let tools = file_tools(workspace.clone()).into_iter().chain(vault_tools(workspace, options));
    let mut builder = Executor::builder().tools(tools);
    builder.journal = journal.clone();
    builder.workspace = root;
    builder.files = files;
    (builder.build().unwrap(), journal)
}

pub(crate) fn hash(content: impl AsRef<[u8]>) -> String {
    blake3::hash(content.as_ref()).to_string()
}

/// Returns every file below a folder with its content.
pub(crate) fn tree(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => open.push(path),
                false => {
                    let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
                    files.insert(name, fs::read(&path).unwrap());
                }
            }
        }
    }
    files
}

#[tokio::test]
async fn without_a_vault_every_tool_says_what_to_configure() {
    let world = VaultWorld::with(|options| options.projects.clear(), FileRules::default());
    for (tool, arguments) in calls("Home.md") {
        let refused = world.refusal(tool, arguments).await;
        assert_eq!(
            refused,
            "E3301: no vault is configured\n(have the operator set `root` in the section `[vault]` of the configuration, \
             such as `root = \"notes\"`)",
            "{tool}"
        );
    }
}

/// Returns one call of each tool on a note.
pub(crate) fn calls(path: &str) -> [(&'static str, Value); 6] {
    [
        ("vault_read", json!({"path": path})),
        ("vault_write", json!({"path": path, "body": "new\n"})),
        ("vault_search", json!({"query": "text"})),
        ("vault_list", json!({})),
        ("vault_move", json!({"path": path, "new_path": "Moved.md"})),
        ("vault_create_index", json!({})),
    ]
}
