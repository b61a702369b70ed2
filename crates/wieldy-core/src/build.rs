//! Building an executor: what it is made of, with good defaults.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::Semaphore;

use crate::admit::{Admission, Limits};
use crate::artifact::{Artifacts, MemoryArtifacts};
use crate::attempt::{ClockDefaults, DynamicTimeout, RetryPolicy, TIMEOUT_DEFAULT, TIMEOUT_MAX, Timings};
use crate::breaker::{BreakerPolicy, Breakers};
use crate::cache::Recall;
use crate::call::Caller;
use crate::confinement::{Confinement, FileRules, Network, Place, ResourceLimits};
use crate::confirm::Confirmer;
use crate::event::{Body, Subject};
use crate::executor::Executor;
use crate::flight::Flights;
use crate::journal::{Durability, Interrupted, Journal, MemoryJournal, Recorder};
use crate::policy::Policy;
use crate::rate::{Rate, Rates};
use crate::registry::{Missing, RegisterError, Registration, Registry};
use crate::sandbox::{Level, OutputSink, Sandbox, SandboxChange};
use crate::sandboxes::Owners;
use crate::task::{TASK_TTL, Tasks};
use crate::tool::{AnyTool, SharedTool};

/// The longest that anything is kept or waited for; more means the same, and clocks can count it.
pub(crate) const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// How many answers are kept in the cache, and how many under idempotency keys: those of all tenants together.
const ANSWERS_MAX: usize = 10_000;
/// The maximal number of checks of large values at once, each on a thread of its own.
const APART_MAX: usize = 4;
/// How many bytes of answers to idempotency keys are kept at least.
const KEYS_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// What an executor is made of.
pub(crate) struct Inner {
    pub(crate) registry: Registry,
    pub(crate) policy: Policy,
    pub(crate) confirmer: Option<Arc<dyn Confirmer>>,
    pub(crate) confirmation_timeout: Duration,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) durability: Durability,
    /// What earlier executors left open, until somebody resumes it.
    pub(crate) interrupted: Mutex<Vec<Interrupted>>,
    pub(crate) flights: Flights,
    pub(crate) tasks: Tasks,
    pub(crate) admission: Admission,
    /// The slots for checks of large values beside the calls.
    pub(crate) apart: Arc<Semaphore>,
    pub(crate) rates: Rates,
    pub(crate) breakers: Breakers,
    pub(crate) cache: Recall,
    pub(crate) keys: Recall,
    pub(crate) idempotency_ttl: Duration,
    pub(crate) clocks: ClockDefaults,
    pub(crate) timings: Option<Timings>,
    pub(crate) retry: RetryPolicy,
    pub(crate) sandboxes: BTreeMap<Level, Arc<dyn Sandbox>>,
    pub(crate) owners: Arc<Owners>,
    pub(crate) isolation: Level,
    pub(crate) confinement: Arc<Confinement>,
    /// The workspace as it stands in the record of every call, where it has an absolute path.
    pub(crate) workspace: Option<Arc<str>>,
    pub(crate) limits_max: ResourceLimits,
    pub(crate) artifacts: Arc<dyn Artifacts>,
    pub(crate) output_bytes_max: u64,
    pub(crate) output: Option<Arc<dyn OutputSink>>,
    pub(crate) stopping: AtomicBool,
}

/// Builds an [`Executor`]. Everything has a good default; a setting is a public field or a method of the same word.
pub struct ExecutorBuilder {
    tools: Vec<SharedTool>,
    sandboxes: BTreeMap<Level, Arc<dyn Sandbox>>,
    /// Permissions, plans and checks.
    pub policy: Policy,
    /// Who is asked to confirm calls; nobody by default.
    pub confirmer: Option<Arc<dyn Confirmer>>,
    /// How long a question to a person stands.
    pub confirmation_timeout: Duration,
    /// Where the history is kept; in memory by default.
    pub journal: Arc<dyn Journal>,
    /// Which calls wait for their records to be safe.
    pub durability: Durability,
    /// Where large outputs are kept; in memory by default.
    pub artifacts: Arc<dyn Artifacts>,
    /// How many calls may run and wait.
    pub limits: Limits,
    /// Rate limits and quotas; none by default.
    pub rates: Vec<Rate>,
    /// When a failing tool is left alone.
    pub breaker: BreakerPolicy,
    /// How many bytes of answers the cache keeps.
    pub cache_bytes_max: u64,
    /// How long an idempotency key is remembered.
    pub idempotency_ttl: Duration,
    /// How long a run may take where neither call nor tool says.
    pub timeout: Duration,
    /// How long runs of single tools may take, by the user's own setting.
    pub timeouts: HashMap<String, Duration>,
    /// Whether the attempt clock follows a tool's own history; off by default.
    pub dynamic_timeout: Option<DynamicTimeout>,
    /// How long runs took before, by tool, for the clock that follows them.
    pub known_durations: HashMap<String, Vec<Duration>>,
    /// How failed runs are repeated where neither call nor tool says.
    pub retry: RetryPolicy,
    /// How strongly processes are kept apart; a call may ask for more, never for less.
    pub isolation: Level,
    /// The folder that processes work in.
    pub workspace: PathBuf,
    /// What else processes see of the file system, and what they do not.
    pub files: FileRules,
    /// What processes may reach where the call does not say; nothing by default.
    pub network: Network,
    /// What processes may use where the tool does not say; a call may only ask for less.
    pub resource_limits: ResourceLimits,
    /// What processes may use at most, whatever a tool says.
    pub resource_limits_max: ResourceLimits,
    /// What all processes of one sandbox may use together; by default nothing but the sum of what each of them may.
    pub sandbox_limits: ResourceLimits,
    /// How long a process may take to end after being told to.
    pub grace: Duration,
    /// How many bytes of text a result may have where the tool does not say.
    pub output_bytes_max: u64,
    /// A sink for the output of all runs as it comes, byte for byte and with its secrets: for a program that shows it to
    /// the caller. A sink that blocks holds the run up.
    pub output: Option<Arc<dyn OutputSink>>,
    /// How many calls are remembered for late observers after they are over.
    pub observable_max: usize,
    /// How long the result of a task is kept.
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
            sandbox_limits: ResourceLimits::default(),
            grace: Duration::from_secs(2),
            output_bytes_max: 64 * 1024,
            output: None,
            // Few enough to stay in the processor's caches: what is kept is touched again when it is forgotten.
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

    /// Adds a place to run processes in.
    #[must_use]
    pub fn sandbox(mut self, sandbox: impl Sandbox) -> Self {
        self.sandboxes.insert(sandbox.level(), Arc::new(sandbox));
        self
    }

    /// Sets who is asked to confirm calls.
    #[must_use]
    pub fn confirmer(mut self, confirmer: impl Confirmer) -> Self {
        self.confirmer = Some(Arc::new(confirmer));
        self
    }

    /// Puts the executor together.
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
            apart: Arc::new(Semaphore::new(APART_MAX)),
            rates: Rates::new(
                self.rates.into_iter().map(|rate| Rate { window: rate.window.min(FOR_EVER), ..rate }).collect(),
            ),
            breakers: Breakers::new(BreakerPolicy { open_for: self.breaker.open_for.min(FOR_EVER), ..self.breaker }),
            cache: Recall::new(ANSWERS_MAX, self.cache_bytes_max),
            // Keys are a promise and not a saving: who keeps no answers still runs nothing twice.
            keys: Recall::new(ANSWERS_MAX, self.cache_bytes_max.max(KEYS_BYTES_MAX)).keeping_all(),
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
            artifacts: self.artifacts,
            output_bytes_max: self.output_bytes_max,
            output: self.output,
            stopping: AtomicBool::new(false),
        };
        for sandbox in inner.sandboxes.values() {
            sandbox.listen(tell(Arc::clone(&inner.recorder), Arc::clone(&inner.owners)));
        }
        let executor = Executor { inner: Arc::new(inner) };
        executor.restore(remembered.answers);
        for tool in self.tools {
            executor.register(tool)?;
        }
        Ok(executor)
    }
}

/// Makes events of what happens to sandboxes.
fn tell(recorder: Arc<Recorder>, owners: Arc<Owners>) -> Arc<dyn Fn(SandboxChange) + Send + Sync> {
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
        // Nobody waits for this: what a sandbox is used for has entries of its own.
        let _ = recorder.append(&subject, body, Timestamp::now(), None);
    })
}

impl Executor {
    /// Begins to build an executor.
    pub fn builder() -> ExecutorBuilder {
        ExecutorBuilder::default()
    }

    /// Adds a tool while the executor runs, or replaces the same provider's tool of that name. A changed promise is an event.
    pub fn register(&self, tool: SharedTool) -> Result<Registration, RegisterError> {
        let name = tool.spec().name;
        let registration = self.inner.registry.add(tool)?;
        if let Registration::Changed { previous, current } = registration {
            self.tell_changed(&name, &previous.to_hex(), &current.to_hex());
        }
        Ok(registration)
    }

    /// Makes an event of a promise that changed where the registry does not see it: whoever provides the tool says something
    /// else of it now, and it stays as it was.
    pub fn tell_changed(&self, tool: &str, previous_hash: &str, current_hash: &str) {
        let (caller, tool) = (Arc::new(Caller::local()), Some(tool.into()));
        let subject = Subject { tool, ..Subject::of(caller) };
        let (previous_hash, current_hash) = (previous_hash.to_owned(), current_hash.to_owned());
        let body = Body::DefinitionChanged { previous_hash, current_hash };
        let _ = self.inner.recorder.append(&Arc::new(subject), body, Timestamp::now(), None);
    }

    /// Takes a tool away while the executor runs; calls to it that run go on. Says whether it was there.
    pub fn unregister(&self, name: &str) -> bool {
        self.inner.registry.remove(name)
    }

    /// Says why tools called `SERVER__…` may be missing, to be told to callers who ask for one; `None` takes that back.
    pub fn explain_missing(&self, server: &str, missing: Option<Missing>) {
        self.inner.registry.explain_missing(server, missing);
    }

    /// The tools there are.
    pub fn registry(&self) -> &Registry {
        &self.inner.registry
    }

    /// Where large outputs are kept.
    pub fn artifacts(&self) -> &Arc<dyn Artifacts> {
        &self.inner.artifacts
    }
}
