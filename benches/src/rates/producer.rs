//! A producer at a fixed rate.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};

use super::Task;
use crate::messages::{broker_key, payload};

/// The header with the number of a message and the time at which it was produced.
pub(super) const STAMP: &str = "stamp";
/// The time that the producer sleeps at the most between two looks at the clock.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);
/// The longest time until the broker has everything.
const LAST_DELIVERY: Duration = Duration::from_secs(60);

/// Produces every message of the task at its time.
pub(super) fn produce(task: &Task) {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", &task.brokers)
        .set("linger.ms", "0")
        .set("acks", "1");
    let producer: BaseProducer = config.create().expect("the settings are valid");
    let started = Instant::now();
    for number in 0..task.warm_up + task.count {
        let due = Duration::from_secs_f64(number as f64 / f64::from(task.rate));
        loop {
            producer.poll(Duration::ZERO);
            let elapsed = started.elapsed();
            if elapsed >= due {
                break;
            }
            std::thread::sleep((due - elapsed).min(LONGEST_SLEEP));
        }
        send(&producer, &task.topic, number);
    }
    producer
        .flush(LAST_DELIVERY)
        .expect("the broker takes every message");
}

fn send(producer: &BaseProducer, topic: &str, number: usize) {
    let payload = payload(number);
    let key = broker_key(number);
    loop {
        let stamp = Stamp {
            number,
            produced_us: now_us(),
        }
        .to_bytes();
        let headers = OwnedHeaders::new().insert(Header {
            key: STAMP,
            value: Some(&stamp),
        });
        let record = BaseRecord::to(topic)
            .payload(&payload[..])
            .key(&key[..])
            .headers(headers);
        match producer.send(record) {
            Ok(()) => return,
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => {
                producer.poll(LONGEST_SLEEP);
            }
            Err((error, _)) => panic!("cannot produce to {topic}: {error}"),
        }
    }
}

/// The content of the header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamp {
    pub(super) number: usize,
    pub(super) produced_us: u64,
}

impl Stamp {
    fn to_bytes(self) -> [u8; 16] {
        let number = self.number as u128;
        ((number << 64) | u128::from(self.produced_us)).to_be_bytes()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let bits = u128::from_be_bytes(bytes.try_into().expect("the producer writes 16 bytes"));
        Self {
            number: (bits >> 64) as usize,
            produced_us: bits as u64,
        }
    }
}

/// The wall clock, which the processes of one machine share, in microseconds.
pub(super) fn now_us() -> u64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("it is later than 1970");
    u64::try_from(now.as_micros()).expect("it is earlier than the year 586,000")
}
