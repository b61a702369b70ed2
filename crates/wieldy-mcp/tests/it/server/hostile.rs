//! P-MCP-01 over stdio: every input gets a response or ends the connection, and the server stays intact.

use serde_json::{Value, json};
use wieldy_mcp::server::ServerOptions;
use wieldy_testkit::{Act, Puppet, World};

use super::Wire;

fn world() -> World {
    World::new([Puppet::reading("echo", Act::Echo), Puppet::reading("hangs", Act::Hang)])
}

/// Returns the response to a line, on a connection that works before and after it.
async fn answer(world: &World, line: &[u8]) -> Value {
    let mut wire = Wire::new(&world.executor).initialized("2025-06-18", json!({})).await;
    wire.write(line).await;
    wire.write(b"\n").await;
    let told = wire.next().await.unwrap();
    assert_eq!(wire.call("after", "echo", json!({})).await["result"]["isError"], false);
    wire.close().await;
    world.check();
    told
}

fn error(id: Option<Value>, code: i32, message: &str) -> Value {
    let error = json!({"code": code, "message": message});
    match id {
        Some(id) => json!({"jsonrpc": "2.0", "id": id, "error": error}),
        None => json!({"jsonrpc": "2.0", "error": error}),
    }
}

#[tokio::test]
async fn invalid_messages_are_refused_with_a_reason() {
    let world = world();
    let bad_id = error(None, -32600, "an id must be a text or a whole number");
    let deep = format!("{}1{}", "[".repeat(10_000), "]".repeat(10_000));
    let deep_arguments = format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"echo","arguments":{{"a":{deep}}}}}}}"#
    );
    for (line, told) in [
        (&b"[]"[..], error(None, -32600, "a line must be one message; only revision 2025-03-26 allows batches")),
        (
            br#"[{"jsonrpc":"2.0","id":1,"method":"ping"}]"#,
            error(None, -32600, "a line must be one message; only revision 2025-03-26 allows batches"),
        ),
        (b"17", error(None, -32600, "a message must be an object")),
        (br#"{"id":1,"method":"ping"}"#, error(None, -32600, "a message must have `jsonrpc` with the value \"2.0\"")),
        (br#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#, bad_id.clone()),
        (br#"{"jsonrpc":"2.0","id":1.5,"method":"ping"}"#, bad_id.clone()),
        (br#"{"jsonrpc":"2.0","id":99999999999999999999,"method":"ping"}"#, bad_id.clone()),
        (br#"{"jsonrpc":"2.0","id":{},"method":"ping"}"#, bad_id.clone()),
        (format!(r#"{{"jsonrpc":"2.0","id":"{}","method":"ping"}}"#, "x".repeat(2000)).as_bytes(), bad_id.clone()),
        (
            br#"{"jsonrpc":"2.0","id":1}"#,
            error(Some(json!(1)), -32600, "a message must have a `method`, or a `result` or an `error` with an `id`"),
        ),
        (
            br#"{"jsonrpc":"2.0"}"#,
            error(None, -32600, "a message must have a `method`, or a `result` or an `error` with an `id`"),
        ),
        (br#"{"jsonrpc":"2.0","id":1,"method":7}"#, error(Some(json!(1)), -32600, "a `method` must be a text")),
        (
            br#"{"jsonrpc":"2.0","id":1,"method":"tools/call"}"#,
            error(Some(json!(1)), -32602, "`params` must be an object with the tool's `name`"),
        ),
        (
            br#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":7}}"#,
            error(Some(json!(1)), -32602, "`name` must be the tool's name"),
        ),
        (
            br#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":[]}}"#,
            error(Some(json!(1)), -32602, "`arguments` must be an object"),
        ),
        (br#"{"jsonrpc":"2.0","id":1,"method":"no/such"}"#, error(Some(json!(1)), -32601, "no/such")),
        (
            b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"pi\xff\xfeng\"}",
            error(None, -32700, "this is not JSON: invalid unicode code point at line 1 column 37"),
        ),
        (
            deep_arguments.as_bytes(),
            error(None, -32700, "this is not JSON: recursion limit exceeded at line 1 column 197"),
        ),
    ] {
        let mut answered = answer(&world, line).await;
        if let Some(message) = answered["error"].get_mut("message").filter(|_| told["error"]["code"] == -32700) {
            // The position of a syntax error depends on the parser.
            let told: String = message.as_str().unwrap().split(" at ").next().unwrap().into();
            *message = told.into();
        }
        let mut told = told;
        if told["error"]["code"] == -32700 {
            let cut: String = told["error"]["message"].as_str().unwrap().split(" at ").next().unwrap().into();
            told["error"]["message"] = cut.into();
        }
        assert_eq!(answered, told, "{}", String::from_utf8_lossy(&line[..line.len().min(200)]));
    }
}

#[tokio::test]
async fn a_byte_order_mark_empty_lines_and_unknown_notifications_do_no_harm() {
    let world = world();
    let mut wire = Wire::new(&world.executor).initialized("2025-06-18", json!({})).await;
    wire.write(b"\n  \r\n{\"jsonrpc\":\"2.0\",\"method\":\"notifications/made/up\",\"params\":{\"a\":1}}\r\n").await;
    wire.write(b"\xEF\xBB\xBF{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}\r\n").await;
    assert_eq!(wire.next().await, Some(json!({"jsonrpc": "2.0", "id": 1, "result": {}})));
    wire.close().await;
}

#[tokio::test]
async fn a_line_without_end_is_skipped_as_it_comes() {
    let world = world();
    let options = ServerOptions { message_bytes_max: 1000, ..ServerOptions::default() };
    let mut wire = Wire::with(&world.executor, options).initialized("2025-06-18", json!({})).await;
    let piece = vec![b'x'; 1024 * 1024];
    for _ in 0..100 {
        wire.write(&piece).await;
    }
    wire.write(b"\n").await;
    assert_eq!(wire.next().await, Some(error(None, -32600, "a message can have at most 1000 bytes")));
    assert_eq!(wire.call(2, "echo", json!({})).await["result"]["isError"], false);
    wire.close().await;
}

#[tokio::test]
async fn a_call_that_is_too_long_is_refused_by_its_id_and_recorded() {
    let world = world();
    let options = ServerOptions { message_bytes_max: 1000, ..ServerOptions::default() };
    let mut wire = Wire::with(&world.executor, options).initialized("2025-06-18", json!({})).await;
    let large = "x\\\"id\\\":9".repeat(100_000);
    let arguments = format!(r#"{{"name":"other","text":"{large}"}}"#);
    for (id, line) in [
        (
            1,
            format!(
                r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"echo","arguments":{arguments}}}}}"#
            ),
        ),
        // Some clients write the id last.
        (
            2,
            format!(
                r#"{{"method":"tools/call","params":{{"arguments":{arguments},"name":"echo"}},"jsonrpc":"2.0","id":2}}"#
            ),
        ),
    ] {
        wire.write(line.as_bytes()).await;
        wire.write(b"\n").await;
        let told = wire.next().await.unwrap();
        assert_eq!((&told["id"], &told["result"]["isError"]), (&json!(id), &json!(true)), "{told}");
        let error = &told["result"]["_meta"]["wieldy/error"];
        assert_eq!(
            json!([error["code"], error["message"]]),
            json!(["E3002", "a message can have at most 1000 bytes"]),
            "{told}"
        );
    }
    let other = format!(r#"{{"jsonrpc":"2.0","id":3,"method":"tools/list","params":{{"cursor":"{large}"}}}}"#);
    wire.write(other.as_bytes()).await;
    wire.write(b"\n").await;
    assert_eq!(wire.next().await, Some(error(Some(json!(3)), -32600, "a message can have at most 1000 bytes")));
    assert_eq!(wire.call(4, "echo", json!({})).await["result"]["isError"], false);
    wire.close().await;
    world.check();
    let events = world.events();
    let ended = events.iter().filter_map(|event| {
        let closing = event.body.closing()?;
        Some(json!([event.subject.tool, closing.error.as_ref().map(|error| error.code)]))
    });
    let ended: Vec<Value> = ended.collect();
    assert_eq!(ended, [json!(["echo", "E3002"]), json!(["echo", "E3002"]), json!(["echo", null])]);
}

#[tokio::test]
async fn an_id_that_is_in_use_is_refused_and_the_first_request_goes_on() {
    let world = world();
    let mut wire = Wire::new(&world.executor).initialized("2025-06-18", json!({})).await;
    wire.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "hangs"}})).await;
    let told = wire.ask(1, "tools/call", json!({"name": "echo"})).await;
    let used = error(None, -32600, "a request with this id is still open");
    assert_eq!(told, used);
    // A refusal for another reason does not free the id either.
    let refused = wire.ask(1, "tools/call", json!([])).await;
    assert_eq!(refused, error(Some(json!(1)), -32602, "`params` must be an object with the tool's `name`"));
    assert_eq!(wire.ask(1, "ping", json!({})).await, used);
    assert_eq!(wire.call(2, "echo", json!({})).await["id"], 2);
    assert_eq!(wire.call(2, "echo", json!({})).await["id"], 2, "an id may be used again after the answer");
    assert_eq!(world.executor.load().running, 1);
}

#[tokio::test]
async fn requests_without_answers_have_a_bound() {
    let world = world();
    let options = ServerOptions { requests_max: 3, ..ServerOptions::default() };
    let mut wire = Wire::with(&world.executor, options).initialized("2025-06-18", json!({})).await;
    for id in 1..=3 {
        wire.send(&json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": "hangs"}})).await;
    }
    let told = wire.ask(4, "tools/call", json!({"name": "echo"})).await;
    assert_eq!(told, error(Some(json!(4)), -32000, "too many requests are open"));
}

#[tokio::test]
async fn half_a_line_at_the_end_is_an_error() {
    let world = world();
    let mut wire = Wire::new(&world.executor).initialized("2025-06-18", json!({})).await;
    wire.write(br#"{"jsonrpc":"2.0","id":1,"meth"#).await;
    let rest = wire.close().await;
    assert_eq!(rest.len(), 1, "{rest:?}");
    assert_eq!(rest[0]["error"]["code"], -32700);
}

#[tokio::test]
async fn invalid_input_before_the_handshake_is_answered_with_errors() {
    let world = world();
    let mut wire = Wire::new(&world.executor);
    wire.write(b"hello\n").await;
    assert_eq!(wire.next().await.unwrap()["error"]["code"], -32700);
    let told = wire.ask(1, "tools/list", json!({})).await;
    assert_eq!(told["error"]["code"], -32602, "a request before the handshake: {told}");
    assert_eq!(wire.ask(2, "ping", json!({})).await, json!({"jsonrpc": "2.0", "id": 2, "result": {}}));
    wire.close().await;
}
