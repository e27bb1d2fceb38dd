//! What becomes of messages that cannot succeed, and when so many of them stop the consumer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use async_trait::async_trait;
use oncegate::admin;
use oncegate::consumer::{BadKeys, DeadLetterLimit, ReturnedLetters};
use oncegate::core::key::Scope;
use oncegate::dead_letters::{DeadLetter, DeadLetterRefused, DeadLetters};
use oncegate::{
    Attempt, BoxError, Consumer, ConsumerError, Failure, FingerprintSpec, MemoryStore, Message,
    Origin,
};

use super::list::{Letters, List, Listed};
use super::{Bench, numbered};

#[tokio::test(start_paused = true)]
async fn without_dead_letters_a_hopeless_message_stops_the_consumer() {
    let bench = Bench::of([("", "{not json".to_owned())]);
    let gate = bench.gate("runtime");
    let consumer = Consumer::new(
        Listed(Arc::clone(&bench.list)),
        gate,
        async |_: Message, _: Attempt| Ok(()),
    );
    let error = consumer
        .run_until(std::future::pending())
        .await
        .unwrap_err();
    assert!(
        matches!(error, ConsumerError::NoDeadLetters { .. }),
        "{error}"
    );
    assert!(
        error.to_string().contains("dead_letters"),
        "the error names the setting: {error}"
    );
    assert_eq!(bench.list.acked(), [0_i64; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_message_without_a_key_stops_a_consumer_that_refuses_such() {
    let bench = Bench::of([("", "{not json".to_owned())]);
    let consumer = bench
        .consumer(async |_: Message, _: Attempt| Ok(()))
        .bad_keys(BadKeys::Refuse);
    let error = consumer
        .run_until(std::future::pending())
        .await
        .unwrap_err();
    assert!(matches!(error, ConsumerError::BadKey { .. }), "{error}");
    assert!(error.to_string().contains("`bad_keys`"), "{error}");
    assert_eq!(
        (bench.letters.causes().len(), bench.list.acked().len()),
        (0, 0)
    );
}

// invariant: topic-drained
#[tokio::test(start_paused = true)]
async fn too_many_dead_letters_stop_the_consumer_within_the_topic() {
    let typo = (0..100).map(|id| ("", format!(r#"{{"identity":{id}}}"#)));
    let bench = Bench::of(typo);
    let limit = DeadLetterLimit {
        in_a_row: 10,
        ..DeadLetterLimit::default()
    };
    let consumer = bench
        .consumer(async |_: Message, _: Attempt| Ok(()))
        .dead_letter_limit(limit)
        .concurrency(1);
    let error = consumer
        .run_until(std::future::pending())
        .await
        .unwrap_err();
    assert!(
        matches!(error, ConsumerError::TooManyDeadLetters { .. }),
        "{error}"
    );
    assert_eq!(bench.letters.causes(), ["bad_key"; 10]);
    assert_eq!(
        bench.list.acked().len(),
        10,
        "only what is in the dead letters is acknowledged"
    );
}

/// As a supervisor does that starts the consumer again and again.
// invariant: restart-after-dead-letter-limit
#[tokio::test(start_paused = true)]
async fn after_a_dead_letter_stop_a_restart_gives_up_nothing() {
    let store = Arc::new(MemoryStore::new());
    let letters = Arc::new(Letters::default());
    let start = |seed: u64, messages: Vec<(&'static str, String)>| {
        let list = List::of("orders", messages);
        let bench = Bench {
            list,
            store: Arc::clone(&store),
            letters: Arc::clone(&letters),
            counters: Arc::default(),
        };
        let limit = DeadLetterLimit {
            in_a_row: 10,
            ..DeadLetterLimit::default()
        };
        let gate = bench.gate("runtime").simulated(seed);
        let consumer = bench.consumer_behind(gate, async |_: Message, _: Attempt| Ok(()));
        (bench, consumer.dead_letter_limit(limit).concurrency(1))
    };
    let typos = |from: u32| {
        (from..from + 50)
            .map(|id| ("", format!(r#"{{"identity":{id}}}"#)))
            .collect()
    };
    let stops = async |seed: u64, from: u32| {
        let (_bench, consumer) = start(seed, typos(from));
        let error = consumer
            .run_until(std::future::pending())
            .await
            .unwrap_err();
        assert!(
            error
                .to_string()
                .contains("10 messages in a row were given up"),
            "{error}"
        );
        letters.causes().len()
    };
    assert_eq!(stops(1, 0).await, 10);
    for restart in 2..5 {
        assert_eq!(stops(restart, 10).await, 10, "a restart gives up nothing");
    }

    let scope = Scope::new("runtime").unwrap();
    let accepted = admin::accept_dead_letters(&*store, &scope)
        .await
        .unwrap()
        .expect("it has stopped");
    assert_eq!(accepted.what, "10 messages in a row were given up");
    assert_eq!(
        stops(5, 10).await,
        20,
        "an operator has accepted as many again"
    );
    assert_eq!(stops(6, 20).await, 20);

    // The cause is gone: one success, and the limit counts from the beginning.
    let mixed = numbered(1)
        .into_iter()
        .chain(typos(20).into_iter().take(5))
        .collect();
    let (bench, consumer) = start(7, mixed);
    bench.run(consumer, 6).await.unwrap();
    assert_eq!(letters.causes().len(), 25);
    assert_eq!(
        admin::dead_letter_stop_of(&*store, &scope).await.unwrap(),
        None
    );
}

#[tokio::test(start_paused = true)]
async fn the_same_key_with_other_content_is_buried_and_never_answered() {
    let bench = Bench::of(
        [
            r#"{"id":1,"amount":10}"#,
            r#"{"amount":10.0,"id":1}"#,
            r#"{"id":1,"amount":11}"#,
        ]
        .map(|payload| ("", payload.to_owned())),
    );
    let gate = bench
        .gate("runtime")
        .fingerprint(FingerprintSpec::payload());
    bench
        .run(
            bench.consumer_behind(gate, async |_: Message, _: Attempt| Ok(())),
            3,
        )
        .await
        .unwrap();
    assert_eq!(
        bench.counters.get("claims", "completed"),
        1,
        "other spelling, same content"
    );
    assert_eq!(bench.letters.causes(), ["mismatch"]);
}

/// Fails the first run of its message, and lets the message's dead letter come back.
async fn return_a_letter(scope: &str, returned: ReturnedLetters) -> Bench {
    let bench = Bench::of(numbered(1));
    let runs = Arc::new(AtomicU32::new(0));
    let handler = move |_: Message, _: Attempt| {
        let first = runs.fetch_add(1, SeqCst) == 0;
        async move {
            if first {
                Err(Failure::permanent("closed"))
            } else {
                Ok(())
            }
        }
    };
    let consumer = bench.consumer(handler).returned_letters(returned);
    let list = Arc::clone(&bench.list);
    let watched = async {
        list.until_acked(1).await;
        let letter = Message::new(
            "orders",
            Origin::Other("0".into()),
            Some(numbered(1)[0].1.clone().into()),
        );
        list.push_again(&letter.with_dead_letter_of(scope));
        list.until_acked(2).await;
    };
    consumer.run_until(watched).await.unwrap();
    bench
}

// invariant: redrive-that-loses
#[tokio::test(start_paused = true)]
async fn a_letter_that_comes_back_runs_again() {
    let bench = return_a_letter("runtime", ReturnedLetters::Reopen).await;
    assert_eq!(bench.counters.get("handler_runs", "succeeded"), 1);
    assert_eq!(bench.counters.get("extra_runs", "reset"), 1);
    assert_eq!(bench.letters.causes(), ["permanent"]);
}

// invariant: redrive-that-loses
#[tokio::test(start_paused = true)]
async fn a_letter_that_must_not_run_is_written_back() {
    let bench = return_a_letter("runtime", ReturnedLetters::WriteBack).await;
    assert_eq!(bench.counters.get("handler_runs", "succeeded"), 0);
    assert_eq!(bench.letters.causes(), ["permanent", "not_handed_over"]);
}

/// Takes no dead letter.
#[derive(Debug)]
struct Full;

#[async_trait]
impl DeadLetters for Full {
    async fn send(&self, _letter: &DeadLetter) -> Result<(), BoxError> {
        Err(DeadLetterRefused::new("it is full").into())
    }
}

/// A process ends between the next failure and the letter of that: the attempts are used up.
// invariant: redrive-that-loses
#[tokio::test(start_paused = true)]
async fn a_letter_that_failed_again_is_written_and_does_not_run() {
    let runs = Arc::new(AtomicU32::new(0));
    let handler = {
        let runs = Arc::clone(&runs);
        move |_: Message, _: Attempt| {
            runs.fetch_add(1, SeqCst);
            std::future::ready(Err::<(), _>(Failure::permanent("closed")))
        }
    };
    let bench = Bench::of(numbered(0));
    let letter = Message::new(
        "orders",
        Origin::Other("0".into()),
        Some(numbered(1)[0].1.clone().into()),
    );
    let letter = letter.with_dead_letter_of("runtime");
    bench.list.push_again(&letter);
    let ends = bench.consumer(handler.clone()).dead_letters(Full);
    ends.run_until(std::future::pending()).await.unwrap_err();

    let bench = Bench {
        list: List::of("orders", numbered(0)),
        ..bench
    };
    bench.list.push_again(&letter);
    let gate = bench.gate("runtime").simulated(8);
    bench
        .run(bench.consumer_behind(gate, handler), 1)
        .await
        .unwrap();
    assert_eq!(runs.load(SeqCst), 1);
    assert_eq!(bench.letters.causes(), ["not_handed_over"]);
}

#[tokio::test(start_paused = true)]
async fn a_letter_of_another_scope_is_a_duplicate() {
    let bench = return_a_letter("another", ReturnedLetters::Reopen).await;
    assert_eq!(bench.counters.get("handler_runs", "succeeded"), 0);
    assert_eq!(bench.letters.causes(), ["permanent"]);
}
