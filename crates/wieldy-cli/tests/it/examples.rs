//! Runs the examples of every `--help` literally.

use std::path::Path;
use std::process::Command;

use crate::world::World;

/// Examples that need code, a server, a call or a login that the test does not have. They must be valid, and may fail.
const NEED_MORE: [&str; 9] = [
    "wieldy code find",
    "wieldy code refs",
    "wieldy threads read",
    "wieldy vault",
    "wieldy history show",
    "wieldy mcp test",
    "wieldy mcp pin",
    "wieldy mcp login",
    "wieldy mcp logout",
];

/// Collects the examples of a command and of its subcommands. Every command has one.
fn collect(world: &World, command: &[&str], examples: &mut Vec<String>) {
    let output = world.command(&[command, &["--help"]].concat()).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let section = |title: &'static str| {
        let lines = help.lines().skip_while(move |line| *line != title && *line != title.replace("s:", ":"));
        lines.skip(1).take_while(|line| line.starts_with("  "))
    };
    let found: Vec<String> =
        section("Examples:").map(|line| line.trim().split("  ").next().unwrap().to_owned()).collect();
    assert!(!found.is_empty() && found.iter().all(|line| line.starts_with("wieldy ")), "{command:?}: {help}");
    examples.extend(found);
    for line in section("Commands:").filter(|line| !line.starts_with("   ")) {
        let name = line.split_whitespace().next().unwrap();
        if name != "help" {
            collect(world, &[command, &[name]].concat(), examples);
        }
    }
}

#[test]
fn every_command_has_examples_and_they_work() {
    let manifest = "[[tool]]\nname = \"lint\"\ndescription = \"Lints\"\ncommand = [\"true\"]\n";
    let world = World::new()
        .file("calls.json", r#"[{"tool":"List","arguments":{"path":"."}}]"#)
        .file("lint.toml", manifest)
        .file("src/lib.rs", "fn main() {}\n")
        .file("../home/.cursor/mcp.json", r#"{"mcpServers":{"tracker":{"command":"true"}}}"#);
    let mut examples = Vec::new();
    collect(&world, &[], &mut examples);
    let program = Path::new(env!("CARGO_BIN_EXE_wieldy")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    assert_eq!(world.code(&["call", "List", "path=."]), Some(0));
    for example in examples {
        let mut command = Command::new("timeout");
        command.args(["--preserve-status", "--signal=TERM", if example.contains(" serve ") { "3" } else { "60" }]);
        command.args(["sh", "-c", &format!("exec {example}")]).current_dir(world.path("")).env_clear();
        command.env("PATH", &path).env("HOME", world.path("../home")).stdin(std::process::Stdio::null());
        let output = command.output().unwrap();
        let told = world.told(&output);
        if NEED_MORE.iter().any(|prefix| example.starts_with(prefix)) {
            assert!(!told.contains("Usage:"), "{example}\n{told}");
        } else {
            assert!(output.status.success(), "{example}\n{told}");
        }
    }
}
