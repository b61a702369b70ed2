//! Disk quota of sessions and sandboxes: each call may write the part of the quota that earlier calls left.
//!
//! No cgroup counts this, so it is counted after each call. Calls that run at the same time may each use the whole
//! rest.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use wieldy_core::{Confinement, Exit, Limit, Overrun, Place, ResourceLimits};

/// The outcome of a command, with the figures that its session's quota needs.
pub(crate) struct Ran {
    pub(crate) exit: Exit,
    /// The number of files made, if the session or sandbox has a limit of files.
    pub(crate) files_made: u64,
}

/// Maximum number of sessions and sandboxes in the table. Above it, those with the least use are forgotten.
const PLACES_MAX: usize = 10_000;

/// The names of the limits, as in [`ResourceLimits`].
const BYTES: Limit = Limit::DiskBytes;
const FILES: Limit = Limit::DiskFiles;

/// The disk use of each session and sandbox. A session that loses its sandbox keeps its use.
#[derive(Default)]
pub(crate) struct DiskQuota {
    used: Mutex<HashMap<Place, Used>>,
}

/// The bytes that calls have written and the files that they have made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Used {
    bytes: u64,
    files: u64,
}

impl Used {
    fn and(self, more: Self) -> Self {
        Self { bytes: self.bytes.saturating_add(more.bytes), files: self.files.saturating_add(more.files) }
    }

    /// Returns the space on a disk: each file takes at least a block.
    fn weight(self) -> u64 {
        const BLOCK_BYTES: u64 = 4096;
        self.bytes.saturating_add(self.files.saturating_mul(BLOCK_BYTES))
    }
}

impl DiskQuota {
    /// Returns the confinement with its limits lowered to the rest of the quota.
    pub(crate) fn remaining<'a>(&self, confinement: &'a Confinement) -> Cow<'a, Confinement> {
        let ResourceLimits { disk_bytes, disk_files, .. } = confinement.place_limits;
        if disk_bytes.or(disk_files).is_none() {
            return Cow::Borrowed(confinement);
        }
        let Used { bytes, files } = self.all().get(&confinement.place).copied().unwrap_or_default();
        let left = ResourceLimits {
            disk_bytes: disk_bytes.map(|whole| whole.saturating_sub(bytes)),
            disk_files: disk_files.map(|whole| whole.saturating_sub(files)),
            ..ResourceLimits::default()
        };
        Cow::Owned(Confinement { limits: confinement.limits.within(left), ..confinement.clone() })
    }

    /// Adds the use of a call. If the call passed the quota, the returned exit names the quota as its overrun.
    pub(crate) fn charge(&self, confinement: &Confinement, ran: Ran) -> Exit {
        let Ran { mut exit, files_made } = ran;
        let (own, whole) = (&confinement.limits, &confinement.place_limits);
        if whole.disk_bytes.or(whole.disk_files).is_none() {
            return exit;
        }
        let noticed =
            |limit| exit.overrun.as_ref().filter(|overrun| overrun.limit == limit).map(|overrun| overrun.used);
        let (bytes, files) = (noticed(BYTES), noticed(FILES));
        let used =
            Used { bytes: exit.usage.written_bytes.max(bytes.unwrap_or(0)), files: files_made.max(files.unwrap_or(0)) };
        let before = self.add(&confinement.place, used);
        let is_whole = |own: Option<u64>, left: u64| own.is_none_or(|own| own > left);
        if let (Some(whole), true) = (whole.disk_bytes, bytes.is_some())
            && is_whole(own.disk_bytes, whole.saturating_sub(before.bytes))
        {
            exit.overrun = Some(Overrun {
                limit: BYTES,
                allowed: whole,
                used: used.bytes,
                session_used: Some(before.and(used).bytes),
            });
        }
        if let Some(whole) = whole.disk_files {
            // The kernel does not refuse one file too many, and a short call ends before the first check. So it is
            // reported here.
            let is_late = exit.overrun.is_none() && used.files > 0 && before.and(used).files > whole;
            if is_late || (files.is_some() && is_whole(own.disk_files, whole.saturating_sub(before.files))) {
                exit.overrun = Some(Overrun {
                    limit: FILES,
                    allowed: whole,
                    used: used.files,
                    session_used: Some(before.and(used).files),
                });
            }
        }
        exit
    }

    /// Adds to the use of a place, and returns its use before.
    fn add(&self, place: &Place, used: Used) -> Used {
        if *place == Place::Own {
            return Used::default();
        }
        let mut all = self.all();
        if all.len() >= PLACES_MAX && !all.contains_key(place) {
            let mut weights: Vec<u64> = all.values().map(|used| used.weight()).collect();
            let (_, middle, _) = weights.select_nth_unstable(PLACES_MAX / 2);
            all.retain(|_, used| used.weight() > *middle);
        }
        let sum = all.entry(place.clone()).or_default();
        std::mem::replace(sum, sum.and(used))
    }

    fn all(&self) -> std::sync::MutexGuard<'_, HashMap<Place, Used>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use wieldy_core::{Ended, Level, Network, SandboxId, SandboxRef, SessionKey, Usage};

    use super::*;

    /// Returns a confinement with limits of bytes and files for the call and for the whole place.
    fn confinement(place: Place, own: [Option<u64>; 2], whole: [Option<u64>; 2]) -> Confinement {
        let limits = |[disk_bytes, disk_files]: [Option<u64>; 2]| ResourceLimits {
            disk_bytes,
            disk_files,
            processes: Some(7),
            ..ResourceLimits::default()
        };
        Confinement {
            workspace: "/w".into(),
            files: std::sync::Arc::default(),
            network: Network::None,
            limits: limits(own),
            place,
            place_limits: limits(whole),
            grace: Duration::ZERO,
        }
    }

    fn ran(written_bytes: u64, files_made: u64, overrun: Option<Overrun>) -> Ran {
        let sandbox = SandboxRef { id: SandboxId("s".into()), level: Level::Native };
        let usage = Usage { written_bytes, ..Usage::default() };
        Ran { exit: Exit { ended: Ended::Code(0), usage, sandbox, overrun, denials: Vec::new() }, files_made }
    }

    fn session(name: &str) -> Place {
        Place::Session(SessionKey { tenant: None, agent: "a".into(), session: name.into() })
    }

    fn passed(limit: Limit, allowed: u64, used: u64) -> Option<Overrun> {
        Some(Overrun { limit, allowed, used, session_used: None })
    }

    /// Returns an overrun of a session's limit, with the use of the last call and of all calls.
    fn session_passed(limit: Limit, allowed: u64, used: u64, all: u64) -> Option<Overrun> {
        Some(Overrun { limit, allowed, used, session_used: Some(all) })
    }

    #[test]
    fn each_call_gets_what_the_others_have_left() {
        let disk_quota = DiskQuota::default();
        let left = |confinement: &Confinement| disk_quota.remaining(confinement).limits.disk_bytes;
        let bytes = |name| confinement(session(name), [Some(60), None], [Some(100), None]);
        let one = bytes("one");
        assert_eq!(left(&one), Some(60));
        disk_quota.charge(&one, ran(50, 0, None));
        assert_eq!((left(&one), left(&bytes("two"))), (Some(50), Some(60)));
        let last = disk_quota.charge(&one, ran(10, 0, passed(BYTES, 50, 55)));
        assert_eq!((last.overrun, left(&one)), (session_passed(BYTES, 100, 55, 105), Some(0)));
        // An overrun of the call's own limit is reported unchanged, and so is one of another limit.
        let own = bytes("own");
        let first = disk_quota.charge(&own, ran(10, 0, passed(BYTES, 60, 61)));
        assert_eq!((first.overrun, left(&own)), (passed(BYTES, 60, 61), Some(39)));
        let other = disk_quota.charge(&own, ran(10, 0, passed(Limit::Processes, 1, 2)));
        assert_eq!(other.overrun, passed(Limit::Processes, 1, 2));
    }

    #[test]
    fn files_are_counted_like_bytes_and_one_too_many_is_reported_at_the_end() {
        let disk_quota = DiskQuota::default();
        let files = |name| confinement(session(name), [Some(9), Some(60)], [None, Some(100)]);
        let one = files("one");
        let left = |confinement: &Confinement| {
            let limits = disk_quota.remaining(confinement).limits;
            (limits.disk_bytes, limits.disk_files)
        };
        assert_eq!(disk_quota.charge(&one, ran(5, 50, None)).overrun, None);
        assert_eq!((left(&one), left(&files("two"))), ((Some(9), Some(50)), (Some(9), Some(60))));
        assert_eq!(disk_quota.charge(&one, ran(0, 50, None)).overrun, None);
        // The quota is used up: a call that makes no file is fine, a call that makes one passes the limit.
        assert_eq!((disk_quota.charge(&one, ran(0, 0, None)).overrun, left(&one)), (None, (Some(9), Some(0))));
        assert_eq!(disk_quota.charge(&one, ran(0, 1, None)).overrun, session_passed(FILES, 100, 1, 101));
        assert_eq!(disk_quota.charge(&one, ran(0, 3, passed(FILES, 0, 2))).overrun, session_passed(FILES, 100, 3, 104));
        let own = disk_quota.charge(&files("own"), ran(0, 62, passed(FILES, 60, 61)));
        assert_eq!((own.overrun, left(&files("own"))), (passed(FILES, 60, 61), (Some(9), Some(38))));
        let of_one_call = disk_quota.charge(&confinement(Place::Own, [None; 2], [None, Some(5)]), ran(0, 6, None));
        assert_eq!(of_one_call.overrun, session_passed(FILES, 5, 6, 6));
    }

    #[test]
    fn only_sessions_with_limits_for_all_calls_are_recorded() {
        let disk_quota = DiskQuota::default();
        let free = confinement(session("free"), [Some(60), Some(5)], [None; 2]);
        disk_quota.charge(&free, ran(50, 9, None));
        let own = confinement(Place::Own, [None; 2], [Some(100), None]);
        disk_quota.charge(&own, ran(50, 0, None));
        assert_eq!(
            (disk_quota.remaining(&free).limits, disk_quota.remaining(&own).limits.disk_bytes),
            (free.limits, Some(100))
        );
        assert!(disk_quota.all().is_empty());
    }

    #[test]
    fn above_the_maximum_the_sessions_with_the_least_use_are_forgotten() {
        let disk_quota = DiskQuota::default();
        for number in 0..=PLACES_MAX as u64 {
            let place = session(&number.to_string());
            disk_quota.charge(&confinement(place, [None; 2], [Some(1), Some(1)]), ran(0, number, None));
        }
        assert!(disk_quota.all().len() <= PLACES_MAX);
        assert!(disk_quota.all().contains_key(&session(&(PLACES_MAX - 1).to_string())));
    }
}
