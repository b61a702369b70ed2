//! P-FS-01 to P-FS-08, each as an attack: no path lets a tool see or change anything outside the workspace.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, RenameFlags, mkfifoat, renameat_with};
use serde_json::{Value, json};
use wieldy_core::Code;

use crate::world::{CANARY, World};

/// Returns a call of every tool with the same path.
fn attacks(path: &str) -> Vec<(&'static str, Value)> {
    vec![
        ("Read", json!({"path": path})),
        ("Write", json!({"path": path, "content": "overwritten"})),
        ("Edit", json!({"path": path, "old": "canary", "new": "overwritten"})),
        ("Delete", json!({"path": path, "recursive": true})),
        ("List", json!({"path": path})),
        ("Search", json!({"path": path, "pattern": "canary"})),
        ("Glob", json!({"path": path, "pattern": "**"})),
    ]
}

/// Asserts that every tool is refused with one of `codes` and reveals nothing.
async fn assert_all_refused(world: &World, path: &str, codes: &[Code]) {
    for (tool, arguments) in attacks(path) {
        let result = world.call(tool, arguments).await;
        let shown = serde_json::to_string(&result).expect("plain data");
        assert!(!shown.contains(CANARY), "{tool} {path:?}: {shown}");
        let code = result.error.map(|error| error.code);
        assert!(code.is_some_and(|code| codes.contains(&code)), "{tool} {path:?}: {shown}");
    }
    world.assert_outside_untouched();
}

const DENIED: &[Code] = &[Code::FilesystemPolicyViolation];
const REFUSED: &[Code] = &[Code::InvalidInput];

#[tokio::test]
async fn p_fs_01_no_spelling_of_a_path_leads_outside() {
    let world = World::new();
    world.put("sub/a.txt", "inside");
    let absolute = world.outside("secret.txt");
    let absolute = absolute.to_str().expect("a path");
    for path in [
        "../outside/secret.txt",
        "./../outside/secret.txt",
        "sub/../../outside/secret.txt",
        ".//..//outside//secret.txt",
        "sub/./../../outside/secret.txt",
        absolute,
        &format!("/{absolute}"),
        &format!("/.{absolute}"),
        "/etc/passwd",
        "//etc/passwd",
    ] {
        assert_all_refused(&world, path, DENIED).await;
    }
    let message = world.refusal("Read", json!({"path": "../outside/secret.txt"})).await;
    insta::assert_snapshot!(message, @"
    E3105: `../outside/secret.txt` leads outside the workspace
    (give a path relative to the workspace, such as `src/main.rs`; paths outside it cannot be reached)
    ");
    // The folder above the workspace has no name in it, and deleting it is refused all the same.
    assert_all_refused(&world, "..", &[Code::FilesystemPolicyViolation, Code::InvalidInput]).await;
    assert_all_refused(&world, "sub/../..", &[Code::FilesystemPolicyViolation, Code::InvalidInput]).await;
    for path in ["sub/a.txt", "./sub//a.txt", "sub/../sub/a.txt", "sub/./a.txt"] {
        assert_eq!(world.text("Read", json!({"path": path})).await, "inside", "{path}");
    }
}

#[tokio::test]
async fn p_fs_02_a_sibling_with_the_same_beginning_is_another_folder() {
    let world = World::new();
    world.put("secret.txt", "inside");
    let sibling = format!("{}-secret/secret.txt", world.path("").to_str().expect("a path").trim_end_matches('/'));
    assert_all_refused(&world, &sibling, DENIED).await;
    assert_all_refused(&world, "../ws-secret/secret.txt", DENIED).await;
    assert_eq!(world.text("Read", json!({"path": world.path("secret.txt")})).await, "inside");
}

#[tokio::test]
async fn p_fs_03_no_link_leads_outside() {
    let world = World::new();
    world.put("real.txt", "inside");
    world
        .link("absolute", world.outside("secret.txt"))
        .link("relative", "../outside/secret.txt")
        .link("folder", world.outside(""))
        .link("chain-1", "chain-2")
        .link("chain-2", "chain-3")
        .link("chain-3", "relative")
        .link("missing", world.outside("new.txt"))
        .link("good-1", "good-2")
        .link("good-2", "real.txt");
    for path in ["folder/secret.txt", "folder/new.txt", "folder/"] {
        // `Delete` of `folder/` removes the link itself, so that case is tested last.
        for (tool, arguments) in attacks(path).into_iter().filter(|(tool, _)| path != "folder/" || *tool != "Delete") {
            let result = world.call(tool, arguments).await;
            let shown = serde_json::to_string(&result).expect("plain data");
            assert!(!shown.contains(CANARY), "{tool} {path}: {shown}");
            let denied = result.error.is_some_and(|error| error.code == Code::FilesystemPolicyViolation);
            assert!(denied || (tool == "Write" && path == "folder/"), "{tool} {path}: {shown}");
        }
    }
    for path in ["absolute", "relative", "chain-1", "missing"] {
        for (tool, arguments) in attacks(path).into_iter().filter(|(tool, _)| *tool != "Delete") {
            let result = world.call(tool, arguments).await;
            let shown = serde_json::to_string(&result).expect("plain data");
            assert!(!shown.contains(CANARY), "{tool} {path}: {shown}");
            assert_eq!(result.error.map(|error| error.code), Some(Code::FilesystemPolicyViolation), "{tool} {path}");
        }
    }
    world.assert_outside_untouched();
    assert_eq!(world.text("Read", json!({"path": "good-1"})).await, "inside");
    assert_eq!(world.text("Search", json!({"pattern": "canary|inside"})).await, "real.txt:1:inside");
    for path in ["absolute", "folder", "chain-1", "missing"] {
        assert!(world.call("Delete", json!({"path": path, "recursive": true})).await.is_success(), "{path}");
        assert!(!world.path(path).is_symlink(), "{path}: the link itself is deleted");
    }
    world.assert_outside_untouched();
}

#[tokio::test]
async fn p_fs_04_no_file_is_made_below_a_linked_folder_outside() {
    let world = World::new();
    world.put("inside/a.txt", "").link("folder", world.outside("")).link("up", "..").link("near", "inside");
    for path in ["folder/new.txt", "folder/a/b/new.txt", "up/outside/new.txt", "near/../../outside/new.txt"] {
        let message = world.refusal("Write", json!({"path": path, "content": "x"})).await;
        assert!(message.starts_with("E3105"), "{path}: {message}");
    }
    world.assert_outside_untouched();
    world.text("Write", json!({"path": "near/new.txt", "content": "x"})).await;
    assert_eq!(world.content("inside/new.txt"), "x");
}

#[tokio::test]
async fn p_fs_05_exchanging_folders_and_links_gains_nothing() {
    const ROUNDS: usize = 1600;
    let world = World::new();
    world.put("d/secret.txt", "inside").link("l", world.outside(""));
    let swapper = Swapper::start(world.path("d"), world.path("l"));
    let (mut seen, mut denied) = (0, 0);
    for round in 0..ROUNDS {
        let (tool, arguments) = match round % 8 {
            0..3 => ("Read", json!({"path": "d/secret.txt"})),
            3 | 4 => ("Write", json!({"path": "d/new.txt", "content": "inside"})),
            5 => ("Search", json!({"pattern": "canary|inside"})),
            6 => ("List", json!({"path": "d"})),
            _ => ("Delete", json!({"path": "d/new.txt"})),
        };
        let result = world.call(tool, arguments).await;
        let shown = serde_json::to_string(&result).expect("plain data");
        assert!(!shown.contains(CANARY), "{shown}");
        seen += usize::from(result.is_success());
        denied += usize::from(result.error.is_some_and(|error| error.code == Code::FilesystemPolicyViolation));
    }
    drop(swapper);
    world.assert_outside_untouched();
    assert!(seen > 0 && denied > 0, "both were met: {seen} went well, {denied} were denied");
}

/// A thread that exchanges a folder and a link, as fast as it can, until it is dropped.
struct Swapper {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Swapper {
    fn start(folder: PathBuf, link: PathBuf) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let is_over = over.clone();
        let thread = std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                renameat_with(CWD, &folder, CWD, &link, RenameFlags::EXCHANGE).expect("both are there");
            }
        });
        Self { over, thread: Some(thread) }
    }
}

impl Drop for Swapper {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().expect("dropped once").join().expect("it only renames");
    }
}

#[tokio::test]
async fn p_fs_06_links_of_the_kernel_are_not_followed() {
    let world = World::new();
    for (name, target) in
        [("root", "/proc/self/root"), ("cwd", "/proc/self/cwd"), ("fd", "/proc/self/fd/0"), ("dev", "/dev/fd/0")]
    {
        world.link(name, target);
        assert_all_refused_but_deletion(&world, name).await;
        assert_all_refused(&world, target, DENIED).await;
    }
    assert_all_refused_but_deletion(&world, "root/etc/passwd").await;
    // Refused even if such links are in the workspace itself.
    let proc = World::at("/proc/self".into(), tempfile::tempdir().expect("a folder"));
    for path in ["root/etc/passwd", "cwd/Cargo.toml", "fd/0", "root"] {
        for (tool, arguments) in [("Read", json!({"path": path})), ("List", json!({"path": path}))] {
            let message = proc.refusal(tool, arguments).await;
            assert!(message.starts_with("E3105"), "{tool} {path}: {message}");
        }
    }
    assert!(!proc.text("Read", json!({"path": "comm"})).await.is_empty(), "a file that is no link is read");
}

async fn assert_all_refused_but_deletion(world: &World, path: &str) {
    for (tool, arguments) in attacks(path).into_iter().filter(|(tool, _)| *tool != "Delete") {
        let message = world.refusal(tool, arguments).await;
        assert!(message.starts_with("E3105"), "{tool} {path}: {message}");
    }
}

#[tokio::test]
async fn p_fs_07_a_text_that_is_no_path_is_refused() {
    let world = World::new();
    let (name, path) = ("x".repeat(256), "x/".repeat(3000));
    for path in ["", " ", "\n", "\0", "a\0b", "../\0", "a\nb", "a\u{1b}[2Jb", &name, &path] {
        assert_all_refused(&world, path, REFUSED).await;
    }
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "a\0b"})).await, @r"
    E3303: the path holds the character '\0' at position 2
    (give the path of a file or folder in the workspace, such as `src/main.rs`)
    ");
    let longest = "x".repeat(255);
    world.text("Write", json!({"path": longest, "content": "fits"})).await;
    assert_eq!(world.text("Read", json!({"path": longest})).await, "fits");
    assert_eq!(world.names(), [longest]);
}

#[tokio::test]
async fn p_fs_08_pipes_sockets_and_devices_are_refused_at_once() {
    let world = World::new();
    mkfifoat(CWD, world.path("pipe"), 0o600.into()).expect("a pipe");
    let _listener = UnixListener::bind(world.path("socket")).expect("a socket");
    world.put("a.txt", "needle").link("to-pipe", "pipe");
    let before = Instant::now();
    for path in ["pipe", "socket", "to-pipe"] {
        for (tool, arguments) in attacks(path).into_iter().filter(|(tool, _)| *tool != "Delete") {
            let message = world.refusal(tool, arguments).await;
            assert!(message.starts_with("E3303: `"), "{tool} {path}: {message}");
        }
    }
    insta::assert_snapshot!(world.refusal("Read", json!({"path": "pipe"})).await, @"E3303: `pipe` is a named pipe, not a file");
    assert_eq!(world.text("Search", json!({"pattern": "needle"})).await, "a.txt:1:needle");
    insta::assert_snapshot!(world.text("List", json!({})).await, @"
    a.txt  6 B
    pipe  (special)
    socket  (special)
    to-pipe  (link)
    ");
    assert!(before.elapsed() < Duration::from_secs(5), "nothing waits for the other end");
    let dev = World::at("/dev".into(), tempfile::tempdir().expect("a folder"));
    insta::assert_snapshot!(dev.refusal("Read", json!({"path": "zero"})).await, @"E3303: `zero` is a device, not a file");
    assert!(world.call("Delete", json!({"path": "pipe"})).await.is_success(), "it can be cleared away");
}
