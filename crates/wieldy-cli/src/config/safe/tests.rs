//! Tests of the keys that a folder's own `wieldy.toml` may set before it is trusted.

use wieldy::Network;

use super::super::file::*;
use super::super::history::FileDurability;
use super::super::log::FileLogOrLevel;
use super::super::mcp::{FileOnChange, FileStart};
use super::super::sandbox::FileNetwork;
use super::super::serve::{FileBatch, FilePriority, FileShow};
use super::super::*;

fn layers() -> Layers {
    Layers::new(&FileConfig::defaults("/state".into()))
}

/// Returns a configuration with every key, each with a value that is not the default. New keys must be added here.
fn everything() -> FileConfig {
    let time = || Some(Time(Duration::from_secs(7)));
    let text = || Some("some".to_owned());
    let texts = || Some(vec!["some".to_owned()]);
    let secrets = || Some(BTreeMap::from([("KEY".to_owned(), FileText::Written("secret-secret".into()))]));
    let path = || Some(PathBuf::from("some"));
    let network = || Some(FileNetwork(Network::Open));
    let limits = || FileResourceLimits {
        cpu_millicores: Some(Whole(7)),
        memory_mb: Some(Whole(7)),
        processes: Some(Whole(7)),
        open_files: Some(Whole(7)),
        disk_mb: Some(Whole(7)),
        disk_files: Some(Whole(7)),
        output_mb: Some(Whole(7)),
    };
    let mounts = || Some(vec!["/usr:/some".parse().unwrap()]);
    let rule = FileToolRule {
        rename: text(),
        read_only: Some(true),
        destructive: Some(false),
        idempotent: Some(true),
        open_world: Some(false),
        confirm: Some(true),
        timeout: time(),
        silence: time(),
    };
    let server = |command, url, oauth| FileServer {
        command,
        args: texts(),
        env: secrets(),
        cwd: path(),
        isolation: Some(Level::None),
        network: network(),
        mounts: mounts(),
        url,
        headers: secrets(),
        oauth,
        disabled: Some(false),
        start: Some(FileStart::Eager),
        start_timeout: time(),
        timeout: time(),
        silence: time(),
        calls_max: Some(Whole(7)),
        trusted: Some(true),
        pass_context: Some(true),
        pass_meta: Some(true),
        on_change: Some(FileOnChange::Warn),
        allow: texts(),
        deny: texts(),
        tools: Some(BTreeMap::from([("some".to_owned(), rule.clone())])),
    };
    let oauth = FileOauth {
        client_id: text(),
        client_secret: Some(FileText::Written("secret-secret".into())),
        scopes: texts(),
        port: Some(Whole(7)),
        private: Some(true),
    };
    let token = FileToken {
        token: Some(FileText::Written("secret-secret-secret".into())),
        agent: text(),
        tenant: text(),
        user: text(),
        scopes: texts(),
        permissions: texts(),
        plan: text(),
        context: Some(toml::Table::from_iter([("some".to_owned(), toml::Value::from(7))])),
    };
    FileConfig {
        workspace: path(),
        state: path(),
        log: Some(FileLogOrLevel(FileLog {
            level: Some("trace".parse().unwrap()),
            format: Some(LogFormat::Json),
            file: path(),
            rotate: Some(Rotate::Daily),
            keep: Some(Whole(9)),
        })),
        isolation: Some(Level::None),
        rates: Some(vec![FileRate {
            per: wieldy::Per::Agent,
            tool: None,
            calls: Whole(7),
            window: Time(Duration::from_secs(7)),
            kind: wieldy::RateKind::Quota,
        }]),
        limits: Some(FileLimits {
            calls_running_max: Some(Whole(700)),
            calls_running_per_agent_max: Some(Whole(700)),
            calls_waiting_max: Some(Whole(70_000)),
            queue_timeout: Some(Time(Duration::from_secs(7000))),
            batch_calls_max: Some(Whole(700)),
        }),
        timeouts: Some(FileTimeouts {
            default: Some(Time(Duration::from_secs(7000))),
            dynamic: Some(true),
            tools: Some(BTreeMap::from([("some".to_owned(), Time(Duration::from_secs(7000)))])),
        }),
        retry: Some(FileRetry {
            retries: Some(Whole(7)),
            base: time(),
            cap: time(),
            backoff: Some(FileBackoff::Linear),
        }),
        breaker: Some(FileBreaker { failures_max: Some(Whole(7)), open_for: time() }),
        cache: Some(FileCache { bytes_max: Some(Whole(7)) }),
        resources: Some(FileResources {
            cpu_millicores: Some(Whole(700_000)),
            memory_mb: Some(Whole(700_000)),
            processes: Some(Whole(700_000)),
            open_files: Some(Whole(700_000)),
            disk_mb: Some(Whole(700_000)),
            disk_files: Some(Whole(700_000)),
            output_mb: Some(Whole(700_000)),
            max: Some(limits()),
            tools: Some(BTreeMap::from([(
                "some".to_owned(),
                FileToolResources {
                    cpu_millicores: Some(Whole(7)),
                    memory_mb: Some(Whole(7)),
                    processes: Some(Whole(7)),
                    open_files: Some(Whole(7)),
                    disk_mb: Some(Whole(7)),
                    disk_files: Some(Whole(7)),
                    output_mb: Some(Whole(7)),
                    max: Some(limits()),
                },
            )])),
        }),
        sandbox: Some(FileSandbox {
            mounts: mounts(),
            hidden: path().map(|path| vec![path]),
            shown: path().map(|path| vec![path]),
            protected: path().map(|path| vec![path]),
            toolchains: Some(false),
            network: network(),
            idle: time(),
            idle_max: Some(Whole(7)),
            idle_per_tenant_max: Some(Whole(7)),
            spares: Some(Whole(7)),
            floor: Some(Level::Gvisor),
            limits: Some(FileSandboxLimits {
                cpu_millicores: Some(Whole(7)),
                memory_mb: Some(Whole(7)),
                processes: Some(Whole(7)),
                disk_mb: Some(Whole(7)),
                disk_files: Some(Whole(7)),
            }),
            oci: Some(FileOci { rootfs: path(), layout: path() }),
            folder: path(),
            firecracker: Some(FileFirecracker { kernel: path(), rootfs: path() }),
        }),
        code: Some(FileCode { fresh: time() }),
        output: Some(FileOutput { bytes_max: Some(Whole(7_000_000)) }),
        confirm: Some(FileConfirm { timeout: time() }),
        history: Some(FileHistory {
            url: text(),
            durability: Some(FileDurability::Relaxed),
            keep_days: Some(Whole(7)),
            keep_bytes: Some(Whole(7)),
            results: Some(wieldy::ResultRecording::Whole),
            results_keep_days: Some(Whole(7)),
            tools: Some(BTreeMap::from([(
                "some".to_owned(),
                FileHistoryTool { results: Some(wieldy::ResultRecording::None) },
            )])),
        }),
        threads: Some(FileThreads {
            projects: Some(BTreeMap::from([(
                "some".to_owned(),
                FileOwners { tenants: texts(), users: texts(), agents: texts() },
            )])),
        }),
        shell: Some(FileShell { environment: texts() }),
        tools: Some(FileTools { manifests: path().map(|path| vec![path]) }),
        mcp: Some(FileMcp {
            files: path().map(|path| vec![path]),
            list_wait: time(),
            servers: Some(BTreeMap::from([
                ("program".to_owned(), server(text(), None, None)),
                ("elsewhere".to_owned(), server(None, text(), Some(oauth))),
            ])),
        }),
        serve: Some(FileServe {
            listen: Some("0.0.0.0:1".into()),
            hosts: texts(),
            origins: texts(),
            body_bytes_max: Some(Whole(7)),
            connections_max: Some(Whole(7)),
            patience: time(),
            tokens: Some(BTreeMap::from([("some".to_owned(), token)])),
            mcp: Some(FileServeMcp {
                tools: Some(FileShow::Search),
                names: texts(),
                categories: texts(),
                providers: texts(),
                instructions: text(),
                patience: time(),
                task_after: Some(Time(Duration::from_secs(8))),
                page: Some(Whole(7)),
                batch: Some(FileBatch::All),
                priority_max: Some(FilePriority(wieldy::Priority::HIGH)),
            }),
        }),
        vault: Some(FileVault {
            root: Some("/elsewhere".into()),
            tenants: texts(),
            users: texts(),
            agents: texts(),
            projects: Some(BTreeMap::from([(
                "some".to_owned(),
                FileVaultProject { root: Some("/other".into()), tenants: texts(), users: texts(), agents: texts() },
            )])),
        }),
        plans: Some(BTreeMap::from([(
            "some".to_owned(),
            FilePlan {
                batch_max: Some(Whole(7)),
                parallel_max: Some(Whole(7)),
                slots: Some(Whole(7)),
                tools: texts(),
                scopes: texts(),
                resources: Some(limits()),
                full_events: Some(false),
            },
        )])),
    }
}

/// Returns the keys of an untrusted file that changed a value.
fn effects_of_untrusted(config: &FileConfig) -> Vec<String> {
    let text = toml::to_string(config).unwrap();
    let (mut above, below) = (layers(), layers());
    let ignored = above.put_untrusted_file(Path::new("wieldy.toml"), &text).ignored;
    let before: BTreeMap<String, String> = below.values().map(|(key, value, _)| (key, value.to_string())).collect();
    let changed = above.values().filter(|(key, value, _)| before.get(key) != Some(&value.to_string()));
    let changed: Vec<String> = changed.map(|(key, ..)| key).collect();
    let all = layers_of(&text).values().filter(|(.., origin)| **origin != Origin::Default).count();
    assert_eq!(changed.len() + ignored.len(), all, "every key is either ignored or on the safe list");
    changed
}

fn layers_of(text: &str) -> Layers {
    let mut layers = layers();
    assert_eq!(layers.put_file(Path::new("wieldy.toml"), text), Vec::new());
    layers
}

#[test]
fn an_untrusted_file_sets_only_keys_of_the_safe_list() {
    let limits = ["cpu-millicores", "disk-files", "disk-mb", "memory-mb", "processes"];
    let mut safe: Vec<String> = limits.map(|limit| format!("sandbox.limits.{limit}")).to_vec();
    safe.extend(["sandbox.hidden", "sandbox.protected", "timeouts.tools.some"].map(str::to_owned));
    safe.sort();
    let mut changed = effects_of_untrusted(&everything());
    changed.sort();
    assert_eq!(changed, safe, "all limits are higher than by default, but those of sandboxes, where there is none");
    // Test again with numbers and times below the defaults.
    let mut low = toml::to_string(&everything()).unwrap();
    for (high, one) in [
        ("= 700\n", "= 1\n"),
        ("= 70000\n", "= 1\n"),
        ("= 700000\n", "= 1\n"),
        ("= 7000000\n", "= 1\n"),
        ("\"7000s\"", "\"1s\""),
    ] {
        low = low.replace(high, one);
    }
    let mut changed = effects_of_untrusted(&toml::from_str(&low).unwrap());
    changed.retain(|key| !safe.contains(key));
    let resources = ["cpu-millicores", "disk-files", "disk-mb", "memory-mb", "open-files", "output-mb", "processes"];
    let limits =
        ["calls-running-max", "calls-running-per-agent-max", "calls-waiting-max", "queue-timeout", "batch-calls-max"];
    let mut lower: Vec<String> = resources.map(|limit| format!("resources.{limit}")).to_vec();
    lower.extend(limits.map(|limit| format!("limits.{limit}")));
    lower.extend(["output.bytes-max", "timeouts.default"].map(str::to_owned));
    lower.sort();
    changed.sort();
    assert_eq!(changed, lower);
}

#[test]
fn an_untrusted_file_adds_only_paths_in_its_folder_and_raises_no_limit() {
    let ignored = |base: &str, text: &str| {
        let mut layers = layers_of(base);
        let ignored = layers.put_untrusted_file(Path::new("wieldy.toml"), text).ignored;
        ignored.into_iter().map(|(key, _)| key.join(".")).collect::<Vec<_>>()
    };
    for name in ["/etc", "~/x", "~", "../x", "a/../../x", "", ".", "./x"] {
        let text = format!("sandbox.protected = [{name:?}]");
        assert_eq!(ignored("", &text), ["sandbox.protected"], "{name}");
    }
    assert_eq!(ignored("", "sandbox.hidden = [\"a\", \"b/c\", \"..d\"]"), Vec::<String>::new());
    let mut layers = layers_of("");
    let beside = layers.put_untrusted_file(Path::new("wieldy.toml"), "sandbox.hidden = [\"a\", \"/etc\", \"b\"]");
    assert_eq!(beside.ignored, [(vec!["sandbox".to_owned(), "hidden".to_owned()], toml::Value::from(vec!["/etc"]))]);
    let hidden = layers.values().find(|(key, ..)| key == "sandbox.hidden").map(|(_, value, _)| value.clone());
    assert_eq!(hidden, Some(toml::Value::from(vec!["a", "b"])), "the names beside it count");
    let many = vec!["\"x\""; 257].join(",");
    assert_eq!(ignored("", &format!("sandbox.hidden = [{many}]")), ["sandbox.hidden"]);
    let limit = "sandbox.limits.memory-mb";
    for (held, asked, is_ignored) in
        [(0, 0, false), (0, 5, false), (5, 5, false), (5, 4, false), (5, 6, true), (5, 0, true)]
    {
        let told = ignored(&format!("{limit} = {held}"), &format!("{limit} = {asked}"));
        assert_eq!(!told.is_empty(), is_ignored, "{held} {asked}");
    }
}
