//! The kernel modules that a machine loads, each after those that it needs.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Archive;

/// Adds these modules and their dependencies to the initial file system. Their file names sort in the order of loading.
pub(super) fn add(archive: &mut Archive, folder: &Path, wanted: &[&str]) -> Result<()> {
    let packages = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let mut modules = packages.map(|package| package.join("lib/modules")).filter(|modules| modules.is_dir());
    let modules = modules.next().context("the kernel's package has no modules")?;
    let mut files = Vec::new();
    collect(&modules, &mut files)?;
    let read = |name: &str| {
        // File names use either `-` or `_`.
        let is_it = |path: &&PathBuf| path.file_stem().is_some_and(|it| it.to_string_lossy().replace('-', "_") == name);
        let path = files.iter().find(is_it).with_context(|| format!("the kernel has no module `{name}`"))?;
        fs::read(path).with_context(|| format!("cannot read `{}`", path.display()))
    };
    let mut loaded = Vec::new();
    for name in wanted {
        load(name, &read, &mut loaded)?;
    }
    for (number, (_, bytes)) in loaded.iter().enumerate() {
        archive.file(&format!("modules/{number:02}"), bytes);
    }
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)?.flatten() {
        match entry.file_type()?.is_dir() {
            true => collect(&entry.path(), files)?,
            false => files.push(entry.path()),
        }
    }
    Ok(())
}

fn load(name: &str, read: &dyn Fn(&str) -> Result<Vec<u8>>, loaded: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    if loaded.iter().any(|(known, _)| known == name) {
        return Ok(());
    }
    let bytes = read(name)?;
    for needed in needs(&bytes) {
        load(&needed, read, loaded)?;
    }
    loaded.push((name.to_owned(), bytes));
    Ok(())
}

/// Returns the modules that this one names as its dependencies.
fn needs(module: &[u8]) -> Vec<String> {
    let mut texts = module.split(|byte| *byte == 0);
    let list = texts.find_map(|text| text.strip_prefix(b"depends=")).unwrap_or_default();
    let names = list.split(|byte| *byte == b',').filter(|name| !name.is_empty());
    names.map(|name| String::from_utf8_lossy(name).replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_comes_after_those_that_it_needs_and_once() {
        let read = |name: &str| {
            let needed = match name {
                "disk" => "bus-pci,ring",
                "bus_pci" => "ring",
                _ => "",
            };
            Ok(format!("\x7fELF\0depends={needed}\0name=x\0").into_bytes())
        };
        let mut loaded = Vec::new();
        for name in ["disk", "ring"] {
            load(name, &read, &mut loaded).unwrap();
        }
        let names: Vec<&str> = loaded.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["ring", "bus_pci", "disk"]);
    }
}
