//! The disks and kernel modules of a machine whose tests talk to the agent of virtual machines: a root file system with
//! the agent as its init, an empty disk for the workspace, and the modules for disks and for a virtual socket that
//! leads back to the machine itself.
//!
//! Under Firecracker the agent is the first process of the machine. Here it is the first process of a PID namespace,
//! beside the tests that talk to it; the agent cannot tell the difference.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::libraries;

/// The init script, which runs the tests in the initial file system in memory.
pub(super) const INIT: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
exec /tests
";

/// The commands that load the modules and start the agent.
pub(super) const SETUP: &str = "for module in /modules/*; do insmod $module; done
mkdir /guest
mount -o ro /dev/vda /guest
export WIELDY_TEST_GUEST=1
unshare -m -p -f chroot /guest /sbin/wieldy-guest &";

/// The modules for disks and for virtual sockets.
pub(super) const MODULES: [&str; 3] = ["virtio_pci", "virtio_blk", "vsock_loopback"];

/// The programs that commands find in the guest.
const PROGRAMS: [&str; 10] = ["cat", "cut", "grep", "id", "ls", "mkdir", "ps", "setsid", "sh", "tr"];

/// Makes the root file system and the disk for the workspace.
pub(super) fn disks(folder: &Path, busybox: &Path, program: &Path) -> Result<[PathBuf; 2]> {
    let root = folder.join("guest-root");
    let _ = fs::remove_dir_all(&root);
    for inner in ["bin", "dev", "etc", "proc", "sbin", "tmp"] {
        fs::create_dir_all(root.join(inner))?;
    }
    fs::copy(busybox, root.join("bin/busybox"))?;
    for name in PROGRAMS {
        symlink("busybox", root.join("bin").join(name))?;
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0::/:/bin/sh\n")?;
    fs::write(root.join("etc/group"), "root:x:0:\n")?;
    fs::copy(program, root.join("sbin/wieldy-guest"))?;
    for library in libraries(program)? {
        let place = root.join(library.trim_start_matches('/'));
        fs::create_dir_all(place.parent().unwrap_or(&root))?;
        fs::copy(&library, place)?;
    }
    let disks = [folder.join("guest-root.ext4"), folder.join("guest-disk.ext4")];
    make_file_system(&disks[0], 512, Some(&root))?;
    make_file_system(&disks[1], 64, None)?;
    Ok(disks)
}

pub(super) fn make_file_system(path: &Path, megabytes: u64, content: Option<&Path>) -> Result<()> {
    fs::File::create(path)?.set_len(megabytes << 20)?;
    let mut command = Command::new("mkfs.ext4");
    command.args(["-q", "-F"]);
    if let Some(content) = content {
        command.arg("-d").arg(content);
    }
    let status = command.arg(path).status().context("cannot start mkfs.ext4; install e2fsprogs")?;
    if !status.success() {
        bail!("mkfs.ext4 ended with {status}");
    }
    Ok(())
}
