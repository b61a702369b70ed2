//! `notify_self`: leaves a note that comes back with a later result, or takes one back.
//!
//! The tool writes nothing but the event of the note. The executor delivers notes, see `Journal::due`.

use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use wieldy_core::{
    Footprint, InjectAt, NewNote, Note, NoteId, NotePriority, Outcome, Provider, Run, RunError, Tool, ToolSpec,
    schema_of,
};

use super::when;

/// A tool that leaves its caller notes.
pub struct NotifySelf {
    zone: TimeZone,
}

/// A note to leave, or one to take back.
#[derive(Deserialize, JsonSchema)]
pub struct NotifySelfArgs {
    /// The text. Required, except with `cancel`.
    #[serde(default)]
    #[schemars(length(min = 1, max = 4000))]
    message: Option<String>,
    /// Urgency.
    #[serde(default)]
    priority: NotePriority,
    /// The kind of note: note, reminder, warning, todo, or another word.
    #[serde(default = "note")]
    #[schemars(regex(pattern = "^[a-z][a-z_]{0,39}$"))]
    category: String,
    /// Not before this time: `2026-11-20T09:00:00Z`, `in 2h`, `tomorrow 9:00`, `friday 17:30 Europe/Berlin`.
    #[serde(default)]
    #[schemars(length(min = 1, max = 100))]
    deliver_at: Option<String>,
    /// The result it comes with: now, next_result, session_start, after_tool:NAME, batch_end, task_end.
    #[serde(default = "next_result")]
    #[schemars(length(min = 1, max = 220))]
    inject_at: String,
    /// Deliver it in other sessions too. Otherwise it ends with this session.
    #[serde(default)]
    persist_cross_session: bool,
    /// Not after this time, written like `deliver_at`.
    #[serde(default)]
    #[schemars(length(min = 1, max = 100))]
    expires_at: Option<String>,
    /// A name: an undelivered note with the same key is replaced.
    #[serde(default)]
    #[schemars(length(min = 1, max = 200))]
    key: Option<String>,
    /// The id of an undelivered note to take back, instead of leaving one.
    #[serde(default)]
    #[schemars(length(min = 1, max = 100))]
    cancel: Option<String>,
}

fn note() -> String {
    "note".into()
}

fn next_result() -> String {
    InjectAt::NextResult.to_string()
}

/// The answer.
#[derive(Serialize, JsonSchema)]
struct Answer {
    status: &'static str,
    /// The id of the note.
    id: String,
    /// The time before which it is not delivered.
    deliver_at: Option<String>,
    /// The result that it comes with.
    inject_at: String,
    /// The number of notes that wait now.
    pending: usize,
}

impl NotifySelf {
    /// Creates the tool. Times without a zone are in this one.
    pub fn new(zone: TimeZone) -> Self {
        Self { zone }
    }

    fn time(&self, argument: &str, text: Option<&str>, now: Timestamp) -> Result<Option<Timestamp>, RunError> {
        let wrong = |error: when::WrongTime| {
            RunError::invalid_input(format!("`{argument}`: {}", error.message)).suggest(error.suggestion)
        };
        text.map(|text| when::parse(text, now, &self.zone).map_err(wrong)).transpose()
    }

    /// Checks the arguments. Times are compared with `now`.
    fn note(&self, args: NotifySelfArgs, message: String, now: Timestamp) -> Result<NewNote, RunError> {
        if message.trim().is_empty() {
            return Err(RunError::invalid_input("the message is empty").suggest("write what you want to be told"));
        }
        let inject_at: InjectAt = args.inject_at.parse().map_err(|error: String| {
            RunError::invalid_input(format!("`inject_at`: {error}")).suggest(format!("use one of: {}", InjectAt::FORMS))
        })?;
        let deliver_at = self.time("deliver_at", args.deliver_at.as_deref(), now)?;
        let expires_at = self.time("expires_at", args.expires_at.as_deref(), now)?;
        if let (Some(end), Some(begin)) = (expires_at, deliver_at)
            && end <= begin
        {
            let message = format!("the note expires at {end}, before it is due at {begin}");
            return Err(RunError::invalid_input(message).suggest("let `expires_at` be later than `deliver_at`"));
        }
        if inject_at == InjectAt::SessionStart && !args.persist_cross_session {
            let message = "the note would end with this session, before another one starts";
            return Err(RunError::invalid_input(message).suggest("set `persist_cross_session` to true"));
        }
        let (priority, category, key) = (args.priority, args.category, args.key);
        let persist_cross_session = args.persist_cross_session;
        Ok(NewNote { message, priority, category, deliver_at, inject_at, persist_cross_session, expires_at, key })
    }
}

impl Tool for NotifySelf {
    type Args = NotifySelfArgs;

    fn spec(&self) -> ToolSpec {
        let mut spec = ToolSpec::new(
            "notify_self",
            "Leaves yourself a note or a reminder, which comes back at the end of a later result, at a time or event \
             that you choose. Only you get it.",
        )
        .category("meta")
        .provider(Provider::Builtin)
        .permission("notes.write")
        .scope("oracle")
        .timeout(Duration::from_secs(5));
        spec.annotations.destructive = false;
        spec.annotations.open_world = false;
        spec.footprint = Some(Footprint::default());
        spec.output_schema = Some(schema_of::<Answer>());
        spec
    }

    async fn run(&self, args: NotifySelfArgs, run: &Run) -> Result<Outcome, RunError> {
        let now = Timestamp::now();
        match (&args.message, &args.cancel) {
            (None, Some(id)) => {
                let wrong = || {
                    RunError::invalid_input("`cancel` must be the id of a note")
                        .suggest("the answer to `notify_self` had it")
                };
                let id: NoteId = id.parse().map_err(|_| wrong())?;
                let note = run.cancel_note(id)?;
                Ok(answer(&note, run, format!("note {id} is taken back")))
            }
            (Some(message), None) => {
                let message = message.clone();
                let note = run.leave_note(self.note(args, message.clone(), now)?)?;
                let mut text = format!("note {} {}", note.id, told(&note));
                if note.message != message {
                    text.push_str("; secrets were taken out of its message");
                }
                Ok(answer(&note, run, text))
            }
            (Some(_), Some(_)) => {
                let error = RunError::invalid_input("a call leaves a note or takes one back, not both");
                Err(error.suggest("leave out `message` or `cancel`; to replace a note, give both the same `key`"))
            }
            (None, None) => {
                Err(RunError::invalid_input("`message` is missing").suggest("write what you want to be told"))
            }
        }
    }
}

/// Says when a note comes.
fn told(note: &Note) -> String {
    let with = match &note.inject_at {
        InjectAt::Now | InjectAt::NextResult => "with the next result".to_owned(),
        InjectAt::SessionStart => "with the first result of another session".to_owned(),
        InjectAt::AfterTool(tool) => format!("with the next result of `{tool}`"),
        InjectAt::BatchEnd => "at the end of the next batch".to_owned(),
        InjectAt::TaskEnd => "with the next result of a task".to_owned(),
    };
    match note.deliver_at {
        None => format!("comes {with}"),
        Some(at) => format!("comes {with} from {at:.0} on"),
    }
}

fn answer(note: &Note, run: &Run, text: String) -> Outcome {
    let (id, inject_at, pending) = (note.id.to_string(), note.inject_at.to_string(), run.notes_pending());
    let deliver_at = note.deliver_at.map(|at| at.to_string());
    Outcome::text(format!("{text}; {pending} pending")).structured(json!(Answer {
        status: "ok",
        id,
        deliver_at,
        inject_at,
        pending
    }))
}
