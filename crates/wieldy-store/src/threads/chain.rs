//! The hash chains of threads: each entry's hash covers the entry before, and the origin of each thread covers the
//! thread before. So an entry or thread that was changed, removed, moved or renamed makes a later hash wrong.
//!
//! The end of a chain cannot be proven by the chain. So it is signed with the audit key, in a row that has no earlier
//! versions: without the key, an end that was cut off cannot be replaced by a signed earlier one.

use crate::audit::Signer;
use crate::hash_chain::Hash;

/// An entry in its place. All its fields are hashed.
pub(super) struct PlacedEntry<'a> {
    pub(super) seq: i64,
    pub(super) at: i64,
    pub(super) reply_to: Option<i64>,
    pub(super) kind: &'a str,
    pub(super) agent: &'a str,
    pub(super) tenant: Option<&'a str>,
    pub(super) user: Option<&'a str>,
    pub(super) title: Option<&'a str>,
    pub(super) content: &'a str,
    pub(super) push_key: Option<&'a str>,
}

impl PlacedEntry<'_> {
    /// Returns the hash of the entry after `previous`.
    pub(super) fn hash(&self, previous: &Hash) -> Hash {
        let mut bytes = b"wieldy.thread.entry.1\0".to_vec();
        bytes.extend_from_slice(previous);
        for number in [self.seq, self.at, self.reply_to.unwrap_or(0)] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for text in [Some(self.kind), Some(self.agent), self.tenant, self.user, self.title, Some(self.content)] {
            put_text(&mut bytes, text);
        }
        put_text(&mut bytes, self.push_key);
        *blake3::hash(&bytes).as_bytes()
    }
}

/// Returns the origin of a thread after the origin of the thread before: the beginning of its chain of entries.
pub(super) fn origin(previous: &Hash, number: i64, owner: &str, thread_id: &str, created_at: i64) -> Hash {
    let mut bytes = b"wieldy.thread.origin.1\0".to_vec();
    bytes.extend_from_slice(previous);
    bytes.extend_from_slice(&number.to_le_bytes());
    bytes.extend_from_slice(&created_at.to_le_bytes());
    put_text(&mut bytes, Some(owner));
    put_text(&mut bytes, Some(thread_id));
    *blake3::hash(&bytes).as_bytes()
}

/// Returns the signed message of the end of a thread.
pub(super) fn end_message(origin: &Hash, seq: i64, hash: &Hash) -> Vec<u8> {
    [b"wieldy.thread.end.1\0".as_slice(), origin, &seq.to_le_bytes(), hash].concat()
}

/// Returns the signed message of the roll.
pub(super) fn roll_message(threads: i64, origin: &Hash) -> Vec<u8> {
    [b"wieldy.thread.roll.1\0".as_slice(), &threads.to_le_bytes(), origin].concat()
}

/// Returns the public key and the signature of a message, if there is a key.
pub(super) fn signed(signer: Option<&Signer>, message: &[u8]) -> (Option<String>, Option<Vec<u8>>) {
    signer.map(|signer| (signer.key().to_owned(), signer.sign_message(message))).unzip()
}

/// Appends a text after its length, so that no two entries have the same bytes. A missing text has a length of its own.
fn put_text(bytes: &mut Vec<u8>, text: Option<&str>) {
    let length = text.map_or(u64::MAX, |text| text.len() as u64);
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(text.unwrap_or_default().as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: PlacedEntry<'static> = PlacedEntry {
        seq: 1,
        at: 2,
        reply_to: None,
        kind: "note",
        agent: "ada",
        tenant: None,
        user: Some("ann"),
        title: None,
        content: "text",
        push_key: None,
    };

    #[test]
    fn every_field_of_an_entry_changes_its_hash() {
        let hash = |entry: PlacedEntry<'_>| entry.hash(&[0; 32]);
        let hashes = [
            ENTRY.hash(&[0; 32]),
            ENTRY.hash(&[1; 32]),
            hash(PlacedEntry { seq: 2, ..ENTRY }),
            hash(PlacedEntry { at: 3, ..ENTRY }),
            hash(PlacedEntry { reply_to: Some(1), ..ENTRY }),
            hash(PlacedEntry { kind: "task", ..ENTRY }),
            hash(PlacedEntry { agent: "bob", ..ENTRY }),
            hash(PlacedEntry { tenant: Some("ann"), user: None, ..ENTRY }),
            hash(PlacedEntry { user: None, ..ENTRY }),
            hash(PlacedEntry { user: Some(""), ..ENTRY }),
            hash(PlacedEntry { title: Some("text"), ..ENTRY }),
            hash(PlacedEntry { content: "texts", ..ENTRY }),
            hash(PlacedEntry { push_key: Some("k"), ..ENTRY }),
        ];
        let different: std::collections::BTreeSet<_> = hashes.iter().collect();
        assert_eq!(different.len(), hashes.len());
    }

    #[test]
    fn the_origin_of_a_thread_depends_on_its_names_and_on_the_thread_before() {
        let origins = [
            origin(&[0; 32], 1, "a", "b", 2),
            origin(&[1; 32], 1, "a", "b", 2),
            origin(&[0; 32], 2, "a", "b", 2),
            origin(&[0; 32], 1, "ab", "", 2),
            origin(&[0; 32], 1, "a", "b", 3),
        ];
        let different: std::collections::BTreeSet<_> = origins.iter().collect();
        assert_eq!(different.len(), origins.len());
    }
}
