//! In the consumer runtime: acknowledgements follow the record, and nothing else.

use std::future::{pending, ready};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::codec::ToStored as _;
use oncegate::core::record::State;
use oncegate::{Attempt, Codec, Failure, Handler, Message};
use oncegate_testkit::{CLIENTS, Client, End, Payment, PgBouncer, PostgresServer, Till};

use crate::list::List;
use crate::place::{Bench, LEASE, Place, key_of, take_over};

fn receipt(attempt: &Attempt) -> String {
    format!("receipt of attempt {}", attempt.number())
}

/// Charges in a transaction that ends in this way at the first attempt, and remembers what
/// duplicates got.
struct Pay {
    till: Till,
    first: End,
    told: Arc<Mutex<Vec<String>>>,
}

impl Handler for Pay {
    type Output = String;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        let end = if attempt.number() == 1 {
            self.first
        } else {
            End::Commit
        };
        self.till
            .charge(message, attempt, &receipt(attempt), end, ready(()))
            .await?;
        // Not what was committed: the record decides.
        Ok("something else".to_owned())
    }

    async fn duplicate(&self, _: &Message, result: String) -> Result<(), Failure> {
        self.told.lock().unwrap().push(result);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_effect_and_its_completion_are_committed_together() {
    for client in CLIENTS {
        let place = Place::new(client).await;
        let bench = Bench::of(&[1, 2, 1]);
        let told = Arc::default();
        let pay = Pay {
            till: place.till.clone(),
            first: End::Commit,
            told: Arc::clone(&told),
        };
        bench.run(place.gate(LEASE).transactional(), pay, 3).await;
        let charges = place.till.charges().await;
        assert_eq!(
            charges.into_values().collect::<Vec<_>>(),
            [[1], [1]],
            "{client}"
        );
        assert_eq!(*told.lock().unwrap(), ["receipt of attempt 1"], "{client}");
        assert_eq!(bench.counters.total("retries"), 0, "{client}");
        let snapshot = place
            .store
            .read(vec![key_of(&place.scope, 1)])
            .await
            .remove(0)
            .unwrap()
            .unwrap();
        let State::Completed { result, .. } = snapshot.record.state else {
            panic!("{snapshot:?}")
        };
        let stored = "receipt of attempt 1"
            .to_owned()
            .to_stored(Codec::Json)
            .unwrap();
        assert_eq!(
            result, stored,
            "{client}: byte for byte what the codec stores"
        );
        assert!(
            snapshot.record.expires_at > snapshot.now + Duration::from_secs(6 * 86_400),
            "{client}"
        );
    }
}

// invariant: transaction-believed, behind-a-pooler
#[tokio::test(flavor = "multi_thread")]
async fn through_a_pooler_effect_and_completion_commit_together() {
    let server = PostgresServer::start().await;
    // sqlx sets it when it connects.
    let ignored = "ignore_startup_parameters = extra_float_digits";
    let pooler = PgBouncer::before(&server, &["max_prepared_statements = 100", ignored]).await;
    for client in [Client::TokioPostgres, Client::Sqlx] {
        let place = Place::at(client, pooler.url()).await;
        let bench = Bench::of(&[1, 2, 1]);
        let told = Arc::default();
        let pay = Pay {
            till: place.till.clone(),
            first: End::Commit,
            told: Arc::clone(&told),
        };
        bench.run(place.gate(LEASE).transactional(), pay, 3).await;
        let charges = place.till.charges().await;
        assert_eq!(
            charges.into_values().collect::<Vec<_>>(),
            [[1], [1]],
            "{client}"
        );
        assert_eq!(*told.lock().unwrap(), ["receipt of attempt 1"], "{client}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_transaction_is_tried_again_and_not_acknowledged() {
    for client in CLIENTS {
        let place = Place::new(client).await;
        let bench = Bench::of(&[1]);
        let pay = Pay {
            till: place.till.clone(),
            first: End::Forget,
            told: Arc::default(),
        };
        bench.run(place.gate(LEASE), pay, 1).await;
        assert_eq!(place.till.charges().await[&1], [2], "{client}");
        assert_eq!(bench.counters.total("retries"), 1, "{client}");
    }
}

// invariant: transaction-believed
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_lost_while_the_transaction_is_open_rolls_it_back() {
    for client in CLIENTS {
        let place = Arc::new(Place::patient(client).await);
        let bench = Bench::of(&[1]);
        let told = Arc::<Mutex<Vec<String>>>::default();
        let pay = TakenOver {
            place: Arc::clone(&place),
            told: Arc::clone(&told),
        };
        bench.run(place.gate(LEASE), pay, 1).await;
        assert!(place.till.charges().await.is_empty(), "{client}");
        assert_eq!(*told.lock().unwrap(), ["theirs"], "{client}");
        assert_eq!(bench.counters.total("complete_lost"), 1, "{client}");
    }
}

/// Another owner takes the key and completes it while the transaction is open; the handler ignores
/// its cancellation.
struct TakenOver {
    place: Arc<Place>,
    told: Arc<Mutex<Vec<String>>>,
}

impl Handler for TakenOver {
    type Output = String;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        let meanwhile = take_over(&*self.place.store, key_of(&self.place.scope, 1), "theirs");
        let refused = self
            .place
            .till
            .charge(message, attempt, &"ours".to_owned(), End::Commit, meanwhile)
            .await;
        assert!(refused.is_err());
        Ok("ours".to_owned())
    }

    async fn duplicate(&self, _: &Message, result: String) -> Result<(), Failure> {
        self.told.lock().unwrap().push(result);
        Ok(())
    }
}

// invariant: transaction-believed
#[tokio::test(flavor = "multi_thread")]
async fn what_the_handler_does_after_its_commit_changes_nothing() {
    let every_client = CLIENTS.map(async |client| {
        let place = Place::new(client).await;
        let bench = Bench::of(&[1, 2, 3, 4]);
        let handler = Unruly {
            till: place.till.clone(),
            list: Arc::clone(&bench.list),
        };
        bench
            .run(place.gate(LEASE).max_run(LEASE), handler, 4)
            .await;
        let charges = place.till.charges().await;
        assert_eq!(
            charges.into_values().collect::<Vec<_>>(),
            [[1]; 4],
            "{client}"
        );
        assert_eq!(bench.letters.causes(), [""; 0], "{client}");
        assert_eq!(bench.counters.total("retries"), 0, "{client}");
        assert_eq!(
            bench.counters.get("handler_runs", "cancelled"),
            1,
            "{client}"
        );
    });
    futures_util::future::join_all(every_client).await;
}

/// Charges, and then panics, gives up, hangs until `max_run`, or charges again.
struct Unruly {
    till: Till,
    list: Arc<List>,
}

impl Handler for Unruly {
    type Output = String;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        self.till
            .charge(message, attempt, &receipt(attempt), End::Commit, ready(()))
            .await?;
        match message.json::<Payment>()?.id {
            1 => panic!("simulated"),
            2 => Err(Failure::permanent("too late to give up")),
            3 => {
                self.list.take_away(message);
                pending().await
            }
            // A second transaction of the same run must not slip through on the first one's
            // completion.
            _ => {
                match self
                    .till
                    .charge(
                        message,
                        attempt,
                        &"again".to_owned(),
                        End::Commit,
                        ready(()),
                    )
                    .await
                {
                    Ok(()) => panic!("one run was committed twice"),
                    Err(_) => Ok(String::new()),
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transactional_gate_takes_no_ok_without_a_transaction() {
    let place = Place::new(CLIENTS[2]).await;
    let bench = Bench::of(&[1]);
    let handler = async |_: Message, _: Attempt| Ok("done".to_owned());
    bench
        .run(place.gate(LEASE).transactional(), handler, 1)
        .await;
    assert_eq!(bench.letters.causes(), ["attempts_used_up"]);
    assert_eq!(
        bench.counters.get("handler_runs", "succeeded"),
        u64::from(Bench::MAX_ATTEMPTS)
    );
    let snapshot = place
        .store
        .read(vec![key_of(&place.scope, 1)])
        .await
        .remove(0)
        .unwrap()
        .unwrap();
    let State::Failed { reason, .. } = snapshot.record.state else {
        panic!("{snapshot:?}")
    };
    assert!(reason.contains("commit_with"), "{reason}");
    // Without the option it is a completion as any other.
    let plain = Place::new(CLIENTS[2]).await;
    let bench = Bench::of(&[1]);
    bench.run(plain.gate(LEASE), handler, 1).await;
    assert_eq!(bench.letters.causes(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_over_the_limit_is_not_kept_and_the_effect_is() {
    for client in CLIENTS {
        let place = Place::new(client).await;
        let bench = Bench::of(&[1]);
        let pay = Pay {
            till: place.till.clone(),
            first: End::Commit,
            told: Arc::default(),
        };
        bench
            .run(place.gate(LEASE).max_result_bytes(10), pay, 1)
            .await;
        assert_eq!(place.till.charges().await[&1], [1], "{client}");
        assert_eq!(bench.counters.total("results_not_kept"), 1, "{client}");
    }
}
