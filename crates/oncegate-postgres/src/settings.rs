//! The settings of a store in PostgreSQL, and their check.

use std::path::PathBuf;
use std::time::Duration;

#[cfg(feature = "config")]
use oncegate_core::settings::Time;
use oncegate_core::settings::{Finding, TlsFiles};

/// The settings of a [`PostgresStore`](crate::PostgresStore), besides its URL and its purge.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct PostgresSettings {
    /// The time that the server may take to answer. Keep it well below the lease.
    ///
    /// It is also each transaction's `statement_timeout` and `idle_in_transaction_session_timeout`,
    /// and half of it is the `lock_timeout`: a stalled process blocks keys no longer than that.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub response_timeout: Duration,
    /// The time limit of one attempt to connect.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub connect_timeout: Duration,
    /// The files of TLS: the authority, and the client's certificate with its key.
    ///
    /// They count where the URL names none (`sslrootcert`, `sslcert`, `sslkey`). Connections to
    /// this machine use TLS, too, if the authority or a certificate is set and the URL has no
    /// `sslmode`. A pool that the caller supplies has its own TLS.
    #[cfg_attr(feature = "config", serde(skip))]
    pub tls: TlsFiles,
    /// The file with the password, instead of one in the URL; a line feed at its end does not
    /// count.
    ///
    /// It is read for each new connection, so the password may change while connections are open. A
    /// pool that the caller supplies has its own.
    #[cfg_attr(feature = "config", serde(skip))]
    pub password_file: Option<PathBuf>,
    /// Accept a PostgreSQL with `synchronous_commit = off`: a crash of the server takes back the
    /// last completions.
    ///
    /// Their messages were already acknowledged. The check refuses such a server otherwise.
    pub allow_asynchronous_commit: bool,
    /// Accept a PostgreSQL with `fsync = off`, for test data alone: a power cut may damage or lose
    /// every record.
    ///
    /// The check refuses such a server otherwise.
    pub allow_fsync_off: bool,
    /// Keep a journal of every change in the store itself, in the transaction of the change:
    /// SQLite, and PostgreSQL after `oncegate migrate --journal`. For Redis see the consumer's
    /// `journal`.
    ///
    /// Triggers on the table write an entry for each change of state; see
    /// [`PostgresStore::journal`](crate::PostgresStore::journal).
    /// [`create_schema`](crate::PostgresStore::create_schema) creates the journal, and without it
    /// the check refuses the store. Once created, it records every change in the database, also
    /// those by processes whose store was opened without this setting.
    pub journal: bool,
}

impl PostgresSettings {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        response_timeout: Duration::from_secs(5),
        connect_timeout: Duration::from_secs(2),
        tls: TlsFiles::NONE,
        password_file: None,
        allow_asynchronous_commit: false,
        allow_fsync_off: false,
        journal: false,
    };

    /// Returns what is wrong with these settings.
    pub fn check(&self) -> Vec<Finding> {
        self.tls.check().into_iter().collect()
    }
}

impl Default for PostgresSettings {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PostgresStore;

    #[test]
    fn a_builder_has_the_defaults_and_setters_change_them() {
        let builder = PostgresStore::builder("postgres://localhost/once");
        assert_eq!(builder.settings, PostgresSettings::DEFAULT);
        assert_eq!(PostgresSettings::DEFAULT.check(), []);
        let expected = PostgresSettings {
            allow_fsync_off: true,
            journal: true,
            ..PostgresSettings::DEFAULT
        };
        assert_eq!(builder.allow_fsync_off().journaled().settings, expected);
    }

    #[tokio::test]
    async fn a_key_without_its_certificate_is_refused_before_a_connection() {
        let settings = PostgresSettings {
            tls: TlsFiles {
                key: Some("client.key".into()),
                ..TlsFiles::NONE
            },
            ..PostgresSettings::DEFAULT
        };
        let [Finding { setting, what }] = settings.check().try_into().unwrap();
        assert_eq!(setting, "tls_key");
        let builder = PostgresStore::builder("postgres://localhost/once").settings(settings);
        let refused = builder.connect().await.unwrap_err();
        assert_eq!(refused.class(), "refused");
        assert!(refused.to_string().contains(&what), "{refused}");
    }
}
