//! Reads the server lists of other MCP clients. The clients' formats have little in common.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::settings::CONTAINERS;

/// A server as another client's configuration describes it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Imported {
    /// The name, changed to fit into tool names.
    pub name: String,
    /// The program, for a server over stdio.
    pub command: Option<String>,
    /// The arguments of the program.
    pub args: Vec<String>,
    /// Environment variables. `${NAME}` in a value stands for a variable of our environment.
    pub env: BTreeMap<String, String>,
    /// The working directory.
    pub cwd: Option<String>,
    /// The URL, for a server over HTTP.
    pub url: Option<String>,
    /// Headers of every request.
    pub headers: BTreeMap<String, String>,
    /// True if the file disables the server.
    pub disabled: bool,
    /// Notes on settings that could not be converted or that a person must check.
    pub notes: Vec<String>,
}

/// The reason why no servers could be read from a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// The file has no server list at any known place.
    #[error("it has none of `mcpServers`, `servers`, `context_servers`, `mcp` and `mcp_servers`")]
    NoServers,
    /// An entry is not a valid server.
    #[error("`{name}` is not a server: {why}")]
    NotAServer {
        /// The name in the file.
        name: String,
        /// The defect.
        why: &'static str,
    },
}

/// The paths of server lists in clients' files: Claude, Cursor, Windsurf, Cline, Gemini; VS Code; Zed; opencode; Codex.
const PLACES: [&[&str]; 6] =
    [&["mcpServers"], &["servers"], &["context_servers"], &["mcp", "servers"], &["mcp"], &["mcp_servers"]];

/// Reads the servers from a client's file, sorted by name.
pub fn servers(file: &Value) -> Result<Vec<Imported>, ImportError> {
    let place = |path: &&[&str]| path.iter().try_fold(file, |value, word| value.get(word)).and_then(Value::as_object);
    let found = PLACES.iter().find_map(place).ok_or(ImportError::NoServers)?;
    let mut servers = found.iter().map(|(name, server)| read(name, server)).collect::<Result<Vec<_>, _>>()?;
    servers.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(servers)
}

fn read(name: &str, server: &Value) -> Result<Imported, ImportError> {
    let wrong = |why| ImportError::NotAServer { name: name.to_owned(), why };
    let table = server.as_object().ok_or_else(|| wrong("it is not a table"))?;
    let mut imported = Imported { name: fit(name), ..Imported::default() };
    // Older versions of Zed nest the command and its settings one level deeper.
    let (command, own) = match table.get("command") {
        Some(Value::Object(inner)) => (inner.get("path").or_else(|| inner.get("command")), inner),
        command => (command, table),
    };
    match command {
        Some(Value::String(command)) => imported.command = Some(command.clone()),
        Some(Value::Array(words)) => {
            let mut words = texts(words).ok_or_else(|| wrong("a word of its `command` is not a text"))?;
            if words.is_empty() {
                return Err(wrong("its `command` is empty"));
            }
            imported.command = Some(words.remove(0));
            imported.args = words;
        }
        Some(_) => return Err(wrong("its `command` is not a text")),
        None => {}
    }
    if let Some(args) = own.get("args") {
        let args =
            args.as_array().and_then(|args| texts(args)).ok_or_else(|| wrong("its `args` are not a list of texts"))?;
        imported.args.extend(args);
    }
    for key in ["env", "environment"] {
        imported.env.extend(named(own, key).ok_or_else(|| wrong("its `env` is not a table of texts"))?);
    }
    for key in ["headers", "http_headers"] {
        imported.headers.extend(named(table, key).ok_or_else(|| wrong("its `headers` are not a table of texts"))?);
    }
    let text = |keys: &[&str]| keys.iter().find_map(|key| table.get(*key)?.as_str()).map(str::to_owned);
    imported.cwd = text(&["cwd"]);
    imported.url = text(&["url", "httpUrl", "serverUrl"]);
    if let Some(variable) = text(&["bearer_token_env_var"]) {
        imported.headers.insert("Authorization".into(), format!("Bearer ${{{variable}}}"));
    }
    let is = |key: &str| table.get(key).and_then(Value::as_bool);
    imported.disabled = is("disabled") == Some(true) || is("enabled") == Some(false);
    let is_old = |url: &String| url.trim_end_matches('/').ends_with("/sse");
    if text(&["type"]).is_some_and(|kind| kind == "sse") || imported.url.as_ref().is_some_and(is_old) {
        let note = "it uses the old transport HTTP+SSE, which wieldy does not speak: set `url` to its address for \
            streamable HTTP, often `/mcp` instead of `/sse`";
        imported.notes.push(note.into());
    }
    let command = imported.command.as_deref().map(|command| command.rsplit('/').next().unwrap_or(command));
    if let Some(command) = command.filter(|command| CONTAINERS.contains(command)) {
        imported
            .notes
            .push(format!("`{command}` needs its daemon, which no sandbox can reach: set `isolation = \"none\"`"));
    }
    match (&imported.command, &imported.url) {
        (None, None) => return Err(wrong("it has neither a `command` nor a `url`")),
        (Some(_), Some(_)) => return Err(wrong("it has both a `command` and a `url`")),
        _ => {}
    }
    imported.make_ours();
    Ok(imported)
}

impl Imported {
    /// Converts the placeholders in all values to our `${NAME}`.
    fn make_ours(&mut self) {
        let mut notes = Vec::new();
        let texts = self.args.iter_mut().chain(self.env.values_mut()).chain(self.headers.values_mut());
        for text in texts.chain(&mut self.command).chain(&mut self.cwd).chain(&mut self.url) {
            *text = ours(text, &mut notes);
        }
        self.notes.extend(notes);
    }
}

/// Converts `${env:NAME}` to `${NAME}`, and editors' folder placeholders to ours.
fn ours(text: &str, notes: &mut Vec<String>) -> String {
    let (mut written, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("${") {
        let Some((word, after)) = after.split_once('}') else { break };
        written.push_str(before);
        match word.split_once(':') {
            Some(("env", name)) => written.push_str(&format!("${{{name}}}")),
            Some((kind @ ("input" | "command" | "config"), what)) => {
                let name: String = what
                    .chars()
                    .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' })
                    .collect();
                notes.push(format!(
                    "only another program can fill in `${{{kind}:{what}}}`: set the variable `{name}` instead"
                ));
                written.push_str(&format!("${{{name}}}"));
            }
            _ => match word {
                "workspaceFolder" | "workspaceRoot" | "cwd" => written.push('.'),
                "userHome" => written.push_str("${HOME}"),
                name => written.push_str(&format!("${{{name}}}")),
            },
        }
        rest = after;
    }
    written + rest
}

/// Changes a server's name so that it fits into tool names.
fn fit(name: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    let fit: String = name.chars().map(allowed).take(32).collect();
    let mut fit = fit.trim_matches('_').to_owned();
    while fit.contains("__") {
        fit = fit.replace("__", "_");
    }
    if fit.is_empty() { "server".to_owned() } else { fit }
}

fn texts(words: &[Value]) -> Option<Vec<String>> {
    words.iter().map(|word| word.as_str().map(str::to_owned)).collect()
}

fn named(table: &Map<String, Value>, key: &str) -> Option<BTreeMap<String, String>> {
    let Some(named) = table.get(key).filter(|named| !named.is_null()) else { return Some(BTreeMap::new()) };
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(is) => Some(is.to_string()),
        _ => None,
    };
    named.as_object()?.iter().map(|(name, value)| Some((name.clone(), text(value)?))).collect()
}

/// Removes comments and trailing commas from JSON as editors accept it.
pub fn without_comments(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    let mut in_text = false;
    while let Some(character) = characters.next() {
        match character {
            '\\' if in_text => plain.extend([Some(character), characters.next()].into_iter().flatten()),
            '"' => {
                in_text = !in_text;
                plain.push('"');
            }
            '/' if !in_text && characters.peek() == Some(&'/') => {
                characters.by_ref().find(|next| *next == '\n');
                plain.push('\n');
            }
            '/' if !in_text && characters.peek() == Some(&'*') => {
                let mut last = ' ';
                characters.next();
                while let Some(next) = characters.next_if(|next| !(last == '*' && *next == '/')) {
                    last = next;
                }
                characters.next();
            }
            '}' | ']' if !in_text => {
                let end = plain.trim_end().len();
                if plain[..end].ends_with(',') {
                    plain.truncate(end - 1);
                }
                plain.push(character);
            }
            other => plain.push(other),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn one(file: Value) -> Imported {
        servers(&file).unwrap().remove(0)
    }

    #[test]
    fn the_files_of_the_common_clients_are_understood() {
        let git = Imported {
            name: "git".into(),
            command: Some("uvx".into()),
            args: vec!["mcp-server-git".into(), "--repository".into(), ".".into()],
            env: [("LEVEL".to_owned(), "3".to_owned()), ("TOKEN".to_owned(), "${GIT_TOKEN}".to_owned())].into(),
            ..Imported::default()
        };
        let flat = json!({"command": "uvx", "args": ["mcp-server-git", "--repository", "${workspaceFolder}"],
            "env": {"TOKEN": "${env:GIT_TOKEN}", "LEVEL": 3}});
        for place in ["mcpServers", "servers", "context_servers", "mcp_servers"] {
            assert_eq!(one(json!({ place: { "git": flat } })), git, "{place}");
        }
        assert_eq!(one(json!({"mcp": {"servers": {"git": flat}}})), git, "VS Code's settings");
        let zed = json!({"command": {"path": "uvx", "args": flat["args"], "env": flat["env"]}, "settings": {}});
        assert_eq!(one(json!({"context_servers": {"git": zed}})), git);
        let opencode = json!({"type": "local", "command": ["uvx", "mcp-server-git", "--repository", "."],
            "environment": {"TOKEN": "${GIT_TOKEN}", "LEVEL": "3"}, "enabled": true});
        assert_eq!(one(json!({"mcp": {"git": opencode}})), git);
    }

    #[test]
    fn servers_with_an_address_keep_their_headers() {
        let http = |url: &str, headers: &[(&str, &str)]| Imported {
            name: "hub".into(),
            url: Some(url.into()),
            headers: headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            ..Imported::default()
        };
        let cursor = json!({"mcpServers": {"hub": {"url": "https://a.test/mcp", "headers": {"X-Key": "${env:KEY}"}}}});
        assert_eq!(one(cursor), http("https://a.test/mcp", &[("X-Key", "${KEY}")]));
        let gemini = json!({"mcpServers": {"hub": {"httpUrl": "https://a.test/mcp"}}});
        assert_eq!(one(gemini), http("https://a.test/mcp", &[]));
        let codex = json!({"mcp_servers": {"hub": {"url": "https://a.test/mcp", "bearer_token_env_var": "HUB"}}});
        assert_eq!(one(codex), http("https://a.test/mcp", &[("Authorization", "Bearer ${HUB}")]));
        let old = one(json!({"mcpServers": {"hub": {"type": "sse", "url": "https://a.test/sse", "disabled": true}}}));
        assert_eq!((old.disabled, old.notes.len()), (true, 1));
        let docker =
            one(json!({"mcpServers": {"time": {"command": "/usr/bin/docker", "args": ["run", "-i", "mcp/time"]}}}));
        assert_eq!(docker.notes, ["`docker` needs its daemon, which no sandbox can reach: set `isolation = \"none\"`"]);
    }

    #[test]
    fn placeholders_of_other_programs_are_reported() {
        let server = one(json!({"servers": {"x y__z": {"command": "a", "args": ["--key", "${input:api-key}"]}}}));
        assert_eq!((server.name.as_str(), server.args[1].as_str()), ("x_y_z", "${API_KEY}"));
        assert_eq!(
            server.notes,
            ["only another program can fill in `${input:api-key}`: set the variable `API_KEY` instead"]
        );
    }

    #[test]
    fn an_invalid_server_is_an_error_with_its_name() {
        let error = |server: Value| servers(&json!({"mcpServers": {"x": server}})).unwrap_err().to_string();
        assert_eq!(error(json!({})), "`x` is not a server: it has neither a `command` nor a `url`");
        assert_eq!(
            error(json!({"command": "a", "url": "b"})),
            "`x` is not a server: it has both a `command` and a `url`"
        );
        assert_eq!(
            error(json!({"command": "a", "args": [1]})),
            "`x` is not a server: its `args` are not a list of texts"
        );
        assert_eq!(error(json!("a")), "`x` is not a server: it is not a table");
        assert_eq!(
            servers(&json!({"x": 1})).unwrap_err().to_string(),
            "it has none of `mcpServers`, `servers`, `context_servers`, `mcp` and `mcp_servers`"
        );
    }

    #[test]
    fn comments_and_trailing_commas_are_removed_outside_of_texts() {
        let text = "{ // one\n \"a\": \"// \\\" /* x */\", /* two\n */ \"b\": [1, 2, ], }";
        let read: Value = serde_json::from_str(&without_comments(text)).unwrap();
        assert_eq!(read, json!({"a": "// \" /* x */", "b": [1, 2]}));
        assert_eq!(without_comments("/* never ends"), "");
    }
}
