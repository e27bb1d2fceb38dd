//! An open transaction on a connection of a pool.

use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use deadpool_postgres::{ClientWrapper, Object};
use oncegate_core::store::StoreError;
use oncegate_runtime::transactional::Begun;
use tokio::time::error::Elapsed;

use crate::errors::Trouble;

/// An open transaction, for a [`TransactionalHandler`](oncegate_runtime::TransactionalHandler).
///
/// It is used like a client of tokio-postgres, which it dereferences to: `execute`, `query`,
/// `prepare_cached`, `copy_in` and so on. Functions that work with clients and transactions take it
/// as `impl GenericClient`. The runtime commits it: a handler that executes `COMMIT` or `ROLLBACK`
/// itself has failed.
#[must_use = "it is rolled back when it is dropped"]
pub struct PostgresTransaction {
    /// `None` once it has ended. A connection goes back to its pool only after that is known: the
    /// next transaction on it would commit what is left of this one.
    client: Option<Object>,
}

impl PostgresTransaction {
    /// The transaction that is begun on this connection.
    pub(super) fn on(client: Object) -> Self {
        Self {
            client: Some(client),
        }
    }

    /// Returns the transaction that has begun; without a hold, nothing stays open.
    pub(super) async fn begun<H>(
        self,
        begun: Result<Result<Option<H>, Trouble>, Elapsed>,
    ) -> Result<Begun<Self, H>, Trouble> {
        match begun {
            Ok(Ok(Some(hold))) => Ok(Begun::Open(self, hold)),
            Ok(Ok(None)) => {
                self.roll_back().await;
                Ok(Begun::RecordExists)
            }
            Ok(Err(trouble)) if trouble.row_held => {
                self.roll_back().await;
                Ok(Begun::Held)
            }
            // The server goes on after these, so the connection can be used again.
            Ok(Err(trouble)) if trouble.crossed => {
                self.roll_back().await;
                Err(trouble)
            }
            Ok(Err(trouble)) => Err(trouble),
            Err(_) => Err(StoreError::unavailable("the server did not answer in time").into()),
        }
    }

    /// Rolls back, and returns the connection to its pool; closes it if that fails.
    pub(super) async fn roll_back(self) {
        let rolled_back =
            tokio::time::timeout(ROLLBACK_LIMIT, self.batch_execute("ROLLBACK")).await;
        if matches!(rolled_back, Ok(Ok(()))) {
            self.release();
        }
    }

    /// Returns the connection to its pool. The transaction has ended.
    pub(super) fn release(mut self) {
        drop(self.client.take());
    }
}

/// The time limit of a rollback; after that, its connection is closed instead.
pub(super) const ROLLBACK_LIMIT: Duration = Duration::from_secs(1);

impl Deref for PostgresTransaction {
    type Target = ClientWrapper;

    fn deref(&self) -> &ClientWrapper {
        self.client
            .as_ref()
            .expect("the connection is taken only when the transaction ends")
    }
}

impl fmt::Debug for PostgresTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresTransaction")
            .finish_non_exhaustive()
    }
}

impl Drop for PostgresTransaction {
    /// Closes the connection, so that the server rolls back.
    fn drop(&mut self) {
        if let Some(client) = self.client.take() {
            drop(Object::take(client));
        }
    }
}
