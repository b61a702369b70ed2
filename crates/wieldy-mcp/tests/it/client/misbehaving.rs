//! Servers that crash, lie, flood or hang: the call ends with an error that says so, the next one works, and nothing
//! piles up.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use wieldy_core::{Call, Caller, Options, Status};
use wieldy_mcp::client::{ServerSettings, ToolRule};

use super::{Stage, until};

/// Returns the code, the retryable flag and the message of a call to `echo`.
async fn told(behaviour: &str) -> (String, bool, String) {
    let stage = Stage::of(behaviour).await;
    let error = stage.error("echo").await;
    stage.world.check();
    (error.code.to_string(), error.retryable, error.message)
}

#[tokio::test]
async fn a_crash_is_reported_with_its_reason_and_the_call_is_not_repeated() {
    for behaviour in ["crash before", "crash mid"] {
        // Under these settings an idempotent call would be made three times.
        let stage = Stage::that_retries(behaviour, |_| {}).await;
        let error = stage.error("echo").await;
        assert_eq!(
            (error.code.as_str(), error.retryable, error.message.as_str()),
            ("E3201", false, "the MCP server `test` cannot be reached: it ended with code 9")
        );
        assert_eq!(stage.notes().iter().filter(|note| *note == "called echo").count(), 1, "{behaviour}");
        stage.world.check();
    }
}

// Shows: E7.3
#[tokio::test]
async fn after_a_crash_the_next_call_finds_a_new_server() {
    let stage = Stage::of("crash after").await;
    assert_eq!(stage.call("echo", "one").await.text(), "one");
    until(|| stage.state()["is"] == "degraded").await;
    assert_eq!(stage.tools(), ["test__act", "test__echo"], "its tools stay listed");
    let error = stage.error("echo").await;
    assert_eq!((error.code.as_str(), error.retryable), ("E3201", true));
    tokio::time::sleep(error.retry_after().unwrap()).await;
    assert_eq!(stage.call("echo", "two").await.text(), "two");
    assert_eq!(stage.notes(), ["started", "called echo", "started", "called echo"]);
}

// Shows: E7.3
#[tokio::test]
async fn a_server_that_cannot_start_is_retried_after_growing_pauses() {
    let stage = Stage::of("crash at start").await;
    let state = stage.state();
    assert_eq!(
        (&state["is"], &state["failures"], &state["error"]["code"]),
        (&json!("degraded"), &json!(1), &json!("E3201"))
    );
    assert_eq!(
        state["error"]["message"],
        "the MCP server `test` cannot be reached: it ended with code 3; its last output: no configuration, token [redacted]"
    );
    until(|| stage.state()["failures"] == 3).await;
    let patience = stage.state()["error"]["details"]["retry_after_ms"].as_u64().unwrap();
    assert!((1..=2_000).contains(&patience), "{patience}");
    let starts = stage.notes().len();
    stage.upstreams.discover(|_| true).await;
    assert_eq!(stage.notes().len(), starts, "it is not started before the pause is over");
}

#[tokio::test]
async fn a_server_whose_tools_are_not_known_is_tried_again_by_itself() {
    let stage = Stage::of("crash at start").await;
    let error = stage.error("test__echo").await;
    assert_eq!(
        (error.code.as_str(), error.message.as_str(), error.suggestion.as_deref()),
        (
            "E3001",
            "there is no tool `test__echo`: the MCP server `test` cannot be reached: it ended with code 3; its last output: \
            no configuration, token [redacted]",
            Some("`wieldy mcp test test` shows details")
        )
    );
    assert_eq!(stage.error("other__echo").await.message, "there is no tool `other__echo`");
    let notes = stage.folder().path().join("notes");
    std::fs::write(&notes, std::fs::read_to_string(&notes).unwrap() + "mended\n").unwrap();
    until(|| stage.state()["is"] == "ready").await;
    assert_eq!(stage.call("test__echo", "back").await.text(), "back");
    assert_eq!(stage.error("test__none").await.message, "there is no tool `test__none`");
}

#[tokio::test]
async fn a_server_that_did_not_come_up_the_last_time_is_not_waited_for() {
    let hour = Duration::from_secs(60 * 60);
    let stage = Stage::in_folder(Arc::new(tempfile::tempdir().unwrap()), "asleep", |_| {});
    stage.upstreams.introduce(Duration::from_millis(100)).await;
    let is_still = "there is no tool `test__echo`: the MCP server `test` is still starting";
    assert_eq!(stage.error("test__echo").await.message, is_still);
    let folder = stage.folder();
    stage.upstreams.close().await;

    let stage = Stage::in_folder(Arc::clone(&folder), "asleep", |_| {});
    let waited = tokio::time::timeout(Duration::from_secs(60), stage.upstreams.introduce(hour)).await;
    assert_eq!((waited, stage.state()), (Ok(()), json!({"is": "starting"})));
    stage.upstreams.close().await;

    // After its first start it is known, and is started only on demand.
    let stage = Stage::in_folder(Arc::clone(&folder), "", |_| {});
    stage.upstreams.introduce(hour).await;
    until(|| stage.state()["is"] == "ready").await;
    stage.upstreams.close().await;
    let stage = Stage::in_folder(folder, "asleep", |_| {});
    stage.upstreams.introduce(hour).await;
    assert_eq!((stage.state(), stage.tools().len()), (json!({"is": "not_started"}), 2));
}

#[tokio::test]
async fn servers_that_were_never_seen_are_waited_for() {
    let stage = Stage::in_folder(Arc::new(tempfile::tempdir().unwrap()), "", |_| {});
    stage.upstreams.introduce(Duration::from_secs(60 * 60)).await;
    assert_eq!((stage.state(), stage.tools().len()), (json!({"is": "ready"}), 2));
}

#[tokio::test]
async fn a_server_that_never_lists_its_tools_is_given_up() {
    let stage = Stage::with("silent at start", |settings| settings.start_timeout = Duration::from_millis(500)).await;
    assert_eq!(
        stage.state()["error"]["message"],
        "the MCP server `test` cannot be reached: it did not list its tools within 500ms"
    );
}

#[tokio::test]
async fn an_endless_list_of_tools_is_refused() {
    for behaviour in ["endless tools", "endless pages"] {
        let stage = Stage::of(behaviour).await;
        assert_eq!(
            stage.state()["error"]["message"],
            "the MCP server `test` answered: a list of more than 4096 tools or 1024 pages",
            "{behaviour}"
        );
        assert_eq!(stage.tools(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn definitions_that_are_too_large_together_are_refused() {
    let stage = Stage::of("large tools").await;
    assert_eq!(
        stage.state()["error"]["message"],
        "the MCP server `test` answered: tool definitions of more than 4 MiB in all"
    );
    assert_eq!(stage.tools(), Vec::<String>::new());
}

#[tokio::test]
async fn invalid_lines_of_a_server_are_skipped() {
    for behaviour in ["garbage", "wrong ids", "slow drip", "ids as text"] {
        let stage = Stage::of(behaviour).await;
        let result = stage.call("echo", "hello").await;
        assert_eq!(
            (result.status, result.text().as_str()),
            (Status::Success, "hello"),
            "{behaviour}: {:?}",
            result.error
        );
        assert_eq!(stage.call("echo", "again").await.text(), "again", "{behaviour}");
    }
}

#[tokio::test]
async fn an_invalid_response_ends_the_call_at_once() {
    assert_eq!(
        told("malformed").await,
        ("E3202".into(), false, "the MCP server `test` answered: a response that is not valid MCP".into())
    );
    assert_eq!(
        told("not a result").await,
        ("E3202".into(), false, "the MCP server `test` answered: a result that is not a tool result".into())
    );
}

// Shows: E7.3
#[tokio::test]
async fn errors_of_the_protocol_and_of_the_tool_are_told_apart() {
    assert_eq!(told("refuses").await, ("E3202".into(), false, "the MCP server `test` answered: no such thing".into()));
    assert_eq!(told("breaks").await, ("E3202".into(), false, "the MCP server `test` answered: out of luck".into()));
    let (_, _, message) = told("rants").await;
    assert_eq!(message, format!("the MCP server `test` answered: {}", "x".repeat(500)));
    assert_eq!(told("reports").await, ("E3203".into(), false, "the disk is full".into()));
}

#[tokio::test]
async fn the_data_of_a_servers_error_are_kept_without_secrets() {
    let stage = Stage::of("explains").await;
    let error = *stage.call("echo", "ghp_16C7e42F292c6912E7710c838347Ae178B4a").await.error.unwrap();
    assert_eq!(error.trace.as_deref(), Some("Traceback:\n  push([redacted])"));
    assert_eq!(
        json!(error.details),
        json!({
            "mcp_code": -32603,
            "data": {"traceback": "Traceback:\n  push([redacted])", "hint": "pull first"},
            "data_from": "mcp:test",
            "server": "test",
        })
    );
    assert_eq!(
        wieldy_core::present_error(&error, ""),
        "Error E3202 UPSTREAM_PROTOCOL_ERROR: the MCP server `test` answered: out of luck\nSuggestion: check the \
         arguments against the tool's schema; if they fit, the server is at fault\nThe words of mcp:test (not to be \
         trusted): {\"hint\":\"pull first\"}\nTrace:\n    Traceback:\n      push([redacted])"
    );
}

#[tokio::test]
async fn a_line_of_a_gigabyte_costs_little_and_ends_the_server() {
    let stage = Stage::of("huge line").await;
    let before = resident_bytes();
    let error = stage.error("echo").await;
    assert_eq!(
        (error.code.as_str(), error.message.as_str()),
        ("E3201", "the MCP server `test` cannot be reached: it sent a message of more than 16 MiB")
    );
    let peak = resident_bytes().saturating_sub(before);
    assert!(peak < 32 * 1024 * 1024, "{peak} more bytes are resident");
}

/// Returns the peak memory of this process.
pub(crate) fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[tokio::test]
async fn endless_progress_does_not_outlast_the_deadline() {
    let stage = Stage::with("endless progress", |settings| settings.timeout = Some(Duration::from_millis(500))).await;
    let error = stage.error("echo").await;
    assert_eq!((error.code.as_str(), error.details["clock"].as_str()), ("E3103", Some("attempt")));
}

#[tokio::test]
async fn one_bad_tool_does_not_hide_the_others() {
    let stage = Stage::of("bad tools").await;
    assert_eq!(stage.tools(), ["test__act", "test__echo", "test__odd_name_x_6d46d829"]);
    let status = &stage.upstreams.status()[0];
    assert_eq!(status.unusable.keys().collect::<Vec<_>>(), ["broken", "far"]);
    assert_eq!(stage.call("test__odd_name_x_6d46d829", "x").await.status, Status::Success);
    assert_eq!(stage.notes().last().unwrap(), "called odd.name/x");
}

#[tokio::test]
async fn a_flood_on_stderr_costs_little() {
    // On a busy machine the flood takes a while.
    let patient = |settings: &mut ServerSettings| settings.timeout = Some(Duration::from_secs(150));
    let stage = Stage::with("complains", patient).await;
    let before = resident_bytes();
    assert_eq!(stage.call("echo", "done").await.text(), "done");
    let more = resident_bytes().saturating_sub(before);
    assert!(more < 32 * 1024 * 1024, "{more} more bytes are resident");
}

#[tokio::test]
async fn the_silence_clock_ends_a_call_without_progress() {
    let silent_for =
        |time: u64| move |settings: &mut ServerSettings| settings.silence = Some(Duration::from_millis(time));
    assert_eq!(Stage::with("slow progress", silent_for(600)).await.call("echo", "done").await.text(), "done");
    let ruled = |settings: &mut ServerSettings| {
        settings.silence = Some(Duration::from_secs(60));
        let rule = ToolRule { silence: Some(Duration::from_millis(600)), ..ToolRule::default() };
        settings.tools.rules.insert("echo".into(), rule);
    };
    for stage in [Stage::with("slow", silent_for(600)).await, Stage::with("slow", ruled).await] {
        let error = stage.error("echo").await;
        assert_eq!((error.code.as_str(), error.details["clock"].as_str()), ("E3103", Some("silence")));
        stage.world.check();
    }
}

/// A known server that never lists its tools again: a waiting call has sent nothing, and may be retried.
#[tokio::test]
async fn a_call_that_waits_for_its_server_has_sent_nothing() {
    let folder = Stage::of("").await.folder();
    std::fs::write(folder.path().join("notes"), "").unwrap();
    let stage =
        Stage::in_folder(folder, "silent at start", |settings| settings.timeout = Some(Duration::from_millis(500)));
    let error = stage.error("echo").await;
    assert_eq!((error.code.as_str(), error.details["clock"].as_str()), ("E3103", Some("attempt")));
    assert!(error.retryable);
    assert_eq!(stage.notes(), ["started"]);
    let one_at_once = Stage::with("silent", |settings| {
        settings.calls_max = 1;
        settings.timeout = Some(Duration::from_millis(500));
    });
    let stage = one_at_once.await;
    let first = stage.world.executor.spawn(super::call("echo", "first"));
    stage.until_noted("called echo").await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let options = Options { timeout: Some(Duration::from_millis(100)), ..Options::default() };
    let second = stage.world.executor.call(Call { options, ..super::call("echo", "second") }).await;
    assert!(second.error.as_ref().unwrap().retryable);
    let first = stage.world.executor.wait(first, &Caller::local()).await.unwrap();
    assert!(!first.error.as_ref().unwrap().retryable);
    assert_eq!(stage.notes().iter().filter(|note| *note == "called echo").count(), 1);
}
