//! Records in a table of Amazon DynamoDB: one item a key, two writes a message, no server to run.
//!
//! - `clock`: the store's time, from the service's answers; why no machine's clock decides
//! - `execute`: the rules on an item, by conditional writes; `item`: a record as an item
//! - `api`: the requests, with their time limits, repeats and lanes; `errors`: what errors mean
//! - `builder`, `settings`: how a table is reached; `checkup`: whether it can keep the promise
//! - `table`: makes the table; its templates and the policy of a consumer
//!
//! # Not obvious
//!
//! Facts about DynamoDB that this code depends on:
//!
//! - A condition and its write are one atomic step on one item. A refused condition costs a write
//!   unit, and brings the item (`ReturnValuesOnConditionCheckFailure`).
//! - A lost answer is no failed write: each write has a random revision, and a repeat that is
//!   refused by its own revision was executed before.
//! - Time to live deletes within days. The expiry in the item is compared, and an item that has
//!   expired counts as absent. The descriptor of a scope has no time to live.
//! - Reads are strongly consistent. An eventually consistent one would show a claim that has ended.
//! - A condition of a global table with eventual consistency is evaluated on one replica, and the
//!   last writer wins among them: `checkup` refuses such a table without a home region.
//! - `BETWEEN` with its bounds exchanged is an error, not false; so are two equal keys in one
//!   `BatchGetItem`.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::join_all;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::rules::Reply;
use oncegate_core::store::{Checkup, Command, RecordSnapshot, Store, StoreError};

use self::api::{Api, Lane};
use self::execute::Claims;
use self::item::{Found, ID, decode};

mod api;
mod builder;
mod checkup;
mod clock;
mod describe;
mod errors;
mod execute;
mod item;
mod settings;
mod table;
#[cfg(feature = "testing")]
mod testing;

pub use self::builder::DynamoDbBuilder;
pub use self::settings::DynamoDbSettings;
pub use self::table::TableChange;

/// A store in one table of DynamoDB, which all scopes share.
///
/// Cheap to clone: clones share the connections. A confirmed write is in two of the region's three
/// data centres.
///
/// ```no_run
/// # async fn example() -> Result<(), oncegate_core::store::StoreError> {
/// use oncegate_dynamodb::DynamoDbStore;
///
/// let store = DynamoDbStore::connect("dynamodb://oncegate?region=eu-central-1").await?;
/// # drop(store);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DynamoDbStore {
    inner: Arc<Inner>,
}

struct Inner {
    api: Api,
    claims: Claims,
    settings: DynamoDbSettings,
    /// The address of another server than the region's.
    endpoint: Option<String>,
    region: Option<String>,
}

impl DynamoDbStore {
    /// Connects to the table of a URL, `dynamodb://TABLE?region=REGION&endpoint=URL`, with the
    /// default settings. Both parameters may be left out.
    ///
    /// Credentials, and what the URL leaves out, come from the AWS SDK's default chain: variables
    /// of the environment, profiles, roles.
    ///
    /// # Errors
    /// See [`DynamoDbBuilder::connect`].
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// Settings for the table of a URL, all at their defaults.
    pub fn builder(url: &str) -> DynamoDbBuilder {
        DynamoDbBuilder::new(url)
    }

    /// Checks that this is the URL of a table, without connecting to it.
    ///
    /// # Errors
    /// [`StoreError::Refused`] with what is wrong, and the form that is expected.
    pub fn check_url(url: &str) -> Result<(), StoreError> {
        settings::Address::parse(url).map(drop)
    }

    /// The name of the table.
    pub fn table(&self) -> &str {
        &self.inner.api.table
    }

    fn at_table(&self, error: StoreError) -> StoreError {
        error.at(format_args!("DynamoDB table {}", self.table()))
    }

    async fn run(
        &self,
        key: &StoreKey,
        operation: &oncegate_core::rules::Operation,
    ) -> Result<Reply, StoreError> {
        let Inner { api, claims, .. } = &*self.inner;
        execute::execute(api, claims, key, operation)
            .await
            .map_err(|error| self.at_table(error))
    }

    /// Reads the records of these keys.
    async fn found(
        &self,
        keys: &[StoreKey],
    ) -> Result<HashMap<String, Result<Found, String>>, StoreError> {
        let mut ids: Vec<String> = keys.iter().map(|key| key.as_str().to_owned()).collect();
        ids.sort_unstable();
        ids.dedup();
        let items = match ids.as_slice() {
            [] => Vec::new(),
            [only] => {
                let api = &self.inner.api;
                let item = api.get(only, Lane::Call, api.deadline()).await?;
                item.into_iter().collect()
            }
            _ => self.inner.api.get_all(ids).await?,
        };
        let mut found = HashMap::with_capacity(items.len());
        for item in items {
            if let Some(id) = item.get(ID).and_then(|id| id.as_s().ok()) {
                found.insert(id.clone(), decode(&item));
            }
        }
        Ok(found)
    }
}

impl fmt::Debug for DynamoDbStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynamoDbStore")
            .field("table", &self.table())
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for DynamoDbStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let calls = commands
            .iter()
            .map(|Command { key, operation }| self.run(key, operation));
        join_all(calls).await
    }

    async fn execute_one(&self, command: Command) -> Result<Reply, StoreError> {
        self.run(&command.key, &command.operation).await
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        let found = match self.found(&keys).await {
            Ok(found) => found,
            Err(error) => {
                let error = self.at_table(error);
                return keys.iter().map(|_| Err(error.clone())).collect();
            }
        };
        let now = self.inner.api.clock.now();
        keys.iter()
            .map(|key| {
                let Some(record) = found.get(key.as_str()) else {
                    return Ok(None);
                };
                let found = record
                    .as_ref()
                    .map_err(|reason| StoreError::unreadable(key.clone(), reason))?;
                let now = now
                    .ok_or_else(|| StoreError::unavailable("DynamoDB has not told its time yet"))?;
                // A record that may still be kept is shown.
                Ok(found.record.kept(now.earliest).then(|| RecordSnapshot {
                    now: now.latest,
                    record: found.record.clone(),
                }))
            })
            .collect()
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        describe::describe(&self.inner.api, scope, expected, proposed)
            .await
            .map_err(|error| self.at_table(error))
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        describe::descriptor(&self.inner.api, scope)
            .await
            .map_err(|error| self.at_table(error))
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        checkup::check(&self.inner)
            .await
            .map_err(|error| self.at_table(error))
    }
}
