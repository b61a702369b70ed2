//! The executor's side of a connection to a guest's agent: how it is made, and how a command is run through it.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, OutputSink, Stdin, Stream};

use super::frames::{CONTENT_BYTES_MAX, Incoming, Kind, PORT, Run, invalid, send_to};
use crate::custody::PATIENCE;
use crate::wire::{BerthReport, RunOrder};

/// How long the answer to a request for a connection may be: `OK ` and a number.
const GREETING_BYTES_MAX: usize = 32;

/// How long a guest may say nothing while workspaces are brought together.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Connects to the agent, through the socket at which Firecracker passes connections on to the guest.
pub(super) async fn connect(vsock: PathBuf) -> io::Result<UnixStream> {
    use tokio::io::AsyncWriteExt;
    let mut stream = UnixStream::connect(vsock).await?;
    stream.write_all(format!("CONNECT {PORT}\n").as_bytes()).await?;
    let mut greeting = Vec::new();
    while greeting.last() != Some(&b'\n') && greeting.len() < GREETING_BYTES_MAX {
        // Byte by byte, as what follows is not ours to take.
        greeting.push(stream.read_u8().await.map_err(|_| io::Error::other("nobody listens in the guest"))?);
    }
    check_greeting(&greeting).map(|()| stream)
}

fn check_greeting(greeting: &[u8]) -> io::Result<()> {
    let number = greeting.strip_prefix(b"OK ").and_then(|rest| rest.strip_suffix(b"\n"));
    match number.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit)) {
        true => Ok(()),
        false => Err(invalid(&format!("`{}` instead of a greeting", greeting.escape_ascii()))),
    }
}

/// The same for whoever may be kept waiting.
pub(super) fn connect_blocking(vsock: &Path) -> io::Result<std::os::unix::net::UnixStream> {
    let mut stream = std::os::unix::net::UnixStream::connect(vsock)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    stream.write_all(format!("CONNECT {PORT}\n").as_bytes())?;
    let mut greeting = Vec::new();
    while greeting.last() != Some(&b'\n') && greeting.len() < GREETING_BYTES_MAX {
        let mut byte = [0];
        stream.read_exact(&mut byte).map_err(|_| io::Error::other("nobody listens in the guest"))?;
        greeting.extend(byte);
    }
    check_greeting(&greeting).map(|()| stream)
}

/// Runs a command in the guest until its agent says how that went. An agent that does not, long after it was told to stop, is an error.
pub(super) async fn run(
    stream: UnixStream,
    command: &Command,
    order: RunOrder,
    output: &dyn OutputSink,
    stop: &CancellationToken,
) -> io::Result<BerthReport> {
    let grace = Duration::from_millis(order.grace_ms);
    let has_input = command.stdin != Stdin::Nothing;
    let (reading, mut writing) = stream.into_split();
    let run = serde_json::to_vec(&Run { order, has_input })?;
    send_to(&mut writing, Kind::Run, &run).await?;
    let taken = Arc::new(Notify::new());
    tokio::select! {
        biased; // a command that never stops talking must still be heard to end
        report = hear(reading, output, &taken) => report,
        // Both at once: an agent that waits for us to listen must not wait for us to have spoken.
        given_up = talk(writing, &command.stdin, &taken, stop, grace) => Err(given_up),
    }
}

/// Hands on what the command prints, until it has ended.
async fn hear(mut stream: OwnedReadHalf, output: &dyn OutputSink, taken: &Notify) -> io::Result<BerthReport> {
    let mut incoming = Incoming::default();
    loop {
        let frame = incoming.next(&mut stream).await?;
        match frame.kind {
            Kind::Output => output.write(Stream::Stdout, &frame.bytes),
            Kind::Complaint => output.write(Stream::Stderr, &frame.bytes),
            Kind::Taken => taken.notify_one(),
            _ => return frame.expect(Kind::Ended)?.message(),
        }
        // A guest that is never silent must not keep us from telling it to stop.
        tokio::task::coop::consume_budget().await;
    }
}

/// Sends what the command should read, and that it should stop. Returns when there is no hope left for an answer.
async fn talk(
    mut stream: OwnedWriteHalf,
    stdin: &Stdin,
    taken: &Notify,
    stop: &CancellationToken,
    grace: Duration,
) -> io::Error {
    // Where the connection is lost, whoever listens is the first to know.
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = feed(&mut stream, stdin, taken) => stop.cancelled().await,
    }
    let _ = send_to(&mut stream, Kind::Stop, &[]).await;
    tokio::time::sleep(grace.saturating_add(PATIENCE)).await;
    io::Error::new(io::ErrorKind::TimedOut, "the guest did not end the command")
}

/// Sends everything and the end of file. A command that does not want all of it is no error.
async fn feed(stream: &mut OwnedWriteHalf, stdin: &Stdin, taken: &Notify) {
    match stdin {
        Stdin::Nothing => return,
        Stdin::Bytes(bytes) => feed_some(stream, bytes, taken).await,
        Stdin::Live(feed) => {
            while let Some(bytes) = feed.next().await {
                feed_some(stream, &bytes, taken).await;
            }
        }
    }
    let _ = send_to(stream, Kind::Input, &[]).await;
}

async fn feed_some(stream: &mut OwnedWriteHalf, bytes: &[u8], taken: &Notify) {
    for part in bytes.chunks(CONTENT_BYTES_MAX) {
        if send_to(stream, Kind::Input, part).await.is_err() {
            return;
        }
        taken.notified().await;
    }
}
