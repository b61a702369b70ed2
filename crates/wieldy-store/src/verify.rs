//! Verification of the history: every record is unchanged and in its place, every call is closed, every row of the
//! tables agrees with the trail, and every signed head lies on the trail.

mod tables;

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Serialize;
use serde_json::Value as Json;
use uuid::Uuid;

use crate::audit::{SignedHead, from_hex, to_hex};
use crate::database::{Database, Row, Value, one_int};
use crate::error::StoreError;
use crate::hash_chain::{Hash, Placed};
use crate::histogram::{BucketCounts, BucketKey};
use crate::metadata::is_rerun;
use crate::notes::NoteRow;
use crate::projection::CallRow;
use crate::record_to_row::{ResultFacts, RowChange};
use crate::retention::RESULTS_DROPPED;

/// The result of a verification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// The number of records that were checked.
    pub records: u64,
    /// The number of calls that they open.
    pub executions: u64,
    /// The number of these calls that are still open.
    pub open: u64,
    /// The number of signed heads that lie on the trail.
    pub heads: u64,
    /// The number of anchors that lie on the trail.
    pub anchors: u64,
    /// The number of records that were dropped before, as the trail itself says.
    pub dropped: u64,
    /// The first record.
    pub first_seq: i64,
    /// The last record.
    pub last_seq: i64,
    /// The first problem, if there is one.
    pub problem: Option<Problem>,
}

/// A problem and its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The record.
    pub seq: i64,
    /// The problem with it.
    pub what: String,
}

/// The number of records that are read together.
const RECORDS_AT_ONCE: i64 = 20_000;

pub(crate) fn verify(
    database: &mut dyn Database,
    anchors: &[SignedHead],
    key: Option<&str>,
    progress: &mut dyn FnMut(u64),
) -> Result<Verdict, StoreError> {
    loop {
        let (verdict, results_dropped_by) = verify_once(database, anchors, key, progress)?;
        // Records and results that another process dropped during the walk are not missing.
        let first_seq = one_int(database, FIRST, &[])?.unwrap_or(1);
        let is_same = first_seq == verdict.first_seq;
        if verdict.problem.is_none() || is_same && !drops_results_after(database, results_dropped_by, &verdict)? {
            return Ok(verdict);
        }
    }
}

/// Returns true if a record after the verified trail says that results were dropped.
fn drops_results_after(database: &mut dyn Database, by: i64, verdict: &Verdict) -> Result<bool, StoreError> {
    let sql = "SELECT min(seq) FROM events WHERE seq > ?1 AND name = ?2";
    Ok(one_int(database, sql, &[by.max(verdict.last_seq).into(), RESULTS_DROPPED.into()])?.is_some())
}

const FIRST: &str = "SELECT min(seq) FROM events";

fn verify_once(
    database: &mut dyn Database,
    anchors: &[SignedHead],
    key: Option<&str>,
    progress: &mut dyn FnMut(u64),
) -> Result<(Verdict, i64), StoreError> {
    let mut walk = ChainWalk::begin(database, anchors, key)?;
    let sql = "SELECT seq, instance, instance_seq, at, name, execution, subject, data, hash FROM events
               WHERE seq > ?1 AND seq <= ?2 ORDER BY seq";
    let last_seq = walk.end.seq;
    let mut from = walk.verdict.first_seq - 1;
    while from < last_seq && walk.verdict.problem.is_none() {
        let to = (from + RECORDS_AT_ONCE).min(last_seq);
        database.query(sql, &[from.into(), to.into()], &mut |row| walk.check_record(row))?;
        walk.compare(database)?;
        progress(walk.verdict.records);
        from = to;
    }
    walk.finish(database)?;
    Ok((walk.verdict, walk.results_dropped_by))
}

/// The state of a walk along the trail.
struct ChainWalk {
    verdict: Verdict,
    /// The end of the trail, as its table says.
    end: ChainEnd,
    seq: i64,
    hash: Hash,
    instances: HashMap<i64, Instance>,
    open: HashMap<i64, CallRow>,
    /// Closed calls that are to be compared with their rows.
    closed: Vec<CallRow>,
    /// Closed calls whose opening was dropped: the time and the change of their closing.
    without_opening: Vec<(i64, i64, RowChange)>,
    /// The recorded results of closed calls, as their closing records have them.
    results: Vec<(i64, Option<ResultFacts>)>,
    /// The histogram, as computed from the trail.
    histogram: BTreeMap<BucketKey, BucketCounts>,
    /// The pending notes, as computed from the trail, and the notes that have ended.
    notes: BTreeMap<i64, NoteRow>,
    notes_ended: HashSet<String>,
    /// The hashes that were signed, by record; true if the hash comes from an anchor.
    signed: BTreeMap<i64, Vec<(Hash, bool)>>,
    /// The last record that was dropped, and the record that says so.
    dropped_seq: i64,
    dropped_by: i64,
    /// The calls whose results are missing.
    results_missing: Vec<i64>,
    /// The last call whose result may have been dropped before its records, and the record that says so.
    results_dropped_seq: i64,
    results_dropped_by: i64,
    /// True if this trail is signed, and the last record that is known to be signed.
    is_signed: bool,
    last_signed_seq: i64,
    scratch: Vec<u8>,
}

struct ChainEnd {
    seq: i64,
    hash: Hash,
    /// The stored histogram up to there.
    histogram: BTreeMap<BucketKey, BucketCounts>,
}

impl ChainEnd {
    /// Reads everything in one statement, so that it is consistent while others write.
    fn read(database: &mut dyn Database) -> Result<Self, StoreError> {
        let mut end = Self { seq: 0, hash: [0; 32], histogram: BTreeMap::new() };
        let sql = "SELECT t.seq, t.hash, c.day, c.tenant_id, c.agent_id, c.tool_name, c.status, c.bucket, c.calls,
                     c.output_bytes, c.result_bytes FROM trail t LEFT JOIN tallies c ON 1 = 1";
        database.query(sql, &[], &mut |row| {
            (end.seq, end.hash) = (row.int(0)?, hash_of(row, 1)?);
            let Some(day) = row.int_or_none(2)? else { return Ok(()) };
            let text = |column| row.text(column).map(str::to_owned);
            let (tenant, agent, tool, status) = (text(3)?, text(4)?, text(5)?, text(6)?);
            let key = BucketKey { day, tenant, agent, tool, status, bucket: row.int(7)? };
            let (calls, output_bytes, result_bytes) = (row.int(8)?, row.int(9)?, row.int(10)?);
            end.histogram.insert(key, BucketCounts { calls, output_bytes, result_bytes });
            Ok(())
        })?;
        Ok(end)
    }
}

struct Instance {
    id: Uuid,
    has_ended: bool,
    /// The number of its last event, once one was read.
    seq: Option<i64>,
}

fn hash_of(row: &dyn Row, column: usize) -> Result<Hash, StoreError> {
    Ok(row.bytes(column)?.try_into().unwrap_or_default())
}

impl ChainWalk {
    fn begin(database: &mut dyn Database, anchors: &[SignedHead], key: Option<&str>) -> Result<Self, StoreError> {
        let end = ChainEnd::read(database)?;
        let mut instances = HashMap::new();
        database.query("SELECT number, id, ended_at IS NOT NULL FROM instances", &[], &mut |row| {
            let id = row.text(1)?.parse().unwrap_or_default();
            instances.insert(row.int(0)?, Instance { id, has_ended: row.flag(2)?, seq: None });
            Ok(())
        })?;
        let first_seq = one_int(database, FIRST, &[])?.unwrap_or(1);
        let verdict = Verdict {
            records: 0,
            executions: 0,
            open: 0,
            heads: 0,
            anchors: 0,
            dropped: 0,
            first_seq,
            last_seq: end.seq,
            problem: None,
        };
        let mut walk = Self {
            verdict,
            end,
            seq: first_seq - 1,
            hash: [0; 32],
            instances,
            open: HashMap::new(),
            closed: Vec::new(),
            without_opening: Vec::new(),
            results: Vec::new(),
            histogram: BTreeMap::new(),
            notes: BTreeMap::new(),
            notes_ended: HashSet::new(),
            signed: BTreeMap::new(),
            dropped_seq: 0,
            dropped_by: 0,
            results_missing: Vec::new(),
            results_dropped_seq: 0,
            results_dropped_by: 0,
            is_signed: false,
            last_signed_seq: 0,
            scratch: Vec::new(),
        };
        walk.check_dropped(database)?;
        walk.collect_signed(database, anchors, key)?;
        Ok(walk)
    }

    /// Checks that a trail without its first record says itself what was dropped, and takes the hash before it from
    /// there.
    fn check_dropped(&mut self, database: &mut dyn Database) -> Result<(), StoreError> {
        if self.verdict.first_seq <= 1 {
            return Ok(());
        }
        let mut before = None;
        let sql = "SELECT data, seq FROM events WHERE name = 'journal.dropped' ORDER BY seq";
        database.query(sql, &[], &mut |row| {
            let data: Json = serde_json::from_str(row.text(0)?).unwrap_or_default();
            if data["up_to"].as_i64() == Some(self.verdict.first_seq - 1) {
                self.dropped_by = row.int(1)?;
                before = data["hash"].as_str().and_then(from_hex).and_then(|hash| Hash::try_from(hash).ok());
            }
            Ok(())
        })?;
        match before {
            Some(hash) => {
                self.hash = hash;
                self.dropped_seq = self.verdict.first_seq - 1;
                self.verdict.dropped = self.dropped_seq as u64;
            }
            None => {
                self.problem(1, "it and all records before the first stored one are missing, and no record explains it")
            }
        }
        Ok(())
    }

    /// Collects the hashes that the trail must lead through.
    fn collect_signed(
        &mut self,
        database: &mut dyn Database,
        anchors: &[SignedHead],
        key: Option<&str>,
    ) -> Result<(), StoreError> {
        let mut heads = Vec::new();
        let sql = "SELECT seq, hash, at, key, signature FROM heads ORDER BY seq";
        database.query(sql, &[], &mut |row| {
            let at = jiff::Timestamp::from_microsecond(row.int(2)?).unwrap_or_default();
            let (hash, signature) = (to_hex(row.bytes(1)?), to_hex(row.bytes(4)?));
            heads.push(SignedHead { seq: row.int(0)?, hash, at, key: row.text(3)?.to_owned(), signature });
            Ok(())
        })?;
        self.is_signed = !heads.is_empty() || !anchors.is_empty() || key.is_some();
        let heads = heads.iter().map(|head| (head, false)).chain(anchors.iter().map(|anchor| (anchor, true)));
        for (head, is_anchor) in heads {
            if !head.is_signed_by(key.unwrap_or(&head.key)) {
                self.problem(head.seq, "its signature is invalid, or was made with another key");
                continue;
            }
            if is_anchor && head.seq > self.end.seq {
                self.problem(self.end.seq + 1, "it is missing: the trail was longer when an anchor was made");
                continue;
            }
            let hash = from_hex(&head.hash).and_then(|hash| Hash::try_from(hash).ok()).unwrap_or_default();
            if head.seq > self.dropped_seq {
                self.signed.entry(head.seq).or_default().push((hash, is_anchor));
            } else if head.seq == self.dropped_seq && hash != self.hash {
                self.problem(head.seq, "the dropped records are not the signed ones");
            }
        }
        Ok(())
    }

    /// Notes a problem. Only the first one counts, because later ones may follow from it.
    fn problem(&mut self, seq: i64, what: &str) {
        if self.verdict.problem.as_ref().is_none_or(|found| found.seq > seq) {
            self.verdict.problem = Some(Problem { seq, what: what.to_owned() });
        }
    }

    fn check_record(&mut self, row: &dyn Row) -> Result<(), StoreError> {
        if self.verdict.problem.is_some() {
            return Ok(());
        }
        let (seq, instance, instance_seq, at) = (row.int(0)?, row.int(1)?, row.int(2)?, row.int(3)?);
        let (name, execution, subject, data) = (row.text(4)?, row.int_or_none(5)?, row.text_or_none(6)?, row.text(7)?);
        let expected = self.seq + 1;
        if seq != expected {
            self.problem(expected, "it is missing");
            return Ok(());
        }
        let Some(writer) = self.instances.get_mut(&instance) else {
            self.problem(seq, "the executor that wrote it is unknown");
            return Ok(());
        };
        let placed = Placed { seq, instance: writer.id, instance_seq, at, name, execution, subject, data };
        let hash = placed.hash(&self.hash, &mut self.scratch);
        if hash != *row.bytes(8)? {
            self.problem(seq, "it was changed or moved");
            return Ok(());
        }
        if instance_seq > 0 {
            let before = writer.seq.replace(instance_seq);
            let follows = before.map_or(instance_seq == 1 || self.dropped_seq > 0, |before| instance_seq == before + 1);
            if !follows {
                self.problem(seq, "an earlier record of its executor is missing");
                return Ok(());
            }
        }
        (self.seq, self.hash) = (seq, hash);
        self.verdict.records += 1;
        for (signed, is_anchor) in self.signed.remove(&seq).unwrap_or_default() {
            if signed != hash {
                self.problem(seq, "the trail up to it differs from the signed one");
                return Ok(());
            }
            self.last_signed_seq = seq;
            *if is_anchor { &mut self.verdict.anchors } else { &mut self.verdict.heads } += 1;
        }
        if name == RESULTS_DROPPED {
            let data: Json = serde_json::from_str(data).unwrap_or_default();
            (self.results_dropped_seq, self.results_dropped_by) = (data["up_to"].as_i64().unwrap_or_default(), seq);
        }
        self.apply_to_notes(seq, name, data);
        if let Some(execution) = execution {
            self.apply_to_row(seq, execution, at, name, subject, data);
        }
        Ok(())
    }

    /// Rebuilds the call's row from its records.
    fn apply_to_row(&mut self, seq: i64, execution: i64, at: i64, name: &str, subject: Option<&str>, data: &str) {
        if execution == seq {
            self.verdict.executions += 1;
            let row = match RowChange::parse(name, subject, data) {
                RowChange::Opened(opened) => CallRow::open(seq, at, &opened),
                _ => CallRow::default(),
            };
            self.open.insert(execution, row);
            return;
        }
        let Some(row) = self.open.get_mut(&execution) else {
            if execution > self.dropped_seq {
                self.problem(seq, "it is about a call that is not open");
            } else if let RowChange::Closed(closed) = RowChange::parse(name, None, data) {
                self.results.push((execution, closed.result.clone()));
                self.without_opening.push((execution, at, RowChange::Closed(closed)));
            }
            return;
        };
        let change = RowChange::parse(name, None, data);
        row.apply(at, &change);
        if let RowChange::Closed(closed) = change {
            self.results.push((execution, closed.result));
            let (key, one) = row.histogram_row();
            let counts = self.histogram.entry(key).or_default();
            counts.add(&one);
            self.closed.extend(self.open.remove(&execution));
        }
    }

    fn finish(&mut self, database: &mut dyn Database) -> Result<(), StoreError> {
        self.verdict.open = self.open.len() as u64;
        if self.verdict.problem.is_some() {
            return Ok(());
        }
        if self.seq != self.end.seq {
            self.problem(self.seq + 1, "it is missing at the end of the trail");
            return Ok(());
        }
        if self.hash != self.end.hash && self.seq > 0 {
            self.problem(self.seq, "it is not the last record of the original trail");
        }
        // An attacker without the key could drop any records and append a record that says so.
        if self.is_signed && self.dropped_by > self.last_signed_seq {
            self.problem(self.dropped_by, "it says that records were dropped, but it is not signed");
        }
        let missing = self.results_missing.iter().filter(|id| **id > self.results_dropped_seq).min();
        if let Some(id) = missing.copied() {
            self.problem(id, "the result of its call is missing in `results`");
        }
        if self.is_signed && self.results_dropped_by > self.last_signed_seq {
            self.problem(self.results_dropped_by, "it says that results were dropped, but it is not signed");
        }
        let range = [Value::Int(self.dropped_seq), Value::Int(self.end.seq)];
        let rows = one_int(database, "SELECT count(*) FROM tool_executions WHERE id > ?1 AND id <= ?2", &range)?;
        if rows != Some(self.verdict.executions as i64) {
            self.problem(self.end.seq, "there are rows in `tool_executions` without a record");
        }
        self.compare_open(database)?;
        self.compare_notes(database)?;
        self.check_strays(database)?;
        self.compare_histogram();
        let mut unclosed = Vec::new();
        database.query(
            "SELECT id, instance, metadata_json FROM tool_executions WHERE completed_at IS NULL",
            &[],
            &mut |row| {
                let waits = is_rerun(row.text_or_none(2)?);
                let lost = self.instances.get(&row.int(1)?).is_none_or(|instance| instance.has_ended);
                if lost && !waits {
                    unclosed.push(row.int(0)?);
                }
                Ok(())
            },
        )?;
        for id in unclosed {
            self.problem(id, "its call was never closed, although its executor has ended");
        }
        Ok(())
    }
}
