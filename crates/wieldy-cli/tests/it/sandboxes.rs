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

/// Returns the folders of sandboxes below `sandbox.folder`.
fn on_disk(world: &World) -> Vec<std::path::PathBuf> {
    let list = |folder| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let all = list(world.path("../disk/wieldy-sandboxes")).flat_map(list);
    all.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("native-")).collect()
}

#[test]
fn private_folders_are_on_the_configured_disk_and_gone_after_a_kill() {
    let world = World::new().file("../disk/note", "").file("wieldy.toml", "[sandbox]\nfolder = \"../disk\"\n");
    let plan = world.run(&["doctor", "--plan"]);
    for line in ["disk     /tmp ", "disk     /var/tmp ", "disk     /home/agent ", "memory   /dev/shm ", "memory   / "] {
        assert!(plan.contains(line), "{line}: {plan}");
    }
    let mut client = Client::start(&world, &[]);
    let answer = client.call(1, "Bash", json!({"command": "echo mine > /tmp/file; ls ~ /var/tmp"}));
    assert_eq!(answer["result"]["isError"], json!(false), "{answer}");
    let files = || on_disk(&world).iter().filter(|sandbox| sandbox.join("tmp/file").exists()).count();
    assert_eq!(files(), 1);
    client.kill();
    // The fork server removes the folders of sandboxes, and the next start that of the executor.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !on_disk(&world).is_empty() {
        assert!(std::time::Instant::now() < until, "{:?}", on_disk(&world));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let own = world.path("../disk/wieldy-sandboxes");
    while std::fs::read_dir(&own).unwrap().next().is_some() {
        assert!(std::time::Instant::now() < until);
        assert_eq!(world.code(&["call", "Bash", "command=test ! -e /tmp/file"]), Some(0));
    }
}

#[test]
fn an_unsafe_folder_is_refused_and_doctor_says_why() {
    let world = World::new();
    std::os::unix::fs::symlink("/tmp", world.path("../link")).unwrap();
    let within = world.path("").canonicalize().unwrap();
    for (folder, why) in [
        ("../link".to_owned(), "write an absolute path without `.`, `..` and links"),
        (within.display().to_string(), "must be apart from the workspace"),
        ("/proc/nothing".to_owned(), "make it a folder that this user can write to"),
    ] {
        let set = format!("sandbox.folder={folder}");
        let told = world.run(&["call", "Bash", "command=true", "--set", &set]);
        assert!(told.starts_with("exit: 7") && told.contains(why) && told.contains("E3101"), "{told}");
        let told = world.run(&["doctor", "--set", &set]);
        assert!(told.contains(why), "{told}");
    }
}

/// It decides where files are written, so a folder's own configuration does not.
#[test]
fn an_untrusted_folder_cannot_set_the_disk() {
    let world = World::cloned().file("../disk/note", "").file("wieldy.toml", "[sandbox]\nfolder = \"../disk\"\n");
    assert_eq!(world.code(&["call", "Bash", "command=true"]), Some(0));
    assert!(!world.path("../disk/wieldy-sandboxes").exists());
}

/// The level `none` makes no sandbox, and records none.
#[test]
fn a_program_without_isolation_has_no_records_of_a_sandbox() {
    let world = World::new();
    let run = world.command(&["--state", "../state", "call", "Bash", "command=true", "--isolation", "none"]);
    assert_eq!({ run }.output().unwrap().status.code(), Some(0));
    assert_eq!(ends(&world), Vec::<Vec<Value>>::new());
}
