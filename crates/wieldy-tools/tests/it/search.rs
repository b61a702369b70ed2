//! `Search`: matching lines in order, bounded.

use std::time::{Duration, Instant};

use serde_json::json;
use wieldy_core::{Call, Options, Status};

use crate::world::{World, whole};

fn project() -> World {
    let world = World::new();
    world
        .put(".gitignore", "target\n")
        .put("a.txt", "one\nTwo\nthree\nfour\nfive\nsix\ntwo again\n")
        .put("b/c.rs", "fn two() {}\r\n")
        .put("b/d.txt", "nothing\n")
        .put("target/x.txt", "two\n")
        .put(".hidden", "two\n")
        .put("program", b"two\n\0two\n")
        .put("late-program", ["two\n", &"x\n".repeat(100_000), "\0"].concat());
    world
}

#[tokio::test]
async fn matching_lines_come_with_path_and_number() {
    let world = project();
    let result = world.call("Search", json!({"pattern": "two"})).await;
    insta::assert_snapshot!(whole(&result), @r#"
    {
      "status": "success",
      "content": [
        "a.txt:2:Two\na.txt:7:two again\nb/c.rs:1:fn two() {}"
      ],
      "structured": {
        "matches": [
          {
            "path": "a.txt",
            "line": 2,
            "text": "Two"
          },
          {
            "path": "a.txt",
            "line": 7,
            "text": "two again"
          },
          {
            "path": "b/c.rs",
            "line": 1,
            "text": "fn two() {}"
          }
        ],
        "count": 3,
        "cut": false
      },
      "partial": false,
      "error": null
    }
    "#);
}

#[tokio::test]
async fn surroundings_are_shown_in_groups() {
    let world = project();
    insta::assert_snapshot!(world.text("SearchFiles", json!({"pattern": "two", "context": 1})).await, @"
    a.txt-1-one
    a.txt:2:Two
    a.txt-3-three
    --
    a.txt-6-six
    a.txt:7:two again
    --
    b/c.rs:1:fn two() {}
    ");
    let cut = json!({"pattern": "two", "context": 1, "limit": 1});
    insta::assert_snapshot!(world.text("Search", cut).await, @"
    a.txt-1-one
    a.txt:2:Two
    a.txt-3-three
    [1 of 3 matching lines; narrow the search for the rest]
    ");
}

#[tokio::test]
async fn a_search_can_be_narrowed() {
    let world = project();
    let search = |arguments| world.text("Search", arguments);
    assert_eq!(search(json!({"pattern": "two", "case": "sensitive"})).await, "a.txt:7:two again\nb/c.rs:1:fn two() {}");
    assert_eq!(search(json!({"pattern": "Two"})).await, "a.txt:2:Two", "a capital letter counts");
    assert_eq!(search(json!({"pattern": "ONE", "case": "insensitive"})).await, "a.txt:1:one");
    assert_eq!(search(json!({"pattern": "two", "glob": "*.rs"})).await, "b/c.rs:1:fn two() {}");
    assert_eq!(search(json!({"pattern": "two", "glob": "*.rs", "path": "b"})).await, "b/c.rs:1:fn two() {}");
    assert_eq!(search(json!({"pattern": "two", "path": "b/c.rs"})).await, "b/c.rs:1:fn two() {}");
    assert_eq!(search(json!({"pattern": "two() {}", "literal": true})).await, "b/c.rs:1:fn two() {}");
    assert_eq!(search(json!({"pattern": "\\}$"})).await, "b/c.rs:1:fn two() {}", "CRLF ends a line");
    assert_eq!(search(json!({"pattern": "^two$", "case": "sensitive", "ignored": true})).await, "target/x.txt:1:two");
    assert_eq!(search(json!({"pattern": "^two$", "case": "sensitive", "hidden": true})).await, ".hidden:1:two");
}

#[tokio::test]
async fn finding_nothing_is_a_success_and_a_bad_pattern_is_explained() {
    let world = project();
    let result = world.call("Search", json!({"pattern": "seven"})).await;
    assert_eq!(
        (result.text().as_str(), result.structured),
        ("no matches", Some(json!({"matches": [], "count": 0, "cut": false})))
    );
    insta::assert_snapshot!(world.refusal("Search", json!({"pattern": "a(b"})).await, @r"
    E3303: the pattern is not a regular expression: regex parse error:
        a(b
         ^
    error: unclosed group
    (escape special characters with a backslash, such as `\(`, or set `literal`)
    ");
    insta::assert_snapshot!(world.refusal("Search", json!({"pattern": "one\nTwo"})).await, @"
    E3303: the pattern holds a line break, and each line is searched by itself
    (search for one of the lines, with `context` to see those around it)
    ");
    insta::assert_snapshot!(world.refusal("Search", json!({"pattern": "a", "path": "c"})).await, @"
    E3302: there is no `c`
    (look for it with `Glob`, such as `**/name*`, or with `List`)
    ");
}

#[tokio::test]
async fn utf_16_is_searched_and_long_lines_are_cut() {
    let world = World::new();
    let wide: Vec<u8> = "\u{FEFF}grüße\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    world.put("wide.txt", wide).put("long.txt", format!("needle{}\n", "é".repeat(5000)));
    assert_eq!(world.text("Search", json!({"pattern": "rüß"})).await, "wide.txt:1:grüße");
    let long = world.text("Search", json!({"pattern": "needle"})).await;
    assert_eq!(long, format!("long.txt:1:needle{} […]", "é".repeat(247)));
}

#[tokio::test]
async fn many_matches_are_counted_and_not_all_shown() {
    let world = World::new();
    world.put("many.txt", "match\n".repeat(1000));
    let result = world.call("Search", json!({"pattern": "match", "limit": 2})).await;
    assert_eq!(
        result.text(),
        "many.txt:1:match\nmany.txt:2:match\n[2 of 1000 matching lines; narrow the search for the rest]"
    );
    assert!(result.partial);
    let matches = result.structured.expect("matches");
    assert_eq!((matches["count"].clone(), matches["cut"].clone()), (json!(1000), json!(true)));
}

#[tokio::test]
async fn a_search_that_must_end_answers_with_what_it_has() {
    let world = World::new();
    world.put("a.txt", "needle\n").put("b/0.txt", "haystack\n".repeat(1 << 20));
    for number in 1..500 {
        std::fs::hard_link(world.path("b/0.txt"), world.path(&format!("b/{number}.txt"))).expect("a link");
    }
    let options = Options { timeout: Some(Duration::from_millis(50)), retries: Some(0), ..Options::default() };
    let before = Instant::now();
    let result = world.executor().call(Call::new("Search", json!({"pattern": "needle"})).with(options)).await;
    assert!(before.elapsed() < Duration::from_secs(5), "it heeds the clock");
    assert_eq!((result.status, result.partial), (Status::Timeout, true));
    assert!(result.text().starts_with("a.txt:1:needle\n"), "{}", result.text());
}

#[tokio::test]
async fn patterns_that_take_much_memory_are_refused_with_the_reason() {
    let world = project();
    let message = "the pattern is too large: compiled it takes more than 2097152 bytes";
    for pattern in ["[a-z0]{900}{1000}", "(?:\\w{100}){100}", "((a{100}){100}){100}"] {
        let result = world.call("Search", json!({"pattern": pattern})).await;
        assert_eq!(result.error.map(|error| error.message), Some(message.to_owned()), "{pattern}");
    }
    for (pattern, found) in [("[a-z0]{3,900} again", "a.txt:7:two again"), ("\\w{2,15} again", "a.txt:7:two again")] {
        assert_eq!(world.text("Search", json!({"pattern": pattern})).await, found);
    }
}

#[tokio::test]
async fn a_large_pattern_is_not_matched_against_a_long_line() {
    let world = project();
    world.put("long.txt", "ab".repeat(2_000_000));
    let pattern = "[ab]*a[ab]{7000}c|two again";
    let answer = world.text("Search", json!({"pattern": pattern})).await;
    let (found, told) = answer.split_once('\n').unwrap();
    assert_eq!(found, "a.txt:7:two again");
    let told = told.replace(|c: char| c.is_ascii_digit(), "");
    assert_eq!(told, "[ files could not be searched; with so large a pattern, no line may have more than  bytes]");
    let answer = world.text("Search", json!({"pattern": "bab$|two again"})).await;
    assert_eq!(answer.lines().count(), 2, "{answer}");
}

#[tokio::test]
async fn a_pattern_that_is_too_large_only_for_lines_is_told_so() {
    let message = project().refusal("Search", json!({"pattern": "[a-z0]{7000}"})).await;
    assert!(message.starts_with("E3303: the pattern is too large: compiled it takes more than"), "{message}");
}
