//! Cases for complete, release and fail.

use std::time::Duration;

use bytes::Bytes;

use super::bench::{APPLIED, LEASE, RETENTION, SLACK, STEP, StoreUnderTest, completion, done};
use crate::record::{MAX_REASON_BYTES, Recovery, State};
use crate::rules::{Operation, ReleaseCause, Reply, Verdict};

pub(super) async fn a_completed_key_answers_with_its_result(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    assert_eq!(subject.complete(&key, token, "first").await, APPLIED);
    let result = Bytes::from_static(b"first");
    let record = subject
        .read(&key)
        .await
        .expect("a completed key has a record");
    assert_eq!(
        record.state,
        State::Completed {
            by: token.tag(),
            result
        }
    );
    for _ in 0..2 {
        assert_eq!(subject.claim(&key, subject.token()).await, done("first"));
        assert_eq!(
            subject.claim(&key, token).await,
            done("first"),
            "also with the owner's token"
        );
    }
}

pub(super) async fn a_late_complete_counts_before_a_takeover(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    subject.pass(&key, 2 * STEP).await;
    assert_eq!(subject.complete(&key, token, "late").await, APPLIED);
    assert_eq!(subject.claim(&key, subject.token()).await, done("late"));
}

// invariant: stale-owner
pub(super) async fn a_complete_after_a_takeover_is_lost(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let first = subject.token();
    let second = subject.token();
    subject.granted(&key, first).await;
    subject.pass(&key, 2 * STEP).await;
    subject.granted(&key, second).await;
    let before = subject.read(&key).await;
    assert_eq!(
        subject.complete(&key, first, "stale").await,
        Reply::NotOwner
    );
    assert_eq!(
        subject.read(&key).await,
        before,
        "a complete without ownership changes nothing"
    );
    assert_eq!(subject.complete(&key, second, "fresh").await, APPLIED);
    assert_eq!(
        subject.complete(&key, first, "stale").await,
        Reply::NotOwner
    );
    assert_eq!(subject.claim(&key, subject.token()).await, done("fresh"));
}

// invariant: second-run-of-completed
pub(super) async fn a_repeated_complete_keeps_the_first_result(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    assert_eq!(subject.complete(&key, token, "first").await, APPLIED);
    assert_eq!(subject.complete(&key, token, "second").await, APPLIED);
    assert_eq!(subject.claim(&key, subject.token()).await, done("first"));
}

// invariant: stale-owner
pub(super) async fn a_complete_by_a_stranger_is_lost(subject: &StoreUnderTest<'_>) {
    for (key, state) in subject.in_every_state(None).await {
        let before = subject.read(&key).await;
        assert_eq!(
            subject.complete(&key, subject.token(), "stolen").await,
            Reply::NotOwner,
            "{state}"
        );
        assert_eq!(subject.read(&key).await, before, "{state}");
    }
}

pub(super) async fn a_complete_after_another_end_is_lost(subject: &StoreUnderTest<'_>) {
    let released = subject.key("released");
    let failed = subject.key("failed");
    let first = subject.token();
    let second = subject.token();
    subject.granted(&released, first).await;
    assert_eq!(
        subject
            .release(&released, first, LEASE, ReleaseCause::Failed)
            .await,
        APPLIED
    );
    assert_eq!(
        subject.complete(&released, first, "late").await,
        Reply::NotOwner
    );
    subject.granted(&failed, second).await;
    assert_eq!(subject.fail(&failed, second, "broken").await, APPLIED);
    assert_eq!(
        subject.complete(&failed, second, "late").await,
        Reply::NotOwner
    );
}

pub(super) async fn a_complete_of_a_lost_claim_recreates_the_record(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    let print = super::super::fingerprint(1, 7);
    let complete = Operation::Complete {
        token,
        fingerprint: Some(print),
        result: Bytes::from_static(b"kept"),
        retention: LEASE,
    };
    assert_eq!(
        subject.apply(&key, complete.clone()).await,
        Reply::Applied { recreated: true }
    );
    assert_eq!(
        subject.apply(&key, complete).await,
        APPLIED,
        "a repeat finds the record"
    );
    let record = subject.read(&key).await.expect("the record is recreated");
    assert_eq!(record.fingerprint, Some(print));
    assert_eq!(
        record.state,
        State::Completed {
            by: token.tag(),
            result: Bytes::from_static(b"kept")
        }
    );
    subject.pass(&key, 2 * STEP).await;
    assert_eq!(
        subject.read(&key).await,
        None,
        "a recreated record expires too"
    );
}

// invariant: second-run-of-completed
pub(super) async fn a_completed_record_lasts_for_its_retention(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    let result = Bytes::from_static(b"done");
    let complete = Operation::Complete {
        token,
        fingerprint: None,
        result,
        retention: LEASE,
    };
    assert_eq!(subject.apply(&key, complete).await, APPLIED);
    subject.pass(&key, STEP).await;
    assert_eq!(subject.claim(&key, subject.token()).await, done("done"));
    subject.pass(&key, STEP).await;
    assert_eq!(subject.read(&key).await, None);
    let grant = subject.granted(&key, subject.token()).await;
    assert_eq!((grant.attempt, grant.recovery), (1, Recovery::None));
}

pub(super) async fn a_very_long_retention_is_kept(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    let retention = Duration::from_secs(100 * 366 * 86_400);
    subject.granted(&key, token).await;
    let result = Bytes::from_static(b"done");
    let complete = Operation::Complete {
        token,
        fingerprint: None,
        result,
        retention,
    };
    assert_eq!(subject.apply(&key, complete).await, APPLIED);
    subject.pass(&key, retention - LEASE).await;
    assert_eq!(subject.claim(&key, subject.token()).await, done("done"));
}

pub(super) async fn a_released_key_waits_for_its_delay(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    assert_eq!(
        subject
            .release(&key, token, LEASE, ReleaseCause::Failed)
            .await,
        APPLIED
    );
    let record = subject
        .read(&key)
        .await
        .expect("a released key has a record");
    let reason = "later".to_owned();
    let state = State::Released {
        by: token.tag(),
        attempt: 1,
        recovery: Recovery::None,
        fencing_token: None,
        reason,
    };
    assert_eq!(record.state, state);

    let retry_in = subject.busy(&key).await;
    assert!(retry_in > LEASE - SLACK, "{retry_in:?} is too soon");
    assert!(
        retry_in.as_millis() <= LEASE.as_millis() + 1,
        "{retry_in:?} is too late"
    );
    subject.pass(&key, STEP).await;
    assert!(!subject.busy(&key).await.is_zero());
    subject.pass(&key, STEP).await;
    assert_eq!(subject.granted(&key, subject.token()).await.attempt, 2);
}

pub(super) async fn a_repeated_release_changes_nothing(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    assert_eq!(
        subject
            .release(&key, token, LEASE, ReleaseCause::Failed)
            .await,
        APPLIED
    );
    let before = subject.read(&key).await;
    assert_eq!(
        subject
            .release(&key, token, 9 * LEASE, ReleaseCause::Interrupted)
            .await,
        APPLIED
    );
    assert_eq!(subject.read(&key).await, before);
}

// invariant: stale-owner
pub(super) async fn a_release_by_a_stranger_is_lost(subject: &StoreUnderTest<'_>) {
    for (key, state) in subject.in_every_state(None).await {
        let before = subject.read(&key).await;
        assert_eq!(
            subject
                .release(&key, subject.token(), LEASE, ReleaseCause::Failed)
                .await,
            Reply::NotOwner,
            "{state}"
        );
        assert_eq!(subject.read(&key).await, before, "{state}");
    }
    let absent = subject.key("absent");
    assert_eq!(
        subject
            .release(&absent, subject.token(), LEASE, ReleaseCause::Failed)
            .await,
        Reply::NotOwner
    );
    assert_eq!(subject.read(&absent).await, None);
}

pub(super) async fn a_failed_key_says_why(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    assert_eq!(subject.fail(&key, token, "no such account").await, APPLIED);
    let failed = Verdict::Failed {
        reason: "no such account".to_owned(),
        handed_over: false,
        by: token.tag(),
    };
    assert_eq!(subject.claim(&key, subject.token()).await, failed);
    assert_eq!(subject.claim(&key, token).await, failed);
    let record = subject.read(&key).await.expect("a failed key has a record");
    let reason = "no such account".to_owned();
    assert_eq!(
        record.state,
        State::Failed {
            by: token.tag(),
            attempt: 1,
            handed_over: false,
            reason
        }
    );
}

pub(super) async fn a_failed_record_lasts_for_its_retention(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    let fail = Operation::Fail {
        token,
        reason: String::new(),
        retention: LEASE,
    };
    assert_eq!(subject.apply(&key, fail).await, APPLIED);
    subject.pass(&key, STEP).await;
    assert!(matches!(
        subject.claim(&key, subject.token()).await,
        Verdict::Failed { .. }
    ));
    subject.pass(&key, STEP).await;
    assert_eq!(subject.granted(&key, subject.token()).await.attempt, 1);
}

pub(super) async fn a_repeated_fail_changes_nothing(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    assert_eq!(subject.fail(&key, token, "first").await, APPLIED);
    assert_eq!(
        subject
            .apply(&key, Operation::HandOver { by: token.tag() })
            .await,
        APPLIED
    );
    let before = subject.read(&key).await;
    assert_eq!(subject.fail(&key, token, "second").await, APPLIED);
    assert_eq!(subject.read(&key).await, before, "the hand-over mark stays");
}

// invariant: stale-owner
pub(super) async fn a_fail_by_a_stranger_is_lost(subject: &StoreUnderTest<'_>) {
    for (key, state) in subject.in_every_state(None).await {
        let before = subject.read(&key).await;
        assert_eq!(
            subject.fail(&key, subject.token(), "broken").await,
            Reply::NotOwner,
            "{state}"
        );
        assert_eq!(subject.read(&key).await, before, "{state}");
    }
    let absent = subject.key("absent");
    assert_eq!(
        subject.fail(&absent, subject.token(), "broken").await,
        Reply::NotOwner
    );
    assert_eq!(subject.read(&absent).await, None);
}

pub(super) async fn reasons_are_cut_at_whole_characters(subject: &StoreUnderTest<'_>) {
    let whole = "x".repeat(MAX_REASON_BYTES);
    let cases = [
        (String::new(), String::new()),
        (whole.clone(), whole.clone()),
        (format!("{whole}x"), whole),
        (
            "ä".repeat(MAX_REASON_BYTES),
            "ä".repeat(MAX_REASON_BYTES / 2),
        ),
        (
            format!("{}𝄞", "y".repeat(MAX_REASON_BYTES - 1)),
            "y".repeat(MAX_REASON_BYTES - 1),
        ),
    ];
    for (index, (given, kept)) in cases.into_iter().enumerate() {
        let key = subject.key(&format!("release-{index}"));
        let token = subject.token();
        subject.granted(&key, token).await;
        let release = Operation::Release {
            token,
            delay: LEASE,
            end: ReleaseCause::Failed,
            reason: given.clone(),
        };
        assert_eq!(subject.apply(&key, release).await, APPLIED);
        let state = subject.read(&key).await.map(|record| record.state);
        assert!(
            matches!(&state, Some(State::Released { reason, .. }) if *reason == kept),
            "{state:?}"
        );

        let key = subject.key(&format!("fail-{index}"));
        let token = subject.token();
        subject.granted(&key, token).await;
        assert_eq!(subject.fail(&key, token, &given).await, APPLIED);
        let failed = Verdict::Failed {
            reason: kept,
            handed_over: false,
            by: token.tag(),
        };
        assert_eq!(subject.claim(&key, subject.token()).await, failed);
    }
}

pub(super) async fn results_of_every_size_come_back(subject: &StoreUnderTest<'_>) {
    let all_bytes: Vec<u8> = (0..=u8::MAX).collect();
    let results = [
        ("empty", Vec::new()),
        ("zero", vec![0]),
        ("no-text", vec![0xff]),
        ("all-bytes", all_bytes.clone()),
        ("64-kib", all_bytes.repeat(256)),
        ("1-mib", all_bytes.repeat(4_096)),
    ];
    for (name, result) in results {
        let key = subject.key(name);
        let token = subject.token();
        let result = Bytes::from(result);
        subject.granted(&key, token).await;
        let complete = Operation::Complete {
            token,
            fingerprint: None,
            result: result.clone(),
            retention: RETENTION,
        };
        if result.len() > subject.bench.most_result_bytes() {
            let refused = subject.try_apply(&key, complete).await;
            assert_eq!(refused.map_err(|error| error.class()), Err("refused"));
            subject.busy(&key).await;
            continue;
        }
        assert_eq!(subject.apply(&key, complete).await, APPLIED);
        let verdict = subject.claim(&key, subject.token()).await;
        assert!(
            verdict
                == Verdict::Completed {
                    result: result.clone()
                },
            "a claim alters it: {name}"
        );
        let ahead = subject.store.prefetch(vec![key.clone()]).await;
        let ahead = ahead
            .into_iter()
            .next()
            .expect("one answer")
            .expect("the store answers");
        assert!(
            ahead.is_some_and(|ahead| ahead.result == result),
            "a prefetch alters it: {name}"
        );
        let found = subject
            .read(&key)
            .await
            .and_then(crate::store::Completed::of);
        assert!(
            found.is_some_and(|found| found.result == result),
            "a read alters it: {name}"
        );
    }
    let key = subject.key("after");
    let token = subject.token();
    subject.granted(&key, token).await;
    assert_eq!(
        subject.apply(&key, completion(token, "done")).await,
        APPLIED
    );
}

pub(super) async fn the_shortest_retention_ends(subject: &StoreUnderTest<'_>) {
    let retention = Duration::from_millis(1);
    let completed = subject.key("completed");
    let failed = subject.key("failed");
    let first = subject.token();
    let second = subject.token();
    subject.granted(&completed, first).await;
    let result = Bytes::from_static(b"done");
    let complete = Operation::Complete {
        token: first,
        fingerprint: None,
        result,
        retention,
    };
    assert_eq!(subject.apply(&completed, complete).await, APPLIED);
    subject.granted(&failed, second).await;
    let fail = Operation::Fail {
        token: second,
        reason: String::new(),
        retention,
    };
    assert_eq!(subject.apply(&failed, fail).await, APPLIED);
    for key in [completed, failed] {
        subject.pass(&key, STEP).await;
        assert_eq!(subject.read(&key).await, None);
        let grant = subject.granted(&key, subject.token()).await;
        assert_eq!((grant.attempt, grant.recovery), (1, Recovery::None));
    }
}
