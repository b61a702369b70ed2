//! Parsing within a budget: [`extract`] turns the bytes of a file into its [`FileTree`].

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;
use tree_sitter::{ParseOptions, ParseState, Parser, Tree};

use super::language::Language;
use super::languages::rules;
use super::tree::{FileTree, NoTree};
use super::walker;

/// Maximum size of a file that is parsed.
pub(crate) const FILE_BYTES_MAX: usize = 1024 * 1024;
/// Maximum processor time that parsing a file may take. It is the thread's own time, so the load of the machine does
/// not decide which files are skipped.
pub(crate) const PARSE_TIME_MAX: Duration = Duration::from_millis(250);
/// The parser asks this many times before the clock is read.
const ASKS_PER_LOOK: u32 = 4;

thread_local! {
    /// The parser of this thread. A parser keeps its memory, so a new one for each file would be slower.
    static PARSER: RefCell<Parser> = RefCell::new(Parser::new());
}

/// Returns the tree of a file. It depends on nothing but the bytes.
pub(crate) fn extract(
    language: Language,
    text: &[u8],
    time_max: Duration,
    stop: &CancellationToken,
) -> Result<FileTree, NoTree> {
    if text.len() > FILE_BYTES_MAX {
        return Err(NoTree::Large);
    }
    let rules = rules(language);
    let tree = PARSER.with_borrow_mut(|parser| parse(parser, rules.grammar(), text, time_max, stop))?;
    Ok(walker::walk(language, rules, &tree, text))
}

fn parse(
    parser: &mut Parser,
    grammar: &tree_sitter::Language,
    text: &[u8],
    time_max: Duration,
    stop: &CancellationToken,
) -> Result<Tree, NoTree> {
    // Both fail only for a grammar of another version, which the tests of each language would show.
    parser.set_language(grammar).map_err(|_| NoTree::Slow)?;
    parser.reset();
    let (start, mut asks) = (thread_time(), 0_u32);
    let mut within_budget = |_: &ParseState| {
        asks = asks.wrapping_add(1);
        let looks = asks.is_multiple_of(ASKS_PER_LOOK);
        let late = looks && (stop.is_cancelled() || thread_time().saturating_sub(start) > time_max);
        if late { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let options = ParseOptions::new().progress_callback(&mut within_budget);
    let mut read = |at: usize, _| text.get(at..).unwrap_or_default();
    let parsed = parser.parse_with_options(&mut read, None, Some(options));
    parsed.ok_or(if stop.is_cancelled() { NoTree::Stopped } else { NoTree::Slow })
}

/// Returns the processor time of this thread.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}
