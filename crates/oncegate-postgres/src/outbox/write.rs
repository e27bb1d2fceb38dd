//! Writes messages in the transactions of users.

use oncegate_outbox::OutboxMessage;
use oncegate_runtime::failure::BoxError;
use tokio_postgres::GenericClient;
use tokio_postgres::types::{ToSql, Type};

use crate::PostgresTransaction;

/// Writes a message. An identity column needs no right on its sequence.
pub(super) const INSERT: &str = "\
INSERT INTO oncegate_outbox (outbox, id, topic, key, payload, header_names, header_values) \
VALUES ($1, $2, $3, $4, $5, $6, $7)";

/// A message to be inserted.
#[derive(Clone, Copy, Debug)]
pub struct OutboxRow<'m> {
    pub(super) outbox: &'m str,
    pub(super) message: &'m OutboxMessage,
}

impl OutboxRow<'_> {
    pub(super) fn header_names(&self) -> Vec<&str> {
        self.message
            .own_headers()
            .iter()
            .map(|header| &*header.name)
            .collect()
    }

    pub(super) fn header_values(&self) -> Vec<Option<&[u8]>> {
        self.message
            .own_headers()
            .iter()
            .map(|header| header.value.as_deref())
            .collect()
    }
}

/// A transaction that messages can be written in. Implemented for the transactions of
/// tokio-postgres and deadpool-postgres, for [`PostgresTransaction`], and for sqlx's transactions
/// and connections on PostgreSQL.
pub trait OutboxTransaction: Send {
    /// Inserts the row.
    ///
    /// # Errors
    /// The client's own error.
    fn insert(&mut self, row: &OutboxRow<'_>) -> impl Future<Output = Result<(), BoxError>> + Send;
}

impl OutboxTransaction for tokio_postgres::Transaction<'_> {
    async fn insert(&mut self, row: &OutboxRow<'_>) -> Result<(), BoxError> {
        insert(self, row).await
    }
}

impl OutboxTransaction for deadpool_postgres::Transaction<'_> {
    async fn insert(&mut self, row: &OutboxRow<'_>) -> Result<(), BoxError> {
        let transaction: &tokio_postgres::Transaction<'_> = self;
        insert(transaction, row).await
    }
}

impl OutboxTransaction for PostgresTransaction {
    async fn insert(&mut self, row: &OutboxRow<'_>) -> Result<(), BoxError> {
        let client: &tokio_postgres::Client = self;
        insert(client, row).await
    }
}

/// The statement is not prepared: that would cost a round trip, and does not work behind every
/// pooler.
async fn insert(client: &(impl GenericClient + Sync), row: &OutboxRow<'_>) -> Result<(), BoxError> {
    let OutboxRow { outbox, message } = row;
    let id = message.message_id();
    let topic = message.topic();
    let key = message.key_bytes().map(|key| &**key);
    let payload = message.payload().map(|payload| &**payload);
    let names = row.header_names();
    let values = row.header_values();
    let parameters: [(&(dyn ToSql + Sync), Type); 7] = [
        (outbox, Type::TEXT),
        (&id, Type::TEXT),
        (&topic, Type::TEXT),
        (&key, Type::BYTEA),
        (&payload, Type::BYTEA),
        (&names, Type::TEXT_ARRAY),
        (&values, Type::BYTEA_ARRAY),
    ];
    client.execute_typed(INSERT, &parameters).await?;
    Ok(())
}
