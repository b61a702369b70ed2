//! The tool executor for AI agents, as a library.
//!
//! [`Executor::call`] takes a [`Call`] to a tool and returns a [`ToolResult`]: looked up, authorized, validated,
//! confirmed, admitted, run, timed, retried and recorded. [`Executor::builder`] makes an executor of your own tools;
//! [`builder`] makes one that has the built-in tools on a workspace already.
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
pub use wieldy_mcp as mcp;
pub use wieldy_sandbox::{
    EarlyForkServer, Holds, IdleLimits, Native, NativeOptions, Oci, OciOptions, OciProblem, OciVersion, ProbeOptions,
    ProbeState, Probed, RefusedCall, Report, Rootfs, Unavailable, Unconfined, finish, is_placeholder, probe, sweep,
    sweep_placeholders,
};
#[cfg(feature = "firecracker")]
pub use wieldy_sandbox::{Firecracker, FirecrackerOptions, FirecrackerProblem};
pub use wieldy_store::{
    Address, Copied, Cursor, Execution, GroupBy, JournalOptions, Moment, Page, Problem as TrailProblem, Pruned, Query,
    Retention, SignedHead, Signer, Stat, Store, StoreError, StoreJournal, Verdict, history_tools,
};
pub use wieldy_tools::shell::{Attached, Bash, CommandTool, shell_tools};
pub use wieldy_tools::{Workspace, WorkspaceError, file_tools};

/// Begins to build an executor with the built-in tools on `workspace`.
///
/// Programs are isolated natively unless `isolation` says otherwise. A machine or version without that level answers
/// with `E3101`; [`Level::None`] runs programs without any isolation.
///
/// The journal is in memory. To keep a history, open a [`Store`] and set `journal` to what [`Store::journal`] makes.
pub fn builder(workspace: &Path) -> Result<ExecutorBuilder, WorkspaceError> {
    // A library does not look at the environment; a program that wants more than the usual paths uses `builtin_tools`.
    let environment = BTreeMap::from([("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin".to_owned())]);
    builder_with(workspace, environment)
}

/// The same as [`builder`], with the environment that programs get.
pub fn builder_with(
    workspace: &Path,
    environment: BTreeMap<String, String>,
) -> Result<ExecutorBuilder, WorkspaceError> {
    let tools = builtin_tools(workspace, environment)?;
    let mut builder =
        Executor::builder().tools(tools).sandbox(Unconfined::default()).sandbox(Native::new(NativeOptions::default()));
    builder.workspace = absolute(workspace);
    Ok(builder)
}

/// The built-in tools on `workspace`; programs get just `environment`.
pub fn builtin_tools(
    workspace: &Path,
    environment: BTreeMap<String, String>,
) -> Result<Vec<SharedTool>, WorkspaceError> {
    let mut tools = file_tools(Arc::new(Workspace::open(workspace)?));
    tools.extend(shell_tools(environment));
    Ok(tools)
}

/// A sandbox is told the whole path, so that it means the same wherever the sandbox starts.
fn absolute(workspace: &Path) -> PathBuf {
    workspace.canonicalize().unwrap_or_else(|_| workspace.to_owned())
}
