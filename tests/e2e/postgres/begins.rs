//! A BEGIN that fails while the server executes what was sent behind it: a cancellation that
//! arrives late, or a pooler that answers an error and goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use deadpool_postgres::{Manager, Pool};
use oncegate::postgres::PostgresStore;
use oncegate_core::record::{State, Token};
use oncegate_core::rules::Operation;
use oncegate_core::store::{Store as _, StoreError};
use oncegate_testkit::{Postgres, Then, Wire};
use tokio_postgres::NoTls;

use crate::hand::{self, PATIENCE, apply, claim, complete, granted_as, key, scope, token};

/// A store whose transactions begin with BEGIN, and whose next ones are cancelled.
struct Cancelled {
    store: PostgresStore,
    left: Arc<AtomicUsize>,
    _wire: Wire,
}

impl Cancelled {
    async fn on(postgres: &Postgres) -> Self {
        let left = Arc::new(AtomicUsize::new(0));
        let cancels = Arc::clone(&left);
        let wire = Wire::before(postgres.url(), move |_, step| {
            let less = |left: usize| left.checked_sub(1);
            if step.is_begin() && cancels.fetch_update(SeqCst, SeqCst, less).is_ok() {
                Then::Cancel
            } else {
                Then::Go
            }
        });
        let wire = wire.await;
        let manager = Manager::new(wire.url().parse().unwrap(), NoTls);
        let pool = Pool::builder(manager).max_size(8).build().unwrap();
        let builder = PostgresStore::from_pool(pool)
            .response_timeout(PATIENCE)
            .without_purge();
        Self {
            store: builder.connect().await.unwrap(),
            left,
            _wire: wire,
        }
    }

    /// Cancels the next BEGINs. From now on, the given ones are left.
    fn cancel(&self, begins: usize) {
        self.left.store(begins, SeqCst);
    }

    fn left(&self) -> usize {
        self.left.load(SeqCst)
    }
}

async fn state_of(direct: &PostgresStore, key: &oncegate_core::key::StoreKey) -> Option<State> {
    direct
        .read(vec![key.clone()])
        .await
        .remove(0)
        .unwrap()
        .map(|snapshot| snapshot.record.state)
}

// invariant: begin-fails
#[tokio::test]
async fn what_follows_a_cancelled_begin_is_looked_up() {
    let postgres = Postgres::shared().await;
    let direct = hand::store(&postgres).await;
    let cancelled = Cancelled::on(&postgres).await;
    let key = key(&scope(), 1);
    let owner = token();
    cancelled.cancel(1);
    let reply = apply(&cancelled.store, &key, claim(owner)).await.unwrap();
    assert_eq!(cancelled.left(), 0);
    assert!(granted_as(1, &reply), "{reply:?}");
    let held = state_of(&direct, &key).await;
    assert!(
        matches!(held, Some(State::Pending { token, .. }) if token == owner),
        "{held:?}"
    );
    cancelled.cancel(1);
    let reply = apply(&cancelled.store, &key, complete(owner, b"done"))
        .await
        .unwrap();
    assert_eq!((cancelled.left(), reply), (0, hand::HELD));
}

// invariant: begin-fails
#[tokio::test]
async fn a_claim_that_may_have_been_granted_is_unknown() {
    let postgres = Postgres::shared().await;
    let direct = hand::store(&postgres).await;
    let cancelled = Cancelled::on(&postgres).await;
    let key = key(&scope(), 1);
    let owner = token();
    cancelled.cancel(usize::MAX);
    let error = apply(&cancelled.store, &key, claim(owner))
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Unknown { .. }), "{error}");
    let held = state_of(&direct, &key).await;
    assert!(
        matches!(held, Some(State::Pending { token, .. }) if token == owner),
        "{held:?}"
    );
}

// invariant: begin-fails
#[tokio::test]
async fn a_cancelled_begin_leaves_no_row_behind() {
    let postgres = Postgres::shared().await;
    let direct = hand::store(&postgres).await;
    let cancelled = Cancelled::on(&postgres).await;
    let key = key(&scope(), 1);
    cancelled.cancel(1);
    // It is executed by the rules, which insert a row to lock it.
    let extend = Operation::Extend {
        token: token(),
        lease: PATIENCE,
    };
    let error = apply(&cancelled.store, &key, extend).await.unwrap_err();
    assert_eq!(
        (cancelled.left(), error.class()),
        (0, "unavailable"),
        "{error}"
    );
    let client = postgres.connection().await;
    let count = "SELECT count(*) FROM oncegate_records WHERE key = $1";
    let rows: i64 = client
        .query_one(count, &[&key.as_str()])
        .await
        .unwrap()
        .get(0);
    assert_eq!(rows, 0);
    assert_eq!(state_of(&direct, &key).await, None);
}

/// Earlier releases have left such rows behind.
// invariant: begin-fails
#[tokio::test]
async fn a_row_without_an_owner_is_no_record() {
    let postgres = Postgres::shared().await;
    let store = hand::store(&postgres).await;
    let scope = scope();
    let client = postgres.connection().await;
    let insert = "INSERT INTO oncegate_records (key, state, expires_at_ms, owner, attempt, recovery, handed_over, reason) \
                  VALUES ($1, 'pending', 0, ''::bytea, 0, 'none', false, '')";
    let keys = [1, 2, 3].map(|number| key(&scope, number));
    for key in &keys {
        client.execute(insert, &[&key.as_str()]).await.unwrap();
    }
    assert_eq!(state_of(&store, &keys[0]).await, None);
    let owner: Token = token();
    assert!(granted_as(
        1,
        &apply(&*store, &keys[0], claim(owner)).await.unwrap()
    ));
    assert_eq!(
        apply(&*store, &keys[0], complete(owner, b"done"))
            .await
            .unwrap(),
        hand::HELD
    );
    let extend = Operation::Extend {
        token: owner,
        lease: PATIENCE,
    };
    let reply = apply(&*store, &keys[1], extend).await;
    assert!(reply.is_ok(), "{reply:?}");
    assert!(granted_as(
        1,
        &apply(&*store, &keys[2], claim(owner)).await.unwrap()
    ));
}

/// What shows that a transaction has begun is shown by every transaction there.
// invariant: begin-fails
#[tokio::test]
async fn sessions_that_make_every_transaction_deferrable_are_refused() {
    let postgres = Postgres::shared().await.database().await;
    let store = hand::store(&postgres).await;
    let (_, name) = postgres.url().rsplit_once('/').unwrap();
    let client = postgres.connection().await;
    let alter = format!("ALTER DATABASE {name} SET default_transaction_deferrable = on");
    client.batch_execute(&alter).await.unwrap();
    let extend = Operation::Extend {
        token: token(),
        lease: PATIENCE,
    };
    let pool = Pool::builder(Manager::new(postgres.url().parse().unwrap(), NoTls))
        .build()
        .unwrap();
    let pooled = PostgresStore::from_pool(pool)
        .response_timeout(PATIENCE)
        .without_purge();
    let pooled = pooled.connect().await.unwrap();
    let refused = apply(&pooled, &key(&scope(), 1), extend.clone())
        .await
        .unwrap_err();
    assert_eq!(refused.class(), "refused", "{refused}");
    assert!(
        refused
            .to_string()
            .contains("default_transaction_deferrable"),
        "{refused}"
    );
    // Sessions of our own have their own setting.
    drop(store);
    let own = hand::store(&postgres).await;
    apply(&*own, &key(&scope(), 1), extend).await.unwrap();
}
