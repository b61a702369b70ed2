//! Landlock: a second barrier around the files, which holds even where the mount tree has a hole.
//!
//! A rule is bound to the file that a path leads to at that moment, so [`Rules`] are made once, inside the new root.
//! Each call of a session puts itself under them by their descriptor ([`sys::landlock_restrict`]). Rules that the
//! kernel's version of Landlock does not know are left out; [`abi`] returns that version.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr, RulesetCreated,
    RulesetCreatedAttr, RulesetError, Scope,
};
use rustix::fs::{Mode, OFlags};

use crate::view::placeholders;

use crate::sys;

/// The access granted to a path and everything below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Read, list and execute.
    Read,
    /// All that, and change, create, remove, move, and `ioctl` on devices.
    ReadWrite,
}

/// The reason why there is no Landlock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unavailable {
    /// The kernel was built without it.
    #[error("this kernel has no Landlock; build it with CONFIG_SECURITY_LANDLOCK, or take a newer one")]
    NotBuilt,
    /// The kernel has it, but it is switched off.
    #[error("this kernel's Landlock is switched off; add `landlock` to `lsm=` on the kernel's command line")]
    NotEnabled,
}

/// An error while making a ruleset on a kernel that has Landlock.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LandlockError {
    /// The kernel refused the ruleset.
    #[error("could not make a Landlock ruleset")]
    Ruleset(#[from] RulesetError),
    /// A path could not be opened.
    #[error("could not open `{path}` for a Landlock rule")]
    Open {
        /// The path.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// Returns the version of Landlock that rulesets are made for; 0 without Landlock.
pub(crate) fn abi() -> u32 {
    known(sys::landlock_version().unwrap_or(0)) as u32
}

/// Returns the reason why there is no Landlock, if there is none.
pub(crate) fn absent() -> Option<Unavailable> {
    sys::landlock_version().err().map(|error| match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => Unavailable::NotEnabled,
        _ => Unavailable::NotBuilt,
    })
}

/// A ruleset to which paths can be added while it exists. Each path is looked up when it is added, in the root of this
/// process.
///
/// A process under the ruleset reaches only processes that put themselves under it together with it, that is, those of
/// the same call: it cannot send signals to others, nor connect to their abstract sockets. This needs version 6.
#[derive(Debug)]
pub(crate) struct Rules {
    ruleset: RulesetCreated,
    abi: ABI,
}

impl Rules {
    /// Grants these paths and the existing [`DEVICES`], and nothing else that has a path.
    pub(crate) fn new<'a>(
        paths: impl IntoIterator<Item = (&'a Path, Access)>,
    ) -> Result<Result<Self, Unavailable>, LandlockError> {
        if let Some(absent) = absent() {
            return Ok(Err(absent));
        }
        let abi = known(sys::landlock_version().unwrap_or(0));
        // The kernel must take every rule that was made for its version: a rule dropped in silence would be a hole.
        let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
        let mut ruleset = ruleset.handle_access(AccessFs::from_all(abi))?;
        if abi >= ABI::V6 {
            ruleset = ruleset.scope(Scope::from_all(abi))?;
        }
        let mut rules = Self { ruleset: ruleset.create()?, abi };
        for (path, access) in paths {
            rules.grant(path, access)?;
        }
        for device in DEVICES {
            // Links are followed: some devices are links, and no command can change them.
            match rustix::fs::open(device, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
                Ok(opened) => rules.grant_opened(opened, Access::ReadWrite)?,
                Err(rustix::io::Errno::NOENT) => {}
                Err(error) => return Err(LandlockError::Open { path: device.into(), source: error.into() }),
            }
        }
        Ok(Ok(rules))
    }

    /// Grants one more path to processes that put themselves under the ruleset from now on.
    pub(crate) fn grant(&mut self, path: &Path, access: Access) -> Result<(), LandlockError> {
        // A link that a command has put on the way would grant another file.
        let opened = placeholders::open_plain(path, OFlags::PATH);
        self.grant_opened(opened.map_err(|source| LandlockError::Open { path: path.to_owned(), source })?, access)
    }

    fn grant_opened(&mut self, opened: OwnedFd, access: Access) -> Result<(), LandlockError> {
        (&mut self.ruleset).add_rule(beneath(opened, self.abi, access)?)?;
        Ok(())
    }

    /// Returns the descriptor by which processes put themselves under the ruleset.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        let copy: Option<OwnedFd> = self.ruleset.try_clone()?.into();
        copy.ok_or_else(|| io::Error::other(Unavailable::NotBuilt))
    }
}

/// Devices that every program may write to.
pub(crate) const DEVICES: [&str; 8] =
    ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx", "/dev/pts"];

/// Returns the version that rules are made for: the kernel's, or the newest that the library knows.
fn known(version: u32) -> ABI {
    // From version 9 on, a rule is needed to connect to a socket by its path; sockets in the granted folders are ours.
    ABI::from(i32::try_from(version).unwrap_or(i32::MAX))
}

fn beneath(opened: OwnedFd, abi: ABI, access: Access) -> Result<PathBeneath<OwnedFd>, LandlockError> {
    let granted = match access {
        Access::Read => AccessFs::from_read(abi),
        Access::ReadWrite => AccessFs::from_all(abi),
    };
    let stat = rustix::fs::fstat(opened.as_fd())
        .map_err(|error| LandlockError::Open { path: PathBuf::new(), source: error.into() })?;
    let is_folder = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir();
    // The kernel refuses rights of folders on a file.
    let possible: BitFlags<AccessFs> = if is_folder { AccessFs::from_all(abi) } else { AccessFs::from_file(abi) };
    Ok(PathBeneath::new(opened, granted & possible).set_compatibility(CompatLevel::HardRequirement))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind::PermissionDenied;
    use std::os::fd::AsRawFd;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::own_process::{in_own_process, say};
    use crate::sys::landlock_restrict;

    /// Puts this process under a ruleset of these paths.
    fn lock(paths: &[(&Path, Access)]) {
        let ruleset = Rules::new(paths.iter().copied()).unwrap().unwrap().descriptor().unwrap();
        rustix::thread::set_no_new_privs(true).unwrap();
        landlock_restrict(ruleset.as_raw_fd()).unwrap();
    }

    /// Returns true, and says so, if this machine's Landlock is older than this version.
    fn lacks(version: u32) -> bool {
        if abi() < version {
            say(&format!("this machine has Landlock {}, and {version} is needed: not tried", abi()));
        }
        abi() < version
    }

    /// A process that tests try to signal, which ends with the test.
    struct Sleeper(std::process::Child);

    impl Sleeper {
        fn new() -> Self {
            Self(Command::new("sleep").arg("1000").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    fn kind<T: std::fmt::Debug>(result: io::Result<T>) -> io::ErrorKind {
        result.unwrap_err().kind()
    }

    #[test]
    fn only_granted_paths_are_accessible() {
        if lacks(1) || !in_own_process("filter::landlock::tests::only_granted_paths_are_accessible") {
            return;
        }
        let world = tempfile::tempdir().unwrap();
        let at = |name: &str| world.path().join(name);
        for folder in ["read", "write", "other"] {
            fs::create_dir(at(folder)).unwrap();
            fs::write(at(folder).join("file"), folder).unwrap();
        }
        fs::write(at("single"), "one file").unwrap();
        // Some of them are links on some machines.
        let system = ["/usr", "/bin", "/lib", "/lib64", "/etc"].map(|path| fs::canonicalize(path).ok());
        let (read, write, single) = (at("read"), at("write"), at("single"));
        let mut paths: Vec<_> = system.iter().flatten().map(|path| (path.as_path(), Access::Read)).collect();
        paths.extend([(read.as_path(), Access::Read), (&write, Access::ReadWrite), (&single, Access::ReadWrite)]);
        lock(&paths);

        assert_eq!(fs::read_to_string(read.join("file")).unwrap(), "read");
        assert_eq!(fs::read_dir(&read).unwrap().count(), 1);
        assert_eq!(kind(fs::write(read.join("file"), "no")), PermissionDenied);
        assert_eq!(kind(fs::write(read.join("new"), "no")), PermissionDenied);
        assert_eq!(kind(fs::remove_file(read.join("file"))), PermissionDenied);

        fs::write(write.join("file"), "changed").unwrap();
        fs::create_dir(write.join("sub")).unwrap();
        fs::rename(write.join("file"), write.join("sub/file")).unwrap();
        std::os::unix::fs::symlink("sub", write.join("link")).unwrap();
        assert_eq!(fs::read_to_string(write.join("link/file")).unwrap(), "changed");
        fs::remove_dir_all(write.join("sub")).unwrap();
        fs::write(&single, "changed").unwrap();

        assert_eq!(kind(fs::read(at("other").join("file"))), PermissionDenied);
        assert_eq!(kind(fs::read_dir(at("other"))), PermissionDenied);
        assert_eq!(kind(fs::read_dir(world.path())), PermissionDenied);
        assert_eq!(kind(fs::write(at("other").join("file"), "no")), PermissionDenied);
        assert_eq!(kind(fs::rename(write.join("link"), at("other").join("link"))), PermissionDenied);
        assert_eq!(kind(fs::read("/proc/self/environ")), PermissionDenied);

        fs::write("/dev/null", "away").unwrap();
        assert_eq!(kind(fs::read("/dev/kmsg")), PermissionDenied);
        assert!(Command::new("/bin/sh").args(["-c", "echo hi >/dev/null"]).status().unwrap().success());
        assert_eq!(fs::read_to_string(&single).unwrap(), "changed");
    }

    #[test]
    fn a_call_of_its_own_reaches_no_process_outside() {
        if lacks(6) || !in_own_process("filter::landlock::tests::a_call_of_its_own_reaches_no_process_outside") {
            return;
        }
        use std::os::linux::net::SocketAddrExt;
        use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
        let name = SocketAddr::from_abstract_name(format!("wieldy-test-{}", std::process::id())).unwrap();
        let _outside = UnixListener::bind_addr(&name).unwrap();
        let sleeper = Sleeper::new();
        let pid = rustix::process::Pid::from_child(&sleeper.0);
        std::thread::spawn(move || {
            lock(&[(Path::new("/"), Access::ReadWrite)]);
            assert_eq!(kind(UnixStream::connect_addr(&name)), PermissionDenied);
            assert_eq!(rustix::process::test_kill_process(pid), Err(rustix::io::Errno::PERM));
            let own = Sleeper::new();
            rustix::process::test_kill_process(rustix::process::Pid::from_child(&own.0)).unwrap();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_path_that_is_not_there_is_an_error_that_names_it() {
        if lacks(1) {
            return;
        }
        let missing = Path::new("/no/such/path");
        let error = Rules::new([(missing, Access::Read)]).unwrap_err();
        assert_eq!(error.to_string(), "could not open `/no/such/path` for a Landlock rule");
    }

    #[test]
    fn a_link_grants_nothing() {
        if lacks(1) {
            return;
        }
        let world = tempfile::tempdir().unwrap();
        let world = world.path().canonicalize().unwrap();
        let (real, link) = (world.join("real"), world.join("link"));
        fs::create_dir_all(real.join("inner")).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let mut rules = Rules::new([(real.as_path(), Access::Read)]).unwrap().unwrap();
        for path in [link.clone(), link.join("inner")] {
            let error = rules.grant(&path, Access::ReadWrite).unwrap_err();
            assert_eq!(error.to_string(), format!("could not open `{}` for a Landlock rule", path.display()));
        }
        rules.grant(&real.join("inner"), Access::ReadWrite).unwrap();
    }

    #[test]
    fn the_cost_of_a_ruleset_is_printed() {
        if lacks(1) || !in_own_process("filter::landlock::tests::the_cost_of_a_ruleset_is_printed") {
            return;
        }
        let paths = ["/usr", "/etc", "/opt", "/tmp", "/run", "/dev", "/proc", "/var/tmp"].map(Path::new);
        rustix::thread::set_no_new_privs(true).unwrap();
        let started = std::time::Instant::now();
        let ruleset = Rules::new(paths.map(|path| (path, Access::Read))).unwrap().unwrap().descriptor().unwrap();
        let made = started.elapsed();
        let started = std::time::Instant::now();
        landlock_restrict(ruleset.as_raw_fd()).unwrap();
        let restricted = started.elapsed();
        say(&format!("Landlock version {}: made in {made:?}, entered in {restricted:?}", abi()));
    }
}
