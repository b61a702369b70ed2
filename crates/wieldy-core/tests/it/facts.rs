//! Facts: a tool sees its caller's own state and no other caller's.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{Call, Caller, Outcome, SharedTool, ToolSpec, tool};
use wieldy_testkit::{Act, Puppet, World};

#[tokio::test(start_paused = true)]
async fn facts_never_show_calls_and_tasks_of_others() {
    let facts: SharedTool =
        Arc::new(tool(ToolSpec::new("facts", "").read_only(), async |_: Value, run: wieldy_core::Run| {
            Ok(Outcome::default().structured(json!(run.facts())))
        }));
    let world = World::new([facts, Puppet::reading("slow", Act::Take(Duration::from_secs(100)))]);
    let ada = || Caller { tenant: Some("acme".into()), user: Some("ann".into()), ..Caller::agent("ada") };
    let id = world.executor.spawn(Call::new("slow", json!({})).by(ada()));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let task = format!("tasks.{id}");
    for (caller, own) in [
        (ada(), true),
        (Caller { agent: "bob".into(), ..ada() }, false),
        (Caller { tenant: None, ..ada() }, false),
        (Caller { user: None, ..ada() }, false),
        (Caller { tenant: Some("none".into()), ..ada() }, false),
    ] {
        let facts = world.executor.call(Call::new("facts", json!({})).by(caller.clone())).await.structured.unwrap();
        let expected = if own { (json!(2), json!(1), Some(&json!("running"))) } else { (json!(1), json!(0), None) };
        let (running, tasks) = (facts["calls.running"].clone(), facts["tasks.running"].clone());
        assert_eq!((running, tasks, facts.get(&task)), expected, "{caller:?}");
        assert_eq!(facts["session.agent"], json!(caller.agent));
    }
    world.executor.cancel(id, &ada());
    world.executor.wait(id, &ada()).await;
}
