//! A BEGIN of a handler's transaction that fails, while the server executes what was sent behind
//! it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use oncegate::Transactional;
use oncegate_testkit::{Client, Then, Wire};

use crate::pay_all::{Bad, PayAll};
use crate::place::{Bench, LEASE, Place};
use crate::transactional::{After, Pay, pool};

/// How many BEGINs fail: more than the tries of one transaction.
const CANCELLED: usize = 4;

/// A proxy that cancels the first BEGINs, and counts them.
async fn cancelling(place: &Place) -> (Wire, Arc<AtomicUsize>) {
    let begins = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&begins);
    let wire = Wire::before(&place.till.url, move |_, step| {
        if step.is_begin() && count.fetch_add(1, SeqCst) < CANCELLED {
            Then::Cancel
        } else {
            Then::Go
        }
    });
    (wire.await, begins)
}

// invariant: begin-fails
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_begin_completes_nothing() {
    for client in [Client::TokioPostgres, Client::Sqlx] {
        let place = Place::new(client).await;
        let (wire, begins) = cancelling(&place).await;
        let bench = Bench::of(&[1, 2]);
        let pay = Pay::new(&place, After::Return);
        let handler = if client == Client::Sqlx {
            let pool = sqlx::PgPool::connect(wire.url()).await.unwrap();
            Transactional::new(place.postgres().sqlx_transactions(pool), pay)
        } else {
            Transactional::new(place.postgres().transactions_of(pool(wire.url())), pay)
        };
        bench.run(place.gate(LEASE), handler, 2).await;
        assert!(begins.load(SeqCst) > CANCELLED, "{client}");
        let charges = place.till.charges().await;
        assert_eq!(
            charges.into_values().collect::<Vec<_>>(),
            [[1], [1]],
            "{client}"
        );
        assert_eq!(
            bench.counters.get("handler_runs", "succeeded"),
            2,
            "{client}"
        );
    }
}

// invariant: begin-fails
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_begin_of_a_batch_completes_nothing() {
    for client in [Client::TokioPostgres, Client::Sqlx] {
        let place = Place::new(client).await;
        let (wire, begins) = cancelling(&place).await;
        let bench = Bench::of(&[1, 2, 3]);
        let pay = PayAll::new(&place, Bad::No);
        let limits = oncegate::BatchLimits::new(3);
        let handler = if client == Client::Sqlx {
            let pool = sqlx::PgPool::connect(wire.url()).await.unwrap();
            Transactional::batched(place.postgres().sqlx_transactions(pool), limits, pay)
        } else {
            Transactional::batched(
                place.postgres().transactions_of(pool(wire.url())),
                limits,
                pay,
            )
        };
        bench.run(place.gate(LEASE), handler, 3).await;
        assert!(begins.load(SeqCst) > CANCELLED, "{client}");
        let charges = place.till.charges().await;
        assert_eq!(
            charges.into_values().collect::<Vec<_>>(),
            [[1], [1], [1]],
            "{client}"
        );
    }
}
