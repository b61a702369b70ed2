//! Tools: what they declare ([`ToolSpec`]), how they are written ([`Tool`]) and what the registry holds ([`AnyTool`]).

use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::attempt::RetryPolicy;
use crate::confinement::{Confinement, ResourceLimits};
use crate::input::Input;
use crate::outcome::{Outcome, RunError};
use crate::program::Program;
use crate::run::Run;

/// Something that can be called, comfortable to write: its schema is derived from `Args`, its texts from the comments.
///
/// ```
/// use wieldy_core::{Outcome, Run, RunError, Tool, ToolSpec};
///
/// /// Whom to greet.
/// #[derive(serde::Deserialize, schemars::JsonSchema)]
/// struct Greet { name: String }
///
/// struct Greeter;
///
/// impl Tool for Greeter {
///     type Args = Greet;
///
///     fn spec(&self) -> ToolSpec {
///         ToolSpec::new("greet", "Greets somebody by name").read_only()
///     }
///
///     async fn run(&self, args: Greet, _run: &Run) -> Result<Outcome, RunError> {
///         Ok(Outcome::text(format!("hello, {}", args.name)))
///     }
/// }
/// ```
pub trait Tool: Send + Sync + 'static {
    /// The arguments, as a type. Their JSON Schema is derived from it; unknown arguments are refused.
    type Args: DeserializeOwned + JsonSchema + Send;

    /// What the tool declares of itself. An input schema set here wins over the one derived from `Args`.
    fn spec(&self) -> ToolSpec;

    /// All names of a thing that the footprint names, where a thing can have several: a path through a link has that
    /// of what it leads to as well. Asked before the call runs; it should be quick.
    fn names_of(&self, thing: &str, _confinement: &Confinement) -> Vec<String> {
        vec![thing.to_owned()]
    }

    /// Describes the program that a call would start. Asked before a person is, and again directly before the program
    /// starts: the call is refused if the answers differ. Tools that start no program have none.
    fn program(
        &self,
        _args: Self::Args,
        _confinement: &Confinement,
    ) -> impl Future<Output = Result<Option<Program>, RunError>> + Send {
        async { Ok(None) }
    }

    /// Runs the tool once. The arguments have been checked, the caller allowed, a slot taken.
    fn run(&self, args: Self::Args, run: &Run) -> impl Future<Output = Result<Outcome, RunError>> + Send;
}

/// A tool as the registry holds it, whatever its arguments.
pub trait AnyTool: Send + Sync + 'static {
    /// What the tool declares of itself.
    fn spec(&self) -> ToolSpec;

    /// All names of a thing that the footprint names.
    fn names_of(&self, thing: &str, _confinement: &Confinement) -> Vec<String> {
        vec![thing.to_owned()]
    }

    /// Describes the program that a call with these arguments would start.
    fn program<'a>(
        &'a self,
        _arguments: &'a Value,
        _confinement: &'a Confinement,
    ) -> BoxFuture<'a, Result<Option<Program>, RunError>> {
        Box::pin(async { Ok(None) })
    }

    /// Runs the tool once.
    fn run<'a>(&'a self, input: &'a Input, run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>>;
}

impl<T: Tool> AnyTool for T {
    fn spec(&self) -> ToolSpec {
        let mut spec = Tool::spec(self);
        if spec.input_schema.is_null() {
            spec.input_schema = schema_of::<T::Args>();
        }
        spec
    }

    fn names_of(&self, thing: &str, confinement: &Confinement) -> Vec<String> {
        Tool::names_of(self, thing, confinement)
    }

    fn program<'a>(
        &'a self,
        arguments: &'a Value,
        confinement: &'a Confinement,
    ) -> BoxFuture<'a, Result<Option<Program>, RunError>> {
        Box::pin(async move { Tool::program(self, read(arguments)?, confinement).await })
    }

    fn run<'a>(&'a self, input: &'a Input, run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        Box::pin(async move { Tool::run(self, read(input.value())?, run).await })
    }
}

/// Reads arguments as the type that a tool declares.
fn read<A: DeserializeOwned>(arguments: &Value) -> Result<A, RunError> {
    A::deserialize(arguments).map_err(|error| RunError::invalid_input(format!("the arguments do not fit: {error}")))
}

/// A tool made of a function, for the short way:
/// `tool(ToolSpec::new("greet", "…"), async |args: Greet, run| Ok(Outcome::text("…")))`.
pub fn tool<A, F, R>(spec: ToolSpec, function: F) -> impl AnyTool
where
    A: DeserializeOwned + JsonSchema + Send + 'static,
    F: Fn(A, Run) -> R + Send + Sync + 'static,
    R: Future<Output = Result<Outcome, RunError>> + Send + 'static,
{
    FunctionTool { spec, function, args: PhantomData::<fn(A)> }
}

struct FunctionTool<A, F> {
    spec: ToolSpec,
    function: F,
    args: PhantomData<fn(A)>,
}

impl<A, F, R> Tool for FunctionTool<A, F>
where
    A: DeserializeOwned + JsonSchema + Send + 'static,
    F: Fn(A, Run) -> R + Send + Sync + 'static,
    R: Future<Output = Result<Outcome, RunError>> + Send + 'static,
{
    type Args = A;

    fn spec(&self) -> ToolSpec {
        self.spec.clone()
    }

    async fn run(&self, args: A, run: &Run) -> Result<Outcome, RunError> {
        (self.function)(args, run.clone()).await
    }
}

/// The JSON Schema of a type, closed to unknown properties unless the type says otherwise.
pub fn schema_of<T: JsonSchema>() -> Value {
    let mut schema = schemars::generate::SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<T>();
    let object = schema.ensure_object();
    object.remove("title");
    if object.get("type") == Some(&json!("object")) && !object.contains_key("additionalProperties") {
        object.insert("additionalProperties".into(), json!(false));
    }
    schema.to_value()
}

/// What a tool declares of itself: the definition.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolSpec {
    /// The name it is called by; checked when it is registered.
    pub name: String,
    /// The name for people.
    pub title: Option<String>,
    /// What it does, for the model.
    pub description: String,
    /// The version of its behaviour.
    pub version: String,
    /// What it belongs to, such as `files`.
    pub category: String,
    /// The JSON Schema of its arguments.
    pub input_schema: Value,
    /// The JSON Schema of its structured answer.
    pub output_schema: Option<Value>,
    /// What it does to the world.
    pub annotations: Annotations,
    /// What a caller must hold to use it.
    pub required_permissions: Vec<String>,
    /// Whether a person must agree each time.
    pub requires_confirmation: bool,
    /// How long, how much, how many at once.
    pub constraints: Constraints,
    /// What its processes may use.
    pub limits: ResourceLimits,
    /// Which callers see it; empty means all.
    pub agent_scopes: Vec<String>,
    /// Whether and how long its answers may be used again.
    pub cache: Option<CachePolicy>,
    /// How failed runs are repeated; the executor's policy where absent.
    pub retry: Option<RetryPolicy>,
    /// The number of times that a failed run is repeated, with the delays of `retry` or of the executor.
    pub retries: Option<u32>,
    /// Arguments that must not be written down anywhere.
    pub sensitive: Vec<String>,
    /// Which arguments name things it reads or writes; unknown where absent.
    pub footprint: Option<Footprint>,
    /// Other names it answers to.
    pub aliases: Vec<String>,
    /// Where it comes from.
    pub provider: Provider,
}

impl ToolSpec {
    /// A tool that may do anything, until it says otherwise.
    pub fn new(name: impl Into<String>, description: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            title: None,
            description: description.into(),
            version: "1".into(),
            category: "general".into(),
            input_schema: Value::Null,
            output_schema: None,
            annotations: Annotations::default(),
            required_permissions: Vec::new(),
            requires_confirmation: false,
            constraints: Constraints::default(),
            limits: ResourceLimits::default(),
            agent_scopes: Vec::new(),
            cache: None,
            retry: None,
            retries: None,
            sensitive: Vec::new(),
            footprint: None,
            aliases: Vec::new(),
            provider: Provider::Local,
        }
    }

    /// Declares that it changes nothing.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.annotations = Annotations { read_only: true, destructive: false, idempotent: true, ..self.annotations };
        self
    }

    /// Declares that doing it twice is the same as doing it once.
    #[must_use]
    pub fn idempotent(mut self) -> Self {
        self.annotations.idempotent = true;
        self
    }

    /// Names an argument that says what it reads.
    #[must_use]
    pub fn reads(mut self, argument: &str) -> Self {
        self.footprint.get_or_insert_default().reads.push(argument.to_owned());
        self
    }

    /// Names an argument that says what it writes.
    #[must_use]
    pub fn writes(mut self, argument: &str) -> Self {
        self.footprint.get_or_insert_default().writes.push(argument.to_owned());
        self
    }

    /// Sets the time one run takes at most, where the caller says nothing.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.constraints.timeout = Some(timeout);
        self
    }

    /// Sets how failed runs are repeated.
    #[must_use]
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = Some(policy);
        self
    }

    /// Lets answers be used again for this long.
    #[must_use]
    pub fn cache(mut self, ttl: Duration) -> Self {
        self.cache = Some(CachePolicy { ttl });
        self
    }

    /// Demands that a person agrees each time.
    #[must_use]
    pub fn confirm(mut self) -> Self {
        self.requires_confirmation = true;
        self
    }

    /// Demands that the caller holds this permission.
    #[must_use]
    pub fn permission(mut self, permission: &str) -> Self {
        self.required_permissions.push(permission.to_owned());
        self
    }

    /// Shows it only to callers with this scope (or another one named likewise).
    #[must_use]
    pub fn scope(mut self, scope: &str) -> Self {
        self.agent_scopes.push(scope.to_owned());
        self
    }

    /// Lets it answer to another name too.
    #[must_use]
    pub fn alias(mut self, name: &str) -> Self {
        self.aliases.push(name.to_owned());
        self
    }

    /// Keeps this argument out of events, logs and history.
    #[must_use]
    pub fn sensitive(mut self, argument: &str) -> Self {
        self.sensitive.push(argument.to_owned());
        self
    }

    /// Sets what it belongs to.
    #[must_use]
    pub fn category(mut self, category: &str) -> Self {
        self.category = category.to_owned();
        self
    }

    /// Sets where it comes from.
    #[must_use]
    pub fn provider(mut self, provider: Provider) -> Self {
        self.provider = provider;
        self
    }

    /// A strong hash of everything declared: two specs with the same hash promise the same.
    pub fn hash(&self) -> blake3::Hash {
        blake3::hash(&serde_json::to_vec(self).expect("a spec is plain data"))
    }
}

/// What a tool does to the world; MCP's hints, with MCP's cautious defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "snake_case")]
pub struct Annotations {
    /// It changes nothing.
    pub read_only: bool,
    /// It may destroy something, rather than only add.
    pub destructive: bool,
    /// Doing it twice is the same as doing it once.
    pub idempotent: bool,
    /// It touches things outside this machine.
    pub open_world: bool,
}

impl Default for Annotations {
    fn default() -> Self {
        Self { read_only: false, destructive: true, idempotent: false, open_world: true }
    }
}

impl Annotations {
    /// Whether a run that may have happened can be repeated without harm.
    pub fn repeatable(self) -> bool {
        self.read_only || self.idempotent
    }
}

/// How long, how much, how many at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Constraints {
    /// How long one run takes at most, where the caller says nothing.
    #[serde(rename = "timeout_ms", with = "crate::duration")]
    pub timeout: Option<Duration>,
    /// How long one run takes at most, whatever the caller says.
    #[serde(rename = "timeout_max_ms", with = "crate::duration")]
    pub timeout_max: Option<Duration>,
    /// How long a run may show no sign of life.
    #[serde(rename = "silence_ms", with = "crate::duration")]
    pub silence: Option<Duration>,
    /// How many bytes of text come back in the result; the rest is kept as an artifact.
    pub output_bytes_max: Option<u64>,
    /// How many runs at once.
    pub concurrency_max: Option<u32>,
}

/// Whether and how long answers may be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CachePolicy {
    /// How long.
    #[serde(rename = "ttl_ms", with = "crate::duration::plain")]
    pub ttl: Duration,
}

/// Which arguments name things that a tool reads or writes: argument names, or JSON pointers such as `/target/path`.
///
/// The things are slash-separated paths: two touch each other where one is the other or lies above it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Footprint {
    /// Arguments that say what is read.
    pub reads: Vec<String>,
    /// Arguments that say what is written.
    pub writes: Vec<String>,
}

/// Where a tool comes from and runs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Provider {
    /// Part of the product.
    Builtin,
    /// Rust code of the program that embeds the executor.
    Local,
    /// A program, by a manifest.
    Command,
    /// An MCP server of this name.
    Mcp(String),
}

impl std::fmt::Display for Provider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Builtin => f.write_str("builtin"),
            Self::Local => f.write_str("local"),
            Self::Command => f.write_str("command"),
            Self::Mcp(server) => write!(f, "mcp:{server}"),
        }
    }
}

impl Serialize for Provider {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A tool that can be shared.
pub type SharedTool = Arc<dyn AnyTool>;
