//! The seccomp filter, which the kernel runs before every system call of a sandboxed program.
//!
//! It is an allow-list, made from the lists in `syscalls.rs` and from the [`checked`] calls, whose arguments decide. It
//! finds a call's number by binary search in about eight steps. For calls that pass with any arguments, the kernel
//! computes the answer once, when the filter is installed, and never runs the filter again. The library compiles the
//! conditions on arguments. The search around them is ours: the library knows two answers and we give three, and it
//! compares all numbers one after the other.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule, sock_filter,
};
use serde::Serialize;

use super::syscalls::{ALLOWED, REFUSED};

/// A system call that programs are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RefusedCall {
    /// The name of the call, and the arguments for which it is refused if not for all.
    pub name: &'static str,
    /// The harm that it could do.
    pub reason: &'static str,
}

/// Makes the filter for this machine's architecture.
pub(crate) fn filter() -> Result<BpfProgram, String> {
    let mut table = BTreeMap::new();
    for (_, number) in ALLOWED.iter().copied().flatten() {
        table.insert(key(*number)?, vec![give(ALLOW)]);
    }
    for (_, number) in REFUSED.iter().flat_map(|(_, calls)| calls.iter()) {
        table.insert(key(*number)?, vec![give(REFUSE)]);
    }
    for (number, ways) in checked() {
        let block =
            compile(ways).map_err(|error| format!("could not compile the filter for call {number}: {error}"))?;
        table.insert(key(number)?, block);
    }
    let mut program = vec![
        instruction(LOAD, 0, 0, OFFSET_ARCHITECTURE),
        instruction(JUMP_IF_EQUAL, 1, 0, ARCHITECTURE.ok_or("there is no list of system calls for this architecture")?),
        give(SeccompAction::KillProcess),
        instruction(LOAD, 0, 0, OFFSET_NUMBER),
    ];
    program.extend(search(&ranges(table)));
    Ok(program)
}

/// Puts this thread and its descendants under the filter for good, and sets `no_new_privs`.
pub(crate) fn install(filter: &BpfProgram) -> io::Result<()> {
    seccompiler::apply_filter(filter).map_err(|error| match error {
        seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error,
        error => io::Error::other(error),
    })
}

/// Returns every system call that is refused, with a reason for people to read.
pub(crate) fn refused() -> impl Iterator<Item = RefusedCall> {
    let whole = REFUSED.iter().flat_map(|(reason, calls)| {
        calls.iter().map(|(name, _)| RefusedCall { name: name.strip_prefix("SYS_").unwrap_or(name), reason })
    });
    whole.chain(REFUSED_IN_PART.iter().map(|&(name, reason)| RefusedCall { name, reason }))
}

const REFUSED_IN_PART: &[(&str, &str)] = &[
    (
        "clone with a new namespace",
        "a namespace of its own gives a program rights over the kernel that it lacks outside",
    ),
    ("unshare with a namespace", "a namespace of its own gives a program rights over the kernel that it lacks outside"),
    ("clone3", "its flags cannot be seen by a filter; it does not exist (ENOSYS), and programs use clone"),
    ("ioctl TIOCSTI, TIOCLINUX, TIOCSETD, TIOCCONS", "it types into a terminal, or changes what a terminal is"),
    (
        "socket of a family but unix, inet, inet6, netlink",
        "it reaches the hypervisor, the hardware or rarely used kernel code",
    ),
    ("socket of inet but TCP, UDP, ICMP", "it reaches the wire, or rarely used kernel code"),
    ("socket of netlink but route", "it reaches parts of the kernel that programs do not need"),
    ("socketpair but unix", "it reaches rarely used kernel code"),
    ("personality but harmless ones", "it can make all memory executable"),
    ("mknod, mknodat of a device", "a device is a way to the hardware"),
    (
        "chmod, open, mknod and their like with a set-user-id or set-group-id bit",
        "outside of the sandbox such a program has the rights of the workspace's owner",
    ),
    (
        "openat2",
        "the mode of a new file cannot be seen by a filter; it does not exist (ENOSYS), and programs use openat",
    ),
    (
        "prlimit64 of another process",
        "it can take resources from other processes, also from those of the sandbox itself",
    ),
];

const ALLOW: SeccompAction = SeccompAction::Allow;
const REFUSE: SeccompAction = SeccompAction::Errno(libc::EPERM as u32);
const UNKNOWN: SeccompAction = SeccompAction::Errno(libc::ENOSYS as u32);
const UNSUPPORTED: SeccompAction = SeccompAction::Errno(libc::EOPNOTSUPP as u32);

/// Rules about a call's arguments: the action of the first rule whose conditions all hold. The last rule has no
/// condition.
type Ways = Vec<(Vec<Condition>, SeccompAction)>;

/// An argument, counted from 0, and a comparison of its lower half. The kernel ignores the upper half of every argument
/// that is checked here, so a filter that compared it could be passed by setting it.
type Condition = (u8, SeccompCmpOp, u64);

/// Returns the calls whose arguments decide.
fn checked() -> Vec<(i64, Ways)> {
    use SeccompCmpOp::{Eq, MaskedEq};
    let only = |argument, values: &[u64], operator: fn(u64) -> SeccompCmpOp, otherwise| -> Ways {
        let mut ways: Ways = values.iter().map(|value| (vec![(argument, operator(*value), *value)], ALLOW)).collect();
        ways.push((vec![], otherwise));
        ways
    };
    let equal = |_| Eq;
    let unmasked = |mask: i32| vec![(vec![(0, MaskedEq(u64::from(mask as u32)), 0)], ALLOW), (vec![], REFUSE)];
    let node_kinds = [0, libc::S_IFREG, libc::S_IFIFO, libc::S_IFSOCK].map(u64::from);
    let node_kind = |_| MaskedEq(u64::from(libc::S_IFMT | CHANGES_USER));
    let mode =
        |argument| -> Ways { vec![(vec![(argument, MaskedEq(u64::from(CHANGES_USER)), 0)], ALLOW), (vec![], REFUSE)] };
    let opening = |flags: u8| -> Ways {
        // A call that makes no file takes no mode: the argument in its place means nothing.
        let makes = (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) as u64;
        [vec![(vec![(flags, MaskedEq(makes), 0)], ALLOW)], mode(flags + 1)].concat()
    };
    let mut ioctl: Ways = OF_TERMINALS.iter().map(|request| (vec![(1, Eq, *request)], REFUSE)).collect();
    ioctl.push((vec![], ALLOW));
    vec![
        (libc::SYS_ioctl, ioctl),
        (libc::SYS_clone, unmasked(NAMESPACES)),
        (libc::SYS_unshare, unmasked(NAMESPACES | libc::CLONE_NEWTIME)),
        (libc::SYS_clone3, vec![(vec![], UNKNOWN)]),
        (libc::SYS_socket, socket()),
        (libc::SYS_socketpair, only(0, &[libc::AF_UNIX as u64], equal, REFUSE)),
        (libc::SYS_personality, only(0, &PERSONALITIES, equal, REFUSE)),
        (libc::SYS_mknodat, only(2, &node_kinds, node_kind, REFUSE)),
        (libc::SYS_prlimit64, only(0, &[0], equal, REFUSE)),
        (libc::SYS_fchmod, mode(1)),
        (libc::SYS_fchmodat, mode(2)),
        (libc::SYS_fchmodat2, mode(2)),
        (libc::SYS_openat, opening(2)),
        (libc::SYS_openat2, vec![(vec![], UNKNOWN)]),
        (libc::SYS_fallocate, only(1, &GIVING_BACK, equal, UNSUPPORTED)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_mknod, only(1, &node_kinds, node_kind, REFUSE)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_chmod, mode(1)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_creat, mode(1)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_open, opening(1)),
    ]
}

/// Returns the rules for new sockets.
fn socket() -> Ways {
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    const KIND: u64 = 0xf; // the rest of the second argument are flags
    let family = |family: i32| (0, Eq, family as u64);
    let protocol = |protocol: i32| (2, Eq, protocol as u64);
    let mut ways = vec![
        (vec![family(libc::AF_UNIX)], ALLOW),
        (vec![family(libc::AF_NETLINK), protocol(libc::NETLINK_ROUTE)], ALLOW),
        (vec![(0, Ne, libc::AF_INET as u64), (0, Ne, libc::AF_INET6 as u64)], REFUSE),
        (vec![(1, MaskedEq(KIND), libc::SOCK_RAW as u64)], REFUSE),
    ];
    ways.extend(PROTOCOLS.map(|number| (vec![protocol(number)], ALLOW)));
    ways.push((vec![], REFUSE));
    ways
}

/// Allowed protocols of the internet. For any other one the kernel would load a module, even for an unprivileged
/// program.
pub(crate) const PROTOCOLS: [i32; 5] =
    [libc::IPPROTO_IP, libc::IPPROTO_TCP, libc::IPPROTO_UDP, libc::IPPROTO_ICMP, libc::IPPROTO_ICMPV6];

/// `ioctl` requests that type into a terminal, or change what a terminal is.
pub(crate) const OF_TERMINALS: [u64; 4] = [libc::TIOCSTI, libc::TIOCLINUX, libc::TIOCSETD, libc::TIOCCONS];

/// The flags of `clone` that ask for a new namespace, except `CLONE_NEWTIME`: its bit is part of the signal's number
/// there.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// The mode bits that run a program with the rights of its owner or group. They do nothing in a sandbox; but outside,
/// files that a sandbox made belong to the owner of the workspace.
pub(crate) const CHANGES_USER: u32 = libc::S_ISUID | libc::S_ISGID;

/// The modes of `fallocate` that free space: punching holes and removing ranges.
pub(crate) const GIVING_BACK: [u64; 2] =
    [(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u64, libc::FALLOC_FL_COLLAPSE_RANGE as u64];

/// Allowed personalities: Linux, 32-bit Linux as `uname` shows it, an old version number as `uname` shows it, fixed
/// addresses as debuggers want them, and the query of the current one.
pub(crate) const PERSONALITIES: [u64; 6] = [0, 0x8, 0x2_0000, 0x2_0008, 0x4_0000, 0xffff_ffff];

fn compile(ways: Ways) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut block = BpfProgram::new();
    for (conditions, action) in ways {
        if !conditions.is_empty() {
            let conditions = conditions.into_iter().map(|(argument, operator, value)| {
                SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
            });
            // If a condition does not hold, the rule jumps over the one instruction after it.
            block.extend(BpfProgram::from(SeccompRule::new(conditions.collect::<Result<_, _>>()?)?));
        }
        block.push(give(action));
    }
    Ok(block)
}

/// The first number of a range, which ends before the next range, and the instructions for its numbers.
type Range = (u32, BpfProgram);

/// Returns ranges that cover all numbers; neighbours with the same instructions are merged. The last range holds the
/// numbers that are too large: calls not invented yet, and those of the x32 architecture, which begin at 2^30.
fn ranges(table: BTreeMap<u32, BpfProgram>) -> Vec<Range> {
    let mut ranges: Vec<Range> = vec![(0, vec![give(UNKNOWN)])];
    let mut append = |from: u32, block: BpfProgram| match ranges.last_mut() {
        Some((_, last)) if *last == block => {}
        Some((start, last)) if *start == from => *last = block,
        _ => ranges.push((from, block)),
    };
    let mut next = 0;
    for (number, block) in table {
        if number > next {
            append(next, vec![give(UNKNOWN)]);
        }
        append(number, block);
        next = number + 1;
    }
    append(next, vec![give(UNKNOWN)]);
    ranges
}

/// Returns a binary search for the range of the loaded number, followed by the range's instructions.
fn search(ranges: &[Range]) -> BpfProgram {
    let (below, above) = ranges.split_at(ranges.len() / 2);
    let (Some((middle, block)), false) = (above.first(), below.is_empty()) else {
        return ranges.first().map(|(_, block)| block.clone()).unwrap_or_default();
    };
    debug_assert!(!block.is_empty(), "every range gives an answer");
    let (below, above) = (search(below), search(above));
    let mut program = match u8::try_from(below.len()) {
        Ok(over) => vec![instruction(JUMP_IF_AT_LEAST, over, 0, *middle)],
        Err(_) => {
            vec![instruction(JUMP_IF_AT_LEAST, 0, 1, *middle), instruction(JUMP, 0, 0, below.len() as u32)]
        }
    };
    program.extend(below);
    program.extend(above);
    program
}

fn key(number: i64) -> Result<u32, String> {
    u32::try_from(number).map_err(|_| format!("{number} is no number of a system call"))
}

fn give(action: SeccompAction) -> sock_filter {
    instruction(RETURN, 0, 0, u32::from(action))
}

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JUMP_IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// The offset of the call's number in the kernel's `seccomp_data`; `OFFSET_ARCHITECTURE` is that of its architecture.
const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCHITECTURE: u32 = 4;

/// The architecture in the kernel's encoding: the machine of its executables, 64 bits, little-endian.
const ARCHITECTURE: Option<u32> = if cfg!(target_arch = "x86_64") {
    Some(0xc000_003e)
} else if cfg!(target_arch = "aarch64") {
    Some(0xc000_00b7)
} else {
    None
};

#[cfg(test)]
mod tests;
