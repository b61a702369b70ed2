//! Points in time as models write them: RFC 3339, `in 2h`, or a day and a time of day, with or without a zone.

use jiff::civil::{Date, DateTime, Time, Weekday};
use jiff::tz::{AmbiguousOffset, Offset, TimeZone};
use jiff::{Span, Timestamp, ToSpan, Zoned};

/// The reason why a text is not a time that can be waited for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WrongTime {
    pub(super) message: String,
    pub(super) suggestion: String,
}

/// The longest time that a note can wait, in days.
const DAYS_MAX: i64 = 10 * 366;

/// Reads a time that is yet to come. Times without a zone are in `zone`.
pub(super) fn parse(text: &str, now: Timestamp, zone: &TimeZone) -> Result<Timestamp, WrongTime> {
    let text = text.trim();
    let time = read(text, now, zone)?;
    if time <= now {
        let here = now.to_zoned(zone.clone());
        return Err(WrongTime {
            message: format!("`{text}` is {time:.0}, which is in the past"),
            suggestion: format!("it is now {now:.0} ({}); give a later time", here.strftime("%A %H:%M %:z")),
        });
    }
    if time.duration_since(now).as_hours() > DAYS_MAX * 24 {
        let message = format!("`{text}` is more than ten years away");
        return Err(WrongTime { message, suggestion: "give an earlier time".into() });
    }
    Ok(time)
}

fn read(text: &str, now: Timestamp, zone: &TimeZone) -> Result<Timestamp, WrongTime> {
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(time);
    }
    // With a zone in brackets, as in RFC 9557.
    if text.contains('[')
        && let Ok(time) = text.parse::<Zoned>()
    {
        return Ok(time.timestamp());
    }
    if let Some(span) = text.strip_prefix("in ") {
        let span: Span = span.trim().parse().map_err(|_| unreadable(text))?;
        let later = now.to_zoned(zone.clone()).checked_add(span);
        return later.map(|later| later.timestamp()).map_err(|_| unreadable(text));
    }
    // A date and a time may be joined by a `T`.
    let joined = text.get(..10).filter(|date| text.get(10..11) == Some("T") && date.parse::<Date>().is_ok());
    let mut words: Vec<&str> = match joined {
        Some(date) => std::iter::once(date).chain(text[11..].split_whitespace()).collect(),
        None => text.split_whitespace().collect(),
    };
    // A word with a slash, `UTC`, or an offset is a zone.
    let zone = match words.last().map(|word| named_zone(word)) {
        Some(Some(Ok(named))) => {
            words.pop();
            named
        }
        Some(Some(Err(name))) => {
            let message = format!("the time zone `{name}` is not known");
            return Err(WrongTime { message, suggestion: "write it as `Europe/Berlin`, `UTC` or `+02:00`".into() });
        }
        _ => zone.clone(),
    };
    let here = now.to_zoned(zone.clone()).datetime();
    let (day, time) = match words.as_slice() {
        [time] => (None, *time),
        [day, time] => (Some(*day), *time),
        _ => return Err(unreadable(text)),
    };
    let time = time_of(time).ok_or_else(|| unreadable(text))?;
    let date = match day {
        Some(day) => date_of(day, here, time).ok_or_else(|| unreadable(text))?,
        None => here.date(),
    };
    place(text, date.to_datetime(time), &zone)
}

/// Returns the zone that a word names, or the word if it looks like a zone and is none.
fn named_zone(word: &str) -> Option<Result<TimeZone, &str>> {
    if word.eq_ignore_ascii_case("utc") || word.eq_ignore_ascii_case("z") {
        return Some(Ok(TimeZone::UTC));
    }
    if let Some(offset) = word.strip_prefix(['+', '-']) {
        let (hours, minutes) = offset.split_once(':').unwrap_or((offset, "0"));
        let (hours, minutes): (i32, i32) = (hours.parse().ok()?, minutes.parse().ok()?);
        let seconds = (hours * 60 + minutes) * 60 * if word.starts_with('-') { -1 } else { 1 };
        return Some(Offset::from_seconds(seconds).map(TimeZone::fixed).map_err(|_| word));
    }
    word.contains('/').then(|| TimeZone::get(word).map_err(|_| word))
}

/// Returns the date that a word means. A day of the week is today if the time is still to come, and else the next one.
fn date_of(word: &str, now: DateTime, time: Time) -> Option<Date> {
    let today = now.date();
    let weekday = match word.to_ascii_lowercase().as_str() {
        "today" => return Some(today),
        "tomorrow" => return today.checked_add(1.day()).ok(),
        "monday" => Weekday::Monday,
        "tuesday" => Weekday::Tuesday,
        "wednesday" => Weekday::Wednesday,
        "thursday" => Weekday::Thursday,
        "friday" => Weekday::Friday,
        "saturday" => Weekday::Saturday,
        "sunday" => Weekday::Sunday,
        date => return date.parse().ok(),
    };
    if today.weekday() == weekday && time > now.time() {
        return Some(today);
    }
    today.nth_weekday(1, weekday).ok()
}

/// Returns a time of day: `9:00`, `09:00:30` or `9`.
fn time_of(word: &str) -> Option<Time> {
    let parts: Option<Vec<i8>> = word.split(':').map(|part| part.parse().ok()).collect();
    match parts?.as_slice() {
        [hour, minute] => Time::new(*hour, *minute, 0, 0).ok(),
        [hour, minute, second] => Time::new(*hour, *minute, *second, 0).ok(),
        _ => None,
    }
}

/// Returns the instant at which clocks of the zone show a time. Fails if they show it never, or twice.
fn place(text: &str, time: DateTime, zone: &TimeZone) -> Result<Timestamp, WrongTime> {
    let at = |offset: Offset| format!("`{}{}`", time.strftime("%Y-%m-%dT%H:%M:%S"), Zone(offset));
    let ambiguous = zone.to_ambiguous_timestamp(time);
    let name = zone.iana_name().unwrap_or("this time zone");
    match ambiguous.offset() {
        AmbiguousOffset::Unambiguous { .. } => ambiguous.unambiguous().map_err(|_| unreadable(text)),
        AmbiguousOffset::Gap { before, after } => Err(WrongTime {
            message: format!("`{text}` does not exist in {name}: the clocks skip it"),
            suggestion: format!("write {} or {}", at(before), at(after)),
        }),
        AmbiguousOffset::Fold { before, after } => Err(WrongTime {
            message: format!("`{text}` happens twice in {name}: the clocks go back over it"),
            suggestion: format!("write {} or {}", at(before), at(after)),
        }),
    }
}

/// An offset as RFC 3339 writes it.
struct Zone(Offset);

impl std::fmt::Display for Zone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (seconds, sign) = (self.0.seconds().abs(), if self.0.seconds() < 0 { '-' } else { '+' });
        write!(f, "{sign}{:02}:{:02}", seconds / 3600, seconds / 60 % 60)
    }
}

fn unreadable(text: &str) -> WrongTime {
    WrongTime {
        message: format!("`{}` is not a time", wieldy_core::shown_in_line(text)),
        suggestion:
            "write it as `2026-11-20T09:00:00Z`, `in 2h 30m`, `tomorrow 9:00`, `friday 17:30 Europe/Berlin`, or \
                     `2026-11-20 9:00 +01:00`"
                .into(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A Thursday, 21:00 in Berlin.
    const NOW: &str = "2026-11-19T20:00:00Z";

    /// Returns the time, or the error with its suggestion.
    fn parsed(text: &str) -> String {
        let berlin = TimeZone::get("Europe/Berlin").expect("the zone is installed");
        match parse(text, NOW.parse().expect("a time"), &berlin) {
            Ok(time) => time.to_string(),
            Err(WrongTime { message, suggestion }) => format!("{message} ({suggestion})"),
        }
    }

    #[test]
    fn times_are_absolute_relative_or_a_day_and_a_time() {
        for (text, time) in [
            ("2026-11-20T09:00:00Z", "2026-11-20T09:00:00Z"),
            ("2026-11-20T09:00:00+01:00", "2026-11-20T08:00:00Z"),
            ("2026-11-20T09:00:00+01:00[Europe/Berlin]", "2026-11-20T08:00:00Z"),
            ("2026-11-20T09:00", "2026-11-20T08:00:00Z"),
            ("in 2h", "2026-11-19T22:00:00Z"),
            ("in 90 seconds", "2026-11-19T20:01:30Z"),
            ("in 1 day 30m", "2026-11-20T20:30:00Z"),
            ("tomorrow 9:00", "2026-11-20T08:00:00Z"),
            ("Tomorrow 09:00:30 UTC", "2026-11-20T09:00:30Z"),
            ("today 23:30", "2026-11-19T22:30:00Z"),
            ("23:30", "2026-11-19T22:30:00Z"),
            ("friday 17:30 America/New_York", "2026-11-20T22:30:00Z"),
            ("thursday 9:00", "2026-11-26T08:00:00Z"),
            ("thursday 23:30", "2026-11-19T22:30:00Z"),
            ("2026-12-24 18:00 -05:00", "2026-12-24T23:00:00Z"),
        ] {
            assert_eq!(parsed(text), time, "{text}");
        }
    }

    #[test]
    fn times_that_are_past_or_ambiguous_are_told() {
        let now = "it is now 2026-11-19T20:00:00Z (Thursday 21:00 +01:00); give a later time";
        for (text, told) in [
            ("today 9:00", format!("`today 9:00` is 2026-11-19T08:00:00Z, which is in the past ({now})")),
            ("in -2h", format!("`in -2h` is 2026-11-19T18:00:00Z, which is in the past ({now})")),
            (
                "2027-03-28 02:30",
                "`2027-03-28 02:30` does not exist in Europe/Berlin: the clocks skip it \
                 (write `2027-03-28T02:30:00+01:00` or `2027-03-28T02:30:00+02:00`)"
                    .into(),
            ),
            (
                "2027-10-31 02:30",
                "`2027-10-31 02:30` happens twice in Europe/Berlin: the clocks go back over it \
                 (write `2027-10-31T02:30:00+02:00` or `2027-10-31T02:30:00+01:00`)"
                    .into(),
            ),
            ("in 20 years", "`in 20 years` is more than ten years away (give an earlier time)".into()),
            (
                "tomorrow 9:00 Europe/Berln",
                "the time zone `Europe/Berln` is not known (write it as `Europe/Berlin`, `UTC` or `+02:00`)".into(),
            ),
        ] {
            assert_eq!(parsed(text), told, "{text}");
        }
        for text in
            ["soon", "", "in", "in a while", "tomorrow", "9", "25:00", "today 9:00 here", "in 9999999999999999999h"]
        {
            assert!(parsed(text).contains("is not a time"), "{text}: {}", parsed(text));
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_reading_a_time_panic(text in "(in |today |tomorrow )?[-+0-9:TZ/a-z \\[\\]]{0,30}", any in "\\PC{0,40}") {
            parsed(&text);
            parsed(&any);
        }
    }
}
