//! Tests promise 2: a command writes only to its workspace, and changes no other file of the machine.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::sync::Arc;

use wieldy_core::{FileRules, Mount};

use super::arena::{Arena, attacks};

attacks! {
    nothing_outside_of_the_workspace_changes
    read_only_mounts_cannot_be_changed
}

/// P-SBX-02.
async fn nothing_outside_of_the_workspace_changes(arena: Arena) {
    let (root, mark) = (arena.root.display(), &arena.mark);
    for (link, target) in [("to-other", "other"), ("to-key", "home/.ssh/id_ed25519"), ("to-root", "")] {
        symlink(arena.root.join(target), arena.workspace.join(link)).unwrap();
    }
    symlink("/etc", arena.workspace.join("to-etc")).unwrap();
    let before = arena.outside();
    let script = format!(
        r#"
        for folder in / /etc /usr /usr/bin /bin /lib /opt /proc /proc/sys/kernel /dev /proc/self/root/etc /proc/1/root/etc to-etc /proc/$PPID/root/usr; do
            attack touch $folder/{mark}
            attack mkdir $folder/{mark}
            attack ln -s x $folder/{mark}
            attack mkfifo $folder/{mark}
            attack mv own $folder/{mark}
        done
        for file in /etc/passwd /etc/hosts /usr/bin/env /etc/resolv.conf /etc/hostname to-etc/passwd; do
            attack bash -c "echo x >> $file"
            attack truncate -s 0 $file
            attack chmod 777 $file
            attack touch $file
            attack rm -f $file
            attack mv $file /tmp/moved
            attack ln $file ./linked
            attack mv /tmp/.said $file
            attack cp --remove-destination /dev/null $file
        done
        # These may seem to work, in memory of the sandbox's own; the machine must not notice.
        echo x > {root}/beside; echo x > to-other/workspace/plans.txt; echo x > to-key; echo x > ../beside; rm -rf {root}/other {root}/home
        mkdir -p {root}/home/.ssh; echo x > {root}/home/.ssh/authorized_keys; touch ../../{mark} ~root/{mark} /var/tmp/{mark}
        echo x > to-root/home/{mark}; rm -rf ../workspace-2 ../state
        true
        "#,
    );
    let quiet = format!(
        "exec 9>&1; {{ {script} }} 2>/dev/null\ntwin bash -c 'echo good > own; mv own kept; rm kept'\ntwin touch /tmp/x /var/tmp/x $HOME/x /dev/shm/x"
    );
    arena.attack(&quiet).await;
    assert_eq!(arena.outside(), before);
    for folder in ["/etc", "/usr", "/", "/usr/bin", "/var/tmp", "/root", "/tmp"] {
        assert!(!std::path::Path::new(folder).join(mark).exists(), "{folder}");
    }
}

async fn read_only_mounts_cannot_be_changed(mut arena: Arena) {
    let folders = ["readable", "writable"].map(|name| arena.root.join(name));
    for folder in &folders {
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("file"), "as it was").unwrap();
    }
    let mount = |number: usize| Mount {
        source: folders[number].clone(),
        target: format!("/mnt/{number}").into(),
        writable: number == 1,
    };
    arena.confinement.files = Arc::new(FileRules { mounts: vec![mount(0), mount(1)], ..FileRules::default() });
    let script = r#"
        for way in /mnt/0 /proc/self/root/mnt/0; do
            attack touch $way/new
            attack bash -c "echo x > $way/file"
            attack rm -f $way/file
            attack mv $way/file /mnt/1/moved
            attack ln $way/file /mnt/1/linked
            attack chmod 777 $way/file
        done
        exec 8</mnt/0/file
        attack bash -c 'echo x > /proc/self/fd/8'
        attack bash -c 'echo x > /dev/fd/8'
        twin grep -q 'as it was' /mnt/0/file
        twin bash -c 'echo new > /mnt/1/file'
    "#;
    arena.attack(script).await;
    assert_eq!(fs::read_to_string(folders[0].join("file")).unwrap(), "as it was");
    assert_eq!(fs::read_to_string(folders[1].join("file")).unwrap(), "new\n");
}

#[tokio::test]
async fn files_that_a_command_makes_belong_to_the_owner_of_the_workspace() {
    use super::arena::{is_root, say};
    if !is_root() {
        return say("files of other owners: needs root");
    }
    for owner in [0, 4321] {
        let arena = Arena::new();
        std::os::unix::fs::chown(&arena.workspace, Some(owner), Some(owner)).unwrap();
        std::os::unix::fs::chown(&arena.root, Some(owner), Some(owner)).unwrap();
        fs::write(arena.workspace.join("foreign"), "x").unwrap();
        std::os::unix::fs::chown(arena.workspace.join("foreign"), Some(99), Some(99)).unwrap();
        let script = "
            attack chown 0:0 file
            attack chown nobody file
            attack bash -c 'echo x > foreign'
            twin bash -c 'echo good > file; mkdir -p folder; touch folder/inner; ln -sf file link; test -O file; chmod 600 file'
            twin git init -q repository";
        arena.attack(script).await;
        for path in ["file", "folder", "folder/inner", "link", "repository/.git/HEAD"] {
            let about = fs::symlink_metadata(arena.workspace.join(path)).unwrap();
            assert_eq!((about.uid(), about.gid()), (owner, owner), "{path}");
        }
    }
}
