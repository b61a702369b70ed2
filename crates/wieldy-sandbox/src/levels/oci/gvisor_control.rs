//! The control socket of a gVisor sandbox: where `runsc` itself asks for a process to be started, how it ended and who is there, asked
//! without starting `runsc`, which takes longer than most commands.
//!
//! What a sandbox listens to is no promise of gVisor's. So each sandbox is tried once, when it stands, by a process that looks at itself
//! ([`Control::of`]). Where that does not come out as it should, the program `runsc` is called for everything: a slower way to the same end.
//! A sandbox that was found to answer and then does not is not asked in another way, but ended by whoever asked.
//!
//! At the other end is gVisor's kernel, which may be in the hands of a program that has broken it: an answer has its time and its length, a
//! connection on which something went wrong or was not waited for is never used again, and nothing is handed over but a command's streams.

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

/// How long an answer may take, but for how a process ended.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long it may be: as long as a list of as many processes as gVisor has numbers for.
const ANSWER_BYTES_MAX: usize = 8 << 20;

/// How much of a sandbox's own words is passed on.
const WORDS_BYTES_MAX: usize = 4096;

/// How often we look for room in a socket that is full.
const ROOM_EVERY: Duration = Duration::from_millis(1);

/// A sandbox that answers.
pub(super) struct Control {
    sandbox: String,
    address: SocketAddrUnix,
    /// What the address leads through, where it is a path.
    _place: Option<OwnedFd>,
    /// A connection on which every question was answered.
    idle: Mutex<Option<Line>>,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum ControlError {
    /// There is one: that it cannot be, in the sandbox's own words.
    #[error("{0}")]
    Rejected(String),
    /// None came, or none that is one.
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
    /// The control socket of a sandbox of the runtime with this root, if it does what we ask: runs a process that must find out that it is
    /// the agent, may do nothing, and has the words and the environment that it was given.
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

    /// Newer versions of gVisor have a file for a socket.
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
            // A path as short as an address must be.
            let path = root.join(format!("runsc-{sandbox}.sock"));
            let place = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
            let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", place.as_raw_fd()))?;
            control(address, Some(place))
        })
    }

    fn connect(&self) -> io::Result<Line> {
        // Not waited for: who listens has room for those who come.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &self.address)?;
        // Anybody could have taken a name that is free; but only we put processes into the sandbox's cgroup.
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

    /// Starts a process with these streams, and says by which number [`Control::status_of`] knows it.
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
            // Known to newer versions only, which want to be told.
            "NoNewPrivileges": true,
            "GuestFDs": [0, 1, 2],
        });
        within_patience(self.ask("ExecuteAsync", &order, &streams)).await
    }

    /// Waits until a process that was started here has ended, and says how, as `wait` does.
    pub(super) async fn status_of(&self, pid: i32) -> Result<i32, ControlError> {
        self.ask("WaitPID", &json!({"PID": pid, "CID": self.sandbox}), &[]).await
    }

    /// Signals whoever is in the foreground of the terminal of a process that was started here.
    pub(super) async fn signal_foreground(&self, pid: i32, signal: Signal) -> Result<(), ControlError> {
        const FOREGROUND: u32 = 2;
        let about = json!({"CID": self.sandbox, "PID": pid, "Signo": signal.as_raw(), "Mode": FOREGROUND});
        let asking = self.ask::<IgnoredAny>("Signal", &about, &[]);
        within_patience(asking).await.map(drop)
    }

    /// Runs something short whose input and output do not matter.
    pub(super) async fn run(&self, doing: &Doing<'_>) -> Result<i32, ControlError> {
        let nothing = fs::File::options().read(true).write(true).open("/dev/null")?;
        let pid = self.start(doing, [nothing.as_fd(); 3]).await?;
        within_patience(self.status_of(pid)).await
    }

    /// Whether nobody of this account lives in the first container of the sandbox.
    pub(super) async fn is_clear_of(&self, account: u32) -> Result<bool, ControlError> {
        let processes: Vec<Process> = within_patience(self.ask("Processes", &json!(self.sandbox), &[])).await?;
        // The sleeper is always there: who does not know it speaks of something else.
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
        // Whatever was said unasked is no answer to anything.
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

/// A connection: one question after the other, each with its answer before the next.
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

    /// The answer is an object without anything after it.
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

/// How deep inside an object a text is: so an answer is looked through once, in however many parts it comes.
#[derive(Default)]
struct Depth {
    open: usize,
    in_text: bool,
    is_escaped: bool,
}

impl Depth {
    /// Whether this is the last byte of the object, or none of an object.
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

    /// A control socket with ourselves at the other end.
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

    /// Takes a question and gives this answer.
    fn answer(theirs: &mut UnixStream, answer: &[u8]) -> Value {
        let mut question = vec![0; 10_000];
        let count = theirs.read(&mut question).unwrap();
        // Who has heard enough does not wait for the rest.
        let _ = theirs.write_all(answer);
        serde_json::from_slice(&question[..count]).unwrap()
    }

    /// What comes of asking who is there, if this is the answer; and whether the connection is used again.
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
    async fn only_an_answer_that_knows_the_sleeper_counts() {
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
    async fn what_is_no_answer_is_not_waited_for_and_nothing_else_is_asked_there() {
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
    async fn an_answer_that_does_not_come_is_not_waited_for() {
        let (control, _theirs) = stand_in();
        let clear = control.is_clear_of(7).await;
        assert!(
            matches!(&clear, Err(ControlError::Lost(error)) if error.kind() == io::ErrorKind::TimedOut),
            "{clear:?}"
        );
        assert!(control.idle.lock().unwrap().is_none());
    }

    #[tokio::test]
    async fn what_is_said_unasked_is_no_answer() {
        let (control, mut theirs) = stand_in();
        theirs.write_all(br#"{"success":true,"err":"","result":[{"uid":5,"pid":1}]}"#).unwrap();
        // Somebody else is asked instead, and there is nobody.
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
    async fn a_long_question_goes_over_whole_and_its_streams_once() {
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
    async fn who_has_only_taken_the_name_is_not_asked() {
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
