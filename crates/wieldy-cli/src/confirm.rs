//! Asking the person at the terminal, or taking `--yes` for an answer.

use std::io::{self, BufRead, Write};
use std::sync::{Arc, Mutex};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use indicatif::ProgressBar;
use wieldy::{Answer, Confirmation, Confirmer};

use crate::output::{Printer, shown_in_line};

/// Who answers questions: `--yes`, the person at the terminal, or nobody.
pub(crate) fn confirmer(yes: bool, printer: &Printer, progress: &ProgressBar) -> Option<Arc<dyn Confirmer>> {
    let ask = || Arc::new(Terminal { one_at_a_time: Arc::default(), progress: progress.clone() }) as Arc<dyn Confirmer>;
    beforehand(yes).or_else(|| printer.can_ask().then(ask))
}

/// Who answers where the person at the terminal, if any, is not the one to ask.
pub(crate) fn beforehand(yes: bool) -> Option<Arc<dyn Confirmer>> {
    yes.then(|| Arc::new(Yes) as Arc<dyn Confirmer>)
}

/// Agrees to everything, because the person said so beforehand.
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
        let text = wording(question);
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

/// The question in words. The arguments are those that will run, whole: what is not seen cannot be agreed to.
fn wording(question: &Confirmation) -> String {
    let arguments = serde_json::to_string_pretty(&*question.arguments).expect("arguments are plain data");
    let arguments: Vec<String> = arguments.split('\n').map(|line| format!("  {}", shown_in_line(line))).collect();
    format!(
        "`{}` wants to run ({}):\n{}\nrun it? [y/N] ",
        shown_in_line(&question.tool.name),
        shown_in_line(&question.reason),
        arguments.join("\n")
    )
}

/// Asks a question that is answered by yes or no.
pub(crate) fn ask(text: &str) -> io::Result<bool> {
    let mut stderr = io::stderr();
    write!(stderr, "{text}")?;
    stderr.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_lowercase().as_str(), "y" | "yes"))
}
