//! The history of this command: opened before any call runs, and closed after everything has ended.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::anyhow;
use wieldy::{Address, CallError, Code, JournalOptions, Store, StoreError, StoreJournal, TASK_TTL, Threads};

use crate::config::{Config, Environment, Origin, names_files};
use crate::exit::{Exit, Failure};

/// The number of runs of a tool from which its dynamic timeout is computed.
const RUNS_MAX: usize = 200;

/// The history with this command's calls. Dropping it writes the remaining records, which blocks.
pub(crate) struct History {
    pub(crate) store: Store,
    pub(crate) journal: Arc<StoreJournal>,
}

impl History {
    /// Opens the history, if it has an address. If that fails, nothing may run.
    pub(crate) fn open(config: &Config, tasks: Tasks) -> Result<Option<Self>, Failure> {
        let Some(address) = &config.history.address else { return Ok(None) };
        let open = || {
            let store = Store::open(address)?;
            let journal = Arc::new(store.journal(&journal_options(config, tasks))?);
            Ok(Self { store, journal })
        };
        open().map(Some).map_err(|error: StoreError| {
            let told = CallError::new(
                Code::JournalFailed,
                format!("nothing was run, because calls cannot be recorded: {error}"),
            );
            told.suggest(advice(&error, config)).into()
        })
    }

    /// Returns the durations of the last runs of all tools, including those of MCP servers.
    pub(crate) fn durations(&self, config: &Config) -> Result<HashMap<String, Vec<Duration>>, Failure> {
        self.store.durations(RUNS_MAX).map_err(|error| failed(error, config))
    }
}

impl Drop for History {
    fn drop(&mut self) {
        // Other owners, such as a sandbox in the middle of its cleanup, must not delay the last records.
        self.journal.close();
    }
}

/// Closes the history of a command that has ended. A command that lost its last records has failed, even if its calls
/// succeeded.
pub(crate) fn close(history: Option<History>, ended: Result<Exit, Failure>) -> Result<Exit, Failure> {
    let Some(history) = history else { return ended };
    history.journal.close();
    match (history.journal.lost(), ended) {
        (Some(error), Ok(_)) => {
            let told = CallError::new(Code::JournalFailed, format!("the calls could not be recorded: {}", error.0));
            Err(told.suggest("free disk space; the result above is valid, but it is not in the history").into())
        }
        (_, ended) => ended,
    }
}

/// The lifetime of the results of tasks after the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tasks {
    /// The results are dropped: no client can request them later.
    Forgotten,
    /// The results stay: clients request them from the next server, even after a crash.
    Kept,
}

/// Returns the options of the journal. Open calls of earlier processes are never run again here: the history may
/// contain those of other workspaces, with other tools.
pub(crate) fn journal_options(config: &Config, tasks: Tasks) -> JournalOptions {
    let retention = config.history.retention();
    let task_ttl = match tasks {
        Tasks::Forgotten => Duration::ZERO,
        Tasks::Kept => TASK_TTL,
    };
    JournalOptions { key: key(config), task_ttl, retention, ..JournalOptions::default() }
}

/// Returns the file of the key that signs the trail, or `None` if nothing is stored on disk.
pub(crate) fn key(config: &Config) -> Option<PathBuf> {
    (!config.state.as_os_str().is_empty()).then(|| config.state.join("audit.key"))
}

/// Returns the files of the history and of the threads, and the key of both.
pub(crate) fn files(config: &Config) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = key(config).into_iter().collect();
    for address in config.history.address.clone().into_iter().chain(threads_address(config)) {
        if let Address::Sqlite(path) = address {
            let beside = |ending: &str| {
                let mut name = path.clone().into_os_string();
                name.push(ending);
                PathBuf::from(name)
            };
            files.extend(["", "-wal", "-shm", ".instances"].map(beside));
        }
    }
    files
}

/// Returns the threads, if calls are recorded. Nothing is opened before they are used.
pub(crate) fn threads(config: &Config) -> Option<Threads> {
    Some(Threads::at(threads_address(config)?, key(config), config.thread_projects.clone()))
}

/// Returns the address of the threads: a file in the state folder, which no tool sees, or the server of the history.
fn threads_address(config: &Config) -> Option<Address> {
    match config.history.address.as_ref()? {
        Address::Sqlite(_) if !config.state.as_os_str().is_empty() => {
            Some(Address::Sqlite(config.state.join("threads.db")))
        }
        history => Some(history.of_threads()),
    }
}

/// Opens the history for reading: it must be configured and, if it is a file, exist.
pub(crate) fn existing(config: &Config) -> Result<Option<Store>, Failure> {
    let Some(address) = &config.history.address else {
        let told = anyhow!("there is no history: neither a state folder nor `history.url` is known");
        return Err(Failure::usage(told).hint("`--state DIR` names a folder"));
    };
    if let Address::Sqlite(path) = address
        && std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
    {
        return Ok(None);
    }
    Store::open(address).map(Some).map_err(|error| failed(error, config))
}

/// The hint if there is no history.
pub(crate) const WHERE_HISTORY_IS: &str =
    "it begins with the first call; `--state DIR` or the key `history.url` names another place";

/// Converts an error of the history.
pub(crate) fn failed(error: StoreError, config: &Config) -> Failure {
    match error {
        StoreError::Query(_) => {
            let hint = error.suggestion();
            Failure::usage(error).hint(hint)
        }
        error => {
            let hint = advice(&error, config);
            Failure::broken(error).hint(hint)
        }
    }
}

/// Returns the hint for an error of the history.
fn advice(error: &StoreError, config: &Config) -> String {
    let is_in_state = config.origin("history.url") == Some(&Origin::Default);
    let another = if is_in_state { "`--state DIR` names another folder" } else { "`history.url` names another place" };
    // The library's suggestion is for programs that try again; a command tries once.
    let advice = match error {
        StoreError::Unavailable(_) | StoreError::Full(_) => {
            "check that it can be reached and written, and that the disk has free space"
        }
        error => error.suggestion(),
    };
    format!("{advice}; {another}")
}

/// Redacts known secrets from all records and messages from now on.
pub(crate) fn hide_secrets(config: &Config, environment: &Environment) {
    for (name, value) in &environment.0 {
        if is_secret(name, value) {
            wieldy::redact::hide(value);
        }
    }
    for secret in config.serve.secrets() {
        wieldy::redact::hide(secret);
    }
    if let Some(password) = &config.history.password {
        wieldy::redact::hide(password);
        wieldy::redact::hide(&decoded(password));
    }
}

/// Returns true if a variable holds a secret, by its name. A short value or the path of a file is no secret.
pub(crate) fn is_secret(name: &str, value: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let ends = ["TOKEN", "_KEY", "APIKEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS", "_PAT"];
    let looks_secret = ends.iter().any(|end| name.ends_with(end))
        || ["PASSWORD_", "PASSWD_", "SECRET_", "TOKEN_"].iter().any(|part| name.contains(part));
    let value = value.trim();
    looks_secret && value.chars().count() >= 8 && !names_files(value)
}

/// Decodes percent-encoded characters, such as `%40`.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()).filter(|_| *first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_known_by_the_names_of_their_variables() {
        let long = "correct-horse-battery";
        for name in ["GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "api_key", "PGPASSWORD", "DB_PASSWORD_FILE_TEXT"] {
            assert!(is_secret(name, long), "{name}");
        }
        for (name, value) in
            [("PATH", long), ("KEYBOARD", long), ("MONKEY", long), ("A_TOKEN", "short"), ("A_KEY", "/usr/bin:/bin")]
        {
            assert!(!is_secret(name, value), "{name}");
        }
        assert!(is_secret("AWS_SECRET_ACCESS_KEY", "/nEK/wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLE"));
    }

    #[test]
    fn a_password_is_known_as_it_is_written_and_as_it_is() {
        assert_eq!(decoded("s3cr%40t%2Fx"), "s3cr@t/x");
        assert_eq!(decoded("100%"), "100%");
        assert_eq!(decoded("%zz%4"), "%zz%4");
    }
}
