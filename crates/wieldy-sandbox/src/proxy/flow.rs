//! Passes bytes between client and host: heads, bodies and tunnels, each within bounds.
//!
//! Only a reader's buffer is held in memory: no byte is read before the other side has taken the last ones.

use std::io::{self, Cursor, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::try_join;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, Chain};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf, ReadHalf};
use tokio::time::{Instant, sleep_until, timeout};

use super::http::{Body, HEAD_BYTES_MAX, parse_number};

/// The maximum time without any progress on a connection.
const IDLE_MAX: Duration = Duration::from_secs(5 * 60);

/// The size of the buffer for one direction.
const BUFFER_BYTES: usize = 32 * 1024;

/// The maximum length of a line with the length of a chunk.
const CHUNK_LINE_BYTES_MAX: u64 = 1024;

/// The maximum time that a client may go on sending after its answer; `LINGER_BYTES_MAX` limits the bytes.
const LINGER_MAX: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: u64 = 1024 * 1024;

/// A reader that begins with the bytes received together with the head.
pub(super) type Rest<R> = BufReader<Chain<Cursor<Vec<u8>>, R>>;

/// Returns a reader of the bytes after a head.
pub(super) fn rest<R: AsyncRead + Unpin>(early: Vec<u8>, reader: R) -> Rest<R> {
    BufReader::with_capacity(BUFFER_BYTES, Cursor::new(early).chain(reader))
}

/// Reads a head, of which `head` may be the beginning. Returns the head and the bytes received after it.
///
/// Fails with [`ErrorKind::FileTooLarge`] if the head is too large.
pub(super) async fn read_head(
    mut head: Vec<u8>,
    reader: &mut (impl AsyncRead + Unpin),
) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let mut searched = 0;
    loop {
        if let Some(end) = head_end(&head, searched) {
            let early = head.split_off(end);
            return Ok((head, early));
        }
        // A part of the end may be there already.
        searched = head.len().saturating_sub(2);
        let room = HEAD_BYTES_MAX.saturating_sub(head.len()) as u64;
        if room == 0 {
            return Err(ErrorKind::FileTooLarge.into());
        }
        head.reserve(2048);
        if reader.take(room).read_buf(&mut head).await? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
}

/// Returns the end of an empty line, also of one with bare LF, which is refused later.
fn head_end(bytes: &[u8], from: usize) -> Option<usize> {
    (from..bytes.len()).filter(|at| bytes[*at] == b'\n').find_map(|at| match &bytes[at + 1..] {
        [b'\n', ..] => Some(at + 2),
        [b'\r', b'\n', ..] => Some(at + 3),
        _ => None,
    })
}

/// The time of the last progress.
pub(super) struct Activity {
    begin: Instant,
    last_ms: AtomicU64,
}

impl Activity {
    pub(super) fn new() -> Self {
        Self { begin: Instant::now(), last_ms: AtomicU64::new(0) }
    }

    fn touch(&self) {
        self.last_ms.store(self.begin.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Waits until there was no progress for too long.
    async fn stalled(&self) -> io::Error {
        loop {
            let end = self.begin + Duration::from_millis(self.last_ms.load(Ordering::Relaxed)) + IDLE_MAX;
            if end <= Instant::now() {
                return ErrorKind::TimedOut.into();
            }
            sleep_until(end).await;
        }
    }

    /// Runs a flow until it ends or stalls.
    pub(super) async fn watch<T>(&self, flow: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        tokio::select! {
            result = flow => result,
            error = self.stalled() => Err(error),
        }
    }
}

/// The side of a flow that failed.
#[derive(Debug)]
pub(super) enum Broken {
    /// The data was not as announced, or did not come.
    Reading(io::Error),
    Writing(io::Error),
}

impl From<Broken> for io::Error {
    fn from(broken: Broken) -> Self {
        let (Broken::Reading(error) | Broken::Writing(error)) = broken;
        error
    }
}

/// Passes a body on, with its framing written anew, and not a byte more.
pub(super) async fn pass_body(
    body: Body,
    from: &mut (impl AsyncBufRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    activity: &Activity,
) -> Result<(), Broken> {
    match body {
        Body::Length(length) => pass_exactly(length, from, to, activity).await,
        Body::UntilEnd => pass(u64::MAX, from, to, activity).await.map(drop),
        Body::Chunked => loop {
            let length = read_chunk_length(from).await.map_err(Broken::Reading)?;
            if length == 0 {
                skip_trailers(from).await.map_err(Broken::Reading)?;
                return to.write_all(b"0\r\n\r\n").await.map_err(Broken::Writing);
            }
            to.write_all(format!("{length:x}\r\n").as_bytes()).await.map_err(Broken::Writing)?;
            pass_exactly(length, from, to, activity).await?;
            if !read_line(from, 2).await.map_err(Broken::Reading)?.is_empty() {
                return Err(Broken::Reading(ErrorKind::InvalidData.into()));
            }
            to.write_all(b"\r\n").await.map_err(Broken::Writing)?;
        },
    }
}

async fn pass_exactly(
    length: u64,
    from: &mut (impl AsyncBufRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    activity: &Activity,
) -> Result<(), Broken> {
    match pass(length, from, to, activity).await? {
        passed if passed == length => Ok(()),
        _ => Err(Broken::Reading(ErrorKind::UnexpectedEof.into())),
    }
}

/// Passes on at most `length` bytes, and returns how many came before the end.
async fn pass(
    length: u64,
    from: &mut (impl AsyncBufRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    activity: &Activity,
) -> Result<u64, Broken> {
    let mut passed = 0;
    while passed < length {
        let bytes = from.fill_buf().await.map_err(Broken::Reading)?;
        if bytes.is_empty() {
            break;
        }
        let wanted = bytes.len().min(usize::try_from(length - passed).unwrap_or(usize::MAX));
        let written = to.write(&bytes[..wanted]).await.map_err(Broken::Writing)?;
        if written == 0 {
            return Err(Broken::Writing(ErrorKind::WriteZero.into()));
        }
        from.consume(written);
        passed += written as u64;
        activity.touch();
    }
    Ok(passed)
}

async fn read_chunk_length(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<u64> {
    let line = read_line(from, CHUNK_LINE_BYTES_MAX).await?;
    // An extension may follow after `;`, and is ignored. Some servers pad the number with blanks.
    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii_end();
    parse_number(digits, 16).map_err(|problem| io::Error::new(ErrorKind::InvalidData, problem))
}

async fn skip_trailers(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<()> {
    let mut room = HEAD_BYTES_MAX as u64;
    loop {
        let line = read_line(from, room).await?;
        if line.is_empty() {
            return Ok(());
        }
        room -= line.len() as u64;
    }
}

/// Reads a line of at most `bytes_max` bytes, without its CR LF.
async fn read_line(from: &mut (impl AsyncBufRead + Unpin), bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    from.take(bytes_max).read_until(b'\n', &mut line).await?;
    match line.strip_suffix(b"\r\n") {
        Some(text) if !text.contains(&b'\r') => Ok(text.to_vec()),
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

/// Passes bytes in both directions until both have ended; the end of one direction is passed on, too.
pub(super) async fn tunnel(early: Vec<u8>, client: TcpStream, host: TcpStream) -> io::Result<()> {
    let activity = Activity::new();
    let (client_reader, mut client_writer) = client.into_split();
    let (host_reader, mut host_writer) = host.into_split();
    let mut client_reader = rest(early, client_reader);
    let mut host_reader = rest(Vec::new(), host_reader);
    let there = pass_all(&mut client_reader, &mut host_writer, &activity);
    let back = pass_all(&mut host_reader, &mut client_writer, &activity);
    activity.watch(try_join(there, back)).await.map(drop)
}

async fn pass_all(from: &mut Rest<OwnedReadHalf>, to: &mut OwnedWriteHalf, activity: &Activity) -> io::Result<()> {
    pass(u64::MAX, from, to, activity).await?;
    to.shutdown().await
}

/// Waits for the end of the client's data, and returns true if it came. Unexpected bytes end the waiting.
pub(super) async fn said_no_more(client: &mut Rest<ReadHalf<'_>>) -> bool {
    matches!(client.fill_buf().await, Ok([]))
}

/// Closes a connection so that the client can still read the answer: closing it with unread bytes would discard that.
pub(super) async fn close(mut client: TcpStream) {
    let linger = async {
        client.shutdown().await?;
        tokio::io::copy(&mut (&mut client).take(LINGER_BYTES_MAX), &mut tokio::io::sink()).await
    };
    // The connection is closed in either case.
    let _ = timeout(LINGER_MAX, linger).await;
}
