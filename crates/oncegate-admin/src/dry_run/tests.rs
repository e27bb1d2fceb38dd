use std::time::Duration;

use oncegate_core::record::{Record, State, StoreTime, TAIL, Token};
use oncegate_core::rules::{Operation, ReleaseCause};
use oncegate_core::store::{Command, RecordSnapshot};

use super::lookups::judge;
use super::*;
use oncegate_runtime::message::Origin;
use oncegate_runtime::{Completion, Entry, Gate, MemoryStore};

mod failing_store;

const LEASE: Duration = Duration::from_secs(30);

fn key() -> Key {
    Key::json(["id"])
}

fn message(number: u64, payload: impl Into<String>) -> Message {
    let origin = Origin::Kafka {
        topic: "orders".into(),
        partition: 0,
        offset: i64::try_from(number).unwrap(),
    };
    Message::new("orders", origin, Some(payload.into().into()))
}

fn order(id: u64) -> Message {
    message(id, format!(r#"{{"id": {id}, "amount": 10}}"#))
}

async fn report(dry_run: DryRun, messages: Vec<Message>) -> ReplayReport {
    let mut examination = dry_run.open().await.unwrap();
    examination.add(messages).await.unwrap();
    examination.finish().await.unwrap()
}

async fn granted(gate: &Gate, message: &Message) -> oncegate_runtime::Lease {
    match gate.enter(message).await.unwrap() {
        Entry::Granted(lease) => lease,
        other => panic!("not granted: {other:?}"),
    }
}

async fn complete(gate: &Gate, message: &Message) {
    assert_eq!(
        granted(gate, message).await.complete(&()).await.unwrap(),
        Completion::Applied
    );
}

/// A store with one key in each state, by the plain rules.
async fn one_of_each(store: &MemoryStore) {
    let compiled = key().compile(&Scope::new("billing").unwrap()).unwrap();
    let completion = Operation::Complete {
        token: token(),
        fingerprint: None,
        result: "".into(),
        retention: LEASE,
    };
    let plans = [
        vec![claim(LEASE), completion],
        vec![],
        vec![claim(Duration::from_secs(1))],
        vec![claim(LEASE), release(Duration::ZERO)],
        vec![claim(LEASE)],
        vec![claim(LEASE), release(LEASE)],
        vec![
            claim(LEASE),
            fail(),
            Operation::HandOver { by: token().tag() },
        ],
        vec![claim(LEASE), fail()],
    ];
    for (plan, id) in plans.into_iter().zip(0..) {
        let key = compiled.derive("orders", &order(id)).unwrap();
        for operation in plan {
            store
                .execute(vec![Command {
                    key: key.clone(),
                    operation,
                }])
                .await
                .remove(0)
                .unwrap();
        }
    }
}

fn token() -> Token {
    Token::from_bits(7)
}

fn claim(lease: Duration) -> Operation {
    Operation::Claim {
        token: token(),
        lease,
        fingerprint: None,
        fenced: false,
        longest_lease: Duration::MAX,
    }
}

fn release(delay: Duration) -> Operation {
    Operation::Release {
        token: token(),
        delay,
        end: ReleaseCause::Failed,
        reason: "no".into(),
    }
}

fn fail() -> Operation {
    Operation::Fail {
        token: token(),
        reason: "never".into(),
        retention: LEASE,
    }
}

#[tokio::test(start_paused = true)]
async fn every_state_has_a_counter_of_its_own() {
    let store = Arc::new(MemoryStore::new());
    one_of_each(&store).await;
    tokio::time::advance(Duration::from_secs(2)).await;
    let report = report(
        DryRun::new("billing", key(), store),
        (0..8).map(order).collect(),
    )
    .await;

    assert_eq!(
        (
            report.messages,
            report.distinct_keys,
            report.distinct_keys_exact
        ),
        (8, 8, true)
    );
    assert_eq!(
        (report.completed, report.in_progress, report.waiting),
        (1, 1, 1)
    );
    assert_eq!(
        (report.without_record, report.abandoned, report.retry_due),
        (1, 1, 1)
    );
    assert_eq!(
        (report.would_run_again, report.would_run_again_keys),
        (3, 3)
    );
    assert_eq!(
        (report.failed_handed_over, report.failed_not_handed_over),
        (1, 1)
    );
    assert_eq!((report.handler_runs(), report.dead_letters()), (5, 1));
    let origins = report
        .examples
        .would_run_again
        .iter()
        .map(|example| example.origin.as_str());
    assert_eq!(
        origins.collect::<Vec<_>>(),
        ["orders/0@1", "orders/0@2", "orders/0@3"]
    );
    assert_eq!(
        report.examples.failed_not_handed_over[0].origin,
        "orders/0@7"
    );
}

#[tokio::test(start_paused = true)]
async fn what_has_no_record_is_selected_and_overdue_on_request() {
    let store = Arc::new(MemoryStore::new());
    one_of_each(&store).await;
    tokio::time::advance(Duration::from_secs(2)).await;
    for (which, expected) in [
        (RunAgain::WithoutRecord, vec![1]),
        (RunAgain::Overdue, vec![1, 2, 3]),
    ] {
        let selector = DryRun::new("billing", key(), Arc::clone(&store))
            .selector(which)
            .await
            .unwrap();
        let selected = selector
            .select(&(0..8).map(order).collect::<Vec<_>>())
            .await
            .unwrap();
        let offsets = selected
            .iter()
            .map(|message| message.origin().to_string())
            .collect::<Vec<_>>();
        assert_eq!(
            offsets,
            expected
                .iter()
                .map(|n| format!("orders/0@{n}"))
                .collect::<Vec<_>>()
        );
        assert!(
            selector
                .select(&[message(9, "{")])
                .await
                .unwrap()
                .is_empty(),
            "what has no key is left"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_ends_while_we_read_is_over() {
    let store = Arc::new(MemoryStore::new());
    one_of_each(&store).await;
    let mut examination = DryRun::new("billing", key(), store).open().await.unwrap();
    // The claim of 1 s is over by now.
    tokio::time::advance(Duration::from_secs(2)).await;
    examination.add(vec![order(2)]).await.unwrap();
    assert_eq!(examination.finish().await.unwrap().abandoned, 1);
}

#[tokio::test]
async fn a_topic_that_is_done_changes_nothing_and_is_not_changed() {
    let store = Arc::new(MemoryStore::new());
    let gate = Gate::new("billing", key(), Arc::clone(&store));
    for id in 0..700 {
        complete(&gate, &order(id)).await;
    }
    let before = store.records();
    let dry_run = DryRun::new("billing", key(), Arc::clone(&store));
    let messages = (0..10_000).map(|n| order(n % 700)).collect();
    let report = report(dry_run, messages).await;
    assert_eq!(
        (report.messages, report.completed, report.distinct_keys),
        (10_000, 10_000, 700)
    );
    assert!(report.changes_nothing());
    assert_eq!(store.records().len(), before.len());
    assert!(before.iter().all(|record| store.records().contains(record)));
}

#[tokio::test]
async fn what_has_no_key_is_counted_by_kind() {
    let bad = ["{", "{}", r#"{"id":null}"#, r#"{"id":1,"id":1}"#, "{"];
    let mut messages: Vec<Message> = bad
        .into_iter()
        .zip(0..)
        .map(|(text, n)| message(n, text))
        .collect();
    messages.push(Message::new(
        "orders",
        Origin::Other("tombstone".into()),
        None,
    ));
    let report = report(DryRun::new("billing", key(), MemoryStore::new()), messages).await;
    assert_eq!(
        (report.messages, report.undecodable, report.distinct_keys),
        (6, 6, 0)
    );
    let kinds: Vec<_> = report.undecodable_by_kind.into_iter().collect();
    assert_eq!(
        kinds,
        [
            ("duplicate_json_key", 1),
            ("malformed_json", 2),
            ("missing_field", 1),
            ("no_payload", 1),
            ("null_field", 1)
        ]
    );
    assert_eq!(report.examples.undecodable[1].origin, "orders/0@1");
    assert!(
        report.examples.undecodable[1]
            .why
            .contains("`id` is missing")
    );
    assert_eq!(report.examples.undecodable[1].key, None);
}

#[tokio::test]
async fn examples_are_the_first_ones_and_no_more() {
    let messages = (0..5_000).map(order).collect();
    let report = report(DryRun::new("billing", key(), MemoryStore::new()), messages).await;
    assert_eq!(
        (report.would_run_again, report.without_record),
        (5_000, 5_000)
    );
    let origins = report
        .examples
        .would_run_again
        .iter()
        .map(|example| example.origin.clone());
    assert_eq!(
        origins.collect::<Vec<_>>(),
        (0..10).map(|n| format!("orders/0@{n}")).collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn beyond_the_limit_keys_are_estimated_and_it_says_so() {
    let dry_run = DryRun::new("billing", key(), MemoryStore::new()).exact_keys_max(1_000);
    let report = report(dry_run, (0..20_000).map(order).collect()).await;
    assert!(!report.distinct_keys_exact && report.would_run_again_keys_exact);
    assert_eq!(report.would_run_again_keys, 20_000);
    assert!(
        report.distinct_keys.abs_diff(20_000) < 700,
        "{}",
        report.distinct_keys
    );
}

#[tokio::test]
async fn other_content_under_the_same_key_is_a_mismatch_when_asked() {
    let store = Arc::new(MemoryStore::new());
    let gate =
        Gate::new("billing", key(), Arc::clone(&store)).fingerprint(FingerprintSpec::payload());
    complete(&gate, &order(1)).await;
    let messages = vec![order(1), message(2, r#"{"id": 1, "amount": 11}"#)];

    let blind = DryRun::new("billing", key(), Arc::clone(&store));
    let examination = blind.open().await.unwrap();
    assert_eq!(examination.known(), Known::OtherFingerprint);
    let blind = report(
        DryRun::new("billing", key(), Arc::clone(&store)),
        messages.clone(),
    )
    .await;
    assert_eq!(
        (blind.completed, blind.mismatched, blind.uncompared),
        (2, 0, 0)
    );

    let seeing = DryRun::new("billing", key(), Arc::clone(&store));
    let seeing = report(seeing.fingerprint(FingerprintSpec::payload()), messages).await;
    assert_eq!(
        (seeing.completed, seeing.mismatched, seeing.uncompared),
        (1, 1, 0)
    );
    assert_eq!(seeing.examples.mismatched[0].origin, "orders/0@2");

    let other = DryRun::new("billing", key(), store)
        .fingerprint(FingerprintSpec::payload().except(["amount"]))
        .open()
        .await;
    assert!(matches!(other, Err(DryRunError::OtherKey { .. })));
}

#[tokio::test]
async fn another_key_than_the_stores_is_refused_without_a_write() {
    let store = Arc::new(MemoryStore::new());
    let scope = Scope::new("billing").unwrap();
    let stranger = DryRun::new("billing", key(), Arc::clone(&store))
        .open()
        .await
        .unwrap();
    assert_eq!(stranger.known(), Known::Nothing);
    assert_eq!(store.descriptor(&scope).await.unwrap(), None);

    Gate::new("billing", key(), Arc::clone(&store))
        .open()
        .await
        .unwrap();
    let same = DryRun::new("billing", Key::json(["id"]), Arc::clone(&store))
        .open()
        .await
        .unwrap();
    assert_eq!(same.known(), Known::Same);
    let other = DryRun::new("billing", Key::json(["amount"]), Arc::clone(&store))
        .open()
        .await;
    let text = other.unwrap_err().to_string();
    assert!(
        text.contains(r#"["id"]"#) && text.contains(r#"["amount"]"#),
        "{text}"
    );
}

#[test]
fn a_claim_is_judged_by_the_owners_lease() {
    let state = State::Pending {
        token: token(),
        attempt: 1,
        recovery: Default::default(),
        fencing_token: None,
    };
    let record = Record {
        expires_at: StoreTime::from_millis(50) + TAIL,
        fingerprint: None,
        state,
    };
    let standing = |now| {
        let snapshot = RecordSnapshot {
            now: StoreTime::from_millis(now),
            record: record.clone(),
        };
        judge(Ok(Some(snapshot)), None).0
    };
    assert!(matches!(standing(50), Standing::InProgress));
    assert!(matches!(standing(51), Standing::Abandoned));
}
