//! Confirmations: asks the person at the terminal, or accepts `--yes` as the answer.

use std::io::{self, BufRead, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use indicatif::ProgressBar;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::termios::{QueueSelector, tcflush};
use wieldy::{Answer, Confirmation, Confirmer};

use crate::output::Printer;

/// The time that a terminal may take to pass on the input that it holds back.
const FOLLOWS: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// The maximal number of times that input is discarded before a question.
const ROUNDS_MAX: usize = 100;

/// Returns the confirmer: `--yes`, the person at the terminal, or `None`.
pub(crate) fn confirmer(yes: bool, printer: &Printer, progress: &ProgressBar) -> Option<Arc<dyn Confirmer>> {
    let ask = || Arc::new(Terminal { one_at_a_time: Arc::default(), progress: progress.clone() }) as Arc<dyn Confirmer>;
    beforehand(yes).or_else(|| printer.can_ask().then(ask))
}

/// Returns the confirmer for commands that must not ask the person at the terminal.
pub(crate) fn beforehand(yes: bool) -> Option<Arc<dyn Confirmer>> {
    yes.then(|| Arc::new(Yes) as Arc<dyn Confirmer>)
}

/// Approves everything, because the person said so beforehand.
struct Yes;

impl Confirmer for Yes {
    fn confirm<'a>(&'a self, question: &'a Confirmation) -> BoxFuture<'a, Result<Answer, String>> {
        async { Ok(Answer { by: Some("--yes".into()), ..question.approve() }) }.boxed()
    }
}

/// Asks at the terminal, one question after the other.
struct Terminal {
    one_at_a_time: Arc<Mutex<()>>,
    progress: ProgressBar,
}

impl Confirmer for Terminal {
    fn confirm<'a>(&'a self, question: &'a Confirmation) -> BoxFuture<'a, Result<Answer, String>> {
        let (one_at_a_time, progress) = (Arc::clone(&self.one_at_a_time), self.progress.clone());
        let text = format!("{}run it? [y/N] ", question.in_words());
        async move {
            let asked = tokio::task::spawn_blocking(move || {
                let _turn = one_at_a_time.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                progress.suspend(|| ask(&text))
            });
            let agreed = asked.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
            let answer = if agreed { question.approve() } else { question.refuse() };
            Ok(Answer { by: Some("the person at the terminal".into()), ..answer })
        }
        .boxed()
    }
}

/// Asks a question that is answered by yes or no. Input that was typed before the question is discarded.
pub(crate) fn ask(text: &str) -> io::Result<bool> {
    discard_typed(io::stdin().as_fd())?;
    let mut stderr = io::stderr();
    write!(stderr, "{text}")?;
    stderr.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_lowercase().as_str(), "y" | "yes"))
}

/// Discards all input that a terminal holds. A terminal passes on only 4,096 characters at once and the rest after they
/// are read, so this repeats until no input follows.
fn discard_typed(terminal: BorrowedFd<'_>) -> io::Result<()> {
    for _ in 0..ROUNDS_MAX {
        tcflush(terminal, QueueSelector::IFlush)?;
        let mut input = [PollFd::new(&terminal, PollFlags::IN)];
        if retry_on_intr(|| poll(&mut input, Some(&FOLLOWS)))? == 0 {
            // An incomplete line is not reported as input.
            return Ok(tcflush(terminal, QueueSelector::IFlush)?);
        }
        if input[0].revents().contains(PollFlags::HUP) {
            return Ok(());
        }
    }
    Err(io::Error::other("input keeps coming from the terminal, so no question can be asked there"))
}
