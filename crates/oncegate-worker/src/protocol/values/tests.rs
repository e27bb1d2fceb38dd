use std::collections::{BTreeMap, HashSet};

use super::*;
use crate::protocol::reply::Reply;

/// The messages that the worker has.
const IDS: [&str; 3] = ["481516234201", "481516234202", "481516234203"];

fn known(id: &str) -> bool {
    IDS.contains(&id)
}

/// A finding in short: `1=01` is an answer on line 1 to the message that ends in 01, `1?02` a wrong
/// one, `1?` one to no known message, and the rest is noise.
fn short(written: Written) -> String {
    match written {
        Written::Ready(_) => "ready".to_owned(),
        Written::Answer { answer, line } => format!("{line}={}", tail(&answer.id)),
        Written::Wrong { id, why } => {
            format!("{}?{}", line_of(&why), tail(&id.unwrap_or_default()))
        }
        Written::Noise { why } => format!("{}:{}", line_of(&why), text_of(&why)),
    }
}

fn tail(id: &str) -> &str {
    &id[id.len().saturating_sub(2)..]
}

fn line_of(why: &str) -> &str {
    why.split(' ').nth(1).unwrap()
}

fn text_of(why: &str) -> String {
    let quoted = &why[why.find('"').unwrap()..];
    serde_json::from_str(quoted).unwrap_or_else(|_| quoted.to_owned())
}

/// Reads a text that comes in parts of this size.
fn found_in_parts(size: usize, written: &[u8]) -> Vec<String> {
    let mut finder = Finder::default();
    let mut found: Vec<Written> = written
        .chunks(size)
        .flat_map(|part| finder.take(part, &known))
        .collect();
    found.extend(finder.end(&known));
    found.into_iter().map(short).collect()
}

fn check(written: &str, expected: &[&str]) {
    for size in [usize::MAX, 1, 2, 7] {
        let found = found_in_parts(size.min(written.len()), written.as_bytes());
        assert_eq!(found, expected, "{written:?} in parts of {size}");
    }
}

const ONE: &str = r#"{"id":"481516234201","outcome":"complete"}"#;
const TWO: &str = r#"{"id":"481516234202","outcome":"retry","reason":"}{ \" ][ \\"}"#;

#[test]
fn answers_need_no_line_of_their_own() {
    check(&format!("{ONE}\n{TWO}\n"), &["1=01", "2=02"]);
    check(
        &format!("{ONE}{TWO}\n\n{ONE}\r\n \n"),
        &["1=01", "1=02", "3=01"],
    );
    check(
        &format!("\u{feff}{ONE}\n\u{feff}\n{TWO}"),
        &["1=01", "3=02"],
    );
    check(
        "{\n  \"id\": \"481516234201\",\n  \"outcome\": \"complete\"\n}\n",
        &["1=01"],
    );
    check(
        &format!("[\n{ONE},\n{ONE}\n]{TWO}\n"),
        &["2=01", "3=01", "4=02"],
    );
    check(&format!("{ONE},\n{TWO},\n"), &["1=01", "2=02"]);
}

#[test]
fn text_before_an_answer_costs_no_answer() {
    for before in [
        "charging",
        "50%\rcharging [====>   ] 100%\r",
        "WARN config={retries: 3} ",
        "\u{1b}[32mok\u{1b}[0m ",
        "42 ",
        "data: ",
        "say \"hi ",
        "{step 1 of 3: ",
        "{\"progress\": ",
        "{\"progress\": {\"of\": ",
        "{\"msg\":\"charging ",
        "[1, {\"a\": [",
        "}] ",
        "'",
    ] {
        let found = found_in_parts(7, format!("{before}{ONE}\n").as_bytes());
        assert!(found.contains(&"1=01".to_owned()), "{before}: {found:?}");
        let held: Vec<String> = Finder::default()
            .take(format!("{before}{ONE}").as_bytes(), &known)
            .into_iter()
            .map(short)
            .collect();
        assert_eq!(held, ["1=01"], "{before}: it waits for nothing behind it");
    }
    check(&format!("\0{ONE}\n"), &["1=01"]);
    check(
        &format!("{ONE} charged\n{TWO}\n"),
        &["1=01", "1: charged\n", "2=02"],
    );
    check(&format!("data: {ONE}\n\n"), &["1=01", "1:data: \n"]);
}

#[test]
fn lines_that_open_and_never_close_swallow_nothing() {
    for line in [
        "[step 1 of 3: sending",
        "{step 1 of 3: sending",
        "{",
        "{\"a\":",
        "{\"a\":[1,",
        "[[[",
        "{\"a\":{\"b\":1},",
        "{\"id\":\"481516234203\",",
    ] {
        let found = found_in_parts(5, format!("{line}\n{ONE}\n{line}\n{TWO}\n").as_bytes());
        for answer in ["2=01", "4=02"] {
            assert!(found.contains(&answer.to_owned()), "{line}: {found:?}");
        }
    }
    let pretty = "{\n  \"id\": \"481516234201\",\n  \"outcome\": \"complete\"\n}\n";
    let found = found_in_parts(5, format!("{{\n{pretty}").as_bytes());
    assert!(found.contains(&"2=01".to_owned()), "{found:?}");
}

#[test]
fn an_answer_within_something_else_is_one() {
    for around in [
        format!("{{\"event\":\"done\",\"answer\":{ONE}}}"),
        format!("{{\"level\":30,\"msg\":{}}}", serde_json::json!(ONE)),
        serde_json::json!(ONE).to_string(),
        format!("INFO answered {}", serde_json::json!(ONE)),
        format!("[[{ONE}]]"),
    ] {
        let found = found_in_parts(9, format!("{around}\n").as_bytes());
        assert!(found.contains(&"1=01".to_owned()), "{around}: {found:?}");
    }
}

#[test]
fn a_result_is_no_answer() {
    let nested = format!(r#"{{"id":"481516234203","outcome":"complete","result":{TWO}}}"#);
    check(&format!("{nested}\n"), &["1=03"]);
    let quoted = format!(
        r#"{{"id":"481516234203","outcome":"complete","result":{}}}"#,
        serde_json::json!(TWO)
    );
    check(&format!("{quoted}\n"), &["1=03"]);
}

#[test]
fn the_result_of_another_answer_hides_none_behind_it() {
    let with_result = r#"{"id":"481516234203","outcome":"complete","result":{"n":[1]}}"#;
    let open = format!(r#"{{"a":{{"result":1,"b":[{with_result},{ONE}"#);
    for end in ["", "\n"] {
        let found: Vec<String> = Finder::default()
            .take(format!("{open}{end}").as_bytes(), &known)
            .into_iter()
            .map(short)
            .collect();
        let answers: Vec<&str> = found.iter().map(String::as_str).take(2).collect();
        assert_eq!(answers, ["1=03", "1=01"], "{open}{end:?}");
    }
    // While the rest of an answer is still to come, its result is none.
    for begun in [
        format!(r#"{{"result":{ONE}"#),
        format!(r#"{{"result" : [{{"n":1}},{{"charge":{ONE}"#),
    ] {
        let found = Finder::default().take(begun.as_bytes(), &known);
        assert!(found.is_empty(), "{begun}: {found:?}");
    }
}

#[test]
fn what_looks_like_an_answer_to_another_is_told_from_noise() {
    // By itself it is meant as an answer; in other text it is a log's.
    check("{\"id\":\"7\",\"outcome\":\"complete\"}\n", &["1=7"]);
    check("{\"outcome\":\"complete\"}\n", &["1?"]);
    check(
        "{\"id\":\"481516234201\",\"outcome\":\"done\"}\n",
        &["1?01"],
    );
    for noise in [
        "INFO charged {\"id\":\"7\",\"outcome\":\"complete\"}",
        "{\"level\":30,\"id\":17,\"msg\":\"charged\"}",
        "{\"level\":30,\"id\":\"481516234201\",\"msg\":\"charging\"}",
        "got {\"type\":\"message\",\"id\":\"481516234201\",\"payload\":\"{\\\"id\\\":\\\"7\\\",\\\"outcome\\\":\\\"complete\\\"}\"}",
        "17",
        "{}",
        "[1,2]",
        "}",
        "\"{\"",
        "the \"outcome\" of 7 is \"charged\"",
        "{\"order\":7,\"outcome\":\"complete\"}",
        "{\"id\":\"7\",\"outcome\":\"complete\",\"level\":30}",
        "{\"level\":30,\"data\":{\"id\":\"481516234201\",\"outcome\":\"pending\"}}",
        "INFO {\"id\":\"481516234201\",\"outcome\":\"pending\"}",
    ] {
        let found = found_in_parts(noise.len(), noise.as_bytes());
        assert!(
            found.iter().all(|found| found.starts_with("1:")),
            "{noise}: {found:?}"
        );
    }
}

#[test]
fn a_damaged_answer_names_its_message_if_it_can() {
    check("{\"id\":\"481516234201\",\"outcome\":\"compl\n", &["1?01"]);
    check("34201\",\"outcome\":\"complete\"}\n", &["1?"]);
    // Two threads that write at the same time.
    check(
        &format!("{{\"id\":\"481516234201\",\"outco{TWO}me\":\"complete\"}}\n"),
        &["1=02", "1?01"],
    );
}

#[test]
fn readiness_is_found_in_other_text_once() {
    let ready = r#"{"type":"ready","v":1,"max_in_flight":8}"#;
    check(&format!("loading… {ready}\n"), &["ready", "1:loading… \n"]);
    check(
        &format!("{ready}\nagain {ready}\n"),
        &["ready", &format!("2:again {ready}\n")],
    );
    check(&format!("{ready}\n{ready}\n"), &["ready", "ready"]);
}

#[test]
fn what_is_too_long_is_passed_on_once() {
    let most = usize::try_from(LINE_MAX_BYTES).unwrap();
    for begin in [r#"{"id":""#, "x"] {
        let mut finder = Finder::default();
        let part = format!("{begin}{}", "x".repeat(most - begin.len()));
        let found: Vec<Written> = [part, format!("{ONE}{ONE}\n"), format!("{TWO}\n")]
            .iter()
            .flat_map(|part| finder.take(part.as_bytes(), &known))
            .collect();
        let [Written::Noise { why }, Written::Answer { line: 2, .. }] = &found[..] else {
            panic!("{begin}: {} found", found.len())
        };
        assert!(why.contains("is longer than") && why.len() < 500, "{why}");
    }
}

/// Text that something beside the worker writes, with no answer in it and without a line feed.
fn noise(random: &mut fastrand::Rng) -> Vec<u8> {
    const TEXTS: [&str; 20] = [
        "",
        " ",
        "charging ",
        "50%\r",
        "\u{1b}[32mok\u{1b}[0m ",
        "WARN config={retries: 3} ",
        "{",
        "[",
        "{\"",
        "{\"a\": ",
        "{\"a\":{\"b\":[",
        "}",
        "]",
        ",",
        "\"",
        "data: ",
        "42 ",
        "{\"level\":30,\"id\":17,\"msg\":\"{}\"} ",
        "INFO {\"id\":\"7\",\"outcome\":\"charged\"} ",
        "\\",
    ];
    let mut text = Vec::new();
    for _ in 0..random.usize(..4) {
        match random.u32(..10) {
            0 => text.push(b'\0'),
            1 => text.push(0xff),
            2 => text.extend((0..random.usize(..9)).map(|_| random.u8(1..=255))),
            _ => text.extend(TEXTS[random.usize(..TEXTS.len())].as_bytes()),
        }
    }
    text.retain(|byte| *byte != b'\n');
    text
}

/// An answer to this message with odd things within, and what it must be read as.
fn odd_answer(random: &mut fastrand::Rng, id: &str) -> (String, &'static str) {
    const OTHERS: [&str; 12] = [
        r#""delay_ms":500.0"#,
        r#""delay_ms":"5""#,
        r#""delay_ms":-1"#,
        r#""delay_ms":0.5"#,
        r#""reason":{"code":1}"#,
        r#""reason":null"#,
        r#""reason":"} { \" [ \\""#,
        r#""result":{"id":"7","outcome":"complete","n":[1,{}]}"#,
        r#""result":NaN"#,
        r#""result":"{\"id\":\"7\",\"outcome\":\"retry\"}""#,
        r#""x":{"outcome":"retry"}"#,
        "\"note\":\"tab\tescape\u{1b}\"",
    ];
    const OUTCOMES: [&str; 4] = ["complete", "retry", "later", "dead-letter"];
    let outcome = OUTCOMES[random.usize(..OUTCOMES.len())];
    let mut fields = vec![
        format!(r#""id":"{id}""#),
        format!(r#""outcome":"{outcome}""#),
    ];
    for _ in 0..random.usize(..4) {
        let other = OTHERS[random.usize(..OTHERS.len())];
        let name = other.split(':').next();
        if !fields.iter().any(|field| field.split(':').next() == name) {
            fields.push(other.to_owned());
        }
    }
    random.shuffle(&mut fields);
    let blank = if random.bool() { " " } else { "" };
    (
        format!("{{{blank}{}{blank}}}", fields.join(&format!(",{blank}"))),
        outcome,
    )
}

fn outcome_of(reply: &Reply) -> &'static str {
    match reply {
        Reply::Complete(_) => "complete",
        Reply::Retry { .. } => "retry",
        Reply::Later { .. } => "later",
        Reply::DeadLetter { .. } => "dead-letter",
        other => panic!("{other:?}"),
    }
}

/// 10,000 answers with noise around and inside: none is lost, none is taken for another, and each
/// is read before the worker writes anything more behind its line.
// invariant: answers-in-noise
#[test]
fn ten_thousand_answers_in_noise_are_read_as_they_were_meant() {
    let seed = std::env::var("SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| fastrand::u64(..));
    println!("SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut finder = Finder::default();
    let first = 300_000_000_000_u64;
    let mut in_flight: HashSet<String> = HashSet::new();
    let mut next = first;
    for number in 0..10_000 {
        while in_flight.len() < 4 {
            in_flight.insert(next.to_string());
            next += 1;
        }
        let mut meant: BTreeMap<String, &str> = BTreeMap::new();
        let mut text = Vec::new();
        // Lines of noise before it, also such as open and never close.
        for _ in 0..random.usize(..3) {
            text.extend(noise(&mut random));
            text.push(b'\n');
        }
        for id in in_flight.iter().take(random.usize(1..3)) {
            text.extend(noise(&mut random));
            let (answer, outcome) = odd_answer(&mut random, id);
            let answer = if random.u32(..8) == 0 {
                text.push(b'\n');
                serde_json::json!(answer).to_string()
            } else {
                answer
            };
            text.extend(answer.as_bytes());
            meant.insert(id.clone(), outcome);
            if random.u32(..3) == 0 || answer.starts_with('"') {
                text.push(b'\n');
            }
        }
        text.push(b'\n');
        let mut read: BTreeMap<String, &str> = BTreeMap::new();
        let size = [1, 3, 64, usize::MAX][random.usize(..4)].min(text.len());
        for part in text.chunks(size) {
            for written in finder.take(part, &|id| in_flight.contains(id)) {
                if let Written::Answer { answer, .. } = written
                    && in_flight.remove(&answer.id)
                {
                    let id = answer.id.clone();
                    read.insert(id, outcome_of(&answer.into()));
                }
            }
        }
        assert_eq!(
            read,
            meant,
            "SEED={seed}, answer {number}: {:?}",
            String::from_utf8_lossy(&text)
        );
    }
}
