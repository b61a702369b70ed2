//! Tests `wieldy mcp` with the examples of the documents that wieldy was built from. The client is `documents.py`.

use std::process::Command;

use crate::world::World;

// Shows: B3.1, C1.2, C5.2, E6, E8.3
#[test]
fn the_examples_of_the_documents_run_over_mcp() {
    if Command::new("python3").arg("--version").output().is_err() {
        return wieldy_testkit::skip("the client of the documents' examples needs `python3`");
    }
    let world = World::new().file("../documents.py", include_str!("documents.py"));
    let home = world.path("../home").canonicalize().unwrap();
    let path = format!("{}:{}", home.join(".local/bin").display(), std::env::var("PATH").unwrap());
    let output = Command::new("python3")
        .args(["../documents.py", env!("CARGO_BIN_EXE_wieldy")])
        .current_dir(world.path(""))
        .env_clear()
        .envs([("PATH", path.as_ref()), ("HOME", home.as_os_str())])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && told.contains("\nRan 21 tests in "), "{told}");
}
