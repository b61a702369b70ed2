//! `vault_move`: every link means the same note as before, and nothing else of a note changes.

use serde_json::json;

use super::{VaultWorld, tree};

#[tokio::test]
async fn a_move_changes_the_targets_of_links_and_no_other_byte() {
    let world = VaultWorld::new();
    let note = "\u{FEFF}---\r\nup: \"[[Old|x]]\" # c\r\nlist: ['[[a/Old#h]]', y]\r\n---\r\n# [[Old]]\r\n\
                ![[Old#A|b]] [t](a/Old.md#b \"c\") [u](<a/Old.md>) `[[Old]]` %%[[Old]]%%\r\n\
                | [[Old\\|x]] | [[old.md]] |\r\n\r\n[r]: a/Old.md\r\n";
    world.put("Home.md", note).put("a/Old.md", "[[#own]] [[Old]] [s](../Home.md) [[Home]]");
    let answer = world.answer("vault_move", json!({"path": "a/Old", "new_path": "b c/New"})).await;
    let wanted = note
        .replace("[[Old|x]]", "[[New|x]]")
        .replace("[[a/Old#h]]", "[[b c/New#h]]")
        .replace("# [[Old]]", "# [[New]]")
        .replace("![[Old#A|b]]", "![[New#A|b]]")
        .replace("(a/Old.md#b", "(b%20c/New.md#b")
        .replace("<a/Old.md>", "<b c/New.md>")
        .replace("[[Old\\|x]]", "[[New\\|x]]")
        .replace("[[old.md]]", "[[New.md]]")
        .replace("[r]: a/Old.md", "[r]: b%20c/New.md");
    assert_eq!(world.content("Home.md"), wanted);
    assert_eq!(world.content("b c/New.md"), "[[#own]] [[New]] [s](../Home.md) [[Home]]");
    assert_eq!(answer["moved"], json!([{"from": "a/Old.md", "to": "b c/New.md"}]));
    assert_eq!(answer["updated"], json!([{"path": "Home.md", "links": 9}, {"path": "b c/New.md", "links": 1}]));
    assert_eq!((&answer["unresolved_before"], &answer["unresolved_after"]), (&json!(0), &json!(0)));
    assert_eq!(tree(&world.folder.path().join("state")).keys().filter(|name| name.ends_with(".plan")).count(), 0);
}

#[tokio::test]
async fn links_of_others_that_would_become_ambiguous_are_made_longer() {
    let world = VaultWorld::new();
    world.put("x/Note.md", "").put("Home.md", "[[Note]] [[Other]]").put("y/Other.md", "");
    world.answer("vault_move", json!({"path": "y/Other", "new_path": "Note"})).await;
    assert_eq!(world.content("Home.md"), "[[x/Note]] [[Note]]");
    world.answer("vault_move", json!({"path": "x/Note", "new_path": "x/Free"})).await;
    assert_eq!(world.content("Home.md"), "[[x/Free]] [[Note]]");
}

#[tokio::test]
async fn a_folder_moves_with_its_notes_and_pictures() {
    let world = VaultWorld::new();
    world
        .put("p/One.md", "[[Two]] ![[pic.png]] [h](../Home.md) [t](sub/Two.md)")
        .put("p/sub/Two.md", "[o](../One.md) [[p/One]]")
        .put("p/pic.png", "\0")
        .put("Home.md", "[[p/One]] ![](p/pic.png) [[One]]");
    let answer = world.answer("vault_move", json!({"path": "p", "new_path": "deep/er/q"})).await;
    assert_eq!(answer["moved"].as_array().unwrap().len(), 3);
    assert_eq!(world.content("deep/er/q/One.md"), "[[Two]] ![[pic.png]] [h](../../../Home.md) [t](sub/Two.md)");
    assert_eq!(world.content("deep/er/q/sub/Two.md"), "[o](../One.md) [[q/One]]");
    assert_eq!(world.content("Home.md"), "[[q/One]] ![](deep/er/q/pic.png) [[One]]");
    assert!(!world.path("p").exists());
}

#[tokio::test]
async fn a_dry_run_and_a_move_without_links_write_what_they_say() {
    let world = VaultWorld::new();
    world.put("a.md", "").put("Home.md", "[[a]]");
    let before = tree(&world.path(""));
    let answer = world.answer("vault_move", json!({"path": "a", "new_path": "b/", "dry_run": true})).await;
    assert_eq!((&answer["moved"], &answer["dry_run"]), (&json!([{"from": "a.md", "to": "b/a.md"}]), &json!(true)));
    let answer = world.answer("vault_move", json!({"path": "a", "new_path": "c", "dry_run": true})).await;
    assert_eq!(answer["updated"], json!([{"path": "Home.md", "links": 1}]));
    assert_eq!(tree(&world.path("")), before);
    let answer = world.answer("vault_move", json!({"path": "a", "new_path": "c", "update_links": false})).await;
    assert_eq!((&answer["unresolved_before"], &answer["unresolved_after"]), (&json!(0), &json!(1)));
    assert_eq!(world.content("Home.md"), "[[a]]");
}

#[tokio::test]
async fn moves_that_cannot_be_are_refused_and_change_nothing() {
    let world = VaultWorld::new();
    world.put("a.md", "").put("b.md", "").put("d/x.md", "").put("Home.md", "[[a]]");
    let before = tree(&world.path(""));
    for (from, to, told) in [
        ("a", "b", "E3303: there is already `b.md`"),
        ("a", "B", "E3303: there is already `b.md`"),
        ("a", "a.md", "E3303: `a.md` is there already"),
        ("none", "x", "E3302: there is no `none`"),
        ("d", "d/e", "E3303: `d/e` is inside `d`"),
        ("d", "b.md", "E3303: there is already `b.md`"),
        (".", "e", "E3302"),
        ("a", "x#y", "E3303: `x#y.md` has the character `#`"),
        ("a", "x/.hidden", "E3303: `.hidden.md` begins"),
        ("a", "b.md/x", "E3303: `b.md` is a file, not a folder"),
    ] {
        let refused = world.refusal("vault_move", json!({"path": from, "new_path": to})).await;
        assert!(
            refused.starts_with(told) || to == "x/.hidden" && refused.contains("begins with a dot"),
            "{from} {to}: {refused}"
        );
        assert_eq!(tree(&world.path("")), before, "{from} {to}");
    }
}

#[tokio::test]
async fn a_move_can_be_repeated_and_one_that_fails_changes_no_link() {
    let world = VaultWorld::new();
    world.put("a.md", "").put("Home.md", "[[a]]").put("locked/x.md", "");
    let locked = world.path("locked");
    let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    std::fs::set_permissions(&locked, mode(0o500)).unwrap();
    let result = world.call("vault_move", json!({"path": "a", "new_path": "locked/a"})).await;
    std::fs::set_permissions(&locked, mode(0o700)).unwrap();
    // The superuser may write everywhere.
    if !result.is_success() {
        assert_eq!(world.content("Home.md"), "[[a]]");
        assert_eq!(world.answer("vault_list", json!({})).await["total"], 3);
        world.answer("vault_move", json!({"path": "a", "new_path": "locked/a"})).await;
    }
    let before = tree(&world.path(""));
    let answer = world.answer("vault_move", json!({"path": "a", "new_path": "locked/a"})).await;
    assert_eq!((&answer["status"], &answer["moved"]), (&json!("ok"), &json!([])));
    assert_eq!(tree(&world.path("")), before);
}

#[tokio::test]
async fn a_session_that_knew_the_changed_notes_still_knows_them() {
    let world = VaultWorld::new();
    world.put("a.md", "text").put("Home.md", "[[a]]");
    world.answer("vault_read", json!({"path": "Home.md"})).await;
    world.answer("vault_read", json!({"path": "a.md"})).await;
    world.answer("vault_move", json!({"path": "a", "new_path": "b"})).await;
    world.answer("vault_write", json!({"path": "Home.md", "body": "x", "mode": "append"})).await;
    world.answer("vault_write", json!({"path": "b.md", "body": "x", "mode": "append"})).await;
    assert_eq!(world.stale(), []);
}
