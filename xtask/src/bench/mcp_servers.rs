//! The servers of the MCP benchmark that are part of this program.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use axum::serve::ListenerExt;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ListToolsResult, ServerCapabilities,
    ServerConfig, Tool,
};
use rmcp::service::{RequestContext, RoleServer};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, ServerHandler};
use serde_json::{Value, json};
use wieldy::mcp::server::{Server, ServerOptions};
use wieldy_core::{AnyTool, BoxFuture, Executor, Input, Limits, Outcome, Run, RunError, ToolSpec};
use wieldy_server::{HttpOptions, HttpServer};
use wieldy_store::{Address, JournalOptions, Store};

/// Runs an echo server without wieldy: sessions and event streams, with the SDK's defaults.
pub(super) fn serve_echo() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let service = StreamableHttpService::new(
            || Ok(Echo),
            Arc::<LocalSessionManager>::default(),
            StreamableHttpServerConfig::default(),
        );
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        // Otherwise the last piece of an answer waits until the first one is acknowledged.
        let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
        axum::serve(listener, axum::Router::new().route_service("/mcp", service)).await?;
        Ok(())
    })
}

/// Runs wieldy embedded in a program behind its HTTP server, with its history on disk.
pub(super) fn serve_own(folder: &Path) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let store = Store::open(&Address::Sqlite(folder.join("history.db")))?;
        let schema = json!({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]});
        let spec = ToolSpec { input_schema: schema, ..ToolSpec::new("echo", "Says it again").read_only() };
        let mut builder = Executor::builder().tool(OwnEcho(spec));
        builder.limits = Limits { calls_running_max: 256, calls_running_per_agent_max: 256, ..Limits::default() };
        builder.journal = Arc::new(store.journal(&JournalOptions::default())?);
        let endpoint = Server::new(builder.build()?, ServerOptions::default()).http();
        let server = HttpServer::bind(HttpOptions::new("127.0.0.1:0".parse()?)).await?;
        println!("{}", server.address());
        let server = server.route("/mcp", move |request| {
            let endpoint = endpoint.clone();
            async move { endpoint.handle(request).await }
        });
        server.serve(std::future::pending(), std::future::ready(())).await;
        Ok(())
    })
}

struct OwnEcho(ToolSpec);

impl AnyTool for OwnEcho {
    fn spec(&self) -> ToolSpec {
        self.0.clone()
    }

    fn run<'a>(&'a self, input: &'a Input, _run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        let text = input.value()["text"].as_str().unwrap_or_default().to_owned();
        Box::pin(std::future::ready(Ok(Outcome::text(text))))
    }
}

struct Echo;

impl ServerHandler for Echo {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }

    async fn list_tools(
        &self,
        _: Option<rmcp::model::PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let schema = json!({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]});
        let schema = schema.as_object().cloned().unwrap_or_default();
        Ok(ListToolsResult::with_all_items(vec![Tool::new("echo", "Says it again", schema)]))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let text = request.arguments.as_ref().and_then(|arguments| arguments.get("text")).and_then(Value::as_str);
        Ok(CallToolResult::success(vec![ContentBlock::text(text.unwrap_or_default())]).into())
    }
}
