//! Tries each part of the kernel that the native level is made of.

use std::io;
use std::path::Path;

use libc::c_int;
use rustix::process::{WaitOptions, waitpid};

use super::Probed;
use crate::filter::{landlock, seccomp};
use crate::supervise::namespaces::{forbidden_by, kernel_setting};
use crate::sys;
use crate::view::identity::{self, Identity};

/// The namespaces of a sandbox, besides the user namespace in which all of them are made.
const NAMESPACES: [(&str, c_int); 6] = [
    ("mount namespaces", libc::CLONE_NEWNS),
    ("process namespaces", libc::CLONE_NEWPID),
    ("network namespaces", libc::CLONE_NEWNET),
    ("ipc namespaces", libc::CLONE_NEWIPC),
    ("host name namespaces", libc::CLONE_NEWUTS),
    ("cgroup namespaces", libc::CLONE_NEWCGROUP),
];

/// Tries every part, in the order in which they are needed.
pub(super) fn features(workspace: &Path) -> Vec<Probed> {
    let mut checks = vec![user_namespaces(try_namespaces(0), &kernel_setting)];
    checks.extend(NAMESPACES.map(|(name, flag)| namespace(name, try_namespaces(flag), &kernel_setting)));
    if Identity::of_this_process() == Identity::Root {
        checks.push(owners(workspace));
    }
    checks.push(landlock());
    checks.push(seccomp());
    checks
}

/// Makes a process in a new user namespace and these other new namespaces. The process ends at once.
fn try_namespaces(flags: c_int) -> io::Result<()> {
    // This process may have several threads, so the child does nothing but exit.
    let Some(pid) = sys::fork(libc::CLONE_NEWUSER | flags)? else { sys::exit_now(0) };
    rustix::io::retry_on_intr(|| waitpid(Some(pid), WaitOptions::empty()))?;
    Ok(())
}

fn user_namespaces(tried: io::Result<()>, read: &dyn Fn(&str) -> Option<String>) -> Probed {
    namespace("user namespaces", tried, read)
}

fn namespace(name: &str, tried: io::Result<()>, read: &dyn Fn(&str) -> Option<String>) -> Probed {
    let Err(error) = tried else { return Probed::works(name, "can be made") };
    if let Some((told, hint)) = forbidden_by(&error, read) {
        return Probed::fails(name, format!("cannot be made, as {told}: {error}"), hint);
    }
    let hint = match error.raw_os_error() {
        Some(libc::EINVAL) => "use a kernel that was built with them",
        Some(libc::ENOSPC | libc::EUSERS) => "raise the limits `user.max_*_namespaces`, or end processes that use them",
        // Containers forbid it by their own filter.
        _ => "outside of a container, or in one that may make namespaces (such as `--security-opt seccomp=unconfined`)",
    };
    Probed::fails(name, format!("cannot be made: {error}"), hint)
}

/// Tries to mount the workspace with an id map, so that its files belong to the sandbox's user.
fn owners(workspace: &Path) -> Probed {
    let name = "id-mapped mounts";
    match identity::try_mapping(workspace) {
        Ok(_) => Probed::works(name, format!("of the workspace `{}`", workspace.display())),
        Err(error) => Probed::fails(
            name,
            format!("the workspace `{}` cannot be mounted so: {error}", workspace.display()),
            "use a workspace on another file system (ext4, xfs, btrfs, or tmpfs from Linux 6.3 on), or run as an ordinary user",
        ),
    }
}

/// Returns a version of Landlock, with the protections that it lacks and nothing else provides.
fn landlock_of(version: u32) -> String {
    const LATER: [(u32, &str, &str); 2] = [
        (2, "5.19", "nothing can be moved from one folder to another, programs copy"),
        (6, "6.12", "signals and sockets without a path are kept within a sandbox, not within a call"),
    ];
    let lacks = LATER.iter().filter(|(since, ..)| version < *since);
    let lacks = lacks.map(|(since, linux, lack)| format!("; before {since} (Linux {linux}) {lack}"));
    format!("version {version}{}", lacks.collect::<String>())
}

fn landlock() -> Probed {
    match landlock::absent() {
        None => Probed::works("Landlock", landlock_of(landlock::abi())),
        Some(absent) => {
            let text = absent.to_string();
            let (problem, hint) = text.split_once("; ").unwrap_or((&text, "use a newer kernel"));
            Probed::fails("Landlock", problem, hint)
        }
    }
}

fn seccomp() -> Probed {
    let filter = match seccomp::filter() {
        Ok(filter) => filter,
        Err(error) => return Probed::fails("seccomp", error, "use x86-64 or ARM64"),
    };
    let actions = kernel_setting("kernel.seccomp.actions_avail").unwrap_or_default();
    if actions.split_whitespace().any(|action| action == "errno") {
        let (calls, steps) = (seccomp::refused().count(), filter.len());
        return Probed::works(
            "seccomp",
            format!(
                "a list of what is allowed, which refuses {calls} known kinds of system calls and all unknown ones, in {steps} instructions"
            ),
        );
    }
    Probed::fails("seccomp", "this kernel has no filters", "use a kernel that was built with CONFIG_SECCOMP_FILTER")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(errno: c_int) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(errno))
    }

    #[test]
    fn missing_features_of_an_older_landlock_are_reported() {
        assert_eq!(landlock_of(6), "version 6");
        let signals =
            "; before 6 (Linux 6.12) signals and sockets without a path are kept within a sandbox, not within a call";
        assert_eq!(landlock_of(2), format!("version 2{signals}"));
        let moving = "; before 2 (Linux 5.19) nothing can be moved from one folder to another, programs copy";
        assert_eq!(landlock_of(1), format!("version 1{moving}{signals}"));
    }

    #[test]
    fn the_setting_that_forbids_namespaces_is_named_with_the_way_out() {
        let read = |name: &str| (name == "kernel.unprivileged_userns_clone").then(|| "0".to_owned());
        assert_eq!(
            user_namespaces(failing(libc::EPERM), &read),
            Probed::fails(
                "user namespaces",
                "cannot be made, as `kernel.unprivileged_userns_clone` is 0: Operation not permitted (os error 1)",
                "as root: `sysctl -w kernel.unprivileged_userns_clone=1`"
            )
        );
        // Both settings are 0 here, and root is not bound by the first.
        let read = |name: &str| (!name.contains("apparmor")).then(|| "0".to_owned());
        let check = user_namespaces(failing(libc::ENOSPC), &read);
        assert_eq!(check.hint.as_deref(), Some("as root: `sysctl -w user.max_user_namespaces=65536`"));
        let read = |name: &str| (name == "kernel.apparmor_restrict_unprivileged_userns").then(|| "1".to_owned());
        let check = namespace("mount namespaces", failing(libc::EPERM), &read);
        assert!(check.told.contains("`kernel.apparmor_restrict_unprivileged_userns` is 1"), "{check:?}");
    }

    #[test]
    fn without_a_setting_that_forbids_it_the_hint_follows_from_the_error() {
        let read = |_: &str| Some("1000".to_owned());
        let hint = |errno| namespace("x", failing(errno), &read).hint.unwrap();
        assert_eq!(hint(libc::EINVAL), "use a kernel that was built with them");
        assert_eq!(hint(libc::ENOSPC), "raise the limits `user.max_*_namespaces`, or end processes that use them");
        assert!(hint(libc::EPERM).starts_with("outside of a container"));
        assert_eq!(namespace("x", Ok(()), &read), Probed::works("x", "can be made"));
    }

    #[test]
    fn a_workspace_that_is_not_there_cannot_be_mounted() {
        if Identity::of_this_process() != Identity::Root {
            return;
        }
        let check = owners(Path::new("/no/such/workspace"));
        assert!(check.told.contains("No such file or directory"), "{check:?}");
        assert_eq!(owners(&std::env::temp_dir()).hint, None);
    }
}
