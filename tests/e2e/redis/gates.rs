//! Gates over a server that has forgotten something, or whose clock has gone back.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use oncegate::admin;
use oncegate::{Completion, Counters, Entry, Gate, Key, Message, OnStoreLoss, Origin};
use oncegate_core::key::Scope;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_testkit::{RedisServer, unique, until};

use crate::hand::{Hand, apply, token};
use crate::losses::{LIMIT, loss_noticed, store};

// invariant: clock-goes-back
#[tokio::test]
async fn a_clock_that_goes_back_adds_at_most_the_longest_lease() {
    let server = RedisServer::start().await;
    let hand = Hand::on(&server).await;
    let store = store(server.url()).await;
    let name = unique("clock");
    let gate = |seconds| {
        Gate::new(&name, Key::json(["id"]), store.clone()).lease(Duration::from_secs(seconds))
    };
    let short = gate(5);
    let long = gate(60);
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
async fn a_store_that_outlives_its_gate_knows_of_an_accepted_loss() {
    let server = RedisServer::start().await;
    let kept = store(server.url()).await;
    let operator = store(server.url()).await;
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
async fn a_gate_tells_of_a_loss_and_counts_runs_it_may_have_added() {
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
