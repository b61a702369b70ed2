//! `Bash`: any command line, in the workspace.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use wieldy_core::{Command, Outcome, Provider, Run, RunError, Stdin, Tool, ToolSpec};

use super::process::{run_command, start_folder};

/// Becomes the same shell again, with complaints and output in one stream: read from two pipes, nobody could tell which of
/// them came first. `--` ends the shell's own options, as a command line that begins with `-` is not one of them.
const ONE_STREAM: &str = r#"exec "$0" -c -- "$1" 2>&1"#;

/// Runs a command line with `bash`, or with `sh` where there is no `bash`.
pub struct Bash {
    environment: BTreeMap<String, String>,
    shell: &'static str,
}

/// What to run.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct BashArgs {
    /// The command line, as one would type it.
    command: String,
    /// The folder to start in, relative to the workspace.
    folder: Option<String>,
    /// What the command is for, in a few words; shown to whoever watches.
    description: Option<String>,
    /// What the command reads from its standard input; without it, the end of file at once.
    stdin: Option<String>,
}

impl Bash {
    /// The tool, whose commands get just this environment; [`allowed`](super::allowed) makes one.
    pub fn new(environment: BTreeMap<String, String>) -> Self {
        let path = environment.get("PATH").map_or("/usr/local/bin:/usr/bin:/bin", String::as_str);
        let has_bash = path.split(':').any(|place| place.starts_with('/') && Path::new(place).join("bash").is_file());
        Self { environment, shell: if has_bash { "bash" } else { "sh" } }
    }
}

impl Tool for Bash {
    type Args = BashArgs;

    fn spec(&self) -> ToolSpec {
        let mut spec = ToolSpec::new(
            "Bash",
            "Runs a command line in the workspace and returns what it prints. Each call starts afresh: folder and \
             variables are not kept. Everything the command started is ended with it, so nothing runs on in the background.",
        )
        .category("shell")
        .provider(Provider::Builtin)
        .timeout(Duration::from_secs(120));
        spec.constraints.timeout_max = Some(Duration::from_secs(30 * 60));
        spec
    }

    async fn run(&self, args: BashArgs, run: &Run) -> Result<Outcome, RunError> {
        let folder = start_folder(&run.confinement().workspace, args.folder.as_deref())?;
        if let Some(description) = args.description {
            run.progress(None, description);
        }
        let command = Command {
            program: self.shell.into(),
            arguments: vec!["-c".into(), ONE_STREAM.into(), self.shell.into(), args.command],
            environment: self.environment.clone(),
            folder,
            stdin: args.stdin.map_or(Stdin::Nothing, |text| Stdin::Bytes(text.into_bytes())),
            terminal: None,
        };
        run_command(&command, run).await
    }
}
