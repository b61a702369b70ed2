//! Tests the agent as a process of this machine, frame by frame.

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use super::super::sync::{Entry, Now};
use super::*;
use crate::supervise::protocol::{RunLimits, RunOrder, RunReport};

/// A timeout far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

struct World {
    process: Child,
    folder: tempfile::TempDir,
}

impl World {
    fn new(user: Option<&str>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("copy")).unwrap();
        // Another user must be able to enter it.
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

    /// Starts a script and returns its connection.
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
            is_raw: false,
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

/// Receives frames up to the end. Returns the output and the report.
fn rest(stream: &mut UnixStream) -> (String, Result<RunReport, String>) {
    let mut printed = Vec::new();
    loop {
        let frame = frames::receive(stream).unwrap();
        match frame.kind {
            Kind::Output | Kind::Complaint => printed.extend(frame.bytes),
            Kind::Taken => {}
            Kind::Ended => {
                let SupervisorReport::Ended(report) = frame.message().unwrap() else { panic!("it did not start") };
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
fn a_malformed_request_is_refused_and_the_next_one_is_served() {
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
                // More than the pipe holds, and then more without waiting for `Taken`.
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
fn input_is_accepted_even_if_the_command_does_not_read_it() {
    let world = World::new(None);
    let mut stream = world.run("exec <&-; echo closed; while :; do sleep 1; done", None);
    assert_eq!(frames::receive(&mut stream).unwrap().bytes, b"closed\n");
    for _ in 0..3 {
        frames::send(&mut stream, Kind::Input, b"for nobody").unwrap();
        assert_eq!(frames::receive(&mut stream).unwrap().kind, Kind::Taken);
    }
    frames::send(&mut stream, Kind::Stop, &[]).unwrap();
    assert_eq!(rest(&mut stream).1.unwrap().status, libc::SIGTERM);
}

#[test]
fn commands_run_as_the_account_that_the_workspace_belongs_to() {
    if !process::geteuid().is_root() {
        wieldy_testkit::skip("only root can become another user");
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
    // The terminal echoes the input whenever it comes.
    lines.retain(|line| *line != "word");
    assert_eq!((lines, report.unwrap().status), (vec!["11 77", "got word"], 0));
}

/// The path of the workspace in the test below.
const WORKSPACE: &str = "/home/ada/project";

/// Runs in a machine of `cargo xtask vm` whose first process is the agent, with a root file system and a disk as in a
/// guest of Firecracker. The virtual socket is the machine's own, so that the test can be at its other end.
#[test]
fn as_the_first_process_of_a_machine() {
    if std::env::var_os("WIELDY_TEST_GUEST").is_none() {
        wieldy_testkit::skip("it takes a machine of `cargo xtask vm`");
        return;
    }
    let connect = || -> UnixStream {
        let began = Instant::now();
        loop {
            match sys::connect_to_self(PORT) {
                // A connected stream works alike for every kind of socket.
                Ok(socket) => return socket.into(),
                Err(error) => assert!(began.elapsed() < 3 * PATIENCE, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let mut stream = connect();
    let order = Prepare { workspace: WORKSPACE.into(), room_bytes: 64 << 20, room_files: 1000 };
    frames::tell(&mut stream, Kind::Prepare, &order).unwrap();
    let ready = frames::receive(&mut stream).unwrap().expect(Kind::Ready).unwrap();
    assert_eq!(String::from_utf8(ready.bytes).unwrap(), env!("CARGO_PKG_VERSION"));

    let here = Path::new("/workspace");
    fs::create_dir(here).unwrap();
    fs::write(here.join("in"), "from outside\n").unwrap();
    let room = sync::Room { bytes: 1 << 20, files: 100, path_bytes: 1 << 20 };
    let mut ours = sync::Ours::new(here, Vec::new(), Vec::new(), room).unwrap();
    assert_eq!(ours.sync(&mut connect()).unwrap(), []);
    let run = |program: &str, words: &[&str]| {
        let mut stream = connect();
        let order = RunOrder {
            program: program.into(),
            arguments: words.iter().map(|&word| word.into()).collect(),
            environment: vec![("PATH".into(), "/bin".into())],
            workspace: PathBuf::new(),
            folder: PathBuf::new(),
            grace_ms: 100,
            terminal: None,
            is_raw: false,
            limits: RunLimits { open_files: Some(64), ..RunLimits::default() },
        };
        frames::tell(&mut stream, Kind::Run, &Run { order, has_input: false }).unwrap();
        let (printed, report) = rest(&mut stream);
        (printed, report.map(|report| report.status))
    };
    let sh = |script: &str| run("sh", &["-c", script]);
    assert_eq!(
        sh("pwd; id -u; id -g; cat in; ulimit -n"),
        (format!("{WORKSPACE}\n1000\n1000\nfrom outside\n64\n"), Ok(0))
    );
    let (printed, status) = sh("echo out > made; mkdir deep; echo x > deep/er; ls -ln made | cut -d' ' -f1");
    assert_eq!((printed.as_str(), status), ("-rw-r--r--\n", Ok(0)));
    assert_eq!(ours.sync(&mut connect()).unwrap(), []);
    let read = |path: &str| fs::read_to_string(here.join(path)).unwrap();
    assert_eq!((read("made").as_str(), read("deep/er").as_str()), ("out\n", "x\n"));

    // The root is read-only and private folders are writable. Only harmless devices exist, and nothing in the kernel's
    // files can be changed.
    let tried = "for path in / /bin /sbin /etc /proc/sys/kernel /dev /run; do (: > $path/x) 2>/dev/null && echo $path; done; \
                 for path in /tmp /var/tmp /dev/shm /home/agent; do (: > $path/x) || echo $path; done; \
                 ls /dev | tr '\\n' ' '; grep -c . /proc/mounts > /dev/null; grep NoNewPrivs /proc/self/status; \
                 grep CapEff /proc/self/status";
    let (printed, status) = sh(tried);
    let devices = "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero ";
    let expected = format!("{devices}NoNewPrivs:\t1\nCapEff:\t0000000000000000\n");
    assert_eq!((printed, status), (expected, Ok(0)));

    // A command can kill its own processes but not the agent, and its leftover processes are killed.
    let (_, status) = sh("(setsid sleep 1000 &); kill -9 1; kill -9 -1");
    assert_eq!(status, Err("its supervisor was killed".into()));
    let (printed, status) = sh("(setsid sleep 1000 &); echo left");
    assert_eq!((printed.as_str(), status), ("left\n", Ok(0)));
    assert_eq!(sh("ps -o comm | grep -c sleep; id -u").0, "0\n1000\n");
}
