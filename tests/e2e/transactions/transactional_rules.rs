//! What a transaction without a claim does with a record, compared with the rules.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use oncegate::codec::ToStored as _;
use oncegate::core::record::{State, Token};
use oncegate::core::rules::{Operation, ReleaseCause, Reply, Verdict, apply};
use oncegate::core::store::Command;
use oncegate::{Codec, GateSettings};

use crate::place::{Bench, LEASE, Place, key_of};
use crate::transactional::{After, GIVEN, Pay};

/// The states that a record may be in when its message comes again, and none.
pub(crate) const STATES: [&str; 6] = [
    "absent",
    "completed",
    "expired",
    "released",
    "failed",
    "lapsed",
];

/// Brings the record of a payment into a state, by the store's own operations.
pub(crate) async fn prepare(place: &Place, id: i64, state: &str) {
    let key = key_of(&place.scope, id);
    let token = Token::from_bits(fastrand::u128(..));
    let lease = Duration::from_secs(5);
    let retention = Duration::from_secs(86_400);
    let claim = Operation::Claim {
        token,
        lease,
        fingerprint: None,
        fenced: false,
        longest_lease: Duration::MAX,
    };
    let reason = "before".to_owned();
    let receipt = "receipt of before"
        .to_owned()
        .to_stored(Codec::Json)
        .unwrap();
    let complete = Operation::Complete {
        token,
        fingerprint: None,
        result: receipt,
        retention,
    };
    let (end, passes) = match state {
        "completed" => (complete, Duration::ZERO),
        "expired" => (complete, retention * 2),
        "released" => {
            let delay = Duration::from_secs(1);
            (
                Operation::Release {
                    token,
                    delay,
                    end: ReleaseCause::Failed,
                    reason,
                },
                delay * 2,
            )
        }
        "failed" => (
            Operation::Fail {
                token,
                reason,
                retention,
            },
            Duration::ZERO,
        ),
        "lapsed" => (Operation::Extend { token, lease }, lease * 2),
        _ => return,
    };
    for operation in [claim, end] {
        place
            .store
            .execute(vec![Command {
                key: key.clone(),
                operation,
            }])
            .await
            .remove(0)
            .unwrap();
    }
    place.pass(&key, passes).await;
}

/// The verdict that the rules give for a claim of a payment.
pub(crate) async fn verdict_of(place: &Place, id: i64) -> Verdict {
    let before = place
        .store
        .read(vec![key_of(&place.scope, id)])
        .await
        .remove(0)
        .unwrap();
    let token = Token::from_bits(1);
    let lease = LEASE;
    let claim = Operation::Claim {
        token,
        lease,
        fingerprint: None,
        fenced: false,
        longest_lease: LEASE,
    };
    let (now, record) =
        before.map_or_else(Default::default, |found| (found.now, Some(found.record)));
    let Reply::Verdict { verdict, .. } = apply(now, record, &claim).1 else {
        panic!("no verdict")
    };
    verdict
}

/// The rules say whether a claim would be granted, and as which attempt; a transaction must do the
/// same.
// invariant: transactional-beside-another
#[tokio::test(flavor = "multi_thread")]
async fn what_a_transaction_does_with_a_record_is_what_the_rules_give() {
    for client in GIVEN {
        for state in STATES {
            let place = Place::patient(client).await;
            prepare(&place, 1, state).await;
            let verdict = verdict_of(&place, 1).await;
            let bench = Bench::of(&[1]);
            let pay = Pay::new(&place, After::Return);
            bench
                .run(place.gate(LEASE), place.transactional(pay.clone()).await, 1)
                .await;
            let charges = place.till.charges().await;
            let told = pay.told.lock().unwrap().clone();
            match verdict {
                Verdict::Granted(grant) => {
                    assert_eq!(charges[&1], [i32::from(grant.attempt)], "{client}, {state}");
                    check_completed(&place, 1, grant.attempt, &format!("{client}, {state}")).await;
                }
                Verdict::Completed { .. } => {
                    assert_eq!(told, ["receipt of before"], "{client}, {state}");
                }
                Verdict::Failed { .. } => {
                    assert_eq!(
                        bench.letters.causes(),
                        ["not_handed_over"],
                        "{client}, {state}"
                    );
                }
                other => panic!("{client}, {state}: {other:?}"),
            }
            assert_eq!(
                u32::try_from(charges.len()).unwrap(),
                pay.runs.load(SeqCst),
                "{client}, {state}"
            );
        }
    }
}

/// Compares the record with what the rules give for a claim and its completion.
pub(crate) async fn check_completed(place: &Place, id: i64, attempt: u8, what: &str) {
    let found = place
        .store
        .read(vec![key_of(&place.scope, id)])
        .await
        .remove(0)
        .unwrap()
        .unwrap();
    let State::Completed { by, .. } = found.record.state else {
        panic!("{what}: {found:?}")
    };
    // One key in sixteen has a mark of its content.
    let fingerprint = found.record.fingerprint;
    let [a, b, c, d] = by.0;
    let token = Token::from([a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let claim = Operation::Claim {
        token,
        lease: LEASE,
        fingerprint,
        fenced: false,
        longest_lease: LEASE,
    };
    let result = format!("receipt of attempt {attempt}")
        .to_stored(Codec::Json)
        .unwrap();
    let retention = GateSettings::DEFAULT.retention;
    let complete = Operation::Complete {
        token,
        fingerprint,
        result,
        retention,
    };
    let (claimed, _) = apply(found.now, None, &claim);
    let completed = apply(found.now, claimed, &complete).0.unwrap();
    assert!(found.record.same_content(&completed), "{what}: {found:?}");
    let age = completed
        .expires_at
        .millis()
        .checked_sub(found.record.expires_at.millis());
    assert!(
        age.is_some_and(|age_ms| age_ms < 3_600_000),
        "{what}: the retention counts from the run, {age:?}"
    );
}
