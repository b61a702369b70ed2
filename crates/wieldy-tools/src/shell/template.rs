//! Templates: fills the placeholders in a manifest's command line with a call's arguments.
//!
//! `{name}` stands for an argument's value: text as it is, numbers and booleans as written, anything else as JSON.
//! `{name?}` leaves out the whole word if the argument is absent. A list that is a word of its own becomes several
//! words. `{{` and `}}` are braces. In the input, `{args}` stands for all arguments as JSON, and `{context}` for the
//! call's context, unless the tool has an argument of that name.

use serde_json::{Map, Value};
use wieldy_core::name::{did_you_mean, near_misses};
use wieldy_core::{CommandSpec, RunError};

/// The name that stands for all arguments in a command's input.
const ALL: &str = "args";
/// The name that stands for the call's context in a command's input.
const CONTEXT: &str = "context";

/// The words of a command, with placeholders checked against the schema of its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Template {
    arguments: Vec<Word>,
    stdin: Option<Word>,
    /// True if the tool has an argument with the name of the context.
    has_context_argument: bool,
}

/// The words of a command for one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FilledCommand {
    pub(super) arguments: Vec<String>,
    pub(super) stdin: Option<String>,
}

type Word = Vec<Piece>;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(String),
    Value { name: String, optional: bool },
}

/// Reports all mistakes in a command's placeholders, given the schema of its arguments.
pub fn check_template(command: &CommandSpec, schema: &Value) -> Result<(), Vec<String>> {
    Template::new(command, schema).map(drop)
}

impl Template {
    /// Parses the words and reports every mistake at once.
    pub(super) fn new(command: &CommandSpec, schema: &Value) -> Result<Self, Vec<String>> {
        let mut mistakes = Vec::new();
        let mut read = |text: &String, in_stdin: bool| {
            let (word, wrong) = match parse(text) {
                Ok(word) => {
                    let wrong = word.iter().filter_map(|piece| mistake(piece, schema, in_stdin)).collect();
                    (word, wrong)
                }
                Err(wrong) => (Word::new(), vec![wrong]),
            };
            mistakes.extend(wrong.into_iter().map(|wrong| format!("`{text}`: {wrong}")));
            word
        };
        let arguments = command.arguments.iter().map(|text| read(text, false)).collect();
        let stdin = command.stdin.as_ref().map(|text| read(text, true));
        let has_context_argument = has_argument(schema, CONTEXT);
        if mistakes.is_empty() { Ok(Self { arguments, stdin, has_context_argument }) } else { Err(mistakes) }
    }

    /// Returns the words and the input for these arguments in this context.
    pub(super) fn fill(&self, arguments: &Value, context: &Map<String, Value>) -> Result<FilledCommand, RunError> {
        let words = self.fill_words(arguments)?;
        let Some(word) = &self.stdin else { return Ok(FilledCommand { arguments: words, stdin: None }) };
        let mut given = arguments.as_object().cloned().unwrap_or_default();
        if !self.has_context_argument {
            given.insert(CONTEXT.into(), Value::Object(context.clone()));
        }
        given.insert(ALL.into(), Value::String(arguments.to_string()));
        Ok(FilledCommand { arguments: words, stdin: joined(word, &given)? })
    }

    /// Returns the words for these arguments. The context is never part of them: other users of the machine see the
    /// words of a command.
    pub(super) fn fill_words(&self, arguments: &Value) -> Result<Vec<String>, RunError> {
        let nothing = Map::new();
        let given = arguments.as_object().unwrap_or(&nothing);
        let mut words = Vec::new();
        let mut options_ended = false;
        for word in &self.arguments {
            let filled = fill_word(word, given)?;
            let from_caller = matches!(word.first(), Some(Piece::Value { .. }));
            if from_caller && !options_ended {
                filled.iter().try_for_each(|filled| refuse_option(filled, word))?;
            }
            options_ended |= matches!(word.as_slice(), [Piece::Text(text)] if text == "--");
            words.extend(filled);
        }
        Ok(words)
    }
}

/// Returns the mistake in a placeholder, if there is one.
fn mistake(piece: &Piece, schema: &Value, in_stdin: bool) -> Option<String> {
    let Piece::Value { name, optional } = piece else { return None };
    if in_stdin && (name == ALL || name == CONTEXT && !has_argument(schema, CONTEXT)) {
        return None;
    }
    if name == CONTEXT && !has_argument(schema, CONTEXT) {
        return Some("the context of a call is given in `stdin` and in `environment`, and not in words".into());
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    let Some(property) = properties.and_then(|properties| properties.get(name)) else {
        let known = properties.into_iter().flat_map(Map::keys).map(String::as_str);
        let hint = did_you_mean(&near_misses(name, known)).map(|hint| format!("; {hint}")).unwrap_or_default();
        return Some(format!("there is no argument `{name}`{hint}"));
    };
    let required =
        schema.get("required").and_then(Value::as_array).is_some_and(|names| names.iter().any(|n| n == name));
    let always_there = required || property.get("default").is_some();
    (!optional && !always_there).then(|| {
        format!("the argument `{name}` may be absent; write `{{{name}?}}` to leave the word out then, or require it")
    })
}

fn has_argument(schema: &Value, name: &str) -> bool {
    schema.get("properties").and_then(Value::as_object).is_some_and(|properties| properties.contains_key(name))
}

fn parse(text: &str) -> Result<Word, String> {
    let mut pieces = Word::new();
    let mut literal = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        literal.push_str(&rest[..at]);
        let brace = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(brace) {
            literal.push_str(brace);
            rest = after;
            continue;
        }
        if brace == "}" {
            return Err("there is a `}` without a `{`; a brace itself is written `}}`".into());
        }
        let Some((inside, after)) = rest.split_once('}') else {
            return Err("there is a `{` that is never closed; a brace itself is written `{{`".into());
        };
        let name = inside.strip_suffix('?').unwrap_or(inside);
        if name.is_empty() || name.contains(|c: char| !c.is_alphanumeric() && !"_-.$".contains(c)) {
            return Err(format!("`{{{inside}}}` is not a placeholder; a brace itself is written `{{{{`"));
        }
        if !literal.is_empty() {
            pieces.push(Piece::Text(std::mem::take(&mut literal)));
        }
        pieces.push(Piece::Value { name: name.to_owned(), optional: inside.ends_with('?') });
        rest = after;
    }
    literal.push_str(rest);
    if !literal.is_empty() || pieces.is_empty() {
        pieces.push(Piece::Text(literal));
    }
    Ok(pieces)
}

/// Returns the words for one word of the template: mostly one, none if an optional argument is absent.
fn fill_word(word: &[Piece], given: &Map<String, Value>) -> Result<Vec<String>, RunError> {
    if let [Piece::Value { name, .. }] = word
        && let Some(Value::Array(values)) = given.get(name)
    {
        return Ok(values.iter().map(written).collect());
    }
    Ok(joined(word, given)?.into_iter().collect())
}

/// Joins the pieces into one text, or returns `None` if an optional argument is absent.
fn joined(word: &[Piece], given: &Map<String, Value>) -> Result<Option<String>, RunError> {
    let mut text = String::new();
    for piece in word {
        match piece {
            Piece::Text(literal) => text.push_str(literal),
            Piece::Value { name, optional } => match given.get(name).filter(|value| !value.is_null()) {
                Some(value) => text.push_str(&written(value)),
                None if *optional => return Ok(None),
                None => return Err(RunError::invalid_input(format!("the argument `{name}` is missing"))),
            },
        }
    }
    Ok(Some(text))
}

fn written(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Refuses a word that begins with a caller's value and that the program would take for an option.
fn refuse_option(filled: &str, word: &[Piece]) -> Result<(), RunError> {
    if !filled.starts_with('-') {
        return Ok(());
    }
    let name = match word.first() {
        Some(Piece::Value { name, .. }) => name.as_str(),
        _ => "",
    };
    let message = format!("the value of `{name}` begins with `-`, so the program would take it for an option");
    Err(RunError::invalid_input(message)
        .suggest("a path can be written `./-…`; a manifest can put the word `--` before it"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use wieldy_core::{Code, OutputForm};

    fn command(arguments: &[&str], stdin: Option<&str>) -> CommandSpec {
        CommandSpec {
            program: "program".into(),
            arguments: arguments.iter().map(ToString::to_string).collect(),
            stdin: stdin.map(Into::into),
            environment: Default::default(),
            folder: None,
            output: OutputForm::Text,
            repeats_failures: false,
        }
    }

    fn schema() -> Value {
        json!({
            "type": "object",
            "properties": {"path": {}, "paths": {}, "limit": {}, "deep": {"default": false}, "about": {}},
            "required": ["path"],
        })
    }

    fn filled(words: &[&str], arguments: Value) -> Result<Vec<String>, Code> {
        let template = Template::new(&command(words, None), &schema()).unwrap();
        template.fill_words(&arguments).map_err(|error| error.error.code)
    }

    #[test]
    fn placeholders_become_values() {
        let arguments = json!({"path": "a b; rm -rf $HOME", "limit": 5, "deep": true, "about": {"k": [1]}, "paths": ["x", 1, "y z"]});
        let words = ["{path}", "--limit={limit?}", "{deep}-{{path}}", "{about?}", "{paths?}", "in:{paths?}", ""];
        assert_eq!(
            filled(&words, arguments),
            Ok([
                "a b; rm -rf $HOME",
                "--limit=5",
                "true-{path}",
                r#"{"k":[1]}"#,
                "x",
                "1",
                "y z",
                r#"in:["x",1,"y z"]"#,
                ""
            ]
            .map(String::from)
            .to_vec())
        );
    }

    #[test]
    fn an_absent_optional_argument_takes_its_word_with_it() {
        let words = ["{path}", "--limit={limit?}", "{paths?}", "{about?}", "end"];
        assert_eq!(filled(&words, json!({"path": "p", "about": null})), Ok(vec!["p".into(), "end".into()]));
        assert_eq!(filled(&["{paths?}", "end"], json!({"path": "p", "paths": []})), Ok(vec!["end".into()]));
        assert_eq!(filled(&["{deep}"], json!({})), Err(Code::InvalidInput));
    }

    #[test]
    fn a_value_never_becomes_an_option() {
        for (words, arguments) in [
            (&["{path}"][..], json!({"path": "--exec=sh"})),
            (&["{path}.txt"], json!({"path": "-x"})),
            (&["{about?}{path}"], json!({"path": "-x", "about": ""})),
            (&["{paths?}"], json!({"paths": ["fine", "-x"]})),
            (&["{limit?}"], json!({"limit": -5})),
            (&["{path}", "--"], json!({"path": "-x"})),
            // Only a word of the manifest itself ends the options.
            (&["{about?}", "{path}"], json!({"path": "-x", "about": "--"})),
        ] {
            assert_eq!(filled(words, arguments.clone()), Err(Code::InvalidInput), "{words:?} {arguments}");
        }
        assert_eq!(filled(&["--", "{path}"], json!({"path": "-x"})), Ok(vec!["--".into(), "-x".into()]));
        assert_eq!(filled(&["--name={path}"], json!({"path": "-x"})), Ok(vec!["--name=-x".into()]));
        assert_eq!(filled(&["{path}"], json!({"path": "./-x"})), Ok(vec!["./-x".into()]));
    }

    #[test]
    fn the_input_may_hold_all_arguments() {
        let template = |stdin| Template::new(&command(&[], Some(stdin)), &schema()).unwrap();
        let context = json!({"room": "a"});
        let context = context.as_object().unwrap();
        let stdin = |text, arguments: Value| template(text).fill(&arguments, context).unwrap().stdin;
        assert_eq!(
            stdin("{args}\n", json!({"path": "p", "limit": 1})).as_deref(),
            Some("{\"path\":\"p\",\"limit\":1}\n")
        );
        assert_eq!(stdin("{context} {path}", json!({"path": "p"})).as_deref(), Some("{\"room\":\"a\"} p"));
        let own = json!({"properties": {"context": {}}, "required": ["context"]});
        let own = Template::new(&command(&["{context}"], Some("{context}")), &own).unwrap();
        let filled = own.fill(&json!({"context": "mine"}), context).unwrap();
        assert_eq!((filled.arguments, filled.stdin), (vec!["mine".to_owned()], Some("mine".to_owned())));
        assert_eq!(stdin("-- {path}", json!({"path": "-p"})).as_deref(), Some("-- -p"));
        assert_eq!(stdin("{about?}", json!({"path": "p"})), None);
    }

    #[test]
    fn every_mistake_is_reported_at_once() {
        let words = ["{pth}", "{limit}", "{open", "shut}", "{a b}", "{}", "{args}", "{path}{{}}", "{context}"];
        let mistakes = check_template(&command(&words, Some("{nonsense}")), &schema()).unwrap_err();
        assert_eq!(
            mistakes,
            [
                "`{pth}`: there is no argument `pth`; did you mean `path` or `paths`?",
                "`{limit}`: the argument `limit` may be absent; write `{limit?}` to leave the word out then, or require it",
                "`{open`: there is a `{` that is never closed; a brace itself is written `{{`",
                "`shut}`: there is a `}` without a `{`; a brace itself is written `}}`",
                "`{a b}`: `{a b}` is not a placeholder; a brace itself is written `{{`",
                "`{}`: `{}` is not a placeholder; a brace itself is written `{{`",
                "`{args}`: there is no argument `args`",
                "`{context}`: the context of a call is given in `stdin` and in `environment`, and not in words",
                "`{nonsense}`: there is no argument `nonsense`",
            ]
        );
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_without_panic_and_doubled_braces_come_back(text in "\\PC{0,40}") {
            let _ = parse(&text);
            let doubled = text.replace('{', "{{").replace('}', "}}");
            proptest::prop_assert_eq!(parse(&doubled), Ok(vec![Piece::Text(text)]));
        }

        #[test]
        fn no_value_makes_a_word_that_begins_with_a_dash(value in "-?\\PC{0,10}") {
            if let Ok(words) = filled(&["{path}"], json!({"path": value})) {
                proptest::prop_assert!(words.iter().all(|word| !word.starts_with('-')));
            }
        }
    }
}
