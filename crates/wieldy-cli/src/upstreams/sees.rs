//! The part of the machine that a server sees in its sandbox, guessed from its command and its variables.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use wieldy::secrets::{HIDDEN, is_deep_secret};
use wieldy::{FileRules, Mount};

use super::HOME;
use crate::assemble;
use crate::config::{Environment, ServerConfig};

/// Folders that every sandbox shows.
const SYSTEM: [&str; 7] = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt"];
/// The folders beside `bin` that belong to a program.
const BESIDE: [&str; 6] = ["bin", "lib", "lib64", "libexec", "shims", "versions"];
/// The files that mark the folder of a program that is run from its sources.
const MARKS: [&str; 5] = ["package.json", "pyproject.toml", "Cargo.toml", "go.mod", ".git"];

/// Guesses the mounts of a server from its command: the place of its program, and the files and folders in its
/// arguments. Folders in its arguments are writable, because a server gets them to work in.
pub(super) fn guessed(
    program: &Path,
    arguments: &[String],
    cwd: &Path,
    workspace: &Path,
    environment: &Environment,
) -> Vec<Mount> {
    let mut mounts: BTreeMap<PathBuf, bool> = BTreeMap::new();
    let mut add = |path: PathBuf, writable: bool| {
        if !is_too_much(&path, environment) && !path.starts_with(workspace) && !is_system(&path) {
            *mounts.entry(path).or_default() |= writable;
        }
    };
    for path in [Some(program.to_owned()), program.canonicalize().ok()].into_iter().flatten() {
        let Some(folder) = path.parent() else { continue };
        let prefix = folder.parent().filter(|_| folder.ends_with("bin") || folder.ends_with("shims"));
        // A Python environment is marked by this file, and contains only files that the program needs.
        if let Some(prefix) = prefix.filter(|prefix| prefix.join("pyvenv.cfg").exists()) {
            add(prefix.to_owned(), false);
            continue;
        }
        let beside = prefix.into_iter().flat_map(|prefix| BESIDE.map(|name| prefix.join(name)));
        beside.chain([folder.to_owned()]).filter(|folder| folder.is_dir()).for_each(|folder| add(folder, false));
    }
    for argument in arguments {
        let text = argument.split_once('=').map_or(argument.as_str(), |(_, value)| value);
        let path = cwd.join(text);
        // Only absolute paths and paths that start with a dot count; another word may equal the name of a file by
        // chance.
        if !(text.starts_with('/') || text.starts_with("./") || text.starts_with("../")) {
            continue;
        }
        let Ok(path) = path.canonicalize() else { continue };
        if path.is_dir() {
            add(path, true);
        } else if let Some(folder) = path.parent() {
            // A Node package needs the packages beside it, up to the outermost `node_modules`.
            let packages = folder.ancestors().filter(|folder| folder.ends_with("node_modules")).last();
            let is_marked = |folder: &&Path| MARKS.iter().any(|mark| folder.join(mark).exists());
            let marked = packages.or_else(|| folder.ancestors().take(4).find(is_marked));
            add(marked.unwrap_or(folder).to_owned(), false);
        }
    }
    mounts.into_iter().map(|(path, writable)| Mount { source: path.clone(), target: path, writable }).collect()
}

/// Returns true if a folder holds more than a server should get without a request: the home folder, a folder around it,
/// or one that all users share.
fn is_too_much(folder: &Path, environment: &Environment) -> bool {
    let is_shared = ["/home", "/run", "/tmp", "/var"].iter().any(|shared| folder == Path::new(shared));
    is_shared || folder.parent().is_none() || environment.home().is_some_and(|home| home.starts_with(folder))
}

pub(super) fn is_system(path: &Path) -> bool {
    SYSTEM.iter().any(|folder| path.starts_with(folder))
}

/// Returns the mounts for the files and folders that variables of a server name, writable unless they are secrets. For
/// a missing file it is the folder to create the file in. Prints a warning for a path that is not shown, because the
/// server cannot know why.
pub(super) fn named_by_variables<'a>(
    server: &ServerConfig,
    paths: impl Iterator<Item = (&'a str, PathBuf)>,
    workspace: &Path,
    files: &FileRules,
    environment: &Environment,
) -> Vec<Mount> {
    let mut mounts: BTreeMap<PathBuf, bool> = BTreeMap::new();
    for (variable, path) in paths {
        let named = assemble::whole(&path);
        let is_there = seen(&named, workspace, files) || is_system(&named) || named.starts_with(HOME);
        if is_there || ["/dev", "/proc", "/sys"].iter().any(|folder| named.starts_with(folder)) {
            continue;
        }
        let at_home = environment.home().map(assemble::whole);
        let of_home = at_home.as_ref().and_then(|home| named.strip_prefix(home).ok());
        let is_secret = of_home.is_some_and(|path| HIDDEN.iter().any(|secret| path.starts_with(secret)))
            || named.file_name().is_some_and(|name| name.to_str().is_some_and(is_deep_secret));
        let folder = named.parent().unwrap_or(&named);
        let shown = if named.is_file() {
            Some((named.clone(), !is_secret))
        } else if named.is_dir() {
            Some((named.clone(), true)).filter(|_| !is_secret && !is_too_much(&named, environment))
        } else {
            let is_fit = !named.exists() && folder.is_dir() && !is_secret && !is_too_much(folder, environment);
            Some((folder.to_owned(), true)).filter(|_| is_fit)
        };
        match shown.filter(|_| server.mounts.is_none()) {
            Some((path, writable)) => *mounts.entry(path).or_default() |= writable,
            None => {
                let (server, path) = (&server.name, named.display());
                tracing::warn!(
                    target: "wieldy::mcp",
                    server,
                    variable,
                    %path,
                    "a server does not see the path in its variable: add it to its `mounts`"
                );
            }
        }
    }
    // Skip mounts that are inside another one.
    let all: Vec<PathBuf> = mounts.keys().cloned().collect();
    mounts.retain(|path, _| all.iter().all(|other| other == path || !path.starts_with(other)));
    mounts.into_iter().map(|(path, writable)| Mount { source: path.clone(), target: path, writable }).collect()
}

/// Returns the path in the value of a variable: absolute, relative to the server's folder, or in the address of a file
/// or of a database in a file.
pub(super) fn path_in(value: &str, cwd: &Path) -> Option<PathBuf> {
    let is_path = |text: &str| text == ".." || ["/", "./", "../"].iter().any(|start| text.starts_with(start));
    if value.contains('\n') {
        return None;
    }
    if is_path(value) {
        return Some(cwd.join(value));
    }
    let (scheme, rest) = value.split_once(':')?;
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let after_host = rest.strip_prefix("//").map(|rest| rest.strip_prefix("localhost").unwrap_or(rest));
    let path = match scheme.split('+').next().unwrap_or_default() {
        "file" => after_host.unwrap_or(rest),
        "sqlite" | "sqlite3" => match after_host?.strip_prefix('/')? {
            path if path.starts_with('/') => path,
            // Some libraries read this as a relative path, and some as an absolute one.
            path => {
                let whole = Path::new("/").join(path);
                let is_whole = whole.parent().is_some_and(|folder| folder.parent().is_some() && folder.is_dir());
                return Some(if is_whole { whole } else { cwd.join(path) });
            }
        },
        _ => return None,
    };
    is_path(path).then(|| cwd.join(path))
}

pub(super) fn seen(path: &Path, workspace: &Path, files: &FileRules) -> bool {
    path.starts_with(workspace) || files.mounts.iter().any(|mount| path.starts_with(&mount.target))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the guessed mounts for a command in a folder with these files, relative to that folder.
    fn guessed_in(files: &[&str], program: &str, argument: &str) -> Vec<(String, bool)> {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for file in files {
            let path = root.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let arguments = [root.join(argument).display().to_string()];
        let mounts = guessed(&root.join(program), &arguments, &root, Path::new("/workspace"), &Environment::default());
        let shown = |path: &Path| path.strip_prefix(&root).unwrap().display().to_string();
        mounts.iter().map(|mount| (shown(&mount.target), mount.writable)).collect()
    }

    #[test]
    fn a_program_of_an_environment_of_pythons_sees_the_whole_of_it() {
        let files = ["venv/bin/server", "venv/pyvenv.cfg", "venv/lib/server.py", "data/file"];
        let mounts = guessed_in(&files, "venv/bin/server", "data");
        assert_eq!(mounts, [("data".into(), true), ("venv".into(), false)]);
    }

    #[test]
    fn a_variable_names_a_path_in_several_ways() {
        for (value, path) in [
            ("/data/file", Some("/data/file")),
            ("./file", Some("/here/./file")),
            ("../file", Some("/here/../file")),
            ("..", Some("/here/..")),
            ("file:///data/file", Some("/data/file")),
            ("file://localhost/data/file", Some("/data/file")),
            ("file:../file?mode=ro", Some("/here/../file")),
            ("sqlite:////data/file", Some("/data/file")),
            ("sqlite+aiosqlite:////data/file?x=1", Some("/data/file")),
            ("sqlite:///no-such-folder/file", Some("/here/no-such-folder/file")),
            ("sqlite:///usr/file", Some("/usr/file")),
            ("sqlite:///file", Some("/here/file")),
            ("sqlite::memory:", None),
            ("sqlite://:memory:", None),
            ("file://other.test/data", None),
            ("postgres://a.test/data", None),
            ("https://a.test/file", None),
            ("a word", None),
            ("a/b", None),
            ("/two\nlines", None),
            ("", None),
        ] {
            assert_eq!(path_in(value, Path::new("/here")), path.map(PathBuf::from), "{value}");
        }
    }

    #[test]
    fn a_package_of_nodes_sees_the_packages_beside_it() {
        let files = ["node/bin/node", "app/node_modules/@a/server/package.json", "app/node_modules/@a/server/index.js"];
        let mounts = guessed_in(&files, "node/bin/node", "app/node_modules/@a/server/index.js");
        assert_eq!(mounts, [("app/node_modules".into(), false), ("node/bin".into(), false)]);
    }
}
