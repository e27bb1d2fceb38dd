use oncegate_runtime::Origin;

use super::*;

fn line(text: &str) -> Line {
    Line {
        number: 7,
        text: text.as_bytes().to_vec(),
    }
}

#[test]
fn lines_of_the_protocol_are_read_and_others_named() {
    let ready = parse(&line(r#"{"type":"ready","v":1,"max_in_flight":8}"#));
    assert!(matches!(
        ready,
        Ok(WorkerLine::Ready(Ready {
            max_in_flight: 8,
            ..
        }))
    ));
    let answer = parse(&line(
        r#"{"id":"17","outcome":"complete","result":{"n":9007199254740993}}"#,
    ));
    let Ok(WorkerLine::Answer(Answer {
        result: Some(result),
        ..
    })) = answer
    else {
        panic!("an answer")
    };
    assert_eq!(result.get(), r#"{"n":9007199254740993}"#);
    assert!(
        parse(&line(
            r#"{"id":"17","outcome":"dead-letter","reason":"no"}"#
        ))
        .is_ok()
    );
    let answers = parse(&line(
        r#"[{"id":"1","outcome":"complete"},{"id":"2","outcome":"retry"}]"#,
    ));
    assert!(matches!(answers, Ok(WorkerLine::Answers(answers)) if answers.len() == 2));
    let later = parse(&line(r#"{"id":"17","outcome":"later","delay_ms":500}"#));
    let Ok(WorkerLine::Answer(later)) = later else {
        panic!("an answer")
    };
    assert!(
        matches!(Reply::from(later), Reply::Later { delay: Some(delay), .. } if delay.as_millis() == 500)
    );
}

#[test]
fn the_exact_mistake_is_named() {
    for (wrong, mistake) in [
        ("hello", "no JSON"),
        ("", "no JSON"),
        ("[1]", "no object"),
        ("{}", "neither"),
        (r#"{"outcome":"complete"}"#, "no `id`"),
        (r#"{"id":17,"outcome":"complete"}"#, "as the string \"17\""),
        (
            r#"{"id":null,"outcome":"complete"}"#,
            "`id` that is no string",
        ),
        (r#"{"id":"1"}"#, "no `outcome`"),
        (r#"{"id":"1","outcome":"done"}"#, "unknown `outcome`"),
        (r#"{"id":"1","outcome":1}"#, "`outcome` that is no string"),
        (
            r#"{"id":"1","outcome":"retry","delay_ms":"soon"}"#,
            "`delay_ms` is a whole number",
        ),
        (r#"{"type":"ready"}"#, "no `v`"),
        (
            r#"{"type":"ready","v":"1"}"#,
            "`v` and `max_in_flight` are whole numbers",
        ),
        (r#"{"type":"message"}"#, "`type` that no worker writes"),
    ] {
        let Err(Misread { why, .. }) = parse(&line(wrong)) else {
            panic!("{wrong}")
        };
        assert!(
            why.contains("line 7") && why.contains(mistake),
            "{wrong}: {why}"
        );
        assert!(why.ends_with(&format!("{wrong:?}")), "{why}");
    }
    let long = Line {
        number: 7,
        text: b"x".repeat(usize::try_from(LINE_MAX_BYTES).unwrap()),
    };
    let Err(Misread { why, .. }) = parse(&long) else {
        panic!("it is too long")
    };
    assert!(
        why.contains("longer than 16777216 bytes") && why.len() < 500,
        "{why}"
    );
}

#[test]
fn a_result_that_is_no_json_costs_only_the_result() {
    for result in [
        "NaN",
        "-Infinity",
        r#"{"fee":NaN,"note":"NaN \\\"","x":[Infinity,-Infinity]}"#,
    ] {
        let answer = parse(&line(&format!(
            r#"{{"id":"1","outcome":"complete","result":{result}}}"#
        )));
        let Ok(WorkerLine::Answer(answer)) = answer else {
            panic!("{result}: {answer:?}")
        };
        assert!(
            matches!(Reply::from(answer), Reply::Complete(WorkerResult::NoJson)),
            "{result}"
        );
    }
    let latin = b"{\"id\":\"1\",\"outcome\":\"complete\",\"result\":\"M\xfcller\"}".to_vec();
    let answer = parse(&Line {
        number: 7,
        text: latin,
    });
    assert!(
        matches!(
            answer,
            Ok(WorkerLine::Answer(Answer {
                is_unreadable: true,
                ..
            }))
        ),
        "{answer:?}"
    );
    let text = r#"[{"id":"1","outcome":"complete","result":1},{"id":"2","outcome":"complete","result":NaN}]"#;
    let Ok(WorkerLine::Answers(answers)) = parse(&line(text)) else {
        panic!("two answers")
    };
    assert_eq!(
        answers
            .iter()
            .map(|answer| answer.is_unreadable)
            .collect::<Vec<_>>(),
        [false, true]
    );
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let text = format!(r#"{{"id":"1","outcome":"complete","result":{deep}}}"#);
    assert!(matches!(
        parse(&line(&text)),
        Ok(WorkerLine::Answer(Answer {
            is_unreadable: false,
            ..
        }))
    ));
    assert!(parse(&line(r#"{"id":"1","outcome":"complete","delay_ms":NaN}"#)).is_err());
}

#[test]
fn noise_is_told_from_damaged_answers() {
    for noise in [
        "charging",
        "",
        r#"{"level":30,"id":17,"msg":"charged"}"#,
        "17",
        "[1,2]",
        "{}",
    ] {
        let Err(misread) = parse(&line(noise)) else {
            panic!("{noise}")
        };
        assert!(
            misread.is_noise && misread.id.is_none(),
            "{noise}: {misread:?}"
        );
    }
    for damaged in [
        r#"{"id":"1","outcome":"compl"#,
        r#"x{"id":"1","outcome":"complete"}"#,
    ] {
        let Err(misread) = parse(&line(damaged)) else {
            panic!("{damaged}")
        };
        assert!(
            !misread.is_noise && misread.id.is_none(),
            "{damaged}: {misread:?}"
        );
    }
    for (wrong, id) in [
        (r#"{"id":"1"}"#, "1"),
        (r#"{"id":2,"outcome":"complete"}"#, "2"),
    ] {
        let Err(misread) = parse(&line(wrong)) else {
            panic!("{wrong}")
        };
        assert_eq!(misread.id.as_deref(), Some(id), "{wrong}");
    }
    assert!(!parse(&line(r#"{"type":"ready"}"#)).unwrap_err().is_noise);
}

fn message(payload: Option<&'static [u8]>) -> Message {
    let origin = Origin::Queue {
        queue: "orders".into(),
        id: "a".into(),
    };
    Message::new("orders", origin, payload.map(Into::into))
}

fn told(message: &Message) -> String {
    serde_json::to_string(&HandleLine::of(
        message,
        &AttemptInfo::first("01980000-40d5-83e8-bc93-6894a57f9324"),
        "1",
        Duration::from_secs(30),
    ))
    .unwrap()
}

#[test]
fn a_message_is_one_line_whatever_is_in_it() {
    let text = told(&message(Some(b"two\nlines")));
    assert!(
        text.contains(r#""payload":"two\nlines""#) && !text.contains('\n'),
        "{text}"
    );
    assert!(
        text.contains(r#""origin":{"queue":{"id":"a","queue":"orders"}}"#)
            && text.contains(r#""lease_ms":30000"#)
    );
    assert!(told(&message(Some(b"\xff"))).contains(r#""payload_base64":"/w==""#));
    let empty: Value = serde_json::from_str(&told(&message(Some(b"")))).unwrap();
    assert_eq!(empty["payload"], "");
    let tombstone: Value = serde_json::from_str(&told(&message(None))).unwrap();
    assert_eq!(tombstone.get("payload"), Some(&Value::Null));
}
