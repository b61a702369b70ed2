//! Clients of every revision can use the server.

use rmcp::model::{CallToolRequestParams, ClientCapabilities, ClientConfig, Implementation, ProtocolVersion};
use rmcp::service::ServiceExt;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use wieldy_core::Caller;
use wieldy_mcp::server::{Server, ServerOptions};
use wieldy_testkit::{Act, Puppet, World};

use super::{Wire, meta, shown};

const OLDER: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];

// Shows: E8.1
#[tokio::test]
async fn a_client_of_each_older_revision_lists_and_calls_tools() {
    let world = World::new([Puppet::reading("echo", Act::Echo)]);
    for revision in OLDER {
        let server = Server::new(world.executor.clone(), ServerOptions::default());
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let (read, write) = tokio::io::split(theirs);
        let served = tokio::spawn(async move {
            server.serve_lines(read, write, Caller::local(), None, CancellationToken::new()).await
        });
        let version: ProtocolVersion = serde_json::from_value(json!(revision)).unwrap();
        let mut client = ClientConfig::new(ClientCapabilities::default(), Implementation::new("tester", "1"));
        client.protocol_version = version.clone();
        let client = client.serve(ours).await.unwrap();
        assert_eq!(client.peer_info().unwrap().protocol_version, version);
        let names: Vec<_> = client.list_all_tools().await.unwrap().into_iter().map(|tool| tool.name).collect();
        assert!(names.contains(&"echo".into()), "{revision}: {names:?}");
        let arguments = json!({"a": 1}).as_object().unwrap().clone();
        let answer = client.call_tool(CallToolRequestParams::new("echo").with_arguments(arguments)).await.unwrap();
        let answer = serde_json::to_value(answer).unwrap();
        assert_eq!(
            shown(answer),
            json!({
                "content": [{"type": "text", "text": r#"{"a":1}"#}],
                "isError": false,
                "_meta": {"wieldy/execution": "[id]"},
            }),
            "{revision}"
        );
        client.cancel().await.unwrap();
        served.await.unwrap().unwrap();
    }
    world.check();
    let agents: Vec<_> = world.events().iter().map(|event| event.subject.caller.agent.clone()).collect();
    assert!(agents.iter().all(|agent| agent == "tester"), "the client's name is the agent's: {agents:?}");
}

// Shows: E8.1
#[tokio::test]
async fn a_client_of_the_newest_revision_needs_no_handshake() {
    let world = World::new([Puppet::reading("echo", Act::Echo)]);
    let mut wire = Wire::new(&world.executor);
    let told = wire.ask(1, "server/discover", json!({"_meta": meta(json!({}))})).await;
    assert_eq!(
        told,
        json!({"jsonrpc": "2.0", "id": 1, "result": {
            "resultType": "complete",
            "supportedVersions": ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"],
            "capabilities": {
                "extensions": {"io.modelcontextprotocol/tasks": {}},
                "logging": {},
                "resources": {},
                "tools": {"listChanged": true},
            },
            "ttlMs": 0,
            "cacheScope": "private",
            "_meta": {"io.modelcontextprotocol/serverInfo": {
                "name": "wieldy", "title": "wieldy, the tool executor", "version": env!("CARGO_PKG_VERSION"),
            }},
        }})
    );
    let params = json!({"name": "echo", "arguments": {"a": 1}, "_meta": meta(json!({}))});
    let told = shown(wire.ask("x", "tools/call", params).await);
    assert_eq!(
        told,
        json!({"jsonrpc": "2.0", "id": "x", "result": {
            "resultType": "complete",
            "content": [{"type": "text", "text": r#"{"a":1}"#}],
            "isError": false,
            "_meta": {"wieldy/execution": "[id]"},
        }})
    );
    let told = wire.ask(2, "tools/call", json!({"name": "echo"})).await;
    assert_eq!(told["error"]["code"], -32602, "each request names its revision: {told}");
    let unknown = json!({"_meta": {
        "io.modelcontextprotocol/protocolVersion": "2031-01-01",
        "io.modelcontextprotocol/clientCapabilities": {},
    }});
    let told = wire.ask(3, "tools/list", unknown).await;
    assert_eq!(told["error"]["data"]["supported"].as_array().map(Vec::len), Some(5), "{told}");
    assert_eq!(wire.close().await, Vec::<serde_json::Value>::new());
    world.check();
}
