//! The errors of a producer that waiting does not end, and what to change.

use rdkafka::error::{KafkaError, RDKafkaErrorCode};

/// Returns what an operator must change when the error cannot pass by waiting; `None` when it can.
pub(crate) fn remedy(error: &KafkaError) -> Option<&'static str> {
    use RDKafkaErrorCode::{
        ClusterAuthorizationFailed, InvalidMessageSize, InvalidRecord, InvalidTimestamp,
        MessageBatchTooLarge, MessageSizeTooLarge, PolicyViolation, TopicAuthorizationFailed,
        UnknownPartition, UnknownTopic, UnknownTopicOrPartition,
    };
    match error.rdkafka_error_code()? {
        MessageSizeTooLarge | MessageBatchTooLarge | InvalidMessageSize => {
            Some("raise the topic's max.message.bytes")
        }
        TopicAuthorizationFailed => Some("grant WRITE on the topic"),
        ClusterAuthorizationFailed => {
            Some("grant WRITE on the topic, or IDEMPOTENT_WRITE on the cluster")
        }
        UnknownTopic | UnknownPartition | UnknownTopicOrPartition => Some("create the topic"),
        InvalidRecord => {
            Some("the topic must not be compacted, because not every message has a key")
        }
        InvalidTimestamp => {
            Some("raise the topic's message.timestamp.before.max.ms and .after.max.ms")
        }
        PolicyViolation => Some("change the policy of the brokers that forbids it"),
        _ => None,
    }
}

/// Returns whether every message of the topic gets this error.
pub(crate) fn is_about_the_topic(error: &KafkaError) -> bool {
    use RDKafkaErrorCode::{
        ClusterAuthorizationFailed, TopicAuthorizationFailed, UnknownPartition, UnknownTopic,
        UnknownTopicOrPartition,
    };
    matches!(
        error.rdkafka_error_code(),
        Some(
            TopicAuthorizationFailed
                | ClusterAuthorizationFailed
                | UnknownTopic
                | UnknownPartition
                | UnknownTopicOrPartition
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_waiting_does_not_end_names_what_to_change() {
        use RDKafkaErrorCode as Code;
        let remedy = |code| remedy(&KafkaError::MessageProduction(code));
        for (code, named) in [
            (Code::MessageSizeTooLarge, "max.message.bytes"),
            (Code::TopicAuthorizationFailed, "WRITE"),
            (Code::ClusterAuthorizationFailed, "IDEMPOTENT_WRITE"),
            (Code::UnknownTopic, "create"),
            (Code::InvalidRecord, "compacted"),
        ] {
            assert!(
                remedy(code).is_some_and(|remedy| remedy.contains(named)),
                "{code:?}"
            );
        }
        for code in [
            Code::MessageTimedOut,
            Code::NotEnoughReplicas,
            Code::QueueFull,
            Code::Fatal,
        ] {
            assert_eq!(remedy(code), None, "{code:?}");
        }
    }
}
