//! Random moves on generated vaults leave the link graph as it was, and change no byte outside link targets.
//!
//! `WIELDY_TEST_MOVES` sets the number of moves.

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::json;

use super::{VaultWorld, tree};

/// A small generator of numbers, the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }

    fn of<'a>(&mut self, items: &[&'a str]) -> &'a str {
        items[self.roll(items.len())]
    }
}

const FOLDERS: [&str; 8] = ["", "a/", "a/b/", "c d/", "c d/e/", "ü/", "a&b/", "x (y)/"];
const NAMES: [&str; 10] = ["Note", "note 2", "Über", "U\u{308}ber2", "it's", "v1.2", "100%", "Tea (hot)", "a", "Index"];

/// Returns a random note with links of all kinds to these paths.
fn note(dice: &mut Dice, paths: &[String]) -> String {
    let eol = dice.of(&["\n", "\r\n"]);
    let target = |dice: &mut Dice, form: usize| {
        let path = &paths[dice.roll(paths.len())];
        let stem = path.trim_end_matches(".md");
        match form {
            0 => stem.to_owned(),
            1 => stem.rsplit('/').next().unwrap().to_owned(),
            2 => path.clone(),
            3 => path.rsplitn(3, '/').take(2).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("/"),
            _ => path.replace('%', "%25").replace(' ', "%20").replace('(', "%28").replace(')', "%29"),
        }
    };
    let mut lines = vec![dice.of(&["\u{FEFF}---", "---"]).to_owned()];
    let quoted = |text: String| text.replace('\'', "''");
    lines.push(format!("up: '[[{}|x]]'", quoted(target(dice, 0))));
    lines.push(format!("list: [\"[[{}]]\", other]", target(dice, 1)));
    lines.push("---".to_owned());
    for _ in 0..dice.roll(6) {
        let form = dice.roll(6);
        let path = target(dice, form.min(3));
        let encoded = target(dice, 4);
        let line = match form {
            0 => format!("- see [[{path}]] and [[{path}#A b|shown]]"),
            1 => format!("![[{path}]] `[[{path}]]` text"),
            2 => format!("| a |{eol}| --- |{eol}| [[{path}\\|t]] |{eol}"),
            3 => format!("[t](/{encoded} \"title\") [[missing-{}]]", dice.roll(9)),
            4 => format!("{eol}    [[{path}]]{eol}{eol}%%[[{path}]]%% [e](<{}>)", path.replace('%', "%25")),
            _ => format!("> [d](/{encoded}#h) [[#own]]{eol}"),
        };
        lines.push(line);
    }
    lines.join(eol) + dice.of(&["", eol])
}

/// Returns for each note the files that its links mean, by the position of files.
async fn graph(world: &VaultWorld, paths: &[String]) -> Vec<Vec<Option<usize>>> {
    let places: BTreeMap<&str, usize> = paths.iter().enumerate().map(|(place, path)| (path.as_str(), place)).collect();
    let mut graph = Vec::new();
    for path in paths {
        let answer = world.answer("vault_read", json!({"path": path})).await;
        assert_eq!(answer["path"], json!(path));
        let links = answer["links"].as_array().unwrap().iter();
        graph.push(links.map(|link| link["path"].as_str().map(|path| places[path])).collect());
    }
    graph
}

/// Returns a note without the targets of its links.
fn skeleton(content: &[u8]) -> String {
    let text = String::from_utf8(content.to_vec()).unwrap();
    let wiki = Regex::new(r"\[\[[^\]|#\\]*").unwrap();
    let markdown = Regex::new(r"\]\((<[^>#]*|[^)\s#]*)").unwrap();
    markdown.replace_all(&wiki.replace_all(&text, "[["), "](").into_owned()
}

// Shows: C6.6
#[tokio::test]
async fn random_moves_leave_the_link_graph_as_it_was() {
    let moves: usize = std::env::var("WIELDY_TEST_MOVES").ok().and_then(|count| count.parse().ok()).unwrap_or(40);
    let (mut done, mut seed) = (0, 0);
    while done < moves {
        seed += 1;
        let (mut dice, world) = (Dice(seed), VaultWorld::new());
        let mut paths: Vec<String> =
            FOLDERS.iter().flat_map(|folder| NAMES.map(|name| format!("{folder}{name}.md"))).collect();
        paths.retain(|_| dice.roll(4) == 0);
        let contents: Vec<String> = paths.iter().map(|_| note(&mut dice, &paths)).collect();
        paths.iter().zip(&contents).for_each(|(path, content)| {
            world.put(path, content);
        });
        let before = graph(&world, &paths).await;
        assert!(before.iter().flatten().flatten().count() > 10, "the vault has links");
        let bones: Vec<String> = contents.iter().map(|content| skeleton(content.as_bytes())).collect();
        for _ in 0..10 {
            let (from, to) = match dice.roll(4) {
                0 => (
                    dice.of(&FOLDERS[1..]).trim_end_matches('/').to_owned(),
                    format!("{}{}", dice.of(&FOLDERS), dice.of(&["m", "a", "n o"])),
                ),
                _ => (paths[dice.roll(paths.len())].clone(), format!("{}{}.md", dice.of(&FOLDERS), dice.of(&NAMES))),
            };
            let result = world.call("vault_move", json!({"path": from, "new_path": to})).await;
            if !result.is_success() {
                continue; // the place is taken
            }
            done += 1;
            for moved in result.structured.unwrap()["moved"].as_array().unwrap() {
                let place = paths.iter().position(|path| moved["from"] == json!(path)).unwrap();
                paths[place] = moved["to"].as_str().unwrap().to_owned();
            }
            let files = tree(&world.path(""));
            assert_eq!(files.len(), paths.len());
            assert_eq!(graph(&world, &paths).await, before, "seed {seed}: {from} to {to}");
            for (path, bones) in paths.iter().zip(&bones) {
                assert_eq!(skeleton(&files[path]), *bones, "seed {seed}: {path}");
            }
        }
    }
}
