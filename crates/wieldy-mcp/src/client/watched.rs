//! What is done with messages before the SDK sees them. Progress finds its run here, so that no answer overtakes it; the answer to
//! a call that did not go through the SDK finds its call; and the late answer to a question that we stopped asking is dropped.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use rmcp::model::{
    ClientRequest, GetMeta, JsonRpcMessage, JsonRpcNotification, JsonRpcRequest, NumberOrString, ProgressNotification,
    ProgressToken, RequestId, ServerNotification,
};
use rmcp::service::{RoleClient, RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use tokio::sync::{mpsc, oneshot};
use wieldy_core::Run;

use super::answer::Answer;
use super::failure::{Failure, first_of};

/// How many messages that came by the streams of calls wait for the SDK at most.
const OVERHEARD_MAX: usize = 16;

type Received = RxJsonRpcMessage<RoleClient>;

/// The calls that wait for an answer.
#[derive(Clone)]
pub(super) struct Waiting {
    /// By the token that their progress carries.
    calls: Arc<Mutex<HashMap<i64, Call>>>,
    overheard: mpsc::Sender<Received>,
}

struct Call {
    run: Run,
    /// Where the token is the number of the call too, whoever waits for what does not come by the stream of the call.
    answer: Option<oneshot::Sender<Result<Answer, Failure>>>,
}

impl Waiting {
    /// Notes a call of this number. Its answer comes here if it comes in another way than as the answer to a request of HTTP.
    pub(super) fn note(&self, number: i64, run: &Run) -> oneshot::Receiver<Result<Answer, Failure>> {
        let (answer, elsewhere) = oneshot::channel();
        self.calls().insert(number, Call { run: run.clone(), answer: Some(answer) });
        elsewhere
    }

    pub(super) fn forget(&self, token: &ProgressToken) {
        if let Some(token) = number(&token.0) {
            self.calls().remove(&token);
        }
    }

    /// Does with a message that came by the stream of a call what is done with all others.
    pub(super) async fn overhear(&self, message: Received) {
        if let Some(message) = self.take(message) {
            // Without the SDK the connection is over.
            let _ = self.overheard.send(message).await;
        }
    }

    /// A run goes along with its request, and stays here when that goes out.
    fn note_request(&self, message: &TxJsonRpcMessage<RoleClient>) {
        if let JsonRpcMessage::Request(JsonRpcRequest {
            request: request @ ClientRequest::CallToolRequest(call), ..
        }) = message
            && let Some(run) = call.extensions.get::<Run>()
            && let Some(token) = request.get_meta().get_progress_token().and_then(|token| number(&token.0))
        {
            self.calls().insert(token, Call { run: run.clone(), answer: None });
        }
    }

    /// Takes what is for a call, and gives back the rest.
    fn take(&self, message: Received) -> Option<Received> {
        match message {
            JsonRpcMessage::Notification(JsonRpcNotification {
                notification: ServerNotification::ProgressNotification(ProgressNotification { params: told, .. }),
                ..
            }) => {
                let run = number(&told.progress_token.0).and_then(|token| Some(self.calls().get(&token)?.run.clone()));
                if let Some(run) = run {
                    let percent = told.total.filter(|total| *total > 0.0).map(|total| told.progress / total * 100.0);
                    run.progress(percent, first_of(told.message.as_deref().unwrap_or_default()));
                }
                None
            }
            JsonRpcMessage::Response(response) => match self.answered(&response.id) {
                Some(call) => {
                    let _ = call.send(Ok(response.result.into()));
                    None
                }
                None => Some(JsonRpcMessage::Response(response)),
            },
            JsonRpcMessage::Error(error) => match error.id.as_ref().and_then(|id| self.answered(id)) {
                Some(call) => {
                    let _ = call.send(Err(error.error.into()));
                    None
                }
                None => Some(JsonRpcMessage::Error(error)),
            },
            message => Some(message),
        }
    }

    /// Who waits for the answer of this number.
    fn answered(&self, id: &RequestId) -> Option<oneshot::Sender<Result<Answer, Failure>>> {
        self.calls().get_mut(&number(id)?)?.answer.take()
    }

    fn calls(&self) -> MutexGuard<'_, HashMap<i64, Call>> {
        self.calls.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The number that this is. Some servers make text of it.
fn number(id: &NumberOrString) -> Option<i64> {
    match id {
        NumberOrString::Number(number) => Some(*number),
        NumberOrString::String(text) => text.parse().ok(),
    }
}

/// A transport whose messages are looked at first.
pub(super) struct Watched<T> {
    inner: T,
    waiting: Waiting,
    overheard: mpsc::Receiver<Received>,
    /// The question whether the server knows the newest revision, as long as it may be answered.
    probe: Option<RequestId>,
    /// The same once we have gone on without the answer: one that takes long to start answers all the same.
    given_up: Option<RequestId>,
}

impl<T> Watched<T> {
    pub(super) fn new(inner: T) -> (Self, Waiting) {
        let (sender, overheard) = mpsc::channel(OVERHEARD_MAX);
        let waiting = Waiting { calls: Arc::default(), overheard: sender };
        (Self { inner, waiting: waiting.clone(), overheard, probe: None, given_up: None }, waiting)
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
    fn is_late(&self, message: &Received) -> bool {
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
        self.waiting.note_request(&message);
        self.inner.send(message)
    }

    async fn receive(&mut self) -> Option<Received> {
        loop {
            let message = tokio::select! {
                message = self.inner.receive() => message?,
                Some(message) = self.overheard.recv() => message,
            };
            let message = self.waiting.take(message);
            if let Some(message) = message.filter(|message| !self.is_late(message)) {
                return Some(message);
            }
        }
    }

    async fn close(&mut self) -> Result<(), T::Error> {
        self.inner.close().await
    }
}
