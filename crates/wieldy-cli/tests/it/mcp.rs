//! `wieldy mcp`: a client that talks to it over its standard input and output.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::world::World;

/// The command, and a client of it.
struct Client {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Client {
    fn start(world: &World, arguments: &[&str]) -> Self {
        let arguments = [&["mcp"], arguments].concat();
        let mut child = world.command(&arguments).stdin(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut client = Self { child, input, output };
        let info = json!({"name": "tester", "version": "1"});
        let params = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info});
        let told = client.ask(json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}));
        assert_eq!(told["result"]["serverInfo"]["name"], "wieldy", "{told}");
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

    fn ask(&mut self, message: Value) -> Value {
        self.send(&message);
        self.next()
    }

    fn call(&mut self, id: u32, tool: &str, arguments: Value) -> Value {
        let params = json!({"name": tool, "arguments": arguments});
        self.ask(json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}))
    }

    /// Closes its input, and waits for its end: what it printed on standard error.
    fn end(mut self) -> String {
        drop(self.input.take());
        let output = self.child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

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
    assert_eq!(client.end(), "", "nothing else is said");
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
fn flags_say_on_whose_behalf_and_keys_what_is_shown() {
    let world = World::new().file("a.txt", "hi");
    let flags = ["--agent", "did:agent:ada", "--session", "s1", "--set", "serve.mcp.tools=search"];
    let mut client = Client::start(&world, &flags);
    let told = client.ask(json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}));
    let names: Vec<&Value> = told["result"]["tools"].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
    assert_eq!(names, ["result_wait", "tool_call", "tool_describe", "tool_search"]);
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
    let Client { mut child, input, output } = client;
    drop((input, output));
    assert!(child.wait().unwrap().success());
    assert!(!world.path("ended").exists());
    let history = world.json(&["history", "--json"]);
    let calls = history["executions"].as_array().unwrap();
    assert_eq!(calls.len(), 1, "{history}");
    assert_eq!(calls[0]["status"], "cancelled", "{history}");
}

#[test]
fn whatever_is_written_to_it_the_command_ends_properly() {
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
    // More than a socket takes at once, in both directions.
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
