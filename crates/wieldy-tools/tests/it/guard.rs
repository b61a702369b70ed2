//! Secrets and what others execute: the file tools leave alone what programs in sandboxes cannot touch.

use serde_json::json;
use wieldy_core::FileRules;

use crate::world::{CANARY, World, whole};

const SECRETS: [&str; 5] = [".env", "sub/.env.local", "a/b/c/d/e/.netrc", ".ssh/id", ".config/gh/hosts.yml"];

fn with_secrets() -> World {
    let world = World::new();
    for path in SECRETS {
        world.put(path, format!("token {CANARY}"));
    }
    world.link("link", ".env").link("folder", ".ssh");
    world.put("plain.txt", "token").put(".env.example", "token");
    world
}

#[tokio::test]
async fn secrets_are_neither_read_nor_changed() {
    let world = with_secrets();
    for path in SECRETS.into_iter().chain(["link", "folder/id", "./sub/../.env"]) {
        for (tool, arguments) in [
            ("Read", json!({"path": path})),
            ("Search", json!({"path": path, "pattern": "token"})),
            ("Write", json!({"path": path, "content": "mine"})),
            ("Edit", json!({"path": path, "old": "token", "new": "mine"})),
        ] {
            let told = world.refusal(tool, arguments).await;
            assert!(told.starts_with("E3105: `"), "{tool} {path}: {told}");
            assert!(told.contains("is hidden") && !told.contains(CANARY), "{tool} {path}: {told}");
        }
    }
    for path in SECRETS.into_iter().chain([".ssh", "a", "a/b", "sub", ".config", "folder/id"]) {
        let told = world.refusal("Delete", json!({"path": path, "recursive": true})).await;
        assert!(told.starts_with("E3105: `"), "{path}: {told}");
    }
    for path in SECRETS {
        assert_eq!(world.content(path), format!("token {CANARY}"), "{path}");
    }
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "link"})).await, @"
    E3105: `.env` is hidden, as secrets and the executor's own files are
    (do without it; an operator shows a secret by `sandbox.shown`)
    ");
}

#[tokio::test]
async fn secrets_are_not_found_by_what_is_in_them() {
    let world = with_secrets();
    let arguments = json!({"pattern": "token", "hidden": true, "ignored": true});
    let found = world.call("Search", arguments).await;
    assert!(!whole(&found).contains(CANARY), "{found:?}");
    assert!(whole(&found).contains("plain.txt") && whole(&found).contains(".env.example"), "{found:?}");
    // Their names are no secret: a program sees them, too.
    let listed = world.call("List", json!({"path": ".", "hidden": true, "ignored": true})).await;
    assert!(whole(&listed).contains(".env"), "{listed:?}");
}

#[tokio::test]
async fn what_is_shown_by_rule_is_read_and_what_is_hidden_by_rule_is_not() {
    let rules = FileRules { shown: vec![".env".into()], hidden: vec!["keys".into()], ..FileRules::default() };
    let world = with_secrets().ruled(rules);
    world.put("keys/one", CANARY);
    assert!(world.call("Read", json!({"path": ".env"})).await.is_success());
    let told = world.refusal("Read", json!({"path": "keys/one"})).await;
    assert!(told.starts_with("E3105: `keys/one` is hidden"), "{told}");
}

#[tokio::test]
async fn what_is_no_secret_yet_can_be_written() {
    let world = World::new();
    for path in [".env", "new/.npmrc", "sub/.ssh"] {
        let made = world.call("Write", json!({"path": path, "content": "a=1", "create_folders": true})).await;
        assert!(made.is_success(), "{path}: {made:?}");
        let told = world.refusal("Read", json!({"path": path})).await;
        assert!(told.starts_with("E3105"), "{path}: {told}");
    }
}

#[tokio::test]
async fn what_others_execute_is_not_changed_and_not_made() {
    let own = |world: &World| vec![world.path("state").canonicalize().unwrap_or_else(|_| world.path("state"))];
    let world = World::new();
    let rules = FileRules { own: own(&world), protected: vec!["conf/my.toml".into()], ..FileRules::default() };
    let world = world.ruled(rules);
    world.put(".git/HEAD", "").put(".git/config", "").put("real/config", "").put(".envrc", "").put("conf/my.toml", "");
    let paths = [
        "wieldy.toml",
        ".wieldy/tools/new.toml",
        ".vscode/tasks.json",
        ".mcp.json",
        ".git/hooks/pre-commit",
        ".git/config",
        ".git/modules/one/hooks/x",
        ".envrc",
        "conf/my.toml",
        "state/history.db",
    ];
    let before = world.names();
    for path in paths {
        let write = json!({"path": path, "content": "mine", "create_folders": true});
        let told = world.refusal("Write", write).await;
        assert!(told.starts_with(&format!("E3105: `{path}` is protected")), "{path}: {told}");
    }
    for path in [".git", ".git/config", ".envrc", "conf", "conf/my.toml"] {
        let told = world.refusal("Delete", json!({"path": path, "recursive": true})).await;
        assert!(told.starts_with("E3105"), "{path}: {told}");
    }
    assert_eq!(world.names(), before, "nothing was made on the way");
    insta::assert_snapshot!(world.refusal("Edit", json!({"path": ".git/config", "old": "a", "new": "b"})).await, @"
    E3105: `.git/config` is protected, as what others execute or take orders from is
    (leave it to the people who work here; it can be read)
    ");
    // What they say can be read, and what only looks like it can be changed.
    assert!(world.call("Read", json!({"path": ".git/config"})).await.is_success());
    for path in [".git/info/exclude", ".gitignore", ".husky/pre-commit", "sub/wieldy.toml"] {
        let written = world.call("Write", json!({"path": path, "content": "mine", "create_folders": true})).await;
        assert!(written.is_success(), "{path}: {written:?}");
    }
}

#[tokio::test]
async fn a_repository_behind_a_link_is_protected_as_well() {
    let world = World::new();
    world.put("real/config", "").link(".git", "real");
    for path in ["real/hooks/pre-commit", ".git/hooks/pre-commit", ".git/config"] {
        let told = world.refusal("Write", json!({"path": path, "content": "mine", "create_folders": true})).await;
        assert!(told.starts_with("E3105"), "{path}: {told}");
    }
}
