//! Questions to the client's user: may exactly this call run?
//!
//! [`PendingQuestions`] stores the calls that wait for an answer. A client of revision 2026-07-28 gets an
//! `input_required` result and repeats its request with the user's answer. The call stays open meanwhile. The request
//! state that the client returns is sealed, so it can answer only this question about this call, once. Older clients
//! get an elicitation request while the call waits.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rmcp::ErrorData;
use rmcp::model::{
    ElicitRequest, ElicitRequestParams, ElicitResult, ElicitationAction, ElicitationSchema, InputRequest,
    InputRequiredResult, InputResponses, RequestStateCodec, SealOptions,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::oneshot;
use wieldy_core::{Answer, BoxFuture, Caller, Confirmation, Confirmer, ExecutionId};

/// Maximum number of calls that wait for answers.
const QUESTIONS_MAX: usize = 1024;
/// Maximum size of a question to a person. It is shown whole: a person cannot agree to a part that is not shown.
const QUESTION_BYTES_MAX: usize = 32 * 1024;
/// The key of the one question in an `input_required` result.
const QUESTION: &str = "confirm";

/// The questions that wait for an answer.
pub(crate) struct PendingQuestions {
    open: Mutex<HashMap<ExecutionId, PendingQuestion>>,
    /// The number of questions. Calls without a question read only this and take no lock.
    count: AtomicUsize,
    seal: RequestStateCodec,
}

struct PendingQuestion {
    question: Arc<Confirmation>,
    answer: oneshot::Sender<bool>,
    is_shown: bool,
}

/// The sealed request state that a client returns.
#[derive(Serialize, Deserialize)]
struct SealedState {
    execution: ExecutionId,
    digest: String,
}

impl Default for PendingQuestions {
    fn default() -> Self {
        let mut key = [0; 32];
        getrandom::fill(&mut key).expect("a system without randomness cannot run anything safely");
        Self {
            open: Mutex::default(),
            count: AtomicUsize::new(0),
            seal: RequestStateCodec::try_new(key).expect("the key is long enough"),
        }
    }
}

impl Confirmer for PendingQuestions {
    fn confirm<'a>(&'a self, question: &'a Confirmation) -> BoxFuture<'a, Result<Answer, String>> {
        Box::pin(self.wait_for_answer(question, || ()))
    }
}

/// Removes a question when its call no longer waits.
struct RemoveOnDrop<'a>(&'a PendingQuestions, ExecutionId);

impl Drop for RemoveOnDrop<'_> {
    fn drop(&mut self) {
        let mut open = self.0.lock();
        open.remove(&self.1);
        self.0.count.store(open.len(), Ordering::Release);
    }
}

impl PendingQuestions {
    fn lock(&self) -> MutexGuard<'_, HashMap<ExecutionId, PendingQuestion>> {
        self.open.lock().expect("no code panics while it holds the questions")
    }

    /// Stores a question, calls `on_asked`, and waits for the person's answer.
    pub(crate) async fn wait_for_answer(
        &self,
        question: &Confirmation,
        on_asked: impl FnOnce() + Send,
    ) -> Result<Answer, String> {
        if question.in_words().len() > QUESTION_BYTES_MAX {
            return Err(format!("a question of over {QUESTION_BYTES_MAX} bytes cannot be shown to a person"));
        }
        let (answer, answered) = oneshot::channel();
        let _removed_on_drop = self.insert(question, answer)?;
        on_asked();
        let is_approved = answered.await.map_err(|_| "the client went away without an answer".to_owned())?;
        Ok(if is_approved { question.approve() } else { question.refuse() })
    }

    fn insert(&self, question: &Confirmation, answer: oneshot::Sender<bool>) -> Result<RemoveOnDrop<'_>, String> {
        let mut open = self.lock();
        if open.len() >= QUESTIONS_MAX {
            return Err("too many calls already wait for answers".into());
        }
        open.insert(
            question.execution,
            PendingQuestion { question: Arc::new(question.clone()), answer, is_shown: false },
        );
        self.count.store(open.len(), Ordering::Release);
        Ok(RemoveOnDrop(self, question.execution))
    }

    /// Returns the question that a call has just asked, once.
    pub(crate) fn take_new(&self, execution: ExecutionId) -> Option<Arc<Confirmation>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut open = self.lock();
        let asked = open.get_mut(&execution).filter(|asked| !asked.is_shown)?;
        asked.is_shown = true;
        Some(Arc::clone(&asked.question))
    }

    /// Delivers the person's answer to the waiting call. Returns false if no call waited.
    pub(crate) fn answer(&self, execution: ExecutionId, is_approved: bool) -> bool {
        let asked = self.lock().remove(&execution);
        asked.is_some_and(|asked| asked.answer.send(is_approved).is_ok())
    }

    /// Builds the `input_required` result for a question.
    pub(crate) fn input_required(&self, question: &Confirmation, asked: &AskedCall<'_>) -> InputRequiredResult {
        let ticket = SealedState { execution: question.execution, digest: question.digest.to_string() };
        let bound_to = asked.hash();
        let options = SealOptions::new().associated_data(&bound_to).ttl(question.expires_in);
        let sealed = self.seal.seal_json_with(&ticket, &options).expect("two texts are always writable");
        let request = InputRequest::Elicitation(ElicitRequest::new(form(question)));
        InputRequiredResult::new(Some(BTreeMap::from([(QUESTION.to_owned(), request)])), Some(sealed))
    }

    /// Opens the sealed state of a repeated request and delivers the answer to its call.
    pub(crate) fn open_returned(
        &self,
        sealed: &str,
        asked: &AskedCall<'_>,
        responses: Option<&InputResponses>,
    ) -> Result<ReturnedInput, ErrorData> {
        let wrong = |message: &'static str| ErrorData::invalid_params(message, None);
        let ticket: SealedState = self
            .seal
            .open_json_with(sealed, &asked.hash())
            .map_err(|_| wrong("the request state is not from this server, is too old, or belongs to another call"))?;
        let execution = ticket.execution;
        let question = self.lock().get(&execution).map(|open| Arc::clone(&open.question));
        let Some(question) = question.filter(|question| question.digest.to_string() == ticket.digest) else {
            return Ok(ReturnedInput::TooLate(execution));
        };
        let Some(response) = responses.and_then(|responses| responses.get(QUESTION)) else {
            return Ok(ReturnedInput::Nothing(question));
        };
        let said = ElicitResult::deserialize(response).map_err(|_| wrong("the input response is not an answer"))?;
        let was_open = self.answer(execution, is_accepted(&said));
        Ok(if was_open { ReturnedInput::Answered(execution) } else { ReturnedInput::TooLate(execution) })
    }
}

/// The outcome of a repeated request.
pub(crate) enum ReturnedInput {
    /// The answer was delivered to the call.
    Answered(ExecutionId),
    /// The request has no answer. The question is still open.
    Nothing(Arc<Confirmation>),
    /// The question of this call is over.
    TooLate(ExecutionId),
}

/// The request that a repetition must match: the same tool, arguments and context, by the same caller.
pub(crate) struct AskedCall<'a> {
    pub(crate) caller: &'a Caller,
    pub(crate) tool: &'a str,
    pub(crate) arguments: &'a Value,
    pub(crate) context: Option<&'a Value>,
}

impl AskedCall<'_> {
    fn hash(&self) -> [u8; 32] {
        let mut arguments = self.arguments.clone();
        // A client may repeat the arguments with keys in another order.
        arguments.sort_all_objects();
        let Caller { agent, tenant, user, .. } = self.caller;
        let mut context = self.context.cloned();
        context.iter_mut().for_each(Value::sort_all_objects);
        let whole = serde_json::json!([agent, tenant, user, self.tool, arguments, context]);
        *blake3::hash(whole.to_string().as_bytes()).as_bytes()
    }
}

/// Builds the elicitation form for a person.
pub(crate) fn form(question: &Confirmation) -> ElicitRequestParams {
    ElicitRequestParams::FormElicitationParams {
        meta: None,
        message: question.in_words(),
        // The form has no fields: accepting it is the answer.
        requested_schema: ElicitationSchema::new(BTreeMap::new()),
    }
}

/// Returns true if the person accepted. Dismissing the form is a refusal.
pub(crate) fn is_accepted(said: &ElicitResult) -> bool {
    said.action == ElicitationAction::Accept
}
