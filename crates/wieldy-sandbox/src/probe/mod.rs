//! Tries the means of isolation on this machine: levels, parts of the kernel, and enforcers of limits. Reports the
//! reason and a hint for everything that does not work.
//!
//! [`probe`] makes the [`Report`]. The levels are in `probe/levels.rs`, the parts of the kernel in `probe/kernel.rs`.

mod kernel;
mod levels;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use wieldy_core::{Confinement, Enforcement, FileRules, Level, Network, Place, ResourceLimits};

#[cfg(feature = "oci")]
use crate::Rootfs;
use crate::cgroup::{Finding, Kind, Version};
use crate::filter::seccomp::{self, RefusedCall};
use crate::levels::native;
use crate::view::mounts::may_be_on_disk;
use crate::view::plan::Plan;
use crate::{Native, NativeOptions};

/// The settings to try with.
#[derive(Debug, Clone)]
pub struct ProbeOptions {
    /// The files, network and resources that programs would have.
    pub confinement: Confinement,
    /// The options of the native level.
    pub native: NativeOptions,
    /// The root file system of programs at the levels with an OCI runtime.
    #[cfg(feature = "oci")]
    pub system: Rootfs,
    /// The options of the level `firecracker`.
    #[cfg(feature = "firecracker")]
    pub firecracker: crate::FirecrackerOptions,
    /// The folders in which the programs of other levels are looked for, separated by `:`.
    pub path: String,
}

impl ProbeOptions {
    /// Returns the default options for programs in this workspace.
    pub fn new(workspace: &Path) -> Self {
        Self {
            confinement: Confinement {
                workspace: workspace.to_owned(),
                files: Arc::new(FileRules::default()),
                network: Network::None,
                limits: ResourceLimits::DEFAULT,
                place: Place::Own,
                place_limits: ResourceLimits::default(),
                grace: Duration::from_secs(1),
            },
            native: NativeOptions::default(),
            #[cfg(feature = "oci")]
            system: Rootfs::Host,
            #[cfg(feature = "firecracker")]
            firecracker: crate::FirecrackerOptions::new(std::env::temp_dir()),
            path: "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into(),
        }
    }
}

/// The findings of a probe. Its JSON is stable: fields are added, never renamed or removed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The kernel's release, such as `6.1.0`.
    pub kernel: String,
    /// The machine's architecture.
    pub architecture: String,
    /// The user id of this process; 0 is root.
    pub user: u32,
    /// Every isolation level by its name, weakest first.
    pub levels: Vec<Probed>,
    /// The findings about each kernel feature that the native level needs.
    pub features: Vec<Probed>,
    /// The way control groups are mounted: `v2`, `hybrid`, `v1` or `none`.
    pub cgroups: &'static str,
    /// The controllers of control groups, which limit and measure.
    pub controllers: Vec<Probed>,
    /// The enforcer of each limit at the native level.
    pub limits: Vec<Enforcement>,
    /// The limits and networks that each working level can enforce.
    pub holds: Vec<Holds>,
    /// The system calls that programs are refused at the native level.
    pub refused: Vec<RefusedCall>,
    /// The paths of the placeholders that sandboxes put into the workspace while a command runs.
    pub placeholders: Vec<String>,
    /// The plan of the native level, a line for each step; or the reason why there is none.
    #[serde(skip)]
    pub plan: Result<Vec<String>, String>,
}

impl Report {
    /// Returns true if programs can run at this level here.
    pub fn works(&self, level: Level) -> bool {
        self.levels.iter().any(|probed| probed.name == level.as_str() && probed.state == ProbeState::Works)
    }
}

/// Returns a plan's lines. If the level `has_disk`, its private folders are not in memory.
fn lines(plan: &Plan, has_disk: bool) -> Vec<String> {
    let on_disk = |line: &str| {
        let (path, rest) = line.strip_prefix("memory  ")?.trim_start().split_once(' ')?;
        let is_private = has_disk && path != "/" && may_be_on_disk(Path::new(path));
        is_private.then(|| format!("disk     {path} {rest}"))
    };
    plan.to_string().lines().map(|line| on_disk(line).unwrap_or_else(|| line.to_owned())).collect()
}

/// Returns the paths of a plan's placeholders, from the workspace.
fn placeholders(plan: &Plan, workspace: &Path) -> Vec<String> {
    let workspace = workspace.canonicalize().unwrap_or_else(|_| workspace.to_owned());
    let paths = plan.placeholders.iter().map(|held| held.path.strip_prefix(&workspace).unwrap_or(&held.path));
    paths.map(|path| path.display().to_string()).collect()
}

/// The limits and networks that a level can enforce.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Holds {
    /// The level.
    pub level: Level,
    /// The enforcer of each limit.
    pub limits: Vec<Enforcement>,
    /// The networks that programs can be given: `none`, `open`, and `hosts` for a list of hosts.
    pub networks: Vec<&'static str>,
}

/// The finding about one level, part or controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Probed {
    /// The name of the level, part or controller.
    pub name: String,
    /// The result of the try.
    pub state: ProbeState,
    /// The finding, or the problem.
    pub told: String,
    /// The remedy for the problem.
    pub hint: Option<String>,
}

impl Probed {
    fn works(name: impl Into<String>, told: impl Into<String>) -> Self {
        Self { name: name.into(), state: ProbeState::Works, told: told.into(), hint: None }
    }

    fn fails(name: impl Into<String>, told: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { name: name.into(), state: ProbeState::Fails, told: told.into(), hint: Some(hint.into()) }
    }

    fn found(name: impl Into<String>, told: impl Into<String>) -> Self {
        Self { name: name.into(), state: ProbeState::Found, told: told.into(), hint: None }
    }
}

/// The result of a try.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProbeState {
    /// It was tried and works.
    Works,
    /// It is there but was not tried, so it may not work.
    Found,
    /// It does not work.
    Fails,
}

/// Tries everything. Needs a Tokio runtime with I/O and time, and leaves nothing behind.
pub async fn probe(options: &ProbeOptions) -> Report {
    let native = Native::new(NativeOptions { warm_sandboxes: 0, ..options.native.clone() });
    // Planned first, while no sandbox has placeholders in the workspace.
    let plan = native.plan(&options.confinement);
    let workspace = options.confinement.workspace.clone();
    let features = tokio::task::spawn_blocking(move || kernel::features(&workspace)).await.unwrap_or_default();
    let levels = levels::levels(options, &native, &features).await;
    let hierarchy = native.hierarchy();
    let uname = rustix::system::uname();
    Report {
        kernel: uname.release().to_string_lossy().into_owned(),
        architecture: uname.machine().to_string_lossy().into_owned(),
        user: rustix::process::geteuid().as_raw(),
        levels,
        features,
        cgroups: match hierarchy.kind() {
            Kind::V2 => "v2",
            Kind::Hybrid => "hybrid",
            Kind::V1 => "v1",
            Kind::None => "none",
        },
        controllers: hierarchy.findings().iter().map(controller).collect(),
        limits: native::enforcement(hierarchy),
        holds: levels::holds(hierarchy),
        refused: seccomp::refused().collect(),
        placeholders: plan
            .as_ref()
            .map_or_else(|_| Vec::new(), |plan| placeholders(plan, &options.confinement.workspace)),
        plan: plan.map(|plan| lines(&plan, options.native.folder.is_some())).map_err(|error| error.message()),
    }
}

fn controller(finding: &Finding) -> Probed {
    let name = finding.controller.name();
    match &finding.usable {
        Ok(place) => {
            let version = match place.version {
                Version::V1 => "v1",
                Version::V2 => "v2",
            };
            Probed::works(name, format!("{version}, below `{}`", place.folder.display()))
        }
        Err(reason) => Probed::fails(name, &reason.problem, &reason.hint),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::{Controller, Place, Reason};

    #[test]
    fn a_controller_is_reported_with_its_cgroup_or_with_a_hint() {
        let place = Place { version: Version::V1, folder: "/c/cpu".into() };
        let cpu = Finding { controller: Controller::Cpu, usable: Ok(place) };
        assert_eq!(controller(&cpu), Probed::works("cpu", "v1, below `/c/cpu`"));
        let reason = Reason { problem: "not ours".into(), hint: "be root".into() };
        let memory = Finding { controller: Controller::Memory, usable: Err(reason) };
        assert_eq!(controller(&memory), Probed::fails("memory", "not ours", "be root"));
    }
}
