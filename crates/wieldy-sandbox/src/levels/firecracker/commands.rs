//! Connects to a guest's agent and runs commands through it, on the executor's side.

use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, OutputSink, Stdin, Stream};

use super::frames::{CONTENT_BYTES_MAX, Incoming, Kind, PORT, Run, invalid, send_to};
use crate::supervise::protocol::{RunOrder, SupervisorReport};
use crate::supervise::run::PATIENCE;

/// Maximum length of the answer to a request for a connection: `OK ` and a number.
const GREETING_BYTES_MAX: usize = 32;

/// Longest silence of a guest while workspaces are synchronized.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Connects to the agent, through the socket at which Firecracker forwards connections to the guest.
pub(super) async fn connect(vsock: PathBuf) -> io::Result<UnixStream> {
    use tokio::io::AsyncWriteExt;
    let mut stream = UnixStream::connect(vsock).await?;
    stream.write_all(format!("CONNECT {PORT}\n").as_bytes()).await?;
    let mut greeting = Vec::new();
    while greeting.last() != Some(&b'\n') && greeting.len() < GREETING_BYTES_MAX {
        // Byte by byte, since the bytes that follow belong to the caller.
        greeting.push(stream.read_u8().await.map_err(|_| nobody_listens())?);
    }
    check_greeting(&greeting).map(|()| stream)
}

fn nobody_listens() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "no agent listens in the guest")
}

fn check_greeting(greeting: &[u8]) -> io::Result<()> {
    let number = greeting.strip_prefix(b"OK ").and_then(|rest| rest.strip_suffix(b"\n"));
    match number.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit)) {
        true => Ok(()),
        false => Err(invalid(&format!("`{}` instead of a greeting", greeting.escape_ascii()))),
    }
}

/// Connects like [`connect`], but blocks.
pub(super) fn connect_blocking(vsock: &Path) -> io::Result<std::os::unix::net::UnixStream> {
    let mut stream = std::os::unix::net::UnixStream::connect(vsock)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    stream.write_all(format!("CONNECT {PORT}\n").as_bytes())?;
    let mut greeting = Vec::new();
    while greeting.last() != Some(&b'\n') && greeting.len() < GREETING_BYTES_MAX {
        let mut byte = [0];
        stream.read_exact(&mut byte).map_err(|_| nobody_listens())?;
        greeting.extend(byte);
    }
    check_greeting(&greeting).map(|()| stream)
}

/// Waits until a stopped run should have ended long ago.
pub(super) async fn given_up(stop: &CancellationToken, grace: Duration) {
    stop.cancelled().await;
    tokio::time::sleep(grace.saturating_add(PATIENCE)).await;
}

/// Runs a command in the guest until its agent reports the end. Fails at any point if `given_up` comes first.
pub(super) async fn run(
    vsock: PathBuf,
    command: &Command,
    order: RunOrder,
    output: &dyn OutputSink,
    stop: &CancellationToken,
    given_up: Pin<&mut impl Future<Output = ()>>,
) -> io::Result<SupervisorReport> {
    let run = serde_json::to_vec(&Run { order, has_input: command.stdin != Stdin::Nothing })?;
    let running = async {
        let (reading, mut writing) = connect(vsock).await?.into_split();
        send_to(&mut writing, Kind::Run, &run).await?;
        let taken = Notify::new();
        tokio::select! {
            // `talk` comes first: `hear` may use up the task's budget, and then a guest that prints without end would
            // never get the stop.
            biased;
            never = talk(writing, &command.stdin, &taken, stop) => match never {},
            // Concurrently: an agent that waits for us to read must not wait until we have written.
            report = hear(reading, output, &taken) => report,
        }
    };
    tokio::select! {
        biased; // for the same reason
        () = given_up => Err(io::Error::new(io::ErrorKind::TimedOut, "the guest did not end the command")),
        outcome = running => outcome,
    }
}

/// Forwards the output of the command until it has ended. Returns the report.
async fn hear(mut stream: OwnedReadHalf, output: &dyn OutputSink, taken: &Notify) -> io::Result<SupervisorReport> {
    let mut incoming = Incoming::default();
    loop {
        let frame = incoming.next(&mut stream).await?;
        match frame.kind {
            Kind::Output => output.write(Stream::Stdout, &frame.bytes),
            Kind::Complaint => output.write(Stream::Stderr, &frame.bytes),
            Kind::Taken => taken.notify_one(),
            _ => return frame.expect(Kind::Ended)?.message(),
        }
        // A guest that prints without end must not block the other tasks of our thread.
        tokio::task::coop::consume_budget().await;
    }
}

/// Sends the input of the command, and then the stop. Ignores errors, since `hear` notices a lost connection.
async fn talk(mut stream: OwnedWriteHalf, stdin: &Stdin, taken: &Notify, stop: &CancellationToken) -> Infallible {
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = feed(&mut stream, stdin, taken) => stop.cancelled().await,
    }
    let _ = send_to(&mut stream, Kind::Stop, &[]).await;
    std::future::pending().await
}

/// Sends the input and the end of file. A command that does not read all of it is no error.
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream as Blocking};

    use rustix::event::{PollFd, PollFlags, poll};

    use super::super::frames;
    use super::*;
    use crate::supervise::protocol::{RunLimits, RunReport};

    /// A timeout far longer than any of these tests takes.
    const HANGS: Duration = Duration::from_secs(30);

    struct Nobody;

    impl OutputSink for Nobody {
        fn write(&self, _stream: Stream, _bytes: &[u8]) {}
    }

    /// Returns the result of a run that is stopped at once, with a guest that behaves like this after the connection.
    async fn stopped(
        grace: Duration,
        environment: Vec<(String, String)>,
        guest: impl FnOnce(Blocking) + Send + 'static,
    ) -> io::Result<SupervisorReport> {
        let folder = tempfile::tempdir().unwrap();
        let vsock = folder.path().join("vsock");
        let listener = UnixListener::bind(&vsock).unwrap();
        let guest = std::thread::spawn(move || guest(listener.accept().unwrap().0));
        let command = crate::supervise::host_process::idle_command();
        let order = RunOrder {
            program: "sleep".into(),
            arguments: Vec::new(),
            environment,
            workspace: PathBuf::new(),
            folder: PathBuf::new(),
            grace_ms: 0,
            terminal: None,
            is_raw: false,
            limits: RunLimits::default(),
        };
        let stop = CancellationToken::new();
        stop.cancel();
        let given_up = std::pin::pin!(given_up(&stop, grace));
        let running = run(vsock, &command, order, &Nobody, &stop, given_up);
        let outcome = tokio::time::timeout(HANGS, running).await.expect("it waits for ever");
        guest.join().unwrap();
        outcome
    }

    fn greet(stream: &mut Blocking) {
        let mut line = [0; 13];
        stream.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"CONNECT 1024\n");
        stream.write_all(b"OK 1\n").unwrap();
    }

    /// Reads nothing until the other side has hung up.
    fn hold(stream: Blocking) {
        poll(&mut [PollFd::new(&stream, PollFlags::empty())], None).unwrap();
    }

    #[tokio::test]
    async fn a_guest_that_floods_is_told_to_stop() {
        let flood = |mut stream: Blocking| {
            greet(&mut stream);
            let mut writing = stream.try_clone().unwrap();
            let flooding = std::thread::spawn(move || {
                let taken = [Kind::Taken as u8, 0, 0, 0, 0].repeat(10_000);
                while writing.write_all(&taken).is_ok() {}
            });
            assert_eq!(frames::receive(&mut stream).unwrap().kind, Kind::Run);
            // This guest receives the stop and ignores it.
            let told = frames::receive(&mut stream).map(|frame| frame.kind);
            assert_eq!(told.ok(), Some(Kind::Stop));
            flooding.join().unwrap();
        };
        let error = stopped(Duration::ZERO, Vec::new(), flood).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string().as_str()),
            (io::ErrorKind::TimedOut, "the guest did not end the command")
        );
    }

    #[tokio::test]
    async fn a_guest_that_reads_nothing_is_given_up_at_any_stage() {
        let much = vec![("MUCH".to_owned(), "x".repeat(4 << 20))];
        let deaf = |mut stream: Blocking| {
            greet(&mut stream);
            hold(stream);
        };
        for outcome in [
            stopped(Duration::ZERO, Vec::new(), hold).await,
            stopped(Duration::ZERO, much, deaf).await,
            stopped(Duration::ZERO, Vec::new(), deaf).await,
        ] {
            assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
    }

    #[tokio::test]
    async fn the_report_of_a_guest_that_stops_on_request_is_received() {
        let obey = |mut stream: Blocking| {
            greet(&mut stream);
            while frames::receive(&mut stream).unwrap().kind != Kind::Stop {}
            let report = SupervisorReport::Ended(RunReport { status: 15, ..RunReport::default() });
            frames::tell(&mut stream, Kind::Ended, &report).unwrap();
        };
        let outcome = stopped(Duration::from_secs(1000), Vec::new(), obey).await.unwrap();
        assert!(matches!(outcome, SupervisorReport::Ended(RunReport { status: 15, .. })));
    }
}
