//! Measures the cost of a call over MCP: the server's processor time per call, for wieldy and for the bare SDK.
//!
//! `cargo run --release -p wieldy-mcp --example cost`
#![allow(clippy::print_stdout, reason = "a measurement for people")]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ServerCapabilities, ServerConfig,
};
use rmcp::service::{RequestContext, ServiceExt};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::{Value, json};
use tokio::net::unix::pipe;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Caller, Executor, Outcome, ToolSpec, tool};
use wieldy_mcp::server::{Server, ServerOptions};

/// Number of calls in a measurement.
const CALLS: usize = 20_000;

/// A server with one tool, made of the SDK alone.
struct Bare;

impl ServerHandler for Bare {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let text = request.arguments.as_ref().and_then(|arguments| arguments["text"].as_str()).unwrap_or_default();
        Ok(CallToolResult::success(vec![ContentBlock::text(text)]).into())
    }
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Echo {
    text: String,
}

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    match std::env::args().nth(1).as_deref() {
        Some("bare") => {
            let running = Bare.serve((tokio::io::stdin(), tokio::io::stdout())).await?;
            running.waiting().await?;
        }
        Some("wieldy") => {
            let echo = tool(ToolSpec::new("echo", "says it again").read_only(), async |echo: Echo, _run| {
                Ok(Outcome::text(echo.text))
            });
            let executor = Executor::builder().tool(echo).build()?;
            let server = Server::new(executor, ServerOptions::default());
            // `wieldy mcp` does the same with pipes.
            let read = pipe::Receiver::from_owned_fd(std::io::stdin().as_fd().try_clone_to_owned()?)?;
            let write = pipe::Sender::from_owned_fd(std::io::stdout().as_fd().try_clone_to_owned()?)?;
            server.serve_lines(read, write, Caller::local(), None, CancellationToken::new()).await?;
        }
        _ => {
            for (how, at_once) in [("one after the other", 1), ("sixteen at once", 16)] {
                for which in ["bare", "wieldy", "bare", "wieldy"] {
                    println!("{which:>8}, {how}: {:.1} µs of processor time per call", measure(which, at_once)?);
                }
            }
        }
    }
    Ok(())
}

/// A server process and a client's connection to it.
struct Conversation {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    line: String,
}

impl Conversation {
    fn send(&mut self, message: &Value) -> Result<(), Failure> {
        Ok(writeln!(self.input, "{message}")?)
    }

    fn receive(&mut self) -> Result<(), Failure> {
        self.line.clear();
        self.output.read_line(&mut self.line)?;
        if self.line.contains("\"result\"") { Ok(()) } else { Err(self.line.clone().into()) }
    }

    fn calls(&mut self, count: usize, at_once: usize) -> Result<(), Failure> {
        for batch in 0..count / at_once {
            for call in 0..at_once {
                let params = json!({"name": "echo", "arguments": {"text": "hello, world"}});
                let id = batch * at_once + call + 1;
                self.send(&json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}))?;
            }
            (0..at_once).try_for_each(|_| self.receive())?;
        }
        Ok(())
    }
}

/// Measures the processor time per call, in microseconds.
fn measure(which: &str, at_once: usize) -> Result<f64, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    let mut child = command.arg(which).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let (input, output) = (child.stdin.take().ok_or("no input")?, child.stdout.take().ok_or("no output")?);
    let mut talk = Conversation { child, input, output: BufReader::new(output), line: String::new() };
    let client = json!({"name": "cost", "version": "1"});
    let params = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client});
    talk.send(&json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}))?;
    talk.receive()?;
    talk.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))?;
    talk.calls(CALLS / 10, at_once)?;
    let before = processor_time(talk.child.id())?;
    talk.calls(CALLS, at_once)?;
    let spent = processor_time(talk.child.id())? - before;
    talk.child.kill()?;
    talk.child.wait()?;
    Ok(spent * 1e6 / CALLS as f64)
}

/// Returns the processor time of a process so far, in seconds: the sum over its threads, as the scheduler counts it.
fn processor_time(process: u32) -> Result<f64, Failure> {
    let threads = std::fs::read_dir(format!("/proc/{process}/task"))?;
    let used = threads.filter_map(|thread| {
        let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    Ok(used.sum::<f64>() / 1e9)
}
