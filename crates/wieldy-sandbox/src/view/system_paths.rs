//! System folders that sandboxes show, and the secrets in them. Hidden and protected names of workspaces are in the
//! core, where the file tools use them, too.

/// System folders, shown read-only where the host has them; in newer systems some are links into `/usr`.
pub(crate) const SYSTEM: [&str; 11] =
    ["/bin", "/etc", "/gnu", "/lib", "/lib32", "/lib64", "/libx32", "/nix", "/opt", "/sbin", "/usr"];

/// Folders that cannot be a workspace themselves, besides the [`SYSTEM`] ones: many users and programs share them.
pub(crate) const SHARED: [&str; 8] = ["/", "/boot", "/home", "/run", "/tmp", "/var", "/var/lib", "/var/tmp"];

/// Folders of the kernel's virtual files: nothing in them can be a workspace or a mount point.
pub(crate) const KERNEL: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Secrets of the host.
pub(crate) const HIDDEN_IN_SYSTEM: [&str; 30] = [
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
    // The daemon builds what it is asked to, outside of every sandbox.
    "/nix/var/nix/daemon-socket",
];
