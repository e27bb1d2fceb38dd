//! Lost answers, throttling, failures and refusals, met by each operation.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use oncegate_core::record::Token;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_dynamodb::DynamoDbStore;
use oncegate_servers::DynamoDbServer;

use super::proxy::{Fault, Proxy};
use super::{
    APPLIED, LEASE, apply, builder, claim, complete, granted, new_key, new_table, new_token,
    release, verdict,
};

const THROTTLE: Fault = Fault::Refuse(400, "ProvisionedThroughputExceededException");
const CONFLICT: Fault = Fault::Refuse(400, "TransactionConflictException");
const BROKEN: Fault = Fault::Refuse(500, "InternalServerError");
const DENIED: Fault = Fault::Refuse(400, "AccessDeniedException");

/// A server, a proxy before it, and a store that is reached by the proxy.
pub(super) struct Stage {
    pub(super) server: DynamoDbServer,
    pub(super) proxy: Proxy,
    pub(super) store: DynamoDbStore,
}

impl Stage {
    pub(super) async fn set() -> Self {
        let server = DynamoDbServer::start().await;
        let proxy = Proxy::before(&server.address()).await;
        let made = new_table(&server.endpoint()).await;
        let store = builder(&proxy.endpoint(), made.table());
        let store = store.connect().await.unwrap();
        proxy.calls();
        Self {
            server,
            proxy,
            store,
        }
    }
}

fn extend(token: Token) -> Operation {
    Operation::Extend {
        token,
        lease: 2 * LEASE,
    }
}

fn fail(token: Token) -> Operation {
    Operation::Fail {
        token,
        reason: "broken".to_owned(),
        retention: LEASE,
    }
}

/// The whole life of a key, each write meeting the fault: what comes back is what would come back
/// without it.
async fn lives_through(stage: &Stage, times: u64, fault: Fault) {
    let Stage { store, proxy, .. } = stage;
    let key = new_key();
    let token = new_token();
    proxy.next("PutItem", times, fault);
    assert_eq!(granted(apply(store, &key, claim(token)).await).attempt, 1);
    for operation in [extend(token), release(token)] {
        proxy.next("PutItem", times, fault);
        assert_eq!(apply(store, &key, operation).await.unwrap(), APPLIED);
    }
    // The delay of the release is over.
    store.pass(&key, Duration::from_secs(10)).await.unwrap();
    let second = new_token();
    proxy.next("PutItem", times, fault);
    // Also when its first answer is lost, the grant is that of a retry.
    assert_eq!(granted(apply(store, &key, claim(second)).await).attempt, 2);
    proxy.next("PutItem", times, fault);
    assert_eq!(apply(store, &key, fail(second)).await.unwrap(), APPLIED);
    let by = second.tag();
    proxy.next("PutItem", times, fault);
    let handed_over = apply(store, &key, Operation::HandOver { by }).await;
    assert_eq!(handed_over.unwrap(), APPLIED);
    let read = store.read(vec![key.clone()]).await.remove(0).unwrap();
    let expected = read.unwrap().record;
    proxy.next("PutItem", times, fault);
    // By the rules alone, a repeat would not find the record that it expects.
    let reopened = apply(store, &key, Operation::Reopen { expected }).await;
    assert_eq!(reopened.unwrap(), APPLIED);
    store.pass(&key, Duration::from_secs(10)).await.unwrap();
    let third = new_token();
    proxy.next("PutItem", times, fault);
    assert!(granted(apply(store, &key, claim(third)).await).reopened);
    proxy.next("PutItem", times, fault);
    assert_eq!(
        apply(store, &key, complete(third, "done")).await.unwrap(),
        APPLIED
    );
    assert!(proxy.is_spent(), "a fault was not met");
    let last = verdict(apply(store, &key, claim(new_token())).await);
    let result = "done".into();
    assert_eq!(last, Verdict::Completed { result });
}

// invariant: lost-reply
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_changes_no_reply() {
    let stage = Stage::set().await;
    lives_through(&stage, 1, Fault::LoseReply).await;
    lives_through(&stage, 2, Fault::LoseReply).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn throttling_conflicts_and_failures_that_pass_change_no_reply() {
    let stage = Stage::set().await;
    for fault in [THROTTLE, CONFLICT, BROKEN] {
        lives_through(&stage, 3, fault).await;
    }
}

// invariant: lost-reply
#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_pass_is_told_by_what_a_caller_can_do() {
    let stage = Stage::set().await;
    let impatient = builder(&stage.proxy.endpoint(), stage.store.table());
    let impatient = impatient.response_timeout(Duration::from_secs(6));
    let store = impatient.connect().await.unwrap();
    for (fault, class) in [
        (THROTTLE, "unavailable"),
        (BROKEN, "unknown"),
        (Fault::LoseReply, "unknown"),
        (DENIED, "refused"),
        (Fault::Refuse(400, "ResourceNotFoundException"), "refused"),
        (Fault::Refuse(400, "ExpiredTokenException"), "refused"),
    ] {
        let key = new_key();
        stage.proxy.next("PutItem", 1_000, fault);
        let error = apply(&store, &key, claim(new_token())).await.unwrap_err();
        assert_eq!(error.class(), class, "{fault:?}: {error}");
        assert!(error.to_string().contains(store.table()), "{error}");
        stage.proxy.heal();
    }
    // A read that fails has changed nothing, so nothing about it is unknown.
    stage.proxy.next("GetItem", 1_000, BROKEN);
    let read = store.read(vec![new_key()]).await.remove(0);
    assert_eq!(read.unwrap_err().class(), "unavailable");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_needs_two_writes_and_no_read() {
    let stage = Stage::set().await;
    let keys: Vec<_> = (0..20).map(|_| (new_key(), new_token())).collect();
    for (key, token) in &keys {
        granted(apply(&stage.store, key, claim(*token)).await);
        let completed = apply(&stage.store, key, complete(*token, "")).await;
        assert_eq!(completed.unwrap(), APPLIED);
    }
    let calls: Vec<_> = stage.proxy.calls().into_iter().collect();
    assert_eq!(calls, [("PutItem".to_owned(), 40)]);
    // A duplicate is one refused write, and a look at many is one read.
    for (key, _) in &keys {
        let duplicate = verdict(apply(&stage.store, key, claim(new_token())).await);
        assert!(matches!(duplicate, Verdict::Completed { .. }));
    }
    let keys = keys.into_iter().map(|(key, _)| key).collect();
    let known = stage.store.prefetch(keys).await;
    assert!(known.iter().all(|known| matches!(known, Ok(Some(_)))));
    let calls: Vec<_> = stage.proxy.calls().into_iter().collect();
    let expected = [("BatchGetItem".to_owned(), 1), ("PutItem".to_owned(), 20)];
    assert_eq!(calls, expected);
}

/// The token of an operation whose process has forgotten its claim is enough.
#[tokio::test(flavor = "multi_thread")]
async fn another_process_with_the_token_is_the_owner() {
    let stage = Stage::set().await;
    let other = builder(&stage.server.endpoint(), stage.store.table());
    let other = other.connect().await.unwrap();
    let key = new_key();
    let token = new_token();
    granted(apply(&stage.store, &key, claim(token)).await);
    assert_eq!(apply(&other, &key, extend(token)).await.unwrap(), APPLIED);
    assert_eq!(
        apply(&other, &key, complete(token, "done")).await.unwrap(),
        APPLIED
    );
    let repeated = apply(&stage.store, &key, complete(token, "other")).await;
    assert_eq!(repeated.unwrap(), APPLIED, "a repeat by the same token");
    let stranger = apply(&stage.store, &key, release(new_token())).await;
    assert_eq!(stranger.unwrap(), Reply::NotOwner);
}

#[tokio::test(flavor = "multi_thread")]
async fn racing_claims_grant_one_each() {
    let server = DynamoDbServer::start().await;
    let first = new_table(&server.endpoint()).await;
    let mut stores = vec![first.clone()];
    for _ in 0..7 {
        let store = builder(&server.endpoint(), first.table());
        stores.push(store.connect().await.unwrap());
    }
    let keys: Vec<_> = (0..50).map(|_| new_key()).collect();
    let claims = stores.iter().map(|store| {
        let commands = keys.iter().map(|key| Command {
            key: key.clone(),
            operation: claim(new_token()),
        });
        store.execute(commands.collect())
    });
    let mut granted_to = vec![0; keys.len()];
    for replies in join_all(claims).await {
        for (at, reply) in replies.into_iter().enumerate() {
            match verdict(reply) {
                Verdict::Granted(_) => granted_to[at] += 1,
                Verdict::Busy { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(granted_to, vec![1; keys.len()]);
}

/// A large batch that waits holds no heartbeat back.
#[tokio::test(flavor = "multi_thread")]
async fn heartbeats_pass_a_batch() {
    let stage = Stage::set().await;
    let key = new_key();
    let token = new_token();
    granted(apply(&stage.store, &key, claim(token)).await);
    // The batch holds all permits for calls, because each of its calls waits to be repeated.
    stage.proxy.next("GetItem", 1_000_000, THROTTLE);
    let store = Arc::new(stage.store.clone());
    let batch = tokio::spawn(async move {
        let releases = (0..2_000).map(|_| Command {
            key: new_key(),
            operation: release(new_token()),
        });
        store.execute(releases.collect()).await
    });
    super::until("the batch to be under way", async || {
        let calls = stage.proxy.calls();
        match calls.get("GetItem") {
            Some(_) => Ok(()),
            None => Err(format!("{calls:?}")),
        }
    })
    .await;
    assert_eq!(
        apply(&stage.store, &key, extend(token)).await.unwrap(),
        APPLIED
    );
    assert!(!batch.is_finished(), "the batch was over before");
    batch.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_over_the_limit_is_refused_with_what_to_change() {
    let stage = Stage::set().await;
    let key = new_key();
    let token = new_token();
    granted(apply(&stage.store, &key, claim(token)).await);
    let complete = Operation::Complete {
        token,
        fingerprint: None,
        result: vec![7; 410_000].into(),
        retention: LEASE,
    };
    match apply(&stage.store, &key, complete).await {
        Err(StoreError::Refused { reason }) => {
            assert!(reason.contains("large_results"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    // The claim is still there, and a smaller result completes it.
    let completed = apply(&stage.store, &key, super::complete(token, "small")).await;
    assert_eq!(completed.unwrap(), APPLIED);
}
