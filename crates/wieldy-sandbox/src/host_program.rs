//! Programs that the host has and a sandbox does not show.

use std::path::{Path, PathBuf};

/// The reason why a sandbox has no program that the host has, and what to do.
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
