//! The headers of messages from SQS, which begin with `AWS.`: SQS reserves that for itself.

use bytes::Bytes;
use oncegate_runtime::message::Header;

/// The header with the data types of attributes that are not plain strings, as a JSON object.
pub(crate) const TYPES_HEADER: &str = "AWS.DataTypes";
/// The header with the group of a message in a FIFO queue.
pub(crate) const GROUP_HEADER: &str = "AWS.MessageGroupId";
/// The header with the time of a message's first receive, in milliseconds since 1970.
pub(crate) const FIRST_RECEIVE_HEADER: &str = "AWS.ApproximateFirstReceiveTimestamp";
/// The header with the ARN of the queue from which a redrive policy has moved a message.
pub(crate) const SOURCE_ARN_HEADER: &str = "AWS.DeadLetterQueueSourceArn";
/// The prefix of headers from SQS. SQS reserves it, so senders' attributes cannot have it.
pub(crate) const SYSTEM_PREFIX: &str = "AWS.";

/// Returns whether SQS reserves this name.
pub(crate) fn is_system(name: &str) -> bool {
    name.get(..SYSTEM_PREFIX.len())
        .is_some_and(|prefix| prefix.eq_ignore_ascii_case(SYSTEM_PREFIX))
}

pub(crate) fn text(name: &str, value: impl Into<Bytes>) -> Header {
    Header {
        name: name.into(),
        value: Some(value.into()),
    }
}
