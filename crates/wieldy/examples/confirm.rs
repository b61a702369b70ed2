//! Asking a person: the answer counts for exactly the call that was shown, once.

use serde_json::json;
use wieldy::{Answer, BoxFuture, Call, Confirmation, Confirmer, Executor, Outcome, ToolSpec, tool};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Drop {
    table: String,
}

/// A person who approves everything except dropping the customers.
struct Careful;

impl Confirmer for Careful {
    fn confirm<'a>(&'a self, question: &'a Confirmation) -> BoxFuture<'a, Result<Answer, String>> {
        let agreed = question.arguments["table"] != "customers";
        Box::pin(async move { Ok(if agreed { question.approve() } else { question.refuse() }) })
    }
}

pub(crate) async fn run() -> Result<String, Box<dyn std::error::Error>> {
    let spec = ToolSpec::new("drop_table", "Drops a table").confirm();
    let drop_table = tool(spec, async |drop: Drop, _run| Ok(Outcome::text(format!("dropped {}", drop.table))));
    let executor = Executor::builder().tool(drop_table).confirmer(Careful).build()?;
    let scratch = executor.call(Call::new("drop_table", json!({"table": "scratch"}))).await;
    let customers = executor.call(Call::new("drop_table", json!({"table": "customers"}))).await;
    let refusal = customers.error.ok_or("the customers are gone")?;
    Ok(format!("{}\n{refusal}", scratch.text()))
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example shows what it did")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{}", run().await?);
    Ok(())
}
