//! An executor as an MCP server: real clients of every revision, and handwritten lines.

mod batch;
mod batch_tool;
mod calls;
mod consent;
mod hostile;
mod hostile_http;
mod http;
mod lists;
mod long;
mod notes;
mod request_options;
mod resources;
mod revisions;
mod search;
mod sessions;

use std::time::Duration;

use regex::Regex;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, Lines, ReadHalf, WriteHalf};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Caller, Executor};
use wieldy_mcp::server::{ServeError, Server, ServerOptions};

/// A client that writes and reads lines, and knows nothing of MCP.
pub(crate) struct Wire {
    lines: Lines<BufReader<ReadHalf<DuplexStream>>>,
    write: Option<WriteHalf<DuplexStream>>,
    served: JoinHandle<Result<(), ServeError>>,
}

impl Wire {
    pub(crate) fn new(executor: &Executor) -> Self {
        Self::with(executor, ServerOptions::default())
    }

    pub(crate) fn with(executor: &Executor, options: ServerOptions) -> Self {
        Self::to(&Server::new(executor.clone(), options), Caller::local())
    }

    fn to(server: &Server, caller: Caller) -> Self {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let (read, write) = tokio::io::split(theirs);
        let server = server.clone();
        let served =
            tokio::spawn(async move { server.serve_lines(read, write, caller, None, CancellationToken::new()).await });
        let (read, write) = tokio::io::split(ours);
        Self { lines: BufReader::new(read).lines(), write: Some(write), served }
    }

    /// Does the handshake of clients up to 2025-11-25.
    pub(crate) async fn initialized(mut self, revision: &str, capabilities: Value) -> Self {
        let client = json!({"name": "wire", "version": "1"});
        let params = json!({"protocolVersion": revision, "capabilities": capabilities, "clientInfo": client});
        let told = self.ask(0, "initialize", params).await;
        assert_eq!(told["result"]["protocolVersion"], revision, "{told}");
        self.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"})).await;
        self
    }

    async fn send(&mut self, message: &Value) {
        self.write(format!("{message}\n").as_bytes()).await;
    }

    async fn write(&mut self, bytes: &[u8]) {
        self.write.as_mut().unwrap().write_all(bytes).await.unwrap();
    }

    /// Returns the next message, or `None` if the server has closed.
    async fn next(&mut self) -> Option<Value> {
        let line = tokio::time::timeout(Duration::from_secs(100), self.lines.next_line()).await;
        line.expect("an answer must come").unwrap().map(|line| serde_json::from_str(&line).unwrap())
    }

    /// Sends a request and returns the response, which must be the next message.
    pub(crate) async fn ask(&mut self, id: impl Into<Value>, method: &str, params: Value) -> Value {
        self.send(&json!({"jsonrpc": "2.0", "id": id.into(), "method": method, "params": params})).await;
        self.next().await.unwrap()
    }

    /// Calls a tool and returns the response without the execution id.
    pub(crate) async fn call(&mut self, id: impl Into<Value>, tool: &str, arguments: Value) -> Value {
        shown(self.ask(id, "tools/call", json!({"name": tool, "arguments": arguments})).await)
    }

    /// Sends a message and reads nothing any more, so that no answer can be written.
    async fn abandon(mut self, message: &Value) {
        self.send(message).await;
        let _ = self.write.take();
        drop(self.lines);
    }

    /// Closes our end, waits for the server to end, and returns the remaining messages.
    pub(crate) async fn close(mut self) -> Vec<Value> {
        if let Some(mut write) = self.write.take() {
            write.shutdown().await.unwrap();
        }
        let mut rest = Vec::new();
        while let Some(message) = self.next().await {
            rest.push(message);
        }
        self.served.await.unwrap().unwrap();
        rest
    }
}

/// Replaces ids and times in a message.
fn shown(message: Value) -> Value {
    let mut text = message.to_string();
    for (pattern, shown) in [
        (r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}", "[id]"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "[time]"),
        (r"\b[0-9a-f]{32}\b", "[artifact]"),
    ] {
        text = Regex::new(pattern).unwrap().replace_all(&text, shown).into_owned();
    }
    serde_json::from_str(&text).unwrap()
}

/// Returns the `_meta` of a request of revision 2026-07-28.
fn meta(capabilities: Value) -> Value {
    json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "wire", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": capabilities,
    })
}
