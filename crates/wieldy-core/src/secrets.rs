//! What is hidden and protected in a workspace unless told otherwise: names of files that hold secrets, and of files that programs outside
//! of sandboxes would execute. Sandboxes and the file tools go by the same names.

use std::path::{Path, PathBuf};

use crate::confinement::FileRules;

/// Secrets of people: hidden in the workspace, in everything that is mounted, and in the home folder.
pub const HIDDEN: [&str; 25] = [
    ".aws",
    ".azure",
    ".bash_history",
    ".cargo/credentials",
    ".cargo/credentials.toml",
    ".config/containers/auth.json",
    ".config/gcloud",
    ".config/gh",
    ".config/git/credentials",
    ".config/op",
    ".config/rclone",
    ".docker/config.json",
    ".env",
    ".git-credentials",
    ".gnupg",
    ".kube",
    ".local/share/keyrings",
    ".mozilla",
    ".netrc",
    ".npmrc",
    ".password-store",
    ".pgpass",
    ".pypirc",
    ".ssh",
    ".vault-token",
];

/// Whether a file of this name holds settings with secrets, like `.env.local`. The endings of patterns without secrets
/// are the ones that projects keep under version control.
pub fn is_environment(name: &str) -> bool {
    const PATTERNS: [&str; 5] = ["defaults", "dist", "example", "sample", "template"];
    name.strip_prefix(".env.").is_some_and(|ending| !PATTERNS.iter().any(|pattern| ending.ends_with(pattern)))
}

/// Whether something of this name is hidden in deeper folders of the workspace, too.
pub fn is_deep_secret(name: &str) -> bool {
    HIDDEN.contains(&name) || is_environment(name)
}

/// Whether a folder of this name is passed by in the search for secrets: what tools keep there is much, and can be made again.
pub fn is_passed_by(name: &str) -> bool {
    [".cache", ".git", ".venv", "__pycache__", "node_modules", "target", "vendor", "venv"].contains(&name)
}

/// What runs on the machine of a person who works here, where it exists. A new one does nothing until that person has agreed to it or
/// set it up, so those that are missing need not be held.
pub const PROTECTED_WHERE_THERE: [&str; 7] =
    [".devcontainer", ".devcontainer.json", ".envrc", ".exrc", ".husky", ".nvim.lua", ".nvimrc"];

/// What editors and agents execute when they open the workspace, or take orders from. (`AGENTS.md` and its like are texts
/// that agents are asked to write, and are not here.)
///
/// What is missing is held by an empty folder, also where a file would be: version control does not see an empty
/// folder, and a folder that somebody put something into is never removed by mistake.
pub const PROTECTED: [&str; 12] = [
    ".claude",
    ".codex",
    ".cursor",
    ".gemini",
    ".idea",
    ".mcp.json",
    ".opencode",
    ".vscode",
    ".wieldy",
    ".zed",
    "opencode.json",
    "wieldy.toml",
];

/// What is executed when somebody logs in, or opens a terminal, where the workspace is that person's home folder.
pub const PROTECTED_AT_HOME: [&str; 20] = [
    ".aws",
    ".bash_aliases",
    ".bash_login",
    ".bash_logout",
    ".bash_profile",
    ".bashrc",
    ".config/autostart",
    ".config/environment.d",
    ".config/fish",
    ".config/git",
    ".config/systemd",
    ".gitconfig",
    ".kube",
    ".pam_environment",
    ".profile",
    ".ssh",
    ".zlogin",
    ".zprofile",
    ".zshenv",
    ".zshrc",
];

impl FileRules {
    /// Whether what is at a path of the workspace, if anything is, is hidden. The path begins at the workspace and leads through no link.
    pub fn hides(&self, workspace: &Path, path: &Path) -> bool {
        let is_among = |folders: &[PathBuf]| is_among(folders, workspace, path);
        is_among(&self.hidden) || is_among(&self.own) || (is_secret(path) && !is_among(&self.shown))
    }

    /// Whether nothing may be made, changed or removed at a path of the workspace. The path begins at the workspace and leads through no link.
    pub fn protects(&self, workspace: &Path, path: &Path, is_there: impl Fn(&Path) -> bool) -> bool {
        let is_protected = |name: &&str| path.starts_with(name);
        is_among(&self.protected, workspace, path)
            || is_among(&self.own, workspace, path)
            || is_of_git(path)
            || PROTECTED.iter().any(is_protected)
            || PROTECTED_WHERE_THERE.iter().any(|name| is_protected(name) && is_there(Path::new(name)))
    }
}

/// Whether a path of the workspace is one of these, or in one of these, as far as they are in the workspace themselves.
fn is_among(folders: &[PathBuf], workspace: &Path, path: &Path) -> bool {
    folders.iter().any(|folder| {
        let folder = workspace.join(folder);
        folder.strip_prefix(workspace).is_ok_and(|inner| !inner.as_os_str().is_empty() && path.starts_with(inner))
    })
}

/// Whether something is a secret by its names, or in a folder that is one.
fn is_secret(path: &Path) -> bool {
    if HIDDEN.iter().any(|name| path.starts_with(name)) {
        return true;
    }
    let mut names = path.iter().filter_map(|name| name.to_str()).take_while(|name| !is_passed_by(name));
    names.any(is_deep_secret)
}

/// Whether something is what git executes, or says where that is; in modules and work trees, too.
fn is_of_git(path: &Path) -> bool {
    let Ok(inner) = path.strip_prefix(".git") else { return false };
    let decides = |name: &str| ["commondir", "config", "config.worktree", "hooks"].contains(&name);
    inner.as_os_str().is_empty() || inner.iter().any(|name| name.to_str().is_some_and(decides))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> FileRules {
        FileRules {
            hidden: vec!["keys".into(), "/w/notes/private".into(), "/w".into(), "/".into()],
            shown: vec![".env".into(), "sub/.netrc".into(), "keys/shown".into()],
            protected: vec!["conf/my.toml".into(), "/elsewhere".into()],
            own: vec!["/w/state".into(), "/".into()],
            ..FileRules::default()
        }
    }

    #[test]
    fn secrets_are_hidden_by_name_and_by_rule() {
        let hides = |path: &str| rules().hides(Path::new("/w"), Path::new(path));
        for path in [
            ".ssh/id",
            "sub/.ssh/id",
            ".env.local",
            "a/b/c/d/e/f/.env",
            ".cargo/credentials.toml",
            "keys",
            "keys/one",
            "keys/shown",
            "notes/private/diary",
            "state/history.db",
        ] {
            assert!(hides(path), "{path}");
        }
        for path in [
            "",
            "src/main.rs",
            ".env",
            ".env.example",
            "sub/.netrc",
            "node_modules/x/.npmrc",
            "notes",
            "keys2",
            "statement",
            "sub/.cargo/credentials.toml",
        ] {
            assert!(!hides(path), "{path}");
        }
    }

    #[test]
    fn what_others_execute_is_protected_by_name_and_by_rule() {
        let protects =
            |path: &str| rules().protects(Path::new("/w"), Path::new(path), |path| path == Path::new(".envrc"));
        for path in [
            ".git",
            ".git/hooks",
            ".git/hooks/pre-commit",
            ".git/config",
            ".git/modules/a/b/hooks/x",
            ".git/worktrees/one/commondir",
            ".vscode/tasks.json",
            "wieldy.toml",
            "conf/my.toml",
            "state",
            ".envrc",
        ] {
            assert!(protects(path), "{path}");
        }
        for path in ["", ".git/info/exclude", ".gitignore", "sub/.git/config", ".husky", "conf", "wieldy.toml.md"] {
            assert!(!protects(path), "{path}");
        }
    }
}
