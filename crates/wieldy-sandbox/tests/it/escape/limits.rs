//! Tests promise 10: the resources of a command are limited, the limit that it passed is reported, and its neighbours
//! go on working.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use wieldy_core::{Confinement, Enforcer, Limit, Network, Overrun, Place, ResourceLimits, Sandbox};

use super::arena::{Arena, Ran, is_root};

const MIB: u64 = 1 << 20;

fn limits() -> ResourceLimits {
    ResourceLimits {
        cpu_millicores: Some(1500),
        memory_bytes: Some(96 * MIB),
        processes: Some(64),
        open_files: Some(256),
        disk_bytes: Some(64 * MIB),
        disk_files: Some(2000),
        output_bytes: None,
    }
}

/// Runs a bomb in a sandbox of its own and in a session, while a neighbour works. Asserts that the session works again
/// afterwards.
async fn bombed(script: &str) -> Vec<Ran> {
    bombed_within(limits(), script).await
}

async fn bombed_within(limits: ResourceLimits, script: &str) -> Vec<Ran> {
    let mut arena = Arena::new();
    arena.confinement.limits = limits;
    let arena = Arc::new(arena);
    // In another workspace: new files in a workspace count for all calls that run in it at that time.
    let mut beside = Arena::new();
    beside.confinement.limits = limits;
    let mut found = Vec::new();
    for place in [Place::Own, Arena::session("bomber")] {
        let confinement = arena.confinement(place.clone());
        let bomb = arena.run_in(&confinement, script);
        let neighbour = async {
            let mut worked = 0;
            for _ in 0..5 {
                let twin = "echo hi > neighbour; cat neighbour; for i in 1 2 3; do (true); done";
                assert_eq!(beside.run(Arena::session("neighbour"), twin).await, "hi\n");
                worked += 1;
            }
            worked
        };
        let (ran, worked) = tokio::join!(bomb, neighbour);
        assert_eq!(worked, 5);
        found.push(ran.unwrap());
        let after = arena.run_in(&confinement, "echo on").await;
        let after = match after {
            // Its files in memory may have ended its sandbox; the next call gets a new one.
            Err(error) if error.is_crash() => arena.run_in(&confinement, "echo on").await,
            after => after,
        };
        assert_eq!(after.unwrap().stdout, "on\n", "{place:?}");
    }
    open_up(&arena);
    found
}

/// Makes folders readable again: otherwise only root could remove them.
fn open_up(arena: &Arena) {
    for entry in std::fs::read_dir(&arena.workspace).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with("top-") {
            std::fs::set_permissions(entry.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        }
    }
}

/// Asserts that the overruns of a bomb name one of these limits, with the allowed amount and a plausible use.
async fn overruns(script: &str, allowed: &[(Limit, u64)]) {
    for ran in bombed(script).await {
        let Some(Overrun { limit, allowed: allowance, used, .. }) = ran.exit.overrun.clone() else {
            panic!("{script}: {ran:?}")
        };
        assert!(allowed.contains(&(limit, allowance)), "{script}: {ran:?}");
        assert!(used >= allowance / 2 && used < allowance * 4, "{script}: {ran:?}");
    }
}

/// Returns true if the kernel enforces this limit for a whole process tree here. If not, the supervisor does, or each
/// process has its own limit.
pub(super) async fn is_by_kernel(limit: Limit) -> bool {
    let arena = Arena::new();
    let status = arena.native.create(&arena.confinement(Arena::session("asked"))).await.unwrap();
    let by = status.enforcement.iter().find(|enforcement| enforcement.limit == limit).unwrap().by;
    by == Enforcer::Kernel
}

const MEMORY: (Limit, u64) = (Limit::MemoryBytes, 96 * MIB);
const DISK: (Limit, u64) = (Limit::DiskBytes, 64 * MIB);
const FILES: (Limit, u64) = (Limit::DiskFiles, 2000);

/// P-SBX-13.
// Shows: B7.1
#[tokio::test]
async fn a_fork_bomb_stays_within_its_processes() {
    let script = "exec python3 -c '
import os, time
first, end = os.getpid(), time.time() + 30
while time.time() < end:
    try: os.fork()
    except OSError: end = min(end, time.time() + 1); time.sleep(0.01)
if os.getpid() != first: time.sleep(100)
os._exit(1)'";
    // More memory: without a cgroup, sixty-four of these processes need more than the usual limit together.
    let roomy = ResourceLimits { memory_bytes: Some(1 << 30), ..limits() };
    for ran in bombed_within(roomy, script).await {
        let Some(overrun) = ran.exit.overrun.clone() else { panic!("{ran:?}") };
        assert_eq!((overrun.limit, overrun.allowed), (Limit::Processes, 64));
        assert!(ran.exit.usage.processes_peak.unwrap() <= 64 && overrun.used <= 66, "{ran:?}");
    }
}

/// P-SBX-13.
#[tokio::test]
async fn ten_thousand_threads_stay_within_the_processes() {
    let script = "python3 -c '
import threading, time, sys
made = 0
try:
    for _ in range(10000):
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start(); made += 1
except RuntimeError: pass
print(made, flush=True)
time.sleep(0.2)
import os; os._exit(1)'";
    // More memory: without a cgroup, the stacks of the threads count to the memory of the process.
    let roomy = ResourceLimits { memory_bytes: Some(1 << 30), ..limits() };
    for ran in bombed_within(roomy, script).await {
        assert!(ran.stdout.trim().parse::<u64>().unwrap() < 64, "{ran:?}");
        assert_eq!(
            ran.exit.overrun.as_ref().map(|overrun| (overrun.limit, overrun.allowed)),
            Some((Limit::Processes, 64))
        );
    }
}

/// P-SBX-14.
// Shows: B7.1
#[tokio::test]
async fn a_memory_bomb_on_the_heap_is_ended() {
    let before = resident_kib();
    overruns("python3 -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'", &[MEMORY]).await;
    let after = resident_kib();
    assert!(after < before + 16 * 1024, "the executor has grown from {before} to {after} KiB");
}

/// Returns the current memory of this process.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim_end_matches("kB").trim().parse().unwrap()
}

#[tokio::test]
async fn a_memory_bomb_of_many_processes_is_ended() {
    if !is_by_kernel(Limit::MemoryBytes).await {
        return overruns(
            "for i in {1..8}; do head -c 40M /dev/zero | tail -c 40M | (sleep 3; cat >/dev/null) & done; wait; exit 1",
            &[MEMORY],
        )
        .await;
    }
    let script = "for i in {1..8}; do python3 -c 'x = bytearray(30 << 20); import time; time.sleep(3)' & done; \
                  for job in $(jobs -p); do wait $job || failed=1; done; exit $failed";
    overruns(script, &[MEMORY]).await;
}

#[tokio::test]
async fn a_memory_bomb_in_private_folders_is_ended() {
    let script =
        "set -e; for i in {1..40}; do head -c 4M /dev/zero > /dev/shm/$i; head -c 4M /dev/zero > /tmp/$i; done";
    overruns(script, &[MEMORY, DISK]).await;
}

#[tokio::test]
async fn much_of_a_file_read_is_no_memory_bomb() {
    let script = "for i in 1 2 3; do head -c 50M /dev/zero > file; cat file file file file > /dev/null; done; rm file; echo fine";
    let mut arena = Arena::new();
    arena.confinement.limits = ResourceLimits { disk_bytes: Some(1 << 30), ..limits() };
    for place in [Place::Own, Arena::session("reader")] {
        assert_eq!(arena.run(place, script).await, "fine\n");
    }
}

/// P-SBX-15.
// Shows: B7.1
#[tokio::test]
async fn a_huge_file_is_stopped() {
    for folder in [".", "/tmp", "/dev/shm", "$HOME"] {
        let both = [MEMORY, DISK];
        let allowed = if folder == "." { &both[1..] } else { &both[..] };
        overruns(&format!("head -c 3G /dev/zero > {folder}/huge; exit $?"), allowed).await;
    }
}

#[tokio::test]
async fn much_written_by_many_processes_is_stopped() {
    let script = "for i in {1..12}; do (while :; do head -c 20M /dev/zero > part-$i-$RANDOM || exit; sync part-$i-* ; done) & done; wait; exit 1";
    overruns(script, &[DISK]).await;
}

#[tokio::test]
async fn a_sparse_file_takes_no_room_beyond_its_size() {
    // The size of a file is limited, even if the file is sparse.
    overruns("truncate -s 500M sparse", &[DISK]).await;
    let mut arena = Arena::new();
    arena.confinement.limits = limits();
    assert_eq!(arena.run(Place::Own, "truncate -s 60M sparse && rm sparse && echo fine").await, "fine\n");
}

#[tokio::test]
async fn room_cannot_be_taken_without_writing() {
    let mut arena = Arena::new();
    arena.confinement.limits = limits();
    let script = "for i in {1..10}; do attack fallocate -l 60M file-$i; attack fallocate -n -l 1G file-$i; done; \
                  attack fallocate -z -l 60M file; \
                  twin bash -c 'head -c 1M /dev/zero > file; fallocate -p -o 0 -l 512K file'; \
                  twin python3 -c 'import os; os.posix_fallocate(os.open(\"grown\", os.O_CREAT | os.O_RDWR), 0, 1 << 20)'; du -m . | tail -1";
    for place in [Place::Own, Arena::session("one")] {
        assert_eq!(arena.run(place, script).await, "2\t.\n");
    }
}

#[tokio::test]
async fn much_written_by_children_without_a_wait_is_stopped() {
    let script = r#"exec perl -e '$SIG{CHLD} = "IGNORE"; for my $i (1..100) { if (!fork) { open(F, ">part-$i"); print F "x" x (9 << 20); close F; exit } select(undef, undef, undef, 0.03); } exit 1'"#;
    overruns(script, &[DISK]).await;
}

/// P-SBX-15.
#[tokio::test]
async fn many_small_files_are_stopped() {
    for folder in [".", "/tmp"] {
        let script = format!(
            "mkdir -p {folder}/many && cd {folder}/many && python3 -c '\nfor i in range(1000000): open(str(i), \"w\").close()'; code=$?; cd ..; exit $code"
        );
        overruns(&script, &[FILES]).await;
    }
}

/// Python code that enters a folder which a scan of the workspace has difficulty to read.
const OUT_OF_SIGHT: [&str; 3] = [
    // It can be entered and written to, but not read.
    "os.mkdir(top); os.chmod(top, 0o300); os.chdir(top)",
    // It is deeply nested.
    "os.mkdir(top); os.chdir(top)\nfor _ in range(100): os.mkdir('d'); os.chdir('d')",
    // Its path is longer than the limit of paths.
    "os.mkdir(top); os.chdir(top)\nfor _ in range(20): os.mkdir('d' * 250); os.chdir('d' * 250)",
];

/// Returns a script that enters such a folder and makes this many files there.
fn out_of_sight(way: &str, files: u32) -> String {
    format!(
        "python3 -c \"import os, time\ntop = f'top-{{time.time_ns()}}'\n{way}\nfor i in range({files}): open(str(i), 'w').close()\ntime.sleep(0.3)\" && echo fine"
    )
}

#[tokio::test]
async fn many_files_out_of_sight_are_stopped() {
    // If the growth of the whole file system counts, other processes may write so much that the limit of bytes is
    // passed first.
    for way in OUT_OF_SIGHT {
        overruns(&out_of_sight(way, 20_000), &[FILES, DISK]).await;
    }
    // Fills ten folders, and makes each unreadable afterwards.
    let closing = "python3 -c \"import os, time\nfor n in range(10):\n    top = f'top-{time.time_ns()}'; os.mkdir(top)\n    \
                   for i in range(1500): open(f'{top}/{i}', 'w').close()\n    os.chmod(top, 0o400)\ntime.sleep(0.3)\"";
    overruns(closing, &[FILES, DISK]).await;
}

/// A script that writes 900 MB into an unreadable folder, by children that are not waited for.
const WRITTEN_OUT_OF_SIGHT: &str = r#"top=top-$RANDOM; mkdir -m 0300 $top; cd $top; exec perl -e '$SIG{CHLD} = "IGNORE"; for my $i (1..100) { if (!fork) { open(F, ">part-$i"); print F "x" x (9 << 20); close F; exit } select(undef, undef, undef, 0.03); } exit 1'"#;

#[tokio::test]
async fn much_written_out_of_sight_by_children_without_a_wait_is_stopped() {
    // Other processes may make so many files meanwhile that the limit of files is passed first.
    overruns(WRITTEN_OUT_OF_SIGHT, &[FILES, DISK]).await;
}

#[tokio::test]
async fn space_freed_by_others_does_not_hide_files_written_out_of_sight() {
    let mut arena = Arena::new();
    arena.confinement.limits = limits();
    let beside = arena.root.join("large");
    let made = std::process::Command::new("fallocate").args(["-l", "400M"]).arg(&beside).status().unwrap();
    assert!(made.success());
    let script =
        WRITTEN_OUT_OF_SIGHT.replace("cd $top;", "cd $top; touch ../on; while [ -e ../on ]; do sleep 0.05; done;");
    let on = arena.workspace.join("on");
    let confinement = arena.confinement(Place::Own);
    let removed = async {
        while !on.exists() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        std::fs::remove_file(&beside).unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        std::fs::remove_file(&on).unwrap();
    };
    let (ran, ()) = tokio::join!(arena.run_in(&confinement, &script), removed);
    let ran = ran.unwrap();
    let overrun = ran.exit.overrun.as_ref().map(|overrun| (overrun.limit, overrun.allowed));
    assert!(overrun == Some(DISK) || overrun == Some(FILES), "{ran:?}");
    open_up(&arena);
}

#[tokio::test]
async fn files_out_of_sight_and_within_the_limits_are_allowed() {
    let mut arena = Arena::new();
    // High limits, since other processes write to the same file system meanwhile.
    arena.confinement.limits = ResourceLimits { disk_bytes: Some(8 << 30), disk_files: Some(1_000_000), ..limits() };
    for way in OUT_OF_SIGHT {
        assert_eq!(arena.run(Place::Own, &out_of_sight(way, 500)).await, "fine\n", "{way}");
    }
    open_up(&arena);
}

#[tokio::test]
async fn files_that_others_make_on_the_same_disk_are_not_counted() {
    let mut arena = Arena::new();
    arena.confinement.limits = limits();
    let beside = arena.root.join("many");
    std::fs::create_dir(&beside).unwrap();
    // Deep folders can be scanned, and a command cannot write to a folder that it cannot enter.
    std::fs::create_dir_all(arena.workspace.join("d/".repeat(100))).unwrap();
    if is_root() {
        let theirs = arena.workspace.join("theirs");
        std::fs::create_dir(&theirs).unwrap();
        std::fs::set_permissions(&theirs, std::fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(&theirs, Some(12345), Some(12345)).unwrap();
    }
    let run = arena.run(Place::Own, "until [ -e go ]; do sleep 0.05; done; sleep 0.2; echo fine");
    let others = async {
        for number in 0..4000 {
            std::fs::write(beside.join(number.to_string()), "").unwrap();
        }
        std::fs::write(beside.join("large"), vec![1; 100 << 20]).unwrap();
        tokio::task::yield_now().await;
        std::fs::write(arena.workspace.join("go"), "").unwrap();
    };
    // The command must be running before the others begin.
    let others = async {
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        others.await;
    };
    assert_eq!(tokio::join!(run, others).0, "fine\n");
}

#[tokio::test]
async fn private_folders_are_limited_by_each_call_not_by_the_call_that_built_the_sandbox() {
    let mut arena = Arena::with(1);
    arena.confinement.limits = ResourceLimits { memory_bytes: Some(1 << 30), ..limits() };
    arena.confinement.place_limits = ResourceLimits { disk_bytes: Some(512 * MIB), ..ResourceLimits::default() };
    let large = ResourceLimits { disk_bytes: Some(512 * MIB), disk_files: Some(100_000), ..arena.confinement.limits };
    let bytes =
        "head -c 40M /dev/zero > /tmp/one-$RANDOM; head -c 40M /dev/zero > /dev/shm/two-$RANDOM; sleep 0.3; echo fine";
    let files =
        "cd $(mktemp -d); python3 -c '\nfor i in range(5000): open(str(i), \"w\").close()'; sleep 0.3; echo fine";
    for (place, script, passed) in [
        (Arena::session("one"), bytes, (Limit::DiskBytes, 64 * MIB)),
        (Arena::session("one"), files, (Limit::DiskFiles, 2000)),
        (Place::Own, bytes, (Limit::DiskBytes, 64 * MIB)),
    ] {
        let small = arena.confinement(place);
        let large = wieldy_core::Confinement { limits: large, ..small.clone() };
        // Files from before the call do not count for it.
        for (confinement, overrun) in [(&large, None), (&small, Some(passed)), (&large, None)] {
            let ran = arena.run_in(confinement, script).await.unwrap();
            let found = ran.exit.overrun.as_ref().map(|overrun| (overrun.limit, overrun.allowed));
            assert_eq!(found, overrun, "{ran:?}");
            assert_eq!(ran.stdout, if overrun.is_none() { "fine\n" } else { "" }, "{ran:?}");
        }
        assert_eq!(
            arena.run(small.place, "head -c 30M /dev/zero > /tmp/three-$RANDOM; sleep 0.1; echo fine").await,
            "fine\n"
        );
    }
}

/// P-SBX-16.
// Shows: B7.1
#[tokio::test]
async fn descriptors_run_out_for_the_command_only() {
    let script = "python3 -c '
import os
made = []
try:
    while True: made.append(os.open(\"/dev/null\", 0))
except OSError: print(len(made) + 3)'";
    for ran in bombed(script).await {
        assert_eq!(ran.stdout, "256\n");
    }
}

#[tokio::test]
async fn a_session_has_limits_of_its_own_for_all_of_its_calls() {
    if !is_by_kernel(Limit::MemoryBytes).await {
        return super::arena::say("limits of a session as a whole: there is no writable cgroup here");
    }
    let mut arena = Arena::new();
    arena.confinement.limits = ResourceLimits { memory_bytes: Some(100 * MIB), ..limits() };
    arena.confinement.place_limits = ResourceLimits { memory_bytes: Some(120 * MIB), ..ResourceLimits::default() };
    let confinement = arena.confinement(Arena::session("small"));
    let hold =
        |mib: u32| format!("python3 -c 'x = bytearray({mib} << 20); import time; time.sleep(2); print(\"fine\")'");
    // Each alone is fine.
    for _ in 0..2 {
        let ran = arena.run_in(&confinement, &hold(70)).await.unwrap();
        assert_eq!(ran.stdout, "fine\n", "{ran:?}");
    }
    assert_exceed(&arena, &confinement, &confinement).await;
}

/// Asserts that two commands of 80 MiB at once pass a limit of 120 MiB.
async fn assert_exceed(arena: &Arena, one: &Confinement, two: &Confinement) {
    let script = "python3 -c 'x = bytearray(80 << 20); import time; time.sleep(2); print(\"fine\")'";
    let (one, two) = tokio::join!(arena.run_in(one, script), arena.run_in(two, script));
    let overruns: Vec<_> = [one.unwrap(), two.unwrap()].into_iter().filter_map(|ran| ran.exit.overrun).collect();
    assert!(!overruns.is_empty());
    for overrun in overruns {
        let of_session = (overrun.limit, overrun.allowed, overrun.session_used);
        assert_eq!(of_session, (Limit::MemoryBytes, 120 * MIB, Some(120 * MIB)), "{overrun:?}");
        assert!(overrun.used > 0 && overrun.used <= 100 * MIB, "the call's own part: {overrun:?}");
    }
}

#[tokio::test]
async fn a_session_with_several_sandboxes_has_no_more_than_one_with_one() {
    if !is_by_kernel(Limit::MemoryBytes).await {
        return super::arena::say("limits of a session as a whole: there is no writable cgroup here");
    }
    let mut arena = Arena::new();
    arena.confinement.limits = ResourceLimits { memory_bytes: Some(100 * MIB), ..limits() };
    arena.confinement.place_limits = ResourceLimits { memory_bytes: Some(120 * MIB), ..ResourceLimits::default() };
    let without = arena.confinement(Arena::session("small"));
    let with = Confinement { network: Network::Open, ..without.clone() };
    let other = Confinement { network: Network::Hosts(vec!["one.example".into()]), ..without.clone() };
    // Also when all sandboxes are new, and after the first one has ended.
    assert_exceed(&arena, &without, &with).await;
    let mut first = arena.native.list();
    first.sort_by_key(|one| one.created_at);
    assert!(arena.native.destroy(&first[0].sandbox.id).await);
    assert_exceed(&arena, &other, &with).await;
    assert_exceed(&arena, &other, &without).await;
    // The neighbour has a limit of its own.
    let neighbour = Confinement { place: Arena::session("neighbour"), ..with.clone() };
    let fine = "python3 -c 'x = bytearray(80 << 20); import time; time.sleep(2); print(\"fine\")'";
    let (one, two) = tokio::join!(arena.run_in(&without, fine), arena.run_in(&neighbour, fine));
    assert_eq!([one.unwrap().stdout, two.unwrap().stdout], ["fine\n", "fine\n"]);
}

#[tokio::test]
async fn bytes_that_a_session_writes_are_limited_for_all_of_its_calls() {
    let mut arena = Arena::new();
    arena.confinement.limits = limits();
    arena.confinement.place_limits = ResourceLimits { disk_bytes: Some(70 * MIB), ..ResourceLimits::default() };
    let without = arena.confinement(Arena::session("writer"));
    let with = Confinement { network: Network::Open, ..without.clone() };
    let neighbour = arena.confinement(Arena::session("neighbour"));
    let write = |name: &str| format!("head -c 30M /dev/zero > {name}; exit $?");
    for (confinement, name) in [(&without, "one"), (&with, "two"), (&neighbour, "three"), (&neighbour, "four")] {
        let ran = arena.run_in(confinement, &write(name)).await.unwrap();
        if ran.exit.usage.written_bytes == 0 {
            return super::arena::say("what a session writes: the kernel does not count it on this file system");
        }
        assert_eq!(ran.exit.overrun, None, "{ran:?}");
    }
    // A session that loses its sandbox keeps its use.
    for one in arena.native.list() {
        assert!(arena.native.destroy(&one.sandbox.id).await);
    }
    for confinement in [&without, &with] {
        let overrun = arena.run_in(confinement, &write("more")).await.unwrap().exit.overrun.unwrap();
        assert_eq!((overrun.limit, overrun.allowed), (Limit::DiskBytes, 70 * MIB));
        let all = overrun.session_used.unwrap();
        assert!((70 * MIB..140 * MIB).contains(&all) && overrun.used < 70 * MIB, "{overrun:?}");
    }
    // Files written just before a call count for it, since files get the time of the last tick. So wait.
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    let ran = arena.run_in(&without, "cat one | wc -c").await.unwrap();
    assert_eq!(ran.stdout, format!("{}\n", 30 * MIB), "{ran:?}");
}

/// The private folders of a session are as large as the session's limit, so its calls fill them together.
#[tokio::test]
async fn a_call_in_a_full_private_folder_reports_its_own_part_of_the_use() {
    let mut arena = Arena::new();
    arena.confinement.limits = ResourceLimits { disk_bytes: Some(20 * MIB), disk_files: Some(200), ..limits() };
    for place_limits in [arena.confinement.limits, ResourceLimits::default()] {
        for (first, second, limit, allowed) in [
            ("head -c 14M /dev/zero > /tmp/one", "head -c 14M /dev/zero > /tmp/two", Limit::DiskBytes, 20 * MIB),
            ("touch /tmp/{1..120}", "touch /tmp/{201..320}", Limit::DiskFiles, 200),
        ] {
            let session = Arena::session(&format!("{limit} {}", place_limits.disk_files.is_some()));
            let confinement = Confinement { place_limits, ..arena.confinement(session) };
            assert_eq!(arena.run_in(&confinement, first).await.unwrap().exit.overrun, None);
            let overrun = arena.run_in(&confinement, second).await.unwrap().exit.overrun.unwrap();
            assert_eq!((overrun.limit, overrun.allowed), (limit, allowed), "{overrun:?}");
            let all = overrun.session_used.unwrap();
            assert!(overrun.used < allowed * 2 / 3, "{overrun:?}");
            assert!(all >= allowed * 9 / 10 && all <= allowed * 3 / 2, "{overrun:?}");
        }
    }
}

#[tokio::test]
async fn files_that_a_session_makes_are_limited_for_all_of_its_calls() {
    let mut arena = Arena::new();
    arena.confinement.limits = limits();
    arena.confinement.place_limits = ResourceLimits { disk_files: Some(3000), ..ResourceLimits::default() };
    let without = arena.confinement(Arena::session("maker"));
    let with = Confinement { network: Network::Open, ..without.clone() };
    let neighbour = arena.confinement(Arena::session("neighbour"));
    let make = |folder: &str, files: u32| {
        format!(
            "mkdir -p {folder} && cd {folder} && python3 -c '\nfor i in range({files}): open(str(i), \"w\").close()'"
        )
    };
    for (confinement, folder) in
        [(&without, "one"), (&with, "/tmp/two"), (&neighbour, "three"), (&neighbour, "/tmp/four")]
    {
        let ran = arena.run_in(confinement, &make(folder, 1200)).await.unwrap();
        assert_eq!(ran.exit.overrun, None, "{folder}: {ran:?}");
    }
    // Files that are removed again, or only changed, do not count as made.
    let busy = "for i in 1 2 3 4 5; do mkdir d; (cd d; touch {1..300}); rm -r d; done; for i in {0..299}; do echo x > one/$i; done";
    for _ in 0..2 {
        assert_eq!(arena.run_in(&without, busy).await.unwrap().exit.overrun, None);
    }
    // A session that loses its sandbox keeps its use.
    for one in arena.native.list() {
        assert!(arena.native.destroy(&one.sandbox.id).await);
    }
    for (confinement, folder) in [(&without, "more"), (&with, "/tmp/more")] {
        let overrun = arena.run_in(confinement, &make(folder, 1500)).await.unwrap().exit.overrun.unwrap();
        assert_eq!((overrun.limit, overrun.allowed), (Limit::DiskFiles, 3000), "{folder}");
        let all = overrun.session_used.unwrap();
        assert!((3001..6000).contains(&all) && overrun.used <= 1600, "{folder}: {overrun:?}");
    }
    // One more file, made before the supervisor checks.
    let mut told = None;
    for number in 0..50 {
        // If other processes remove files from the same file system meanwhile, the new file is not noticed. So try
        // again.
        let ran = arena.run_in(&without, &format!("echo x > last-{number}")).await.unwrap();
        told = ran.exit.overrun.map(|overrun| (overrun.limit, overrun.allowed));
        if told.is_some() {
            break;
        }
    }
    assert_eq!(told, Some((Limit::DiskFiles, 3000)));
    // Calls that make no file still work, and so does the neighbour. Wait, since files made just before a call count
    // for it.
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert_eq!(arena.run_in(&without, "cat one/7").await.unwrap().stdout, "x\n");
    let fine = arena.run_in(&neighbour, "touch five && echo fine").await.unwrap();
    assert_eq!((fine.stdout.as_str(), fine.exit.overrun), ("fine\n", None));
}

// Shows: B8.3
#[tokio::test]
async fn a_sandbox_within_another_has_no_more_than_that_one() {
    if !is_by_kernel(Limit::MemoryBytes).await {
        return super::arena::say("sandboxes within others: there is no writable cgroup here");
    }
    let mut arena = Arena::new();
    arena.confinement.limits = ResourceLimits { memory_bytes: Some(100 * MIB), ..limits() };
    arena.confinement.place_limits = ResourceLimits { memory_bytes: Some(120 * MIB), ..ResourceLimits::default() };
    let outer = arena.native.create(&arena.confinement(Place::Own)).await.unwrap().sandbox.id;
    let outer = arena.confinement(Place::Sandbox(outer));
    let inner = Confinement { network: Network::Open, ..outer.clone() };
    let made = arena.native.create(&inner).await.unwrap().sandbox.id;
    let inner = Confinement { place: Place::Sandbox(made), ..inner };
    assert_exceed(&arena, &outer, &inner).await;
}

#[tokio::test]
async fn a_flood_of_output_passes_and_the_neighbour_works() {
    struct Counter(std::sync::atomic::AtomicU64);
    impl wieldy_core::OutputSink for Counter {
        fn write(&self, _: wieldy_core::Stream, bytes: &[u8]) {
            self.0.fetch_add(bytes.len() as u64, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let arena = Arena::new();
    let counter = Arc::new(Counter(0.into()));
    let command = wieldy_core::Command {
        program: "bash".into(),
        arguments: vec!["-c".into(), "head -c 100000000 /dev/zero >&2 & head -c 100000000 /dev/zero; wait".into()],
        environment: arena.environment.clone(),
        folder: Default::default(),
        stdin: Default::default(),
        terminal: None,
    };
    let confinement = arena.confinement(Place::Own);
    let flood = arena.native.execute(&command, &confinement, counter.clone(), Default::default());
    let (exit, twin) = tokio::join!(flood, arena.run(Arena::session("neighbour"), "echo hi"));
    assert_eq!((exit.unwrap().ended, twin.as_str()), (wieldy_core::Ended::Code(0), "hi\n"));
    assert_eq!(counter.0.load(std::sync::atomic::Ordering::Relaxed), 200_000_000);
}
