//! Checks whether a server can keep the guarantees.

use std::time::{Duration, SystemTime};

use deadpool_postgres::Object;
use oncegate_core::store::{Checkup, StoreError, Survives};

use super::builder::Reached;
use super::errors::{self, Trouble};
use super::settings::PostgresSettings;
use super::{rights, schema};
use oncegate_store_toolkit::clock;

/// The first version that returns its clock as an exact number.
const OLDEST_MAJOR: i32 = 14;

const ASK: &str = "\
SELECT current_setting('server_version_num')::integer AS version, current_setting('server_version') AS words, \
current_setting('server_encoding') AS encoding, current_setting('synchronous_commit') AS synchronous_commit, \
current_setting('fsync') AS fsync, current_setting('full_page_writes') AS full_page_writes, \
pg_is_in_recovery() AS standby, current_user::text AS role, \
(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS clock_ms, \
current_setting('synchronous_standby_names') <> '' AS has_synchronous_standby";

/// Asks whether the server empties the table after a crash.
const ASK_UNLOGGED: &str =
    "SELECT relpersistence = 'u' FROM pg_class WHERE oid = 'oncegate_records'::regclass";

/// The settings and properties that the server reports.
#[derive(Clone, Debug)]
struct ServerSettings {
    version: i32,
    words: String,
    encoding: String,
    synchronous_commit: String,
    fsync: String,
    full_page_writes: String,
    has_synchronous_standby: bool,
    standby: bool,
}

/// Reads the server's settings, and checks them.
pub(super) async fn ask(
    client: &Object,
    reached: &Reached,
    chosen: &PostgresSettings,
) -> Result<Checkup, Trouble> {
    let asked = SystemTime::now();
    let row = client
        .query_one(ASK, &[])
        .await
        .map_err(|error| errors::not_executed(&error))?;
    let answered = SystemTime::now();
    let settings = ServerSettings {
        version: row.get("version"),
        words: row.get("words"),
        encoding: row.get("encoding"),
        synchronous_commit: row.get("synchronous_commit"),
        fsync: row.get("fsync"),
        full_page_writes: row.get("full_page_writes"),
        standby: row.get("standby"),
        has_synchronous_standby: row.get("has_synchronous_standby"),
    };
    let store = match &*reached.address {
        "" => format!("postgresql {}", settings.words),
        address => format!("postgresql {} at {address}", settings.words),
    };
    let mut checkup = judge(&settings, store, chosen)?;
    if reached.shows_password {
        checkup.warnings.push(
            "The password is sent to another machine in plain text where the server asks for it: set sslmode to \
             verify-full."
                .to_owned(),
        );
    }
    let clock_ms = u64::try_from(row.get::<_, i64>("clock_ms")).unwrap_or_default();
    let clock = SystemTime::UNIX_EPOCH + Duration::from_millis(clock_ms);
    checkup
        .warnings
        .extend(clock::warning(clock, asked, answered));
    let lacking = rights::lacking(client, row.get("role")).await?;
    if let Some(rights) = lacking.by_all {
        return Err(StoreError::refused(format!(
            "{} does not let this role do its work: {rights}",
            checkup.store
        ))
        .into());
    }
    schema::check(client, chosen.journal).await?;
    let unlogged = client
        .query_one(ASK_UNLOGGED, &[])
        .await
        .map_err(|error| errors::not_executed(&error))?;
    if unlogged.get(0) {
        return Err(StoreError::refused(format!(
            "{} would empty oncegate_records after a crash: ALTER TABLE oncegate_records SET LOGGED",
            checkup.store
        ))
        .into());
    }
    checkup.warnings.extend(lacking.by_some);
    Ok(checkup)
}

fn judge(
    settings: &ServerSettings,
    store: String,
    chosen: &PostgresSettings,
) -> Result<Checkup, StoreError> {
    let refuse = |why: String| Err(StoreError::refused(format!("{store} {why}")));
    if settings.version / 10_000 < OLDEST_MAJOR {
        return refuse(format!(
            "is too old: oncegate needs PostgreSQL {OLDEST_MAJOR} or later"
        ));
    }
    if settings.standby {
        return refuse("is a standby: name its primary in the URL".to_owned());
    }
    if settings.encoding != "UTF8" {
        return refuse(format!(
            "keeps text as {}: use a database with encoding UTF8",
            settings.encoding
        ));
    }
    let mut warnings = Vec::new();
    if settings.synchronous_commit == "off" {
        if !chosen.allow_asynchronous_commit {
            return refuse(
                "has synchronous_commit = off, so that a crash takes back what was acknowledged: set it to on \
                 (ALTER ROLE … SET synchronous_commit = on), or accept it with \
                 the store's `allow_asynchronous_commit`"
                    .to_owned(),
            );
        }
        warnings.push(
            "synchronous_commit is off: a crash of the server takes back the last completions, and their \
             messages will run again if they are delivered again. Set it to on."
                .to_owned(),
        );
    }
    if settings.synchronous_commit == "local" && settings.has_synchronous_standby {
        warnings.push(
            "synchronous_commit is local: a failover to a standby may take back the last completions. Set it to on."
                .to_owned(),
        );
    }
    if settings.fsync != "on" {
        if !chosen.allow_fsync_off {
            return refuse(
                "has fsync = off, so that a power cut may lose or damage every record: set it to on, or accept it \
                 with the store's `allow_fsync_off`"
                    .to_owned(),
            );
        }
        warnings.push(
            "fsync is off: a power cut may damage or lose every record. Set it to on.".to_owned(),
        );
    }
    if settings.full_page_writes != "on" {
        // Some file systems never write half a page.
        warnings.push(
            "full_page_writes is off: a power cut may damage records, unless the file system writes whole pages. \
             Set it to on."
                .to_owned(),
        );
    }
    Ok(Checkup {
        store,
        survives: survives(settings),
        warnings,
    })
}

fn survives(settings: &ServerSettings) -> Survives {
    if settings.fsync != "on" || settings.full_page_writes != "on" {
        return Survives::Unsynced;
    }
    match settings.synchronous_commit.as_str() {
        "off" => Survives::Moments,
        "local" => Survives::Disk,
        _ if settings.has_synchronous_standby => Survives::Replicated,
        _ => Survives::Disk,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> ServerSettings {
        ServerSettings {
            version: 150_013,
            words: "15.13".to_owned(),
            encoding: "UTF8".to_owned(),
            synchronous_commit: "on".to_owned(),
            fsync: "on".to_owned(),
            full_page_writes: "on".to_owned(),
            has_synchronous_standby: false,
            standby: false,
        }
    }

    #[test]
    fn a_safe_server_raises_no_warning() {
        let checkup = judge(&good(), String::new(), &PostgresSettings::DEFAULT).unwrap();
        assert_eq!(checkup.warnings, Vec::<String>::new());
    }

    #[test]
    fn what_breaks_the_promise_is_refused_with_its_remedy() {
        for (settings, remedy) in [
            (
                ServerSettings {
                    version: 130_001,
                    ..good()
                },
                "14 or later",
            ),
            (
                ServerSettings {
                    standby: true,
                    ..good()
                },
                "primary",
            ),
            (
                ServerSettings {
                    encoding: "LATIN1".to_owned(),
                    ..good()
                },
                "UTF8",
            ),
            (
                ServerSettings {
                    synchronous_commit: "off".to_owned(),
                    ..good()
                },
                "allow_asynchronous_commit",
            ),
            (
                ServerSettings {
                    fsync: "off".to_owned(),
                    ..good()
                },
                "allow_fsync_off",
            ),
        ] {
            let refused = judge(&settings, String::new(), &PostgresSettings::DEFAULT).unwrap_err();
            assert_eq!(refused.class(), "refused");
            assert!(refused.to_string().contains(remedy), "{refused}");
        }
    }

    fn settings(
        synchronous_commit: &str,
        fsync: &str,
        has_synchronous_standby: bool,
    ) -> ServerSettings {
        ServerSettings {
            synchronous_commit: synchronous_commit.to_owned(),
            fsync: fsync.to_owned(),
            has_synchronous_standby,
            ..good()
        }
    }

    #[test]
    fn the_settings_decide_what_a_completion_survives() {
        let all = PostgresSettings {
            allow_asynchronous_commit: true,
            allow_fsync_off: true,
            ..PostgresSettings::DEFAULT
        };
        for (settings, survives) in [
            (settings("on", "on", true), Survives::Replicated),
            (settings("remote_apply", "on", true), Survives::Replicated),
            (settings("local", "on", true), Survives::Disk),
            (settings("on", "on", false), Survives::Disk),
            (settings("off", "on", true), Survives::Moments),
            (settings("on", "off", true), Survives::Unsynced),
        ] {
            assert_eq!(
                judge(&settings, String::new(), &all).unwrap().survives,
                survives,
                "{settings:?}"
            );
        }
    }

    #[test]
    fn what_weakens_the_promise_is_said() {
        let local = ServerSettings {
            synchronous_commit: "local".to_owned(),
            has_synchronous_standby: true,
            ..good()
        };
        let whole = ServerSettings {
            synchronous_commit: "off".to_owned(),
            fsync: "off".to_owned(),
            full_page_writes: "off".to_owned(),
            ..good()
        };
        let all = PostgresSettings {
            allow_asynchronous_commit: true,
            allow_fsync_off: true,
            ..PostgresSettings::DEFAULT
        };
        for (settings, warnings) in [(local, 1), (whole, 3)] {
            assert_eq!(
                judge(&settings, String::new(), &all)
                    .unwrap()
                    .warnings
                    .len(),
                warnings,
                "{settings:?}"
            );
        }
    }
}
