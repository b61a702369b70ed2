//! Several calls at once: calls that conflict keep their order, and a call can use the result of another.

use std::fmt::Write;

use serde_json::json;
use wieldy::{Batch, Call};

pub(crate) async fn run() -> Result<String, Box<dyn std::error::Error>> {
    let workspace = tempfile::tempdir()?;
    let executor = wieldy::builder(workspace.path())?.build()?;
    let batch = Batch::new([
        Call::new("Write", json!({"path": "a.txt", "content": "one\n"})).id("write"),
        // This call reads the file that the first one writes, so it waits for it.
        Call::new("Search", json!({"pattern": "one", "path": "a.txt"})).id("search"),
        // This call needs the answer of the first one, and says so by referring to it.
        Call::new("Write", json!({"path": "b.txt", "content": {"$result": "write"}})).id("copy"),
        Call::new("Read", json!({"path": "missing.txt"})).id("missing"),
    ]);
    let batch = executor.batch(batch).await?;
    let mut told = String::new();
    for result in &batch.results {
        writeln!(told, "{}: {}", result.call_id.as_deref().unwrap_or_default(), result.status)?;
    }
    let summary = &batch.summary;
    write!(told, "{} of {} succeeded", summary.succeeded, summary.total)?;
    Ok(told)
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example shows what it did")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{}", run().await?);
    Ok(())
}
