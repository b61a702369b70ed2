//! `wieldy audit`: an unchanged trail is verified, and any change is detected.

use std::fs;

use rusqlite::Connection;
use serde_json::{Value, json};

use crate::world::World;

const STATE: [&str; 2] = ["--state", "../state"];

/// Makes a world with three recorded calls.
fn world() -> World {
    let world = World::new().file("a.txt", "one\n");
    for _ in 0..3 {
        assert_eq!(world.code(&[&["call", "Read", "path=a.txt"], &STATE[..]].concat()), Some(0));
    }
    world
}

fn told(world: &World, arguments: &[&str]) -> String {
    world.run(&[arguments, &STATE].concat())
}

fn verdict(world: &World, arguments: &[&str]) -> Value {
    world.json(&[&["audit", "verify", "--json"], arguments, &STATE].concat())
}

/// Changes the database in a way that none of our programs does.
fn tamper(world: &World, sql: &str) {
    let database = Connection::open(world.path("../state/history.db")).unwrap();
    assert!(database.execute(sql, []).unwrap() > 0, "{sql}");
}

// Shows: D9.4
#[test]
fn an_intact_trail_is_verified() {
    let world = world();
    insta::assert_snapshot!(told(&world, &["audit", "verify"]), @"
    exit: 0
    ----- stdout -----
    the trail is whole: 15 records, 3 calls, 3 signatures

    ----- stderr -----
    ");
    assert_eq!(
        verdict(&world, &[]),
        json!({"records": 15, "executions": 3, "open": 0, "heads": 3, "anchors": 0, "dropped": 0, "first_seq": 1,
               "last_seq": 15, "problem": null})
    );
}

// Shows: D9.4
#[test]
fn a_record_that_was_changed_is_named() {
    let world = world();
    tamper(
        &world,
        "UPDATE events SET data = replace(data, 'a.txt', 'b.txt') WHERE name = 'tool.call.pending' AND seq = 7",
    );
    insta::assert_snapshot!(told(&world, &["audit", "verify"]), @"
    exit: 1
    ----- stdout -----

    ----- stderr -----
    error: the trail is broken at record 7: it was changed or moved
    hint: the records before it are unchanged; compare with a backup
    ");
    let verdict = verdict(&world, &[]);
    assert_eq!(verdict["problem"]["seq"], 7);
    let output = world.command(&[&["audit", "verify", "--json"], &STATE[..]].concat()).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.iter().filter(|byte| **byte == b'\n').count()), (Some(1), 1));
}

#[test]
fn a_missing_record_or_call_is_noticed() {
    for sql in [
        "DELETE FROM events WHERE seq = 8",
        "DELETE FROM tool_executions WHERE id = 7",
        "UPDATE tool_executions SET status = 'failed' WHERE id = 7",
    ] {
        let world = world();
        tamper(&world, sql);
        let told = told(&world, &["audit", "verify"]);
        assert!(
            told.starts_with("exit: 1\n") && told.contains("error: the trail is broken at record "),
            "{sql}: {told}"
        );
    }
}

#[test]
fn an_anchor_reveals_a_trail_that_was_started_again() {
    let world = world();
    insta::assert_snapshot!(told(&world, &["audit", "head", "--output", "anchor.json"]), @"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    wrote `anchor.json`; store it where no program that writes the history can change it
    ");
    insta::assert_snapshot!(told(&world, &["audit", "head", "--output", "anchor.json"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: `anchor.json` already exists
    hint: name a file that does not exist yet: an anchor is never replaced
    ");
    let key = world.json(&["audit", "key", "--json", "--state", "../state"])["key"].as_str().unwrap().to_owned();
    assert_eq!(told(&world, &["audit", "key"]), format!("exit: 0\n----- stdout -----\n{key}\n\n----- stderr -----\n"));
    let with_key = ["--anchor", "anchor.json", "--key", &key];
    let proved = verdict(&world, &with_key);
    assert_eq!((&proved["anchors"], &proved["problem"]), (&json!(1), &json!(null)));
    let head: Value = serde_json::from_slice(&fs::read(world.path("anchor.json")).unwrap()).unwrap();
    let printed = world.json(&["audit", "head", "--state", "../state"]);
    assert_eq!((&head["seq"], &head["hash"], &head["key"]), (&printed["seq"], &printed["hash"], &json!(key)));
    // An attacker with the database and the key writes another history, which is valid by itself.
    fs::remove_file(world.path("../state/history.db")).unwrap();
    for _ in 0..4 {
        assert_eq!(world.code(&[&["call", "List"], &STATE[..]].concat()), Some(0));
    }
    assert_eq!(verdict(&world, &[])["problem"], json!(null));
    let found_out = verdict(&world, &with_key);
    assert_eq!(found_out["problem"]["seq"], head["seq"], "{found_out}");
    assert_eq!(world.code(&[&["audit", "verify"], &with_key[..], &STATE].concat()), Some(1));
}

#[test]
fn an_anchor_older_than_the_oldest_record_is_a_warning() {
    let world = world();
    assert_eq!(world.code(&[&["audit", "head", "--output", "anchor.json"], &STATE[..]].concat()), Some(0));
    assert_eq!(world.code(&[&["call", "List"], &STATE[..]].concat()), Some(0));
    assert_eq!(world.code(&[&["history", "prune", "--older-than", "1ms"], &STATE[..]].concat()), Some(0));
    insta::assert_snapshot!(told(&world, &["audit", "verify", "--anchor", "anchor.json"]), @"
    exit: 0
    ----- stdout -----
    the trail is whole: 4 records, 0 calls, 3 signatures; 19 records before them dropped by retention

    ----- stderr -----
    warning: cannot check 1 anchor from before the oldest record that is kept; `wieldy audit head` makes a new one
    ");
    assert_eq!(verdict(&world, &["--anchor", "anchor.json"])["anchors"], json!(0));
}

#[test]
fn another_key_proves_nothing() {
    let world = world();
    fs::remove_file(world.path("../state/audit.key")).unwrap();
    let new = world.json(&["audit", "key", "--json", "--state", "../state"])["key"].as_str().unwrap().to_owned();
    assert_ne!(verdict(&world, &["--key", &new])["problem"], json!(null));
}

#[test]
fn wrong_usage_of_audit_is_reported() {
    let world = World::new().file("no.json", "{}");
    let gone = told(&world, &["audit", "verify"]);
    assert!(
        gone.starts_with("exit: 7\n") && gone.contains("there is no history, so nothing can be verified"),
        "{gone}"
    );
    assert!(gone.contains("hint: it begins with the first call"), "{gone}");
    for (arguments, message) in [
        (&["--anchor", "no.json"][..], "it is not what `wieldy audit head` prints"),
        (&["--anchor", "missing.json"], "cannot read the anchor `missing.json`"),
        (&["--key", "abc"], "a public key has 64 hexadecimal digits"),
    ] {
        let told = told(&world, &[&["audit", "verify"], arguments].concat());
        assert!(told.starts_with("exit: 2\n") && told.contains(message) && told.contains("hint: "), "{told}");
    }
    assert!(!world.path("../state").exists());
}
