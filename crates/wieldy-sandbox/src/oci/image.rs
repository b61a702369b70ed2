//! The system that a container's programs come from: the machine's own, or a folder with another one.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::native::plan::Step;
use crate::native::secrets::SYSTEM;

/// Folders of an image that a sandbox has of its own.
const OWN: [&str; 5] = ["/dev", "/proc", "/run", "/sys", "/tmp"];

/// Replaces the machine's system in a plan by the one in the folder `image`.
pub(super) fn transplant(steps: Vec<Step>, image: &Path) -> io::Result<Vec<Step>> {
    let mut kept: Vec<Step> = steps.into_iter().filter(|step| !is_of_machine(step)).collect();
    // Settings that say who the sandbox is can cover only what the image has.
    kept.retain(|step| match step {
        Step::File { path, .. } => {
            within(image, path).is_file() || !within(image, path.parent().unwrap_or(path)).is_dir()
        }
        _ => true,
    });
    // A folder is wanted only for what is in it.
    let wanted = kept.iter().filter(|step| !matches!(step, Step::Folder { .. }));
    let wanted: BTreeSet<PathBuf> = wanted.map(|step| step.path().to_owned()).collect();
    let mut shown = Vec::new();
    show(image, Path::new("/"), &wanted, &mut shown)?;
    // What the image shows lies below everything else, as folders of the root.
    let at = kept.iter().position(|step| step.path() != Path::new("/")).unwrap_or(kept.len());
    kept.splice(at..at, shown);
    Ok(kept)
}

/// Whether a step shows the machine's system or covers a part of it.
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

/// Shows what is in a folder of the image; a folder in which something must be mounted that it does not have is shown part by part.
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

/// Unpacks an OCI image layout below `state`, once; says where.
///
/// The machine's `tar` takes the layers apart, each in an empty folder of its own, where a link of one layer cannot lead a file of the next
/// astray. They are then laid over each other without following any link.
pub(super) fn unpack(layout: &Path, state: &Path) -> io::Result<PathBuf> {
    let layers = layers(layout)?;
    let digest = layers.last().map(|layer| layer.replace(':', "-"));
    let digest = digest.ok_or_else(|| invalid(layout, "its manifest names no layer"))?;
    let images = state.join("images");
    let image = images.join(&digest);
    if image.is_dir() {
        return Ok(image);
    }
    fs::create_dir_all(&images)?;
    let work = images.join(format!("{digest}.{}", std::process::id()));
    let _ = fs::remove_dir_all(&work);
    let whole = work.join("whole");
    fs::create_dir_all(&whole)?;
    for (number, layer) in layers.iter().enumerate() {
        let single = work.join(number.to_string());
        fs::create_dir(&single)?;
        take_apart(&blob(layout, layer)?, &single)?;
        lay_over(&single, &whole)?;
    }
    let placed = fs::rename(&whole, &image);
    fs::remove_dir_all(&work)?;
    match placed {
        // Another executor was as fast.
        Err(_) if image.is_dir() => Ok(image),
        placed => placed.map(|()| image),
    }
}

/// The digests of the layers of the first image in a layout, lowest first.
fn layers(layout: &Path) -> io::Result<Vec<String>> {
    let read = |path: &Path| -> io::Result<serde_json::Value> { Ok(serde_json::from_slice(&fs::read(path)?)?) };
    let digest = |value: &serde_json::Value| value.get("digest").and_then(|digest| digest.as_str()).map(str::to_owned);
    let mut index = read(&layout.join("index.json"))?;
    // An index may name another one, for several architectures; we take the first of each.
    const DEPTH_MAX: usize = 4;
    for _ in 0..DEPTH_MAX {
        if let Some(layers) = index.get("layers").and_then(|layers| layers.as_array()) {
            return layers
                .iter()
                .map(|layer| digest(layer).ok_or_else(|| invalid(layout, "a layer has no digest")))
                .collect();
        }
        let first = index.get("manifests").and_then(|manifests| manifests.get(0)).and_then(digest);
        index = read(&blob(layout, &first.ok_or_else(|| invalid(layout, "it names no image"))?)?)?;
    }
    Err(invalid(layout, "its indexes lead to no manifest"))
}

fn blob(layout: &Path, digest: &str) -> io::Result<PathBuf> {
    let is_plain = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
    match digest.split_once(':') {
        Some((kind, hash)) if is_plain(kind) && is_plain(hash) => Ok(layout.join("blobs").join(kind).join(hash)),
        _ => Err(invalid(layout, &format!("`{digest}` is no digest"))),
    }
}

fn invalid(layout: &Path, problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("`{}` is no OCI image layout: {problem}", layout.display()))
}

fn take_apart(layer: &Path, folder: &Path) -> io::Result<()> {
    let mut tar = std::process::Command::new("tar");
    tar.args(["--extract", "--numeric-owner", "--exclude=dev/*", "--file"]).arg(layer).arg("--directory").arg(folder);
    let output = tar.env_clear().env("PATH", "/usr/bin:/bin").stdin(std::process::Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!("`tar` could not unpack the layer `{}`: {said}", layer.display())))
}

/// Moves what is in one folder over what is in another, and removes what it says is gone.
fn lay_over(upper: &Path, lower: &Path) -> io::Result<()> {
    let is_folder = |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    let remove = |path: &Path| match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => Ok(()),
    };
    let mut entries: Vec<_> = fs::read_dir(upper)?.collect::<Result<Vec<_>, _>>()?;
    // What is gone goes first: the same layer may put something else there.
    entries.sort_by_key(|entry| !entry.file_name().to_string_lossy().starts_with(".wh."));
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == ".wh..wh..opq" {
            fs::read_dir(lower)?.flatten().try_for_each(|inner| remove(&inner.path()))?;
        } else if let Some(gone) = name.strip_prefix(".wh.") {
            remove(&lower.join(gone))?;
        } else {
            let target = lower.join(entry.file_name());
            if is_folder(&entry.path()) && is_folder(&target) {
                fs::set_permissions(&target, entry.metadata()?.permissions())?;
                lay_over(&entry.path(), &target)?;
            } else {
                remove(&target)?;
                fs::rename(entry.path(), target)?;
            }
        }
    }
    Ok(())
}
