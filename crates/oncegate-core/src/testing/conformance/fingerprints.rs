//! Cases for the same key with other content.

use super::super::fingerprint;
use super::bench::{APPLIED, STEP, StoreUnderTest};
use crate::rules::{Reply, Verdict};

pub(super) async fn another_fingerprint_is_a_mismatch_in_every_state(subject: &StoreUnderTest<'_>) {
    for (key, state) in subject.in_every_state(Some(fingerprint(1, 1))).await {
        let before = subject.read(&key).await;
        let reply = subject
            .claim_as(&key, subject.token(), Some(fingerprint(1, 2)))
            .await;
        assert_eq!(
            reply,
            Reply::Verdict {
                verdict: Verdict::Mismatch,
                uncompared: false
            },
            "{state}"
        );
        assert_eq!(
            subject.read(&key).await,
            before,
            "a mismatch changes nothing: {state}"
        );
    }
}

pub(super) async fn the_same_fingerprint_is_no_mismatch(subject: &StoreUnderTest<'_>) {
    let print = Some(fingerprint(1, 1));
    for (key, state) in subject.in_every_state(print).await {
        let reply = subject.claim_as(&key, subject.token(), print).await;
        let Reply::Verdict {
            verdict,
            uncompared: false,
        } = reply
        else {
            panic!("{state}: {reply:?}");
        };
        assert_eq!(
            ClaimKind::of(&verdict),
            ClaimKind::expected(state),
            "{state}"
        );
    }
}

pub(super) async fn another_specification_is_not_compared(subject: &StoreUnderTest<'_>) {
    let pairs = [
        (Some(fingerprint(1, 1)), Some(fingerprint(2, 2))),
        (Some(fingerprint(1, 1)), None),
        (None, Some(fingerprint(2, 2))),
        // A mark of a content, which refuses no other one.
        (Some(fingerprint(0, 1)), Some(fingerprint(0, 2))),
        (Some(fingerprint(0, 1)), Some(fingerprint(1, 1))),
    ];
    for (theirs, ours) in pairs {
        for (key, state) in subject.in_every_state(theirs).await {
            let reply = subject.claim_as(&key, subject.token(), ours).await;
            let Reply::Verdict {
                verdict,
                uncompared: true,
            } = reply
            else {
                panic!("{state}: {reply:?}");
            };
            assert_eq!(
                ClaimKind::of(&verdict),
                ClaimKind::expected(state),
                "{state}"
            );
        }
    }
}

pub(super) async fn the_record_keeps_the_fingerprint_of_the_claim(subject: &StoreUnderTest<'_>) {
    let first = fingerprint(1, 1);
    let second = fingerprint(2, 2);
    for (key, state) in subject.in_every_state(Some(first)).await {
        let record = subject.read(&key).await.expect("every state has a record");
        assert_eq!(record.fingerprint, Some(first), "{state}");
    }
    let key = subject.key("taken-over");
    subject.claim_as(&key, subject.token(), Some(first)).await;
    subject.pass(&key, 2 * STEP).await;
    let token = subject.token();
    subject.claim_as(&key, token, Some(second)).await;
    assert_eq!(subject.complete(&key, token, "done").await, APPLIED);
    let record = subject
        .read(&key)
        .await
        .expect("a completed key has a record");
    assert_eq!(
        record.fingerprint,
        Some(second),
        "the content that ran is the content on record"
    );
}

/// The kind of a claim outcome, without its details.
#[derive(Debug, PartialEq)]
enum ClaimKind {
    Granted,
    Busy,
    Completed,
    Failed,
    Mismatch,
}

impl ClaimKind {
    fn of(verdict: &Verdict) -> Self {
        match verdict {
            Verdict::Granted(_) => Self::Granted,
            Verdict::Busy { .. } => Self::Busy,
            Verdict::Completed { .. } => Self::Completed,
            Verdict::Failed { .. } => Self::Failed,
            Verdict::Mismatch => Self::Mismatch,
        }
    }

    fn expected(state: &str) -> Self {
        match state {
            "pending" | "released" => Self::Busy,
            "over" | "due" => Self::Granted,
            "completed" => Self::Completed,
            _ => Self::Failed,
        }
    }
}
