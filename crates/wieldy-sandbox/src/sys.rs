//! Every `unsafe` block of the project: small functions with safe signatures, each with the reason it is sound.
//!
//! Whatever is marked *quiet* neither allocates, nor locks, nor panics: it may run between `fork` and `exec`, where
//! another thread may have held any lock at the moment of the `fork` and will never give it back. There, descriptors
//! are plain numbers: the process owns every one of them and no Rust value does.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};

use rustix::process::Pid;

use crate::maps;
use crate::report::Used;

/// A program with its arguments and environment, and a plan for the process that becomes it, in memory pages of
/// their own: read-only, and all that a forked process needs of its parent's memory.
pub(crate) struct Pages<T> {
    laid: NonNull<Laid<T>>,
    bytes: usize,
}

/// What lies in the pages.
#[repr(C)]
pub(crate) struct Laid<T> {
    /// What the process should do.
    pub(crate) plan: T,
    program: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
}

impl<T: Copy> Pages<T> {
    /// Lays everything out; `arguments` begin with the name that the program is called by.
    pub(crate) fn new(plan: T, program: &CStr, arguments: &[CString], environment: &[CString]) -> io::Result<Self> {
        let pointers = arguments.len() + environment.len() + 2;
        let texts = || arguments.iter().chain(environment).map(CString::as_c_str).chain([program]);
        let texts_at = size_of::<Laid<T>>() + pointers * size_of::<*const c_char>();
        let bytes = texts_at + texts().map(|text| text.to_bytes_with_nul().len()).sum::<usize>();
        let start = map_pages(bytes)?;
        // SAFETY: the mapping is fresh, page-aligned, zeroed and `bytes` long, which was added up from exactly the
        // parts written here; `Laid` ends at a multiple of a pointer's alignment. A zero ends each list of pointers.
        let laid = unsafe {
            let laid = start.cast::<Laid<T>>();
            let list = start.add(size_of::<Laid<T>>()).cast::<*const c_char>();
            let mut text_at = start.add(texts_at);
            for (index, text) in texts().enumerate() {
                let text = text.to_bytes_with_nul();
                ptr::copy_nonoverlapping(text.as_ptr(), text_at.as_ptr(), text.len());
                let after_arguments = usize::from(index >= arguments.len());
                if index < arguments.len() + environment.len() {
                    list.add(index + after_arguments).write(text_at.as_ptr().cast());
                } else {
                    (&raw mut (*laid.as_ptr()).program).write(text_at.as_ptr().cast());
                }
                text_at = text_at.add(text.len());
            }
            (&raw mut (*laid.as_ptr()).plan).write(plan);
            (&raw mut (*laid.as_ptr()).arguments).write(list.as_ptr().cast());
            (&raw mut (*laid.as_ptr()).environment).write(list.add(arguments.len() + 1).as_ptr().cast());
            laid
        };
        let pages = Self { laid, bytes };
        // Sealed, the pages cannot be merged with a neighbour, so a forked process keeps them when it lets go of the rest.
        // SAFETY: the range is ours alone, and from here on it is only read.
        let status = unsafe { libc::mprotect(start.as_ptr().cast(), bytes, libc::PROT_READ) };
        if status == 0 { Ok(pages) } else { Err(io::Error::last_os_error()) }
    }
}

impl<T> Drop for Pages<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, of this length, and nothing borrows from it any more.
        unsafe { libc::munmap(self.laid.as_ptr().cast(), self.bytes) };
    }
}

impl<T> Laid<T> {
    /// Becomes the program; returns only the reason why not. Quiet.
    pub(crate) fn execute(&self) -> io::Error {
        // SAFETY: `Pages::new` made these point at a text and at two lists of texts, each with its ending zero,
        // in pages that live at least as long as `self`.
        unsafe { libc::execve(self.program, self.arguments, self.environment) };
        io::Error::last_os_error()
    }
}

fn map_pages(bytes: usize) -> io::Result<NonNull<u8>> {
    let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at a place of the kernel's choice touches no memory of ours.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes, rights, kind, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Makes a process that runs `child` with all signals blocked and with hardly any memory but `pages`.
pub(crate) fn fork_apart<T: Copy>(pages: Pages<T>, child: fn(&Laid<T>) -> !) -> io::Result<Pid> {
    // A handler of ours must not run in the child: it might speak to our own threads through a shared pipe.
    let mask = set_signal_mask(u64::MAX);
    let forked = fork();
    if let Ok(None) = forked {
        let _guard = NeverReturn;
        let_go_of_memory();
        // SAFETY: the pages are mapped, hold a `Laid<T>`, and live until this process ends or becomes another program.
        child(unsafe { pages.laid.as_ref() })
    }
    set_signal_mask(mask);
    forked.map(|pid| pid.expect("only the child gets no id, and it never comes here"))
}

/// Makes a process that runs `child`, which is given the same as we have. Quiet.
pub(crate) fn fork_into<T>(data: &T, child: fn(&T) -> !) -> io::Result<Pid> {
    match fork()? {
        Some(pid) => Ok(pid),
        None => {
            let _guard = NeverReturn;
            child(data)
        }
    }
}

/// Ends the process should the child's function panic: the stack above it belongs to the parent.
struct NeverReturn;

impl Drop for NeverReturn {
    fn drop(&mut self) {
        exit_now(134);
    }
}

/// Makes a copy of this process: the child's id in the parent, nothing in the child. Quiet.
///
/// The system call itself and not the C library's function, which takes locks and runs other people's handlers, and
/// would look for both in memory that a supervisor has let go of.
fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: without `CLONE_VM` the child gets its own copy of our memory and goes on upon its own copy of this
    // stack; the callers see to it that it never returns from there.
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(Pid::from_raw(pid as i32)),
    }
}

/// Lets go of the memory that this process has from its parent, except around the stack and thread-local storage. Quiet.
///
/// There are three reasons. A process's peak of memory begins with what it had when it was forked, so without this every
/// command would seem to use as much as we do. What we have in memory need not lie about in a second process. And
/// pages that are shared no longer need not be copied when we write to them.
fn let_go_of_memory() {
    const WINDOW_BYTES: usize = 256 * 1024;
    let around = |address: usize| {
        let page = address & !0xffff; // 64 KiB are whole pages everywhere
        page.saturating_sub(WINDOW_BYTES)..page.saturating_add(WINDOW_BYTES)
    };
    let on_stack = 0_u8;
    // SAFETY: the function only returns the address of this thread's `errno`.
    let thread_local = unsafe { libc::__errno_location() };
    let kept = [around((&raw const on_stack).addr()), around(thread_local.addr())];
    let Ok(maps) = open_to_read(c"/proc/self/maps") else { return };
    for_each_line(maps, |line| {
        if let Some(range) = maps::private_memory(line) {
            maps::outside(range, kept.clone(), discard);
        }
    });
    close(maps);
}

/// Gives the pages back to the kernel; where they are read again, they are zero. Quiet.
fn discard(range: Range<usize>) {
    // SAFETY: called only by `let_go_of_memory` in a process just forked, on private memory outside the stack and the
    // thread-local storage. All that the process does from here on is the `child` function of `fork_apart`, which is
    // given nothing but pages that are not writable and so not among these, and calls nothing but quiet functions.
    unsafe { libc::madvise(ptr::without_provenance_mut(range.start), range.len(), libc::MADV_DONTNEED) };
}

/// Calls `visit` with each line; lines too long for the buffer are left out. Quiet.
fn for_each_line(file: RawFd, mut visit: impl FnMut(&[u8])) {
    let mut buffer = [0; 8192];
    let mut filled = 0;
    let mut too_long = false;
    while let Some(room) = buffer.get_mut(filled..)
        && let Ok(count @ 1..) = read(file, room)
    {
        filled += count;
        let mut line_at = 0;
        while let Some(rest) = buffer.get(line_at..filled)
            && let Some(length) = rest.iter().position(|byte| *byte == b'\n')
        {
            if !std::mem::take(&mut too_long) {
                visit(rest.get(..length).unwrap_or_default());
            }
            line_at += length + 1;
        }
        buffer.copy_within(line_at.min(filled)..filled, 0);
        filled -= line_at.min(filled);
        if filled == buffer.len() {
            too_long = true;
            filled = 0;
        }
    }
}

/// Ends this process at once, without running anything that was registered for its end. Quiet.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: takes a plain number and does not return.
    unsafe { libc::_exit(code) }
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

/// Lets every signal through. Quiet.
pub(crate) fn unblock_signals() {
    set_signal_mask(0);
}

/// A descriptor that is readable when a child has ended; `SIGCHLD` must be blocked. Quiet.
pub(crate) fn child_signals() -> io::Result<RawFd> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the first call initialises the set, the others read it; it lives through all of them.
    let fd = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
        libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    checked(fd)
}

const SIGNAL_MAX: c_int = 64;
const SIGNAL_SET_BYTES: usize = size_of::<u64>();

/// Sets which signals this thread does not get now, one bit for each, and returns which it did not get before. Quiet.
fn set_signal_mask(mask: u64) -> u64 {
    let mut before = 0_u64;
    // SAFETY: the kernel reads the one set and writes the other, both of the size that is given.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &mask, &mut before, SIGNAL_SET_BYTES) };
    before
}

/// What the children that have been waited for used, and those that they waited for. Quiet.
pub(crate) fn used_by_children() -> Used {
    // SAFETY: all-zero is a value of this plain struct, which the call fills in; it can fail only for a bad pointer.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let microseconds = |time: libc::timeval| time.tv_sec.saturating_mul(1_000_000).saturating_add(time.tv_usec);
    Used {
        cpu_us: microseconds(usage.ru_utime).saturating_add(microseconds(usage.ru_stime)),
        memory_peak_kib: usage.ru_maxrss,
        blocks_read: usage.ru_inblock,
        blocks_written: usage.ru_oublock,
    }
}

/// Milliseconds on a clock that never goes back. Quiet.
pub(crate) fn now_ms() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the struct is ours and is filled in; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    (time.tv_sec as u64).saturating_mul(1000).saturating_add(time.tv_nsec as u64 / 1_000_000)
}

/// Waits until one of two descriptors has something to read or was hung up on: which ones. A negative descriptor is
/// left out; without `timeout_ms` this waits for ever. Quiet.
pub(crate) fn poll(fds: [RawFd; 2], timeout_ms: Option<u64>) -> io::Result<[bool; 2]> {
    let mut polled = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    let timeout = timeout_ms.map_or(-1, |ms| c_int::try_from(ms).unwrap_or(c_int::MAX));
    // SAFETY: the array is ours, and its true length is given.
    checked(unsafe { libc::poll(polled.as_mut_ptr(), 2, timeout) })?;
    Ok(polled.map(|polled| polled.revents != 0))
}

/// Opens a file to read. Quiet.
pub(crate) fn open_to_read(path: &CStr) -> io::Result<RawFd> {
    // SAFETY: the path ends with a zero byte.
    checked(unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) })
}

/// Opens a file to write. Quiet.
pub(crate) fn open_to_write(path: &CStr) -> io::Result<RawFd> {
    // SAFETY: the path ends with a zero byte.
    checked(unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) })
}

/// Reads what fits. Quiet.
pub(crate) fn read(fd: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the buffer is writable and its true length is given.
    let count = unsafe { libc::read(fd, buffer.as_mut_ptr().cast::<c_void>(), buffer.len()) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Writes what can be written. Quiet.
pub(crate) fn write(fd: RawFd, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the bytes are readable and their true length is given.
    let count = unsafe { libc::write(fd, bytes.as_ptr().cast::<c_void>(), bytes.len()) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Goes back to the start of a file. Quiet.
pub(crate) fn rewind(fd: RawFd) -> io::Result<()> {
    // SAFETY: takes plain numbers.
    let at = unsafe { libc::lseek(fd, 0, libc::SEEK_SET) };
    if at == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Closes a descriptor. Quiet.
pub(crate) fn close(fd: RawFd) {
    // SAFETY: takes a plain number; after a `fork` no Rust value owns a descriptor.
    unsafe { libc::close(fd) };
}

/// Closes every descriptor from `first` on. Quiet.
pub(crate) fn close_from(first: RawFd) -> io::Result<()> {
    // SAFETY: takes plain numbers; after a `fork` no Rust value owns a descriptor.
    let status = unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes a second number for a descriptor, at least `least`, closed on `exec`. Quiet.
pub(crate) fn duplicate_above(fd: RawFd, least: RawFd) -> io::Result<RawFd> {
    // SAFETY: takes plain numbers.
    checked(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, least) })
}

/// Makes `to` another number for `fd`; two numbers that are not the same. Quiet.
pub(crate) fn duplicate_to(fd: RawFd, to: RawFd, close_on_exec: bool) -> io::Result<RawFd> {
    let flags = if close_on_exec { libc::O_CLOEXEC } else { 0 };
    // SAFETY: takes plain numbers.
    checked(unsafe { libc::dup3(fd, to, flags) })
}

/// Goes into a folder. Quiet.
pub(crate) fn change_folder(folder: RawFd) -> io::Result<()> {
    // SAFETY: takes a plain number.
    checked(unsafe { libc::fchdir(folder) }).map(drop)
}

fn checked(status: c_int) -> io::Result<c_int> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(status) }
}
