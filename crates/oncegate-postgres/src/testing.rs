//! Operations for the project's own tests.

use std::time::Duration;

use deadpool_postgres::Object;
use oncegate_core::key::StoreKey;
use oncegate_core::record::{Record, StoreTime};
use oncegate_core::store::StoreError;

use super::row::{Columns, LOCK, MARK, WRITE};
use super::{PostgresStore, errors};

impl PostgresStore {
    /// Moves the expiry of each key's record earlier by its own time, as if that time had passed.
    ///
    /// # Errors
    /// Like any other write.
    #[doc(hidden)]
    pub async fn pass(&self, waits: &[(StoreKey, Duration)]) -> Result<(), StoreError> {
        let keys: Vec<String> = waits
            .iter()
            .map(|(key, _)| key.as_str().to_owned())
            .collect();
        let waits_ms: Vec<i64> = waits
            .iter()
            .map(|(_, wait)| i64::try_from(wait.as_millis()).unwrap_or(i64::MAX))
            .collect();
        self.inner.link.run(move |client| async move {
            let update = "UPDATE oncegate_records AS r SET expires_at_ms = expires_at_ms - n.ms \
                          FROM unnest($1::text[], $2::bigint[]) AS n(key, ms) WHERE r.key = n.key";
            let passed = client.execute(update, &[&keys, &waits_ms]).await;
            (
                client,
                passed.map(|_| ()).map_err(|error| errors::in_doubt(&error)),
            )
        }).await
    }

    /// Writes records unchanged; their `expires_at` is the time that they have left.
    ///
    /// # Errors
    /// Like any other write.
    #[doc(hidden)]
    pub async fn plant(&self, records: &[(StoreKey, Record)]) -> Result<(), StoreError> {
        let records = records.to_vec();
        self.inner
            .link
            .run(move |client| async move {
                let planted = plant(&client, &records)
                    .await
                    .map_err(|error| errors::in_doubt(&error));
                (client, planted)
            })
            .await
    }
}

async fn plant(
    client: &Object,
    records: &[(StoreKey, Record)],
) -> Result<(), tokio_postgres::Error> {
    let clock = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint";
    let now_ms: i64 = client.query_one(clock, &[]).await?.get(0);
    let now = StoreTime::from_millis(u64::try_from(now_ms).unwrap_or_default());
    let mut columns = Columns::default();
    for (key, record) in records {
        let left = Duration::from_millis(record.expires_at.millis());
        columns.put(
            key,
            &Record {
                expires_at: now + left,
                ..record.clone()
            },
        );
    }
    let keys: Vec<&str> = records.iter().map(|(key, _)| key.as_str()).collect();
    let lock = client.prepare_cached(LOCK).await?;
    let write = client.prepare_cached(WRITE).await?;
    client.batch_execute(&format!("BEGIN {MARK}")).await?;
    client.query(&lock, &[&keys]).await?;
    client.execute(&write, &columns.parameters()).await?;
    client.batch_execute("COMMIT").await
}
