//! Tests of `wieldy init`, `wieldy config show`, and the sources of the configuration.

use crate::world::World;

#[test]
fn init_writes_a_file_that_changes_nothing_and_does_not_overwrite() {
    let world = World::new();
    let before = world.run(&["config", "show"]);
    insta::assert_snapshot!(world.run(&["init"]), @"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    wrote `wieldy.toml`; `wieldy config show` prints the effective configuration
    after each change, run `wieldy trust` so that it is used
    ");
    assert_eq!(world.run(&["config", "show"]), before);
    insta::assert_snapshot!(world.run(&["init"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: `wieldy.toml` already exists
    hint: `--force` replaces it
    ");
    assert_eq!(world.code(&["init", "--force", "--json"]), Some(0));
}

#[test]
fn every_value_is_shown_with_its_origin() {
    let world = World::new()
        .file("wieldy.toml", "[retry]\nretries = 5\n[timeouts.tools]\nBash = \"2m\"\n")
        .variable("WIELDY_LIMITS_QUEUE_TIMEOUT", "5s");
    insta::assert_snapshot!(world.run(&["config", "show", "--log", "error", "--set", "isolation=none"]), @r#"
    exit: 0
    ----- stdout -----
    breaker.failures-max = 10  # default
    breaker.open-for = "30s"  # default
    cache.bytes-max = 67108864  # default
    code.fresh = "2s"  # default
    confirm.timeout = "5m"  # default
    history.durability = "effects"  # default
    history.keep-bytes = 0  # default
    history.keep-days = 0  # default
    history.results = "head"  # default
    history.results-keep-days = 0  # default
    history.tools = {}  # default
    history.url = ""  # default
    isolation = "none"  # flag --set
    limits.batch-calls-max = 100  # default
    limits.calls-running-max = 64  # default
    limits.calls-running-per-agent-max = 4  # default
    limits.calls-waiting-max = 1024  # default
    limits.queue-timeout = "5s"  # environment WIELDY_LIMITS_QUEUE_TIMEOUT
    log.file = ""  # default
    log.format = "text"  # default
    log.keep = 7  # default
    log.level = "error"  # flag --log
    log.rotate = "never"  # default
    mcp.files = []  # default
    mcp.list-wait = "4s"  # default
    mcp.servers = {}  # default
    output.bytes-max = 65536  # default
    plans.Core.batch-max = 5  # default
    plans.Core.full-events = false  # default
    plans.Core.parallel-max = 1  # default
    plans.Core.slots = 4  # default
    plans.Enterprise.full-events = true  # default
    plans.Enterprise.slots = 0  # default
    plans.Teams.batch-max = 50  # default
    plans.Teams.full-events = true  # default
    plans.Teams.parallel-max = 10  # default
    plans.Teams.slots = 10  # default
    plans.WriterPro.batch-max = 20  # default
    plans.WriterPro.full-events = false  # default
    plans.WriterPro.parallel-max = 1  # default
    plans.WriterPro.slots = 4  # default
    rates = []  # default
    resources.cpu-millicores = 500  # default
    resources.disk-files = 250000  # default
    resources.disk-mb = 1024  # default
    resources.max = {}  # default
    resources.memory-mb = 1024  # default
    resources.open-files = 1024  # default
    resources.output-mb = 64  # default
    resources.processes = 256  # default
    resources.tools = {}  # default
    retry.backoff = "exponential"  # default
    retry.base = "1s"  # default
    retry.cap = "30s"  # default
    retry.retries = 5  # file wieldy.toml
    sandbox.firecracker.kernel = ""  # default
    sandbox.firecracker.rootfs = ""  # default
    sandbox.floor = "none"  # default
    sandbox.folder = ""  # default
    sandbox.hidden = []  # default
    sandbox.idle = "10m"  # default
    sandbox.idle-max = 256  # default
    sandbox.idle-per-tenant-max = 128  # default
    sandbox.limits.cpu-millicores = 0  # default
    sandbox.limits.disk-files = 0  # default
    sandbox.limits.disk-mb = 0  # default
    sandbox.limits.memory-mb = 0  # default
    sandbox.limits.processes = 0  # default
    sandbox.mounts = []  # default
    sandbox.network = "none"  # default
    sandbox.oci.layout = ""  # default
    sandbox.oci.rootfs = ""  # default
    sandbox.protected = []  # default
    sandbox.shown = []  # default
    sandbox.spares = 1  # default
    sandbox.toolchains = true  # default
    serve.body-bytes-max = 4194304  # default
    serve.connections-max = 512  # default
    serve.hosts = []  # default
    serve.listen = "127.0.0.1:7300"  # default
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
    serve.origins = []  # default
    serve.patience = "10s"  # default
    serve.tokens = {}  # default
    shell.environment = ["PATH", "HOME", "USER", "LANG", "LC_*", "TERM", "TZ", "TMPDIR"]  # default
    state = "[root]/home/.local/state/wieldy"  # default
    threads.projects = {}  # default
    timeouts.default = "30s"  # default
    timeouts.dynamic = false  # default
    timeouts.tools.Bash = "2m"  # file wieldy.toml
    tools.manifests = []  # default
    vault.agents = []  # default
    vault.projects = {}  # default
    vault.root = ""  # default
    vault.tenants = []  # default
    vault.users = []  # default
    workspace = "."  # default

    ----- stderr -----
    "#);
    let values = world.json(&["config", "show", "--json"]);
    let retries = values.as_array().unwrap().iter().find(|value| value["key"] == "retry.retries").unwrap();
    assert_eq!(retries.to_string(), r#"{"key":"retry.retries","value":5,"origin":"file wieldy.toml"}"#);
}

#[test]
fn the_first_file_of_the_documented_order_counts() {
    let world = World::new()
        .file("flag.toml", "retry.retries = 1")
        .file("variable.toml", "retry.retries = 2")
        .file("wieldy.toml", "retry.retries = 3")
        .file("../home/.config/wieldy/wieldy.toml", "retry.retries = 4");
    let retries = |world: &World, arguments: &[&str]| {
        let told = world.run(&[&["config", "show"], arguments].concat());
        told.lines().find(|line| line.starts_with("retry.retries")).unwrap().to_owned()
    };
    assert_eq!(retries(&world, &[]), "retry.retries = 3  # file wieldy.toml");
    std::fs::remove_file(world.path("wieldy.toml")).unwrap();
    assert_eq!(retries(&world, &[]), "retry.retries = 4  # file [root]/home/.config/wieldy/wieldy.toml");
    let world = world.variable("WIELDY_CONFIG", "variable.toml");
    assert_eq!(retries(&world, &[]), "retry.retries = 2  # file variable.toml");
    assert_eq!(retries(&world, &["--config", "flag.toml"]), "retry.retries = 1  # file flag.toml");
}

#[test]
fn mistakes_name_file_line_and_key() {
    let world = World::new().file("wieldy.toml", "[limits]\ncalls-runing-max = 3\n");
    insta::assert_snapshot!(world.run(&["call", "List", "--config", "wieldy.toml"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: wieldy.toml:2: there is no key `limits.calls-runing-max`
    hint: did you mean `calls-running-max`, `calls-running-per-agent-max` or `calls-waiting-max`?
    ");
    insta::assert_snapshot!(world.run(&["config", "show", "--config", "missing.toml"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: cannot read the configuration `missing.toml`
      caused by: No such file or directory (os error 2)
    hint: it must be a text file that you may read; `--config FILE` names another
    ");
    let world = world.file("wieldy.toml", "[timeouts]\n\ndefault = 0\n");
    insta::assert_snapshot!(world.run(&["tools"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: wieldy.toml:3: `timeouts.default`: `0` is no time at all; a duration must be more than 0
    ");
    let world = world.file("wieldy.toml", "a = \u{1b}");
    insta::assert_snapshot!(world.run(&["tools"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: wieldy.toml:1: string values must be quoted, expected literal string
    hint: the names that this file hides and protects must be readable before a command runs: correct the file, or name another one with `--config FILE`
    ");
}

#[test]
fn a_variable_that_nearly_names_a_key_is_noticed() {
    let world = World::new().variable("WIELDY_ISOLATON", "none");
    insta::assert_snapshot!(world.run(&["tools", "--text", "glob"]), @"
    exit: 0
    ----- stdout -----
    Glob      files  reads  Finds files by a pattern such as `src/**/*.rs` and gives their paths, sorted
    QueryVFS  files  reads  Queries files and folders of the workspace and your own artifacts (kept large outputs) in one go: by glob, kind, size, time of change and text

    ----- stderr -----
    warning: the environment variable `WIELDY_ISOLATON` sets no key; did you mean `WIELDY_ISOLATION`?
    ");
    let world = World::new().variable("WIELDY_LOG", "loud");
    insta::assert_snapshot!(world.run(&["tools"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: the environment variable `WIELDY_LOG`: `log`: `loud` is not one of `off`, `error`, `warn`, `info`, `debug`, `trace`
    ");
}

#[test]
fn init_writes_the_file_that_is_named_and_no_other() {
    let world = World::new().file("wieldy.toml", "# mine\n").file("x.toml", "# old\n");
    assert_eq!(world.code(&["init", "--config", "x.toml"]), Some(2));
    assert_eq!(world.code(&["init", "--config", "x.toml", "--force"]), Some(0));
    assert_eq!(std::fs::read_to_string(world.path("wieldy.toml")).unwrap(), "# mine\n");
    assert!(std::fs::read_to_string(world.path("x.toml")).unwrap().contains("# isolation = "));
}

#[test]
fn every_mistake_of_a_configuration_is_reported() {
    let text = "isolation = \"nativ\"\n[limits]\ncalls-runing-max = 3\nqueue-timeout = true\n[[rates]]\nper = \"agents\"\n\
        [lmits]\nx = 1\n";
    let world = World::new().file("wieldy.toml", text);
    insta::assert_snapshot!(world.run(&["tools"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: wieldy.toml:1: `isolation`: `nativ` is not one of `none`, `native`, `runc`, `crun`, `youki`, `gvisor`, `firecracker` (did you mean `native`?)
        wieldy.toml:3: there is no key `limits.calls-runing-max` (did you mean `calls-running-max`, `calls-running-per-agent-max` or `calls-waiting-max`?)
        wieldy.toml:4: `limits.queue-timeout`: must be a time such as `30s`, or a number of seconds, not `true`
        wieldy.toml:6: `rates.per`: `agents` is not one of `agent`, `tenant`, `tool` (did you mean `agent`?)
        wieldy.toml:7: there is no key `lmits` (did you mean `limits`?)
    ");
    let text = "[retry]\nbase = \"5s\"\ncap = \"1s\"\n[log]\nrotate = \"daily\"\n[serve.tokens.x]\nagent = \"x\"\n";
    std::fs::write(world.path("wieldy.toml"), text).unwrap();
    insta::assert_snapshot!(world.run(&["tools", "--config", "wieldy.toml"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: file wieldy.toml: `retry.cap` is 1s, less than `retry.base`, which is 5s
        file wieldy.toml: `log.rotate` needs a file to rotate, and `log.file` names none
        the section `serve`: `serve.tokens.x` has no `token`
    ");
}

#[test]
fn no_mistake_of_a_configuration_hides_another() {
    let text = "retry.base = \"5s\"\nretry.cap = \"1s\"\nretry.retris = 1\nisolation = \"nativ\"\n\
        [sandbox]\nmounts = [\"/a:b\", \"/usr\", \"/a:rw\"]\n\
        [[rates]]\nper = \"agents\"\ncalls = 0\nwindow = \"1m\"\n[[rates]]\nper = \"agent\"\n\
        [serve]\nlisten = \"here\"\n[serve.tokens.x]\nagent = \"x\"\n[serve.tokens.y]\nagent = \"y\"\n\
        [serve.tokens.z]\ntokn = \"z\"\n[mcp.servers.a]\n[mcp.servers.b]\ncommand = \"b\"\nurl = \"http://b\"\n\
        [mcp.servers.c]\ncomand = \"c\"\n[mcp.servers.d]\ncommand = \"d\"\noauth.client-secret = \"s\"\n";
    let world = World::new().file("wieldy.toml", text);
    let mut command = world.command(&["tools", "--config", "wieldy.toml", "--set", "a=1", "--set", "retry.retries=x"]);
    command.env("WIELDY_TIMEOUTS_DEFAULT", "soon").env("WIELDY_CACHE_BYTES_MAX", "many");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    insta::assert_snapshot!(String::from_utf8_lossy(&output.stderr), @"
    error: wieldy.toml:3: there is no key `retry.retris` (did you mean `retries`?)
        wieldy.toml:4: `isolation`: `nativ` is not one of `none`, `native`, `runc`, `crun`, `youki`, `gvisor`, `firecracker` (did you mean `native`?)
        wieldy.toml:6: `sandbox.mounts`: `/a:b` is not SOURCE, SOURCE:TARGET or SOURCE:TARGET:rw; TARGET begins with `/` or `~`
        wieldy.toml:6: `sandbox.mounts`: `/a:rw` is not SOURCE, SOURCE:TARGET or SOURCE:TARGET:rw; TARGET begins with `/` or `~`
        wieldy.toml:8: `rates.per`: `agents` is not one of `agent`, `tenant`, `tool` (did you mean `agent`?)
        wieldy.toml:9: `rates.calls`: must be a whole number from 1 to 1000000, not 0
        wieldy.toml:11: `calls` is missing
        wieldy.toml:20: there is no key `serve.tokens.z.tokn` (did you mean `token`?)
        wieldy.toml:26: there is no key `mcp.servers.c.comand` (did you mean `command`?)
        the environment variable `WIELDY_CACHE_BYTES_MAX`: `cache.bytes-max`: must be a whole number from 0 to 1099511627776, not the text `many`
        the environment variable `WIELDY_TIMEOUTS_DEFAULT`: `timeouts.default`: `soon` is not a duration such as `500ms`, `30s`, `5m` or `1h`
        --set: there is no key `a`
        --set: `retry.retries`: must be a whole number from 0 to 100, not the text `x`
        file wieldy.toml: `retry.cap` is 1s, less than `retry.base`, which is 5s
        the section `mcp`: `mcp.servers.a` has neither a `command` nor a `url`
        the section `mcp`: `mcp.servers.b` has both a `command` and a `url`
        the section `mcp`: `mcp.servers.d.oauth` is for servers that have a `url`
        the section `mcp`: `mcp.servers.d.oauth` has a `client-secret` without a `client-id`
        the section `serve`: `serve.listen`: `here` is not an address and a port, such as 127.0.0.1:7300
        the section `serve`: `serve.tokens.x` has no `token`
        the section `serve`: `serve.tokens.y` has no `token`
    ");
    // A file that is not valid TOML may have set a key that another layer needs.
    let world = World::new().file("wieldy.toml", "[log\nfile = \"x\"\n");
    insta::assert_snapshot!(world.run(&["tools", "--config", "wieldy.toml", "--set", "log.rotate=daily"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: wieldy.toml:1: unclosed table, expected `]`
    ");
}

#[test]
fn a_flag_sets_keys_with_user_defined_names() {
    let world = World::new();
    let shown = |setting: &str, key: &str| {
        let told = world.run(&["config", "show", "--set", setting]);
        told.lines().find(|line| line.starts_with(key) || line.starts_with("error")).map(str::to_owned).unwrap_or(told)
    };
    for (setting, line) in [
        ("timeouts.tools.Bash=5s", "timeouts.tools.Bash = \"5s\"  # flag --set"),
        ("timeouts.tools.Bash=5", "timeouts.tools.Bash = \"5s\"  # flag --set"),
        ("plans.Trial.batch-max=2", "plans.Trial.batch-max = 2  # flag --set"),
        ("mcp.servers.git.command=true", "mcp.servers.git.command = \"true\"  # flag --set"),
        (
            "timeouts.tools.Bash=x",
            "error: --set: `timeouts.tools.Bash`: `x` is not a duration such as `500ms`, `30s`, `5m` or `1h`",
        ),
        ("timeouts.tools.=5s", "error: --set: there is no key `timeouts.tools.`"),
        ("timeouts.tols.Bash=5s", "error: --set: there is no key `timeouts.tols.Bash`"),
    ] {
        let (key, _) = setting.split_once('=').unwrap();
        assert_eq!(shown(setting, key), line);
    }
}

#[test]
fn the_shipped_plans_are_shown_with_the_keys_that_were_set() {
    let world = World::new().file("wieldy.toml", "[plans.Core]\nslots = 2\n[plans.Teams]\n");
    let told = world.run(&["config", "show", "--set", "plans.Core.tools=[\"Read\"]", "--set", "plans.Trial.slots=0"]);
    let plans: Vec<&str> = told.lines().filter(|line| line.starts_with("plans")).collect();
    insta::assert_snapshot!(plans.join("\n"), @r#"
    plans.Core.batch-max = 5  # default
    plans.Core.full-events = false  # default
    plans.Core.parallel-max = 1  # default
    plans.Core.slots = 2  # file wieldy.toml
    plans.Core.tools = ["Read"]  # flag --set
    plans.Enterprise.full-events = true  # default
    plans.Enterprise.slots = 0  # default
    plans.Teams.batch-max = 50  # default
    plans.Teams.full-events = true  # default
    plans.Teams.parallel-max = 10  # default
    plans.Teams.slots = 10  # default
    plans.Trial.slots = 0  # flag --set
    plans.WriterPro.batch-max = 20  # default
    plans.WriterPro.full-events = false  # default
    plans.WriterPro.parallel-max = 1  # default
    plans.WriterPro.slots = 4  # default
    "#);
}

#[test]
fn the_configuration_takes_effect() {
    let world = World::new()
        .file("wieldy.toml", "isolation = \"none\"\nworkspace = \"inner\"\n[timeouts.tools]\nBash = \"200ms\"\n")
        .file("inner/a.txt", "");
    assert!(world.run(&["call", "Bash", "command=ls"]).contains("a.txt"));
    assert_eq!(world.code(&["call", "Bash", "command=sleep 10"]), Some(5));
}

// Shows: B9.1
#[test]
fn programs_see_what_the_configuration_mounts_and_not_what_it_hides() {
    let world = World::new()
        .file("../data/a.txt", "from outside\n")
        .file("../home/notes.txt", "at home\n")
        .file("private/secret.txt", "hidden\n")
        .file("Makefile", "all:\n")
        .file(
            "wieldy.toml",
            r#"
            [sandbox]
            mounts = ["../data:/data:rw", "~/notes.txt:/notes"]
            hidden = ["private"]
            protected = ["Makefile"]
            "#,
        );
    let script = "cat /data/a.txt /notes; ls private; echo x > /data/b.txt && echo written; \
        echo x > /notes || echo kept; echo x > Makefile || echo kept";
    let output = world.command(&["call", "Bash", &format!("command=({script}) 2>/dev/null")]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "from outside\nat home\nwritten\nkept\nkept\n");
    assert_eq!(std::fs::read_to_string(world.path("../data/b.txt")).unwrap(), "x\n");
    let told = world.run(&["doctor", "--plan"]);
    assert!(told.contains("/data") && told.contains("hide     [root]/work/private"), "{told}");
}

#[test]
fn a_project_cannot_allow_less_isolation_than_its_user() {
    let world = World::new()
        .file("../home/.config/wieldy/wieldy.toml", "sandbox.floor = \"native\"\nretry.retries = 7\n")
        .file("wieldy.toml", "isolation = \"none\"\nsandbox.floor = \"none\"\n");
    insta::assert_snapshot!(world.run(&["call", "Bash", "command=true", "--config", "wieldy.toml"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: file wieldy.toml: the isolation level `none` is below `sandbox.floor`, which is `native` (file [root]/home/.config/wieldy/wieldy.toml)
    hint: choose a level that is as strong; a floor can be raised by every layer, and lowered by none
    ");
    std::fs::write(world.path("wieldy.toml"), "").unwrap();
    insta::assert_snapshot!(world.run(&["call", "Bash", "command=true", "--isolation", "none"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: flag --isolation: the isolation level `none` is below `sandbox.floor`, which is `native` (file [root]/home/.config/wieldy/wieldy.toml)
    hint: choose a level that is as strong; a floor can be raised by every layer, and lowered by none
    ");
    assert_eq!(world.code(&["call", "Bash", "command=true"]), Some(0));
    let shown = world.run(&["config", "show", "--set", "sandbox.floor=none"]);
    assert!(shown.contains("sandbox.floor = \"native\"  # file [root]/home/.config/wieldy/wieldy.toml\n"), "{shown}");
    assert!(shown.contains("retry.retries = 2  # default\n"), "nothing else comes from that file: {shown}");
}

#[test]
fn an_empty_folder_in_place_of_the_file_counts_as_none() {
    let world = World::new().file("../home/.config/wieldy/wieldy.toml", "retry.retries = 7\n");
    std::fs::create_dir(world.path("wieldy.toml")).unwrap();
    let shown = world.run(&["config", "show"]);
    assert!(shown.contains("retry.retries = 7 "), "{shown}");
    std::fs::write(world.path("wieldy.toml/file"), "").unwrap();
    assert_eq!(world.code(&["config", "show"]), Some(2), "a folder with something in it is a mistake");
}

/// A sandbox of another process holds the names at the same time.
#[test]
fn placeholders_of_a_sandbox_do_not_block_init_and_import() {
    let world = World::new().file("servers.json", r#"{"mcpServers": {"one": {"command": "one"}}}"#);
    let hold = || {
        let path = world.path("wieldy.toml");
        std::fs::write(&path, "").unwrap();
        rustix::fs::setxattr(&path, wieldy::secrets::PLACEHOLDER_MARK, b"", rustix::fs::XattrFlags::empty()).unwrap();
    };
    hold();
    assert!(!world.run(&["config", "show"]).contains("wieldy.toml"), "it is no configuration");
    assert_eq!(world.code(&["mcp", "import", "servers.json"]), Some(0));
    assert!(std::fs::read_to_string(world.path("wieldy.toml")).unwrap().contains("[mcp.servers.one]"));
    std::fs::remove_file(world.path("wieldy.toml")).unwrap();
    hold();
    assert_eq!(world.code(&["init"]), Some(0));
    assert_eq!(world.code(&["init"]), Some(2), "now it is a file");
    assert_eq!(world.code(&["config", "show"]), Some(0));
}

/// The fork server removes the placeholders if only wieldy is killed; if both are, the next command does.
#[test]
fn placeholders_of_a_crash_are_gone_after_the_next_command_of_any_kind() {
    use rustix::process::{Pid, Signal, kill_process};
    let world = World::new().file("a.txt", "one\n").file("mine/wieldy.toml", "");
    let names = || -> Vec<String> {
        let entries = std::fs::read_dir(world.path("")).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    };
    for next in
        [&["call", "Read", "path=a.txt"][..], &["mcp", "list"], &["tools"], &["init", "--config", "mine/new.toml"]]
    {
        let mut child = world.command(&["call", "Bash", "--isolation", "native", "command=sleep 60"]).spawn().unwrap();
        while !processes_of(child.id()).into_iter().any(sleeps) {
            assert!(child.try_wait().unwrap().is_none(), "there is no sandbox here");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        for id in processes_of(child.id()) {
            let _ = kill_process(Pid::from_raw(id.try_into().unwrap()).unwrap(), Signal::KILL);
        }
        child.wait().unwrap();
        assert!(names().contains(&"wieldy.toml".to_owned()), "the placeholders are left: {:?}", names());
        assert_eq!(world.code(next), Some(0), "{next:?}");
        assert_eq!(names(), ["a.txt", "mine"], "{next:?}");
    }
}

/// Returns a process and all its descendants, the deepest last.
fn processes_of(id: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u32> =
        children.flat_map(|ids| ids.split_whitespace().map(|id| id.parse().unwrap()).collect::<Vec<_>>()).collect();
    std::iter::once(id).chain(children.into_iter().flat_map(processes_of)).collect()
}

fn sleeps(id: u32) -> bool {
    std::fs::read(format!("/proc/{id}/cmdline")).is_ok_and(|line| line == b"sleep\x0060\0")
}

/// A toolchain in the home folder is found although programs have another home; the credentials beside it are hidden.
#[test]
fn toolchains_of_the_user_are_found_and_their_credentials_are_not() {
    use std::os::unix::fs::PermissionsExt;
    let world = World::new()
        .file("../home/.rustup/toolchains/stable/bin/rustc", "#!/bin/sh\necho 1.95\n")
        .file("../home/.cargo/bin/rustc-of-user", "#!/bin/sh\nexec $RUSTUP_HOME/toolchains/stable/bin/rustc\n")
        .file("../home/.cargo/credentials.toml", "canary\n");
    for program in [".rustup/toolchains/stable/bin/rustc", ".cargo/bin/rustc-of-user"] {
        let path = world.path("../home").join(program);
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let home = world.path("../home").canonicalize().unwrap();
    let path = format!("{}/.cargo/bin:/usr/bin:/bin", home.display());
    let world = world.variable("PATH", &path).variable("HOME", home.to_str().unwrap());
    let bash = |script: &str, more: &[&str]| {
        let command = format!("command={script}");
        world.run(&[&["call", "Bash", "--isolation", "native", &command], more].concat())
    };
    let told = bash("rustc-of-user", &[]);
    assert!(told.contains("1.95"), "{told}");
    let read = format!("cat {}/.cargo/credentials.toml", home.display());
    for more in [&[][..], &["--set", "sandbox.mounts=[\"~/.cargo\", \"~/.rustup\"]"]] {
        let told = bash(&format!("rustc-of-user; {read}"), more);
        assert!(told.contains("1.95") && !told.contains("canary"), "{told}");
    }
    let write = format!("echo x > {}/.cargo/bin/rustc-of-user", home.display());
    assert!(!bash(&write, &[]).contains("exit: 0"));
    let not_shown = ["--set", "sandbox.toolchains=false"];
    let told = bash("rustc-of-user", &not_shown);
    insta::assert_snapshot!(told, @r#"
    exit: 4
    ----- stdout -----
    bash: line 1: rustc-of-user: command not found

    ----- stderr -----
    error[E3105]: the command was refused `[root]/home/.cargo/bin/rustc-of-user`: this program is on the machine, but the sandbox does not show its folder; an operator adds the folder to `sandbox.mounts`, or sets `sandbox.toolchains` for a toolchain in the home folder
    hint: do without it, or work in the workspace and in `/tmp`; an operator can allow more
    "#);
    let told = world.run(&[&["run", "--isolation", "native"], &not_shown[..], &["--", "rustc-of-user"]].concat());
    insta::assert_snapshot!(told, @r#"
    exit: 126
    ----- stdout -----

    ----- stderr -----
    error[E3105]: cannot start `rustc-of-user`: `[root]/home/.cargo/bin/rustc-of-user` is on the machine, but the sandbox does not show its folder
    hint: an operator adds the folder to `sandbox.mounts`, or sets `sandbox.toolchains` for a toolchain in the home folder
    "#);
    let told = bash("no-such-program", &not_shown);
    insta::assert_snapshot!(told, @r#"
    exit: 1
    ----- stdout -----
    bash: line 1: no-such-program: command not found

    ----- stderr -----
    error[E3108]: `bash` ended with exit code 127
    hint: a program that the command names was not found: check its name, or have it installed
    "#);
}

#[test]
fn everything_works_without_a_home() {
    let world = World::new().file("a.txt", "one\n");
    let output = world.command(&["call", "Read", "path=a.txt"]).env_remove("HOME").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
}

/// P-SBX-07, with a user's home folder as the workspace.
#[test]
fn programs_cannot_change_the_configuration_of_wieldy_and_its_user() {
    let world = World::new();
    let home = world.path("").to_str().unwrap().trim_end_matches('/').to_owned();
    let world = world
        .variable("HOME", &home)
        .file(".config/wieldy/wieldy.toml", "")
        .file("conf/my.toml", "tools.manifests = [\"conf/my-tools.toml\"]\n")
        .file("conf/my-tools.toml", "")
        .file(".bashrc", "");
    std::os::unix::fs::symlink("conf/my.toml", world.path("linked.toml")).unwrap();
    let call = |tool: &str, arguments: &[&str]| {
        let words = [&["call", tool, "--config", "linked.toml", "--isolation", "native"], arguments].concat();
        world.run(&words)
    };
    let paths = [
        ".config/wieldy/wieldy.toml",
        ".config/wieldy/tools/mine.toml",
        "linked.toml",
        "conf/my.toml",
        "conf/my-tools.toml",
        ".bashrc",
        ".bash_profile",
        ".config/autostart/mine.desktop",
    ];
    for path in paths {
        let before = std::fs::read(world.path(path)).ok();
        let told = call("Write", &[&format!("path={path}"), "content=mine", "create_folders:=true"]);
        assert!(told.contains("E3105"), "{path}: {told}");
        let script = format!("mkdir -p $(dirname {path}); rm -rf {path}; echo mine > {path}; ln -sf mine {path}; true");
        let told = call("Bash", &[&format!("command={script}")]);
        assert!(!told.contains("E3101"), "{path}: {told}");
        assert_eq!(std::fs::read(world.path(path)).ok(), before, "{path}: {told}");
    }
    assert!(world.path("linked.toml").is_symlink());
    for secret in [".config/wieldy/wieldy.toml", ".local/state/wieldy/audit.key", ".local/state/wieldy/history.db"] {
        assert!(world.path(secret).exists(), "{secret}");
        let told = call("Read", &[&format!("path={secret}")]);
        assert!(told.contains("E3105"), "{secret}: {told}");
        let told = call("Bash", &[&format!("command=cat {secret}")]);
        assert!(told.contains("E3105"), "{secret}: {told}");
    }
    // All else of a home folder is like any other workspace.
    let told = call("Bash", &["command=echo on > notes; cat notes"]);
    assert!(told.starts_with("exit: 0\n----- stdout -----\non\n"), "{told}");
    assert!(!world.path(".bash_profile").exists(), "the placeholders are gone");
}

/// P-SBX-07, with settings that are reached through links, or are in the current folder.
#[test]
fn configuration_is_protected_behind_links_and_in_subfolders() {
    let world = World::new().file("real/my.toml", "").file("sub/x", "").file("home/x", "");
    std::os::unix::fs::symlink("real", world.path("conf")).unwrap();
    std::os::unix::fs::symlink("home", world.path("linked-home")).unwrap();
    let told = world.run(&["call", "Delete", "path=conf", "--config", "conf/my.toml"]);
    assert!(told.contains("E3105"), "{told}");
    let told = world.run(&["call", "Bash", "command=rm conf", "--config", "conf/my.toml"]);
    assert!(world.path("conf").is_symlink(), "{told}");
    let home = world.path("linked-home").to_str().unwrap().to_owned();
    let world = world.variable("HOME", &home);
    for (folder, workspace, path) in [
        ("sub", "..", "sub/wieldy.toml"),
        ("sub", "..", "sub/.wieldy/tools/mine.toml"),
        ("linked-home", ".", ".config/wieldy/wieldy.toml"),
    ] {
        let mut command = world.command(&["call", "Write", &format!("path={path}"), "content=mine"]);
        command.args(["create_folders:=true", "--workspace", workspace]).current_dir(world.path(folder));
        let told = String::from_utf8(command.output().unwrap().stderr).unwrap();
        assert!(told.contains("E3105"), "{path}: {told}");
    }
}

#[test]
fn limits_above_their_own_maximum_are_a_mistake() {
    let settings = "[resources]\nmemory-mb = 600\n[resources.max]\nmemory-mb = 500\ncpu-millicores = 1000\n\
                    [resources.tools.Build]\nprocesses = 9\nmax = { processes = 8 }\n";
    let world = World::new().file("limits.toml", settings);
    let told = world.run(&["config", "show", "--config", "limits.toml"]);
    insta::assert_snapshot!(told, @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: file limits.toml: `resources.memory-mb` is 600, more than `resources.max.memory-mb`, which is 500
        file limits.toml: `resources.tools.Build.processes` is 9, more than `resources.tools.Build.max.processes`, which is 8
    ");
    let world = World::new().file("limits.toml", "[resources.tools.Build]\nmemory = 5\n");
    assert_eq!(world.code(&["config", "show", "--config", "limits.toml"]), Some(2), "an unknown key");
    let set = ["call", "List", "--set", "resources.max.memory-mb=2000", "--set", "resources.tools.List.processes=9"];
    assert_eq!(World::new().code(&set), Some(0));
}
