//! Tests the synchronization of two copies of a workspace, with an honest guest and with guests that lie.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use super::super::frames::CONTENT_BYTES_MAX;
use super::*;

const ROOM: Room = Room { bytes: 1 << 20, files: 100, path_bytes: 1 << 20 };

/// Both copies of a workspace, and another folder that must not be touched.
struct World {
    folder: tempfile::TempDir,
    ours: Ours,
    theirs: Tree,
    agreed: Manifest,
}

impl World {
    fn new() -> Self {
        Self::with(&[], &[])
    }

    fn with(hidden: &[&str], protected: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["here", "there", "elsewhere"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let list = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect();
        let ours = Ours::new(&folder.path().join("here"), list(hidden), list(protected), ROOM).unwrap();
        let theirs = Tree::copy(&folder.path().join("there"), None).unwrap();
        Self { folder, ours, theirs, agreed: Manifest::new() }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn write(&self, path: &str, content: &str) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), content).unwrap();
    }

    /// Synchronizes both copies. Returns the refused paths of the guest, with the reasons.
    fn sync(&mut self) -> Vec<(String, String)> {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let (agreed, denials) = std::thread::scope(|scope| {
            let answering = scope.spawn(|| {
                assert_eq!(frames::receive(&mut far).unwrap().kind, Kind::Sync);
                answer(&self.theirs, &mut far, &self.agreed).unwrap()
            });
            let denials = self.ours.sync(&mut near).unwrap();
            (answering.join().unwrap(), denials)
        });
        self.agreed = agreed;
        let told = |denial| match denial {
            Denial::Filesystem { path, reason } => (path, reason),
            Denial::Network { .. } => panic!("{denial}"),
        };
        denials.into_iter().map(told).collect()
    }

    /// Returns the result of a sync with a guest that sends only this.
    fn sync_with(&mut self, say: impl FnOnce(&mut UnixStream) + Send) -> io::Result<Vec<Denial>> {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                say(&mut far);
                // Reads to the end, as a guest would.
                let _ = frames::send(&mut far, Kind::Done, &[]);
                while let Ok(frame) = frames::receive(&mut far) {
                    if frame.kind == Kind::Done {
                        let _ = frames::send(&mut far, Kind::Done, &[]);
                    }
                }
            });
            let synced = self.ours.sync(&mut near);
            drop(near);
            synced
        })
    }

    /// Returns every entry of a folder with its kind, permissions and content.
    fn tree(&self, folder: &str) -> Vec<String> {
        let tree = Tree::copy(&self.at(folder), None).unwrap();
        let entries = tree.look(1000).unwrap().into_keys().map(|path| tree.entry(&path).unwrap());
        let content = |path: &str| fs::read_to_string(self.at(folder).join(path)).unwrap_or_default();
        let told = entries.map(|Entry { path, now }| match now {
            Now::File { permissions } => format!("{path} {permissions:o} {}", content(&path)),
            Now::Folder { permissions } => format!("{path}/ {permissions:o}"),
            Now::Link { target } => format!("{path} -> {target}"),
            Now::Gone => format!("{path} gone"),
        });
        told.collect()
    }
}

#[test]
fn both_sides_are_equal_after_a_sync_of_any_changes() {
    let mut world = World::new();
    world.write("here/a", "a");
    world.write("here/deep/er/b", "b");
    fs::set_permissions(world.at("here/a"), fs::Permissions::from_mode(0o4750)).unwrap();
    symlink("../elsewhere", world.at("here/link")).unwrap();
    assert_eq!(world.sync(), []);
    let all = ["a 750 a", "deep/ 755", "deep/er/ 755", "deep/er/b 644 b", "link -> ../elsewhere"];
    assert_eq!(
        (world.tree("there"), world.tree("here")[1..].to_vec()),
        (all.map(String::from).into(), all[1..].iter().map(|&line| line.to_owned()).collect())
    );

    // A file becomes a folder, a folder a file, a link a file, and both sides add a file.
    fs::remove_file(world.at("there/a")).unwrap();
    world.write("there/a/inner", "now a folder");
    fs::remove_dir_all(world.at("there/deep")).unwrap();
    world.write("there/deep", "now a file");
    fs::remove_file(world.at("there/link")).unwrap();
    world.write("there/link", "now a file, too");
    world.write("here/new", "ours");
    world.write("there/other", "theirs");
    assert_eq!(world.sync(), []);
    let all = [
        "a/ 755",
        "a/inner 644 now a folder",
        "deep 644 now a file",
        "link 644 now a file, too",
        "new 644 ours",
        "other 644 theirs",
    ];
    assert_eq!((world.tree("here"), world.tree("there")), (all.map(String::from).into(), all.map(String::from).into()));
    assert_eq!(fs::read_dir(world.at("elsewhere")).unwrap().count(), 0);
    assert_eq!(world.sync(), []);
}

#[test]
fn hidden_files_stay_on_the_host_and_protected_files_stay_unchanged() {
    let mut world = World::with(&["secret", "box/key"], &["kept", "box/rules"]);
    world.write("here/secret", "s");
    world.write("here/box/key", "k");
    world.write("here/box/rules", "r");
    world.write("here/kept", "kept");
    world.sync();
    assert_eq!(world.tree("there"), ["box/ 755", "box/rules 644 r", "kept 644 kept"]);
    fs::remove_dir_all(world.at("there/box")).unwrap();
    world.write("there/secret", "mine");
    world.write("there/kept", "evil");
    let mut refused = world.sync();
    refused.sort();
    let told = |path: &str, reason: &str| (path.to_owned(), reason.to_owned());
    let (protected, full) = ("it is protected", "it contains, or may later contain, a protected or hidden path");
    let hidden = told("secret", "it is hidden from programs");
    assert_eq!(refused, [told("box", full), told("box/rules", protected), told("kept", protected), hidden]);
    assert_eq!(world.tree("here"), ["box/ 755", "box/key 644 k", "box/rules 644 r", "kept 644 kept", "secret 644 s"]);
    assert_eq!(world.tree("there"), ["box/ 755", "box/rules 644 r", "kept 644 kept", "secret 644 mine"]);
}

#[test]
fn a_file_changed_on_both_sides_keeps_the_hosts_version() {
    let mut world = World::new();
    world.write("here/file", "before");
    world.write("here/folder/inner", "before");
    world.sync();
    world.write("here/file", "ours");
    world.write("there/file", "theirs");
    fs::remove_dir_all(world.at("here/folder")).unwrap();
    world.write("there/folder/more", "theirs");
    let reason = "it was also changed outside of the sandbox meanwhile, and that change was kept".to_owned();
    // No file can be added to a folder that was removed here.
    let gone = "No such file or directory (os error 2)".to_owned();
    assert_eq!(world.sync(), [("file".to_owned(), reason), ("folder/more".to_owned(), gone)]);
    assert_eq!(
        (world.tree("here"), world.tree("there")),
        (vec!["file 644 ours".to_owned()], vec!["file 644 ours".to_owned()])
    );
}

#[test]
fn a_guest_that_lies_reaches_nothing_outside_of_the_workspace() {
    let mut world = World::new();
    let file = |path: &str| Entry { path: path.into(), now: Now::File { permissions: 0o6777 } };
    let send = |entry: Entry, content: &'static str| {
        move |stream: &mut UnixStream| {
            let _ = frames::tell(stream, Kind::Entry, &entry);
            for part in [content, ""] {
                let _ = frames::send(stream, Kind::Content, part.as_bytes());
            }
        }
    };
    for path in ["../elsewhere/x", "/etc/x", "a/../../elsewhere/x", "a//b", "", ".", "a/./b", "nul\0"] {
        let error = world.sync_with(send(file(path), "evil")).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "the other side sent the path `{}`, which is not valid in a workspace",
                path.replace('\0', "\u{fffd}")
            )
        );
    }
    // A link to a folder outside, and then a file through it.
    let through = |stream: &mut UnixStream| {
        let link = Entry { path: "way".into(), now: Now::Link { target: "../elsewhere".into() } };
        frames::tell(stream, Kind::Entry, &link).unwrap();
        send(file("way/x"), "evil")(stream);
        send(file("way/deep/x"), "evil")(stream);
        let gone = Entry { path: "way/kept".into(), now: Now::Gone };
        frames::tell(stream, Kind::Entry, &gone).unwrap();
        send(file("fine"), "fine")(stream);
    };
    world.write("elsewhere/kept", "kept");
    world.write("elsewhere/deep/kept", "kept");
    let refused = world.sync_with(through).unwrap();
    let told = |path: &str, reason: &str| Denial::Filesystem { path: path.into(), reason: reason.into() };
    let (no_folder, link) = ("Not a directory (os error 20)", "Too many levels of symbolic links (os error 40)");
    assert_eq!(refused, [told("way/x", no_folder), told("way/deep/x", link), told("way/kept", no_folder)]);
    assert_eq!(world.tree("here"), ["fine 777 fine", "way -> ../elsewhere"]);
    assert_eq!(world.tree("elsewhere"), ["deep/ 755", "deep/kept 644 kept", "kept 644 kept"]);
    // The set-user-id and set-group-id bits are dropped.
    assert_eq!(fs::metadata(world.at("here/fine")).unwrap().permissions().mode() & 0o7777, 0o777);
}

#[test]
fn a_guest_that_never_ends_is_ended() {
    let mut world = World::new();
    let flood = |stream: &mut UnixStream| {
        let entry = Entry { path: "big".into(), now: Now::File { permissions: 0o644 } };
        frames::tell(stream, Kind::Entry, &entry).unwrap();
        while frames::send(stream, Kind::Content, &[0; 4096]).is_ok() {}
    };
    let error = world.sync_with(flood).unwrap_err().to_string();
    assert_eq!(error, "the other side sent more than there is room for");
    let many = |stream: &mut UnixStream| {
        let entry = |number: u32| Entry { path: format!("f{number}"), now: Now::Folder { permissions: 0o755 } };
        (0..).map_while(|number| frames::tell(stream, Kind::Entry, &entry(number)).ok()).count();
    };
    let error = world.sync_with(many).unwrap_err().to_string();
    assert_eq!(error, "the other side sent more files than there is room for");
    assert!(!world.at("here/big").exists(), "half a file is none");
    let wrong = |stream: &mut UnixStream| frames::send(stream, Kind::Output, b"hello").unwrap();
    let error = world.sync_with(wrong).unwrap_err().to_string();
    assert_eq!(error, "the other side sent a frame Output where Entry belongs");
}

fn told(path: &str, reason: &str) -> (String, String) {
    (path.to_owned(), reason.to_owned())
}

fn denial(path: &str, reason: &str) -> Denial {
    Denial::Filesystem { path: path.into(), reason: reason.into() }
}

/// Sends a file as a guest would.
fn say_file(stream: &mut UnixStream, path: &str, content: &[u8]) {
    let entry = Entry { path: path.into(), now: Now::File { permissions: 0o644 } };
    let _ = frames::tell(stream, Kind::Entry, &entry);
    for part in content.chunks(CONTENT_BYTES_MAX).chain([&[][..]]) {
        let _ = frames::send(stream, Kind::Content, part);
    }
}

#[test]
fn parents_of_protected_or_hidden_paths_stay_folders_even_if_those_are_missing() {
    let mut world = World::with(&["private/deep/key"], &["conf/hook.sh", "later/rules"]);
    fs::create_dir(world.at("here/conf")).unwrap();
    fs::create_dir_all(world.at("here/private/deep")).unwrap();
    world.sync();
    fs::remove_dir(world.at("there/conf")).unwrap();
    symlink("mine", world.at("there/conf")).unwrap();
    world.write("there/mine/hook.sh", "evil");
    fs::remove_dir_all(world.at("there/private")).unwrap();
    world.write("there/later", "a file");
    let reason = "it contains, or may later contain, a protected or hidden path";
    let mut refused = world.sync();
    refused.sort();
    let paths = ["conf", "later", "private", "private/deep"];
    assert_eq!(refused, paths.map(|path| told(path, reason)));
    let here = ["conf/ 755", "mine/ 755", "mine/hook.sh 644 evil", "private/ 755", "private/deep/ 755"];
    assert_eq!(
        (world.tree("here"), world.tree("there")),
        (here.map(String::from).into(), here.map(String::from).into())
    );
    // It may come as a folder, with other files in it.
    world.write("there/later/other", "fine");
    world.write("there/later/rules", "evil");
    assert_eq!(world.sync(), [told("later/rules", "it is protected")]);
    assert_eq!(world.tree("here")[1..3], ["later/ 755", "later/other 644 fine"]);
    // A link that was made here stays a link.
    fs::remove_dir(world.at("here/conf")).unwrap();
    symlink("mine", world.at("here/conf")).unwrap();
    world.sync();
    fs::remove_file(world.at("there/conf")).unwrap();
    fs::create_dir(world.at("there/conf")).unwrap();
    assert_eq!(world.sync(), [told("conf", reason)]);
    assert_eq!(world.tree("here")[0], "conf -> mine");
}

#[test]
fn an_invalid_path_is_reported_cut_short_and_without_control_characters() {
    let mut world = World::new();
    let path = format!("\x1b[2J/../{}", "x".repeat(1 << 20));
    let error = world.sync_with(|stream| say_file(stream, &path, b"")).unwrap_err().to_string();
    let shown = format!("\u{fffd}[2J/../{}", "x".repeat(500 - 8));
    assert_eq!(error, format!("the other side sent the path `{shown}`, which is not valid in a workspace"));
}

#[test]
fn as_root_files_of_users_other_than_the_workspaces_owner_are_left_alone() {
    use std::os::unix::fs::{MetadataExt, chown};
    if !rustix::process::geteuid().is_root() {
        wieldy_testkit::skip("only root can give files away");
        return;
    }
    let mut world = World::new();
    world.write("here/secret", "root's");
    world.write("here/theirs/file", "root's");
    world.write("here/theirs/inner/own", "own");
    world.write("here/own", "own");
    for path in ["here", "here/own", "here/theirs/inner", "here/theirs/inner/own"] {
        chown(world.at(path), Some(4321), Some(4321)).unwrap();
    }
    world.ours = Ours::new(&world.at("here"), Vec::new(), Vec::new(), ROOM).unwrap();
    assert_eq!(world.sync(), []);
    assert_eq!(world.tree("there"), ["own 644 own"]);
    world.write("there/secret", "evil");
    world.write("there/theirs/file", "evil");
    world.write("there/theirs/inner/own", "evil");
    world.write("there/own", "changed");
    fs::set_permissions(world.at("there/theirs"), fs::Permissions::from_mode(0o777)).unwrap();
    let reason = "it belongs to another user than the workspace";
    let paths = ["secret", "theirs", "theirs/file", "theirs/inner", "theirs/inner/own"];
    assert_eq!(world.sync(), paths.map(|path| told(path, reason)));
    let here = [
        "own 644 changed",
        "secret 644 root's",
        "theirs/ 755",
        "theirs/file 644 root's",
        "theirs/inner/ 755",
        "theirs/inner/own 644 own",
    ];
    assert_eq!(world.tree("here"), here);
    // The guest does not see the refused files either.
    assert_eq!(world.tree("there"), ["own 644 changed"]);
    let owner = |path: &str| fs::metadata(world.at(path)).unwrap().uid();
    assert_eq!([owner("here/own"), owner("here/secret"), owner("here/theirs")], [4321, 0, 0]);
}

#[test]
fn a_guest_that_sends_forbidden_changes_without_end_is_ended() {
    let mut world = World::with(&[], &["kept"]);
    world.ours.room.files = usize::MAX;
    let nag = |stream: &mut UnixStream| {
        let entry = |number: u32| Entry { path: format!("kept/{number}"), now: Now::Gone };
        (0..).map_while(|number| frames::tell(stream, Kind::Entry, &entry(number)).ok()).count();
    };
    let error = world.sync_with(nag).unwrap_err().to_string();
    assert_eq!(error, "the other side sent too many changes that it may not make");
    world.ours.room.path_bytes = 10_000;
    let long = |stream: &mut UnixStream| {
        let entry = |number: u32| Entry { path: format!("{number:0200}"), now: Now::Gone };
        (0..).map_while(|number| frames::tell(stream, Kind::Entry, &entry(number)).ok()).count();
    };
    let error = world.sync_with(long).unwrap_err().to_string();
    assert_eq!(error, "the other side sent more paths than there is room for");
}

#[test]
fn a_file_saved_on_the_host_while_the_guest_stalls_is_kept() {
    let mut world = World::new();
    world.write("here/file", "before");
    world.write("here/other", "before");
    world.sync();
    let here = world.at("here");
    let stall = |stream: &mut UnixStream| {
        let entry = Entry { path: "file".into(), now: Now::File { permissions: 0o644 } };
        frames::tell(stream, Kind::Entry, &entry).unwrap();
        frames::send(stream, Kind::Content, b"theirs").unwrap();
        let is_aside = |name: std::ffi::OsString| name.to_string_lossy().starts_with(".wieldy-");
        while !fs::read_dir(&here).unwrap().any(|entry| is_aside(entry.unwrap().file_name())) {
            std::thread::yield_now();
        }
        fs::write(here.join("file"), "saved meanwhile").unwrap();
        fs::write(here.join("other"), "saved meanwhile, too").unwrap();
        frames::send(stream, Kind::Content, b"").unwrap();
        frames::tell(stream, Kind::Entry, &Entry { path: "other".into(), now: Now::Gone }).unwrap();
    };
    let reason = "it was also changed outside of the sandbox meanwhile, and that change was kept";
    assert_eq!(world.sync_with(stall).unwrap(), [denial("file", reason), denial("other", reason)]);
    assert_eq!(world.tree("here"), ["file 644 saved meanwhile", "other 644 saved meanwhile, too"]);
}

#[test]
fn half_files_that_a_killed_executor_left_are_swept_and_never_brought_over() {
    let mut world = World::new();
    let own = std::process::id();
    world.write("here/deep/.wieldy-4000000000-7", "half");
    // Of an earlier process with our process id: we never reached this number.
    world.write(&format!("here/.wieldy-{own}-ffffffffff"), "half");
    // Another process may be writing the first one, and the second is no temporary file.
    world.write("here/.wieldy-1-5", "being written");
    world.write("here/.wieldy-notes", "mine");
    assert_eq!(world.sync(), []);
    assert_eq!(world.tree("there"), [".wieldy-notes 644 mine", "deep/ 755"]);
    let left = |folder: &str| {
        let names =
            fs::read_dir(world.at(folder)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect::<BTreeSet<_>>()
    };
    assert_eq!(left("here"), [".wieldy-1-5", ".wieldy-notes", "deep"].map(String::from).into());
    assert_eq!(left("here/deep"), BTreeSet::new());
    let refused = world.sync_with(|stream| say_file(stream, ".wieldy-1-6", b"evil")).unwrap();
    assert_eq!(refused, [denial(".wieldy-1-6", "such names are for files that are being written")]);
    assert!(!world.at("here/.wieldy-1-6").exists());
}

#[test]
fn a_guest_adds_no_more_in_all_than_it_may() {
    let mut world = World::new();
    let content = vec![b'x'; 600 << 10];
    world.write("here/old", std::str::from_utf8(&content[..300 << 10]).unwrap());
    world.ours.measure().unwrap();
    world.sync();
    assert_eq!(world.sync_with(|stream| say_file(stream, "one", &content)).unwrap(), []);
    // Writing the same file again adds nothing.
    assert_eq!(world.sync_with(|stream| say_file(stream, "one", &content)).unwrap(), []);
    let full = "the limit `disk_bytes` of the sandbox is reached";
    assert_eq!(world.sync_with(|stream| say_file(stream, "two", &content)).unwrap(), [denial("two", full)]);
    assert!(!world.at("here/two").exists());
    // Bytes that are removed, on either side, may be added again.
    let removed = |stream: &mut UnixStream| {
        frames::tell(stream, Kind::Entry, &Entry { path: "old".into(), now: Now::Gone }).unwrap();
        say_file(stream, "two", &content);
    };
    assert_eq!(world.sync_with(removed).unwrap(), []);
    assert_eq!(world.sync_with(|stream| say_file(stream, "three", &content)).unwrap(), [denial("three", full)]);
    fs::remove_file(world.at("here/one")).unwrap();
    assert_eq!(world.sync_with(|stream| say_file(stream, "three", &content)).unwrap(), []);
}
