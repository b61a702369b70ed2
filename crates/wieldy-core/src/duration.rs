//! Reads and writes durations: whole milliseconds in JSON; `500ms`, `30s`, `5m` or `1h` where people write them.

use std::time::Duration;

use jiff::Timestamp;
use serde::Serializer;

/// Reads a duration as people write it: `500ms`, `30s`, `5m`, `1h`; a plain number means seconds.
///
/// It must be more than zero and at most a year: any other value is taken for a mistake.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let unit_at = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let seconds_per_unit = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("`{text}` is not a duration such as `500ms`, `30s`, `5m` or `1h`")),
    };
    let is_plain = !number.is_empty() && number.chars().all(|c| c.is_ascii_digit() || c == '.');
    let number: f64 = number
        .trim()
        .parse()
        .ok()
        .filter(|_| is_plain || number.trim().starts_with('-'))
        .ok_or_else(|| format!("`{text}` is not a duration such as `500ms`, `30s`, `5m` or `1h`"))?;
    let seconds = number * seconds_per_unit;
    if seconds < 1e-6 {
        return Err(format!("`{text}` is no time at all; a duration must be more than 0"));
    }
    if seconds > 365.0 * 24.0 * 3600.0 {
        return Err(format!("`{text}` is longer than a year"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Reads a time as people write it: `2026-11-16T08:00:00Z`, or a duration back from now such as `2h`.
pub fn parse_since(text: &str) -> Result<Timestamp, String> {
    let back = || parse_duration(text).ok().and_then(|back| Timestamp::now().checked_sub(back).ok());
    text.parse()
        .ok()
        .or_else(back)
        .ok_or_else(|| format!("`{text}` is neither a time such as `2026-11-16T08:00:00Z` nor an age such as `2h`"))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_people_write_them() {
        for (text, milliseconds) in
            [("500ms", 500), ("30s", 30_000), ("1.5", 1500), ("5m", 300_000), (" 1h ", 3_600_000)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
    }

    /// P-QTA-01.
    #[test]
    fn absurd_durations_are_refused() {
        for text in ["0", "0s", "-1", "-5s", "0.0000001"] {
            assert_eq!(
                parse_duration(text),
                Err(format!("`{text}` is no time at all; a duration must be more than 0"))
            );
        }
        for text in ["1e308", "NaN", "inf", "", "s", "1 2", "five", "1d", "0x10", "1_000", "--1"] {
            let message = parse_duration(text).expect_err(text);
            assert_eq!(message, format!("`{text}` is not a duration such as `500ms`, `30s`, `5m` or `1h`"));
        }
        for long in ["9".repeat(400), i64::MAX.to_string(), format!("{}s", u64::MAX), (1_u128 << 64).to_string()] {
            assert_eq!(parse_duration(&long), Err(format!("`{long}` is longer than a year")));
        }
    }

    proptest::proptest! {
        #[test]
        fn reading_a_duration_never_panics(text in "\\PC{0,20}") {
            if let Ok(duration) = parse_duration(&text) {
                proptest::prop_assert!(duration > Duration::ZERO);
            }
        }
    }
}
