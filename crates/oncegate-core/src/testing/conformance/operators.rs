//! Cases for hand-over, reopen, read, the descriptor and the check.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;

use super::bench::{APPLIED, LEASE, RETENTION, STEP, StoreUnderTest, completion, done, join_all};
use crate::key::StoreKey;
use crate::record::{Record, Recovery, State, StoreTime, Token, TokenTag};
use crate::rules::{Operation, REOPENED, ReleaseCause, Reply, Resolution, Verdict};
use crate::store::{DeadLetterStop, Epoch, Halt, Pause, ScopeDescriptor, StoreError};

pub(super) async fn a_hand_over_marks_a_failed_record(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    assert_eq!(subject.fail(&key, token, "broken").await, APPLIED);
    for _ in 0..2 {
        assert_eq!(
            subject
                .apply(&key, Operation::HandOver { by: token.tag() })
                .await,
            APPLIED
        );
        let failed = Verdict::Failed {
            reason: "broken".to_owned(),
            handed_over: true,
            by: token.tag(),
        };
        assert_eq!(subject.claim(&key, subject.token()).await, failed);
    }
    subject.pass(&key, RETENTION + STEP).await;
    assert_eq!(
        subject.read(&key).await,
        None,
        "the mark does not extend the retention"
    );
}

pub(super) async fn a_hand_over_of_anything_else_is_lost(subject: &StoreUnderTest<'_>) {
    for (key, state) in subject.in_every_state(None).await {
        if state != "failed" {
            let before = subject.read(&key).await;
            let by = before
                .as_ref()
                .map_or(TokenTag::NONE, |record| match record.state {
                    State::Pending { token, .. } => token.tag(),
                    State::Released { by, .. }
                    | State::Completed { by, .. }
                    | State::Failed { by, .. } => by,
                });
            assert_eq!(
                subject.apply(&key, Operation::HandOver { by }).await,
                Reply::NotOwner,
                "{state}"
            );
            assert_eq!(subject.read(&key).await, before, "{state}");
        }
    }
    let absent = subject.key("absent");
    let by = subject.token().tag();
    assert_eq!(
        subject.apply(&absent, Operation::HandOver { by }).await,
        Reply::NotOwner
    );
    assert_eq!(subject.read(&absent).await, None);
}

// invariant: late-hand-over
pub(super) async fn a_late_hand_over_does_not_mark_a_newer_failure(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let first = subject.token();
    let second = subject.token();
    subject.granted(&key, first).await;
    assert_eq!(subject.fail(&key, first, "broken").await, APPLIED);
    let expected = subject.read(&key).await.expect("a failed key has a record");
    assert_eq!(
        subject.apply(&key, Operation::Reopen { expected }).await,
        APPLIED
    );
    subject.granted(&key, second).await;
    assert_eq!(subject.fail(&key, second, "broken again").await, APPLIED);
    let before = subject.read(&key).await;
    assert_eq!(
        subject
            .apply(&key, Operation::HandOver { by: first.tag() })
            .await,
        Reply::NotOwner
    );
    assert_eq!(subject.read(&key).await, before);
    let failed = Verdict::Failed {
        reason: "broken again".to_owned(),
        handed_over: false,
        by: second.tag(),
    };
    assert_eq!(subject.claim(&key, subject.token()).await, failed);
}

pub(super) async fn a_reopened_key_starts_again_from_every_state(subject: &StoreUnderTest<'_>) {
    for (key, state) in subject.in_every_state(None).await {
        let expected = subject.read(&key).await.expect("every state has a record");
        assert_eq!(
            subject.apply(&key, Operation::Reopen { expected }).await,
            APPLIED,
            "{state}"
        );
        let record = subject
            .read(&key)
            .await
            .expect("a reopened key has a record");
        let State::Released {
            attempt: 0,
            recovery: Recovery::None,
            reason,
            ..
        } = &record.state
        else {
            panic!("{state}: {:?}", record.state);
        };
        assert_eq!(reason, REOPENED);
        let grant = subject.granted(&key, subject.token()).await;
        assert_eq!(
            (grant.attempt, grant.recovery),
            (1, Recovery::None),
            "due at once: {state}"
        );
        assert!(grant.reopened, "the first attempt reports it: {state}");
    }
}

pub(super) async fn a_reopen_compares_the_record(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let first = subject.token();
    let second = subject.token();
    subject.granted(&key, first).await;
    let seen = subject
        .read(&key)
        .await
        .expect("a claimed key has a record");
    assert_eq!(subject.fail(&key, first, "broken").await, APPLIED);
    let before = subject.read(&key).await;
    assert_eq!(
        subject
            .apply(&key, Operation::Reopen { expected: seen })
            .await,
        Reply::NotOwner
    );
    assert_eq!(subject.read(&key).await, before);

    let mut altered = before.clone().expect("a failed key has a record");
    altered.fingerprint = Some(super::super::fingerprint(1, 1));
    assert_eq!(
        subject
            .apply(&key, Operation::Reopen { expected: altered })
            .await,
        Reply::NotOwner
    );
    let mut altered = before.clone().expect("a failed key has a record");
    altered.state = State::Completed {
        by: first.tag(),
        result: Bytes::new(),
    };
    assert_eq!(
        subject
            .apply(
                &key,
                Operation::Reopen {
                    expected: altered.clone()
                }
            )
            .await,
        Reply::NotOwner
    );
    assert_eq!(subject.read(&key).await, before);

    let absent = subject.key("absent");
    assert_eq!(
        subject
            .apply(&absent, Operation::Reopen { expected: altered })
            .await,
        Reply::NotOwner
    );
    assert_eq!(subject.read(&absent).await, None);

    let expected = before.expect("a failed key has a record");
    assert_eq!(
        subject
            .apply(
                &key,
                Operation::Reopen {
                    expected: expected.clone()
                }
            )
            .await,
        APPLIED
    );
    assert_eq!(
        subject.apply(&key, Operation::Reopen { expected }).await,
        Reply::NotOwner,
        "it is open already"
    );
    subject.granted(&key, second).await;
}

pub(super) async fn a_reopen_ignores_the_time_that_is_left(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    let expected = subject
        .read(&key)
        .await
        .expect("a claimed key has a record");
    subject.pass(&key, STEP).await;
    assert_eq!(subject.extend(&key, token, 3 * LEASE).await, APPLIED);
    assert_eq!(
        subject.apply(&key, Operation::Reopen { expected }).await,
        APPLIED
    );
}

pub(super) async fn a_reopen_takes_the_claim_away(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    subject.granted(&key, token).await;
    let expected = subject
        .read(&key)
        .await
        .expect("a claimed key has a record");
    assert_eq!(
        subject.apply(&key, Operation::Reopen { expected }).await,
        APPLIED
    );
    let before = subject.read(&key).await;
    assert_eq!(subject.extend(&key, token, LEASE).await, Reply::NotOwner);
    assert_eq!(
        subject.complete(&key, token, "stale").await,
        Reply::NotOwner
    );
    assert_eq!(
        subject
            .release(&key, token, LEASE, ReleaseCause::Failed)
            .await,
        Reply::NotOwner
    );
    assert_eq!(subject.fail(&key, token, "stale").await, Reply::NotOwner);
    assert_eq!(subject.read(&key).await, before);
}

pub(super) async fn a_fencing_token_grows_over_a_reopen(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    let first = subject.granted_fenced(&key, token).await.fencing_token;
    let expected = subject
        .read(&key)
        .await
        .expect("a claimed key has a record");
    assert_eq!(
        subject.apply(&key, Operation::Reopen { expected }).await,
        APPLIED
    );
    let second = subject
        .granted_fenced(&key, subject.token())
        .await
        .fencing_token;
    assert!(second > first, "{second:?} after {first:?}");
}

/// The resolution of an operator who has seen the effect.
fn happened(result: &'static str) -> Resolution {
    Resolution::Completed {
        result: Bytes::from_static(result.as_bytes()),
    }
}

/// The resolution of an operator who wants no further attempt.
fn given_up(reason: &str) -> Resolution {
    Resolution::Failed {
        reason: reason.to_owned(),
    }
}

async fn resolve(
    subject: &StoreUnderTest<'_>,
    key: &StoreKey,
    expected: &Record,
    token: Token,
    resolution: Resolution,
) -> Reply {
    let resolve = Operation::Resolve {
        expected: expected.clone(),
        token,
        resolution,
        retention: RETENTION,
    };
    subject.apply(key, resolve).await
}

// invariant: operator-decides
pub(super) async fn a_resolve_ends_every_record_that_is_open(subject: &StoreUnderTest<'_>) {
    let fingerprint = Some(super::super::fingerprint(3, 9));
    let keys = subject.in_every_state(fingerprint).await;
    for (key, state) in &keys {
        let is_open = matches!(*state, "over" | "due" | "released");
        let seen = subject.read(key).await.expect("every state has a record");
        let token = subject.token();
        let reply = resolve(subject, key, &seen, token, given_up("skipped")).await;
        let now = subject.read(key).await.expect("it is kept");
        if is_open {
            assert_eq!(reply, APPLIED, "{state}");
            let failed = State::Failed {
                by: token.tag(),
                attempt: 1,
                handed_over: false,
                reason: "skipped".to_owned(),
            };
            assert_eq!(
                (now.state, now.fingerprint),
                (failed, fingerprint),
                "{state}"
            );
        } else {
            assert_eq!(reply, Reply::NotOwner, "{state}");
            assert!(now.same_content(&seen), "{state}");
        }
        // What has failed may turn out to have happened. What runs or is completed stays as it is.
        let is_open = is_open || *state == "failed";
        let seen = subject.read(key).await.expect("every state has a record");
        let token = subject.token();
        let reply = resolve(subject, key, &seen, token, happened("by hand")).await;
        let now = subject.read(key).await.expect("it is kept");
        if is_open {
            assert_eq!(reply, APPLIED, "{state}");
            assert_eq!(now.fingerprint, fingerprint, "{state}");
            let reply = subject.claim_as(key, subject.token(), fingerprint).await;
            let completed = Reply::Verdict {
                verdict: done("by hand"),
                uncompared: false,
            };
            assert_eq!(reply, completed, "{state}");
        } else {
            assert_eq!(reply, Reply::NotOwner, "{state}");
            assert!(now.same_content(&seen), "{state}");
        }
    }
    for (key, state) in keys {
        if state != "pending" {
            subject.pass(&key, RETENTION + STEP / 2).await;
            assert_eq!(subject.read(&key).await, None, "{state}");
        }
    }
}

pub(super) async fn a_resolve_compares_the_record(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let first = subject.token();
    subject.granted(&key, first).await;
    subject.pass(&key, 2 * STEP).await;
    let seen = subject
        .read(&key)
        .await
        .expect("a claimed key has a record");
    // Another attempt has begun and ended since.
    let second = subject.token();
    subject.granted(&key, second).await;
    let before = subject.read(&key).await;
    for resolution in [happened("stale"), given_up("stale")] {
        let token = subject.token();
        let reply = resolve(subject, &key, &seen, token, resolution).await;
        assert_eq!(reply, Reply::NotOwner);
        assert_eq!(subject.read(&key).await, before);
    }
    assert_eq!(subject.complete(&key, second, "done").await, APPLIED);
    let absent = subject.key("absent");
    for resolution in [happened("stale"), given_up("stale")] {
        let token = subject.token();
        let reply = resolve(subject, &absent, &seen, token, resolution.clone()).await;
        assert_eq!(reply, Reply::NotOwner);
        assert_eq!(subject.read(&absent).await, None);
        let reply = resolve(subject, &key, &seen, token, resolution).await;
        assert_eq!(reply, Reply::NotOwner);
    }
    assert_eq!(subject.claim(&key, subject.token()).await, done("done"));
}

pub(super) async fn a_resolve_spares_an_attempt_that_runs(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let owner = subject.token();
    subject.granted(&key, owner).await;
    let seen = subject
        .read(&key)
        .await
        .expect("a claimed key has a record");
    for resolution in [happened("too early"), given_up("too early")] {
        let token = subject.token();
        let reply = resolve(subject, &key, &seen, token, resolution).await;
        assert_eq!(reply, Reply::NotOwner, "its lease is not over");
    }
    // The operator has read a lease that was over; then a heartbeat came. The content is the same.
    subject.pass(&key, 2 * STEP).await;
    let seen = subject
        .read(&key)
        .await
        .expect("a claimed key has a record");
    assert_eq!(subject.extend(&key, owner, LEASE).await, APPLIED);
    let token = subject.token();
    let reply = resolve(subject, &key, &seen, token, given_up("too early")).await;
    assert_eq!(reply, Reply::NotOwner, "its lease goes on");
    assert_eq!(subject.complete(&key, owner, "done").await, APPLIED);
}

pub(super) async fn a_repeated_resolve_changes_nothing(subject: &StoreUnderTest<'_>) {
    for resolution in [happened("by hand"), given_up("skipped")] {
        let word = format!("{resolution:?}");
        let key = subject.key(&word);
        let owner = subject.token();
        subject.granted(&key, owner).await;
        assert_eq!(
            subject
                .release(&key, owner, LEASE, ReleaseCause::Discarded)
                .await,
            APPLIED,
            "a retry that is not due may be resolved, too"
        );
        let seen = subject
            .read(&key)
            .await
            .expect("a released key has a record");
        let token = subject.token();
        let first = resolve(subject, &key, &seen, token, resolution.clone()).await;
        assert_eq!(first, APPLIED, "{word}");
        let before = subject.read(&key).await;
        let again = resolve(subject, &key, &seen, token, resolution.clone()).await;
        assert_eq!(again, APPLIED, "{word}: its first reply was lost");
        let other = resolve(subject, &key, &seen, subject.token(), resolution).await;
        assert_eq!(other, Reply::NotOwner, "{word}: another operator was first");
        assert_eq!(subject.read(&key).await, before, "{word}");
        assert_eq!(
            subject.complete(&key, owner, "stale").await,
            Reply::NotOwner,
            "{word}"
        );
    }
}

/// A message either runs or is resolved, never both.
pub(super) async fn a_resolve_wins_or_loses_against_claims_as_a_whole(
    subject: &StoreUnderTest<'_>,
) {
    for round in 0..8 {
        let key = subject.key(&format!("round {round}"));
        subject.granted(&key, subject.token()).await;
        subject.pass(&key, 2 * STEP).await;
        let seen = subject
            .read(&key)
            .await
            .expect("a claimed key has a record");
        let token = subject.token();
        let mut racing: Vec<Pin<Box<dyn Future<Output = bool> + Send + '_>>> = Vec::new();
        for _ in 0..3 {
            let claimant = subject.token();
            let key = &key;
            racing.push(Box::pin(async move {
                matches!(subject.claim(key, claimant).await, Verdict::Granted(_))
            }));
        }
        racing.push(Box::pin(async {
            resolve(subject, &key, &seen, token, happened("by hand")).await == APPLIED
        }));
        let won = join_all(racing).await;
        assert_eq!(
            won.iter().filter(|won| **won).count(),
            1,
            "round {round}: {won:?}"
        );
    }
}

pub(super) async fn a_read_shows_the_record_and_changes_nothing(subject: &StoreUnderTest<'_>) {
    assert_eq!(subject.read(&subject.key("absent")).await, None);
    for (key, state) in subject
        .in_every_state(Some(super::super::fingerprint(3, 9)))
        .await
    {
        let first = subject.read(&key).await.expect("every state has a record");
        assert_eq!(subject.read(&key).await, Some(first), "{state}");
    }
}

// invariant: key-spec-changed
pub(super) async fn descriptors_are_compared_and_set(subject: &StoreUnderTest<'_>) {
    let ours = subject.bench.scope("descriptors-ours");
    let theirs = subject.bench.scope("descriptors-theirs");
    let store = &subject.store;
    let one = store
        .describe(&ours, None, "one")
        .await
        .expect("the store answers");
    assert_eq!(one, "one", "nothing was there");
    let kept = store
        .describe(&ours, None, "two")
        .await
        .expect("the store answers");
    assert_eq!(kept, "one", "something was there");
    let kept = store
        .describe(&ours, Some("other"), "two")
        .await
        .expect("the store answers");
    assert_eq!(kept, "one", "something else was there");
    let two = store
        .describe(&ours, Some("one"), "two")
        .await
        .expect("the store answers");
    assert_eq!(two, "two", "what was expected was there");
    let theirs = store
        .describe(&theirs, None, "{\"ä\":[1]}")
        .await
        .expect("the store answers");
    assert_eq!(theirs, "{\"ä\":[1]}", "another scope has its own");
    let ours = store
        .describe(&ours, None, "three")
        .await
        .expect("the store answers");
    assert_eq!(ours, "two");
}

pub(super) async fn asking_for_a_descriptor_changes_nothing(subject: &StoreUnderTest<'_>) {
    let scope = subject.bench.scope("asked-for");
    let store = &subject.store;
    for _ in 0..2 {
        assert_eq!(
            store.descriptor(&scope).await.expect("the store answers"),
            None
        );
    }
    store
        .describe(&scope, None, "one")
        .await
        .expect("the store answers");
    let held = store.descriptor(&scope).await.expect("the store answers");
    assert_eq!(held.as_deref(), Some("one"), "a read creates no descriptor");
}

pub(super) async fn a_descriptor_with_every_mark_is_read_as_it_was_written(
    subject: &StoreUnderTest<'_>,
) {
    let scope = subject.bench.scope("marks");
    let store = &subject.store;
    let first = ScopeDescriptor::new("{\"key\":\"ä\"}", Epoch::from_bits(7));
    let stop = DeadLetterStop {
        at_ms: 1,
        what: "3 in a row".to_owned(),
        in_a_row: 3,
        of_window: 0,
    };
    let marked = ScopeDescriptor {
        halt: Some(Halt::new(5, "gone", vec![Epoch::from_bits(1)])),
        dead_letter_stop: Some(stop),
        breaker_open: true,
        pause: Some(Pause::new(6, "the bank is \"away\" – ä", "ada")),
        ..first.clone()
    };
    let mut expected = None;
    for next in [&first, &marked, &first] {
        let text = next.to_text().expect("JSON");
        let written = store
            .describe(&scope, expected.as_deref(), &text)
            .await
            .expect("the store answers");
        assert_eq!(written, text);
        let held = store
            .descriptor(&scope)
            .await
            .expect("the store answers")
            .expect("it was written");
        assert_eq!(
            &ScopeDescriptor::parse(&scope, &held).expect("a descriptor"),
            next
        );
        expected = Some(text);
    }
}

// invariant: garbage-as-answer
pub(super) async fn a_spoilt_record_is_never_an_answer(subject: &StoreUnderTest<'_>) {
    let key = subject.key("a");
    let token = subject.token();
    if !subject.bench.spoil(&key).await {
        return;
    }
    let lease = LEASE;
    let operations = [
        Operation::Claim {
            token,
            lease,
            fingerprint: None,
            fenced: false,
            longest_lease: Duration::MAX,
        },
        Operation::Claim {
            token,
            lease,
            fingerprint: None,
            fenced: true,
            longest_lease: Duration::MAX,
        },
        Operation::Extend { token, lease },
        completion(token, "done"),
        Operation::Release {
            token,
            delay: lease,
            end: ReleaseCause::Failed,
            reason: String::new(),
        },
        Operation::Fail {
            token,
            reason: String::new(),
            retention: RETENTION,
        },
        Operation::HandOver { by: token.tag() },
        Operation::Resolve {
            expected: Record {
                expires_at: StoreTime::default(),
                fingerprint: None,
                state: State::Failed {
                    by: token.tag(),
                    attempt: 1,
                    handed_over: true,
                    reason: String::new(),
                },
            },
            token,
            resolution: happened("done"),
            retention: RETENTION,
        },
    ];
    for operation in operations {
        let what = format!("{operation:?}");
        assert_unreadable(&key, subject.try_apply(&key, operation).await, &what);
    }
    let mut answers = subject.store.read(vec![key.clone()]).await;
    assert_unreadable(&key, answers.pop().expect("one answer"), "read");
    // The calls above have not overwritten the value, and they have no effect on other keys.
    let hand_over = Operation::HandOver { by: token.tag() };
    assert_unreadable(&key, subject.try_apply(&key, hand_over).await, "afterwards");
    subject.granted(&subject.key("b"), subject.token()).await;
}

#[track_caller]
fn assert_unreadable<T: std::fmt::Debug>(
    key: &StoreKey,
    answer: Result<T, StoreError>,
    what: &str,
) {
    match answer {
        Err(StoreError::Unreadable { key: named, .. }) => assert_eq!(named, *key, "{what}"),
        other => panic!("{what}: {other:?}"),
    }
}

pub(super) async fn the_check_names_the_store(subject: &StoreUnderTest<'_>) {
    let checkup = subject
        .store
        .check()
        .await
        .expect("a store that can be tested can be used");
    assert!(!checkup.store.is_empty());
}
