//! The store of a configuration: where it is, and the settings of every kind of store in one table.

use oncegate::core::settings::{Finding, TlsFiles};
use oncegate::dynamodb::DynamoDbSettings;
use oncegate::postgres::PostgresSettings;
use oncegate::redis::RedisSettings;
use oncegate::sqlite::SqliteSettings;
use schemars::{JsonSchema, Schema};
use serde::Deserialize;
use serde_json::Value as Json;

use crate::config::values::Secret;
use crate::stores;

/// The store of the records.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(transform = tell_of_each)]
pub(crate) struct Store {
    /// `redis://`, `redis+cluster://`, `redis+sentinel://` (`rediss` for TLS), `postgres://`,
    /// `dynamodb://table`, or an SQLite file as `sqlite:path`.
    pub(crate) url: Option<String>,
    /// The password that belongs into the URL. From a file, it is read for each new connection.
    pub(crate) password: Option<Secret>,
    /// The password for the sentinels, if they want one; that of the URL is the primary's. From a
    /// file, it is read for each new connection.
    pub(crate) sentinel_password: Option<Secret>,
    #[serde(default, rename = "*tls")]
    #[schemars(flatten)]
    pub(crate) tls: TlsFiles,
    #[serde(default, rename = "*redis")]
    #[schemars(flatten)]
    pub(crate) redis: RedisSettings,
    #[serde(default, rename = "*postgres")]
    #[schemars(flatten)]
    pub(crate) postgres: PostgresSettings,
    #[serde(default, rename = "*dynamodb")]
    #[schemars(flatten)]
    pub(crate) dynamodb: DynamoDbSettings,
    #[serde(default, rename = "*sqlite")]
    #[schemars(flatten)]
    pub(crate) sqlite: SqliteSettings,
}

impl Store {
    /// Returns what the library finds wrong.
    pub(crate) fn check(&self) -> Vec<Finding> {
        let tls = self.tls.check();
        tls.into_iter()
            .chain(self.redis.check())
            .chain(self.postgres.check())
            .chain(self.dynamodb.check())
            .collect()
    }
}

/// Returns the stores that have a setting, if the one at this URL is none of them.
pub(crate) fn owners_elsewhere(url: &str, setting: &str) -> Option<String> {
    let kind = stores::kind(url)?;
    let at = format!("/properties/{setting}");
    let owners: Vec<&str> = stores::schemas()
        .iter()
        .filter_map(|(store, schema)| schema.pointer(&at).map(|_| *store))
        .collect();
    (!owners.is_empty() && !owners.contains(&kind)).then(|| owners.join(" and "))
}

/// The settings of a store that is reached by a network.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "its schema is what counts")]
pub(crate) struct WithTls<T> {
    #[schemars(flatten)]
    tls: TlsFiles,
    #[schemars(flatten)]
    settings: T,
}

/// Gives a setting of several stores the paragraphs that all of them have, and the default of each
/// if they differ.
fn tell_of_each(schema: &mut Schema) {
    let stores = stores::schemas();
    let settings = schema.get_mut("properties").and_then(Json::as_object_mut);
    for (name, setting) in settings.into_iter().flatten() {
        let Some(setting) = setting.as_object_mut() else {
            continue;
        };
        if let [(_, text), others @ ..] = texts(&stores, name, "description").as_slice() {
            let paragraphs = text.split("\n\n");
            let common =
                paragraphs.filter(|part| others.iter().all(|(_, other)| other.contains(part)));
            let common: Vec<&str> = common.collect();
            setting.insert("description".to_owned(), common.join("\n\n").into());
        }
        let defaults = texts(&stores, name, "default");
        if let [(_, default), others @ ..] = defaults.as_slice()
            && others.iter().any(|(_, other)| other != default)
        {
            let each = defaults
                .iter()
                .map(|(store, default)| format!("{default} for {store}"));
            let each: Vec<String> = each.collect();
            setting.insert("default".to_owned(), each.join(", ").into());
        }
    }
}

/// Returns a text about a setting from each store that has one, with the store's name.
fn texts<'a>(
    stores: &'a [(&'static str, Schema)],
    setting: &str,
    which: &str,
) -> Vec<(&'static str, &'a str)> {
    let at = format!("/properties/{setting}/{which}");
    stores
        .iter()
        .filter_map(|(store, schema)| Some((*store, schema.pointer(&at)?.as_str()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use oncegate::redis::Durability;

    use super::*;
    use crate::config::{read, table};

    fn store(text: &str) -> Result<Store, String> {
        let table = toml::from_str(text).unwrap();
        read::read(&table).map_err(|error| error.to_string())
    }

    #[test]
    fn without_a_setting_each_store_has_its_defaults() {
        let store = store("url = \"once.db\"").unwrap();
        assert_eq!(store.redis, RedisSettings::DEFAULT);
        assert_eq!(store.postgres, PostgresSettings::DEFAULT);
        assert_eq!(store.dynamodb, DynamoDbSettings::DEFAULT);
        assert_eq!(store.sqlite, SqliteSettings::DEFAULT);
    }

    #[test]
    fn a_setting_is_that_of_every_store_that_has_it() {
        let store =
            store("response_timeout = \"3s\"\njournal = true\ntls_root = \"ca.pem\"").unwrap();
        assert_eq!(store.tls, TlsFiles::trusting("ca.pem"));
        let redis = RedisSettings {
            response_timeout: Duration::from_secs(3),
            ..RedisSettings::DEFAULT
        };
        assert_eq!(store.redis, redis);
        let postgres = PostgresSettings {
            response_timeout: Duration::from_secs(3),
            journal: true,
            ..PostgresSettings::DEFAULT
        };
        assert_eq!(store.postgres, postgres);
        assert!(store.sqlite.journal);
    }

    #[test]
    fn a_durability_is_a_table() {
        for (text, expected) in [
            ("{}", Durability::Primary),
            (
                "{ replicas = 2 }",
                Durability::Replicas {
                    count: 2,
                    timeout: Duration::from_secs(1),
                },
            ),
            (
                "{ fsync = true, timeout = \"200ms\" }",
                Durability::Fsync {
                    replicas: 0,
                    timeout: Duration::from_millis(200),
                },
            ),
        ] {
            let store = store(&format!("durability = {text}")).unwrap();
            assert_eq!(store.redis.durability, expected, "{text}");
        }
    }

    #[test]
    fn an_unknown_name_is_told_with_the_known_ones_once_each() {
        let near = store("journall = true").unwrap_err();
        assert!(near.contains("did you mean `journal`?"), "{near}");
        let far = store("xxxxxxxx = 1").unwrap_err();
        assert_eq!(far.matches("connect_timeout").count(), 1, "{far}");
        assert!(!far.contains("password_file"), "{far}");
    }

    #[test]
    fn the_table_says_of_a_shared_setting_what_holds_for_all() {
        let schema = table::schema();
        let settings = &schema["properties"]["store"]["properties"];
        let response = &settings["response_timeout"];
        let default = "2s for Redis, 5s for PostgreSQL, 4s for DynamoDB";
        assert_eq!(response["default"], default);
        assert!(!response["description"].as_str().unwrap().contains("\n\n"));
        assert_eq!(settings["connect_timeout"]["default"], "2s");
        let own = settings["allow_fsync_off"]["description"].as_str();
        assert!(own.unwrap().contains("\n\n"), "{own:?}");
    }

    #[test]
    fn a_setting_of_other_stores_is_known_as_theirs() {
        for (url, setting, owners) in [
            ("redis://localhost", "durability", None),
            ("redis://localhost", "allow_fsync_off", Some("PostgreSQL")),
            (
                "redis://localhost",
                "journal",
                Some("PostgreSQL and SQLite"),
            ),
            ("sqlite:once.db", "home_region", Some("DynamoDB")),
            ("sqlite:once.db", "tls_root", Some("Redis and PostgreSQL")),
            ("sqlite:once.db", "url", None),
        ] {
            let found = owners_elsewhere(url, setting);
            assert_eq!(found.as_deref(), owners, "{url} {setting}");
        }
    }

    #[test]
    fn a_key_without_its_certificate_is_said_once() {
        let findings = store("tls_key = \"client.key\"").unwrap().check();
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(findings[0].setting, "tls_key");
    }
}
