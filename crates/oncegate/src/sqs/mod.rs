//! Amazon SQS: a source, standard and FIFO, and dead letters.
//!
//! | what | where |
//! |---|---|
//! | when a visibility is extended, lost or given up | `held` |
//! | how much is received, by how many receivers | `receivers` |
//! | which errors are repeated | `api` |
//! | what is checked at start-up | `queue` |
//! | when a retry goes back to the queue | `ticket` |
//!
//! # What becomes of a message
//!
//! - It is **received** only when a handler is free for it, and that handler's place is free again when the delete
//!   is confirmed.
//! - It is **held** while it runs, while another worker has its key (that would use up its receives), and while it
//!   waits for its place in an order: its visibility is extended. 12 hours after its receive the queue takes it back.
//! - A **retry** after a second or more goes back to the queue, hidden for that long; a sooner one waits here. So does
//!   every retry of a FIFO queue, because the messages behind it would use up their receives with it, and the retry
//!   of a message that was received for the last time before the redrive policy takes it.
//! - It is **deleted** behind its completed record, in batches. A delete that fails is repeated until the queue takes
//!   the message back, and its record answers the next delivery.
//! - At a **stop**, what has not started goes back at once.
//!
//! # FIFO
//!
//! With the consumer's default [`Ordering::Key`](crate::Ordering), the messages of a group run one after another, and
//! groups beside each other. Nothing later of a group runs while an earlier one waits for its retry, is busy
//! elsewhere, or has gone back. The group is the message's key; in a standard queue, a group is a header and no key.
//!
//! # Rights
//!
//! A source calls `sqs:GetQueueUrl` (for a name), `sqs:GetQueueAttributes`, `sqs:ReceiveMessage`, `sqs:DeleteMessage`
//! and `sqs:ChangeMessageVisibility`, and looks at its start whether it may; dead letters call `sqs:GetQueueUrl`,
//! `sqs:GetQueueAttributes` and `sqs:SendMessage`. A key of KMS needs `kms:Decrypt`, and for letters
//! `kms:GenerateDataKey`.
//!
//! # Headers
//!
//! A sender's message attributes are headers by their names. What SQS says of a message stands in headers beginning
//! with `AWS.`, which no sender may use:
//!
//! | header | value |
//! |---|---|
//! | `AWS.MessageGroupId`, `AWS.MessageDeduplicationId`, `AWS.SequenceNumber` | as sent, and as numbered by a FIFO queue |
//! | `AWS.SentTimestamp`, `AWS.ApproximateFirstReceiveTimestamp` | in milliseconds since 1970; the first is the message's timestamp |
//! | `AWS.ApproximateReceiveCount` | how often it was received, this time included |
//! | `AWS.SenderId`, `AWS.AWSTraceHeader`, `AWS.DeadLetterQueueSourceArn` | where the queue has them |
//! | `AWS.DataTypes` | the types of those attributes that are no plain strings, as a JSON object |
//! | `AWS.SnsMessageId`, `AWS.SnsTopicArn`, `AWS.SnsSubject` | from the envelope, with [`Body::Sns`] |
//! | `AWS.SnsEnvelope` | the envelope as it came, signature included, with [`Body::Sns`] |
//!
//! # Dead letters
//!
//! A dead letter has the body and the attributes of its message, and two attributes of ours. Those of an earlier round
//! are replaced.
//!
//! | attribute | value |
//! |---|---|
//! | `oncegate-reason` | the cause (`bad_key`, `permanent`, `attempts_used_up`, `mismatch` or `not_handed_over`) and the reason in words, at most 1 KiB |
//! | `oncegate-origin` | a JSON object: `route`, `origin`, `scope`, `key`, `cause`, `attempts`, `first_failed_at_ms` (where the process that gave it up saw that), `failed_at_ms`, `timestamp_ms`, `first_received_at_ms`, `group` (of a FIFO queue), `encoding` of the body where SQS would not take it as it was, and `attributes`, those for which SQS's limit of ten left no room; `left_out`, the names of attributes that are gone because the letter did not fit |

mod source;

mod ack_handle;
mod api;
mod convert;
mod dead_letter_reader;
mod dead_letters;
mod drive;
mod held;
mod hub;
mod letter;
mod outbox;
mod queue;
mod receivers;
mod settings;
mod sns;

pub use dead_letter_reader::SqsDeadLetterReader;
pub use dead_letters::SqsDeadLetters;
pub use settings::Body;
pub use source::SqsSource;

/// Why a message is a dead letter, for people.
pub(crate) const REASON_ATTRIBUTE: &str = "oncegate-reason";
/// Where a dead letter came from, for programs.
pub(crate) const ORIGIN_ATTRIBUTE: &str = "oncegate-origin";
