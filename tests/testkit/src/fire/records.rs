//! What the store holds at the end of a run.

use std::collections::BTreeMap;

use super::stage::{Server, Stage};
use crate::redis::RedisServer;

/// The end of the key under which a store tries its rights when it opens, which no message has. A
/// kill in between leaves its record, and the next start takes it over.
const TRIED_RIGHTS: &str = "b25jZWdhdGU6IHJpZ2h0cw";

impl Stage<'_> {
    /// The state of every record of the scope, read by a client that is not oncegate's.
    pub(super) async fn records(&mut self) -> BTreeMap<String, String> {
        let prefix = format!("{}:", self.settings.scope);
        match &self.server {
            Server::Redis(server) => {
                let mut records = redis_dump(server, &prefix).await;
                records.retain(|key, _| !key.ends_with(TRIED_RIGHTS));
                records
            }
            Server::Postgres(server) => {
                let client = server.connection().await;
                let sql = "SELECT key, state FROM oncegate_records WHERE starts_with(key, $1)";
                let rows = client
                    .query(sql, &[&prefix])
                    .await
                    .expect("the records can be read");
                rows.iter().map(|row| (row.get(0), row.get(1))).collect()
            }
            Server::File => {
                let file =
                    rusqlite::Connection::open(&self.settings.address).expect("the file opens");
                let mut records = file
                    .prepare("SELECT key, state FROM records")
                    .expect("it has records");
                let rows = records.query_map([], |row| Ok((row.get(0)?, row.get(1)?)));
                rows.and_then(Iterator::collect)
                    .expect("the records can be read")
            }
        }
    }
}

/// The first byte of a record encodes its state; `docs/RECORD_FORMAT.md` lists them.
async fn redis_dump(server: &RedisServer, prefix: &str) -> BTreeMap<String, String> {
    let mut connection = server.connection().await;
    let mut keys = ::redis::cmd("KEYS");
    let keys: Vec<String> = keys
        .arg(format!("{prefix}*"))
        .query_async(&mut connection)
        .await
        .expect("Redis lists its keys");
    let mut dump = BTreeMap::new();
    for key in keys {
        let mut get = ::redis::cmd("GET");
        let record: Vec<u8> = get
            .arg(&key)
            .query_async(&mut connection)
            .await
            .expect("Redis reads a key");
        let state = match record.first() {
            Some(b'P' | b'Q' | b'R') => "pending",
            Some(b'S' | b'T' | b'U') => "released",
            Some(b'C') => "completed",
            Some(b'F' | b'G') => "failed",
            _ => "unknown",
        };
        dump.insert(key, state.to_owned());
    }
    dump
}
