//! Batches in one transaction beside other transactions, and with connections that break.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use oncegate::core::record::State;
use oncegate::postgres::{Isolation, PostgresTransaction};
use oncegate::{BatchLimits, BatchMessage, Failure, Transactional, TransactionalBatchHandler};
use oncegate_testkit::{Client, Payment, Step, Then, Wire};
use tokio::sync::Barrier;

use crate::pay_all::{Bad, PayAll};
use crate::place::{Bench, LEASE, Place, key_of};
use crate::transactional::{After, GIVEN, ISOLATIONS, Pay, pool};

fn once(ids: impl IntoIterator<Item = i64>) -> BTreeMap<i64, Vec<i32>> {
    ids.into_iter().map(|id| (id, vec![1])).collect()
}

/// Two workers get the same payments at the same time, in another order. Returns the number of
/// retries.
async fn two_workers(place: &Place, work: [Transactional; 2], pay: &PayAll, what: &str) -> u64 {
    const PAYMENTS: i64 = 90;
    let first: Vec<i64> = (1..=PAYMENTS).collect();
    let second: Vec<i64> = (1..=PAYMENTS).rev().collect();
    let one = Bench::of(&first);
    let other = Bench::of(&second);
    let [first_work, second_work] = work;
    let acks = first.len();
    tokio::join!(
        one.run(place.gate(LEASE), first_work, acks),
        other.run(place.gate(LEASE), second_work, acks)
    );
    // Each at its first attempt: another transaction in the way costs none.
    assert_eq!(place.till.charges().await, once(1..=PAYMENTS), "{what}");
    // Of the two deliveries of a payment one is the duplicate.
    assert_eq!(pay.told.lock().unwrap().len(), acks, "{what}");
    let total = |name| one.counters.total(name) + other.counters.total(name);
    assert_eq!(total("completions"), acks as u64, "{what}");
    assert_eq!(
        (one.letters.causes(), other.letters.causes()),
        (vec![], vec![]),
        "{what}"
    );
    total("retries")
}

// invariant: transactional-beside-another, conflict-costs-attempt
#[tokio::test(flavor = "multi_thread")]
async fn batches_with_equal_payments_charge_once_and_share_results() {
    for client in GIVEN {
        let place = Place::new(client).await;
        let pay = PayAll::new(&place, Bad::No);
        let work = [
            place.batched(10, pay.clone()).await,
            place.batched(7, pay.clone()).await,
        ];
        let retries = two_workers(&place, work, &pay, &client.to_string()).await;
        assert_eq!(retries, 0, "{client}");
    }
    for isolation in ISOLATIONS {
        let place = Place::new(Client::TokioPostgres).await;
        let pay = PayAll::new(&place, Bad::No);
        let work = [10, 7].map(|most| {
            let transactions = place
                .postgres()
                .transactions()
                .unwrap()
                .isolation(isolation);
            Transactional::batched(transactions, BatchLimits::new(most), pay.clone())
        });
        let retries = two_workers(&place, work, &pay, &format!("{isolation:?}")).await;
        // In the others, a claimed one that another transaction disturbs is repeated, not counted.
        if isolation == Isolation::ReadCommitted {
            assert_eq!(retries, 0, "{isolation:?}");
        }
    }
}

// invariant: transactional-beside-another
#[tokio::test(flavor = "multi_thread")]
async fn a_key_held_by_another_transaction_holds_up_no_neighbours() {
    for client in [Client::TokioPostgres, Client::Sqlx] {
        let place = Place::new(client).await;
        // Another session has written a record for payment 7, and does not go on.
        let mut stalled = place.postgres_client().await;
        let transaction = stalled.transaction().await.unwrap();
        let insert = "INSERT INTO oncegate_records (key, state, expires_at_ms, owner, attempt, recovery, handed_over, \
                      reason, result) VALUES ($1, 'completed', 0, ''::bytea, 0, 'none', false, '', ''::bytea)";
        transaction
            .execute(insert, &[&key_of(&place.scope, 7).as_str()])
            .await
            .unwrap();
        let bench = Bench::of(&[1, 2, 3, 4, 5, 6, 7, 8]);
        let pay = PayAll::new(&place, Bad::No);
        let handler = place
            .batched(8, pay.clone())
            .await
            .limit(Duration::from_secs(3));
        let list = Arc::clone(&bench.list);
        let release = async {
            list.until_acked(7).await;
            assert_eq!(
                place.till.charges().await,
                once([1, 2, 3, 4, 5, 6, 8]),
                "{client}"
            );
            transaction.rollback().await.unwrap();
        };
        tokio::join!(bench.run(place.gate(LEASE), handler, 8), release);
        assert_eq!(place.till.charges().await, once(1..=8), "{client}");
        assert_eq!(bench.counters.total("retries"), 0, "{client}");
        assert_eq!(bench.counters.total("store_paused"), 0, "{client}");
    }
}

/// Adds to two accounts, in an order that depends on the batch: two at once cross each other.
struct CrossAll {
    table: String,
    both: Barrier,
    crossed: Arc<AtomicU32>,
}

impl TransactionalBatchHandler<PostgresTransaction> for CrossAll {
    type Output = ();

    async fn handle(
        &self,
        batch: &[BatchMessage],
        transaction: &mut PostgresTransaction,
    ) -> Result<Vec<Result<(), Failure>>, Failure> {
        let Payment { id } = batch[0].message().json()?;
        let update = format!(
            "UPDATE {} SET attempt = attempt + $2 WHERE id = $1",
            self.table
        );
        let (first, second) = if id < 3 {
            (101_i64, 102_i64)
        } else {
            (102, 101)
        };
        let count = i32::try_from(batch.len())?;
        transaction.execute(&update, &[&first, &count]).await?;
        if self.crossed.fetch_add(1, SeqCst) < 2 {
            self.both.wait().await;
        }
        transaction.execute(&update, &[&second, &count]).await?;
        Ok(batch.iter().map(|_| Ok(())).collect())
    }
}

// invariant: conflict-costs-attempt
#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_or_serialization_failure_costs_no_batch_attempt() {
    for isolation in ISOLATIONS {
        let place = Place::new(Client::TokioPostgres).await;
        let setup = format!("INSERT INTO {} VALUES (101, 0), (102, 0)", place.till.table);
        place
            .postgres_client()
            .await
            .batch_execute(&setup)
            .await
            .unwrap();
        let crossed = Arc::new(AtomicU32::new(0));
        let both = Barrier::new(2);
        let cross = CrossAll {
            table: place.till.table.clone(),
            both,
            crossed: Arc::clone(&crossed),
        };
        let transactions = place
            .postgres()
            .transactions()
            .unwrap()
            .isolation(isolation);
        let bench = Bench::of(&[1, 2, 3, 4]);
        let handler = Transactional::batched(transactions, BatchLimits::new(2), cross);
        bench.run(place.gate(LEASE), handler, 4).await;
        let balances = place.till.charges().await;
        assert_eq!(
            (&balances[&101], &balances[&102]),
            (&vec![4], &vec![4]),
            "{isolation:?}"
        );
        assert!(
            crossed.load(SeqCst) > 2,
            "{isolation:?}: nothing was in the way"
        );
        assert_eq!(bench.counters.total("retries"), 0, "{isolation:?}");
        assert_eq!(bench.letters.causes(), [""; 0], "{isolation:?}");
        for id in 1..=4 {
            let looked = place
                .store
                .read(vec![key_of(&place.scope, id)])
                .await
                .remove(0)
                .unwrap();
            assert!(
                matches!(looked.unwrap().record.state, State::Completed { .. }),
                "{isolation:?}"
            );
        }
    }
}

// invariant: ack-without-commit
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_whose_commit_is_not_answered_is_settled_by_records() {
    const PAYMENTS: i64 = 12;
    for cut in ["before", "sent", "answered"] {
        let place = Place::new(Client::TokioPostgres).await;
        let cuts = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&cuts);
        let wire = Wire::before(&place.till.url, move |_, step| {
            let here = match step {
                Step::Asked(_) => cut == "before" && step.is_commit(),
                Step::Sent(bytes) => cut == "sent" && Step::Asked(bytes).is_commit(),
                Step::Answered(_) => cut == "answered" && step.is_committed(),
            };
            if here && count.fetch_add(1, SeqCst) == 0 {
                Then::Cut
            } else {
                Then::Go
            }
        })
        .await;
        let pay = PayAll::new(&place, Bad::No);
        let twice: Vec<i64> = (1..=PAYMENTS).chain(1..=PAYMENTS).collect();
        let bench = Bench::of(&twice);
        let transactions = place.postgres().transactions_of(pool(wire.url()));
        let limits = BatchLimits::new(twice.len() / 2);
        let handler = Transactional::batched(transactions, limits, pay.clone());
        bench.run(place.gate(LEASE), handler, twice.len()).await;
        assert!(cuts.load(SeqCst) >= 1, "{cut}");
        let charges = place.till.charges().await;
        assert!(
            charges.values().all(|attempts| attempts.len() == 1),
            "{cut}: {charges:?}"
        );
        assert_eq!(charges.len(), twice.len() / 2, "{cut}");
        assert_eq!(bench.letters.causes(), [""; 0], "{cut}");
        // The second deliveries alone are duplicates.
        assert_eq!(pay.told.lock().unwrap().len(), twice.len() / 2, "{cut}");
        if cut == "answered" {
            assert_eq!(
                pay.calls.lock().unwrap().len(),
                1,
                "it was committed: nothing runs again"
            );
        }
    }
}

/// More serialization failures in a row than one beginning of a transaction tries.
const CROSSINGS: i64 = 7;

impl Place {
    /// The next inserts of completed records fail as those that cross another transaction.
    async fn cross_the_next_inserts(&self) {
        let sql = format!(
            "CREATE SEQUENCE crossings; \
             CREATE FUNCTION cross_inserts() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF nextval('crossings') <= {CROSSINGS} THEN \
             RAISE EXCEPTION 'simulated' USING ERRCODE = 'serialization_failure'; END IF; RETURN NEW; END $$; \
             CREATE TRIGGER cross_inserts BEFORE INSERT ON oncegate_records FOR EACH ROW \
             WHEN (NEW.state = 'completed') EXECUTE FUNCTION cross_inserts()"
        );
        self.postgres_client()
            .await
            .batch_execute(&sql)
            .await
            .unwrap();
    }
}

// invariant: conflict-costs-attempt
#[tokio::test(flavor = "multi_thread")]
async fn early_serialization_failures_are_no_outage_and_no_attempt() {
    for client in [Client::TokioPostgres, Client::Sqlx] {
        for most in [1, 4] {
            let what = format!("{client}, batches of {most}");
            // In a database of its own: the trigger is on a table that others share.
            let place = Place::journaled(client).await;
            place.cross_the_next_inserts().await;
            let bench = Bench::of(&[1, 2, 3, 4]);
            let handler = match most {
                1 => place.transactional(Pay::new(&place, After::Return)).await,
                most => place.batched(most, PayAll::new(&place, Bad::No)).await,
            };
            bench.run(place.gate(LEASE), handler, 4).await;
            assert_eq!(place.till.charges().await, once(1..=4), "{what}");
            let crossings = "SELECT last_value FROM crossings";
            let row = place
                .postgres_client()
                .await
                .query_one(crossings, &[])
                .await
                .unwrap();
            assert!(
                row.get::<_, i64>(0) > CROSSINGS,
                "{what}: nothing was in the way"
            );
            let count = |name| bench.counters.total(name);
            assert_eq!(
                [
                    count("retries"),
                    count("store_errors"),
                    count("store_paused")
                ],
                [0; 3],
                "{what}"
            );
            assert_eq!(bench.letters.causes(), [""; 0], "{what}");
        }
    }
}
