//! Every kind of content that Kafka can hold, as the source and the reader see it.

use std::io::{Read, Write};
use std::net::TcpStream;

use oncegate::kafka::KafkaSource;
use oncegate::message::Message;
use oncegate::source::Source;
use oncegate_testkit::{Kafka, KafkaBroker, Record, unique, until};
use rdkafka::Message as _;
use rdkafka::message::{Header, OwnedHeaders, OwnedMessage};
use rdkafka::producer::{BaseProducer, BaseRecord, FutureProducer, FutureRecord, Producer};

use crate::reader::{open_reader, read};
use crate::stage::{LIMIT, finish, open, place, receive};

/// The first `count` messages of the topic, finished and committed.
pub(crate) async fn consume(kafka: &Kafka, topic: &str, count: usize) -> Vec<Message> {
    let source = KafkaSource::new(kafka.bootstrap(), unique("group"), [topic]);
    first_of(source, count).await
}

/// The same from a source that reads routes from headers.
pub(crate) async fn consume_routed(kafka: &Kafka, topic: &str, count: usize) -> Vec<Message> {
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

pub(crate) fn offset(message: &Message) -> i64 {
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
async fn a_header_whose_name_is_not_utf8_stops_no_message() {
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
    let config = kafka.config();
    let topic = topic.to_owned();
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
