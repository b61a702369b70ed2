//! A vault of ten thousand notes: answers are whole, and a move changes every link to the note.

use serde_json::json;

use super::VaultWorld;

const NOTES: usize = 10_000;
const LINKS_IN: usize = 1_000;

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_notes_are_searched_listed_and_moved() {
    let world = VaultWorld::new();
    world.put("hub/Hub.md", "the centre");
    for number in 0..NOTES - 1 {
        let link = if number < LINKS_IN { "[[Hub]]".to_owned() } else { format!("[[n{}]]", (number + 7) % NOTES) };
        world.put(&format!("f{}/n{number}.md", number % 50), format!("# Note {number}\nword{number} common {link}\n"));
    }
    let call = |arguments| world.answer("vault_search", arguments);
    assert_eq!(call(json!({"query": "common"})).await["total"], NOTES - 1);
    assert_eq!(call(json!({"query": "word7777"})).await["results"][0]["path"], "f27/n7777.md");
    let list = world.answer("vault_list", json!({"folder": "hub"})).await;
    assert_eq!(list["notes"][0]["links_in"], LINKS_IN);
    assert_eq!(list["index"]["files"], NOTES);
    let answer = world.answer("vault_move", json!({"path": "hub/Hub", "new_path": "hub/Centre"})).await;
    assert_eq!(answer["updated"].as_array().unwrap().len(), LINKS_IN);
    assert_eq!(call(json!({"query": "\"common [[Centre]]\"", "limit": 100})).await["total"], LINKS_IN);
}
