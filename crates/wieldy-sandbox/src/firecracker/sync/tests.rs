//! Two copies of a workspace, with an honest guest and with guests that lie.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use super::*;

const ROOM: Room = Room { bytes: 1 << 20, files: 100 };

/// Both copies of a workspace, and somewhere else that nobody may touch.
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

    /// Brings both together; the paths that the guest was refused, with the reasons.
    fn sync(&mut self) -> Vec<(String, String)> {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let (agreed, breaches) = std::thread::scope(|scope| {
            let answering = scope.spawn(|| {
                assert_eq!(frames::receive(&mut far).unwrap().kind, Kind::Sync);
                answer(&self.theirs, &mut far, &self.agreed).unwrap()
            });
            let breaches = self.ours.sync(&mut near).unwrap();
            (answering.join().unwrap(), breaches)
        });
        self.agreed = agreed;
        let told = |breach| match breach {
            Breach::Filesystem { path, reason } => (path, reason),
            Breach::Network { .. } => panic!("{breach}"),
        };
        breaches.into_iter().map(told).collect()
    }

    /// What a guest gets to hear that says this and nothing else.
    fn sync_with(&mut self, say: impl FnOnce(&mut UnixStream) + Send) -> io::Result<Vec<Breach>> {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                say(&mut far);
                // Listens to the end, as a guest would.
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

    /// Everything in a folder with what it is.
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
fn both_sides_are_the_same_afterwards_whatever_changed_on_either() {
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

    // A file becomes a folder, a folder a file, a link a file; on both sides something goes and something comes.
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
fn what_is_hidden_stays_here_and_what_is_protected_stays_as_it_is() {
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
    let (protected, full) = ("it is protected", "Directory not empty (os error 39)");
    let hidden = told("secret", "it is hidden from programs");
    assert_eq!(refused, [told("box", full), told("box/rules", protected), told("kept", protected), hidden]);
    assert_eq!(world.tree("here"), ["box/ 755", "box/key 644 k", "box/rules 644 r", "kept 644 kept", "secret 644 s"]);
    assert_eq!(world.tree("there"), ["box/ 755", "box/rules 644 r", "kept 644 kept", "secret 644 mine"]);
}

#[test]
fn what_changed_on_both_sides_is_as_it_is_here() {
    let mut world = World::new();
    world.write("here/file", "before");
    world.write("here/folder/inner", "before");
    world.sync();
    world.write("here/file", "ours");
    world.write("there/file", "theirs");
    fs::remove_dir_all(world.at("here/folder")).unwrap();
    world.write("there/folder/more", "theirs");
    let reason = "it was changed outside of the sandbox meanwhile, and that counts".to_owned();
    // A folder that is not here any more takes nothing.
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
            format!("the other side sent the path `{}`, which is none in a workspace", path.escape_debug())
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
    let told = |path: &str, reason: &str| Breach::Filesystem { path: path.into(), reason: reason.into() };
    let (no_folder, link) = ("Not a directory (os error 20)", "Too many levels of symbolic links (os error 40)");
    assert_eq!(refused, [told("way/x", no_folder), told("way/deep/x", link), told("way/kept", no_folder)]);
    assert_eq!(world.tree("here"), ["fine 777 fine", "way -> ../elsewhere"]);
    assert_eq!(world.tree("elsewhere"), ["deep/ 755", "deep/kept 644 kept", "kept 644 kept"]);
    // Nor does a file make its caller somebody else.
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
