//! Admission control: limits the calls that run at once, and queues the rest.
//!
//! [`Admission::admit`] is the only maker of a [`Slot`]. Dropping a slot gives it back, so a call cannot leak one,
//! however it ends.
//!
//! The queue goes by priority and age: a priority counts as an earlier arrival, so no call waits for ever behind others.
//! Tenants share fairly, however many agents each has. A free slot goes to the tenant with the fewest running calls.
//! When the queue is full, the tenant with the most waiting calls gives up its last place to one with fewer.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use foldhash::fast::RandomState;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::call::{Caller, ExecutionId, Priority};
use crate::clock::{Clock, Clocks};
use crate::confirm::Consent;
use crate::error::{CallError, Code, duration_ms};
use crate::flight::Flight;
use crate::name::ToolName;

/// The limits for running and waiting calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of running calls in the executor.
    pub calls_running_max: u32,
    /// Maximum number of running calls per agent, unless the [`slots`](crate::Plan::slots) of its plan say otherwise.
    pub calls_running_per_agent_max: u32,
    /// Maximum number of calls that wait for a slot. When the queue is full, the tenant with the most waiting calls
    /// gives up its last place to a tenant with fewer.
    pub calls_waiting_max: usize,
    /// The longest that a call waits for a slot, unless the call sets its own limit.
    pub queue_timeout: Duration,
    /// The time that a waiting call needs to rise by one point of priority. Ageing keeps low priorities from starving.
    pub ageing: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            calls_running_max: 64,
            calls_running_per_agent_max: 4,
            calls_waiting_max: 1024,
            queue_timeout: Duration::from_secs(30),
            ageing: Duration::from_secs(1),
        }
    }
}

/// The proof that a call may run now. Dropping it gives the slot back.
#[derive(Debug)]
pub struct Slot {
    execution: ExecutionId,
    waited: Duration,
    gate: Arc<Gate>,
    requester: Requester,
}

impl Slot {
    pub(crate) fn execution(&self) -> ExecutionId {
        self.execution
    }

    /// Returns how long the call waited for the slot.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut queue = self.gate.lock();
        queue.give_back(&self.requester);
        queue.hand_out(&self.gate.limits);
    }
}

/// Hands out slots.
#[derive(Debug)]
pub(crate) struct Admission {
    gate: Arc<Gate>,
    start: Instant,
}

#[derive(Debug)]
struct Gate {
    limits: Limits,
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    running: u32,
    agents: HashMap<String, Arc<Agent>, RandomState>,
    tenants: HashMap<Option<String>, Arc<Tenant>, RandomState>,
    tools: HashMap<ToolName, u32>,
    /// The waiting calls by tenant. No queue is empty.
    tenant_queues: BTreeMap<TenantNumber, TenantQueue>,
    arrivals: u64,
}

/// The waiting calls of one tenant, in queue order.
type TenantQueue = BTreeMap<Rank, WaitingCall>;
type TenantNumber = u64;

/// The position of a call in the queue, fixed on arrival. All calls age at the same rate, so their order never changes:
/// one point of priority counts like arriving `ageing` earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    arrived_at_micros: i64,
    arrival: u64,
}

#[derive(Debug)]
struct WaitingCall {
    requester: Requester,
    wake: oneshot::Sender<()>,
}

/// The running calls of one agent.
#[derive(Debug)]
struct Agent {
    running: RunningCount,
    tenant: Arc<Tenant>,
}

/// The running calls of one tenant, summed over its agents.
#[derive(Debug)]
struct Tenant {
    number: TenantNumber,
    running: RunningCount,
}

/// A count of running calls. Only code that holds the queue lock changes it.
#[derive(Debug, Default)]
struct RunningCount(AtomicU32);

impl RunningCount {
    fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    fn increment(&self) {
        self.0.store(self.count() + 1, Ordering::Relaxed);
    }

    fn decrement(&self) {
        self.0.store(self.count() - 1, Ordering::Relaxed);
    }
}

/// The agent and the tool that a slot is counted for.
#[derive(Debug, Clone)]
struct Requester {
    agent: Arc<Agent>,
    /// Maximum number of running calls of the agent.
    agent_max: u32,
    /// The tool and its maximum number of running calls, if it has one.
    tool: Option<(ToolName, u32)>,
}

/// The slot that a call needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WantedSlot<'a> {
    pub(crate) tool: &'a ToolName,
    /// Maximum number of running calls of the tool.
    pub(crate) tool_max: Option<u32>,
    /// Maximum number of running calls of the agent.
    pub(crate) agent_max: u32,
    pub(crate) priority: Priority,
}

/// The limit that keeps a call from running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReachedLimit {
    Overall,
    Agent,
    Tool,
}

impl Admission {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { gate: Arc::new(Gate { limits, queue: Mutex::default() }), start: Instant::now() }
    }

    /// Takes a slot, or waits for one until the queue clock or the total clock runs out or the call is cancelled.
    pub(crate) async fn admit(
        &self,
        consent: &Consent,
        flight: &Flight,
        wanted: WantedSlot<'_>,
        clocks: &Clocks,
    ) -> Result<Slot, CallError> {
        let place = {
            let mut queue = self.gate.lock();
            let (agent, agent_max) = (queue.agent(&flight.subject.caller), wanted.agent_max);
            let tool = wanted.tool_max.map(|max| (wanted.tool.clone(), max));
            let requester = Requester { agent, agent_max, tool };
            let Err(reached) = queue.check_limits(&requester, &self.gate.limits) else {
                queue.take(&requester);
                return Ok(self.slot(consent, requester, Duration::ZERO));
            };
            if queue.waiting() >= self.gate.limits.calls_waiting_max && !queue.evict_for(&requester) {
                return Err(self.refusal(reached, &requester, Duration::ZERO, "and the queue is full"));
            }
            queue.enqueue(&self.gate, requester, self.rank(wanted.priority))
        };
        // Most calls do not wait, so the waiting future is boxed to keep every call's future small.
        Box::pin(self.wait(place, consent, flight, clocks)).await
    }

    async fn wait(
        &self,
        mut place: QueuePlace,
        consent: &Consent,
        flight: &Flight,
        clocks: &Clocks,
    ) -> Result<Slot, CallError> {
        let since = Instant::now();
        let end = clocks.queue_end(since);
        let refusal = |requester: &Requester, why: &str| {
            self.refusal(self.reached_limit(requester), requester, since.elapsed(), why)
        };
        tokio::select! {
            biased;
            woken = &mut place.woken => {
                if woken.is_err() {
                    return Err(refusal(&place.requester, "and a tenant with fewer waiting calls took its place"));
                }
                place.taken = true;
                Ok(self.slot(consent, place.requester.clone(), since.elapsed()))
            }
            error = flight.wait_until_cancelled() => Err(error),
            () = tokio::time::sleep_until(end) => {
                if clocks.deadline == Some(end) {
                    return Err(Clock::Total.error(flight.opened.elapsed(), end - flight.opened, false));
                }
                Err(refusal(&place.requester, "and none became free in time"))
            }
        }
    }

    fn slot(&self, consent: &Consent, requester: Requester, waited: Duration) -> Slot {
        Slot { execution: consent.execution(), waited, gate: Arc::clone(&self.gate), requester }
    }

    pub(crate) fn limits(&self) -> Limits {
        self.gate.limits
    }

    /// Returns the numbers of running and of waiting calls.
    pub(crate) fn load(&self) -> (u32, usize) {
        let queue = self.gate.lock();
        (queue.running, queue.waiting())
    }

    /// Returns the limit that currently keeps the call from running.
    fn reached_limit(&self, requester: &Requester) -> ReachedLimit {
        self.gate.lock().check_limits(requester, &self.gate.limits).err().unwrap_or(ReachedLimit::Overall)
    }

    fn rank(&self, priority: Priority) -> i64 {
        let ageing = i64::try_from(self.gate.limits.ageing.as_micros()).unwrap_or(i64::MAX);
        let head_start = i64::from(priority.0).saturating_mul(ageing);
        i64::try_from(self.start.elapsed().as_micros()).unwrap_or(i64::MAX / 2).saturating_sub(head_start)
    }

    fn refusal(&self, reached: ReachedLimit, requester: &Requester, waited: Duration, why: &str) -> CallError {
        let limits = &self.gate.limits;
        let (limit, whose, key) = match reached {
            ReachedLimit::Overall => (limits.calls_running_max, "of the executor".to_owned(), "overall"),
            ReachedLimit::Agent => (requester.agent_max, "of this agent".to_owned(), "agent"),
            ReachedLimit::Tool => {
                let (name, max) = requester.tool.as_ref().expect("only a tool with a limit is full");
                (*max, format!("of `{name}`"), "tool")
            }
        };
        CallError::new(Code::ConcurrencyLimitExceeded, format!("all {limit} slots {whose} are taken, {why}"))
            .suggest("wait until a running call has ended and call again")
            .detail("limit", key)
            .detail("slots", limit)
            .detail("waited_ms", duration_ms(waited))
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("no code panics while it holds the queue")
    }
}

impl Queue {
    /// Returns the calling agent with its count of running calls.
    fn agent(&mut self, caller: &Caller) -> Arc<Agent> {
        let name = match &caller.tenant {
            Some(tenant) => std::borrow::Cow::Owned(format!("{tenant}\0{}", caller.agent)),
            None => std::borrow::Cow::Borrowed(caller.agent.as_str()),
        };
        if let Some(agent) = self.agents.get(&*name) {
            return Arc::clone(agent);
        }
        // Agents are cached for their next call. Above this number, unused ones are dropped.
        if self.agents.len() > 10_000 {
            self.agents.retain(|_, agent| Arc::strong_count(agent) > 1);
            self.tenants.retain(|_, tenant| Arc::strong_count(tenant) > 1);
            self.tools.retain(|_, running| *running > 0);
        }
        let agent = Arc::new(Agent { running: RunningCount::default(), tenant: self.tenant(caller.tenant.as_ref()) });
        self.agents.insert(name.into_owned(), Arc::clone(&agent));
        agent
    }

    fn tenant(&mut self, name: Option<&String>) -> Arc<Tenant> {
        self.arrivals += 1;
        let new = || Arc::new(Tenant { number: self.arrivals, running: RunningCount::default() });
        Arc::clone(self.tenants.entry(name.cloned()).or_insert_with(new))
    }

    fn check_limits(&self, requester: &Requester, limits: &Limits) -> Result<(), ReachedLimit> {
        if self.running >= limits.calls_running_max {
            return Err(ReachedLimit::Overall);
        }
        if requester.agent.running.count() >= requester.agent_max {
            return Err(ReachedLimit::Agent);
        }
        if let Some((tool, max)) = &requester.tool
            && self.tools.get(tool).is_some_and(|running| running >= max)
        {
            return Err(ReachedLimit::Tool);
        }
        Ok(())
    }

    fn take(&mut self, requester: &Requester) {
        self.running += 1;
        requester.agent.running.increment();
        requester.agent.tenant.running.increment();
        if let Some((tool, _)) = &requester.tool {
            *self.tools.entry(tool.clone()).or_insert(0) += 1;
        }
    }

    fn give_back(&mut self, requester: &Requester) {
        self.running -= 1;
        requester.agent.running.decrement();
        requester.agent.tenant.running.decrement();
        if let Some((tool, _)) = &requester.tool
            && let Some(running) = self.tools.get_mut(tool)
        {
            *running -= 1;
        }
    }

    fn enqueue(&mut self, gate: &Arc<Gate>, requester: Requester, arrived_at_micros: i64) -> QueuePlace {
        let rank = Rank { arrived_at_micros, arrival: self.arrivals };
        self.arrivals += 1;
        let (wake, woken) = oneshot::channel();
        let calls = self.tenant_queues.entry(requester.agent.tenant.number).or_default();
        calls.insert(rank, WaitingCall { requester: requester.clone(), wake });
        QueuePlace { gate: Arc::clone(gate), rank, requester, woken, taken: false }
    }

    /// Returns the number of waiting calls.
    fn waiting(&self) -> usize {
        self.tenant_queues.values().map(TenantQueue::len).sum()
    }

    /// Removes a waiting call from the queue.
    fn remove(&mut self, tenant: TenantNumber, rank: &Rank) -> Option<WaitingCall> {
        let calls = self.tenant_queues.get_mut(&tenant)?;
        let waiting = calls.remove(rank);
        if calls.is_empty() {
            self.tenant_queues.remove(&tenant);
        }
        waiting
    }

    /// Frees a place in a full queue: takes the last place of the tenant with the most, if the
    /// requester's tenant has fewer.
    fn evict_for(&mut self, requester: &Requester) -> bool {
        let own = self.tenant_queues.get(&requester.agent.tenant.number).map_or(0, TenantQueue::len);
        let Some(longest) = self.tenant_queues.values_mut().max_by_key(|calls| calls.len()) else { return false };
        // Dropping the evicted entry drops its sender, which tells the waiting call that it lost its place.
        longest.len() > own + 1 && longest.pop_last().is_some()
    }

    /// Gives free slots to waiting calls: the tenant with the fewest running calls first, and within a tenant in queue
    /// order. A call blocked by the limit of its agent or tool does not block the calls behind it.
    fn hand_out(&mut self, limits: &Limits) {
        while self.running < limits.calls_running_max {
            let may_run = |(_, waiting): &(&Rank, &WaitingCall)| self.check_limits(&waiting.requester, limits).is_ok();
            let firsts =
                self.tenant_queues.iter().filter_map(|(tenant, calls)| Some((*tenant, calls.iter().find(may_run)?)));
            let next = firsts.min_by_key(|(_, (rank, first))| (first.requester.agent.tenant.running.count(), **rank));
            let Some((tenant, rank)) = next.map(|(tenant, (rank, _))| (tenant, *rank)) else { break };
            let waiting = self.remove(tenant, &rank).expect("it was just found");
            self.take(&waiting.requester);
            // If the waiting call was cancelled meanwhile, dropping its place gives the slot back.
            let _ = waiting.wake.send(());
        }
    }
}

/// A place in the queue. Dropping a waiting place removes it from the queue. Dropping a place whose slot was granted
/// but not yet taken passes the slot on. An evicted place has nothing to undo.
struct QueuePlace {
    gate: Arc<Gate>,
    rank: Rank,
    requester: Requester,
    woken: oneshot::Receiver<()>,
    taken: bool,
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        let mut queue = self.gate.lock();
        let waited = queue.remove(self.requester.agent.tenant.number, &self.rank).is_some();
        if !waited && self.woken.try_recv().is_ok() {
            queue.give_back(&self.requester);
            queue.hand_out(&self.gate.limits);
        }
    }
}
