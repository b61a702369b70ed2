//! Paths of a history file: symlinks, odd names, and the permissions of the file.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use serde_json::json;
use wieldy_core::{Call, ToolSpec};
use wieldy_store::{Address, JournalOptions, Query, Store, StoreError};
use wieldy_testkit::{Act, Puppet};

use crate::world::executor;

fn at(path: &Path) -> Store {
    Store::open(&Address::Sqlite(path.to_owned())).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn opening_by_a_symlink_does_not_close_a_live_executors_calls() {
    let folder = tempfile::tempdir().unwrap();
    let (real, link) = (folder.path().join("real/history.db"), folder.path().join("link.db"));
    let store = at(&real);
    symlink(&real, &link).unwrap();
    let (tool, strings) = Puppet::new(ToolSpec::new("write", ""), [Act::PrintAndWait("x"), Act::Echo]);
    let (first, journal) = executor(&store, [tool]);
    let task = first.spawn(Call::new("write", json!({})));
    while strings.now() == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    let other = at(&link).journal(&JournalOptions::default()).unwrap();
    let (call, _) = store.show(task).unwrap().unwrap();
    assert_eq!(call.status, "running", "its executor lives");
    first.cancel(task, &wieldy_core::Caller::local());
    assert!(first.call(Call::new("write", json!({}))).await.is_success());
    first.wait(task, &wieldy_core::Caller::local()).await;
    assert_eq!(journal.failure(), None);
    drop((other, first, journal));
    assert_eq!(at(&link).verify(&[], None, &mut |_| {}).unwrap().problem, None);
}

#[test]
fn a_symlink_to_a_missing_file_creates_it_for_its_owner_only() {
    let folder = tempfile::tempdir().unwrap();
    let (real, link) = (folder.path().join("real.db"), folder.path().join("link.db"));
    symlink("real.db", &link).unwrap();
    drop(at(&link).journal(&JournalOptions::default()).unwrap());
    assert_eq!(std::fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::read_dir(folder.path().join("real.db.instances")).unwrap().count(), 0);
}

#[test]
fn special_names_are_plain_file_names() {
    let folder = tempfile::tempdir().unwrap();
    for name in [":memory:", "file:x?mode=memory", "a b'c\"d%20;.db", "übermäßig.db", "-rf"] {
        let path = folder.path().join(name);
        drop(at(&path).journal(&JournalOptions::default()).unwrap());
        assert!(std::fs::metadata(&path).unwrap().len() > 0, "{name}");
        assert_eq!(at(&path).extent().unwrap().0, 2, "{name}");
    }
}

#[test]
fn an_address_names_one_file() {
    let path = |text: &str| match text.parse::<Address>() {
        Ok(Address::Sqlite(path)) => Ok(path.display().to_string()),
        Ok(other) => panic!("{other}"),
        Err(error) => Err(error),
    };
    assert_eq!(path("sqlite:/a/b.db"), Ok("/a/b.db".into()));
    assert_eq!(path("sqlite:///a/b.db"), Ok("/a/b.db".into()));
    assert_eq!(path("sqlite:////a/b.db"), Ok("//a/b.db".into()), "still from the root");
    assert_eq!(path("sqlite:a/b.db"), Ok("a/b.db".into()));
    for empty in ["", "sqlite:", "sqlite://"] {
        assert_eq!(path(empty), Err(StoreError::Address("the address of the history is empty".into())));
    }
}

#[test]
fn a_backup_is_for_its_owner_only_and_replaces_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let store = at(&folder.path().join("history.db"));
    drop(store.journal(&JournalOptions::default()).unwrap());
    let copy = folder.path().join("copy.db");
    store.backup(&copy).unwrap();
    assert_eq!(std::fs::metadata(&copy).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(at(&copy).search(&Query::default(), 1).unwrap(), store.search(&Query::default(), 1).unwrap());
    let (link, elsewhere) = (folder.path().join("link.db"), folder.path().join("elsewhere.db"));
    symlink(&elsewhere, &link).unwrap();
    let why = format!("`{}` already exists", link.display());
    assert_eq!(store.backup(&link), Err(StoreError::Query(why)));
    assert!(!elsewhere.exists());
}

#[test]
fn a_forged_history_reaches_no_other_files() {
    let folder = tempfile::tempdir().unwrap();
    let (path, letter) = (folder.path().join("history.db"), folder.path().join("letter.txt"));
    drop(at(&path).journal(&JournalOptions::default()).unwrap());
    std::fs::write(&letter, "dear").unwrap();
    let file = rusqlite::Connection::open(&path).unwrap();
    for (number, id) in [(7, letter.to_str().unwrap()), (8, "../letter.txt")] {
        let sql = "INSERT INTO instances (number, id, version, host, process, started_at, seen_at) VALUES (?1, ?2, '', '', 1, 1, 1)";
        file.execute(sql, rusqlite::params![number, id]).unwrap();
    }
    drop(at(&path).journal(&JournalOptions::default()).unwrap());
    assert_eq!(std::fs::read_to_string(&letter).unwrap(), "dear");
    let open: i64 =
        file.query_row("SELECT count(*) FROM instances WHERE ended_at IS NULL", [], |row| row.get(0)).unwrap();
    assert_eq!(open, 0, "they are not taken for living ones either");
}
