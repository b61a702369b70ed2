//! Installs the container runtimes that the tests of the OCI levels need, if they are missing and Debian has them.

use std::path::Path;
use std::process::{Command, Stdio};

/// The programs and their Debian packages. The tests make an image of the last one.
const PACKAGES: [(&str, &str); 4] =
    [("runc", "runc"), ("crun", "crun"), ("runsc", "runsc"), ("busybox", "busybox-static")];

/// Installs missing runtimes, and prints those that cannot be installed: their tests then skip themselves.
pub(crate) fn install() {
    let missing = missing();
    if missing.is_empty() {
        return;
    }
    eprintln!("container runtimes are missing; installing {} by apt-get", missing.join(", "));
    for package in missing {
        let options = ["-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", package];
        let quiet = || Stdio::null();
        let installed = Command::new("apt-get").args(options).stdin(quiet()).stdout(quiet()).stderr(quiet()).status();
        if !installed.is_ok_and(|status| status.success()) {
            eprintln!("WARNING: the Debian package `{package}` could not be installed; its tests skip themselves");
        }
    }
}

fn missing() -> Vec<&'static str> {
    let is_there = |program: &str| {
        let folders = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
        folders.iter().any(|folder| Path::new(folder).join(program).exists())
    };
    PACKAGES.iter().filter(|(program, _)| !is_there(program)).map(|(_, package)| *package).collect()
}
