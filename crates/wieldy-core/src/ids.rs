//! The ids of calls, batches and questions, which sort in the order of their making.

use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::{ContextV7, Uuid};

/// Returns an id that sorts after every earlier one, also within the same millisecond.
fn new_id(now: Timestamp) -> Uuid {
    static ORDER: Mutex<ContextV7> = Mutex::new(ContextV7::new());
    let seconds = u64::try_from(now.as_second()).unwrap_or_default();
    let nanos = u32::try_from(now.subsec_nanosecond()).unwrap_or_default();
    Uuid::new_v7(uuid::Timestamp::from_unix(&ORDER, seconds, nanos))
}

macro_rules! ids {
    ($($(#[doc = $doc:literal])+ $name:ident;)+) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// Returns a new id, which sorts after every earlier one.
            pub(crate) fn next() -> Self {
                Self::next_at(Timestamp::now())
            }

            /// Does the same with a known time.
            pub(crate) fn next_at(now: Timestamp) -> Self {
                Self(new_id(now))
            }

            /// Returns the time at which the id was made, to the millisecond.
            pub fn made_at(self) -> Timestamp {
                let (seconds, nanos) = self.0.get_timestamp().map(|time| time.to_unix()).unwrap_or_default();
                let seconds = i64::try_from(seconds).unwrap_or_default();
                Timestamp::new(seconds, i32::try_from(nanos).unwrap_or_default()).unwrap_or_default()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.hyphenated().fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.0.hyphenated())
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, uuid::Error> {
                text.parse().map(Self)
            }
        }
    )+};
}

ids! {
    /// The executor's id of one call. Callers cannot choose it, so ids cannot collide.
    ExecutionId;
    /// The executor's id of a batch.
    BatchId;
    /// The executor's id of one question to a person.
    ConfirmationId;
    /// The executor's id of a note that an agent leaves for itself.
    NoteId;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_in_the_order_of_their_making() {
        let ids: Vec<ExecutionId> = (0..1000).map(|_| ExecutionId::next()).collect();
        assert!(ids.is_sorted_by(|a, b| a < b));
        assert_eq!(ids[0].to_string().parse::<ExecutionId>(), Ok(ids[0]));
    }

    #[test]
    fn an_id_knows_when_it_was_made() {
        let milliseconds = |time: Timestamp| time.as_millisecond();
        let before = Timestamp::now();
        let made_at = ExecutionId::next().made_at();
        assert!((milliseconds(before)..=milliseconds(Timestamp::now())).contains(&milliseconds(made_at)));
    }
}
