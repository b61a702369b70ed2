//! The control groups of containers, one in the other: a session's, in which all of its containers are; and a container's, in which those are
//! that were made within it, and those of its commands. What one of them is limited to holds for everything in it together.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use wieldy_core::{Level, ResourceLimits, SessionKey};

use super::groups;
use crate::cgroup::{Group, GroupLimits, Hierarchy};

/// A control group, and what is on top of its limits because a runtime needs it.
pub(super) struct Nest {
    pub(super) group: Group,
    limits: GroupLimits,
    on_top: Mutex<OnTop>,
    /// What the runtime makes for it beside our groups.
    foreign: Vec<PathBuf>,
    // After all that is removed with this one.
    above: Option<Arc<Nest>>,
}

/// What a runtime and its sleeper need for themselves, where commands are limited.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct OnTop {
    pub(super) memory_bytes: u64,
    pub(super) processes: u64,
}

/// How many processes and threads a runtime has until it has become what it starts.
pub(super) const STARTING: u64 = 8;

impl Nest {
    /// Makes a group for one container or for several, in another one's if there is one.
    pub(super) fn of_containers(
        name: &str,
        level: Level,
        limits: &ResourceLimits,
        above: Option<Arc<Self>>,
        hierarchy: &Hierarchy,
    ) -> io::Result<Arc<Self>> {
        let group = match &above {
            Some(above) => above.group.child(name)?,
            None => hierarchy.group(name)?,
        };
        let foreign = match level {
            Level::Gvisor => Vec::new(),
            _ => groups::beside(&group, hierarchy),
        };
        let limits = group_limits(level, limits);
        group.set(&limits)?;
        Ok(Arc::new(Self { group, limits, on_top: Mutex::default(), foreign, above }))
    }

    /// What the runtime makes for it beside our groups.
    pub(super) fn foreign(&self) -> &[PathBuf] {
        &self.foreign
    }

    /// Leaves room for a runtime that starts something, in this group and in those above it.
    pub(super) fn let_start(self: &Arc<Self>) -> io::Result<Room> {
        self.make_room(OnTop { memory_bytes: 0, processes: STARTING })
    }

    /// Leaves room for something that is no command's, in this group and in those above it.
    pub(super) fn make_room(self: &Arc<Self>, room: OnTop) -> io::Result<Room> {
        let made = Room { nest: Arc::clone(self), room };
        self.all().try_for_each(|nest| {
            nest.change(|on_top| OnTop {
                memory_bytes: on_top.memory_bytes.saturating_add(room.memory_bytes),
                processes: on_top.processes.saturating_add(room.processes),
            })
        })?;
        Ok(made)
    }

    /// This one and those above it.
    fn all(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |nest| nest.above.as_deref())
    }

    fn change(&self, change: impl FnOnce(OnTop) -> OnTop) -> io::Result<()> {
        let mut on_top = lock(&self.on_top);
        *on_top = change(*on_top);
        let GroupLimits { cpu_millicores, memory_bytes, processes } = self.limits;
        self.group.set(&GroupLimits {
            cpu_millicores,
            memory_bytes: memory_bytes.map(|bytes| bytes.saturating_add(on_top.memory_bytes)),
            processes: processes.map(|count| count.saturating_add(on_top.processes)),
        })
    }
}

impl Drop for Nest {
    fn drop(&mut self) {
        // Usually the runtime has done this, but not if it failed early, nor for a session.
        self.foreign.iter().for_each(|group| drop(fs::remove_dir(group)));
    }
}

/// Room that there is as long as this is.
pub(super) struct Room {
    nest: Arc<Nest>,
    room: OnTop,
}

impl Drop for Room {
    fn drop(&mut self) {
        for nest in self.nest.all() {
            // Where it cannot be taken back, it is there until the group goes.
            let _ = nest.change(|on_top| OnTop {
                memory_bytes: on_top.memory_bytes.saturating_sub(self.room.memory_bytes),
                processes: on_top.processes.saturating_sub(self.room.processes),
            });
        }
    }
}

/// Which group each session has, as long as one of its containers is in it.
#[derive(Default)]
pub(super) struct Sessions(Mutex<HashMap<SessionKey, Weak<Nest>>>);

impl Sessions {
    /// The group of a session, which is made if there is none.
    pub(super) fn nest(
        &self,
        session: &SessionKey,
        level: Level,
        limits: &ResourceLimits,
        hierarchy: &Hierarchy,
    ) -> io::Result<Arc<Nest>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut sessions = lock(&self.0);
        if let Some(nest) = sessions.get(session).and_then(Weak::upgrade) {
            return Ok(nest);
        }
        sessions.retain(|_, nest| nest.strong_count() > 0);
        let name = format!("session-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let nest = Nest::of_containers(&name, level, limits, None, hierarchy)?;
        sessions.insert(session.clone(), Arc::downgrade(&nest));
        Ok(nest)
    }
}

/// What the kernel limits of what there are limits for.
pub(super) fn group_limits(level: Level, limits: &ResourceLimits) -> GroupLimits {
    let ResourceLimits { cpu_millicores, memory_bytes, processes, .. } = *limits;
    // The processes in gVisor are none of the machine's, but the threads of its kernel are.
    GroupLimits { cpu_millicores, memory_bytes, processes: processes.filter(|_| level != Level::Gvisor) }
}

/// The path of a group from where the executor's own one is, with the name of that.
pub(super) fn path_from_executor<'a>(group: &'a Group, hierarchy: &Hierarchy) -> Option<&'a Path> {
    let (folder, own) = (group.folders().first()?, hierarchy.own().folders().first()?);
    folder.strip_prefix(own.parent()?).ok()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
