//! Probes this machine: the controllers that it has, those that we may use, and the reasons for the others.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::{Access, access};
use rustix::process::{Pid, geteuid, getpid};

use super::group::Layout;
use super::mounts::{Mount, mounts};
use super::sweep::{Home, make_home, next_number};
use super::{Controller, Finding, Group, Kind, Place, Reason, Version, folder};

/// The group to which an executor moves itself on v2.
const MAIN: &str = "wieldy-main";

/// The findings, with the executor's own group in every mount in use.
pub(super) struct Found {
    pub(super) kind: Kind,
    pub(super) findings: Vec<Finding>,
    pub(super) bases: Vec<PathBuf>,
    pub(super) locks: Vec<File>,
    pub(super) own: Group,
}

/// Finds the group of this process, and makes the executor's own group in every mount that allows it.
pub(super) fn find() -> Found {
    let text = |path| fs::read_to_string(path).unwrap_or_default();
    let mut mounts = mounts(&text("/proc/self/cgroup"), &text("/proc/self/mountinfo"));
    mounts.retain(|mount| mount.version == Version::V2 || Controller::ALL.iter().any(|it| mount.has(*it)));
    let kind = kind(&mounts);
    let choice = Controller::ALL.map(|controller| choose(&mounts, controller));
    let layout = Layout { versions: Vec::new(), places: [None; _], passed_on: Vec::new(), quotas: Mutex::default() };
    let mut search =
        Search { layout, bases: Vec::new(), homes: Vec::new(), number: next_number(), reasons: [const { None }; _] };
    for (index, mount) in mounts.iter().enumerate() {
        let wanted = Controller::ALL.into_iter().filter(|it| choice[*it as usize] == Some(index)).collect::<Vec<_>>();
        if !wanted.is_empty() {
            search.try_mount(mount, &wanted);
        }
    }
    let findings = Controller::ALL.map(|controller| search.finding(controller)).into();
    let (folders, locks) = search.homes.into_iter().map(|home| (home.folder, home.lock)).unzip();
    Found { kind, findings, bases: search.bases, locks, own: Group::own(search.layout, folders) }
}

fn kind(mounts: &[Mount]) -> Kind {
    let has = |version| mounts.iter().any(|mount| mount.version == version);
    match (has(Version::V1), has(Version::V2)) {
        (true, true) => Kind::Hybrid,
        (true, false) => Kind::V1,
        (false, true) => Kind::V2,
        (false, false) => Kind::None,
    }
}

/// Returns the mount in which a controller is used.
fn choose(mounts: &[Mount], controller: Controller) -> Option<usize> {
    let v1 = mounts.iter().position(|mount| mount.version == Version::V1 && mount.has(controller));
    let v2 = mounts.iter().position(|mount| mount.version == Version::V2);
    match controller {
        // v2 kills a group by one write, v1 can only freeze it.
        Controller::Kill => v2.or(v1),
        _ => v1.or(v2),
    }
}

impl Mount {
    fn has(&self, controller: Controller) -> bool {
        self.controllers.iter().any(|name| name == controller.names(Version::V1).0)
    }
}

impl Controller {
    /// Returns the kernel's name of the controller, and the file by which a group shows that it has the controller.
    fn names(self, version: Version) -> (&'static str, &'static str) {
        match (version, self) {
            (Version::V1, Self::Cpu) => ("cpu", "cpu.cfs_quota_us"),
            (Version::V1, Self::Memory) => ("memory", "memory.limit_in_bytes"),
            (Version::V1, Self::Cpuacct) => ("cpuacct", "cpuacct.usage"),
            (Version::V1, Self::Io) => ("blkio", "blkio.throttle.io_service_bytes"),
            (Version::V1, Self::Kill) => ("freezer", "freezer.state"),
            (Version::V2, Self::Cpu) => ("cpu", "cpu.max"),
            (Version::V2, Self::Memory) => ("memory", "memory.max"),
            (Version::V2, Self::Io) => ("io", "io.stat"),
            (_, Self::Pids) => ("pids", "pids.max"),
            // These two are parts of v2 itself.
            (Version::V2, Self::Cpuacct) => ("", "cpu.stat"),
            (Version::V2, Self::Kill) => ("", "cgroup.kill"),
        }
    }
}

/// The findings so far.
struct Search {
    layout: Layout,
    bases: Vec<PathBuf>,
    homes: Vec<Home>,
    /// The number in the names of the executor's folders, the same in every mount.
    number: usize,
    reasons: [Option<Reason>; Controller::ALL.len()],
}

impl Search {
    /// Tries to use these controllers in this mount.
    fn try_mount(&mut self, mount: &Mount, wanted: &[Controller]) {
        let mut refuse =
            |reason: &Reason| wanted.iter().for_each(|it| self.reasons[*it as usize] = Some(reason.clone()));
        let Some(own_folder) = &mount.folder else {
            let problem = format!(
                "the group of this process is outside of the tree that is mounted at `{}`",
                mount.point.display()
            );
            return refuse(&Reason { problem, hint: "mount the control groups anew in this namespace".into() });
        };
        let (base, obstacle) = match mount.version {
            Version::V1 => (own_folder.clone(), None),
            Version::V2 => make_base(own_folder, wanted),
        };
        let home = match make_home(&base, self.number) {
            Ok(home) => home,
            Err(error) => return refuse(&why_not(&error, &base, mount.version)),
        };
        if mount.version == Version::V1 && wanted.contains(&Controller::Memory) {
            // Before 5.11 the limit of a group held for those below it only if this was set.
            let _ = folder::write(&home.folder, "memory.use_hierarchy", "1");
        }
        let index = self.homes.len();
        for controller in wanted {
            match check(&home.folder, *controller, mount.version) {
                Ok(()) => self.layout.places[*controller as usize] = Some(index),
                Err(reason) => self.reasons[*controller as usize] = Some(obstacle.clone().unwrap_or(reason)),
            }
        }
        let usable = wanted.iter().filter(|it| self.layout.places[**it as usize] == Some(index));
        let names = usable.map(|it| it.names(mount.version).0).collect::<Vec<_>>();
        if names.is_empty() {
            let _ = folder::remove(&home.folder);
            return;
        }
        if mount.version == Version::V2 {
            self.layout.passed_on = names.into_iter().filter(|name| !name.is_empty()).collect();
        }
        self.layout.versions.push(mount.version);
        self.bases.push(base);
        self.homes.push(home);
    }

    fn finding(&self, controller: Controller) -> Finding {
        let place = self.layout.places[controller as usize].and_then(|index| {
            Some(Place { version: *self.layout.versions.get(index)?, folder: self.bases.get(index)?.clone() })
        });
        let usable = place.ok_or_else(|| {
            let reason = self.reasons[controller as usize].clone();
            reason.unwrap_or_else(|| Reason {
                problem: format!("the controller `{}` is not mounted", controller.names(Version::V1).0),
                hint: "mount cgroup v2 at /sys/fs/cgroup".into(),
            })
        });
        Finding { controller, usable }
    }
}

/// Checks that the executor's new group has the controller and lets us use it.
fn check(home: &Path, controller: Controller, version: Version) -> Result<(), Reason> {
    let (name, file) = controller.names(version);
    let path = home.join(file);
    let limits = matches!(controller, Controller::Cpu | Controller::Memory | Controller::Pids | Controller::Kill);
    let needed = if limits { Access::WRITE_OK } else { Access::READ_OK };
    match access(&path, needed) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::NOENT) => Err(Reason {
            problem: format!("this kernel has no `{file}` in `{}`", home.display()),
            hint: match name {
                "" => "a newer kernel has it".into(),
                name => format!("boot with the controller `{name}` (a kernel that has it, no `cgroup_disable={name}`)"),
            },
        }),
        Err(error) => Err(why_not(&error.into(), &path, version)),
    }
}

/// Returns the folder of a v2 tree in which groups with these controllers can be made. If some cannot be passed on,
/// also returns the reason.
fn make_base(own_folder: &Path, wanted: &[Controller]) -> (PathBuf, Option<Reason>) {
    // Another executor of this process, or of its parent, has moved us.
    let moved = own_folder.file_name().is_some_and(|name| name == MAIN);
    let base = own_folder.parent().filter(|_| moved).unwrap_or(own_folder);
    let here = folder::read(base, "cgroup.controllers").unwrap_or_default();
    let passed = folder::read(base, "cgroup.subtree_control").unwrap_or_default();
    let has = |text: &str, name: &str| text.split_whitespace().any(|word| word == name);
    let names = wanted.iter().map(|it| it.names(Version::V2).0).filter(|name| !name.is_empty());
    let missing: Vec<&str> = names.filter(|name| !has(&passed, name)).collect();
    let absent: Vec<&str> = missing.iter().copied().filter(|name| !has(&here, name)).collect();
    let enabled: Vec<&str> = missing.into_iter().filter(|name| has(&here, name)).collect();
    let obstacle = if enabled.is_empty() { None } else { pass_on(base, &enabled).err() };
    let obstacle = obstacle.or_else(|| {
        // The root has no group above it that could have given them.
        let given = base.join("cgroup.type").exists();
        (given && !absent.is_empty()).then(|| Reason {
            problem: format!("`{}` was not given the controllers `{}`", base.display(), absent.join("`, `")),
            hint: delegate(),
        })
    });
    (base.to_owned(), obstacle)
}

/// Passes controllers on to the children of a v2 group, which needs a group without processes unless it is the root.
fn pass_on(base: &Path, names: &[&str]) -> Result<(), Reason> {
    let enable = || names.iter().try_for_each(|name| folder::enable(base, name));
    let explain = |error: &io::Error| why_not(error, base, Version::V2);
    let is_root = !base.join("cgroup.type").exists();
    let inside = folder_processes(base);
    if is_root || inside.is_empty() {
        return enable().map_err(|error| explain(&error));
    }
    if inside != [getpid()] {
        return Err(Reason {
            problem: format!(
                "other processes are in the control group `{}`, too, which thus cannot be divided",
                base.display()
            ),
            hint: delegate(),
        });
    }
    let main = base.join(MAIN);
    match fs::create_dir(&main) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(explain(&error)),
        _ => {}
    }
    let moved = folder::add(&main, getpid()).and_then(|()| enable());
    moved.map_err(|error| {
        let _ = folder::add(base, getpid());
        let _ = fs::remove_dir(&main);
        explain(&error)
    })
}

/// Returns the processes in this group itself.
fn folder_processes(folder: &Path) -> Vec<Pid> {
    let text = folder::read(folder, "cgroup.procs").unwrap_or_default();
    text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)).collect()
}

/// Returns the reason why a folder or file cannot be used, from the error that it caused.
fn why_not(error: &io::Error, path: &Path, version: Version) -> Reason {
    let shown = path.display();
    match (error.kind(), version) {
        (io::ErrorKind::PermissionDenied, Version::V2) => {
            Reason { problem: format!("`{shown}` is not ours to write to"), hint: delegate() }
        }
        (io::ErrorKind::PermissionDenied, Version::V1) => Reason {
            problem: format!("`{shown}` is not ours to write to"),
            hint: "run as root, or have root make a group there, give it to this user and start us in it".into(),
        },
        (io::ErrorKind::ReadOnlyFilesystem, _) => Reason {
            problem: format!("`{shown}` is mounted read-only"),
            hint: "mount it to be written to; in a container, start that with writable control groups".into(),
        },
        _ => Reason {
            problem: format!("`{shown}` cannot be used: {error}"),
            hint: "see the kernel's log for the reason".into(),
        },
    }
}

/// Returns the hint for getting an own group from systemd.
fn delegate() -> String {
    let user = if geteuid().is_root() { "" } else { "--user " };
    format!("start with `systemd-run {user}--scope -p Delegate=yes …`")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the kind, and for each controller the folder in which it is looked for.
    fn looked_for(memberships: &str, table: &str) -> (Kind, Vec<String>) {
        let mounts = mounts(memberships, table);
        let shown = Controller::ALL.into_iter().filter_map(|it| {
            let folder = mounts[choose(&mounts, it)?].folder.as_ref()?;
            Some(format!("{} {}", it.name(), folder.display()))
        });
        (kind(&mounts), shown.collect())
    }

    const V1: &str = "1 0 0:1 / /c/cpu rw - cgroup cgroup rw,cpu,cpuacct\n2 0 0:2 / /c/memory rw - cgroup cgroup rw,memory\n\
        3 0 0:3 / /c/freezer rw - cgroup cgroup rw,freezer\n";
    const V2: &str = "4 0 0:4 / /c/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn each_controller_is_taken_from_v1_where_it_is_there_but_killing_from_v2() {
        let memberships = "3:freezer:/\n2:memory:/m\n1:cpu,cpuacct:/\n0::/\n";
        let (kind, places) = looked_for(memberships, &format!("{V1}{V2}"));
        assert_eq!(kind, Kind::Hybrid);
        assert_eq!(
            places,
            [
                "cpu /c/cpu",
                "memory /c/memory/m",
                "pids /c/unified",
                "cpuacct /c/cpu",
                "io /c/unified",
                "kill /c/unified"
            ]
        );
        let (kind, places) = looked_for(memberships, V1);
        assert_eq!(kind, Kind::V1);
        assert_eq!(places, ["cpu /c/cpu", "memory /c/memory/m", "cpuacct /c/cpu", "kill /c/freezer"]);
        assert_eq!(looked_for("0::/\n", V2).0, Kind::V2);
        assert_eq!(looked_for("", ""), (Kind::None, Vec::new()));
    }
}
