//! The executor's end of a socket to an init or a supervisor, and its client of the fork server.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};

use super::fork_server;
use super::protocol::{self, ForkServerOrder, ForkServerReport, Received};
use crate::sys;

/// How often we look for room in a socket that is full.
const ROOM_EVERY: Duration = Duration::from_millis(1);

/// A socket that messages come and go through without anybody being kept waiting.
pub(crate) struct Socket {
    fd: AsyncFd<OwnedFd>,
}

impl Socket {
    /// Two ends: ours, and one for somebody else.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = protocol::pair()?;
        // Messages say which process they come from, in numbers that are ours.
        rustix::net::sockopt::set_socket_passcred(&ours, true)?;
        Ok((Self { fd: sys::watched(ours, Interest::READABLE)? }, theirs))
    }

    /// Sends a message with descriptors beside it.
    pub(crate) async fn send<T: Serialize>(&self, message: &T, beside: &[BorrowedFd<'_>]) -> io::Result<()> {
        loop {
            match protocol::send(self.fd.get_ref(), message, beside) {
                // Whoever is at the other end takes a message before the next one comes, so this is rare; to be told of room would wake us
                // each time one was taken.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(ROOM_EVERY).await,
                sent => return sent,
            }
        }
    }

    /// Whether the other end, which says nothing unasked, is still there.
    pub(crate) fn is_alive(&self) -> bool {
        is_silent(self.fd.get_ref())
    }

    /// Sends a message if there is room for it.
    pub(crate) fn try_send<T: Serialize>(&self, message: &T) -> io::Result<()> {
        protocol::send(self.fd.get_ref(), message, &[])
    }

    /// Waits for the next message; nothing once the other end is gone.
    pub(crate) async fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<Received<T>>> {
        loop {
            let mut ready = self.fd.ready(Interest::READABLE).await?;
            match protocol::receive(self.fd.get_ref()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready_matching(Ready::READABLE),
                received => return received,
            }
        }
    }
}

/// Whether nothing came through a socket that says nothing unasked, not even its end.
pub(crate) fn is_silent(socket: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut polled, Some(&at_once)), Ok(0))
}

/// The executor's hold on its fork server. Letting go of it ends everything that the fork server has made.
pub(crate) struct ForkServerClient {
    socket: OwnedFd,
    process: Option<Child>,
}

impl ForkServerClient {
    /// The fork server of this process, started if there is none or if it is gone.
    pub(crate) fn of_this_process() -> io::Result<Arc<Self>> {
        static FORK_SERVER: Mutex<Weak<ForkServerClient>> = Mutex::new(Weak::new());
        let mut known = FORK_SERVER.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fork_server) = known.upgrade().filter(|fork_server| fork_server.is_alive()) {
            return Ok(fork_server);
        }
        let fork_server = Arc::new(Self::start()?);
        *known = Arc::downgrade(&fork_server);
        Ok(fork_server)
    }

    fn start() -> io::Result<Self> {
        let (ours, theirs) = protocol::pair()?;
        let name = std::ffi::OsStr::new(fork_server::NAME.to_str().map_err(io::Error::other)?);
        let process = Command::new("/proc/self/exe")
            .arg0(name)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| io::Error::new(error.kind(), format!("cannot start the fork server: {error}")))?;
        Ok(Self { socket: ours, process: Some(process) })
    }

    fn is_alive(&self) -> bool {
        is_silent(&self.socket)
    }

    /// Gives an order; whoever is made by it answers through the socket beside it.
    pub(crate) fn order(&self, order: &ForkServerOrder, socket: &OwnedFd) -> io::Result<()> {
        self.send(order, &[socket.as_fd()])
    }

    /// Gives an order with several descriptors beside it, the socket of the process that answers first.
    pub(crate) fn send(&self, order: &ForkServerOrder, beside: &[BorrowedFd<'_>]) -> io::Result<()> {
        protocol::send(&self.socket, order, beside)
            .map_err(|error| io::Error::new(error.kind(), format!("the fork server does not listen: {error}")))
    }
}

impl ForkServerClient {
    /// Gives an order and waits for the answer.
    pub(crate) async fn ask(&self, order: &ForkServerOrder) -> io::Result<Vec<OwnedFd>> {
        self.begin(order)?.wait().await
    }

    /// The same with a descriptor beside the order.
    pub(crate) async fn ask_with(&self, order: &ForkServerOrder, beside: BorrowedFd<'_>) -> io::Result<Vec<OwnedFd>> {
        let (socket, theirs) = Socket::pair()?;
        self.send(order, &[theirs.as_fd(), beside])?;
        drop(theirs);
        PendingReply(socket).wait().await
    }

    /// Gives an order that will be answered.
    pub(crate) fn begin(&self, order: &ForkServerOrder) -> io::Result<PendingReply> {
        let (socket, theirs) = Socket::pair()?;
        self.order(order, &theirs)?;
        Ok(PendingReply(socket))
    }

    /// A user namespace in which the files of this owner are those of the sandboxes' account.
    pub(crate) async fn id_map_namespace(&self, uid: u32, gid: u32) -> io::Result<OwnedFd> {
        let namespace = self.ask(&ForkServerOrder::IdMapNamespace { uid, gid }).await?.into_iter().next();
        namespace.ok_or_else(|| io::Error::other("the fork server sent nothing"))
    }
}

/// What the fork server will say to an order.
pub(crate) struct PendingReply(Socket);

impl PendingReply {
    /// Waits until it is said; what was asked for comes beside it.
    pub(crate) async fn wait(self) -> io::Result<Vec<OwnedFd>> {
        match self.0.receive::<ForkServerReport>().await? {
            None => Err(io::Error::other("the fork server is gone")),
            Some(Received { message: ForkServerReport { error: Some(error) }, .. }) => Err(io::Error::other(error)),
            Some(received) => Ok(received.descriptors),
        }
    }
}

/// Waits until a child of the fork server is gone, and with it everything that it left behind.
pub(crate) async fn end_child(fork_server: &ForkServerClient, child: Pid, linger: bool) -> io::Result<()> {
    let (socket, theirs) = Socket::pair()?;
    fork_server.order(&ForkServerOrder::End { child: child.as_raw_pid(), linger }, &theirs)?;
    drop(theirs);
    socket.receive::<()>().await.map(drop)
}

impl Drop for ForkServerClient {
    fn drop(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        // It ends when it sees the end of the socket, which is closed right after this. Somebody must take note of its end, and
        // nobody should wait for it here.
        let reaper = std::thread::Builder::new().name("wieldy-reaper".into()).spawn(move || drop(process.wait()));
        let mut leaving = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        leaving.retain(|reaper| !reaper.is_finished());
        leaving.extend(reaper);
    }
}

/// The process that makes sandboxes, started while the program still does something else. It stays until this is dropped, and as
/// long as a sandbox needs it.
pub struct EarlyForkServer {
    starting: Option<JoinHandle<io::Result<Arc<ForkServerClient>>>>,
}

impl EarlyForkServer {
    /// Starts it in the background. If that fails, the first command that needs it tries again and tells why.
    pub fn start() -> Self {
        Self { starting: std::thread::Builder::new().spawn(ForkServerClient::of_this_process).ok() }
    }
}

impl Drop for EarlyForkServer {
    fn drop(&mut self) {
        // A fork server that is not started yet would otherwise outlive this.
        let _ = self.starting.take().map(JoinHandle::join);
    }
}

/// Those who wait for fork servers that are about to end.
static LEAVING: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());

/// Waits until everything that sandboxes leave behind is cleared away, at most for a few seconds. For programs that are about to end: whoever is
/// started next in the same workspace should find it as it was. Every executor must have been dropped.
pub fn finish() {
    const PATIENCE: Duration = Duration::from_secs(3);
    let until = Instant::now() + PATIENCE;
    let leaving = std::mem::take(&mut *LEAVING.lock().unwrap_or_else(PoisonError::into_inner));
    while leaving.iter().any(|reaper| !reaper.is_finished()) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}
