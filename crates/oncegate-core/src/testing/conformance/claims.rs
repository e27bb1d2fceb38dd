//! Cases for claims, leases and fencing tokens.

use super::bench::{APPLIED, LEASE, SLACK, STEP, StoreUnderTest};
use crate::record::{Recovery, State};
use crate::rules::{Grant, ReleaseCause, Reply, Verdict};

pub(super) async fn an_absent_key_is_granted(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    let grant = subject.granted(&key, token).await;
    assert_eq!(
        grant,
        Grant {
            attempt: 1,
            recovery: Recovery::None,
            fencing_token: None,
            reopened: false
        }
    );
    let record = subject
        .read(&key)
        .await
        .expect("a claimed key has a record");
    assert_eq!(record.fingerprint, None);
    assert_eq!(
        record.state,
        State::Pending {
            token,
            attempt: 1,
            recovery: Recovery::None,
            fencing_token: None
        }
    );
}

pub(super) async fn a_live_claim_is_busy(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    let before = subject.content(&key).await;
    let retry_in = subject.busy(&key).await;
    assert!(retry_in > LEASE - SLACK, "{retry_in:?} is too soon");
    assert!(
        retry_in.as_millis() <= LEASE.as_millis() + 1,
        "{retry_in:?} is too late"
    );
    subject.pass(&key, STEP).await;
    let retry_in = subject.busy(&key).await;
    assert!(!retry_in.is_zero(), "a zero wait would make callers spin");
    assert!(
        retry_in.as_millis() <= (LEASE - STEP).as_millis() + 1,
        "{retry_in:?} is too late"
    );
    assert_eq!(
        subject.content(&key).await,
        before,
        "a busy answer changes nothing"
    );
    assert_eq!(subject.complete(&key, token, "done").await, APPLIED);
}

pub(super) async fn a_claim_whose_lease_is_over_is_taken_over(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let first = subject.token();
    let second = subject.token();
    subject.granted(&key, first).await;
    subject.pass(&key, 2 * STEP).await;
    let grant = subject.granted(&key, second).await;
    assert_eq!(
        grant,
        Grant {
            attempt: 2,
            recovery: Recovery::Takeover,
            fencing_token: None,
            reopened: false
        }
    );
    assert!(
        matches!(subject.claim(&key, first).await, Verdict::Busy { .. }),
        "the first owner waits"
    );
    assert_eq!(subject.extend(&key, first, LEASE).await, Reply::NotOwner);
    assert_eq!(subject.extend(&key, second, LEASE).await, APPLIED);
}

pub(super) async fn the_same_token_gets_the_same_grant_again(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    let first = subject.granted_fenced(&key, token).await;
    assert_eq!(subject.granted_fenced(&key, token).await, first);
    subject.pass(&key, 2 * STEP).await;
    assert_eq!(
        subject.granted_fenced(&key, token).await,
        first,
        "no other owner took over in the meantime"
    );

    let next = subject.token();
    let takeover = subject.granted_fenced(&key, next).await;
    assert_eq!(takeover.recovery, Recovery::Takeover);
    assert_eq!(subject.granted_fenced(&key, next).await, takeover);
}

// invariant: clock-goes-back
pub(super) async fn a_lease_beyond_the_longest_of_the_scope_is_cut(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    // As after a clock that went back: more is left than any owner has asked for.
    assert_eq!(subject.extend(&key, token, 100 * LEASE).await, APPLIED);
    let retry_in = subject.busy_within(&key, 200 * LEASE).await;
    assert!(
        retry_in > 99 * LEASE,
        "a lease that is not too long is kept: {retry_in:?}"
    );
    let retry_in = subject.busy_within(&key, LEASE).await;
    assert!(
        retry_in.as_millis() <= LEASE.as_millis() + 1,
        "{retry_in:?} is too late"
    );
    assert!(retry_in > LEASE - SLACK, "{retry_in:?} is too soon");
    // The owner is not affected while it sends heartbeats.
    subject.pass(&key, STEP).await;
    assert_eq!(subject.extend(&key, token, LEASE).await, APPLIED);
    subject.pass(&key, STEP).await;
    subject.busy(&key).await;
    subject.pass(&key, STEP).await;
    let grant = subject.granted(&key, subject.token()).await;
    assert_eq!((grant.attempt, grant.recovery), (2, Recovery::Takeover));

    // The wait for a retry is no lease.
    let released = subject.key("released");
    subject.granted(&released, token).await;
    assert_eq!(
        subject
            .release(&released, token, 100 * LEASE, ReleaseCause::Failed)
            .await,
        APPLIED
    );
    assert!(subject.busy_within(&released, LEASE).await > 99 * LEASE);
}

pub(super) async fn an_extend_keeps_a_claim_alive(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    for _ in 0..5 {
        subject.pass(&key, STEP).await;
        assert_eq!(subject.extend(&key, token, LEASE).await, APPLIED);
    }
    subject.pass(&key, STEP).await;
    subject.busy(&key).await;
    subject.pass(&key, STEP).await;
    assert_eq!(subject.granted(&key, subject.token()).await.attempt, 2);
}

pub(super) async fn an_extend_never_moves_a_lease_back(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    assert_eq!(subject.extend(&key, token, LEASE - STEP).await, APPLIED);
    subject.pass(&key, STEP).await;
    subject.busy(&key).await;
}

pub(super) async fn an_extend_revives_a_lease_that_was_not_taken_over(
    subject: &StoreUnderTest<'_>,
) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    subject.pass(&key, 3 * STEP).await;
    assert_eq!(subject.extend(&key, token, LEASE).await, APPLIED);
    subject.busy(&key).await;
}

// invariant: stale-owner
pub(super) async fn an_extend_by_a_stranger_is_lost(subject: &StoreUnderTest<'_>) {
    for (key, state) in subject.in_every_state(None).await {
        let before = subject.read(&key).await;
        assert_eq!(
            subject.extend(&key, subject.token(), 9 * LEASE).await,
            Reply::NotOwner,
            "{state}"
        );
        assert_eq!(subject.read(&key).await, before, "{state}");
    }
}

pub(super) async fn an_extend_recreates_nothing(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    assert_eq!(subject.extend(&key, token, LEASE).await, Reply::NotOwner);
    assert_eq!(subject.read(&key).await, None);
    subject.granted(&key, token).await;
    subject.pass(&key, LEASE + crate::record::TAIL + STEP).await;
    assert_eq!(
        subject.extend(&key, token, LEASE).await,
        Reply::NotOwner,
        "the record had expired"
    );
    assert_eq!(subject.read(&key).await, None);
}

pub(super) async fn an_extend_after_the_own_end_is_held(subject: &StoreUnderTest<'_>) {
    for end in ["complete", "release", "fail"] {
        let key = subject.key(end);
        let token = subject.token();
        subject.granted(&key, token).await;
        let reply = match end {
            "complete" => subject.complete(&key, token, "done").await,
            "release" => {
                subject
                    .release(&key, token, LEASE, ReleaseCause::Failed)
                    .await
            }
            _ => subject.fail(&key, token, "broken").await,
        };
        assert_eq!(reply, APPLIED, "{end}");
        let before = subject.read(&key).await;
        assert_eq!(
            subject.extend(&key, token, 9 * LEASE).await,
            APPLIED,
            "a late heartbeat lost nothing: {end}"
        );
        assert_eq!(subject.read(&key).await, before, "{end}");
    }
}

pub(super) async fn a_fencing_token_only_grows(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let mut last = None;
    for round in 0..6 {
        let token = subject.token();
        let fencing_token = subject.granted_fenced(&key, token).await.fencing_token;
        assert!(
            fencing_token.is_some(),
            "a fenced claim gets a fencing token"
        );
        assert!(fencing_token > last, "{fencing_token:?} after {last:?}");
        last = fencing_token;
        match round % 3 {
            0 => assert_eq!(
                subject
                    .release(&key, token, LEASE, ReleaseCause::Failed)
                    .await,
                APPLIED
            ),
            1 => assert_eq!(
                subject
                    .release(&key, token, LEASE, ReleaseCause::Interrupted)
                    .await,
                APPLIED
            ),
            _ => {}
        }
        subject.pass(&key, 2 * STEP).await;
    }
}

pub(super) async fn a_fencing_token_grows_over_a_lost_record(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    let first = subject.granted_fenced(&key, token).await.fencing_token;
    assert_eq!(subject.complete(&key, token, "done").await, APPLIED);
    subject.pass(&key, super::bench::RETENTION + STEP).await;
    let second = subject
        .granted_fenced(&key, subject.token())
        .await
        .fencing_token;
    assert!(second > first, "{second:?} after {first:?}");
}

pub(super) async fn a_claim_without_a_fencing_token_gets_none(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted_fenced(&key, token).await;
    subject.pass(&key, 2 * STEP).await;
    assert_eq!(
        subject.granted(&key, subject.token()).await.fencing_token,
        None
    );
}
