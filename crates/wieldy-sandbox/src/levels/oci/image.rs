//! Puts the root file system of an image into a mount plan, in place of the host's system folders.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::view::plan::Step;
use crate::view::system_paths::SYSTEM;

/// Folders that every sandbox has of its own, in place of the image's.
const OWN: [&str; 5] = ["/dev", "/proc", "/run", "/sys", "/tmp"];

/// Returns the folder of a root file system with all links resolved, if programs may see everything in it.
pub(super) fn checked(folder: &Path, state: &Path, home: Option<&Path>) -> io::Result<PathBuf> {
    let refused = |problem: String| {
        let told = format!("the root `{}` cannot be used: {problem}", folder.display());
        io::Error::new(io::ErrorKind::InvalidInput, told)
    };
    let root = folder.canonicalize().map_err(|error| refused(error.to_string()))?;
    if !root.is_dir() {
        return Err(refused("it is not a folder".into()));
    }
    let home = home.and_then(|home| home.canonicalize().ok());
    if state.starts_with(&root) || home.is_some_and(|home| home.starts_with(&root)) {
        let problem = "it holds the executor's own files or a home folder; give programs a folder of their own";
        return Err(refused(problem.into()));
    }
    Ok(root)
}

/// Replaces the machine's system in a plan by the one in the folder `image`.
pub(super) fn transplant(steps: Vec<Step>, image: &Path) -> io::Result<Vec<Step>> {
    let mut kept: Vec<Step> = steps.into_iter().filter(|step| !is_of_machine(step)).collect();
    // Identity files such as `/etc/passwd` need a file of the image to be mounted on, unless it lacks the folder, too.
    kept.retain(|step| match step {
        Step::File { path, .. } => {
            within(image, path).is_file() || !within(image, path.parent().unwrap_or(path)).is_dir()
        }
        _ => true,
    });
    // A folder is needed only for the mounts in it.
    let wanted = kept.iter().filter(|step| !matches!(step, Step::Folder { .. }));
    let wanted: BTreeSet<PathBuf> = wanted.map(|step| step.path().to_owned()).collect();
    let mut shown = Vec::new();
    show(image, Path::new("/"), &wanted, &mut shown)?;
    // The image's own steps come right after the root, below all other mounts.
    let at = kept.iter().position(|step| step.path() != Path::new("/")).unwrap_or(kept.len());
    kept.splice(at..at, shown);
    Ok(kept)
}

/// Returns true if a step shows the host's system or masks a part of it.
fn is_of_machine(step: &Step) -> bool {
    let is_system = SYSTEM.iter().any(|system| step.path().starts_with(system));
    match step {
        Step::Bind { .. } | Step::Protect { .. } => is_system && !step.is_granted(),
        Step::Link { .. } | Step::Hide { .. } | Step::Folder { .. } => is_system,
        _ => false,
    }
}

fn within(image: &Path, path: &Path) -> PathBuf {
    image.join(path.strip_prefix("/").unwrap_or(path))
}

/// Adds steps that show the content of a folder of the image. A subfolder that lacks a mount point is shown entry by
/// entry.
fn show(image: &Path, folder: &Path, wanted: &BTreeSet<PathBuf>, shown: &mut Vec<Step>) -> io::Result<()> {
    let mut names: Vec<_> = fs::read_dir(within(image, folder))?.collect::<Result<Vec<_>, _>>()?;
    names.sort_by_key(fs::DirEntry::file_name);
    for entry in names {
        let path = folder.join(entry.file_name());
        if wanted.contains(&path) || OWN.iter().any(|own| path == Path::new(own)) {
            continue;
        }
        let kind = entry.file_type()?;
        if kind.is_symlink() {
            shown.push(Step::Link { path, target: fs::read_link(entry.path())? });
            continue;
        }
        let is_missing =
            |inner: &&PathBuf| inner.starts_with(&path) && fs::symlink_metadata(within(image, inner)).is_err();
        if kind.is_dir() && wanted.iter().any(|inner| is_missing(&inner)) {
            shown.push(Step::Folder { path: path.clone() });
            show(image, &path, wanted, shown)?;
        } else {
            shown.push(Step::Bind { source: entry.path(), target: path, writable: false, optional: true });
        }
    }
    Ok(())
}
