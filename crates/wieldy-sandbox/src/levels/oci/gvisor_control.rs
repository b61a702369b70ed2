//! Starts, signals, lists and waits for processes in a gVisor sandbox through its control socket, as `runsc` itself
//! does. To start `runsc` for that would take longer than most commands.
//!
//! gVisor does not promise to keep this protocol. So each sandbox is tested once after its start, by a process that
//! inspects itself ([`Control::of`]). If the test fails, the program `runsc` is called for everything, which is slower.
//! A sandbox that passed the test and later does not answer is ended by the caller; no other way is tried.
//!
//! The peer is gVisor's kernel, which may be controlled by a program that has broken out into it. So an answer is
//! limited in time and size, a connection is never used again after an error or an abandoned request, and no
//! descriptors are passed but a command's streams.

use std::fs;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::Signal;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::bundle::Doing;
use super::container::PATH;
use super::idmap::AGENT;
use crate::supervise::socket::is_silent;
use crate::sys;

/// Longest wait for an answer, except for the end of a process.
const PATIENCE: Duration = Duration::from_secs(10);

/// Maximum size of an answer: a list of as many processes as gVisor has process ids.
const ANSWER_BYTES_MAX: usize = 8 << 20;

/// Maximum number of bytes of a sandbox's error message that are passed on.
const WORDS_BYTES_MAX: usize = 4096;

/// The interval between attempts to write to a full socket.
const ROOM_EVERY: Duration = Duration::from_millis(1);

/// A client of the control socket of a sandbox.
pub(super) struct Control {
    sandbox: String,
    address: SocketAddrUnix,
    /// The socket file to which the address leads, if it is no abstract name.
    _place: Option<OwnedFd>,
    /// An idle connection, on which every request was answered.
    idle: Mutex<Option<Line>>,
}

/// The reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ControlError {
    /// The sandbox answered with this error message.
    #[error("{0}")]
    Rejected(String),
    /// No valid answer came.
    #[error(transparent)]
    Lost(#[from] io::Error),
}

/// A process in a container.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Process {
    uid: u32,
    pid: u32,
}

impl Control {
    /// Returns the control socket of a sandbox of the runtime with this root, if it passes a test: a process must find
    /// that it runs as the agent, has no capabilities, and got its arguments, environment and folder.
    pub(super) async fn of(sandbox: &str, root: &Path) -> Option<Self> {
        const CODE: i32 = 42;
        let none = "0000000000000000";
        let script = format!(
            "while read -r name first rest; do case \"$name $first\" in \
             \"Uid: {AGENT}\"|\"Gid: {AGENT}\"|\"CapPrm: {none}\"|\"CapEff: {none}\"|\"CapBnd: {none}\") seen=$seen.;; esac; \
             done </proc/self/status; [ \"$seen$PWD\" = ...../proc ] && exit \"$CODE\""
        );
        let control = Self::at(sandbox, root).ok()?;
        let trial = async {
            let doing = Doing {
                words: ["sh", "-c", &script].map(String::from).into(),
                environment: vec![PATH.into(), format!("CODE={CODE}")],
                folder: Path::new("/proc"),
                user: AGENT,
                open_files: None,
                has_terminal: false,
            };
            let status = control.run(&doing).await?;
            Ok::<_, ControlError>(status == CODE << 8 && control.is_clear_of(AGENT).await?)
        };
        trial.await.ok().filter(|is_as_asked| *is_as_asked).map(|_| control)
    }

    /// Connects to the abstract socket of a sandbox, or to the socket file of newer versions of gVisor.
    fn at(sandbox: &str, root: &Path) -> io::Result<Self> {
        let control = |address, place| {
            let control = Self { sandbox: sandbox.to_owned(), address, _place: place, idle: Mutex::default() };
            let line = control.connect()?;
            control.keep(line);
            Ok(control)
        };
        let name = format!("runsc-sandbox.{sandbox}\0");
        let nameless = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(io::Error::from);
        nameless.and_then(|address| control(address, None)).or_else(|_: io::Error| {
            // A path that is short enough for a socket address.
            let path = root.join(format!("runsc-{sandbox}.sock"));
            let place = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
            let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", place.as_raw_fd()))?;
            control(address, Some(place))
        })
    }

    fn connect(&self) -> io::Result<Line> {
        // Does not wait: the backlog of the listener is large enough.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &self.address)?;
        // Any process could have bound a free name, but only we put processes into the sandbox's cgroup.
        let peer = rustix::net::sockopt::socket_peercred(&socket)?.pid.as_raw_pid();
        let groups = fs::read_to_string(format!("/proc/{peer}/cgroup"))?;
        if !groups.split(['/', '\n']).any(|part| part == self.sandbox) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(Line(sys::watched(socket, Interest::READABLE)?))
    }

    fn keep(&self, line: Line) {
        *self.idle.lock().unwrap_or_else(PoisonError::into_inner) = Some(line);
    }

    /// Starts a process with these streams. Returns its id for [`Control::status_of`].
    pub(super) async fn start(&self, doing: &Doing<'_>, streams: [BorrowedFd<'_>; 3]) -> Result<i32, ControlError> {
        let Doing { words, environment, folder, user, has_terminal, .. } = doing;
        let order = json!({
            "argv": words,
            "envv": environment,
            "wd": folder.to_string_lossy(),
            "KUID": user,
            "KGID": user,
            // The limits of open files are those of the first process.
            "Capabilities": {"PermittedCaps": 0, "InheritableCaps": 0, "EffectiveCaps": 0, "BoundingCaps": 0, "AmbientCaps": 0},
            "StdioIsPty": has_terminal,
            "ContainerID": self.sandbox,
            // Only newer versions know this field, and they need it.
            "NoNewPrivileges": true,
            "GuestFDs": [0, 1, 2],
        });
        within_patience(self.ask("ExecuteAsync", &order, &streams)).await
    }

    /// Waits until a process that was started here has ended. Returns its status as `wait` does.
    pub(super) async fn status_of(&self, pid: i32) -> Result<i32, ControlError> {
        self.ask("WaitPID", &json!({"PID": pid, "CID": self.sandbox}), &[]).await
    }

    /// Signals the foreground process group on the terminal of a process that was started here.
    pub(super) async fn signal_foreground(&self, pid: i32, signal: Signal) -> Result<(), ControlError> {
        const FOREGROUND: u32 = 2;
        let about = json!({"CID": self.sandbox, "PID": pid, "Signo": signal.as_raw(), "Mode": FOREGROUND});
        let asking = self.ask::<IgnoredAny>("Signal", &about, &[]);
        within_patience(asking).await.map(drop)
    }

    /// Runs a short process whose input and output do not matter. Returns its status.
    pub(super) async fn run(&self, doing: &Doing<'_>) -> Result<i32, ControlError> {
        let nothing = fs::File::options().read(true).write(true).open("/dev/null")?;
        let pid = self.start(doing, [nothing.as_fd(); 3]).await?;
        within_patience(self.status_of(pid)).await
    }

    /// Returns true if no process of this account is in the first container of the sandbox.
    pub(super) async fn is_clear_of(&self, account: u32) -> Result<bool, ControlError> {
        let processes: Vec<Process> = within_patience(self.ask("Processes", &json!(self.sandbox), &[])).await?;
        // The sleeper always exists, so a list without it is not of this container.
        if processes.iter().all(|process| process.pid != 1) {
            return Err(invalid("a list without the first process").into());
        }
        Ok(processes.iter().all(|process| process.uid != account))
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        method: &str,
        about: &Value,
        streams: &[BorrowedFd<'_>],
    ) -> Result<T, ControlError> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A connection that sent bytes without a request is not used again.
        let line = idle.filter(|line| is_silent(line.0.get_ref())).map_or_else(|| self.connect(), Ok)?;
        let question = json!({"method": format!("containerManager.{method}"), "arg": about}).to_string();
        line.put(question.as_bytes(), streams).await?;
        let answer: Answer<T> = line.answer().await?;
        self.keep(line);
        match answer {
            Answer { success: true, result: Some(result), .. } => Ok(result),
            Answer { success: true, .. } => Err(invalid("an answer without a result").into()),
            Answer { mut err, .. } => {
                err.truncate(err.floor_char_boundary(WORDS_BYTES_MAX));
                Err(ControlError::Rejected(err))
            }
        }
    }
}

#[derive(Deserialize)]
struct Answer<T> {
    success: bool,
    err: String,
    result: Option<T>,
}

/// A connection with one request at a time.
struct Line(AsyncFd<OwnedFd>);

impl Line {
    async fn put(&self, question: &[u8], mut streams: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut left = question;
        while !left.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
            let mut beside = SendAncillaryBuffer::new(&mut space);
            if !streams.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(streams)) {
                return Err(invalid("more than three streams"));
            }
            let sent = rustix::net::sendmsg(self.0.get_ref(), &[IoSlice::new(left)], &mut beside, SendFlags::NOSIGNAL);
            match sent {
                Ok(count) => (left, streams) = (left.get(count..).unwrap_or_default(), &[]),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => tokio::time::sleep(ROOM_EVERY).await,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads an answer: one JSON object without anything after it.
    async fn answer<T: DeserializeOwned>(&self) -> io::Result<T> {
        const PART_BYTES: usize = 64 << 10;
        let (mut text, mut depth) = (Vec::new(), Depth::default());
        loop {
            let mut ready = self.0.readable().await?;
            text.reserve(PART_BYTES);
            match rustix::io::read(self.0.get_ref(), rustix::buffer::spare_capacity(&mut text)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) if text.len() > ANSWER_BYTES_MAX => return Err(invalid("an answer without an end")),
                Ok(count) => {
                    let part = text.get(text.len() - count..).unwrap_or_default();
                    if part.iter().any(|byte| depth.ends_with(*byte)) {
                        return Ok(serde_json::from_slice(&text)?);
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
                Err(error) => return Err(error.into()),
            }
            tokio::task::coop::consume_budget().await;
        }
    }
}

/// The nesting depth in a JSON text, so that an answer which comes in many parts is scanned only once.
#[derive(Default)]
struct Depth {
    open: usize,
    in_text: bool,
    is_escaped: bool,
}

impl Depth {
    /// Returns true if this byte ends the object, or is outside of any object.
    fn ends_with(&mut self, byte: u8) -> bool {
        match byte {
            _ if self.is_escaped => self.is_escaped = false,
            b'\\' if self.in_text => self.is_escaped = true,
            b'"' => self.in_text = !self.in_text,
            _ if self.in_text => {}
            b'{' | b'[' => self.open += 1,
            b'}' | b']' => self.open = self.open.saturating_sub(1),
            _ => {}
        }
        self.open == 0
    }
}

async fn within_patience<T>(asking: impl Future<Output = Result<T, ControlError>>) -> Result<T, ControlError> {
    let answered = tokio::time::timeout(PATIENCE, asking).await;
    answered.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

    use super::*;

    /// Returns a control socket, and the other end of its connection.
    fn stand_in() -> (Control, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let control = Control {
            sandbox: "s".into(),
            address: SocketAddrUnix::new("/there/is/nobody").unwrap(),
            _place: None,
            idle: Mutex::new(Some(Line(sys::watched(ours.into(), Interest::READABLE).unwrap()))),
        };
        (control, theirs)
    }

    /// Receives a request and sends this answer.
    fn answer(theirs: &mut UnixStream, answer: &[u8]) -> Value {
        let mut question = vec![0; 10_000];
        let count = theirs.read(&mut question).unwrap();
        // The client may hang up before it has read the whole answer.
        let _ = theirs.write_all(answer);
        serde_json::from_slice(&question[..count]).unwrap()
    }

    /// Returns the result of `is_clear_of` for this answer, and true if the connection is used again.
    async fn is_clear(text: impl Into<Vec<u8>>) -> (Result<bool, String>, bool) {
        let (control, mut theirs) = stand_in();
        let text = text.into();
        let answering = std::thread::spawn(move || answer(&mut theirs, &text));
        let clear = control.is_clear_of(7).await.map_err(|silence| format!("{silence:?}"));
        let is_kept = control.idle.lock().unwrap().is_some();
        drop(control);
        assert_eq!(answering.join().unwrap(), json!({"method": "containerManager.Processes", "arg": "s"}));
        (clear, is_kept)
    }

    #[tokio::test]
    async fn only_an_answer_that_lists_the_first_process_counts() {
        let sleeper = r#"{"uid":5,"pid":1,"ppid":0,"threads":[1],"cmd":"sh"}"#;
        let listed = |more: &str| format!(r#"{{"success":true,"err":"","result":[{sleeper}{more}]}}"#);
        assert_eq!(is_clear(listed("")).await, (Ok(true), true));
        assert_eq!(is_clear(listed(r#",{"uid":5,"pid":2}"#)).await, (Ok(true), true));
        assert_eq!(is_clear(listed(r#",{"uid":7,"pid":9}"#)).await, (Ok(false), true));
        let refused = r#"{"success":false,"err":"no such container","result":null}"#;
        assert_eq!(is_clear(refused).await, (Err(r#"Rejected("no such container")"#.into()), true));
        for other in [
            r#"{"success":true,"err":"","result":null}"#,
            r#"{"success":true,"err":"","result":[]}"#,
            r#"{"success":true,"err":"","result":[{"uid":5,"pid":2}]}"#,
        ] {
            assert!(matches!(is_clear(other).await, (Err(told), true) if told.starts_with("Lost")), "{other}");
        }
    }

    #[tokio::test]
    async fn a_malformed_answer_is_an_error_and_its_connection_is_not_used_again() {
        let unknown = r#"{"success":true,"err":"","result":[{"user":5,"pid":1}]}"#;
        let two = r#"{"success":true,"err":"","result":[]}{"success":true,"err":"","result":[]}"#;
        let endless = [br#"{"success":true,"err":""#.as_slice(), &vec![b'}'; ANSWER_BYTES_MAX + 1]].concat();
        for other in [unknown.into(), two.into(), endless, b"OK".to_vec(), b"{\"success\":tr".to_vec(), Vec::new()] {
            let start = String::from_utf8_lossy(&other).chars().take(50).collect::<String>();
            let (clear, is_kept) = is_clear(other).await;
            assert!(clear.as_ref().is_err_and(|told| told.starts_with("Lost")), "{start}: {clear:?}");
            assert!(!is_kept, "{start}");
        }
    }

    #[tokio::test]
    async fn an_answer_may_come_in_parts_and_say_anything() {
        let (control, mut theirs) = stand_in();
        let told = r#"{"success":false,"err":"}]\" \\{ä","result":null}"#;
        let answering = std::thread::spawn(move || {
            answer(&mut theirs, b"");
            told.as_bytes().iter().for_each(|byte| theirs.write_all(&[*byte]).unwrap());
        });
        let refused = control.status_of(1).await.unwrap_err();
        assert_eq!(refused.to_string(), "}]\" \\{ä");
        answering.join().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_an_answer_times_out_and_drops_the_connection() {
        let (control, _theirs) = stand_in();
        let clear = control.is_clear_of(7).await;
        assert!(
            matches!(&clear, Err(ControlError::Lost(error)) if error.kind() == io::ErrorKind::TimedOut),
            "{clear:?}"
        );
        assert!(control.idle.lock().unwrap().is_none());
    }

    #[tokio::test]
    async fn a_connection_with_an_unsolicited_answer_is_not_used() {
        let (control, mut theirs) = stand_in();
        theirs.write_all(br#"{"success":true,"err":"","result":[{"uid":5,"pid":1}]}"#).unwrap();
        // A new connection is tried, but no socket is at this address.
        let clear = control.is_clear_of(7).await;
        assert!(
            matches!(&clear, Err(ControlError::Lost(error)) if error.kind() == io::ErrorKind::NotFound),
            "{clear:?}"
        );
    }

    #[tokio::test]
    async fn a_process_gets_three_streams_and_no_rights() {
        let (control, theirs) = stand_in();
        let answering = std::thread::spawn(move || {
            let mut text = vec![0; 10_000];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
            let mut beside = rustix::net::RecvAncillaryBuffer::new(&mut space);
            let mut into = [io::IoSliceMut::new(&mut text)];
            let flags = rustix::net::RecvFlags::CMSG_CLOEXEC;
            let count = rustix::net::recvmsg(&theirs, &mut into, &mut beside, flags).unwrap().bytes;
            let streams = beside.drain().map(|part| match part {
                rustix::net::RecvAncillaryMessage::ScmRights(streams) => streams.count(),
                _ => panic!("something else came"),
            });
            let streams = streams.sum::<usize>();
            (&theirs).write_all(br#"{"success":true,"err":"","result":12}"#).unwrap();
            (serde_json::from_slice::<Value>(&text[..count]).unwrap(), streams)
        });
        let doing = Doing {
            words: vec!["echo".into(), "ä\n".into()],
            environment: vec!["A=b".into()],
            folder: Path::new("/w"),
            user: AGENT,
            open_files: Some(5),
            has_terminal: false,
        };
        let nothing = fs::File::open("/dev/null").unwrap();
        assert_eq!(control.start(&doing, [nothing.as_fd(); 3]).await.unwrap(), 12);
        let no_rights =
            json!({"PermittedCaps": 0, "InheritableCaps": 0, "EffectiveCaps": 0, "BoundingCaps": 0, "AmbientCaps": 0});
        let order = json!({
            "argv": ["echo", "ä\n"], "envv": ["A=b"], "wd": "/w", "KUID": 2_000_000_000, "KGID": 2_000_000_000,
            "Capabilities": no_rights, "NoNewPrivileges": true, "StdioIsPty": false, "GuestFDs": [0, 1, 2], "ContainerID": "s",
        });
        let asked = json!({"method": "containerManager.ExecuteAsync", "arg": order});
        assert_eq!(answering.join().unwrap(), (asked, 3));
    }

    #[tokio::test]
    async fn a_long_request_is_sent_whole_and_its_streams_once() {
        let (control, mut theirs) = stand_in();
        let words = vec!["x".repeat(1_000_000)];
        let answering = std::thread::spawn(move || {
            let (mut depth, mut part, mut length) = (Depth::default(), vec![0; 4096], 0);
            loop {
                let count = theirs.read(&mut part).unwrap();
                length += count;
                if part[..count].iter().any(|byte| depth.ends_with(*byte)) {
                    break;
                }
            }
            theirs.write_all(br#"{"success":false,"err":"too long","result":null}"#).unwrap();
            length > 1_000_000
        });
        let folder = Path::new("/");
        let doing = Doing { words, environment: vec![], folder, user: AGENT, open_files: None, has_terminal: false };
        let nothing = fs::File::open("/dev/null").unwrap();
        let refused = control.start(&doing, [nothing.as_fd(); 3]).await.unwrap_err();
        assert_eq!((refused.to_string().as_str(), answering.join().unwrap()), ("too long", true));
    }

    #[tokio::test]
    async fn a_listener_that_only_took_the_sandboxs_name_is_refused() {
        let sandbox = format!("wieldy-test-{}", std::process::id());
        let name = format!("runsc-sandbox.{sandbox}\0");
        let _taken = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
        let root = tempfile::tempdir().unwrap();
        assert!(Control::at(&sandbox, root.path()).is_err());
        let _named = UnixListener::bind(root.path().join(format!("runsc-{sandbox}.sock"))).unwrap();
        let refused = Control::at(&sandbox, root.path()).err().map(|error| error.kind());
        assert_eq!(refused, Some(io::ErrorKind::PermissionDenied));
    }
}
