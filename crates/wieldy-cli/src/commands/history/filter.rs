//! The filter flags of the history commands: parses statuses, times and sizes.

use std::path::Path;
use std::time::Duration;

use anyhow::anyhow;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use wieldy::{GroupBy, Query, TextPlace, parse_duration, redact};

use crate::args::{FilterArgs, TextIn};
use crate::exit::Failure;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Converts the flags into a query.
pub(super) fn query(args: &FilterArgs) -> Result<Query, Failure> {
    let now = Timestamp::now();
    let time = |flag: &str, text: &Option<String>| {
        let time = text.as_deref().map(|text| time(text, now, &TimeZone::system())).transpose();
        time.map_err(|message| wrong(flag, &message))
    };
    Ok(Query {
        execution: None,
        tool: args.tool.clone(),
        status: args.status,
        session: args.session.clone(),
        agent: args.agent.clone(),
        tenant: args.tenant.clone(),
        user: None,
        workspace: args.workspace.as_deref().map(workspace).transpose()?,
        provider: args.provider.clone(),
        batch: args.batch.clone(),
        since: time("--since", &args.since)?,
        until: time("--until", &args.until)?,
        text: args.text.clone(),
        text_in: match args.text_in {
            Some(TextIn::Results) => TextPlace::Results,
            Some(TextIn::Calls) | None => TextPlace::Calls,
        },
        metadata: args.metadata.iter().map(|pair| entry(pair)).collect::<Result<_, _>>()?,
        cursor: None,
    })
}

/// Parses an entry of metadata. The first `=` counts, so values may contain others.
fn entry(pair: &str) -> Result<(String, String), Failure> {
    match pair.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(wrong("--metadata", &format!("`{pair}` is no entry such as `run=5`"))),
    }
}

/// Returns the workspace text that calls in a folder are recorded with. The folder may be gone.
fn workspace(folder: &Path) -> Result<String, Failure> {
    let absolute = folder.canonicalize().or_else(|_| std::path::absolute(folder));
    let absolute = absolute.map_err(|error| wrong("--workspace", &error.to_string()))?;
    Ok(redact::text(&absolute.to_string_lossy()).into_owned())
}

pub(super) fn wrong(flag: &str, message: &str) -> Failure {
    Failure::usage(anyhow!("`{flag}`: {message}")).hint("`wieldy history --help` shows the allowed values")
}

/// Parses the grouping of statistics.
pub(super) fn grouping(text: &str) -> Result<GroupBy, Failure> {
    match text {
        "tool" => Ok(GroupBy::Tool),
        "day" => Ok(GroupBy::Day),
        "tool,day" | "day,tool" => Ok(GroupBy::ToolAndDay),
        other => Err(wrong("--by", &format!("`{other}` is not `tool`, `day` or `tool,day`"))),
    }
}

/// Parses a day, a time, or an age.
fn time(text: &str, now: Timestamp, zone: &TimeZone) -> Result<Timestamp, String> {
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(time);
    }
    let is_day = text.len() == 10 && text.bytes().filter(|byte| *byte == b'-').count() == 2;
    if let Some(date) = text.parse::<Date>().ok().filter(|_| is_day) {
        let begins =
            date.to_zoned(zone.clone()).map_err(|error| format!("`{text}` is not a day in this time zone: {error}"))?;
        return Ok(begins.timestamp());
    }
    let ago = age(text).ok().and_then(|age| SignedDuration::try_from(age).ok());
    ago.and_then(|ago| now.checked_sub(ago).ok())
        .ok_or_else(|| format!("`{text}` is not a time such as `2026-11-16`, `2026-11-16T08:30:00Z`, `2h` or `7d`"))
}

/// Parses a duration, with days and weeks besides the units of timeouts.
pub(super) fn age(text: &str) -> Result<Duration, String> {
    let in_days = |number: &str, days: u32| number.parse::<u32>().ok().filter(|n| (1..=36_500).contains(&(n * days)));
    let days = match (text.strip_suffix('d'), text.strip_suffix('w')) {
        (Some(number), _) => in_days(number, 1).map(|number| DAY * number),
        (_, Some(number)) if number.len() < 5 => in_days(number, 7).map(|number| DAY * number * 7),
        _ => parse_duration(text).ok(),
    };
    days.ok_or_else(|| format!("`{text}` is not a duration such as `12h`, `90d` or `4w`"))
}

/// Parses a number of bytes: `1048576`, `500MB`, `1GB`.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|sign: char| !sign.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim().to_ascii_uppercase().as_str() {
        "" | "B" => Some(1),
        "K" | "KB" | "KIB" => Some(1 << 10),
        "M" | "MB" | "MIB" => Some(1 << 20),
        "G" | "GB" | "GIB" => Some(1 << 30),
        _ => None,
    };
    let bytes = factor.and_then(|factor: u64| number.parse::<u64>().ok()?.checked_mul(factor));
    bytes.filter(|bytes| *bytes > 0).ok_or_else(|| format!("`{text}` is not a size such as `500MB` or `1GB`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_day_a_moment_or_so_long_ago() {
        let now: Timestamp = "2026-11-16T12:00:00Z".parse().unwrap();
        let zone = TimeZone::fixed(jiff::tz::offset(2));
        for (text, expected) in [
            ("2026-11-16", "2026-11-15T22:00:00Z"),
            ("2026-11-16T08:30:00Z", "2026-11-16T08:30:00Z"),
            ("2026-11-16T08:30:00+02:00", "2026-11-16T06:30:00Z"),
            ("2h", "2026-11-16T10:00:00Z"),
            ("90", "2026-11-16T11:58:30Z"),
            ("7d", "2026-11-09T12:00:00Z"),
            ("2w", "2026-11-02T12:00:00Z"),
        ] {
            assert_eq!(time(text, now, &zone).map(|time| time.to_string()), Ok(expected.to_owned()), "{text}");
        }
        for text in ["", "d", "0d", "-1d", "yesterday", "2026-13-01", "2026-11", "99999999d", "9999w", "4294967295w"] {
            assert!(time(text, now, &zone).is_err(), "{text}");
        }
    }

    #[test]
    fn a_size_has_a_unit_or_is_in_bytes() {
        for (text, expected) in [("1", 1), ("10kb", 10 << 10), ("500MB", 500 << 20), ("2 GiB", 2 << 30)] {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in ["", "0", "MB", "1TB", "-1", "1.5GB", "99999999999GB"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_reading_a_time_or_size_panic(text in "\\PC{0,12}|[0-9]{1,12}[dwhms]|[0-9-]{10}") {
            let _ = (time(&text, Timestamp::now(), &TimeZone::UTC), bytes(&text));
        }
    }
}
