//! Completes a record inside the user's transaction on the same file.

use rusqlite::{Connection, Transaction};

use oncegate_runtime::failure::BoxError;
use oncegate_runtime::transaction::{BlockingSqlTransaction, Completing};

use crate::errors::{self, Trouble};
use crate::{SqliteStore, file, row};

/// The level of `PRAGMA synchronous` at which a commit survives a power cut.
const FULL: i64 = 2;

impl BlockingSqlTransaction<SqliteStore> for Transaction<'_> {
    fn complete_and_commit(self, completing: &Completing) -> Result<(), BoxError> {
        check(&self)?;
        complete(&self, completing)?;
        self.commit()
            .map_err(|error| errors::not_committed(&error).into())
    }
}

/// Refuses a connection whose commits are not durable enough for an ack.
fn check(connection: &Connection) -> Result<(), BoxError> {
    if !file::is_ours(connection).map_err(|error| errors::not_executed(&error))? {
        return Err(
            "the transaction is not on a file of oncegate's records: use SqliteStore::open_connection(), \
                    and keep the tables of the effects in that file"
                .into(),
        );
    }
    let synchronous: i64 = connection
        .pragma_query_value(None, "synchronous", |row| row.get(0))
        .map_err(|error| errors::not_executed(&error))?;
    if synchronous < FULL {
        return Err("a power cut could take back the commit after its message was acknowledged: set PRAGMA \
                    synchronous = FULL on the connection, or use SqliteStore::open_connection()"
            .into());
    }
    Ok(())
}

pub(super) fn complete(connection: &Connection, completing: &Completing) -> Result<(), BoxError> {
    let now = row::now(connection, true).map_err(|error| boxed(error.into()))?;
    let before = row::read(connection, completing.key()).map_err(boxed)?;
    let after = completing.apply(now, before)?;
    row::write(connection, completing.key(), &after).map_err(|error| boxed(error.into()))
}

fn boxed(trouble: Trouble) -> BoxError {
    oncegate_core::store::StoreError::from(trouble).into()
}
