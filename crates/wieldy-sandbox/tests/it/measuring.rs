//! Tests that the measured usage is that of the command alone.

use std::time::Instant;

use wieldy_core::{Ended, OutputSink, Stream, Usage};

use crate::world::{World, conformance};

conformance! {
    together: [
        processor_time_of_the_whole_tree_is_measured
        the_peak_of_memory_is_that_of_the_largest_process
        bytes_written_to_a_disk_are_measured_where_the_kernel_counts_them
        a_flood_that_never_ends_can_be_stopped
    ];
    alone: [
        the_peak_of_memory_does_not_count_the_embedding_process
        a_flood_of_output_passes_through_without_piling_up
    ];
}

const MIB: u64 = 1024 * 1024;

async fn used(world: World) -> Usage {
    world.run().await.unwrap().usage
}

// Shows: B10
async fn processor_time_of_the_whole_tree_is_measured() {
    let burn = "for ((i = 0; i < 200000; i++)); do :; done";
    let own = used(World::bash(burn)).await.cpu_ms;
    let childs = used(World::bash(&format!("bash -c '{burn}'; true"))).await.cpu_ms;
    let orphans =
        used(World::bash(&format!("(bash -c '{burn}; echo x > done' &); until [ -e done ]; do sleep 0.01; done")))
            .await;
    for cpu_ms in [own, childs, orphans.cpu_ms] {
        assert!(cpu_ms > 20.0, "{own} {childs} {orphans:?}");
    }
    assert!(used(World::new("sleep", &["0.3"])).await.cpu_ms < 100.0);
}

// Shows: B10
async fn the_peak_of_memory_is_that_of_the_largest_process() {
    let peak = used(World::bash("x=$(head -c 60000000 /dev/zero | tr '\\0' x); true")).await.memory_peak_bytes;
    assert!(peak > 60 * MIB && peak < 600 * MIB, "{peak}");
}

fn the_peak_of_memory_does_not_count_the_embedding_process() {
    // Memory both on the heap and in a mapping of its own. The supervisor's own memory may be counted: in a test, some
    // megabytes.
    let large = vec![1_u8; 300 * MIB as usize];
    let small: Vec<Vec<u8>> = (0..50_000).map(|_| vec![1; 1024]).collect();
    for runtime in
        [&mut tokio::runtime::Builder::new_current_thread(), &mut tokio::runtime::Builder::new_multi_thread()]
    {
        let usage = runtime
            .enable_all()
            .build()
            .unwrap()
            .block_on(async { tokio::spawn(used(World::new("true", &[]))).await.unwrap() });
        assert!(usage.memory_peak_bytes > 100 * 1024 && usage.memory_peak_bytes < 16 * MIB, "{usage:?}");
    }
    assert_eq!((large[large.len() - 1], small[49_999][1023]), (1, 1), "our own memory is untouched");
}

// Shows: B10
async fn bytes_written_to_a_disk_are_measured_where_the_kernel_counts_them() {
    let world = World::bash("head -c 4000000 /dev/zero > file; sync file");
    let usage = world.run().await.unwrap().usage;
    if crate::world::is_in_memory(world.workspace.path()) {
        assert_eq!(usage.written_bytes, 0, "a file system in memory writes to no disk: {usage:?}");
    } else {
        assert!((4_000_000..8_000_000).contains(&usage.written_bytes), "{usage:?}");
    }
}

/// P-SBX-17.
fn a_flood_of_output_passes_through_without_piling_up() {
    #[derive(Default)]
    struct Counter([std::sync::atomic::AtomicU64; 2]);
    impl OutputSink for Counter {
        fn write(&self, stream: Stream, bytes: &[u8]) {
            self.0[stream as usize].fetch_add(bytes.len() as u64, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let world = World::bash("head -c 100000000 /dev/zero >&2 & head -c 100000000 /dev/zero; wait");
    let counter = std::sync::Arc::new(Counter::default());
    let (peak, begun) = (peak_bytes(), Instant::now());
    let running = world.sandbox.execute(&world.command, &world.confinement, counter.clone(), world.stop.clone());
    assert_eq!(runtime.block_on(running).unwrap().ended, Ended::Code(0));
    assert_eq!(counter.0.each_ref().map(|count| count.load(std::sync::atomic::Ordering::Relaxed)), [100_000_000; 2]);
    let grown = peak_bytes() - peak;
    assert!(grown < 8 * MIB, "{grown}");
    assert!(begun.elapsed().as_secs() < 10, "{:?}", begun.elapsed());
}

async fn a_flood_that_never_ends_can_be_stopped() {
    let (world, running) =
        World::bash("trap '' TERM; echo ready; cat /dev/zero >/dev/null & exec cat /dev/urandom").start();
    world.printed.contains("ready").await;
    world.stop.cancel();
    running.await.unwrap().unwrap();
}

/// Returns the peak memory of this process.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}
