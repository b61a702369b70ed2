//! Tool lists: whole, in pages, sorted, and notified when they change.

use serde_json::json;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Caller, Held, Plan, Provider, ToolSpec};
use wieldy_mcp::server::{BatchCalls, Server, ServerOptions};
use wieldy_testkit::{Act, Puppet, World};

use super::{Wire, meta};

const REVISION: &str = "2025-11-25";

// Shows: C1.1, E8.2
#[tokio::test]
async fn a_tool_is_listed_with_all_that_it_declares() {
    let mut spec = ToolSpec::new("weigh", "Weighs a thing").read_only();
    spec.title = Some("Scales".into());
    spec.input_schema = json!({"type": "object", "properties": {"thing": {"type": "string"}}});
    spec.output_schema = Some(json!({"type": "object", "properties": {"grams": {"type": "number"}}}));
    let world = World::new([Puppet::new(spec, [Act::Echo]).0]);
    let options = ServerOptions { patience: None, batch: BatchCalls::Off, ..ServerOptions::default() };
    let mut wire = Wire::with(&world.executor, options).initialized(REVISION, json!({})).await;
    assert_eq!(
        wire.ask(1, "tools/list", json!({})).await["result"],
        json!({"tools": [{
            "name": "weigh",
            "title": "Scales",
            "description": "Weighs a thing",
            "inputSchema": {"type": "object", "properties": {"thing": {"type": "string"}}},
            "annotations": {
                "readOnlyHint": true, "destructiveHint": false, "idempotentHint": true, "openWorldHint": true,
            },
        }]})
    );
    wire.close().await;
}

#[tokio::test]
async fn only_tools_of_mcp_servers_are_listed_with_their_output_schemas() {
    for (provider, listed) in [(Provider::Mcp("git".into()), true), (Provider::Local, false)] {
        let mut spec = ToolSpec::new("weigh", "Weighs a thing").provider(provider);
        spec.output_schema = Some(json!({"type": "object"}));
        let world = World::new([Puppet::new(spec, [Act::Echo]).0]);
        let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
        let list = wire.ask(1, "tools/list", json!({})).await["result"]["tools"].take();
        let weigh = list.as_array().unwrap().iter().find(|tool| tool["name"] == "weigh").unwrap();
        assert_eq!(weigh.get("outputSchema"), listed.then(|| json!({"type": "object"})).as_ref());
        wire.close().await;
    }
}

/// Returns the names of a list, and the cursor of the next page.
async fn names(wire: &mut Wire, cursor: Option<&str>) -> (Vec<String>, Option<String>) {
    let params = cursor.map_or(json!({}), |cursor| json!({"cursor": cursor}));
    let told = wire.ask(7, "tools/list", params).await["result"].clone();
    let names = told["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap().to_owned());
    (names.collect(), told["nextCursor"].as_str().map(str::to_owned))
}

#[tokio::test]
async fn a_long_list_comes_in_pages_in_the_order_of_names() {
    let world = World::new(["delta", "alpha", "echo", "bravo", "charlie"].map(|name| Puppet::reading(name, Act::Echo)));
    let options = ServerOptions { page: 2, patience: None, batch: BatchCalls::Off, ..ServerOptions::default() };
    let mut wire = Wire::with(&world.executor, options).initialized(REVISION, json!({})).await;
    let (mut all, mut cursor) = names(&mut wire, None).await;
    while let Some(at) = cursor {
        let (more, next) = names(&mut wire, Some(&at)).await;
        all.extend(more);
        cursor = next;
    }
    assert_eq!(all, ["alpha", "bravo", "charlie", "delta", "echo"]);
    let told = wire.ask(8, "tools/list", json!({"cursor": "made up"})).await;
    assert_eq!(told["error"], json!({"code": -32602, "message": "the cursor is not from this server"}));
    wire.close().await;
}

// Shows: D4.1
#[tokio::test]
async fn each_caller_sees_the_tools_of_its_scopes() {
    let (secret, _) = Puppet::new(ToolSpec::new("secret", "for few").scope("ops"), [Act::Echo]);
    let world = World::new([secret, Puppet::reading("open", Act::Echo)]);
    let options = ServerOptions { patience: None, batch: BatchCalls::Off, ..ServerOptions::default() };
    let server = Server::new(world.executor.clone(), options);
    let with = |scopes| Caller { scopes, ..Caller::agent("a") };
    for (caller, seen) in [
        (with(Held::only(["ops"])), vec!["open", "secret"]),
        (with(Held::none()), vec!["open"]),
        (with(Held::All), vec!["open", "secret"]),
    ] {
        let mut wire = Wire::to(&server, caller).initialized(REVISION, json!({})).await;
        assert_eq!(names(&mut wire, None).await.0, seen);
        wire.close().await;
    }
}

// Shows: D6.1
#[tokio::test]
async fn each_caller_sees_the_tools_of_its_plan() {
    let world = World::with([Puppet::reading("one", Act::Echo), Puppet::reading("two", Act::Echo)], |builder| {
        let small = Plan { tools: vec!["on*".into()], ..Plan::UNLIMITED };
        builder.policy = std::mem::take(&mut builder.policy).with_plan("Small", small);
    });
    let options = ServerOptions { patience: None, ..ServerOptions::default() };
    let server = Server::new(world.executor.clone(), options);
    let with = |plan: Option<&str>| Caller { plan: plan.map(str::to_owned), ..Caller::local() };
    for (plan, seen) in [
        (None, vec!["batch", "one", "two"]),
        (Some("Small"), vec!["batch", "one"]),
        (Some("Teams"), vec!["batch", "one", "two"]),
    ] {
        let mut wire = Wire::to(&server, with(plan)).initialized(REVISION, json!({})).await;
        assert_eq!(names(&mut wire, None).await.0, seen, "{plan:?}");
        wire.close().await;
    }
    let mut wire = Wire::to(&server, with(Some("Small"))).initialized(REVISION, json!({})).await;
    let told = wire.call(2, "two", json!({})).await;
    let error = &told["result"]["_meta"]["wieldy/error"];
    assert_eq!(
        (&error["code"], &error["details"]["plans"]),
        (&json!("E3006"), &json!(["Core", "Enterprise", "Teams", "WriterPro"]))
    );
    wire.close().await;
}

// Shows: B1.2
#[tokio::test]
async fn a_client_is_told_when_the_tools_change() {
    let world = World::new([Puppet::reading("one", Act::Echo)]);
    let options = ServerOptions { patience: None, batch: BatchCalls::Off, ..ServerOptions::default() };
    let mut wire = Wire::with(&world.executor, options).initialized(REVISION, json!({})).await;
    assert_eq!(names(&mut wire, None).await.0, ["one"]);
    let changed = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
    world.executor.register(Puppet::reading("two", Act::Echo)).unwrap();
    assert_eq!(wire.next().await, Some(changed.clone()));
    assert_eq!(names(&mut wire, None).await.0, ["one", "two"]);
    world.executor.register(Puppet::reading("two", Act::Echo)).unwrap();
    world.executor.unregister("one");
    assert_eq!(wire.next().await, Some(changed), "the same tool once more is no change");
    assert_eq!(names(&mut wire, None).await.0, ["two"]);
    wire.close().await;
}

#[tokio::test]
async fn only_lists_wait_until_the_tools_are_ready() {
    let world = World::new([Puppet::reading("one", Act::Echo)]);
    let ready = CancellationToken::new();
    let options = ServerOptions {
        patience: None,
        batch: BatchCalls::Off,
        ready: Some(ready.clone()),
        ..ServerOptions::default()
    };
    let mut wire = Wire::with(&world.executor, options).initialized(REVISION, json!({})).await;
    wire.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})).await;
    assert_eq!(wire.ask(2, "ping", json!({})).await["id"], 2);
    assert_eq!(wire.call(3, "one", json!({"text": "x"})).await["id"], 3);
    world.executor.register(Puppet::reading("two", Act::Echo)).unwrap();
    assert_eq!(wire.next().await.unwrap()["method"], "notifications/tools/list_changed");
    ready.cancel();
    let told = wire.next().await.unwrap();
    let names: Vec<_> = told["result"]["tools"].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
    assert_eq!(json!([told["id"], names]), json!([1, ["one", "two"]]));
    assert_eq!(self::names(&mut wire, None).await.0, ["one", "two"]);
    wire.close().await;
}

#[tokio::test]
async fn a_client_of_the_newest_revision_gets_changes_on_its_subscription() {
    let world = World::new([Puppet::reading("one", Act::Echo)]);
    let mut wire = Wire::new(&world.executor);
    let filter = json!({"toolsListChanged": true, "promptsListChanged": true});
    let told = wire.ask(5, "subscriptions/listen", json!({"notifications": filter, "_meta": meta(json!({}))})).await;
    assert_eq!(told["params"]["notifications"], json!({"toolsListChanged": true}), "{told}");
    let told = wire.ask(6, "tools/list", json!({"_meta": meta(json!({}))})).await["result"].clone();
    assert_eq!((&told["ttlMs"], &told["cacheScope"]), (&json!(60_000), &json!("private")));
    world.executor.unregister("one");
    assert_eq!(
        wire.next().await,
        Some(json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed", "params": {
            "_meta": {"io.modelcontextprotocol/subscriptionId": 5},
        }}))
    );
    wire.close().await;
}

#[tokio::test]
async fn unsupported_features_answer_method_not_found() {
    let world = World::new([Puppet::reading("echo", Act::Echo)]);
    let mut wire = Wire::new(&world.executor).initialized("2025-11-25", json!({})).await;
    for (id, method) in ["prompts/list", "completion/complete"].into_iter().enumerate() {
        let params = json!({"level": "info", "ref": {"type": "ref/prompt", "name": "a"}, "argument": {"name": "b", "value": ""}});
        let told = wire.ask(id + 1, method, params).await;
        assert_eq!(told, json!({"jsonrpc": "2.0", "id": id + 1, "error": {"code": -32601, "message": method}}));
    }
}
