//! Assembly: builds an executor from a configuration. All parts are put together here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow};
use wieldy::secrets::PROTECTED_AT_HOME;
use wieldy::{
    BuiltinOptions, CommandTool, Confirmer, DynamicTimeout, Executor, ExecutorBuilder, FileRules, FolderArtifacts,
    Level, Manifest, ManifestTool, Native, NativeOptions, Oci, OciOptions, OutputSink, ProbeOptions, Problem, Rootfs,
    SharedTool, Store, Unavailable, Unbound, VaultOptions, history_tools, thread_tools,
};

use crate::config::{
    Config, Environment, FILE_NAME, MANIFEST_BYTES_MAX, Origin, PROJECT_FOLDER, Text, check_names, is_manifest,
    read_regular,
};
use crate::exit::Failure;
use crate::history::{self, History};
use crate::toolchains;
use crate::upstreams;

/// The purpose of an executor; by default one call.
#[derive(Default)]
pub(crate) struct Work {
    /// More than one call, so that sandboxes are built ahead.
    pub(crate) many_calls: bool,
    /// A sink that shows output as it comes.
    pub(crate) output: Option<Arc<dyn OutputSink>>,
    /// The only tool beside the built-in ones: manifests are not read.
    pub(crate) program: Option<SharedTool>,
    /// True if callers come with tokens.
    pub(crate) has_tokens: bool,
}

impl Work {
    pub(crate) fn many_calls() -> Self {
        Self { many_calls: true, ..Self::default() }
    }
}

/// Builds the executor that the configuration describes, with all tools.
pub(crate) fn executor(
    config: &Config,
    environment: &Environment,
    confirmer: Option<Arc<dyn Confirmer>>,
    history: Option<&History>,
    work: Work,
) -> Result<Executor, Failure> {
    let is_program = work.program.is_some();
    let builder = builder(config, environment, work.has_tokens)?.tools(work.program);
    let mut builder = builder.sandbox(Native::new(native(config, environment, work.many_calls)));
    builder.output = work.output;
    if is_program {
        builder.dynamic_timeout = None;
    }
    if config.state.as_os_str().is_empty() {
        for level in [Level::Runc, Level::Crun, Level::Youki, Level::Gvisor, Level::Firecracker] {
            let hint = "`--state DIR` or the key `state` names one";
            builder = builder.sandbox(Unavailable::new(level, "there is no state folder", hint));
        }
    } else {
        check_system(config)?;
        // Clean up the leftovers of all levels, also of those that are not used now.
        wieldy::sweep(&whole(&config.state));
        for level in [Level::Runc, Level::Crun, Level::Youki, Level::Gvisor] {
            builder = builder.sandbox(Oci::new(oci(config, environment, level)));
        }
        #[cfg(feature = "firecracker")]
        let guests = wieldy::Firecracker::new(firecracker(config, environment));
        #[cfg(not(feature = "firecracker"))]
        let guests = Unavailable::firecracker();
        builder = builder.sandbox(guests);
    }
    builder.confirmer = confirmer;
    if let Some(history) = history {
        builder = builder.tools(history_tools(history.store.clone()));
        builder = builder.tools(history::threads(config).into_iter().flat_map(thread_tools));
        builder.journal = Arc::clone(&history.journal) as _;
        builder.durability = config.history.durability;
        builder.results = config.history.results;
        builder.results_of_tools = config.history.results_of_tools.clone();
        // Programs that a person runs have nothing in common, so the durations of earlier ones set no timeout.
        if config.dynamic_timeouts && !is_program {
            builder.known_durations = history.durations(config)?;
        }
    }
    if let Some(artifacts) = artifacts(config)? {
        builder.artifacts = Arc::new(artifacts);
    }
    let executor = builder.build().map_err(Failure::usage)?;
    if !is_program {
        add_manifests(&executor, config, environment)?;
        check_names(config, &executor)?;
    }
    Ok(executor)
}

/// Builds an executor to look at and not to run: nothing is written anywhere.
pub(crate) fn catalogue(config: &Config, environment: &Environment) -> Result<Executor, Failure> {
    let memory = config.history.address.iter().flat_map(|address| history_tools(Store::at(address)));
    let threads = history::threads(config).into_iter().flat_map(thread_tools);
    let executor = builder(config, environment, false)?.tools(memory).tools(threads).build().map_err(Failure::usage)?;
    add_manifests(&executor, config, environment)?;
    check_names(config, &executor)?;
    Ok(executor)
}

/// Opens the folder for large outputs, if there is one. A folder that the user named must be usable; without the
/// default one everything but the storage still works.
fn artifacts(config: &Config) -> Result<Option<FolderArtifacts>, Failure> {
    if config.state.as_os_str().is_empty() {
        return Ok(None);
    }
    match FolderArtifacts::open(&config.state) {
        Ok(artifacts) => Ok(Some(artifacts)),
        Err(error) if config.origin("state") == Some(&Origin::Default) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "large outputs are lost when this command ends");
            Ok(None)
        }
        Err(error) => Err(Failure::broken(error).hint("`--state DIR` or the key `state` names another folder")),
    }
}

/// Builds an executor with the built-in tools only, to check manifests against.
pub(crate) fn executor_of_built_ins(config: &Config, environment: &Environment) -> Result<Executor, Failure> {
    builder(config, environment, false)?.build().map_err(Failure::usage)
}

fn builder(config: &Config, environment: &Environment, has_tokens: bool) -> Result<ExecutorBuilder, Failure> {
    let hint = "`--workspace DIR` or the key `workspace` names another folder";
    let settings = config.file.iter().chain(&config.manifests).chain(&config.mcp.files).chain(&config.secret_files);
    let hidden = settings.map(|path| whole(path)).collect();
    let vaults = VaultOptions { projects: config.vault.projects.clone(), state: None, has_tokens, hidden };
    let options = BuiltinOptions {
        environment: tool_environment(config, environment),
        state: (!config.state.as_os_str().is_empty()).then(|| whole(&config.state)),
        code: config.code,
        vaults,
    };
    let mut builder =
        wieldy::builder_of(&config.workspace, options).map_err(|error| Failure::usage(error).hint(hint))?;
    for (name, plan) in &config.plans {
        builder.policy = builder.policy.with_plan(name, plan.clone());
    }
    builder.confirmation_timeout = config.confirmation_timeout;
    builder.limits = config.limits;
    builder.rates = config.rates.clone();
    builder.breaker = config.breaker;
    builder.cache_bytes_max = config.cache_bytes_max;
    builder.timeout = config.timeout;
    builder.timeouts = config.timeouts.clone();
    builder.dynamic_timeout = config.dynamic_timeouts.then(DynamicTimeout::default);
    builder.retry = config.retry;
    builder.isolation = config.isolation;
    builder.files = tool_files(config, environment);
    builder.network = config.sandbox.network.clone();
    builder.sandbox_limits = config.sandbox.limits;
    builder.resource_limits = config.resources;
    builder.resource_limits_max = config.resources_max;
    builder.tool_limits = config.resources_of_tools.clone().into_iter().collect();
    builder.output_bytes_max = config.output_bytes_max;
    Ok(builder)
}

/// Returns the rules for the files that programs and file tools see and may change: those of the configuration, and
/// those that protect the history, its key and the executor's own settings.
pub(crate) fn files(config: &Config, environment: &Environment) -> FileRules {
    let mut files = config.sandbox.files.clone();
    // A missing file cannot be seen and needs no rule.
    files.hidden.extend(history::files(config).iter().filter_map(|path| path.canonicalize().ok()));
    let state = Some(&config.state).filter(|state| !state.as_os_str().is_empty()).cloned();
    files.own.extend(environment.config_folder().into_iter().chain(state).map(|path| whole(&path)));
    files.hidden.extend(config.secret_files.iter().flat_map(|path| in_workspace(path, &config.workspace)));
    let workspace = whole(&config.workspace);
    // Settings are also read from the current folder at the next start, so they are protected even if they do not exist
    // yet.
    let here = [PathBuf::from(FILE_NAME), PathBuf::from(PROJECT_FOLDER)];
    let settings = config.file.iter().chain(&config.manifests).chain(&config.mcp.files).chain(&here);
    files.protected.extend(settings.flat_map(|path| in_workspace(path, &config.workspace)));
    if environment.home().is_some_and(|home| whole(home) == workspace) {
        files.protected.extend(PROTECTED_AT_HOME.iter().map(|name| PathBuf::from(name.path)));
    }
    files
}

/// Returns the same rules for the programs of tools, which also see the user's toolchains.
fn tool_files(config: &Config, environment: &Environment) -> FileRules {
    let mut files = files(config, environment);
    if config.sandbox.toolchains {
        let credentials = toolchains::credentials(environment, &files);
        files.hidden.extend(credentials);
        files.mounts.extend(toolchains::mounts(environment, &files.mounts, &whole(&config.workspace)));
    }
    files
}

/// Removes the placeholders that a killed executor left in the workspace.
pub(crate) fn sweep_placeholders(config: &Config, environment: &Environment) {
    let mut more = config.sandbox.files.protected.clone();
    more.extend([&config.state].into_iter().cloned().chain(environment.config_folder()));
    more.extend(std::env::current_dir().iter().flat_map(|here| [here.join(FILE_NAME), here.join(PROJECT_FOLDER)]));
    wieldy::sweep_placeholders(&whole(&config.workspace), &more);
}

/// Returns the absolute path without links, as far as it exists, so that a sandbox resolves it the same way from any
/// folder.
pub(crate) fn whole(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let real = |above: &Path| Some(above.canonicalize().ok()?.join(path.strip_prefix(above).ok()?));
    let mut ways = path.ancestors().filter_map(real);
    // Joining an empty path would add a slash.
    path.canonicalize().ok().or_else(|| ways.next()).unwrap_or_else(|| path.clone())
}

/// Returns the absolute path without `.` and `..`, if that is the same folder. Links stay, so that the level can refuse
/// them.
fn without_dots(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    if plain.canonicalize().ok() == path.canonicalize().ok() { plain } else { path }
}

/// Returns the paths of a file relative to its workspace, both through the links in `path` and without links.
fn in_workspace(path: &Path, workspace: &Path) -> Vec<PathBuf> {
    let (asked, given) = (std::path::absolute(path).ok(), std::path::absolute(workspace).ok());
    let roots = [Some(whole(workspace)), given].into_iter().flatten();
    let ways = roots.filter_map(|root| asked.as_ref()?.strip_prefix(root).ok().map(Path::to_owned));
    let real = whole(path).strip_prefix(whole(workspace)).ok().map(Path::to_owned);
    let is_way = |way: &PathBuf| way.components().all(|part| matches!(part, Component::Normal(_)));
    ways.chain(real).filter(|way| !way.as_os_str().is_empty() && is_way(way)).collect()
}

/// Returns the options of the native level.
fn native(config: &Config, environment: &Environment, many_calls: bool) -> NativeOptions {
    let is_unsaid = config.origin("sandbox.spares") == Some(&Origin::Default);
    // With a single call, a sandbox that is built ahead would never be used.
    let spares = if is_unsaid && !many_calls { 0 } else { config.sandbox.spares };
    NativeOptions {
        state: (!config.state.as_os_str().is_empty()).then(|| whole(&config.state)),
        home: environment.home().map(Path::to_owned),
        folder: config.sandbox.folder.as_deref().map(without_dots),
        warm_sandboxes: spares,
        warm_inits: spares,
        idle_max: config.sandbox.idle,
        idle_limits: config.sandbox.idle_limits,
    }
}

/// Returns the options of a level with an OCI runtime.
fn oci(config: &Config, environment: &Environment, level: Level) -> OciOptions {
    OciOptions {
        rootfs: config.sandbox.system.clone(),
        home: environment.home().map(Path::to_owned),
        idle_max: config.sandbox.idle,
        idle_limits: config.sandbox.idle_limits,
        ..OciOptions::new(level, config.state.join("oci"))
    }
}

/// Checks the configured system of programs before it is needed.
fn check_system(config: &Config) -> Result<(), Failure> {
    let (key, path, problem) = match &config.sandbox.system {
        Rootfs::Folder(folder) if !folder.is_dir() => ("rootfs", folder, "is not a folder"),
        Rootfs::Layout(layout) if !layout.is_dir() => ("layout", layout, "is not a folder"),
        Rootfs::Layout(layout) if !["oci-layout", "index.json"].iter().all(|name| layout.join(name).is_file()) => {
            ("layout", layout, "is not an OCI image layout: it has no `oci-layout` or no `index.json`")
        }
        _ => return Ok(()),
    };
    let hint = match key {
        "rootfs" => "name a folder with a root file system, or leave the key out to use this machine's",
        _ => {
            "`skopeo copy docker://debian:stable-slim oci:DIR` makes one; or leave the key out to use this machine's system"
        }
    };
    Err(Failure::usage(anyhow!("`sandbox.oci.{key}`: `{}` {problem}", path.display())).hint(hint))
}

/// Returns the options of the level `firecracker`.
#[cfg(feature = "firecracker")]
fn firecracker(config: &Config, environment: &Environment) -> wieldy::FirecrackerOptions {
    wieldy::FirecrackerOptions {
        kernel: config.sandbox.kernel.clone(),
        rootfs: config.sandbox.rootfs.clone(),
        home: environment.home().map(Path::to_owned),
        idle_max: config.sandbox.idle,
        idle_limits: config.sandbox.idle_limits,
        ..wieldy::FirecrackerOptions::new(config.state.join("firecracker"))
    }
}

/// Returns the options to probe this machine with: those that programs of the configuration's executor would get.
pub(crate) fn probe_options(config: &Config, environment: &Environment) -> ProbeOptions {
    let mut options = ProbeOptions::new(&config.workspace);
    options.confinement.limits = config.resources;
    options.confinement.place_limits = config.sandbox.limits;
    options.confinement.network = config.sandbox.network.clone();
    options.confinement.files = Arc::new(tool_files(config, environment));
    options.native = native(config, environment, false);
    options.system = config.sandbox.system.clone();
    #[cfg(feature = "firecracker")]
    {
        options.firecracker = firecracker(config, environment);
    }
    if let Some(path) = environment.0.get("PATH") {
        options.path.clone_from(path);
    }
    options
}

/// Returns the variables of this process's environment that programs get: those with an allowed name, where a name that
/// ends in `*` allows a family.
pub(crate) fn program_environment(config: &Config, environment: &Environment) -> BTreeMap<String, String> {
    let is_allowed = |name: &str| {
        config.shell_environment.iter().any(|allowed| match allowed.strip_suffix('*') {
            Some(family) => name.starts_with(family),
            None => name == allowed,
        })
    };
    environment.0.iter().filter(|(name, _)| is_allowed(name)).map(|(n, v)| (n.clone(), v.clone())).collect()
}

/// Returns the same variables for the programs of tools, which also find the user's toolchains.
pub(crate) fn tool_environment(config: &Config, environment: &Environment) -> BTreeMap<String, String> {
    let mut variables = program_environment(config, environment);
    if !config.sandbox.toolchains {
        return variables;
    }
    for (name, value) in toolchains::variables(environment) {
        variables.entry(name).or_insert(value);
    }
    if let Some(path) = variables.get_mut("PATH") {
        for folder in toolchains::programs(environment, &whole(&config.workspace)) {
            // A folder with a colon in its name cannot be on a `PATH`.
            let folder = folder.to_str().filter(|folder| !folder.contains(':'));
            if let Some(folder) = folder.filter(|folder| path.split(':').all(|other| other != *folder)) {
                path.push(':');
                path.push_str(folder);
            }
        }
    }
    variables
}

/// Adds the tools of all manifests. Of two tools with the same name, the first one counts. A file with mistakes is
/// skipped with a warning, unless the configuration names it: then it is an error.
fn add_manifests(executor: &Executor, config: &Config, environment: &Environment) -> Result<(), Failure> {
    let mut names = BTreeSet::new();
    for path in manifest_paths(config, environment) {
        let mut add = || -> Result<(), Failure> {
            for tool in tools_of(&path, config, environment)? {
                let name = tool.spec().name;
                if names.insert(name.clone()) {
                    executor.register(tool).map_err(|error| {
                        let doing = format!("the manifest `{}` cannot be used", path.display());
                        Failure::usage(anyhow::Error::new(error).context(doing)).hint("give the tool another name")
                    })?;
                } else {
                    let file = path.display();
                    tracing::warn!(tool = name, %file, "a tool is left out: an earlier manifest has one of this name");
                }
            }
            Ok(())
        };
        match add() {
            Err(failure) if !config.manifests.contains(&path) => {
                let hint = failure.hint.as_deref().unwrap_or_default();
                tracing::warn!("{}, so it is left out; {hint}", failure.error().message);
            }
            added => added?,
        }
    }
    Ok(())
}

/// Returns the tools of one manifest, or its mistakes.
pub(crate) fn tools_of(path: &Path, config: &Config, environment: &Environment) -> Result<Vec<SharedTool>, Failure> {
    let (manifest, mut problems) = read_manifest(path, config)?;
    let mut tools = Vec::new();
    for tool in manifest.tools {
        let line = tool.line;
        match implement(tool, path, config, environment) {
            Ok(tool) => tools.push(tool),
            Err(more) => problems.extend(at(line, more)),
        }
    }
    if problems.is_empty() { Ok(tools) } else { Err(broken_manifest(path, &problems)) }
}

fn at(line: Option<usize>, problems: Vec<Problem>) -> Vec<Problem> {
    problems.into_iter().map(|problem| Problem { line: problem.line.or(line), ..problem }).collect()
}

/// Returns a tool of a manifest with its program, or all of its mistakes. A tool that lacks a variable stays
/// registered, and names the variable when it is called.
pub(crate) fn implement(
    mut tool: ManifestTool,
    manifest: &Path,
    config: &Config,
    environment: &Environment,
) -> Result<SharedTool, Vec<Problem>> {
    let (name, line) = (tool.spec.name.clone(), tool.line);
    let own = own_variables(&tool, manifest, environment);
    let Some(mut command) = tool.command.take() else {
        return Ok(Unbound::tool(tool.spec, "a program for it, by a manifest with `command`"));
    };
    let mut variables = tool_environment(config, environment);
    // Every call has its own context, so the tool itself fills it in.
    command.environment.retain(|_, variable| variable.is_context());
    variables.extend(own.as_ref().ok().cloned().unwrap_or_default());
    let spec = tool.spec.clone();
    match CommandTool::new(tool.spec, command, variables) {
        Ok(tool) => Ok(match own {
            Err(error) => {
                let hint = "set the variable or make the file, and start wieldy again";
                Unbound::because(spec, format!("{error:#}"), hint)
            }
            Ok(own) if own.is_empty() => Arc::new(tool),
            Ok(_) => Arc::new(tool.hiding_secrets()),
        }),
        Err(messages) => {
            Err(messages.into_iter().map(|message| Problem { line, tool: Some(name.clone()), message }).collect())
        }
    }
}

/// Returns the variables that a manifest gives to the program of a tool, with their values; secret ones are redacted
/// from now on. The error names all that are missing.
pub(crate) fn own_variables(
    tool: &ManifestTool,
    manifest: &Path,
    environment: &Environment,
) -> anyhow::Result<BTreeMap<String, String>> {
    let (mut values, mut problems) = (BTreeMap::new(), Vec::new());
    for (name, variable) in tool.command.iter().flat_map(|command| &command.environment) {
        if variable.is_context() {
            continue;
        }
        let text = Text::of_manifest(variable, manifest, environment.home());
        let text = text.map_err(|problem| anyhow!("`{name}`: {problem}"));
        let value = text.and_then(|text| upstreams::texts(&BTreeMap::from([(name.clone(), text)]), environment));
        match value {
            Ok(value) => values.extend(value),
            Err(problem) => problems.push(format!("{problem:#}")),
        }
    }
    if problems.is_empty() { Ok(values) } else { Err(anyhow!(problems.join("; ")).context("`environment`")) }
}

/// Returns the manifests in the order in which they count: those of the configuration, of this folder, of this user.
pub(crate) fn manifest_paths(config: &Config, environment: &Environment) -> Vec<PathBuf> {
    let mut paths = [config.manifests.as_slice(), config.folder.tools.as_slice()].concat();
    let of_user = environment.config_folder().map(|folder| folder.join("tools"));
    let found = of_user.and_then(|folder| folder.read_dir().ok()).into_iter().flatten();
    let mut found: Vec<PathBuf> = found.filter_map(|entry| Some(entry.ok()?.path())).collect();
    found.retain(|path| is_manifest(path));
    found.sort_unstable();
    paths.extend(found);
    paths
}

/// Reads as much of a manifest as possible, and returns its mistakes too. The error means that the file cannot be read
/// at all.
pub(crate) fn read_manifest(path: &Path, config: &Config) -> Result<(Manifest, Vec<Problem>), Failure> {
    let read = || -> anyhow::Result<String> {
        // For a file that came with the folder, the trusted bytes count.
        let bytes = match config.folder.read.get(path) {
            Some(bytes) => bytes.clone(),
            None => read_regular(path, MANIFEST_BYTES_MAX)?,
        };
        String::from_utf8(bytes).map_err(|error| anyhow!("it is not UTF-8 text: {}", error.utf8_error()))
    };
    let hint =
        "it must be a text file that you may read; `tools.manifests` names the files and folders that are looked at";
    let text = read()
        .with_context(|| format!("cannot read the manifest `{}`", path.display()))
        .map_err(|error| Failure::usage(error).hint(hint))?;
    let is_json = path.extension().is_some_and(|extension| extension == "json");
    Ok(if is_json { Manifest::survey_json(&text) } else { Manifest::survey_toml(&text) })
}

fn broken_manifest(path: &Path, problems: &[Problem]) -> Failure {
    let first = problems.first().map(|problem| place(path, problem)).unwrap_or_default();
    Failure::usage(anyhow!(first).context(format!("the manifest `{}` cannot be used", path.display())))
        .hint(format!("`wieldy tools check {}` prints everything that is wrong with it", path.display()))
}

/// Describes the missing program of a command tool, if programs come from this machine.
pub(crate) fn missing_program(tool: &ManifestTool, config: &Config, environment: &Environment) -> Option<String> {
    let program = &tool.command.as_ref().filter(|_| config.sandbox.system == Rootfs::Host)?.program;
    let folder = tool.command.as_ref().and_then(|command| command.folder.as_deref()).unwrap_or_default();
    let search = tool_environment(config, environment).remove("PATH").unwrap_or_default();
    let is_filled = program.contains('{');
    let found = upstreams::find(program, &search, &whole(&config.workspace).join(folder));
    (!is_filled && found.is_none()).then(|| match program.contains('/') {
        true => format!("there is no program `{program}` here, seen from the workspace"),
        false => format!("there is no program `{program}` on the PATH"),
    })
}

/// Formats a problem with its place as compilers do.
pub(crate) fn place(path: &Path, problem: &Problem) -> String {
    let line = problem.line.map(|line| format!(":{line}")).unwrap_or_default();
    let tool = problem.tool.as_ref().map(|tool| format!("tool `{tool}`: ")).unwrap_or_default();
    format!("{}{line}: {tool}{}", path.display(), problem.message)
}
