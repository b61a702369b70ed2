//! Tests of toolchains in the user's home: programs in sandboxes find them, even if wieldy's own `PATH` has none of
//! them, and do not see their credentials.

use std::os::unix::fs::PermissionsExt;

use crate::world::World;

/// A program of each toolchain, by its path in the home.
const PROGRAMS: [(&str, &str); 9] = [
    ("of-cargo", ".cargo/bin/of-cargo"),
    ("of-nvm", ".nvm/versions/node/v20.11.1/bin/of-nvm"),
    ("of-pyenv", ".pyenv/shims/of-pyenv"),
    ("of-uv", ".local/bin/of-uv"),
    ("of-go", "go/bin/of-go"),
    ("of-sdkman", ".sdkman/candidates/java/current/bin/of-sdkman"),
    ("of-asdf", ".asdf/shims/of-asdf"),
    ("of-mise", ".local/share/mise/shims/of-mise"),
    ("of-uv-tool", ".local/bin/of-uv-tool"),
];

/// Credentials in shown folders of toolchains, or beside them.
const CREDENTIALS: [&str; 9] = [
    ".cargo/credentials.toml",
    ".npmrc",
    ".nvm/versions/node/v20.11.1/etc/npmrc",
    ".pyenv/versions/3.12.1/pip.conf",
    ".local/share/uv/tools/ruff/pip.conf",
    ".local/share/uv/credentials/credentials.toml",
    ".asdf/installs/nodejs/20.11.1/etc/npmrc",
    ".asdf/installs/rust/1.95.0/credentials.toml",
    ".local/share/mise/installs/node/20/etc/npmrc",
];

/// Makes a user with all toolchains, none of which is on the `PATH`.
fn world() -> World {
    let mut world = World::new()
        .file("../home/.nvm/alias/default", "lts/iron\n")
        .file("../home/.nvm/alias/lts/iron", "v20.11.1\n")
        .file("../home/.nvm/versions/node/v22.1.0/bin/of-nvm", "#!/bin/sh\necho another version\n")
        .file("../home/.nvm/versions/node/v20.11.1/include/node.h", "a header\n");
    for (name, path) in PROGRAMS {
        world = world.file(&format!("../home/{path}"), &format!("#!/bin/sh\necho runs {name}\n"));
        std::fs::set_permissions(world.path("../home").join(path), std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    for path in CREDENTIALS {
        world = world.file(&format!("../home/{path}"), "canary\n");
    }
    let home = world.path("../home").canonicalize().unwrap();
    world.variable("PATH", "/usr/bin:/bin").variable("HOME", home.to_str().unwrap())
}

fn bash(world: &World, script: &str, more: &[&str]) -> String {
    let command = format!("command={script}");
    world.run(&[&["call", "Bash", "--isolation", "native", &command], more].concat())
}

#[test]
fn every_toolchain_of_the_user_is_found_without_being_on_the_path() {
    let world = world();
    for (name, _) in PROGRAMS {
        let expected = format!("exit: 0\n----- stdout -----\nruns {name}\n\n----- stderr -----\n");
        assert_eq!(bash(&world, name, &[]), expected);
        let told = bash(&world, name, &["--set", "sandbox.toolchains=false"]);
        assert!(told.starts_with("exit: 1\n"), "{told}");
    }
}

#[test]
fn toolchains_come_after_the_path_of_the_user() {
    let world = world().file("../home/.local/bin/true", "#!/bin/sh\necho runs another\n");
    let path = world.path("../home/.local/bin/true");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let told = bash(&world, "env true; echo $PATH | grep -o ^/usr/bin:/bin:", &[]);
    assert_eq!(told, "exit: 0\n----- stdout -----\n/usr/bin:/bin:\n\n----- stderr -----\n");
    let home = world.path("../home").canonicalize().unwrap();
    let world = world.variable("PATH", &format!("{}/go/bin:/usr/bin:/bin", home.display()));
    let told = bash(&world, "echo $PATH | tr : '\\n' | grep -c /go/bin", &[]);
    assert_eq!(told, "exit: 0\n----- stdout -----\n1\n\n----- stderr -----\n");
}

#[test]
fn credentials_in_toolchains_are_not_read() {
    let world = world();
    let home = world.path("../home").canonicalize().unwrap();
    for path in CREDENTIALS {
        let told = bash(&world, &format!("cat {}/{path}", home.display()), &[]);
        assert!(!told.contains("canary") && !told.starts_with("exit: 0"), "{path}: {told}");
    }
    let told = bash(&world, &format!("cat {}/.nvm/versions/node/v20.11.1/include/node.h", home.display()), &[]);
    assert_eq!(told, "exit: 0\n----- stdout -----\na header\n\n----- stderr -----\n");
    let mounts = "sandbox.mounts=[\"~/.nvm/versions/node/v20.11.1/etc/npmrc\"]";
    let told =
        bash(&world, &format!("cat {}/.nvm/versions/node/v20.11.1/etc/npmrc", home.display()), &["--set", mounts]);
    assert_eq!(told, "exit: 0\n----- stdout -----\ncanary\n\n----- stderr -----\n", "an operator shows it by name");
}

/// Guide 12: mounts a package cache of the user in the place of the sandbox's own.
#[test]
fn the_package_cache_of_the_user_is_mounted_where_programs_look_for_theirs() {
    let world = world().file("../home/.cargo/registry/index", "an index\n");
    let mounts = "sandbox.mounts=[\"~/.cargo/registry:/home/agent/.cargo/registry\"]";
    let told =
        bash(&world, "cat ~/.cargo/registry/index; touch ~/.cargo/.package-cache && echo made", &["--set", mounts]);
    assert_eq!(told, "exit: 0\n----- stdout -----\nan index\nmade\n\n----- stderr -----\n");
}
