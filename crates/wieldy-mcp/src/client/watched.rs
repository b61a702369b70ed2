//! What is done with messages before anybody else sees them. Progress finds its run here, so that no answer overtakes it; and the
//! late answer to a question that we stopped asking is dropped.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use rmcp::model::{
    ClientRequest, GetMeta, JsonRpcMessage, JsonRpcNotification, JsonRpcRequest, ProgressNotification, ProgressToken,
    RequestId, ServerNotification,
};
use rmcp::service::{RoleClient, RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use wieldy_core::Run;

use super::failure::first_of;

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
            run.progress(percent, first_of(told.message.as_deref().unwrap_or_default()));
        }
        true
    }

    fn runs(&self) -> MutexGuard<'_, HashMap<ProgressToken, Run>> {
        self.runs.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A transport whose progress goes straight to the runs.
pub(super) struct Watched<T> {
    inner: T,
    progress: Progress,
    /// The question whether the server knows the newest revision, as long as it may be answered.
    probe: Option<RequestId>,
    /// The same once we have gone on without the answer: one that takes long to start answers all the same.
    given_up: Option<RequestId>,
}

impl<T> Watched<T> {
    pub(super) fn new(inner: T, progress: Progress) -> Self {
        Self { inner, progress, probe: None, given_up: None }
    }

    fn note_probe(&mut self, message: &TxJsonRpcMessage<RoleClient>) {
        if let JsonRpcMessage::Request(JsonRpcRequest { request, id, .. }) = message {
            match request {
                ClientRequest::DiscoverRequest(_) => self.probe = Some(id.clone()),
                ClientRequest::InitializeRequest(_) => self.given_up = self.probe.take(),
                _ => {}
            }
        }
    }

    /// Whether nobody waits for this any more.
    fn is_late(&self, message: &RxJsonRpcMessage<RoleClient>) -> bool {
        let answered = match message {
            JsonRpcMessage::Response(response) => Some(&response.id),
            JsonRpcMessage::Error(error) => error.id.as_ref(),
            _ => None,
        };
        answered.is_some() && answered == self.given_up.as_ref()
    }
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for Watched<T> {
    type Error = T::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), T::Error>> + Send + 'static {
        self.note_probe(&message);
        self.progress.note_request(&message);
        self.inner.send(message)
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        loop {
            let message = self.inner.receive().await?;
            if !self.progress.tell(&message) && !self.is_late(&message) {
                return Some(message);
            }
        }
    }

    async fn close(&mut self) -> Result<(), T::Error> {
        self.inner.close().await
    }
}
