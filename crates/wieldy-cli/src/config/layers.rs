//! The layers that a configuration is made of, weakest first, and where each value came from in the end.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};
use wieldy::Level;
use wieldy::name::{did_you_mean, hint_for_unknown_key, near_misses};

use super::file::{FileConfig, FileSandbox};

/// What the names of all variables begin with.
const VARIABLE_PREFIX: &str = "WIELDY_";
/// The variable that names the file, and is no key of it.
pub(crate) const CONFIG_VARIABLE: &str = "WIELDY_CONFIG";

/// The key whose strictest value counts, whatever layer it is in.
const FLOOR: [&str; 2] = ["sandbox", "floor"];

/// Where a value comes from.
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

/// What is wrong with a configuration, where, and what may have been meant.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {message}")]
pub(crate) struct ConfigError {
    pub(crate) place: String,
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
}

/// A key as its words: `["limits", "queue-timeout"]`.
type Key = Vec<String>;

/// All layers that were put on each other so far.
#[derive(Debug)]
pub(crate) struct Layers {
    values: BTreeMap<Key, (Value, Origin)>,
    /// The keys there are, with the values that hold by default.
    defaults: Vec<(Key, Value)>,
}

impl Layers {
    pub(crate) fn new(defaults: &FileConfig) -> Self {
        let defaults = leaves(&table_of(defaults));
        let values = defaults.iter().map(|(key, value)| (key.clone(), (value.clone(), Origin::Default))).collect();
        // `log` alone is a short way to write `log.level`.
        let short = (vec!["log".to_owned()], Value::String(String::new()));
        Self { values, defaults: [defaults, vec![short]].concat() }
    }

    /// Puts a layer on top of the others.
    fn put(&mut self, config: &FileConfig, origin: &Origin) {
        for (key, value) in leaves(&table_of(config)) {
            // A section without a key says nothing. A plan without one does: it has no limits.
            let is_known = |key: &Key| self.values.keys().any(|other| other.starts_with(key));
            if value.as_table().is_some_and(Table::is_empty) && is_known(&key) {
                continue;
            }
            // Whoever comes later may ask for more isolation and never allow less.
            if key == FLOOR && self.values.get(&key).is_some_and(|(held, _)| is_stricter(held, &value)) {
                continue;
            }
            // A table that had nothing in it now has.
            self.values.retain(|other, _| !(key.len() > other.len() && key.starts_with(other)));
            self.values.insert(key, (value, origin.clone()));
        }
    }

    /// Puts a file's text on top; every mistake is told with its line.
    pub(crate) fn put_file(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let mut config: FileConfig = toml::from_str(text).map_err(|error| mistake_in_file(path, text, &error))?;
        config.begin_paths_at(path.parent().unwrap_or(Path::new("")));
        self.put(&config, &Origin::File(path.to_owned()));
        Ok(())
    }

    /// Puts of a file's text only the floor on top: it holds even where another file counts.
    pub(crate) fn put_floor_of_file(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let config: FileConfig = toml::from_str(text).map_err(|error| mistake_in_file(path, text, &error))?;
        let floor = config.sandbox.and_then(|sandbox| sandbox.floor);
        let sandbox = Some(FileSandbox { floor, ..FileSandbox::default() });
        self.put(&FileConfig { sandbox, ..FileConfig::default() }, &Origin::File(path.to_owned()));
        Ok(())
    }

    /// Puts every `WIELDY_…` variable on top that names a key. Returns a warning for each that nearly does: it may be
    /// a mistake, or somebody else's variable.
    pub(crate) fn put_environment(&mut self, variables: &BTreeMap<String, String>) -> Result<Vec<String>, ConfigError> {
        let keys: BTreeMap<String, (Key, Value)> =
            self.defaults.iter().map(|(key, default)| (variable_of(key), (key.clone(), default.clone()))).collect();
        let mut warnings = Vec::new();
        let ours = |name: &str| name.starts_with(VARIABLE_PREFIX) && name != CONFIG_VARIABLE;
        for (variable, text) in variables.iter().filter(|(name, _)| ours(name)) {
            if let Some((key, default)) = keys.get(variable) {
                self.put_text(key, default, text, &Origin::Environment(variable.clone()))?;
                continue;
            }
            // What all variables have in common would make all of them look alike.
            let known = keys.keys().map(|known| &known[VARIABLE_PREFIX.len()..]);
            if let Some(near) = near_misses(&variable[VARIABLE_PREFIX.len()..], known).first() {
                let hint = format!("did you mean `{VARIABLE_PREFIX}{near}`?");
                warnings.push(format!("the environment variable `{variable}` sets no key; {hint}"));
            }
        }
        Ok(warnings)
    }

    /// Puts `KEY=VALUE` of `--set` on top.
    pub(crate) fn put_setting(&mut self, setting: &str) -> Result<(), ConfigError> {
        let wrong = |message: String, hint| ConfigError { place: "--set".into(), message, hint };
        let Some((name, text)) = setting.split_once('=') else {
            return Err(wrong(format!("`{setting}` is not KEY=VALUE"), None));
        };
        let known = self.defaults.iter().find(|(key, _)| key.join(".") == name).cloned();
        let Some((key, default)) = known else {
            let names: Vec<String> = self.defaults.iter().map(|(key, _)| key.join(".")).collect();
            let near = near_misses(name, names.iter().map(String::as_str));
            // Keys of one section all look alike, so only the nearest is worth a word.
            let hint = did_you_mean(&near[..near.len().min(1)]);
            return Err(wrong(format!("there is no key `{name}`"), hint));
        };
        self.put_text(&key, &default, text, &Origin::Flag("--set".into()))
    }

    /// Puts one value, written as text, on top. Texts are themselves, lists may be written with commas, all else is TOML.
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
            // What is not TOML is taken for a text, which the key's own check then refuses in its own words.
            _ => read_value(text).unwrap_or_else(as_text),
        };
        let nested =
            key.iter().rev().fold(value, |value, word| Value::Table(Table::from_iter([(word.clone(), value)])));
        let config = FileConfig::deserialize(nested).map_err(|error| {
            let place = match origin {
                Origin::Environment(variable) => format!("the environment variable `{variable}`"),
                Origin::Flag(flag) => flag.clone(),
                other => other.to_string(),
            };
            let message = format!("`{}`: {}", key.join("."), error.message());
            ConfigError { place, hint: hint_for_unknown_key(error.message()), message }
        })?;
        self.put(&config, origin);
        Ok(())
    }

    /// Puts the value of a flag on top that has a key of its own.
    pub(crate) fn put_flag(&mut self, flag: &str, key: &str, text: &str) -> Result<(), ConfigError> {
        let key: Key = key.split('.').map(str::to_owned).collect();
        let known = self.defaults.iter().find(|(known, _)| *known == key);
        let default = known.map_or_else(|| Value::String(String::new()), |(_, default)| default.clone());
        self.put_text(&key, &default, text, &Origin::Flag(flag.to_owned()))
    }

    /// Every key with its value and where it came from.
    pub(crate) fn values(&self) -> impl Iterator<Item = (String, &Value, &Origin)> {
        self.values.iter().map(|(key, (value, origin))| (key.join("."), value, origin))
    }

    /// The layers as one.
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

/// Whether a floor that holds is stricter than another one.
fn is_stricter(held: &Value, other: &Value) -> bool {
    let level = |value: &Value| value.as_str().and_then(|text| text.parse::<Level>().ok()).unwrap_or(Level::None);
    !level(other).is_at_least(level(held))
}

/// `limits.queue-timeout` is `WIELDY_LIMITS_QUEUE_TIMEOUT`.
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

/// Every value with its key; a table without any counts as a value, so that it has a name to be set by.
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

fn mistake_in_file(path: &Path, text: &str, error: &toml::de::Error) -> ConfigError {
    let offset = error.span().map(|span| span.start);
    let line = offset.map(|offset| text[..offset.min(text.len())].matches('\n').count() + 1);
    let place = match line {
        Some(line) => format!("{}:{line}", path.display()),
        None => path.display().to_string(),
    };
    let key = offset.and_then(|offset| key_at(DeTable::parse(text).ok()?.get_ref(), offset));
    let message = match (key, error.message()) {
        (Some(key), message) if message.starts_with("unknown field") => format!("there is no key `{key}`"),
        (Some(key), message) => format!("`{key}`: {message}"),
        (None, message) => message.to_owned(),
    };
    ConfigError { place, message: message.trim_end().to_owned(), hint: hint_for_unknown_key(error.message()) }
}

/// The name of the key whose own place, or whose value's, has this offset in the text.
fn key_at(table: &DeTable<'_>, offset: usize) -> Option<String> {
    table.iter().find_map(|(word, value)| {
        let below = match value.get_ref() {
            DeValue::Table(inner) => key_at(inner, offset),
            DeValue::Array(items) => {
                items.iter().filter_map(|item| item.get_ref().as_table()).find_map(|item| key_at(item, offset))
            }
            _ => None,
        };
        let here = word.span().contains(&offset) || value.span().contains(&offset);
        match below {
            Some(below) => Some(format!("{}.{below}", word.get_ref())),
            None => here.then(|| word.get_ref().to_string()),
        }
    })
}
