//! The control groups that a runtime makes for a container beside those that we have made: where each controller has a tree of its own,
//! it makes one in every tree.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cgroup::Group;

/// Where a runtime makes groups of its own for a container whose group is `ours`, if it calls it by the last two names of ours.
pub(super) fn beside(ours: &Group) -> Vec<PathBuf> {
    let names = ours.folders().first().and_then(|folder| Some((folder.parent()?.file_name()?, folder.file_name()?)));
    let Some((executor, container)) = names else { return Vec::new() };
    let read = |name: &str| fs::read_to_string(Path::new("/proc/self").join(name)).unwrap_or_default();
    let all = own_folders(&read("cgroup"), &read("mountinfo")).into_iter();
    all.map(|folder| folder.join(executor).join(container)).filter(|group| !ours.folders().contains(group)).collect()
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
