//! P-MCP-05: servers that give their tools the names of other tools, from the start or later.

use std::sync::Arc;

use serde_json::json;
use wieldy_core::{Level, Status, ToolSpec};
use wieldy_mcp::client::{Pins, Upstreams};
use wieldy_sandbox::Unconfined;
use wieldy_testkit::{Act, Puppet, World};

use super::{Stage, settings, until};

/// A world with a tool of its own, and two servers of one program.
struct Two {
    world: World,
    upstreams: Upstreams,
    folders: [tempfile::TempDir; 2],
}

impl Two {
    async fn new(behaviour: &str) -> Self {
        let own = ["Read", "result_wait"].map(|name| Puppet::new(ToolSpec::new(name, "Ours"), [Act::Say("ours")]).0);
        let world = World::with(own, |builder| {
            builder.isolation = Level::None;
            *builder = std::mem::take(builder).sandbox(Unconfined::default());
        });
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let servers =
            vec![settings("test", behaviour, folders[0].path()), settings("other", behaviour, folders[1].path())];
        let upstreams = Upstreams::new(&world.executor, servers, Arc::new(Pins::default())).unwrap();
        upstreams.discover(|_| true).await;
        Self { world, upstreams, folders }
    }

    async fn said(&self, tool: &str) -> String {
        let result = self.world.call(tool, json!({"text": "theirs"})).await;
        result.error.clone().map_or_else(|| result.text(), |error| error.message)
    }
}

// Shows: E1
#[tokio::test]
async fn a_short_name_that_two_servers_have_is_refused_with_both_names() {
    let two = Two::new("").await;
    let error = two.world.call("echo", json!({"text": "x"})).await.error.unwrap();
    // The order is that in which the servers listed their tools.
    let mut names = ["other__echo", "test__echo"];
    if error.details["candidates"][0] == "test__echo" {
        names.reverse();
    }
    let message = format!("`echo` could be any of `{}`, `{}`", names[0], names[1]);
    assert_eq!(
        (error.code.as_str(), error.message.as_str(), &error.details["candidates"]),
        ("E3001", message.as_str(), &json!(names))
    );
    assert_eq!(two.said("other__echo").await, "theirs");
    let notes = |number: usize| std::fs::read_to_string(two.folders[number].path().join("notes")).unwrap();
    assert_eq!((notes(0).as_str(), notes(1).as_str()), ("started\n", "started\ncalled echo\n"));
}

#[tokio::test]
async fn no_server_takes_the_name_of_another_tool_from_the_start_or_later() {
    let two = Two::new("changes").await;
    two.world.call("test__act", json!({"text": "take names"})).await;
    until(|| two.upstreams.status()[0].tools.len() == 5).await;
    for own in ["Read", "result_wait"] {
        assert_eq!(two.said(own).await, "ours");
    }
    let called = async |tool: &str, server: usize| {
        two.world.call(tool, json!({"text": "x"})).await;
        std::fs::read_to_string(two.folders[server].path().join("notes"))
            .unwrap()
            .lines()
            .rev()
            .nth(1)
            .unwrap()
            .to_owned()
    };
    assert_eq!(called("other__echo", 1).await, "called echo", "it is the other server that is asked");
    assert_eq!(called("test__other__echo", 0).await, "called other__echo");
    assert_eq!(called("test__Read", 0).await, "called Read");
}

#[tokio::test]
async fn of_two_tools_with_one_name_the_first_is_used_and_can_be_pinned() {
    let stage = Stage::of("changes").await;
    stage.call("act", "take names").await;
    until(|| stage.tools().len() == 5).await;
    let status = stage.upstreams.status().remove(0);
    let reason = "the server lists several tools with this name, and only the first is used";
    assert_eq!(status.unusable, [("act".to_owned(), reason.to_owned())].into());
    assert_eq!(status.changed, [].into());
    assert_eq!(stage.call("act", "change echo").await.status, Status::Success);
    until(|| !stage.upstreams.status()[0].changed.is_empty()).await;
    let seen = stage.upstreams.status().remove(0);
    let agreed = stage.upstreams.agree(&seen).unwrap().unwrap();
    assert_eq!((agreed.changed.len(), agreed.unusable.len()), (0, 1));
    for tool in ["act", "echo"] {
        assert_eq!(stage.call(tool, "x").await.status, Status::Success, "{tool}");
    }
}
