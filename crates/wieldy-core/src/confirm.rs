//! Confirmation: a person agrees to exactly this call, once, in time. No slot is held while waiting.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::call::{ConfirmationId, ExecutionId, Options};
use crate::error::{CallError, Code};
use crate::event::Body;
use crate::flight::Flight;
use crate::input::{Input, canonical};
use crate::policy::Grant;
use crate::tool::ToolSpec;

/// Somebody who can be asked.
pub trait Confirmer: Send + Sync + 'static {
    /// Asks. Dropped when the question expires or the call is cancelled.
    fn confirm<'a>(&'a self, question: &'a Confirmation) -> BoxFuture<'a, Result<Answer, String>>;
}

impl fmt::Debug for dyn Confirmer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Confirmer")
    }
}

/// The question: may exactly this run?
#[derive(Debug, Clone, PartialEq)]
pub struct Confirmation {
    /// Which question this is; the answer must name it.
    pub id: ConfirmationId,
    /// Which call it is about.
    pub execution: ExecutionId,
    /// What the tool declares.
    pub tool: ToolSpec,
    /// The arguments that will run.
    pub arguments: Arc<Value>,
    /// Why somebody has to agree.
    pub reason: String,
    /// What exactly is agreed to: tool, arguments and terms.
    pub digest: Digest,
    /// How long the question stands.
    pub expires_in: Duration,
}

impl Confirmation {
    /// The answer "yes, exactly this".
    pub fn approve(&self) -> Answer {
        Answer { confirmation: self.id, digest: self.digest, approved: true, by: None }
    }

    /// The answer "no".
    pub fn refuse(&self) -> Answer {
        Answer { approved: false, ..self.approve() }
    }
}

/// What the person said, and to what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Which question is answered.
    pub confirmation: ConfirmationId,
    /// What exactly was seen.
    pub digest: Digest,
    /// Yes or no.
    pub approved: bool,
    /// Who said so.
    pub by: Option<String>,
}

/// A strong hash of a tool's definition, its arguments and the terms it runs under.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(blake3::Hash);

impl Digest {
    pub(crate) fn of(tool: &ToolSpec, input: &Input, options: &Options) -> Self {
        // Everything that changes what would happen; a new field of `Options` must be judged here.
        let terms = json!({
            "timeout": options.timeout.map(|timeout| timeout.as_micros().to_string()),
            "retries": options.retries,
            "limits": options.limits,
            "isolation": options.isolation,
            "network": options.network,
        });
        let mut bytes = tool.hash().as_bytes().to_vec();
        canonical(input.value(), &mut bytes);
        canonical(&terms, &mut bytes);
        Self(blake3::hash(&bytes))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The proof that nobody has to agree, or somebody did. Made only here; a slot asks for it.
#[derive(Debug)]
pub struct Consent {
    execution: ExecutionId,
}

/// Why nobody agreed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoConsent {
    /// There is nobody to ask.
    #[error("a person must agree to this call ({reason}), and there is no way to ask")]
    Nobody {
        /// Why somebody must agree.
        reason: String,
    },
    /// The person said no.
    #[error("the call was not confirmed")]
    Refused,
    /// Nobody answered in time.
    #[error("nobody confirmed the call within {0:?}")]
    Expired(Duration),
    /// The answer was for something else.
    #[error("the confirmation was given for another call or for other arguments")]
    Mismatch,
    /// Asking failed.
    #[error("nobody could be asked to confirm the call: {0}")]
    Failed(String),
}

impl From<NoConsent> for CallError {
    fn from(refusal: NoConsent) -> Self {
        let message = refusal.to_string();
        let (code, cause, suggestion) = match refusal {
            NoConsent::Nobody { .. } => {
                (Code::ConfirmationRequired, "nobody_to_ask", "ask the person to run it, or to allow confirmations")
            }
            NoConsent::Refused => (Code::ConfirmationDenied, "refused", "do it another way, or ask the person why"),
            NoConsent::Expired(_) => {
                (Code::ConfirmationDenied, "expired", "call again when somebody is there to answer")
            }
            NoConsent::Mismatch => (Code::ConfirmationDenied, "mismatch", "call again and confirm that very call"),
            NoConsent::Failed(_) => (Code::ConfirmationDenied, "failed", "call again when the person can be reached"),
        };
        CallError::new(code, message).suggest(suggestion).detail("cause", cause)
    }
}

impl Consent {
    /// For a call that nobody has to agree to.
    pub(crate) fn not_needed(grant: &Grant, tool: &ToolSpec, options: &Options) -> Option<Self> {
        Self::reason(grant, tool, options).is_none().then_some(Self { execution: grant.execution() })
    }

    pub(crate) fn execution(&self) -> ExecutionId {
        self.execution
    }

    /// Why somebody must agree, if so.
    fn reason<'a>(grant: &'a Grant, tool: &ToolSpec, options: &Options) -> Option<&'a str> {
        let by_tool = || tool.requires_confirmation.then_some("the tool requires it");
        let by_caller = || options.require_confirmation.then_some("the caller wants it");
        grant.ask().or_else(by_tool).or_else(by_caller)
    }

    /// Asks somebody, and waits. Dropped when the call is cancelled or its deadline passes.
    pub(crate) async fn ask(
        flight: &Flight,
        grant: &Grant,
        tool: &ToolSpec,
        input: &Input,
        options: &Options,
        confirmer: Option<&Arc<dyn Confirmer>>,
        expires_in: Duration,
    ) -> Result<Self, CallError> {
        let reason = Self::reason(grant, tool, options).unwrap_or("it was asked for").to_owned();
        let Some(confirmer) = confirmer else { return Err(NoConsent::Nobody { reason }.into()) };
        let question = Confirmation {
            id: ConfirmationId::next(),
            execution: flight.id,
            tool: tool.clone(),
            arguments: Arc::clone(input.shared()),
            reason,
            digest: Digest::of(tool, input, options),
            expires_in,
        };
        let asking = Body::ConfirmationRequested {
            confirmation: question.id,
            digest: question.digest.to_string(),
            reason: question.reason.clone(),
            expires_in_ms: u64::try_from(expires_in.as_millis()).unwrap_or(u64::MAX),
        };
        flight.record(asking).taken()?;
        let expiry = Instant::now() + expires_in;
        let asked = AssertUnwindSafe(async { confirmer.confirm(&question).await }).catch_unwind();
        let answer = tokio::select! {
            biased;
            () = tokio::time::sleep_until(expiry) => Err(NoConsent::Expired(expires_in)),
            answer = asked => match answer {
                Ok(answer) => answer.map_err(NoConsent::Failed),
                Err(_) => Err(NoConsent::Failed("whoever was asked panicked".into())),
            },
        };
        let by = answer.as_ref().ok().and_then(|answer| answer.by.clone());
        let decision = answer.and_then(|answer| Self::weigh(&question, &answer));
        let approved = decision.is_ok();
        // What nobody could look up later counts for nothing now.
        flight.record(Body::ConfirmationReceived { confirmation: question.id, approved, by }).taken()?;
        decision?;
        Ok(Self { execution: flight.id })
    }

    /// An answer counts only for the very question that was asked: so it cannot be used twice or for something else.
    fn weigh(question: &Confirmation, answer: &Answer) -> Result<(), NoConsent> {
        if answer.confirmation != question.id || answer.digest != question.digest {
            return Err(NoConsent::Mismatch);
        }
        if answer.approved { Ok(()) } else { Err(NoConsent::Refused) }
    }
}
