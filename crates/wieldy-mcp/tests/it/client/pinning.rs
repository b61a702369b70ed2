//! A server that changes its tools after they were agreed to.

use serde_json::json;
use wieldy_core::{Caller, Status};

use super::{Stage, until, warns};

const DIFF: &str = "--- agreed\n+++ now\n@@ -5,3 +5,3 @@\n   },\n-  \"description\": \"Says it again\",\n+  \"description\": \"Says it again, and sends it to me\",\n   \"inputSchema\": {\n";

fn description(stage: &Stage) -> String {
    stage.world.executor.registry().find("echo", &Caller::local()).unwrap().spec().description.clone()
}

// Shows: B1.3, X6.1
#[tokio::test]
async fn a_changed_tool_is_refused_until_a_person_agrees() {
    let stage = Stage::of("changes").await;
    stage.call("act", "change echo").await;
    until(|| !stage.upstreams.status()[0].changed.is_empty()).await;
    let error = stage.error("echo").await;
    assert_eq!(
        serde_json::to_value(&error).unwrap(),
        json!({
            "code": "E3003", "name": "PERMISSION_DENIED", "category": "permission_error", "retryable": false,
            "message": "the MCP server `test` changed its tool `echo` since it was agreed to",
            "suggestion": "have the operator look at the change and agree to it: `wieldy mcp pin test`",
            "details": {"server": "test", "diff": DIFF},
        })
    );
    assert_eq!(description(&stage), "Says it again", "models see the pinned definition");
    assert_eq!(stage.call("act", "x").await.status, Status::Success, "other tools work");
    let seen = stage.upstreams.status().remove(0);
    let agreed = stage.upstreams.agree(&seen).unwrap().unwrap();
    assert_eq!(agreed.changed.len(), 0);
    assert_eq!(description(&stage), "Says it again, and sends it to me");
    assert_eq!(stage.call("echo", "x").await.status, Status::Success);
    let nobody = wieldy_mcp::client::ServerStatus { name: "nobody".into(), ..seen };
    assert_eq!(stage.upstreams.agree(&nobody), None);
}

#[tokio::test]
async fn changes_after_the_review_are_not_pinned() {
    let stage = Stage::of("changes").await;
    let seen = stage.upstreams.status().remove(0);
    stage.call("act", "change echo").await;
    until(|| !stage.upstreams.status()[0].changed.is_empty()).await;
    let error = stage.upstreams.agree(&seen).unwrap().unwrap_err();
    assert_eq!(
        (error.code.as_str(), error.message.as_str()),
        ("E3003", "the MCP server `test` changed its tools again while they were shown")
    );
    assert_eq!(stage.error("echo").await.code.as_str(), "E3003");
}

#[tokio::test]
async fn a_change_is_noticed_even_if_pins_cannot_be_stored() {
    let stage = Stage::of("changes").await;
    std::fs::write(stage.folder().path().join("pins.json"), "{").unwrap();
    stage.call("act", "change echo").await;
    until(|| !stage.upstreams.status()[0].changed.is_empty()).await;
    assert_eq!(stage.error("echo").await.code.as_str(), "E3003");
}

#[tokio::test]
async fn a_tool_cannot_take_the_name_that_another_was_given() {
    let rename = |settings: &mut wieldy_mcp::client::ServerSettings| {
        let rule = wieldy_mcp::client::ToolRule { rename: Some("act".into()), ..Default::default() };
        settings.tools.rules.insert("echo".into(), rule);
    };
    let stage = Stage::with("", rename).await;
    assert_eq!(stage.tools(), ["test__act"]);
    let unusable = &stage.upstreams.status()[0].unusable;
    assert_eq!(*unusable, [("act".to_owned(), "its tool `echo` has the name `test__act` already".to_owned())].into());
    stage.call("test__act", "x").await;
    assert_eq!(stage.notes().last().unwrap(), "called echo");
}

// Shows: X6.1
#[tokio::test]
async fn a_change_while_wieldy_was_away_is_noticed_too() {
    let folder = Stage::of("").await.folder();
    std::fs::write(folder.path().join("notes"), "change echo\n").unwrap();
    let stage = Stage::in_folder(folder.clone(), "", |_| {});
    assert_eq!(stage.error("echo").await.code.as_str(), "E3003", "even for the call that starts the server");
    assert_eq!(stage.call("act", "x").await.status, Status::Success);
    assert_eq!(stage.notes(), ["change echo", "started", "called act"]);
    let warned = Stage::in_folder(folder, "", warns);
    warned.call("act", "x").await;
    assert_eq!(warned.call("echo", "x").await.status, Status::Success);
    assert_eq!(warned.upstreams.status()[0].changed, [("echo".to_owned(), DIFF.to_owned())].into());
}

#[tokio::test]
async fn a_tool_that_returns_with_another_definition_is_noticed() {
    let folder = Stage::of("").await.folder();
    std::fs::write(folder.path().join("notes"), "remove act\n").unwrap();
    let without = Stage::in_folder(folder.clone(), "", |_| {});
    without.call("echo", "x").await;
    assert_eq!(without.tools(), ["test__echo"]);
    std::fs::write(folder.path().join("notes"), "").unwrap();
    let again = Stage::in_folder(folder, "", |_| {});
    assert_eq!(again.tools(), ["test__echo"], "it was not in the server's last list");
    again.call("echo", "x").await;
    assert_eq!(again.tools(), ["test__act", "test__echo"]);
    assert_eq!(again.call("act", "x").await.status, Status::Success);
}

/// Returns the definition change events: the tool, the old hash and the new hash.
fn changes(stage: &Stage) -> Vec<(String, String, String)> {
    let events = stage.world.events();
    let changes = events.iter().filter(|event| event.body.name() == "tool.definition.changed");
    let told = changes.map(|event| event.cloud_event()["data"].clone());
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    told.map(|data| (text(&data["tool"]), text(&data["previous_hash"]), text(&data["current_hash"]))).collect()
}

/// P-MCP-04: a change of any part of a definition is refused, shown and recorded, once for each change.
#[tokio::test]
async fn every_change_is_refused_and_an_event_of_its_own() {
    let stage = Stage::of("changes").await;
    let mut last = String::new();
    for (number, change) in ["change echo", "widen echo", "harden echo"].into_iter().enumerate() {
        stage.call("act", change).await;
        until(|| changes(&stage).len() == number + 1).await;
        assert_eq!(stage.error("echo").await.code.as_str(), "E3003", "{change}");
        let (tool, previous, current) = changes(&stage).pop().unwrap();
        assert_eq!(tool, "test__echo");
        assert!(last.is_empty() || last == previous, "each follows the one before");
        last = current;
    }
    let diff = stage.upstreams.status()[0].changed["echo"].clone();
    for part in ["sends it to me", "+      \"to\": {", "+    \"destructiveHint\": true", "-    \"readOnlyHint\": true"]
    {
        assert!(diff.contains(part), "{part} is not in\n{diff}");
    }
    stage.call("act", "nothing more").await;
    stage.call("act", "add late").await;
    until(|| stage.tools().contains(&"test__late".to_owned())).await;
    assert_eq!(changes(&stage).len(), 3, "the tools were listed again without a change");
}

/// Changes that are accepted with a warning emit one event each, even if they make no difference here.
#[tokio::test]
async fn a_change_that_is_taken_is_one_event_too() {
    let stage = Stage::with("changes", warns).await;
    for (number, change) in ["change echo", "harden echo"].into_iter().enumerate() {
        stage.call("act", change).await;
        until(|| changes(&stage).len() == number + 1).await;
    }
    stage.call("act", "add late").await;
    until(|| stage.tools().contains(&"test__late".to_owned())).await;
    assert_eq!(changes(&stage).len(), 2);
}
