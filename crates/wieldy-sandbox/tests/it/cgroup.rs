//! Tests the tree of cgroups with real processes: limits hold, counters are correct, nothing is left behind.
//!
//! The same tests run in virtual machines that have only cgroup v2 or only v1 (`cargo xtask vm`).

#[path = "../../src/cgroup/mod.rs"]
#[allow(dead_code, unused_imports, reason = "it is a part of the library that the tests are to see from inside")]
mod tree;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rustix::process::Pid;
use tree::meter::{Meter, Peak};
use tree::{Controller, Group, GroupLimits, Hierarchy, Kind, Version, Whose};

const MIB: u64 = 1 << 20;
const NOBODY: u32 = 65534;
const NONE: GroupLimits = GroupLimits { cpu_millicores: None, memory_bytes: None, processes: None };

/// The variable that turns a test process into a [`Load`].
const LOAD: &str = "WIELDY_TEST_LOAD";

/// A process that reads orders, one per line, and answers each with a line.
struct Load {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Load {
    fn start() -> Self {
        Self::with(Command::new(std::env::current_exe().unwrap()))
    }

    /// Starts one, and moves it to a group before its first order.
    fn start_in(group: &Group) -> Self {
        let load = Self::start();
        group.add(load.pid()).unwrap();
        load
    }

    /// Starts one as uid 65534, from a folder that this user can read.
    fn start_as_nobody(place: &tempfile::TempDir) -> Self {
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let program = place.path().join("it");
        // Another process copies it. Otherwise a child started meanwhile could inherit it open for writing, and it
        // could not run.
        let copied = Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&program).status().unwrap();
        assert!(copied.success());
        let mut command = Command::new(program);
        command.uid(NOBODY).gid(NOBODY).current_dir("/");
        Self::with(command)
    }

    fn with(mut command: Command) -> Self {
        command.args(["--exact", "cgroup::a_load_does_as_it_is_told", "--nocapture", "--test-threads", "1"]);
        let mut child = command.env(LOAD, "1").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, answers) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut load = Self { child, orders, answers };
        assert_eq!(load.ask("hello").unwrap(), "hello");
        load
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns its number of threads, which the kernel counts as processes.
    fn threads(&self) -> u64 {
        fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().count() as u64
    }

    /// Sends an order.
    fn order(&mut self, order: &str) {
        let _ = writeln!(self.orders.as_mut().unwrap(), "{order}");
    }

    /// Waits for the next answer; `None` if the process ended instead.
    fn answer(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.answers.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            // The test harness has begun the line of the first answer.
            if let Some((_, answer)) = line.trim_end().split_once("answer: ") {
                return Some(answer.to_owned());
            }
        }
    }

    fn ask(&mut self, order: &str) -> Option<String> {
        self.order(order);
        self.answer()
    }

    /// Returns the signal that ended it.
    fn signal(&mut self) -> Option<i32> {
        self.child.wait().unwrap().signal()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // It ends at the end of its orders, and kills its children.
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

#[test]
fn a_load_does_as_it_is_told() {
    match std::env::var(LOAD) {
        Ok(value) if value == "bomb" => explode(),
        Ok(_) => {}
        Err(_) => return,
    }
    let (mut memory, mut children, mut held) = (Vec::new(), Vec::new(), None);
    for order in std::io::stdin().lines() {
        let order = order.unwrap();
        let (word, value) = order.split_once(' ').unwrap_or((&order, ""));
        let answer = match word {
            "hello" => "hello".to_owned(),
            "memory" => {
                memory = vec![1_u8; value.parse().unwrap()];
                format!("{}", memory.len())
            }
            "write" => {
                let mut file = fs::File::create(value).unwrap();
                file.write_all(&vec![1; 32 << 20]).unwrap();
                file.sync_all().unwrap();
                "written".to_owned()
            }
            // Runs until the kernel has counted so many hundredths of a second.
            "burn" => {
                let until = ticks() + value.parse::<u64>().unwrap();
                while ticks() < until {
                    std::hint::black_box((0..10_000_u64).sum::<u64>());
                }
                "burnt".to_owned()
            }
            "fork" => {
                let count = value.parse().unwrap();
                let sleep = || Command::new("sleep").arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).spawn();
                let started: Vec<_> = (0..count).map_while(|_| sleep().ok()).collect();
                let answer = started.len().to_string();
                children.extend(started);
                answer
            }
            "bomb" => {
                children.extend(bomb());
                "lit".to_owned()
            }
            "find" => format!("{:?}", held.insert((Hierarchy::find(), Vec::new())).0.findings()),
            "use" => use_tree(held.as_mut().unwrap()),
            other => panic!("what is `{other}`?"),
        };
        writeln!(std::io::stdout(), "answer: {answer}").unwrap();
    }
    drop(memory);
    for mut child in children {
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Starts a fork bomb: a process that starts processes like itself for ever.
fn bomb() -> Option<Child> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "cgroup::a_load_does_as_it_is_told", "--test-threads", "1"]).env(LOAD, "bomb");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
}

fn explode() -> ! {
    loop {
        if bomb().is_none() {
            std::thread::yield_now();
        }
    }
}

/// A guard that kills the processes of a group, also when the test fails.
struct KilledOnDrop<'a>(&'a Group);

impl Drop for KilledOnDrop<'_> {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

/// Returns the processor time of this process in hundredths of a second.
fn ticks() -> u64 {
    let status = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<u64> =
        status.rsplit_once(')').unwrap().1.split_whitespace().skip(11).take(2).map(|it| it.parse().unwrap()).collect();
    fields[0] + fields[1]
}

/// Uses the tree as an executor does: makes, limits and measures a group, and leaves a process in it.
fn use_tree((hierarchy, kept): &mut (Hierarchy, Vec<(Load, Group)>)) -> String {
    let group = hierarchy.group("session").unwrap();
    group.set(&limits(Some(500), Some(512 * MIB), Some(50))).unwrap();
    let meter = group.begin();
    let call = group.child("call").unwrap();
    let load = Load::start_in(&call);
    let answer = format!("{} {:?}", group.processes().contains(&load.pid()), group.used(&meter).oom_kills);
    group.settle();
    kept.push((load, call));
    answer
}

fn limits(cpu_millicores: Option<u64>, memory_bytes: Option<u64>, processes: Option<u64>) -> GroupLimits {
    GroupLimits { cpu_millicores, memory_bytes, processes }
}

/// Returns the tree. If this user has none, prints that and returns `None`.
fn tree() -> Option<Hierarchy> {
    let hierarchy = Hierarchy::find();
    let unusable = |finding: &tree::Finding| finding.usable.is_err() && finding.controller != Controller::Io;
    let unusable: Vec<_> = hierarchy.findings().into_iter().filter(unusable).collect();
    if unusable.is_empty() {
        return Some(hierarchy);
    }
    assert!(!rustix::process::geteuid().is_root(), "root must have them: {unusable:?}");
    skipped(&format!("these are needed: {unusable:?}"));
    None
}

/// Reports that a test cannot run here.
fn skipped(why: &str) {
    wieldy_testkit::skip(why);
}

/// Returns a name that no other test uses.
fn unique() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns every folder in the trees whose path contains this text.
fn folders(part: &str) -> Vec<PathBuf> {
    fn walk(folder: &Path, part: &str, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if entry.path().to_str().is_some_and(|path| path.contains(part)) {
                    found.push(entry.path());
                }
                walk(&entry.path(), part, found);
            }
        }
    }
    let mut found = Vec::new();
    walk(Path::new("/sys/fs/cgroup"), part, &mut found);
    found
}

/// Returns the content of a group's file, from the tree that has it.
fn says(group: &str, file: &str) -> String {
    let paths: Vec<_> = folders(group).into_iter().filter(|it| it.ends_with(group) && it.join(file).exists()).collect();
    fs::read_to_string(paths[0].join(file)).unwrap().trim().to_owned()
}

/// Returns the number of periods of a group's processor limit that have begun.
fn periods(group: &str) -> u64 {
    let folder = folders(group).into_iter().find(|it| {
        it.ends_with(group) && fs::read_to_string(it.join("cpu.stat")).is_ok_and(|text| text.contains("nr_periods"))
    });
    let text = fs::read_to_string(folder.unwrap().join("cpu.stat")).unwrap();
    text.lines().find_map(|line| line.strip_prefix("nr_periods ")).unwrap().parse().unwrap()
}

#[test]
fn root_finds_every_controller_where_the_machine_has_it() {
    let Some(hierarchy) = tree() else { return };
    let versions: Vec<_> =
        hierarchy.findings().into_iter().map(|it| (it.controller, it.usable.unwrap().version)).collect();
    let (most, kill) = match hierarchy.kind() {
        Kind::V2 => (Version::V2, Version::V2),
        Kind::Hybrid => (Version::V1, Version::V2),
        Kind::V1 => (Version::V1, Version::V1),
        Kind::None => panic!("no control groups"),
    };
    use Controller::{Cpu, Cpuacct, Io, Kill, Memory, Pids};
    assert_eq!(versions, [(Cpu, most), (Memory, most), (Pids, most), (Cpuacct, most), (Io, most), (Kill, kill)]);
}

#[test]
fn a_process_over_the_groups_memory_is_killed_and_the_limit_is_the_groups_own() {
    let Some(hierarchy) = tree() else { return };
    let group = hierarchy.group(&unique()).unwrap();
    group.set(&limits(None, Some(64 * MIB), None)).unwrap();
    let mut load = Load::start_in(&group);
    let meter = group.begin();
    assert_eq!(load.ask(&format!("memory {}", 32 * MIB)), Some((32 * MIB).to_string()));
    let before = group.used(&meter);
    assert_eq!((before.oom_kills, before.oom_kills_by), (Some(0), None));
    assert_eq!(load.ask(&format!("memory {}", 128 * MIB)), None);
    assert_eq!(load.signal(), Some(9));
    let used = group.used(&meter);
    assert_eq!((used.oom_kills, used.oom_kills_by), (Some(1), Some(Whose::Own)));
    let peak = used.memory_peak_bytes.unwrap();
    assert_eq!(peak.exact(), Some(64 * MIB), "{peak:?}");
}

// Shows: B8.3
#[test]
fn children_whose_sum_is_over_the_parents_memory_are_killed_by_the_limit_above() {
    let Some(hierarchy) = tree() else { return };
    let parent = hierarchy.group(&unique()).unwrap();
    parent.set(&limits(None, Some(128 * MIB), None)).unwrap();
    let children = ["a", "b"].map(|name| parent.child(name).unwrap());
    children.iter().for_each(|child| child.set(&limits(None, Some(120 * MIB), None)).unwrap());
    let mut loads = children.each_ref().map(Load::start_in);
    let meters = children.each_ref().map(Group::begin);
    assert!(loads[0].ask(&format!("memory {}", 90 * MIB)).is_some());
    // The process that exceeds the limit and the one that is killed may differ. The kernel may even kill the second one
    // while it still frees the memory of the first.
    let _ = loads[1].ask(&format!("memory {}", 70 * MIB));
    let lives = loads.each_mut().map(|load| load.ask("hello").is_some());
    assert_ne!(lives, [true, true]);
    for ((child, meter), (load, lives)) in children.iter().zip(&meters).zip(loads.iter_mut().zip(lives)) {
        let used = child.used(meter);
        let told = (used.oom_kills, used.oom_kills_by);
        assert_eq!(told, if lives { (Some(0), None) } else { (Some(1), Some(Whose::Above)) });
        assert!(lives || load.signal() == Some(9));
    }
}

#[test]
fn a_fork_over_the_groups_processes_is_refused_and_the_limit_is_the_groups_own() {
    let Some(hierarchy) = tree() else { return };
    let group = hierarchy.group(&unique()).unwrap();
    let mut load = Load::start_in(&group);
    group.set(&limits(None, None, Some(load.threads() + 3))).unwrap();
    let meter = group.begin();
    assert_eq!(load.ask("fork 3"), Some("3".into()));
    assert_eq!(group.used(&meter).process_refusals, Some(0));
    assert_eq!(load.ask("fork 3"), Some("0".into()));
    let used = group.used(&meter);
    assert_eq!((used.process_refusals, used.process_refusals_by), (Some(1), Some(Whose::Own)));
}

#[test]
fn the_parents_processes_are_the_sum_of_its_childrens() {
    let Some(hierarchy) = tree() else { return };
    let parent = hierarchy.group(&unique()).unwrap();
    let children = ["a", "b"].map(|name| parent.child(name).unwrap());
    let mut loads = children.each_ref().map(Load::start_in);
    let threads = loads[0].threads();
    parent.set(&limits(None, None, Some(2 * threads + 4))).unwrap();
    children.iter().for_each(|child| child.set(&limits(None, None, Some(threads + 4))).unwrap());
    let (above, meter) = (parent.begin(), children[1].begin());
    assert_eq!(loads[0].ask("fork 4"), Some("4".into()));
    assert_eq!(loads[1].ask("fork 1"), Some("0".into()));
    let (above, used) = (parent.used(&above), children[1].used(&meter));
    // Kernels differ in which of the two groups counts the refusal, but none names the child's limit as the reason.
    let refusals = (above.process_refusals, used.process_refusals, used.process_refusals_by);
    assert!(refusals == (Some(0), Some(1), Some(Whose::Above)) || refusals == (Some(1), Some(0), None), "{refusals:?}");
    assert_eq!(parent.processes().len(), 6);
}

// Shows: B7.1
#[test]
fn children_share_the_processor_time_of_their_parent() {
    let Some(hierarchy) = tree() else { return };
    let name = unique();
    let parent = hierarchy.group(&name).unwrap();
    parent.set(&limits(Some(200), None, None)).unwrap();
    let children = ["a", "b"].map(|name| parent.child(name).unwrap());
    let mut loads = children.each_ref().map(Load::start_in);
    let (meter, before) = (parent.begin(), periods(&name));
    loads.iter_mut().for_each(|load| load.order("burn 15"));
    loads.iter_mut().for_each(|load| assert_eq!(load.answer().unwrap(), "burnt"));
    let (used, periods) = (parent.used(&meter), periods(&name) - before);
    let cpu = used.cpu_us.unwrap();
    assert!(cpu >= 255_000, "two times 150 ms, less what ticks may hide: {used:?}");
    // 20 ms per period, and two more for partial periods; each processor may borrow some milliseconds more.
    assert!(cpu <= (periods + 2) * 20_000 + 20_000, "{cpu} µs in {periods} periods");
    assert!(used.throttled_us.unwrap() > 0, "{used:?}");
}

#[test]
fn limits_are_written_once_replaced_and_taken_away() {
    let Some(hierarchy) = tree() else { return };
    let name = unique();
    let group = hierarchy.group(&name).unwrap();
    let v2 = hierarchy.kind() == Kind::V2;
    let files = match v2 {
        true => ["cpu.max", "memory.max", "memory.swap.max", "pids.max"],
        false => ["cpu.cfs_quota_us", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "pids.max"],
    };
    let written = || files.map(|file| says(&name, file));
    let fresh = written();
    group.set(&limits(Some(1500), Some(64 * MIB), Some(7))).unwrap();
    let swap = if v2 { "0" } else { "67108864" };
    assert_eq!(written(), [if v2 { "150000 100000" } else { "150000" }, "67108864", swap, "7"]);
    group.set(&limits(Some(1), Some(128 * MIB), Some(7))).unwrap();
    let swap = if v2 { "0" } else { "134217728" };
    assert_eq!(written(), [if v2 { "1000 100000" } else { "1000" }, "134217728", swap, "7"]);
    group.set(&limits(None, Some(32 * MIB), Some(8))).unwrap();
    assert_eq!(written()[1], "33554432");
    group.set(&NONE).unwrap();
    assert_eq!(written(), fresh);
}

#[test]
fn a_child_may_be_given_more_processor_time_than_its_parent_and_has_the_parents() {
    let Some(hierarchy) = tree() else { return };
    let (name, child_name) = (unique(), unique());
    let parent = hierarchy.group(&name).unwrap();
    let child = parent.child(&child_name).unwrap();
    let quotas = || match hierarchy.kind() {
        Kind::V2 => [&name, &child_name].map(|it| says(it, "cpu.max").replace(" 100000", "").replace("max", "-1")),
        _ => [&name, &child_name].map(|it| says(it, "cpu.cfs_quota_us")),
    };
    child.set(&limits(Some(800), None, None)).unwrap();
    assert_eq!(quotas(), ["-1", "80000"]);
    // v1 refuses a child's limit above the parent's, so it is removed there: the parent's limit applies.
    let covered = if hierarchy.kind() == Kind::V2 { "80000" } else { "-1" };
    parent.set(&limits(Some(500), None, None)).unwrap();
    assert_eq!(quotas(), ["50000", covered]);
    parent.set(&limits(Some(1000), None, None)).unwrap();
    assert_eq!(quotas(), ["100000", "80000"]);
    parent.set(&NONE).unwrap();
    assert_eq!(quotas(), ["-1", "80000"]);
}

#[test]
fn a_meter_reports_what_was_used_since_it_began() {
    let Some(hierarchy) = tree() else { return };
    let group = hierarchy.group(&unique()).unwrap();
    let mut load = Load::start_in(&group);
    let all = load.threads() + 5;
    let first = group.begin();
    load.ask(&format!("memory {}", 64 * MIB)).unwrap();
    let (burning, began) = (group.begin(), Instant::now());
    load.ask("burn 30").unwrap();
    let burnt = group.used(&burning).cpu_us.unwrap();
    // The process measured 300 ms as the difference of two values that the kernel rounds down to 10 ms. It has one
    // running thread, so it cannot use more than the time that passed; on a busy machine it may be preempted between
    // two instructions.
    let passed = u64::try_from(began.elapsed().as_micros()).unwrap() + 20_000;
    assert!((275_000..=passed).contains(&burnt), "{burnt} µs of {passed}");
    load.ask("fork 5").unwrap();
    let used = group.used(&first);
    assert!(used.cpu_us.unwrap() >= burnt, "{used:?}");
    let peak = used.memory_peak_bytes.unwrap();
    assert!((64 * MIB..96 * MIB).contains(&peak.exact().unwrap()), "{used:?}");
    let processes = used.processes_peak.unwrap();
    // A kernel without a peak reports only the current value.
    assert!([Some(all), None].map(|most| Peak { least: all, most }).contains(&processes), "{used:?}");
    let events = (used.oom_kills, used.oom_kills_by, used.process_refusals, used.process_refusals_by);
    assert_eq!(events, (Some(0), None, Some(0), None));

    load.ask("memory 0").unwrap();
    let second = group.begin();
    load.ask("hello").unwrap();
    let used = group.used(&second);
    assert!(used.cpu_us.unwrap() < 250_000, "{used:?}");
    let again = used.memory_peak_bytes.unwrap();
    assert!(again.least < 32 * MIB, "{used:?}");
    // v2 before 6.12 cannot reset the peak, and reports the memory in use now and the old peak. The old peak may have
    // grown after it was read above: the five children were still loading their libraries.
    let is_old = |most: u64| (peak.least..96 * MIB).contains(&most);
    let old_v2 = hierarchy.kind() == Kind::V2 && again.most.is_some_and(is_old);
    assert!(again.exact().is_some() || old_v2, "{used:?}");
    assert_eq!(used.processes_peak.unwrap().least, all, "{used:?}");
}

#[test]
fn a_continued_meter_reads_like_a_fresh_one() {
    let Some(hierarchy) = tree() else { return };
    let group = hierarchy.group(&unique()).unwrap();
    let load = Load::start_in(&group);
    let own = load.threads();
    let processes = |meter: &Meter| group.used(meter).processes_peak.unwrap();
    assert_eq!(processes(&group.go_on()).least, own);
    let growing = group.go_on();
    let mut others = Load::start_in(&group);
    let all = own + others.threads() + 5;
    others.ask("fork 5").unwrap();
    drop(others);
    let peak = processes(&growing);
    // A kernel without a peak reports only the current value.
    assert_eq!(peak, peak.most.map_or(Peak { least: own, most: None }, |_| Peak { least: all, most: Some(all) }));
    // An earlier peak is never reported as the current one, no matter how often it is read.
    let again = [group.go_on(), group.go_on(), group.begin()].map(|meter| processes(&meter));
    assert_eq!(again, [Peak { least: own, most: peak.most }; 3]);
}

#[test]
fn page_cache_that_a_call_left_behind_is_let_go_of() {
    let Some(hierarchy) = tree() else { return };
    let name = unique();
    let group = hierarchy.group(&name).unwrap();
    let mut load = Load::start_in(&group);
    let Some(file) = cached_file() else { return skipped("no folder here has a page cache of a disk") };
    load.ask(&format!("write {}", file.path().display())).unwrap();
    let now = if hierarchy.kind() == Kind::V2 { "memory.current" } else { "memory.usage_in_bytes" };
    let used = || says(&name, now).parse::<u64>().unwrap();
    assert!(used() >= 32 * MIB, "{}", used());
    group.settle();
    // The kernel frees most of the pages, not all.
    assert!(used() < 16 * MIB, "{}", used());
    assert_eq!(load.ask("hello"), Some("hello".into()));
}

/// Returns a file on a disk: the kernel cannot free the pages of a file in memory.
fn cached_file() -> Option<tempfile::NamedTempFile> {
    let file = tempfile::NamedTempFile::new_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
    (!crate::world::is_in_memory(file.path())).then_some(file)
}

#[test]
fn a_fork_bomb_is_killed_to_the_last_process() {
    let Some(hierarchy) = tree() else { return };
    let group = hierarchy.group(&unique()).unwrap();
    let child = group.child("call").unwrap();
    child.set(&limits(None, None, Some(100))).unwrap();
    let mut load = Load::start_in(&child);
    let killed = KilledOnDrop(&group);
    let meter = child.begin();
    assert_eq!(load.ask("bomb"), Some("lit".into()));
    // The bomb is at its limit when forks are refused.
    while child.used(&meter).process_refusals.unwrap() < 10 {
        std::thread::yield_now();
    }
    group.kill().unwrap();
    assert_eq!(group.processes(), []);
    assert_eq!(load.signal(), Some(9));
    drop(killed);
    assert_eq!(child.used(&meter).process_refusals_by, Some(Whose::Own));
    child.remove().unwrap();
    group.remove().unwrap();
}

#[test]
fn a_group_goes_when_it_and_its_children_are_dropped_and_not_before() {
    let Some(hierarchy) = tree() else { return };
    let name = unique();
    let group = hierarchy.group(&name).unwrap();
    let alone = folders(&name).len();
    assert!(alone >= 1);
    assert!(hierarchy.group(&name).is_err(), "the name is taken");
    assert_eq!(folders(&name).len(), alone);
    let child = group.child("a").unwrap();
    let grandchild = child.child("b").unwrap();
    assert_eq!(folders(&name).len(), 3 * alone);
    assert_eq!(group.remove().unwrap_err().kind(), std::io::ErrorKind::ResourceBusy);
    drop(child);
    assert_eq!(folders(&name).len(), 3 * alone);
    drop(grandchild);
    assert_eq!(folders(&name), Vec::<PathBuf>::new());

    let busy = hierarchy.group(&name).unwrap();
    let load = Load::start_in(&busy);
    assert_eq!(busy.remove().unwrap_err().kind(), std::io::ErrorKind::ResourceBusy);
    assert_eq!(folders(&name).len(), alone);
    drop(load);
    // Groups that were left behind are removed with the executor's own group.
    let own = hierarchy.own().folders().to_vec();
    assert_eq!(own.iter().filter(|folder| folder.exists()).count(), alone);
    drop(hierarchy);
    assert_eq!(own.iter().filter(|folder| folder.exists()).count(), 0);
}

#[test]
fn names_are_letters_digits_and_hyphens() {
    let hierarchy = Hierarchy::find();
    for name in ["", ".", "..", "a/b", "a b", "a_b", "ä", &"x".repeat(101)] {
        let refused = hierarchy.group(name).err().map(|error| error.kind());
        assert_eq!(refused, Some(std::io::ErrorKind::InvalidInput), "{name}");
    }
}

#[test]
fn the_groups_of_a_dead_executor_are_swept_with_what_runs_in_them_and_those_of_a_living_one_stay() {
    let Some(hierarchy) = tree() else { return };
    let mut executors = [Load::start(), Load::start()];
    executors.iter_mut().for_each(|it| assert!(it.ask("find").is_some()));
    executors.iter_mut().for_each(|it| assert_eq!(it.ask("use").unwrap(), "true Some(0)"));
    let names = executors.each_ref().map(|it| format!("wieldy-{}-", it.child.id()));
    let each = folders(&names[0]).len();
    assert_eq!(folders(&names[1]).len(), each);
    let [mut dying, living] = executors;
    dying.child.kill().unwrap();
    dying.child.wait().unwrap();
    // Any executor that starts on this machine sweeps too, so some may be gone already.
    hierarchy.sweep();
    assert_eq!(folders(&names[0]), Vec::<PathBuf>::new());
    assert_eq!(folders(&names[1]).len(), each);
    let call = folders(&names[1]).into_iter().find(|it| it.ends_with("call")).unwrap();
    assert_eq!(fs::read_to_string(call.join("cgroup.procs")).unwrap().lines().count(), 1);
    // It ends by itself, and removes its groups.
    drop(living);
    hierarchy.sweep();
    assert_eq!(folders(&names[1]), Vec::<PathBuf>::new());
}

#[test]
fn an_ordinary_user_without_a_group_of_its_own_is_told_why_and_goes_on_without() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can become somebody else");
    }
    let place = tempfile::tempdir().unwrap();
    let mut load = Load::start_as_nobody(&place);
    let findings = load.ask("find").unwrap();
    assert_eq!(findings.matches("is not ours to write to").count(), Controller::ALL.len(), "{findings}");
    assert!(!findings.contains("usable: Ok"), "{findings}");
    // No error, and no wrong figure.
    assert_eq!(load.ask("use").unwrap(), "false None");
}

#[test]
fn an_ordinary_user_with_a_delegated_group_has_all_controllers_of_v2() {
    let Some(hierarchy) = tree() else { return };
    if hierarchy.kind() != Kind::V2 {
        return skipped("controllers are delegated on v2 only");
    }
    // A group as systemd delegates it; the tree above has already enabled the controllers for its children.
    let delegated = Path::new("/sys/fs/cgroup").join(unique());
    fs::create_dir(&delegated).unwrap();
    for file in ["", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"] {
        chown(delegated.join(file), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let place = tempfile::tempdir().unwrap();
    let mut loads = [Load::start_as_nobody(&place), Load::start()];
    for load in &loads {
        fs::write(delegated.join("cgroup.procs"), load.child.id().to_string()).unwrap();
    }
    // While another process is in the group, it cannot have child groups with controllers.
    let findings = loads[0].ask("find").unwrap();
    assert_eq!(findings.matches("other processes are in the control group").count(), 4, "{findings}");
    assert!(findings.contains("systemd-run --user --scope -p Delegate=yes"), "{findings}");
    assert_eq!(findings.matches("usable: Ok").count(), 2, "time and killing need no controller: {findings}");
    let [mut load, other] = loads;
    drop(other);
    // Twice: the second time the process has already moved.
    for _ in 0..2 {
        let findings = load.ask("find").unwrap();
        assert_eq!(findings.matches("usable: Ok").count(), Controller::ALL.len(), "{findings}");
        assert_eq!(load.ask("use").unwrap(), "true Some(0)");
    }
    drop(load);
    for _ in 0..2 {
        assert!(tree().is_some());
    }
    for folder in folders(delegated.file_name().unwrap().to_str().unwrap()).into_iter().rev() {
        let _ = fs::write(folder.join("cgroup.kill"), "1");
        while fs::remove_dir(&folder).is_err() {
            std::thread::yield_now();
        }
    }
}
