//! The progress notifications of a call or a batch, for clients that want them.

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rmcp::model::{ProgressNotificationParam, ProgressToken};
use wieldy_core::{Body, Observer, Seen};

use super::peer::PeerChannel;

/// Maximum length of one progress message.
const MESSAGE_CHARS_MAX: usize = 2000;
/// Maximum number of progress notifications sent after a call has ended. The printed output is in the result anyway.
const REMAINING_MAX: usize = 64;

/// The progress notifications of a request. Their numbers only grow.
pub(crate) struct Progress {
    observer: Observer,
    token: ProgressToken,
    last: f64,
    knows_total: bool,
    /// The number of calls, if the request is a batch: then the calls that have ended are counted.
    calls: Option<usize>,
}

impl Progress {
    /// Reports what one call reports.
    pub(crate) fn of_call(observer: Observer, token: ProgressToken) -> Self {
        Self { observer, token, last: 0.0, knows_total: false, calls: None }
    }

    /// Reports how many calls of a batch have ended.
    pub(crate) fn of_batch(observer: Observer, token: ProgressToken, calls: usize) -> Self {
        Self { calls: Some(calls), ..Self::of_call(observer, token) }
    }

    async fn next(&mut self) -> Option<ProgressNotificationParam> {
        loop {
            let Seen::Event(event) = self.observer.next().await? else { continue };
            let (message, total) = match (&event.body, self.calls) {
                (Body::CallProgress { percent, message, .. }, None) => {
                    self.knows_total |= percent.is_some();
                    let step = if self.knows_total { 0.001 } else { 1.0 };
                    self.last = percent.filter(|percent| *percent > self.last).unwrap_or(self.last + step);
                    (message.clone(), self.knows_total.then_some(100.0))
                }
                (body, Some(calls)) if body.closing().is_some() => {
                    self.last += 1.0;
                    let status = body.closing().map(|closing| closing.status.as_str()).unwrap_or_default();
                    (event.subject.tool.as_ref().map(|tool| format!("{tool}: {status}")), Some(calls as f64))
                }
                _ => continue,
            };
            let mut told = ProgressNotificationParam::new(self.token.clone(), self.last);
            told.total = total;
            told.message = message.map(|message| message.chars().take(MESSAGE_CHARS_MAX).collect());
            return Some(told);
        }
    }
}

/// Returns the next notification. Waits forever if the client wants none or no more will come.
pub(crate) async fn next_notification(progress: &mut Option<Progress>) -> Option<ProgressNotificationParam> {
    if let Some(progress) = progress
        && let Some(told) = progress.next().await
    {
        return Some(told);
    }
    std::future::pending().await
}

/// Sends the remaining progress before the response.
pub(crate) async fn send_remaining(
    mut progress: Progress,
    sending: Option<BoxFuture<'static, ()>>,
    channel: &PeerChannel,
) {
    if let Some(sending) = sending {
        sending.await;
    }
    for _ in 0..REMAINING_MAX {
        let Some(Some(told)) = progress.next().now_or_never() else { return };
        channel.notify(told).await;
    }
}
