//! The section `threads`: the projects whose threads several callers share.

use std::collections::BTreeMap;

use wieldy::Owners;

use super::file::FileThreads;
use super::in_section;
use super::layers::ConfigError;

/// Resolves the section `threads`: each project must be shared with some caller.
pub(super) fn projects(file: Option<FileThreads>, mistakes: &mut Vec<ConfigError>) -> BTreeMap<String, Owners> {
    let projects = file.and_then(|threads| threads.projects).expect("the defaults have every key");
    let projects: BTreeMap<String, Owners> = projects.into_iter().map(|(name, file)| (name, file.owners())).collect();
    let unshared = projects.iter().filter(|(_, owners)| owners.is_empty()).map(|(name, _)| {
        format!("`threads.projects.{name}` shares the project with no caller: name `tenants`, `users` or `agents`")
    });
    mistakes.extend(in_section("threads", unshared.collect()));
    projects
}
