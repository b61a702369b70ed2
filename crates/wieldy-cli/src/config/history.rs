//! The section `history`: the address, the durability and the retention of records.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wieldy::{Address, Durability, ResultRecording, Retention};

use super::file::FileHistory;
use super::value::Whole;

/// The resolved section.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HistoryConfig {
    /// The address of the history; `None` if there is no folder for it.
    pub(crate) address: Option<Address>,
    /// The password in the address, as it is written there.
    pub(crate) password: Option<String>,
    pub(crate) durability: Durability,
    /// The maximal age of records; `None` means no limit.
    pub(crate) age_max: Option<Duration>,
    /// The maximal size of the history in bytes; `None` means no limit.
    pub(crate) bytes_max: Option<u64>,
    /// The recorded part of results, and of the results of single tools.
    pub(crate) results: ResultRecording,
    pub(crate) results_of_tools: HashMap<String, ResultRecording>,
    /// The maximal age of recorded results; `None` means that of records.
    pub(crate) results_age_max: Option<Duration>,
}

impl HistoryConfig {
    /// Returns the limits of the history.
    pub(crate) fn retention(&self) -> Retention {
        Retention { age_max: self.age_max, bytes_max: self.bytes_max, results_age_max: self.results_age_max }
    }
}

/// The durability: which calls wait for their records to be on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FileDurability {
    Strict,
    Effects,
    Relaxed,
}

impl FileHistory {
    /// Returns the default: in the state folder, without a time limit.
    pub(super) fn defaults() -> Self {
        Self {
            url: Some(String::new()),
            durability: Some(FileDurability::Effects),
            keep_days: Some(Whole(0)),
            keep_bytes: Some(Whole(0)),
            results: Some(ResultRecording::Head),
            results_keep_days: Some(Whole(0)),
            tools: Some(BTreeMap::new()),
        }
    }
}

impl HistoryConfig {
    /// Resolves the section. The error says why the address is invalid.
    pub(super) fn resolve(file: FileHistory, state: &Path) -> Result<Self, String> {
        const SET: &str = "the defaults have every key";
        let url = file.url.expect(SET);
        let address = match url.as_str() {
            "" if state.as_os_str().is_empty() => None,
            "" => Some(Address::Sqlite(state.join("history.db"))),
            url => Some(address(url)?),
        };
        let age = |days: u64| (days > 0).then(|| Duration::from_secs(days * 24 * 60 * 60));
        let bytes = file.keep_bytes.expect(SET).0;
        Ok(Self {
            address,
            password: password(&url).map(str::to_owned),
            durability: match file.durability.expect(SET) {
                FileDurability::Strict => Durability::Strict,
                FileDurability::Effects => Durability::Effects,
                FileDurability::Relaxed => Durability::Relaxed,
            },
            age_max: age(file.keep_days.expect(SET).0),
            bytes_max: (bytes > 0).then_some(bytes),
            results: file.results.expect(SET),
            results_of_tools: file
                .tools
                .expect(SET)
                .into_iter()
                .filter_map(|(name, tool)| Some((name, tool.results?)))
                .collect(),
            results_age_max: age(file.results_keep_days.expect(SET).0),
        })
    }
}

/// Parses an address. SQLite's addresses for a database in memory are refused, because every call must be recorded.
pub(crate) fn address(url: &str) -> Result<Address, String> {
    let address = url.parse::<Address>().map_err(|error| error.to_string())?;
    match &address {
        Address::Sqlite(path) if path.as_os_str().is_empty() || path == Path::new(":memory:") => {
            Err("a history must have a file or a server".into())
        }
        _ => Ok(address),
    }
}

/// Makes a relative path in an address start at `folder`.
pub(super) fn begin_at(url: &mut String, folder: &Path) {
    let (scheme, path) = match url.strip_prefix("sqlite:") {
        Some(path) => ("sqlite:", path.trim_start_matches("//")),
        None => ("", url.as_str()),
    };
    let is_path = !path.is_empty() && path != ":memory:" && !path.contains("://") && Path::new(path).is_relative();
    if is_path {
        let whole: PathBuf = folder.join(path);
        *url = format!("{scheme}{}", whole.display());
    }
}

/// Returns the address without its password.
pub(super) fn shown(url: &str) -> String {
    match password(url) {
        Some(password) => url.replace(password, wieldy::REDACTED),
        None => url.to_owned(),
    }
}

/// Returns the password in an address: `postgres://user:PASSWORD@host/…`, or `…?password=PASSWORD`.
fn password(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once("://")?;
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let in_place = place.rsplit_once('@').and_then(|(who, _)| who.split_once(':')).map(|(_, password)| password);
    let in_query = || query.split('&').find_map(|pair| pair.strip_prefix("password="));
    in_place.or_else(in_query).filter(|password| !password.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_found_anywhere_in_the_address_and_hidden() {
        for (url, there) in [
            ("postgres://ada:s3cr@t/x@db.example/history", Some("s3cr@t/x")),
            ("postgres://ada@db.example/history?sslmode=require&password=hunter2", Some("hunter2")),
            ("postgres://ada@db.example:5432/history", None),
            ("postgres://ada:@db.example/history", None),
            ("/var/lib/a:b@c.db", None),
            ("", None),
        ] {
            assert_eq!(password(url), there, "{url}");
        }
        assert_eq!(shown("postgres://ada:hunter2@db.example/history"), "postgres://ada:[redacted]@db.example/history");
    }

    #[test]
    fn a_relative_file_begins_at_the_folder_and_a_server_does_not() {
        for (url, begun) in [
            ("a.db", "/etc/a.db"),
            ("sqlite:a.db", "sqlite:/etc/a.db"),
            ("sqlite:///var/a.db", "sqlite:///var/a.db"),
            ("/var/a.db", "/var/a.db"),
            ("postgres://db.example/history", "postgres://db.example/history"),
            ("", ""),
        ] {
            let mut text = url.to_owned();
            begin_at(&mut text, Path::new("/etc"));
            assert_eq!(text, begun, "{url}");
        }
    }

    #[test]
    fn an_address_without_a_place_is_refused() {
        for url in [":memory:", "sqlite::memory:"] {
            assert_eq!(address(url), Err("a history must have a file or a server".to_owned()), "{url}");
        }
        for url in ["sqlite:", "sqlite://"] {
            assert_eq!(address(url), Err("the address of the history is empty".to_owned()), "{url}");
        }
        assert_eq!(address("ftp://x"), Err("there are no histories at `ftp://`".to_owned()));
        assert_eq!(address("sqlite:/x/y.db"), Ok(Address::Sqlite("/x/y.db".into())));
    }
}
