//! The end of every sandbox is in the history, however its process ended.

use rusqlite::{Connection, OpenFlags};
use serde_json::{Value, json};

use crate::mcp::Client;
use crate::world::World;

/// Returns the records about sandboxes: for each that was made, the data of the records of its end.
fn ends(world: &World) -> Vec<Vec<Value>> {
    let path = world.path("../state/history.db");
    let history = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    let sql = "SELECT seq, name, data FROM events WHERE name LIKE 'sandbox.%ed' ORDER BY seq";
    let mut statement = history.prepare(sql).unwrap();
    let row = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
    let rows = statement.query_map([], row).unwrap().map(|row: rusqlite::Result<(i64, String, String)>| row.unwrap());
    let mut made: Vec<(i64, Value, Vec<Value>)> = Vec::new();
    for (seq, name, data) in rows {
        let data: Value = serde_json::from_str(&data).unwrap();
        if name == "sandbox.created" {
            made.push((seq, data["sandbox"].clone(), Vec::new()));
            continue;
        }
        let ended = made.iter_mut().rev().find(|(_, sandbox, _)| *sandbox == data["sandbox"]).unwrap();
        assert!(data["created_seq"].is_null() || data["created_seq"] == json!(ended.0), "{data}");
        ended.2.push(json!(data["created_seq"].is_null()));
    }
    made.into_iter().map(|(_, _, ends)| ends).collect()
}

/// Ends in all ways at a level. An end that the executor itself recorded is `true`, one by the next start `false`.
fn every_end_is_recorded(level: &str) {
    let world = World::new();
    let run = |arguments: &[&str]| {
        world.command(&[&["--state", "../state"], arguments].concat()).output().unwrap().status.code()
    };
    let at = ["--isolation", level];
    assert_eq!(run(&[&["call", "Bash", "command=true"], &at[..]].concat()), Some(0));
    assert_eq!(run(&[&["call", "Bash", "command=exit 3"], &at[..]].concat()), Some(1));
    assert_ne!(run(&[&["call", "Bash", "command=sleep 600", "--timeout", "300ms"], &at[..]].concat()), Some(0));
    let own = || vec![json!(true)];
    assert_eq!(ends(&world), [own(), own(), own()]);
    // A session's sandbox is kept until the server ends.
    let serve = || {
        let mut client = Client::start(&world, &[&["--state", "../state"], &at[..]].concat());
        let answer = client.call(1, "Bash", json!({"command": "echo hi"}));
        assert_eq!(answer["result"]["content"][0]["text"], "hi\n", "{answer}");
        client
    };
    serve().end();
    assert_eq!(ends(&world), [own(), own(), own(), own()]);
    serve().kill();
    for _ in 0..2 {
        assert_eq!(run(&["call", "GetState"]), Some(0));
        assert_eq!(ends(&world), [own(), own(), own(), own(), vec![json!(false)]]);
    }
    assert_eq!(run(&["audit", "verify"]), Some(0));
}

#[test]
fn every_end_of_a_native_sandbox_is_recorded() {
    every_end_is_recorded("native");
}

#[test]
fn every_end_of_a_container_is_recorded() {
    for (level, program) in [("runc", "runc"), ("gvisor", "runsc")] {
        let is_there =
            ["/usr/sbin", "/usr/bin"].iter().any(|folder| std::path::Path::new(folder).join(program).exists());
        if is_there && rustix::process::geteuid().is_root() {
            every_end_is_recorded(level);
        } else {
            wieldy_testkit::skip(&format!("`{program}` is not there or needs root"));
        }
    }
}

/// The level `none` makes no sandbox, and records none.
#[test]
fn a_program_without_isolation_has_no_records_of_a_sandbox() {
    let world = World::new();
    let run = world.command(&["--state", "../state", "call", "Bash", "command=true", "--isolation", "none"]);
    assert_eq!({ run }.output().unwrap().status.code(), Some(0));
    assert_eq!(ends(&world), Vec::<Vec<Value>>::new());
}
