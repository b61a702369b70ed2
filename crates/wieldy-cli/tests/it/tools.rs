//! Tests of `wieldy tools`, `tools show`, `tools check`, and `completions`.

use crate::world::World;

const MANIFEST: &str = r#"
[[tool]]
name = "greet"
description = "Greets somebody. And more."
command = ["echo", "hello, {name}"]
read-only = true
confirm = true
[tool.arguments]
name = { type = "string", required = true }
"#;

#[test]
fn the_list_has_a_line_per_tool() {
    insta::assert_snapshot!(World::new().run(&["tools"]), @"
    exit: 0
    ----- stdout -----
    Bash                shell    writes  Runs a command line in the workspace and returns what it prints
    Build               shell    writes  Builds, tests, checks or cleans the project in the workspace by the program that its files call for (Cargo.toml, package.json, go.mod, pyproject.toml, Makefile), or by the given command, and returns what it prints
    Delete              files    writes  Deletes a file or an empty folder; with `recursive`, a folder and all that is in it
    Edit                files    writes  Replaces exact text in a file
    GetArtifact         files    reads   Reads an output that was too large for a result: a part of it by offset and length, the lines that match a pattern, a value by JSON pointer, or the difference to another artifact
    GetLogs             history  reads   Gets the log of your calls: the events of each, such as started, progress, warning, retry, failure, with times and facts
    GetMetrics          history  reads   Tells performance metrics of your calls: counts, failures and latency percentiles by tool or day, as `history_stats` does, and live counters of running and waiting calls and of tools whose circuit breaker is open
    GetState            state    reads   Tells the current state: your session, running and waiting calls, limits, tools whose circuit breaker is open, tasks, background processes, pending notes, the index of the code, and your vaults
    Glob                files    reads   Finds files by a pattern such as `src/**/*.rs` and gives their paths, sorted
    InspectModule       code     reads   Shows the outline of one source file: its symbols with signatures and lines, its imports, and the files that import it
    List                files    reads   Lists what is in a folder, sorted, with sizes; folders end in `/`
    ProcessList         shell    reads   Lists the processes in the background of this session, and the state of each
    ProcessRead         shell    writes  Reads what a process in the background has printed since it was last read, and tells whether it runs or how it ended
    ProcessStop         shell    writes  Stops a process in the background with everything that it started, and returns what it had printed since it was last read
    ProcessWrite        shell    writes  Writes text to the input of a process in the background, and ends the input if asked to
    QueryVFS            files    reads   Queries files and folders of the workspace and your own artifacts (kept large outputs) in one go: by glob, kind, size, time of change and text
    Read                files    reads   Reads a text file, or some lines of it
    Search              files    reads   Searches files for a regular expression and gives the matching lines as `path:line:text`, sorted by path
    Write               files    writes  Writes a text file, new or in place of the old content, whole or not at all
    find_definition     code     reads   Finds where a function, type, field, constant or module is defined, and shows its source
    find_references     code     reads   Finds where a symbol is called, imported, inherited from, read or written
    get_repo_map        code     reads   Gives an overview of a project: the signatures of its most used definitions by file, within a number of tokens
    history_search      history  reads   Finds calls that you made before, by tool, words, session, status or time
    history_stats       history  reads   Summarizes the calls that you made before: how many, how many failed, how long they took (p50, p95, p99)
    notify_self         meta     writes  Leaves yourself a note or a reminder, which comes back at the end of a later result, at a time or event that you choose
    search_code         code     reads   Searches the workspace's code by a name, a text, a regular expression or several words (ranked, also as parts of names)
    thread_list         thread   reads   Lists your threads, open or closed, with their last entries, the latest first
    thread_push         thread   writes  Appends an entry to a thread: what you want to know later, such as a decision, its reason, a result or an open question
    thread_read         thread   reads   Reads the entries of a thread, with type, author and time
    thread_seek         thread   reads   Searches the entries of your threads, such as earlier decisions, by their words
    vault_create_index  vault    writes  Writes or updates a page with links to all notes of a vault's folder
    vault_list          vault    reads   Lists the notes of a vault's folder with titles, tags and numbers of links, 200 at a time
    vault_move          vault    writes  Moves or renames a note or folder of the vault, and changes all links to it
    vault_read          vault    reads   Reads a note of the vault with its properties and links
    vault_search        vault    reads   Searches the notes of a vault, best first, with the line that fits best
    vault_write         vault    writes  Writes a note of the vault: a new one, all of its text, or a part

    ----- stderr -----
    ");
}

// Shows: B1.1
#[test]
fn filters_narrow_the_list() {
    let world = World::new().file(".wieldy/tools/greet.toml", MANIFEST);
    insta::assert_snapshot!(world.run(&["tools", "--provider", "command"]), @"
    exit: 0
    ----- stdout -----
    greet  command  reads  Greets somebody

    ----- stderr -----
    ");
    insta::assert_snapshot!(world.run(&["tools", "--text", "no such words"]), @"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    no tool fits
    ");
    let tools = world.json(&["tools", "--read-only", "--category", "files", "--json"]);
    let names: Vec<&str> = tools.as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["GetArtifact", "Glob", "List", "QueryVFS", "Read", "Search"]);
}

// Shows: C1.1
#[test]
fn a_definition_is_shown_with_its_schema() {
    let max = "[resources.max]\ncpu-millicores = 2000\nmemory-mb = 4096\n";
    let world = World::new().file(".wieldy/tools/greet.toml", MANIFEST).file("wieldy.toml", max);
    insta::assert_snapshot!(world.run(&["tools", "show", "greet"]), @r#"
    exit: 0
    ----- stdout -----
    greet: Greets somebody. And more.

    category:        command
    provider:        command
    version:         1
    promises:        read-only, idempotent, open world
    permissions:     programs.run
    confirmation:    each time
    limits:          cpu-millicores 500 (`resources`), at most 2000 (`resources.max`)
                     memory-mb 1024 (`resources`), at most 4096 (`resources.max`)
                     processes 256 (`resources`), at most 256 (`resources`)
                     open-files 1024 (`resources`), at most 1024 (`resources`)
                     disk-mb 1024 (`resources`), at most 1024 (`resources`)
                     disk-files 250000 (`resources`), at most 250000 (`resources`)
                     output-mb 64 (`resources`), at most 64 (`resources`)

    {
      "type": "object",
      "properties": {
        "name": {
          "type": "string"
        }
      },
      "required": [
        "name"
      ],
      "additionalProperties": false
    }

    ----- stderr -----
    "#);
    assert_eq!(world.json(&["tools", "show", "greet", "--json"])["requires_confirmation"], true);
    let bash = world.json(&["tools", "show", "Bash", "--json"]);
    assert_eq!(bash["required_permissions"], serde_json::json!(["programs.run"]));
    insta::assert_snapshot!(world.run(&["tools", "show", "gret"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3001]: there is no tool `gret`
    hint: did you mean `greet`?
    ");
}

// Shows: C2.2
#[test]
fn a_tool_by_a_manifest_can_be_called() {
    let world = World::new().file("wieldy.toml", "tools.manifests = [\"my.toml\"]").file("my.toml", MANIFEST);
    insta::assert_snapshot!(world.run(&["call", "greet", "name=Ada", "--yes", "--isolation", "none"]), @"
    exit: 0
    ----- stdout -----
    hello, Ada

    ----- stderr -----
    warning: isolation `none` isolates nothing: programs run with your own rights
    ");
    assert_eq!(world.code(&["call", "greet", "name=Ada", "--isolation", "none"]), Some(4));
}

// Shows: C2.5
#[test]
fn manifests_of_this_folder_come_before_those_of_the_user() {
    let world = World::new()
        .file(".wieldy/tools/greet.toml", MANIFEST)
        .file("../home/.config/wieldy/tools/greet.toml", &MANIFEST.replace("hello", "goodbye"))
        .file("../home/.config/wieldy/tools/other.toml", &MANIFEST.replace("greet", "other"));
    insta::assert_snapshot!(world.run(&["call", "greet", "name=Ada", "--yes", "--isolation", "none", "--log", "off"]), @"
    exit: 0
    ----- stdout -----
    hello, Ada

    ----- stderr -----
    warning: isolation `none` isolates nothing: programs run with your own rights
    ");
    assert_eq!(world.code(&["tools", "show", "other"]), Some(0));
}

#[test]
fn a_correct_manifest_is_reported_as_such() {
    let world = World::new().file("my.toml", MANIFEST);
    insta::assert_snapshot!(world.run(&["tools", "check", "my.toml"]), @"
    exit: 0
    ----- stdout -----
    my.toml: 1 tool: greet

    ----- stderr -----
    ");
}

#[test]
fn a_misspelled_key_hides_no_other_mistake() {
    let text = "[[tool]]\nname = \"a b\"\ncommand = [\"true\", \"{q}\"]\nretris = 1\nreads = [\"pth\"]\n";
    let world = World::new().file("bad.toml", text);
    insta::assert_snapshot!(world.run(&["tools", "check", "bad.toml"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    bad.toml:4: tool `a b`: unknown field `retris`; did you mean `retries`?
    bad.toml:1: tool `a b`: `description` is missing
    bad.toml:1: tool `a b`: a tool's name has only letters A-Z a-z, digits, `_` and `-`, not ' ' at position 2
    bad.toml:1: tool `a b`: there is no argument `pth`
    bad.toml:1: tool `a b`: `{q}`: there is no argument `q`
    ");
}

#[test]
fn every_mistake_of_a_manifest_is_reported_with_its_place() {
    let world = World::new()
        .file("bad.toml", "[[tool]]\nname = \"a b\"\ndescription = \"\"\ncommand = [\"x\"]\nreads = [\"pth\"]\n")
        .file(
            "late.toml",
            "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"x\", \"{nope}\"]\n\n\
             [[tool]]\nname = \"Read\"\ndescription = \"\"\ncommand = [\"x\"]\n",
        )
        .file("typo.toml", "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommnd = [\"x\"]\n")
        .file("shadow.json", r#"{"tools":[{"name":"Read","description":"","command":["x"]}]}"#)
        .file("broken.json", "{\"tools\": [\n{]}");
    insta::assert_snapshot!(world.run(&["tools", "check", "bad.toml"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    warning: bad.toml:1: tool `a b`: there is no program `x` on the PATH
    bad.toml:1: tool `a b`: a tool's name has only letters A-Z a-z, digits, `_` and `-`, not ' ' at position 2
    bad.toml:1: tool `a b`: there is no argument `pth`
    ");
    insta::assert_snapshot!(world.run(&["tools", "check", "late.toml"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    warning: late.toml:1: tool `a`: there is no program `x` on the PATH
    warning: late.toml:6: tool `Read`: there is no program `x` on the PATH
    late.toml:1: tool `a`: `{nope}`: there is no argument `nope`
    late.toml:6: tool `Read`: `Read` of command would hide the tool of builtin with the same name; give it another or a qualified name
    ");
    insta::assert_snapshot!(world.run(&["tools", "check", "typo.toml"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    typo.toml:4: tool `a`: unknown field `commnd`; did you mean `command`?
    ");
    insta::assert_snapshot!(world.run(&["tools", "check", "shadow.json", "--json"]), @r#"
    exit: 2
    ----- stdout -----
    {"file":"shadow.json","ok":false,"tools":["Read"],"problems":[{"line":null,"tool":"Read","message":"`Read` of command would hide the tool of builtin with the same name; give it another or a qualified name"}],"warnings":[{"line":null,"tool":"Read","message":"there is no program `x` on the PATH"}]}

    ----- stderr -----
    warning: shadow.json: tool `Read`: there is no program `x` on the PATH
    shadow.json: tool `Read`: `Read` of command would hide the tool of builtin with the same name; give it another or a qualified name
    "#);
    insta::assert_snapshot!(world.run(&["tools", "check", "broken.json"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    broken.json:2: key must be a string
    ");
    insta::assert_snapshot!(world.run(&["tools", "check", "missing.toml"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: cannot read the manifest `missing.toml`
      caused by: No such file or directory (os error 2)
    hint: it must be a text file that you may read; `tools.manifests` names the files and folders that are looked at
    ");
}

#[test]
fn only_the_broken_manifest_is_skipped_and_reported() {
    let world = World::new()
        .file(".wieldy/tools/bad.toml", "[[tool]]\nname = \"a b\"\n")
        .file(".wieldy/tools/clash.toml", &MANIFEST.replace("\"greet\"", "\"Read\""))
        .file(".wieldy/tools/greet.toml", MANIFEST)
        .file("a.txt", "one\n");
    insta::assert_snapshot!(world.run(&["call", "Read", "path=a.txt"]), @"
    exit: 0
    ----- stdout -----
    one

    ----- stderr -----
    [time]  WARN wieldy::assemble: the manifest `.wieldy/tools/bad.toml` cannot be used: .wieldy/tools/bad.toml:1: tool `a b`: `description` is missing, so it is left out; `wieldy tools check .wieldy/tools/bad.toml` prints everything that is wrong with it
    [time]  WARN wieldy::assemble: the manifest `.wieldy/tools/clash.toml` cannot be used: `Read` of command would hide the tool of builtin with the same name; give it another or a qualified name, so it is left out; give the tool another name
    ");
    assert_eq!(world.json(&["tools", "show", "greet", "--json"])["name"], "greet");
    let doctor = world.json(&["doctor", "--json"]);
    let told: Vec<String> = doctor["folder"].as_array().unwrap().iter().map(|it| it.to_string()).collect();
    insta::assert_snapshot!(told.join("\n"), @r#"
    {"name":".wieldy/tools/bad.toml","state":"works","told":"trusted","hint":null}
    {"name":".wieldy/tools/clash.toml","state":"works","told":"trusted","hint":null}
    {"name":".wieldy/tools/greet.toml","state":"works","told":"trusted","hint":null}
    {"name":".wieldy/tools/bad.toml","state":"fails","told":"the manifest `.wieldy/tools/bad.toml` cannot be used: .wieldy/tools/bad.toml:1: tool `a b`: `description` is missing","hint":"`wieldy tools check .wieldy/tools/bad.toml` prints everything that is wrong with it"}
    "#);
    // A file that the configuration names is required.
    let told = world.run(&["call", "List", "--set", "tools.manifests=.wieldy/tools/bad.toml"]);
    insta::assert_snapshot!(told, @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: the manifest `.wieldy/tools/bad.toml` cannot be used
      caused by: .wieldy/tools/bad.toml:1: tool `a b`: `description` is missing
    hint: `wieldy tools check .wieldy/tools/bad.toml` prints everything that is wrong with it
    ");
}

#[test]
fn mistakes_of_a_manifest_and_missing_programs_are_reported() {
    let text = "[[tool]]\nname = \"a\"\ndescription = \"\"\ncommand = [\"no-such-program\", \"{bar}\"]\n[tool.arguments]\n\
        foo = { type = \"strin\" }\n[[tool]]\nname = \"b\"\ncommand = [\"./missing.sh\"]\ndescription = \"\"\n";
    let world = World::new().file("my.toml", text);
    insta::assert_snapshot!(world.run(&["tools", "check", "my.toml"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    warning: my.toml:1: tool `a`: there is no program `no-such-program` on the PATH
    warning: my.toml:7: tool `b`: there is no program `./missing.sh` here, seen from the workspace
    my.toml:1: tool `a`: the schema is not valid at `/properties/foo/type`: `strin` is no type; the types are string, number, integer, boolean, object, array, null; did you mean `string`?
    my.toml:1: tool `a`: `{bar}`: there is no argument `bar`
    ");
    let world =
        World::new().file("my.toml", "[[tool]]\nname = \"b\"\ncommand = [\"./missing.sh\"]\ndescription = \"\"\n");
    insta::assert_snapshot!(world.run(&["tools", "check", "my.toml"]), @"
    exit: 0
    ----- stdout -----
    my.toml: 1 tool: b

    ----- stderr -----
    warning: my.toml:1: tool `b`: there is no program `./missing.sh` here, seen from the workspace
    ");
}

// Shows: C2.3, C3
#[test]
fn function_calling_definitions_are_seen_and_say_what_they_need() {
    let functions = r#"[{"type":"function","function":{"name":"weather","description":"Tells the weather",
        "parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}]"#;
    let world = World::new().file(".wieldy/tools/f.json", functions);
    insta::assert_snapshot!(world.run(&["call", "weather", "city=Graz"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error[E3301]: `weather` is defined, but what it needs is not configured
    hint: configure a program for it, by a manifest with `command`
    ");
}

#[test]
fn foreign_text_cannot_steer_the_terminal() {
    let manifest = MANIFEST.replace("Greets somebody.", "Evil \\u001b[31mred\\u001b[0m\\u202e.");
    let world = World::new().file(".wieldy/tools/greet.toml", &manifest);
    for arguments in [&["tools", "--provider", "command"][..], &["tools", "show", "greet"]] {
        let told = world.run(arguments);
        assert!(told.contains("\\u{1b}[31mred") && !told.contains('\x1b') && !told.contains('\u{202e}'), "{told}");
    }
}

#[test]
fn completions_are_there_for_the_usual_shells() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = world.command(&["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && script.contains("_WIELDY_COMPLETE"), "{shell}");
    }
}

/// Returns the candidates of a real bash for the last of these words, and everything that is printed meanwhile.
fn offered(world: &World, words: &[&str]) -> String {
    const SCRIPT: &str = r#"
        source <(wieldy completions bash)
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_TYPE=9
        _clap_complete_wieldy wieldy "${@: -1}" "${@: -2:1}"
        echo "${COMPREPLY[@]}"
    "#;
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_wieldy"));
    // The world's own command trusts the folder and has its environment.
    let prepared = world.command(&["--version"]);
    let path = prepared.get_envs().find(|(name, _)| *name == "PATH").and_then(|(_, path)| path?.to_str());
    let path = format!("{}:{}", program.parent().unwrap().display(), path.unwrap());
    let mut bash = std::process::Command::new("bash");
    bash.args(["-c", SCRIPT, "bash", "wieldy"]).args(words).current_dir(world.path("")).env_clear();
    bash.envs(prepared.get_envs().filter_map(|(name, value)| Some((name, value?)))).env("PATH", path);
    let output = bash.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap().trim().to_owned();
    let printed = text(output.stderr);
    assert!(output.status.success() && printed.is_empty(), "{printed}");
    text(output.stdout)
}

#[test]
fn bash_completes_tools_levels_statuses_and_keys() {
    let world = World::new().file(".wieldy/tools/greet.toml", MANIFEST);
    assert_eq!(offered(&world, &["call", "Re"]), "Read");
    assert_eq!(offered(&world, &["call", "gr"]), "greet");
    assert_eq!(offered(&world, &["tools", "show", "Proc"]), "ProcessList ProcessRead ProcessStop ProcessWrite");
    assert_eq!(offered(&world, &["call", "Bash", "--isolation", "n"]), "none native");
    assert_eq!(offered(&world, &["history", "--status", "p"]), "pending permission_denied");
    assert_eq!(offered(&world, &["batch", "--mode", "s"]), "smart sequential");
    assert_eq!(offered(&world, &["--set", "sandbox.net"]), "sandbox.network=");
    assert_eq!(offered(&world, &["--log", "t"]), "trace");
    assert_eq!(offered(&world, &["call", "nothing-like-this"]), "");
}

#[test]
fn bash_completes_files_and_programs() {
    let world = World::new().file("batch.json", "").file("bin/wieldy-test-program", "").file("notes.txt", "");
    let path = format!("{}:{}", world.path("bin").display(), std::env::var("PATH").unwrap());
    let world = world.variable("PATH", &path);
    assert_eq!(offered(&world, &["batch", "bat"]), "batch.json");
    assert_eq!(offered(&world, &["tools", "check", "not"]), "notes.txt");
    assert_eq!(offered(&world, &["run", "wieldy-test-p"]), "wieldy-test-program");
    assert_eq!(offered(&world, &["run", "--", "wieldy-test-p"]), "wieldy-test-program");
    assert_eq!(offered(&world, &["run", "--", "cat", "not"]), "notes.txt");
    assert_eq!(offered(&world, &["run", "--", "cat", "wieldy-test-p"]), "");
}

#[test]
fn completing_starts_no_server_and_prints_no_warning() {
    let server = "[mcp.servers.evil]\ncommand = \"sh\"\nargs = [\"-c\", \"touch started\"]\nstart = \"eager\"\n";
    let world = World::cloned()
        .file("../home/.config/wieldy/wieldy.toml", &format!("{server}cwd = \".\"\nisolation = \"none\"\n"))
        .file("../home/.config/wieldy/tools/broken.toml", "[[tool]]\nname = 5\n")
        .file(".wieldy/tools/greet.toml", MANIFEST)
        .variable("WIELDY_STAET", "x");
    assert_eq!(offered(&world, &["call", "Re"]), "Read");
    assert_eq!(offered(&world, &["call", "gr"]), "", "the folder is not trusted");
    assert!(!world.path("started").exists());
    // A configuration with a mistake offers no candidates, and prints nothing.
    let world = world.file("../home/.config/wieldy/wieldy.toml", "retry = 5\n");
    assert_eq!(offered(&world, &["call", "Re"]), "");
}

/// Returns the lines of `tools show` about limits.
fn limits_of(world: &World, tool: &str) -> Vec<String> {
    let told = world.run(&["tools", "show", tool]);
    let lines = told.lines().skip_while(|line| !line.starts_with("limits:")).take(7);
    lines.map(|line| line[16..].trim().to_owned()).collect()
}

#[test]
fn a_tool_shows_its_limits_and_where_they_come_from() {
    let settings = "[resources]\nprocesses = 300\n[resources.max]\nmemory-mb = 3000\n\
                    [resources.tools.Bash]\nmemory-mb = 2000\n[resources.tools.Bash.max]\ncpu-millicores = 700\n";
    let world = World::new().file("wieldy.toml", settings);
    assert_eq!(
        limits_of(&world, "Bash"),
        [
            "cpu-millicores 500 (`resources`), at most 700 (`resources.tools.Bash.max`)",
            "memory-mb 2000 (`resources.tools.Bash`), at most 3000 (`resources.max`)",
            "processes 300 (`resources`), at most 300 (`resources`)",
            "open-files 1024 (`resources`), at most 1024 (`resources`)",
            "disk-mb 1024 (`resources`), at most 1024 (`resources`)",
            "disk-files 250000 (`resources`), at most 250000 (`resources`)",
            "output-mb 64 (`resources`), at most 64 (`resources`)",
        ]
    );
    assert_eq!(limits_of(&world, "Build")[1], "memory-mb 3000 (`resources.max`), at most 3000 (`resources.max`)");
    let told = world.json(&["tools", "show", "Bash", "--json"]);
    assert_eq!(told["name"], "Bash");
    assert_eq!(
        told["resources"][1],
        serde_json::json!({
            "limit": "memory_bytes", "value": 2000_u64 << 20, "from": "operator_for_tool",
            "max": 3000_u64 << 20, "max_from": "executor_max",
        })
    );
}

// Shows: C1.3
#[test]
fn a_build_gets_two_cores_and_four_gibibytes_or_what_the_machine_has() {
    let limits = limits_of(&World::new(), "Build");
    let cores = std::thread::available_parallelism().unwrap().get();
    let cpu = if cores < 2 { "1000 (this machine)" } else { "2000 (the tool's definition)" };
    assert!(limits[0].starts_with(&format!("cpu-millicores {}", &cpu[..4])), "{limits:?}");
    let memory: u64 = limits[1].split(' ').nth(1).unwrap().parse().unwrap();
    assert!((1..=4096).contains(&memory), "{limits:?}");
}
