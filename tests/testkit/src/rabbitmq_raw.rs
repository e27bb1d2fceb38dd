//! A publisher that sends properties as they are given, also those that no client would make.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

/// A message whose properties are bytes: their flags, and their values.
#[derive(Clone, Debug)]
pub struct RawMessage {
    /// The exchange, which is empty for the default one.
    pub exchange: &'static str,
    /// The routing key.
    pub routing_key: Vec<u8>,
    /// The flags and values of the properties.
    pub properties: Vec<u8>,
    /// The body.
    pub body: Vec<u8>,
}

/// The longest wait for an answer of the broker.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// The number of channels that the broker offers.
const CHANNELS_MOST: u16 = 2_047;
/// The largest frame, in bytes.
const FRAME_MOST: u32 = 131_072;

/// Publishes messages to the broker at this address, with the user `guest`, and waits until each is
/// confirmed.
///
/// # Panics
/// When the broker refuses one.
pub fn publish_raw(address: &str, messages: &[RawMessage]) {
    let mut broker = RawConnection(TcpStream::connect(address).expect("the broker listens"));
    broker
        .0
        .set_read_timeout(Some(ANSWER_LIMIT))
        .expect("it is a socket");
    broker.write(b"AMQP\x00\x00\x09\x01");
    broker.read((10, 10));
    let mut start_ok = vec![0; 4];
    start_ok.extend(short(b"PLAIN"));
    start_ok.extend(long(b"\x00guest\x00guest"));
    start_ok.extend(short(b"en_US"));
    broker.method(0, (10, 11), &start_ok);
    broker.read((10, 30));
    let tune_ok = [
        &CHANNELS_MOST.to_be_bytes()[..],
        &FRAME_MOST.to_be_bytes(),
        &[0, 0],
    ]
    .concat();
    broker.method(0, (10, 31), &tune_ok);
    broker.method(0, (10, 40), &[short(b"/"), vec![0, 0]].concat());
    broker.read((10, 41));
    broker.method(1, (20, 10), &[0]);
    broker.read((20, 11));
    broker.method(1, (85, 10), &[0]);
    broker.read((85, 11));
    for message in messages {
        let mut publish = vec![0, 0];
        publish.extend(short(message.exchange.as_bytes()));
        publish.extend(short(&message.routing_key));
        publish.push(0);
        broker.method(1, (60, 40), &publish);
        let size = message.body.len() as u64;
        let header = [
            &60_u16.to_be_bytes()[..],
            &[0, 0],
            &size.to_be_bytes(),
            &message.properties,
        ];
        broker.frame(2, 1, &header.concat());
        broker.frame(3, 1, &message.body);
        broker.read((60, 80));
    }
    broker.method(0, (10, 50), &[0, 200, 0, 0, 0, 0, 0]);
    broker.read((10, 51));
}

/// A short string.
#[must_use]
pub fn short(bytes: &[u8]) -> Vec<u8> {
    let length = u8::try_from(bytes.len()).expect("it is short");
    [&[length], bytes].concat()
}

/// A long string, or the entries of a table or array, with their length.
#[must_use]
pub fn long(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).expect("it fits");
    [&length.to_be_bytes()[..], bytes].concat()
}

struct RawConnection(TcpStream);

impl RawConnection {
    fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the broker reads");
    }

    fn frame(&mut self, kind: u8, channel: u16, payload: &[u8]) {
        let frame = [&[kind][..], &channel.to_be_bytes(), &long(payload), &[0xCE]];
        self.write(&frame.concat());
    }

    fn method(&mut self, channel: u16, (class, method): (u16, u16), arguments: &[u8]) {
        let payload = [&class.to_be_bytes()[..], &method.to_be_bytes(), arguments];
        self.frame(1, channel, &payload.concat());
    }

    /// Reads the next method, which must be this one.
    fn read(&mut self, wanted: (u16, u16)) {
        let mut prefix = [0; 7];
        self.0.read_exact(&mut prefix).expect("the broker answers");
        let [_, _, _, a, b, c, d] = prefix;
        let size = usize::try_from(u32::from_be_bytes([a, b, c, d])).expect("it fits");
        let mut payload = vec![0; size + 1];
        self.0.read_exact(&mut payload).expect("the broker answers");
        let [a, b, c, d, ..] = *payload else {
            panic!("the broker has answered {payload:?}");
        };
        let got = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        assert_eq!(got, wanted, "{}", String::from_utf8_lossy(&payload));
    }
}
