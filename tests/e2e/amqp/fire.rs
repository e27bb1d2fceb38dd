//! Workers of a queue that are killed and stopped, and a broker that is killed, in the middle of
//! their handlers.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use fastrand::Rng;
use oncegate::dead_letters::millis_since_1970;
use oncegate_testkit::{Ledger, QueueKind, RabbitMqServer, RabbitQueue, Redis, Workers, unique};
use serde_json::json;

/// One in so many orders is not due for this time, if no order is kept.
const ORDERS_A_WAIT: usize = 20;
const WAITS: Duration = Duration::from_secs(30);
/// How many orders are handled between two faults, on average.
const ORDERS_A_FAULT: usize = 100;
const WORKERS: usize = 3;
/// The number of workers that are killed: `ONCEGATE_RABBITMQ_KILLS`. As many connections are cut.
/// The broker is killed once, and a worker stopped once, for so many of them.
const DEFAULT_KILLS: usize = 5;
const KILLS_A_BROKER: usize = 5;
const KILLS_A_STOP: usize = 10;

#[derive(Clone, Copy, Debug)]
enum Fault {
    Kill,
    /// An operator closes the connection of a worker.
    Cut,
    BrokerKill,
    /// A worker is stopped until the broker and the store have given its messages to others.
    Stop,
}

fn faults(rng: &mut Rng) -> Vec<Fault> {
    let kills = std::env::var("ONCEGATE_RABBITMQ_KILLS")
        .map_or(DEFAULT_KILLS, |number| number.parse().unwrap());
    let mut faults = vec![Fault::Kill; kills];
    faults.resize(2 * kills, Fault::Cut);
    faults.resize(faults.len() + kills / KILLS_A_BROKER, Fault::BrokerKill);
    faults.resize(faults.len() + (kills / KILLS_A_STOP).max(1), Fault::Stop);
    rng.shuffle(&mut faults);
    faults
}

/// The order of messages: kept if the broker delivers to one worker at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    None,
    Kept,
}

async fn nothing_is_lost(kind: QueueKind, kept: Order) {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    // What waits is held for longer than the broker allows.
    let mut server = RabbitMqServer::start_with("consumer_timeout = 4000").await;
    let redis = Redis::shared().await;
    let arguments = [("x-single-active-consumer", json!(kept == Order::Kept))];
    let queue = server.new_queue_with("fire", kind, &arguments).await;
    server.write_down().await;
    let faults = faults(&mut rng);
    // Some time after the last fault, while there is still enough left to do.
    let orders = ORDERS_A_FAULT * (faults.len() + 2);
    let due_ms = millis_since_1970(SystemTime::now() + WAITS);
    let body = |n: usize| {
        let order = if n < orders { n } else { rng.usize(..orders) };
        let waits = order % ORDERS_A_WAIT == 0 && kept == Order::None;
        let how = if waits { "later" } else { "usual" };
        format!(r#"{{"order":"{order}","n":{n},"how":"{how}","due_ms":{due_ms}}}"#)
    };
    let messages = orders * 3 / 2;
    queue
        .send((0..messages).map(body).collect::<Vec<String>>())
        .await;

    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path().join("ledger"));
    let mut workers = workers(&server, &redis, &queue, &ledger, kept);
    for _ in 0..WORKERS {
        workers.start();
    }
    for (n, fault) in faults.iter().enumerate() {
        let at = ORDERS_A_FAULT * (n + 1) + rng.usize(..ORDERS_A_FAULT);
        workers
            .until(
                &ledger,
                async |effects| if effects >= at { Ok(()) } else { Err(()) },
            )
            .await;
        hit(*fault, &mut server, &queue, &mut workers, &ledger, &mut rng).await;
    }
    workers
        .until(&ledger, async |effects| {
            let left = queue.ready().await;
            if effects >= orders && left == 0 {
                Ok(())
            } else {
                Err(left)
            }
        })
        .await;
    let run = format!("seed {seed}, {faults:?}");
    let explained = workers.explained(&ledger, (0..orders).map(|order| order.to_string()), &run);
    if kept == Order::Kept {
        let first = first_effects(&ledger);
        assert!(first.is_sorted(), "{run}: {first:?}");
    }
    println!(
        "{} faults, lost 0, second effects {explained}, each of a worker that was hit",
        faults.len()
    );
}

/// Lets the fault happen.
async fn hit(
    fault: Fault,
    server: &mut RabbitMqServer,
    queue: &RabbitQueue,
    workers: &mut Workers,
    ledger: &Ledger,
    rng: &mut Rng,
) {
    match fault {
        Fault::Kill => workers.replace_one(rng),
        Fault::Cut => {
            let consuming = format!("oncegate consumes {}", queue.name());
            server.close_connection(&consuming).await;
        }
        Fault::BrokerKill => {
            server.kill();
            server.start_again().await;
        }
        Fault::Stop => {
            let all = |consumers| consumers == WORKERS;
            until_consumers(workers, ledger, server, queue, all).await;
            workers.stop_one(rng);
            let fewer = |consumers| consumers < WORKERS;
            until_consumers(workers, ledger, server, queue, fewer).await;
            workers.go_on();
        }
    }
}

/// The workers, none of which is started.
fn workers(
    server: &RabbitMqServer,
    redis: &Redis,
    queue: &RabbitQueue,
    ledger: &Ledger,
    order: Order,
) -> Workers {
    let path = ledger.path().display().to_string();
    // The broker gives up a connection that is silent for two heartbeats.
    let uri = format!("{}?heartbeat=2", server.uri());
    let from = ["amqp".to_owned(), uri, queue.name().to_owned()];
    let in_order = (order == Order::Kept).then(|| "in-order".to_owned());
    let arguments = [redis.url().to_owned(), unique("fire"), path]
        .into_iter()
        .chain(from)
        .chain(in_order)
        .collect();
    Workers::of(env!("CARGO_BIN_EXE_worker"), arguments)
}

/// Waits until the broker has such a number of consumers.
async fn until_consumers(
    workers: &Workers,
    ledger: &Ledger,
    server: &RabbitMqServer,
    queue: &RabbitQueue,
    so: fn(usize) -> bool,
) {
    workers
        .until(ledger, async |_| match server.consumers(queue).await {
            consumers if so(consumers) => Ok(()),
            consumers => Err(consumers),
        })
        .await;
}

/// The orders by their first effects.
fn first_effects(ledger: &Ledger) -> Vec<usize> {
    let mut seen = BTreeSet::new();
    ledger
        .read()
        .into_iter()
        .map(|effect| effect.effect.parse().unwrap())
        .filter(|order| seen.insert(*order))
        .collect()
}

// invariant: queue-message-lost
#[tokio::test(flavor = "multi_thread")]
async fn a_classic_queue_under_fire_loses_nothing() {
    nothing_is_lost(QueueKind::Classic, Order::None).await;
}

// invariant: queue-message-lost
#[tokio::test(flavor = "multi_thread")]
async fn a_quorum_queue_under_fire_loses_nothing() {
    nothing_is_lost(QueueKind::Quorum, Order::None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_order_of_a_single_active_consumer_holds_under_fire() {
    nothing_is_lost(QueueKind::Quorum, Order::Kept).await;
}
