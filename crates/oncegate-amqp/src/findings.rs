//! Limits of a queue that lose messages, or take them away too early. This module does no I/O.

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

impl Described {
    /// Returns a warning for each limit that loses messages, with what to change.
    pub(crate) fn warnings(&self, queue: &str, max_attempts: u32) -> Vec<String> {
        let mut warnings = Vec::new();
        if !self.durable || self.auto_delete {
            warnings.push(format!(
                "the queue `{queue}` is not durable, or is deleted with its last consumer: its messages are lost then"
            ));
        }
        if let Some(limit) = self
            .delivery_limit()
            .filter(|limit| *limit < i64::from(max_attempts))
        {
            let then = match self.text("dead-letter-exchange") {
                Some(exchange) => {
                    format!("gives the message to its dead-letter exchange `{exchange}`")
                }
                None => "drops the message".to_owned(),
            };
            warnings.push(format!(
                "the `delivery-limit` of the queue `{queue}` is {limit}, below `max_attempts` ({max_attempts}): the broker \
                 {then} before it becomes a dead letter with a reason, if its runs end the process; set it to several times \
                 `max_attempts`, or to -1"
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

    /// Returns how often a message may come back, if that is limited.
    fn delivery_limit(&self) -> Option<i64> {
        let applied = self
            .delivery_limit
            .as_i64()
            .or_else(|| self.number("delivery-limit"));
        applied.filter(|limit| *limit >= 0)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn warnings(described: &str) -> String {
        let described: Described = serde_json::from_str(described).unwrap();
        described.warnings("orders", 5).join("; ")
    }

    #[test]
    fn limits_that_lose_messages_are_named() {
        let fine = [
            r#"{"durable":true,"auto_delete":false,"arguments":{},"effective_policy_definition":[]}"#,
            r#"{"durable":true,"arguments":{"x-delivery-limit":50},"delivery_limit":50}"#,
            r#"{"durable":true,"arguments":{"x-delivery-limit":-1},"delivery_limit":"unlimited"}"#,
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
                "is 3, below `max_attempts` (5): the broker drops",
            ),
            (r#"{"durable":true,"delivery_limit":4}"#, "is 4"),
            (
                r#"{"durable":true,"arguments":{"x-delivery-limit":9,"x-dead-letter-exchange":"dlx"},
                    "effective_policy_definition":{"delivery-limit":2}}"#,
                "is 2, below `max_attempts` (5): the broker gives the message to its dead-letter exchange `dlx`",
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
}
