//! Cases for the counting of attempts and the recovery after a crash.

use super::bench::{APPLIED, LEASE, STEP, StoreUnderTest};
use crate::record::{MAX_ATTEMPTS_COUNTED, Recovery, State, TAIL};
use crate::rules::ReleaseCause;

pub(super) async fn recovery_is_flagged_and_stays(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    subject.granted(&key, subject.token()).await;
    subject.pass(&key, 2 * STEP).await;

    let second = subject.token();
    assert_eq!(
        subject.granted(&key, second).await.recovery,
        Recovery::Takeover
    );
    for end in [
        ReleaseCause::Interrupted,
        ReleaseCause::Failed,
        ReleaseCause::NotStarted,
    ] {
        let mut owner = second;
        if subject.release(&key, owner, LEASE, end).await != APPLIED {
            owner = subject.token();
            assert_eq!(
                subject.granted(&key, owner).await.recovery,
                Recovery::Earlier
            );
            assert_eq!(subject.release(&key, owner, LEASE, end).await, APPLIED);
        }
        let record = subject
            .read(&key)
            .await
            .expect("a released key has a record");
        assert!(
            matches!(
                record.state,
                State::Released {
                    recovery: Recovery::Earlier,
                    ..
                }
            ),
            "{:?}",
            record.state
        );
        subject.pass(&key, 2 * STEP).await;
    }
    assert_eq!(
        subject.granted(&key, subject.token()).await.recovery,
        Recovery::Earlier
    );
    subject.pass(&key, 2 * STEP).await;
    assert_eq!(
        subject.granted(&key, subject.token()).await.recovery,
        Recovery::Takeover
    );
}

pub(super) async fn a_takeover_that_was_not_started_is_left_to_the_next_attempt(
    subject: &StoreUnderTest<'_>,
) {
    let key = subject.key("a");
    subject.granted(&key, subject.token()).await;
    subject.pass(&key, 2 * STEP).await;
    for _ in 0..2 {
        let token = subject.token();
        let grant = subject.granted(&key, token).await;
        assert_eq!((grant.attempt, grant.recovery), (2, Recovery::Takeover));
        assert_eq!(
            subject
                .release(&key, token, LEASE, ReleaseCause::NotStarted)
                .await,
            APPLIED
        );
        let record = subject
            .read(&key)
            .await
            .expect("a released key has a record");
        let is_left = matches!(
            record.state,
            State::Released {
                attempt: 1,
                recovery: Recovery::Takeover,
                ..
            }
        );
        assert!(is_left, "{:?}", record.state);
        subject.pass(&key, 2 * STEP).await;
    }
    let token = subject.token();
    assert_eq!(
        subject.granted(&key, token).await.recovery,
        Recovery::Takeover
    );
    assert_eq!(
        subject
            .release(&key, token, LEASE, ReleaseCause::Interrupted)
            .await,
        APPLIED
    );
    subject.pass(&key, 2 * STEP).await;
    let grant = subject.granted(&key, subject.token()).await;
    assert_eq!(
        (grant.attempt, grant.recovery),
        (2, Recovery::Earlier),
        "it was told to the attempt before"
    );
}

pub(super) async fn attempts_count_failures_and_crashes(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    for attempt in 1..=6 {
        let token = subject.token();
        assert_eq!(subject.granted(&key, token).await.attempt, attempt);
        if attempt % 2 == 0 {
            assert_eq!(
                subject
                    .release(&key, token, LEASE, ReleaseCause::Failed)
                    .await,
                APPLIED
            );
        }
        subject.pass(&key, 2 * STEP).await;
    }
}

pub(super) async fn an_uncounted_release_counts_nothing(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    for _ in 0..3 {
        let token = subject.token();
        let grant = subject.granted(&key, token).await;
        assert_eq!((grant.attempt, grant.recovery), (1, Recovery::None));
        assert_eq!(
            subject
                .release(&key, token, LEASE, ReleaseCause::Interrupted)
                .await,
            APPLIED
        );
        let record = subject
            .read(&key)
            .await
            .expect("a released key has a record");
        assert!(
            matches!(record.state, State::Released { attempt: 0, .. }),
            "{:?}",
            record.state
        );
        subject.pass(&key, 2 * STEP).await;
    }
}

pub(super) async fn a_discarded_attempt_is_flagged_and_counts(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    for (attempt, recovery) in [(1, Recovery::None), (2, Recovery::Earlier)] {
        let token = subject.token();
        let grant = subject.granted(&key, token).await;
        assert_eq!((grant.attempt, grant.recovery), (attempt, recovery));
        assert_eq!(
            subject
                .release(&key, token, LEASE, ReleaseCause::Discarded)
                .await,
            APPLIED
        );
        assert_eq!(
            subject
                .release(&key, token, LEASE, ReleaseCause::Discarded)
                .await,
            APPLIED,
            "a repeat"
        );
        let record = subject
            .read(&key)
            .await
            .expect("a released key has a record");
        let is_flagged = matches!(
            record.state,
            State::Released {
                recovery: Recovery::Earlier,
                ..
            }
        );
        assert!(is_flagged, "{:?}", record.state);
        subject.pass(&key, 2 * STEP).await;
    }
    // Of a takeover that is thrown away, there is one attempt to flag.
    subject.granted(&key, subject.token()).await;
    subject.pass(&key, 2 * STEP).await;
    let token = subject.token();
    let grant = subject.granted(&key, token).await;
    assert_eq!((grant.attempt, grant.recovery), (4, Recovery::Takeover));
    assert_eq!(
        subject
            .release(&key, token, LEASE, ReleaseCause::Discarded)
            .await,
        APPLIED
    );
    subject.pass(&key, 2 * STEP).await;
    let grant = subject.granted(&key, subject.token()).await;
    assert_eq!((grant.attempt, grant.recovery), (5, Recovery::Earlier));
}

pub(super) async fn an_abandoned_attempt_is_flagged_and_does_not_count(
    subject: &StoreUnderTest<'_>,
) {
    let key = subject.key("a");
    for recovery in [Recovery::None, Recovery::Earlier, Recovery::Earlier] {
        let token = subject.token();
        let grant = subject.granted(&key, token).await;
        assert_eq!((grant.attempt, grant.recovery), (1, recovery));
        for sent in ["first", "repeated"] {
            let reply = subject
                .release(&key, token, LEASE, ReleaseCause::Abandoned)
                .await;
            assert_eq!(reply, APPLIED, "{sent}");
        }
        subject.pass(&key, 2 * STEP).await;
    }
}

pub(super) async fn attempts_stay_at_the_limit(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    for _ in 0..MAX_ATTEMPTS_COUNTED {
        subject.granted(&key, subject.token()).await;
        subject.pass(&key, 2 * STEP).await;
    }
    let token = subject.token();
    assert_eq!(
        subject.granted(&key, token).await.attempt,
        MAX_ATTEMPTS_COUNTED
    );
    assert_eq!(
        subject
            .release(&key, token, LEASE, ReleaseCause::Failed)
            .await,
        APPLIED
    );
    subject.pass(&key, 2 * STEP).await;
    assert_eq!(
        subject.granted(&key, subject.token()).await.attempt,
        MAX_ATTEMPTS_COUNTED
    );
}

pub(super) async fn a_crash_is_remembered_for_days(subject: &StoreUnderTest<'_>) {
    let remembered = subject.key("remembered");
    let forgotten = subject.key("forgotten");
    for key in [&remembered, &forgotten] {
        subject.granted(key, subject.token()).await;
    }
    subject.pass(&remembered, TAIL + STEP).await;
    assert_eq!(
        subject.granted(&remembered, subject.token()).await.attempt,
        2
    );

    subject.pass(&forgotten, TAIL + 2 * STEP).await;
    let grant = subject.granted(&forgotten, subject.token()).await;
    assert_eq!((grant.attempt, grant.recovery), (1, Recovery::None));
}

pub(super) async fn a_release_is_remembered_for_days(subject: &StoreUnderTest<'_>) {
    let remembered = subject.key("remembered");
    let forgotten = subject.key("forgotten");
    for key in [&remembered, &forgotten] {
        let token = subject.token();
        subject.granted(key, token).await;
        assert_eq!(
            subject
                .release(key, token, LEASE, ReleaseCause::Failed)
                .await,
            APPLIED
        );
    }
    subject.pass(&remembered, TAIL + STEP).await;
    assert_eq!(
        subject.granted(&remembered, subject.token()).await.attempt,
        2
    );

    subject.pass(&forgotten, TAIL + 2 * STEP).await;
    assert_eq!(subject.read(&forgotten).await, None);
    assert_eq!(
        subject.granted(&forgotten, subject.token()).await.attempt,
        1
    );
}
