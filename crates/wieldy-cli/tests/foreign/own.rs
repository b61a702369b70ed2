//! The tools that the conformance suite calls, as tools of wieldy's own: written in Rust, and served by the library.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use wieldy::{AnyTool, CallError, Code, Content, Executor, Input, Outcome, Run, RunError, SharedTool, ToolSpec};
use wieldy_mcp::server::{Server, ServerOptions};
use wieldy_server::{HttpOptions, HttpServer};

pub(crate) const PNG: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg==";
pub(crate) const WAV: &str = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA=";
/// The time after which a call becomes a task: long enough for immediate answers, and short compared with a second.
pub(crate) const TASK_AFTER: Duration = Duration::from_millis(500);

/// A server with the fixtures, until it is dropped.
pub(crate) struct Own {
    _runtime: Runtime,
    /// The address of the MCP endpoint.
    pub(crate) url: String,
}

impl Own {
    pub(crate) fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let executor = Arc::new(OnceLock::new());
        let made = Executor::builder().tools(fixtures(&executor)).build().unwrap();
        let _ = executor.set(made.clone());
        let options = ServerOptions { task_after: TASK_AFTER, ..ServerOptions::default() };
        let url = runtime.block_on(async {
            let endpoint = Server::new(made, options).http();
            let server = HttpServer::bind(HttpOptions::new("127.0.0.1:0".parse().unwrap())).await.unwrap();
            let url = format!("http://{}/mcp", server.address());
            let server = server.route("/mcp", move |request| {
                let endpoint = endpoint.clone();
                async move { endpoint.handle(request).await }
            });
            tokio::spawn(async move { server.serve(CancellationToken::new().cancelled(), async {}).await });
            url
        });
        Self { _runtime: runtime, url }
    }
}

type Running = BoxFuture<'static, Result<Outcome, RunError>>;

/// A tool made of a spec and a function.
struct Fixture<F> {
    spec: ToolSpec,
    run: F,
}

impl<F: Fn(Value, Run) -> Running + Send + Sync + 'static> AnyTool for Fixture<F> {
    fn spec(&self) -> ToolSpec {
        self.spec.clone()
    }

    fn run<'a>(&'a self, input: &'a Input, run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        (self.run)(input.value().clone(), run.clone())
    }
}

fn fixture(spec: ToolSpec, run: impl Fn(Value, Run) -> Running + Send + Sync + 'static) -> SharedTool {
    Arc::new(Fixture { spec, run })
}

fn spec(name: &str) -> ToolSpec {
    ToolSpec { input_schema: json!({"type": "object"}), ..ToolSpec::new(name, name) }
}

/// Returns a tool that always answers at once with the same content.
fn saying(name: &str, content: Vec<Content>) -> SharedTool {
    fixture(spec(name).read_only(), move |_, _| {
        let content = content.clone();
        async move { Ok(Outcome { content, ..Outcome::default() }) }.boxed()
    })
}

/// Returns a tool that takes some seconds, and then runs `end`.
fn after(spec: ToolSpec, end: fn(&Value) -> Result<Outcome, RunError>) -> SharedTool {
    fixture(spec, move |arguments, _| {
        async move {
            let seconds = arguments.get("seconds").and_then(Value::as_u64).unwrap_or(1);
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            end(&arguments)
        }
        .boxed()
    })
}

fn embedded(uri: &str, mime: &str, text: &str) -> Content {
    Content::Resource { resource: json!({"uri": uri, "mimeType": mime, "text": text}) }
}

/// Returns the fixtures; one of them registers further tools with the executor.
fn fixtures(executor: &Arc<OnceLock<Executor>>) -> Vec<SharedTool> {
    let image = Content::Image { data: PNG.into(), mime_type: "image/png".into() };
    let audio = Content::Audio { data: WAV.into(), mime_type: "audio/wav".into() };
    let plain = embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.");
    let mixed = embedded("test://mixed-content-resource", "application/json", r#"{"test":"data","value":123}"#);
    let mut tools = vec![
        saying("test_simple_text", vec![Content::text("This is a simple text response for testing.")]),
        saying("test_image_content", vec![image.clone()]),
        saying("test_audio_content", vec![audio]),
        saying("test_embedded_resource", vec![plain]),
        saying("test_multiple_content_types", vec![Content::text("Multiple content types test:"), image, mixed]),
        saying("test_logging_tool", vec![Content::text("done")]),
    ];
    for name in [
        "test_streaming_elicitation",
        "test_input_required_result_elicitation",
        "test_input_required_result_request_state",
        "test_input_required_result_tampered_state",
        "confirm_delete",
    ] {
        let said = async || Ok(Outcome::text("confirmed"));
        tools.push(fixture(spec(name).confirm(), move |_, _| said().boxed()));
    }
    tools.push(fixture(spec("test_error_handling"), |_, _| {
        async { Ok(failed("This tool intentionally returns an error for testing")) }.boxed()
    }));
    tools.push(fixture(spec("test_tool_with_progress"), |_, run| {
        async move {
            for percent in [0.0, 50.0, 100.0] {
                run.progress(percent, "");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Ok(Outcome::text("done"))
        }
        .boxed()
    }));
    let executor = Arc::clone(executor);
    tools.push(fixture(spec("test_trigger_tool_change"), move |_, run| {
        let executor = executor.get().unwrap().clone();
        let added = saying(&format!("added_{}", run.execution_id()), vec![Content::text("new")]);
        async move { executor.register(added).map(|_| Outcome::text("done")).map_err(|error| error.to_string().into()) }
            .boxed()
    }));
    tools.extend(with_schemas());
    tools.extend(long());
    tools
}

/// Returns the tools whose schemas the suite checks.
fn with_schemas() -> [SharedTool; 2] {
    let said = |text: &'static str| move |_: Value, _: Run| async move { Ok(Outcome::text(text)) }.boxed();
    let copied = json!({"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}});
    let toml: toml::Table = toml::from_str(include_str!("fixtures.toml")).unwrap();
    let schema = json!(toml["tool"][0]["input-schema"]);
    [
        fixture(ToolSpec { input_schema: copied, ..spec("test_argument_in_header") }, said("called")),
        fixture(ToolSpec { input_schema: schema, ..spec("json_schema_2020_12_tool") }, said("")),
    ]
}

/// Returns the tools that take long enough to become tasks, except for the first.
fn long() -> [SharedTool; 5] {
    let name = |arguments: &Value| arguments["name"].as_str().unwrap_or_default().to_owned();
    [
        fixture(spec("greet"), move |arguments, _| {
            let name = name(&arguments);
            async move { Ok(Outcome::text(format!("Hello, {name}!"))) }.boxed()
        }),
        after(spec("slow_compute"), |arguments| Ok(Outcome::text(format!("computed {}", arguments["label"])))),
        after(spec("failing_job"), |_| Ok(failed("it failed"))),
        after(spec("protocol_error_job"), |_| Err("it broke".into())),
        after(spec("test_tool_with_task").confirm(), |_| Ok(Outcome::text("done"))),
    ]
}

fn failed(text: &str) -> Outcome {
    Outcome::text(text).failed(CallError::new(Code::ToolReportedError, text))
}
