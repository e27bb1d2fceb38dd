//! Every operation and every verdict, with its reply lost in several ways after the server has
//! executed it.

use std::time::Duration;

use oncegate::redis::{RedisBuilder, RedisStore};
use oncegate_core::key::{Fingerprint, StoreKey};
use oncegate_core::record::Token;
use oncegate_core::rules::{Operation, ReleaseCause, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_testkit::{Proxy, ProxyMode as Mode, Redis, RedisServer, until};

use crate::faults::{until_answered, unwatched};
use crate::hand::{apply, claim, complete, key, scope, token};

/// The ways in which a reply is lost, or comes after the caller has stopped waiting for it.
pub(crate) const WAYS: [Mode; 4] = [Mode::Lose, Mode::Cut, Mode::Stall, Mode::Delay];

const TIMEOUT: Duration = Duration::from_millis(150);

const LIMIT: Duration = Duration::from_secs(240);

fn fail(token: Token) -> Operation {
    Operation::Fail {
        token,
        reason: "rejected".to_owned(),
        retention: Duration::from_secs(3_600),
    }
}

fn printed(token: Token, digit: u8) -> Operation {
    let fingerprint = Some(Fingerprint::from_bytes([1, 0, 0, 0, 0, 0, digit]));
    Operation::Claim {
        token,
        lease: Duration::from_secs(30),
        fingerprint,
        fenced: false,
        longest_lease: Duration::MAX,
    }
}

/// The operations before, by their owner; then the operation whose reply is lost; then the reply
/// that its repeat must get.
struct Case {
    name: &'static str,
    before: Vec<Operation>,
    operation: Operation,
    says: fn(&Reply) -> bool,
}

fn held(reply: &Reply) -> bool {
    *reply == Reply::Applied { recreated: false }
}

fn lost(reply: &Reply) -> bool {
    *reply == Reply::NotOwner
}

fn release(token: Token) -> Operation {
    Operation::Release {
        token,
        delay: Duration::ZERO,
        end: ReleaseCause::Failed,
        reason: "later".to_owned(),
    }
}

fn extend(token: Token) -> Operation {
    Operation::Extend {
        token,
        lease: Duration::from_secs(60),
    }
}

fn hand_over(token: Token) -> Operation {
    Operation::HandOver { by: token.tag() }
}

fn case(
    name: &'static str,
    before: Vec<Operation>,
    operation: Operation,
    says: fn(&Reply) -> bool,
) -> Case {
    Case {
        name,
        before,
        operation,
        says,
    }
}

fn cases(owner: Token) -> Vec<Case> {
    let other = token();
    let mut cases = claims(owner, other);
    cases.extend(others(owner, other));
    cases
}

/// The cases of claims, one for each verdict.
fn claims(owner: Token, other: Token) -> Vec<Case> {
    let mine = claim(owner);
    let completed = vec![mine.clone(), complete(owner, b"done")];
    let failed = vec![mine.clone(), fail(owner)];
    let handed_over = vec![mine.clone(), fail(owner), hand_over(owner)];
    vec![
        case(
            "granted",
            vec![],
            mine.clone(),
            |reply| matches!(verdict(reply), Verdict::Granted(grant) if grant.attempt == 1),
        ),
        case(
            "granted again",
            vec![mine.clone(), release(owner)],
            claim(other),
            |reply| matches!(verdict(reply), Verdict::Granted(grant) if grant.attempt == 2),
        ),
        case(
            "completed",
            completed,
            claim(other),
            |reply| matches!(verdict(reply), Verdict::Completed { result } if result == "done"),
        ),
        case("busy", vec![mine], claim(other), |reply| {
            matches!(verdict(reply), Verdict::Busy { .. })
        }),
        case(
            "failed",
            failed,
            claim(other),
            |reply| matches!(verdict(reply), Verdict::Failed { handed_over, .. } if !handed_over),
        ),
        case(
            "handed over",
            handed_over,
            claim(other),
            |reply| matches!(verdict(reply), Verdict::Failed { handed_over, .. } if *handed_over),
        ),
        case(
            "mismatch",
            vec![printed(owner, 1)],
            printed(other, 2),
            |reply| matches!(verdict(reply), Verdict::Mismatch),
        ),
    ]
}

fn verdict(reply: &Reply) -> &Verdict {
    match reply {
        Reply::Verdict { verdict, .. } => verdict,
        other => panic!("{other:?}"),
    }
}

/// The cases of all other operations.
fn others(owner: Token, other: Token) -> Vec<Case> {
    let mine = || vec![claim(owner)];
    vec![
        case("extend", mine(), extend(owner), held),
        case("extend, lost", mine(), extend(other), lost),
        case("complete", mine(), complete(owner, b"done"), held),
        case("complete, lost", mine(), complete(other, b"done"), lost),
        case(
            "complete, recreated",
            vec![],
            complete(owner, b"done"),
            |reply| {
                // The repeat finds what the first sending has written.
                matches!(reply, Reply::Applied { .. })
            },
        ),
        case("release", mine(), release(owner), held),
        case("release, lost", mine(), release(other), lost),
        case("fail", mine(), fail(owner), held),
        case("fail, lost", mine(), fail(other), lost),
        case(
            "hand over",
            vec![claim(owner), fail(owner)],
            hand_over(owner),
            held,
        ),
        case(
            "hand over, of another failure",
            vec![claim(owner), fail(owner)],
            hand_over(other),
            lost,
        ),
        case("hand over, lost", mine(), hand_over(owner), lost),
    ]
}

/// Unknown, or not sent because the connection is being replaced: never an answer.
fn is_no_answer<T>(answer: &Result<T, StoreError>) -> bool {
    matches!(
        answer,
        Err(StoreError::Unknown { .. } | StoreError::Unavailable { .. })
    )
}

fn builder(proxy: &Proxy) -> RedisBuilder {
    unwatched(proxy).response_timeout(TIMEOUT)
}

/// Waits until the store has a connection again.
async fn settled(store: &RedisStore, key: &StoreKey) {
    until_answered(store, key, &Operation::HandOver { by: token().tag() }).await;
    until_answered(
        store,
        key,
        &Operation::Extend {
            token: token(),
            lease: Duration::from_secs(1),
        },
    )
    .await;
}

// invariant: lost-reply
#[tokio::test]
async fn a_lost_reply_is_never_an_answer_and_its_repeat_tells_it() {
    let redis = Redis::shared().await;
    let each = async |of: fn(RedisBuilder) -> RedisBuilder| {
        let proxy = Proxy::before(&redis).await;
        every_reply_is_lost_once(&proxy, of(builder(&proxy)).connect().await.unwrap()).await;
    };
    tokio::join!(
        each(|builder| builder),
        each(RedisBuilder::scripts_alone),
        each(|builder| builder.compact(1_000)),
    );
}

// invariant: lost-reply
#[tokio::test]
async fn a_lost_reply_of_a_plain_completion_is_no_answer_either() {
    let valkey = RedisServer::valkey(&[]).await;
    let proxy = Proxy::before(&valkey).await;
    every_reply_is_lost_once(&proxy, builder(&proxy).connect().await.unwrap()).await;
}

async fn every_reply_is_lost_once(proxy: &Proxy, store: RedisStore) {
    let scope = scope();
    let mut number = 0;
    for way in WAYS {
        let owner = token();
        for Case {
            name,
            before,
            operation,
            says,
        } in cases(owner)
        {
            number += 1;
            let key = key(&scope, number);
            for step in before {
                until_answered(&store, &key, &step).await;
            }
            settled(&store, &crate::hand::key(&scope, 1_000_000)).await;
            proxy.set(way);
            let answer = apply(&store, &key, operation.clone()).await;
            assert!(
                matches!(answer, Err(StoreError::Unknown { .. })),
                "{name}, {way:?}: {answer:?}"
            );
            proxy.set(Mode::Pass);
            let again = until_answered(&store, &key, &operation).await;
            assert!(says(&again), "{name}, {way:?}: {again:?}");
        }
    }
}

// invariant: lost-reply
#[tokio::test]
async fn a_pipeline_whose_replies_break_off_gets_no_false_answer() {
    let redis = Redis::shared().await;
    let each = async |of: fn(RedisBuilder) -> RedisBuilder, passing| {
        let proxy = Proxy::before(&redis).await;
        breaks_off(
            &proxy,
            of(builder(&proxy)).connect().await.unwrap(),
            passing,
        )
        .await;
    };
    tokio::join!(
        // All first claims have one reply, and all first completions another.
        each(|builder| builder, [0, 1, 3]),
        each(RedisBuilder::scripts_alone, [1, 5, 10]),
        each(|builder| builder.compact(1_000), [1, 5, 10]),
    );
}

/// Runs all cases at once; their replies are lost in each way after so many.
async fn breaks_off(proxy: &Proxy, store: RedisStore, passing: [usize; 3]) {
    for way in WAYS {
        for passing in passing {
            let scope = scope();
            let owner = token();
            let cases = (0..)
                .map(|number| key(&scope, number))
                .zip(cases(owner))
                .collect::<Vec<_>>();
            for (key, Case { before, .. }) in &cases {
                for step in before {
                    until_answered(&store, key, step).await;
                }
            }
            settled(&store, &key(&scope, 1_000_000)).await;
            let commands = cases
                .iter()
                .map(|(key, case)| (key.clone(), case.operation.clone()));
            let commands = commands
                .map(|(key, operation)| Command { key, operation })
                .collect();
            proxy.set_after(passing, way);
            let answers = store.execute(commands).await;
            proxy.set(Mode::Pass);
            assert!(
                answers.iter().any(Result::is_err),
                "{way:?} after {passing}: nothing was lost"
            );
            for (
                (
                    key,
                    Case {
                        name,
                        operation,
                        says,
                        ..
                    },
                ),
                answer,
            ) in cases.iter().zip(answers)
            {
                let true_or_none = answer.as_ref().map_or_else(|_| is_no_answer(&answer), says);
                assert!(true_or_none, "{name}, {way:?} after {passing}: {answer:?}");
                let again = until_answered(&store, key, operation).await;
                assert!(says(&again), "{name}, {way:?} after {passing}: {again:?}");
            }
        }
    }
}

// invariant: lost-reply
#[tokio::test]
async fn a_lost_read_or_description_is_never_an_answer() {
    let redis = Redis::shared().await;
    let proxy = Proxy::before(&redis).await;
    let store = builder(&proxy).connect().await.unwrap();
    let scope = scope();
    let owner = token();
    let keys: Vec<StoreKey> = (0..50).map(|number| key(&scope, number)).collect();
    for key in &keys {
        until_answered(&store, key, &complete(owner, b"done")).await;
    }
    let absent = crate::hand::key(&scope, 1_000_000);
    for way in WAYS {
        settled(&store, &absent).await;
        proxy.set(way);
        // Of a batch that is cut in the middle of a reply, no part is an answer.
        assert!(
            store.prefetch(keys.clone()).await.iter().all(is_no_answer),
            "{way:?}"
        );
        proxy.set(Mode::Pass);
        settled(&store, &absent).await;
        proxy.set(way);
        assert!(
            store.read(keys.clone()).await.iter().all(is_no_answer),
            "{way:?}"
        );
        proxy.set(Mode::Pass);
        settled(&store, &absent).await;
        proxy.set(way);
        assert!(is_no_answer(&store.descriptor(&scope).await), "{way:?}");
        proxy.set(Mode::Pass);
        settled(&store, &absent).await;
        proxy.set(way);
        assert!(is_no_answer(&store.check().await), "{way:?}");
        proxy.set(Mode::Pass);
    }
    // On a busy machine, an answer may still come too late.
    let found = until("the store to answer", LIMIT, async || {
        let found = store
            .prefetch(keys.clone())
            .await
            .into_iter()
            .collect::<Result<Vec<_>, _>>();
        found.map_err(|error| error.to_string())
    });
    assert!(found.await.iter().all(Option::is_some));
}

// invariant: lost-reply
#[tokio::test]
async fn a_lost_reply_to_describe_or_reopen_is_no_answer() {
    let proxy = Proxy::before(&Redis::shared().await).await;
    let store = builder(&proxy).connect().await.unwrap();
    let absent = crate::hand::key(&scope(), 1_000_000);
    for way in WAYS {
        let scope = scope();
        let owner = token();
        settled(&store, &absent).await;
        proxy.set(way);
        let described = store.describe(&scope, None, "the first").await;
        assert!(is_no_answer(&described), "{way:?}: {described:?}");
        proxy.set(Mode::Pass);
        let described = until("the store to describe", LIMIT, async || {
            store
                .describe(&scope, None, "the first")
                .await
                .map_err(|error| error.to_string())
        });
        assert_eq!(described.await, "the first", "{way:?}");

        let key = key(&scope, 1);
        for step in [claim(owner), fail(owner)] {
            until_answered(&store, &key, &step).await;
        }
        let seen = until("the store to look", LIMIT, async || {
            store
                .read(vec![key.clone()])
                .await
                .remove(0)
                .map_err(|error| error.to_string())
        });
        let reopen = Operation::Reopen {
            expected: seen.await.unwrap().record,
        };
        settled(&store, &absent).await;
        proxy.set(way);
        let reopened = apply(&store, &key, reopen.clone()).await;
        assert!(
            matches!(reopened, Err(StoreError::Unknown { .. })),
            "{way:?}: {reopened:?}"
        );
        proxy.set(Mode::Pass);
        // It is another record by now: open again.
        assert_eq!(
            until_answered(&store, &key, &reopen).await,
            Reply::NotOwner,
            "{way:?}"
        );
        let claimed = until_answered(&store, &key, &claim(token())).await;
        let Reply::Verdict {
            verdict: Verdict::Granted(grant),
            ..
        } = claimed
        else {
            panic!("{claimed:?}")
        };
        assert!(grant.reopened && grant.attempt == 1, "{way:?}: {grant:?}");
    }
}
