//! Which processes live in a gVisor container: asked where `runsc ps` asks, without starting that, which takes longer than most commands.
//!
//! What a sandbox of gVisor listens to is no promise of gVisor's. So whoever asks here must be able to do without an answer.

use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use serde::Deserialize;

/// How long an answer may take, and how long it may be.
const PATIENCE: Duration = Duration::from_secs(1);
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// A process in a container.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Process {
    uid: u32,
    pid: u32,
}

#[derive(Deserialize)]
struct Answer {
    success: bool,
    result: Option<Vec<Process>>,
}

/// Whether nobody of this account lives in the first container of a sandbox; nothing if that cannot be told. Blocks.
pub(super) fn is_clear_of(account: u32, sandbox: &str) -> Option<bool> {
    is_clear_in(&ask(sandbox).ok()?, account)
}

fn ask(sandbox: &str) -> io::Result<Vec<u8>> {
    let address = SocketAddr::from_abstract_name(format!("runsc-sandbox.{sandbox}\0"))?;
    let mut socket = UnixStream::connect_addr(&address)?;
    // Anybody could have taken a name that is free; but only we put processes into the sandbox's cgroup.
    let peer = rustix::net::sockopt::socket_peercred(&socket)?.pid.as_raw_pid();
    let groups = std::fs::read_to_string(format!("/proc/{peer}/cgroup"))?;
    if !groups.split(['/', '\n']).any(|part| part == sandbox) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    let question = serde_json::json!({"method": "containerManager.Processes", "arg": sandbox});
    socket.write_all(question.to_string().as_bytes())?;
    // The answer is an object without anything after it, and the socket stays open.
    let (mut answer, mut part) = (Vec::new(), [0; 4096]);
    while answer.len() < ANSWER_BYTES_MAX {
        match socket.read(&mut part)? {
            0 => break,
            count => answer.extend_from_slice(part.get(..count).unwrap_or_default()),
        }
        if serde_json::from_slice::<serde::de::IgnoredAny>(&answer).is_ok() {
            break;
        }
    }
    Ok(answer)
}

fn is_clear_in(answer: &[u8], account: u32) -> Option<bool> {
    let answer: Answer = serde_json::from_slice(answer).ok()?;
    let processes = answer.result.filter(|_| answer.success)?;
    // The sleeper is always there: who does not know it speaks of something else.
    processes.iter().any(|process| process.pid == 1).then(|| processes.iter().all(|process| process.uid != account))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_that_knows_the_sleeper_counts() {
        let of = |text: &str| is_clear_in(text.as_bytes(), 7);
        let sleeper = r#"{"uid":5,"pid":1,"ppid":0,"threads":[1],"cmd":"sh"}"#;
        let listed = |more: &str| format!(r#"{{"success":true,"err":"","result":[{sleeper}{more}]}}"#);
        assert_eq!(of(&listed("")), Some(true));
        assert_eq!(of(&listed(r#",{"uid":5,"pid":2}"#)), Some(true));
        assert_eq!(of(&listed(r#",{"uid":7,"pid":9}"#)), Some(false));
        for other in [
            r#"{"success":true,"err":"","result":null}"#,
            r#"{"success":true,"err":"","result":[]}"#,
            r#"{"success":true,"err":"","result":[{"uid":5,"pid":2}]}"#,
            r#"{"success":true,"err":"","result":[{"user":5,"pid":1}]}"#,
            r#"{"success":false,"err":"no such container","result":null}"#,
            r#"{"success":true,"result":[{"uid":5,"#,
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
        assert_eq!(is_clear_of(7, "there-is-no-such-sandbox"), None);
    }
}
