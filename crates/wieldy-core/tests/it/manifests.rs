//! Manifests: what is read, and what is said about what cannot be.

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

#[test]
fn functions_as_models_apis_take_them_become_definitions() {
    let wrapped = r#"[
        {"type": "function", "function": {"name": "search_code", "description": "Searches", "parameters": {"type": "object"}},
         "agent_scope": ["oracle", "librarian"], "category": "code"},
        {"name": "notify_self", "description": "Notes", "parameters": {"type": "object"}, "agent_scope": "oracle"},
        {"name": "bare", "input_schema": {"type": "object"}}
    ]"#;
    let manifest = Manifest::from_json(wrapped).unwrap();
    let told: Vec<_> = manifest
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
        told,
        [
            ("search_code", "code", "oracle,librarian".into(), false),
            ("notify_self", "general", "oracle".into(), false),
            ("bare", "general", String::new(), false)
        ]
    );
    assert_eq!(Manifest::from_json(&format!(r#"{{"tools": {wrapped}}}"#)).unwrap().tools.len(), 3);
}

#[test]
fn every_mistake_is_told_with_its_place() {
    assert_eq!(problems("[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\ntiemout = 5\n").len(), 1);
    for (text, told) in [
        ("tool = 5", vec!["line 1: invalid type: integer `5`, expected a sequence"]),
        ("[[tol]]\n", vec!["line 1: unknown field `tol`; did you mean `tool`?"]),
        ("[[tool]]\nname = ", vec!["line 2: string values must be quoted, expected literal string"]),
        (
            "[[tool]]\nname = \"a b\"\ndescription = \"\"\ncommand = [\"x\"]\nreads = [\"pth\"]\n[tool.arguments]\npath = { type = \"strnig\" }\n",
            vec![
                "line 1: tool `a b`: a tool's name has only letters A-Z a-z, digits, `_` and `-`, not ' ' at position 2",
                "line 1: tool `a b`: the schema is not valid at `/properties/path/type`: value is not valid under any of the schemas listed in the 'anyOf' keyword",
                "line 1: tool `a b`: there is no argument `pth`; did you mean `path`?",
            ],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = []\n",
            vec!["line 1: tool `a`: `command` is empty; it names the program and its arguments"],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\ntimeout = -5\n",
            vec!["line 5: `-5` is no time at all; a duration must be more than 0"],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\ntimeout = nan\n",
            vec!["line 5: `NaN` is not a duration such as `500ms`, `30s`, `5m` or `1h`"],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\n[tool.limits]\nmemory-mb = 0\n",
            vec!["line 1: tool `a`: the limit `memory_bytes` is 0, so it could never run"],
        ),
        (
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\n[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\"]\n",
            vec!["line 5: tool `a`: there is another tool of this name in the file"],
        ),
    ] {
        assert_eq!(problems(text), told, "{text}");
    }
    let told = |text: &str| Manifest::from_json(text).unwrap_err().to_string();
    assert_eq!(told("{\n\"tools\": [\n{\"nme\": 1}]}"), "line 3: unknown field `nme`; did you mean `name`?");
    assert_eq!(told("5"), "neither `{\"tools\": […]}` nor a list of functions");
    assert_eq!(told("[{\"function\": {}}]"), "tool `#1`: a function needs a `name`");
    assert_eq!(told(&"[".repeat(10_000)), "line 1: recursion limit exceeded");
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
