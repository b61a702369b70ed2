//! Promise 10 once more: ways to pass a limit without being seen, and limits that somebody else got over.

use wieldy_core::{Overrun, Place, ResourceLimits};

use super::arena::{Arena, attacks};

attacks! {
    memory_that_processes_share_counts
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

/// The limit that a script runs into in a sandbox of its own, and what was allowed; with what it printed.
async fn passed(arena: &Arena, script: &str) -> (Option<(&'static str, u64)>, String) {
    let ran = arena.run_in(&arena.confinement(Place::Own), script).await.unwrap();
    let overrun = ran.exit.overrun.as_ref().map(|Overrun { limit, allowed, used }| {
        assert!(*used >= allowed / 2 && *used < allowed * 20, "{script}: {ran:?}");
        (*limit, *allowed)
    });
    (overrun, ran.stdout)
}

/// Ways to have so many MiB that are not a process's own, in Python; after each there is time to look.
fn shared(mib: u32) -> [String; 6] {
    let begin =
        format!("import ctypes, mmap, os, threading, time\nlibc, bytes_wanted = ctypes.CDLL(None), {mib} << 20\n");
    [
        // Shared with children to come.
        "m = mmap.mmap(-1, bytes_wanted)\nfor i in range(0, bytes_wanted, 4096): m[i] = 1",
        // Files without a name, written and not mapped.
        "fds = [os.memfd_create(str(i)) for i in range(4)]\nfor fd in fds:\n    for _ in range(4): os.write(fd, bytes(bytes_wanted // 16))",
        // Such a file, mapped.
        "fd = os.memfd_create('m'); os.ftruncate(fd, bytes_wanted); m = mmap.mmap(fd, bytes_wanted)\n\
         for i in range(0, bytes_wanted, 4096): m[i] = 1",
        // A segment of System V, mapped.
        "libc.shmat.restype = ctypes.c_void_p; id = libc.shmget(0, ctypes.c_size_t(bytes_wanted), 0o1600)\n\
         at = libc.shmat(id, None, 0); ctypes.memset(at, 1, bytes_wanted); libc.shmctl(id, 0, None)",
        // The same, not mapped any more.
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
        assert_eq!(passed(&arena, &script).await, (Some(("memory_bytes", 96 * MIB)), String::new()), "{script}");
    }
    // None of it counts twice, and what several processes have in common counts once.
    for script in shared(60) {
        assert_eq!(passed(&arena, &script).await, (None, "fine\n".into()), "{script}");
    }
    let common = "python3 -c \"import mmap, os, time\nm = mmap.mmap(-1, 50 << 20)\n\
                  for _ in range(3):\n    if not os.fork(): break\n\
                  for i in range(0, len(m), 4096): m[i] = 1\ntime.sleep(0.4)\" && echo fine";
    assert_eq!(passed(&arena, common).await, (None, "fine\n".into()));
}
