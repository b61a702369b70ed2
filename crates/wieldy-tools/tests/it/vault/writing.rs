//! `vault_write` and `vault_create_index`: parts of notes, kept bytes, index pages.

use serde_json::{Value, json};

use super::VaultWorld;

const HEAD: &str = "\u{FEFF}---\r\n# mine\r\nb:   2 # two\r\na: [x,  y]\r\n---\r\n";

// Shows: C6.5
#[tokio::test]
async fn each_mode_changes_its_part_and_no_other_byte() {
    let old = format!("{HEAD}# One\r\n\r\nfirst\r\n\r\n## Sub\r\nsub\r\n\r\n# Two\r\nlast");
    for (mode, heading, body, wanted) in [
        ("append", Value::Null, "x\ny\n", format!("{old}\r\nx\r\ny\r\n")),
        ("prepend", Value::Null, "x", old.replace("# One", "x\r\n# One")),
        ("replace", Value::Null, "all\n", format!("{HEAD}all\r\n")),
        ("section", json!("One#Sub"), "new\nlines\n", old.replace("sub\r\n\r\n", "new\r\nlines\r\n\r\n")),
        ("section", json!("one"), "new", old.replace("\r\nfirst\r\n\r\n## Sub\r\nsub\r\n\r\n", "\r\nnew\r\n\r\n")),
        ("section", json!("Two"), "new", old.replace("last", "new\r\n")),
    ] {
        let world = VaultWorld::new();
        world.put("n.md", &old);
        let mut arguments = json!({"path": "n", "mode": mode, "body": body});
        if !heading.is_null() {
            arguments["heading"] = heading.clone();
        }
        let answer = world.answer("vault_write", arguments).await;
        assert_eq!(world.content("n.md"), wanted, "{mode} {heading}");
        assert_eq!(
            (&answer["status"], &answer["created"], &answer["path"]),
            (&json!("ok"), &json!(false), &json!("n.md"))
        );
        assert_eq!(answer["hash"], json!(super::hash(&wanted)));
        assert_eq!(answer["bytes"], json!(wanted.len()));
    }
}

#[tokio::test]
async fn properties_are_set_one_by_one_and_the_rest_stays() {
    let world = VaultWorld::new();
    world.put("n.md", format!("{HEAD}body"));
    let properties = json!({"b": 3, "new": ["p", "q: r"], "gone": null});
    world.answer("vault_write", json!({"path": "n.md", "mode": "append", "body": "", "properties": properties})).await;
    let head = HEAD.replace("b:   2 # two", "b: 3 # two").replace("---\r\n\u{0}", "");
    let wanted = head.replace("a: [x,  y]\r\n", "a: [x,  y]\r\nnew:\r\n  - p\r\n  - \"q: r\"\r\n") + "body\r\n";
    assert_eq!(world.content("n.md"), wanted);
    // The front matter of a body sets properties, and those that it does not name are kept.
    let body = "---\na: z\n---\nother\n";
    world.answer("vault_write", json!({"path": "n.md", "body": body})).await;
    let wanted = wanted.replace("a: [x,  y]", "a: z").replace("body\r\n", "other\r\n");
    assert_eq!(world.content("n.md"), wanted);
    let bad = json!({"path": "n.md", "body": "", "properties": {"a\nb": 1}});
    assert!(world.refusal("vault_write", bad).await.starts_with("E3303: `a\\nb` cannot be the name of a property"));
    assert_eq!(world.content("n.md"), wanted);
}

#[tokio::test]
async fn a_new_note_gets_its_title_and_tells_of_links_to_nowhere() {
    let world = VaultWorld::new();
    world.put("There.md", "");
    let arguments = json!({"path": "new/Note", "body": "[[There]] [[Missing]] [[new/note]] [[Missing]]\n", "title": "A: b",
                           "properties": {"sources": ["https://a.example"]}});
    let answer = world.answer("vault_write", arguments).await;
    let wanted = "---\nsources:\n  - \"https://a.example\"\ntitle: \"A: b\"\n---\n[[There]] [[Missing]] [[new/note]] [[Missing]]\n";
    assert_eq!(world.content("new/Note.md"), wanted);
    assert_eq!(answer["created"], json!(true));
    assert_eq!(answer["links_unresolved"], json!(["Missing"]));
    assert!(answer["diff"].as_str().unwrap().contains("+title: \"A: b\""), "{answer}");
    let read = world.answer("vault_read", json!({"path": "new/Note.md"})).await;
    assert_eq!(read["metadata"]["sources"], json!(["https://a.example"]));
    assert_eq!(read["metadata"]["title"], json!("A: b"));
}

#[tokio::test]
async fn a_note_whose_name_differs_only_in_form_is_the_same_note() {
    let world = VaultWorld::new();
    world.put("Cafe\u{301}.md", "old");
    let answer = world.answer("vault_write", json!({"path": "café.md", "body": "new"})).await;
    assert_eq!(answer["path"], json!("Cafe\u{301}.md"));
    assert_eq!(world.content("Cafe\u{301}.md"), "new");
    let refused = world.refusal("vault_write", json!({"path": "CAFÉ", "body": "x", "mode": "create"})).await;
    assert!(refused.starts_with("E3303: there is already a note `Cafe\u{301}.md`"), "{refused}");
}

#[tokio::test]
async fn writes_that_cannot_be_meant_are_refused_with_what_is_possible() {
    let world = VaultWorld::new();
    world.put("n.md", "# One\ntext\n");
    for (arguments, told) in [
        (
            json!({"path": "n", "body": "", "mode": "section"}),
            "E3303: `heading` and the mode `section` belong together",
        ),
        (json!({"path": "n", "body": "", "heading": "One"}), "E3303: `heading` and the mode `section` belong together"),
        (
            json!({"path": "n", "body": "", "mode": "section", "heading": "Two"}),
            "E3303: `n.md` has no heading `Two`\n(its headings: `One`)",
        ),
        (json!({"path": "m", "body": "", "mode": "section", "heading": "One"}), "E3302: there is no `m.md`"),
        (json!({"path": "n", "body": "", "mode": "create"}), "E3303: there is already a note `n.md`"),
        (json!({"path": "a#b", "body": ""}), "E3303: `a#b.md` has the character `#`"),
        (json!({"path": "a|b", "body": ""}), "E3303: `a|b.md` has the character `|`"),
        (json!({"path": "dir/", "body": ""}), "E3303: `dir/` is a folder, not a file"),
        (json!({"path": ".", "body": ""}), "E3303: `.` is a folder, not a file"),
        (json!({"path": "a\nb", "body": ""}), "E3303: the path holds the character"),
        (json!({"path": "n", "body": "", "if_hash": "00"}), "E3303: `n.md` is not what was expected"),
        (json!({"path": "m", "body": "", "if_hash": "00"}), "E3303: `m.md` is not what was expected: it is not there"),
        (json!({"path": "n", "body": "", "mode": "over"}), "E3002"),
    ] {
        let refused = world.refusal("vault_write", arguments.clone()).await;
        assert!(refused.starts_with(told), "{arguments}: {refused}");
    }
    assert_eq!(super::tree(&world.path("")).len(), 1);
    assert_eq!(world.content("n.md"), "# One\ntext\n");
    let hash = super::hash("# One\ntext\n");
    world.answer("vault_write", json!({"path": "n", "body": "ok", "if_hash": hash})).await;
}

#[tokio::test]
async fn a_note_in_another_encoding_is_not_broken() {
    let world = VaultWorld::new();
    world.put("n.md", b"caf\xE9\n");
    let refused = world.refusal("vault_write", json!({"path": "n", "body": "ü", "mode": "append"})).await;
    assert!(refused.starts_with("E3303: `n.md` is not UTF-8"), "{refused}");
    world.answer("vault_write", json!({"path": "n", "body": "plain\n", "mode": "append"})).await;
    assert_eq!(std::fs::read(world.path("n.md")).unwrap(), b"caf\xE9\nplain\n");
}

#[tokio::test]
async fn two_writers_lose_no_text() {
    let world = std::sync::Arc::new(VaultWorld::new());
    world.put("n.md", "");
    let writers = (0..4).map(|writer| {
        let world = world.clone();
        tokio::spawn(async move {
            for number in 0..20 {
                let line = json!({"path": "n", "mode": "append", "body": format!("{writer}-{number}\n")});
                let session =
                    wieldy_core::Caller { session: Some(format!("{writer}-{number}")), ..wieldy_core::Caller::local() };
                assert!(world.by(session, "vault_write", line).await.is_success());
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    let mut lines: Vec<String> = world.content("n.md").lines().map(str::to_owned).collect();
    lines.sort();
    let mut wanted: Vec<String> =
        (0..4).flat_map(|writer| (0..20).map(move |number| format!("{writer}-{number}"))).collect();
    wanted.sort();
    assert_eq!(lines, wanted);
}

#[tokio::test]
async fn an_index_page_keeps_what_people_wrote_and_is_written_only_when_it_changes() {
    let world = VaultWorld::new();
    world.put("p/b.md", "---\ntitle: Bee\ntags: [x]\n---\n").put("p/A.md", "").put("p/sub/c.md", "").put("q/A.md", "");
    let page = |entries: &str| format!("<!-- wieldy:index -->\n\n{entries}\n\n<!-- /wieldy:index -->");
    let answer = world.answer("vault_create_index", json!({"folder": "p"})).await;
    assert_eq!(
        (&answer["path"], &answer["entries"], &answer["unchanged"]),
        (&json!("p/index.md"), &json!(3), &json!(false))
    );
    let entries = "- [[p/A|A]]\n- [[b|Bee]]\n- sub/\n  - [[c]]";
    assert_eq!(world.content("p/index.md"), format!("# p\n\n{}\n", page(entries)));
    let before = std::fs::metadata(world.path("p/index.md")).unwrap().modified().unwrap();
    let answer = world.answer("vault_create_index", json!({"folder": "p"})).await;
    assert_eq!(answer["unchanged"], json!(true));
    assert_eq!(std::fs::metadata(world.path("p/index.md")).unwrap().modified().unwrap(), before, "it is not written");

    let own = format!("Mine\r\n\r\n{}\r\nAfter", page("old").replace('\n', "\r\n"));
    world.put("Map.md", &own);
    let arguments = json!({"folder": "p", "path": "Map", "style": "table", "depth": 1});
    assert_eq!(world.answer("vault_create_index", arguments).await["entries"], json!(3));
    let table = "| Note | Folder | Tags |\n| --- | --- | --- |\n| [[p/A\\|A]] |  |  |\n| [[b\\|Bee]] |  | #x |\n| [[index\\|p]] |  |  |";
    assert_eq!(world.content("Map.md"), own.replace("old", &table.replace('\n', "\r\n")));

    world.put("Plain.md", "no markers");
    world.answer("vault_create_index", json!({"folder": "p", "path": "Plain.md", "style": "moc"})).await;
    let map = "- [[p/A|A]]\n- [[b|Bee]]\n- [[index|p]]\n\n## sub\n\n- [[c]]";
    assert_eq!(world.content("Plain.md"), format!("no markers\n\n{}\n", page(map)));

    world.put("Torn.md", "<!-- wieldy:index --> x");
    let refused = world.refusal("vault_create_index", json!({"path": "Torn.md"})).await;
    assert!(refused.starts_with("E3303: `Torn.md` has `<!-- wieldy:index -->` without"), "{refused}");
    assert!(world.refusal("vault_create_index", json!({"folder": "r"})).await.starts_with("E3302"));
}
