//! The mark of an open circuit breaker in real stores: a restart in an outage finds it, and a
//! success removes it.

#[path = "../../../crates/oncegate-runtime/tests/runtime/list.rs"]
#[allow(dead_code, reason = "its other users need more of it")]
mod list;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use list::{Letters, List, Listed};
use oncegate::consumer::Breaker;
use oncegate::core::key::Scope;
use oncegate::core::store::{ScopeDescriptor, Store};
use oncegate::postgres::PostgresStore;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{Attempt, Consumer, Failure, Gate, Key, Message};
use oncegate_testkit::{Postgres, Redis, Watched, unique};

const MESSAGES: usize = 60;
/// Processes that run while what their handler needs is down.
const RESTARTS: usize = 4;

async fn is_marked(store: &dyn Store, scope: &Scope) -> bool {
    let text = store
        .descriptor(scope)
        .await
        .unwrap()
        .expect("a consumer has opened the scope");
    ScopeDescriptor::parse(scope, &text).unwrap().breaker_open
}

/// Each process is given the same messages and opens the store anew.
async fn survives_restarts(open: impl AsyncFn() -> Arc<dyn Store>) {
    let scope = Scope::new(unique("breaker")).unwrap();
    let letters = Arc::new(Letters::default());
    let attempts = Arc::new(Mutex::new(BTreeMap::new()));
    for process in 0..=RESTARTS {
        let is_up = process == RESTARTS;
        let seen = Arc::clone(&attempts);
        let handler = move |_: Message, attempt: Attempt| {
            if is_up {
                *seen
                    .lock()
                    .unwrap()
                    .entry(attempt.number())
                    .or_insert(0_usize) += 1;
            }
            async move {
                if is_up {
                    Ok(())
                } else {
                    Err(Failure::retry("it is down"))
                }
            }
        };
        let store = open().await;
        let watched = Watched::new();
        let payments = (0..MESSAGES).map(|id| ("", format!(r#"{{"id":{id}}}"#)));
        let list = List::of("payments", payments);
        let gate = Gate::new(scope.as_str(), Key::json(["id"]), Arc::clone(&store));
        let consumer = Consumer::new(Listed(Arc::clone(&list)), gate, handler)
            .dead_letters(Arc::clone(&letters))
            .max_attempts(3)
            .breaker(Breaker {
                first: Duration::from_millis(50),
                most: Duration::from_millis(100),
                ..Breaker::default()
            })
            .observer(Arc::clone(&watched) as _);
        let so_far = async {
            if is_up {
                list.until_acked(MESSAGES).await;
            } else {
                // Some probes have failed.
                watched.until("breaker_changes", 8).await;
            }
        };
        consumer.run_until(so_far).await.unwrap();
        let opened = watched.get("breaker_changes", "open");
        assert!(
            opened >= 1,
            "process {process} has not found the mark, or has never opened its breaker"
        );
        assert_eq!(
            is_marked(&*store, &scope).await,
            !is_up,
            "process {process}"
        );
    }
    assert_eq!(letters.causes(), [""; 0]);
    let attempts = attempts.lock().unwrap();
    assert!(attempts.keys().all(|attempt| *attempt <= 2), "{attempts:?}");
    assert!(
        attempts[&2] < 20,
        "only failures before the first opening count: {attempts:?}"
    );
}

// invariant: restarts-in-an-outage
#[tokio::test(flavor = "multi_thread")]
async fn restarts_in_an_outage_cost_no_attempts_with_redis() {
    let redis = Redis::shared().await;
    survives_restarts(async || {
        Arc::new(RedisStore::connect(redis.url()).await.unwrap()) as Arc<dyn Store>
    })
    .await;
}

// invariant: restarts-in-an-outage
#[tokio::test(flavor = "multi_thread")]
async fn restarts_in_an_outage_cost_no_attempts_with_postgres() {
    let postgres = Postgres::shared().await;
    let open = async || {
        let store = PostgresStore::connect(postgres.url()).await.unwrap();
        store.create_schema().await.unwrap();
        Arc::new(store) as Arc<dyn Store>
    };
    survives_restarts(open).await;
}

// invariant: restarts-in-an-outage
#[tokio::test(flavor = "multi_thread")]
async fn restarts_in_an_outage_cost_no_attempts_with_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("oncegate.db");
    survives_restarts(async || Arc::new(SqliteStore::open(&path).await.unwrap()) as Arc<dyn Store>)
        .await;
}
