//! A worker process for the tests that kill it around the moment when a large result is stored.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use oncegate::core::key::Scope;
use oncegate::results::{ObjectResults, ResultStore, ResultStoreError, Sweep, Swept};
use oncegate::sqlite::SqliteStore;
use oncegate::{BoxError, Completion, Entry, Gate, Key, Message, Origin};
use oncegate_testkit::Ledger;

const RESULT_CHARACTERS: usize = 1_000_000;

/// Results that end the process at a point.
#[derive(Debug)]
struct Deadly {
    results: ObjectResults,
    point: String,
}

impl Deadly {
    /// As `kill -9` would: nothing is unwound, flushed or released.
    fn at(&self, point: &str) {
        if self.point == point {
            std::process::abort();
        }
    }
}

#[async_trait]
impl ResultStore for Deadly {
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), ResultStoreError> {
        if name.ends_with("/opened") {
            return self.results.put(name, bytes).await;
        }
        self.at("before-put");
        self.results.put(name, bytes).await?;
        self.at("after-put");
        Ok(())
    }

    async fn get(&self, name: &str, most_bytes: u64) -> Result<Option<Bytes>, ResultStoreError> {
        self.results.get(name, most_bytes).await
    }

    async fn sweep(
        &self,
        scope: &Scope,
        older_than: Duration,
        sweep: Sweep,
    ) -> Result<Swept, ResultStoreError> {
        self.results.sweep(scope, older_than, sweep).await
    }
}

/// Arguments: a folder for everything, the scope, the point at which the process ends.
#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [place, scope, point] = arguments.as_slice() else {
        return Err("result_worker FOLDER SCOPE POINT".into());
    };
    let place = Path::new(place);
    let store = SqliteStore::builder(place.join("records.db"))
        .open()
        .await?;
    let results = Deadly {
        results: ObjectResults::folder(place.join("results"))?,
        point: point.clone(),
    };
    let ledger = Ledger::open(place.join("ledger"));
    let gate = Gate::new(scope, Key::json(["id"]), store).large_results(results);
    let message = Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(r#"{"id":1}"#.into()),
    );
    loop {
        match gate.enter(&message).await? {
            Entry::Granted(lease) => {
                ledger.append("charged");
                let result = format!("{} ", std::process::id()).repeat(RESULT_CHARACTERS);
                let result = result.get(..RESULT_CHARACTERS).unwrap_or_default();
                if lease.complete(result).await? == Completion::Applied {
                    if point == "after-complete" {
                        std::process::abort();
                    }
                    return Ok(());
                }
            }
            Entry::Completed(stored) => return stored.decode::<String>().map(drop),
            Entry::Busy { retry_in } => tokio::time::sleep(retry_in).await,
            other => return Err(format!("{other:?}").into()),
        }
    }
}
