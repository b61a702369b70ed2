//! Pinned tool definitions: the definitions of each server's tools that were agreed to, in a file. Pins detect servers
//! that change their tools later, and tell the tools of servers that do not run.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

use super::tool_definition::ToolDefinition;

/// Maximum size of the file.
const BYTES_MAX: u64 = 64 * 1024 * 1024;

/// The pinned definitions. Several processes may use the same file.
#[derive(Debug, Default)]
pub struct Pins {
    /// `None` means in memory only.
    path: Option<PathBuf>,
    servers: Mutex<BTreeMap<String, PinnedServer>>,
}

/// The pinned state of one server.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PinnedServer {
    /// The MCP revision that the server last spoke.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// True if the server did not come up when it was last started.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
    /// The tools, by the server's own names.
    #[serde(default)]
    pub tools: BTreeMap<String, PinnedTool>,
}

/// A pinned tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PinnedTool {
    /// The hash of the definition.
    pub hash: String,
    /// True if the server's last tool list had the tool.
    pub listed: bool,
    /// The definition that was agreed to.
    pub definition: ToolDefinition,
}

/// The contents of the file.
#[derive(Serialize, Deserialize)]
struct PinsFile {
    version: u32,
    servers: BTreeMap<String, PinnedServer>,
}

const VERSION: u32 = 1;

/// The reason why pins could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("the pinned definitions in `{path}` cannot be {doing}")]
pub struct PinsError {
    path: PathBuf,
    doing: &'static str,
    #[source]
    source: io::Error,
}

impl Pins {
    /// Opens the pins of a file. The file need not exist yet.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, PinsError> {
        let path = path.into();
        let servers = read(&path).map_err(|source| PinsError { path: path.clone(), doing: "read", source })?;
        Ok(Self { path: Some(path), servers: Mutex::new(servers) })
    }

    /// Returns the pinned state of a server.
    pub fn server(&self, name: &str) -> PinnedServer {
        self.lock().get(name).cloned().unwrap_or_default()
    }

    /// Changes the pinned state of a server, in memory and in the file. Changes that other processes wrote meanwhile
    /// are preserved.
    ///
    /// If the file is unusable, the state in memory is changed all the same. Otherwise a later comparison would miss
    /// definitions that were already pinned.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut PinnedServer)) -> Result<(), PinsError> {
        let mut servers = self.lock();
        let Some(path) = &self.path else {
            change(servers.entry(name.to_owned()).or_default());
            return Ok(());
        };
        let alone = locked(path).and_then(|alone| {
            *servers = read(path)?;
            Ok(alone)
        });
        let before = servers.get(name).cloned();
        let server = servers.entry(name.to_owned()).or_default();
        change(server);
        let is_same = before.as_ref() == Some(server);
        let written = alone.and_then(|_alone| if is_same { Ok(()) } else { write(path, &servers) });
        written.map_err(|source| PinsError { path: path.clone(), doing: "written", source })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, PinnedServer>> {
        self.servers.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl PinnedTool {
    /// Pins a definition.
    pub fn of(definition: ToolDefinition) -> Self {
        Self { hash: definition.hash(), listed: true, definition }
    }
}

/// Locks out other processes until the returned file is dropped.
fn locked(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let lock = File::create(path.with_extension("lock"))?;
    lock.lock()?;
    Ok(lock)
}

fn read(path: &Path) -> io::Result<BTreeMap<String, PinnedServer>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    if file.metadata()?.len() > BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("the file is larger than {BYTES_MAX} bytes")));
    }
    let written: PinsFile = serde_json::from_reader(io::BufReader::new(file))?;
    if written.version != VERSION {
        let told = format!("the file has version {}, and this program knows {VERSION}", written.version);
        return Err(io::Error::new(io::ErrorKind::InvalidData, told));
    }
    Ok(written.servers)
}

/// Writes the file atomically.
fn write(path: &Path, servers: &BTreeMap<String, PinnedServer>) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = io::BufWriter::new(File::create(&new)?);
    serde_json::to_writer_pretty(&mut file, &PinsFile { version: VERSION, servers: servers.clone() })?;
    file.write_all(b"\n")?;
    file.into_inner()?.sync_all()?;
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tool(name: &str) -> PinnedTool {
        let told = json!({"name": name, "inputSchema": {"type": "object"}});
        PinnedTool::of(serde_json::from_value(told).unwrap())
    }

    fn add(pins: &Pins, server: &str, name: &str) {
        pins.change(server, |server| drop(server.tools.insert(name.to_owned(), tool(name)))).unwrap();
    }

    #[test]
    fn two_processes_do_not_lose_each_others_pins() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mcp/pins.json");
        let (one, other) = (Pins::open(&path).unwrap(), Pins::open(&path).unwrap());
        add(&one, "git", "log");
        add(&other, "time", "now");
        add(&one, "git", "status");
        let read = Pins::open(&path).unwrap();
        assert_eq!(
            read.server("git").tools,
            BTreeMap::from([("log".into(), tool("log")), ("status".into(), tool("status"))])
        );
        assert_eq!(read.server("time").tools, BTreeMap::from([("now".into(), tool("now"))]));
        assert_eq!(read.server("none"), PinnedServer::default());
    }

    #[test]
    fn a_damaged_or_newer_file_is_an_error_and_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pins.json");
        for text in ["{", r#"{"version": 2, "servers": {}}"#] {
            fs::write(&path, text).unwrap();
            let error = Pins::open(&path).unwrap_err();
            assert_eq!(error.to_string(), format!("the pinned definitions in `{}` cannot be read", path.display()));
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
    }

    #[test]
    fn an_unusable_file_does_not_lose_pins_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pins.json");
        let pins = Pins::open(&path).unwrap();
        add(&pins, "git", "log");
        // The file is damaged while we run. Then a directory takes the place of the lock file.
        for broken in ["pins.json", "pins.lock"] {
            fs::write(folder.path().join("pins.json"), "{").unwrap();
            if broken == "pins.lock" {
                fs::remove_file(folder.path().join(broken)).unwrap();
                fs::create_dir(folder.path().join(broken)).unwrap();
            }
            let mut known = Vec::new();
            let told = pins.change("git", |server| known.extend(server.tools.keys().cloned())).unwrap_err();
            assert_eq!(told.to_string(), format!("the pinned definitions in `{}` cannot be written", path.display()));
            assert_eq!(known, ["log"], "{broken}");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "{", "it stays as it is");
    }

    #[test]
    fn without_a_file_pins_are_kept_in_memory() {
        let pins = Pins::default();
        add(&pins, "git", "log");
        assert_eq!(pins.server("git").tools.len(), 1);
    }
}
