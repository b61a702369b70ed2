//! The floor: the same call done by hand, without an executor.

use std::future::Future;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jsonschema::Validator;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// Arguments as a model sends them: 245 bytes.
pub(super) const ARGUMENTS: &str = concat!(
    r#"{"path":"crates/wieldy-core/src/executor.rs","pattern":"fn\\s+steps","context_lines":3,"#,
    r#""case_sensitive":true,"include":["*.rs","*.toml"],"exclude":["target/**"],"#,
    r#""options":{"max_matches":100,"format":"plain"},"reason":"where does one call begin"}"#
);

/// Returns the schema of those arguments as a real tool would declare it, closed to unknown properties.
pub(super) fn schema() -> Value {
    let globs = json!({"type": "array", "items": {"type": "string"}, "maxItems": 20});
    json!({
        "type": "object",
        "properties": {
            "path": {"type": "string", "minLength": 1},
            "pattern": {"type": "string", "minLength": 1, "maxLength": 1000},
            "context_lines": {"type": "integer", "minimum": 0, "maximum": 20},
            "case_sensitive": {"type": "boolean"},
            "include": globs,
            "exclude": globs,
            "options": {
                "type": "object",
                "properties": {
                    "max_matches": {"type": "integer", "minimum": 1},
                    "format": {"enum": ["plain", "json"]}
                },
                "additionalProperties": false
            },
            "reason": {"type": "string"}
        },
        "required": ["path", "pattern"],
        "additionalProperties": false
    })
}

/// The same call by hand: parse, validate, run, write the answer.
pub(super) struct ByHand {
    validator: Validator,
}

#[derive(Serialize)]
struct Answer {
    content: [Block; 1],
}

#[derive(Serialize)]
struct Block {
    r#type: &'static str,
    text: String,
}

impl ByHand {
    pub(super) fn new() -> Arc<Self> {
        let validator = jsonschema::options().build(&schema()).expect("the schema is a constant");
        Arc::new(Self { validator })
    }

    pub(super) async fn call(&self) -> String {
        self.run(&parse()).await
    }

    async fn run(&self, arguments: &Value) -> String {
        assert!(self.validator.is_valid(arguments));
        let answer = no_op(arguments).await;
        serde_json::to_string(&answer).expect("plain data")
    }

    /// Does the same in a task of its own with a timeout, as a program needs it for a timeout that always holds.
    pub(super) async fn call_spawned(self: &Arc<Self>) -> String {
        let hand = Arc::clone(self);
        let task = tokio::spawn(async move { hand.call().await });
        let answer = tokio::time::timeout(Duration::from_secs(30), task).await;
        answer.expect("a no-op ends in time").expect("a no-op does not panic")
    }

    /// Runs a hundred calls together, as a batch does: parses all, then runs a task for each, then collects all
    /// answers.
    pub(super) async fn hundred_together(self: &Arc<Self>) -> usize {
        let parsed: Vec<Value> = (0..100).map(|_| parse()).collect();
        let spawn = |arguments: Value| {
            let hand = Arc::clone(self);
            tokio::spawn(async move { hand.run(&arguments).await })
        };
        let tasks: Vec<_> = parsed.into_iter().map(spawn).collect();
        let mut answers = Vec::with_capacity(tasks.len());
        for task in tasks {
            answers.push(task.await.expect("a no-op does not panic"));
        }
        answers.iter().map(String::len).sum()
    }

    /// Runs a hundred tasks at once, each of which parses its own arguments, and collects all answers.
    pub(super) async fn hundred_spawned(self: &Arc<Self>) -> usize {
        let spawn = |_| {
            let hand = Arc::clone(self);
            tokio::spawn(async move { hand.call().await })
        };
        let tasks: Vec<_> = (0..100).map(spawn).collect();
        let mut bytes = 0;
        for task in tasks {
            bytes += task.await.expect("a no-op does not panic").len();
        }
        bytes
    }
}

fn parse() -> Value {
    serde_json::from_str(black_box(ARGUMENTS)).expect("the arguments are a constant")
}

/// Does nothing with its arguments.
async fn no_op(arguments: &Value) -> Answer {
    black_box(arguments);
    Answer { content: [Block { r#type: "text", text: "ok".to_owned() }] }
}

/// Measures the time of `once`, run this many times one after the other in a single entry of the runtime.
pub(super) fn timed<F: Future>(runtime: &Runtime, times: u64, mut once: impl FnMut() -> F) -> Duration {
    runtime.block_on(async {
        let began = Instant::now();
        for _ in 0..times {
            black_box(once().await);
        }
        began.elapsed()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_245_bytes_and_fit_the_schema() {
        assert_eq!(ARGUMENTS.len(), 245);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let hand = ByHand::new();
        let answer = r#"{"content":[{"type":"text","text":"ok"}]}"#;
        assert_eq!(runtime.block_on(hand.call()), answer);
        assert_eq!(runtime.block_on(hand.call_spawned()), answer);
        assert_eq!(runtime.block_on(hand.hundred_spawned()), 100 * answer.len());
        assert_eq!(runtime.block_on(hand.hundred_together()), 100 * answer.len());
    }
}
