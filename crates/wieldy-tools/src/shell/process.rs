//! Runs a command in the workspace for a tool, and turns its end into an answer.

use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{
    CallError, Code, Command, Confinement, Denial, Ended, Exit, Outcome, OutputSink, Run, RunError, UsedSandbox,
};

use crate::files::relative;

/// The kernel's limit for one argument, without its terminating zero.
const WORD_BYTES_MAX: usize = 128 * 1024 - 1;

/// The exit code of a shell that did not find a program.
const NOT_FOUND: i32 = 127;

/// The key of a result's structured content that lists the command's denials.
pub(super) const REFUSED: &str = "refused";

/// Runs the command, and answers with its output, its exit status and its usage. A stopped run answers with the output
/// so far, and the engine reports the reason.
pub(super) async fn run_command(command: &Command, run: &Run) -> Result<Outcome, RunError> {
    run_command_into(command, run, Arc::new(run.clone()), || ()).await
}

/// Runs the command like [`run_command`], but sends all output to `output` first. `end` is called after the last
/// output.
pub(super) async fn run_command_into(
    command: &Command,
    run: &Run,
    output: Arc<dyn OutputSink>,
    end: impl FnOnce(),
) -> Result<Outcome, RunError> {
    check_words(command)?;
    let Exit { ended, usage, sandbox, overrun, denials } = run.execute_into(command, output).await?;
    end();
    let mut outcome = run.captured();
    outcome.structured = Some(match ended {
        Ended::Code(code) => json!({ "exit_code": code }),
        Ended::Signal(signal) => json!({ "exit_code": null, "signal": signal }),
    });
    if let (Some(structured), false) = (&mut outcome.structured, denials.is_empty()) {
        structured[REFUSED] = denials.iter().map(ToString::to_string).collect();
    }
    outcome.usage = Some(Box::new(usage));
    outcome.sandbox = Some(UsedSandbox::new(sandbox, run.confinement().limits));
    if run.stop().is_cancelled() {
        outcome.partial = true;
        // The engine reports why the run was stopped. The tool adds only an exceeded limit.
        outcome.failure = overrun.map(|overrun| Box::new(overrun.error()));
        return Ok(outcome);
    }
    let failure = match (overrun, failure(&command.program, ended)) {
        (Some(overrun), _) => Some(overrun.error()),
        // A denial that may belong to another command is not the reason for this failure.
        (None, Some(failure)) => Some(denials.iter().find(|denial| !denial.is_shared()).map_or(failure, denial_error)),
        (None, None) => None,
    };
    outcome.failure = failure.map(Box::new);
    Ok(outcome)
}

/// Returns the error for a denial. A command that failed after a denial most likely failed because of it.
fn denial_error(denial: &Denial) -> CallError {
    match denial {
        Denial::Network { host, port, reason, .. } => {
            let whom = port.map_or_else(|| host.clone(), |port| format!("{host}:{port}"));
            let message = format!("the command was refused `{whom}`: {reason}");
            let suggestion = match reason.as_str() {
                "not-by-the-proxy" => {
                    "send requests through the proxy in `HTTPS_PROXY` and `HTTP_PROXY`; there is no other way".into()
                }
                _ => format!("do without it, or ask for `{host}` to be put on the list of allowed hosts"),
            };
            let error = CallError::new(Code::NetworkPolicyViolation, message).suggest(suggestion);
            let error = error.detail("host", host.as_str());
            match port {
                Some(port) => error.detail("port", *port),
                None => error,
            }
        }
        Denial::Filesystem { path, reason } => {
            let message = format!("the command was refused `{path}`: {reason}");
            let suggestion = match reason.as_str() {
                Denial::WORKSPACE_IS_READ_ONLY => {
                    "do without it, or write to `/tmp`; a person can make the workspace writable"
                }
                _ => "do without it, or work in the workspace and in `/tmp`; an operator can allow more",
            };
            CallError::new(Code::FilesystemPolicyViolation, message).suggest(suggestion).detail("path", path.as_str())
        }
    }
}

fn failure(program: &str, ended: Ended) -> Option<CallError> {
    let failed = |how: String| CallError::new(Code::NonzeroExit, format!("`{program}` {how}"));
    match ended {
        Ended::Code(0) => None,
        Ended::Code(NOT_FOUND) => Some(
            failed(format!("ended with exit code {NOT_FOUND}"))
                .suggest("a program that the command names was not found: check its name, or have it installed")
                .detail("exit_code", NOT_FOUND),
        ),
        Ended::Code(code) => Some(failed(format!("ended with exit code {code}")).detail("exit_code", code)),
        Ended::Signal(signal) => Some(
            failed(format!("was ended by signal {signal}")).detail("exit_code", Value::Null).detail("signal", signal),
        ),
    }
}

/// Refuses arguments and variables that no program can get, before the start.
pub(super) fn check_words(command: &Command) -> Result<(), RunError> {
    let words = command.arguments.iter().map(String::as_str);
    for word in words.chain(command.environment.values().map(String::as_str)) {
        if word.contains('\0') {
            return Err(RunError::invalid_input("a program's arguments cannot contain zero bytes"));
        }
        if word.len() > WORD_BYTES_MAX {
            let message =
                format!("an argument has {} bytes, and no program takes more than {WORD_BYTES_MAX}", word.len());
            return Err(RunError::invalid_input(message).suggest("write it to a file first, and name the file"));
        }
    }
    Ok(())
}

/// Returns the folder to start in: `folder` within the workspace, or the workspace itself. Links are followed, and
/// their target must be in the workspace.
pub(super) fn start_folder(workspace: &Path, folder: Option<&str>) -> Result<PathBuf, RunError> {
    let root =
        workspace.canonicalize().map_err(|error| unusable("the workspace", &workspace.to_string_lossy(), error))?;
    let Some(folder) = folder else { return Ok(root) };
    let outside = || {
        let message = format!("the folder `{folder}` is outside the workspace");
        let error = CallError::new(Code::FilesystemPolicyViolation, message).detail("path", folder);
        RunError::from(error.suggest("name a folder relative to the workspace")).before_effect()
    };
    // Checked before the lookup: the caller must not learn if a path outside exists.
    if leads_outside(folder, &[workspace, &root]) {
        return Err(outside());
    }
    let resolved = root.join(folder).canonicalize().map_err(|error| unusable("the folder", folder, error))?;
    if !resolved.starts_with(&root) {
        return Err(outside());
    }
    if !resolved.is_dir() {
        return Err(RunError::invalid_input(format!("`{folder}` is not a folder")));
    }
    Ok(resolved)
}

/// Returns the relative spelling of the argument `folder`, if it is an absolute path inside the workspace.
pub(super) fn respell_folder(arguments: &Value, confinement: &Confinement) -> Vec<(String, String)> {
    let folder = arguments.get("folder").and_then(Value::as_str);
    let relative = folder.and_then(|folder| relative(folder, std::slice::from_ref(&confinement.workspace)));
    relative.map(|folder| ("folder".to_owned(), folder)).into_iter().collect()
}

/// Returns true if the path as written leads out of all of the roots.
fn leads_outside(folder: &str, roots: &[&Path]) -> bool {
    let path = Path::new(folder);
    let inner = match roots.iter().find_map(|root| path.strip_prefix(root).ok()) {
        Some(inner) => inner,
        None if path.is_absolute() => return true,
        None => path,
    };
    let mut depth = 0_usize;
    for component in inner.components() {
        match component {
            Component::Normal(_) => depth += 1,
            Component::ParentDir if depth == 0 => return true,
            Component::ParentDir => depth -= 1,
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    false
}

fn unusable(what: &str, path: &str, error: io::Error) -> RunError {
    match error.kind() {
        io::ErrorKind::NotFound => RunError::not_found(format!("{what} `{path}` does not exist")),
        _ => RunError::invalid_input(format!("{what} `{path}` cannot be used: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_start_folder_is_judged_by_its_target() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = inside.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::create_dir(format!("{}-twin", root.display())).unwrap();
        std::fs::write(root.join("file"), "").unwrap();
        symlink(outside.path(), root.join("out")).unwrap();
        symlink(root.join("a"), root.join("in")).unwrap();

        let started = |folder: Option<&str>| start_folder(inside.path(), folder).map_err(|error| error.error.code);
        assert_eq!(started(None), Ok(root.clone()));
        for (folder, leads_to) in
            [("", ""), (".", ""), ("a/b", "a/b"), ("a/../a", "a"), ("in/b", "a/b"), ("a/b/../..", "")]
        {
            assert_eq!(started(Some(folder)), Ok(root.join(leads_to).components().collect()), "{folder:?}");
        }
        assert_eq!(started(Some(&format!("{}/a", root.display()))), Ok(root.join("a")));
        let twin = format!("{}-twin", root.display());
        for folder in ["..", "a/../..", "out", "out/..", "/", "/etc", "/no/such", "../no-such", &twin] {
            assert_eq!(started(Some(folder)), Err(Code::FilesystemPolicyViolation), "{folder:?}");
        }
        assert_eq!(started(Some("none")), Err(Code::FileNotFound));
        assert_eq!(started(Some("file")), Err(Code::InvalidInput));
        assert_eq!(started(Some("a\0b")), Err(Code::InvalidInput));
        std::fs::remove_dir(twin).unwrap();
    }
}
