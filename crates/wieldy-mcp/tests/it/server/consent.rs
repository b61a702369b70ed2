//! Calls that need consent: the client's user is asked, in the way of the client's revision.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{Caller, ToolSpec};
use wieldy_mcp::server::{Server, ServerOptions};
use wieldy_testkit::{Act, Puppet, Strings, World};

use super::{Wire, meta, shown};

/// Makes a world with a tool that must be confirmed.
fn world() -> (World, Arc<Strings>) {
    let (tool, strings) = Puppet::new(ToolSpec::new("wipe", "Wipes a disk").confirm(), [Act::Say("wiped")]);
    (World::new([tool]), strings)
}

fn question() -> Value {
    json!({
        "mode": "form",
        "message": "May the tool `wipe` run (the tool requires it)?\n  {\n    \"disk\": 1\n  }\n",
        "requestedSchema": {"type": "object", "properties": {}},
    })
}

fn wiped() -> Value {
    json!({
        "content": [{"type": "text", "text": "wiped"}],
        "isError": false,
        "_meta": {"wieldy/execution": "[id]"},
    })
}

/// Calls as a client of the newest revision that can ask its user.
async fn modern(wire: &mut Wire, id: u32, disk: u32, brings: Value) -> Value {
    let mut params = json!({"name": "wipe", "arguments": {"disk": disk}, "_meta": meta(json!({"elicitation": {}}))});
    params.as_object_mut().unwrap().extend(brings.as_object().unwrap().clone());
    wire.ask(id, "tools/call", params).await
}

fn brings(state: &str, action: &str) -> Value {
    json!({"requestState": state, "inputResponses": {"confirm": {"action": action}}})
}

fn code(answer: &Value) -> &Value {
    &answer["result"]["_meta"]["wieldy/error"]["code"]
}

#[tokio::test]
async fn a_client_of_the_newest_revision_comes_back_with_the_answer_once() {
    let (world, strings) = world();
    let mut wire = Wire::new(&world.executor);
    let told = modern(&mut wire, 1, 1, json!({})).await["result"].clone();
    let state = told["requestState"].as_str().unwrap().to_owned();
    assert_eq!(
        told,
        json!({
            "resultType": "input_required",
            "inputRequests": {"confirm": {"method": "elicitation/create", "params": question()}},
            "requestState": state,
        })
    );
    assert_eq!(strings.runs(), 0, "no person has agreed");
    let other = modern(&mut wire, 2, 2, brings(&state, "accept")).await;
    assert_eq!(other["error"]["code"], -32602, "the answer to another call: {other}");
    let broken = modern(&mut wire, 3, 1, brings(&format!("{state}x"), "accept")).await;
    assert_eq!(broken["error"]["code"], -32602, "a state that was not sealed: {broken}");
    let nothing = modern(&mut wire, 4, 1, json!({"requestState": state})).await;
    assert_eq!(nothing["result"]["resultType"], "input_required", "the question is still open");
    assert_eq!(strings.runs(), 0);
    let mut done = shown(modern(&mut wire, 5, 1, brings(&state, "accept")).await)["result"].take();
    assert_eq!(done.as_object_mut().unwrap().remove("resultType"), Some(json!("complete")));
    assert_eq!((done, strings.runs()), (wiped(), 1));
    let again = modern(&mut wire, 6, 1, brings(&state, "accept")).await;
    assert_eq!((code(&again), strings.runs()), (&json!("E3005"), 1), "once is enough: {again}");
    wire.close().await;
    insta::assert_snapshot!(world.tape(), @r#"
    tool.call.pending {"arguments":{"disk":1},"tool":"wipe"}
    tool.call.confirmation.requested {"reason":"the tool requires it","expires_in_ms":300000,"tool":"wipe"}
    tool.call.task {"tool":"wipe"}
    tool.call.confirmation.received {"approved":true,"tool":"wipe"}
    tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":false,"tool":"wipe"}
    tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":5,"tool":"wipe"}
    "#);
}

#[tokio::test]
async fn only_the_asked_caller_can_answer() {
    let (world, strings) = world();
    let server = Server::new(world.executor.clone(), ServerOptions::default());
    let caller = |tenant: &str| Caller { tenant: Some(tenant.into()), ..Caller::local() };
    let mut ada = Wire::to(&server, caller("ada"));
    let state = modern(&mut ada, 1, 1, json!({})).await["result"]["requestState"].as_str().unwrap().to_owned();
    let mut bob = Wire::to(&server, caller("bob"));
    let stolen = modern(&mut bob, 1, 1, brings(&state, "accept")).await;
    assert_eq!((&stolen["error"]["code"], strings.runs()), (&json!(-32602), 0), "{stolen}");
    let refused = modern(&mut ada, 2, 1, brings(&state, "decline")).await;
    assert_eq!((code(&refused), strings.runs()), (&json!("E3005"), 0), "{refused}");
    ada.close().await;
    bob.close().await;
    world.check();
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_question_expires() {
    let (world, strings) = world();
    let mut wire = Wire::new(&world.executor);
    let state = modern(&mut wire, 1, 1, json!({})).await["result"]["requestState"].as_str().unwrap().to_owned();
    tokio::time::sleep(Duration::from_secs(301)).await;
    let late = modern(&mut wire, 2, 1, brings(&state, "accept")).await;
    assert_eq!((code(&late), strings.runs()), (&json!("E3005"), 0), "{late}");
    wire.close().await;
    world.check();
}

// Shows: D7.1
#[tokio::test]
async fn an_older_client_is_asked_while_the_call_waits() {
    for (action, ran) in [("accept", 1), ("decline", 0), ("cancel", 0)] {
        let (world, strings) = world();
        let mut wire = Wire::new(&world.executor).initialized("2025-06-18", json!({"elicitation": {}})).await;
        let asked = wire.ask(1, "tools/call", json!({"name": "wipe", "arguments": {"disk": 1}})).await;
        assert_eq!(asked["method"], "elicitation/create", "{asked}");
        let mut params = asked["params"].clone();
        params.as_object_mut().unwrap().remove("_meta");
        assert_eq!((params, strings.runs()), (question(), 0));
        wire.send(&json!({"jsonrpc": "2.0", "id": asked["id"], "result": {"action": action}})).await;
        let answer = wire.next().await.unwrap();
        assert_eq!(strings.runs(), ran, "{action}");
        match ran {
            1 => assert_eq!(shown(answer)["result"], wiped()),
            _ => assert_eq!(code(&answer), "E3005", "{answer}"),
        }
        wire.close().await;
        world.check();
    }
}

// Shows: D7.3
#[tokio::test]
async fn a_call_that_needs_confirmation_fails_without_elicitation() {
    let (world, strings) = world();
    let mut wire = Wire::new(&world.executor).initialized("2025-06-18", json!({})).await;
    let answer = wire.call(1, "wipe", json!({"disk": 1})).await;
    assert_eq!((code(&answer), &answer["result"]["isError"]), (&json!("E3004"), &json!(true)), "{answer}");
    let mut modern = Wire::new(&world.executor);
    let params = json!({"name": "wipe", "arguments": {"disk": 1}, "_meta": meta(json!({}))});
    let answer = modern.ask(1, "tools/call", params).await;
    assert_eq!((code(&answer), strings.runs()), (&json!("E3004"), 0), "{answer}");
    wire.close().await;
    modern.close().await;
    world.check();
}

#[tokio::test]
async fn a_question_shows_all_arguments_or_is_not_asked() {
    let spec = ToolSpec { title: Some(format!("Safe\n{}", "x".repeat(100))), ..ToolSpec::new("wipe", "").confirm() };
    let (tool, strings) = Puppet::new(spec, [Act::Say("wiped")]);
    let world = World::new([tool]);
    let mut wire = Wire::new(&world.executor).initialized("2025-06-18", json!({"elicitation": {}})).await;
    let arguments = json!({"note": "x".repeat(10_000), "disk": 1});
    let asked = wire.ask(1, "tools/call", json!({"name": "wipe", "arguments": arguments})).await;
    let (title, note) = (format!("Safe\\n{}", "x".repeat(59)), "x".repeat(10_000));
    assert_eq!(
        asked["params"]["message"],
        format!(
            "May the tool `wipe` ({title}) run (the tool requires it)?\n  {{\n    \"note\": \"{note}\",\n    \"disk\": 1\n  }}\n"
        )
    );
    wire.send(&json!({"jsonrpc": "2.0", "id": asked["id"], "result": {"action": "decline"}})).await;
    assert_eq!(code(&wire.next().await.unwrap()), "E3005");
    let answer = wire.call(2, "wipe", json!({"note": "x".repeat(40_000), "disk": 1})).await;
    assert_eq!((code(&answer), strings.runs()), (&json!("E3005"), 0), "{answer}");
    wire.close().await;
    world.check();
}

#[tokio::test]
async fn a_question_shows_every_character_that_hides_or_turns_text() {
    // Control characters, zero-width characters, bidirectional marks, fillers, tags.
    const HIDDEN: &str = "\u{1b}\u{7f}\u{9b}\u{ad}\u{34f}\u{61c}\u{115f}\u{180e}\u{200b}\u{200d}\u{200e}\u{2028}\u{202e}\u{2066}\u{3164}\u{feff}\u{fff9}\u{1d173}\u{e0041}\u{e0100}";
    let spec = ToolSpec { title: Some(HIDDEN.into()), ..ToolSpec::new("wipe", "").confirm() };
    let (tool, strings) = Puppet::new(spec, [Act::Say("wiped")]);
    let world = World::new([tool]);
    let arguments = json!({"disk": 1, HIDDEN: HIDDEN, "name": "größe 寸法 مقاس ✓"});
    let mut old = Wire::new(&world.executor).initialized("2025-06-18", json!({"elicitation": {}})).await;
    let asked = old.ask(1, "tools/call", json!({"name": "wipe", "arguments": arguments})).await;
    let mut modern = Wire::new(&world.executor);
    let params = json!({"name": "wipe", "arguments": arguments, "_meta": meta(json!({"elicitation": {}}))});
    let told = modern.ask(1, "tools/call", params).await;
    for question in [&asked["params"], &told["result"]["inputRequests"]["confirm"]["params"]] {
        let message = question["message"].as_str().unwrap();
        assert!(!message.contains(|c| HIDDEN.contains(c)), "{message:?}");
        assert_eq!(message.matches("\\u{202e}").count(), 3, "{message}");
        assert!(message.contains("größe 寸法 مقاس ✓"), "what shows itself stays as it is: {message}");
    }
    old.send(&json!({"jsonrpc": "2.0", "id": asked["id"], "result": {"action": "decline"}})).await;
    assert_eq!((code(&old.next().await.unwrap()), strings.runs()), (&json!("E3005"), 0));
    old.close().await;
    modern.close().await;
}
