//! Every kind of content that Kafka can hold, as the source, the dead letters and the reader see
//! it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;

use oncegate::dead_letters::{DeadLetter, DeadLetterCause, DeadLetters};
use oncegate::kafka::{KafkaDeadLetters, KafkaSource, TopicReader, TopicWindow};
use oncegate::message::{Message, Origin};
use oncegate::source::Source;
use oncegate_testkit::{Kafka, KafkaBroker, Record, unique, until};
use rdkafka::Message as _;
use rdkafka::message::{Header, Headers, OwnedHeaders, OwnedMessage};
use rdkafka::producer::{BaseProducer, BaseRecord, FutureProducer, FutureRecord, Producer};

use crate::stage::{LIMIT, finish, open, place, receive, within};

/// The first `count` messages of the topic, finished and committed.
async fn consume(kafka: &Kafka, topic: &str, count: usize) -> Vec<Message> {
    let source = KafkaSource::new(kafka.bootstrap(), unique("group"), [topic]);
    first_of(source, count).await
}

/// The same from a source that reads routes from headers.
async fn consume_routed(kafka: &Kafka, topic: &str, count: usize) -> Vec<Message> {
    let source =
        KafkaSource::new(kafka.bootstrap(), unique("group"), [topic]).routes_from_headers();
    first_of(source, count).await
}

async fn first_of(source: KafkaSource, count: usize) -> Vec<Message> {
    open(&source).await;
    let messages = finish(receive(&source, count).await);
    source.close(LIMIT).await.expect("closes");
    messages
}

fn offset(message: &Message) -> i64 {
    place(message).1
}

fn headers(message: &Message) -> Vec<(&str, Option<&[u8]>)> {
    message
        .headers()
        .iter()
        .map(|header| (&*header.name, header.value.as_deref()))
        .collect()
}

#[tokio::test]
async fn tombstones_empty_payloads_and_odd_headers_arrive_as_they_are() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("odd", 1).await;
    let producer: FutureProducer = kafka.config().create().expect("the settings are valid");
    let odd = OwnedHeaders::new()
        .insert(Header {
            key: "bytes",
            value: Some(b"\xff\xfe\0".as_slice()),
        })
        .insert(Header {
            key: "null",
            value: None::<&[u8]>,
        })
        .insert(Header {
            key: "empty",
            value: Some(b"".as_slice()),
        })
        .insert(Header {
            key: "twice",
            value: Some(b"1".as_slice()),
        })
        .insert(Header {
            key: "twice",
            value: Some(b"2".as_slice()),
        })
        .insert(Header {
            key: "",
            value: Some(b"nameless".as_slice()),
        });
    let an_hour_ago = now_ms() - 3_600_000;
    let record = FutureRecord::<[u8], [u8]>::to(&topic)
        .timestamp(an_hour_ago)
        .payload(b"odd")
        .headers(odd);
    producer.send(record, LIMIT).await.expect("delivered");
    kafka
        .produce(
            &topic,
            [Record::tombstone().key("k"), Record::new("").key("")],
        )
        .await;

    let messages = consume(&kafka, &topic, 3).await;

    let [odd, tombstone, empty] = messages.as_slice() else {
        panic!("{messages:?}")
    };
    assert_eq!(
        (odd.payload(), odd.key(), odd.timestamp_ms()),
        (b"odd".as_slice(), None, Some(an_hour_ago))
    );
    assert_eq!(
        headers(odd),
        [
            ("bytes", Some(b"\xff\xfe\0".as_slice())),
            ("null", None),
            ("empty", Some(b"")),
            ("twice", Some(b"1")),
            ("twice", Some(b"2")),
            ("", Some(b"nameless")),
        ]
    );
    assert!(tombstone.is_tombstone() && tombstone.key() == Some(b"k"));
    assert!(!empty.is_tombstone() && empty.payload().is_empty() && empty.key() == Some(b""));
}

#[tokio::test]
async fn a_route_header_is_kept_and_a_bad_one_is_none() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("route", 1).await;
    let routed = |route: &[u8]| Record::new("x").header("oncegate-route", route);
    let too_long = "r".repeat(250);
    let records = [
        routed(b"orders"),
        routed(b"\xff"),
        routed(b""),
        routed(too_long.as_bytes()),
        Record::new("x"),
    ];
    kafka.produce(&topic, records).await;

    let messages = consume_routed(&kafka, &topic, 5).await;
    let routes: Vec<_> = messages.iter().map(Message::route).collect();
    assert_eq!(routes, ["orders", &topic, &topic, &topic, &topic]);

    let messages = consume(&kafka, &topic, 5).await;
    assert!(
        messages.iter().all(|message| message.route() == topic),
        "the route header is not enabled"
    );
}

#[tokio::test]
async fn a_header_whose_name_is_not_utf8_stops_nobody() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("name", 1).await;
    raw_produce(
        kafka.bootstrap(),
        &topic,
        b"payload",
        &[(b"\xff\xfe", b"lost"), (b"fine", b"kept")],
    );
    kafka.produce(&topic, [Record::new("next")]).await;

    let messages = consume(&kafka, &topic, 2).await;

    assert_eq!(messages[0].payload(), b"payload");
    assert_eq!(
        headers(&messages[0]),
        [("\u{fffd}", None), ("fine", Some(b"kept".as_slice()))]
    );
    assert_eq!(messages[1].payload(), b"next");
}

/// The retention of a topic deletes messages with a date of long ago.
fn now_ms() -> i64 {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    i64::try_from(since_epoch.expect("it is after 1970").as_millis())
        .expect("it is before the end of time")
}

/// Produces one record to partition 0 as no client library would: by the bytes of the protocol.
fn raw_produce(bootstrap: &str, topic: &str, payload: &[u8], headers: &[(&[u8], &[u8])]) {
    let mut record = vec![0]; // attributes
    for number in [0, 0, -1, payload.len() as i64] {
        varint(&mut record, number); // timestamp and offset deltas, no key, the payload's length
    }
    record.extend(payload);
    varint(&mut record, headers.len() as i64);
    for bytes in headers.iter().flat_map(|(name, value)| [name, value]) {
        varint(&mut record, bytes.len() as i64);
        record.extend(*bytes);
    }
    let mut checked = Vec::new();
    checked.extend(0_i16.to_be_bytes()); // attributes
    checked.extend(0_i32.to_be_bytes()); // last offset delta
    checked.extend([now_ms().to_be_bytes(); 2].concat()); // first and last timestamp
    checked.extend((-1_i64).to_be_bytes()); // producer id
    checked.extend((-1_i16).to_be_bytes()); // producer epoch
    checked.extend((-1_i32).to_be_bytes()); // sequence
    checked.extend(1_i32.to_be_bytes()); // records
    varint(&mut checked, record.len() as i64);
    checked.extend(record);
    let mut batch = Vec::new();
    batch.extend(0_i64.to_be_bytes()); // base offset
    batch.extend((checked.len() as i32 + 9).to_be_bytes());
    batch.extend((-1_i32).to_be_bytes()); // leader epoch
    batch.push(2); // magic
    batch.extend(crc32c(&checked).to_be_bytes());
    batch.extend(checked);
    let mut request = Vec::new();
    request.extend([0_i16, 3].map(i16::to_be_bytes).concat()); // Produce, version 3
    request.extend(7_i32.to_be_bytes()); // correlation
    request.extend([-1_i16, -1, -1].map(i16::to_be_bytes).concat()); // no client, no transaction, acks=all
    request.extend([10_000_i32, 1].map(i32::to_be_bytes).concat()); // timeout, one topic
    request.extend((topic.len() as i16).to_be_bytes());
    request.extend(topic.as_bytes());
    request.extend(
        [1_i32, 0, batch.len() as i32]
            .map(i32::to_be_bytes)
            .concat(),
    ); // one partition: 0
    request.extend(batch);
    let mut stream = TcpStream::connect(bootstrap).expect("the broker listens");
    stream
        .write_all(&(request.len() as i32).to_be_bytes())
        .expect("the broker reads");
    stream.write_all(&request).expect("the broker reads");
    let mut answer = vec![0; 4 + 4 + 4 + 2 + topic.len() + 4 + 4 + 2];
    stream.read_exact(&mut answer).expect("the broker answers");
    assert!(answer.ends_with(&[0, 0]), "the broker's error code");
}

fn varint(bytes: &mut Vec<u8>, number: i64) {
    let mut rest = ((number << 1) ^ (number >> 63)) as u64;
    while rest >= 0x80 {
        bytes.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    bytes.push(rest as u8);
}

fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| {
        if crc & 1 == 1 {
            crc >> 1 ^ 0x82f6_3b78
        } else {
            crc >> 1
        }
    };
    !bytes
        .iter()
        .fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

#[tokio::test]
async fn every_compression_is_read() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("codec", 1).await;
    let codecs = ["none", "gzip", "snappy", "lz4", "zstd"];
    for codec in codecs {
        let producer: FutureProducer = kafka
            .config()
            .set("compression.type", codec)
            .set("linger.ms", "50")
            .create()
            .expect("valid");
        let payload = codec.repeat(100);
        let sent = (0..20).map(|_| {
            let record = FutureRecord::<[u8], str>::to(&topic).payload(&payload);
            producer
                .send_result(record)
                .map_err(|(error, _)| error)
                .expect("queued")
        });
        for report in sent.collect::<Vec<_>>() {
            report.await.expect("a report").expect("delivered");
        }
    }
    let messages = consume(&kafka, &topic, 100).await;
    for (message, codec) in messages
        .iter()
        .zip(codecs.iter().flat_map(|codec| [codec; 20]))
    {
        assert_eq!(message.payload(), codec.repeat(100).as_bytes());
    }
}

/// 10 committed messages, a marker, 10 aborted ones, a marker.
async fn transactions(kafka: &Kafka, topic: &str) {
    let (config, topic) = (kafka.config(), topic.to_owned());
    let produce = move || {
        let mut config = config;
        let producer: BaseProducer = config
            .set("transactional.id", unique("tx"))
            .create()
            .expect("valid");
        producer.init_transactions(LIMIT).expect("transactions");
        for commit in [true, false] {
            producer.begin_transaction().expect("begins");
            for n in 0..10_u8 {
                producer
                    .send(BaseRecord::<[u8], [u8]>::to(&topic).payload(&[n]))
                    .expect("queued");
            }
            producer.flush(LIMIT).expect("delivered");
            let ended = if commit {
                producer.commit_transaction(LIMIT)
            } else {
                producer.abort_transaction(LIMIT)
            };
            ended.expect("ends");
        }
    };
    tokio::task::spawn_blocking(produce)
        .await
        .expect("no panic");
}

#[tokio::test]
async fn aborted_messages_and_markers_are_gaps_for_source_and_reader() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("tx", 1).await;
    transactions(&kafka, &topic).await;
    kafka.produce(&topic, [Record::new("last")]).await;
    transactions(&kafka, &topic).await;

    let offsets: Vec<_> = consume(&kafka, &topic, 21)
        .await
        .iter()
        .map(offset)
        .collect();
    let expected: Vec<_> = (0..10).chain([22]).chain(23..33).collect();
    assert_eq!(offsets, expected);

    let mut reader = open_reader(&kafka, &topic).await;
    assert_eq!(reader.total(), 45);
    assert_eq!(
        read(&mut reader)
            .await
            .iter()
            .map(offset)
            .collect::<Vec<_>>(),
        expected
    );
    assert_eq!(reader.position(), 45, "the end is behind the last marker");
}

#[tokio::test]
async fn what_compaction_has_removed_is_a_gap_for_source_and_reader() {
    const KEYS: i64 = 4;
    const RECORDS: i64 = 20;
    let kafka = KafkaBroker::start_with(&["log.cleaner.backoff.ms=100"]).await;
    let topic = unique("compacted");
    kafka.create_compacted_topic(&topic).await;
    let records = (0..RECORDS).map(|n| Record::new(n.to_string()).key((n % KEYS).to_string()));
    kafka.produce(&topic, records).await;
    // A segment is compacted when another one follows. Keys of their own keep these for good.
    let survivors = until("the topic is compacted", LIMIT, async || {
        kafka
            .produce(&topic, [Record::new("next").key(unique("next"))])
            .await;
        let offsets: Vec<_> = kafka
            .read_all(&topic)
            .await
            .iter()
            .map(OwnedMessage::offset)
            .collect();
        let old = offsets.iter().filter(|offset| **offset < RECORDS).count();
        if old == usize::try_from(KEYS).expect("a few") {
            Ok(offsets)
        } else {
            Err(format!("{old} are left"))
        }
    })
    .await;
    assert_eq!(
        survivors.first(),
        Some(&(RECORDS - KEYS)),
        "its beginning is a gap"
    );

    let group = unique("group");
    let source = KafkaSource::new(kafka.bootstrap(), group.as_str(), [topic.as_str()]);
    let messages = first_of(source, survivors.len()).await;
    assert_eq!(messages.iter().map(offset).collect::<Vec<_>>(), survivors);
    let committed = kafka.committed_offsets(&group, &topic).await;
    assert_eq!(
        committed,
        kafka.end_offsets(&topic).await,
        "the gaps hold nothing up"
    );

    let mut reader = open_reader(&kafka, &topic).await;
    assert_eq!(
        read(&mut reader)
            .await
            .iter()
            .map(offset)
            .collect::<Vec<_>>(),
        survivors
    );
}

async fn open_reader(kafka: &Kafka, topic: &str) -> TopicReader {
    TopicReader::open(kafka.bootstrap(), topic, [])
        .await
        .expect("opens")
}

async fn read(reader: &mut TopicReader) -> Vec<Message> {
    let mut messages = Vec::new();
    let mut position = reader.position();
    while let Some(batch) = within("reading", reader.next_batch()).await.expect("reads") {
        assert!(
            !batch.is_empty()
                && reader.position() > position
                && reader.position() <= reader.total()
        );
        position = reader.position();
        messages.extend(batch);
    }
    messages
}

#[tokio::test]
async fn the_reader_ends_where_the_topic_ended_when_it_began() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("read", 3).await;
    assert!(
        read(&mut open_reader(&kafka, &topic).await)
            .await
            .is_empty(),
        "an empty topic"
    );
    let numbered = |numbers: std::ops::Range<i32>| {
        numbers.map(|n| Record::new(n.to_string()).partition(n % 3))
    };
    kafka.produce(&topic, numbered(0..9_000)).await;

    let mut reader = open_reader(&kafka, &topic).await;
    kafka.produce(&topic, numbered(9_000..9_300)).await;
    let messages = read(&mut reader).await;

    assert_eq!(
        (reader.total(), reader.position(), messages.len()),
        (9_000, 9_000, 9_000)
    );
    let mut next = BTreeMap::new();
    for message in &messages {
        let Origin::Kafka {
            partition, offset, ..
        } = message.origin()
        else {
            panic!("{message:?}")
        };
        let next = next.entry(*partition).or_insert(0);
        assert_eq!(offset, next, "partition {partition} is out of order");
        *next += 1;
    }
    let again = within("the end", reader.next_batch()).await.expect("reads");
    assert!(again.is_none(), "the end stays the end");
    let absent = TopicReader::open(kafka.bootstrap(), unique("absent"), [])
        .await
        .expect_err("refused");
    assert!(absent.to_string().contains("absent"));
}

/// Every window is compared with the same choice from the whole topic.
#[tokio::test]
async fn a_window_has_the_messages_of_its_partitions_offsets_and_times() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("window", 3).await;
    for part in 0..5 {
        let numbers = part * 60..(part + 1) * 60;
        kafka
            .produce(
                &topic,
                numbers.map(|n| Record::new(n.to_string()).partition(n % 3)),
            )
            .await;
    }
    let all = read(&mut open_reader(&kafka, &topic).await).await;
    let times: Vec<i64> = all.iter().filter_map(Message::timestamp_ms).collect();
    let time_of = |millis: i64| {
        std::time::UNIX_EPOCH
            + std::time::Duration::from_millis(u64::try_from(millis).expect("after 1970"))
    };
    // The offset in a partition from which on a time is reached.
    let first_at = |partition: i32, millis: i64| {
        let of = all.iter().filter(|message| place(message).0 == partition);
        of.filter(|message| message.timestamp_ms() >= Some(millis))
            .map(offset)
            .min()
            .unwrap_or(i64::MAX)
    };
    for _ in 0..12 {
        let partition = random.bool().then(|| random.i32(0..3));
        let [from, to] = [0..80, 40..130].map(|range| random.bool().then(|| random.i64(range)));
        let mut time = || random.bool().then(|| times[random.usize(..times.len())]);
        let (since, until) = (time(), time());
        let mut window = partition
            .into_iter()
            .fold(TopicWindow::new(), TopicWindow::partition);
        window = from.into_iter().fold(window, TopicWindow::from_offset);
        window = to.into_iter().fold(window, TopicWindow::to_offset);
        window = since
            .map(time_of)
            .into_iter()
            .fold(window, TopicWindow::since);
        window = until
            .map(time_of)
            .into_iter()
            .fold(window, TopicWindow::until);
        let is_in = |message: &&Message| {
            let (at, offset) = place(message);
            partition.is_none_or(|partition| partition == at)
                && from.is_none_or(|from| offset >= from)
                && to.is_none_or(|to| offset < to)
                && since.is_none_or(|since| offset >= first_at(at, since))
                && until.is_none_or(|until| offset < first_at(at, until))
        };
        let expected: BTreeSet<(i32, i64)> = all.iter().filter(is_in).map(place).collect();
        let open = async |window| {
            TopicReader::open_window(kafka.bootstrap(), &*topic, [], window)
                .await
                .expect("opens")
        };
        let mut reader = open(window.clone()).await;
        let found: BTreeSet<_> = read(&mut reader).await.iter().map(place).collect();
        assert_eq!(found, expected, "{window:?}");
        let mut again = open(TopicWindow::exactly(reader.offsets().clone())).await;
        let exactly: BTreeSet<_> = read(&mut again).await.iter().map(place).collect();
        assert_eq!(exactly, expected, "the offsets of a reader are a window");
    }
    let none = TopicReader::open_window(
        kafka.bootstrap(),
        &*topic,
        [],
        TopicWindow::new().partition(7),
    )
    .await;
    assert!(none.expect_err("refused").to_string().contains('7'));
}

fn letter(message: Message) -> DeadLetter {
    DeadLetter {
        message,
        scope: "billing".to_owned(),
        key: Some("the-key".to_owned()),
        cause: DeadLetterCause::Permanent,
        reason: "é".repeat(1_000),
        attempts: 3,
        first_failed_at: std::time::UNIX_EPOCH.checked_add(std::time::Duration::from_secs(1)),
        failed_at: std::time::UNIX_EPOCH + std::time::Duration::from_secs(2),
    }
}

fn header_of<'a>(message: &'a OwnedMessage, name: &str) -> Option<&'a [u8]> {
    let mut named = message
        .headers()?
        .iter()
        .filter(|header| header.key == name);
    let value = named.next()?.value;
    assert!(named.next().is_none(), "{name} is there twice");
    value
}

// invariant: dead-letter-lost, dead-letter-id
#[tokio::test]
async fn a_dead_letter_keeps_the_message_and_says_where_it_came_from() {
    let kafka = Kafka::shared().await;
    let (topic, dead) = (
        kafka.new_topic("orders", 1).await,
        kafka.new_topic("dead", 1).await,
    );
    let record = Record::new(b"\xff bytes".as_slice())
        .key("k")
        .header("own", "kept");
    kafka
        .produce(
            &topic,
            [
                record.header("oncegate-reason", "an earlier one"),
                Record::tombstone(),
            ],
        )
        .await;
    let messages = consume(&kafka, &topic, 2).await;

    let source = KafkaSource::new(kafka.bootstrap(), "g", [&topic]);
    let letters = source.dead_letters(&dead);
    letters.open().await.expect("opens");
    let ids: Vec<String> = messages
        .iter()
        .map(|message| letter(message.clone()).id())
        .collect();
    for message in messages {
        letters.send(&letter(message)).await.expect("kept");
    }

    let kept = kafka.read_all(&dead).await;
    let [first, tombstone] = kept.as_slice() else {
        panic!("{} letters", kept.len())
    };
    assert_eq!(
        (first.payload(), first.key()),
        (Some(b"\xff bytes".as_slice()), Some(b"k".as_slice()))
    );
    assert_eq!((tombstone.payload(), tombstone.key()), (None, None));
    for (name, value) in [
        ("own", "kept"),
        ("oncegate-route", topic.as_str()),
        ("oncegate-origin-topic", topic.as_str()),
        ("oncegate-origin-partition", "0"),
        ("oncegate-origin-offset", "0"),
        ("oncegate-scope", "billing"),
        ("oncegate-key", "the-key"),
        ("oncegate-cause", "permanent"),
        ("oncegate-reason", "é".repeat(512).as_str()),
        ("oncegate-attempts", "3"),
    ] {
        assert_eq!(header_of(first, name), Some(value.as_bytes()), "{name}");
    }
    assert_eq!(
        header_of(first, "oncegate-first-failed-at"),
        Some(b"1000".as_slice())
    );
    assert_eq!(
        header_of(first, "oncegate-failed-at"),
        Some(b"2000".as_slice())
    );
    assert!(header_of(first, "oncegate-origin-timestamp").is_some());
    assert_eq!(header_of(first, "oncegate-id"), Some(ids[0].as_bytes()));
    assert_eq!(header_of(tombstone, "oncegate-id"), Some(ids[1].as_bytes()));
    // A consumer of the dead-letter topic sees the first route.
    assert_eq!(consume_routed(&kafka, &dead, 2).await[1].route(), topic);
}

// invariant: dead-letter-lost
#[tokio::test]
async fn dead_letters_that_would_be_lost_or_come_back_are_refused() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("loop", 1).await;
    kafka.produce(&topic, [Record::new("x")]).await;
    let refusal =
        async |letters: KafkaDeadLetters| letters.open().await.expect_err("refused").to_string();

    let source = KafkaSource::new(kafka.bootstrap(), "g", [&topic]);
    assert!(refusal(source.dead_letters(&topic)).await.contains(&topic));
    assert!(
        refusal(KafkaDeadLetters::new(kafka.bootstrap(), unique("absent")))
            .await
            .contains("absent")
    );
    let careless = KafkaDeadLetters::new(kafka.bootstrap(), &topic).property("acks", "1");
    assert!(refusal(careless).await.contains("acks"));

    let unaware = KafkaDeadLetters::new(kafka.bootstrap(), &topic);
    let message = consume(&kafka, &topic, 1).await.remove(0);
    assert!(
        unaware.send(&letter(message.clone())).await.is_err(),
        "not opened"
    );
    unaware.open().await.expect("it cannot know");
    let refused = unaware
        .send(&letter(message))
        .await
        .expect_err("it came from there");
    assert!(refused.to_string().contains(&topic));
    assert_eq!(kafka.end_offsets(&topic).await, BTreeMap::from([(0, 1)]));
}
