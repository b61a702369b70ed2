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

// Shows: X5.2
#[tokio::test]
async fn an_artifact_that_is_json_is_asked_by_pointer() {
    let world = World::new();
    let output = json!({"items": [{"name": "ä".repeat(40), "a/b": 1}, {"name": "two", "ok": true}], "total": 2});
    let id = store_artifact(&world, &Caller::local(), &output.to_string());
    let pointer = async |pointer: &str| world.text("GetArtifact", json!({"id": id, "pointer": pointer})).await;
    assert_eq!(pointer("/items/1/name").await, "two");
    assert_eq!(pointer("/items/0/a~1b").await, "1");
    assert_eq!(pointer("/items/1").await, "{\n  \"name\": \"two\",\n  \"ok\": true\n}");
    assert_eq!(pointer("").await, serde_json::to_string_pretty(&output).expect("JSON"));

    let mut page = world.call("GetArtifact", json!({"id": id, "pointer": "/items/0/name", "length": 5})).await;
    page.structured.as_mut().expect("a place")["id"] = json!("…");
    insta::assert_snapshot!(whole(&page), @r#"
    {
      "status": "success",
      "content": [
        "ää\n[bytes 0 to 4 of 80; read on with `offset` 4]"
      ],
      "structured": {
        "id": "…",
        "pointer": "/items/0/name",
        "kind": "a text",
        "offset": 0,
        "length": 4,
        "next_offset": 4,
        "total_bytes": 80
      },
      "partial": false,
      "error": null
    }
    "#);
    let next = json!({"id": id, "pointer": "/items/0/name", "offset": 76, "length": 9});
    assert_eq!(world.text("GetArtifact", next).await, "ää");
    let far = json!({"id": id, "pointer": "/total", "offset": u64::MAX});
    assert_eq!(world.text("GetArtifact", far).await, "");
}

#[tokio::test]
async fn a_wrong_pointer_is_told_what_is_there() {
    let world = World::new();
    let mut output = json!({"items": [1, 2], "total": 2});
    output["x".repeat(100_000)] = json!(0);
    let id = store_artifact(&world, &Caller::local(), &output.to_string());
    let refusal = async |pointer: &str| world.refusal("GetArtifact", json!({"id": id, "pointer": pointer})).await;
    insta::assert_snapshot!(refusal("/item/0").await, @"
    E3303: the output has no `item`
    (did you mean `items`? it is an object with 3 keys: items, total, …)
    ");
    insta::assert_snapshot!(refusal("/items/2").await, @"
    E3303: `/items` has no `2`
    (it is a list of 2 items, numbered from 0)
    ");
    insta::assert_snapshot!(refusal("/total/x/y").await, @"
    E3303: `/total` has no `x`
    (it is a number, which has nothing in it)
    ");
    insta::assert_snapshot!(refusal("items").await, @"
    E3303: `items` is not a JSON pointer
    (begin with `/`, such as `/items/0/name`; write `~1` for `/` and `~0` for `~` in a key)
    ");
    let text = store_artifact(&world, &Caller::local(), "no JSON");
    let message = world.refusal("GetArtifact", json!({"id": text, "pointer": "/a"})).await;
    assert!(message.starts_with(&format!("E3303: `{text}` is not JSON: expected ident")), "{message}");
    let message = world.refusal("GetArtifact", json!({"id": id, "pointer": "/a", "pattern": "b"})).await;
    assert!(message.starts_with("E3303: `pattern`, `pointer` and `compare` cannot be used together"), "{message}");
    let large = store_artifact(&world, &Caller::local(), &" ".repeat(8 * 1024 * 1024 + 1));
    let message = world.refusal("GetArtifact", json!({"id": large, "pointer": "/a"})).await;
    assert!(message.starts_with(&format!("E3303: `{large}` has 8388609 bytes, and at most 8388608 are")), "{message}");
}

// Shows: X5.2
#[tokio::test]
async fn an_artifact_is_compared_with_an_earlier_one() {
    let world = World::new();
    let store = |text: &str| store_artifact(&world, &Caller::local(), text);
    let (one, two, same) = (store("1\n2\n3\n"), store("1\ntwo\n3\n"), store("1\n2\n3\n"));
    let compare = async |id: &str, with: &str| world.call("GetArtifact", json!({"id": id, "compare": with})).await;
    let changed = compare(&two, &one).await;
    assert_eq!(changed.text(), format!("--- {one}\n+++ {two}\n@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n"));
    assert_eq!(changed.structured, Some(json!({"id": two, "compare": one, "equal": false})));
    let equal = compare(&same, &one).await;
    assert_eq!(equal.text(), "both artifacts have the same 6 bytes");
    assert_eq!(equal.structured, Some(json!({"id": same, "compare": one, "equal": true})));
    let owner = Caller { tenant: Some("acme".into()), permissions: Held::All, ..Caller::local() };
    let theirs = store_artifact(&world, &owner, "secret");
    let message = world.refusal("GetArtifact", json!({"id": one, "compare": theirs})).await;
    assert!(message.starts_with(&format!("E3302: there is no artifact `{theirs}`")), "{message}");
}
