//! Tests of MCP servers behind the command: configured, imported, tested, pinned. The server is another wieldy process:
//! one wieldy uses the tools that the other one serves.

use std::time::{Duration, Instant};

use insta::assert_snapshot;
use serde_json::json;

use crate::mcp::Client;
use crate::world::World;

/// Makes a world whose configuration names another wieldy, with a folder of its own, as the server `other`.
fn world(more: &str) -> World {
    let world = World::new().file("other/notes.txt", "milk\n");
    let program = env!("CARGO_BIN_EXE_wieldy");
    let folder = std::path::Path::new(program).parent().unwrap().display().to_string();
    let config = format!(
        "[mcp.servers.other]\ncommand = {program:?}\nargs = [\"mcp\", \"--workspace\", \"other\", \"--isolation\", \"none\", \"--state\", \"other-state\"]\nisolation = \"none\"\nmounts = [{folder:?}]\n{more}"
    );
    world.file("wieldy.toml", &config)
}

// Shows: C2.4
#[test]
fn a_server_is_called_and_its_tools_are_known_afterwards() {
    let world = world("allow = [\"Read\", \"Write\"]\n");
    assert_snapshot!(world.run(&["mcp", "list"]), @"
    exit: 0
    ----- stdout -----
    other  stdio  its tools are not known yet

    ----- stderr -----
    ");
    assert_snapshot!(world.run(&["call", "other__Read", "path=notes.txt"]), @"
    exit: 0
    ----- stdout -----
    milk

    ----- stderr -----
    ");
    assert_snapshot!(world.run(&["mcp", "list"]), @"
    exit: 0
    ----- stdout -----
    other  stdio  2 tools

    ----- stderr -----
    ");
    assert_snapshot!(world.run(&["tools", "--provider", "mcp:other"]), @"
    exit: 0
    ----- stdout -----
    other__Read   mcp  writes  Reads a text file, or some lines of it
    other__Write  mcp  writes  Writes a text file, new or in place of the old content, whole or not at all

    ----- stderr -----
    ");
    assert_snapshot!(world.run(&["call", "other__Reed", "path=notes.txt"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3001]: there is no tool `other__Reed`
    hint: did you mean `other__Read` or `other__Write`?
    ");
    assert_snapshot!(world.run(&["call", "other__Read", "path=none.txt"]), @"
    exit: 1
    ----- stdout -----
    Error E3302 FILE_NOT_FOUND: there is no `none.txt`
    Suggestion: did you mean `notes.txt`?
    ----- stderr -----
    error[E3203]: Error E3302 FILE_NOT_FOUND: there is no `none.txt`
        Suggestion: did you mean `notes.txt`?
    ");
    let tested = world.json(&["mcp", "test", "--json"]);
    assert_eq!(tested[0]["tools"], json!({"Read": "other__Read", "Write": "other__Write"}));
    assert_eq!((&tested[0]["state"], &tested[0]["changed"]), (&json!({"is": "ready"}), &json!({})));
    assert_snapshot!(world.run(&["mcp", "test", "othr"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: there is no MCP server `othr`
    hint: did you mean `other`?
    ");
}

#[test]
fn a_name_does_not_go_quietly_from_our_tool_to_that_of_a_server() {
    let manifest = "[[tool]]\nname = \"write_file\"\ndescription = \"\"\ncommand = [\"true\"]\n";
    let program = env!("CARGO_BIN_EXE_wieldy");
    let folder = std::path::Path::new(program).parent().unwrap().display().to_string();
    let config = format!(
        "[mcp.servers.fs]\ncommand = {program:?}\nargs = [\"mcp\", \"--config\", \"other/other.toml\", \"--workspace\", \
         \"other\", \"--isolation\", \"none\", \"--state\", \"other-state\"]\nisolation = \"none\"\nmounts = [{folder:?}]\n"
    );
    let world = World::new()
        .file("other/fs.toml", manifest)
        .file("other/other.toml", "[tools]\nmanifests = [\"fs.toml\"]\n")
        .file("wieldy.toml", &config);
    let ambiguous = "`write_file` could be any of `Write`, `fs__write_file`";
    // The tools of the server are not known yet, and it is asked before the name is given to our tool.
    let told = world.run(&["call", "write_file", "path=a.txt", "content=x"]);
    assert!(told.starts_with("exit: 3") && told.contains(&format!("error[E3001]: {ambiguous}")), "{told}");
    assert!(!world.path("a.txt").exists());
    let mut client = Client::start(&world, &[]);
    let answer = client.call(1, "write_file", json!({"path": "a.txt", "content": "x"}));
    let error = &answer["error"]["data"];
    assert_eq!((&error["code"], &error["message"]), (&json!("E3001"), &json!(ambiguous)), "{answer}");
    client.end();
    assert_eq!(world.code(&["call", "Write", "path=a.txt", "content=x"]), Some(0));
}

// Shows: E7.3
#[test]
fn a_server_that_is_broken_does_not_hide_the_others_and_says_why() {
    let world = world(
        "allow = [\"Read\"]\n[mcp.servers.broken]\ncommand = \"sh\"\nargs = [\"-c\", \"echo no luck >&2; exit 3\"]\nisolation = \"none\"\n[mcp.servers.missing]\ncommand = \"no-such-program\"\n[mcp.servers.unset]\nurl = \"http://127.0.0.1:9/mcp\"\nheaders = { Authorization = \"Bearer ${NOT_SET_ANYWHERE}\" }\n[mcp.servers.nobody]\nurl = \"http://127.0.0.1:9/mcp\"\n",
    );
    assert_eq!(world.code(&["call", "other__Read", "path=notes.txt"]), Some(0));
    let tested = world.json(&["mcp", "test", "--json"]);
    let told: Vec<_> = tested
        .as_array()
        .unwrap()
        .iter()
        .map(|server| {
            json!([
                server["name"],
                server["state"]["is"],
                server["state"]["error"]["code"],
                server["state"]["error"]["message"]
            ])
        })
        .collect();
    let missing = told[1][3].as_str().unwrap().split(" in the ").next().unwrap();
    assert_eq!(missing, "the MCP server `missing` cannot be used: there is no program `no-such-program`");
    assert_eq!(
        json!([told[0], told[2], told[3], told[4]]),
        json!([
            [
                "broken",
                "degraded",
                "E3201",
                "the MCP server `broken` cannot be reached: it ended with code 3; its last output: no luck"
            ],
            ["nobody", "degraded", "E3201", told[2][3]],
            ["other", "ready", null, null],
            [
                "unset",
                "degraded",
                "E3301",
                "the MCP server `unset` cannot be used: `Authorization`: the variable `NOT_SET_ANYWHERE` is not set"
            ],
        ])
    );
    assert_eq!(world.code(&["mcp", "test"]), Some(7));
}

/// The client files in the guide have the form that these clients use, as far as we know.
#[test]
fn the_examples_of_the_guide_are_imported_as_shown() {
    let guide = include_str!("../../../../docs/guide/16-in-front-of-mcp-servers.md");
    let (_, section) = guide.split_once("\n## In the client's words\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let mut places = Vec::new();
    for (kind, text) in section.split("```").skip(1).step_by(2).map(|shown| shown.split_once('\n').unwrap()) {
        let file = format!("client.{kind}");
        let printed = World::new().file(&file, text).run(&["mcp", "import", &file, "--print"]);
        let ours = "[mcp.servers.wieldy]\ncommand = \"wieldy\"\nargs = [\"mcp\", \"--config\", ";
        assert!(printed.contains(ours), "{text}{printed}");
        places.push(text.split(['"', '.', '[']).nth(1).unwrap());
    }
    assert_eq!(places, ["mcpServers", "servers", "context_servers", "mcp", "mcp_servers"]);
}

// Shows: E7.1
#[test]
fn servers_of_another_client_are_imported_and_their_secrets_kept_apart() {
    let world = World::new().file(
        "mcp.json",
        r#"{ // as editors write it
            "mcpServers": {
                "git": {"command": "sh", "args": ["mcp-server-git"], "env": {"GIT_TOKEN": "ghp_16C7e42F292c6912E7710c838347Ae178B4a", "LEVEL": "3"}},
                "hub": {"url": "https://hub.test/mcp", "headers": {"Authorization": "Bearer ${env:HUB}"}},
                "old": {"command": "x", "disabled": true},
            }
        }"#,
    );
    assert_snapshot!(world.run(&["mcp", "import", "mcp.json", "--print"]), @r#"
    exit: 0
    ----- stdout -----
    [mcp.servers.git]
    command = "sh"
    args = ["mcp-server-git"]

    [mcp.servers.git.env]
    LEVEL = "3"

    [mcp.servers.git.env.GIT_TOKEN]
    file = "[root]/home/.local/state/wieldy/mcp/secrets/git.GIT_TOKEN"

    [mcp.servers.hub]
    url = "https://hub.test/mcp"

    [mcp.servers.hub.headers]
    Authorization = "Bearer ${HUB}"

    ----- stderr -----
    `old` is left out
    "#);
    assert!(!world.path("wieldy.toml").exists());
    assert_snapshot!(world.run(&["mcp", "import", "mcp.json"]), @"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    `old` is left out
    imported 2 servers into `wieldy.toml`; `wieldy mcp test` tests them
    ");
    assert_snapshot!(std::fs::read_to_string(world.path("wieldy.toml")).unwrap().replace(&world.path("..").canonicalize().unwrap().display().to_string(), "[root]"), @r#"
    [mcp.servers.git]
    command = "sh"
    args = ["mcp-server-git"]

    [mcp.servers.git.env]
    LEVEL = "3"

    [mcp.servers.git.env.GIT_TOKEN]
    file = "[root]/home/.local/state/wieldy/mcp/secrets/git.GIT_TOKEN"

    [mcp.servers.hub]
    url = "https://hub.test/mcp"

    [mcp.servers.hub.headers]
    Authorization = "Bearer ${HUB}"
    "#);
    assert_snapshot!(world.run(&["mcp", "import", "mcp.json", "--only", "hub"]), @"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    `git` is left out
    `hub` is left out: the configuration has a server of this name
    `old` is left out
    there is nothing to import
    ");
    assert_snapshot!(world.run(&["mcp", "list"]), @"
    exit: 0
    ----- stdout -----
    git  stdio  its tools are not known yet
    hub  none   the MCP server `hub` cannot be used: `Authorization`: the variable `HUB` is not set

    ----- stderr -----
    ");
    assert_snapshot!(world.run(&["config", "show"]).lines().filter(|line| line.contains("mcp.")).collect::<Vec<_>>().join("\n"), @r#"
    mcp.files = []  # default
    mcp.list-wait = "4s"  # default
    mcp.servers.git.args = ["mcp-server-git"]  # file wieldy.toml
    mcp.servers.git.command = "sh"  # file wieldy.toml
    mcp.servers.git.env.GIT_TOKEN.file = "[root]/home/.local/state/wieldy/mcp/secrets/git.GIT_TOKEN"  # file wieldy.toml
    mcp.servers.git.env.LEVEL = "***"  # file wieldy.toml
    mcp.servers.hub.headers.Authorization = "***"  # file wieldy.toml
    mcp.servers.hub.url = "https://hub.test/mcp"  # file wieldy.toml
    serve.mcp.batch = "read-only"  # default
    serve.mcp.categories = []  # default
    serve.mcp.instructions = ""  # default
    serve.mcp.names = []  # default
    serve.mcp.page = 100  # default
    serve.mcp.patience = "45s"  # default
    serve.mcp.priority-max = "normal"  # default
    serve.mcp.providers = []  # default
    serve.mcp.task-after = "5s"  # default
    serve.mcp.tools = "all"  # default
    "#);
    let kept = world.path("../home/.local/state/wieldy/mcp/secrets/git.GIT_TOKEN");
    assert_eq!(std::fs::read_to_string(&kept).unwrap(), "ghp_16C7e42F292c6912E7710c838347Ae178B4a");
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(kept).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_file_of_another_client_can_be_followed_instead() {
    let world = World::new()
        .file("wieldy.toml", "[mcp]\nfiles = [\"mcp.json\"]\n")
        .file("mcp.json", r#"{"mcpServers": {"git": {"command": "sh"}, "off": {"command": "x", "disabled": true}}}"#);
    assert_snapshot!(world.run(&["mcp", "list"]), @"
    exit: 0
    ----- stdout -----
    git  stdio  its tools are not known yet

    ----- stderr -----
    ");
    let broken = world.file("mcp.json", "{}");
    assert_snapshot!(broken.run(&["mcp", "list"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: cannot import MCP servers from `mcp.json`
      caused by: it has none of `mcpServers`, `servers`, `context_servers`, `mcp` and `mcp_servers`
    hint: name the file in which an MCP client, such as an editor, stores its servers
    ");
}

// Shows: B1.3
#[test]
fn a_change_is_shown_refused_and_agreed_to() {
    let server = r#"while read -r line; do
  id=$(printf %s "$line" | sed -n 's/.*"id":\([0-9]*\).*/\1/p')
  case "$line" in
    *'"initialize"'*) echo '{"jsonrpc":"2.0","id":'$id',"result":{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"sh","version":"1"}}}';;
    *'"tools/list"'*) echo '{"jsonrpc":"2.0","id":'$id',"result":{"tools":[{"name":"hi","description":"'$(cat about)'","inputSchema":{"type":"object"}}]}}';;
    *'"tools/call"'*) echo '{"jsonrpc":"2.0","id":'$id',"result":{"content":[{"type":"text","text":"hi"}]}}';;
    *'"id"'*) echo '{"jsonrpc":"2.0","id":'$id',"error":{"code":-32601,"message":"no"}}';;
  esac
done
"#;
    let world = World::new()
        .file("server.sh", server)
        .file("about", "Greets")
        .file("wieldy.toml", "[mcp.servers.sh]\ncommand = \"sh\"\nargs = [\"server.sh\"]\n");
    assert_snapshot!(world.run(&["call", "sh__hi"]), @"
    exit: 0
    ----- stdout -----
    hi
    ----- stderr -----
    ");
    let world = world.file("about", "Steals");
    assert_snapshot!(world.run(&["call", "sh__hi", "--retries", "0"]), @r#"
    exit: 4
    ----- stdout -----

    ----- stderr -----
    [time]  WARN wieldy::mcp: a tool changed and is refused server="sh" tool="hi" diff="--- agreed\n+++ now\n@@ -1,3 +1,3 @@\n {\n-  \"description\": \"Greets\",\n+  \"description\": \"Steals\",\n   \"inputSchema\": {\n"
    error[E3003]: the MCP server `sh` changed its tool `hi` since it was agreed to
    hint: have the operator look at the change and agree to it: `wieldy mcp pin sh`
    "#);
    assert_snapshot!(world.run(&["mcp", "pin", "sh"]), @r#"
    exit: 4
    ----- stdout -----

    ----- stderr -----
    [time]  WARN wieldy::mcp: a tool changed and is refused server="sh" tool="hi" diff="--- agreed\n+++ now\n@@ -1,3 +1,3 @@\n {\n-  \"description\": \"Greets\",\n+  \"description\": \"Steals\",\n   \"inputSchema\": {\n"
    `hi` of `sh` changed:
        --- agreed
        +++ now
        @@ -1,3 +1,3 @@
         {
        -  "description": "Greets",
        +  "description": "Steals",
           "inputSchema": {
    error: a person must agree to the changes of `sh`, and there is no terminal to ask
    hint: `--yes` agrees beforehand
    "#);
    assert_snapshot!(world.run(&["mcp", "pin", "sh", "--yes"]), @r#"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    [time]  WARN wieldy::mcp: a tool changed and is refused server="sh" tool="hi" diff="--- agreed\n+++ now\n@@ -1,3 +1,3 @@\n {\n-  \"description\": \"Greets\",\n+  \"description\": \"Steals\",\n   \"inputSchema\": {\n"
    `hi` of `sh` changed:
        --- agreed
        +++ now
        @@ -1,3 +1,3 @@
         {
        -  "description": "Greets",
        +  "description": "Steals",
           "inputSchema": {
    agreed to 1 tool of `sh`, 1 of them changed
    "#);
    assert_snapshot!(world.run(&["call", "sh__hi"]), @"
    exit: 0
    ----- stdout -----
    hi
    ----- stderr -----
    ");
}

#[test]
fn when_the_command_is_killed_nothing_of_its_servers_is_left() {
    for isolation in ["none", "native"] {
        let mark = format!("86{}", std::process::id());
        let script = format!("sleep {mark} & setsid sleep {mark} & sleep {mark}");
        let world = World::new().file(
            "wieldy.toml",
            &format!("[mcp.servers.slow]\ncommand = \"sh\"\nargs = [\"-c\", {script:?}]\nisolation = {isolation:?}\n"),
        );
        let mut child = world.command(&["mcp", "test"]).spawn().unwrap();
        until(|| sleeping(&mark) == 3);
        child.kill().unwrap();
        child.wait().unwrap();
        until(|| sleeping(&mark) == 0);
    }
}

fn until(is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(5), "it did not come");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Counts the processes that sleep for this time.
fn sleeping(mark: &str) -> usize {
    let lines =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| std::fs::read(entry.ok()?.path().join("cmdline")).ok());
    lines.filter(|line| *line == format!("sleep\0{mark}\0").into_bytes()).count()
}

/// Starts a server that returns all headers of each request, as a result and as an error.
fn telltale() -> (std::net::SocketAddr, tokio::runtime::Runtime) {
    use axum::http::{HeaderMap, StatusCode};
    use axum::response::IntoResponse;
    let answer = async |headers: HeaderMap, message: axum::Json<serde_json::Value>| {
        let sent: Vec<&str> = headers.values().filter_map(|value| value.to_str().ok()).collect();
        // Put each word on a line of its own.
        let sent = sent.join(" ").replace(' ', "\n");
        let told = match message["method"].as_str().unwrap_or_default() {
            "initialize" => (
                "result",
                json!({"protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
                "serverInfo": {"name": "telltale", "version": "1"}}),
            ),
            "tools/list" => {
                let tool = |name: &str| json!({"name": name, "inputSchema": {"type": "object"}});
                ("result", json!({"tools": [tool("tell"), tool("fail")]}))
            }
            "tools/call" if message["params"]["name"] == "tell" => {
                ("result", json!({"content": [{"type": "text", "text": sent}]}))
            }
            "tools/call" => ("error", json!({"code": -32000, "message": format!("no: {sent}")})),
            _ if message["id"].is_null() => return StatusCode::ACCEPTED.into_response(),
            _ => ("error", json!({"code": -32601, "message": "method not found"})),
        };
        axum::Json(json!({"jsonrpc": "2.0", "id": message["id"], told.0: told.1})).into_response()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    runtime.spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await });
    (address, runtime)
}

/// Returns the files below a folder whose bytes contain this text.
fn holding(folder: &std::path::Path, text: &str) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path());
    let holds = |path: std::path::PathBuf| {
        if path.is_dir() {
            return holding(&path, text);
        }
        let bytes = std::fs::read(&path).unwrap();
        let is_held = bytes.windows(text.len()).any(|window| window == text.as_bytes());
        if is_held { vec![path] } else { Vec::new() }
    };
    entries.flat_map(holds).collect()
}

#[test]
fn values_of_headers_are_redacted_everywhere_but_in_results() {
    let (address, _runtime) = telltale();
    let config = format!(
        "[log]\nlevel = \"trace\"\nfile = \"log/log.txt\"\n[mcp.servers.hub]\nurl = \"http://{address}/mcp\"\n[mcp.servers.hub.headers]\nX-Api-Key = \"canary-of-a-key\"\nAuthorization = \"Bearer canary-of-a-bearer\"\nX-Place = \"${{PLACE_OF_IT}}\"\nX-Kept = {{ file = \"kept\" }}\n"
    );
    let world = World::new()
        .file("wieldy.toml", &config)
        .file("kept", "Basic canary-in-a-file")
        .file("log/.keep", "")
        .variable("PLACE_OF_IT", "canary-of-a-variable");
    let told = world.run(&["call", "hub__tell"]);
    for canary in ["canary-of-a-key", "canary-of-a-bearer", "canary-in-a-file", "canary-of-a-variable"] {
        assert!(told.contains(canary), "it was sent, and results are not redacted: {told}");
    }
    assert!(world.run(&["call", "hub__fail"]).contains("canary-of-a-key"));
    assert_eq!(world.code(&["mcp", "test"]), Some(0));
    for shown in [&["config", "show"][..], &["mcp", "list", "--json"], &["history", "--json"]] {
        let shown = world.run(shown);
        assert!(shown.contains("hub") && !shown.contains("canary"), "{shown}");
    }
    assert_eq!(holding(&world.path("../home"), "canary"), Vec::<std::path::PathBuf>::new());
    assert!(!holding(&world.path("log"), "hub__tell").is_empty());
    assert_eq!(holding(&world.path("log"), "canary"), Vec::<std::path::PathBuf>::new());
}

#[test]
fn every_header_that_is_imported_is_kept_apart() {
    let world = World::new().file(
        "mcp.json",
        r#"{"mcpServers": {"hub": {"url": "https://hub.test/mcp",
            "headers": {"X-Api-Key": "canary-of-a-key", "X-Given": "${env:GIVEN}"}}}}"#,
    );
    let told = world.run(&["mcp", "import", "mcp.json"]);
    assert!(!told.contains("canary"), "{told}");
    let config = std::fs::read_to_string(world.path("wieldy.toml")).unwrap();
    assert!(!config.contains("canary") && config.contains(r#"X-Given = "${GIVEN}""#), "{config}");
    let kept = holding(&world.path("../home"), "canary-of-a-key");
    assert_eq!(kept.iter().filter_map(|path| path.file_name()).collect::<Vec<_>>(), ["hub.X-Api-Key"]);
}

/// Makes a world with a server in a native sandbox whose only tool returns the output of `look`. `more` is added to its
/// section.
fn looking(world: World, look: &str, more: &str) -> World {
    let script = r#"while read -r line; do
id=$(printf '%s' "$line" | sed -n 's/^[^i]*"id":\([0-9]*\).*/\1/p')
case $line in
*'"initialize"'*) answer='"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"sh","version":"1"}}';;
*'"tools/list"'*) answer='"result":{"tools":[{"name":"look","inputSchema":{"type":"object"}}]}';;
*'"tools/call"'*) answer='"result":{"content":[{"type":"text","text":"'$(sh ./look 2>&1 | tr '\n' ' ')'"}]}';;
*'"id"'*) answer='"error":{"code":-32601,"message":"no"}';;
*) continue;;
esac
printf '{"jsonrpc":"2.0","id":%s,%s}\n' "$id" "$answer"; done"#;
    let config = format!("[mcp.servers.eye]\ncommand = \"sh\"\nargs = [\"./serve\"]\nisolation = \"native\"\n{more}");
    world.file("serve", script).file("look", look).file("wieldy.toml", &config)
}

/// Returns the answer of the server.
fn looked(world: &World, variables: &[(&str, &str)]) -> String {
    let output = world.command(&["call", "eye__look", "--json"]).envs(variables.iter().copied()).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let told: serde_json::Value = serde_json::from_str(&told)
        .unwrap_or_else(|error| panic!("{error}: {told}{}", String::from_utf8_lossy(&output.stderr)));
    told["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{told:#}")).trim().to_owned()
}

#[test]
fn a_server_starts_where_the_workspace_holds_the_state_and_does_not_see_it() {
    let look = "echo kept >> ~/note; cat ~/note; cat state/pins/x state/mcp/pins.json; ls state; echo > state/new";
    let world = looking(World::new(), look, "").file("mine", "");
    let state = world.path("state").display().to_string();
    let said = looked(&world, &[("WIELDY_STATE", &state)]);
    let refused = ["state/pins/x", "state/mcp/pins.json", "state/new"];
    assert!(said.starts_with("kept "), "{said}");
    assert!(refused.iter().all(|path| said.contains(path)) && !said.contains("revision"), "{said}");
    assert_eq!(std::fs::read_to_string(world.path("state/homes/eye/note")).unwrap(), "kept\n");
    assert!(!world.path("state/new").exists());
}

#[test]
fn certificates_and_proxies_are_handed_on_as_far_as_the_network_is_open() {
    let look =
        "test -n \"$SSL_CERT_FILE\" && cat $SSL_CERT_FILE; echo $http_proxy $NO_PROXY $NODE_EXTRA_CA_CERTS $OTHER";
    let folder = tempfile::tempdir().unwrap();
    let certificates = folder.path().canonicalize().unwrap().join("ca.pem");
    std::fs::write(&certificates, "CA\n").unwrap();
    let certificates = certificates.display().to_string();
    let variables = [
        ("SSL_CERT_FILE", certificates.as_str()),
        ("NODE_EXTRA_CA_CERTS", "/nowhere/ca.pem"),
        ("http_proxy", "http://ada:correct-horse@127.0.0.1:9"),
        ("NO_PROXY", "localhost"),
        ("OTHER", "other"),
    ];
    for (network, said) in [("\"open\"", "CA http://ada:correct-horse@127.0.0.1:9 localhost"), ("\"none\"", "")] {
        let world = looking(World::new(), look, &format!("network = {network}\n"));
        assert_eq!(looked(&world, &variables), said, "{network}");
        assert_eq!(
            holding(&world.path("../home"), "correct-horse"),
            Vec::<std::path::PathBuf>::new(),
            "it is recorded"
        );
    }
    let world = looking(World::new(), look, "network = [\"a.test\"]\n");
    let said = looked(&world, &variables);
    assert!(said.starts_with("CA http://127.0.0.1:") && !said.contains("ada"), "{said}");
}

#[test]
fn a_path_in_a_variable_may_be_relative_or_an_address() {
    let look = "cat ../near/file ${FILE#file://} ${DATA#sqlite:///}; echo more >> ../near/file; cat ../far/file";
    let world = World::new();
    for folder in ["near", "made", "data", "far"] {
        std::fs::create_dir(world.path("..").join(folder)).unwrap();
        std::fs::write(world.path("..").join(folder).join("file"), format!("{folder}\n")).unwrap();
    }
    let root = world.path("..").canonicalize().unwrap().display().to_string();
    let env = format!(
        "env = {{ NEAR = \"../near/file\", FILE = \"file://{root}/made/file\", DATA = \"sqlite:///{root}/data/file\", FAR = \"a/../far\" }}\n"
    );
    let world = looking(world, look, &env);
    assert_eq!(looked(&world, &[]), "near made data cat: ../far/file: No such file or directory");
    assert_eq!(std::fs::read_to_string(world.path("../near/file")).unwrap(), "near\nmore\n");
}

#[test]
fn a_path_in_a_variable_is_mounted_or_a_warning_is_logged() {
    let look = "for path in $FILE $NEW $FOLDER/x; do cat $path; echo more >> $path; done; cat $KEY; echo x >> $KEY";
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    for (path, text) in
        [("file", "old\n"), ("beside", ""), ("made/beside", ""), ("folder/x", "in\n"), ("home/.ssh/id", "key\n")]
    {
        std::fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
        std::fs::write(root.join(path), text).unwrap();
    }
    let root = root.display().to_string();
    let env = format!(
        "env = {{ FILE = \"{root}/file\", NEW = \"{root}/made/new\", FOLDER = \"{root}/folder\", KEY = \"{root}/home/.ssh/id\", ALL = \"{root}/home/.ssh\" }}\n"
    );
    let home = format!("{root}/home");
    let world = looking(World::new().variable("HOME", &home), look, &env);
    let said = looked(&world, &[]);
    assert_eq!(
        said.replace(&root, "[root]"),
        "old cat: [root]/made/new: No such file or directory in key ./look: 1: cannot create [root]/home/.ssh/id: Read-only file system"
    );
    let read = |path: &str| std::fs::read_to_string(format!("{root}/{path}")).unwrap();
    assert_eq!(
        ["file", "made/new", "folder/x", "home/.ssh/id"].map(read),
        ["old\nmore\n", "more\n", "in\nmore\n", "key\n"]
    );
    let output = world.command(&["mcp", "test"]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).replace(&root, "[root]");
    assert!(told.contains("a server does not see the path in its variable: add it to its `mounts`"), "{told}");
    assert!(told.contains("variable=\"ALL\" path=[root]/home/.ssh"), "{told}");
}

#[test]
fn hints_name_the_setting_that_keeps_a_server_from_working() {
    let world = World::new().file("docker", "#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2; exit 1\n");
    let docker = world.path("docker").display().to_string();
    std::process::Command::new("chmod").args(["+x", &docker]).status().unwrap();
    let fails = "command = \"sh\"\nargs = [\"-c\", \"echo getaddrinfo ENOTFOUND registry.test >&2; exit 1\"]\n";
    let config = format!(
        "[mcp.servers.box]\ncommand = {docker:?}\nargs = [\"run\", \"-i\", \"mcp/time\"]\n[mcp.servers.lone]\n{fails}network = \"none\"\n[mcp.servers.few]\n{fails}network = [\"a.test\"]\n[mcp.servers.all]\n{fails}[mcp.servers.old]\nurl = \"http://127.0.0.1:9/sse\"\n"
    );
    let world = world.file("wieldy.toml", &config);
    let tested = world.json(&["mcp", "test", "--json"]);
    let hints: Vec<_> =
        tested.as_array().unwrap().iter().map(|server| &server["state"]["error"]["suggestion"]).collect();
    assert_eq!(
        json!(hints),
        json!([
            "`wieldy mcp test all` shows details",
            "`docker` needs its daemon, which no sandbox can reach: `isolation = \"none\"` under `[mcp.servers.box]` lets it start containers",
            "wieldy lets this server reach no hosts but `a.test`: `network = \"open\"` or a list of hosts under `[mcp.servers.few]` changes that",
            "wieldy lets this server reach no network: `network = \"open\"` or a list of hosts under `[mcp.servers.lone]` changes that",
            "the address ends like one of the old transport HTTP+SSE, which wieldy does not speak: give the server's address for streamable HTTP as `url` under `[mcp.servers.old]`, often `/mcp` instead of `/sse`",
        ])
    );
}

#[test]
fn a_missing_program_of_a_server_is_named_without_the_whole_path() {
    let server = |command: &str| format!("[mcp.servers.hub]\ncommand = \"{command}\"\n");
    let world = World::new().file("wieldy.toml", &server("no-such-hub")).variable("PATH", "/usr/bin:/bin");
    assert_snapshot!(world.run(&["--log", "off", "mcp", "test", "hub"]), @"
    exit: 2
    ----- stdout -----
    hub: E3301 CONFIGURATION: the MCP server `hub` cannot be used: there is no program `no-such-hub` in the 2 folders of PATH; install it, or set `command` to its full path
      hint: correct the section `mcp.servers.hub` of the configuration

    ----- stderr -----
    ");
    let world = world.file("wieldy.toml", &server("./bin/hub"));
    assert_snapshot!(world.run(&["--log", "off", "mcp", "test", "hub"]), @"
    exit: 2
    ----- stdout -----
    hub: E3301 CONFIGURATION: the MCP server `hub` cannot be used: there is no program `[root]/work/bin/hub` that can be run
      hint: correct the section `mcp.servers.hub` of the configuration

    ----- stderr -----
    ");
}
