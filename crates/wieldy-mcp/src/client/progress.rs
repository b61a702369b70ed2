//! Progress finds its run before anything else is done with what a server says: so no answer overtakes it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use rmcp::model::{
    ClientRequest, GetMeta, JsonRpcMessage, JsonRpcNotification, JsonRpcRequest, ProgressNotification, ProgressToken,
    ServerNotification,
};
use rmcp::service::{RoleClient, RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use wieldy_core::Run;

/// The runs that wait for an answer, by the token that their progress carries.
#[derive(Clone, Default)]
pub(super) struct Progress {
    runs: Arc<Mutex<HashMap<ProgressToken, Run>>>,
}

impl Progress {
    pub(super) fn forget(&self, token: &ProgressToken) {
        self.runs().remove(token);
    }

    /// A run goes along with its request, and stays here when that goes out.
    fn note_request(&self, message: &TxJsonRpcMessage<RoleClient>) {
        if let JsonRpcMessage::Request(JsonRpcRequest {
            request: request @ ClientRequest::CallToolRequest(call), ..
        }) = message
            && let Some(run) = call.extensions.get::<Run>()
            && let Some(token) = request.get_meta().get_progress_token()
        {
            self.runs().insert(token, run.clone());
        }
    }

    /// Tells the run that the progress is about; false if it is no progress.
    fn tell(&self, message: &RxJsonRpcMessage<RoleClient>) -> bool {
        let JsonRpcMessage::Notification(JsonRpcNotification {
            notification: ServerNotification::ProgressNotification(ProgressNotification { params: told, .. }),
            ..
        }) = message
        else {
            return false;
        };
        let run = self.runs().get(&told.progress_token).cloned();
        if let Some(run) = run {
            let percent = told.total.filter(|total| *total > 0.0).map(|total| told.progress / total * 100.0);
            run.progress(percent, told.message.clone().unwrap_or_default());
        }
        true
    }

    fn runs(&self) -> MutexGuard<'_, HashMap<ProgressToken, Run>> {
        self.runs.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A transport whose progress goes straight to the runs.
pub(super) struct Watched<T> {
    pub(super) inner: T,
    pub(super) progress: Progress,
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for Watched<T> {
    type Error = T::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), T::Error>> + Send + 'static {
        self.progress.note_request(&message);
        self.inner.send(message)
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        loop {
            let message = self.inner.receive().await?;
            if !self.progress.tell(&message) {
                return Some(message);
            }
        }
    }

    async fn close(&mut self) -> Result<(), T::Error> {
        self.inner.close().await
    }
}
