//! Paths as seen from a workspace.

/// Whether a path is one of these or below one.
pub(super) fn covers(list: &[String], path: &str) -> bool {
    list.iter()
        .any(|outer| path.strip_prefix(outer.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}

/// Whether one of these is below a path.
pub(super) fn leads_to(list: &[String], path: &str) -> bool {
    list.iter().any(|inner| inner.strip_prefix(path).is_some_and(|rest| rest.starts_with('/')))
}

/// Whether a path means what it says: parts with names between single slashes.
pub(super) fn is_plain(path: &str) -> bool {
    const PATH_BYTES_MAX: usize = 4096;
    path.len() < PATH_BYTES_MAX
        && !path.contains('\0')
        && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}
