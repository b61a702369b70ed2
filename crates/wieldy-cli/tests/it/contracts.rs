//! The contracts of the tools that agents live on (`contracts.toml` of `wieldy-tools`): each tool that exists keeps its
//! own.

use std::collections::BTreeMap;

use cel::{Context, Program};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::world::World;

/// The contract of a tool.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Contract {
    #[serde(default)]
    planned: bool,
    reads: Vec<String>,
    writes: BTreeMap<String, String>,
    success: String,
    timeout: String,
    category: String,
    scopes: Vec<String>,
}

/// The arguments of one call of each tool, in an order in which each finds what the earlier ones made.
fn calls() -> Vec<(&'static str, Value)> {
    vec![
        ("search_code", json!({"query": "greet", "limit": 5, "language": "rust"})),
        ("find_definition", json!({"symbol": "greet", "scope": "src", "kind": "function"})),
        ("find_references", json!({"symbol": "greet", "limit": 5})),
        ("get_repo_map", json!({"scope": ".", "max_tokens": 256})),
        ("vault_write", json!({"path": "inbox/a.md", "body": "See [[b]].", "title": "A", "project_id": "default"})),
        ("vault_read", json!({"path": "inbox/a.md", "project_id": "default"})),
        ("vault_search", json!({"query": "see", "limit": 5, "project_id": "default"})),
        ("vault_list", json!({"folder": ".", "project_id": "default"})),
        ("vault_move", json!({"path": "inbox/a.md", "new_path": "done/a.md", "project_id": "default"})),
        ("vault_create_index", json!({"folder": "done", "project_id": "default"})),
        ("thread_push", json!({"thread_id": "t1", "content": "It works.", "entry_type": "decision"})),
        ("thread_read", json!({"thread_id": "t1", "limit": 5})),
        ("thread_seek", json!({"query": "works", "limit": 5, "project_id": "default"})),
        ("thread_list", json!({"status": "open", "project_id": "default"})),
        (
            "notify_self",
            json!({"message": "Look at a.md", "priority": "high", "category": "reminder", "deliver_at": "in 2h"}),
        ),
    ]
}

fn contracts() -> BTreeMap<String, Contract> {
    toml::from_str(include_str!("../../../wieldy-tools/contracts.toml")).unwrap()
}

/// Returns true if the condition holds for the answer.
fn holds(condition: &str, answer: &Value) -> bool {
    let mut context = Context::default();
    context.add_variable("answer", answer.clone()).unwrap();
    Program::compile(condition).unwrap().execute(&context) == Ok(true.into())
}

// Shows: C6.10
#[test]
fn every_tool_of_the_inventory_keeps_its_contract() {
    let vault = tempfile::tempdir().unwrap();
    std::fs::write(vault.path().join("b.md"), "B\n").unwrap();
    let settings = format!("vault.root={}", vault.path().display());
    let world = World::new().file("src/lib.rs", "fn greet() {}\nfn main() { greet() }\n");
    let contracts = contracts();
    assert_eq!(contracts.len(), 21, "all tools of the inventory");
    let calls = calls();
    let called: Vec<&str> = calls.iter().map(|(tool, _)| *tool).collect();
    let mut ready: Vec<&str> =
        contracts.iter().filter(|(_, contract)| !contract.planned).map(|(tool, _)| tool.as_str()).collect();
    ready.sort_by_key(|tool| called.iter().position(|called| called == tool));
    assert_eq!(called, ready, "each tool that exists is called, and no other");
    for (tool, arguments) in calls {
        let contract = &contracts[tool];
        let definition = world.json(&["tools", "show", tool, "--json", "--set", &settings]);
        let shown = |pointer: &str| definition.pointer(pointer).cloned().unwrap_or_default();
        let timeout = milliseconds(&contract.timeout);
        assert_eq!(shown("/constraints/timeout_ms"), json!(timeout), "{tool}: {definition}");
        assert_eq!(shown("/category"), json!(contract.category), "{tool}");
        let mut scopes: Vec<String> = serde_json::from_value(shown("/agent_scopes")).unwrap();
        scopes.sort_by_key(|scope| contract.scopes.iter().position(|known| known == scope));
        assert_eq!(scopes, contract.scopes, "{tool}");
        for key in &contract.reads {
            let name = key.trim_end_matches('?');
            assert!(definition["input_schema"]["properties"].get(name).is_some(), "{tool} takes `{name}`");
            let required = shown("/input_schema/required").as_array().is_some_and(|all| all.contains(&json!(name)));
            assert!(!required || !key.ends_with('?'), "{tool}: `{name}` may be missing");
        }
        let text = arguments.to_string();
        let result = world.json(&["call", tool, "--args", &text, "--json", "--set", &settings]);
        let answer = &result["structured"];
        assert!(result["status"] == "success" && holds(&contract.success, answer), "{tool}: {result}");
        for field in contract.writes.values().filter(|field| !field.is_empty()) {
            assert!(answer.get(field).is_some(), "{tool} answers with `{field}`: {answer}");
        }
    }
    assert!(!holds("has(answer.path)", &json!({"results": []})), "a condition can fail");
}

/// Returns the milliseconds of a time such as `30s` or `20m`.
fn milliseconds(text: &str) -> u64 {
    let (number, unit) = text.split_at(text.len() - 1);
    number.parse::<u64>().unwrap() * if unit == "m" { 60_000 } else { 1_000 }
}
