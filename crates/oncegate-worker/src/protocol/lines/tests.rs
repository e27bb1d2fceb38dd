use oncegate_runtime::Origin;

use super::*;

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
