//! Measures the cost of a call that goes on to another server over HTTP: our processor time per call, compared with a
//! tool of our own.
//!
//! `cargo run --release -p wieldy-mcp --example cost_client`
#![allow(clippy::print_stdout, reason = "a measurement for people")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use axum::serve::ListenerExt;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ListToolsResult, PaginatedRequestParams,
    ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{RequestContext, RoleServer};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, ServerHandler};
use serde_json::json;
use wieldy_core::{Call, Executor, Limits, Outcome, ToolSpec, tool};
use wieldy_mcp::client::{Address, Reach, ServerSettings, ToolRule, Upstreams};

/// Number of calls in a measurement.
const CALLS: usize = 20_000;
/// Size of the echoed text, in bytes.
const PAYLOAD: usize = 200;

type Failure = Box<dyn std::error::Error>;

/// A server with one tool, made of the SDK alone.
struct Bare;

impl ServerHandler for Bare {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }

    async fn list_tools(
        &self,
        _page: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let schema = json!({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]});
        let schema = schema.as_object().cloned().unwrap_or_default();
        Ok(ListToolsResult::with_all_items(vec![Tool::new("echo", "says it again", schema)]))
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
async fn main() -> Result<(), Failure> {
    let asked = std::env::args().nth(1);
    if let Some(how) = asked.as_deref().filter(|how| ["events", "json"].contains(how)) {
        return serve(how == "json").await;
    }
    for how in
        ["own", "json", "events"].into_iter().filter(|how| asked.as_deref().is_none_or(|asked| asked.contains(how)))
    {
        let server = if how == "own" { None } else { Some(Server::start(how)?) };
        let (executor, _upstreams) = executor(server.as_ref()).await?;
        for at_once in [1, 8, 64] {
            calls(&executor, CALLS / 10, at_once).await?;
            let before = processor_time()?;
            calls(&executor, CALLS, at_once).await?;
            let spent = (processor_time()? - before) * 1e6 / CALLS as f64;
            println!("{how:>8}, {at_once:>2} at once: {spent:.1} µs of processor time per call");
        }
    }
    Ok(())
}

/// Returns an executor whose tool `echo` is its own, or that of the server.
async fn executor(server: Option<&Server>) -> Result<(Executor, Option<Upstreams>), Failure> {
    let mut builder = Executor::builder();
    builder.limits = Limits { calls_running_per_agent_max: 256, calls_running_max: 256, ..Limits::default() };
    let Some(server) = server else {
        let spec = ToolSpec::new("echo", "says it again").read_only();
        let echo = tool(spec, async |echo: Echo, _run| Ok(Outcome::text(echo.text)));
        return Ok((builder.tool(echo).build()?, None));
    };
    let executor = builder.build()?;
    let mut settings = ServerSettings::new("up", Reach::Http(Address::new(server.url.clone())));
    settings.tools.rules.insert("echo".into(), ToolRule { read_only: Some(true), ..ToolRule::default() });
    let upstreams = Upstreams::new(&executor, vec![settings], Arc::default())?;
    upstreams.discover(|_| true).await;
    Ok((executor, Some(upstreams)))
}

async fn calls(executor: &Executor, count: usize, at_once: usize) -> Result<(), Failure> {
    let workers = (0..at_once).map(|_| {
        let executor = executor.clone();
        tokio::spawn(async move {
            let text = "x".repeat(PAYLOAD);
            for _ in 0..count / at_once {
                let result = executor.call(Call::new("echo", json!({ "text": text }))).await;
                if result.text() != text {
                    return Err(format!("{:?}", result.error));
                }
            }
            Ok(())
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        worker.await??;
    }
    Ok(())
}

/// The echo server, in a process of its own.
struct Server {
    process: Child,
    url: String,
}

impl Server {
    fn start(how: &str) -> Result<Self, Failure> {
        let mut process = Command::new(std::env::current_exe()?).arg(how).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        Ok(Self { process, url: line.trim().to_owned() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn serve(answers_with_json: bool) -> Result<(), Failure> {
    let config = StreamableHttpServerConfig::default().with_json_response(answers_with_json);
    let service = StreamableHttpService::new(|| Ok(Bare), Arc::<LocalSessionManager>::default(), config);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}/mcp", listener.local_addr()?);
    let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
    Ok(axum::serve(listener, axum::Router::new().route_service("/mcp", service)).await?)
}

/// Returns the processor time of this process so far, in seconds: the sum over its threads, as the scheduler counts it.
fn processor_time() -> Result<f64, Failure> {
    let threads = std::fs::read_dir("/proc/self/task")?;
    let used = threads.filter_map(|thread| {
        let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    Ok(used.sum::<f64>() / 1e9)
}
