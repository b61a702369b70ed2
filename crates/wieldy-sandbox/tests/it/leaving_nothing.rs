//! Tests that no descriptor or process leaks in the embedding process, and that nothing outlives it.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use wieldy_core::Level;

use crate::world::{World, alive, below, conformance, eventually, own_name};

conformance! {
    together: [
    ];
    alone: [
        a_hundred_runs_leave_no_process_no_zombie_and_no_descriptor
        without_descriptors_a_command_is_refused_and_with_them_it_runs_again
        when_the_embedding_process_is_killed_nothing_of_its_commands_is_left
    ];
}

/// Returns the number of descriptors and of child processes, zombies included, of this process.
fn belongings() -> (usize, usize) {
    let children = fs::read_dir("/proc/self/task").unwrap().map(|task| {
        fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default().split_whitespace().count()
    });
    let children = children.sum();
    (fs::read_dir("/proc/self/fd").unwrap().count(), children)
}

// Shows: B5.2
fn a_hundred_runs_leave_no_process_no_zombie_and_no_descriptor() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let before = belongings();
        // Containers take longer, those of gVisor longest.
        let rounds = match World::level() {
            Level::Runc => 3,
            Level::Gvisor => 1,
            _ => 10,
        };
        for round in 0..rounds {
            let worlds = (0..10).map(|number| async move {
                match (round + number) % 5 {
                    0 => drop(World::bash("echo hi; setsid sleep 1000 &").run().await.unwrap()),
                    1 => drop(World::new("cat", &[]).stdin("hi").run().await.unwrap()),
                    2 => drop(World::new("no-such-program", &[]).run().await.unwrap_err()),
                    3 => drop(World::new("/etc/passwd", &[]).run().await.unwrap_err()),
                    _ => {
                        let world = World::bash("trap '' TERM; echo ready; while :; do sleep 0.01; done");
                        let running = world.sandbox.execute(
                            &world.command,
                            &world.confinement,
                            world.printed.clone(),
                            world.stop.clone(),
                        );
                        tokio::select! {
                            ended = running => panic!("{ended:?}"),
                            () = world.printed.contains("ready") => {}
                        }
                    }
                }
            });
            futures_util::future::join_all(worlds.map(tokio::spawn)).await.into_iter().for_each(Result::unwrap);
        }
        eventually(Duration::from_secs(5), "as before", || belongings() == before).await;
    });
}

fn without_descriptors_a_command_is_refused_and_with_them_it_runs_again() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let world = World::new("true", &[]);
        let before = belongings();
        let few = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
        let mut held = Vec::new();
        while let Ok(file) = fs::File::open("/dev/null") {
            held.push(file);
        }
        // One more free descriptor each time: every step of starting a process fails once, the supervisor's own
        // included.
        let mut refused = 0;
        while let Err(error) =
            world.sandbox.execute(&world.command, &world.confinement, world.printed.clone(), world.stop.clone()).await
        {
            // A guest is lost if there is no descriptor left to connect to it.
            let is_lost = error.is_crash() && error.message().contains("Too many open files");
            assert!(is_lost || error.is_before_start(), "{error:?}");
            refused += 1;
            held.pop().unwrap();
        }
        assert!(refused >= 5, "{refused}");
        drop(held);
        drop(world);
        let mut after = belongings();
        while after != before {
            tokio::time::sleep(Duration::from_millis(5)).await;
            after = belongings();
        }
    });
}

fn when_the_embedding_process_is_killed_nothing_of_its_commands_is_left() {
    const VARIABLE: &str = "WIELDY_TEST_EMBEDDER";
    if let Ok(mark) = std::env::var(VARIABLE) {
        return embed(&mark);
    }
    let mark = format!("embedded-{}", std::process::id());
    // A killed process does not remove its folders.
    let folder = tempfile::tempdir().unwrap();
    let embedder = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &own_name(), "--nocapture"])
        .env(VARIABLE, &mark)
        .env("TMPDIR", folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let embedder = KilledOnDrop(embedder.unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // Three processes for each of the twenty commands, once all of them are there.
    runtime.block_on(eventually(Duration::from_secs(20), "all are running", || alive(&mark).len() >= 60));
    let helpers = below(embedder.0.id() as i32);
    drop(embedder);
    runtime.block_on(eventually(Duration::from_secs(5), "all are gone", || alive(&mark).is_empty()));
    // The fork server still carries out earlier orders: it makes placeholders in workspaces, and removes them when it
    // ends.
    let gone = || helpers.iter().all(|id| !Path::new(&format!("/proc/{id}")).exists());
    runtime.block_on(eventually(Duration::from_secs(5), "the helpers are gone", gone));
    let workspaces = fs::read_dir(folder.path()).unwrap().map(|workspace| workspace.unwrap().path());
    // The state folder stays: the next executor sweeps it.
    let workspaces = workspaces.filter(|workspace| !workspace.join("state").exists());
    let held: Vec<_> = workspaces.flat_map(|workspace| fs::read_dir(workspace).unwrap()).collect();
    assert!(held.is_empty(), "{held:?}");
}

/// A process that is killed by `SIGKILL`, at the latest when the test fails.
struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Runs twenty stubborn commands for ever, as the embedding process. The last one also stops its supervisor.
fn embed(mark: &str) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let worlds = (0..20).map(|number| {
            let stop = if number == 19 { "kill -STOP $PPID;" } else { "" };
            let script =
                format!("trap '' TERM HUP; setsid sleep 1000 & (sleep 1000 &); {stop} while :; do sleep 1; done");
            let world = World::marked(mark.to_owned(), "bash", &["-c", &script]);
            tokio::spawn(async move { world.run().await })
        });
        futures_util::future::join_all(worlds.collect::<Vec<_>>()).await;
    });
}
