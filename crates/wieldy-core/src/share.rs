//! Shares one budget among the texts of several results, as one answer to a model shows them.

use std::sync::Arc;

use crate::artifact::ArtifactId;
use crate::call::{Caller, Content, ToolResult};
use crate::capture::Capture;
use crate::executor::Executor;

/// The smallest share of a result. A shorter text would say nothing.
const SHARE_BYTES_MIN: usize = 256;

/// The text of a result within its share of the budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedText {
    /// The text, or its head and tail and a line that says where the whole is.
    pub text: String,
    /// The artifact with the whole text, if it is cut.
    pub artifact: Option<ArtifactId>,
}

impl Executor {
    /// Returns the texts of these results, which together have about as many bytes as one result may have. Short texts
    /// stay whole, and the long ones share the rest equally. The whole of each text that is cut is in an artifact of the
    /// caller.
    pub fn share_budget(&self, results: &[ToolResult], caller: &Arc<Caller>) -> Vec<SharedText> {
        let engine = &*self.inner;
        let texts: Vec<String> = results.iter().map(text_of).collect();
        let budget = usize::try_from(engine.output_bytes_max).unwrap_or(usize::MAX);
        let share = share(texts.iter().map(String::len), budget);
        let cut = |(text, result): (String, &ToolResult)| {
            if text.len() <= share {
                return SharedText { text, artifact: result.artifact };
            }
            if let Some(artifact) = result.artifact {
                return SharedText { text: shortened(&text, share, artifact), artifact: Some(artifact) };
            }
            let mut capture = Capture::new(
                share as u64,
                engine.confinement.limits.output_bytes.unwrap_or(u64::MAX).max(share as u64),
                Arc::clone(&engine.artifacts),
                Arc::clone(caller),
                engine.confinement.recorded_workspace(),
            );
            capture.write(text.as_bytes());
            let captured = capture.so_far();
            SharedText { text: captured.text, artifact: captured.artifact }
        };
        texts.into_iter().zip(results).map(cut).collect()
    }
}

/// Returns all text of a result, or else its structured answer.
fn text_of(result: &ToolResult) -> String {
    match &result.structured {
        Some(structured) if result.content.is_empty() => structured.to_string(),
        _ => Content::text_of(&result.content),
    }
}

/// Returns the number of bytes that each text may have, so that together they have at most `budget` bytes.
fn share(lengths: impl Iterator<Item = usize>, budget: usize) -> usize {
    let mut lengths: Vec<usize> = lengths.collect();
    lengths.sort_unstable();
    let (mut left, count) = (budget, lengths.len());
    for (at, length) in lengths.into_iter().enumerate() {
        let share = left / (count - at);
        if length > share {
            return share.max(SHARE_BYTES_MIN);
        }
        left -= length;
    }
    usize::MAX
}

/// Returns the head and the tail of a text whose whole is in an artifact.
fn shortened(text: &str, share: usize, artifact: ArtifactId) -> String {
    let head = &text[..text.floor_char_boundary(share - share / 2)];
    let tail = &text[text.ceil_char_boundary(text.len() - share / 2)..];
    let left_out = text.len() - head.len() - tail.len();
    format!("{head}\n… {left_out} of {} bytes left out; the whole is {artifact} …\n{tail}", text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_texts_stay_whole_and_long_ones_share_the_rest() {
        let of = |lengths: &[usize], budget| share(lengths.iter().copied(), budget);
        assert_eq!(of(&[], 1000), usize::MAX);
        assert_eq!(of(&[400, 600], 1000), usize::MAX);
        assert_eq!(of(&[9000, 100, 5000], 1000), 450);
        assert_eq!(of(&[500, 501], 1000), 500);
        assert_eq!(of(&[9000; 100], 1000), SHARE_BYTES_MIN, "a hundred results still say something");
    }

    #[test]
    fn no_character_is_cut() {
        let (text, artifact) = ("äöü€".repeat(100), ArtifactId::next());
        for share in 256..270 {
            let shown = shortened(&text, share, artifact);
            assert!(shown.contains(&format!("bytes left out; the whole is {artifact}")), "{shown}");
        }
    }
}
