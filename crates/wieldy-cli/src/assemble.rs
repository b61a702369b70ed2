//! From a configuration to an executor: the one place where the parts are plugged together.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow};
use wieldy::secrets::PROTECTED_AT_HOME;
use wieldy::{
    Absent, CommandTool, Confirmer, DynamicTimeout, Executor, ExecutorBuilder, FileRules, FolderArtifacts, Level,
    Manifest, ManifestError, ManifestTool, Native, NativeOptions, Oci, OciOptions, ProbeOptions, Problem, Rootfs,
    SharedTool, Store, Unbound, history_tools,
};

use crate::config::{Config, Environment, FILE_NAME, Origin};
use crate::exit::Failure;
use crate::history::{self, History};

/// The folder of a project for what this program should know.
const PROJECT_FOLDER: &str = ".wieldy";

/// What an executor is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// One call, after which nothing is needed any more.
    OneCall,
    ManyCalls,
}

/// The executor that the configuration describes, with all tools.
pub(crate) fn executor(
    config: &Config,
    environment: &Environment,
    confirmer: Option<Arc<dyn Confirmer>>,
    history: Option<&History>,
    work: Work,
) -> Result<Executor, Failure> {
    let builder = builder(config, environment)?.tools(manifest_tools(config, environment)?);
    let mut builder = builder.sandbox(Native::new(native(config, environment, work)));
    if config.state.as_os_str().is_empty() {
        for level in [Level::Runc, Level::Crun, Level::Youki, Level::Gvisor, Level::Firecracker] {
            let hint = "`--state DIR` or the key `state` names one";
            builder = builder.sandbox(Absent::new(level, "there is no folder for wieldy's own files", hint));
        }
    } else {
        check_system(config)?;
        // Of whatever level, also of one that is not used now.
        wieldy::sweep(&whole(&config.state));
        for level in [Level::Runc, Level::Crun, Level::Youki, Level::Gvisor] {
            builder = builder.sandbox(Oci::new(oci(config, environment, level)));
        }
        #[cfg(feature = "firecracker")]
        let guests = wieldy::Firecracker::new(firecracker(config, environment));
        #[cfg(not(feature = "firecracker"))]
        let guests = Absent::firecracker();
        builder = builder.sandbox(guests);
    }
    builder.confirmer = confirmer;
    if let Some(history) = history {
        builder = builder.tools(history_tools(history.store.clone()));
        builder.journal = Arc::clone(&history.journal) as _;
        builder.durability = config.history.durability;
        if config.dynamic_timeouts {
            builder.known_durations = history.durations(config)?;
        }
    }
    if let Some(artifacts) = artifacts(config)? {
        builder.artifacts = Arc::new(artifacts);
    }
    builder.build().map_err(Failure::usage)
}

/// The same to look at and not to run: nothing is written anywhere.
pub(crate) fn catalogue(config: &Config, environment: &Environment) -> Result<Executor, Failure> {
    let memory = config.history.address.iter().flat_map(|address| history_tools(Store::at(address)));
    let builder = builder(config, environment)?.tools(manifest_tools(config, environment)?).tools(memory);
    builder.build().map_err(Failure::usage)
}

/// Where large outputs are kept on disk, if anywhere. A folder that somebody named must be usable; without the usual
/// one everything but the keeping still works.
fn artifacts(config: &Config) -> Result<Option<FolderArtifacts>, Failure> {
    if config.state.as_os_str().is_empty() {
        return Ok(None);
    }
    match FolderArtifacts::open(&config.state) {
        Ok(artifacts) => Ok(Some(artifacts)),
        Err(error) if config.origin("state") == Some(&Origin::Default) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "large outputs are not kept after this command");
            Ok(None)
        }
        Err(error) => Err(Failure::broken(error).hint("`--state DIR` or the key `state` names another folder")),
    }
}

/// The executor without tools of one's own: what a manifest is checked against.
pub(crate) fn executor_of_built_ins(config: &Config, environment: &Environment) -> Result<Executor, Failure> {
    builder(config, environment)?.build().map_err(Failure::usage)
}

fn builder(config: &Config, environment: &Environment) -> Result<ExecutorBuilder, Failure> {
    let hint = "`--workspace DIR` or the key `workspace` names another folder";
    let mut builder = wieldy::builder_with(&config.workspace, program_environment(config, environment))
        .map_err(|error| Failure::usage(error).hint(hint))?;
    for (name, plan) in &config.plans {
        builder.policy = builder.policy.with_plan(name, *plan);
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
    builder.files = files(config, environment);
    builder.network = config.sandbox.network.clone();
    builder.sandbox_limits = config.sandbox.limits;
    builder.resource_limits = config.resources;
    builder.output_bytes_max = config.output_bytes_max;
    Ok(builder)
}

/// What programs and file tools see and may change of the files: what the configuration says, and never the history, its key, and what the
/// executor goes by.
pub(crate) fn files(config: &Config, environment: &Environment) -> FileRules {
    let mut files = config.sandbox.files.clone();
    // What is not there yet is not seen either.
    files.hidden.extend(history::files(config).iter().filter_map(|path| path.canonicalize().ok()));
    let state = Some(&config.state).filter(|state| !state.as_os_str().is_empty()).cloned();
    files.own.extend(environment.config_folder().into_iter().chain(state).map(|path| whole(&path)));
    let workspace = whole(&config.workspace);
    // What is read from the folder that the next one starts in, too, whether it is there or not.
    let here = [PathBuf::from(FILE_NAME), PathBuf::from(PROJECT_FOLDER)];
    let settings = config.file.iter().chain(&config.manifests).chain(&here);
    files.protected.extend(settings.flat_map(|path| in_workspace(path, &config.workspace)));
    if environment.home().is_some_and(|home| whole(home) == workspace) {
        files.protected.extend(PROTECTED_AT_HOME.map(PathBuf::from));
    }
    files
}

/// The path that means the same wherever a sandbox starts: without links, as far as it is there.
pub(crate) fn whole(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let real = |above: &Path| Some(above.canonicalize().ok()?.join(path.strip_prefix(above).ok()?));
    let mut ways = path.ancestors().filter_map(real);
    // Joining nothing would add a slash.
    path.canonicalize().ok().or_else(|| ways.next()).unwrap_or_else(|| path.clone())
}

/// The way to a file from the workspace that it is in, through the links that it was asked for by.
fn in_workspace(path: &Path, workspace: &Path) -> Vec<PathBuf> {
    let (asked, given) = (std::path::absolute(path).ok(), std::path::absolute(workspace).ok());
    let roots = [Some(whole(workspace)), given].into_iter().flatten();
    let ways = roots.filter_map(|root| asked.as_ref()?.strip_prefix(root).ok().map(Path::to_owned));
    let real = whole(path).strip_prefix(whole(workspace)).ok().map(Path::to_owned);
    let is_way = |way: &PathBuf| way.components().all(|part| matches!(part, Component::Normal(_)));
    ways.chain(real).filter(|way| !way.as_os_str().is_empty() && is_way(way)).collect()
}

/// How the native level is set up.
fn native(config: &Config, environment: &Environment, work: Work) -> NativeOptions {
    let is_unsaid = config.origin("sandbox.spares") == Some(&Origin::Default);
    // Nobody would ever use a sandbox that is built ahead for the call after the last one.
    let spares = if is_unsaid && work == Work::OneCall { 0 } else { config.sandbox.spares };
    NativeOptions {
        state: (!config.state.as_os_str().is_empty()).then(|| whole(&config.state)),
        home: environment.home().map(Path::to_owned),
        spares,
        blanks: spares,
        idle_max: config.sandbox.idle,
    }
}

/// How a level with an OCI runtime is set up.
fn oci(config: &Config, environment: &Environment, level: Level) -> OciOptions {
    OciOptions {
        rootfs: config.sandbox.system.clone(),
        home: environment.home().map(Path::to_owned),
        idle_max: config.sandbox.idle,
        ..OciOptions::new(level, config.state.join("oci"))
    }
}

/// What can be told of programs' system before it is needed.
fn check_system(config: &Config) -> Result<(), Failure> {
    let (key, path, problem) = match &config.sandbox.system {
        Rootfs::Folder(folder) if !folder.is_dir() => ("rootfs", folder, "is not a folder"),
        Rootfs::Layout(layout) if !layout.is_dir() => ("layout", layout, "is not a folder"),
        Rootfs::Layout(layout) if !["oci-layout", "index.json"].iter().all(|name| layout.join(name).is_file()) => {
            ("layout", layout, "is no OCI image layout: it has no `oci-layout` or no `index.json`")
        }
        _ => return Ok(()),
    };
    let hint = match key {
        "rootfs" => "name a folder with a system in it, or leave the key out to use this machine's",
        _ => {
            "`skopeo copy docker://debian:stable-slim oci:DIR` makes one; or leave the key out to use this machine's system"
        }
    };
    Err(Failure::usage(anyhow!("`sandbox.oci.{key}`: `{}` {problem}", path.display())).hint(hint))
}

/// How the level `firecracker` is set up.
#[cfg(feature = "firecracker")]
fn firecracker(config: &Config, environment: &Environment) -> wieldy::FirecrackerOptions {
    wieldy::FirecrackerOptions {
        kernel: config.sandbox.kernel.clone(),
        rootfs: config.sandbox.rootfs.clone(),
        home: environment.home().map(Path::to_owned),
        idle_max: config.sandbox.idle,
        ..wieldy::FirecrackerOptions::new(config.state.join("firecracker"))
    }
}

/// What is tried to find out what works here: what programs of the configuration's executor would get.
pub(crate) fn probe_options(config: &Config, environment: &Environment) -> ProbeOptions {
    let mut options = ProbeOptions::new(&config.workspace);
    options.confinement.limits = config.resources;
    options.confinement.place_limits = config.sandbox.limits;
    options.confinement.network = config.sandbox.network.clone();
    options.confinement.files = Arc::new(files(config, environment));
    options.native = native(config, environment, Work::OneCall);
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

/// What programs get of this process's environment: the names that are allowed; one that ends in `*` allows a family.
pub(crate) fn program_environment(config: &Config, environment: &Environment) -> BTreeMap<String, String> {
    let is_allowed = |name: &str| {
        config.shell_environment.iter().any(|allowed| match allowed.strip_suffix('*') {
            Some(family) => name.starts_with(family),
            None => name == allowed,
        })
    };
    environment.0.iter().filter(|(name, _)| is_allowed(name)).map(|(n, v)| (n.clone(), v.clone())).collect()
}

/// The tools of all manifests; where two have the same name, the first one counts.
fn manifest_tools(config: &Config, environment: &Environment) -> Result<Vec<SharedTool>, Failure> {
    let (mut tools, mut names) = (Vec::new(), BTreeSet::new());
    for path in manifest_paths(config, environment)? {
        let manifest = read_manifest(&path)?.map_err(|error| broken_manifest(&path, &error))?;
        for tool in manifest.tools {
            if names.insert(tool.spec.name.clone()) {
                let line = tool.line;
                let unusable = |problems| broken_manifest(&path, &ManifestError(problems));
                tools.push(implement(tool, config, environment).map_err(|problems| unusable(at(line, problems)))?);
            } else {
                let (tool, file) = (&tool.spec.name, path.display());
                tracing::warn!(tool, %file, "a tool is left out: an earlier manifest has one of this name");
            }
        }
    }
    Ok(tools)
}

fn at(line: Option<usize>, problems: Vec<Problem>) -> Vec<Problem> {
    problems.into_iter().map(|problem| Problem { line: problem.line.or(line), ..problem }).collect()
}

/// A tool of a manifest with the program behind it, or everything that is wrong with it.
pub(crate) fn implement(
    tool: ManifestTool,
    config: &Config,
    environment: &Environment,
) -> Result<SharedTool, Vec<Problem>> {
    let (name, line) = (tool.spec.name.clone(), tool.line);
    let Some(command) = tool.command else {
        return Ok(Unbound::tool(tool.spec, "a program for it, by a manifest with `command`"));
    };
    match CommandTool::new(tool.spec, command, program_environment(config, environment)) {
        Ok(tool) => Ok(Arc::new(tool)),
        Err(messages) => {
            Err(messages.into_iter().map(|message| Problem { line, tool: Some(name.clone()), message }).collect())
        }
    }
}

/// The manifests in the order in which they count: those of the configuration, this folder's, this user's.
fn manifest_paths(config: &Config, environment: &Environment) -> Result<Vec<PathBuf>, Failure> {
    let mut paths = config.manifests.clone();
    let of_user = environment.config_folder().map(|folder| folder.join("tools"));
    for folder in std::iter::once(Path::new(PROJECT_FOLDER).join("tools")).chain(of_user) {
        let Ok(entries) = folder.read_dir() else { continue };
        let found = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let mut found: Vec<PathBuf> = found.filter(|path| is_manifest(path)).collect();
        found.sort_unstable();
        paths.extend(found);
    }
    Ok(paths)
}

fn is_manifest(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|extension| extension == "toml" || extension == "json")
}

/// Reads a manifest: the outer error is that it cannot be read at all, the inner one that it is wrong.
pub(crate) fn read_manifest(path: &Path) -> Result<Result<Manifest, ManifestError>, Failure> {
    use std::io::Read;
    // One byte more than core takes, so that core says what is too large.
    const BYTES_MAX: u64 = 16 * 1024 * 1024 + 1;
    let read = || -> anyhow::Result<String> {
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(BYTES_MAX).read_to_end(&mut bytes)?;
        String::from_utf8(bytes).map_err(|error| anyhow!("it is not UTF-8 text: {}", error.utf8_error()))
    };
    let hint =
        "it must be a text file that you may read; `tools.manifests` names the files and folders that are looked at";
    let text = read()
        .with_context(|| format!("cannot read the manifest `{}`", path.display()))
        .map_err(|error| Failure::usage(error).hint(hint))?;
    let is_json = path.extension().is_some_and(|extension| extension == "json");
    Ok(if is_json { Manifest::from_json(&text) } else { Manifest::from_toml(&text) })
}

fn broken_manifest(path: &Path, error: &ManifestError) -> Failure {
    let first = error.0.first().map(|problem| place(path, problem)).unwrap_or_default();
    Failure::usage(anyhow!(first).context(format!("the manifest `{}` cannot be used", path.display())))
        .hint(format!("`wieldy tools check {}` prints everything that is wrong with it", path.display()))
}

/// A problem with its place, as compilers print them.
pub(crate) fn place(path: &Path, problem: &Problem) -> String {
    let line = problem.line.map(|line| format!(":{line}")).unwrap_or_default();
    let tool = problem.tool.as_ref().map(|tool| format!("tool `{tool}`: ")).unwrap_or_default();
    format!("{}{line}: {tool}{}", path.display(), problem.message)
}
