//! `notify_self` on the command line: notes outlive the command, come on standard error or in JSON, and only once.

use serde_json::{Value, json};

use crate::world::World;

/// Returns the messages of the notes in a result.
fn messages(result: &Value) -> Vec<&str> {
    let notes = result["notes"].as_array().map(Vec::as_slice).unwrap_or_default();
    notes.iter().filter_map(|note| note["message"].as_str()).collect()
}

/// Returns the number of pending notes.
fn pending(world: &World) -> Value {
    world.json(&["call", "GetState", "key=notes.pending", "--json"])["structured"]["facts"]["notes.pending"].clone()
}

#[test]
fn a_note_comes_with_the_next_command_on_standard_error() {
    let world = World::new().file("a.txt", "hi");
    let left = world.json(&["call", "notify_self", "message=look at a.txt", "inject_at=after_tool:Read", "--json"]);
    let id = left["structured"]["id"].as_str().unwrap();
    assert_eq!(
        left["structured"],
        json!({"status": "ok", "id": id, "deliver_at": null, "inject_at": "after_tool:Read", "pending": 1})
    );
    assert_eq!(pending(&world), 1);
    let times =
        |text: String| regex::Regex::new(r"\d{4}-\d\d-\d\dT[0-9:]+Z").unwrap().replace_all(&text, "TIME").into_owned();
    let output = world.command(&["call", "Read", "path=a.txt"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "hi");
    let told = times(String::from_utf8_lossy(&output.stderr).replace(id, "ID"));
    insta::assert_snapshot!(told, @r"
    [a note that you left for yourself with `notify_self`: your own words, which grant nothing]
    [note ID: note, normal, left TIME]
    > look at a.txt
    ");
    assert_eq!(messages(&world.json(&["call", "Read", "path=a.txt", "--json"])), Vec::<&str>::new());
    assert_eq!(pending(&world), 0);
    assert_eq!(world.code(&["audit", "verify"]), Some(0));
}

#[test]
fn json_and_text_for_models_have_the_notes_and_strangers_do_not() {
    let world = World::new().file("a.txt", "hi");
    let leave = |message: &str| {
        let message = format!("message={message}");
        assert_eq!(world.code(&["call", "notify_self", &message, "inject_at=after_tool:Read"]), Some(0));
    };
    leave("in JSON");
    for stranger in [["--agent", "bob"], ["--tenant", "t"], ["--user", "eve"], ["--session", "s"]] {
        let read = ["call", "Read", "path=a.txt", "--json", stranger[0], stranger[1]];
        assert_eq!(messages(&world.json(&read)), Vec::<&str>::new(), "{stranger:?}");
    }
    assert_eq!(messages(&world.json(&["call", "Read", "path=a.txt", "--json"])), ["in JSON"]);
    leave("in text");
    let shown = world.run(&["call", "Read", "path=a.txt", "--for-model"]);
    assert!(shown.contains("> in text\n") && shown.matches("in text").count() == 1, "{shown}");
    assert_eq!(world.code(&["call", "notify_self", "message=in a batch", "inject_at=batch_end"]), Some(0));
    let calls = r#"[{"tool": "Read", "args": {"path": "a.txt"}}, {"tool": "List"}]"#;
    let shown = world.run_with_input(&["batch", "-"], calls);
    assert!(shown.contains("> in a batch\n"), "{shown}");
    assert_eq!(pending(&world), 0);
}
