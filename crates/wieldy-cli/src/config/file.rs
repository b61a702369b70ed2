//! The configuration as people write it, and the defaults of all its keys.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use wieldy::{
    Backoff, BreakerPolicy, CodeOptions, ExecutorBuilder, Level, Limits, Owners, Per, RateKind, ResourceLimits,
    ResultRecording, RetryPolicy,
};
use wieldy_mcp::server::ServerOptions;

use super::history::FileDurability;
use super::log::{FileLogOrLevel, Levels, LogFormat, Rotate};
use super::mcp::{FileOnChange, FileStart};
use super::sandbox::{FileMount, FileNetwork};
use super::serve::{FileBatch, FilePriority, FileShow};
use super::text::FileText;
use super::value::{Bytes, BytesOrNone, Count, CountOrNone, Megabytes, MegabytesOrNone, Port, Time, Whole};

const MEGABYTE: u64 = 1024 * 1024;
/// The variables that programs get by default.
const ENVIRONMENT: [&str; 8] = ["PATH", "HOME", "USER", "LANG", "LC_*", "TERM", "TZ", "TMPDIR"];

macro_rules! section {
    ($(#[doc = $doc:literal] $name:ident { $($key:ident: $type:ty,)+ })+) => {$(
        #[doc = $doc]
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
        pub(crate) struct $name {
            $(#[serde(skip_serializing_if = "Option::is_none")] pub(crate) $key: Option<$type>,)+
        }
    )+};
}

section! {
    /// The whole file. A missing key leaves the value to the next layer.
    FileConfig {
        workspace: PathBuf,
        state: PathBuf,
        log: FileLogOrLevel,
        isolation: Level,
        rates: Vec<FileRate>,
        limits: FileLimits,
        timeouts: FileTimeouts,
        retry: FileRetry,
        breaker: FileBreaker,
        cache: FileCache,
        resources: FileResources,
        sandbox: FileSandbox,
        output: FileOutput,
        confirm: FileConfirm,
        history: FileHistory,
        threads: FileThreads,
        shell: FileShell,
        code: FileCode,
        tools: FileTools,
        mcp: FileMcp,
        serve: FileServe,
        vault: FileVault,
        plans: BTreeMap<String, FilePlan>,
    }
    /// The level, format and target of the log.
    FileLog {
        level: Levels,
        format: LogFormat,
        file: PathBuf,
        rotate: Rotate,
        keep: CountOrNone,
    }
    /// Limits for running and waiting calls.
    FileLimits {
        calls_running_max: Count,
        calls_running_per_agent_max: Count,
        calls_waiting_max: CountOrNone,
        queue_timeout: Time,
        batch_calls_max: Count,
    }
    /// Time limits for runs.
    FileTimeouts {
        default: Time,
        dynamic: bool,
        tools: BTreeMap<String, Time>,
    }
    /// The retry policy for failed runs.
    FileRetry {
        retries: Whole<0, 100>,
        base: Time,
        cap: Time,
        backoff: FileBackoff,
    }
    /// The circuit breaker for failing tools.
    FileBreaker {
        failures_max: CountOrNone,
        open_for: Time,
    }
    /// The size of the result cache.
    FileCache {
        bytes_max: BytesOrNone,
    }
    /// The resource limits of programs.
    FileResources {
        cpu_millicores: Count,
        memory_mb: Megabytes,
        processes: Count,
        open_files: Count,
        disk_mb: Megabytes,
        disk_files: Count,
        output_mb: Megabytes,
        max: FileResourceLimits,
        tools: BTreeMap<String, FileToolResources>,
    }
    /// Resource limits, each of which may be missing.
    FileResourceLimits {
        cpu_millicores: Count,
        memory_mb: Megabytes,
        processes: Count,
        open_files: Count,
        disk_mb: Megabytes,
        disk_files: Count,
        output_mb: Megabytes,
    }
    /// The resource limits of one tool, and the most that a call of it may ask for.
    FileToolResources {
        cpu_millicores: Count,
        memory_mb: Megabytes,
        processes: Count,
        open_files: Count,
        disk_mb: Megabytes,
        disk_files: Count,
        output_mb: Megabytes,
        max: FileResourceLimits,
    }
    /// The files and hosts that programs can reach, and the pool of their sandboxes.
    FileSandbox {
        mounts: Vec<FileMount>,
        hidden: Vec<PathBuf>,
        shown: Vec<PathBuf>,
        protected: Vec<PathBuf>,
        toolchains: bool,
        network: FileNetwork,
        idle: Time,
        idle_max: Count,
        idle_per_tenant_max: Count,
        spares: CountOrNone,
        folder: PathBuf,
        floor: Level,
        limits: FileSandboxLimits,
        oci: FileOci,
        firecracker: FileFirecracker,
    }
    /// The root file system of programs at the levels with an OCI runtime.
    FileOci {
        rootfs: PathBuf,
        layout: PathBuf,
    }
    /// The kernel and root file system of guests at the level `firecracker`.
    FileFirecracker {
        kernel: PathBuf,
        rootfs: PathBuf,
    }
    /// The limits for all programs of one session together; 0 means no limit.
    FileSandboxLimits {
        cpu_millicores: CountOrNone,
        memory_mb: MegabytesOrNone,
        processes: CountOrNone,
        disk_mb: MegabytesOrNone,
        disk_files: CountOrNone,
    }
    /// The limit for the text of a result.
    FileOutput {
        bytes_max: Bytes,
    }
    /// The time limit for a confirmation by a person.
    FileConfirm {
        timeout: Time,
    }
    /// The address and the retention of the history.
    FileHistory {
        url: String,
        durability: FileDurability,
        keep_days: Whole<0, 36_500>,
        keep_bytes: BytesOrNone,
        results: ResultRecording,
        results_keep_days: Whole<0, 36_500>,
        tools: BTreeMap<String, FileHistoryTool>,
    }
    /// The recording of the results of one tool.
    FileHistoryTool {
        results: ResultRecording,
    }
    /// The projects whose threads several callers share.
    FileThreads {
        projects: BTreeMap<String, FileOwners>,
    }
    /// The callers that share a project.
    FileOwners {
        tenants: Vec<String>,
        users: Vec<String>,
        agents: Vec<String>,
    }
    /// The variables of this process's environment that programs get.
    FileShell {
        environment: Vec<String>,
    }
    /// The index of the code tools.
    FileCode {
        fresh: Time,
    }
    /// The places of the user's own tools.
    FileTools {
        manifests: Vec<PathBuf>,
    }
    /// Other MCP servers whose tools are used.
    FileMcp {
        files: Vec<PathBuf>,
        list_wait: Time,
        servers: BTreeMap<String, FileServer>,
    }
    /// One MCP server: a program, or an address.
    FileServer {
        command: String,
        args: Vec<String>,
        env: BTreeMap<String, FileText>,
        cwd: PathBuf,
        isolation: Level,
        network: FileNetwork,
        mounts: Vec<FileMount>,
        url: String,
        headers: BTreeMap<String, FileText>,
        oauth: FileOauth,
        disabled: bool,
        start: FileStart,
        start_timeout: Time,
        timeout: Time,
        silence: Time,
        calls_max: Count,
        trusted: bool,
        on_change: FileOnChange,
        pass_context: bool,
        pass_meta: bool,
        allow: Vec<String>,
        deny: Vec<String>,
        tools: BTreeMap<String, FileToolRule>,
    }
    /// The OAuth settings for the login to a server.
    FileOauth {
        client_id: String,
        client_secret: FileText,
        scopes: Vec<String>,
        port: Port,
        private: bool,
    }
    /// The settings that override a tool of a server.
    FileToolRule {
        rename: String,
        read_only: bool,
        destructive: bool,
        idempotent: bool,
        open_world: bool,
        confirm: bool,
        timeout: Time,
        silence: Time,
    }
    /// The address of the HTTP server, and its callers.
    FileServe {
        listen: String,
        hosts: Vec<String>,
        origins: Vec<String>,
        body_bytes_max: Bytes,
        connections_max: Count,
        patience: Time,
        tokens: BTreeMap<String, FileToken>,
        mcp: FileServeMcp,
    }
    /// A caller with a token.
    FileToken {
        token: FileText,
        agent: String,
        tenant: String,
        user: String,
        scopes: Vec<String>,
        permissions: Vec<String>,
        plan: String,
        context: toml::Table,
    }
    /// The settings for showing tools to MCP clients.
    FileServeMcp {
        tools: FileShow,
        names: Vec<String>,
        categories: Vec<String>,
        providers: Vec<String>,
        instructions: String,
        patience: Time,
        task_after: Time,
        page: Count,
        batch: FileBatch,
        priority_max: FilePriority,
    }
    /// The default vault with its owners, and further ones.
    FileVault {
        root: PathBuf,
        tenants: Vec<String>,
        users: Vec<String>,
        agents: Vec<String>,
        projects: BTreeMap<String, FileVaultProject>,
    }
    /// A further vault with its owners.
    FileVaultProject {
        root: PathBuf,
        tenants: Vec<String>,
        users: Vec<String>,
        agents: Vec<String>,
    }
    /// The limits of a plan. A missing key of a plan that is not shipped means no limit; for `slots`, that of `limits`.
    FilePlan {
        batch_max: Count,
        parallel_max: Count,
        slots: CountOrNone,
        tools: Vec<String>,
        scopes: Vec<String>,
        full_events: bool,
        resources: FileResourceLimits,
    }
}

impl FileOwners {
    /// Returns the callers that are named.
    pub(super) fn owners(self) -> Owners {
        let Self { tenants, users, agents } = self;
        let named = Option::unwrap_or_default;
        Owners { tenants: named(tenants), users: named(users), agents: named(agents) }
    }
}

macro_rules! resolved_limits {
    ($($name:ident)+) => {$(
        impl $name {
            /// Returns the limits that are set.
            pub(super) fn limits(&self) -> ResourceLimits {
                fn number<const MIN: u64, const MAX: u64>(number: Option<Whole<MIN, MAX>>) -> Option<u64> {
                    number.map(|number| number.0)
                }
                let bytes = |megabytes: Option<Megabytes>| megabytes.map(|count| count.0 * MEGABYTE);
                ResourceLimits {
                    cpu_millicores: number(self.cpu_millicores),
                    memory_bytes: bytes(self.memory_mb),
                    processes: number(self.processes),
                    open_files: number(self.open_files),
                    disk_bytes: bytes(self.disk_mb),
                    disk_files: number(self.disk_files),
                    output_bytes: bytes(self.output_mb),
                }
            }
        }
    )+};
}

resolved_limits! { FileResources FileResourceLimits FileToolResources }

/// A rate limit: a number of calls per time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct FileRate {
    pub(crate) per: Per,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool: Option<String>,
    pub(crate) calls: Count,
    pub(crate) window: Time,
    #[serde(default = "rate")]
    pub(crate) kind: RateKind,
}

fn rate() -> RateKind {
    RateKind::Rate
}

/// The growth of delays from one retry to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FileBackoff {
    Exponential,
    Linear,
}

impl FileConfig {
    /// Returns the values of a configuration without any setting: the executor's own defaults, and those of the command
    /// line.
    pub(crate) fn defaults(state: PathBuf) -> Self {
        let (limits, retry, breaker) = (Limits::default(), RetryPolicy::default(), BreakerPolicy::default());
        let executor = ExecutorBuilder::default();
        Self {
            workspace: Some(".".into()),
            state: Some(state),
            log: Some(FileLogOrLevel(FileLog::defaults())),
            isolation: Some(executor.isolation),
            rates: Some(Vec::new()),
            limits: Some(FileLimits {
                calls_running_max: Some(Whole(limits.calls_running_max.into())),
                calls_running_per_agent_max: Some(Whole(limits.calls_running_per_agent_max.into())),
                calls_waiting_max: Some(Whole(limits.calls_waiting_max as u64)),
                queue_timeout: Some(Time(limits.queue_timeout)),
                batch_calls_max: Some(Whole(ServerOptions::default().batch_calls_max as u64)),
            }),
            timeouts: Some(FileTimeouts {
                default: Some(Time(executor.timeout)),
                dynamic: Some(executor.dynamic_timeout.is_some()),
                tools: Some(BTreeMap::new()),
            }),
            retry: Some(FileRetry {
                retries: Some(Whole(retry.retries.into())),
                base: Some(Time(retry.base)),
                cap: Some(Time(retry.cap)),
                backoff: Some(match retry.backoff {
                    Backoff::Exponential => FileBackoff::Exponential,
                    Backoff::Linear => FileBackoff::Linear,
                }),
            }),
            breaker: Some(FileBreaker {
                failures_max: Some(Whole(breaker.failures_max.into())),
                open_for: Some(Time(breaker.open_for)),
            }),
            cache: Some(FileCache { bytes_max: Some(Whole(executor.cache_bytes_max)) }),
            resources: Some(FileResources::defaults()),
            sandbox: Some(FileSandbox::defaults(&executor)),
            output: Some(FileOutput { bytes_max: Some(Whole(executor.output_bytes_max)) }),
            confirm: Some(FileConfirm { timeout: Some(Time(executor.confirmation_timeout)) }),
            history: Some(FileHistory::defaults()),
            threads: Some(FileThreads { projects: Some(BTreeMap::new()) }),
            shell: Some(FileShell { environment: Some(ENVIRONMENT.map(str::to_owned).to_vec()) }),
            code: Some(FileCode { fresh: Some(Time(CodeOptions::default().fresh)) }),
            tools: Some(FileTools { manifests: Some(Vec::new()) }),
            mcp: Some(FileMcp::defaults()),
            serve: Some(FileServe::defaults()),
            plans: Some(executor.policy.plans().iter().map(|(name, plan)| (name.clone(), plan.into())).collect()),
            vault: Some(FileVault::defaults()),
        }
    }

    /// Makes relative paths start at the file's folder, so that they mean the same wherever the command is started.
    /// Paths that a sandbox hides, shows and protects start at the workspace.
    pub(crate) fn begin_paths_at(&mut self, folder: &std::path::Path) {
        let manifests = self.tools.iter_mut().flat_map(|tools| &mut tools.manifests).flatten();
        for path in self.workspace.iter_mut().chain(&mut self.state).chain(manifests) {
            if path.is_relative() && !folder.as_os_str().is_empty() {
                *path = folder.join(&*path);
            }
        }
        if let Some(url) = self.history.as_mut().and_then(|history| history.url.as_mut()) {
            super::history::begin_at(url, folder);
        }
        if let Some(path) = self.log.as_mut().and_then(|log| log.0.file.as_mut())
            && !path.as_os_str().is_empty()
            && !path.starts_with("~")
        {
            *path = folder.join(&*path);
        }
        if let Some(mcp) = &mut self.mcp {
            super::mcp::begin_at(mcp, folder);
        }
        if let Some(serve) = &mut self.serve {
            serve.begin_paths_at(folder);
        }
        for sandbox in self.sandbox.iter_mut() {
            let guest =
                sandbox.firecracker.iter_mut().flat_map(|guest| guest.kernel.iter_mut().chain(&mut guest.rootfs));
            let system = sandbox.oci.iter_mut().flat_map(|oci| oci.rootfs.iter_mut().chain(&mut oci.layout));
            for path in guest.chain(system).chain(&mut sandbox.folder) {
                if !path.as_os_str().is_empty() && !path.starts_with("~") {
                    *path = folder.join(&*path);
                }
            }
        }
        if let Some(vault) = &mut self.vault {
            vault.begin_paths_at(folder);
        }
        let mounts = self.sandbox.iter_mut().flat_map(|sandbox| &mut sandbox.mounts).flatten();
        if !folder.as_os_str().is_empty() {
            mounts.for_each(|mount| mount.begin_at(folder));
        }
    }
}

impl FileResources {
    fn defaults() -> Self {
        let resources = ResourceLimits::DEFAULT;
        let megabytes = |bytes: Option<u64>| bytes.map(|bytes| Whole(bytes / MEGABYTE));
        Self {
            cpu_millicores: resources.cpu_millicores.map(Whole),
            memory_mb: megabytes(resources.memory_bytes),
            processes: resources.processes.map(Whole),
            open_files: resources.open_files.map(Whole),
            disk_mb: megabytes(resources.disk_bytes),
            disk_files: resources.disk_files.map(Whole),
            output_mb: megabytes(resources.output_bytes),
            max: Some(FileResourceLimits::default()),
            tools: Some(BTreeMap::new()),
        }
    }
}

impl FileLog {
    fn defaults() -> Self {
        Self {
            level: Some(Levels { all: Some(Levels::DEFAULT), targets: Vec::new() }),
            format: Some(LogFormat::Text),
            file: Some(PathBuf::new()),
            rotate: Some(Rotate::Never),
            keep: Some(Whole(7)),
        }
    }
}
