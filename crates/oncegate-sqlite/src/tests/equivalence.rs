//! The whole way through the file, columns and clock included, against the rules alone.

use oncegate_core::record::{Record, StoreTime};
use oncegate_core::testing::equivalence::{Plan, Subject, compare};
use oncegate_core::testing::scope;

use super::*;

#[async_trait]
impl Subject for SqliteBench {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store) as Arc<dyn Store>
    }

    fn scope(&self) -> Scope {
        scope("equivalence")
    }

    async fn pass(&self, waits: &[(StoreKey, Duration)]) {
        let waits = waits.to_vec();
        let pass = self.store.inner.writer.ask(move |connection| {
            waits
                .iter()
                .try_for_each(|(key, wait)| row::pass(connection, key, *wait))
        });
        pass.await.unwrap();
    }

    async fn plant(&self, records: &[(StoreKey, Record)]) {
        let records = records.to_vec();
        let plant = self.store.inner.writer.ask(move |connection| {
            let now_ms = row::now(connection, false)?.millis();
            records.iter().try_for_each(|(key, record)| {
                let expires_at = StoreTime::from_millis(now_ms + record.expires_at.millis());
                row::write(
                    connection,
                    key,
                    &Record {
                        expires_at,
                        ..record.clone()
                    },
                )
            })
        });
        plant.await.unwrap();
    }
}

// invariant: store-equals-rules
#[tokio::test]
async fn two_thousand_random_sequences_go_as_the_rules_say() {
    let plan = Plan {
        seed: fastrand::u64(..),
        sequences: 2_000,
        steps: 12,
    };
    let reached = compare(&SqliteBench::new().await, plan).await.unwrap();
    assert!(
        reached.missing().is_empty(),
        "never reached: {:?}",
        reached.missing()
    );
}
