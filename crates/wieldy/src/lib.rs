//! The tool executor for AI agents, as a library.
//!
//! [`Executor::call`] takes a [`Call`] to a tool and returns a [`ToolResult`]. On the way it looks up the tool,
//! authorizes, validates, confirms and admits the call, runs it with time limits and retries, and records it.
//! [`Executor::builder`] makes an executor of your own tools; [`builder`] makes one that already has the built-in tools
//! on a workspace.
//!
//! ```
//! use serde_json::json;
//! use wieldy::Call;
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! # let folder = tempfile::tempdir()?;
//! # let workspace = folder.path();
//! std::fs::write(workspace.join("notes.txt"), "milk\nbread\n")?;
//! let executor = wieldy::builder(workspace)?.build()?;
//! let result = executor.call(Call::new("Search", json!({"pattern": "bread"}))).await;
//! assert!(result.is_success() && result.text().contains("notes.txt"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The features `history`, `postgres`, `mcp` and `oci` are on by default. With `default-features = false` this is the
//! engine alone: calls, checks, clocks, batches, native sandboxes, and a journal in memory.
//!
//! The `examples` folder shows a tool of your own, batches, observation, confirmation, cancellation and a history.

mod artifacts;
mod log;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use artifacts::{FolderArtifacts, FolderError};
use jiff::tz::TimeZone;
pub use log::{EventLog, LOG_TARGETS, log_events};
pub use wieldy_core::*;
/// MCP in both directions.
#[cfg(feature = "mcp")]
pub use wieldy_mcp as mcp;
pub use wieldy_sandbox::{
    EarlyForkServer, Holds, IdleLimits, Native, NativeOptions, ProbeOptions, ProbeState, Probed, RefusedCall, Report,
    Unavailable, Unconfined, finish, is_placeholder, machine, probe, sweep, sweep_placeholders,
};
#[cfg(feature = "firecracker")]
pub use wieldy_sandbox::{Firecracker, FirecrackerOptions, FirecrackerProblem};
#[cfg(feature = "oci")]
pub use wieldy_sandbox::{Oci, OciOptions, OciProblem, OciVersion, Rootfs};
#[cfg(feature = "history")]
pub use wieldy_store::{
    Address, Copied, Cursor, Execution, GroupBy, JournalOptions, Page, Problem as TrailProblem, Pruned, Query,
    RecordedEvent, ResultIndex, Retention, SignedHead, Signer, Stat, Store, StoreError, StoreJournal, TextPlace,
    ThreadError, ThreadProblem, ThreadVerdict, Threads, Verdict, history_tools, thread_tools,
};
pub use wieldy_tools::shell::{Attached, Bash, CommandTool, shell_tools};
pub use wieldy_tools::vault::DEFAULT_PROJECT;
pub use wieldy_tools::{
    CodeOptions, NotifySelf, VaultOptions, VaultProject, Workspace, WorkspaceError, code_tools, file_tools, vault_tools,
};

/// Begins to build an executor with the built-in tools on `workspace`.
///
/// Programs are isolated natively unless `isolation` says otherwise. A machine or build without the chosen level
/// answers with `E3101`; [`Level::None`] runs programs without any isolation.
///
/// The journal is in memory. To keep a history on disk, open a [`Store`] and set `journal` to the result of
/// [`Store::journal`].
pub fn builder(workspace: &Path) -> Result<ExecutorBuilder, WorkspaceError> {
    // A library does not read the environment; a program that needs more than the usual paths calls `builder_with`.
    let environment = BTreeMap::from([("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin".to_owned())]);
    builder_with(workspace, environment)
}

/// Does the same as [`builder`], with an environment for programs.
pub fn builder_with(
    workspace: &Path,
    environment: BTreeMap<String, String>,
) -> Result<ExecutorBuilder, WorkspaceError> {
    builder_of(workspace, BuiltinOptions { environment, ..BuiltinOptions::default() })
}

/// Does the same as [`builder`], with all options of the built-in tools.
pub fn builder_of(workspace: &Path, options: BuiltinOptions) -> Result<ExecutorBuilder, WorkspaceError> {
    let own = options.state.clone();
    let tools = builtin_tools(workspace, options)?;
    let mut builder =
        Executor::builder().tools(tools).sandbox(Unconfined::default()).sandbox(Native::new(NativeOptions::default()));
    builder.workspace = absolute(workspace);
    // No tool may see the state, wherever it is.
    builder.files.own.extend(own.iter().map(|state| absolute(state)));
    builder.machine = machine();
    Ok(builder)
}

/// The options of the built-in tools.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BuiltinOptions {
    /// The environment of programs, and all of it.
    pub environment: BTreeMap<String, String>,
    /// The folder for what tools derive from the workspace's files, such as the index of its code. Without one they
    /// make it again in each process.
    pub state: Option<PathBuf>,
    /// The options of the code tools.
    pub code: CodeOptions,
    /// The folders of notes for the vault tools.
    pub vaults: VaultOptions,
}

/// Returns the built-in tools on `workspace`.
pub fn builtin_tools(workspace: &Path, options: BuiltinOptions) -> Result<Vec<SharedTool>, WorkspaceError> {
    let workspace = Arc::new(Workspace::open(workspace)?);
    let mut tools = file_tools(workspace.clone());
    let vaults = VaultOptions { state: options.vaults.state.or_else(|| options.state.clone()), ..options.vaults };
    tools.extend(vault_tools(workspace.clone(), vaults));
    tools.extend(code_tools(workspace, options.state, options.code));
    tools.extend(shell_tools(options.environment));
    // The zone of the machine, like its processors, is no setting of the program.
    tools.push(Arc::new(NotifySelf::new(TimeZone::system())));
    Ok(tools)
}

/// Returns the absolute path, so that a sandbox resolves it the same way from any working directory.
fn absolute(workspace: &Path) -> PathBuf {
    workspace.canonicalize().unwrap_or_else(|_| workspace.to_owned())
}
