//! `Write`: new and replaced content, whole or not at all.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use serde_json::json;

use crate::world::{World, whole};

#[tokio::test]
async fn a_new_file_is_written_with_the_folders_it_needs() {
    let world = World::new();
    let result = world.call("Write", json!({"path": "a/b/c.txt", "content": "hello\n"})).await;
    insta::assert_snapshot!(whole(&result), @r#"
    {
      "status": "success",
      "content": [
        "wrote `a/b/c.txt`, 6 bytes (new)"
      ],
      "structured": {
        "path": "a/b/c.txt",
        "bytes": 6,
        "created": true,
        "hash": "8e4c7c1b99dbfd50e7a95185fead5ee1448fa904a2fdd778eaf5f2dbfd629a99",
        "diff": "--- /dev/null\n+++ a/b/c.txt\n@@ -0,0 +1 @@\n+hello\n"
      },
      "partial": false,
      "error": null
    }
    "#);
    assert_eq!(world.content("a/b/c.txt"), "hello\n");
    assert_eq!(world.names(), ["a"]);
    let message = world.refusal("Write", json!({"path": "x/y.txt", "content": "", "create_folders": false})).await;
    insta::assert_snapshot!(message, @"
    E3302: there is no folder for `x/y.txt`
    (set `create_folders` to make the folders on the way)
    ");
    assert_eq!(world.names(), ["a"]);
}

#[tokio::test]
async fn a_replaced_file_keeps_its_permissions_and_shows_what_changed() {
    let world = World::new();
    world.put("run.sh", "#!/bin/sh\necho one\n");
    fs::set_permissions(world.path("run.sh"), fs::Permissions::from_mode(0o4751)).expect("it is ours");
    let result = world.call("WriteFile", json!({"path": "run.sh", "content": "#!/bin/sh\necho two\n"})).await;
    insta::assert_snapshot!(whole(&result), @r#"
    {
      "status": "success",
      "content": [
        "wrote `run.sh`, 19 bytes\n\n--- run.sh\n+++ run.sh\n@@ -1,2 +1,2 @@\n #!/bin/sh\n-echo one\n+echo two\n"
      ],
      "structured": {
        "path": "run.sh",
        "bytes": 19,
        "created": false,
        "hash": "3e4fe972794087113b24f0b42226bd029aa9a7df5e89d63acf9c35fb3a96c5a1",
        "diff": "--- run.sh\n+++ run.sh\n@@ -1,2 +1,2 @@\n #!/bin/sh\n-echo one\n+echo two\n"
      },
      "partial": false,
      "error": null
    }
    "#);
    let mode = fs::metadata(world.path("run.sh")).expect("there").mode() & 0o7777;
    assert_eq!(mode, 0o751, "all but the right to run as its owner");
    let same = world.text("Write", json!({"path": "run.sh", "content": "#!/bin/sh\necho two\n"})).await;
    assert_eq!(same, "wrote `run.sh`, 19 bytes (unchanged)");
}

#[tokio::test]
async fn a_new_file_has_the_permissions_of_any_new_file() {
    let world = World::new();
    world.put("twin", "");
    world.text("Write", json!({"path": "new", "content": ""})).await;
    let mode = |path| fs::metadata(world.path(path)).expect("there").mode();
    assert_eq!(mode("new"), mode("twin"));
}

#[tokio::test]
async fn a_write_can_demand_what_is_there() {
    let world = World::new();
    world.put("a.txt", "old");
    let hash = blake3::hash(b"old").to_string();
    world.text("Write", json!({"path": "a.txt", "content": "new", "expect_hash": hash})).await;
    let message = world.refusal("Write", json!({"path": "a.txt", "content": "newer", "expect_hash": hash})).await;
    insta::assert_snapshot!(message, @"
    E3303: `a.txt` is not what was expected: its hash is b20ab0a020a48d349e0c64d109c441f87c9bc43d49fc701c4a5f6f1b16aa4e32
    (read it again, then repeat the change on the new content)
    ");
    assert_eq!(world.content("a.txt"), "new");
    let message = world.refusal("Write", json!({"path": "b.txt", "content": "new", "expect_hash": hash})).await;
    insta::assert_snapshot!(message, @"
    E3303: `b.txt` is not what was expected: it is not there
    (read it again, then repeat the change on the new content)
    ");
}

#[tokio::test]
async fn a_link_within_the_workspace_is_written_through() {
    let world = World::new();
    world.put("real/a.txt", "old").link("a.txt", "real/a.txt").link("folder", "real");
    world.text("Write", json!({"path": "a.txt", "content": "new"})).await;
    assert_eq!(world.content("real/a.txt"), "new");
    assert!(world.path("a.txt").is_symlink(), "the link stays a link");
    world.text("Write", json!({"path": "folder/b.txt", "content": "b"})).await;
    assert_eq!(world.content("real/b.txt"), "b");
    world.link("dangling", "nowhere");
    insta::assert_snapshot!(world.refusal("Write", json!({"path": "dangling", "content": ""})).await, @"
    E3303: `dangling` is a symbolic link to a path that does not exist
    (name the file that you mean, or delete the link first)
    ");
}

#[tokio::test]
async fn a_folder_is_not_written_over() {
    let world = World::new();
    world.put("a/b.txt", "");
    for path in ["a", "a/", "new/", ".", "a/..", "a/b.txt/c.txt"] {
        let message = world.refusal("Write", json!({"path": path, "content": "x"})).await;
        assert!(message.starts_with("E3303"), "{path}: {message}");
    }
    assert_eq!(world.names(), ["a"]);
}
