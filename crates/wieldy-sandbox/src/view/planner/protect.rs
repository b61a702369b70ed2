//! Plans the paths of a workspace that programs in a sandbox cannot change, because programs outside would execute
//! them.

use std::path::{Path, PathBuf};

use wieldy_core::secrets::{
    BARE_REPOSITORY, COMMON_FOLDER, Held, PROTECTED, PROTECTED_AT_HOME, PROTECTED_WHERE_THERE, ProtectedName,
    held_by_rule,
};

use super::{Behind, LINKS_MAX, Planner};
use crate::view::plan::{Entry, Making, PlanError, Step};

/// An empty folder of templates: git would copy sample hooks into a new repository, whose hooks are protected already.
const GIT_TEMPLATES: &str = "/run/git-templates";

/// The file in a home folder with the names that git ignores in all repositories.
const GIT_IGNORE: &str = ".config/git/ignore";

/// The content of a `commondir` file that keeps a repository's settings and hooks in its own folder, as without the
/// file. With another content, git outside of the sandbox would read both from the folder named there.
const SAME_FOLDER: Held = Held::File(".\n");

/// The maximum depth of the search for modules.
const MODULES_DEPTH_MAX: usize = 16;
/// The maximum number of folders in the search for modules.
const MODULES_FOLDERS_MAX: usize = 1000;

impl Planner<'_> {
    pub(super) fn protect(&mut self) -> Result<(), PlanError> {
        let workspace = self.request.workspace;
        for name in &PROTECTED {
            self.protect_name(name)?;
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
                // The settings are not protected, or no repository could be made.
                self.protect_one(&git.join("hooks"), Held::Folder)?;
                self.protect_one(&git.join("commondir"), SAME_FOLDER)?;
                self.add(Step::Folder { path: GIT_TEMPLATES.into() });
                self.environment.push(("GIT_TEMPLATE_DIR", GIT_TEMPLATES.into()));
            }
        }
        self.protect_top()?;
        for path in &self.request.rules.protected {
            let path = self.in_workspace(path)?;
            let Some(inner) = path.strip_prefix(workspace).ok().filter(|inner| !inner.as_os_str().is_empty()) else {
                return Err(PlanError::NotInWorkspace(path));
            };
            let mut known = PROTECTED.iter().chain(&PROTECTED_AT_HOME);
            match known.find(|name| inner == Path::new(name.path)) {
                Some(name) => self.protect_name(name)?,
                None => self.protect_one(&path, held_by_rule(&path))?,
            }
        }
        // Existing ones are hidden already.
        for path in self.request.rules.own.iter().filter(|path| path.starts_with(workspace) && *path != workspace) {
            self.protect_one(path, Held::Folder)?;
        }
        self.ignore_placeholders();
        Ok(())
    }

    /// Protects an existing name, and a missing one if this user has a program that would read it. A placeholder that
    /// another executor left behind is used again, so that it is removed after this sandbox.
    fn protect_name(&mut self, name: &ProtectedName) -> Result<(), PlanError> {
        let path = self.request.workspace.join(name.path);
        match self.entry(&path).is_some() || self.has_program_for(name) || self.facts.look.is_held(&path) {
            true => self.protect_one(&path, name.held),
            false => Ok(()),
        }
    }

    fn has_program_for(&self, name: &ProtectedName) -> bool {
        let is_there = |path: PathBuf| self.entry(&path).is_some();
        let in_home = |folder: &&str| self.facts.home.as_ref().is_some_and(|home| is_there(home.join(folder)));
        let is_program = |program: &&str| self.facts.programs.iter().any(|folder| is_there(folder.join(program)));
        let is_for_all = name.programs.is_empty() && name.settings.is_empty();
        is_for_all || name.settings.iter().any(in_home) || name.programs.iter().any(is_program)
    }

    /// Keeps the workspace from becoming a bare repository, in which git would obey settings that a command wrote. If
    /// it is one, protects those settings.
    fn protect_top(&mut self) -> Result<(), PlanError> {
        let workspace = self.request.workspace;
        let common = workspace.join(COMMON_FOLDER);
        match self.entry(&common) {
            // Git needs a file. The folder cannot be moved away, and the files in it are the project's own.
            Some(Entry::Folder) => self.hold_parents(&common.join("inside")),
            _ => self.protect_one(&common, SAME_FOLDER)?,
        }
        for path in BARE_REPOSITORY.map(|name| workspace.join(name)) {
            match self.entry(&path) {
                None => return self.protect_one(&path, Held::File("")),
                // The folder cannot be moved away, so that all sandboxes make their placeholder at the same name.
                Some(Entry::Folder) => {
                    self.hold_parents(&path.join("inside"));
                }
                // Git accepts an executable file in place of a folder, so the next missing name is held, too.
                Some(Entry::File) if !path.ends_with("HEAD") => self.cover(&path),
                Some(Entry::Link { .. }) => self.cover(&path),
                Some(Entry::File) => {}
            }
        }
        self.protect_git(workspace)
    }

    /// Makes git in the sandbox ignore placeholders at the top of the workspace, or `git add` would add them.
    fn ignore_placeholders(&mut self) {
        let home = self.home();
        let is_file = |(path, held): &(&PathBuf, &Held)| {
            path.parent() == Some(self.request.workspace) && matches!(held, Held::File(_))
        };
        let names = self.held.iter().filter(is_file).filter_map(|(path, _)| path.file_name()?.to_str());
        let lines: String = names.map(|name| format!("/{name}\n")).collect();
        if !lines.is_empty() && !self.is_brought(home) {
            self.add(Step::File { path: Path::new(home).join(GIT_IGNORE), content: lines });
        }
    }

    /// Protects files that git executes or that say where these are, in a repository's own folder and in those of its
    /// modules.
    fn protect_git(&mut self, folder: &Path) -> Result<(), PlanError> {
        self.protect_one(&folder.join("hooks"), Held::Folder)?;
        self.protect_one(&folder.join("config"), Held::File(""))?;
        self.protect_one(&folder.join("config.worktree"), Held::File(""))?;
        self.protect_one(&folder.join("commondir"), SAME_FOLDER)?;
        self.protect_modules(&folder.join("modules"), MODULES_DEPTH_MAX, &mut MODULES_FOLDERS_MAX.clone())?;
        for tree in self.names(&folder.join("worktrees"), |_| true)? {
            let tree = self.real(&tree);
            if tree.starts_with(self.request.workspace) && self.entry(&tree.join("commondir")).is_some() {
                self.protect_one(&tree.join("commondir"), SAME_FOLDER)?;
                self.protect_one(&tree.join("config.worktree"), Held::File(""))?;
            }
        }
        Ok(())
    }

    /// Protects the repositories of modules. A module has the name of its path in the work tree, so it may be some
    /// folders deeper. It is recognized by its protected names, too: a command could remove its `HEAD`, and put it back
    /// later.
    fn protect_modules(&mut self, folder: &Path, depth: usize, folders_left: &mut usize) -> Result<(), PlanError> {
        *folders_left = folders_left.checked_sub(1).ok_or_else(|| PlanError::TooMany(folder.to_owned()))?;
        for inner in self.names(folder, |_| true)? {
            let inner = self.real(&inner);
            let is_inside = inner.starts_with(self.request.workspace) && self.entry(&inner) == Some(Entry::Folder);
            match is_inside {
                true if ["HEAD", "config", "hooks"].iter().any(|name| self.entry(&inner.join(name)).is_some()) => {
                    self.protect_git(&inner)?;
                }
                true if depth > 0 => self.protect_modules(&inner, depth - 1, folders_left)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes a path of the host unchangeable wherever the sandbox shows it; a missing path gets a placeholder first.
    fn protect_one(&mut self, host: &Path, held: Held) -> Result<(), PlanError> {
        // The home of a program may be in the state folder, and the state folder in the workspace.
        let mut mounts = self.request.rules.mounts.iter().filter(|mount| !self.is_home(&mount.source));
        if let Some(mount) = mounts.find(|mount| mount.writable && mount.source.starts_with(host)) {
            let (mount, protected) = (mount.source.clone(), host.to_owned());
            return Err(PlanError::MountedAndProtected { mount, protected });
        }
        let host = self.protect_links(host);
        if self.entry(&host).is_none() {
            if !host.starts_with(self.request.workspace) || !self.can_be_made(&host) {
                return Ok(());
            }
            for parent in host.ancestors().skip(1) {
                match self.entry(parent) {
                    None => drop(self.held.insert(parent.to_owned(), Held::Folder)),
                    // A file is in place of a folder: the path cannot exist as long as the file is protected.
                    Some(Entry::File) => return self.protect_one(parent, held),
                    Some(Entry::Folder | Entry::Link { .. }) => break,
                }
            }
            self.held.insert(host.clone(), held);
        }
        self.cover(&host);
        Ok(())
    }

    /// Returns true if a command could make a file at a missing path of the host.
    fn can_be_made(&self, host: &Path) -> bool {
        let is_writable = |path: &PathBuf| matches!(self.behind(path), Behind::Host { writable: true, .. });
        let mut above = host.ancestors().skip(1).filter(|above| self.entry(above) == Some(Entry::Folder));
        self.all_views(host).iter().any(is_writable)
            && above.next().is_none_or(|folder| self.facts.look.making(folder) != Making::Impossible)
    }

    /// Protects every link on the way to a path's target, and returns the target.
    pub(super) fn protect_links(&mut self, path: &Path) -> PathBuf {
        let mut path = path.to_owned();
        for _ in 0..LINKS_MAX {
            let Some((link, next)) = self.next_link(&path) else { break };
            self.cover(&link);
            path = next;
        }
        path
    }

    pub(super) fn cover(&mut self, host: &Path) {
        let views = self.all_views(host);
        for path in views {
            let Behind::Host { writable: true, .. } = self.behind(&path) else { continue };
            self.hold_parents(&path);
            if path != self.request.workspace && !matches!(self.tree.get(&path), Some(Step::Hide { .. })) {
                self.add(Step::Protect { path });
            }
        }
    }

    /// Mounts the folders above a path on themselves, since a mount point cannot be moved. A command that moved such a
    /// folder could put another file at the path, and would have the old one elsewhere.
    pub(super) fn hold_parents(&mut self, path: &Path) {
        let parents = path.ancestors().skip(1).take_while(|parent| !self.tree.contains_key(*parent));
        for parent in parents.map(Path::to_owned).collect::<Vec<_>>() {
            if let Behind::Host { path: source, writable: true } = self.behind(&parent) {
                self.add(Step::Bind { source, target: parent, writable: true, optional: false });
            }
        }
    }
}
