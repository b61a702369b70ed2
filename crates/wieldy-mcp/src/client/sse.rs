//! Parses an SSE response and bounds the size of each event.

use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt};
use rmcp::model::{RequestId, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_client::SseError;
use sse_stream::{Sse, SseStream};

use super::failure::broken_answer;

/// The error text for a message that is too large.
pub(super) const TOO_LARGE: &str = "it sent a message of more than 16 MiB";

/// Parses the events of a stream. An event that is too large ends the stream with an error.
pub(super) fn events(
    bytes: impl Stream<Item = Result<Bytes, hyper::Error>> + Send + 'static,
    event_bytes_max: usize,
) -> impl Stream<Item = Result<Sse, SseError>> + Send + 'static {
    let mut size = EventSize { bytes_max: event_bytes_max, bytes: 0, line_bytes: 0 };
    let bytes = bytes.map(move |piece| {
        let piece = piece.map_err(StreamError::Connection)?;
        if size.fits(&piece) { Ok(piece) } else { Err(StreamError::TooLarge) }
    });
    SseStream::from_bytes_stream(bytes)
}

/// Returns true if the stream ended because an event was too large.
pub(super) fn is_too_large(error: &SseError) -> bool {
    matches!(error, SseError::Body(error) if matches!(error.downcast_ref(), Some(StreamError::TooLarge)))
}

/// Adapts a stream for the SDK, which would resume after an event that is too large. The request gets an error response
/// instead.
pub(super) fn for_the_sdk(
    events: impl Stream<Item = Result<Sse, SseError>> + Send + 'static,
    asked: Option<RequestId>,
) -> BoxStream<'static, Result<Sse, SseError>> {
    let events = events.scan(false, move |is_over, event| {
        let event = match event {
            _ if *is_over => None,
            Err(error) if is_too_large(&error) => {
                *is_over = true;
                let error = broken_answer(TOO_LARGE);
                let answer = asked.clone().map(|id| ServerJsonRpcMessage::error(error, Some(id)));
                answer.and_then(|answer| serde_json::to_string(&answer).ok()).map(|data| Ok(Sse::default().data(data)))
            }
            event => Some(event),
        };
        std::future::ready(event)
    });
    events.boxed()
}

/// The reason why a stream ended.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error("the connection broke")]
    Connection(#[source] hyper::Error),
    #[error("an event is too large")]
    TooLarge,
}

/// Counts the bytes of the current event.
struct EventSize {
    bytes_max: usize,
    bytes: usize,
    line_bytes: usize,
}

impl EventSize {
    /// Returns true if the current event is still within the limit after these bytes.
    fn fits(&mut self, piece: &[u8]) -> bool {
        for byte in piece {
            match byte {
                // An empty line ends the event.
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
    fn the_size_limit_applies_to_each_event() {
        let mut size = EventSize { bytes_max: 8, bytes: 0, line_bytes: 0 };
        assert!([&b"data: a\n\nda"[..], b"ta: b\r\n\r", b"\ndata: c\n"].iter().all(|piece| size.fits(piece)));
        assert!(!size.fits(b"data: d"));
    }
}
