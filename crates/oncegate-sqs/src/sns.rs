//! Reads messages in the envelope of an SNS topic.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Deserialize;

use super::headers::{is_system, text};
use oncegate_runtime::message::Header;

/// The header with the unchanged envelope, including its signature.
pub(crate) const ENVELOPE_HEADER: &str = "AWS.SnsEnvelope";

const EXPECTED: &str = "an SNS notification (JSON with Type, MessageId, TopicArn and Message). If the subscription \
                        uses raw message delivery, set the source's `body` to `Body::Raw`";
const EXPECTED_TYPE: &str = "an SNS message whose Type is Notification";
const EXPECTED_BASE64: &str = "an SNS notification whose binary attributes are base64";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Envelope {
    r#type: String,
    message_id: String,
    topic_arn: String,
    subject: Option<String>,
    message: String,
    message_attributes: Option<BTreeMap<String, Attribute>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Attribute {
    r#type: String,
    value: String,
}

/// Returns the message in the envelope, and adds the topic's attributes to `headers`. The error
/// names what was expected.
pub(crate) fn unwrap(body: &Bytes, headers: &mut Vec<Header>) -> Result<Bytes, &'static str> {
    let envelope: Envelope = serde_json::from_slice(body).map_err(|_| EXPECTED)?;
    if envelope.r#type != "Notification" {
        return Err(EXPECTED_TYPE);
    }
    let mut own = Vec::new();
    for (name, Attribute { r#type, value }) in envelope.message_attributes.unwrap_or_default() {
        if is_system(&name) {
            continue;
        }
        own.push(if r#type.starts_with("Binary") {
            text(&name, STANDARD.decode(value).map_err(|_| EXPECTED_BASE64)?)
        } else {
            text(&name, value)
        });
    }
    headers.append(&mut own);
    headers.push(text("AWS.SnsMessageId", envelope.message_id));
    headers.push(text("AWS.SnsTopicArn", envelope.topic_arn));
    headers.extend(
        envelope
            .subject
            .map(|subject| text("AWS.SnsSubject", subject)),
    );
    headers.push(text(ENVELOPE_HEADER, body.clone()));
    Ok(Bytes::from(envelope.message))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTIFICATION: &str = r#"{
        "Type": "Notification", "MessageId": "m-1", "TopicArn": "arn:aws:sns:eu-central-1:000000000000:orders",
        "Subject": "paid", "Message": "{\"order_id\":7}", "Timestamp": "2025-01-01T00:00:00.000Z",
        "MessageAttributes": {
            "tenant": {"Type": "String", "Value": "acme"},
            "raw": {"Type": "Binary", "Value": "AP8="},
            "AWS.MessageGroupId": {"Type": "String", "Value": "forged"}
        }
    }"#;

    #[test]
    fn the_message_is_unwrapped_and_what_sns_says_becomes_headers() {
        let body = Bytes::from(NOTIFICATION);
        let mut headers = Vec::new();
        assert_eq!(unwrap(&body, &mut headers).unwrap(), r#"{"order_id":7}"#);
        let header = |name: &str| {
            let found = headers.iter().find(|header| &*header.name == name);
            found.and_then(|header| header.value.clone())
        };
        assert_eq!(header("tenant").unwrap(), "acme");
        assert_eq!(*header("raw").unwrap(), [0, 255]);
        assert_eq!(header("AWS.SnsMessageId").unwrap(), "m-1");
        assert_eq!(header("AWS.SnsSubject").unwrap(), "paid");
        assert_eq!(
            header(ENVELOPE_HEADER).unwrap(),
            body,
            "byte for byte: its signature can be checked"
        );
        assert_eq!(
            header("AWS.MessageGroupId"),
            None,
            "a sender cannot speak for the queue"
        );
    }

    #[test]
    fn what_is_no_notification_is_refused_and_leaves_nothing_behind() {
        let confirmation = NOTIFICATION.replace("\"Notification\"", "\"SubscriptionConfirmation\"");
        let spoilt = NOTIFICATION.replace("AP8=", "no base64!");
        let bodies = [
            r#"{"order_id":7}"#,
            "",
            "plain text",
            "{}",
            "[]",
            &confirmation,
            &spoilt,
        ];
        for body in bodies {
            let mut headers = Vec::new();
            assert!(
                unwrap(&Bytes::copy_from_slice(body.as_bytes()), &mut headers).is_err(),
                "{body}"
            );
            assert!(headers.is_empty(), "{body}");
        }
    }
}
