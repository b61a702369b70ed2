//! The isolation level `firecracker`: a virtual machine for each sandbox. It is not there yet, and says what is missing.
//!
//! A guest needs Firecracker's program, the machine's `/dev/kvm`, a kernel, a root file system, and in the latter the init that takes
//! commands over a virtual socket. That init is planned. [`Firecracker::probe`] names the first of these that is missing, and
//! [`execute`](Sandbox::execute) refuses with it; nothing ever runs at a lower level instead.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use rustix::fs::{Access, access};
use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, Confinement, Exit, Level, OutputSink, Sandbox, SandboxError};

/// How the level is set up.
#[derive(Debug, Clone, Default)]
pub struct FirecrackerOptions {
    /// Firecracker's program.
    pub program: Option<PathBuf>,
    /// The guest's kernel.
    pub kernel: Option<PathBuf>,
    /// The guest's root file system, as an image.
    pub rootfs: Option<PathBuf>,
}

/// Why no guest can be started, and what can be done about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirecrackerProblem {
    /// What is missing.
    pub problem: String,
    /// What helps.
    pub hint: String,
}

/// Refuses every command with what is missing on this machine.
#[derive(Debug, Clone, Default)]
pub struct Firecracker {
    options: FirecrackerOptions,
}

impl Firecracker {
    /// The level, set up as the options say.
    pub fn new(options: FirecrackerOptions) -> Self {
        Self { options }
    }

    /// The first thing that is missing. There always is one, as long as the guest's init is.
    pub fn probe(&self) -> FirecrackerProblem {
        let told = |problem: String, hint: &str| FirecrackerProblem { problem, hint: hint.into() };
        let Some(program) = &self.options.program else {
            return told("no program of Firecracker's is configured".into(), "install Firecracker and say where it is");
        };
        let mut asked = std::process::Command::new(program);
        let version = asked.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        match version {
            Err(error) => return told(format!("`{}`: {error}", program.display()), "install Firecracker"),
            Ok(status) if !status.success() => {
                return told(
                    format!("`{} --version` ended with {status}", program.display()),
                    "install Firecracker anew",
                );
            }
            Ok(_) => {}
        }
        if let Err(error) = access("/dev/kvm", Access::READ_OK | Access::WRITE_OK) {
            return told(
                format!("`/dev/kvm` cannot be used: {error}"),
                "turn on virtualization, and let this user use it",
            );
        }
        for (name, path) in [("kernel", &self.options.kernel), ("root file system", &self.options.rootfs)] {
            match path {
                Some(path) if path.is_file() => {}
                Some(path) => return told(format!("the guest's {name} `{}` is no file", path.display()), "build it"),
                None => return told(format!("no {name} for guests is configured"), "build one and say where it is"),
            }
        }
        told("this build has no init for guests".into(), "use the level `native` or `gvisor`")
    }
}

impl Sandbox for Firecracker {
    fn level(&self) -> Level {
        Level::Firecracker
    }

    fn execute<'a>(
        &'a self,
        _command: &'a Command,
        _confinement: &'a Confinement,
        _output: Arc<dyn OutputSink>,
        _stop: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>> {
        let FirecrackerProblem { problem, hint } = self.probe();
        Box::pin(async move { Err(SandboxError::Creation { reason: format!("firecracker: {problem}; {hint}") }) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_thing_that_is_missing_is_named() {
        let problem = |program: Option<&str>| {
            let options = FirecrackerOptions { program: program.map(PathBuf::from), ..FirecrackerOptions::default() };
            Firecracker::new(options).probe().problem
        };
        assert_eq!(problem(None), "no program of Firecracker's is configured");
        assert_eq!(problem(Some("/no/firecracker")), "`/no/firecracker`: No such file or directory (os error 2)");
        let further = problem(Some("/bin/true"));
        let has_kvm = access("/dev/kvm", Access::READ_OK | Access::WRITE_OK).is_ok();
        let wanted = if has_kvm { "no kernel for guests is configured" } else { "`/dev/kvm` cannot be used: " };
        assert!(further.starts_with(wanted), "{further}");
    }
}
