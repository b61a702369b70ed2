//! What is left to clean up when a supervisor was left behind, or did not live to clean up itself.

use std::fs;
use std::sync::Mutex;
use std::thread;

use rustix::io::retry_on_intr;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, kill_process_group, waitpid};

use crate::custody::{WAKE_EVERY, wake};

/// Supervisors that nobody follows any more and that will end by themselves.
static LEFT: Mutex<Left> = Mutex::new(Left { supervisors: Vec::new(), reaping: false });

struct Left {
    supervisors: Vec<Pid>,
    reaping: bool,
}

/// Sees to it that a supervisor is reaped once it has ended. Returns at once.
///
/// A thread does the waiting, as there may be no async runtime any more; one for all of them, and only while there are some.
pub(crate) fn reap_later(supervisor: Pid) {
    let mut left = LEFT.lock().expect("no code panics while it holds the list");
    left.supervisors.push(supervisor);
    if !left.reaping {
        let thread = thread::Builder::new().name("wieldy-reaper".into()).stack_size(64 * 1024);
        // Should there be no thread to be had, the supervisor stays in the list until the next one is left behind.
        left.reaping = thread.spawn(reap_left).is_ok();
    }
}

fn reap_left() {
    loop {
        {
            let mut left = LEFT.lock().expect("no code panics while it holds the list");
            left.supervisors.retain(|supervisor| !has_ended(*supervisor));
            left.reaping = !left.supervisors.is_empty();
            if !left.reaping {
                return;
            }
            left.supervisors.iter().for_each(|supervisor| wake(*supervisor));
        }
        thread::sleep(WAKE_EVERY);
    }
}

/// Reaps the supervisor if it has ended. An error means that somebody else has reaped it, which is as good.
fn has_ended(supervisor: Pid) -> bool {
    !matches!(retry_on_intr(|| waitpid(Some(supervisor), WaitOptions::NOHANG)), Ok(None))
}

/// Kills the session of a command whose supervisor is dead: all of the tree but processes that opened a session of their own.
pub(crate) fn kill_session(main: Pid) {
    let _ = kill_process_group(main, Signal::KILL);
    // A process that forks while the list is read may be missed, but not for ever: its kind gets fewer each time.
    const ROUNDS_MAX: usize = 100;
    for _ in 0..ROUNDS_MAX {
        let alive = alive_in_session(main);
        if alive.is_empty() {
            return;
        }
        for pid in alive {
            let _ = kill_process(pid, Signal::KILL);
        }
        thread::yield_now();
    }
}

fn alive_in_session(session: Pid) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
    pids.filter(|pid| {
        let status = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid()));
        status.is_ok_and(|status| is_alive_in(&status, session))
    })
    .collect()
}

/// Whether the process with this `/proc/<pid>/stat` belongs to the session and is no zombie.
fn is_alive_in(status: &str, session: Pid) -> bool {
    // The command's name comes before, in parentheses, and may contain anything.
    let Some((_, after_name)) = status.rsplit_once(')') else { return false };
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let [state, _parent, _group, its_session, ..] = fields.as_slice() else { return false };
    !matches!(*state, "Z" | "X") && its_session.parse() == Ok(session.as_raw_pid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_a_nasty_name_is_still_found_in_its_session() {
        let session = Pid::from_raw(77).expect("not zero");
        assert!(is_alive_in("80 (a) Z 1 1 1 (b) S 1 80 77 0 -1", session));
        assert!(!is_alive_in("80 (a) Z 1 80 77 0 -1", session));
        assert!(!is_alive_in("80 (a) S 1 80 78 0 -1", session));
        assert!(!is_alive_in("", session));
    }
}
