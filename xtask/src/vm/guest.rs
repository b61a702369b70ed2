//! What a machine needs whose tests talk to an agent of virtual machines: a root file system with the agent as its init, an empty disk for the
//! workspace, and the modules for disks and for a virtual socket that leads back to the machine itself.
//!
//! Under Firecracker the agent is the first process of the machine. Here it is the first of a namespace of processes, beside whoever talks to
//! it; to the agent that is the same.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::{Archive, libraries};

/// Loads the modules and starts the agent.
pub(super) const MOUNTS: &str = "for module in /modules/*; do insmod $module; done
mkdir /guest
mount -o ro /dev/vda /guest
export WIELDY_TEST_GUEST=1
unshare -m -p -f chroot /guest /sbin/wieldy-guest &";

/// The modules below the kernel's folder, each after those that it needs.
const MODULES: [&str; 9] = [
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci",
    "drivers/block/virtio_blk",
    "net/vmw_vsock/vsock",
    "net/vmw_vsock/vmw_vsock_virtio_transport_common",
    "net/vmw_vsock/vsock_loopback",
];

/// The programs that commands find in the guest.
const PROGRAMS: [&str; 10] = ["cat", "cut", "grep", "id", "ls", "mkdir", "ps", "setsid", "sh", "tr"];

/// Puts the modules into the machine's memory, in the order in which they are loaded.
pub(super) fn add_modules(archive: &mut Archive, folder: &Path) -> Result<()> {
    let packages = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let mut modules = packages.map(|package| package.join("lib/modules")).filter(|modules| modules.is_dir());
    let modules = modules.next().context("the kernel's package has no modules")?;
    let version = fs::read_dir(&modules)?.flatten().next().context("the kernel's package has no modules")?;
    for (number, module) in MODULES.iter().enumerate() {
        let path = version.path().join("kernel").join(format!("{module}.ko"));
        let bytes = fs::read(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
        archive.file(&format!("modules/{number}"), &bytes);
    }
    Ok(())
}

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

fn make_file_system(path: &Path, megabytes: u64, content: Option<&Path>) -> Result<()> {
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
