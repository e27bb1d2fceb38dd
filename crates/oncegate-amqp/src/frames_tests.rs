//! Frames that the client could not read.

use super::*;

fn short(bytes: &[u8]) -> Vec<u8> {
    let length = u8::try_from(bytes.len()).unwrap();
    [&[length], bytes].concat()
}

fn long(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap();
    [&length.to_be_bytes(), bytes].concat()
}

fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    [&[kind, 0, 1], &long(payload)[..], &[0xCE]].concat()
}

/// A delivery with this tag and these properties, and one byte of payload.
fn delivery(tag: u64, routing_key: &[u8], properties: &[u8]) -> Vec<u8> {
    let deliver = [
        &[0, 60, 0, 60][..],
        &short(b"ctag"),
        &tag.to_be_bytes(),
        &[0],
        &short(b""),
        &short(routing_key),
    ];
    let header = [&[0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1][..], properties];
    [
        frame(METHOD, &deliver.concat()),
        frame(HEADER, &header.concat()),
        frame(BODY, b"x"),
    ]
    .concat()
}

/// Everything that the client reads, when the bytes arrive in pieces of this size.
fn passed(bytes: &[u8], piece: usize, seen: &SeenFrames) -> Vec<u8> {
    let mut frames = Frames::default();
    let mut passed = Vec::new();
    for piece in bytes.chunks(piece) {
        frames.receive(piece, seen);
        let mut to = [0; 7];
        loop {
            match frames.give(&mut to) {
                0 => break,
                given => passed.extend(&to[..given]),
            }
        }
    }
    passed
}

// invariant: amqp-frame-that-stops-a-queue
#[test]
fn what_is_not_utf_8_is_replaced_in_place_and_named() {
    let correlation = [&[0x04, 0x00][..], &short(b"caf\xe9")].concat();
    let named = [&short(b"caf\xe9")[..], b"V"].concat();
    let headers = [&[0x20, 0x00][..], &long(&named)].concat();
    let sent = [
        delivery(1, b"orders", &correlation),
        delivery(2, b"\xff", &headers),
        delivery(3, b"orders", &[0, 0]),
        frame(HEARTBEAT, b""),
    ]
    .concat();
    for piece in [1, 5, 64, sent.len()] {
        let seen = SeenFrames::default();
        let passed = passed(&sent, piece, &seen);
        assert_eq!(passed.len(), sent.len());
        assert!(
            std::str::from_utf8(&passed).is_err(),
            "frames end with 0xCE"
        );
        assert!(!passed.contains(&0xe9) && !passed.contains(&0xff));
        let first = seen.take(1, 1).unwrap();
        assert_eq!(first.names, [CORRELATION_ID]);
        assert_eq!(first.properties, correlation);
        assert_eq!(seen.take(1, 2).unwrap().names, [ROUTING_KEY, "caf\u{FFFD}"]);
        assert_eq!((seen.take(1, 3), seen.take(1, 1)), (None, None));
    }
}

// invariant: amqp-frame-that-stops-a-queue
#[test]
fn arrays_that_are_too_deep_are_bytes() {
    let mut value = b"V".to_vec();
    for _ in 0..2_500 {
        value = [&b"A"[..], &long(&value)].concat();
    }
    let entry = [short(b"deep"), value].concat();
    let headers = [&[0x20, 0x00][..], &long(&entry)].concat();
    let seen = SeenFrames::default();
    let passed = passed(&delivery(1, b"orders", &headers), 4_096, &seen);
    assert_eq!(seen.take(1, 1).unwrap().names, ["deep"]);
    let arrays = passed.windows(2).filter(|pair| *pair == b"A\0");
    assert_eq!(arrays.count(), 2_500 - 1);
    assert!(passed.contains(&BYTE_ARRAY));
}

#[test]
fn the_version_of_the_broker_is_known() {
    let entries = [
        &short(b"cluster_name")[..],
        &[b"S"[..].to_vec(), long(b"x")].concat(),
        &short(b"version"),
        &[b"S"[..].to_vec(), long(b"4.3.6")].concat(),
    ];
    let start = [&[0, 10, 0, 10, 0, 9][..], &long(&entries.concat())].concat();
    let seen = SeenFrames::default();
    passed(&frame(METHOD, &start), 3, &seen);
    assert_eq!(seen.major_version(), Some(4));
}

#[test]
fn another_protocol_passes() {
    let seen = SeenFrames::default();
    assert_eq!(
        passed(b"AMQP\x00\x01\x00\x00", 3, &seen),
        b"AMQP\x00\x01\x00\x00"
    );
    let http = b"HTTP/1.1 400 Bad Request\r\n\r\n";
    assert_eq!(passed(http, 9, &seen), http);
}
