//! Tests of the secrets of command tools: manifests can name them, and their values are shown nowhere.

use std::fs;

use insta::assert_snapshot;

use crate::world::World;

const MANIFEST: &str = r#"
[[tool]]
name = "login"
description = "Logs in."
command = ["sh", "-c", "test ${{#TOKEN}} = 21 && test ${{#KEY}} = 20 && echo $TOKEN $KEY $PLAIN"]
environment = { TOKEN = "x-${HUB}", KEY = { file = "hub.key" }, PLAIN = "a $b ${c" }
confirm = true
"#;

const HUB: &str = "correct-horse-12345";
const KEY: &str = "battery-staple-67890";

fn world() -> World {
    World::new().file(".wieldy/tools/login.toml", MANIFEST).file(".wieldy/tools/hub.key", &format!("{KEY}\n"))
}

#[test]
fn a_command_tool_gets_its_secrets_and_they_are_shown_nowhere() {
    let world = world().variable("HUB", HUB);
    let call = ["call", "login", "--yes", "--isolation", "none"];
    assert_snapshot!(world.run(&call), @"
    exit: 0
    ----- stdout -----
    [redacted] [redacted] a $b ${c

    ----- stderr -----
    warning: isolation `none` isolates nothing: programs run with your own rights
    ");
    let mut shown = world.run(&[&call[..], &["--json"]].concat());
    for command in [
        &["--log", "trace", "call", "login", "--isolation", "none"][..],
        &["--log", "trace", "call", "login", "--yes", "--isolation", "none"],
        &["history", "--json"],
        &["tools", "show", "login", "--json"],
        &["tools", "check", ".wieldy/tools/login.toml", "--json"],
        &["config", "show"],
        &["trust"],
    ] {
        shown += &world.run(command);
    }
    for secret in [HUB, KEY] {
        assert!(!shown.contains(secret), "{shown}");
        let kept = fs::read(world.path("../home/.local/state/wieldy/history.db")).unwrap();
        assert!(!kept.windows(secret.len()).any(|window| window == secret.as_bytes()), "{secret} is in the history");
    }
    assert!(shown.contains("[redacted] [redacted] a $b"), "{shown}");
}

#[test]
fn a_tool_that_lacks_a_secret_says_which_and_the_others_stay() {
    let other = "[[tool]]\nname = \"greet\"\ndescription = \"Greets.\"\ncommand = [\"echo\", \"hello\"]\n";
    let world = world().file(".wieldy/tools/greet.toml", &format!("{MANIFEST}{other}").replace("login", "log-in"));
    fs::remove_file(world.path(".wieldy/tools/login.toml")).unwrap();
    assert_snapshot!(world.run(&["call", "log-in", "--yes"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error[E3301]: `log-in` cannot run: `environment`: `TOKEN`: the variable `HUB` is not set
    hint: set the variable or make the file, and start wieldy again
    ");
    assert_snapshot!(world.run(&["call", "greet", "--isolation", "none"]), @"
    exit: 0
    ----- stdout -----
    hello

    ----- stderr -----
    warning: isolation `none` isolates nothing: programs run with your own rights
    ");
    assert_snapshot!(world.run(&["tools", "check", ".wieldy/tools/greet.toml"]), @"
    exit: 0
    ----- stdout -----
    .wieldy/tools/greet.toml: 2 tools: log-in, greet

    ----- stderr -----
    warning: .wieldy/tools/greet.toml:2: tool `log-in`: `environment`: `TOKEN`: the variable `HUB` is not set
    ");
    let world = world.variable("HUB", HUB);
    fs::remove_file(world.path(".wieldy/tools/hub.key")).unwrap();
    assert_snapshot!(world.run(&["call", "log-in", "--yes"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error[E3301]: `log-in` cannot run: `environment`: `KEY`: `.wieldy/tools/hub.key` cannot be read: No such file or directory (os error 2)
    hint: set the variable or make the file, and start wieldy again
    ");
    assert_snapshot!(world.run(&["tools", "check", ".wieldy/tools/greet.toml", "--json"]), @r#"
    exit: 0
    ----- stdout -----
    {"file":".wieldy/tools/greet.toml","ok":true,"tools":["log-in","greet"],"problems":[],"warnings":[{"line":2,"tool":"log-in","message":"`environment`: `KEY`: `.wieldy/tools/hub.key` cannot be read: No such file or directory (os error 2)"}]}

    ----- stderr -----
    warning: .wieldy/tools/greet.toml:2: tool `log-in`: `environment`: `KEY`: `.wieldy/tools/hub.key` cannot be read: No such file or directory (os error 2)
    "#);
}

#[test]
fn a_secret_of_a_wrong_form_is_told_with_its_place() {
    let world = World::new().file("tools.toml", &MANIFEST.replace("file = ", "path = "));
    assert_snapshot!(world.run(&["tools", "check", "tools.toml"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    warning: tools.toml:2: tool `login`: `environment`: `TOKEN`: the variable `HUB` is not set
    tools.toml:6: tool `login`: `environment.KEY`: a text, or a table with the key `file`
    ");
}

#[test]
fn no_tool_reads_the_files_that_hold_secrets_of_manifests() {
    let world = world().variable("HUB", HUB).file(".wieldy/tools/notes.txt", "nothing secret\n");
    assert_snapshot!(world.run(&["call", "Read", "path=.wieldy/tools/hub.key"]), @"
    exit: 4
    ----- stdout -----

    ----- stderr -----
    error[E3105]: `.wieldy/tools/hub.key` is hidden, as secrets and the executor's own files are
    hint: do without it; an operator can show it with `sandbox.shown`
    ");
    assert_snapshot!(world.run(&["call", "Bash", "command=cat .wieldy/tools/*"]), @r#"
    exit: 4
    ----- stdout -----
    cat: .wieldy/tools/hub.key: Permission denied

    [[tool]]
    name = "login"
    description = "Logs in."
    command = ["sh", "-c", "test ${{#TOKEN}} = 21 && test ${{#KEY}} = 20 && echo $TOKEN $KEY $PLAIN"]
    environment = { TOKEN = "x-${HUB}", KEY = { file = "hub.key" }, PLAIN = "a $b ${c" }
    confirm = true
    nothing secret

    ----- stderr -----
    error[E3105]: the command was refused `.wieldy/tools/hub.key`: it is hidden, as secrets and the executor's own files are; `sandbox.shown` is where an operator shows a secret
    hint: do without it, or work in the workspace and in `/tmp`; an operator can allow more
    "#);
    // A secret that is written in the manifest itself.
    let world = world.file(".wieldy/tools/login.toml", &MANIFEST.replace("x-${HUB}", "a-token-written-here"));
    assert_snapshot!(world.run(&["call", "Search", "pattern=written-here", "path=.wieldy"]), @r#"
    exit: 0
    ----- stdout -----
    no matches
    [2 files could not be searched]
    ----- stderr -----
    warning: `.wieldy/tools/login.toml` is in the workspace and holds a secret (login.environment.TOKEN), so it is hidden from tools; move it to ~/.config/wieldy, or write the secret as `${NAME}` or `{ file = "…" }`
    "#);
    assert_snapshot!(world.run(&["call", "Read", "path=.wieldy/tools/login.toml"]), @r#"
    exit: 4
    ----- stdout -----

    ----- stderr -----
    warning: `.wieldy/tools/login.toml` is in the workspace and holds a secret (login.environment.TOKEN), so it is hidden from tools; move it to ~/.config/wieldy, or write the secret as `${NAME}` or `{ file = "…" }`
    error[E3105]: `.wieldy/tools/login.toml` is hidden, as secrets and the executor's own files are
    hint: do without it; an operator can show it with `sandbox.shown`
    "#);
}

#[test]
fn a_manifest_that_is_not_trusted_reads_no_secret() {
    let world = World::cloned().file(".wieldy/tools/login.toml", MANIFEST).variable("HUB", HUB);
    // Opening a pipe would block forever.
    let made = std::process::Command::new("mkfifo").arg(world.path(".wieldy/tools/hub.key")).status().unwrap();
    assert!(made.success());
    assert_snapshot!(world.run(&["call", "login", "--yes"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    warning: this folder's own configuration is not trusted and is ignored: `.wieldy/tools/login.toml`; `wieldy trust` shows what it would do, and asks
    error[E3001]: there is no tool `login`
    hint: `wieldy tools` lists all tools
    ");
    assert_snapshot!(world.run(&["trust"]), @"
    exit: 4
    ----- stdout -----
    [root]/work/.wieldy/tools/login.toml: not trusted yet
      adds the tool `login`, which runs `sh -c 'test ${{#TOKEN}} = 21 && test ${{#KEY}} = 20 && echo $TOKEN $KEY $PLAIN'` with KEY from the file hub.key, PLAIN=a $b ${c, TOKEN=x-${HUB}

    ----- stderr -----
    error: a person must agree to this, and there is no terminal to ask
    hint: `--yes` agrees beforehand
    ");
}

#[test]
fn every_variable_that_a_tool_lacks_is_named() {
    let tool = |name: &str, more: &str| {
        format!("[[tool]]\nname = \"{name}\"\ndescription = \"d\"\ncommand = [\"true\"]\nenvironment = {{ {more} }}\n")
    };
    let tools = tool("both", r#"A = "${ONE}", B = "x", C = "${TWO}""#) + &tool("one", r#"A = "${ONE}", B = "${HOME}""#);
    let world = World::new().file("tools.toml", &tools);
    insta::assert_snapshot!(world.run(&["tools", "check", "tools.toml"]), @"
    exit: 0
    ----- stdout -----
    tools.toml: 2 tools: both, one

    ----- stderr -----
    warning: tools.toml:1: tool `both`: `environment`: `A`: the variable `ONE` is not set; `C`: the variable `TWO` is not set
    warning: tools.toml:6: tool `one`: `environment`: `A`: the variable `ONE` is not set
    ");
    let set = "tools.manifests=[\"tools.toml\"]";
    let told = world.run(&["call", "both", "--set", set]);
    assert!(told.contains("`A`: the variable `ONE` is not set; `C`: the variable `TWO` is not set"), "{told}");
}
