//! The borders of a vault: paths and links that lead out, hidden and protected files, names that begin with a dot.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::json;
use wieldy_core::FileRules;

use super::{VaultWorld, calls, tree};
use crate::world::CANARY;

#[tokio::test]
async fn no_path_leads_out_of_the_vault() {
    let world = VaultWorld::new();
    let ws = world.folder.path().join("ws");
    fs::write(ws.join("other/secret.md"), CANARY).unwrap();
    fs::write(world.folder.path().join("state/secret.md"), CANARY).unwrap();
    world.put("Home.md", "text").put("real/r.md", "text");
    symlink(ws.join("other"), world.path("out")).unwrap();
    symlink("../../other/secret.md", world.path("real/link.md")).unwrap();
    symlink("../other/secret.md", world.path("link.md")).unwrap();
    symlink(world.folder.path().join("state"), world.path("state")).unwrap();
    symlink("real", world.path("inside")).unwrap();
    let before = tree(world.folder.path().join("ws").join("other").as_path());
    let absolute = ws.join("other/secret.md");
    for path in [
        "../other/secret.md",
        "out/secret.md",
        "link.md",
        "real/link.md",
        "state/secret.md",
        "x/../../other/secret.md",
        "/etc/passwd",
        absolute.to_str().unwrap(),
        "out/new.md",
        "out/deep/new.md",
        "inside/../../other/secret.md",
    ] {
        for (tool, arguments) in calls(path) {
            if tool == "vault_search" || tool == "vault_list" || tool == "vault_create_index" {
                continue;
            }
            let result = world.call(tool, arguments).await;
            let code = result.error.as_ref().map(|error| error.code.as_str());
            assert!(matches!(code, Some("E3105" | "E3302" | "E3303")), "{tool} {path}: {code:?}");
            assert!(!format!("{result:?}").contains(CANARY), "{tool} {path}");
        }
        for arguments in [json!({"path": "Home.md", "new_path": path}), json!({"path": "real", "new_path": path})] {
            assert!(!world.call("vault_move", arguments).await.is_success(), "{path}");
        }
        let page = world.call("vault_create_index", json!({"path": path})).await;
        assert!(!page.is_success(), "{path}");
    }
    assert_eq!(tree(world.folder.path().join("ws").join("other").as_path()), before);
    assert!(!ws.join("other/deep").exists());
    // The harmless twin: a link to a folder of the vault.
    assert_eq!(world.answer("vault_read", json!({"path": "real/r.md"})).await["content"], "text");
    world.answer("vault_write", json!({"path": "inside/r.md", "body": "by a link"})).await;
    assert_eq!(world.content("real/r.md"), "by a link");
    let listed = world.call("vault_list", json!({})).await;
    assert!(!listed.text().contains("secret") && !listed.text().contains("link"), "{}", listed.text());
}

#[tokio::test]
async fn hidden_notes_leak_through_no_tool() {
    let rules = FileRules { hidden: vec!["notes/private".into(), "notes/Diary.md".into()], ..FileRules::default() };
    let world = VaultWorld::with(|_| {}, rules);
    world
        .put("private/Secret plan.md", CANARY)
        .put("Diary.md", format!("{CANARY} [[Home]]"))
        .put("Home.md", "[[Secret plan]] [[Diary]] text")
        .put(".obsidian/app.md", CANARY);
    for (tool, arguments) in [
        ("vault_read", json!({"path": "Home.md", "include": ["backlinks"]})),
        ("vault_search", json!({"query": "text"})),
        ("vault_search", json!({"query": CANARY})),
        ("vault_search", json!({"query": "path:private"})),
        ("vault_list", json!({})),
        ("vault_create_index", json!({})),
        ("vault_move", json!({"path": "Home.md", "new_path": "Home2.md", "dry_run": true})),
    ] {
        let result = world.call(tool, arguments).await;
        assert!(result.is_success(), "{tool}: {:?}", result.error);
        let all = format!("{} {}", result.text(), result.structured.unwrap());
        let all = all.replace("[[Secret plan]]", "").replace("[[Diary]]", "").replace("\"target\":\"Diary\"", "");
        assert!(!all.contains(CANARY) && !all.contains("private/") && !all.contains("Diary.md"), "{tool}: {all}");
    }
    for path in ["private/Secret plan.md", "Secret plan", "Diary", "Diary.md", ".obsidian/app.md"] {
        for (tool, arguments) in
            calls(path).into_iter().filter(|(tool, _)| matches!(*tool, "vault_read" | "vault_write" | "vault_move"))
        {
            if (tool, path) == ("vault_write", "Secret plan") {
                continue; // a new note of this name beside it
            }
            let result = world.call(tool, arguments).await;
            assert!(!result.is_success(), "{tool} {path}");
            assert!(!format!("{result:?}").contains(CANARY), "{tool} {path}");
        }
    }
    // A folder with a hidden file does not move: the file might be visible under its new name.
    world.put("box/a.md", "").put("box/.env", CANARY);
    let refused = world.refusal("vault_move", json!({"path": "box", "new_path": "box2"})).await;
    assert!(refused.starts_with("E3105"), "{refused}");
    assert_eq!(world.content("private/Secret plan.md"), CANARY);
    assert_eq!(world.content("Diary.md"), format!("{CANARY} [[Home]]"));
}

#[tokio::test]
async fn protected_notes_are_read_and_never_changed() {
    let rules = FileRules { protected: vec!["notes/Fixed.md".into()], ..FileRules::default() };
    let world = VaultWorld::with(|_| {}, rules);
    world.put("Fixed.md", "[[Old]]").put("Old.md", "");
    assert!(world.call("vault_read", json!({"path": "Fixed"})).await.is_success());
    for (tool, arguments) in [
        ("vault_write", json!({"path": "Fixed", "body": "x"})),
        ("vault_move", json!({"path": "Fixed", "new_path": "x"})),
        ("vault_create_index", json!({"path": "Fixed"})),
        // The link in the protected note would have to change.
        ("vault_move", json!({"path": "Old", "new_path": "New"})),
    ] {
        let refused = world.refusal(tool, arguments).await;
        assert!(refused.starts_with("E3105: "), "{tool}: {refused}");
    }
    assert_eq!(tree(&world.path("")).len(), 2);
    assert_eq!(world.content("Fixed.md"), "[[Old]]");
}

#[tokio::test]
async fn a_vault_outside_the_workspace_has_the_same_borders() {
    let world = VaultWorld::new();
    let outside = world.folder.path().join("outside");
    fs::write(outside.join("a.md"), "[[b]]").unwrap();
    fs::write(outside.join("b.md"), "text").unwrap();
    fs::write(outside.join(".env"), CANARY).unwrap();
    symlink(world.folder.path().join("state"), outside.join("out")).unwrap();
    let on = |arguments: serde_json::Value| {
        let mut arguments = arguments;
        arguments["project_id"] = json!("outside");
        arguments
    };
    world.answer("vault_move", on(json!({"path": "b", "new_path": "c/d"}))).await;
    assert_eq!(fs::read_to_string(outside.join("a.md")).unwrap(), "[[d]]");
    assert_eq!(world.answer("vault_search", on(json!({"query": "text"}))).await["total"], 1);
    for path in ["out/x.md", "../state/x.md", ".env"] {
        assert!(!world.call("vault_write", on(json!({"path": path, "body": "x"}))).await.is_success(), "{path}");
    }
    assert_eq!(fs::read_to_string(outside.join(".env")).unwrap(), CANARY);
}

#[tokio::test]
async fn settings_of_the_operator_in_a_vault_are_neither_read_nor_moved() {
    let world = VaultWorld::new();
    let outside = world.folder.path().join("outside");
    fs::write(outside.join("settings.md"), CANARY).unwrap();
    fs::write(outside.join("b.md"), "[[settings]]").unwrap();
    let by_all = [
        ("vault_read", json!({"path": "settings", "project_id": "outside"})),
        ("vault_search", json!({"query": CANARY, "project_id": "outside"})),
        ("vault_list", json!({"project_id": "outside"})),
        ("vault_move", json!({"path": "settings.md", "new_path": "t.md", "project_id": "outside"})),
        ("vault_write", json!({"path": "settings.md", "body": "x", "project_id": "outside"})),
    ];
    for (tool, arguments) in by_all {
        let result = world.call(tool, arguments).await;
        let told = serde_json::to_string(&(&result.content, &result.structured, &result.error)).unwrap();
        assert!(!told.replace("\"arguments\"", "").contains(CANARY) || tool == "vault_search", "{tool}: {told}");
        if tool == "vault_search" {
            assert_eq!(result.structured.unwrap()["total"], 0);
        }
    }
    assert_eq!(fs::read_to_string(outside.join("settings.md")).unwrap(), CANARY);
}

#[tokio::test]
async fn a_move_does_not_tell_which_hidden_files_there_are() {
    let world = VaultWorld::with(|_| {}, FileRules { hidden: vec!["notes/hid".into()], ..FileRules::default() });
    world.put("hid/there.md", CANARY).put("b.md", "B");
    let told = async |to: &str, from: &str| {
        let answer = world.call("vault_move", json!({"path": from, "new_path": to, "dry_run": true})).await;
        (answer.is_success(), answer.text().replace("absent", "there"), answer.error.map(|error| error.code))
    };
    for from in ["zzz", "b.md"] {
        assert_eq!(told("hid/there.md", from).await, told("hid/absent.md", from).await, "{from}");
        assert_eq!(told("hid/there.md/k.md", from).await, told("hid/absent.md/k.md", from).await, "{from}");
    }
}

#[tokio::test]
async fn many_links_are_counted_and_not_all_listed() {
    let world = VaultWorld::new();
    world.put("a.md", "A").put("big.md", "[](a.md) ".repeat(20_000));
    let answer = world.answer("vault_read", json!({"path": "big.md"})).await;
    assert_eq!((answer["links"].as_array().unwrap().len(), &answer["links_total"]), (1000, &json!(20_000)));
    let answer = world.answer("vault_read", json!({"path": "a.md", "include": ["backlinks"]})).await;
    assert_eq!(answer["backlinks"].as_array().unwrap().len(), 1000);
}

#[tokio::test]
async fn no_tool_makes_a_folder_so_deep_that_its_notes_are_in_no_index() {
    let world = VaultWorld::new();
    world.put("a.md", "A");
    for (tool, argument) in [("vault_write", "path"), ("vault_move", "new_path")] {
        let mut arguments = json!({"path": "a.md", "body": "x"});
        if tool == "vault_move" {
            arguments = json!({"path": "a.md"});
        }
        arguments[argument] = json!("d/".repeat(64) + "x.md");
        let message = world.refusal(tool, arguments).await;
        assert!(
            message.starts_with("E3303: the path has 65 names, and in a vault it may have at most 64"),
            "{message}"
        );
    }
    assert!(!world.path("d").exists());
}
