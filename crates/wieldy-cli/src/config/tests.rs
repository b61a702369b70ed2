//! Tests of the configuration: layers, mistakes and the template.

use wieldy::{FileRules, IdleLimits, Mount, Network, Rootfs};

use super::*;

fn environment(variables: &[(&str, &str)]) -> Environment {
    Environment(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
}

fn layers() -> Layers {
    Layers::new(&FileConfig::defaults("/state".into()))
}

/// Returns the mistakes in the text of a file, or the values that are not defaults.
fn file(text: &str) -> String {
    let mut layers = layers();
    let mistakes = Mistakes(layers.put_file(Path::new("wieldy.toml"), text));
    match Config::resolve(&layers, None, mistakes) {
        Ok(config) => changed(&config),
        Err(mistakes) => mistakes.to_string(),
    }
}

fn told(error: &ConfigError) -> String {
    format!("{error}{}", error.hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default())
}

fn changed(config: &Config) -> String {
    let changed = config.values.iter().filter(|shown| shown.origin != Origin::Default);
    changed.map(|shown| format!("{} = {} [{}]", shown.key, shown.value, shown.origin)).collect::<Vec<_>>().join("\n")
}

// Shows: A3.1
#[test]
fn an_empty_configuration_has_the_defaults_of_the_executor() {
    let config = Config::resolve(&layers(), None, Mistakes::default()).unwrap();
    let executor = wieldy::ExecutorBuilder::default();
    assert_eq!(
        (config.limits, config.retry, config.breaker, config.resources),
        (executor.limits, executor.retry, executor.breaker, executor.resource_limits)
    );
    assert_eq!(
        (config.timeout, config.cache_bytes_max, config.output_bytes_max, config.confirmation_timeout),
        (executor.timeout, executor.cache_bytes_max, executor.output_bytes_max, executor.confirmation_timeout)
    );
    assert_eq!((config.isolation, config.dynamic_timeouts, config.rates), (executor.isolation, false, Vec::new()));
}

#[test]
fn the_template_has_every_key_with_its_default() {
    assert_eq!(file(TEMPLATE), "", "as it is written, it changes nothing");
    // A comment in the form of a key counts as one. The state folder depends on the machine, so it is left out.
    let is_key = |line: &str| {
        let name = line.strip_prefix("# ").and_then(|line| line.split_once(" = ")).map(|(name, _)| name);
        name.is_some_and(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '-') && name != "state")
    };
    let uncommented: Vec<&str> = TEMPLATE.lines().map(|line| if is_key(line) { &line[2..] } else { line }).collect();
    let (mut layers, defaults) = (layers(), layers());
    assert_eq!(layers.put_file(Path::new("wieldy.toml"), &uncommented.join("\n")), Vec::new());
    let values = |layers: &Layers| -> Vec<(String, toml::Value)> {
        layers.values().map(|(key, value, _)| (key, value.clone())).collect()
    };
    assert_eq!(values(&layers), values(&defaults));
    let unnamed: Vec<String> = layers
        .values()
        .filter(|(key, _, origin)| {
            **origin == Origin::Default
                && ![
                    "state",
                    "rates",
                    "mcp.servers",
                    "serve.tokens",
                    "timeouts.tools",
                    "resources.max",
                    "resources.tools",
                    "history.tools",
                    "threads.projects",
                    "vault.projects",
                ]
                .contains(&key.as_str())
        })
        .map(|(key, ..)| key)
        .collect();
    assert_eq!(unnamed, Vec::<String>::new());
}

#[test]
fn flags_of_a_command_are_the_executors_limits_for_it() {
    let overrides = Overrides { cpu: Some(1500), memory: Some(4096), ..Overrides::default() };
    let config = Config::load(&environment(&[]), &overrides).unwrap();
    assert_eq!(
        changed(&config),
        "resources.cpu-millicores = 1500 [flag --cpu]\nresources.memory-mb = 4096 [flag --memory]"
    );
    let (cpu_millicores, memory_bytes) = (Some(1500), Some(4 << 30));
    assert_eq!(
        config.resources,
        wieldy::ResourceLimits { cpu_millicores, memory_bytes, ..wieldy::ResourceLimits::DEFAULT }
    );
}

#[test]
fn a_file_changes_what_it_names() {
    insta::assert_snapshot!(file(r#"
        workspace = "work"
        isolation = "none"
        [limits]
        calls-running-max = 8
        queue-timeout = 5
        [timeouts]
        default = "1.5s"
        tools = { Bash = "2m" }
        [tools]
        manifests = ["a.toml", "/b.toml"]
        [plans.Trial]
        batch-max = 5
        [[rates]]
        per = "agent"
        calls = 10
        window = "1m"
    "#), @r#"
    isolation = "none" [file wieldy.toml]
    limits.calls-running-max = 8 [file wieldy.toml]
    limits.queue-timeout = "5s" [file wieldy.toml]
    plans.Trial.batch-max = 5 [file wieldy.toml]
    rates = [{ per = "agent", calls = 10, window = "1m", kind = "rate" }] [file wieldy.toml]
    timeouts.default = "1500ms" [file wieldy.toml]
    timeouts.tools.Bash = "2m" [file wieldy.toml]
    tools.manifests = ["a.toml", "/b.toml"] [file wieldy.toml]
    workspace = "work" [file wieldy.toml]
    "#);
}

#[test]
fn mistakes_are_told_with_their_key_and_line() {
    let mistakes = [
        "[limits]\ncalls-runing-max = 8",
        "limit = {}",
        "[limits]\n\ncalls-running-max = 0",
        "[limits]\ncalls-running-max = -1",
        "limits.calls-running-max = 99999999999",
        "limits.calls-running-max = nan",
        "limits.calls-running-max = \"many\"",
        "limits.calls-running-max = true",
        "[timeouts]\ndefault = 0",
        "[timeouts]\ndefault = -3.5",
        "[timeouts]\ndefault = inf",
        "[timeouts]\ndefault = \"1e308\"",
        "[timeouts]\ndefault = []",
        "[timeouts.tools]\nBash = \"soon\"",
        "isolation = \"nativ\"",
        "[resources]\nmemory-mb = 9223372036854775807",
        "[retry]\nbase = \"1m\"",
        "[plans.Trial]\nbatch-max = 0",
        "[[rates]]\nper = \"agent\"\ncalls = 0\nwindow = \"1m\"",
        "[[rates]]\nper = \"agents\"",
        "[[rates]]\nper = \"agent\"\ncalls = 1",
        "a = = b",
        "workspace = \"a\"\nworkspace = \"b\"",
        "[sandbox]\nmounts = [\"/a:b\"]",
        "[sandbox]\nnetwork = []",
        "[sandbox]\nnetwork = 5",
        "[sandbox]\nhidden = [\"~/x\"]",
        "isolation = \"none\"\n[sandbox]\nfloor = \"native\"",
        "[sandbox.limits]\nopen-files = 3",
        "[sandbox.oci]\nrootfs = \"/a\"\nlayout = \"/b\"",
    ];
    let told: Vec<String> = mistakes.iter().map(|text| file(text)).collect();
    insta::assert_snapshot!(told.join("\n"), @"
    wieldy.toml:2: there is no key `limits.calls-runing-max` (did you mean `calls-running-max`, `calls-running-per-agent-max` or `calls-waiting-max`?)
    wieldy.toml:1: there is no key `limit` (did you mean `limits`?)
    wieldy.toml:3: `limits.calls-running-max`: must be a whole number from 1 to 1000000, not 0
    wieldy.toml:2: `limits.calls-running-max`: must be a whole number from 1 to 1000000, not -1
    wieldy.toml:1: `limits.calls-running-max`: must be a whole number from 1 to 1000000, not 99999999999
    wieldy.toml:1: `limits.calls-running-max`: must be a whole number from 1 to 1000000, not NaN
    wieldy.toml:1: `limits.calls-running-max`: must be a whole number from 1 to 1000000, not the text `many`
    wieldy.toml:1: `limits.calls-running-max`: must be a whole number from 1 to 1000000, not `true`
    wieldy.toml:2: `timeouts.default`: `0` is no time at all; a duration must be more than 0
    wieldy.toml:2: `timeouts.default`: `-3.5` is no time at all; a duration must be more than 0
    wieldy.toml:2: `timeouts.default`: `inf` is not a duration such as `500ms`, `30s`, `5m` or `1h`
    wieldy.toml:2: `timeouts.default`: `1e308` is not a duration such as `500ms`, `30s`, `5m` or `1h`
    wieldy.toml:2: `timeouts.default`: must be a time such as `30s`, or a number of seconds, not a list
    wieldy.toml:2: `timeouts.tools.Bash`: `soon` is not a duration such as `500ms`, `30s`, `5m` or `1h`
    wieldy.toml:1: `isolation`: `nativ` is not one of `none`, `native`, `runc`, `crun`, `youki`, `gvisor`, `firecracker` (did you mean `native`?)
    wieldy.toml:2: `resources.memory-mb`: must be a whole number from 1 to 16777216, not 9223372036854775807
    file wieldy.toml: `retry.cap` is 30s, less than `retry.base`, which is 1m
    wieldy.toml:2: `plans.Trial.batch-max`: must be a whole number from 1 to 1000000, not 0
    wieldy.toml:3: `rates.calls`: must be a whole number from 1 to 1000000, not 0
    wieldy.toml:2: `rates.per`: `agents` is not one of `agent`, `tenant`, `tool` (did you mean `agent`?)
    wieldy.toml:1: `rates`: `window` is missing
    wieldy.toml:1: extra `=`, expected nothing
    wieldy.toml:2: duplicate key
    wieldy.toml:2: `sandbox.mounts`: `/a:b` is not SOURCE, SOURCE:TARGET or SOURCE:TARGET:rw; TARGET begins with `/` or `~`
    wieldy.toml:2: `sandbox.network`: a list of hosts has at least one; `none` lets programs reach nothing
    wieldy.toml:2: `sandbox.network`: must be `none`, `open` or a list of hosts, not the number `5`
    the section `sandbox`: `sandbox.hidden`: `~/x`: there is no home folder, as HOME is not set
    file wieldy.toml: the isolation level `none` is below `sandbox.floor`, which is `native` (file wieldy.toml) (choose a level that is as strong; a floor can be raised by every layer, and lowered by none)
    wieldy.toml:2: there is no key `sandbox.limits.open-files`
    the section `sandbox`: `sandbox.oci`: `rootfs` and `layout` both say where programs come from; keep one of them
    ");
}

#[test]
fn environment_beats_file_and_flags_beat_environment() {
    let mut layers = layers();
    assert_eq!(
        layers.put_file(Path::new("wieldy.toml"), "log = \"info\"\n[retry]\nretries = 1\nbase = \"2s\""),
        Vec::new()
    );
    let variables = environment(&[
        ("WIELDY_RETRY_RETRIES", "3"),
        ("WIELDY_LOG", "debug"),
        ("WIELDY_SHELL_ENVIRONMENT", "PATH, HOME"),
        ("WIELDY_TIMEOUTS_TOOLS", "{ Bash = \"1m\" }"),
        ("WIELDY_TIMEOUTS_DYNAMIC", "true"),
        ("WIELDY_CONFIG", "x"),
        ("PATH", "/bin"),
    ]);
    assert_eq!(layers.put_environment(&variables.0), (Vec::new(), Vec::new()));
    layers.put_flag("--log", "log", "trace").unwrap();
    layers.put_setting("limits.calls-running-max=9").unwrap();
    insta::assert_snapshot!(changed(&Config::resolve(&layers, None, Mistakes::default()).unwrap()), @r#"
    limits.calls-running-max = 9 [flag --set]
    log.level = "trace" [flag --log]
    retry.base = "2s" [file wieldy.toml]
    retry.retries = 3 [environment WIELDY_RETRY_RETRIES]
    shell.environment = ["PATH", "HOME"] [environment WIELDY_SHELL_ENVIRONMENT]
    timeouts.dynamic = true [environment WIELDY_TIMEOUTS_DYNAMIC]
    timeouts.tools.Bash = "1m" [environment WIELDY_TIMEOUTS_TOOLS]
    "#);
}

#[test]
fn mistakes_in_environment_and_settings_name_them() {
    let variable = |name, value| layers().put_environment(&environment(&[(name, value)]).0);
    assert_eq!(
        told(&variable("WIELDY_LIMITS_CALLS_RUNNING_MAX", "lots").1[0]),
        "the environment variable `WIELDY_LIMITS_CALLS_RUNNING_MAX`: `limits.calls-running-max`: \
         must be a whole number from 1 to 1000000, not the text `lots`"
    );
    assert_eq!(
        variable("WIELDY_LIMITS_CALLS_RUNING_MAX", "1").0,
        ["the environment variable `WIELDY_LIMITS_CALLS_RUNING_MAX` sets no key; did you mean \
          `WIELDY_LIMITS_CALLS_RUNNING_MAX`?"]
    );
    let setting = |text: &str| told(&layers().put_setting(text).unwrap_err());
    assert_eq!(setting("retry.retris=1"), "--set: there is no key `retry.retris` (did you mean `retry.retries`?)");
    assert_eq!(setting("retries"), "--set: `retries` is not KEY=VALUE");
    assert_eq!(
        setting("isolation=nativ"),
        "--set: `isolation`: `nativ` is not one of `none`, `native`, `runc`, `crun`, `youki`, \
         `gvisor`, `firecracker` (did you mean `native`?)"
    );
}

#[test]
fn the_section_sandbox_says_what_programs_see_reach_and_use() {
    let mut layers = layers();
    let text = r#"
        [sandbox]
        mounts = ["data:/data:rw", "/usr/share"]
        hidden = ["~/notes", "private"]
        protected = ["Makefile"]
        network = ["a.example", "b.example"]
        idle = "1m"
        idle-per-tenant-max = 3
        [sandbox.limits]
        memory-mb = 10
        [sandbox.oci]
        layout = "images/debian"
        [sandbox.firecracker]
        kernel = "~/vm/kernel"
        rootfs = "vm/root.ext4"
    "#;
    assert_eq!(layers.put_file(Path::new("/project/wieldy.toml"), text), Vec::new());
    let home = Path::new("/home/ada");
    let mount = |source: &str, target: &str, writable| Mount { source: source.into(), target: target.into(), writable };
    let wanted = SandboxConfig {
        folder: None,
        files: FileRules {
            mounts: vec![mount("/project/data", "/data", true), mount("/usr/share", "/usr/share", false)],
            hidden: vec!["/home/ada/notes".into(), "private".into()],
            shown: Vec::new(),
            protected: vec!["Makefile".into()],
            own: Vec::new(),
        },
        toolchains: true,
        network: Network::Hosts(vec!["a.example".into(), "b.example".into()]),
        idle: Duration::from_secs(60),
        idle_limits: IdleLimits { sandboxes_max: 256, per_tenant_max: 3 },
        spares: 1,
        limits: ResourceLimits { memory_bytes: Some(10 << 20), ..ResourceLimits::default() },
        floor: Level::None,
        system: Rootfs::Layout("/project/images/debian".into()),
        kernel: Some("/home/ada/vm/kernel".into()),
        rootfs: Some("/project/vm/root.ext4".into()),
    };
    assert_eq!(Config::resolve(&layers, Some(home), Mistakes::default()).unwrap().sandbox, wanted);
    let variables = environment(&[
        ("WIELDY_SANDBOX_MOUNTS", "/a:/b,/usr/share:/c:rw"),
        ("WIELDY_SANDBOX_NETWORK", "c.example,d.example"),
        ("WIELDY_SANDBOX_LIMITS_PROCESSES", "7"),
    ]);
    assert_eq!(layers.put_environment(&variables.0), (Vec::new(), Vec::new()));
    layers.put_setting("sandbox.network=open").unwrap();
    layers.put_setting("sandbox.spares=0").unwrap();
    let sandbox = Config::resolve(&layers, Some(home), Mistakes::default()).unwrap().sandbox;
    assert_eq!(sandbox.files.mounts, [mount("/a", "/b", false), mount("/usr/share", "/c", true)]);
    assert_eq!((sandbox.network, sandbox.spares, sandbox.limits.processes), (Network::Open, 0, Some(7)));
}

#[test]
fn the_strictest_floor_of_all_layers_counts() {
    let floor = |layers: &Layers| {
        let (_, value, origin) = layers.values().find(|(key, ..)| key == "sandbox.floor").unwrap();
        format!("{value} by {origin}")
    };
    let mut layers = layers();
    assert_eq!(layers.put_file(Path::new("wieldy.toml"), "sandbox.floor = \"none\""), Vec::new());
    assert_eq!(
        layers.put_floor_of_file(Path::new("user.toml"), "log = \"off\"\nsandbox.floor = \"native\""),
        Vec::new()
    );
    assert_eq!(floor(&layers), "\"native\" by file user.toml");
    layers.put_setting("sandbox.floor=none").unwrap();
    assert_eq!(floor(&layers), "\"native\" by file user.toml");
    assert_eq!(layers.put_environment(&environment(&[("WIELDY_SANDBOX_FLOOR", "gvisor")]).0), (Vec::new(), Vec::new()));
    assert_eq!(floor(&layers), "\"gvisor\" by environment WIELDY_SANDBOX_FLOOR");
    assert_eq!(layers.values().find(|(key, ..)| key == "log.level").unwrap().2, &Origin::Default);
}

#[test]
fn folders_follow_the_platforms_variables() {
    let home = [("HOME", "/home/ada")];
    assert_eq!(environment(&home).state_folder(), Path::new("/home/ada/.local/state/wieldy"));
    assert_eq!(environment(&home).config_folder().unwrap(), Path::new("/home/ada/.config/wieldy"));
    assert_eq!(environment(&[("XDG_STATE_HOME", "/s")]).state_folder(), Path::new("/s/wieldy"));
    assert_eq!(environment(&[]).state_folder(), Path::new(""));
}

#[test]
fn a_plan_without_limits_is_a_plan() {
    assert_eq!(file("[limits]\n[plans.Free]\n[plans.Core]\n[plans]"), "plans.Free = {} [file wieldy.toml]");
}

proptest::proptest! {
    #[test]
    fn no_file_makes_reading_it_panic(text in "\\PC{0,200}") {
        file(&text);
    }

    #[test]
    fn no_value_of_a_key_makes_reading_it_panic(
        key in "(limits|retry|timeouts|plans|rates|tools|shell|sandbox|log|x)(\\.(level|keep|retries|base|cap|tools|default|environment|mounts|network|floor|a b))?",
        value in "([0-9-]{1,25}|[0-9]{1,3}(ms|s|h|d)|nan|inf|true|\"[a-z0-9]{0,9}\"|\\[[a-z0-9,\"{}=]{0,9}\\]|\\{[a-z=0-9.\"]{0,12}\\})",
    ) {
        file(&format!("{key} = {value}"));
        let mut layers = layers();
        if layers.put_setting(&format!("{key}={value}")).is_ok() {
            let _ = Config::resolve(&layers, None, Mistakes::default());
        }
    }
}
