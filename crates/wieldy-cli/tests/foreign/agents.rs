//! Agents of other projects with the tools of wieldy: tests the text that reaches the model, because each client reads
//! answers in its own way.
//!
//! The clients are real; only the model is scripted (`model.py`). None of them can reach more than the loopback.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use regex::Regex;
use serde_json::{Map, Value, json};

use crate::world::World;

const SERVER: &str = r#"
[mcp]
list-wait = "60s"

[mcp.servers.everything]
command = "[programs]/bin/node"
args = ["[programs]/npm/node_modules/@modelcontextprotocol/server-everything/dist/index.js", "stdio"]
isolation = "native"
env = { WIELDY_TEST_WORLD = "${WIELDY_TEST_WORLD}" }
"#;

const TOOLS: &str = r#"
[[tool]]
name = "ask"
description = "Wants to be confirmed"
command = ["echo", "it ran"]
confirm = true

[[tool]]
name = "weather"
description = "Tells the weather"
command = ["echo", "sunny in {city}"]
[tool.input-schema]
type = "object"
properties.city = { type = "string" }
required = ["city"]

[[tool]]
name = "broken"
description = "Fails half-way"
command = ["sh", "-c", "echo half; exit 4"]

[[tool]]
name = "figures"
description = "Tells figures"
command = ["echo", '{{"a": 1, "b": [2, 3]}}']
output = "json"
[tool.output-schema]
type = "object"
properties.a = { type = "integer" }
"#;

/// A command with long output, of which a result contains the first and the last lines.
const LARGE: &str = "seq 20000";

/// Returns the calls that the model makes, and the text that it must get. `None`: the test checks the answer itself.
fn script() -> Vec<(&'static str, &'static str, Value, Option<&'static str>)> {
    let failing = "echo before; echo worse >&2; exit 3";
    vec![
        ("bash", "Bash", json!({"command": "echo 42"}), Some("42")),
        (
            "failed",
            "Bash",
            json!({"command": failing}),
            Some("Error E3108 NONZERO_EXIT: `bash` ended with exit code 3\nOutput so far:\nbefore\nworse"),
        ),
        ("large", "Bash", json!({"command": LARGE}), None),
        ("read", "Read", json!({"path": "note.txt"}), Some("hello\nfoo bar")),
        (
            "missing",
            "Read",
            json!({"path": "missing.txt"}),
            Some(
                "Error E3302 FILE_NOT_FOUND: there is no `missing.txt`\n\
                 Suggestion: look for it with `Glob`, such as `**/name*`, or with `List`",
            ),
        ),
        ("large_read", "Read", json!({"path": "large.txt"}), None),
        ("empty", "Read", json!({"path": "empty.txt"}), Some("(empty)")),
        ("search", "Search", json!({"pattern": "bar"}), Some("note.txt:2:foo bar")),
        (
            "failed_search",
            "Search",
            json!({"pattern": "("}),
            Some(
                "Error E3303 INVALID_INPUT: the pattern is not a regular expression: regex parse error:\n    (\n    ^\n\
                 error: unclosed group\n\
                 Suggestion: escape special characters with a backslash, such as `\\(`, or set `literal`",
            ),
        ),
        (
            "edit",
            "Edit",
            json!({"path": "note.txt", "old": "foo", "new": "baz"}),
            Some(
                "edited `note.txt`, replaced once\n\n--- note.txt\n+++ note.txt\n@@ -1,2 +1,2 @@\n \
                 hello\n-foo bar\n+baz bar",
            ),
        ),
        (
            "failed_edit",
            "Edit",
            json!({"path": "note.txt", "old": "absent", "new": "x"}),
            Some(
                "Error E3303 INVALID_INPUT: the old text does not occur in `note.txt`\n\
                 Suggestion: read the file and copy the text exactly, white space included",
            ),
        ),
        (
            "broken",
            "broken",
            json!({}),
            Some("Error E3108 NONZERO_EXIT: `sh` ended with exit code 4\nOutput so far:\nhalf"),
        ),
        ("weather", "weather", json!({"city": "Oslo"}), Some("sunny in Oslo")),
        ("figures", "figures", json!({}), None),
        ("ask", "ask", json!({}), None),
        ("echo", "everything__echo", json!({"message": "hi there"}), Some("Echo: hi there")),
        (
            "failed_upstream",
            "everything__get-resource-reference",
            json!({"resourceId": -1}),
            Some("Invalid resourceId: -1. Must be a finite positive integer."),
        ),
        ("structured", "everything__get-structured-content", json!({"location": "New York"}), None),
        ("image", "everything__get-tiny-image", json!({}), None),
    ]
}

#[test]
fn claude_code() {
    let Some(agent) = Agent::new() else { return };
    let program = agent.world.program("npm/node_modules/@anthropic-ai/claude-code-linux-x64/claude");
    let Some(program) = installed(&program) else { return };
    let servers = json!({"mcpServers": {"wieldy": {"type": "stdio", "command": Agent::WIELDY, "args": ["mcp"]}}});
    let mut claude = agent.client(program);
    claude.env("ANTHROPIC_BASE_URL", &agent.host).env("ANTHROPIC_API_KEY", "none").env("IS_SANDBOX", "1");
    for off in [
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        "DISABLE_TELEMETRY",
        "DISABLE_AUTOUPDATER",
        "DISABLE_ERROR_REPORTING",
    ] {
        claude.env(off, "1");
    }
    // Otherwise the model would have to search for the tools of servers first.
    claude.env("ENABLE_TOOL_SEARCH", "false");
    claude.args(["-p", "go", "--strict-mcp-config", "--permission-mode", "bypassPermissions", "--mcp-config"]);
    claude.arg(servers.to_string());
    let seen = agent.run(&mut claude);
    // Claude Code puts longer outputs into a file as JSON, and the model gets their beginning and the path.
    assert!(seen.text("large").contains(r"`pattern`]\n1\n2\n3\n"), "{}", seen.text("large"));
    assert!(seen.text("ask").starts_with("Error E3005 CONFIRMATION_DENIED"), "no person is there to be asked");
    seen.check(true);
}

#[test]
fn codex() {
    let Some(agent) = Agent::new() else { return };
    let vendor = agent.world.program("npm/node_modules/codex-linux-x64/vendor");
    let Some(vendor) = installed(&vendor) else { return };
    let triple = fs::read_dir(vendor).unwrap().next().unwrap().unwrap().path();
    let program = ["bin/codex", "codex/codex"].map(|path| triple.join(path)).into_iter().find(|path| path.exists());
    let config = format!(
        "model = 'scripted'\nmodel_provider = 'local'\napproval_policy = 'never'\nsandbox_mode = 'danger-full-access'\n\
         check_for_update_on_startup = false\n[analytics]\nenabled = false\n[model_providers.local]\nname = 'local'\n\
         base_url = '{}/v1'\nwire_api = 'responses'\n[mcp_servers.wieldy]\ncommand = '{}'\nargs = ['mcp']\n\
         env_vars = ['WIELDY_TEST_WORLD']\nstartup_timeout_sec = 60\n",
        agent.host,
        Agent::WIELDY,
    );
    let home = agent.world.root().join("home/.codex");
    fs::create_dir(&home).unwrap();
    fs::write(home.join("config.toml"), config).unwrap();
    let mut codex = agent.client(&program.unwrap());
    let seen = agent.run(codex.args(["exec", "--skip-git-repo-check", "go"]));
    assert!(seen.text("large").contains("`pattern`]\n1\n2\n3\n"), "{}", seen.text("large"));
    // Under these settings nothing needs approval, so the client answers wieldy's question by itself.
    assert_eq!(seen.text("ask"), "it ran");
    seen.check(true);
}

#[test]
fn opencode() {
    let Some(agent) = Agent::new() else { return };
    let program = agent.world.program("npm/node_modules/opencode-linux-x64-baseline/bin/opencode");
    let Some(program) = installed(&program) else { return };
    let options = json!({"baseURL": format!("{}/v1", agent.host), "apiKey": "none"});
    let models = json!({"scripted": {"name": "scripted", "tool_call": true}});
    let provider = json!({"local": {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}});
    let config = json!({
        "autoupdate": false, "share": "disabled", "model": "local/scripted", "provider": provider,
        "mcp": {"wieldy": {"type": "local", "command": [Agent::WIELDY, "mcp"], "enabled": true, "timeout": 60000}},
    });
    let mut opencode = agent.client(program);
    for off in ["MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "DEFAULT_PLUGINS"] {
        opencode.env(format!("OPENCODE_DISABLE_{off}"), "1");
    }
    fs::write(agent.world.path("opencode.json"), config.to_string()).unwrap();
    let seen = agent.run(opencode.args(["run", "--print-logs", "go"]));
    assert!(seen.text("large").contains("`pattern`]\n1\n2\n3\n"), "{}", seen.text("large"));
    assert!(seen.text("ask").starts_with("Error E3004 CONFIRMATION_REQUIRED"), "it cannot ask a person");
    // Its models get images as attachments of the next message.
    seen.check(false);
}

#[test]
fn pydantic_ai() {
    framework("pydantic_ai", false);
}

#[test]
fn langchain() {
    framework("langchain", true);
}

#[test]
fn openai_agents() {
    framework("openai_agents", true);
}

#[test]
fn mcp_use() {
    framework("mcp_use", true);
}

#[test]
fn fastmcp() {
    framework("fastmcp", true);
}

/// Runs an agent that is made with a Python framework. `with_image` says whether it passes on images as tool output.
fn framework(name: &str, with_image: bool) {
    let Some(agent) = Agent::new() else { return };
    let mut client = agent.client(&agent.world.program("python-agents/bin/python"));
    client.arg(agent.world.path("frameworks.py")).args([name, Agent::WIELDY, &format!("{}/v1", agent.host)]);
    client.arg(agent.path("script.json")).arg(agent.path("seen.json"));
    let seen = agent.run(&mut client);
    let large = seen.text("large");
    let ends = large.contains("`pattern`]\n1\n2\n3\n") && large.ends_with("\n19999\n20000");
    assert!(ends, "{large}");
    assert!(seen.text("ask").starts_with("Error E3004 CONFIRMATION_REQUIRED"), "{}", seen.text("ask"));
    seen.check(with_image);
}

/// Returns the program if it is installed. Programs that come as binaries exist only for one processor architecture.
fn installed(program: &Path) -> Option<&Path> {
    if program.exists() {
        return Some(program);
    }
    if cfg!(target_arch = "x86_64") {
        panic!("{} is not installed", program.display());
    }
    wieldy_testkit::skip("the program comes for x86_64 only");
    None
}

/// A workspace with a scripted model.
struct Agent {
    world: World,
    model: Child,
    /// The address of the model.
    host: String,
}

impl Agent {
    const WIELDY: &str = env!("CARGO_BIN_EXE_wieldy");

    fn new() -> Option<Self> {
        let world = World::new(SERVER)?
            .file(".wieldy/tools/tools.toml", TOOLS)
            .file("note.txt", "hello\nfoo bar\n")
            .file("empty.txt", "")
            .file("large.txt", &(1..=20_000).map(|number| format!("{number}\n")).collect::<String>())
            .file("model.py", include_str!("model.py"))
            .file("frameworks.py", include_str!("frameworks.py"));
        let calls = script()
            .into_iter()
            .map(|(id, tool, arguments, _)| json!({"id": id, "tool": tool, "arguments": arguments}));
        fs::write(world.root().join("script.json"), Value::from_iter(calls).to_string()).unwrap();
        let mut model = world.any(&world.program("python-agents/bin/python"));
        model.arg(world.path("model.py")).arg(world.root().join("script.json")).arg(world.root().join("seen.json"));
        let mut model = model.stdin(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let mut port = String::new();
        BufReader::new(model.stdout.take().unwrap()).read_line(&mut port).unwrap();
        Some(Self { world, model, host: format!("http://127.0.0.1:{}", port.trim()) })
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.world.root().join(name)
    }

    /// Returns a client that can reach only the loopback: its proxy is a closed port.
    fn client(&self, program: &Path) -> Command {
        let mut client = self.world.any(program);
        for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
            client.env(name, "http://127.0.0.1:9");
        }
        client.env("NO_PROXY", "127.0.0.1,localhost").env("no_proxy", "127.0.0.1,localhost");
        client
    }

    /// Runs the client to its end, and returns the text that reached the model.
    fn run(mut self, client: &mut Command) -> Seen {
        let output = client.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        drop(self.model.stdin.take());
        self.model.wait().unwrap();
        let seen = fs::read_to_string(self.path("seen.json")).unwrap_or_else(|_| panic!("nothing was called: {said}"));
        self.world.is_left_empty();
        let seen = Seen(serde_json::from_str(&seen).unwrap());
        seen.tell_tokens();
        seen
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.model.kill();
        let _ = self.model.wait();
    }
}

/// The answers that reached the model, by the calls of the script.
struct Seen(Map<String, Value>);

impl Seen {
    /// Returns the text of an answer, without the text that clients add around it.
    fn text(&self, call: &str) -> String {
        let text = match &self.0[call] {
            Value::String(text) => text.clone(),
            Value::Array(blocks) => {
                blocks.iter().filter_map(|block| block["text"].as_str()).collect::<Vec<_>>().join("\n")
            }
            other => panic!("{call}: {other}"),
        };
        // pydantic-ai and mcp-use wrap errors in an object.
        let wrapped: Option<Value> = serde_json::from_str(&text).ok();
        let inner = wrapped.as_ref().and_then(|object| object["details"].as_str().or(object["error"].as_str()));
        let text = inner.unwrap_or(&text);
        let around =
            Regex::new(r"(?s)^Wall time: [0-9.]+ seconds\nOutput:\n|\s*<system-reminder>.*</system-reminder>").unwrap();
        around.replace_all(text, "").trim_end().to_owned()
    }

    /// Prints how many tokens the model got for each call, counting four characters as one.
    fn tell_tokens(&self) {
        let characters = |text: &str| text.chars().count();
        let tokens = |answer: &Value| {
            let texts = match answer {
                Value::Array(blocks) => blocks.iter().filter_map(|block| block["text"].as_str()).map(characters).sum(),
                answer => answer.as_str().map_or(0, characters),
            };
            usize::div_ceil(texts, 4)
        };
        let tokens: Vec<String> = self.0.iter().map(|(call, answer)| format!("{call} {}", tokens(answer))).collect();
        let _ = writeln!(std::io::stderr(), "tokens: {}", tokens.join(", "));
    }

    /// Checks every answer whose text is the same for all clients.
    fn check(&self, with_image: bool) {
        for (call, _, _, expected) in script() {
            if let Some(expected) = expected {
                assert_eq!(self.text(call), expected, "{call}");
            }
        }
        // Clients cut long text in the middle or at the end, so the advice for reading the rest comes first.
        let first =
            r"\[43358 of 108894 bytes left out; the whole is artifact:[0-9a-f]{32}: read it with `GetArtifact`, ";
        assert!(Regex::new(first).unwrap().is_match(&self.text("large")), "{}", self.text("large"));
        // A file is read in parts of whole lines.
        let part = self.text("large_read");
        assert!(part.contains("1\n2\n3\n") || part.contains(r"1\n2\n3\n"), "{part}");
        let json = |call: &str| serde_json::from_str::<Value>(&self.text(call)).unwrap();
        assert_eq!(json("figures"), json!({"a": 1, "b": [2, 3]}));
        assert_eq!(json("structured"), json!({"temperature": 33, "conditions": "Cloudy", "humidity": 82}));
        let image = self.0["image"].to_string();
        assert!(image.contains("Here's the image you requested:"), "{image}");
        assert_eq!(image.contains("iVBORw0KGgo"), with_image, "{image}");
    }
}
