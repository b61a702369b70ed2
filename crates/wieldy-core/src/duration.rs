//! Durations as JSON has them: whole milliseconds.

use std::time::Duration;

use serde::Serializer;

pub(crate) fn serialize<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match duration {
        Some(duration) => plain::serialize(duration, serializer),
        None => serializer.serialize_none(),
    }
}

pub(crate) mod plain {
    use super::{Duration, Serializer};

    pub(crate) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
    }
}
