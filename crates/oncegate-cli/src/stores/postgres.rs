//! Stores in PostgreSQL.

use std::sync::Arc;

use async_trait::async_trait;
use oncegate::core::key::{Scope, StoreKey};
use oncegate::core::store::StoreError;
use oncegate::journal::JournalEntry;
use oncegate::outbox::OutboxStore;
use oncegate::postgres::{PostgresSettings, PostgresStore};
use schemars::{Schema, schema_for};

use super::{Extras, Opened, Opening, Purpose, Statements, StoreKind, TableChange};
use crate::config::shape::WithTls;
use crate::exit::Problem;

pub(super) struct Postgres;

#[async_trait]
impl StoreKind for Postgres {
    fn name(&self) -> &'static str {
        "PostgreSQL"
    }

    fn forms(&self) -> &'static str {
        "postgres://host:port/database"
    }

    fn has_scheme(&self, scheme: &str) -> bool {
        matches!(scheme, "postgres" | "postgresql")
    }

    fn schema(&self) -> Schema {
        schema_for!(WithTls<PostgresSettings>)
    }

    fn has_outboxes(&self) -> bool {
        true
    }

    fn statements(&self, _: &str, asked: &Statements<'_>) -> Result<Option<String>, String> {
        let journal = asked.journal.then(PostgresStore::journal_sql);
        let grants = asked.role.map(PostgresStore::grant_sql);
        let parts = [Some(PostgresStore::schema_sql()), journal, grants];
        Ok(Some(
            parts.into_iter().flatten().collect::<Vec<_>>().join("\n"),
        ))
    }

    async fn open(&self, opening: Opening<'_>) -> Result<Opened, Problem> {
        let settings = PostgresSettings {
            tls: opening.settings.tls.clone(),
            password_file: opening.password_file,
            ..opening.settings.postgres.clone()
        };
        let mut builder = PostgresStore::builder(opening.location).settings(settings);
        // Commands do not purge: that is left to the consumers.
        if opening.purpose != Purpose::Consume {
            builder = builder.without_purge();
        }
        let store = builder.start_patience(opening.patience).connect().await?;
        Ok(Opened::new(store))
    }
}

#[async_trait]
impl Extras for PostgresStore {
    async fn history(&self, key: &StoreKey, most: u32) -> Result<Vec<JournalEntry>, StoreError> {
        self.journal(key, most).await
    }

    async fn outbox(&self, name: &str) -> Result<Arc<dyn OutboxStore>, Problem> {
        Ok(Arc::new(Self::outbox(self, name)?))
    }

    async fn table_change(&self) -> Result<Option<TableChange>, StoreError> {
        let change = self.schema_change().await?;
        Ok(Some(TableChange {
            from: change.from,
            to: change.to,
            text: change.sql,
        }))
    }

    async fn make_tables(&self) -> Result<(), StoreError> {
        self.create_schema().await
    }

    async fn remove(&self, scope: &Scope, keys: &[StoreKey]) -> Result<(), StoreError> {
        self.remove(scope, keys).await
    }
}
