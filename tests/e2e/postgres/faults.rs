//! Connections that are cut, sessions that are ended, and a server that is killed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use oncegate::postgres::PostgresStore;
use oncegate_core::key::StoreKey;
use oncegate_core::record::{State, Token};
use oncegate_core::rules::{Operation, ReleaseCause, Reply};
use oncegate_core::store::{Store, StoreError};
use oncegate_testkit::{Postgres, PostgresServer};
use tokio::sync::mpsc::Sender;
use tokio::task::JoinSet;

use crate::hand::{
    self, HELD, PATIENCE, apply, claim, complete, completed_with, granted_as, key, scope, token,
};
use crate::proxy::{Cut, Proxy};

/// How many consumers work at once.
const CONSUMERS: u128 = 16;

/// Repeats an operation until the store has an answer, as the gate does.
async fn until_answered(store: &dyn Store, key: &StoreKey, operation: &Operation) -> Reply {
    let start = Instant::now();
    loop {
        match apply(store, key, operation.clone()).await {
            Ok(reply) => return reply,
            Err(StoreError::Unavailable { .. } | StoreError::Unknown { .. }) => {
                assert!(start.elapsed() < PATIENCE, "the store does not come back");
                tokio::task::yield_now().await;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Claims and completes keys, each by a token of its own, and returns the token that completed
/// each.
async fn work(
    store: &dyn Store,
    keys: impl Iterator<Item = StoreKey>,
    done: Sender<(StoreKey, Token)>,
) {
    for key in keys {
        let owner = token();
        let reply = until_answered(store, &key, &claim(owner)).await;
        assert!(granted_as(1, &reply), "{key}: {reply:?}");
        let reply =
            until_answered(store, &key, &complete(owner, owner.as_bytes().as_slice())).await;
        assert_eq!(reply, HELD, "{key}");
        done.send((key, owner)).await.unwrap();
    }
}

#[tokio::test]
async fn a_repeat_with_the_same_token_finds_out_what_a_cut_commit_did() {
    let postgres = Postgres::shared().await;
    let direct = hand::store(&postgres).await;
    let proxy = Proxy::before(&postgres).await;
    let store = PostgresStore::builder(proxy.url())
        .without_purge()
        .response_timeout(PATIENCE)
        .connect()
        .await
        .unwrap();
    let scope = scope();
    let mut unknown = 0;
    for (number, cut) in (0..40).zip([Cut::Before, Cut::After].into_iter().cycle()) {
        let key = key(&scope, number);
        let owner = token();
        for operation in [claim(owner), complete(owner, b"first")] {
            let completes = matches!(operation, Operation::Complete { .. });
            // First the fast path, then the claim by the rules that finds the record.
            proxy.cut(&[cut; 2]);
            let cut_off = apply(&store, &key, operation.clone()).await;
            // After a commit there is nothing left to be committed.
            assert_eq!(proxy.cuts_left(), usize::from(cut == Cut::After));
            proxy.cut(&[]);
            let seen = direct.read(vec![key.clone()]).await.remove(0).unwrap();
            let state = seen.map(|snapshot| snapshot.record.state);
            let reply = match (cut, cut_off) {
                (Cut::After, Ok(reply)) => reply,
                (Cut::Before, Err(StoreError::Unknown { .. })) => {
                    // Another client sees that nothing was committed.
                    let own = matches!(state, Some(State::Pending { token, .. }) if token == owner);
                    assert!(if completes { own } else { state.is_none() }, "{state:?}");
                    unknown += 1;
                    until_answered(&store, &key, &operation).await
                }
                (_, other) => panic!("{cut:?}: {other:?}"),
            };
            assert!(
                if completes {
                    reply == HELD
                } else {
                    granted_as(1, &reply)
                },
                "{cut:?}: {reply:?}"
            );
        }
        assert!(completed_with(
            b"first",
            &apply(&store, &key, claim(token())).await.unwrap()
        ));
    }
    assert_eq!(unknown, 40);
}

#[tokio::test]
async fn what_the_rules_decide_is_as_sure_as_the_straight_way() {
    let postgres = Postgres::shared().await;
    let direct = hand::store(&postgres).await;
    let proxy = Proxy::before(&postgres).await;
    let store = PostgresStore::builder(proxy.url())
        .without_purge()
        .response_timeout(PATIENCE)
        .connect()
        .await
        .unwrap();
    let scope = scope();
    for (number, cut) in (0..20).zip([Cut::Before, Cut::After].into_iter().cycle()) {
        let key = key(&scope, number);
        let owner = token();
        assert!(granted_as(
            1,
            &apply(&*direct, &key, claim(owner)).await.unwrap()
        ));
        let fail = || {
            let reason = "no such account".to_owned();
            let retention = Duration::from_secs(3_600);
            Operation::Fail {
                token: owner,
                reason,
                retention,
            }
        };
        proxy.cut(&[cut]);
        let lost = apply(&store, &key, fail()).await;
        assert!(
            matches!(lost, Err(StoreError::Unknown { .. })),
            "{cut:?}: {lost:?}"
        );
        assert_eq!(proxy.cuts_left(), 0);
        let state = direct
            .read(vec![key.clone()])
            .await
            .remove(0)
            .unwrap()
            .unwrap()
            .record
            .state;
        assert_eq!(
            matches!(state, State::Failed { .. }),
            cut == Cut::After,
            "{state:?}"
        );
        assert_eq!(until_answered(&store, &key, &fail()).await, HELD);
    }
}

// invariant: key-blocked-in-sql
#[tokio::test]
async fn a_client_that_stalls_in_a_transaction_holds_no_key_for_ever() {
    let postgres = Postgres::shared().await;
    let direct = hand::store(&postgres).await;
    let proxy = Proxy::before(&postgres).await;
    let limit = Duration::from_secs(2);
    let store = PostgresStore::builder(proxy.url())
        .without_purge()
        .response_timeout(limit)
        .start_patience(PATIENCE)
        .connect()
        .await
        .unwrap();
    let key = key(&scope(), 1);
    let owner = token();
    assert!(granted_as(
        1,
        &apply(&*direct, &key, claim(owner)).await.unwrap()
    ));
    proxy.cut(&[Cut::Stall]);
    let release = Operation::Release {
        token: owner,
        delay: Duration::ZERO,
        end: ReleaseCause::Failed,
        reason: String::new(),
    };
    let lost = apply(&store, &key, release).await;
    assert!(matches!(lost, Err(StoreError::Unknown { .. })), "{lost:?}");
    assert_eq!(proxy.cuts_left(), 0);
    // Its row is locked until the server ends the session (25P03); then the key is as it was.
    assert_eq!(
        apply(&*direct, &key, complete(owner, b"done"))
            .await
            .unwrap(),
        HELD
    );
}

// invariant: connection-storm
#[tokio::test]
async fn a_server_that_is_away_is_tried_at_a_pace() {
    const CALLS: u32 = 2_000;
    let postgres = Postgres::shared().await;
    hand::store(&postgres).await;
    let proxy = Proxy::before(&postgres).await;
    let store = PostgresStore::builder(proxy.url())
        .without_purge()
        .connect()
        .await
        .unwrap();
    let key = key(&scope(), 1);
    let owner = token();
    assert!(granted_as(
        1,
        &apply(&store, &key, claim(owner)).await.unwrap()
    ));
    proxy.leave();
    let before = proxy.connections();
    let start = Instant::now();
    for _ in 0..CALLS {
        let refused = apply(&store, &key, claim(owner)).await.unwrap_err();
        assert!(
            matches!(refused.class(), "unavailable" | "unknown"),
            "{refused}"
        );
    }
    // Ten until the waits are at their longest, which are 250 ms at least.
    let most = 10 + start.elapsed().as_millis() / 250;
    let tries = proxy.connections() - before;
    assert!(
        tries > 0 && tries as u128 <= most,
        "{tries} tries for {CALLS} calls, {most} are due"
    );
    proxy.come_back();
    assert!(granted_as(
        1,
        &until_answered(&store, &key, &claim(owner)).await
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn ended_sessions_make_no_wrong_answers() {
    const KEYS: u128 = 60;
    let server = PostgresServer::start().await;
    let store = hand::store(&server).await;
    let scope = scope();
    let (done, mut completed) = tokio::sync::mpsc::channel(1);
    let mut consumers = JoinSet::new();
    for consumer in 0..CONSUMERS {
        let store = store.clone();
        let scope = scope.clone();
        let done = done.clone();
        let keys = (0..KEYS).map(move |number| key(&scope, consumer * KEYS + number));
        consumers.spawn(async move { work(&*store, keys, done).await });
    }
    drop(done);
    let client = server.connection().await;
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'oncegate'";
    let mut ended = 0_i64;
    let mut owners = Vec::new();
    while let Some(owner) = completed.recv().await {
        owners.push(owner);
        // The consumers make progress between the cuts, so that every step of a transaction is hit.
        if owners.len() % 7 == 0 {
            ended += client.query_one(end, &[]).await.unwrap().get::<_, i64>(0);
        }
    }
    while let Some(consumer) = consumers.join_next().await {
        consumer.unwrap();
    }
    assert!(ended > 100, "only {ended} sessions were ended");
    assert_eq!(owners.len(), usize::try_from(CONSUMERS * KEYS).unwrap());
    for (key, owner) in &owners {
        let reply = until_answered(&*store, key, &claim(token())).await;
        assert!(completed_with(owner.as_bytes(), &reply), "{key}: {reply:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_answered_survives_a_killed_server() {
    const ROUNDS: u128 = 4;
    let mut server = PostgresServer::start().await;
    let store = hand::store(&server).await;
    let scope = scope();
    for round in 0..ROUNDS {
        let (answers, mut answered) = tokio::sync::mpsc::channel(10_000);
        let mut consumers = JoinSet::new();
        for consumer in 0..CONSUMERS {
            let store = store.clone();
            let scope = scope.clone();
            let answers = answers.clone();
            consumers.spawn(async move {
                for number in 0.. {
                    let key = key(&scope, (round * CONSUMERS + consumer) << 32 | number);
                    let owner = token();
                    let granted = apply(&*store, &key, claim(owner)).await;
                    if granted.is_err() {
                        return;
                    }
                    answers.send((key.clone(), owner, false)).await.unwrap();
                    let completed =
                        apply(&*store, &key, complete(owner, owner.as_bytes().as_slice())).await;
                    if completed.is_err() {
                        return;
                    }
                    answers.send((key, owner, true)).await.unwrap();
                }
            });
        }
        drop(answers);
        // In the middle of things: some hundreds are answered, and all consumers are at work.
        let mut held = BTreeMap::new();
        for _ in 0..300 {
            let (key, owner, completed) = answered.recv().await.unwrap();
            held.insert(key.as_str().to_owned(), (key, owner, completed));
        }
        server.kill();
        while let Some((key, owner, completed)) = answered.recv().await {
            held.insert(key.as_str().to_owned(), (key, owner, completed));
        }
        while let Some(consumer) = consumers.join_next().await {
            consumer.unwrap();
        }
        server.start_again().await;
        for (key, owner, completed) in held.values() {
            let reply = until_answered(&*store, key, &claim(*owner)).await;
            // A complete without an answer may have been executed.
            let kept =
                completed_with(owner.as_bytes(), &reply) || (!completed && granted_as(1, &reply));
            assert!(kept, "{key}, completed: {completed}: {reply:?}");
        }
    }
}
