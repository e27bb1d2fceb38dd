//! What becomes of expired records.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use oncegate::archive::Expired;
use oncegate::postgres::PostgresStore;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::{State, Token};
use oncegate_core::rules::Reply;
use oncegate_core::store::{Command, Store};
use oncegate_testkit::PostgresServer;
use tokio_postgres::Client;

use crate::hand::{self, HELD, PATIENCE, apply, claim, complete, granted_as, key, scope, token};

/// Longer than the retention of these tests' records.
const LONG: Duration = Duration::from_secs(7_200);

const LOCK: &str = "SELECT 1 FROM oncegate_records WHERE key = $1 FOR UPDATE";

/// Completes keys of these numbers, with their own key as the result, and lets `expired` of them
/// expire.
async fn fill(
    store: &PostgresStore,
    scope: &Scope,
    numbers: u128,
    expired: usize,
) -> Vec<StoreKey> {
    let keys: Vec<_> = (0..numbers).map(|number| key(scope, number)).collect();
    let done = |key: &StoreKey| Command {
        key: key.clone(),
        operation: complete(token(), key.as_str()),
    };
    assert!(
        store
            .execute(keys.iter().map(done).collect())
            .await
            .iter()
            .all(Result::is_ok)
    );
    let expired: Vec<_> = keys[..expired]
        .iter()
        .map(|key| (key.clone(), LONG))
        .collect();
    store.pass(&expired).await.unwrap();
    keys
}

async fn rows(client: &Client) -> i64 {
    client
        .query_one("SELECT count(*) FROM oncegate_records", &[])
        .await
        .unwrap()
        .get(0)
}

#[tokio::test]
async fn it_removes_what_has_expired_and_passes_over_what_is_locked() {
    let server = PostgresServer::start().await;
    let store = hand::store(&server).await;
    let keys = fill(&store, &scope(), 2_500, 1_500).await;
    let mut client = server.connection().await;
    let transaction = client.transaction().await.unwrap();
    transaction
        .query_one(LOCK, &[&keys[7].as_str()])
        .await
        .unwrap();
    assert_eq!(store.purge().await.unwrap(), 1_499);
    transaction.rollback().await.unwrap();
    assert_eq!(store.purge().await.unwrap(), 1);
    let left = store
        .read(keys)
        .await
        .into_iter()
        .filter(|snapshot| matches!(snapshot, Ok(Some(_))))
        .count();
    assert_eq!((left, rows(&client).await), (1_000, 1_000));
}

/// The records in three partitions, by their keys.
const PARTITIONED: &str = "\
ALTER TABLE oncegate_records RENAME TO whole;
CREATE TABLE oncegate_records (LIKE whole INCLUDING ALL) PARTITION BY HASH (key);
CREATE TABLE first PARTITION OF oncegate_records FOR VALUES WITH (MODULUS 3, REMAINDER 0);
CREATE TABLE second PARTITION OF oncegate_records FOR VALUES WITH (MODULUS 3, REMAINDER 1);
CREATE TABLE third PARTITION OF oncegate_records FOR VALUES WITH (MODULUS 3, REMAINDER 2);
DROP TABLE whole;";

// invariant: purge-too-slow
#[tokio::test]
async fn a_partitioned_table_is_purged_in_all_its_partitions() {
    let server = PostgresServer::start().await;
    let store = hand::store(&server).await;
    let mut client = server.connection().await;
    client.batch_execute(PARTITIONED).await.unwrap();
    let keys = fill(&store, &scope(), 2_500, 1_500).await;
    let transaction = client.transaction().await.unwrap();
    transaction
        .query_one(LOCK, &[&keys[7].as_str()])
        .await
        .unwrap();
    assert_eq!(store.purge().await.unwrap(), 1_499);
    transaction.rollback().await.unwrap();
    assert_eq!(store.purge().await.unwrap(), 1);
    let left = store
        .read(keys)
        .await
        .into_iter()
        .filter(|snapshot| matches!(snapshot, Ok(Some(_))))
        .count();
    assert_eq!((left, rows(&client).await), (1_000, 1_000));
}

// invariant: purge-too-slow
#[tokio::test]
async fn it_walks_early_and_until_nothing_expired_is_left() {
    const HOUR: Duration = Duration::from_secs(3_600);
    let server = PostgresServer::start().await;
    hand::store(&server).await;
    let store = PostgresStore::builder(server.url())
        .purge_every(HOUR)
        .connect()
        .await
        .unwrap();
    let client = server.connection().await;
    // A backlog that came while nothing was removed, and what comes behind it.
    for _ in 0..2 {
        fill(&store, &scope(), 12_000, 10_000).await;
        let start = Instant::now();
        while rows(&client).await > 4_000 {
            assert!(
                start.elapsed() < PATIENCE,
                "{} rows are left",
                rows(&client).await
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test]
async fn the_age_of_the_oldest_expired_record_is_told_while_present() {
    let server = PostgresServer::start().await;
    let store = hand::store(&server).await;
    let mut client = server.connection().await;
    assert_eq!(store.upkeep().oldest_expired, None, "it has never looked");
    let keys = fill(&store, &scope(), 20, 10).await;
    let transaction = client.transaction().await.unwrap();
    transaction
        .query_one(LOCK, &[&keys[7].as_str()])
        .await
        .unwrap();
    assert_eq!(store.purge().await.unwrap(), 9);
    let age = store.upkeep().oldest_expired.unwrap();
    // They expired two hours less their retention of one hour ago.
    assert!(age >= LONG / 2 - Duration::from_secs(1), "{age:?}");
    transaction.rollback().await.unwrap();
    assert_eq!(store.purge().await.unwrap(), 1);
    assert!(store.upkeep().oldest_expired.unwrap() < LONG / 4);
    assert_eq!(store.purge().await.unwrap(), 0);
    assert_eq!(store.upkeep().oldest_expired, Some(Duration::ZERO));
}

#[tokio::test]
async fn it_works_in_the_background_and_one_process_at_a_time() {
    const REST: Duration = Duration::from_millis(50);
    const TURNS: i64 = 40;
    let server = PostgresServer::start().await;
    hand::store(&server).await;
    let client = server.connection().await;
    let count = "CREATE TABLE turns (at_ms bigint); \
                 CREATE FUNCTION count_turn() RETURNS trigger LANGUAGE plpgsql AS \
                 $$ BEGIN INSERT INTO turns VALUES (NEW.purged_at_ms); RETURN NEW; END $$; \
                 CREATE TRIGGER count_turn AFTER UPDATE ON oncegate_schema \
                 FOR EACH ROW EXECUTE FUNCTION count_turn()";
    client.batch_execute(count).await.unwrap();
    let start = Instant::now();
    let mut stores = Vec::new();
    for _ in 0..4 {
        stores.push(
            PostgresStore::builder(server.url())
                .purge_every(REST)
                .connect()
                .await
                .unwrap(),
        );
    }
    fill(&stores[0], &scope(), 2_000, 1_500).await;
    loop {
        let turns: i64 = client
            .query_one("SELECT count(*) FROM turns", &[])
            .await
            .unwrap()
            .get(0);
        if rows(&client).await == 500 && turns >= TURNS {
            break;
        }
        assert!(
            start.elapsed() < PATIENCE,
            "{} rows are left after {turns} turns",
            rows(&client).await
        );
        tokio::task::yield_now().await;
    }
    let closest = "SELECT min(at_ms - before_ms) FROM \
                   (SELECT at_ms, lag(at_ms) OVER (ORDER BY at_ms) AS before_ms FROM turns) AS t";
    let closest: i64 = client.query_one(closest, &[]).await.unwrap().get(0);
    assert!(
        closest >= REST.as_millis() as i64,
        "two walks began within {closest} ms"
    );
}

// invariant: archive-in-postgres
#[tokio::test]
async fn what_it_removes_was_archived_before() {
    let server = PostgresServer::start().await;
    hand::store(&server).await;
    let archived = Arc::new(Mutex::new(BTreeMap::new()));
    let broken = Arc::new(AtomicBool::new(true));
    let shelf = Arc::clone(&archived);
    let out_of_order = Arc::clone(&broken);
    let archive = move |expired: &[Expired]| {
        if out_of_order.load(Ordering::Relaxed) {
            return Err("no paper".into());
        }
        let expired = expired
            .iter()
            .map(|expired| (expired.key.as_str().to_owned(), expired.record.clone()));
        shelf.lock().unwrap().extend(expired);
        Ok(())
    };
    let store = PostgresStore::builder(server.url())
        .without_purge()
        .archive(archive);
    let store = store.connect().await.unwrap();
    let keys = fill(&store, &scope(), 1_000, 600).await;
    let mut client = server.connection().await;
    let refused = store.purge().await.unwrap_err();
    assert!(refused.to_string().contains("no paper"), "{refused}");
    assert_eq!(rows(&client).await, 1_000, "what is not archived stays");

    broken.store(false, Ordering::Relaxed);
    let transaction = client.transaction().await.unwrap();
    transaction
        .query_one(LOCK, &[&keys[7].as_str()])
        .await
        .unwrap();
    assert_eq!(store.purge().await.unwrap(), 599);
    transaction.rollback().await.unwrap();
    assert_eq!(store.purge().await.unwrap(), 1);
    assert_eq!(rows(&client).await, 400);
    let archived = archived.lock().unwrap();
    let expired: BTreeSet<&str> = keys[..600].iter().map(StoreKey::as_str).collect();
    assert!(archived.keys().map(String::as_str).eq(expired));
    for (key, record) in &*archived {
        let State::Completed { result, .. } = &record.state else {
            panic!("{record:?}")
        };
        assert_eq!(result, key.as_bytes());
    }
}

// invariant: key-blocked-in-sql
#[tokio::test(flavor = "multi_thread")]
async fn it_takes_nothing_from_a_claim_that_comes_at_the_same_moment() {
    const KEYS: u128 = 200;
    let server = PostgresServer::start().await;
    let stores = [hand::store(&server).await, hand::store(&server).await];
    for round in 0..8 {
        let scope = scope();
        let keys = fill(&stores[0], &scope, KEYS, KEYS as usize).await;
        let purges = stores
            .each_ref()
            .map(|store| tokio::spawn(purge_twice(Arc::clone(store))));
        let claims = keys
            .iter()
            .flat_map(|key| stores.each_ref().map(|store| (key, store)));
        let claims = claims.map(|(key, store)| tokio::spawn(take(Arc::clone(store), key.clone())));
        let taken: Vec<Option<(StoreKey, Token)>> = join_all(claims)
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect();
        join_all(purges)
            .await
            .into_iter()
            .for_each(|purged| purged.unwrap());
        let taken: BTreeMap<String, Token> = taken
            .into_iter()
            .flatten()
            .map(|(key, owner)| (key.as_str().to_owned(), owner))
            .collect();
        assert_eq!(taken.len(), keys.len(), "round {round}");
        for key in &keys {
            let owner = taken[key.as_str()];
            // Neither removed nor taken over.
            assert_eq!(
                apply(&*stores[1], key, complete(owner, b"")).await.unwrap(),
                HELD,
                "{key}"
            );
        }
    }
}

async fn purge_twice(store: Arc<PostgresStore>) {
    for _ in 0..2 {
        store.purge().await.unwrap();
    }
}

/// Claims an expired key; of two one gets it, as if there had never been a record.
async fn take(store: Arc<PostgresStore>, key: StoreKey) -> Option<(StoreKey, Token)> {
    let owner = token();
    let reply = apply(&*store, &key, claim(owner)).await.unwrap();
    let granted = granted_as(1, &reply);
    assert!(
        granted || matches!(reply, Reply::Verdict { .. }),
        "{reply:?}"
    );
    granted.then_some((key, owner))
}
