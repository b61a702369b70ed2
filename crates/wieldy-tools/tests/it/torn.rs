//! P-FS-09: a write that fails or is killed in the middle leaves the old content, and no other files.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

use serde_json::json;

use crate::world::World;

const CHILD: &str = "WIELDY_TEST_CHILD_WORKSPACE";

/// Writes a file of a megabyte in a child process that may write 64 KiB at most.
fn write_in_child(world: &World, prelude: &str) -> ExitStatus {
    let script = format!("ulimit -c 0; ulimit -f 64; {prelude} exec \"$0\" --exact torn::in_a_child --nocapture");
    let this = std::env::current_exe().expect("we run");
    let output =
        Command::new("sh").arg("-c").arg(script).arg(this).env(CHILD, world.path("")).output().expect("a shell");
    output.status
}

/// Not a test by itself: the code of the child processes of the tests below.
#[tokio::test]
async fn in_a_child() {
    let Some(root) = std::env::var_os(CHILD) else { return };
    let world = World::at(root.into(), tempfile::tempdir().expect("a folder"));
    let message = world.refusal("Write", json!({"path": "a.txt", "content": "new ".repeat(1 << 18)})).await;
    assert!(message.starts_with("E3900: cannot write `a.txt`: File too large"), "{message}");
    let message = world.refusal("Write", json!({"path": "b.txt", "content": "new ".repeat(1 << 18)})).await;
    assert!(message.starts_with("E3900: cannot write `b.txt`: File too large"), "{message}");
}

#[test]
fn p_fs_09_a_write_that_finds_no_space_changes_nothing() {
    let world = World::new();
    world.put("a.txt", "old");
    let status = write_in_child(&world, "trap '' XFSZ;");
    assert!(status.success(), "{status}");
    assert_eq!((world.content("a.txt").as_str(), world.names()), ("old", vec!["a.txt".to_owned()]));
}

#[test]
fn p_fs_09_a_writer_that_is_killed_leaves_the_old_content_and_no_other_file() {
    let world = World::new();
    world.put("a.txt", "old");
    let status = write_in_child(&world, "");
    assert_eq!(status.signal(), Some(25), "killed by SIGXFSZ, in the middle of the write");
    assert_eq!((world.content("a.txt").as_str(), world.names()), ("old", vec!["a.txt".to_owned()]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p_fs_09_a_reader_sees_the_old_or_the_new_content_and_never_half_of_it() {
    let world = World::new();
    let (old, new) = ("a".repeat(200_000), "b".repeat(300_000));
    world.put("a.txt", &old);
    let path = world.path("a.txt");
    let (short, long) = (old.len(), new.len());
    let reader = tokio::task::spawn_blocking(move || {
        let mut lengths = std::collections::BTreeSet::new();
        let mut reads = 0;
        // On a busy machine the first write may come after hundreds of reads.
        while reads < 300 || lengths.len() < 2 {
            let content = std::fs::read_to_string(&path).expect("always there");
            assert!(content.bytes().all(|byte| byte == content.as_bytes()[0]));
            lengths.insert(content.len());
            reads += 1;
        }
        lengths
    });
    while !reader.is_finished() {
        for content in [&new, &old] {
            world.text("Write", json!({"path": "a.txt", "content": content})).await;
        }
    }
    assert_eq!(reader.await.expect("no torn content"), [short, long].into());
}
