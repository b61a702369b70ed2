//! Tests promise 1: a command reads only the granted files of the machine.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::Arc;

use wieldy_core::{Confinement, FileRules, Mount, Place};

use super::arena::{Arena, attacks};

attacks! {
    secrets_of_the_machine_and_of_others_cannot_be_read
    secrets_in_the_workspace_and_in_mounted_folders_are_hidden
}

/// P-SBX-01.
async fn secrets_of_the_machine_and_of_others_cannot_be_read(arena: Arena) {
    let root = arena.root.display();
    for (link, target) in [("key", "home/.ssh/id_ed25519"), ("all", ""), ("up", "other")] {
        symlink(arena.root.join(target), arena.workspace.join(link)).unwrap();
    }
    symlink("/proc/1/root/etc/shadow", arena.workspace.join("magic")).unwrap();
    fs::write(arena.workspace.join("own"), "mine").unwrap();
    let script = format!(
        r#"
        attack grep -rsq '{canary}' {root} /tmp /home /root /run /var /dev/shm /mnt /opt /etc
        for path in {root}/home/.ssh/id_ed25519 {root}/state/journal.db {root}/other/workspace/plans.txt {root}/workspace-2/file \
            {root}/beside ../beside ./../home/.ssh/id_ed25519 key all/beside up/workspace/plans.txt magic \
            /etc/shadow /etc/gshadow /etc/sudoers /etc/ssh/ssh_host_ed25519_key ~root/.bashrc /root /var/log /var/lib /sys /boot; do
            attack cat $path
            attack ls $path/
            # Whatever leads somewhere else, all in one go: nothing of it may be found.
            attack ls -d /proc/1/root$path /proc/1/cwd$path /proc/$PPID/root$path /proc/$PPID/cwd$path
            attack cat /proc/self/root$path
            attack cat /proc/self/cwd/../../..$path
        done
        attack dd if=/dev/vda of=/dev/null count=1
        attack dd if=/dev/mem of=/dev/null count=1
        attack dd if=/proc/kcore of=/dev/null count=1
        attack dd if=/dev/kmsg of=/dev/null count=1
        twin grep -q mine own
        twin grep -q mine $PWD/own
        twin cat /etc/passwd
        twin ls /usr/bin
        twin head -c 8 /dev/urandom
        "#,
        canary = arena.canary.replace(' ', "."),
    );
    // The script must not contain the canary's text, or grep finds it in its own command line.
    arena.attack(&script).await;
}

async fn secrets_in_the_workspace_and_in_mounted_folders_are_hidden(mut arena: Arena) {
    let mounted = arena.root.join("mounted");
    for folder in [&arena.workspace, &mounted] {
        fs::create_dir_all(folder.join(".ssh")).unwrap();
        fs::create_dir_all(folder.join(".config/gh")).unwrap();
        for file in [".env", ".env.local", ".netrc", ".ssh/id", ".config/gh/hosts.yml"] {
            fs::write(folder.join(file), &arena.canary).unwrap();
        }
        fs::write(folder.join(".env.example"), "example").unwrap();
    }
    let mount = Mount { source: mounted, target: "/mnt/data".into(), writable: true };
    arena.confinement.files = Arc::new(FileRules { mounts: vec![mount], ..FileRules::default() });
    let script = r#"
        for folder in . /mnt/data; do
            for file in .env .env.local .netrc .ssh/id .config/gh/hosts.yml; do
                attack grep canary $folder/$file
                attack mv $folder/$file $folder/moved
                attack ln $folder/$file $folder/linked
                attack rm -f $folder/$file
            done
            attack mv $folder/.ssh $folder/moved
            attack mv $folder/.config $folder/moved
            attack rm -rf $folder/.ssh
            attack chmod 777 $folder/.ssh
            twin grep -q example $folder/.env.example
        done
    "#;
    arena.attack(script).await;
    assert_eq!(fs::read_to_string(arena.workspace.join(".env")).unwrap(), arena.canary);
}

// Shows: B9.2
#[tokio::test]
async fn secrets_in_deeper_folders_of_the_workspace_are_hidden() {
    let arena = Arena::new();
    for file in ["sub/.env", "sub/deep/er/.env.local", "sub/.ssh/id", "beside/.netrc"] {
        let file = arena.workspace.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, &arena.canary).unwrap();
    }
    fs::write(arena.workspace.join("sub/.env.example"), "example").unwrap();
    let script = r#"
        attack grep -rsq canary.of .
        for file in sub/.env sub/deep/er/.env.local sub/.ssh/id beside/.netrc; do
            attack grep canary $file
            attack mv $file moved
            attack ln $file linked
            attack rm -f $file
        done
        attack mv sub node_modules
        attack mv sub/deep sub/moved
        attack rm -rf beside
        twin grep -q example sub/.env.example
        twin bash -c 'echo text > sub/deep/file; mkdir sub/deep/new; mv sub/deep/file sub/deep/new/; rm -r sub/deep/new'
        twin mkdir -p plain/folder
        twin mv plain other
        twin rm -r other
    "#;
    arena.attack(script).await;
    let named = FileRules { shown: vec!["sub/.env".into()], ..FileRules::default() };
    let shown = Confinement { files: Arc::new(named), ..arena.confinement.clone() };
    assert_eq!(arena.run_in(&shown, "cat sub/.env").await.unwrap().stdout, arena.canary);
}

/// A new sandbox uses the cached plan of the last one, if that plan is still valid.
#[tokio::test]
async fn secrets_that_come_between_two_calls_are_hidden_in_the_second() {
    let arena = Arena::new();
    let look = "cat .env sub/.env 2>&1 | grep -c canary.of; ls -A";
    for _ in 0..3 {
        assert!(arena.run(Place::Own, look).await.starts_with("0\n"));
    }
    for secret in [".env", "sub/.env"] {
        let secret = arena.workspace.join(secret);
        fs::create_dir_all(secret.parent().unwrap()).unwrap();
        fs::write(&secret, &arena.canary).unwrap();
        assert!(arena.run(Place::Own, look).await.starts_with("0\n"), "{}", secret.display());
        assert_eq!(fs::read_to_string(&secret).unwrap(), arena.canary);
    }
}

/// Folders that a command makes, or makes unreadable, must not keep the search for secrets from finding others.
#[tokio::test]
async fn files_and_modes_that_a_command_makes_uncover_no_secret() {
    let arena = Arena::new();
    let secrets = [".env.local", "sub/.env", "deep/er/.npmrc"];
    for file in secrets {
        let file = arena.workspace.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, &arena.canary).unwrap();
    }
    let look = format!(
        "chmod 755 . sub deep deep/er; grep -c canary.of {}; grep -rsc canary.of . | grep -v ':0$'; echo looked",
        secrets.join(" ")
    );
    for noise in [
        "mkdir {0..2000} a{0..2000} sub/{0..200}",
        "python3 -c 'for i in range(15000): open(f\"sub/a{i}\", \"w\").close()'",
        "chmod 0 deep",
        "chmod 300 sub",
        "chmod 300 .",
    ] {
        arena.run(Place::Own, noise).await;
        let found = arena.run_in(&arena.confinement(Place::Own), &look).await;
        let found = found.map_or_else(|error| error.message(), |ran| ran.stdout);
        assert!(!found.contains(":1"), "{noise}: {found}");
        assert!(found.contains("looked") || found.contains("cannot be read"), "{noise}: {found}");
        for folder in ["", "sub", "deep"] {
            fs::set_permissions(arena.workspace.join(folder), fs::Permissions::from_mode(0o755)).unwrap();
        }
    }
}
