//! What a sandbox cannot change although it is in the workspace: what programs outside would execute.

use std::path::{Path, PathBuf};

use wieldy_core::secrets::{PROTECTED, PROTECTED_WHERE_THERE};

use super::{Behind, LINKS_MAX, Planner};
use crate::native::plan::{Entry, Held, PlanError, Step};

/// An empty folder: git would copy sample hooks into a new repository, whose hooks are protected already.
const GIT_TEMPLATES: &str = "/run/git-templates";

/// A repository's settings and hooks are in the same folder as the rest of it. Without this file that is so anyway; but
/// with one of another content, git outside of the sandbox would take both from wherever it says.
const SAME_FOLDER: Held = Held::File(".\n");

/// How deep the folders of modules are looked into.
const MODULES_DEPTH_MAX: usize = 4;

impl Planner<'_> {
    pub(super) fn protect(&mut self) -> Result<(), PlanError> {
        let workspace = self.request.workspace;
        for name in PROTECTED {
            self.protect_one(&workspace.join(name), Held::Folder)?;
        }
        for path in PROTECTED_WHERE_THERE.map(|name| workspace.join(name)) {
            if self.entry(&path).is_some() {
                self.protect_one(&path, Held::Folder)?;
            }
        }
        let git = workspace.join(".git");
        match self.entry(&git) {
            Some(Entry::Folder) => self.protect_git(&git)?,
            Some(Entry::File) => self.protect_one(&git, Held::File(""))?,
            Some(Entry::Link { .. }) => {
                let folder = self.protect_links(&git);
                if folder.starts_with(workspace) && self.entry(&folder) == Some(Entry::Folder) {
                    self.protect_git(&folder)?;
                }
            }
            None => {
                // Its settings are not protected, or no repository could be made.
                self.protect_one(&git.join("hooks"), Held::Folder)?;
                self.protect_one(&git.join("commondir"), SAME_FOLDER)?;
                self.add(Step::Folder { path: GIT_TEMPLATES.into() });
                self.environment.push(("GIT_TEMPLATE_DIR", GIT_TEMPLATES.into()));
            }
        }
        for path in &self.request.rules.protected {
            let path = self.in_workspace(path)?;
            if path == workspace || !path.starts_with(workspace) {
                return Err(PlanError::NotInWorkspace(path));
            }
            self.protect_one(&path, Held::Folder)?;
        }
        // What of it is there is hidden already.
        for path in self.request.rules.own.iter().filter(|path| path.starts_with(workspace) && *path != workspace) {
            self.protect_one(path, Held::Folder)?;
        }
        Ok(())
    }

    /// Protects what git executes, or what says where that is, in a repository's own folder and in those of its modules.
    fn protect_git(&mut self, folder: &Path) -> Result<(), PlanError> {
        self.protect_one(&folder.join("hooks"), Held::Folder)?;
        self.protect_one(&folder.join("config"), Held::File(""))?;
        self.protect_one(&folder.join("config.worktree"), Held::File(""))?;
        self.protect_one(&folder.join("commondir"), SAME_FOLDER)?;
        self.protect_modules(&folder.join("modules"), MODULES_DEPTH_MAX)?;
        for tree in self.names(&folder.join("worktrees"), |_| true)? {
            let tree = self.real(&tree);
            if tree.starts_with(self.request.workspace) && self.entry(&tree.join("commondir")).is_some() {
                self.protect_one(&tree.join("commondir"), SAME_FOLDER)?;
                self.protect_one(&tree.join("config.worktree"), Held::File(""))?;
            }
        }
        Ok(())
    }

    /// A module is called as its path in the work tree, so it may be some folders deeper. It is known by what cannot be taken from it: a
    /// command could remove its `HEAD`, and put it back once nobody looks.
    fn protect_modules(&mut self, folder: &Path, depth: usize) -> Result<(), PlanError> {
        for inner in self.names(folder, |_| true)? {
            let inner = self.real(&inner);
            let is_inside = inner.starts_with(self.request.workspace) && self.entry(&inner) == Some(Entry::Folder);
            match is_inside {
                true if ["HEAD", "config", "hooks"].iter().any(|name| self.entry(&inner.join(name)).is_some()) => {
                    self.protect_git(&inner)?;
                }
                true if depth > 0 => self.protect_modules(&inner, depth - 1)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes a path of the host unchangeable wherever it can be seen; where it does not exist, something is put there first.
    fn protect_one(&mut self, host: &Path, held: Held) -> Result<(), PlanError> {
        let mut mounts = self.request.rules.mounts.iter();
        if let Some(mount) = mounts.find(|mount| mount.writable && mount.source.starts_with(host)) {
            let (mount, protected) = (mount.source.clone(), host.to_owned());
            return Err(PlanError::MountedAndProtected { mount, protected });
        }
        let host = self.protect_links(host);
        if self.entry(&host).is_none() {
            if !host.starts_with(self.request.workspace) {
                return Ok(());
            }
            for parent in host.ancestors().skip(1) {
                match self.entry(parent) {
                    None => drop(self.held.insert(parent.to_owned(), Held::Folder)),
                    // Where a file is, there is nothing to protect until the file makes way.
                    Some(Entry::File) => return self.protect_one(parent, held),
                    Some(Entry::Folder | Entry::Link { .. }) => break,
                }
            }
            self.held.insert(host.clone(), held);
        }
        self.cover(&host);
        Ok(())
    }

    /// Protects every link on the way to where a path leads, which is returned.
    pub(super) fn protect_links(&mut self, path: &Path) -> PathBuf {
        let mut path = path.to_owned();
        for _ in 0..LINKS_MAX {
            let Some((link, next)) = self.next_link(&path) else { break };
            self.cover(&link);
            path = next;
        }
        path
    }

    fn cover(&mut self, host: &Path) {
        let views = self.all_views(host);
        for path in views {
            let Behind::Host { writable: true, .. } = self.behind(&path) else { continue };
            self.hold_parents(&path);
            if path != self.request.workspace && !matches!(self.tree.get(&path), Some(Step::Hide { .. })) {
                self.add(Step::Protect { path });
            }
        }
    }

    /// Whoever could move a folder around a path would have the path free for another, and what was there elsewhere: what is mounted
    /// on stays.
    pub(super) fn hold_parents(&mut self, path: &Path) {
        let parents = path.ancestors().skip(1).take_while(|parent| !self.tree.contains_key(*parent));
        for parent in parents.map(Path::to_owned).collect::<Vec<_>>() {
            if let Behind::Host { path: source, writable: true } = self.behind(&parent) {
                self.add(Step::Bind { source, target: parent, writable: true, optional: false });
            }
        }
    }
}
