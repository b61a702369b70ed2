//! Looks at this machine's files for the planner.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD};
use rustix::io::Errno;

use super::plan::{Entry, Look, Making, Wanted, without_dots};
use super::secret_scan::secrets_below;

/// The files of this host, as they are now.
pub(crate) struct Disk;

impl Look for Disk {
    fn entry(&self, path: &Path) -> Option<Entry> {
        entry_of(path, &fs::symlink_metadata(path).ok()?)
    }

    fn names(&self, folder: &Path, wanted: Wanted) -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten();
        // Without a limit: a command could make many names to have one overlooked.
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<_> = names.filter(|name| wanted(name)).collect();
        names.sort_unstable();
        names
    }

    fn deep_secrets(&self, workspace: &Path) -> Vec<PathBuf> {
        secrets_below(workspace)
    }

    fn is_held(&self, _: &Path) -> bool {
        false
    }

    fn making(&self, folder: &Path) -> Making {
        let access = Access::WRITE_OK | Access::EXEC_OK;
        match rustix::fs::accessat(CWD, folder, access, AtFlags::EACCESS) {
            Err(Errno::ROFS) => Making::Impossible,
            Err(_) if is_own(folder) => Making::Refused,
            Err(_) => Making::Impossible,
            Ok(()) => Making::Possible,
        }
    }
}

/// Returns true if a folder belongs to this user, or if its owner cannot be read.
fn is_own(folder: &Path) -> bool {
    rustix::fs::stat(folder).map_or(true, |found| found.st_uid == rustix::process::geteuid().as_raw())
}

/// Returns the entry at a path that has this metadata.
pub(crate) fn entry_of(path: &Path, found: &fs::Metadata) -> Option<Entry> {
    if found.is_dir() {
        return Some(Entry::Folder);
    }
    if !found.is_symlink() {
        return Some(Entry::File);
    }
    let target = fs::read_link(path).ok()?;
    let resolved = fs::canonicalize(path).unwrap_or_else(|_| {
        let folder = path.parent().unwrap_or(Path::new("/"));
        without_dots(&fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned()).join(&target))
    });
    Some(Entry::Link { target, resolved })
}

/// The message that explains why a sandbox lacks a program that the host has, and what to do.
pub(crate) const NOT_SHOWN: &str = "this program is on the machine, but the sandbox does not show its folder; \
    an operator adds the folder to `sandbox.mounts`, or sets `sandbox.toolchains` for a toolchain in the home folder";

/// Returns the program of this name in the folders of a `PATH` of the host.
pub(crate) fn on_host(name: &str, search: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let is_name = !name.is_empty() && !name.contains('/') && name != "." && name != "..";
    let is_program =
        |path: &PathBuf| path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0);
    let folders = search.split(':').map(Path::new).filter(|folder| is_name && folder.is_absolute());
    folders.map(|folder| folder.join(name)).find(is_program)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use wieldy_core::Network;

    use super::*;
    use crate::own_process::say;
    use crate::view::plan::{HostFacts, Room, Step};
    use crate::view::planner::{Request, plan};
    use wieldy_core::FileRules;

    #[test]
    fn files_folders_and_links_are_told_apart() {
        let world = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(world.path()).unwrap();
        fs::create_dir(root.join("folder")).unwrap();
        fs::write(root.join("folder/file"), "").unwrap();
        symlink("folder/../folder/file", root.join("link")).unwrap();
        symlink("link", root.join("chain")).unwrap();
        symlink("circle", root.join("circle")).unwrap();
        symlink("../nowhere/./x", root.join("folder/dangling")).unwrap();
        let link = |target: &str, resolved: &str| Entry::Link { target: target.into(), resolved: root.join(resolved) };
        let found = ["folder", "folder/file", "link", "chain", "folder/dangling", "circle", "missing"]
            .map(|name| Disk.entry(&root.join(name)));
        let wanted = [
            Some(Entry::Folder),
            Some(Entry::File),
            Some(link("folder/../folder/file", "folder/file")),
            Some(link("link", "folder/file")),
            Some(link("../nowhere/./x", "nowhere/x")),
            Some(link("circle", "circle")),
            None,
        ];
        assert_eq!(found, wanted);
        assert_eq!(Disk.names(&root, |_| true), ["chain", "circle", "folder", "link"]);
        assert_eq!(Disk.names(&root, |name| name.starts_with('c')), ["chain", "circle"]);
        assert_eq!(Disk.names(&root.join("missing"), |_| true), Vec::<String>::new());
    }

    #[test]
    fn this_very_machine_has_a_plan_whose_mounts_exist() {
        let world = tempfile::tempdir().unwrap();
        let workspace = fs::canonicalize(world.path()).unwrap();
        fs::create_dir(workspace.join(".git")).unwrap();
        let facts = HostFacts {
            look: &Disk,
            home: Some("/root".into()),
            programs: vec![],
            state: None,
            private: None,
            user: 1000,
            group: 1000,
        };
        let room = Room { bytes: 1 << 20, inodes: 100 };
        let request = Request { workspace: &workspace, rules: &FileRules::default(), network: &Network::None, room };
        let started = std::time::Instant::now();
        let plan = plan(&request, &facts).unwrap();
        let took = started.elapsed();
        for step in &plan.steps {
            if let Step::Bind { source, .. } = step {
                assert!(source.exists(), "{source:?}");
            }
        }
        assert!(plan.steps.iter().any(|step| step.path() == Path::new("/usr")));
        say(&format!("planned in {took:?}"));
    }
}
