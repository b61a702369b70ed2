//! The configuration: layers of what people wrote become [`Config`], what the program uses.
//!
//! Weakest first: defaults, one file, environment, flags. The file is the first of `--config FILE`, `$WIELDY_CONFIG`,
//! `./wieldy.toml` and `~/.config/wieldy/wieldy.toml`; only the last two may be missing. One key is special: of
//! `sandbox.floor` the strictest value of all layers counts, and that of `~/.config/wieldy/wieldy.toml` in any case.

mod file;
mod history;
mod layers;
mod log;
mod mcp;
mod sandbox;
mod serve;
mod text;
mod value;

use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use wieldy::{Backoff, BreakerPolicy, Level, Limits, Network, Plan, Rate, ResourceLimits, RetryPolicy};

use crate::exit::Failure;
use file::{FileBackoff, FileConfig, FileHistory, FileLog, FileMcp, FilePlan, FileRate, FileSandbox, FileServe};
use layers::{CONFIG_VARIABLE, ConfigError, Layers};
use sandbox::SandboxConfig;
use serve::ServeConfig;
use value::{Time, Whole};

pub(crate) use file::FileServer;
use history::shown as shown_url;
pub(crate) use history::{HistoryConfig, address};
pub(crate) use layers::Origin;
pub(crate) use log::{Levels, LogConfig, LogFileConfig, LogFormat, Rotate};
pub(crate) use mcp::{McpConfig, ServerConfig};
pub(crate) use text::{FileText, InFile, Text, bounded, filled, names_files};

/// What `wieldy init` writes: every key with its default, as a comment.
pub(crate) const TEMPLATE: &str = include_str!("template.toml");
/// The file that is looked for in the current folder.
pub(crate) const FILE_NAME: &str = "wieldy.toml";

/// How large a configuration may be.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// Everything that can be set, resolved.
#[derive(Debug)]
pub(crate) struct Config {
    /// The file that it was read from, if there was one.
    pub(crate) file: Option<PathBuf>,
    pub(crate) workspace: PathBuf,
    /// Where large outputs and the history are kept; empty means in memory.
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
    pub(crate) sandbox: SandboxConfig,
    pub(crate) output_bytes_max: u64,
    pub(crate) confirmation_timeout: Duration,
    pub(crate) history: HistoryConfig,
    pub(crate) plans: BTreeMap<String, Plan>,
    /// The names of the variables that programs get.
    pub(crate) shell_environment: Vec<String>,
    pub(crate) manifests: Vec<PathBuf>,
    pub(crate) mcp: McpConfig,
    pub(crate) serve: ServeConfig,
    /// Each value as it is written, for people.
    pub(crate) values: Vec<Shown>,
    /// What looks like a mistake and is none for certain.
    pub(crate) warnings: Vec<String>,
}

/// One value and where it came from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shown {
    pub(crate) key: String,
    pub(crate) value: toml::Value,
    pub(crate) origin: Origin,
}

/// The environment of this process, as far as it is text.
#[derive(Debug, Default)]
pub(crate) struct Environment(pub(crate) BTreeMap<String, String>);

/// What flags say instead of the configuration.
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

impl Environment {
    pub(crate) fn of_this_process() -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self(std::env::vars_os().filter_map(text).collect())
    }

    /// A variable that says something.
    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    fn folder(&self, variable: &str, below_home: &str) -> Option<PathBuf> {
        let by_variable = self.get(variable).map(PathBuf::from).filter(|folder| folder.is_absolute());
        let folder = by_variable.or_else(|| Some(Path::new(self.get("HOME")?).join(below_home)))?;
        Some(folder.join("wieldy"))
    }

    /// The home folder.
    pub(crate) fn home(&self) -> Option<&Path> {
        self.get("HOME").map(Path::new).filter(|home| home.is_absolute())
    }

    /// The folder of this user's configuration.
    pub(crate) fn config_folder(&self) -> Option<PathBuf> {
        self.folder("XDG_CONFIG_HOME", ".config")
    }

    /// The file of this user's configuration.
    fn config_file(&self) -> Option<PathBuf> {
        self.config_folder().map(|folder| folder.join(FILE_NAME))
    }

    /// The folder of what this program keeps; empty where there is none.
    fn state_folder(&self) -> PathBuf {
        self.folder("XDG_STATE_HOME", ".local/state").unwrap_or_default()
    }
}

impl Config {
    /// Puts all layers on each other.
    pub(crate) fn load(environment: &Environment, overrides: &Overrides<'_>) -> Result<Self, Failure> {
        let mut layers = Layers::new(&FileConfig::defaults(environment.state_folder()));
        let file = find_file(environment, overrides.file)?;
        if let Some((path, text)) = &file {
            layers.put_file(path, text)?;
        }
        if let Some((path, text)) = usual_file(environment.config_file())? {
            layers.put_floor_of_file(&path, &text)?;
        }
        let warnings = layers.put_environment(&environment.0)?;
        for setting in overrides.set {
            layers.put_setting(setting)?;
        }
        let path = |path: &Path| path.to_string_lossy().into_owned();
        let flags = [
            ("--state", "state", overrides.state.map(path)),
            ("--log", "log", overrides.log.map(str::to_owned)),
            ("--workspace", "workspace", overrides.workspace.map(path)),
            ("--isolation", "isolation", overrides.isolation.map(|level| level.to_string())),
            ("--cpu", "resources.cpu-millicores", overrides.cpu.map(|millicores| millicores.to_string())),
            ("--memory", "resources.memory-mb", overrides.memory.map(|megabytes| megabytes.to_string())),
            ("--network", "sandbox.network", overrides.network.map(Network::to_string)),
        ];
        for (flag, key, text) in flags {
            if let Some(text) = text {
                layers.put_flag(flag, key, &text)?;
            }
        }
        let file = file.map(|(path, _)| path);
        Ok(Self { file, warnings, ..Self::resolve(&layers, environment.home())? })
    }

    /// Where the value of a key comes from.
    pub(crate) fn origin(&self, key: &str) -> Option<&Origin> {
        self.values.iter().find(|shown| shown.key == key).map(|shown| &shown.origin)
    }

    fn resolve(layers: &Layers, home: Option<&Path>) -> Result<Self, ConfigError> {
        const SET: &str = "the defaults have every key";
        let file = layers.merged();
        let (limits, timeouts, retry) = (file.limits.expect(SET), file.timeouts.expect(SET), file.retry.expect(SET));
        let (breaker, resources) = (file.breaker.expect(SET), file.resources.expect(SET));
        let (base, cap) = (time(retry.base), time(retry.cap));
        if cap < base {
            let message = format!("`retry.cap` is {}, less than `retry.base`, which is {}", Time(cap), Time(base));
            return Err(conflict(layers, ["retry.base", "retry.cap"], message, None));
        }
        let isolation = file.isolation.expect(SET);
        let sandbox = sandbox(layers, file.sandbox.expect(SET), home, isolation)?;
        let state = file.state.expect(SET);
        let history = history(layers, file.history.expect(SET), &state)?;
        let mcp = mcp(file.mcp.expect(SET), home, sandbox.floor)?;
        Ok(Self {
            file: None,
            workspace: file.workspace.expect(SET),
            state,
            history,
            log: log(layers, file.log.expect(SET).0, home)?,
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
            retry: RetryPolicy {
                retries: small(retry.retries),
                base,
                cap,
                backoff: backoff(retry.backoff.expect(SET)),
            },
            breaker: BreakerPolicy { failures_max: small(breaker.failures_max), open_for: time(breaker.open_for) },
            cache_bytes_max: file.cache.and_then(|cache| cache.bytes_max).expect(SET).0,
            rates: file.rates.expect(SET).into_iter().map(rate).collect(),
            resources: ResourceLimits {
                cpu_millicores: number(resources.cpu_millicores),
                memory_bytes: megabytes(resources.memory_mb),
                processes: number(resources.processes),
                open_files: number(resources.open_files),
                disk_bytes: megabytes(resources.disk_mb),
                disk_files: number(resources.disk_files),
                output_bytes: megabytes(resources.output_mb),
            },
            output_bytes_max: file.output.and_then(|output| output.bytes_max).expect(SET).0,
            confirmation_timeout: time(file.confirm.and_then(|confirm| confirm.timeout)),
            plans: file.plans.expect(SET).into_iter().map(|(name, limits)| (name, plan(&limits))).collect(),
            shell_environment: file.shell.and_then(|shell| shell.environment).expect(SET),
            manifests: file.tools.and_then(|tools| tools.manifests).expect(SET),
            mcp,
            serve: serve(file.serve.expect(SET), home)?,
            values: shown_values(layers),
            warnings: Vec::new(),
        })
    }
}

/// Every value as it is shown: without secrets.
fn shown_values(layers: &Layers) -> Vec<Shown> {
    let shown = |key: &str, value: &toml::Value| match value {
        toml::Value::String(url) if key == "history.url" => shown_url(url).into(),
        toml::Value::String(_) if is_secret(key) || mcp::is_secret(key) => "***".into(),
        value => value.clone(),
    };
    layers
        .values()
        .map(|(key, value, origin)| Shown { value: shown(&key, value), key, origin: origin.clone() })
        .collect()
}

/// The section `log`; only a file can be rotated.
fn log(layers: &Layers, file: FileLog, home: Option<&Path>) -> Result<LogConfig, ConfigError> {
    let is_rotated = file.rotate != Some(Rotate::Never);
    let wrong = |message| ConfigError { place: "the section `log`".into(), message, hint: None };
    let log = LogConfig::resolve(file, home).map_err(wrong)?;
    if is_rotated && log.file.is_none() {
        let message = "`log.rotate` needs a file to rotate, and `log.file` names none".to_owned();
        return Err(conflict(layers, ["log.rotate", "log.file"], message, None));
    }
    Ok(log)
}

/// The section `sandbox`, which must allow the isolation level.
fn sandbox(
    layers: &Layers,
    file: FileSandbox,
    home: Option<&Path>,
    isolation: Level,
) -> Result<SandboxConfig, ConfigError> {
    let wrong = |message| ConfigError { place: "the section `sandbox`".into(), message, hint: None };
    let sandbox = SandboxConfig::resolve(file, home).map_err(wrong)?;
    if !isolation.is_at_least(sandbox.floor) {
        let (floor, by) = (sandbox.floor, origin_of(layers, "sandbox.floor"));
        let message = format!("the isolation level `{isolation}` is below `sandbox.floor`, which is `{floor}` ({by})");
        let hint = "choose a level that is as strong; a floor can be raised by every layer, and lowered by none";
        return Err(conflict(layers, ["isolation", "sandbox.floor"], message, Some(hint)));
    }
    Ok(sandbox)
}

/// The section `serve`.
fn serve(file: FileServe, home: Option<&Path>) -> Result<ServeConfig, ConfigError> {
    let wrong = |message| ConfigError { place: "the section `serve`".into(), message, hint: None };
    ServeConfig::resolve(file, home).map_err(wrong)
}

/// Whether the value of a key must not be shown.
fn is_secret(key: &str) -> bool {
    key.starts_with("serve.tokens.") && key.ends_with(".token")
}

/// The section `mcp`.
fn mcp(file: FileMcp, home: Option<&Path>, floor: Level) -> Result<McpConfig, ConfigError> {
    let wrong = |message| ConfigError { place: "the section `mcp`".into(), message, hint: None };
    McpConfig::resolve(file, home, floor).map_err(wrong)
}

/// The section `history`.
fn history(layers: &Layers, file: FileHistory, state: &Path) -> Result<HistoryConfig, ConfigError> {
    HistoryConfig::resolve(file, state).map_err(|message| ConfigError {
        place: origin_of(layers, "history.url").to_string(),
        message: format!("`history.url`: {message}"),
        hint: Some("name a file, or a server as `postgres://user@host/database`".into()),
    })
}

/// Two values that do not go together, told at the first of them that somebody set.
fn conflict(layers: &Layers, keys: [&str; 2], message: String, hint: Option<&str>) -> ConfigError {
    let set = keys.into_iter().map(|key| origin_of(layers, key)).find(|origin| **origin != Origin::Default);
    let place = set.expect("the defaults fit each other").to_string();
    ConfigError { place, message, hint: hint.map(str::to_owned) }
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

fn megabytes<const MIN: u64, const MAX: u64>(count: Option<Whole<MIN, MAX>>) -> Option<u64> {
    count.map(|count| count.0 * 1024 * 1024)
}

fn backoff(backoff: FileBackoff) -> Backoff {
    match backoff {
        FileBackoff::Exponential => Backoff::Exponential,
        FileBackoff::Linear => Backoff::Linear,
    }
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

fn plan(plan: &FilePlan) -> Plan {
    Plan {
        batch_max: number(plan.batch_max).map(|count| count as usize),
        parallel_max: number(plan.parallel_max).map(|count| count as usize),
        full_events: plan.full_events.unwrap_or(true),
    }
}

/// The file that counts, with its text. One that was asked for must be there.
fn find_file(environment: &Environment, asked: Option<&Path>) -> Result<Option<(PathBuf, String)>, Failure> {
    if let Some(path) = asked.map(Path::to_owned).or_else(|| environment.get(CONFIG_VARIABLE).map(PathBuf::from)) {
        return read_file(path).map(Some);
    }
    match usual_file(Some(PathBuf::from(FILE_NAME)))? {
        Some(found) => Ok(Some(found)),
        None => usual_file(environment.config_file()),
    }
}

/// A file that may be missing.
fn usual_file(path: Option<PathBuf>) -> Result<Option<(PathBuf, String)>, Failure> {
    path.filter(|path| path.exists() && !is_placeholder(path)).map(read_file).transpose()
}

/// Whether it is an empty folder, which a sandbox keeps there as long as it runs so that no program makes the file.
fn is_placeholder(path: &Path) -> bool {
    path.read_dir().is_ok_and(|mut entries| entries.next().is_none())
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

#[cfg(test)]
mod tests;
