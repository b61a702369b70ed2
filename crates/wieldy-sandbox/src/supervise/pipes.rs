//! Copies bytes between a call and the executor's ends of its command's pipes or terminal.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::process::Signal;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use wieldy_core::{OutputSink, Stdin, Stream, Terminal};

use crate::sys;

/// Maximum number of bytes per read: the kernel's default capacity of a pipe.
const READ_BYTES: usize = 64 * 1024;

/// Longest time for which one pipe is forwarded before other tasks get a turn.
const TURN: Duration = Duration::from_micros(500);

/// Maximum number of typed signals in the queue.
const TYPED_MAX: usize = 8;

/// The executor's ends of a command's input and output.
pub(crate) struct Pipes {
    /// Taken by the one task that writes to it; dropping it sends the end of file.
    stdin: Mutex<Option<AsyncFd<OwnedFd>>>,
    stdout: AsyncFd<OwnedFd>,
    /// `None` for a terminal, where standard error is the same as output.
    stderr: Option<AsyncFd<OwnedFd>>,
    /// Receives typed signals if the command runs in another kernel: this kernel has no process to signal.
    typed: Option<mpsc::Sender<Signal>>,
}

impl Pipes {
    /// Makes pipes, and returns them with the command's ends.
    pub(crate) fn open(stdin: &Stdin) -> io::Result<(Self, [OwnedFd; 3])> {
        let (stdin_ours, stdin) = match stdin {
            Stdin::Nothing => (None, std::fs::File::open("/dev/null")?.into()),
            Stdin::Bytes(_) | Stdin::Live(_) => {
                let (theirs, ours) = io::pipe()?;
                (Some(sys::watched(ours.into(), Interest::WRITABLE)?), theirs.into())
            }
        };
        let (stdout_ours, stdout) = io::pipe()?;
        let (stderr_ours, stderr) = io::pipe()?;
        let readable = |end: io::PipeReader| sys::watched(end.into(), Interest::READABLE);
        let (stdout_ours, stderr_ours) = (readable(stdout_ours)?, readable(stderr_ours)?);
        let pipes = Self { stdin: Mutex::new(stdin_ours), stdout: stdout_ours, stderr: Some(stderr_ours), typed: None };
        Ok((pipes, [stdin, stdout.into(), stderr.into()]))
    }

    /// Takes a terminal as input and output in one.
    pub(crate) fn terminal(descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let terminal =
            descriptors.into_iter().next().ok_or_else(|| io::Error::other("the supervisor sent no terminal"))?;
        let stdin = Some(sys::watched(terminal.try_clone()?, Interest::WRITABLE)?);
        let stdout = sys::watched(terminal, Interest::READABLE)?;
        Ok(Self { stdin: Mutex::new(stdin), stdout, stderr: None, typed: None })
    }

    /// Makes a terminal for a command in another kernel. Returns it with three copies of the command's end and a queue
    /// of typed signals.
    pub(crate) fn terminal_beyond(terminal: Terminal) -> io::Result<(Self, [OwnedFd; 3], mpsc::Receiver<Signal>)> {
        let (ours, theirs) = crate::supervise::supervisor::terminal(terminal.rows, terminal.columns)?;
        let (typed, signals) = mpsc::channel(TYPED_MAX);
        let pipes = Self { typed: Some(typed), ..Self::terminal(vec![ours])? };
        Ok((pipes, [theirs.try_clone()?, theirs.try_clone()?, theirs], signals))
    }

    /// Copies bytes until `over` is ready, that is, until no process of the command's tree is left.
    pub(crate) async fn pump_until<T>(
        &self,
        stdin: &Stdin,
        output: &dyn OutputSink,
        over: impl Future<Output = T>,
    ) -> T {
        let over = {
            let pumping = self.pump(stdin, output);
            tokio::pin!(pumping, over);
            let mut pumped = false;
            loop {
                tokio::select! {
                    biased; // a command that prints without end must not hide its own end
                    over = &mut over => break over,
                    () = &mut pumping, if !pumped => pumped = true,
                }
            }
        };
        // No process of the tree is left to write, so all of its output is in the pipes. Do not wait for the end of
        // file: a process outside the tree may have got a descriptor.
        self.forward_rest(output);
        over
    }

    async fn pump(&self, stdin: &Stdin, output: &dyn OutputSink) {
        let errors = async {
            if let Some(stderr) = &self.stderr {
                forward(stderr, Stream::Stderr, output).await;
            }
        };
        tokio::join!(
            biased; // if both have bytes, standard output before standard error
            forward(&self.stdout, Stream::Stdout, output),
            errors,
            self.feed(stdin)
        );
    }

    /// Writes all input and closes the pipe. A command that does not read all of it causes no error.
    async fn feed(&self, stdin: &Stdin) {
        let Some(pipe) = self.stdin.lock().ok().and_then(|mut stdin| stdin.take()) else { return };
        match stdin {
            Stdin::Nothing => {}
            Stdin::Bytes(bytes) => self.enter(&pipe, bytes).await,
            Stdin::Live(feed) => {
                while let Some(bytes) = feed.next().await {
                    self.enter(&pipe, &bytes).await;
                }
            }
        }
    }

    async fn enter(&self, pipe: &AsyncFd<OwnedFd>, bytes: &[u8]) {
        let typed = self.typed.iter();
        // Use the terminal's modes from before the write: the program may change them when it gets the signal.
        let signals: Vec<_> = typed
            .flat_map(|typed| typed_signals(pipe.get_ref(), bytes).into_iter().map(move |signal| (typed, signal)))
            .collect();
        write_all(pipe, bytes).await;
        for (typed, signal) in signals {
            // If the queue is full, drop the signal.
            let _ = typed.try_send(signal);
        }
    }

    /// Forwards the bytes that are in the pipes now. A process that still writes is not of the command's tree.
    fn forward_rest(&self, output: &dyn OutputSink) {
        let stderr = self.stderr.as_ref().map(|stderr| (Stream::Stderr, stderr));
        let mut buffer = Vec::new();
        for (stream, pipe) in std::iter::once((Stream::Stdout, &self.stdout)).chain(stderr) {
            // A terminal may still have bytes in transit, so allow a whole buffer.
            let in_pipe =
                || rustix::io::ioctl_fionread(pipe.get_ref()).ok().and_then(|count| usize::try_from(count).ok());
            let mut left = if self.stderr.is_some() { in_pipe().unwrap_or(READ_BYTES) } else { READ_BYTES };
            // Read without waiting for readiness, which the runtime may not have noticed yet.
            while left > 0
                && let Ok(count @ 1..) = read(pipe, &mut buffer)
            {
                output.write(stream, &buffer);
                left = left.saturating_sub(count);
            }
        }
    }
}

fn read(pipe: &AsyncFd<OwnedFd>, buffer: &mut Vec<u8>) -> Result<usize, Errno> {
    buffer.clear();
    buffer.reserve(READ_BYTES);
    retry_on_intr(|| rustix::io::read(pipe.get_ref(), rustix::buffer::spare_capacity(buffer)))
}

/// Forwards the bytes of a pipe until its end.
async fn forward(pipe: &AsyncFd<OwnedFd>, stream: Stream, output: &dyn OutputSink) {
    let (mut buffer, mut began) = (Vec::new(), std::time::Instant::now());
    while let Ok(mut ready) = pipe.readable().await {
        match read(pipe, &mut buffer) {
            Ok(0) => return,
            Ok(_) => output.write(stream, &buffer),
            Err(Errno::AGAIN) => ready.clear_ready(),
            // A terminal whose other end is closed gives an error (`EIO`), which is its end.
            Err(_) => return,
        }
        // A pipe that is never empty must not delay a stop of the command or the other tasks of this thread.
        if began.elapsed() >= TURN {
            tokio::task::yield_now().await;
            began = std::time::Instant::now();
        }
        tokio::task::coop::consume_budget().await;
    }
}

async fn write_all(pipe: &AsyncFd<OwnedFd>, mut bytes: &[u8]) {
    while !bytes.is_empty()
        && let Ok(mut ready) = pipe.writable().await
    {
        match retry_on_intr(|| rustix::io::write(pipe.get_ref(), bytes)) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::AGAIN) => ready.clear_ready(),
            Err(_) => return,
        }
        tokio::task::coop::consume_budget().await;
    }
}

/// Returns the signals that a terminal with the current modes makes of these bytes.
fn typed_signals(terminal: &OwnedFd, bytes: &[u8]) -> Vec<Signal> {
    use rustix::termios::{LocalModes, SpecialCodeIndex as Key, tcgetattr};
    let Ok(modes) = tcgetattr(terminal) else { return Vec::new() };
    let keys = [(Key::VINTR, Signal::INT), (Key::VQUIT, Signal::QUIT), (Key::VSUSP, Signal::TSTP)];
    // A zero byte means that no key is set.
    let is_typed = |key: u8| key != 0 && modes.local_modes.contains(LocalModes::ISIG) && bytes.contains(&key);
    keys.into_iter().filter(|(key, _)| is_typed(modes.special_codes[*key])).map(|(_, signal)| signal).collect()
}
