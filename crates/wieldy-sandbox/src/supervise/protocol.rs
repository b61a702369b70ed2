//! Messages between the executor, its fork server, inits and supervisors: one JSON text each, with descriptors
//! attached, over `SOCK_SEQPACKET` sockets.

use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::MemfdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::Pid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::view::placeholders::Placeholder;
use crate::view::plan;

/// An order from the executor to its fork server. The first descriptor attached is the socket for the reply.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ForkServerOrder {
    /// Make the init of a sandbox, in new namespaces; it waits for orders at the attached socket. After the socket come
    /// the folder of the cgroup v2 group that it starts in, if `in_folder`, and the `tasks` files of the v1 groups that
    /// it joins. If joining fails, the executor moves it. Its private folders are in the new folder `private` on a
    /// disk, if there is one, which is removed with everything in it at the end of the child.
    WarmInit { open_network: bool, in_folder: bool, private: Option<PathBuf> },
    /// Make a supervisor outside of every sandbox, which serves the attached socket.
    Supervisor,
    /// Send a user namespace that maps this owner's files to the sandboxes' account.
    IdMapNamespace { uid: u32, gid: u32 },
    /// Hold these paths for this child, and make placeholders for the missing ones; then reply. At the end of the
    /// child, release the paths and remove its cgroups.
    Register { child: i32, protected: Vec<PathBuf>, placeholders: Vec<Placeholder>, groups: Vec<PathBuf> },
    /// Release these placeholders of an idle child, then reply.
    Rest { child: i32, places: Vec<PathBuf> },
    /// Hold these placeholders for a child again, and mask them by these steps in its mount namespace, which is
    /// attached after the socket; then reply.
    Wake { child: i32, placeholders: Vec<Placeholder>, steps: Vec<plan::Step> },
    /// Kill this child and release its resources, then close the attached socket. With `linger`, its paths are released
    /// a little later, since the next sandbox will most likely need them, too.
    End { child: i32, linger: bool },
}

/// An order from the executor to the init of a sandbox.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum InitOrder {
    /// Take these steps before the rest is known, and make the first supervisor, which serves the attached socket.
    Prepare(Vec<plan::Step>),
    /// Build the sandbox; mounts for some of the steps are attached.
    Build(Box<BuildOrder>),
    /// Make another supervisor, which serves the attached socket.
    Supervisor,
}

/// The rest of a sandbox, which is built once its workspace is known.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct BuildOrder {
    /// The steps of the mount plan that were not taken in advance.
    pub(crate) steps: Vec<plan::Step>,
    /// The indexes of the steps that the attached mounts belong to.
    pub(crate) sources: Vec<usize>,
    /// True if the proxy needs a listening socket in the sandbox's network namespace.
    pub(crate) proxied: bool,
}

/// A report from an init to the executor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum InitReport {
    /// The init is running and waits; the message's credentials have its process id.
    Waiting,
    /// The steps of `Prepare` are taken.
    Prepared,
    /// The sandbox is ready; its mount namespace is attached and, if `proxied`, the listening socket.
    Ready { landlock_abi: u32, proxy_port: Option<u16> },
    /// The sandbox could not be made.
    Failed { doing: String, error: String },
}

/// An order from the executor to a supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum SupervisorOrder {
    /// Run a command; without a terminal, its standard input, output and error are attached.
    Run(Box<RunOrder>),
    /// End the running command: `SIGTERM` first, `SIGKILL` after the grace time.
    Stop,
}

/// A command to run.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RunOrder {
    pub(crate) program: String,
    pub(crate) arguments: Vec<String>,
    pub(crate) environment: Vec<(String, String)>,
    /// The folder in which written bytes and new files are counted.
    pub(crate) workspace: PathBuf,
    pub(crate) folder: PathBuf,
    pub(crate) grace_ms: u64,
    /// The rows and columns of the terminal to make.
    pub(crate) terminal: Option<(u16, u16)>,
    /// True if the terminal is raw, since the program makes another terminal further inside.
    #[serde(default)]
    pub(crate) is_raw: bool,
    pub(crate) limits: RunLimits,
}

/// The limits that a supervisor enforces while a command runs.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct RunLimits {
    pub(crate) open_files: Option<u64>,
    pub(crate) disk_bytes: Option<u64>,
    pub(crate) disk_files: Option<u64>,
    /// The bytes and files that private folders on a disk may hold together.
    #[serde(default)]
    pub(crate) room: Option<plan::Room>,
    /// True if the report needs the number of files made.
    #[serde(default)]
    pub(crate) counts_files: bool,
    /// Enforced by the supervisor only if no cgroup does.
    pub(crate) memory_bytes: Option<u64>,
    /// The memory limit of the session: the call's memory and the session's private folders together.
    #[serde(default)]
    pub(crate) session_memory_bytes: Option<u64>,
    /// Enforced by the supervisor only if no cgroup does.
    pub(crate) processes: Option<u64>,
    /// The number of processes in the same count of the kernel that belong to no command.
    #[serde(default)]
    pub(crate) residents: u64,
}

/// A reply of the fork server; a requested descriptor is attached.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ForkServerReport {
    pub(crate) error: Option<String>,
}

/// A report from a supervisor to the executor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum SupervisorReport {
    /// The supervisor is running; the message's credentials have its process id.
    Here,
    /// The command has a terminal, whose other end is attached.
    Terminal,
    /// The command could not be started.
    NotStarted { step: StartStep, errno: i32 },
    /// The command has ended, and no process of its tree is left.
    Ended(RunReport),
}

/// The result and the resource usage of a command.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RunReport {
    /// The wait status of the command.
    pub(crate) status: i32,
    pub(crate) cpu_us: u64,
    /// The peak of the largest process.
    pub(crate) memory_peak_kib: u64,
    pub(crate) blocks_read: u64,
    pub(crate) blocks_written: u64,
    /// The largest number of processes that the supervisor saw.
    pub(crate) processes_peak: u64,
    pub(crate) wall_us: u64,
    /// The number of files and folders that it made and did not remove, if `counts_files` was set.
    #[serde(default)]
    pub(crate) files_made: u64,
    /// The limit that it passed, and the amount it used.
    pub(crate) overrun: Option<(WatchedLimit, u64)>,
}

/// A limit that a supervisor enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WatchedLimit {
    DiskBytes,
    DiskFiles,
    Memory,
    SessionMemory { by_call: u64 },
    Processes,
}

/// The step at which starting a command failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StartStep {
    Order,
    Fork,
    Session,
    Terminal,
    Descriptors,
    Limits,
    Folder,
    Landlock,
    Program,
}

impl std::fmt::Display for StartStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Order => "cannot read the order",
            Self::Fork => "cannot make a process",
            Self::Session => "cannot open a session",
            Self::Terminal => "cannot make a terminal",
            Self::Descriptors => "cannot arrange descriptors",
            Self::Limits => "cannot set limits",
            Self::Folder => "cannot enter the folder",
            Self::Landlock => "cannot restrict itself by Landlock",
            Self::Program => "cannot execute the program",
        })
    }
}

/// Maximum number of descriptors attached to one message.
const DESCRIPTORS_MAX: usize = 64;
/// Longest message that is sent inline. A longer one is written to a memfd, whose descriptor is sent.
const INLINE_BYTES_MAX: usize = 8 * 1024;
/// Sent instead of a long message, whose text is in the first descriptor attached.
const IN_FILE: &[u8] = b"@";

/// A received message.
pub(crate) struct Received<T> {
    pub(crate) message: T,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// The sender's id in this process's pid namespace, if the socket has `SO_PASSCRED`.
    pub(crate) sender: Option<Pid>,
}

/// Returns the two ends of a new `SOCK_SEQPACKET` socket.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends a message with descriptors attached.
pub(crate) fn send<T: Serialize>(socket: impl AsFd, message: &T, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    if text.len() <= INLINE_BYTES_MAX {
        return send_bytes(socket.as_fd(), &text, descriptors);
    }
    let mut file: std::fs::File = rustix::fs::memfd_create(c"wieldy-order", MemfdFlags::CLOEXEC)?.into();
    file.write_all(&text)?;
    file.rewind()?;
    let mut all = vec![file.as_fd()];
    all.extend_from_slice(descriptors);
    send_bytes(socket.as_fd(), IN_FILE, &all)
}

fn send_bytes(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
    }
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut beside, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Receives the next message; `None` if the other end is closed.
pub(crate) fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<Received<T>>> {
    let mut buffer = vec![0; INLINE_BYTES_MAX + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX), ScmCredentials(1))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::io::retry_on_intr(|| {
        let mut into = [IoSliceMut::new(&mut buffer)];
        rustix::net::recvmsg(socket.as_fd(), &mut into, &mut beside, RecvFlags::CMSG_CLOEXEC)
    });
    let got = match got {
        // The other end was closed while a message to it was unread, which is an end like any other.
        Err(rustix::io::Errno::CONNRESET) => return Ok(None),
        got => got?,
    };
    let (mut descriptors, mut sender) = (Vec::new(), None);
    for part in beside.drain() {
        match part {
            RecvAncillaryMessage::ScmRights(received) => descriptors.extend(received),
            RecvAncillaryMessage::ScmCredentials(credentials) => sender = Some(credentials.pid),
            _ => {}
        }
    }
    if got.bytes == 0 {
        return Ok(None);
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message was cut"));
    }
    let mut text = buffer.get(..got.bytes).unwrap_or_default();
    let mut long = Vec::new();
    if text == IN_FILE && !descriptors.is_empty() {
        std::fs::File::from(descriptors.remove(0)).read_to_end(&mut long)?;
        text = &long;
    }
    Ok(Some(Received { message: serde_json::from_slice(text)?, descriptors, sender }))
}
