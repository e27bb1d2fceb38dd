//! A consumer with a result store that fails as its test wants.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use oncegate::core::key::Scope;
use oncegate::results::{ResultStore, ResultStoreError, Sweep, Swept};
use oncegate::{Attempt, BoxError, Failure, Gate, Handler, Message};

use crate::bench::Bench;

/// Results in memory, with faults.
#[derive(Debug, Default)]
pub(super) struct Flaky {
    pub(super) objects: Mutex<BTreeMap<String, Bytes>>,
    /// How many calls about results succeed from now on before some fail.
    pub(super) spares: AtomicU32,
    /// How many calls about results fail after those.
    pub(super) fails: AtomicU32,
    /// How many calls by which a gate tries the store fail.
    pub(super) fails_at_opening: AtomicU32,
    /// Whether failing means to give no answer at all.
    pub(super) hangs: bool,
    /// Makes calls about results fail, hang, or lose their answers now and then.
    pub(super) chaos: Mutex<Option<fastrand::Rng>>,
}

impl Flaky {
    pub(super) async fn fault(&self, name: &str) -> Result<(), ResultStoreError> {
        let opening = name.ends_with("/opened");
        let takes_one = |left: &AtomicU32| {
            left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1))
                .is_ok()
        };
        let fails = if opening {
            &self.fails_at_opening
        } else {
            &self.fails
        };
        if (!opening && takes_one(&self.spares)) || !takes_one(fails) {
            return Ok(());
        }
        if self.hangs {
            std::future::pending::<()>().await;
        }
        Err(ResultStoreError::new("the test says so"))
    }

    /// What goes wrong with a call by chance: before it, or after it.
    pub(super) async fn chance(&self, name: &str) -> Result<(), ResultStoreError> {
        if name.ends_with("/opened") {
            return Ok(());
        }
        let dice = self
            .chaos
            .lock()
            .unwrap()
            .as_mut()
            .map_or(u8::MAX, |rng| rng.u8(..));
        match dice {
            0..24 => std::future::pending().await,
            24..80 => Err(ResultStoreError::new("by chance")),
            80.. => Ok(()),
        }
    }

    /// The results, without what the gate put there to see whether it can.
    pub(super) fn results(&self) -> BTreeMap<String, Bytes> {
        let mut results = self.objects.lock().unwrap().clone();
        results.retain(|name, _| !name.ends_with("/opened"));
        results
    }

    pub(super) fn change(&self, change: impl Fn(&mut Vec<u8>)) {
        let mut objects = self.objects.lock().unwrap();
        for (_, object) in objects
            .iter_mut()
            .filter(|(name, _)| !name.ends_with("/opened"))
        {
            let mut bytes = object.to_vec();
            change(&mut bytes);
            *object = bytes.into();
        }
    }
}

#[async_trait]
impl ResultStore for Flaky {
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), ResultStoreError> {
        self.fault(name).await?;
        self.chance(name).await?;
        self.objects.lock().unwrap().insert(name.to_owned(), bytes);
        self.chance(name).await
    }

    async fn get(&self, name: &str, most_bytes: u64) -> Result<Option<Bytes>, ResultStoreError> {
        self.fault(name).await?;
        self.chance(name).await?;
        let found = self.objects.lock().unwrap().get(name).cloned();
        Ok(found.filter(|found| found.len() as u64 <= most_bytes))
    }

    async fn sweep(&self, _: &Scope, _: Duration, _: Sweep) -> Result<Swept, ResultStoreError> {
        Err(ResultStoreError::new("these results have no age"))
    }
}

/// Returns a result of 1,000 characters, and notes what duplicates get.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) runs: AtomicU32,
    pub(super) duplicates: Mutex<Vec<Result<String, String>>>,
}

impl Handler for Report {
    type Output = String;

    async fn handle(&self, message: &Message, _: &Attempt) -> Result<String, Failure> {
        self.runs.fetch_add(1, SeqCst);
        Ok(String::from_utf8_lossy(message.payload()).repeat(1_000 / message.payload().len() + 1))
    }

    async fn duplicate(&self, _: &Message, result: String) -> Result<(), Failure> {
        self.duplicates.lock().unwrap().push(Ok(result));
        Ok(())
    }

    async fn undecodable_duplicate(&self, _: &Message, stored: Bytes, error: BoxError) {
        assert!(
            matches!(stored.first(), Some(4 | 255)),
            "the hook sees what the record holds"
        );
        self.duplicates.lock().unwrap().push(Err(error.to_string()));
    }
}

/// A handler that its test still sees.
pub(super) struct Shared(pub(super) Arc<Report>);

impl Handler for Shared {
    type Output = String;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        self.0.handle(message, attempt).await
    }

    async fn duplicate(&self, message: &Message, result: String) -> Result<(), Failure> {
        self.0.duplicate(message, result).await
    }

    async fn undecodable_duplicate(&self, message: &Message, stored: Bytes, error: BoxError) {
        self.0.undecodable_duplicate(message, stored, error).await;
    }
}

pub(super) struct Scene {
    pub(super) bench: Bench,
    pub(super) results: Arc<Flaky>,
    pub(super) report: Arc<Report>,
}

impl Scene {
    /// Messages of these ids.
    pub(super) fn of(ids: &[u64], results: Flaky) -> Self {
        let messages = ids.iter().map(|id| ("", format!(r#"{{"id":{id}}}"#)));
        Self {
            bench: Bench::of(messages),
            results: Arc::new(results),
            report: Arc::default(),
        }
    }

    pub(super) fn gate(&self) -> Gate {
        self.bench
            .gate("runtime")
            .max_result_bytes(100)
            .large_results(Arc::clone(&self.results))
    }

    /// Runs until so many more messages are acknowledged; the first `fails` calls of the result
    /// store fail.
    pub(super) async fn run(&self, acks: usize, fails: u32) {
        self.results.fails.store(fails, SeqCst);
        let consumer = self
            .bench
            .consumer_behind(self.gate(), Shared(Arc::clone(&self.report)));
        // Small batches, so that there is something to prefetch.
        let consumer = consumer.in_flight(16, 1 << 20);
        let acked = self.bench.list.acked().len();
        self.bench.run(consumer, acked + acks).await.unwrap();
        self.results.fails.store(0, SeqCst);
    }

    pub(super) fn again(&self, id: u64) {
        self.bench
            .list
            .push("orders", "", format!(r#"{{"id":{id}}}"#));
    }

    pub(super) fn duplicates(&self) -> Vec<Result<String, String>> {
        self.report.duplicates.lock().unwrap().clone()
    }

    pub(super) fn count(&self, name: &str, label: &str) -> u64 {
        self.bench.counters.get(name, label)
    }
}

pub(super) fn expected(id: u64) -> String {
    let payload = format!(r#"{{"id":{id}}}"#);
    payload.repeat(1_000 / payload.len() + 1)
}
