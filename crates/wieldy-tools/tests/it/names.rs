//! The names that models use for tools, arguments and files.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;

use serde_json::{Value, json};
use wieldy_core::{Call, Executor, Level, Manifest};
use wieldy_sandbox::Unconfined;
use wieldy_tools::shell::CommandTool;

use crate::world::World;

/// Tools that print their argument and the file that it names.
const MANIFEST: &str = r#"
[[tool]]
name = "plain"
description = "Shows a file"
command = ["sh", "-c", "printf %s: \"$0\"; cat -- \"$0\"", "{path}"]
reads = ["path"]
arguments.path = { type = "string", required = true }

[[tool]]
name = "below"
description = "Shows a file below a folder"
command = ["sh", "-c", "printf %s: \"$0\"; cat -- \"$0\"", "{path}"]
folder = "in"
reads = ["path"]
arguments.path = { type = "string", required = true }

[[tool]]
name = "absolute"
description = "Shows a file by its absolute path"
command = ["sh", "-c", "printf %s: \"$0\"; cat -- \"$0\"", "{path}"]
reads = ["path"]
arguments.path = { type = "string", required = true, pattern = "^/" }

[[tool]]
name = "unnamed"
description = "Shows a file that its footprint does not name"
command = ["sh", "-c", "printf %s: \"$0\"; cat -- \"$0\"", "{path}"]
arguments.path = { type = "string", required = true }
"#;

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

#[tokio::test]
async fn a_path_that_goes_up_becomes_plain_if_no_link_is_on_it() {
    let world = World::new();
    world.put("in/deep/b.txt", "b").put("a.txt", "a").put("in/a.txt", "the other a");
    symlink("in/deep", world.path("link")).unwrap();
    for (given, checked, text) in [
        ("in/../a.txt", "a.txt", "a"),
        ("./in/deep/../a.txt", "in/a.txt", "the other a"),
        ("link/../a.txt", "link/../a.txt", "the other a"),
    ] {
        let result = world.call("Read", json!({ "path": given })).await;
        assert_eq!((result.text().trim_end(), &result.arguments["path"]), (text, &json!(checked)), "{given}");
    }
    assert!(world.refusal("Read", json!({"path": "missing/../a.txt"})).await.starts_with("E3302"));
    assert!(world.refusal("Read", json!({"path": "in/../../a.txt"})).await.starts_with("E3105"));
}

#[tokio::test]
async fn paths_of_command_tools_become_relative_where_their_programs_take_them_so() {
    let world = World::new();
    world.put("in/a.txt", "below").put("a.txt", "a").put("-x", "dash").put("host:x", "colon").put("n=x", "sign");
    let mut builder = Executor::builder();
    builder.workspace = world.path("");
    builder.isolation = Level::None;
    let mut builder = builder.sandbox(Unconfined::default());
    let environment = BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]);
    for tool in Manifest::from_toml(MANIFEST).unwrap().tools {
        builder = builder.tool(CommandTool::new(tool.spec, tool.command.unwrap(), environment.clone()).unwrap());
    }
    let executor = builder.build().unwrap();
    let at = |path: &str| world.path(path).to_string_lossy().into_owned();
    for (tool, given, checked, text) in [
        ("plain", at("a.txt"), "a.txt".to_owned(), "a"),
        ("plain", "in/../a.txt".into(), "a.txt".into(), "a"),
        ("plain", at("in/../a.txt"), "a.txt".into(), "a"),
        ("plain", "a.txt".into(), "a.txt".into(), "a"),
        ("plain", at("-x"), at("-x"), "dash"),
        ("plain", at("host:x"), at("host:x"), "colon"),
        ("plain", at("n=x"), at("n=x"), "sign"),
        ("below", at("in/a.txt"), at("in/a.txt"), "below"),
        ("below", "../a.txt".into(), "../a.txt".into(), "a"),
        ("absolute", at("a.txt"), at("a.txt"), "a"),
        ("unnamed", at("a.txt"), at("a.txt"), "a"),
    ] {
        let result = executor.call(Call::new(tool, json!({ "path": given }))).await;
        let found: (&Value, String) = (&result.arguments["path"], result.text());
        assert_eq!(found, (&json!(checked), format!("{checked}:{text}")), "{tool} {given}");
    }
}
