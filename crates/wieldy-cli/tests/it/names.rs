//! The names and arguments that documents, people and models use, at the doors.

use serde_json::{Value, json};

use crate::mcp::Client;
use crate::world::World;

/// Returns the tool and the arguments of the last call as recorded.
fn last_call(world: &World) -> Value {
    let call = world.json(&["history", "--limit", "1", "--json"])["executions"][0].take();
    json!([call["tool"], call["parameters"]])
}

// Shows: C1.2
#[test]
fn the_usual_names_work_on_the_command_line() {
    let world = World::new().file("a.txt", "one two\n");
    assert!(world.run(&["call", "Read", "file_path=a.txt"]).contains("one two"));
    assert_eq!(last_call(&world), json!(["Read", {"path": "a.txt"}]));
    let edit = ["call", "Edit", "file_path=a.txt", "old_string=one", "new_string=three"];
    assert_eq!(world.code(&edit), Some(0));
    assert_eq!(last_call(&world), json!(["Edit", {"path": "a.txt", "old": "one", "new": "three"}]));
    let absolute = format!("path={}", world.path("a.txt").display());
    assert!(world.run(&["call", "read_file", &absolute]).contains("three two"));
    assert_eq!(last_call(&world), json!(["Read", {"path": "a.txt"}]));
    insta::assert_snapshot!(world.run(&["call", "Read", "file_path=a.txt", "path=a.txt"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3002]: `/file_path`: it is another name for `path`, and `path` is given too
    hint: give only `path`
    ");
    let shown = world.run(&["tools", "show", "Edit"]);
    assert!(shown.contains("EditFile, edit_file"), "{shown}");
    assert!(shown.contains("file_path for path, new_string for new, old_string for old"), "{shown}");
    let definition = world.json(&["tools", "show", "Edit", "--json"]);
    assert!(!definition["input_schema"].to_string().contains("old_string"), "{definition}");
}

// Shows: C1.2
#[test]
fn the_usual_names_work_over_mcp() {
    let world = World::new().file("a.txt", "one two\n");
    let mut client = Client::start(&world, &[]);
    for (id, tool, name) in [(1, "Read", "file_path"), (2, "read_file", "path"), (3, "read_file", "file_path")] {
        let answer = client.call(id, tool, json!({ name: world.path("a.txt") }));
        assert_eq!(answer["result"]["content"], json!([{"type": "text", "text": "one two\n"}]), "{tool} {name}");
    }
    let tools = client.ask(json!({"jsonrpc": "2.0", "id": 4, "method": "tools/list"})).to_string();
    assert!(!tools.contains("file_path") && !tools.contains("read_file"), "{tools}");
    client.end();
    assert_eq!(last_call(&world), json!(["Read", {"path": "a.txt"}]));
}

#[test]
fn a_batch_may_say_name_and_args() {
    let lines = "{\"name\": \"Read\", \"args\": {\"file_path\": \"a.txt\"}}\n";
    let world = World::new().file("a.txt", "one two\n").file("batch.json", lines);
    assert!(world.run(&["batch", "batch.json"]).contains("one two"));
    let both = world.run_with_input(&["batch", "-"], "{\"name\": \"Read\", \"tool\": \"Read\"}");
    assert!(both.contains("error: standard input:1: duplicate field `tool`"), "{both}");
    assert!(both.contains("one per line: {\"id\": \"b\", \"tool\": \"Read\", \"arguments\": {"), "{both}");
}

#[test]
fn a_build_takes_a_script_of_the_project() {
    let file = r#"{"scripts": {"production": "echo shipped"}}"#;
    let world = World::new().file("package.json", file);
    let told = world.run(&["call", "Build", "target=nightly", "--isolation", "none"]);
    assert!(told.starts_with("exit: 1"), "{told}");
    let message = "error[E3303]: there is no target `nightly`; there are build, test, check, clean; the scripts of \
                   package.json: production";
    assert!(told.contains(message), "{told}");
    let built = world.json(&["call", "Build", "target=production", "--isolation", "none", "--json"]);
    assert_eq!(built["arguments"], json!({"target": "production"}));
    assert_eq!(built["structured"]["command"], "npm run production", "{built}");
}

// Shows: E3.1
#[test]
fn the_arguments_in_a_result_are_without_secrets() {
    let manifest = "[[tool]]\nname = \"greet\"\ndescription = \"\"\ncommand = [\"echo\", \"{name}\"]\n\
                    sensitive = [\"seal\"]\nargument-aliases = { stamp = \"seal\" }\n[tool.arguments]\n\
                    name = { type = \"string\", required = true }\nseal = { type = \"string\" }\n";
    let world = World::new().file(".wieldy/tools/greet.toml", manifest);
    let result = world.json(&["call", "greet", "name=ada", "stamp=4711-x", "--isolation", "none", "--json"]);
    assert_eq!(result["arguments"], json!({"name": "ada", "seal": "[redacted]"}), "{result}");
    let batch = r#"[{"id": "a", "tool": "greet", "arguments": {"name": "ada", "seal": "4711-x"}},
        {"tool": "greet", "arguments": {"name": {"$result": "a", "pointer": "/arguments/seal"}}}]"#;
    let world = world.file("batch.json", batch);
    let result = world.json(&["batch", "batch.json", "--isolation", "none", "--json"]);
    assert_eq!(result["results"][1]["error"]["code"], "E3002", "{result}");
    assert_eq!(result["results"][0]["arguments"]["seal"], "[redacted]", "{result}");
}
