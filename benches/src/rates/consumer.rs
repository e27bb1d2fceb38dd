//! A consumer of oncegate at work, and what it measures of itself.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::kafka::KafkaSource;
use oncegate::postgres::PostgresStore;
use oncegate::redis::RedisStore;
use oncegate::source::{AckHandle, Delivery, Source, SourceError, SourceWrapper};
use oncegate::sqlite::SqliteStore;
use oncegate::{Attempt, Consumer, Event, Failure, Gate, Message, Observer};
use tokio::sync::Notify;

use super::producer::{STAMP, Stamp, now_us};
use super::threads::Snapshot;
use super::{Measured, Percentiles, READY, Role, Task, group};
use crate::messages::{fresh_scope, key};
use crate::resident::rss_mebibytes;

/// The most handlers at a time.
const CONCURRENCY: u32 = 64;

/// Consumes every message of the task.
pub(super) async fn consume(task: &Task) -> Measured {
    let gate = match &task.role {
        Role::Redis(url) => {
            let store = RedisStore::connect(url)
                .await
                .expect("the server may be used");
            Gate::new(fresh_scope(), key(), store)
        }
        Role::Sqlite(file) => {
            let store = SqliteStore::open(file).await.expect("the disk takes it");
            Gate::new(fresh_scope(), key(), store)
        }
        Role::Postgres(url) => {
            let store = PostgresStore::connect(url)
                .await
                .expect("the server may be used");
            Gate::new(fresh_scope(), key(), store)
        }
        other => panic!("{other:?} is no consumer of oncegate"),
    };
    let meter = Arc::new(Meter::new(task));
    let source = KafkaSource::new(&task.brokers, group(), [&task.topic]);
    let source = Metered {
        source,
        meter: Arc::clone(&meter),
    };
    let running = Arc::clone(&meter);
    let consumer = Consumer::new(source, gate, move |message: Message, _: Attempt| {
        running.effect(stamp(&message));
        async { Ok::<(), Failure>(()) }
    })
    .concurrency(CONCURRENCY);
    let consumer = consumer.observer(Arc::new(Readiness(Once::new())) as Arc<dyn Observer>);
    let over = Arc::clone(&meter);
    consumer
        .run_until(async move { over.over.notified().await })
        .await
        .expect("it runs to the end");
    meter.measured()
}

fn stamp(message: &Message) -> Stamp {
    Stamp::from_bytes(message.header(STAMP).expect("the producer adds it"))
}

/// Says when the consumer has its partitions.
#[derive(Debug)]
struct Readiness(Once);

impl Observer for Readiness {
    fn observe(&self, event: Event<'_>) {
        if let Event::Rebalanced { assigned: 1.., .. } = event {
            self.0.call_once(|| println!("{READY}"));
        }
    }
}

/// Measures from the first message after the warm-up to the last ack.
#[derive(Debug)]
pub(super) struct Meter {
    warm_up: usize,
    count: usize,
    acked: AtomicUsize,
    first: Mutex<Option<Snapshot>>,
    last: Mutex<Option<(Snapshot, f64)>>,
    /// Of each message: from the producer to the handler, when the handler ran, and from there to
    /// the ack.
    to_effect: Vec<AtomicU64>,
    effect_us: Vec<AtomicU64>,
    to_ack: Vec<AtomicU64>,
    over: Notify,
}

impl Meter {
    pub(super) fn new(task: &Task) -> Self {
        Self {
            warm_up: task.warm_up,
            count: task.count,
            acked: AtomicUsize::new(0),
            first: Mutex::default(),
            last: Mutex::default(),
            to_effect: zeros(task.count),
            effect_us: zeros(task.count),
            to_ack: zeros(task.count),
            over: Notify::new(),
        }
    }

    /// Notes the effect of a message.
    pub(super) fn effect(&self, stamp: Stamp) {
        let Some(place) = stamp.number.checked_sub(self.warm_up) else {
            return;
        };
        if place == 0 {
            *self.first.lock().expect("no thread panics") = Some(Snapshot::now());
        }
        let now = now_us();
        store(&self.effect_us, place, now);
        store(
            &self.to_effect,
            place,
            now.saturating_sub(stamp.produced_us),
        );
    }

    /// Notes the ack of a message. Returns whether it was the last one.
    pub(super) fn ack(&self, stamp: Stamp) -> bool {
        if let Some(place) = stamp.number.checked_sub(self.warm_up) {
            let effect_us = self.effect_us.get(place).map_or(0, |at| at.load(Relaxed));
            store(&self.to_ack, place, now_us().saturating_sub(effect_us));
        }
        let is_last = self.acked.fetch_add(1, Relaxed) + 1 == self.warm_up + self.count;
        if is_last {
            *self.last.lock().expect("no thread panics") = Some((Snapshot::now(), rss_mebibytes()));
            self.over.notify_one();
        }
        is_last
    }

    pub(super) fn measured(&self) -> Measured {
        let first = self
            .first
            .lock()
            .expect("no thread panics")
            .take()
            .expect("messages were measured");
        let last = self.last.lock().expect("no thread panics").take();
        let (last, rss_mebibytes) = last.expect("every message was acknowledged");
        Measured {
            used: last.since(&first),
            to_effect: Percentiles::of(micros(&self.to_effect)),
            to_ack: Percentiles::of(micros(&self.to_ack)),
            rss_mebibytes,
        }
    }
}

fn zeros(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

fn micros(times: &[AtomicU64]) -> Vec<u32> {
    times
        .iter()
        .map(|micros| u32::try_from(micros.load(Relaxed)).unwrap_or(u32::MAX))
        .collect()
}

fn store(times: &[AtomicU64], place: usize, micros: u64) {
    times
        .get(place)
        .expect("the producer numbers its messages")
        .store(micros, Relaxed);
}

/// A source that reports every ack to the meter.
#[derive(Debug)]
struct Metered {
    source: KafkaSource,
    meter: Arc<Meter>,
}

#[async_trait]
impl SourceWrapper for Metered {
    fn inner(&self) -> &dyn Source {
        &self.source
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let Some(received) = self.source.receive(most).await? else {
            return Ok(None);
        };
        let metered = received.into_iter().map(|delivery| {
            let stamp = stamp(&delivery.message);
            let ack_handle = MeteredAck {
                ack_handle: delivery.ack_handle,
                stamp,
                meter: Arc::clone(&self.meter),
            };
            Delivery {
                message: delivery.message,
                ack_handle: Arc::new(ack_handle),
            }
        });
        Ok(Some(metered.collect()))
    }
}

#[derive(Debug)]
struct MeteredAck {
    ack_handle: Arc<dyn AckHandle>,
    stamp: Stamp,
    meter: Arc<Meter>,
}

impl AckHandle for MeteredAck {
    fn start(&self) -> bool {
        self.ack_handle.start()
    }

    fn is_ours(&self) -> bool {
        self.ack_handle.is_ours()
    }

    fn order(&self) -> Option<u64> {
        self.ack_handle.order()
    }

    fn ack(&self) {
        self.ack_handle.ack();
        self.meter.ack(self.stamp);
    }

    fn stop(&self) {
        self.ack_handle.stop();
    }

    fn nack_after(&self, delay: Duration) -> bool {
        self.ack_handle.nack_after(delay)
    }
}
