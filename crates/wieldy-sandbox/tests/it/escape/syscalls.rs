//! Makes, by number, system calls that a sandbox must refuse, and twins that must work.
//!
//! If one is not refused, its arguments do no harm: they are null, negative or out of range wherever the call would
//! have an effect. The filter's own tests use the same table, and so do tests of a whole sandbox.

use libc::{EPERM, c_long};

/// A system call, its arguments, and the expected error number; 0 if it should succeed.
pub(crate) struct Attempt {
    pub(crate) name: &'static str,
    pub(crate) errno: i32,
    number: c_long,
    arguments: [u64; 4],
}

/// Makes every attempt and returns the error number of each, 0 for none. If the sandbox fails, this may end or change
/// the process.
pub(crate) fn attack(which: Numbers) -> Vec<(&'static str, i32)> {
    attempts(which).iter().map(|attempt| (attempt.name, attempt.make())).collect()
}

/// Returns the expected error number of every attempt.
pub(crate) fn expected(which: Numbers) -> Vec<(&'static str, i32)> {
    attempts(which).iter().map(|attempt| (attempt.name, attempt.errno)).collect()
}

/// Returns the ABI version of Landlock of this kernel; 0 if it has none or Landlock is not enabled.
pub(crate) fn landlock_version() -> u32 {
    const VERSION: u32 = 1;
    // SAFETY: with this flag the kernel reads no memory; it takes a null pointer and a size of 0.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, VERSION) };
    u32::try_from(version).unwrap_or(0)
}

/// The numbers that are tried.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Numbers {
    All,
    /// Only numbers below 2^30. Those from there on are of x32, and some filters kill a process that uses one.
    Low,
}

/// Returns the lines `name=errno` of an output, and ignores all others.
pub(crate) fn parse(printed: &str) -> Vec<(String, i32)> {
    let pair =
        |line: &str| line.rsplit_once('=').and_then(|(name, errno)| Some((name.to_owned(), errno.parse().ok()?)));
    printed.lines().filter_map(pair).collect()
}

impl Attempt {
    fn make(&self) -> i32 {
        let [first, second, third, fourth] = self.arguments;
        // SAFETY: pointers among the arguments are null, out of range, or point at constants of this file; a forked
        // child ends at once, without running anything.
        let status = unsafe {
            let status = libc::syscall(self.number, first, second, third, fourth, 0, 0);
            if status == 0 && FORKS.contains(&self.number) {
                libc::_exit(0);
            }
            status
        };
        let errno = if status < 0 { std::io::Error::last_os_error().raw_os_error().unwrap_or(-1) } else { 0 };
        if status > 0 && FORKS.contains(&self.number) {
            // SAFETY: waits for the child just made; no memory is passed.
            unsafe { libc::waitpid(status as i32, std::ptr::null_mut(), 0) };
        }
        errno
    }
}

const FORKS: [c_long; 2] = [libc::SYS_clone, libc::SYS_clone3];

/// An address that is never mapped.
const NOWHERE: u64 = 8;
const NONE: u64 = u64::MAX;
const UPPER: u64 = 1 << 40;

const CREATE: u64 = libc::O_CREAT as u64;
const NAMELESS: u64 = libc::O_TMPFILE as u64;
const SIGCHLD: u64 = libc::SIGCHLD as u64;

fn attempts(which: Numbers) -> Vec<Attempt> {
    let mut attempts = whole();
    attempts.extend(in_part());
    attempts.extend(twins());
    attempts.retain(|attempt| which == Numbers::All || (0..1 << 30).contains(&attempt.number));
    attempts
}

fn attempt(name: &'static str, errno: i32, number: c_long, arguments: &[u64]) -> Attempt {
    let mut four = [0; 4];
    for (place, argument) in four.iter_mut().zip(arguments) {
        *place = *argument;
    }
    Attempt { name, errno, number, arguments: four }
}

/// Returns calls that are refused with any arguments.
fn whole() -> Vec<Attempt> {
    let calls: Vec<(&'static str, c_long, Vec<u64>)> = vec![
        ("io_uring_setup", libc::SYS_io_uring_setup, vec![1, NOWHERE]),
        ("io_uring_enter", libc::SYS_io_uring_enter, vec![NONE]),
        ("io_uring_register", libc::SYS_io_uring_register, vec![NONE]),
        ("ptrace", libc::SYS_ptrace, vec![libc::PTRACE_ATTACH as u64, 0]),
        ("process_vm_readv", libc::SYS_process_vm_readv, vec![1]),
        ("process_vm_writev", libc::SYS_process_vm_writev, vec![1]),
        ("process_madvise", libc::SYS_process_madvise, vec![NONE]),
        ("process_mrelease", libc::SYS_process_mrelease, vec![NONE]),
        ("kcmp", libc::SYS_kcmp, vec![1, 1, 99]),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, vec![NONE, 0, 0]),
        ("move_pages", libc::SYS_move_pages, vec![1, 0, 0]),
        ("migrate_pages", libc::SYS_migrate_pages, vec![1, 0, 0]),
        ("bpf", libc::SYS_bpf, vec![NONE, 0, 0]),
        ("perf_event_open", libc::SYS_perf_event_open, vec![NOWHERE]),
        ("userfaultfd", libc::SYS_userfaultfd, vec![1]),
        ("add_key", libc::SYS_add_key, vec![NOWHERE, NOWHERE]),
        ("request_key", libc::SYS_request_key, vec![NOWHERE, NOWHERE]),
        ("keyctl", libc::SYS_keyctl, vec![0, NONE - 2, 0]),
        ("mount", libc::SYS_mount, vec![NOWHERE, NOWHERE]),
        ("umount2", libc::SYS_umount2, vec![NOWHERE]),
        ("pivot_root", libc::SYS_pivot_root, vec![NOWHERE, NOWHERE]),
        ("chroot", libc::SYS_chroot, vec![NOWHERE]),
        ("open_tree", libc::SYS_open_tree, vec![NONE, NOWHERE]),
        ("open_tree_attr", 467, vec![NONE, NOWHERE]),
        ("move_mount", libc::SYS_move_mount, vec![NONE, NOWHERE]),
        ("fsopen", libc::SYS_fsopen, vec![NOWHERE]),
        ("fsconfig", libc::SYS_fsconfig, vec![NONE]),
        ("fsmount", libc::SYS_fsmount, vec![NONE]),
        ("fspick", libc::SYS_fspick, vec![NONE, NOWHERE]),
        ("mount_setattr", libc::SYS_mount_setattr, vec![NONE, NOWHERE]),
        ("statmount", 457, vec![NOWHERE]),
        ("listmount", 458, vec![NOWHERE]),
        ("setns", libc::SYS_setns, vec![NONE]),
        ("open_by_handle_at", libc::SYS_open_by_handle_at, vec![NONE, NOWHERE]),
        ("fanotify_init", libc::SYS_fanotify_init, vec![NONE]),
        ("fanotify_mark", libc::SYS_fanotify_mark, vec![NONE]),
        ("lookup_dcookie", libc::SYS_lookup_dcookie, vec![0, NOWHERE]),
        ("init_module", libc::SYS_init_module, vec![NOWHERE]),
        ("finit_module", libc::SYS_finit_module, vec![NONE]),
        ("delete_module", libc::SYS_delete_module, vec![NOWHERE]),
        ("kexec_load", libc::SYS_kexec_load, vec![0, NONE]),
        ("kexec_file_load", libc::SYS_kexec_file_load, vec![NONE]),
        ("memfd_secret", libc::SYS_memfd_secret, vec![NONE]),
        ("mbind", libc::SYS_mbind, vec![NONE]),
        ("set_mempolicy", libc::SYS_set_mempolicy, vec![NONE]),
        ("set_mempolicy_home_node", libc::SYS_set_mempolicy_home_node, vec![NONE]),
        ("reboot", libc::SYS_reboot, vec![0, 0]),
        ("swapon", libc::SYS_swapon, vec![NOWHERE]),
        ("swapoff", libc::SYS_swapoff, vec![NOWHERE]),
        ("acct", libc::SYS_acct, vec![NOWHERE]),
        ("quotactl", libc::SYS_quotactl, vec![NONE, NOWHERE]),
        ("quotactl_fd", libc::SYS_quotactl_fd, vec![NONE]),
        ("settimeofday", libc::SYS_settimeofday, vec![NOWHERE]),
        ("clock_settime", libc::SYS_clock_settime, vec![0, NOWHERE]),
        ("adjtimex", libc::SYS_adjtimex, vec![NOWHERE]),
        ("clock_adjtime", libc::SYS_clock_adjtime, vec![0, NOWHERE]),
        ("sethostname", libc::SYS_sethostname, vec![NOWHERE, 1]),
        ("setdomainname", libc::SYS_setdomainname, vec![NOWHERE, 1]),
        ("syslog", libc::SYS_syslog, vec![10]),
        ("nfsservctl", libc::SYS_nfsservctl, vec![NONE]),
        #[cfg(target_arch = "x86_64")]
        ("iopl", libc::SYS_iopl, vec![0]),
        #[cfg(target_arch = "x86_64")]
        ("ioperm", libc::SYS_ioperm, vec![NONE]),
        #[cfg(target_arch = "x86_64")]
        ("modify_ldt", libc::SYS_modify_ldt, vec![0, NOWHERE, 1]),
    ];
    calls.iter().map(|(name, number, arguments)| attempt(name, EPERM, *number, arguments)).collect()
}

/// Returns calls that are refused for these arguments, and numbers without a call.
fn in_part() -> Vec<Attempt> {
    let namespaces = [
        (libc::CLONE_NEWUSER, "clone user", "unshare user", "unshare user, upper half set"),
        (libc::CLONE_NEWNS, "clone mount", "unshare mount", "unshare mount, upper half set"),
        (libc::CLONE_NEWNET, "clone network", "unshare network", "unshare network, upper half set"),
        (libc::CLONE_NEWPID, "clone pid", "unshare pid", "unshare pid, upper half set"),
        (libc::CLONE_NEWIPC, "clone ipc", "unshare ipc", "unshare ipc, upper half set"),
        (libc::CLONE_NEWUTS, "clone uts", "unshare uts", "unshare uts, upper half set"),
        (libc::CLONE_NEWCGROUP, "clone cgroup", "unshare cgroup", "unshare cgroup, upper half set"),
    ];
    let mut attempts = Vec::new();
    for (flag, clone, unshare, upper) in namespaces {
        let flag = u64::from(flag as u32);
        attempts.push(attempt(clone, EPERM, libc::SYS_clone, &[flag | SIGCHLD]));
        attempts.push(attempt(unshare, EPERM, libc::SYS_unshare, &[flag]));
        attempts.push(attempt(upper, EPERM, libc::SYS_unshare, &[flag | UPPER]));
    }
    attempts.extend([
        attempt("unshare time", EPERM, libc::SYS_unshare, &[0x80]),
        attempt("clone3", libc::ENOSYS, libc::SYS_clone3, &[NOWHERE, 64]),
        attempt("ioctl TIOCSTI", EPERM, libc::SYS_ioctl, &[NONE, libc::TIOCSTI]),
        attempt("ioctl TIOCSTI, upper half set", EPERM, libc::SYS_ioctl, &[NONE, libc::TIOCSTI | UPPER]),
        attempt("ioctl TIOCLINUX", EPERM, libc::SYS_ioctl, &[NONE, libc::TIOCLINUX]),
        attempt("ioctl TIOCSETD", EPERM, libc::SYS_ioctl, &[NONE, libc::TIOCSETD]),
        attempt("ioctl TIOCCONS", EPERM, libc::SYS_ioctl, &[NONE, libc::TIOCCONS]),
        attempt("socket vsock", EPERM, libc::SYS_socket, &[libc::AF_VSOCK as u64, 1, 0]),
        attempt("socket vsock, upper half set", EPERM, libc::SYS_socket, &[libc::AF_VSOCK as u64 | UPPER, 1, 0]),
        attempt("socket packet", EPERM, libc::SYS_socket, &[libc::AF_PACKET as u64, 3, 0]),
        attempt("socket alg", EPERM, libc::SYS_socket, &[libc::AF_ALG as u64, 5, 0]),
        attempt("socket bluetooth", EPERM, libc::SYS_socket, &[libc::AF_BLUETOOTH as u64, 3, 0]),
        attempt("socket xdp", EPERM, libc::SYS_socket, &[libc::AF_XDP as u64, 3, 0]),
        attempt("socket key", EPERM, libc::SYS_socket, &[libc::AF_KEY as u64, 3, 2]),
        attempt("socket netlink netfilter", EPERM, libc::SYS_socket, &[libc::AF_NETLINK as u64, 3, 12]),
        attempt("socket netlink audit", EPERM, libc::SYS_socket, &[libc::AF_NETLINK as u64, 3, 9]),
        attempt("socket raw", EPERM, libc::SYS_socket, &[libc::AF_INET as u64, libc::SOCK_RAW as u64, 1]),
        attempt(
            "socket raw, flags set",
            EPERM,
            libc::SYS_socket,
            &[libc::AF_INET6 as u64, (libc::SOCK_RAW | libc::SOCK_CLOEXEC) as u64, 58],
        ),
        attempt("socket sctp", EPERM, libc::SYS_socket, &[libc::AF_INET as u64, 1, 132]),
        attempt("socketpair tipc", EPERM, libc::SYS_socketpair, &[libc::AF_TIPC as u64, 1, 0, NOWHERE]),
        attempt("personality, all executable", EPERM, libc::SYS_personality, &[0x40_0000]),
        attempt("mknodat character device", EPERM, libc::SYS_mknodat, &[NONE, NOWHERE, 0o20_666, 0x103]),
        attempt("mknodat block device", EPERM, libc::SYS_mknodat, &[NONE, NOWHERE, 0o60_666, 0x800]),
        attempt("mknodat set-user-id file", EPERM, libc::SYS_mknodat, &[NONE, NOWHERE, 0o104_755, 0]),
        attempt("fchmod set-user-id", EPERM, libc::SYS_fchmod, &[NONE, 0o4755]),
        attempt("fchmod set-group-id, upper half set", EPERM, libc::SYS_fchmod, &[NONE, 0o2755 | UPPER]),
        attempt("fchmodat set-user-id", EPERM, libc::SYS_fchmodat, &[NONE, NOWHERE, 0o4755]),
        attempt("fchmodat2 set-group-id", EPERM, libc::SYS_fchmodat2, &[NONE, NOWHERE, 0o2755, 0]),
        attempt("openat of a new set-user-id file", EPERM, libc::SYS_openat, &[NONE, NOWHERE, CREATE, 0o4755]),
        attempt("openat of a nameless set-group-id file", EPERM, libc::SYS_openat, &[NONE, NOWHERE, NAMELESS, 0o2644]),
        attempt("openat2", libc::ENOSYS, libc::SYS_openat2, &[NONE, NOWHERE, NOWHERE, 1]),
        attempt("fallocate", libc::EOPNOTSUPP, libc::SYS_fallocate, &[NONE, 0, 0, 1]),
        attempt("fallocate beyond the end", libc::EOPNOTSUPP, libc::SYS_fallocate, &[NONE, 1, 0, 1]),
        attempt("fallocate of zeroes", libc::EOPNOTSUPP, libc::SYS_fallocate, &[NONE, 0x10, 0, 1]),
        attempt("prlimit64 of the first process", EPERM, libc::SYS_prlimit64, &[1, 7, 0, 0]),
        attempt("a number not given yet", libc::ENOSYS, 1000, &[]),
        attempt("a negative number", libc::ENOSYS, -5, &[]),
    ]);
    #[cfg(target_arch = "x86_64")]
    attempts.extend([
        attempt("chmod set-user-id", EPERM, libc::SYS_chmod, &[NOWHERE, 0o4755]),
        attempt("creat set-user-id", EPERM, libc::SYS_creat, &[NOWHERE, 0o4755]),
        attempt("open of a new set-user-id file", EPERM, libc::SYS_open, &[NOWHERE, CREATE, 0o4755]),
        attempt("mknod character device", EPERM, libc::SYS_mknod, &[NOWHERE, 0o20_666, 0x103]),
        attempt("x32: getpid", libc::ENOSYS, 0x4000_0000 + libc::SYS_getpid, &[]),
        attempt("x32: ptrace", libc::ENOSYS, 0x4000_0000 + 521, &[]),
        attempt("uselib", libc::ENOSYS, libc::SYS_uselib, &[NOWHERE]),
    ]);
    attempts
}

/// Returns calls that must work, each close to a refused one.
fn twins() -> Vec<Attempt> {
    let works = |name, number, arguments: &[u64]| attempt(name, 0, number, arguments);
    let flags = (libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) as u64;
    vec![
        works("twin: getpid", libc::SYS_getpid, &[]),
        works("twin: clone", libc::SYS_clone, &[SIGCHLD]),
        works("twin: unshare nothing", libc::SYS_unshare, &[0]),
        works("twin: unshare files", libc::SYS_unshare, &[(libc::CLONE_FILES | libc::CLONE_FS) as u64]),
        works("twin: personality question", libc::SYS_personality, &[0xffff_ffff]),
        works("twin: socket unix", libc::SYS_socket, &[libc::AF_UNIX as u64, flags, 0]),
        works("twin: socket inet", libc::SYS_socket, &[libc::AF_INET as u64, flags, 0]),
        works("twin: socket inet tcp", libc::SYS_socket, &[libc::AF_INET as u64, flags, 6]),
        works("twin: socket inet udp", libc::SYS_socket, &[libc::AF_INET as u64, 2, 17]),
        works("twin: socket netlink route", libc::SYS_socket, &[libc::AF_NETLINK as u64, 3, 0]),
        works("twin: prctl", libc::SYS_prctl, &[libc::PR_GET_DUMPABLE as u64]),
        works("twin: memfd_create", libc::SYS_memfd_create, &[c"twin".as_ptr().addr() as u64, 0]),
        // These errors are the kernel's own answers to invalid arguments, so the filter has let the calls through.
        attempt("twin: socketpair unix", libc::EFAULT, libc::SYS_socketpair, &[libc::AF_UNIX as u64, 1, 0, NOWHERE]),
        attempt("twin: ioctl of no file", libc::EBADF, libc::SYS_ioctl, &[NONE, libc::TIOCGWINSZ]),
        attempt("twin: ioctl TIOCSCTTY of no file", libc::EBADF, libc::SYS_ioctl, &[NONE, libc::TIOCSCTTY]),
        attempt("twin: mknodat pipe", libc::EFAULT, libc::SYS_mknodat, &[NONE, NOWHERE, 0o10_666]),
        attempt("twin: name_to_handle_at", libc::EFAULT, libc::SYS_name_to_handle_at, &[NONE, NOWHERE, NOWHERE]),
        attempt("twin: landlock_create_ruleset", libc::EINVAL, libc::SYS_landlock_create_ruleset, &[0, 0, 1 << 20]),
        attempt("twin: openat, any mode", libc::EFAULT, libc::SYS_openat, &[NONE, NOWHERE, 0, 0o7777]),
        attempt("twin: openat of a new file", libc::EFAULT, libc::SYS_openat, &[NONE, NOWHERE, CREATE, 0o1777]),
        attempt("twin: fallocate of a hole", libc::EBADF, libc::SYS_fallocate, &[NONE, 3, 0, 1]),
        attempt("twin: fchmod", libc::EBADF, libc::SYS_fchmod, &[NONE, 0o1777]),
        works("twin: prlimit64", libc::SYS_prlimit64, &[0, 7, 0, 0]),
    ]
}
