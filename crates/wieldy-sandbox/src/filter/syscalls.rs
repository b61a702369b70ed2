//! Lists the system calls that sandboxed programs may and may not make. `seccomp.rs` makes the filter from these lists.
//!
//! Programs of every kind must run (shells, compilers, language runtimes, databases), so [`ALLOWED`] is what such
//! programs use. Calls in [`REFUSED`] fail with `EPERM`, each for a reason that people can read. Calls that depend on
//! their arguments (`openat`, `socket`, `clone`, …) are in `checked` of `seccomp.rs`. All other calls fail with
//! `ENOSYS`, as if they did not exist: programs were written for kernels without them, and cope.

#![expect(non_upper_case_globals, reason = "numbers are named as the C library's crate names them")]

use libc::*;

/// The name of a system call, with `SYS_` before it, and its number.
pub(crate) type Call = (&'static str, i64);

macro_rules! calls {
    ($($name:ident)*) => { &[$((stringify!($name), $name)),*] };
}

/// Calls that every program may make.
#[rustfmt::skip]
pub(crate) const ALLOWED: &[&[Call]] = &[
    // files
    calls![
        SYS_read SYS_write SYS_close SYS_fstat SYS_newfstatat SYS_statx SYS_lseek SYS_pread64 SYS_pwrite64
        SYS_readv SYS_writev SYS_preadv SYS_pwritev SYS_preadv2 SYS_pwritev2 SYS_faccessat SYS_faccessat2
        SYS_close_range SYS_dup SYS_dup3 SYS_fcntl SYS_flock SYS_fsync SYS_fdatasync
        SYS_sync SYS_syncfs SYS_truncate SYS_ftruncate SYS_fadvise64 SYS_readahead
        SYS_getdents64 SYS_getcwd SYS_chdir SYS_fchdir SYS_renameat2 SYS_mkdirat SYS_linkat SYS_unlinkat
        SYS_symlinkat SYS_readlinkat SYS_fchown SYS_fchownat SYS_umask
        SYS_utimensat SYS_statfs SYS_fstatfs SYS_sendfile SYS_splice SYS_tee SYS_vmsplice SYS_copy_file_range
        SYS_name_to_handle_at SYS_cachestat SYS_setxattr SYS_lsetxattr SYS_fsetxattr SYS_getxattr
        SYS_lgetxattr SYS_fgetxattr SYS_listxattr SYS_llistxattr SYS_flistxattr SYS_removexattr
        SYS_lremovexattr SYS_fremovexattr SYS_setxattrat SYS_getxattrat SYS_listxattrat SYS_removexattrat
        SYS_inotify_init1 SYS_inotify_add_watch SYS_inotify_rm_watch SYS_io_setup SYS_io_destroy
        SYS_io_getevents SYS_io_submit SYS_io_cancel
    ],
    // memory
    calls![
        SYS_mmap SYS_mprotect SYS_munmap SYS_mremap SYS_msync SYS_mincore SYS_madvise SYS_brk SYS_mlock
        SYS_mlock2 SYS_munlock SYS_mlockall SYS_munlockall SYS_pkey_mprotect SYS_pkey_alloc SYS_pkey_free
        SYS_memfd_create SYS_membarrier SYS_mseal SYS_map_shadow_stack SYS_get_mempolicy
    ],
    // processes, threads, identity
    calls![
        SYS_execve SYS_execveat SYS_exit SYS_exit_group SYS_wait4 SYS_waitid SYS_kill SYS_tkill SYS_tgkill
        SYS_pidfd_open SYS_pidfd_send_signal SYS_getpid SYS_getppid SYS_gettid SYS_getpgid SYS_setpgid
        SYS_getsid SYS_setsid SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getgroups SYS_setuid
        SYS_setgid SYS_setreuid SYS_setregid SYS_setresuid SYS_setresgid SYS_getresuid SYS_getresgid
        SYS_setgroups SYS_setfsuid SYS_setfsgid SYS_capget SYS_capset SYS_prctl SYS_seccomp
        SYS_landlock_create_ruleset SYS_landlock_add_rule SYS_landlock_restrict_self SYS_set_tid_address
        SYS_set_robust_list SYS_get_robust_list SYS_rseq SYS_futex SYS_futex_waitv SYS_futex_wake
        SYS_futex_wait SYS_futex_requeue SYS_getrusage SYS_times SYS_getpriority SYS_setpriority
        SYS_ioprio_get SYS_ioprio_set SYS_sched_yield SYS_sched_getparam SYS_sched_setparam
        SYS_sched_getscheduler SYS_sched_setscheduler SYS_sched_getattr SYS_sched_setattr
        SYS_sched_getaffinity SYS_sched_setaffinity SYS_sched_get_priority_max SYS_sched_get_priority_min
        SYS_sched_rr_get_interval SYS_getcpu
    ],
    // signals, time, waiting
    calls![
        SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigpending SYS_rt_sigtimedwait
        SYS_rt_sigqueueinfo SYS_rt_tgsigqueueinfo SYS_rt_sigsuspend SYS_sigaltstack SYS_restart_syscall
        SYS_signalfd4 SYS_eventfd2 SYS_timerfd_create SYS_timerfd_settime SYS_timerfd_gettime SYS_timer_create
        SYS_timer_settime SYS_timer_gettime SYS_timer_getoverrun SYS_timer_delete SYS_getitimer SYS_setitimer
        SYS_nanosleep SYS_clock_nanosleep SYS_clock_gettime SYS_clock_getres SYS_gettimeofday SYS_ppoll
        SYS_pselect6 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2
    ],
    // sockets, pipes, System V and POSIX messages
    calls![
        SYS_pipe2 SYS_connect SYS_accept SYS_accept4 SYS_bind SYS_listen SYS_shutdown SYS_sendto SYS_recvfrom
        SYS_sendmsg SYS_recvmsg SYS_sendmmsg SYS_recvmmsg SYS_getsockname SYS_getpeername SYS_setsockopt
        SYS_getsockopt SYS_shmget SYS_shmat SYS_shmdt SYS_shmctl SYS_semget SYS_semop SYS_semtimedop
        SYS_semctl SYS_msgget SYS_msgsnd SYS_msgrcv SYS_msgctl SYS_mq_open SYS_mq_unlink SYS_mq_timedsend
        SYS_mq_timedreceive SYS_mq_notify SYS_mq_getsetattr
    ],
    // the machine
    calls![
        SYS_uname SYS_sysinfo SYS_getrandom
    ],
    OLDER,
];

/// Calls that newer architectures no longer have; for each there is a newer one above.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const OLDER: &[Call] = calls![
    SYS_stat SYS_lstat SYS_access SYS_dup2 SYS_sync_file_range SYS_getdents SYS_rename
    SYS_renameat SYS_mkdir SYS_rmdir SYS_link SYS_unlink SYS_symlink SYS_readlink SYS_chown SYS_lchown
    SYS_utime SYS_utimes SYS_futimesat SYS_inotify_init SYS_fork SYS_vfork SYS_getpgrp SYS_arch_prctl
    SYS_getrlimit SYS_setrlimit SYS_uretprobe SYS_uprobe SYS_pause SYS_signalfd SYS_eventfd SYS_alarm SYS_time
    SYS_poll SYS_select SYS_epoll_create SYS_epoll_wait SYS_pipe
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[Call] = &[];

/// Calls that no program may make, with the reasons.
#[rustfmt::skip]
pub(crate) const REFUSED: &[(&str, &[Call])] = &[
    ("it gives the kernel work that no filter sees", calls![
        SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register
    ]),
    ("it looks into other processes, or takes from them", calls![
        SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_process_madvise SYS_process_mrelease
        SYS_kcmp SYS_pidfd_getfd SYS_move_pages SYS_migrate_pages
    ]),
    ("it changes or lists mounts, or changes the root folder", calls![
        SYS_mount SYS_umount2 SYS_pivot_root SYS_chroot SYS_open_tree SYS_open_tree_attr SYS_move_mount
        SYS_fsopen SYS_fsconfig SYS_fsmount SYS_fspick SYS_mount_setattr SYS_statmount SYS_listmount
    ]),
    ("it enters other namespaces", calls![
        SYS_setns
    ]),
    ("it opens files past the checks of their folders, or watches a whole file system", calls![
        SYS_open_by_handle_at SYS_fanotify_init SYS_fanotify_mark SYS_lookup_dcookie
    ]),
    ("it runs code in the kernel, or measures it", calls![
        SYS_bpf SYS_perf_event_open SYS_userfaultfd SYS_init_module SYS_finit_module SYS_delete_module
        SYS_kexec_load SYS_kexec_file_load
    ]),
    ("keys are kept outside of namespaces", calls![
        SYS_add_key SYS_request_key SYS_keyctl
    ]),
    ("it hides memory from the kernel, or places it on the machine's nodes", calls![
        SYS_memfd_secret SYS_mbind SYS_set_mempolicy SYS_set_mempolicy_home_node
    ]),
    ("it changes settings of the whole machine, or reads its kernel log", calls![
        SYS_reboot SYS_swapon SYS_swapoff SYS_acct SYS_quotactl SYS_quotactl_fd SYS_settimeofday
        SYS_clock_settime SYS_adjtimex SYS_clock_adjtime SYS_sethostname SYS_setdomainname SYS_syslog
        SYS_vhangup SYS_nfsservctl
    ]),
    #[cfg(target_arch = "x86_64")]
    ("it reaches the hardware, or parts of the processor that programs do not need", calls![SYS_iopl SYS_ioperm SYS_modify_ldt]),
];

/// Numbers that the `libc` crate does not have on every architecture yet; from 424 on, they are the same on all.
const SYS_cachestat: i64 = 451;
const SYS_map_shadow_stack: i64 = 453;
const SYS_futex_wake: i64 = 454;
const SYS_futex_wait: i64 = 455;
const SYS_futex_requeue: i64 = 456;
const SYS_statmount: i64 = 457;
const SYS_listmount: i64 = 458;
const SYS_setxattrat: i64 = 463;
const SYS_getxattrat: i64 = 464;
const SYS_listxattrat: i64 = 465;
const SYS_removexattrat: i64 = 466;
const SYS_open_tree_attr: i64 = 467;
#[cfg(target_arch = "x86_64")]
const SYS_uretprobe: i64 = 335;
#[cfg(target_arch = "x86_64")]
const SYS_uprobe: i64 = 336;
