//! `cargo xtask vm`: tests of the sandbox in virtual machines whose kernel is set up otherwise than this machine's.
//!
//! Each [`Boot`] is a Debian kernel with nothing but busybox and the test binary in its memory: no disk, no network, and no
//! help from the processor, so that it runs wherever qemu does. It says on its console how the tests went. Everything is
//! kept below `target/vm`, the last console of each boot too.

mod guest;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A way to set the machine up, and the tests that run in it.
struct Boot {
    name: &'static str,
    /// Shell commands that mount what this is about.
    mounts: &'static str,
    /// Names of tests, or the beginnings of such: every test that contains one of them runs.
    tests: &'static [&'static str],
    /// Whether it has the disks of a guest, and the tests are those beside the code.
    is_guest: bool,
}

const BOOTS: &[Boot] = &[
    Boot {
        name: "cgroup-v2",
        mounts: "mount -t cgroup2 cgroup2 /sys/fs/cgroup",
        tests: &["cgroup::"],
        is_guest: false,
    },
    Boot {
        name: "cgroup-v1",
        mounts: "mount -t tmpfs tmpfs /sys/fs/cgroup
for names in cpu,cpuacct memory pids blkio freezer; do
    mkdir /sys/fs/cgroup/$names && mount -t cgroup -o $names cgroup /sys/fs/cgroup/$names
done",
        tests: &["cgroup::"],
        is_guest: false,
    },
    Boot {
        name: "guest",
        mounts: guest::MOUNTS,
        tests: &["firecracker::agent::tests::as_the_first_process_of_a_machine"],
        is_guest: true,
    },
];

/// A boot takes well under a minute on a quiet machine.
const BOOT_PATIENCE: Duration = Duration::from_secs(300);

/// What the machine says last, with the exit code of the tests behind it.
const RESULT: &str = "wieldy-vm: the tests ended with ";

/// The Debian package that depends on the newest kernel for virtual machines.
const KERNEL: &str = "linux-image-cloud-amd64";

/// Does the same as a stage of the tests: where there is no Debian to take a kernel from, it says so and goes on.
pub(crate) fn run_as_stage(root: &Path) -> Result<()> {
    let debian = Command::new("apt-get").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !debian.is_ok_and(|status| status.success()) {
        eprintln!("WARNING: skipped, as there is no apt-get to take qemu and a kernel from:");
        eprintln!(
            "WARNING: control groups are tested only as this machine has them, and no agent as the first process of a machine"
        );
        return Ok(());
    }
    run(root)
}

/// Boots every machine in turn, and fails if tests failed in one.
pub(crate) fn run(root: &Path) -> Result<()> {
    let folder = root.join("target/vm");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make `{}`", folder.display()))?;
    require_qemu()?;
    let kernel = kernel(&folder)?;
    let busybox = unpacked(&folder, "busybox-static", "bin/busybox")?;
    let (unit_tests, tests) = (test_binary(root, "lib")?, test_binary(root, "test")?);
    for boot in BOOTS {
        let began = Instant::now();
        let (memory, console) = (folder.join(format!("{}.cpio", boot.name)), folder.join(format!("{}.log", boot.name)));
        let mut files = initial_files(boot, &busybox, if boot.is_guest { &unit_tests } else { &tests })?;
        let mut disks = Vec::new();
        if boot.is_guest {
            guest::add_modules(&mut files, &folder)?;
            disks.extend(guest::disks(&folder, &busybox, &unit_tests)?);
        }
        fs::write(&memory, files.end()).context("cannot write the machine's files")?;
        start(&kernel, &memory, &disks, &console)?;
        let said = String::from_utf8_lossy(&fs::read(&console).context("cannot read the console")?).into_owned();
        if let Err(error) = judge(&said) {
            eprintln!("{said}");
            bail!("{}: {error:#} (see `{}`)", boot.name, console.display());
        }
        let summary = said.lines().rfind(|line| line.starts_with("test result:")).unwrap_or_default();
        eprintln!("   {}: {} ({:.1} s)", boot.name, summary.trim(), began.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Whether the tests ran to their end and passed, and there were some.
fn judge(console: &str) -> Result<()> {
    let result = console.lines().find_map(|line| line.trim().strip_prefix(RESULT));
    match result.context("the machine ended before its tests did")? {
        "0" if console.contains("running 0 tests") => bail!("no test has such a name"),
        "0" => Ok(()),
        code => bail!("the tests ended with exit code {code}"),
    }
}

/// Runs a machine to its end, with what it says in a file.
fn start(kernel: &Path, memory: &Path, disks: &[PathBuf], console: &Path) -> Result<()> {
    let file = File::create(console).context("cannot write the console")?;
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "1024"]);
    command.args(["-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-serial", "stdio", "-net", "none"]);
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(memory);
    command.args(["-append", "console=ttyS0 quiet panic=-1 cgroup_no_v1=none"]);
    for disk in disks {
        command.arg("-drive").arg(format!("file={},format=raw,if=virtio", disk.display()));
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

/// A machine that does not outlive us.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the machine has in memory when it starts, as the kernel wants it.
fn initial_files(boot: &Boot, busybox: &Path, tests: &Path) -> Result<Archive> {
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "proc", "sys", "tmp", "etc"] {
        archive.folder(folder);
    }
    let init = format!(
        "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin RUST_BACKTRACE=0
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs -o mode=1777 tmpfs /tmp
ip link set lo up
{}
/it {} --test-threads 1
echo \"{RESULT}$?\"
poweroff -f
",
        boot.mounts,
        boot.tests.join(" ")
    );
    archive.file("init", init.as_bytes());
    archive.file("bin/busybox", &fs::read(busybox).context("cannot read busybox")?);
    archive.file("it", &fs::read(tests).context("cannot read the tests")?);
    for library in libraries(tests)? {
        let bytes = fs::read(&library).with_context(|| format!("cannot read `{library}`"))?;
        archive.file(library.trim_start_matches('/'), &bytes);
    }
    Ok(archive)
}

/// The shared libraries that a program needs, and the loader of these.
fn libraries(program: &Path) -> Result<Vec<String>> {
    let output = Command::new("ldd").arg(program).output().context("cannot start ldd")?;
    let text = String::from_utf8(output.stdout).context("ldd printed something other than text")?;
    let paths = text.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(paths.map(str::to_owned).collect())
}

/// A cpio archive of the kind that the kernel unpacks ("newc").
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
        // Number, mode, owner, group, links, time, size, device and its kind twice, length of the name, sum.
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend(b"070701");
        fields.iter().for_each(|field| self.bytes.extend(format!("{field:08x}").bytes()));
        self.bytes.extend(name.bytes().chain([0]));
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    /// Everything begins at a multiple of four.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// The test binary of the sandbox of this kind, `lib` or `test`; built if it has to be.
fn test_binary(root: &Path, kind: &str) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["test", "--package", "wieldy-sandbox", "--features", "firecracker", "--lib", "--test", "it"]);
    command.args(["--no-run", "--locked"]);
    command.args(["--message-format", "json-render-diagnostics"]).current_dir(root).stderr(Stdio::inherit());
    let output = command.output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("the tests of wieldy-sandbox do not build");
    }
    let messages = output.stdout.split(|byte| *byte == b'\n');
    let mut programs = messages.filter_map(|line| {
        let message: Value = serde_json::from_slice(line).ok()?;
        message.get("target")?.get("kind")?.as_array()?.iter().find(|it| *it == kind)?;
        Some(PathBuf::from(message.get("executable")?.as_str()?))
    });
    programs.next_back().context("cargo does not say where the tests of wieldy-sandbox are")
}

/// Sees to it that qemu is there.
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

/// The kernel that the machines boot.
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

/// A file of a Debian package, which is downloaded and unpacked below our folder and not installed.
fn unpacked(folder: &Path, package: &str, file: &str) -> Result<PathBuf> {
    let place = folder.join(package);
    let path = place.join(file);
    if path.exists() {
        return Ok(path);
    }
    eprintln!("downloading Debian's package {package}");
    let _ = fs::remove_dir_all(&place);
    fs::create_dir_all(&place)?;
    // The downloader runs as a user of its own, who may not be let in here: it says so and goes on.
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
        let why = |console: &str| judge(console).err().map(|error| error.to_string());
        assert_eq!(why("running 3 tests\nwieldy-vm: the tests ended with 0\r\n"), None);
        assert_eq!(why("wieldy-vm: the tests ended with 101\n").unwrap(), "the tests ended with exit code 101");
        assert_eq!(why("Kernel panic").unwrap(), "the machine ended before its tests did");
        let none = "running 0 tests\nwieldy-vm: the tests ended with 0\n";
        assert_eq!(why(none).unwrap(), "no test has such a name");
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
