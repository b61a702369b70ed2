//! The control groups that a runtime makes for a container beside those that we have made: where each controller has a tree of its own,
//! it makes one in every tree.

use std::fs;
use std::path::{Path, PathBuf};

use super::nest::path_from_executor;
use crate::cgroup::{Group, Hierarchy};

/// How the names of executors' groups begin.
const EXECUTOR: &str = "wieldy-";

/// Where a runtime makes groups of its own for a container whose group is `ours`, if it calls it by the path of ours from the executor on.
pub(super) fn beside(ours: &Group, hierarchy: &Hierarchy) -> Vec<PathBuf> {
    let Some(path) = path_from_executor(ours, hierarchy) else { return Vec::new() };
    let read = |name: &str| fs::read_to_string(Path::new("/proc/self").join(name)).unwrap_or_default();
    let all = own_folders(&read("cgroup"), &read("mountinfo")).into_iter();
    all.map(|folder| folder.join(path)).filter(|group| !ours.folders().contains(group)).collect()
}

/// The groups above a container's that are only there for it and others of its executor, innermost first.
pub(super) fn above(container: &Path) -> Vec<PathBuf> {
    let is_executor = |group: &&Path| {
        let name = group.file_name().unwrap_or_default();
        name.to_string_lossy().starts_with(EXECUTOR)
    };
    let all: Vec<&Path> = container.ancestors().skip(1).collect();
    let last = all.iter().position(is_executor);
    last.and_then(|last| all.get(..=last)).into_iter().flatten().map(|group| (*group).to_owned()).collect()
}

/// The groups of a container, as runc notes them, each with its controller; other runtimes keep no such note.
pub(super) fn noted(container: &Path) -> Vec<(String, PathBuf)> {
    let note = fs::read(container.join("state.json")).unwrap_or_default();
    let note: serde_json::Value = serde_json::from_slice(&note).unwrap_or_default();
    let paths = note.get("cgroup_paths").and_then(|paths| paths.as_object());
    let paths = paths.into_iter().flatten();
    paths.filter_map(|(name, path)| Some((name.clone(), PathBuf::from(path.as_str()?)))).collect()
}

/// The folder of our own group in each tree of cgroup v1, from what the kernel says of us and of mounts.
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
    fn what_is_above_a_container_ends_with_its_executor() {
        let container = Path::new("/sys/fs/cgroup/devices/of-others/wieldy-1-2-3/session-1/runc-1-1");
        let executor = Path::new("/sys/fs/cgroup/devices/of-others/wieldy-1-2-3");
        assert_eq!(above(container), [executor.join("session-1"), executor.to_owned()]);
        assert_eq!(above(Path::new("/sys/fs/cgroup/devices/a/b")), Vec::<PathBuf>::new());
    }

    #[test]
    fn our_folder_is_found_in_every_tree_of_the_first_version() {
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
