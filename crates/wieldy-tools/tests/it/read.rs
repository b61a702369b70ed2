//! `Read`: ranges, encodings, and files that cannot be read.

use serde_json::json;

use crate::world::{World, whole};

#[tokio::test]
async fn a_file_is_read_whole_with_its_hash_and_line_count() {
    let world = World::new();
    world.put("notes/a.txt", "one\ntwo\nthree");
    let result = world.call("Read", json!({"path": "./notes//a.txt"})).await;
    insta::assert_snapshot!(whole(&result), @r#"
    {
      "status": "success",
      "content": [
        "one\ntwo\nthree"
      ],
      "structured": {
        "path": "notes/a.txt",
        "from_line": 1,
        "lines": 3,
        "total_lines": 3,
        "bytes": 13,
        "encoding": "UTF-8",
        "hash": "a637bb998a968df073001a628a03be61b42d80f93fdf6af3e71c0ba36e47853d",
        "changed": false
      },
      "partial": false,
      "error": null
    }
    "#);
    assert_eq!(world.text("ReadFile", json!({"path": world.path("notes/a.txt")})).await, "one\ntwo\nthree");
}

#[tokio::test]
async fn some_lines_are_read_and_the_range_is_reported() {
    let world = World::new();
    world.put("a.txt", "one\r\ntwo\r\nthree\r\n").put("empty.txt", "");
    let result = world.call("Read", json!({"path": "a.txt", "from_line": 2, "lines": 1})).await;
    assert_eq!(result.text(), "two\r\n");
    let range = result.structured.expect("a range");
    assert_eq!((&range["from_line"], &range["lines"], &range["total_lines"]), (&json!(2), &json!(1), &json!(3)));
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "a.txt", "from_line": 4})).await, @"
    E3303: `a.txt` has only 3 lines
    (give a `from_line` from 1 to 3)
    ");
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "a.txt", "from_line": 0})).await, @"
    E3002: `/from_line`: the value is less than the minimum of 1
    (correct the arguments to fit the tool's input schema and call again)
    ");
    assert_eq!(world.text("Read", json!({"path": "empty.txt"})).await, "");
}

#[tokio::test]
async fn a_file_too_long_for_one_answer_says_how_to_read_on() {
    let world = World::new();
    let lines: String = (1..=20_000).map(|number| format!("line {number}\n")).collect();
    world.put("long.txt", &lines);
    let result = world.call("Read", json!({"path": "long.txt"})).await;
    assert!(result.is_success() && result.partial && result.artifact.is_none());
    let range = result.structured.clone().expect("a range");
    let next = range["lines"].as_u64().expect("a number") + 1;
    assert!(
        result
            .text()
            .ends_with(&format!("[this ends after line {} of 20000; read on with `from_line` {next}]", next - 1))
    );
    let rest = world.text("Read", json!({"path": "long.txt", "from_line": next, "lines": 1})).await;
    assert_eq!(rest, format!("line {next}\n"), "no line is lost in between");
}

#[tokio::test]
async fn text_is_read_in_its_encoding() {
    let world = World::new();
    let wide: Vec<u8> = "\u{FEFF}grüße\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    world.put("utf16.txt", wide).put("latin.txt", b"gr\xFC\xDFe\n").put("marked.txt", "\u{FEFF}grüße\n");
    for (path, encoding) in [("utf16.txt", None), ("marked.txt", None), ("latin.txt", Some("latin1"))] {
        let text = world.text("Read", json!({"path": path, "encoding": encoding})).await;
        assert_eq!(text, "grüße\n", "{path}");
    }
    insta::assert_snapshot!(world.text("Read", json!({"path": "latin.txt"})).await, @"
    gr��e

    [bytes that mean nothing in UTF-8 are shown as �; give the `encoding` to read them]
    ");
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "latin.txt", "encoding": "klingon"})).await, @"
    E3303: `klingon` is not an encoding that we know
    (give a name such as `utf-8`, `windows-1252`, `utf-16le` or `shift_jis`)
    ");
}

#[tokio::test]
async fn a_file_without_text_is_refused_with_a_suggestion() {
    let world = World::new();
    world.put("program", b"\x7FELF\0\0\0").put("src/main.rs", "fn main() {}").put("sources/x", "");
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "program"})).await, @"
    E3303: `program` is a binary file of 7 bytes
    (only text can be read; name the `encoding` if it is text after all)
    ");
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "src"})).await, @"
    E3303: `src` is a folder, not a file
    (show what is in a folder with `List`)
    ");
    for (folder, shown) in [(".", "."), ("./", "."), ("src/", "src"), ("src/.", "src")] {
        let message = format!("E3303: `{shown}` is a folder, not a file\n(show what is in a folder with `List`)");
        assert_eq!(world.refusal("Read", json!({"path": folder})).await, message);
    }
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "src/main.rs/"})).await, @"
    E3303: `src/main.rs` is a file, not a folder
    (show what is in a file with `Read`)
    ");
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "src/main.sr"})).await, @"
    E3302: there is no `src/main.sr`
    (did you mean `src/main.rs`?)
    ");
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "source/main.rs"})).await, @"
    E3302: there is no `source/main.rs`
    (did you mean `sources` or `src`?)
    ");
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "src/main.rs/"})).await, @"
    E3303: `src/main.rs` is a file, not a folder
    (show what is in a file with `Read`)
    ");
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "src/main.rs/x"})).await, @"E3303: `src/main.rs/x` is below a file, not below a folder");
}

#[tokio::test]
async fn a_file_too_large_for_the_memory_is_refused() {
    let world = World::new();
    let file = std::fs::File::create(world.path("huge.log")).expect("a file");
    file.set_len(10 << 30).expect("a hole takes no space");
    let message = world.refusal("Read", json!({"path": "huge.log", "encoding": "utf-8"})).await;
    insta::assert_snapshot!(message, @"
    E3303: `huge.log` has 10737418240 bytes, more than the 33554432 that can be taken at once
    (find the part you need with `Search`)
    ");
}
