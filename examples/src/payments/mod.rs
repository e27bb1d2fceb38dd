//! Messages about payments, the bank, the ledger of requests to it, and the proof.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use oncegate::BoxError;
use oncegate::core::store::Store;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;

mod bank;
mod ledger;
mod proof;

pub use bank::Bank;
pub use ledger::{Entry, Ledger};
pub use proof::Proof;

/// The lease of the workers: the payments of the killed one wait for so long. A worker that stands
/// still for longer loses its payments, too; by default it is 30 s.
pub const LEASE: Duration = Duration::from_secs(10);

/// The messages, and the expected result, which no worker has.
#[derive(Debug)]
pub struct Payments {
    /// The payloads, in the order in which they are sent.
    pub payloads: Vec<String>,
    /// The orders that are paid for.
    pub orders: BTreeSet<String>,
}

impl Payments {
    /// So many messages, about a third of them again: with another message id and time, another
    /// order of the fields, and `10` spelt `10.0`. The same seed makes the same ones.
    pub fn new(messages: u32, seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut orders: Vec<(String, u32)> = Vec::new();
        let mut payloads = Vec::new();
        for n in 0..messages {
            let again = if rng.u32(..3) == 0 {
                rng.choice(&orders)
            } else {
                None
            };
            payloads.push(if let Some((order, amount)) = again {
                format!(
                    r#"{{"sent_at":{n},"amount":{amount}.0,"message_id":"m-{n}","order_id":"{order}"}}"#
                )
            } else {
                let order = format!("order-{}", orders.len());
                let amount = rng.u32(1..1_000);
                orders.push((order.clone(), amount));
                format!(
                    r#"{{"message_id":"m-{n}","order_id":"{order}","amount":{amount},"sent_at":{n}}}"#
                )
            });
        }
        Self {
            payloads,
            orders: orders.into_iter().map(|(order, _)| order).collect(),
        }
    }

    /// The number of messages.
    pub fn messages(&self) -> u64 {
        self.payloads.len() as u64
    }

    /// The number of payments that they are about.
    pub fn distinct(&self) -> u64 {
        self.orders.len() as u64
    }
}

/// The place of a program's records: this Redis, or else an SQLite file in `folder`.
pub fn store_place(redis: Option<&str>, folder: &Path) -> String {
    redis.map_or_else(
        || folder.join("records.sqlite").display().to_string(),
        str::to_owned,
    )
}

/// The place of a program's bank: a folder in `folder`, which all of its workers share.
pub fn bank_place(folder: &Path) -> PathBuf {
    folder.join("bank")
}

/// The store at `place`: `redis://host:port`, or the path of an SQLite file.
///
/// # Errors
/// When it cannot be opened.
pub async fn open_store(place: &str) -> Result<Arc<dyn Store>, BoxError> {
    if place.starts_with("redis://") {
        Ok(Arc::new(RedisStore::connect(place).await?))
    } else {
        Ok(Arc::new(SqliteStore::open(place).await?))
    }
}
