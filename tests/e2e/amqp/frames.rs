//! Messages whose properties no client can read.

use std::collections::BTreeSet;

use fastrand::Rng;
use oncegate::{Attempt, Failure, Handler, Message};
use oncegate_testkit::{
    QueueKind, RabbitMqServer, RabbitRelease, RawMessage, long, publish_raw, short,
};

use crate::stage::{Clerk, Stage, body};

/// The flags of properties that are short strings, in their order, and the table of headers.
const SHORTS: [u16; 8] = [15, 14, 10, 9, 7, 5, 3, 2];
const HEADERS: u16 = 13;
/// How many messages have random properties.
const RANDOM: u32 = 150;
/// A nesting that overflows the stack of a client that follows it: 5 bytes a level.
const DEEP: usize = 2_500;

/// The flags and values of properties, each a short string.
fn properties(values: &[(u16, &[u8])], headers: Option<&[u8]>) -> Vec<u8> {
    let mut flags = 0_u16;
    let mut bytes = Vec::new();
    let mut values: Vec<(u16, Vec<u8>)> = values
        .iter()
        .map(|(bit, value)| (*bit, short(value)))
        .collect();
    values.extend(headers.map(|headers| (HEADERS, long(headers))));
    values.sort_by_key(|(bit, _)| std::cmp::Reverse(*bit));
    for (bit, value) in values {
        flags |= 1 << bit;
        bytes.extend(value);
    }
    [&flags.to_be_bytes()[..], &bytes].concat()
}

fn nested(depth: usize) -> Vec<u8> {
    let mut value = vec![b'V'];
    for level in 0..depth {
        value = if level % 2 == 0 {
            [&b"A"[..], &long(&value)].concat()
        } else {
            [&b"F"[..], &long(&[short(b"\xff"), value].concat())].concat()
        };
    }
    value
}

fn bytes(rng: &mut Rng, most: usize) -> Vec<u8> {
    let length = rng.usize(..most);
    std::iter::repeat_with(|| rng.u8(..)).take(length).collect()
}

fn value(rng: &mut Rng) -> Vec<u8> {
    match rng.u8(..8) {
        0 => vec![b't', rng.u8(..)],
        1 => [&b"l"[..], &rng.i64(..).to_be_bytes()].concat(),
        // The broker refuses what is no number.
        2 => [&b"d"[..], &rng.f64().to_be_bytes()].concat(),
        3 => [&b"D"[..], &[rng.u8(..4)], &rng.u32(..).to_be_bytes()].concat(),
        4 => [&b"S"[..], &long(&bytes(rng, 40))].concat(),
        5 => [&b"x"[..], &long(&bytes(rng, 40))].concat(),
        6 => nested(rng.usize(..60)),
        _ => vec![b'V'],
    }
}

fn random(rng: &mut Rng) -> Vec<u8> {
    let mut values: Vec<(u16, Vec<u8>)> = Vec::new();
    // The broker reads `expiration`, and compares `user-id`.
    for bit in SHORTS {
        if rng.bool() {
            values.push((bit, bytes(rng, 200)));
        }
    }
    let values: Vec<(u16, &[u8])> = values
        .iter()
        .map(|(bit, value)| (*bit, &value[..]))
        .collect();
    let mut headers = Vec::new();
    for _ in 0..rng.usize(..6) {
        headers.extend(short(&bytes(rng, 20)));
        headers.extend(value(rng));
    }
    properties(&values, Some(&headers))
}

async fn stops_no_other(release: RabbitRelease) {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let server = RabbitMqServer::start_release(release, "").await;
    let stage = Stage::on(&server, QueueKind::Quorum).await;
    let fanout = r#"{"type":"fanout","durable":true}"#;
    server.manage("PUT", "/api/exchanges/%2F/fan", fanout).await;
    let binding = format!("/api/bindings/%2F/e/fan/q/{}", stage.queue.name());
    server.manage("POST", &binding, "{}").await;
    let bad = b"caf\xe9";
    let deep = [short(b"deep"), nested(DEEP)].concat();
    let named = [short(bad), vec![b'V']].concat();
    let mut all = vec![properties(&[], Some(&deep)), properties(&[], Some(&named))];
    all.extend(SHORTS.iter().map(|bit| properties(&[(*bit, bad)], None)));
    all.extend(std::iter::repeat_with(|| random(&mut rng)).take(RANDOM as usize));
    let count = u32::try_from(all.len()).unwrap();
    let mut messages: Vec<RawMessage> = (0..)
        .zip(all)
        .map(|(id, properties)| RawMessage {
            exchange: "",
            routing_key: stage.queue.name().into(),
            properties,
            body: body(id).into_bytes(),
        })
        .collect();
    messages.push(RawMessage {
        exchange: "fan",
        routing_key: bad.to_vec(),
        properties: properties(&[], None),
        body: body(count).into_bytes(),
    });
    let address = server.address().to_owned();
    tokio::task::spawn_blocking(move || publish_raw(&address, &messages))
        .await
        .unwrap();
    let good = count + 1..count + 41;
    stage.send(good.clone()).await;

    let clerk = Clerk::new();
    let running = stage.start(clerk.clone()).await;
    clerk.book.until_charged(good.end).await;
    running
        .until_health("ready", |health| health.is_ready())
        .await;
    let watched = running.stop().await;
    clerk.book.charged_once(good.end);
    assert_eq!(watched.total("source_errors"), 0, "seed {seed}");
    assert_eq!(watched.total("dead_letters"), 0, "seed {seed}");
    stage.queue.until_ready(0).await;
}

// invariant: amqp-frame-that-stops-a-queue
#[tokio::test(flavor = "multi_thread")]
async fn properties_that_no_client_reads_stop_no_other_message() {
    for release in RabbitRelease::ALL {
        stops_no_other(release).await;
    }
}

/// Refuses each message, and writes which of its headers it was told.
struct Refusing(Clerk);

impl Handler for Refusing {
    type Output = u32;

    async fn handle(&self, message: &Message, _attempt: &Attempt) -> Result<u32, Failure> {
        let names: BTreeSet<&str> = message
            .headers()
            .iter()
            .map(|header| &*header.name)
            .collect();
        self.0.book.write(format!("{names:?}"));
        Err(Failure::permanent("refused"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_keeps_properties_that_no_client_reads() {
    let server = RabbitMqServer::start().await;
    let stage = Stage::on(&server, QueueKind::Quorum).await;
    let raw = properties(&[(10, b"caf\xe9")], None);
    let message = RawMessage {
        exchange: "",
        routing_key: stage.queue.name().into(),
        properties: raw.clone(),
        body: body(1).into_bytes(),
    };
    let address = server.address().to_owned();
    tokio::task::spawn_blocking(move || publish_raw(&address, &[message]))
        .await
        .unwrap();
    let clerk = Clerk::new();
    let running = stage.start(Refusing(clerk.clone())).await;
    running.watched.until("acks", 1).await;
    running.stop().await;
    assert_eq!(clerk.book.count("{\"AMQP.exchange\""), 1);
    let letters = stage.dead.take().await;
    let [letter] = letters.as_slice() else {
        panic!("{letters:?}");
    };
    let headers = letter.properties.headers().as_ref().unwrap();
    let kept = headers.inner().get("oncegate-properties").unwrap();
    assert_eq!(kept.as_byte_array().unwrap().as_slice(), raw);
    let origin = headers.inner().get("oncegate-origin").unwrap();
    let origin = origin.as_long_string().unwrap().to_string();
    assert!(
        origin.contains(r#""left_out":["AMQP.correlation-id"]"#),
        "{origin}"
    );
}
