//! The configuration: merges the layers that people wrote into [`Config`], which the program uses.
//!
//! The layers, weakest first: defaults, one file, environment, flags. The file is the first of `--config FILE`,
//! `$WIELDY_CONFIG`, `./wieldy.toml` and `~/.config/wieldy/wieldy.toml`; only the last two may be missing. One key is
//! special: the strictest `sandbox.floor` of all layers counts, including the one in `~/.config/wieldy/wieldy.toml`
//! even if that file is not used.
//!
//! `./wieldy.toml` came with the folder. Until a person trusts it ([`Records`]), the user's own file is used, and of
//! the folder's file only the keys of the safe list.

mod exposed;
mod file;
mod folder;
mod history;
mod layers;
mod log;
mod mcp;
mod plans;
mod resources;
mod retry;
mod safe;
mod sandbox;
mod serve;
mod text;
mod threads;
mod trust;
mod value;
mod vault;

use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use wieldy::{
    BreakerPolicy, CodeOptions, Level, Limits, Network, Owners, Plan, Rate, ResourceLimits, RetryPolicy, ToolLimits,
};

use crate::exit::Failure;
use crate::output::shown_in_line;
use file::{
    FileConfig, FileHistory, FileLog, FileMcp, FileRate, FileResourceLimits, FileSandbox, FileServe, FileVault,
};
use layers::{CONFIG_VARIABLE, ConfigError, Layers, Mistakes};
use resources::{limits_above_maximum, limits_of_tools};
use sandbox::SandboxConfig;
use serve::ServeConfig;
use value::{Time, Whole};
use vault::VaultConfig;

pub(crate) use file::FileServer;
pub(crate) use folder::{Folder, MANIFEST_BYTES_MAX, PROJECT_FOLDER, is_manifest};
use history::shown as shown_url;
pub(crate) use history::{HistoryConfig, address};
pub(crate) use layers::Origin;
pub(crate) use log::{Levels, LogConfig, LogFileConfig, LogFormat, Rotate};
pub(crate) use mcp::{McpConfig, ServerConfig};
pub(crate) use plans::check_names;
pub(crate) use resources::key_of_limit;
pub(crate) use serve::address as listen_address;
pub(crate) use text::{FileText, InFile, Text, bounded, filled, names_files};
pub(crate) use trust::{Records, Trust, read_regular};

/// The file that `wieldy init` writes: every key with its default, as a comment.
pub(crate) const TEMPLATE: &str = include_str!("template.toml");
/// The name of the file in the current folder.
pub(crate) const FILE_NAME: &str = "wieldy.toml";

/// The maximal size of a configuration, in bytes.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// The resolved configuration.
#[derive(Debug)]
pub(crate) struct Config {
    /// The file that was used, if there was one.
    pub(crate) file: Option<PathBuf>,
    /// The configuration that came with the folder of this command.
    pub(crate) folder: Folder,
    /// The files with secrets, which no tool may see.
    pub(crate) secret_files: Vec<PathBuf>,
    pub(crate) workspace: PathBuf,
    /// The folder for large outputs and the history; empty means in memory.
    pub(crate) state: PathBuf,
    pub(crate) log: LogConfig,
    pub(crate) isolation: Level,
    pub(crate) limits: Limits,
    pub(crate) timeout: Duration,
    pub(crate) timeouts: HashMap<String, Duration>,
    pub(crate) dynamic_timeouts: bool,
    pub(crate) retry: RetryPolicy,
    pub(crate) breaker: BreakerPolicy,
    pub(crate) cache_bytes_max: u64,
    pub(crate) rates: Vec<Rate>,
    pub(crate) resources: ResourceLimits,
    /// The most that a call may ask for, as far as it is set.
    pub(crate) resources_max: ResourceLimits,
    pub(crate) resources_of_tools: BTreeMap<String, ToolLimits>,
    pub(crate) sandbox: SandboxConfig,
    pub(crate) output_bytes_max: u64,
    pub(crate) confirmation_timeout: Duration,
    pub(crate) history: HistoryConfig,
    /// The callers that share the threads of a project.
    pub(crate) thread_projects: BTreeMap<String, Owners>,
    pub(crate) plans: BTreeMap<String, Plan>,
    /// The names of the variables that programs get.
    pub(crate) shell_environment: Vec<String>,
    pub(crate) code: CodeOptions,
    pub(crate) manifests: Vec<PathBuf>,
    pub(crate) mcp: McpConfig,
    pub(crate) serve: ServeConfig,
    pub(crate) vault: VaultConfig,
    /// Each value as it is written, for people.
    pub(crate) values: Vec<Shown>,
    /// Possible mistakes that are no errors.
    pub(crate) warnings: Vec<String>,
}

/// A value and its origin.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shown {
    pub(crate) key: String,
    pub(crate) value: toml::Value,
    pub(crate) origin: Origin,
}

/// The environment of this process, without variables that are no text.
#[derive(Debug, Default)]
pub(crate) struct Environment(pub(crate) BTreeMap<String, String>);

/// The flags that override the configuration.
#[derive(Debug, Default)]
pub(crate) struct Overrides<'a> {
    pub(crate) file: Option<&'a Path>,
    pub(crate) state: Option<&'a Path>,
    pub(crate) log: Option<&'a str>,
    pub(crate) set: &'a [String],
    pub(crate) workspace: Option<&'a Path>,
    pub(crate) isolation: Option<Level>,
    pub(crate) cpu: Option<u64>,
    pub(crate) memory: Option<u64>,
    pub(crate) network: Option<&'a Network>,
}

impl Overrides<'_> {
    /// Puts the flags with keys of their own on top. Returns every mistake.
    fn put_flags(&self, layers: &mut Layers) -> Vec<ConfigError> {
        let path = |path: &Path| path.to_string_lossy().into_owned();
        let flags = [
            ("--state", "state", self.state.map(path)),
            ("--log", "log", self.log.map(str::to_owned)),
            ("--workspace", "workspace", self.workspace.map(path)),
            ("--isolation", "isolation", self.isolation.map(|level| level.to_string())),
            ("--cpu", "resources.cpu-millicores", self.cpu.map(|millicores| millicores.to_string())),
            ("--memory", "resources.memory-mb", self.memory.map(|megabytes| megabytes.to_string())),
            ("--network", "sandbox.network", self.network.map(Network::to_string)),
        ];
        let given = flags.into_iter().filter_map(|(flag, key, text)| Some((flag, key, text?)));
        given.filter_map(|(flag, key, text)| layers.put_flag(flag, key, &text).err()).collect()
    }
}

impl Environment {
    pub(crate) fn of_this_process() -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self(std::env::vars_os().filter_map(text).collect())
    }

    /// Returns a variable that is set and not empty.
    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    fn folder(&self, variable: &str, below_home: &str) -> Option<PathBuf> {
        let by_variable = self.get(variable).map(PathBuf::from).filter(|folder| folder.is_absolute());
        let folder = by_variable.or_else(|| Some(Path::new(self.get("HOME")?).join(below_home)))?;
        Some(folder.join("wieldy"))
    }

    /// Returns the home folder.
    pub(crate) fn home(&self) -> Option<&Path> {
        self.get("HOME").map(Path::new).filter(|home| home.is_absolute())
    }

    /// Returns the folder of this user's configuration.
    pub(crate) fn config_folder(&self) -> Option<PathBuf> {
        self.folder("XDG_CONFIG_HOME", ".config")
    }

    /// Returns the file of this user's configuration.
    fn config_file(&self) -> Option<PathBuf> {
        self.config_folder().map(|folder| folder.join(FILE_NAME))
    }

    /// Returns the folder for the state of this program; empty if there is none.
    fn state_folder(&self) -> PathBuf {
        self.folder("XDG_STATE_HOME", ".local/state").unwrap_or_default()
    }
}

impl Config {
    /// Loads and merges all layers.
    pub(crate) fn load(environment: &Environment, overrides: &Overrides<'_>) -> Result<Self, Failure> {
        let records = Records::of(environment);
        Self::load_with(environment, overrides, Some(&records))
    }

    /// Returns the configuration of the current folder as if a person trusted all of it, to show what that would do.
    pub(crate) fn of_folder(environment: &Environment) -> Result<Self, Failure> {
        let others = environment.0.iter().filter(|(name, _)| !name.starts_with(layers::VARIABLE_PREFIX));
        let environment = Environment(others.map(|(name, value)| (name.clone(), value.clone())).collect());
        Self::load_with(&environment, &Overrides::default(), None)
    }

    fn load_with(
        environment: &Environment,
        overrides: &Overrides<'_>,
        records: Option<&Records>,
    ) -> Result<Self, Failure> {
        let mut layers = Layers::new(&FileConfig::defaults(environment.state_folder()));
        let (asked, mut folder) = (asked_file(environment, overrides.file)?, Folder::default());
        let users = usual_file(environment.config_file())?;
        let found = match asked {
            None => folder::file(environment)?,
            Some(_) => None,
        };
        let (mut secrets, mut mistakes) = (Vec::new(), Mistakes::default());
        let file = asked.or_else(|| users.clone());
        if let Some((path, bytes)) = found {
            let text = folder::text(&path, &bytes)?;
            secrets.push((path.clone(), layers::keys_in(text, exposed::holds_secret)));
            let mut cautious = layers.clone();
            if let Some((path, text)) = &users {
                mistakes.add(cautious.put_file(path, text));
            }
            let untrusted = cautious.put_untrusted_file(&path, text);
            folder.keys = shown(untrusted.ignored, &path);
            folder.trust = Some(records.map_or(Trust::Trusted, |records| records.trust(&path, &bytes)));
            match folder.trust {
                Some(Trust::Trusted) => mistakes.add(layers.put_file(&path, text)),
                _ => {
                    layers = cautious;
                    match untrusted.are_serious {
                        true => mistakes.add(untrusted.mistakes.into_iter().map(ConfigError::of_untrusted_file)),
                        false => folder.mistakes = untrusted.mistakes.iter().map(ConfigError::whole).collect(),
                    }
                }
            }
            folder.read.insert(path, bytes);
        } else if let Some((path, text)) = &file {
            secrets.push((path.clone(), layers::keys_in(text, exposed::holds_secret)));
            mistakes.add(layers.put_file(path, text));
        }
        if let Some((path, text)) = &users {
            mistakes.add(layers.put_floor_of_file(path, text));
        }
        let (warnings, wrong) = layers.put_environment(&environment.0);
        mistakes.add(wrong);
        mistakes.add(overrides.set.iter().filter_map(|setting| layers.put_setting(setting).err()));
        mistakes.add(overrides.put_flags(&mut layers));
        let file = file.map(|(path, _)| path);
        let resolved = Self::resolve(&layers, environment.home(), mistakes)?;
        let mut config = Self { file, warnings, folder, ..resolved };
        config.look_at_folder(records);
        config.hide_secret_files(secrets, environment);
        config.warnings.extend(config.folder.mistakes.iter().map(|mistake| shown_in_line(mistake)));
        config.warnings.extend(config.folder.warning());
        let instructions = [config.serve.mcp.instructions.take(), config.folder.note()];
        let instructions: Vec<String> = instructions.into_iter().flatten().collect();
        config.serve.mcp.instructions = (!instructions.is_empty()).then(|| instructions.join("\n\n"));
        Ok(config)
    }

    /// Returns the origin of the value of a key.
    pub(crate) fn origin(&self, key: &str) -> Option<&Origin> {
        self.values.iter().find(|shown| shown.key == key).map(|shown| &shown.origin)
    }

    /// Resolves the merged layers. The error has the given mistakes and every further one that is not caused by them.
    fn resolve(layers: &Layers, home: Option<&Path>, mut mistakes: Mistakes) -> Result<Self, Mistakes> {
        const SET: &str = "the defaults have every key";
        let file = layers.merged();
        let (limits, timeouts, retry) = (file.limits.expect(SET), file.timeouts.expect(SET), file.retry.expect(SET));
        let (breaker, resources, state, plans) =
            (file.breaker.expect(SET), file.resources.expect(SET), file.state.expect(SET), file.plans.expect(SET));
        let isolation = file.isolation.expect(SET);
        let (floor, mut more) = (file.sandbox.as_ref().and_then(|sandbox| sandbox.floor).expect(SET), Vec::new());
        let retry = retry::resolve(layers, &retry, &mut more);
        more.extend(limits_above_maximum(layers, &resources));
        more.extend(plans::impossible_names(layers, &plans));
        let thread_projects = threads::projects(file.threads, &mut more);
        let sandbox = kept(sandbox(layers, file.sandbox.expect(SET), home, isolation), &mut more);
        let history = kept(history(layers, file.history.expect(SET), &state), &mut more);
        let mcp = kept(mcp(file.mcp.expect(SET), home, floor), &mut more);
        let log = kept(log(layers, file.log.expect(SET).0, home), &mut more);
        let serve = kept(serve(file.serve.expect(SET), home), &mut more);
        let vault = kept(vault(file.vault.expect(SET), home), &mut more);
        more.retain(|mistake| !mistake.keys.iter().any(|key| mistakes.concern(key)));
        mistakes.add(more);
        let (Some(sandbox), Some(history), Some(mcp), Some(log), Some(mut serve), Some(vault), []) =
            (sandbox, history, mcp, log, serve, vault, mistakes.0.as_slice())
        else {
            return Err(mistakes);
        };
        serve.mcp.batch_calls_max = small(limits.batch_calls_max) as usize;
        Ok(Self {
            file: None,
            folder: Folder::default(),
            secret_files: Vec::new(),
            workspace: file.workspace.expect(SET),
            state,
            history,
            thread_projects,
            log,
            isolation,
            sandbox,
            limits: Limits {
                calls_running_max: small(limits.calls_running_max),
                calls_running_per_agent_max: small(limits.calls_running_per_agent_max),
                calls_waiting_max: small(limits.calls_waiting_max) as usize,
                queue_timeout: time(limits.queue_timeout),
                ..Limits::default()
            },
            timeout: time(timeouts.default),
            timeouts: timeouts.tools.expect(SET).into_iter().map(|(tool, time)| (tool, time.0)).collect(),
            dynamic_timeouts: timeouts.dynamic.expect(SET),
            retry,
            breaker: BreakerPolicy { failures_max: small(breaker.failures_max), open_for: time(breaker.open_for) },
            cache_bytes_max: file.cache.and_then(|cache| cache.bytes_max).expect(SET).0,
            rates: file.rates.expect(SET).into_iter().map(rate).collect(),
            resources: resources.limits(),
            resources_max: resources.max.as_ref().map(FileResourceLimits::limits).unwrap_or_default(),
            resources_of_tools: limits_of_tools(&resources.tools.unwrap_or_default()),
            output_bytes_max: file.output.and_then(|output| output.bytes_max).expect(SET).0,
            confirmation_timeout: time(file.confirm.and_then(|confirm| confirm.timeout)),
            plans: plans.iter().map(|(name, limits)| (name.clone(), plans::plan(limits))).collect(),
            shell_environment: file.shell.and_then(|shell| shell.environment).expect(SET),
            code: CodeOptions { fresh: time(file.code.and_then(|code| code.fresh)) },
            manifests: file.tools.and_then(|tools| tools.manifests).expect(SET),
            mcp,
            serve,
            vault,
            values: shown_values(layers),
            warnings: Vec::new(),
        })
    }
}

/// Returns every value without secrets.
fn shown_values(layers: &Layers) -> Vec<Shown> {
    let all = layers.values();
    all.map(|(key, value, origin)| Shown { value: without_secret(&key, value), key, origin: origin.clone() }).collect()
}

/// Returns the keys of a folder's file, with their raw values.
fn shown(ignored: Vec<(layers::Key, toml::Value)>, path: &Path) -> Vec<Shown> {
    let origin = Origin::File(path.to_owned());
    let shown = |(key, value): (layers::Key, toml::Value)| Shown { key: key.join("."), value, origin: origin.clone() };
    ignored.into_iter().map(shown).collect()
}

/// Returns the value of a key with all known or possible secrets removed.
pub(crate) fn without_secret(key: &str, value: &toml::Value) -> toml::Value {
    match value {
        toml::Value::String(url) if key == "history.url" => shown_url(url).into(),
        _ if is_secret(key) => "***".into(),
        toml::Value::String(_) if mcp::is_secret(key) => "***".into(),
        value => value.clone(),
    }
}

/// Returns true if the text of a file sets only keys of the safe list.
pub(crate) fn needs_no_trust(path: &Path, text: &str) -> bool {
    let mut layers = Layers::new(&FileConfig::defaults(PathBuf::new()));
    let untrusted = layers.put_untrusted_file(path, text);
    untrusted.ignored.is_empty() && untrusted.mistakes.is_empty()
}

/// Resolves the section `log`; only a file can be rotated.
fn log(layers: &Layers, file: FileLog, home: Option<&Path>) -> Result<LogConfig, Vec<ConfigError>> {
    let is_rotated = file.rotate != Some(Rotate::Never);
    let log = LogConfig::resolve(file, home).map_err(|message| in_section("log", vec![message]))?;
    if is_rotated && log.file.is_none() {
        let message = "`log.rotate` needs a file to rotate, and `log.file` names none".to_owned();
        return Err(vec![conflict(layers, ["log.rotate", "log.file"], message, None)]);
    }
    Ok(log)
}

/// Resolves the section `sandbox`, which must allow the isolation level.
fn sandbox(
    layers: &Layers,
    file: FileSandbox,
    home: Option<&Path>,
    isolation: Level,
) -> Result<SandboxConfig, Vec<ConfigError>> {
    let floor = file.floor.expect("the defaults have every key");
    let mut mistakes = Vec::new();
    if !isolation.is_at_least(floor) {
        let by = origin_of(layers, "sandbox.floor");
        let message = format!("the isolation level `{isolation}` is below `sandbox.floor`, which is `{floor}` ({by})");
        let hint = "choose a level that is as strong; a floor can be raised by every layer, and lowered by none";
        mistakes.push(conflict(layers, ["isolation", "sandbox.floor"], message, Some(hint)));
    }
    let resolved = SandboxConfig::resolve(file, home).map_err(|messages| in_section("sandbox", messages));
    match (kept(resolved, &mut mistakes), mistakes.as_slice()) {
        (Some(sandbox), []) => Ok(sandbox),
        _ => Err(mistakes),
    }
}

/// Resolves the section `serve`.
fn serve(file: FileServe, home: Option<&Path>) -> Result<ServeConfig, Vec<ConfigError>> {
    ServeConfig::resolve(file, home).map_err(|messages| in_section("serve", messages))
}

/// Resolves the section `vault`.
fn vault(file: FileVault, home: Option<&Path>) -> Result<VaultConfig, Vec<ConfigError>> {
    VaultConfig::resolve(file, home).map_err(|messages| in_section("vault", messages))
}

/// Returns true if the value of a key must not be shown.
fn is_secret(key: &str) -> bool {
    let words: Vec<&str> = key.split('.').collect();
    matches!(words[..], ["serve", "tokens", _, .., "token"] | ["serve", "tokens", _, "context", ..])
}

/// Resolves the section `mcp`.
fn mcp(file: FileMcp, home: Option<&Path>, floor: Level) -> Result<McpConfig, Vec<ConfigError>> {
    McpConfig::resolve(file, home, floor).map_err(|messages| in_section("mcp", messages))
}

/// Resolves the section `history`.
fn history(layers: &Layers, file: FileHistory, state: &Path) -> Result<HistoryConfig, Vec<ConfigError>> {
    let wrong = |message| ConfigError {
        place: origin_of(layers, "history.url").to_string(),
        message: format!("`history.url`: {message}"),
        hint: Some("name a file, or a server as `postgres://user@host/database`".into()),
        keys: vec!["history.url".into()],
    };
    HistoryConfig::resolve(file, state).map_err(|message| vec![wrong(message)])
}

/// Returns the mistakes of a section. Each message starts with the key concerned.
fn in_section(section: &str, messages: Vec<String>) -> Vec<ConfigError> {
    let wrong = |message: String| {
        let keys = message.split('`').nth(1).map(str::to_owned).into_iter().collect();
        ConfigError { place: format!("the section `{section}`"), message, hint: None, keys }
    };
    messages.into_iter().map(wrong).collect()
}

/// Returns the value, or adds to the mistakes and returns `None`.
fn kept<T, E, M: IntoIterator<Item = E>>(read: Result<T, M>, mistakes: &mut Vec<E>) -> Option<T> {
    read.map_err(|more| mistakes.extend(more)).ok()
}

/// Returns the mistake of two contradicting values, at the place of the first one that is not a default.
fn conflict(layers: &Layers, keys: [&str; 2], message: String, hint: Option<&str>) -> ConfigError {
    let set = keys.iter().map(|key| origin_of(layers, key)).find(|origin| **origin != Origin::Default);
    let place = set.expect("the defaults fit each other").to_string();
    ConfigError { place, message, hint: hint.map(str::to_owned), keys: keys.map(str::to_owned).into() }
}

fn origin_of<'a>(layers: &'a Layers, key: &str) -> &'a Origin {
    layers.values().find(|(other, ..)| other == key).expect("the defaults have every key").2
}

fn time(time: Option<Time>) -> Duration {
    time.expect("the defaults have every key").0
}

fn small<const MIN: u64, const MAX: u64>(number: Option<Whole<MIN, MAX>>) -> u32 {
    let number = number.expect("the defaults have every key").0;
    u32::try_from(number).expect("its bounds are below four billion")
}

fn number<const MIN: u64, const MAX: u64>(number: Option<Whole<MIN, MAX>>) -> Option<u64> {
    number.map(|number| number.0)
}

fn rate(rate: FileRate) -> Rate {
    Rate {
        per: rate.per,
        tool: rate.tool,
        calls: NonZeroU32::new(small(Some(rate.calls))).expect("its bounds begin at 1"),
        window: rate.window.0,
        kind: rate.kind,
    }
}

/// Reads the file that the operator named, which must exist.
fn asked_file(environment: &Environment, asked: Option<&Path>) -> Result<Option<(PathBuf, String)>, Failure> {
    let asked = asked.map(Path::to_owned).or_else(|| environment.get(CONFIG_VARIABLE).map(PathBuf::from));
    asked.map(read_file).transpose()
}

/// Reads a file that may be missing.
fn usual_file(path: Option<PathBuf>) -> Result<Option<(PathBuf, String)>, Failure> {
    path.filter(|path| path.exists() && !is_placeholder(path)).map(read_file).transpose()
}

/// Returns true for a placeholder, with which a sandbox keeps programs from creating the file. Older versions used an
/// empty folder.
fn is_placeholder(path: &Path) -> bool {
    wieldy::is_placeholder(path) || path.read_dir().is_ok_and(|mut entries| entries.next().is_none())
}

fn read_file(path: PathBuf) -> Result<(PathBuf, String), Failure> {
    let doing = || format!("cannot read the configuration `{}`", path.display());
    let hint = "it must be a text file that you may read; `--config FILE` names another";
    let text = read_bounded(&path).with_context(doing).map_err(|error| Failure::usage(error).hint(hint))?;
    Ok((path, text))
}

fn read_bounded(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let file = std::fs::File::open(path)?;
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    anyhow::ensure!(text.len() as u64 <= FILE_BYTES_MAX, "it is larger than {FILE_BYTES_MAX} bytes");
    Ok(text)
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        let hint = error.hint.clone();
        Self { hint, ..Self::usage(error) }
    }
}

impl From<Mistakes> for Failure {
    fn from(mut mistakes: Mistakes) -> Self {
        match mistakes.0.len() {
            1 => mistakes.0.remove(0).into(),
            _ => Self::usage(mistakes),
        }
    }
}

#[cfg(test)]
mod tests;
