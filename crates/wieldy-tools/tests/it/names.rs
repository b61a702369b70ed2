//! The names that models use for tools, arguments and files.

use serde_json::json;

use crate::world::World;

#[tokio::test]
async fn the_usual_names_of_tools_and_arguments_are_understood() {
    let world = World::new();
    world.text("write_file", json!({"file_path": "a.txt", "content": "one two"})).await;
    let edit = json!({"file_path": "a.txt", "old_string": "one", "new_string": "three"});
    let result = world.call("Edit", edit).await;
    assert_eq!(
        json!(result)["arguments"],
        json!({"path": "a.txt", "old": "one", "new": "three", "replace_all": false})
    );
    world.text("edit_file", json!({"path": "a.txt", "old": "three", "new": "four"})).await;
    assert_eq!(world.text("read_file", json!({"file_path": "a.txt"})).await, "four two");
    assert_eq!(world.text("list_files", json!({})).await, "a.txt  8 B");
    assert_eq!(world.text("search_files", json!({"pattern": "two"})).await, "a.txt:1:four two");
    insta::assert_snapshot!(world.refusal("Read", json!({"file_path": "a.txt", "path": "a.txt"})).await, @"
    E3002: `/file_path`: it is another name for `path`, and `path` is given too
    (give only `path`)
    ");
}

#[tokio::test]
async fn an_absolute_path_or_pattern_inside_the_workspace_becomes_relative() {
    let world = World::new();
    world.put("src/a.rs", "fn a").put("src/deep/b.rs", "fn b").put("c.rs", "fn c");
    let at = |path: &str| world.path(path).to_string_lossy().into_owned();
    for (tool, given, checked, text) in [
        ("Read", json!({"path": at("src/a.rs")}), json!("src/a.rs"), "fn a"),
        ("Glob", json!({"pattern": at("src/**/*.rs")}), json!("src/**/*.rs"), "src/a.rs\nsrc/deep/b.rs"),
        ("Glob", json!({"pattern": at("*.rs")}), json!("*.rs"), "c.rs"),
        ("Glob", json!({"pattern": at("src/*.rs"), "path": at("src")}), json!("*.rs"), "src/a.rs"),
        ("Search", json!({"pattern": "fn", "glob": at("*.rs")}), json!("./*.rs"), "c.rs:1:fn c"),
        ("Search", json!({"pattern": "fn", "glob": at("src/*"), "path": "src"}), json!("./*"), "src/a.rs:1:fn a"),
    ] {
        let result = world.call(tool, given.clone()).await;
        let name = ["glob", "pattern", "path"]
            .into_iter()
            .find(|name| given[name].as_str().is_some_and(|text| text.starts_with('/')));
        assert_eq!((result.text().trim_end(), &result.arguments[name.unwrap()]), (text, &checked), "{tool} {given}");
    }
    world.text("Write", json!({"path": at("new/d.rs"), "content": "x"})).await;
    let key = |path: String| json!({ "path": path });
    let names = [world.call("Read", key(at("c.rs"))).await, world.call("Read", key("c.rs".into())).await];
    assert_eq!(names[0].arguments, names[1].arguments, "one file has one name");
    insta::assert_snapshot!(world.refusal("Glob", json!({"pattern": "/a.js"})).await, @"
    E3303: `/a.js` is an absolute pattern for paths outside the folder that is searched
    (write it relative to `path`)
    ");
    assert!(world.refusal("Read", json!({"path": "/a.js"})).await.starts_with("E3105"));
}
