//! Orders the calls of a batch: calls that touch the same paths wait for each other, and a ready queue picks the next.
//!
//! No step compares every pair of calls: time and memory grow with the number of touched paths, even if many calls
//! touch the same path.

use std::collections::{BTreeSet, HashMap, VecDeque};

use crate::batch::BatchCall;
use crate::call::Call;
use crate::footprint::Touches;

/// The predecessors of each call. Entries after the last call are not calls but join nodes, which stand for several
/// calls: a join node is over when all of its calls are.
pub(crate) type WaitsFor = Vec<BTreeSet<usize>>;

/// Maximum number of calls that a result names as those that it waited for.
const WAITED_FOR_MAX: usize = 100;

/// Returns the calls, of the first `calls` nodes, that must be over before a call starts; of very many only some.
pub(crate) fn predecessors(waits_for: &[BTreeSet<usize>], place: usize, calls: usize) -> BTreeSet<usize> {
    let (mut found, mut open) = (BTreeSet::new(), vec![place]);
    while let Some(next) = open.pop() {
        for before in &waits_for[next] {
            if *before >= calls {
                open.push(*before);
            } else if found.len() < WAITED_FOR_MAX {
                found.insert(*before);
            } else {
                return found;
            }
        }
    }
    found
}

/// The paths touched by the calls so far: a tree whose root stands for everything.
#[derive(Default)]
pub(crate) struct TouchedPaths<'a> {
    nodes: Vec<PathNode>,
    /// The index of a node, by its parent's index and its own name.
    places: HashMap<(usize, &'a str), usize>,
}

/// The calls that touched one path so far, and those that touched a path below it. A writer of the path clears all four
/// lists: it waits for these calls, and later calls wait for the writer.
#[derive(Default)]
struct PathNode {
    readers: CallGroup,
    writers: CallGroup,
    readers_below: CallGroup,
    writers_below: CallGroup,
}

/// Calls that a later call waits for together.
#[derive(Default)]
struct CallGroup(Vec<usize>);

impl CallGroup {
    /// Returns the node to wait for. Several calls are first merged into one join node, so that `n` calls that wait for
    /// `m` others need `n + m` edges and not `n * m`.
    fn join(&mut self, waits_for: &mut WaitsFor) -> Option<usize> {
        if self.0.len() > 1 {
            let stand_in = waits_for.len();
            waits_for.push(self.0.drain(..).collect());
            self.0.push(stand_in);
        }
        self.0.first().copied()
    }
}

impl<'a> TouchedPaths<'a> {
    /// Makes the call wait for all earlier calls that it conflicts with, and later ones for it.
    pub(crate) fn add(&mut self, call: usize, touches: &'a Touches, waits_for: &mut WaitsFor) {
        let reads: Vec<Vec<usize>> = touches.reads().map(|path| self.nodes_to(path)).collect();
        let writes: Vec<Vec<usize>> = touches.writes().map(|path| self.nodes_to(path)).collect();
        for nodes in &reads {
            self.wait(call, nodes, false, waits_for);
        }
        for nodes in &writes {
            self.wait(call, nodes, true, waits_for);
        }
        for nodes in &reads {
            self.record(call, nodes, false);
        }
        for nodes in &writes {
            self.record(call, nodes, true);
        }
    }

    /// Returns the nodes from the root to the path.
    fn nodes_to(&mut self, path: &'a str) -> Vec<usize> {
        if self.nodes.is_empty() {
            self.nodes.push(PathNode::default());
        }
        let mut nodes = vec![0];
        for name in path.split('/').filter(|name| !name.is_empty()) {
            let above = nodes[nodes.len() - 1];
            let place = *self.places.entry((above, name)).or_insert_with(|| {
                self.nodes.push(PathNode::default());
                self.nodes.len() - 1
            });
            nodes.push(place);
        }
        nodes
    }

    fn wait(&mut self, call: usize, nodes: &[usize], writes: bool, waits_for: &mut WaitsFor) {
        let last = nodes.len() - 1;
        for (depth, place) in nodes.iter().enumerate() {
            let PathNode { readers, writers, readers_below, writers_below } = &mut self.nodes[*place];
            let groups = [
                Some(writers),
                Some(readers).filter(|_| writes),
                Some(writers_below).filter(|_| depth == last),
                Some(readers_below).filter(|_| writes && depth == last),
            ];
            for group in groups.into_iter().flatten() {
                if let Some(before) = group.join(waits_for) {
                    waits_for[call].insert(before);
                }
            }
        }
    }

    fn record(&mut self, call: usize, nodes: &[usize], writes: bool) {
        let (last, above) = nodes.split_last().expect("every path begins at the root");
        for place in above {
            let node = &mut self.nodes[*place];
            let group = if writes { &mut node.writers_below } else { &mut node.readers_below };
            group.0.push(call);
        }
        let node = &mut self.nodes[*last];
        if writes {
            *node = PathNode { writers: CallGroup(vec![call]), ..PathNode::default() };
        } else {
            node.readers.0.push(call);
        }
    }
}

/// The ready queue of a batch: calls without unfinished predecessors, in the order of the batch.
pub(crate) struct ReadyQueue {
    /// The number of unfinished predecessors of each call.
    waits: Vec<usize>,
    /// The successors of each call.
    followers: Vec<Vec<usize>>,
    /// The calls that may run now, in order.
    ready: VecDeque<usize>,
    calls: usize,
}

impl ReadyQueue {
    pub(crate) fn new(waits_for: &[BTreeSet<usize>], calls: usize) -> Self {
        let mut followers = vec![Vec::new(); waits_for.len()];
        for (later, before) in waits_for.iter().enumerate() {
            before.iter().for_each(|earlier| followers[*earlier].push(later));
        }
        let waits: Vec<usize> = waits_for.iter().map(BTreeSet::len).collect();
        let ready = (0..calls).filter(|place| waits[*place] == 0).collect();
        Self { waits, followers, ready, calls }
    }

    /// Returns the next call that may run, if there is one.
    pub(crate) fn next(&mut self) -> Option<usize> {
        self.ready.pop_front()
    }

    /// Marks a call as over, which may make its successors ready.
    pub(crate) fn finish(&mut self, place: usize) {
        let mut followers = std::mem::take(&mut self.followers[place]);
        while let Some(next) = followers.pop() {
            self.waits[next] -= 1;
            if self.waits[next] > 0 {
                continue;
            }
            if next < self.calls {
                let at = self.ready.partition_point(|ready| *ready < next);
                self.ready.insert(at, next);
            } else {
                followers.append(&mut self.followers[next]);
            }
        }
    }
}

/// The calls that have not started. Each is taken once, mostly in order.
pub(crate) struct UnstartedCalls {
    rest: std::vec::IntoIter<BatchCall>,
    next: usize,
    /// Calls that later ones overtook.
    passed: HashMap<usize, Call>,
}

impl UnstartedCalls {
    pub(crate) fn new(calls: Vec<BatchCall>) -> Self {
        Self { rest: calls.into_iter(), next: 0, passed: HashMap::new() }
    }

    pub(crate) fn take(&mut self, place: usize) -> Call {
        for BatchCall { call, .. } in self.rest.by_ref().take((place + 1).saturating_sub(self.next)) {
            self.next += 1;
            if self.next > place {
                return call;
            }
            self.passed.insert(self.next - 1, call);
        }
        self.passed.remove(&place).expect("a call is begun once")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::tool::ToolSpec;

    /// Returns the footprint of a call that reads and writes these paths.
    fn touching(reads: &[&str], writes: &[&str]) -> Touches {
        let spec = ToolSpec::new("t", "").reads("reads").writes("writes");
        Touches::of(&spec, &json!({ "reads": reads, "writes": writes }))
    }

    fn order(touches: &[Touches]) -> WaitsFor {
        let (mut waits_for, mut touched) = (vec![BTreeSet::new(); touches.len()], TouchedPaths::default());
        for (call, touches) in touches.iter().enumerate() {
            touched.add(call, touches, &mut waits_for);
        }
        waits_for
    }

    /// Returns which of the first `calls` come before each call, directly or not.
    fn all_before(waits_for: &[BTreeSet<usize>], calls: usize) -> Vec<BTreeSet<usize>> {
        let before = |call: usize| {
            let (mut open, mut seen) = (vec![call], BTreeSet::new());
            while let Some(next) = open.pop() {
                open.extend(waits_for[next].iter().copied().filter(|before| seen.insert(*before)));
            }
            seen.into_iter().filter(|before| *before < calls).collect()
        };
        (0..calls).map(before).collect()
    }

    fn some_paths() -> impl Strategy<Value = Vec<&'static str>> {
        let paths = prop::sample::select(vec![".", "a", "a/x", "a/x/1", "a/y", "b", "b/x", "/c"]);
        prop::collection::vec(paths, 0..3)
    }

    proptest! {
        #[test]
        fn a_call_waits_for_all_earlier_conflicting_calls(
            calls in prop::collection::vec((some_paths(), some_paths()), 0..20)
        ) {
            let touches: Vec<Touches> = calls.iter().map(|(reads, writes)| touching(reads, writes)).collect();
            let conflicting = |later: &Touches, before: &[Touches]| {
                before.iter().enumerate().filter(|(_, earlier)| earlier.conflicts(later)).map(|(at, _)| at).collect()
            };
            let by_pairs: Vec<BTreeSet<usize>> =
                touches.iter().enumerate().map(|(at, later)| conflicting(later, &touches[..at])).collect();
            let count = touches.len();
            prop_assert_eq!(all_before(&order(&touches), count), all_before(&by_pairs, count));
        }
    }

    #[test]
    fn dependencies_grow_with_the_calls_and_not_with_their_pairs() {
        let count = 20_000;
        let paths: Vec<String> = (0..count).map(|number| format!("some/{}/{number}", number % 100)).collect();
        let write = |path: &str| touching(&[], &[path]);
        let read = |path: &str| touching(&[path], &[]);
        let one_path: Vec<Touches> = paths.iter().map(|_| write("a")).collect();
        let distinct: Vec<Touches> = paths.iter().map(|path| write(path)).collect();
        let whole_then_parts =
            (0..count).map(|at| if at < count / 2 { read(".") } else { write(&paths[at]) }).collect();
        let parts_then_whole =
            (0..count).map(|at| if at < count / 2 { write(&paths[at]) } else { read(".") }).collect();
        let in_turn = (0..count).map(|at| if at % 2 == 0 { write(&paths[at]) } else { read(".") }).collect();
        let cases: [(&str, Vec<Touches>); 5] = [
            ("one path", one_path),
            ("distinct paths", distinct),
            ("reads of the whole, then writes", whole_then_parts),
            ("writes, then reads of the whole", parts_then_whole),
            ("in turn", in_turn),
        ];
        for (case, touches) in cases {
            let waits_for = order(&touches);
            let waits: usize = waits_for.iter().map(BTreeSet::len).sum();
            assert!(waits_for.len() <= 2 * count && waits <= 6 * count, "{case}: {} {waits}", waits_for.len());
            let mut ready_queue = ReadyQueue::new(&waits_for, count);
            let mut over = 0;
            while let Some(next) = ready_queue.next() {
                ready_queue.finish(next);
                over += 1;
            }
            assert_eq!(over, count, "{case}");
        }
    }
}
