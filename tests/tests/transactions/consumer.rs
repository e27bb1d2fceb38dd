//! In the consumer runtime: acknowledgements follow what the record says, and nothing else.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::{Backoff, Consumer, Counters, Failure, Gate, Handler, Message};

use crate::list::{Letters, List, Listed};
use crate::place::{CLIENTS, End, Place};

const LEASE: Duration = Duration::from_secs(20);

/// Runs a consumer over these payments until so many are acknowledged.
struct Bench {
    list: Arc<List>,
    letters: Arc<Letters>,
    counters: Arc<Counters>,
}

impl Bench {
    fn of(ids: &[u64]) -> Self {
        let payments = ids.iter().map(|id| ("", format!(r#"{{"id":{id}}}"#)));
        Self { list: List::of("payments", payments), letters: Arc::default(), counters: Arc::default() }
    }

    async fn run(&self, gate: Gate, handler: impl Handler, acks: usize) {
        let list = Arc::clone(&self.list);
        let consumer = Consumer::new(Listed(Arc::clone(&list)), gate, handler)
            .dead_letters(Arc::clone(&self.letters))
            .backoff(Backoff::new(Duration::from_millis(1), Duration::from_millis(5)))
            .observer(Arc::clone(&self.counters) as _);
        consumer.run_until(async move { list.until_acked(acks).await }).await.unwrap();
    }
}

/// Pays in a transaction, and remembers what duplicates were told.
struct Pay {
    place: Arc<Place>,
    first: End,
    told: Arc<Mutex<Vec<String>>>,
}

impl Handler for Pay {
    type Output = String;

    async fn handle(&self, message: Message) -> Result<String, Failure> {
        let result = format!("receipt of attempt {}", message.attempt());
        let end = if message.attempt() == 1 { self.first } else { End::Commit };
        self.place.transact(&message, &result, end).await?;
        // Not what was committed: the record has the last word.
        Ok("something else".to_owned())
    }

    async fn duplicate(&self, _: Message, result: String) -> Result<(), Failure> {
        self.told.lock().unwrap().push(result);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_effect_and_its_completion_are_committed_together() {
    for client in CLIENTS {
        let place = Arc::new(Place::new(client).await);
        let (bench, told) = (Bench::of(&[1, 2, 1]), Arc::default());
        let pay = Pay { place: Arc::clone(&place), first: End::Commit, told: Arc::clone(&told) };
        bench.run(place.gate(LEASE).transactional(), pay, 3).await;
        let effects = place.effects().await;
        assert_eq!(effects.values().map(Vec::as_slice).collect::<Vec<_>>(), [[1], [1]], "{client:?}");
        assert_eq!(*told.lock().unwrap(), ["receipt of attempt 1"], "{client:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_transaction_is_tried_again_and_never_acknowledged() {
    for client in CLIENTS {
        let place = Arc::new(Place::new(client).await);
        let bench = Bench::of(&[1]);
        let pay = Pay { place: Arc::clone(&place), first: End::Forget, told: Arc::default() };
        bench.run(place.gate(LEASE), pay, 1).await;
        assert_eq!(place.effects().await["1"], [2], "{client:?}");
        assert_eq!(bench.counters.total("retries"), 1, "{client:?}");
    }
}
