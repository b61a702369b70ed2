//! P-MCP-01 over HTTP: every body gets a response or ends its connection, nothing is called, and the server stays
//! intact.

use std::net::SocketAddr;

use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use wieldy_mcp::server::ServerOptions;
use wieldy_testkit::{Act, Puppet, World};

use super::http::{Door, MODERN, call};
use super::meta;

/// Posts these bytes. Returns the status and the error code, if there is one.
async fn posted(door: &Door, headers: &[(&str, &str)], body: &[u8]) -> (StatusCode, Option<i64>) {
    let mut request = Client::new()
        .post(door.url())
        .bearer_auth("token-ada")
        .header("accept", "application/json, text/event-stream")
        .header("content-type", "application/json")
        .body(body.to_vec());
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.send().await.unwrap();
    let status = response.status();
    let answer: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap_or_default();
    (status, answer["error"]["code"].as_i64())
}

/// Returns a call of `echo` whose id is this literal.
fn with_id(id: &str, meta: Option<&Value>) -> Vec<u8> {
    let mut message = call("echo", meta.cloned());
    message["id"] = json!("[id]");
    message.to_string().replace(r#""[id]""#, id).into_bytes()
}

#[tokio::test]
async fn invalid_messages_over_http_are_refused() {
    let world = World::new([Puppet::reading("echo", Act::Echo)]);
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    let in_session = [("mcp-session-id", &*session)];
    let modern = meta(json!({}));
    let deep = format!("{}1{}", "[".repeat(10_000), "]".repeat(10_000));
    let called = || world.events().iter().filter(|event| event.body.name() == "tool.call.pending").count();
    for (round, (headers, meta)) in [(&MODERN[..], Some(&modern)), (&in_session, None)].into_iter().enumerate() {
        let call = with_id("1", meta);
        let text = String::from_utf8(call.clone()).unwrap();
        let (no_json, no_message) = ((StatusCode::BAD_REQUEST, Some(-32700)), (StatusCode::BAD_REQUEST, Some(-32600)));
        let not_utf8 = call.iter().map(|byte| if *byte == b'o' { 0xFF } else { *byte });
        for (what, body, told) in [
            ("null", with_id("null", meta), no_message),
            ("a float", with_id("1.5", meta), no_message),
            ("huge", with_id("99999999999999999999", meta), no_message),
            ("an object", with_id("{}", meta), no_message),
            ("no message", b"17".to_vec(), no_message),
            ("several", format!("[{text}]").into_bytes(), no_message),
            ("a mark of byte order", [b"\xEF\xBB\xBF", &call[..]].concat(), no_json),
            ("bad UTF-8", not_utf8.collect(), no_json),
            ("deep", text.replace(r#"{"a":1}"#, &format!(r#"{{"a":{deep}}}"#)).into_bytes(), no_json),
            ("half", call[..call.len() / 2].to_vec(), no_json),
            // Without an id it is an unknown notification, which gets no response.
            ("no id", text.replace(r#""id":1,"#, "").into_bytes(), (StatusCode::ACCEPTED, None)),
        ] {
            assert_eq!(posted(&door, headers, &body).await, told, "{what}");
        }
        assert_eq!(called(), round, "nothing was called");
        assert_eq!(posted(&door, headers, &call).await, (StatusCode::OK, None));
    }
    world.check();
}

#[tokio::test]
async fn a_call_that_is_too_long_over_http_is_refused_by_its_id_and_recorded() {
    let world = World::new([Puppet::reading("echo", Act::Echo)]);
    let options = ServerOptions { message_bytes_max: 1000, ..ServerOptions::default() };
    let door = Door::with(&world.executor, options).await;
    let session = door.session("ada").await;
    let in_session = [("mcp-session-id", &*session)];
    let modern = meta(json!({}));
    for (headers, meta) in [(&MODERN[..], Some(&modern)), (&in_session, None)] {
        let of_size = |bytes: usize, tool: &str| {
            let mut message = call(tool, meta.cloned());
            (message["id"], message["params"]["arguments"]["text"]) = (json!(7), json!("x".repeat(bytes)));
            message
        };
        let response = door.post("ada", headers, &of_size(10_000, "echo")).await;
        assert_eq!(response.status(), StatusCode::OK);
        let told: Value = response.json().await.unwrap();
        let error = &told["result"]["_meta"]["wieldy/error"];
        assert_eq!(
            json!([told["id"], told["result"]["isError"], error["code"], error["message"]]),
            json!([7, true, "E3002", "a message can have at most 1000 bytes"]),
            "{told}"
        );
        // `tool_call` is our own tool. Its message would name the other tool in the part that is not read.
        let response = door.post("ada", headers, &of_size(10_000, "tool_call")).await;
        assert_eq!(response.status(), StatusCode::OK);
        // Such a body is not read to its end. Only the names in its beginning are found.
        let much_too_long = of_size(1_000_000, "echo");
        assert_eq!(door.post("ada", headers, &much_too_long).await.status(), StatusCode::OK);
        let mut named_last = much_too_long;
        let name = named_last["params"].as_object_mut().unwrap().shift_remove("name").unwrap();
        named_last["params"]["name"] = name;
        assert_eq!(door.post("ada", headers, &named_last).await.status(), StatusCode::PAYLOAD_TOO_LARGE);
        let list = json!({"jsonrpc": "2.0", "id": 8, "method": "tools/list", "params": {"cursor": "x".repeat(2000)}});
        assert_eq!(door.post("ada", headers, &list).await.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }
    // Without a session, a client of an older revision is not known.
    let outside = door.post("ada", &[], &call(&"x".repeat(2000), None)).await;
    assert_eq!(outside.status(), StatusCode::PAYLOAD_TOO_LARGE);
    world.check();
    let ended = world.events().into_iter().filter_map(|event| {
        let closing = event.body.closing()?;
        let agent = &event.subject.caller.agent;
        Some(json!([event.subject.tool, closing.error.as_ref().map(|error| error.code), agent]))
    });
    let ended: Vec<Value> = ended.collect();
    let refused = |tool: &str| json!([tool, "E3002", "ada"]);
    let of_one_door = [refused("echo"), refused("tool_call"), refused("echo")];
    assert_eq!(ended, [of_one_door.clone(), of_one_door].concat());
}

/// Bodies that end too early.
#[tokio::test]
async fn half_a_body_starts_no_call() {
    let world = World::new([Puppet::reading("echo", Act::Echo)]);
    let door = Door::new(&world.executor).await;
    let body = with_id("1", Some(&meta(json!({}))));
    let address: SocketAddr = door.url()["http://".len()..].trim_end_matches("/mcp").parse().unwrap();
    let head = |length: &str| {
        let named: String = MODERN.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        format!(
            "POST /mcp HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer token-ada\r\ncontent-type: application/json\r\n\
             accept: application/json, text/event-stream\r\n{named}{length}\r\n\r\n"
        )
    };
    let whole = format!("content-length: {}", body.len());
    let chunked = "transfer-encoding: chunked";
    let chunk = [format!("{:x}\r\n", body.len()).as_bytes(), &body, b"\r\n"].concat();
    for (length, sent) in [(&*whole, &body[..body.len() - 1]), (chunked, &chunk[..]), (chunked, b"zz\r\n{}")] {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(head(length).as_bytes()).await.unwrap();
        client.write_all(sent).await.unwrap();
        client.shutdown().await.unwrap();
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{length}: {answer}");
    }
    assert!(world.events().is_empty(), "nothing was called");
    assert_eq!(posted(&door, &MODERN, &body).await, (StatusCode::OK, None));
    world.check();
}
