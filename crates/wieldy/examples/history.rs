//! A history: calls are recorded in a file, found again, looked at, and proved to be as they were written.

use std::sync::Arc;

use serde_json::{Value, json};
use wieldy::{Address, Call, Executor, GroupBy, JournalOptions, Outcome, Query, Store, ToolSpec, tool};

pub(crate) async fn run() -> Result<String, Box<dyn std::error::Error>> {
    // A history is a file, or an address such as `postgres://user@host/database`. With a key, ends of it are signed.
    let folder = tempfile::tempdir()?;
    let store = Store::open(&Address::Sqlite(folder.path().join("history.db")))?;
    let options = JournalOptions { key: Some(folder.path().join("audit.key")), ..JournalOptions::default() };
    let journal = Arc::new(store.journal(&options)?);

    let send = tool(ToolSpec::new("send", "Sends a letter"), async |letter: Value, _run| match letter["to"].as_str() {
        Some(to) => Ok(Outcome::text(format!("sent to {to}"))),
        None => Err("a letter needs an address".into()),
    });
    // The journal is what the executor writes with; the store is what we ask.
    let mut builder = Executor::builder().tool(send);
    builder.journal = Arc::clone(&journal) as _;
    let executor = builder.build()?;
    // It will be found without the password. The second one fails, and is found too.
    let sent = executor.call(Call::new("send", json!({"to": "Ada", "password": "hunter2"}))).await;
    executor.call(Call::new("send", json!({"text": "lost"}))).await;
    journal.flush().await?; // everything until now is safe, and found by others too

    // Asking blocks; a server would do so by `spawn_blocking`.
    let mut lines = Vec::new();
    for call in store.search(&Query::default(), 10)?.executions {
        lines.push(format!("{}: {} {}", call.tool, call.status, call.parameters.unwrap_or_default()));
    }
    let (_, moments) = store.show(sent.execution_id)?.ok_or("the call was recorded")?;
    lines.extend(moments.into_iter().map(|moment| moment.name));
    for stat in store.stats(&Query::default(), GroupBy::Tool)? {
        lines.push(format!("{} calls, {} of them failed", stat.count, stat.errors));
    }

    // Closed, it has said its last word, signed; the proof works at any other time as well.
    drop(executor);
    journal.close();
    let verdict = store.verify(&[], None, &mut |_| {})?;
    lines.push(format!("{} records, problem: {:?}", verdict.records, verdict.problem));
    Ok(lines.join("\n"))
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example shows what it did")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{}", run().await?);
    Ok(())
}
