//! `vault_search`: the language of queries, the order of results, and fresh answers.

use serde_json::json;

use super::VaultWorld;

fn world() -> VaultWorld {
    let world = VaultWorld::new();
    world
        .put("tea/Green tea.md", "---\ntags: [drink/hot]\nstatus: in work\nyear: 2024\n---\n# Steps\nBoil water.\n\n## Leaves\nUse snake_case leaves.\n")
        .put("Coffee.md", "---\ntags: drink\n---\nNo green leaves, and no tea. Water is hot water.\n")
        .put("Cafe\u{301}.md", "Ein Cafe\u{301} in Ko\u{308}ln. U\u{308}ber alles.\n")
        .put("zh.md", "我喜欢绿茶和咖啡\n")
        .put("log.md", "filler words here\n".repeat(200))
        .put("pic.png", "green tea");
    world
}

// Shows: C6.5
#[tokio::test]
async fn queries_find_what_they_say() {
    let world = world();
    for (query, wanted) in [
        ("water", &["Coffee.md", "tea/Green tea.md"][..]),
        ("WATER boil", &["tea/Green tea.md"]),
        ("green tea", &["tea/Green tea.md", "Coffee.md"]),
        ("\"green leaves\"", &["Coffee.md"]),
        ("\"leaves green\"", &[]),
        ("tag:drink", &["Coffee.md", "tea/Green tea.md"]),
        ("tag:#drink/hot", &["tea/Green tea.md"]),
        ("tag:drin", &[]),
        ("water -tag:drink/hot", &["Coffee.md"]),
        ("water -boil", &["Coffee.md"]),
        ("path:TEA/", &["tea/Green tea.md"]),
        ("status:\"in work\"", &["tea/Green tea.md"]),
        ("year:2024 water", &["tea/Green tea.md"]),
        ("year:202", &[]),
        ("snake", &["tea/Green tea.md"]),
        ("café", &["Cafe\u{301}.md"]),
        ("über köln", &["Cafe\u{301}.md"]),
        ("绿茶", &["zh.md"]),
        ("茶绿", &[]),
        ("nothing", &[]),
    ] {
        let answer = world.answer("vault_search", json!({"query": query})).await;
        let found: Vec<&str> =
            answer["results"].as_array().unwrap().iter().map(|note| note["path"].as_str().unwrap()).collect();
        assert_eq!(found, wanted, "{query}");
        assert_eq!(answer["total"], json!(wanted.len()), "{query}");
        assert_eq!(answer["matched"], "all", "{query}");
    }
}

#[tokio::test]
async fn a_result_shows_the_line_that_fits_best_and_where_it_stands() {
    let world = world();
    let answer = world.answer("vault_search", json!({"query": "leaves snake"})).await;
    let score = answer["results"][0]["score"].clone();
    let wanted = json!([{
        "path": "tea/Green tea.md", "title": "Steps", "score": score, "snippet": "Use snake_case leaves.",
        "heading": "Leaves", "line": 10, "tags": ["drink/hot"],
    }]);
    assert_eq!(answer["results"], wanted);
    let result = world.call("vault_search", json!({"query": "boil filler"})).await;
    assert!(result.text().starts_with("[no note has all of the words; these have some]\n"), "{}", result.text());
    assert_eq!(result.structured.unwrap()["matched"], "any");
}

// Shows: C6.2
#[tokio::test]
async fn an_answer_is_never_older_than_the_last_change() {
    let world = world();
    let total = async |query: &str| world.answer("vault_search", json!({"query": query})).await["total"].clone();
    assert_eq!(total("zebra").await, 0);
    for round in 0..5 {
        world.put("Coffee.md", format!("zebra {round}"));
        assert_eq!((total("zebra").await, total("hot -path:tea").await), (json!(1), json!(0)));
        world.put("Coffee.md", "zebro hot");
        assert_eq!((total("zebra").await, total("hot -path:tea").await), (json!(0), json!(1)));
        std::fs::rename(world.path("Coffee.md"), world.path(&format!("c{round}.md"))).unwrap();
        assert_eq!(total("path:coffee").await, 0);
        std::fs::rename(world.path(&format!("c{round}.md")), world.path("Coffee.md")).unwrap();
    }
}

#[tokio::test]
async fn results_come_in_pages_and_from_one_folder() {
    let world = VaultWorld::new();
    for number in 0..30 {
        world.put(&format!("{}/n{number}.md", number % 2), "same words");
    }
    let answer = world.answer("vault_search", json!({"query": "same", "limit": 10})).await;
    assert_eq!((answer["total"].clone(), answer["cursor"].clone()), (json!(30), json!("10")));
    let last = world.answer("vault_search", json!({"query": "same", "limit": 10, "cursor": "20"})).await;
    assert_eq!((last["results"].as_array().unwrap().len(), last.get("cursor")), (10, None));
    assert_eq!(world.answer("vault_search", json!({"query": "same", "folder": "1"})).await["total"], 15);
}

#[tokio::test]
async fn hostile_queries_are_answered_or_refused_in_bounds() {
    let world = world();
    for query in
        ["-", "\"", "tag:", ":", "a ".repeat(500).as_str(), "((((", "*:*", "\\u0000", "-\"", "path:\"", "'; drop"]
    {
        let result = world.call("vault_search", json!({"query": query})).await;
        assert!(
            result.is_success() || result.error.as_ref().unwrap().code.as_str() == "E3303",
            "{query}: {:?}",
            result.error
        );
    }
    let long = world.refusal("vault_search", json!({"query": "x".repeat(1001)})).await;
    assert!(long.starts_with("E3002"), "{long}");
}
