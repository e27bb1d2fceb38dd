//! Cases for many keys in one batch, and for many concurrent callers.

use std::sync::Arc;
use std::time::Duration;

use super::bench::{APPLIED, LEASE, STEP, StoreUnderTest, completion, join_all};
use crate::key::StoreKey;
use crate::record::Token;
use crate::rules::{Grant, Operation, Reply, Verdict};
use crate::store::Command;

/// A batch that is larger than a small page and smaller than any store's limit.
const MANY: usize = 400;

fn claim(key: &StoreKey, token: Token) -> Command {
    let operation = Operation::Claim {
        token,
        lease: LEASE,
        fingerprint: None,
        fenced: false,
        longest_lease: Duration::MAX,
    };
    Command {
        key: key.clone(),
        operation,
    }
}

fn many(subject: &StoreUnderTest<'_>, count: usize) -> Vec<(StoreKey, Token)> {
    (0..count)
        .map(|index| (subject.key(&format!("{index}")), subject.token()))
        .collect()
}

pub(super) async fn answers_stand_in_the_order_of_the_commands(subject: &StoreUnderTest<'_>) {
    let keys = many(subject, MANY);
    let claims = keys.iter().map(|(key, token)| claim(key, *token)).collect();
    for answer in subject.store.execute(claims).await {
        let reply = answer.expect("the store answers");
        assert!(matches!(
            reply,
            Reply::Verdict {
                verdict: Verdict::Granted(Grant { attempt: 1, .. }),
                ..
            }
        ));
    }
    // Every third key is completed, every third is extended, every third is claimed by another
    // owner.
    let mixed = keys
        .iter()
        .enumerate()
        .map(|(index, (key, token))| match index % 3 {
            0 => Command {
                key: key.clone(),
                operation: completion(*token, "done"),
            },
            1 => Command {
                key: key.clone(),
                operation: Operation::Extend {
                    token: *token,
                    lease: 4 * LEASE,
                },
            },
            _ => Command {
                key: key.clone(),
                operation: completion(subject.token(), "stolen"),
            },
        });
    let answers = subject.store.execute(mixed.collect()).await;
    assert_eq!(answers.len(), MANY);
    for (index, answer) in answers.into_iter().enumerate() {
        let expected = if index % 3 == 2 {
            Reply::NotOwner
        } else {
            APPLIED
        };
        assert_eq!(
            answer.expect("the store answers"),
            expected,
            "command {index}"
        );
    }
    let claims = keys
        .iter()
        .map(|(key, _)| claim(key, subject.token()))
        .collect();
    for (index, answer) in subject.store.execute(claims).await.into_iter().enumerate() {
        match answer.expect("the store answers") {
            Reply::Verdict {
                verdict: Verdict::Completed { .. },
                ..
            } => assert_eq!(index % 3, 0),
            Reply::Verdict {
                verdict: Verdict::Busy { retry_in },
                ..
            } => {
                assert_eq!(retry_in > 2 * LEASE, index % 3 == 1, "command {index}");
            }
            other => panic!("command {index}: {other:?}"),
        }
    }
}

pub(super) async fn empty_batches_are_answered(subject: &StoreUnderTest<'_>) {
    assert!(subject.store.execute(Vec::new()).await.is_empty());
    assert!(subject.store.read(Vec::new()).await.is_empty());
}

pub(super) async fn many_keys_are_read_at_once(subject: &StoreUnderTest<'_>) {
    let keys = many(subject, MANY);
    let claims = keys
        .iter()
        .step_by(2)
        .map(|(key, token)| claim(key, *token))
        .collect();
    subject.store.execute(claims).await;

    let mut asked: Vec<StoreKey> = keys.iter().map(|(key, _)| key.clone()).collect();
    asked.extend(keys.first().map(|(key, _)| key.clone()));
    let found = subject.store.read(asked).await;
    assert_eq!(
        found.len(),
        MANY + 1,
        "a key that is read twice is returned twice"
    );
    for (index, answer) in found.into_iter().enumerate() {
        let record = answer.expect("the store answers");
        let is_claimed = (index % MANY).is_multiple_of(2);
        assert_eq!(record.is_some(), is_claimed, "key {index}");
    }
}

pub(super) async fn one_of_many_claimants_is_granted(subject: &StoreUnderTest<'_>) {
    for round in 0..4 {
        let key = subject.key(&format!("{round}"));
        assert_eq!(granted_among(subject, &key, 64).await, 1);
    }
}

pub(super) async fn one_of_many_takes_over(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    subject.granted(&key, subject.token()).await;
    for _ in 0..4 {
        subject.pass(&key, 2 * STEP).await;
        assert_eq!(granted_among(subject, &key, 16).await, 1);
    }
}

/// Claims one key concurrently. Returns how many claims are granted; all others must be busy.
async fn granted_among(subject: &StoreUnderTest<'_>, key: &StoreKey, claimants: usize) -> usize {
    let claims = (0..claimants).map(|_| {
        let store = Arc::clone(&subject.store);
        let command = claim(key, subject.token());
        async move { store.execute(vec![command]).await.pop() }
    });
    let mut granted = 0;
    for answer in join_all(claims).await {
        match answer.expect("one answer").expect("the store answers") {
            Reply::Verdict {
                verdict: Verdict::Granted(_),
                ..
            } => granted += 1,
            Reply::Verdict {
                verdict: Verdict::Busy { .. },
                ..
            } => {}
            other => panic!("unexpected reply to a claim: {other:?}"),
        }
    }
    granted
}

pub(super) async fn concurrent_repeats_of_a_complete_are_held(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    let repeats = (0..32).map(|_| {
        let command = Command {
            key: key.clone(),
            operation: completion(token, "done"),
        };
        let store = Arc::clone(&subject.store);
        async move { store.execute(vec![command]).await.pop() }
    });
    for answer in join_all(repeats).await {
        assert_eq!(
            answer.expect("one answer").expect("the store answers"),
            APPLIED
        );
    }
}

pub(super) async fn batches_that_cross_each_other_all_end(subject: &StoreUnderTest<'_>) {
    let keys: Vec<StoreKey> = (0..48)
        .map(|index| subject.key(&format!("{index}")))
        .collect();
    let batches = (0..8).map(|turn| {
        let mut order = keys.clone();
        order.rotate_left(turn * 6);
        let commands = order
            .iter()
            .map(|key| claim(key, subject.token()))
            .collect();
        let store = Arc::clone(&subject.store);
        async move { store.execute(commands).await }
    });
    let mut granted = 0;
    for answer in join_all(batches).await.into_iter().flatten() {
        let reply = answer.expect("the store answers");
        granted += usize::from(matches!(
            reply,
            Reply::Verdict {
                verdict: Verdict::Granted(_),
                ..
            }
        ));
    }
    assert_eq!(granted, keys.len(), "each key is granted once");
}
