//! Builds an executor from its parts and settings, with good defaults.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::Semaphore;

use crate::admit::{Admission, Limits};
use crate::artifact::{Artifacts, MemoryArtifacts};
use crate::attempt::RetryPolicy;
use crate::breaker::{BreakerPolicy, Breakers};
use crate::cache::AnswerCache;
use crate::call::Caller;
use crate::clock::{ClockDefaults, DynamicTimeout, TIMEOUT_DEFAULT, TIMEOUT_MAX, Timings};
use crate::confinement::{Confinement, FileRules, Network, Place, ResourceLimits};
use crate::confirm::Confirmer;
use crate::event::{Body, Subject};
use crate::executor::Executor;
use crate::flight::Flights;
use crate::journal::{Durability, Interrupted, Journal, MemoryJournal, Recorder};
use crate::limits::ToolLimits;
use crate::policy::{Denied, Policy};
use crate::rate::{Rate, Rates};
use crate::recorded::ResultRecording;
use crate::registry::{Missing, RegisterError, Registered, Registration, Registry};
use crate::repeated::RepeatedAnswers;
use crate::sandbox::{Level, OutputSink, Sandbox, SandboxChange};
use crate::sandboxes::Owners;
use crate::task::{TASK_TTL, Tasks};
use crate::tool::{AnyTool, SharedTool};

/// The longest time that anything is stored or waited for. Longer settings are cut to it, because they could overflow
/// a clock.
pub(crate) const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// Maximum number of answers in the result cache, and of answers under idempotency keys, over all tenants.
const ANSWERS_MAX: usize = 10_000;
/// Maximum number of checks of large values that run at once, each on its own thread.
const WORKERS_MAX: usize = 4;
/// The smallest limit, in bytes, for all answers under idempotency keys.
const KEYS_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// The state that all clones of an executor share.
pub(crate) struct Inner {
    pub(crate) registry: Registry,
    pub(crate) policy: Policy,
    pub(crate) confirmer: Option<Arc<dyn Confirmer>>,
    pub(crate) confirmation_timeout: Duration,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) durability: Durability,
    /// The calls that earlier executors left open, until `resume` is called.
    pub(crate) interrupted: Mutex<Vec<Interrupted>>,
    pub(crate) flights: Flights,
    pub(crate) tasks: Tasks,
    pub(crate) admission: Admission,
    /// The permits for checks of large values on other threads.
    pub(crate) worker_permits: Arc<Semaphore>,
    pub(crate) rates: Rates,
    pub(crate) breakers: Breakers,
    pub(crate) cache: AnswerCache,
    pub(crate) keys: AnswerCache,
    pub(crate) idempotency_ttl: Duration,
    pub(crate) repeated: RepeatedAnswers,
    pub(crate) clocks: ClockDefaults,
    pub(crate) timings: Option<Timings>,
    pub(crate) retry: RetryPolicy,
    pub(crate) sandboxes: BTreeMap<Level, Arc<dyn Sandbox>>,
    pub(crate) owners: Arc<Owners>,
    pub(crate) isolation: Level,
    pub(crate) confinement: Arc<Confinement>,
    /// The workspace as named in the record of every call, if its path is absolute.
    pub(crate) workspace: Option<Arc<str>>,
    pub(crate) limits_max: ResourceLimits,
    pub(crate) tool_limits: HashMap<String, ToolLimits>,
    pub(crate) machine: ResourceLimits,
    pub(crate) artifacts: Arc<dyn Artifacts>,
    pub(crate) output_bytes_max: u64,
    pub(crate) results: ResultRecording,
    pub(crate) results_of_tools: HashMap<String, ResultRecording>,
    pub(crate) output: Option<Arc<dyn OutputSink>>,
    pub(crate) stopping: AtomicBool,
}

impl Inner {
    /// Returns the maximum number of running calls of this caller's agent.
    pub(crate) fn agent_slots(&self, caller: &Caller) -> u32 {
        match self.policy.plan(caller).ok().and_then(|plan| plan.slots) {
            Some(0) => u32::MAX,
            Some(slots) => slots,
            None => self.admission.limits().calls_running_per_agent_max,
        }
    }
}

/// Builds an [`Executor`]. Every setting has a good default; settings are public fields or methods of the same name.
pub struct ExecutorBuilder {
    tools: Vec<SharedTool>,
    sandboxes: BTreeMap<Level, Arc<dyn Sandbox>>,
    /// The permissions, plans and checks.
    pub policy: Policy,
    /// The confirmer that asks a person to confirm calls; none by default.
    pub confirmer: Option<Arc<dyn Confirmer>>,
    /// The time after which a question to a person expires.
    pub confirmation_timeout: Duration,
    /// The journal that stores the history; in memory by default.
    pub journal: Arc<dyn Journal>,
    /// The rule that decides which calls wait until their records are safe.
    pub durability: Durability,
    /// The store for large outputs; in memory by default.
    pub artifacts: Arc<dyn Artifacts>,
    /// The limits for running and waiting calls.
    pub limits: Limits,
    /// The rate limits and quotas; none by default.
    pub rates: Vec<Rate>,
    /// The rules for refusing calls of a failing tool.
    pub breaker: BreakerPolicy,
    /// Maximum number of bytes of cached answers.
    pub cache_bytes_max: u64,
    /// The time for which an idempotency key is remembered.
    pub idempotency_ttl: Duration,
    /// The time that one run may take if neither call nor tool sets it.
    pub timeout: Duration,
    /// The user's own timeouts for runs, by tool.
    pub timeouts: HashMap<String, Duration>,
    /// The rules that derive the attempt clock from a tool's past runs; off by default.
    pub dynamic_timeout: Option<DynamicTimeout>,
    /// The durations of past runs by tool, as a start for `dynamic_timeout`.
    pub known_durations: HashMap<String, Vec<Duration>>,
    /// The retry policy if neither call nor tool sets one.
    pub retry: RetryPolicy,
    /// The isolation of processes. A call may ask for more, never for less.
    pub isolation: Level,
    /// The folder that processes work in.
    pub workspace: PathBuf,
    /// The rules for further, masked and read-only files.
    pub files: FileRules,
    /// The network that processes may reach if the call does not restrict it; none by default.
    pub network: Network,
    /// The resource limits of processes if neither tool nor call sets them.
    pub resource_limits: ResourceLimits,
    /// The upper bounds for resource limits, including those that a tool sets or a call asks for. Where none is set, a
    /// call may ask for [`ResourceLimits::CALL_MAX`] or the usual limit, whichever is higher.
    pub resource_limits_max: ResourceLimits,
    /// The operator's resource limits for single tools.
    pub tool_limits: HashMap<String, ToolLimits>,
    /// The processors and memory of this machine, if known: the built-in maximum for calls and the limits in definitions
    /// of tools are never above it.
    pub machine: ResourceLimits,
    /// The limits for all processes of one sandbox together; by default none, so only the limits of each process apply.
    pub sandbox_limits: ResourceLimits,
    /// The time that a process has to end after it is asked to.
    pub grace: Duration,
    /// Maximum number of bytes of text in a result if the tool does not set it.
    pub output_bytes_max: u64,
    /// The part of results that the history stores, if the journal stores results.
    pub results: ResultRecording,
    /// The part for single tools, instead of `results`.
    pub results_of_tools: HashMap<String, ResultRecording>,
    /// A sink that receives the raw output of all runs as it comes, including secrets, for a program that shows it to
    /// the caller. A sink that blocks delays the run.
    pub output: Option<Arc<dyn OutputSink>>,
    /// The number of finished calls that are remembered for late observers.
    pub observable_max: usize,
    /// The time for which the result of a task is stored.
    pub task_ttl: Duration,
}

impl Default for ExecutorBuilder {
    fn default() -> Self {
        Self {
            tools: Vec::new(),
            sandboxes: BTreeMap::new(),
            policy: Policy::default(),
            confirmer: None,
            confirmation_timeout: Duration::from_secs(300),
            journal: Arc::new(MemoryJournal::default()),
            durability: Durability::default(),
            artifacts: Arc::new(MemoryArtifacts::default()),
            limits: Limits::default(),
            rates: Vec::new(),
            breaker: BreakerPolicy::default(),
            cache_bytes_max: 64 * 1024 * 1024,
            idempotency_ttl: Duration::from_secs(24 * 60 * 60),
            timeout: TIMEOUT_DEFAULT,
            timeouts: HashMap::new(),
            dynamic_timeout: None,
            known_durations: HashMap::new(),
            retry: RetryPolicy::default(),
            isolation: Level::Native,
            workspace: PathBuf::from("."),
            files: FileRules::default(),
            network: Network::None,
            resource_limits: ResourceLimits::DEFAULT,
            resource_limits_max: ResourceLimits::default(),
            tool_limits: HashMap::new(),
            machine: ResourceLimits::default(),
            sandbox_limits: ResourceLimits::default(),
            grace: Duration::from_secs(2),
            output_bytes_max: 64 * 1024,
            results: ResultRecording::default(),
            results_of_tools: HashMap::new(),
            output: None,
            // Few enough to stay in the processor's caches, because forgetting a call reads its data again.
            observable_max: 16,
            task_ttl: TASK_TTL,
        }
    }
}

impl ExecutorBuilder {
    /// Adds a tool.
    #[must_use]
    pub fn tool(self, tool: impl AnyTool) -> Self {
        self.tools([Arc::new(tool) as SharedTool])
    }

    /// Adds tools.
    #[must_use]
    pub fn tools(mut self, tools: impl IntoIterator<Item = SharedTool>) -> Self {
        self.tools.extend(tools);
        self
    }

    /// Adds a sandbox backend.
    #[must_use]
    pub fn sandbox(mut self, sandbox: impl Sandbox) -> Self {
        self.sandboxes.insert(sandbox.level(), Arc::new(sandbox));
        self
    }

    /// Sets the confirmer that asks a person to confirm calls.
    #[must_use]
    pub fn confirmer(mut self, confirmer: impl Confirmer) -> Self {
        self.confirmer = Some(Arc::new(confirmer));
        self
    }

    /// Builds the executor and registers its tools.
    pub fn build(self) -> Result<Executor, RegisterError> {
        let clocks = ClockDefaults { timeout: self.timeout, queue: self.limits.queue_timeout, timeouts: self.timeouts };
        let remembered = self.journal.remembered();
        let confinement = Confinement {
            workspace: self.workspace,
            files: Arc::new(self.files),
            network: self.network,
            limits: self.resource_limits.within(self.resource_limits_max),
            place: Place::Own,
            place_limits: self.sandbox_limits,
            grace: self.grace.min(TIMEOUT_MAX),
        };
        let inner = Inner {
            registry: Registry::default(),
            policy: self.policy,
            confirmer: self.confirmer,
            confirmation_timeout: self.confirmation_timeout.min(FOR_EVER),
            recorder: Arc::new(Recorder::new(self.journal)),
            durability: self.durability,
            interrupted: Mutex::new(remembered.interrupted),
            flights: Flights::new(self.observable_max),
            tasks: Tasks::new(self.task_ttl),
            admission: Admission::new(self.limits),
            worker_permits: Arc::new(Semaphore::new(WORKERS_MAX)),
            rates: Rates::new(
                self.rates.into_iter().map(|rate| Rate { window: rate.window.min(FOR_EVER), ..rate }).collect(),
            ),
            breakers: Breakers::new(BreakerPolicy { open_for: self.breaker.open_for.min(FOR_EVER), ..self.breaker }),
            cache: AnswerCache::new(ANSWERS_MAX, self.cache_bytes_max),
            // Idempotency keys are a guarantee, not an optimization: they work even if the result cache is off.
            repeated: RepeatedAnswers::new(),
            keys: AnswerCache::new(ANSWERS_MAX, self.cache_bytes_max.max(KEYS_BYTES_MAX)).storing_all(),
            idempotency_ttl: self.idempotency_ttl.min(FOR_EVER),
            clocks,
            timings: self.dynamic_timeout.map(|policy| Timings::new(policy, &self.known_durations)),
            retry: self.retry,
            sandboxes: self.sandboxes,
            owners: Arc::default(),
            isolation: self.isolation,
            workspace: confinement.recorded_workspace(),
            confinement: Arc::new(confinement),
            limits_max: self.resource_limits_max,
            tool_limits: self.tool_limits,
            machine: self.machine,
            artifacts: self.artifacts,
            output_bytes_max: self.output_bytes_max,
            results: self.results,
            results_of_tools: self.results_of_tools,
            output: self.output,
            stopping: AtomicBool::new(false),
        };
        for sandbox in inner.sandboxes.values() {
            sandbox.listen(sandbox_recorder(Arc::clone(&inner.recorder), Arc::clone(&inner.owners)));
        }
        let executor = Executor { inner: Arc::new(inner) };
        executor.restore(remembered.answers);
        for tool in self.tools {
            executor.register(tool)?;
        }
        Ok(executor)
    }
}

/// Returns a listener that records the creation and destruction of sandboxes as events.
fn sandbox_recorder(recorder: Arc<Recorder>, owners: Arc<Owners>) -> Arc<dyn Fn(SandboxChange) + Send + Sync> {
    let caller = Arc::new(Caller::local());
    let subject = Arc::new(Subject::of(caller));
    Arc::new(move |change| {
        let body = match change {
            SandboxChange::Created(made) => {
                Body::SandboxCreated { sandbox: made.id.0, level: made.level.as_str().to_owned() }
            }
            SandboxChange::Destroyed(gone) => {
                owners.forget(&gone.id);
                Body::SandboxDestroyed { sandbox: gone.id.0 }
            }
        };
        // The receipt is ignored: the calls that use a sandbox have records of their own.
        let _ = recorder.append(&subject, body, Timestamp::now(), None);
    })
}

impl Executor {
    /// Returns a builder with the default settings.
    pub fn builder() -> ExecutorBuilder {
        ExecutorBuilder::default()
    }

    /// Adds a tool while the executor runs, or replaces the same provider's tool of that name. A changed definition is
    /// recorded as an event.
    pub fn register(&self, tool: SharedTool) -> Result<Registration, RegisterError> {
        let name = tool.spec().name;
        let registration = self.inner.registry.add(tool)?;
        if let Registration::Changed { previous, current } = registration {
            self.tell_changed(&name, &previous.to_hex(), &current.to_hex());
        }
        Ok(registration)
    }

    /// Records that the provider of a tool now offers another definition, while the registered tool stays as it was.
    pub fn tell_changed(&self, tool: &str, previous_hash: &str, current_hash: &str) {
        let caller = Arc::new(Caller::local());
        let provider = self.inner.registry.find(tool, &caller).ok().map(|tool| Arc::clone(&tool.provider));
        let subject = Subject { tool: Some(tool.into()), provider, ..Subject::of(caller) };
        let (previous_hash, current_hash) = (previous_hash.to_owned(), current_hash.to_owned());
        let body = Body::DefinitionChanged { previous_hash, current_hash };
        let _ = self.inner.recorder.append(&Arc::new(subject), body, Timestamp::now(), None);
    }

    /// Removes a tool while the executor runs. Running calls of it continue. Returns true if the tool existed.
    pub fn unregister(&self, name: &str) -> bool {
        self.inner.registry.remove(name)
    }

    /// Sets the reason why tools called `SERVER__…` may be missing, which is shown to callers who ask for one. `None`
    /// clears it.
    pub fn explain_missing(&self, server: &str, missing: Option<Missing>) {
        self.inner.registry.explain_missing(server, missing);
    }

    /// Returns the refusal that a call of the tool would get for the caller's plan, for doors that list tools.
    pub fn check_plan(&self, caller: &Caller, tool: &Registered) -> Result<(), Denied> {
        self.inner.policy.check_tool(caller, tool.spec())
    }

    /// Returns the registry of tools.
    pub fn registry(&self) -> &Registry {
        &self.inner.registry
    }

    /// Returns the store for large outputs.
    pub fn artifacts(&self) -> &Arc<dyn Artifacts> {
        &self.inner.artifacts
    }
}
