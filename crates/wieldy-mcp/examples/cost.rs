//! What a call over MCP costs: the processor time of a server per call, of ours and of the bare SDK, side by side.
//!
//! `cargo run --release -p wieldy-mcp --example cost`
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a measurement for people")]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

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

/// How many calls a measurement has.
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

#[tokio::main]
async fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("bare") => {
            let running = Bare.serve((tokio::io::stdin(), tokio::io::stdout())).await.unwrap();
            running.waiting().await.unwrap();
        }
        Some("wieldy") => {
            let echo = tool(ToolSpec::new("echo", "says it again").read_only(), async |echo: Echo, _run| {
                Ok(Outcome::text(echo.text))
            });
            let executor = Executor::builder().tool(echo).build().unwrap();
            let server = Server::new(executor, ServerOptions::default());
            // As `wieldy mcp` does where they are pipes.
            let read = pipe::Receiver::from_owned_fd(std::io::stdin().as_fd().try_clone_to_owned().unwrap()).unwrap();
            let write = pipe::Sender::from_owned_fd(std::io::stdout().as_fd().try_clone_to_owned().unwrap()).unwrap();
            server.serve_lines(read, write, Caller::local(), None, CancellationToken::new()).await.unwrap();
        }
        _ => {
            for (pipelined, at_once) in [("one after the other", 1), ("sixteen at once", 16)] {
                for which in ["bare", "wieldy", "bare", "wieldy"] {
                    println!("{which:>8}, {pipelined}: {:.1} µs of processor time per call", measure(which, at_once));
                }
            }
        }
    }
}

/// The processor time per call, in microseconds.
fn measure(which: &str, at_once: usize) -> f64 {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .arg(which)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    let mut line = String::new();
    let mut send = |message: Value| writeln!(input, "{message}").unwrap();
    let mut receive = || {
        line.clear();
        output.read_line(&mut line).unwrap();
        assert!(line.contains("\"result\""), "{line}");
    };
    let client = json!({"name": "cost", "version": "1"});
    let params = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client});
    send(json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}));
    receive();
    send(json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
    let mut calls = |count: usize| {
        for batch in 0..count / at_once {
            for call in 0..at_once {
                let params = json!({"name": "echo", "arguments": {"text": "hello, world"}});
                let id = batch * at_once + call + 1;
                send(json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}));
            }
            (0..at_once).for_each(|_| receive());
        }
    };
    calls(CALLS / 10);
    let before = processor_time(child.id());
    calls(CALLS);
    let spent = processor_time(child.id()) - before;
    child.kill().unwrap();
    child.wait().unwrap();
    spent * 1e6 / CALLS as f64
}

/// The processor time of a process so far, in seconds: what its threads have used, by the scheduler's own count.
fn processor_time(process: u32) -> f64 {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let used = threads.filter_map(|thread| {
        let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    used.sum::<f64>() / 1e9
}
