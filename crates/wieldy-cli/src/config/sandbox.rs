//! The section `sandbox`: the files and hosts that programs can reach, the pool of their sandboxes, and the minimal
//! isolation.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use wieldy::{ExecutorBuilder, FileRules, IdleLimits, Level, Mount, NativeOptions, Network, ResourceLimits, Rootfs};

use super::file::{FileFirecracker, FileOci, FileSandbox, FileSandboxLimits};
use super::value::{Time, Whole};

/// The resolved section.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SandboxConfig {
    pub(crate) files: FileRules,
    /// True if programs see the toolchains in the user's home.
    pub(crate) toolchains: bool,
    pub(crate) network: Network,
    pub(crate) idle: Duration,
    pub(crate) idle_limits: IdleLimits,
    pub(crate) spares: usize,
    /// The folder on a disk for the private folders of native sandboxes, if configured.
    pub(crate) folder: Option<PathBuf>,
    /// The limits for all programs of one session together.
    pub(crate) limits: ResourceLimits,
    pub(crate) floor: Level,
    /// The root file system of programs at the levels with an OCI runtime.
    pub(crate) system: Rootfs,
    /// The kernel and the root file system of guests at the level `firecracker`, if configured.
    pub(crate) kernel: Option<PathBuf>,
    pub(crate) rootfs: Option<PathBuf>,
}

impl FileSandbox {
    /// Returns the defaults of the section.
    pub(super) fn defaults(executor: &ExecutorBuilder) -> Self {
        let native = NativeOptions::default();
        Self {
            mounts: Some(Vec::new()),
            hidden: Some(Vec::new()),
            shown: Some(Vec::new()),
            protected: Some(Vec::new()),
            toolchains: Some(true),
            network: Some(FileNetwork(executor.network.clone())),
            idle: Some(Time(native.idle_max)),
            idle_max: Some(Whole(native.idle_limits.sandboxes_max as u64)),
            idle_per_tenant_max: Some(Whole(native.idle_limits.per_tenant_max as u64)),
            spares: Some(Whole(native.warm_sandboxes as u64)),
            folder: Some(PathBuf::new()),
            floor: Some(Level::None),
            limits: Some(FileSandboxLimits {
                cpu_millicores: Some(Whole(0)),
                memory_mb: Some(Whole(0)),
                processes: Some(Whole(0)),
                disk_mb: Some(Whole(0)),
                disk_files: Some(Whole(0)),
            }),
            oci: Some(FileOci { rootfs: Some(PathBuf::new()), layout: Some(PathBuf::new()) }),
            firecracker: Some(FileFirecracker { kernel: Some(PathBuf::new()), rootfs: Some(PathBuf::new()) }),
        }
    }
}

impl SandboxConfig {
    /// Resolves the section; `home` replaces `~`. The error lists all mistakes.
    pub(super) fn resolve(file: FileSandbox, home: Option<&Path>) -> Result<Self, Vec<String>> {
        const SET: &str = "the defaults have every key";
        let mut wrong = Vec::new();
        let mut told = |key: &str, message: String| wrong.push(format!("`sandbox.{key}`: {message}"));
        let mut paths = |key: &str, paths: Option<Vec<PathBuf>>| {
            let paths = paths.expect(SET);
            let found = paths.iter().filter_map(|path| at_home(path, home).map_err(|error| told(key, error)).ok());
            found.collect::<Vec<_>>()
        };
        let (hidden, shown) = (paths("hidden", file.hidden), paths("shown", file.shown));
        let protected = paths("protected", file.protected);
        let mut named = |key: &str, path: Option<PathBuf>| {
            let path = path.expect(SET);
            let is_named = !path.as_os_str().is_empty();
            paths(key, Some(vec![path])).pop().filter(|_| is_named)
        };
        let (oci, guest) = (file.oci.expect(SET), file.firecracker.expect(SET));
        let (kernel, rootfs) = (named("firecracker.kernel", guest.kernel), named("firecracker.rootfs", guest.rootfs));
        let folder = named("folder", file.folder);
        let system = match (named("oci.rootfs", oci.rootfs), named("oci.layout", oci.layout)) {
            (None, None) => Rootfs::Host,
            (Some(folder), None) => Rootfs::Folder(folder),
            (None, Some(layout)) => Rootfs::Layout(layout),
            (Some(folder), Some(_)) => {
                told("oci", "`rootfs` and `layout` both say where programs come from; keep one of them".into());
                Rootfs::Folder(folder)
            }
        };
        let mounts = file.mounts.expect(SET).into_iter().map(|mount| mount.resolve(home));
        let mounts = mounts.filter_map(|mount| mount.map_err(|error| told("mounts", error)).ok()).collect();
        if !wrong.is_empty() {
            return Err(wrong);
        }
        Ok(Self {
            files: FileRules { mounts, hidden, shown, protected, own: Vec::new() },
            toolchains: file.toolchains.expect(SET),
            network: file.network.expect(SET).0,
            idle: file.idle.expect(SET).0,
            idle_limits: IdleLimits {
                sandboxes_max: file.idle_max.expect(SET).0 as usize,
                per_tenant_max: file.idle_per_tenant_max.expect(SET).0 as usize,
            },
            spares: file.spares.expect(SET).0 as usize,
            folder,
            limits: limits(&file.limits.expect(SET)),
            floor: file.floor.expect(SET),
            system,
            kernel,
            rootfs,
        })
    }
}

/// Resolves the limits of a session. 0 means no limit beyond those of single calls.
fn limits(file: &FileSandboxLimits) -> ResourceLimits {
    fn some<const MAX: u64>(number: Option<Whole<0, MAX>>) -> Option<u64> {
        number.map(|number| number.0).filter(|number| *number > 0)
    }
    let megabytes = |count: Option<u64>| count.map(|count| count * 1024 * 1024);
    ResourceLimits {
        cpu_millicores: some(file.cpu_millicores),
        memory_bytes: megabytes(some(file.memory_mb)),
        processes: some(file.processes),
        disk_bytes: megabytes(some(file.disk_mb)),
        disk_files: some(file.disk_files),
        ..ResourceLimits::default()
    }
}

/// Replaces a leading `~` of a path by the home folder.
pub(super) fn at_home(path: &Path, home: Option<&Path>) -> Result<PathBuf, String> {
    match (path.strip_prefix("~"), home) {
        (Err(_), _) => Ok(path.to_owned()),
        (Ok(rest), Some(home)) if rest.as_os_str().is_empty() => Ok(home.to_owned()),
        (Ok(rest), Some(home)) => Ok(home.join(rest)),
        (Ok(_), None) => Err(format!("`{}`: there is no home folder, as HOME is not set", path.display())),
    }
}

/// A mount as people write it: `SOURCE`, `SOURCE:TARGET` or `SOURCE:TARGET:rw`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileMount {
    source: PathBuf,
    target: Option<PathBuf>,
    writable: bool,
}

impl FileMount {
    /// Makes a relative source start at this folder.
    pub(super) fn begin_at(&mut self, folder: &Path) {
        if !self.source.starts_with("~") {
            self.source = folder.join(&self.source);
        }
    }

    /// Resolves the mount. Links are followed here, because a sandbox does not follow them.
    pub(super) fn resolve(self, home: Option<&Path>) -> Result<Mount, String> {
        let source = at_home(&self.source, home)?;
        let source = source.canonicalize().or_else(|_| std::path::absolute(&source)).unwrap_or(source);
        let target = match self.target {
            Some(target) => at_home(&target, home)?,
            None => source.clone(),
        };
        Ok(Mount { source, target, writable: self.writable })
    }
}

impl FromStr for FileMount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = || format!("`{text}` is not SOURCE, SOURCE:TARGET or SOURCE:TARGET:rw");
        let mut parts = text.split(':');
        let source = parts.next().filter(|source| !source.is_empty()).map(PathBuf::from).ok_or_else(form)?;
        let target = parts.next().map(PathBuf::from);
        let writable = match parts.next() {
            None | Some("ro") => false,
            Some("rw") => true,
            Some(_) => return Err(form()),
        };
        if parts.next().is_some() {
            return Err(form());
        }
        if target.as_ref().is_some_and(|target| !target.is_absolute() && !target.starts_with("~")) {
            return Err(format!("{}; TARGET begins with `/` or `~`", form()));
        }
        Ok(Self { source, target, writable })
    }
}

impl fmt::Display for FileMount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.source.display())?;
        if let Some(target) = &self.target {
            write!(f, ":{}{}", target.display(), if self.writable { ":rw" } else { "" })?;
        }
        Ok(())
    }
}

impl Serialize for FileMount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for FileMount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // A visitor's error has the place of this mount, and not of the whole list.
        struct MountVisitor;

        impl Visitor<'_> for MountVisitor {
            type Value = FileMount;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<FileMount, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_str(MountVisitor)
    }
}

/// The network access as people write it: `none`, `open`, or a list of hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileNetwork(pub(crate) Network);

impl Serialize for FileNetwork {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            Network::None => serializer.serialize_str("none"),
            Network::Open => serializer.serialize_str("open"),
            Network::Hosts(hosts) => serializer.collect_seq(hosts),
        }
    }
}

impl<'de> Deserialize<'de> for FileNetwork {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NetworkVisitor;

        impl<'de> Visitor<'de> for NetworkVisitor {
            type Value = FileNetwork;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`none`, `open` or a list of hosts")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<FileNetwork, E> {
                text.parse().map(FileNetwork).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<FileNetwork, A::Error> {
                let mut hosts: Vec<String> = Vec::new();
                while let Some(host) = list.next_element()? {
                    hosts.push(host);
                }
                if hosts.is_empty() || hosts.iter().any(String::is_empty) {
                    return Err(A::Error::custom(
                        "a list of hosts has at least one; `none` lets programs reach nothing",
                    ));
                }
                Ok(FileNetwork(Network::Hosts(hosts)))
            }
        }

        deserializer.deserialize_any(NetworkVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_written_as_it_can_be_read() {
        for text in ["/a", "a/b", "~/a", "/a:/b", "/a:/b:rw", "~:~/x"] {
            assert_eq!(text.parse::<FileMount>().unwrap().to_string(), text);
        }
        assert_eq!("/a:/b:ro".parse::<FileMount>().unwrap().to_string(), "/a:/b");
        let refused =
            ["", ":/a", "/a:b", "/a:rw", "/a:/b:rx", "/a:/b:rw:x"].map(|text| text.parse::<FileMount>().is_err());
        assert_eq!(refused, [true; 6]);
    }

    #[test]
    fn mounts_begin_at_home_or_at_the_file_and_links_are_followed() {
        let world = tempfile::tempdir().unwrap();
        let root = world.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("real")).unwrap();
        std::os::unix::fs::symlink("real", root.join("link")).unwrap();
        let resolve = |text: &str, home: Option<&Path>| {
            let mut mount: FileMount = text.parse().unwrap();
            mount.begin_at(&root);
            mount.resolve(home)
        };
        let mount = |source: &str, target: &Path, writable| {
            Ok(Mount { source: root.join(source), target: target.to_owned(), writable })
        };
        assert_eq!(resolve("link", None), mount("real", &root.join("real"), false));
        assert_eq!(resolve("~/link:/data:rw", Some(&root)), mount("real", Path::new("/data"), true));
        assert_eq!(resolve("missing:/data", None), mount("missing", Path::new("/data"), false));
        assert_eq!(resolve("~/x", None), Err("`~/x`: there is no home folder, as HOME is not set".into()));
        assert_eq!(at_home(Path::new("~"), Some(&root)), Ok(root.clone()));
        assert_eq!(at_home(Path::new("~x"), Some(&root)), Ok("~x".into()));
    }
}
