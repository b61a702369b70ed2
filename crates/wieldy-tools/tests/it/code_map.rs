//! `get_repo_map`: the most used definitions within a number of tokens.

use serde_json::json;

use crate::code_trees::{rust, structured};
use crate::world::World;

#[tokio::test]
async fn a_map_shows_the_most_used_definitions_of_each_file() {
    let world = rust();
    world.put("tests/test_all.rs", "fn tested() { start(); }\n");
    insta::assert_snapshot!(world.text("get_repo_map", json!({})).await, @"
    crates/walk-er/src/rules.rs
      pub struct Rule
        pub fn step(&self)
      pub enum Verdict
    crates/walk-er/src/frame.rs
      pub struct Frame
        pub fn new(rule: &Rule) -> Self
        pub fn step(&self) -> bool
        fn helper(&self, verdict: super::rules::Verdict) -> bool
    crates/walk-er/src/lib.rs
      pub fn start(law: &Law) -> Frame
    crates/app/src/main.rs
      fn main()
    tests/ 1 files not shown
    ");
    insta::assert_snapshot!(world.text("get_repo_map", json!({"scope": "crates/app", "tests": true, "focus": ["main", "nothing"]})).await, @"
    crates/app/src/main.rs
      fn main()
    [`nothing` of `focus` is no file and no definition here]
    ");
    let answer = structured(&world, "get_repo_map", json!({"tests": true})).await;
    insta::assert_snapshot!(serde_json::to_string_pretty(&answer).expect("plain data"), @r#"
    {
      "map_text": "crates/walk-er/src/rules.rs\n  pub struct Rule\n    pub fn step(&self)\n  pub enum Verdict\ncrates/walk-er/src/frame.rs\n  pub struct Frame\n    pub fn new(rule: &Rule) -> Self\n    pub fn step(&self) -> bool\n    fn helper(&self, verdict: super::rules::Verdict) -> bool\ncrates/walk-er/src/lib.rs\n  pub fn start(law: &Law) -> Frame\ncrates/app/src/main.rs\n  fn main()\ntests/test_all.rs\n  fn tested()",
      "tokens": 123,
      "max_tokens": 4096,
      "files_shown": 5,
      "files_total": 6,
      "symbols_shown": 10,
      "ranking": [
        {
          "path": "crates/walk-er/src/rules.rs",
          "rank": 0.434962
        },
        {
          "path": "crates/walk-er/src/frame.rs",
          "rank": 0.264415
        },
        {
          "path": "crates/walk-er/src/lib.rs",
          "rank": 0.161186
        },
        {
          "path": "crates/app/src/main.rs",
          "rank": 0.126761
        },
        {
          "path": "tests/test_all.rs",
          "rank": 0.012676
        }
      ],
      "focus_unknown": [],
      "index": {
        "files": 6,
        "indexed": 6,
        "skipped": {},
        "complete": true
      }
    }
    "#);
}

/// Returns a generated project: packages of modules that use functions of earlier ones.
fn generated(modules: usize) -> World {
    let world = World::new();
    for module in 0..modules {
        let (package, earlier) = (module % 7, module / 3);
        let mut text = format!("from package_{}.module_{earlier} import task_{earlier}_1\n\n\n", earlier % 7);
        for function in 0..9 {
            let arguments = "argument, ".repeat(function % 4);
            text.push_str(&format!(
                "def task_{module}_{function}({arguments}*rest):\n    return task_{earlier}_1(rest)\n\n\n"
            ));
        }
        text.push_str(&format!(
            "class Store{module}:\n    def load(self, key: str) -> dict[str, int]:\n        return {{}}\n"
        ));
        world.put(&format!("package_{package}/module_{module}.py"), text);
        world.put(&format!("tests/test_{module}.py"), format!("def test_{module}():\n    task_{module}_1()\n"));
    }
    world
}

// Shows: C6.4
#[tokio::test]
async fn a_map_fills_its_tokens_and_never_more() {
    let world = generated(120);
    for (max, tokenizer) in
        [(256, "o200k"), (257, "cl100k"), (1000, "o200k"), (1001, "o200k"), (4096, "cl100k"), (9000, "o200k")]
    {
        let arguments = json!({"max_tokens": max, "tokenizer": tokenizer});
        let answer = structured(&world, "get_repo_map", arguments.clone()).await;
        let text = answer["map_text"].as_str().expect("a text");
        let counter = if tokenizer == "o200k" {
            tiktoken_rs::o200k_base_singleton()
        } else {
            tiktoken_rs::cl100k_base_singleton()
        };
        let tokens = counter.count_ordinary(text);
        assert_eq!(answer["tokens"], tokens, "the count is exact");
        assert!(tokens <= max && tokens * 100 >= max * 97, "{tokens} of {max} {tokenizer}\n{text}");
        assert!(!text.contains("test_1.py") && !text.contains("return"), "{text}");
        assert_eq!(structured(&world, "get_repo_map", arguments).await["map_text"], text, "the map is the same again");
    }
    let far =
        structured(&world, "get_repo_map", json!({"max_tokens": 256, "focus": ["package_3/module_115.py"]})).await;
    assert!(far["map_text"].as_str().is_some_and(|text| text.starts_with("package_3/module_115.py\n")), "{far}");
    assert_eq!(
        structured(&generated(120), "get_repo_map", json!({})).await["map_text"],
        structured(&world, "get_repo_map", json!({})).await["map_text"]
    );
}
