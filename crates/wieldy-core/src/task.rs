//! Tasks: calls in the background that clients poll, observe and cancel; and the orderly shutdown of all calls.
//!
//! Results of tasks are in memory. A journal with a history also stores them, and returns them at the next start
//! (`resume.rs`).

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

/// The default time for which the result of a task is kept.
pub const TASK_TTL: Duration = Duration::from_secs(60 * 60);

/// Maximum number of finished tasks that are stored.
const TASKS_MAX: usize = 10_000;

/// The calls that run in the background, and their results for a while.
pub(crate) struct Tasks {
    table: Mutex<TaskTable>,
    running: TaskTracker,
    ttl: Duration,
}

struct TaskTable {
    records: HashMap<ExecutionId, TaskRecord>,
    /// The number of tasks above which expired ones are removed.
    sweep_at: usize,
}

struct TaskRecord {
    tool: Arc<str>,
    /// The hash of the tenant that began it.
    tenant: Option<String>,
    result: watch::Receiver<Option<Arc<ToolResult>>>,
    /// The time at which it ended, once it has.
    ended: Arc<OnceLock<Instant>>,
}

impl TaskRecord {
    fn is_visible_to(&self, asker: &Caller, ttl: Duration) -> bool {
        self.tenant == asker.tenant_hash() && !self.is_expired(ttl)
    }

    fn is_expired(&self, ttl: Duration) -> bool {
        self.ended.get().is_some_and(|ended| ended.elapsed() >= ttl)
    }
}

/// The state of a task.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// The engine's id of the call.
    pub id: ExecutionId,
    /// The requested tool.
    pub tool: Arc<str>,
    /// The status.
    pub status: Status,
    /// The result, once the task is over.
    pub result: Option<Arc<ToolResult>>,
}

/// The target of a cancellation.
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

/// The current load of an executor.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// The number of calls that run.
    pub running: u32,
    /// The number of calls that wait for a slot.
    pub waiting: usize,
    /// The states of the circuit breakers of failing tools.
    pub breakers: Vec<(String, BreakerState)>,
}

impl Tasks {
    /// The smallest number of tasks at which a sweep is worth its cost.
    const SWEEP_MIN: usize = 1024;

    pub(crate) fn new(ttl: Duration) -> Self {
        let table = TaskTable { records: HashMap::new(), sweep_at: Self::SWEEP_MIN };
        Self { table: Mutex::new(table), running: TaskTracker::new(), ttl }
    }

    fn lock(&self) -> MutexGuard<'_, TaskTable> {
        self.table.lock().expect("no code panics while it holds the tasks")
    }

    fn add(&self, id: ExecutionId, task: TaskRecord) {
        let mut table = self.lock();
        if table.records.len() >= table.sweep_at {
            table.records.retain(|_, task| !task.is_expired(self.ttl));
            let mut over: Vec<_> =
                table.records.iter().filter_map(|(id, task)| Some((*task.ended.get()?, *id))).collect();
            over.sort_unstable();
            for (_, id) in over.into_iter().take(table.records.len().saturating_sub(TASKS_MAX)) {
                table.records.remove(&id);
            }
            // Sweep again at twice the remaining number: so a sweep costs each task a constant share.
            table.sweep_at = Self::SWEEP_MIN.max(table.records.len() * 2);
        }
        table.records.insert(id, task);
    }

    /// Stores the result of a task that ended under an earlier executor.
    pub(crate) fn restore(&self, result: ToolResult, tenant: Option<String>) {
        let ago = Timestamp::now().duration_since(result.timing.completed_at);
        let ago = Duration::try_from(ago).unwrap_or_default();
        let Some(ended) = Instant::now().checked_sub(ago).filter(|_| ago < self.ttl) else { return };
        let (id, tool) = (result.execution_id, Arc::clone(&result.tool));
        let (_, result) = watch::channel(Some(Arc::new(result)));
        self.add(id, TaskRecord { tool, tenant, result, ended: Arc::new(OnceLock::from(ended)) });
    }
}

/// A call that has begun. Awaiting it runs the call and returns its result. If it is dropped, the call is cancelled.
pub struct Begun {
    executor: Executor,
    flight: Arc<Flight>,
    tool: Arc<str>,
    work: BoxFuture<'static, ToolResult>,
}

impl Begun {
    /// Returns the engine's id of the call, for observing and cancelling it.
    pub fn id(&self) -> ExecutionId {
        self.flight.id
    }

    /// Continues the call in the background as a task. Clients can ask for the result later, even from the next
    /// executor on the same history: the id is returned once the history durably says that the call is a task. The call
    /// continues meanwhile, even if this future is dropped. Must be called within a tokio runtime.
    pub async fn into_task(self) -> ExecutionId {
        let Self { executor, flight, tool, work } = self;
        let recorded = flight.become_task();
        executor.run_in_background(flight.id, tool, flight.subject.caller.tenant_hash(), work);
        // The same as for an answer: a client that has the id may ask for it after a crash.
        if executor.inner.durability.waits_to_answer(&recorded, false) {
            let _ = tokio::time::timeout(CLOSING_PATIENCE, executor.inner.recorder.wait_until_stored(recorded)).await;
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
    /// Begins a call that can become a task later, if it takes too long to wait for.
    pub fn begin(&self, call: Call) -> Begun {
        let entry = self.open(call, None, false);
        let (flight, tool) = (Arc::clone(&entry.flight), Arc::clone(&entry.call.tool));
        let executor = self.clone();
        Begun { executor: self.clone(), flight, tool, work: Box::pin(async move { executor.walk(entry).await }) }
    }

    /// Begins a call in the background and returns its id at once. Must be called within a tokio runtime.
    pub fn spawn(&self, call: Call) -> ExecutionId {
        let entry = self.open(call, None, true);
        self.continue_in_background(entry)
    }

    /// Continues a call in the background.
    pub(crate) fn continue_in_background(&self, entry: Box<Entry>) -> ExecutionId {
        let (tool, tenant) = (Arc::clone(&entry.call.tool), entry.call.caller.tenant_hash());
        let (id, executor) = (entry.flight.id, self.clone());
        self.run_in_background(id, tool, tenant, async move { executor.walk(entry).await });
        id
    }

    /// Runs a call's future in the background, and keeps its result for a while.
    fn run_in_background(
        &self,
        id: ExecutionId,
        tool: Arc<str>,
        tenant: Option<String>,
        work: impl Future<Output = ToolResult> + Send + 'static,
    ) {
        let (sender, result) = watch::channel(None);
        let ended = Arc::new(OnceLock::new());
        self.inner.tasks.add(id, TaskRecord { tool, tenant, result, ended: Arc::clone(&ended) });
        self.inner.tasks.running.spawn(async move {
            let result = work.await;
            let _ = ended.set(Instant::now());
            sender.send_replace(Some(Arc::new(result)));
        });
    }

    /// Returns the time for which the result of a task is kept.
    pub fn task_ttl(&self) -> Duration {
        self.inner.tasks.ttl
    }

    /// Returns the state of a task, if it is known and belongs to the asker's tenant.
    pub fn task(&self, id: ExecutionId, asker: &Caller) -> Option<Task> {
        let tasks = &self.inner.tasks;
        tasks
            .lock()
            .records
            .get(&id)
            .filter(|record| record.is_visible_to(asker, tasks.ttl))
            .map(|record| self.view(id, record))
            .map(|task| Task { result: task.result.map(|result| self.with_due_notes(result, asker)), ..task })
    }

    /// Returns all known tasks of the asker's tenant, oldest first.
    pub fn tasks(&self, asker: &Caller) -> Vec<Task> {
        let tasks = &self.inner.tasks;
        let table = tasks.lock();
        let theirs = table.records.iter().filter(|(_, record)| record.is_visible_to(asker, tasks.ttl));
        let mut all: Vec<Task> = theirs.map(|(id, record)| self.view(*id, record)).collect();
        all.sort_unstable_by_key(|task| task.id);
        all
    }

    fn view(&self, id: ExecutionId, record: &TaskRecord) -> Task {
        let result = record.result.borrow().clone();
        let status = match &result {
            Some(result) => result.status,
            None => self.flights().call(id).map_or(Status::Pending, |flight| flight.state().status()),
        };
        Task { id, tool: record.tool.clone(), status, result }
    }

    /// Returns the output so far of a call of the asker's tenant, cut as in a result. Returns `None` if it has printed
    /// nothing or is not known.
    pub fn output_so_far(&self, id: ExecutionId, asker: &Caller) -> Option<String> {
        let flight = self.inner.flights.call(id).filter(|flight| flight.subject.caller.tenant == asker.tenant)?;
        flight.captured().map(|captured| captured.text)
    }

    /// Waits for a task and returns its result, or `None` if the task is not known.
    pub async fn wait(&self, id: ExecutionId, asker: &Caller) -> Option<Arc<ToolResult>> {
        let mut result = {
            let tasks = &self.inner.tasks;
            tasks.lock().records.get(&id).filter(|record| record.is_visible_to(asker, tasks.ttl))?.result.clone()
        };
        let ended = result.wait_for(Option::is_some).await.ok()?.clone();
        ended.map(|result| self.with_due_notes(result, asker))
    }

    /// Begins a batch in the background. Returns its id and a future of its result. Must be called in a tokio runtime.
    pub fn spawn_batch(
        &self,
        batch: Batch,
    ) -> (BatchId, impl Future<Output = Result<BatchResult, CallError>> + Send + use<>) {
        let flight = Arc::new(BatchFlight::new(Arc::clone(&batch.caller)));
        let (executor, id) = (self.clone(), flight.id);
        self.inner.flights.add_batch(Arc::clone(&flight));
        let task = self.inner.tasks.running.spawn(async move { executor.run_batch(batch, flight).await });
        (id, async move { task.await.unwrap_or_else(|gone| std::panic::resume_unwind(gone.into_panic())) })
    }

    /// Cancels calls of the asker's tenant and returns their number. Each result names the cause of the cancellation.
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
        let calls = flights.unfinished_calls(|flight| is_meant(&flight.subject));
        calls.iter().for_each(|flight| flight.cancel(cause));
        calls.len()
    }

    /// Returns true if a call is running.
    pub fn is_executing(&self, id: ExecutionId) -> bool {
        self.inner.flights.call(id).is_some_and(|flight| !flight.is_over())
    }

    /// Returns the events of a call of the asker's tenant, from first to last. For an unknown id it ends at once.
    pub fn observe(&self, id: ExecutionId, asker: &Caller) -> Observer {
        match self.inner.flights.call(id).filter(|flight| flight.subject.caller.tenant == asker.tenant) {
            Some(flight) => {
                let basic_only = self.sees_basic_only(&flight.subject.caller);
                Observer::new(flight, basic_only)
            }
            None => Observer::of_nothing(),
        }
    }

    /// Returns the events of a batch of the asker's tenant and of all its calls. For an unknown id it ends at once.
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

    /// Returns all future events that match the filter. A slow subscriber loses the events beyond `capacity`.
    pub fn subscribe(&self, filter: Filter, capacity: usize) -> Subscription {
        self.inner.recorder.bus().subscribe(filter, capacity)
    }

    /// Returns the current load.
    pub fn load(&self) -> Load {
        let (running, waiting) = self.inner.admission.load();
        let breakers =
            self.inner.breakers.states().into_iter().map(|(tool, state)| (tool.to_string(), state)).collect();
        Load { running, waiting, breakers }
    }

    /// Stops taking calls, waits up to `patience` for those in flight, then cancels the rest and waits for them.
    pub async fn shutdown(&self, patience: Duration) {
        self.inner.stopping.store(true, Ordering::Release);
        self.inner.tasks.running.close();
        self.idle_within(patience).await;
        for flight in self.inner.flights.unfinished_calls(|_| true) {
            flight.cancel(CancelCause::Shutdown);
        }
        self.inner.tasks.running.wait().await;
        // Other calls are driven by their waiting callers. Without one, a call would never end, so bound this wait.
        self.idle_within(self.inner.confinement.grace.saturating_add(Duration::from_secs(3))).await;
    }

    /// Waits until no call is in flight, for at most `patience`.
    async fn idle_within(&self, patience: Duration) {
        let began = Instant::now();
        while began.elapsed() < patience && !self.inner.flights.unfinished_calls(|_| true).is_empty() {
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

    /// Checks arguments without running anything. Fails with [`Spent`] if that takes much work.
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
