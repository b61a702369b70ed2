//! Makes the [`Plan`] of a sandbox's file tree from rules and facts.
//!
//! Every step is entered into one tree by its path in the sandbox; the plan has the order of that tree. Rules about
//! hidden and protected paths name paths of the *host*. Such a path is masked wherever the sandbox shows it, also
//! through a mount that shows a folder above it somewhere else.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Component, Path, PathBuf};

use wieldy_core::secrets::{HIDDEN, Held, is_environment};
use wieldy_core::{FileRules, Network};

use super::plan::{
    Entry, HostFacts, Kind, Making, Plan, PlanError, PlannedPlaceholder, Room, Step, Wanted, without_dots,
};
use super::system_paths::{HIDDEN_IN_SYSTEM, KERNEL, SHARED, SYSTEM};

mod protect;

/// The request that a plan is for.
pub(crate) struct Request<'a> {
    /// The workspace, without links. It has the same path in the sandbox, and is writable if this user can write there.
    pub(crate) workspace: &'a Path,
    /// Rules for further mounts and for shown, hidden and protected paths.
    pub(crate) rules: &'a FileRules,
    /// The network that programs may reach.
    pub(crate) network: &'a Network,
    /// The size limits of each private folder.
    pub(crate) room: Room,
}

/// Makes a plan, or returns the rule that cannot be kept.
pub(crate) fn plan(request: &Request<'_>, facts: &HostFacts<'_>) -> Result<Plan, PlanError> {
    let mut planner = Planner {
        request,
        facts,
        looked: RefCell::default(),
        tree: HashMap::new(),
        held: BTreeMap::new(),
        environment: vec![],
    };
    planner.check_workspace()?;
    planner.check_mounts()?;
    planner.system();
    planner.private();
    planner.mounts()?;
    planner.files();
    planner.hide()?;
    planner.protect()?;
    planner.finish()
}

/// The home folder of the sandbox's user, in memory; `HOME_ELSEWHERE` is used if that path is taken.
const HOME: &str = "/home/agent";
const HOME_ELSEWHERE: &str = "/run/agent";

/// The maximum number of names of one kind that are masked. More of them were probably made to enlarge the plan.
const NAMES_MAX: usize = 1000;

/// The maximum number of links that are followed, as in the kernel.
pub(crate) const LINKS_MAX: usize = 40;

const ROOM_OF_ROOT: Room = Room { bytes: 1 << 20, inodes: 4096 };
const ROOM_OF_RUN: Room = Room { bytes: 16 << 20, inodes: 4096 };

/// The folder in the state folder with homes for programs, which can be mounted. All else in the state folder is the
/// executor's own.
pub(crate) const HOMES: &str = "homes";

/// Checks that a path is absolute and has one meaning only.
fn plain(path: &Path) -> Result<(), PlanError> {
    let normal = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    let same = path.components().collect::<PathBuf>().as_os_str() == path.as_os_str();
    if path.is_absolute() && normal && same { Ok(()) } else { Err(PlanError::NotPlain(path.to_owned())) }
}

/// Joins two paths, without a slash at the end if `rest` is empty.
fn below(path: &Path, rest: &Path) -> PathBuf {
    if rest.as_os_str().is_empty() { path.to_owned() } else { path.join(rest) }
}

struct Planner<'a> {
    request: &'a Request<'a>,
    facts: &'a HostFacts<'a>,
    /// Cached entries, since the same folders are looked up again and again.
    looked: RefCell<HashMap<PathBuf, Option<Entry>>>,
    /// The step for each path of the sandbox.
    tree: HashMap<PathBuf, Step>,
    held: BTreeMap<PathBuf, Held>,
    environment: Vec<(&'static str, String)>,
}

/// The content behind a path of the sandbox.
#[derive(Debug, PartialEq, Eq)]
enum Behind {
    /// This path of the host.
    Host { path: PathBuf, writable: bool },
    /// Memory of the sandbox, where files can be made.
    Memory,
    /// Files that the kernel or the sandbox makes.
    Made,
    /// Nothing, since this path is hidden.
    Hidden(PathBuf),
    /// Another path, since this path is a link.
    Link(PathBuf),
}

impl Planner<'_> {
    fn check_workspace(&self) -> Result<(), PlanError> {
        let workspace = self.request.workspace;
        plain(workspace)?;
        let is_system = SYSTEM.iter().any(|path| match self.entry(Path::new(path)) {
            Some(Entry::Link { resolved, .. }) => resolved == workspace || workspace == Path::new(path),
            _ => workspace == Path::new(path),
        });
        let is_shared = SHARED.iter().any(|path| workspace == Path::new(path));
        let is_kernel = KERNEL.iter().any(|path| workspace.starts_with(path));
        if is_system || is_shared || is_kernel || self.facts.state.as_deref() == Some(workspace) {
            return Err(PlanError::SystemWorkspace(workspace.to_owned()));
        }
        match self.entry(workspace) {
            Some(Entry::Folder) => Ok(()),
            _ => Err(PlanError::NoWorkspace(workspace.to_owned())),
        }
    }

    fn check_mounts(&self) -> Result<(), PlanError> {
        for mount in &self.request.rules.mounts {
            let (source, target) = (mount.source.as_path(), mount.target.as_path());
            plain(source)?;
            plain(target)?;
            let in_state = |path: &Path| self.facts.state.as_ref().is_some_and(|state| path.starts_with(state));
            if source == Path::new("/") || source.starts_with("/proc") || (in_state(source) && !self.is_home(source)) {
                return Err(PlanError::ForbiddenSource(source.to_owned()));
            }
            let is_kernel = ["/dev", "/proc"].iter().any(|path| target.starts_with(path));
            if target == Path::new("/") || is_kernel || in_state(target) {
                return Err(PlanError::ForbiddenTarget(target.to_owned()));
            }
            let is_missing = |path| matches!(self.entry(path), None | Some(Entry::Link { .. }));
            if source.ancestors().any(is_missing) {
                return Err(PlanError::NoSource(source.to_owned()));
            }
        }
        Ok(())
    }

    /// Returns true if a folder of the host is a home that the executor made for a program.
    fn is_home(&self, folder: &Path) -> bool {
        self.facts.state.as_ref().is_some_and(|state| folder.parent() == Some(&state.join(HOMES)))
    }

    fn add(&mut self, step: Step) {
        self.tree.insert(step.path().to_owned(), step);
    }

    fn entry(&self, path: &Path) -> Option<Entry> {
        if let Some(entry) = self.looked.borrow().get(path) {
            return entry.clone();
        }
        let entry = self.facts.look.entry(path);
        self.looked.borrow_mut().insert(path.to_owned(), entry.clone());
        entry
    }

    /// Follows all links of a path; if they lead in circles, returns any path of the circle.
    fn real(&self, path: &Path) -> PathBuf {
        let mut path = path.to_owned();
        for _ in 0..LINKS_MAX {
            match self.next_link(&path) {
                Some((_, next)) => path = next,
                None => break,
            }
        }
        path
    }

    /// Returns the first link on the way to a path, and the path with this link followed.
    fn next_link(&self, path: &Path) -> Option<(PathBuf, PathBuf)> {
        let mut above: Vec<_> = path.ancestors().collect();
        above.reverse();
        above.into_iter().find_map(|above| match self.entry(above)? {
            Entry::Link { target, .. } => {
                let next = without_dots(&above.parent()?.join(target));
                Some((above.to_owned(), below(&next, path.strip_prefix(above).ok()?)))
            }
            Entry::File | Entry::Folder => None,
        })
    }

    /// Returns the `wanted` paths in a folder. Fails if there are too many, since each may become a mount.
    fn names(&self, folder: &Path, wanted: Wanted) -> Result<Vec<PathBuf>, PlanError> {
        let names = self.facts.look.names(folder, wanted).into_iter();
        let paths: Vec<_> = names.map(|name| folder.join(name)).collect();
        if paths.len() > NAMES_MAX { Err(PlanError::TooMany(folder.to_owned())) } else { Ok(paths) }
    }

    /// Adds the folders with the system's programs and settings.
    fn system(&mut self) {
        for path in SYSTEM.map(PathBuf::from) {
            let show = |source| Step::Bind { source, target: path.clone(), writable: false, optional: false };
            match self.entry(&path) {
                Some(Entry::Folder) => self.add(show(path.clone())),
                Some(Entry::Link { target, resolved }) => {
                    let leads_inside = SYSTEM.iter().any(|system| resolved.starts_with(system));
                    self.add(if leads_inside { Step::Link { path, target } } else { show(resolved) });
                }
                Some(Entry::File) | None => {}
            }
        }
    }

    /// Adds the private folders, `/proc`, `/dev`, and the variables of the sandbox's user.
    fn private(&mut self) {
        let home = self.home();
        let memory = |path: &str, room, mode| Step::Tmpfs { path: path.into(), room, mode };
        let room = self.request.room;
        self.add(memory("/", ROOM_OF_ROOT, 0o755));
        self.add(memory("/dev/shm", room, 0o1777));
        self.add(memory("/run", ROOM_OF_RUN, 0o755));
        self.add(memory("/tmp", room, 0o1777));
        self.add(memory("/var/tmp", room, 0o1777));
        if !self.is_brought(home) {
            self.add(memory(home, room, 0o700));
        }
        self.add(Step::Proc);
        self.add(Step::Dev);
        self.add(Step::Link { path: "/var/run".into(), target: "/run".into() });
        self.environment.extend([("HOME", home.into()), ("USER", "agent".into()), ("LOGNAME", "agent".into())]);
    }

    fn home(&self) -> &'static str {
        let targets = self.request.rules.mounts.iter().map(|mount| mount.target.as_path());
        let taken = targets.chain([self.request.workspace]).any(|path| Path::new(HOME).starts_with(path));
        if taken && !self.is_brought(HOME) { HOME_ELSEWHERE } else { HOME }
    }

    /// Returns true if a rule mounts a home there, which stays when the sandbox is gone.
    fn is_brought(&self, home: &str) -> bool {
        let home = Path::new(home);
        self.request.workspace != home && self.request.rules.mounts.iter().any(|mount| mount.target == home)
    }

    fn mounts(&mut self) -> Result<(), PlanError> {
        let workspace = self.request.workspace.to_owned();
        let bind = |source: &Path, target: &Path, writable| Step::Bind {
            source: source.to_owned(),
            target: target.to_owned(),
            writable,
            optional: false,
        };
        let mut steps: Vec<_> =
            self.request.rules.mounts.iter().map(|m| bind(&m.source, &m.target, m.writable)).collect();
        // Programs cannot make files in a folder where this user cannot.
        let writable = self.facts.look.making(&workspace) == Making::Possible;
        steps.push(bind(&workspace, &workspace, writable));
        for step in steps {
            if self.tree.contains_key(step.path()) {
                return Err(PlanError::Duplicate(step.path().to_owned()));
            }
            self.add(step);
        }
        Ok(())
    }

    /// Adds settings that name the user and the host of a program, which differ from the host's.
    fn files(&mut self) {
        let HostFacts { user, group, .. } = *self.facts;
        let home = self.home();
        let mut users = format!("agent:x:{user}:{group}:agent:{home}:/bin/sh\n");
        let mut groups = format!("agent:x:{group}:\n");
        for (name, id) in [("root", 0), ("nobody", 65534)] {
            if user != id {
                users += &format!("{name}:x:{id}:{id}:{name}:/:/bin/false\n");
            }
            if group != id {
                groups += &format!("{}:x:{id}:\n", if id == 0 { "root" } else { "nogroup" });
            }
        }
        self.file("/etc/passwd", users);
        self.file("/etc/group", groups);
        self.file("/etc/hostname", "sandbox\n".into());
        self.file("/etc/machine-id", "00000000000000000000000000000001\n".into());
        self.file_if_missing("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n".into());
        if *self.request.network == Network::Open {
            // If a service makes the host's list of name servers, the list is in a folder that is private in the
            // sandbox.
            if let Some(Entry::Link { resolved, .. }) = self.entry(Path::new("/etc/resolv.conf"))
                && self.behind(&resolved) == Behind::Memory
                && !self.tree.contains_key(&resolved)
            {
                self.add(Step::Bind { source: resolved.clone(), target: resolved, writable: false, optional: true });
            }
        } else {
            self.file("/etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n".into());
            self.file(
                "/etc/resolv.conf",
                "# no name server: names are looked up by the proxy, if there is one\n".into(),
            );
        }
    }

    /// Adds a file where the host has one, or where the sandbox can make one.
    fn file(&mut self, path: &str, content: String) {
        let path = match self.entry(Path::new(path)) {
            Some(Entry::Link { resolved, .. }) => resolved,
            _ => path.into(),
        };
        let possible = match self.behind(&path) {
            Behind::Memory => true,
            Behind::Host { path, writable } => !writable && self.entry(&path) == Some(Entry::File),
            Behind::Made | Behind::Hidden(_) | Behind::Link(_) => false,
        };
        if possible && !self.tree.contains_key(&path) {
            self.add(Step::File { path, content });
        }
    }

    fn file_if_missing(&mut self, path: &str, content: String) {
        if self.entry(Path::new(path)).is_none() {
            self.file(path, content);
        }
    }

    fn hide(&mut self) -> Result<(), PlanError> {
        let rules = self.request.rules;
        let shown = rules.shown.iter().map(|path| self.in_workspace(path)).collect::<Result<Vec<_>, _>>()?;
        for path in self.usually_hidden(&shown)? {
            self.hide_one(&path, false)?;
        }
        for own in self.facts.state.iter().chain(&self.facts.private).chain(&rules.own) {
            self.hide_one(own, false)?;
        }
        for path in &rules.hidden {
            let path = self.in_workspace(path)?;
            let mounted = |step: &Step| matches!(step, Step::Bind { source, .. } if source.starts_with(&path));
            if self.tree.values().any(mounted) {
                return Err(PlanError::MountedAndHidden(path));
            }
            self.hide_one(&path, true)?;
        }
        Ok(())
    }

    /// Returns the paths that are hidden without a rule, except for those that a rule shows.
    fn usually_hidden(&self, shown: &[PathBuf]) -> Result<Vec<PathBuf>, PlanError> {
        let workspace = self.request.workspace;
        let mounts = self.request.rules.mounts.iter().map(|mount| mount.source.as_path());
        // The home folder can only be seen if the workspace or a mount contains it.
        let is_seen = |home: &&Path| mounts.clone().chain([workspace]).any(|root| home.starts_with(root));
        let home = self.facts.home.as_deref().filter(is_seen);
        let roots = mounts.clone().chain([workspace]).chain(home);
        let mut found = self.facts.look.deep_secrets(workspace);
        if found.iter().any(|path| path == workspace) {
            return Err(PlanError::Closed(workspace.to_owned()));
        }
        for root in roots.clone() {
            found.extend(self.facts.look.names(root, is_environment).iter().map(|name| root.join(name)));
        }
        let is_shown = |path: &PathBuf| shown.iter().any(|shown| path.starts_with(shown));
        found.retain(|path| !is_shown(path));
        if found.len() > NAMES_MAX {
            return Err(PlanError::TooManySecrets { workspace: workspace.to_owned(), count: found.len() });
        }
        // A mount may be a part of the home folder, with secrets in it.
        let in_mount = |path: &PathBuf| mounts.clone().any(|mount| path.starts_with(mount));
        let of_home =
            self.facts.home.iter().flat_map(|home| HIDDEN.iter().map(|name| home.join(name))).filter(in_mount);
        let of_home: Vec<_> = of_home.collect();
        let known = roots.flat_map(|root| HIDDEN.iter().map(|name| root.join(name))).chain(of_home);
        let known = HIDDEN_IN_SYSTEM.map(PathBuf::from).into_iter().chain(known).filter(|path| !is_shown(path));
        Ok(known.chain(found).collect())
    }

    /// Hides a path of the host wherever the sandbox shows it, unless the path itself was mounted.
    fn hide_one(&mut self, host: &Path, by_rule: bool) -> Result<(), PlanError> {
        // The secret is the target of a link, and only the link shows which file that is. So the link is protected.
        let host = self.protect_links(host);
        let kind = match self.entry(&host) {
            Some(Entry::Folder) => Kind::Folder,
            Some(Entry::File) => Kind::File,
            Some(Entry::Link { .. }) | None => return Ok(()),
        };
        for path in self.views(&host) {
            match self.tree.get(&path) {
                None => {
                    self.hold_parents(&path);
                    self.add(Step::Hide { path, kind });
                }
                Some(Step::Bind { .. }) if by_rule => return Err(PlanError::MountedAndHidden(host)),
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Returns the path of a rule: absolute as it is, or else in the workspace.
    fn in_workspace(&self, path: &Path) -> Result<PathBuf, PlanError> {
        let whole = self.request.workspace.join(path);
        let refused = |_| match path.is_absolute() {
            true => PlanError::NotPlain(path.to_owned()),
            false => PlanError::NotPlainInside(path.to_owned()),
        };
        plain(&whole).map_err(refused)?;
        Ok(whole)
    }

    /// Returns the content behind a path of the sandbox, by the nearest step at or above it.
    fn behind(&self, path: &Path) -> Behind {
        let mut protected = false;
        for above in path.ancestors() {
            match self.tree.get(above) {
                None => {}
                Some(Step::Protect { .. }) => protected = true,
                Some(Step::Bind { source, writable, .. }) => {
                    let rest = path.strip_prefix(above).unwrap_or(Path::new(""));
                    return Behind::Host { path: below(source, rest), writable: *writable && !protected };
                }
                Some(Step::Tmpfs { .. } | Step::Folder { .. }) => return Behind::Memory,
                Some(Step::Proc | Step::Dev | Step::File { .. } | Step::Seal) => return Behind::Made,
                Some(Step::Hide { .. }) => return Behind::Hidden(above.to_owned()),
                Some(Step::Link { .. }) => return Behind::Link(above.to_owned()),
            }
        }
        Behind::Memory
    }

    /// Returns all paths of the sandbox that show a path of the host.
    fn all_views(&self, host: &Path) -> BTreeSet<PathBuf> {
        self.views_from(host, |_| true)
    }

    /// Returns all paths of the sandbox that show a path of the host as a part of a larger mount.
    fn views(&self, host: &Path) -> BTreeSet<PathBuf> {
        self.views_from(host, |rest| !rest.as_os_str().is_empty())
    }

    fn views_from(&self, host: &Path, wanted: impl Fn(&Path) -> bool) -> BTreeSet<PathBuf> {
        let binds = self.tree.values().filter_map(|step| match step {
            Step::Bind { source, target, .. } => Some((host.strip_prefix(source).ok()?, target)),
            _ => None,
        });
        let paths = binds.filter(|(rest, _)| wanted(rest)).map(|(rest, target)| below(target, rest));
        let seen = |path: &PathBuf| matches!(self.behind(path), Behind::Host { path, .. } if path == host);
        paths.filter(seen).collect()
    }

    /// Adds missing mount points, and puts all steps in order.
    fn finish(mut self) -> Result<Plan, PlanError> {
        let mut steps = Vec::new();
        let mut made = BTreeSet::new();
        let mut all: Vec<_> = self.tree.clone().into_iter().collect();
        all.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        for (path, step) in all {
            let Some(parent) = path.parent() else {
                steps.push(step);
                continue;
            };
            match self.behind(parent) {
                Behind::Memory => {
                    let above = parent.ancestors().take_while(|above| !self.tree.contains_key(*above));
                    let mut missing: Vec<_> = above.filter(|above| made.insert(above.to_path_buf())).collect();
                    missing.reverse();
                    steps.extend(missing.into_iter().map(|path| Step::Folder { path: path.to_owned() }));
                    steps.extend(self.mount_point(&step));
                }
                Behind::Host { path: host, writable } => {
                    // The host's `/var` may have its own link to `/run`.
                    if matches!(step, Step::Link { .. } | Step::Folder { .. }) {
                        continue;
                    }
                    let name = path.file_name().unwrap_or_default();
                    self.host_mount_point(&step, &host.join(name), writable)?;
                }
                Behind::Made => {}
                Behind::Hidden(hidden) => return Err(PlanError::InHidden { target: path, hidden }),
                Behind::Link(link) => return Err(PlanError::ThroughLink { target: path, link }),
            }
            steps.push(step);
        }
        steps.push(Step::Seal);
        let placeholders = self.held.into_iter().map(|(path, held)| PlannedPlaceholder { path, held }).collect();
        Ok(Plan { steps, placeholders, environment: self.environment })
    }

    /// Returns the step that makes a mount point in memory, if a step needs one.
    fn mount_point(&self, step: &Step) -> Option<Step> {
        let path = step.path().to_owned();
        match step {
            Step::Tmpfs { .. } | Step::Proc | Step::Dev => Some(Step::Folder { path }),
            Step::Bind { source, .. } if self.entry(source) == Some(Entry::Folder) => Some(Step::Folder { path }),
            Step::Bind { .. } => Some(Step::File { path, content: String::new() }),
            _ => None,
        }
    }

    /// Checks that a mount point on the host exists and is no link; adds a placeholder if it is missing.
    fn host_mount_point(&mut self, step: &Step, host: &Path, writable: bool) -> Result<(), PlanError> {
        let target = step.path().to_owned();
        for above in host.ancestors().skip(usize::from(matches!(step, Step::Protect { .. }))) {
            if let Some(Entry::Link { .. }) = self.entry(above) {
                return Err(PlanError::ThroughLink { target, link: above.to_owned() });
            }
        }
        if self.entry(host).is_some() || self.held.contains_key(host) {
            return Ok(());
        }
        let host = host.to_owned();
        if !writable {
            return Err(PlanError::NoMountPoint { target, host });
        }
        let is_file = matches!(step, Step::Bind { source, .. } if self.entry(source) == Some(Entry::File));
        let missing = host.ancestors().skip(1).take_while(|above| self.entry(above).is_none());
        for above in missing.map(Path::to_owned).collect::<Vec<_>>() {
            self.held.entry(above).or_insert(Held::Folder);
        }
        self.held.insert(host, if is_file { Held::File("") } else { Held::Folder });
        Ok(())
    }
}

#[cfg(test)]
mod tests;
