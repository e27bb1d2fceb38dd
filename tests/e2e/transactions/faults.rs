//! Transactions of another database, connections that are cut around the commit, and sessions that
//! hold locks.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use oncegate::core::record::{State, Token};
use oncegate::core::rules::Operation;
use oncegate::core::store::{Command, Store};
use oncegate::sqlite::SqliteStore;
use oncegate::{Attempt, Completion, Entry, Failure, Handler, Message};
use oncegate_testkit::{CLIENTS, Client, End, Postgres, Step, Then, Till, Wire, unique};
use tokio::sync::Notify;

use crate::place::{Bench, Charge, LEASE, Place, key_of, postgres_store};
use crate::transactional::{After, Pay};

const ON_POSTGRES: [Client; 3] = [Client::TokioPostgres, Client::Sqlx, Client::Statement];

/// A till in another database than the place's, and its store there.
async fn elsewhere(place: &Place, folder: &std::path::Path) -> (Till, Arc<dyn Store>) {
    let client = place.till.client;
    if client == Client::Sqlite {
        let path = folder.join("elsewhere.db");
        let store = SqliteStore::open(&path).await.unwrap();
        return (
            Till::open(client, &path.display().to_string()).await,
            Arc::new(store),
        );
    }
    let database = unique("elsewhere").replace('-', "_");
    let postgres = Postgres::shared().await;
    postgres
        .connection()
        .await
        .batch_execute(&format!("CREATE DATABASE {database}"))
        .await
        .unwrap();
    let (server, _) = postgres.url().rsplit_once('/').unwrap();
    let url = format!("{server}/{database}");
    let store = postgres_store(&url).await;
    (Till::open(client, &url).await, Arc::new(store))
}

// invariant: transaction-believed
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_of_another_database_is_never_taken_for_success() {
    let folder = tempfile::tempdir().unwrap();
    for client in CLIENTS {
        let place = Place::patient(client).await;
        let (till, store) = elsewhere(&place, folder.path()).await;
        // There another owner has one of the payments, and one is completed.
        for (id, done) in [(2, false), (3, true)] {
            let token = Token::from_bits(fastrand::u128(..));
            let key = key_of(&place.scope, id);
            let lease = Duration::from_secs(3_600);
            let claim = Operation::Claim {
                token,
                lease,
                fingerprint: None,
                fenced: false,
                longest_lease: Duration::MAX,
            };
            let complete = Operation::Complete {
                token,
                fingerprint: None,
                result: "x".into(),
                retention: lease,
            };
            for operation in if done {
                vec![claim, complete]
            } else {
                vec![claim]
            } {
                store
                    .execute(vec![Command {
                        key: key.clone(),
                        operation,
                    }])
                    .await
                    .remove(0)
                    .unwrap();
            }
        }
        let bench = Bench::of(&[1, 2, 3]);
        bench.run(place.gate(LEASE), Charge(till.clone()), 3).await;
        assert!(till.charges().await.is_empty(), "{client}");
        assert_eq!(bench.letters.causes(), ["attempts_used_up"; 3], "{client}");
        let snapshot = place
            .store
            .read(vec![key_of(&place.scope, 1)])
            .await
            .remove(0)
            .unwrap()
            .unwrap();
        assert!(
            matches!(snapshot.record.state, State::Failed { .. }),
            "{client}: {snapshot:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_without_records_is_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    for client in [Client::TokioPostgres, Client::Sqlx, Client::Sqlite] {
        let place = Place::patient(client).await;
        let (mut till, _) = elsewhere(&place, folder.path()).await;
        let expected = if client == Client::Sqlite {
            till = Till::open(
                client,
                &folder.path().join("plain.db").display().to_string(),
            )
            .await;
            "not on a file of oncegate's records"
        } else {
            let (connection, driver) = tokio_postgres::connect(&till.url, tokio_postgres::NoTls)
                .await
                .unwrap();
            tokio::spawn(driver);
            connection
                .batch_execute("DROP TABLE oncegate_records")
                .await
                .unwrap();
            "the tables are missing"
        };
        let bench = Bench::of(&[1]);
        bench.run(place.gate(LEASE), Charge(till.clone()), 1).await;
        assert!(till.charges().await.is_empty(), "{client}");
        let snapshot = place
            .store
            .read(vec![key_of(&place.scope, 1)])
            .await
            .remove(0)
            .unwrap()
            .unwrap();
        let State::Failed { reason, .. } = snapshot.record.state else {
            panic!("{client}: {snapshot:?}")
        };
        assert!(reason.contains(expected), "{client}: {reason}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_whose_commits_a_power_cut_takes_back_is_refused() {
    let place = Place::new(Client::Sqlite).await;
    let gate = place.gate(LEASE);
    let message = Message::new(
        "payments",
        oncegate::Origin::Other("mine".into()),
        Some(r#"{"id":1}"#.into()),
    );
    let Entry::Granted(lease) = gate.enter(&message).await.unwrap() else {
        panic!()
    };
    let insert = format!("INSERT INTO {} VALUES (1, 1)", place.till.table);
    let charge = |synchronous: &str| {
        let mut connection = rusqlite::Connection::open(&place.till.url).unwrap();
        connection
            .pragma_update(None, "synchronous", synchronous)
            .unwrap();
        let transaction = connection.transaction().unwrap();
        transaction.execute(&insert, []).unwrap();
        lease.attempt().blocking_commit_with(transaction, &())
    };
    let refused = charge("NORMAL").unwrap_err().to_string();
    assert!(refused.contains("PRAGMA synchronous = FULL"), "{refused}");
    assert!(place.till.charges().await.is_empty());
    charge("FULL").unwrap();
    assert_eq!(lease.committed().await.unwrap(), Completion::Applied);
}

/// Where the first commit's connection is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cut {
    /// The commit never reaches the server.
    BeforeTheCommit,
    /// It has committed, and its answer is lost.
    BeforeTheAnswer,
}

// invariant: transaction-believed
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_cut_around_the_commit_leaves_one_effect() {
    for client in ON_POSTGRES {
        for cut in [Cut::BeforeTheCommit, Cut::BeforeTheAnswer] {
            let mut place = Place::new(client).await;
            let whole = AtomicBool::new(true);
            let wire = Wire::before(&place.till.url, move |_, step| {
                let here = match cut {
                    Cut::BeforeTheCommit => step.is_commit(),
                    Cut::BeforeTheAnswer => step.is_committed(),
                };
                if here && whole.swap(false, SeqCst) {
                    Then::Cut
                } else {
                    Then::Go
                }
            });
            let wire = wire.await;
            let direct = place.till.clone();
            wire.url().clone_into(&mut place.till.url);
            let bench = Bench::of(&[1]);
            bench
                .run(place.gate(LEASE), Charge(place.till.clone()), 1)
                .await;
            let (attempt, retries) = if cut == Cut::BeforeTheCommit {
                (2, 1)
            } else {
                (1, 0)
            };
            assert_eq!(direct.charges().await[&1], [attempt], "{client}, {cut:?}");
            assert_eq!(
                bench.counters.total("retries"),
                retries,
                "{client}, {cut:?}"
            );
            assert_eq!(
                bench.counters.get("handler_runs", "failed"),
                1,
                "{client}, {cut:?}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_falls_silent_at_the_commit_is_given_up() {
    for client in [Client::TokioPostgres, Client::Sqlx] {
        let mut place = Place::new(client).await;
        let silent = AtomicBool::new(false);
        let wire = Wire::before(&place.till.url, move |_, step| {
            if step.is_commit() && !silent.swap(true, SeqCst) {
                Then::Silence
            } else {
                Then::Go
            }
        });
        let wire = wire.await;
        let direct = place.till.clone();
        wire.url().clone_into(&mut place.till.url);
        let bench = Bench::of(&[1]);
        bench
            .run(
                place.gate(Duration::from_secs(1)),
                Charge(place.till.clone()),
                1,
            )
            .await;
        assert_eq!(direct.charges().await[&1].len(), 1, "{client}");
        assert_eq!(
            bench.counters.get("handler_runs", "succeeded"),
            1,
            "{client}"
        );
        assert_eq!(bench.counters.total("handler_runs"), 2, "{client}");
    }
}

// invariant: store-starts-late
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_lost_as_a_session_begins_is_waited_for() {
    for client in ON_POSTGRES {
        let cuts = Arc::new(AtomicU64::new(0));
        let cut = Arc::clone(&cuts);
        let server = Postgres::shared().await;
        let wire = Wire::before(server.url(), move |_, step| match step {
            Step::Asked(bytes) if is_session(bytes) && cut.fetch_add(1, SeqCst) < 3 => Then::Cut,
            _ => Then::Go,
        });
        let wire = wire.await;
        let place = Place::at(client, wire.url()).await;
        let bench = Bench::of(&[1]);
        let pay = place.transactional(Pay::new(&place, After::Return)).await;
        bench.run(place.gate(LEASE), pay, 1).await;
        assert!(
            cuts.load(SeqCst) > 3,
            "{client}: the session was not begun again"
        );
        assert_eq!(place.till.charges().await[&1].len(), 1, "{client}");
    }
}

/// Whether a session is written.
fn is_session(bytes: &[u8]) -> bool {
    const WRITE: &[u8] = b"INSERT INTO oncegate_sessions";
    bytes.windows(WRITE.len()).any(|window| window == WRITE)
}

// invariant: transaction-believed
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_is_still_under_way_is_waited_for() {
    for client in ON_POSTGRES {
        let mut place = Place::new(client).await;
        let arrive = Arc::new(Notify::new());
        let whole = AtomicBool::new(true);
        let late = Arc::clone(&arrive);
        let wire = Wire::before(&place.till.url, move |_, step| match step.is_commit() {
            true if whole.swap(false, SeqCst) => Then::Late(Arc::clone(&late)),
            _ => Then::Go,
        });
        let wire = wire.await;
        let direct = place.till.clone();
        wire.url().clone_into(&mut place.till.url);
        let bench = Bench::of(&[1]);
        let counters = Arc::clone(&bench.counters);
        // The record is locked by a transaction whose client is gone: reading it back waits for
        // that lock.
        let arriving = async move {
            counters.until("store_errors", 1).await;
            arrive.notify_one();
        };
        let run = bench.run(place.gate(LEASE), Charge(place.till.clone()), 1);
        tokio::join!(run, arriving);
        assert_eq!(direct.charges().await[&1], [1], "{client}");
        assert_eq!(bench.counters.total("retries"), 0, "{client}");
        assert_eq!(bench.counters.get("claims", "granted"), 1, "{client}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_holds_a_record_stops_no_other_key() {
    let place = Place::patient(Client::TokioPostgres).await;
    let key = key_of(&place.scope, 1);
    // Another session claims a payment, locks its record, and stalls.
    let token = Token::from_bits(fastrand::u128(..));
    let lease = Duration::from_millis(1);
    let operation = Operation::Claim {
        token,
        lease,
        fingerprint: None,
        fenced: false,
        longest_lease: Duration::MAX,
    };
    place
        .store
        .execute(vec![Command {
            key: key.clone(),
            operation,
        }])
        .await
        .remove(0)
        .unwrap();
    let mut stalled = Postgres::shared().await.connection().await;
    let transaction = stalled.transaction().await.unwrap();
    let lock = "SELECT 1 FROM oncegate_records WHERE key = $1 FOR UPDATE";
    transaction.query_one(lock, &[&key.as_str()]).await.unwrap();

    let bench = Bench::of(&[1, 2, 3, 4]);
    let list = Arc::clone(&bench.list);
    let counters = Arc::clone(&bench.counters);
    let others_go_on = async move {
        list.until_acked(3).await;
        counters.until("claims", 4).await;
        transaction.rollback().await.unwrap();
    };
    tokio::join!(
        bench.run(place.gate(LEASE), Charge(place.till.clone()), 4),
        others_go_on
    );
    assert_eq!(place.till.charges().await.len(), 4);
    assert_eq!(bench.counters.total("store_paused"), 0);
}

/// Sets up its session as users do, for better or worse.
struct InSession {
    url: String,
    begin: &'static str,
    seen: Arc<std::sync::Mutex<Vec<String>>>,
}

impl Handler for InSession {
    type Output = ();

    async fn handle(&self, _: &Message, attempt: &Attempt) -> Result<(), Failure> {
        let (mut client, driver) =
            tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await?;
        tokio::spawn(driver);
        client.batch_execute(self.begin).await?;
        let transaction = client.transaction().await?;
        let asked = attempt.commit_with(transaction, &()).await;
        self.seen
            .lock()
            .unwrap()
            .extend(asked.as_ref().err().map(ToString::to_string));
        // It returned the session as it was.
        let show =
            "SELECT current_setting('synchronous_commit') || current_setting('lock_timeout')";
        let shown = client.query_one(show, &[]).await?.get(0);
        self.seen.lock().unwrap().push(shown);
        asked
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_keeps_its_settings_and_a_read_only_one_is_told_why() {
    let place = Place::new(Client::TokioPostgres).await;
    for (id, begin, acked, seen) in [
        (
            1,
            "SET synchronous_commit = off; SET lock_timeout = '7s'",
            1,
            vec!["off7s"],
        ),
        (
            2,
            "SET default_transaction_read_only = on",
            1,
            vec!["accepts no writes", "on0"],
        ),
    ] {
        let bench = Bench::of(&[id]);
        let handler = InSession {
            url: place.till.url.clone(),
            begin,
            seen: Arc::default(),
        };
        let told = Arc::clone(&handler.seen);
        bench.run(place.gate(LEASE), handler, acked).await;
        let told = told.lock().unwrap();
        for (told, expected) in told.iter().zip(&seen) {
            assert!(told.contains(expected), "{told}");
        }
    }
}

/// Forgets its first transaction for good: the connection stays open, and the record stays locked.
struct Leaks(Till, Arc<std::sync::Mutex<Vec<tokio_postgres::Client>>>);

impl Handler for Leaks {
    type Output = String;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        if attempt.number() > 1 {
            let receipt = "second".to_owned();
            self.0
                .charge(message, attempt, &receipt, End::Commit, ready(()))
                .await?;
            return Ok(receipt);
        }
        let (client, driver) = tokio_postgres::connect(&self.0.url, tokio_postgres::NoTls).await?;
        tokio::spawn(driver);
        let completing = attempt.completing(&"first".to_owned());
        client
            .batch_execute("BEGIN; SET LOCAL idle_in_transaction_session_timeout = '1s'")
            .await?;
        client
            .execute(&format!("INSERT INTO {} VALUES (1, 1)", self.0.table), &[])
            .await?;
        let key = completing.key().as_str();
        let token = completing.token();
        let token = token.as_bytes().as_slice();
        let result = completing.result().as_ref();
        let complete = oncegate::postgres::PostgresStore::complete_sql();
        client
            .execute(complete, &[&key, &token, &result, &86_400_000_i64])
            .await?;
        self.1.lock().unwrap().push(client);
        Ok("first".to_owned())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_is_never_ended_is_ended_by_its_limit() {
    let place = Place::new(Client::TokioPostgres).await;
    let bench = Bench::of(&[1]);
    bench
        .run(
            place.gate(LEASE),
            Leaks(place.till.clone(), Arc::default()),
            1,
        )
        .await;
    assert_eq!(place.till.charges().await[&1], [2]);
    assert_eq!(bench.counters.total("retries"), 1);
}
