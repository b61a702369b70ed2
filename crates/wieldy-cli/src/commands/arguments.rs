//! A tool's arguments from the command line: `key=value`, `key:=json` and `--args`.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;

use anyhow::anyhow;
use serde_json::{Map, Value};
use wieldy::{ARGUMENTS_BYTES_MAX, Call, CallError, Code, parse_arguments};

use crate::args::BesideArgs;
use crate::exit::Failure;

/// Merges the arguments of both forms; a pair replaces the same key of `--args`.
pub(crate) fn arguments(whole: Option<&str>, pairs: &[String]) -> Result<Value, Failure> {
    let given = match whole {
        None => Value::Object(Map::new()),
        Some(text) => match text_of(text)? {
            // The executor refuses arguments of this size, and records the refusal.
            text if text.len() > ARGUMENTS_BYTES_MAX => return Ok(Value::String(text)),
            text => parse_arguments(&text).map_err(CallError::from)?,
        },
    };
    let mut object = match given {
        Value::Object(object) => object,
        // The validation of the arguments reports the mistake.
        other if pairs.is_empty() => return Ok(other),
        _ => {
            let told = "`--args` is not a JSON object, so nothing can be added to it";
            return Err(invalid(told.into(), "give the whole object by `--args`, or each argument as key=value"));
        }
    };
    let mut seen = HashSet::new();
    for pair in pairs {
        let (key, value) = read_pair(pair)?;
        if !seen.insert(key) {
            let hint = format!("give it once; a list is one argument: {key}:='[…]'");
            return Err(Failure::usage(anyhow!("the argument `{key}` is given twice")).hint(hint));
        }
        object.insert(key.to_owned(), value);
    }
    Ok(Value::Object(object))
}

/// The context and the metadata of calls, as the command line gives them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Beside {
    context: Option<Arc<Value>>,
    metadata: Option<Arc<Value>>,
}

impl Beside {
    /// Reads the objects. The executor checks their size, and records what it refuses.
    pub(crate) fn of(args: &BesideArgs) -> Result<Self, Failure> {
        let read = |option: &str, text: &Option<String>| match text {
            Some(text) => object(option, text).map(|object| Some(Arc::new(object))),
            None => Ok(None),
        };
        Ok(Self { context: read("--context", &args.context)?, metadata: read("--metadata", &args.metadata)? })
    }

    /// Adds the objects to a call.
    pub(crate) fn on(&self, call: Call) -> Call {
        Call { context: self.context.clone(), metadata: self.metadata.clone(), ..call }
    }
}

/// Reads an object that an option gives, or the file that it names.
fn object(option: &str, text: &str) -> Result<Value, Failure> {
    let text = match text.strip_prefix('@') {
        None => text.to_owned(),
        Some(path) => {
            let unread = |error| {
                let told = anyhow::Error::new(error).context(format!("cannot read `{option}` from `{path}`"));
                Failure::usage(told).hint("name a file that you may read")
            };
            bounded(File::open(path).map_err(unread)?, path)?
        }
    };
    let hint = format!("write an object, quoted for the shell: {option} '{{\"key\": \"value\"}}', or {option} @FILE");
    match serde_json::from_str(&text) {
        Ok(object @ Value::Object(_)) => Ok(object),
        Ok(_) => Err(invalid(format!("`{option}` is not a JSON object"), &hint)),
        Err(error) => Err(invalid(format!("`{option}` is not JSON: {error}"), &hint)),
    }
}

/// Reads `key=value` or `key:=json`. The first `=` counts, so values may contain others.
fn read_pair(pair: &str) -> Result<(&str, Value), Failure> {
    let wrong = || {
        let hint = "arguments are written key=value, or key:=json for numbers, lists and objects";
        Err(Failure::usage(anyhow!("`{pair}` is not an argument")).hint(hint))
    };
    let Some((key, value)) = pair.split_once('=') else { return wrong() };
    let (key, value) = match key.strip_suffix(':') {
        None => (key, Value::String(value.to_owned())),
        Some(key) => {
            let read = serde_json::from_str(value);
            let hint = format!("a text is written {key}=text; after `:=` comes JSON, quoted for the shell");
            (key, read.map_err(|error| invalid(format!("the argument `{key}` is not JSON: {error}"), &hint))?)
        }
    };
    if key.is_empty() { wrong() } else { Ok((key, value)) }
}

/// Returns the text itself, or the text of the file or standard input that it names.
fn text_of(text: &str) -> Result<String, Failure> {
    if text == "-" {
        return bounded(io::stdin().lock(), "standard input");
    }
    let Some(path) = text.strip_prefix('@') else { return Ok(text.to_owned()) };
    bounded(File::open(path).map_err(|error| unread(error, path))?, path)
}

/// Reads at most one byte more than arguments may have, so that a longer source is detected without reading all of it.
fn bounded(source: impl Read, name: &str) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    source.take(ARGUMENTS_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(|error| unread(error, name))?;
    if bytes.len() > ARGUMENTS_BYTES_MAX {
        return Ok(String::from_utf8_lossy(&bytes).into_owned());
    }
    let hint = "arguments are JSON, which is UTF-8 text";
    String::from_utf8(bytes)
        .map_err(|error| invalid(format!("the arguments are not UTF-8: {}", error.utf8_error()), hint))
}

fn unread(error: io::Error, name: &str) -> Failure {
    let told = anyhow::Error::new(error).context(format!("cannot read the arguments from `{name}`"));
    Failure::usage(told).hint("name a file that you may read; `--args -` reads standard input")
}

fn invalid(message: String, hint: &str) -> Failure {
    CallError::new(Code::ValidationFailed, message).suggest(hint).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::{Exit, Why};

    fn told(whole: Option<&str>, pairs: &[&str]) -> Result<String, (Exit, String)> {
        let pairs: Vec<String> = pairs.iter().map(|pair| (*pair).to_owned()).collect();
        arguments(whole, &pairs).map(|value| value.to_string()).map_err(|failure| match failure.why {
            Why::Own(error) => (failure.exit, error.to_string()),
            Why::Call(error) => (failure.exit, error.message),
        })
    }

    #[test]
    fn pairs_are_texts_or_json_and_replace_what_is_given_whole() {
        assert_eq!(
            told(None, &["a=1", "b:=1", "c=x=y", "d:=[\"=\"]", "e="]).unwrap(),
            r#"{"a":"1","b":1,"c":"x=y","d":["="],"e":""}"#
        );
        assert_eq!(told(Some(r#"{"a":1,"b":2}"#), &["a=x"]).unwrap(), r#"{"a":"x","b":2}"#);
        assert_eq!(told(Some(""), &[]).unwrap(), "{}");
        assert_eq!(told(Some("[1]"), &[]).unwrap(), "[1]", "the validation reports the mistake");
    }

    #[test]
    fn unreadable_arguments_are_reported_with_the_reason() {
        for (whole, pairs, exit, message) in [
            (None, vec!["a"], Exit::WrongUsage, "`a` is not an argument"),
            (None, vec!["=1"], Exit::WrongUsage, "`=1` is not an argument"),
            (None, vec![":=1"], Exit::WrongUsage, "`:=1` is not an argument"),
            (None, vec!["a=1", "a:=2"], Exit::WrongUsage, "the argument `a` is given twice"),
            (
                None,
                vec!["a:={"],
                Exit::InvalidCall,
                "the argument `a` is not JSON: EOF while parsing an object at line 1 column 1",
            ),
            (
                Some("{"),
                vec![],
                Exit::InvalidCall,
                "the arguments are not JSON: EOF while parsing an object at line 1 column 1",
            ),
            (
                Some("[]"),
                vec!["a=1"],
                Exit::InvalidCall,
                "`--args` is not a JSON object, so nothing can be added to it",
            ),
            (Some("@/no/such"), vec![], Exit::WrongUsage, "cannot read the arguments from `/no/such`"),
        ] {
            assert_eq!(told(whole, &pairs), Err((exit, message.to_owned())));
        }
        let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
        let (exit, message) = told(Some(&deep), &[]).unwrap_err();
        assert_eq!(
            (exit, message.as_str()),
            (Exit::InvalidCall, "the arguments are not JSON: recursion limit exceeded at line 1 column 128")
        );
    }

    proptest::proptest! {
        #[test]
        fn a_pair_is_split_at_its_first_separator(pair in "\\PC{0,40}") {
            if let Ok((key, Value::String(value))) = read_pair(&pair) {
                let (as_text, as_json) = (format!("{key}={value}"), format!("{key}:="));
                proptest::prop_assert!(pair == as_text || pair.starts_with(&as_json));
            }
        }
    }
}
