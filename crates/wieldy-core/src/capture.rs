//! Captures the output of a run: head and tail in memory and, up to a limit, all of it in an artifact.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::artifact::{ArtifactId, ArtifactWriter, Artifacts};
use crate::call::Caller;
use crate::trace::STDERR_BYTES_MAX;

/// The output captured so far. It takes at most `inline_max` bytes of memory, however much is printed.
pub(crate) struct Capture {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total_bytes: u64,
    inline_max: usize,
    /// Maximum number of bytes that are stored anywhere. Further bytes are only counted.
    stored_max: u64,
    artifacts: Arc<dyn Artifacts>,
    owner: Arc<Caller>,
    workspace: Option<Arc<str>>,
    spill: Spill,
    /// The end of what was printed to stderr, in which a traceback is searched.
    stderr: VecDeque<u8>,
}

enum Spill {
    NotYet,
    Into(Box<dyn ArtifactWriter>),
    /// The artifact could not be made or written. The text of the result reports the error.
    Failed(String),
}

/// The captured output, for a result.
pub(crate) struct Captured {
    pub(crate) text: String,
    pub(crate) artifact: Option<ArtifactId>,
    pub(crate) cut: bool,
}

impl Capture {
    pub(crate) fn new(
        inline_max: u64,
        stored_max: u64,
        artifacts: Arc<dyn Artifacts>,
        owner: Arc<Caller>,
        workspace: Option<Arc<str>>,
    ) -> Self {
        let inline_max = usize::try_from(inline_max.min(stored_max)).unwrap_or(usize::MAX);
        Self {
            head: Vec::new(),
            tail: VecDeque::new(),
            total_bytes: 0,
            inline_max: inline_max.max(2),
            stored_max,
            artifacts,
            owner,
            workspace,
            spill: Spill::NotYet,
            stderr: VecDeque::new(),
        }
    }

    /// Keeps the end of stderr, besides [`Capture::write`].
    pub(crate) fn keep_stderr(&mut self, bytes: &[u8]) {
        self.stderr.extend(&bytes[bytes.len().saturating_sub(STDERR_BYTES_MAX)..]);
        let surplus = self.stderr.len().saturating_sub(STDERR_BYTES_MAX);
        self.stderr.drain(..surplus);
    }

    /// Returns the end of stderr as text. If nothing came on stderr, it is the end of the output: `Bash` and `Build`
    /// join both streams.
    pub(crate) fn error_output(&self) -> String {
        let last = if self.stderr.is_empty() { &self.tail } else { &self.stderr };
        let (front, back) = last.as_slices();
        let all = if last.is_empty() { self.head.clone() } else { [front, back].concat() };
        String::from_utf8_lossy(&all[all.len().saturating_sub(STDERR_BYTES_MAX)..]).into_owned()
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.total_bytes += bytes.len() as u64;
        if self.total_bytes <= self.inline_max as u64 {
            self.head.extend_from_slice(bytes);
            return;
        }
        if matches!(self.spill, Spill::NotYet) {
            self.start_spill();
        }
        if let Spill::Into(writer) = &mut self.spill
            && let Err(error) = writer.write(bytes)
        {
            self.spill = Spill::Failed(error.to_string());
        }
        // If the head is not full yet (large first chunks), fill it before the tail.
        let head_room = (self.inline_max / 2).saturating_sub(self.head.len()).min(bytes.len());
        let (to_head, bytes) = bytes.split_at(if self.tail.is_empty() { head_room } else { 0 });
        self.head.extend_from_slice(to_head);
        let tail_max = self.inline_max - self.inline_max / 2;
        self.tail.extend(&bytes[bytes.len().saturating_sub(tail_max)..]);
        let surplus = self.tail.len().saturating_sub(tail_max);
        self.tail.drain(..surplus);
    }

    /// Opens an artifact for the whole output. From here on, memory holds only the head and the tail.
    fn start_spill(&mut self) {
        let written =
            self.artifacts.create(&self.owner, self.workspace.as_deref(), self.stored_max).and_then(|mut writer| {
                writer.write(&self.head)?;
                Ok(writer)
            });
        self.spill = match written {
            Ok(writer) => Spill::Into(writer),
            Err(error) => Spill::Failed(error.to_string()),
        };
        let head_max = self.inline_max / 2;
        self.tail.extend(self.head.drain(head_max.min(self.head.len())..));
    }

    /// Returns the output so far as text. Characters are never cut in two.
    pub(crate) fn so_far(&self) -> Captured {
        if self.total_bytes <= self.inline_max as u64 {
            let text = String::from_utf8_lossy(&self.head).into_owned();
            return Captured { text, artifact: None, cut: false };
        }
        let head = whole_characters_before(&self.head);
        let (front, back) = self.tail.as_slices();
        let tail = [front, back].concat();
        let tail = whole_characters_after(&tail);
        let left_out = self.total_bytes - (head.len() + tail.len()) as u64;
        let (artifact, phrase) = self.stored_artifact();
        let text = format!(
            "{}\n… {left_out} of {} bytes left out; {phrase} …\n{}",
            String::from_utf8_lossy(head),
            self.total_bytes,
            String::from_utf8_lossy(tail)
        );
        Captured { text, artifact, cut: true }
    }

    /// Returns the artifact with the output, if there is one, and a phrase that describes it.
    pub(crate) fn stored_artifact(&self) -> (Option<ArtifactId>, String) {
        match &self.spill {
            Spill::Into(writer) if writer.kept_bytes() < self.total_bytes => {
                let (id, kept, total) = (writer.id(), writer.kept_bytes(), self.total_bytes);
                (Some(id), format!("the first {kept} of {total} bytes are {id}"))
            }
            Spill::Into(writer) => (Some(writer.id()), format!("the whole is {}", writer.id())),
            Spill::Failed(reason) => (None, format!("the whole could not be kept: {reason}")),
            Spill::NotYet => (None, "the whole is not kept".into()),
        }
    }
}

/// Returns the bytes without an incomplete UTF-8 character at their end.
fn whole_characters_before(bytes: &[u8]) -> &[u8] {
    let begun = bytes.iter().rev().take(3).position(|byte| *byte & 0b1100_0000 != 0b1000_0000);
    let Some(back) = begun else { return bytes };
    let start = bytes.len() - 1 - back;
    let length = match bytes[start] {
        0b1100_0000..=0b1101_1111 => 2,
        0b1110_0000..=0b1110_1111 => 3,
        0b1111_0000..=0b1111_0111 => 4,
        _ => 1,
    };
    if start + length > bytes.len() { &bytes[..start] } else { bytes }
}

/// Returns the bytes without the rest of a UTF-8 character that began before them.
fn whole_characters_after(bytes: &[u8]) -> &[u8] {
    let rest = bytes.iter().take(3).take_while(|byte| **byte & 0b1100_0000 == 0b1000_0000).count();
    &bytes[rest..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifact::MemoryArtifacts;

    fn captured(inline_max: u64, text: &str, chunk: usize) -> (Captured, MemoryArtifacts) {
        captured_within(inline_max, u64::MAX, text, chunk)
    }

    fn captured_within(inline_max: u64, stored_max: u64, text: &str, chunk: usize) -> (Captured, MemoryArtifacts) {
        let store = MemoryArtifacts::default();
        let mut capture =
            Capture::new(inline_max, stored_max, Arc::new(store.clone()), Arc::new(Caller::local()), None);
        for bytes in text.as_bytes().chunks(chunk) {
            capture.write(bytes);
        }
        (capture.so_far(), store)
    }

    #[test]
    fn the_end_of_stderr_or_else_of_all_output_is_kept() {
        let of = |inline_max, output: &str, stderr: &str| {
            let owner = Arc::new(Caller::local());
            let mut capture = Capture::new(inline_max, u64::MAX, Arc::new(MemoryArtifacts::default()), owner, None);
            output.as_bytes().chunks(4).for_each(|bytes| capture.write(bytes));
            capture.keep_stderr(stderr.as_bytes());
            capture.error_output()
        };
        assert_eq!(of(100, "printed", "an error"), "an error");
        assert_eq!(of(100, "printed", ""), "printed");
        assert_eq!(of(8, "0123456789abcdef", ""), "cdef", "the tail, where the middle is left out");
        assert_eq!(of(1 << 20, &"x".repeat(2 * STDERR_BYTES_MAX), ""), "x".repeat(STDERR_BYTES_MAX));
    }

    #[test]
    fn short_output_is_returned_unchanged() {
        let (seen, _) = captured(10, "0123456789", 3);
        assert_eq!((seen.text.as_str(), seen.artifact, seen.cut), ("0123456789", None, false));
    }

    #[test]
    fn long_output_keeps_head_and_tail_and_goes_to_an_artifact() {
        let text: String = (0..100).map(|number| format!("line {number}\n")).collect();
        for chunk in [1, 7, 64, 4096] {
            let (seen, store) = captured(20, &text, chunk);
            let id = seen.artifact.expect("it did not fit");
            assert_eq!(
                seen.text,
                format!("line 0\nlin\n… 770 of 790 bytes left out; the whole is {id} …\n8\nline 99\n"),
                "in chunks of {chunk}"
            );
            assert_eq!(store.read(id, &Caller::local(), 0, u64::MAX).expect("kept"), text.as_bytes());
        }
    }

    #[test]
    fn output_beyond_the_limit_is_counted_and_not_stored() {
        let text: String = (0..100).map(|number| format!("line {number}\n")).collect();
        for chunk in [1, 7, 64, 4096] {
            // Exactly the limit is stored whole; one byte more is not.
            for (kept, phrase) in [(790, "the whole is"), (789, "the first 789 of 790 bytes are")] {
                let (seen, store) = captured_within(20, kept, &text, chunk);
                let id = seen.artifact.expect("it did not fit");
                assert_eq!(
                    (seen.text, seen.cut),
                    (format!("line 0\nlin\n… 770 of 790 bytes left out; {phrase} {id} …\n8\nline 99\n"), true),
                    "in chunks of {chunk}"
                );
                let info = store.describe(id, &Caller::local()).expect("kept");
                assert_eq!((info.kept_bytes, info.total_bytes), (kept, 790));
                let bytes = store.read(id, &Caller::local(), 0, u64::MAX).expect("kept");
                assert_eq!(bytes, &text.as_bytes()[..kept as usize]);
            }
        }
    }

    #[test]
    fn a_limit_below_that_of_a_result_bounds_the_result_too() {
        let (seen, _) = captured_within(100, 10, "0123456789", 3);
        assert_eq!((seen.text.as_str(), seen.cut), ("0123456789", false));
        let (seen, _) = captured_within(100, 10, "0123456789a", 3);
        let id = seen.artifact.expect("it did not fit");
        assert_eq!(seen.text, format!("01234\n… 1 of 11 bytes left out; the first 10 of 11 bytes are {id} …\n6789a"));
    }

    proptest::proptest! {
        #[test]
        fn no_character_is_ever_cut(text in "\\PC{0,60}", inline_max in 2u64..40, chunk in 1usize..9) {
            let (seen, _) = captured(inline_max, &text, chunk);
            let is_cut = |text: &str| text.contains(char::REPLACEMENT_CHARACTER);
            proptest::prop_assert!(!is_cut(&seen.text) || is_cut(&text));
        }
    }
}
