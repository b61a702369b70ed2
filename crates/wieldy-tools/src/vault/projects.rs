//! Projects: the vaults of the configuration, and the callers that each belongs to.
//!
//! A caller that may not use a project gets the answer of a project that does not exist. A caller of a tenant reaches
//! only projects that name its tenant, by the list `tenants` or by `{tenant}` in the root.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use lru::LruCache;
use wieldy_core::name::{did_you_mean, near_misses};
use wieldy_core::{CallError, Caller, Code, Held, Owners, RunError};

use super::folder::Vault;
use crate::files::Workspace;

/// The project of calls that name none.
pub const DEFAULT_PROJECT: &str = "default";

/// Maximum number of vaults that are open at once; a root with `{user}` makes one for each user.
const OPEN_MAX: NonZeroUsize = NonZeroUsize::new(256).expect("not zero");

/// A vault of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VaultProject {
    /// The folder. The names `{tenant}` and `{user}` stand for those of the caller.
    pub root: PathBuf,
    /// The callers that may use it.
    pub owners: Owners,
}

/// The vaults of an executor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VaultOptions {
    /// The projects by name.
    pub projects: BTreeMap<String, VaultProject>,
    /// The folder for indexes and unfinished moves.
    pub state: Option<PathBuf>,
    /// True if callers come with tokens: a project without owners is then for the local caller alone.
    pub has_tokens: bool,
    /// Absolute paths of secrets and settings of the operator, which a vault outside the workspace hides.
    pub hidden: Vec<PathBuf>,
}

/// All vaults of an executor, shared by the vault tools.
pub(crate) struct Vaults {
    workspace: Arc<Workspace>,
    options: VaultOptions,
    open: Mutex<LruCache<PathBuf, Arc<Vault>>>,
}

impl VaultProject {
    /// Returns true if the caller may use the project. A name in the root gives each caller a folder of its own.
    fn is_for(&self, caller: &Caller, has_tokens: bool) -> bool {
        let mut owners = self.owners.clone();
        let own = |placeholder, name: &Option<String>| name.clone().filter(|_| self.has(placeholder));
        if owners.tenants.is_empty() {
            owners.tenants.extend(own("{tenant}", &caller.tenant));
        }
        if owners.users.is_empty() {
            owners.users.extend(own("{user}", &caller.user));
        }
        if owners.is_empty() { caller.tenant.is_none() && is_local(caller, has_tokens) } else { owners.admits(caller) }
    }

    fn has(&self, placeholder: &str) -> bool {
        self.root.iter().any(|part| part.to_str().is_some_and(|part| part.contains(placeholder)))
    }

    /// Returns the folder for this caller, or `None` if the caller has no name that can be part of a path.
    fn folder(&self, caller: &Caller) -> Option<PathBuf> {
        let filled = |part: &str| -> Option<String> {
            let mut text = part.to_owned();
            for (placeholder, name) in [("{tenant}", &caller.tenant), ("{user}", &caller.user)] {
                if part.contains(placeholder) {
                    text = text.replace(placeholder, name.as_deref().filter(|name| is_one_name(name))?);
                }
            }
            Some(text)
        };
        self.root
            .components()
            .map(|part| match part {
                Component::Normal(name) => match name.to_str() {
                    Some(text) => filled(text).map(PathBuf::from),
                    None => Some(PathBuf::from(name)),
                },
                other => Some(PathBuf::from(other.as_os_str())),
            })
            .collect()
    }
}

/// Returns true if the text is one name in a folder, and not a hidden one.
fn is_one_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
        && !name.starts_with('.')
        && !name.contains(['/', '\\', '{', '}'])
        && name.len() <= 255
        && !name.chars().any(char::is_control)
}

/// Returns true for the person at this machine. Where callers come with tokens, that is the caller without any limits.
fn is_local(caller: &Caller, has_tokens: bool) -> bool {
    let local = Caller::local();
    let has_all = caller.permissions == Held::All && caller.scopes == Held::All && caller.agent == local.agent;
    caller.tenant.is_none() && (!has_tokens || has_all)
}

impl Vaults {
    pub(crate) fn new(workspace: Arc<Workspace>, options: VaultOptions) -> Self {
        Self { workspace, options, open: Mutex::new(LruCache::new(OPEN_MAX)) }
    }

    /// Returns the vault of a project for this caller.
    pub(crate) fn of(&self, caller: &Caller, project: &str) -> Result<Arc<Vault>, RunError> {
        if self.options.projects.is_empty() {
            return Err(RunError::configuration(
                "no vault is configured",
                "have the operator set `root` in the section `[vault]` of the configuration, such as `root = \"notes\"`",
            ));
        }
        let found = self.options.projects.get(project);
        let folder = found
            .filter(|found| found.is_for(caller, self.options.has_tokens))
            .and_then(|found| Some((found, self.workspace.path().join(found.folder(caller)?))));
        let Some((found, folder)) = folder else { return Err(self.absent(caller, project)) };
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        // The owner is part of the key only by the folder: two projects with one root share its state.
        if let Some(vault) = open.get(&folder) {
            return Ok(vault.clone());
        }
        if found.has("{tenant}") || found.has("{user}") {
            let made = std::fs::create_dir_all(&folder);
            made.map_err(|error| unusable(project, &format!("its folder cannot be made: {}", error.kind())))?;
        }
        let vault = Vault::open(&self.workspace, &folder, &self.options);
        let vault = Arc::new(vault.map_err(|error| {
            let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            unusable(project, &format!("its folder cannot be opened: {source}"))
        })?);
        open.put(folder, vault.clone());
        Ok(vault)
    }

    /// Returns the names of the projects that the caller can use.
    pub(super) fn usable(&self, caller: &Caller) -> Vec<&str> {
        let is_usable =
            |found: &VaultProject| found.is_for(caller, self.options.has_tokens) && found.folder(caller).is_some();
        self.options.projects.iter().filter(|(_, found)| is_usable(found)).map(|(name, _)| name.as_str()).collect()
    }

    /// Returns the error for a project that is not there, or not for this caller.
    fn absent(&self, caller: &Caller, project: &str) -> RunError {
        let names = self.usable(caller);
        let shown = crate::files::cut(project, 100).escape_debug().to_string();
        let error = CallError::new(Code::FileNotFound, format!("there is no vault project `{shown}`"));
        let near = did_you_mean(&near_misses(project, names.iter().copied()));
        let error = match (near, names.as_slice()) {
            (Some(near), _) => error.suggest(near),
            (None, []) => error.suggest("there is no vault project that you can use; ask the operator for one"),
            (None, names) => error.suggest(format!("the projects that you can use: `{}`", names.join("`, `"))),
        };
        RunError::from(error).before_effect()
    }

    /// Returns the names of a path in all projects, for footprints: the caller is not known there. A path of a vault
    /// inside the workspace is a path of the workspace.
    pub(crate) fn names_of(&self, path: &str) -> Vec<String> {
        let path = path.split('#').next().unwrap_or_default();
        let name = |(project, found): (&String, &VaultProject)| {
            let has_owner = found.has("{tenant}") || found.has("{user}");
            match self.inside(&found.root).filter(|_| !has_owner) {
                Some(folder) => self.workspace.names_of(&super::names::workspace_path(&folder, path)),
                None => vec![format!("vault:{project}/{path}")],
            }
        };
        let names: Vec<String> = self.options.projects.iter().flat_map(name).collect();
        if names.is_empty() { vec![format!("vault:{DEFAULT_PROJECT}/{path}")] } else { names }
    }

    /// Returns the path of a folder from the workspace's root, if it is inside the workspace.
    fn inside(&self, root: &Path) -> Option<String> {
        let whole = self.workspace.path().join(root);
        let whole = whole.canonicalize().unwrap_or(whole);
        whole.strip_prefix(self.workspace.path()).ok()?.to_str().map(str::to_owned)
    }
}

fn unusable(project: &str, problem: &str) -> RunError {
    RunError::configuration(
        format!("the vault project `{project}` cannot be used: {problem}"),
        "have the operator check its `root` in the section `[vault]` of the configuration",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn project(root: &str, tenants: &[&str], users: &[&str], agents: &[&str]) -> VaultProject {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let owners = Owners { tenants: owned(tenants), users: owned(users), agents: owned(agents) };
        VaultProject { root: root.into(), owners }
    }

    fn caller(tenant: &str, user: &str) -> Caller {
        let some = |name: &str| Some(name.to_owned()).filter(|name| !name.is_empty());
        Caller { tenant: some(tenant), user: some(user), ..Caller::agent("bot") }
    }

    #[test]
    fn a_project_is_for_its_owners_alone() {
        let (plain, acme) = (project("v", &[], &[], &[]), project("v", &["acme"], &[], &[]));
        let (ada, both) = (project("v", &[], &["ada"], &[]), project("v", &["acme"], &["ada"], &["bot"]));
        let by_user = project("v/{user}", &[], &[], &[]);
        let by_both = project("v/{tenant}/{user}", &[], &[], &[]);
        for (found, caller, fits) in [
            (&plain, caller("", ""), false),
            (&plain, caller("acme", ""), false),
            (&plain, Caller { user: Some("ada".into()), ..Caller::local() }, true),
            (&plain, Caller { tenant: Some("acme".into()), ..Caller::local() }, false),
            (&acme, caller("acme", ""), true),
            (&acme, caller("other", ""), false),
            (&acme, Caller::local(), false),
            (&ada, caller("", "ada"), true),
            // A user of this name in a tenant is another person.
            (&ada, caller("acme", "ada"), false),
            (&both, caller("acme", "ada"), true),
            (&both, caller("acme", "bob"), false),
            (&by_user, caller("", "ada"), true),
            (&by_user, caller("acme", "ada"), false),
            (&by_both, caller("acme", "ada"), true),
        ] {
            assert_eq!(found.is_for(&caller, true), fits, "{found:?} {caller:?}");
        }
        assert!(plain.is_for(&caller("", ""), false), "without tokens every caller is at this machine");
        assert!(!plain.is_for(&caller("acme", ""), false));
    }

    #[test]
    fn a_name_in_a_root_is_one_folder_and_no_path() {
        let found = project("/vaults/{tenant}/of-{user}", &[], &[], &[]);
        assert_eq!(found.folder(&caller("acme", "ada")), Some("/vaults/acme/of-ada".into()));
        for bad in ["..", ".", "a/b", "/etc", ".hidden", "a\0b", "{user}", "a\\b", &"x".repeat(256)] {
            assert_eq!(found.folder(&caller(bad, "ada")), None, "{bad:?}");
            assert_eq!(found.folder(&caller("acme", bad)), None, "{bad:?}");
        }
        assert_eq!(found.folder(&caller("acme", "")), None);
    }
}
