//! Redaction: no secret leaks in any encoding or place, and no other text is lost.
//!
//! A longer run takes `PROPTEST_CASES=50000`.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use aho_corasick::AhoCorasick;
use proptest::prelude::*;
use serde_json::{Value, json};
use wieldy_core::redact::{self, StreamRedactor};
use wieldy_core::{
    Body, CallError, Caller, Code, Content, Event, Note, Outcome, Redacted, Stream, Subject, ToolSpec, tool,
};
use wieldy_testkit::World;

/// Secrets of many kinds that the process has registered.
static CANARIES: LazyLock<Vec<String>> = LazyLock::new(|| {
    let mut random = fastrand::Rng::with_seed(7);
    let signs: Vec<char> = r##"abcXYZ019 !"#$%&'()*+,-./:;<=>?@[\]^_`{|}~éß漢🔑"##.chars().collect();
    let mut canaries = Vec::new();
    for length in [6, 7, 8, 9, 12, 20, 33, 40, 64, 100, 700, 1500] {
        canaries.push((0..length).map(|_| random.alphanumeric()).collect());
        canaries.push((0..length).map(|_| signs[random.usize(..signs.len())]).collect());
        let lines = (0..length).map(|at| if at % 24 == 23 { '\n' } else { random.alphanumeric() });
        canaries.push(lines.collect::<String>());
    }
    let canaries: Vec<String> = canaries.iter().map(|canary| format!("q{}z", canary.trim())).collect();
    assert!(canaries.iter().all(|canary| redact::hide(canary)));
    canaries
});

/// Returns base64 of the canary with its surroundings, and the part of it that encodes the canary alone.
fn base64(before: &[u8], canary: &[u8], after: &[u8], url: bool, padded: bool) -> (String, String) {
    let digits: Vec<char> = ('A'..='Z').chain('a'..='z').chain('0'..='9').collect();
    let digits = [digits, if url { vec!['-', '_'] } else { vec!['+', '/'] }].concat();
    let bytes = [before, canary, after].concat();
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let number = (0..3).fold(0, |number, at| number << 8 | usize::from(*three.get(at).unwrap_or(&0)));
        let count = three.len() + 1;
        text.extend((0..count).map(|at| digits[number >> (18 - 6 * at) & 63]));
        text.extend((count..4).filter(|_| padded).map(|_| '='));
    }
    let (first, last) = ((before.len() * 8).div_ceil(6), (before.len() + canary.len()) * 8 / 6);
    let alone = text[first..last].to_owned();
    (text, alone)
}

fn percent(text: &str, kept: &str) -> String {
    let is_kept = |byte: u8| byte.is_ascii_alphanumeric() && !kept.is_empty() || kept.as_bytes().contains(&byte);
    text.bytes().map(|byte| if is_kept(byte) { char::from(byte).into() } else { format!("%{byte:02X}") }).collect()
}

fn escaped(text: &str) -> String {
    let quoted = json!(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Returns the canary in one of its encodings, and the part of it that must not appear.
fn written(canary: &str, encoding: usize, edge: &[u8]) -> (String, String) {
    let both = |text: String| (text.clone(), text);
    let (before, after) = edge.split_at(edge.len() / 2);
    match encoding {
        0 => both(canary.to_owned()),
        1..=4 => base64(before, canary.as_bytes(), after, encoding & 1 == 1, encoding > 2),
        5 => both(canary.bytes().map(|byte| format!("{byte:02x}")).collect()),
        6 => both(canary.bytes().map(|byte| format!("{byte:02X}")).collect()),
        7 => both(percent(canary, "-_.~")),
        8 => both(percent(canary, "-_.!~*'()")),
        9 => both(percent(canary, "").to_lowercase()),
        10 => both(percent(canary, "-_.*").replace("%20", "+")),
        11 => both(escaped(canary)),
        _ => both(canary.chars().rev().collect()),
    }
}

/// Returns true if the text contains a recognizable part of the secret, plain or escaped once or twice.
fn is_seen(secret: &str, text: &str) -> bool {
    let seen = |secret: &str| {
        let characters: Vec<char> = secret.chars().collect();
        let parts = characters.windows(characters.len().min(8));
        let telling = parts.filter(|part| part.iter().filter(|sign| sign.is_alphanumeric()).count() > 3);
        let parts: BTreeSet<String> = telling.map(|part| part.iter().collect()).collect();
        !parts.is_empty() && AhoCorasick::new(parts).unwrap().is_match(text)
    };
    seen(secret) || seen(&escaped(secret)) || seen(&escaped(&escaped(secret)))
}

fn event(body: Body, call_id: &str) -> Event {
    let (caller, call_id) = (Arc::new(Caller::local()), Some(call_id.to_owned()));
    let subject = Subject { call_id, tool: Some("t".into()), ..Subject::of(caller) };
    Event { seq: 1, at: jiff::Timestamp::UNIX_EPOCH, subject: Arc::new(subject), body }
}

/// Returns everything that an observer, a log or a journal would receive if the secret were in this place.
fn shown(place: usize, secret: &str, around: &str, cuts: &[prop::sample::Index]) -> String {
    let text = format!("{around} {secret} {around}");
    let error = || Box::new(CallError::new(Code::ExecutionError, &text).suggest(&text).detail("why", text.as_str()));
    let note = json!({
        "id": "01890000-0000-7000-8000-000000000000", "state": "pending", "message": text, "priority": "low",
        "category": "note", "deliver_at": null, "inject_at": "now", "persist_cross_session": true, "owner": "o",
        "scope": "s", "left_at": "2026-01-01T00:00:00Z", "agent": text, "user": text, "replace_name": text,
    });
    let note: Note = serde_json::from_value(note).unwrap();
    let body = match place {
        0 => return redact::text(&text).into_owned(),
        1 => return Redacted::from(json!({"note": [text]})).value().to_string(),
        2 => return redact::text(&json!({"a": json!({"b": [text]}).to_string()}).to_string()).into_owned(),
        3 => return redact::text(&format!("GET https://host/{secret}?q={secret}#{around}")).into_owned(),
        4 => return redact::value(&json!({ text: 1, "b": 2 })).to_string(),
        5 => {
            let within = around.len() + 1..around.len() + 1 + secret.len();
            return streamed(text.as_bytes(), within, cuts);
        }
        6 => Body::CallWarning { message: text },
        7 => Body::RetryExhausted { attempts: 2, error: error() },
        8 => Body::SandboxViolation { sandbox: "s".into(), message: text },
        9 => Body::SelfNotify(Box::new(note)),
        10 => Body::SourceStale {
            path: text.clone(),
            project_id: Some(text.clone()),
            previous_hash: "".into(),
            current_hash: None,
            message: text,
        },
        11 => {
            let (confirmation, digest) = ("01890000-0000-7000-8000-000000000000".parse().unwrap(), "d".into());
            Body::ConfirmationRequested { confirmation, digest, reason: text, expires_in_ms: 1 }
        }
        12 => Body::CallPending {
            arguments: json!({"deep": {"text": json!({"c": text}).to_string()}}).into(),
            task: false,
            called_as: None,
            workspace: None,
            metadata: None,
            rerun: None,
        },
        _ => Body::CallProgress { percent: None, message: Some(text), stream: None, elapsed_ms: 0.0 },
    };
    let event = event(body, secret);
    format!("{} {}", event.data(), event.cloud_event())
}

/// Returns the output of a redacted stream that is cut at these places. Every other cut is inside `within`.
fn streamed(bytes: &[u8], within: Range<usize>, cuts: &[prop::sample::Index]) -> String {
    let cut = |(number, cut): (usize, &prop::sample::Index)| match number % 2 {
        0 => within.start + cut.index(within.len() + 1),
        _ => cut.index(bytes.len() + 1),
    };
    let mut ends: Vec<usize> = cuts.iter().enumerate().map(cut).collect();
    ends.push(bytes.len());
    ends.sort_unstable();
    let (mut stream, mut shown, mut start) = (StreamRedactor::default(), String::new(), 0);
    for end in ends {
        shown += &stream.push(&bytes[start..end]);
        start = end;
    }
    shown + &stream.finish()
}

/// Generates texts without secrets, many of which look like the start of one.
fn benign() -> impl Strategy<Value = String> {
    let words = prop::sample::select(vec![
        "token",
        "password",
        "Authorization",
        "the",
        "max_tokens=5",
        "src/tokenizer.rs:12",
        "bearer",
        "Basic",
        "--verbose",
        "-----BEGIN",
        "-----BEGIN CERTIFICATE-----",
        "https://example.org:80/a?b=c",
        "ssh://git@host",
        "{\"a\": [1, \"b\"]}",
        "ghp_",
        "sk-",
        "eyJ",
        "\"quoted\"",
        "don't",
        "é漢🔑",
        "...",
        "-",
        "---",
        "\\",
        "\"",
        "{",
        "}",
        "100%",
        "AKIA",
        "cookie",
        "api_key",
        "secret",
        "q",
        "1 + 1",
        "$HOME",
        "x=y",
        "a:b",
        "\u{1b}[31m",
        "",
    ]);
    let word = prop_oneof![30 => words.prop_map(str::to_owned), 4 => "[a-z]{1,12}", 1 => (300..600_usize).prop_map(|count| "abcdefghij".repeat(count))];
    let space = prop::sample::select(vec![" ", "\n", "\r\n", "\t", "  ", " \n\n"]);
    prop::collection::vec((word, space), 0..12).prop_map(|parts| parts.iter().map(|(a, b)| format!("{a}{b}")).collect())
}

fn cuts() -> impl Strategy<Value = Vec<prop::sample::Index>> {
    prop::collection::vec(any::<prop::sample::Index>(), 0..16)
}

/// Texts with one secret `§`, recognizable by its shape or by the text before it.
const KEPT_BY: [&str; 22] = [
    "use §",
    "password=§",
    "PGPASSWORD='§' psql",
    "--token §",
    "Authorization: Bearer §\n",
    "curl -H \"X-Api-Key: §\"",
    "https://ada:§@host/",
    "https://host/?a=b&access_token=§&c=d",
    "{\"api_key\": \"§\", \"b\": 1}",
    "{'secret': '§'}",
    "{\\\"password\\\": \\\"§\\\"}",
    "\"credentials\": {\"user\": [\"§\"]}",
    "password: §",
    "client_secret = \"§\"",
    "bearer   §",
    "Cookie: a=§; b=c\n",
    "-----BEGIN PRIVATE KEY-----\n§\n§\n-----END PRIVATE KEY-----\n",
    "-----BEGIN RSA PRIVATE KEY-----\\n§\\n-----END RSA PRIVATE KEY-----",
    "TOKEN=§",
    "refresh-token:\t§",
    "(password=§)",
    "\"pin\":\"§\"",
];

proptest! {
    #[test]
    fn a_known_secret_never_comes_out(
        canary in any::<prop::sample::Index>(), encoding in 0..13_usize, edge in prop::collection::vec(any::<u8>(), 0..9),
        place in prop_oneof![2 => 0..14_usize, 1 => Just(5)], around in benign(), cuts in cuts(),
    ) {
        let canary = &CANARIES[canary.index(CANARIES.len())];
        let (written, secret) = written(canary, encoding, &edge);
        let shown = shown(place, &written, &around, &cuts);
        prop_assert!(!is_seen(&secret, &shown), "{secret} of {canary:?} is in {shown}");
    }

    #[test]
    fn a_token_never_comes_out_of_a_stream_in_pieces(
        kept_by in 0..KEPT_BY.len(), begin in prop::sample::select(vec!["ghp_", "glpat-", "sk-", "xoxb-", "AIza", "hf_"]),
        secret in "[a-z]{3}[0-9]{3}[A-Za-z0-9]{30,60}", long in prop::option::weighted(0.05, 100..300_usize),
        before in benign(), after in benign(), cuts in cuts(),
    ) {
        let whole = format!("{begin}{}", secret.repeat(long.unwrap_or(1)));
        let text = format!("{before} {} {after}", KEPT_BY[kept_by].replace('§', &whole));
        let shown = streamed(text.as_bytes(), before.len()..text.len() - after.len(), &cuts);
        prop_assert!(!is_seen(&secret, &shown), "{secret} is in {shown}");
        prop_assert!(shown.starts_with(&before), "{before:?} is not in {shown:?}");
        let shown = redact::text(&text);
        prop_assert!(!is_seen(&secret, &shown), "{secret} is in {shown}");
    }

    #[test]
    fn ordinary_text_comes_out_unchanged(text in benign(), cuts in cuts()) {
        prop_assert_eq!(&streamed(text.as_bytes(), 0..text.len(), &cuts), &text);
        let (mut stream, mut shown) = (StreamRedactor::default(), 0);
        for (number, bytes) in text.as_bytes().chunks(500).enumerate() {
            shown += stream.push(bytes).len();
            prop_assert!(number * 500 <= shown + 8 * 1024, "a few KiB are held back, not more");
        }
        prop_assert_eq!(&redact::text(&text), &text);
        let value = json!({"text": text, "texts": [text]});
        prop_assert_eq!(&*redact::value(&value), &value);
    }
}

#[tokio::test(start_paused = true)]
async fn output_is_shown_without_secrets_and_returned_with_them() {
    assert!(redact::hide("canary-of-a-run"));
    let print = tool(ToolSpec::new("print", "").read_only(), |arguments: Value, run| async move {
        run.output(Stream::Stdout, b"begin canary-");
        run.output(Stream::Stderr, b"password=hunt");
        run.output(Stream::Stdout, b"of-a-run end");
        run.output(Stream::Stderr, b"er2 is what it is");
        run.warn("canary-of-a-run");
        match arguments["captured"] == json!(true) {
            true => Ok(run.captured()),
            false => Ok(Outcome::text("canary-of-a-run")),
        }
    });
    let world = World::new([Arc::new(print) as _]);
    let captured = world.call("print", json!({"captured": true})).await;
    let whole = "begin canary-password=huntof-a-run ender2 is what it is";
    assert_eq!(Content::text_of(&captured.content), whole);
    let own = world.call("print", json!({"captured": false, "note": "canary-of-a-run"})).await;
    assert_eq!(Content::text_of(&own.content), "canary-of-a-run");
    insta::assert_snapshot!(world.tape(), @r#"
    #1 tool.call.pending {"arguments":{"captured":true},"tool":"print"}
    #1 tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"print"}
    #1 tool.call.progress {"message":"begin ","stream":"stdout","tool":"print"}
    #1 tool.call.progress {"message":"[redacted] ","stream":"stdout","tool":"print"}
    #1 tool.call.warning {"message":"[redacted]","tool":"print"}
    #1 tool.call.progress {"message":"password=[redacted] is what it is","stream":"stderr","tool":"print"}
    #1 tool.call.progress {"message":"end","stream":"stdout","tool":"print"}
    #1 tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":55,"tool":"print"}
    #2 tool.call.pending {"arguments":{"captured":false,"note":"[redacted]"},"tool":"print"}
    #2 tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"print"}
    #2 tool.call.progress {"message":"begin ","stream":"stdout","tool":"print"}
    #2 tool.call.progress {"message":"[redacted] ","stream":"stdout","tool":"print"}
    #2 tool.call.warning {"message":"[redacted]","tool":"print"}
    #2 tool.call.progress {"message":"password=[redacted] is what it is","stream":"stderr","tool":"print"}
    #2 tool.call.progress {"message":"end","stream":"stdout","tool":"print"}
    #2 tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":15,"tool":"print"}
    "#);
}
