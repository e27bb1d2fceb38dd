//! The entries that a gate makes in its journal.

use std::sync::Arc;

use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::Command;

use super::Gate;
use crate::journal::{Journal, JournalEntry};
use crate::observe::{Event, Observer};

/// The reason in entries of runs without the store, which have no record.
pub(super) const FAIL_OPEN: &str = "without the store, which was away";

impl Gate {
    /// Writes down what happens to each key: `claimed`, `completed`, `released`, `failed`,
    /// `handed_over`, and `lost` for an attempt whose claim another owner had taken over. No
    /// journal by default.
    ///
    /// It is a best effort, and each entry is marked so. The entry is made after the store has
    /// answered, so a crash between the two loses the entry and never the record. The gate does not
    /// wait for the journal. Entries that the journal drops are counted. The SQL stores can do
    /// better: see `SqliteBuilder::journaled` and `PostgresBuilder::journaled`, whose entries are
    /// written in the transaction of the change.
    pub fn journal(mut self, journal: impl Journal + 'static) -> Self {
        self.journal = Some(Arc::new(journal));
        self
    }
}

/// A gate's journal, if it has one.
#[derive(Clone, Debug)]
pub(super) struct Notes {
    pub(super) scope: Arc<str>,
    pub(super) journal: Option<Arc<dyn Journal>>,
    pub(super) observer: Arc<dyn Observer>,
}

impl Notes {
    /// Makes an entry, if there is a journal.
    pub(super) fn note(&self, entry: impl FnOnce() -> JournalEntry) {
        let Some(journal) = &self.journal else { return };
        let entries = journal.note(JournalEntry {
            best_effort: true,
            ..entry()
        });
        if entries > 0 {
            self.observer.observe(Event::JournalDropped {
                scope: &self.scope,
                entries,
            });
        }
    }

    /// Notes the outcome of an operation that the lease renewer has finished.
    pub(super) fn note_ended(&self, command: &Command, reply: &Reply) {
        let (event, reason, token) = match &command.operation {
            Operation::Complete { token, .. } => ("completed", "", token),
            Operation::Release { token, reason, .. } => ("released", reason.as_str(), token),
            Operation::Fail { token, reason, .. } => ("failed", reason.as_str(), token),
            _ => return,
        };
        // `NotOwner`: there was nothing to end, or another process has noted it.
        if matches!(reply, Reply::Applied { .. }) {
            self.note(|| {
                JournalEntry::now(event)
                    .key(&command.key)
                    .run(token.tag())
                    .why(reason)
            });
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(
        clippy::unwrap_used,
        clippy::indexing_slicing,
        reason = "a test that cannot go on has failed"
    )]

    use std::time::Duration;

    use oncegate_core::key::{Key, StoreKey};
    use oncegate_core::store::Store as _;
    use parking_lot::Mutex;
    use tokio::sync::Notify;

    use super::*;
    use crate::gate::{Completion, Entry as Entered, Lease};
    use crate::memory::MemoryStore;
    use crate::message::{Message, Origin};
    use crate::observe::Counters;

    /// Keeps the entries, and reports of each third one that it was dropped.
    #[derive(Debug, Default)]
    struct Recorded(Mutex<Vec<JournalEntry>>, Notify);

    impl Journal for Recorded {
        fn note(&self, entry: JournalEntry) -> u64 {
            let mut entries = self.0.lock();
            entries.push(entry);
            self.1.notify_one();
            u64::from(entries.len().is_multiple_of(3))
        }
    }

    async fn granted(gate: &Gate) -> Lease {
        let message = Message::new(
            "orders",
            Origin::Other("here".into()),
            Some(r#"{"id":1}"#.into()),
        );
        loop {
            match gate.enter(&message).await.unwrap() {
                Entered::Granted(lease) => return lease,
                // A retry is due a millisecond after its release.
                Entered::Busy { retry_in } => tokio::time::sleep(retry_in).await,
                other => panic!("{other:?}"),
            }
        }
    }

    async fn execute(store: &MemoryStore, key: &StoreKey, operation: Operation) {
        let command = Command {
            key: key.clone(),
            operation,
        };
        store.execute(vec![command]).await.remove(0).unwrap();
    }

    async fn reopen(store: &MemoryStore, key: &StoreKey) {
        let found = store.read(vec![key.clone()]).await.remove(0).unwrap();
        let expected = found.unwrap().record;
        execute(store, key, Operation::Reopen { expected }).await;
    }

    #[tokio::test]
    async fn each_end_of_a_run_is_noted_and_dropped_entries_are_counted() {
        let kept = Arc::new(Recorded::default());
        let counters = Arc::new(Counters::default());
        let store = Arc::new(MemoryStore::new());
        let gate = Gate::new("billing", Key::json(["id"]), Arc::clone(&store)).fenced();
        let gate = gate
            .journal(Arc::clone(&kept))
            .observer(Arc::clone(&counters) as _);

        granted(&gate)
            .await
            .release(Duration::ZERO, true, "closed")
            .await;
        let late = granted(&gate).await;
        let key = late.store_key().clone();
        reopen(&store, &key).await;
        let owner = granted(&gate).await;
        late.release(Duration::ZERO, true, "too late").await;
        let by = owner.tag();
        assert_eq!(owner.fail("never").await, Completion::Applied);
        gate.opened()
            .await
            .unwrap()
            .hand_over(&key, by)
            .await
            .unwrap();
        // It is marked already, so there is no entry.
        execute(&store, &key, Operation::HandOver { by }).await;

        let entries = kept.0.lock().clone();
        let noted: Vec<_> = entries
            .iter()
            .map(|entry| (&*entry.event, entry.reason.as_deref()))
            .collect();
        assert_eq!(
            noted,
            [
                ("claimed", None),
                ("released", Some("closed")),
                ("claimed", None),
                ("claimed", Some("reopened")),
                ("lost", Some("too late")),
                ("failed", Some("never")),
                ("handed_over", None),
            ]
        );
        assert!(
            entries
                .iter()
                .all(|entry| entry.best_effort && entry.key == Some(key.to_string()))
        );
        let runs: Vec<_> = entries[..6]
            .iter()
            .map(|entry| entry.run.as_deref().unwrap())
            .collect();
        assert!(
            runs[0] == runs[1] && runs[2] == runs[4] && runs[3] == runs[5] && runs[2] != runs[3],
            "{runs:?}"
        );
        assert!(
            entries[..6]
                .iter()
                .all(|entry| entry.fencing_token.is_some()
                    && entry.origin.as_deref() == Some("here"))
        );
        assert_eq!(counters.get("journal_dropped", ""), 2);
    }

    #[tokio::test]
    async fn an_end_that_its_lease_left_behind_is_noted_where_it_happens() {
        let kept = Arc::new(Recorded::default());
        let gate =
            Gate::new("billing", Key::json(["id"]), MemoryStore::new()).journal(Arc::clone(&kept));
        let lease = granted(&gate).await;
        let key = lease.store_key().clone();
        let open = Arc::clone(gate.opened().await.unwrap());
        open.lease_renewer
            .finish_later(key, lease.completion(bytes::Bytes::new()));
        let completed = async {
            while kept.0.lock().len() < 2 {
                kept.1.notified().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), completed)
            .await
            .expect("in time");
        let entries = kept.0.lock().clone();
        assert_eq!(
            (&*entries[1].event, &entries[1].key),
            ("completed", &entries[0].key)
        );
        assert_eq!(entries[1].run, entries[0].run);
    }
}
