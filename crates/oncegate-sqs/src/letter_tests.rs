use bytes::Bytes;
use serde_json::json;

use super::*;
use oncegate_runtime::dead_letters::DeadLetterCause;
use oncegate_runtime::message::{Header, Origin};

fn header(name: &str, value: &[u8]) -> Header {
    Header {
        name: name.into(),
        value: Some(Bytes::copy_from_slice(value)),
    }
}

fn letter(payload: Option<&[u8]>, headers: Vec<Header>) -> DeadLetter {
    let origin = Origin::Queue {
        queue: "orders".into(),
        id: "m-1".into(),
    };
    let message =
        Message::new("orders", origin, payload.map(Bytes::copy_from_slice)).with_headers(headers);
    DeadLetter {
        message: message.with_timestamp_ms(1_700_000_000_000),
        scope: "billing".to_owned(),
        key: Some("billing:abc".to_owned()),
        cause: DeadLetterCause::Permanent,
        reason: "no such account".to_owned(),
        attempts: 3,
        first_failed_at: std::time::UNIX_EPOCH.checked_add(std::time::Duration::from_secs(1)),
        failed_at: std::time::UNIX_EPOCH + std::time::Duration::from_secs(2),
    }
}

fn origin(written: &Written) -> serde_json::Value {
    match &written.attributes[ORIGIN_ATTRIBUTE] {
        (kind, Value::Text(text)) if kind == "String" => serde_json::from_str(text).unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_letter_keeps_body_attributes_and_types_and_says_why() {
    let types = br#"{"amount":"Number","blob":"Binary"}"#;
    let headers = vec![
        header("amount", b"12"),
        header("blob", b"text"),
        header("tenant", b"acme"),
        header("oncegate-reason", b"an earlier round"),
        header("AWS.MessageGroupId", b"g"),
        header("AWS.ApproximateFirstReceiveTimestamp", b"5"),
        header(TYPES_HEADER, types),
    ];
    let written = Letter::of(&letter(Some(b"{\"order_id\":7}"), headers))
        .fit(4_096)
        .unwrap();
    assert_eq!(written.body, "{\"order_id\":7}");
    let text = |text: &str| Value::Text(text.to_owned());
    assert_eq!(
        written.attributes["amount"],
        ("Number".to_owned(), text("12"))
    );
    assert_eq!(
        written.attributes["blob"],
        ("Binary".to_owned(), Value::Bytes(b"text".to_vec()))
    );
    assert_eq!(
        written.attributes["tenant"],
        ("String".to_owned(), text("acme"))
    );
    assert_eq!(
        written.attributes[REASON_ATTRIBUTE].1,
        text("permanent: no such account")
    );
    assert_eq!(
        written.attributes.len(),
        5,
        "and nothing that SQS keeps for itself"
    );
    let origin = origin(&written);
    assert_eq!(origin["route"], "orders");
    assert_eq!(origin["origin"], "orders#m-1");
    assert_eq!(origin["attempts"], 3);
    assert_eq!(origin["timestamp_ms"], 1_700_000_000_000_i64);
    assert_eq!(
        (&origin["first_failed_at_ms"], &origin["failed_at_ms"]),
        (&1_000.into(), &2_000.into())
    );
    assert_eq!(
        (&origin["group"], &origin["first_received_at_ms"]),
        (&"g".into(), &5.into())
    );
    assert!(!written.shortened);
}

#[test]
fn of_ten_attributes_none_is_lost() {
    let headers = (0..10).map(|n| header(&format!("a{n}"), b"x")).collect();
    let written = Letter::of(&letter(Some(b"{}"), headers))
        .fit(4_096)
        .unwrap();
    assert_eq!(written.attributes.len(), 10);
    let kept =
        json!({"a8": {"type": "String", "value": "x"}, "a9": {"type": "String", "value": "x"}});
    assert_eq!(origin(&written)["attributes"], kept);
}

#[test]
fn what_sqs_does_not_take_is_kept_beside() {
    let headers = vec![
        header("with space", b"1"),
        header("empty", b""),
        header(".dot", &[255]),
    ];
    let written = Letter::of(&letter(Some(&[0, 159, 146]), headers))
        .fit(4_096)
        .unwrap();
    assert_eq!(written.body, "AJ+S");
    let origin = origin(&written);
    assert_eq!(origin["encoding"], "base64");
    assert_eq!(origin["attributes"]["with space"]["value"], "1");
    assert_eq!(
        origin["attributes"][".dot"],
        json!({"type": "Binary", "value": "/w=="})
    );
    assert_eq!(written.attributes.len(), 2);
    let encoding = |payload| {
        let written = Letter::of(&letter(payload, Vec::new())).fit(4_096).unwrap();
        assert!(!written.body.is_empty());
        super::tests::origin(&written)["encoding"].clone()
    };
    assert_eq!(encoding(None), "null");
    assert_eq!(encoding(Some(b"")), "empty");
    assert_eq!(encoding(Some(b"bell \x07")), "base64");
}

#[test]
fn the_envelope_of_a_topic_is_kept_as_it_came() {
    let headers = vec![header(ENVELOPE_HEADER, b"{\"Type\":\"Notification\"}")];
    let written = Letter::of(&letter(Some(b"inside"), headers))
        .fit(4_096)
        .unwrap();
    assert_eq!(written.body, "{\"Type\":\"Notification\"}");
}

#[test]
fn what_is_too_large_loses_our_words_before_its_own() {
    let payload = vec![b'x'; 2_000];
    let fit =
        |limit| Letter::of(&letter(Some(&payload), vec![header("tenant", b"acme")])).fit(limit);
    let whole = fit(4_096).unwrap();
    assert!(!whole.shortened);
    let own = 2_000 + "tenant".len() + "String".len() + "acme".len();
    let bare = fit(own).unwrap();
    assert!(bare.shortened && bare.attributes.len() == 1 && bare.body.len() == 2_000);
    assert_eq!(
        fit(own - 1).unwrap().left_out,
        ["tenant"],
        "before it is not written at all"
    );
    assert!(matches!(fit(1_999), Err(2_000)));
    let Value::Text(origin) = &whole.attributes[ORIGIN_ATTRIBUTE].1 else {
        panic!("text")
    };
    let with_origin = own + ORIGIN_ATTRIBUTE.len() + "String".len() + origin.len();
    let without_reason = fit(with_origin + 10).unwrap();
    assert!(without_reason.shortened && without_reason.attributes.len() == 2);
}

#[test]
fn a_letter_that_would_not_fit_omits_attributes_but_names_them() {
    let headers = || {
        let many = (0..12).map(|n| header(&format!("a{n}"), b"x"));
        [
            header("large", &[b'l'; 600]),
            header("larger", &[b'm'; 700]),
        ]
        .into_iter()
        .chain(many)
        .collect()
    };
    for payload in [vec![b'x'; 1_500], vec![0xff; 1_500]] {
        let fit = |limit| Letter::of(&letter(Some(&payload), headers())).fit(limit);
        let body = fit(100_000).unwrap().body.len();
        let mut before = usize::MAX;
        for limit in (body..body + 3_000).rev() {
            let Ok(written) = fit(limit) else { continue };
            let bytes: usize = written
                .attributes
                .iter()
                .map(|(name, (kind, value))| name.len() + kind.len() + value.len())
                .sum();
            assert!(
                written.body.len() + bytes <= limit && written.body.len() == body,
                "at {limit}"
            );
            if let Some((_, Value::Text(text))) = written.attributes.get(ORIGIN_ATTRIBUTE) {
                let origin: Provenance = serde_json::from_str(text).unwrap();
                assert_eq!(origin.left_out, written.left_out, "at {limit}");
                let there = written
                    .attributes
                    .keys()
                    .filter(|name| !name.starts_with("oncegate-"))
                    .count();
                assert_eq!(
                    there + origin.attributes.len() + origin.left_out.len(),
                    14,
                    "at {limit}"
                );
            }
            let left = 14 - written.left_out.len();
            assert!(left <= before, "less room never keeps more: at {limit}");
            before = left;
        }
        let least = fit(body + 700).unwrap();
        assert_eq!(
            least.left_out.first().map(String::as_str),
            Some("larger"),
            "the largest goes first"
        );
        let is_text = payload[0] == b'x';
        assert_eq!(
            fit(body).is_ok(),
            is_text,
            "a body that is written otherwise must say how"
        );
        assert!(fit(body - 1).is_err());
    }
}

#[test]
fn a_redriven_letter_is_as_it_was_and_keeps_its_route_elsewhere() {
    let types = br#"{"amount":"Number"}"#;
    let headers = vec![
        header("amount", b"12"),
        header(TYPES_HEADER, types),
        header("AWS.SenderId", b"x"),
    ];
    let DeadLetter { message, .. } = letter(Some(b"{}"), headers);
    let back = Redriven::of(&message, Some("orders"), "orders").unwrap();
    assert_eq!((back.body.as_str(), back.attributes.len()), ("{}", 1));
    assert_eq!(
        back.attributes["amount"],
        ("Number".to_owned(), Value::Text("12".to_owned()))
    );
    let elsewhere = Redriven::of(&message, Some("orders"), "others").unwrap();
    assert_eq!(
        elsewhere.attributes[ORIGIN_ATTRIBUTE].1,
        Value::Text(r#"{"route":"orders"}"#.to_owned())
    );
    let strange = Redriven::of(&message, None, "others").unwrap();
    assert_eq!(strange.attributes.len(), 1, "the queue decides the route");

    let ten = (0..10).map(|n| header(&format!("a{n}"), b"x")).collect();
    let DeadLetter { message, .. } = letter(Some(b"{}"), ten);
    assert_eq!(
        Redriven::of(&message, Some("orders"), "orders")
            .unwrap()
            .attributes
            .len(),
        10
    );
    assert!(
        Redriven::of(&message, Some("orders"), "others").is_err(),
        "no room for the route"
    );
    for payload in [None, Some(b"".as_slice()), Some(b"bell \x07".as_slice())] {
        let DeadLetter { message, .. } = letter(payload, Vec::new());
        assert!(
            Redriven::of(&message, None, "orders").is_err(),
            "no body of SQS: {payload:?}"
        );
    }
}
