//! `search_code`: text, regular expressions and ranked words, always of the files as they are.

use std::fs;

use serde_json::{Value, json};
use wieldy_core::FileRules;

use crate::world::{CANARY, World, whole};

fn project() -> World {
    let world = World::new();
    world
        .put("src/walk.rs", "//! Walks.\n\npub fn readFolder(path: &str) -> u32 {\n    let depth = 1;\n    depth\n}\n")
        .put("src/save.py", "def save_file(path):\n    # saves the whole file at once\n    return path\n")
        .put("tests/walk.rs", "fn walks() {\n    readFolder(\".\");\n}\n")
        .put("vendor/other.rs", "fn readFolder() {}\n")
        .put("docs/guide.md", "To read a folder, call it.\n\u{4f60}\u{597d}\u{4e16}\u{754c}\n")
        .put(".gitignore", "target\n")
        .put("target/built.rs", "fn readFolder() {}\n")
        .put("program", b"readFolder\0");
    world
}

async fn search(world: &World, arguments: Value) -> Value {
    let result = world.call("search_code", arguments).await;
    assert!(result.is_success(), "{:?}", result.error);
    result.structured.expect("an answer for programs")
}

/// Returns the finds as `path:line`.
fn places(answer: &Value) -> Vec<String> {
    let results = answer["results"].as_array().expect("a list");
    let place = |hit: &Value| format!("{}:{}", hit["path"].as_str().expect("a path"), hit["line"]);
    results.iter().map(place).collect()
}

#[tokio::test]
async fn a_name_is_found_in_code_first_then_in_tests_and_foreign_code() {
    let world = project();
    insta::assert_snapshot!(world.text("search_code", json!({"query": "readFolder", "context": 1})).await, @r#"
    src/walk.rs
    2-
    3:pub fn readFolder(path: &str) -> u32 {
    4-    let depth = 1;
    tests/walk.rs
    1-fn walks() {
    2:    readFolder(".");
    3-}
    vendor/other.rs
    1:fn readFolder() {}
    "#);
}

// Shows: C6.1
#[tokio::test]
async fn words_are_ranked_and_found_as_parts_of_names() {
    let world = project();
    let result = world.call("search_code", json!({"query": "reading a folder", "context": 0, "limit": 1})).await;
    insta::assert_snapshot!(whole(&result), @r#"
    {
      "status": "success",
      "content": [
        "src/walk.rs:3-6  readFolder\n3-pub fn readFolder(path: &str) -> u32 {\n[1 of 4 finds; `cursor` \"1\" shows the next]"
      ],
      "structured": {
        "results": [
          {
            "path": "src/walk.rs",
            "line": 3,
            "end_line": 6,
            "text": "pub fn readFolder(path: &str) -> u32 {",
            "text_line": 3,
            "symbol": "readFolder",
            "kind": "function",
            "score": 0.5,
            "matched": [
              "reading",
              "folder"
            ]
          }
        ],
        "mode": "words",
        "total": 4,
        "index": {
          "files": 6,
          "indexed": 6,
          "skipped": {
            "binary": 1
          },
          "complete": true
        },
        "cursor": "1"
      },
      "partial": false,
      "error": null
    }
    "#);
}

#[tokio::test]
async fn the_mode_fits_the_query_unless_it_is_given() {
    let world = project();
    world.put("src/other.rs", "let a = x[0]; // x.y\nlet xzy = 1;\n");
    for (query, mode, first) in [
        ("readFolder", "text", "src/walk.rs:3"),
        ("\"let depth\"", "text", "src/walk.rs:4"),
        ("x[0]", "text", "src/other.rs:1"),
        ("x.y", "text", "src/other.rs:1"),
        ("x.y\\b", "regex", "src/other.rs:1"),
        ("fn \\w+Folder", "regex", "src/walk.rs:3"),
        ("save the file", "words", "src/save.py:1"),
        ("folderReader", "words", "src/walk.rs:3"),
        ("\u{597d}\u{4e16} \u{4f60}", "words", "docs/guide.md:1"),
        ("\u{597d}\u{4e16}", "text", "docs/guide.md:2"),
    ] {
        let answer = search(&world, json!({"query": query})).await;
        let found = (answer["mode"].as_str().unwrap_or_default(), places(&answer).first().cloned());
        assert_eq!(found, (mode, Some(first.to_owned())), "{query}");
    }
    let answer = search(&world, json!({"query": "read folder", "mode": "text"})).await;
    assert_eq!((answer["mode"].clone(), places(&answer)), (json!("text"), vec![]));
    let answer = search(&world, json!({"query": "of the", "mode": "words"})).await;
    assert_eq!(answer["mode"], json!("text"), "words that say nothing are looked for as they are");
}

#[tokio::test]
async fn a_search_can_be_narrowed() {
    let world = project();
    for (arguments, expected) in [
        (json!({"query": "readFolder", "language": "markdown"}), None),
        (json!({"query": "folder", "language": ".MD"}), Some(vec!["docs/guide.md:1"])),
        (json!({"query": "readFolder", "language": "Rust", "scope": "src"}), Some(vec!["src/walk.rs:3"])),
        (json!({"query": "readFolder", "scope": "src/walk.rs"}), Some(vec!["src/walk.rs:3"])),
        (json!({"query": "readFolder", "tests": "exclude"}), Some(vec!["src/walk.rs:3", "vendor/other.rs:1"])),
        (
            json!({"query": "readFolder", "tests": "include"}),
            Some(vec!["src/walk.rs:3", "tests/walk.rs:2", "vendor/other.rs:1"]),
        ),
    ] {
        let Some(expected) = expected else {
            let message = world.refusal("search_code", arguments).await;
            assert!(message.starts_with("E3303: `markdown` is neither a language nor the ending of a file here"));
            assert!(message.contains("bash, c, c_sharp, cpp, go, java,"), "{message}");
            continue;
        };
        assert_eq!(places(&search(&world, arguments.clone()).await), expected, "{arguments}");
    }
    let absolute = world.path("src").display().to_string();
    assert_eq!(places(&search(&world, json!({"query": "depth", "scope": absolute})).await).len(), 2);
}

#[tokio::test]
async fn bad_arguments_are_refused_with_what_to_do() {
    let world = project();
    insta::assert_snapshot!(world.refusal("search_code", json!({"query": "x", "scope": "scr"})).await, @"
    E3302: there is no `scr`
    (look for it with `Glob`, such as `**/name*`, or with `List`)
    ");
    insta::assert_snapshot!(world.refusal("search_code", json!({"query": "x", "cursor": "-1"})).await, @"
    E3303: `-1` is not a cursor of this tool
    (leave it out, or give the `cursor` of the answer before, with the same query)
    ");
    let message = world.refusal("search_code", json!({"query": "a(b", "mode": "regex"})).await;
    assert!(message.starts_with("E3303: the pattern is not a regular expression"), "{message}");
    let outside = world.refusal("search_code", json!({"query": "x", "scope": "../outside"})).await;
    assert!(outside.starts_with("E3105"), "{outside}");
}

#[tokio::test]
async fn finding_nothing_is_a_success_that_names_what_is_near() {
    let world = project();
    let answer = search(&world, json!({"query": "readFoldr", "mode": "text"})).await;
    assert_eq!((answer["total"].clone(), answer["near"].clone()), (json!(0), json!(["readFolder", "read"])));
    let text = world.text("search_code", json!({"query": "readFoldr", "mode": "text"})).await;
    assert_eq!(text, "no matches\n[near: readFolder, read]");
}

#[tokio::test]
async fn a_cursor_turns_the_pages_without_losing_or_repeating_a_find() {
    let world = World::new();
    for file in 0..5 {
        world.put(&format!("f{file}.rs"), "needle\n".repeat(7));
    }
    for mode in ["text", "words"] {
        let all = places(&search(&world, json!({"query": "needle", "mode": mode, "limit": 200})).await);
        let (mut found, mut cursor) = (Vec::new(), None::<String>);
        loop {
            let mut arguments = json!({"query": "needle", "mode": mode, "limit": 3});
            if let Some(cursor) = &cursor {
                arguments["cursor"] = json!(cursor);
            }
            let answer = search(&world, arguments).await;
            found.extend(places(&answer));
            assert_eq!(answer["total"], json!(all.len()));
            cursor = answer["cursor"].as_str().map(str::to_owned);
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!((found.len(), found), (if mode == "text" { 35 } else { 5 }, all));
    }
}

#[tokio::test]
async fn an_edit_is_in_the_next_answer() {
    let world = project();
    for step in 0..20 {
        let name = format!("name{step}");
        world.put("src/walk.rs", format!("fn {name}() {{}}\n"));
        assert_eq!(places(&search(&world, json!({"query": name})).await), ["src/walk.rs:1"]);
        let words = search(&world, json!({"query": format!("fn {name}"), "mode": "words"})).await;
        assert_eq!(places(&words)[0], "src/walk.rs:1");
        assert_eq!(
            places(&search(&world, json!({"query": format!("name{}", step - 1), "mode": "text"})).await),
            [""; 0]
        );
    }
    fs::remove_file(world.path("src/walk.rs")).expect("it is there");
    assert_eq!(places(&search(&world, json!({"query": "name19", "mode": "text"})).await), [""; 0]);
}

#[tokio::test]
async fn secrets_are_found_by_no_search_and_suggested_by_none() {
    let rules = FileRules { hidden: vec!["keys".into()], ..FileRules::default() };
    let world = project().ruled(rules);
    world.put(".env", CANARY).put("keys/one.rs", format!("fn secretName() {{ {CANARY} }}\n")).put("sub/.netrc", CANARY);
    world.link("link.rs", "keys/one.rs").link("folder", "keys");
    for query in ["secretName", CANARY, "canary", "secret name", "secretNam", "7c1f"] {
        for mode in ["auto", "text", "regex", "words"] {
            let result = world.call("search_code", json!({"query": query, "mode": mode})).await;
            let shown = whole(&result).replace(query, "");
            assert!(!shown.contains("secretName") && !shown.contains("keys"), "{query} {mode}: {shown}");
            assert_eq!(result.structured.expect("an answer")["total"], json!(0), "{query} {mode}");
        }
    }
    for scope in ["keys", "folder", "link.rs", "keys/one.rs"] {
        let message = world.refusal("search_code", json!({"query": "x", "scope": scope})).await;
        assert!(message.starts_with("E3105: `keys"), "{scope}: {message}");
    }
}

// Shows: C6.1
#[tokio::test]
async fn text_search_finds_the_same_lines_as_search() {
    let world = project();
    world
        .put("a/odd.txt", "\u{feff}begin Na\u{ef}ve\r\n\u{212a}elvin \u{17f}ave\nfooBar_baz9\n")
        .put("a/latin.txt", b"h\xe4user fooBar\nsave\xff\n")
        .put(
            "a/wide.txt",
            "\u{FEFF}gr\u{fc}\u{df}e fooBar\n".encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>(),
        )
        .put("a/long.txt", format!("{}fooBar\n", "x".repeat(300)))
        .put("a/many.txt", (0..60_000).map(|number| format!("w{number}\n")).collect::<String>());
    for pattern in [
        "fooBar",
        "foobar",
        "oBar",
        "w59999",
        "save",
        "kelvin",
        "na\u{ef}ve",
        "begin",
        "gr\u{fc}",
        "user",
        "read.*path",
        "x{3}foo",
        "(read|save)_?[Ff]",
        r"\S+Bar\b",
        r"^fn \w+",
        "path|depth",
        "()",
        "\u{4e16}\u{754c}",
        "xfooBar",
        "(?i)FOOBAR",
        "[A]|foo",
        "B",
    ] {
        let arguments = json!({"pattern": pattern, "limit": 10_000});
        let by_search = world.call("Search", arguments).await.structured.expect("matches");
        let mut expected: Vec<String> = by_search["matches"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|found| format!("{}:{}", found["path"].as_str().expect("a path"), found["line"]))
            .collect();
        let arguments = json!({"query": pattern, "mode": "regex", "limit": 200, "tests": "include"});
        let answer = search(&world, arguments).await;
        expected.truncate(200);
        assert_eq!((places(&answer), &answer["total"]), (expected, &by_search["count"]), "{pattern}");
    }
}
