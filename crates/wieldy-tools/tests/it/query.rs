//! `QueryVFS`: files, folders and the caller's own artifacts by their properties.

use std::fs::{self, File};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use regex::Regex;
use serde_json::json;
use wieldy_core::{Call, Caller};

use crate::world::{World, whole};

/// Creates a workspace with files of known times.
fn project() -> World {
    let world = World::new();
    world
        .put(".gitignore", "*.log\n")
        .put(".env", "TOKEN=needle")
        .put("a.log", "needle")
        .put("big.txt", "x".repeat(2000))
        .put("src/deep/mod.rs", "// Needle\n")
        .put("src/main.rs", "fn main() { needle() }\n")
        .put("binary", b"\0needle")
        .link("link", "src");
    for (path, seconds) in [("big.txt", 1000), ("src/main.rs", 2000), ("src/deep/mod.rs", 3000), ("binary", 0)] {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + seconds);
        File::open(world.path(path)).expect("a file").set_modified(time).expect("our own file");
    }
    world
}

/// Stores an artifact as from a call of this caller in this workspace.
fn store_artifact(world: &World, owner: &Caller, workspace: Option<&str>, text: &str) -> String {
    let mut writer = world.executor().artifacts().create(owner, workspace, u64::MAX).expect("memory");
    writer.write(text.as_bytes()).expect("memory");
    writer.id().to_string()
}

fn without_times(text: &str) -> String {
    Regex::new(r"  20(2[4-9]|[3-9]\d)-[-:T0-9]+Z").expect("a pattern").replace_all(text, "  [now]").into_owned()
}

#[tokio::test]
async fn files_folders_and_artifacts_come_in_one_answer() {
    let world = project();
    let workspace = world.path("").canonicalize().unwrap();
    let id = store_artifact(&world, &Caller::local(), workspace.to_str(), "needle in an artifact");
    let text = world.text("QueryVFS", json!({})).await;
    insta::assert_snapshot!(without_times(&text.replace(&id, "artifact:[id]")), @"
    big.txt  2000 bytes  2023-11-14T22:30:00Z
    binary  7 bytes  2023-11-14T22:13:20Z
    src/  [now]
    src/deep/  [now]
    src/deep/mod.rs  10 bytes  2023-11-14T23:03:20Z
    src/main.rs  23 bytes  2023-11-14T22:46:40Z
    artifact:[id]  21 bytes  [now]
    ");
    let result = world.call("QueryVFS", json!({"glob": "*.rs", "max_bytes": 15})).await;
    insta::assert_snapshot!(whole(&result), @r#"
    {
      "status": "success",
      "content": [
        "src/deep/mod.rs  10 bytes  2023-11-14T23:03:20Z"
      ],
      "structured": {
        "finds": [
          {
            "kind": "file",
            "path": "src/deep/mod.rs",
            "bytes": 10,
            "changed_at": "2023-11-14T23:03:20Z"
          }
        ],
        "count": 1,
        "cut": false
      },
      "partial": false,
      "error": null
    }
    "#);
}

#[tokio::test]
async fn each_condition_narrows_the_answer() {
    let world = project();
    let workspace = world.path("").canonicalize().unwrap();
    let id = store_artifact(&world, &Caller::local(), workspace.to_str(), "a needle\n");
    let query = async |arguments| {
        let result = world.call("QueryVFS", arguments).await;
        let finds = result.structured.unwrap()["finds"].clone();
        let paths: Vec<String> =
            finds.as_array().unwrap().iter().map(|find| find["path"].as_str().unwrap().to_owned()).collect();
        paths.join(" ").replace(&id, "artifact")
    };
    assert_eq!(query(json!({"kind": "folder"})).await, "src src/deep");
    assert_eq!(query(json!({"kind": "artifact"})).await, "artifact");
    assert_eq!(query(json!({"kind": "file"})).await, "big.txt binary src/deep/mod.rs src/main.rs");
    assert_eq!(query(json!({"text": "needle"})).await, "src/deep/mod.rs src/main.rs artifact");
    assert_eq!(query(json!({"text": "Needle"})).await, "src/deep/mod.rs");
    assert_eq!(query(json!({"text": "needle()"})).await, "src/main.rs");
    assert_eq!(query(json!({"min_bytes": 1000})).await, "big.txt");
    assert_eq!(
        query(json!({"changed_since": "2023-11-14T22:46:40Z", "kind": "file"})).await,
        "src/deep/mod.rs src/main.rs"
    );
    assert_eq!(query(json!({"changed_since": "1h", "kind": "artifact"})).await, "artifact");
    assert_eq!(query(json!({"glob": "src/*"})).await, "src/deep src/main.rs");
    assert_eq!(query(json!({"glob": "artifact:*"})).await, "artifact");
    assert_eq!(query(json!({"path": "src", "glob": "*.rs"})).await, "src/deep/mod.rs src/main.rs");
    assert_eq!(query(json!({"glob": "a.log", "ignored": true})).await, "a.log");
    assert_eq!(query(json!({"min_bytes": 5000})).await, "");
    // `GetArtifact` accepts the id.
    assert_eq!(world.text("GetArtifact", json!({"id": id})).await, "a needle\n");
}

#[tokio::test]
async fn the_limit_is_reported() {
    let world = project();
    let result = world.call("QueryVFS", json!({"kind": "folder", "limit": 1})).await;
    assert_eq!((without_times(&result.text()), result.partial), ("src/  [now]\n[only the first 1]".into(), true));
    let result = world.call("QueryVFS", json!({"kind": "folder", "limit": 2})).await;
    assert!(!result.partial, "{}", result.text());
}

#[tokio::test]
async fn only_own_artifacts_are_listed() {
    let world = project();
    let workspace = world.path("").canonicalize().unwrap();
    let here = workspace.to_str();
    let caller = |agent: &str, tenant: &str, user: &str| Caller {
        tenant: Some(tenant.into()),
        user: Some(user.into()),
        agent: agent.into(),
        ..Caller::local()
    };
    let ada = caller("ada", "acme", "eve");
    let id = store_artifact(&world, &ada, here, "own");
    store_artifact(&world, &ada, Some("/elsewhere"), "of another workspace");
    store_artifact(&world, &ada, None, "of no known workspace");
    let query = async |caller: Caller| {
        let call = Call::new("QueryVFS", json!({"kind": "artifact"})).by(Arc::new(caller));
        without_times(&world.executor().call(call).await.text()).replace(&id, "own")
    };
    assert_eq!(query(ada).await, "own  3 bytes  [now]");
    for other in [caller("bob", "acme", "eve"), caller("ada", "other", "eve"), caller("ada", "acme", "mallory")] {
        assert_eq!(query(other).await, "no matches");
    }
    assert_eq!(query(Caller::local()).await, "no matches");
}

#[tokio::test]
async fn hidden_files_are_not_even_named() {
    let world = project();
    fs::create_dir(world.path("private")).unwrap();
    let world = world.ruled(wieldy_core::FileRules { hidden: vec!["private".into()], ..Default::default() });
    world.put("private/plan.txt", "needle");
    let text = world.text("QueryVFS", json!({"hidden": true, "ignored": true})).await;
    assert!(text.contains("a.log") && text.contains(".gitignore"), "{text}");
    assert!(!text.contains("private") && !text.contains(".env"), "{text}");
    let text = world.text("QueryVFS", json!({"hidden": true, "ignored": true, "text": "needle"})).await;
    assert!(!text.contains("private") && !text.contains(".env") && !text.contains("could not"), "{text}");
}

#[tokio::test]
async fn mistakes_are_reported() {
    let world = project();
    insta::assert_snapshot!(world.refusal("QueryVFS", json!({"changed_since": "yesterday"})).await, @"E3303: `yesterday` is neither a time such as `2026-11-16T08:00:00Z` nor an age such as `2h`");
    insta::assert_snapshot!(world.refusal("QueryVFS", json!({"kind": "vault"})).await, @r#"
    E3002: `/kind`: the value is not one of `any`, `file`, `folder`, `artifact`
    (correct the arguments to fit the tool's input schema and call again)
    "#);
    insta::assert_snapshot!(world.refusal("QueryVFS", json!({"glob": "a[b"})).await, @"
    E3303: `**/a[b` is not a pattern for paths: unclosed character class; missing ']'
    (write it like `src/**/*.rs`, and a special character itself as `[*]`)
    ");
    insta::assert_snapshot!(world.refusal("QueryVFS", json!({"path": "../outside"})).await, @"
    E3105: `../outside` leads outside the workspace
    (give a path relative to the workspace, such as `src/main.rs`; paths outside it cannot be reached)
    ");
}
