//! The write-ahead log (WAL): a file of one executor beside a SQLite history, in which records are durable before they
//! are committed to the database (`NAME.instances/UUID`, which is also the executor's liveness lock). One write and one sync of the disk make a group of them durable. In this crate, "log"
//! and "WAL" always mean this file; SQLite's own is called the `-wal` file.
//!
//! A group is a *frame*: a hash, a length, the records. It begins on a block of its own, so that no write touches
//! durable data. The file has two halves and is overwritten in place, because a sync takes several times as long when a
//! file grows. A half is reused once everything in it is committed. Readers accept every frame whose hash is right,
//! wherever it is; the hash of a half-written, half-overwritten or damaged frame is wrong. The key of the hash is
//! stored in this file alone, so no record can look like a frame. Records have numbers without gaps: committed ones are
//! skipped, and a missing one is noticed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ring::rand::{SecureRandom, SystemRandom};
use wieldy_core::Body;

use crate::failpoint;
use crate::hash_chain::{CallRef, Hash, Record, StoredResult};
use crate::record_to_row::RowChange;

/// The alignment of frames.
const BLOCK: u64 = 4096;
/// The capacity of a half.
const HALF_MAX: u64 = 32 * 1024 * 1024;
/// The usual size of a half. It grows beyond this only while the other half is not committed.
const HALF_USUAL: u64 = 1024 * 1024;
/// The first growth step of a half; later steps at least double it. New frames overwrite the zeros that it is filled
/// with.
const GROWTH: u64 = 128 * 1024;
/// The name of the file format, in the first block.
const FORMAT: &[u8; 16] = b"wieldy.log.2\0\0\0\0";
/// The format of earlier programs, whose records have no results.
const FORMAT_WITHOUT_RESULTS: &[u8; 16] = b"wieldy.log.1\0\0\0\0";

/// The write-ahead log of a living executor.
pub(crate) struct Wal {
    file: File,
    /// The paths and inodes of the log and of its history. A file that is no longer at its path would not be found by
    /// recovery.
    paths: [(PathBuf, u64); 2],
    key: Hash,
    /// The first block, until it is written.
    head: Option<Vec<u8>>,
    /// The half that is written, and the bytes used in it.
    half: usize,
    used: u64,
    /// The bytes to which each half has grown.
    grown: [u64; 2],
    /// The number of the last record in each half.
    last: [u64; 2],
    frame: Vec<u8>,
}

impl Wal {
    /// Creates the log of `instance` in an empty file. Recovery stores results of its tasks for `task_ttl`
    /// microseconds.
    pub(crate) fn new(log: PathBuf, history: PathBuf, instance: &str, task_ttl: i64) -> io::Result<Self> {
        let file = fs::OpenOptions::new().write(true).open(&log)?;
        let mut key = Hash::default();
        SystemRandom::new()
            .fill(&mut key)
            .map_err(|_| io::Error::other("the operating system provides no random numbers"))?;
        let mut head = [FORMAT.as_slice(), &key, &task_ttl.to_le_bytes(), instance.as_bytes()].concat();
        head.splice(0..0, *blake3::hash(&head).as_bytes());
        head.resize(BLOCK as usize, 0);
        let identify = |path: PathBuf| io::Result::Ok((path.clone(), fs::metadata(path)?.ino()));
        let paths = [identify(log)?, identify(history)?];
        let (half, used, grown, last, frame) = (0, 0, [0; 2], [0; 2], Vec::new());
        Ok(Self { file, paths, key, head: Some(head), half, used, grown, last, frame })
    }

    /// Makes records durable. Returns false if there is no space for them until more than the records up to
    /// `committed` are committed.
    pub(crate) fn append(&mut self, records: &[Arc<Record>], committed: u64) -> io::Result<bool> {
        failpoint::reach("log.taken");
        let Some(last) = records.last() else { return Ok(true) };
        for (path, file) in &self.paths {
            if !fs::metadata(path).is_ok_and(|found| found.ino() == *file) {
                return Err(io::Error::other(format!("`{}` was moved or deleted", path.display())));
            }
        }
        self.frame.clear();
        self.frame.resize(FRAME_HEAD, 0);
        for record in records {
            encode(record, &mut self.frame);
        }
        let length = (self.frame.len() as u64).next_multiple_of(BLOCK);
        let Some(offset) = self.reserve(length, committed) else { return Ok(false) };
        let count = (self.frame.len() - FRAME_HEAD) as u32;
        self.frame[HASH..FRAME_HEAD].copy_from_slice(&count.to_le_bytes());
        let hash = frame_hash(&self.key, offset, &self.frame[HASH..]);
        self.frame[..HASH].copy_from_slice(&hash);
        self.write(offset, length)?;
        (self.used, self.last[self.half]) = (self.used + length, last.instance_seq);
        // One large group must not keep the memory.
        self.frame.shrink_to(HALF_USUAL as usize);
        Ok(true)
    }

    /// Returns the offset for so many bytes, which never overwrites uncommitted records.
    fn reserve(&mut self, length: u64, committed: u64) -> Option<u64> {
        let other = 1 - self.half;
        if self.last[self.half] <= committed {
            self.used = 0;
        } else if (self.used >= HALF_USUAL || self.used + length > HALF_MAX) && self.last[other] <= committed {
            (self.half, self.used) = (other, 0);
            failpoint::reach("log.turned");
        }
        (self.used + length <= HALF_MAX).then_some(BLOCK + self.half as u64 * HALF_MAX + self.used)
    }

    fn write(&mut self, offset: u64, length: u64) -> io::Result<()> {
        let (mut end, grown) = (self.used + length, self.grown[self.half]);
        if end > grown {
            end = (end + grown).next_multiple_of(GROWTH);
        }
        self.frame.resize((end - self.used).min(HALF_MAX - self.used) as usize, 0);
        if let Some(head) = &self.head {
            self.file.write_all_at(head, 0)?;
        }
        failpoint::reach("log.begun");
        self.file.write_all_at(&self.frame, offset)?;
        failpoint::reach("log.written");
        self.file.sync_data()?;
        if self.head.is_some() {
            // The directory entry of the file must be durable as well.
            let folder = self.paths[0].0.parent().unwrap_or(Path::new("."));
            File::open(folder)?.sync_all()?;
            self.head = None;
        }
        failpoint::reach("log.synced");
        self.grown[self.half] = end.max(grown);
        Ok(())
    }
}

/// The length of a hash, and the length of a frame's header: hash and length.
const HASH: usize = size_of::<Hash>();
const FRAME_HEAD: usize = HASH + size_of::<u32>();

/// Returns the hash of a frame, over its offset and its content.
fn frame_hash(key: &Hash, offset: u64, rest: &[u8]) -> Hash {
    *blake3::Hasher::new_keyed(key).update(&offset.to_le_bytes()).update(rest).finalize().as_bytes()
}

/// The write-ahead log of a dead executor. It is locked as long as this is held.
pub(crate) struct OrphanedWal {
    pub(crate) instance: String,
    pub(crate) path: PathBuf,
    /// The file, with its lock.
    pub(crate) file: File,
    /// The lock on the folder, which keeps other processes waiting until all logs are committed.
    pub(crate) _folder_lock: Arc<File>,
}

/// The content of a log.
#[derive(Debug, Default)]
pub(crate) struct WalContents {
    pub(crate) task_ttl: i64,
    /// The records by their numbers.
    records: BTreeMap<u64, Record>,
    /// True if it has records of an unknown form, from a newer program.
    has_unknown: bool,
}

impl OrphanedWal {
    pub(crate) fn is_empty(&self) -> bool {
        self.file.metadata().is_ok_and(|file| file.len() == 0)
    }

    /// Returns the content. Fails if the file is not a log of that executor.
    pub(crate) fn read(&self) -> io::Result<WalContents> {
        let mut bytes = Vec::new();
        (&self.file).read_to_end(&mut bytes)?;
        read(&bytes, &self.instance).ok_or_else(|| io::Error::other("it cannot be read"))
    }

    /// Deletes the log once everything in it is committed.
    pub(crate) fn remove(self) {
        if let Err(error) = fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(path = %self.path.display(), error, "cannot delete a write-ahead log that was applied");
        }
    }

    /// Keeps the log under another name, for people to look at. Its executor counts as dead then.
    pub(crate) fn rename_damaged(self) -> io::Result<()> {
        fs::rename(&self.path, self.path.with_extension("damaged"))
    }
}

impl WalContents {
    /// Returns the records after the number `committed` up to the first gap, and true if these are all.
    pub(crate) fn records_after(mut self, committed: u64) -> (Vec<Arc<Record>>, bool) {
        let uncommitted = self.records.split_off(&(committed + 1));
        let count = uncommitted.len();
        let in_order = (committed + 1..).zip(uncommitted).take_while(|(next, (number, _))| next == number);
        let records: Vec<_> = in_order.map(|(_, (_, record))| Arc::new(record)).collect();
        let is_all = records.len() == count && !self.has_unknown;
        (records, is_all)
    }
}

/// Parses the log of `instance`. A log in which nothing was made durable yet is empty.
fn read(bytes: &[u8], instance: &str) -> Option<WalContents> {
    let Some(head) = bytes.get(..BLOCK as usize) else { return Some(WalContents::default()) };
    if head.iter().all(|byte| *byte == 0) {
        return Some(WalContents::default());
    }
    let (hash, rest) = head.split_at(HASH);
    let (form, rest) = rest.split_at(FORMAT.len());
    let (key, rest) = rest.split_first_chunk::<HASH>()?;
    let (task_ttl, rest) = rest.split_first_chunk::<8>()?;
    let header = &head[HASH..HASH + FORMAT.len() + HASH + 8 + instance.len()];
    let has_results = form == FORMAT;
    if !(has_results || form == FORMAT_WITHOUT_RESULTS)
        || !rest.starts_with(instance.as_bytes())
        || blake3::hash(header) != *<&Hash>::try_from(hash).ok()?
    {
        return None;
    }
    let mut contents = WalContents { task_ttl: i64::from_le_bytes(*task_ttl), ..WalContents::default() };
    let mut offset = BLOCK as usize;
    while let Some(from) = bytes.get(offset..).filter(|from| from.len() > FRAME_HEAD) {
        let count = u32::from_le_bytes(from[HASH..FRAME_HEAD].try_into().ok()?) as usize;
        let frame = from.get(..FRAME_HEAD + count).filter(|_| count > 0 && count <= HALF_MAX as usize);
        offset += BLOCK as usize;
        let Some(frame) =
            frame.filter(|frame| frame_hash(key, (offset as u64) - BLOCK, &frame[HASH..]) == frame[..HASH])
        else {
            continue;
        };
        let mut rest = &frame[FRAME_HEAD..];
        while let Some(record) = decode(&mut rest, has_results) {
            contents.records.insert(record.instance_seq, record);
        }
        contents.has_unknown |= !rest.is_empty();
        offset += frame.len().next_multiple_of(BLOCK as usize) - BLOCK as usize;
    }
    Some(contents)
}

/// The length that marks an absent text.
const NONE: u32 = u32::MAX;

/// Appends the bytes of a record. Its row change is parsed from them again.
fn encode(record: &Record, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&record.instance_seq.to_le_bytes());
    bytes.extend_from_slice(&record.at.to_le_bytes());
    // Events belong to calls of their own executor.
    let call = record.call.and_then(|call| if let CallRef::Own(id) = call { Some(id.to_string()) } else { None });
    let texts = [
        Some(record.name),
        call.as_deref(),
        record.subject.as_deref(),
        Some(&record.data),
        record.tenant.as_deref(),
        record.answer.as_deref(),
        record.result.as_ref().map(StoredResult::json),
    ];
    for text in texts {
        let length = text.map_or(NONE, |text| text.len() as u32);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(text.unwrap_or_default().as_bytes());
    }
}

/// Takes the first record off the bytes.
fn decode(bytes: &mut &[u8], has_result: bool) -> Option<Record> {
    let mut rest = *bytes;
    let instance_seq = u64::from_le_bytes(*take(&mut rest)?);
    let at = i64::from_le_bytes(*take(&mut rest)?);
    let mut text = || -> Option<Option<String>> {
        let length = u32::from_le_bytes(*take(&mut rest)?);
        if length == NONE {
            return Some(None);
        }
        let text = rest.split_off(..length as usize)?;
        String::from_utf8(text.to_owned()).ok().map(Some)
    };
    let (name, call, subject, data, tenant, answer) = (text()??, text()?, text()?, text()??, text()?, text()?);
    let result = if has_result { text()?.map(StoredResult::Read) } else { None };
    let name = Body::NAMES.into_iter().find(|known| *known == name)?;
    let call = call.map(|id| id.parse().map(CallRef::Own)).transpose().ok()?;
    let change = RowChange::parse(name, subject.as_deref(), &data);
    *bytes = rest;
    Some(Record { instance_seq, at, name, call, subject, data, change, tenant, answer, result, released: None })
}

fn take<'a, const N: usize>(bytes: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    bytes.split_off(..N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const INSTANCE: &str = "01a1e382-0bee-7cc3-98c4-dc0c0c07398f";

    fn record(number: u64, length: usize) -> Arc<Record> {
        let text = |what: &str| format!("{what} {number}{}", "\u{1F980}".repeat(length / 4));
        let name = Body::NAMES[number as usize % 4 + 3];
        let call = (!number.is_multiple_of(3)).then(|| CallRef::Own(INSTANCE.parse().unwrap()));
        let (subject, data) = (number.is_multiple_of(2).then(|| text("subject")), text("data"));
        let (tenant, answer) = (number.is_multiple_of(5).then(|| text("tenant")), Some(text("answer")));
        let change = RowChange::parse(name, subject.as_deref(), &data);
        Arc::new(Record {
            instance_seq: number,
            at: -(number as i64),
            name,
            call,
            subject,
            data,
            change,
            tenant,
            answer,
            result: number.is_multiple_of(4).then(|| StoredResult::Read(text("result"))),
            released: None,
        })
    }

    struct TestWal {
        folder: tempfile::TempDir,
        wal: Wal,
    }

    impl TestWal {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let [log, history] = ["log", "history"].map(|name| folder.path().join(name));
            fs::write(&log, "").unwrap();
            fs::write(&history, "").unwrap();
            Self { wal: Wal::new(log, history, INSTANCE, 7).unwrap(), folder }
        }

        fn bytes(&self) -> Vec<u8> {
            fs::read(self.folder.path().join("log")).unwrap()
        }
    }

    fn numbers((records, is_all): (Vec<Arc<Record>>, bool)) -> (Vec<u64>, bool) {
        (records.iter().map(|record| record.instance_seq).collect(), is_all)
    }

    /// Returns the records of a log after `committed`, if it is readable.
    fn after(bytes: &[u8], committed: u64) -> Option<(Vec<u64>, bool)> {
        read(bytes, INSTANCE).map(|contents| numbers(contents.records_after(committed)))
    }

    #[test]
    fn written_records_are_read_back() {
        let mut test = TestWal::new();
        assert_eq!(after(&test.bytes(), 0), Some((vec![], true)));
        let records: Vec<_> = (1..8).map(|number| record(number, number as usize * 9)).collect();
        for group in records.chunks(3) {
            assert!(test.wal.append(group, 0).unwrap());
        }
        let contents = read(&test.bytes(), INSTANCE).unwrap();
        assert_eq!(contents.task_ttl, 7);
        let (read, is_all) = contents.records_after(2);
        assert_eq!((format!("{read:?}"), is_all), (format!("{:?}", &records[2..]), true));
        assert!(matches!(read[1].change, RowChange::Unchanged) && matches!(read[3].change, RowChange::InputRequired));
        assert!(super::read(&test.bytes(), &INSTANCE.replace('0', "1")).is_none(), "it is another's");
    }

    #[test]
    fn a_log_of_an_earlier_program_is_read() {
        let written = Record { result: None, ..Record::clone(&record(4, 9)) };
        let (key, mut frame) = ([7; HASH], Vec::new());
        encode(&written, &mut frame);
        frame.truncate(frame.len() - size_of::<u32>());
        let frame = [&(frame.len() as u32).to_le_bytes()[..], &frame].concat();
        let head = [FORMAT_WITHOUT_RESULTS.as_slice(), &key, &7_i64.to_le_bytes(), INSTANCE.as_bytes()].concat();
        let mut bytes = [blake3::hash(&head).as_bytes().as_slice(), &head].concat();
        bytes.resize(BLOCK as usize, 0);
        bytes.extend([&frame_hash(&key, BLOCK, &frame)[..], &frame].concat());
        let (read, is_all) = read(&bytes, INSTANCE).unwrap().records_after(3);
        assert_eq!((format!("{read:?}"), is_all), (format!("{:?}", [written]), true));
    }

    #[test]
    fn the_log_wraps_around_and_fills_up_without_commits() {
        let mut test = TestWal::new();
        let quarter = HALF_USUAL as usize / 4;
        for number in 1..400 {
            // Commits are a little behind.
            assert!(test.wal.append(&[record(number, quarter)], number.saturating_sub(6)).unwrap());
        }
        let length = test.bytes().len() as u64;
        assert!((HALF_MAX..HALF_MAX + 8 * HALF_USUAL).contains(&length), "{length}");
        assert_eq!(after(&test.bytes(), 393), Some(((394..400).collect(), true)));
        let mut number = 400;
        while test.wal.append(&[record(number, quarter)], 393).unwrap() {
            number += 1;
        }
        assert!(number > 430, "{number}");
        assert_eq!(after(&test.bytes(), 393), Some(((394..number).collect(), true)), "and nothing was written over");
        assert!(test.wal.append(&[record(number, quarter)], number - 1).unwrap());
        assert_eq!(after(&test.bytes(), number - 1), Some((vec![number], true)));
        assert!(!test.wal.append(&[record(number + 1, HALF_MAX as usize)], number).unwrap(), "too large for any half");
    }

    #[test]
    fn a_log_that_recovery_would_not_find_accepts_no_records() {
        for gone in ["log", "history"] {
            let mut test = TestWal::new();
            fs::rename(test.folder.path().join(gone), test.folder.path().join("elsewhere")).unwrap();
            let error = test.wal.append(&[record(1, 1)], 0).unwrap_err().to_string();
            assert!(error.ends_with(&format!("{gone}` was moved or deleted")), "{error}");
        }
    }

    #[test]
    fn a_log_that_is_cut_or_changed_anywhere_gives_a_prefix_of_its_records() {
        let mut test = TestWal::new();
        for (first, count) in [(1, 2), (3, 1), (4, 5), (9, 1), (10, 3)] {
            let group: Vec<_> = (first..first + count).map(|number| record(number, 250)).collect();
            assert!(test.wal.append(&group, 0).unwrap());
        }
        let whole = test.bytes();
        let end = 1 + whole.iter().rposition(|byte| *byte != 0).unwrap();
        let groups = [0, 2, 3, 8, 9, 12];
        for cut in 0..=end {
            let (read, is_all) = after(&whole[..cut], 0).unwrap();
            assert!(
                is_all && groups.contains(&read.len()) && read.iter().copied().eq(1..=read.len() as u64),
                "{cut}: {read:?}"
            );
        }
        let mut changed = whole.clone();
        for at in 0..end {
            changed[at] ^= 1 << (at % 8);
            if let Some((read, is_all)) = after(&changed, 0) {
                assert!(read.iter().copied().eq(1..=read.len() as u64), "{at}: {read:?}");
                // If a later frame is intact, the gap is noticed.
                assert!(matches!(read.len(), 9 | 12) || !is_all, "{at}: {read:?}");
            } else {
                assert!(at < BLOCK as usize);
            }
            changed[at] = whole[at];
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        /// As in a power failure, any part of the last write may be on the disk, and all of those before.
        #[test]
        fn a_torn_write_removes_and_adds_no_records(
            steps in vec((vec(0_usize..9_000, 1..5), 0_u64..8), 1..12),
            seed in any::<u64>(),
        ) {
            let mut test = TestWal::new();
            let (mut last, mut committed, mut chance) = (0, 0, seed | 1);
            for (lengths, progress) in steps {
                // Commits may be ahead of the log, because no caller waited for those records.
                committed = (committed + progress).min(last + 3);
                let first = last.max(committed) + 1;
                let group: Vec<_> = (first..).zip(lengths).map(|(number, length)| record(number, length)).collect();
                let before = test.bytes();
                prop_assert!(test.wal.append(&group, committed).unwrap());
                let written = test.bytes();
                let after_it = group.last().unwrap().instance_seq;
                for _ in 0..8 {
                    let mut torn = written.clone();
                    for (at, sector) in torn.chunks_mut(512).enumerate() {
                        chance ^= chance << 13;
                        chance ^= chance >> 7;
                        chance ^= chance << 17;
                        if chance.is_multiple_of(2) {
                            let old = before.get(at * 512..).unwrap_or_default();
                            sector.fill(0);
                            let count = old.len().min(sector.len());
                            sector[..count].copy_from_slice(&old[..count]);
                        }
                    }
                    let (read, is_all) = after(&torn, committed).unwrap_or((vec![], before.is_empty()));
                    prop_assert!(is_all, "{read:?}");
                    let end = committed + read.len() as u64;
                    prop_assert!(read.iter().copied().eq(committed + 1..=end), "{read:?}");
                    prop_assert!(end == after_it || end == last.max(committed), "{end}: {last} {committed} {after_it}");
                }
                prop_assert_eq!(after(&written, committed), Some(((committed + 1..=after_it).collect(), true)));
                last = after_it;
            }
        }

        #[test]
        fn bytes_of_any_kind_are_no_log(bytes in vec(any::<u8>(), 0..20_000)) {
            prop_assert!(after(&bytes, 0).is_none_or(|(read, _)| read.is_empty()));
        }
    }
}
