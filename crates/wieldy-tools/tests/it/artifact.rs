//! `GetArtifact`: stored outputs, in pages and by pattern.

use serde_json::json;
use wieldy_core::{Caller, Held};

use crate::world::{World, whole};

fn store_artifact(world: &World, owner: &Caller, text: &str) -> String {
    let mut writer = world.executor().artifacts().create(owner, None, u64::MAX).expect("memory");
    writer.write(text.as_bytes()).expect("memory");
    writer.id().to_string()
}

// Shows: X5.1
#[tokio::test]
async fn an_artifact_is_read_in_pages_that_join_without_a_gap() {
    let world = World::new();
    let text = "grüße ".repeat(100);
    let id = store_artifact(&world, &Caller::local(), &text);
    let (mut offset, mut read) = (json!(0), String::new());
    while !offset.is_null() {
        let result = world.call("GetArtifact", json!({"id": id, "offset": offset, "length": 50})).await;
        let page = result.structured.clone().expect("a place");
        let shown = result.text();
        read.push_str(shown.split("\n[bytes").next().expect("the text"));
        offset = page["next_offset"].clone();
    }
    assert_eq!(read, text);
    let far = world.call("GetArtifact", json!({"id": id, "offset": 1_000_000})).await;
    assert_eq!((far.is_success(), far.text()), (true, String::new()));
}

// Shows: X5.1
#[tokio::test]
async fn an_artifact_is_searched_by_line() {
    let world = World::new();
    let id = store_artifact(&world, &Caller::local(), "one\ntwo\nthree two\n");
    let mut result = world.call("GetArtifact", json!({"id": id, "pattern": "two", "limit": 1})).await;
    result.structured.as_mut().expect("matches")["id"] = json!("…");
    insta::assert_snapshot!(whole(&result), @r#"
    {
      "status": "success",
      "content": [
        "2:two\n[only the first 1 matching lines]"
      ],
      "structured": {
        "id": "…",
        "matches": [
          {
            "line": 2,
            "offset": 4,
            "text": "two"
          }
        ],
        "count": 1,
        "cut": true
      },
      "partial": true,
      "error": null
    }
    "#);
    assert_eq!(world.text("GetArtifact", json!({"id": id, "pattern": "four"})).await, "no matches");
    insta::assert_snapshot!(world.refusal("GetArtifact", json!({"id": id, "pattern": "("})).await, @r"
    E3303: the pattern is not a regular expression: regex parse error:
        (
        ^
    error: unclosed group
    (escape special characters with a backslash, such as `\(`)
    ");
}

#[tokio::test]
async fn an_artifact_of_another_tenant_is_not_there() {
    let world = World::new();
    let owner = Caller { tenant: Some("acme".into()), permissions: Held::All, ..Caller::local() };
    let id = store_artifact(&world, &owner, "secret");
    let message = world.refusal("GetArtifact", json!({"id": id})).await;
    assert!(message.starts_with(&format!("E3302: there is no artifact `{id}`")), "{message}");
    insta::assert_snapshot!(world.refusal("GetArtifact", json!({"id": "artifact:x"})).await, @"
    E3303: `artifact:x` is not an artifact's id
    (take the id from the result of the call that made it; old artifacts are removed)
    ");
}
