//! Tests promise 5: a command has no privileges, and cannot gain any for itself or for other processes.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::arena::{Arena, attacks};
use wieldy_core::Place;

attacks! {
    a_command_has_no_rights_and_gains_none
    device_files_cannot_be_made
    programs_that_change_their_user_cannot_be_made
    programs_that_change_their_user_do_not_in_a_sandbox
}

/// P-SBX-05.
async fn a_command_has_no_rights_and_gains_none(arena: Arena) {
    for place in [Place::Own, Arena::session("one")] {
        let said = arena
            .run(
                place,
                "grep -hE '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status | tr -d '\\t'; ls /proc/self/fd | wc -l",
            )
            .await;
        let none = "0000000000000000";
        let wanted = format!(
            "CapInh:{none}\nCapPrm:{none}\nCapEff:{none}\nCapBnd:{none}\nCapAmb:{none}\nNoNewPrivs:1\nSeccomp:2\n4\n"
        );
        assert_eq!(said, wanted);
    }
    let script = r#"
        attack su -c true
        attack sudo -n true
        attack unshare -U true
        attack unshare -r true
        attack unshare -n true
        attack unshare -m true
        attack chroot / true
        attack setpriv --reuid=0 true
        attack python3 -c 'import os; os.setuid(0)'
        attack python3 -c 'import os; os.setgid(0)'
        attack python3 -c 'import os; os.setgroups([0])'
        attack mount -t tmpfs none /tmp
        attack mount -o remount,rw /
        attack mount -o remount,rw /usr
        attack umount /etc/passwd
        attack umount -l /proc
        attack bash -c 'echo c > /proc/sysrq-trigger'
        attack bash -c 'echo 1 > /proc/sys/vm/drop_caches'
        attack bash -c 'echo x > /proc/sys/kernel/core_pattern'
        attack bash -c 'echo -1000 > /proc/self/oom_score_adj'
        attack bash -c 'echo 0 0 1 > /proc/self/uid_map'
        attack bash -c 'echo 100000 > /proc/sys/user/max_user_namespaces'
        attack bash -c 'echo x > /proc/self/attr/current'
        attack prlimit --pid $$ --nofile=100000:100000
        attack hostname other
        attack nice -n -5 true
        twin nice -n 5 true
        twin bash -c 'ulimit -n 512; true'
    "#;
    // `nice` prints a warning and still runs the command.
    arena.attack(&script.replace("attack nice -n -5 true\n", "")).await;
}

async fn device_files_cannot_be_made(arena: Arena) {
    arena
        .attack(
            "for folder in . /tmp /dev /dev/shm; do attack mknod $folder/d c 1 3; attack mknod $folder/d b 8 0; done
             twin mkfifo pipe; rm pipe",
        )
        .await;
}

/// If the executor is root, a command's files belong to the workspace's owner. A setuid program would give the owner's
/// rights to every user who can reach the workspace from outside.
async fn programs_that_change_their_user_cannot_be_made(arena: Arena) {
    let script = r#"
        cp /usr/bin/id program
        for mode in 4755 2755 6755 u+s g+s; do attack chmod $mode program; done
        attack install -m 4755 /usr/bin/id program-2
        attack perl -e 'chmod(04755, "program") or exit 1'
        attack perl -e 'open(my $f, "<", "program"); chmod(04755, $f) or exit 1'
        attack perl -e 'use Fcntl; sysopen(my $f, "new", O_CREAT|O_WRONLY, 04755) or exit 1'
        attack perl -e 'use Fcntl; sysopen(my $f, "new-2", O_CREAT|O_WRONLY, 02644) or exit 1'
        twin chmod 755 program
        twin chmod 1777 .
        twin ./program
        twin perl -e 'use Fcntl; sysopen(my $f, "new-3", O_CREAT|O_WRONLY, 0644) or exit 1'
        rm -f new-3
    "#;
    arena.attack(script).await;
    for entry in fs::read_dir(&arena.workspace).unwrap().flatten() {
        let mode = fs::symlink_metadata(entry.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o6000, 0, "{:?} {mode:o}", entry.path());
    }
}

/// P-SBX-05.
async fn programs_that_change_their_user_do_not_in_a_sandbox(arena: Arena) {
    let program = arena.workspace.join("program");
    fs::copy("/usr/bin/id", &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o6755)).unwrap();
    assert_eq!(fs::metadata(&program).unwrap().mode() & 0o6000, 0o6000);
    // The owner of the program does not matter: the command keeps its own user.
    arena.attack("twin test \"$(./program)\" = \"$(/usr/bin/id)\"; attack test \"$(./program -u)\" = 0").await;
}
