//! Removes the records of a scope that only tests have used.

use deadpool_postgres::Object;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::store::StoreError;

use super::{PostgresStore, errors};

impl PostgresStore {
    /// Removes these records, whatever their states, and the descriptor of their scope.
    ///
    /// For a scope that a test had for itself: a message whose record is removed runs again when it
    /// is delivered again.
    ///
    /// # Errors
    /// When the server cannot be reached, or refuses. The records may be removed then; it can be
    /// repeated.
    pub async fn remove(&self, scope: &Scope, keys: &[StoreKey]) -> Result<(), StoreError> {
        let scope = scope.as_str().to_owned();
        let keys = keys.to_vec();
        self.inner
            .link
            .run(move |client| async move {
                let removed = remove(&client, &scope, &keys)
                    .await
                    .map_err(|error| errors::in_doubt(&error));
                (client, removed)
            })
            .await
    }
}

async fn remove(
    client: &Object,
    scope: &str,
    keys: &[StoreKey],
) -> Result<(), tokio_postgres::Error> {
    let keys: Vec<&str> = keys.iter().map(StoreKey::as_str).collect();
    client
        .execute("DELETE FROM oncegate_records WHERE key = ANY($1)", &[&keys])
        .await?;
    client
        .execute(
            "DELETE FROM oncegate_descriptors WHERE scope = $1",
            &[&scope],
        )
        .await
        .map(drop)
}
