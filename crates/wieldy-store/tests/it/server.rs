//! A PostgreSQL server of one test, which can be stopped.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use wieldy_store::{Address, Store};

use crate::world::shared_server;

/// A PostgreSQL server of one test, which can be stopped.
pub(crate) struct Server {
    process: Option<Child>,
    folder: tempfile::TempDir,
    programs: PathBuf,
    port: u16,
}

impl Server {
    /// Starts a new server, if there is a shared one as well.
    pub(crate) fn start() -> Option<Self> {
        shared_server()?;
        let versions = std::fs::read_dir("/usr/lib/postgresql").unwrap();
        let programs = versions.map(|version| version.unwrap().path().join("bin")).max().unwrap();
        let folder = tempfile::tempdir().unwrap();
        if is_root() {
            assert!(Command::new("chown").arg("postgres").arg(folder.path()).status().unwrap().success());
        }
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut server = Self { process: None, folder, programs, port };
        let mut made = server.command("initdb");
        made.args(["--auth=trust", "--username=wieldy", "--encoding=UTF8", "--locale=C", "-D"]).arg(server.data());
        let made = made.output().unwrap();
        assert!(made.status.success(), "{made:?}");
        server.begin();
        Some(server)
    }

    /// Adds a file to the server's data, readable by its user only.
    pub(crate) fn add(&self, name: &str, content: &str) {
        let path = self.data().join(name);
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        if is_root() {
            assert!(Command::new("chown").arg("postgres").arg(&path).status().unwrap().success());
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn address(&self) -> Address {
        format!("postgres://wieldy@127.0.0.1:{}/postgres", self.port).parse().unwrap()
    }

    pub(crate) fn store(&self) -> Store {
        Store::open(&self.address()).unwrap()
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Returns a command that runs as Debian's `postgres` user, because a server refuses to run as root, and that dies
    /// with this process.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if is_root() {
            command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups"]);
        }
        command.arg("--").arg(self.programs.join(program)).current_dir("/").stdin(Stdio::null());
        command
    }

    /// Starts the server and waits until it answers.
    pub(crate) fn begin(&mut self) {
        let mut server = self.command("postgres");
        server.arg("-D").arg(self.data()).arg("-k").arg(self.folder.path());
        server.args(["-h", "127.0.0.1", "-p", &self.port.to_string()]);
        // After a crash the server syncs a thousand files, one by one by default.
        server.args(["-c", "recovery_init_sync_method=syncfs"]);
        self.process = Some(server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        let began = Instant::now();
        let answers = || {
            let port = self.port.to_string();
            let asked =
                Command::new(self.programs.join("pg_isready")).args(["-q", "-h", "127.0.0.1", "-p", &port]).status();
            asked.unwrap().success()
        };
        while !answers() {
            assert!(began.elapsed() < Duration::from_secs(60), "the server does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills the server as a power failure would.
    pub(crate) fn crash(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        signal("-CONT", &processes(process.id()));
        signal("-QUIT", &[process.id()]);
        process.wait().unwrap();
    }

    /// Stops or continues all processes of the server.
    pub(crate) fn freeze(&self, frozen: bool) {
        let id = self.process.as_ref().unwrap().id();
        signal(if frozen { "-STOP" } else { "-CONT" }, &processes(id));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.crash();
    }
}

/// Returns a process and its children.
fn processes(id: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    std::iter::once(id).chain(children.split_whitespace().map(|id| id.parse().unwrap())).collect()
}

fn signal(signal: &str, processes: &[u32]) {
    Command::new("kill").arg(signal).args(processes.iter().map(u32::to_string)).stderr(Stdio::null()).status().unwrap();
}

fn is_root() -> bool {
    std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(Path::new("/proc/self")).unwrap()) == 0
}
