//! Wraps system calls that need `unsafe` in small functions with safe signatures, each with the reason it is sound. No
//! other file of the project has `unsafe` blocks, except tests.
//!
//! A function marked *vfork-safe* does not allocate, lock or panic: it may run between `vfork` and `exec`, in a process that
//! still shares its parent's memory.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use rustix::process::Pid;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Runs before `main` in every program that contains this crate. A program that was started as a fork server becomes
/// one and never reaches its `main`. So a program that embeds wieldy needs no second executable and no code in `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn(c_int, *const *const c_char) = before_main;

extern "C" fn before_main(count: c_int, words: *const *const c_char) {
    if count < 1 || words.is_null() {
        return;
    }
    // SAFETY: the C library calls constructors with the arguments of `main`: `count` texts, of which there is at least
    // one.
    let name = unsafe { CStr::from_ptr(*words) };
    let words = || -> Vec<CString> {
        // SAFETY: as above, for each of the `count` texts.
        let word = |number: c_int| unsafe { CStr::from_ptr(*words.add(number as usize)) }.to_owned();
        (1..count).map(word).collect()
    };
    crate::become_helper(name, words);
}

/// A program with its arguments and environment, in the form that `execve` takes.
pub(crate) struct Program {
    /// The paths to try, in this order.
    candidates: Vec<CString>,
    words: List,
    variables: List,
}

/// Texts, and the null-terminated array of pointers to them that the kernel takes.
struct List {
    pointers: Vec<*const c_char>,
    _texts: Vec<CString>,
}

impl List {
    fn new(texts: Vec<CString>) -> Self {
        let pointers = texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect();
        Self { pointers, _texts: texts }
    }
}

impl Program {
    /// Builds the arrays for `execve`; the first of `words` is the program's own name (`argv[0]`).
    pub(crate) fn new(candidates: Vec<CString>, words: Vec<CString>, variables: Vec<CString>) -> Self {
        Self { candidates, words: List::new(words), variables: List::new(variables) }
    }

    /// Executes the first candidate that can be executed. Returns only on failure, with the error number. Vfork-safe.
    pub(crate) fn execute(&self) -> i32 {
        let mut reason = libc::ENOENT;
        for candidate in &self.candidates {
            // SAFETY: the path ends with a zero byte, both lists with a null pointer, and all live as long as `self`.
            unsafe { libc::execve(candidate.as_ptr(), self.words.pointers.as_ptr(), self.variables.pointers.as_ptr()) };
            match io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) {
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES if self.candidates.len() > 1 => reason = libc::EACCES,
                error => return error,
            }
        }
        reason
    }
}

/// A stack for a child that shares this process's memory until it executes another program.
pub(crate) struct Stack(Box<[MaybeUninit<u8>]>);

impl Stack {
    pub(crate) fn new() -> Self {
        const BYTES: usize = 64 * 1024;
        Self(Box::new_uninit_slice(BYTES))
    }
}

/// Makes a process that calls `child`, which executes another program or returns. Until then this process is suspended
/// and shares its memory with the child. So it sees what the child writes to `data`, and `child` must be vfork-safe.
pub(crate) fn vfork<T>(stack: &mut Stack, data: &mut T, child: fn(&mut T)) -> io::Result<Pid> {
    struct Task<'a, T> {
        data: &'a mut T,
        child: fn(&mut T),
    }
    extern "C" fn enter<T>(task: *mut c_void) -> c_int {
        // SAFETY: `vfork` passes a pointer to its own `Task`, and is suspended as long as this runs.
        let task = unsafe { &mut *task.cast::<Task<'_, T>>() };
        (task.child)(task.data);
        127
    }
    let mut task = Task { data, child };
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    let top = stack.0.as_mut_ptr_range().end;
    // SAFETY: the stack is borrowed exclusively and grows downwards from its (aligned down) end; the task lives until
    // the child no longer uses our memory, since `CLONE_VFORK` suspends us until then.
    let pid = unsafe {
        let top = top.byte_sub(top.addr() % 16).cast::<c_void>();
        libc::clone(enter::<T>, top, flags, (&raw mut task).cast())
    };
    Pid::from_raw(checked(pid)?).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Forks this process, into the new namespaces of `flags`. Returns the child's id in the parent, and `None` in the
/// child.
///
/// For processes with one thread only: their fork is complete and may run any code.
pub(crate) fn fork(flags: c_int) -> io::Result<Option<Pid>> {
    // SAFETY: without `CLONE_VM` the child gets its own copy of our memory and goes on with its own copy of this stack.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(Pid::from_raw(pid as i32)),
    }
}

/// Forks like [`fork`], with the child in a cgroup v2 group. Fails on kernels before 5.7, and if this process may not
/// enter the group.
pub(crate) fn fork_into(flags: c_int, group: BorrowedFd<'_>) -> io::Result<Option<Pid>> {
    /// The constant of the kernel, which `libc` lacks on some targets.
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    let arguments = libc::clone_args {
        flags: u64::from(flags as u32) | CLONE_INTO_CGROUP,
        exit_signal: libc::SIGCHLD as u64,
        cgroup: group.as_raw_fd() as u64,
        // SAFETY: the fields are plain numbers and addresses, for which zero means none.
        ..unsafe { std::mem::zeroed() }
    };
    // SAFETY: as in `fork`; the arguments are read before the call returns, and no address among them is set.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<libc::clone_args>()) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(Pid::from_raw(pid as i32)),
    }
}

/// Enters a mount namespace with all capabilities there. This process must own its user namespace, and have one thread
/// only.
pub(crate) fn enter_mounts(namespace: &OwnedFd) -> io::Result<()> {
    /// `_IO(0xb7, 1)`: opens the user namespace that owns a namespace.
    const NS_GET_USERNS: libc::c_ulong = 0xb701;
    // SAFETY: takes no argument, and returns a new descriptor or -1.
    let owner = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_USERNS as _) };
    if owner < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let owner = unsafe { OwnedFd::from_raw_fd(owner) };
    move_into_link_name_space(owner.as_fd(), Some(LinkNameSpaceType::User))?;
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))?)
}

/// Ends this process at once, without running exit handlers. Vfork-safe.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: takes a plain number and does not return.
    unsafe { libc::_exit(code) }
}

/// Takes ownership of the descriptor of this number, which must have no other owner.
pub(crate) fn take_descriptor(number: RawFd) -> OwnedFd {
    // SAFETY: called once by a fork server at its start, for the descriptor that its parent made for it.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// Closes all descriptors of this process except `kept`. The owners of the closed ones must never be used or dropped
/// again.
pub(crate) fn close_all_but(kept: &mut [RawFd]) -> io::Result<()> {
    kept.sort_unstable();
    let mut first = 0;
    for &mut number in kept {
        if number > first {
            close_range(first, number - 1)?;
        }
        first = number + 1;
    }
    close_range(first, RawFd::MAX)
}

/// Closes a range of descriptors. Vfork-safe.
pub(crate) fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    // SAFETY: takes plain numbers; called only in new processes, in which no owner of a descriptor in that range is
    // used again.
    let status = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Duplicates `fd` to the number `to`, open across `exec`. Vfork-safe.
pub(crate) fn duplicate_to(fd: RawFd, to: RawFd) -> io::Result<()> {
    if fd == to {
        // SAFETY: takes plain numbers.
        return checked(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) }).map(drop);
    }
    // SAFETY: takes plain numbers; called where nothing owns the number `to`.
    checked(unsafe { libc::dup3(fd, to, 0) }).map(drop)
}

/// Sets every signal to its default action. Vfork-safe.
pub(crate) fn reset_signal_handlers() {
    /// The kernel's `sigaction` of `SIG_DFL`, without flags, restorer or mask; no architecture has a longer one.
    const DEFAULT: [u64; 8] = [0; 8];
    for signal in 1..=SIGNAL_MAX {
        // The C library refuses to set two signals that it reserves for itself, but the parent process may have ignored
        // them. The kernel refuses signals that cannot be set, which is fine.
        // SAFETY: the kernel reads an action from memory that holds one, and writes nothing.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, &DEFAULT, ptr::null_mut::<u64>(), SIGNAL_SET_BYTES) };
    }
}

const SIGNAL_MAX: c_int = 64;
const SIGNAL_SET_BYTES: usize = size_of::<u64>();

/// Unblocks every signal. Vfork-safe.
pub(crate) fn unblock_signals() {
    set_signal_mask(0);
}

/// Blocks every signal that can be blocked. Vfork-safe.
pub(crate) fn block_signals() {
    set_signal_mask(u64::MAX);
}

/// Sets this thread's mask of blocked signals, one bit for each. Vfork-safe.
fn set_signal_mask(mask: u64) {
    let before = ptr::null_mut::<u64>();
    // SAFETY: the kernel reads a set of the size that is given, and writes nothing.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &mask, before, SIGNAL_SET_BYTES) };
}

/// Returns a descriptor that is readable when a child has ended; `SIGCHLD` must be blocked.
pub(crate) fn child_signals() -> io::Result<OwnedFd> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the first call initialises the set, the others read it; it lives through all of them. The descriptor is
    // new.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
        let fd = checked(libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// The resources used by a child and by the processes that it reaped.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ChildUse {
    pub(crate) cpu_us: u64,
    pub(crate) memory_peak_kib: u64,
    pub(crate) blocks_read: u64,
    pub(crate) blocks_written: u64,
}

/// A reaped child: its id, its wait status and its use of resources.
pub(crate) type Reaped = (Pid, i32, ChildUse);

/// Reaps a child. Returns `None` if none has ended and `block` is false, and an error if there is no child.
pub(crate) fn wait(block: bool) -> io::Result<Option<Reaped>> {
    let flags = libc::__WALL | if block { 0 } else { libc::WNOHANG };
    let mut status = 0;
    // SAFETY: all-zero is a value of this plain struct; the kernel writes to both variables, which are ours.
    let (pid, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        (checked(libc::wait4(-1, &mut status, flags, &mut usage))?, usage)
    };
    let Some(pid) = Pid::from_raw(pid) else { return Ok(None) };
    let count = |number: i64| u64::try_from(number).unwrap_or_default();
    let microseconds = |time: libc::timeval| count(time.tv_sec) * 1_000_000 + count(time.tv_usec);
    let used = ChildUse {
        cpu_us: microseconds(usage.ru_utime) + microseconds(usage.ru_stime),
        memory_peak_kib: count(usage.ru_maxrss),
        blocks_read: count(usage.ru_inblock),
        blocks_written: count(usage.ru_oublock),
    };
    Ok(Some((pid, status, used)))
}

/// A change of a mount's attributes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MountChange<'a> {
    /// True to make the mount read-only.
    pub(crate) read_only: bool,
    /// The user namespace of an id-mapped mount.
    pub(crate) owners: Option<BorrowedFd<'a>>,
}

/// Changes a mount, and the mounts below it if `whole`. Also sets `nosuid` and `nodev`.
pub(crate) fn change_mount(mount: BorrowedFd<'_>, whole: bool, change: MountChange<'_>) -> io::Result<()> {
    let mut attributes = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
    if change.read_only {
        attributes |= libc::MOUNT_ATTR_RDONLY;
    }
    if change.owners.is_some() {
        attributes |= libc::MOUNT_ATTR_IDMAP;
    }
    set_mount_attributes(mount, whole, attributes, change.owners)
}

/// Sets `nosuid` and `noexec` on the mount of a device file, which must still work as a device.
pub(crate) fn change_device_mount(mount: BorrowedFd<'_>) -> io::Result<()> {
    set_mount_attributes(mount, false, libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC, None)
}

fn set_mount_attributes(
    mount: BorrowedFd<'_>,
    whole: bool,
    attributes: u64,
    owners: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let change = libc::mount_attr {
        attr_set: attributes,
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: owners.map_or(0, |owners| owners.as_raw_fd() as u64),
    };
    let flags = libc::AT_EMPTY_PATH | if whole { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is an empty text, and the struct is the kernel's own, passed with its size.
    let status = unsafe {
        let (path, bytes) = (c"".as_ptr(), size_of::<libc::mount_attr>());
        libc::syscall(libc::SYS_mount_setattr, mount.as_raw_fd(), path, flags, &raw const change, bytes)
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Restricts this thread and its future children by a Landlock ruleset, permanently. `no_new_privs` must be set before.
/// The `landlock` crate's own function is not used, since it allocates. Vfork-safe.
pub(crate) fn landlock_restrict(ruleset: RawFd) -> io::Result<()> {
    // SAFETY: takes plain numbers.
    let status = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the newest ABI version of Landlock that this kernel has.
pub(crate) fn landlock_version() -> io::Result<u32> {
    const VERSION: u32 = 1;
    // SAFETY: with this flag the kernel reads no memory; it wants a null pointer and a size of 0.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, VERSION) };
    u32::try_from(version).map_err(|_| io::Error::last_os_error())
}

fn checked(status: c_int) -> io::Result<c_int> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(status) }
}

/// Moves only this thread to a new, empty network namespace.
pub(crate) fn leave_network() -> io::Result<()> {
    // SAFETY: takes a number and touches no memory; only the calling thread changes its network namespace.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Brings up the loopback interface of this network namespace.
pub(crate) fn raise_loopback() -> io::Result<()> {
    let (family, kind) = (rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM);
    let socket = rustix::net::socket_with(family, kind, rustix::net::SocketFlags::CLOEXEC, None)?;
    // SAFETY: all-zero is a value of this plain struct; the name fits with its ending zero, and the struct has the size
    // that the kernel reads.
    let status = unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        for (place, byte) in request.ifr_name.iter_mut().zip(b"lo") {
            *place = *byte as c_char;
        }
        request.ifr_ifru.ifru_flags = libc::IFF_UP as i16;
        libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request)
    };
    checked(status).map(drop)
}

/// Listens on a port of a guest's virtual socket (vsock), for connections from the host.
#[cfg(feature = "firecracker")]
pub(crate) fn listen_to_host(port: u32) -> io::Result<OwnedFd> {
    let socket = virtual_socket(libc::VMADDR_CID_ANY, port, libc::bind)?;
    rustix::net::listen(&socket, 64)?;
    Ok(socket)
}

/// Connects to a vsock port of this machine, if its kernel supports that.
#[cfg(all(test, feature = "firecracker"))]
pub(crate) fn connect_to_self(port: u32) -> io::Result<OwnedFd> {
    virtual_socket(libc::VMADDR_CID_LOCAL, port, libc::connect)
}

#[cfg(feature = "firecracker")]
type Name = unsafe extern "C" fn(c_int, *const libc::sockaddr, libc::socklen_t) -> c_int;

/// Makes a vsock socket and binds or connects it, by `name`, to an address.
#[cfg(feature = "firecracker")]
fn virtual_socket(machine: u32, port: u32, name: Name) -> io::Result<OwnedFd> {
    let (family, kind) = (rustix::net::AddressFamily::VSOCK, rustix::net::SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, rustix::net::SocketFlags::CLOEXEC, None)?;
    // SAFETY: all-zero is a value of this plain struct, and `bind` or `connect` gets its size.
    let status = unsafe {
        let mut address: libc::sockaddr_vm = std::mem::zeroed();
        address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
        address.svm_port = port;
        address.svm_cid = machine;
        name(socket.as_raw_fd(), (&raw const address).cast(), size_of::<libc::sockaddr_vm>() as libc::socklen_t)
    };
    checked(status)?;
    Ok(socket)
}

/// Registers a descriptor with the runtime for one kind of readiness, and makes it non-blocking.
pub(crate) fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    rustix::io::ioctl_fionbio(&fd, true)?;
    // SAFETY: the descriptor is owned, and nothing takes it out or closes it before the returned value is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
