//! Artifacts: named in results, listed, read in parts, and invisible to other tenants.

use serde_json::{Value, json};
use wieldy_core::{Caller, Outcome, ToolSpec, tool};
use wieldy_mcp::server::{Server, ServerOptions};
use wieldy_testkit::World;

use super::{Wire, shown};

const REVISION: &str = "2025-11-25";

/// Makes a world with a tool that prints more than a result has room for.
fn world() -> World {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Nothing {}
    let prints = tool(ToolSpec::new("prints", "prints a lot"), async |_: Nothing, run: wieldy_core::Run| {
        run.output(wieldy_core::Stream::Stdout, "0123456789".repeat(30).as_bytes());
        Ok::<Outcome, wieldy_core::RunError>(run.captured())
    });
    World::with([std::sync::Arc::new(prints) as _], |builder| builder.output_bytes_max = 100)
}

/// Calls the tool and returns the URI of the artifact that the result names.
async fn artifact(wire: &mut Wire, id: u32) -> String {
    let answer = wire.ask(id, "tools/call", json!({"name": "prints"})).await;
    assert_eq!(answer["result"]["content"].as_array().unwrap().len(), 1, "some clients fail on links: {answer}");
    answer["result"]["_meta"]["wieldy/artifact"].as_str().unwrap().to_owned()
}

fn text(answer: &Value) -> (&str, &Value) {
    let contents = &answer["result"]["contents"][0];
    (contents["text"].as_str().unwrap(), &contents["_meta"]["wieldy/part"])
}

// Shows: X5.1
#[tokio::test]
async fn the_whole_output_is_named_listed_and_read() {
    let world = world();
    let options = ServerOptions { resource_bytes_max: 250, ..ServerOptions::default() };
    let mut wire = Wire::with(&world.executor, options).initialized(REVISION, json!({})).await;
    assert_eq!(wire.ask(1, "resources/list", json!({})).await["result"], json!({"resources": []}));
    let uri = artifact(&mut wire, 2).await;
    let listed = wire.ask(3, "resources/list", json!({})).await;
    assert_eq!(
        shown(listed)["result"],
        json!({"resources": [{
            "uri": "wieldy://artifact/[artifact]", "name": "artifact:[artifact]",
            "description": "the whole output", "size": 300,
        }]})
    );
    let first = wire.ask(4, "resources/read", json!({"uri": uri})).await;
    assert_eq!(text(&first), (&*"0123456789".repeat(25), &json!({"offset": 0, "end": 250, "of": 300, "next": 250})));
    let rest = wire.ask(5, "resources/read", json!({"uri": format!("{uri}?offset=295")})).await;
    assert_eq!(text(&rest), ("56789", &json!({"offset": 295, "end": 300, "of": 300, "next": null})));
    let part = wire.ask(6, "resources/read", json!({"uri": format!("{uri}?offset=5&length=3")})).await;
    assert_eq!(text(&part), ("567", &json!({"offset": 5, "end": 8, "of": 300, "next": 8})));
    let templates = wire.ask(7, "resources/templates/list", json!({})).await;
    assert_eq!(templates["result"]["resourceTemplates"][0]["uriTemplate"], "wieldy://artifact/{id}{?offset,length}");
    wire.close().await;
}

#[tokio::test]
async fn missing_and_foreign_artifacts_cannot_be_read() {
    let world = world();
    let server = Server::new(world.executor.clone(), ServerOptions::default());
    let caller = |tenant: &str| Caller { tenant: Some(tenant.into()), ..Caller::local() };
    let mut ada = Wire::to(&server, caller("ada")).initialized(REVISION, json!({})).await;
    let mut bob = Wire::to(&server, caller("bob")).initialized(REVISION, json!({})).await;
    let uri = artifact(&mut ada, 1).await;
    assert_eq!(bob.ask(1, "resources/list", json!({})).await["result"], json!({"resources": []}));
    for address in [&*uri, "wieldy://artifact/0", "file:///etc/passwd", "wieldy://artifact/../../etc/passwd", ""] {
        assert_eq!(
            bob.ask(2, "resources/read", json!({"uri": address})).await["error"],
            json!({"code": -32002, "message": "there is no such resource", "data": {"uri": address}})
        );
    }
    ada.close().await;
    bob.close().await;
}
