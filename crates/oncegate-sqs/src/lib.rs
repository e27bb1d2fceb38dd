//! Amazon SQS: a source for standard and FIFO queues, dead letters, and the publisher of an outbox.
//!
//! | what | where |
//! |---|---|
//! | when a visibility timeout is extended or lost | `held` |
//! | how much is received, by how many receivers | `receivers` |
//! | which errors are retried | `api` |
//! | what is checked at start-up | `queue` |
//! | when a retry returns to the queue | `ack_handle` |
//! | when a message waits for its payload | `payloads`, `s3` |
//! | what an outbox's message becomes, and in which batch | `outgoing`, `queue_writer` |
//!
//! # The life of a message
//!
//! - It is **received** only when a handler is free for it. That handler's permit is free again
//!   when the delete is confirmed.
//! - It is **held**, by extending its visibility timeout, while it runs, while another worker has
//!   its key (returning it would use up its receives), and while it waits for its turn in an order.
//!   12 hours after the receive it becomes visible again.
//! - A **retry** after a second or more returns the message to the queue, hidden for that long. An
//!   earlier retry waits in the consumer. So does every retry of a FIFO queue, because the later
//!   messages of the group would use up receives as well, and the retry of a message on its last
//!   receive before the redrive policy moves it.
//! - It is **deleted** after its record is completed, in batches. A delete that fails is repeated
//!   until the message becomes visible again; then its record answers the next delivery.
//! - At a **stop**, messages that have not started return to the queue at once.
//!
//! # FIFO
//!
//! With the consumer's default [`Ordering::Key`](oncegate_runtime::Ordering), the messages of a
//! group run one after another, and groups run in parallel. A later message of a group does not run
//! while an earlier one waits for its retry, is Busy on another worker, or has returned to the
//! queue. The group is the message's broker key; in a standard queue, a group is only a header.
//!
//! # Rights
//!
//! A source calls `sqs:GetQueueUrl` (for a name), `sqs:GetQueueAttributes`, `sqs:ReceiveMessage`,
//! `sqs:DeleteMessage` and `sqs:ChangeMessageVisibility`, and checks these rights at start-up; dead
//! letters call `sqs:GetQueueUrl`, `sqs:GetQueueAttributes` and `sqs:SendMessage`. A KMS key needs
//! `kms:Decrypt`, and for dead letters `kms:GenerateDataKey`.
//!
//! # Headers
//!
//! A sender's message attributes become headers of the same names. SQS's own attributes become
//! headers with the prefix `AWS.`, which senders cannot use:
//!
//! | header | value |
//! |---|---|
//! | `AWS.MessageGroupId`, `AWS.MessageDeduplicationId`, `AWS.SequenceNumber` | as sent, and as assigned by a FIFO queue |
//! | `AWS.SentTimestamp`, `AWS.ApproximateFirstReceiveTimestamp` | in milliseconds since 1970; the first is the message's timestamp |
//! | `AWS.ApproximateReceiveCount` | how often it was received, including this time |
//! | `AWS.SenderId`, `AWS.AWSTraceHeader`, `AWS.DeadLetterQueueSourceArn` | if the queue has them |
//! | `AWS.DataTypes` | the types of attributes that are not plain strings, as a JSON object |
//! | `AWS.SnsMessageId`, `AWS.SnsTopicArn`, `AWS.SnsSubject` | from the envelope, with [`Body::Sns`] |
//! | `AWS.SnsEnvelope` | the unchanged envelope, including its signature, with [`Body::Sns`] |
//! | `AWS.S3Pointer` | the unchanged pointer of a message whose payload came from S3, with the feature `s3` and `S3Payloads` |
//!
//! # Dead letters
//!
//! A dead letter has the body and the attributes of its message, and the two attributes below.
//! Those from an earlier delivery are replaced.
//!
//! | attribute | value |
//! |---|---|
//! | `oncegate-reason` | the cause (`bad_key`, `permanent`, `attempts_used_up`, `mismatch`, `not_handed_over` or `outcome_unknown`) and the reason as text on one line, at most 1 KiB |
//! | `oncegate-origin` | a JSON object: `id`, which copies of one dead letter have in common, `route`, `origin`, `scope`, `key`, `cause`, `attempts`, `first_failed_at_ms` (if the process that dead-lettered it saw that), `failed_at_ms`, `timestamp_ms`, `first_received_at_ms`, `group` (of a FIFO queue), `encoding` of the body if SQS would not accept it unchanged, and `attributes`, those beyond SQS's limit of ten; `left_out`, the names of attributes that were dropped because the dead letter was too large |
//!
//! # Not obvious
//!
//! Implementation notes: facts about SQS that this code depends on.
//!
//! - A cancelled long poll hides the messages that it was about to bring for the visibility
//!   timeout. So its wait is kept below the stop deadline, and an idle consumer may take that long
//!   to stop.
//! - Each receive returns a new receipt handle, and only the newest is sure to delete. A message
//!   that is received again while it is held only updates its handle.
//! - The entries of a batch are identified by their positions: the same message id may occur twice
//!   in a batch, and SQS refuses such a batch.
//! - A batch may succeed as a whole with failed entries in it. An entry that the response does not
//!   mention counts as failed.
//! - A message that is returned to the queue has used up a receive. So a Busy message, and a FIFO
//!   message that waits for its retry, are held instead. Otherwise, with ten messages of a group in
//!   hand, each retry of the first would cost the other nine a receive, until the redrive policy
//!   removes healthy ones.
//! - An extension in progress would overwrite the visibility of a retry. The retry is sent after
//!   the extension has been answered.
//! - Visibility ends 12 hours after the receive, whatever was extended.
//! - A connection is driven by the runtime that opened it. The source's calls have their own time
//!   limits and therefore their own connections, on the source's thread: a client that the user
//!   shares cannot place a heartbeat on a blocked runtime.
//! - Dead letters in a FIFO queue have deduplication ids of their own. With the message's id, SQS
//!   would silently drop a second dead letter within five minutes, and its message would be
//!   deleted.
//! - SQS accepts ten attributes. A dead letter has two of oncegate's; the message's attributes that
//!   do not fit are stored in one of these.

mod source;

mod ack_handle;
mod api;
mod convert;
mod dead_letter_reader;
mod dead_letters;
mod drive;
mod entry;
mod events;
mod headers;
mod held;
mod hub;
mod letter;
mod outbox;
mod outgoing;
mod payloads;
mod publisher;
mod queue;
mod queue_error;
mod queue_writer;
mod receivers;
#[cfg(feature = "s3")]
mod s3;
mod settings;
mod sns;
mod source_settings;

pub use dead_letter_reader::SqsDeadLetterReader;
pub use dead_letters::SqsDeadLetters;
pub use publisher::SqsPublisher;
#[cfg(feature = "s3")]
pub use s3::S3Payloads;
pub use source::SqsSource;
pub use source_settings::{Body, SqsSettings};

/// The header with the unchanged pointer of a message whose payload came from S3.
pub(crate) const POINTER_HEADER: &str = "AWS.S3Pointer";
/// The attribute with the reason of a dead letter, for people.
pub(crate) const REASON_ATTRIBUTE: &str = "oncegate-reason";
/// The attribute with the origin of a dead letter, for programs.
pub(crate) const ORIGIN_ATTRIBUTE: &str = "oncegate-origin";
