//! Splits queries and tool texts into words, stems them, and expands synonyms.

use std::collections::HashMap;
use std::sync::LazyLock;

/// Stop words: words of a query that say nothing about the wanted tool.
const STOP_WORDS: &str = "a about all an and any are at be been by can could did do does for from give given had has have how i if in \
                          into is it its just let like may me my need of on one only or our out please should so some still tell than \
                          that the their them then there these they this those to too use using want was we were what when which who \
                          will with would you your";

/// The weight of a synonym. A word of the query weighs 1.
const SYNONYM: f64 = 0.5;

/// Words of users and of the trade, and the words that tools use for them. A word may be in several lines.
const SYNONYMS: [(&str, &str); 36] = [
    (
        "execute exec launch invoke terminal shell sh zsh console script program start cli subprocess system",
        "run command bash",
    ),
    (
        "npm npx yarn pnpm pip uv apt brew git docker curl wget ssh python node ruby install restart http api container database",
        "run command bash",
    ),
    (
        "compile compiler test testing suite make lint linter typecheck format benchmark package bundle release verify pass validate",
        "build test check",
    ),
    ("cargo pytest jest tox mvn maven gradle cmake ninja bazel tsc webpack ci", "build test check"),
    ("rm rmdir remove erase unlink rid drop trash discard clean purge wipe destroy", "delete"),
    (
        "change modify patch update rename substitute fix correct sed awk refactor tweak alter adjust insert append typo swap rewrite diff comment uncomment import",
        "edit replace",
    ),
    (
        "rest remainder truncated cut full whole complete long overflow elided page download attachment blob",
        "large output artifact part",
    ),
    ("locate wildcard extension suffix filename fd named ending called match star", "find pattern path glob"),
    ("markdown md txt csv yaml html image pdf", "file pattern glob"),
    (
        "ls dir browse tree contents directory subfolder subdirectory here structure layout entry overview",
        "list folder",
    ),
    ("ll du stat metadata mtime inode", "size time query list"),
    (
        "large larger largest big bigger biggest huge small smaller smallest heavy mb kb gb megabyte kilobyte disk space empty",
        "size bytes query",
    ),
    (
        "recent recently newest newer oldest older modified touched today yesterday week hour updated",
        "time change since query",
    ),
    ("ps top job task server daemon service worker pid alive up watcher spawned", "process background list"),
    ("tail follow watch finished done status console stdout stderr progress", "printed output read process"),
    (
        "kill terminate shut quit abort end cancel interrupt halt sigterm sigkill signal ctrl pkill killall exit close",
        "stop process",
    ),
    (
        "stdin type answer prompt interactive keyboard press enter reply respond confirm repl feed send",
        "input write process",
    ),
    (
        "cat open view show display content contents source look inspect see head less more print load examine review peek",
        "read file lines",
    ),
    ("show display enumerate", "list"),
    (
        "grep rg ripgrep egrep ag ack look lookup where occurrence mention contain containing find match",
        "search matching lines",
    ),
    (
        "used usage reference referenced caller definition defined declared symbol identifier regex regexp keyword phrase",
        "search matching lines",
    ),
    ("create save put overwrite store touch generate new add emit dump export mkdir produce", "write new"),
    (
        "earlier past previous prior audit action yesterday last already ago recent before did trail",
        "history calls before",
    ),
    ("often usage statistic average mean median duration slow slowest fast fastest time long", "stats history took"),
    (
        "rate success percentage ratio share most least popular frequent frequency reliability summary",
        "stats history failed",
    ),
    (
        "throughput performance latency percentile p50 p95 p99 speed second rps qps request load monitor telemetry counter",
        "metrics latency counts",
    ),
    ("rate trend error", "metrics failures"),
    ("quota allowed allowance remaining left budget concurrency parallel once capacity maximum max", "limits state"),
    (
        "status state situation current currently now health executor environment setting configuration session",
        "state current",
    ),
    ("log trace debug verbose warning warn event happened message timeline diagnostic", "log events"),
    ("why wrong problem failure fail crash exception", "log failure error"),
    ("folder", "directory"),
    ("document text note readme config", "file"),
    ("ticket bug", "issue"),
    ("fetch get retrieve", "read"),
    ("query filter", "find search"),
];

/// The stems of the tools' words for each stem of a user's word.
static MEANINGS: LazyLock<HashMap<String, Vec<String>>> = LazyLock::new(|| {
    let mut meanings: HashMap<String, Vec<String>> = HashMap::new();
    for (theirs, ours) in SYNONYMS {
        for word in words(theirs) {
            let known = meanings.entry(word).or_default();
            known.extend(words(ours));
            known.sort_unstable();
            known.dedup();
        }
    }
    meanings
});

static STOPS: LazyLock<Vec<String>> = LazyLock::new(|| words(STOP_WORDS).collect());

/// Returns the stems of a query with their weights: its own words without stop words, and their synonyms.
pub(super) fn expand(query: &str) -> Vec<(String, f64)> {
    let mut own: Vec<String> = words(query).collect();
    own.sort_unstable();
    own.dedup();
    if own.iter().any(|word| !STOPS.contains(word)) {
        own.retain(|word| !STOPS.contains(word));
    }
    let mut wanted: Vec<(String, f64)> = own.iter().map(|word| (word.clone(), 1.0)).collect();
    // A pattern asks for its matches.
    let star = query.contains('*').then(|| stem("star"));
    for theirs in own.iter().chain(&star) {
        for word in MEANINGS.get(theirs).into_iter().flatten() {
            match wanted.iter_mut().find(|(known, _)| known == word) {
                // Two words with the same synonym make it as sure as a word of the query.
                Some((_, weight)) => *weight = (*weight + SYNONYM).min(1.0),
                None => wanted.push((word.clone(), SYNONYM)),
            }
        }
    }
    wanted
}

/// Returns the stems of the words of a text. `readFile`, `read_file` and `Read-Files` have the same two.
pub(super) fn words(text: &str) -> impl Iterator<Item = String> {
    let mut spaced = String::with_capacity(text.len() + 8);
    let mut was_lower = false;
    for c in text.chars() {
        if c.is_uppercase() && was_lower {
            spaced.push(' ');
        }
        was_lower = c.is_lowercase() || c.is_numeric();
        spaced.extend(if c.is_alphanumeric() { c } else { ' ' }.to_lowercase());
    }
    let words: Vec<String> = spaced.split_whitespace().map(stem).collect();
    words.into_iter()
}

/// Removes common endings from a word, so that `files` finds `file` and `running` finds `run`.
fn stem(word: &str) -> String {
    // Without this rule `stats` would get the stem of `state`.
    if ["stats", "statistics", "statistic"].contains(&word) {
        return "statistic".into();
    }
    let long_enough = |stem: &&str| stem.chars().count() >= 3;
    if let Some(stem) = ["ies", "ied"].iter().find_map(|end| word.strip_suffix(end)).filter(long_enough) {
        return format!("{stem}y");
    }
    let hissing = ["ss", "sh", "ch", "x", "z"];
    let plural = word.strip_suffix("es").filter(|stem| hissing.iter().any(|end| stem.ends_with(end)));
    let plural = plural.or_else(|| word.strip_suffix('s').filter(|stem| !stem.ends_with(['s', 'u'])));
    let word = plural.filter(long_enough).unwrap_or(word);
    let verb = ["ing", "ed"].iter().find_map(|end| word.strip_suffix(end)).filter(long_enough);
    let Some(verb) = verb else { return word.strip_suffix('e').filter(long_enough).unwrap_or(word).to_owned() };
    // `running` doubles the last letter of `run`. `calling` does not double that of `call`.
    let mut letters = verb.chars().rev();
    let is_doubled = matches!((letters.next(), letters.next()), (Some(last), Some(before))
        if last == before && !"aeioulsz".contains(last));
    let end = verb.len() - usize::from(is_doubled && verb.is_ascii());
    verb[..end].strip_suffix('e').unwrap_or(&verb[..end]).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_into_words() {
        assert_eq!(
            words("readFile read_file Read-Files").collect::<Vec<_>>(),
            ["read", "fil", "read", "fil", "read", "fil"]
        );
    }

    #[test]
    fn forms_of_a_word_have_one_stem_and_other_words_have_another() {
        for forms in [
            "run runs running",
            "stop stops stopped stopping",
            "call calls called calling",
            "write writes writing",
            "delete deletes deleted deleting",
            "process processes processing",
            "query queries queried",
            "match matches matched matching",
            "change changes changed changing",
            "miss missed missing",
            "list lists listed listing",
            "commit commits committed committing",
            "stats statistics",
        ] {
            let mut stems: Vec<String> = words(forms).collect();
            stems.dedup();
            assert_eq!(stems.len(), 1, "{forms}: {stems:?}");
        }
        for (one, other) in [("stats", "state"), ("status", "state"), ("bus", "bu")] {
            assert!(stem(one) != stem(other), "{one} {other}");
        }
    }

    #[test]
    fn synonyms_expand_to_words_of_tools() {
        let wanted = |query: &str| expand(query).into_iter().map(|(word, _)| word).collect::<Vec<_>>();
        assert_eq!(wanted("please rm it"), ["rm", "delet"]);
        assert_eq!(wanted("*.rs"), ["rs", "find", "glob", "path", "pattern"]);
        assert_eq!(wanted("what is it"), ["is", "it", "what"], "a query of stop words only uses all its words");
        let weight = |query: &str, stem: &str| expand(query).into_iter().find(|(word, _)| word == stem).unwrap().1;
        assert_eq!(
            [weight("rg", "search"), weight("rg or grep", "search"), weight("search", "search")],
            [0.5, 1.0, 1.0]
        );
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_a_stem_panic(text in "(\\PC|ing|ed|ies|es){0,20}") {
            expand(&text);
        }
    }
}
