//! Tools that are programs: [`Bash`] for any command line, [`CommandTool`] for one program by a manifest.
//!
//! Both hand a program to the run's sandbox and turn what came of it into an answer, in the same way.

mod bash;
mod command;
mod environment;
mod process;
mod template;

pub use bash::{Bash, BashArgs};
pub use command::CommandTool;
pub use environment::allowed;
pub use template::check_template;
