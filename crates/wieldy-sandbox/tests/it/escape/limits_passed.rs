//! Tests promise 10 for hidden ways to pass a limit, and for limits that a command passes without failing.

use wieldy_core::{Ended, Enforcer, Level, Limit, Overrun, Place, ResourceLimits, Sandbox};

use super::arena::{Arena, attacks, say};
use super::limits::is_by_kernel;

attacks! {
    memory_that_processes_share_counts
    a_kill_at_the_memory_limit_is_reported_even_if_the_command_goes_on
    a_write_cut_off_at_the_disk_limit_is_reported_even_if_the_command_goes_on
    a_refused_process_that_a_command_recovers_from_is_no_error
}

const MIB: u64 = 1 << 20;

fn with(mut arena: Arena, limits: ResourceLimits) -> Arena {
    arena.confinement.limits = limits;
    arena
}

fn limits() -> ResourceLimits {
    ResourceLimits {
        cpu_millicores: Some(2000),
        memory_bytes: Some(96 * MIB),
        processes: Some(64),
        open_files: Some(256),
        disk_bytes: Some(64 * MIB),
        disk_files: Some(2000),
        output_bytes: None,
    }
}

/// Returns the limit that a script passes in a sandbox of its own, with the allowed amount, and its output.
async fn passed(arena: &Arena, script: &str) -> (Option<(Limit, u64)>, String) {
    let ran = arena.run_in(&arena.confinement(Place::Own), script).await.unwrap();
    let overrun = ran.exit.overrun.as_ref().map(|Overrun { limit, allowed, used, .. }| {
        assert!(*used >= allowed / 2 && *used < allowed * 20, "{script}: {ran:?}");
        (*limit, *allowed)
    });
    (overrun, ran.stdout)
}

/// Returns Python scripts that use so many MiB of memory shared between processes, each with a pause for the check at
/// the end.
fn shared(mib: u32) -> [String; 6] {
    let begin =
        format!("import ctypes, mmap, os, threading, time\nlibc, bytes_wanted = ctypes.CDLL(None), {mib} << 20\n");
    [
        // Shared with future children.
        "m = mmap.mmap(-1, bytes_wanted)\nfor i in range(0, bytes_wanted, 4096): m[i] = 1",
        // Memfds, written and not mapped.
        "fds = [os.memfd_create(str(i)) for i in range(4)]\nfor fd in fds:\n    for _ in range(4): os.write(fd, bytes(bytes_wanted // 16))",
        // A memfd, mapped.
        "fd = os.memfd_create('m'); os.ftruncate(fd, bytes_wanted); m = mmap.mmap(fd, bytes_wanted)\n\
         for i in range(0, bytes_wanted, 4096): m[i] = 1",
        // A System V segment, mapped.
        "libc.shmat.restype = ctypes.c_void_p; id = libc.shmget(0, ctypes.c_size_t(bytes_wanted), 0o1600)\n\
         at = libc.shmat(id, None, 0); ctypes.memset(at, 1, bytes_wanted); libc.shmctl(id, 0, None)",
        // A System V segment, not mapped any more.
        "libc.shmat.restype = ctypes.c_void_p; id = libc.shmget(0, ctypes.c_size_t(bytes_wanted), 0o1600)\n\
         at = libc.shmat(id, None, 0); ctypes.memset(at, 1, bytes_wanted); libc.shmdt(ctypes.c_void_p(at))",
        // In a process whose first thread has ended.
        "m = mmap.mmap(-1, bytes_wanted)\ndef rest():\n    for i in range(0, bytes_wanted, 4096): m[i] = 1\n    \
         time.sleep(0.4); os._exit(0)\nthreading.Thread(target=rest).start()\n\
         libc.syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)",
    ]
    .map(|way| format!("python3 -c \"{begin}{way}\ntime.sleep(0.4)\" && echo fine"))
}

async fn memory_that_processes_share_counts(arena: Arena) {
    let arena = with(arena, ResourceLimits { disk_bytes: Some(1 << 30), ..limits() });
    for script in shared(400) {
        assert_eq!(passed(&arena, &script).await, (Some((Limit::MemoryBytes, 96 * MIB)), String::new()), "{script}");
    }
    // No memory counts twice, and memory that several processes share counts once.
    for script in shared(60) {
        assert_eq!(passed(&arena, &script).await, (None, "fine\n".into()), "{script}");
    }
    let common = "python3 -c \"import mmap, os, time\nm = mmap.mmap(-1, 50 << 20)\n\
                  for _ in range(3):\n    if not os.fork(): break\n\
                  for i in range(0, len(m), 4096): m[i] = 1\ntime.sleep(0.4)\" && echo fine";
    assert_eq!(passed(&arena, common).await, (None, "fine\n".into()));
}

async fn a_kill_at_the_memory_limit_is_reported_even_if_the_command_goes_on(arena: Arena) {
    if !is_by_kernel(Limit::MemoryBytes).await {
        return say("what the kernel kills for memory: there is no writable cgroup here");
    }
    let arena = with(arena, limits());
    let script = "echo before; python3 -c 'x = bytearray(300 << 20)' 2>/dev/null; echo after";
    let told = (Some((Limit::MemoryBytes, 96 * MIB)), "before\nafter\n".into());
    assert_eq!(passed(&arena, script).await, told);
    // Page cache does no harm: the kernel can free it.
    let cache = "head -c 60M /dev/zero > file; cat file file file > /dev/null; head -c 60M /dev/urandom > file; rm file; echo fine";
    let arena = with(arena, ResourceLimits { disk_bytes: Some(1 << 30), ..limits() });
    assert_eq!(passed(&arena, cache).await, (None, "fine\n".into()));
}

async fn a_write_cut_off_at_the_disk_limit_is_reported_even_if_the_command_goes_on(arena: Arena) {
    let arena = with(arena, ResourceLimits { memory_bytes: Some(1 << 30), ..limits() });
    // In containers the private folders are not checked.
    let is_native = arena.sandbox.level() == Level::Native;
    let folders: &[&str] = if is_native { &[".", "/tmp", "/dev/shm"] } else { &["."] };
    for folder in folders {
        let script = format!("head -c 100M /dev/zero 2>/dev/null > {folder}/huge; echo after");
        let told = (Some((Limit::DiskBytes, 64 * MIB)), "after\n".to_owned());
        // If the limit was checked before the command was over, the command was ended.
        let found = passed(&arena, &script).await;
        assert!(found == told || found == (told.0, String::new()), "{folder}: {found:?}");
        let fine = format!("head -c 50M /dev/zero > {folder}/large && rm {folder}/large && echo fine");
        std::fs::remove_file(arena.workspace.join("huge")).unwrap_or_default();
        assert_eq!(passed(&arena, &fine).await, (None, "fine\n".into()), "{folder}");
    }
    // A shell reports a signal by its exit code.
    assert_eq!(passed(&arena, "truncate -s 500M sparse; exit $?").await.0, Some((Limit::DiskBytes, 64 * MIB)));
}

#[tokio::test]
async fn private_folders_may_be_small() {
    let arena = with(Arena::new(), ResourceLimits { disk_bytes: Some(8 * MIB), ..limits() });
    for end in ["exit $?", "true"] {
        let script = format!("head -c 12M /dev/zero > /tmp/huge; {end}");
        assert_eq!(passed(&arena, &script).await.0, Some((Limit::DiskBytes, 8 * MIB)), "{end}");
    }
    let parts = "for i in 1 2 3; do head -c 4M /dev/zero > /tmp/$i || exit 1; done";
    assert_eq!(passed(&arena, parts).await.0, Some((Limit::DiskBytes, 8 * MIB)));
    assert_eq!(passed(&arena, "head -c 6M /dev/zero > /tmp/some && echo fine").await, (None, "fine\n".into()));
    // The kernel takes the size 0 of a file system for no limit.
    let arena = with(arena, ResourceLimits { disk_bytes: Some(0), ..limits() });
    let script = "for i in {1..9}; do head -c 4M /dev/zero > /tmp/$i; done; exit 0";
    let ran = arena.run_in(&arena.confinement(Place::Own), script).await.unwrap();
    let overrun = ran.exit.overrun.as_ref().map(|overrun| (overrun.limit, overrun.allowed, overrun.used <= 4096));
    assert_eq!(overrun, Some((Limit::DiskBytes, 0, true)), "{ran:?}");
}

#[tokio::test]
async fn a_used_up_disk_limit_of_a_session_is_reported_even_if_the_command_goes_on() {
    let mut arena = with(Arena::new(), limits());
    arena.confinement.place_limits = ResourceLimits { disk_bytes: Some(70 * MIB), ..ResourceLimits::default() };
    let confinement = arena.confinement(Arena::session("writer"));
    let mut told = None;
    for name in ["one", "two", "three"] {
        assert_eq!(told, None, "{name} comes too late");
        let script = format!("head -c 30M /dev/zero 2>/dev/null > {name}; echo after");
        let ran = arena.run_in(&confinement, &script).await.unwrap();
        if ran.exit.usage.written_bytes == 0 {
            return say("what a session writes: the kernel does not count it on this file system");
        }
        told = ran.exit.overrun.map(|overrun| overrun.limit);
    }
    assert_eq!(told, Some(Limit::DiskBytes));
    // A call that writes nothing still works. Wait, since files written just before a call count for it.
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    let ran = arena.run_in(&confinement, "cat one | wc -c").await.unwrap();
    assert_eq!((ran.stdout, ran.exit.overrun), (format!("{}\n", 30 * MIB), None));
}

async fn a_refused_process_that_a_command_recovers_from_is_no_error(arena: Arena) {
    let arena = with(arena, ResourceLimits { processes: Some(12), ..limits() });
    let script = "python3 -c \"import os, time\ntry:\n    while True:\n        if not os.fork(): time.sleep(9); os._exit(0)\n\
                  except OSError: print('fine', flush=True)\nos.kill(0, 9)\"; echo on";
    // The script kills its whole process group, so it needs one without the shell.
    let ran = arena.run_in(&arena.confinement(Place::Own), &format!("set -m; {script}")).await.unwrap();
    assert_eq!((ran.exit.ended, ran.exit.overrun, ran.stdout.as_str()), (Ended::Code(0), None, "fine\non\n"));
}

#[tokio::test]
async fn a_stopped_run_reports_that_it_was_refused_processes() {
    if !is_by_kernel(Limit::Processes).await {
        return say("a stopped run and its processes: the kernel does not count refusals here");
    }
    let arena = with(Arena::new(), ResourceLimits { processes: Some(12), ..limits() });
    let stop = tokio_util::sync::CancellationToken::new();
    let printed = std::sync::Arc::default();
    let confinement = arena.confinement(Place::Own);
    let script = "for i in {1..30}; do sleep 60 & done 2> /dev/null; echo full; wait; sleep 60";
    let running = arena.run_stoppable(&confinement, script, &printed, stop.clone());
    let stopping = async {
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        stop.cancel();
    };
    let (ran, ()) = tokio::join!(running, stopping);
    let overrun = ran.unwrap().exit.overrun.unwrap();
    assert_eq!((overrun.limit, overrun.allowed), (Limit::Processes, 12));
}

#[tokio::test]
async fn as_many_processes_as_are_allowed_can_be_had() {
    let arena = with(Arena::new(), ResourceLimits { processes: Some(8), ..limits() });
    let made = arena.native.create(&arena.confinement(Arena::session("one"))).await.unwrap();
    let by = |limit| made.enforcement.iter().find(|known| known.limit == limit).unwrap().by;
    // A user who cannot write one cgroup controller cannot write the other either.
    let expected =
        if by(Limit::MemoryBytes) == Enforcer::Kernel { Enforcer::Kernel } else { Enforcer::KernelPerSandbox };
    assert_eq!(by(Limit::Processes), expected);
    let script = "for i in {1..7}; do sleep 0.3 & done; wait; echo fine";
    for place in [Place::Own, Arena::session("one")] {
        assert_eq!(arena.run(place, script).await, "fine\n");
    }
    // One process more is refused, also after several calls at once, each with a supervisor of its own.
    let together = || arena.run(Arena::session("several"), "sleep 0.2; echo fine");
    assert_eq!(tokio::join!(together(), together(), together()), ("fine\n".into(), "fine\n".into(), "fine\n".into()));
    assert_eq!(arena.run(Arena::session("several"), script).await, "fine\n");
    let one_more = "python3 -c 'import os, time\ntry:\n    for i in range(8):\n        \
                    if not os.fork(): time.sleep(1); os._exit(0)\nexcept OSError: time.sleep(0.2); raise'";
    let ran = arena.run_in(&arena.confinement(Arena::session("several")), &format!("exec {one_more}")).await.unwrap();
    assert_eq!(ran.exit.overrun.map(|overrun| (overrun.limit, overrun.allowed)), Some((Limit::Processes, 8)));
}
