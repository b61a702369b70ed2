//! The layers that a configuration is made of, weakest first, and where each value came from in the end.

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

/// What the names of all variables begin with.
pub(super) const VARIABLE_PREFIX: &str = "WIELDY_";
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
    /// The keys that it is about; an empty one stands for all keys.
    pub(crate) keys: Vec<String>,
}

/// Everything that is wrong with a configuration.
#[derive(Debug, Default, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ConfigError::whole).collect::<Vec<_>>().join("\n"))]
pub(crate) struct Mistakes(pub(crate) Vec<ConfigError>);

impl ConfigError {
    /// Returns true if the mistake is about a key that counts without trust, or about no certain key.
    fn concerns_safe_list(&self) -> bool {
        self.keys.is_empty() || self.keys.iter().any(|key| safe::concerns(key))
    }

    /// The mistake with what may have been meant.
    pub(super) fn whole(&self) -> String {
        format!("{self}{}", self.hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default())
    }
}

impl Mistakes {
    /// Adds mistakes that were not told yet.
    pub(crate) fn add(&mut self, mistakes: impl IntoIterator<Item = ConfigError>) {
        for mistake in mistakes {
            if !self.0.contains(&mistake) {
                self.0.push(mistake);
            }
        }
    }

    /// Returns true if a mistake is about this key, a key below it, or everything.
    pub(crate) fn concern(&self, key: &str) -> bool {
        let is_within = |other: &String| {
            other.is_empty() || other.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.0.iter().flat_map(|mistake| &mistake.keys).any(is_within)
    }
}

/// The part of an untrusted file that does not count.
pub(super) struct Untrusted {
    /// The keys that are not on the safe list, with their values.
    pub(super) ignored: Vec<(Key, Value)>,
    pub(super) mistakes: Vec<ConfigError>,
    /// Whether a mistake concerns the safe list. Mistakes in other keys alone stop no command, as those keys do not count.
    pub(super) are_serious: bool,
}

/// A key as its words: `["limits", "queue-timeout"]`.
pub(super) type Key = Vec<String>;

/// All layers that were put on each other so far.
#[derive(Debug, Clone)]
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
            if self.says_nothing(&key, &value) {
                continue;
            }
            // Whoever comes later may ask for more isolation and never allow less.
            if key == FLOOR && self.values.get(&key).is_some_and(|(held, _)| is_stricter(held, &value)) {
                continue;
            }
            self.put_value(key, value, origin);
        }
    }

    fn put_value(&mut self, key: Key, value: Value, origin: &Origin) {
        // A table that had nothing in it now has.
        self.values.retain(|other, _| !(key.len() > other.len() && key.starts_with(other)));
        self.values.insert(key, (value, origin.clone()));
    }

    /// Returns true for a section without a key. A plan without one says something: it has no limits.
    fn says_nothing(&self, key: &Key, value: &Value) -> bool {
        let is_known = || self.values.keys().any(|other| other.starts_with(key));
        value.as_table().is_some_and(Table::is_empty) && is_known()
    }

    /// Puts a file's text on top, as far as it can be read. Returns every mistake with its line.
    #[must_use]
    pub(crate) fn put_file(&mut self, path: &Path, text: &str) -> Vec<ConfigError> {
        let (mut config, mistakes) = read_file(path, text);
        config.begin_paths_at(path.parent().unwrap_or(Path::new("")));
        self.put(&config, &Origin::File(path.to_owned()));
        mistakes
    }

    /// Puts of an untrusted file's text only the keys of the safe list on top. Returns the others with their values, and
    /// every mistake.
    pub(super) fn put_untrusted_file(&mut self, path: &Path, text: &str) -> Untrusted {
        let (mut config, mistakes) = read_file(path, text);
        config.begin_paths_at(path.parent().unwrap_or(Path::new("")));
        let mut ignored = Vec::new();
        for (key, value) in leaves(&table_of(&config)) {
            if self.says_nothing(&key, &value) {
                continue;
            }
            match safe::allowed(&key, self.values.get(&key).map(|(held, _)| held), &value) {
                Some(value) => self.put_value(key, value, &Origin::File(path.to_owned())),
                None => ignored.push((key, value)),
            }
        }
        let are_serious = mistakes.iter().any(ConfigError::concerns_safe_list);
        Untrusted { ignored, mistakes, are_serious }
    }

    /// Puts of a file's text only the floor on top: it holds even where another file counts.
    #[must_use]
    pub(crate) fn put_floor_of_file(&mut self, path: &Path, text: &str) -> Vec<ConfigError> {
        let (config, mistakes) = read_file(path, text);
        let floor = config.sandbox.and_then(|sandbox| sandbox.floor);
        let sandbox = Some(FileSandbox { floor, ..FileSandbox::default() });
        self.put(&FileConfig { sandbox, ..FileConfig::default() }, &Origin::File(path.to_owned()));
        mistakes
    }

    /// Puts every `WIELDY_…` variable on top that names a key. Returns a warning for each that nearly does: it may be
    /// a mistake, or somebody else's variable. Returns every mistake too.
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
            // What all variables have in common would make all of them look alike.
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
        // A table such as `timeouts.tools` has keys that somebody else chose.
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
            // Keys of one section all look alike, so only the nearest is worth a word.
            let hint = did_you_mean(&near[..near.len().min(1)]);
            return Err(ConfigError {
                keys: vec![name.to_owned()],
                ..wrong(format!("there is no key `{name}`"), hint)
            });
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
        let read = |value: Value| {
            let table = |value, word: &String| Value::Table(Table::from_iter([(word.clone(), value)]));
            FileConfig::deserialize(key.iter().rev().fold(value, table))
        };
        // A text such as `true` may be meant as a text.
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

/// The keys of a file's text whose values are such. A text with mistakes in it has none.
pub(super) fn keys_in(text: &str, is_such: fn(&str, &Value) -> bool) -> Vec<String> {
    let config: FileConfig = toml::from_str(text).unwrap_or_default();
    let keys = leaves(&table_of(&config)).into_iter().map(|(key, value)| (key.join("."), value));
    keys.filter(|(key, value)| is_such(key, value)).map(|(key, _)| key).collect()
}

/// Reads what can be read of a file's text, and finds everything that is wrong with it.
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
