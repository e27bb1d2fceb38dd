//! The form of an outbox's message in a queue, and why a queue would not take a message.

use aws_sdk_sqs::error::BuildError;
use aws_sdk_sqs::types::SendMessageBatchRequestEntry;
use oncegate_outbox::{ID_HEADER, OutboxMessage};
use oncegate_runtime::message::{Header, Message, Origin};

use super::dead_letters::{GROUP_MAX_BYTES, attribute};
use super::headers::text;
use super::letter::{ATTRIBUTES_MOST, Attributes, attributes, body, bytes, is_name};
use super::queue::Queue;

/// A message of an outbox as a queue takes it.
#[derive(Clone, Debug)]
pub(crate) struct Outgoing {
    body: String,
    attributes: Attributes,
    /// The message group and the deduplication id, for a FIFO queue.
    fifo: Option<(String, String)>,
}

impl Outgoing {
    /// Returns the form in which this queue takes the message. The error says what to change.
    pub(crate) fn of(message: &OutboxMessage, queue: &Queue) -> Result<Self, String> {
        let whole = whole(message);
        let (body, None) = body(&whole) else {
            return Err(format!(
                "its payload is {}, and the body of an SQS message is text of at least one character; write it as text",
                match message.payload() {
                    None => "a tombstone",
                    Some(payload) if payload.is_empty() => "empty",
                    Some(_) => "no text that SQS takes",
                }
            ));
        };
        let (attributes, rest) = attributes(&whole, ATTRIBUTES_MOST);
        if !rest.is_empty() {
            return Err(unfit_header(message.own_headers()));
        }
        let fifo = queue.fifo.then(|| group_and_id(message)).transpose()?;
        let outgoing = Self {
            body,
            attributes,
            fifo,
        };
        let bytes = outgoing.bytes();
        let limit = queue.limit();
        if bytes > limit {
            return Err(format!(
                "it has {bytes} bytes with its headers, and the queue takes {limit}; raise the queue's \
                 `MaximumMessageSize`, or write less"
            ));
        }
        Ok(outgoing)
    }

    /// Returns its size as SQS counts it.
    pub(crate) fn bytes(&self) -> usize {
        self.body.len() + bytes(&self.attributes)
    }

    /// Returns the entry at this place of a batch.
    pub(crate) fn entry(&self, place: usize) -> Result<SendMessageBatchRequestEntry, BuildError> {
        let mut entry = SendMessageBatchRequestEntry::builder()
            .id(place.to_string())
            .message_body(&self.body);
        for (name, (data_type, value)) in &self.attributes {
            entry = entry.message_attributes(name, attribute(data_type.clone(), value.clone())?);
        }
        if let Some((group, id)) = &self.fifo {
            entry = entry.message_group_id(group).message_deduplication_id(id);
        }
        entry.build()
    }
}

/// The message with its id as a header.
fn whole(message: &OutboxMessage) -> Message {
    let headers = message.own_headers().iter().cloned();
    let headers = headers
        .chain([text(ID_HEADER, message.message_id().to_owned())])
        .collect();
    let origin = Origin::Queue {
        queue: message.topic().into(),
        id: message.message_id().into(),
    };
    Message::new(message.topic(), origin, message.payload().cloned()).with_headers(headers)
}

/// Says which header a queue does not take.
fn unfit_header(headers: &[Header]) -> String {
    let unfit = headers.iter().find(|header| {
        !is_name(&header.name) || header.value.as_ref().is_none_or(|value| value.is_empty())
    });
    match unfit {
        Some(Header { name, .. }) if is_name(name) => {
            format!(
                "its header {name:?} is empty, and SQS takes no attribute without a value; leave it out"
            )
        }
        Some(Header { name, .. }) => {
            format!(
                "SQS takes no attribute with the name of its header {name:?}; give it another name"
            )
        }
        None => format!(
            "it has {} headers, and an SQS message takes {} besides `{ID_HEADER}`; put the others into the payload",
            headers.len(),
            ATTRIBUTES_MOST - 1
        ),
    }
}

/// Returns the message group and the deduplication id. A message without a key has no order: its
/// group is its id.
fn group_and_id(message: &OutboxMessage) -> Result<(String, String), String> {
    const FORM: &str = "1 to 128 ASCII letters, digits and punctuation marks, without spaces";
    let id = Some(message.message_id()).filter(fits);
    let id = id.ok_or_else(|| {
        format!(
            "its id cannot be the deduplication id of a FIFO queue, which is {FORM}; set another id"
        )
    })?;
    let key = message
        .key_bytes()
        .map(|key| std::str::from_utf8(key).ok().filter(fits));
    let group = key.unwrap_or(Some(id)).ok_or_else(|| {
        format!(
            "its key cannot be the message group of a FIFO queue, which is {FORM}; set another key"
        )
    })?;
    Ok((group.to_owned(), id.to_owned()))
}

/// Returns whether a FIFO queue takes the text as a message group or deduplication id.
fn fits(text: &&str) -> bool {
    (1..=GROUP_MAX_BYTES).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(fifo: bool) -> Queue {
        Queue {
            fifo,
            max_message_bytes: Some(1_024),
            ..Queue::default()
        }
    }

    fn message() -> OutboxMessage {
        OutboxMessage::new("shipments.fifo", "{}")
            .key("customer-1")
            .header("type", "shipped")
            .id("id-1")
    }

    #[test]
    fn key_id_and_headers_have_their_places() {
        let entry = Outgoing::of(&message(), &queue(true))
            .unwrap()
            .entry(3)
            .unwrap();
        assert_eq!((entry.id(), entry.message_body()), ("3", "{}"));
        assert_eq!(
            (entry.message_group_id(), entry.message_deduplication_id()),
            (Some("customer-1"), Some("id-1"))
        );
        let attributes = entry.message_attributes().unwrap();
        let text = |name: &str| attributes[name].string_value().unwrap();
        assert_eq!(
            (attributes.len(), text("type"), text(ID_HEADER)),
            (2, "shipped", "id-1")
        );

        let standard = Outgoing::of(&message(), &queue(false))
            .unwrap()
            .entry(0)
            .unwrap();
        assert_eq!(
            (
                standard.message_group_id(),
                standard.message_deduplication_id()
            ),
            (None, None)
        );
        let alone = OutboxMessage::new("shipments.fifo", "{}").id("id-2");
        let alone = Outgoing::of(&alone, &queue(true))
            .unwrap()
            .entry(0)
            .unwrap();
        assert_eq!(
            alone.message_group_id(),
            Some("id-2"),
            "a message without a key waits for no other"
        );
    }

    #[test]
    fn what_a_queue_does_not_take_is_named_without_its_content() {
        let many = (0..10).fold(message(), |message, n| {
            message.header(format!("h{n}"), "secret")
        });
        let over = "x".repeat(1_024);
        for (bad, named) in [
            (OutboxMessage::new("q", b"\xffsecret".as_slice()), "no text"),
            (OutboxMessage::new("q", ""), "empty"),
            (OutboxMessage::tombstone("q"), "tombstone"),
            (message().header("a b", "secret"), "\"a b\""),
            (message().header("none", ""), "\"none\" is empty"),
            (many, "11 headers, and an SQS message takes 9"),
            (OutboxMessage::new("q", over), "`MaximumMessageSize`"),
            (message().key("secret key"), "its key"),
            (message().key("k".repeat(129)), "its key"),
            (message().key(b"\xff".as_slice()), "its key"),
            (message().id("no spaces"), "its id"),
        ] {
            let error = Outgoing::of(&bad, &queue(true)).unwrap_err();
            assert!(
                error.contains(named) && !error.contains("secret"),
                "{error}"
            );
        }
        let nine = (0..8).fold(message(), |message, n| message.header(format!("h{n}"), "v"));
        assert!(Outgoing::of(&nine, &queue(true)).is_ok());
        assert!(
            Outgoing::of(&message().key("any key"), &queue(false)).is_ok(),
            "only FIFO queues have groups"
        );
    }
}
