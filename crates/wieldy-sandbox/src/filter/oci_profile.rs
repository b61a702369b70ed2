//! Writes the native level's lists of system calls as a profile of the OCI runtime specification.
//!
//! The same calls are allowed and refused. But runtimes have only one answer for everything that no rule allows, so
//! calls refused because of their arguments fail with `ENOSYS`, too.

use oci_spec::OciSpecError;
use oci_spec::runtime::{
    LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArg, LinuxSeccompArgBuilder, LinuxSeccompBuilder,
    LinuxSeccompOperator, LinuxSyscall, LinuxSyscallBuilder,
};

use super::seccomp::{CHANGES_USER, GIVING_BACK, OF_TERMINALS, PERSONALITIES, PROTOCOLS};
use super::syscalls::{ALLOWED, Call, REFUSED};

/// The flags that make a namespace.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// Returns the profile.
pub(crate) fn profile() -> Result<LinuxSeccomp, OciSpecError> {
    let mut calls = vec![
        rule(&names(ALLOWED.iter().copied().flatten()), LinuxSeccompAction::ScmpActAllow, None)?,
        rule(&names(REFUSED.iter().flat_map(|(_, calls)| calls.iter())), refuse(), None)?,
        allow_if("clone", masked(0, NAMESPACES as u32 as u64, 0)?)?,
        allow_if("unshare", masked(0, (NAMESPACES | libc::CLONE_NEWTIME) as u32 as u64, 0)?)?,
        allow_if("socketpair", equal(0, libc::AF_UNIX as u64)?)?,
    ];
    calls.push(allow_if("socket", equal(0, libc::AF_UNIX as u64)?)?);
    for family in [libc::AF_INET, libc::AF_INET6] {
        for (kind, protocol) in [libc::SOCK_STREAM, libc::SOCK_DGRAM]
            .into_iter()
            .flat_map(|kind| PROTOCOLS.map(|protocol| (kind, protocol)))
        {
            // The other bits of the second argument are flags.
            let kind = masked(1, 0xf, kind as u64)?;
            let socket = vec![equal(0, family as u64)?, kind, equal(2, protocol as u64)?];
            calls.push(rule(&["socket"], LinuxSeccompAction::ScmpActAllow, Some(socket))?);
        }
    }
    for (mask, value) in all_but(&OF_TERMINALS) {
        calls.push(allow_if("ioctl", masked(1, mask.into(), value.into())?)?);
    }
    let route = vec![equal(0, libc::AF_NETLINK as u64)?, equal(2, libc::NETLINK_ROUTE as u64)?];
    calls.push(rule(&["socket"], LinuxSeccompAction::ScmpActAllow, Some(route))?);
    for personality in PERSONALITIES {
        calls.push(allow_if("personality", equal(0, personality)?)?);
    }
    for kind in [0, libc::S_IFREG, libc::S_IFIFO, libc::S_IFSOCK] {
        let (mask, kind) = (u64::from(libc::S_IFMT | CHANGES_USER), u64::from(kind));
        calls.push(allow_if("mknodat", masked(2, mask, kind)?)?);
        #[cfg(target_arch = "x86_64")]
        calls.push(allow_if("mknod", masked(1, mask, kind)?)?);
    }
    calls.push(allow_if("prlimit64", equal(0, 0)?)?);
    for kept in GIVING_BACK {
        calls.push(allow_if("fallocate", equal(1, kept)?)?);
    }
    // Modes that let other users take on the owner's identity are refused, also for new files.
    let modes: &[(&str, usize)] = &[("fchmod", 1), ("fchmodat", 2), ("fchmodat2", 2), ("openat", 3)];
    let old_modes: &[(&str, usize)] = &[("chmod", 1), ("creat", 1), ("open", 2)];
    let has_old = cfg!(target_arch = "x86_64");
    for (name, argument) in modes.iter().chain(old_modes.iter().filter(|_| has_old)) {
        calls.push(allow_if(name, masked(*argument, u64::from(CHANGES_USER), 0)?)?);
    }
    // A call that makes no file takes no mode: the argument in its place means nothing.
    let makes = (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) as u64;
    calls.push(allow_if("openat", masked(2, makes, 0)?)?);
    if has_old {
        calls.push(allow_if("open", masked(1, makes, 0)?)?);
    }
    LinuxSeccompBuilder::default()
        .default_action(LinuxSeccompAction::ScmpActErrno)
        // Calls in no list do not exist.
        .default_errno_ret(libc::ENOSYS as u32)
        .syscalls(calls)
        .build()
}

/// Returns masks and values that together match all 32-bit numbers but these: runtimes have no rule for an argument
/// that differs from several numbers.
fn all_but(refused: &[u64]) -> Vec<(u32, u32)> {
    let refused: Vec<u32> = refused.iter().map(|number| *number as u32).collect();
    let mut passed = Vec::new();
    for bit in 0..u32::BITS {
        let mask = u32::MAX << bit;
        // Values that share a refused number's bits above this bit but differ at this bit.
        for near in refused.iter().map(|number| (number ^ (1 << bit)) & mask) {
            let is_free = refused.iter().all(|number| number & mask != near);
            if is_free && !passed.contains(&(mask, near)) {
                passed.push((mask, near));
            }
        }
    }
    passed
}

fn refuse() -> LinuxSeccompAction {
    LinuxSeccompAction::ScmpActErrno
}

fn names<'a>(calls: impl Iterator<Item = &'a Call>) -> Vec<&'static str> {
    calls.map(|(name, _)| name.strip_prefix("SYS_").unwrap_or(name)).collect()
}

fn rule(
    names: &[&str],
    action: LinuxSeccompAction,
    arguments: Option<Vec<LinuxSeccompArg>>,
) -> Result<LinuxSyscall, OciSpecError> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut rule = LinuxSyscallBuilder::default().names(names).action(action);
    if action == refuse() {
        rule = rule.errno_ret(libc::EPERM as u32);
    }
    if let Some(arguments) = arguments {
        rule = rule.args(arguments);
    }
    rule.build()
}

fn allow_if(name: &str, argument: LinuxSeccompArg) -> Result<LinuxSyscall, OciSpecError> {
    rule(&[name], LinuxSeccompAction::ScmpActAllow, Some(vec![argument]))
}

fn equal(index: usize, value: u64) -> Result<LinuxSeccompArg, OciSpecError> {
    LinuxSeccompArgBuilder::default().index(index).value(value).op(LinuxSeccompOperator::ScmpCmpEq).build()
}

fn masked(index: usize, mask: u64, value: u64) -> Result<LinuxSeccompArg, OciSpecError> {
    let masked = LinuxSeccompArgBuilder::default().index(index).value(mask).value_two(value);
    masked.op(LinuxSeccompOperator::ScmpCmpMaskedEq).build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_numbers_pass_but_those_that_are_named() {
        let rules = all_but(&OF_TERMINALS);
        let passes = |number: u32| rules.iter().filter(|(mask, value)| number & mask == *value).count();
        for refused in OF_TERMINALS {
            assert_eq!(passes(refused as u32), 0, "{refused:x}");
        }
        let numbers = (0..0x1_0000).chain([0x8004_5430, 0x4004_5431, 0x5412_5412, u32::MAX, 1 << 31]);
        for number in numbers.filter(|number| !OF_TERMINALS.contains(&u64::from(*number))) {
            assert_eq!(passes(number), 1, "{number:x}");
        }
        assert!(rules.len() < 50, "{}", rules.len());
    }
}
