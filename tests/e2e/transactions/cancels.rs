//! Statements that are cancelled at any moment on a real server, as an operator, a tool or a
//! timeout does it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use oncegate::core::record::State;
use oncegate_testkit::{Client, Postgres, Step, Then, Wire, unique};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::pay_all::{Bad, PayAll};
use crate::place::{Bench, LEASE, Place, key_of};
use crate::transactional::{After, Pay};

/// How many payments are charged in all: `ONCEGATE_CANCELLED`.
const DEFAULT_PAYMENTS: i64 = 400;
/// Two clients, each one by one and in batches.
const KINDS: i64 = 4;
/// The most payments of a batch.
const BATCH: usize = 4;
/// How many statements are sent from one cancellation to the next, at most. A transaction or a
/// start must sometimes come through, however slow the machine is.
const STATEMENTS_BETWEEN_MOST: u64 = 40;
/// The longest time by which the wire holds back a statement that is to be cancelled, in
/// microseconds: the server ignores a cancellation that arrives before its statement, or after it.
const HELD_MICROS_MOST: u64 = 1_000;
/// How many statements must have been cancelled: fewer prove nothing.
const HITS_LEAST: u64 = 5;
/// How often everything is charged until so many were.
const PASSES_MOST: u32 = 10;

/// Chooses the statements to cancel, and counts the cancelled ones.
struct Cancels {
    rng: Rng,
    /// How many statements are sent until the next one is cancelled.
    left: u64,
    /// None once no more are to be cancelled.
    chosen: Option<UnboundedSender<()>>,
    hits: u64,
    /// Those of them after which the session was in no transaction: a BEGIN, or a statement that
    /// commits by itself.
    outside: u64,
}

impl Cancels {
    fn new(rng: Rng) -> (Self, UnboundedReceiver<()>) {
        let (chosen, to_cancel) = unbounded_channel();
        (
            Self {
                rng,
                left: 1,
                chosen: Some(chosen),
                hits: 0,
                outside: 0,
            },
            to_cancel,
        )
    }

    fn asked(&mut self) {
        self.left -= 1;
        if self.left == 0 {
            self.left = self.rng.u64(1..=STATEMENTS_BETWEEN_MOST);
            if let Some(chosen) = &self.chosen {
                chosen.send(()).ok();
            }
            std::thread::sleep(Duration::from_micros(self.rng.u64(..HELD_MICROS_MOST)));
        }
    }

    /// Reads the messages that begin in these bytes.
    fn answered(&mut self, mut bytes: &[u8]) {
        let mut is_last_cancelled = false;
        while let Some((kind, rest)) = bytes.split_first()
            && let Some(length) = rest.first_chunk::<4>()
            && let Some((message, others)) =
                rest.split_at_checked(u32::from_be_bytes(*length) as usize)
        {
            match kind {
                b'E' => {
                    is_last_cancelled = message.windows(7).any(|field| field == b"C57014\0");
                    self.hits += u64::from(is_last_cancelled);
                }
                b'Z' => {
                    let is_outside = message.last() == Some(&b'I');
                    self.outside += u64::from(is_last_cancelled && is_outside);
                    is_last_cancelled = false;
                }
                _ => {}
            }
            bytes = others;
        }
    }
}

/// Cancels what the backends of these sessions execute, as often as that is asked for.
async fn cancel_all(place: &Place, sessions: &str, mut to_cancel: UnboundedReceiver<()>) {
    let client = place.postgres_client().await;
    let cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = $1";
    let cancel = client.prepare(cancel).await.unwrap();
    while to_cancel.recv().await.is_some() {
        client.query(&cancel, &[&sessions]).await.unwrap();
    }
}

// invariant: begin-fails
#[tokio::test(flavor = "multi_thread")]
async fn no_cancelled_payment_is_completed_without_its_charge() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let payments = std::env::var("ONCEGATE_CANCELLED")
        .map_or(DEFAULT_PAYMENTS, |number| number.parse().unwrap());
    let mut rng = Rng::with_seed(seed);
    let mut hits = 0;
    let [tokio, sqlx] = [Client::TokioPostgres, Client::Sqlx];
    // On a busy machine most cancellations come too late for their statement.
    for _ in 0..PASSES_MOST {
        for (client, is_batched) in [(tokio, false), (tokio, true), (sqlx, false), (sqlx, true)] {
            let ids: Vec<i64> = (1..=payments / KINDS).collect();
            hits += charge_all(client, is_batched, &ids, &mut rng).await;
        }
        if hits >= HITS_LEAST {
            break;
        }
    }
    assert!(
        hits >= HITS_LEAST,
        "seed {seed}: only {hits} statements were cancelled, which proves nothing"
    );
}

/// Charges these payments while the statements of all sessions are cancelled. Returns how many
/// were.
async fn charge_all(client: Client, is_batched: bool, ids: &[i64], rng: &mut Rng) -> u64 {
    let server = Postgres::shared().await;
    let (cancels, to_cancel) = Cancels::new(rng.fork());
    let cancels = Arc::new(Mutex::new(cancels));
    let watching = Arc::clone(&cancels);
    let wire = Wire::before(server.url(), move |_, step| {
        let mut watching = watching.lock().unwrap();
        match step {
            Step::Asked(_) => watching.asked(),
            Step::Answered(bytes) => watching.answered(bytes),
            Step::Sent(_) => {}
        }
        Then::Go
    });
    let wire = wire.await;
    let sessions = unique("cancelled");
    let place = Place::at(
        client,
        &format!("{}?application_name={sessions}", wire.url()),
    )
    .await;
    let direct = Place::at(client, server.url()).await;
    let bench = Bench::of(ids);
    let handler = if is_batched {
        place.batched(BATCH, PayAll::new(&place, Bad::No)).await
    } else {
        place.transactional(Pay::new(&place, After::Return)).await
    };
    let run = async {
        bench.run(place.gate(LEASE), handler, ids.len()).await;
        cancels.lock().unwrap().chosen = None;
    };
    // The last cancellation is over, too: what is asked below goes through the same sessions.
    tokio::join!(run, cancel_all(&direct, &sessions, to_cancel));
    let what = format!(
        "{client}, {}",
        if is_batched { "batches" } else { "one by one" }
    );
    let charges = place.till.charges().await;
    let mut completed = 0;
    for id in ids {
        let held = place
            .store
            .read(vec![key_of(&place.scope, *id)])
            .await
            .remove(0)
            .unwrap();
        let state = held.map(|snapshot| snapshot.record.state);
        let effects = charges.get(id).map_or(0, Vec::len);
        match state {
            Some(State::Completed { .. }) => {
                assert_eq!(effects, 1, "{what}: payment {id} is completed");
            }
            Some(State::Failed { .. }) => {
                assert_eq!(effects, 0, "{what}: payment {id} is given up");
            }
            other => panic!("{what}: payment {id} was acknowledged: {other:?}, {effects} charges"),
        }
        completed += effects;
    }
    let Cancels { hits, outside, .. } = *cancels.lock().unwrap();
    println!(
        "{what}: {completed} payments charged once, {} given up; {hits} statements cancelled, {outside} of them a BEGIN or \
         outside of a transaction",
        ids.len() - completed,
    );
    assert!(completed > 0, "{what}: that proves nothing");
    hits
}
