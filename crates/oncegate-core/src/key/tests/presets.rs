//! The specifications of `docs/WHICH_KEY.md` for common envelopes, with messages of their shape.

use super::super::*;
use super::compiled;

type Headers<'a> = &'a [(&'a str, &'a [u8])];

/// Checks that the second message is a duplicate of the first, and the third is not.
#[track_caller]
fn check(spec: &str, messages: [(&str, Headers<'_>); 3]) {
    let key = compiled(spec);
    let [first, again, other] = messages.map(|(payload, headers)| {
        key.derive("r", &KeyInput::payload(payload).with_headers(headers))
            .unwrap()
    });
    assert_eq!(first, again, "{spec}");
    assert_ne!(first, other, "{spec}");
}

#[track_caller]
fn check_payloads(spec: &str, payloads: [&str; 3]) {
    check(spec, payloads.map(|payload| (payload, [].as_slice())));
}

#[track_caller]
fn check_headers(spec: &str, headers: [Headers<'_>; 3]) {
    check(spec, headers.map(|headers| ("{}", headers)));
}

#[test]
fn cloud_events_are_known_by_source_and_id() {
    check_payloads(
        r#"{"json":["source","id"]}"#,
        [
            r#"{"specversion":"1.0","type":"order.placed","source":"/shop","id":"1","data":{"n":7}}"#,
            r#"{"id":"1","specversion":"1.0","type":"order.placed","source":"/shop","time":"2026-11-21T10:00:00Z"}"#,
            r#"{"specversion":"1.0","type":"order.placed","source":"/other","id":"1","data":{"n":7}}"#,
        ],
    );
    check_headers(
        r#"{"parts":[{"header":"ce_source"},{"header":"ce_id"}]}"#,
        [
            &[("ce_source", b"/shop"), ("ce_id", b"1"), ("ce_time", b"a")],
            &[("ce_id", b"1"), ("ce_source", b"/shop"), ("ce_time", b"b")],
            &[("ce_source", b"/shop1"), ("ce_id", b"1")],
        ],
    );
}

#[test]
fn changes_of_debezium_are_known_by_position() {
    let spec = r#"{"parts":["payload.op","payload.source.lsn",{"first_of":["payload.after.id","payload.before.id"]}]}"#;
    check_payloads(
        spec,
        [
            r#"{"payload":{"op":"d","before":{"id":41},"after":null,"source":{"lsn":101},"ts_ms":1}}"#,
            r#"{"payload":{"op":"d","before":{"id":41},"after":null,"source":{"lsn":101},"ts_ms":2}}"#,
            r#"{"payload":{"op":"u","before":{"id":41},"after":{"id":41},"source":{"lsn":100}}}"#,
        ],
    );
    check_headers(
        r#"{"header":"id"}"#,
        [&[("id", b"o-1")], &[("id", b"o-1")], &[("id", b"o-2")]],
    );
}

#[test]
fn buses_and_webhooks_are_known_by_their_ids() {
    check_payloads(
        r#"{"json":["messageId"]}"#,
        [
            r#"{"messageId":"a","messageType":["urn:message:Shop:Paid"],"message":{},"sentTime":"x"}"#,
            r#"{"messageId":"a","messageType":["urn:message:Shop:Paid"],"message":{},"sentTime":"y"}"#,
            r#"{"messageId":"b","messageType":["urn:message:Shop:Paid"],"message":{},"sentTime":"x"}"#,
        ],
    );
    check_payloads(
        r#"{"json":["id"]}"#,
        [
            r#"{"id":"evt_1","object":"event","type":"charge.succeeded","pending_webhooks":2}"#,
            r#"{"id":"evt_1","object":"event","type":"charge.succeeded","pending_webhooks":1}"#,
            r#"{"id":"evt_2","object":"event","type":"charge.succeeded","pending_webhooks":2}"#,
        ],
    );
    for name in ["NServiceBus.MessageId", "X-GitHub-Delivery"] {
        let spec = format!(r#"{{"header":"{name}"}}"#);
        check_headers(
            &spec,
            [
                &[(name, b"1")],
                &[(name, b"1"), ("x", b"y")],
                &[(name, b"2")],
            ],
        );
    }
}

#[test]
fn notifications_of_aws_are_known_by_their_content() {
    check_payloads(
        r#"{"parts":["Message|json.order_id"]}"#,
        [
            r#"{"Type":"Notification","MessageId":"m-1","TopicArn":"arn:a","Message":"{\"order_id\":7}"}"#,
            r#"{"Type":"Notification","MessageId":"m-2","TopicArn":"arn:a","Message":"{ \"order_id\": 7.0 }"}"#,
            r#"{"Type":"Notification","MessageId":"m-1","TopicArn":"arn:a","Message":"{\"order_id\":8}"}"#,
        ],
    );
    let spec = r#"{"parts":["Records.0.eventName","Records.0.s3.bucket.name","Records.0.s3.object.key",
        "Records.0.s3.object.sequencer",{"path":"Records.0.s3.object.versionId","optional":true}]}"#;
    let messages = [("x", "E5"), ("y", "E5"), ("x", "E6")].map(|(time, sequencer)| {
        format!(
            r#"{{"Records":[{{"eventTime":"{time}","eventName":"ObjectCreated:Put","s3":{{"bucket":{{"name":"in"}},"object":{{"key":"a.csv","sequencer":"{sequencer}"}}}}}}]}}"#
        )
    });
    check_payloads(spec, [&messages[0], &messages[1], &messages[2]]);
}

#[test]
fn tombstones_of_a_change_feed_have_keys_of_their_own() {
    let key = compiled(
        r#"{"cases":[{"when":{"path":"payload.op"},"parts":["payload.op","payload.source.lsn",{"first_of":["payload.after.id","payload.before.id"]}]},
            {"parts":[{"message_key":{}},{"path":"|json","optional":true}]}]}"#,
    );
    let of = |input: KeyInput<'_>| key.derive("r", &input);
    let change = |payload| KeyInput::payload(payload).with_message_key("41");
    let delete = r#"{"payload":{"op":"d","before":{"id":41},"after":null,"source":{"lsn":101}}}"#;
    let update =
        r#"{"payload":{"op":"u","before":{"id":41},"after":{"id":41},"source":{"lsn":100}}}"#;
    let keys = [
        of(change(delete)).unwrap(),
        of(change(update)).unwrap(),
        of(KeyInput::empty().with_message_key("41")).unwrap(),
        of(KeyInput::empty().with_message_key("42")).unwrap(),
    ];
    for (at, one) in keys.iter().enumerate() {
        assert!(keys[..at].iter().all(|other| other != one), "{at}");
    }
    // An update in another form must not get the key of its entity.
    for payload in [
        r#"{"id":41,"status":"paid"}"#,
        r#"{"op":"u","after":{"id":41}}"#,
        "[]",
        "7",
    ] {
        assert_eq!(
            of(change(payload)).unwrap_err().kind(),
            "decode_failed",
            "{payload}"
        );
    }
}

#[test]
fn compacted_topics_need_more_than_the_message_key() {
    let key = compiled(r#"{"parts":[{"message_key":{}},"version"]}"#);
    let of = |payload: &str| {
        let input = KeyInput::payload(payload).with_message_key("41");
        key.derive("r", &input).unwrap()
    };
    assert_eq!(of(r#"{"version":1,"a":1}"#), of(r#"{"version":1,"a":2}"#));
    assert_ne!(of(r#"{"version":1}"#), of(r#"{"version":2}"#));
}

#[test]
fn what_is_no_single_message_is_named() {
    let key = compiled(r#"{"json":["source","id"]}"#);
    let named = |input: KeyInput<'_>, what: &str| {
        let error = key.derive("r", &input).unwrap_err();
        assert_eq!(error.kind(), "framed");
        assert!(error.to_string().contains(what), "{error}");
    };
    let batch = r#" [{"specversion": "1.0", "id": "ev-1", "source": "/shop"}]"#;
    named(KeyInput::payload(batch), "batch of CloudEvents");
    let headers: Headers<'_> = &[(
        "Content-Type",
        b"application/cloudevents-batch+json; charset=utf-8",
    )];
    named(
        KeyInput::payload("[]").with_headers(headers),
        "batch of CloudEvents",
    );
    let error = key.derive("r", &KeyInput::payload("[]")).unwrap_err();
    assert_eq!(error.kind(), "missing_field");
    // A path may name an event of a batch.
    let first = compiled(r#"{"json":["0.source","0.id"]}"#);
    assert!(first.derive("r", &KeyInput::payload(batch)).is_ok());
    for payload in [
        b"\x00\x53\x77\xa1\x21{}".as_slice(),
        b"\x00\x53\x75\xa0\x21{}",
        b"\x00\x80\x00\x00\x00\x00\x00\x00\x00\x77\xa1\x02{}",
    ] {
        named(KeyInput::payload(payload), "type code of its section");
    }
    named(
        KeyInput::payload(b"\xc3\x01\x64\xe1\x00\x36\xd6\x70\x72\x6b\x0a"),
        "single-object",
    );
}
