//! Where a store's connections are driven: on the runtime of its callers, which may be blocked, or
//! end before the store.

use std::time::{Duration, Instant};

use oncegate::redis::RedisStore;
use oncegate_core::rules::{Operation, Reply};
use oncegate_testkit::{Redis, RedisServer};
use tokio::runtime::{Builder, Runtime};

use crate::faults::{RECOVERY_LIMIT, until_answered};
use crate::hand::{apply, claim, complete, key, scope, token};

const HELD: Reply = Reply::Applied { recreated: false };

fn with_threads(count: usize) -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(count)
        .enable_all()
        .build()
        .expect("a runtime")
}

#[tokio::test]
async fn a_store_outlives_the_runtime_on_which_it_was_connected() {
    let redis = Redis::shared().await;
    let first = with_threads(2);
    let url = redis.url().to_owned();
    let store = first
        .spawn(async move { RedisStore::connect(&url).await })
        .await
        .unwrap()
        .unwrap();
    let scope = scope();
    let token = token();
    let key = key(&scope, 1);
    let held = key.clone();
    let used = store.clone();
    first
        .spawn(async move { apply(&used, &held, claim(token)).await })
        .await
        .unwrap()
        .unwrap();
    first.shutdown_background();
    assert_eq!(
        until_answered(&store, &key, &complete(token, b"done")).await,
        HELD
    );
    let extend = Operation::Extend {
        token,
        lease: Duration::from_secs(30),
    };
    assert_eq!(until_answered(&store, &key, &extend).await, HELD);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_answer_that_comes_while_all_threads_are_blocked_counts() {
    const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
    let mut server = RedisServer::synced().await;
    // On a busy machine the greeting may take longer than that.
    let builder = RedisStore::builder(server.url()).start_patience(RECOVERY_LIMIT);
    let store = builder.response_timeout(RESPONSE_TIMEOUT).connect();
    let store = store.await.unwrap();
    let key = key(&scope(), 1);
    // On the runtime's only thread, beside the connection.
    let answer = tokio::spawn(async move {
        server.process().signal("STOP");
        let mut call = std::pin::pin!(apply(&store, &key, claim(token())));
        assert!(futures_util::poll!(&mut call).is_pending());
        // The pipe and its connection are ready to run, and send the call.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        server.process().signal("CONT");
        // The fault itself: the thread does nothing else until the time limit of the call is over.
        let blocked = Instant::now();
        while blocked.elapsed() < 2 * RESPONSE_TIMEOUT {
            std::hint::spin_loop();
        }
        call.await
    });
    answer.await.unwrap().unwrap();
}
