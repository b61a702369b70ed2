//! Tools that run programs: [`Bash`] for any command line, [`Build`] for a project, [`CommandTool`] for one program
//! from a manifest, [`Attached`] for a program that a person talks to.
//!
//! All run a program in the run's sandbox and turn its output and exit into an answer in the same way (`process.rs`).
//! Background processes of `Bash` are stored in [`Processes`], where [`ProcessRead`] and the other process tools find
//! them.

mod attached;
mod bash;
mod build;
mod build_targets;
mod command;
mod environment;
mod escapes;
mod named;
mod process;
mod process_tools;
mod processes;
mod state;
mod template;

use std::collections::BTreeMap;
use std::sync::Arc;

use wieldy_core::SharedTool;

pub use attached::{Attached, AttachedArgs};
pub use bash::{Bash, BashArgs};
pub use build::{Build, BuildArgs};
pub use command::CommandTool;
pub use environment::allowed;
pub use process_tools::{
    ProcessList, ProcessListArgs, ProcessRead, ProcessReadArgs, ProcessStop, ProcessStopArgs, ProcessWrite,
    ProcessWriteArgs,
};
pub use processes::{PROCESSES_MAX, Processes, UNREAD_BYTES_MAX};
pub use state::{GetState, GetStateArgs};
pub use template::check_template;

/// The permission that a tool requires if it starts or controls programs.
pub const RUN_PROGRAMS: &str = "programs.run";

/// Returns `Bash`, `Build`, the tools for background processes, and `GetState`. Programs get only this environment,
/// which [`allowed`] makes.
pub fn shell_tools(environment: BTreeMap<String, String>) -> Vec<SharedTool> {
    let processes = Arc::new(Processes::default());
    vec![
        Arc::new(Bash::with(environment.clone(), Arc::clone(&processes))),
        Arc::new(Build::new(environment, Arc::clone(&processes))),
        Arc::new(ProcessRead::new(Arc::clone(&processes))),
        Arc::new(ProcessWrite::new(Arc::clone(&processes))),
        Arc::new(ProcessStop::new(Arc::clone(&processes))),
        Arc::new(ProcessList::new(Arc::clone(&processes))),
        Arc::new(GetState::new(processes)),
    ]
}
