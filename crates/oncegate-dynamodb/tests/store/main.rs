//! The store on real servers: the emulator Dynoxide, and moto as a second opinion.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod clocks;
mod faults;
mod kills;
mod losses;
mod moto;
mod proxy;
mod rules;
mod tables;

use std::time::{Duration, Instant};

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::{BehaviorVersion, Credentials, Region};
use bytes::Bytes;
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::record::Token;
use oncegate_core::rules::{Grant, Operation, ReleaseCause, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_dynamodb::{DynamoDbBuilder, DynamoDbStore};
use oncegate_servers::unique;

/// The time that a server on a busy machine may take: an answer that is late is another test.
const PATIENCE: Duration = Duration::from_secs(60);

/// The limit of every wait for a fact.
const LIMIT: Duration = Duration::from_secs(240);

const LEASE: Duration = Duration::from_secs(600);

/// A client of the server at this address, with credentials that emulators do not check.
fn client(endpoint: &str) -> Client {
    let config = aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::from_static("us-east-1"))
        .credentials_provider(Credentials::new("test", "test", None, None, "test"))
        .endpoint_url(endpoint)
        .build();
    Client::from_conf(config)
}

fn builder(endpoint: &str, table: &str) -> DynamoDbBuilder {
    DynamoDbStore::builder(&format!("dynamodb://{table}"))
        .client(client(endpoint))
        .response_timeout(PATIENCE)
}

/// A store in a new table.
async fn new_table(endpoint: &str) -> DynamoDbStore {
    let maker = builder(endpoint, &unique("once")).may_be_missing();
    let store = maker.connect().await.unwrap();
    store.create_table().await.unwrap();
    store
}

fn new_key() -> StoreKey {
    let scope = Scope::new("billing").unwrap();
    StoreKey::new(&scope, Digest::from_bytes(fastrand::u128(..).to_be_bytes()))
}

fn new_token() -> Token {
    Token::from_bits(fastrand::u128(..))
}

fn claim(token: Token) -> Operation {
    Operation::Claim {
        token,
        lease: LEASE,
        fingerprint: None,
        fenced: false,
        longest_lease: LEASE,
    }
}

fn complete(token: Token, result: &'static str) -> Operation {
    Operation::Complete {
        token,
        fingerprint: None,
        result: Bytes::from_static(result.as_bytes()),
        retention: LEASE,
    }
}

fn release(token: Token) -> Operation {
    Operation::Release {
        token,
        delay: Duration::ZERO,
        end: ReleaseCause::Failed,
        reason: "again".to_owned(),
    }
}

async fn apply(
    store: &dyn Store,
    key: &StoreKey,
    operation: Operation,
) -> Result<Reply, StoreError> {
    let key = key.clone();
    store.execute_one(Command { key, operation }).await
}

const APPLIED: Reply = Reply::Applied { recreated: false };

/// The verdict of a reply to a claim.
fn verdict(reply: Result<Reply, StoreError>) -> Verdict {
    match reply.unwrap() {
        Reply::Verdict { verdict, .. } => verdict,
        other => panic!("no reply to a claim: {other:?}"),
    }
}

fn granted(reply: Result<Reply, StoreError>) -> Grant {
    match verdict(reply) {
        Verdict::Granted(grant) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

/// Polls until the answer is `Ok`, and returns its value.
async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        match look().await {
            Ok(found) => return found,
            Err(answer) => {
                assert!(Instant::now() < deadline, "waited for {what}: {answer}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}
