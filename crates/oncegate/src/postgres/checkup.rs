//! What a server says about keeping the promise.

use deadpool_postgres::Object;
use oncegate_core::store::{Checkup, Durability, StoreError};

use super::errors::{self, Trouble};
use super::schema::{self, REMEDY};

/// The first version whose clock is told as an exact number.
const OLDEST_MAJOR: i32 = 14;

const ASK: &str = "\
SELECT current_setting('server_version_num')::integer AS version, current_setting('server_version') AS words, \
current_setting('server_encoding') AS encoding, current_setting('synchronous_commit') AS synchronous_commit, \
current_setting('fsync') AS fsync, current_setting('full_page_writes') AS full_page_writes, \
current_setting('synchronous_standby_names') <> '' AS has_synchronous_standby, \
pg_is_in_recovery() AS standby, to_regclass('oncegate_schema') IS NOT NULL AS has_schema, \
coalesce((SELECT relpersistence = 'u' FROM pg_class WHERE oid = to_regclass('oncegate_records')), false) \
AS unlogged";

/// What the server says.
#[derive(Clone, Debug)]
struct Said {
    version: i32,
    words: String,
    encoding: String,
    synchronous_commit: String,
    fsync: String,
    full_page_writes: String,
    has_synchronous_standby: bool,
    standby: bool,
    has_schema: bool,
    unlogged: bool,
}

/// Asks a server, and judges what it says.
pub(super) async fn ask(
    client: &Object,
    address: &str,
    asynchronous_commit_allowed: bool,
) -> Result<Checkup, Trouble> {
    let row = client.query_one(ASK, &[]).await.map_err(|error| errors::not_executed(&error))?;
    let said = Said {
        version: row.get("version"),
        words: row.get("words"),
        encoding: row.get("encoding"),
        synchronous_commit: row.get("synchronous_commit"),
        fsync: row.get("fsync"),
        full_page_writes: row.get("full_page_writes"),
        has_synchronous_standby: row.get("has_synchronous_standby"),
        standby: row.get("standby"),
        has_schema: row.get("has_schema"),
        unlogged: row.get("unlogged"),
    };
    let checkup = judge(&said, address, asynchronous_commit_allowed)?;
    let version = client.query_opt("SELECT version FROM oncegate_schema", &[]).await;
    let version = version.map_err(|error| errors::not_executed(&error))?;
    schema::check_version(version.map_or(0, |row| row.get(0)))?;
    Ok(checkup)
}

fn judge(said: &Said, address: &str, asynchronous_commit_allowed: bool) -> Result<Checkup, StoreError> {
    let store = match address {
        "" => format!("postgresql {}", said.words),
        address => format!("postgresql {} at {address}", said.words),
    };
    let refuse = |why: String| Err(StoreError::refused(format!("{store} {why}")));
    if said.version / 10_000 < OLDEST_MAJOR {
        return refuse(format!("is too old: oncegate needs PostgreSQL {OLDEST_MAJOR} or later"));
    }
    if said.standby {
        return refuse("is a standby: name its primary in the URL".to_owned());
    }
    if said.encoding != "UTF8" {
        return refuse(format!("keeps text as {}: use a database with encoding UTF8", said.encoding));
    }
    if !said.has_schema {
        return refuse(format!("has no tables of oncegate: {REMEDY}"));
    }
    if said.unlogged {
        return refuse(
            "would empty oncegate_records after a crash: ALTER TABLE oncegate_records SET LOGGED".to_owned(),
        );
    }
    let mut warnings = Vec::new();
    if said.synchronous_commit == "off" {
        if !asynchronous_commit_allowed {
            return refuse(
                "has synchronous_commit = off, so that a crash takes back what was acknowledged: set it to on \
                 (ALTER ROLE … SET synchronous_commit = on), or accept it with \
                 PostgresBuilder::allow_asynchronous_commit()"
                    .to_owned(),
            );
        }
        warnings.push(
            "synchronous_commit is off: a crash of the server takes back the last completions, and their \
             messages will run again if they are delivered again. Set it to on."
                .to_owned(),
        );
    }
    for (setting, value) in [("fsync", &said.fsync), ("full_page_writes", &said.full_page_writes)] {
        if value != "on" {
            warnings.push(format!(
                "{setting} is {value}: a power cut may damage or lose every record. Set it to on."
            ));
        }
    }
    Ok(Checkup { store, durability: durability(said), warnings })
}

fn durability(said: &Said) -> Durability {
    if said.fsync != "on" || said.full_page_writes != "on" {
        return Durability::Unsynced;
    }
    match said.synchronous_commit.as_str() {
        "off" => Durability::Moments,
        "local" => Durability::Disk,
        _ if said.has_synchronous_standby => Durability::Replicated,
        _ => Durability::Disk,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Said {
        let on = || "on".to_owned();
        Said {
            version: 150_013,
            words: "15.13".to_owned(),
            encoding: "UTF8".to_owned(),
            synchronous_commit: on(),
            fsync: on(),
            full_page_writes: on(),
            has_synchronous_standby: false,
            standby: false,
            has_schema: true,
            unlogged: false,
        }
    }

    #[test]
    fn a_safe_server_raises_no_warning() {
        let checkup = judge(&good(), "db:5432/app", false).unwrap();
        assert_eq!(checkup.store, "postgresql 15.13 at db:5432/app");
        assert_eq!(checkup.warnings, Vec::<String>::new());
    }

    #[test]
    fn what_breaks_the_promise_is_refused_with_its_remedy() {
        for (said, remedy) in [
            (Said { version: 130_001, ..good() }, "14 or later"),
            (Said { standby: true, ..good() }, "primary"),
            (Said { encoding: "LATIN1".to_owned(), ..good() }, "UTF8"),
            (Said { has_schema: false, ..good() }, "create_schema()"),
            (Said { unlogged: true, ..good() }, "SET LOGGED"),
            (Said { synchronous_commit: "off".to_owned(), ..good() }, "allow_asynchronous_commit"),
        ] {
            let refused = judge(&said, "", false).unwrap_err();
            assert_eq!(refused.class(), "refused");
            assert!(refused.to_string().contains(remedy), "{refused}");
        }
    }

    #[test]
    fn the_settings_decide_what_a_completion_survives() {
        let said = |synchronous_commit: &str, fsync: &str, has_synchronous_standby| Said {
            synchronous_commit: synchronous_commit.to_owned(),
            fsync: fsync.to_owned(),
            has_synchronous_standby,
            ..good()
        };
        for (said, durability) in [
            (said("on", "on", true), Durability::Replicated),
            (said("remote_apply", "on", true), Durability::Replicated),
            (said("local", "on", true), Durability::Disk),
            (said("on", "on", false), Durability::Disk),
            (said("off", "on", true), Durability::Moments),
            (said("on", "off", true), Durability::Unsynced),
        ] {
            assert_eq!(judge(&said, "", true).unwrap().durability, durability, "{said:?}");
        }
    }

    #[test]
    fn what_weakens_the_promise_is_said() {
        let off = || "off".to_owned();
        let asynchronous = Said { synchronous_commit: off(), ..good() };
        assert_eq!(judge(&asynchronous, "", true).unwrap().warnings.len(), 1);
        let unsafe_disk = Said { fsync: off(), full_page_writes: off(), ..good() };
        assert_eq!(judge(&unsafe_disk, "", false).unwrap().warnings.len(), 2);
    }
}
