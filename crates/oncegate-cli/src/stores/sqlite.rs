//! Stores in an SQLite file.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use oncegate::core::key::{Scope, StoreKey};
use oncegate::core::store::StoreError;
use oncegate::journal::JournalEntry;
use oncegate::outbox::OutboxStore;
use oncegate::sqlite::{SqliteSettings, SqliteStore};
use schemars::{Schema, schema_for};

use super::{Extras, Opened, Opening, Purpose, StoreKind};
use crate::exit::Problem;

pub(super) struct Sqlite;

#[async_trait]
impl StoreKind for Sqlite {
    fn name(&self) -> &'static str {
        "SQLite"
    }

    fn forms(&self) -> &'static str {
        "sqlite:path or the plain path of an SQLite file"
    }

    fn has_scheme(&self, scheme: &str) -> bool {
        scheme == "sqlite"
    }

    fn location(&self, url: &str) -> Result<String, String> {
        let path = url.strip_prefix("sqlite:").unwrap_or(url);
        let path = path.strip_prefix("//").unwrap_or(path);
        if path.is_empty() {
            return Err("sqlite: names no file".to_owned());
        }
        Ok(path.to_owned())
    }

    fn schema(&self) -> Schema {
        schema_for!(SqliteSettings)
    }

    fn file(&self, location: &str) -> Option<PathBuf> {
        Some(location.into())
    }

    fn has_outboxes(&self) -> bool {
        true
    }

    fn why_no_trials(&self) -> Option<&'static str> {
        Some(
            "a trial uses SQLite files of its own without this flag; give redis://host:port or postgres://host:port/database",
        )
    }

    async fn open(&self, opening: Opening<'_>) -> Result<Opened, Problem> {
        let builder = SqliteStore::builder(opening.location);
        let builder = match opening.purpose {
            Purpose::Consume => builder.settings(opening.settings.sqlite.clone()),
            // The journal would be created where it is missing, and a command that inspects must
            // change nothing.
            Purpose::Read | Purpose::Command => builder.must_exist().without_purge(),
        };
        Ok(Opened::new(builder.open().await?))
    }
}

#[async_trait]
impl Extras for SqliteStore {
    async fn history(&self, key: &StoreKey, most: u32) -> Result<Vec<JournalEntry>, StoreError> {
        self.journal(key, most).await
    }

    async fn outbox(&self, name: &str) -> Result<Arc<dyn OutboxStore>, Problem> {
        Ok(Arc::new(Self::outbox(self, name).await?))
    }

    async fn remove(&self, _: &Scope, _: &[StoreKey]) -> Result<(), StoreError> {
        Err(StoreError::refused(
            "the file of a trial is removed as a whole",
        ))
    }
}
