//! `Edit`: exact text is replaced, and everything else stays byte for byte.

use serde_json::json;

use crate::world::{World, whole};

#[tokio::test]
async fn exact_text_is_replaced_and_the_change_is_shown() {
    let world = World::new();
    world.put("main.rs", "fn main() {\n    let x = 1;\n}\n");
    let result = world.call("Edit", json!({"path": "main.rs", "old": "x = 1", "new": "x = 2"})).await;
    insta::assert_snapshot!(whole(&result), @r#"
    {
      "status": "success",
      "content": [
        "edited `main.rs`, replaced once\n\n--- main.rs\n+++ main.rs\n@@ -1,3 +1,3 @@\n fn main() {\n-    let x = 1;\n+    let x = 2;\n }\n"
      ],
      "structured": {
        "path": "main.rs",
        "replaced": 1,
        "bytes": 29,
        "hash": "6635053372642c2c4506bb05679830faa95a8fa467116fadb6fbfa5bbf99924b",
        "diff": "--- main.rs\n+++ main.rs\n@@ -1,3 +1,3 @@\n fn main() {\n-    let x = 1;\n+    let x = 2;\n }\n"
      },
      "partial": false,
      "error": null
    }
    "#);
    assert_eq!(world.content("main.rs"), "fn main() {\n    let x = 2;\n}\n");
}

#[tokio::test]
async fn text_that_is_absent_or_ambiguous_is_refused_with_its_lines() {
    let world = World::new();
    let text = "\tif a {\n\t\tb();\n\t}\n\n\tb();\n";
    world.put("a.c", text);
    let refusal = |old: &str, new: &str| world.refusal("Edit", json!({"path": "a.c", "old": old, "new": new}));
    insta::assert_snapshot!(refusal("  if a {\n    b();", "").await, @"
    E3303: the old text does not occur in `a.c`; line 1 differs from it only in white space:
    	if a {
    		b();
    (copy the text exactly as it stands there, white space included)
    ");
    insta::assert_snapshot!(refusal("no such thing", "").await, @"
    E3303: the old text does not occur in `a.c`
    (read the file and copy the text exactly, white space included)
    ");
    insta::assert_snapshot!(refusal("b();", "c();").await, @"
    E3303: the old text occurs 2 times in `a.c`, on lines 2, 5
    (take in more of the surroundings of the place you mean, or set `replace_all`)
    ");
    insta::assert_snapshot!(refusal("b();", "b();").await, @"
    E3303: the old text and the new one are the same
    (give a new text that differs)
    ");
    insta::assert_snapshot!(refusal("", "x").await, @"
    E3002: `/old`: the value is shorter than 1 character
    (correct the arguments to fit the tool's input schema and call again)
    ");
    assert_eq!(world.content("a.c"), text, "nothing was changed");
    let all = json!({"path": "a.c", "old": "b();", "new": "c();", "replace_all": true});
    let result = world.call("EditFile", all).await;
    assert_eq!(result.structured.expect("a count")["replaced"], 2);
    assert_eq!(world.content("a.c"), "\tif a {\n\t\tc();\n\t}\n\n\tc();\n");
}

#[tokio::test]
async fn encoding_mark_and_line_ends_stay_as_they_are() {
    let world = World::new();
    let wide = |text: &str| -> Vec<u8> { text.encode_utf16().flat_map(u16::to_be_bytes).collect() };
    world
        .put("wide.txt", wide("\u{FEFF}grüße\r\nrest\r\n"))
        .put("marked.txt", "\u{FEFF}grüße\r\nrest\r\n")
        .put("latin.txt", b"gr\xFC\xDFe\r\nrest\r\n");
    let edit = |path: &str, old: &str, new: &str| world.call("Edit", json!({"path": path, "old": old, "new": new}));
    for path in ["wide.txt", "marked.txt"] {
        let result = edit(path, "grüße\nrest", "servus\nalles").await;
        assert!(result.is_success(), "{path}: {:?}", result.error);
    }
    assert!(edit("latin.txt", "e\nrest", "e\nalles").await.is_success());
    assert_eq!(std::fs::read(world.path("wide.txt")).expect("there"), wide("\u{FEFF}servus\r\nalles\r\n"));
    assert_eq!(world.content("marked.txt"), "\u{FEFF}servus\r\nalles\r\n");
    assert_eq!(std::fs::read(world.path("latin.txt")).expect("there"), b"gr\xFC\xDFe\r\nalles\r\n");
    let message = world.refusal("Edit", json!({"path": "latin.txt", "old": "alles", "new": "schön"})).await;
    insta::assert_snapshot!(message, @"
    E3303: `latin.txt` is not UTF-8, so only ASCII text can be replaced in it
    (convert the file to UTF-8 first)
    ");
}

#[tokio::test]
async fn files_that_cannot_be_edited_are_refused() {
    let world = World::new();
    world.put("program", b"a\0b").put("folder/x", "");
    let refusal = |path: &str| world.refusal("Edit", json!({"path": path, "old": "a", "new": "b"}));
    insta::assert_snapshot!(refusal("program").await, @"
    E3303: `program` is a binary file of 3 bytes
    (only text can be read; name the `encoding` if it is text after all)
    ");
    insta::assert_snapshot!(refusal("folder").await, @"
    E3303: `folder` is a folder, not a file
    (show what is in a folder with `List`)
    ");
    insta::assert_snapshot!(refusal("programm").await, @"
    E3302: there is no `programm`
    (did you mean `program`?)
    ");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn edits_at_the_same_time_all_arrive() {
    let world = World::new();
    let text: String = (0..40).map(|number| format!("<{number}>\n")).collect();
    world.put("a.txt", &text);
    let edits = (0..40).map(|number| {
        world.call("Edit", json!({"path": "a.txt", "old": format!("<{number}>"), "new": format!("[{number}]")}))
    });
    for result in futures_util::future::join_all(edits).await {
        assert!(result.is_success(), "{:?}", result.error);
    }
    assert_eq!(world.content("a.txt"), text.replace('<', "[").replace('>', "]"));
}
