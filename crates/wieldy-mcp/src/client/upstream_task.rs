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
    let running = RunningTask { sdk, task: Some(task.task_id.clone()) };
    let (mut failed_polls, mut asked_for) = (0, None);
    loop {
        let interval = task.poll_interval_ms.map_or(POLL_DEFAULT, Duration::from_millis).clamp(POLL_MIN, POLL_MAX);
        // The pause doubles with each failed poll.
        let pause = interval.saturating_mul(1 << failed_polls.min(16)).min(POLL_MAX).max(asked_for.unwrap_or_default());
        let polled = tokio::select! {
            polled = poll(sdk, &task.task_id, pause) => polled,
            () = run.stop().cancelled() => {
                running.cancel().await;
                return Ok(Outcome::default());
            }
            () = closed.cancelled() => return Err(Failure::transport(CLOSED)),
        };
        let polled = match polled {
            Ok(polled) => polled,
            Err(failure) if is_temporary(&failure) && !sdk.is_transport_closed() => {
                if failed_polls == 0 {
                    run.warn(format!("cannot get the state of the task from the server, trying again: {failure}"));
                }
                (failed_polls, asked_for) = (failed_polls + 1, failure.retry_after());
                continue;
            }
            Err(failure) => return Err(failure),
        };
        (failed_polls, asked_for) = (0, None);
        match polled.payload {
            TaskPayload::Completed { result } => {
                running.disarm();
                let result = serde_json::from_value(Value::Object(result));
                return result.map(answer::outcome).map_err(|_| Failure::protocol("a task without a valid result"));
            }
            TaskPayload::Failed { error } => {
                running.disarm();
                let message = error.get("message").and_then(Value::as_str).unwrap_or("its task failed");
                return Err(Failure::protocol(message));
            }
            TaskPayload::Cancelled => {
                running.disarm();
                return Err(Failure::protocol("its task was cancelled"));
            }
            TaskPayload::InputRequired { .. } => {
                running.cancel().await;
                return Err(Failure::protocol("a question to the user, which wieldy cannot pass on"));
            }
            _ => run.progress(None, polled.task.status_message.clone().unwrap_or_default()),
        }
        task = polled.task;
    }
}

/// Polls a task after a pause.
async fn poll(sdk: &Peer<RoleClient>, task: &str, pause: Duration) -> Result<rmcp::model::DetailedTask, Failure> {
    tokio::time::sleep(pause).await;
    Ok(sdk.get_task(GetTaskParams::new(task)).await?.task)
}

/// Returns true if the failure is temporary, so that polling again is useful.
fn is_temporary(failure: &Failure) -> bool {
    matches!(failure, Failure::Transport(_) | Failure::Unreached(_) | Failure::Busy { .. })
}

/// A task that the server runs for us. Dropped before the task is over, it cancels the task.
struct RunningTask<'a> {
    sdk: &'a Peer<RoleClient>,
    task: Option<String>,
}

impl RunningTask<'_> {
    /// Disarms the cancellation of a task that is over.
    fn disarm(mut self) {
        self.task = None;
    }

    async fn cancel(mut self) {
        if let Some(task) = self.task.take() {
            send_cancel(self.sdk.clone(), task).await;
        }
    }
}

impl Drop for RunningTask<'_> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            tokio::spawn(send_cancel(self.sdk.clone(), task));
        }
    }
}

/// Sends the cancellation of a task.
async fn send_cancel(sdk: Peer<RoleClient>, task: String) {
    let _ = tokio::time::timeout(CANCEL_MAX, sdk.cancel_task(CancelTaskParams::new(task))).await;
}
