//! Checks that a transaction is open before its commit, and that its standbys have it after the
//! commit.

use oncegate_core::record::State;
use oncegate_core::store::{Store as _, StoreError};
use oncegate_runtime::transaction::Completing;
use oncegate_runtime::transactional::CommitError;

use crate::PostgresStore;

/// A statement that fails unless the transaction of this number is open and has not failed. `waits`
/// is whether the commit waits for standbys.
pub(super) const GUARD: &str = "\
SELECT 1 / CASE WHEN pg_current_xact_id_if_assigned()::text = $1 THEN 1 ELSE 0 END AS open, \
current_setting('synchronous_standby_names') <> '' \
AND current_setting('synchronous_commit') NOT IN ('off', 'local') AS waits";

/// The servers that a commit waits for.
///
/// A session may take over other settings between [`GUARD`] and the commit. Then a commit that is
/// the first to wait counts as one that does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waits {
    ForStandbys,
    ForNothing,
}

impl Waits {
    /// By the column of [`GUARD`].
    pub(super) fn of(for_standbys: bool) -> Self {
        if for_standbys {
            Self::ForStandbys
        } else {
            Self::ForNothing
        }
    }
}

/// Reads back the record of a transaction that the server has reported as committed, perhaps
/// without waiting for its standbys. The store answers once they have it.
///
/// Such a wait can be interrupted again, and only the store's own connections show that. So it is
/// not enough to send another commit on the connection of the transaction.
pub(super) async fn read_back(
    store: &PostgresStore,
    written: &Completing,
) -> Result<(), CommitError> {
    let reading = store.read(vec![written.key().clone()]);
    let read = tokio::time::timeout(written.limit(), reading).await;
    let read = read.ok().and_then(|answers| answers.into_iter().next());
    let snapshot = read
        .unwrap_or_else(|| {
            Err(StoreError::unknown(
                "the server did not confirm the commit in time",
            ))
        })
        .map_err(CommitError::Unknown)?;
    match snapshot.map(|snapshot| snapshot.record.state) {
        Some(State::Completed { by, .. }) if by == written.token().tag() => Ok(()),
        _ => Err(CommitError::Unknown(StoreError::unknown(
            "the record of the commit was not found",
        ))),
    }
}
