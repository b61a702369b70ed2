//! Tests of the sandbox in virtual machines with an older kernel and another setup than this machine, for `cargo xtask
//! vm`.
//!
//! Each [`Boot`] runs Debian's kernel without a network and without hardware virtualization, so that it works wherever
//! qemu does. Most boots have a disk with the part of this machine's system that the tests need (`vm/system.rs`); the
//! boot of the virtual machine agent has a disk of its own (`vm/guest.rs`). A machine prints the result of the tests
//! and the answers of `wieldy` on its console. All files are below `target/vm`, including the last console of each
//! boot.

mod guest;
mod modules;
mod system;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A configuration of the machine, and the tests to run in it.
struct Boot {
    name: &'static str,
    /// Additional parameters of the kernel command line.
    kernel: &'static str,
    /// Shell commands that set the machine up.
    setup: &'static str,
    /// Names of tests, or parts of names: every test that contains one of them runs.
    tests: &'static [&'static str],
    /// Shell commands, and the texts that the output of each must contain word for word.
    says: &'static [(&'static str, &'static [&'static str])],
    /// True if it has the disks of a guest, and the tests are the unit tests.
    is_guest: bool,
}

const DOCTOR: &str = "wieldy doctor --json";
/// The doctor's line about a kernel where the native level works, and the one with the Landlock version of Debian 12's
/// kernel.
const NATIVE: &str = r#"{"name":"native","state":"works","#;
const LANDLOCK: &str = r#"{"name":"Landlock","state":"works","told":"version 2; before 6 (Linux 6.12) signals and"#;
/// The doctor's entries for limits that the kernel enforces if it has control groups.
const CPU_BY_KERNEL: &str = r#"{"limit":"cpu_millicores","by":"kernel"}"#;
const MEMORY_BY_KERNEL: &str = r#"{"limit":"memory_bytes","by":"kernel"}"#;
const PROCESSES_BY_KERNEL: &str = r#"{"limit":"processes","by":"kernel"}"#;

/// Calls that leave a file behind if they run, by root and by another user, and the message if the call did not run.
const CALL: &str = "wieldy call Bash command='touch ran'; ls ran";
const CALL_AS_USER: &str = "as_user wieldy call Bash command='touch ran'; ls ran";
const NOTHING_RAN: &str = "cannot access 'ran': No such file";
const WITHOUT_LANDLOCK: &str =
    "error[E3101]: cannot make a sandbox: Landlock: this kernel's Landlock is switched off; add `landlock` to `lsm=`";

const BOOTS: &[Boot] = &[
    Boot {
        name: "cgroup-v2",
        kernel: "",
        setup: "mount -t cgroup2 cgroup2 /sys/fs/cgroup",
        tests: &[
            "cgroup::",
            "starting::native::",
            "measuring::native::",
            "escape::calls::",
            "escape::limits::a_memory_bomb",
            "escape::limits::a_fork_bomb",
            "escape::limits::the_peaks_of_a_call",
            "escape::privileges::",
            "escape::processes::",
            "escape::reading::",
            "escape::syscalls::",
            "escape::writing::",
        ],
        says: &[(
            DOCTOR,
            &[NATIVE, LANDLOCK, r#""cgroups":"v2""#, CPU_BY_KERNEL, MEMORY_BY_KERNEL, PROCESSES_BY_KERNEL],
        )],
        is_guest: false,
    },
    Boot {
        name: "cgroup-v1",
        kernel: "",
        setup: "mount -t tmpfs tmpfs /sys/fs/cgroup
for names in cpu,cpuacct memory pids blkio freezer; do
    mkdir /sys/fs/cgroup/$names && mount -t cgroup -o $names cgroup /sys/fs/cgroup/$names
done",
        tests: &[
            "cgroup::",
            "measuring::native::",
            "sessions::the_peaks_of_a_call",
            "escape::limits::a_memory_bomb",
            "escape::limits::a_fork_bomb",
        ],
        says: &[(
            DOCTOR,
            &[NATIVE, LANDLOCK, r#""cgroups":"v1""#, CPU_BY_KERNEL, MEMORY_BY_KERNEL, PROCESSES_BY_KERNEL],
        )],
        is_guest: false,
    },
    Boot {
        name: "no-cgroup",
        kernel: "",
        setup: "",
        tests: &[
            "starting::native::",
            "measuring::native::",
            "escape::limits::a_memory_bomb",
            "escape::limits::a_fork_bomb",
            "escape::limits_in_memory::",
        ],
        says: &[(
            DOCTOR,
            &[
                NATIVE,
                LANDLOCK,
                r#""cgroups":"none""#,
                r#"{"limit":"cpu_millicores","by":"nobody"}"#,
                r#"{"limit":"memory_bytes","by":"watcher"}"#,
                r#"{"limit":"processes","by":"kernel_per_sandbox"}"#,
            ],
        )],
        is_guest: false,
    },
    Boot {
        name: "refusing",
        kernel: "lsm=lockdown,yama",
        setup: "",
        tests: &["escape::refusing::"],
        says: &[
            (
                DOCTOR,
                &[
                    r#"{"name":"native","state":"fails","told":"cannot make a sandbox: Landlock: this kernel's Landlock is switched off"#,
                    r#"{"name":"Landlock","state":"fails","told":"this kernel's Landlock is switched off","hint":"add `landlock`"#,
                ],
            ),
            (CALL, &[WITHOUT_LANDLOCK, NOTHING_RAN]),
            (CALL_AS_USER, &[WITHOUT_LANDLOCK, NOTHING_RAN]),
            ("sysctl -w kernel.unprivileged_userns_clone=0", &["= 0"]),
            (
                CALL_AS_USER,
                &[
                    "error[E3101]: cannot make a sandbox: making namespaces: Operation not permitted (os error 1), \
                     as `kernel.unprivileged_userns_clone` is 0; as root: `sysctl -w kernel.unprivileged_userns_clone=1`",
                    NOTHING_RAN,
                ],
            ),
            ("sysctl -w user.max_user_namespaces=0", &["= 0"]),
            (
                CALL,
                &[
                    "error[E3101]: cannot make a sandbox: making namespaces: No space left on device (os error 28), \
                     as `user.max_user_namespaces` is 0; as root: `sysctl -w user.max_user_namespaces=65536`",
                    NOTHING_RAN,
                ],
            ),
            (
                DOCTOR,
                &[
                    r#"{"name":"user namespaces","state":"fails","told":"cannot be made, as `user.max_user_namespaces` is 0"#,
                ],
            ),
        ],
        is_guest: false,
    },
    Boot {
        name: "guest",
        kernel: "",
        setup: guest::SETUP,
        tests: &["firecracker::agent::tests::as_the_first_process_of_a_machine"],
        says: &[],
        is_guest: true,
    },
];

/// Tests that are too slow in these machines, or that need a missing feature. They run on this machine instead.
const NOT_THERE: &[&str] = &[
    "::runc::",
    "::gvisor::",
    "::none::",
    "::firecracker::",
    "as_user::",
    "ending::native::everything_printed_before_the_end_arrives",
    "ending::native::fifty_children_are_ended",
    "escape::ending::when_the_executor_is_killed_nothing_of_twenty_sandboxes_is_left",
    "escape::leaving::ten_thousand_calls_leave_nothing",
    "escape::limits::a_flood_of_output_passes_and_the_neighbour_works",
    "escape::protected::a_link_that_comes_and_goes_never_moves_a_mount",
    "measuring::native::a_flood_of_output_passes_through_without_piling_up",
    "measuring::native::processor_time_of_the_whole_tree_is_measured",
    "measuring::native::the_peak_of_memory_is_that_of_the_largest_process",
];

/// The longest time for a boot, which takes one or two minutes on a quiet machine.
const BOOT_PATIENCE: Duration = Duration::from_secs(900);

/// The machine's last line, followed by the exit code of the tests.
const RESULT: &str = "wieldy-vm: the tests ended with ";

/// The line before the answer to a command, followed by the command's number.
const ANSWER: &str = "wieldy-vm: answer ";

/// The Debian package that depends on the newest kernel for virtual machines.
const KERNEL: &str = "linux-image-cloud-amd64";

/// Does the same as a stage of the tests: without a Debian to take a kernel from, it prints a warning and succeeds.
pub(crate) fn run_as_stage(root: &Path) -> Result<()> {
    let debian = Command::new("apt-get").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !debian.is_ok_and(|status| status.success()) {
        eprintln!("WARNING: skipped, as there is no apt-get to take qemu and a kernel from:");
        eprintln!(
            "WARNING: the native level is tested only on this machine's kernel and control groups, and no agent as the first process of a machine"
        );
        return Ok(());
    }
    run(root, &[])
}

/// Boots the machines of these names in turn, or all if there is none, and fails if tests failed in one.
pub(crate) fn run(root: &Path, names: &[String]) -> Result<()> {
    if let Some(unknown) = names.iter().find(|name| BOOTS.iter().all(|boot| boot.name != **name)) {
        let known: Vec<&str> = BOOTS.iter().map(|boot| boot.name).collect();
        bail!("there is no machine `{unknown}`; there are {}", known.join(", "));
    }
    let folder = root.join("target/vm");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make `{}`", folder.display()))?;
    require_qemu()?;
    let kernel = kernel(&folder)?;
    let busybox = unpacked(&folder, "busybox-static", "bin/busybox")?;
    let tests =
        ["test", "--package", "wieldy-sandbox", "--features", "firecracker", "--lib", "--test", "it", "--no-run"];
    let built = build(root, &tests)?;
    let (unit_tests, tests) = (program(&built, "lib")?, program(&built, "test")?);
    let command = program(&build(root, &["build", "--package", "wieldy-cli", "--bin", "wieldy"])?, "bin")?;
    let system = system::disk(&folder, &busybox, &tests, &command)?;
    for boot in BOOTS.iter().filter(|boot| names.is_empty() || names.iter().any(|name| name == boot.name)) {
        let began = Instant::now();
        let (memory, console) = (folder.join(format!("{}.cpio", boot.name)), folder.join(format!("{}.log", boot.name)));
        let mut files = initial_files(boot, &busybox)?;
        let disks = match boot.is_guest {
            true => {
                add_program(&mut files, "it", &unit_tests)?;
                modules::add(&mut files, &folder, &guest::MODULES)?;
                guest::disks(&folder, &busybox, &unit_tests)?.to_vec()
            }
            false => {
                modules::add(&mut files, &folder, &system::MODULES)?;
                vec![system.clone()]
            }
        };
        fs::write(&memory, files.end()).context("cannot write the machine's files")?;
        start(boot, &kernel, &memory, &disks, &console)?;
        let said = String::from_utf8_lossy(&fs::read(&console).context("cannot read the console")?).into_owned();
        if let Err(error) = judge(boot.says, &said) {
            eprintln!("{said}");
            bail!("{}: {error:#} (see `{}`)", boot.name, console.display());
        }
        let summary = said.lines().rfind(|line| line.starts_with("test result:")).unwrap_or_default();
        eprintln!("   {}: {} ({:.1} s)", boot.name, summary.trim(), began.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Checks that the tests ran to their end and passed, that there were some, and that commands printed the required
/// texts.
fn judge(says: &[(&str, &[&str])], console: &str) -> Result<()> {
    let result = console.lines().find_map(|line| line.trim().strip_prefix(RESULT));
    match result.context("the machine ended before its tests did")? {
        "0" if console.contains("running 0 tests") => bail!("no test has such a name"),
        "0" => {}
        code => bail!("the tests ended with exit code {code}"),
    }
    for (number, (command, wanted)) in says.iter().enumerate() {
        let answer = console.split_once(&format!("{ANSWER}{number}")).map_or("", |(_, rest)| rest);
        let answer = answer.split_once("wieldy-vm: ").map_or(answer, |(answer, _)| answer);
        if let Some(missing) = wanted.iter().find(|wanted| !answer.contains(**wanted)) {
            bail!("`{command}` does not say `{missing}`");
        }
    }
    Ok(())
}

/// Runs a machine to its end, with its console in a file.
fn start(boot: &Boot, kernel: &Path, memory: &Path, disks: &[PathBuf], console: &Path) -> Result<()> {
    let file = File::create(console).context("cannot write the console")?;
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "2048"]);
    command.args(["-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-serial", "stdio", "-net", "none"]);
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(memory);
    // The kernel prints only panics, because tests make it run out of memory.
    command.args(["-append", &format!("console=ttyS0 quiet loglevel=1 panic=-1 cgroup_no_v1=none {}", boot.kernel)]);
    for disk in disks {
        // Writes to a disk are discarded with the machine.
        command.arg("-drive").arg(format!("file={},format=raw,if=virtio,snapshot=on", disk.display()));
    }
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let mut machine = Killed(command.spawn().context("cannot start qemu-system-x86_64")?);
    let deadline = Instant::now() + BOOT_PATIENCE;
    while machine.0.try_wait()?.is_none() {
        if Instant::now() > deadline {
            bail!("the machine was ended after {} s (see `{}`)", BOOT_PATIENCE.as_secs(), console.display());
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// A machine that is killed on drop.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the initial file system in memory, in the kernel's format.
fn initial_files(boot: &Boot, busybox: &Path) -> Result<Archive> {
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "proc", "sys", "tmp", "etc", "srv/project"] {
        archive.folder(folder);
    }
    // The name of the guest's one test contains `::firecracker::`, too.
    let not_there = if boot.is_guest { &[] } else { NOT_THERE };
    let skipped: String = not_there.iter().map(|name| format!(" --skip {name}")).collect();
    let asked: String =
        (0..).zip(boot.says).map(|(number, (command, _))| format!("echo {ANSWER}{number}\n{command} 2>&1\n")).collect();
    let tests = format!(
        "#!/bin/sh
export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin HOME=/root RUST_BACKTRACE=0 NO_COLOR=1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts && mount -t devpts devpts /dev/pts
busybox ip link set lo up
as_user() {{ setpriv --reuid=65534 --regid=65534 --clear-groups env HOME=/srv/project \"$@\"; }}
cd /srv/project
{}
/it {}{skipped} --test-threads 1
code=$?
{asked}
echo \"{RESULT}$code\"
busybox poweroff -f
",
        boot.setup,
        boot.tests.join(" "),
    );
    let init = if boot.is_guest { guest::INIT } else { system::INIT };
    archive.file("init", init.as_bytes());
    archive.file("tests", tests.as_bytes());
    archive.file("bin/busybox", &fs::read(busybox).context("cannot read busybox")?);
    Ok(archive)
}

/// Adds a program to the initial file system, with the libraries that it needs.
fn add_program(archive: &mut Archive, name: &str, program: &Path) -> Result<()> {
    archive.file(name, &fs::read(program).context("cannot read the tests")?);
    for library in libraries(program)? {
        let bytes = fs::read(&library).with_context(|| format!("cannot read `{library}`"))?;
        archive.file(library.trim_start_matches('/'), &bytes);
    }
    Ok(())
}

/// Returns the shared libraries that a program needs, and their loader.
fn libraries(program: &Path) -> Result<Vec<String>> {
    let output = Command::new("ldd").arg(program).output().context("cannot start ldd")?;
    let text = String::from_utf8(output.stdout).context("ldd printed something other than text")?;
    let paths = text.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(paths.map(str::to_owned).collect())
}

/// A cpio archive in the format that the kernel unpacks ("newc").
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    folders: Vec<String>,
}

impl Archive {
    fn folder(&mut self, name: &str) {
        if !name.is_empty() && !self.folders.iter().any(|known| known == name) {
            self.folder(name.rsplit_once('/').map_or("", |(above, _)| above));
            self.folders.push(name.to_owned());
            self.entry(name, 0o040_755, &[]);
        }
    }

    fn file(&mut self, name: &str, content: &[u8]) {
        self.folder(name.rsplit_once('/').map_or("", |(above, _)| above));
        self.entry(name, 0o100_755, content);
    }

    fn end(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let (size, name_size) = (content.len() as u32, name.len() as u32 + 1);
        // The fields: number, mode, owner, group, links, time, size, device and its kind twice, length of the name,
        // sum.
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend(b"070701");
        fields.iter().for_each(|field| self.bytes.extend(format!("{field:08x}").bytes()));
        self.bytes.extend(name.bytes().chain([0]));
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    /// Pads with zeros: every part begins at a multiple of four bytes.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// Runs cargo and returns its messages.
fn build(root: &Path, arguments: &[&str]) -> Result<Vec<Value>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(arguments).args(["--locked", "--message-format", "json-render-diagnostics"]);
    let output = command.current_dir(root).stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("`cargo {}` failed", arguments.join(" "));
    }
    let messages = output.stdout.split(|byte| *byte == b'\n');
    Ok(messages.filter_map(|line| serde_json::from_slice(line).ok()).collect())
}

/// Returns the last built program of this kind (`lib`, `test`, `bin`).
fn program(built: &[Value], kind: &str) -> Result<PathBuf> {
    let mut programs = built.iter().filter_map(|message| {
        message.get("target")?.get("kind")?.as_array()?.iter().find(|it| *it == kind)?;
        Some(PathBuf::from(message.get("executable")?.as_str()?))
    });
    programs.next_back().with_context(|| format!("cargo does not say where it built the `{kind}`"))
}

/// Installs qemu if it is missing.
fn require_qemu() -> Result<()> {
    let there = || {
        let asked = Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status();
        asked.is_ok_and(|status| status.success())
    };
    if there() {
        return Ok(());
    }
    eprintln!("qemu-system-x86_64 is missing; installing it");
    let options = ["-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", "qemu-system-x86"];
    let installed = Command::new("apt-get").args(options).stdout(Stdio::null()).status();
    if !installed.is_ok_and(|status| status.success()) || !there() {
        bail!("qemu-system-x86_64 is missing; install it with `apt-get install qemu-system-x86`");
    }
    Ok(())
}

/// Returns the kernel that the machines boot.
fn kernel(folder: &Path) -> Result<PathBuf> {
    let known = folder.join("kernel");
    if known.exists() {
        return Ok(known);
    }
    let output = Command::new("apt-cache").args(["depends", KERNEL]).output().context("cannot start apt-cache")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let package = text.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image"));
    let package = package.with_context(|| format!("Debian's package `{KERNEL}` is not known; try `apt-get update`"))?;
    let version = package.trim_start_matches('-');
    let image = unpacked(folder, &format!("linux-image-{version}"), &format!("boot/vmlinuz-{version}"))?;
    fs::rename(&image, &known).context("cannot keep the kernel")?;
    Ok(known)
}

/// Returns a file of a Debian package, which is downloaded and unpacked below our folder but not installed.
fn unpacked(folder: &Path, package: &str, file: &str) -> Result<PathBuf> {
    let place = folder.join(package);
    let path = place.join(file);
    if path.exists() {
        return Ok(path);
    }
    eprintln!("downloading Debian's package {package}");
    let _ = fs::remove_dir_all(&place);
    fs::create_dir_all(&place)?;
    // The downloader runs as a separate user, who may have no access to this folder. Then it prints a warning and
    // continues.
    let download = Command::new("apt-get").args(["-q", "download", package]).current_dir(&place).output();
    let download = download.context("cannot start apt-get: this needs Debian or a system like it")?;
    if !download.status.success() {
        bail!("cannot download `{package}`: {}", String::from_utf8_lossy(&download.stderr).trim());
    }
    let archive = fs::read_dir(&place)?.flatten().map(|entry| entry.path());
    let archive = archive.into_iter().find(|path| path.extension().is_some_and(|it| it == "deb"));
    let archive = archive.with_context(|| format!("apt-get downloaded no package `{package}`"))?;
    let unpacked = Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&place).status();
    fs::remove_file(&archive)?;
    if !unpacked.is_ok_and(|status| status.success()) || !path.exists() {
        bail!("the package `{package}` has no `{file}`");
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_does_not_say_that_all_is_well_has_failed() {
        let why = |console: &str| judge(&[], console).err().map(|error| error.to_string());
        assert_eq!(why("running 3 tests\nwieldy-vm: the tests ended with 0\r\n"), None);
        assert_eq!(why("wieldy-vm: the tests ended with 101\n").unwrap(), "the tests ended with exit code 101");
        assert_eq!(why("Kernel panic").unwrap(), "the machine ended before its tests did");
        let none = "running 0 tests\nwieldy-vm: the tests ended with 0\n";
        assert_eq!(why(none).unwrap(), "no test has such a name");
    }

    #[test]
    fn each_command_must_say_all_that_it_has_to_itself() {
        let says: &[(&str, &[&str])] = &[("first", &["one", "two"]), ("second", &["three"])];
        let why = |first: &str, second: &str| {
            let console = format!("{ANSWER}0\n{first}\n{ANSWER}1\n{second}\n{RESULT}0\n");
            judge(says, &console).err().map(|error| error.to_string())
        };
        assert_eq!(why("one and two", "three"), None);
        assert_eq!(why("one", "two and three").unwrap(), "`first` does not say `two`");
        assert_eq!(why("one, two, three", "").unwrap(), "`second` does not say `three`");
        assert_eq!(judge(says, &format!("{RESULT}0\n")).unwrap_err().to_string(), "`first` does not say `one`");
    }

    #[test]
    fn an_archive_has_folders_before_what_is_in_them() {
        let mut archive = Archive::default();
        archive.file("a/b/c", b"hi");
        let bytes = archive.end();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8(bytes).unwrap();
        let names = text.split("070701").skip(1).map(|entry| entry[104..].split('\0').next().unwrap());
        assert_eq!(names.collect::<Vec<_>>(), ["a", "a/b", "a/b/c", "TRAILER!!!"]);
    }
}
