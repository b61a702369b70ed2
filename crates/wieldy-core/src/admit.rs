//! Admission: how many calls run at once, and who waits.
//!
//! [`Admission::admit`] is the only maker of a [`Slot`]. A slot is given back when it is dropped, so a call
//! cannot leak one, whatever way it ends.

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

/// How many calls may run and wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// All calls of the executor.
    pub calls_running_max: u32,
    /// The calls of one agent.
    pub calls_running_per_agent_max: u32,
    /// All calls that wait for a slot.
    pub calls_waiting_max: usize,
    /// How long a call waits for a slot, unless it says otherwise.
    pub queue_timeout: Duration,
    /// How long a call must wait to rise by one point of priority; so nobody waits for ever.
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

/// The proof that a call may run now. Given back when dropped.
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

    /// How long the call waited for it.
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

/// Gives out slots.
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
    tools: HashMap<ToolName, u32>,
    waiting: BTreeMap<Rank, Waiting>,
    arrivals: u64,
}

/// Who stands where in the queue. Everybody rises at the same pace, so the order never changes once it is known:
/// a point of priority is worth having come `ageing` earlier.
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

/// How many calls of one agent run. Changed only by who holds the queue.
#[derive(Debug, Default)]
struct Account {
    running: AtomicU32,
}

impl Account {
    fn running(&self) -> u32 {
        self.running.load(Ordering::Relaxed)
    }

    fn set_running(&self, running: u32) {
        self.running.store(running, Ordering::Relaxed);
    }
}

/// On whose account a slot is.
#[derive(Debug, Clone)]
struct Taker {
    agent: Arc<Account>,
    /// The tool and how many of its calls may run, where it has a limit.
    tool: Option<(ToolName, u32)>,
}

/// Which limit stands in the way.
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

    /// Takes a slot, or waits for one: until the queue clock or the total clock runs out, or somebody cancels.
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
            if queue.waiting.len() >= self.gate.limits.calls_waiting_max {
                return Err(self.refusal(full, &taker, Duration::ZERO, "and no more may wait"));
            }
            queue.line_up(&self.gate, taker, self.rank(priority))
        };
        // Most calls need not wait, so waiting is not part of everybody's future.
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
            _ = &mut place.called => {
                place.taken = true;
                Ok(self.slot(consent, place.taker.clone(), since.elapsed()))
            }
            error = flight.stopped() => Err(error),
            () = tokio::time::sleep_until(end) => {
                if clocks.deadline == Some(end) {
                    return Err(Clock::Total.error(flight.opened.elapsed(), false));
                }
                let full = self.gate.lock().room_for(&place.taker, &self.gate.limits).err().unwrap_or(Full::Overall);
                Err(self.refusal(full, &place.taker, since.elapsed(), "and none came free in time"))
            }
        }
    }

    fn slot(&self, consent: &Consent, taker: Taker, waited: Duration) -> Slot {
        Slot { execution: consent.execution(), waited, gate: Arc::clone(&self.gate), taker }
    }

    /// How many calls run and how many wait.
    pub(crate) fn load(&self) -> (u32, usize) {
        let queue = self.gate.lock();
        (queue.running, queue.waiting.len())
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
    /// The account of an agent's calls.
    fn account(&mut self, caller: &Caller) -> Arc<Account> {
        let name = match &caller.tenant {
            Some(tenant) => std::borrow::Cow::Owned(format!("{tenant}\0{}", caller.agent)),
            None => std::borrow::Cow::Borrowed(caller.agent.as_str()),
        };
        if let Some(account) = self.agents.get(&*name) {
            return Arc::clone(account);
        }
        // Accounts are kept for the next call of the same agent, but not of agents without number.
        if self.agents.len() > 10_000 {
            self.agents.retain(|_, account| Arc::strong_count(account) > 1);
            self.tools.retain(|_, running| *running > 0);
        }
        Arc::clone(self.agents.entry(name.into_owned()).or_default())
    }

    fn room_for(&self, taker: &Taker, limits: &Limits) -> Result<(), Full> {
        if self.running >= limits.calls_running_max {
            return Err(Full::Overall);
        }
        if taker.agent.running() >= limits.calls_running_per_agent_max {
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
        taker.agent.set_running(taker.agent.running() + 1);
        if let Some((tool, _)) = &taker.tool {
            *self.tools.entry(tool.clone()).or_insert(0) += 1;
        }
    }

    fn give_back(&mut self, taker: &Taker) {
        self.running -= 1;
        taker.agent.set_running(taker.agent.running() - 1);
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
        self.waiting.insert(rank, Waiting { taker: taker.clone(), called: call });
        Place { gate: Arc::clone(gate), rank, taker, called, taken: false }
    }

    /// Calls everybody for whom there is room, first the first in line. Who is held up by a limit of its own
    /// does not hold up those behind.
    fn hand_out(&mut self, limits: &Limits) {
        while self.running < limits.calls_running_max {
            let next = self.waiting.iter().find(|(_, waiting)| self.room_for(&waiting.taker, limits).is_ok());
            let Some(rank) = next.map(|(rank, _)| *rank) else { break };
            let waiting = self.waiting.remove(&rank).expect("it was just found");
            self.take(&waiting.taker);
            // Who has just gone away gives the slot back when its place is dropped.
            let _ = waiting.called.send(());
        }
    }
}

/// A place in the queue. Dropped before its turn it is empty; dropped after it, the slot goes to the next.
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
        if queue.waiting.remove(&self.rank).is_none() {
            queue.give_back(&self.taker);
            queue.hand_out(&self.gate.limits);
        }
    }
}
