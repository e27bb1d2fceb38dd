//! The origin of a message, in the form of every kind of worker.

use oncegate_runtime::{Message, Origin};
use serde_json::{Value, json};

/// The origin of a message as JSON: `{"kafka":{"topic":…,"partition":…,"offset":…}}`.
pub(crate) fn as_json(message: &Message) -> Value {
    match message.origin() {
        Origin::Kafka {
            topic,
            partition,
            offset,
        } => {
            json!({ "kafka": { "topic": &**topic, "partition": partition, "offset": offset } })
        }
        Origin::Queue { queue, id } => {
            json!({ broker(message): { "queue": &**queue, "id": &**id } })
        }
        other => json!({ "other": other.to_string() }),
    }
}

/// The origin as a dictionary of RFC 9651: `kafka, topic="orders", partition=3, offset=42`.
pub(crate) fn as_dictionary(message: &Message) -> String {
    match message.origin() {
        Origin::Kafka {
            topic,
            partition,
            offset,
        } => {
            format!(
                "kafka, topic={}, partition={partition}, offset={offset}",
                quoted(topic)
            )
        }
        Origin::Queue { queue, id } => {
            format!(
                "{}, queue={}, id={}",
                broker(message),
                quoted(queue),
                quoted(id)
            )
        }
        other => format!("other={}", quoted(&other.to_string())),
    }
}

/// The `source` attribute of CloudEvents for a message.
pub(crate) fn as_source(message: &Message) -> String {
    match message.origin() {
        Origin::Kafka { topic, .. } => format!("/kafka/{topic}"),
        Origin::Queue { queue, .. } => format!("/{}/{queue}", broker(message)),
        _ => format!("/{}", message.route()),
    }
}

/// Returns the name of a queue's broker, as its source says it.
fn broker(message: &Message) -> &'static str {
    message.broker().map_or("queue", |broker| broker.name)
}

/// A string of RFC 9651. Characters that it cannot hold are left out: names of topics and queues
/// have none of them.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars().filter(|c| (' '..='~').contains(c)) {
        if matches!(c, '"' | '\\') {
            out.push('\\');
        }
        out.push(c);
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use oncegate_runtime::Broker;

    use super::*;

    fn of(origin: Origin) -> Message {
        Message::new("orders", origin, None)
    }

    #[test]
    fn origins_read_the_same_everywhere() {
        let kafka = of(Origin::Kafka {
            topic: "orders".into(),
            partition: 3,
            offset: 42,
        });
        assert_eq!(
            as_dictionary(&kafka),
            r#"kafka, topic="orders", partition=3, offset=42"#
        );
        assert_eq!(
            as_json(&kafka).to_string(),
            r#"{"kafka":{"offset":42,"partition":3,"topic":"orders"}}"#
        );
        static QUEUES: Broker = Broker {
            name: "queues",
            system: "some_queues",
        };
        let queue = of(Origin::Queue {
            queue: "orders".into(),
            id: "a\"\\\n".into(),
        });
        assert_eq!(as_source(&queue), "/queue/orders");
        let queue = queue.with_broker(&QUEUES);
        assert_eq!(
            as_dictionary(&queue),
            r#"queues, queue="orders", id="a\"\\""#
        );
        assert_eq!(as_source(&queue), "/queues/orders");
        assert!(as_json(&queue)["queues"].is_object());
    }
}
