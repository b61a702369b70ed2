//! `GetArtifact`: reads an output that was too large for its result, in pages or by a pattern.

use std::num::NonZeroU32;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use wieldy_core::artifact::{ArtifactError, ArtifactId, Grep, grep};
use wieldy_core::{CallError, Code, Outcome, Provider, Run, RunError, Tool, ToolSpec};

use super::error::blocking;
use super::pattern;

const LENGTH_MAX: u64 = 256 * 1024;

/// A tool that reads stored outputs, in pages or by a pattern.
pub struct GetArtifact;

/// A part to read.
#[derive(Deserialize, JsonSchema)]
pub struct GetArtifactArgs {
    /// The artifact's id from a result: `artifact:…`.
    id: String,
    /// The first byte to read, counted from 0.
    #[serde(default)]
    offset: u64,
    /// Number of bytes to read.
    #[serde(default = "length")]
    #[schemars(range(min = 1, max = 262_144))]
    length: u64,
    /// Return only the lines that match this regular expression, numbered, instead of a part.
    #[schemars(length(min = 1, max = 1000))]
    pattern: Option<String>,
    /// Maximum number of matching lines.
    #[serde(default = "limit")]
    #[schemars(range(min = 1, max = 1000))]
    limit: NonZeroU32,
}

fn length() -> u64 {
    16 * 1024
}

fn limit() -> NonZeroU32 {
    NonZeroU32::new(100).expect("not zero")
}

impl Tool for GetArtifact {
    type Args = GetArtifactArgs;

    fn spec(&self) -> ToolSpec {
        let mut spec = ToolSpec::new(
            "GetArtifact",
            "Reads an output that was too large for a result: a part of it by offset and length, \
             or the lines that match a pattern.",
        )
        .read_only()
        .category("files")
        .provider(Provider::Builtin)
        .timeout(Duration::from_secs(30));
        spec.annotations.open_world = false;
        // A part of an artifact must not become an artifact again. Bytes that are not text take up to three times their
        // size.
        spec.constraints.output_bytes_max = Some(4 * LENGTH_MAX);
        spec
    }

    async fn run(&self, args: GetArtifactArgs, run: &Run) -> Result<Outcome, RunError> {
        let id = args.id.parse().map_err(run_error)?;
        let run = run.clone();
        blocking(move || match &args.pattern {
            Some(pattern) => lines(&run, id, pattern, args.limit.get() as usize),
            None => part(&run, id, args.offset, args.length.min(LENGTH_MAX)),
        })
        .await
    }
}

fn part(run: &Run, id: ArtifactId, offset: u64, length: u64) -> Result<Outcome, RunError> {
    let info = run.artifacts().describe(id, run.caller()).map_err(run_error)?;
    let bytes = run.artifacts().read(id, run.caller(), offset, length).map_err(run_error)?;
    let whole = whole_characters(&bytes);
    let next = offset + whole as u64;
    let more = next < info.kept_bytes;
    let next_offset = more.then_some(next);
    let mut text = String::from_utf8_lossy(&bytes[..whole]).into_owned();
    if let Some(next) = next_offset {
        text.push_str(&format!("\n[bytes {offset} to {next} of {}; read on with `offset` {next}]", info.kept_bytes));
    }
    if !more && info.total_bytes > info.kept_bytes {
        text.push_str(&format!("\n[{} more bytes were not kept]", info.total_bytes - info.kept_bytes));
    }
    Ok(Outcome::text(text).structured(json!({
        "id": id,
        "offset": offset,
        "length": whole,
        "next_offset": next_offset,
        "kept_bytes": info.kept_bytes,
        "total_bytes": info.total_bytes,
    })))
}

/// Returns the number of bytes up to the last character that the end of the page does not cut.
fn whole_characters(bytes: &[u8]) -> usize {
    match bytes.utf8_chunks().last() {
        // A cut character at the end has at most three bytes. Anything else is not text, and is returned as it is.
        Some(last) if (1..4).contains(&last.invalid().len()) && bytes.len() > last.invalid().len() => {
            let torn = last.invalid();
            let start = bytes.len() - torn.len();
            let complete = std::str::from_utf8(torn).is_err_and(|error| error.error_len().is_some());
            if complete { bytes.len() } else { start }
        }
        _ => bytes.len(),
    }
}

fn lines(run: &Run, id: ArtifactId, pattern: &str, limit: usize) -> Result<Outcome, RunError> {
    let line_bytes_max = pattern::line_bytes_max(pattern).min(4 * 1024 * 1024);
    let search = Grep { pattern: &pattern::regex(pattern)?, matches_max: limit, line_bytes_max, stop: run.stop() };
    let (found, cut) = grep(&**run.artifacts(), id, run.caller(), &search).map_err(run_error)?;
    let mut lines: Vec<String> = found.iter().map(|found| format!("{}:{}", found.line, found.text)).collect();
    if lines.is_empty() {
        lines.push("no matches".to_owned());
    }
    if cut {
        lines.push(format!("[only the first {limit} matching lines]"));
    }
    let count = found.len();
    let mut outcome =
        Outcome::text(lines.join("\n")).structured(json!({ "id": id, "matches": found, "count": count, "cut": cut }));
    outcome.partial = cut;
    Ok(outcome)
}

pub(super) fn run_error(error: ArtifactError) -> RunError {
    let (code, message) = match &error {
        ArtifactError::BadId(_) => (Code::InvalidInput, error.to_string()),
        ArtifactError::NotFound(_) => (Code::FileNotFound, error.to_string()),
        ArtifactError::Store { source, .. } => (Code::ExecutionError, format!("{error}: {source}")),
    };
    let suggestion = "take the id from the result of the call that made it; old artifacts are removed";
    RunError::from(CallError::new(code, message).suggest(suggestion)).before_effect()
}

#[cfg(test)]
mod tests {
    use super::whole_characters;

    #[test]
    fn a_page_ends_where_no_character_is_torn() {
        assert_eq!(whole_characters("aé".as_bytes()), 3);
        assert_eq!(whole_characters(&"aé".as_bytes()[..2]), 1);
        assert_eq!(whole_characters(&"a😀".as_bytes()[..4]), 1);
        assert_eq!(whole_characters(b"a\xFF"), 2, "never a character, so shown as it is");
        assert_eq!(whole_characters(b""), 0);
        assert_eq!(whole_characters(b"\xC3"), 1, "a page must get on");
    }
}
