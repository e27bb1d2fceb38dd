//! Losses that the scope's descriptor does not show: only records that a process knows to be there
//! show them.

// invariant (all tests): run-after-loss

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use oncegate::core::key::Scope;
use oncegate::core::store::Store;
use oncegate::postgres::PostgresStore;
use oncegate::redis::RedisStore;
use oncegate::{Completion, Entry, Gate, GateError, OnStoreLoss};
use oncegate_testkit::{Postgres, PostgresServer, Proxy, ProxyMode as Mode, RedisServer, until};
use redis::aio::MultiplexedConnection;
use tokio_postgres::NoTls;

use super::payments::Payments;
use super::postgres::{address, caught_up, follow_no_more};
use super::{LIMIT, payment, until_refused};

/// The sequence number of the scope in the store.
async fn sequence(store: &dyn Store, scope: &Scope) -> u64 {
    let text = store
        .descriptor(scope)
        .await
        .unwrap()
        .expect("the scope is open");
    oncegate::core::store::ScopeDescriptor::parse(scope, &text)
        .unwrap()
        .sequence
}

/// Completes one payment after another, whatever happens to the store, until a claim is refused.
/// Returns why.
async fn complete_until_refused(gate: Gate, completed: Arc<AtomicU64>) -> String {
    loop {
        let id = completed.load(Relaxed);
        match gate.enter(&payment(id)).await {
            Ok(Entry::Granted(lease)) => {
                // What the other server makes of it counts as well.
                drop(lease.complete(&()).await);
                completed.fetch_add(1, Relaxed);
            }
            Ok(_) => drop(completed.fetch_add(1, Relaxed)),
            Err(GateError::Store(error)) if error.class() == "refused" => return error.to_string(),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

/// Promotes a standby that lacks this many completions of a process, which completes others
/// without a pause, and waits until the process notices it.
async fn a_lag_is_noticed(completions: u64) {
    let mut primary = PostgresServer::start().await;
    let payments = Payments::new().await;
    let direct = PostgresStore::connect(primary.url()).await.unwrap();
    direct.create_schema().await.unwrap();
    let standby = PostgresServer::standby_of(&primary).await;
    let front = Proxy::before_address(address(primary.url())).await;
    let url = primary
        .url()
        .replace(&address(primary.url()), &front.address().to_string());
    let gate = payments.gate(
        PostgresStore::connect(&url).await.unwrap(),
        OnStoreLoss::Halt,
    );
    gate.open().await.unwrap();
    caught_up(&primary, &standby).await;
    let completed = Arc::new(AtomicU64::new(0));
    let working = tokio::spawn(complete_until_refused(gate, Arc::clone(&completed)));
    // The lag is shorter than the time between two sequence numbers: it begins just after the
    // process has raised its own.
    let started_at = sequence(&direct, &payments.scope).await;
    until(
        "the sequence number to rise",
        LIMIT,
        async || match sequence(&direct, &payments.scope).await {
            same if same == started_at => Err(format!("{same}")),
            _ => Ok(()),
        },
    )
    .await;
    let witness = standby.connection().await;
    follow_no_more(&witness).await;
    until_completed(&completed, completed.load(Relaxed) + completions).await;
    primary.kill();
    witness.batch_execute("SELECT pg_promote()").await.unwrap();
    front.point_at_address(address(standby.url()));

    let refused = working.await.unwrap();
    assert!(refused.contains("accept loss"), "{refused}");
}

/// A process remembers about one completion for each tenth of a second: these take several.
#[tokio::test(flavor = "multi_thread")]
async fn a_brief_standby_lag_is_noticed_by_a_process_without_pause() {
    a_lag_is_noticed(500).await;
}

/// It remembers the last one before a call that had no answer, too.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_lag_of_a_moment_is_noticed_by_a_call_that_fails() {
    a_lag_is_noticed(2).await;
}

/// The name of connections through a proxy.
const BEHIND: &str = "behind-the-proxy";

/// Ends all connections to the `former` server, and makes new ones to the `next` one.
async fn lead_to(front: &Proxy, former: &PostgresServer, next: &PostgresServer) {
    front.set(Mode::Refuse);
    let client = former.connection().await;
    until("the connections to end", LIMIT, async || {
        let connected = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1";
        match client
            .query_one(connected, &[&BEHIND])
            .await
            .unwrap()
            .get::<_, i64>(0)
        {
            0 => Ok(()),
            count => Err(format!("{count} are open")),
        }
    })
    .await;
    front.point_at_address(address(next.url()));
    front.set(Mode::Pass);
}

/// The address of a pair leads to its standby for a moment: what that one lacks is no loss.
// invariant: loss-undetected
#[tokio::test(flavor = "multi_thread")]
async fn an_old_descriptor_of_a_standby_is_no_loss() {
    let primary = PostgresServer::start().await;
    let payments = Payments::new().await;
    let direct = PostgresStore::connect(primary.url()).await.unwrap();
    direct.create_schema().await.unwrap();
    let standby = PostgresServer::standby_of(&primary).await;
    let front = Proxy::before_address(address(primary.url())).await;
    let url = primary
        .url()
        .replace(&address(primary.url()), &front.address().to_string());
    // Connections of our own ask for a server that takes writes when they are opened; those of a
    // pool, or behind a pooler, may lead to another one.
    let url = format!("{url}?application_name={BEHIND}");
    let pool = Pool::builder(Manager::new(url.parse().unwrap(), NoTls))
        .build()
        .unwrap();
    let store = PostgresStore::from_pool(pool).connect().await.unwrap();
    let gate = payments.gate(store.clone(), OnStoreLoss::Halt);
    gate.open().await.unwrap();
    caught_up(&primary, &standby).await;
    follow_no_more(&standby.connection().await).await;
    let opened_at = sequence(&direct, &payments.scope).await;
    let Ok(Entry::Granted(lease)) = gate.enter(&payment(1)).await else {
        panic!("it is new")
    };
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    until(
        "the sequence number to rise",
        LIMIT,
        async || match sequence(&direct, &payments.scope).await {
            same if same == opened_at => Err(format!("{same}")),
            _ => Ok(()),
        },
    )
    .await;
    lead_to(&front, &primary, &standby).await;
    // Each look of the gate reads what this does.
    let refused = until("an answer of the standby", LIMIT, async || {
        match store.descriptor(&payments.scope).await {
            Err(error) if error.to_string().contains("standby") => Ok(error),
            other => Err(format!("{other:?}")),
        }
    });
    assert!(refused.await.is_away());
    lead_to(&front, &standby, &primary).await;
    let granted = until("the primary to answer", LIMIT, async || {
        match gate.enter(&payment(2)).await {
            Ok(Entry::Granted(lease)) => Ok(lease),
            other => Err(format!("{other:?}")),
        }
    });
    assert_eq!(
        granted.await.complete(&()).await.unwrap(),
        Completion::Applied
    );
    let held = direct
        .descriptor(&payments.scope)
        .await
        .unwrap()
        .expect("the scope is open");
    assert!(!held.contains("halt"), "{held}");
}

/// Records and descriptors are in two tables.
#[tokio::test(flavor = "multi_thread")]
async fn deleted_records_are_noticed_by_a_process_that_knows_one() {
    let database = Postgres::shared().await.database().await;
    let payments = Payments::new().await;
    let store = PostgresStore::connect(database.url()).await.unwrap();
    store.create_schema().await.unwrap();
    let gate = payments.gate(store.clone(), OnStoreLoss::Halt);
    gate.open().await.unwrap();
    let Ok(Entry::Granted(lease)) = gate.enter(&payment(1)).await else {
        panic!("it is new")
    };
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    let client = database.connection().await;
    assert_eq!(
        client
            .execute("DELETE FROM oncegate_records", &[])
            .await
            .unwrap(),
        1
    );
    assert!(
        until_refused(&gate, 1_000_000)
            .await
            .contains("a completed record is missing")
    );
}

async fn until_completed(completed: &AtomicU64, count: u64) {
    until(
        "payments to be completed",
        LIMIT,
        async || match completed.load(Relaxed) {
            number if number >= count => Ok(()),
            number => Err(format!("{number} are")),
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answering_duplicates_alone_notices_that_a_record_is_gone() {
    let server = RedisServer::start().await;
    let payments = Payments::new().await;
    let connect = async || RedisStore::connect(server.url()).await.unwrap();
    let mut redis = server.connection().await;
    let all = format!("{}:*", payments.scope);
    let keys = async |redis: &mut MultiplexedConnection| -> Vec<String> {
        redis::cmd("KEYS")
            .arg(&all)
            .query_async(redis)
            .await
            .unwrap()
    };
    let first = payments.gate(connect().await, OnStoreLoss::Halt);
    first.open().await.unwrap();
    let before = keys(&mut redis).await;
    let Ok(Entry::Granted(lease)) = first.enter(&payment(1)).await else {
        panic!("it is new")
    };
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    drop(first);
    let after = keys(&mut redis).await;
    let record = after
        .iter()
        .find(|key| !before.contains(key))
        .expect("the record");

    let answering = payments.gate(connect().await, OnStoreLoss::Halt);
    answering.open().await.unwrap();
    assert!(matches!(
        answering.enter(&payment(1)).await,
        Ok(Entry::Completed(_))
    ));
    // Nothing but a check for losses reads the record again.
    let mut idle_seconds = 0_u64;
    until("a check to read the record", LIMIT, async || {
        let now = redis::cmd("OBJECT")
            .arg("IDLETIME")
            .arg(record)
            .query_async(&mut redis)
            .await
            .unwrap();
        let before = std::mem::replace(&mut idle_seconds, now);
        if now < before {
            Ok(())
        } else {
            Err(format!("unread for {now} s"))
        }
    })
    .await;
    let deleted: u64 = redis::cmd("DEL")
        .arg(record)
        .query_async(&mut redis)
        .await
        .unwrap();
    assert_eq!(deleted, 1);
    assert!(
        until_refused(&answering, 1_000_000)
            .await
            .contains("a completed record is missing")
    );
}
