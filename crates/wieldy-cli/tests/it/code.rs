//! Tests of `wieldy code`: the answers of the code tools for people.

use crate::world::World;

fn project() -> World {
    World::new()
        .file("src/load.rs", "/// Loads it.\npub fn load_config() -> u32 {\n\tparse(1)\n}\n")
        .file("src/main.rs", "fn main() {\n    load_config();\n}\n")
}

#[test]
fn a_search_prints_places_that_terminals_open() {
    insta::assert_snapshot!(project().run(&["code", "search", "load_config", "-C", "1", "--tests", "include"]), @"
    exit: 0
    ----- stdout -----
    src/load.rs:2  load_config function
        1-/// Loads it.
        2:pub fn load_config() -> u32 {
        3-	parse(1)

    src/main.rs:2  main function
        1-fn main() {
        2:    load_config();
        3-}


    ----- stderr -----
    ");
}

#[test]
fn a_search_says_how_to_see_the_rest_and_when_there_is_nothing() {
    let world = project();
    insta::assert_snapshot!(world.run(&["code", "search", "load_config", "-C", "0", "--limit", "1"]), @"
    exit: 0
    ----- stdout -----
    src/load.rs:2  load_config function
        2:pub fn load_config() -> u32 {


    ----- stderr -----
    1 of 2 finds; `--cursor 1` shows the next, `--limit` more at once
    ");
    insta::assert_snapshot!(world.run(&["code", "search", "--mode", "text", "lod_config"]), @"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    no matches
        [near: load_config]
    ");
    insta::assert_snapshot!(world.run(&["code", "search", "load", "--in", "lib"]), @"
    exit: 1
    ----- stdout -----

    ----- stderr -----
    error[E3302]: there is no `lib`
    hint: look for it with `Glob`, such as `**/name*`, or with `List`
    ");
}

#[test]
fn programs_get_the_result_as_json_and_the_index_survives_the_command() {
    let world = project();
    let arguments = ["--json", "code", "search", "load_config", "--state", "../state"];
    for _ in 0..2 {
        let printed = world.command(&arguments).output().unwrap().stdout;
        let result: serde_json::Value = serde_json::from_slice(&printed).unwrap();
        assert_eq!((&result["tool"], &result["structured"]["total"]), (&"search_code".into(), &2.into()));
    }
    let history = world.run(&["history", "--state", "../state", "--tool", "search_code"]);
    assert_eq!(history.matches("search_code").count(), 2, "{history}");
}

#[test]
fn definitions_references_and_a_map_are_printed_for_people() {
    let world = project();
    insta::assert_snapshot!(world.run(&["code", "find", "load_config"]), @"
    exit: 0
    ----- stdout -----
    src/load.rs:2  pub fn load_config() -> u32 function
        pub fn load_config() -> u32 {
        	parse(1)
        }

    ----- stderr -----
    ");
    insta::assert_snapshot!(world.run(&["code", "refs", "load_config"]), @"
    exit: 0
    ----- stdout -----
    src/main.rs:2:5: load_config();  call, likely

    ----- stderr -----
    ");
    insta::assert_snapshot!(world.run(&["code", "map"]), @"
    exit: 0
    ----- stdout -----
    src/load.rs
      pub fn load_config() -> u32
    src/main.rs
      fn main()
    ----- stderr -----
    ");
}
