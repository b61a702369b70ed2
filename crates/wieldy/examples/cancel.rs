//! Cancelling a call: it ends soon, its result says who cancelled it, and its output is not lost.

use serde_json::{Value, json};
use wieldy::{Body, Call, Caller, Executor, Run, Seen, Stream, ToolSpec, tool};

/// Cleans up when the call is cancelled. A tool that does not stop by itself is dropped after a grace time.
async fn tidy_up() {
    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
}

pub(crate) async fn run() -> Result<String, Box<dyn std::error::Error>> {
    let endless = tool(ToolSpec::new("endless", "Never ends by itself"), async |_: Value, run: Run| {
        run.output(Stream::Stdout, b"working");
        run.progress(None, "still at it");
        run.stop().cancelled().await;
        tidy_up().await;
        run.output(Stream::Stdout, b", tidied up");
        Ok(run.captured())
    });
    let executor = Executor::builder().tool(endless).build()?;
    let id = executor.spawn(Call::new("endless", json!({})));
    let mut observer = executor.observe(id, &Caller::local());
    while let Some(Seen::Event(event)) = observer.next().await {
        if matches!(event.body, Body::CallProgress { .. }) {
            executor.cancel(id, &Caller::local());
        }
    }
    let result = executor.wait(id, &Caller::local()).await.ok_or("the call is not known")?;
    let error = result.error.as_ref().ok_or("it ended by itself")?;
    Ok(format!("{}: {}\n{error}", result.status, result.text()))
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example shows what it did")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{}", run().await?);
    Ok(())
}
