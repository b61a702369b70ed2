//! Confirmation: asks a person to agree to one exact call. An answer counts once and only in time, and a waiting call
//! holds no slot.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::build::Inner;
use crate::call::{ConfirmationId, ExecutionId, Options};
use crate::confinement::{Confinement, Network};
use crate::error::{CallError, Code};
use crate::event::Body;
use crate::flight::Flight;
use crate::input::{Input, canonical};
use crate::policy::Grant;
use crate::present::{shown, shown_in_line};
use crate::program::{AgreedProgram, Program};
use crate::registry::Registered;
use crate::sandbox::Level;
use crate::terms::Terms;
use crate::tool::ToolSpec;

/// The longest title that is shown. The title may come from an untrusted server.
const TITLE_CHARS_MAX: usize = 64;

/// A way to ask a person.
pub trait Confirmer: Send + Sync + 'static {
    /// Asks the person. The future is dropped when the question expires or the call is cancelled.
    fn confirm<'a>(&'a self, question: &'a Confirmation) -> BoxFuture<'a, Result<Answer, String>>;
}

impl fmt::Debug for dyn Confirmer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Confirmer")
    }
}

/// The question to a person: may exactly this call run?
#[derive(Debug, Clone, PartialEq)]
pub struct Confirmation {
    /// The id of the question. The answer must name it.
    pub id: ConfirmationId,
    /// The call that the question is about.
    pub execution: ExecutionId,
    /// The tool's definition.
    pub tool: ToolSpec,
    /// The arguments that will run.
    pub arguments: Arc<Value>,
    /// The call's context, without its secrets, if it has one.
    pub context: Option<Value>,
    /// The reason why a person must agree.
    pub reason: String,
    /// The program that the call would start, if it starts one.
    pub program: Option<Program>,
    /// The isolation level of the call's programs.
    pub isolation: Level,
    /// The network that the call's programs may reach.
    pub network: Network,
    /// The digest of tool, arguments, context, program and terms that the person agrees to.
    pub digest: Digest,
    /// The time after which the question expires.
    pub expires_in: Duration,
}

impl Confirmation {
    /// Returns the answer "yes, exactly this".
    pub fn approve(&self) -> Answer {
        Answer { confirmation: self.id, digest: self.digest, approved: true, by: None }
    }

    /// Returns the answer "no".
    pub fn refuse(&self) -> Answer {
        Answer { approved: false, ..self.approve() }
    }

    /// Returns the question as text, the same for every door, with hidden characters escaped. It shows the arguments in
    /// full, because a person cannot agree to what is not shown.
    pub fn in_words(&self) -> String {
        let title = self.tool.title.as_ref().map(|title| title.chars().take(TITLE_CHARS_MAX).collect::<String>());
        let title = title.map(|title| format!(" ({})", shown_in_line(&title))).unwrap_or_default();
        let (name, reason) = (shown_in_line(&self.tool.name), shown_in_line(&self.reason));
        let mut lines = vec![format!("May the tool `{name}`{title} run ({reason})?")];
        let arguments = serde_json::to_string_pretty(&*self.arguments).expect("arguments are plain data");
        lines.extend(arguments.split('\n').map(|line| format!("  {}", shown_in_line(line))));
        if let Some(context) = &self.context {
            lines.push(format!("  in the context: {}", shown_in_line(&context.to_string())));
        }
        if let Some(program) = &self.program {
            lines.push(format!("  command line: {}", shown(&program.command_line)));
            lines.push(format!("  folder: {}", shown_in_line(&program.folder.to_string_lossy())));
            let (isolation, network) = match self.isolation {
                Level::None => ("none, so it runs with the rights of this user".into(), "not limited".into()),
                level => (level.to_string(), shown_in_line(&self.network.to_string())),
            };
            lines.push(format!("  isolation: {isolation}"));
            lines.push(format!("  network: {network}"));
            if !program.files.is_empty() {
                let files: Vec<String> = program.files.iter().map(|file| shown_in_line(&file.path)).collect();
                lines.push(format!("  files that must not change until it starts: {}", files.join(", ")));
            }
            if program.unchecked > 0 {
                let count = program.unchecked;
                lines.push(format!("  names that were not checked, so their files may change: {count}"));
            }
        }
        lines.push(String::new());
        lines.join("\n")
    }
}

/// The person's answer, bound to its question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The question that is answered.
    pub confirmation: ConfirmationId,
    /// The digest of the question, as the person saw it.
    pub digest: Digest,
    /// True for yes.
    pub approved: bool,
    /// The person who answered.
    pub by: Option<String>,
}

/// A strong hash of a tool's definition, its arguments and context, the options of the call, the isolation level and
/// network that it gets, and the program that it starts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(blake3::Hash);

impl Digest {
    fn of(
        tool: &ToolSpec,
        input: &Input,
        options: &Options,
        context: Option<&Value>,
        effective: (Level, &Network),
        program: Option<&Program>,
    ) -> Self {
        // Everything that affects what the call does. Decide for each new field of `Options` if it belongs here.
        let asked = json!({
            "timeout": options.timeout.map(|timeout| timeout.as_micros().to_string()),
            "retries": options.retries,
            "limits": options.limits,
            "isolation": options.isolation,
            "network": options.network,
            "isolation_and_network": effective,
            "program": program.map(Program::facts),
        });
        let mut bytes = tool.hash().as_bytes().to_vec();
        canonical(input.value(), &mut bytes);
        canonical(&asked, &mut bytes);
        if let Some(context) = context {
            canonical(context, &mut bytes);
        }
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

/// The proof that a person agreed, or that no agreement is needed. Only this module makes it; a slot requires it.
#[derive(Debug)]
pub struct Consent {
    execution: ExecutionId,
}

/// The reason why a required agreement is missing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoConsent {
    /// There is no way to ask a person.
    #[error("a person must agree to this call ({reason}), and there is no way to ask")]
    NoConfirmer {
        /// The reason why a person must agree.
        reason: String,
    },
    /// The person said no.
    #[error("the call was not confirmed")]
    Refused,
    /// There was no answer in time.
    #[error("nobody confirmed the call within {0:?}")]
    Expired(Duration),
    /// The answer was for another question.
    #[error("the confirmation was given for another call or for other arguments")]
    Mismatch,
    /// A file that the person agreed to has changed or is gone.
    #[error("{0} changed after the call was confirmed")]
    Changed(String),
    /// The confirmer failed.
    #[error("nobody could be asked to confirm the call: {0}")]
    Failed(String),
}

impl From<NoConsent> for CallError {
    fn from(refusal: NoConsent) -> Self {
        let message = refusal.to_string();
        let (code, cause, suggestion) = match refusal {
            NoConsent::NoConfirmer { .. } => {
                (Code::ConfirmationRequired, "nobody_to_ask", "ask the person to run it, or to allow confirmations")
            }
            NoConsent::Refused => (Code::ConfirmationDenied, "refused", "do it another way, or ask the person why"),
            NoConsent::Expired(_) => {
                (Code::ConfirmationDenied, "expired", "call again when a person is there to answer")
            }
            NoConsent::Mismatch => (Code::ConfirmationDenied, "mismatch", "call again and confirm the new call"),
            NoConsent::Changed(_) => {
                (Code::ConfirmationDenied, "changed", "read it again, then repeat the call and confirm the new one")
            }
            NoConsent::Failed(_) => (Code::ConfirmationDenied, "failed", "call again when the person can be reached"),
        };
        CallError::new(code, message).suggest(suggestion).detail("cause", cause)
    }
}

impl Consent {
    /// Returns the consent for a call that needs no agreement, or `None` if a person must agree.
    pub(crate) fn not_needed(grant: &Grant, tool: &ToolSpec, options: &Options) -> Option<Self> {
        Self::reason(grant, tool, options).is_none().then_some(Self { execution: grant.execution() })
    }

    pub(crate) fn execution(&self) -> ExecutionId {
        self.execution
    }

    /// Returns the reason why a person must agree, if one must.
    fn reason<'a>(grant: &'a Grant, tool: &ToolSpec, options: &Options) -> Option<&'a str> {
        let by_tool = || tool.requires_confirmation.then_some("the tool requires it");
        let by_caller = || options.require_confirmation.then_some("the caller wants it");
        grant.ask().or_else(by_tool).or_else(by_caller)
    }

    /// Asks a person and waits for the answer. The future is dropped when the call is cancelled or its deadline passes.
    pub(crate) async fn ask(
        engine: &Inner,
        flight: &Flight,
        grant: &Grant,
        tool: &Registered,
        input: &Input,
        options: &Options,
        terms: &Terms,
    ) -> Result<Self, CallError> {
        let reason = Self::reason(grant, &tool.spec, options).unwrap_or("it was asked for").to_owned();
        let confirmer = options.confirmer.as_ref().or(engine.confirmer.as_ref());
        let Some(confirmer) = confirmer else { return Err(NoConsent::NoConfirmer { reason }.into()) };
        let confinement = terms.confinement.as_ref().unwrap_or(&engine.confinement);
        let program = describe_program(tool, input, confinement).await?;
        let (isolation, network, expires_in) = (terms.level, confinement.network.clone(), engine.confirmation_timeout);
        let question = Confirmation {
            id: ConfirmationId::next(),
            execution: flight.id,
            tool: tool.spec.clone(),
            arguments: Arc::clone(input.shared()),
            context: flight.redacted_context(),
            reason,
            digest: Digest::of(
                &tool.spec,
                input,
                options,
                flight.context.as_deref(),
                (isolation, &network),
                program.as_ref(),
            ),
            program,
            isolation,
            network,
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
                Err(_) => Err(NoConsent::Failed("the confirmer panicked".into())),
            },
        };
        let by = answer.as_ref().ok().and_then(|answer| answer.by.clone());
        let decision = answer.and_then(|answer| Self::check_answer(&question, &answer));
        let approved = decision.is_ok();
        // If the answer cannot be recorded, it does not count.
        flight.record(Body::ConfirmationReceived { confirmation: question.id, approved, by }).taken()?;
        decision?;
        if let Some(program) = question.program {
            let (tool, arguments) = (Arc::clone(&tool.tool), question.arguments);
            let agreed = AgreedProgram { tool, arguments, confinement: Arc::clone(confinement), program };
            // A call asks only once, so `set` cannot fail.
            let _ = flight.agreed.set(Arc::new(agreed));
        }
        Ok(Self { execution: flight.id })
    }

    /// Checks that the answer is for exactly this question, so that it cannot be replayed or used for another call.
    fn check_answer(question: &Confirmation, answer: &Answer) -> Result<(), NoConsent> {
        if answer.confirmation != question.id || answer.digest != question.digest {
            return Err(NoConsent::Mismatch);
        }
        if answer.approved { Ok(()) } else { Err(NoConsent::Refused) }
    }
}

/// Asks the tool which program it would start. A tool is foreign code, so a panic is an error of the call.
async fn describe_program(
    tool: &Registered,
    input: &Input,
    confinement: &Confinement,
) -> Result<Option<Program>, CallError> {
    let asked = AssertUnwindSafe(async { tool.tool.program(input.value(), confinement).await }).catch_unwind();
    match asked.await {
        Ok(program) => program.map_err(|error| *error.error),
        Err(_) => Err(CallError::new(Code::ExecutionError, "the tool panicked when it was asked for its program")),
    }
}
