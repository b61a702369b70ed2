//! The tools `thread_push`, `thread_read`, `thread_seek` and `thread_list`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use wieldy_core::name::did_you_mean;
use wieldy_core::{
    CallError, Code, Confinement, Outcome, Provider, Run, RunError, SharedTool, Tool, ToolSpec, parse_since,
};

use super::search::in_one_line;
use super::{
    Entry, EntryPage, Found, ListedThread, NewEntry, Order, PROJECT_DEFAULT, Reading, Seeking, ThreadError, ThreadPage,
    ThreadStatus, Threads,
};
use crate::error::StoreError;

/// The default and the maximum number of entries that are read, found and listed.
const READ_DEFAULT: usize = 50;
const READ_MAX: usize = 500;
const SEEK_DEFAULT: usize = 20;
const SEEK_MAX: usize = 100;
const LIST_DEFAULT: usize = 50;
const LIST_MAX: usize = 200;

/// Returns `thread_push`, `thread_read`, `thread_seek` and `thread_list`.
pub fn thread_tools(threads: Threads) -> Vec<SharedTool> {
    vec![
        Arc::new(ThreadPush(threads.clone())),
        Arc::new(ThreadRead(threads.clone())),
        Arc::new(ThreadSeek(threads.clone())),
        Arc::new(ThreadList(threads)),
    ]
}

/// The tool that appends an entry.
struct ThreadPush(Threads);

/// The tool that reads a thread.
struct ThreadRead(Threads);

/// The tool that searches entries.
struct ThreadSeek(Threads);

/// The tool that lists threads.
struct ThreadList(Threads);

#[derive(Debug, Deserialize, JsonSchema)]
struct PushArgs {
    /// The thread, such as `release-plan`; made if it is new.
    #[schemars(length(min = 1, max = 200))]
    thread_id: String,
    /// The text, up to 256 KiB.
    #[schemars(length(min = 1, max = 262_144))]
    content: String,
    /// `note` (by default), `decision`, `question`, `result`, `error`, or another word of a-z and _. `close` closes the
    /// thread, `reopen` opens it again.
    #[schemars(length(min = 1, max = 40), regex(pattern = "^[a-z_]+$"))]
    entry_type: Option<String>,
    /// The project: your own, unless the operator shares it with you.
    #[schemars(length(min = 1, max = 200))]
    project_id: Option<String>,
    /// A new title of the thread.
    #[schemars(length(min = 1, max = 200))]
    title: Option<String>,
    /// The `seq` of the entry that this one answers.
    #[schemars(range(min = 1))]
    reply_to: Option<i64>,
    /// A repeated key does not write the entry again.
    #[schemars(length(min = 1, max = 200))]
    key: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct ReadArgs {
    /// The thread.
    #[schemars(length(min = 1, max = 200))]
    thread_id: String,
    /// Maximum number of entries: 50 by default.
    #[schemars(range(min = 1, max = 500))]
    limit: Option<usize>,
    /// The project.
    #[schemars(length(min = 1, max = 200))]
    project_id: Option<String>,
    /// Only entries after this `seq`.
    #[schemars(range(min = 0))]
    after: Option<i64>,
    /// Only entries before this `seq`.
    #[schemars(range(min = 1))]
    before: Option<i64>,
    /// `asc` (by default) or `desc`: the latest first.
    order: Option<OrderArg>,
    /// Only entries of this type.
    #[schemars(length(min = 1, max = 40))]
    entry_type: Option<String>,
    /// About this many tokens of content at most.
    #[schemars(range(min = 1))]
    max_tokens: Option<usize>,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum OrderArg {
    Asc,
    Desc,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct SeekArgs {
    /// Words and "phrases" that must all be in an entry; `migrat*` is the beginning of a word.
    #[schemars(length(min = 1, max = 1000))]
    query: String,
    /// Maximum number of entries: 20 by default.
    #[schemars(range(min = 1, max = 100))]
    limit: Option<usize>,
    /// The project.
    #[schemars(length(min = 1, max = 200))]
    project_id: Option<String>,
    /// Only entries since a time such as `2026-11-16T08:00:00Z`, or a time back from now such as `2h`.
    #[schemars(length(max = 64))]
    since: Option<String>,
    /// Only entries of this type.
    #[schemars(length(min = 1, max = 40))]
    entry_type: Option<String>,
    /// Only entries of this thread.
    #[schemars(length(min = 1, max = 200))]
    thread_id: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct ListArgs {
    /// `open` (by default), `closed` or `all`.
    status: Option<StatusArg>,
    /// The project.
    #[schemars(length(min = 1, max = 200))]
    project_id: Option<String>,
    /// Maximum number of threads: 50 by default.
    #[schemars(range(min = 1, max = 200))]
    limit: Option<usize>,
    /// The cursor of the last answer, to read on.
    #[schemars(length(max = 50))]
    cursor: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum StatusArg {
    #[default]
    Open,
    Closed,
    All,
}

impl Tool for ThreadPush {
    type Args = PushArgs;

    fn spec(&self) -> ToolSpec {
        let description = "Appends an entry to a thread: what you want to know later, such as a decision, its reason, \
                           a result or an open question. Entries are never changed.";
        let mut spec = common("thread_push", description, 10).writes("thread_id").permission("threads.write");
        spec.annotations.destructive = false;
        spec
    }

    fn names_of(&self, thread: &str, _: &Confinement) -> Vec<String> {
        vec![name_of(thread)]
    }

    async fn run(&self, args: PushArgs, run: &Run) -> Result<Outcome, RunError> {
        let caller = run.caller().clone();
        let owner = self.0.owner(&caller, project(args.project_id.as_deref())).ok_or_else(nameless)?;
        let PushArgs { thread_id, content, title, reply_to, key, .. } = args;
        let kind = args.entry_type.unwrap_or_else(|| "note".into());
        let entry = NewEntry { thread_id: thread_id.clone(), kind, content, title, reply_to, key };
        let kind = entry.kind.clone();
        let pushed = blocking(&self.0, move |threads| threads.push(&owner, &caller, entry)).await?;
        let mut text = format!("pushed entry {} ({kind}) to `{thread_id}`", pushed.seq);
        text.push_str(if pushed.created { ", a new thread" } else { "" });
        text.push_str(if pushed.repeated { "; it was written before, with the same key" } else { "" });
        if pushed.redacted {
            text.push_str("\n[secrets in it were replaced by [redacted]]");
        }
        let mut structured = json!({
            "status": "ok",
            "thread_id": thread_id,
            "entry_id": format!("{thread_id}#{}", pushed.seq),
            "seq": pushed.seq,
            "created": pushed.created,
            "hash": pushed.hash,
        });
        if pushed.redacted {
            structured["redacted"] = json!(true);
        }
        if pushed.repeated {
            structured["repeated"] = json!(true);
        }
        Ok(Outcome::text(text).structured(structured))
    }
}

impl Tool for ThreadRead {
    type Args = ReadArgs;

    fn spec(&self) -> ToolSpec {
        let description = "Reads the entries of a thread, with type, author and time.";
        common("thread_read", description, 10).read_only().reads("thread_id").permission("threads.read")
    }

    fn names_of(&self, thread: &str, _: &Confinement) -> Vec<String> {
        vec![name_of(thread)]
    }

    async fn run(&self, args: ReadArgs, run: &Run) -> Result<Outcome, RunError> {
        let owner = self.0.owner(run.caller(), project(args.project_id.as_deref())).ok_or_else(nameless)?;
        let reading = Reading {
            thread_id: args.thread_id,
            limit: args.limit.unwrap_or(READ_DEFAULT).clamp(1, READ_MAX),
            after: args.after,
            before: args.before,
            order: match args.order {
                None | Some(OrderArg::Asc) => Order::Ascending,
                Some(OrderArg::Desc) => Order::Descending,
            },
            kind: args.entry_type,
            tokens_max: args.max_tokens,
        };
        let order = reading.order;
        let page = blocking(&self.0, move |threads| threads.read(&owner, &reading)).await?;
        Ok(Outcome::text(page_text(&page, order)).structured(json!(page)))
    }
}

impl Tool for ThreadSeek {
    type Args = SeekArgs;

    fn spec(&self) -> ToolSpec {
        let description = "Searches the entries of your threads, such as earlier decisions, by their words. Those that fit best come first.";
        common("thread_seek", description, 15).read_only().permission("threads.read")
    }

    async fn run(&self, args: SeekArgs, run: &Run) -> Result<Outcome, RunError> {
        let owner = self.0.owner(run.caller(), project(args.project_id.as_deref())).ok_or_else(nameless)?;
        let seeking = Seeking {
            query: args.query,
            limit: args.limit.unwrap_or(SEEK_DEFAULT).clamp(1, SEEK_MAX),
            since: args.since.as_deref().map(parse_since).transpose().map_err(RunError::invalid_input)?,
            kind: args.entry_type,
            thread_id: args.thread_id,
        };
        let found = blocking(&self.0, move |threads| threads.seek(&owner, &seeking)).await?;
        let lines: Vec<String> = found.iter().map(found_line).collect();
        let text = match lines.is_empty() {
            true => {
                "[no entry has all these words; try fewer words, or the beginning of one, such as `migrat*`]".into()
            }
            false => lines.join("\n"),
        };
        Ok(Outcome::text(text).structured(json!({ "results": found })))
    }
}

impl Tool for ThreadList {
    type Args = ListArgs;

    fn spec(&self) -> ToolSpec {
        let description = "Lists your threads, open or closed, with their last entries, the latest first.";
        common("thread_list", description, 10).read_only().permission("threads.read")
    }

    async fn run(&self, args: ListArgs, run: &Run) -> Result<Outcome, RunError> {
        let owner = self.0.owner(run.caller(), project(args.project_id.as_deref())).ok_or_else(nameless)?;
        let status = match args.status.unwrap_or_default() {
            StatusArg::Open => Some(ThreadStatus::Open),
            StatusArg::Closed => Some(ThreadStatus::Closed),
            StatusArg::All => None,
        };
        let limit = args.limit.unwrap_or(LIST_DEFAULT).clamp(1, LIST_MAX);
        let cursor = args.cursor;
        let page = blocking(&self.0, move |threads| threads.list(&owner, status, limit, cursor.as_deref())).await?;
        Ok(Outcome::text(list_text(&page, status)).structured(json!(page)))
    }
}

fn common(name: &str, description: &str, seconds: u64) -> ToolSpec {
    let spec = ToolSpec::new(name, description).category("thread").provider(Provider::Builtin);
    let mut spec = spec.timeout(Duration::from_secs(seconds)).scope("oracle");
    spec.annotations.open_world = false;
    spec
}

/// Returns the name of a thread among the things that calls read and write.
fn name_of(thread: &str) -> String {
    format!("thread:{thread}")
}

fn project(project: Option<&str>) -> &str {
    project.unwrap_or(PROJECT_DEFAULT)
}

/// Returns the error of a caller whose threads cannot be told from those of others.
fn nameless() -> RunError {
    RunError::invalid_input("a caller with an empty tenant or user has no threads")
}

/// Runs blocking work on a thread for such work.
async fn blocking<T: Send + 'static>(
    threads: &Threads,
    work: impl FnOnce(&Threads) -> Result<T, ThreadError> + Send + 'static,
) -> Result<T, RunError> {
    let threads = threads.clone();
    match tokio::task::spawn_blocking(move || work(&threads)).await {
        Ok(done) => done.map_err(run_error),
        Err(_) => Err("the work on the threads was not finished".into()),
    }
}

/// Converts an error for the caller.
fn run_error(error: ThreadError) -> RunError {
    let message = error.to_string();
    let failed = |advice: &str| RunError::from(CallError::new(Code::ExecutionError, &message).suggest(advice));
    match error {
        ThreadError::Missing { near, .. } => {
            let near: Vec<&str> = near.iter().map(String::as_str).collect();
            let mut error = CallError::new(Code::FileNotFound, &message).detail("near", json!(near));
            let advice = did_you_mean(&near).unwrap_or_else(|| "list the threads with `thread_list`".into());
            error.suggestion = Some(advice);
            RunError::from(error).before_effect()
        }
        ThreadError::Refused { suggestion, .. } => RunError::invalid_input(&message).suggest(suggestion),
        ThreadError::Unknown(_) => {
            failed("read the thread before you push again; with a `key`, pushing again writes the entry only once")
        }
        ThreadError::Store(StoreError::Full(_)) => {
            failed("nothing was written: have a person free disk space, then repeat the call").before_effect()
        }
        ThreadError::Store(StoreError::Unavailable(_)) => {
            let advice = "nothing was written: repeat the call in a moment; if it fails again, have a person check \
                          that the database can be reached and written, and that the disk has free space";
            failed(advice).before_effect()
        }
        ThreadError::Store(error) => failed(error.suggestion()).before_effect(),
    }
}

/// Formats entries for a model.
fn page_text(page: &EntryPage, order: Order) -> String {
    let title = page.title.as_deref().map(|title| format!(" \"{}\"", in_one_line(title))).unwrap_or_default();
    let mut text = format!("`{}`{title}, {}, {} entries", page.thread_id, status_word(page.status), page.total);
    for entry in &page.entries {
        // Each line is marked, so that no content can look like another entry.
        let _ = write!(text, "\n\n{}", heading(entry));
        entry.content.trim_end().lines().for_each(|line| text.push_str(&format!("\n> {line}")));
    }
    if page.cut {
        text.push_str("\n[the entry goes on: raise `max_tokens`]");
    }
    if let Some(cursor) = page.cursor {
        let argument = if order == Order::Ascending { "after" } else { "before" };
        let _ = write!(text, "\n\n[more: read on with `{argument}` {cursor}]");
    }
    text
}

fn heading(entry: &Entry) -> String {
    let Entry { seq, kind, author, at, .. } = entry;
    let reply = entry.reply_to.map(|seq| format!(", answers #{seq}")).unwrap_or_default();
    format!("#{seq} {kind}, {author}, {:.0}{reply}", at.timestamp())
}

fn found_line(found: &Found) -> String {
    let Found { thread_id, seq, kind, snippet, at, .. } = found;
    format!("`{thread_id}` #{seq} {kind}, {:.0}: {snippet}", at.timestamp())
}

/// Formats a list of threads for a model.
fn list_text(page: &ThreadPage, wanted: Option<ThreadStatus>) -> String {
    let line = |thread: &ListedThread| {
        let title = thread.title.as_deref().map(|title| format!(" \"{}\"", in_one_line(title))).unwrap_or_default();
        let status = if wanted.is_none() { format!(", {}", status_word(thread.status)) } else { String::new() };
        let ListedThread { thread_id, entries, last_at, last_line, .. } = thread;
        format!("`{thread_id}`{title}{status}, {entries} entries, {:.0}: {last_line}", last_at.timestamp())
    };
    let mut lines: Vec<String> = page.threads.iter().map(line).collect();
    match &page.cursor {
        Some(cursor) => lines.push(format!("[more: read on with `cursor` {cursor}]")),
        None if lines.is_empty() => lines.push("[no thread]".into()),
        None => {}
    }
    lines.join("\n")
}

fn status_word(status: ThreadStatus) -> &'static str {
    match status {
        ThreadStatus::Open => "open",
        ThreadStatus::Closed => "closed",
    }
}
