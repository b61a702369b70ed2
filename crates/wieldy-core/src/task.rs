//! Calls that are polled, observed and cancelled instead of waited for; and the orderly stop of all of them.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::batch::{Batch, BatchResult};
use crate::breaker::BreakerState;
use crate::call::{BatchId, Call, Caller, ExecutionId, Status, ToolResult};
use crate::entry::{CLOSING_PATIENCE, Entry};
use crate::error::CallError;
use crate::event::Subject;
use crate::executor::Executor;
use crate::flight::{BatchFlight, CancelCause, Flight, Flights};
use crate::input::{Input, Violations, check_size};
use crate::journal::{Filter, Recorder, Subscription};
use crate::observe::Observer;
use crate::policy::Policy;
use crate::registry::Registered;
use crate::schema::{Allowance, Spent};

/// How long the result of a task is kept, where nobody says otherwise.
pub const TASK_TTL: Duration = Duration::from_secs(60 * 60);

/// How many finished tasks are remembered at most.
const TASKS_MAX: usize = 10_000;

/// The calls that were begun in the background, and their results for a while.
pub(crate) struct Tasks {
    shelf: Mutex<Shelf>,
    running: TaskTracker,
    ttl: Duration,
}

struct Shelf {
    known: HashMap<ExecutionId, Known>,
    /// How many there may be before those that are over long enough are looked for and forgotten.
    sweep_at: usize,
}

struct Known {
    tool: Arc<str>,
    /// The hash of the tenant that began it.
    tenant: Option<String>,
    result: watch::Receiver<Option<Arc<ToolResult>>>,
    /// Set when it is over.
    ended: Arc<OnceLock<Instant>>,
}

impl Known {
    fn is_there(&self, asker: &Caller, ttl: Duration) -> bool {
        self.tenant == asker.tenant_hash() && !self.is_forgotten(ttl)
    }

    fn is_forgotten(&self, ttl: Duration) -> bool {
        self.ended.get().is_some_and(|ended| ended.elapsed() >= ttl)
    }
}

/// How a task stands.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// The engine's id of the call.
    pub id: ExecutionId,
    /// The tool that was asked for.
    pub tool: Arc<str>,
    /// How it stands.
    pub status: Status,
    /// The result, once it is over.
    pub result: Option<Arc<ToolResult>>,
}

/// What to cancel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// One call.
    Execution(ExecutionId),
    /// A batch: its running calls end, the others are not begun.
    Batch(BatchId),
    /// All running calls of a session of the asker's tenant.
    Session(String),
    /// All running calls of a tenant, which must be the asker's own.
    Tenant(String),
}

impl From<ExecutionId> for Target {
    fn from(id: ExecutionId) -> Self {
        Self::Execution(id)
    }
}

impl From<BatchId> for Target {
    fn from(id: BatchId) -> Self {
        Self::Batch(id)
    }
}

/// How much an executor has to do.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// How many calls run.
    pub running: u32,
    /// How many calls wait for a slot.
    pub waiting: usize,
    /// The tools that fail, and how their breakers stand.
    pub breakers: Vec<(String, BreakerState)>,
}

impl Tasks {
    /// How few tasks are not worth a sweep.
    const SWEEP_MIN: usize = 1024;

    pub(crate) fn new(ttl: Duration) -> Self {
        let shelf = Shelf { known: HashMap::new(), sweep_at: Self::SWEEP_MIN };
        Self { shelf: Mutex::new(shelf), running: TaskTracker::new(), ttl }
    }

    fn lock(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().expect("no code panics while it holds the tasks")
    }

    fn add(&self, id: ExecutionId, task: Known) {
        let mut shelf = self.lock();
        if shelf.known.len() >= shelf.sweep_at {
            shelf.known.retain(|_, task| !task.is_forgotten(self.ttl));
            let mut over: Vec<_> =
                shelf.known.iter().filter_map(|(id, task)| Some((*task.ended.get()?, *id))).collect();
            over.sort_unstable();
            for (_, id) in over.into_iter().take(shelf.known.len().saturating_sub(TASKS_MAX)) {
                shelf.known.remove(&id);
            }
            // Twice as many as are left: so a sweep costs each task a constant share.
            shelf.sweep_at = Self::SWEEP_MIN.max(shelf.known.len() * 2);
        }
        shelf.known.insert(id, task);
    }

    /// Takes in the result of a task that an earlier executor ended.
    pub(crate) fn restore(&self, result: ToolResult, tenant: Option<String>) {
        let ago = Timestamp::now().duration_since(result.timing.completed_at);
        let ago = Duration::try_from(ago).unwrap_or_default();
        let Some(ended) = Instant::now().checked_sub(ago).filter(|_| ago < self.ttl) else { return };
        let (id, tool) = (result.execution_id, Arc::clone(&result.tool));
        let (_, result) = watch::channel(Some(Arc::new(result)));
        self.add(id, Known { tool, tenant, result, ended: Arc::new(OnceLock::from(ended)) });
    }
}

/// A call that was begun: whoever awaits it carries it on, and gets its result. Dropped, it ends as cancelled.
pub struct Begun {
    executor: Executor,
    flight: Arc<Flight>,
    tool: Arc<str>,
    work: BoxFuture<'static, ToolResult>,
}

impl Begun {
    /// The engine's id of the call, to observe and to cancel it by.
    pub fn id(&self) -> ExecutionId {
        self.flight.id
    }

    /// Lets the call go on in the background, as a task that is asked for later, also of the next executor on the same
    /// history. The id comes once it is safe there that the call is a task; the call goes on meanwhile, and also where
    /// nobody waits for that. Must be called within a tokio runtime.
    pub async fn into_task(self) -> ExecutionId {
        let Self { executor, flight, tool, work } = self;
        let recorded = flight.become_task();
        executor.carry_on(flight.id, tool, flight.subject.caller.tenant_hash(), work);
        // The same as for an answer: who has the id may ask for it after a crash.
        if executor.inner.durability.waits_to_answer(&recorded, false) {
            let _ = tokio::time::timeout(CLOSING_PATIENCE, executor.inner.recorder.kept(recorded)).await;
        }
        flight.id
    }
}

impl Future for Begun {
    type Output = ToolResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<ToolResult> {
        self.work.as_mut().poll(context)
    }
}

impl Executor {
    /// Begins a call that may become a task later, should it take too long to be waited for.
    pub fn begin(&self, call: Call) -> Begun {
        let entry = self.open(call, None, false);
        let (flight, tool) = (Arc::clone(&entry.flight), Arc::clone(&entry.call.tool));
        let executor = self.clone();
        Begun { executor: self.clone(), flight, tool, work: Box::pin(async move { executor.walk(entry).await }) }
    }

    /// Begins a call in the background and returns its id at once. Must be called within a tokio runtime.
    pub fn spawn(&self, call: Call) -> ExecutionId {
        let entry = self.open(call, None, true);
        self.go_on(entry)
    }

    /// Carries a call on in the background.
    pub(crate) fn go_on(&self, entry: Box<Entry>) -> ExecutionId {
        let (tool, tenant) = (Arc::clone(&entry.call.tool), entry.call.caller.tenant_hash());
        let (id, executor) = (entry.flight.id, self.clone());
        self.carry_on(id, tool, tenant, async move { executor.walk(entry).await });
        id
    }

    /// Does a call's work in the background, and keeps its result for a while.
    fn carry_on(
        &self,
        id: ExecutionId,
        tool: Arc<str>,
        tenant: Option<String>,
        work: impl Future<Output = ToolResult> + Send + 'static,
    ) {
        let (tell, result) = watch::channel(None);
        let ended = Arc::new(OnceLock::new());
        self.inner.tasks.add(id, Known { tool, tenant, result, ended: Arc::clone(&ended) });
        self.inner.tasks.running.spawn(async move {
            let result = work.await;
            let _ = ended.set(Instant::now());
            tell.send_replace(Some(Arc::new(result)));
        });
    }

    /// How long the result of a task is kept.
    pub fn task_ttl(&self) -> Duration {
        self.inner.tasks.ttl
    }

    /// How a task stands, if it is known and the asker's tenant began it.
    pub fn task(&self, id: ExecutionId, asker: &Caller) -> Option<Task> {
        let tasks = &self.inner.tasks;
        tasks.lock().known.get(&id).filter(|known| known.is_there(asker, tasks.ttl)).map(|known| self.view(id, known))
    }

    /// All tasks of the asker's tenant that are known, oldest first.
    pub fn tasks(&self, asker: &Caller) -> Vec<Task> {
        let tasks = &self.inner.tasks;
        let shelf = tasks.lock();
        let theirs = shelf.known.iter().filter(|(_, known)| known.is_there(asker, tasks.ttl));
        let mut all: Vec<Task> = theirs.map(|(id, known)| self.view(*id, known)).collect();
        all.sort_unstable_by_key(|task| task.id);
        all
    }

    fn view(&self, id: ExecutionId, known: &Known) -> Task {
        let result = known.result.borrow().clone();
        let status = match &result {
            Some(result) => result.status,
            None => self.flights().call(id).map_or(Status::Pending, |flight| flight.state().status()),
        };
        Task { id, tool: known.tool.clone(), status, result }
    }

    /// What a call of the asker's tenant has printed so far, cut as its result would be; nothing where it printed nothing
    /// or is not known.
    pub fn output_so_far(&self, id: ExecutionId, asker: &Caller) -> Option<String> {
        let flight = self.inner.flights.call(id).filter(|flight| flight.subject.caller.tenant == asker.tenant)?;
        flight.captured().map(|captured| captured.text)
    }

    /// Waits for a task and gives its result; `None` where it is not known.
    pub async fn wait(&self, id: ExecutionId, asker: &Caller) -> Option<Arc<ToolResult>> {
        let mut result = {
            let tasks = &self.inner.tasks;
            tasks.lock().known.get(&id).filter(|known| known.is_there(asker, tasks.ttl))?.result.clone()
        };
        let result = result.wait_for(Option::is_some).await.ok()?;
        result.clone()
    }

    /// Begins a batch in the background: its id at once, its result to be awaited. Must be called within a tokio runtime.
    pub fn spawn_batch(&self, batch: Batch) -> (BatchId, impl Future<Output = Result<BatchResult, CallError>>) {
        let flight = Arc::new(BatchFlight::new(Arc::clone(&batch.caller)));
        let (executor, id) = (self.clone(), flight.id);
        self.inner.flights.add_batch(Arc::clone(&flight));
        let task = self.inner.tasks.running.spawn(async move { executor.run_batch(batch, flight).await });
        (id, async move { task.await.unwrap_or_else(|gone| std::panic::resume_unwind(gone.into_panic())) })
    }

    /// Tells calls of the asker's tenant to end, and how many were told. Their results say who wanted it.
    pub fn cancel(&self, target: impl Into<Target>, asker: &Caller) -> usize {
        let (target, flights) = (target.into(), &self.inner.flights);
        let is_meant = |subject: &Subject| {
            subject.caller.tenant == asker.tenant
                && match &target {
                    Target::Execution(id) => subject.execution == Some(*id),
                    Target::Batch(id) => subject.batch == Some(*id),
                    Target::Session(session) => subject.caller.session.as_ref() == Some(session),
                    Target::Tenant(tenant) => subject.caller.tenant.as_ref() == Some(tenant),
                }
        };
        let cause = match &target {
            Target::Execution(_) => CancelCause::Caller,
            Target::Batch(_) => CancelCause::Batch,
            Target::Session(_) => CancelCause::Session,
            Target::Tenant(_) => CancelCause::Tenant,
        };
        // Batches first, so that no further call of them begins.
        flights.batches(|batch| is_meant(&batch.subject)).iter().for_each(|batch| batch.cancel(cause));
        let calls = flights.live(|flight| is_meant(&flight.subject));
        calls.iter().for_each(|flight| flight.cancel(cause));
        calls.len()
    }

    /// Whether a call is under way.
    pub fn is_executing(&self, id: ExecutionId) -> bool {
        self.inner.flights.call(id).is_some_and(|flight| !flight.is_over())
    }

    /// The events of a call of the asker's tenant from its first one on, until it is over. An unknown id ends at once.
    pub fn observe(&self, id: ExecutionId, asker: &Caller) -> Observer {
        match self.inner.flights.call(id).filter(|flight| flight.subject.caller.tenant == asker.tenant) {
            Some(flight) => {
                let basic_only = self.sees_basic_only(&flight.subject.caller);
                Observer::new(flight, basic_only)
            }
            None => Observer::of_nothing(),
        }
    }

    /// The events of a batch of the asker's tenant and all its calls, until it is over. An unknown id ends at once.
    pub fn observe_batch(&self, id: BatchId, asker: &Caller) -> Observer {
        match self.inner.flights.batch(id).filter(|batch| batch.subject.caller.tenant == asker.tenant) {
            Some(batch) => {
                let basic_only = self.sees_basic_only(&batch.subject.caller);
                Observer::new(batch, basic_only)
            }
            None => Observer::of_nothing(),
        }
    }

    fn sees_basic_only(&self, caller: &Caller) -> bool {
        self.inner.policy.plan(caller).is_ok_and(|plan| !plan.full_events)
    }

    /// All events that the filter wants, from now on. Up to `capacity` wait for a slow subscriber; then it misses some.
    pub fn subscribe(&self, filter: Filter, capacity: usize) -> Subscription {
        self.inner.recorder.bus().subscribe(filter, capacity)
    }

    /// How much there is to do.
    pub fn load(&self) -> Load {
        let (running, waiting) = self.inner.admission.load();
        let breakers =
            self.inner.breakers.states().into_iter().map(|(tool, state)| (tool.to_string(), state)).collect();
        Load { running, waiting, breakers }
    }

    /// Takes no new calls, lets those in flight end for up to `patience`, then cancels the rest and waits for them.
    pub async fn shutdown(&self, patience: Duration) {
        self.inner.stopping.store(true, Ordering::Release);
        self.inner.tasks.running.close();
        self.idle_within(patience).await;
        for flight in self.inner.flights.live(|_| true) {
            flight.cancel(CancelCause::Shutdown);
        }
        self.inner.tasks.running.wait().await;
        // Other calls are carried on by whoever waits for them; one that nobody carries on would never end.
        self.idle_within(self.inner.confinement.grace.saturating_add(Duration::from_secs(3))).await;
    }

    /// Waits until no call is in flight, but not longer than `patience`.
    async fn idle_within(&self, patience: Duration) {
        let began = Instant::now();
        while began.elapsed() < patience && !self.inner.flights.live(|_| true).is_empty() {
            tokio::time::sleep(Duration::from_millis(10).min(patience)).await;
        }
    }

    pub(crate) fn flights(&self) -> &Flights {
        &self.inner.flights
    }

    pub(crate) fn policy(&self) -> &Policy {
        &self.inner.policy
    }

    pub(crate) fn recorder(&self) -> &Recorder {
        &self.inner.recorder
    }

    /// Checks arguments without running anything, unless that is much work.
    pub(crate) fn checked(
        &self,
        tool: &Registered,
        arguments: &Arc<serde_json::Value>,
    ) -> Result<Result<Input, Violations>, Spent> {
        match check_size(arguments) {
            Ok(size) => Input::check(ExecutionId::next(), &tool.input, arguments, size, Allowance::IN_PLACE),
            Err(too_large) => Ok(Err(too_large)),
        }
    }
}
