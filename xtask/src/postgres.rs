//! A PostgreSQL server for the tests of the history: made for one command, in a folder of its own, and removed
//! afterwards.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The environment variable with the address of the server for tests. The user is a superuser.
pub(crate) const ADDRESS: &str = "WIELDY_TEST_POSTGRES";

/// A server that runs until it is dropped.
pub(crate) struct Server {
    process: Child,
    folder: PathBuf,
    port: u16,
}

/// Runs a command with a server, for `cargo xtask postgres -- COMMAND…`.
pub(crate) fn run(command: &[String]) -> Result<()> {
    let [program, arguments @ ..] = command else { bail!("say what to run: `cargo xtask postgres -- COMMAND…`") };
    let server = Server::start().context("cannot start a PostgreSQL server")?;
    let status = Command::new(program).args(arguments).env(ADDRESS, server.address()).status();
    let status = status.with_context(|| format!("cannot start `{program}`"))?;
    if !status.success() {
        bail!("`{program}` ended with {status}");
    }
    Ok(())
}

impl Server {
    /// Makes a new server with the durability settings of production, and waits until it answers.
    pub(crate) fn start() -> Result<Self> {
        let programs = programs()?;
        let folder = std::env::temp_dir().join(format!("wieldy-postgres-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        // The server refuses to run as root; Debian's package creates a user for it.
        let owner = is_root().then_some("postgres");
        if let Some(owner) = owner {
            succeeds(Command::new("chown").arg(owner).arg(&folder))?;
        }
        let data = folder.join("data");
        let mut made = run_as(owner, &programs.join("initdb"));
        made.args(["--auth=trust", "--username=wieldy", "--encoding=UTF8", "--locale=C", "--no-instructions", "-D"]);
        succeeds(made.arg(&data))?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut server = run_as(owner, &programs.join("postgres"));
        server.arg("-D").arg(&data).arg("-k").arg(&folder).args(["-h", "127.0.0.1", "-p", &port.to_string()]);
        // Each test has a database of its own, and some open many connections.
        server.args(["-c", "fsync=on", "-c", "max_connections=300", "-c", "logging_collector=off"]);
        let log = fs::File::create(folder.join("log"))?;
        let process = server.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()?;
        let mut started = Self { process, folder, port };
        started.wait_until_it_answers(&programs)?;
        Ok(started)
    }

    pub(crate) fn address(&self) -> String {
        format!("postgres://wieldy@127.0.0.1:{}/postgres", self.port)
    }

    fn wait_until_it_answers(&mut self, programs: &Path) -> Result<()> {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(30) {
            let mut asked = Command::new(programs.join("pg_isready"));
            asked.args(["-q", "-h", "127.0.0.1", "-p", &self.port.to_string()]);
            if asked.status()?.success() {
                return Ok(());
            }
            if let Some(status) = self.process.try_wait()? {
                bail!("it ended with {status}: {}", fs::read_to_string(self.folder.join("log"))?);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        bail!("it does not answer")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGQUIT stops the server at once; its data is not needed any more.
        let _ = Command::new("kill").args(["-QUIT", &self.process.id().to_string()]).status();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Returns the folder with the server's programs, and tries to install them if they are missing.
fn programs() -> Result<PathBuf> {
    let find = || {
        let mut found: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
            .into_iter()
            .flatten()
            .flatten()
            .map(|version| version.path().join("bin"))
            .filter(|bin| bin.join("initdb").exists())
            .collect();
        found.sort();
        found.pop()
    };
    if let Some(bin) = find() {
        return Ok(bin);
    }
    eprintln!("PostgreSQL is missing; installing it by apt-get");
    let options = ["-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", "postgresql"];
    let quiet = || Stdio::null();
    let _ = Command::new("apt-get").args(options).stdin(quiet()).stdout(quiet()).stderr(quiet()).status();
    find().context("there is no PostgreSQL here: install the Debian package `postgresql`")
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|id| id.stdout.trim_ascii() == b"0")
}

fn run_as(user: Option<&str>, program: &Path) -> Command {
    // `setpriv` executes the program in its own process, so the process id is the server's. The server is killed when
    // this process ends, in any way.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    if let Some(user) = user {
        command.args(["--reuid", user, "--regid", user, "--clear-groups"]);
    }
    command.arg("--").arg(program).current_dir("/");
    command
}

fn succeeds(command: &mut Command) -> Result<()> {
    let done = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {command:?}"))?;
    if !done.status.success() {
        bail!("{command:?} ended with {}: {}", done.status, String::from_utf8_lossy(&done.stderr));
    }
    Ok(())
}
