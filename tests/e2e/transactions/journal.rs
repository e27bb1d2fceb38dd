//! The journal of the SQL stores: an entry is there if and only if its change is.

use std::future::ready;
use std::time::Duration;

use fastrand::Rng;
use oncegate::journal::JournalEntry;
use oncegate::postgres::PostgresStore;
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::record::{FencingToken, Record, Recovery, State, Token, TokenTag};
use oncegate_core::rules::{Operation, ReleaseCause, Reply};
use oncegate_core::store::{Command, Store};
use oncegate_testkit::{CLIENTS, Client, End, Postgres, unique, until};

use crate::lease::granted;
use crate::place::{LEASE, Place, key_of, take_over};

const HOUR: Duration = Duration::from_secs(3_600);

fn events(entries: &[JournalEntry]) -> Vec<&str> {
    entries.iter().map(|entry| &*entry.event).collect()
}

// invariant: journal-in-transaction
#[tokio::test(flavor = "multi_thread")]
async fn an_entry_is_in_the_transaction_of_its_completion() {
    for client in CLIENTS {
        let place = Place::patiently_journaled(client).await;
        let (gate, receipt, key) = (
            place.gate(LEASE),
            "receipt".to_owned(),
            key_of(&place.scope, 1),
        );
        let lease = granted(&gate, 1).await;
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
        assert_eq!(
            events(&place.history(&key).await),
            ["claimed"],
            "{client}: it was rolled back"
        );

        let lease = lease.committed().await.unwrap_err().into_lease();
        lease.release(Duration::ZERO, true, "once more").await;
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
        let entries = place.history(&key).await;
        assert_eq!(
            events(&entries),
            ["claimed", "released", "claimed", "completed"],
            "{client}"
        );
        let told = |entry: &JournalEntry| (entry.attempt, entry.reason.clone(), entry.best_effort);
        assert_eq!(
            told(&entries[1]),
            (Some(1), Some("once more".to_owned()), false),
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
                &receipt,
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

/// The entry that a change of a record must have made, without time and name; `None` if none.
fn expected(key: &StoreKey, before: Option<&Record>, after: &Record) -> Option<JournalEntry> {
    let owner = |record: &Record| match &record.state {
        State::Pending { token, .. } => ("pending", token.as_bytes().to_vec(), false),
        State::Released { by, .. } => ("released", by.0.to_vec(), false),
        State::Completed { by, .. } => ("completed", by.0.to_vec(), false),
        State::Failed {
            by, handed_over, ..
        } => ("failed", by.0.to_vec(), *handed_over),
    };
    let (word, bytes, _) = owner(after);
    if before.map(owner) == Some(owner(after)) {
        return None;
    }
    let run = (bytes[..4] != TokenTag::NONE.0).then(|| {
        bytes[..4]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    });
    let mut entry = JournalEntry {
        key: Some(key.to_string()),
        event: word.to_owned(),
        run,
        ..JournalEntry::default()
    };
    match &after.state {
        State::Pending {
            attempt,
            recovery,
            fencing_token,
            ..
        } => {
            let reopened = matches!(
                before,
                Some(Record {
                    state: State::Released {
                        by: TokenTag::NONE,
                        ..
                    },
                    ..
                })
            );
            entry.event = "claimed".to_owned();
            entry.attempt = Some(u32::from(*attempt));
            entry.fencing_token = fencing_token.map(|FencingToken(number)| number);
            entry.reason = match recovery {
                Recovery::Takeover => Some("takeover".to_owned()),
                Recovery::None | Recovery::Earlier => reopened.then(|| "reopened".to_owned()),
            };
        }
        State::Released {
            by,
            attempt,
            fencing_token,
            reason,
            ..
        } => {
            entry.event = if *by == TokenTag::NONE {
                "reopened".to_owned()
            } else {
                entry.event
            };
            entry.attempt = Some(u32::from(*attempt)).filter(|attempt| *attempt > 0);
            entry.fencing_token = fencing_token.map(|FencingToken(number)| number);
            entry.reason = Some(reason.clone());
        }
        State::Completed { .. } => {}
        State::Failed {
            attempt,
            handed_over,
            reason,
            ..
        } => {
            entry.event = if *handed_over {
                "handed_over".to_owned()
            } else {
                entry.event
            };
            entry.attempt = Some(u32::from(*attempt)).filter(|attempt| *attempt > 0);
            entry.reason = Some(reason.clone());
        }
    }
    if let Some(Record {
        state:
            State::Pending {
                token,
                attempt,
                fencing_token,
                ..
            },
        ..
    }) = before
        && token.tag().0[..] == bytes[..4]
    {
        entry.attempt = Some(u32::from(*attempt));
        entry.fencing_token = fencing_token.map(|FencingToken(number)| number);
    }
    Some(entry)
}

fn any_operation(rng: &mut Rng, record: Option<&Record>) -> Operation {
    let token = Token::from_bits(u128::from(rng.u32(1..4)) << 96 | 7);
    let (lease, retention) = (HOUR / 2, HOUR * 5 / 2);
    let (result, reason) = (b"result".to_vec().into(), "why".to_owned());
    match (rng.u8(..10), record) {
        (0..4, _) => Operation::Claim {
            token,
            lease,
            fingerprint: None,
            fenced: rng.bool(),
            longest_lease: Duration::MAX,
        },
        (4, _) => Operation::Extend { token, lease },
        (5, _) => Operation::Complete {
            token,
            fingerprint: None,
            result,
            retention,
        },
        (6, _) => Operation::Release {
            token,
            delay: HOUR * rng.u32(..2) / 2,
            end: [
                ReleaseCause::Failed,
                ReleaseCause::Interrupted,
                ReleaseCause::NotStarted,
            ][rng.usize(..3)],
            reason,
        },
        (7, _) => Operation::Fail {
            token,
            reason,
            retention,
        },
        (8, Some(record)) => Operation::Reopen {
            expected: record.clone(),
        },
        _ => Operation::HandOver { by: token.tag() },
    }
}

async fn apply(store: &dyn Store, key: &StoreKey, operation: Operation) -> Reply {
    store
        .execute(vec![Command {
            key: key.clone(),
            operation,
        }])
        .await
        .remove(0)
        .unwrap()
}

async fn read(store: &dyn Store, key: &StoreKey) -> Option<Record> {
    store
        .read(vec![key.clone()])
        .await
        .remove(0)
        .unwrap()
        .map(|snapshot| snapshot.record)
}

// invariant: journal-in-transaction
#[tokio::test(flavor = "multi_thread")]
async fn every_change_of_state_has_its_entry_and_nothing_else_has_one() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    // A server waits for its disk at each of them.
    for (client, steps) in [(Client::Sqlite, 6_000), (Client::TokioPostgres, 250)] {
        let (place, mut rng) = (
            Place::patiently_journaled(client).await,
            Rng::with_seed(seed),
        );
        let key = StoreKey::new(
            &Scope::new(&place.scope).unwrap(),
            Digest::from_bytes([7; 16]),
        );
        let (mut told, mut reached) = (Vec::new(), std::collections::BTreeSet::new());
        for step in 0..steps {
            if rng.u8(..4) == 0 {
                place.pass(&key, HOUR).await;
            }
            let before = read(&*place.store, &key).await;
            let operation = any_operation(&mut rng, before.as_ref());
            apply(&*place.store, &key, operation.clone()).await;
            let after = read(&*place.store, &key).await;
            let entry = after
                .as_ref()
                .and_then(|after| expected(&key, before.as_ref(), after));
            let mut entries = place.history(&key).await;
            entries
                .iter_mut()
                .for_each(|entry| (entry.at_ms, entry.by) = (0, None));
            // An expired record, and with it its journal, is removed at once or by the purge.
            if before.is_none() && entries.len() < told.len() {
                told.clear();
            }
            // A run that completes once more after its retention has an entry already, if its row
            // is still there.
            let again = |last: &JournalEntry| {
                before.is_none()
                    && entry.as_ref().is_some_and(|entry| {
                        entry.event == "completed"
                            && (&last.event, &last.run) == (&entry.event, &entry.run)
                    })
            };
            let said = told.last().is_some_and(again) && entries.len() == told.len();
            told.extend(entry.iter().filter(|_| !said).cloned());
            assert_eq!(
                entries, told,
                "seed {seed}, {client}, step {step}: {operation:?}\n{before:?}\n{after:?}"
            );
            reached.extend(entry.map(|entry| (entry.event, entry.reason)));
            if told.len() > 20 {
                told.clear();
                let purged = format!("DELETE FROM {} WHERE key = '{key}'", table(client));
                execute(&place, &purged).await;
                assert_eq!(
                    place.history(&key).await,
                    [],
                    "{client}: they go with their record"
                );
            }
        }
        // Claimed in three ways, and every end.
        assert!(
            reached.len() >= if client == Client::Sqlite { 8 } else { 5 },
            "seed {seed}, {client}: {reached:?}"
        );
    }
}

fn table(client: Client) -> &'static str {
    if client == Client::Sqlite {
        "records"
    } else {
        "oncegate_records"
    }
}

/// What an administrator does.
async fn execute(place: &Place, sql: &str) {
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
        let (lease, retention, result) = (HOUR, HOUR, b"result".to_vec());
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
async fn entries_go_with_their_record_and_nobody_reads_the_whole_journal_for_it() {
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
        let (whole, by_index): (i64, i64) = (row.get(0), row.get(1));
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
async fn a_role_that_runs_consumers_writes_a_journal_that_it_cannot_touch() {
    let postgres = Postgres::shared().await.database().await;
    let owner = PostgresStore::builder(postgres.url())
        .journaled()
        .connect()
        .await
        .unwrap();
    owner.create_schema().await.unwrap();
    let (client, role) = (postgres.connection().await, unique("worker"));
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
async fn a_journal_that_is_demanded_and_missing_is_refused_and_one_that_is_not_costs_nothing() {
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
