//! The harness itself: its servers are real, keep their data, and leave nothing behind.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use oncegate_testkit::{
    Depth, ElasticmqServer, Fault, Kafka, KafkaBroker, Ledger, Moto, Process, Record, Redis,
    RedisServer, Sqs, SqsProxy, process, unique,
};
use rdkafka::Message;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::producer::{FutureProducer, FutureRecord};
use redis::AsyncCommands;

const LIMIT: Duration = Duration::from_secs(240);

#[tokio::test]
async fn the_shared_redis_answers() {
    let redis = Redis::shared().await;
    let key = unique("servers");
    let mut connection = redis.connection().await;
    let () = connection.set_ex(&key, 7, 60).await.expect("SET");
    let value: i64 = redis.connection().await.get(&key).await.expect("GET");
    assert_eq!(value, 7);
}

#[tokio::test]
async fn a_killed_redis_comes_back_with_its_data_or_wiped() {
    let mut server = RedisServer::synced().await;
    let url = server.url().to_owned();
    let () = server
        .connection()
        .await
        .set("kept", "yes")
        .await
        .expect("SET");

    server.kill();
    let gone = redis::Client::open(url.as_str())
        .expect("the URL is valid")
        .get_connection();
    assert!(gone.is_err(), "a killed Redis answers");

    server.start_again().await;
    assert_eq!(server.url(), url);
    let kept: Option<String> = server.connection().await.get("kept").await.expect("GET");
    assert_eq!(kept.as_deref(), Some("yes"));

    server.kill();
    server.wipe();
    server.start_again().await;
    let kept: Option<String> = server.connection().await.get("kept").await.expect("GET");
    assert_eq!(kept, None);
}

#[tokio::test]
async fn a_redis_takes_other_settings() {
    let server = RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]).await;
    let mut connection = server.connection().await;
    let mut ask = redis::cmd("CONFIG");
    let ask = ask.arg("GET").arg("maxmemory-policy");
    let answer: Vec<String> = ask.query_async(&mut connection).await.expect("CONFIG GET");
    assert_eq!(answer, ["maxmemory-policy", "allkeys-lru"]);
}

/// The retention of its topic would delete it whenever the broker's pass comes.
#[tokio::test]
async fn a_message_with_a_date_of_long_ago_is_refused() {
    let broker = KafkaBroker::start().await;
    let topic = broker.new_topic("dates", 1).await;
    let producer: FutureProducer = broker.config().create().expect("the settings are valid");
    let of_2023 = FutureRecord::<[u8], [u8]>::to(&topic)
        .timestamp(1_700_000_000_000)
        .payload(b"old");
    let (error, _) = producer.send(of_2023, LIMIT).await.expect_err("refused");
    assert_eq!(
        error.rdkafka_error_code(),
        Some(RDKafkaErrorCode::InvalidTimestamp),
        "{error}"
    );
}

#[tokio::test]
async fn a_topic_goes_round_through_a_consumer_group() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("round", 3).await;
    let group = unique("group");
    let sent = kafka.produce(&topic, (0..300).map(numbered)).await;
    assert_eq!(sent.len(), 300);

    let consuming = kafka.clone();
    let name = group.clone();
    let read_from = topic.clone();
    let expected = sent.len();
    let consumed =
        tokio::task::spawn_blocking(move || consume(&consuming, &name, &read_from, expected));
    let mut consumed = consumed.await.expect("the consumer ends");
    consumed.sort_unstable();
    assert_eq!(consumed, (0..300).map(payload).collect::<Vec<_>>());

    let ends = kafka.end_offsets(&topic).await;
    assert_eq!(ends.len(), 3);
    assert_eq!(ends.values().sum::<i64>(), 300);
    assert_eq!(kafka.committed_offsets(&group, &topic).await, ends);
    assert!(
        kafka
            .committed_offsets(&unique("other"), &topic)
            .await
            .is_empty()
    );

    let all = kafka.read_all(&topic).await;
    let places: Vec<_> = all
        .iter()
        .map(|message| (message.partition(), message.offset()))
        .collect();
    let mut sent = sent;
    sent.sort_unstable();
    assert_eq!(places, sent);
    kafka.delete_topic(&topic).await;
}

#[tokio::test]
async fn records_arrive_byte_for_byte() {
    use rdkafka::message::Headers;
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("bytes", 2).await;
    let large = vec![b'x'; 1 << 20];
    let records = [
        Record::tombstone().key("k").partition(1),
        Record::new(large.clone())
            .partition(1)
            .header("h", b"\xff\xfe"),
    ];
    assert_eq!(kafka.produce(&topic, records).await, [(1, 0), (1, 1)]);
    let read = kafka.read_all(&topic).await;
    let [tombstone, second] = &read[..] else {
        panic!("two messages, not {}", read.len());
    };
    assert_eq!(tombstone.key(), Some(&b"k"[..]));
    assert_eq!(tombstone.payload(), None);
    assert_eq!(second.key(), None);
    assert_eq!(second.payload(), Some(&large[..]));
    let header = second.headers().expect("headers").get(0);
    assert_eq!((header.key, header.value), ("h", Some(&b"\xff\xfe"[..])));
}

#[tokio::test]
async fn a_killed_kafka_comes_back_with_its_topics() {
    let mut broker = KafkaBroker::start().await;
    let topic = broker.new_topic("kept", 1).await;
    broker.produce(&topic, [Record::new("first")]).await;
    broker.kill();
    broker.start_again().await;
    broker.produce(&topic, [Record::new("second")]).await;
    let payloads: Vec<_> = broker.read_all(&topic).await;
    let payloads: Vec<_> = payloads.iter().filter_map(Message::payload).collect();
    assert_eq!(payloads, [&b"first"[..], b"second"]);
}

#[tokio::test]
async fn a_queue_goes_round_on_both_servers() {
    for sqs in [Sqs::shared().await, Moto::shared().await.sqs().clone()] {
        let queue = sqs.new_queue("round").await;
        let dead = sqs.new_queue("dead").await;
        queue.redrive_to(&dead, 3).await;
        queue.send((0..25).map(|n| format!("body {n:02}"))).await;
        assert_eq!(
            queue.depth().await,
            Depth {
                visible: 25,
                ..Depth::default()
            }
        );
        assert_eq!(queue.receive(LIMIT).await.len(), 10);
        let in_flight = queue.depth().await;
        assert_eq!((in_flight.visible, in_flight.in_flight), (15, 10));
        assert_eq!(queue.take_all().await.len(), 15);

        let fifo = sqs.new_fifo_queue("round").await;
        fifo.send_to_group("g", (0..25).map(|n| format!("{n:02}")))
            .await;
        let bodies: Vec<_> = fifo
            .take_all()
            .await
            .into_iter()
            .filter_map(|message| message.body)
            .collect();
        assert_eq!(
            bodies,
            (0..25).map(|n| format!("{n:02}")).collect::<Vec<_>>()
        );
        fifo.until_empty().await;
    }
}

#[tokio::test]
async fn a_killed_elasticmq_comes_back_with_its_messages() {
    let mut server = ElasticmqServer::start_durable().await;
    let queue = server.new_queue("kept").await;
    queue.send(["kept"]).await;
    server.kill();
    server.start_again().await;
    let messages = queue.take_all().await;
    assert_eq!(
        messages.first().and_then(|message| message.body.as_deref()),
        Some("kept")
    );
}

#[tokio::test]
async fn calls_to_a_queue_go_wrong_on_their_way() {
    let sqs = Sqs::shared().await;
    let proxy = SqsProxy::before(&sqs).await;
    let queue = proxy.sqs().new_queue("faults").await;
    queue.send(["one", "two"]).await;

    let through = proxy.sqs();
    let receive = || {
        through
            .client()
            .receive_message()
            .queue_url(queue.url())
            .visibility_timeout(1)
            .send()
    };
    proxy.next(1, "ReceiveMessage", Fault::Throttle);
    proxy.next(1, "ReceiveMessage", Fault::LoseReply);
    let throttled = receive().await.expect_err("throttled").into_service_error();
    assert_eq!(throttled.meta().code(), Some("ThrottlingException"));
    receive().await.expect_err("the reply is lost");
    assert_eq!((proxy.calls("ReceiveMessage"), proxy.faults_met()), (2, 2));
    queue
        .until("visible again", |depth| depth.visible == 2)
        .await;

    let messages = queue.receive(LIMIT).await;
    let at = vec![1];
    proxy.next(
        1,
        "DeleteMessageBatch",
        Fault::FailEntries {
            at,
            code: "InternalError",
            senders_fault: false,
        },
    );
    let entry = |(n, message): (usize, &aws_sdk_sqs::types::Message)| {
        let entry = aws_sdk_sqs::types::DeleteMessageBatchRequestEntry::builder().id(n.to_string());
        entry
            .set_receipt_handle(message.receipt_handle.clone())
            .build()
            .expect("both are set")
    };
    let entries = messages.iter().enumerate().map(entry).collect();
    let deleted = through
        .client()
        .delete_message_batch()
        .queue_url(queue.url())
        .set_entries(Some(entries));
    let deleted = deleted.send().await.expect("an answer");
    assert_eq!((deleted.successful.len(), deleted.failed.len()), (1, 1));
    assert_eq!(queue.depth().await.total(), 1, "the server has deleted one");

    let gone = messages
        .first()
        .and_then(|message| message.body.clone())
        .expect("a body");
    proxy.deliver_again(&gone);
    let again = queue.receive(LIMIT).await;
    assert_eq!(
        again.first().and_then(|message| message.body.clone()),
        Some(gone)
    );

    proxy.every("ListQueues", Fault::Hold);
    let held = through.client().list_queues().send();
    let healed = async {
        proxy.until_calls("ListQueues", 1).await;
        proxy.heal();
    };
    let (answer, ()) = tokio::join!(held, healed);
    answer.expect("it goes on");
}

/// What a `static` or an aborted test process leaves to the kernel.
#[tokio::test]
async fn a_child_dies_with_its_parent_even_by_sigkill() {
    // `sh` stands for the test process: it starts a child that is bound to it, and prints its id.
    let mut parent = process::bound_to_parent("sh", "KILL");
    parent
        .args([
            "-c",
            "setpriv --pdeathsig KILL -- sleep 600 & echo $!; wait",
        ])
        .stdout(Stdio::piped());
    let mut parent = Process::spawn("a parent", parent);
    let out = parent.child().stdout.take().expect("stdout is a pipe");
    let id = std::io::BufRead::lines(std::io::BufReader::new(out)).next();
    let id = id.expect("a line").expect("text");
    // Until setpriv has become `sleep`, the child is not bound yet.
    let command = Path::new("/proc").join(&id).join("comm");
    until("the child runs", || {
        std::fs::read_to_string(&command).is_ok_and(|name| name.trim() == "sleep")
    })
    .await;
    parent.kill();
    // Its new parent may take a moment to collect it; a zombie has no command line any more.
    let command_line = Path::new("/proc").join(&id).join("cmdline");
    until("the child is dead", || {
        std::fs::read(&command_line).map_or(true, |line| line.is_empty())
    })
    .await;
}

#[tokio::test]
async fn a_server_that_cannot_start_says_why() {
    let started = tokio::spawn(RedisServer::start_with(&["--no-such-setting", "1"])).await;
    let panic = started.expect_err("it cannot start").into_panic();
    let text = panic.downcast_ref::<String>().expect("a text");
    for part in [
        "Redis ended before it was ready",
        "scripts/fetch-servers",
        "no-such-setting",
    ] {
        assert!(text.contains(part), "{part:?} is missing in: {text}");
    }
}

#[test]
fn a_ledger_is_shared_and_whole() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("ledger");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let ledger = Ledger::open(&path);
                (0..50).for_each(|number| ledger.append(&format!("effect {number}")));
            });
        }
    });
    let ledger = Ledger::open(&path);
    assert_eq!(ledger.read().len(), 200);
    assert!(
        ledger
            .read()
            .iter()
            .all(|effect| effect.pid == std::process::id())
    );
    assert_eq!(ledger.counts().len(), 50);
    assert!(ledger.counts().values().all(|count| *count == 4));
}

fn payload(number: u32) -> Vec<u8> {
    format!("{number:03}").into_bytes()
}

fn numbered(number: u32) -> Record {
    Record::new(payload(number)).key(payload(number))
}

/// Joins the group, reads that many messages, commits, and leaves.
fn consume(kafka: &Kafka, group: &str, topic: &str, count: usize) -> Vec<Vec<u8>> {
    let mut config = kafka.config();
    config
        .set("group.id", group)
        .set("auto.offset.reset", "earliest")
        .set("enable.auto.commit", "false");
    let consumer: BaseConsumer = config.create().expect("the settings are valid");
    consumer.subscribe(&[topic]).expect("subscribe");
    let mut payloads = Vec::new();
    let deadline = Instant::now() + LIMIT;
    while payloads.len() < count {
        assert!(Instant::now() < deadline, "{} of {count}", payloads.len());
        // Nothing may also mean that a rebalance was handled meanwhile.
        let Some(message) = consumer.poll(LIMIT) else {
            continue;
        };
        let message = message.expect("a message");
        payloads.push(message.payload().expect("a payload").to_vec());
    }
    consumer
        .commit_consumer_state(CommitMode::Sync)
        .expect("commit");
    payloads
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {LIMIT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
