use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::record::{State, StoreTime, Token};
use crate::rules::{Operation, Verdict};
use crate::store::MemoryStore;
use crate::testing::key;

const ALL: Faults = Faults {
    unavailable: 0.1,
    reply_lost: 0.1,
    request_lost: 0.1,
    stray: 0.5,
    slow_request: 0.1,
    slow_reply: 0.1,
    max_delay: Duration::from_millis(50),
    outage: 0.02,
    outage_max_calls: 5,
    forget: 0.01,
};

fn only(change: impl FnOnce(&mut Faults)) -> Faults {
    let mut faults = Faults::default();
    change(&mut faults);
    faults
}

fn memory() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::with_clock(|| StoreTime::from_millis(1)))
}

fn claim(name: &str, bits: u128) -> Command {
    let token = Token::from_bits(bits);
    let lease = Duration::from_secs(15);
    Command {
        key: key(name),
        operation: Operation::Claim {
            token,
            lease,
            fingerprint: None,
            fenced: false,
            longest_lease: Duration::MAX,
        },
    }
}

async fn one(store: &FaultStore, command: Command) -> Result<Reply, StoreError> {
    store
        .execute(vec![command])
        .await
        .pop()
        .expect("one answer")
}

#[tokio::test]
async fn without_faults_it_is_the_inner_store() {
    let store = FaultStore::new(memory(), Faults::default(), 1);
    assert!(one(&store, claim("a", 1)).await.is_ok());
    assert_eq!(
        store.injected(),
        Injected {
            calls: 1,
            ..Injected::default()
        }
    );
}

#[tokio::test]
async fn a_refused_command_is_not_executed() {
    let inner = memory();
    let store = FaultStore::new(inner.clone(), only(|faults| faults.unavailable = 1.0), 1);
    assert!(matches!(
        one(&store, claim("a", 1)).await,
        Err(StoreError::Unavailable { .. })
    ));
    assert!(inner.records().is_empty());
}

#[tokio::test]
async fn a_lost_reply_was_executed_and_a_lost_request_was_not() {
    for (faults, executed) in [
        (only(|faults| faults.reply_lost = 1.0), 1),
        (only(|faults| faults.request_lost = 1.0), 0),
    ] {
        let inner = memory();
        let store = FaultStore::new(inner.clone(), faults, 1);
        assert!(matches!(
            one(&store, claim("a", 1)).await,
            Err(StoreError::Unknown { .. })
        ));
        assert_eq!(inner.records().len(), executed);
    }
}

#[tokio::test]
async fn a_stray_arrives_with_a_later_call() {
    let inner = memory();
    let faults = only(|faults| (faults.request_lost, faults.stray) = (1.0, 1.0));
    let store = FaultStore::new(inner.clone(), faults, 1);
    assert!(one(&store, claim("a", 1)).await.is_err());
    while store.injected().strays == 0 {
        store.read(vec![key("b")]).await;
    }
    let (_, record) = inner.records().pop().expect("the stray was executed");
    assert!(matches!(record.state, State::Pending { token, .. } if token == Token::from_bits(1)));
}

#[tokio::test]
async fn an_outage_refuses_everything_until_it_ends() {
    let store = FaultStore::new(memory(), Faults::default(), 1);
    store.begin_outage();
    assert!(one(&store, claim("a", 1)).await.is_err());
    assert!(
        store
            .read(vec![key("a")])
            .await
            .pop()
            .expect("one answer")
            .is_err()
    );
    assert!(store.check().await.is_err());
    store.end_outage();
    let reply = one(&store, claim("a", 2))
        .await
        .expect("the outage is over");
    assert!(matches!(
        reply,
        Reply::Verdict {
            verdict: Verdict::Granted(_),
            ..
        }
    ));
    assert_eq!(store.injected().outage, 3);
}

/// The faults and replies of a long run of calls with one seed.
async fn run(seed: u64) -> (Injected, Vec<bool>, u64) {
    let inner = memory();
    let slept_us = Arc::new(AtomicU64::new(0));
    let forgetful = inner.clone();
    let counter = slept_us.clone();
    let store = FaultStore::new(inner, ALL, seed)
        .sleep_with(move |time| {
            counter.fetch_add(
                u64::try_from(time.as_micros()).expect("short"),
                Ordering::Relaxed,
            );
            std::future::ready(())
        })
        .forget_with(move || forgetful.lose_everything());
    let mut answered = Vec::new();
    for turn in 0..1_000_u128 {
        let commands = vec![claim(&format!("{}", turn % 7), turn), claim("hot", turn)];
        answered.extend(store.execute(commands).await.iter().map(Result::is_ok));
        answered.extend(store.read(vec![key("hot")]).await.iter().map(Result::is_ok));
    }
    store.stop_faults();
    for turn in 0..100_u128 {
        assert!(
            one(&store, claim("hot", turn)).await.is_ok(),
            "the faults have stopped"
        );
    }
    (store.injected(), answered, slept_us.load(Ordering::Relaxed))
}

#[tokio::test]
async fn every_fault_is_reached_and_one_seed_does_the_same_twice() {
    let (injected, answered, slept_us) = run(7).await;
    let Injected {
        calls,
        unavailable,
        reply_lost,
        request_lost,
        strays,
        slow,
        outage,
        forgotten,
    } = injected;
    for count in [
        calls,
        unavailable,
        reply_lost,
        request_lost,
        strays,
        slow,
        outage,
        forgotten,
    ] {
        assert!(count > 0, "{injected:?}");
    }
    assert!(slept_us > 0);
    assert!(
        (injected, answered, slept_us) == run(7).await,
        "the same seed does the same"
    );
    assert!(
        injected != run(8).await.0,
        "another seed does something else"
    );
}
