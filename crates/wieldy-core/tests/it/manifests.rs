//! Manifests: which files are read, and which problems are reported.

use std::time::Duration;

use proptest::prelude::*;
use serde_json::json;
use wieldy_core::{Manifest, OutputForm};

const GOOD: &str = r#"
[[tool]]
name = "count_words"
description = "Counts the words of a file"
category = "text"
command = ["wc", "-w", "--", "{path}"]
timeout = "10s"
read-only = true
reads = ["path"]
cache = 60
aliases = ["wc"]

[tool.arguments.path]
type = "string"
description = "The file"
required = true

[tool.limits]
memory-mb = 64

[[tool]]
name = "deploy"
description = "Deploys"
command = ["./deploy.sh"]
confirm = true
output = "json"
permissions = ["deploy"]
"#;

fn problems(text: &str) -> Vec<String> {
    match Manifest::from_toml(text) {
        Ok(_) => Vec::new(),
        Err(error) => error.0.iter().map(ToString::to_string).collect(),
    }
}

// Shows: C2.2
#[test]
fn a_manifest_in_toml_and_the_same_in_json_give_the_same_tools() {
    let manifest = Manifest::from_toml(GOOD).unwrap();
    let [count, deploy] = manifest.tools.as_slice() else { panic!("two tools") };
    assert_eq!((count.line, deploy.line), (Some(2), Some(21)));
    assert_eq!(count.spec.constraints.timeout, Some(Duration::from_secs(10)));
    assert_eq!(count.spec.limits.memory_bytes, Some(64 * 1024 * 1024));
    assert_eq!(
        count.spec.input_schema,
        json!({
            "type": "object",
            "properties": {"path": {"type": "string", "description": "The file"}},
            "required": ["path"],
            "additionalProperties": false,
        })
    );
    assert!(count.spec.annotations.read_only && !count.spec.annotations.destructive);
    assert_eq!(count.command.as_ref().unwrap().arguments, ["-w", "--", "{path}"]);
    assert_eq!(deploy.command.as_ref().unwrap().output, OutputForm::Json);
    assert!(deploy.spec.requires_confirmation && deploy.spec.annotations.destructive);

    let value: serde_json::Value = toml::from_str::<serde_json::Value>(GOOD).unwrap();
    let as_json = json!({"tools": value["tool"]}).to_string();
    let again = Manifest::from_json(&as_json).unwrap();
    let specs = |manifest: &Manifest| manifest.tools.iter().map(|tool| tool.spec.clone()).collect::<Vec<_>>();
    assert_eq!(specs(&again), specs(&manifest));
}

// Shows: C2.3
#[test]
fn functions_as_models_apis_take_them_become_definitions() {
    let wrapped = r#"[
        {"type": "function", "function": {"name": "search_code", "description": "Searches", "parameters": {"type": "object"}},
         "agent_scope": ["oracle", "librarian"], "category": "code"},
        {"name": "notify_self", "description": "Notes", "parameters": {"type": "object"}, "agent_scope": "oracle"},
        {"name": "bare", "input_schema": {"type": "object"}}
    ]"#;
    let manifest = Manifest::from_json(wrapped).unwrap();
    let summaries: Vec<_> = manifest
        .tools
        .iter()
        .map(|tool| {
            (
                tool.spec.name.as_str(),
                tool.spec.category.as_str(),
                tool.spec.agent_scopes.join(","),
                tool.command.is_some(),
            )
        })
        .collect();
    assert_eq!(
        summaries,
        [
            ("search_code", "code", "oracle,librarian".into(), false),
            ("notify_self", "general", "oracle".into(), false),
            ("bare", "general", String::new(), false)
        ]
    );
    assert_eq!(Manifest::from_json(&format!(r#"{{"tools": {wrapped}}}"#)).unwrap().tools.len(), 3);
}

#[test]
fn every_mistake_is_reported_with_its_place() {
    assert_eq!(problems("[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\ntiemout = 5\n").len(), 1);
    for (text, message) in [
        ("tool = 5", vec!["line 1: `tool` must be a list; write `[[tool]]`"]),
        ("[[tol]]\n", vec!["line 1: unknown field `tol`; did you mean `tool`?"]),
        ("[[tool]]\nname = ", vec!["line 2: string values must be quoted, expected literal string"]),
        (
            "[[tool]]\nname = \"a b\"\ndescription = \"\"\ncommand = [\"x\"]\nreads = [\"pth\"]\n[tool.arguments]\npath = { type = \"strnig\" }\n",
            vec![
                "line 1: tool `a b`: a tool's name has only letters A-Z a-z, digits, `_` and `-`, not ' ' at position 2",
                "line 1: tool `a b`: the schema is not valid at `/properties/path/type`: `strnig` is no type; the types are string, number, integer, boolean, object, array, null; did you mean `string`?",
                "line 1: tool `a b`: there is no argument `pth`; did you mean `path`?",
            ],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = []\n",
            vec!["line 1: tool `a`: `command` is empty; it names the program and its arguments"],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\ntimeout = -5\n",
            vec!["line 5: tool `a`: `timeout`: `-5` is no time at all; a duration must be more than 0"],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\ntimeout = nan\n",
            vec!["line 5: tool `a`: `timeout`: `NaN` is not a duration such as `500ms`, `30s`, `5m` or `1h`"],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\n[tool.limits]\nmemory-mb = 0\n",
            vec!["line 1: tool `a`: the limit `memory_bytes` is 0, so it could never run"],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\n[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\n",
            vec!["line 5: tool `a`: there is another tool of this name in the file"],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = 5\ncommand = [\"x\"]\ntiemout = 5\nretries = \"x\"\n[[tool]]\nname = \"b\"\n",
            vec![
                "line 3: tool `a`: `description`: must be a text, not the number `5`",
                "line 5: tool `a`: unknown field `tiemout`; did you mean `timeout` or `timeout-max`?",
                "line 6: tool `a`: `retries`: must be a whole number, not the text `x`",
                "line 7: tool `b`: `description` is missing",
                "line 7: tool `b`: `command` is missing",
            ],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\n[tool.arguments]\ntype = { type = [\"string\", 5] }\n",
            vec![
                "line 1: tool `a`: the schema is not valid at `/properties/type/type`: `5` is no type; the types are string, number, integer, boolean, object, array, null",
            ],
        ),
    ] {
        assert_eq!(problems(text), message, "{text}");
    }
    let error_of = |text: &str| Manifest::from_json(text).unwrap_err().to_string();
    assert_eq!(
        error_of("{\n\"tools\": [\n{\"nme\": 1, \"description\": \"\", \"command\": [\"x\"]}]}"),
        "line 3: unknown field `nme`; did you mean `name`?"
    );
    assert_eq!(
        error_of("{\"tools\": [{\"name\": \"a\", \"comand\": 1, \"retris\": 1},\n{\"name\": \"b\"}]}"),
        "line 1: tool `a`: unknown field `comand`; did you mean `command`?\ntool `a`: unknown field `retris`; did you mean `retries`?\ntool `a`: `description` is missing\ntool `b`: `description` is missing\ntool `b`: `command` is missing"
    );
    assert_eq!(error_of("5"), "neither `{\"tools\": […]}` nor a list of functions");
    assert_eq!(error_of("[{\"function\": {}}]"), "tool `#1`: a function needs a `name`");
    assert_eq!(error_of(&"[".repeat(10_000)), "line 1: recursion limit exceeded");
}

#[test]
fn no_mistake_of_a_tool_hides_another() {
    let name = |name: &str| {
        format!("tool `{name}`: a tool's name has only letters A-Z a-z, digits, `_` and `-`, not ' ' at position 2")
    };
    for (text, message) in [
        (
            "[[tool]]\nname = \"a b\"\ndescription = \"\"\ncommand = [\"x\"]\nretris = 1\nreads = [\"pth\"]\n",
            vec![
                "line 5: tool `a b`: unknown field `retris`; did you mean `retries`?".to_owned(),
                format!("line 1: {}", name("a b")),
                "line 1: tool `a b`: there is no argument `pth`".into(),
            ],
        ),
        (
            "[[tool]]\nname = \"a b\"\ncommand = [\"\"]\n[tool.arguments]\nx = 5\ny = { required = 1 }\n",
            vec![
                "line 1: tool `a b`: `description` is missing".into(),
                "line 1: tool `a b`: `command` names no program".into(),
                "line 1: tool `a b`: the argument `x` must be a table such as { type = \"string\" }".into(),
                "line 1: tool `a b`: `required` of the argument `y` is true or false".into(),
                format!("line 1: {}", name("a b")),
            ],
        ),
        (
            "[[tool]]\nretries = \"x\"\nreads = [\"a\", 5, true]\n",
            vec![
                "line 2: `retries`: must be a whole number, not the text `x`".into(),
                "line 3: `reads`: must be a text, not the number `5`".into(),
                "line 3: `reads`: must be a text, not `true`".into(),
                "line 1: `name` is missing".into(),
                "line 1: `description` is missing".into(),
                "line 1: `command` is missing".into(),
                "line 1: tool `unnamed-1`: there is no argument `a`".into(),
            ],
        ),
        // The arguments exist but cannot be read, so references to them are not reported.
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\", \"{q}\"]\nreads = [\"q\"]\n[tool.argumnts.q]\ntype = \"string\"\n",
            vec!["line 6: tool `a`: unknown field `argumnts`; did you mean `arguments` or `argument-aliases`?".into()],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\nreads = [\"q\"]\narguments = 5\n",
            vec!["line 6: tool `a`: `arguments`: must be a table, not the number `5`".into()],
        ),
    ] {
        assert_eq!(problems(text), message, "{text}");
    }
    let in_json = r#"{"tools": [{"name": "a b", "command": ["x"], "retries": "x", "confirm": 1, "reads": ["pth"]}]}"#;
    let problems_of_json: Vec<String> =
        Manifest::from_json(in_json).unwrap_err().0.iter().map(ToString::to_string).collect();
    assert_eq!(
        problems_of_json,
        [
            "line 1: tool `a b`: must be a whole number, not the text `x`".to_owned(),
            "tool `a b`: must be `true` or `false`, not the number `1`".into(),
            "tool `a b`: `description` is missing".into(),
            name("a b"),
            "tool `a b`: there is no argument `pth`".into(),
        ]
    );
    let functions =
        r#"[{"name": "a b", "description": 5, "category": 5, "agent_scope": 5, "parameters": {"type": "object"}}]"#;
    let problems_of_json: Vec<String> =
        Manifest::from_json(functions).unwrap_err().0.iter().map(ToString::to_string).collect();
    assert_eq!(
        problems_of_json,
        [
            "tool `a b`: `description` must be a text".to_owned(),
            "tool `a b`: `category` must be a text".into(),
            "tool `a b`: `agent_scope` must be a text or a list of texts".into(),
            name("a b"),
        ]
    );
    let empty = r#"[{"name": "", "parameters": {"type": "object"}}]"#;
    assert_eq!(Manifest::from_json(empty).unwrap_err().0.len(), 1);
}

proptest! {
    #[test]
    fn reading_anything_never_panics(text in "\\PC{0,300}") {
        let _ = Manifest::from_toml(&text);
        let _ = Manifest::from_json(&text);
    }

    #[test]
    fn a_good_manifest_with_one_slip_never_panics(at in 0usize..GOOD.len(), with in "\\PC{0,3}", cut in 0usize..20) {
        let start = (0..=at).rev().find(|at| GOOD.is_char_boundary(*at)).unwrap();
        let end = (GOOD.len().min(start + cut)..).find(|at| GOOD.is_char_boundary(*at)).unwrap();
        let _ = Manifest::from_toml(&format!("{}{with}{}", &GOOD[..start], &GOOD[end..]));
    }
}
