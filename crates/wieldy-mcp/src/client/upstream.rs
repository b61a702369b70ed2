//! One upstream server: started once on demand, restarted with backoff when it fails, its tools known even while it is
//! down.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;
use wieldy_core::{CallError, Code, Executor, Missing, RegisterError, Registration, RunError, Sandbox};

use super::failure::Failure;
use super::pins::{PinnedTool, Pins};
use super::settings::{OnChange, Reach, ServerSettings, Start};
use super::tool::UpstreamTool;
use super::tool_definition::ToolDefinition;
use super::upstream_session::UpstreamSession;

/// The shortest pause after a failure. It doubles with each further failure.
const PAUSE_MIN: Duration = Duration::from_millis(500);
/// The longest pause if a call needs the server or it should always run.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// The longest pause before a server whose tools are not known is retried without a call.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(15 * 60);
/// A server that ran this long did not fail to start.
const STARTUP_OVER_AFTER: Duration = Duration::from_secs(10);
/// The shortest interval between two tool lists after change notifications.
const LIST_INTERVAL_MIN: Duration = Duration::from_secs(1);

/// One upstream server.
pub(super) struct Upstream {
    pub(super) settings: ServerSettings,
    /// The slots for calls.
    pub(super) slots: Semaphore,
    sandbox: Option<Arc<dyn Sandbox>>,
    pins: Arc<Pins>,
    state: watch::Sender<UpstreamState>,
    /// Ends a long pause after a failure.
    wanted: Arc<Notify>,
    tools: Mutex<KnownTools>,
    /// The executor whose registry has the tools. Taken out on close, because the registry holds the tools and the
    /// tools hold this server.
    executor: Mutex<Option<Executor>>,
    this: Weak<Self>,
}

/// The lifecycle state of a server.
#[derive(Clone)]
pub(super) enum UpstreamState {
    /// It does not run.
    Down {
        /// The number of failures in a row.
        failures: u32,
        /// The end of the pause.
        until: Option<Instant>,
        /// The last failure.
        why: Option<Failure>,
    },
    /// A task is starting it.
    Starting,
    /// It runs.
    Up(Arc<UpstreamSession>),
    /// It is closed for good.
    Closed,
}

/// The known tools of a server.
#[derive(Default)]
struct KnownTools {
    /// The server's last tool list.
    told: Vec<ToolDefinition>,
    /// The registered names, by the server's own names.
    registered: BTreeMap<String, String>,
    /// Changed tools, with the diff.
    changed: BTreeMap<String, String>,
    /// Unusable tools, with the reason.
    unusable: BTreeMap<String, String>,
    /// The hashes of changed definitions for which an event was emitted.
    events: BTreeMap<String, String>,
}

/// Returns the first tool of each name.
fn first_per_name(told: &[ToolDefinition]) -> impl Iterator<Item = &ToolDefinition> {
    let mut names = BTreeSet::new();
    told.iter().filter(move |tool| names.insert(&tool.name))
}

impl Upstream {
    pub(super) fn new(settings: ServerSettings, executor: &Executor, pins: Arc<Pins>) -> Arc<Self> {
        let sandbox = match &settings.reach {
            Reach::Stdio(program) => executor.sandbox(program.level),
            Reach::Http(_) | Reach::Unusable(_) => None,
        };
        let slots = Semaphore::new(settings.calls_max.clamp(1, Semaphore::MAX_PERMITS));
        let (state, _) = watch::channel(UpstreamState::Down { failures: 0, until: None, why: None });
        let executor = Mutex::new(Some(executor.clone()));
        Arc::new_cyclic(|this| Self {
            settings,
            slots,
            sandbox,
            pins,
            state,
            wanted: Arc::default(),
            tools: Mutex::default(),
            executor,
            this: Weak::clone(this),
        })
    }

    /// Returns the session, and opens it if there is none. Callers that come while it is being opened wait for the same
    /// one.
    pub(super) async fn session(&self) -> Result<Arc<UpstreamSession>, RunError> {
        let failed = |failure: &Failure, pause| RunError::from(self.error(failure, pause)).before_effect();
        let mut state = self.state.subscribe();
        let mut has_started = false;
        loop {
            let now = Instant::now();
            let current = state.borrow_and_update().clone();
            match current {
                UpstreamState::Up(session) if session.is_alive() => return Ok(session),
                UpstreamState::Down { until: Some(until), why: Some(why), .. } if has_started || until > now => {
                    return Err(failed(&why, Some(until.saturating_duration_since(now))));
                }
                UpstreamState::Closed => return Err(failed(&Failure::transport("wieldy is stopping"), None)),
                UpstreamState::Starting => has_started = true,
                // The `run` task is about to notice the end.
                UpstreamState::Up(_) => {}
                UpstreamState::Down { .. } => {
                    has_started = true;
                    self.start();
                }
            }
            // The sender cannot be dropped while `self` exists.
            let _ = state.changed().await;
        }
    }

    /// Returns the error of a call that needed the server, with a hint that fits the settings.
    pub(super) fn error(&self, why: &Failure, pause: Option<Duration>) -> CallError {
        let error = why.error(&self.settings.name, pause);
        match self.settings.hint(&error.message) {
            Some(hint) if !why.is_for_the_operator() => error.suggest(hint),
            _ => error,
        }
    }

    /// Starts the server in a task, unless it runs or is being started. The task goes on even if the waiting call ends.
    pub(super) fn start(&self) {
        let mut failures = 0;
        let is_ours = self.state.send_if_modified(|state| {
            let UpstreamState::Down { failures: so_far, .. } = state else { return false };
            failures = *so_far;
            *state = UpstreamState::Starting;
            true
        });
        if let (true, Some(this)) = (is_ours, self.this.upgrade()) {
            let why = format!("the MCP server `{}` is still starting", self.settings.name);
            self.explain_missing(why, "call it again when the server has started".to_owned());
            tokio::spawn(async move { this.run(failures).await });
        }
    }

    /// Starts the server and waits for its end. Starts it again if it should always run or its tools are not known.
    async fn run(self: Arc<Self>, mut failures: u32) {
        loop {
            let (why, ran_for) = match self.open().await {
                Err(why) => (why, Duration::ZERO),
                Ok(session) => {
                    let (session, born) = (Arc::new(session), Instant::now());
                    if !self.set_state(UpstreamState::Up(Arc::clone(&session))) {
                        return session.close().await;
                    }
                    (session.ended().await, born.elapsed())
                }
            };
            failures = if ran_for >= STARTUP_OVER_AFTER { 1 } else { failures.saturating_add(1) };
            let backoff = PAUSE_MIN.saturating_mul(1 << (failures - 1).min(16));
            let backoff = backoff.max(why.retry_after().unwrap_or_default());
            let pause = backoff.min(PAUSE_MAX);
            // A server that worked may be restarted at once.
            let until = (ran_for < STARTUP_OVER_AFTER).then(|| Instant::now() + pause);
            // Set before waiting calls wake, because their errors show this explanation.
            let error = self.error(&why, None);
            self.explain_missing(error.message, error.suggestion.unwrap_or_default());
            if !self.set_state(UpstreamState::Down { failures, until, why: Some(why.clone()) }) {
                return;
            }
            let server = &self.settings.name;
            tracing::warn!(target: "wieldy::mcp", server, %why, failures, "a server is down");
            let known = self.pins.server(server);
            if known.revision.is_none() {
                self.remember_failed();
            }
            let pause = match self.settings.start {
                // A call to one of its tools will start it.
                Start::Lazy if known.revision.is_some() => return,
                // A person must act first, and may have done so unnoticed.
                _ if why.is_for_the_operator() => RETRY_PAUSE_MAX,
                Start::Eager => pause,
                Start::Lazy => backoff.min(RETRY_PAUSE_MAX),
            };
            if !self.pause(pause, failures, until).await {
                return;
            }
        }
    }

    /// Waits after a failure: for the pause, or until `pause_end` if a missing tool of this server is called. Returns
    /// false if the server was started or closed meanwhile.
    async fn pause(&self, pause: Duration, failed: u32, pause_end: Option<Instant>) -> bool {
        let is_same = |state: &UpstreamState| matches!(state, UpstreamState::Down { failures, until, .. } if (*failures, *until) == (failed, pause_end));
        let mut state = self.state.subscribe();
        let wanted = async {
            self.wanted.notified().await;
            tokio::time::sleep_until(pause_end.unwrap_or_else(Instant::now)).await;
        };
        tokio::select! {
            _ = state.wait_for(|state| !is_same(state)) => return false,
            () = tokio::time::sleep(pause) => {}
            () = wanted => {}
        }
        self.state.send_if_modified(|state| {
            let goes_on = is_same(state);
            if goes_on {
                *state = UpstreamState::Starting;
            }
            goes_on
        })
    }

    /// Sets the explanation that calls to missing tools of this server get.
    fn explain_missing(&self, why: String, advice: String) {
        if let Some(executor) = self.executor() {
            let wanted = Arc::clone(&self.wanted);
            executor.explain_missing(&self.settings.name, Some(Missing { why, advice, wanted }));
        }
    }

    /// Returns true if its tools were ever listed, by this or another process.
    pub(super) fn is_known(&self) -> bool {
        self.pins.server(&self.settings.name).revision.is_some()
    }

    /// Returns true if the server did not come up when it was last started.
    pub(super) fn failed_last_time(&self) -> bool {
        self.pins.server(&self.settings.name).failed
    }

    /// Stores that the server did not come up, so that clients do not wait for it next time.
    pub(super) fn remember_failed(&self) {
        let server = &self.settings.name;
        if let Err(error) = self.pins.change(server, |pinned| pinned.failed = true) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(target: "wieldy::mcp", server, error, "cannot store that a server failed");
        }
    }

    /// Sets the state, unless the server was closed meanwhile.
    fn set_state(&self, next: UpstreamState) -> bool {
        self.state.send_if_modified(|state| {
            let goes_on = !matches!(state, UpstreamState::Closed);
            if goes_on {
                *state = next;
            }
            goes_on
        })
    }

    /// Opens a session and lists the tools.
    async fn open(self: &Arc<Self>) -> Result<UpstreamSession, Failure> {
        let settings = &self.settings;
        let known = self.pins.server(&settings.name);
        let changed = Arc::new(Notify::new());
        let opened = async {
            let revision = known.revision.as_deref();
            let session = UpstreamSession::open(settings, self.sandbox.clone(), revision, Arc::clone(&changed)).await?;
            let tools = session.tools().await?;
            self.apply_list(tools, session.revision());
            Ok(session)
        };
        let session = self.within_start_timeout(opened).await?;
        self.watch_changes(changed);
        Ok(session)
    }

    /// Limits a tool list to the start timeout.
    async fn within_start_timeout<T>(&self, told: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        let within = self.settings.start_timeout;
        let late = |_| Err(Failure::transport(format!("it did not list its tools within {within:?}")));
        tokio::time::timeout(within, told).await.unwrap_or_else(late)
    }

    /// Lists the tools again whenever the server says that they changed, until the session ends.
    fn watch_changes(self: &Arc<Self>, changed: Arc<Notify>) {
        let (this, mut state) = (Arc::downgrade(self), self.state.subscribe());
        tokio::spawn(async move {
            let session = match state.wait_for(|state| !matches!(state, UpstreamState::Starting)).await.as_deref() {
                Ok(UpstreamState::Up(session)) => Arc::downgrade(session),
                _ => return,
            };
            let over = state.wait_for(|state| !matches!(state, UpstreamState::Up(_)));
            let asked = async {
                loop {
                    changed.notified().await;
                    let (Some(this), Some(session)) = (this.upgrade(), session.upgrade()) else { return };
                    match this.within_start_timeout(session.tools()).await {
                        Ok(tools) => this.apply_list(tools, session.revision()),
                        // `run` reports the end.
                        Err(_) if !session.is_alive() => return,
                        Err(why) => {
                            let server = &this.settings.name;
                            tracing::warn!(target: "wieldy::mcp", server, %why, "cannot list the tools of a server")
                        }
                    }
                    drop((this, session));
                    tokio::time::sleep(LIST_INTERVAL_MIN).await;
                }
            };
            let listening = async {
                if let Some(session) = session.upgrade() {
                    session.watch_changes().await;
                }
                std::future::pending::<()>().await;
            };
            tokio::select! {
                _ = over => {}
                () = asked => {}
                () = listening => {}
            }
        });
    }

    /// Registers the pinned tools of the last list. Returns false if the tools were never listed.
    pub(super) fn register_pinned(&self) -> bool {
        let known = self.pins.server(&self.settings.name);
        let listed: Vec<ToolDefinition> =
            known.tools.into_values().filter(|tool| tool.listed).map(|tool| tool.definition).collect();
        for tool in listed.iter().filter(|tool| self.settings.tools.takes(&tool.name)) {
            self.register(tool);
        }
        known.revision.is_some()
    }

    /// Applies a tool list: pins and registers new tools, compares known ones, unregisters missing ones.
    fn apply_list(&self, told: Vec<ToolDefinition>, revision: Option<String>) {
        let server = &self.settings.name;
        let mut changes: BTreeMap<String, (ToolDefinition, String)> = BTreeMap::new();
        let kept = self.pins.change(server, |pinned| {
            pinned.revision = revision;
            pinned.failed = false;
            pinned.tools.values_mut().for_each(|tool| tool.listed = false);
            for definition in first_per_name(&told) {
                let name = definition.name.clone();
                let tool = pinned.tools.entry(name).or_insert_with(|| PinnedTool::of(definition.clone()));
                tool.listed = true;
                if tool.hash != definition.hash() {
                    let diff = definition.diff(&tool.definition);
                    changes.insert(definition.name.clone(), (tool.definition.clone(), diff));
                }
            }
        });
        if let Err(error) = kept {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(target: "wieldy::mcp", server, error, "cannot store the tool definitions of a server");
        }
        self.tools().told.clone_from(&told);
        self.tools().changed = changes.iter().map(|(name, (_, diff))| (name.clone(), diff.clone())).collect();
        let taken = first_per_name(&told).filter(|tool| self.settings.tools.takes(&tool.name));
        let taken: Vec<&ToolDefinition> = taken.collect();
        self.unregister(|name| taken.iter().all(|tool| tool.name != name));
        for definition in &taken {
            let Some((agreed, diff)) = changes.get(&definition.name) else {
                self.tools().events.remove(&definition.name);
                self.register(definition);
                continue;
            };
            let tool = &definition.name;
            let registered = match self.settings.on_change {
                OnChange::Warn => {
                    tracing::warn!(target: "wieldy::mcp", server, tool, diff, "a tool changed");
                    self.register(definition)
                }
                OnChange::Refuse => {
                    tracing::warn!(target: "wieldy::mcp", server, tool, diff, "a tool changed and is refused");
                    self.register(agreed)
                }
            };
            self.tell_changed(definition, agreed, registered);
        }
        self.mark_duplicates(&told, &taken);
        if let Some(executor) = self.executor() {
            executor.explain_missing(server, None);
        }
    }

    /// Emits an event for a changed definition, once per change, unless registering the tool emitted one.
    fn tell_changed(&self, definition: &ToolDefinition, agreed: &ToolDefinition, registered: Option<Registration>) {
        let name = self.tools().registered.get(&definition.name).cloned();
        let (Some(executor), Some(name)) = (self.executor(), name) else { return };
        let last = self.tools().events.insert(definition.name.clone(), definition.hash());
        if last.as_ref() != Some(&definition.hash()) && !matches!(registered, Some(Registration::Changed { .. })) {
            executor.tell_changed(&name, &last.unwrap_or_else(|| agreed.hash()), &definition.hash());
        }
    }

    /// Notes the tools whose name an earlier tool of the list has: only the first is used.
    fn mark_duplicates(&self, told: &[ToolDefinition], taken: &[&ToolDefinition]) {
        for first in taken {
            if told.iter().any(|other| other.name == first.name && other != *first) {
                self.mark_unusable(
                    &first.name,
                    "the server lists several tools with this name, and only the first is used",
                );
            }
        }
    }

    /// Notes that a tool cannot be used.
    fn mark_unusable(&self, tool: &str, reason: impl Into<String>) {
        let (server, reason) = (&self.settings.name, reason.into());
        tracing::warn!(target: "wieldy::mcp", server, tool, reason, "a tool is left out");
        self.tools().unusable.insert(tool.to_owned(), reason);
    }

    /// Registers a tool. Returns the registry's result, or `None` if the tool cannot be registered.
    fn register(&self, definition: &ToolDefinition) -> Option<Registration> {
        let (this, executor) = (self.this.upgrade()?, self.executor()?);
        let mut spec = definition.spec(&self.settings);
        let holder = self.tools().registered.iter().find(|(_, name)| **name == spec.name).map(|(tool, _)| tool.clone());
        if let Some(holder) = holder.filter(|holder| *holder != definition.name) {
            self.mark_unusable(&definition.name, format!("its tool `{holder}` has the name `{}` already", spec.name));
            return None;
        }
        let make = |spec| Arc::new(UpstreamTool::new(Arc::clone(&this), definition.name.clone(), spec));
        let mut registered = executor.register(make(spec.clone()));
        // A result is still useful if its schema cannot be compiled to check it.
        if let Err(RegisterError::Schema { which: "output", .. }) = registered {
            spec.output_schema = None;
            registered = executor.register(make(spec.clone()));
        }
        match registered {
            Ok(registration) => {
                let mut tools = self.tools();
                tools.unusable.remove(&definition.name);
                tools.registered.insert(definition.name.clone(), spec.name);
                Some(registration)
            }
            Err(error) => {
                let source = std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
                self.mark_unusable(&definition.name, format!("{error}{source}"));
                None
            }
        }
    }

    /// Returns the error of a call to a tool that changed after it was agreed to, if changes are refused.
    pub(super) fn refusal(&self, tool: &str) -> Option<CallError> {
        if self.settings.on_change == OnChange::Warn {
            return None;
        }
        let diff = self.tools().changed.get(tool).cloned()?;
        let server = &self.settings.name;
        let told = format!("the MCP server `{server}` changed its tool `{tool}` since it was agreed to");
        let error = CallError::new(Code::PermissionDenied, told)
            .suggest(format!("have the operator look at the change and agree to it: `wieldy mcp pin {server}`"));
        Some(error.detail("server", server.as_str()).detail("diff", diff))
    }

    fn unregister(&self, gone: impl Fn(&str) -> bool) {
        let mut tools = self.tools();
        tools.registered.retain(|name, registered| {
            let is_gone = gone(name);
            if let (true, Some(executor)) = (is_gone, self.executor()) {
                executor.unregister(registered);
            }
            !is_gone
        });
        tools.unusable.retain(|name, _| !gone(name));
    }

    /// Pins the tools as they are now, if their changes are exactly those that the operator was shown.
    pub(super) fn agree(&self, seen: &BTreeMap<String, String>) -> Result<(), CallError> {
        let server = &self.settings.name;
        let (told, is_seen) = {
            let tools = self.tools();
            (tools.told.clone(), tools.changed == *seen)
        };
        if !is_seen {
            let again = format!("the MCP server `{server}` changed its tools again while they were shown");
            return Err(CallError::new(Code::PermissionDenied, again)
                .suggest(format!("`wieldy mcp pin {server}` shows them as they are now")));
        }
        let revision = self.pins.server(server).revision;
        let agreed = self.pins.change(server, |pinned| {
            pinned.tools =
                first_per_name(&told).map(|tool| (tool.name.clone(), PinnedTool::of(tool.clone()))).collect();
        });
        agreed.map_err(|error| {
            let source = std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
            CallError::new(Code::Configuration, format!("{error}{source}"))
        })?;
        self.apply_list(told, revision);
        Ok(())
    }

    /// Drops the executor. The tools stay registered.
    pub(super) fn detach(&self) {
        self.executor.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    }

    /// Closes the server for good.
    pub(super) async fn close(&self) {
        self.detach();
        if let UpstreamState::Up(session) = self.state.send_replace(UpstreamState::Closed) {
            session.close().await;
        }
    }

    pub(super) fn state(&self) -> UpstreamState {
        self.state.borrow().clone()
    }

    /// Returns the registered, changed and unusable tools, each by the server's own names.
    pub(super) fn tool_maps(&self) -> [BTreeMap<String, String>; 3] {
        let tools = self.tools();
        [tools.registered.clone(), tools.changed.clone(), tools.unusable.clone()]
    }

    fn tools(&self) -> MutexGuard<'_, KnownTools> {
        self.tools.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn executor(&self) -> Option<Executor> {
        self.executor.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}
