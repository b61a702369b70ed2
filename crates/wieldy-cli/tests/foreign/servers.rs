//! MCP servers of other projects, behind wieldy: each is a program in a sandbox, as an operator would configure it.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::world::{Wire, World};

/// The reference server, which has an example of every feature.
const EVERYTHING: &str = r#"
[mcp.servers.everything]
command = "[programs]/bin/node"
args = ["[programs]/npm/node_modules/@modelcontextprotocol/server-everything/dist/index.js", "stdio"]
isolation = "native"
env = { WIELDY_TEST_WORLD = "${WIELDY_TEST_WORLD}" }
"#;
/// The file server, for a folder beside the workspace.
const FILES: &str = r#"
[mcp.servers.files]
command = "[programs]/bin/node"
args = ["[programs]/npm/node_modules/@modelcontextprotocol/server-filesystem/dist/index.js", "[root]/given"]
isolation = "native"
"#;
const GIT: &str = r#"
[mcp.servers.git]
command = "[programs]/python/bin/mcp-server-git"
isolation = "native"
env = { GIT_AUTHOR_NAME = "Ada", GIT_AUTHOR_EMAIL = "ada@test", GIT_COMMITTER_NAME = "Ada", GIT_COMMITTER_EMAIL = "ada@test" }
"#;
const TIME: &str = r#"
[mcp.servers.time]
command = "[programs]/python/bin/mcp-server-time"
args = ["--local-timezone=UTC"]
isolation = "native"
"#;
const FETCH: &str = r#"
[mcp.servers.fetch]
command = "[programs]/python/bin/mcp-server-fetch"
args = ["--allow-private-ips"]
isolation = "native"
env = { PATH = "/none" } # it would make use of a Node that it finds, and fetch packages for it
"#;

fn text(text: &str) -> Value {
    json!({"status": "success", "content": [{"type": "text", "text": text}]})
}

/// Returns the result of a tool that reports a failure.
fn failed(text: &str) -> Value {
    json!({
        "status": "failed",
        "content": [{"type": "text", "text": text}],
        "error": {
            "code": "E3203", "name": "TOOL_REPORTED_ERROR", "category": "tool_error", "message": text,
            "retryable": false, "suggestion": null, "details": {},
        },
    })
}

#[test]
fn all_servers_start_in_sandboxes_and_list_their_tools() {
    let Some(world) = World::new(&[EVERYTHING, FILES, GIT, TIME, FETCH].concat()) else { return };
    fs::create_dir(world.root().join("given")).unwrap();
    let mut told = world.json(&["mcp", "test", "--json"]);
    for server in told.as_array_mut().unwrap() {
        assert!(server["took_ms"].take().is_u64());
        let tools = server["tools"].as_object().unwrap();
        let name = server["name"].as_str().unwrap();
        assert!(tools.iter().all(|(theirs, ours)| *ours == *format!("{name}__{theirs}")), "{tools:?}");
        server["tools"] = tools.keys().map(String::as_str).collect::<Vec<_>>().join(" ").into();
    }
    let server = |name: &str, server: &str, revision: &str, tools: &str| {
        json!({
            "name": name, "transport": "stdio", "state": {"is": "ready"}, "login": null, "revision": revision, "server": server,
            "tools": tools, "changed": {}, "unusable": {}, "took_ms": null,
        })
    };
    let everything = "echo get-annotated-message get-env get-resource-links get-resource-reference \
        get-structured-content get-sum get-tiny-image gzip-file-as-resource simulate-research-query \
        toggle-simulated-logging toggle-subscriber-updates trigger-long-running-operation";
    let files = "create_directory directory_tree edit_file get_file_info list_allowed_directories list_directory \
        list_directory_with_sizes move_file read_file read_media_file read_multiple_files read_text_file search_files \
        write_file";
    let git = "git_add git_branch git_checkout git_commit git_create_branch git_diff git_diff_staged \
        git_diff_unstaged git_log git_reset git_show git_status";
    assert_eq!(
        told,
        json!([
            server("everything", "mcp-servers/everything 2.0.0", "2025-11-25", everything),
            server("fetch", "mcp-fetch 2026.10.24", "2026-07-28", "fetch"),
            server("files", "secure-filesystem-server 0.2.0", "2025-11-25", files),
            server("git", "mcp-git 2026.10.19", "2026-07-28", git),
            server("time", "mcp-time 2026.10.19", "2026-07-28", "convert_time get_current_time"),
        ])
    );
    world.is_left_empty();
}

/// Servers as people have them in the files of their clients: downloaded at their first start.
#[test]
fn servers_that_package_managers_fetch_start_from_a_cold_cache() {
    let Some(world) = World::new("") else { return };
    let world = world.with_registries();
    let client = world.filled(
        r#"{"mcpServers": {
        "everything": {"command": "[programs]/python/bin/npx", "args": ["-y", "@modelcontextprotocol/server-everything@2026.8.31", "stdio"]},
        "files": {"command": "[programs]/python/bin/npx", "args": ["-y", "@modelcontextprotocol/server-filesystem@2026.8.31", "[root]/work"]},
        "git": {"command": "[programs]/python/bin/uvx", "args": ["mcp-server-git@2026.10.19"]},
        "time": {"command": "[programs]/python/bin/uvx", "args": ["mcp-server-time@2026.10.19", "--local-timezone=UTC"]}
        }}"#,
    );
    let world = world.file("mcp.json", &client);
    assert!(world.wieldy(&["mcp", "import", "mcp.json"]).output().unwrap().status.success());
    let told = world.json(&["mcp", "test", "--json"]);
    if !is_ci() && told.to_string().contains("ENOTFOUND") {
        wieldy_testkit::skip("the registries of packages cannot be reached from here");
        return;
    }
    let stands: Vec<Value> = told
        .as_array()
        .unwrap()
        .iter()
        .map(|server| {
            json!([server["name"], server["state"], server["revision"], server["tools"].as_object().unwrap().len()])
        })
        .collect();
    let ready = json!({"is": "ready"});
    assert_eq!(
        json!(stands),
        json!([
            ["everything", ready, "2025-11-25", 13],
            ["files", ready, "2025-11-25", 14],
            ["git", ready, "2026-07-28", 12],
            ["time", ready, "2026-07-28", 2],
        ])
    );
    // Each server has downloaded into a home of its own, where no other server can change it.
    let homes = world.root().join("home/.local/state/wieldy/homes");
    let caches = ["everything/.npm", "files/.npm", "git/.cache/uv", "time/.cache/uv"];
    assert_eq!(caches.map(|cache| homes.join(cache).is_dir()), [true; 4]);
    assert_eq!(world.call("everything__echo", &json!({"message": "warm"})), text("Echo: warm"));
    world.is_left_empty();
}

fn is_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true")
}

#[test]
fn answers_of_every_kind_come_through() {
    let Some(world) = World::new(EVERYTHING) else { return };
    let call = |tool: &str, arguments: Value| world.call(&format!("everything__{tool}"), &arguments);
    assert_eq!(call("echo", json!({"message": "grüß dich"})), text("Echo: grüß dich"));
    assert_eq!(call("get-sum", json!({"a": 2, "b": 0.5})), text("The sum of 2 and 0.5 is 2.5."));
    let weather = json!({"temperature": 36, "conditions": "Light rain / drizzle", "humidity": 82});
    assert_eq!(
        call("get-structured-content", json!({"location": "Chicago"})),
        json!({
            "status": "success", "structured": weather,
            "content": [{"type": "text", "text": weather.to_string()}],
        })
    );
    let link = |number: u32, kind: &str| {
        json!({
            "type": "resource_link", "mimeType": "text/plain",
            "uri": format!("demo://resource/dynamic/{}/{number}", kind.to_lowercase()),
            "name": format!("{kind} Resource {number}"),
            "description": format!("Resource {number}: plaintext resource"),
        })
    };
    let said = "Here are 2 resource links to resources available in this server:";
    assert_eq!(
        call("get-resource-links", json!({"count": 2})),
        json!({"status": "success", "content": [{"type": "text", "text": said}, link(1, "Blob"), link(2, "Text")]})
    );
    let uri = "demo://resource/dynamic/text/1";
    let created = "Resource 1: This is a plaintext resource created at [time]";
    assert_eq!(
        call("get-resource-reference", json!({"resourceType": "Text", "resourceId": 1})),
        json!({"status": "success", "content": [
            {"type": "text", "text": "Returning resource reference for Resource 1:"},
            {"type": "resource", "resource": {"uri": uri, "mimeType": "text/plain", "text": created}},
            {"type": "text", "text": format!("You can access this resource using the URI: {uri}")},
        ]})
    );
    let mut image = call("get-tiny-image", json!({}));
    let data = image["content"][1]["data"].take();
    assert_eq!(
        image,
        json!({"status": "success", "content": [
            {"type": "text", "text": "Here's the image you requested:"},
            {"type": "image", "data": null, "mimeType": "image/png"},
            {"type": "text", "text": "The image above is the MCP logo."},
        ]})
    );
    let source = "npm/node_modules/@modelcontextprotocol/server-everything/dist/tools/get-tiny-image.js";
    let source = fs::read_to_string(world.program(source)).unwrap();
    assert!(source.contains(&format!("\"{}\"", data.as_str().unwrap())), "the image as it left the server");
    world.is_left_empty();
}

#[test]
fn a_server_sees_an_environment_and_a_home_of_its_own() {
    let own = FILES.replace("[root]/given", "/home/agent");
    let Some(world) = World::new(&[EVERYTHING, &own].concat()) else { return };
    let told = world.json(&["call", "everything__get-env", "--json"]);
    let mut seen: Value = serde_json::from_str(told["content"][0]["text"].as_str().unwrap()).unwrap();
    assert_eq!(seen["PATH"].take(), std::env::var("PATH").unwrap());
    assert_eq!(
        world.filtered(&seen),
        json!({
            "HOME": "/home/agent", "USER": "agent", "LOGNAME": "agent", "PATH": null,
            "GIT_TEMPLATE_DIR": "/run/git-templates", "WIELDY_TEST_WORLD": "[root]",
        })
    );
    let told = world.call("files__write_file", &json!({"path": "/home/agent/note", "content": "kept"}));
    assert_eq!(told["content"], json!([{"type": "text", "text": "Successfully wrote to /home/agent/note"}]));
    let kept = world.root().join("home/.local/state/wieldy/homes/files/note");
    assert_eq!(fs::read_to_string(kept).unwrap(), "kept");
}

#[test]
fn wrong_arguments_do_not_reach_a_server() {
    let Some(world) = World::new(EVERYTHING) else { return };
    let wrong = "`/a`: the value is not of type \"number\"";
    assert_eq!(
        world.call("everything__get-sum", &json!({"a": "two", "b": 3})),
        json!({"status": "validation_error", "content": [], "error": {
            "code": "E3002", "name": "VALIDATION_FAILED", "category": "validation_error", "message": wrong,
            "retryable": false, "suggestion": "correct the arguments to fit the tool's input schema and call again",
            "details": {"violations": [{"pointer": "/a", "message": &wrong[6..]}]},
        }})
    );
}

#[test]
fn progress_comes_through_and_cancelling_ends_one_call_alone() {
    let Some(world) = World::new(EVERYTHING) else { return };
    follow_and_cancel(&world);
    world.is_left_empty();
}

#[test]
fn a_server_over_http_is_called_followed_and_cancelled() {
    let Some(world) = World::new("") else { return };
    let everything = OverHttp::new(&world);
    fs::write(world.path("wieldy.toml"), &everything.config).unwrap();
    let told = world.json(&["mcp", "test", "--json"]);
    let shown = |name: &str| told[0][name].clone();
    assert_eq!(
        ["transport", "state", "revision", "server"].map(shown),
        [json!("http"), json!({"is": "ready"}), json!("2025-11-25"), json!("mcp-servers/everything 2.0.0")]
    );
    let call = |tool: &str, arguments: Value| world.call(&format!("everything__{tool}"), &arguments);
    assert_eq!(call("get-sum", json!({"a": 2, "b": 0.5})), text("The sum of 2 and 0.5 is 2.5."));
    let weather = json!({"temperature": 33, "conditions": "Cloudy", "humidity": 82});
    assert_eq!(call("get-structured-content", json!({"location": "New York"}))["structured"], weather);
    follow_and_cancel(&world);
    drop(everything);
    world.is_left_empty();
    let gone = call("echo", json!({"message": "still there?"}));
    assert_eq!(gone["error"]["code"], "E3201", "{gone}");
}

/// Revision 2025-11-25 had tasks that a client requests, which the next revision removed. A tool that can only be
/// called as such a task says so.
#[test]
fn a_tool_that_requires_a_task_says_so() {
    let Some(world) = World::new(EVERYTHING) else { return };
    let said = "MCP error -32601: Tool simulate-research-query requires task augmentation (taskSupport: 'required')";
    assert_eq!(world.call("everything__simulate-research-query", &json!({"topic": "milk"})), failed(said));
    world.is_left_empty();
}

/// The reference server over HTTP, until it is dropped.
struct OverHttp {
    process: Child,
    config: String,
}

impl OverHttp {
    fn new(world: &World) -> Self {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let script = "npm/node_modules/@modelcontextprotocol/server-everything/dist/index.js";
        let mut command = world.any(&world.program("bin/node"));
        command.arg(world.program(script)).arg("streamableHttp").env("PORT", address.port().to_string());
        let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let began = Instant::now();
        while TcpStream::connect(address).is_err() {
            assert!(began.elapsed() < Duration::from_secs(60), "it does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { process, config: format!("[mcp.servers.everything]\nurl = \"http://{address}/mcp\"\n") }
    }
}

impl Drop for OverHttp {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Follows a call of the reference server to its end, and cancels another one.
fn follow_and_cancel(world: &World) {
    let mut wire = Wire::new(world);
    let long = "everything__trigger-long-running-operation";
    wire.call(1, long, &json!({"duration": 1, "steps": 2}));
    // The reference server adds tools after its start. On a busy machine, they are announced during the first call.
    let is_announcement = |message: &Value| message["method"] == "notifications/tools/list_changed";
    let next = |wire: &Wire| std::iter::repeat_with(|| wire.next()).find(|message| !is_announcement(message)).unwrap();
    // wieldy reports all progress in hundredths, in any unit that a tool counts.
    let progress = |token: u32, percent: f64| {
        let params = json!({"progressToken": token, "progress": percent, "total": 100.0});
        json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})
    };
    let said = "Long running operation completed. Duration: 1 seconds, Steps: 2.";
    let answer = |id: u32, text: &str| {
        json!({"jsonrpc": "2.0", "id": id, "result": {
            "content": [{"type": "text", "text": text}], "isError": false,
            "_meta": {"wieldy/execution": "[id]", "wieldy/untrusted": "mcp:everything"},
        }})
    };
    let told = [next(&wire), next(&wire), next(&wire)].map(|message| world.filtered(&message));
    assert_eq!(told, [progress(1, 50.0), progress(1, 100.0), answer(1, said)]);

    // This call would take an hour, and is cancelled after its first step.
    wire.call(2, long, &json!({"duration": 3600, "steps": 10000}));
    assert_eq!(next(&wire), progress(2, 0.01));
    assert!(world.processes().iter().any(|command| command.contains("server-everything")), "this finds processes");
    let params = json!({"requestId": 2, "reason": "enough"});
    wire.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}));
    wire.call(3, "everything__echo", &json!({"message": "still there"}));
    let last = std::iter::repeat_with(|| wire.next()).find(|message| message["id"] != Value::Null).unwrap();
    assert_eq!(world.filtered(&last), answer(3, "Echo: still there"));
    let rest = wire.close();
    assert!(rest.iter().all(|message| message["id"] != 2), "nobody wanted that answer: {rest:?}");
    let history = world.json(&["history", "--json"]);
    let ends: Vec<_> = history["executions"].as_array().unwrap().iter().map(|call| &call["status"]).collect();
    assert_eq!(ends[..3], ["success", "cancelled", "success"]);
}

#[test]
fn files_are_written_where_the_server_was_given_a_folder() {
    let Some(world) = World::new(FILES) else { return };
    fs::create_dir(world.root().join("given")).unwrap();
    fs::write(world.root().join("outside"), "untouched").unwrap();
    let write = |path: &str| world.call("files__write_file", &json!({"path": path, "content": "hello\n"}));
    let wrote = "Successfully wrote to [root]/given/a.txt";
    assert_eq!(
        write("[root]/given/a.txt"),
        json!({"status": "success", "content": [{"type": "text", "text": wrote}], "structured": {"content": wrote}})
    );
    assert_eq!(fs::read_to_string(world.root().join("given/a.txt")).unwrap(), "hello\n");
    assert_eq!(
        write("[root]/outside"),
        failed("Access denied - path outside allowed directories: [root]/outside not in [root]/given")
    );
    assert_eq!(fs::read_to_string(world.root().join("outside")).unwrap(), "untouched");
    world.is_left_empty();
}

#[test]
fn the_sandbox_keeps_files_from_a_server_that_would_write_them() {
    let read_only = r#"mounts = ["[programs]:[programs]", "[root]/given:[root]/given"]"#;
    let Some(world) = World::new(&format!("{FILES}{read_only}")) else { return };
    fs::create_dir(world.root().join("given")).unwrap();
    fs::write(world.root().join("given/a.txt"), "as it was").unwrap();
    let read = world.call("files__read_text_file", &json!({"path": "[root]/given/a.txt"}));
    assert_eq!(read["content"], json!([{"type": "text", "text": "as it was"}]));
    let wrote = world.call("files__write_file", &json!({"path": "[root]/given/a.txt", "content": "changed"}));
    assert_eq!(wrote["error"]["code"], "E3203", "{wrote}");
    assert!(wrote["error"]["message"].as_str().unwrap().starts_with("EROFS: read-only file system"), "{wrote}");
    assert_eq!(fs::read_to_string(world.root().join("given/a.txt")).unwrap(), "as it was");
}

#[test]
fn a_repository_is_worked_on_by_the_server_for_git() {
    let Some(world) = World::new(GIT) else { return };
    let world = world.file("repo/new.txt", "new\n");
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(world.path("repo")).args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    git(&["init", "--quiet", "--initial-branch=main"]);
    git(&["-c", "user.name=Bob", "-c", "user.email=bob@test", "commit", "--quiet", "--allow-empty", "-m", "first"]);
    let call = |tool: &str, mut arguments: Value| {
        arguments["repo_path"] = "[root]/work/repo".into();
        world.call(&format!("git__{tool}"), &arguments)
    };
    let untracked = "Repository status:\nOn branch main\nUntracked files:\n  (use \"git add <file>...\" to include in what \
        will be committed)\n\tnew.txt\n\nnothing added to commit but untracked files present (use \"git add\" to track)";
    assert_eq!(call("git_status", json!({})), text(untracked));
    assert_eq!(call("git_add", json!({"files": ["new.txt"]})), text("Files staged successfully"));
    let committed = call("git_commit", json!({"message": "second"}));
    assert_eq!(committed, text("Changes committed successfully with hash [commit]"));
    assert_eq!(git(&["log", "--format=%an %s"]), "Ada second\nBob first\n");
    let unknown = "Error executing tool git_diff: Ref 'nonsense' did not resolve to an object";
    assert_eq!(call("git_diff", json!({"target": "nonsense"})), failed(unknown));
    world.is_left_empty();
}

#[test]
fn times_are_converted_by_the_server_for_time() {
    let Some(world) = World::new(TIME) else { return };
    let at = |zone: &str, time: &str| {
        let time = format!("[day]T{time}");
        json!({"timezone": zone, "datetime": time, "day_of_week": "[weekday]", "is_dst": false})
    };
    let (source, target) = (at("UTC", "12:00:00+00:00"), at("Asia/Tokyo", "21:00:00+09:00"));
    let arguments = json!({"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"});
    let mut told = world.call("time__convert_time", &arguments);
    let answer = json!({"source": source, "target": target, "time_difference": "+9.0h"});
    let written = told["content"][0]["text"].take();
    assert_eq!(serde_json::from_str::<Value>(written.as_str().unwrap()).unwrap(), answer);
    let content = [json!({"type": "text", "text": null})];
    assert_eq!(told, json!({"status": "success", "content": content, "structured": answer}));
}

#[test]
fn a_page_is_fetched_through_an_open_network_and_not_without_one() {
    let Some(world) = World::new(FETCH) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/page", listener.local_addr().unwrap());
    std::thread::spawn(move || listener.incoming().flatten().for_each(serve_a_page));
    let page = format!("Contents of {url}:\n# Hello\n\nfrom loopback");
    assert_eq!(world.call("fetch__fetch", &json!({"url": url})), text(&page));
    fs::write(world.path("wieldy.toml"), world.filled(&format!("{FETCH}network = \"none\""))).unwrap();
    let told = world.call("fetch__fetch", &json!({"url": url}));
    assert_eq!(told["error"]["code"], "E3203", "{told}");
    world.is_left_empty();
}

/// Answers one request: with a page, or with 404 for `robots.txt`.
fn serve_a_page(mut client: TcpStream) {
    let mut request = [0; 4096];
    let length = client.read(&mut request).unwrap_or(0);
    let (status, body) = match request[..length].starts_with(b"GET /page ") {
        true => ("200 OK", "<html><body><article><h1>Hello</h1><p>from <em>loopback</em></p></article></body></html>"),
        false => ("404 Not Found", ""),
    };
    let length = body.len();
    let _ = write!(
        client,
        "HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
}
