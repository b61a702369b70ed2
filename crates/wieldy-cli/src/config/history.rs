//! The section `history`: where calls are recorded, which of them wait for the disk, and how long records are kept.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wieldy::{Address, Durability};

use super::file::FileHistory;
use super::value::Whole;

/// The section, resolved.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HistoryConfig {
    /// Where the history is; none where there is no folder for it.
    pub(crate) address: Option<Address>,
    /// The password in the address, as it is written there.
    pub(crate) password: Option<String>,
    pub(crate) durability: Durability,
    /// How old records may become; none means that all are kept.
    pub(crate) age_max: Option<Duration>,
    /// How many bytes the history may take; none means that all are kept.
    pub(crate) bytes_max: Option<u64>,
}

/// Which calls wait for their records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FileDurability {
    Strict,
    Effects,
    Relaxed,
}

impl FileHistory {
    /// In the state folder, for ever.
    pub(super) fn defaults() -> Self {
        Self {
            url: Some(String::new()),
            durability: Some(FileDurability::Effects),
            keep_days: Some(Whole(0)),
            keep_bytes: Some(Whole(0)),
        }
    }
}

impl HistoryConfig {
    /// The section as it is used. The error says why the address is none.
    pub(super) fn resolve(file: FileHistory, state: &Path) -> Result<Self, String> {
        const SET: &str = "the defaults have every key";
        let url = file.url.expect(SET);
        let address = match url.as_str() {
            "" if state.as_os_str().is_empty() => None,
            "" => Some(Address::Sqlite(state.join("history.db"))),
            url => Some(address(url)?),
        };
        let days = file.keep_days.expect(SET).0;
        let bytes = file.keep_bytes.expect(SET).0;
        Ok(Self {
            address,
            password: password(&url).map(str::to_owned),
            durability: match file.durability.expect(SET) {
                FileDurability::Strict => Durability::Strict,
                FileDurability::Effects => Durability::Effects,
                FileDurability::Relaxed => Durability::Relaxed,
            },
            age_max: (days > 0).then(|| Duration::from_secs(days * 24 * 60 * 60)),
            bytes_max: (bytes > 0).then_some(bytes),
        })
    }
}

/// Reads an address. What SQLite takes for "nowhere" is refused: every call is recorded.
pub(crate) fn address(url: &str) -> Result<Address, String> {
    let address = url.parse::<Address>().map_err(|error| error.to_string())?;
    match &address {
        Address::Sqlite(path) if path.as_os_str().is_empty() || path == Path::new(":memory:") => {
            Err("a history must have a file or a server".into())
        }
        _ => Ok(address),
    }
}

/// The address with a relative path begun at `folder`.
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

/// The address as it may be shown.
pub(super) fn shown(url: &str) -> String {
    match password(url) {
        Some(password) => url.replace(password, wieldy::REDACTED),
        None => url.to_owned(),
    }
}

/// The password in an address: `postgres://user:PASSWORD@host/…`, or `…?password=PASSWORD`.
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
    fn a_password_is_found_wherever_it_stands_and_is_not_shown() {
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
    fn nowhere_is_no_address() {
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
