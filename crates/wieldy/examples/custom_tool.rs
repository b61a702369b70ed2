//! A tool of your own: a type for its arguments, a function, and the executor does the rest.

use serde_json::json;
use wieldy::{Call, Executor, Outcome, ToolSpec, tool};

/// The person to greet.
#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Greet {
    name: String,
}

pub(crate) async fn run() -> Result<String, Box<dyn std::error::Error>> {
    let spec = ToolSpec::new("greet", "Greets somebody by name").read_only();
    let greet = tool(spec, async |greet: Greet, _run| Ok(Outcome::text(format!("hello, {}", greet.name))));
    let executor = Executor::builder().tool(greet).build()?;
    Ok(executor.call(Call::new("greet", json!({"name": "Ada"}))).await.text())
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example shows what it did")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{}", run().await?);
    Ok(())
}
