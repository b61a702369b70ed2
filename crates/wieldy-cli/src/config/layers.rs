//! The layers of a configuration, weakest first, and the origin of each resulting value.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::de::DeTable;
use toml::{Table, Value};
use wieldy::Level;
use wieldy::mistakes::{key_at, read_table};
use wieldy::name::{did_you_mean, hint_for_unknown_key, in_plain_words, near_misses};

use super::file::{FileConfig, FileSandbox};
use super::safe;

/// The prefix of all variables.
pub(super) const VARIABLE_PREFIX: &str = "WIELDY_";
/// The variable that names the file, and is no key of it.
pub(crate) const CONFIG_VARIABLE: &str = "WIELDY_CONFIG";

/// The key whose strictest value counts, in any layer.
const FLOOR: [&str; 2] = ["sandbox", "floor"];

/// The origin of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    Default,
    File(PathBuf),
    Environment(String),
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Environment(variable) => write!(f, "environment {variable}"),
            Self::Flag(flag) => write!(f, "flag {flag}"),
        }
    }
}

/// The advice for a file that came with the folder and cannot be read.
const UNTRUSTED_HINT: &str = "the names that this file hides and protects must be readable before a command runs: correct \
                              the file, or name another one with `--config FILE`";

/// A mistake in a configuration, with its place and a suggestion.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {message}")]
pub(crate) struct ConfigError {
    pub(crate) place: String,
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
    /// The keys concerned; an empty one means all keys.
    pub(crate) keys: Vec<String>,
}

/// All mistakes of a configuration.
#[derive(Debug, Default, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ConfigError::whole).collect::<Vec<_>>().join("\n"))]
pub(crate) struct Mistakes(pub(crate) Vec<ConfigError>);

impl ConfigError {
    /// Returns true if the mistake is about a key that counts without trust, or about no specific key.
    fn concerns_safe_list(&self) -> bool {
        self.keys.is_empty() || self.keys.iter().any(|key| safe::concerns(key))
    }

    /// Adds what to do if a file that came with the folder cannot be read at all.
    pub(super) fn of_untrusted_file(mut self) -> Self {
        if self.keys.iter().any(String::is_empty) {
            self.hint.get_or_insert_with(|| UNTRUSTED_HINT.to_owned());
        }
        self
    }

    /// Returns the mistake with the suggestion.
    pub(super) fn whole(&self) -> String {
        format!("{self}{}", self.hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default())
    }
}

impl Mistakes {
    /// Adds mistakes that are not in the list yet.
    pub(crate) fn add(&mut self, mistakes: impl IntoIterator<Item = ConfigError>) {
        for mistake in mistakes {
            if !self.0.contains(&mistake) {
                self.0.push(mistake);
            }
        }
    }

    /// Returns true if a mistake is about this key, a key below it, or all keys.
    pub(crate) fn concern(&self, key: &str) -> bool {
        let is_within = |other: &String| {
            other.is_empty() || other.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.0.iter().flat_map(|mistake| &mistake.keys).any(is_within)
    }
}

/// The ignored part of an untrusted file.
pub(super) struct Untrusted {
    /// The keys that are not on the safe list, with their values.
    pub(super) ignored: Vec<(Key, Value)>,
    pub(super) mistakes: Vec<ConfigError>,
    /// True if a mistake concerns the safe list. Mistakes only in other keys stop no command, because those keys are
    /// ignored.
    pub(super) are_serious: bool,
}

/// A key as its words: `["limits", "queue-timeout"]`.
pub(super) type Key = Vec<String>;

/// The layers merged so far.
#[derive(Debug, Clone)]
pub(crate) struct Layers {
    values: BTreeMap<Key, (Value, Origin)>,
    /// All existing keys, with their default values.
    defaults: Vec<(Key, Value)>,
}

impl Layers {
    pub(crate) fn new(defaults: &FileConfig) -> Self {
        let defaults = leaves(&table_of(defaults));
        let values = defaults.iter().map(|(key, value)| (key.clone(), (value.clone(), Origin::Default))).collect();
        // `log` alone is short for `log.level`. There may be more plans than those that are shipped.
        let short = (vec!["log".to_owned()], Value::String(String::new()));
        let plans = (vec!["plans".to_owned()], Value::Table(Table::new()));
        Self { values, defaults: [defaults, vec![short, plans]].concat() }
    }

    /// Puts a layer on top of the others.
    fn put(&mut self, config: &FileConfig, origin: &Origin) {
        for (key, value) in leaves(&table_of(config)) {
            if self.says_nothing(&key, &value) {
                continue;
            }
            // A later layer may only raise the floor.
            if key == FLOOR && self.values.get(&key).is_some_and(|(held, _)| is_stricter(held, &value)) {
                continue;
            }
            self.put_value(key, value, origin);
        }
    }

    fn put_value(&mut self, key: Key, value: Value, origin: &Origin) {
        // A table that was empty until now loses its own entry.
        self.values.retain(|other, _| !(key.len() > other.len() && key.starts_with(other)));
        self.values.insert(key, (value, origin.clone()));
    }

    /// Returns true for a section without a key. An empty plan of a new name does mean something: it has no limits.
    fn says_nothing(&self, key: &Key, value: &Value) -> bool {
        let is_known = || self.values.keys().any(|other| other.starts_with(key));
        value.as_table().is_some_and(Table::is_empty) && is_known()
    }

    /// Puts the readable part of a file's text on top. Returns every mistake with its line.
    #[must_use]
    pub(crate) fn put_file(&mut self, path: &Path, text: &str) -> Vec<ConfigError> {
        let (mut config, mistakes) = read_file(path, text);
        config.begin_paths_at(path.parent().unwrap_or(Path::new("")));
        self.put(&config, &Origin::File(path.to_owned()));
        mistakes
    }

    /// Puts only the keys of the safe list of an untrusted file on top. Returns the other keys with their values, and
    /// every mistake.
    pub(super) fn put_untrusted_file(&mut self, path: &Path, text: &str) -> Untrusted {
        let (mut config, mistakes) = read_file(path, text);
        config.begin_paths_at(path.parent().unwrap_or(Path::new("")));
        let mut ignored = Vec::new();
        for (key, value) in leaves(&table_of(&config)) {
            if self.says_nothing(&key, &value) {
                continue;
            }
            // One name outside the folder must not uncover those beside it.
            let (value, others) = safe::split_names(&key, value);
            ignored.extend(others.map(|others| (key.clone(), others)));
            match safe::allowed(&key, self.values.get(&key).map(|(held, _)| held), &value) {
                Some(value) => self.put_value(key, value, &Origin::File(path.to_owned())),
                None => ignored.push((key, value)),
            }
        }
        let are_serious = mistakes.iter().any(ConfigError::concerns_safe_list);
        Untrusted { ignored, mistakes, are_serious }
    }

    /// Puts only the floor of a file's text on top: it applies even if another file is used.
    #[must_use]
    pub(crate) fn put_floor_of_file(&mut self, path: &Path, text: &str) -> Vec<ConfigError> {
        let (config, mistakes) = read_file(path, text);
        let floor = config.sandbox.and_then(|sandbox| sandbox.floor);
        let sandbox = Some(FileSandbox { floor, ..FileSandbox::default() });
        self.put(&FileConfig { sandbox, ..FileConfig::default() }, &Origin::File(path.to_owned()));
        mistakes
    }

    /// Puts every `WIELDY_…` variable that names a key on top. Returns a warning for each that almost does, because it
    /// may be a typing error or belong to another program. Also returns every mistake.
    pub(crate) fn put_environment(&mut self, variables: &BTreeMap<String, String>) -> (Vec<String>, Vec<ConfigError>) {
        let keys: BTreeMap<String, (Key, Value)> =
            self.defaults.iter().map(|(key, default)| (variable_of(key), (key.clone(), default.clone()))).collect();
        let (mut warnings, mut mistakes) = (Vec::new(), Vec::new());
        let ours = |name: &str| name.starts_with(VARIABLE_PREFIX) && name != CONFIG_VARIABLE;
        for (variable, text) in variables.iter().filter(|(name, _)| ours(name)) {
            if let Some((key, default)) = keys.get(variable) {
                mistakes.extend(self.put_text(key, default, text, &Origin::Environment(variable.clone())).err());
                continue;
            }
            // Compare without the common prefix, which would make all variables look alike.
            let known = keys.keys().map(|known| &known[VARIABLE_PREFIX.len()..]);
            if let Some(near) = near_misses(&variable[VARIABLE_PREFIX.len()..], known).first() {
                let hint = format!("did you mean `{VARIABLE_PREFIX}{near}`?");
                warnings.push(format!("the environment variable `{variable}` sets no key; {hint}"));
            }
        }
        (warnings, mistakes)
    }

    /// Puts `KEY=VALUE` of `--set` on top.
    pub(crate) fn put_setting(&mut self, setting: &str) -> Result<(), ConfigError> {
        let wrong = |message: String, hint| ConfigError { place: "--set".into(), message, hint, keys: Vec::new() };
        let Some((name, text)) = setting.split_once('=') else {
            return Err(wrong(format!("`{setting}` is not KEY=VALUE"), None));
        };
        let known = self.defaults.iter().find(|(key, _)| key.join(".") == name).cloned();
        // The user chooses the keys of a table such as `timeouts.tools`.
        let within = || {
            let is_within = |(key, default): &&(Key, Value)| {
                default.is_table()
                    && name.strip_prefix(&key.join(".")).is_some_and(|rest| rest.len() > 1 && rest.starts_with('.'))
            };
            self.defaults.iter().find(is_within)?;
            Some((name.split('.').map(str::to_owned).collect(), Value::Boolean(false)))
        };
        let Some((key, default)) = known.or_else(within) else {
            let names: Vec<String> = self.defaults.iter().map(|(key, _)| key.join(".")).collect();
            let near = near_misses(name, names.iter().map(String::as_str));
            // Keys of one section all look alike, so only the nearest one is suggested.
            let hint = did_you_mean(&near[..near.len().min(1)]);
            return Err(ConfigError {
                keys: vec![name.to_owned()],
                ..wrong(format!("there is no key `{name}`"), hint)
            });
        };
        self.put_text(&key, &default, text, &Origin::Flag("--set".into()))
    }

    /// Puts one value, written as text, on top. Strings need no quotes, lists may use commas, all else is TOML.
    pub(crate) fn put_text(
        &mut self,
        key: &[String],
        default: &Value,
        text: &str,
        origin: &Origin,
    ) -> Result<(), ConfigError> {
        let as_text = || Value::String(text.to_owned());
        let value = match default {
            Value::String(_) => as_text(),
            Value::Array(_) if !text.trim_start().starts_with('[') => {
                let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
                Value::Array(words.map(|word| Value::String(word.to_owned())).collect())
            }
            // A value that is no TOML is read as a string, and the key's own check then refuses it with a better
            // message.
            _ => read_value(text).unwrap_or_else(as_text),
        };
        let read = |value: Value| {
            let table = |value, word: &String| Value::Table(Table::from_iter([(word.clone(), value)]));
            FileConfig::deserialize(key.iter().rev().fold(value, table))
        };
        // A value such as `true` may be meant as a string.
        let config = read(value).or_else(|error| read(as_text()).map_err(|_| error)).map_err(|error| {
            let place = match origin {
                Origin::Environment(variable) => format!("the environment variable `{variable}`"),
                Origin::Flag(flag) => flag.clone(),
                other => other.to_string(),
            };
            let message = format!("`{}`: {}", key.join("."), in_plain_words(error.message()));
            ConfigError { place, hint: hint_for_unknown_key(error.message()), message, keys: vec![key.join(".")] }
        })?;
        self.put(&config, origin);
        Ok(())
    }

    /// Puts the value of a flag with a key of its own on top.
    pub(crate) fn put_flag(&mut self, flag: &str, key: &str, text: &str) -> Result<(), ConfigError> {
        let key: Key = key.split('.').map(str::to_owned).collect();
        let known = self.defaults.iter().find(|(known, _)| *known == key);
        let default = known.map_or_else(|| Value::String(String::new()), |(_, default)| default.clone());
        self.put_text(&key, &default, text, &Origin::Flag(flag.to_owned()))
    }

    /// Returns every key with its value and origin.
    pub(crate) fn values(&self) -> impl Iterator<Item = (String, &Value, &Origin)> {
        self.values.iter().map(|(key, (value, origin))| (key.join("."), value, origin))
    }

    /// Returns all layers merged into one.
    pub(crate) fn merged(&self) -> FileConfig {
        let mut whole = Table::new();
        for (key, (value, _)) in &self.values {
            let (last, sections) = key.split_last().expect("a key has a word");
            let mut table = &mut whole;
            for section in sections {
                let inner = table.entry(section.clone()).or_insert_with(|| Value::Table(Table::new()));
                table = inner.as_table_mut().expect("a key is not also a section");
            }
            table.insert(last.clone(), value.clone());
        }
        FileConfig::deserialize(whole).expect("each layer was read as a configuration before")
    }
}

/// Returns true if the present floor is stricter than another one.
fn is_stricter(held: &Value, other: &Value) -> bool {
    let level = |value: &Value| value.as_str().and_then(|text| text.parse::<Level>().ok()).unwrap_or(Level::None);
    !level(other).is_at_least(level(held))
}

/// Returns the variable of a key: `limits.queue-timeout` is `WIELDY_LIMITS_QUEUE_TIMEOUT`.
fn variable_of(key: &[String]) -> String {
    format!("{VARIABLE_PREFIX}{}", key.join("_").replace('-', "_").to_uppercase())
}

fn read_value(text: &str) -> Option<Value> {
    let mut table: Table = toml::from_str(&format!("value = {text}")).ok()?;
    table.remove("value").filter(|_| table.is_empty())
}

fn table_of(config: &FileConfig) -> Table {
    Table::try_from(config).expect("a configuration is plain data")
}

/// Returns every value with its key. An empty table counts as a value, so that its key is known.
fn leaves(table: &Table) -> Vec<(Key, Value)> {
    let mut found = Vec::new();
    for (word, value) in table {
        match value {
            Value::Table(inner) if !inner.is_empty() => {
                let below = leaves(inner).into_iter();
                found.extend(below.map(|(key, value)| ([vec![word.clone()], key].concat(), value)));
            }
            value => found.push((vec![word.clone()], value.clone())),
        }
    }
    found
}

/// Returns the keys of a file's text whose values match. A text with mistakes has none.
pub(super) fn keys_in(text: &str, is_such: fn(&str, &Value) -> bool) -> Vec<String> {
    let config: FileConfig = toml::from_str(text).unwrap_or_default();
    let keys = leaves(&table_of(&config)).into_iter().map(|(key, value)| (key.join("."), value));
    keys.filter(|(key, value)| is_such(key, value)).map(|(key, _)| key).collect()
}

/// Reads as much of a file's text as possible, and returns all of its mistakes.
fn read_file(path: &Path, text: &str) -> (FileConfig, Vec<ConfigError>) {
    let (config, errors) = match DeTable::parse(text) {
        Ok(table) => read_table(table),
        Err(error) => (None, vec![error]),
    };
    let mut mistakes: Vec<ConfigError> = errors.iter().map(|error| mistake_in_file(path, text, error)).collect();
    if let (None, Some(last)) = (&config, mistakes.last_mut()) {
        last.keys = vec![String::new()];
    }
    (config.unwrap_or_default(), mistakes)
}

fn mistake_in_file(path: &Path, text: &str, error: &toml::de::Error) -> ConfigError {
    let offset = error.span().map(|span| span.start);
    let line = offset.map(|offset| text[..offset.min(text.len())].matches('\n').count() + 1);
    let place = match line {
        Some(line) => format!("{}:{line}", path.display()),
        None => path.display().to_string(),
    };
    let key = offset.and_then(|offset| key_at(DeTable::parse(text).ok()?.get_ref(), offset));
    let keys = key.iter().cloned().collect();
    let message = match (key, error.message()) {
        (Some(key), message) if message.starts_with("unknown field") => format!("there is no key `{key}`"),
        (Some(key), message) => format!("`{key}`: {}", in_plain_words(message)),
        (None, message) => in_plain_words(message),
    };
    ConfigError { place, message: message.trim_end().to_owned(), hint: hint_for_unknown_key(error.message()), keys }
}
