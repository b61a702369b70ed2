//! What calls have written to disks together, where a session or a sandbox as a whole is limited: each call gets what the others have left.
//!
//! No control group counts that, so it is counted after each call. Those that run at the same time all get the same rest.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use wieldy_core::{Confinement, Exit, Overrun, Place, ResourceLimits};

/// How many sessions and sandboxes are remembered. Of more, those go that have written least.
const PLACES_MAX: usize = 10_000;

/// The name of the limit, as in [`ResourceLimits`].
const LIMIT: &str = "disk_bytes";

/// What was written in each place. It outlives the sandboxes of a session: who loses one does not begin anew.
#[derive(Default)]
pub(super) struct Ledger {
    written: Mutex<HashMap<Place, u64>>,
}

impl Ledger {
    /// The confinement with no more than what is left for this call.
    pub(super) fn rest<'a>(&self, confinement: &'a Confinement) -> Cow<'a, Confinement> {
        let Some(whole) = confinement.place_limits.disk_bytes else { return Cow::Borrowed(confinement) };
        let written = self.all().get(&confinement.place).copied().unwrap_or(0);
        let left = ResourceLimits { disk_bytes: Some(whole.saturating_sub(written)), ..ResourceLimits::default() };
        Cow::Owned(Confinement { limits: confinement.limits.within(left), ..confinement.clone() })
    }

    /// Enters what a call has written. If it ran into the limit of all together, that is what it is told.
    pub(super) fn enter(&self, confinement: &Confinement, exit: &mut Exit) {
        let Some(whole) = confinement.place_limits.disk_bytes else { return };
        let mut all = self.all();
        if all.len() >= PLACES_MAX && !all.contains_key(&confinement.place) {
            let mut sums: Vec<u64> = all.values().copied().collect();
            let (_, middle, _) = sums.select_nth_unstable(PLACES_MAX / 2);
            all.retain(|_, written| *written > *middle);
        }
        let overrun = exit.overrun.as_ref().filter(|overrun| overrun.limit == LIMIT);
        let written = exit.usage.written_bytes.max(overrun.map_or(0, |overrun| overrun.used));
        let before = match &confinement.place {
            Place::Own => 0,
            place => {
                let sum = all.entry(place.clone()).or_default();
                std::mem::replace(sum, sum.saturating_add(written))
            }
        };
        let is_whole = confinement.limits.disk_bytes.is_none_or(|own| own > whole.saturating_sub(before));
        if overrun.is_some() && is_whole {
            exit.overrun = Some(Overrun { limit: LIMIT, allowed: whole, used: before.saturating_add(written) });
        }
    }

    fn all(&self) -> std::sync::MutexGuard<'_, HashMap<Place, u64>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use wieldy_core::{Ended, Level, Network, SandboxId, SandboxRef, SessionKey, Usage};

    use super::*;

    fn confinement(place: Place, own: Option<u64>, whole: Option<u64>) -> Confinement {
        let limits = |disk_bytes| ResourceLimits { disk_bytes, processes: Some(7), ..ResourceLimits::default() };
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

    fn exit(written_bytes: u64, overrun: Option<Overrun>) -> Exit {
        let sandbox = SandboxRef { id: SandboxId("s".into()), level: Level::Native };
        let usage = Usage { written_bytes, ..Usage::default() };
        Exit { ended: Ended::Code(0), usage, sandbox, overrun, breaches: Vec::new() }
    }

    fn session(name: &str) -> Place {
        Place::Session(SessionKey { tenant: None, agent: "a".into(), session: name.into() })
    }

    #[test]
    fn each_call_gets_what_the_others_have_left() {
        let ledger = Ledger::default();
        let left = |confinement: &Confinement| ledger.rest(confinement).limits.disk_bytes;
        let one = confinement(session("one"), Some(60), Some(100));
        assert_eq!(left(&one), Some(60));
        ledger.enter(&one, &mut exit(50, None));
        assert_eq!((left(&one), left(&confinement(session("two"), Some(60), Some(100)))), (Some(50), Some(60)));
        let passed = |allowed, used| Some(Overrun { limit: LIMIT, allowed, used });
        let mut last = exit(10, passed(50, 55));
        ledger.enter(&one, &mut last);
        assert_eq!((last.overrun, left(&one)), (passed(100, 105), Some(0)));
        // A limit of its own is told as it is, and so is another.
        let own = confinement(session("own"), Some(60), Some(100));
        let mut first = exit(10, passed(60, 61));
        ledger.enter(&own, &mut first);
        assert_eq!((first.overrun, left(&own)), (passed(60, 61), Some(39)));
        let mut other = exit(10, Some(Overrun { limit: "processes", allowed: 1, used: 2 }));
        ledger.enter(&own, &mut other);
        assert_eq!(other.overrun, Some(Overrun { limit: "processes", allowed: 1, used: 2 }));
    }

    #[test]
    fn where_nothing_is_limited_as_a_whole_nothing_is_kept() {
        let ledger = Ledger::default();
        let free = confinement(session("free"), Some(60), None);
        ledger.enter(&free, &mut exit(50, None));
        let own = confinement(Place::Own, None, Some(100));
        ledger.enter(&own, &mut exit(50, None));
        assert_eq!((ledger.rest(&free).limits, ledger.rest(&own).limits.disk_bytes), (free.limits, Some(100)));
        assert!(ledger.all().is_empty());
    }

    #[test]
    fn of_too_many_those_are_forgotten_that_have_written_least() {
        let ledger = Ledger::default();
        for number in 0..=PLACES_MAX as u64 {
            let place = session(&number.to_string());
            ledger.enter(&confinement(place, None, Some(1)), &mut exit(number, None));
        }
        assert!(ledger.all().len() <= PLACES_MAX);
        assert!(ledger.all().contains_key(&session(&(PLACES_MAX - 1).to_string())));
    }
}
