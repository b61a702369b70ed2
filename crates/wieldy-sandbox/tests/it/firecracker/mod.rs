//! Tests the level `firecracker`, beyond the suite of all levels, with a stand-in for Firecracker. If the real program
//! is installed, also tests its answers to our requests.

mod stand_in;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Denial, Ended, Exit, FileRules, Level, Limit, Mount, Network, OutputSink, Place,
    ResourceLimits, Sandbox, SandboxChange, SandboxError, SandboxId, SandboxStatus, SessionKey,
};
use wieldy_sandbox::{Firecracker, FirecrackerOptions, IdleLimits};

use crate::world::{PATIENCE, World, eventually};

/// The level with a stand-in and a state folder of its own.
pub(crate) struct Driver {
    firecracker: Firecracker,
    options: FirecrackerOptions,
    // Declared last, so that it is dropped after the guests in it.
    _state: Arc<tempfile::TempDir>,
}

impl Driver {
    pub(crate) fn new() -> Self {
        Self::with(|options| options)
    }

    pub(crate) fn with(change: impl FnOnce(FirecrackerOptions) -> FirecrackerOptions) -> Self {
        let state = tempfile::tempdir().unwrap();
        let file = |name: &str| state.path().join(name);
        stand_in::write_program(&file("firecracker"));
        fs::write(file("kernel"), "").unwrap();
        fs::write(file("rootfs"), "").unwrap();
        let mut options = FirecrackerOptions::new(file("state"));
        options.program = Some(file("firecracker"));
        options.kernel = Some(file("kernel"));
        options.rootfs = Some(file("rootfs"));
        options.kvm = file("rootfs");
        let options = change(options);
        Self { firecracker: Firecracker::new(options.clone()), options, _state: Arc::new(state) }
    }

    fn bash(self: &Arc<Self>, script: &str) -> World {
        let mut world = World::bash(script);
        world.sandbox = self.clone();
        world.confinement.network = Network::None;
        world
    }

    /// Returns a command in the workspace and the place of another one.
    fn beside(self: &Arc<Self>, first: &World, script: &str) -> World {
        let mut world = self.bash(script);
        world.confinement = first.confinement.clone();
        world
    }

    /// Returns the names in the folder of guests.
    fn traces(&self) -> Vec<String> {
        let state = fs::read_dir(&self.options.state).into_iter().flatten().flatten();
        state.map(|entry| entry.path().display().to_string()).collect()
    }
}

impl Sandbox for Driver {
    fn level(&self) -> Level {
        self.firecracker.level()
    }

    fn execute<'a>(
        &'a self,
        command: &'a Command,
        confinement: &'a Confinement,
        output: Arc<dyn OutputSink>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>> {
        self.firecracker.execute(command, confinement, output, stop)
    }

    fn create<'a>(&'a self, confinement: &'a Confinement) -> BoxFuture<'a, Result<SandboxStatus, SandboxError>> {
        self.firecracker.create(confinement)
    }

    fn list(&self) -> Vec<SandboxStatus> {
        self.firecracker.list()
    }

    fn destroy<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, bool> {
        self.firecracker.destroy(id)
    }

    fn listen(&self, listener: Arc<dyn Fn(SandboxChange) + Send + Sync>) {
        self.firecracker.listen(listener);
    }
}

fn session() -> Place {
    Place::Session(SessionKey { tenant: None, agent: "agent".into(), session: "session".into() })
}

#[tokio::test]
async fn workspace_changes_are_on_the_host_when_the_command_has_ended() {
    let driver = Arc::new(Driver::new());
    let world = driver.bash(
        "cat in; echo out > made; mkdir -p deep/er; echo x > deep/er/file; chmod 750 deep/er/file; ln -s made link; rm old; mv moved deep",
    );
    let at = |path: &str| world.workspace.path().join(path);
    fs::write(at("in"), "from here\n").unwrap();
    fs::write(at("old"), "").unwrap();
    fs::write(at("moved"), "moved").unwrap();
    let exit = world.run().await.unwrap();
    assert_eq!((exit.ended, exit.sandbox.level, exit.denials), (Ended::Code(0), Level::Firecracker, vec![]));
    assert_eq!(world.printed.stdout(), "from here\n");
    assert_eq!(fs::read_to_string(at("made")).unwrap(), "out\n");
    assert_eq!(fs::read_to_string(at("deep/moved")).unwrap(), "moved");
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(at("deep/er/file")).unwrap().permissions());
    assert_eq!((fs::read_to_string(at("deep/er/file")).unwrap().as_str(), mode & 0o777), ("x\n", 0o750));
    assert_eq!(fs::read_link(at("link")).unwrap(), Path::new("made"));
    let mut names: Vec<_> = fs::read_dir(at("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["deep", "in", "link", "made"]);
}

#[tokio::test]
async fn a_session_keeps_its_guest_and_sees_changes_made_on_the_host() {
    let driver = Arc::new(Driver::new());
    let mut first = driver.bash("echo one > file; echo guest > both; touch gone; echo $PPID");
    first.confinement.place = session();
    first.run().await.unwrap();
    let at = |path: &str| first.workspace.path().join(path);
    fs::write(at("file"), "two").unwrap();
    fs::remove_file(at("gone")).unwrap();
    fs::create_dir(at("new")).unwrap();
    fs::write(at("new/file"), "new").unwrap();
    let second = driver.beside(&first, "cat file new/file both; ls; rm -r new");
    let exit = second.run().await.unwrap();
    assert_eq!((exit.ended, exit.denials), (Ended::Code(0), vec![]));
    assert_eq!(second.printed.stdout(), "twonewguest\nboth\nfile\nnew\n");
    assert!(!at("new").exists());
    let kept = driver.list();
    assert_eq!(kept.iter().map(|one| (one.executed, one.running)).collect::<Vec<_>>(), [(2, 0)]);
    assert!(driver.destroy(&kept[0].sandbox.id).await);
    assert!(driver.list().is_empty());
}

#[tokio::test]
async fn of_too_many_idle_guests_the_least_recently_used_go() {
    let idle_limits = IdleLimits { sandboxes_max: 3, per_tenant_max: 2 };
    let driver = Arc::new(Driver::with(|options| FirecrackerOptions { idle_limits, ..options }));
    let first = driver.bash(":");
    let of = |tenant: &str, name: &str| {
        Place::Session(SessionKey { tenant: Some(tenant.into()), agent: "agent".into(), session: name.into() })
    };
    let calls = ["a", "b", "a", "c"].map(|name| of("one", name));
    for place in calls.into_iter().chain(["x", "y"].map(|name| of("two", name))) {
        let mut world = driver.beside(&first, "echo hi > /tmp/note");
        world.confinement.place = place;
        world.output().await;
    }
    let mut sessions: Vec<_> =
        driver.firecracker.list().into_iter().filter_map(|one| Some(one.session?.session)).collect();
    sessions.sort();
    assert_eq!(sessions, ["c", "x", "y"], "`b` went for its tenant, and then `a` for all");
    let mut again = driver.beside(&first, "cat /tmp/note");
    again.confinement.place = of("one", "c");
    assert_eq!(again.output().await, "hi\n", "kept");
}

#[tokio::test]
async fn hidden_files_never_reach_a_guest_and_protected_files_are_not_changed() {
    let driver = Arc::new(Driver::new());
    let mut world = driver.bash(
        "cat .env; echo mine > .env; echo evil > kept; mkdir .vscode; echo run > .vscode/tasks.json; echo fine > ok",
    );
    world.confinement.place = session();
    world.confinement.files = Arc::new(FileRules { protected: vec!["kept".into()], ..FileRules::default() });
    let at = |path: &str| world.workspace.path().join(path);
    fs::write(at(".env"), "SECRET").unwrap();
    fs::write(at("kept"), "kept").unwrap();
    let exit = world.run().await.unwrap();
    assert_eq!(world.printed.stdout(), "");
    let mut refused: Vec<_> = exit
        .denials
        .iter()
        .map(|denial| match denial {
            Denial::Filesystem { path, reason } => (path.as_str(), reason.as_str()),
            Denial::Network { .. } => panic!("{denial}"),
        })
        .collect();
    refused.sort_unstable();
    let (hidden, protected) = ("it is hidden from programs", "it is protected");
    assert_eq!(
        refused,
        [(".env", hidden), (".vscode", protected), (".vscode/tasks.json", protected), ("kept", protected)]
    );
    let read = |path: &str| fs::read_to_string(at(path)).unwrap();
    assert_eq!((read(".env").as_str(), read("kept").as_str(), read("ok").as_str()), ("SECRET", "kept", "fine\n"));
    assert!(!at(".vscode").exists());
    // The guest has the file again as it is on the host.
    let second = driver.beside(&world, "cat kept; ls -A");
    assert_eq!(second.output().await, "kept.env\nkept\nok\n");
}

#[tokio::test]
async fn a_file_that_changed_on_both_sides_is_as_on_the_host() {
    let driver = Arc::new(Driver::new());
    let world = driver.bash("echo guest > file; echo ready; while [ ! -e go ]; do sleep 0.01; done");
    fs::write(world.workspace.path().join("file"), "before").unwrap();
    let folder = world.workspace.path().to_owned();
    let mut world = world;
    world.confinement.place = session();
    let (world, running) = world.start();
    world.printed.contains("ready").await;
    fs::write(folder.join("file"), "here").unwrap();
    // The second call copies new files to the guest, among them the one that the first call waits for.
    fs::write(folder.join("go"), "").unwrap();
    let second = driver.beside(&world, "cat file");
    let exit = second.run().await.unwrap();
    let reason = "it was also changed outside of the sandbox meanwhile, and that change was kept".to_owned();
    assert_eq!(exit.denials, [Denial::Filesystem { path: "file".into(), reason }]);
    assert_eq!(
        (second.printed.stdout().as_str(), fs::read_to_string(folder.join("file")).unwrap().as_str()),
        ("here", "here")
    );
    running.await.unwrap().unwrap();
}

#[tokio::test]
async fn calls_of_a_session_run_beside_each_other_in_one_guest() {
    let driver = Arc::new(Driver::new());
    let mut first = driver.bash("true");
    first.confinement.place = session();
    let calls = (0..12).map(|number| driver.beside(&first, &format!("echo {number} > {number}; cat {number}")).start());
    let calls: Vec<_> = calls.collect();
    for (number, (world, running)) in calls.into_iter().enumerate() {
        let exit = running.await.unwrap().unwrap();
        assert_eq!((exit.ended, exit.denials), (Ended::Code(0), vec![]));
        assert_eq!(world.printed.stdout(), format!("{number}\n"));
        assert_eq!(fs::read_to_string(first.workspace.path().join(number.to_string())).unwrap(), format!("{number}\n"));
    }
    assert_eq!(driver.list().iter().map(|one| one.executed).collect::<Vec<_>>(), [12]);
}

#[tokio::test]
async fn networks_and_mounts_are_refused_for_a_guest() {
    let driver = Arc::new(Driver::new());
    let refused = async |change: fn(&mut Confinement)| {
        let mut world = driver.bash("true");
        change(&mut world.confinement);
        world.run().await.unwrap_err().message()
    };
    assert_eq!(
        refused(|confinement| confinement.network = Network::Open).await,
        "cannot make a sandbox: firecracker: a guest has no network; ask for the network `none`, or use the level `native`"
    );
    let hosts = refused(|confinement| confinement.network = Network::Hosts(vec!["example.org".into()])).await;
    assert!(hosts.contains("a guest has no network"), "{hosts}");
    let mounts = refused(|confinement| {
        let mount = Mount { source: "/usr/share".into(), target: "/share".into(), writable: false };
        confinement.files = Arc::new(FileRules { mounts: vec![mount], ..FileRules::default() });
    });
    let told = "cannot make a sandbox: firecracker: nothing but the workspace is brought into a guest, and so not `/usr/share`;";
    assert!(mounts.await.starts_with(told));
}

#[tokio::test]
async fn firecrackers_refusal_is_reported_in_its_own_words_and_leaves_nothing() {
    let driver = Arc::new(Driver::new());
    fs::write(driver.options.kernel.as_ref().unwrap(), "broken").unwrap();
    let told = driver.bash("true").run().await.unwrap_err().message();
    let expected = "cannot make a sandbox: firecracker: Firecracker refused `PUT /actions`: Cannot load kernel due to invalid memory \
                    configuration or invalid kernel image.";
    assert!(told.starts_with(expected), "{told}");
    // The state folder of the level exists, without a guest.
    let homes = driver.traces();
    assert_eq!(homes.len(), 1);
    assert_eq!(fs::read_dir(Path::new(&homes[0]).join("containers")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_firecracker_that_ends_at_once_is_reported_with_its_output() {
    let driver = Arc::new(Driver::with(|options| {
        let script = "#!/bin/sh\n[ \"$1\" = --version ] && exit\necho 'no such option' >&2\nexit 1\n";
        stand_in::write_script(options.program.as_ref().unwrap(), script);
        options
    }));
    let told = driver.bash("true").run().await.unwrap_err().message();
    assert!(told.starts_with("cannot make a sandbox: firecracker: it ended at once ("), "{told}");
    assert!(told.ends_with("; it last said: no such option"), "{told}");
}

#[tokio::test]
async fn a_stopped_run_does_not_wait_for_its_guest() {
    let driver = Arc::new(Driver::with(|options| {
        let script = "#!/bin/sh\n[ \"$1\" = --version ] && exit\nexec sh -c 'while :; do sleep 1; done' \"$@\"\n";
        stand_in::write_script(options.program.as_ref().unwrap(), script);
        options
    }));
    // The process of Firecracker, not the one that makes its disk.
    let api = format!("--api-sock\0{}/", driver.options.state.display());
    let is_there = || {
        let lines = fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter_map(|process| fs::read(process.path().join("cmdline")).ok());
        lines.into_iter().any(|line| String::from_utf8_lossy(&line).contains(&api))
    };
    let (world, running) = driver.bash("true").start();
    eventually(PATIENCE, "it was started", is_there).await;
    if groups().is_empty() {
        wieldy_testkit::skip("there are no writable cgroups on this machine");
    }
    world.stop.cancel();
    let told = running.await.unwrap().unwrap_err().message();
    assert_eq!(told, "cannot make a sandbox: firecracker: the run was stopped before its guest was ready");
    eventually(PATIENCE, "it was ended", || !is_there()).await;
    let homes = driver.traces();
    let is_empty = || fs::read_dir(Path::new(&homes[0]).join("containers")).unwrap().count() == 0;
    eventually(PATIENCE, "its files are gone", is_empty).await;
    eventually(PATIENCE, "its cgroup is gone", || groups().is_empty()).await;
}

#[tokio::test]
async fn a_guest_that_is_never_done_with_the_workspace_is_ended_with_the_run() {
    let driver = Arc::new(Driver::new());
    fs::write(driver.options.kernel.as_ref().unwrap(), "drips").unwrap();
    let (world, running) = driver.bash("true").start();
    let guests = || {
        let homes =
            driver.traces().into_iter().filter_map(|home| fs::read_dir(Path::new(&home).join("containers")).ok());
        homes.flatten().map(|guest| guest.unwrap().path()).collect::<Vec<_>>()
    };
    let is_dripping = || guests().iter().any(|guest| guest.join("dripping").exists());
    eventually(PATIENCE, "the guest speaks", is_dripping).await;
    world.stop.cancel();
    let error = tokio::time::timeout(PATIENCE, running).await.expect("it goes on and on").unwrap().unwrap_err();
    let told = "firecracker: bringing the workspace over: the run was stopped, and it was not done in time";
    assert!(error.is_crash() && error.reason() == told, "{error:?}");
    assert_eq!(guests(), Vec::<std::path::PathBuf>::new());
}

/// Returns the cgroups of this process's guests.
fn groups() -> Vec<std::path::PathBuf> {
    fn look(folder: &Path, depth: usize, found: &mut Vec<std::path::PathBuf>) {
        let inner = fs::read_dir(folder).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir());
        for entry in inner {
            if entry.file_name().to_string_lossy().contains(&format!("firecracker-{}-", std::process::id())) {
                found.push(entry.path());
            } else if depth > 0 {
                look(&entry.path(), depth - 1, found);
            }
        }
    }
    let mut found = Vec::new();
    look(Path::new("/sys/fs/cgroup"), 8, &mut found);
    found
}

#[tokio::test]
async fn limits_of_disk_and_open_files_are_enforced() {
    let driver = Arc::new(Driver::new());
    let mut world = driver.bash("ulimit -n; for i in 1 2 3; do head -c 9M /dev/zero > $i; done; sync; sleep 1000");
    world.confinement.limits =
        ResourceLimits { disk_bytes: Some(10 << 20), open_files: Some(77), ..ResourceLimits::DEFAULT };
    let exit = world.run().await.unwrap();
    assert_eq!(world.printed.stdout(), "77\n");
    let overrun = exit.overrun.unwrap();
    assert_eq!((overrun.limit, overrun.allowed), (Limit::DiskBytes, 10 << 20));
}

#[tokio::test]
async fn a_guest_is_not_made_within_another() {
    let driver = Arc::new(Driver::new());
    let world = driver.bash("");
    let mut confinement = world.confinement.clone();
    let outer = driver.create(&confinement).await.unwrap().sandbox.id;
    confinement.place = Place::Sandbox(outer.clone());
    let refused = driver.create(&confinement).await.unwrap_err().message();
    assert!(refused.contains("a machine cannot be made within another"), "{refused}");
    assert_eq!(driver.list().into_iter().map(|one| one.sandbox.id).collect::<Vec<_>>(), [outer]);
}

#[tokio::test]
async fn a_lost_guest_is_reported_and_the_next_call_gets_a_new_one() {
    let driver = Arc::new(Driver::new());
    let mut world = driver.bash("echo ready; sleep 1000");
    world.confinement.place = session();
    let first = driver.create(&world.confinement).await.unwrap().sandbox.id;
    let (world, running) = world.start();
    world.printed.contains("ready").await;
    kill(&driver.options.state.display().to_string());
    let error = running.await.unwrap().unwrap_err();
    assert!(error.is_crash() && error.reason().starts_with("firecracker: "), "{error:?}");
    let again = driver.beside(&world, "echo again");
    let exit = again.run().await.unwrap();
    assert_eq!((exit.ended, again.printed.stdout().as_str()), (Ended::Code(0), "again\n"));
    assert_ne!(exit.sandbox.id, first);
}

/// Kills the stand-ins with this state folder in their arguments, which are those of one test.
fn kill(state: &str) {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let variables = |process: &fs::DirEntry| fs::read(process.path().join("environ")).unwrap_or_default();
    let wanted = format!("WIELDY_TEST_FIRECRACKER_API={state}");
    for process in processes.filter(|process| String::from_utf8_lossy(&variables(process)).contains(&wanted)) {
        let id = process.file_name().to_str().unwrap().parse().ok().and_then(rustix::process::Pid::from_raw).unwrap();
        rustix::process::kill_process(id, rustix::process::Signal::KILL).unwrap();
    }
}

#[tokio::test]
async fn dropping_the_level_leaves_nothing() {
    let driver = Arc::new(Driver::new());
    let mut world = driver.bash("echo made > file");
    world.confinement.place = session();
    world.run().await.unwrap();
    let (folder, _state) = (driver.options.state.clone(), Arc::clone(&driver._state));
    assert_eq!(driver.traces().len(), 1);
    let had_groups = !groups().is_empty();
    drop((world, driver));
    let is_empty = || fs::read_dir(&folder).unwrap().count() == 0;
    eventually(PATIENCE, "the guest's files are gone", is_empty).await;
    if had_groups {
        eventually(PATIENCE, "the guest's cgroup is gone", || groups().is_empty()).await;
    }
}

#[tokio::test]
async fn guest_folders_of_a_killed_executor_are_swept_by_the_next_one() {
    let driver = Arc::new(Driver::new());
    let dead = driver.options.state.join("firecracker-4000000000-0");
    fs::create_dir_all(dead.join("containers/firecracker-4000000000-1")).unwrap();
    fs::write(dead.join("containers/firecracker-4000000000-1/disk"), "").unwrap();
    driver.bash("true").run().await.unwrap();
    assert!(!dead.exists());
    assert_eq!(driver.traces().len(), 1);
}

/// Returns the path of the real Firecracker, from the variable or on the `PATH`.
fn real() -> Option<std::path::PathBuf> {
    let named = std::env::var_os("WIELDY_TEST_FIRECRACKER").map(std::path::PathBuf::from);
    let folders = std::env::var("PATH").unwrap_or_default();
    named.or_else(|| folders.split(':').map(|folder| Path::new(folder).join("firecracker")).find(|path| path.is_file()))
}

#[tokio::test]
async fn firecracker_itself_understands_every_request_and_says_what_is_wrong_with_the_kernel() {
    let (Some(program), Ok(_)) = (real(), fs::File::options().read(true).write(true).open("/dev/kvm")) else {
        wieldy_testkit::skip("there is no `firecracker` or no /dev/kvm on this machine");
        return;
    };
    let driver = Arc::new(Driver::with(|mut options| {
        options.program = Some(program);
        options.kvm = "/dev/kvm".into();
        // Files of whole blocks that are neither kernel nor file system: Firecracker accepts all requests except the
        // start.
        for file in [&options.kernel, &options.rootfs] {
            fs::write(file.as_ref().unwrap(), [0; 4096]).unwrap();
        }
        options
    }));
    let told = driver.bash("true").run().await.unwrap_err().message();
    assert!(told.starts_with("cannot make a sandbox: firecracker: Firecracker refused `PUT /actions`: "), "{told}");
    let homes = driver.traces();
    assert_eq!(fs::read_dir(Path::new(&homes[0]).join("containers")).unwrap().count(), 0);
}
