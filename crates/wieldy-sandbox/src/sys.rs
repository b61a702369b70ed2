//! Every `unsafe` block of the project: small functions with safe signatures, each with the reason it is sound.
//!
//! Whatever is marked *quiet* neither allocates, nor locks, nor panics: it may run between `vfork` and `exec`, in a process
//! that still shares its parent's memory.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use rustix::process::Pid;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Runs before `main` in every program that this crate is part of: a program that was started as a fork server becomes one
/// and never comes to its `main`. So whoever embeds wieldy has its helper at hand, without a second file and without a
/// word in `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn(c_int, *const *const c_char) = before_main;

extern "C" fn before_main(count: c_int, words: *const *const c_char) {
    if count < 1 || words.is_null() {
        return;
    }
    // SAFETY: the C library hands its constructors what it hands to `main`: `count` texts, of which there is one at least.
    let name = unsafe { CStr::from_ptr(*words) };
    let words = || -> Vec<CString> {
        // SAFETY: as above, for each of the `count` texts.
        let word = |number: c_int| unsafe { CStr::from_ptr(*words.add(number as usize)) }.to_owned();
        (1..count).map(word).collect()
    };
    crate::become_helper(name, words);
}

/// A program with all that it is started with, as the kernel takes it.
pub(crate) struct Program {
    /// The paths to try, in this order.
    candidates: Vec<CString>,
    words: List,
    variables: List,
}

/// Texts and the list of pointers to them that the kernel wants, with a zero at its end.
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
    /// Lays everything out; `words` begin with the name that the program is called by.
    pub(crate) fn new(candidates: Vec<CString>, words: Vec<CString>, variables: Vec<CString>) -> Self {
        Self { candidates, words: List::new(words), variables: List::new(variables) }
    }

    /// Becomes the first of the candidates that is a program; returns only the reason why not. Quiet.
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

/// A stack for a child that shares our memory until it becomes another program.
pub(crate) struct Stack(Box<[MaybeUninit<u8>]>);

impl Stack {
    pub(crate) fn new() -> Self {
        const BYTES: usize = 64 * 1024;
        Self(Box::new_uninit_slice(BYTES))
    }
}

/// Makes a process that runs `child` and then ends, or becomes another program in it. It shares our memory, and we stand still
/// meanwhile; so what it writes to `data` we see, and `child` must be quiet.
pub(crate) fn vfork<T>(stack: &mut Stack, data: &mut T, child: fn(&mut T)) -> io::Result<Pid> {
    struct Task<'a, T> {
        data: &'a mut T,
        child: fn(&mut T),
    }
    extern "C" fn enter<T>(task: *mut c_void) -> c_int {
        // SAFETY: `vfork` hands over a pointer to its own `Task`, and stands still as long as this runs.
        let task = unsafe { &mut *task.cast::<Task<'_, T>>() };
        (task.child)(task.data);
        127
    }
    let mut task = Task { data, child };
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    let top = stack.0.as_mut_ptr_range().end;
    // SAFETY: the stack is ours, grows downwards from its (aligned down) end and is used by nobody else; the task lives until
    // the child has let go of our memory, since `CLONE_VFORK` lets us go on only then.
    let pid = unsafe {
        let top = top.byte_sub(top.addr() % 16).cast::<c_void>();
        libc::clone(enter::<T>, top, flags, (&raw mut task).cast())
    };
    Pid::from_raw(checked(pid)?).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Makes a copy of this process, in new namespaces as `flags` say: the child's id in the parent, nothing in the child.
///
/// For processes with one thread only: there the copy is whole, and may do whatever we may.
pub(crate) fn fork(flags: c_int) -> io::Result<Option<Pid>> {
    // SAFETY: without `CLONE_VM` the child gets its own copy of our memory and goes on upon its own copy of this stack.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(Pid::from_raw(pid as i32)),
    }
}

/// Makes a copy of this process as [`fork`] does, which starts in a group of cgroup v2. Fails on kernels before 5.7, and where the
/// group may not be entered.
pub(crate) fn fork_into(flags: c_int, group: BorrowedFd<'_>) -> io::Result<Option<Pid>> {
    /// The libraries for some systems do not have it.
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    let arguments = libc::clone_args {
        flags: u64::from(flags as u32) | CLONE_INTO_CGROUP,
        exit_signal: libc::SIGCHLD as u64,
        cgroup: group.as_raw_fd() as u64,
        // SAFETY: these are plain numbers and addresses, for which zero stands for none.
        ..unsafe { std::mem::zeroed() }
    };
    // SAFETY: as in `fork`; the arguments are read before the call returns, and no address among them is set.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<libc::clone_args>()) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(Pid::from_raw(pid as i32)),
    }
}

/// Enters a mount namespace with all rights there, of which this process must own the user namespace. For processes with one thread only.
pub(crate) fn enter_mounts(namespace: &OwnedFd) -> io::Result<()> {
    /// `_IO(0xb7, 1)`: opens the user namespace that a namespace belongs to.
    const NS_GET_USERNS: libc::c_ulong = 0xb701;
    // SAFETY: takes no argument, and returns a new descriptor or -1.
    let owner = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_USERNS as _) };
    if owner < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it for us.
    let owner = unsafe { OwnedFd::from_raw_fd(owner) };
    move_into_link_name_space(owner.as_fd(), Some(LinkNameSpaceType::User))?;
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))?)
}

/// Ends this process at once, without running anything that was registered for its end. Quiet.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: takes a plain number and does not return.
    unsafe { libc::_exit(code) }
}

/// The descriptor of this number, which nobody else may own.
pub(crate) fn take_descriptor(number: RawFd) -> OwnedFd {
    // SAFETY: called once by a fork server at its start, for a descriptor that its starter made for it.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// Closes all descriptors of this process but `kept`, whose owners live on; those of all others must never be used again.
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

/// Closes a range of descriptors. Quiet.
pub(crate) fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    // SAFETY: takes plain numbers; it is called only in processes just made, before anything owns a descriptor in that range.
    let status = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes `to` another number for `fd`, open across `exec`. Quiet.
pub(crate) fn duplicate_to(fd: RawFd, to: RawFd) -> io::Result<()> {
    if fd == to {
        // SAFETY: takes plain numbers.
        return checked(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) }).map(drop);
    }
    // SAFETY: takes plain numbers; called in a child before `exec`, where nothing owns these numbers.
    checked(unsafe { libc::dup3(fd, to, 0) }).map(drop)
}

/// Sets every signal to what it does by default. Quiet.
pub(crate) fn reset_signal_handlers() {
    /// The kernel's own form of `SIG_DFL` without flags, restorer or mask; no architecture has a longer one.
    const DEFAULT: [u64; 8] = [0; 8];
    for signal in 1..=SIGNAL_MAX {
        // The C library's function would not touch two signals that it keeps to itself, and whoever started us may have
        // had them ignored. Those that cannot be set at all are refused by the kernel, which is right.
        // SAFETY: the kernel reads an action from memory that holds one, and writes nothing.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, &DEFAULT, ptr::null_mut::<u64>(), SIGNAL_SET_BYTES) };
    }
}

const SIGNAL_MAX: c_int = 64;
const SIGNAL_SET_BYTES: usize = size_of::<u64>();

/// Lets every signal through. Quiet.
pub(crate) fn unblock_signals() {
    set_signal_mask(0);
}

/// Keeps every signal that can be kept waiting. Quiet.
pub(crate) fn block_signals() {
    set_signal_mask(u64::MAX);
}

/// Sets which signals this thread does not get now, one bit for each. Quiet.
fn set_signal_mask(mask: u64) {
    let before = ptr::null_mut::<u64>();
    // SAFETY: the kernel reads a set of the size that is given, and writes nothing.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &mask, before, SIGNAL_SET_BYTES) };
}

/// A descriptor that is readable when a child has ended; `SIGCHLD` must be blocked.
pub(crate) fn child_signals() -> io::Result<OwnedFd> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the first call initialises the set, the others read it; it lives through all of them. The descriptor is new.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
        let fd = checked(libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// What a child and those that it waited for have used.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ChildUse {
    pub(crate) cpu_us: u64,
    pub(crate) memory_peak_kib: u64,
    pub(crate) blocks_read: u64,
    pub(crate) blocks_written: u64,
}

/// A child that has ended: which, how, and what it used.
pub(crate) type Reaped = (Pid, i32, ChildUse);

/// Waits for a child to end; nothing if none has and `block` is not set, an error if there is no child.
pub(crate) fn wait(block: bool) -> io::Result<Option<Reaped>> {
    let flags = libc::__WALL | if block { 0 } else { libc::WNOHANG };
    let mut status = 0;
    // SAFETY: all-zero is a value of this plain struct; both places are ours and are filled in.
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

/// How mounts are changed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MountChange<'a> {
    /// Nothing may be written.
    pub(crate) read_only: bool,
    /// Owners are shown as this user namespace maps them.
    pub(crate) owners: Option<BorrowedFd<'a>>,
}

/// Changes a mount, and those below it if `whole`. Programs there never gain privileges, and device files are just files.
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

/// Changes a mount of a device file, which stays one.
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
    // SAFETY: the path is an empty text, the struct is the kernel's own and its true size is given.
    let status = unsafe {
        let (path, bytes) = (c"".as_ptr(), size_of::<libc::mount_attr>());
        libc::syscall(libc::SYS_mount_setattr, mount.as_raw_fd(), path, flags, &raw const change, bytes)
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Restricts this thread, and every process that it starts, by a Landlock ruleset, for good; new privileges must be ruled out already.
/// The `landlock` crate's own function allocates. Quiet.
pub(crate) fn landlock_restrict(ruleset: RawFd) -> io::Result<()> {
    // SAFETY: takes plain numbers.
    let status = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the newest version of Landlock that this kernel has.
pub(crate) fn landlock_version() -> io::Result<u32> {
    const VERSION: u32 = 1;
    // SAFETY: with this flag the kernel reads no memory; it wants a null pointer and a size of 0.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, VERSION) };
    u32::try_from(version).map_err(|_| io::Error::last_os_error())
}

fn checked(status: c_int) -> io::Result<c_int> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(status) }
}

/// Moves this thread, and no other, to a new network with nothing in it.
pub(crate) fn leave_network() -> io::Result<()> {
    // SAFETY: takes a number and touches no memory; the network is the calling thread's own.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes this network namespace's own interface work.
pub(crate) fn raise_loopback() -> io::Result<()> {
    let (family, kind) = (rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM);
    let socket = rustix::net::socket_with(family, kind, rustix::net::SocketFlags::CLOEXEC, None)?;
    // SAFETY: all-zero is a value of this plain struct; the name fits with its ending zero, and the kernel reads the struct
    // of the size that it knows.
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

/// Listens at a port of a guest's virtual socket, whose other end is the machine that the guest runs on.
#[cfg(feature = "firecracker")]
pub(crate) fn listen_to_host(port: u32) -> io::Result<OwnedFd> {
    let socket = virtual_socket(libc::VMADDR_CID_ANY, port, libc::bind)?;
    rustix::net::listen(&socket, 64)?;
    Ok(socket)
}

/// Connects to a port of this machine's own virtual socket, where its kernel has such a thing.
#[cfg(all(test, feature = "firecracker"))]
pub(crate) fn connect_to_self(port: u32) -> io::Result<OwnedFd> {
    virtual_socket(libc::VMADDR_CID_LOCAL, port, libc::connect)
}

#[cfg(feature = "firecracker")]
type Name = unsafe extern "C" fn(c_int, *const libc::sockaddr, libc::socklen_t) -> c_int;

/// A virtual socket that was given an address, its own or the other end's.
#[cfg(feature = "firecracker")]
fn virtual_socket(machine: u32, port: u32, name: Name) -> io::Result<OwnedFd> {
    let (family, kind) = (rustix::net::AddressFamily::VSOCK, rustix::net::SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, rustix::net::SocketFlags::CLOEXEC, None)?;
    // SAFETY: all-zero is a value of this plain struct, and `bind` or `connect` reads it in its true size.
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

/// Lets the runtime wait until a descriptor is ready for one thing, and is woken by nothing else. From now on it never keeps anybody waiting.
pub(crate) fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    rustix::io::ioctl_fionbio(&fd, true)?;
    // SAFETY: the descriptor is owned, and nobody takes it out or closes it before the value that is returned is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
