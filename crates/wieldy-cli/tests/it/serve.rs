//! Tests of `wieldy serve` with HTTP clients.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::world::World;

/// A running `wieldy serve`, and its address.
pub(crate) struct Server {
    child: Child,
    address: String,
}

impl Server {
    pub(crate) fn start(world: &World, arguments: &[&str]) -> Self {
        let arguments = [&["serve", "--listen", "127.0.0.1:0", "--json"], arguments].concat();
        let mut child = world.command(&arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let told: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let address = told["address"].as_str().unwrap().to_owned();
        assert_eq!(told, json!({"address": address, "mcp": format!("http://{address}/mcp")}));
        Self { child, address }
    }

    /// Sends a request, and returns the status and the body of the response.
    fn send(&self, method: &str, path: &str, headers: &[&str], body: &str) -> (u16, String) {
        let mut answer = String::new();
        self.sent(method, path, headers, body).read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), body.to_owned())
    }

    /// Sends a request, and leaves the response unread.
    fn sent(&self, method: &str, path: &str, headers: &[&str], body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        let (host, length) = (&self.address, body.len());
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
        )
        .unwrap();
        stream
    }

    /// Calls a tool as a client of the newest protocol revision.
    pub(crate) fn call(&self, headers: &[&str], tool: &str, arguments: Value) -> (u16, String) {
        self.ask(headers, "tools/call", tool, json!({"name": tool, "arguments": arguments}), json!({}))
    }

    /// Sends a request of a client with these capabilities.
    fn ask(&self, headers: &[&str], method: &str, name: &str, params: Value, can: Value) -> (u16, String) {
        let (usual, message) = asking(method, name, params, &can);
        let usual: Vec<&str> = usual.iter().map(String::as_str).chain(headers.iter().copied()).collect();
        self.send("POST", "/mcp", &usual, &message)
    }

    /// Does the same with a client that supports tasks. Returns the answer, whether it came alone or in a stream.
    fn ask_of_tasks(&self, headers: &[&str], method: &str, name: &str, params: Value) -> Value {
        let can = json!({"extensions": {"io.modelcontextprotocol/tasks": {}}});
        message(&self.ask(headers, method, name, params, can).1)
    }

    /// Kills the server, and waits for its end.
    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM, waits for the end, and returns the standard error.
    pub(crate) fn stop(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(self.child.wait().unwrap().success(), "{said}");
        said
    }
}

/// Returns the message in a response, which may be a stream.
fn message(answer: &str) -> Value {
    let (Some(start), Some(end)) = (answer.find('{'), answer.rfind('}')) else { panic!("no message: {answer}") };
    serde_json::from_str(&answer[start..=end]).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

/// Returns the headers and the body of a request by a client of the newest revision with these capabilities.
fn asking(method: &str, name: &str, mut params: Value, can: &Value) -> ([String; 5], String) {
    params["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": can,
    });
    let message = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    let headers = [
        "content-type: application/json".into(),
        "accept: application/json, text/event-stream".into(),
        "mcp-protocol-version: 2026-07-28".into(),
        format!("mcp-method: {method}"),
        format!("mcp-name: {name}"),
    ];
    (headers, message.to_string())
}

const OPEN: &str = "warning: no token is configured, so every program on this machine may call\n";
const STOPPING: &str = "stopping: running calls may end; press Ctrl-C again to leave at once\n";

// Shows: D10.1
#[test]
fn tools_are_called_over_http_until_the_server_stops() {
    let world = World::new().file("a.txt", "hi");
    let server = Server::start(&world, &[]);
    let (status, health) = server.send("GET", "/health", &[], "");
    assert_eq!((status, health), (200, format!(r#"{{"status":"ok","version":"{}"}}"#, env!("CARGO_PKG_VERSION"))));
    let (status, answer) = server.call(&[], "Read", json!({"path": "a.txt"}));
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!((status, &answer["result"]["content"]), (200, &json!([{"type": "text", "text": "hi"}])));
    let (status, _) = server.call(&["Origin: https://evil.example"], "Read", json!({"path": "a.txt"}));
    assert_eq!(status, 403);
    assert_eq!(server.stop(), format!("{OPEN}{STOPPING}"));
    assert_eq!(world.json(&["history", "--json"])["executions"].as_array().unwrap().len(), 1);
}

#[test]
fn a_token_determines_the_caller() {
    let secret = "a-secret-of-ada-0123456789";
    let config = r#"
        [serve.tokens.ada]
        token = { file = "ada.token" }
        agent = "did:agent:ada"
        tenant = "acme"
        scopes = ["*"]
        permissions = ["*"]
        [serve.tokens.bob]
        token = "${BOBS}"
    "#;
    let world = World::new()
        .file("a.txt", "hi")
        .file("wieldy.toml", config)
        .file("ada.token", &format!("{secret}\n"))
        .variable("BOBS", "a-secret-of-bob-0123456789");
    let server = Server::start(&world, &["--log", "trace"]);
    let (status, _) = server.call(&[], "Read", json!({"path": "a.txt"}));
    assert_eq!(status, 401);
    let (status, _) = server.call(&["Authorization: Bearer wrong-wrong-wrong-wrong"], "Read", json!({"path": "a.txt"}));
    assert_eq!(status, 401);
    let (status, _) = server.call(&[&format!("Authorization: Bearer {secret}")], "Read", json!({"path": "a.txt"}));
    assert_eq!(status, 200);
    let bob = "Authorization: Bearer a-secret-of-bob-0123456789";
    let (status, answer) = server.call(&[bob], "Write", json!({"path": "b.txt", "content": "x"}));
    assert_eq!(status, 200);
    assert!(answer.contains("E3003"), "he holds no permission: {answer}");
    let (status, answer) = server.call(&[bob], "Bash", json!({"command": "echo > b.txt"}));
    assert_eq!(status, 200);
    assert!(answer.contains("requires the permission `programs.run`"), "{answer}");
    let said = server.stop();
    assert!(!said.contains("a-secret-of") && said.contains(STOPPING), "{said}");
    let history = world.json(&["history", "--json"]);
    let calls: Vec<Value> =
        history["executions"].as_array().unwrap().iter().map(|call| json!([call["agent"], call["tenant"]])).collect();
    assert_eq!(calls, [json!(["bob", null]), json!(["bob", null]), json!(["did:agent:ada", "acme"])]);
    assert!(!world.path("b.txt").exists());
}

#[test]
fn mistakes_of_serve_are_reported_before_it_listens() {
    let world = World::new().file("wieldy.toml", "[serve.tokens.x]\ntoken = \"short\"");
    insta::assert_snapshot!(world.run(&["serve"]), @r#"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    warning: `wieldy.toml` is in the workspace and holds a secret (serve.tokens.x.token), so it is hidden from tools; move it to ~/.config/wieldy, or write the secret as `${NAME}` or `{ file = "…" }`
    error: cannot read the token `x`
      caused by: a token has at least 16 characters, all of them ASCII, and no space
    hint: `openssl rand -hex 32` makes a good one
    "#);
    let world = World::new().file("wieldy.toml", "[serve.tokens.x]\nagent = \"x\"");
    insta::assert_snapshot!(world.run(&["serve", "--config", "wieldy.toml"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: the section `serve`: `serve.tokens.x` has no `token`
    ");
    let world = World::new();
    insta::assert_snapshot!(world.run(&["serve", "--listen", "0.0.0.0:0"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: other machines can reach 0.0.0.0:0, so a token is required
    hint: configure a token under `[serve.tokens]`, or listen at 127.0.0.1
    ");
    insta::assert_snapshot!(world.run(&["serve", "--set", "serve.listen=here"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: the section `serve`: `serve.listen`: `here` is not an address and a port, such as 127.0.0.1:7300
    ");
    insta::assert_snapshot!(world.run(&["serve", "--set", "serve.listen=7301"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: the section `serve`: `serve.listen`: `7301` is a port without an address; write 127.0.0.1:7301 for this machine only
    ");
    insta::assert_snapshot!(world.run(&["serve", "--listen", "7301"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: invalid value '7301' for '--listen <ADDRESS:PORT>': it is a port without an address; write 127.0.0.1:7301 for this machine only

    For more information, try '--help'.
    ");
    let world = World::new().variable("WIELDY_SERVE_TOKENS", r#"{ ada = { token = "a-secret-of-ada-0123456789" } }"#);
    assert!(!world.run(&["config", "show"]).contains("a-secret"), "a secret is not shown");
}

// Shows: D10.1
#[test]
fn a_running_call_may_end_when_the_server_stops() {
    let world = World::new();
    let server = Server::start(&world, &["--isolation", "none", "--set", "serve.patience=20s"]);
    let pid = Pid::from_child(&server.child);
    let begun = world.path("begun");
    let stopper = std::thread::spawn(move || {
        while !begun.exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        kill_process(pid, Signal::TERM).unwrap();
    });
    let (status, answer) = server.call(&[], "Bash", json!({"command": "touch begun; sleep 1; echo done"}));
    assert_eq!(status, 200);
    assert!(answer.contains(r#""text":"done\n""#), "{answer}");
    stopper.join().unwrap();
    let mut server = server;
    assert!(server.child.wait().unwrap().success());
    assert_eq!(world.json(&["history", "--json"])["executions"][0]["status"], "success");
}

// Shows: B3.2, X1.2
#[test]
fn tasks_survive_the_server_for_their_own_callers() {
    let config = r#"
        [serve.tokens.ada]
        token = "${ADAS}"
        tenant = "acme"
        scopes = ["*"]
        permissions = ["*"]
        [serve.tokens.bob]
        token = "${BOBS}"
        scopes = ["*"]
        permissions = ["*"]
        [serve.mcp]
        task-after = "300ms"
        patience = "300ms"
    "#;
    let world = World::new()
        .file("a.txt", "hi")
        .file("wieldy.toml", config)
        .variable("ADAS", "a-secret-of-ada-0123456789")
        .variable("BOBS", "a-secret-of-bob-0123456789");
    let ada: &[&str] = &["Authorization: Bearer a-secret-of-ada-0123456789"];
    let bob: &[&str] = &["Authorization: Bearer a-secret-of-bob-0123456789"];
    let start = || Server::start(&world, &["--isolation", "none"]);
    let bash = |command: &str| json!({"name": "Bash", "arguments": {"command": command}});
    let get =
        |server: &Server, who: &[&str], id: &str| server.ask_of_tasks(who, "tasks/get", id, json!({"taskId": id}));

    let server = start();
    let done = server.ask_of_tasks(ada, "tools/call", "Bash", bash("sleep 1; echo done"));
    let done = done["result"]["taskId"].as_str().unwrap_or_else(|| panic!("no task: {done}")).to_owned();
    let (_, runs) = server.call(ada, "Bash", json!({"command": "touch begun; sleep 20"}));
    let runs = message(&runs)["result"]["_meta"]["wieldy/execution"].as_str().unwrap().to_owned();
    assert!(world.path("begun").exists());
    let expected = loop {
        let told = get(&server, ada, &done);
        if told["result"]["status"] != "working" {
            break told;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(expected["result"]["result"]["content"], json!([{"type": "text", "text": "done\n"}]));
    server.kill();
    // A command in between stores no tasks, and removes none.
    assert_eq!(world.code(&["call", "Read", "path=a.txt"]), Some(0));

    let server = start();
    assert_eq!(get(&server, ada, &done), expected);
    let (_, waited) = server.call(ada, "result_wait", json!({"id": done}));
    assert_eq!(message(&waited)["result"]["content"], json!([{"type": "text", "text": "done\n"}]));
    let told = get(&server, ada, &runs);
    assert_eq!(told["result"]["status"], "failed", "{told}");
    assert_eq!(told["result"]["error"]["data"]["code"], "E3110", "{told}");
    let (_, waited) = server.call(ada, "result_wait", json!({"id": runs}));
    assert_eq!(message(&waited)["result"]["_meta"]["wieldy/error"]["code"], "E3110", "{waited}");
    for id in [&done, &runs] {
        assert_eq!(get(&server, bob, id)["error"]["message"], "there is no such task");
        let (_, waited) = server.call(bob, "result_wait", json!({"id": id}));
        assert_eq!(message(&waited)["result"]["_meta"]["wieldy/error"]["code"], "E3303", "{waited}");
    }
    server.stop();
    assert_eq!(world.code(&["audit", "verify"]), Some(0));
}

/// Counts the processes on this machine with this argument.
fn running(argument: &str) -> usize {
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path().join("cmdline"));
    let arguments = processes.filter_map(|path| std::fs::read(path).ok());
    arguments.filter(|all| all.split(|byte| *byte == 0).any(|one| one == argument.as_bytes())).count()
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// P-MCP-11. The twin is a client that waits for the answer meanwhile.
#[test]
fn a_disconnected_client_leaves_no_process_and_one_record() {
    let world = World::new();
    let server = Server::start(&world, &["--isolation", "native"]);
    let seconds = format!("100000.{}", std::process::id());
    let bash = json!({"name": "Bash", "arguments": {"command": format!("sleep {seconds}; echo never")}});
    let (headers, message) = asking("tools/call", "Bash", bash, &json!({}));
    let headers: Vec<&str> = headers.iter().map(String::as_str).collect();
    let hanging_up = server.sent("POST", "/mcp", &headers, &message);
    until("it begins", || running(&seconds) > 0);
    let (status, answer) = server.call(&[], "Bash", json!({"command": "echo fine"}));
    assert!(status == 200 && answer.contains(r#""text":"fine\n""#), "{answer}");
    assert!(running(&seconds) > 0, "no client has disconnected yet");
    drop(hanging_up);
    until("its process is gone", || running(&seconds) == 0);
    let statuses = || {
        let history = world.json(&["history", "--json"]);
        let each = history["executions"].as_array().unwrap().iter().map(|call| call["status"].clone());
        each.collect::<Vec<_>>()
    };
    until("it is recorded", || statuses().contains(&json!("cancelled")));
    assert_eq!(statuses(), ["success", "cancelled"]);
    assert_eq!(server.stop(), format!("{OPEN}{STOPPING}"));
}

#[test]
fn the_context_of_a_token_wins_over_the_claim_of_a_client() {
    let secret = "a-secret-of-ada-0123456789";
    let config = format!(
        "tools.manifests = [\"where.toml\"]\n[serve.tokens.ada]\ntoken = \"{secret}\"\nscopes = [\"*\"]\n\
         permissions = [\"*\"]\ncontext = {{ desk = 7, at = {{ floor = 2 }} }}\n"
    );
    let tool = "[[tool]]\nname = \"where\"\ndescription = \"\"\ncommand = [\"cat\"]\nstdin = \"{context}\"\n";
    let world = World::new().file("where.toml", tool).file("wieldy.toml", &config);
    let server = Server::start(&world, &[]);
    let bearer = format!("Authorization: Bearer {secret}");
    let (headers, mut body) = asking("tools/call", "where", json!({"name": "where", "arguments": {}}), &json!({}));
    body = body.replacen("\"_meta\":{", "\"_meta\":{\"wieldy/context\":{\"desk\":1,\"room\":\"a\"},", 1);
    let headers: Vec<&str> = headers.iter().map(String::as_str).chain([bearer.as_str()]).collect();
    let told = message(&server.send("POST", "/mcp", &headers, &body).1);
    assert_eq!(told["result"]["content"][0]["text"], r#"{"desk":7,"room":"a","at":{"floor":2}}"#, "{told}");
    server.stop();
    let shown = world.run(&["config", "show"]);
    assert!(!shown.contains("desk = 7") && !shown.contains("= 7 ["), "{shown}");
    for (context, wrong) in [
        ("{ k = 2026-11-18 }", "JSON has no times"),
        ("{ k = inf }", "inf is no number of JSON"),
        (&*format!("{{ k = \"{}\" }}", "x".repeat(20_000)), "the context of the call is too large"),
        ("5", "must be a table, not the number `5`"),
    ] {
        let text = config.replace("{ desk = 7, at = { floor = 2 } }", context);
        // A folder's own file with such a mistake cannot be trusted, and would be ignored.
        let world = World::new().file("where.toml", tool).file("named.toml", &text);
        let told = world.run(&["--config", "named.toml", "serve", "--listen", "127.0.0.1:0"]);
        assert!(told.contains(wrong), "{told}");
    }
}
