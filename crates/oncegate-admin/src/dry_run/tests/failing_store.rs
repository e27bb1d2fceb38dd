//! A dry run with a store that fails.

use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use oncegate_core::record::StoreTime;
use oncegate_core::rules::Reply;
use oncegate_core::store::{self, Checkup, Command, RecordSnapshot};

use super::super::lookups::LOOK_TRIES;
use super::*;

/// A store that fails, refuses or returns unreadable records, a set number of times.
#[derive(Debug)]
struct Moody {
    inner: store::MemoryStore,
    outages: AtomicU32,
    refuses: bool,
    garbage: bool,
}

impl Moody {
    fn new() -> Self {
        let inner = store::MemoryStore::with_clock(|| StoreTime::from_millis(1));
        Self {
            inner,
            outages: AtomicU32::new(0),
            refuses: false,
            garbage: false,
        }
    }
}

#[async_trait]
impl Store for Moody {
    async fn execute(&self, _: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        panic!("a dry run changes nothing");
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        let left = self.outages.load(Ordering::Relaxed);
        if left > 0 {
            self.outages.store(left - 1, Ordering::Relaxed);
            // All but the last get an answer.
            let last = keys.len() - 1;
            let mut answers: Vec<_> = (0..last).map(|_| Ok(None)).collect();
            answers.push(Err(StoreError::unknown("down")));
            return answers;
        }
        if self.refuses {
            return keys
                .iter()
                .map(|_| Err(StoreError::refused("no rights")))
                .collect();
        }
        if self.garbage {
            return keys
                .into_iter()
                .map(|key| Err(StoreError::unreadable(key, "garbage")))
                .collect();
        }
        self.inner.read(keys).await
    }

    async fn describe(&self, _: &Scope, _: Option<&str>, _: &str) -> Result<String, StoreError> {
        panic!("a dry run changes nothing");
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        self.inner.descriptor(scope).await
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        self.inner.check().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_look_without_an_answer_is_repeated_and_no_message_is_lost() {
    let store = Moody {
        outages: AtomicU32::new(LOOK_TRIES - 1),
        ..Moody::new()
    };
    let report = report(
        DryRun::new("billing", key(), store),
        (0..100).map(order).collect(),
    )
    .await;
    assert_eq!(
        (
            report.messages,
            report.would_run_again,
            report.distinct_keys
        ),
        (100, 100, 100)
    );
}

#[tokio::test(start_paused = true)]
async fn a_store_that_stays_away_or_refuses_ends_the_proof() {
    let gone = Moody {
        outages: AtomicU32::new(u32::MAX),
        ..Moody::new()
    };
    let refusing = Moody {
        refuses: true,
        ..Moody::new()
    };
    for (store, class) in [(gone, "unknown"), (refusing, "refused")] {
        let mut examination = DryRun::new("billing", key(), store).open().await.unwrap();
        examination
            .add((0..100).map(order).collect())
            .await
            .unwrap();
        match examination.finish().await {
            Err(DryRunError::Store(error)) => assert_eq!(error.class(), class),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn what_is_no_record_is_neither_new_nor_completed() {
    let store = Moody {
        garbage: true,
        ..Moody::new()
    };
    let report = report(DryRun::new("billing", key(), store), vec![order(1)]).await;
    assert_eq!(
        (report.unreadable, report.would_run_again, report.completed),
        (1, 0, 0)
    );
    assert!(!report.changes_nothing());
    assert_eq!(report.examples.unreadable[0].why, "garbage");
}
