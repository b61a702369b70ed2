//! Tries the means of isolation on this machine: the levels that work and their parts, the enforcers of limits, and for everything that does
//! not work the reason and a hint.
//!
//! [`probe`] makes the [`Report`]. The levels are in `probe/levels.rs`, the parts of the kernel in `probe/kernel.rs`.

mod kernel;
mod levels;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use wieldy_core::{Confinement, Enforcement, FileRules, Level, Network, Place, ResourceLimits};

use crate::cgroup::{Finding, Kind, Version};
use crate::filter::seccomp::{self, RefusedCall};
use crate::levels::native;
use crate::view::plan::Plan;
use crate::{Native, NativeOptions, Rootfs};

/// What is tried, and for whom.
#[derive(Debug, Clone)]
pub struct ProbeOptions {
    /// What programs would see, reach and use.
    pub confinement: Confinement,
    /// How the native level is set up.
    pub native: NativeOptions,
    /// The system that programs come from at the levels with an OCI runtime.
    pub system: Rootfs,
    /// How the level `firecracker` is set up.
    #[cfg(feature = "firecracker")]
    pub firecracker: crate::FirecrackerOptions,
    /// Where the programs of other levels are looked for: folders with `:` between them.
    pub path: String,
}

impl ProbeOptions {
    /// What holds for programs in this workspace where nobody says anything.
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
            system: Rootfs::Host,
            #[cfg(feature = "firecracker")]
            firecracker: crate::FirecrackerOptions::new(std::env::temp_dir()),
            path: "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into(),
        }
    }
}

/// What was found. Its JSON is stable: fields are added, never renamed or removed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The kernel's release, such as `6.1.0`.
    pub kernel: String,
    /// The machine's architecture.
    pub architecture: String,
    /// The account that this process runs as; 0 is root.
    pub user: u32,
    /// Every isolation level by its name, weakest first.
    pub levels: Vec<Probed>,
    /// The parts of the kernel that the native level is made of.
    pub features: Vec<Probed>,
    /// How control groups are mounted: `v2`, `hybrid`, `v1` or `none`.
    pub cgroups: &'static str,
    /// The parts of control groups that limit and measure.
    pub controllers: Vec<Probed>,
    /// Who sees to each limit at the native level.
    pub limits: Vec<Enforcement>,
    /// What each level holds programs to, where it works.
    pub holds: Vec<Holds>,
    /// The system calls that programs are refused at the native level.
    pub refused: Vec<RefusedCall>,
    /// The paths of the placeholders that sandboxes put into the workspace while a command runs.
    pub placeholders: Vec<String>,
    /// What programs see at the native level, a line for each step; or why there is no such plan.
    #[serde(skip)]
    pub plan: Result<Vec<String>, String>,
}

impl Report {
    /// Whether programs can run at this level here.
    pub fn works(&self, level: Level) -> bool {
        self.levels.iter().any(|probed| probed.name == level.as_str() && probed.state == ProbeState::Works)
    }
}

/// Returns the paths of a plan's placeholders, from the workspace.
fn placeholders(plan: &Plan, workspace: &Path) -> Vec<String> {
    let workspace = workspace.canonicalize().unwrap_or_else(|_| workspace.to_owned());
    let paths = plan.placeholders.iter().map(|held| held.path.strip_prefix(&workspace).unwrap_or(&held.path));
    paths.map(|path| path.display().to_string()).collect()
}

/// What a level holds programs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Holds {
    /// The level.
    pub level: Level,
    /// Who sees to each limit.
    pub limits: Vec<Enforcement>,
    /// What programs can be given to reach: `none`, `open`, and `hosts` for those of a list.
    pub networks: Vec<&'static str>,
}

/// What was found out about one thing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Probed {
    /// What was looked at.
    pub name: String,
    /// How it stands.
    pub state: ProbeState,
    /// What was found, or what is wrong.
    pub told: String,
    /// What can be done about it.
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

/// How something stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProbeState {
    /// It was tried and works.
    Works,
    /// It is there and was not tried, so nothing is promised.
    Found,
    /// It does not work.
    Fails,
}

/// Tries everything. Needs a Tokio runtime with I/O and time, and leaves nothing behind.
pub async fn probe(options: &ProbeOptions) -> Report {
    let native = Native::new(NativeOptions { warm_sandboxes: 0, ..options.native.clone() });
    // First, as long as no sandbox holds anything in the workspace.
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
        plan: plan.map(|plan| plan.to_string().lines().map(str::to_owned).collect()).map_err(|error| error.to_string()),
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
    fn a_controller_is_told_with_its_place_or_with_what_to_do() {
        let place = Place { version: Version::V1, folder: "/c/cpu".into() };
        let cpu = Finding { controller: Controller::Cpu, usable: Ok(place) };
        assert_eq!(controller(&cpu), Probed::works("cpu", "v1, below `/c/cpu`"));
        let reason = Reason { problem: "not ours".into(), hint: "be root".into() };
        let memory = Finding { controller: Controller::Memory, usable: Err(reason) };
        assert_eq!(controller(&memory), Probed::fails("memory", "not ours", "be root"));
    }
}
