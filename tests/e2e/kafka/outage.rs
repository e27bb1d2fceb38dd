//! Brokers that come and go in quick succession, and members that must all come back.
//!
//! `ONCEGATE_OUTAGES` sets how often, with twice as many groups (by default once).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use oncegate::kafka::KafkaSource;
use oncegate::observe::Counters;
use oncegate::source::Source;
use oncegate_testkit::{Kafka, KafkaBroker, Record, unique, until};
use tokio::task::JoinHandle;

use crate::stage::{QUICK, RANGE, finish_if_ours, logged, with};

const MEMBERS: usize = 3;
const PARTITIONS: i32 = 6;
/// Every member must have received a message so long after the last outage.
const BACK: Duration = Duration::from_secs(150);
/// The shortest sessions that a member keeps on a busy machine. The members that the outage
/// replaces have not left: the others wait for the end of their sessions.
const SESSIONS: [&str; 2] = [
    "group.consumer.session.timeout.ms=6000",
    "group.consumer.heartbeat.interval.ms=500",
];
/// The new protocol. A member that misses the answer which tells it to give partitions away keeps
/// them for `max.poll.interval.ms` (`heartbeats.rs`), five minutes by default.
const NEW: &[(&str, &str)] = &[
    ("group.protocol", "consumer"),
    ("max.poll.interval.ms", "30000"),
];
/// How many milliseconds the broker is up between a start and a freeze.
const UP_MS: std::ops::Range<u64> = 500..6_000;
/// How many milliseconds it is frozen: longer than a session.
const FROZEN_MS: std::ops::Range<u64> = 7_000..14_000;

/// A member that finishes whatever comes, and counts it.
struct Worker {
    source: Arc<KafkaSource>,
    received: Arc<AtomicUsize>,
    counters: Arc<Counters>,
    work: JoinHandle<()>,
}

struct Group {
    name: String,
    topic: String,
    properties: &'static [(&'static str, &'static str)],
    workers: Vec<Worker>,
}

impl Group {
    async fn join(&self, kafka: &Kafka) -> Worker {
        let source = KafkaSource::new(kafka.bootstrap(), &self.name, [&self.topic])
            .commit_interval(Duration::from_millis(50))
            .open_timeout(BACK);
        let source = Arc::new(with(source, self.properties));
        let counters = Arc::new(Counters::default());
        source
            .open(Arc::clone(&counters) as _)
            .await
            .expect("opens");
        let received = Arc::new(AtomicUsize::new(0));
        let of = Arc::clone(&source);
        let count = Arc::clone(&received);
        let work = tokio::spawn(async move {
            while let Ok(Some(batch)) = of.receive(16).await {
                count.fetch_add(batch.len(), Ordering::Relaxed);
                for delivery in &batch {
                    finish_if_ours(delivery);
                }
            }
        });
        Worker {
            source,
            received,
            counters,
            work,
        }
    }

    /// Waits until each member has received something from now on.
    async fn all_receive(&self, kafka: &Kafka) {
        let before: Vec<usize> = self
            .workers
            .iter()
            .map(|worker| worker.received.load(Ordering::Relaxed))
            .collect();
        let each = async || {
            let records = (0..PARTITIONS).map(|partition| Record::new("1").partition(partition));
            kafka.produce(&self.topic, records).await;
            let now = self
                .workers
                .iter()
                .map(|worker| worker.received.load(Ordering::Relaxed));
            let waiting: Vec<usize> = now
                .zip(&before)
                .enumerate()
                .filter(|(_, (now, before))| now == *before)
                .map(|(n, _)| n)
                .collect();
            if waiting.is_empty() {
                return Ok(());
            }
            let statuses: Vec<_> = waiting
                .iter()
                .map(|n| self.workers[*n].source.status())
                .collect();
            Err(format!(
                "{}: members {waiting:?} of {MEMBERS} receive nothing: {statuses:#?}",
                self.name
            ))
        };
        until("every member receives", BACK, each).await;
    }
}

/// Kills the broker, with half of the members replaced meanwhile; kills it again when partitions
/// are assigned; lets it run for seconds; freezes it.
async fn outage(broker: &mut KafkaBroker, groups: &mut [Group], rng: &mut Rng) {
    broker.kill();
    let kafka = Kafka::at(broker.bootstrap());
    for group in groups.iter_mut() {
        for worker in group.workers.drain(..MEMBERS / 2 + 1) {
            worker.work.abort();
            drop(worker.source);
        }
    }
    let joining = join_all(
        groups
            .iter()
            .map(|group| join_all((group.workers.len()..MEMBERS).map(|_| group.join(&kafka)))),
    );
    let ((), joined) = tokio::join!(broker.start_again(), joining);
    for (group, joined) in groups.iter_mut().zip(joined) {
        group.workers.extend(joined);
    }
    let assigned = async || {
        let workers = groups.iter().flat_map(|group| &group.workers);
        let idle = workers
            .filter(|worker| worker.source.status().partitions.is_empty())
            .count();
        // Not all: the others are still about to join.
        if idle * 2 <= groups.len() * MEMBERS {
            Ok(())
        } else {
            Err(format!("{idle} have no partition"))
        }
    };
    until("partitions are assigned", BACK, assigned).await;
    for _ in 0..rng.usize(1..4) {
        broker.kill();
        broker.start_again().await;
        tokio::time::sleep(Duration::from_millis(rng.u64(UP_MS))).await;
    }
    broker.process().signal("STOP");
    tokio::time::sleep(Duration::from_millis(rng.u64(FROZEN_MS))).await;
    broker.process().signal("CONT");
}

#[tokio::test(flavor = "multi_thread")]
async fn members_come_back_after_a_broker_that_comes_and_goes() {
    let given: Option<usize> = std::env::var("ONCEGATE_OUTAGES")
        .ok()
        .map(|outages| outages.parse().unwrap());
    logged();
    let seed = std::env::var("ONCEGATE_SEED")
        .map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let mut broker = KafkaBroker::start_with(&SESSIONS).await;
    let kafka = Kafka::at(broker.bootstrap());
    let mut groups = Vec::new();
    // Most of what went wrong was in the new protocol.
    let kinds = [NEW, QUICK, RANGE, NEW, NEW, NEW];
    let groups_of = if given.is_some() { kinds.len() } else { 3 };
    for properties in kinds.into_iter().take(groups_of) {
        let topic = kafka.new_topic("outage", PARTITIONS).await;
        let name = unique("group");
        let mut group = Group {
            name,
            topic,
            properties,
            workers: Vec::new(),
        };
        for _ in 0..MEMBERS {
            let worker = group.join(&kafka).await;
            group.workers.push(worker);
        }
        groups.push(group);
    }
    for round in 1..=given.unwrap_or(1) {
        join_all(groups.iter().map(|group| group.all_receive(&kafka))).await;
        outage(&mut broker, &mut groups, &mut rng).await;
        join_all(groups.iter().map(|group| group.all_receive(&kafka))).await;
        let workers = groups.iter().flat_map(|group| &group.workers);
        let replaced: u64 = workers
            .map(|worker| worker.counters.total("members_replaced"))
            .sum();
        println!("outage {round}: every member is back, {replaced} clients were replaced");
    }
    for group in &groups {
        join_all(group.workers.iter().map(|worker| worker.source.close(BACK))).await;
    }
}
