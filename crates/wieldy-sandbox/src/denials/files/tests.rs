use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::view::plan::{Kind, Room};

/// Returns steps like those of a planner.
fn steps() -> Vec<Step> {
    let bind = |source: &str, target: &str, writable| Step::Bind {
        source: source.into(),
        target: target.into(),
        writable,
        optional: false,
    };
    let memory = |path: &str| Step::Tmpfs { path: path.into(), room: Room { bytes: 1, inodes: 1 }, mode: 0o755 };
    vec![
        memory("/"),
        Step::Link { path: "/bin".into(), target: "usr/bin".into() },
        Step::Dev,
        bind("/etc", "/etc", false),
        Step::File { path: "/etc/hosts".into(), content: String::new() },
        Step::Hide { path: "/etc/shadow".into(), kind: Kind::File },
        Step::Folder { path: "/home".into() },
        memory("/home/agent"),
        Step::Proc,
        memory("/run"),
        Step::Folder { path: "/run/git-templates".into() },
        Step::Folder { path: "/srv".into() },
        bind("/data", "/srv/data", false),
        bind("/data/out", "/srv/data/out", true),
        memory("/tmp"),
        bind("/usr", "/usr", false),
        Step::Folder { path: "/var".into() },
        Step::Link { path: "/var/run".into(), target: "/run".into() },
        Step::Folder { path: "/w".into() },
        bind("/w", "/w", true),
        Step::Hide { path: "/w/.env".into(), kind: Kind::File },
        bind("/w/.git", "/w/.git", true),
        Step::Protect { path: "/w/.git/hooks".into() },
        Step::Seal,
    ]
}

fn seen_with(code: i32, text: &str) -> Vec<(String, String)> {
    let steps = steps();
    let place =
        Place { workspace: Path::new("/w"), folder: Path::new("/w/sub"), steps: &steps, code, search: "/usr/bin" };
    let told = |denial| match denial {
        Denial::Filesystem { path, reason } => (path, reason),
        Denial::Network { .. } => unreachable!("it is about files"),
    };
    place.denials(text).into_iter().map(told).collect()
}

/// Returns the paths of the denials found in a text.
fn seen(text: &str) -> Vec<String> {
    seen_with(1, text).into_iter().map(|(path, _)| path).collect()
}

#[test]
fn each_place_has_its_rule() {
    let read_only = |why, host: Option<&str>| PathAccess::ReadOnly { why, host: host.map(PathBuf::from) };
    for (path, expected) in [
        ("/", PathAccess::Outside),
        ("/new", PathAccess::Outside),
        ("/home/ada/x", PathAccess::Outside),
        ("/var/lib/x", PathAccess::Outside),
        ("/srv/other", PathAccess::Outside),
        ("/opt/x", read_only(ReadOnly::System, None)),
        ("/usr/x", read_only(ReadOnly::System, Some("/usr/x"))),
        ("/bin/x", read_only(ReadOnly::System, Some("/usr/bin/x"))),
        ("/etc/../usr", read_only(ReadOnly::System, Some("/usr"))),
        ("/etc/hosts", read_only(ReadOnly::System, None)),
        ("/srv/data/x", read_only(ReadOnly::Mounted, Some("/data/x"))),
        ("/srv/data/out/x", PathAccess::Open),
        ("/etc/shadow", PathAccess::Hidden),
        ("/w/.env", PathAccess::Hidden),
        ("/w/.git/hooks/x", read_only(ReadOnly::Protected, Some("/w/.git/hooks/x"))),
        ("/w/.git", PathAccess::Held),
        ("/w/.git/index", PathAccess::Open),
        ("/w/x", PathAccess::Open),
        ("/home/agent/x", PathAccess::Open),
        ("/run/git-templates/x", PathAccess::Open),
        ("/var/run/x", PathAccess::Open),
        ("/proc/1/x", PathAccess::Kernel),
        ("/dev/x", PathAccess::Kernel),
    ] {
        assert_eq!(access_to(&steps(), Path::new(path)), expected, "{path}");
    }
}

#[test]
fn programs_of_many_kinds_are_understood() {
    for (text, paths) in [
        ("touch: cannot touch '/usr/x': Read-only file system", vec!["/usr/x"]),
        ("mkdir: cannot create directory ‘/usr/x y’: Read-only file system", vec!["/usr/x y"]),
        ("mv: cannot move 'a' to '/usr/b': Read-only file system", vec!["/usr/b"]),
        ("mv: cannot move '../.git' to 'x': Device or resource busy", vec![".git"]),
        ("head: cannot open '../.env' for reading: Permission denied", vec![".env"]),
        ("cat: ../.env: Permission denied", vec![".env"]),
        ("cat: '/w/.env': Permission denied\r", vec![".env"]),
        ("bash: line 1: /usr/foo: Read-only file system", vec!["/usr/foo"]),
        ("sh: 1: cannot create /usr/foo: Read-only file system", vec!["/usr/foo"]),
        ("zsh:1: read-only file system: /usr/foo", vec!["/usr/foo"]),
        ("tar: /usr/foo: Cannot open: Read-only file system", vec!["/usr/foo"]),
        ("Can't open '/usr/foo' for writing: Read-only file system at -e line 1.", vec!["/usr/foo"]),
        ("PermissionError: [Errno 13] Permission denied: '/etc/shadow'", vec!["/etc/shadow"]),
        ("OSError: [Errno 30] Read-only file system: 'a' -> '/usr/b'", vec!["/usr/b"]),
        ("Error: EROFS: read-only file system, open '/usr/x'", vec!["/usr/x"]),
        ("npm error [Error: EACCES: permission denied, open '/etc/shadow'] {", vec!["/etc/shadow"]),
        ("open /etc/shadow: permission denied", vec!["/etc/shadow"]),
        ("panic: open /home/ada/x: no such file or directory", vec!["/home/ada/x"]),
        ("Permission denied @ rb_sysopen - /etc/shadow (Errno::EACCES)", vec!["/etc/shadow"]),
        ("java.io.FileNotFoundException: /etc/shadow (Permission denied)", vec!["/etc/shadow"]),
        ("error: could not write config file ../.git/hooks: Device or resource busy", vec![".git/hooks"]),
        ("error: failed to write `/usr/x`\n\nCaused by:\n  Read-only file system (os error 30)", vec!["/usr/x"]),
        ("\u{1b}[1;31merror\u{1b}[0m: open /etc/shadow: permission denied", vec!["/etc/shadow"]),
        ("a: /usr/one: Read-only file system\nb: /usr/two: Read-only file system", vec!["/usr/one", "/usr/two"]),
        ("a: /usr/one: Read-only file system\nb: /usr/one: Read-only file system", vec!["/usr/one"]),
        // The script itself was not refused.
        ("/usr/bin/script: line 3: own: Permission denied", vec![]),
        ("PHP Warning: fopen(): Failed to open stream: Permission denied in /usr/share/x.php on line 3", vec![]),
        // The message names no path.
        ("Read-only file system", vec![]),
        ("git@example.com: Permission denied (publickey).", vec![]),
        // The plan is not the reason of these errors.
        ("cat: ../other: Permission denied", vec![]),
        ("cat: /tmp/x: Read-only file system", vec![]),
        ("cat: /usr/x: No such file or directory", vec![]),
        ("cat: srv/x: No such file or directory", vec![]),
        ("cat: /no/such/file: No such file or directory", vec![]),
        ("cat: /etc/shadow: No such file or directory", vec![]),
        ("rm: cannot remove '/tmp/x': Device or resource busy", vec![]),
        ("cat: /proc/1/mem: Permission denied", vec![]),
    ] {
        assert_eq!(seen(&without_escapes(text)), paths, "{text}");
    }
}

#[test]
fn a_denied_world_readable_file_was_meant_to_be_written_or_executed() {
    let text = "bash: line 1: /etc/hosts: Permission denied";
    assert_eq!((seen_with(1, text).len(), seen_with(126, text).len()), (1, 0));
    let folder = tempfile::tempdir().unwrap();
    let may_read = |name: &str| everybody_may_read(&folder.path().join(name));
    fs::create_dir(folder.path().join("inner")).unwrap();
    let set = |name: &str, mode| {
        fs::set_permissions(folder.path().join(name), std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    fs::write(folder.path().join("inner/file"), "").unwrap();
    set("", 0o755);
    for (of_folder, of_file, file, missing) in
        [(0o755, 0o644, true, true), (0o755, 0o640, false, true), (0o700, 0o644, false, false)]
    {
        set("inner", of_folder);
        set("inner/file", of_file);
        let found = (may_read("inner/file"), may_read("inner/none"));
        assert_eq!(found, (file, missing), "{of_folder:o} {of_file:o}");
    }
}

#[test]
fn reported_paths_have_control_characters_escaped_and_are_never_cut() {
    let refused = |path: &str| seen(&format!("cat: {path}: Read-only file system"));
    assert_eq!(refused("/usr/a\u{1b}]0;b\u{7}"), ["/usr/a\\u{1b}]0;b\\u{7}"]);
    let long = format!("/usr/{}", "x".repeat(PATH_BYTES_MAX - 5));
    assert_eq!((refused(&long), refused(&format!("{long}x"))), (vec![long], vec![]));
}

struct Nowhere;

impl OutputSink for Nowhere {
    fn write(&self, _stream: Stream, _bytes: &[u8]) {}
}

/// Returns the denials found in chunks from these streams.
fn heard_of(streams: &[Stream], chunks: &[&[u8]], ended: Ended) -> Vec<Denial> {
    let confinement = Confinement {
        workspace: "/w".into(),
        files: Default::default(),
        network: Default::default(),
        limits: Default::default(),
        place: Default::default(),
        place_limits: Default::default(),
        grace: Default::default(),
    };
    let command = Command {
        program: "x".into(),
        arguments: Vec::new(),
        environment: Default::default(),
        folder: PathBuf::new(),
        stdin: Default::default(),
        terminal: None,
    };
    let scan = FileDenials::new(&Nowhere);
    for (stream, chunk) in streams.iter().cycle().zip(chunks) {
        scan.write(*stream, chunk);
    }
    scan.denials(ended, &command, &confinement, &steps())
}

fn denials(chunks: &[&[u8]], ended: Ended) -> Vec<Denial> {
    heard_of(&[Stream::Stderr], chunks, ended)
}

#[test]
fn only_whole_lines_at_the_end_of_a_failed_commands_output_count() {
    let (line, rest) = (b"cat: /usr/x: Read-only file system\n".as_slice(), vec![b'.'; TAIL_BYTES - 20]);
    let failed = Ended::Code(1);
    assert_eq!(denials(&[line], failed).len(), 1);
    assert_eq!(denials(&[&line[..9], &line[9..]], failed).len(), 1);
    assert_eq!(denials(&[&rest, b"\n", line], failed).len(), 1);
    assert_eq!(denials(&[&[&rest, b"\n".as_slice(), &rest, b"\n", line].concat()], failed).len(), 1);
    // Only the end of a line is left, which would look like another error line.
    let (whole, end) = (b"cat: own/usr/x: Read-only file system\n".as_slice(), "/usr/x: Read-only file system\n".len());
    assert_eq!(denials(&[&whole[whole.len() - end..]], failed).len(), 1);
    assert_eq!(denials(&[whole, &vec![b'.'; TAIL_BYTES - end]], failed), []);
    // Far more than is kept, in chunks of every size.
    for size in [1, 7, 1000, TAIL_BYTES - 1, TAIL_BYTES, TAIL_BYTES + 1] {
        let all = [vec![b'.'; 5 * TAIL_BYTES], b"\n".to_vec(), line.to_vec()].concat();
        assert_eq!(denials(&all.chunks(size).collect::<Vec<_>>(), failed).len(), 1, "{size}");
        let all = [line.to_vec(), vec![b'.'; TAIL_BYTES], b"\n".to_vec()].concat();
        assert_eq!(denials(&all.chunks(size).collect::<Vec<_>>(), failed).len(), 0, "{size}");
    }
    // Stdout counts only if stderr is empty.
    let (out, err) = (Stream::Stdout, Stream::Stderr);
    assert_eq!(heard_of(&[out], &[line], failed).len(), 1);
    assert_eq!(heard_of(&[out, err], &[line, b"failed\n"], failed), []);
    assert_eq!(heard_of(&[out, err], &[b"begun\n", line], failed).len(), 1);
    assert_eq!(denials(&[line], Ended::Code(0)), []);
    assert_eq!(denials(&[line], Ended::Signal(9)), []);
}

/// Generates texts in which error lines are likely.
fn said() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..20),
        proptest::sample::select(vec![
            "Read-only file system",
            "PERMISSION denied",
            "No such file or directory",
            "Device or resource busy",
            ": ",
            "'",
            "‘",
            "\"",
            "`",
            "\n",
            "\u{1b}[",
            " @ ",
            " - ",
            " (",
            "Cannot ",
            "/usr/x",
            "/srv/x",
            "../.env",
            "../../..",
            "é",
        ])
        .prop_map(|text| text.as_bytes().to_vec()),
    ];
    proptest::collection::vec(part, 0..60).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_output_makes_few_breaches_and_the_plan_confirms_each(said in said(), code in -1..300) {
        for denial in denials(&[&said], Ended::Code(code)) {
            let Denial::Filesystem { path, reason } = &denial else { unreachable!("it is about files") };
            prop_assert!(code != 0);
            prop_assert!(path.len() < TAIL_BYTES && !path.chars().any(char::is_control), "{denial}");
            prop_assert!(!reason.is_empty());
            let access_to = access_to(&steps(), &Path::new("/w").join(path));
            prop_assert!(access_to != PathAccess::Open, "{denial}");
        }
        prop_assert!(denials(&[&said], Ended::Code(code)).len() <= BREACHES_MAX);
    }
}

#[test]
fn a_program_that_the_sandbox_does_not_show_is_named() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let home = tempfile::tempdir().unwrap();
    let home = home.path().canonicalize().unwrap();
    for (file, mode) in [("bin/deploy", 0o755), ("bin/notes", 0o644), ("apps/tool", 0o755)] {
        fs::create_dir_all(home.join(file).parent().unwrap()).unwrap();
        fs::write(home.join(file), "").unwrap();
        fs::set_permissions(home.join(file), fs::Permissions::from_mode(mode)).unwrap();
    }
    symlink(home.join("apps/tool"), home.join("bin/tool")).unwrap();
    let bin = home.join("bin");
    let (search, shown_bin) = (format!("relative:/usr/bin:{}", bin.display()), bin.clone());
    let mount = Step::Bind { source: bin.clone(), target: shown_bin, writable: false, optional: false };
    // One sandbox shows nothing of the folder; the other shows it, but not the targets of its links.
    for (with_bin, deploy, tool) in
        [(false, Some(bin.join("deploy")), Some(bin.join("tool"))), (true, None, Some(home.join("apps/tool")))]
    {
        let mut steps = steps();
        steps.extend(with_bin.then(|| mount.clone()));
        let place =
            Place { workspace: Path::new("/w"), folder: Path::new("/w"), steps: &steps, code: 127, search: &search };
        let named = |name: &str| {
            let said = [
                format!("bash: line 1: {name}: command not found\n"),
                format!("zsh:1: command not found: {name}\n"),
                format!("sh: 1: {name}: not found\n"),
                format!("exec: \"{name}\": executable file not found in $PATH\n"),
            ];
            let told = said.map(|text| place.denials(&text));
            assert!(told.iter().all(|denials| *denials == told[0]), "{told:?}");
            told[0].clone()
        };
        let not_shown = |path: Option<PathBuf>| {
            let path = path.map(|path| path.display().to_string());
            path.map(|path| Denial::Filesystem { path, reason: NOT_SHOWN.into() }).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(named("deploy"), not_shown(deploy));
        assert_eq!(named("tool"), not_shown(tool));
        for name in ["notes", "missing", "env", "..", "", "apps/tool"] {
            assert_eq!(named(name), [], "{name}");
        }
    }
}
