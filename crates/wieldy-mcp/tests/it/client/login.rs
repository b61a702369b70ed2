//! Servers that ask for a login: made once by a person, stored, renewed. Also servers that would misuse it.

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use reqwest::Url;
use serde_json::{Value, json};
use wieldy_core::{Status, redact};
use wieldy_mcp::client::{Address, Login, LoginError, LoginRedirect, LoginSettings, LoginState, Reach};
use wieldy_mcp::server::{Server, ServerOptions};
use wieldy_server::{HttpOptions, HttpServer, Token};

use super::bad_http::{ByHand, json_answer, plain};
use super::{Stage, until};

/// The state of an authorization server.
struct Books {
    /// The codes that were issued, each with its challenge.
    codes: HashMap<String, String>,
    /// The access tokens that the server accepts.
    access: Vec<String>,
    /// The refresh token.
    refresh: String,
    given: usize,
    lasts: u64,
    /// The token requests.
    asked: Vec<HashMap<String, String>>,
    /// The `Authorization` headers of the token requests.
    asked_by: Vec<Option<String>>,
    /// Overrides in the metadata.
    told: Value,
    told_of_server: Value,
    issuer: Option<String>,
}

/// A server that asks for a login, and its authorization server.
struct Pair {
    server: ByHand,
    logins: ByHand,
    books: Arc<Mutex<Books>>,
    folder: tempfile::TempDir,
}

impl Pair {
    async fn new() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let books = Arc::new(Mutex::new(Books {
            codes: HashMap::new(),
            access: Vec::new(),
            refresh: String::new(),
            given: 0,
            lasts: 3600,
            asked: Vec::new(),
            asked_by: Vec::new(),
            told: json!({}),
            told_of_server: json!({}),
            issuer: None,
        }));
        let kept = Arc::clone(&books);
        let logins = ByHand::new(move |asked, headers: HeaderMap, message| {
            let answer = log_in(&mut kept.lock().unwrap(), &asked, &headers, &message);
            async move { Some(answer) }
        })
        .await;
        let (kept, place) = (Arc::clone(&books), format!("http://{}", logins.address));
        let server = ByHand::new(move |asked: String, headers: HeaderMap, _| {
            let answer = serve(&kept.lock().unwrap(), &asked, &headers, &place);
            async move { answer }
        })
        .await;
        Self { server, logins, books, folder: tempfile::tempdir().unwrap() }
    }

    fn books(&self) -> std::sync::MutexGuard<'_, Books> {
        self.books.lock().unwrap()
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("mcp/logins/test.json")
    }

    fn address(&self) -> Address {
        let login = LoginSettings { file: self.file(), ..LoginSettings::default() };
        Address { login: Some(login), ..Address::new(self.server.url()) }
    }

    async fn stage(&self) -> Stage {
        stage(self.address()).await
    }

    /// Logs in as a person with a browser would.
    async fn log_in(&self) -> Result<(), LoginError> {
        log_in_to(&self.address()).await
    }
}

async fn stage(address: Address) -> Stage {
    Stage::with("", |settings| settings.reach = Reach::Http(address)).await
}

async fn log_in_to(address: &Address) -> Result<(), LoginError> {
    let answers = LoginRedirect::bind(None).await.unwrap();
    let login = Login::begin(address, answers.redirect()).await?;
    let browser = tokio::spawn(open(login.page().to_owned()));
    let answer = answers.wait(&login).await.unwrap();
    assert_eq!(browser.await.unwrap(), "wieldy has the answer. You can close this window.");
    login.finish(&answer).await
}

/// Opens a page and returns what a browser would show in the end.
async fn open(page: String) -> String {
    reqwest::get(page).await.unwrap().text().await.unwrap()
}

/// The server: it asks for a token and names its authorization server.
fn serve(books: &Books, asked: &str, headers: &HeaderMap, place: &str) -> Option<Response> {
    let here = format!("http://{}", headers["host"].to_str().unwrap());
    if asked == "GET /.well-known/oauth-protected-resource/mcp" {
        let mut told =
            json!({"resource": format!("{here}/mcp"), "authorization_servers": [place], "scopes_supported": ["tools"]});
        overlay(&mut told, &books.told_of_server);
        return Some(json_answer(200, &told));
    }
    let given = headers.get("authorization").and_then(|header| header.to_str().ok()?.strip_prefix("Bearer "));
    if given.is_some_and(|given| books.access.iter().any(|known| known == given)) {
        return None;
    }
    let mut answer = plain(401, "text/plain", "who are you?");
    let metadata = format!("Bearer resource_metadata=\"{here}/.well-known/oauth-protected-resource/mcp\"");
    answer.headers_mut().insert("www-authenticate", metadata.parse().unwrap());
    Some(answer)
}

/// The authorization server.
fn log_in(books: &mut Books, asked: &str, headers: &HeaderMap, message: &Value) -> Response {
    let here = format!("http://{}", headers["host"].to_str().unwrap());
    let url = Url::parse(&here).unwrap().join(asked.split(' ').nth(1).unwrap()).unwrap();
    let query: HashMap<String, String> = url.query_pairs().into_owned().collect();
    match (&asked[..3], url.path()) {
        ("GET", "/.well-known/oauth-authorization-server") => {
            let mut told = json!({
                "issuer": here, "authorization_endpoint": format!("{here}/authorize"),
                "token_endpoint": format!("{here}/token"), "registration_endpoint": format!("{here}/register"),
                "response_types_supported": ["code"], "code_challenge_methods_supported": ["S256"],
            });
            overlay(&mut told, &books.told);
            json_answer(200, &told)
        }
        ("POS", "/register") => {
            let mut told = message.clone();
            told["client_id"] = json!("registered-wieldy");
            json_answer(201, &told)
        }
        ("GET", "/authorize") => {
            assert_eq!(query["code_challenge_method"], "S256");
            assert!(query["resource"].ends_with("/mcp"), "{query:?}");
            assert_eq!(query["scope"], "tools");
            let code = format!("code-number-{}", books.codes.len());
            books.codes.insert(code.clone(), query["code_challenge"].clone());
            let mut back = Url::parse(&query["redirect_uri"]).unwrap();
            back.query_pairs_mut().append_pair("code", &code).append_pair("state", &query["state"]);
            back.query_pairs_mut().append_pair("iss", books.issuer.as_deref().unwrap_or(&here));
            (StatusCode::FOUND, [("location", back.to_string())]).into_response()
        }
        ("POS", "/token") => tokens(books, headers, message.as_str().unwrap()),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

fn tokens(books: &mut Books, headers: &HeaderMap, form: &str) -> Response {
    let form = Url::parse(&format!("http://x/?{form}")).unwrap();
    let form: HashMap<String, String> = form.query_pairs().into_owned().collect();
    books.asked.push(form.clone());
    books.asked_by.push(headers.get("authorization").map(|header| header.to_str().unwrap().to_owned()));
    let is_right = match form["grant_type"].as_str() {
        "authorization_code" => {
            let challenge = books.codes.remove(&form["code"]);
            challenge == Some(challenge_of(&form["code_verifier"]))
        }
        _ => !books.refresh.is_empty() && form["refresh_token"] == books.refresh,
    };
    if !is_right {
        return json_answer(400, &json!({"error": "invalid_grant"}));
    }
    books.given += 1;
    let (access, refresh) = (format!("access-token-{}", books.given), format!("refresh-token-{}", books.given));
    books.access = vec![access.clone()];
    books.refresh = refresh.clone();
    json_answer(
        200,
        &json!({"access_token": access, "token_type": "Bearer", "expires_in": books.lasts, "refresh_token": refresh}),
    )
}

fn challenge_of(verifier: &str) -> String {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let hash = ring::digest::digest(&ring::digest::SHA256, verifier.as_bytes());
    let bits = |index: usize| {
        (0..6).fold(0, |value, bit| {
            let (byte, shift) = ((index * 6 + bit) / 8, 7 - (index * 6 + bit) % 8);
            value << 1 | usize::from(hash.as_ref().get(byte).copied().unwrap_or_default() >> shift & 1)
        })
    };
    (0..43).map(|index| char::from(LETTERS[bits(index)])).collect()
}

fn overlay(value: &mut Value, other: &Value) {
    let other = other.as_object().unwrap().clone();
    value.as_object_mut().unwrap().extend(other);
}

/// Formats an error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {}", chain(source)))
}

#[tokio::test]
async fn a_login_works_for_running_clients_too() {
    let pair = Pair::new().await;
    let stage = pair.stage().await;
    assert_eq!(stage.state()["error"]["message"], "the MCP server `test` wants a login");
    assert_eq!(stage.state()["error"]["code"], "E3301");
    assert_eq!(stage.upstreams.status()[0].login, Some(LoginState::Wanted));
    pair.log_in().await.unwrap();
    assert_eq!(stage.upstreams.status()[0].login, Some(LoginState::LoggedIn));
    until(|| stage.state()["error"]["details"]["retry_after_ms"] == 0).await;
    stage.upstreams.discover(|_| true).await;
    assert_eq!(stage.call("echo", "hello").await.text(), "hello");
    let books = pair.books();
    let asked = &books.asked[0];
    assert_eq!((asked["client_id"].as_str(), &asked["resource"]), ("registered-wieldy", &pair.server.url()));
    assert_eq!(books.asked.len(), 1);
}

#[tokio::test]
async fn a_call_tries_a_server_again_that_required_a_login() {
    let pair = Pair::new().await;
    let stage = pair.stage().await;
    let error = stage.error("test__echo").await;
    assert_eq!(
        (error.code.as_str(), error.message.as_str(), error.suggestion.as_deref()),
        (
            "E3001",
            "there is no tool `test__echo`: the MCP server `test` wants a login",
            Some("`wieldy mcp login test`, or give it a token by `headers`")
        )
    );
    pair.log_in().await.unwrap();
    // A call that comes too early starts the server again.
    let answered = async {
        while stage.call("test__echo", "hello").await.text() != "hello" {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), answered).await.unwrap();
}

#[tokio::test]
async fn a_server_that_required_a_login_is_not_polled_for_a_while() {
    let pair = Pair::new().await;
    let stage = pair.stage().await;
    let asked = pair.server.seen.lock().unwrap().len();
    until(|| stage.state()["error"]["details"]["retry_after_ms"] == 0).await;
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert_eq!(pair.server.seen.lock().unwrap().len(), asked);
}

#[tokio::test]
async fn a_login_is_kept_for_its_owner_only_and_never_shown() {
    let pair = Pair::new().await;
    pair.log_in().await.unwrap();
    let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(pair.file()), 0o600);
    assert_eq!(mode(pair.file().parent().unwrap().to_owned()), 0o700);
    for secret in ["access-token-1", "refresh-token-1", "code-number-0"] {
        assert_eq!(redact::text(secret), "[redacted]");
    }
    assert!(Login::forget(&pair.address()).unwrap());
    assert!(!Login::forget(&pair.address()).unwrap());
    assert_eq!(LoginState::of(&pair.address()), None);
    assert_eq!(std::fs::read_dir(pair.file().parent().unwrap()).unwrap().count(), 0, "no other file is left");
}

#[tokio::test]
async fn a_token_is_renewed_before_it_is_too_old_and_once_for_all_calls() {
    let pair = Pair::new().await;
    pair.books().lasts = 30;
    pair.log_in().await.unwrap();
    pair.books().lasts = 3600;
    let stage = pair.stage().await;
    let answers = futures_util::future::join_all((0..50).map(async |_| stage.call("echo", "x").await.status)).await;
    assert_eq!(answers, [Status::Success; 50]);
    let books = pair.books();
    assert_eq!(books.asked.len(), 2, "{:?}", books.asked);
    let renewal = &books.asked[1];
    assert_eq!(
        (renewal["grant_type"].as_str(), renewal["refresh_token"].as_str(), &renewal["resource"]),
        ("refresh_token", "refresh-token-1", &pair.server.url())
    );
}

#[tokio::test]
async fn a_token_that_is_refused_is_renewed_and_the_call_made_then() {
    let pair = Pair::new().await;
    pair.log_in().await.unwrap();
    let stage = pair.stage().await;
    pair.books().access.clear();
    assert_eq!(stage.call("echo", "x").await.text(), "x");
    let sent = pair.server.headers("authorization");
    let last: Vec<&String> = sent.iter().flatten().rev().take(2).collect();
    assert_eq!(last, ["Bearer access-token-2", "Bearer access-token-1"]);
}

#[tokio::test]
async fn tokens_that_were_replaced_long_ago_are_forgotten() {
    let pair = Pair::new().await;
    pair.books().lasts = 30;
    pair.log_in().await.unwrap();
    let stage = pair.stage().await;
    for _ in 0..3 {
        assert_eq!(stage.call("echo", "x").await.text(), "x");
    }
    let given = pair.books().given;
    let is_hidden = |number: usize| redact::text(&format!("refresh-token-{number}")) == "[redacted]";
    let hidden: Vec<usize> = (1..=given).filter(|number| is_hidden(*number)).collect();
    assert_eq!(hidden, [given - 2, given - 1, given]);
    assert!(given > 4, "{given}");
}

#[tokio::test]
async fn a_login_that_cannot_be_renewed_must_be_repeated() {
    let pair = Pair::new().await;
    pair.log_in().await.unwrap();
    let stage = pair.stage().await;
    assert_eq!(stage.call("echo", "x").await.text(), "x");
    {
        let mut books = pair.books();
        books.access.clear();
        books.refresh.clear();
    }
    for _ in 0..2 {
        let error = stage.error("echo").await;
        assert_eq!((error.code.as_str(), error.message.as_str()), ("E3301", "the MCP server `test` wants a login"));
        assert_eq!(error.suggestion.unwrap(), "`wieldy mcp login test`, or give it a token by `headers`");
    }
    assert_eq!(pair.books().asked.len(), 2, "a refused token is not tried again");
    assert_eq!(stage.state()["error"]["code"], "E3301");
    assert_eq!(stage.upstreams.status()[0].login, Some(LoginState::Wanted));
    pair.log_in().await.unwrap();
    assert_eq!(stage.call("echo", "again").await.text(), "again");
    assert_eq!(stage.state(), json!({"is": "ready"}));
}

#[tokio::test]
async fn while_logins_cannot_be_renewed_calls_fail_without_an_effect_and_the_login_stays() {
    let pair = Pair::new().await;
    pair.books().lasts = 30;
    pair.log_in().await.unwrap();
    let address = Address { login: pair.address().login, ..pair.address() };
    pair.books().told = json!({"token_endpoint": "http://127.0.0.1:9/token"});
    let stage = stage(address).await;
    let error = stage.state()["error"].clone();
    assert_eq!(error["code"], "E3201");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("its login could not be renewed"), "{message}");
    assert_eq!(LoginState::of(&pair.address()), Some(LoginState::LoggedIn));
}

#[tokio::test]
async fn a_registered_client_authenticates_itself() {
    let pair = Pair::new().await;
    let mut address = pair.address();
    let login = address.login.as_mut().unwrap();
    (login.client_id, login.client_secret) = (Some("known".into()), Some("proof-of-it".into()));
    login.scopes = vec!["tools".into()];
    pair.books().lasts = 30;
    log_in_to(&address).await.unwrap();
    assert!(!std::fs::read_to_string(pair.file()).unwrap().contains("proof-of-it"));
    pair.books().lasts = 3600;
    let stage = stage(address).await;
    assert_eq!(stage.call("echo", "x").await.text(), "x");
    let basic = Some("Basic a25vd246cHJvb2Ytb2YtaXQ=".to_owned());
    assert_eq!(pair.books().asked_by, [basic.clone(), basic]);
}

#[tokio::test]
async fn a_token_is_sent_only_to_its_server() {
    let (pair, other) = (Pair::new().await, Pair::new().await);
    pair.log_in().await.unwrap();
    // The operator gives the name to another server.
    let address = Address { url: other.server.url(), ..pair.address() };
    let stage = stage(address).await;
    assert_eq!(stage.state()["error"]["code"], "E3301");
    assert!(other.server.headers("authorization").iter().all(Option::is_none));
}

#[tokio::test]
async fn the_token_of_our_client_is_not_passed_on() {
    let upstream = ByHand::new(async |_, _, _| None).await;
    let stage = Stage::at(upstream.url()).await;
    let mut options = HttpOptions::new("127.0.0.1:0".parse().unwrap());
    options.tokens = vec![Token::new("a-token-of-ada", wieldy_core::Caller::agent("ada"))];
    let endpoint = Server::new(stage.world.executor.clone(), ServerOptions::default()).http();
    let door = HttpServer::bind(options).await.unwrap().route("/mcp", move |request| {
        let endpoint = endpoint.clone();
        async move { endpoint.handle(request).await }
    });
    let url = format!("http://{}/mcp", door.address());
    let serving = tokio::spawn(door.serve(std::future::pending(), async {}));
    let gateway = Stage::with("", |settings| {
        settings.reach = Reach::Http(Address { bearer: Some("a-token-of-ada".into()), ..Address::new(url) });
    })
    .await;
    assert_eq!(gateway.call("test__test__echo", "through").await.text(), "through");
    assert!(upstream.headers("authorization").iter().all(Option::is_none));
    let seen = upstream.seen.lock().unwrap();
    assert!(!seen.iter().any(|(asked, headers, body)| format!("{asked}{headers:?}{body}").contains("of-ada")));
    serving.abort();
}

#[tokio::test]
async fn a_configured_token_overrides_a_login() {
    let pair = Pair::new().await;
    pair.log_in().await.unwrap();
    pair.books().access.push("the-operators-own".into());
    let before = pair.server.headers("authorization").len();
    let address = Address { bearer: Some("the-operators-own".into()), ..pair.address() };
    assert_eq!(stage(address).await.call("echo", "x").await.text(), "x");
    let sent = pair.server.headers("authorization").split_off(before);
    assert!(sent.iter().all(|header| header.as_deref() == Some("Bearer the-operators-own")), "{sent:?}");
}

#[tokio::test]
async fn a_redirect_must_belong_to_its_login() {
    let pair = Pair::new().await;
    let begin = async || Login::begin(&pair.address(), "http://127.0.0.1:1/callback").await.unwrap();
    let login = begin().await;
    let state = Url::parse(login.page()).unwrap();
    let state = state.query_pairs().find(|(name, _)| name == "state").unwrap().1.into_owned();
    let to = |query: &str| format!("http://127.0.0.1:1/callback?{query}");
    assert!(login.is_answered_by(&to(&format!("state={state}&code=x"))));
    assert!(!login.is_answered_by(&to(&format!("state=x&state={state}&code=x"))));
    assert_eq!(
        login.finish(&to("state=forged&code=x")).await.unwrap_err().to_string(),
        "this is the answer to another login"
    );
    let answer = async |query: &str| {
        let login = begin().await;
        let url = Url::parse(login.page()).unwrap();
        let state = url.query_pairs().find(|(name, _)| name == "state").unwrap().1.into_owned();
        chain(&login.finish(&to(&format!("state={state}{query}"))).await.unwrap_err())
    };
    assert_eq!(answer("").await, "this is not the answer to a login");
    assert_eq!(
        answer("&error=access_denied&error_description=not%20today").await,
        "the login was refused: access_denied: not today"
    );
    let wrong = answer("&code=x&iss=https://evil.example").await;
    assert!(wrong.contains("issuer mismatch"), "{wrong}");
    assert!(answer("&code=guessed").await.starts_with("the login was not completed: "));
    assert_eq!(begin().await.finish("no address").await.unwrap_err().to_string(), "this is not the answer to a login");
    assert!(!pair.file().exists());
    assert_eq!(pair.books().asked.len(), 1, "a code is sent only if the redirect is valid");
}

#[tokio::test]
async fn the_redirect_listener_ignores_other_requests() {
    let pair = Pair::new().await;
    let answers = LoginRedirect::bind(None).await.unwrap();
    let login = Login::begin(&pair.address(), answers.redirect()).await.unwrap();
    let door = answers.redirect().to_owned();
    let page = login.page().to_owned();
    let visitors = async {
        // A connection that sends nothing, and some that send the wrong thing.
        let _silent = tokio::net::TcpStream::connect(door.trim_start_matches("http://").trim_end_matches("/callback"))
            .await
            .unwrap();
        for query in ["", "?", "?code=x", "?code=x&state=forged", "/../x?state=y"] {
            let answer = reqwest::get(format!("{door}{query}")).await.unwrap();
            assert_eq!(answer.status(), 404);
        }
        assert_eq!(reqwest::Client::new().post(&door).body("x").send().await.unwrap().status(), 404);
        open(page).await
    };
    let (answer, page) = tokio::join!(answers.wait(&login), visitors);
    assert_eq!(page, "wieldy has the answer. You can close this window.");
    login.finish(&answer.unwrap()).await.unwrap();
}

#[tokio::test]
async fn forbidden_addresses_are_neither_opened_nor_requested() {
    let page = async |place: &str| {
        let pair = Pair::new().await;
        pair.books().told = json!({"authorization_endpoint": place});
        chain(&pair.log_in().await.unwrap_err())
    };
    let begin = "its login page must not be opened: ";
    assert_eq!(
        page("javascript:alert(1)//").await,
        format!("{begin}`javascript:alert(1)//` begins with neither http:// nor https://")
    );
    assert_eq!(
        page("http://10.0.0.1/;$(reboot)").await,
        format!("{begin}`http://10.0.0.1/;$(reboot)` is not a public address")
    );
    assert_eq!(
        page("file://localhost/etc/passwd").await,
        format!("{begin}`file://localhost/etc/passwd` begins with neither http:// nor https://")
    );
    assert_eq!(page("http://a\u{1b}[2J").await, format!("{begin}`http://a\\u{{1b}}[2J` is not a URL"));

    let told = async |of_logins: Value, of_server: Value| {
        let pair = Pair::new().await;
        pair.books().told = of_logins;
        pair.books().told_of_server = of_server;
        let error = chain(&pair.log_in().await.unwrap_err());
        assert!(!pair.file().exists());
        (error, pair.logins.seen.lock().unwrap().len())
    };
    let (error, _) = told(json!({"registration_endpoint": "http://169.254.169.254/"}), json!({})).await;
    assert!(error.contains("`http://169.254.169.254/` is not a public address"), "{error}");
    let (error, asked) = told(json!({}), json!({"authorization_servers": ["http://192.168.0.1/"]})).await;
    assert!(error.starts_with("it does not say how to log in: "), "{error}");
    assert_eq!(asked, 0);
    let (error, asked) = told(json!({}), json!({"resource": "https://bank.example/mcp"})).await;
    assert!(error.contains("resource mismatch"), "{error}");
    assert_eq!(asked, 0, "no token is requested that another server would accept");
    let (error, _) = told(json!({"issuer": "https://login.example"}), json!({})).await;
    assert!(error.contains("issuer mismatch"), "{error}");
    let (error, _) = told(json!({"code_challenge_methods_supported": ["plain"]}), json!({})).await;
    assert!(error.contains("PKCE"), "{error}");
}

#[tokio::test]
async fn a_refresh_token_is_sent_only_to_its_own_authorization_server() {
    let pair = Pair::new().await;
    pair.books().lasts = 30;
    pair.log_in().await.unwrap();
    let other = Pair::new().await;
    let elsewhere = format!("http://{}", other.logins.address);
    pair.books().told_of_server = json!({"authorization_servers": [elsewhere]});
    let stage = pair.stage().await;
    assert_eq!(stage.state()["error"]["code"], "E3301");
    assert_eq!(other.books().asked.len(), 0);
}
