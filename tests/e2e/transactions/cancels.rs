//! Statements that are cancelled at any moment on a real server, as an operator, a tool or a timeout does it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use fastrand::Rng;
use oncegate::core::record::State;
use oncegate_testkit::{Client, Postgres, Step, Then, Wire, unique};
use tokio::time::sleep;

use crate::pay_all::{Bad, PayAll};
use crate::place::{Bench, LEASE, Place, key_of};
use crate::transactional::{After, Pay};

/// How many payments are charged in all: `ONCEGATE_CANCELLED`.
const DEFAULT_PAYMENTS: i64 = 400;
/// Two clients, each one by one and in batches.
const KINDS: i64 = 4;
/// The most payments of a batch.
const BATCH: usize = 4;
/// The longest pause between two cancellations, in microseconds.
const PAUSE_MICROS_MOST: u64 = 2_000;
/// How many statements must have been cancelled: fewer prove nothing.
const HITS_LEAST: u64 = 5;

/// What the server has answered.
#[derive(Debug, Default)]
struct Cancelled {
    statements: AtomicU64,
    /// Those of them after which the session was in no transaction: a BEGIN, or a statement that commits by itself.
    outside: AtomicU64,
}

impl Cancelled {
    /// Counts the errors of cancellations among the messages that begin in these bytes.
    fn count(&self, mut bytes: &[u8]) {
        let mut is_last_cancelled = false;
        while let Some((kind, rest)) = bytes.split_first()
            && let Some(length) = rest.first_chunk::<4>()
            && let Some((message, others)) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)
        {
            match kind {
                b'E' => {
                    is_last_cancelled = message.windows(7).any(|field| field == b"C57014\0");
                    self.statements.fetch_add(u64::from(is_last_cancelled), SeqCst);
                }
                b'Z' => {
                    let is_outside = message.last() == Some(&b'I');
                    self.outside.fetch_add(u64::from(is_last_cancelled && is_outside), SeqCst);
                    is_last_cancelled = false;
                }
                _ => {}
            }
            bytes = others;
        }
    }
}

/// Cancels what the backends of these sessions execute, one after another, for ever.
async fn cancel_for_ever(place: &Place, sessions: &str, rng: &mut Rng) {
    let client = place.postgres_client().await;
    let pids = "SELECT pid FROM pg_stat_activity WHERE application_name = $1 AND pid <> pg_backend_pid()";
    loop {
        let backends = client.query(pids, &[&sessions]).await.unwrap();
        // Many times before the list is read again, because a statement takes less time than that.
        for _ in 0..20 {
            if let Some(backend) = rng.choice(&backends) {
                let pid: i32 = backend.get(0);
                client.query_one("SELECT pg_cancel_backend($1)", &[&pid]).await.unwrap();
            }
            sleep(Duration::from_micros(rng.u64(..PAUSE_MICROS_MOST))).await;
        }
    }
}

// invariant: begin-fails
#[tokio::test(flavor = "multi_thread")]
async fn no_cancelled_payment_is_completed_without_its_charge() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let payments =
        std::env::var("ONCEGATE_CANCELLED").map_or(DEFAULT_PAYMENTS, |number| number.parse().unwrap());
    let mut rng = Rng::with_seed(seed);
    let mut hits = 0;
    let [tokio, sqlx] = [Client::TokioPostgres, Client::Sqlx];
    for (client, is_batched) in [(tokio, false), (tokio, true), (sqlx, false), (sqlx, true)] {
        let ids: Vec<i64> = (1..=payments / KINDS).collect();
        hits += charge_all(client, is_batched, &ids, &mut rng).await;
    }
    assert!(hits >= HITS_LEAST, "seed {seed}: only {hits} statements were cancelled, which proves nothing");
}

/// Charges these payments while the statements of all sessions are cancelled. Returns how many were.
async fn charge_all(client: Client, is_batched: bool, ids: &[i64], rng: &mut Rng) -> u64 {
    let cancelled = Arc::new(Cancelled::default());
    let counted = Arc::clone(&cancelled);
    let server = Postgres::shared().await;
    let wire = Wire::before(server.url(), move |_, step| {
        if let Step::Answered(bytes) = step {
            counted.count(bytes);
        }
        Then::Go
    });
    let (wire, sessions) = (wire.await, unique("cancelled"));
    let place = Place::at(client, &format!("{}?application_name={sessions}", wire.url())).await;
    let bench = Bench::of(ids);
    let handler = if is_batched {
        place.batched(BATCH, PayAll::new(&place, Bad::No)).await
    } else {
        place.transactional(Pay::new(&place, After::Return)).await
    };
    tokio::select! {
        () = bench.run(place.gate(LEASE), handler, ids.len()) => {}
        () = cancel_for_ever(&place, &sessions, rng) => {}
    }
    let what = format!("{client}, {}", if is_batched { "batches" } else { "one by one" });
    let charges = place.till.charges().await;
    let mut completed = 0;
    for id in ids {
        let held = place.store.read(vec![key_of(&place.scope, *id)]).await.remove(0).unwrap();
        let state = held.map(|snapshot| snapshot.record.state);
        let effects = charges.get(id).map_or(0, Vec::len);
        match state {
            Some(State::Completed { .. }) => assert_eq!(effects, 1, "{what}: payment {id} is completed"),
            Some(State::Failed { .. }) => assert_eq!(effects, 0, "{what}: payment {id} is given up"),
            other => panic!("{what}: payment {id} was acknowledged: {other:?}, {effects} charges"),
        }
        completed += effects;
    }
    let hits = cancelled.statements.load(SeqCst);
    println!(
        "{what}: {completed} payments charged once, {} given up; {hits} statements cancelled, {} of them a BEGIN or outside \
         of a transaction",
        ids.len() - completed,
        cancelled.outside.load(SeqCst),
    );
    assert!(completed > 0, "{what}: that proves nothing");
    hits
}
