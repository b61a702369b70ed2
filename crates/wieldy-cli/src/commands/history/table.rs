//! The history for people: tables of calls and of statistics, and one call with all its events.

use std::fmt::Write;

use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use serde_json::Value;
use wieldy::{Execution, RecordedEvent, Stat, event_message};

use crate::output::shown_in_line;

/// The minimal length of shown ids: the part that encodes the time of the call.
const ID_LENGTH_MIN: usize = 13;
/// The length of the longest bar.
const BAR_LENGTH: usize = 16;

/// A column of cells, padded to the same width.
pub(crate) struct Column {
    title: &'static str,
    cells: Vec<String>,
    to_the_right: bool,
}

impl Column {
    pub(crate) fn new(title: &'static str, cells: impl Iterator<Item = String>) -> Self {
        Self { title, cells: cells.collect(), to_the_right: false }
    }

    pub(crate) fn number(title: &'static str, cells: impl Iterator<Item = String>) -> Self {
        Self { to_the_right: true, ..Self::new(title, cells) }
    }
}

/// Formats columns side by side below their titles, each line within `width`. `colour` may colour a cell.
pub(crate) fn table(columns: &[Column], width: usize, colour: impl Fn(usize, usize) -> Option<&'static str>) -> String {
    let length = |text: &str| text.chars().count();
    let widths: Vec<usize> = columns
        .iter()
        .map(|column| column.cells.iter().map(|cell| length(cell)).chain([length(column.title)]).max().unwrap_or(0))
        .collect();
    let rows = columns.first().map_or(0, |column| column.cells.len());
    let mut text = String::new();
    for row in 0..=rows {
        let (mut line, mut left) = (String::new(), width);
        for (place, column) in columns.iter().enumerate() {
            let is_last = place + 1 == columns.len();
            let cell = if row == 0 { column.title } else { column.cells[row - 1].as_str() };
            let pad = " ".repeat(widths[place].saturating_sub(length(cell)));
            let cell = cut(cell, left);
            left = left.saturating_sub(widths[place] + 2);
            let cell = match row.checked_sub(1).and_then(|row| colour(row, place)) {
                Some(colour) if !cell.is_empty() => format!("\x1b[{colour}m{cell}\x1b[0m"),
                _ => cell,
            };
            match (column.to_the_right, is_last) {
                (true, _) => line.extend([pad.as_str(), &cell]),
                (false, true) => line.push_str(&cell),
                (false, false) => line.extend([cell.as_str(), &pad]),
            }
            if left == 0 {
                break;
            }
            line.push_str(if is_last { "" } else { "  " });
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Cuts the text to this many characters.
fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(width.saturating_sub(1)).collect();
    if width > 0 {
        cut.push('…');
    }
    cut
}

/// Formats a line for each call.
pub(super) fn calls(calls: &[Execution], now: &Zoned, width: usize, colours: bool) -> String {
    let id_length = id_length(calls);
    let columns = [
        Column::new("TIME", calls.iter().map(|call| short_time(call.started_at, now))),
        Column::new("TOOL", calls.iter().map(|call| cut(&shown_in_line(&call.tool), 32))),
        Column::new("STATUS", calls.iter().map(status)),
        Column::number("TOOK", calls.iter().map(|call| call.duration_ms.map(duration).unwrap_or_default())),
        Column::number("SIZE", calls.iter().map(|call| call.output_bytes.map(size).unwrap_or_default())),
        Column::new("ID", calls.iter().map(|call| call.execution_id.chars().take(id_length).collect())),
        Column::new("ARGUMENTS", calls.iter().map(|call| arguments(call.parameters.as_ref()))),
    ];
    table(&columns, width, |row, column| (colours && column == 2).then(|| status_colour(&calls[row].status)))
}

/// Returns the number of characters that makes the ids differ.
fn id_length(calls: &[Execution]) -> usize {
    let mut ids: Vec<&str> = calls.iter().map(|call| call.execution_id.as_str()).collect();
    ids.sort_unstable();
    let common = |pair: &[&str]| pair[0].bytes().zip(pair[1].bytes()).take_while(|(a, b)| a == b).count() + 1;
    ids.windows(2).map(common).max().unwrap_or_default().max(ID_LENGTH_MIN)
}

fn status(call: &Execution) -> String {
    let code = call.error_code.as_deref().map(|code| format!(" {code}")).unwrap_or_default();
    format!("{}{code}", call.status)
}

fn status_colour(status: &str) -> &'static str {
    match status {
        "success" => "32",
        "pending" | "running" | "input_required" | "cancelled" => "33",
        _ => "31",
    }
}

/// Formats the local time, without the year if it is the current one.
pub(crate) fn short_time(time: Timestamp, now: &Zoned) -> String {
    let here = time.to_zoned(now.time_zone().clone());
    let form = if here.year() == now.year() { "%m-%d %H:%M:%S" } else { "%Y-%m-%d %H:%M" };
    here.strftime(form).to_string()
}

/// Formats the arguments as they could be typed.
fn arguments(parameters: Option<&Value>) -> String {
    let is_plain = |text: &str| !text.is_empty() && !text.contains(|sign: char| sign.is_whitespace() || sign == '"');
    let one = |(key, value): (&String, &Value)| match value {
        Value::String(text) if is_plain(text) => format!("{key}={text}"),
        Value::String(_) => format!("{key}={value}"),
        value => format!("{key}:={value}"),
    };
    let text = match parameters {
        None => String::new(),
        Some(Value::Object(values)) => values.iter().map(one).collect::<Vec<_>>().join(" "),
        Some(value) => value.to_string(),
    };
    shown_in_line(&text)
}

/// Formats a duration: `0.4 ms`, `12 ms`, `1.2 s`, `3 m 20 s`.
pub(super) fn duration(milliseconds: f64) -> String {
    match milliseconds {
        ms if ms < 9.95 => format!("{ms:.1} ms"),
        ms if ms < 999.5 => format!("{ms:.0} ms"),
        ms if ms < 59_950.0 => format!("{:.1} s", ms / 1000.0),
        ms => {
            let seconds = (ms / 1000.0).round() as u64;
            if seconds < 3600 {
                format!("{} m {} s", seconds / 60, seconds % 60)
            } else {
                format!("{} h {} m", seconds / 3600, seconds / 60 % 60)
            }
        }
    }
}

/// Formats a size: `512 B`, `1.5 KB`, `20 MB`.
pub(super) fn size(bytes: i64) -> String {
    let mut amount = bytes as f64;
    for unit in ["B", "KB", "MB", "GB"] {
        if amount < 1023.5 {
            return if unit == "B" || amount >= 9.95 {
                format!("{amount:.0} {unit}")
            } else {
                format!("{amount:.1} {unit}")
            };
        }
        amount /= 1024.0;
    }
    format!("{amount:.1} TB")
}

/// Formats a line for each tool or day, with a bar for the number of calls.
pub(super) fn stats(stats: &[Stat], width: usize, colours: bool) -> String {
    let most = stats.iter().map(|stat| stat.count).max().unwrap_or_default();
    let text = |text: &Option<String>| text.as_deref().map(shown_in_line).unwrap_or_default();
    let mut columns = Vec::new();
    if stats.iter().any(|stat| stat.day.is_some()) {
        columns.push(Column::new("DAY", stats.iter().map(|stat| text(&stat.day))));
    }
    if stats.iter().any(|stat| stat.tool.is_some()) {
        columns.push(Column::new("TOOL", stats.iter().map(|stat| text(&stat.tool))));
    }
    let first = columns.len();
    columns.extend([
        Column::number("CALLS", stats.iter().map(|stat| stat.count.to_string())),
        Column::number("ERRORS", stats.iter().map(|stat| percent(stat.error_rate))),
        Column::number("P50", stats.iter().map(|stat| duration(stat.p50_ms))),
        Column::number("P95", stats.iter().map(|stat| duration(stat.p95_ms))),
        Column::number("P99", stats.iter().map(|stat| duration(stat.p99_ms))),
        Column::number("SIZE", stats.iter().map(|stat| size(stat.output_bytes))),
        Column::number("KEPT", stats.iter().map(|stat| size(stat.result_bytes))),
        Column::new("", stats.iter().map(|stat| bar(stat.count, most))),
    ]);
    let failed = |row: usize| if stats[row].errors > 0 { Some("31") } else { None };
    table(&columns, width, |row, column| {
        let colour = if column == first + 1 { failed(row) } else { (column == first + 7).then_some("36") };
        colour.filter(|_| colours)
    })
}

fn percent(share: f64) -> String {
    match share * 100.0 {
        percent if percent > 0.0 && percent < 9.95 => format!("{percent:.1} %"),
        percent => format!("{percent:.0} %"),
    }
}

/// Returns a bar with a resolution of an eighth of a character.
fn bar(count: i64, most: i64) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    if count <= 0 || most <= 0 {
        return String::new();
    }
    let eighths = ((count as f64 / most as f64 * (BAR_LENGTH * 8) as f64).round() as usize).max(1);
    format!("{}{}", "█".repeat(eighths / 8), PARTS[eighths % 8])
}

/// Formats all details of one call.
pub(super) fn call(call: &Execution, events: &[RecordedEvent], zone: &TimeZone, colours: bool) -> String {
    let time = |time: Timestamp| time.to_zoned(zone.clone()).strftime("%Y-%m-%d %H:%M:%S%.3f %:z").to_string();
    let known = |value: &Value| match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    let coloured = |text: &str, colour: &str| {
        if colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    };
    let facts = [
        ("tool", Some(call.tool.clone())),
        ("provider", call.provider.clone()),
        ("started", Some(time(call.started_at))),
        ("ended", call.completed_at.map(time)),
        ("took", call.duration_ms.map(duration)),
        ("returned", call.output_bytes.map(size)),
        ("attempts", Some(call.attempts.to_string())),
        ("agent", Some(call.agent.clone())),
        ("tenant", call.tenant.clone()),
        ("session", call.session.clone()),
        ("user", call.user.clone()),
        ("workspace", call.workspace.clone()),
        ("batch", call.batch.clone()),
        ("sandbox", call.sandbox.clone()),
    ];
    let mut text = format!("{:11} {}\n", "call:", call.execution_id);
    let _ = writeln!(text, "{:11} {}", "status:", coloured(&call.status, status_colour(&call.status)));
    for (name, fact) in facts {
        if let Some(fact) = fact {
            let _ = writeln!(text, "{:11} {}", format!("{name}:"), shown_in_line(&fact));
        }
    }
    if let Some(usage) = call.usage.as_ref().and_then(Value::as_object) {
        let measured = usage.iter().filter(|(_, value)| !value.is_null());
        let used = measured.map(used).collect::<Vec<_>>().join(", ");
        let _ = writeln!(text, "{:11} {}", "used:", shown_in_line(&used));
    }
    for (name, value) in call.metadata.iter().filter_map(Value::as_object).flatten() {
        let name = if name == "caller" { "metadata" } else { name };
        let _ = writeln!(text, "{:11} {}", format!("{}:", shown_in_line(name)), shown_in_line(&known(value)));
    }
    if let Some(parameters) = &call.parameters {
        let pretty = serde_json::to_string_pretty(parameters).expect("arguments are plain data");
        let lines: Vec<String> = pretty.lines().map(|line| format!("  {}", shown_in_line(line))).collect();
        let _ = writeln!(text, "\narguments\n{}", lines.join("\n"));
    }
    if let Some(result) = &call.result {
        text.push_str(&answered(result));
    }
    if let Some(code) = &call.error_code {
        let message = shown_in_line(call.error_message.as_deref().unwrap_or_default());
        let _ = writeln!(text, "\n{}: {message}", coloured(&format!("error[{}]", shown_in_line(code)), "1;31"));
        let error = events.last().map_or(&Value::Null, |last| &last.data["error"]);
        if let Some(advice) = error["suggestion"].as_str() {
            let _ = writeln!(text, "{}: {}", coloured("hint", "1;36"), shown_in_line(advice));
        }
        text.push_str(&reason(error));
    }
    let _ = writeln!(text, "\nwhat happened");
    for event in events {
        let after = event.at.duration_since(call.started_at).as_secs_f64() * 1000.0;
        let told = shown_in_line(&what(event));
        let _ = writeln!(text, "{:>12}  {} {told}", format!("{after:+.1} ms"), event.name);
    }
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    lines.join("\n") + "\n"
}

/// Formats the recorded part of a result. Its artifact is among the facts of the call.
fn answered(result: &Value) -> String {
    let indented = |text: &str| text.lines().map(|line| format!("  {}\n", shown_in_line(line))).collect::<String>();
    let mut text = "\nanswered\n".to_owned();
    if let Some(answer) = result["text"].as_str() {
        text += &indented(answer);
    }
    match result.get("structured") {
        Some(Value::String(cut)) => text += &indented(cut),
        Some(structured) => text += &indented(&serde_json::to_string_pretty(structured).expect("answers are JSON")),
        None => {}
    }
    for block in result["blocks"].as_array().into_iter().flatten() {
        let kind = block["mimeType"].as_str().or(block["type"].as_str()).unwrap_or_default();
        text += &format!("  [{}, {}]\n", shown_in_line(kind), size(block["bytes"].as_i64().unwrap_or_default()));
    }
    text
}

/// Formats why a call failed, as far as its error says so: the trace, and the data of an MCP server.
fn reason(error: &Value) -> String {
    let indented = |text: &str| text.lines().map(|line| format!("  {}\n", shown_in_line(line))).collect::<String>();
    let mut text = String::new();
    if let Some(trace) = error["trace"].as_str() {
        text += &format!("\ntrace\n{}", indented(trace));
    }
    if let (Some(data), Some(server)) = (error["details"].get("data"), error["details"]["data_from"].as_str()) {
        let pretty = serde_json::to_string_pretty(data).expect("data are JSON");
        text += &format!("\nthe words of {}\n{}", shown_in_line(server), indented(&pretty));
    }
    text
}

/// Formats an entry of the usage: `memory_peak_bytes` is "memory peak 3.4 MB".
fn used((name, value): (&String, &Value)) -> String {
    let (name, amount) = match (name.strip_suffix("_ms"), name.strip_suffix("_bytes")) {
        (Some(name), _) => (name, duration(value.as_f64().unwrap_or_default())),
        (_, Some(name)) => (name, size(value.as_i64().unwrap_or_default())),
        _ => (name.as_str(), value.to_string()),
    };
    format!("{} {amount}", name.replace('_', " "))
}

/// Formats the facts of an event in one line, without those that the call's own lines or the event's name tell.
fn what(event: &RecordedEvent) -> String {
    let left_out =
        ["arguments", "error", "answer", "keyed", "rerun", "status", "usage", "sandbox", "workspace", "result"];
    let left_out = |name: &str| left_out.contains(&name) || ["provider", "elapsed_ms", "metadata"].contains(&name);
    let constant = event_message(&event.name, &event.data);
    let facts = event.data.as_object().into_iter().flatten();
    let facts = facts.filter(|(name, value)| !value.is_null() && !left_out(name) && *value != constant);
    let facts = facts.map(|(name, value)| match value {
        Value::String(text) if text.lines().count() <= 1 && text.len() <= 60 => format!("{name}={}", text.trim_end()),
        Value::String(text) => format!("{name}=({} bytes)", text.len()),
        Value::Number(number) if number.is_f64() => format!("{name}={:.1}", number.as_f64().unwrap_or_default()),
        value => format!("{name}={value}"),
    });
    facts.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    fn execution(id: &str, status: &str, parameters: Value) -> Execution {
        Execution {
            execution_id: id.into(),
            tool: "Read\u{1b}".into(),
            status: status.into(),
            parameters: Some(parameters),
            error_code: (status == "failed").then(|| "E3302".into()),
            error_message: (status == "failed").then(|| "not\nthere".into()),
            started_at: "2026-11-16T08:30:00Z".parse().unwrap(),
            completed_at: (status != "running").then(|| "2026-11-16T08:30:01.5Z".parse().unwrap()),
            duration_ms: (status != "running").then_some(1500.0),
            output_bytes: (status != "running").then_some(2048),
            result_bytes: None,
            result: (status == "failed").then(|| {
                let image = json!({"type": "image", "mimeType": "image/png", "bytes": 2048});
                json!({"text": "one\u{1b}\n\ntwo", "structured": {"n": 1}, "blocks": [image], "artifact": "artifact:1"})
            }),
            attempts: 1,
            agent: "local".into(),
            tenant: None,
            session: None,
            user: None,
            workspace: None,
            provider: None,
            batch: None,
            sandbox: None,
            usage: Some(json!({"cpu_ms": 9.675, "memory_peak_bytes": 3_567_616, "processes_peak": 2})),
            metadata: Some(json!({"call_id": "c1"})),
        }
    }

    fn now() -> Zoned {
        "2026-11-16T12:00:00+02:00[+02:00]".parse().unwrap()
    }

    #[test]
    fn calls_line_up_and_fit() {
        let list = [
            execution("01a1e382-0bee-7218-9993-179054068b52", "success", json!({"path": "a b", "limit": 3})),
            execution("01a1e382-0bee-7219-9993-179054068b52", "failed", json!({"path": "x\n"})),
            execution("01a1e382-0a56-704e-a273-57197dbf5680", "running", json!({"path": "y"})),
        ];
        insta::assert_snapshot!(calls(&list, &now(), usize::MAX, false), @r#"
        TIME            TOOL        STATUS         TOOK    SIZE  ID                  ARGUMENTS
        11-16 10:30:00  Read\u{1b}  success       1.5 s  2.0 KB  01a1e382-0bee-7218  path="a b" limit:=3
        11-16 10:30:00  Read\u{1b}  failed E3302  1.5 s  2.0 KB  01a1e382-0bee-7219  path="x\n"
        11-16 10:30:00  Read\u{1b}  running                      01a1e382-0a56-704e  path=y
        "#);
        insta::assert_snapshot!(calls(&list, &now(), 30, false), @r#"
        TIME            TOOL        S…
        11-16 10:30:00  Read\u{1b}  s…
        11-16 10:30:00  Read\u{1b}  f…
        11-16 10:30:00  Read\u{1b}  r…
        "#);
        assert!(calls(&list, &now(), 70, true).contains("\x1b[31mfailed E3302\x1b[0m  "));
        let older: Zoned = "2027-11-16T12:00:00+02:00[+02:00]".parse().unwrap();
        assert!(calls(&list, &older, 70, false).contains("2026-11-16 10:30  Read"));
    }

    #[test]
    fn one_call_is_shown_in_full() {
        let call_row = execution("01a1e382-0bee-7219-9993-179054068b52", "failed", json!({"path": "x"}));
        let event = |at: &str, name: &str, data: Value| RecordedEvent {
            seq: 1,
            at: at.parse().unwrap(),
            name: name.into(),
            severity: wieldy::Severity::of(name, &data),
            data,
        };
        let events = [
            event("2026-11-16T08:30:00Z", "tool.call.pending", json!({"arguments": {"path": "x"}})),
            event("2026-11-16T08:30:00.0123Z", "tool.call.progress", json!({"message": "one\ntwo\n", "percent": 50.0})),
            event(
                "2026-11-16T08:30:01.5Z",
                "tool.call.failure",
                json!({"attempts": 1, "error": {"suggestion": "look"}}),
            ),
        ];
        insta::assert_snapshot!(call(&call_row, &events, now().time_zone(), false), @r#"
        call:       01a1e382-0bee-7219-9993-179054068b52
        status:     failed
        tool:       Read\u{1b}
        started:    2026-11-16 10:30:00.000 +02:00
        ended:      2026-11-16 10:30:01.500 +02:00
        took:       1.5 s
        returned:   2.0 KB
        attempts:   1
        agent:      local
        used:       cpu 9.7 ms, memory peak 3.4 MB, processes peak 2
        call_id:    c1

        arguments
          {
            "path": "x"
          }

        answered
          one\u{1b}

          two
          {
            "n": 1
          }
          [image/png, 2.0 KB]

        error[E3302]: not\nthere
        hint: look

        what happened
             +0.0 ms  tool.call.pending
            +12.3 ms  tool.call.progress message=(8 bytes) percent=50.0
          +1500.0 ms  tool.call.failure attempts=1
        "#);
    }

    #[test]
    fn statistics_have_bars() {
        let stat = |tool: &str, count: i64, errors: i64| Stat {
            day: None,
            tool: Some(tool.into()),
            count,
            errors,
            error_rate: errors as f64 / count as f64,
            p50_ms: 1.0,
            p95_ms: 950.0,
            p99_ms: 125_000.0,
            output_bytes: 5 << 20,
            result_bytes: 2 << 20,
            statuses: BTreeMap::new(),
        };
        insta::assert_snapshot!(stats(&[stat("Bash", 1000, 5), stat("Read", 330, 330), stat("Write", 1, 0)], usize::MAX, false), @"
        TOOL   CALLS  ERRORS     P50     P95      P99    SIZE    KEPT
        Bash    1000   0.5 %  1.0 ms  950 ms  2 m 5 s  5.0 MB  2.0 MB  ████████████████
        Read     330   100 %  1.0 ms  950 ms  2 m 5 s  5.0 MB  2.0 MB  █████▎
        Write      1     0 %  1.0 ms  950 ms  2 m 5 s  5.0 MB  2.0 MB  ▏
        ");
    }

    #[test]
    fn durations_and_sizes_are_short() {
        let durations = [0.04, 9.94, 9.96, 999.4, 999.6, 59_900.0, 59_960.0, 3_599_600.0, 90_000_000.0].map(duration);
        assert_eq!(durations.join(", "), "0.0 ms, 9.9 ms, 10 ms, 999 ms, 1.0 s, 59.9 s, 1 m 0 s, 1 h 0 m, 25 h 0 m");
        let sizes = [0, 1023, 1024, 10_188, 10_240, 1 << 20, (1 << 30) - 1, i64::MAX].map(size);
        assert_eq!(sizes.join(", "), "0 B, 1023 B, 1.0 KB, 9.9 KB, 10 KB, 1.0 MB, 1.0 GB, 8388608.0 TB");
    }
}
