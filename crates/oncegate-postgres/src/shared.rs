//! The pool of a store, and what all of its connections share: limits, settings of sessions, and
//! the check that a commit has waited for standbys.

use std::time::Duration;

use deadpool_postgres::{Object, Pool, PoolError};
use futures_util::future::{join, join3};
use oncegate_core::store::StoreError;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, Statement};

use super::errors::{self, Trouble};
use super::notices::Notices;
use super::reconnect::Reconnect;
use super::row;
use super::session::{Sessions, settings};

/// The state that the tasks on the thread share.
pub(super) struct Shared {
    pub(super) pool: Pool,
    /// Time limit for one round trip.
    pub(super) response_timeout: Duration,
    /// The statement that begins a transaction with our limits.
    pub(super) begin: String,
    sessions: Sessions,
    /// The server's notices on the connections; `None` if they are not opened here.
    notices: Option<Notices>,
    reconnect: Reconnect,
}

impl Shared {
    pub(super) fn new(
        pool: Pool,
        notices: Option<Notices>,
        response_timeout: Duration,
        sessions: Sessions,
    ) -> Self {
        let mut begin = format!("BEGIN ISOLATION LEVEL READ COMMITTED, {}", row::MARK);
        if sessions == Sessions::Unconfigured {
            for (name, value) in settings(response_timeout) {
                begin += &format!("; SET LOCAL {name} = {value}");
            }
        }
        Self {
            pool,
            response_timeout,
            begin,
            sessions,
            notices,
            reconnect: Reconnect::default(),
        }
    }

    /// Runs work that ends with a commit, and checks that the commit has waited for the standbys.
    ///
    /// If the server confirmed the commit without waiting for its standbys, the outcome is unknown.
    /// On a connection that was not opened here, notices cannot be read; there a second transaction
    /// waits for the standbys.
    pub(super) async fn committed<T>(
        &self,
        client: &Object,
        work: impl Future<Output = Result<T, Trouble>>,
    ) -> Result<T, Trouble> {
        let Some(notices) = &self.notices else {
            // In this order on the wire.
            let (done, confirmed) = join(work, client.batch_execute(row::CONFIRM)).await;
            let done = done?;
            confirmed.map_err(|error| errors::unconfirmed(&error))?;
            return Ok(done);
        };
        let before = notices.cut_waits();
        let done = work.await?;
        // The notice may concern another connection's commit, but it is so rare that it may count
        // for this one.
        if notices.cut_waits() == before {
            return Ok(done);
        }
        Err(StoreError::unknown(
            "the server stopped waiting for its synchronous standbys before they had the commit",
        )
        .into())
    }

    /// Waits until the synchronous standbys have everything that is visible now.
    pub(super) async fn confirm(&self, client: &Object) -> Result<(), Trouble> {
        let confirm = client.batch_execute(row::CONFIRM);
        let confirm = async { confirm.await.map_err(|error| errors::not_executed(&error)) };
        let confirmed = within(self.response_timeout, self.committed(client, confirm)).await;
        // It changes nothing, so no outcome can be unknown.
        confirmed.map_err(|_| {
            StoreError::unavailable("the synchronous standbys did not confirm in time").into()
        })
    }

    /// Runs one statement in a separate transaction, in one round trip. `lost` is the error when
    /// the answer to its commit is lost.
    pub(super) async fn alone(
        &self,
        client: &Object,
        statement: &Statement,
        parameters: &[&(dyn ToSql + Sync)],
        lost: fn(&tokio_postgres::Error) -> Trouble,
    ) -> Result<Vec<Row>, Trouble> {
        let query = client.query(statement, parameters);
        if self.sessions == Sessions::Ours {
            return query.await.map_err(|error| {
                if errors::is_rolled_back(&error) {
                    errors::not_executed(&error)
                } else {
                    lost(&error)
                }
            });
        }
        // In this order on the wire.
        let sent = join3(
            client.batch_execute(&self.begin),
            query,
            client.batch_execute("COMMIT"),
        );
        let (begun, rows, committed) = sent.await;
        match (begun, rows, committed) {
            (Ok(()), Ok(rows), Ok(())) => Ok(rows),
            // Outside of a transaction the statement has committed by itself.
            (Err(_), Ok(_), _) => {
                Err(StoreError::unknown("the transaction of a statement did not begin").into())
            }
            // The server has answered, and has turned the commit into a rollback.
            (Err(error), Err(_), Ok(())) | (Ok(()), Err(error), Ok(())) => {
                Err(errors::not_executed(&error))
            }
            (_, _, Err(error)) => Err(lost(&error)),
        }
    }

    /// Returns a connection. While the server is away, most callers get the error at once.
    pub(super) async fn client(&self) -> Result<Object, StoreError> {
        // An open connection is used at once.
        if self.pool.status().available == 0 {
            self.reconnect.turn()?;
        }
        let got = tokio::time::timeout(self.response_timeout, self.pool.get()).await;
        let got = got.map_err(|_| StoreError::unavailable("no connection in time"))?;
        match got {
            Ok(client) => {
                self.reconnect.succeeded();
                Ok(client)
            }
            Err(error) => {
                let says = errors::no_connection(&error);
                if matches!(error, PoolError::Backend(_)) {
                    self.reconnect.failed(&says);
                }
                Err(says)
            }
        }
    }

    /// Returns the connection to the pool, or closes it after an error, which ends its transaction.
    pub(super) fn settle<T>(
        &self,
        client: Object,
        outcome: Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        if outcome.is_err() {
            drop(Object::take(client));
        }
        outcome
    }
}

/// Runs `work` for up to `limit`. After that, a transaction that it began ends with its connection.
pub(super) async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Trouble>>,
) -> Result<T, Trouble> {
    let silence = StoreError::unavailable("the server did not answer in time");
    tokio::time::timeout(limit, work)
        .await
        .unwrap_or_else(|_| Err(silence.into()))
}
