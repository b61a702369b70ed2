//! Signatures over the end of the trail. With a signed head one can prove later that no earlier record was changed,
//! even by the owner of the database.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use serde::{Deserialize, Serialize};

use crate::database::{Database, Value};
use crate::error::StoreError;
use crate::failpoint;
use crate::hash_chain::Head;

/// The number of records and the time since the last signed head after which the next head is signed.
const SIGN_EVERY: i64 = 10_000;
const SIGN_AFTER: Duration = Duration::from_secs(60);

/// The end of the trail at some time, signed. A copy stored elsewhere is an anchor: the trail must still lead through
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedHead {
    /// The number of the last record.
    pub seq: i64,
    /// The hash of that record and of everything before it, in hexadecimal digits.
    pub hash: String,
    /// The time of the signature.
    pub at: Timestamp,
    /// The public key, in hexadecimal digits.
    pub key: String,
    /// The signature by that key (Ed25519), in hexadecimal digits.
    pub signature: String,
}

impl SignedHead {
    /// Returns true if the signature is valid and made with `key`.
    pub fn is_signed_by(&self, key: &str) -> bool {
        let (Some(key_bytes), Some(signature)) = (from_hex(key), from_hex(&self.signature)) else { return false };
        let Some(hash) = from_hex(&self.hash).and_then(|hash| <[u8; 32]>::try_from(hash).ok()) else { return false };
        let signed = signed_message(&Head { seq: self.seq, hash }, self.at);
        self.key == key && UnparsedPublicKey::new(&ED25519, key_bytes).verify(&signed, &signature).is_ok()
    }
}

/// Returns true if a message is signed with the private key of a public key, which is in hexadecimal digits.
pub(crate) fn is_signed_message(key: &str, message: &[u8], signature: &[u8]) -> bool {
    from_hex(key).is_some_and(|key| UnparsedPublicKey::new(&ED25519, key).verify(message, signature).is_ok())
}

fn signed_message(head: &Head, at: Timestamp) -> Vec<u8> {
    let mut message = b"wieldy.head.1\0".to_vec();
    message.extend_from_slice(&head.seq.to_le_bytes());
    message.extend_from_slice(&head.hash);
    message.extend_from_slice(&at.as_microsecond().to_le_bytes());
    message
}

/// A key pair that signs heads of the trail.
pub struct Signer {
    pair: Ed25519KeyPair,
    key: String,
}

impl Signer {
    /// Reads the key from a file that only its owner can read. Creates the file if there is none.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let failed = |why: String| StoreError::Key { path: path.to_owned(), why };
        let pkcs8 = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let made = Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new())
                    .map_err(|_| failed("the operating system provides no random numbers".into()))?;
                create_private(path, made.as_ref()).map_err(|error| failed(error.to_string()))?;
                // Another process may have created the file first: its key counts.
                fs::read(path).map_err(|error| failed(error.to_string()))?
            }
            Err(error) => return Err(failed(error.to_string())),
        };
        let pair = Ed25519KeyPair::from_pkcs8(&pkcs8).map_err(|error| failed(error.to_string()))?;
        let key = to_hex(pair.public_key().as_ref());
        Ok(Self { pair, key })
    }

    /// Returns the public key, in hexadecimal digits.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Signs a message whose beginning tells its kind.
    pub(crate) fn sign_message(&self, message: &[u8]) -> Vec<u8> {
        self.pair.sign(message).as_ref().to_vec()
    }

    pub(crate) fn sign(&self, head: &Head, at: Timestamp) -> SignedHead {
        let at = Timestamp::from_microsecond(at.as_microsecond()).unwrap_or(at);
        let signature = to_hex(self.pair.sign(&signed_message(head, at)).as_ref());
        SignedHead { seq: head.seq, hash: to_hex(&head.hash), at, key: self.key.clone(), signature }
    }
}

/// Writes a file, whole and readable by its owner only, unless it exists already.
fn create_private(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let draft = folder.join(format!(".{}.{}", std::process::id(), uuid::Uuid::now_v7()));
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
    let drafted = file.write_all(bytes).and_then(|()| file.sync_all());
    failpoint::reach("key.drafted");
    let written = drafted.and_then(|()| fs::hard_link(&draft, path));
    fs::remove_file(&draft)?;
    match written {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Stores a signed head in the history.
pub(crate) fn insert_head(database: &mut dyn Database, head: &SignedHead) -> Result<(), StoreError> {
    let values = [
        head.seq.into(),
        Value::Bytes(from_hex(&head.hash).unwrap_or_default()),
        Value::Time(head.at.as_microsecond()),
        head.key.as_str().into(),
        Value::Bytes(from_hex(&head.signature).unwrap_or_default()),
    ];
    let sql = "INSERT INTO heads (seq, hash, at, key, signature) VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT DO NOTHING";
    database.execute(sql, &values).map(drop)
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}

/// The state of the trail since the last signature, which tells when the next one is due.
#[derive(Debug)]
pub(crate) struct SigningState {
    /// The head after this executor's last write; `None` if it is signed.
    head: Option<Head>,
    /// The number of the last record and the time, at the last signature or else at the start.
    signed_seq: i64,
    signed: Instant,
}

impl SigningState {
    pub(crate) fn since(seq: i64) -> Self {
        Self { head: None, signed_seq: seq, signed: Instant::now() }
    }

    /// Returns the head after this executor's last write; `None` if it is signed.
    pub(crate) fn head(&self) -> Option<Head> {
        self.head
    }

    /// Makes the next write sign its head.
    pub(crate) fn make_due(&mut self) {
        self.signed_seq = i64::MIN / 2;
    }

    pub(crate) fn is_due(&self, seq: i64) -> bool {
        seq - self.signed_seq >= SIGN_EVERY || self.signed.elapsed() >= SIGN_AFTER
    }

    /// Returns the number of a record after which all records come that this executor does not know.
    pub(crate) fn last_known_seq(&self) -> i64 {
        self.head.map_or(self.signed_seq, |head| head.seq)
    }

    pub(crate) fn note(&mut self, head: Head, signed: bool) {
        if signed {
            *self = Self::since(head.seq);
        } else {
            self.head = Some(head);
        }
    }
}
