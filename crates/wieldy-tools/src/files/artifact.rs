//! `GetArtifact`: reads an output that was too large for its result: in pages, by a pattern, by a JSON pointer, or as
//! the difference to another one.

use std::num::NonZeroU32;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use wieldy_core::artifact::{ArtifactError, ArtifactId, Grep, grep};
use wieldy_core::{CallError, Code, Outcome, Provider, Run, RunError, Tool, ToolSpec};

use super::artifact_json;
use super::diff;
use super::error::{FileError, blocking};
use super::pattern;

pub(super) const LENGTH_MAX: u64 = 256 * 1024;
/// Maximum size of an artifact that is compared with another one.
const COMPARED_BYTES_MAX: u64 = 8 * 1024 * 1024;

/// A tool that reads stored outputs.
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
    /// Return only the value at this JSON pointer, such as `/items/0/name`, of an output that is JSON. `offset` and
    /// `length` then count in the text of that value.
    #[schemars(length(max = 1000))]
    pointer: Option<String>,
    /// Return only the lines in which the output differs from this earlier artifact.
    compare: Option<String>,
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
            "Reads an output that was too large for a result: a part of it by offset and length, the lines that match \
             a pattern, a value by JSON pointer, or the difference to another artifact.",
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
        let (offset, length) = (args.offset, args.length.min(LENGTH_MAX));
        blocking(move || match (&args.pattern, &args.pointer, &args.compare) {
            (None, None, None) => part(&run, id, offset, length),
            (Some(pattern), None, None) => lines(&run, id, pattern, args.limit.get() as usize),
            (None, Some(pointer), None) => artifact_json::value(&run, id, pointer, offset, length),
            (None, None, Some(other)) => difference(&run, other.parse().map_err(run_error)?, id),
            _ => Err(FileError::refused(
                "`pattern`, `pointer` and `compare` cannot be used together",
                "give one of them; `pattern` also searches a JSON output line by line",
            )
            .into()),
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
pub(super) fn whole_characters(bytes: &[u8]) -> usize {
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
    let line_bytes_max = pattern::piece_bytes_max(pattern);
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

/// Returns the lines in which `id` differs from the artifact `earlier`.
fn difference(run: &Run, earlier: ArtifactId, id: ArtifactId) -> Result<Outcome, RunError> {
    let (old, new) = (all_of(run, earlier, COMPARED_BYTES_MAX)?, all_of(run, id, COMPARED_BYTES_MAX)?);
    let (old_name, new_name) = (earlier.to_string(), id.to_string());
    let equal = old == new;
    let text = if equal {
        format!("both artifacts have the same {} bytes", new.len())
    } else {
        diff::between((&old_name, &old), (&new_name, &new))
    };
    Ok(Outcome::text(text).structured(json!({ "id": id, "compare": earlier, "equal": equal })))
}

/// Returns all bytes of an artifact, unless they are more than `bytes_max` or were not all kept.
pub(super) fn all_of(run: &Run, id: ArtifactId, bytes_max: u64) -> Result<Vec<u8>, RunError> {
    let info = run.artifacts().describe(id, run.caller()).map_err(run_error)?;
    if info.kept_bytes > bytes_max {
        return Err(FileError::refused(
            format!("`{id}` has {} bytes, and at most {bytes_max} are read at once", info.kept_bytes),
            "read it by `offset` and `length`, or search its lines with `pattern`",
        )
        .into());
    }
    if info.total_bytes > info.kept_bytes {
        return Err(FileError::refused(
            format!("only {} of the {} bytes of `{id}` were kept", info.kept_bytes, info.total_bytes),
            "read it by `offset` and `length`, or search its lines with `pattern`",
        )
        .into());
    }
    run.artifacts().read(id, run.caller(), 0, info.kept_bytes).map_err(run_error)
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
