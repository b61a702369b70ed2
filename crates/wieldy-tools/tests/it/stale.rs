//! P-FS-10: a file that changed after it was read cannot be changed on the basis of the old content.

use serde_json::{Value, json};

use crate::world::{World, refusal};

// Shows: C5.1, C5.2
#[tokio::test]
async fn a_change_based_on_an_old_reading_is_refused_and_reported() {
    let changes: [(&str, Value); 3] = [
        ("Edit", json!({"path": "./a.txt", "old": "b", "new": "x"})),
        ("Write", json!({"path": "a.txt", "content": "x"})),
        ("Delete", json!({"path": "a.txt"})),
    ];
    for (tool, arguments) in changes {
        let world = World::new();
        world.put("a.txt", "a b");
        world.text("Read", json!({"path": "a.txt"})).await;
        world.put("a.txt", "b c");
        let message = world.refusal(tool, arguments.clone()).await;
        assert_eq!(
            message,
            "E3303: `a.txt` changed since it was last read\n(read it again, then repeat the change on the new content)",
            "{tool}"
        );
        assert_eq!(world.content("a.txt"), "b c", "{tool}: nothing is overwritten");
        assert_eq!(world.stale(), [("a.txt".to_owned(), true)], "{tool}");
        // The harmless twin: after another read, which reports the change as well, the call succeeds.
        world.text("Read", json!({"path": "a.txt"})).await;
        assert_eq!(world.stale().len(), 2, "{tool}");
        assert!(world.call(tool, arguments).await.is_success(), "{tool}");
        assert_eq!(world.stale().len(), 2, "{tool}");
    }
}

// Shows: C5.1
#[tokio::test]
async fn a_session_knows_its_own_changes_and_those_of_others_are_stale() {
    let world = World::new();
    world.put("a.txt", "1");
    let (ada, bob) = (world.session("ada"), world.session("bob"));
    let edit = |old: &str, new: &str| json!({"path": "a.txt", "old": old, "new": new});
    assert!(ada.call("Read", json!({"path": "a.txt"})).await.is_success());
    assert!(ada.call("Edit", edit("1", "2")).await.is_success());
    assert!(ada.call("Edit", edit("2", "3")).await.is_success(), "one's own change is known");
    assert!(bob.call("Edit", edit("3", "4")).await.is_success(), "who never read it had to know the text");
    let refused = ada.call("Edit", edit("4", "5")).await;
    assert!(refusal(&refused).starts_with("E3303: `a.txt` changed"));
    assert!(bob.call("Write", json!({"path": "a.txt", "content": "6"})).await.is_success());
    assert_eq!(world.content("a.txt"), "6");
}

// Shows: C5.2
#[tokio::test]
async fn a_reading_of_a_changed_file_says_so_once() {
    let world = World::new();
    world.put("a.txt", "1\n");
    let read = async || {
        let result = world.call("Read", json!({"path": "a.txt"})).await;
        (result.text(), result.structured.unwrap()["changed"].clone())
    };
    assert_eq!(read().await, ("1\n".into(), json!(false)));
    let line = "[the file changed since this session last read or wrote it]\n";
    for (content, text) in [("2\n", format!("2\n{line}")), ("3", format!("3\n{line}")), ("", line.to_owned())] {
        world.put("a.txt", content);
        assert_eq!(read().await, (text, json!(true)));
        assert_eq!(read().await, (content.to_owned(), json!(false)));
    }
    assert!(world.call("Write", json!({"path": "a.txt", "content": "4"})).await.is_success());
    assert_eq!(read().await, ("4".into(), json!(false)), "its own change is known");
}

#[tokio::test]
async fn the_same_file_under_another_name_is_the_same_file() {
    let world = World::new();
    world.put("real/a.txt", "1").link("link", "real");
    world.text("Read", json!({"path": "link/a.txt"})).await;
    world.put("real/a.txt", "2");
    let message = world.refusal("Write", json!({"path": world.path("real/a.txt"), "content": "3"})).await;
    assert!(message.starts_with("E3303: `real/a.txt` changed"), "{message}");
}

#[tokio::test]
async fn a_file_that_is_gone_is_reported_once_and_can_be_written_anew() {
    let world = World::new();
    world.put("a.txt", "1");
    world.text("Read", json!({"path": "a.txt"})).await;
    std::fs::remove_file(world.path("a.txt")).expect("it was there");
    for _ in 0..2 {
        assert!(world.refusal("Read", json!({"path": "a.txt"})).await.starts_with("E3302"));
    }
    assert_eq!(world.stale(), [("a.txt".to_owned(), false)]);
    world.text("Write", json!({"path": "a.txt", "content": "2"})).await;
    assert_eq!(world.stale().len(), 1);
}

#[tokio::test]
async fn trap_staleness_by_eight_hex_digits_of_a_weak_hash() {
    // The MD5 sums of these two texts begin with the same eight digits, 4cd5766b; a check of those alone sees no
    // change.
    let [read, written] = ["version 00000339\n", "version 00051488\n"];
    let world = World::new();
    world.put("a.txt", read);
    let result = world.call("Read", json!({"path": "a.txt"})).await;
    let hash = result.structured.expect("what was read")["hash"].as_str().expect("its hash").to_owned();
    assert_eq!(hash, blake3::hash(read.as_bytes()).to_hex().to_string(), "the whole of a strong hash");
    let modified = std::fs::metadata(world.path("a.txt")).and_then(|file| file.modified()).expect("a time");
    world.put("a.txt", written);
    let file = std::fs::File::options().write(true).open(world.path("a.txt")).expect("the file");
    file.set_modified(modified).expect("not even its time shows the change");
    let message = world.refusal("Write", json!({"path": "a.txt", "content": "x"})).await;
    assert!(message.starts_with("E3303: `a.txt` changed"), "{message}");
    assert_eq!(world.content("a.txt"), written);
}
