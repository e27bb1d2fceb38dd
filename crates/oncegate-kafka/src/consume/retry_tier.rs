//! A retry topic: messages wait here until they are due.

// invariant (all tests): retry-topic

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use tokio::time::{Instant, sleep_until};

use super::ack_handle;
use super::source::KafkaSource;
use crate::group::buffer::Fetched;
use oncegate_runtime::source::{Delivery, SourceError};

/// The most messages that are taken from the topic's source at once.
const FETCH_MAX: usize = 64;

/// A retry topic, its source, and the messages that it has delivered too early.
pub(crate) struct RetryTier {
    pub(crate) topic: String,
    pub(crate) source: KafkaSource,
    /// The longest wait of a message in this topic.
    wait: Duration,
    waiting: Mutex<WaitingMessages>,
}

/// Received messages that are not due, the first one to be due first.
#[derive(Default)]
struct WaitingMessages {
    /// The messages by the instant at which they are due, and by a number in order of arrival.
    by_due: BTreeMap<(Instant, u64), Fetched>,
    last_number: u64,
}

impl RetryTier {
    pub(crate) fn new(topic: String, source: KafkaSource, wait: Duration) -> Self {
        Self {
            topic,
            source,
            wait,
            waiting: Mutex::default(),
        }
    }

    /// Waits for messages that are due, and returns at least one and at most `most`; `None` when
    /// the source has ended.
    ///
    /// It receives while messages wait: a message that is due overtakes those that are not, and a
    /// source that has failed is noticed at once. Dropping the future loses no message.
    pub(crate) async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        loop {
            let (due, next_due_at) = {
                let mut waiting = self.waiting();
                (waiting.take_due(most), waiting.next_due_at())
            };
            if !due.is_empty() {
                return Ok(Some(due));
            }
            let next_is_due = async {
                match next_due_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                fetched = self.source.fetch(FETCH_MAX) => match fetched? {
                    Some(fetched) => self.waiting().add(fetched, self.wait),
                    None => return Ok(None),
                },
                () = next_is_due => {}
            }
        }
    }

    fn waiting(&self) -> MutexGuard<'_, WaitingMessages> {
        self.waiting.lock()
    }
}

impl WaitingMessages {
    /// Adds messages that have just been received. None waits for longer than `wait_max`: the clock
    /// of the process that wrote its header may be wrong.
    fn add(&mut self, fetched: Vec<Fetched>, wait_max: Duration) {
        let now = Instant::now();
        let time = SystemTime::now();
        for mut fetched in fetched {
            let due = super::retry_headers::restore(&mut fetched.message);
            let wait = due
                .and_then(|due| due.duration_since(time).ok())
                .unwrap_or_default();
            self.last_number += 1;
            fetched.assignment.waits();
            self.by_due
                .insert((now + wait.min(wait_max), self.last_number), fetched);
        }
    }

    /// Takes at most `most` messages that are due, and drops those of revoked partitions.
    fn take_due(&mut self, most: usize) -> Vec<Delivery> {
        self.by_due
            .retain(|_, fetched| !fetched.assignment.is_revoked());
        let now = Instant::now();
        let mut due = Vec::new();
        while due.len() < most
            && let Some(first) = self.by_due.first_entry()
            && first.key().0 <= now
        {
            let fetched = first.remove();
            fetched.assignment.waits_no_more();
            due.push(ack_handle::delivery(fetched));
        }
        due
    }

    fn next_due_at(&self) -> Option<Instant> {
        self.by_due
            .first_key_value()
            .map(|((due_at, _), _)| *due_at)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;

    use super::*;
    use crate::consume::retry_headers::DUE_HEADER;
    use crate::partitions::assignment::Begin;
    use crate::partitions::assignments::Assignments;
    use crate::partitions::partition::Partition;
    use oncegate_runtime::dead_letters::millis_since_1970;
    use oncegate_runtime::message::{Header, Message, Origin};

    const WAIT: Duration = Duration::from_secs(30);

    fn partition(number: i32) -> Partition {
        Partition {
            topic: "later".into(),
            number,
        }
    }

    /// A message of this partition that is due in `wait`, by the clock of its writer.
    fn fetched(assignments: &Assignments, number: i32, wait: Duration) -> Fetched {
        let assignment = assignments.get(&partition(number)).expect("ours");
        let offset = assignment.waiting() as i64;
        let receipt = assignment.receive(offset).expect("ours").receipt;
        let due = millis_since_1970(SystemTime::now() + wait).to_string();
        let header = Header {
            name: DUE_HEADER.into(),
            value: Some(due.into()),
        };
        let origin = Origin::Other(number.to_string().into());
        let message =
            Message::new("orders", origin, Some(Bytes::new())).with_headers([header].into());
        Fetched {
            message,
            bytes: 0,
            assignment: Arc::clone(&assignment),
            receipt,
        }
    }

    fn origins(due: &[Delivery]) -> Vec<String> {
        due.iter()
            .map(|delivery| delivery.message.origin().to_string())
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn messages_wait_at_most_their_topics_delay_and_in_due_order() {
        let assignments = Assignments::default();
        assignments.assign((0..3).map(partition), Begin::Begun);
        let mut waiting = WaitingMessages::default();
        let hour = Duration::from_secs(3_600);
        let batch = [(0, hour), (1, WAIT / 2), (2, Duration::ZERO)];
        waiting.add(
            batch
                .map(|(number, wait)| fetched(&assignments, number, wait))
                .into(),
            WAIT,
        );
        assert_eq!(origins(&waiting.take_due(10)), ["2"]);
        tokio::time::advance(WAIT / 2).await;
        assert_eq!(origins(&waiting.take_due(10)), ["1"]);
        assert!(waiting.take_due(10).is_empty());
        tokio::time::advance(WAIT / 2).await;
        assert_eq!(origins(&waiting.take_due(10)), ["0"]);
        assert!(
            assignments
                .all()
                .iter()
                .all(|assignment| assignment.waiting() == 0)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn messages_of_a_revoked_partition_are_dropped_and_delay_none() {
        let assignments = Assignments::default();
        assignments.assign((0..2).map(partition), Begin::Begun);
        let mut waiting = WaitingMessages::default();
        waiting.add(
            [0, 1]
                .map(|number| fetched(&assignments, number, WAIT))
                .into(),
            WAIT,
        );
        assignments.begin_revoke(&[partition(0)]);
        assert!(waiting.take_due(10).is_empty());
        assert_eq!(waiting.by_due.len(), 1);
        tokio::time::advance(WAIT).await;
        assert_eq!(origins(&waiting.take_due(10)), ["1"]);
    }
}
