//! Tries each isolation level by running a program at it.

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt;
#[cfg(any(test, feature = "oci"))]
use std::path::Path;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use std::{fs, io};

use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, Confinement, Ended, Exit, Level, OutputSink, Place, Sandbox, SandboxError, Stdin, Stream};

use super::{Holds, ProbeOptions, ProbeState, Probed};
use crate::cgroup::Hierarchy;
#[cfg(feature = "oci")]
use crate::levels::oci::{self, Oci, OciOptions, OciProblem};
use crate::levels::{native, none};
use crate::state_dir::remove_emptied;
use crate::{Native, Unconfined};

/// The maximum time that a program which does nothing may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// The maximum number of bytes of a program's output that are read.
const SAID_BYTES_MAX: usize = 4096;

/// Tries every level, weakest first.
pub(super) async fn levels(options: &ProbeOptions, native: &Native, features: &[Probed]) -> Vec<Probed> {
    let mut checks = Vec::new();
    for level in Level::ALL {
        checks.push(match level {
            Level::None => none(options).await,
            Level::Native => by_native(options, native, features).await,
            Level::Runc => by_oci(options, level, "runc").await,
            Level::Crun => by_oci(options, level, "crun").await,
            Level::Youki => by_oci(options, level, "youki").await,
            Level::Gvisor => by_oci(options, level, "runsc").await,
            Level::Firecracker => firecracker(options).await,
        });
    }
    checks
}

/// Returns the limits and networks that each level with a backend can enforce.
pub(super) fn holds(hierarchy: &Hierarchy) -> Vec<Holds> {
    let held = |level: Level| {
        let (limits, networks) = match level {
            Level::None => (none::enforcement(), vec!["open"]),
            Level::Native => (native::enforcement(hierarchy), vec!["none", "open", "hosts"]),
            #[cfg(not(feature = "oci"))]
            Level::Runc | Level::Crun | Level::Youki | Level::Gvisor => return None,
            #[cfg(feature = "oci")]
            Level::Runc | Level::Crun | Level::Youki | Level::Gvisor => {
                (oci::enforcement(level, hierarchy), vec!["none", "open", "hosts"])
            }
            #[cfg(feature = "firecracker")]
            Level::Firecracker => (crate::levels::firecracker::enforcement(hierarchy), vec!["none"]),
            #[cfg(not(feature = "firecracker"))]
            Level::Firecracker => return None,
        };
        Some(Holds { level, limits, networks })
    };
    Level::ALL.into_iter().filter_map(held).collect()
}

async fn none(options: &ProbeOptions) -> Probed {
    let name = Level::None.as_str();
    match try_level(&Unconfined::default(), &options.confinement, options).await {
        Ok(()) => Probed::works(name, "programs run with your own rights, and are cleaned up after"),
        Err(told) => Probed::fails(name, told, "see that /proc is mounted and that this program may be executed"),
    }
}

async fn by_native(options: &ProbeOptions, native: &Native, features: &[Probed]) -> Probed {
    let name = Level::Native.as_str();
    match try_native(native, options).await {
        Ok(()) => Probed::works(name, "programs run in namespaces, under Landlock and seccomp"),
        Err(told) => {
            // The first part that does not work is the most likely reason.
            let broken = features.iter().find(|check| check.state == ProbeState::Fails);
            let hint = broken.map(|check| match &check.hint {
                Some(hint) => format!("this machine lacks {}: {hint}", check.name),
                None => format!("this machine lacks {}", check.name),
            });
            let hint = match hint {
                Some(hint) => hint,
                None if works_elsewhere(native, options).await => {
                    "it works in other workspaces: go to a folder of your own, or name one by `--workspace DIR`".into()
                }
                None => "every part of it works by itself; see the reason".into(),
            };
            Probed::fails(name, told, hint)
        }
    }
}

/// Reports that this build has no OCI levels.
#[cfg(not(feature = "oci"))]
async fn by_oci(_options: &ProbeOptions, level: Level, _program: &str) -> Probed {
    let absent = crate::Unavailable::oci(level);
    let (problem, hint) = absent.reason();
    Probed::fails(level.as_str(), problem, hint)
}

/// Returns whether a runtime is there and runs a container.
#[cfg(feature = "oci")]
async fn by_oci(options: &ProbeOptions, level: Level, program: &str) -> Probed {
    let found = installed(options, level, program).await;
    if found.state == ProbeState::Fails {
        return found;
    }
    // Do not make the state folder: without one, use a temporary folder.
    let (state, passing) = match options.native.state.as_ref().filter(|state| state.exists()) {
        Some(state) => (state.join("oci"), None),
        None => match passing_folder(level) {
            Ok(folder) => (folder.clone(), Some(folder)),
            Err(error) => {
                let told = format!("cannot make a folder in `{}`: {error}", std::env::temp_dir().display());
                return Probed::fails(level.as_str(), told, "see that it can be written to, or make the state folder");
            }
        },
    };
    let (rootfs, home) = (options.system.clone(), options.native.home.clone());
    let probed = match Oci::new(OciOptions { rootfs, home, ..OciOptions::new(level, state) }).probe().await {
        Ok(version) => Probed::works(level.as_str(), version.0),
        Err(OciProblem { problem, hint }) => Probed::fails(level.as_str(), problem, hint),
    };
    if let Some(folder) = passing {
        let _ = fs::remove_dir_all(folder.join("images"));
        remove_emptied(&folder).await;
    }
    probed
}

/// Makes a temporary folder that only this user can open.
fn passing_folder(level: Level) -> io::Result<PathBuf> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let folder = std::env::temp_dir().join(format!("wieldy-probe-{}-{}-{now}", level.as_str(), std::process::id()));
    fs::DirBuilder::new().mode(0o700).create(&folder)?;
    Ok(folder)
}

/// Runs a program that does nothing by this backend, and returns an error if that fails.
async fn try_level(sandbox: &dyn Sandbox, confinement: &Confinement, options: &ProbeOptions) -> Result<(), String> {
    match run(sandbox, "true", &[], confinement, options, Arc::new(Said::default())).await {
        Ok(Exit { ended: Ended::Code(0), .. }) => Ok(()),
        Ok(exit) => Err(format!("`true` ended with {:?}", exit.ended)),
        Err(error) => Err(error.message()),
    }
}

/// Returns true if the native level works in a new folder, which means that the workspace is the problem.
async fn works_elsewhere(native: &Native, options: &ProbeOptions) -> bool {
    let Ok(folder) = passing_folder(Level::Native) else { return false };
    let mut options = options.clone();
    options.confinement.workspace = folder.clone();
    let works = try_native(native, &options).await.is_ok();
    remove_emptied(&folder).await;
    works
}

/// Tries the native level in a sandbox of its own, which is gone when this returns.
async fn try_native(native: &Native, options: &ProbeOptions) -> Result<(), String> {
    let confinement = Confinement { place: Place::Own, ..options.confinement.clone() };
    let made = native.create(&confinement).await.map_err(|error| error.message())?;
    let id = made.sandbox.id;
    let confinement = Confinement { place: Place::Sandbox(id.clone()), ..confinement };
    let tried = try_level(native, &confinement, options).await;
    native.destroy(&id).await;
    tried
}

async fn run(
    sandbox: &dyn Sandbox,
    program: &str,
    arguments: &[&str],
    confinement: &Confinement,
    options: &ProbeOptions,
    said: Arc<Said>,
) -> Result<Exit, SandboxError> {
    let command = Command {
        program: program.into(),
        arguments: arguments.iter().map(|&word| word.into()).collect(),
        environment: BTreeMap::from([("PATH".to_owned(), format!("{}:/usr/bin:/bin", options.path))]),
        folder: PathBuf::new(),
        stdin: Stdin::Nothing,
        terminal: None,
    };
    let stop = CancellationToken::new();
    let clock = {
        let stop = stop.clone();
        tokio::spawn(async move {
            tokio::time::sleep(PATIENCE).await;
            stop.cancel();
        })
    };
    let exit = sandbox.execute(&command, confinement, said, stop).await;
    clock.abort();
    exit
}

/// Returns whether the program of a level is there, with the version that it reports. Whether it works is not tried.
#[cfg(feature = "oci")]
async fn installed(options: &ProbeOptions, level: Level, program: &str) -> Probed {
    let Some(path) = find(program, &options.path) else {
        let hint = match Level::Native.is_at_least(level) {
            true => format!("install `{program}`, or use `native`, which is as strong as this level"),
            false => format!("install `{program}`; `native` works without it and is weaker than this level"),
        };
        return Probed::fails(level.as_str(), format!("no program `{program}` is on the PATH"), hint);
    };
    let told = format!("found, not yet probed: {}", path.display());
    match version(options, &path).await {
        Some(version) => Probed::found(level.as_str(), format!("{told}, {version}")),
        None => Probed::found(level.as_str(), told),
    }
}

/// Reports that this build has no such level.
#[cfg(not(feature = "firecracker"))]
async fn firecracker(_options: &ProbeOptions) -> Probed {
    let absent = crate::Unavailable::firecracker();
    let (problem, hint) = absent.reason();
    Probed::fails(Level::Firecracker.as_str(), problem, hint)
}

/// Checks that everything is there that a guest needs, and if so, that one boots and runs a program.
#[cfg(feature = "firecracker")]
async fn firecracker(options: &ProbeOptions) -> Probed {
    use crate::{Firecracker, FirecrackerOptions, FirecrackerProblem};
    let name = Level::Firecracker.as_str();
    let guest = options.firecracker.clone();
    let version = match Firecracker::new(guest.clone()).probe() {
        Ok(version) => version,
        Err(FirecrackerProblem { problem, hint }) => return Probed::fails(name, problem, hint),
    };
    let folder = match passing_folder(Level::Firecracker) {
        Ok(folder) => folder,
        Err(error) => {
            let told = format!("cannot make a folder in `{}`: {error}", std::env::temp_dir().display());
            return Probed::fails(name, told, "see that it can be written to");
        }
    };
    let (state, workspace) = (folder.join("state"), folder.join("workspace"));
    let confinement = Confinement {
        workspace: workspace.clone(),
        files: Arc::default(),
        network: wieldy_core::Network::None,
        place: Place::Own,
        ..options.confinement.clone()
    };
    let tried = match fs::create_dir(&workspace) {
        Ok(()) => try_level(&Firecracker::new(FirecrackerOptions { state, ..guest }), &confinement, options).await,
        Err(error) => Err(error.to_string()),
    };
    let _ = fs::remove_dir_all(&folder);
    match tried {
        Ok(()) => Probed::works(name, version),
        Err(told) => {
            let hint = "see that Firecracker boots this kernel and root file system by itself, or use another level";
            Probed::fails(name, format!("{version}: {told}"), hint)
        }
    }
}

/// Returns the first file of this name on the path that any user may execute.
#[cfg(feature = "oci")]
fn find(program: &str, path: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let may_run = |file: &Path| file.metadata().is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0);
    path.split(':')
        .filter(|folder| folder.starts_with('/'))
        .map(|folder| Path::new(folder).join(program))
        .find(|file| may_run(file))
}

/// Returns the first line that a program prints for `--version`.
#[cfg(feature = "oci")]
async fn version(options: &ProbeOptions, program: &Path) -> Option<String> {
    let said = Arc::new(Said::default());
    let exit = run(
        &Unconfined::default(),
        program.to_str()?,
        &["--version"],
        &options.confinement,
        options,
        Arc::clone(&said),
    )
    .await
    .ok()?;
    let text = said.text();
    let line = text.lines().find(|line| !line.trim().is_empty())?.trim();
    (exit.ended == Ended::Code(0)).then(|| line.chars().filter(|c| !c.is_control()).take(80).collect())
}

/// The beginning of a program's output.
#[derive(Default)]
struct Said(Mutex<Vec<u8>>);

impl Said {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

impl OutputSink for Said {
    fn write(&self, stream: Stream, bytes: &[u8]) {
        if stream == Stream::Stdout {
            let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let room = SAID_BYTES_MAX.saturating_sub(said.len());
            said.extend_from_slice(bytes.get(..room).unwrap_or(bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn program(folder: &Path, name: &str, script: &str) {
        let path = folder.join(name);
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[tokio::test]
    async fn a_runtime_is_found_with_its_version_and_not_promised_to_work() {
        let world = tempfile::tempdir().unwrap();
        fs::write(world.path().join("crun"), "not to be executed").unwrap();
        program(world.path(), "runc", "#!/bin/sh\necho\necho 'runc version 1.2'\necho more\n");
        program(world.path(), "runsc", "#!/bin/sh\nexit 1\n");
        let mut options = ProbeOptions::new(world.path());
        options.path = format!("{}:/usr/bin:/bin", world.path().display());
        let at = |name: &str| world.path().join(name).display().to_string();
        assert_eq!(
            installed(&options, Level::Runc, "runc").await,
            Probed::found("runc", format!("found, not yet probed: {}, runc version 1.2", at("runc")))
        );
        assert_eq!(
            installed(&options, Level::Gvisor, "runsc").await,
            Probed::found("gvisor", format!("found, not yet probed: {}", at("runsc")))
        );
        options.path = world.path().display().to_string();
        fs::remove_file(world.path().join("runsc")).unwrap();
        assert_eq!(
            installed(&options, Level::Crun, "crun").await,
            Probed::fails(
                "crun",
                "no program `crun` is on the PATH",
                "install `crun`, or use `native`, which is as strong as this level"
            )
        );
        assert_eq!(
            installed(&options, Level::Gvisor, "runsc").await,
            Probed::fails(
                "gvisor",
                "no program `runsc` is on the PATH",
                "install `runsc`; `native` works without it and is weaker than this level"
            )
        );
    }

    #[tokio::test]
    async fn a_failing_level_is_reported_with_its_first_failing_feature() {
        let mut options = ProbeOptions::new(Path::new("/no/such/workspace"));
        options.native.home = None;
        let native = Native::new(options.native.clone());
        let features = [Probed::works("a", "x"), Probed::fails("user namespaces", "no", "do this")];
        assert_eq!(
            by_native(&options, &native, &features).await,
            Probed::fails(
                "native",
                "cannot make a sandbox: the workspace `/no/such/workspace`: No such file or directory (os error 2)",
                "this machine lacks user namespaces: do this"
            )
        );
    }
}
