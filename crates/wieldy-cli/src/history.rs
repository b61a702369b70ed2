//! The history of this command: opened before anything runs, and closed after everything has ended.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::anyhow;
use wieldy::{Address, CallError, Code, JournalOptions, Retention, Store, StoreError, StoreJournal, TASK_TTL};

use crate::config::{Config, Environment, Origin, names_files};
use crate::exit::{Exit, Failure};

/// How many runs of a tool the clock that follows them looks at.
const RUNS_MAX: usize = 200;

/// Where this command's calls are recorded. Dropping it writes what is left, which blocks.
pub(crate) struct History {
    pub(crate) store: Store,
    pub(crate) journal: Arc<StoreJournal>,
}

impl History {
    /// Opens the history, if there is a place for one. Where there is and it cannot be used, nothing may run.
    pub(crate) fn open(config: &Config, tasks: Tasks) -> Result<Option<Self>, Failure> {
        let Some(address) = &config.history.address else { return Ok(None) };
        let open = || {
            let store = Store::open(address)?;
            let journal = Arc::new(store.journal(&journal_options(config, tasks))?);
            Ok(Self { store, journal })
        };
        open().map(Some).map_err(|error: StoreError| {
            let told =
                CallError::new(Code::JournalFailed, format!("nothing was run, as it could not be recorded: {error}"));
            told.suggest(advice(&error, config)).into()
        })
    }

    /// How long the last runs of all tools took, those of MCP servers included.
    pub(crate) fn durations(&self, config: &Config) -> Result<HashMap<String, Vec<Duration>>, Failure> {
        self.store.durations(RUNS_MAX).map_err(|error| failed(error, config))
    }
}

impl Drop for History {
    fn drop(&mut self) {
        // Whoever else still holds it, such as a sandbox that is being taken away, must not keep the last records.
        self.journal.close();
    }
}

/// Closes the history of a command that is over. A command whose last records are lost has failed, however its calls ended.
pub(crate) fn close(history: Option<History>, ended: Result<Exit, Failure>) -> Result<Exit, Failure> {
    let Some(history) = history else { return ended };
    history.journal.close();
    match (history.journal.lost(), ended) {
        (Some(error), Ok(_)) => {
            let told = CallError::new(Code::JournalFailed, format!("what ran could not be recorded: {}", error.0));
            Err(told
                .suggest("see that the disk has room; the answer above is true, but it is not in the history")
                .into())
        }
        (_, ended) => ended,
    }
}

/// What becomes of the results of tasks when the command is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tasks {
    /// Nobody can ask for them then.
    Forgotten,
    /// Clients ask the next server for them, however the last one ended.
    Kept,
}

/// How the journal is kept. What was left open is never run again here: the history may be that of other workspaces too, with
/// other tools.
pub(crate) fn journal_options(config: &Config, tasks: Tasks) -> JournalOptions {
    let retention = Retention { age_max: config.history.age_max, bytes_max: config.history.bytes_max };
    let task_ttl = match tasks {
        Tasks::Forgotten => Duration::ZERO,
        Tasks::Kept => TASK_TTL,
    };
    JournalOptions { key: key(config), task_ttl, retention, ..JournalOptions::default() }
}

/// Where the key is that the trail is signed with; none where nothing is kept on disk.
pub(crate) fn key(config: &Config) -> Option<PathBuf> {
    (!config.state.as_os_str().is_empty()).then(|| config.state.join("audit.key"))
}

/// The files that the history is made of, and its key.
pub(crate) fn files(config: &Config) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = key(config).into_iter().collect();
    if let Some(Address::Sqlite(path)) = &config.history.address {
        let beside = |ending: &str| {
            let mut name = path.clone().into_os_string();
            name.push(ending);
            PathBuf::from(name)
        };
        files.extend(["", "-wal", "-shm", ".instances"].map(beside));
    }
    files
}

/// The history, to look at: it must be configured and, if it is a file, be there.
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

/// What to do where there is no history.
pub(crate) const WHERE_HISTORY_IS: &str =
    "it begins with the first call; `--state DIR` or the key `history.url` names another place";

/// What the history did not let us do.
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

/// What can be done about it.
fn advice(error: &StoreError, config: &Config) -> String {
    let is_in_state = config.origin("history.url") == Some(&Origin::Default);
    let another = if is_in_state { "`--state DIR` names another folder" } else { "`history.url` names another place" };
    // A command tries once.
    let advice = match error {
        StoreError::Unavailable(_) | StoreError::Full(_) => {
            "see that it can be reached and written to, and that the disk has room"
        }
        error => error.suggestion(),
    };
    format!("{advice}; {another}")
}

/// Takes what is known to be secret out of everything that is written down or shown from now on.
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

/// Whether a variable holds a secret, by its name; a short value or the name of a file is none.
pub(crate) fn is_secret(name: &str, value: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let ends = ["TOKEN", "_KEY", "APIKEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS", "_PAT"];
    let looks_secret = ends.iter().any(|end| name.ends_with(end))
        || ["PASSWORD_", "PASSWD_", "SECRET_", "TOKEN_"].iter().any(|part| name.contains(part));
    let value = value.trim();
    looks_secret && value.chars().count() >= 8 && !names_files(value)
}

/// A text with `%40` and its like read as the characters they stand for.
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
