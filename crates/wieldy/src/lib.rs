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
    Verdict, history_tools,
};
pub use wieldy_tools::shell::{Attached, Bash, CommandTool, shell_tools};
pub use wieldy_tools::vault::DEFAULT_PROJECT;
pub use wieldy_tools::{VaultOptions, VaultProject, Workspace, WorkspaceError, file_tools, vault_tools};

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
    builder_with_vaults(workspace, environment, VaultOptions::default())
}

/// Does the same as [`builder_with`], with folders of notes for the vault tools.
pub fn builder_with_vaults(
    workspace: &Path,
    environment: BTreeMap<String, String>,
    vaults: VaultOptions,
) -> Result<ExecutorBuilder, WorkspaceError> {
    let tools = tools_with_vaults(workspace, environment, vaults)?;
    let mut builder =
        Executor::builder().tools(tools).sandbox(Unconfined::default()).sandbox(Native::new(NativeOptions::default()));
    builder.workspace = absolute(workspace);
    builder.machine = machine();
    Ok(builder)
}

/// Returns the built-in tools on `workspace`. Programs get `environment` and nothing else.
pub fn builtin_tools(
    workspace: &Path,
    environment: BTreeMap<String, String>,
) -> Result<Vec<SharedTool>, WorkspaceError> {
    tools_with_vaults(workspace, environment, VaultOptions::default())
}

fn tools_with_vaults(
    workspace: &Path,
    environment: BTreeMap<String, String>,
    vaults: VaultOptions,
) -> Result<Vec<SharedTool>, WorkspaceError> {
    let workspace = Arc::new(Workspace::open(workspace)?);
    let mut tools = file_tools(workspace.clone());
    tools.extend(vault_tools(workspace, vaults));
    tools.extend(shell_tools(environment));
    Ok(tools)
}

/// Returns the absolute path, so that a sandbox resolves it the same way from any working directory.
fn absolute(workspace: &Path) -> PathBuf {
    workspace.canonicalize().unwrap_or_else(|_| workspace.to_owned())
}
