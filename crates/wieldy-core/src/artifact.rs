//! Artifacts: output too large for a model's context, stored whole under an id and readable in pages.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

use jiff::Timestamp;
use regex::bytes::Regex;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::call::Caller;

/// A store for artifacts. This crate has one in memory, the `wieldy` crate one on disk.
pub trait Artifacts: Send + Sync + 'static {
    /// Opens a new artifact for `owner`'s tenant. The store keeps at most `bytes_max` bytes of it, or fewer if it has
    /// less room. Written bytes can be read at once. Only artifacts with a workspace are listed by
    /// [`list`](Self::list).
    fn create(
        &self,
        owner: &Caller,
        workspace: Option<&str>,
        bytes_max: u64,
    ) -> Result<Box<dyn ArtifactWriter>, ArtifactError>;

    /// Returns the metadata of an artifact that exists and that `reader` may see.
    fn describe(&self, id: ArtifactId, reader: &Caller) -> Result<ArtifactInfo, ArtifactError>;

    /// Returns up to `length` bytes from `offset` on.
    fn read(&self, id: ArtifactId, reader: &Caller, offset: u64, length: u64) -> Result<Vec<u8>, ArtifactError>;

    /// Lists the artifacts that the reader's own calls made in this workspace, newest first, at most `limit`. A store
    /// that does not record the makers lists none.
    fn list(&self, reader: &Caller, workspace: &str, limit: usize) -> Result<Vec<ArtifactInfo>, ArtifactError> {
        let _ = (reader, workspace, limit);
        Ok(Vec::new())
    }
}

/// A writer for the bytes of one artifact. Dropping it closes the artifact and keeps the written bytes.
pub trait ArtifactWriter: Send {
    /// Returns the artifact's id.
    fn id(&self) -> ArtifactId;

    /// Appends bytes. Bytes beyond the limit are counted but not stored.
    fn write(&mut self, bytes: &[u8]) -> Result<(), ArtifactError>;

    /// Returns the number of bytes that are stored: always the first ones.
    fn kept_bytes(&self) -> u64;
}

/// The id of an artifact, written `artifact:…`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ArtifactId(Uuid);

impl ArtifactId {
    /// Makes a new id.
    pub fn next() -> Self {
        Self(Uuid::now_v7())
    }

    /// Returns the time at which the artifact was made, or `None` for an id that was not made here.
    pub fn made_at(self) -> Option<Timestamp> {
        let (seconds, nanoseconds) = self.0.get_timestamp()?.to_unix();
        Timestamp::new(i64::try_from(seconds).ok()?, i32::try_from(nanoseconds).ok()?).ok()
    }

    /// Returns the id without its scheme, usable as a file name.
    pub fn bare(self) -> String {
        self.0.simple().to_string()
    }
}

impl fmt::Display for ArtifactId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "artifact:{}", self.0.simple())
    }
}

impl fmt::Debug for ArtifactId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ArtifactId {
    type Err = ArtifactError;

    fn from_str(text: &str) -> Result<Self, ArtifactError> {
        let bare = text.strip_prefix("artifact:").unwrap_or(text);
        bare.parse().map(Self).map_err(|_| ArtifactError::BadId(text.chars().take(80).collect()))
    }
}

impl Serialize for ArtifactId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ArtifactId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The metadata of an artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactInfo {
    /// The artifact's id.
    pub id: ArtifactId,
    /// The tenant that owns the artifact. Other tenants cannot see it.
    pub tenant: Option<String>,
    /// The number of bytes that are stored.
    pub kept_bytes: u64,
    /// The number of bytes that were written.
    pub total_bytes: u64,
    /// The maker, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maker: Option<ArtifactMaker>,
}

/// The caller and the workspace of the call that made an artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactMaker {
    /// The agent that made the call.
    pub agent: String,
    /// The person behind the agent.
    pub user: Option<String>,
    /// The workspace, as named in the history.
    pub workspace: String,
}

impl ArtifactInfo {
    /// Creates the metadata of an empty artifact of this caller.
    pub fn new(id: ArtifactId, owner: &Caller, workspace: Option<&str>) -> Self {
        let maker = workspace.map(|workspace| ArtifactMaker {
            agent: owner.agent.clone(),
            user: owner.user.clone(),
            workspace: workspace.to_owned(),
        });
        Self { id, tenant: owner.tenant.clone(), kept_bytes: 0, total_bytes: 0, maker }
    }

    /// Returns true if a call of this caller made the artifact in this workspace; false if the maker is unknown.
    pub fn is_made_by(&self, caller: &Caller, workspace: &str) -> bool {
        self.tenant == caller.tenant
            && self.maker.as_ref().is_some_and(|maker| {
                (&maker.agent, &maker.user, maker.workspace.as_str()) == (&caller.agent, &caller.user, workspace)
            })
    }
}

/// The reason why an artifact could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// The artifact does not exist, was removed, or belongs to another tenant. The three are indistinguishable on
    /// purpose.
    #[error("there is no artifact `{0}`")]
    NotFound(ArtifactId),
    /// The text is not an artifact's id.
    #[error("`{0}` is not an artifact's id")]
    BadId(String),
    /// The artifact store failed.
    #[error("cannot {doing} artifact `{id}`")]
    Store {
        /// The operation that failed.
        doing: &'static str,
        /// The artifact it failed on.
        id: ArtifactId,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// One line that matched a pattern.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LineMatch {
    /// The line's number, from 1.
    pub line: u64,
    /// The byte offset of the line, for reading on from there.
    pub offset: u64,
    /// The line, cut after 500 characters.
    pub text: String,
}

/// A search for lines of an artifact.
#[derive(Debug)]
pub struct Grep<'a> {
    /// The pattern of the lines.
    pub pattern: &'a Regex,
    /// The number of matching lines after which the search ends.
    pub matches_max: usize,
    /// The length above which a line is searched in pieces, so that a file without line breaks cannot fill the memory.
    pub line_bytes_max: usize,
    /// Ends the search after the current line.
    pub stop: &'a CancellationToken,
}

/// Returns the lines of an artifact that match, and true if there may be more.
pub fn grep(
    store: &dyn Artifacts,
    id: ArtifactId,
    reader: &Caller,
    search: &Grep<'_>,
) -> Result<(Vec<LineMatch>, bool), ArtifactError> {
    const PAGE_BYTES: u64 = 1024 * 1024;
    let mut found = Vec::new();
    let (mut line, mut offset, mut rest) = (1, 0, Vec::new());
    let mut read_at = 0;
    loop {
        let page = store.read(id, reader, read_at, PAGE_BYTES)?;
        let last = page.is_empty();
        read_at += page.len() as u64;
        rest.extend_from_slice(&page);
        let mut start = 0;
        while start < rest.len() {
            // One more byte than a line can have: its line break.
            let piece_max = rest.len().min(start + search.line_bytes_max + 1);
            let line_break = rest[start..piece_max].iter().position(|byte| *byte == b'\n').map(|at| start + at);
            if line_break.is_none() && !last && rest.len() - start < search.line_bytes_max {
                break;
            }
            if search.stop.is_cancelled() {
                return Ok((found, true));
            }
            let end = line_break.unwrap_or(rest.len().min(start + search.line_bytes_max));
            let text = &rest[start..end];
            if search.pattern.is_match(text) {
                if found.len() == search.matches_max {
                    return Ok((found, true));
                }
                let text: String = String::from_utf8_lossy(text).chars().take(500).collect();
                found.push(LineMatch { line, offset, text });
            }
            let next = end + usize::from(line_break.is_some());
            offset += (next - start) as u64;
            line += u64::from(line_break.is_some());
            start = next;
        }
        rest.drain(..start);
        if last {
            return Ok((found, false));
        }
    }
}

/// An artifact store in memory. It removes the oldest artifacts when its space is used up.
#[derive(Debug, Clone)]
pub struct MemoryArtifacts {
    stored: Arc<Mutex<StoredArtifacts>>,
    each_bytes_max: u64,
}

#[derive(Debug)]
struct StoredArtifacts {
    artifacts: VecDeque<(ArtifactInfo, Vec<u8>)>,
    bytes: u64,
    bytes_max: u64,
}

impl MemoryArtifacts {
    /// Creates a store that keeps `bytes_max` bytes in total, and at most half of that for one artifact.
    pub fn new(bytes_max: u64) -> Self {
        let stored = StoredArtifacts { artifacts: VecDeque::new(), bytes: 0, bytes_max };
        Self { stored: Arc::new(Mutex::new(stored)), each_bytes_max: bytes_max / 2 }
    }

    fn with<T>(
        &self,
        id: ArtifactId,
        reader: &Caller,
        look: impl FnOnce(&ArtifactInfo, &[u8]) -> T,
    ) -> Result<T, ArtifactError> {
        let stored = self.stored.lock().expect("no code panics while it holds the artifacts");
        let seen = stored.artifacts.iter().find(|(info, _)| info.id == id && info.tenant == reader.tenant);
        seen.map(|(info, bytes)| look(info, bytes)).ok_or(ArtifactError::NotFound(id))
    }
}

impl Default for MemoryArtifacts {
    fn default() -> Self {
        Self::new(64 * 1024 * 1024)
    }
}

impl Artifacts for MemoryArtifacts {
    fn create(
        &self,
        owner: &Caller,
        workspace: Option<&str>,
        bytes_max: u64,
    ) -> Result<Box<dyn ArtifactWriter>, ArtifactError> {
        let id = ArtifactId::next();
        let info = ArtifactInfo::new(id, owner, workspace);
        let mut stored = self.stored.lock().expect("no code panics while it holds the artifacts");
        stored.artifacts.push_back((info, Vec::new()));
        let bytes_max = bytes_max.min(self.each_bytes_max);
        Ok(Box::new(MemoryWriter { id, store: self.clone(), bytes_max, kept_bytes: 0 }))
    }

    fn describe(&self, id: ArtifactId, reader: &Caller) -> Result<ArtifactInfo, ArtifactError> {
        self.with(id, reader, |info, _| info.clone())
    }

    fn read(&self, id: ArtifactId, reader: &Caller, offset: u64, length: u64) -> Result<Vec<u8>, ArtifactError> {
        self.with(id, reader, |_, bytes| {
            let start = offset.min(bytes.len() as u64);
            let end = offset.saturating_add(length).min(bytes.len() as u64);
            bytes[start as usize..end as usize].to_vec()
        })
    }

    fn list(&self, reader: &Caller, workspace: &str, limit: usize) -> Result<Vec<ArtifactInfo>, ArtifactError> {
        let stored = self.stored.lock().expect("no code panics while it holds the artifacts");
        let own = stored.artifacts.iter().rev().map(|(info, _)| info).filter(|info| info.is_made_by(reader, workspace));
        Ok(own.take(limit).cloned().collect())
    }
}

struct MemoryWriter {
    id: ArtifactId,
    store: MemoryArtifacts,
    bytes_max: u64,
    kept_bytes: u64,
}

impl ArtifactWriter for MemoryWriter {
    fn id(&self) -> ArtifactId {
        self.id
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), ArtifactError> {
        let mut stored = self.store.stored.lock().expect("no code panics while it holds the artifacts");
        // Ignore writes to an artifact that was evicted while it was being written.
        let Some((info, content)) = stored.artifacts.iter_mut().find(|(info, _)| info.id == self.id) else {
            return Ok(());
        };
        let room = self.bytes_max.saturating_sub(info.kept_bytes);
        let taken = (bytes.len() as u64).min(room);
        content.extend_from_slice(&bytes[..taken as usize]);
        info.kept_bytes += taken;
        info.total_bytes += bytes.len() as u64;
        self.kept_bytes = info.kept_bytes;
        stored.bytes += taken;
        while stored.bytes > stored.bytes_max && stored.artifacts.len() > 1 {
            let (info, _) = stored.artifacts.pop_front().expect("there is more than one");
            stored.bytes -= info.kept_bytes;
        }
        Ok(())
    }

    fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(store: &MemoryArtifacts, owner: &Caller, text: &str) -> ArtifactId {
        let mut writer = store.create(owner, None, u64::MAX).expect("memory");
        for chunk in text.as_bytes().chunks(7) {
            writer.write(chunk).expect("memory");
        }
        writer.id()
    }

    #[test]
    fn an_artifact_is_read_in_pages_and_searched_by_line() {
        let (store, ada) = (MemoryArtifacts::default(), Caller::local());
        let id = written(&store, &ada, "one\ntwo\nthree two\nfour");
        assert_eq!(store.read(id, &ada, 4, 3).expect("there"), b"two");
        assert_eq!(store.read(id, &ada, 1000, u64::MAX).expect("there"), b"");
        let pattern = Regex::new("two|four").expect("a pattern");
        let line = |line, offset, text: &str| LineMatch { line, offset, text: text.into() };
        let grep = |matches_max, line_bytes_max, stop: &CancellationToken| {
            grep(&store, id, &ada, &Grep { pattern: &pattern, matches_max, line_bytes_max, stop }).expect("there")
        };
        let go_on = CancellationToken::new();
        let all = vec![line(2, 4, "two"), line(3, 8, "three two"), line(4, 18, "four")];
        assert_eq!(grep(9, 100, &go_on), (all.clone(), false));
        assert_eq!(grep(9, 9, &go_on), (all, false));
        assert_eq!(grep(1, 100, &go_on), (vec![line(2, 4, "two")], true));
        // Pieces of four bytes: `thre`, `e tw`, `o`.
        assert_eq!(grep(9, 4, &go_on), (vec![line(2, 4, "two"), line(4, 18, "four")], false));
        go_on.cancel();
        assert_eq!(grep(9, 100, &go_on), (vec![], true));
    }

    #[test]
    fn an_artifact_of_another_tenant_looks_like_none() {
        let store = MemoryArtifacts::default();
        let owner = Caller { tenant: Some("acme".into()), ..Caller::local() };
        let id = written(&store, &owner, "secret");
        let message = store.read(id, &Caller::local(), 0, 9).expect_err("not theirs").to_string();
        assert_eq!(message, format!("there is no artifact `{id}`"));
        assert_eq!(store.describe(id, &owner).expect("theirs").total_bytes, 6);
    }

    #[test]
    fn memory_is_bounded_and_the_true_size_is_known() {
        let (store, ada) = (MemoryArtifacts::new(100), Caller::local());
        let big = written(&store, &ada, &"x".repeat(80));
        let info = store.describe(big, &ada).expect("there");
        assert_eq!((info.kept_bytes, info.total_bytes), (50, 80));
        written(&store, &ada, &"y".repeat(50));
        written(&store, &ada, "z");
        assert!(matches!(store.describe(big, &ada), Err(ArtifactError::NotFound(_))), "the oldest goes first");
    }
}
