//! The tool registry: looks tools up by name, alias or short name, and decides which callers see them.

use std::collections::HashMap;
use std::sync::{Arc, RwLock};

use foldhash::fast::RandomState;
use serde_json::json;
use tokio::sync::{Notify, watch};

use crate::call::Caller;
use crate::error::{CallError, Code};
use crate::name::{NameError, ToolName, did_you_mean, near_misses};
use crate::redact::{Marked, marked, sensitive_names};
use crate::schema::{Schema, SchemaError};
use crate::spelling::alias_mistakes;
use crate::tool::{Provider, SharedTool, ToolSpec};

/// A tool with everything that was checked and compiled when it was registered.
pub struct Registered {
    pub(crate) name: ToolName,
    pub(crate) spec: ToolSpec,
    pub(crate) provider: Arc<str>,
    pub(crate) input: Schema,
    pub(crate) output: Option<Schema>,
    pub(crate) tool: SharedTool,
    pub(crate) hash: blake3::Hash,
    /// Arguments that must not be written down.
    pub(crate) sensitive: Marked,
}

impl Registered {
    fn new(tool: SharedTool) -> Result<Self, RegisterError> {
        let spec = tool.spec();
        let wrong = |source| RegisterError::Name { tool: shown(&spec.name), source };
        let name = ToolName::new(&spec.name).map_err(wrong)?;
        for alias in spec.aliases.iter().chain(&spec.weak_aliases) {
            ToolName::new(alias).map_err(wrong)?;
        }
        let unusable = |which, source| RegisterError::Schema { tool: name.to_string(), which, source };
        // Most commands use only one built-in tool, so built-in schemas are compiled on first use. Tests compile all.
        let is_ours = spec.provider == Provider::Builtin;
        let input = if is_ours { Schema::check(&spec.input_schema) } else { Schema::compile(&spec.input_schema) };
        let input = input.map_err(|source| unusable("input", source))?;
        let output = spec.output_schema.as_ref();
        let output = output.map(|raw| if is_ours { Schema::check_output(raw) } else { Schema::compile_output(raw) });
        let output = output.transpose();
        let output = output.map_err(|source| unusable("output", source))?;
        if let Some(mistake) = alias_mistakes(&spec).into_iter().next() {
            return Err(RegisterError::ArgumentAlias { tool: name.to_string(), mistake });
        }
        let (provider, hash) = (spec.provider.to_string().into(), spec.hash());
        // Only now: the checks above guarantee that the schema is not too deep to walk.
        let sensitive = sensitive_names(&spec);
        Ok(Self { name, spec, provider, input, output, tool, hash, sensitive })
    }

    /// Returns the tool's declaration.
    pub fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    /// Returns the hash of the tool's declaration.
    pub fn hash(&self) -> blake3::Hash {
        self.hash
    }

    /// Returns the names that mean this tool only while they mean no other.
    fn short_names(&self) -> impl Iterator<Item = &str> {
        self.name.short().into_iter().chain(self.spec.weak_aliases.iter().map(String::as_str))
    }

    fn is_visible_to(&self, caller: &Caller) -> bool {
        let scopes = &self.spec.agent_scopes;
        scopes.is_empty() || scopes.iter().any(|scope| caller.scopes.holds(scope))
    }
}

/// Escapes and shortens an unchecked name, for messages.
fn shown(name: &str) -> String {
    name.chars().take(64).flat_map(char::escape_debug).collect()
}

/// The reason why a tool cannot be registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The tool's name or an alias is not valid.
    #[error("the tool `{tool}` cannot be registered")]
    Name {
        /// The tool.
        tool: String,
        /// The reason.
        #[source]
        source: NameError,
    },
    /// One of the tool's schemas cannot be used.
    #[error("the {which} schema of the tool `{tool}` cannot be used")]
    Schema {
        /// The tool.
        tool: String,
        /// The kind of schema: `input` or `output`.
        which: &'static str,
        /// The reason.
        #[source]
        source: SchemaError,
    },
    /// Another name of an argument cannot be used.
    #[error("the tool `{tool}` cannot be registered: {mistake}")]
    ArgumentAlias {
        /// The tool.
        tool: String,
        /// The reason.
        mistake: String,
    },
    /// A tool of another provider, or another tool of the same provider, already has the name.
    #[error(
        "`{name}` of {newcomer} would hide the tool of {holder} with the same name; give it another or a qualified name"
    )]
    Shadows {
        /// The name.
        name: String,
        /// The provider of the new tool.
        newcomer: Provider,
        /// The provider of the registered tool.
        holder: Provider,
    },
}

/// The effect of registering a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registration {
    /// The tool is new.
    New,
    /// The same tool was registered, with the same declaration.
    Same,
    /// The same tool was registered, with a different declaration.
    Changed {
        /// The hash of the earlier declaration.
        previous: blake3::Hash,
        /// The hash of the current declaration.
        current: blake3::Hash,
    },
}

/// The reason why no tool was found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotFound {
    /// No tool of that name is visible to the caller.
    #[error("there is no tool `{name}`{}", because.as_ref().map(|why| format!(": {why}")).unwrap_or_default())]
    Unknown {
        /// The requested name, escaped for display.
        name: String,
        /// Similar names, which the caller may have meant.
        near: Vec<String>,
        /// The reason why the server's tools are missing, if they are.
        because: Option<String>,
        /// The advice that goes with the reason.
        advice: Option<String>,
    },
    /// Several tools have this short name or weak alias.
    #[error("`{name}` could be any of `{}`", candidates.join("`, `"))]
    Ambiguous {
        /// The short name.
        name: String,
        /// The full names.
        candidates: Vec<String>,
    },
}

impl From<NotFound> for CallError {
    fn from(not_found: NotFound) -> Self {
        let error = CallError::new(Code::ToolNotFound, not_found.to_string());
        match not_found {
            NotFound::Unknown { advice: Some(advice), near, .. } => error.suggest(advice).detail("near", json!(near)),
            NotFound::Unknown { near, .. } => {
                let names: Vec<&str> = near.iter().map(String::as_str).collect();
                let hint = did_you_mean(&names).unwrap_or_else(|| "list the tools to see their names".into());
                error.suggest(hint).detail("near", json!(near))
            }
            NotFound::Ambiguous { candidates, .. } => {
                error.suggest("use the full name").detail("candidates", json!(candidates))
            }
        }
    }
}

/// A filter for listing tools. A field that is `None` matches every tool.
#[derive(Debug, Clone, Default)]
pub struct ToolFilter {
    /// The category.
    pub category: Option<String>,
    /// A scope that the tool is for.
    pub scope: Option<String>,
    /// The provider, such as `builtin` or `mcp:git`.
    pub provider: Option<String>,
    /// True for tools that change nothing, false for the others.
    pub read_only: Option<bool>,
    /// Words in its name, title or description.
    pub text: Option<String>,
}

impl ToolFilter {
    fn wants(&self, tool: &Registered) -> bool {
        let spec = &tool.spec;
        let holds_text = |text: &String| {
            let all = format!("{} {} {}", spec.name, spec.title.as_deref().unwrap_or_default(), spec.description)
                .to_lowercase();
            text.to_lowercase().split_whitespace().all(|word| all.contains(word))
        };
        self.category.as_ref().is_none_or(|category| *category == spec.category)
            && self.scope.as_ref().is_none_or(|scope| spec.agent_scopes.is_empty() || spec.agent_scopes.contains(scope))
            && self.provider.as_ref().is_none_or(|provider| **provider == *tool.provider)
            && self.read_only.is_none_or(|read_only| read_only == spec.annotations.read_only)
            && self.text.as_ref().is_none_or(holds_text)
    }
}

/// The list of all tools. There is one registry per executor.
#[derive(Default)]
pub struct Registry {
    names: RwLock<NameTable>,
    /// The number of changes to the tools.
    generation: watch::Sender<u64>,
}

#[derive(Default)]
struct NameTable {
    tools: HashMap<ToolName, Arc<Registered>, RandomState>,
    aliases: HashMap<String, ToolName, RandomState>,
    /// Short names of qualified tools and weak aliases, each with every tool that has it.
    short: HashMap<String, Vec<ToolName>>,
    /// The servers whose tools are missing, each with the reason.
    missing: HashMap<String, Missing>,
}

/// The reason why the tools of a server are missing, reported to callers that ask for one of them.
#[derive(Debug, Clone)]
pub struct Missing {
    /// The reason.
    pub why: String,
    /// The advice to the caller.
    pub advice: String,
    /// A signal that a caller wants one of the server's tools. It wakes the task that starts the server.
    pub wanted: Arc<Notify>,
}

impl Registry {
    /// Adds a tool, or replaces the same provider's tool of that name.
    pub(crate) fn add(&self, tool: SharedTool) -> Result<Registration, RegisterError> {
        let registered = Registered::new(tool)?;
        let mut names = self.names.write().expect("no code panics while it holds the names");
        let wanted = std::iter::once(&registered.spec.name).chain(&registered.spec.aliases);
        for name in wanted {
            if let Some(holder) = names.holder(name)
                && (holder.spec.provider != registered.spec.provider || holder.name != registered.name)
            {
                let (newcomer, holder) = (registered.spec.provider.clone(), holder.spec.provider.clone());
                return Err(RegisterError::Shadows { name: name.clone(), newcomer, holder });
            }
        }
        let current = registered.hash;
        let previous = names.remove(registered.name.as_str()).map(|old| old.hash);
        names.insert(registered);
        drop(names);
        if previous != Some(current) {
            self.changed();
        }
        Ok(match previous {
            None => Registration::New,
            Some(previous) if previous == current => Registration::Same,
            Some(previous) => Registration::Changed { previous, current },
        })
    }

    /// Removes a tool. Its running calls continue.
    pub(crate) fn remove(&self, name: &str) -> bool {
        let removed = self.names.write().expect("no code panics while it holds the names").remove(name).is_some();
        if removed {
            self.changed();
        }
        removed
    }

    /// Sets the reason why tools of this server are missing, or clears it.
    pub(crate) fn explain_missing(&self, server: &str, missing: Option<Missing>) {
        let mut names = self.names.write().expect("no code panics while it holds the names");
        match missing {
            Some(missing) => names.missing.insert(server.to_owned(), missing),
            None => names.missing.remove(server),
        };
    }

    fn changed(&self) {
        self.generation.send_modify(|generation| *generation += 1);
    }

    /// Returns the number of changes to the tools so far. Data derived from the tools is valid until it changes.
    pub fn generation(&self) -> u64 {
        *self.generation.borrow()
    }

    /// Returns a receiver that is notified when the tools change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// Finds a tool by its name, an alias, or a short name or weak alias that is unambiguous. Finds only tools that the caller may see.
    pub fn find(&self, name: &str, caller: &Caller) -> Result<Arc<Registered>, NotFound> {
        let names = self.names.read().expect("no code panics while it holds the names");
        if let Some(tool) = names.holder(name).filter(|tool| tool.is_visible_to(caller)) {
            return Ok(Arc::clone(tool));
        }
        let by_short = names.short.get(name).into_iter().flatten().filter_map(|full| names.tools.get(full));
        let candidates: Vec<_> = by_short.filter(|tool| tool.is_visible_to(caller)).collect();
        match candidates.as_slice() {
            [tool] => Ok(Arc::clone(tool)),
            [] => {
                let visible = names.tools.values().filter(|tool| tool.is_visible_to(caller));
                let known = visible.flat_map(|tool| {
                    std::iter::once(tool.name.as_str()).chain(tool.spec.aliases.iter().map(String::as_str))
                });
                let near = near_misses(name, known).into_iter().map(str::to_owned).collect();
                let server = name.split_once(ToolName::SEPARATOR).map(|(server, _)| server);
                let missing = server.and_then(|server| names.missing.get(server)).cloned();
                if let Some(missing) = &missing {
                    missing.wanted.notify_waiters();
                }
                let (because, advice) = missing.map(|missing| (missing.why, missing.advice)).unzip();
                Err(NotFound::Unknown { name: shown(name), near, because, advice })
            }
            several => Err(NotFound::Ambiguous {
                name: shown(name),
                candidates: several.iter().map(|tool| tool.name.to_string()).collect(),
            }),
        }
    }

    /// Returns the tools that the caller may see and the filter matches, sorted by name.
    pub fn list(&self, caller: &Caller, filter: &ToolFilter) -> Vec<Arc<Registered>> {
        let names = self.names.read().expect("no code panics while it holds the names");
        let wanted = names.tools.values().filter(|tool| tool.is_visible_to(caller) && filter.wants(tool));
        let mut tools: Vec<_> = wanted.cloned().collect();
        tools.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        tools
    }

    /// Returns the arguments that must not be written down for a call to that name, of every tool that it may mean.
    pub(crate) fn sensitive(&self, name: &str) -> Marked {
        let names = self.names.read().expect("no code panics while it holds the names");
        if let Some(tool) = names.holder(name) {
            return tool.sensitive.clone();
        }
        let by_short = names.short.get(name).into_iter().flatten().filter_map(|full| names.tools.get(full));
        marked(by_short.flat_map(|tool| tool.sensitive.iter().flat_map(|names| names.iter().cloned())).collect())
    }
}

impl NameTable {
    fn holder(&self, name: &str) -> Option<&Arc<Registered>> {
        self.tools.get(name).or_else(|| self.tools.get(self.aliases.get(name)?))
    }

    fn insert(&mut self, tool: Registered) {
        let name = tool.name.clone();
        for short in tool.short_names() {
            let named = self.short.entry(short.to_owned()).or_default();
            if !named.contains(&name) {
                named.push(name.clone());
            }
        }
        self.aliases.extend(tool.spec.aliases.iter().map(|alias| (alias.clone(), name.clone())));
        self.tools.insert(name, Arc::new(tool));
    }

    fn remove(&mut self, name: &str) -> Option<Arc<Registered>> {
        let tool = self.tools.remove(name)?;
        self.aliases.retain(|_, full| *full != tool.name);
        for short in tool.short_names() {
            if let Some(full_names) = self.short.get_mut(short) {
                full_names.retain(|full| *full != tool.name);
            }
        }
        Some(tool)
    }
}
