//! The section `vault`: the folders of notes, and the callers that they belong to.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use wieldy::{DEFAULT_PROJECT, VaultProject};

use super::file::{FileOwners, FileVault, FileVaultProject};
use super::sandbox::at_home;

/// Maximum length of the name of a project, in bytes.
const NAME_BYTES_MAX: usize = 100;

/// The resolved section.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct VaultConfig {
    /// The vaults by the name of their project.
    pub(crate) projects: BTreeMap<String, VaultProject>,
}

impl FileVault {
    /// Returns the default: no vault.
    pub(super) fn defaults() -> Self {
        Self {
            root: Some(PathBuf::new()),
            tenants: Some(Vec::new()),
            users: Some(Vec::new()),
            agents: Some(Vec::new()),
            projects: Some(BTreeMap::new()),
        }
    }

    /// Makes relative paths start at the file's folder.
    pub(super) fn begin_paths_at(&mut self, folder: &Path) {
        let projects = self.projects.iter_mut().flat_map(BTreeMap::values_mut);
        for root in projects.filter_map(|project| project.root.as_mut()).chain(&mut self.root) {
            if root.is_relative() && !root.as_os_str().is_empty() && !root.starts_with("~") {
                *root = folder.join(&*root);
            }
        }
    }
}

impl VaultConfig {
    /// Resolves the section; `home` replaces `~`. The error lists all mistakes with their keys.
    pub(super) fn resolve(file: FileVault, home: Option<&Path>) -> Result<Self, Vec<String>> {
        let (mut projects, mut wrong) = (BTreeMap::new(), Vec::new());
        let FileVault { root, tenants, users, agents, projects: others } = file;
        let others = others.unwrap_or_default();
        let has_owner =
            [&tenants, &users, &agents].iter().any(|names| names.as_ref().is_some_and(|names| !names.is_empty()));
        let root = root.filter(|root| !root.as_os_str().is_empty());
        if root.is_none() && has_owner {
            wrong.push("`vault.root` is missing, although the vault has owners".to_owned());
        }
        if root.is_some() && others.contains_key(DEFAULT_PROJECT) {
            wrong.push(format!(
                "`vault.projects.{DEFAULT_PROJECT}` and `vault.root` name the same vault; leave one out"
            ));
        }
        let own = root.map(|root| FileVaultProject { root: Some(root), tenants, users, agents });
        let own = own.map(|own| ("vault".to_owned(), DEFAULT_PROJECT.to_owned(), own));
        let others = others.into_iter().map(|(name, project)| (format!("vault.projects.{name}"), name, project));
        for (key, name, project) in own.into_iter().chain(others) {
            match resolved(&key, &name, project, home) {
                Ok(project) => drop(projects.insert(name, project)),
                Err(problem) => wrong.push(problem),
            }
        }
        if wrong.is_empty() { Ok(Self { projects }) } else { Err(wrong) }
    }
}

fn resolved(key: &str, name: &str, file: FileVaultProject, home: Option<&Path>) -> Result<VaultProject, String> {
    let is_name = !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && name.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c));
    if !is_name {
        return Err(format!(
            "`{key}`: the name of a project has 1 to {NAME_BYTES_MAX} letters, digits, `-`, `_` and `.`"
        ));
    }
    let root = file.root.filter(|root| !root.as_os_str().is_empty());
    let root = root.ok_or_else(|| format!("`{key}` has no `root`"))?;
    let root = at_home(&root, home).map_err(|problem| format!("`{key}.root`: {problem}"))?;
    let text = root.to_string_lossy().replace("{tenant}", "").replace("{user}", "");
    if text.contains(['{', '}']) {
        return Err(format!(
            "`{key}.root`: `{}` has another placeholder than `{{tenant}}` and `{{user}}`",
            root.display()
        ));
    }
    Ok(VaultProject {
        root: std::path::absolute(&root).unwrap_or(root),
        owners: FileOwners { tenants: file.tenants, users: file.users, agents: file.agents }.owners(),
    })
}

#[cfg(test)]
mod tests {
    use wieldy::Owners;

    use super::*;

    fn resolve(text: &str) -> Result<VaultConfig, Vec<String>> {
        VaultConfig::resolve(toml::from_str(text).unwrap(), Some(Path::new("/home/ada")))
    }

    #[test]
    fn the_default_vault_and_projects_have_roots_and_owners() {
        let text = "root = \"~/notes\"\n[projects.team]\nroot = \"/vaults/{tenant}\"\nusers = [\"ada\"]\n";
        let project = |root: &str, users: &[&str]| VaultProject {
            root: root.into(),
            owners: Owners { users: users.iter().map(|user| (*user).to_owned()).collect(), ..Owners::default() },
        };
        let projects = [
            ("default".to_owned(), project("/home/ada/notes", &[])),
            ("team".to_owned(), project("/vaults/{tenant}", &["ada"])),
        ];
        assert_eq!(resolve(text), Ok(VaultConfig { projects: projects.into() }));
        assert_eq!(resolve(""), Ok(VaultConfig::default()));
    }

    #[test]
    fn every_mistake_is_told_with_its_key() {
        for (text, key) in [
            ("users = [\"ada\"]", "`vault.root` is missing"),
            ("[projects.a]\nusers = []", "`vault.projects.a` has no `root`"),
            ("[projects.a]\nroot = \"/v/{team}\"", "`vault.projects.a.root`: `/v/{team}` has another placeholder"),
            ("[projects.\"a/b\"]\nroot = \"/v\"", "`vault.projects.a/b`: the name of a project"),
            ("root = \"/a\"\n[projects.default]\nroot = \"/v\"", "`vault.projects.default` and `vault.root`"),
        ] {
            let wrong = resolve(text).unwrap_err();
            assert!(wrong.len() == 1 && wrong[0].starts_with(key), "{wrong:?}");
        }
        assert!(toml::from_str::<FileVault>("rot = 1").is_err());
    }
}
