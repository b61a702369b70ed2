//! Footprints: the paths that a call reads and writes, and the conflicts between two calls.

use std::panic::AssertUnwindSafe;

use serde_json::Value;

use crate::confinement::Confinement;
use crate::registry::Registered;
use crate::tool::ToolSpec;

/// The paths that one call reads and writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Touches {
    reads: PathSet,
    writes: PathSet,
}

/// Some paths, or everything.
#[derive(Debug, Clone, PartialEq, Eq)]
enum PathSet {
    Everything,
    These(Vec<String>),
}

impl Touches {
    /// Returns the footprint of a call that will not run.
    pub(crate) fn nothing() -> Self {
        Self { reads: PathSet::These(Vec::new()), writes: PathSet::These(Vec::new()) }
    }

    /// Returns the footprint of a call whose arguments are not known yet: everything that the tool could touch.
    pub(crate) fn unknown(tool: &ToolSpec) -> Self {
        let writes = if tool.annotations.read_only { PathSet::These(Vec::new()) } else { PathSet::Everything };
        Self { reads: PathSet::Everything, writes }
    }

    /// Returns the paths in the arguments that the tool's footprint names, under every name that the tool has for them.
    pub(crate) fn by(tool: &Registered, arguments: &Value, confinement: &Confinement) -> Self {
        let named = || Self::with_names(&tool.spec, arguments, &|name| tool.tool.names_of(name, confinement));
        // A tool is foreign code: if it panics while naming its paths, assume the worst case.
        std::panic::catch_unwind(AssertUnwindSafe(named)).unwrap_or_else(|_| Self::unknown(&tool.spec))
    }

    /// Returns the paths in the arguments that the footprint names. A tool without a footprint may touch everything.
    fn with_names(tool: &ToolSpec, arguments: &Value, names_of: &dyn Fn(&str) -> Vec<String>) -> Self {
        let Some(footprint) = &tool.footprint else { return Self::unknown(tool) };
        let reads = PathSet::named(&footprint.reads, arguments, names_of);
        // The annotation decides if a tool is read-only; a footprint only names paths.
        let writes = if tool.annotations.read_only {
            PathSet::These(Vec::new())
        } else {
            PathSet::named(&footprint.writes, arguments, names_of)
        };
        Self { reads, writes }
    }

    /// Does the same with one name for each path.
    #[cfg(test)]
    pub(crate) fn of(tool: &ToolSpec, arguments: &Value) -> Self {
        Self::with_names(tool, arguments, &|name| vec![name.to_owned()])
    }

    /// Returns the paths that the call reads. The empty path stands for everything.
    pub(crate) fn reads(&self) -> impl Iterator<Item = &str> {
        self.reads.paths()
    }

    /// Returns the paths that the call writes. The empty path stands for everything.
    pub(crate) fn writes(&self) -> impl Iterator<Item = &str> {
        self.writes.paths()
    }

    /// Returns true if the order of the two calls matters. Tests compare the order of batches with it.
    #[cfg(test)]
    pub(crate) fn conflicts(&self, other: &Self) -> bool {
        self.writes.overlaps(&other.writes) || self.writes.overlaps(&other.reads) || self.reads.overlaps(&other.writes)
    }

    /// Returns true if this call's writes may change what the other call read.
    pub(crate) fn invalidates(&self, other: &Self) -> bool {
        self.writes.overlaps(&other.reads)
    }

    pub(crate) fn writes_anything(&self) -> bool {
        self.writes != PathSet::These(Vec::new())
    }
}

impl PathSet {
    fn named(names: &[String], arguments: &Value, names_of: &dyn Fn(&str) -> Vec<String>) -> Self {
        let known = |thing: &str| names_of(thing).into_iter().map(|name| normal(&name)).collect::<Vec<_>>();
        let mut things = Vec::new();
        for name in names {
            let value = if name.starts_with('/') { arguments.pointer(name) } else { arguments.get(name) };
            match value {
                Some(Value::String(thing)) => things.extend(known(thing)),
                Some(Value::Array(items)) if items.iter().all(Value::is_string) => {
                    things.extend(items.iter().filter_map(Value::as_str).flat_map(known));
                }
                // The argument is missing or no text, so the call may touch anything.
                _ => return Self::Everything,
            }
        }
        Self::These(things)
    }

    fn paths(&self) -> impl Iterator<Item = &str> {
        let (whole, these) = match self {
            Self::Everything => (Some(""), [].as_slice()),
            Self::These(these) => (None, these.as_slice()),
        };
        whole.into_iter().chain(these.iter().map(String::as_str))
    }

    fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::These(none), _) | (_, Self::These(none)) if none.is_empty() => false,
            (Self::Everything, _) | (_, Self::Everything) => true,
            (Self::These(ours), Self::These(theirs)) => ours
                .iter()
                .any(|our| theirs.iter().any(|their| is_same_or_above(our, their) || is_same_or_above(their, our))),
        }
    }
}

fn is_same_or_above(above: &str, below: &str) -> bool {
    above.is_empty() || below == above || below.strip_prefix(above).is_some_and(|rest| rest.starts_with('/'))
}

/// Normalizes a path: removes `.`, `..`, doubled and trailing slashes. A path that leaves the workspace or is absolute
/// may be anywhere, so it becomes the empty path, which conflicts with everything.
fn normal(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.pop().is_none() => return String::new(),
            ".." => {}
            part => parts.push(part),
        }
    }
    // `/a/b` may be the absolute name of the workspace's `b`, so it conflicts with everything.
    if path.starts_with('/') { String::new() } else { parts.join("/") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn reads(path: &str) -> Touches {
        Touches::of(&ToolSpec::new("r", "").read_only().reads("path"), &json!({ "path": path }))
    }

    fn writes(path: &str) -> Touches {
        Touches::of(&ToolSpec::new("w", "").writes("path"), &json!({ "path": path }))
    }

    #[test]
    fn paths_meet_where_one_is_the_other_or_above_it() {
        for (ours, theirs, meet) in [
            ("a/b", "a/b", true),
            ("a/b", "./a//b/", true),
            ("a", "a/b/c", true),
            ("a/b", "a/bc", false),
            ("a/../b", "b", true),
            ("x", ".", true),
            ("x", "/x", true),
            ("x", "../x", true),
            ("a", "b", false),
        ] {
            assert_eq!(writes(ours).conflicts(&reads(theirs)), meet, "{ours} {theirs}");
            assert_eq!(reads(theirs).conflicts(&writes(ours)), meet, "{ours} {theirs}");
            assert_eq!(writes(ours).conflicts(&writes(theirs)), meet, "{ours} {theirs}");
            assert!(!reads(ours).conflicts(&reads(theirs)));
        }
    }

    #[test]
    fn a_mutating_tool_without_a_footprint_conflicts_with_everything() {
        let unknown = Touches::of(&ToolSpec::new("m", ""), &json!({}));
        assert!(unknown.conflicts(&reads("a")) && unknown.conflicts(&unknown));
        let pure = ToolSpec { footprint: Some(Default::default()), ..ToolSpec::new("p", "").read_only() };
        assert!(
            !unknown.conflicts(&Touches::of(&pure, &json!({}))),
            "a tool that touches nothing conflicts with no other"
        );
        let anywhere = Touches::of(&ToolSpec::new("s", "").read_only(), &json!({}));
        assert!(writes("a").conflicts(&anywhere) && !anywhere.conflicts(&reads("a")));
    }

    #[test]
    fn a_missing_path_argument_may_touch_everything() {
        let spec = ToolSpec::new("w", "").writes("path");
        assert!(Touches::of(&spec, &json!({})).conflicts(&reads("a")));
        let many = ToolSpec::new("w", "").writes("/target/paths");
        let touches = Touches::of(&many, &json!({"target": {"paths": ["a", "b"]}}));
        assert!(touches.conflicts(&reads("b/x")) && !touches.conflicts(&reads("c")));
    }

    #[test]
    fn a_footprint_cannot_make_a_read_only_tool_write() {
        let spec = ToolSpec::new("r", "").read_only().writes("path");
        assert!(!Touches::of(&spec, &json!({"path": "a"})).writes_anything());
    }
}
