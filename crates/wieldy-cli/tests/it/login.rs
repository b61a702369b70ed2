//! Tests of a login to an MCP server as a person does it: `wieldy mcp login`, a browser, and then calls.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;

use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::world::World;

/// A server that requires a login and issues the tokens itself.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) runtime: tokio::runtime::Runtime,
}

impl Server {
    /// Starts the server. `page` is the advertised login page, if it is not the server's own.
    pub(crate) fn new(page: Option<&'static str>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let router = axum::Router::new().fallback(move |request: Request| answer(request, address, page));
        runtime.spawn(async move { axum::serve(listener, router).await });
        Self { address, runtime }
    }

    /// Makes a world that knows the server by the name `mail`.
    fn world(&self) -> World {
        World::new().file("wieldy.toml", &format!("[mcp.servers.mail]\nurl = \"http://{}/mcp\"\n", self.address))
    }
}

fn json_answer(status: u16, value: &Value) -> Response {
    let status = StatusCode::from_u16(status).unwrap();
    (status, [("content-type", "application/json")], value.to_string()).into_response()
}

async fn answer(request: Request, address: SocketAddr, page: Option<&'static str>) -> Response {
    let here = format!("http://{address}");
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let message: Value = serde_json::from_slice(&body).unwrap_or_default();
    let is_known = head.headers.get("authorization").is_some_and(|token| token == "Bearer a-token-for-mail");
    match head.uri.path() {
        "/mcp" if !is_known => {
            let challenge = format!("Bearer resource_metadata=\"{here}/.well-known/oauth-protected-resource\"");
            (StatusCode::UNAUTHORIZED, [("www-authenticate", challenge)]).into_response()
        }
        "/mcp" => serve(&message),
        "/.well-known/oauth-protected-resource" => {
            json_answer(200, &json!({"resource": format!("{here}/mcp"), "authorization_servers": [here]}))
        }
        "/.well-known/oauth-authorization-server" => json_answer(
            200,
            &json!({"issuer": here, "authorization_endpoint": page.map_or(format!("{here}/authorize"), str::to_owned),
                "token_endpoint": format!("{here}/token"), "registration_endpoint": format!("{here}/register"),
                "code_challenge_methods_supported": ["S256"]}),
        ),
        "/register" => json_answer(201, &json!({"client_id": "c", "redirect_uris": message["redirect_uris"]})),
        "/authorize" => {
            let query = head.uri.query().unwrap();
            let find = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(&format!("{name}="))).unwrap();
            let back = find("redirect_uri").replace("%3A", ":").replace("%2F", "/");
            (StatusCode::FOUND, [("location", format!("{back}?code=a-code-for-once&state={}", find("state")))])
                .into_response()
        }
        "/token" => {
            let form = String::from_utf8(body.to_vec()).unwrap();
            assert!(form.contains("code=a-code-for-once") && form.contains("code_verifier="), "{form}");
            json_answer(200, &json!({"access_token": "a-token-for-mail", "token_type": "bearer", "expires_in": 3600}))
        }
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

fn serve(message: &Value) -> Response {
    let result = match message["method"].as_str().unwrap_or_default() {
        "initialize" => json!({"protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
            "serverInfo": {"name": "mail", "version": "1"}}),
        "tools/list" => json!({"tools": [{"name": "count", "inputSchema": {"type": "object"}}]}),
        "tools/call" => json!({"content": [{"type": "text", "text": "3 letters"}]}),
        _ if message["id"].is_null() => return StatusCode::ACCEPTED.into_response(),
        _ => {
            let error = json!({"code": -32601, "message": "method not found"});
            return json_answer(200, &json!({"jsonrpc": "2.0", "id": message["id"], "error": error}));
        }
    };
    json_answer(200, &json!({"jsonrpc": "2.0", "id": message["id"], "result": result}))
}

/// Requests an address as a browser does, and returns the head and the body of the response.
fn get(url: &str) -> String {
    let (host, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut stream = TcpStream::connect(host).unwrap();
    write!(stream, "GET /{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Logs in at the page, and returns the address that the browser is sent to.
fn logged_in(page: &str) -> String {
    let answer = get(page);
    let location = answer.lines().find_map(|line| line.strip_prefix("location: ")).unwrap();
    location.trim().to_owned()
}

#[test]
fn a_person_logs_in_calls_and_logs_out() {
    let server = Server::new(None);
    let world = server.world();
    let told = world.run(&["mcp", "test"]);
    assert!(told.contains("mail: E3301 CONFIGURATION: the MCP server `mail` wants a login"), "{told}");
    assert!(told.contains("hint: `wieldy mcp login mail`"), "{told}");
    insta::assert_snapshot!(world.run(&["mcp", "list"]), @r"
    exit: 0
    ----- stdout -----
    mail  http   its tools are not known yet, wants a login

    ----- stderr -----
    ");

    let mut child = world.command(&["mcp", "login", "mail"]).spawn().unwrap();
    let mut page = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut page).unwrap();
    let back = logged_in(page.trim());
    assert!(get(&back.replace("state=", "state=forged")).starts_with("HTTP/1.1 404"));
    assert!(get(&back).ends_with("wieldy has the answer. You can close this window."));
    insta::assert_snapshot!(world.told(&child.wait_with_output().unwrap()), @r"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    open this page in a browser and log in:
    waiting for the answer; if the browser runs on another machine, use `--paste`
    logged in to `mail`; `wieldy mcp test mail` tries it
    ");

    let told = world.run(&["call", "mail__count"]);
    assert!(told.contains("3 letters"), "{told}");
    assert!(world.run(&["mcp", "list"]).contains("mail  http   1 tool, logged in"));
    let kept = world.path("../home/.local/state/wieldy/mcp/logins/mail.json");
    assert_eq!(kept.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let log = world.run(&["--log", "trace", "call", "mail__count"]);
    assert!(log.contains("3 letters") && !log.contains("a-token-for-mail"), "{log}");

    insta::assert_snapshot!(world.run(&["mcp", "logout", "mail"]), @r"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    the login to `mail` is forgotten here; the server may accept it until it expires
    ");
    assert!(!kept.exists());
    assert_eq!(world.json(&["--json", "mcp", "logout", "mail"]), json!({"server": "mail", "forgotten": false}));
}

#[test]
fn the_answer_can_be_typed_where_the_browser_is_elsewhere() {
    let server = Server::new(None);
    let world = server.world();
    let mut child = world.command(&["mcp", "login", "mail", "--paste"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut page = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut page).unwrap();
    writeln!(child.stdin.take().unwrap(), "{}", logged_in(page.trim())).unwrap();
    let told = world.told(&child.wait_with_output().unwrap());
    assert!(told.ends_with("logged in to `mail`; `wieldy mcp test mail` tries it\n"), "{told}");
    assert!(world.run(&["call", "mail__count"]).contains("3 letters"));

    let forged =
        world.run_with_input(&["mcp", "login", "mail", "--paste"], "http://127.0.0.1:1/callback?code=x&state=y\n");
    assert!(forged.starts_with("exit: 7"), "{forged}");
    assert!(
        forged.ends_with(
            "error: cannot log in to the MCP server `mail`\n  caused by: this is the answer to another login\n\
             hint: `wieldy mcp login mail` starts again\n"
        ),
        "{forged}"
    );
}

#[test]
fn pages_that_must_not_be_opened_are_not_even_shown_as_such() {
    let server = Server::new(Some("javascript:alert(1)//$(reboot)\u{1b}[2J"));
    insta::assert_snapshot!(server.world().run(&["mcp", "login", "mail"]), @r"
    exit: 7
    ----- stdout -----

    ----- stderr -----
    error: cannot log in to the MCP server `mail`
      caused by: its login page must not be opened: `javascript:alert(1)//$(reboot)\u{1b}[2J` begins with neither http:// nor https://
    ");
}

#[test]
fn only_servers_with_an_address_can_be_logged_in_to() {
    let world = World::new().file(
        "wieldy.toml",
        "[mcp.servers.git]\ncommand = \"git-mcp\"\n[mcp.servers.hub]\nurl = \"https://hub.example/mcp\"\nheaders = { authorization = \"Bearer ${HUB}\" }\n",
    );
    let world = world.variable("HUB", "x");
    let told = |server: &str| {
        let told = world.run(&["mcp", "login", server]);
        assert!(told.starts_with("exit: 2"), "{told}");
        told.split_once("----- stderr -----\n").unwrap().1.to_owned()
    };
    assert_eq!(told("gitt"), "error: there is no MCP server `gitt`\nhint: did you mean `git`?\n");
    assert_eq!(told("git"), "error: the MCP server `git` is a program: give it a token with `env`\n");
    assert_eq!(
        told("hub"),
        "error: the MCP server `hub` already has a header `Authorization`, which would replace the login\n\
         hint: remove it from `mcp.servers.hub.headers`\n"
    );
}

#[test]
fn the_settings_of_a_login_are_checked_and_its_secret_is_not_shown() {
    let of = |oauth: &str| {
        let text = format!("[mcp.servers.hub]\nurl = \"https://hub.example/mcp\"\noauth = {oauth}\n");
        World::new().file("wieldy.toml", &text)
    };
    let world =
        of("{ client-id = \"me\", client-secret = \"correct-horse\", scopes = [\"a\"], port = 8765, private = true }");
    let shown = world.run(&["config", "show"]);
    assert!(shown.contains("client-secret") && !shown.contains("correct-horse"), "{shown}");
    for (oauth, why) in [
        ("{ client-secret = \"x\" }", "`mcp.servers.hub.oauth` has a `client-secret` without a `client-id`"),
        ("{ port = 70000 }", "must be a whole number from 1 to 65535, not 70000"),
        ("{ scope = \"x\" }", "there is no key `mcp.servers.hub.oauth.scope`"),
    ] {
        let told = of(oauth).run(&["config", "show", "--config", "wieldy.toml"]);
        assert!(told.starts_with("exit: 2") && told.contains(why), "{told}");
    }
}
