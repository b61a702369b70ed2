//! Hundreds of tools in a few hundred tokens: only some are listed, or only three tools to find the others.

use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{Caller, Held, Plan, SharedTool, ToolSpec};
use wieldy_mcp::server::{Expose, Server, ServerOptions};
use wieldy_testkit::{Act, Puppet, World};

use super::Wire;

const REVISION: &str = "2025-06-18";

fn tool(name: &str, description: &str, category: &str) -> SharedTool {
    let mut spec = ToolSpec::new(name, description).read_only();
    spec.category = category.into();
    spec.input_schema = json!({"type": "object", "properties": {"what": {"type": "string"}}});
    Puppet::new(spec, [Act::Echo]).0
}

fn many() -> World {
    let others = (0..300).map(|n| tool(&format!("thing_{n}"), "Does one of many things to something", "things"));
    let named = [
        tool("weather_now", "Tells the weather at a place", "weather"),
        tool("weather_soon", "Forecasts rain and sun at a place", "weather"),
        Puppet::new(ToolSpec::new("weather_make", "Makes weather").scope("gods"), [Act::Echo]).0,
    ];
    World::new(others.chain(named))
}

fn options(expose: Expose) -> ServerOptions {
    ServerOptions { expose, page: 1000, ..ServerOptions::default() }
}

async fn listed(world: &World, expose: Expose) -> Vec<String> {
    let mut wire = Wire::with(&world.executor, options(expose)).initialized(REVISION, json!({})).await;
    let told = wire.ask(1, "tools/list", json!({})).await;
    wire.close().await;
    let names = told["result"]["tools"].as_array().unwrap().iter();
    names.map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn only_what_is_wanted_is_listed() {
    let world = many();
    let none = Expose::default;
    assert_eq!(listed(&world, none()).await.len(), 305);
    let names = Expose { names: vec!["thing_29*".into(), "weather_now".into()], ..none() };
    assert_eq!(listed(&world, names).await.len(), 11 + 1 + 2);
    let categories = Expose { categories: vec!["weather".into()], ..none() };
    assert_eq!(listed(&world, categories).await, ["batch", "result_wait", "weather_now", "weather_soon"]);
    assert_eq!(listed(&world, Expose { providers: vec!["mcp:git".into()], ..none() }).await, ["batch", "result_wait"]);
}

// Shows: B1.1
#[tokio::test]
async fn hundreds_of_tools_cost_little_and_are_found_described_and_called() {
    let world = many();
    let expose = Expose { by_search: true, ..Expose::default() };
    let caller = Caller { scopes: Held::none(), ..Caller::local() };
    let server = Server::new(world.executor.clone(), options(expose));
    let mut wire = Wire::to(&server, caller).initialized(REVISION, json!({})).await;
    let list = wire.ask(1, "tools/list", json!({})).await["result"].clone();
    let names: Vec<&Value> = list["tools"].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
    assert_eq!(names, ["batch", "result_wait", "tool_call", "tool_describe", "tool_search"]);
    assert!(list.to_string().len() < 3700, "about 900 tokens: {}", list.to_string().len());
    let found = wire.call(2, "tool_search", json!({"query": "will there be rain?"})).await;
    assert_eq!(
        found["result"],
        json!({
            "content": [{"type": "text", "text": "weather_soon: Forecasts rain and sun at a place"}],
            "isError": false,
        })
    );
    let found = wire.call(3, "tool_search", json!({"query": "weather", "limit": 9})).await;
    assert_eq!(
        found["result"]["content"][0]["text"].as_str().unwrap().lines().count(),
        2,
        "nothing out of scope: {found}"
    );
    let told = wire.call(4, "tool_describe", json!({"name": "weather_soon"})).await;
    let described: Value = serde_json::from_str(told["result"]["content"][0]["text"].as_str().unwrap()).unwrap();
    assert_eq!(described["inputSchema"], json!({"type": "object", "properties": {"what": {"type": "string"}}}));
    let told = wire.call(5, "tool_describe", json!({"name": "weather_make"})).await;
    assert_eq!(told["result"]["_meta"]["wieldy/error"]["code"], "E3001", "{told}");
    let arguments = json!({"name": "weather_soon", "arguments": {"what": "x"}});
    let answer = wire.call(6, "tool_call", arguments).await;
    assert_eq!(answer["result"]["content"][0]["text"], r#"{"what":"x"}"#);
    let none = wire.call(7, "tool_call", json!({"name": "weather_make"})).await;
    assert_eq!(none["error"]["code"], -32602, "{none}");
    wire.close().await;
    world.check();
    let calls: Vec<Option<Arc<str>>> = world
        .events()
        .iter()
        .filter(|event| event.body.name() == "tool.call.pending")
        .map(|event| event.subject.tool.clone())
        .collect();
    assert_eq!(calls, [Some("weather_soon".into()), Some("weather_make".into())], "the tool's own call, once");
}

#[tokio::test]
async fn a_tool_outside_the_plan_is_neither_found_nor_described_nor_called() {
    let tools = [tool("weather_now", "Tells the weather", "weather"), tool("weather_make", "Makes weather", "weather")];
    let world = World::with(tools, |builder| {
        let small = Plan { tools: vec!["weather_now".into()], ..Plan::UNLIMITED };
        builder.policy = std::mem::take(&mut builder.policy).with_plan("Small", small);
    });
    let caller = Caller { plan: Some("Small".into()), ..Caller::local() };
    let server = Server::new(world.executor.clone(), options(Expose { by_search: true, ..Expose::default() }));
    let mut wire = Wire::to(&server, caller).initialized(REVISION, json!({})).await;
    let found = wire.call(1, "tool_search", json!({"query": "weather"})).await;
    assert_eq!(found["result"]["content"][0]["text"], "weather_now: Tells the weather");
    for (id, tool) in [(2, "tool_describe"), (3, "tool_call")] {
        let told = wire.call(id, tool, json!({"name": "weather_make"})).await;
        assert_eq!(told["result"]["_meta"]["wieldy/error"]["code"], "E3006", "{told}");
    }
    wire.close().await;
}

#[tokio::test]
async fn our_own_tools_say_what_is_wrong_with_their_arguments() {
    let world = many();
    let expose = Expose { by_search: true, ..Expose::default() };
    let mut wire = Wire::with(&world.executor, options(expose)).initialized(REVISION, json!({})).await;
    for (tool, arguments, told) in [
        ("tool_search", json!({}), "`query` must be a text"),
        ("tool_search", json!({"query": "x", "limit": 0}), "`limit` must be a whole number of at least 1"),
        ("tool_describe", json!({"name": 5}), "`name` must be the name of a tool"),
        ("tool_call", json!({}), "`name` must be the name of a tool"),
        ("tool_call", json!({"name": "x", "arguments": 5}), "`arguments` must be an object"),
    ] {
        let answer = wire.call(1, tool, arguments).await;
        assert_eq!(
            answer["result"]["content"],
            json!([{"type": "text", "text": format!("Error E3002 VALIDATION_FAILED: {told}")}])
        );
    }
    wire.close().await;
}
