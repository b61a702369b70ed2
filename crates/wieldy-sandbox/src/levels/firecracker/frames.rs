//! The protocol between the executor and a guest's agent: frames over a stream, each with a kind, a length and that
//! many bytes.
//!
//! The executor begins every connection, and its first frame is the purpose of the connection: [`Kind::Prepare`],
//! [`Kind::Run`] or [`Kind::Sync`]. The agent is not trusted: its frames are limited in size here, and checked by the
//! caller.

use std::io::{self, Read, Write};
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::supervise::protocol::RunOrder;

/// The port that the agent listens at.
pub(super) const PORT: u32 = 1024;

/// Maximum number of content bytes in one frame.
pub(super) const CONTENT_BYTES_MAX: usize = 64 * 1024;

/// Maximum number of bytes in any frame: more than the kernel lets a program be started with.
const BYTES_MAX: usize = 8 * 1024 * 1024;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// An order to mount the file tree of commands, see [`Prepare`]; answered by [`Kind::Ready`].
    Prepare = 1,
    /// The agent's version.
    Ready,
    /// An order to run a command, see [`Run`]; answered by any number of outputs and one [`Kind::Ended`].
    Run,
    /// Input of the command; empty at its end. The next one follows only after [`Kind::Taken`].
    Input,
    /// A notice that the command has got the input, or does not want any.
    Taken,
    /// An order to stop the command.
    Stop,
    /// Standard output of the command.
    Output,
    /// Standard error of the command.
    Complaint,
    /// The end of the command: a [`SupervisorReport`](crate::supervise::protocol::SupervisorReport).
    Ended,
    /// An order to synchronize the workspaces: the guest answers with its changes up to [`Kind::Done`], and then the
    /// executor sends its own.
    Sync,
    /// A file, folder or link that changed, see [`Entry`](super::sync::Entry).
    Entry,
    /// The next bytes of a file; empty at its end.
    Content,
    /// The end of a list of changes.
    Done,
    /// The reason why an order could not be carried out.
    Failed,
}

const KINDS: [Kind; 14] = [
    Kind::Prepare,
    Kind::Ready,
    Kind::Run,
    Kind::Input,
    Kind::Taken,
    Kind::Stop,
    Kind::Output,
    Kind::Complaint,
    Kind::Ended,
    Kind::Sync,
    Kind::Entry,
    Kind::Content,
    Kind::Done,
    Kind::Failed,
];

/// The first order to a guest.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Prepare {
    /// The path of the workspace for commands, which is that on the executor's machine.
    pub(super) workspace: PathBuf,
    /// The limits of private folders.
    pub(super) room_bytes: u64,
    pub(super) room_files: u64,
}

/// A command for the guest. The folders in the order are relative to the workspace.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) order: RunOrder,
    pub(super) has_input: bool,
}

/// A received frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) bytes: Vec<u8>,
}

impl Frame {
    /// Parses its bytes as a message.
    pub(super) fn message<T: DeserializeOwned>(&self) -> io::Result<T> {
        let told =
            |error: serde_json::Error| invalid(&format!("a frame that is no message: {}", shown(&error.to_string())));
        serde_json::from_slice(&self.bytes).map_err(told)
    }

    /// Returns the frame if it is of this kind, and else an error: that of the other side if it sent one.
    pub(super) fn expect(self, kind: Kind) -> io::Result<Self> {
        match self.kind {
            found if found == kind => Ok(self),
            Kind::Failed => Err(io::Error::other(shown(&String::from_utf8_lossy(&self.bytes)))),
            found => Err(invalid(&format!("a frame {found:?} where {kind:?} belongs"))),
        }
    }
}

/// Returns a text of the other side in a form that can be shown: short, and without control characters.
pub(super) fn shown(text: &str) -> String {
    const CHARACTERS_MAX: usize = 500;
    text.chars().take(CHARACTERS_MAX).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

const HEAD_BYTES: usize = 5;

fn head(kind: Kind, bytes: &[u8]) -> io::Result<[u8; HEAD_BYTES]> {
    let length = u32::try_from(bytes.len()).ok().filter(|_| bytes.len() <= BYTES_MAX);
    let [a, b, c, d] = length.ok_or_else(|| invalid("a frame that is too long"))?.to_le_bytes();
    Ok([kind as u8, a, b, c, d])
}

fn parse([kind, a, b, c, d]: [u8; HEAD_BYTES]) -> io::Result<(Kind, usize)> {
    let known = KINDS.into_iter().find(|known| *known as u8 == kind);
    let known = known.ok_or_else(|| invalid(&format!("a frame of the unknown kind {kind}")))?;
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    let length_max = match known {
        Kind::Output | Kind::Complaint | Kind::Content | Kind::Input | Kind::Failed => CONTENT_BYTES_MAX,
        Kind::Done | Kind::Taken | Kind::Stop | Kind::Sync => 0,
        _ => BYTES_MAX,
    };
    if length > length_max {
        return Err(invalid(&format!("a frame {known:?} of {length} bytes; {length_max} are allowed")));
    }
    Ok((known, length))
}

pub(super) fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the other side sent {what}"))
}

/// Sends a frame.
pub(super) fn send(stream: &mut impl Write, kind: Kind, bytes: &[u8]) -> io::Result<()> {
    let mut whole = head(kind, bytes)?.to_vec();
    whole.extend_from_slice(bytes);
    stream.write_all(&whole)
}

/// Sends a message as a frame.
pub(super) fn tell(stream: &mut impl Write, kind: Kind, message: &impl Serialize) -> io::Result<()> {
    send(stream, kind, &serde_json::to_vec(message)?)
}

/// Receives the next frame. The end of the stream is an error, since a frame ends each exchange.
pub(super) fn receive(stream: &mut impl Read) -> io::Result<Frame> {
    let mut head = [0; HEAD_BYTES];
    stream.read_exact(&mut head)?;
    let (kind, length) = parse(head)?;
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok(Frame { kind, bytes })
}

/// Sends a frame without blocking the thread.
pub(super) async fn send_to(stream: &mut (impl AsyncWrite + Unpin), kind: Kind, bytes: &[u8]) -> io::Result<()> {
    let mut whole = head(kind, bytes)?.to_vec();
    whole.extend_from_slice(bytes);
    stream.write_all(&whole).await
}

/// A receiver of frames that does not block the thread. It stores incomplete frames, so a wait can be cancelled.
#[derive(Default)]
pub(super) struct Incoming {
    bytes: Vec<u8>,
}

impl Incoming {
    pub(super) async fn next(&mut self, stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Frame> {
        loop {
            if let Some(frame) = self.whole()? {
                return Ok(frame);
            }
            if stream.read_buf(&mut self.bytes).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Returns the first frame, if it is complete.
    fn whole(&mut self) -> io::Result<Option<Frame>> {
        let Some(head) = self.bytes.first_chunk::<HEAD_BYTES>() else { return Ok(None) };
        let (kind, length) = parse(*head)?;
        if self.bytes.len() < HEAD_BYTES + length {
            return Ok(None);
        }
        let rest = self.bytes.split_off(HEAD_BYTES + length);
        let mut frame = std::mem::replace(&mut self.bytes, rest);
        frame.drain(..HEAD_BYTES);
        Ok(Some(Frame { kind, bytes: frame }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_every_kind_are_received_as_they_were_sent() {
        let mut stream = Vec::new();
        for kind in KINDS {
            let bytes: &[u8] = if parse([kind as u8, 1, 0, 0, 0]).is_ok() { b"{" } else { b"" };
            send(&mut stream, kind, bytes).unwrap();
            assert_eq!(receive(&mut stream.as_slice()).unwrap(), Frame { kind, bytes: bytes.into() });
            stream.clear();
        }
    }

    #[test]
    fn invalid_frames_are_refused_before_their_length_is_trusted() {
        let told = |bytes: &[u8]| receive(&mut &*bytes).unwrap_err().to_string();
        assert_eq!(told(&[0, 1, 0, 0, 0]), "the other side sent a frame of the unknown kind 0");
        assert_eq!(told(&[99, 1, 0, 0, 0]), "the other side sent a frame of the unknown kind 99");
        let long = [Kind::Output as u8, 1, 0, 1, 0];
        assert_eq!(told(&long), "the other side sent a frame Output of 65537 bytes; 65536 are allowed");
        let long = [Kind::Entry as u8, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(told(&long), "the other side sent a frame Entry of 4294967295 bytes; 8388608 are allowed");
        assert_eq!(told(&[Kind::Done as u8, 1, 0, 0, 0]), "the other side sent a frame Done of 1 bytes; 0 are allowed");
        assert_eq!(receive(&mut &[3, 9, 0][..]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let frame = Frame { kind: Kind::Failed, bytes: b"no disk".into() };
        assert_eq!(frame.expect(Kind::Ready).unwrap_err().to_string(), "no disk");
        let frame = Frame { kind: Kind::Failed, bytes: b"\x1b[2Jgone\xff".into() };
        assert_eq!(frame.expect(Kind::Ready).unwrap_err().to_string(), "\u{fffd}[2Jgone\u{fffd}");
        // An error about a malformed message contains no control characters either.
        let frame = Frame { kind: Kind::Entry, bytes: format!("\"\\u001b[2J{}\"", "x".repeat(1 << 20)).into() };
        let told = frame.message::<crate::supervise::protocol::SupervisorReport>().unwrap_err().to_string();
        let expected = format!(
            "the other side sent a frame that is no message: unknown variant `{}[2J{}",
            char::REPLACEMENT_CHARACTER,
            "x".repeat(500 - 21)
        );
        assert!(told == expected, "{}", told.len());
        let frame = Frame { kind: Kind::Output, bytes: Vec::new() };
        assert_eq!(
            frame.expect(Kind::Ready).unwrap_err().to_string(),
            "the other side sent a frame Output where Ready belongs"
        );
    }

    #[tokio::test]
    async fn a_frame_in_pieces_is_received_whole_even_if_the_first_wait_was_cancelled() {
        let (mut ours, mut theirs) = tokio::io::duplex(64);
        let mut incoming = Incoming::default();
        let mut whole = Vec::new();
        send(&mut whole, Kind::Output, b"hello").unwrap();
        send(&mut whole, Kind::Done, b"").unwrap();
        let (first, second) = whole.split_at(7);
        theirs.write_all(first).await.unwrap();
        tokio::select! {
            biased;
            _ = incoming.next(&mut ours) => panic!("half a frame was taken for one"),
            () = std::future::ready(()) => {}
        }
        theirs.write_all(second).await.unwrap();
        assert_eq!(incoming.next(&mut ours).await.unwrap(), Frame { kind: Kind::Output, bytes: b"hello".into() });
        assert_eq!(incoming.next(&mut ours).await.unwrap(), Frame { kind: Kind::Done, bytes: Vec::new() });
        drop(theirs);
        assert_eq!(incoming.next(&mut ours).await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
