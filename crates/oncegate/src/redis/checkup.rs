//! What a server's INFO says about keeping the promise.

use oncegate_core::store::{Checkup, StoreError};

use super::durability::Durability;

/// The first version with script flags and `SET NX GET`.
const OLDEST_MAJOR: u32 = 7;

/// The only policy under which a record stays until it expires.
const SAFE_POLICY: &str = "noeviction";

/// Judges a server by its INFO.
pub(super) fn read(
    info: &Info<'_>,
    address: &str,
    durability: Durability,
    evicting_policy_allowed: bool,
) -> Result<Checkup, StoreError> {
    let version = info.get("redis_version").unwrap_or("of an unknown version");
    let store = describe(info, version, address);
    if !info.is_at_least(OLDEST_MAJOR, 0) {
        return Err(StoreError::refused(format!(
            "{store} is too old: oncegate needs Redis {OLDEST_MAJOR}.0 or later, or Valkey"
        )));
    }
    if info.is_replica() {
        return Err(StoreError::refused(format!("{store} is a replica: name its primary in the URL")));
    }
    let mut warnings = Vec::new();
    let policy = info.get("maxmemory_policy").unwrap_or("unknown");
    if policy != SAFE_POLICY {
        if !evicting_policy_allowed {
            return Err(StoreError::refused(format!(
                "{store} has maxmemory-policy {policy}, which may evict records, and a message without its \
                 record runs again: set maxmemory-policy {SAFE_POLICY}, or accept it with \
                 RedisBuilder::allow_evicting_policy()"
            )));
        }
        warnings.push(format!(
            "maxmemory-policy is {policy}: records may be evicted, and their messages will run again. Set it \
             to {SAFE_POLICY}."
        ));
    }
    if info.get("aof_enabled") != Some("1") {
        warnings.push(
            "The append-only file is off: a crash of the server forgets every record since its last snapshot, \
             and their messages will run again. Set appendonly yes."
                .to_owned(),
        );
    }
    for (field, what) in
        [("aof_last_write_status", "append-only file"), ("rdb_last_bgsave_status", "snapshot")]
    {
        if info.get(field).is_some_and(|status| status != "ok") {
            warnings.push(format!("The server could not write its last {what}: see its log and its disk."));
        }
    }
    if let Some(warning) = durability.warning(info) {
        warnings.push(warning);
    } else if info.get("connected_slaves").is_none_or(|count| count == "0") {
        warnings.push("The server has no replica: if its disk is lost, so are the records.".to_owned());
    }
    Ok(Checkup { store, warnings })
}

/// One of many: what weakens a node, with its name.
pub(super) fn of_cluster(nodes: Vec<Checkup>, address: &str) -> Checkup {
    let store = format!("a cluster of {} primaries at {address}", nodes.len());
    let warnings = nodes.into_iter().flat_map(|Checkup { store, warnings }| {
        warnings.into_iter().map(move |warning| format!("{store}: {warning}"))
    });
    Checkup { store, warnings: warnings.collect() }
}

fn describe(info: &Info<'_>, version: &str, address: &str) -> String {
    let (name, version) = match info.get("valkey_version") {
        Some(version) => ("valkey", version),
        None => ("redis", version),
    };
    if address.is_empty() { format!("{name} {version}") } else { format!("{name} {version} at {address}") }
}

/// What INFO says.
pub(super) struct Info<'a>(pub(super) &'a str);

impl<'a> Info<'a> {
    pub(super) fn number(&self, field: &str) -> Option<u64> {
        self.get(field)?.parse().ok()
    }

    /// Whether it is of this version or a later one. Valkey says which Redis it is like.
    pub(super) fn is_at_least(&self, major: u32, minor: u32) -> bool {
        let version = self.get("redis_version").unwrap_or_default();
        let mut parts = version.split('.').map_while(|part| part.parse::<u32>().ok());
        (parts.next(), parts.next().or(Some(0))) >= (Some(major), Some(minor))
    }

    pub(super) fn is_replica(&self) -> bool {
        self.get("role") == Some("slave")
    }

    pub(super) fn get(&self, field: &str) -> Option<&'a str> {
        let lines = self.0.lines().filter_map(|line| line.split_once(':'));
        lines.filter(|(name, _)| *name == field).map(|(_, value)| value.trim()).next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(info: &str, address: &str, allowed: bool) -> Result<Checkup, StoreError> {
        super::read(&Info(info), address, Durability::Primary, allowed)
    }

    const GOOD: &str = "redis_version:7.0.15\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n\
        aof_last_write_status:ok\r\nrdb_last_bgsave_status:ok\r\nrole:master\r\nconnected_slaves:1\r\n";

    #[test]
    fn a_safe_server_raises_no_warning() {
        let checkup = read(GOOD, "localhost:6379", false).unwrap();
        assert_eq!(checkup.store, "redis 7.0.15 at localhost:6379");
        assert_eq!(checkup.warnings, Vec::<String>::new());
    }

    #[test]
    fn an_evicting_policy_is_refused_with_the_setting_and_the_override() {
        let evicting = GOOD.replace("noeviction", "allkeys-lru");
        let refused = read(&evicting, "", false).unwrap_err().to_string();
        assert!(
            refused.contains("maxmemory-policy") && refused.contains("allow_evicting_policy"),
            "{refused}"
        );
        assert_eq!(read(&evicting, "", true).unwrap().warnings.len(), 1);
    }

    #[test]
    fn old_servers_and_replicas_are_refused() {
        for (from, to, says) in [("7.0.15", "6.2.14", "too old"), ("role:master", "role:slave", "replica")] {
            let refused = read(&GOOD.replace(from, to), "", false).unwrap_err();
            assert_eq!(refused.class(), "refused");
            assert!(refused.to_string().contains(says), "{refused}");
        }
    }

    #[test]
    fn what_weakens_the_promise_is_said() {
        let weak = GOOD.replace("aof_enabled:1", "aof_enabled:0").replace("slaves:1", "slaves:0");
        assert_eq!(read(&weak, "", false).unwrap().warnings.len(), 2);
        let full = GOOD.replace("aof_last_write_status:ok", "aof_last_write_status:err");
        assert_eq!(read(&full, "", false).unwrap().warnings.len(), 1);
    }
}
