use aws_sdk_sqs::primitives::Blob;
use aws_sdk_sqs::types::Message as Raw;
use aws_sdk_sqs::types::builders::MessageBuilder;

use super::super::headers::GROUP_HEADER;
use super::*;

fn reader() -> Reader {
    let queue = "orders".into();
    let body = Body::Raw;
    Reader {
        queue,
        fifo: false,
        body,
        routes_from_attributes: false,
        max_receives: None,
    }
}

fn raw() -> MessageBuilder {
    let system = MessageSystemAttributeName::SentTimestamp;
    let count = MessageSystemAttributeName::ApproximateReceiveCount;
    Raw::builder()
        .message_id("m-1")
        .receipt_handle("r-1")
        .body(r#"{"id":1}"#)
        .attributes(system, "1700000000000")
        .attributes(count, "3")
        .attributes(MessageSystemAttributeName::MessageGroupId, "g")
        .attributes(MessageSystemAttributeName::MessageDeduplicationId, "d")
}

fn attribute(data_type: &str, text: Option<&str>, bytes: Option<&[u8]>) -> MessageAttributeValue {
    let value = MessageAttributeValue::builder().data_type(data_type);
    value
        .set_string_value(text.map(str::to_owned))
        .set_binary_value(bytes.map(Blob::new))
        .build()
        .unwrap()
}

#[test]
fn a_message_has_its_body_and_the_senders_and_queues_headers() {
    let raw = raw()
        .message_attributes("tenant", attribute("String", Some("acme"), None))
        .message_attributes("amount", attribute("Number", Some("10.50"), None))
        .message_attributes("seal", attribute("Binary", None, Some(&[0, 255])))
        .message_attributes(
            "aws.MessageGroupId",
            attribute("String", Some("forged"), None),
        );
    let read = reader().read(raw.build()).unwrap();
    let message = &read.message;
    assert_eq!(
        (message.payload(), message.route()),
        (&br#"{"id":1}"#[..], "orders")
    );
    assert_eq!(
        (message.timestamp_ms(), message.origin().to_string()),
        (Some(1_700_000_000_000), "orders#m-1".into())
    );
    assert_eq!(message.header("tenant"), Some(&b"acme"[..]));
    assert_eq!(message.header("amount"), Some(&b"10.50"[..]));
    assert_eq!(message.header("seal"), Some(&[0, 255][..]));
    assert_eq!(
        message.header(TYPES_HEADER),
        Some(&br#"{"amount":"Number","seal":"Binary"}"#[..])
    );
    assert_eq!(
        message.header("AWS.MessageDeduplicationId"),
        Some(&b"d"[..])
    );
    assert_eq!(
        message.header("AWS.ApproximateReceiveCount"),
        Some(&b"3"[..])
    );
    assert_eq!(
        message.header("aws.MessageGroupId"),
        None,
        "a sender cannot speak for the queue"
    );
    assert_eq!((&*read.id, &*read.handle), ("m-1", "r-1"));
}

#[test]
fn the_group_is_key_and_order_of_messages_in_fifo_queues_alone() {
    let standard = reader().read(raw().build()).unwrap();
    assert_eq!((standard.message.key(), standard.group), (None, None));
    assert_eq!(standard.message.header(GROUP_HEADER), Some(&b"g"[..]));
    let fifo = Reader {
        fifo: true,
        ..reader()
    }
    .read(raw().build())
    .unwrap();
    assert_eq!(
        (fifo.message.key(), fifo.group.as_deref()),
        (Some(&b"g"[..]), Some("g"))
    );
}

#[test]
fn the_last_receive_before_the_redrive_policy_is_known() {
    for (max_receives, last) in [
        (None, false),
        (Some(4), false),
        (Some(3), true),
        (Some(2), true),
    ] {
        let read = Reader {
            max_receives,
            ..reader()
        }
        .read(raw().build())
        .unwrap();
        assert_eq!(read.last_receive, last, "{max_receives:?}");
    }
}

#[test]
fn a_dead_letter_keeps_its_first_route_where_that_is_wanted() {
    let sent = |origin: &str| {
        raw().message_attributes(ORIGIN_ATTRIBUTE, attribute("String", Some(origin), None))
    };
    let route = |reader: Reader, origin: &str| {
        reader
            .read(sent(origin).build())
            .unwrap()
            .message
            .route()
            .to_owned()
    };
    let wanted = || Reader {
        routes_from_attributes: true,
        ..reader()
    };
    let origin = r#"{"route":"refunds","attempts":3}"#;
    assert_eq!(route(wanted(), origin), "refunds");
    assert_eq!(
        route(reader(), origin),
        "orders",
        "anyone may copy an attribute"
    );
    for spoilt in [r#"{"route":""}"#, r#"{"route":7}"#, "refunds", "{}"] {
        assert_eq!(route(wanted(), spoilt), "orders", "{spoilt}");
    }
}

#[test]
fn what_is_no_envelope_is_marked_and_keeps_its_body() {
    let read = Reader {
        body: Body::Sns,
        ..reader()
    }
    .read(raw().build())
    .unwrap();
    assert!(
        read.message
            .defect()
            .is_some_and(|expected| expected.contains("SNS notification"))
    );
    assert_eq!(read.message.payload(), br#"{"id":1}"#);
}

#[test]
fn an_answer_without_id_or_receipt_is_no_message() {
    assert!(reader().read(raw().set_message_id(None).build()).is_none());
    assert!(
        reader()
            .read(raw().set_receipt_handle(None).build())
            .is_none()
    );
}
