//! Runs a server that is a local program: in a sandbox of its own, with one message per line of its stdin and stdout.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rmcp::model::{ErrorCode, ErrorData, RequestId};
use rmcp::service::{RoleClient, RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use serde::Deserialize;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use wieldy_core::redact::StreamRedactor;
use wieldy_core::{Denial, Ended, Exit, Feed, OutputSink, Sandbox, SandboxError, Stdin, Stream};

use super::settings::Program;

/// Maximum size of one message from a server over its standard output.
const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Maximum size of all lines that wait to be parsed.
const WAITING_BYTES_MAX: usize = 2 * MESSAGE_BYTES_MAX;
/// The memory that a waiting line costs besides its bytes.
const LINE_OVERHEAD_BYTES: usize = 64;
/// Maximum size of the end of stderr that is kept for error messages.
const STDERR_BYTES_MAX: usize = 2 * 1024;
/// The longest time for a server to exit after its stdin was closed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// A running server. Dropping it ends its whole process tree.
pub(super) struct Process {
    ended: watch::Receiver<Option<Arc<str>>>,
    stop: CancellationToken,
}

impl Process {
    /// Waits until the server has ended and returns the reason.
    pub(super) async fn ended(&self) -> Arc<str> {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_default(),
            Err(_) => "it ended".into(),
        }
    }

    /// Returns the reason of the end if the server has ended.
    pub(super) fn end(&self) -> Option<Arc<str>> {
        self.ended.borrow().clone()
    }

    /// Waits for the server to exit by itself, as its stdin is closed, and then kills it.
    pub(super) async fn shut_down(&self) {
        let _ = tokio::time::timeout(EXIT_TIMEOUT, self.ended()).await;
        self.stop.cancel();
        self.ended().await;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Starts a server in its sandbox. A start that fails shows as the reason of the end.
pub(super) fn start(program: &Program, sandbox: Arc<dyn Sandbox>) -> (Process, ProcessTransport) {
    let (feed, stdin) = Feed::new();
    let mut command = program.command.clone();
    command.stdin = Stdin::Live(stdin);
    let confinement = program.confinement.clone();
    let stop = CancellationToken::new();
    let (output, received) = ServerOutput::new(stop.clone());
    let (tell, ended) = watch::channel(None);
    let (heard, stopped) = (Arc::clone(&output), stop.clone());
    tokio::spawn(async move {
        let output = Arc::clone(&heard) as Arc<dyn OutputSink>;
        let exit = sandbox.execute(&command, &confinement, output, stopped).await;
        tell.send_replace(Some(heard.end(exit).into()));
    });
    (Process { ended, stop }, ProcessTransport { feed: Some(feed), received, output })
}

/// The output of a server, before it is parsed.
struct ServerOutput {
    stdout: Mutex<StdoutLines>,
    stderr: Mutex<StderrTail>,
    /// The size of all waiting lines.
    waiting: AtomicUsize,
    stop: CancellationToken,
}

struct StdoutLines {
    /// The current, incomplete line.
    partial: Vec<u8>,
    /// The sender of complete lines. `None` once the server has broken a limit or has ended.
    lines: Option<mpsc::UnboundedSender<Vec<u8>>>,
    /// The limit that the server broke.
    fault: Option<&'static str>,
}

/// The end of stderr, with secrets redacted.
#[derive(Default)]
struct StderrTail {
    redactor: StreamRedactor,
    tail: VecDeque<u8>,
}

impl ServerOutput {
    /// Collects output until a limit is broken, and then stops the server. Lines go to the returned receiver.
    fn new(stop: CancellationToken) -> (Arc<Self>, mpsc::UnboundedReceiver<Vec<u8>>) {
        let (lines, received) = mpsc::unbounded_channel();
        let stdout = Mutex::new(StdoutLines { partial: Vec::new(), lines: Some(lines), fault: None });
        (Arc::new(Self { stdout, stderr: Mutex::default(), waiting: AtomicUsize::new(0), stop }), received)
    }

    fn stdout(&self) -> MutexGuard<'_, StdoutLines> {
        self.stdout.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn take_stdout(&self, mut bytes: &[u8]) {
        let mut stdout = self.stdout();
        let StdoutLines { partial, lines: Some(lines), fault } = &mut *stdout else { return };
        while !bytes.is_empty() {
            let end = bytes.iter().position(|byte| *byte == b'\n');
            let (piece, rest) = end.map_or((bytes, &[][..]), |end| (&bytes[..end], &bytes[end + 1..]));
            if partial.len() + piece.len() > MESSAGE_BYTES_MAX {
                *fault = Some("it sent a message of more than 16 MiB");
            } else if self.waiting.load(Ordering::Relaxed) > WAITING_BYTES_MAX {
                *fault = Some("it sends messages faster than wieldy can process them");
            }
            if fault.is_some() {
                partial.clear();
                partial.shrink_to_fit();
                stdout.lines = None;
                // The rest of its output is not read.
                return self.stop.cancel();
            }
            partial.extend_from_slice(piece);
            if end.is_some() {
                let line = std::mem::take(partial);
                // Some servers print blank lines to stdout, which are no messages.
                if !line.trim_ascii().is_empty() {
                    self.waiting.fetch_add(line.len() + LINE_OVERHEAD_BYTES, Ordering::Relaxed);
                    let _ = lines.send(line);
                }
            }
            bytes = rest;
        }
    }

    fn take_stderr(&self, bytes: &[u8]) {
        let mut stderr = self.stderr.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let text = stderr.redactor.push(bytes);
        if !text.is_empty() {
            tracing::debug!(target: "wieldy::mcp", text = text.trim_end(), "stderr of a server");
        }
        stderr.tail.extend(text.into_bytes());
        let extra = stderr.tail.len().saturating_sub(STDERR_BYTES_MAX);
        stderr.tail.drain(..extra);
    }

    /// Closes the channel of lines and returns the reason of the end.
    fn end(&self, exit: Result<Exit, SandboxError>) -> String {
        let mut stdout = self.stdout();
        stdout.lines = None;
        let refused = exit.as_ref().ok().and_then(|exit| {
            exit.denials.iter().find_map(|denial| match denial {
                Denial::Network { host, port, .. } => {
                    let port = port.map(|port| format!(":{port}")).unwrap_or_default();
                    Some(format!("; wieldy's setting `network` blocked `{host}{port}`"))
                }
                Denial::Filesystem { .. } => None,
            })
        });
        let how = match (stdout.fault, exit) {
            (Some(fault), _) => fault.to_owned(),
            (None, Err(error)) => format!("it could not be run: {}", error.message()),
            (None, Ok(exit)) => match (exit.overrun, exit.ended) {
                (Some(overrun), _) => format!("it ended: {}", overrun.error().message),
                (None, Ended::Code(code)) => format!("it ended with code {code}"),
                (None, Ended::Signal(signal)) => format!("it ended by signal {signal}"),
            },
        };
        let mut stderr = self.stderr.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let rest = stderr.redactor.finish();
        stderr.tail.extend(rest.into_bytes());
        let said = String::from_utf8_lossy(stderr.tail.make_contiguous()).trim().to_owned();
        let how = how + &refused.unwrap_or_default();
        if said.is_empty() { how } else { format!("{how}; its last output: {said}") }
    }
}

impl OutputSink for ServerOutput {
    fn write(&self, stream: Stream, bytes: &[u8]) {
        match stream {
            Stream::Stdout => self.take_stdout(bytes),
            Stream::Stderr => self.take_stderr(bytes),
        }
    }
}

/// The SDK's transport to a server.
pub(super) struct ProcessTransport {
    feed: Option<mpsc::Sender<Vec<u8>>>,
    received: mpsc::UnboundedReceiver<Vec<u8>>,
    output: Arc<ServerOutput>,
}

impl Transport<RoleClient> for ProcessTransport {
    type Error = io::Error;

    fn send(&mut self, message: TxJsonRpcMessage<RoleClient>) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let feed = self.feed.clone();
        async move {
            let mut line = serde_json::to_vec(&message)?;
            line.push(b'\n');
            let closed = || io::Error::from(io::ErrorKind::BrokenPipe);
            feed.ok_or_else(closed)?.send(line).await.map_err(|_| closed())
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        loop {
            let line = self.received.recv().await?;
            self.output.waiting.fetch_sub(line.len() + LINE_OVERHEAD_BYTES, Ordering::Relaxed);
            match parse_line(&line) {
                Some(message) => return Some(message),
                None => tracing::debug!(target: "wieldy::mcp", bytes = line.len(), "a server sent an invalid message"),
            }
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.feed = None;
        Ok(())
    }
}

/// Parses a line. A response with an invalid body becomes an error response, so that its request ends.
fn parse_line(line: &[u8]) -> Option<RxJsonRpcMessage<RoleClient>> {
    /// The part of a response that must be valid.
    #[derive(Deserialize)]
    struct ResponseHead {
        id: RequestId,
        #[serde(default)]
        method: Option<String>,
    }

    serde_json::from_slice(line).ok().or_else(|| {
        let answer = serde_json::from_slice::<ResponseHead>(line).ok().filter(|answer| answer.method.is_none())?;
        let error = ErrorData::new(ErrorCode::PARSE_ERROR, "a response that is not valid MCP", None);
        Some(RxJsonRpcMessage::<RoleClient>::error(error, Some(answer.id)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds a piece of output many times while nothing is read. Returns the number of waiting lines and the broken
    /// limit.
    fn heard(piece: &[u8], times: usize) -> (usize, Option<&'static str>) {
        let stop = CancellationToken::new();
        let (output, received) = ServerOutput::new(stop.clone());
        for _ in 0..times {
            output.write(Stream::Stdout, piece);
        }
        assert_eq!(stop.is_cancelled(), output.stdout().fault.is_some());
        (received.len(), output.stdout().fault)
    }

    #[test]
    fn a_flood_of_short_lines_is_as_bounded_as_one_of_long_ones() {
        let too_much = Some("it sends messages faster than wieldy can process them");
        let lines_max = WAITING_BYTES_MAX / (1 + LINE_OVERHEAD_BYTES) + 1;
        assert_eq!(heard(&b"x\n".repeat(1000), 1000), (lines_max, too_much));
        assert_eq!(heard(&[&vec![b'x'; MESSAGE_BYTES_MAX][..], b"\n"].concat(), 4), (2, too_much));
    }

    #[test]
    fn empty_lines_are_not_queued() {
        assert_eq!(heard(&b"\n \r\n\t\n".repeat(1000), 1000), (0, None));
        assert_eq!(heard(b"\n\nx\n\n", 1), (1, None));
    }
}
