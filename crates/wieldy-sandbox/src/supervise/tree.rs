//! The process tree of a command, as seen by its supervisor, which is the subreaper of all of it.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::process::{self, Pid, Signal};

use crate::sys::{self, ChildUse};

/// The descendants of this process.
pub(crate) struct Tree {
    main: Option<Pid>,
    /// The wait status of the command, once it has ended.
    status: Option<i32>,
    used: ChildUse,
    /// Readable when a child has ended.
    signals: OwnedFd,
    /// The kernel's list of this process's children.
    children: File,
    own_group: Pid,
}

impl Tree {
    pub(crate) fn new(signals: OwnedFd) -> io::Result<Self> {
        let children = File::open("/proc/thread-self/children")?;
        let own_group = process::getpgrp();
        Ok(Self { main: None, status: None, used: ChildUse::default(), signals, children, own_group })
    }

    /// Resets the tree for a command that has just been started.
    pub(crate) fn begin(&mut self, main: Pid) {
        (self.main, self.status, self.used) = (Some(main), None, ChildUse::default());
    }

    pub(crate) fn status(&self) -> Option<i32> {
        self.status
    }

    /// Returns the resources used by all ended processes of the command.
    pub(crate) fn used(&self) -> ChildUse {
        self.used
    }

    pub(crate) fn signals(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }

    /// Reaps every child that has ended; returns false if no child is left.
    pub(crate) fn reap(&mut self) -> bool {
        let _ = rustix::io::read(&self.signals, &mut [0_u8; 512]);
        loop {
            match sys::wait(false) {
                Ok(Some(reaped)) => self.note(reaped),
                Ok(None) => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_no_child) => return false,
            }
        }
    }

    fn note(&mut self, (pid, status, used): sys::Reaped) {
        if Some(pid) == self.main {
            self.status = Some(status);
        }
        self.used.cpu_us += used.cpu_us;
        self.used.memory_peak_kib = self.used.memory_peak_kib.max(used.memory_peak_kib);
        self.used.blocks_read += used.blocks_read;
        self.used.blocks_written += used.blocks_written;
    }

    /// Sends `SIGTERM` to the command's process group and to every orphan, and `SIGCONT`, since a stopped process would
    /// not see the first.
    pub(crate) fn tell_to_end(&mut self) {
        let Some(main) = self.main else { return };
        let others = self.children().into_iter().filter(|pid| process::getpgid(Some(*pid)) != Ok(main));
        let told: Vec<Pid> = std::iter::once(main).chain(others).collect();
        for signal in [Signal::TERM, Signal::CONT] {
            for pid in &told {
                self.signal_with_group(*pid, signal);
            }
        }
    }

    /// Kills until no child is left. The children of each killed process become children of this one.
    pub(crate) fn kill(&mut self) {
        while self.reap() {
            for pid in self.children() {
                self.signal_with_group(pid, Signal::KILL);
                let _ = process::kill_process(pid, Signal::KILL);
            }
            match sys::wait(true) {
                Ok(Some(reaped)) => self.note(reaped),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_no_child) => return,
            }
        }
    }

    /// Returns the children that have ended, and whether a signal killed them. Kills living children that are not
    /// `ours`: they are orphans of a killed process.
    pub(crate) fn reap_strangers<T>(&mut self, ours: &std::collections::HashMap<Pid, T>) -> Vec<(Pid, bool)> {
        let mut ended = Vec::new();
        loop {
            let _ = rustix::io::read(&self.signals, &mut [0_u8; 512]);
            while let Ok(Some((pid, status, _))) = sys::wait(false) {
                ended.push((pid, libc::WIFSIGNALED(status)));
            }
            let strangers = self.children().into_iter().filter(|pid| !ours.contains_key(pid)).collect::<Vec<_>>();
            if strangers.is_empty() {
                return ended;
            }
            for pid in strangers {
                self.signal_with_group(pid, Signal::KILL);
                let _ = process::kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Signals a child's whole process group at once, which a process cannot escape by forking. The group is in this
    /// tree: a process can join groups only within its session, and all sessions but our own were opened within the
    /// tree.
    fn signal_with_group(&self, pid: Pid, signal: Signal) {
        let _ = match process::getpgid(Some(pid)) {
            Ok(group) if group != self.own_group => process::kill_process_group(group, signal),
            _ => process::kill_process(pid, signal),
        };
    }

    /// Returns all children, zombies included. So no id can belong to another process yet.
    pub(crate) fn children(&mut self) -> Vec<Pid> {
        let mut text = String::new();
        let read = self.children.rewind().and_then(|()| self.children.read_to_string(&mut text));
        if read.is_err() {
            return Vec::new();
        }
        text.split_ascii_whitespace().filter_map(|number| Pid::from_raw(number.parse().ok()?)).collect()
    }
}
