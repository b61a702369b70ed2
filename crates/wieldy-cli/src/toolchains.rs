//! The user's toolchains: folders in the home that programs in sandboxes see read-only, and the variables with which
//! programs find them.
//!
//! A sandbox has a home of its own for the caches of package managers. Only the folders with programs are shown, never
//! those with settings, because they contain credentials.

use std::path::{Component, Path, PathBuf};

use wieldy::{FileRules, Mount};

use crate::config::{Environment, read_regular};

/// A toolchain in the home folder.
struct Toolchain {
    /// The variable that names its folder, if there is one.
    variable: Option<&'static str>,
    /// The folder if the variable is not set.
    folder: &'static str,
    /// The parts of the folder that programs see.
    parts: &'static [&'static str],
    /// The parts of the folder that belong on the `PATH`. A `*` stands for any name.
    programs: &'static [&'static str],
    /// The files with credentials in the parts that programs see. A `*` stands for any name.
    credentials: &'static [&'static str],
    /// True if the variable is set for programs, which would look in their own home otherwise.
    is_told: bool,
}

const NONE: Toolchain =
    Toolchain { variable: None, folder: "", parts: &[], programs: &[], credentials: &[], is_told: false };

const TOOLCHAINS: [Toolchain; 10] = [
    Toolchain {
        parts: &["toolchains", "settings.toml", "update-hashes"],
        is_told: true,
        ..at("RUSTUP_HOME", ".rustup")
    },
    // Cargo writes its cache to the same folder, so only `bin` is shown and the sandbox has a folder of its own.
    Toolchain { parts: &["bin"], programs: &["bin"], ..at("CARGO_HOME", ".cargo") },
    Toolchain {
        parts: &["nvm.sh", "nvm-exec", "alias", "versions"],
        credentials: &["versions/*/*/etc/npmrc", "versions/*/*/lib/node_modules/npm/npmrc"],
        is_told: true,
        ..at(NVM, ".nvm")
    },
    Toolchain {
        parts: &["bin", "libexec", "completions", "plugins", "shims", "versions", "version"],
        programs: &["shims", "bin"],
        credentials: &["versions/*/pip.conf"],
        is_told: true,
        ..at("PYENV_ROOT", ".pyenv")
    },
    Toolchain {
        parts: &[""],
        credentials: &["*/pip.conf"],
        is_told: true,
        ..at("UV_PYTHON_INSTALL_DIR", ".local/share/uv/python")
    },
    Toolchain {
        folder: ".local",
        parts: &["bin", "share/uv/tools"],
        programs: &["bin"],
        credentials: &["share/uv/tools/*/pip.conf"],
        ..NONE
    },
    Toolchain { parts: &["bin"], programs: &["bin"], ..at("GOPATH", "go") },
    Toolchain {
        parts: &["bin", "candidates", "src", "var"],
        programs: &["candidates/*/current/bin"],
        is_told: true,
        ..at("SDKMAN_DIR", ".sdkman")
    },
    Toolchain {
        parts: &["bin", "lib", "installs", "plugins", "shims", "asdf.sh", "libexec"],
        programs: &["shims", "bin"],
        credentials: IN_INSTALLS,
        is_told: true,
        ..at("ASDF_DATA_DIR", ".asdf")
    },
    Toolchain {
        parts: &["bin", "installs", "plugins", "shims"],
        programs: &["shims"],
        credentials: IN_INSTALLS,
        is_told: true,
        ..at("MISE_DATA_DIR", ".local/share/mise")
    },
];

const NVM: &str = "NVM_DIR";

/// The files with credentials in a folder with several installed toolchains.
const IN_INSTALLS: &[&str] = &[
    "installs/*/*/etc/npmrc",
    "installs/*/*/lib/node_modules/npm/npmrc",
    "installs/*/*/pip.conf",
    "installs/*/*/credentials",
    "installs/*/*/credentials.toml",
];

const fn at(variable: &'static str, folder: &'static str) -> Toolchain {
    Toolchain { variable: Some(variable), folder, ..NONE }
}

impl Toolchain {
    /// Returns the folder, if it exists.
    fn folder(&self, environment: &Environment) -> Option<PathBuf> {
        let named = self.variable.and_then(|variable| environment.0.get(variable)).map(PathBuf::from);
        let folder = named.filter(|named| named.is_absolute());
        folder.or_else(|| Some(environment.home()?.join(self.folder))).filter(|folder| folder.is_dir())
    }
}

/// Returns the mounts of all toolchains of this user, except those that are already mounted or are in the workspace.
pub(crate) fn mounts(environment: &Environment, mounted: &[Mount], workspace: &Path) -> Vec<Mount> {
    let mut mounts: Vec<Mount> = Vec::new();
    for toolchain in &TOOLCHAINS {
        let Some(folder) = toolchain.folder(environment) else { continue };
        for part in toolchain.parts {
            let target = if part.is_empty() { folder.clone() } else { folder.join(part) };
            let Ok(source) = target.canonicalize() else { continue };
            let is_seen = |mount: &Mount| target.starts_with(&mount.target);
            let is_around =
                source.starts_with(workspace) || workspace.starts_with(&source) || workspace.starts_with(&target);
            // The system is always shown.
            let is_system = ["/usr", "/opt", "/nix"].iter().any(|system| target.starts_with(system));
            if !is_around && !is_system && !mounted.iter().chain(&mounts).any(is_seen) {
                mounts.push(Mount { source, target, writable: false });
            }
        }
    }
    mounts
}

/// Returns the files with credentials in the shown toolchains, except those that are mounted or shown by name.
pub(crate) fn credentials(environment: &Environment, rules: &FileRules) -> Vec<PathBuf> {
    let found = TOOLCHAINS.iter().filter_map(|toolchain| Some((toolchain.folder(environment)?, toolchain.credentials)));
    let found = found.flat_map(|(folder, ways)| ways.iter().flat_map(move |way| matching(&folder, way)));
    let mut found: Vec<PathBuf> = found.filter_map(|path| path.canonicalize().ok()).collect();
    let is_wanted = |path: &Path| {
        rules.shown.iter().any(|shown| path.starts_with(shown))
            || rules.mounts.iter().any(|mount| mount.source.starts_with(path))
    };
    found.retain(|path| !is_wanted(path));
    found
}

/// Returns the folders with programs of all toolchains of this user, except those in the workspace.
pub(crate) fn programs(environment: &Environment, workspace: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for toolchain in &TOOLCHAINS {
        let Some(folder) = toolchain.folder(environment) else { continue };
        if toolchain.variable == Some(NVM) {
            folders.extend(node_of_nvm(&folder));
        }
        folders.extend(toolchain.programs.iter().flat_map(|way| matching(&folder, way)));
    }
    folders.retain(|folder| folder.is_dir() && !folder.starts_with(workspace));
    folders
}

/// Returns the folder with the programs of nvm's default version, if a file names it.
fn node_of_nvm(folder: &Path) -> Option<PathBuf> {
    // An alias may name another, such as `lts/*`.
    const ALIASES_MAX: usize = 4;
    let mut name = "default".to_owned();
    for _ in 0..ALIASES_MAX {
        let is_plain = Path::new(&name).components().all(|part| matches!(part, Component::Normal(_)));
        let alias = is_plain.then(|| folder.join("alias").join(&name)).filter(|alias| alias.is_file());
        let Some(alias) = alias else { break };
        let text = read_regular(&alias, ALIAS_BYTES_MAX).ok()?;
        name = String::from_utf8(text).ok()?.trim().to_owned();
    }
    let parts = |version: &str| {
        version.trim_start_matches('v').split('.').map(|part| part.parse().ok()).collect::<Option<Vec<u32>>>()
    };
    let wanted = match name.as_str() {
        "node" | "stable" => Vec::new(),
        name => parts(name)?,
    };
    let installed = folder.join("versions/node").read_dir().ok()?.flatten().map(|entry| entry.path());
    let newest = installed.filter_map(|path| Some((parts(path.file_name()?.to_str()?)?, path)));
    let newest = newest.filter(|(version, _)| version.starts_with(&wanted)).max()?;
    Some(newest.1.join("bin"))
}

/// The maximal size of a file with an alias of nvm.
const ALIAS_BYTES_MAX: u64 = 256;

/// Returns the paths below a folder that match a pattern, in which `*` stands for any name. Paths without a `*` need
/// not exist.
fn matching(folder: &Path, way: &str) -> Vec<PathBuf> {
    // A folder with more entries is no toolchain.
    const NAMES_MAX: usize = 1000;
    let mut paths = vec![folder.to_owned()];
    for part in way.split('/') {
        let below = |path: PathBuf| match part {
            "*" => {
                let all = path.read_dir().into_iter().flatten().flatten().take(NAMES_MAX);
                let mut all: Vec<PathBuf> = all.map(|entry| entry.path()).collect();
                all.sort_unstable();
                all
            }
            name => vec![path.join(name)],
        };
        paths = paths.into_iter().flat_map(below).collect();
    }
    paths
}

/// Returns the variables with which programs find the toolchains, although they have another home.
pub(crate) fn variables(environment: &Environment) -> Vec<(String, String)> {
    let told = TOOLCHAINS.iter().filter(|toolchain| toolchain.is_told);
    told.filter_map(|toolchain| {
        Some((toolchain.variable?.to_owned(), toolchain.folder(environment)?.to_str()?.to_owned()))
    })
    .collect()
}
