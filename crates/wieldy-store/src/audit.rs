//! Signed ends of the trail: who holds one can prove later that nothing before it was changed, whoever owns the database.

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
use crate::trail::Head;

/// How many records there may be after the last one whose hash was signed, and how long.
const SIGN_EVERY: i64 = 10_000;
const SIGN_AFTER: Duration = Duration::from_secs(60);

/// The end of the trail at some time, signed. Kept elsewhere, it is an anchor: the trail must still lead through it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedHead {
    /// The number of the last record.
    pub seq: i64,
    /// The hash of it and of everything before it, in hexadecimal digits.
    pub hash: String,
    /// When it was signed.
    pub at: Timestamp,
    /// The public key, in hexadecimal digits.
    pub key: String,
    /// The signature by that key (Ed25519), in hexadecimal digits.
    pub signature: String,
}

impl SignedHead {
    /// Whether the signature is good and by `key`.
    pub fn is_signed_by(&self, key: &str) -> bool {
        let (Some(key_bytes), Some(signature)) = (from_hex(key), from_hex(&self.signature)) else { return false };
        let Some(hash) = from_hex(&self.hash).and_then(|hash| <[u8; 32]>::try_from(hash).ok()) else { return false };
        let signed = message(&Head { seq: self.seq, hash }, self.at);
        self.key == key && UnparsedPublicKey::new(&ED25519, key_bytes).verify(&signed, &signature).is_ok()
    }
}

fn message(head: &Head, at: Timestamp) -> Vec<u8> {
    let mut message = b"wieldy.head.1\0".to_vec();
    message.extend_from_slice(&head.seq.to_le_bytes());
    message.extend_from_slice(&head.hash);
    message.extend_from_slice(&at.as_microsecond().to_le_bytes());
    message
}

/// Signs ends of the trail.
pub struct Signer {
    pair: Ed25519KeyPair,
    key: String,
}

impl Signer {
    /// The key in a file of its owner's, made if there is none.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let failed = |why: String| StoreError::Key { path: path.to_owned(), why };
        let pkcs8 = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let made = Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new())
                    .map_err(|_| failed("the system gives no random numbers".into()))?;
                write_new(path, made.as_ref()).map_err(|error| failed(error.to_string()))?;
                // Somebody else may have been quicker: theirs counts.
                fs::read(path).map_err(|error| failed(error.to_string()))?
            }
            Err(error) => return Err(failed(error.to_string())),
        };
        let pair = Ed25519KeyPair::from_pkcs8(&pkcs8).map_err(|error| failed(error.to_string()))?;
        let key = to_hex(pair.public_key().as_ref());
        Ok(Self { pair, key })
    }

    /// The public key, in hexadecimal digits.
    pub fn key(&self) -> &str {
        &self.key
    }

    pub(crate) fn sign(&self, head: &Head, at: Timestamp) -> SignedHead {
        let at = Timestamp::from_microsecond(at.as_microsecond()).unwrap_or(at);
        let signature = to_hex(self.pair.sign(&message(head, at)).as_ref());
        SignedHead { seq: head.seq, hash: to_hex(&head.hash), at, key: self.key.clone(), signature }
    }
}

/// Writes a file that only its owner can read, whole, unless there is one.
fn write_new(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
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

/// Keeps a signed end of the trail with the history.
pub(crate) fn keep(database: &mut dyn Database, head: &SignedHead) -> Result<(), StoreError> {
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

/// What came after the last signature.
#[derive(Debug)]
pub(crate) struct Unsigned {
    /// Where the trail ended when this executor last wrote, unless that is signed.
    head: Option<Head>,
    /// How far it was then, for those that come often.
    signed_seq: i64,
    signed: Instant,
}

impl Unsigned {
    pub(crate) fn since(seq: i64) -> Self {
        Self { head: None, signed_seq: seq, signed: Instant::now() }
    }

    /// Where the trail ended when this executor last wrote, unless that is signed.
    pub(crate) fn head(&self) -> Option<Head> {
        self.head
    }

    /// Has what is written next signed.
    pub(crate) fn make_due(&mut self) {
        self.signed_seq = i64::MIN / 2;
    }

    pub(crate) fn is_due(&self, seq: i64) -> bool {
        seq - self.signed_seq >= SIGN_EVERY || self.signed.elapsed() >= SIGN_AFTER
    }

    /// A record after which everything comes that this executor has not heard of.
    pub(crate) fn after(&self) -> i64 {
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
