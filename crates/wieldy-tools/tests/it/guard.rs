//! Hidden and protected files: the file tools refuse the same paths as sandboxes do.

use serde_json::json;
use wieldy_core::FileRules;
use wieldy_core::secrets::PLACEHOLDER_MARK;

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

// Shows: B9.2
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
            let message = world.refusal(tool, arguments).await;
            assert!(message.starts_with("E3105: `"), "{tool} {path}: {message}");
            assert!(message.contains("is hidden") && !message.contains(CANARY), "{tool} {path}: {message}");
        }
    }
    for path in SECRETS.into_iter().chain([".ssh", "a", "a/b", "sub", ".config", "folder/id"]) {
        let message = world.refusal("Delete", json!({"path": path, "recursive": true})).await;
        assert!(message.starts_with("E3105: `"), "{path}: {message}");
    }
    for path in SECRETS {
        assert_eq!(world.content(path), format!("token {CANARY}"), "{path}");
    }
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "link"})).await, @"
    E3105: `.env` is hidden, as secrets and the executor's own files are
    (do without it; an operator can show it with `sandbox.shown`)
    ");
}

#[tokio::test]
async fn a_search_does_not_look_into_secrets() {
    let world = with_secrets();
    let arguments = json!({"pattern": "token", "hidden": true, "ignored": true});
    let found = world.call("Search", arguments).await;
    assert!(!whole(&found).contains(CANARY), "{found:?}");
    assert!(whole(&found).contains("plain.txt") && whole(&found).contains(".env.example"), "{found:?}");
    // The names are not secret: a program sees them too.
    let listed = world.call("List", json!({"path": ".", "hidden": true, "ignored": true})).await;
    assert!(whole(&listed).contains(".env"), "{listed:?}");
}

#[tokio::test]
async fn files_shown_by_rule_are_read_and_files_hidden_by_rule_are_not() {
    let rules = FileRules { shown: vec![".env".into()], hidden: vec!["keys".into()], ..FileRules::default() };
    let world = with_secrets().ruled(rules);
    world.put("keys/one", CANARY);
    assert!(world.call("Read", json!({"path": ".env"})).await.is_success());
    let message = world.refusal("Read", json!({"path": "keys/one"})).await;
    assert!(message.starts_with("E3105: `keys/one` is hidden"), "{message}");
}

#[tokio::test]
async fn a_missing_secret_can_be_written_and_not_read_back() {
    let world = World::new();
    for path in [".env", "new/.npmrc", "sub/.ssh"] {
        let made = world.call("Write", json!({"path": path, "content": "a=1", "create_folders": true})).await;
        assert!(made.is_success(), "{path}: {made:?}");
        let message = world.refusal("Read", json!({"path": path})).await;
        assert!(message.starts_with("E3105"), "{path}: {message}");
    }
}

#[tokio::test]
async fn protected_files_are_neither_changed_nor_made() {
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
        let message = world.refusal("Write", write).await;
        assert!(message.starts_with(&format!("E3105: `{path}` is protected")), "{path}: {message}");
    }
    for path in [".git", ".git/config", ".envrc", "conf", "conf/my.toml"] {
        let message = world.refusal("Delete", json!({"path": path, "recursive": true})).await;
        assert!(message.starts_with("E3105"), "{path}: {message}");
    }
    assert_eq!(world.names(), before, "nothing was made on the way");
    insta::assert_snapshot!(world.refusal("Edit", json!({"path": ".git/config", "old": "a", "new": "b"})).await, @"
    E3105: `.git/config` is protected, because programs outside the sandbox execute it or read settings from it
    (ask a person to change it; you can read it)
    ");
    // Protected files can be read, and files with similar names can be changed.
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
        let message = world.refusal("Write", json!({"path": path, "content": "mine", "create_folders": true})).await;
        assert!(message.starts_with("E3105"), "{path}: {message}");
    }
}

#[tokio::test]
async fn link_targets_follow_the_rules_of_their_links() {
    let rules = FileRules { hidden: vec!["plink".into()], ..FileRules::default() };
    let world = World::new().ruled(rules);
    world.put("config/prod.env", CANARY).put("private/a", CANARY).put("deep/secret", CANARY);
    world.put("config/mcp.json", "").put("editor/x", "").put("githooks/x", "").put(".git/HEAD", "").put("sub/x", "");
    world.link(".env", "config/prod.env").link("plink", "private").link("sub/.netrc", "../deep/secret");
    world.link(".mcp.json", "first").link("first", "config/mcp.json").link(".vscode", "editor");
    world.link(".git/hooks", "../githooks");
    for path in [".env", "config/prod.env", "plink/a", "private/a", "sub/.netrc"] {
        let message = world.refusal("Read", json!({"path": path})).await;
        assert!(message.starts_with("E3105"), "{path}: {message}");
    }
    let found = world.call("Search", json!({"pattern": "canary", "path": "config", "hidden": true})).await;
    assert!(!whole(&found).contains(CANARY), "{found:?}");
    let written = [
        ".mcp.json",
        "first",
        "config/mcp.json",
        ".vscode/tasks.json",
        "editor/tasks.json",
        ".git/hooks/pre-commit",
        "githooks/pre-commit",
        "config/prod.env",
        "sub/.netrc",
    ];
    for path in written {
        let message = world.refusal("Write", json!({"path": path, "content": "mine"})).await;
        assert!(message.starts_with("E3105"), "{path}: {message}");
    }
    // The links on the path and the folders around them cannot be deleted either.
    for path in ["first", ".mcp.json", ".git/hooks", "plink", "config", "githooks"] {
        let message = world.refusal("Delete", json!({"path": path, "recursive": true})).await;
        assert!(message.starts_with("E3105"), "{path}: {message}");
    }
    assert!(world.call("Write", json!({"path": "config/other.json", "content": "mine"})).await.is_success());
}

#[tokio::test]
async fn files_in_a_hidden_folder_are_not_even_named() {
    let world = with_secrets();
    let message = world.refusal("Read", json!({"path": ".ssh/ip"})).await;
    assert!(!message.contains(".ssh/id"), "{message}");
    for (tool, arguments) in [
        ("List", json!({"path": ".ssh", "hidden": true, "ignored": true})),
        ("Glob", json!({"path": "folder", "pattern": "**", "hidden": true, "ignored": true})),
        ("Search", json!({"path": ".ssh", "pattern": "token", "hidden": true, "ignored": true})),
    ] {
        let message = world.refusal(tool, arguments).await;
        assert!(message.starts_with("E3105: `.ssh` is hidden"), "{tool}: {message}");
    }
    for (tool, arguments) in [
        ("List", json!({"path": ".", "depth": 5, "hidden": true, "ignored": true})),
        ("Glob", json!({"pattern": "**", "hidden": true, "ignored": true})),
    ] {
        let found = whole(&world.call(tool, arguments).await);
        assert!(!found.contains(".ssh/id") && found.contains("plain.txt"), "{tool}: {found}");
    }
}

#[tokio::test]
async fn no_folder_is_made_for_a_path_that_leads_back() {
    let world = World::new();
    for path in ["new/../wieldy.toml/x", "new/../.git/hooks/x", "new/../x"] {
        let result = world.call("Write", json!({"path": path, "content": "mine", "create_folders": true})).await;
        assert!(!result.is_success(), "{path}");
        assert_eq!(world.names(), [""; 0], "{path}");
    }
}

/// Makes the placeholders that a sandbox puts into a workspace.
fn with_placeholders(world: &World) {
    let mark = |path: &str, content: &str| {
        let value = content.as_bytes();
        let set = rustix::fs::setxattr(world.path(path), PLACEHOLDER_MARK, value, rustix::fs::XattrFlags::CREATE);
        set.expect("the file system has extended attributes");
    };
    for (path, content) in
        [("wieldy.toml", ""), (".mcp.json", "{}\n"), ("refs", ""), ("commondir", ".\n"), (".git/commondir", ".\n")]
    {
        world.put(path, content);
        mark(path, content);
    }
    for folder in [".vscode", ".git/hooks", ".git"] {
        std::fs::create_dir_all(world.path(folder)).expect("a new folder");
        mark(folder, "");
    }
}

#[tokio::test]
async fn placeholders_of_sandboxes_are_neither_shown_nor_read() {
    let world = World::new();
    world.put("plain.txt", "token");
    with_placeholders(&world);
    let everything = json!({"path": ".", "hidden": true, "ignored": true, "depth": 9});
    assert_eq!(world.text("List", everything).await, "plain.txt  5 B");
    assert_eq!(world.text("Glob", json!({"pattern": "**", "hidden": true, "ignored": true})).await, "plain.txt");
    for path in ["wieldy.toml", ".mcp.json", "refs", "commondir", ".git/commondir"] {
        let message = world.refusal("Read", json!({"path": path})).await;
        assert!(message.starts_with(&format!("E3302: there is no `{path}`")), "{message}");
    }
    for path in [".vscode", ".git", ".git/hooks"] {
        let message = world.refusal("List", json!({"path": path})).await;
        assert!(message.starts_with(&format!("E3302: there is no `{path}`")), "{message}");
    }
    // A placeholder that a person has changed is shown from then on.
    world.put(".mcp.json", "{\"mcpServers\": {}}").put(".vscode/tasks.json", "{}");
    let everything = json!({"path": ".", "hidden": true, "ignored": true, "depth": 1});
    assert_eq!(world.text("List", everything).await, ".mcp.json  18 B\n.vscode/\nplain.txt  5 B");
}

#[tokio::test]
async fn the_file_tools_make_no_bare_repository() {
    let world = World::new();
    with_placeholders(&world);
    for path in ["HEAD", "objects/info", "config"] {
        world.call("Write", json!({"path": path, "content": "x", "create_folders": true})).await;
    }
    let message = world.refusal("Write", json!({"path": "refs/heads/x", "content": "x", "create_folders": true})).await;
    assert!(message.starts_with("E3105: `refs/heads/x`"), "{message}");
    // The same without a sandbox's placeholder. Folders of these names elsewhere in the project are allowed.
    std::fs::remove_file(world.path("refs")).unwrap();
    let message = world.refusal("Write", json!({"path": "refs/heads/x", "content": "x", "create_folders": true})).await;
    assert!(message.starts_with("E3105: `refs/heads/x`"), "{message}");
    world.call("Write", json!({"path": "docs/refs/heads", "content": "x", "create_folders": true})).await;
}

/// A running sandbox relies on these names: if one were deleted, another file could take it.
#[tokio::test]
async fn the_file_tools_leave_the_folders_of_a_bare_repository_where_they_are() {
    for name in ["refs", "objects"] {
        let world = World::new();
        std::fs::create_dir(world.path("refs")).unwrap();
        std::fs::write(world.path("objects"), "").unwrap();
        let message = world.refusal("Delete", json!({"path": name, "recursive": true})).await;
        assert!(message.starts_with(&format!("E3105: `{name}`")), "{message}");
        assert!(world.path(name).exists());
        // The twin: files in the folder are the project's own.
        world.call("Write", json!({"path": "refs/book.md", "content": "x"})).await;
        world.call("Delete", json!({"path": "refs/book.md"})).await;
        assert!(!world.path("refs/book.md").exists());
    }
}

/// Git reads `objects`, `refs` and `config` from the folder that a `commondir` file names.
#[tokio::test]
async fn the_file_tools_make_no_repository_whose_parts_are_in_another_folder() {
    let world = World::new();
    with_placeholders(&world);
    for path in ["HEAD", "sub/objects/x", "sub/refs/heads/x", "sub/config", "config.worktree", "sub/commondir"] {
        let made = world.call("Write", json!({"path": path, "content": "x", "create_folders": true})).await;
        assert!(made.is_success(), "{path}: {made:?}");
    }
    // With a sandbox's placeholder, and without one.
    for folders in [&["objects"][..], &["refs"], &["refs", "objects"]] {
        for path in ["commondir", "commondir/x"] {
            let write = json!({"path": path, "content": "sub", "create_folders": true});
            let message = world.refusal("Write", write).await;
            assert!(message.starts_with(&format!("E3105: `{path}`")), "{message}");
        }
        for name in ["commondir", "refs"] {
            std::fs::remove_file(world.path(name)).ok();
        }
        folders.iter().for_each(|folder| std::fs::create_dir_all(world.path(folder)).unwrap());
    }
    world.put("commondir", "sub");
    let message = world.refusal("Delete", json!({"path": "commondir"})).await;
    assert!(message.starts_with("E3105: `commondir`"), "{message}");
    // The twin: files in a person's own folder of this name are the project's.
    let world = World::new();
    std::fs::create_dir(world.path("commondir")).unwrap();
    assert!(world.call("Write", json!({"path": "commondir/notes.md", "content": "x"})).await.is_success());
    let message = world.refusal("Delete", json!({"path": "commondir", "recursive": true})).await;
    assert!(message.starts_with("E3105: `commondir`"), "{message}");
}
