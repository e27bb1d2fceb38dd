//! Databases of PostgreSQL that were put back, and standbys that lagged.

// invariant (all tests): run-after-loss

use oncegate::postgres::PostgresStore;
use oncegate::{Entry, OnStoreLoss};
use oncegate_testkit::{Postgres, PostgresServer, Proxy, unique, until};

use super::payments::Payments;
use super::{LIMIT, MESSAGES, payment, until_refused};

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_postgresql_is_noticed_while_running_and_later() {
    let server = PostgresServer::start().await;
    let payments = Payments::new().await;
    let database = server.database().await;
    let (_, name) = database.url().rsplit_once('/').unwrap();
    let group = unique("loss");
    // The backup has the scope, and none of its records.
    let first = PostgresStore::connect(database.url()).await.unwrap();
    first.create_schema().await.unwrap();
    payments
        .gate(first, OnStoreLoss::Halt)
        .open()
        .await
        .unwrap();
    copy_database(&server, name, "backup").await;
    payments
        .run_all(
            &group,
            PostgresStore::connect(database.url()).await.unwrap(),
        )
        .await;
    let running = payments.gate(
        PostgresStore::connect(database.url()).await.unwrap(),
        OnStoreLoss::Halt,
    );
    running.open().await.unwrap();
    restore_database(&server, name, "backup").await;

    let refused = until_refused(&running, 1_000_000).await;
    assert!(refused.contains("accept loss"), "{refused}");
    let store = PostgresStore::connect(database.url()).await.unwrap();
    payments.accept(&store).await;
    drop(running);
    // Once more, with no consumer running.
    restore_database(&server, name, "backup").await;
    payments
        .notices_at_the_start(
            &group,
            PostgresStore::connect(database.url()).await.unwrap(),
        )
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standbys_takeover_raises_an_alarm_only_if_it_lagged() {
    for lags in [false, true] {
        let mut primary = PostgresServer::start().await;
        let payments = Payments::new().await;
        PostgresStore::connect(primary.url())
            .await
            .unwrap()
            .create_schema()
            .await
            .unwrap();
        let standby = PostgresServer::standby_of(&primary).await;
        let front = Proxy::before_address(address(primary.url())).await;
        let url = primary
            .url()
            .replace(&address(primary.url()), &front.address().to_string());
        let group = unique("loss");
        payments
            .gate(
                PostgresStore::connect(&url).await.unwrap(),
                OnStoreLoss::Halt,
            )
            .open()
            .await
            .unwrap();
        caught_up(&primary, &standby).await;
        let witness = standby.connection().await;
        if lags {
            follow_no_more(&witness).await;
        }
        payments
            .run_all(&group, PostgresStore::connect(&url).await.unwrap())
            .await;
        let running = payments.gate(
            PostgresStore::connect(&url).await.unwrap(),
            OnStoreLoss::Halt,
        );
        running.open().await.unwrap();
        if !lags {
            caught_up(&primary, &standby).await;
        }
        primary.kill();
        witness.batch_execute("SELECT pg_promote()").await.unwrap();
        front.point_at_address(address(standby.url()));
        if lags {
            assert!(
                until_refused(&running, 1_000_000)
                    .await
                    .contains("accept loss")
            );
            continue;
        }
        // A later sequence number shows that looks have gone on.
        payments.produce().await;
        let process = payments.start(
            &group,
            PostgresStore::connect(&url).await.unwrap(),
            OnStoreLoss::Halt,
        );
        process.watched.until("acks", MESSAGES).await;
        assert_eq!(process.watched.total("store_losses"), 0);
        assert!(matches!(
            running.enter(&payment(3_000_000)).await,
            Ok(Entry::Granted(_))
        ));
        process.stop().await;
        assert_eq!(payments.runs(), MESSAGES);
    }
}

/// Ends the replication to a standby.
pub(super) async fn follow_no_more(standby: &tokio_postgres::Client) {
    for statement in [
        "ALTER SYSTEM SET primary_conninfo = ''",
        "SELECT pg_reload_conf()",
    ] {
        standby.batch_execute(statement).await.unwrap();
    }
    until("the standby to follow no more", LIMIT, async || {
        let followed = "SELECT count(*) FROM pg_stat_wal_receiver";
        let receivers: i64 = standby.query_one(followed, &[]).await.unwrap().get(0);
        if receivers == 0 {
            Ok(())
        } else {
            Err("it does".to_owned())
        }
    })
    .await;
}

/// The host and port of a URL.
pub(super) fn address(url: &str) -> String {
    let (_, rest) = url.split_once('@').unwrap();
    rest.split_once('/').unwrap().0.to_owned()
}

/// Waits until the standby has replayed what the primary has written by now.
pub(super) async fn caught_up(primary: &Postgres, standby: &Postgres) {
    let written: String = primary
        .connection()
        .await
        .query_one("SELECT pg_current_wal_lsn()::text", &[])
        .await
        .unwrap()
        .get(0);
    let standby = standby.connection().await;
    until("the standby to catch up", LIMIT, async || {
        let replayed = "SELECT coalesce(pg_last_wal_replay_lsn() >= $1::text::pg_lsn, false)";
        let is_there: bool = standby
            .query_one(replayed, &[&written])
            .await
            .unwrap()
            .get(0);
        if is_there {
            Ok(())
        } else {
            Err(format!("not at {written} yet"))
        }
    })
    .await;
}

pub(super) async fn copy_database(server: &Postgres, from: &str, to: &str) {
    let admin = server.connection().await;
    until("the database to be free", LIMIT, async || {
        end_sessions(&admin, from).await;
        let copied = admin
            .batch_execute(&format!("CREATE DATABASE {to} TEMPLATE {from}"))
            .await;
        copied.map_err(|error| format!("{error:?}"))
    })
    .await;
}

pub(super) async fn restore_database(server: &Postgres, name: &str, backup: &str) {
    let admin = server.connection().await;
    until("the database to be free", LIMIT, async || {
        let dropped = admin
            .batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
            .await;
        dropped.map_err(|error| format!("{error:?}"))
    })
    .await;
    copy_database(server, backup, name).await;
}

async fn end_sessions(admin: &tokio_postgres::Client, database: &str) {
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1";
    admin.query(end, &[&database]).await.unwrap();
}
