//! Moves that are killed at every failpoint: the vault is as before, or the next use completes the move.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use serde_json::json;
use wieldy_core::{Call, Caller, FileRules};

use super::{VaultWorld, executor, options, tree};

/// The other process: makes one move, and dies at the failpoint that its environment names.
#[tokio::test]
async fn victim() {
    let Ok(folder) = std::env::var("WIELDY_VAULT_VICTIM") else { return };
    let folder = Path::new(&folder);
    let (executor, _) = executor(folder, options(folder), FileRules::default());
    let (from, to) = (std::env::var("WIELDY_VAULT_FROM").unwrap(), std::env::var("WIELDY_VAULT_TO").unwrap());
    let call = Call::new("vault_move", json!({"path": from, "new_path": to})).by(Arc::new(Caller::local()));
    let result = executor.call(call).await;
    assert!(result.is_success(), "{:?}", result.error);
}

/// Runs the victim to its end, and returns true if it was killed.
fn run_victim(folder: &Path, failpoint: &str, (from, to): (&str, &str)) -> bool {
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "vault::kill::victim", "--nocapture"])
        .env("WIELDY_VAULT_VICTIM", folder)
        .env("WIELDY_VAULT_FROM", from)
        .env("WIELDY_VAULT_TO", to)
        .env("WIELDY_FAILPOINT", failpoint)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(
        status.success() || std::os::unix::process::ExitStatusExt::signal(&status).is_some(),
        "{failpoint}: {status}"
    );
    !status.success()
}

fn world() -> VaultWorld {
    let world = VaultWorld::new();
    world
        .put("p/Old.md", "\u{FEFF}[[#x]] [[Old]] [h](../Home.md)\r\n")
        .put("p/Two.md", "[[Old]]")
        .put("Home.md", "[[Old]] [[p/Two]]");
    for number in 0..4 {
        world.put(&format!("n{number}.md"), format!("{number} [[p/Old|x]]"));
    }
    world
}

fn plans(world: &VaultWorld) -> Vec<String> {
    tree(&world.folder.path().join("state"))
        .into_keys()
        .filter(|name| name.ends_with(".plan") || name.ends_with(".failed"))
        .collect()
}

/// Opens the vault again, as the next process does.
fn again(world: VaultWorld) -> VaultWorld {
    VaultWorld::at(world.folder, |_| {}, FileRules::default())
}

// Shows: C6.6
#[tokio::test]
async fn killed_at_every_failpoint_a_move_happened_wholly_or_not_at_all() {
    let places = ["checked", "drafted", "planned", "note", "note:2", "note:3", "note:5", "moving", "moved", "done"];
    for ends in [("p/Old.md", "q/New.md"), ("p", "q/r")] {
        let untouched = world();
        let before = tree(&untouched.path(""));
        untouched.answer("vault_move", json!({"path": ends.0, "new_path": ends.1})).await;
        let after = tree(&untouched.path(""));
        let mut outcomes = BTreeMap::new();
        for place in places {
            let world = world();
            let failpoint = format!("vault.{place}");
            let was_killed = run_victim(world.folder.path(), &failpoint, ends);
            let found = tree(&world.path(""));
            let world = again(world);
            let listed = world.call("vault_list", json!({})).await;
            assert!(listed.is_success(), "{failpoint}: {:?}", listed.error);
            let now = tree(&world.path(""));
            let is_planned = !matches!(place, "checked" | "drafted");
            assert!(was_killed || place.starts_with("note:"), "{failpoint} was not reached");
            assert_eq!(now, if is_planned { after.clone() } else { before.clone() }, "{failpoint}");
            assert_eq!(plans(&world), [""; 0], "{failpoint}");
            outcomes.insert(place, found != before && found != after);
            // The vault works on.
            world.answer("vault_write", json!({"path": "Home.md", "body": "x"})).await;
        }
        assert!(outcomes["note"] && outcomes["note:2"], "some were killed halfway: {outcomes:?}");
    }
}

#[tokio::test]
async fn an_interrupted_move_whose_notes_changed_is_reported_once_and_overwrites_nothing() {
    for (changed, content) in [("n3.md", "mine [[p/Old]]"), ("Home.md", "mine"), ("q/New.md", "in the way")] {
        let world = world();
        assert!(run_victim(world.folder.path(), "vault.note:2", ("p/Old.md", "q/New.md")));
        world.put(changed, content);
        let found = tree(&world.path(""));
        let world = again(world);
        let refused = world.refusal("vault_read", json!({"path": "Home"})).await;
        let told = "E3303: a move of `p/Old.md` to `q/New.md` was interrupted and cannot be completed: ";
        assert!(refused.starts_with(told), "{refused}");
        assert_eq!(tree(&world.path("")), found, "{changed}");
        world.answer("vault_read", json!({"path": "Home"})).await;
        assert_eq!(plans(&world).len(), 1, "it is put aside");
        assert_eq!(world.content(changed), content);
    }
}

#[tokio::test]
async fn a_plan_of_another_vault_or_with_paths_outside_is_never_carried_out() {
    let world = world();
    assert!(run_victim(world.folder.path(), "vault.planned", ("p/Old.md", "q/New.md")));
    let plan = world.folder.path().join("state").join(&plans(&world)[0]);
    let text = fs::read_to_string(&plan).unwrap();
    let before = tree(world.folder.path().join("ws").as_path());
    let evil = [
        text.replace("\"to\":\"q/New.md\"", "\"to\":\"../other/New.md\""),
        text.replace("\"from\":\"p/Old.md\"", "\"from\":\"../other\""),
        text.replace("/ws/notes", "/ws/other"),
        text[..text.len() / 2].to_owned(),
        "{}".to_owned(),
    ];
    let mut world = world;
    for text in evil {
        fs::write(&plan, &text).unwrap();
        world = again(world);
        let refused = world.call("vault_list", json!({})).await;
        assert!(!refused.is_success(), "{text}");
        assert!(world.call("vault_list", json!({})).await.is_success(), "{text}");
        assert_eq!(tree(world.folder.path().join("ws").as_path()), before, "{text}");
    }
}

#[tokio::test]
async fn two_processes_that_move_at_once_break_no_link() {
    let world = world();
    for number in 0..6 {
        world.put(&format!("m{number}.md"), format!("[[m{}]] [[Old]]", (number + 1) % 6));
    }
    let children: Vec<_> = (0..6)
        .map(|number| {
            let folder = world.folder.path().to_owned();
            std::thread::spawn(move || {
                let (from, to) = (format!("m{number}.md"), format!("moved/k{number}.md"));
                run_victim(&folder, "", (&from, &to))
            })
        })
        .collect();
    children.into_iter().for_each(|child| assert!(!child.join().unwrap()));
    let world = again(world);
    for number in 0..6 {
        let next = (number + 1) % 6;
        assert_eq!(world.content(&format!("moved/k{number}.md")), format!("[[k{next}]] [[Old]]"));
    }
}
