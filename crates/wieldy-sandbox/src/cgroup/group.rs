//! A group in the tree: a folder in each mount in use, all made together and removed together.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

use rustix::process::Pid;

use super::limits::{GroupLimits, Quota};
use super::meter::{Files, Meter, Used};
use super::{Controller, Version, explained, folder, limits, meter};

/// A group of processes, whose limits hold for it and everything below it together.
///
/// It is removed when it and its children are dropped, unless processes still run in it. On cgroup v2 processes live
/// only in groups without children: add them to a child.
#[derive(Clone)]
pub(crate) struct Group {
    node: Arc<Node>,
}

/// Open files of a group by which processes can enter it.
#[derive(Default)]
pub(crate) struct WaysIn {
    /// The folder on cgroup v2, in which a new process can be started.
    pub(crate) folder: Option<OwnedFd>,
    /// The `tasks` files on v1: a thread joins by writing `0` to them.
    pub(crate) tasks: Vec<OwnedFd>,
}

/// A weak reference to a group, which does not keep the group from being removed.
pub(crate) struct KnownGroup {
    node: Weak<Node>,
}

impl KnownGroup {
    /// Returns the group if it still exists.
    pub(crate) fn get(&self) -> Option<Group> {
        self.node.upgrade().map(|node| Group { node })
    }
}

/// The mounts in use and their controllers.
pub(super) struct Layout {
    /// The version of each mount in use.
    pub(super) versions: Vec<Version>,
    /// The mount of each controller, in the order of [`Controller::ALL`].
    pub(super) places: [Option<usize>; Controller::ALL.len()],
    /// The controllers that a v2 group passes on to its children, by the kernel's names.
    pub(super) passed_on: Vec<&'static str>,
    /// Held while quotas change, since one group's quota depends on those above and below it.
    pub(super) quotas: Mutex<()>,
}

/// A group as its children refer to it: it exists until the last of them is gone.
pub(super) struct Node {
    pub(super) layout: Arc<Layout>,
    /// The folders, one for each mount in use.
    folders: Vec<PathBuf>,
    pub(super) parent: Option<Arc<Node>>,
    children: Mutex<Vec<Weak<Node>>>,
    /// True if children get the controllers of v2.
    passes_on: Mutex<bool>,
    /// The limits that were set last.
    pub(super) applied: Mutex<GroupLimits>,
    pub(super) quota: Quota,
    pub(super) limit_files: limits::Files,
    pub(super) files: Files,
}

impl Group {
    /// Returns the executor's own group, in folders that were just made.
    pub(super) fn own(layout: Layout, folders: Vec<PathBuf>) -> Self {
        Self { node: Arc::new(Node::new(Arc::new(layout), folders, None)) }
    }

    /// Makes a group below this one. The limits of this one hold for the sum of its children.
    pub(crate) fn child(&self, name: &str) -> io::Result<Self> {
        let good = (1..=100).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if !good {
            let problem = format!("`{name}` cannot name a control group: use 1 to 100 letters, digits and `-`");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        self.node.pass_on()?;
        let folders: Vec<PathBuf> = self.node.folders.iter().map(|folder| folder.join(name)).collect();
        for (index, folder) in folders.iter().enumerate() {
            if let Err(error) = fs::create_dir(folder) {
                folders.iter().take(index).for_each(|made| drop(fs::remove_dir(made)));
                return Err(explained(&error, format_args!("make the control group `{}`", folder.display())));
            }
        }
        let node = Arc::new(Node::new(self.node.layout.clone(), folders, Some(self.node.clone())));
        let mut children = self.node.children.lock().expect("no code panics while it holds the children");
        children.retain(|child| child.strong_count() > 0);
        children.push(Arc::downgrade(&node));
        Ok(Self { node })
    }

    /// Sets the limits of this group, and removes earlier limits that are not named now.
    ///
    /// A limit whose controller cannot be used is left out: [`super::Hierarchy::findings`] lists these controllers.
    pub(crate) fn set(&self, limits: &GroupLimits) -> io::Result<()> {
        limits::set(&self.node, limits)
    }

    /// Moves a process here, with all of its threads. Its later children start here; its existing ones stay where they
    /// are.
    ///
    /// This takes 10 to 20 ms if the kernel has to wait for all processors first, and next to nothing for a process
    /// that came here by [`Group::ways_in`].
    pub(crate) fn add(&self, pid: Pid) -> io::Result<()> {
        let elsewhere = self.node.folders.iter().filter(|folder| !folder::holds(folder, pid));
        elsewhere.into_iter().try_for_each(|folder| folder::add(folder, pid))
    }

    /// Opens the files by which a process with one thread can start or join here by itself. Unlike [`Group::add`], this
    /// waits for no other processor. Files that cannot be opened are left out.
    pub(crate) fn ways_in(&self) -> WaysIn {
        let mut ways = WaysIn::default();
        for (folder, version) in self.node.folders.iter().zip(&self.node.layout.versions) {
            match version {
                Version::V2 => ways.folder = fs::File::open(folder).ok().map(Into::into),
                Version::V1 => {
                    let tasks = fs::OpenOptions::new().write(true).open(folder.join("tasks"));
                    ways.tasks.extend(tasks.ok().map(OwnedFd::from));
                }
            }
        }
        ways
    }

    /// Records the counters and resets the peaks, so that [`Group::used`] can return later usage.
    pub(crate) fn begin(&self) -> Meter {
        meter::begin(&self.node)
    }

    /// Begins at the last reading of a meter, which is cheaper: for groups in which nothing runs in between.
    pub(crate) fn go_on(&self) -> Meter {
        meter::go_on(&self.node)
    }

    /// Restarts the measurement of processes alone: earlier processes no longer count.
    pub(crate) fn count_anew(&self, meter: &mut Meter) {
        meter::count_anew(&self.node, meter);
    }

    /// Returns the current number of processes and threads, if it is counted.
    pub(crate) fn processes_now(&self) -> Option<u64> {
        meter::processes_now(&self.node)
    }

    /// Returns the usage since `meter` was begun.
    pub(crate) fn used(&self, meter: &Meter) -> Used {
        meter::used(&self.node, meter)
    }

    /// Returns the processes in this group and below it, without zombies.
    #[cfg(test)]
    pub(crate) fn processes(&self) -> Vec<Pid> {
        self.node.folders.first().map_or_else(Vec::new, |folder| folder::processes(folder))
    }

    /// Kills every process in this group and below it, and returns when all are gone.
    pub(crate) fn kill(&self) -> io::Result<()> {
        if self.node.folders.is_empty() {
            let problem = "no control group can be used here, so there is none to kill";
            return Err(io::Error::new(io::ErrorKind::Unsupported, problem));
        }
        folder::kill(&self.node.folders)
    }

    /// Drops page cache that a call left behind and that would count for the next call. Takes milliseconds if there is
    /// much of it, and microseconds if not.
    pub(crate) fn settle(&self) {
        if let Some((version, folder)) = self.node.place(Controller::Memory) {
            folder::settle(folder, version);
        }
    }

    /// Returns a weak reference to this group.
    pub(crate) fn known(&self) -> KnownGroup {
        KnownGroup { node: Arc::downgrade(&self.node) }
    }

    /// Closes the files of the group until they are needed again. On v2, a reset peak is lost with its descriptor, so
    /// call this only for groups in which nothing is measured.
    pub(crate) fn close_files(&self) {
        self.node.files.close();
        self.node.limit_files.close();
    }

    /// Returns its folders, one for each mount in use.
    pub(crate) fn folders(&self) -> &[PathBuf] {
        &self.node.folders
    }

    /// Removes the group, and drops it in any case. Fails if processes still run in it or it has children.
    #[cfg(test)]
    pub(crate) fn remove(self) -> io::Result<()> {
        let Some(mut node) = Arc::into_inner(self.node) else {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "the control group still has children"));
        };
        node.remove()
    }
}

impl Node {
    fn new(layout: Arc<Layout>, folders: Vec<PathBuf>, parent: Option<Arc<Self>>) -> Self {
        Self {
            layout,
            folders,
            parent,
            children: Mutex::default(),
            passes_on: Mutex::default(),
            applied: Mutex::default(),
            quota: Quota::default(),
            limit_files: limits::Files::default(),
            files: Files::default(),
        }
    }

    /// Returns the version and folder in which this group has a controller.
    pub(super) fn place(&self, controller: Controller) -> Option<(Version, &Path)> {
        let index = (*self.layout.places.get(controller as usize)?)?;
        Some((*self.layout.versions.get(index)?, self.folders.get(index)?))
    }

    /// Visits the existing children, up to the first failure.
    pub(super) fn for_each_child(&self, visit: &mut dyn FnMut(&Self) -> io::Result<()>) -> io::Result<()> {
        let children = self.children.lock().expect("no code panics while it holds the children").clone();
        children.iter().filter_map(Weak::upgrade).try_for_each(|child| visit(&child))
    }

    /// Passes the controllers of the v2 tree on to children, which a group does not do by itself.
    fn pass_on(&self) -> io::Result<()> {
        let mut passes_on = self.passes_on.lock().expect("no code panics while it holds the lock");
        if *passes_on {
            return Ok(());
        }
        for (folder, _) in self.folders.iter().zip(&self.layout.versions).filter(|(_, it)| **it == Version::V2) {
            for name in &self.layout.passed_on {
                folder::enable(folder, name)?;
            }
        }
        *passes_on = true;
        Ok(())
    }

    fn remove(&mut self) -> io::Result<()> {
        let mut outcome = Ok(());
        for folder in std::mem::take(&mut self.folders) {
            outcome = outcome.and(folder::remove(&folder));
        }
        outcome
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.remove();
    }
}
