//! A disk with the part of this machine's system that tests of the sandbox need: the programs that their scripts call,
//! Python, the tests and `wieldy` itself. The files are copied from this machine, so that nothing has to be downloaded.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::guest::make_file_system;
use super::libraries;

/// The init script, which changes the root to the disk.
pub(super) const INIT: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do insmod $module; done
mkdir /system
mount -t ext4 /dev/vda /system
cp /tests /system/tests
exec switch_root /system /tests
";

/// The modules for disks.
pub(super) const MODULES: [&str; 2] = ["virtio_pci", "virtio_blk"];

/// The programs that tests and their scripts call. A program that is missing here is missing there, too, and tests that
/// need it say so.
const PROGRAMS: &str = "awk base64 bash basename cat chmod chown cp cut date dd df dirname du echo env expr fallocate false find flock getent \
    git grep head hostname id install kill ln ls mkdir mkfifo mknod mktemp mount mv nice nproc nsenter od perl printenv \
    printf prlimit ps pwd python3 readlink renice rm rmdir sed seq setpriv setsid sh sha256sum sleep sort stat stty su sync \
    sysctl tail taskset tee test timeout touch tr true truncate tty umount uname uniq unshare wc whoami xargs yes";

/// The only folders where programs in a sandbox look for programs, and so the only ones to copy from.
const PLACES: [&str; 2] = ["/usr/bin", "/usr/sbin"];

/// Makes the disk.
pub(super) fn disk(folder: &Path, busybox: &Path, tests: &Path, command: &Path) -> Result<PathBuf> {
    let root = folder.join("system-root");
    let _ = fs::remove_dir_all(&root);
    for inner in [
        "dev",
        "etc",
        "srv/project",
        "opt",
        "proc",
        "root",
        "run",
        "sys",
        "tmp",
        "usr/bin",
        "usr/lib",
        "usr/lib64",
        "usr/sbin",
        "var/tmp",
    ] {
        fs::create_dir_all(root.join(inner))?;
    }
    for (link, target) in [("bin", "usr/bin"), ("sbin", "usr/sbin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")] {
        symlink(target, root.join(link))?;
    }
    for open in ["tmp", "var/tmp", "srv/project"] {
        fs::set_permissions(root.join(open), fs::Permissions::from_mode(0o1777))?;
    }
    for file in ["group", "hosts", "nsswitch.conf", "passwd", "shadow"] {
        let from = Path::new("/etc").join(file);
        fs::copy(&from, root.join("etc").join(file)).with_context(|| format!("cannot copy `{}`", from.display()))?;
    }
    // Files that attacks try to remove.
    for (file, text) in [("hostname", "machine\n"), ("resolv.conf", "nameserver 127.0.0.1\n")] {
        fs::write(root.join("etc").join(file), text)?;
    }
    let mut programs: BTreeSet<PathBuf> = BTreeSet::new();
    for name in PROGRAMS.split_whitespace() {
        let Some(found) = PLACES.map(|place| Path::new(place).join(name)).into_iter().find(|path| path.exists()) else {
            eprintln!("   there is no `{name}` on this machine, and so none in the others");
            continue;
        };
        let real = found.canonicalize()?;
        copy_into(&root, &real)?;
        if real != found {
            symlink(&real, inside(&root, &found))?;
        }
        programs.insert(real);
    }
    programs.extend(modules(&root)?);
    // The templates of `git init`.
    copy_modules(&root, Path::new("/usr/share/git-core/templates"), &mut Vec::new())?;
    for (program, place) in [(busybox, "usr/bin/busybox"), (tests, "it"), (command, "usr/bin/wieldy")] {
        fs::copy(program, root.join(place)).with_context(|| format!("cannot copy `{}`", program.display()))?;
        programs.insert(program.to_owned());
    }
    let mut needed = BTreeSet::new();
    for program in &programs {
        needed.extend(libraries(program)?);
    }
    for library in needed {
        let (library, place) = (Path::new(&library), inside(&root, Path::new(&library)));
        fs::create_dir_all(place.parent().unwrap_or(&root))?;
        fs::copy(library, place).with_context(|| format!("cannot copy `{}`", library.display()))?;
    }
    let disk = folder.join("system.ext4");
    make_file_system(&disk, 2048, Some(&root))?;
    Ok(disk)
}

/// Returns the place of a path of this machine below `root`. `/bin`, `/lib` and the like are links into `/usr` there.
fn inside(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn copy_into(root: &Path, path: &Path) -> Result<()> {
    let place = inside(root, path);
    fs::create_dir_all(place.parent().unwrap_or(root))?;
    fs::copy(path, place).with_context(|| format!("cannot copy `{}`", path.display()))?;
    Ok(())
}

/// Copies the modules that the tests' Python and Perl scripts import; returns those that are libraries.
fn modules(root: &Path) -> Result<Vec<PathBuf>> {
    const ASKED: [(&str, &str, &str); 2] = [
        ("/usr/bin/python3", "-c", "import os; print(os.path.dirname(os.__file__))"),
        ("/usr/bin/perl", "-e", "use Fcntl; print $INC{'Fcntl.pm'} =~ s|/[^/]*$||r"),
    ];
    let mut found = Vec::new();
    for (program, option, script) in ASKED {
        let output = Command::new(program).args([option, script]).output();
        let output = output.with_context(|| format!("cannot start {program}: tests of the sandbox call it"))?;
        let folder = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        if !folder.is_absolute() {
            bail!("{program} does not say where its modules are");
        }
        copy_modules(root, &folder, &mut found)?;
    }
    Ok(found)
}

fn copy_modules(root: &Path, folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    const LEFT_OUT: [&str; 6] = ["test", "idlelib", "tkinter", "lib2to3", "dist-packages", "site-packages"];
    for entry in fs::read_dir(folder)?.flatten() {
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() && !LEFT_OUT.iter().any(|name| entry.file_name() == *name) {
            copy_modules(root, &path, found)?;
        } else if kind.is_file() {
            copy_into(root, &path)?;
            found.extend((path.extension().is_some_and(|it| it == "so")).then_some(path));
        }
    }
    Ok(())
}
