//! The section `log`: the levels, the format and the target of the log.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tracing::level_filters::LevelFilter;

use super::file::FileLog;
use super::sandbox::at_home;

/// The resolved section.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LogConfig {
    pub(crate) levels: Levels,
    pub(crate) format: LogFormat,
    /// The log file; `None` means standard error.
    pub(crate) file: Option<LogFileConfig>,
}

/// The file for the log.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LogFileConfig {
    pub(crate) path: PathBuf,
    pub(crate) rotate: Rotate,
    /// The number of files of a rotated log to keep; `None` means all.
    pub(crate) keep: Option<usize>,
}

impl LogConfig {
    /// Resolves the section; `home` replaces `~`. The error names the path that cannot be resolved.
    pub(super) fn resolve(file: FileLog, home: Option<&Path>) -> Result<Self, String> {
        const SET: &str = "the defaults have every key";
        let (path, rotate, keep) = (file.file.expect(SET), file.rotate.expect(SET), file.keep.expect(SET).0);
        let keep = usize::try_from(keep).ok().filter(|keep| *keep > 0);
        let path = if path.as_os_str().is_empty() { None } else { Some(at_home(&path, home)?) };
        Ok(Self {
            levels: file.level.expect(SET),
            format: file.format.expect(SET),
            file: path.map(|path| LogFileConfig { path, rotate, keep }),
        })
    }
}

/// The log levels: one for all targets, and those of targets with their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Levels {
    /// The level for all targets; `None` if only targets are named.
    pub(crate) all: Option<LevelFilter>,
    pub(crate) targets: Vec<(String, LevelFilter)>,
}

impl Levels {
    /// The level without any setting.
    pub(crate) const DEFAULT: LevelFilter = LevelFilter::WARN;
}

/// The names of the levels.
const LEVELS: &[&str] = &["off", "error", "warn", "info", "debug", "trace"];

impl FromStr for Levels {
    type Err = serde::de::value::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = |why: &str| {
            Err(Error::custom(format!("`{text}` {why}; write LEVEL, TARGET=LEVEL, or both: `warn,wieldy::call=info`")))
        };
        let level = |name: &str| {
            let known = Some(name).filter(|name| LEVELS.contains(name)).and_then(|name| name.parse().ok());
            known.ok_or_else(|| Error::unknown_variant(name, LEVELS))
        };
        let is_part_of_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | '-' | '.');
        let mut levels = Self { all: None, targets: Vec::new() };
        for part in text.split(',').map(str::trim) {
            match part.split_once('=') {
                Some((target, name)) if !target.is_empty() && target.chars().all(is_part_of_name) => {
                    levels.targets.push((target.to_owned(), level(name)?));
                }
                Some(_) => return wrong("names no target"),
                None if levels.all.is_some() => return wrong("has two levels for everything"),
                None if part.is_empty() => return wrong("has a level missing"),
                None => levels.all = Some(level(part)?),
            }
        }
        Ok(levels)
    }
}

impl fmt::Display for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.all.iter().map(LevelFilter::to_string);
        let targets = self.targets.iter().map(|(target, level)| format!("{target}={level}"));
        f.write_str(&all.chain(targets).collect::<Vec<_>>().join(","))
    }
}

impl Serialize for Levels {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Levels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// The format of the lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// The time to start a new file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Rotate {
    Never,
    Daily,
    Hourly,
}

/// The section as people write it: a table, or the level alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub(crate) struct FileLogOrLevel(pub(crate) FileLog);

impl<'de> Deserialize<'de> for FileLogOrLevel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LogVisitor;

        impl<'de> Visitor<'de> for LogVisitor {
            type Value = FileLogOrLevel;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a level such as `info`, or a section")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                let level = Some(text.parse().map_err(E::custom)?);
                Ok(FileLogOrLevel(FileLog { level, ..FileLog::default() }))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                FileLog::deserialize(MapAccessDeserializer::new(map)).map(FileLogOrLevel)
            }
        }

        deserializer.deserialize_any(LogVisitor)
    }
}
