//! Absolute paths and patterns inside the workspace, rewritten as relative ones, so that a file has one name in records,
//! checks and caches.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::workspace::Workspace;

/// The kinds of patterns for paths below the argument `path`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PatternKind {
    /// A pattern for whole paths.
    Path,
    /// A filter, whose pattern matches names in any folder if it has no slash.
    Filter,
}

impl Workspace {
    /// Returns the relative spelling of `path` and of these patterns, where they are absolute and inside the workspace.
    pub(super) fn respell(&self, arguments: &Value, patterns: &[(&str, PatternKind)]) -> Vec<(String, String)> {
        let given = |name: &str| arguments.get(name).and_then(Value::as_str);
        let path = given("path").and_then(|text| relative(text, self.roots()));
        let folder = path.as_deref().or_else(|| given("path")).unwrap_or(".");
        let pattern = |(name, kind): &(&str, PatternKind)| {
            let below = below(&relative(given(name)?, self.roots())?, folder)?;
            let is_name = *kind == PatternKind::Filter && !below.contains('/');
            Some(((*name).to_owned(), if is_name { format!("./{below}") } else { below }))
        };
        let patterns: Vec<_> = patterns.iter().filter_map(pattern).collect();
        path.map(|path| ("path".to_owned(), path)).into_iter().chain(patterns).collect()
    }

    /// Returns the relative spelling of this argument, if it is an absolute path inside the workspace.
    pub(crate) fn respell_argument(&self, arguments: &Value, name: &str) -> Vec<(String, String)> {
        let path = arguments.get(name).and_then(Value::as_str).and_then(|text| relative(text, self.roots()));
        path.map(|path| (name.to_owned(), path)).into_iter().collect()
    }
}

/// Returns an absolute path below one of the roots relative to it. Looks at no file.
pub(crate) fn relative(text: &str, roots: &[PathBuf]) -> Option<String> {
    if !text.starts_with('/') {
        return None;
    }
    let below = roots.iter().find_map(|root| Path::new(text).strip_prefix(root).ok())?.to_str()?;
    Some(match below {
        "" => ".".to_owned(),
        // The slash at the end says that it must be a folder.
        below if text.ends_with('/') => format!("{below}/"),
        below => below.to_owned(),
    })
}

/// Returns a pattern for paths of the workspace as one for paths below the folder, if it is below it.
fn below(pattern: &str, folder: &str) -> Option<String> {
    let folder: PathBuf = Path::new(folder).components().filter(|part| part.as_os_str() != ".").collect();
    let below = Path::new(pattern).strip_prefix(folder).ok()?.to_str()?;
    Some(below).filter(|below| !matches!(*below, "" | ".")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn absolute_paths_and_patterns_become_relative_inside_the_workspace_only() {
        let folder = tempfile::tempdir().unwrap();
        let workspace = Workspace::open(folder.path()).unwrap();
        let root = workspace.path().to_str().unwrap();
        for (kind, path, pattern, wanted) in [
            (PatternKind::Path, "/", "", json!(["."])),
            (PatternKind::Path, "/a/", "/a/b*", json!(["a/", "b*"])),
            (PatternKind::Path, "//a//b", "/c/*", json!(["a//b"])),
            (PatternKind::Path, "/.", "/**/*.rs", json!([".", "**/*.rs"])),
            (PatternKind::Filter, "", "/*.rs", json!([".", "./*.rs"])),
            (PatternKind::Filter, "", "/src/*.rs", json!([".", "src/*.rs"])),
            (PatternKind::Path, "-secret/a", "-secret/*", json!([])),
        ] {
            let arguments = json!({ "path": format!("{root}{path}"), "pattern": format!("{root}{pattern}") });
            let respelled: Vec<String> =
                workspace.respell(&arguments, &[("pattern", kind)]).into_iter().map(|(_, text)| text).collect();
            assert_eq!(json!(respelled), wanted, "{path} {pattern}");
        }
        let arguments = json!({"path": "a/../b", "pattern": "*"});
        assert_eq!(workspace.respell(&arguments, &[("pattern", PatternKind::Path)]), []);
        assert_eq!(workspace.respell(&json!("no object"), &[]), []);
    }
}
