//! Checks by a server's INFO whether it can keep the guarantees.

use std::collections::HashMap;

use oncegate_core::store::{Checkup, StoreError, Survives};
use redis::{FromRedisValue as _, Value};

use super::durability::Durability;
use super::info::Info;
use super::settings::RedisSettings;

/// The first major version with script flags and `SET NX GET`.
const OLDEST_MAJOR: u32 = 7;

/// The only policy under which a record is kept until it expires.
const SAFE_POLICY: &str = "noeviction";

/// The server's settings, if this user may read them.
#[derive(Clone, Debug, Default)]
pub(super) struct Persistence {
    /// `always`, `everysec` or `no`.
    pub(super) appendfsync: Option<String>,
    /// The schedule of snapshots; empty means never.
    pub(super) save: Option<String>,
}

impl Persistence {
    /// Parses the answer to CONFIG GET, which many users may not call.
    pub(super) fn of(answer: Option<&Value>) -> Self {
        let settings =
            answer.and_then(|answer| HashMap::<String, String>::from_redis_value_ref(answer).ok());
        let mut settings = settings.unwrap_or_default();
        Self {
            appendfsync: settings.remove("appendfsync"),
            save: settings.remove("save"),
        }
    }
}

/// Checks a server by its INFO and its persistence settings.
pub(super) fn read(
    info: &Info<'_>,
    persistence: &Persistence,
    address: &str,
    settings: &RedisSettings,
) -> Result<Checkup, StoreError> {
    let version = info.get("redis_version").unwrap_or("of an unknown version");
    let store = describe(info, version, address);
    if !info.is_at_least(OLDEST_MAJOR, 0) {
        return Err(StoreError::refused(format!(
            "{store} is too old: oncegate needs Redis {OLDEST_MAJOR}.0 or later, or Valkey"
        )));
    }
    if info.is_replica() {
        return Err(StoreError::refused(format!(
            "{store} is a replica: name its primary in the URL"
        )));
    }
    let policy = policy(info);
    if policy != SAFE_POLICY && !settings.allow_evicting_policy {
        return Err(StoreError::refused(format!(
            "{store} has maxmemory-policy {policy}, which may evict records, and a message without its \
             record runs again: set maxmemory-policy {SAFE_POLICY}, or accept it with \
             the store's `allow_evicting_policy`"
        )));
    }
    Ok(Checkup {
        store,
        survives: survives(info, persistence, settings),
        warnings: warnings(info, settings),
    })
}

/// The server's `maxmemory-policy`.
fn policy<'a>(info: &Info<'a>) -> &'a str {
    info.get("maxmemory_policy").unwrap_or("unknown")
}

/// The weaknesses of a server that is not refused.
fn warnings(info: &Info<'_>, settings: &RedisSettings) -> Vec<String> {
    let mut warnings = Vec::new();
    let policy = policy(info);
    if policy != SAFE_POLICY {
        warnings.push(format!(
            "maxmemory-policy is {policy}: records may be evicted, and their messages will run again. Set it \
             to {SAFE_POLICY}."
        ));
    }
    if info.get("aof_enabled") != Some("1") && !settings.durable_service {
        warnings.push(
            "The append-only file is off: a crash of the server forgets every record since its last snapshot, \
             and their messages will run again. Set appendonly yes."
                .to_owned(),
        );
    }
    for (field, what) in [
        ("aof_last_write_status", "append-only file"),
        ("rdb_last_bgsave_status", "snapshot"),
    ] {
        if info.get(field).is_some_and(|status| status != "ok") {
            warnings.push(format!(
                "The server could not write its last {what}: see its log and its disk."
            ));
        }
    }
    if info.get("master_replid").is_none() || info.get("master_repl_offset").is_none() {
        warnings.push(
            "Losses of records are detected in part: the server's INFO shows no master_replid, so only records that \
             this process has completed or found completed are looked for. A failover that loses no more than the last \
             records of other processes goes unnoticed. Use a server that shows it, or require \
             replicas (the store's `durability`)."
                .to_owned(),
        );
    }
    if let Some(warning) = settings.durability.warning(info) {
        warnings.push(warning);
    } else if !settings.allow_no_replica
        && !settings.durable_service
        && info
            .get("connected_slaves")
            .is_none_or(|count| count == "0")
    {
        warnings.push(
            "The server has no replica: if its disk is lost, so are the records. Add a replica, or accept it with \
             `allow_no_replica`."
                .to_owned(),
        );
    }
    warnings
}

/// A setting that the user may not read counts as the default, and an unknown snapshot schedule as
/// none.
fn survives(info: &Info<'_>, persistence: &Persistence, settings: &RedisSettings) -> Survives {
    if info.get("maxmemory_policy") != Some(SAFE_POLICY) {
        return Survives::Evictable;
    }
    match settings.durability {
        Durability::Fsync { replicas: 0, .. } => return Survives::Disk,
        Durability::Fsync { .. } => return Survives::Replicated,
        _ if settings.durable_service => return Survives::Declared,
        // A power cut may erase the memory of a server and of its replicas at once.
        Durability::Primary | Durability::Replicas { .. } => {}
    }
    if info.get("aof_enabled") == Some("1") {
        return match persistence.appendfsync.as_deref() {
            Some("always") => Survives::Disk,
            Some("no") => Survives::Unsynced,
            _ => Survives::Moments,
        };
    }
    match persistence.save.as_deref() {
        None | Some("") => Survives::Memory,
        Some(_) => Survives::Snapshots,
    }
}

/// Combines the checkups of a cluster's nodes: as durable as the weakest node, with the warnings of
/// each.
///
/// `None` if there are no nodes.
pub(super) fn of_cluster(nodes: Vec<Checkup>, address: &str) -> Option<Checkup> {
    let store = format!("a cluster of {} primaries at {address}", nodes.len());
    let survives = nodes.iter().map(|node| node.survives).min()?;
    let warnings = nodes.into_iter().flat_map(
        |Checkup {
             store, warnings, ..
         }| {
            warnings
                .into_iter()
                .map(move |warning| format!("{store}: {warning}"))
        },
    );
    Some(Checkup {
        store,
        survives,
        warnings: warnings.collect(),
    })
}

fn describe(info: &Info<'_>, version: &str, address: &str) -> String {
    let (name, version) = match info.get("valkey_version") {
        Some(version) => ("valkey", version),
        None => ("redis", version),
    };
    if address.is_empty() {
        format!("{name} {version}")
    } else {
        format!("{name} {version} at {address}")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn read(
        info: &str,
        persistence: &Persistence,
        address: &str,
        allowed: bool,
    ) -> Result<Checkup, StoreError> {
        let settings = RedisSettings {
            allow_evicting_policy: allowed,
            ..RedisSettings::DEFAULT
        };
        super::read(&Info(info), persistence, address, &settings)
    }

    fn accepting(info: &str, accepted: &RedisSettings) -> Result<Checkup, StoreError> {
        super::read(&Info(info), &Persistence::default(), "", accepted)
    }

    const GOOD: &str = "redis_version:7.0.15\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n\
        aof_last_write_status:ok\r\nrdb_last_bgsave_status:ok\r\nrole:master\r\nmaster_replid:aaaa\r\n\
        master_repl_offset:1\r\nconnected_slaves:1\r\n";

    #[test]
    fn a_safe_server_raises_no_warning() {
        let checkup = read(GOOD, &Persistence::default(), "localhost:6379", false).unwrap();
        assert_eq!(checkup.store, "redis 7.0.15 at localhost:6379");
        assert_eq!(checkup.warnings, Vec::<String>::new());
    }

    #[test]
    fn an_evicting_policy_is_refused_naming_setting_and_override() {
        let evicting = GOOD.replace("noeviction", "allkeys-lru");
        let refused = read(&evicting, &Persistence::default(), "", false)
            .unwrap_err()
            .to_string();
        assert!(
            refused.contains("maxmemory-policy") && refused.contains("allow_evicting_policy"),
            "{refused}"
        );
        assert_eq!(
            read(&evicting, &Persistence::default(), "", true)
                .unwrap()
                .warnings
                .len(),
            1
        );
    }

    #[test]
    fn old_servers_and_replicas_are_refused() {
        for (from, to, says) in [
            ("7.0.15", "6.2.14", "too old"),
            ("role:master", "role:slave", "replica"),
        ] {
            let refused =
                read(&GOOD.replace(from, to), &Persistence::default(), "", false).unwrap_err();
            assert_eq!(refused.class(), "refused");
            assert!(refused.to_string().contains(says), "{refused}");
        }
    }

    #[test]
    fn what_weakens_the_promise_is_said() {
        let weak = GOOD
            .replace("aof_enabled:1", "aof_enabled:0")
            .replace("slaves:1", "slaves:0");
        assert_eq!(
            read(&weak, &Persistence::default(), "", false)
                .unwrap()
                .warnings
                .len(),
            2
        );
        let hidden = GOOD.replace("master_replid", "hidden");
        let warnings = read(&hidden, &Persistence::default(), "", false)
            .unwrap()
            .warnings;
        assert!(
            warnings.len() == 1 && warnings[0].contains("master_replid"),
            "{warnings:?}"
        );
        let full = GOOD.replace("aof_last_write_status:ok", "aof_last_write_status:err");
        assert_eq!(
            read(&full, &Persistence::default(), "", false)
                .unwrap()
                .warnings
                .len(),
            1
        );
    }

    #[test]
    fn a_missing_replica_can_be_accepted_and_nothing_else_with_it() {
        let weak = GOOD
            .replace("aof_enabled:1", "aof_enabled:0")
            .replace("slaves:1", "slaves:0");
        let accepted = RedisSettings {
            allow_no_replica: true,
            ..RedisSettings::DEFAULT
        };
        let alone = accepting(&GOOD.replace("slaves:1", "slaves:0"), &accepted);
        assert_eq!(alone.unwrap().warnings, Vec::<String>::new());
        assert_eq!(accepting(&weak, &accepted).unwrap().warnings.len(), 1);
    }

    #[test]
    fn a_service_that_is_declared_durable_has_a_row_of_its_own() {
        let service = GOOD
            .replace("aof_enabled:1", "aof_enabled:0")
            .replace("slaves:1", "slaves:0");
        let accepted = RedisSettings {
            durable_service: true,
            ..RedisSettings::DEFAULT
        };
        let checkup = accepting(&service, &accepted).unwrap();
        assert_eq!(
            (checkup.survives, checkup.warnings),
            (Survives::Declared, Vec::new())
        );
        // What the service does not change is still checked.
        let evicting = service.replace("noeviction", "allkeys-lru");
        assert_eq!(
            accepting(&evicting, &accepted).unwrap_err().class(),
            "refused"
        );
        let both = RedisSettings {
            allow_evicting_policy: true,
            ..accepted
        };
        assert_eq!(
            accepting(&evicting, &both).unwrap().survives,
            Survives::Evictable
        );
    }

    #[test]
    fn the_settings_decide_what_a_completion_survives() {
        let off = GOOD.replace("aof_enabled:1", "aof_enabled:0");
        let evicting = GOOD.replace("noeviction", "volatile-ttl");
        for (info, appendfsync, save, survives) in [
            (GOOD, Some("always"), Some(""), Survives::Disk),
            (GOOD, Some("everysec"), Some("3600 1"), Survives::Moments),
            (GOOD, Some("no"), Some("3600 1"), Survives::Unsynced),
            (GOOD, None, None, Survives::Moments),
            (&off, Some("always"), Some("3600 1"), Survives::Snapshots),
            (&off, Some("always"), Some(""), Survives::Memory),
            (&off, None, None, Survives::Memory),
            (&evicting, Some("always"), Some(""), Survives::Evictable),
        ] {
            let persistence = Persistence {
                appendfsync: appendfsync.map(Into::into),
                save: save.map(Into::into),
            };
            let found = read(info, &persistence, "", true).unwrap().survives;
            assert_eq!(found, survives, "{appendfsync:?} {save:?}");
        }
        for (replicas, survives) in [(0, Survives::Disk), (1, Survives::Replicated)] {
            let durability = Durability::Fsync {
                replicas,
                timeout: Duration::from_secs(1),
            };
            let settings = RedisSettings {
                durability,
                ..RedisSettings::DEFAULT
            };
            let found = accepting(GOOD, &settings);
            assert_eq!(found.unwrap().survives, survives, "{durability:?}");
        }
    }
}
