//! What a sandbox hides and protects unless told otherwise: names of files that hold secrets, and of files that programs
//! outside of the sandbox would execute.

/// System folders, shown read-only where the host has them; in newer systems some are links into `/usr`.
pub(crate) const SYSTEM: [&str; 11] =
    ["/bin", "/etc", "/gnu", "/lib", "/lib32", "/lib64", "/libx32", "/nix", "/opt", "/sbin", "/usr"];

/// Folders that can be no workspace themselves, besides the [`SYSTEM`] ones: each holds what belongs to many.
pub(crate) const SHARED: [&str; 8] = ["/", "/boot", "/home", "/run", "/tmp", "/var", "/var/lib", "/var/tmp"];

/// Folders that the kernel makes up: nothing in them can be a workspace or a mount point.
pub(crate) const KERNEL: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Secrets of the machine.
pub(crate) const HIDDEN_IN_SYSTEM: [&str; 29] = [
    "/etc/NetworkManager/system-connections",
    "/etc/crypttab",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/ipsec.d/private",
    "/etc/ipsec.secrets",
    "/etc/krb5.keytab",
    "/etc/kubernetes",
    "/etc/letsencrypt",
    "/etc/mysql/debian.cnf",
    "/etc/openvpn",
    "/etc/pki/tls/private",
    "/etc/ppp/chap-secrets",
    "/etc/ppp/pap-secrets",
    "/etc/rancher",
    "/etc/security/opasswd",
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/ssh/ssh_host_dsa_key",
    "/etc/ssh/ssh_host_ecdsa_key",
    "/etc/ssh/ssh_host_ed25519_key",
    "/etc/ssh/ssh_host_rsa_key",
    "/etc/ssl/private",
    "/etc/sudoers",
    "/etc/sudoers.d",
    "/etc/swanctl",
    "/etc/wieldy",
    "/etc/wireguard",
    "/etc/wpa_supplicant",
];

/// Secrets of people: hidden in the workspace, in everything that is mounted, and in the home folder.
pub(crate) const HIDDEN: [&str; 25] = [
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
pub(crate) fn is_environment(name: &str) -> bool {
    const PATTERNS: [&str; 5] = ["defaults", "dist", "example", "sample", "template"];
    name.strip_prefix(".env.").is_some_and(|ending| !PATTERNS.iter().any(|pattern| ending.ends_with(pattern)))
}

/// Whether something of this name is hidden in deeper folders of the workspace, too.
pub(crate) fn is_deep_secret(name: &str) -> bool {
    HIDDEN.contains(&name) || is_environment(name)
}

/// Whether a folder of this name is passed by in the search for secrets: what tools keep there is much, and can be made again.
pub(crate) fn is_passed_by(name: &str) -> bool {
    [".cache", ".git", ".venv", "__pycache__", "node_modules", "target", "vendor", "venv"].contains(&name)
}

/// What runs on the machine of a person who works here, where it exists. A new one does nothing until that person has agreed to it or
/// set it up, so those that are missing need not be held.
pub(crate) const PROTECTED_WHERE_THERE: [&str; 7] =
    [".devcontainer", ".devcontainer.json", ".envrc", ".exrc", ".husky", ".nvim.lua", ".nvimrc"];

/// What editors and agents execute when they open the workspace, or take orders from. (`AGENTS.md` and its like are texts
/// that agents are asked to write, and are not here.)
///
/// What is missing is held by an empty folder, also where a file would be: version control does not see an empty
/// folder, and a folder that somebody put something into is never removed by mistake.
pub(crate) const PROTECTED: [&str; 12] = [
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
