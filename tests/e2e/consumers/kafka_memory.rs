//! How much memory a consumer takes with a backlog before it.
//!
//! `ONCEGATE_BACKLOG_MESSAGES` sets how many messages wait (default 100,000), as far as they are
//! not larger than 512 MiB together. The table it prints is the one in `docs/KAFKA.md`.

use std::process::Stdio;
use std::time::Duration;

use oncegate_testkit::{Kafka, Process, Record, process, unique};

/// What all messages of a topic may have together, in bytes.
const TOPIC_BYTES_MAX: usize = 512 << 20;
/// At the most so many of them are handled.
const HANDLED_MAX: usize = 4_000;
const LIMIT: Duration = Duration::from_secs(240);

const SIZES: [usize; 3] = [100, 10 << 10, 1 << 20];

/// The bounds that the program sets, and what they allow in KiB: the client's queue and one answer
/// to a fetch, the buffer, what is in flight, and as much again for what each message costs beside
/// its payload and for the allocator.
const BOUNDS: [(&str, u64); 2] = [
    ("small", 2 * (4 + 4 + 5 + 8) * 1024),
    ("default", 2 * (16 + 50 + 33 + 64) * 1024),
];

#[tokio::test(flavor = "multi_thread")]
async fn memory_is_bounded_by_the_settings_whatever_waits() {
    let messages =
        std::env::var("ONCEGATE_BACKLOG_MESSAGES").map_or(100_000, |count| count.parse().unwrap());
    let kafka = Kafka::shared().await;
    println!(
        "{:>12} {:>10} {:>9} {:>12} {:>12}",
        "payload", "messages", "bounds", "peak MiB", "allowed MiB"
    );
    for size in SIZES {
        let topic = kafka.new_topic("backlog", 3).await;
        let count = messages.min(TOPIC_BYTES_MAX / size);
        let payload = vec![b'x'; size];
        kafka
            .produce(
                &topic,
                (0..count).map(|n| Record::new(payload.clone()).key(n.to_string())),
            )
            .await;
        for (bounds, allowed) in BOUNDS {
            let peak = peak(&kafka, &topic, HANDLED_MAX.min(count / 2), bounds).await;
            println!(
                "{size:>12} {count:>10} {bounds:>9} {:>12} {:>12}",
                peak >> 10,
                allowed >> 10
            );
            assert!(peak < allowed, "{size} bytes, {bounds}: {peak} KiB");
        }
        kafka.delete_topic(&topic).await;
    }
}

/// The peak of a program that handles so many messages of the topic, in KiB.
async fn peak(kafka: &Kafka, topic: &str, messages: usize, bounds: &str) -> u64 {
    let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_backlog"), "KILL");
    command.args([
        kafka.bootstrap(),
        topic,
        &unique("backlog"),
        &messages.to_string(),
        bounds,
    ]);
    command.stdout(Stdio::piped());
    let mut process = Process::spawn("backlog", command);
    let status = process.end_within(LIMIT).await;
    assert!(status.success(), "{bounds}: {status}");
    let out = process.child().stdout.take().expect("a pipe");
    let text = std::io::read_to_string(out).expect("its output");
    text.trim()
        .parse()
        .unwrap_or_else(|error| panic!("{text:?}: {error}"))
}
