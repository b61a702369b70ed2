//! Tests promise 3: files that programs outside of the sandbox would execute stay unchanged, and missing ones cannot be
//! made.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use wieldy_core::secrets::PLACEHOLDER_MARK;
use wieldy_core::{FileRules, Place, Sandbox};
use wieldy_sandbox::is_placeholder;

use super::arena::{Arena, attacks, is_root, say};
use crate::world::{PATIENCE, Printed, alive, eventually};

attacks! {
    missing_protected_paths_cannot_be_made
    a_repository_that_is_there_is_used_but_its_settings_and_hooks_stay
    protection_holds_when_another_sandbox_of_the_same_workspace_ends
    places_held_for_protection_belong_to_the_owner_of_the_workspace
    the_workspace_becomes_no_bare_repository
    placeholders_are_nothing_to_their_readers
    a_read_only_workspace_is_used_and_holds_nothing
}

/// Shell functions with the attacks on each protected path.
const FUNCTIONS: &str = r#"
    tamper() {
        for path in "$@"; do
            attack bash -c "echo evil > $path"
            attack bash -c "echo evil >> $path"
            attack bash -c "echo evil > $path/evil"
            attack mkdir -p $path/evil
            attack rm -r $path
            attack rmdir $path
            attack mv $path moved
            attack mv -T /tmp/evil $path
            attack cp --remove-destination /tmp/evil $path
            attack ln -sfT /tmp $path
            attack ln $path hard
            attack install -m 755 /tmp/evil $path/evil
            attack python3 -c "import os; os.rename('/tmp/evil', '$path')"
            attack python3 -c "import ctypes; exit(ctypes.CDLL(None, use_errno=True).renameat2(-100, b'own', -100, b'$path', 2) & 1)"
            attack touch $path
            attack chmod 777 $path
        done
    }
    echo evil > /tmp/evil; echo own > own
"#;

const ALWAYS: &str = ".claude .codex .cursor .gemini .idea .mcp.json .opencode .vscode .wieldy .zed opencode.json \
    opencode.jsonc commondir refs wieldy.toml";

fn git(folder: &Path, words: &[&str]) {
    let mut git = Command::new("git");
    let done = git.args(["-c", "user.name=a", "-c", "user.email=a@b", "-C"]).arg(folder).args(words).output().unwrap();
    assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// P-SBX-07.
async fn missing_protected_paths_cannot_be_made(arena: Arena) {
    let script = format!(
        "{FUNCTIONS} tamper {ALWAYS} .git/hooks .git/commondir
         attack mv .git moved
         attack rm -rf .git
         attack rmdir .git
         attack bash -c 'mkdir .GIT/hooks && test -e .git/hooks/../HEAD'
         attack bash -c 'mkdir .Claude && touch .Claude/evil && test -e .claude/evil'
         rm -rf .GIT .Claude
         attack ln -sfT /tmp .git
         attack bash -c 'cd .git && mv hooks ../moved'
         attack bash -c 'cd /proc/self/cwd/.git/hooks && touch evil'
         rm -rf moved
         twin bash -c 'echo good > AGENTS.md; mkdir -p src/.claude .github; rm -r AGENTS.md src .github'"
    );
    arena.attack(&script).await;
    let workspace = arena.workspace.clone();
    let kept = arena.sandbox.list().into_iter().map(|status| status.sandbox.id);
    for id in kept {
        assert!(arena.sandbox.destroy(&id).await);
    }
    // The placeholders are gone again.
    let names = || fs::read_dir(&workspace).unwrap().flatten().map(|entry| entry.file_name()).collect::<Vec<_>>();
    for _ in 0..500 {
        if names() == ["own"] {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("{:?}", names());
}

#[tokio::test]
async fn a_repository_can_be_made_but_not_its_hooks() {
    let arena = Arena::with(1);
    let script = "
        twin git init -q
        twin bash -c 'echo text > file; git add file; git -c user.name=a -c user.email=a@b commit -qm message'
        attack bash -c 'echo evil > .git/hooks/pre-commit'
        attack bash -c 'echo /tmp > .git/commondir'
        attack mv .git elsewhere
        attack rm -rf .git/hooks
        echo done";
    // Not the first call of the workspace, so earlier sandboxes have held the paths.
    assert_eq!(arena.run(Place::Own, "echo done").await, "done\n");
    assert_eq!(arena.run(Place::Own, "sleep 0.3; echo done").await, "done\n");
    assert_eq!(arena.run(Place::Own, script).await, "done\n");
    arena.rest().await;
}

async fn a_repository_that_is_there_is_used_but_its_settings_and_hooks_stay(arena: Arena) {
    git(&arena.workspace, &["init", "-q"]);
    fs::write(arena.workspace.join(".git/hooks/pre-commit"), "#!/bin/sh\n").unwrap();
    for module in ["inner", "deep/er", "third/party/x/y/lib/foo"] {
        let module = arena.workspace.join(".git/modules").join(module);
        fs::create_dir_all(module.join("hooks")).unwrap();
        fs::write(module.join("HEAD"), "ref: refs/heads/main\n").unwrap();
        fs::write(module.join("config"), "[core]\n").unwrap();
    }
    let config = fs::read_to_string(arena.workspace.join(".git/config")).unwrap();
    let script = format!(
        "{FUNCTIONS} tamper .git/hooks .git/hooks/pre-commit .git/hooks/post-checkout .git/config .git/config.worktree \
            .git/commondir .git/modules/inner/hooks .git/modules/inner/config .git/modules/deep/er/hooks .git/modules/deep/er/config \
            .git/modules/third/party/x/y/lib/foo/hooks .git/modules/third/party/x/y/lib/foo/config
         attack git config core.hooksPath /tmp
         attack git config include.path /tmp/evil
         attack git config --worktree core.fsmonitor /tmp/evil
         attack git config --file .git/config core.pager /tmp/evil
         attack mv .git moved
         attack rmdir .git
         attack mv .git/modules moved
         attack mv .git/modules/inner moved
         twin git -c core.hooksPath=/dev/null status
         twin env GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=core.hooksPath GIT_CONFIG_VALUE_0=/dev/null git status
         twin bash -c 'date +%N > file; git add file; git -c user.name=a -c user.email=a@b commit -qnm message'
         twin git checkout -q -B branch"
    );
    arena.attack(&script).await;
    assert_eq!(fs::read_to_string(arena.workspace.join(".git/config")).unwrap(), config);
    assert_eq!(fs::read_to_string(arena.workspace.join(".git/hooks/pre-commit")).unwrap(), "#!/bin/sh\n");
    git(&arena.workspace, &["config", "--get", "core.bare"]);
}

#[tokio::test]
async fn links_and_folders_on_the_way_to_a_protected_path_stay_too() {
    let mut arena = Arena::new();
    git(&arena.workspace, &["init", "-q", "--separate-git-dir", "real"]);
    fs::remove_file(arena.workspace.join(".git")).unwrap();
    symlink("real", arena.workspace.join(".git")).unwrap();
    fs::create_dir(arena.workspace.join("settings")).unwrap();
    symlink("settings", arena.workspace.join(".vscode")).unwrap();
    fs::create_dir_all(arena.workspace.join("deep/folder")).unwrap();
    arena.confinement.files =
        Arc::new(FileRules { protected: vec!["deep/folder/rule".into()], ..FileRules::default() });
    let script = format!(
        "{FUNCTIONS} tamper .vscode settings real/hooks real/config .git/hooks .git/config deep/folder/rule
         attack ln -sfT /tmp .git
         attack mv real moved
         attack rmdir real
         attack mv deep moved
         attack mv deep/folder deep/moved
         twin touch deep/folder/other deep/other
         twin git status"
    );
    arena.attack(&script).await;
}

#[tokio::test]
async fn files_that_the_users_tools_run_are_protected_where_they_exist() {
    let arena = Arena::new();
    for name in [".devcontainer/devcontainer.json", ".husky/pre-commit", ".envrc", ".exrc"] {
        let file = arena.workspace.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "").unwrap();
    }
    let script = "for name in .devcontainer/devcontainer.json .husky/pre-commit .envrc .exrc; do
            attack bash -c \"echo evil > $name\"; attack mv $name moved; attack rm $name; twin cat $name
        done
        attack mv .husky moved; attack touch .husky/post-checkout; twin touch .nvimrc; twin rm .nvimrc";
    arena.attack(script).await;
}

/// The placeholders of one sandbox must protect all other sandboxes of the workspace, also after its end.
async fn protection_holds_when_another_sandbox_of_the_same_workspace_ends(arena: Arena) {
    arena.run(Place::Own, "true").await;
    let session = Arena::session("long");
    arena.run(session.clone(), "true").await;
    for _ in 0..3 {
        arena.run(Place::Own, "true").await;
    }

    let other = arena.sandbox.create(&arena.confinement(Arena::session("other"))).await.unwrap();
    assert!(arena.sandbox.destroy(&other.sandbox.id).await);
    let script = format!("{FUNCTIONS} tamper {ALWAYS} .git/hooks .git/commondir; attack mv .git moved; echo done");
    assert_eq!(arena.run(session, &script).await, "done\n");
}

/// Plays another executor in the same workspace.
#[tokio::test]
async fn protection_holds_when_another_executor_ends() {
    let arena = Arena::new();
    let own = |script: &'static str| arena.run(Arena::session("first"), script);
    own("true").await;
    let second = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "escape::protected::another_executor", "--nocapture"])
        .env("WIELDY_TEST_SECOND", &arena.workspace)
        .output()
        .unwrap();
    assert!(second.status.success(), "{}", String::from_utf8_lossy(&second.stdout));
    own("attack touch .claude/evil; attack touch .git/hooks/evil; attack touch wieldy.toml/evil").await;
    assert_eq!(
        own("attack touch .claude/evil; attack mkdir .claude; attack touch .git/hooks/evil; echo done").await,
        "done\n"
    );
}

/// A lock that a command takes on a protected file does not block other sandboxes of the workspace.
#[tokio::test]
async fn locks_of_commands_keep_no_sandbox_from_being_made() {
    let arena = Arc::new(Arena::new());
    git(&arena.workspace, &["init", "-q"]);
    let (printed, stop) = (Arc::<Printed>::default(), CancellationToken::new());
    let script = "mkdir -p .git/modules/own; touch .git/modules/own/config; exec python3 -uc '
import fcntl, os, time
kept = []
for name in [\".git/modules/own/config\", \".git/config\", \".claude\", \".git/hooks\", \".\"]:
    kept.append(os.open(name, os.O_RDONLY))
    try: fcntl.flock(kept[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError: fcntl.flock(kept[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)
print(\"ready\"); time.sleep(1000)'";
    let locker = tokio::spawn({
        let (arena, printed, stop) = (arena.clone(), printed.clone(), stop.clone());
        async move { arena.run_stoppable(&arena.confinement(Arena::session("locker")), script, &printed, stop).await }
    });
    printed.contains("ready").await;
    let look = "attack touch .claude/evil; attack bash -c 'echo evil > .git/modules/own/config'; attack git config a.b c; echo done";
    for place in [Place::Own, Arena::session("other")] {
        assert_eq!(arena.run(place, look).await, "done\n");
    }
    stop.cancel();
    locker.await.unwrap().unwrap();
}

/// The user's programs replace files in the same folder by new ones of the same name, and a mount goes with the old
/// file.
#[tokio::test]
async fn protection_holds_when_the_user_replaces_a_protected_file() {
    let arena = Arena::with(1);
    git(&arena.workspace, &["init", "-q"]);
    fs::create_dir(arena.workspace.join(".vscode")).unwrap();
    fs::write(arena.workspace.join(".env"), "canary").unwrap();
    let session = Arena::session("long");
    for place in [session.clone(), Place::Own, Place::Own] {
        arena.run(place, "sleep 0.2").await;
    }
    for round in ["first", "second"] {
        git(&arena.workspace, &["config", "user.name", round]);
        fs::remove_dir(arena.workspace.join(".vscode")).unwrap();
        fs::create_dir(arena.workspace.join(".vscode")).unwrap();
        fs::write(arena.workspace.join("new"), "canary").unwrap();
        fs::rename(arena.workspace.join("new"), arena.workspace.join(".env")).unwrap();
        for place in [session.clone(), Place::Own] {
            let script = "attack git config core.hooksPath /tmp; attack bash -c 'echo evil >> .git/config'; \
                          attack touch .vscode/evil; attack grep canary .env; twin git status; git config user.name";
            assert_eq!(arena.run(place, script).await, format!("{round}\n"));
        }
    }
    arena.rest().await;
}

/// A running command would have access to the new file when the user replaces a hidden or protected one.
#[tokio::test]
async fn a_running_command_is_ended_when_the_user_replaces_a_masked_or_protected_file() {
    let arena = Arc::new(Arena::new());
    git(&arena.workspace, &["init", "-q"]);
    fs::write(arena.workspace.join(".env"), "canary").unwrap();
    let twin = "sleep 2.5; echo fine";
    assert_eq!(arena.run(Arena::session("before"), twin).await, "fine\n");
    for (place, replaced) in
        [(Arena::session("long"), ".env"), (Place::Own, ".git/config"), (Arena::session("long"), ".git/config")]
    {
        let printed = Arc::<Printed>::default();
        // The command waits: the first second after a replacement is not promised.
        let script = "echo ready; sleep 4; attack bash -c 'echo evil >> .git/config'; attack grep canary .env; echo late; sleep 1000";
        let running = tokio::spawn({
            let (arena, printed, place) = (arena.clone(), printed.clone(), place.clone());
            let stop = CancellationToken::new();
            async move { arena.run_stoppable(&arena.confinement(place), script, &printed, stop).await }
        });
        printed.contains("ready").await;
        let path = arena.workspace.join(replaced);
        fs::copy(&path, arena.workspace.join("new")).unwrap();
        fs::rename(arena.workspace.join("new"), &path).unwrap();
        let told = running.await.unwrap().unwrap_err().message();
        let expected = format!(
            "the sandbox ended unexpectedly: `{}` was replaced on the machine, and the sandbox hides or protects it, \
             so its commands were ended; call again for a new one",
            path.display()
        );
        assert_eq!((told, printed.stdout().as_str()), (expected, "ready\n"), "{place:?}");
        assert_eq!(alive(&arena.mark), Vec::<String>::new());
        assert_eq!(arena.run(place, "attack grep canary .env; echo again").await, "again\n");
    }
}

/// A warm init has masked the hidden paths of the system before its workspace is known.
#[tokio::test]
async fn a_file_masked_by_a_warm_init_stays_hidden_when_the_user_replaces_it() {
    // Only root can write to `/opt`.
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir_in("/opt").unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    let (token, new, plain) = (folder.path().join("token"), folder.path().join("new"), folder.path().join("plain"));
    fs::write(&token, "canary").unwrap();
    fs::write(&plain, "plain").unwrap();
    let mut arena = Arena::with(1);
    arena.confinement.files = Arc::new(FileRules { hidden: vec![token.clone()], ..FileRules::default() });
    let script = format!("attack grep canary {}; twin grep plain {}; echo done", token.display(), plain.display());
    for _ in 0..3 {
        assert_eq!(arena.run(Place::Own, &script).await, "done\n");
        arena.rest().await;
        eventually(PATIENCE, "a warm init waits", || arena.native.warm_inits() > 0).await;
        fs::write(&new, "canary").unwrap();
        fs::rename(&new, &token).unwrap();
    }
    assert_eq!(arena.run(Arena::session("late"), &script).await, "done\n");
    arena.rest().await;
}

/// The second executor must not take the first one's placeholders for the user's files: then neither would remove them.
#[tokio::test]
async fn placeholders_of_two_executors_are_removed_after_the_last_one() {
    for first_ends_first in [true, false] {
        let arena = Arena::new();
        if rustix::fs::setxattr(&arena.workspace, "user.test", b"", rustix::fs::XattrFlags::empty()).is_err() {
            return say("places that two executors hold: this file system keeps no marks");
        }
        arena.run(Arena::session("first"), "true").await;
        let path = |name: &str| arena.workspace.join(name);
        let mut second = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "escape::protected::another_executor", "--nocapture"])
            .env("WIELDY_TEST_SECOND", &arena.workspace)
            .env("WIELDY_TEST_UNTIL", "yes")
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        eventually(PATIENCE, "the second one runs", || path("up").exists()).await;
        let first = arena.native.list()[0].sandbox.id.clone();
        if first_ends_first {
            assert!(arena.native.destroy(&first).await);
        }
        assert!(path(".git/hooks").exists() && path(".claude").exists());
        fs::write(path("go"), "").unwrap();
        assert!(second.wait().unwrap().success());
        if !first_ends_first {
            assert!(path(".git/hooks").exists() && path(".claude").exists());
            assert!(arena.native.destroy(&first).await);
        }
        let left = || {
            let names = fs::read_dir(&arena.workspace).unwrap().map(|entry| entry.unwrap().file_name());
            names.collect::<std::collections::BTreeSet<_>>()
        };
        eventually(PATIENCE, "nothing is held", || left() == ["go".into(), "up".into()].into()).await;
    }
}

#[tokio::test]
async fn another_executor() {
    let Some(workspace) = std::env::var_os("WIELDY_TEST_SECOND") else { return };
    let mut arena = Arena::new();
    arena.confinement.workspace = workspace.into();
    if std::env::var_os("WIELDY_TEST_UNTIL").is_some() {
        arena.run(Place::Own, "touch up; until [ -e go ]; do sleep 0.02; done").await;
        return;
    }
    assert_eq!(arena.run(Place::Own, "attack touch .claude/evil; echo done").await, "done\n");
}

/// A command replaces a folder by a link, again and again, while other sandboxes of the workspace are made.
#[tokio::test]
async fn a_link_that_comes_and_goes_never_moves_a_mount() {
    let arena = Arc::new(Arena::new());
    git(&arena.workspace, &["init", "-q"]);
    let target = arena.root.join("other");
    let before = arena.outside();
    let (printed, stop) = (Arc::<Printed>::default(), CancellationToken::new());
    let script = format!(
        r#"mkdir -p .git/modules/real; echo ref > .git/modules/real/HEAD; mkdir .git/modules/real/objects
        ln -s {} .git/modules/link; echo ready
        exec python3 -c '
import ctypes
swap = ctypes.CDLL(None).renameat2
while True:
    swap(-100, b".git/modules/real", -100, b".git/modules/link", 2)'"#,
        target.display()
    );
    let swapper = tokio::spawn({
        let (arena, printed, stop) = (arena.clone(), printed.clone(), stop.clone());
        async move { arena.run_stoppable(&arena.confinement(Arena::session("swapper")), &script, &printed, stop).await }
    });
    printed.contains("ready").await;
    let (mut built, mut refused) = (0, 0);
    for _ in 0..60 {
        let looked = "for name in real link; do attack ls .git/modules/$name/workspace; attack cat .git/modules/$name/workspace/plans.txt; \
                      attack touch .git/modules/$name/workspace/evil; done; echo done";
        match arena.run_in(&arena.confinement(Place::Own), looked).await {
            Ok(ran) => {
                assert_eq!(ran.stdout, "done\n");
                built += 1;
            }
            Err(_) => refused += 1,
        }
        assert_eq!(arena.outside(), before);
    }
    stop.cancel();
    swapper.await.unwrap().unwrap();
    crate::oci::say(&format!("with a swapper at work, {built} sandboxes were built and {refused} refused"));
    assert!(built > 0, "what is never built proves nothing");
}

async fn places_held_for_protection_belong_to_the_owner_of_the_workspace(arena: Arena) {
    if !is_root() {
        return say("workspaces of other owners: needs root");
    }
    for path in [&arena.root, &arena.workspace] {
        std::os::unix::fs::chown(path, Some(4321), Some(4321)).unwrap();
    }
    let script = "twin git init -q; twin bash -c 'echo text > file; git add file'; echo done";
    assert_eq!(arena.run(Arena::session("one"), script).await, "done\n");
    for path in [".git", ".git/hooks", ".claude", ".git/HEAD"] {
        let about = fs::metadata(arena.workspace.join(path)).unwrap();
        assert_eq!((about.uid(), about.gid()), (4321, 4321), "{path}");
    }
}

/// The user's files are as empty as placeholders, but are not placeholders.
#[tokio::test]
async fn files_that_the_user_makes_where_a_placeholder_was_are_kept() {
    let arena = Arena::new();
    let names = [".vscode", "wieldy.toml", ".zed"].map(|name| arena.workspace.join(name));
    let are_there = || names.each_ref().map(|path| path.exists());
    for place in [Place::Own, Arena::session("theirs")] {
        // After the second call the plan and its placeholders are cached.
        for _ in 0..2 {
            arena.run(Place::Own, "true").await;
        }
        eventually(PATIENCE, "nothing is held", || are_there() == [false; 3]).await;
        fs::create_dir(&names[0]).unwrap();
        fs::write(&names[1], "").unwrap();
        assert_eq!(arena.run(place, "echo .vscode wieldy.toml .zed").await, ".vscode wieldy.toml .zed\n");
        assert_eq!(are_there(), [true; 3], "the last one is held");
        for standing in arena.sandbox.list() {
            assert!(arena.sandbox.destroy(&standing.sandbox.id).await);
        }
        eventually(PATIENCE, "nothing is held", || !names[2].exists()).await;
        assert_eq!(are_there(), [true, true, false]);
        fs::remove_dir(&names[0]).unwrap();
        fs::remove_file(&names[1]).unwrap();
    }
}

/// The user's next `git status` must not follow settings that a command wrote.
async fn the_workspace_becomes_no_bare_repository(arena: Arena) {
    git(&arena.workspace, &["init", "-q"]);
    let script = r#"
        printf '#!/bin/sh\ntouch %s/owned\n' "$PWD" > evil; chmod +x evil
        rm -f .git/HEAD; mkdir objects refs; echo 'ref: refs/heads/main' > HEAD
        printf '[core]\n\tbare = false\n\tworktree = .\n\tfsmonitor = %s/evil\n' "$PWD" > config
        mv -T objects refs; rm -rf refs; ln -sfT objects refs; mkdir -p objects refs"#;
    for place in [Arena::session("one"), Place::Own] {
        let run = arena.run_in(&arena.confinement(place), script).await.unwrap();
        assert!(run.stderr.contains("refs"), "{run:?}");
    }
    let status = || {
        let run = Command::new("git").arg("-C").arg(&arena.workspace).arg("status").output().unwrap();
        (run.status.success(), arena.workspace.join("owned").exists())
    };
    assert_eq!(status(), (false, false));
    destroy_all(&arena).await;
    assert_eq!(status(), (false, false));
    // The twin: a user's own folders of these names stay, and git works.
    fs::write(arena.workspace.join(".git/HEAD"), "ref: refs/heads/main\n").unwrap();
    // The container of a single call is removed in the background, and its placeholders with it.
    let refs = arena.workspace.join("refs");
    eventually(PATIENCE, "the placeholder is gone", || !refs.exists()).await;
    fs::create_dir(refs).unwrap();
    let script = "twin bash -c 'echo text > refs/book.md; git add refs; git diff --cached --stat | grep book'; twin git checkout -q -B new; echo done";
    assert_eq!(arena.run(Arena::session("two"), script).await, "done\n");
    assert_eq!(status(), (true, false));
}

/// A file whose name is that of a folder in git repositories stays, in every sandbox of the workspace.
#[tokio::test]
async fn a_file_in_place_of_a_repositorys_folder_stays() {
    for name in ["refs", "objects"] {
        let arena = Arena::new();
        if name == "objects" {
            fs::create_dir(arena.workspace.join("refs")).unwrap();
        }
        fs::write(arena.workspace.join(name), "notes\n").unwrap();
        let script = format!(
            "attack rm {name}; attack mv {name} other; attack bash -c 'echo x > {name}'; attack ln -sfT /tmp {name}
             twin cat {name}"
        );
        arena.attack(&script).await;
        assert_eq!(fs::read_to_string(arena.workspace.join(name)).unwrap(), "notes\n");
    }
}

async fn destroy_all(arena: &Arena) {
    for standing in arena.sandbox.list() {
        assert!(arena.sandbox.destroy(&standing.sandbox.id).await);
    }
}

/// Placeholders have the expected type and neutral content; git in the sandbox does not add them.
async fn placeholders_are_nothing_to_their_readers(arena: Arena) {
    git(&arena.workspace, &["init", "-q"]);
    // A placeholder of another type, left by a crashed older version.
    let left = arena.workspace.join("opencode.json");
    fs::create_dir(&left).unwrap();
    let has_marks = rustix::fs::setxattr(&left, PLACEHOLDER_MARK, b"", rustix::fs::XattrFlags::CREATE).is_ok();
    assert!(has_marks, "the tests need a file system with extended attributes");
    let script = "twin touch new; twin git add -A; git status --porcelain";
    assert_eq!(arena.run(Arena::session("one"), script).await, "A  new\n");
    let content = |name: &str| fs::read_to_string(arena.workspace.join(name)).map_err(|error| error.kind());
    let found = [".mcp.json", "opencode.jsonc", "wieldy.toml", "refs", "commondir"].map(content);
    let opencode = "{\"$schema\":\"https://opencode.ai/config.json\"}\n";
    assert_eq!(found, ["{\"mcpServers\":{}}\n", opencode, "", "", ".\n"].map(|text| Ok(text.to_owned())));
    let held = [".mcp.json", "wieldy.toml", ".vscode", "refs", "opencode.json", "new"];
    let held = held.map(|name| is_placeholder(&arena.workspace.join(name)));
    assert_eq!(held, [true, true, true, true, true, false]);
    // The user writes to one of them.
    fs::write(arena.workspace.join(".mcp.json"), "{}").unwrap();
    assert!(!is_placeholder(&arena.workspace.join(".mcp.json")));
    destroy_all(&arena).await;
    let names = || {
        let names = fs::read_dir(&arena.workspace).unwrap().map(|entry| entry.unwrap().file_name());
        names.collect::<std::collections::BTreeSet<_>>()
    };
    eventually(PATIENCE, "nothing is held", || names() == [".git", ".mcp.json", "new"].map(Into::into).into()).await;
}

async fn a_read_only_workspace_is_used_and_holds_nothing(mut arena: Arena) {
    if is_root() {
        return say("a folder that this user cannot write: needs an ordinary user");
    }
    fs::write(arena.workspace.join("text"), "content\n").unwrap();
    fs::create_dir(arena.workspace.join("open")).unwrap();
    fs::set_permissions(&arena.workspace, fs::Permissions::from_mode(0o555)).unwrap();
    arena.confinement.files = Arc::default();
    let script = "attack touch new; attack chmod 755 .; attack touch open/new; twin ls; cat text";
    for place in [Place::Own, Arena::session("one")] {
        assert_eq!(arena.run(place, script).await, "content\n");
    }
    let names = fs::read_dir(&arena.workspace).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.collect::<std::collections::BTreeSet<_>>(), ["open", "text"].map(Into::into).into());
    fs::set_permissions(&arena.workspace, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Placeholders are removed while a sandbox is idle, and all paths are protected again before the next command.
#[tokio::test]
async fn placeholders_go_while_a_sandbox_is_idle_and_come_back_before_the_next_command() {
    let arena = Arena::with(1);
    let session = Arena::session("long");
    let names = || {
        let names = fs::read_dir(&arena.workspace).unwrap().map(|entry| entry.unwrap().file_name());
        names.collect::<std::collections::BTreeSet<_>>()
    };
    let tamper = format!(
        "{FUNCTIONS} tamper {ALWAYS} .git/hooks .git/commondir; attack mv .git moved; attack rm -rf .git; rm -rf own moved
         mount=$(grep -c workspace /proc/self/mountinfo); cat /tmp/mine /tmp/mounts; echo $mount > /tmp/mounts"
    );
    arena.run(session.clone(), "echo kept > /tmp/mine; echo > /tmp/mounts").await;
    arena.run(Place::Own, "true").await;
    let mut before = String::new();
    for round in 0..4 {
        let idle = std::time::Instant::now();
        eventually(PATIENCE, "nothing is held", || names().is_empty()).await;
        assert!(round == 0 || idle.elapsed() > std::time::Duration::from_millis(500), "not between two commands");
        let said = arena.run(session.clone(), &tamper).await;
        let mounts = said.strip_prefix("kept\n").unwrap_or_else(|| panic!("{said}")).to_owned();
        assert!(round < 2 || mounts == before, "no mount piles up: {mounts} and {before}");
        before = mounts;
        assert!(names().contains(std::ffi::OsStr::new("refs")));
        assert_eq!(arena.run(Place::Own, "attack touch .claude/evil; attack mkdir refs/x; echo done").await, "done\n");
    }
    // The user makes files meanwhile: they are protected as they are, and the sandbox still works.
    eventually(PATIENCE, "nothing is held", || names().is_empty()).await;
    fs::write(arena.workspace.join(".mcp.json"), "{\"mcpServers\": 1}").unwrap();
    git(&arena.workspace, &["init", "-q"]);
    let script = "attack bash -c 'echo evil > .mcp.json'; attack rm .mcp.json; attack touch .git/hooks/evil; cat /tmp/mine .mcp.json";
    assert_eq!(arena.run(session.clone(), script).await, "kept\n{\"mcpServers\": 1}");
    let left = [".git", ".mcp.json"].map(Into::into).into();
    eventually(PATIENCE, "nothing is held", || names() == left).await;
    assert_eq!(fs::read_to_string(arena.workspace.join(".mcp.json")).unwrap(), "{\"mcpServers\": 1}");
    arena.rest().await;
}
