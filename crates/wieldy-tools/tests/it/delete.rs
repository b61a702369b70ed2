//! `Delete`: files, links, folders, and never the workspace.

use serde_json::json;

use crate::world::{World, whole};

#[tokio::test]
async fn a_file_a_link_and_an_empty_folder_are_deleted() {
    let world = World::new();
    world.put("a.txt", "a").put("kept.txt", "kept").link("link", "kept.txt");
    std::fs::create_dir(world.path("empty")).expect("a folder");
    for path in ["a.txt", "link", "empty/"] {
        assert!(world.call("Delete", json!({"path": path})).await.is_success(), "{path}");
    }
    assert_eq!(world.names(), ["kept.txt"], "of the link only the link goes");
    insta::assert_snapshot!(world.refusal("DeleteFile", json!({"path": "kept.text"})).await, @"
    E3302: there is no `kept.text`
    (did you mean `kept.txt`?)
    ");
}

#[tokio::test]
async fn a_full_folder_goes_only_when_that_is_said() {
    let world = World::new();
    world.put("a/b/c.txt", "").put("a/d.txt", "");
    insta::assert_snapshot!(world.refusal("Delete", json!({"path": "a"})).await, @"
    E3303: `a` is a folder that is not empty
    (set `recursive` to delete it with all that is in it)
    ");
    let result = world.call("Delete", json!({"path": "a", "recursive": true})).await;
    insta::assert_snapshot!(whole(&result), @r#"
    {
      "status": "success",
      "content": [
        "deleted `a/`, 4 entries"
      ],
      "structured": {
        "path": "a",
        "removed": 4
      },
      "partial": false,
      "error": null
    }
    "#);
    assert_eq!(world.names(), [""; 0]);
}

#[tokio::test]
async fn the_workspace_itself_is_never_deleted() {
    let world = World::new();
    world.put("a/b.txt", "");
    for path in [".", "./", "a/..", "a/../.", world.path("").to_str().expect("a path")] {
        let message = world.refusal("Delete", json!({"path": path, "recursive": true})).await;
        assert!(message.starts_with("E3303: `"), "{path}: {message}");
    }
    let message = world.refusal("Delete", json!({"path": "a/../../ws", "recursive": true})).await;
    assert!(message.starts_with("E3105"), "{message}");
    assert_eq!(world.names(), ["a"]);
}

#[tokio::test]
async fn links_in_a_deleted_folder_are_not_followed() {
    let world = World::new();
    world.put("a/b.txt", "").link("a/out", world.outside("")).link("a/up", "..").put("kept.txt", "");
    assert!(world.call("Delete", json!({"path": "a", "recursive": true})).await.is_success());
    assert_eq!(world.names(), ["kept.txt"]);
    world.assert_outside_untouched();
}
