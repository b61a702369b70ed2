//! Measures what a group used since a moment: records counters and reads them again, on descriptors that stay open.

use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use super::group::Node;
use super::kept::{Buffer, Kept, number};
use super::{Controller, Version};

/// The counters of a group at one moment. Only one per group is valid: a new one resets the peaks of the one before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Meter {
    counters: Counters,
    memory: Mark,
    processes: Mark,
}

/// The usage since a [`Meter`] was begun. `None` means not measured here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Used {
    /// Processor time of all processors together.
    pub(crate) cpu_us: Option<u64>,
    /// The time in which the limit of this group kept runnable processes from running.
    pub(crate) throttled_us: Option<u64>,
    /// Memory in use at once, including page cache and kernel memory for the group.
    pub(crate) memory_peak_bytes: Option<Peak>,
    /// Processes and threads at once.
    pub(crate) processes_peak: Option<Peak>,
    /// Bytes read from disks. Reads from the page cache are not counted.
    pub(crate) bytes_read: Option<u64>,
    /// Bytes written to disks. On v1 only writes that bypass the page cache are counted.
    pub(crate) bytes_written: Option<u64>,
    /// Processes of this group itself that the kernel killed because memory ran out.
    pub(crate) oom_kills: Option<u64>,
    /// The owner of the limit that caused these kills, if there were any.
    pub(crate) oom_kills_by: Option<Whose>,
    /// The number of times that a new process or thread was refused. If the limit of a group above was the reason,
    /// kernels from 6.11 on count it on v2 only there.
    pub(crate) process_refusals: Option<u64>,
    /// The owner of the limit that caused these refusals, if there were any.
    pub(crate) process_refusals_by: Option<Whose>,
}

impl Used {
    /// Subtracts processes that are in the group but are not to be measured.
    pub(crate) fn leave_out(&mut self, residents: u64) {
        if let Some(peak) = &mut self.processes_peak {
            peak.least = peak.least.saturating_sub(residents);
            peak.most = peak.most.map(|most| most.saturating_sub(residents));
        }
    }
}

/// The owner of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    /// The group itself.
    Own,
    /// A group above it.
    Above,
}

/// The highest usage at one time. Some kernels cannot reset an earlier peak; then the true value is between two
/// figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peak {
    /// The highest usage that was seen.
    pub(crate) least: u64,
    /// An upper bound, if one is known.
    pub(crate) most: Option<u64>,
}

impl Peak {
    /// Returns the peak if it is known exactly.
    pub(crate) fn exact(self) -> Option<u64> {
        (self.most == Some(self.least)).then_some(self.least)
    }

    /// Returns the highest certain usage, if another observer has seen this much.
    pub(crate) fn with_seen(self, seen: u64) -> u64 {
        self.least.max(seen.min(self.most.unwrap_or(u64::MAX)))
    }
}

/// Counters that only grow.
#[derive(Debug, Clone, Copy, Default)]
struct Counters {
    cpu_us: Option<u64>,
    throttled_us: Option<u64>,
    oom_kills: Option<u64>,
    /// The number of times that the group's own memory limit was reached.
    memory_hits: Option<u64>,
    process_refusals: Option<u64>,
    bytes_read: Option<u64>,
    bytes_written: Option<u64>,
}

/// A peak and the current usage at one moment.
#[derive(Debug, Clone, Copy, Default)]
struct Mark {
    /// True if the peak was reset at that moment.
    reset: bool,
    peak: Option<u64>,
    now: Option<u64>,
}

impl Mark {
    /// Returns the peak since this mark was made.
    fn since(self, peak: Option<u64>, now: impl FnOnce() -> Option<u64>) -> Option<Peak> {
        match (self.peak, peak) {
            (_, Some(peak)) if self.reset => Some(Peak { least: peak, most: Some(peak) }),
            // The peak rose, so it belongs to this time.
            (Some(before), Some(peak)) if peak > before => Some(Peak { least: peak, most: Some(peak) }),
            (_, most) => self.now.max(now()).map(|least| Peak { least, most: most.map(|most| most.max(least)) }),
        }
    }
}

/// The files of a group that are read for each call, opened when first needed.
#[derive(Default)]
pub(super) struct Files {
    cpu_time: Kept,
    throttled: Kept,
    memory_peak: Kept,
    memory_now: Kept,
    memory_events: Kept,
    memory_hits: Kept,
    pids_events: Kept,
    pids_peak: Kept,
    pids_now: Kept,
    io: Kept,
    last: Mutex<Option<Last>>,
}

impl Files {
    /// Closes all files until they are needed again.
    pub(super) fn close(&self) {
        let Self { cpu_time, throttled, memory_peak, memory_now, memory_events, memory_hits, .. } = self;
        let Self { pids_events, pids_peak, pids_now, io, .. } = self;
        let memory = [memory_peak, memory_now, memory_events, memory_hits];
        [cpu_time, throttled, pids_events, pids_peak, pids_now, io].into_iter().chain(memory).for_each(Kept::close);
    }
}

/// The values of the last reading of a meter.
#[derive(Debug, Clone, Copy)]
struct Last {
    counters: Counters,
    processes: Mark,
}

/// Records the counters and resets the peaks.
pub(super) fn begin(node: &Node) -> Meter {
    begin_from(node, Last { counters: count(node, &mut [MaybeUninit::uninit(); _]), processes: Mark::default() })
}

/// Does the same with the counters and processes of the last reading.
pub(super) fn go_on(node: &Node) -> Meter {
    let last = node.files.last.lock().expect("no code panics while it holds the counters").take();
    last.map_or_else(|| begin(node), |last| begin_from(node, last))
}

fn begin_from(node: &Node, last: Last) -> Meter {
    let mut buffer = [MaybeUninit::uninit(); _];
    let files = &node.files;
    let memory = node.place(Controller::Memory).map(|(version, folder)| {
        let name = memory_peak_name(version);
        // v2 resets the peak for this one descriptor, from Linux 6.12 on.
        let reset = files.memory_peak.with(folder, &[name], |file| file.write_at(b"0", 0).is_ok()).unwrap_or(false);
        match reset {
            true => Mark { reset, peak: None, now: None },
            false => Mark {
                reset,
                peak: files.memory_peak.number(folder, &[name], &mut buffer),
                now: files.memory_now.number(folder, &[memory_now_name(version)], &mut buffer),
            },
        }
    });
    let processes = mark_processes(node, last.processes);
    Meter { counters: last.counters, memory: memory.unwrap_or_default(), processes }
}

/// Restarts the measurement of processes.
pub(super) fn count_anew(node: &Node, meter: &mut Meter) {
    meter.processes = mark_processes(node, Mark::default());
}

/// Returns the current number of processes, if it is counted.
pub(super) fn processes_now(node: &Node) -> Option<u64> {
    let (_, folder) = node.place(Controller::Pids)?;
    node.files.pids_now.number(folder, &["pids.current"], &mut [MaybeUninit::uninit(); _])
}

/// Returns the peak and number of processes, read now unless `known`.
fn mark_processes(node: &Node, known: Mark) -> Mark {
    let mut buffer = [MaybeUninit::uninit(); _];
    let Some((_, folder)) = node.place(Controller::Pids) else { return Mark::default() };
    let peak = || node.files.pids_peak.number(folder, &["pids.peak"], &mut buffer);
    Mark { reset: false, peak: known.peak.or_else(peak), now: known.now.or_else(|| processes_now(node)) }
}

/// Returns the usage since then.
pub(super) fn used(node: &Node, meter: &Meter) -> Used {
    let mut buffer = [MaybeUninit::uninit(); _];
    let files = &node.files;
    let (before, now) = (&meter.counters, count(node, &mut buffer));
    let since = |before: Option<u64>, now: Option<u64>| Some(now?.saturating_sub(before?));
    let memory_peak_bytes = node.place(Controller::Memory).and_then(|(version, folder)| {
        let peak = files.memory_peak.number(folder, &[memory_peak_name(version)], &mut buffer);
        meter.memory.since(peak, || files.memory_now.number(folder, &[memory_now_name(version)], &mut buffer))
    });
    let mut processes = Mark::default();
    let processes_peak = node.place(Controller::Pids).and_then(|(_, folder)| {
        processes.peak = files.pids_peak.number(folder, &["pids.peak"], &mut buffer);
        meter.processes.since(processes.peak, || {
            processes.now = files.pids_now.number(folder, &["pids.current"], &mut buffer);
            processes.now
        })
    });
    *files.last.lock().expect("no code panics while it holds the counters") = Some(Last { counters: now, processes });
    let oom_kills = since(before.oom_kills, now.oom_kills);
    let memory_hits = since(before.memory_hits, now.memory_hits);
    let process_refusals = since(before.process_refusals, now.process_refusals);
    let happened = |count: Option<u64>| count.is_some_and(|count| count > 0);
    let whose = |own: bool| if own { Whose::Own } else { Whose::Above };
    Used {
        cpu_us: since(before.cpu_us, now.cpu_us),
        throttled_us: since(before.throttled_us, now.throttled_us),
        memory_peak_bytes,
        processes_peak,
        bytes_read: since(before.bytes_read, now.bytes_read),
        bytes_written: since(before.bytes_written, now.bytes_written),
        oom_kills,
        oom_kills_by: happened(oom_kills)
            .then(|| whose(happened(memory_hits) || was_out_of_memory(node, memory_peak_bytes))),
        process_refusals,
        process_refusals_by: happened(process_refusals).then(|| whose(was_full(node, processes_peak))),
    }
}

/// Returns true if a group on v1 had as much memory as its own limit allows. v1 does not report which limit was the
/// reason, and recent kernels no longer count how often a limit was reached.
fn was_out_of_memory(node: &Node, peak: Option<Peak>) -> bool {
    // The kernel takes memory in advance, and gives it back if it cannot have all of it.
    const IN_ADVANCE_BYTES: u64 = 64 * 4096;
    let limit = node.applied.lock().expect("no code panics while it holds the limits").memory_bytes;
    let full = |limit: u64| peak.and_then(|peak| peak.most).is_some_and(|most| most + IN_ADVANCE_BYTES >= limit);
    matches!(node.place(Controller::Memory), Some((Version::V1, _))) && limit.is_some_and(full)
}

/// Returns true if there were as many processes as the group's own limit allows.
fn was_full(node: &Node, peak: Option<Peak>) -> bool {
    let limit = node.applied.lock().expect("no code panics while it holds the limits").processes;
    limit.is_some_and(|limit| peak.and_then(|peak| peak.most).is_none_or(|most| most >= limit))
}

fn memory_peak_name(version: Version) -> &'static str {
    match version {
        Version::V1 => "memory.max_usage_in_bytes",
        Version::V2 => "memory.peak",
    }
}

fn memory_now_name(version: Version) -> &'static str {
    match version {
        Version::V1 => "memory.usage_in_bytes",
        Version::V2 => "memory.current",
    }
}

fn count(node: &Node, buffer: &mut Buffer) -> Counters {
    let mut counters = Counters::default();
    let files = &node.files;
    if let Some((version, folder)) = node.place(Controller::Cpuacct) {
        match version {
            Version::V1 => {
                let ns = files.cpu_time.number(folder, &["cpuacct.usage"], buffer);
                counters.cpu_us = ns.map(|ns| ns / 1000);
            }
            Version::V2 => {
                let text = files.cpu_time.read(folder, &["cpu.stat"], buffer);
                counters.cpu_us = text.and_then(|text| field(text, b"usage_usec"));
                // This field exists only if the v2 tree has the controller.
                counters.throttled_us = text.and_then(|text| field(text, b"throttled_usec"));
            }
        }
    }
    if let Some((Version::V1, folder)) = node.place(Controller::Cpu) {
        let text = files.throttled.read(folder, &["cpu.stat"], buffer);
        counters.throttled_us = text.and_then(|text| field(text, b"throttled_time")).map(|ns| ns / 1000);
    }
    if let Some((version, folder)) = node.place(Controller::Memory) {
        let names: &[&str] = match version {
            Version::V1 => &["memory.oom_control"],
            Version::V2 => &["memory.events.local", "memory.events"],
        };
        if let Some(text) = files.memory_events.read(folder, names, buffer) {
            counters.oom_kills = field(text, b"oom_kill");
            counters.memory_hits = field(text, b"oom");
        }
        if version == Version::V1 {
            // Memory and swap together reach their limit first, since it equals the limit of memory alone.
            let names = ["memory.memsw.failcnt", "memory.failcnt"];
            counters.memory_hits = files.memory_hits.number(folder, &names, buffer);
        }
    }
    if let Some((_, folder)) = node.place(Controller::Pids) {
        let text = files.pids_events.read(folder, &["pids.events"], buffer);
        counters.process_refusals = text.and_then(|text| field(text, b"max"));
    }
    if let Some((version, folder)) = node.place(Controller::Io) {
        let names: &[&str] = match version {
            Version::V1 => &["blkio.throttle.io_service_bytes_recursive", "blkio.throttle.io_service_bytes"],
            Version::V2 => &["io.stat"],
        };
        if let Some(text) = files.io.read(folder, names, buffer) {
            let (read, written) = disk_bytes(text, version);
            (counters.bytes_read, counters.bytes_written) = (Some(read), Some(written));
        }
    }
    counters
}

/// Returns the number after this key, on a line of its own.
fn field(text: &[u8], key: &[u8]) -> Option<u64> {
    text.split(|byte| *byte == b'\n').find_map(|line| number(line.strip_prefix(key)?.strip_prefix(b" ")?))
}

/// Returns the bytes read and written, summed over all disks.
fn disk_bytes(text: &[u8], version: Version) -> (u64, u64) {
    // v1: `8:0 Read 4096`; v2: `8:0 rbytes=4096 wbytes=0 rios=1 …`
    let (read, written): (&[u8], &[u8]) = match version {
        Version::V1 => (b"Read", b"Write"),
        Version::V2 => (b"rbytes", b"wbytes"),
    };
    let mut sums = (0, 0);
    let mut words = text.split(|byte| matches!(byte, b' ' | b'\n' | b'=')).peekable();
    while let Some(word) = words.next() {
        let value = words.peek().and_then(|next| number(next)).unwrap_or(0);
        if word == read {
            sums.0 += value;
        } else if word == written {
            sums.1 += value;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_by_their_whole_key() {
        let events = b"low 0\nhigh 1\nmax 22\noom 3\noom_kill 4\noom_group_kill 5\n";
        assert_eq!(
            ["max", "oom", "oom_kill", "none"].map(|key| field(events, key.as_bytes())),
            [Some(22), Some(3), Some(4), None]
        );
        assert_eq!([&b"12\n"[..], b"max\n", b""].map(number), [Some(12), None, None]);
    }

    #[test]
    fn bytes_of_all_disks_are_summed_and_nothing_else() {
        let v1 = b"8:16 Read 100\n8:16 Write 20\n8:16 Sync 120\n8:16 Total 120\n8:0 Read 1\n8:0 Write 2\nTotal 123\n";
        assert_eq!(disk_bytes(v1, Version::V1), (101, 22));
        let v2 =
            b"8:16 rbytes=100 wbytes=20 rios=7 wios=7 dbytes=7 dios=7\n8:0 \n253:0 rbytes=1 wbytes=2 rios=9 wios=9\n";
        assert_eq!(disk_bytes(v2, Version::V2), (101, 22));
        assert_eq!(disk_bytes(b"Total 0\n", Version::V1), (0, 0));
    }

    #[test]
    fn a_peak_that_cannot_be_reset_lies_between_the_observed_value_and_the_old_peak() {
        let mark = |reset, peak, now| Mark { reset, peak, now };
        let exactly = |value| Some(Peak { least: value, most: Some(value) });
        assert_eq!(mark(true, None, None).since(Some(7), || None), exactly(7));
        assert_eq!(mark(false, Some(5), Some(1)).since(Some(7), || Some(2)), exactly(7));
        assert_eq!(mark(false, Some(5), Some(1)).since(Some(5), || Some(2)), Some(Peak { least: 2, most: Some(5) }));
        assert_eq!(mark(false, Some(5), Some(5)).since(Some(5), || Some(2)), exactly(5));
        assert_eq!(mark(false, None, Some(1)).since(None, || Some(2)), Some(Peak { least: 2, most: None }));
        assert_eq!(mark(false, None, None).since(None, || None), None);
    }

    #[test]
    fn an_inexact_peak_takes_the_observed_value_within_its_bounds() {
        let of = |least, most| Peak { least, most };
        let with_seen = [of(2, Some(5)), of(2, Some(3)), of(2, None), of(9, Some(9))].map(|peak| peak.with_seen(4));
        assert_eq!(with_seen, [4, 3, 4, 9]);
        assert_eq!(of(3, Some(3)).with_seen(4), 3, "what is known exactly is not more than that");
    }
}
