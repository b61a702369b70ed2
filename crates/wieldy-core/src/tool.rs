//! Tools: their declaration ([`ToolSpec`]), the trait to implement ([`Tool`]) and the registry's form ([`AnyTool`]).

use std::collections::BTreeMap;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::attempt::{Backoff, RetryPolicy};
use crate::confinement::{Confinement, ResourceLimits};
use crate::input::Input;
use crate::outcome::{Outcome, RunError};
use crate::program::Program;
use crate::run::Run;

/// A callable tool, easy to implement: the schema is derived from `Args`, its descriptions from the doc comments.
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

    /// Returns the tool's declaration. An input schema set here overrides the one derived from `Args`.
    fn spec(&self) -> ToolSpec;

    /// Returns all names of a thing in the footprint, if it can have several: a path through a symbolic link also has
    /// the name of its target. Called before each call runs, so it should be fast.
    fn names_of(&self, thing: &str, _confinement: &Confinement) -> Vec<String> {
        vec![thing.to_owned()]
    }

    /// Returns the arguments that have a usual spelling which differs from the given one, each with that spelling: for
    /// an absolute path inside the workspace, the relative one. Called when a call is opened, before anything of it is
    /// recorded, so it should be fast and look at no file.
    fn respell(&self, _arguments: &Value, _confinement: &Confinement) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Describes the program that a call would start. Asked before a person confirms, and again directly before the
    /// program starts: the call is refused if the answers differ. A tool that starts no program returns `None`.
    fn program(
        &self,
        _args: Self::Args,
        _confinement: &Confinement,
    ) -> impl Future<Output = Result<Option<Program>, RunError>> + Send {
        async { Ok(None) }
    }

    /// Returns facts about the tool's state, by name such as `index.code`, which `GetState` shows to agents: only those
    /// that the caller of this run may know. It must not take long.
    fn facts(&self, _run: &Run) -> Vec<(String, Value)> {
        Vec::new()
    }

    /// Runs the tool once. By now the arguments are checked, the caller is allowed and a slot is taken.
    fn run(&self, args: Self::Args, run: &Run) -> impl Future<Output = Result<Outcome, RunError>> + Send;
}

/// A tool as the registry stores it, with its argument type erased.
pub trait AnyTool: Send + Sync + 'static {
    /// Returns the tool's declaration.
    fn spec(&self) -> ToolSpec;

    /// Returns all names of a thing in the footprint.
    fn names_of(&self, thing: &str, _confinement: &Confinement) -> Vec<String> {
        vec![thing.to_owned()]
    }

    /// Returns the arguments that have a usual spelling which differs from the given one, each with that spelling.
    fn respell(&self, _arguments: &Value, _confinement: &Confinement) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Describes the program that a call with these arguments would start.
    fn program<'a>(
        &'a self,
        _arguments: &'a Value,
        _confinement: &'a Confinement,
    ) -> BoxFuture<'a, Result<Option<Program>, RunError>> {
        Box::pin(async { Ok(None) })
    }

    /// Returns true if the tool passes on the client's own notes, [`Run::notes`].
    fn takes_notes(&self) -> bool {
        false
    }

    /// Returns facts about the tool's state for the caller of this run.
    fn facts(&self, _run: &Run) -> Vec<(String, Value)> {
        Vec::new()
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

    fn respell(&self, arguments: &Value, confinement: &Confinement) -> Vec<(String, String)> {
        Tool::respell(self, arguments, confinement)
    }

    fn program<'a>(
        &'a self,
        arguments: &'a Value,
        confinement: &'a Confinement,
    ) -> BoxFuture<'a, Result<Option<Program>, RunError>> {
        Box::pin(async move { Tool::program(self, read(arguments)?, confinement).await })
    }

    fn facts(&self, run: &Run) -> Vec<(String, Value)> {
        Tool::facts(self, run)
    }

    fn run<'a>(&'a self, input: &'a Input, run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        Box::pin(async move { Tool::run(self, read(input.value())?, run).await })
    }
}

/// Parses arguments as the type that a tool declares.
fn read<A: DeserializeOwned>(arguments: &Value) -> Result<A, RunError> {
    A::deserialize(arguments).map_err(|error| RunError::invalid_input(format!("the arguments do not fit: {error}")))
}

/// Makes a tool from a function:
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

/// Returns the JSON Schema of a type. It forbids unknown properties unless the type says otherwise.
pub fn schema_of<T: JsonSchema>() -> Value {
    let mut schema = schemars::generate::SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<T>();
    let object = schema.ensure_object();
    object.remove("title");
    if object.get("type") == Some(&json!("object")) && !object.contains_key("additionalProperties") {
        object.insert("additionalProperties".into(), json!(false));
    }
    schema.to_value()
}

/// The declaration of a tool.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolSpec {
    /// The name by which it is called; checked when it is registered.
    pub name: String,
    /// The name for people.
    pub title: Option<String>,
    /// The description, for the model.
    pub description: String,
    /// The version of its behaviour.
    pub version: String,
    /// The category, such as `files`.
    pub category: String,
    /// The JSON Schema of its arguments.
    pub input_schema: Value,
    /// The JSON Schema of its structured answer.
    pub output_schema: Option<Value>,
    /// The tool's effects on the world.
    pub annotations: Annotations,
    /// The permissions that a caller must hold to use it.
    pub required_permissions: Vec<String>,
    /// True if a person must agree each time.
    pub requires_confirmation: bool,
    /// Timeouts, and limits on output and concurrency.
    pub constraints: Constraints,
    /// The resource limits of its processes.
    pub limits: ResourceLimits,
    /// The most that a call may ask for.
    #[serde(skip_serializing_if = "ResourceLimits::is_empty")]
    pub limits_max: ResourceLimits,
    /// The scopes of the callers that see it; empty means all callers.
    pub agent_scopes: Vec<String>,
    /// The cache policy for its answers; no caching if `None`.
    pub cache: Option<CachePolicy>,
    /// The retry policy for failed runs; the executor's policy if `None`.
    pub retry: Option<RetryPolicy>,
    /// The number of times that a failed run is repeated, with the delays of `retry` or of the executor.
    pub retries: Option<u32>,
    /// The delay before the first retry, instead of that of `retry` or of the executor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_delay: Option<Duration>,
    /// The growth of the delays, instead of that of `retry` or of the executor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backoff: Option<Backoff>,
    /// Arguments that must not be written down anywhere.
    pub sensitive: Vec<String>,
    /// True if the history must not store its results.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub private_result: bool,
    /// The arguments that name things it reads or writes; unknown if `None`.
    pub footprint: Option<Footprint>,
    /// Other names by which it can be called.
    pub aliases: Vec<String>,
    /// Other names by which it can be called while no other tool has them. A tool of the very name goes first, and if
    /// it is also the short name of a server's tool, a call must use a full name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub weak_aliases: Vec<String>,
    /// Other names of its arguments, each with the real name. They are not in the schema, and are replaced when a call
    /// is opened.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub argument_aliases: BTreeMap<String, String>,
    /// The origin of the tool.
    pub provider: Provider,
}

impl ToolSpec {
    /// Creates a tool that may do anything, until it says otherwise.
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
            limits_max: ResourceLimits::default(),
            agent_scopes: Vec::new(),
            cache: None,
            retry: None,
            retries: None,
            retry_delay: None,
            backoff: None,
            sensitive: Vec::new(),
            private_result: false,
            footprint: None,
            aliases: Vec::new(),
            weak_aliases: Vec::new(),
            argument_aliases: BTreeMap::new(),
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

    /// Sets the default timeout of one run, for callers that set none.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.constraints.timeout = Some(timeout);
        self
    }

    /// Sets the retry policy for failed runs.
    #[must_use]
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = Some(policy);
        self
    }

    /// Caches answers for this long.
    #[must_use]
    pub fn cache(mut self, ttl: Duration) -> Self {
        self.cache = Some(CachePolicy { ttl });
        self
    }

    /// Requires that a person agrees each time.
    #[must_use]
    pub fn confirm(mut self) -> Self {
        self.requires_confirmation = true;
        self
    }

    /// Requires that the caller holds this permission.
    #[must_use]
    pub fn permission(mut self, permission: &str) -> Self {
        self.required_permissions.push(permission.to_owned());
        self
    }

    /// Shows it only to callers with this scope, or with another scope named in the same way.
    #[must_use]
    pub fn scope(mut self, scope: &str) -> Self {
        self.agent_scopes.push(scope.to_owned());
        self
    }

    /// Adds another name by which it can be called.
    #[must_use]
    pub fn alias(mut self, name: &str) -> Self {
        self.aliases.push(name.to_owned());
        self
    }

    /// Adds another name by which it can be called while no other tool has that name.
    #[must_use]
    pub fn weak_alias(mut self, name: &str) -> Self {
        self.weak_aliases.push(name.to_owned());
        self
    }

    /// Adds another name for an argument.
    #[must_use]
    pub fn argument_alias(mut self, alias: &str, argument: &str) -> Self {
        self.argument_aliases.insert(alias.to_owned(), argument.to_owned());
        self
    }

    /// Keeps this argument out of events, logs and history.
    #[must_use]
    pub fn sensitive(mut self, argument: &str) -> Self {
        self.sensitive.push(argument.to_owned());
        self
    }

    /// Keeps its results out of the history.
    #[must_use]
    pub fn private_result(mut self) -> Self {
        self.private_result = true;
        self
    }

    /// Sets the category.
    #[must_use]
    pub fn category(mut self, category: &str) -> Self {
        self.category = category.to_owned();
        self
    }

    /// Sets the origin.
    #[must_use]
    pub fn provider(mut self, provider: Provider) -> Self {
        self.provider = provider;
        self
    }

    /// Returns a strong hash of the whole declaration. Two specs with the same hash declare the same.
    pub fn hash(&self) -> blake3::Hash {
        blake3::hash(&serde_json::to_vec(self).expect("a spec is plain data"))
    }
}

/// The effects of a tool on the world: MCP's hints, with MCP's cautious defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "snake_case")]
pub struct Annotations {
    /// True if it changes nothing.
    pub read_only: bool,
    /// True if it may destroy something, rather than only add.
    pub destructive: bool,
    /// True if doing it twice is the same as doing it once.
    pub idempotent: bool,
    /// True if it touches things outside this machine.
    pub open_world: bool,
}

impl Default for Annotations {
    fn default() -> Self {
        Self { read_only: false, destructive: true, idempotent: false, open_world: true }
    }
}

impl Annotations {
    /// Returns true if a run that may have happened can be repeated without harm.
    pub fn repeatable(self) -> bool {
        self.read_only || self.idempotent
    }
}

/// Timeouts, and limits on output and concurrency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Constraints {
    /// The default timeout of one run, for callers that set none.
    #[serde(rename = "timeout_ms", with = "crate::duration")]
    pub timeout: Option<Duration>,
    /// The longest timeout that a caller may set for one run.
    #[serde(rename = "timeout_max_ms", with = "crate::duration")]
    pub timeout_max: Option<Duration>,
    /// The longest time that a run may show no sign of life.
    #[serde(rename = "silence_ms", with = "crate::duration")]
    pub silence: Option<Duration>,
    /// Maximum bytes of text in the result; the rest is stored as an artifact.
    pub output_bytes_max: Option<u64>,
    /// Maximum number of runs at once.
    pub concurrency_max: Option<u32>,
}

/// The cache policy for a tool's answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CachePolicy {
    /// The time for which an answer may be used again.
    #[serde(rename = "ttl_ms", with = "crate::duration::plain")]
    pub ttl: Duration,
}

/// The arguments that name things which a tool reads or writes: argument names, or JSON pointers such as
/// `/target/path`.
///
/// The things are slash-separated paths. Two overlap if they are equal or one is an ancestor of the other.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Footprint {
    /// Arguments that name the things read.
    pub reads: Vec<String>,
    /// Arguments that name the things written.
    pub writes: Vec<String>,
}

/// The origin of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Provider {
    /// Part of wieldy itself.
    Builtin,
    /// Rust code of the program that embeds the executor.
    Local,
    /// A program that a manifest defines.
    Command,
    /// The MCP server of this name.
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

/// A shared tool.
pub type SharedTool = Arc<dyn AnyTool>;
