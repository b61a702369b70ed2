//! A minimal lexer for Rust that tells code from comments, literals and tests.

/// Returns the code with comments and the contents of literals replaced by spaces. Every line keeps its number and
/// width.
pub(super) fn code_of(text: &str) -> String {
    let characters: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < characters.len() {
        let end = token_end(&characters, at);
        match end {
            Some(end) => code.extend(characters[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' })),
            None => code.push(characters[at]),
        }
        at = end.unwrap_or(at + 1);
    }
    code
}

/// Returns the end of the comment or literal that starts here, if one does.
fn token_end(characters: &[char], at: usize) -> Option<usize> {
    let rest = &characters[at..];
    let within_word = at > 0 && is_word(characters[at - 1]);
    match rest {
        ['/', '/', ..] => Some(at + rest.iter().position(|c| *c == '\n').unwrap_or(rest.len())),
        ['/', '*', ..] => Some(at + block_comment(rest)),
        ['"', ..] => Some(at + 1 + quoted(&rest[1..], '"')),
        ['r', '"' | '#', ..] | ['b', 'r', '"' | '#', ..] | ['c', 'r', '"' | '#', ..] if !within_word => {
            raw_string(rest).map(|length| at + length)
        }
        ['\'', '\\', ..] => Some(at + 1 + quoted(&rest[1..], '\'')),
        // Any other text after a quote is a lifetime.
        ['\'', character, '\'', ..] if *character != '\'' => Some(at + 3),
        _ => None,
    }
}

fn block_comment(rest: &[char]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match &rest[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] if depth == 1 => return at + 2,
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    rest.len()
}

/// Returns the length of a quoted text, including its closing quote.
fn quoted(rest: &[char], quote: char) -> usize {
    let mut at = 0;
    while at < rest.len() {
        match rest[at] {
            '\\' => at += 2,
            c if c == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

fn raw_string(rest: &[char]) -> Option<usize> {
    let prefix = rest.iter().position(|c| !c.is_ascii_lowercase())?;
    let hashes = rest[prefix..].iter().take_while(|c| **c == '#').count();
    let start = prefix + hashes;
    if rest.get(start) != Some(&'"') {
        return None; // a raw identifier, such as r#type
    }
    let body = start + 1;
    let closing = (body..rest.len()).find(|at| {
        let after = &rest[at + 1..];
        rest[*at] == '"' && after.len() >= hashes && after[..hashes].iter().all(|c| *c == '#')
    });
    Some(closing.map_or(rest.len(), |at| at + 1 + hashes))
}

/// Returns the code, as [`code_of`] returns it, without the items under `#[cfg(test)]`.
pub(super) fn without_tests(code: &str) -> String {
    const MARK: &str = "#[cfg(test)]";
    let mut kept = String::with_capacity(code.len());
    let mut rest = code;
    while let Some(at) = rest.find(MARK) {
        let end = at + item_length(&rest[at + MARK.len()..]) + MARK.len();
        kept.push_str(&rest[..at]);
        kept.extend(rest[at..end].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        rest = &rest[end..];
    }
    kept.push_str(rest);
    kept
}

/// Returns the length of the item at the start of `code`: up to its closing brace, or to a semicolon outside of all
/// braces.
pub(super) fn item_length(code: &str) -> usize {
    let mut depth = 0_usize;
    for (at, character) in code.char_indices() {
        match character {
            '{' | '(' | '[' => depth += 1,
            '}' | ')' | ']' => depth = depth.saturating_sub(1),
            ';' if depth == 0 => return at + 1,
            _ => {}
        }
        if character == '}' && depth == 0 {
            // `use a::{b, c};` ends after its brace.
            return at + 1 + usize::from(code[at + 1..].starts_with(';'));
        }
    }
    code.len()
}

/// Returns the byte positions of `word` in `code`, where it is a whole word.
pub(super) fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = code[..*at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

/// Returns the number, from 1, of the line with this byte.
pub(super) fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_become_spaces_and_code_stays() {
        let source = "let a = \"x { \\\" y\"; // unsafe\n/* a /* b */ c */ let b = r#\"un\"safe\"#; let c = '{'; fn f<'a>(x: &'a str, y: char) {}";
        let code = code_of(source);
        assert_eq!(code.lines().count(), 2);
        assert_eq!(code.len(), source.len());
        let words: Vec<&str> = code.split_whitespace().collect();
        assert_eq!(words.join(" "), "let a = ; let b = ; let c = ; fn f<'a>(x: &'a str, y: char) {}");
    }

    #[test]
    fn escaped_quotes_raw_identifiers_and_byte_strings_are_told_apart() {
        assert_eq!(code_of(r"['\'', '\\', 'x'] r#type"), "[    ,     ,    ] r#type");
        assert_eq!(code_of("br#\"{\"# b\"{\" x"), format!("{} b{} x", " ".repeat(7), " ".repeat(3)));
    }

    #[test]
    fn what_is_compiled_only_for_tests_is_left_out() {
        let code = "fn a() {}\n#[cfg(test)]\nuse x::{y, z};\n#[cfg(test)]\nmod tests {\n fn b() {}\n}\nfn c() {}\n";
        let kept = without_tests(code);
        assert_eq!(kept.split_whitespace().collect::<Vec<_>>().join(" "), "fn a() {} fn c() {}");
        assert_eq!(kept.matches('\n').count(), code.matches('\n').count());
    }

    #[test]
    fn words_are_whole_words() {
        assert_eq!(words("unsafe_code unsafe {", "unsafe").collect::<Vec<_>>(), [12]);
    }
}
