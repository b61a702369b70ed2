//! The order of calls in a batch, where one thing has several names.

use std::os::unix::fs::symlink;
use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{Batch, Call, Caller};

use crate::world::World;

/// Runs the two calls in smart order, several times, and gives the second one's text each time.
async fn second_of(world: &World, first: (&str, Value), second: (&str, Value), before: impl Fn()) -> Vec<String> {
    let mut texts = Vec::new();
    for round in 0..20 {
        before();
        // Each round is a session of its own: none has read what `before` changes.
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
