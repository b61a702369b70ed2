//! Tests of containers with another root file system: `[sandbox.oci]`, with runc itself. Without runc, the tests print
//! this and pass.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::world::World;

const TOOL: &str = r#"
[[tool]]
name = "note"
description = "Says what is in the note of programs' system"
command = ["cat", "/var/lib/note"]
read-only = true
"#;

/// Makes a world with a root file system of one program beside the workspace, and a tool that shows its use.
fn world() -> Option<World> {
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
    let runc = ["/usr/sbin/runc", "/usr/bin/runc"].into_iter().find(|path| Path::new(path).exists());
    let (Some(busybox), Some(_), true) = (busybox, runc, rustix::process::geteuid().is_root()) else {
        wieldy_testkit::skip("tests of containers need `busybox`, `runc` and root");
        return None;
    };
    let world = World::new().file(".wieldy/tools/note.toml", TOOL).file("../system/var/lib/note", "from elsewhere\n");
    let bin = world.path("../system/bin");
    fs::create_dir(&bin).unwrap();
    fs::copy(busybox, bin.join("busybox")).unwrap();
    for name in ["sh", "sleep", "cat", "true"] {
        symlink("busybox", bin.join(name)).unwrap();
    }
    assert!(Command::new("chmod").args(["-R", "go+rX"]).arg(world.path("../system")).status().unwrap().success());
    Some(world)
}

/// Writes the root file system as an OCI image layout, for this architecture or another.
fn lay_out(world: &World, architecture: &str) {
    let layout = world.path("../layout");
    let _ = fs::remove_dir_all(&layout);
    fs::create_dir_all(layout.join("blobs/sha256")).unwrap();
    let put = |bytes: &[u8]| {
        let mut sum = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        sum.stdin.take().unwrap().write_all(bytes).unwrap();
        let said = String::from_utf8(sum.wait_with_output().unwrap().stdout).unwrap();
        let hash = said.split_whitespace().next().unwrap();
        fs::write(layout.join("blobs/sha256").join(hash), bytes).unwrap();
        json!({"digest": format!("sha256:{hash}"), "size": bytes.len()})
    };
    let put_json = |value: Value| put(value.to_string().as_bytes());
    let tar = Command::new("tar").args(["-cf", "-", "-C"]).arg(world.path("../system")).arg(".").output().unwrap();
    let config = put_json(json!({"os": "linux", "architecture": architecture}));
    let manifest = put_json(json!({"schemaVersion": 2, "config": config, "layers": [put(&tar.stdout)]}));
    fs::write(layout.join("index.json"), json!({"manifests": [manifest]}).to_string()).unwrap();
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

fn ours() -> &'static str {
    if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }
}

fn runc(told: &Value) -> &Value {
    told["levels"].as_array().unwrap().iter().find(|it| it["name"] == "runc").unwrap()
}

#[test]
fn programs_come_from_a_folder_or_a_layout() {
    let Some(world) = world() else { return };
    lay_out(&world, ours());
    for key in ["rootfs = \"../system\"", "layout = \"../layout\""] {
        let world_file = format!("isolation = \"runc\"\n[sandbox.oci]\n{key}\n");
        fs::write(world.path("wieldy.toml"), world_file).unwrap();
        assert_eq!(
            world.run(&["call", "note"]),
            "exit: 0\n----- stdout -----\nfrom elsewhere\n\n----- stderr -----\n",
            "{key}"
        );
        let told = world.json(&["doctor", "--json"]);
        assert_eq!((&told["ok"], &runc(&told)["state"]), (&json!(true), &json!("works")), "{key}: {told}");
    }
}

#[test]
fn unusable_root_file_systems_are_reported_at_the_start() {
    let world = World::new().file("file", "").file("folder/inner", "");
    let told = |setting: &str| {
        let told = world.run(&["--set", setting, "call", "List"]);
        let (exit, said) = told.split_once("\n----- stdout -----\n\n----- stderr -----\n").unwrap();
        format!("{exit}\n{said}")
    };
    insta::assert_snapshot!(
        ["rootfs=missing", "rootfs=file", "layout=missing", "layout=folder"]
            .map(|setting| told(&format!("sandbox.oci.{setting}")))
            .join("\n"),
        @"
    exit: 2
    error: `sandbox.oci.rootfs`: `missing` is not a folder
    hint: name a folder with a root file system, or leave the key out to use this machine's

    exit: 2
    error: `sandbox.oci.rootfs`: `file` is not a folder
    hint: name a folder with a root file system, or leave the key out to use this machine's

    exit: 2
    error: `sandbox.oci.layout`: `missing` is not a folder
    hint: `skopeo copy docker://debian:stable-slim oci:DIR` makes one; or leave the key out to use this machine's system

    exit: 2
    error: `sandbox.oci.layout`: `folder` is not an OCI image layout: it has no `oci-layout` or no `index.json`
    hint: `skopeo copy docker://debian:stable-slim oci:DIR` makes one; or leave the key out to use this machine's system
    ");
}

#[test]
fn doctor_and_the_call_report_a_damaged_or_foreign_layout() {
    let Some(world) = world() else { return };
    fs::write(world.path("wieldy.toml"), "isolation = \"runc\"\n[sandbox.oci]\nlayout = \"../layout\"\n").unwrap();
    let problem = |problem: &str| format!("runc: the OCI image layout `../layout` cannot be used: {problem}");
    lay_out(&world, "pdp11");
    let wanted = problem(&format!("it has no image for linux/{}, only for linux/pdp11", ours()));
    let told = world.json(&["doctor", "--json"]);
    assert_eq!((&told["ok"], &runc(&told)["told"]), (&json!(false), &json!(wanted)));
    let result = world.json(&["call", "note", "--json"]);
    assert_eq!(result["error"]["code"], "E3101");
    assert_eq!(result["error"]["message"], format!("cannot make a sandbox: {wanted}"));
    lay_out(&world, ours());
    let blobs = fs::read_dir(world.path("../layout/blobs/sha256")).unwrap().map(|blob| blob.unwrap().path());
    let layer = blobs.max_by_key(|blob| fs::metadata(blob).unwrap().len()).unwrap();
    fs::OpenOptions::new().append(true).open(&layer).unwrap().write_all(b"more").unwrap();
    let digest = layer.file_name().unwrap().to_str().unwrap();
    let told = world.json(&["doctor", "--json"]);
    let wanted = problem(&format!("the blob `sha256:{digest}` is damaged: it does not match its digest"));
    assert_eq!(runc(&told)["told"], wanted);
}
