//! Watching a call: a late observer sees its events from the first one on until it is over.

use serde_json::{Value, json};
use wieldy::{Call, Caller, Executor, Outcome, Run, Seen, ToolSpec, tool};

pub(crate) async fn run() -> Result<String, Box<dyn std::error::Error>> {
    let count = tool(ToolSpec::new("count", "Counts to three").read_only(), async |_: Value, run: Run| {
        for number in 1..=3 {
            run.progress(f64::from(number) / 3.0 * 100.0, format!("{number}"));
        }
        Ok(Outcome::text("done"))
    });
    let executor = Executor::builder().tool(count).build()?;
    let id = executor.spawn(Call::new("count", json!({})));
    let mut observer = executor.observe(id, &Caller::local());
    let mut names = Vec::new();
    while let Some(Seen::Event(event)) = observer.next().await {
        names.push(event.body.name());
    }
    Ok(names.join("\n"))
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example shows what it did")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{}", run().await?);
    Ok(())
}
