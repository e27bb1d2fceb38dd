//! The settings of a store in an SQLite file.

/// The settings of an [`SqliteStore`](crate::SqliteStore) that other stores have, too. Every value
/// is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct SqliteSettings {
    /// Keep a journal of every change in the store itself, in the transaction of the change:
    /// SQLite, and PostgreSQL after `oncegate migrate --journal`. For Redis see the consumer's
    /// `journal`.
    ///
    /// Triggers on the table write an entry for each change of state; see
    /// [`SqliteStore::journal`](crate::SqliteStore::journal). Once created, the journal records
    /// every change in the file, also those by processes whose store was opened without this
    /// setting.
    pub journal: bool,
}

impl SqliteSettings {
    /// The defaults.
    pub const DEFAULT: Self = Self { journal: false };
}

impl Default for SqliteSettings {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SqliteStore;

    #[test]
    fn a_builder_has_the_defaults_and_setters_change_them() {
        let builder = SqliteStore::builder("once.db");
        assert_eq!(builder.settings.chosen, SqliteSettings::DEFAULT);
        assert!(builder.journaled().settings.chosen.journal);
    }
}
