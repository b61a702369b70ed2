//! The targets of `Build` that a project's files define: scripts of package.json, targets of a Makefile, Cargo profiles.
//!
//! The names are found by reading the files. Nothing is run for it: even `make -p` executes `$(shell …)`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use serde::Deserialize;
use serde::de::IgnoredAny;
use wieldy_core::RunError;

/// Maximum size of a project's file.
const FILE_BYTES_MAX: u64 = 1024 * 1024;
/// Maximum number of names of each file that an error lists.
const LISTED_MAX: usize = 50;
/// The profiles that Cargo has without a definition. `test` is one of the usual tasks.
const CARGO_PROFILES: [&str; 3] = ["dev", "release", "bench"];
/// The names of a Makefile, in the order in which GNU make looks for them.
const MAKEFILES: [&str; 3] = ["GNUmakefile", "makefile", "Makefile"];

/// A project's file with the targets that it defines.
struct TargetFile {
    file: &'static str,
    /// The kind of name, for messages.
    kind: &'static str,
    /// The command line, up to the name.
    line: &'static str,
    names: BTreeSet<String>,
}

/// Returns the command line for a target that exactly one of the folder's files defines, and that file.
pub(super) fn line_for(folder: &Path, target: &str) -> Result<(String, &'static str), RunError> {
    let (mut files, mut unread) = (Vec::new(), Vec::new());
    let mut add = |file: &'static str, kind, line, names: Result<BTreeSet<String>, String>| match names {
        Ok(names) => files.push(TargetFile { file, kind, line, names }),
        Err(why) => unread.push(format!("`{file}` cannot be read: {why}")),
    };
    if let Some(text) = read(&folder.join("package.json")) {
        add("package.json", "scripts", "npm run", text.and_then(|text| scripts(&text)));
    }
    if let Some((file, text)) = MAKEFILES.iter().find_map(|file| Some((*file, read(&folder.join(file))?))) {
        add(file, "targets", "make", text.map(|text| make_targets(&text)));
    }
    if let Some(text) = read(&folder.join("Cargo.toml")) {
        add("Cargo.toml", "profiles", "cargo build --profile", text.map(|text| profiles(&text)));
    }
    let defining: Vec<&TargetFile> = files.iter().filter(|file| file.names.contains(target)).collect();
    match defining.as_slice() {
        [only] => Ok((format!("{} {target}", only.line), only.file)),
        [] => Err(unknown(target, &files, unread)),
        several => {
            let files: Vec<&str> = several.iter().map(|file| file.file).collect();
            let lines: Vec<String> = several.iter().map(|file| format!("`{} {target}`", file.line)).collect();
            let message = format!("the target `{target}` is defined in several files: {}", files.join(", "));
            Err(RunError::invalid_input(message).suggest(format!("give the `command`: {}", lines.join(" or "))))
        }
    }
}

/// Returns the error for a target that no file defines, with those that there are.
fn unknown(target: &str, files: &[TargetFile], unread: Vec<String>) -> RunError {
    let shown: String = target.chars().take(64).flat_map(char::escape_debug).collect();
    let listed = |file: &TargetFile| {
        let names: Vec<&str> = file.names.iter().take(LISTED_MAX).map(String::as_str).collect();
        let more = file.names.len().saturating_sub(LISTED_MAX);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("the {} of {}: {}{more}", file.kind, file.file, names.join(", "))
    };
    let known = files.iter().filter(|file| !file.names.is_empty()).map(listed);
    let known: Vec<String> = ["build, test, check, clean".to_owned()].into_iter().chain(known).chain(unread).collect();
    let message = format!("there is no target `{shown}`; there are {}", known.join("; "));
    RunError::invalid_input(message).suggest("use one of these, or give the `command`")
}

/// Reads a file of the project. Returns `None` if there is none.
fn read(path: &Path) -> Option<Result<String, String>> {
    // A link could lead out of the workspace, and opening a pipe would wait for its writer.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            return Some(Err("it is a symbolic link".into()));
        }
        file => file,
    };
    let read = || {
        let file = file?;
        if !file.metadata()?.is_file() {
            return Ok(Err("it is not a file".to_owned()));
        }
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Ok(Err(format!("it has more than {FILE_BYTES_MAX} bytes")));
        }
        Ok(String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned()))
    };
    Some(read().unwrap_or_else(|error: io::Error| Err(error.kind().to_string())))
}

/// Returns true for a name that means the same to a shell and to the program, and is none of the program's options.
fn is_usable(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.:/@+".contains(c);
    !name.is_empty() && name.len() <= 200 && !name.starts_with('-') && name.chars().all(is_plain)
}

fn scripts(text: &str) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Package {
        #[serde(default)]
        scripts: BTreeMap<String, IgnoredAny>,
    }
    let package: Package = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Ok(package.scripts.into_keys().filter(|name| is_usable(name)).collect())
}

/// Returns the profiles that Cargo has by itself, and those of headers such as `[profile.NAME]`.
fn profiles(text: &str) -> BTreeSet<String> {
    let headers = text.lines().filter_map(|line| line.trim().strip_prefix("[profile."));
    let defined = headers.filter_map(|rest| rest.split(['.', ']']).next());
    let names = defined.map(|name| name.trim_matches(['"', '\'', ' '])).chain(CARGO_PROFILES);
    names.filter(|name| is_usable(name) && *name != "test").map(str::to_owned).collect()
}

/// Returns the targets of the rules that the file itself has. Names with variables and patterns are left out.
fn make_targets(text: &str) -> BTreeSet<String> {
    let (mut names, mut is_continued, mut is_defining) = (BTreeSet::new(), false, false);
    for line in text.lines() {
        let is_rest = std::mem::replace(&mut is_continued, line.ends_with('\\'));
        let first = line.split_whitespace().next().unwrap_or_default();
        if is_rest || line.starts_with('\t') || first.starts_with('#') {
            continue;
        }
        if matches!(first, "define" | "endef") {
            is_defining = first == "define";
            continue;
        }
        let Some((targets, rest)) = line.split_once(':').filter(|_| !is_defining) else { continue };
        // `A := b`, `A ::= b` and `A = b:c` set variables. The words of `$(shell …)` are no names.
        if targets.contains(['=', '$']) || rest.trim_start_matches(':').starts_with('=') {
            continue;
        }
        let usable = targets.split_whitespace().filter(|name| is_usable(name) && !name.starts_with('.'));
        names.extend(usable.map(str::to_owned));
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(folder: &Path, target: &str) -> Result<(String, &'static str), String> {
        line_for(folder, target).map_err(|error| error.error.message.clone())
    }

    #[test]
    fn a_target_is_a_name_that_exactly_one_file_defines() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write(
            "package.json",
            r#"{"scripts": {"production": "x", "dist": "x", "-x": "x", "a;b": "x", "build:all": 5}}"#,
        );
        write(
            "Makefile",
            "CC := gcc\nX = a:b\nAB ::= c\n.PHONY: dist docs\ndist docs: a.c\n\t@echo not: this\n%.o: %.c\n$(X): y\n\
             long: a \\\n  nor: this\ndefine text\nnot_this: x\nendef\n# nor: this\nlast:: x\n-n: x\n",
        );
        write("Cargo.toml", "[profile.fat]\ninherits = \"release\"\n[profile.release.package.x]\n[profile.test]\n");
        assert_eq!(line(folder.path(), "production"), Ok(("npm run production".into(), "package.json")));
        assert_eq!(line(folder.path(), "build:all"), Ok(("npm run build:all".into(), "package.json")));
        assert_eq!(line(folder.path(), "docs"), Ok(("make docs".into(), "Makefile")));
        assert_eq!(line(folder.path(), "fat"), Ok(("cargo build --profile fat".into(), "Cargo.toml")));
        assert_eq!(
            line(folder.path(), "dist"),
            Err("the target `dist` is defined in several files: package.json, Makefile".into())
        );
        for unusable in ["-x", "a;b", "nor", "not", "not_this", "X", "-n", ".PHONY", "%.o", "$(touch x)"] {
            assert_eq!(
                line(folder.path(), unusable),
                Err(format!(
                    "there is no target `{unusable}`; there are build, test, check, clean; the scripts of \
                     package.json: build:all, dist, production; the targets of Makefile: dist, docs, last, long; the \
                     profiles of Cargo.toml: bench, dev, fat, release"
                ))
            );
        }
    }

    #[test]
    fn a_file_that_is_too_large_or_a_link_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("Makefile"), format!("all: x\n{}", "#".repeat(1024 * 1024))).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", folder.path().join("package.json")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, folder.path().join("Cargo.toml"), 0o600.into()).unwrap();
        assert_eq!(
            line(folder.path(), "all"),
            Err("there is no target `all`; there are build, test, check, clean; `package.json` cannot be read: it is a \
                 symbolic link; `Makefile` cannot be read: it has more than 1048576 bytes; `Cargo.toml` cannot be \
                 read: it is not a file"
                .into())
        );
    }
}
