//! Combines the report of a supervisor with the counters of the cgroup: the usage of a command, and the limit that it
//! passed.

use wieldy_core::{Ended, Limit, Overrun, ResourceLimits, Usage};

use crate::cgroup::{GroupLimits, Peak, Used, Whose};
use crate::supervise::protocol::{RunReport, WatchedLimit};
use crate::supervise::watch::BLOCK_BYTES;

/// Returns the limits of a cgroup that also contains `residents` processes of no command.
pub(crate) fn group_limits(limits: &ResourceLimits, residents: u64) -> GroupLimits {
    let ResourceLimits { cpu_millicores, memory_bytes, processes, .. } = *limits;
    GroupLimits { cpu_millicores, memory_bytes, processes: processes.map(|count| count.saturating_add(residents)) }
}

/// Returns the usage of a run: the counters of its cgroup where there are any, which are more exact, otherwise the
/// supervisor's figures.
///
/// Bytes read are the larger of both: the supervisor sees only processes that were reaped, and some kernels do not
/// count reads of a cgroup and report 0. Bytes written are the supervisor's: a cgroup is charged when the page cache is
/// written back, which may be during another call.
///
/// Some kernels cannot reset a peak (cgroup v2 before 6.12) or store none (of processes), and so have no peak of a
/// single call of a session. Then the peak is the largest figure seen: the kernel's before and after the call, the
/// supervisor's of the largest process and at its checks.
pub(crate) fn usage(seen: Usage, used: &Used) -> Usage {
    let peak = |seen: u64, counted: Option<Peak>| counted.map_or(seen, |peak| peak.with_seen(seen));
    Usage {
        cpu_ms: used.cpu_us.map_or(seen.cpu_ms, |us| us as f64 / 1e3),
        memory_peak_bytes: peak(seen.memory_peak_bytes, used.memory_peak_bytes),
        processes_peak: Some(peak(seen.processes_peak.unwrap_or(0), used.processes_peak).max(1)),
        read_bytes: seen.read_bytes.max(used.bytes_read.unwrap_or(0)),
        ..seen
    }
}

/// Returns the usage that a supervisor measured.
pub(crate) fn measured(report: &RunReport) -> Usage {
    Usage {
        cpu_ms: report.cpu_us as f64 / 1e3,
        memory_peak_bytes: report.memory_peak_kib * 1024,
        read_bytes: report.blocks_read * BLOCK_BYTES,
        written_bytes: report.blocks_written * BLOCK_BYTES,
        processes_peak: Some(report.processes_peak),
        wall_ms: report.wall_us as f64 / 1e3,
    }
}

/// Returns the limit at which the kernel killed or refused a process, if it did. If the peak of this call is not known,
/// the use is the limit. If the session's limit was passed, the session's use is that limit, and the call's use is its
/// part of it.
pub(crate) fn overrun_of_group(used: &Used, own: &ResourceLimits, whole: &ResourceLimits) -> Option<Overrun> {
    let overrun = |limit, whose, own: Option<u64>, whole: Option<u64>, peak: Option<Peak>| match (whose, whole) {
        (Some(Whose::Above), Some(allowed)) => {
            let used = peak.map_or(0, |peak| peak.least).min(allowed);
            Some(Overrun { limit, allowed, used, session_used: Some(allowed) })
        }
        _ => {
            let allowed = own.or(whole)?;
            let used = peak.and_then(Peak::exact).unwrap_or(allowed);
            Some(Overrun { limit, allowed, used, session_used: None })
        }
    };
    if used.oom_kills.is_some_and(|kills| kills > 0) {
        let (own, whole) = (own.memory_bytes, whole.memory_bytes);
        return overrun(Limit::MemoryBytes, used.oom_kills_by, own, whole, used.memory_peak_bytes);
    }
    if used.process_refusals.is_some_and(|proxy_denials| proxy_denials > 0) {
        return overrun(
            Limit::Processes,
            used.process_refusals_by,
            own.processes,
            whole.processes,
            used.processes_peak,
        );
    }
    None
}

pub(crate) fn overrun(limit: WatchedLimit, used: u64, limits: &ResourceLimits, of_session: &ResourceLimits) -> Overrun {
    let (limit, allowed) = match limit {
        WatchedLimit::DiskBytes => (Limit::DiskBytes, limits.disk_bytes),
        WatchedLimit::DiskFiles => (Limit::DiskFiles, limits.disk_files),
        WatchedLimit::Memory => (Limit::MemoryBytes, limits.memory_bytes),
        WatchedLimit::SessionMemory { by_call } => {
            let (allowed, session_used) = (of_session.memory_bytes.unwrap_or(used), Some(used));
            return Overrun { limit: Limit::MemoryBytes, allowed, used: by_call, session_used };
        }
        WatchedLimit::Processes => (Limit::Processes, limits.processes),
    };
    let allowed = allowed.unwrap_or(used);
    // A use below the limit was too much only because earlier commands had used the rest.
    Overrun { limit, allowed, used, session_used: (used < allowed).then_some(allowed) }
}

/// Returns true if an overrun that the kernel counted belongs in the result. One of memory does, since the killed
/// process is lost, unless the run was stopped and so has another reason. One of processes does if the command failed
/// or was stopped: refused processes may explain why a run took too long.
pub(crate) fn is_told(overrun: &Overrun, ended: Ended, was_stopped: bool) -> bool {
    match overrun.limit {
        Limit::Processes => ended != Ended::Code(0),
        _ => !was_stopped,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_bytes_are_the_larger_of_the_observed_and_the_counted_bytes() {
        let seen = Usage { read_bytes: 5, written_bytes: 20, ..Usage::default() };
        let of = |bytes_read| {
            let usage = usage(seen, &Used { bytes_read, bytes_written: Some(30), ..Used::default() });
            (usage.read_bytes, usage.written_bytes)
        };
        assert_eq!([Some(10), Some(0), None].map(of), [(10, 20), (5, 20), (5, 20)]);
    }

    #[test]
    fn a_peak_unknown_to_the_kernel_is_the_largest_observed_value() {
        let seen = Usage { memory_peak_bytes: 50, processes_peak: Some(4), ..Usage::default() };
        let of = |memory, processes| {
            let usage = usage(seen, &Used { memory_peak_bytes: memory, processes_peak: processes, ..Used::default() });
            (usage.memory_peak_bytes, usage.processes_peak.unwrap())
        };
        let exactly = |value| Some(Peak { least: value, most: Some(value) });
        assert_eq!(of(exactly(70), exactly(3)), (70, 3));
        assert_eq!(of(Some(Peak { least: 2, most: Some(60) }), Some(Peak { least: 0, most: None })), (50, 4));
        assert_eq!(of(None, None), (50, 4));
    }
}
