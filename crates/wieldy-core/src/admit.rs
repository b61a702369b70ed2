//! Admission control: limits the calls that run at once, and queues the rest.
//!
//! [`Admission::admit`] is the only maker of a [`Slot`]. Dropping a slot gives it back, so a call cannot leak one,
//! however it ends.
//!
//! Tenants share fairly, however many agents each has. A free slot goes to the tenant with the fewest running calls.
//! When the queue is full, the tenant with the most waiting calls gives up its last place to one with fewer.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use foldhash::fast::RandomState;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::attempt::{Clock, Clocks};
use crate::call::{Caller, ExecutionId, Priority};
use crate::confirm::Consent;
use crate::error::{CallError, Code, duration_ms};
use crate::flight::Flight;
use crate::name::ToolName;

/// The limits for running and waiting calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of running calls in the executor.
    pub calls_running_max: u32,
    /// Maximum number of running calls per agent.
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
    taker: Taker,
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
        queue.give_back(&self.taker);
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
    agents: HashMap<String, Arc<Account>, RandomState>,
    tenants: HashMap<Option<String>, Arc<Tenant>, RandomState>,
    tools: HashMap<ToolName, u32>,
    /// The waiting calls by tenant. No line is empty.
    lines: BTreeMap<TenantNumber, Line>,
    arrivals: u64,
}

/// The waiting calls of one tenant, in queue order.
type Line = BTreeMap<Rank, Waiting>;
type TenantNumber = u64;

/// The position of a call in the queue, fixed on arrival. All calls age at the same rate, so their order never changes:
/// one point of priority counts like arriving `ageing` earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    came_at_micros: i64,
    arrival: u64,
}

#[derive(Debug)]
struct Waiting {
    taker: Taker,
    called: oneshot::Sender<()>,
}

/// The running calls of one agent.
#[derive(Debug)]
struct Account {
    running: Running,
    tenant: Arc<Tenant>,
}

/// The running calls of one tenant, summed over its agents.
#[derive(Debug)]
struct Tenant {
    number: TenantNumber,
    running: Running,
}

/// A count of running calls. Only code that holds the queue lock changes it.
#[derive(Debug, Default)]
struct Running(AtomicU32);

impl Running {
    fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    fn one_more(&self) {
        self.0.store(self.count() + 1, Ordering::Relaxed);
    }

    fn one_less(&self) {
        self.0.store(self.count() - 1, Ordering::Relaxed);
    }
}

/// The agent and the tool that a slot is counted for.
#[derive(Debug, Clone)]
struct Taker {
    agent: Arc<Account>,
    /// The tool and its maximum number of running calls, if it has one.
    tool: Option<(ToolName, u32)>,
}

/// The limit that keeps a call from running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Full {
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
        tool: &ToolName,
        tool_max: Option<u32>,
        priority: Priority,
        clocks: &Clocks,
    ) -> Result<Slot, CallError> {
        let place = {
            let mut queue = self.gate.lock();
            let limited = tool_max.map(|max| (tool.clone(), max));
            let taker = Taker { agent: queue.account(&flight.subject.caller), tool: limited };
            let Err(full) = queue.room_for(&taker, &self.gate.limits) else {
                queue.take(&taker);
                return Ok(self.slot(consent, taker, Duration::ZERO));
            };
            if queue.waiting() >= self.gate.limits.calls_waiting_max && !queue.make_place(&taker) {
                return Err(self.refusal(full, &taker, Duration::ZERO, "and no more may wait"));
            }
            queue.line_up(&self.gate, taker, self.rank(priority))
        };
        // Most calls do not wait, so the waiting future is boxed to keep every call's future small.
        Box::pin(self.wait(place, consent, flight, clocks)).await
    }

    async fn wait(
        &self,
        mut place: Place,
        consent: &Consent,
        flight: &Flight,
        clocks: &Clocks,
    ) -> Result<Slot, CallError> {
        let since = Instant::now();
        let end = clocks.queue_end(since);
        tokio::select! {
            biased;
            called = &mut place.called => {
                if called.is_err() {
                    let why = "and its place in the queue went to a tenant with fewer";
                    return Err(self.refusal(self.full(&place.taker), &place.taker, since.elapsed(), why));
                }
                place.taken = true;
                Ok(self.slot(consent, place.taker.clone(), since.elapsed()))
            }
            error = flight.stopped() => Err(error),
            () = tokio::time::sleep_until(end) => {
                if clocks.deadline == Some(end) {
                    return Err(Clock::Total.error(flight.opened.elapsed(), false));
                }
                Err(self.refusal(self.full(&place.taker), &place.taker, since.elapsed(), "and none came free in time"))
            }
        }
    }

    fn slot(&self, consent: &Consent, taker: Taker, waited: Duration) -> Slot {
        Slot { execution: consent.execution(), waited, gate: Arc::clone(&self.gate), taker }
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
    fn full(&self, taker: &Taker) -> Full {
        self.gate.lock().room_for(taker, &self.gate.limits).err().unwrap_or(Full::Overall)
    }

    fn rank(&self, priority: Priority) -> i64 {
        let ageing = i64::try_from(self.gate.limits.ageing.as_micros()).unwrap_or(i64::MAX);
        let head_start = i64::from(priority.0).saturating_mul(ageing);
        i64::try_from(self.start.elapsed().as_micros()).unwrap_or(i64::MAX / 2).saturating_sub(head_start)
    }

    fn refusal(&self, full: Full, taker: &Taker, waited: Duration, why: &str) -> CallError {
        let limits = &self.gate.limits;
        let (limit, whose, key) = match full {
            Full::Overall => (limits.calls_running_max, "of the executor".to_owned(), "overall"),
            Full::Agent => (limits.calls_running_per_agent_max, "of this agent".to_owned(), "agent"),
            Full::Tool => {
                let (name, max) = taker.tool.as_ref().expect("only a tool with a limit is full");
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
    /// Returns the account of the calling agent.
    fn account(&mut self, caller: &Caller) -> Arc<Account> {
        let name = match &caller.tenant {
            Some(tenant) => std::borrow::Cow::Owned(format!("{tenant}\0{}", caller.agent)),
            None => std::borrow::Cow::Borrowed(caller.agent.as_str()),
        };
        if let Some(account) = self.agents.get(&*name) {
            return Arc::clone(account);
        }
        // Accounts are cached for the agent's next call. Above this number, unused ones are dropped.
        if self.agents.len() > 10_000 {
            self.agents.retain(|_, account| Arc::strong_count(account) > 1);
            self.tenants.retain(|_, tenant| Arc::strong_count(tenant) > 1);
            self.tools.retain(|_, running| *running > 0);
        }
        let account = Arc::new(Account { running: Running::default(), tenant: self.tenant(caller.tenant.as_ref()) });
        self.agents.insert(name.into_owned(), Arc::clone(&account));
        account
    }

    fn tenant(&mut self, name: Option<&String>) -> Arc<Tenant> {
        self.arrivals += 1;
        let new = || Arc::new(Tenant { number: self.arrivals, running: Running::default() });
        Arc::clone(self.tenants.entry(name.cloned()).or_insert_with(new))
    }

    fn room_for(&self, taker: &Taker, limits: &Limits) -> Result<(), Full> {
        if self.running >= limits.calls_running_max {
            return Err(Full::Overall);
        }
        if taker.agent.running.count() >= limits.calls_running_per_agent_max {
            return Err(Full::Agent);
        }
        if let Some((tool, max)) = &taker.tool
            && self.tools.get(tool).is_some_and(|running| running >= max)
        {
            return Err(Full::Tool);
        }
        Ok(())
    }

    fn take(&mut self, taker: &Taker) {
        self.running += 1;
        taker.agent.running.one_more();
        taker.agent.tenant.running.one_more();
        if let Some((tool, _)) = &taker.tool {
            *self.tools.entry(tool.clone()).or_insert(0) += 1;
        }
    }

    fn give_back(&mut self, taker: &Taker) {
        self.running -= 1;
        taker.agent.running.one_less();
        taker.agent.tenant.running.one_less();
        if let Some((tool, _)) = &taker.tool
            && let Some(running) = self.tools.get_mut(tool)
        {
            *running -= 1;
        }
    }

    fn line_up(&mut self, gate: &Arc<Gate>, taker: Taker, came_at_micros: i64) -> Place {
        let rank = Rank { came_at_micros, arrival: self.arrivals };
        self.arrivals += 1;
        let (call, called) = oneshot::channel();
        let line = self.lines.entry(taker.agent.tenant.number).or_default();
        line.insert(rank, Waiting { taker: taker.clone(), called: call });
        Place { gate: Arc::clone(gate), rank, taker, called, taken: false }
    }

    /// Returns the number of waiting calls.
    fn waiting(&self) -> usize {
        self.lines.values().map(Line::len).sum()
    }

    /// Removes a waiting call from the queue.
    fn leave(&mut self, tenant: TenantNumber, rank: &Rank) -> Option<Waiting> {
        let line = self.lines.get_mut(&tenant)?;
        let waiting = line.remove(rank);
        if line.is_empty() {
            self.lines.remove(&tenant);
        }
        waiting
    }

    /// Frees a place in a full queue: takes the last place of the tenant with the most, if `taker`'s tenant has fewer.
    fn make_place(&mut self, taker: &Taker) -> bool {
        let own = self.lines.get(&taker.agent.tenant.number).map_or(0, Line::len);
        let Some(longest) = self.lines.values_mut().max_by_key(|line| line.len()) else { return false };
        // Dropping the evicted entry drops its sender, which tells the waiting call that it lost its place.
        longest.len() > own + 1 && longest.pop_last().is_some()
    }

    /// Gives free slots to waiting calls: the tenant with the fewest running calls first, and within a tenant in queue
    /// order. A call blocked by the limit of its agent or tool does not block the calls behind it.
    fn hand_out(&mut self, limits: &Limits) {
        while self.running < limits.calls_running_max {
            let has_room = |(_, waiting): &(&Rank, &Waiting)| self.room_for(&waiting.taker, limits).is_ok();
            let firsts = self.lines.iter().filter_map(|(tenant, line)| Some((*tenant, line.iter().find(has_room)?)));
            let next = firsts.min_by_key(|(_, (rank, first))| (first.taker.agent.tenant.running.count(), **rank));
            let Some((tenant, rank)) = next.map(|(tenant, (rank, _))| (tenant, *rank)) else { break };
            let waiting = self.leave(tenant, &rank).expect("it was just found");
            self.take(&waiting.taker);
            // If the waiting call was cancelled meanwhile, dropping its place gives the slot back.
            let _ = waiting.called.send(());
        }
    }
}

/// A place in the queue. Dropping a waiting place removes it from the queue. Dropping a place whose slot was granted
/// but not yet taken passes the slot on. An evicted place has nothing to undo.
struct Place {
    gate: Arc<Gate>,
    rank: Rank,
    taker: Taker,
    called: oneshot::Receiver<()>,
    taken: bool,
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        let mut queue = self.gate.lock();
        let waited = queue.leave(self.taker.agent.tenant.number, &self.rank).is_some();
        if !waited && self.called.try_recv().is_ok() {
            queue.give_back(&self.taker);
            queue.hand_out(&self.gate.limits);
        }
    }
}
