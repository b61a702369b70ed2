//! Benchmark of the sandbox: from the start to the end of `/bin/true`, through the whole engine, with captured output
//! and metered usage; compared with a plain fork and exec of the same program, and with other installed sandboxes.

use std::process::{Command as Process, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use wieldy_core::{
    Call, Caller, Command, Executor, Outcome, ResourceLimits, Run, RunError, Sandbox, Stdin, ToolSpec, UsedSandbox,
    tool,
};
use wieldy_sandbox::{Native, NativeOptions};

use super::containers;
use super::harness::{Contestant, Effort, Spread, compete, spread_of};
use super::neighbours;
use super::table::{Figure, Goal, Row};

pub(super) const FORK: &str = "fork + exec";
const BARE: &str = "a call without isolation";
const WARM: &str = "a call in a session's sandbox";
const POOLED: &str = "a call in a sandbox built ahead";
const COLD: &str = "a call in a new sandbox";
const BUBBLEWRAP: &str = "bubblewrap";
const FORK_TWO: &str = "fork + exec, two threads";
const WARM_TWO: &str = "calls in two sessions at once";

pub(super) const PROGRAM: &str = "/bin/true";

/// Measures all rows and compares them with the goals.
pub(super) fn measure(quick: bool) -> Result<Vec<Row>> {
    let bubblewrap = bubblewrap();
    if bubblewrap.is_none() {
        eprintln!("bubblewrap does not work here, so it is left out: `apt-get install bubblewrap`");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let subject = Subject::new(&runtime)?;
    let one = vec![
        Contestant::new(FORK, |times| timed(times, || by_hand(PROGRAM, &[]))),
        Contestant::new(BARE, |times| subject.repeat(times, &subject.bare, None)),
        Contestant::new(WARM, |times| subject.repeat(times, &subject.native, Some("bench"))),
        Contestant::new(POOLED, |times| subject.repeat_ready(times, &subject.pooled, || subject.pool.warm_sandboxes())),
        Contestant::new(COLD, |times| subject.repeat_ready(times, &subject.cold, || subject.warm_inits.warm_inits())),
    ];
    let peer = bubblewrap
        .map(|arguments| Contestant::new(BUBBLEWRAP, move |times| timed(times, || by_hand("bwrap", &arguments))));
    let effort = Effort::processes(quick);
    let has_peer = peer.is_some();
    let measured = compete(effort, one.into_iter().chain(peer).collect());
    let two = compete(
        effort,
        vec![
            Contestant::new(FORK_TWO, |times| both(times, || by_hand(PROGRAM, &[]))),
            Contestant::new(WARM_TWO, |times| subject.repeat_in_two(times)),
        ],
    );
    let mut rows = vec![
        Row::timed(&measured, WARM, FORK, Some(1.5)),
        Row::timed(&measured, POOLED, FORK, Some(1.8)),
        Row::timed(&measured, COLD, FORK, Some(3.5)),
        Row::timed(&measured, BARE, FORK, None),
    ];
    if has_peer {
        rows.push(Row::timed(&measured, BUBBLEWRAP, FORK, None));
        rows.push(Row {
            name: "bubblewrap, in calls in a session's sandbox".into(),
            ours: Figure::Time(measured.spread(WARM)),
            floor: Some((BUBBLEWRAP, Figure::Time(measured.spread(BUBBLEWRAP)))),
            ratio: Some(measured.ratio(WARM, BUBBLEWRAP)),
            goal: Some(Goal::RatioAtMost(0.25)),
        });
    }
    rows.extend(containers::measure(quick, &runtime)?);
    let per_second = |nanoseconds: f64| Figure::PerSecond(1e9 / nanoseconds);
    rows.push(Row {
        name: "calls per second, one worker".into(),
        ours: per_second(measured.spread(WARM).p50),
        floor: Some((FORK, per_second(measured.spread(FORK).p50))),
        ratio: None,
        goal: None,
    });
    rows.push(Row {
        name: "calls per second, two workers".into(),
        ours: per_second(two.spread(WARM_TWO).p50),
        floor: Some((FORK_TWO, per_second(two.spread(FORK_TWO).p50))),
        ratio: Some(two.ratio(WARM_TWO, FORK_TWO)),
        // At most 1/0.9 of its time: at least nine tenths of its rate.
        goal: Some(Goal::RatioAtMost(1.11)),
    });
    rows.push(runtime.block_on(idle_memory())?);
    rows.push(runtime.block_on(after_a_pause(if quick { 3 } else { 11 }))?);
    rows.extend(neighbours::measure(quick, &runtime)?);
    rows.push(runtime.block_on(sessions_in_a_row(if quick { 2_000 } else { 10_000 }))?);
    if !quick {
        rows.push(subject.flood(&runtime)?);
    }
    Ok(rows)
}

/// Makes calls for this long, for a profiler; each in a new sandbox if `cold`.
pub(super) fn spin(duration: Duration, cold: bool) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let subject = Subject::new(&runtime)?;
    let (began, mut calls, mut took) = (Instant::now(), 0_u64, Duration::ZERO);
    while began.elapsed() < duration {
        took += match cold {
            true => subject.repeat_ready(10, &subject.cold, || subject.warm_inits.warm_inits()),
            false => subject.repeat(10, &subject.native, Some("bench")),
        };
        calls += 10;
    }
    println!("{:.1} µs per call", took.as_secs_f64() * 1e6 / calls as f64);
    Ok(())
}

struct Subject<'a> {
    runtime: &'a Runtime,
    native: Executor,
    bare: Executor,
    cold: Executor,
    pooled: Executor,
    pool: Native,
    warm_inits: Native,
    _workspace: tempfile::TempDir,
}

impl<'a> Subject<'a> {
    fn new(runtime: &'a Runtime) -> Result<Self> {
        let workspace = tempfile::tempdir()?;
        let options =
            |warm_sandboxes, warm_inits| NativeOptions { warm_sandboxes, warm_inits, ..NativeOptions::default() };
        let (pool, warm_inits) = (Native::new(options(2, 2)), Native::new(options(0, 2)));
        Ok(Self {
            runtime,
            native: executor(workspace.path(), Native::new(options(0, 1)))?,
            bare: executor(workspace.path(), wieldy_sandbox::Unconfined::default())?,
            cold: executor(workspace.path(), warm_inits.clone())?,
            warm_inits,
            pooled: executor(workspace.path(), pool.clone())?,
            pool,
            _workspace: workspace,
        })
    }

    fn repeat(&self, times: u64, executor: &Executor, session: Option<&str>) -> Duration {
        let (executor, call) = (executor.clone(), call("True", session));
        self.runtime.block_on(async move { tokio::spawn(repeat(times, executor, call)).await.expect("no call panics") })
    }

    /// Waits before each call, outside the measured time, until the pre-warmed processes exist.
    fn repeat_ready(&self, times: u64, executor: &Executor, ready: impl Fn() -> usize) -> Duration {
        let mut total = Duration::ZERO;
        for _ in 0..times {
            // The first call finds none and triggers their creation.
            if ready() == 0 {
                self.repeat(1, executor, None);
            }
            while ready() == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            // Keep the cleanup after the previous call out of the measurement. Spinning keeps the processor awake, as
            // in the floor, which never sleeps.
            let waited = Instant::now();
            while waited.elapsed() < Duration::from_millis(15) {
                std::hint::spin_loop();
            }
            total += self.repeat(1, executor, None);
        }
        total
    }

    fn repeat_in_two(&self, times: u64) -> Duration {
        let began = Instant::now();
        self.runtime.block_on(async {
            let each =
                |session| tokio::spawn(repeat(times.div_ceil(2), self.native.clone(), call("True", Some(session))));
            let (one, two) = (each("one"), each("two"));
            one.await.expect("no call panics");
            two.await.expect("no call panics");
        });
        began.elapsed()
    }

    /// Measures how much this process grows while a program prints 10 GB.
    fn flood(&self, runtime: &Runtime) -> Result<Row> {
        let before = status_bytes("self", "VmHWM:")?;
        let call = call("Flood", Some("flood"));
        let result = runtime.block_on(self.native.call(call));
        if !result.is_success() {
            bail!("the flood ended with {:?}", result.error);
        }
        Ok(Row {
            name: "10 GB of output: more memory than before".into(),
            ours: Figure::Bytes(status_bytes("self", "VmHWM:")?.saturating_sub(before) as f64),
            floor: None,
            ratio: None,
            goal: Some(Goal::BytesAtMost(32.0 * 1024.0 * 1024.0)),
        })
    }
}

pub(super) fn executor(workspace: &std::path::Path, sandbox: impl Sandbox) -> Result<Executor> {
    let isolation = sandbox.level();
    let mut builder = Executor::builder().sandbox(sandbox);
    builder.isolation = isolation;
    builder.workspace = workspace.canonicalize()?;
    // The default of half a processor would be measured instead of wieldy.
    builder.resource_limits = ResourceLimits { cpu_millicores: Some(2000), ..ResourceLimits::DEFAULT };
    builder.timeout = Duration::from_secs(300);
    // As on the command line, output that is too large for a result goes to disk.
    builder.artifacts = Arc::new(wieldy::FolderArtifacts::open(&workspace.join("artifacts"))?);
    let spec = |name| ToolSpec::new(name, "A program.").timeout(Duration::from_secs(300));
    let run_true =
        tool(
            spec("True"),
            |_: serde_json::Map<String, Value>, run: Run| async move { execute(&run, PROGRAM, &[]).await },
        );
    let flood = tool(spec("Flood"), |_: serde_json::Map<String, Value>, run: Run| async move {
        execute(&run, "head", &["-c", "10000000000", "/dev/zero"]).await
    });
    let bomb = tool(spec("Bomb"), |arguments: serde_json::Map<String, Value>, run: Run| async move {
        let script = arguments.get("script").and_then(Value::as_str).unwrap_or_default();
        execute(&run, "bash", &["-c", script]).await
    });
    builder.tool(run_true).tool(flood).tool(bomb).build().context("the executor cannot be built")
}

async fn execute(run: &Run, program: &str, arguments: &[&str]) -> Result<Outcome, RunError> {
    let command = Command {
        program: program.into(),
        arguments: arguments.iter().map(|&word| word.into()).collect(),
        environment: [("PATH".into(), "/usr/bin:/bin".into())].into(),
        folder: Default::default(),
        stdin: Stdin::Nothing,
        terminal: None,
    };
    let exit = run.execute(&command).await?;
    let mut outcome = run.captured();
    outcome.usage = Some(Box::new(exit.usage));
    outcome.sandbox = Some(UsedSandbox::new(exit.sandbox, run.confinement().limits));
    Ok(outcome)
}

pub(super) fn call(tool: &str, session: Option<&str>) -> Call {
    let caller = Caller { session: session.map(Into::into), ..Caller::local() };
    Call::new(tool, json!({})).by(caller)
}

pub(super) async fn repeat(times: u64, executor: Executor, call: Call) -> Duration {
    let began = Instant::now();
    for _ in 0..times {
        let result = executor.call(call.clone()).await;
        assert!(result.is_success(), "{:?}", result.error);
    }
    began.elapsed()
}

pub(super) fn timed(times: u64, once: impl Fn()) -> Duration {
    let began = Instant::now();
    (0..times).for_each(|_| once());
    began.elapsed()
}

fn both(times: u64, once: impl Fn() + Sync) -> Duration {
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..times.div_ceil(2)).for_each(|_| once()));
        }
    });
    began.elapsed()
}

pub(super) fn by_hand(program: &str, arguments: &[String]) {
    let status = command(program, arguments).status().expect("the program can be started");
    assert!(status.success(), "{program}: {status}");
}

fn command(program: &str, arguments: &[String]) -> Process {
    let mut command = Process::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // The environment that our commands get. Cargo's own has a library search path, which every program would search.
    command.env_clear().env("PATH", "/usr/bin:/bin");
    command
}

/// Returns the arguments that make bubblewrap do about the same, if it works here.
fn bubblewrap() -> Option<Vec<String>> {
    let words = "--unshare-all --die-with-parent --new-session --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib \
                 --symlink usr/lib64 /lib64 --ro-bind /etc /etc --proc /proc --dev /dev --tmpfs /tmp /bin/true";
    let arguments: Vec<String> = words.split_whitespace().map(Into::into).collect();
    command("bwrap", &arguments).status().is_ok_and(|status| status.success()).then_some(arguments)
}

/// Measures an idle sandbox: the private memory of its processes, and what this process stores for it.
async fn idle_memory() -> Result<Row> {
    const COUNT: u64 = 50;
    let workspace = tempfile::tempdir()?;
    let native = Native::new(NativeOptions { warm_sandboxes: 0, ..NativeOptions::default() });
    let executor = executor(workspace.path(), native)?;
    repeat(1, executor.clone(), call("True", Some("first"))).await;
    let (own_before, theirs_before) = (status_bytes("self", "VmRSS:")?, private_bytes()?);
    for number in 0..COUNT {
        repeat(1, executor.clone(), call("True", Some(&format!("idle-{number}")))).await;
    }
    let own = status_bytes("self", "VmRSS:")?.saturating_sub(own_before);
    let theirs = private_bytes()?.saturating_sub(theirs_before);
    drop(executor);
    Ok(Row {
        name: "memory of an idle sandbox, its init, supervisor and our books".into(),
        ours: Figure::Bytes((own + theirs) as f64 / COUNT as f64),
        floor: None,
        ratio: None,
        goal: Some(Goal::BytesAtMost(512.0 * 1024.0)),
    })
}

/// Compares a session's call after a pause, which creates the placeholders again, with one in a workspace that has all
/// those names and needs no placeholder.
async fn after_a_pause(rounds: usize) -> Result<Row> {
    const PAUSE: Duration = Duration::from_millis(2200);
    const NONE: &str = "after a pause, without placeholders";
    let (empty, full) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let native = || Native::new(NativeOptions { warm_sandboxes: 0, ..NativeOptions::default() });
    let (held, plain) = (executor(empty.path(), native())?, executor(full.path(), native())?);
    let once = |executor: &Executor| repeat(1, executor.clone(), call("True", Some("pause")));
    once(&held).await;
    let names = placeholders(empty.path())?;
    // wieldy keeps a workspace from becoming a bare repository, or protects the settings of one. This one has all those
    // names.
    let bare = ["HEAD", "objects", "refs", "config", "config.worktree", "commondir", "hooks"].map(Into::into);
    for path in names.iter().chain(&bare).map(|name| full.path().join(name)) {
        std::fs::write(path, "taken\n")?;
    }
    once(&plain).await;
    if names.is_empty() || !placeholders(full.path())?.is_empty() {
        bail!("placeholders must be put up in one of two workspaces, and are not: {names:?}");
    }
    let (mut with, mut without) = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
    for round in 0..rounds {
        tokio::time::sleep(PAUSE).await;
        let paused = Instant::now();
        while !placeholders(empty.path())?.is_empty() {
            if paused.elapsed() > PAUSE {
                bail!("the placeholders are still there after the pause");
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // The order alternates, so that a processor that wakes up from the pause does not slow down the same one in
        // every round.
        let (first, second) = if round % 2 == 0 { (&held, &plain) } else { (&plain, &held) };
        let (one, two) = (once(first).await, once(second).await);
        let (ours, floor) = if round % 2 == 0 { (one, two) } else { (two, one) };
        with.push(ours.as_nanos() as f64);
        without.push(floor.as_nanos() as f64);
    }
    let (with, without) = (spread_of(with), spread_of(without));
    let more = with.p50 - without.p50;
    Ok(Row {
        name: "placeholders put up again after a pause: more time than without".into(),
        ours: Figure::Time(Spread { min: more, p50: more, p95: more }),
        floor: Some((NONE, Figure::Time(without))),
        ratio: Some(with.p50 / without.p50),
        goal: Some(Goal::TimeAtMost(200_000.0)),
    })
}

/// Returns the names in a workspace that exist only as placeholders.
fn placeholders(workspace: &std::path::Path) -> Result<Vec<std::ffi::OsString>> {
    let entries = std::fs::read_dir(workspace)?.flatten();
    Ok(entries.filter(|entry| wieldy_sandbox::is_placeholder(&entry.path())).map(|entry| entry.file_name()).collect())
}

/// Compares a call of a new session after many other sessions with those of the first ones. Clients that open a session
/// for each call must not slow anything down by the sandboxes that they leave behind.
async fn sessions_in_a_row(count: usize) -> Result<Row> {
    let workspace = tempfile::tempdir()?;
    let executor = executor(workspace.path(), Native::new(NativeOptions::default()))?;
    let mut times = Vec::with_capacity(count);
    for number in 0..count {
        times.push(repeat(1, executor.clone(), call("True", Some(&format!("session-{number}")))).await);
    }
    let part = count / 20;
    let median = |part: &mut [Duration]| {
        part.sort_unstable();
        part[part.len() / 2].as_secs_f64()
    };
    let (first, last) = (median(&mut times[..part]), median(&mut times[count - part..]));
    Ok(Row {
        name: format!("calls per second in new sessions, after {count} others"),
        ours: Figure::PerSecond(1.0 / last),
        floor: Some(("the first sessions", Figure::PerSecond(1.0 / first))),
        ratio: Some(last / first),
        goal: Some(Goal::RatioAtMost(1.2)),
    })
}

/// Returns the private memory of the processes of all our sandboxes.
fn private_bytes() -> Result<u64> {
    let mut total = 0;
    for process in std::fs::read_dir("/proc")?.flatten() {
        let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        if matches!(name.trim(), "wieldy-init" | "wieldy-supervis") {
            let rollup = std::fs::read_to_string(process.path().join("smaps_rollup")).unwrap_or_default();
            let private = rollup.lines().filter(|line| line.starts_with("Private_"));
            total += private.filter_map(kibibytes).sum::<u64>() * 1024;
        }
    }
    Ok(total)
}

fn status_bytes(process: &str, field: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find(|line| line.starts_with(field)).context("the field is always there")?;
    Ok(kibibytes(line).context("a number of kibibytes")? * 1024)
}

fn kibibytes(line: &str) -> Option<u64> {
    line.split_whitespace().nth(1)?.parse().ok()
}
