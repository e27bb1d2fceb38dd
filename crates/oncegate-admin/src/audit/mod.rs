//! The audit: reconciles the messages of topics with their records, their dead letters and their
//! effects.
//!
//! It finds events that were lost, or that had their effect twice. Like a [dry
//! run](crate::dry_run), it claims nothing and writes nothing to the store, so it can run
//! beside the consumers at any time.
//!
//! The memory does not grow with the number of messages. Messages, dead letters and effects become
//! rows of 48 bytes, which are sorted by their idempotency key in runs of half a million and merged
//! from a file. Two runs are in memory (50 MB), and during the merge up to 16 MiB.

use std::fs::File;
use std::io;
use std::sync::Arc;

use oncegate_core::key::{Digest, FingerprintSpec, Key, Scope, StoreKey};
use oncegate_core::store::Store;

use super::dead_letter_reader::StoredDeadLetter;
use super::dry_run::{DryRunError, Known, Lookups, MessageFinding, Subject};
use oncegate_runtime::attempt::idempotency_bits;
use oncegate_runtime::dead_letters::DeadLetterCause;
use oncegate_runtime::message::{Message, Origin};

mod report;
mod row;
mod sorted;
mod topics;
mod verdict;

pub use report::{AuditFinding, AuditReport};
pub use verdict::AuditVerdict;

use report::Tally;
use row::{Found, RecordState, Row, RowPlace, What};
use sorted::{Merged, Sorter};
use topics::Topics;
use verdict::{AuditedEvent, Given};

/// The number of rows that are sorted at a time: 25 MB.
const RUN_ROWS: usize = 1 << 19;

/// Settings of an audit.
///
/// ```
/// use oncegate::admin::audit::{Audit, AuditVerdict};
/// use oncegate::{Completion, Entry, Gate, Key, MemoryStore, Message, Origin};
/// use std::sync::Arc;
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), oncegate::BoxError> {
/// let message = |id: i64| {
///     let origin = Origin::Kafka { topic: "orders".into(), partition: 0, offset: id };
///     Message::new("orders", origin, Some(format!(r#"{{"order_id": {id}}}"#).into()))
/// };
/// let store = Arc::new(MemoryStore::new());
/// let gate = Gate::new("billing", Key::json(["order_id"]), Arc::clone(&store));
/// let mut charges = Vec::new();
/// if let Entry::Granted(lease) = gate.enter(&message(7)).await? {
///     charges.push(lease.attempt().idempotency_key("charge"));
///     assert_eq!(lease.complete(&()).await?, Completion::Applied);
/// }
///
/// let audit = Audit::new("billing", Key::json(["order_id"]), store).step("charge");
/// let mut audit = audit.open(tempfile::tempfile()?).await?;
/// audit.add_messages(vec![message(7), message(8)]).await?;
/// audit.add_effects(charges.iter().map(String::as_str)).await?;
/// let report = audit.finish().await?;
/// assert_eq!((report.events, report.ok, report.lost), (2, 1, 1));
/// assert_eq!(report.findings[0].verdict, AuditVerdict::Lost);
/// assert_eq!(report.findings[0].origin, "orders/0@8");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Audit {
    subject: Subject,
    step: String,
    topics: Topics,
    findings_most: usize,
}

impl Audit {
    /// The findings of each kind that are kept by default: 20.
    pub const DEFAULT_FINDINGS_MOST: usize = 20;

    /// The step whose idempotency keys are compared by default: `handler`, which is that of
    /// workers.
    pub const DEFAULT_STEP: &str = "handler";

    /// Takes the same scope, key and store as the [`Gate`](oncegate_runtime::Gate) whose work is
    /// audited.
    pub fn new(scope: impl Into<String>, key: Key, store: impl Store + 'static) -> Self {
        let subject = Subject {
            scope: scope.into(),
            key,
            fingerprint: None,
            store: Arc::new(store),
        };
        Self {
            subject,
            step: Self::DEFAULT_STEP.to_owned(),
            topics: Topics::default(),
            findings_most: Self::DEFAULT_FINDINGS_MOST,
        }
    }

    /// Compares the rest of the payload as well, as the gate does. Default: off.
    #[must_use]
    pub fn fingerprint(mut self, fingerprint: FingerprintSpec) -> Self {
        self.subject.fingerprint = Some(fingerprint);
        self
    }

    /// The step of [`Attempt::idempotency_key`](oncegate_runtime::Attempt::idempotency_key) whose
    /// effects are compared. Default: [`DEFAULT_STEP`](Self::DEFAULT_STEP).
    #[must_use]
    pub fn step(mut self, step: impl Into<String>) -> Self {
        self.step = step.into();
        self
    }

    /// Notes that the consumer group has committed this offset: earlier messages of the partition
    /// are acknowledged, and from it on they are not. Without any such call, all messages count as
    /// acknowledged; after one, those of partitions without one count as not acknowledged.
    ///
    /// Read the offsets before the messages' records are read: before [`open`](Self::open).
    #[must_use]
    pub fn committed(mut self, topic: &str, partition: i32, offset: i64) -> Self {
        self.topics.commit(topic, partition, offset);
        self
    }

    /// The findings of each kind that are kept: those with the first positions. Default:
    /// [`DEFAULT_FINDINGS_MOST`](Self::DEFAULT_FINDINGS_MOST).
    #[must_use]
    pub fn findings_most(mut self, most: usize) -> Self {
        self.findings_most = most;
        self
    }

    /// Checks the specifications, and compares them with those that the scope's records were made
    /// with. `file` is an empty file for the sorted rows, such as an unnamed temporary one; it gets
    /// 48 bytes for each message, dead letter and effect.
    ///
    /// # Errors
    /// The text of the [`AuditError`] names what to change.
    pub async fn open(self, file: File) -> Result<OpenAudit, AuditError> {
        let Self {
            subject,
            step,
            topics,
            findings_most,
        } = self;
        let lookups = Lookups::open(subject).await?;
        let rows = Rows {
            topics,
            step,
            sorter: Sorter::new(file, RUN_ROWS),
            foreign: None,
        };
        Ok(OpenAudit {
            lookups,
            rows,
            report: AuditReport::default(),
            given: Given::default(),
            findings_most,
        })
    }
}

/// An open audit, to which messages, then dead letters, and then effects are added.
///
/// The order matters beside running consumers: a change of a message during the audit must show in
/// the data that is read later.
#[derive(Debug)]
pub struct OpenAudit {
    lookups: Lookups,
    rows: Rows,
    report: AuditReport,
    given: Given,
    findings_most: usize,
}

/// Makes rows.
#[derive(Debug)]
struct Rows {
    topics: Topics,
    step: String,
    sorter: Sorter,
    /// The origin of a message that cannot be audited.
    foreign: Option<Origin>,
}

impl OpenAudit {
    /// Returns the store's knowledge of the scope.
    pub fn known(&self) -> Known {
        self.lookups.known()
    }

    /// Adds messages of the window, and begins to read their records; waits while more than a few
    /// thousand are in flight.
    ///
    /// # Errors
    /// When the store did not answer for some ten seconds or refuses, when the file cannot be
    /// written, or when a message is not from Kafka.
    pub async fn add_messages(&mut self, messages: Vec<Message>) -> Result<(), AuditError> {
        self.report.messages += messages.len() as u64;
        let Self { lookups, rows, .. } = self;
        let scope = lookups.scope().clone();
        lookups
            .add(messages, |finding| rows.add_message(&scope, &finding))
            .await?;
        rows.settle().await
    }

    /// Adds dead letters; those of other scopes are left out. After a call, also with none, a
    /// message that its record calls a dead letter must be among them.
    ///
    /// # Errors
    /// When the store did not answer for the messages, or the file cannot be written.
    pub async fn add_dead_letters(
        &mut self,
        letters: Vec<StoredDeadLetter>,
    ) -> Result<(), AuditError> {
        self.given.dead_letters = true;
        self.finish_messages().await?;
        let scope = self.lookups.scope();
        for letter in letters.iter().filter_map(StoredDeadLetter::letter) {
            if letter.scope != scope.as_str() {
                continue;
            }
            self.report.dead_letters += 1;
            let key = letter
                .key
                .as_deref()
                .filter(|_| letter.cause != DeadLetterCause::Mismatch);
            self.rows.add_dead_letter(letter.message.origin(), key);
        }
        self.rows.settle().await
    }

    /// Adds effects, by the idempotency keys under which the downstream system has them: one for
    /// each effect. A text that is not a UUID is an effect that belongs to no message. After a
    /// call, also with none, a completed message must have an effect.
    ///
    /// # Errors
    /// When the store did not answer for the messages, or the file cannot be written.
    pub async fn add_effects<'a>(
        &mut self,
        keys: impl IntoIterator<Item = &'a str, IntoIter: Send> + Send,
    ) -> Result<(), AuditError> {
        self.given.effects = true;
        self.finish_messages().await?;
        for key in keys {
            self.report.effects += 1;
            self.rows.add_effect(key, self.report.effects);
        }
        self.rows.settle().await
    }

    /// Reconciles everything, and returns the report.
    ///
    /// # Errors
    /// When the store did not answer for the messages, or the file cannot be written or read.
    pub async fn finish(mut self) -> Result<AuditReport, AuditError> {
        self.finish_messages().await?;
        let Self {
            lookups,
            rows,
            report,
            given,
            findings_most,
        } = self;
        let scope = lookups.scope().clone();
        let Rows { topics, sorter, .. } = rows;
        let mut merged = sorter.finish().await?;
        tokio::task::spawn_blocking(move || {
            let mut tally = Tally::new(report, findings_most);
            count_events(&mut merged, &mut tally, given)?;
            Ok(tally.finish(&topics, &scope))
        })
        .await
        .map_err(io::Error::other)?
    }

    async fn finish_messages(&mut self) -> Result<(), AuditError> {
        let Self { lookups, rows, .. } = self;
        let scope = lookups.scope().clone();
        lookups
            .finish(|finding| rows.add_message(&scope, &finding))
            .await?;
        rows.settle().await
    }
}

/// Counts each event when all its rows are read: the rows of one event follow one another.
fn count_events(merged: &mut Merged, tally: &mut Tally, given: Given) -> io::Result<()> {
    let mut event: Option<(u128, AuditedEvent)> = None;
    while let Some(row) = merged.next()? {
        match &mut event {
            Some((id, event)) if *id == row.event => event.add(row),
            _ => {
                let mut next = AuditedEvent::default();
                next.add(row);
                if let Some((_, whole)) = event.replace((row.event, next)) {
                    tally.count(whole, given);
                }
            }
        }
    }
    if let Some((_, whole)) = event {
        tally.count(whole, given);
    }
    Ok(())
}

impl Rows {
    fn add_message(&mut self, scope: &Scope, finding: &MessageFinding) {
        let Some((place, acknowledged)) = self.topics.find(&finding.origin) else {
            self.foreign.get_or_insert_with(|| finding.origin.clone());
            return;
        };
        let state = RecordState::of(&finding.standing);
        let (event, digest) = match finding.digest {
            Some(digest) if state.is_of_message() => (
                idempotency_bits(StoreKey::new(scope, digest).as_str(), &self.step),
                digest,
            ),
            _ => (of_origin(&finding.origin), NO_DIGEST),
        };
        self.sorter.push(&Row {
            event,
            what: What::Message(Found {
                state,
                acknowledged,
            }),
            place,
            digest,
        });
    }

    /// Adds a dead letter. It is that of its message, and of other messages with the same key.
    fn add_dead_letter(&mut self, origin: &Origin, key: Option<&str>) {
        let events = [
            Some(of_origin(origin)),
            key.map(|key| idempotency_bits(key, &self.step)),
        ];
        for event in events.into_iter().flatten() {
            let place = RowPlace::default();
            self.sorter.push(&Row {
                event,
                what: What::DeadLetter,
                place,
                digest: NO_DIGEST,
            });
        }
    }

    fn add_effect(&mut self, key: &str, number: u64) {
        let (topic, event) = match parse_uuid(key) {
            Some(event) => (RowPlace::UUID, event),
            None => (
                RowPlace::NO_UUID,
                of_text("oncegate v1 audit effect", &number.to_string()),
            ),
        };
        let place = RowPlace {
            topic,
            partition: 0,
            offset: number,
        };
        self.sorter.push(&Row {
            event,
            what: What::Effect,
            place,
            digest: NO_DIGEST,
        });
    }

    async fn settle(&mut self) -> Result<(), AuditError> {
        if let Some(origin) = self.foreign.take() {
            return Err(AuditError::NotInKafka {
                origin: origin.to_string(),
            });
        }
        Ok(self.sorter.make_room().await?)
    }
}

const NO_DIGEST: Digest = Digest::from_bytes([0; 16]);

/// The event of a message without a key of its own.
fn of_origin(origin: &Origin) -> u128 {
    of_text("oncegate v1 audit origin", &origin.to_string())
}

fn of_text(context: &str, text: &str) -> u128 {
    let mut bytes = [0; 16];
    blake3::Hasher::new_derive_key(context)
        .update(text.as_bytes())
        .finalize_xof()
        .fill(&mut bytes);
    u128::from_be_bytes(bytes)
}

/// The bits of a UUID, in upper or lower case, with or without hyphens and quotes.
pub(super) fn parse_uuid(text: &str) -> Option<u128> {
    /// The hexadecimal digits of 128 bits.
    const DIGITS: u32 = 32;
    let mut bits = 0_u128;
    let mut digits = 0;
    for c in text.trim().trim_matches('"').chars().filter(|c| *c != '-') {
        bits = bits << 4 | u128::from(c.to_digit(16)?);
        digits += 1;
        if digits > DIGITS {
            return None;
        }
    }
    (digits == DIGITS).then_some(bits)
}

/// The reason that there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuditError {
    /// The specifications do not fit, or the store did not answer.
    #[error(transparent)]
    Records(#[from] DryRunError),
    /// The file for the sorted rows cannot be written or read.
    #[error(
        "the temporary file of the audit cannot be used; it needs 48 bytes for each message, dead letter and effect"
    )]
    File(#[from] io::Error),
    /// Only messages of topics can be audited.
    #[error("the message {origin} is not from a topic of Kafka; only those can be audited")]
    NotInKafka {
        /// The origin of the message.
        origin: String,
    },
}

#[cfg(test)]
mod tests;
