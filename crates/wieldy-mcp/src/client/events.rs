//! The stream of events that a server answers with, of which none may be too large.

use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt};
use rmcp::model::{RequestId, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_client::SseError;
use sse_stream::{Sse, SseStream};

use super::failure::broken_answer;

/// The events of a stream. One that is too large ends it; whoever asked then gets an error for an answer.
pub(super) fn of(
    bytes: impl Stream<Item = Result<Bytes, reqwest::Error>> + Send + 'static,
    event_bytes_max: usize,
    asked: Option<RequestId>,
) -> BoxStream<'static, Result<Sse, SseError>> {
    let mut bound = Bound { bytes_max: event_bytes_max, bytes: 0, line_bytes: 0 };
    let bytes = bytes.map(move |piece| {
        let piece = piece.map_err(Broken::Connection)?;
        if bound.holds(&piece) { Ok(piece) } else { Err(Broken::TooLarge) }
    });
    let events = SseStream::from_bytes_stream(bytes).scan(false, move |is_over, event| {
        let event = match event {
            _ if *is_over => None,
            Err(SseError::Body(error)) if matches!(error.downcast_ref(), Some(Broken::TooLarge)) => {
                *is_over = true;
                let error = broken_answer("it sent a message of more than 16 MiB");
                let answer = asked.clone().map(|id| ServerJsonRpcMessage::error(error, Some(id)));
                answer.and_then(|answer| serde_json::to_string(&answer).ok()).map(|data| Ok(Sse::default().data(data)))
            }
            event => Some(event),
        };
        std::future::ready(event)
    });
    events.boxed()
}

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("the connection broke")]
    Connection(#[source] reqwest::Error),
    #[error("an event is too large")]
    TooLarge,
}

/// Counts the bytes of the event that has not ended yet.
struct Bound {
    bytes_max: usize,
    bytes: usize,
    line_bytes: usize,
}

impl Bound {
    /// Whether the event is still small enough with these.
    fn holds(&mut self, piece: &[u8]) -> bool {
        for byte in piece {
            match byte {
                // An empty line ends an event.
                b'\n' if self.line_bytes == 0 => self.bytes = 0,
                b'\n' => self.line_bytes = 0,
                b'\r' => {}
                _ => {
                    self.line_bytes += 1;
                    self.bytes += 1;
                }
            }
            if self.bytes > self.bytes_max {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_counted_one_by_one_however_they_are_cut() {
        let mut bound = Bound { bytes_max: 8, bytes: 0, line_bytes: 0 };
        assert!([&b"data: a\n\nda"[..], b"ta: b\r\n\r", b"\ndata: c\n"].iter().all(|piece| bound.holds(piece)));
        assert!(!bound.holds(b"data: d"));
    }
}
