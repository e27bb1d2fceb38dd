//! The journal of the SQL stores: an entry is there if and only if its change is.

use std::future::ready;
use std::time::Duration;

use oncegate::Lease;
use oncegate::journal::JournalEntry;
use oncegate::postgres::PostgresStore;
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::record::Token;
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{Command, Store};
use oncegate_testkit::{CLIENTS, Client, End, Postgres, unique, until};

use crate::lease::granted;
use crate::place::{LEASE, Place, key_of, take_over};

pub(crate) const HOUR: Duration = Duration::from_secs(3_600);

fn events(entries: &[JournalEntry]) -> Vec<&str> {
    entries.iter().map(|entry| &*entry.event).collect()
}

const RECEIPT: &str = "receipt";

async fn charge(place: &Place, lease: &Lease, end: End) {
    let receipt = RECEIPT.to_owned();
    place
        .till
        .charge(lease.message(), lease.attempt(), &receipt, end, ready(()))
        .await
        .unwrap();
}

fn told(entry: &JournalEntry) -> (Option<u32>, Option<&str>, bool) {
    (entry.attempt, entry.reason.as_deref(), entry.best_effort)
}

// invariant: journal-in-transaction
#[tokio::test(flavor = "multi_thread")]
async fn an_entry_is_in_the_transaction_of_its_completion() {
    for client in CLIENTS {
        let place = Place::patiently_journaled(client).await;
        let gate = place.gate(LEASE);
        let key = key_of(&place.scope, 1);
        let lease = granted(&gate, 1).await;
        charge(&place, &lease, End::Forget).await;
        assert_eq!(
            events(&place.history(&key).await),
            ["claimed"],
            "{client}: it was rolled back"
        );

        let lease = lease.committed().await.unwrap_err().into_lease();
        lease.release(Duration::ZERO, true, "once more").await;
        let lease = granted(&gate, 1).await;
        charge(&place, &lease, End::Commit).await;
        let entries = place.history(&key).await;
        assert_eq!(
            events(&entries),
            ["claimed", "released", "claimed", "completed"],
            "{client}"
        );
        assert_eq!(
            told(&entries[1]),
            (Some(1), Some("once more"), false),
            "{client}"
        );
        assert_eq!(told(&entries[3]), (Some(2), None, false), "{client}");
        assert_eq!(
            [&entries[0].run, &entries[2].run],
            [&entries[1].run, &entries[3].run],
            "{client}"
        );
        assert_ne!(entries[1].run, entries[2].run, "{client}");

        // An owner that comes too late writes no entry.
        let lease = granted(&gate, 2).await;
        let key = key_of(&place.scope, 2);
        let meanwhile = take_over(&*place.store, key.clone(), "theirs");
        place
            .till
            .charge(
                lease.message(),
                lease.attempt(),
                &RECEIPT.to_owned(),
                End::Commit,
                meanwhile,
            )
            .await
            .unwrap_err();
        let entries = place.history(&key).await;
        assert_eq!(
            events(&entries),
            ["claimed", "reopened", "claimed", "completed"],
            "{client}"
        );
        assert_eq!(entries[2].reason.as_deref(), Some("reopened"), "{client}");
        assert_ne!(entries[3].run, entries[0].run, "{client}");
    }
}

pub(crate) async fn apply(store: &dyn Store, key: &StoreKey, operation: Operation) -> Reply {
    store
        .execute(vec![Command {
            key: key.clone(),
            operation,
        }])
        .await
        .remove(0)
        .unwrap()
}

/// What an administrator does.
pub(crate) async fn execute(place: &Place, sql: &str) {
    if place.till.client == Client::Sqlite {
        rusqlite::Connection::open(&place.till.url)
            .unwrap()
            .execute_batch(sql)
            .unwrap();
    } else {
        let (client, driver) = tokio_postgres::connect(&place.till.url, tokio_postgres::NoTls)
            .await
            .unwrap();
        tokio::spawn(driver);
        client.batch_execute(sql).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_has_an_entry_for_each_of_its_keys() {
    for client in [Client::Sqlite, Client::TokioPostgres] {
        let place = Place::patiently_journaled(client).await;
        let scope = Scope::new(&place.scope).unwrap();
        let keys: Vec<_> = (0..64_u128)
            .map(|number| StoreKey::new(&scope, Digest::from_bytes(number.to_be_bytes())))
            .collect();
        let token = Token::from_bits(7 << 96);
        let lease = HOUR;
        let retention = HOUR;
        let result = b"result".to_vec();
        for operation in [
            Operation::Claim {
                token,
                lease,
                fingerprint: None,
                fenced: false,
                longest_lease: Duration::MAX,
            },
            Operation::Extend { token, lease },
            Operation::Complete {
                token,
                fingerprint: None,
                result: result.into(),
                retention,
            },
        ] {
            let command = |key: &StoreKey| Command {
                key: key.clone(),
                operation: operation.clone(),
            };
            let replies = place
                .store
                .execute(keys.iter().map(command).collect())
                .await;
            assert!(
                replies
                    .into_iter()
                    .all(|reply| reply.unwrap() != Reply::NotOwner),
                "{client}"
            );
        }
        for key in &keys {
            let entries = place.history(key).await;
            assert_eq!(events(&entries), ["claimed", "completed"], "{client}");
            assert_eq!(entries[1].attempt, Some(1), "{client}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_go_with_their_record_by_an_index() {
    const RECORDS: u128 = 20;
    let place = Place::patiently_journaled(Client::TokioPostgres).await;
    let scope = Scope::new(&place.scope).unwrap();
    let keys: Vec<_> = (0..RECORDS)
        .map(|number| StoreKey::new(&scope, Digest::from_bytes(number.to_be_bytes())))
        .collect();
    let claim = Operation::Claim {
        token: Token::from_bits(1),
        lease: HOUR,
        fingerprint: None,
        fenced: false,
        longest_lease: Duration::MAX,
    };
    for key in &keys {
        apply(&*place.store, key, claim.clone()).await;
    }
    // In one session, which plans with an eye on how little there is.
    let purges = keys
        .iter()
        .map(|key| format!("DELETE FROM oncegate_records WHERE key = '{key}';"));
    execute(&place, &purges.collect::<String>()).await;
    assert_eq!(place.history(&keys[0]).await, []);
    let (client, driver) = tokio_postgres::connect(&place.till.url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(driver);
    let scans =
        "SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = 'oncegate_journal'";
    let read = until("the server has counted", HOUR / 60, async || {
        let row = client.query_one(scans, &[]).await.unwrap();
        let whole: i64 = row.get(0);
        let by_index: i64 = row.get(1);
        if by_index >= RECORDS as i64 {
            Ok(whole)
        } else {
            Err(format!("{by_index} by the index, {whole} whole"))
        }
    });
    // Making the index reads the empty table.
    assert!(read.await <= 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumers_role_writes_a_journal_that_it_cannot_touch() {
    let postgres = Postgres::shared().await.database().await;
    let owner = PostgresStore::builder(postgres.url())
        .journaled()
        .connect()
        .await
        .unwrap();
    owner.create_schema().await.unwrap();
    let client = postgres.connection().await;
    let role = unique("worker");
    client
        .batch_execute(&format!("CREATE ROLE \"{role}\" LOGIN"))
        .await
        .unwrap();
    client
        .batch_execute(&PostgresStore::grant_sql(&role))
        .await
        .unwrap();

    let worker = PostgresStore::builder(&postgres.url_as(&role))
        .journaled()
        .connect()
        .await
        .unwrap();
    worker.check().await.unwrap();
    let key = StoreKey::new(
        &Scope::new(unique("t")).unwrap(),
        Digest::from_bytes([1; 16]),
    );
    let claim = Operation::Claim {
        token: Token::from_bits(1),
        lease: HOUR,
        fingerprint: None,
        fenced: false,
        longest_lease: Duration::MAX,
    };
    assert_ne!(apply(&worker, &key, claim).await, Reply::NotOwner);
    let entries = owner.journal(&key, 10).await.unwrap();
    assert_eq!(
        (events(&entries), entries[0].by.as_deref()),
        (vec!["claimed"], Some("oncegate"))
    );

    let refused = worker.journal(&key, 10).await.unwrap_err().to_string();
    assert!(
        refused.contains("GRANT SELECT ON oncegate_journal"),
        "{refused}"
    );
    let (as_worker, driver) =
        tokio_postgres::connect(&postgres.url_as(&role), tokio_postgres::NoTls)
            .await
            .unwrap();
    tokio::spawn(driver);
    let denied = tokio_postgres::error::SqlState::INSUFFICIENT_PRIVILEGE;
    for touch in [
        "DELETE FROM oncegate_journal",
        "UPDATE oncegate_journal SET event = 'x'",
    ] {
        let error = as_worker.batch_execute(touch).await.unwrap_err();
        assert_eq!(error.code(), Some(&denied), "{touch}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_journal_is_refused_only_where_it_is_demanded() {
    let postgres = Postgres::shared().await.database().await;
    let plain = PostgresStore::connect(postgres.url()).await.unwrap();
    plain.create_schema().await.unwrap();
    plain.check().await.unwrap();
    let client = postgres.connection().await;
    let triggers = "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'oncegate_records'::regclass";
    assert_eq!(
        client
            .query_one(triggers, &[])
            .await
            .unwrap()
            .get::<_, i64>(0),
        0
    );

    let journaled = PostgresStore::builder(postgres.url())
        .journaled()
        .connect()
        .await
        .unwrap();
    let refused = journaled.check().await.unwrap_err().to_string();
    assert!(refused.contains("oncegate migrate --journal"), "{refused}");
    let change = journaled.schema_change().await.unwrap();
    assert_eq!(
        (change.from, &*change.sql),
        (Some(1), &*PostgresStore::journal_sql())
    );
    journaled.create_schema().await.unwrap();
    journaled.check().await.unwrap();
    // Made again, by hand, it stays as it is.
    client
        .batch_execute(&PostgresStore::journal_sql())
        .await
        .unwrap();
    assert_eq!(journaled.schema_change().await.unwrap().sql, "");
    // One trigger less, and something would be missing.
    client
        .batch_execute("ALTER TABLE oncegate_records DISABLE TRIGGER oncegate_journal_update")
        .await
        .unwrap();
    journaled.check().await.unwrap_err();
}
