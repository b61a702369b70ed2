//! P-SH-01 to P-SH-05, each as an attack with a harmless twin: no command line gets a program out of its sandbox, and a
//! caller's value is never taken for an option.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{Call, Code, Executor, Manifest, ToolResult};
use wieldy_sandbox::{Native, NativeOptions};
use wieldy_tools::shell::{Bash, CommandTool};

use crate::world::CANARY;

/// The content of the file that the harmless twin of an attack reads.
const OPEN: &str = "open-52e0";

const MANIFEST: &str = r#"
[[tool]]
name = "show"
description = "Shows a file"
command = ["cat", "{path}"]
[tool.arguments.path]
type = "string"
required = true

[[tool]]
name = "show_any"
description = "Shows a file, whatever its name begins with"
command = ["cat", "--", "{path}"]
[tool.arguments.path]
type = "string"
required = true
"#;

struct World {
    folder: tempfile::TempDir,
    executor: Executor,
}

impl World {
    /// Creates a workspace with an open file and a protected hook, a secret beside it, and programs in native
    /// sandboxes.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let workspace = folder.path().canonicalize().unwrap().join("ws");
        fs::create_dir_all(workspace.join(".git/hooks")).unwrap();
        for (path, text) in [("secret.txt", CANARY), ("ws/open.txt", OPEN), ("ws/.git/hooks/pre-commit", OPEN)] {
            fs::write(folder.path().join(path), format!("{text}\n")).unwrap();
        }
        let environment = BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]);
        let native = Native::new(NativeOptions { warm_sandboxes: 0, ..NativeOptions::default() });
        let mut builder = Executor::builder().sandbox(native).tool(Bash::new(environment.clone()));
        builder.workspace = workspace;
        builder.grace = Duration::from_millis(200);
        for tool in Manifest::from_toml(MANIFEST).unwrap().tools {
            builder = builder.tool(CommandTool::new(tool.spec, tool.command.unwrap(), environment.clone()).unwrap());
        }
        Self { folder, executor: builder.build().unwrap() }
    }

    async fn call(&self, tool: &str, arguments: Value) -> ToolResult {
        self.executor.call(Call::new(tool, arguments)).await
    }

    /// Runs a command line and returns its output.
    async fn bash(&self, command: &str) -> String {
        self.call("Bash", json!({ "command": command })).await.text()
    }

    /// Runs each line with the secret as `FILE`, which must not be shown, and with the open file, which must be shown.
    async fn assert_only_the_open_file_is_read(&self, lines: &[&str]) {
        let secret = self.folder.path().join("secret.txt");
        for line in lines {
            let twin = self.bash(&line.replace("FILE", "open.txt")).await;
            assert!(twin.contains(OPEN), "{line}: {twin}");
            let attack = self.bash(&line.replace("FILE", secret.to_str().unwrap())).await;
            assert!(!attack.contains(CANARY), "{line}: {attack}");
        }
    }

    /// Runs each line with the hook as `FILE`, which must not change, and with a new file, which must be made.
    async fn assert_only_the_new_file_is_written(&self, lines: &[&str]) {
        let path = |name: &str| self.folder.path().join("ws").join(name);
        for line in lines {
            self.bash(&line.replace("FILE", "new.txt")).await;
            assert_eq!(fs::read_to_string(path("new.txt")).unwrap(), "written\n", "{line}");
            fs::remove_file(path("new.txt")).unwrap();
            self.bash(&line.replace("FILE", ".git/hooks/pre-commit")).await;
            self.bash(&line.replace("FILE", ".git/hooks/post-commit")).await;
            assert_eq!(fs::read_to_string(path(".git/hooks/pre-commit")).unwrap(), format!("{OPEN}\n"), "{line}");
            assert!(!path(".git/hooks/post-commit").is_file(), "{line}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn p_sh_01_a_path_that_begins_with_a_dash_is_never_an_option() {
    let world = World::new();
    fs::write(world.folder.path().join("ws/--version"), "a file\n").unwrap();
    for path in ["--version", "-", "-n", "--help"] {
        let refused = world.call("show", json!({ "path": path })).await;
        assert_eq!(refused.error.map(|error| error.code), Some(Code::InvalidInput), "{path}");
    }
    assert_eq!(world.call("show", json!({"path": "open.txt"})).await.text(), format!("{OPEN}\n"));
    assert_eq!(
        world.call("show_any", json!({"path": "--version"})).await.text(),
        "a file\n",
        "after `--` it is a name"
    );
    assert_eq!(world.call("show", json!({"path": "./--version"})).await.text(), "a file\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn p_sh_02_no_way_of_joining_commands_leads_out() {
    let world = World::new();
    let reading = [
        "true; cat FILE",
        "true && cat FILE",
        "false || cat FILE",
        "true | cat FILE",
        "echo $(cat FILE)",
        "echo `cat FILE`",
        "true\ncat FILE",
        "bash <<'END'\ncat FILE\nEND",
        "cat <(cat FILE)",
        "cat < FILE",
        "eval 'cat FILE'",
        "f() { cat FILE; }; f",
        "(cat FILE) & wait",
    ];
    world.assert_only_the_open_file_is_read(&reading).await;
    let writing = [
        "true; echo written > FILE",
        "true && echo written > FILE",
        "echo written | tee FILE",
        "echo $(echo written > FILE)",
        "true\necho written > FILE",
        "bash <<'END'\necho written > FILE\nEND",
        "echo written > >(cat > FILE); sleep 0.1",
    ];
    world.assert_only_the_new_file_is_written(&writing).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p_sh_03_a_program_of_the_workspace_does_not_pass_for_another() {
    let world = World::new();
    let planted = world.folder.path().join("ws/cat");
    fs::write(&planted, "#!/bin/sh\necho planted\n/bin/cat \"$@\"\n").unwrap();
    fs::set_permissions(&planted, fs::Permissions::from_mode(0o755)).unwrap();
    let shown = world.call("show", json!({"path": "open.txt"})).await.text();
    assert_eq!(shown, format!("{OPEN}\n"), "the tool's own program runs");
    assert_eq!(world.bash("cat open.txt").await, format!("{OPEN}\n"));
    assert_eq!(
        world.bash("./cat open.txt").await,
        format!("planted\n{OPEN}\n"),
        "the other name leads to the other file"
    );
    let elsewhere = "mkdir -p /tmp/x && cp ./cat /tmp/x/cat && /tmp/x/cat FILE";
    world.assert_only_the_open_file_is_read(&["./cat FILE", elsewhere, "PATH=.:$PATH cat FILE"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p_sh_04_a_copy_or_link_of_a_program_can_do_no_more_than_the_program() {
    let world = World::new();
    let reading = [
        "cat FILE",
        "cp /bin/cat copied && ./copied FILE",
        "ln -sf /bin/cat linked && ./linked FILE",
        "cat /bin/cat > /tmp/made && chmod +x /tmp/made && /tmp/made FILE",
        "/bin/../bin/cat FILE",
        "exec -a innocent cat FILE",
        "ln -sf \"$(realpath -m FILE)\" way && cat way",
    ];
    world.assert_only_the_open_file_is_read(&reading).await;
    let writing = [
        "cp /usr/bin/tee copied-tee && echo written | ./copied-tee FILE",
        "ln -sf \"$(realpath -m FILE)\" out && echo written > out",
        "echo written > text && mv text FILE",
        "echo written > text && ln -f text FILE",
    ];
    world.assert_only_the_new_file_is_written(&writing).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p_sh_05_programs_that_run_programs_run_them_in_the_same_sandbox() {
    let world = World::new();
    let reading = [
        "find . -maxdepth 0 -exec cat FILE \\;",
        "echo FILE | xargs cat",
        "env cat FILE",
        "sh -c 'cat FILE'",
        "awk 'BEGIN { system(\"cat FILE\") }'",
        "perl -e 'exec \"cat\", \"FILE\"'",
        "tar -cf /dev/null --checkpoint=1 --checkpoint-action=exec='cat FILE' open.txt",
        "tar -cf t.tar open.txt && tar -xf t.tar --to-command='cat FILE'",
    ];
    world.assert_only_the_open_file_is_read(&reading).await;
}
