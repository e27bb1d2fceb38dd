//! Servers that have forgotten something, and servers that have not.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use oncegate::admin;
use oncegate::redis::RedisStore;
use oncegate::{Completion, Counters, Entry, Gate, Key, Message, OnStoreLoss, Origin};
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::{FencingToken, Token};
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::Store;
use oncegate_testkit::{Proxy, ProxyMode, RedisPair, RedisServer, unique, until};

use crate::faults::until_answered;
use crate::hand::{Hand, apply, claim, complete, key, scope, token};

const HELD: Reply = Reply::Applied { recreated: false };
const LIMIT: Duration = Duration::from_secs(240);

async fn store(url: &str) -> RedisStore {
    RedisStore::connect(url).await.unwrap()
}

async fn loss_noticed(store: &RedisStore) {
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
    let (key, owner) = (key(scope, number), token());
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
async fn a_failover_to_a_replica_that_was_cut_off_is_noticed_and_a_fencing_token_still_grows() {
    let mut pair = pair().await;
    let (halting, going_on) = (
        store(&pair.front.url()).await,
        store(&pair.front.url()).await,
    );
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
async fn a_failover_that_loses_nothing_and_a_restart_with_its_data_raise_no_alarm() {
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
async fn a_server_that_comes_back_empty_is_noticed_before_it_answers_a_claim() {
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
async fn a_server_that_is_emptied_and_a_completion_that_is_deleted_are_noticed_without_a_broken_connection()
 {
    for words in [&["FLUSHALL"][..], &["DEL"]] {
        let server = RedisServer::start().await;
        let (hand, store) = (Hand::on(&server).await, store(server.url()).await);
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
        let (running, owner) = (crate::hand::key(&scope, 2), token());
        apply(&store, &running, claim(owner)).await.unwrap();
        let () = hand.ask(&["DEL", running.as_str()]).await;
        let ended = apply(&store, &running, complete(owner, b"")).await.unwrap();
        assert_eq!(ended, Reply::Applied { recreated: true });
        assert_eq!(store.loss(), noticed, "it is said once");
    }
}

// invariant: loss-undetected
#[tokio::test]
async fn a_loss_is_noticed_on_a_server_that_hides_its_replication_and_that_this_is_not_all_is_said()
{
    let server = RedisServer::start().await;
    let proxy = Proxy::before(&server).await;
    proxy.rewrite("master_replid", "hidden_replid");
    let (hand, store) = (Hand::on(&server).await, store(&proxy.url()).await);
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
    let (hand, store) = (Hand::on(&server).await, store(server.url()).await);
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
        let (key, owner) = (key(&scope, number.into()), token());
        apply(&store, &key, complete(owner, b"done")).await.unwrap();
        store
            .loss()
            .map(drop)
            .ok_or_else(|| format!("{number} completions"))
    })
    .await;
}

#[tokio::test]
async fn a_policy_that_may_evict_is_noticed_while_running_and_so_is_its_end() {
    let server = RedisServer::start().await;
    let (hand, store) = (
        Hand::on(&server).await,
        RedisStore::connect(server.url()).await.unwrap(),
    );
    let (scope, owner) = (scope(), token());
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

// invariant: clock-goes-back
#[tokio::test]
async fn a_dead_owner_keeps_its_key_no_longer_than_the_longest_lease_of_the_scope_after_the_clock_has_gone_back()
 {
    let server = RedisServer::start().await;
    let (hand, store) = (Hand::on(&server).await, store(server.url()).await);
    let name = unique("clock");
    let gate = |seconds| {
        Gate::new(&name, Key::json(["id"]), store.clone()).lease(Duration::from_secs(seconds))
    };
    let (short, long) = (gate(5), gate(60));
    long.open().await.unwrap();
    short.open().await.unwrap();
    let message = Message::new(
        "orders",
        Origin::Other("test".into()),
        Some(r#"{"id":1}"#.into()),
    );
    let Entry::Granted(lease) = short.enter(&message).await.unwrap() else {
        panic!("it is new")
    };
    let key = lease.store_key().clone();
    drop(lease);
    // Its owner is dead, and an hour more is left than it had asked for.
    let dead = Operation::Claim {
        token: token(),
        lease: Duration::from_secs(3_605),
        fingerprint: None,
        fenced: false,
        longest_lease: Duration::MAX,
    };
    until(
        "the first attempt to be released",
        LIMIT,
        async || match apply(&store, &key, dead.clone()).await {
            Ok(Reply::Verdict {
                verdict: Verdict::Granted(_),
                ..
            }) => Ok(()),
            other => Err(format!("{other:?}")),
        },
    )
    .await;
    let Entry::Busy { retry_in } = short.enter(&message).await.unwrap() else {
        panic!("it is claimed")
    };
    assert!(retry_in <= Duration::from_millis(60_001), "{retry_in:?}");
    assert!(
        retry_in > Duration::from_secs(30),
        "another gate's lease is not cut: {retry_in:?}"
    );
    hand.pass(&[(key, Duration::from_secs(61))]).await;
    let Entry::Granted(lease) = short.enter(&message).await.unwrap() else {
        panic!("its lease is over")
    };
    assert!(lease.attempt().recovered());
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
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
    let (hand, first) = (Hand::on(&server).await, store(server.url()).await);
    let (key, owner) = (key(&scope(), 1), token());
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

// invariant: halt-without-loss
#[tokio::test]
async fn a_store_that_outlives_its_gate_knows_that_a_loss_was_accepted() {
    let server = RedisServer::start().await;
    let (kept, operator) = (store(server.url()).await, store(server.url()).await);
    let name = unique("outlived");
    let scope = Scope::new(&name).unwrap();
    let message = Message::new(
        "orders",
        Origin::Other("test".into()),
        Some(r#"{"id":1}"#.into()),
    );
    let gate = Gate::new(&name, Key::json(["id"]), kept.clone());
    let Entry::Granted(lease) = gate.enter(&message).await.unwrap() else {
        panic!("it is new")
    };
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    let () = Hand::on(&server).await.ask(&["FLUSHALL"]).await;
    loss_noticed(&kept).await;
    let halt = until("the halt to be written", LIMIT, async || {
        admin::halt_of(&operator, &scope)
            .await
            .map_err(|error| error.to_string())?
            .ok_or("none".to_owned())
    })
    .await;
    drop(gate);
    let accepted = admin::accept_loss(&operator, &scope, &halt).await.unwrap();
    assert!(
        matches!(accepted, admin::AcceptedLoss::Accepted(_)),
        "{accepted:?}"
    );

    for name in [unique("new"), name] {
        let gate = Gate::new(&name, Key::json(["id"]), kept.clone());
        let entered = gate.enter(&message).await;
        assert!(
            matches!(entered, Ok(Entry::Granted(_))),
            "{name}: {entered:?}"
        );
        let scope = Scope::new(&name).unwrap();
        assert_eq!(
            admin::halt_of(&operator, &scope).await.unwrap(),
            None,
            "{name}"
        );
    }
}

#[tokio::test]
async fn a_gate_tells_of_the_loss_and_counts_the_runs_that_it_may_have_added() {
    let server = RedisServer::start().await;
    let store = store(server.url()).await;
    let counters = Arc::new(Counters::default());
    let gate = Gate::new(unique("loss"), Key::json(["id"]), store)
        .on_store_loss(OnStoreLoss::Continue)
        .observer(Arc::clone(&counters) as _);
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_millis();
    let first = Message::new(
        "orders",
        Origin::Other("test".into()),
        Some(r#"{"id":1}"#.into()),
    )
    .with_timestamp_ms(i64::try_from(now).unwrap());
    let Entry::Granted(lease) = gate.enter(&first).await.unwrap() else {
        panic!("it is new")
    };
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    assert_eq!(counters.total("extra_runs"), 0);

    let () = Hand::on(&server).await.ask(&["FLUSHALL"]).await;
    until("the gate to tell", LIMIT, async || {
        match counters.total("store_losses") {
            0 => Err("it has not".to_owned()),
            _ => Ok(()),
        }
    })
    .await;
    // Claims are refused until the gate has written down that the loss is accepted.
    let again = until("the message to run again", LIMIT, async || {
        match gate.enter(&first).await {
            Ok(Entry::Granted(lease)) => Ok(lease),
            other => Err(format!("{other:?}")),
        }
    });
    let lease = again.await;
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    assert_eq!(counters.get("extra_runs", "store_loss"), 1);
}
