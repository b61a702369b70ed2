//! Default rules for files: names that are hidden because they hold secrets, and names that are protected because
//! programs outside of sandboxes execute them. Sandboxes and the file tools use the same names.

use std::path::{Path, PathBuf};

use crate::confinement::FileRules;

/// Files with people's secrets: hidden in the workspace, in every mounted folder and in the home folder.
pub const HIDDEN: [&str; 28] = [
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
    ".gradle/gradle.properties",
    ".kube",
    ".local/share/keyrings",
    ".local/share/uv/credentials",
    ".m2/settings.xml",
    ".mozilla",
    ".netrc",
    ".npmrc",
    ".password-store",
    ".pgpass",
    ".pypirc",
    ".ssh",
    ".vault-token",
];

/// Returns true if a file of this name holds settings with secrets, like `.env.local`. Names such as `.env.example`
/// have no secrets: projects keep them under version control.
pub fn is_environment(name: &str) -> bool {
    const PATTERNS: [&str; 5] = ["defaults", "dist", "example", "sample", "template"];
    name.strip_prefix(".env.").is_some_and(|ending| !PATTERNS.iter().any(|pattern| ending.ends_with(pattern)))
}

/// Returns true if files of this name are hidden in deeper folders of the workspace too.
pub fn is_deep_secret(name: &str) -> bool {
    HIDDEN.contains(&name) || is_environment(name)
}

/// Returns true if the search for secrets skips folders of this name: they hold many files, which tools can make again.
pub fn is_passed_by(name: &str) -> bool {
    [".cache", ".git", ".venv", "__pycache__", "node_modules", "target", "vendor", "venv"].contains(&name)
}

/// Names that are protected only if they exist: programs on the user's machine execute them. A new one does nothing
/// until the user has agreed to it or set it up, so a missing one needs no placeholder.
pub const PROTECTED_WHERE_THERE: [&str; 7] =
    [".devcontainer", ".devcontainer.json", ".envrc", ".exrc", ".husky", ".nvim.lua", ".nvimrc"];

/// A name in the workspace that programs outside of sandboxes execute, or take orders from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProtectedName {
    /// The path from the workspace.
    pub path: &'static str,
    /// The placeholder that sandboxes put there if the name is missing.
    pub held: Held,
    /// The programs that read it. A missing name gets a placeholder only for a user who has one of these programs or
    /// one of the `settings` folders; for every user if both lists are empty.
    pub programs: &'static [&'static str],
    /// Folders in the home folder that show that the user has such a program.
    pub settings: &'static [&'static str],
}

/// A placeholder: to the programs that read the name, it means the same as a missing file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// An empty folder.
    Folder,
    /// A file with this content.
    File(&'static str),
}

/// The extended attribute that marks placeholders. Its value is the content with which the placeholder was made.
pub const PLACEHOLDER_MARK: &str = "user.wieldy.held";

/// Maximum length of a placeholder's content.
pub const PLACEHOLDER_BYTES_MAX: usize = 128;

const JSON: Held = Held::File("{}\n");
/// Claude Code refuses a file without this key.
const NO_SERVERS: Held = Held::File("{\"mcpServers\":{}}\n");
/// opencode writes this key into a file that lacks it.
const OPENCODE: Held = Held::File("{\"$schema\":\"https://opencode.ai/config.json\"}\n");
const EMPTY: Held = Held::File("");

const fn name(
    path: &'static str,
    held: Held,
    programs: &'static [&'static str],
    settings: &'static [&'static str],
) -> ProtectedName {
    ProtectedName { path, held, programs, settings }
}

/// The names that editors and agents execute when they open the workspace, or take orders from. (`AGENTS.md` and
/// similar files are not among them: agents are asked to write these texts.)
pub const PROTECTED: [ProtectedName; 13] = [
    name(".claude", Held::Folder, &["claude"], &[".claude"]),
    name(".codex", Held::Folder, &["codex"], &[".codex"]),
    name(".cursor", Held::Folder, &["cursor", "cursor-agent"], &[".cursor"]),
    name(".gemini", Held::Folder, &["gemini"], &[".gemini"]),
    name(
        ".idea",
        Held::Folder,
        &["idea", "pycharm", "clion", "goland", "rustrover", "webstorm"],
        &[".config/JetBrains", ".local/share/JetBrains"],
    ),
    name(".mcp.json", NO_SERVERS, &["claude"], &[".claude"]),
    name(".opencode", Held::Folder, &["opencode"], &[".config/opencode", ".opencode"]),
    name(
        ".vscode",
        Held::Folder,
        &["code", "codium", "cursor", "windsurf"],
        &[".vscode", ".vscode-server", ".config/Code", ".config/VSCodium", ".cursor"],
    ),
    name(".wieldy", Held::Folder, &[], &[]),
    name(".zed", Held::Folder, &["zed", "zeditor"], &[".config/zed"]),
    name("opencode.json", OPENCODE, &["opencode"], &[".config/opencode", ".opencode"]),
    name("opencode.jsonc", OPENCODE, &["opencode"], &[".config/opencode", ".opencode"]),
    name("wieldy.toml", EMPTY, &[], &[]),
];

/// The names that a login or a new terminal executes, if the workspace is the user's home folder.
pub const PROTECTED_AT_HOME: [ProtectedName; 20] = [
    name(".aws", Held::Folder, &["aws"], &[]),
    name(".bash_aliases", EMPTY, &["bash"], &[]),
    // Bash reads only the first of `.bash_profile`, `.bash_login` and `.profile`.
    name(".bash_login", Held::File("[ ! -r ~/.profile ] || . ~/.profile\n"), &["bash"], &[]),
    name(".bash_logout", EMPTY, &["bash"], &[]),
    name(
        ".bash_profile",
        Held::File("if [ -r ~/.bash_login ]; then . ~/.bash_login; else . ~/.profile; fi\n"),
        &["bash"],
        &[],
    ),
    name(".bashrc", EMPTY, &["bash"], &[]),
    name(".config/autostart", Held::Folder, &[], &[]),
    name(".config/environment.d", Held::Folder, &[], &[]),
    name(".config/fish", Held::Folder, &["fish"], &[]),
    name(".config/git", Held::Folder, &[], &[]),
    name(".config/systemd", Held::Folder, &["systemctl"], &[]),
    name(".gitconfig", EMPTY, &[], &[]),
    name(".kube", Held::Folder, &["kubectl"], &[]),
    name(".pam_environment", EMPTY, &[], &[]),
    name(".profile", EMPTY, &[], &[]),
    name(".ssh", Held::Folder, &[], &[]),
    name(".zlogin", EMPTY, &["zsh"], &[]),
    name(".zprofile", EMPTY, &["zsh"], &[]),
    name(".zshenv", EMPTY, &["zsh"], &[]),
    name(".zshrc", EMPTY, &["zsh"], &[]),
];

/// The names that together make git treat a folder as a bare repository and obey the settings beside them. Git needs
/// all three, so one placeholder is enough: for the first missing one. `HEAD` comes last, since a file of this name
/// makes `git diff HEAD` ambiguous.
pub const BARE_REPOSITORY: [&str; 3] = ["refs", "objects", "HEAD"];

/// Returns the placeholder for a name that a rule protects: a file if the name has an extension, otherwise a folder.
pub fn held_by_rule(path: &Path) -> Held {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("json" | "jsonc") => JSON,
        Some(_) => EMPTY,
        None => Held::Folder,
    }
}

impl FileRules {
    /// Returns true if a path of the workspace is hidden, whether it exists or not. It is relative to the workspace and
    /// has no symbolic links.
    pub fn hides(&self, workspace: &Path, path: &Path) -> bool {
        let is_among = |folders: &[PathBuf]| is_among(folders, workspace, path);
        is_among(&self.hidden) || is_among(&self.own) || (is_secret(path) && !is_among(&self.shown))
    }

    /// Returns true if sandboxes may have a placeholder at a path. It is relative to the workspace and has no symbolic
    /// links.
    pub fn may_hold(&self, workspace: &Path, path: &Path) -> bool {
        let names = PROTECTED.iter().chain(&PROTECTED_AT_HOME).map(|name| Path::new(name.path));
        let mut own = self.protected.iter().chain(&self.own);
        path.starts_with(".git")
            || names.chain(BARE_REPOSITORY.map(Path::new)).any(|name| name.starts_with(path))
            || own.any(|own| workspace.join(own).starts_with(workspace.join(path)))
    }

    /// Returns true if nothing may be made, changed or removed at a path. It is relative to the workspace and has no
    /// symbolic links.
    pub fn protects(&self, workspace: &Path, path: &Path, is_there: impl Fn(&Path) -> bool) -> bool {
        let is_protected = |name: &&str| path.starts_with(name);
        is_among(&self.protected, workspace, path)
            || is_among(&self.own, workspace, path)
            || is_of_git(path)
            || is_of_bare_repository(path, &is_there)
            || PROTECTED.iter().any(|name| is_protected(&name.path))
            || PROTECTED_WHERE_THERE.iter().any(|name| is_protected(name) && is_there(Path::new(name)))
    }
}

/// Returns true if the path is one of these folders or within one. Folders outside the workspace do not count.
fn is_among(folders: &[PathBuf], workspace: &Path, path: &Path) -> bool {
    folders.iter().any(|folder| {
        let folder = workspace.join(folder);
        folder.strip_prefix(workspace).is_ok_and(|inner| !inner.as_os_str().is_empty() && path.starts_with(inner))
    })
}

/// Returns true if a name on the path is a secret's, or the path is within a secret folder.
fn is_secret(path: &Path) -> bool {
    // The names of all secrets begin with a dot, and those of few files do: walks ask this for every file.
    if !has_dot_name(path) {
        return false;
    }
    if HIDDEN.iter().any(|name| path.starts_with(name)) {
        return true;
    }
    let mut names = path.iter().filter_map(|name| name.to_str()).take_while(|name| !is_passed_by(name));
    names.any(is_deep_secret)
}

/// Returns true if a name on the path begins with a dot.
fn has_dot_name(path: &Path) -> bool {
    let bytes = path.as_os_str().as_encoded_bytes();
    bytes.first() == Some(&b'.') || bytes.windows(2).any(|pair| pair == b"/.")
}

/// Names in a repository through which git executes programs, or finds the settings that name programs.
const DECIDES: [&str; 4] = ["commondir", "config", "config.worktree", "hooks"];

/// Returns true for files that git executes or that name such files, in submodules and work trees too.
fn is_of_git(path: &Path) -> bool {
    let Ok(inner) = path.strip_prefix(".git") else { return false };
    inner.as_os_str().is_empty() || inner.iter().any(|name| name.to_str().is_some_and(|name| DECIDES.contains(&name)))
}

/// Returns true for the name whose absence keeps the workspace from being a bare repository, and in a bare repository
/// for the names through which git executes programs. Existing ones of the three names are protected: a running sandbox
/// relies on them.
fn is_of_bare_repository(path: &Path, is_there: impl Fn(&Path) -> bool) -> bool {
    if BARE_REPOSITORY.iter().any(|name| path == Path::new(name) && is_there(path)) {
        return true;
    }
    match BARE_REPOSITORY.iter().find(|name| !is_there(Path::new(name))) {
        Some(missing) => path.starts_with(missing),
        None => DECIDES.iter().any(|name| path.starts_with(name)),
    }
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
    fn the_names_of_all_secrets_begin_with_a_dot() {
        assert_eq!(HIDDEN.iter().filter(|name| !has_dot_name(Path::new(name))).count(), 0);
        assert!(!is_environment("env.local") && is_environment(".env.local"));
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
    fn executed_files_are_protected_by_name_and_by_rule() {
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
            "refs",
            "refs/heads/main",
        ] {
            assert!(protects(path), "{path}");
        }
        for path in [
            "",
            ".git/info/exclude",
            ".gitignore",
            "sub/.git/config",
            ".husky",
            "conf",
            "wieldy.toml.md",
            "objects/one",
            "HEAD",
            "config",
            "sub/refs",
        ] {
            assert!(!protects(path), "{path}");
        }
    }

    #[test]
    fn one_name_keeps_a_folder_from_being_a_bare_repository() {
        let protects = |there: &[&str], path: &str| {
            let is_there = |path: &Path| there.iter().any(|there| path == Path::new(there));
            FileRules::default().protects(Path::new("/w"), Path::new(path), is_there)
        };
        let all = ["refs", "objects", "HEAD", "config", "hooks/post-checkout", "commondir"];
        let with = |there: &[&str]| all.into_iter().filter(|path| protects(there, path)).collect::<Vec<_>>();
        assert_eq!(with(&[]), ["refs"]);
        assert_eq!(with(&["objects", "HEAD", "config"]), ["refs", "objects", "HEAD"]);
        assert_eq!(with(&["refs"]), ["refs", "objects"]);
        assert_eq!(with(&["refs", "objects"]), ["refs", "objects", "HEAD"]);
        assert_eq!(with(&["refs", "objects", "HEAD"]), all);
        assert!(!protects(&["refs", "objects"], "refs/heads/main"), "files in the folders are the project's own");
    }

    #[test]
    fn placeholders_may_be_where_names_are_protected_and_above() {
        let may = |path: &str| rules().may_hold(Path::new("/w"), Path::new(path));
        for path in
            [".git", ".git/hooks", ".mcp.json", ".config", ".config/git", "refs", "conf", "conf/my.toml", "state"]
        {
            assert!(may(path), "{path}");
        }
        for path in ["src", "src/.mcp.json", "conf/other.toml", "refs/heads"] {
            assert!(!may(path), "{path}");
        }
    }
}
