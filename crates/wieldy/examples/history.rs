//! A history: calls are recorded in a file, searched, shown, and verified to be unchanged.

use std::sync::Arc;

use serde_json::{Value, json};
use wieldy::{Address, Call, Executor, GroupBy, JournalOptions, Outcome, Query, Store, ToolSpec, tool};

pub(crate) async fn run() -> Result<String, Box<dyn std::error::Error>> {
    // A history is a file, or an address such as `postgres://user@host/database`. With a key, the end of the hash chain
    // is signed.
    let folder = tempfile::tempdir()?;
    let store = Store::open(&Address::Sqlite(folder.path().join("history.db")))?;
    let options = JournalOptions { key: Some(folder.path().join("audit.key")), ..JournalOptions::default() };
    let journal = Arc::new(store.journal(&options)?);

    let send = tool(ToolSpec::new("send", "Sends a letter"), async |letter: Value, _run| match letter["to"].as_str() {
        Some(to) => Ok(Outcome::text(format!("sent to {to}"))),
        None => Err("a letter needs an address".into()),
    });
    // The executor writes to the journal; queries go to the store.
    let mut builder = Executor::builder().tool(send);
    builder.journal = Arc::clone(&journal) as _;
    let executor = builder.build()?;
    // The first call is recorded without the password. The second one fails, and is recorded too.
    let sent = executor.call(Call::new("send", json!({"to": "Ada", "password": "hunter2"}))).await;
    executor.call(Call::new("send", json!({"text": "lost"}))).await;
    journal.flush().await?; // all records so far are durable and visible to other processes

    // Queries block the thread; a server would run them in `spawn_blocking`.
    let mut lines = Vec::new();
    for call in store.search(&Query::default(), 10)?.executions {
        lines.push(format!("{}: {} {}", call.tool, call.status, call.parameters.unwrap_or_default()));
    }
    let (_, moments) = store.show(sent.execution_id)?.ok_or("the call was recorded")?;
    lines.extend(moments.into_iter().map(|moment| moment.name));
    for stat in store.stats(&Query::default(), GroupBy::Tool)? {
        lines.push(format!("{} calls, {} of them failed", stat.count, stat.errors));
    }

    // Closing the journal writes its last, signed record. The history can be verified at any other time as well.
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
