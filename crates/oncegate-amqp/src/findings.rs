//! Limits of a queue that lose messages, or take them away too early. This module does no I/O.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

/// A queue, as the management plugin describes it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Described {
    durable: bool,
    auto_delete: bool,
    arguments: Map<String, Value>,
    /// `null`, or an empty list, without a policy.
    effective_policy_definition: Value,
    /// The limit that applies to a quorum queue: a number, or a word. From RabbitMQ 4 on, there is
    /// one by default.
    delivery_limit: Value,
}

/// The first version of RabbitMQ where a delivery limit of -1 is none, and where a quorum queue has
/// one by default.
pub(crate) const NO_LIMIT_SINCE: u32 = 4;
/// The limit that quorum queues have by default since then.
const DEFAULT_LIMIT: i64 = 20;

impl Described {
    /// Returns a warning for each limit that loses messages of a consumed queue, with what to
    /// change. `major` is the first number of the broker's version, if it is known.
    pub(crate) fn warnings(
        &self,
        queue: &str,
        max_attempts: u32,
        major: Option<u32>,
    ) -> Vec<String> {
        let mut warnings = self.losses(queue, major);
        let Some(limit) = self.delivery_limit(major).filter(|limit| *limit >= 0) else {
            return warnings;
        };
        let exchange = self.text("dead-letter-exchange");
        // The end of a process returns everything that it has in hand.
        let is_low =
            limit < i64::from(max_attempts) || (exchange.is_none() && limit <= DEFAULT_LIMIT);
        if is_low {
            let then = match exchange {
                Some(exchange) => {
                    format!("gives such a message to its dead-letter exchange `{exchange}`")
                }
                None => "drops such a message without a trace: it has no dead-letter exchange"
                    .to_owned(),
            };
            warnings.push(format!(
                "the `delivery-limit` of the queue `{queue}` is {limit} (`max_attempts` is {max_attempts}): the end of a \
                 process or of its connection counts for every message of the prefetch, and at the limit the broker \
                 {then}; messages that came back half as often are sent to the queue again, if the user may write to it. {}",
                way_out(major)
            ));
        }
        warnings
    }

    /// Returns a warning for each limit that loses dead letters, with what to change.
    pub(crate) fn letter_warnings(&self, queue: &str, major: Option<u32>) -> Vec<String> {
        let mut warnings = self.losses(queue, major);
        if self.kind() == Some("stream") {
            warnings.push(format!(
                "the dead-letter queue `{queue}` is a stream, which cannot be redriven: make a quorum queue"
            ));
        }
        if let Some(limit) = self.delivery_limit(major).filter(|limit| *limit >= 0) {
            warnings.push(format!(
                "the `delivery-limit` of the dead-letter queue `{queue}` is {limit}: each look at its messages returns them, \
                 and at the limit the broker drops them. {}",
                way_out(major)
            ));
        }
        warnings
    }

    /// Returns warnings about limits that lose messages of any queue.
    fn losses(&self, queue: &str, major: Option<u32>) -> Vec<String> {
        let mut warnings = Vec::new();
        if !self.durable || self.auto_delete {
            warnings.push(format!(
                "the queue `{queue}` is not durable, or is deleted with its last consumer: its messages are lost then"
            ));
        }
        if self.delivery_limit(major).is_some_and(|limit| limit < 0) {
            warnings.push(format!(
                "the queue `{queue}` has an `x-delivery-limit` below 0, which is none only since RabbitMQ {NO_LIMIT_SINCE}: \
                 this broker drops a message when it first comes back, after a lost connection, a crash, or a look at it; \
                 move its messages to a queue without this argument"
            ));
        }
        if let Some(millis) = self
            .number("message-ttl")
            .or_else(|| self.number("expires"))
        {
            warnings.push(format!(
                "the queue `{queue}` drops messages that wait for {millis} ms: remove `message-ttl` and `expires`, or accept \
                 the loss"
            ));
        }
        let is_limited = self
            .number("max-length")
            .or_else(|| self.number("max-length-bytes"))
            .is_some();
        if is_limited
            && self
                .text("overflow")
                .is_none_or(|overflow| overflow == "drop-head")
        {
            warnings.push(format!(
                "the queue `{queue}` drops its oldest messages when it is full: set `overflow` to `reject-publish`"
            ));
        }
        warnings
    }

    /// Returns how often a message may come back before it is dropped; [`i64::MAX`] without a
    /// limit.
    pub(crate) fn returns_most(&self, major: Option<u32>) -> i64 {
        self.delivery_limit(major).unwrap_or(i64::MAX).max(0)
    }

    /// Returns the queue's own `consumer_timeout`, if it has one.
    pub(crate) fn consumer_timeout(&self) -> Option<Duration> {
        let millis = self.number("consumer-timeout")?;
        Some(Duration::from_millis(millis.try_into().ok()?))
    }

    fn kind(&self) -> Option<&str> {
        self.argument("queue-type")?.as_str()
    }

    /// Returns the limit of a quorum queue, if there is one. One below 0 is none in later versions,
    /// and the lowest in earlier ones.
    fn delivery_limit(&self, major: Option<u32>) -> Option<i64> {
        if self.kind().is_some_and(|kind| kind != "quorum") {
            return None;
        }
        let applied = self
            .delivery_limit
            .as_i64()
            .or_else(|| self.number("delivery-limit"));
        let is_early = major.is_some_and(|major| major < NO_LIMIT_SINCE);
        applied.filter(|limit| *limit >= 0 || is_early)
    }

    /// Returns a number of the queue's arguments or policy: the lower one of both, which applies.
    fn number(&self, name: &str) -> Option<i64> {
        let values = [self.argument(name), self.policy(name)]
            .into_iter()
            .flatten();
        values.filter_map(Value::as_i64).min()
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.argument(name).or_else(|| self.policy(name))?.as_str()
    }

    fn argument(&self, name: &str) -> Option<&Value> {
        self.arguments.get(&format!("x-{name}"))
    }

    fn policy(&self, name: &str) -> Option<&Value> {
        self.effective_policy_definition.get(name)
    }
}

/// Returns what to do about a delivery limit.
fn way_out(major: Option<u32>) -> &'static str {
    if major.is_some_and(|major| major < NO_LIMIT_SINCE) {
        "Make the queue without `x-delivery-limit`, and remove `delivery-limit` from its policy"
    } else {
        "Set the limit to -1 by a policy, or in a new queue"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(described: &str) -> Described {
        serde_json::from_str(described).unwrap()
    }

    fn warnings(text: &str) -> String {
        described(text).warnings("orders", 5, Some(4)).join("; ")
    }

    #[test]
    fn limits_that_lose_messages_are_named() {
        let fine = [
            r#"{"durable":true,"auto_delete":false,"arguments":{},"effective_policy_definition":[]}"#,
            r#"{"durable":true,"arguments":{"x-delivery-limit":50},"delivery_limit":50}"#,
            r#"{"durable":true,"arguments":{"x-delivery-limit":-1},"delivery_limit":"unlimited"}"#,
            r#"{"durable":true,"arguments":{"x-delivery-limit":9,"x-dead-letter-exchange":"dlx"}}"#,
            r#"{"durable":true,"arguments":{"x-max-length":9,"x-overflow":"reject-publish"}}"#,
        ];
        for described in fine {
            assert_eq!(warnings(described), "");
        }
        let cases = [
            (r#"{"durable":false}"#, "not durable"),
            (
                r#"{"durable":true,"auto_delete":true}"#,
                "deleted with its last consumer",
            ),
            (
                r#"{"durable":true,"arguments":{"x-delivery-limit":3}}"#,
                "is 3 (`max_attempts` is 5)",
            ),
            (
                r#"{"durable":true,"delivery_limit":20}"#,
                "no dead-letter exchange",
            ),
            (
                r#"{"durable":true,"arguments":{"x-delivery-limit":9,"x-dead-letter-exchange":"dlx"},
                    "effective_policy_definition":{"delivery-limit":2}}"#,
                "gives such a message to its dead-letter exchange `dlx`",
            ),
            (
                r#"{"durable":true,"effective_policy_definition":{"message-ttl":1000}}"#,
                "wait for 1000 ms",
            ),
            (
                r#"{"durable":true,"arguments":{"x-max-length":9}}"#,
                "reject-publish",
            ),
        ];
        for (described, word) in cases {
            let said = warnings(described);
            assert!(said.contains(word), "no `{word}` in: {said}");
        }
    }

    #[test]
    fn no_limit_is_a_limit_before_rabbitmq_4() {
        let queue = described(r#"{"durable":true,"arguments":{"x-delivery-limit":-1}}"#);
        assert_eq!(queue.returns_most(Some(4)), i64::MAX);
        assert_eq!(queue.letter_warnings("dead", Some(4)), Vec::<String>::new());
        assert_eq!(queue.returns_most(Some(3)), 0);
        for warnings in [
            queue.warnings("orders", 5, Some(3)),
            queue.letter_warnings("dead", Some(3)),
        ] {
            assert_eq!(warnings.len(), 1, "{warnings:?}");
            assert!(warnings[0].contains("below 0"), "{warnings:?}");
        }
    }

    #[test]
    fn limits_that_lose_dead_letters_are_named() {
        for (text, word) in [
            (r#"{"durable":false}"#, "not durable"),
            (r#"{"durable":true,"delivery_limit":20}"#, "each look"),
            (
                r#"{"durable":true,"arguments":{"x-queue-type":"stream"}}"#,
                "is a stream",
            ),
            (
                r#"{"durable":true,"arguments":{"x-message-ttl":60000}}"#,
                "60000 ms",
            ),
            (
                r#"{"durable":true,"arguments":{"x-max-length":9}}"#,
                "reject-publish",
            ),
        ] {
            let said = described(text).letter_warnings("dead", Some(4)).join("; ");
            assert!(said.contains(word), "no `{word}` in: {said}");
        }
    }

    #[test]
    fn the_consumer_timeout_of_the_queue_is_known() {
        let queue = described(r#"{"arguments":{"x-consumer-timeout":60000}}"#);
        assert_eq!(queue.consumer_timeout(), Some(Duration::from_secs(60)));
    }
}
