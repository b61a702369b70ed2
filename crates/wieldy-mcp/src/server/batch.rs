//! JSON-RPC batches in one HTTP request, as in revision 2025-03-26. Each message is answered as if it had come alone.
//! The responses go back together: as JSON, or as one SSE stream if any of them is a stream.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use http::request::Parts;
use http::{StatusCode, header};
use http_body_util::{BodyExt, BodyStream, Full, StreamBody};
use serde_json::value::RawValue;
use wieldy_core::Caller;

use super::http_endpoint::{Endpoint, HttpResponse, plain_text};
use super::http_tools_call::{EVENTS, JSON, respond};
use super::pending::Refused;
use super::session::Session;

/// Answers the messages of a batch.
pub(super) async fn answer(
    endpoint: &Endpoint,
    parts: Parts,
    body: &Bytes,
    caller: &Arc<Caller>,
    session: &Arc<Session>,
) -> HttpResponse {
    let Ok(messages) = serde_json::from_slice::<Vec<&RawValue>>(body) else {
        return plain_text(StatusCode::BAD_REQUEST, "the body is not JSON");
    };
    if messages.is_empty() || messages.len() > endpoint.shared.options.requests_max {
        return plain_text(StatusCode::BAD_REQUEST, "there are no messages, or too many at once");
    }
    let post = |message: &&RawValue| {
        let body = body.slice_ref(message.get().as_bytes());
        endpoint.post(parts.clone(), body, Arc::clone(caller), Some(Arc::clone(session)))
    };
    let (mut answers, mut streams) = (Vec::new(), Vec::new());
    for response in join_all(messages.iter().map(post)).await {
        let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        if kind.starts_with(EVENTS) {
            streams.push(BodyStream::new(response.into_body()));
            continue;
        }
        let (is_json, accepted) = (kind.starts_with(JSON), response.status() == StatusCode::ACCEPTED);
        let answer = response.into_body().collect().await.unwrap_or_else(|never| match never {}).to_bytes();
        match is_json {
            true => answers.push(answer),
            false if accepted => {}
            false => answers.push(refusal(&answer)),
        }
    }
    if streams.is_empty() {
        return match answers.is_empty() {
            true => super::http_tools_call::accepted(),
            false => respond(StatusCode::OK, JSON, Full::new(listed(&answers)).boxed()),
        };
    }
    let events = answers.into_iter().map(|answer| [b"data: ", &answer[..], b"\n\n"].concat());
    let events = stream::iter(events.map(|event| Ok(http_body::Frame::data(Bytes::from(event)))));
    let all = stream::select_all(streams);
    respond(StatusCode::OK, EVENTS, BodyExt::boxed(StreamBody::new(events.chain(all))))
}

/// Turns an HTTP error into a JSON-RPC error.
fn refusal(why: &Bytes) -> Bytes {
    let refused = Refused::invalid(None, String::from_utf8_lossy(why).into_owned());
    let refused = rmcp::model::ServerJsonRpcMessage::from(refused);
    serde_json::to_vec(&refused).expect("what MCP's types hold can be written").into()
}

fn listed(answers: &[Bytes]) -> Bytes {
    let mut list = vec![b'['];
    for (at, answer) in answers.iter().enumerate() {
        if at > 0 {
            list.push(b',');
        }
        list.extend_from_slice(answer);
    }
    list.push(b']');
    list.into()
}
