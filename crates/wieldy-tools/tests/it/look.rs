//! `List` and `Glob`: the entries in order, without hidden or ignored ones.

use serde_json::json;
use wieldy_core::{Call, Caller};

use crate::world::{World, whole};

fn project() -> World {
    let world = World::new();
    world
        .put(".gitignore", "target/\n*.log\n!keep.log\n/only-here.txt\n")
        .put(".hidden", "")
        .put(".git/config", "")
        .put("src/main.rs", "fn main() {}\n")
        .put("src/deep/er/mod.rs", "")
        .put("src/only-here.txt", "")
        .put("src/.gitignore", "deep/er/*.tmp\n!wanted.log\n")
        .put("src/deep/er/x.tmp", "")
        .put("src/wanted.log", "")
        .put("target/debug/out", "")
        .put("a.log", "")
        .put("keep.log", "x".repeat(2000))
        .put("only-here.txt", "")
        .put("späße.md", "")
        .link("link", "src");
    world
}

#[tokio::test]
async fn a_folder_is_listed_in_order_with_sizes() {
    let world = project();
    let result = world.call("List", json!({})).await;
    insta::assert_snapshot!(whole(&result), @r#"
    {
      "status": "success",
      "content": [
        "keep.log  2.0 KiB\nlink  (link)\nspäße.md  0 B\nsrc/"
      ],
      "structured": {
        "path": ".",
        "entries": [
          {
            "path": "keep.log",
            "kind": "file",
            "bytes": 2000
          },
          {
            "path": "link",
            "kind": "link"
          },
          {
            "path": "späße.md",
            "kind": "file",
            "bytes": 0
          },
          {
            "path": "src",
            "kind": "folder"
          }
        ],
        "count": 4,
        "cut": false
      },
      "partial": false,
      "error": null
    }
    "#);
    insta::assert_snapshot!(world.text("ListFiles", json!({"path": "src", "depth": 9, "hidden": true})).await, @"
    src/.gitignore  26 B
    src/deep/
    src/deep/er/
    src/deep/er/mod.rs  0 B
    src/main.rs  13 B
    src/only-here.txt  0 B
    src/wanted.log  0 B
    ");
    assert_eq!(world.text("List", json!({"path": "link"})).await, world.text("List", json!({"path": "src/"})).await);
}

#[tokio::test]
async fn hidden_and_ignored_files_are_shown_on_demand() {
    let world = project();
    insta::assert_snapshot!(world.text("List", json!({"ignored": true})).await, @"
    a.log  0 B
    keep.log  2.0 KiB
    link  (link)
    only-here.txt  0 B
    späße.md  0 B
    src/
    target/
    ");
    insta::assert_snapshot!(world.text("List", json!({"hidden": true})).await, @"
    .gitignore  39 B
    .hidden  0 B
    keep.log  2.0 KiB
    link  (link)
    späße.md  0 B
    src/
    ");
    insta::assert_snapshot!(world.text("List", json!({"hidden": true, "ignored": true, "depth": 2, "limit": 4})).await, @"
    .git/
    .git/config  0 B
    .gitignore  39 B
    .hidden  0 B
    [only the first 4 entries]
    ");
}

#[tokio::test]
async fn a_list_of_nothing_or_of_no_folder_says_so() {
    let world = project();
    world.put("empty/.hidden", "");
    insta::assert_snapshot!(world.text("List", json!({"path": "empty"})).await, @"`empty` is empty, or all in it is hidden or ignored");
    insta::assert_snapshot!(world.refusal("List", json!({"path": "keep.log"})).await, @"
    E3303: `keep.log` is a file, not a folder
    (show what is in a file with `Read`)
    ");
    insta::assert_snapshot!(world.refusal("List", json!({"path": "sources"})).await, @"
    E3302: there is no `sources`
    (did you mean `src`?)
    ");
}

#[tokio::test]
async fn files_are_found_by_pattern() {
    let world = project();
    let glob = |arguments| world.text("Glob", arguments);
    let result = world.call("FindFiles", json!({"pattern": "**/*.{rs,log}"})).await;
    insta::assert_snapshot!(whole(&result), @r#"
    {
      "status": "success",
      "content": [
        "keep.log\nsrc/deep/er/mod.rs\nsrc/main.rs\nsrc/wanted.log"
      ],
      "structured": {
        "paths": [
          "keep.log",
          "src/deep/er/mod.rs",
          "src/main.rs",
          "src/wanted.log"
        ],
        "count": 4,
        "cut": false
      },
      "partial": false,
      "error": null
    }
    "#);
    assert_eq!(glob(json!({"pattern": "*.rs", "path": "src"})).await, "src/main.rs");
    assert_eq!(glob(json!({"pattern": "./src/**/mod.rs"})).await, "src/deep/er/mod.rs");
    assert_eq!(glob(json!({"pattern": "**/*.tmp", "ignored": true})).await, "src/deep/er/x.tmp");
    assert_eq!(glob(json!({"pattern": ".hid*", "hidden": true})).await, ".hidden");
    assert_eq!(glob(json!({"pattern": "sp*ße.md"})).await, "späße.md");
    assert_eq!(glob(json!({"pattern": "*.rs"})).await, "no matches; `**/*.rs` looks in the folders below too");
    assert_eq!(glob(json!({"pattern": "../**/*"})).await, "no matches");
    assert_eq!(glob(json!({"pattern": "**/*", "limit": 1})).await, "keep.log\n[only the first 1]");
    insta::assert_snapshot!(world.refusal("Glob", json!({"pattern": "a[b"})).await, @"
    E3303: `a[b` is not a pattern for paths: unclosed character class; missing ']'
    (write it like `src/**/*.rs`, and a special character itself as `[*]`)
    ");
}

#[tokio::test]
async fn names_that_are_not_utf_8_are_shown_as_well_as_can_be() {
    use std::os::unix::ffi::OsStrExt;
    let world = World::new();
    let name = std::ffi::OsStr::from_bytes(b"caf\xE9.txt");
    std::fs::write(world.path("").join(name), "x").expect("a file");
    assert_eq!(world.text("Glob", json!({"pattern": "*"})).await, "caf\u{FFFD}.txt");
    assert_eq!(world.text("List", json!({})).await, "caf\u{FFFD}.txt  1 B");
}

#[tokio::test]
async fn the_rules_of_a_pipe_named_gitignore_are_not_waited_for() {
    let world = World::new();
    world.put("a.txt", "");
    rustix::fs::mkfifoat(rustix::fs::CWD, world.path(".gitignore"), 0o600.into()).expect("a pipe");
    assert_eq!(world.text("List", json!({})).await, "a.txt  0 B");
}

#[tokio::test]
async fn a_very_deep_folder_is_left_out_and_all_else_is_found() {
    let world = World::new();
    world.put("a/leaf.txt", "leaf").put("z/leaf.txt", "leaf");
    world.put(&format!("{}leaf.txt", "d/".repeat(150)), "leaf");
    let left_out = "[folders more than 100 levels down were left out; give a `path` further down to look there]";
    for (tool, arguments, found) in [
        ("Glob", json!({"pattern": "**/leaf.txt"}), "a/leaf.txt\nz/leaf.txt"),
        ("Search", json!({"pattern": "leaf"}), "a/leaf.txt:1:leaf\nz/leaf.txt:1:leaf"),
        ("Search", json!({"pattern": "tree"}), "no matches"),
    ] {
        let result = world.call(tool, arguments).await;
        assert_eq!(result.text(), format!("{found}\n{left_out}"));
        assert!(result.is_success() && result.partial, "{:?}", result.error);
    }
    let deep = format!("{}d", "d/".repeat(99));
    assert_eq!(
        world.text("Glob", json!({"pattern": "**/leaf.txt", "path": deep})).await,
        format!("{}leaf.txt", "d/".repeat(150))
    );
    let result = world.call("Delete", json!({"path": "d", "recursive": true})).await;
    assert!(!result.is_success(), "deeper than it goes at once");
}

#[tokio::test]
async fn rules_are_read_only_so_far_with_those_above_them() {
    let world = World::new();
    world.put("few/.gitignore", "x.txt\n").put("few/x.txt", "").put("few/y.txt", "");
    world.put("many/.gitignore", format!("y.txt\n{}", "# a long story\n".repeat(20_000)));
    world.put("many/y.txt", "").put("many/below/.gitignore", "x.txt\n").put("many/below/x.txt", "");
    assert_eq!(world.text("Glob", json!({"pattern": "**/*.txt"})).await, "few/y.txt\nmany/below/x.txt");
}

#[tokio::test]
async fn looking_needs_the_right_to_read_and_changing_the_right_to_write() {
    let world = project();
    let reader = Caller { permissions: wieldy_core::Held::only(["files.read"]), ..Caller::agent("reader") };
    let allowed = [
        ("Read", json!({"path": "src/main.rs"}), true),
        ("List", json!({}), true),
        ("Search", json!({"pattern": "main"}), true),
        ("Glob", json!({"pattern": "*"}), true),
        ("Write", json!({"path": "x", "content": ""}), false),
        ("Edit", json!({"path": "src/main.rs", "old": "main", "new": "x"}), false),
        ("Delete", json!({"path": "src/main.rs"}), false),
    ];
    for (tool, arguments, may) in allowed {
        let result = world.executor().call(Call::new(tool, arguments).by(reader.clone())).await;
        let code = result.error.map(|error| error.code.as_str());
        assert_eq!(code, (!may).then_some("E3003"), "{tool}");
    }
}
