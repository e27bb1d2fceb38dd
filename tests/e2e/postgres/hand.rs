//! What the tests share.

use std::sync::Arc;
use std::time::Duration;

use oncegate::postgres::PostgresStore;
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::record::Token;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_testkit::{Postgres, unique};

pub(crate) const HELD: Reply = Reply::Applied { recreated: false };

/// How long a server on a busy machine may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A store on this server, with its tables. It removes nothing by itself.
pub(crate) async fn store(postgres: &Postgres) -> Arc<PostgresStore> {
    let builder = PostgresStore::builder(postgres.url())
        .response_timeout(PATIENCE)
        .without_purge();
    let store = builder.connect().await.unwrap();
    store.create_schema().await.unwrap();
    Arc::new(store)
}

/// A scope of the test's own.
pub(crate) fn scope() -> Scope {
    Scope::new(unique("t")).unwrap()
}

/// A key of this number.
pub(crate) fn key(scope: &Scope, number: u128) -> StoreKey {
    StoreKey::new(scope, Digest::from_bytes(number.to_be_bytes()))
}

/// A token that no other call got.
pub(crate) fn token() -> Token {
    Token::from_bits(fastrand::u128(1..))
}

/// A lease of ten minutes.
pub(crate) fn claim(token: Token) -> Operation {
    Operation::Claim {
        token,
        lease: Duration::from_secs(600),
        fingerprint: None,
        fenced: false,
        longest_lease: Duration::MAX,
    }
}

pub(crate) fn complete(token: Token, result: impl Into<Vec<u8>>) -> Operation {
    let retention = Duration::from_secs(3_600);
    Operation::Complete {
        token,
        fingerprint: None,
        result: result.into().into(),
        retention,
    }
}

/// One operation on one key.
pub(crate) async fn apply(
    store: &dyn Store,
    key: &StoreKey,
    operation: Operation,
) -> Result<Reply, StoreError> {
    let mut answers = store
        .execute(vec![Command {
            key: key.clone(),
            operation,
        }])
        .await;
    assert_eq!(answers.len(), 1);
    answers.remove(0)
}

/// Whether it is the grant of this attempt.
pub(crate) fn granted_as(attempt: u8, reply: &Reply) -> bool {
    matches!(reply, Reply::Verdict { verdict: Verdict::Granted(grant), .. } if grant.attempt == attempt)
}

/// Whether it is the answer about a key completed with this result.
pub(crate) fn completed_with(result: &[u8], reply: &Reply) -> bool {
    matches!(reply, Reply::Verdict { verdict: Verdict::Completed { result: first }, .. } if first == result)
}
