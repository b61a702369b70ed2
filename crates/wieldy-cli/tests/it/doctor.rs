//! Tests of `wieldy doctor` on this machine, as root and as an ordinary user.

use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;

use serde_json::{Value, json};

use crate::world::World;

const NOBODY: u32 = 65534;

fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    list.as_array().unwrap().iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{name} is not in {list}"))
}

// Shows: B6.3
#[test]
fn every_level_is_reported_and_the_native_one_works() {
    let world = World::new();
    let told = world.json(&["doctor", "--json"]);
    let names: Vec<&str> = told["levels"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["none", "native", "runc", "crun", "youki", "gvisor", "firecracker"]);
    assert_eq!((&told["ok"], &told["isolation"]), (&json!(true), &json!("native")));
    assert_eq!(
        named(&told["levels"], "native"),
        &json!({"name": "native", "state": "works", "told": "programs run in namespaces, under Landlock and seccomp", "hint": null})
    );
    // No machine has a kernel for guests by chance.
    let firecracker = named(&told["levels"], "firecracker");
    assert_eq!(firecracker["state"], "fails");
    assert_eq!(
        firecracker["told"] == "this program was built without it",
        !cfg!(feature = "firecracker"),
        "{firecracker}"
    );
    let keys: Vec<&String> = told.as_object().unwrap().keys().collect();
    assert_eq!(
        keys,
        [
            "ok",
            "isolation",
            "kernel",
            "architecture",
            "user",
            "levels",
            "features",
            "cgroups",
            "controllers",
            "limits",
            "holds",
            "refused",
            "placeholders",
            "history",
            "folder"
        ]
    );
    let limits: Vec<&Value> = told["limits"].as_array().unwrap().iter().map(|it| &it["limit"]).collect();
    assert_eq!(
        limits,
        ["cpu_millicores", "memory_bytes", "processes", "open_files", "disk_bytes", "disk_files", "output_bytes"]
    );
    let holds = told["holds"].as_array().unwrap();
    let of = |level: &str| holds.iter().find(|it| it["level"] == level).unwrap();
    assert_eq!(of("native")["limits"], told["limits"]);
    assert_eq!(of("native")["networks"], json!(["none", "open", "hosts"]));
    assert_eq!(of("runc")["networks"], json!(["none", "open", "hosts"]));
    let processes = json!({"limit": "processes", "by": "nobody"});
    assert!(of("gvisor")["limits"].as_array().unwrap().contains(&processes), "{told}");
    assert!(told["refused"].as_array().unwrap().iter().any(|it| it["name"] == "bpf"), "{told}");
}

#[test]
fn the_history_is_reported_and_not_created() {
    let world = World::new();
    let place = world.path("../state/history.db");
    let arguments = ["doctor", "--json", "--isolation", "none", "--state", place.parent().unwrap().to_str().unwrap()];
    let mut told = world.json(&arguments)["history"].take();
    assert_eq!(
        told,
        json!({"name": "history", "state": "found", "told": format!("{}: the first call makes it", place.display()),
               "hint": null, "address": place, "records": null, "bytes": null})
    );
    assert!(!place.exists(), "reading creates none");
    assert_eq!(world.code(&["call", "List", "--state", arguments[5]]), Some(0));
    told = world.json(&arguments)["history"].take();
    let bytes = told["bytes"].as_u64().unwrap();
    let size = format!("{:.0} KB", bytes as f64 / 1024.0);
    assert_eq!(
        told,
        json!({"name": "history", "state": "works", "told": format!("{}: 5 records in {size}", place.display()),
               "hint": null, "address": place, "records": 5, "bytes": bytes})
    );
    std::fs::write(&place, "this is no database, however long one looks at it\n").unwrap();
    let output = world.command(&arguments).output().unwrap();
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (output.status.code(), &told["ok"], &told["history"]["state"]),
        (Some(7), &json!(false), &json!("fails"))
    );
    assert!(String::from_utf8_lossy(&output.stderr).contains("the history cannot be used, so no call runs"));
    let told = world.command(&["doctor", "--isolation", "none"]).env_remove("HOME").output().unwrap();
    assert!(String::from_utf8_lossy(&told.stdout).contains("  ? history               in memory,"), "{told:?}");
}

// Shows: B6.3
#[test]
fn a_level_that_does_not_work_is_exit_7_with_the_reason() {
    let world = World::new().variable("PATH", "/nowhere");
    let told = world.run(&["doctor", "--isolation", "youki"]);
    assert!(told.starts_with("exit: 7\n"), "{told}");
    assert!(told.contains("  ✗ youki                 no program `youki` is on the PATH\n"), "{told}");
    let (_, talk) = told.split_once("----- stderr -----\n").unwrap();
    insta::assert_snapshot!(talk, @"
    error: the isolation level `youki` does not work here
    hint: follow the advice for it above, or choose a level that works with `isolation`
    ");
    assert_eq!(world.code(&["doctor", "--isolation", "none"]), Some(0));
}

#[test]
fn a_missing_workspace_is_reported_as_the_reason() {
    let world = World::new();
    let told = world.json(&["doctor", "--json", "--workspace", "missing"]);
    let native = named(&told["levels"], "native");
    assert_eq!(native["state"], "fails");
    assert!(native["told"].as_str().unwrap().contains("the workspace `missing`: No such file"), "{native}");
}

#[test]
fn an_unusable_workspace_is_not_reported_as_a_broken_level() {
    let told = World::new().json(&["doctor", "--json", "--workspace", "/"]);
    let native = named(&told["levels"], "native");
    assert_eq!(native["state"], "fails");
    let hint = "it works in other workspaces: go to a folder of your own, or name one by `--workspace DIR`";
    assert_eq!(native["hint"], hint);
}

#[test]
fn the_plan_is_shown_when_asked_for() {
    let world = World::new();
    let told = world.run(&["doctor", "--plan"]);
    let (_, plan) = told.split_once("what programs see\n").unwrap();
    assert!(plan.contains("  mount    /usr "), "{plan}");
    assert!(plan.contains("[root]/work"), "{plan}");
    let told = world.json(&["doctor", "--plan", "--json"]);
    assert!(told["plan"].as_array().unwrap().len() > 10, "{told}");
}

#[test]
fn it_works_for_an_ordinary_user_and_leaves_nothing_in_the_workspace() {
    let world = World::new();
    if !rustix::process::geteuid().is_root() {
        assert_eq!(world.code(&["doctor"]), Some(0));
        return;
    }
    // The program itself may be in a folder that only root can enter.
    let program = world.path("../wieldy");
    std::fs::copy(env!("CARGO_BIN_EXE_wieldy"), &program).unwrap();
    std::fs::set_permissions(world.path(".."), std::fs::Permissions::from_mode(0o755)).unwrap();
    for folder in ["", "../home"] {
        chown(world.path(folder), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let mut command = std::process::Command::new(&program);
    let output = command
        .args(["doctor", "--json"])
        .current_dir(world.path(""))
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("HOME", world.path("../home"))
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", world.told(&output));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["user"], &told["ok"]), (&json!(NOBODY), &json!(true)));
    assert_eq!(named(&told["features"], "user namespaces")["state"], "works");
    assert!(told["features"].as_array().unwrap().iter().all(|it| it["name"] != "id-mapped mounts"), "{told}");
    let left: Vec<_> = std::fs::read_dir(world.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, Vec::<std::ffi::OsString>::new());
}
