//! What the store holds at the end of a run.

use std::collections::{BTreeMap, HashMap};

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_dynamodb::types::AttributeValue;

use super::stage::{Server, Stage};
use crate::DynamoDbServer;
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
            Server::DynamoDb(server) => dynamodb_dump(server, &prefix).await,
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

/// A client with credentials that the emulator does not check.
pub(super) fn dynamodb_client(server: &DynamoDbServer) -> Client {
    let config = aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::from_static("us-east-1"))
        .credentials_provider(Credentials::new("test", "test", None, None, "test"))
        .endpoint_url(server.endpoint())
        .build();
    Client::from_conf(config)
}

async fn dynamodb_dump(server: &DynamoDbServer, prefix: &str) -> BTreeMap<String, String> {
    let client = dynamodb_client(server);
    let scan = client.scan().table_name("fire").consistent_read(true);
    let mut pages = scan.into_paginator().items().send();
    let mut dump = BTreeMap::new();
    while let Some(item) = pages.next().await {
        let item = item.expect("the table can be read");
        if let (Some(id), Some(state)) = (text(&item, "id"), text(&item, "state"))
            && id.starts_with(prefix)
        {
            dump.insert(id, state);
        }
    }
    dump
}

fn text(item: &HashMap<String, AttributeValue>, name: &str) -> Option<String> {
    item.get(name).and_then(|value| value.as_s().ok()).cloned()
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
