//! What becomes of each error of a real server.

use std::time::{Duration, Instant};

use deadpool_postgres::{Manager, Pool};
use oncegate::postgres::PostgresStore;
use oncegate_core::rules::Operation;
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_testkit::{Postgres, PostgresServer};
use tokio_postgres::{Client, NoTls};

use crate::hand::{self, PATIENCE, apply, claim, complete, granted_as, key, scope, token};

const LOCK: &str = "SELECT 1 FROM oncegate_records WHERE key = $1 FOR UPDATE";

/// Asks until a count is what it must become.
async fn until(client: &Client, count: &str, expected: i64) {
    let start = Instant::now();
    while client.query_one(count, &[]).await.unwrap().get::<_, i64>(0) < expected {
        assert!(
            start.elapsed() < PATIENCE,
            "{count} does not reach {expected}"
        );
        tokio::task::yield_now().await;
    }
}

/// Sessions of stores that wait for a lock.
const WAITING: &str = "SELECT count(*) FROM pg_stat_activity \
                       WHERE application_name = 'oncegate' AND wait_event_type = 'Lock'";

#[tokio::test]
async fn each_error_says_what_it_means_and_repeats_no_data() {
    let server = PostgresServer::start().await;
    let store = hand::store(&server).await;
    let client = server.connection().await;
    // The numbers of a sequence are not rolled back, so the trigger knows how often it has failed.
    let trigger = "CREATE SEQUENCE tries; \
                   CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                   IF nextval('tries') > TG_ARGV[1]::integer THEN RETURN NEW; END IF; \
                   RAISE EXCEPTION 'canary' USING ERRCODE = TG_ARGV[0]; END $$";
    client.batch_execute(trigger).await.unwrap();
    for (number, (state, failures, class)) in [
        ("40001", 2, "granted"),
        ("40P01", 1, "granted"),
        ("40001", 100, "unavailable"),
        ("57014", 100, "unavailable"),
        ("57P03", 100, "unavailable"),
        ("53000", 100, "unavailable"),
        ("53100", 100, "unavailable"),
        ("53200", 100, "unavailable"),
        ("53300", 100, "unavailable"),
        ("55P03", 100, "unavailable"),
        ("58030", 100, "unavailable"),
        ("25006", 100, "unavailable"),
        ("08006", 100, "unavailable"),
        ("XX001", 100, "unreadable"),
        ("XX002", 100, "unreadable"),
        ("42501", 100, "refused"),
        ("23514", 100, "refused"),
        ("P0001", 100, "refused"),
    ]
    .into_iter()
    .enumerate()
    {
        let create = format!(
            "ALTER SEQUENCE tries RESTART; CREATE TRIGGER fail BEFORE INSERT ON oncegate_records \
             FOR EACH ROW EXECUTE FUNCTION fail('{state}', {failures})"
        );
        client.batch_execute(&create).await.unwrap();
        let key = key(&scope(), number as u128);
        let owner = token();
        match apply(&*store, &key, claim(owner)).await {
            Ok(reply) => assert!(
                class == "granted" && granted_as(1, &reply),
                "{state}: {reply:?}"
            ),
            Err(error) => {
                assert_eq!(error.class(), class, "{state}: {error}");
                assert!(error.to_string().contains(state), "{state}: {error}");
                // A missing right is reported in the server's words, which name a table and no
                // data.
                assert!(
                    state == "42501" || !format!("{error:?}").contains("canary"),
                    "{error:?}"
                );
            }
        }
        client
            .batch_execute("DROP TRIGGER fail ON oncegate_records")
            .await
            .unwrap();
        assert!(
            granted_as(1, &apply(&*store, &key, claim(owner)).await.unwrap()),
            "{state}"
        );
    }
}

#[tokio::test]
async fn a_deadlock_with_another_session_passes() {
    let server = PostgresServer::start_with(&["deadlock_timeout=5s"]).await;
    let store = hand::store(&server).await;
    let scope = scope();
    let mut stranger = server.connection().await;
    let watcher = server.connection().await;
    // The store's session is the one that finds the deadlock, and ends it.
    stranger
        .batch_execute("SET deadlock_timeout = '1h'")
        .await
        .unwrap();
    let owner = token();
    let commands = || {
        (1..=2).map(|number| Command {
            key: key(&scope, number),
            operation: claim(owner),
        })
    };
    assert!(
        store
            .execute(commands().collect())
            .await
            .iter()
            .all(Result::is_ok)
    );
    let transaction = stranger.transaction().await.unwrap();
    transaction
        .query_one(LOCK, &[&key(&scope, 2).as_str()])
        .await
        .unwrap();
    let cross = async {
        // The store has locked the first row, and waits for the second.
        until(&watcher, WAITING, 1).await;
        transaction
            .query_one(LOCK, &[&key(&scope, 1).as_str()])
            .await
            .unwrap();
        transaction.commit().await.unwrap();
    };
    let (replies, ()) = tokio::join!(store.execute(commands().collect()), cross);
    assert!(
        replies
            .iter()
            .all(|reply| granted_as(1, reply.as_ref().unwrap())),
        "{replies:?}"
    );
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    until(&watcher, deadlocks, 1).await;
}

#[tokio::test]
async fn a_cancelled_statement_was_not_executed() {
    let server = PostgresServer::start().await;
    let store = hand::store(&server).await;
    let mut stranger = server.connection().await;
    let watcher = server.connection().await;
    let key = key(&scope(), 1);
    let owner = token();
    assert!(granted_as(
        1,
        &apply(&*store, &key, claim(owner)).await.unwrap()
    ));
    let transaction = stranger.transaction().await.unwrap();
    transaction.query_one(LOCK, &[&key.as_str()]).await.unwrap();
    let cancel = async {
        until(&watcher, WAITING, 1).await;
        let cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity \
                      WHERE application_name = 'oncegate' AND wait_event_type = 'Lock'";
        watcher.query_one(cancel, &[]).await.unwrap();
    };
    let (cancelled, ()) = tokio::join!(apply(&*store, &key, complete(owner, b"")), cancel);
    let cancelled = cancelled.unwrap_err();
    assert!(
        cancelled.class() == "unavailable" && cancelled.to_string().contains("57014"),
        "{cancelled}"
    );
    transaction.rollback().await.unwrap();
    assert_eq!(
        apply(&*store, &key, complete(owner, b"")).await.unwrap(),
        hand::HELD
    );
}

#[tokio::test]
async fn who_is_one_too_many_is_told_to_come_again() {
    let postgres = Postgres::shared().await;
    hand::store(&postgres).await;
    let role = oncegate_testkit::unique("crowd").replace('-', "_");
    let client = postgres.connection().await;
    client
        .batch_execute(&format!("CREATE ROLE {role} LOGIN CONNECTION LIMIT 0"))
        .await
        .unwrap();
    let crowded = PostgresStore::connect(&postgres.url_as(&role))
        .await
        .unwrap_err();
    assert!(
        crowded.class() == "unavailable" && crowded.to_string().contains("53300"),
        "{crowded}"
    );
    client
        .batch_execute(&format!("ALTER ROLE {role} CONNECTION LIMIT -1"))
        .await
        .unwrap();
    PostgresStore::connect(&postgres.url_as(&role))
        .await
        .unwrap();
    let database = postgres.url().rsplit_once('/').unwrap().0;
    let missing = PostgresStore::connect(&format!("{database}/nowhere"))
        .await
        .unwrap_err();
    assert!(
        missing.class() == "refused" && missing.to_string().contains("3D000"),
        "{missing}"
    );
    client
        .batch_execute(&format!("DROP ROLE {role}"))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_full_disk_refuses_and_forgets_nothing() {
    let server = PostgresServer::start().await;
    let disk = server.small_disk(8);
    let store = hand::store(&server).await;
    let client = server.connection().await;
    let place = format!(
        "CREATE TABLESPACE small LOCATION '{}'",
        disk.path().display()
    );
    client.batch_execute(&place).await.unwrap();
    client
        .batch_execute("ALTER TABLE oncegate_records SET TABLESPACE small")
        .await
        .unwrap();
    let scope = scope();
    let owner = token();
    let first = key(&scope, 0);
    assert!(granted_as(
        1,
        &apply(&*store, &first, claim(owner)).await.unwrap()
    ));
    // Another session fills the disk; uncommitted rows take space too.
    let fill = "CREATE TABLE filler (word text) TABLESPACE small; \
                INSERT INTO filler SELECT repeat(md5(random()::text), 60) FROM generate_series(1, 50000)";
    client
        .batch_execute("CREATE TABLE filler (word text) TABLESPACE small")
        .await
        .unwrap();
    let full = client
        .batch_execute(fill.split_once("; ").unwrap().1)
        .await
        .unwrap_err();
    assert_eq!(full.code().unwrap().code(), "53100");
    let result = || {
        std::iter::repeat_with(|| fastrand::u8(..))
            .take(1_500)
            .collect::<Vec<u8>>()
    };
    let mut done = Vec::new();
    let refused = loop {
        let key = key(&scope, 1 + done.len() as u128);
        match apply(&*store, &key, complete(owner, result())).await {
            Ok(_) => done.push(key),
            Err(error) => break error,
        }
        assert!(done.len() < 10_000, "the disk is not full");
    };
    assert!(
        refused.class() == "unavailable" && refused.to_string().contains("53100"),
        "{refused}"
    );
    client
        .batch_execute("DROP TABLE filler; CHECKPOINT")
        .await
        .unwrap();
    assert_eq!(
        apply(&*store, &first, complete(owner, result()))
            .await
            .unwrap(),
        hand::HELD
    );
    let known = store.read(done.clone()).await;
    assert!(known.iter().all(|snapshot| matches!(snapshot, Ok(Some(_)))));
    drop((store, client));
    drop(server);
    drop(disk);
}

#[tokio::test]
async fn a_server_that_takes_no_writes_is_waited_for() {
    let mut server = PostgresServer::start().await;
    let store = hand::store(&server).await;
    let client = server.connection().await;
    let key = key(&scope(), 1);
    let owner = token();
    // As hosts do when their disk is nearly full: it holds at once, for sessions that are there
    // too.
    let reload = "SELECT pg_reload_conf()";
    client
        .batch_execute("ALTER SYSTEM SET default_transaction_read_only = on")
        .await
        .unwrap();
    client.batch_execute(reload).await.unwrap();
    let shown = "SELECT count(*) FROM pg_settings WHERE name = 'default_transaction_read_only' AND setting = 'on'";
    until(&client, shown, 1).await;
    let read_only = until_refused(&store, &key, owner).await;
    assert!(
        read_only.class() == "unavailable" && read_only.to_string().contains("no writes"),
        "{read_only}"
    );
    let no_target = PostgresStore::connect(server.url()).await.unwrap_err();
    assert!(
        no_target.class() == "unavailable" && no_target.to_string().contains("no writes"),
        "{no_target}"
    );
    client
        .batch_execute("SET default_transaction_read_only = off")
        .await
        .unwrap();
    client
        .batch_execute("ALTER SYSTEM RESET default_transaction_read_only")
        .await
        .unwrap();
    client.batch_execute(reload).await.unwrap();
    let start = Instant::now();
    while apply(&*store, &key, claim(owner)).await.is_err() {
        assert!(start.elapsed() < PATIENCE, "the store does not come back");
    }

    server.kill();
    server.start_again_as_standby().await;
    let config = server.url().parse().unwrap();
    let pool = Pool::builder(Manager::new(config, NoTls)).build().unwrap();
    let standby = PostgresStore::from_pool(pool).connect().await.unwrap();
    let refused = apply(&standby, &key, claim(owner)).await.unwrap_err();
    assert!(
        refused.class() == "unavailable" && refused.to_string().contains("25006"),
        "{refused}"
    );
    let refused = standby.read(vec![key]).await.remove(0).unwrap_err();
    assert!(
        refused.class() == "unavailable" && refused.to_string().contains("standby"),
        "{refused}"
    );
    let refused = standby.check().await.unwrap_err();
    assert!(
        refused.class() == "refused" && refused.to_string().contains("primary"),
        "{refused}"
    );
}

/// Claims until the store's session sees the change.
async fn until_refused(
    store: &PostgresStore,
    key: &oncegate_core::key::StoreKey,
    owner: oncegate_core::record::Token,
) -> StoreError {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < PATIENCE, "the store is never refused");
        if let Err(error) = apply(store, key, claim(owner)).await {
            return error;
        }
    }
}

#[tokio::test]
async fn a_server_that_is_stopping_is_waited_for() {
    let mut server = PostgresServer::start().await;
    hand::store(&server).await;
    // It stops when its last client has gone, and takes no new ones meanwhile.
    let last = server.connection().await;
    server.process().signal("TERM");
    let start = Instant::now();
    let stopping = loop {
        assert!(start.elapsed() < PATIENCE, "it takes clients still");
        let connected = PostgresStore::builder(server.url())
            .connect_timeout(Duration::from_secs(30))
            .connect();
        if let Err(error) = connected.await {
            break error;
        }
    };
    assert!(
        stopping.class() == "unavailable" && stopping.to_string().contains("57P03"),
        "{stopping}"
    );
    drop(last);
}

// invariant: outage-of-one-key
#[tokio::test]
async fn a_damaged_row_is_an_error_of_its_key_alone() {
    let server = PostgresServer::start().await;
    let store = hand::store(&server).await;
    let scope = scope();
    let owner = token();
    let commands = |operation: &Operation| -> Vec<Command> {
        let command = |number| Command {
            key: key(&scope, number),
            operation: operation.clone(),
        };
        (0..20).map(command).collect()
    };
    // As the server answers for a row on a damaged page.
    let damage = format!(
        "CREATE FUNCTION damage() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         IF NEW.key = '{}' THEN RAISE EXCEPTION 'invalid page' USING ERRCODE = 'XX001'; END IF; RETURN NEW; END $$; \
         CREATE TRIGGER damage BEFORE INSERT OR UPDATE ON oncegate_records FOR EACH ROW EXECUTE FUNCTION damage()",
        key(&scope, 13)
    );
    server
        .connection()
        .await
        .batch_execute(&damage)
        .await
        .unwrap();
    let claims = store.execute(commands(&claim(owner))).await;
    let completions = store.execute(commands(&complete(owner, b"done"))).await;
    for (number, (claimed, completed)) in claims.iter().zip(&completions).enumerate() {
        if number == 13 {
            assert!(
                matches!(claimed, Err(StoreError::Unreadable { .. })),
                "{claimed:?}"
            );
            assert!(
                matches!(completed, Err(StoreError::Unreadable { .. })),
                "{completed:?}"
            );
        } else {
            assert!(
                granted_as(1, claimed.as_ref().unwrap()),
                "{number}: {claimed:?}"
            );
            assert!(completed.is_ok(), "{number}: {completed:?}");
        }
    }
}
