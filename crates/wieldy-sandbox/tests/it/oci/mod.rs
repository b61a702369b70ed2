//! Tests the levels with an OCI runtime, with the real runc and runsc. If one is missing, its tests print that and
//! pass.
//!
//! These tests are in addition to the suite of all levels; `suite.rs` lists the cases of it that these levels cannot
//! pass.

/// Makes a test of each function for each of the runtimes.
macro_rules! with_each_runtime {
    ($($name:ident)*) => {
        mod runc {
            $(#[tokio::test] async fn $name() { super::$name(super::Level::Runc).await })*
        }
        mod gvisor {
            $(#[tokio::test] async fn $name() { super::$name(super::Level::Gvisor).await })*
        }
    };
}

mod entering;
mod figures;
mod images;
mod nesting;
pub(crate) mod suite;

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use wieldy_core::{
    CallError, Code, Confinement, Ended, Enforcement, Enforcer, Level, Limit, Network, Overrun, Place, ResourceLimits,
    Sandbox, SandboxError, SessionKey, Terminal,
};
use wieldy_sandbox::{IdleLimits, Oci, OciOptions, OciProblem};

use crate::world::{PATIENCE, World, eventually};

/// A driver with a state folder of its own, which must be empty at the end.
struct Driver {
    oci: Arc<Oci>,
    state: tempfile::TempDir,
}

impl Driver {
    fn new(level: Level) -> Option<Self> {
        Self::with(level, |options| options)
    }

    fn with(level: Level, change: impl FnOnce(OciOptions) -> OciOptions) -> Option<Self> {
        if !is_there(level) {
            return None;
        }
        let state = tempfile::tempdir().unwrap();
        let oci = Oci::new(change(OciOptions::new(level, state.path().to_owned())));
        Some(Self { oci: Arc::new(oci), state })
    }

    fn world(&self, program: &str, arguments: &[&str]) -> World {
        let mut world = World::new(program, arguments);
        world.sandbox = self.oci.clone();
        world.confinement.network = Network::None;
        world
    }

    fn bash(&self, script: &str) -> World {
        self.world("bash", &["-c", script])
    }

    /// Returns a command in the session and the workspace of another one.
    fn bash_beside(&self, first: &World, script: &str) -> World {
        let mut world = self.bash(script);
        world.confinement = first.confinement.clone();
        world
    }

    /// Drops the driver, and asserts that nothing is left of it.
    async fn close(self) {
        let Self { oci, state } = self;
        drop(oci);
        nothing_is_left(state.path()).await;
    }
}

/// Waits until nothing is left of a driver.
pub(crate) async fn nothing_is_left(state: &Path) {
    let path = state.to_str().unwrap().to_owned();
    let started = std::time::Instant::now();
    while started.elapsed() < PATIENCE && !traces(&path).is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(traces(&path), Vec::<String>::new(), "traces are left");
}

/// Returns true if this level has a runtime that this user may use; prints the reason if not.
pub(crate) fn is_there(level: Level) -> bool {
    let program = if level == Level::Gvisor { "runsc" } else { level.as_str() };
    let is_there = ["/usr/sbin", "/usr/bin"].iter().any(|folder| Path::new(folder).join(program).exists());
    let is_root = rustix::process::geteuid().is_root();
    if !is_there {
        wieldy_testkit::skip(&format!("there is no `{program}` on this machine"));
    } else if !is_root {
        wieldy_testkit::skip(&format!("`{program}` needs root"));
    }
    is_there && is_root
}

/// Returns the processes, mounts, files and cgroups of a driver with this state folder.
fn traces(state: &str) -> Vec<String> {
    let mut found = cgroups_of(std::process::id());
    found.extend(processes_of(state));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    found.extend(mounts.lines().filter(|line| line.contains(state)).map(str::to_owned));
    let files = fs::read_dir(state).into_iter().flatten().flatten().map(|entry| entry.path().display().to_string());
    found.extend(files.filter(|path| !path.ends_with("/images")));
    found
}

fn processes_of(state: &str) -> Vec<String> {
    let processes = fs::read_dir("/proc").unwrap().flatten().filter(|entry| entry.file_name() != "self");
    let lines = processes.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(state)).collect()
}

fn cgroups_of(process: u32) -> Vec<String> {
    cgroups_named(&format!("wieldy-{process}-"))
}

/// Returns all cgroups whose names begin with this.
fn cgroups_named(name: &str) -> Vec<String> {
    fn search(folder: &Path, name: &str, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if entry.file_name().to_string_lossy().starts_with(name) {
                found.push(entry.path().display().to_string());
            }
            search(&entry.path(), name, found);
        }
    }
    let mut found = Vec::new();
    search(Path::new("/sys/fs/cgroup"), name, &mut found);
    found
}

/// Prints a line to the person who runs the tests.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn session(name: &str) -> Place {
    Place::Session(SessionKey { tenant: None, agent: "agent".into(), session: name.into() })
}

with_each_runtime! {
    a_command_that_is_stopped_is_ended_with_its_whole_tree
    processes_that_a_command_leaves_behind_are_killed
    a_session_keeps_its_private_files_and_a_call_of_its_own_does_not
    commands_in_one_session_can_run_at_once
    the_agent_is_nobody_and_its_files_are_the_owners
    the_machine_is_hidden_and_cannot_be_changed
    there_is_no_network
    too_much_memory_is_an_overrun
    too_much_in_the_workspace_is_an_overrun
    files_that_the_user_replaces_stay_masked_and_protected
    a_driver_tells_of_its_sandboxes_and_destroys_them
    an_idle_sandbox_goes_away
    a_lost_sandbox_is_replaced
    a_command_can_have_a_terminal
    dropping_the_future_ends_the_command
    leftovers_of_a_killed_executor_are_swept
    a_runtime_that_works_says_its_version
}

/// A script that prints the names of the agent's other processes in a session.
const OTHERS: &str = "for p in /proc/[0-9]*; do [ ${p#/proc/} = $$ ] || [ ! -O $p ] || echo $(<$p/comm); done";

async fn a_command_that_is_stopped_is_ended_with_its_whole_tree(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let script = "(trap '' TERM; setsid setsid bash -c 'trap \"\" TERM; (sleep 1000 <&- >&- 2>&- &); exec sleep 1000' &); \
                  sleep 0.3; echo ready; sleep 1000";
    let mut world = driver.bash(script);
    world.confinement.place = session("s");
    let (world, running) = world.start();
    world.printed.contains("ready").await;
    world.stop.cancel();
    let ended = running.await.unwrap().unwrap().ended;
    assert!(matches!(ended, Ended::Signal(9 | 15)), "{ended:?}");
    assert_eq!(driver.bash_beside(&world, OTHERS).output().await, "");
    assert_eq!(driver.oci.list().len(), 1, "the sandbox itself is still there");
    drop(world);
    driver.close().await;
}

async fn processes_that_a_command_leaves_behind_are_killed(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let mut world = driver.bash("setsid sleep 1000 & (trap '' TERM; sleep 1000) & (sleep 1000 &); echo bye; exit 4");
    world.confinement.place = session("s");
    let exit = world.run().await.unwrap();
    assert_eq!((exit.ended, world.printed.stdout().as_str()), (Ended::Code(4), "bye\n"));
    assert_eq!(driver.bash_beside(&world, OTHERS).output().await, "");
    drop(world);
    driver.close().await;
}

async fn a_session_keeps_its_private_files_and_a_call_of_its_own_does_not(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let mut first = driver.bash("echo kept >/tmp/note; echo kept >~/note; echo kept >note");
    first.confinement.place = session("s");
    let made = first.run().await.unwrap().sandbox;
    let again = driver.bash_beside(&first, "cat /tmp/note ~/note note");
    assert_eq!(again.run().await.unwrap().sandbox, made);
    assert_eq!(again.printed.stdout(), "kept\nkept\nkept\n");
    let mut own = driver.bash_beside(&first, "cat /tmp/note ~/note 2>/dev/null; cat note");
    own.confinement.place = Place::Own;
    assert_eq!(own.output().await, "kept\n");
    let mut other = driver.bash_beside(&first, "cat /tmp/note ~/note 2>/dev/null; cat note");
    other.confinement.place = session("t");
    assert_eq!(other.output().await, "kept\n");
    drop((first, again, own, other));
    driver.close().await;
}

async fn commands_in_one_session_can_run_at_once(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let mut waiting = driver.bash("echo ready; until [ -e /tmp/go ]; do sleep 0.02; done; echo gone");
    waiting.confinement.place = session("s");
    let (waiting, running) = waiting.start();
    waiting.printed.contains("ready").await;
    let meanwhile = driver.bash_beside(&waiting, "(sleep 1000 &); kill -9 $$");
    assert_eq!(meanwhile.run().await.unwrap().ended, Ended::Signal(9));
    assert_eq!(driver.oci.list()[0].running, 1, "the first one goes on");
    drop(meanwhile);
    driver.bash_beside(&waiting, "touch /tmp/go").output().await;
    assert_eq!(running.await.unwrap().unwrap().ended, Ended::Code(0));
    assert_eq!(waiting.printed.stdout(), "ready\ngone\n");
    drop(waiting);
    driver.close().await;
}

async fn the_agent_is_nobody_and_its_files_are_the_owners(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    for owner in [0, 4321] {
        let world = driver.bash(
            "id -u; echo $(<theirs); echo new >new; mkdir folder; rm theirs; \
             grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status | tr -d '\\t'",
        );
        let path = world.workspace.path().to_owned();
        fs::write(path.join("theirs"), "old").unwrap();
        for path in [&path, &path.join("theirs")] {
            std::os::unix::fs::chown(path, Some(owner), Some(owner)).unwrap();
        }
        let none = "0000000000000000";
        let wanted = format!("2000000000\nold\nCapBnd:{none}\nCapEff:{none}\nNoNewPrivs:1\n");
        let mut printed: Vec<_> = world.output().await.lines().map(str::to_owned).collect();
        // gVisor prints another order, and no `NoNewPrivs`.
        printed[2..].sort();
        let told =
            if level == Level::Gvisor { wanted.lines().take(4).collect() } else { wanted.lines().collect::<Vec<_>>() };
        assert_eq!(printed, told);
        let owners =
            ["new", "folder"].map(|name| fs::metadata(path.join(name)).unwrap()).map(|it| (it.uid(), it.gid()));
        assert_eq!((owners, path.join("theirs").exists()), ([(owner, owner); 2], false));
    }
    driver.close().await;
}

async fn the_machine_is_hidden_and_cannot_be_changed(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let state = driver.state.path().display().to_string();
    let script = format!(
        "for path in /root {state} /var/lib /sys/kernel /etc/shadow .env; do cat $path/* $path 2>/dev/null; done; \
         for path in /usr/x /etc/x /x /proc/sys/kernel/hostname .git/hooks/x .git/config; do \
         (echo x >$path) 2>/dev/null && echo $path; done; mv .git .moved 2>/dev/null && echo moved; \
         mount -t tmpfs x /mnt 2>/dev/null && echo mounted; unshare -U true 2>/dev/null && echo unshared; echo done"
    );
    let world = driver.bash(&script);
    let path = world.workspace.path().to_owned();
    fs::write(path.join(".env"), "SECRET=1").unwrap();
    fs::create_dir_all(path.join(".git/objects")).unwrap();
    fs::write(path.join(".git/config"), "[core]").unwrap();
    let said = world.output().await;
    // gVisor has a kernel of its own, which lets a program make namespaces.
    let wanted = if level == Level::Gvisor { said.replace("unshared\n", "") } else { said };
    assert_eq!(wanted, "done\n");
    assert_eq!(fs::read_to_string(path.join(".git/config")).unwrap(), "[core]");
    assert!(!path.join(".git/hooks/x").exists());
    eventually(PATIENCE, "what was made to be mounted on is gone", || !path.join(".git/hooks").exists()).await;
    drop(world);
    driver.close().await;
}

async fn there_is_no_network(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let script = format!("(: </dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached; echo done");
    assert_eq!(driver.bash(&script).output().await, "done\n");
    let mut open = driver.bash(&script);
    open.confinement.network = Network::Open;
    assert_eq!(open.output().await, "reached\ndone\n");
    drop(open);
    driver.close().await;
}

async fn too_much_memory_is_an_overrun(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let mut world = driver.world("perl", &["-e", "my $x = 'x' x 400_000_000; print length $x"]);
    let limits = ResourceLimits { memory_bytes: Some(100 << 20), ..ResourceLimits::DEFAULT };
    world.confinement.limits = limits;
    let exit = world.run().await.unwrap();
    let overrun = exit.overrun.unwrap();
    assert_eq!((exit.ended, overrun.limit, overrun.allowed), (Ended::Signal(9), Limit::MemoryBytes, 100 << 20));
    assert!(overrun.used > 90 << 20, "{overrun:?}");
    let mut enough = driver.world("perl", &["-e", "my $x = 'x' x 10_000_000; print length $x"]);
    enough.confinement.limits = limits;
    assert_eq!(enough.output().await, "10000000");
    drop((world, enough));
    driver.close().await;
}

async fn too_much_in_the_workspace_is_an_overrun(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let limits = ResourceLimits { disk_bytes: Some(20 << 20), disk_files: Some(300), ..ResourceLimits::DEFAULT };
    let many_files = "mkdir a; for i in {1..20}; do head -c 2000000 /dev/zero >a/$i; done; sync; sleep 1000";
    let many_names = "mkdir a; for i in {1..400}; do : >a/$i; done; sleep 1000";
    let session = session("s");
    for place in [Place::Own, session.clone(), session] {
        for (script, limit, allowed) in [(many_files, Limit::DiskBytes, 20 << 20), (many_names, Limit::DiskFiles, 300)]
        {
            let mut world = driver.bash(script);
            world.confinement.limits = limits;
            world.confinement.place = place.clone();
            let exit = world.run().await.unwrap();
            let overrun = exit.overrun.unwrap();
            assert_eq!((exit.ended, overrun.limit, overrun.allowed), (Ended::Signal(9), limit, allowed), "{place:?}");
            assert!(overrun.used > allowed, "{overrun:?}");
        }
    }
    let mut enough = driver.bash("head -c 5000000 /dev/zero >file; echo done");
    enough.confinement.limits = limits;
    assert_eq!(enough.output().await, "done\n");
    drop(enough);
    driver.close().await;
}

/// The user's programs replace files in the same folder by new ones of the same name, and a mount goes with the old
/// file.
async fn files_that_the_user_replaces_stay_masked_and_protected(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let script = "cat .env 2>/dev/null; (echo evil >.git/config) 2>/dev/null && echo changed; cat .git/config";
    let mut first = driver.bash(script);
    first.confinement.place = session("s");
    let path = first.workspace.path().to_owned();
    let replace = |name: &str, text: &str| {
        fs::write(path.join("new"), text).unwrap();
        fs::rename(path.join("new"), path.join(name)).unwrap();
    };
    fs::create_dir(path.join(".git")).unwrap();
    for round in ["first", "second", "third"] {
        replace(".env", "SECRET=1");
        replace(".git/config", round);
        let world = driver.bash_beside(&first, script);
        assert_eq!(world.output().await, round);
    }
    // A call in a sandbox that was made by hand gets an error.
    let made = driver.oci.create(&Confinement { place: Place::Own, ..first.confinement.clone() }).await.unwrap();
    first.confinement.place = Place::Sandbox(made.sandbox.id.clone());
    assert_eq!(driver.bash_beside(&first, script).output().await, "third");
    replace(".env", "SECRET=2");
    let error = driver.bash_beside(&first, script).run().await.unwrap_err().message();
    assert!(error.contains("was replaced on the machine; destroy the sandbox and make a new one"), "{error}");
    drop(first);
    driver.close().await;
}

#[tokio::test]
async fn of_too_many_idle_containers_the_least_recently_used_go() {
    let idle_limits = IdleLimits { sandboxes_max: 3, per_tenant_max: 2 };
    let change = |options| OciOptions { idle_limits, ..options };
    let Some(driver) = Driver::with(Level::Runc, change) else { return };
    let first = driver.bash(":");
    let of = |tenant: &str, name: &str| {
        Place::Session(SessionKey { tenant: Some(tenant.into()), agent: "agent".into(), session: name.into() })
    };
    let calls = ["a", "b", "a", "c"].map(|name| of("one", name));
    for place in calls.into_iter().chain(["x", "y"].map(|name| of("two", name))) {
        let mut world = driver.bash_beside(&first, "echo hi > /tmp/note");
        world.confinement.place = place;
        world.output().await;
    }
    let mut sessions: Vec<_> = driver.oci.list().into_iter().filter_map(|one| Some(one.session?.session)).collect();
    sessions.sort();
    assert_eq!(sessions, ["c", "x", "y"], "`b` went for its tenant, and then `a` for all");
    let mut again = driver.bash_beside(&first, "cat /tmp/note");
    again.confinement.place = of("one", "c");
    assert_eq!(again.output().await, "hi\n", "kept");
    drop((first, again));
    driver.close().await;
}

#[tokio::test]
async fn too_many_processes_are_an_overrun() {
    let Some(driver) = Driver::new(Level::Runc) else { return };
    let mut world = driver.world("sh", &["-c", "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 1000 & done; wait"]);
    world.confinement.place = session("s");
    world.confinement.limits.processes = Some(10);
    let exit = world.run().await.unwrap();
    assert_eq!(exit.overrun, Some(Overrun { limit: Limit::Processes, allowed: 10, used: 10, session_used: None }));
    drop(world);
    driver.close().await;
}

async fn a_driver_tells_of_its_sandboxes_and_destroys_them(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let world = driver.bash("echo ready; sleep 1000");
    let status = driver.oci.create(&world.confinement).await.unwrap();
    assert_eq!((status.sandbox.level, status.running, status.executed), (level, 0, 0));
    assert!(status.enforcement.contains(&Enforcement { limit: Limit::DiskBytes, by: Enforcer::Watcher }));
    let mut world = world;
    world.confinement.place = Place::Sandbox(status.sandbox.id.clone());
    let (world, running) = world.start();
    world.printed.contains("ready").await;
    let listed = driver.oci.list();
    assert_eq!((listed.len(), listed[0].running, listed[0].executed), (1, 1, 1));
    assert!(driver.oci.destroy(&status.sandbox.id).await);
    let ended = running.await.unwrap();
    assert!(matches!(ended, Err(SandboxError::Crashed { .. })), "{ended:?}");
    assert!(!driver.oci.destroy(&status.sandbox.id).await && driver.oci.list().is_empty());
    let state = driver.state.path().to_str().unwrap();
    assert_eq!(processes_of(state), Vec::<String>::new());
    let error = world.run().await.unwrap_err().message();
    assert!(error.contains("there is no sandbox `"), "{error}");
    drop(world);
    driver.close().await;
}

async fn an_idle_sandbox_goes_away(level: Level) {
    let change = |options| OciOptions { idle_max: Duration::from_millis(100), ..options };
    let Some(driver) = Driver::with(level, change) else { return };
    let mut world = driver.bash("true");
    world.confinement.place = session("s");
    world.run().await.unwrap();
    eventually(PATIENCE, "the sandbox is gone", || driver.oci.list().is_empty()).await;
    let state = driver.state.path().to_str().unwrap();
    eventually(PATIENCE, "its processes are gone", || processes_of(state).is_empty()).await;
    drop(world);
    driver.close().await;
}

async fn a_lost_sandbox_is_replaced(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let mut world = driver.bash("echo ready; sleep 1000");
    world.confinement.place = session("s");
    let (world, running) = world.start();
    world.printed.contains("ready").await;
    let container = driver.oci.list()[0].sandbox.id.0.clone();
    let file = find(driver.state.path(), &container).join("pid");
    let pid = fs::read_to_string(file).unwrap();
    assert!(std::process::Command::new("kill").args(["-9", pid.trim()]).status().unwrap().success());
    let lost = running.await.unwrap();
    assert!(matches!(lost, Err(SandboxError::Crashed { .. })), "{lost:?}");
    let again = driver.bash_beside(&world, "echo new");
    assert_eq!(again.output().await, "new\n");
    // The same for a sandbox without a running command: the next call must not fail.
    let container = driver.oci.list()[0].sandbox.id.0.clone();
    let pid = fs::read_to_string(find(driver.state.path(), &container).join("pid")).unwrap();
    assert!(std::process::Command::new("kill").args(["-9", pid.trim()]).status().unwrap().success());
    let process = Path::new("/proc").join(pid.trim());
    eventually(PATIENCE, "it is gone", || !process.exists()).await;
    let third = driver.bash_beside(&world, "echo newer");
    assert_eq!(third.output().await, "newer\n");
    drop(third);
    drop((world, again));
    driver.close().await;
}

/// Returns the folder of a container.
fn find(state: &Path, id: &str) -> PathBuf {
    let homes = fs::read_dir(state).unwrap().flatten().map(|home| home.path().join("containers").join(id));
    homes.into_iter().find(|path| path.exists()).unwrap()
}

async fn a_command_can_have_a_terminal(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let mut world = driver.bash("[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo terminal");
    world.command.terminal = Some(Terminal { rows: 25, columns: 100 });
    // Before runc has set both of its terminals to raw mode, each of them may add a carriage return.
    assert_eq!(world.output().await.replace("\r\r\n", "\r\n"), "terminal\r\n");
    drop(world);
    driver.close().await;
}

async fn dropping_the_future_ends_the_command(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let world =
        driver.bash("trap '' TERM; setsid sleep 1000 & (sleep 1000 &); echo ready; while :; do sleep 0.01; done");
    let running = world.sandbox.execute(&world.command, &world.confinement, world.printed.clone(), world.stop.clone());
    tokio::select! {
        ended = running => panic!("{ended:?}"),
        () = world.printed.contains("ready") => {}
    }
    let state = driver.state.path().to_str().unwrap();
    eventually(PATIENCE, "all is gone", || world.alive().is_empty() && processes_of(state).is_empty()).await;
    drop(world);
    driver.close().await;
}

/// The variable that makes a test process the executor that is killed.
const VICTIM: &str = "WIELDY_TEST_OCI_VICTIM";

async fn leftovers_of_a_killed_executor_are_swept(level: Level) {
    if let Ok(state) = std::env::var(VICTIM) {
        let oci = Arc::new(Oci::new(OciOptions::new(level, state.into())));
        let mut world = World::bash("(setsid sleep 1000 &); echo ready; sleep 1000");
        world.sandbox = oci;
        world.confinement.network = Network::None;
        world.confinement.place = session("s");
        let (world, _running) = world.start();
        world.printed.contains("ready").await;
        say(&format!("ready {} {}", world.command.environment["MARK"], world.workspace.path().display()));
        std::future::pending::<()>().await;
    }
    // The next executor, at any level, removes what the killed ones left.
    let next = if level == Level::Runc { Level::Gvisor } else { Level::Runc };
    let Some(driver) = Driver::new(next).filter(|_| is_there(level)) else { return };
    let state = driver.state.path().to_str().unwrap().to_owned();
    let name = format!(
        "oci::{}::leftovers_of_a_killed_executor_are_swept",
        if level == Level::Runc { "runc" } else { "gvisor" }
    );
    let mut victim = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture"])
        .env(VICTIM, &state)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let said = std::io::BufRead::lines(std::io::BufReader::new(victim.stderr.take().unwrap()));
    let said = said.map_while(Result::ok).find_map(|line| Some(line.split_once("ready ")?.1.to_owned())).unwrap();
    let (mark, workspace) = said.split_once(' ').unwrap();
    victim.kill().unwrap();
    victim.wait().unwrap();
    eventually(PATIENCE, "all processes are gone", || {
        crate::world::alive(mark).is_empty() && processes_of(&state).is_empty()
    })
    .await;
    assert_ne!(fs::read_dir(&state).unwrap().count(), 0, "there is something to sweep");
    assert_ne!(fs::read_dir(workspace).unwrap().count(), 0, "also in the workspace");
    // As empty as a placeholder, but the user's own.
    let theirs = Path::new(workspace).join(".claude");
    fs::remove_dir(&theirs).unwrap();
    fs::create_dir(&theirs).unwrap();
    driver.bash("true").run().await.unwrap();
    let homes = || fs::read_dir(&state).unwrap().count();
    eventually(PATIENCE, "only our own home is there", || homes() == 1).await;
    eventually(PATIENCE, "no cgroup is left", || cgroups_of(victim.id()).is_empty()).await;
    let left: Vec<_> = fs::read_dir(workspace).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left, [theirs]);
    fs::remove_dir_all(workspace).unwrap();
    driver.close().await;
}

async fn a_runtime_that_works_says_its_version(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let version = driver.oci.probe().await.unwrap().0;
    assert!(version.contains(if level == Level::Gvisor { "runsc" } else { "runc" }), "{version}");
    driver.close().await;
}

// Shows: B6.2
#[tokio::test]
async fn a_runtime_that_does_not_work_says_why_and_nothing_else_runs_instead() {
    let Some(driver) = Driver::with(Level::Runc, |options| OciOptions { program: Some("/no/runc".into()), ..options })
    else {
        return;
    };
    let problem = "there is no runtime `runc`: none of /no/runc is a program".to_owned();
    let hint = "install it (apt-get install runc)".to_owned();
    let wanted = format!("the isolation level `runc` does not work here: {problem}");
    assert_eq!(driver.oci.probe().await, Err(OciProblem { problem, hint: hint.clone() }));
    let world = driver.bash("touch ran");
    let error = CallError::from(world.run().await.unwrap_err());
    assert_eq!((error.code, error.message, error.suggestion), (Code::SandboxCreationFailed, wanted, Some(hint)));
    assert_eq!(error.details["level"], "runc");
    assert!(!world.workspace.path().join("ran").exists());
    drop(world);
    driver.close().await;
}

/// Of two calls at the same time, the first one's container fails, and the second one makes another.
#[tokio::test]
async fn a_container_that_is_made_after_another_failed_is_known() {
    let folder = tempfile::tempdir().unwrap();
    let (runtime, tried) = (folder.path().join("runtime"), folder.path().join("tried"));
    let fail_once = format!(
        "#!/bin/sh\ncase \"$*\" in *' run '*) mkdir {} 2>/dev/null && sleep 0.5 && exit 1;; esac\nexec runc \"$@\"\n",
        tried.display()
    );
    fs::write(&runtime, fail_once).unwrap();
    fs::set_permissions(&runtime, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let Some(driver) = Driver::with(Level::Runc, |options| OciOptions { program: Some(runtime), ..options }) else {
        return;
    };
    let mut first = driver.bash("echo first");
    first.confinement.place = session("s");
    let second = driver.bash_beside(&first, "echo ready; sleep 1000");
    let (first, failing) = first.start();
    eventually(PATIENCE, "the first one is being made", || tried.exists()).await;
    let (second, running) = second.start();
    let error = failing.await.unwrap().unwrap_err().message();
    assert!(error.contains("its first process ended at once"), "{error}");
    second.printed.contains("ready").await;
    let listed: Vec<_> = driver.oci.list().into_iter().map(|one| one.sandbox.id).collect();
    assert_eq!(listed.len(), 1);
    assert!(driver.oci.destroy(&listed[0]).await);
    assert!(running.await.unwrap().is_err_and(|error| error.is_crash()));
    drop((first, second));
    driver.close().await;
}

#[tokio::test]
async fn crun_works_or_says_in_its_own_words_why_not() {
    let Some(driver) = Driver::new(Level::Crun) else { return };
    match driver.oci.probe().await {
        Ok(version) => assert!(version.0.contains("crun"), "{version:?}"),
        Err(OciProblem { problem, hint }) => {
            assert!(problem.contains("cgroups in hybrid mode not supported"), "{problem}");
            assert!(hint.contains("cgroup v2 alone"), "{hint}");
            // A call gets the same error.
            let error = CallError::from(driver.bash("true").run().await.unwrap_err());
            assert!(error.message.ends_with(&problem), "{}", error.message);
            assert_eq!((error.suggestion, error.details["level"].as_str()), (Some(hint), Some("crun")));
        }
    }
    driver.close().await;
}
