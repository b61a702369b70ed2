//! Tests promise 3 for the names at the top of the workspace that would make it a repository without `.git`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use wieldy_core::Place;

use super::arena::{Arena, attacks};

attacks! {
    no_folder_below_makes_the_workspace_a_repository
    work_with_git_goes_on_inside_and_outside
}

/// Returns if `git status` succeeds outside of the sandbox, and if it executed what a command had prepared.
fn status(arena: &Arena) -> (bool, bool) {
    let run = Command::new("git").arg("-C").arg(&arena.workspace).arg("status").output().unwrap();
    (run.status.success(), arena.workspace.join("owned").exists())
}

fn git(arena: &Arena, line: &str) -> String {
    let mut git = Command::new("git");
    git.args(["-c", "user.name=a", "-c", "user.email=a@b", "-C"]).arg(&arena.workspace).args(line.split(' '));
    let done = git.output().unwrap();
    assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

async fn destroy_all(arena: &Arena) {
    for standing in arena.sandbox.list() {
        assert!(arena.sandbox.destroy(&standing.sandbox.id).await);
    }
}

/// Git reads `objects`, `refs` and `config` from the folder that a `commondir` file names.
async fn no_folder_below_makes_the_workspace_a_repository(arena: Arena) {
    git(&arena, "init -q");
    let script = r#"
        rm -f .git/HEAD; mkdir -p sub/objects sub/refs/heads; echo 'ref: refs/heads/main' > HEAD
        printf '[core]\n\trepositoryformatversion = 1\n[extensions]\n\tworktreeConfig = true\n' > sub/config
        printf '[core]\n\tworktree = %s\n\tfsmonitor = "touch %s/owned; false"\n' "$PWD" "$PWD" > config.worktree
        echo sub > commondir; echo sub > new; mv -T new commondir; ln -sfT /dev/null commondir; ln -sfT sub/x commondir
        rm -rf commondir; echo sub > commondir; echo sub > sub/x"#;
    for place in [Arena::session("one"), Place::Own] {
        let run = arena.run_in(&arena.confinement(place), script).await.unwrap();
        assert_eq!((status(&arena), run.stderr.contains("commondir")), ((false, false), true), "{run:?}");
    }
    destroy_all(&arena).await;
    assert_eq!(status(&arena), (false, false));
}

/// Git accepts an executable file where it expects the folder `refs` or `objects`.
#[tokio::test]
async fn an_executable_file_in_place_of_a_repositorys_folder_makes_none() {
    for name in ["refs", "objects"] {
        let arena = Arena::new();
        git(&arena, "init -q");
        if name == "objects" {
            fs::create_dir(arena.workspace.join("refs")).unwrap();
        }
        fs::write(arena.workspace.join(name), "#!/bin/sh\n").unwrap();
        fs::set_permissions(arena.workspace.join(name), fs::Permissions::from_mode(0o755)).unwrap();
        let script = r#"
            rm -f .git/HEAD; mkdir objects; echo 'ref: refs/heads/main' > HEAD
            printf '[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tworktree = %s\n\tfsmonitor = "touch %s/owned; false"\n' "$PWD" "$PWD" > config; echo done"#;
        for place in [Arena::session("one"), Place::Own] {
            let run = arena.run_in(&arena.confinement(place), script).await.unwrap();
            assert_eq!((status(&arena), run.stdout.as_str()), ((false, false), "done\n"), "{name}: {run:?}");
        }
        destroy_all(&arena).await;
        assert_eq!(status(&arena), (false, false), "{name}");
    }
}

/// A person's folder with the name of the file that git reads is usable, and stays.
#[tokio::test]
async fn a_folder_in_place_of_a_repositorys_file_stays() {
    let arena = Arena::new();
    fs::create_dir(arena.workspace.join("commondir")).unwrap();
    let script = "
        attack rmdir commondir; attack mv commondir other; attack ln -sfT /tmp commondir; attack rm -r commondir
        twin touch commondir/new; twin bash -c 'echo x > commondir/new'; twin rm commondir/new";
    arena.attack(script).await;
    assert!(arena.workspace.join("commondir").is_dir());
}

async fn work_with_git_goes_on_inside_and_outside(arena: Arena) {
    git(&arena, "init -q -b main");
    fs::write(arena.workspace.join("file"), "one\n").unwrap();
    git(&arena, "add file");
    git(&arena, "commit -qm one");
    let script = r#"
        export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
        twin bash -c 'echo two > file; git diff HEAD | grep -q two; git stash -q; git stash pop -q'
        twin git commit -qam two
        twin git checkout -q -b new
        twin git worktree add -q tree -b third
        twin bash -c 'cd tree; echo three > file; git commit -qam three; git diff HEAD; git status'
        twin git merge -q third
        twin git worktree remove tree
        git add -A; git status --porcelain; git log --format=%s"#;
    assert_eq!(arena.run(Arena::session("one"), script).await, "three\ntwo\none\n");
    destroy_all(&arena).await;
    assert_eq!(status(&arena), (true, false));
    assert_eq!(git(&arena, "diff HEAD"), "");
    git(&arena, "checkout -q main");
    git(&arena, "worktree add -q tree third");
    assert_eq!(git(&arena, "log --format=%s third -1"), "three\n");
}
