//! Handlers that are given their transaction, and other transactions in the way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use oncegate::core::record::State;
use oncegate::postgres::{Isolation, PostgresTransaction};
use oncegate::{Attempt, Failure, Message, Transactional, TransactionalHandler};
use oncegate_testkit::{Client, Payment, until};
use tokio::sync::{Barrier, Notify};

use crate::place::{Bench, LEASE, Place, key_of};
use crate::transactional::{After, ISOLATIONS, Pay};

/// Meets another run at a barrier inside its transaction, at first.
struct Meet {
    pay: Pay,
    inside: Arc<Notify>,
    go_on: Arc<Notify>,
}

impl TransactionalHandler<PostgresTransaction> for Meet {
    type Output = String;

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut PostgresTransaction,
    ) -> Result<String, Failure> {
        let result: String = self.pay.handle(message, attempt, transaction).await?;
        self.inside.notify_one();
        self.go_on.notified().await;
        Ok(result)
    }

    async fn duplicate(&self, message: &Message, result: String) -> Result<(), Failure> {
        _ = message;
        self.pay.tell(result).await
    }
}

// invariant: transactional-beside-another
#[tokio::test(flavor = "multi_thread")]
async fn of_two_deliveries_one_runs_and_the_other_gets_its_result() {
    for isolation in ISOLATIONS {
        let place = Place::journaled(Client::TokioPostgres).await;
        let inside = Arc::new(Notify::new());
        let go_on = Arc::new(Notify::new());
        let pay = Pay::new(&place, After::Return);
        let meet = Meet {
            pay: pay.clone(),
            inside: Arc::clone(&inside),
            go_on: Arc::clone(&go_on),
        };
        let transactions = place
            .postgres()
            .transactions()
            .unwrap()
            .isolation(isolation);
        let first = Bench::of(&[1]);
        let second = Bench::of(&[1]);
        let other_work = Transactional::new(transactions.clone(), pay.clone());
        let running = first.run(place.gate(LEASE), Transactional::new(transactions, meet), 1);
        let other = async {
            inside.notified().await;
            let waiting = second.run(place.gate(LEASE), other_work, 1);
            let release = async {
                // The second one waits for the first one's row.
                place.until_waiting().await;
                go_on.notify_one();
            };
            tokio::join!(waiting, release);
        };
        tokio::join!(running, other);
        assert_eq!(place.till.charges().await[&1], [1], "{isolation:?}");
        assert_eq!(pay.runs.load(SeqCst), 1, "{isolation:?}");
        assert_eq!(
            *pay.told.lock().unwrap(),
            ["receipt of attempt 1"],
            "{isolation:?}"
        );
    }
}

/// Adds to two accounts, in the order that the payment says: two at once cross each other.
struct Cross {
    table: String,
    both: Arc<Barrier>,
    crossed: Arc<AtomicU32>,
}

impl TransactionalHandler<PostgresTransaction> for Cross {
    type Output = ();

    async fn handle(
        &self,
        message: &Message,
        _: &Attempt,
        transaction: &mut PostgresTransaction,
    ) -> Result<(), Failure> {
        let Payment { id } = message.json()?;
        let update = format!(
            "UPDATE {} SET attempt = attempt + 1 WHERE id = $1",
            self.table
        );
        let (first, second) = if id % 2 == 0 {
            (101_i64, 102_i64)
        } else {
            (102, 101)
        };
        transaction.execute(&update, &[&first]).await?;
        if self.crossed.fetch_add(1, SeqCst) < 2 {
            self.both.wait().await;
        }
        transaction.execute(&update, &[&second]).await?;
        Ok(())
    }
}

// invariant: conflict-costs-attempt
#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_or_serialization_failure_costs_no_attempt() {
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
        let cross = Cross {
            table: place.till.table.clone(),
            both: Arc::new(Barrier::new(2)),
            crossed: Arc::clone(&crossed),
        };
        let transactions = place
            .postgres()
            .transactions()
            .unwrap()
            .isolation(isolation);
        let bench = Bench::of(&[1, 2]);
        bench
            .run(
                place.gate(LEASE),
                Transactional::new(transactions, cross),
                2,
            )
            .await;
        let balances = place.till.charges().await;
        assert_eq!(
            (&balances[&101], &balances[&102]),
            (&vec![2], &vec![2]),
            "{isolation:?}"
        );
        assert!(
            crossed.load(SeqCst) > 2,
            "{isolation:?}: nothing was in the way"
        );
        assert_eq!(bench.counters.total("retries"), 0, "{isolation:?}");
        assert_eq!(bench.letters.causes(), [""; 0], "{isolation:?}");
        for id in [1, 2] {
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

/// Charges, while another session changes the record of its payment.
struct Disturbed {
    pay: Pay,
    scope: String,
    url: String,
    /// The number of runs that are disturbed.
    runs: u32,
}

impl Disturbed {
    fn of(place: &Place, runs: u32) -> Self {
        Self {
            pay: Pay::new(place, After::Return),
            scope: place.scope.clone(),
            url: place.till.url.clone(),
            runs,
        }
    }

    /// Changes the record as a heartbeat does, if this run is to be disturbed.
    async fn disturb(&self, message: &Message) -> Result<(), Failure> {
        if self.pay.runs.load(SeqCst) > self.runs {
            return Ok(());
        }
        let Payment { id } = message.json()?;
        let (client, driver) = tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await?;
        tokio::spawn(driver);
        let touch = "UPDATE oncegate_records SET expires_at_ms = expires_at_ms + 1 WHERE key = $1";
        let touched = client
            .execute(touch, &[&key_of(&self.scope, id).as_str()])
            .await?;
        assert_eq!(touched, 1);
        Ok(())
    }
}

impl<Tx: Send + 'static> TransactionalHandler<Tx> for Disturbed
where
    Pay: TransactionalHandler<Tx, Output = String>,
{
    type Output = String;

    async fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
        transaction: &mut Tx,
    ) -> Result<String, Failure> {
        let result = self.pay.handle(message, attempt, transaction).await?;
        self.disturb(message).await?;
        Ok(result)
    }
}

// invariant: conflict-costs-attempt
#[tokio::test(flavor = "multi_thread")]
async fn a_serialization_failure_under_a_claim_costs_no_attempt() {
    for isolation in [Isolation::RepeatableRead, Isolation::Serializable] {
        for client in [Client::TokioPostgres, Client::Sqlx] {
            let place = Place::new(client).await;
            let disturbed = Disturbed::of(&place, 2 * Bench::MAX_ATTEMPTS);
            let runs = Arc::clone(&disturbed.pay.runs);
            let handler = if client == Client::Sqlx {
                let pool = sqlx::PgPool::connect(&place.till.url).await.unwrap();
                let transactions = place.postgres().sqlx_transactions(pool);
                Transactional::new(transactions.isolation(isolation), disturbed)
            } else {
                let transactions = place.postgres().transactions().unwrap();
                Transactional::new(transactions.isolation(isolation), disturbed)
            };
            let bench = Bench::of(&[1]);
            // A fencing token comes from a claim.
            bench.run(place.gate(LEASE).fenced(), handler, 1).await;
            let what = format!("{isolation:?}, {client}");
            assert_eq!(bench.letters.causes(), [""; 0], "{what}");
            assert_eq!(place.till.charges().await[&1], [1], "{what}");
            assert_eq!(runs.load(SeqCst), 2 * Bench::MAX_ATTEMPTS + 1, "{what}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_its_own_heartbeats_disturb_names_the_settings() {
    let place = Place::patient(Client::TokioPostgres).await;
    let inside = Arc::new(Notify::new());
    let go_on = Arc::new(Notify::new());
    let meet = Meet {
        pay: Pay::new(&place, After::Return),
        inside: Arc::clone(&inside),
        go_on: Arc::clone(&go_on),
    };
    let transactions = place.postgres().transactions().unwrap();
    let handler = Transactional::new(transactions.isolation(Isolation::Serializable), meet);
    let bench = Bench::of(&[1]);
    let key = key_of(&place.scope, 1);
    let expiry = async || {
        let read = place.store.read(vec![key.clone()]).await.remove(0);
        read.unwrap().unwrap().record.expires_at
    };
    let after_a_heartbeat = async {
        loop {
            inside.notified().await;
            let begun = expiry().await;
            until("a heartbeat", 3 * LEASE, async || match expiry().await {
                now if now == begun => Err("none so far".to_owned()),
                _ => Ok(()),
            })
            .await;
            go_on.notify_one();
        }
    };
    tokio::select! {
        () = bench.run(place.gate(LEASE).fenced(), handler, 1) => {}
        () = after_a_heartbeat => {}
    }
    assert_eq!(bench.letters.causes(), ["attempts_used_up"]);
    let reason = bench.letters.reasons().remove(0);
    assert!(
        reason.contains("`Gate::lease`") && reason.contains("READ COMMITTED"),
        "{reason}"
    );
    assert!(place.till.charges().await.is_empty());
}
