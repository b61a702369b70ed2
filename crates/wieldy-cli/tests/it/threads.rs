//! `wieldy threads`: what agents write down for later, on the command line.

use rusqlite::Connection;
use serde_json::{Value, json};

use crate::world::World;

const STATE: [&str; 2] = ["--state", "../state"];
const ANN: [&str; 2] = ["--user", "ann"];

fn told(world: &World, arguments: &[&str]) -> String {
    let told = world.run(&[&["threads"], arguments, &ANN, &STATE].concat());
    // Times differ from run to run.
    let time = regex::Regex::new(r"\d\d-\d\d \d\d:\d\d:\d\d").unwrap();
    time.replace_all(&told, "MM-DD hh:mm:ss").into_owned()
}

fn answer(world: &World, arguments: &[&str]) -> Value {
    world.json(&[&["threads"], arguments, &["--json"], &ANN, &STATE].concat())
}

fn world() -> World {
    let world = World::new();
    for arguments in [
        &["push", "plan", "Which database do we take?", "--type", "question", "--title", "The plan"][..],
        &["push", "plan", "SQLite:\n- no server\n- one file", "--type", "decision", "--reply-to", "1"],
        &["push", "done", "All tests pass.", "--type", "close"],
    ] {
        assert!(told(&world, arguments).starts_with("exit: 0"), "{arguments:?}");
    }
    world
}

#[test]
fn threads_are_pushed_listed_read_and_found() {
    let world = world();
    insta::assert_snapshot!(told(&world, &["push", "plan", "Tables are made.", "--type", "result", "--key", "k"]), @"
    exit: 0
    ----- stdout -----
    pushed entry 3 (result) to `plan`

    ----- stderr -----

    ");
    insta::assert_snapshot!(told(&world, &["push", "plan", "Tables are made.", "--type", "result", "--key", "k"]), @"
    exit: 0
    ----- stdout -----
    pushed entry 3 (result) to `plan`; it was written before, with the same key

    ----- stderr -----

    ");
    insta::assert_snapshot!(told(&world, &["list"]), @"
    exit: 0
    ----- stdout -----
    LAST            THREAD  STATUS  ENTRIES  LAST ENTRY
    MM-DD hh:mm:ss  plan    open          3  The plan: Tables are made.

    ----- stderr -----

    ");
    insta::assert_snapshot!(told(&world, &["list", "--status", "all"]), @"
    exit: 0
    ----- stdout -----
    LAST            THREAD  STATUS  ENTRIES  LAST ENTRY
    MM-DD hh:mm:ss  plan    open          3  The plan: Tables are made.
    MM-DD hh:mm:ss  done    closed        1  All tests pass.

    ----- stderr -----

    ");
    insta::assert_snapshot!(told(&world, &["read", "plan", "--limit", "2"]), @"
    exit: 0
    ----- stdout -----
    plan  The plan  (open, 3 entries)

    #1 question  local (ann)  MM-DD hh:mm:ss
        Which database do we take?

    #2 decision  local (ann)  MM-DD hh:mm:ss  answers #1
        SQLite:
        - no server
        - one file

    ----- stderr -----
    more: `--after 2`

    ");
    insta::assert_snapshot!(told(&world, &["read", "plan", "--latest", "--limit", "1"]), @"
    exit: 0
    ----- stdout -----
    plan  The plan  (open, 3 entries)

    #3 result  local (ann)  MM-DD hh:mm:ss
        Tables are made.

    ----- stderr -----
    more: `--before 3`

    ");
    insta::assert_snapshot!(told(&world, &["seek", "\"no server\" sqlite"]), @"
    exit: 0
    ----- stdout -----
    plan  #2 decision  MM-DD hh:mm:ss
        **SQLite**: - **no server** - one file

    ----- stderr -----

    ");
}

#[test]
fn what_is_not_there_is_told_with_what_to_do() {
    let world = world();
    insta::assert_snapshot!(told(&world, &["read", "plam"]), @"
    exit: 1
    ----- stdout -----

    ----- stderr -----
    error[E3302]: there is no thread `plam`
    hint: did you mean `plan`?

    ");
    insta::assert_snapshot!(told(&world, &["seek", "nothing"]), @"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    no entry has all these words; try fewer, or the beginning of one, such as `migrat*`

    ");
    insta::assert_snapshot!(told(&world, &["list", "--project", "none"]), @"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    no thread fits

    ");
    let of_bob = world.run(&[&["threads", "read", "plan", "--user", "bob"], &STATE[..]].concat());
    insta::assert_snapshot!(of_bob, @"
    exit: 1
    ----- stdout -----

    ----- stderr -----
    error[E3302]: there is no thread `plan`
    hint: list the threads with `thread_list`

    ");
}

#[test]
fn programs_get_the_structured_answers_of_the_tools() {
    let world = world();
    let pushed = answer(&world, &["push", "new", "x"]);
    assert_eq!(
        (&pushed["status"], &pushed["entry_id"], &pushed["created"]),
        (&json!("ok"), &json!("new#1"), &json!(true))
    );
    let read = answer(&world, &["read", "plan", "--after", "1"]);
    assert_eq!(
        (&read["entries"][0]["seq"], &read["total"], &read["title"]),
        (&json!(2), &json!(2), &json!("The plan"))
    );
    let found = answer(&world, &["seek", "database"]);
    assert_eq!(found["results"][0]["snippet"], "Which **database** do we take?");
    let listed = answer(&world, &["list", "--status", "closed"]);
    assert_eq!(listed["threads"][0]["thread_id"], "done");
    let output = world.command(&[&["threads", "read", "none", "--json"], &STATE[..]].concat()).output().unwrap();
    let error: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &error["error"]["code"]), (Some(1), &json!("E3302")));
}

#[test]
fn a_project_of_the_configuration_is_shared() {
    let world = World::new().file("wieldy.toml", "[threads.projects.team]\nusers = [\"ann\", \"bob\"]\n");
    let push = ["threads", "push", "plan", "ours", "--project", "team", "--user", "ann"];
    assert_eq!(world.code(&[&push[..], &STATE].concat()), Some(0));
    let read = |user: &str| {
        world.code(&[&["threads", "read", "plan", "--project", "team", "--user", user], &STATE[..]].concat())
    };
    assert_eq!((read("bob"), read("eve")), (Some(0), Some(1)));
    let world = world.file("other.toml", "[threads.projects.team]\nusers = []\n");
    let told = world.run(&["threads", "list", "--config", "other.toml"]);
    assert!(
        told.starts_with("exit: 2") && told.contains("`threads.projects.team` shares the project with no caller"),
        "{told}"
    );
}

// Shows: C6.8
#[test]
fn an_audit_verifies_the_threads_too() {
    let world = world();
    let audit = || {
        let told = world.run(&[&["audit", "verify"], &STATE[..]].concat());
        let lines: Vec<&str> = told.lines().filter(|line| line.contains("threads")).collect();
        (told.starts_with("exit: 0"), lines.join("\n"))
    };
    assert_eq!(audit(), (true, "the threads are whole: 2 threads, 3 entries, 2 signatures".to_owned()));
    let verdict = world.json(&[&["audit", "verify", "--json"], &STATE[..]].concat());
    assert_eq!(verdict["threads"], json!({"threads": 2, "entries": 3, "signed": 2, "problem": null}));
    let database = Connection::open(world.path("../state/threads.db")).unwrap();
    assert!(database.execute("UPDATE entries SET content = 'x'", []).is_err(), "the database refuses it");
    let sql = "DROP TRIGGER entries_are_never_changed; UPDATE entries SET content = 'x' WHERE thread = 1 AND seq = 2";
    database.execute_batch(sql).unwrap();
    let broken = "error: the threads are broken: entry 2 of the thread `plan`: it was changed, or is not in its place";
    assert_eq!(audit(), (false, broken.to_owned()));
}
