//! Tests containers whose programs are from a folder or an image, and the errors if they are missing.

use std::fs;
use std::path::Path;

use wieldy_core::{Level, SandboxError};
use wieldy_sandbox::{OciOptions, Rootfs};

use super::Driver;

mod runc {
    // Shows: B6.1
    #[tokio::test]
    async fn programs_can_come_from_a_folder_or_an_image() {
        super::programs_can_come_from_a_folder_or_an_image(super::Level::Runc).await;
    }
    #[tokio::test]
    async fn a_container_that_does_not_start_leaves_nothing() {
        super::a_container_that_does_not_start_leaves_nothing(super::Level::Runc).await;
    }
}

mod gvisor {
    #[tokio::test]
    async fn programs_can_come_from_a_folder_or_an_image() {
        super::programs_can_come_from_a_folder_or_an_image(super::Level::Gvisor).await;
    }
    #[tokio::test]
    async fn a_container_that_does_not_start_leaves_nothing() {
        super::a_container_that_does_not_start_leaves_nothing(super::Level::Gvisor).await;
    }
}

/// Returns a root folder with one program.
fn small_system() -> Option<tempfile::TempDir> {
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
    let Some(busybox) = busybox else {
        wieldy_testkit::skip("there is no `busybox` to make an image of");
        return None;
    };
    let system = tempfile::tempdir().unwrap();
    fs::create_dir_all(system.path().join("usr/bin")).unwrap();
    fs::create_dir_all(system.path().join("var/lib")).unwrap();
    fs::copy(busybox, system.path().join("usr/bin/busybox")).unwrap();
    for name in ["sh", "sleep", "cat", "ls", "true", "kill"] {
        std::os::unix::fs::symlink("busybox", system.path().join("usr/bin").join(name)).unwrap();
    }
    std::os::unix::fs::symlink("usr/bin", system.path().join("bin")).unwrap();
    fs::write(system.path().join("var/lib/note"), "from the image\n").unwrap();
    std::process::Command::new("chmod").args(["-R", "go+rX"]).arg(system.path()).status().unwrap();
    Some(system)
}

/// Returns an OCI image layout of the root folder, with two layers; the second one removes a file.
fn layout_of(system: &Path) -> tempfile::TempDir {
    let layout = tempfile::tempdir().unwrap();
    let blobs = layout.path().join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let upper = tempfile::tempdir().unwrap();
    fs::create_dir_all(upper.path().join("var/lib")).unwrap();
    fs::write(upper.path().join("var/lib/.wh.gone"), "").unwrap();
    fs::write(system.join("var/lib/gone"), "").unwrap();
    let put = |bytes: &[u8]| {
        let hash = ring::digest::digest(&ring::digest::SHA256, bytes);
        let hash: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(blobs.join(&hash), bytes).unwrap();
        serde_json::json!({"digest": format!("sha256:{hash}"), "size": bytes.len()})
    };
    let layers = [system, upper.path()].map(|folder| {
        let mut tar = std::process::Command::new("tar");
        put(&tar.args(["-czf", "-", "-C"]).arg(folder).arg(".").output().unwrap().stdout)
    });
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = put(format!(r#"{{"os":"linux","architecture":"{architecture}"}}"#).as_bytes());
    let manifest = serde_json::json!({"schemaVersion": 2, "config": config, "layers": layers});
    let index = serde_json::json!({"manifests": [put(manifest.to_string().as_bytes())]});
    fs::write(layout.path().join("index.json"), index.to_string()).unwrap();
    fs::write(layout.path().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    layout
}

async fn programs_can_come_from_a_folder_or_an_image(level: Level) {
    let Some(system) = small_system() else { return };
    let layout = layout_of(system.path());
    fs::remove_file(system.path().join("var/lib/gone")).unwrap();
    for rootfs in [Rootfs::Folder(system.path().to_owned()), Rootfs::Layout(layout.path().to_owned())] {
        let Some(driver) = Driver::with(level, |options| OciOptions { rootfs, ..options }) else { return };
        let script =
            "cd /usr/bin; echo *; cat /var/lib/*; echo x >/tmp/x; echo x >~/x; cat /tmp/x ~/x; echo hi >$OLDPWD/out";
        let world = driver.world("sh", &["-c", script]);
        let wanted = ("busybox cat kill ls sh sleep true\nfrom the image\nx\nx\n".to_owned(), String::new());
        assert_eq!((world.output().await, world.printed.stderr()), wanted);
        assert_eq!(fs::read_to_string(world.workspace.path().join("out")).unwrap(), "hi\n");
        drop(world);
        driver.close().await;
    }
}

/// Its first process is a shell, which is missing. By then the runtime has made cgroups in every tree.
async fn a_container_that_does_not_start_leaves_nothing(level: Level) {
    let empty = tempfile::tempdir().unwrap();
    let rootfs = Rootfs::Folder(empty.path().to_owned());
    let Some(driver) = Driver::with(level, |options| OciOptions { rootfs, ..options }) else { return };
    for _ in 0..2 {
        let world = driver.world("true", &[]);
        let error = world.run().await.unwrap_err();
        let SandboxError::Unavailable { hint, .. } = &error else { panic!("{error:?}") };
        assert_eq!(hint, "give programs a system with `sh` and `sleep` in it", "{error}");
    }
    driver.close().await;
}

#[tokio::test]
async fn a_root_that_would_show_the_machine_or_is_none_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let missing = home.path().join("missing");
    let inside = "it holds the executor's own files or a home folder; give programs a folder of their own";
    for (folder, problem) in [
        (Path::new("/"), inside),
        (home.path(), inside),
        (&missing, "No such file or directory (os error 2)"),
        (Path::new("/etc/passwd"), "it is not a folder"),
    ] {
        let (rootfs, home) = (Rootfs::Folder(folder.to_owned()), Some(home.path().to_owned()));
        let change = |options| OciOptions { rootfs, home, ..options };
        let Some(driver) = Driver::with(Level::Runc, change) else { return };
        let error = driver.world("true", &[]).run().await.unwrap_err().message();
        let folder = folder.display();
        assert_eq!(error, format!("cannot make a sandbox: runc: the root `{folder}` cannot be used: {problem}"));
        driver.close().await;
    }
}

#[tokio::test]
async fn a_workspace_in_the_root_of_programs_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let rootfs = Rootfs::Folder(root.clone());
    let Some(driver) = Driver::with(Level::Runc, |options| OciOptions { rootfs, ..options }) else { return };
    let mut world = driver.world("true", &[]);
    world.confinement.workspace = root.join("workspace");
    fs::create_dir(&world.confinement.workspace).unwrap();
    let error = world.run().await.unwrap_err().message();
    let wanted = format!("the workspace lies in the root `{}`; give programs another root", root.display());
    assert_eq!(error, format!("cannot make a sandbox: {wanted}"));
    drop(world);
    driver.close().await;
}
