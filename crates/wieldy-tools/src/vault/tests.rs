//! Obsidian's link rules as a table: what is a link, and the file that it means.

use std::sync::Arc;

use super::graph::resolved;
use super::markdown::NoteFacts;
use super::names::Names;
use super::rewrite::{Edit, applied, undone, with_old};

const FILES: [&str; 26] = [
    "Home.md",
    "Target.md",
    "a/Note.md",
    "a/sub/Deep.md",
    "a/sub/Note.md",
    "a/v1.2.md",
    "b/Note.md",
    "b/sub/Deep.md",
    "c/Only.md",
    "c/d/Twice.md",
    "e/d/Twice.md",
    "img/pic 1.png",
    "img/pic.png",
    "Über.md",
    "u/Cafe\u{301}.md",
    "x/y/Target.md",
    "x/100%.md",
    "x/a (b).md",
    "x/a&b.md",
    "x/it's.md",
    "plain",
    "plain.md",
    "Case.md",
    "case.md",
    "canvas.canvas",
    "z/Zed.MD",
];

/// A text in a note, and its links: the path as it is meant, and the file, with `?` where it is ambiguous.
type Case = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

const NOWHERE: &str = "";

const WIKILINKS: &[Case] = &[
    ("Home.md", "[[Only]]", &[("Only", "c/Only.md")]),
    ("Home.md", "[[only]]", &[("only", "c/Only.md")]),
    ("Home.md", "[[Only.md]]", &[("Only.md", "c/Only.md")]),
    ("Home.md", "[[c/Only]]", &[("c/Only", "c/Only.md")]),
    ("Home.md", "[[C/ONLY.MD]]", &[("C/ONLY.MD", "c/Only.md")]),
    ("Home.md", "[[Only|shown]]", &[("Only", "c/Only.md")]),
    ("Home.md", "[[ Only | shown ]]", &[("Only", "c/Only.md")]),
    ("Home.md", "[[Only|a|b]]", &[("Only", "c/Only.md")]),
    ("Home.md", "![[Only]]", &[("Only", "c/Only.md")]),
    ("Home.md", "![[pic.png|100]]", &[("pic.png", "img/pic.png")]),
    ("Home.md", "[[pic 1.png]]", &[("pic 1.png", "img/pic 1.png")]),
    ("Home.md", "[[pic]]", &[("pic", NOWHERE)]),
    ("Home.md", "[[Only#Heading]]", &[("Only", "c/Only.md")]),
    ("Home.md", "[[Only#A#B|c]]", &[("Only", "c/Only.md")]),
    ("Home.md", "[[Only#^block]]", &[("Only", "c/Only.md")]),
    ("a/Note.md", "[[#Heading]]", &[("", "a/Note.md")]),
    ("a/Note.md", "[[#^block]]", &[("", "a/Note.md")]),
    ("Home.md", "[[None]]", &[("None", NOWHERE)]),
    ("Home.md", "[[wrong/Only]]", &[("wrong/Only", NOWHERE)]),
    ("Home.md", "[[nly]]", &[("nly", NOWHERE)]),
    // Exact path, then the end of a path, then the name; the shortest path, the nearest, the first by name.
    ("x/y/Target.md", "[[Target]]", &[("Target", "Target.md")]),
    ("Home.md", "[[y/Target]]", &[("y/Target", "x/y/Target.md")]),
    ("Home.md", "[[Note]]", &[("Note", "a/Note.md?")]),
    ("b/sub/Deep.md", "[[Note]]", &[("Note", "b/Note.md?")]),
    ("Home.md", "[[sub/Note]]", &[("sub/Note", "a/sub/Note.md")]),
    ("Home.md", "[[Deep]]", &[("Deep", "a/sub/Deep.md?")]),
    ("b/Note.md", "[[Deep]]", &[("Deep", "b/sub/Deep.md?")]),
    ("Home.md", "[[d/Twice]]", &[("d/Twice", "c/d/Twice.md?")]),
    ("e/x.md", "[[d/Twice]]", &[("d/Twice", "e/d/Twice.md?")]),
    ("Home.md", "[[/a/Note]]", &[("/a/Note", "a/Note.md")]),
    ("Home.md", "[[/Note]]", &[("/Note", NOWHERE)]),
    ("a/sub/Deep.md", "[[../Note]]", &[("../Note", "a/Note.md")]),
    ("a/sub/Deep.md", "[[./Note]]", &[("./Note", "a/sub/Note.md")]),
    ("Home.md", "[[../Note]]", &[("../Note", NOWHERE)]),
    ("Home.md", "[[v1.2]]", &[("v1.2", "a/v1.2.md")]),
    ("Home.md", "[[plain]]", &[("plain", "plain.md")]),
    ("Home.md", "[[canvas.canvas]]", &[("canvas.canvas", "canvas.canvas")]),
    ("Home.md", "[[Zed]]", &[("Zed", "z/Zed.MD")]),
    // One Unicode form, in both directions; files that differ in case only.
    ("Home.md", "[[U\u{308}ber]]", &[("U\u{308}ber", "Über.md")]),
    ("Home.md", "[[ÜBER]]", &[("ÜBER", "Über.md")]),
    ("Home.md", "[[Café]]", &[("Café", "u/Cafe\u{301}.md")]),
    ("Home.md", "[[case]]", &[("case", "case.md")]),
    ("Home.md", "[[Case]]", &[("Case", "Case.md")]),
    ("Home.md", "[[CASE]]", &[("CASE", "Case.md?")]),
    // Several links, and links in structures.
    ("Home.md", "[[Only]][[Target]]", &[("Only", "c/Only.md"), ("Target", "Target.md")]),
    ("Home.md", "- [ ] [[Only]]\n> [[Target]]", &[("Only", "c/Only.md"), ("Target", "Target.md")]),
    ("Home.md", "# About [[Only]]", &[("Only", "c/Only.md")]),
    ("Home.md", "**[[Only]]** ~~[[Target]]~~", &[("Only", "c/Only.md"), ("Target", "Target.md")]),
    ("Home.md", "| a |\n| --- |\n| [[Only\\|shown]] |", &[("Only", "c/Only.md")]),
    ("Home.md", "text[^1]\n\n[^1]: [[Only]]", &[("Only", "c/Only.md")]),
    ("Home.md", "[[it's]]", &[("it's", "x/it's.md")]),
    ("Home.md", "[[a&b]]", &[("a&b", "x/a&b.md")]),
    ("Home.md", "[[100%]]", &[("100%", "x/100%.md")]),
];

const NO_LINKS: &[Case] = &[
    ("Home.md", "`[[Only]]`", &[]),
    ("Home.md", "``[[Only]] ` ``", &[]),
    ("Home.md", "```\n[[Only]]\n```", &[]),
    ("Home.md", "~~~md\n[[Only]](x.md)\n~~~", &[]),
    ("Home.md", "text\n\n    [[Only]]\n", &[]),
    ("Home.md", "%%[[Only]]%% [[Target]]", &[("Target", "Target.md")]),
    ("Home.md", "%%\n[[Only]]\n\n- [[Only]]\n%%\n\n[[Target]]", &[("Target", "Target.md")]),
    ("Home.md", "[[Target]]\n\n%%\n[[Only]]", &[("Target", "Target.md")]),
    ("Home.md", "50%% of [[Only]]", &[("Only", "c/Only.md")]),
    ("Home.md", "`%%` [[Only]] `%%`", &[("Only", "c/Only.md")]),
    ("Home.md", "<!-- [[Only]] -->", &[]),
    ("Home.md", "$[[Only]]$", &[]),
    ("Home.md", "$$\n[[Only]]\n$$", &[]),
    ("Home.md", "\\[[Only]]", &[]),
    ("Home.md", "[[]]", &[]),
    ("Home.md", "[[Only", &[]),
    ("Home.md", "[Only]", &[]),
];

const MARKDOWN: &[Case] = &[
    ("Home.md", "[x](c/Only.md)", &[("c/Only.md", "c/Only.md")]),
    ("Home.md", "[x](Only.md)", &[("Only.md", "c/Only.md")]),
    ("Home.md", "[x](Only)", &[("Only", "c/Only.md")]),
    ("a/sub/Deep.md", "[x](../Note.md)", &[("../Note.md", "a/Note.md")]),
    // The path begins at the folder of the note.
    ("x/y/z.md", "[x](Target.md)", &[("Target.md", "x/y/Target.md")]),
    ("x/y/z.md", "[x](/Target.md)", &[("/Target.md", "Target.md")]),
    ("Home.md", "[x](img/pic%201.png)", &[("img/pic 1.png", "img/pic 1.png")]),
    ("Home.md", "![x](<img/pic 1.png>)", &[("img/pic 1.png", "img/pic 1.png")]),
    ("Home.md", "[x](c/Only.md#Some%20heading \"title\")", &[("c/Only.md", "c/Only.md")]),
    ("a/Note.md", "[x](#heading)", &[("", "a/Note.md")]),
    ("Home.md", "[x](x/a%20%28b%29.md)", &[("x/a (b).md", "x/a (b).md")]),
    ("Home.md", "[x](<x/a (b).md>)", &[("x/a (b).md", "x/a (b).md")]),
    ("Home.md", "[x](x/100%25.md)", &[("x/100%.md", "x/100%.md")]),
    ("Home.md", "[x](%C3%9Cber.md)", &[("Über.md", "Über.md")]),
    ("Home.md", "[a [b] `c`](c/Only.md)", &[("c/Only.md", "c/Only.md")]),
    ("Home.md", "[![x](img/pic.png)](c/Only.md)", &[("img/pic.png", "img/pic.png"), ("c/Only.md", "c/Only.md")]),
    ("Home.md", "[x][ref]\n\n[ref]: c/Only.md \"t\"", &[("c/Only.md", "c/Only.md")]),
    ("Home.md", "[](c/Only.md)", &[("c/Only.md", "c/Only.md")]),
    ("Home.md", "[x](https://a.b/c.md) <https://a.b> [y](mailto:a@b.c)", &[]),
    ("Home.md", "[x]()", &[]),
    ("Home.md", "`[x](c/Only.md)`", &[]),
    ("Home.md", "[x](none.md)", &[("none.md", NOWHERE)]),
    ("Home.md", "[x](../c/Only.md)", &[("../c/Only.md", NOWHERE)]),
];

const PROPERTIES: &[Case] = &[
    ("Home.md", "---\nup: \"[[Only]]\"\n---\n", &[("Only", "c/Only.md")]),
    (
        "Home.md",
        "---\nup:\n  - '[[Only|x]]'\n  - \"[[Target#a]]\"\n---\n",
        &[("Only", "c/Only.md"), ("Target", "Target.md")],
    ),
    ("Home.md", "---\nup: [\"[[Only]]\", \"[[Target]]\"]\n---\n", &[("Only", "c/Only.md"), ("Target", "Target.md")]),
    ("Home.md", "---\nup: see [[Only]]\n---\n", &[("Only", "c/Only.md")]),
    ("Home.md", "---\nup: '[[it''s]]'\n---\n", &[("it's", "x/it's.md")]),
    ("Home.md", "---\nlist: [[Only]]\n---\n", &[]),
    ("Home.md", "---\n# [[Only]]\na: 1\n---\n[[Target]]", &[("Target", "Target.md")]),
    ("Home.md", "---\r\nup: \"[[Only]]\"\r\n---\r\n[[Target]]\r\n", &[("Only", "c/Only.md"), ("Target", "Target.md")]),
    ("Home.md", "text\n---\nup: \"[[Only]]\"\n---\n", &[("Only", "c/Only.md")]),
];

#[test]
fn links_mean_the_files_that_obsidian_would_open() {
    let cases: Vec<&Case> = [WIKILINKS, NO_LINKS, MARKDOWN, PROPERTIES].into_iter().flatten().collect();
    assert!(cases.len() >= 100);
    let names = Names::new(FILES.map(str::to_owned).to_vec());
    let mut wrong = Vec::new();
    for (note, text, wanted) in cases {
        let facts = NoteFacts::of(text);
        let found = facts.links.iter().map(|link| {
            let target = names.resolve(note, &link.path, link.kind.is_markdown());
            let shown = target.map_or(String::new(), |target| {
                format!("{}{}", names.path(target.file), if target.ambiguous { "?" } else { "" })
            });
            (link.path.clone(), shown)
        });
        let found: Vec<(String, String)> = found.collect();
        let wanted: Vec<(String, String)> =
            wanted.iter().map(|(path, file)| ((*path).to_owned(), (*file).to_owned())).collect();
        if found != wanted {
            wrong.push(format!("{note} {text:?}\n   found {found:?}\n  wanted {wanted:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_range_of_a_link_is_its_path_alone() {
    for (text, path) in [
        ("x [[ a b#c|d ]]", "a b"),
        ("![[a.png|1]]", "a.png"),
        ("[t](<a b.md#c> \"d\")", "a b.md"),
        ("[t]( a%20b.md )", "a%20b.md"),
        ("| x |\n|---|\n| [[a\\|b]] |", "a"),
        ("---\nk: \"[[a|b]]\"\n---\n", "a"),
        ("[r]: <a b.md>\n\n[r]", "a b.md"),
        ("[[#h]]", ""),
    ] {
        let facts = NoteFacts::of(text);
        let found: Vec<&str> = facts.links.iter().map(|link| &text[link.start..link.end]).collect();
        assert_eq!(found, [path], "{text:?}");
    }
}

#[test]
fn a_new_link_is_as_short_as_the_old_one_while_that_is_unique() {
    let names = Names::new(FILES.map(str::to_owned).to_vec());
    for (from, file, old, is_markdown, wanted) in [
        ("Home.md", "c/Only.md", "Old", false, "Only"),
        ("Home.md", "c/Only.md", "Old.md", false, "Only.md"),
        ("Home.md", "a/Note.md", "Old", false, "a/Note"),
        ("Home.md", "a/sub/Note.md", "Old", false, "sub/Note"),
        ("Home.md", "x/y/Target.md", "Old", false, "y/Target"),
        ("Home.md", "x/y/Target.md", "p/q/r/Old", false, "x/y/Target"),
        ("Home.md", "c/Only.md", "/a/Old", false, "/c/Only"),
        ("a/sub/Deep.md", "a/Note.md", "../Old", false, "../Note"),
        ("a/sub/Deep.md", "a/sub/Note.md", "../Old", false, "./Note"),
        ("a/sub/Deep.md", "a/Note.md", "Old.md", true, "../Note.md"),
        ("Home.md", "img/pic.png", "old.png", false, "pic.png"),
        ("Home.md", "plain", "x", false, "/plain"),
        ("Home.md", "Case.md", "Old", false, "Case"),
    ] {
        let file = names.position(file).expect("a file of the list");
        let link = names.link_to(from, file, old, is_markdown);
        if wanted != "/plain" {
            assert_eq!(link, wanted, "{from} {old}");
            assert_eq!(names.resolve(from, &link, is_markdown).map(|target| target.file), Some(file), "{link}");
        }
    }
}

#[test]
fn headings_tags_and_blocks_are_found_with_their_sections() {
    let text = "# One\n\n## Same *x*\nin one ^b1\n\n# Two #tag\n\n## Same x\nin two #work/now #1 a#no `#code`\n\n- item ^b-2\n";
    let facts = NoteFacts::of(text);
    let section = |place: &str| facts.heading(place).map(|heading| &text[facts.section(heading, text.len())]);
    assert_eq!(section("One#Same x"), Some("in one ^b1\n\n"));
    assert_eq!(section("two tag#same X"), Some("in two #work/now #1 a#no `#code`\n\n- item ^b-2\n"));
    assert_eq!(section("Same x"), Some("in one ^b1\n\n"), "the first of several");
    assert_eq!((section("Two#One"), section("None")), (None, None));
    assert_eq!(facts.tags, ["tag", "work/now"]);
    let blocks: Vec<&str> = facts.blocks.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(blocks, ["b1", "b-2"]);
}

#[test]
fn a_note_of_a_megabyte_of_brackets_is_read_in_bounds() {
    for text in
        ["[".repeat(300_000), "[[".repeat(100_000), "![[a]]".repeat(60_000), "> ".repeat(50_000), "%%".repeat(100_000)]
    {
        let facts = NoteFacts::of(&text);
        assert!(facts.links.len() <= 50_000);
    }
}

#[test]
fn edits_that_do_not_fit_the_text_are_refused() {
    let edit = |start, end| Edit { start, end, old: String::new(), new: "x".into() };
    assert_eq!(applied(b"\xEF\xBB\xBFabc", &[edit(0, 1), edit(2, 3)]).as_deref(), Some(&b"\xEF\xBB\xBFxbx"[..]));
    for edits in [vec![edit(2, 1)], vec![edit(0, 9)], vec![edit(1, 2), edit(0, 1)]] {
        assert_eq!(applied(b"abc", &edits), None, "{edits:?}");
    }
    assert_eq!(applied("aü".as_bytes(), &[edit(2, 3)]), None, "within a character");
}

#[test]
fn edits_are_undone_byte_for_byte() {
    let text = "\u{FEFF}one two three".as_bytes();
    let edit = |start, end, new: &str| Edit { start, end, old: String::new(), new: new.into() };
    for edits in [vec![], vec![edit(0, 3, "")], vec![edit(0, 0, "x"), edit(4, 7, "longer"), edit(12, 13, "ü")]] {
        let edits = with_old(text, &edits).expect("they fit");
        let new = applied(text, &edits).expect("they fit");
        assert_eq!(applied(&new, &undone(&edits)).as_deref(), Some(text), "{edits:?}");
    }
}

#[test]
fn facts_come_back_from_a_snapshot() {
    let facts = NoteFacts::of("---\ntags: [a]\nn: 1.5\nm: {x: [null, true]}\n---\n# T\n[[x#y]] [z](a.md) ^b\n");
    let bytes = postcard::to_stdvec(&facts).expect("plain data");
    assert_eq!(postcard::from_bytes::<NoteFacts>(&bytes).expect("just written"), facts);
    let names = Names::new(vec!["a.md".into()]);
    assert_eq!(resolved(&names, &[Some(Arc::new(facts))])[0].iter().flatten().count(), 1);
}
