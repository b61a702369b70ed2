//! Making a command ready: everything that can be found out and laid out before a process exists.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags};
use wieldy_core::{Command, Confinement};

/// Where programs are looked for when the command's environment has no `PATH`.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// A command as the kernel takes it.
pub(crate) struct Prepared {
    pub(crate) program: CString,
    /// Begins with the name that the program is called by.
    pub(crate) arguments: Vec<CString>,
    pub(crate) environment: Vec<CString>,
    pub(crate) folder: OwnedFd,
    pub(crate) stdin: Stdin,
}

/// What the command reads.
pub(crate) enum Stdin {
    /// The end of file at once.
    Nothing(OwnedFd),
    /// What is fed into the other end.
    Pipe { ours: OwnedFd, theirs: OwnedFd },
}

/// Looks everything up. The error says what is wrong with which thing.
pub(crate) fn prepare(command: &Command, confinement: &Confinement) -> io::Result<Prepared> {
    let folder = confinement.workspace.join(&command.folder);
    let opened = open_folder(&folder)?;
    let program = find_program(&command.program, &folder, &command.environment)?;
    let words = [&command.program].into_iter().chain(&command.arguments);
    Ok(Prepared {
        program: without_nul(program.as_os_str().as_bytes().to_vec(), "the program's path")?,
        arguments: words.map(|word| without_nul(word.clone().into(), "an argument")).collect::<io::Result<_>>()?,
        environment: command.environment.iter().map(variable).collect::<io::Result<_>>()?,
        folder: opened,
        stdin: open_stdin(command.stdin.is_some())?,
    })
}

fn open_folder(folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(folder, flags, Mode::empty())
        .map_err(|error| explained(error.into(), &format!("cannot enter the folder `{}`", folder.display())))
}

fn open_stdin(fed: bool) -> io::Result<Stdin> {
    if fed {
        let (theirs, ours) = io::pipe()?;
        return Ok(Stdin::Pipe { ours: ours.into(), theirs: theirs.into() });
    }
    let nothing = File::open("/dev/null").map_err(|error| explained(error, "cannot open `/dev/null`"))?;
    Ok(Stdin::Nothing(nothing.into()))
}

/// The program's path. A name with a slash is a path, from `folder` on; any other is looked for on the `PATH` of the
/// command's own environment, where only absolute folders count: what an agent writes to its workspace must not
/// turn into `ls`.
fn find_program(name: &str, folder: &Path, environment: &BTreeMap<String, String>) -> io::Result<PathBuf> {
    if name.contains('/') {
        return Ok(folder.join(name));
    }
    let path = environment.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    let candidates = path.split(':').filter(|place| place.starts_with('/')).map(|place| Path::new(place).join(name));
    let mut not_executable = false;
    for candidate in candidates.filter(|candidate| !name.is_empty() && candidate.is_file()) {
        if rustix::fs::accessat(CWD, &candidate, Access::EXEC_OK, AtFlags::EACCESS).is_ok() {
            return Ok(candidate);
        }
        not_executable = true;
    }
    let kind = if not_executable { io::ErrorKind::PermissionDenied } else { io::ErrorKind::NotFound };
    let what = if not_executable { "may be executed" } else { "exists" };
    Err(io::Error::new(kind, format!("no program of that name {what} on the `PATH` {path}")))
}

fn variable((name, value): (&String, &String)) -> io::Result<CString> {
    if name.is_empty() || name.contains('=') {
        let message = format!("`{name}` cannot be the name of an environment variable");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    without_nul(format!("{name}={value}").into(), "an environment variable")
}

fn without_nul(bytes: Vec<u8>, what: &str) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, format!("{what} contains a zero byte")))
}

/// The same error, which also says what was being done.
pub(crate) fn explained(error: io::Error, doing: &str) -> io::Error {
    io::Error::new(error.kind(), format!("{doing}: {error}"))
}
