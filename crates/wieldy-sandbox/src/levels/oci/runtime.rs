//! The program of an OCI runtime: its arguments, its log, and the meaning of its errors.
//!
//! Every call that may take long runs as a host process under a supervisor, so the runtime and its container end with
//! the executor.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use wieldy_core::{Ended, Level, Limit, Network, SandboxError};

use crate::supervise::host_process::PATH;

/// The folders in which runtimes are searched.
const FOLDERS: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Returns the name of a level's runtime, if it has one.
pub(super) fn name(level: Level) -> Option<&'static str> {
    match level {
        Level::Runc => Some("runc"),
        Level::Crun => Some("crun"),
        Level::Youki => Some("youki"),
        Level::Gvisor => Some("runsc"),
        Level::None | Level::Native | Level::Firecracker => None,
    }
}

/// Returns the paths at which a level's runtime may be.
pub(super) fn candidates(level: Level) -> Vec<PathBuf> {
    let name = name(level).into_iter();
    name.flat_map(|name| FOLDERS.map(|folder| Path::new(folder).join(name))).collect()
}

/// Returns the path of a level's runtime, if it is installed.
pub(crate) fn installed(level: Level) -> Option<PathBuf> {
    candidates(level).into_iter().find(|path| path.is_file())
}

/// An OCI runtime.
#[derive(Debug, Clone)]
pub(super) struct Runtime {
    pub(super) level: Level,
    pub(super) program: PathBuf,
    /// The folder in which it stores the state of its containers.
    pub(super) root: PathBuf,
}

impl Runtime {
    /// Returns the arguments of a call of the runtime.
    pub(super) fn words(&self, log: &Path, network: &Network, words: &[&str]) -> Vec<String> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut whole = vec!["--root".into(), text(&self.root), "--log".into(), text(log)];
        whole.extend(["--log-format".into(), "json".into()]);
        if self.level == Level::Gvisor {
            // Listed hosts are reached through the loopback device of a network namespace that the container joins.
            let network = if *network == Network::None { "none" } else { "host" };
            // It stays in its supervisor's cgroup. Without an overlay, writes go to the workspace itself.
            whole.extend([format!("--network={network}"), "--ignore-cgroups".into(), "--overlay2=none".into()]);
        }
        whole.extend(words.iter().map(|word| (*word).to_owned()));
        whole
    }

    /// Makes a short call and returns the runtime's output. The error is the runtime's error message. Blocks.
    pub(super) fn ask(&self, log: &Path, network: &Network, words: &[&str]) -> io::Result<Vec<u8>> {
        let mut command = Command::new(&self.program);
        command.args(self.words(log, network, words)).env_clear().env("PATH", PATH).current_dir("/");
        let output = command.stdin(Stdio::null()).output()?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let told = logged_error(log).unwrap_or_else(|| String::from_utf8_lossy(&output.stderr).trim().to_owned());
        Err(io::Error::other(told))
    }
}

/// Returns the last error in the log of a runtime.
pub(super) fn logged_error(log: &Path) -> Option<String> {
    let text = fs::read(log).ok()?;
    // A sequence of JSON objects. Not every runtime puts each of them on a line of its own.
    let entries = serde_json::Deserializer::from_slice(&text).into_iter::<serde_json::Value>();
    let errors = entries.map_while(Result::ok).filter(|entry| {
        let level = entry.get("level").and_then(|level| level.as_str()).unwrap_or_default();
        matches!(level, "error" | "fatal" | "ERROR")
    });
    errors.filter_map(|entry| Some(entry.get("msg")?.as_str()?.trim().to_owned())).last()
}

/// Returns the error message of a runtime with its reason: the limit left too little for the runtime itself.
pub(super) fn too_little(told: &str, limit: Limit, allowed: u64) -> String {
    format!("{told}; the limit `{limit}`, which is {allowed} here, leaves too little for the runtime itself")
}

/// Returns the reason why a command could not be started, from the runtime's error message.
pub(super) fn not_started(level: Level, program: &str, told: &str) -> SandboxError {
    let kinds = [
        ("executable file not found", io::ErrorKind::NotFound),
        // In a relative folder of the `PATH`.
        ("found relative to current directory", io::ErrorKind::NotFound),
        ("no such file or directory", io::ErrorKind::NotFound),
        ("is a directory", io::ErrorKind::PermissionDenied),
        ("permission denied", io::ErrorKind::PermissionDenied),
        ("exec format error", io::ErrorKind::Unsupported),
        ("not a directory", io::ErrorKind::NotADirectory),
    ];
    match kinds.iter().find(|(text, _)| told.contains(text)) {
        Some((_, kind)) => {
            SandboxError::Start { program: program.into(), source: io::Error::new(*kind, told.to_owned()) }
        }
        None => SandboxError::creation(level.as_str(), told),
    }
}

/// Converts the end of the runtime's program to that of the command. Like shells, runtimes report a signal as 128 plus
/// its number, so a command that exits with such a code looks like one that was killed.
pub(super) fn ended(runtime: Ended) -> Ended {
    match runtime {
        Ended::Code(code @ 129..=192) => Ended::Signal(code - 128),
        ended => ended,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_found_among_objects_that_stand_on_one_line() {
        let log = tempfile::NamedTempFile::new().unwrap();
        fs::write(log.path(), r#"{"level":"warning","msg":"a"}{"level":"error","msg":"b "}{"level":"info","msg":"c"}"#)
            .unwrap();
        assert_eq!(logged_error(log.path()), Some("b".into()));
        fs::write(log.path(), "{\"level\":\"warning\",\"msg\":\"a\"}\nnonsense").unwrap();
        assert_eq!(logged_error(log.path()), None);
    }
}
