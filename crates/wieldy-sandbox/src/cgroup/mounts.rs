//! Parses `/proc/self/cgroup` and `/proc/self/mountinfo`: the mounted trees, and the place of this process in each of
//! them.

use std::path::{Path, PathBuf};

use super::Version;

/// A mounted tree of control groups that this process is in.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mount {
    pub(super) version: Version,
    /// The controllers of a v1 mount, by the kernel's names; those of v2 are listed in the tree itself.
    pub(super) controllers: Vec<String>,
    /// The folder of the group that this process is in, or `None` if it is outside of the mounted part.
    pub(super) folder: Option<PathBuf>,
    /// The mount point.
    pub(super) point: PathBuf,
}

/// Returns the trees that this process is in.
pub(super) fn mounts(memberships: &str, mount_table: &str) -> Vec<Mount> {
    let mut mounts: Vec<Mount> = Vec::new();
    let memberships: Vec<Membership<'_>> = memberships.lines().filter_map(Membership::read).collect();
    for mounted in mount_table.lines().filter_map(Mounted::read) {
        let Some(membership) = memberships.iter().find(|membership| membership.is_in(&mounted)) else { continue };
        let controllers = membership.controllers.iter().map(|&name| name.to_owned()).collect();
        let folder = mounted.folder_of(membership.path);
        let mount = Mount { version: mounted.version, controllers, folder, point: mounted.point };
        // A tree may be mounted several times. Take the first mount, unless this process is outside of it.
        match mounts.iter_mut().find(|known| known.version == mount.version && known.controllers == mount.controllers) {
            Some(known) if known.folder.is_none() && mount.folder.is_some() => *known = mount,
            Some(_) => {}
            None => mounts.push(mount),
        }
    }
    mounts
}

/// A line of `/proc/self/cgroup`: `4:cpu,cpuacct:/path`, or `0::/path` for v2.
struct Membership<'a> {
    version: Version,
    controllers: Vec<&'a str>,
    path: &'a str,
}

impl<'a> Membership<'a> {
    fn read(line: &'a str) -> Option<Self> {
        let mut parts = line.splitn(3, ':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        match (number, controllers) {
            ("0", "") => Some(Self { version: Version::V2, controllers: Vec::new(), path }),
            // A tree with a name and no controller (`name=systemd`) cannot limit or measure.
            (_, named) if named.is_empty() || named.starts_with("name=") => None,
            (_, names) => Some(Self { version: Version::V1, controllers: names.split(',').collect(), path }),
        }
    }

    fn is_in(&self, mounted: &Mounted<'_>) -> bool {
        self.version == mounted.version
            && self.controllers.iter().all(|name| mounted.options.split(',').any(|option| option == *name))
    }
}

/// A line of `/proc/self/mountinfo` about control groups.
struct Mounted<'a> {
    version: Version,
    /// The folder of the tree that is mounted.
    root: String,
    point: PathBuf,
    options: &'a str,
}

impl<'a> Mounted<'a> {
    fn read(line: &'a str) -> Option<Self> {
        // 35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
        let (before, after) = line.split_once(" - ")?;
        let mut after = after.split(' ');
        let version = match after.next()? {
            "cgroup" => Version::V1,
            "cgroup2" => Version::V2,
            _ => return None,
        };
        let mut before = before.split(' ').skip(3);
        let (root, point) = (unescaped(before.next()?), unescaped(before.next()?));
        Some(Self { version, root, point: point.into(), options: after.nth(1)? })
    }

    /// Returns the folder of the group with this path, if it is in the mounted part.
    fn folder_of(&self, path: &str) -> Option<PathBuf> {
        let below = Path::new(path).strip_prefix(&self.root).ok()?;
        // In a cgroup namespace, a group outside of it has a path such as `/../other`.
        let outside = below.components().any(|part| !matches!(part, std::path::Component::Normal(_)));
        (!outside).then(|| if below.as_os_str().is_empty() { self.point.clone() } else { self.point.join(below) })
    }
}

/// Decodes spaces, tabs, line ends and backslashes, which the kernel writes as three octal digits.
fn unescaped(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(code) => {
                plain.push(char::from(code));
                plain.push_str(part.get(3..).unwrap_or_default());
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(memberships: &str, mount_table: &str) -> Vec<String> {
        let show = |mount: &Mount| {
            let folder = mount.folder.as_ref().map_or("outside".into(), |folder| folder.display().to_string());
            format!("{:?} {} {folder}", mount.version, mount.controllers.join(","))
        };
        mounts(memberships, mount_table).iter().map(show).collect()
    }

    #[test]
    fn one_v2_tree_is_found_with_our_place_in_it() {
        let table = "24 1 0:22 / /sys rw - sysfs sysfs rw\n\
            29 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n";
        assert_eq!(
            shown("0::/user.slice/user-1000.slice/session-3.scope\n", table),
            ["V2  /sys/fs/cgroup/user.slice/user-1000.slice/session-3.scope"]
        );
        assert_eq!(shown("0::/\n", table), ["V2  /sys/fs/cgroup"]);
    }

    #[test]
    fn controllers_on_v1_with_a_v2_tree_beside_them_are_all_found() {
        let memberships = "9:name=systemd:/\n4:memory:/a b/c\n2:cpu,cpuacct:/x\n0::/\n";
        let table = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
            32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
            35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
            41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        assert_eq!(
            shown(memberships, table),
            [
                "V1 cpu,cpuacct /sys/fs/cgroup/cpu,cpuacct/x",
                "V1 memory /sys/fs/cgroup/memory/a b/c",
                "V2  /sys/fs/cgroup/unified"
            ]
        );
    }

    #[test]
    fn v1_alone_has_no_v2_tree_though_the_kernel_names_one() {
        let table = "35 31 0:32 / /cgroups/my\\040memory rw - cgroup none rw,memory\n";
        assert_eq!(shown("4:memory:/\n3:pids:/\n0::/\n", table), ["V1 memory /cgroups/my memory"]);
    }

    #[test]
    fn a_part_of_a_tree_that_is_mounted_begins_at_its_root() {
        let table = "35 31 0:32 /docker/42 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        assert_eq!(shown("4:memory:/docker/42/x\n", table), ["V1 memory /sys/fs/cgroup/memory/x"]);
        assert_eq!(shown("4:memory:/docker/421\n", table), ["V1 memory outside"]);
        let namespace = "35 31 0:32 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(shown("0::/../neighbour\n", namespace), ["V2  outside"]);
    }

    #[test]
    fn of_a_tree_mounted_twice_the_one_that_we_are_in_is_taken() {
        let table = "35 31 0:32 /other /a rw - cgroup cgroup rw,memory\n\
            36 31 0:32 / /b rw - cgroup cgroup rw,memory\n\
            37 31 0:32 / /c rw - cgroup cgroup rw,memory\n";
        assert_eq!(shown("4:memory:/mine\n", table), ["V1 memory /b/mine"]);
    }

    #[test]
    fn without_control_groups_there_is_nothing_and_nonsense_is_left_out() {
        assert_eq!(shown("", ""), Vec::<String>::new());
        assert_eq!(shown("nonsense\n1:2\n", "x\n - \n1 2 3 - cgroup2\n"), Vec::<String>::new());
        assert_eq!(unescaped("a\\040b\\x\\134"), "a b\\x\\");
    }
}
