//! Messages of an outbox in transactions of sqlx.

use oncegate_runtime::failure::BoxError;
use sqlx::Transaction;
use sqlx::postgres::{PgConnection, Postgres};

use super::write::{INSERT, OutboxRow, OutboxTransaction};

impl OutboxTransaction for Transaction<'_, Postgres> {
    async fn insert(&mut self, row: &OutboxRow<'_>) -> Result<(), BoxError> {
        insert(self, row).await
    }
}

impl OutboxTransaction for PgConnection {
    async fn insert(&mut self, row: &OutboxRow<'_>) -> Result<(), BoxError> {
        insert(self, row).await
    }
}

async fn insert(connection: &mut PgConnection, row: &OutboxRow<'_>) -> Result<(), BoxError> {
    let message = row.message;
    let insert = sqlx::query(INSERT)
        .bind(row.outbox)
        .bind(message.message_id())
        .bind(message.topic())
        .bind(message.key_bytes().map(|key| &**key))
        .bind(message.payload().map(|payload| &**payload))
        .bind(row.header_names())
        .bind(row.header_values());
    insert.execute(connection).await?;
    Ok(())
}
