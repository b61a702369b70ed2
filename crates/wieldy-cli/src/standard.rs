//! Standard input and output of a session: the runtime itself waits for pipes and sockets. That takes a fraction of the
//! time of a thread for each read and each write.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Stat, fstat};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;

/// The interval of checks whether the output still has a reader.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Returns standard input.
pub(crate) fn input() -> Box<dyn AsyncRead + Send + Unpin> {
    match own(io::stdin().as_fd()) {
        Some((FileType::Fifo, pipe)) => match pipe::Receiver::from_owned_fd(pipe) {
            Ok(pipe) => Box::new(pipe),
            Err(_) => Box::new(tokio::io::stdin()),
        },
        Some((FileType::Socket, socket)) => match stream(socket) {
            Ok(socket) => Box::new(socket),
            Err(_) => Box::new(tokio::io::stdin()),
        },
        _ => Box::new(tokio::io::stdin()),
    }
}

/// Returns standard output.
pub(crate) fn output() -> Box<dyn AsyncWrite + Send + Unpin> {
    match own(io::stdout().as_fd()) {
        Some((FileType::Fifo, pipe)) => match pipe::Sender::from_owned_fd(pipe) {
            Ok(pipe) => Box::new(pipe),
            Err(_) => Box::new(tokio::io::stdout()),
        },
        Some((FileType::Socket, socket)) => match stream(socket) {
            Ok(socket) => Box::new(socket),
            Err(_) => Box::new(tokio::io::stdout()),
        },
        _ => Box::new(tokio::io::stdout()),
    }
}

/// Returns the type of an open file, and a new handle to it. Returns `None` if standard error is the same file, because
/// writers to standard error expect writes to block.
fn own(file: BorrowedFd<'_>) -> Option<(FileType, OwnedFd)> {
    let is = fstat(file).ok()?;
    let same = |other: Stat| (other.st_dev, other.st_ino) == (is.st_dev, is.st_ino);
    if fstat(io::stderr().as_fd()).is_ok_and(same) {
        return None;
    }
    Some((FileType::from_raw_mode(is.st_mode), file.try_clone_to_owned().ok()?))
}

fn stream(socket: OwnedFd) -> io::Result<UnixStream> {
    let socket = std::os::unix::net::UnixStream::from(socket);
    socket.local_addr()?;
    socket.set_nonblocking(true)?;
    UnixStream::from_std(socket)
}

/// Waits until the output has no reader any more. A client that closes only our input may still wait for answers.
pub(crate) async fn nobody_reads() {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let output = io::stdout();
        let mut looked = [PollFd::new(&output, PollFlags::empty())];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut looked, Some(&at_once)).is_ok() && looked[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
        {
            return;
        }
    }
}
