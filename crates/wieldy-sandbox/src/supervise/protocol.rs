//! Messages between the executor, its fork server, inits and supervisors: one JSON text each, with descriptors beside it, over sockets that
//! keep messages whole.

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

/// What the executor tells its fork server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ForkServerOrder {
    /// Make the first process of a sandbox, in namespaces of its own; it waits for orders at the socket beside this. After the
    /// socket come the folder of the group of cgroup v2 that it starts in, if `in_folder`, and the `tasks` files of groups of
    /// v1 that it joins. Joining is tried only: the executor sees to it.
    WarmInit { open_network: bool, in_folder: bool },
    /// Make a supervisor outside of every sandbox; beside it comes its socket.
    Supervisor,
    /// Hand over a user namespace in which the files of this owner are those of the sandboxes' account, through the socket beside it.
    IdMapNamespace { uid: u32, gid: u32 },
    /// Hold these places for this child, the missing ones by placeholders, and say so through the socket beside it. When the child is
    /// gone, let go of them, and remove its cgroups.
    Register { child: i32, protected: Vec<PathBuf>, placeholders: Vec<Placeholder>, groups: Vec<PathBuf> },
    /// Let go of these placeholders of a child that is idle, and say so through the socket beside it.
    Rest { child: i32, places: Vec<PathBuf> },
    /// Hold these places for a child again, take the steps that cover them in its mount namespace, which comes beside the socket, and say so.
    Wake { child: i32, placeholders: Vec<Placeholder>, steps: Vec<plan::Step> },
    /// Kill this child, and close the socket beside it when it is gone, and with it everything that it left behind; but if `linger`, the
    /// places that were held for it only a little later, since the next one will most likely need them, too.
    End { child: i32, linger: bool },
}

/// What the executor tells a sandbox's first process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum InitOrder {
    /// Take these steps already, whatever will follow, and make the first supervisor; beside it comes its socket.
    Prepare(Vec<plan::Step>),
    /// Build the sandbox; beside it come mounts for some of the steps.
    Build(Box<BuildOrder>),
    /// Make another supervisor; beside it comes its socket.
    Supervisor,
}

/// A sandbox to be built.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct BuildOrder {
    /// How what processes see is built, as far as that was not prepared.
    pub(crate) steps: Vec<plan::Step>,
    /// The steps that the mounts beside this are for, by their number.
    pub(crate) sources: Vec<usize>,
    /// Whether somebody on the outside will listen inside the sandbox's own network.
    pub(crate) proxied: bool,
}

/// What an init tells the executor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum InitReport {
    /// The process is there and waits; the message's credentials say which it is.
    Waiting,
    /// What should be prepared is.
    Prepared,
    /// The sandbox is ready; beside it come its mount namespace and the socket to listen on, if there should be one.
    Ready { landlock_abi: u32, proxy_port: Option<u16> },
    /// It could not be made.
    Failed { doing: String, error: String },
}

/// What the executor tells a supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum SupervisorOrder {
    /// Run a command; beside it come its input, its output and its complaints.
    Run(Box<RunOrder>),
    /// End the command that runs: politely first, then not.
    Stop,
}

/// A command to be run.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RunOrder {
    pub(crate) program: String,
    pub(crate) arguments: Vec<String>,
    pub(crate) environment: Vec<(String, String)>,
    /// Where what it writes is counted.
    pub(crate) workspace: PathBuf,
    pub(crate) folder: PathBuf,
    pub(crate) grace_ms: u64,
    /// Rows and columns of the terminal to make.
    pub(crate) terminal: Option<(u16, u16)>,
    /// Whether that passes everything on as it is, as the program makes another one further inside.
    #[serde(default)]
    pub(crate) is_raw: bool,
    pub(crate) limits: RunLimits,
}

/// What a supervisor sees to while a command runs.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct RunLimits {
    pub(crate) open_files: Option<u64>,
    pub(crate) disk_bytes: Option<u64>,
    pub(crate) disk_files: Option<u64>,
    /// Whether somebody wants to know in the end how many files were made.
    #[serde(default)]
    pub(crate) counts_files: bool,
    /// Only where nobody else does.
    pub(crate) memory_bytes: Option<u64>,
    /// The same for what the call has and what the session's private folders hold.
    #[serde(default)]
    pub(crate) session_memory_bytes: Option<u64>,
    /// Only where nobody else does.
    pub(crate) processes: Option<u64>,
    /// How many processes the kernel counts with these that are no command's.
    #[serde(default)]
    pub(crate) residents: u64,
}

/// What the fork server tells the executor; beside it comes what was asked for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ForkServerReport {
    pub(crate) error: Option<String>,
}

/// What a supervisor tells the executor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum SupervisorReport {
    /// It is there; the message's credentials say which process it is.
    Here,
    /// The command has a terminal, whose other end comes beside this.
    Terminal,
    /// The command could not be started.
    NotStarted { step: StartStep, errno: i32 },
    /// The command has ended and nothing of its tree is left.
    Ended(RunReport),
}

/// How a run went.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RunReport {
    /// As `wait` gives it.
    pub(crate) status: i32,
    pub(crate) cpu_us: u64,
    /// Of the largest process.
    pub(crate) memory_peak_kib: u64,
    pub(crate) blocks_read: u64,
    pub(crate) blocks_written: u64,
    /// As far as the supervisor saw.
    pub(crate) processes_peak: u64,
    pub(crate) wall_us: u64,
    /// Files and folders that it made and did not remove, where somebody wants to know.
    #[serde(default)]
    pub(crate) files_made: u64,
    /// The limit that it passed, and how much it used.
    pub(crate) overrun: Option<(Limit, u64)>,
}

/// The limits that a supervisor notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Limit {
    DiskBytes,
    DiskFiles,
    Memory,
    SessionMemory { by_call: u64 },
    Processes,
}

/// What could not be done to start a command.
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

/// The most descriptors beside one message.
const DESCRIPTORS_MAX: usize = 64;
/// Longer messages go into a file in memory, and only its descriptor through the socket.
const INLINE_BYTES_MAX: usize = 8 * 1024;
/// Begins a message whose text is in the first descriptor beside it.
const IN_FILE: &[u8] = b"@";

/// A message that came.
pub(crate) struct Received<T> {
    pub(crate) message: T,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Who sent it, in our own numbers, where the socket was told to ask.
    pub(crate) sender: Option<Pid>,
}

/// Two ends of a socket that keeps messages whole.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends a message with descriptors beside it.
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

/// Receives the next message; nothing once the other end is gone.
pub(crate) fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<Received<T>>> {
    let mut buffer = vec![0; INLINE_BYTES_MAX + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX), ScmCredentials(1))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::io::retry_on_intr(|| {
        let mut into = [IoSliceMut::new(&mut buffer)];
        rustix::net::recvmsg(socket.as_fd(), &mut into, &mut beside, RecvFlags::CMSG_CLOEXEC)
    })?;
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
