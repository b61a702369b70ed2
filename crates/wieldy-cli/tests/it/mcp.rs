//! Tests of `wieldy mcp` with a client on its standard input and output.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::world::World;

/// A running `wieldy mcp`, and a client of it.
pub(crate) struct Client {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// The answer to `initialize`.
    pub(crate) greeting: Value,
}

impl Client {
    pub(crate) fn start(world: &World, arguments: &[&str]) -> Self {
        let arguments = [&["mcp"], arguments].concat();
        let mut child = world.command(&arguments).stdin(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut client = Self { child, input, output, greeting: Value::Null };
        let info = json!({"name": "tester", "version": "1"});
        let params = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info});
        let told = client.ask(json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}));
        assert_eq!(told["result"]["serverInfo"]["name"], "wieldy", "{told}");
        client.greeting = told;
        client.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        client
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.input.as_mut().unwrap(), "{message}").unwrap();
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    pub(crate) fn ask(&mut self, message: Value) -> Value {
        self.send(&message);
        self.next()
    }

    pub(crate) fn call(&mut self, id: u32, tool: &str, arguments: Value) -> Value {
        let params = json!({"name": tool, "arguments": arguments});
        self.ask(json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}))
    }

    /// Kills the server, and waits for its end.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Closes the input, waits for the end, and returns the standard error.
    pub(crate) fn end(mut self) -> String {
        drop(self.input.take());
        let output = self.child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

// Shows: B2
#[test]
fn a_client_lists_and_calls_tools_and_all_is_recorded_under_its_name() {
    let world = World::new().file("a.txt", "one\ntwo\n");
    let mut client = Client::start(&world, &[]);
    let told = client.ask(json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}));
    let names: Vec<&str> =
        told["result"]["tools"].as_array().unwrap().iter().filter_map(|t| t["name"].as_str()).collect();
    assert!(names.contains(&"Read") && names.contains(&"Bash") && names.contains(&"result_wait"), "{names:?}");
    assert!(names.is_sorted(), "{names:?}");
    let answer = client.call(2, "Read", json!({"path": "a.txt"}));
    assert_eq!(answer["result"]["content"], json!([{"type": "text", "text": "one\ntwo\n"}]));
    let wrong = client.call(3, "Read", json!({"pfad": "a.txt"}));
    assert_eq!(wrong["result"]["_meta"]["wieldy/error"]["code"], "E3002", "{wrong}");
    assert_eq!(client.end(), "", "there is no other output");
    let history = world.json(&["history", "--json"]);
    let calls: Vec<Value> = history["executions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|call| json!([call["tool"], call["status"], call["agent"]]))
        .collect();
    assert_eq!(calls, [json!(["Read", "validation_error", "tester"]), json!(["Read", "success", "tester"])]);
}

#[test]
fn a_server_that_hangs_keeps_no_client_waiting() {
    let server = "[mcp.servers.slow]\ncommand = \"sleep\"\nargs = [\"600\"]\nisolation = \"none\"\n";
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}});
    let mut world = World::new();
    for wait in ["100ms", "1h"] {
        // The list waits for the server once, and not again after it failed to start.
        world = world.file("wieldy.toml", &format!("[mcp]\nlist-wait = \"{wait}\"\n{server}"));
        let mut client = Client::start(&world, &[]);
        let told = client.ask(list.clone());
        assert!(told["result"]["tools"].as_array().unwrap().iter().any(|tool| tool["name"] == "Read"), "{told}");
        let told = client.call(2, "slow__x", json!({}));
        assert!(told.to_string().contains("the MCP server `slow` is still starting"), "{told}");
        client.end();
    }
}

#[test]
fn a_server_that_did_not_start_is_reported_with_a_fitting_hint() {
    let world = World::new().file("docker", "#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2; exit 1\n");
    let docker = world.path("docker").display().to_string();
    std::process::Command::new("chmod").args(["+x", &docker]).status().unwrap();
    let servers = format!(
        "[mcp]\nlist-wait = \"60s\"\n[mcp.servers.box]\ncommand = {docker:?}\nargs = [\"run\", \"-i\", \"mcp/time\"]\n\
         [mcp.servers.lone]\ncommand = \"sh\"\nargs = [\"-c\", \"echo getaddrinfo EAI_AGAIN >&2; exit 1\"]\nnetwork = \"none\"\n\
         [mcp.servers.old]\nurl = \"http://127.0.0.1:9/sse\"\n\
         [mcp.servers.plain]\ncommand = \"sh\"\nargs = [\"-c\", \"exit 1\"]\n"
    );
    let world = world.file("wieldy.toml", &servers);
    let mut client = Client::start(&world, &[]);
    client.ask(json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}));
    let hints = [
        (
            "box",
            "`docker` needs its daemon, which no sandbox can reach: `isolation = \"none\"` under `[mcp.servers.box]` lets it start containers",
        ),
        (
            "lone",
            "wieldy lets this server reach no network: `network = \"open\"` or a list of hosts under `[mcp.servers.lone]` changes that",
        ),
        (
            "old",
            "the address ends like one of the old transport HTTP+SSE, which wieldy does not speak: give the server's address for streamable HTTP as `url` under `[mcp.servers.old]`, often `/mcp` instead of `/sse`",
        ),
        ("plain", "`wieldy mcp test plain` shows details"),
    ];
    let mut id = 1;
    for (server, hint) in hints {
        // The server may be in the middle of its next start.
        let suggestion = loop {
            id += 1;
            let told = client.call(id, &format!("{server}__x"), json!({}));
            let suggestion =
                told["error"]["data"]["suggestion"].as_str().unwrap_or_else(|| panic!("{told}")).to_owned();
            if suggestion != "call it again when the server has started" {
                break suggestion;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        assert_eq!(suggestion, hint);
    }
    let told = client.end();
    for (_, hint) in hints {
        assert!(told.contains(&format!("\nhint: {hint}\n")), "{told}");
    }
}

#[test]
fn flags_set_the_caller_and_keys_select_the_tools() {
    let world = World::new().file("a.txt", "hi");
    let flags = ["--agent", "did:agent:ada", "--session", "s1", "--set", "serve.mcp.tools=search"];
    let mut client = Client::start(&world, &flags);
    let told = client.ask(json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}));
    let names: Vec<&Value> = told["result"]["tools"].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
    assert_eq!(names, ["batch", "result_wait", "tool_call", "tool_describe", "tool_search"]);
    let answer = client.call(2, "tool_call", json!({"name": "Read", "arguments": {"path": "a.txt"}}));
    assert_eq!(answer["result"]["content"], json!([{"type": "text", "text": "hi"}]));
    client.end();
    let history = world.json(&["history", "--json"]);
    let call = &history["executions"][0];
    assert_eq!(
        (&call["tool"], &call["agent"], &call["session"]),
        (&json!("Read"), &json!("did:agent:ada"), &json!("s1")),
        "{call}"
    );
}

#[test]
fn a_call_ends_with_its_client_and_is_recorded_once() {
    let world = World::new();
    let mut client = Client::start(&world, &["--isolation", "none"]);
    let params = json!({"name": "Bash", "arguments": {"command": "touch begun; sleep 1000; touch ended"}});
    client.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}));
    while !world.path("begun").exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    // Both ends are closed, as when the client is killed.
    let Client { mut child, input, output, .. } = client;
    drop((input, output));
    assert!(child.wait().unwrap().success());
    assert!(!world.path("ended").exists());
    let history = world.json(&["history", "--json"]);
    let calls = history["executions"].as_array().unwrap();
    assert_eq!(calls.len(), 1, "{history}");
    assert_eq!(calls[0]["status"], "cancelled", "{history}");
}

#[test]
fn the_command_exits_cleanly_on_any_input() {
    let world = World::new();
    for input in ["", "nonsense\n", "[]\n", "{\"jsonrpc\":\"2.0\",\"id\":1", "\u{0}\u{0}\u{0}\n"] {
        let told = world.run_with_input(&["mcp"], input);
        assert!(told.starts_with("exit: 0\n"), "{input:?}: {told}");
    }
}

#[test]
fn a_client_may_talk_over_sockets_as_some_do() {
    let world = World::new().file("a.txt", "hi");
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (input, output) = (OwnedFd::from(theirs.try_clone().unwrap()), OwnedFd::from(theirs));
    let mut child = world.command(&["mcp"]).stdin(input).stdout(output).spawn().unwrap();
    let mut lines = BufReader::new(ours.try_clone().unwrap()).lines();
    let mut ask = |message: Value| -> Value {
        writeln!(&ours, "{message}").unwrap();
        serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap()
    };
    let info = json!({"name": "tester", "version": "1"});
    let params = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info});
    ask(json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}));
    let params = json!({"name": "Read", "arguments": {"path": "a.txt"}});
    let answer = ask(json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}));
    assert_eq!(answer["result"]["content"], json!([{"type": "text", "text": "hi"}]));
    // Messages that are larger than a socket's buffer, in both directions.
    let large = "x".repeat(3_000_000);
    let answer = ask(json!({"jsonrpc": "2.0", "id": large.get(..1000), "method": "no/such", "params": {"a": large}}));
    assert_eq!(answer["error"]["code"], -32601);
    let params = json!({"name": "Read", "arguments": {"path": large}});
    let answer = ask(json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}));
    assert_eq!(answer["result"]["isError"], true);
    drop(lines);
    drop(ours);
    assert!(child.wait().unwrap().success());
}

// Shows: A12
#[test]
fn a_client_gives_an_idempotency_key_in_the_meta_of_a_call() {
    let world = World::new();
    let command = "echo x >> runs.txt";
    let options = ["--isolation", "none", "--state", "../state"];
    let runs = || std::fs::read_to_string(world.path("runs.txt")).unwrap().lines().count();
    let mut expected = 0;
    // The second client uses another process.
    for _ in 0..2 {
        let mut client = Client::start(&world, &options);
        let mut call = |id: u32, meta: Value| {
            let params = json!({"name": "Bash", "arguments": {"command": command}, "_meta": meta});
            client.ask(json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}))
        };
        for id in 1..=2 {
            let told = call(id, json!({"wieldy/idempotency-key": "k"}));
            assert_eq!(told["result"]["isError"], json!(false), "{told}");
        }
        let told = call(3, json!({}));
        assert_eq!(told["result"]["isError"], json!(false), "{told}");
        expected += if expected == 0 { 2 } else { 1 };
        assert_eq!(runs(), expected);
        for (id, wrong) in (4..).zip([json!(5), json!(""), json!("k".repeat(513))]) {
            let told = call(id, json!({"wieldy/idempotency-key": wrong}));
            let error = &told["result"]["_meta"]["wieldy/error"];
            let message = "`wieldy/idempotency-key` in `_meta` is a text of 1 to 512 bytes";
            assert_eq!((&error["code"], &error["message"]), (&json!("E3002"), &json!(message)), "{told}");
        }
        assert_eq!(runs(), expected, "a call with a wrong key does not run");
        client.end();
    }
}

// Shows: E8.3
#[test]
fn a_request_brings_options_and_a_batch_makes_several_calls() {
    let config = "serve.mcp.batch = \"all\"\nserve.mcp.priority-max = \"high\"\nlimits.batch-calls-max = 2\n";
    let world = World::new().file("a.txt", "one\n").file("wieldy.toml", config);
    let mut client = Client::start(&world, &["--state", "../state"]);
    let mut call = |id: u32, tool: &str, arguments: Value, meta: Value| {
        let params = json!({"name": tool, "arguments": arguments, "_meta": meta});
        client.ask(json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}))["result"].take()
    };
    let meta = json!({"wieldy/priority": "high", "wieldy/metadata": {"run": 5}, "wieldy/timeout_ms": 60_000});
    let told = call(1, "Read", json!({"path": "a.txt"}), meta.clone());
    assert_eq!(told["isError"], json!(false), "{told}");
    let read = json!({"id": "r", "tool": "Read", "arguments": {"path": "a.txt"}});
    let write = json!({"tool": "Write", "arguments": {"path": "b.txt", "content": {"$result": "r"}}});
    let told = call(2, "batch", json!({"calls": [read, write]}), meta);
    assert_eq!(told["_meta"]["wieldy/batch"]["summary"]["succeeded"], 2, "{told}");
    assert_eq!(std::fs::read_to_string(world.path("b.txt")).unwrap(), "one\n");
    let told = call(3, "batch", json!({"calls": [read, read, read]}), json!({}));
    assert_eq!(told["_meta"]["wieldy/error"]["details"]["allowed"], 2, "{told}");
    client.end();
    let found = world.json(&["history", "--metadata", "run=5", "--json", "--state", "../state"]);
    let tools: Vec<&Value> = found["executions"].as_array().unwrap().iter().map(|call| &call["tool"]).collect();
    assert_eq!(tools, ["Write", "Read", "Read"]);
    let refused = world.json(&["history", "--tool", "batch", "--json", "--state", "../state"]);
    let calls: Vec<[&Value; 2]> =
        refused["executions"].as_array().unwrap().iter().map(|call| [&call["status"], &call["error_code"]]).collect();
    assert_eq!(calls, [[&json!("validation_error"), &json!("E3002")]], "{refused}");
}
