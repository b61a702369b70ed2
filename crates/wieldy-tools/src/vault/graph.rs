//! The notes of a vault at one moment, and the links between them. Derived from the index, and kept while no file
//! changes.

use std::path::Path;
use std::sync::Arc;

use blake3::Hash;
use tokio_util::sync::CancellationToken;

use super::markdown::NoteFacts;
use super::names::{Names, Target, is_note};
use crate::files::Editable;
use crate::index::{Ask, FileFacts, FileId, SkipReason, View};

impl FileFacts for NoteFacts {
    const FORM: u32 = 1;
    const IS_PROSE: bool = true;

    fn of(path: &Path, content: &[u8], _: &CancellationToken) -> Result<Self, SkipReason> {
        if !path.to_str().is_some_and(is_note) {
            return Err(SkipReason::Language);
        }
        let editable = Editable::of(content).map_err(|_| SkipReason::Malformed)?;
        Ok(NoteFacts::of(&editable.text))
    }

    fn bytes(&self) -> usize {
        let texts = self.tags.iter().chain(&self.aliases).map(String::len).sum::<usize>();
        let headings: usize = self.headings.iter().map(|heading| 56 + heading.text.len()).sum();
        let links: usize = self.links.iter().map(|link| 96 + link.path.len()).sum();
        200 + texts + headings + links + 64 * self.properties.len()
    }
}

/// The notes and their links. Files are numbered by path.
pub(crate) struct Graph {
    pub(crate) generation: u64,
    pub(crate) names: Names,
    /// The files in the view of the index.
    pub(crate) ids: Vec<FileId>,
    /// The facts of notes. Other files have none.
    pub(crate) facts: Vec<Option<Arc<NoteFacts>>>,
    pub(crate) hashes: Vec<Option<Hash>>,
    /// The file that each link of a note means.
    pub(crate) links: Vec<Vec<Option<Target>>>,
    /// The links to each file from other notes: the note, and the position of the link in it.
    pub(crate) links_in: Vec<Vec<(usize, usize)>>,
    /// The notes whose content could not be read as a note.
    pub(crate) unread: Vec<usize>,
}

impl Graph {
    pub(crate) fn of(view: &View<NoteFacts>, ask: &Ask<'_>) -> Self {
        let files: Vec<(FileId, &str)> =
            view.files().filter_map(|(id, entry)| Some((id, entry.path.to_str()?))).collect();
        let notes: Vec<FileId> = files.iter().filter(|(_, path)| is_note(path)).map(|(id, _)| *id).collect();
        let mut made = notes.iter().zip(view.facts(ask, &notes)).peekable();
        let names = Names::new(files.iter().map(|(_, path)| (*path).to_owned()).collect());
        let (mut facts, mut unread) = (Vec::with_capacity(files.len()), Vec::new());
        for (file, (id, _)) in files.iter().enumerate() {
            let own = made.next_if(|(note, _)| *note == id).map(|(_, made)| made);
            if matches!(own, Some(Err(_))) {
                unread.push(file);
            }
            facts.push(own.and_then(Result::ok));
        }
        let hashes = files.iter().map(|(id, _)| view.file(*id).hash).collect();
        let links = resolved(&names, &facts);
        let links_in = reversed(&links, files.len());
        let ids = files.iter().map(|(id, _)| *id).collect();
        Self { generation: view.generation(), names, ids, facts, hashes, links, links_in, unread }
    }

    /// Returns the notes with their facts.
    pub(crate) fn notes(&self) -> impl Iterator<Item = (usize, &Arc<NoteFacts>)> {
        self.facts.iter().enumerate().filter_map(|(file, facts)| Some((file, facts.as_ref()?)))
    }

    /// Returns the title of a note: that of its text, or its name.
    pub(crate) fn title(&self, file: usize) -> &str {
        let own = self.facts[file].as_ref().and_then(|facts| facts.title.as_deref());
        own.unwrap_or_else(|| super::names::stem(super::names::last(self.names.path(file))))
    }

    /// Returns the number of links that lead to no file.
    pub(crate) fn unresolved(&self) -> usize {
        self.links.iter().flatten().filter(|target| target.is_none()).count()
    }
}

/// Resolves all links of all notes.
pub(crate) fn resolved(names: &Names, facts: &[Option<Arc<NoteFacts>>]) -> Vec<Vec<Option<Target>>> {
    let of_note = |(file, facts): (usize, &Option<Arc<NoteFacts>>)| {
        let links = facts.iter().flat_map(|facts| &facts.links);
        links.map(|link| names.resolve(names.path(file), &link.path, link.kind.is_markdown())).collect()
    };
    facts.iter().enumerate().map(of_note).collect()
}

fn reversed(links: &[Vec<Option<Target>>], files: usize) -> Vec<Vec<(usize, usize)>> {
    let mut links_in = vec![Vec::new(); files];
    for (note, targets) in links.iter().enumerate() {
        for (index, target) in targets.iter().enumerate() {
            if let Some(target) = target.filter(|target| target.file != note) {
                links_in[target.file].push((note, index));
            }
        }
    }
    links_in
}
