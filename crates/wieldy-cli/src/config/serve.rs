//! The section `serve`: the address of the server, its callers, and the settings for showing tools.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use wieldy::{Caller, Held, Priority};
use wieldy_mcp::server::{BatchCalls, Expose, ServerOptions};

use super::file::{FileServe, FileServeMcp, FileToken};
use super::text::Text;
use super::value::{Time, Whole};
use super::{Environment, kept};
use crate::exit::Failure;

/// The minimal length of a secret that is hard to guess.
const SECRET_CHARS_MIN: usize = 16;

/// The resolved section.
#[derive(Debug, Clone)]
pub(crate) struct ServeConfig {
    pub(crate) listen: SocketAddr,
    pub(crate) hosts: Vec<String>,
    pub(crate) origins: Vec<String>,
    pub(crate) body_bytes_max: usize,
    pub(crate) connections_max: usize,
    /// The longest time that running calls may take to end when the server stops.
    pub(crate) patience: Duration,
    pub(crate) tokens: Vec<TokenConfig>,
    pub(crate) mcp: ServerOptions,
}

/// A caller with a token.
#[derive(Debug, Clone)]
pub(crate) struct TokenConfig {
    name: String,
    secret: Text,
    pub(crate) caller: Caller,
}

/// The tools that an MCP client is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FileShow {
    All,
    Search,
}

/// The calls that the tool `batch` takes, as people write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FileBatch {
    Off,
    ReadOnly,
    All,
}

/// A priority as people write it: a word or a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "PriorityForm", into = "PriorityForm")]
pub(crate) struct FilePriority(pub(crate) Priority);

#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "`low`, `normal`, `high` or a number from -128 to 127")]
enum PriorityForm {
    Number(i8),
    Word(String),
}

impl TryFrom<PriorityForm> for FilePriority {
    type Error = String;

    fn try_from(form: PriorityForm) -> Result<Self, String> {
        match form {
            PriorityForm::Number(number) => Ok(Self(Priority(number))),
            PriorityForm::Word(word) => word.parse().map(Self),
        }
    }
}

impl From<FilePriority> for PriorityForm {
    fn from(FilePriority(priority): FilePriority) -> Self {
        match priority {
            Priority::LOW => Self::Word("low".into()),
            Priority::NORMAL => Self::Word("normal".into()),
            Priority::HIGH => Self::Word("high".into()),
            Priority(number) => Self::Number(number),
        }
    }
}

impl FileServe {
    /// Returns the default: only this machine may call.
    pub(super) fn defaults() -> Self {
        let mcp = ServerOptions::default();
        Self {
            listen: Some("127.0.0.1:7300".into()),
            hosts: Some(Vec::new()),
            origins: Some(Vec::new()),
            body_bytes_max: Some(Whole(4 * 1024 * 1024)),
            connections_max: Some(Whole(512)),
            patience: Some(Time(Duration::from_secs(10))),
            tokens: Some(Default::default()),
            mcp: Some(FileServeMcp {
                tools: Some(FileShow::All),
                names: Some(Vec::new()),
                categories: Some(Vec::new()),
                providers: Some(Vec::new()),
                instructions: Some(String::new()),
                patience: mcp.patience.map(Time),
                task_after: Some(Time(mcp.task_after)),
                page: Some(Whole(mcp.page as u64)),
                batch: Some(FileBatch::ReadOnly),
                priority_max: Some(FilePriority(mcp.priority_max)),
            }),
        }
    }

    /// Makes relative paths start at the file's folder.
    pub(super) fn begin_paths_at(&mut self, folder: &Path) {
        let tokens = self.tokens.iter_mut().flatten();
        tokens.filter_map(|(_, token)| token.token.as_mut()).for_each(|token| token.begin_at(folder));
    }
}

impl ServeConfig {
    /// Resolves the section. The error lists all mistakes with their keys.
    pub(super) fn resolve(file: FileServe, home: Option<&Path>) -> Result<Self, Vec<String>> {
        const SET: &str = "the defaults have every key";
        let mut wrong = Vec::new();
        let listen = kept(listen(&file.listen.expect(SET)).map_err(Some), &mut wrong);
        let tokens = file.tokens.expect(SET).into_iter().map(|(name, token)| TokenConfig::resolve(name, token, home));
        let tokens = tokens.filter_map(|token| kept(token.map_err(Some), &mut wrong)).collect();
        let (Some(listen), []) = (listen, wrong.as_slice()) else { return Err(wrong) };
        Ok(Self {
            listen,
            hosts: file.hosts.expect(SET),
            origins: file.origins.expect(SET),
            body_bytes_max: usize::try_from(file.body_bytes_max.expect(SET).0).unwrap_or(usize::MAX),
            connections_max: file.connections_max.expect(SET).0 as usize,
            patience: file.patience.expect(SET).0,
            tokens,
            mcp: mcp(file.mcp.expect(SET)),
        })
    }

    /// Returns the secrets that are written in the configuration itself.
    pub(crate) fn secrets(&self) -> impl Iterator<Item = &str> {
        self.tokens.iter().filter_map(|token| token.secret.written()).filter(|text| !text.contains("${"))
    }
}

fn listen(text: &str) -> Result<SocketAddr, String> {
    address(text).map_err(|wrong| format!("`serve.listen`: `{text}` {}", wrong.trim_start_matches("it ")))
}

/// Parses the address to listen at. The error for a port alone shows the right form.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| match text.trim_start_matches(':').parse::<u16>() {
        Ok(port) => format!("it is a port without an address; write 127.0.0.1:{port} for this machine only"),
        Err(_) => "it is not an address and a port, such as 127.0.0.1:7300".to_owned(),
    })
}

fn mcp(file: FileServeMcp) -> ServerOptions {
    const SET: &str = "the defaults have every key";
    ServerOptions {
        expose: Expose {
            by_search: file.tools.expect(SET) == FileShow::Search,
            names: file.names.expect(SET),
            categories: file.categories.expect(SET),
            providers: file.providers.expect(SET),
        },
        instructions: file.instructions.filter(|text| !text.is_empty()),
        patience: file.patience.map(|patience| patience.0),
        task_after: file.task_after.expect(SET).0,
        page: file.page.expect(SET).0 as usize,
        batch: match file.batch.expect(SET) {
            FileBatch::Off => BatchCalls::Off,
            FileBatch::ReadOnly => BatchCalls::ReadOnly,
            FileBatch::All => BatchCalls::All,
        },
        priority_max: file.priority_max.expect(SET).0,
        ..ServerOptions::default()
    }
}

/// Converts the context of a caller to JSON.
fn context(table: Option<toml::Table>) -> Result<Option<Arc<Value>>, String> {
    fn json(value: toml::Value) -> Result<Value, String> {
        use toml::Value::{Array, Boolean, Datetime, Float, Integer, String, Table};
        Ok(match value {
            String(text) => text.into(),
            Integer(number) => number.into(),
            Float(number) if number.is_finite() => number.into(),
            Float(number) => return Err(format!("{number} is no number of JSON")),
            Boolean(value) => value.into(),
            Datetime(time) => return Err(format!("JSON has no times: write \"{time}\" as a text")),
            Array(items) => Value::Array(items.into_iter().map(json).collect::<Result<_, _>>()?),
            Table(table) => {
                let entry = |(key, value)| Ok::<_, std::string::String>((key, json(value)?));
                Value::Object(table.into_iter().map(entry).collect::<Result<_, _>>()?)
            }
        })
    }
    table.map(|table| json(toml::Value::Table(table)).map(Arc::new)).transpose()
}

impl TokenConfig {
    fn resolve(name: String, file: FileToken, home: Option<&Path>) -> Result<Self, String> {
        let token = file.token.ok_or_else(|| format!("`serve.tokens.{name}` has no `token`"))?;
        let secret = token.resolve(home).map_err(|wrong| format!("`serve.tokens.{name}.token`: {wrong}"))?;
        let held = |names: Option<Vec<String>>| match names {
            Some(names) if names.iter().any(|name| name == "*") => Held::All,
            names => Held::only(names.unwrap_or_default()),
        };
        let context = context(file.context).map_err(|wrong| format!("`serve.tokens.{name}.context`: {wrong}"))?;
        let caller = Caller {
            tenant: file.tenant,
            user: file.user,
            plan: file.plan,
            scopes: held(file.scopes),
            permissions: held(file.permissions),
            context,
            ..Caller::agent(file.agent.unwrap_or_else(|| name.clone()))
        };
        caller.check().map_err(|mistake| format!("`serve.tokens.{name}`: {}", mistake.message))?;
        caller.check_context().map_err(|error| format!("`serve.tokens.{name}.context`: {}", error.message))?;
        Ok(Self { name, secret, caller })
    }

    /// Returns the secret, and redacts it from all records and messages from now on.
    pub(crate) fn secret(&self, environment: &Environment) -> Result<String, Failure> {
        let doing = || format!("cannot read the token `{}`", self.name);
        let read = self.secret.value(environment).with_context(doing).map_err(Failure::usage)?;
        let secret = read.trim().to_owned();
        if secret.chars().count() < SECRET_CHARS_MIN || secret.chars().any(|c| !c.is_ascii_graphic()) {
            let told = anyhow!("a token has at least {SECRET_CHARS_MIN} characters, all of them ASCII, and no space");
            return Err(Failure::usage(told.context(doing())).hint("`openssl rand -hex 32` makes a good one"));
        }
        wieldy::redact::hide(&secret);
        Ok(secret)
    }
}
