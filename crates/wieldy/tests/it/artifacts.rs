//! Tests that hold for every artifact store, run in memory and in a folder; then those for the folder alone.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use tempfile::TempDir;
use wieldy::artifact::ArtifactError;
use wieldy::{ArtifactId, Artifacts, Caller, FolderArtifacts, MemoryArtifacts};

/// The size limit that the maker sets for one artifact, in bytes.
const EACH_BYTES_MAX: u64 = 50;

fn written(store: &dyn Artifacts, owner: &Caller, text: &str) -> ArtifactId {
    let mut writer = store.create(owner, None, EACH_BYTES_MAX).unwrap();
    for chunk in text.as_bytes().chunks(7) {
        writer.write(chunk).unwrap();
    }
    writer.id()
}

fn folder(bytes_max: u64) -> (TempDir, FolderArtifacts) {
    let state = tempfile::tempdir().unwrap();
    let store = FolderArtifacts::with_bound(state.path(), bytes_max).unwrap();
    (state, store)
}

/// Runs `question` with a store in memory and with one in a folder, each with room for 100 bytes.
fn of_both(question: impl Fn(&dyn Artifacts)) {
    question(&MemoryArtifacts::new(100));
    let (_state, store) = folder(100);
    question(&store);
}

fn acme() -> Caller {
    Caller { tenant: Some("acme".into()), ..Caller::local() }
}

#[test]
fn an_artifact_is_read_in_pages() {
    of_both(|store| {
        let ada = Caller::local();
        let id = written(store, &ada, "one two three");
        assert_eq!(store.read(id, &ada, 4, 3).unwrap(), b"two");
        assert_eq!(store.read(id, &ada, 8, u64::MAX).unwrap(), b"three");
        assert_eq!(store.read(id, &ada, u64::MAX, u64::MAX).unwrap(), b"");
    });
}

#[test]
fn an_artifact_can_be_read_while_it_is_written() {
    of_both(|store| {
        let ada = Caller::local();
        let mut writer = store.create(&ada, None, EACH_BYTES_MAX).unwrap();
        writer.write(b"so far").unwrap();
        assert_eq!(store.read(writer.id(), &ada, 0, 99).unwrap(), b"so far");
        assert_eq!(store.describe(writer.id(), &ada).unwrap().total_bytes, 6);
    });
}

#[test]
fn an_artifact_of_another_tenant_looks_like_none() {
    of_both(|store| {
        let id = written(store, &acme(), "secret");
        assert!(matches!(store.read(id, &Caller::local(), 0, 9), Err(ArtifactError::NotFound(_))));
        assert!(matches!(store.describe(id, &Caller::local()), Err(ArtifactError::NotFound(_))));
        assert_eq!(store.read(id, &acme(), 0, 9).unwrap(), b"secret");
    });
}

#[test]
fn an_artifact_that_was_never_made_is_not_found() {
    of_both(|store| {
        assert!(matches!(store.describe(ArtifactId::next(), &Caller::local()), Err(ArtifactError::NotFound(_))));
    });
}

#[test]
fn space_is_bounded_the_true_size_known_and_the_oldest_goes_first() {
    of_both(|store| {
        let ada = Caller::local();
        let big = written(store, &ada, &"x".repeat(80));
        let info = store.describe(big, &ada).unwrap();
        assert_eq!((info.kept_bytes, info.total_bytes), (50, 80));
        let next = written(store, &ada, &"y".repeat(50));
        let last = written(store, &ada, "z");
        assert!(matches!(store.describe(big, &ada), Err(ArtifactError::NotFound(_))));
        assert_eq!(store.describe(next, &ada).unwrap().kept_bytes, 50);
        assert_eq!(store.read(last, &ada, 0, 9).unwrap(), b"z");
    });
}

#[test]
fn a_writer_knows_how_much_is_kept_at_the_bound_and_beyond() {
    of_both(|store| {
        let ada = Caller::local();
        let mut writer = store.create(&ada, None, 30).unwrap();
        for (bytes, kept) in [(20, 20), (10, 30), (1, 30)] {
            writer.write(&vec![b'x'; bytes]).unwrap();
            assert_eq!(writer.kept_bytes(), kept);
        }
        let info = store.describe(writer.id(), &ada).unwrap();
        assert_eq!(info.kept_bytes, 30);
    });
    // A single artifact is limited by the size for all of them.
    let (_state, store) = folder(40);
    let mut writer = store.create(&Caller::local(), None, u64::MAX).unwrap();
    writer.write(&[b'x'; 50]).unwrap();
    assert_eq!(writer.kept_bytes(), 40);
}

#[test]
fn a_folder_of_artifacts_survives_a_restart() {
    let (state, store) = folder(100);
    let id = written(&store, &acme(), &"x".repeat(80));
    drop(store);
    let store = FolderArtifacts::with_bound(state.path(), 100).unwrap();
    let info = store.describe(id, &acme()).unwrap();
    assert_eq!((info.kept_bytes, info.total_bytes, info.tenant.as_deref()), (50, 80, Some("acme")));
    assert_eq!(store.read(id, &acme(), 48, 9).unwrap(), b"xx");
}

#[test]
fn other_users_cannot_open_the_folder_or_its_files() {
    let state = tempfile::tempdir().unwrap();
    let artifacts = state.path().join("artifacts");
    fs::create_dir(&artifacts).unwrap();
    fs::set_permissions(&artifacts, fs::Permissions::from_mode(0o777)).unwrap();
    let store = FolderArtifacts::open(state.path()).unwrap();
    let id = written(&store, &Caller::local(), "mine");
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&artifacts), 0o700);
    assert_eq!(mode(&artifacts.join(id.bare())), 0o600);
    assert_eq!(mode(&artifacts.join(format!("{}.json", id.bare()))), 0o600);
    assert_eq!(fs::read_dir(&artifacts).unwrap().count(), 2, "nothing else is left behind");
}

#[test]
fn an_artifact_swept_away_while_it_is_written_does_not_come_back() {
    let (state, store) = folder(60);
    let ada = Caller::local();
    let mut early = store.create(&ada, None, EACH_BYTES_MAX).unwrap();
    early.write(&[b'x'; 50]).unwrap();
    written(&store, &ada, &"y".repeat(50));
    early.write(b"more").unwrap();
    drop(early);
    assert_eq!(fs::read_dir(state.path().join("artifacts")).unwrap().count(), 2, "the later one alone");
}

#[test]
fn a_folder_that_cannot_be_made_says_which() {
    let state = tempfile::tempdir().unwrap();
    let file = state.path().join("file");
    fs::write(&file, "").unwrap();
    let told = FolderArtifacts::open(&file).unwrap_err().to_string();
    assert_eq!(told, format!("cannot keep artifacts in `{}`", file.join("artifacts").display()));
}

#[test]
fn only_the_makers_own_artifacts_of_a_workspace_are_listed_the_latest_first() {
    of_both(|store| {
        let ada = Caller::local();
        let make = |owner: &Caller, workspace: Option<&str>| store.create(owner, workspace, 10).unwrap().id();
        let (first, second) = (make(&ada, Some("/here")), make(&ada, Some("/here")));
        let others = [make(&ada, Some("/there")), make(&ada, None), make(&acme(), Some("/here"))];
        let list = |reader: &Caller, limit| {
            let infos = store.list(reader, "/here", limit).unwrap();
            infos.into_iter().map(|info| info.id).collect::<Vec<_>>()
        };
        assert_eq!(list(&ada, 9), [second, first]);
        assert_eq!(list(&ada, 1), [second]);
        assert_eq!(list(&acme(), 9), [others[2]]);
        assert_eq!(list(&Caller::agent("bob"), 9), []);
    });
}
