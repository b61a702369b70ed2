//! Makes nested cgroups for containers: a session's contains those of all its containers, and a container's contains
//! those of its commands and of the containers that were made within it. A limit holds for everything below it
//! together.
//!
//! On cgroup v1, where each controller has a tree of its own, runtimes make more cgroups beside ours. They are found
//! and removed here as well.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use wieldy_core::{Level, ResourceLimits, SessionKey};

use crate::cgroup::{Group, GroupLimits, Hierarchy};

/// A cgroup, whose limits are raised by the overhead of runtimes.
pub(super) struct CgroupParent {
    pub(super) group: Group,
    limits: GroupLimits,
    overhead: Mutex<Overhead>,
    /// Cgroups that the runtime makes beside ours.
    foreign: Vec<PathBuf>,
    // Dropped last: the cgroups of this one must be removed before those above it.
    above: Option<Arc<CgroupParent>>,
}

/// The resources that a runtime and its sleeper need in addition to the limits of commands.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Overhead {
    pub(super) memory_bytes: u64,
    pub(super) processes: u64,
}

/// The number of processes and threads of a runtime until it has become the program that it starts.
pub(super) const STARTING: u64 = 8;

impl CgroupParent {
    /// Makes a cgroup for one container or for several, below `above` if there is one.
    pub(super) fn make(
        name: &str,
        level: Level,
        limits: &ResourceLimits,
        above: Option<Arc<Self>>,
        hierarchy: &Hierarchy,
    ) -> io::Result<Arc<Self>> {
        let group = match &above {
            Some(above) => above.group.child(name)?,
            None => hierarchy.group(name)?,
        };
        let foreign = match level {
            Level::Gvisor => Vec::new(),
            _ => beside(&group, hierarchy),
        };
        let limits = container_group_limits(level, limits);
        group.set(&limits)?;
        Ok(Arc::new(Self { group, limits, overhead: Mutex::default(), foreign, above }))
    }

    /// Returns the cgroups that the runtime makes beside ours.
    pub(super) fn foreign(&self) -> &[PathBuf] {
        &self.foreign
    }

    /// Raises the limits for a runtime that starts a program, here and in the cgroups above.
    pub(super) fn raise_for_start(self: &Arc<Self>) -> io::Result<RaisedLimits> {
        self.raise(Overhead { memory_bytes: 0, processes: STARTING })
    }

    /// Raises the limits by an overhead that no command may use, here and in the cgroups above.
    pub(super) fn raise(self: &Arc<Self>, room: Overhead) -> io::Result<RaisedLimits> {
        let made = RaisedLimits { parent: Arc::clone(self), room };
        self.all().try_for_each(|parent| {
            parent.change(|overhead| Overhead {
                memory_bytes: overhead.memory_bytes.saturating_add(room.memory_bytes),
                processes: overhead.processes.saturating_add(room.processes),
            })
        })?;
        Ok(made)
    }

    /// Returns this one and those above it.
    fn all(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |parent| parent.above.as_deref())
    }

    fn change(&self, change: impl FnOnce(Overhead) -> Overhead) -> io::Result<()> {
        let mut overhead = lock(&self.overhead);
        *overhead = change(*overhead);
        let GroupLimits { cpu_millicores, memory_bytes, processes } = self.limits;
        self.group.set(&GroupLimits {
            cpu_millicores,
            memory_bytes: memory_bytes.map(|bytes| bytes.saturating_add(overhead.memory_bytes)),
            processes: processes.map(|count| count.saturating_add(overhead.processes)),
        })
    }
}

impl Drop for CgroupParent {
    fn drop(&mut self) {
        // Usually the runtime has removed them, but not if it failed early, and not for a session.
        self.foreign.iter().for_each(|group| drop(fs::remove_dir(group)));
    }
}

/// A guard that keeps limits raised until it is dropped.
pub(super) struct RaisedLimits {
    parent: Arc<CgroupParent>,
    room: Overhead,
}

impl Drop for RaisedLimits {
    fn drop(&mut self) {
        for parent in self.parent.all() {
            // If this fails, the limits stay raised until the cgroup is removed.
            let _ = parent.change(|overhead| Overhead {
                memory_bytes: overhead.memory_bytes.saturating_sub(self.room.memory_bytes),
                processes: overhead.processes.saturating_sub(self.room.processes),
            });
        }
    }
}

/// The cgroup of each session that has a container.
#[derive(Default)]
pub(super) struct SessionParents(Mutex<HashMap<SessionKey, Weak<CgroupParent>>>);

impl SessionParents {
    /// Returns the cgroup of a session, and makes it if there is none.
    pub(super) fn parent(
        &self,
        session: &SessionKey,
        level: Level,
        limits: &ResourceLimits,
        hierarchy: &Hierarchy,
    ) -> io::Result<Arc<CgroupParent>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut sessions = lock(&self.0);
        if let Some(parent) = sessions.get(session).and_then(Weak::upgrade) {
            return Ok(parent);
        }
        sessions.retain(|_, parent| parent.strong_count() > 0);
        let name = format!("session-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let parent = CgroupParent::make(&name, level, limits, None, hierarchy)?;
        sessions.insert(session.clone(), Arc::downgrade(&parent));
        Ok(parent)
    }
}

/// Returns the limits that a cgroup can enforce.
pub(super) fn container_group_limits(level: Level, limits: &ResourceLimits) -> GroupLimits {
    let ResourceLimits { cpu_millicores, memory_bytes, processes, .. } = *limits;
    // The host's kernel does not see the processes in gVisor, but would count the threads of gVisor's kernel.
    GroupLimits { cpu_millicores, memory_bytes, processes: processes.filter(|_| level != Level::Gvisor) }
}

/// Returns the path of a group from the parent of the executor's own cgroup.
pub(super) fn path_from_executor<'a>(group: &'a Group, hierarchy: &Hierarchy) -> Option<&'a Path> {
    let (folder, own) = (group.folders().first()?, hierarchy.own().folders().first()?);
    folder.strip_prefix(own.parent()?).ok()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The prefix of the names of executors' cgroups.
const EXECUTOR: &str = "wieldy-";

/// Returns the cgroups that a runtime makes by itself for a container with the cgroup `ours`, if it gets the path from
/// the executor's cgroup to ours.
pub(super) fn beside(ours: &Group, hierarchy: &Hierarchy) -> Vec<PathBuf> {
    let Some(path) = path_from_executor(ours, hierarchy) else { return Vec::new() };
    let read = |name: &str| fs::read_to_string(Path::new("/proc/self").join(name)).unwrap_or_default();
    let all = own_folders(&read("cgroup"), &read("mountinfo")).into_iter();
    all.map(|folder| folder.join(path)).filter(|group| !ours.folders().contains(group)).collect()
}

/// Returns the cgroups above a container's that exist only for its executor, innermost first.
pub(super) fn above(container: &Path) -> Vec<PathBuf> {
    let is_executor = |group: &&Path| {
        let name = group.file_name().unwrap_or_default();
        name.to_string_lossy().starts_with(EXECUTOR)
    };
    let all: Vec<&Path> = container.ancestors().skip(1).collect();
    let last = all.iter().position(is_executor);
    last.and_then(|last| all.get(..=last)).into_iter().flatten().map(|group| (*group).to_owned()).collect()
}

/// Returns the cgroups of a container with their controllers, as runc stores them; other runtimes do not.
pub(super) fn noted(container: &Path) -> Vec<(String, PathBuf)> {
    let note = fs::read(container.join("state.json")).unwrap_or_default();
    let note: serde_json::Value = serde_json::from_slice(&note).unwrap_or_default();
    let paths = note.get("cgroup_paths").and_then(|paths| paths.as_object());
    let paths = paths.into_iter().flatten();
    paths.filter_map(|(name, path)| Some((name.clone(), PathBuf::from(path.as_str()?)))).collect()
}

/// Returns the folder of our own cgroup in each tree of cgroup v1, from `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn own_folders(memberships: &str, mount_table: &str) -> Vec<PathBuf> {
    let mounts = mount_table.lines().filter_map(|line| {
        // 35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
        let (before, after) = line.split_once(" - cgroup ")?;
        let mut before = before.split(' ').skip(3);
        Some((before.next()?, before.next()?, after.split(' ').nth(1)?))
    });
    let folder = |(root, point, options): (&str, &str, &str)| {
        let is_here = |names: &str| names.split(',').all(|name| options.split(',').any(|option| option == name));
        let group = memberships.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (names, group) = rest.split_once(':')?;
            (!names.is_empty() && is_here(names)).then_some(group)
        })?;
        Some(Path::new(point).join(Path::new(group).strip_prefix(root).ok()?))
    };
    mounts.filter_map(folder).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroups_above_a_container_end_at_its_executors_cgroup() {
        let container = Path::new("/sys/fs/cgroup/devices/of-others/wieldy-1-2-3/session-1/runc-1-1");
        let executor = Path::new("/sys/fs/cgroup/devices/of-others/wieldy-1-2-3");
        assert_eq!(above(container), [executor.join("session-1"), executor.to_owned()]);
        assert_eq!(above(Path::new("/sys/fs/cgroup/devices/a/b")), Vec::<PathBuf>::new());
    }

    #[test]
    fn our_cgroup_is_found_in_every_v1_hierarchy() {
        let memberships = "9:name=systemd:/init\n8:cpu,cpuacct:/docker/x/y\n3:cpuset:/\n0::/user\n";
        let table = "30 1 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
            31 30 0:28 /docker/x /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
            34 30 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n\
            35 30 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
            40 30 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd\n\
            41 30 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        let wanted = ["/sys/fs/cgroup/cpu,cpuacct/y", "/sys/fs/cgroup/cpuset/", "/sys/fs/cgroup/systemd/init"];
        assert_eq!(own_folders(memberships, table), wanted.map(PathBuf::from));
    }
}
