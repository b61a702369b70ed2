//! Polls an MCP task that a server made of a call until the task is over. Cancels the task when the call ends first.

use std::time::Duration;

use rmcp::model::{CancelTaskParams, GetTaskParams, Task, TaskPayload};
use rmcp::service::{Peer, RoleClient};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Outcome, Run};

use super::answer;
use super::failure::{CLOSED, Failure};

/// The poll interval if the server names none, and the bounds of the interval that it may name.
const POLL_DEFAULT: Duration = Duration::from_millis(500);
const POLL_MIN: Duration = Duration::from_millis(10);
const POLL_MAX: Duration = Duration::from_secs(30);
/// The longest time to send a task's cancellation.
const CANCEL_MAX: Duration = Duration::from_secs(10);

/// Polls a task until it is over. A failed poll says nothing about the task, so only the run's time limits end the
/// polling.
pub(super) async fn follow(
    mut task: Task,
    sdk: &Peer<RoleClient>,
    run: &Run,
    closed: &CancellationToken,
) -> Result<Outcome, Failure> {
    let begun = RunningTask { sdk, task: Some(task.task_id.clone()) };
    let (mut in_vain, mut asked_for) = (0, None);
    loop {
        let poll = task.poll_interval_ms.map_or(POLL_DEFAULT, Duration::from_millis).clamp(POLL_MIN, POLL_MAX);
        // The pause doubles with each failed poll.
        let patience = poll.saturating_mul(1 << in_vain.min(16)).min(POLL_MAX).max(asked_for.unwrap_or_default());
        let known = tokio::select! {
            known = ask(sdk, &task.task_id, patience) => known,
            () = run.stop().cancelled() => {
                begun.cancel().await;
                return Ok(Outcome::default());
            }
            () = closed.cancelled() => return Err(Failure::transport(CLOSED)),
        };
        let known = match known {
            Ok(known) => known,
            Err(failure) if is_passing(&failure) && !sdk.is_transport_closed() => {
                if in_vain == 0 {
                    run.warn(format!("the server cannot be asked how its task stands, and is asked again: {failure}"));
                }
                (in_vain, asked_for) = (in_vain + 1, failure.retry_after());
                continue;
            }
            Err(failure) => return Err(failure),
        };
        (in_vain, asked_for) = (0, None);
        match known.payload {
            TaskPayload::Completed { result } => {
                begun.forget();
                let result = serde_json::from_value(Value::Object(result));
                return result.map(answer::outcome).map_err(|_| Failure::protocol("a task whose result is none"));
            }
            TaskPayload::Failed { error } => {
                begun.forget();
                let message = error.get("message").and_then(Value::as_str).unwrap_or("its task failed");
                return Err(Failure::protocol(message));
            }
            TaskPayload::Cancelled => {
                begun.forget();
                return Err(Failure::protocol("its task was cancelled"));
            }
            TaskPayload::InputRequired { .. } => {
                begun.cancel().await;
                return Err(Failure::protocol("a question to the user, which nobody here can answer"));
            }
            _ => run.progress(None, known.task.status_message.clone().unwrap_or_default()),
        }
        task = known.task;
    }
}

/// Polls a task after a pause.
async fn ask(sdk: &Peer<RoleClient>, task: &str, patience: Duration) -> Result<rmcp::model::DetailedTask, Failure> {
    tokio::time::sleep(patience).await;
    Ok(sdk.get_task(GetTaskParams::new(task)).await?.task)
}

/// Returns true if the failure is temporary, so that polling again is useful.
fn is_passing(failure: &Failure) -> bool {
    matches!(failure, Failure::Transport(_) | Failure::Unreached(_) | Failure::Busy { .. })
}

/// A task that the server runs for us. Dropped before the task is over, it cancels the task.
struct RunningTask<'a> {
    sdk: &'a Peer<RoleClient>,
    task: Option<String>,
}

impl RunningTask<'_> {
    /// Disarms the cancellation of a task that is over.
    fn forget(mut self) {
        self.task = None;
    }

    async fn cancel(mut self) {
        if let Some(task) = self.task.take() {
            tell(self.sdk.clone(), task).await;
        }
    }
}

impl Drop for RunningTask<'_> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            tokio::spawn(tell(self.sdk.clone(), task));
        }
    }
}

/// Sends the cancellation of a task.
async fn tell(sdk: Peer<RoleClient>, task: String) {
    let _ = tokio::time::timeout(CANCEL_MAX, sdk.cancel_task(CancelTaskParams::new(task))).await;
}
