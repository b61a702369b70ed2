//! `vault_read` and `vault_list`: notes by path, link and alias, their metadata, links and order.

use std::fs;

use serde_json::json;
use wieldy_core::{Caller, FileRules};

use super::{VaultWorld, hash};
use crate::world::refusal;

const NOTE: &str = "---\ntitle: Green tea\ntags: [drink]\naliases: [Sencha]\nsources: [\"https://tea.example\"]\nn: 3\n---\n\
                    # Tea\nSee [[Cup#Size]] and [[None]].\n\n## Brewing\nhot ^hot\n\n## End\n";

#[tokio::test]
async fn a_note_is_read_with_properties_links_and_backlinks() {
    let world = VaultWorld::new();
    world.put("Tea.md", NOTE).put("things/Cup.md", "# Size\nFor [[Tea]].\n");
    let answer = world.answer("vault_read", json!({"path": "Tea.md", "include": ["backlinks"]})).await;
    assert_eq!(answer["content"], json!(NOTE.split_once("---\n# ").map(|(_, body)| format!("# {body}")).unwrap()));
    let metadata = &answer["metadata"];
    assert_eq!(metadata["title"], "Green tea");
    assert_eq!(metadata["tags"], json!(["drink"]));
    assert_eq!(metadata["aliases"], json!(["Sencha"]));
    assert_eq!(metadata["sources"], json!(["https://tea.example"]));
    assert_eq!(metadata["properties"]["n"], json!(3));
    assert_eq!(metadata["hash"], json!(hash(NOTE)));
    assert!(metadata["modified"].as_str().unwrap().ends_with('Z'), "{metadata}");
    let links = json!([
        {"target": "Cup#Size", "line": 9, "resolved": true, "path": "things/Cup.md"},
        {"target": "None", "line": 9, "resolved": false},
    ]);
    assert_eq!(answer["links"], links);
    assert_eq!(answer["backlinks"], json!([{"path": "things/Cup.md", "title": "Size", "line": 2}]));
    assert!(answer.get("stale").is_none());
}

#[tokio::test]
async fn a_note_is_found_as_a_link_names_it() {
    let world = VaultWorld::new();
    world.put("Tea.md", NOTE).put("a/Twin.md", "one").put("b/Twin.md", "two").put("a#b.md", "odd").put("ä ö/Ü.md", "ü");
    for (path, found, content) in [
        ("Tea", "Tea.md", None),
        ("tea", "Tea.md", None),
        ("[[Tea|x]]", "Tea.md", None),
        ("sencha", "Tea.md", None),
        ("./Tea.md", "Tea.md", None),
        ("Tea#Brewing", "Tea.md", Some("## Brewing\nhot ^hot\n\n")),
        ("Tea#Tea#Brewing", "Tea.md", Some("## Brewing\nhot ^hot\n\n")),
        ("Tea#^hot", "Tea.md", Some("## Brewing\nhot ^hot")),
        ("Sencha^hot", "Tea.md", Some("## Brewing\nhot ^hot")),
        ("Twin", "a/Twin.md", Some("one")),
        ("b/twin", "b/Twin.md", Some("two")),
        ("a#b.md", "a#b.md", Some("odd")),
        ("u\u{308}", "ä ö/Ü.md", Some("ü")),
    ] {
        let answer = world.answer("vault_read", json!({"path": path})).await;
        assert_eq!(answer["path"], found, "{path}");
        if let Some(content) = content {
            assert_eq!(answer["content"], content, "{path}");
        }
        assert_eq!(answer.get("ambiguous").is_some(), path == "Twin", "{path}");
    }
    let absolute = world.path("Tea.md");
    assert_eq!(world.answer("vault_read", json!({"path": absolute})).await["path"], "Tea.md");
}

#[tokio::test]
async fn what_is_not_there_is_answered_with_what_is() {
    let world = VaultWorld::new();
    world.put("things/Cup.md", "# Size\n^b\ntext ^block\n").put("pic.png", "\0");
    for (path, told) in [
        ("Cupp", "E3302: there is no `Cupp`\n(did you mean `things/Cup`?)"),
        ("other/Cup.md", "E3302: there is no `other/Cup.md`\n(did you mean `things/Cup`?)"),
        ("Cup#Seize", "E3303: `things/Cup.md` has no heading `Seize`\n(its headings: `Size`)"),
        ("Cup#^nothing", "E3303: `things/Cup.md` has no block `nothing`\n(its blocks: b, block)"),
        (
            "pic.png",
            "E3303: `pic.png` is no note: the names of notes end in `.md`\n(give the path of a note; `vault_list` shows them)",
        ),
        ("Qqqq", "E3302: there is no `Qqqq`\n(look for it with `vault_search` or `vault_list`)"),
    ] {
        assert_eq!(world.refusal("vault_read", json!({"path": path})).await, told);
    }
}

#[tokio::test]
async fn a_reading_of_a_changed_note_says_so_once_with_both_hashes() {
    let world = VaultWorld::new();
    world.put("a.md", "1\n");
    let read = json!({"path": "a.md"});
    assert!(world.answer("vault_read", read.clone()).await.get("stale").is_none());
    world.put("a.md", "2\n");
    let result = world.call("vault_read", read.clone()).await;
    assert_eq!(result.text(), "2\n\n[the note changed since this session last read or wrote it]");
    let wanted = json!({"previous_hash": hash("1\n"), "current_hash": hash("2\n")});
    assert_eq!(result.structured.unwrap()["stale"], wanted);
    let reported = ("notes/a.md".into(), Some("default".into()), hash("1\n"), Some(hash("2\n")));
    assert_eq!(world.stale(), [reported]);
    assert!(world.answer("vault_read", read).await.get("stale").is_none());
}

#[tokio::test]
async fn a_change_of_a_stale_note_is_refused_and_edit_and_vault_write_know_of_each_other() {
    let world = VaultWorld::new();
    world.put("a.md", "1\n");
    let write = json!({"path": "a.md", "body": "3\n"});
    for mode in ["replace", "append", "prepend"] {
        world.answer("vault_read", json!({"path": "a.md"})).await;
        world.put("a.md", format!("2 {mode}\n"));
        let refused = world.refusal("vault_write", json!({"path": "a.md", "body": "x", "mode": mode})).await;
        assert!(refused.starts_with("E3303: `notes/a.md` changed since it was last read"), "{refused}");
        assert_eq!(world.content("a.md"), format!("2 {mode}\n"));
    }
    let refused = world.refusal("vault_move", json!({"path": "a.md", "new_path": "b.md"})).await;
    assert!(refused.starts_with("E3303: `notes/a.md` changed"), "{refused}");
    // The workspace's own tools have the same marks.
    world.call("Read", json!({"path": "notes/a.md"})).await;
    world.answer("vault_write", write.clone()).await;
    let edit = json!({"path": "notes/a.md", "old": "3", "new": "4"});
    assert!(world.call("Edit", edit).await.is_success(), "its own change is known");
    assert!(world.call("vault_write", write).await.is_success(), "its own change is known");
    let bob = Caller { session: Some("bob".into()), ..Caller::local() };
    world.by(bob.clone(), "vault_read", json!({"path": "a.md"})).await;
    world.answer("vault_write", json!({"path": "a.md", "body": "5\n"})).await;
    let edit = json!({"path": "notes/a.md", "old": "5", "new": "6"});
    assert!(refusal(&world.by(bob, "Edit", edit).await).contains("changed since it was last read"));
}

// Shows: C6.5
#[tokio::test]
async fn notes_are_listed_with_titles_tags_and_numbers_of_links() {
    let world = VaultWorld::new();
    world
        .put("Tea.md", NOTE)
        .put("things/Cup.md", "#drink/hot [[Tea]] [[Tea]]")
        .put("things/deep/x.md", "")
        .put(".hidden/h.md", "");
    let answer = world.answer("vault_list", json!({})).await;
    let shown =
        |key: &str| answer["notes"].as_array().unwrap().iter().map(|note| note[key].clone()).collect::<Vec<_>>();
    assert_eq!(json!(shown("path")), json!(["Tea.md", "things/Cup.md", "things/deep/x.md"]));
    assert_eq!(json!(shown("title")), json!(["Green tea", "Cup", "x"]));
    assert_eq!(json!(shown("links_in")), json!([2, 1, 0]));
    assert_eq!(json!(shown("links_out")), json!([2, 2, 0]));
    assert_eq!(json!(shown("bytes")), json!([NOTE.len(), 26, 0]));
    assert_eq!(answer["folders"], json!(["things", "things/deep"]));
    let paths = async |arguments| {
        let answer = world.answer("vault_list", arguments).await;
        answer["notes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|note| note["path"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(paths(json!({"folder": "things", "depth": 1})).await, ["things/Cup.md"]);
    assert_eq!(paths(json!({"tag": "#Drink"})).await, ["Tea.md", "things/Cup.md"]);
    assert_eq!(paths(json!({"tag": "drink/hot"})).await, ["things/Cup.md"]);
    let old = fs::File::options().write(true).open(world.path("Tea.md")).unwrap();
    old.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(paths(json!({"sort": "modified"})).await.last().unwrap(), "Tea.md");
    let refused = world.refusal("vault_list", json!({"folder": "thing"})).await;
    assert_eq!(refused, "E3302: there is no `thing/`\n(did you mean `things` or `things/deep`?)");
    assert!(world.refusal("vault_list", json!({"cursor": "x"})).await.starts_with("E3303: `x` is no cursor"));
}

#[tokio::test]
async fn a_long_list_comes_in_pages() {
    let world = VaultWorld::new();
    for number in 0..450 {
        world.put(&format!("n{number:03}.md"), "x");
    }
    let (mut seen, mut cursor) = (Vec::new(), None);
    loop {
        let answer = world.answer("vault_list", json!({"cursor": cursor.clone().unwrap_or("0".to_owned())})).await;
        seen.extend(answer["notes"].as_array().unwrap().iter().map(|note| note["path"].as_str().unwrap().to_owned()));
        cursor = answer["cursor"].as_str().map(str::to_owned);
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(seen, (0..450).map(|number| format!("n{number:03}.md")).collect::<Vec<_>>());
}

#[tokio::test]
async fn hostile_front_matter_costs_its_properties_and_nothing_else() {
    let world = VaultWorld::with(|_| {}, FileRules::default());
    let bomb = "---\na: &a [x,x,x]\nb: [*a,*a]\n---\n";
    let deep = format!("---\na: {}{}\n---\n", "[".repeat(4000), "]".repeat(4000));
    let large = format!("---\n{}---\n", "key: value\n".repeat(100_000));
    for (name, head) in [("bomb", bomb), ("deep", &deep), ("large", &large), ("open", "---\na: [\n---\n")] {
        world.put("n.md", format!("{head}text [[n]] of {name}\n"));
        let answer = world.answer("vault_read", json!({"path": "n.md"})).await;
        assert_eq!(answer["content"], json!(format!("text [[n]] of {name}\n")));
        assert_eq!(answer["metadata"]["properties"], json!({}));
        assert!(answer["metadata"]["problem"].as_str().unwrap().starts_with("the front matter "), "{name}");
        let refused = world.refusal("vault_write", json!({"path": "n.md", "body": "x", "title": "t"})).await;
        assert!(refused.starts_with("E3303: the properties of `n.md` cannot be changed"), "{refused}");
        world.answer("vault_write", json!({"path": "n.md", "body": "x\n", "mode": "append"})).await;
        assert_eq!(world.content("n.md"), format!("{head}text [[n]] of {name}\nx\n"));
    }
}
