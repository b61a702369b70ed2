//! Tests of whole plans for whole hosts, and of properties that hold for any set of rules.

use insta::assert_snapshot;
use proptest::prelude::*;
use proptest::strategy::ValueTree;

use super::*;
use crate::view::plan::{Look, Making};
use crate::view::secret_scan::DEPTH_MAX;
use wieldy_core::Mount;
use wieldy_core::secrets::{PROTECTED, is_deep_secret, is_passed_by};

/// A host as a list of its files and the folders above them; then its placeholders, and folders in which nothing can be
/// made.
#[derive(Default)]
struct Host(BTreeMap<PathBuf, Entry>, BTreeSet<PathBuf>, Vec<(PathBuf, Making)>);

impl Host {
    fn folder(mut self, path: &str) -> Self {
        for above in Path::new(path).ancestors() {
            self.0.entry(above.to_owned()).or_insert(Entry::Folder);
        }
        self
    }

    fn file(self, path: &str) -> Self {
        let mut host = self.folder(Path::new(path).parent().unwrap().to_str().unwrap());
        host.0.insert(path.into(), Entry::File);
        host
    }

    fn link(self, path: &str, target: &str, resolved: &str) -> Self {
        let mut host = self.folder(Path::new(path).parent().unwrap().to_str().unwrap());
        host.0.insert(path.into(), Entry::Link { target: target.into(), resolved: resolved.into() });
        host
    }

    fn debian() -> Self {
        let host = Self::default().folder("/usr/bin").folder("/usr/lib").folder("/usr/lib64").folder("/usr/sbin");
        let host = host.folder("/opt").file("/etc/passwd").file("/etc/group").file("/etc/hosts").file("/etc/hostname");
        let host = host.file("/etc/shadow").file("/etc/ssh/ssh_host_ed25519_key").folder("/etc/ssl/private");
        let host =
            host.file("/etc/nsswitch.conf").file("/etc/machine-id").file("/etc/sudoers").folder("/etc/sudoers.d");
        let run = "/run/systemd/resolve/stub-resolv.conf";
        let host = host.link("/etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf", run).file(run);
        let host = host.link("/bin", "usr/bin", "/usr/bin").link("/lib", "usr/lib", "/usr/lib");
        host.link("/lib64", "usr/lib64", "/usr/lib64").link("/sbin", "usr/sbin", "/usr/sbin").folder("/var/lib/wieldy")
    }
}

impl Look for Host {
    fn entry(&self, path: &Path) -> Option<Entry> {
        self.0.get(path).cloned()
    }

    fn names(&self, folder: &Path, wanted: Wanted) -> Vec<String> {
        let inside = self.0.keys().filter(|path| path.parent() == Some(folder));
        let names = inside.filter_map(|path| path.file_name()?.to_str());
        names.filter(|name| wanted(name)).map(str::to_owned).collect()
    }

    fn deep_secrets(&self, workspace: &Path) -> Vec<PathBuf> {
        let deep = self.0.keys().filter(|path| {
            let Ok(rest) = path.strip_prefix(workspace) else { return false };
            let names: Vec<&str> = rest.iter().filter_map(|name| name.to_str()).collect();
            let Some((name, above)) = names.split_last() else { return false };
            let is_seen = (1..=DEPTH_MAX).contains(&above.len());
            is_seen && is_deep_secret(name) && !above.iter().any(|name| is_passed_by(name) || is_deep_secret(name))
        });
        deep.cloned().collect()
    }

    fn is_held(&self, path: &Path) -> bool {
        self.1.contains(path)
    }

    fn making(&self, folder: &Path) -> Making {
        self.2.iter().find(|(known, _)| folder == *known).map_or(Making::Possible, |(_, making)| *making)
    }
}

const ROOM: Room = Room { bytes: 256 << 20, inodes: 65536 };

/// Makes a plan for a user with a home folder.
fn planned(host: &Host, home: &str, workspace: &str, rules: &FileRules) -> Result<Plan, PlanError> {
    let user = if home == "/root" { 0 } else { 1000 };
    let state = Some("/var/lib/wieldy".into());
    let programs = vec!["/usr/bin".into()];
    let facts = HostFacts { look: host, home: Some(home.into()), programs, state, private: None, user, group: user };
    plan(&Request { workspace: Path::new(workspace), rules, network: &Network::None, room: ROOM }, &facts)
}

fn mount(source: &str, target: &str, writable: bool) -> Mount {
    Mount { source: source.into(), target: target.into(), writable }
}

fn mounts(mounts: &[Mount]) -> FileRules {
    FileRules { mounts: mounts.to_vec(), ..FileRules::default() }
}

/// Returns the lines of a plan about paths with these beginnings, without those that are the same for every workspace.
fn about(plan: &Plan, paths: &[&str]) -> String {
    let text = plan.to_string();
    let lines = text.lines().filter(|line| {
        let rest = line.get(9..).unwrap_or_default();
        let path = rest.split("  ").next().unwrap_or_default().trim();
        let usual =
            PROTECTED.iter().map(|name| name.path).chain(["refs", ".config", ".config/git", ".config/git/ignore"]);
        let is_top = |folder: &str| text.contains(&format!("{folder}/wieldy.toml"));
        let is_of_top = path.strip_suffix("/commondir").is_some_and(is_top) && !paths.contains(&path);
        let is_usual = is_of_top || usual.into_iter().any(|name| path.ends_with(&format!("/{name}")));
        paths.iter().any(|start| path.starts_with(start)) && !is_usual
    });
    lines.map(squeezed).collect::<Vec<_>>().join("\n")
}

/// Returns a line with two spaces between its columns.
fn squeezed(line: &str) -> String {
    line.split("  ").map(str::trim).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("  ")
}

#[test]
fn a_host_like_debian_and_an_ordinary_user() {
    let host = Host::debian().folder("/home/ada/project/.git/hooks").file("/home/ada/project/.git/config");
    let host = host.file("/home/ada/project/.env").file("/home/ada/project/.env.local");
    let host = host.file("/home/ada/project/.env.example").folder("/home/ada/.ssh");
    let host = host.folder("/home/ada/.claude").file("/usr/bin/code").file("/usr/bin/opencode");
    let plan = planned(&host, "/home/ada", "/home/ada/project", &FileRules::default()).unwrap();
    assert_snapshot!(plan, @r#"
    memory   /                                      1 MiB, 4096 files, mode 755
    link     /bin                                   to usr/bin
    folder   /dev
    dev      /dev
    memory   /dev/shm                               256 MiB, 65536 files, mode 1777
    folder   /etc
    mount    /etc                                   read
    file     /etc/group                             41 bytes
    file     /etc/hostname                          8 bytes
    file     /etc/hosts                             50 bytes
    file     /etc/machine-id                        33 bytes
    file     /etc/passwd                            114 bytes
    hide     /etc/shadow                            file
    hide     /etc/ssh/ssh_host_ed25519_key          file
    hide     /etc/ssl/private                       folder
    hide     /etc/sudoers                           file
    hide     /etc/sudoers.d                         folder
    folder   /home
    folder   /home/ada
    folder   /home/ada/project
    mount    /home/ada/project                      read and write
    protect  /home/ada/project/.claude
    hide     /home/ada/project/.env                 file
    hide     /home/ada/project/.env.local           file
    mount    /home/ada/project/.git                 read and write
    protect  /home/ada/project/.git/commondir
    protect  /home/ada/project/.git/config
    protect  /home/ada/project/.git/config.worktree
    protect  /home/ada/project/.git/hooks
    protect  /home/ada/project/.mcp.json
    protect  /home/ada/project/.opencode
    protect  /home/ada/project/.vscode
    protect  /home/ada/project/.wieldy
    protect  /home/ada/project/commondir
    protect  /home/ada/project/opencode.json
    protect  /home/ada/project/opencode.jsonc
    protect  /home/ada/project/refs
    protect  /home/ada/project/wieldy.toml
    folder   /home/agent
    memory   /home/agent                            256 MiB, 65536 files, mode 700
    folder   /home/agent/.config
    folder   /home/agent/.config/git
    file     /home/agent/.config/git/ignore         72 bytes
    link     /lib                                   to usr/lib
    link     /lib64                                 to usr/lib64
    folder   /opt
    mount    /opt                                   read
    folder   /proc
    proc     /proc                                  read
    folder   /run
    memory   /run                                   16 MiB, 4096 files, mode 755
    folder   /run/systemd
    folder   /run/systemd/resolve
    file     /run/systemd/resolve/stub-resolv.conf  68 bytes
    link     /sbin                                  to usr/sbin
    folder   /tmp
    memory   /tmp                                   256 MiB, 65536 files, mode 1777
    folder   /usr
    mount    /usr                                   read
    folder   /var
    link     /var/run                               to /run
    folder   /var/tmp
    memory   /var/tmp                               256 MiB, 65536 files, mode 1777
    seal     /                                      read
    hold     /home/ada/project/.claude              empty folder on the host
    hold     /home/ada/project/.git/commondir       file of 2 bytes on the host
    hold     /home/ada/project/.git/config.worktree file of 0 bytes on the host
    hold     /home/ada/project/.mcp.json            file of 18 bytes on the host
    hold     /home/ada/project/.opencode            empty folder on the host
    hold     /home/ada/project/.vscode              empty folder on the host
    hold     /home/ada/project/.wieldy              empty folder on the host
    hold     /home/ada/project/commondir            file of 2 bytes on the host
    hold     /home/ada/project/opencode.json        file of 46 bytes on the host
    hold     /home/ada/project/opencode.jsonc       file of 46 bytes on the host
    hold     /home/ada/project/refs                 file of 0 bytes on the host
    hold     /home/ada/project/wieldy.toml          file of 0 bytes on the host
    set      HOME                                   /home/agent
    set      USER                                   agent
    set      LOGNAME                                agent
    "#);
}

#[test]
fn a_host_with_folders_of_their_own_and_root() {
    let host = Host::default().folder("/bin").folder("/lib").folder("/sbin").folder("/usr").file("/etc/passwd");
    let host =
        host.folder("/root/adas").folder("/nix/store").link("/opt", "/data/opt", "/data/opt").folder("/data/opt");
    let plan = planned(&host, "/root", "/root/adas", &FileRules::default()).unwrap();
    assert_snapshot!(plan, @r#"
    memory   /                              1 MiB, 4096 files, mode 755
    folder   /bin
    mount    /bin                           read
    folder   /dev
    dev      /dev
    memory   /dev/shm                       256 MiB, 65536 files, mode 1777
    folder   /etc
    mount    /etc                           read
    file     /etc/passwd                    79 bytes
    folder   /home
    folder   /home/agent
    memory   /home/agent                    256 MiB, 65536 files, mode 700
    folder   /home/agent/.config
    folder   /home/agent/.config/git
    file     /home/agent/.config/git/ignore 30 bytes
    folder   /lib
    mount    /lib                           read
    folder   /nix
    mount    /nix                           read
    folder   /opt
    mount    /opt                           read, from /data/opt
    folder   /proc
    proc     /proc                          read
    folder   /root
    folder   /root/adas
    mount    /root/adas                     read and write
    mount    /root/adas/.git                read and write
    protect  /root/adas/.git/commondir
    protect  /root/adas/.git/hooks
    protect  /root/adas/.wieldy
    protect  /root/adas/commondir
    protect  /root/adas/refs
    protect  /root/adas/wieldy.toml
    folder   /run
    memory   /run                           16 MiB, 4096 files, mode 755
    folder   /run/git-templates
    folder   /sbin
    mount    /sbin                          read
    folder   /tmp
    memory   /tmp                           256 MiB, 65536 files, mode 1777
    folder   /usr
    mount    /usr                           read
    folder   /var
    link     /var/run                       to /run
    folder   /var/tmp
    memory   /var/tmp                       256 MiB, 65536 files, mode 1777
    seal     /                              read
    hold     /root/adas/.git                empty folder on the host
    hold     /root/adas/.git/commondir      file of 2 bytes on the host
    hold     /root/adas/.git/hooks          empty folder on the host
    hold     /root/adas/.wieldy             empty folder on the host
    hold     /root/adas/commondir           file of 2 bytes on the host
    hold     /root/adas/refs                file of 0 bytes on the host
    hold     /root/adas/wieldy.toml         file of 0 bytes on the host
    set      HOME                           /home/agent
    set      USER                           agent
    set      LOGNAME                        agent
    set      GIT_TEMPLATE_DIR               /run/git-templates
    "#);
}

/// Returns the names of the placeholders on a host for this user.
fn held(host: &Host) -> Vec<String> {
    let plan = planned(host, "/home/ada", "/w", &FileRules::default()).unwrap();
    plan.placeholders.iter().map(|held| held.path.strip_prefix("/w").unwrap().to_str().unwrap().to_owned()).collect()
}

#[test]
fn names_are_held_for_git_and_for_programs_that_the_user_has() {
    let host = || Host::debian().folder("/w/.git/hooks").file("/w/.git/config").folder("/home/ada");
    let always = [".git/commondir", ".git/config.worktree", ".wieldy", "commondir", "refs", "wieldy.toml"];
    assert_eq!(held(&host()), always);
    let with = |names: &[&str]| {
        let mut all: Vec<_> = always.iter().chain(names).map(|name| (*name).to_owned()).collect();
        all.sort();
        all
    };
    assert_eq!(held(&host().folder("/home/ada/.claude")), with(&[".claude", ".mcp.json"]));
    assert_eq!(held(&host().file("/usr/bin/zed")), with(&[".zed"]));
    let opencode = host().link("/usr/bin/opencode", "/opt/opencode", "/opt/opencode");
    assert_eq!(held(&opencode), with(&[".opencode", "opencode.json", "opencode.jsonc"]));
    // An existing file needs no placeholder. A placeholder that was left behind is planned again, so that it is
    // removed.
    assert_eq!(held(&host().file("/usr/bin/zed").folder("/w/.zed")), always);
    let mut left = host();
    left.1.insert("/w/.gemini".into());
    assert_eq!(held(&left), with(&[".gemini"]));
}

#[test]
fn nothing_is_held_where_nothing_can_be_made() {
    let closed = |folder: &str, making| {
        let mut host = Host::debian().folder("/w/.git/hooks").file("/w/.git/config").file("/usr/bin/code");
        host.2.push((folder.into(), making));
        host
    };
    for making in [Making::Impossible, Making::Refused] {
        assert_eq!(held(&closed("/w", making)), Vec::<String>::new());
    }
    let plan = planned(&closed("/w", Making::Impossible), "/home/ada", "/w", &FileRules::default()).unwrap();
    assert_snapshot!(about(&plan, &["/w"]), @"
    folder  /w
    mount  /w  read
    ");
    // A command could make a folder of its own writable again.
    assert_eq!(
        held(&closed("/w/.git", Making::Impossible)),
        [".vscode", ".wieldy", "commondir", "refs", "wieldy.toml"]
    );
    let all = [".git/commondir", ".git/config.worktree", ".vscode", ".wieldy", "commondir", "refs", "wieldy.toml"];
    assert_eq!(held(&closed("/w/.git", Making::Refused)), all);
}

#[test]
fn missing_names_keep_the_workspace_from_being_a_bare_repository() {
    let of_top = |host: &Host| {
        let plan = planned(host, "/home/ada", "/w", &FileRules::default()).unwrap();
        about(&plan, &["/w/refs", "/w/objects", "/w/HEAD", "/w/config", "/w/hooks", "/w/commondir"])
    };
    let host = || Host::debian().folder("/w/.git/hooks").folder("/w/refs");
    assert_snapshot!(of_top(&host()), @r#"
    protect  /w/commondir
    protect  /w/objects
    hold  /w/commondir  file of 2 bytes on the host
    hold  /w/objects  file of 0 bytes on the host
    "#);
    assert_snapshot!(of_top(&host().folder("/w/objects")), @r#"
    protect  /w/HEAD
    protect  /w/commondir
    mount  /w/objects  read and write
    hold  /w/HEAD  file of 0 bytes on the host
    hold  /w/commondir  file of 2 bytes on the host
    "#);
    assert_snapshot!(of_top(&host().file("/w/objects").folder("/w/commondir")), @r#"
    protect  /w/HEAD
    mount  /w/commondir  read and write
    protect  /w/objects
    hold  /w/HEAD  file of 0 bytes on the host
    "#);
    assert_snapshot!(of_top(&host().folder("/w/objects").file("/w/HEAD").file("/w/config")), @r#"
    protect  /w/commondir
    protect  /w/config
    protect  /w/config.worktree
    protect  /w/hooks
    mount  /w/objects  read and write
    hold  /w/commondir  file of 2 bytes on the host
    hold  /w/config.worktree  file of 0 bytes on the host
    hold  /w/hooks  empty folder on the host
    "#);
}

#[test]
fn an_open_network_keeps_the_names_of_the_host() {
    let host = Host::debian().folder("/w");
    let facts = HostFacts { look: &host, home: None, programs: vec![], state: None, private: None, user: 1, group: 1 };
    let (workspace, rules, network) = (Path::new("/w"), &FileRules::default(), &Network::Open);
    let plan = plan(&Request { workspace, rules, network, room: ROOM }, &facts).unwrap();
    assert_snapshot!(about(&plan, &["/etc", "/run"]), @r#"
    folder  /etc
    mount  /etc  read
    file  /etc/group  38 bytes
    file  /etc/hostname  8 bytes
    file  /etc/machine-id  33 bytes
    file  /etc/passwd  108 bytes
    hide  /etc/shadow  file
    hide  /etc/ssh/ssh_host_ed25519_key  file
    hide  /etc/ssl/private  folder
    hide  /etc/sudoers  file
    hide  /etc/sudoers.d  folder
    folder  /run
    memory  /run  16 MiB, 4096 files, mode 755
    folder  /run/git-templates
    folder  /run/systemd
    folder  /run/systemd/resolve
    file  /run/systemd/resolve/stub-resolv.conf 0 bytes
    mount  /run/systemd/resolve/stub-resolv.conf read, if there
    "#);
}

#[test]
fn the_workspace_inside_of_a_mount_and_a_mount_inside_of_the_workspace() {
    let host = Host::debian()
        .folder("/home/ada/project/.git")
        .folder("/home/ada/.aws")
        .folder("/home/ada/project/data")
        .folder("/srv/data");
    let rules = mounts(&[mount("/home/ada", "/home/ada", false), mount("/srv/data", "/home/ada/project/data", false)]);
    let plan = planned(&host, "/home/ada", "/home/ada/project", &rules).unwrap();
    assert_snapshot!(about(&plan, &["/home"]), @r#"
    folder  /home
    folder  /home/ada
    mount  /home/ada  read
    hide  /home/ada/.aws  folder
    mount  /home/ada/project  read and write
    mount  /home/ada/project/.git  read and write
    protect  /home/ada/project/.git/commondir
    protect  /home/ada/project/.git/config
    protect  /home/ada/project/.git/config.worktree
    protect  /home/ada/project/.git/hooks
    mount  /home/ada/project/data  read, from /srv/data
    folder  /home/agent
    memory  /home/agent  256 MiB, 65536 files, mode 700
    hold  /home/ada/project/.git/commondir  file of 2 bytes on the host
    hold  /home/ada/project/.git/config  file of 0 bytes on the host
    hold  /home/ada/project/.git/config.worktree file of 0 bytes on the host
    hold  /home/ada/project/.git/hooks  empty folder on the host
    "#);
}

#[test]
fn a_protected_path_is_protected_through_every_mount_that_shows_it() {
    let host =
        Host::debian().folder("/home/ada/project/.git/hooks").file("/home/ada/project/.env").folder("/home/ada/.ssh");
    let rules = mounts(&[mount("/home/ada", "/mnt/home", true), mount("/home/ada/project", "/mnt/read", false)]);
    let plan = planned(&host, "/home/ada", "/home/ada/project", &rules).unwrap();
    assert_snapshot!(about(&plan, &["/home/ada", "/mnt"]), @r#"
    folder  /home/ada
    folder  /home/ada/project
    mount  /home/ada/project  read and write
    hide  /home/ada/project/.env  file
    mount  /home/ada/project/.git  read and write
    protect  /home/ada/project/.git/commondir
    protect  /home/ada/project/.git/config
    protect  /home/ada/project/.git/config.worktree
    protect  /home/ada/project/.git/hooks
    folder  /mnt
    folder  /mnt/home
    mount  /mnt/home  read and write, from /home/ada
    hide  /mnt/home/.ssh  folder
    mount  /mnt/home/project  read and write, from /home/ada/project
    hide  /mnt/home/project/.env  file
    mount  /mnt/home/project/.git  read and write, from /home/ada/project/.git
    protect  /mnt/home/project/.git/commondir
    protect  /mnt/home/project/.git/config
    protect  /mnt/home/project/.git/config.worktree
    protect  /mnt/home/project/.git/hooks
    folder  /mnt/read
    mount  /mnt/read  read, from /home/ada/project
    hide  /mnt/read/.env  file
    hold  /home/ada/project/.git/commondir  file of 2 bytes on the host
    hold  /home/ada/project/.git/config  file of 0 bytes on the host
    hold  /home/ada/project/.git/config.worktree file of 0 bytes on the host
    "#);
}

#[test]
fn a_workspace_below_a_system_folder_in_memory_or_with_an_odd_name() {
    let host = Host::debian().folder("/usr/src/app/.git").folder("/tmp/a b/ünïcode/.git").folder("/etc/app/.git");
    let rules = FileRules::default();
    let lines =
        |workspace: &str| about(&planned(&host, "/root", workspace, &rules).unwrap(), &["/usr", "/tmp", "/etc/app"]);
    assert_snapshot!(lines("/usr/src/app"), @r#"
    folder  /tmp
    memory  /tmp  256 MiB, 65536 files, mode 1777
    folder  /usr
    mount  /usr  read
    mount  /usr/src/app  read and write
    mount  /usr/src/app/.git  read and write
    protect  /usr/src/app/.git/commondir
    protect  /usr/src/app/.git/config
    protect  /usr/src/app/.git/config.worktree
    protect  /usr/src/app/.git/hooks
    hold  /usr/src/app/.git/commondir  file of 2 bytes on the host
    hold  /usr/src/app/.git/config  file of 0 bytes on the host
    hold  /usr/src/app/.git/config.worktree  file of 0 bytes on the host
    hold  /usr/src/app/.git/hooks  empty folder on the host
    "#);
    assert_snapshot!(lines("/tmp/a b/ünïcode"), @r#"
    folder  /tmp
    memory  /tmp  256 MiB, 65536 files, mode 1777
    folder  /tmp/a b
    folder  /tmp/a b/ünïcode
    mount  /tmp/a b/ünïcode  read and write
    mount  /tmp/a b/ünïcode/.git  read and write
    protect  /tmp/a b/ünïcode/.git/commondir
    protect  /tmp/a b/ünïcode/.git/config
    protect  /tmp/a b/ünïcode/.git/config.worktree
    protect  /tmp/a b/ünïcode/.git/hooks
    folder  /usr
    mount  /usr  read
    hold  /tmp/a b/ünïcode/.git/commondir  file of 2 bytes on the host
    hold  /tmp/a b/ünïcode/.git/config  file of 0 bytes on the host
    hold  /tmp/a b/ünïcode/.git/config.worktree file of 0 bytes on the host
    hold  /tmp/a b/ünïcode/.git/hooks  empty folder on the host
    "#);
    assert_snapshot!(lines("/etc/app"), @r#"
    mount  /etc/app  read and write
    mount  /etc/app/.git  read and write
    protect  /etc/app/.git/commondir
    protect  /etc/app/.git/config
    protect  /etc/app/.git/config.worktree
    protect  /etc/app/.git/hooks
    folder  /tmp
    memory  /tmp  256 MiB, 65536 files, mode 1777
    folder  /usr
    mount  /usr  read
    hold  /etc/app/.git/commondir  file of 2 bytes on the host
    hold  /etc/app/.git/config  file of 0 bytes on the host
    hold  /etc/app/.git/config.worktree  file of 0 bytes on the host
    hold  /etc/app/.git/hooks  empty folder on the host
    "#);
}

#[test]
fn the_home_folder_as_workspace() {
    let host = Host::debian()
        .folder("/home/ada/.ssh")
        .file("/home/ada/.netrc")
        .folder("/home/ada/.config/gh")
        .file("/home/ada/.git");
    let plan = planned(&host, "/home/ada", "/home/ada", &FileRules::default()).unwrap();
    assert_snapshot!(about(&plan, &["/home", "HOME"]), @r#"
    folder  /home
    folder  /home/ada
    mount  /home/ada  read and write
    hide  /home/ada/.config/gh  folder
    protect  /home/ada/.git
    hide  /home/ada/.netrc  file
    hide  /home/ada/.ssh  folder
    folder  /home/agent
    memory  /home/agent  256 MiB, 65536 files, mode 700
    set  HOME  /home/agent
    "#);
    let host = Host::debian().folder("/home/agent/.git");
    let plan = planned(&host, "/home/agent", "/home/agent", &FileRules::default()).unwrap();
    assert_snapshot!(about(&plan, &["/home", "/run", "HOME"]), @r#"
    folder  /home
    folder  /home/agent
    mount  /home/agent  read and write
    mount  /home/agent/.git  read and write
    protect  /home/agent/.git/commondir
    protect  /home/agent/.git/config
    protect  /home/agent/.git/config.worktree
    protect  /home/agent/.git/hooks
    folder  /run
    memory  /run  16 MiB, 4096 files, mode 755
    folder  /run/agent
    memory  /run/agent  256 MiB, 65536 files, mode 700
    folder  /run/systemd
    folder  /run/systemd/resolve
    file  /run/systemd/resolve/stub-resolv.conf 68 bytes
    hold  /home/agent/.git/commondir  file of 2 bytes on the host
    hold  /home/agent/.git/config  file of 0 bytes on the host
    hold  /home/agent/.git/config.worktree  file of 0 bytes on the host
    hold  /home/agent/.git/hooks  empty folder on the host
    set  HOME  /run/agent
    "#);
}

#[test]
fn git_hooks_and_settings_are_protected_in_submodules_and_work_trees_too() {
    let git = "/w/.git";
    let host = Host::debian().folder("/w/.git/hooks").file("/w/.git/config").file("/w/.git/modules/sub/HEAD");
    let host = host.file("/w/.git/modules/sub/config").file("/w/.git/worktrees/tree/commondir");
    let plan = planned(&host, "/root", "/w", &FileRules::default()).unwrap();
    assert_snapshot!(about(&plan, &[git]), @r#"
    mount  /w/.git  read and write
    protect  /w/.git/commondir
    protect  /w/.git/config
    protect  /w/.git/config.worktree
    protect  /w/.git/hooks
    mount  /w/.git/modules  read and write
    mount  /w/.git/modules/sub  read and write
    protect  /w/.git/modules/sub/commondir
    protect  /w/.git/modules/sub/config
    protect  /w/.git/modules/sub/config.worktree
    protect  /w/.git/modules/sub/hooks
    mount  /w/.git/worktrees  read and write
    mount  /w/.git/worktrees/tree  read and write
    protect  /w/.git/worktrees/tree/commondir
    protect  /w/.git/worktrees/tree/config.worktree
    hold  /w/.git/commondir  file of 2 bytes on the host
    hold  /w/.git/config.worktree  file of 0 bytes on the host
    hold  /w/.git/modules/sub/commondir  file of 2 bytes on the host
    hold  /w/.git/modules/sub/config.worktree  file of 0 bytes on the host
    hold  /w/.git/modules/sub/hooks  empty folder on the host
    hold  /w/.git/worktrees/tree/config.worktree file of 0 bytes on the host
    "#);
}

#[test]
fn links_are_protected_themselves_and_with_what_they_lead_to() {
    let host = Host::debian().folder("/w/shared").link("/w/.claude", "shared", "/w/shared");
    let host = host.link("/w/.env", "shared/env", "/w/shared/env").file("/w/shared/env").folder("/w/real/hooks");
    let host = host.link("/w/.git", "real", "/w/real").link("/w/.vscode", "chain/vs", "/w/end/vs");
    let host = host.link("/w/chain", "./end", "/w/end").folder("/w/end");
    let plan = planned(&host, "/root", "/w", &FileRules::default()).unwrap();
    let lines = about(&plan, &["/w"]) + "\n";
    let lines =
        lines + &plan.to_string().lines().filter(|line| line.contains("/w/.claude")).map(squeezed).collect::<String>();
    assert_snapshot!(lines, @r#"
    folder  /w
    mount  /w  read and write
    protect  /w/.env
    protect  /w/.git
    protect  /w/chain
    mount  /w/end  read and write
    protect  /w/end/vs
    mount  /w/real  read and write
    protect  /w/real/commondir
    protect  /w/real/config
    protect  /w/real/config.worktree
    protect  /w/real/hooks
    protect  /w/shared
    hide  /w/shared/env  file
    hold  /w/end/vs  empty folder on the host
    hold  /w/real/commondir  file of 2 bytes on the host
    hold  /w/real/config  file of 0 bytes on the host
    hold  /w/real/config.worktree  file of 0 bytes on the host
    protect  /w/.claude
    "#);
}

#[test]
fn secrets_behind_links_are_hidden_where_they_are() {
    let host = Host::debian().link("/w/.config", "dots/config", "/w/dots/config").folder("/w/dots/config/gh");
    let host = host.folder("/w/.git/hooks").link("/w/.git/modules", "../m", "/w/m").file("/w/m/sub/HEAD");
    let host = host.file("/w/.git/modules/sub/HEAD").link("/w/.ssh", "/srv/keys", "/srv/keys").folder("/srv/keys");
    let plan = planned(&host, "/root", "/w", &FileRules::default()).unwrap();
    assert_snapshot!(about(&plan, &["/w/dots", "/w/.config", "/w/m", "/w/.ssh", "/srv"]), @r#"
    protect  /w/.ssh
    mount  /w/dots  read and write
    mount  /w/dots/config  read and write
    hide  /w/dots/config/gh  folder
    mount  /w/m  read and write
    mount  /w/m/sub  read and write
    protect  /w/m/sub/commondir
    protect  /w/m/sub/config
    protect  /w/m/sub/config.worktree
    protect  /w/m/sub/hooks
    hold  /w/m/sub/commondir  file of 2 bytes on the host
    hold  /w/m/sub/config  file of 0 bytes on the host
    hold  /w/m/sub/config.worktree  file of 0 bytes on the host
    hold  /w/m/sub/hooks  empty folder on the host
    "#);
}

#[test]
fn a_workspace_made_to_confuse_gives_a_plan_or_a_reason() {
    let host = Host::debian().link("/w/.config", ".config", "/w/.config").link("/w/.git", "other", "/w/other");
    let host = host.link("/w/other", ".git", "/w/.git").link("/w/.vscode", ".vscode", "/w/.vscode");
    let plan = planned(&host, "/root", "/w", &FileRules::default()).unwrap();
    assert_snapshot!(about(&plan, &["/w/.git", "/w/.config"]), @"protect  /w/.git");
    let many = (0..1001).fold(Host::debian().folder("/w"), |host, number| host.file(&format!("/w/.env.{number}")));
    let refused = planned(&many, "/root", "/w", &FileRules::default()).unwrap_err();
    assert_eq!(refused, PlanError::TooManySecrets { workspace: "/w".into(), count: 1001 });
    // Unless a rule shows enough of them.
    let shown = FileRules { shown: vec![".env.0".into()], ..FileRules::default() };
    planned(&many, "/root", "/w", &shown).unwrap();
}

#[test]
fn a_mounted_home_folder_is_the_commands_home() {
    let host = Host::debian().folder("/srv/home").folder("/srv/work");
    let rules = FileRules { mounts: vec![mount("/srv/home", "/home/agent", true)], ..FileRules::default() };
    let plan = planned(&host, "/root", "/srv/work", &rules).unwrap();
    assert_snapshot!(about(&plan, &["/home", "/run/agent", "HOME"]), @r#"
    folder  /home
    folder  /home/agent
    mount  /home/agent  read and write, from /srv/home
    set  HOME  /home/agent
    "#);
}

#[test]
fn rules_show_hide_and_protect() {
    let host =
        Host::debian().file("/w/.env").file("/w/.npmrc").folder("/w/private").file("/w/Makefile").folder("/w/.git");
    let host = host.folder("/w/state").folder("/elsewhere");
    let rules = FileRules {
        mounts: vec![],
        hidden: vec!["private".into(), "/usr/sbin".into(), "/w/missing".into()],
        shown: vec![".env".into(), "/etc/sudoers.d".into()],
        protected: vec!["Makefile".into(), "ci/deploy.sh".into(), ".git".into()],
        own: vec!["/w/state".into(), "/w/settings".into(), "/elsewhere".into(), "/nowhere".into()],
    };
    let plan = planned(&host, "/root", "/w", &rules).unwrap();
    assert_snapshot!(about(&plan, &["/w", "/usr", "/etc/sudo"]), @r#"
    hide  /etc/sudoers  file
    folder  /usr
    mount  /usr  read
    hide  /usr/sbin  folder
    folder  /w
    mount  /w  read and write
    protect  /w/.git
    protect  /w/.git/commondir
    protect  /w/.git/config
    protect  /w/.git/config.worktree
    protect  /w/.git/hooks
    hide  /w/.npmrc  file
    protect  /w/Makefile
    mount  /w/ci  read and write
    protect  /w/ci/deploy.sh
    hide  /w/private  folder
    protect  /w/settings
    hide  /w/state  folder
    hold  /w/.git/commondir  file of 2 bytes on the host
    hold  /w/.git/config  file of 0 bytes on the host
    hold  /w/.git/config.worktree  file of 0 bytes on the host
    hold  /w/.git/hooks  empty folder on the host
    hold  /w/ci  empty folder on the host
    hold  /w/ci/deploy.sh  file of 0 bytes on the host
    hold  /w/settings  empty folder on the host
    "#);
}

#[test]
fn a_secret_that_is_mounted_by_itself_is_shown() {
    let host = Host::debian().folder("/home/ada/.ssh").file("/home/ada/.ssh/id").folder("/w/.git");
    let plan =
        planned(&host, "/home/ada", "/w", &mounts(&[mount("/home/ada/.ssh", "/home/agent/.ssh", false)])).unwrap();
    assert_snapshot!(about(&plan, &["/home"]), @r#"
    folder  /home
    folder  /home/agent
    memory  /home/agent  256 MiB, 65536 files, mode 700
    folder  /home/agent/.ssh
    mount  /home/agent/.ssh  read, from /home/ada/.ssh
    "#);
    let file = mounts(&[mount("/home/ada/.ssh/id", "/home/agent/id", false)]);
    assert_snapshot!(about(&planned(&host, "/home/ada", "/w", &file).unwrap(), &["/home"]), @r#"
    folder  /home
    folder  /home/agent
    memory  /home/agent  256 MiB, 65536 files, mode 700
    file  /home/agent/id  0 bytes
    mount  /home/agent/id  read, from /home/ada/.ssh/id
    "#);
}

#[test]
fn a_program_has_its_home_where_the_workspace_holds_the_state_and_sees_nothing_else_of_that() {
    let state = "/home/ada/state";
    let host = Host::debian().folder("/home/ada/state/homes/eye").file("/home/ada/state/key");
    let with = |name: &str| {
        let home = mounts(&[mount(&format!("{state}{name}"), "/home/agent", true)]);
        let rules = FileRules { own: vec![state.into()], ..home };
        let facts = HostFacts {
            programs: vec![],
            look: &host,
            home: Some("/home/ada".into()),
            state: Some(state.into()),
            private: None,
            user: 1000,
            group: 1000,
        };
        let workspace = Path::new("/home/ada");
        plan(&Request { workspace, rules: &rules, network: &Network::None, room: ROOM }, &facts)
    };
    let plan = with("/homes/eye").unwrap();
    assert_eq!(
        about(&plan, &["/home/agent", state]),
        "hide  /home/ada/state  folder\nfolder  /home/agent\nmount  /home/agent  read and write, from /home/ada/state/homes/eye"
    );
    assert_eq!(["", "/homes", "/key"].map(|name| with(name).is_err()), [true; 3]);
}

#[test]
fn impossible_workspaces_and_rules_are_refused_with_the_reason() {
    let host = Host::debian()
        .folder("/w/.git/hooks")
        .folder("/data/deep")
        .link("/l", "/w", "/w")
        .folder("/home/ada/.ssh")
        .file("/usr/bin/code")
        .link("/w/link", "/etc", "/etc");
    let with =
        |workspace: &str, rules: FileRules| planned(&host, "/home/ada", workspace, &rules).unwrap_err().to_string();
    let at = |workspace: &str| with(workspace, FileRules::default());
    let mounting = |source: &str, target: &str| with("/w", mounts(&[mount(source, target, true)]));
    let two = |first: Mount, second: Mount| with("/w", mounts(&[first, second]));
    let hiding = |path: &str| with("/w", FileRules { hidden: vec![path.into()], ..FileRules::default() });
    let protecting = |path: &str| with("/w", FileRules { protected: vec![path.into()], ..FileRules::default() });
    let refused = [
        at("/"),
        at("/etc"),
        at("/usr"),
        at("/bin"),
        at("/usr/bin"),
        at("/tmp"),
        at("/home"),
        at("/proc/1/root"),
        at("/dev/shm/w"),
        at("/var/lib/wieldy"),
        at("w"),
        at("/w/../etc"),
        at("/w/"),
        at("/w/./x"),
        at("/missing"),
        at("/l"),
        mounting("/", "/mnt"),
        mounting("/proc/1", "/mnt"),
        mounting("/var/lib/wieldy/x", "/mnt"),
        mounting("/missing", "/mnt"),
        mounting("/l", "/mnt"),
        mounting("data", "/mnt"),
        mounting("/data", "mnt"),
        mounting("/data", "/mnt/.."),
        mounting("/data", "/"),
        mounting("/data", "/proc/x"),
        mounting("/data", "/dev"),
        mounting("/data", "/var/lib/wieldy/x"),
        mounting("/data", "/usr"),
        mounting("/data", "/tmp"),
        mounting("/data", "/w"),
        mounting("/data", "/usr/missing"),
        mounting("/data", "/bin/x"),
        mounting("/data", "/w/link/x"),
        two(mount("/data", "/mnt", false), mount("/data/deep", "/mnt", false)),
        two(mount("/data", "/mnt", false), mount("/data", "/mnt/missing", false)),
        two(mount("/home/ada", "/home/ada", false), mount("/data", "/home/ada/.ssh/x", false)),
        mounting("/w/.git/hooks", "/mnt"),
        mounting("/data", "/w/.vscode/new"),
        hiding("/w"),
        hiding("/usr"),
        hiding("../x"),
        hiding("/x/.."),
        protecting("/data"),
        protecting("a/../b"),
    ];
    assert_snapshot!(refused.join("\n"), @r#"
    `/` belongs to the system and cannot be a workspace; choose a folder of the project's own
    `/etc` belongs to the system and cannot be a workspace; choose a folder of the project's own
    `/usr` belongs to the system and cannot be a workspace; choose a folder of the project's own
    `/bin` belongs to the system and cannot be a workspace; choose a folder of the project's own
    `/usr/bin` belongs to the system and cannot be a workspace; choose a folder of the project's own
    `/tmp` belongs to the system and cannot be a workspace; choose a folder of the project's own
    `/home` belongs to the system and cannot be a workspace; choose a folder of the project's own
    `/proc/1/root` belongs to the system and cannot be a workspace; choose a folder of the project's own
    `/dev/shm/w` belongs to the system and cannot be a workspace; choose a folder of the project's own
    `/var/lib/wieldy` belongs to the system and cannot be a workspace; choose a folder of the project's own
    `w` is not a plain absolute path; write it without `.`, `..` and links, beginning with `/`
    `/w/../etc` is not a plain absolute path; write it without `.`, `..` and links, beginning with `/`
    `/w/` is not a plain absolute path; write it without `.`, `..` and links, beginning with `/`
    `/w/./x` is not a plain absolute path; write it without `.`, `..` and links, beginning with `/`
    the workspace `/missing` is not a folder; make it, or give the path that its link leads to
    the workspace `/l` is not a folder; make it, or give the path that its link leads to
    `/` cannot be mounted: it would show other processes or the executor's own files; mount a smaller folder
    `/proc/1` cannot be mounted: it would show other processes or the executor's own files; mount a smaller folder
    `/var/lib/wieldy/x` cannot be mounted: it would show other processes or the executor's own files; mount a smaller folder
    `/missing` cannot be mounted: there is no such file or folder; make it, or give the path that its link leads to
    `/l` cannot be mounted: there is no such file or folder; make it, or give the path that its link leads to
    `data` is not a plain absolute path; write it without `.`, `..` and links, beginning with `/`
    `mnt` is not a plain absolute path; write it without `.`, `..` and links, beginning with `/`
    `/mnt/..` is not a plain absolute path; write it without `.`, `..` and links, beginning with `/`
    nothing can be mounted at `/`: the sandbox needs it for itself; choose another place
    nothing can be mounted at `/proc/x`: the sandbox needs it for itself; choose another place
    nothing can be mounted at `/dev`: the sandbox needs it for itself; choose another place
    nothing can be mounted at `/var/lib/wieldy/x`: the sandbox needs it for itself; choose another place
    `/usr` is mounted twice; choose another place for one of them
    `/tmp` is mounted twice; choose another place for one of them
    `/w` is mounted twice; choose another place for one of them
    nothing can be mounted at `/usr/missing`: `/usr/missing` does not exist on the host; make it, or choose another place
    nothing can be mounted at `/bin/x`: `/bin` is a link; use the path that it leads to
    nothing can be mounted at `/w/link/x`: `/w/link` is a link; use the path that it leads to
    `/mnt` is mounted twice; choose another place for one of them
    nothing can be mounted at `/mnt/missing`: `/data/missing` does not exist on the host; make it, or choose another place
    nothing can be mounted at `/home/ada/.ssh/x`: `/home/ada/.ssh` is hidden; show it, or choose another place
    `/w/.git/hooks` is mounted writable and `/w/.git/hooks` is protected; mount it read-only
    nothing can be mounted at `/w/.vscode/new`: `/w/.vscode/new` does not exist on the host; make it, or choose another place
    `/w` is both mounted and hidden; take one of the rules away
    `/usr` is both mounted and hidden; take one of the rules away
    `../x` is not a plain path; write it without `.`, `..` and links
    `/x/..` is not a plain absolute path; write it without `.`, `..` and links, beginning with `/`
    `/data` cannot be protected: it is not in the workspace; to protect a mounted path, mount it read-only
    `a/../b` is not a plain path; write it without `.`, `..` and links
    "#);
}

/// The content behind a path after all steps, taken one by one: a step covers everything below its path.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    Host { path: PathBuf, writable: bool },
    Own,
    Nothing,
}

fn seen(steps: &[Step], path: &Path) -> Seen {
    let mut seen = Seen::Nothing;
    for step in steps.iter().filter(|step| **step != Step::Seal) {
        let Ok(rest) = path.strip_prefix(step.path()) else { continue };
        seen = match (step, seen) {
            (Step::Bind { source, writable, .. }, _) => Seen::Host { path: source.join(rest), writable: *writable },
            (Step::Protect { .. }, Seen::Host { path, .. }) => Seen::Host { path, writable: false },
            (Step::Hide { .. }, _) => Seen::Nothing,
            (_, Seen::Host { path, writable }) if matches!(step, Step::Folder { .. } | Step::Link { .. }) => {
                Seen::Host { path, writable }
            }
            _ => Seen::Own,
        };
    }
    // `join` with an empty path adds a slash at the end, which comparisons of paths ignore.
    seen
}

/// Makes a host on which every folder has files of all kinds.
fn crowded() -> Host {
    let mut host = Host::debian();
    for root in ["/a", "/a/b", "/a/b/c", "/a/b/c/d", "/e"] {
        for file in [".git/config", ".git/HEAD", ".env", ".env.local", ".ssh/id", "x/y/file", ".vscode/tasks.json"] {
            host = host.file(&format!("{root}/{file}"));
        }
        host = host.folder(&format!("{root}/.git/hooks"));
    }
    // These folders show that the user has the programs.
    host.folder("/a/.claude").folder("/a/.vscode")
}

fn place() -> impl Strategy<Value = PathBuf> {
    let roots =
        prop::sample::select(vec!["/a", "/a/b", "/a/b/c", "/a/b/c/d", "/e", "/usr", "/opt", "/home", "/mnt", "/var"]);
    let below =
        prop::sample::select(vec!["", "x", "x/y", "new", "new/er", ".git", ".git/hooks", ".ssh", ".vscode", "b"]);
    (roots, below).prop_map(|(root, below)| Path::new(root).join(below).components().collect())
}

prop_compose! {
    fn any_mount()(source in place(), target in place(), same in any::<bool>(), writable in any::<bool>()) -> Mount {
        Mount { target: if same { source.clone() } else { target }, source, writable }
    }
}

prop_compose! {
    fn any_rules()(
        mounts in prop::collection::vec(any_mount(), 0..5),
        hidden in prop::collection::vec(place(), 0..2),
        protected in prop::collection::vec(prop::sample::select(vec!["x", "x/y", "new/one", ".git"]), 0..2),
    ) -> FileRules {
        let protected = protected.into_iter().map(PathBuf::from).collect();
        FileRules { mounts, hidden, protected, ..FileRules::default() }
    }
}

fn check_everything(host: &Host, workspace: &Path, rules: &FileRules, plan: &Plan) -> Result<(), TestCaseError> {
    let steps = &plan.steps;
    let mut sources: Vec<(&Path, bool)> = rules.mounts.iter().map(|m| (m.source.as_path(), m.writable)).collect();
    sources.push((workspace, true));
    let mut executed = vec![".git/hooks", ".git/commondir", ".vscode", ".claude", "wieldy.toml", "refs", "commondir"];
    if host.0.contains_key(&workspace.join(".git")) {
        executed.push(".git/config");
    }
    let protected: Vec<_> = executed
        .iter()
        .map(|name| workspace.join(name))
        .chain(rules.protected.iter().map(|path| workspace.join(path)))
        .collect();
    let hidden: Vec<_> = rules
        .hidden
        .iter()
        .cloned()
        .chain(["/etc/shadow".into(), "/var/lib/wieldy".into(), workspace.join(".env")])
        .collect();
    // Every path at which a mount could show something.
    let targets = steps.iter().filter_map(|step| match step {
        Step::Bind { source, target, .. } => Some((source, target)),
        _ => None,
    });
    let mut paths: BTreeSet<PathBuf> = steps.iter().map(|step| step.path().to_owned()).collect();
    for (source, target) in targets {
        let below = host.0.keys().chain(&protected).filter_map(|path| path.strip_prefix(source).ok());
        paths.extend(below.flat_map(|rest| [target.join(rest), target.join(rest).join("new")]));
    }
    for path in &paths {
        let Seen::Host { path: host_path, writable } = seen(steps, path) else { continue };
        let system = SYSTEM.iter().any(|system| host_path.starts_with(system));
        prop_assert!(
            system || sources.iter().any(|(source, _)| host_path.starts_with(source)),
            "{path:?} shows {host_path:?}"
        );
        if writable {
            let granted = sources.iter().any(|(source, writable)| *writable && host_path.starts_with(source));
            prop_assert!(granted, "{path:?} lets {host_path:?} be written");
            let kept = protected.iter().find(|kept| host_path.starts_with(kept));
            prop_assert!(kept.is_none(), "{path:?} lets {host_path:?} be written, which is protected");
        }
        let secret = hidden.iter().find(|secret| host_path.starts_with(secret) && host.0.contains_key(*secret));
        let declared = sources.iter().any(|(source, _)| {
            secret.is_some_and(|secret| source.starts_with(secret)) && host_path.starts_with(source)
        });
        prop_assert!(secret.is_none() || declared, "{path:?} shows {host_path:?}, which is hidden");
    }
    check_mount_points(host, steps, plan)
}

/// Checks that every step has a mount point, and that no folder above a protected path can be moved away.
fn check_mount_points(host: &Host, steps: &[Step], plan: &Plan) -> Result<(), TestCaseError> {
    for (index, step) in steps.iter().enumerate().filter(|(_, step)| **step != Step::Seal) {
        let before = &steps[..index];
        let exists = match seen(before, step.path()) {
            Seen::Host { path, .. } => {
                let path: PathBuf = path.components().collect();
                host.0.contains_key(&path) || plan.placeholders.iter().any(|placeholder| placeholder.path == path)
            }
            Seen::Own => {
                let made = before.iter().any(|made| made.path() == step.path());
                let in_dev = step.path().starts_with("/dev");
                made || in_dev || matches!(step, Step::Folder { .. } | Step::Link { .. } | Step::File { .. })
            }
            Seen::Nothing => step.path() == Path::new("/"),
        };
        prop_assert!(exists, "{step:?} has no place");
        if let Step::Protect { path } = step {
            for above in path.ancestors().skip(1) {
                let mounted = steps.iter().any(|step| step.path() == above);
                let movable = matches!(seen(steps, above), Seen::Host { writable: true, .. });
                prop_assert!(mounted || !movable, "{above:?} can be moved away");
                if mounted {
                    break;
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_shown_or_writable_that_no_rule_grants(
        workspace in prop::sample::select(vec!["/a", "/a/b", "/a/b/c", "/a/b/c/d", "/a/b/x"]),
        rules in any_rules(),
    ) {
        let host = crowded();
        if let Ok(plan) = planned(&host, "/a", workspace, &rules) {
            check_everything(&host, Path::new(workspace), &rules, &plan)?;
        }
    }
}

#[test]
fn most_sets_of_rules_that_are_tried_have_a_plan() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let host = crowded();
    let count = (0..500).filter(|_| {
        let rules = any_rules().new_tree(&mut runner).unwrap().current();
        planned(&host, "/a", "/a/b/c", &rules).is_ok()
    });
    assert!(count.count() > 100);
}
