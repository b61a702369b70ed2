//! Tools that are programs: [`Bash`] for any command line, [`Build`] for a project, [`CommandTool`] for one program by a manifest.
//!
//! All hand a program to the run's sandbox and turn what came of it into an answer, in the same way (`process.rs`). What `Bash`
//! starts in the background is kept in [`Processes`], where [`ProcessRead`] and its like find it.

mod bash;
mod build;
mod command;
mod environment;
mod process;
mod process_tools;
mod processes;
mod template;

use std::collections::BTreeMap;
use std::sync::Arc;

use wieldy_core::SharedTool;

pub use bash::{Bash, BashArgs};
pub use build::{Build, BuildArgs};
pub use command::CommandTool;
pub use environment::allowed;
pub use process_tools::{
    ProcessList, ProcessListArgs, ProcessRead, ProcessReadArgs, ProcessStop, ProcessStopArgs, ProcessWrite,
    ProcessWriteArgs,
};
pub use processes::{PROCESSES_MAX, Processes, UNREAD_BYTES_MAX};
pub use template::check_template;

/// `Bash`, `Build` and the tools for what runs in the background; programs get just this environment, which [`allowed`] makes.
pub fn shell_tools(environment: BTreeMap<String, String>) -> Vec<SharedTool> {
    let processes = Arc::new(Processes::default());
    vec![
        Arc::new(Bash::with(environment.clone(), Arc::clone(&processes))),
        Arc::new(Build::new(environment, Arc::clone(&processes))),
        Arc::new(ProcessRead::new(Arc::clone(&processes))),
        Arc::new(ProcessWrite::new(Arc::clone(&processes))),
        Arc::new(ProcessStop::new(Arc::clone(&processes))),
        Arc::new(ProcessList::new(processes)),
    ]
}
