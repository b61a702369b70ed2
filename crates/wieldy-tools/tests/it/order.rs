//! The order of calls in a batch if one file has several names.

use std::os::unix::fs::symlink;
use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{Batch, Call, Caller, Executor, Level, Manifest};
use wieldy_sandbox::Unconfined;
use wieldy_tools::shell::CommandTool;
use wieldy_tools::{Workspace, file_tools};

use crate::world::World;

/// Runs the two calls in smart order, several times, and returns the second one's text of each run.
async fn second_of(world: &World, first: (&str, Value), second: (&str, Value), before: impl Fn()) -> Vec<String> {
    let mut texts = Vec::new();
    for round in 0..20 {
        before();
        // Each round has a session of its own, so none has read the files that `before` changes.
        let caller = Arc::new(Caller { session: Some(format!("{first:?} {second:?} {round}")), ..Caller::local() });
        let call = |(tool, arguments): &(&str, Value)| Call::new(*tool, arguments.clone()).by(Arc::clone(&caller));
        let calls = [call(&first), call(&second)];
        let result = world.executor().batch(Batch::new(calls)).await.expect("a good batch");
        texts.push(result.results[1].text());
    }
    texts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_through_a_link_comes_before_the_read_of_what_it_leads_to() {
    let world = World::new();
    std::fs::create_dir(world.path("real")).expect("a folder");
    symlink("real", world.path("link")).expect("a link");
    symlink("real/x", world.path("other")).expect("a link");
    let reset = || std::fs::write(world.path("real/x"), "old").expect("a file");
    let write = |path: &str| ("Write", json!({"path": path, "content": "new"}));
    let read = |path: &str| ("Read", json!({ "path": path }));
    let absolute = world.path("real/x").display().to_string();
    for (written, looked_at) in [
        ("link/x", "real/x"),
        ("real/x", "link/x"),
        ("other", "link/x"),
        (absolute.as_str(), "other"),
        ("link/../link/x", "other"),
    ] {
        let texts = second_of(&world, write(written), read(looked_at), reset).await;
        assert_eq!(texts, vec!["new"; 20], "{written} then {looked_at}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_is_deleted_is_gone_from_the_list_that_follows() {
    let world = World::new();
    for folder in ["links", "elsewhere"] {
        std::fs::create_dir(world.path(folder)).expect("a folder");
    }
    std::fs::write(world.path("elsewhere/x"), "x").expect("a file");
    let reset = || symlink("../elsewhere/x", world.path("links/x")).expect("a link");
    let delete = ("Delete", json!({"path": "links/x"}));
    let texts = second_of(&world, delete, ("List", json!({"path": "links"})), reset).await;
    assert!(texts.iter().all(|text| !text.contains('x')), "{texts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_is_not_there_yet_is_known_through_the_links_that_lead_to_it() {
    let world = World::new();
    std::fs::create_dir(world.path("links")).expect("a folder");
    symlink("real", world.path("folder")).expect("a link");
    symlink("../real/x", world.path("links/file")).expect("a link");
    symlink("links/file", world.path("chain")).expect("a link");
    let reset = || {
        let _ = std::fs::remove_dir_all(world.path("real"));
    };
    let write = ("Write", json!({"path": "real/x", "content": "new"}));
    for looked_at in ["folder/x", "links/file", "chain"] {
        let texts = second_of(&world, write.clone(), ("Read", json!({ "path": looked_at })), reset).await;
        assert_eq!(texts, vec!["new"; 20], "{looked_at}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_leads_to_itself_or_outside_is_in_the_way_of_everything() {
    let world = World::new();
    symlink("loop", world.path("loop")).expect("a link");
    symlink(world.outside("not-there"), world.path("out")).expect("a link");
    symlink("../outside/not-there", world.path("up")).expect("a link");
    for path in ["loop", "out", "up"] {
        let write = ("Write", json!({"path": "new", "content": "new"}));
        let texts = second_of(&world, write, ("Read", json!({ "path": path })), || ()).await;
        assert!(texts.iter().all(|text| !text.contains("new")), "{path}: {texts:?}");
    }
    assert!(!world.outside("not-there").exists());
}

/// Creates an executor with the file tools and two slow command tools, which start in the workspace and in `sub`.
fn with_slow_tools(root: &std::path::Path) -> Executor {
    let slow = |name: &str, more: &str| {
        format!(
            r#"
            [[tool]]
            name = "{name}"
            description = "Writes late"
            command = ["sh", "-c", "sleep 0.1; echo new > $0", "{{path}}"]
            writes = ["path"]
            {more}
            [tool.arguments]
            path = {{ type = "string", required = true }}
            "#
        )
    };
    let manifest = slow("slow", "") + &slow("slow_below", r#"folder = "sub""#);
    let mut builder = Executor::builder().tools(file_tools(Arc::new(Workspace::open(root).expect("a folder"))));
    builder.workspace = root.to_owned();
    builder.isolation = Level::None;
    let mut builder = builder.sandbox(Unconfined::default());
    let environment = std::collections::BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]);
    for tool in Manifest::from_toml(&manifest).expect("a manifest").tools {
        let command = tool.command.expect("a command");
        builder = builder.tool(CommandTool::new(tool.spec, command, environment.clone()).expect("a tool"));
    }
    builder.build().expect("different names")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_of_command_tools_through_links_are_ordered_too() {
    let world = World::new();
    let executor = with_slow_tools(&world.path(""));
    std::fs::create_dir(world.path("real")).expect("a folder");
    std::fs::create_dir(world.path("sub")).expect("a folder");
    symlink("real", world.path("link")).expect("a link");
    symlink("../real", world.path("sub/up")).expect("a link");
    for (tool, written) in [("slow", "link/x"), ("slow_below", "up/x")] {
        std::fs::write(world.path("real/x"), "old").expect("a file");
        let calls = [Call::new(tool, json!({ "path": written })), Call::new("Read", json!({"path": "real/x"}))];
        let result = executor.batch(Batch::new(calls)).await.expect("a good batch");
        assert!(result.results[0].is_success(), "{:?}", result.results[0]);
        assert_eq!(result.results[1].text(), "new\n", "{tool}");
    }
    std::fs::write(world.path("other"), "other").expect("a file");
    let calls = [Call::new("slow", json!({"path": "link/x"})), Call::new("Read", json!({"path": "other"}))];
    let result = executor.batch(Batch::new(calls)).await.expect("a good batch");
    let ended: Vec<_> = result.results.iter().map(|result| result.timing.completed_at).collect();
    assert!(ended[1] < ended[0], "calls that touch different files wait for nothing: {ended:?}");
}
