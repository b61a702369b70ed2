//! Event data for writing and showing: without the secrets of the process and of the call.

use std::borrow::Cow;

use serde_json::{Value, json};

use crate::event::{Body, Event};
use crate::redact;

/// The replacement for an output that may contain a secret in parts.
pub(crate) const NOT_KEPT: &str = "[the output is not stored: a secret may be split between stdout and stderr]";

impl Event {
    /// Returns the event's data without secrets, for everything that is written down or shown. The body itself keeps
    /// the original texts.
    pub fn data(&self) -> Value {
        let data = serde_json::to_value(&self.body).expect("events are plain data");
        if self.body.is_clean() {
            return data;
        }
        let mut data = match redact::value(&data) {
            Cow::Owned(clean) => clean,
            Cow::Borrowed(_) => data,
        };
        if self.subject.arguments.has_secrets() && !matches!(self.body, Body::CallPending { .. }) {
            self.hide_own(&mut data);
        }
        data
    }

    /// Returns the result that the caller got, without secrets, if clients may ask for it again.
    pub fn answer(&self) -> Option<Value> {
        let answer = self.body.closing()?.answer.as_ref()?;
        let mut answer = redact::value(&json!(answer)).into_owned();
        if self.subject.arguments.has_secrets() {
            self.hide_own(&mut answer);
        }
        if self.subject.arguments.is_parted() {
            let blocks = answer["content"].as_array_mut().into_iter().flatten();
            blocks.filter_map(|block| block.get_mut("text")).for_each(|text| *text = json!(NOT_KEPT));
        }
        Some(answer)
    }

    /// Removes the secrets of the call's arguments from its texts. The engine's own words stay: a caller that could
    /// hide them could hide how its call ended.
    fn hide_own(&self, data: &mut Value) {
        const OWN_WORDS: &[&str] = &[
            "status",
            "stream",
            "level",
            "code",
            "name",
            "category",
            "type",
            "mimeType",
            "tool",
            "provider",
            "artifact",
            "sandbox",
            "confirmation",
            "digest",
            "execution_id",
            "call_id",
            "keyed",
            "usage",
            "timing",
        ];
        let Value::Object(data) = data else { return };
        for (name, value) in data.iter_mut().filter(|(name, _)| !OWN_WORDS.contains(&name.as_str())) {
            match (name.as_str(), value) {
                (_, Value::Number(_) | Value::Bool(_) | Value::Null) => {}
                ("error", error @ Value::Object(_)) => self.hide_own(error),
                ("content", Value::Array(blocks)) => blocks.iter_mut().for_each(|block| self.hide_own(block)),
                (_, value) => self.subject.arguments.hide_in(value),
            }
        }
    }
}
