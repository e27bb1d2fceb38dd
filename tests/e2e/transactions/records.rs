//! Records in every state, and what the rules give for them.

use std::time::Duration;

use oncegate::codec::ToStored as _;
use oncegate::core::record::{State, Token};
use oncegate::core::rules::{Operation, Reply, Verdict, apply};
use oncegate::core::store::Command;
use oncegate::{Codec, Gate};

use crate::place::{LEASE, Place, key_of};

/// The states that a record may be in when its message comes again, and none.
pub(crate) const STATES: [&str; 6] = ["absent", "completed", "expired", "released", "failed", "lapsed"];

/// Brings the record of a payment into a state, by the store's own operations.
pub(crate) async fn prepare(place: &Place, id: i64, state: &str) {
    let (key, token) = (key_of(&place.scope, id), Token::from_bits(fastrand::u128(..)));
    let (lease, retention) = (Duration::from_secs(5), Duration::from_secs(86_400));
    let claim =
        Operation::Claim { token, lease, fingerprint: None, fenced: false, longest_lease: Duration::MAX };
    let reason = "before".to_owned();
    let receipt = "receipt of before".to_owned().to_stored(Codec::Json).unwrap();
    let (end, passes) = match state {
        "completed" => {
            (Operation::Complete { token, fingerprint: None, result: receipt, retention }, Duration::ZERO)
        }
        "expired" => {
            (Operation::Complete { token, fingerprint: None, result: receipt, retention }, retention * 2)
        }
        "released" => {
            let delay = Duration::from_secs(1);
            (Operation::Release { token, delay, counted: true, reason }, delay * 2)
        }
        "failed" => (Operation::Fail { token, reason, retention }, Duration::ZERO),
        "lapsed" => (Operation::Extend { token, lease }, lease * 2),
        _ => return,
    };
    for operation in [claim, end] {
        place.store.execute(vec![Command { key: key.clone(), operation }]).await.remove(0).unwrap();
    }
    place.pass(&key, passes).await;
}

/// The verdict that the rules give for a claim of a payment.
pub(crate) async fn verdict_of(place: &Place, id: i64) -> Verdict {
    let before = place.store.read(vec![key_of(&place.scope, id)]).await.remove(0).unwrap();
    let (token, lease) = (Token::from_bits(1), LEASE);
    let claim = Operation::Claim { token, lease, fingerprint: None, fenced: false, longest_lease: LEASE };
    let (now, record) = before.map_or_else(Default::default, |found| (found.now, Some(found.record)));
    let Reply::Verdict { verdict, .. } = apply(now, record, &claim).1 else { panic!("no verdict") };
    verdict
}

/// Compares the record with what the rules give for a claim and its completion.
pub(crate) async fn check_completed(place: &Place, id: i64, attempt: u8, what: &str) {
    let found = place.store.read(vec![key_of(&place.scope, id)]).await.remove(0).unwrap().unwrap();
    let State::Completed { by, .. } = found.record.state else { panic!("{what}: {found:?}") };
    let [a, b, c, d] = by.0;
    let token = Token::from([a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let claim =
        Operation::Claim { token, lease: LEASE, fingerprint: None, fenced: false, longest_lease: LEASE };
    let result = format!("receipt of attempt {attempt}").to_stored(Codec::Json).unwrap();
    let retention = Gate::DEFAULT_RETENTION;
    let complete = Operation::Complete { token, fingerprint: None, result, retention };
    let (claimed, _) = apply(found.now, None, &claim);
    let completed = apply(found.now, claimed, &complete).0.unwrap();
    assert!(found.record.same_content(&completed), "{what}: {found:?}");
    let age = completed.expires_at.millis().checked_sub(found.record.expires_at.millis());
    assert!(
        age.is_some_and(|age_ms| age_ms < 3_600_000),
        "{what}: the retention counts from the run, {age:?}"
    );
}
