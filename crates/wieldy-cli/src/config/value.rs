//! Numbers and times as people write them in a configuration, with bounds that refuse absurd values.

use std::fmt;
use std::time::Duration;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use wieldy::parse_duration;

/// A whole number with bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Whole<const MIN: u64, const MAX: u64>(pub(crate) u64);

/// A number of items, at least one: with none, nothing could ever run.
pub(crate) type Count = Whole<1, 1_000_000>;
/// A number of items, or 0 for "never".
pub(crate) type CountOrNone = Whole<0, 1_000_000>;
/// A port of this machine.
pub(crate) type Port = Whole<1, 65_535>;
/// A number of bytes up to a terabyte.
pub(crate) type Bytes = Whole<1, { 1 << 40 }>;
/// A number of bytes up to a terabyte, or 0 for "none at all".
pub(crate) type BytesOrNone = Whole<0, { 1 << 40 }>;
/// A number of megabytes up to sixteen terabytes.
pub(crate) type Megabytes = Whole<1, { 1 << 24 }>;
/// A number of megabytes up to sixteen terabytes, or 0 for "no limit".
pub(crate) type MegabytesOrNone = Whole<0, { 1 << 24 }>;

impl<const MIN: u64, const MAX: u64> Serialize for Whole<MIN, MAX> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de, const MIN: u64, const MAX: u64> Deserialize<'de> for Whole<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WholeVisitor<const MIN: u64, const MAX: u64>;

        impl<const MIN: u64, const MAX: u64> WholeVisitor<MIN, MAX> {
            fn not<E: Error>(found: impl fmt::Display) -> E {
                E::custom(format!("must be a whole number from {MIN} to {MAX}, not {found}"))
            }
        }

        impl<const MIN: u64, const MAX: u64> Visitor<'_> for WholeVisitor<MIN, MAX> {
            type Value = Whole<MIN, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a whole number from {MIN} to {MAX}")
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Self::Value, E> {
                u64::try_from(number).map_err(|_| Self::not(number)).and_then(|number| self.visit_u64(number))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
                if (MIN..=MAX).contains(&number) { Ok(Whole(number)) } else { Err(Self::not(number)) }
            }

            fn visit_f64<E: Error>(self, number: f64) -> Result<Self::Value, E> {
                Err(Self::not(number))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Err(Self::not(format_args!("the text `{text}`")))
            }
        }

        deserializer.deserialize_any(WholeVisitor)
    }
}

/// A length of time: a text such as `30s`, or a number of seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Time(pub(crate) Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = self.0.as_millis();
        match milliseconds {
            _ if !self.0.subsec_nanos().is_multiple_of(1_000_000) => write!(f, "{}s", self.0.as_secs_f64()),
            _ if milliseconds.is_multiple_of(3_600_000) => write!(f, "{}h", milliseconds / 3_600_000),
            _ if milliseconds.is_multiple_of(60_000) => write!(f, "{}m", milliseconds / 60_000),
            _ if milliseconds.is_multiple_of(1000) => write!(f, "{}s", milliseconds / 1000),
            _ => write!(f, "{milliseconds}ms"),
        }
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TimeVisitor;

        impl Visitor<'_> for TimeVisitor {
            type Value = Time;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time such as `30s`, or a number of seconds")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Time, E> {
                parse_duration(text).map(Time).map_err(E::custom)
            }

            fn visit_i64<E: Error>(self, seconds: i64) -> Result<Time, E> {
                self.visit_str(&seconds.to_string())
            }

            fn visit_f64<E: Error>(self, seconds: f64) -> Result<Time, E> {
                self.visit_str(&seconds.to_string())
            }
        }

        deserializer.deserialize_any(TimeVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_as_it_can_be_read() {
        for text in ["500ms", "30s", "5m", "1h", "90s", "0.0005s"] {
            let time = Time(parse_duration(text).unwrap());
            assert_eq!(time.to_string(), text);
        }
    }
}
