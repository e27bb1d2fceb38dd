//! Compares the rate of an audit with that of a replay's dry run, over the same topic, and what
//! memory they take.
//!
//! `ONCEGATE_AUDIT_MESSAGES=10000000` is the size of the topic; a million by default.

use std::sync::Arc;
use std::time::Instant;

use futures_util::{StreamExt as _, stream};
use oncegate::admin::audit::{Audit, AuditReport};
use oncegate::admin::dry_run::DryRun;
use oncegate::kafka::TopicReader;
use oncegate::redis::RedisStore;
use oncegate::{Completion, Entry, Gate, Message};
use oncegate_testkit::{Kafka, Record, RedisServer};

use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::gate::redis_store;
use crate::messages::{broker_key, fresh_scope, key, payload};
use crate::resident::PeakMemory;
use crate::rounds::Plan;
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "audit",
    question: "a consumed topic reconciled with its records and effects, beside the dry run of a replay",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

const PARTITIONS: i32 = 6;

/// The number of claims and completions in flight while the messages are handled.
const IN_FLIGHT: usize = 512;

/// So many messages have no record and no effect, and as many others have two effects.
const PLANTED: usize = 10;

/// The number of keys of effects that are added at a time.
const EFFECTS: usize = 4_096;

/// A topic that was handled.
struct Handled {
    kafka: Kafka,
    topic: String,
    scope: String,
    store: RedisStore,
    count: usize,
    /// The idempotency keys of the effects.
    effects: Vec<String>,
}

async fn run(plan: &Plan) -> Vec<Figure> {
    let server = RedisServer::start_with(&BENCH_REDIS).await;
    let full = std::env::var("ONCEGATE_AUDIT_MESSAGES")
        .map_or(1_000_000, |count| count.parse().expect("a number"));
    let handled = Handled::with(plan.size(full, 5_000), &server).await;
    let mut rounds = plan.rounds("audit", &["records and effects", "records", "dry run"]);
    while rounds.next() {
        let memory = PeakMemory::begin();
        rounds
            .measure("records and effects", handled.audit(true))
            .await;
        rounds.note("records and effects: memory", memory.mebibytes());
        rounds.measure("records", handled.audit(false)).await;
        let memory = PeakMemory::begin();
        rounds.measure("dry run", handled.dry_run()).await;
        rounds.note("dry run: memory", memory.mebibytes());
    }
    let against = |name| rounds.against(name, Unit::MessagesPerSecond, "dry run");
    vec![
        against("records and effects").target(Bound::RatioAtLeast, 0.7),
        against("records").target(Bound::RatioAtLeast, 0.7),
        rounds.figure("records and effects: memory", Unit::Mebibytes),
        rounds.figure("dry run: memory", Unit::Mebibytes),
    ]
}

/// Returns whether this message of so many has neither record nor effect.
fn is_planted(n: usize, count: usize) -> bool {
    n.is_multiple_of(count / PLANTED)
}

impl Handled {
    async fn with(count: usize, server: &RedisServer) -> Self {
        let kafka = Kafka::shared().await;
        let topic = kafka.new_topic("audit", PARTITIONS).await;
        kafka
            .produce(
                &topic,
                (0..count).map(|n| Record::new(payload(n)).key(broker_key(n))),
            )
            .await;
        let store = redis_store(server)
            .connect()
            .await
            .expect("the server may be used");
        let scope = fresh_scope();
        let gate = Arc::new(Gate::new(scope.as_str(), key(), store.clone()));
        let handled = (0..count).filter(|n| !is_planted(*n, count)).map(|n| {
            handle(
                Arc::clone(&gate),
                Message::new(topic.as_str(), no_origin(), Some(payload(n))),
            )
        });
        let mut effects: Vec<String> = stream::iter(handled)
            .buffer_unordered(IN_FLIGHT)
            .collect()
            .await;
        effects.extend_from_within(..PLANTED);
        Self {
            kafka,
            topic,
            scope,
            store,
            count,
            effects,
        }
    }

    async fn reader(&self) -> TopicReader {
        TopicReader::open(self.kafka.bootstrap(), &*self.topic, [])
            .await
            .expect("the topic is there")
    }

    /// Messages per second.
    async fn audit(&self, with_effects: bool) -> f64 {
        let started = Instant::now();
        let audit = Audit::new(&*self.scope, key(), self.store.clone());
        let file = tempfile::tempfile().expect("there is room for a file");
        let mut audit = audit.open(file).await.expect("the key is the same");
        let mut reader = self.reader().await;
        while let Some(messages) = reader.next_batch().await.expect("the topic can be read") {
            audit
                .add_messages(messages)
                .await
                .expect("the store answers");
        }
        if with_effects {
            for keys in self.effects.chunks(EFFECTS) {
                audit
                    .add_effects(keys.iter().map(String::as_str))
                    .await
                    .expect("the file can be written");
            }
        }
        let report = audit.finish().await.expect("the file can be read");
        self.check(&report, with_effects);
        self.count as f64 / started.elapsed().as_secs_f64()
    }

    /// Checks that all that was planted is found, and nothing else.
    fn check(&self, report: &AuditReport, with_effects: bool) {
        let planted = PLANTED as u64;
        let doubled = if with_effects { planted } else { 0 };
        assert_eq!(
            (report.lost, report.doubled, report.found()),
            (planted, doubled, planted + doubled)
        );
    }

    /// Messages per second.
    async fn dry_run(&self) -> f64 {
        let started = Instant::now();
        let dry_run = DryRun::new(&*self.scope, key(), self.store.clone());
        let mut examination = dry_run.open().await.expect("the key is the same");
        let mut reader = self.reader().await;
        while let Some(messages) = reader.next_batch().await.expect("the topic can be read") {
            examination.add(messages).await.expect("the store answers");
        }
        let report = examination.finish().await.expect("the store answers");
        assert_eq!(report.without_record, PLANTED as u64);
        self.count as f64 / started.elapsed().as_secs_f64()
    }
}

fn no_origin() -> oncegate::Origin {
    oncegate::Origin::Other("memory".into())
}

/// Claims and completes the message, and returns the idempotency key of its effect.
async fn handle(gate: Arc<Gate>, message: Message) -> String {
    let Ok(Entry::Granted(lease)) = gate.enter(&message).await else {
        panic!("each key is new")
    };
    let key = lease.attempt().idempotency_key(Audit::DEFAULT_STEP);
    assert!(
        matches!(lease.complete(&()).await, Ok(Completion::Applied)),
        "the lease is ours"
    );
    key
}
