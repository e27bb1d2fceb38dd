//! Hands of tests: they write items without the rules.

use std::time::Duration;

use oncegate_core::key::StoreKey;
use oncegate_core::record::{Record, StoreTime, whole_millis};
use oncegate_core::store::StoreError;

use super::DynamoDbStore;
use super::api::Lane;
use super::errors::Failure;
use super::item::{Item, Revision, decode, encode};

impl DynamoDbStore {
    /// Moves the expiry of the record of `key` earlier by `time`, as if that time had passed. For
    /// tests.
    ///
    /// # Errors
    /// Like any other write.
    pub async fn pass(&self, key: &StoreKey, time: Duration) -> Result<(), StoreError> {
        let api = &self.inner.api;
        let item = api.get(key.as_str(), Lane::Call, api.deadline()).await?;
        let Some(item) = item else { return Ok(()) };
        let found = decode(&item).map_err(|why| StoreError::unreadable(key.clone(), why))?;
        let expires_ms = found.record.expires_at.millis();
        let record = Record {
            expires_at: StoreTime::from_millis(expires_ms.saturating_sub(whole_millis(time))),
            ..found.record
        };
        self.write(encode(key.as_str(), &record, Revision::random()))
            .await
    }

    /// Stores this record under `key`, whatever is there. Its `expires_at` is the time that is
    /// left. For tests.
    ///
    /// # Errors
    /// Like any other write.
    pub async fn plant(&self, key: &StoreKey, record: &Record) -> Result<(), StoreError> {
        let now = self.inner.api.clock.now();
        let now = now.ok_or_else(|| StoreError::unavailable("there is no time yet"))?;
        let left = Duration::from_millis(record.expires_at.millis());
        let record = Record {
            expires_at: now.latest + left,
            ..record.clone()
        };
        self.write(encode(key.as_str(), &record, Revision::random()))
            .await
    }

    async fn write(&self, item: Item) -> Result<(), StoreError> {
        let api = &self.inner.api;
        let put = api.client().put_item().table_name(&api.table);
        let put = put.set_item(Some(item)).send().await;
        put.map(drop)
            .map_err(|error| Failure::of(&error, &api.table).of_read())
    }
}
