//! The use of a run and the limit that it passed, from the report of its supervisor and the counters of its cgroup.

use wieldy_core::{Ended, Overrun, ResourceLimits, Usage};

use crate::cgroup::{GroupLimits, Peak, Used, Whose};
use crate::supervise::protocol::{Limit, RunReport};
use crate::supervise::watch::BLOCK_BYTES;

/// What a group may use in which so many processes live that are not a command's.
pub(crate) fn group_limits(limits: &ResourceLimits, residents: u64) -> GroupLimits {
    let ResourceLimits { cpu_millicores, memory_bytes, processes, .. } = *limits;
    GroupLimits { cpu_millicores, memory_bytes, processes: processes.map(|count| count.saturating_add(residents)) }
}

/// What the supervisor saw of a run, and what the kernel counted of its group, which is more exact. Of what was read, the supervisor saw only what those
/// processes did that were waited for; kernels that count it for no group say 0. What was written is counted for a group when the
/// page cache is emptied, which may be during another call.
///
/// Kernels that cannot forget a peak (cgroup v2 before 6.12) or keep none (of processes) do not tell it for each call of a session. Then it
/// is the most that anybody saw: the kernel before and after the call, the supervisor in the largest process and at its looks.
pub(crate) fn usage(seen: Usage, used: &Used) -> Usage {
    let peak = |seen: u64, counted: Option<Peak>| counted.map_or(seen, |peak| peak.with_seen(seen));
    Usage {
        cpu_ms: used.cpu_us.map_or(seen.cpu_ms, |us| us as f64 / 1e3),
        memory_peak_bytes: peak(seen.memory_peak_bytes, used.memory_peak_bytes),
        processes_peak: peak(seen.processes_peak, used.processes_peak).max(1),
        read_bytes: seen.read_bytes.max(used.bytes_read.unwrap_or(0)),
        ..seen
    }
}

/// What a supervisor measured.
pub(crate) fn measured(report: &RunReport) -> Usage {
    Usage {
        cpu_ms: report.cpu_us as f64 / 1e3,
        memory_peak_bytes: report.memory_peak_kib * 1024,
        read_bytes: report.blocks_read * BLOCK_BYTES,
        written_bytes: report.blocks_written * BLOCK_BYTES,
        processes_peak: report.processes_peak,
        wall_ms: report.wall_us as f64 / 1e3,
    }
}

/// Returns the limit that the kernel has seen to, if it had to. Where it does not tell the peak of just this call, that was what is
/// allowed. A session that passed its limit has used as much as is allowed, and the call its own part of that.
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
        return overrun("memory_bytes", used.oom_kills_by, own, whole, used.memory_peak_bytes);
    }
    if used.process_refusals.is_some_and(|proxy_denials| proxy_denials > 0) {
        return overrun("processes", used.process_refusals_by, own.processes, whole.processes, used.processes_peak);
    }
    None
}

pub(crate) fn overrun(limit: Limit, used: u64, limits: &ResourceLimits, of_session: &ResourceLimits) -> Overrun {
    let (limit, allowed) = match limit {
        Limit::DiskBytes => ("disk_bytes", limits.disk_bytes),
        Limit::DiskFiles => ("disk_files", limits.disk_files),
        Limit::Memory => ("memory_bytes", limits.memory_bytes),
        Limit::SessionMemory { by_call } => {
            let (allowed, session_used) = (of_session.memory_bytes.unwrap_or(used), Some(used));
            return Overrun { limit: "memory_bytes", allowed, used: by_call, session_used };
        }
        Limit::Processes => ("processes", limits.processes),
    };
    let allowed = allowed.unwrap_or(used);
    // Less than is allowed was too much only because earlier commands had used the rest.
    Overrun { limit, allowed, used, session_used: (used < allowed).then_some(allowed) }
}

/// Returns true if an overrun that the kernel counted belongs in the answer. A process that it killed for memory is lost, whatever came
/// after. A process that it refused to make matters if the command failed. It also explains why a run took too long, and is
/// then the only one: a run that was stopped has its reason.
pub(crate) fn is_told(overrun: &Overrun, ended: Ended, was_stopped: bool) -> bool {
    match overrun.limit {
        "processes" => ended != Ended::Code(0),
        _ => !was_stopped,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_is_the_more_of_what_was_seen_and_counted() {
        let seen = Usage { read_bytes: 5, written_bytes: 20, ..Usage::default() };
        let of = |bytes_read| {
            let usage = usage(seen, &Used { bytes_read, bytes_written: Some(30), ..Used::default() });
            (usage.read_bytes, usage.written_bytes)
        };
        assert_eq!([Some(10), Some(0), None].map(of), [(10, 20), (5, 20), (5, 20)]);
    }

    #[test]
    fn a_peak_that_the_kernel_does_not_know_is_the_most_that_was_seen() {
        let seen = Usage { memory_peak_bytes: 50, processes_peak: 4, ..Usage::default() };
        let of = |memory, processes| {
            let usage = usage(seen, &Used { memory_peak_bytes: memory, processes_peak: processes, ..Used::default() });
            (usage.memory_peak_bytes, usage.processes_peak)
        };
        let exactly = |value| Some(Peak { least: value, most: Some(value) });
        assert_eq!(of(exactly(70), exactly(3)), (70, 3));
        assert_eq!(of(Some(Peak { least: 2, most: Some(60) }), Some(Peak { least: 0, most: None })), (50, 4));
        assert_eq!(of(None, None), (50, 4));
    }
}
