//! Lost replies, held replies, and a server that goes away.

use std::time::Duration;

use oncegate::redis::{RedisBuilder, RedisStore};
use oncegate_core::key::StoreKey;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_testkit::{Proxy, ProxyMode as Mode, Redis, RedisServer, until};

use crate::hand::{apply, claim, complete, key, scope, token};

const HELD: Reply = Reply::Applied { recreated: false };

/// How long a store may take to find its server again.
pub(crate) const RECOVERY_LIMIT: Duration = Duration::from_secs(20);

/// A store whose every reply is asked for by the test. It opens however short its time limit is: on
/// a busy machine the greeting may take longer.
pub(crate) fn unwatched(proxy: &Proxy) -> RedisBuilder {
    RedisStore::builder(&proxy.url())
        .watch_interval(Duration::from_secs(86_400))
        .start_patience(RECOVERY_LIMIT)
}

/// Repeats an operation until the store has an answer, as the gate does.
pub(crate) async fn until_answered(
    store: &dyn Store,
    key: &StoreKey,
    operation: &Operation,
) -> Reply {
    until(
        "the store to come back",
        RECOVERY_LIMIT,
        async || match apply(store, key, operation.clone()).await {
            Ok(reply) => Ok(reply),
            Err(error) if error.is_away() => Err(error.to_string()),
            Err(error) => panic!("{error}"),
        },
    )
    .await
}

fn granted_as(attempt: u8, reply: &Reply) -> bool {
    matches!(reply, Reply::Verdict { verdict: Verdict::Granted(grant), .. } if grant.attempt == attempt)
}

#[tokio::test]
async fn a_repeat_with_the_same_token_learns_what_a_lost_reply_said() {
    let redis = Redis::shared().await;
    let proxy = Proxy::before(&redis).await;
    let store = unwatched(&proxy).connect().await.unwrap();
    let scope = scope();
    let token = token();
    let key = key(&scope, 1);
    for (operation, answered) in [
        (
            claim(token),
            &(|reply: &Reply| granted_as(1, reply)) as &dyn Fn(&Reply) -> bool,
        ),
        (complete(token, b"done"), &|reply| *reply == HELD),
    ] {
        proxy.set(Mode::Lose);
        let lost = apply(&store, &key, operation.clone()).await;
        assert!(matches!(lost, Err(StoreError::Unknown { .. })), "{lost:?}");
        proxy.lost().await;
        let reply = until_answered(&store, &key, &operation).await;
        assert!(answered(&reply), "{reply:?}");
    }
    // It was executed once: the first result stands.
    let reply = until_answered(&store, &key, &claim(crate::hand::token())).await;
    let result = b"done".as_slice().into();
    assert_eq!(
        reply,
        Reply::Verdict {
            verdict: Verdict::Completed { result },
            uncompared: false
        }
    );
}

// invariant: lease-lost-to-handler
#[tokio::test]
async fn heartbeats_do_not_queue_behind_bulk() {
    let redis = Redis::shared().await;
    let proxy = Proxy::before(&redis).await;
    let store = unwatched(&proxy).connect().await.unwrap();
    let scope = scope();
    let token = token();
    let held_key = key(&scope, 0);
    assert!(granted_as(
        1,
        &apply(&store, &held_key, claim(token)).await.unwrap()
    ));
    proxy.hold_last();
    let bulk = (1..2_000).map(|number| Command {
        key: key(&scope, number),
        operation: claim(token),
    });
    let mut bulk = std::pin::pin!(store.execute(bulk.collect()));
    let extend = Operation::Extend {
        token,
        lease: Duration::from_secs(60),
    };
    let extended = tokio::select! {
        biased;
        _ = &mut bulk => panic!("the replies are held back"),
        extended = apply(&store, &held_key, extend) => extended,
    };
    assert_eq!(extended.unwrap(), HELD);
    proxy.set(Mode::Pass);
    assert!(
        bulk.await
            .iter()
            .all(|reply| granted_as(1, reply.as_ref().unwrap()))
    );
}

#[tokio::test]
async fn an_answer_that_does_not_come_in_time_is_unknown() {
    let redis = Redis::shared().await;
    let proxy = Proxy::before(&redis).await;
    // On a busy machine any answer may come too late: only the last call is about one that is held
    // back.
    let builder = unwatched(&proxy).response_timeout(Duration::from_millis(200));
    let store = builder.connect().await.unwrap();
    let scope = scope();
    let token = token();
    let key = key(&scope, 1);
    assert!(granted_as(
        1,
        &until_answered(&store, &key, &claim(token)).await
    ));
    proxy.hold_last();
    let late = apply(&store, &key, claim(token)).await;
    assert!(matches!(late, Err(StoreError::Unknown { .. })), "{late:?}");
    // The old connection stays mute; the next one is not.
    assert!(granted_as(
        1,
        &until_answered(&store, &key, &claim(token)).await
    ));
}

#[tokio::test]
async fn a_store_whose_server_restarts_resumes_by_itself() {
    let mut server = RedisServer::synced().await;
    let store = RedisStore::connect(server.url()).await.unwrap();
    let scope = scope();
    let owner = token();
    let done = key(&scope, 1);
    let running = key(&scope, 2);
    assert_eq!(
        apply(&store, &done, complete(owner, b"kept"))
            .await
            .unwrap(),
        Reply::Applied { recreated: true }
    );
    assert!(granted_as(
        1,
        &apply(&store, &running, claim(owner)).await.unwrap()
    ));

    server.kill();
    // The first call after the end may have been sent, so its outcome is unknown.
    assert!(apply(&store, &done, claim(token())).await.is_err());
    let calls = (0..10_000).map(|number| Command {
        key: key(&scope, 100 + number),
        operation: claim(owner),
    });
    // They do not pile up while the store is down: each is refused, and none waits for its response
    // timeout.
    for answer in store.execute(calls.collect()).await {
        assert!(
            matches!(answer, Err(StoreError::Unavailable { .. })),
            "{answer:?}"
        );
    }

    server.start_again().await;
    let reply = until_answered(&store, &done, &claim(token())).await;
    let result = b"kept".as_slice().into();
    assert_eq!(
        reply,
        Reply::Verdict {
            verdict: Verdict::Completed { result },
            uncompared: false
        }
    );
    assert_eq!(
        until_answered(&store, &running, &complete(owner, b"")).await,
        HELD
    );
    let extend = Operation::Extend {
        token: owner,
        lease: Duration::from_secs(30),
    };
    assert_eq!(until_answered(&store, &running, &extend).await, HELD);
}

#[tokio::test]
async fn a_dropped_store_leaves_no_connection_behind() {
    let server = RedisServer::start().await;
    let proxy = Proxy::before(&server).await;
    let hand = crate::hand::Hand::on(&server).await;
    let before: String = hand.ask(&["CLIENT", "LIST"]).await;
    let store = unwatched(&proxy).connect().await.unwrap();
    {
        // A call whose caller is gone does not keep the thread alive either.
        let scope = scope();
        let key = key(&scope, 1);
        assert!(granted_as(
            1,
            &apply(&store, &key, claim(token())).await.unwrap()
        ));
        proxy.hold_last();
        let mut call = std::pin::pin!(apply(&store, &key, claim(token())));
        assert!(futures_util::poll!(&mut call).is_pending());
    }
    drop(store);
    proxy.set(Mode::Pass);
    loop {
        let now: String = hand.ask(&["CLIENT", "LIST"]).await;
        if now.lines().count() == before.lines().count() {
            break;
        }
    }
}
