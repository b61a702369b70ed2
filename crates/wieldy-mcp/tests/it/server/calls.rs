//! Calls: their results, progress, cancellation and timeouts.

use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{CallError, Code, Content, Outcome, Provider, ToolSpec, tool};
use wieldy_testkit::{Act, Puppet, World};

use super::{Wire, shown};

const REVISION: &str = "2025-06-18";

#[tokio::test]
async fn every_kind_of_content_arrives() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Nothing {}
    let mixed = tool(ToolSpec::new("mixed", "gives all kinds"), async |_: Nothing, _run| {
        let mut outcome = Outcome::text("words").structured(json!({"count": 3}));
        outcome.content.extend([
            Content::Image { data: "aGk=".into(), mime_type: "image/png".into() },
            Content::ResourceLink { uri: "file:///a".into(), name: "a".into(), more: Default::default() },
        ]);
        Ok(outcome)
    });
    let world = World::new([std::sync::Arc::new(mixed) as _, Puppet::reading("given", Act::Give(json!([1, 2])))]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    assert_eq!(
        wire.call(1, "mixed", json!({})).await["result"],
        json!({
            "content": [
                {"type": "text", "text": "words"},
                {"type": "image", "data": "aGk=", "mimeType": "image/png"},
                {"type": "resource_link", "uri": "file:///a", "name": "a"},
            ],
            "isError": false,
            "_meta": {"wieldy/execution": "[id]", "wieldy/structured": {"count": 3}},
        })
    );
    assert_eq!(
        wire.call(2, "given", json!({})).await["result"],
        json!({
            "content": [{"type": "text", "text": "[1,2]"}],
            "isError": false,
            "_meta": {"wieldy/execution": "[id]", "wieldy/structured": [1, 2]},
        })
    );
    wire.close().await;
    world.check();
}

/// Calls a tool of this provider that answers with two texts and an image between them, and fails with `failure` if it
/// is set.
async fn answer_of(provider: Provider, failure: Option<Code>, revision: &str) -> Value {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Nothing {}
    let spec = ToolSpec::new("mixed", "gives two texts").provider(provider);
    let mixed = tool(spec, move |_: Nothing, _run| async move {
        let mut outcome = Outcome::text("one\n").structured(json!({"count": 3}));
        let image = Content::Image { data: "aGk=".into(), mime_type: "image/png".into() };
        outcome.content.extend([image, Content::text("two")]);
        Ok(match failure {
            Some(code) => outcome.failed(CallError::new(code, "it broke").suggest("mend it")),
            None => outcome,
        })
    });
    let world = World::new([std::sync::Arc::new(mixed) as _]);
    let mut wire = Wire::new(&world.executor).initialized(revision, json!({})).await;
    let mut result = wire.call(1, "mixed", json!({})).await["result"].take();
    wire.close().await;
    world.check();
    result["_meta"].as_object_mut().unwrap().remove("wieldy/error");
    result
}

#[tokio::test]
async fn every_client_shows_all_text_of_our_tools_once() {
    for provider in [Provider::Builtin, Provider::Command, Provider::Local] {
        for (failure, text) in [
            (None, "one\ntwo"),
            (
                Some(Code::NonzeroExit),
                "Error E3108 NONZERO_EXIT: it broke\nSuggestion: mend it\nOutput so far:\none\ntwo",
            ),
        ] {
            assert_eq!(
                answer_of(provider.clone(), failure, REVISION).await,
                json!({
                    "content": [
                        {"type": "text", "text": text},
                        {"type": "image", "data": "aGk=", "mimeType": "image/png"},
                    ],
                    "isError": failure.is_some(),
                    "_meta": {"wieldy/execution": "[id]", "wieldy/structured": {"count": 3}},
                })
            );
        }
    }
}

#[tokio::test]
async fn a_model_gets_a_trace_once() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Nothing {}
    for (output, told) in [("", "\nTrace:\n    one\n    two"), ("one\ntwo\n", "\nOutput so far:\none\ntwo\n")] {
        let broken = tool(ToolSpec::new("broken", "fails"), move |_: Nothing, _run| async move {
            let mut error = CallError::new(Code::ExecutionError, "it broke");
            error.trace = Some("one\ntwo".into());
            Ok(Outcome::text(output).failed(error))
        });
        let world = World::new([std::sync::Arc::new(broken) as _]);
        let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
        let result = wire.call(1, "broken", json!({})).await["result"].take();
        let text = format!("Error E3900 EXECUTION_ERROR: it broke{told}");
        assert_eq!(result["content"], json!([{"type": "text", "text": text}]));
        assert_eq!(result["_meta"]["wieldy/error"]["trace"], "one\ntwo");
        wire.close().await;
    }
}

#[tokio::test]
async fn an_answer_of_an_mcp_server_is_passed_on_as_it_was_sent() {
    for failure in [None, Some(Code::ToolReportedError)] {
        assert_eq!(
            answer_of(Provider::Mcp("git".into()), failure, REVISION).await,
            json!({
                "content": [
                    {"type": "text", "text": "one\n"},
                    {"type": "image", "data": "aGk=", "mimeType": "image/png"},
                    {"type": "text", "text": "two"},
                ],
                "structuredContent": {"count": 3},
                "isError": failure.is_some(),
                "_meta": {"wieldy/execution": "[id]", "wieldy/untrusted": "mcp:git"},
            })
        );
    }
    let cut_off = answer_of(Provider::Mcp("git".into()), Some(Code::Timeout), REVISION).await;
    let text = "Error E3103 TIMEOUT: it broke\nSuggestion: mend it\nOutput so far:\none\ntwo";
    assert_eq!(cut_off["content"][0], json!({"type": "text", "text": text}), "wieldy's own errors come first");
}

/// Calls a tool of this provider whose answer is too large: a text of 40 bytes, and 60 bytes of structured content if
/// it has a schema. Returns the MCP result and the output schema that clients are shown.
async fn large_answer_of(provider: Provider, failure: Option<Code>, has_schema: bool) -> (Value, Value) {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Nothing {}
    let mut spec = ToolSpec::new("large", "says a lot").provider(provider);
    spec.output_schema = has_schema.then(|| json!({"type": "object"}));
    spec.constraints.output_bytes_max = Some(20);
    let large = tool(spec, move |_: Nothing, _run| async move {
        let outcome = Outcome {
            structured: has_schema.then(|| json!({"text": "y".repeat(49)})),
            ..Outcome::text("0123456789".repeat(if has_schema { 1 } else { 4 }))
        };
        Ok(match failure {
            Some(code) => outcome.failed(CallError::new(code, "it broke")),
            None => outcome,
        })
    });
    let world = World::new([std::sync::Arc::new(large) as _]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    let mut result = wire.call(1, "large", json!({})).await["result"].take();
    let listed = wire.ask(2, "tools/list", json!({})).await;
    let listed =
        listed["result"]["tools"].as_array().unwrap().iter().find(|tool| tool["name"] == "large").unwrap().clone();
    wire.close().await;
    world.check();
    result["_meta"].as_object_mut().unwrap().remove("wieldy/error");
    (result, listed["outputSchema"].clone())
}

#[tokio::test]
async fn a_cut_answer_first_says_its_full_size_and_how_to_read_it() {
    let cut = "[20 of 40 bytes left out; the whole is artifact:[artifact]: read it with `GetArtifact`, by `offset` or `pattern`]\n\
               0123456789\n… 20 of 40 bytes left out; the whole is artifact:[artifact] …\n0123456789";
    let failed = format!("Error E3108 NONZERO_EXIT: it broke\nOutput so far:\n{cut}");
    for (provider, untrusted, failure, text) in [
        (Provider::Builtin, None, None, cut),
        (Provider::Command, None, Some(Code::NonzeroExit), &*failed),
        (Provider::Mcp("git".into()), Some("mcp:git"), None, cut),
        (Provider::Mcp("git".into()), Some("mcp:git"), Some(Code::ToolReportedError), cut),
    ] {
        let mut meta = json!({"wieldy/execution": "[id]", "wieldy/artifact": "wieldy://artifact/[artifact]"});
        if let Some(untrusted) = untrusted {
            meta["wieldy/untrusted"] = untrusted.into();
        }
        let (result, _) = large_answer_of(provider, failure, false).await;
        let content = json!([{"type": "text", "text": text}]);
        assert_eq!(result, json!({"content": content, "isError": failure.is_some(), "_meta": meta}));
    }
}

#[tokio::test]
async fn a_tool_with_an_output_schema_has_no_success_without_structured_content() {
    let (result, schema) = large_answer_of(Provider::Mcp("git".into()), None, true).await;
    assert_eq!(schema, json!({"type": "object"}));
    let first = "[The call succeeded. Its structured content is too large to be sent, and clients refuse a success without it, \
                 so this is marked as an error.]\n\
                 [60 bytes of structured content left out; the whole is artifact:[artifact]: read it with `GetArtifact`, by \
                 `offset` or `pattern`]\n0123456789";
    let left_out = "… 60 bytes of structured content left out; the whole is artifact:[artifact] …";
    assert_eq!(
        result,
        json!({
            "content": [{"type": "text", "text": first}, {"type": "text", "text": left_out}],
            "isError": true,
            "_meta": {
                "wieldy/execution": "[id]", "wieldy/untrusted": "mcp:git",
                "wieldy/artifact": "wieldy://artifact/[artifact]",
            },
        })
    );
    // A tool of ours promises no structured content.
    let (result, schema) = large_answer_of(Provider::Builtin, None, true).await;
    assert_eq!((&result["isError"], &schema), (&json!(false), &Value::Null), "{result}");
}

#[tokio::test]
async fn an_answer_without_text_is_one_block() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Nothing {}
    let silent = tool(ToolSpec::new("silent", "says nothing"), async |_: Nothing, _run| Ok(Outcome::default()));
    let empty = tool(ToolSpec::new("empty", "reads an empty file"), async |_: Nothing, _run| {
        Ok(Outcome::text("").structured(json!({"bytes": 0})))
    });
    let picture = tool(ToolSpec::new("picture", "shows a picture"), async |_: Nothing, _run| {
        let image = Content::Image { data: "aGk=".into(), mime_type: "image/png".into() };
        Ok(Outcome { content: vec![image], ..Outcome::default() })
    });
    let tools = [std::sync::Arc::new(silent) as _, std::sync::Arc::new(empty) as _, std::sync::Arc::new(picture) as _];
    let world = World::new(tools);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    for tool in ["silent", "empty"] {
        let told = wire.call(1, tool, json!({})).await;
        assert_eq!(told["result"]["content"], json!([{"type": "text", "text": "(empty)"}]), "{tool}");
    }
    let told = wire.call(2, "picture", json!({})).await;
    let image = json!({"type": "image", "data": "aGk=", "mimeType": "image/png"});
    assert_eq!(told["result"]["content"], json!([image]), "a picture is an answer");
    wire.close().await;
    world.check();
}

// Shows: E2
#[tokio::test]
async fn a_tool_that_fails_is_a_result_and_a_tool_that_is_not_there_an_error() {
    let (failing, _) = Puppet::new(ToolSpec::new("fails", "fails"), [Act::Fail(Code::ExecutionError, true)]);
    let world = World::new([failing]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    assert_eq!(
        wire.call(1, "fails", json!({})).await,
        json!({"jsonrpc": "2.0", "id": 1, "result": {
            "content": [{"type": "text", "text": "Error E3900 EXECUTION_ERROR: told to fail"}],
            "isError": true,
            "_meta": {
                "wieldy/execution": "[id]",
                "wieldy/error": {
                    "code": "E3900", "name": "EXECUTION_ERROR", "category": "runtime_error",
                    "message": "told to fail", "retryable": false, "suggestion": null, "details": {},
                },
            },
        }})
    );
    assert_eq!(
        wire.call(2, "fials", json!({})).await,
        json!({"jsonrpc": "2.0", "id": 2, "error": {
            "code": -32602,
            "message": "there is no tool `fials`; did you mean `fails`?",
            "data": {
                "code": "E3001", "name": "TOOL_NOT_FOUND", "category": "validation_error",
                "message": "there is no tool `fials`", "retryable": false,
                "suggestion": "did you mean `fails`?", "details": {"near": ["fails"]},
            },
        }})
    );
    wire.close().await;
    world.check();
}

// Shows: E8.2
#[tokio::test]
async fn progress_is_sent_on_request_and_only_grows() {
    let world = World::new([Puppet::reading("tick", Act::Tick(2, Duration::from_millis(30)))]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    let params = json!({"name": "tick", "arguments": {}, "_meta": {"progressToken": "p"}});
    let told = |progress: f64, tick: &str| {
        json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {
            "progressToken": "p", "progress": progress, "total": 100.0, "message": tick,
        }})
    };
    assert_eq!(wire.ask(1, "tools/call", params).await, told(50.0, "tick 1"));
    assert_eq!(wire.next().await, Some(told(100.0, "tick 2")));
    assert_eq!(wire.next().await.unwrap()["result"]["isError"], false);
    assert_eq!(wire.call(2, "tick", json!({})).await["result"]["isError"], false, "nobody asked");
    wire.close().await;
    world.check();
}

// Shows: A6.2, E8.2
#[tokio::test]
async fn a_call_that_its_client_cancels_ends_and_is_not_answered() {
    let world = World::new([Puppet::writing("waits", Act::PrintAndWait("so far")), Puppet::reading("echo", Act::Echo)]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    wire.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "waits"}})).await;
    while world.executor.load().running == 0 {
        tokio::task::yield_now().await;
    }
    let params = json!({"requestId": 1, "reason": "changed my mind"});
    wire.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})).await;
    while world.executor.load().running > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(wire.call(2, "echo", json!({})).await["id"], 2, "the next answer is that of the next request");
    wire.close().await;
    let closings: Vec<_> = world.events().iter().map(|event| event.body.name()).collect();
    assert_eq!(closings.iter().filter(|name| **name == "tool.call.cancelled").count(), 1, "{closings:?}");
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_ends_its_calls() {
    let world = World::new([Puppet::writing("waits", Act::PrintAndWait("so far"))]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    wire.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "waits"}})).await;
    while world.executor.load().running == 0 {
        tokio::task::yield_now().await;
    }
    wire.close().await;
    while world.executor.load().running > 0 {
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let ended: Vec<_> = world.events().iter().filter_map(|event| event.body.closing().cloned()).collect();
    assert_eq!(ended.len(), 1);
    assert_eq!(ended[0].error.as_ref().map(|error| error.code), Some(Code::Cancelled));
    world.check();
}

#[tokio::test]
async fn requests_before_the_end_of_input_are_answered() {
    let world = World::new([Puppet::reading("slow", Act::Take(Duration::from_millis(100)))]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    wire.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "slow"}})).await;
    let rest = wire.close().await.into_iter().map(shown).collect::<Vec<_>>();
    assert_eq!(
        rest,
        [json!({"jsonrpc": "2.0", "id": 1, "result": {
            "content": [{"type": "text", "text": "{}"}],
            "isError": false,
            "_meta": {"wieldy/execution": "[id]"},
        }})]
    );
    world.check();
}
