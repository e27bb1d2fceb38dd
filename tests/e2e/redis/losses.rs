//! Servers that have forgotten something, and servers that have not.

use std::time::Duration;

use oncegate::redis::RedisStore;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::{FencingToken, Token};
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::Store;
use oncegate_testkit::{Proxy, ProxyMode, RedisPair, RedisServer, until};

use crate::faults::until_answered;
use crate::hand::{Hand, apply, claim, complete, key, scope, token};

const HELD: Reply = Reply::Applied { recreated: false };
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

pub(crate) async fn store(url: &str) -> RedisStore {
    RedisStore::connect(url).await.unwrap()
}

pub(crate) async fn loss_noticed(store: &RedisStore) {
    until("the loss to be noticed", LIMIT, async || {
        store.loss().map(drop).ok_or("it is not".to_owned())
    })
    .await;
}

/// A refusal is an answer too, so it is not waited out.
async fn refusal(store: &RedisStore, key: &StoreKey) -> String {
    until("the claim to be refused", LIMIT, async || {
        match apply(store, key, claim(token())).await {
            Err(error) if error.class() == "refused" => Ok(error.to_string()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

fn fenced(token: Token) -> Operation {
    Operation::Claim {
        token,
        lease: Duration::from_secs(30),
        fingerprint: None,
        fenced: true,
        longest_lease: Duration::MAX,
    }
}

fn fencing_token(reply: &Reply) -> FencingToken {
    match reply {
        Reply::Verdict {
            verdict: Verdict::Granted(grant),
            ..
        } => grant.fencing_token.unwrap(),
        other => panic!("{other:?}"),
    }
}

async fn finish(store: &RedisStore, scope: &Scope, number: u128) -> StoreKey {
    let key = key(scope, number);
    let owner = token();
    apply(store, &key, claim(owner)).await.unwrap();
    assert_eq!(
        apply(store, &key, complete(owner, b"done")).await.unwrap(),
        HELD
    );
    key
}

/// Both keep what they have answered.
async fn pair() -> RedisPair {
    RedisPair::start(&["--appendfsync", "always"]).await
}

// invariant: loss-undetected
#[tokio::test]
async fn a_failover_to_a_replica_that_was_cut_off_is_noticed() {
    let mut pair = pair().await;
    let halting = store(&pair.front.url()).await;
    let going_on = store(&pair.front.url()).await;
    let scope = scope();
    let kept = finish(&halting, &scope, 1).await;
    pair.caught_up().await;
    pair.cut();
    let lost = finish(&halting, &scope, 2).await;
    let _ = finish(&going_on, &scope, 3).await;
    let refused = finish(&halting, &scope, 6).await;
    let running = [token(), token()];
    let keys = [key(&scope, 4), key(&scope, 5)];
    apply(&halting, &keys[0], claim(running[0])).await.unwrap();
    let before = fencing_token(
        &apply(&going_on, &keys[1], fenced(running[1]))
            .await
            .unwrap(),
    );

    pair.fail_over().await;
    // Of a key of its own: a claim in flight may have been executed, though its caller gets no
    // grant.
    assert!(refusal(&halting, &refused).await.contains("lost records"));
    // What runs may end, and is recorded.
    let recreated = Reply::Applied { recreated: true };
    assert_eq!(
        until_answered(&halting, &keys[0], &complete(running[0], b"")).await,
        recreated
    );
    // Where the loss is accepted, what is lost runs again, and the rest is known.
    loss_noticed(&going_on).await;
    going_on.accept_loss();
    let again = until_answered(&going_on, &lost, &claim(token())).await;
    assert!(
        matches!(
            again,
            Reply::Verdict {
                verdict: Verdict::Granted(_),
                ..
            }
        ),
        "{again:?}"
    );
    assert!(going_on.loss().is_some() && halting.loss().is_some());
    let known = until_answered(&going_on, &kept, &claim(token())).await;
    assert!(
        matches!(
            known,
            Reply::Verdict {
                verdict: Verdict::Completed { .. },
                ..
            }
        ),
        "{known:?}"
    );
    let after = fencing_token(&until_answered(&going_on, &keys[1], &fenced(token())).await);
    assert!(after > before, "{before:?} {after:?}");
}

// invariant: loss-undetected
#[tokio::test]
async fn a_failover_that_loses_nothing_or_a_restart_raises_no_alarm() {
    let mut pair = pair().await;
    let store = store(&pair.front.url()).await;
    let scope = scope();
    let first = finish(&store, &scope, 1).await;
    pair.caught_up().await;
    pair.fail_over().await;
    let known = until_answered(&store, &first, &claim(token())).await;
    assert!(
        matches!(
            known,
            Reply::Verdict {
                verdict: Verdict::Completed { .. },
                ..
            }
        ),
        "{known:?}"
    );
    let second = key(&scope, 2);
    until_answered(&store, &second, &complete(token(), b"")).await;

    // A replica writes its file anew after it was given everything; killed before, it has nothing.
    until("the replica's file to be whole", LIMIT, async || {
        let info = pair.replica.info("persistence").await;
        let whole = ["aof_rewrite_in_progress:0\r", "aof_rewrite_scheduled:0\r"];
        whole
            .iter()
            .all(|line| info.contains(line))
            .then_some(())
            .ok_or(info)
    })
    .await;
    pair.replica.kill();
    pair.replica.start_again().await;
    let () = Hand::on(&pair.replica)
        .await
        .ask(&["REPLICAOF", "NO", "ONE"])
        .await;
    for key in [first, second] {
        let known = until_answered(&store, &key, &claim(token())).await;
        assert!(
            matches!(
                known,
                Reply::Verdict {
                    verdict: Verdict::Completed { .. },
                    ..
                }
            ),
            "{known:?}"
        );
    }
    assert_eq!(store.loss(), None);
}

// invariant: loss-undetected
#[tokio::test]
async fn a_server_that_comes_back_empty_is_noticed_before_it_grants() {
    let mut server = RedisServer::start().await;
    let store = store(server.url()).await;
    let scope = scope();
    let lost = finish(&store, &scope, 1).await;
    server.kill();
    server.wipe();
    server.start_again().await;
    // A claim in flight may have been executed, but its caller gets no grant.
    let refused = until("the claim to be refused", LIMIT, async || {
        match apply(&store, &lost, claim(token())).await {
            Ok(answer) => panic!("a server that has lost records has answered: {answer:?}"),
            Err(error) if error.class() == "refused" => Ok(error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    });
    assert!(refused.await.contains("lost records"));
}

// invariant: loss-undetected
#[tokio::test]
async fn a_server_that_is_emptied_and_a_deleted_record_are_noticed() {
    for words in [&["FLUSHALL"][..], &["DEL"]] {
        let server = RedisServer::start().await;
        let hand = Hand::on(&server).await;
        let store = store(server.url()).await;
        let scope = scope();
        let key = finish(&store, &scope, 1).await;
        let words: Vec<&str> = if words == ["DEL"] {
            vec!["DEL", key.as_str()]
        } else {
            words.to_vec()
        };
        let () = hand.ask(&words).await;
        loss_noticed(&store).await;
        let noticed = store.loss();
        store.accept_loss();
        // A claim that is deleted is noticed by its own end.
        let running = crate::hand::key(&scope, 2);
        let owner = token();
        apply(&store, &running, claim(owner)).await.unwrap();
        let () = hand.ask(&["DEL", running.as_str()]).await;
        let ended = apply(&store, &running, complete(owner, b"")).await.unwrap();
        assert_eq!(ended, Reply::Applied { recreated: true });
        assert_eq!(store.loss(), noticed, "it is said once");
    }
}

// invariant: loss-undetected
#[tokio::test]
async fn hidden_replication_is_warned_of_and_a_loss_still_noticed() {
    let server = RedisServer::start().await;
    let proxy = Proxy::before(&server).await;
    proxy.rewrite("master_replid", "hidden_replid");
    let hand = Hand::on(&server).await;
    let store = store(&proxy.url()).await;
    let warnings = store.check().await.unwrap().warnings;
    assert!(
        warnings
            .iter()
            .any(|warning| warning.contains("master_replid")),
        "{warnings:?}"
    );
    finish(&store, &scope(), 1).await;
    let () = hand.ask(&["FLUSHALL"]).await;
    loss_noticed(&store).await;
}

// invariant: loss-undetected
#[tokio::test]
async fn a_busy_server_that_is_emptied_is_noticed() {
    let server = RedisServer::start().await;
    let hand = Hand::on(&server).await;
    let store = store(server.url()).await;
    let scope = scope();
    let mut number: u64 = 0;
    let mut first_look = None;
    // The later looks ask for what an earlier one has seen.
    until("a few looks", LIMIT, async || {
        number += 1;
        finish(&store, &scope, number.into()).await;
        // Less the questions of this test itself.
        let looks = server.times_looked_at().await.saturating_sub(number);
        let first = *first_look.get_or_insert(looks);
        if looks >= first + 3 {
            Ok(())
        } else {
            Err(format!("{looks} looks"))
        }
    })
    .await;
    let () = hand.ask(&["FLUSHALL"]).await;
    until("the loss to be noticed", LIMIT, async || {
        number += 1;
        // From the loss on, claims are refused; a completion of an absent record is not.
        let key = key(&scope, number.into());
        let owner = token();
        apply(&store, &key, complete(owner, b"done")).await.unwrap();
        store
            .loss()
            .map(drop)
            .ok_or_else(|| format!("{number} completions"))
    })
    .await;
}

#[tokio::test]
async fn a_policy_that_may_evict_and_its_end_are_noticed_at_runtime() {
    let server = RedisServer::start().await;
    let hand = Hand::on(&server).await;
    let store = RedisStore::connect(server.url()).await.unwrap();
    let scope = scope();
    let owner = token();
    let running = key(&scope, 1);
    apply(&store, &running, claim(owner)).await.unwrap();
    let () = hand
        .ask(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"])
        .await;
    let refused = refusal(&store, &key(&scope, 2)).await;
    assert!(
        refused.contains("allkeys-lru") && refused.contains("noeviction"),
        "{refused}"
    );
    assert_eq!(
        apply(&store, &running, complete(owner, b"")).await.unwrap(),
        HELD
    );
    let () = hand
        .ask(&["CONFIG", "SET", "maxmemory-policy", "noeviction"])
        .await;
    until("claims to be taken again", LIMIT, async || {
        apply(&store, &key(&scope, 3), claim(token()))
            .await
            .map_err(|error| error.to_string())
    })
    .await;
}

// invariant: halt-without-loss
#[tokio::test]
async fn a_replica_is_not_asked_for_descriptor_or_records() {
    let pair = pair().await;
    let store = store(&pair.front.url()).await;
    let scope = scope();
    store.describe(&scope, None, "{}").await.unwrap();
    pair.caught_up().await;
    pair.cut();
    store.describe(&scope, Some("{}"), "{1}").await.unwrap();
    finish(&store, &scope, 1).await;
    // As an address does that follows the primary, when it lags itself.
    pair.front.point_at(&pair.replica);
    pair.front.set(ProxyMode::Refuse);
    until("the connection to break", LIMIT, async || {
        match store.descriptor(&scope).await {
            Err(_) => Ok(()),
            Ok(text) => Err(format!("{text:?}")),
        }
    })
    .await;
    pair.front.set(ProxyMode::Pass);
    until("the replica to be asked", LIMIT, async || {
        match store.descriptor(&scope).await {
            Err(error) if error.to_string().contains("replica") => Ok(()),
            Err(other) => Err(other.to_string()),
            Ok(text) => {
                assert_eq!(text.as_deref(), Some("{1}"), "an earlier descriptor");
                Err("the primary has answered".to_owned())
            }
        }
    })
    .await;
    assert_eq!(store.loss(), None);
    pair.front.point_at(&pair.primary);
    until("the primary to be asked", LIMIT, async || {
        match store.descriptor(&scope).await {
            Ok(text) if text.as_deref() == Some("{1}") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    assert_eq!(store.loss(), None);
}

// invariant: halt-without-loss
#[tokio::test]
async fn a_completion_that_was_repeated_late_may_expire() {
    let server = RedisServer::start().await;
    let hand = Hand::on(&server).await;
    let first = store(server.url()).await;
    let key = key(&scope(), 1);
    let owner = token();
    apply(&first, &key, claim(owner)).await.unwrap();
    assert_eq!(
        apply(&first, &key, complete(owner, b"done")).await.unwrap(),
        HELD
    );
    drop(first);
    // Its answer was lost for most of the retention, and now it is over.
    let store = store(server.url()).await;
    assert_eq!(
        apply(&store, &key, complete(owner, b"done")).await.unwrap(),
        HELD
    );
    hand.pass(&[(key, Duration::from_secs(7_200))]).await;
    let before = server.times_looked_at().await;
    let mut asked = 0;
    until("a few looks", LIMIT, async || {
        asked += 1;
        let looks = server.times_looked_at().await - before - asked;
        if looks >= 3 {
            Ok(())
        } else {
            Err(format!("{looks} looks"))
        }
    })
    .await;
    assert_eq!(store.loss(), None);
}
