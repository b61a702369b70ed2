//! Confirmations hold for the files that a command line names: a changed file is refused before the start.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use wieldy_core::{
    Answer, BoxFuture, Call, Caller, Code, Confirmation, Confirmer, Executor, Level, Manifest, Options, ToolResult,
};
use wieldy_sandbox::Unconfined;
use wieldy_tools::shell::{CommandTool, shell_tools};

const MANIFEST: &str = r#"
    [[tool]]
    name = "deploy"
    description = ""
    command = ["sh", "script.sh", "{target}"]
    arguments = { target = { type = "string", required = true } }
"#;

/// A person who agrees to everything, while a function changes the workspace.
struct Agreeing<F> {
    meanwhile: F,
    seen: Arc<Mutex<Option<Confirmation>>>,
}

impl<F: Fn() + Send + Sync + 'static> Confirmer for Agreeing<F> {
    fn confirm<'a>(&'a self, question: &'a Confirmation) -> BoxFuture<'a, Result<Answer, String>> {
        (self.meanwhile)();
        *self.seen.lock().unwrap() = Some(question.clone());
        Box::pin(async { Ok(question.approve()) })
    }
}

/// Creates a workspace in which every program prints `old`.
fn workspace() -> tempfile::TempDir {
    let workspace = tempfile::tempdir().unwrap();
    let at = |name: &str| workspace.path().join(name);
    fs::create_dir(at("sub")).unwrap();
    for name in ["script.sh", "sub/other.sh", "unnamed.sh"] {
        fs::write(at(name), "echo old").unwrap();
    }
    fs::write(at("Makefile"), "all:\n\t@echo old\n").unwrap();
    symlink("script.sh", at("link.sh")).unwrap();
    workspace
}

type Change = Box<dyn Fn(&Path) + Send + Sync>;

/// Makes a call that a person agrees to while `meanwhile` changes the workspace.
async fn agreed(
    tool: &str,
    arguments: Value,
    meanwhile: impl Fn(&Path) + Send + Sync + 'static,
) -> (ToolResult, Confirmation) {
    let workspace = workspace();
    let path = workspace.path().to_owned();
    let mut builder = Executor::builder();
    builder.workspace = path.clone();
    builder.isolation = Level::None;
    let seen = Arc::default();
    builder.confirmer = Some(Arc::new(Agreeing { meanwhile: move || meanwhile(&path), seen: Arc::clone(&seen) }));
    let environment = BTreeMap::from([("PATH".into(), "/usr/bin:/bin".into())]);
    let mut builder = builder.sandbox(Unconfined::default()).tools(shell_tools(environment.clone()));
    for tool in Manifest::from_toml(MANIFEST).unwrap().tools {
        builder = builder.tool(CommandTool::new(tool.spec, tool.command.unwrap(), environment.clone()).unwrap());
    }
    let executor = builder.build().unwrap();
    let options = Options { require_confirmation: true, ..Options::default() };
    let caller = Caller { session: Some("s".into()), ..Caller::local() };
    let result = executor.call(Call::new(tool, arguments).by(caller).with(options)).await;
    let question = seen.lock().unwrap().take().unwrap();
    (result, question)
}

fn change(path: &'static str) -> impl Fn(&Path) + Send + Sync {
    move |workspace| fs::write(workspace.join(path), "echo new").unwrap()
}

fn bash(command: &str) -> Value {
    json!({ "command": command })
}

#[tokio::test]
async fn a_script_that_changed_after_it_was_agreed_to_does_not_run() {
    let led_elsewhere = |workspace: &Path| {
        fs::remove_file(workspace.join("link.sh")).unwrap();
        symlink("sub/other.sh", workspace.join("link.sh")).unwrap();
    };
    let removed = |workspace: &Path| fs::remove_file(workspace.join("script.sh")).unwrap();
    let other_project = |workspace: &Path| fs::write(workspace.join("Cargo.toml"), "").unwrap();
    let attacks: Vec<(&str, Value, Change, &str)> = vec![
        ("Bash", bash("sh script.sh"), Box::new(change("script.sh")), "`script.sh`"),
        ("Bash", bash("true; ./script.sh --x"), Box::new(change("script.sh")), "`script.sh`"),
        ("Bash", bash("cd sub && sh other.sh"), Box::new(change("sub/other.sh")), "`sub/other.sh`"),
        (
            "Bash",
            json!({"command": "sh other.sh", "folder": "sub"}),
            Box::new(change("sub/other.sh")),
            "`sub/other.sh`",
        ),
        ("Bash", bash("sh link.sh"), Box::new(change("script.sh")), "`link.sh -> script.sh`"),
        ("Bash", bash("sh link.sh"), Box::new(led_elsewhere), "`link.sh -> script.sh`, `link.sh -> sub/other.sh`"),
        ("Bash", bash("sh script.sh"), Box::new(removed), "`script.sh`"),
        ("Bash", bash("sh appears.sh"), Box::new(change("appears.sh")), "`appears.sh`"),
        ("Bash", bash("sh $'script.sh'"), Box::new(change("script.sh")), "`script.sh`"),
        ("Bash", bash("sh $\"sub/other.sh\""), Box::new(change("sub/other.sh")), "`sub/other.sh`"),
        ("Bash", bash(r"sh $'s\x75b\57other\056sh\0x'"), Box::new(change("sub/other.sh")), "`sub/other.sh`"),
        ("Bash", bash(r#"bash -c "sh \$'script\u002esh'""#), Box::new(change("script.sh")), "`script.sh`"),
        ("Build", bash("sh script.sh"), Box::new(change("script.sh")), "`script.sh`"),
        ("Build", json!({}), Box::new(change("Makefile")), "`Makefile`"),
        ("Build", json!({}), Box::new(other_project), "`Cargo.toml`, `Makefile`"),
        ("deploy", json!({"target": "prod"}), Box::new(change("script.sh")), "`script.sh`"),
        ("deploy", json!({"target": "sub/other.sh"}), Box::new(change("sub/other.sh")), "`sub/other.sh`"),
    ];
    for (tool, arguments, meanwhile, what) in attacks {
        let (result, _) = agreed(tool, arguments.clone(), meanwhile).await;
        let ended = (result.text(), result.error.map(|error| (error.code, error.message, error.details)));
        let message = format!("{what} changed after the call was confirmed");
        let details = serde_json::from_value(json!({"cause": "changed"})).unwrap();
        let expected = (String::new(), Some((Code::ConfirmationDenied, message, details)));
        assert_eq!(ended, expected, "{tool} {arguments}");
    }
}

#[tokio::test]
async fn a_call_whose_files_stay_as_they_are_runs() {
    let rewritten = |workspace: &Path| fs::write(workspace.join("script.sh"), "echo old").unwrap();
    for (tool, arguments) in [
        ("Bash", bash("sh script.sh")),
        ("Bash", bash(r"sh $'script\x2esh'")),
        ("Bash", bash("sh link.sh")),
        ("Build", json!({})),
        ("deploy", json!({"target": "prod"})),
    ] {
        let harmless: [Change; 3] = [Box::new(|_| ()), Box::new(rewritten), Box::new(change("unnamed.sh"))];
        for meanwhile in harmless {
            let (result, _) = agreed(tool, arguments.clone(), meanwhile).await;
            assert_eq!(result.error, None, "{tool} {arguments}");
            assert!(result.text().starts_with("old\n"), "{tool} {arguments}: {}", result.text());
        }
    }
}

#[tokio::test]
async fn the_question_shows_command_line_folder_isolation_network_and_files() {
    let arguments = json!({"command": "sh other.sh\nsh ../script.sh \u{202e}", "folder": "sub"});
    let (result, question) = agreed("Bash", arguments, |_| ()).await;
    assert_eq!(result.error, None);
    let folder = question.program.as_ref().unwrap().folder.to_string_lossy().into_owned();
    insta::assert_snapshot!(question.in_words().replace(&folder, "[folder]"), @r#"
    May the tool `Bash` run (the caller wants it)?
      {
        "command": "sh other.sh\nsh ../script.sh \u{202e}",
        "folder": "sub",
        "background": false
      }
      command line: sh other.sh
        sh ../script.sh \u{202e}
      folder: [folder]
      isolation: none, so it runs with the rights of this user
      network: not limited
      files that must not change until it starts: sub/other.sh, ../script.sh -> script.sh
    "#);
    let (_, question) = agreed("deploy", json!({"target": "it's"}), |_| ()).await;
    let folder = question.program.as_ref().unwrap().folder.to_string_lossy().into_owned();
    insta::assert_snapshot!(question.in_words().replace(&folder, "[folder]"), @r#"
    May the tool `deploy` run (the caller wants it)?
      {
        "target": "it's"
      }
      command line: sh script.sh 'it'\''s'
      folder: [folder]
      isolation: none, so it runs with the rights of this user
      network: not limited
      files that must not change until it starts: script.sh
    "#);
}

/// A background call may be answered before the refusal, so only the effect is checked.
#[tokio::test]
async fn a_changed_script_does_not_run_in_the_background_either() {
    let background = json!({"command": "sh script.sh", "background": true});
    let rewritten = |workspace: &Path| fs::write(workspace.join("script.sh"), "echo new").unwrap();
    let (result, _) = agreed("Bash", background, rewritten).await;
    assert!(!result.text().contains("new"), "{}", result.text());
}
