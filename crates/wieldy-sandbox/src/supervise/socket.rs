//! The executor's end of a socket to an init or a supervisor, and the client of the fork server.

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

/// The time between two attempts to send to a full socket.
const ROOM_EVERY: Duration = Duration::from_millis(1);

/// An asynchronous message socket.
pub(crate) struct Socket {
    fd: AsyncFd<OwnedFd>,
}

impl Socket {
    /// Returns the two ends of a new socket: this process's, and one to send to another process.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = protocol::pair()?;
        // Each message then carries its sender's process id, in this process's pid namespace.
        rustix::net::sockopt::set_socket_passcred(&ours, true)?;
        Ok((Self { fd: sys::watched(ours, Interest::READABLE)? }, theirs))
    }

    /// Sends a message with descriptors attached.
    pub(crate) async fn send<T: Serialize>(&self, message: &T, beside: &[BorrowedFd<'_>]) -> io::Result<()> {
        loop {
            match protocol::send(self.fd.get_ref(), message, beside) {
                // The peer usually takes each message before the next one, so a full socket is rare. To poll for room
                // would wake this task each time a message was taken.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(ROOM_EVERY).await,
                sent => return sent,
            }
        }
    }

    /// Returns true if the other end is open. The other end must be one that sends nothing unasked.
    pub(crate) fn is_alive(&self) -> bool {
        is_silent(self.fd.get_ref())
    }

    /// Sends a message if the socket has room for it.
    pub(crate) fn try_send<T: Serialize>(&self, message: &T) -> io::Result<()> {
        protocol::send(self.fd.get_ref(), message, &[])
    }

    /// Waits for the next message; `None` if the other end is closed.
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

/// Returns true if the socket has no pending data and is not at EOF.
pub(crate) fn is_silent(socket: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut polled, Some(&at_once)), Ok(0))
}

/// A client of the fork server. Dropping it ends the fork server and everything that it made.
pub(crate) struct ForkServerClient {
    socket: OwnedFd,
    process: Option<Child>,
}

impl ForkServerClient {
    /// Returns the fork server of this process, and starts one if there is none or if it is gone.
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

    /// Sends an order with the socket for the reply.
    pub(crate) fn order(&self, order: &ForkServerOrder, socket: &OwnedFd) -> io::Result<()> {
        self.send(order, &[socket.as_fd()])
    }

    /// Sends an order with several descriptors, the socket for the reply first.
    pub(crate) fn send(&self, order: &ForkServerOrder, beside: &[BorrowedFd<'_>]) -> io::Result<()> {
        protocol::send(&self.socket, order, beside)
            .map_err(|error| io::Error::new(error.kind(), format!("the fork server does not listen: {error}")))
    }
}

impl ForkServerClient {
    /// Sends an order and waits for the reply.
    pub(crate) async fn ask(&self, order: &ForkServerOrder) -> io::Result<Vec<OwnedFd>> {
        self.begin(order)?.wait().await
    }

    /// Sends an order with another descriptor, and waits for the reply.
    pub(crate) async fn ask_with(&self, order: &ForkServerOrder, beside: BorrowedFd<'_>) -> io::Result<Vec<OwnedFd>> {
        let (socket, theirs) = Socket::pair()?;
        self.send(order, &[theirs.as_fd(), beside])?;
        drop(theirs);
        PendingReply(socket).wait().await
    }

    /// Sends an order, without waiting for its reply.
    pub(crate) fn begin(&self, order: &ForkServerOrder) -> io::Result<PendingReply> {
        let (socket, theirs) = Socket::pair()?;
        self.order(order, &theirs)?;
        Ok(PendingReply(socket))
    }

    /// Returns a user namespace that maps this owner's files to the sandboxes' account.
    pub(crate) async fn id_map_namespace(&self, uid: u32, gid: u32) -> io::Result<OwnedFd> {
        let namespace = self.ask(&ForkServerOrder::IdMapNamespace { uid, gid }).await?.into_iter().next();
        namespace.ok_or_else(|| io::Error::other("the fork server sent no user namespace"))
    }
}

/// The pending reply of the fork server to an order.
pub(crate) struct PendingReply(Socket);

impl PendingReply {
    /// Waits for the reply and returns the descriptors that came with it.
    pub(crate) async fn wait(self) -> io::Result<Vec<OwnedFd>> {
        match self.0.receive::<ForkServerReport>().await? {
            None => Err(io::Error::other("the fork server has ended; the next call starts a new one")),
            Some(Received { message: ForkServerReport { error: Some(error) }, .. }) => Err(io::Error::other(error)),
            Some(received) => Ok(received.descriptors),
        }
    }
}

/// Has the fork server kill a child, and waits until the child is gone and its resources are released.
pub(crate) async fn end_child(fork_server: &ForkServerClient, child: Pid, linger: bool) -> io::Result<()> {
    let (socket, theirs) = Socket::pair()?;
    fork_server.order(&ForkServerOrder::End { child: child.as_raw_pid(), linger }, &theirs)?;
    drop(theirs);
    socket.receive::<()>().await.map(drop)
}

impl Drop for ForkServerClient {
    fn drop(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        // The socket is closed right after this, and then the fork server ends. A thread reaps it, so that the drop
        // does not block.
        let reaper = std::thread::Builder::new().name("wieldy-reaper".into()).spawn(move || drop(process.wait()));
        reaper.into_iter().for_each(finish_before_exit);
    }
}

/// Makes [`finish`] wait for this thread, which cleans up.
pub(crate) fn finish_before_exit(thread: JoinHandle<()>) {
    let mut leaving = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
    leaving.retain(|thread| !thread.is_finished());
    leaving.push(thread);
}

/// A fork server that starts in the background, while the program does something else. The fork server lives until this
/// value and the last sandbox are dropped.
pub struct EarlyForkServer {
    starting: Option<JoinHandle<io::Result<Arc<ForkServerClient>>>>,
}

impl EarlyForkServer {
    /// Starts the fork server in the background. If that fails, the first command that needs one tries again and
    /// reports the error.
    pub fn start() -> Self {
        Self { starting: std::thread::Builder::new().spawn(ForkServerClient::of_this_process).ok() }
    }
}

impl Drop for EarlyForkServer {
    fn drop(&mut self) {
        // Otherwise a fork server that is still starting would outlive this value.
        let _ = self.starting.take().map(JoinHandle::join);
    }
}

/// Threads that wait for the end of fork servers, and clean up after them.
static LEAVING: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());

/// Waits, at most a few seconds, until all fork servers have cleaned up after their sandboxes.
///
/// For programs that are about to exit, so that the next program finds the workspace as it was. Drop every executor
/// before.
pub fn finish() {
    const PATIENCE: Duration = Duration::from_secs(3);
    let until = Instant::now() + PATIENCE;
    let leaving = std::mem::take(&mut *LEAVING.lock().unwrap_or_else(PoisonError::into_inner));
    while leaving.iter().any(|reaper| !reaper.is_finished()) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}
