//! Custom consumer loops, which use a lease without the runtime.

use std::future::ready;
use std::time::{Duration, Instant};

use oncegate::{Completion, Entry, Gate, Lease, Message, Origin};
use oncegate_testkit::{CLIENTS, Client, End, Postgres, unique};
use tokio_postgres::IsolationLevel::RepeatableRead;

use crate::place::{LEASE, Place, key_of, take_over};

async fn enter(gate: &Gate, id: u64) -> Entry {
    let message = Message::new(
        "payments",
        Origin::Other("mine".into()),
        Some(format!(r#"{{"id":{id}}}"#).into()),
    );
    gate.enter(&message).await.unwrap()
}

pub(crate) async fn granted(gate: &Gate, id: u64) -> Lease {
    loop {
        match enter(gate, id).await {
            Entry::Granted(lease) => return lease,
            // A retry is due a millisecond after its release.
            Entry::Busy { retry_in } => tokio::time::sleep(retry_in).await,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_tells_what_its_transaction_came_to() {
    for client in CLIENTS {
        let place = Place::patient(client).await;
        let gate = place.gate(LEASE);
        let receipt = "receipt".to_owned();
        let lease = granted(&gate, 1).await;
        place
            .till
            .charge(
                lease.message(),
                lease.attempt(),
                &receipt,
                End::Commit,
                ready(()),
            )
            .await
            .unwrap();
        assert_eq!(
            lease.committed().await.unwrap(),
            Completion::Applied,
            "{client}"
        );
        let Entry::Completed(stored) = enter(&gate, 1).await else {
            panic!("{client}")
        };
        assert_eq!(stored.decode::<String>().unwrap(), receipt, "{client}");

        let lease = granted(&gate, 2).await;
        place
            .till
            .charge(
                lease.message(),
                lease.attempt(),
                &receipt,
                End::Forget,
                ready(()),
            )
            .await
            .unwrap();
        let not_committed = lease.committed().await.unwrap_err();
        not_committed
            .into_lease()
            .release(Duration::ZERO, true, "once more")
            .await;
        let lease = granted(&gate, 2).await;
        assert_eq!(lease.attempt().number(), 2, "{client}");

        let meanwhile = take_over(&*place.store, key_of(&place.scope, 2), "theirs");
        let refused = place
            .till
            .charge(
                lease.message(),
                lease.attempt(),
                &receipt,
                End::Commit,
                meanwhile,
            )
            .await;
        assert!(refused.is_err(), "{client}");
        assert_eq!(
            lease.committed().await.unwrap(),
            Completion::NotOwner,
            "{client}"
        );
        assert_eq!(
            place.till.charges().await.into_keys().collect::<Vec<_>>(),
            [1],
            "{client}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_commits_a_transaction_and_reads_it_back() {
    let place = Place::patient(Client::TokioPostgres).await;
    let gate = place.gate(LEASE);
    let (mut client, driver) = tokio_postgres::connect(&place.till.url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(driver);
    let insert = format!("INSERT INTO {} VALUES (1, 1)", place.till.table);

    let lease = granted(&gate, 1).await;
    let transaction = client.transaction().await.unwrap();
    transaction.execute(&insert, &[]).await.unwrap();
    transaction.batch_execute("SAVEPOINT a").await.unwrap();
    assert!(transaction.batch_execute("SELECT 1 / 0").await.is_err());
    // The transaction is aborted, which the handler has overlooked.
    let not_committed = lease.commit_with(transaction, &()).await.unwrap_err();
    assert!(
        not_committed.to_string().contains("25P02"),
        "{not_committed}"
    );

    let transaction = client.transaction().await.unwrap();
    transaction.execute(&insert, &[]).await.unwrap();
    let lease = not_committed.into_lease();
    assert_eq!(
        lease.commit_with(transaction, &()).await.unwrap(),
        Completion::Applied
    );
    assert_eq!(place.till.charges().await[&1], [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_the_commit_finds_out_rolls_both_back() {
    let place = Place::patient(Client::TokioPostgres).await;
    let gate = place.gate(LEASE);
    let (mut client, driver) = tokio_postgres::connect(&place.till.url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(driver);
    let once = format!(
        "ALTER TABLE {} ADD UNIQUE (id) DEFERRABLE INITIALLY DEFERRED",
        place.till.table
    );
    client.batch_execute(&once).await.unwrap();
    let lease = granted(&gate, 1).await;
    let transaction = client.transaction().await.unwrap();
    let insert = format!("INSERT INTO {} VALUES (1, 1), (1, 1)", place.till.table);
    transaction.execute(&insert, &[]).await.unwrap();
    let not_committed = lease.commit_with(transaction, &()).await.unwrap_err();
    assert!(
        not_committed.to_string().contains("23505"),
        "{not_committed}"
    );
    assert!(place.till.charges().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_in_a_repeatable_read_makes_its_commit_fail() {
    let place = Place::patient(Client::TokioPostgres).await;
    let gate = place.gate(Duration::from_secs(3));
    let (mut client, driver) = tokio_postgres::connect(&place.till.url, tokio_postgres::NoTls)
        .await
        .unwrap();
    tokio::spawn(driver);
    let lease = granted(&gate, 1).await;
    let transaction = client
        .build_transaction()
        .isolation_level(RepeatableRead)
        .start()
        .await
        .unwrap();
    transaction.batch_execute("SELECT 1").await.unwrap();
    let expiry = async || {
        place
            .store
            .read(vec![key_of(&place.scope, 1)])
            .await
            .remove(0)
            .unwrap()
            .unwrap()
            .record
            .expires_at
    };
    let began = Instant::now();
    let begun = expiry().await;
    while expiry().await == begun {
        assert!(began.elapsed() < LEASE, "there was no heartbeat");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let not_committed = lease.commit_with(transaction, &()).await.unwrap_err();
    assert!(
        not_committed.to_string().contains("40001"),
        "{not_committed}"
    );
    // In the default isolation it does not matter.
    let transaction = client.transaction().await.unwrap();
    assert_eq!(
        not_committed
            .into_lease()
            .commit_with(transaction, &())
            .await
            .unwrap(),
        Completion::Applied
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_of_few_rights_completes_in_its_transaction() {
    let place = Place::patient(Client::TokioPostgres).await;
    let postgres = Postgres::shared().await;
    let role = unique("payer").replace('-', "_");
    let admin = postgres.connection().await;
    let grant = format!(
        "CREATE ROLE {role} LOGIN; GRANT INSERT ON {} TO {role}; GRANT SELECT, UPDATE ON oncegate_records TO {role}",
        place.till.table
    );
    admin.batch_execute(&grant).await.unwrap();
    let mut till = place.till.clone();
    till.url = postgres.url_as(&role);
    let lease = granted(&place.gate(LEASE), 1).await;
    till.charge(
        lease.message(),
        lease.attempt(),
        &"receipt".to_owned(),
        End::Commit,
        ready(()),
    )
    .await
    .unwrap();
    assert_eq!(lease.committed().await.unwrap(), Completion::Applied);
    admin
        .batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
        .await
        .unwrap();
}
