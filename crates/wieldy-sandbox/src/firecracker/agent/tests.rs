//! The agent as a process of this machine, spoken to frame by frame.

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use super::super::sync::{Entry, Now};
use super::*;
use crate::wire::{RunLimits, RunOrder, RunReport};

/// Nothing here takes this long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

struct World {
    process: Child,
    folder: tempfile::TempDir,
}

impl World {
    fn new(user: Option<&str>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("copy")).unwrap();
        // Another user must come to it.
        fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let mut command = Command::new("/proc/self/exe");
        command.arg0("/sbin/wieldy-guest").arg(folder.path().join("socket")).arg(folder.path().join("copy"));
        let process = command.args(user).env_clear().spawn().unwrap();
        Self { process, folder }
    }

    fn connect(&self) -> UnixStream {
        let began = Instant::now();
        loop {
            match UnixStream::connect(self.folder.path().join("socket")) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    return stream;
                }
                Err(error) => assert!(began.elapsed() < PATIENCE, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A connection through which a script runs.
    fn run(&self, script: &str, terminal: Option<(u16, u16)>) -> UnixStream {
        let mut stream = self.connect();
        let order = RunOrder {
            program: "bash".into(),
            arguments: vec!["-c".into(), script.into()],
            environment: vec![("PATH".into(), "/usr/bin:/bin".into())],
            workspace: PathBuf::new(),
            folder: PathBuf::new(),
            grace_ms: 100,
            terminal,
            limits: RunLimits::default(),
        };
        frames::tell(&mut stream, Kind::Run, &Run { order, has_input: true }).unwrap();
        stream
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// What comes up to the end: what was printed and how it ended.
fn rest(stream: &mut UnixStream) -> (String, Result<RunReport, String>) {
    let mut printed = Vec::new();
    loop {
        let frame = frames::receive(stream).unwrap();
        match frame.kind {
            Kind::Output => printed.extend(frame.bytes),
            Kind::Taken => {}
            Kind::Ended => {
                let BerthReport::Ended(report) = frame.message().unwrap() else { panic!("it did not start") };
                return (String::from_utf8(printed).unwrap(), Ok(report));
            }
            Kind::Failed => {
                return (String::from_utf8(printed).unwrap(), Err(String::from_utf8(frame.bytes).unwrap()));
            }
            kind => panic!("{kind:?}"),
        }
    }
}

#[test]
fn what_makes_no_sense_is_refused_and_the_next_one_is_served() {
    let world = World::new(None);
    let told = |bytes: &[u8]| {
        let mut stream = world.connect();
        stream.write_all(bytes).unwrap();
        rest(&mut stream).1.unwrap_err()
    };
    assert_eq!(told(&[99, 0, 0, 0, 0]), "the other side sent a frame of the unknown kind 99");
    assert_eq!(told(&[Kind::Output as u8, 0, 0, 0, 0]), "the other side sent a frame Output at the beginning");
    let no_message = told(&[Kind::Run as u8, 1, 0, 0, 0, b'{']);
    assert!(no_message.starts_with("the other side sent a frame that is no message: EOF"), "{no_message}");
    drop(world.connect());
    let mut half = world.connect();
    half.write_all(&[Kind::Run as u8, 200, 0, 0, 0, b'{']).unwrap();
    drop(half);
    let (printed, report) = rest(&mut world.run("echo still here; exit 3", None));
    assert_eq!((printed.as_str(), report.unwrap().status >> 8), ("still here\n", 3));
}

#[test]
fn a_connection_that_breaks_or_makes_no_sense_ends_its_command() {
    let world = World::new(None);
    for ending in [None, Some(Kind::Sync), Some(Kind::Input)] {
        let mut stream = world.run("trap '' TERM; (setsid sleep 1000 &); echo $$; while :; do sleep 1; done", None);
        let first = frames::receive(&mut stream).unwrap();
        let process = format!("/proc/{}", String::from_utf8(first.bytes).unwrap().trim());
        assert!(Path::new(&process).exists());
        match ending {
            None => drop(stream),
            Some(Kind::Input) => {
                // More than the pipe takes, and then still more without having been asked.
                for _ in 0..3 {
                    frames::send(&mut stream, Kind::Input, &[0; CONTENT_BYTES_MAX]).unwrap();
                }
                assert_eq!(rest(&mut stream).1.unwrap_err(), "the other side sent a frame Input while a command runs");
            }
            Some(kind) => {
                frames::send(&mut stream, kind, &[]).unwrap();
                assert_eq!(rest(&mut stream).1.unwrap_err(), "the other side sent a frame Sync while a command runs");
            }
        }
        let began = Instant::now();
        while Path::new(&process).exists() {
            assert!(began.elapsed() < PATIENCE, "the command goes on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn commands_run_as_the_account_that_the_workspace_belongs_to() {
    if !process::geteuid().is_root() {
        let _ = writeln!(io::stderr(), "SKIPPED: only root can become another user");
        return;
    }
    let world = World::new(Some("4321"));
    let mut stream = world.connect();
    frames::send(&mut stream, Kind::Sync, &[]).unwrap();
    assert_eq!(frames::receive(&mut stream).unwrap().kind, Kind::Done);
    let entries = [
        ("folder", Now::Folder { permissions: 0o700 }),
        ("folder/file", Now::File { permissions: 0o600 }),
        ("link", Now::Link { target: "folder/file".into() }),
    ];
    for (path, now) in entries {
        let is_file = matches!(now, Now::File { .. });
        frames::tell(&mut stream, Kind::Entry, &Entry { path: path.into(), now }).unwrap();
        for part in [&b"hello\n"[..], b""].into_iter().filter(|_| is_file) {
            frames::send(&mut stream, Kind::Content, part).unwrap();
        }
    }
    frames::send(&mut stream, Kind::Done, &[]).unwrap();
    assert_eq!(frames::receive(&mut stream).unwrap().kind, Kind::Done);
    for path in ["folder", "folder/file", "link"] {
        let found = fs::symlink_metadata(world.folder.path().join("copy").join(path)).unwrap();
        assert_eq!((found.uid(), found.gid()), (4321, 4321), "{path}");
    }
    let script = "id -u; id -g; id -G; cat link; grep -h CapEff /proc/self/status; (: > /etc/x) 2>/dev/null || echo no";
    let (printed, report) = rest(&mut world.run(script, None));
    assert_eq!(printed, "4321\n4321\n4321\nhello\nCapEff:\t0000000000000000\nno\n");
    assert_eq!(report.unwrap().status, 0);
}

#[test]
fn a_command_may_have_a_terminal() {
    let world = World::new(None);
    let mut stream =
        world.run("test -t 0 -a -t 1 -a -t 2 && stty size && read line && echo \"got $line\"", Some((11, 77)));
    frames::send(&mut stream, Kind::Input, b"word\n").unwrap();
    let (printed, report) = rest(&mut stream);
    let mut lines: Vec<_> = printed.lines().map(str::trim).collect();
    // The terminal shows what is typed when it gets it.
    lines.retain(|line| *line != "word");
    assert_eq!((lines, report.unwrap().status), (vec!["11 77", "got word"], 0));
}
