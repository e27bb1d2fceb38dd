//! Sources, and what the tests do with them.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use oncegate::kafka::KafkaSource;
use oncegate::message::{Message, Origin};
use oncegate::observe::Counters;
use oncegate::source::{Delivery, Source};
use oncegate_testkit::{Kafka, Record};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::TestWriter;

/// Nothing here takes this long; a test that waits longer has failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

/// The same for leaving a group, in which others may be in the middle of a rebalance.
pub(crate) const CLOSE: Duration = Duration::from_secs(60);

pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(LIMIT, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {LIMIT:?}"),
    }
}

/// A member that notices others quickly.
pub(crate) fn source(kafka: &Kafka, group: &str, topic: &str) -> KafkaSource {
    member(kafka, group, topic, QUICK)
}

/// One with these properties of librdkafka, which commits often.
pub(crate) fn member(
    kafka: &Kafka,
    group: &str,
    topic: &str,
    properties: &[(&str, &str)],
) -> KafkaSource {
    let source = KafkaSource::new(kafka.bootstrap(), group, [topic]);
    with(
        source.commit_interval(Duration::from_millis(50)),
        properties,
    )
}

/// The source with these properties of librdkafka.
pub(crate) fn with(source: KafkaSource, properties: &[(&str, &str)]) -> KafkaSource {
    properties.iter().fold(source, |source, (name, value)| {
        source.property(*name, *value)
    })
}

/// Cooperative, as by default; partitions change hands quickly.
pub(crate) const QUICK: &[(&str, &str)] = &[
    ("heartbeat.interval.ms", "200"),
    ("session.timeout.ms", "6000"),
];

/// The eager protocol: a rebalance revokes every partition of every member.
pub(crate) const RANGE: &[(&str, &str)] = &[
    ("heartbeat.interval.ms", "200"),
    ("session.timeout.ms", "6000"),
    ("partition.assignment.strategy", "range"),
];

/// The new protocol, in which the broker assigns.
pub(crate) const NEW: &[(&str, &str)] = &[("group.protocol", "consumer")];

pub(crate) async fn open(source: &impl Source) -> Arc<Counters> {
    let counters = Arc::new(Counters::default());
    source
        .open(Arc::clone(&counters) as _)
        .await
        .expect("opens");
    counters
}

/// Messages whose content is their position.
pub(crate) fn numbered(count: usize, partitions: i32) -> impl Iterator<Item = Record> + Send {
    (0..count).map(move |n| Record::new(n.to_string()).partition((n % partitions as usize) as i32))
}

pub(crate) fn place(message: &Message) -> (i32, i64) {
    match message.origin() {
        Origin::Kafka {
            partition, offset, ..
        } => (*partition, *offset),
        other => panic!("{other} is not from Kafka"),
    }
}

pub(crate) fn number(message: &Message) -> usize {
    std::str::from_utf8(message.payload())
        .expect("a number")
        .parse()
        .expect("a number")
}

pub(crate) async fn receive(source: &dyn Source, count: usize) -> Vec<Delivery> {
    let mut received = Vec::new();
    let all = async {
        while received.len() < count {
            let batch = source
                .receive(count - received.len())
                .await
                .expect("receives");
            received.extend(batch.expect("more messages"));
        }
    };
    let in_time = tokio::time::timeout(LIMIT, all).await.is_ok();
    assert!(
        in_time,
        "{} of {count} within {LIMIT:?}; {:?}",
        received.len(),
        source.status()
    );
    received
}

pub(crate) fn finish(deliveries: impl IntoIterator<Item = Delivery>) -> Vec<Message> {
    let finish = |delivery: Delivery| {
        assert!(delivery.ack_handle.start());
        delivery.ack_handle.ack();
        delivery.ack_handle.stop();
        delivery.message
    };
    deliveries.into_iter().map(finish).collect()
}

pub(crate) async fn until_committed(
    kafka: &Kafka,
    group: &str,
    topic: &str,
    wanted: &BTreeMap<i32, i64>,
) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let committed = kafka.committed_offsets(group, topic).await;
        if committed == *wanted {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "committed {committed:?} instead of {wanted:?}"
        );
    }
}

/// Of every partition: 50 finished, 25 that run, and 25 that have not started. The latter two.
pub(crate) fn half_done(received: Vec<Delivery>) -> (Vec<Delivery>, Vec<Delivery>) {
    let mut running = Vec::new();
    let mut waiting = Vec::new();
    for delivery in received {
        match place(&delivery.message).1 {
            0..50 => drop(finish([delivery])),
            50..75 => {
                assert!(delivery.ack_handle.start());
                running.push(delivery);
            }
            _ => waiting.push(delivery),
        }
    }
    (running, waiting)
}

/// Finishes a message, if its partition is still its owner's.
pub(crate) fn finish_if_ours(delivery: &Delivery) -> bool {
    let ours = delivery.ack_handle.start();
    if ours {
        delivery.ack_handle.ack();
        delivery.ack_handle.stop();
    }
    ours
}

/// Finishes whatever comes; a message comes again when the group has moved on.
pub(crate) async fn finish_all(source: &dyn Source) {
    loop {
        for delivery in receive(source, 1).await {
            finish_if_ours(&delivery);
        }
    }
}

/// What all tests of the program log, from the first call on. Tests that fail show it, too.
pub(crate) fn logged() -> &'static Log {
    static LOG: LazyLock<Log> = LazyLock::new(|| {
        let log = Log::default();
        let writer = log.clone();
        let levels = EnvFilter::new("info,librdkafka=debug");
        let writer = move || Tee {
            log: writer.clone(),
            test: TestWriter::new(),
        };
        tracing_subscriber::fmt()
            .with_env_filter(levels)
            .with_ansi(false)
            .with_writer(writer)
            .init();
        log
    });
    &LOG
}

/// Lines of a log.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    /// The lines that have all these parts.
    pub(crate) fn with(&self, parts: &[&str]) -> Vec<String> {
        let has_all = |line: &&String| parts.iter().all(|part| line.contains(part));
        self.0
            .lock()
            .unwrap()
            .iter()
            .filter(has_all)
            .cloned()
            .collect()
    }
}

/// Takes a line at a time.
struct Tee {
    log: Log,
    test: TestWriter,
}

impl Write for Tee {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.log
            .0
            .lock()
            .unwrap()
            .push(String::from_utf8_lossy(line).into_owned());
        self.test.write_all(line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.test.flush()
    }
}
