//! Finds the files that a command line names: their content is part of what a person agrees to.
//!
//! The search is generous: a word that is not a file costs only a lookup, but a missed file could run with content that
//! the person has not seen. Names that a shell makes at run time (patterns, variables) are not found.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use blake3::{Hash, Hasher};
use cap_std::ambient_authority;
use cap_std::fs::Dir;
use wieldy_core::{Confinement, NamedFile, Program, RunError};

use super::escapes::decoded;
use crate::files::read_options;

/// Maximum number of files that are hashed.
const FILES_MAX: usize = 64;
/// Maximum number of bytes of all hashed files.
const BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Maximum number of names of a command line that are looked up.
const NAMES_MAX: usize = 8192;
/// Maximum number of folders in which names are looked up.
const FOLDERS_MAX: usize = 16;
/// Maximum length of a name.
const NAME_BYTES_MAX: usize = 4095;
/// Maximum depth of command lines within words, as in `sh -c '…'`.
const DEPTH_MAX: usize = 4;

/// The characters between an option, or a list's entry, and the name of a file.
const SEPARATORS: [char; 4] = ['=', ':', ',', '@'];

/// Describes the program that these words start in a folder, with the files of the workspace that they name.
pub(super) async fn program(
    command_line: String,
    words: Vec<String>,
    folder: PathBuf,
    confinement: &Confinement,
) -> Result<Option<Program>, RunError> {
    let (workspace, start) = (confinement.workspace.clone(), folder.clone());
    let search = tokio::task::spawn_blocking(move || NamedFileSearch::run(&workspace, start, &words));
    let found = search.await.map_err(|error| format!("the search for the named files ended early: {error}"))?;
    let NamedFileSearch { files, unchecked, .. } =
        found.map_err(|error| format!("the workspace cannot be read: {error}"))?;
    Ok(Some(Program { command_line, folder, files, unchecked }))
}

/// Quotes words for a shell.
pub(super) fn quoted<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    let one = |word: &str| {
        if !word.is_empty() && word.chars().all(plain) {
            word.to_owned()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    };
    words.into_iter().map(one).collect::<Vec<_>>().join(" ")
}

/// Splits a shell's command line into words: text between blanks and operators, without quotes. To some shells, the
/// `$` of `$'…'` and `$"…"` belongs to the quotes, and to others it is a letter. The words of both readings count.
pub(super) fn words(line: &str) -> Vec<String> {
    let mut words = split(line, true);
    if line.contains("$'") || line.contains("$\"") {
        let others = split(line, false);
        if others != words {
            words.extend(others);
        }
    }
    words
}

fn split(line: &str, has_dollar_quotes: bool) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    let mut characters = line.chars();
    while let Some(c) = characters.next() {
        let next = characters.as_str().chars().next();
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '$') if has_dollar_quotes && next == Some('"') => {}
            (None, '$') if has_dollar_quotes && next == Some('\'') => {
                characters.next();
                word.push_str(&decoded(&mut characters));
            }
            (None, '\'' | '"') => quote = Some(c),
            // Between double quotes, a backslash before any other character is part of the word.
            (Some('"'), '\\') if next.is_some_and(|next| !"$`\"\\\n".contains(next)) => word.push(c),
            (None | Some('"'), '\\') => word.extend(characters.next().filter(|c| *c != '\n')),
            (None, c) if is_operator(c) => words.push(std::mem::take(&mut word)),
            (_, c) => word.push(c),
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    words
}

fn is_operator(c: char) -> bool {
    c.is_whitespace() || ";&|<>()`".contains(c)
}

/// The names on a command line, each once, in their order.
#[derive(Default)]
struct CandidateNames {
    list: Vec<String>,
    seen: HashSet<String>,
    left_out: usize,
}

impl CandidateNames {
    /// Adds a word and its parts: `--config=FILE`, `-fFILE`, `@FILE`, `$PWD/FILE`, the words of `sh -c 'COMMAND FILE'`.
    fn add(&mut self, word: &str, depth: usize) {
        self.push(word);
        for prefix in ["$PWD/", "${PWD}/", "~+/"] {
            word.strip_prefix(prefix).into_iter().for_each(|rest| self.push(rest));
        }
        if word.starts_with('-') {
            word.get(2..).into_iter().for_each(|rest| self.push(rest));
        }
        if word.contains(SEPARATORS) {
            word.split(SEPARATORS).for_each(|part| self.push(part));
        }
        if depth < DEPTH_MAX && word.contains(|c| is_operator(c) || "'\"\\".contains(c)) {
            words(word).iter().filter(|inner| *inner != word).for_each(|inner| self.add(inner, depth + 1));
        }
    }

    fn push(&mut self, name: &str) {
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') || self.seen.contains(name) {
            return;
        }
        if self.list.len() == NAMES_MAX {
            self.left_out += 1;
            return;
        }
        self.seen.insert(name.to_owned());
        // A part of the name is not text, so the file cannot be looked up.
        self.left_out += usize::from(name.contains('\u{fffd}'));
        self.list.push(name.to_owned());
    }
}

/// The search for the files that the names lead to.
struct NamedFileSearch {
    root: PathBuf,
    handle: Dir,
    hashes: HashMap<PathBuf, Option<Hash>>,
    bytes_left: u64,
    files: Vec<NamedFile>,
    unchecked: usize,
}

impl NamedFileSearch {
    fn run(workspace: &Path, start: PathBuf, words: &[String]) -> io::Result<Self> {
        let root = workspace.canonicalize()?;
        let handle = Dir::open_ambient_dir(&root, ambient_authority())?;
        let mut names = CandidateNames::default();
        words.iter().for_each(|word| names.add(word, 0));
        let mut search = Self {
            root,
            handle,
            hashes: HashMap::new(),
            bytes_left: BYTES_MAX,
            files: Vec::new(),
            unchecked: names.left_out,
        };
        // The other names may be relative to a folder on the command line: `cd tools && sh run.sh`.
        let (mut folders, mut at) = (vec![start], 0);
        while let Some(folder) = folders.get(at).cloned() {
            for name in &names.list {
                let asked = folder.join(name);
                let Ok(found) = asked.canonicalize() else { continue };
                if !found.starts_with(&search.root) {
                    continue;
                }
                match found.metadata() {
                    Ok(metadata) if metadata.is_file() => search.note(name, &asked, &found),
                    Ok(metadata) if metadata.is_dir() && !folders.contains(&found) => {
                        if folders.len() < FOLDERS_MAX {
                            folders.push(found);
                        } else {
                            search.unchecked += 1;
                        }
                    }
                    _ => {}
                }
            }
            at += 1;
        }
        Ok(search)
    }

    /// Adds a file that a name leads to. A link is added with its target, so that a new target counts as a change.
    fn note(&mut self, name: &str, asked: &Path, found: &Path) {
        let Ok(relative) = found.strip_prefix(&self.root) else { return };
        let target = relative.to_string_lossy();
        let path = if asked == found { target.into_owned() } else { format!("{name} -> {target}") };
        if self.files.iter().any(|file| file.path == path) {
            return;
        }
        let is_new = !self.hashes.contains_key(relative);
        if self.files.len() == FILES_MAX || is_new && self.hashes.len() == FILES_MAX {
            self.unchecked += 1;
            return;
        }
        if is_new {
            let hash = self.hash(relative).ok().flatten();
            self.hashes.insert(relative.to_owned(), hash);
        }
        match self.hashes[relative] {
            Some(hash) => self.files.push(NamedFile { path, hash }),
            None => self.unchecked += 1,
        }
    }

    /// Hashes a regular file, unless all hashed files together would exceed [`BYTES_MAX`].
    fn hash(&mut self, relative: &Path) -> io::Result<Option<Hash>> {
        let file = self.handle.open_with(relative, &read_options())?;
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.len() > self.bytes_left {
            return Ok(None);
        }
        let mut hasher = Hasher::new();
        hasher.update_reader(file.take(self.bytes_left + 1))?;
        let left = self.bytes_left.checked_sub(hasher.count());
        self.bytes_left = left.unwrap_or(0);
        Ok(left.map(|_| hasher.finalize()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_command_line_is_taken_apart_at_blanks_and_operators() {
        for (line, expected) in [
            ("sh script.sh a b", &["sh", "script.sh", "a", "b"][..]),
            ("cd x&&./run.sh>out 2>&1;(y)|z", &["cd", "x", "./run.sh", "out", "2", "1", "y", "z"]),
            (r#"sh 'a b.sh' "c d".sh e\ f.sh"#, &["sh", "a b.sh", "c d.sh", "e f.sh"]),
            ("sh \"it's\\\" \\\n x\" 'un", &["sh", "it's\"  x", "un"]),
            ("", &[]),
        ] {
            assert_eq!(words(line), expected, "{line}");
        }
        for (line, expected) in [
            (r"sh $'a b.sh'x", &["sh", "a b.shx", "$a b.shx"][..]),
            (r#"sh $"a b.sh""#, &["sh", "a b.sh", "$a b.sh"]),
            (r"$'a\x2eb\56c\u002ed\U0000002ee\t\'\\\z\q' f", &["a.b.c.d.e\t'\\\\z\\q", "f"]),
            (
                r"$'\xc3\xa4\303\244\u00e4' $'a\0b'c $'\x{2e}\x\u\cA' $'\xff'",
                &["äää", "ac", ".\\x\\u\u{1}", "\u{fffd}"],
            ),
            (r"$'un\e", &["un\u{1b}"]),
            (r#""$'a'" '$' \$'b' $c"#, &["$'a'", "$", "$b", "$c"]),
            (r#""a\b\\c\"\$""#, &["a\\b\\c\"$"]),
        ] {
            let words = words(line);
            assert_eq!(words[0], expected[0], "{line}");
            assert!(expected.iter().all(|word| words.iter().any(|found| found == word)), "{line}: {words:?}");
        }
        assert_eq!(quoted(["sh", "a b", "", "it's", "--x=y"]), r"sh 'a b' '' 'it'\''s' --x=y");
    }

    #[test]
    fn every_file_that_a_word_names_is_found() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = inside.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("sub/deep")).unwrap();
        for name in ["a.sh", "sub/b.sh", "sub/deep/c.sh", "two words.sh", "$odd.sh"] {
            std::fs::write(root.join(name), name).unwrap();
        }
        std::fs::write(outside.path().join("far.sh"), "").unwrap();
        symlink("a.sh", root.join("link")).unwrap();
        symlink(root.join("sub/b.sh"), root.join("absolute")).unwrap();
        symlink(outside.path().join("far.sh"), root.join("out")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, root.join("pipe"), 0o600.into()).unwrap();

        let named = |line: &str| {
            let search = NamedFileSearch::run(inside.path(), root.clone(), &words(line)).unwrap();
            let content = |file: &NamedFile| {
                let target = file.path.split(" -> ").last().unwrap();
                assert_eq!(file.hash, blake3::hash(target.as_bytes()), "{}", file.path);
                file.path.clone()
            };
            assert_eq!(search.unchecked, 0, "{line}");
            search.files.iter().map(content).collect::<Vec<_>>()
        };
        let absolute = format!("sh {}/a.sh", root.display());
        for (line, files) in [
            ("sh a.sh", &["a.sh"][..]),
            ("./a.sh", &["a.sh"]),
            (&absolute, &["a.sh"]),
            ("sh<a.sh", &["a.sh"]),
            ("python --config=sub/b.sh -fa.sh -d @a.sh", &["sub/b.sh", "a.sh"]),
            ("PATH=sub:x X=a.sh y", &["a.sh"]),
            ("sh -c 'exec sh \"two words.sh\"'", &["two words.sh"]),
            ("x \"$(cat a.sh)\" `sub/b.sh` ${PWD}/a.sh", &["a.sh", "sub/b.sh"]),
            ("cd sub && sh b.sh && cd deep && sh c.sh", &["sub/b.sh", "sub/deep/c.sh"]),
            ("sh link absolute out pipe missing sub", &["link -> a.sh", "absolute -> sub/b.sh"]),
            ("sh $'two\\x20words.sh' $\"a.sh\"", &["two words.sh", "a.sh"]),
            ("sh ~+/a.sh", &["a.sh"]),
            // Some shells know no `$'…'`: to them, this names the file `$odd.sh`.
            ("sh $'odd.sh'", &["$odd.sh"]),
            ("echo nothing / ..", &[]),
        ] {
            assert_eq!(named(line), files, "{line}");
        }
    }

    #[test]
    fn files_over_the_bounds_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let line: String = (0..70).map(|number| format!("f{number} ")).collect();
        (0..70).for_each(|number| std::fs::write(folder.path().join(format!("f{number}")), "").unwrap());
        let root = folder.path().canonicalize().unwrap();
        let search = NamedFileSearch::run(&root, root.clone(), &words(&line)).unwrap();
        assert_eq!((search.files.len(), search.unchecked), (64, 6));
        std::fs::File::create(root.join("large")).unwrap().set_len(BYTES_MAX + 1).unwrap();
        let search = NamedFileSearch::run(&root, root.clone(), &words("large f1")).unwrap();
        assert_eq!((search.files.len(), search.unchecked), (1, 1));
        let many: Vec<String> = (0..NAMES_MAX + 5).map(|number| format!("n{number}")).collect();
        assert_eq!(NamedFileSearch::run(&root, root.clone(), &many).unwrap().unchecked, 5);
        // A name that is not text cannot be looked up.
        assert_eq!(NamedFileSearch::run(&root, root.clone(), &words(r"sh $'\xff'")).unwrap().unchecked, 1);
    }

    proptest::proptest! {
        #[test]
        fn a_quoted_word_is_read_back(word in "\\PC{1,20}") {
            proptest::prop_assert_eq!(words(&quoted([word.as_str()])), [word]);
        }
    }
}
