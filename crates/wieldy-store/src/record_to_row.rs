//! The change that a record makes to the row of its call. It is computed from the event where that is fast, and parsed
//! from the trail otherwise. Both must give the same, or `verify` fails.

use std::borrow::Cow;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use wieldy_core::{Body, Closing, Event, Keyed, redact};

/// The change that a record makes to the row of its call.
#[derive(Debug, Clone)]
pub(crate) enum RowChange {
    Unchanged,
    Opened(Box<Opened>),
    /// The call is a task from now on.
    BecameTask,
    Started {
        attempt: i64,
        keyed: Option<Box<Keyed>>,
    },
    InputRequired,
    InputReceived,
    Closed(Box<Closed>),
}

/// The opening of a call.
#[derive(Debug, Clone)]
pub(crate) struct Opened {
    pub(crate) subject: StoredSubject<'static>,
    pub(crate) parameters: String,
    /// The requested name, if it is not the tool's own.
    pub(crate) called_as: Option<String>,
    pub(crate) workspace: Option<String>,
    pub(crate) provider: Option<String>,
    /// The caller's metadata.
    pub(crate) metadata: Option<Value>,
    pub(crate) is_task: bool,
    pub(crate) is_rerun: bool,
}

/// The call and the caller that a record is about.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct StoredSubject<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) execution_id: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) batch_id: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) call_id: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool: Option<Cow<'a, str>>,
    pub(crate) agent: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) session: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) user: Option<Cow<'a, str>>,
}

impl<'a> StoredSubject<'a> {
    /// Returns the subject of an event, without secrets.
    pub(crate) fn of(event: &'a Event) -> Self {
        let (subject, caller) = (&event.subject, &event.subject.caller);
        let clean = |text: &'a Option<String>| text.as_deref().map(redact::text);
        Self {
            execution_id: subject.execution.map(|id| id.to_string().into()),
            batch_id: subject.batch.map(|id| id.to_string().into()),
            call_id: clean(&subject.call_id),
            tool: subject.tool.as_deref().map(redact::text),
            agent: redact::text(&caller.agent),
            tenant: clean(&caller.tenant),
            session: clean(&caller.session),
            user: clean(&caller.user),
        }
    }

    fn into_owned(self) -> StoredSubject<'static> {
        let own = |text: Option<Cow<'_, str>>| text.map(|text| Cow::Owned(text.into_owned()));
        StoredSubject {
            execution_id: own(self.execution_id),
            batch_id: own(self.batch_id),
            call_id: own(self.call_id),
            tool: own(self.tool),
            agent: Cow::Owned(self.agent.into_owned()),
            tenant: own(self.tenant),
            session: own(self.session),
            user: own(self.user),
        }
    }
}

/// The closing of a call.
#[derive(Debug, Clone)]
pub(crate) struct Closed {
    pub(crate) status: Cow<'static, str>,
    pub(crate) error_code: Option<String>,
    pub(crate) error_message: Option<String>,
    pub(crate) duration_ms: f64,
    pub(crate) output_bytes: i64,
    pub(crate) attempts: i64,
    pub(crate) sandbox: Option<String>,
    pub(crate) usage: Option<String>,
    /// The size and the hash of the recorded result.
    pub(crate) result: Option<ResultFacts>,
    /// Facts that go to the row's metadata.
    pub(crate) rest: Map<String, Value>,
}

/// The size of a recorded result in bytes, and its hash in hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResultFacts {
    pub(crate) bytes: i64,
    pub(crate) hash: String,
}

impl ResultFacts {
    fn of(closing: &Closing) -> Option<Self> {
        let recorded = closing.recorded.as_ref()?;
        Some(Self { bytes: recorded.json.len() as i64, hash: recorded.hash.to_hex().to_string() })
    }

    /// Returns true if this is a result with the hash.
    pub(crate) fn fits(&self, json: &str) -> bool {
        blake3::hash(json.as_bytes()).to_hex().as_str() == self.hash
    }
}

/// The facts of an opening that the row needs, as they are parsed.
#[derive(Deserialize)]
struct OpeningFacts {
    called_as: Option<String>,
    workspace: Option<String>,
    provider: Option<String>,
    metadata: Option<Value>,
    #[serde(default)]
    task: bool,
    rerun: Option<IgnoredAny>,
}

/// The beginning of an opening's facts, before the arguments.
const ARGUMENTS: &str = "{\"arguments\":";

#[derive(Deserialize)]
struct StartFacts {
    attempt: i64,
    keyed: Option<Box<Keyed>>,
}

#[derive(Deserialize)]
struct ClosingFacts<'a> {
    #[serde(borrow)]
    status: Cow<'a, str>,
    duration_ms: f64,
    #[serde(default)]
    queued_ms: f64,
    attempts: i64,
    #[serde(default)]
    cached: bool,
    #[serde(default)]
    output_bytes: i64,
    artifact: Option<Value>,
    usage: Option<Value>,
    sandbox: Option<SandboxFacts>,
    error: Option<ErrorFacts>,
    result: Option<ResultFacts>,
}

#[derive(Deserialize)]
struct SandboxFacts {
    id: String,
    level: Value,
}

#[derive(Deserialize)]
struct ErrorFacts {
    code: String,
    message: String,
}

/// Maximum number of bytes of arguments that are stored; of longer ones only the size and the hash are.
const ARGUMENTS_BYTES_MAX: usize = 1024 * 1024;

impl RowChange {
    /// Returns the change that an event makes, and its facts as they are stored: without secrets.
    pub(crate) fn of_event(event: &Event) -> (Self, String) {
        match &event.body {
            Body::CallPending { .. } => Self::of_opening(event),
            Body::CallStarted { attempt, keyed, .. } => {
                let keyed = keyed.as_ref().map(|keyed| Box::new(Keyed::clone(keyed)));
                (Self::Started { attempt: i64::from(*attempt), keyed }, to_json(&event.body))
            }
            Body::CallSuccess(closing) if closing.error.is_none() => {
                let closed = Closed::of_success(closing);
                let data = with_result(to_json(&event.body), closed.result.as_ref());
                (Self::Closed(Box::new(closed)), data)
            }
            body => {
                let result = body.closing().and_then(ResultFacts::of);
                let data = with_result(event.data().to_string(), result.as_ref());
                (Self::parse(event.body.name(), None, &data), data)
            }
        }
    }

    fn of_opening(event: &Event) -> (Self, String) {
        let Body::CallPending { arguments, called_as, workspace, metadata, task, rerun } = &event.body else {
            unreachable!("an opening is asked for where there is one")
        };
        let mut parameters = to_json(&*arguments.value());
        let is_cut = parameters.len() > ARGUMENTS_BYTES_MAX;
        if is_cut {
            let hash = blake3::hash(parameters.as_bytes()).to_hex();
            parameters = json!({"omitted_bytes": parameters.len(), "blake3": hash.as_str()}).to_string();
        }
        // Built by hand, because arguments may be long and are needed on their own, too.
        let mut data = format!("{ARGUMENTS}{parameters}");
        if let Some(name) = called_as {
            data.push_str(&format!(",\"called_as\":{}", json!(name)));
        }
        if let Some(folder) = workspace {
            data.push_str(&format!(",\"workspace\":{}", json!(folder)));
        }
        let provider = event.subject.provider.as_deref().map(|provider| redact::text(provider).into_owned());
        if let Some(provider) = &provider {
            data.push_str(&format!(",\"provider\":{}", json!(provider)));
        }
        let metadata = metadata.as_ref().map(|metadata| metadata.value().into_owned());
        if let Some(metadata) = &metadata {
            data.push_str(&format!(",\"metadata\":{metadata}"));
        }
        if *task {
            data.push_str(",\"task\":true");
        }
        // True if the stored arguments or caller are incomplete, so that the call cannot be run again.
        let mut is_incomplete = is_cut || rerun.is_some() && !arguments.is_whole();
        if let Some(caller) = rerun {
            let caller = json!(caller);
            let shown = redact::value(&caller);
            is_incomplete |= *shown != caller;
            data.push_str(&format!(",\"rerun\":{shown}"));
        }
        if is_incomplete {
            data.push_str(",\"hidden\":true");
        }
        data.push('}');
        let subject = StoredSubject::of(event).into_owned();
        let [called_as, workspace] = [called_as, workspace].map(|text| text.as_deref().map(str::to_owned));
        let (is_task, is_rerun) = (*task, rerun.is_some());
        let opened = Opened { subject, parameters, called_as, workspace, provider, metadata, is_task, is_rerun };
        (Self::Opened(Box::new(opened)), data)
    }

    /// Returns the change that a stored record makes. An unreadable record makes none, so `verify` finds that the row
    /// differs.
    pub(crate) fn parse(name: &str, subject: Option<&str>, data: &str) -> Self {
        Self::parse_or_none(name, subject, data).unwrap_or(Self::Unchanged)
    }

    fn parse_or_none(name: &str, subject: Option<&str>, data: &str) -> Option<Self> {
        Some(match name {
            "tool.call.pending" => {
                let read: OpeningFacts = serde_json::from_str(data).ok()?;
                let subject: StoredSubject<'_> = serde_json::from_str(subject?).ok()?;
                let after = data.strip_prefix(ARGUMENTS)?;
                let mut arguments = serde_json::Deserializer::from_str(after).into_iter::<IgnoredAny>();
                arguments.next()?.ok()?;
                Self::Opened(Box::new(Opened {
                    subject: subject.into_owned(),
                    parameters: after[..arguments.byte_offset()].to_owned(),
                    called_as: read.called_as,
                    workspace: read.workspace,
                    provider: read.provider,
                    metadata: read.metadata,
                    is_task: read.task,
                    is_rerun: read.rerun.is_some(),
                }))
            }
            "tool.call.task" => Self::BecameTask,
            "tool.call.started" => {
                let StartFacts { attempt, keyed } = serde_json::from_str(data).ok()?;
                Self::Started { attempt, keyed }
            }
            "tool.call.confirmation.requested" => Self::InputRequired,
            "tool.call.confirmation.received" => Self::InputReceived,
            "tool.call.success" | "tool.call.failure" | "tool.call.timeout" | "tool.call.cancelled" => {
                Self::Closed(Box::new(Closed::from_facts(serde_json::from_str(data).ok()?)))
            }
            _ => Self::Unchanged,
        })
    }
}

/// Adds the hash of the recorded result to the facts of a closing, so that it is part of the hash chain.
fn with_result(mut data: String, result: Option<&ResultFacts>) -> String {
    if let Some(result) = result {
        let end = data.pop();
        debug_assert_eq!(end, Some('}'), "facts are an object");
        data.push_str(&format!(",\"result\":{}}}", to_json(result)));
    }
    data
}

fn to_json(facts: &impl Serialize) -> String {
    serde_json::to_string(facts).expect("events are plain data")
}

impl Closed {
    /// Returns the closing of a successful call.
    fn of_success(closing: &Closing) -> Self {
        let sandbox = closing.sandbox.as_ref();
        let level = sandbox.map(|sandbox| json!(sandbox.level));
        let artifact = closing.artifact.as_ref().map(|artifact| json!(artifact));
        Self {
            status: Cow::Borrowed(closing.status.as_str()),
            error_code: None,
            error_message: None,
            duration_ms: closing.duration_ms,
            output_bytes: i64::try_from(closing.output_bytes).unwrap_or(i64::MAX),
            attempts: i64::from(closing.attempts),
            sandbox: sandbox.map(|sandbox| sandbox.id.0.clone()),
            usage: closing.usage.as_ref().map(to_json),
            result: ResultFacts::of(closing),
            rest: further_facts(closing.queued_ms, closing.cached, artifact, level),
        }
    }

    fn from_facts(read: ClosingFacts<'_>) -> Self {
        let (sandbox, level) = read.sandbox.map(|sandbox| (sandbox.id, sandbox.level)).unzip();
        let (error_code, error_message) = read.error.map(|error| (error.code, error.message)).unzip();
        Self {
            status: Cow::Owned(read.status.into_owned()),
            error_code,
            error_message,
            duration_ms: read.duration_ms,
            output_bytes: read.output_bytes,
            attempts: read.attempts,
            sandbox,
            usage: read.usage.map(|usage| usage.to_string()),
            result: read.result,
            rest: further_facts(read.queued_ms, read.cached, read.artifact, level),
        }
    }
}

fn further_facts(queued_ms: f64, cached: bool, artifact: Option<Value>, level: Option<Value>) -> Map<String, Value> {
    let facts = [
        ("queued_ms", (queued_ms != 0.0).then(|| json!(queued_ms))),
        ("cached", cached.then_some(Value::Bool(true))),
        ("artifact", artifact),
        ("level", level),
    ];
    facts.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}
