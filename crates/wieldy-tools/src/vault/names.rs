//! Names of a vault: finds the file that a link means, by Obsidian's rules, and the shortest link to a file.
//!
//! Names are compared without case and in one Unicode form. An exact path comes first, then the end of a path. Of
//! several files with the same end, the shortest path comes first, then the one nearest to the linking note, then the
//! first by name; the link is ambiguous.

use std::collections::HashMap;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// The end of the name of a note.
pub(crate) const NOTE_END: &str = ".md";

/// The paths of all files of a vault.
#[derive(Debug, Default)]
pub(crate) struct Names {
    paths: Vec<String>,
    folded: Vec<String>,
    /// The files of a folded path, and those of a folded last name.
    by_path: HashMap<String, Vec<u32>>,
    by_name: HashMap<String, Vec<u32>>,
}

/// The file that a link means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Target {
    /// The position of the file.
    pub(crate) file: usize,
    /// True if the link fits other files as well.
    pub(crate) ambiguous: bool,
}

/// Returns a name in the form in which names are compared.
pub(crate) fn folded(name: &str) -> String {
    if name.is_ascii() {
        return name.to_ascii_lowercase();
    }
    composed(name).to_lowercase().nfc().collect()
}

/// Returns the text in the composed Unicode form.
pub(crate) fn composed(text: &str) -> String {
    if is_nfc_quick(text.chars()) == IsNormalized::Yes { text.to_owned() } else { text.nfc().collect() }
}

/// Returns true for the path of a note.
pub(crate) fn is_note(path: &str) -> bool {
    let name = last(path);
    name.len() > NOTE_END.len()
        && name.is_char_boundary(name.len() - NOTE_END.len())
        && name[name.len() - NOTE_END.len()..].eq_ignore_ascii_case(NOTE_END)
}

/// Returns the path without the end of a note's name.
pub(crate) fn stem(path: &str) -> &str {
    if is_note(path) { &path[..path.len() - NOTE_END.len()] } else { path }
}

/// Returns the last name of a path.
pub(crate) fn last(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

/// Returns the folder of a path; empty for the root.
pub(crate) fn folder(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

impl Names {
    pub(crate) fn new(paths: Vec<String>) -> Self {
        let mut names = Self { folded: paths.iter().map(|path| folded(path)).collect(), paths, ..Self::default() };
        for (index, path) in names.folded.iter().enumerate() {
            let index = u32::try_from(index).expect("a walk reads at most a million entries");
            names.by_path.entry(path.clone()).or_default().push(index);
            names.by_name.entry(last(path).to_owned()).or_default().push(index);
        }
        names
    }

    pub(crate) fn path(&self, file: usize) -> &str {
        &self.paths[file]
    }

    pub(crate) fn len(&self) -> usize {
        self.paths.len()
    }

    /// Returns the position of the file with exactly this path.
    pub(crate) fn position(&self, path: &str) -> Option<usize> {
        let files = self.by_path.get(&folded(path))?;
        files.iter().map(|file| *file as usize).find(|file| self.paths[*file] == path)
    }

    /// Returns a file whose path differs only in case or Unicode form, if there is one.
    pub(crate) fn twin(&self, path: &str) -> Option<&str> {
        let files = self.by_path.get(&folded(path))?;
        files.iter().map(|file| self.paths[*file as usize].as_str()).find(|other| *other != path)
    }

    /// Returns the file that a link in the note `from` means. The path of a Markdown link begins at the folder of the
    /// note, if it leads to a file.
    pub(crate) fn resolve(&self, from: &str, path: &str, is_markdown: bool) -> Option<Target> {
        if path.is_empty() {
            return self.position(from).map(|file| Target { file, ambiguous: false });
        }
        if let Some(path) = path.strip_prefix('/') {
            return self.exact(path);
        }
        let is_relative = path.starts_with("./") || path.starts_with("../");
        if is_relative || is_markdown {
            let found = joined(folder(from), path).and_then(|path| self.exact(&path));
            if is_relative || found.is_some() {
                return found;
            }
        }
        self.exact(path).or_else(|| self.by_end(from, path))
    }

    /// Returns the ways in which a path can be meant: as it is, or without the end of a note's name.
    fn spellings(path: &str) -> [String; 2] {
        let (plain, note) = (folded(path), format!("{}{NOTE_END}", folded(path)));
        // A path without an extension names a note, even if there is a file without an extension.
        if last(path).contains('.') { [plain, note] } else { [note, plain] }
    }

    fn exact(&self, path: &str) -> Option<Target> {
        let files = Self::spellings(path).iter().find_map(|spelling| self.by_path.get(spelling))?;
        if let [file] = files[..] {
            return Some(Target { file: file as usize, ambiguous: false });
        }
        // The paths differ in case or Unicode form only.
        let wanted = composed(path);
        let same = files.iter().find(|file| {
            let path = &self.paths[**file as usize];
            composed(path) == wanted || composed(stem(path)) == wanted
        });
        let file = same.or_else(|| files.iter().min_by_key(|file| &self.paths[**file as usize]))?;
        Some(Target { file: *file as usize, ambiguous: same.is_none() })
    }

    fn by_end(&self, from: &str, path: &str) -> Option<Target> {
        Self::spellings(path).iter().find_map(|spelling| {
            let ends = |file: &&u32| {
                let path = &self.folded[**file as usize];
                path.strip_suffix(spelling.as_str()).is_some_and(|above| above.is_empty() || above.ends_with('/'))
            };
            let files: Vec<u32> = self.by_name.get(last(spelling))?.iter().filter(ends).copied().collect();
            let rank = |file: &&u32| {
                let path = &self.paths[**file as usize];
                (path.matches('/').count(), distance(folder(from), folder(path)), path)
            };
            let file = *files.iter().min_by_key(rank)? as usize;
            Some(Target { file, ambiguous: files.len() > 1 })
        })
    }

    /// Returns the paths of all notes without the end of their names.
    pub(crate) fn stems(&self) -> impl Iterator<Item = &str> {
        self.paths.iter().filter(|path| is_note(path)).map(|path| stem(path))
    }

    /// Returns the path for a link in `from` that means `file`, in the style of the old path: as short, as relative, and
    /// with the extension if that had one.
    pub(crate) fn link_to(&self, from: &str, file: usize, old: &str, is_markdown: bool) -> String {
        let path = &self.paths[file];
        let has_end = is_note(old) || !is_note(path);
        let shown = |path: &str| if has_end { path.to_owned() } else { stem(path).to_owned() };
        let means = |text: &str| self.resolve(from, text, is_markdown) == Some(Target { file, ambiguous: false });
        if old.starts_with('/') {
            return format!("/{}", shown(path));
        }
        let relative = relative(folder(from), path);
        let mut tries = Vec::new();
        if old.starts_with("./") || old.starts_with("../") {
            let dotted = if relative.starts_with("../") { relative.clone() } else { format!("./{relative}") };
            tries.push(dotted);
        } else if is_markdown {
            tries.push(relative.clone());
        }
        // From as many names as the old path had up to the whole path.
        let parts: Vec<&str> = path.split('/').collect();
        let count = (old.matches('/').count() + 1).min(parts.len());
        tries.extend((count..=parts.len()).map(|count| parts[parts.len() - count..].join("/")));
        let tries: Vec<String> = tries.iter().flat_map(|text| [shown(text), text.clone()]).collect();
        tries.into_iter().find(|text| means(text)).unwrap_or_else(|| format!("/{path}"))
    }
}

/// Returns the number of steps from one folder to another.
fn distance(one: &str, other: &str) -> usize {
    let parts = |folder: &str| folder.split('/').filter(|part| !part.is_empty()).map(folded).collect::<Vec<_>>();
    let (one, other) = (parts(one), parts(other));
    let common = one.iter().zip(&other).take_while(|(one, other)| one == other).count();
    one.len() + other.len() - 2 * common
}

/// Joins a folder and a relative path, or returns `None` if that leads out of the vault.
pub(crate) fn joined(folder: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Returns the path of a file relative to a folder.
fn relative(folder: &str, path: &str) -> String {
    let from: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    let to: Vec<&str> = path.split('/').collect();
    let common = from.iter().zip(&to[..to.len() - 1]).take_while(|(one, other)| one == other).count();
    let up = std::iter::repeat_n("..", from.len() - common);
    up.chain(to[common..].iter().copied()).collect::<Vec<_>>().join("/")
}

/// Returns a path of a vault as a path from the root that the vault's folder is in.
pub(crate) fn workspace_path(folder: &str, path: &str) -> String {
    match (folder, path) {
        ("", "") => ".".to_owned(),
        ("", path) => path.to_owned(),
        (folder, "" | ".") => folder.to_owned(),
        (folder, path) => format!("{folder}/{path}"),
    }
}
