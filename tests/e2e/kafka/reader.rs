//! The reader of a whole topic, or of a window of it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oncegate::kafka::{TopicReader, TopicWindow};
use oncegate::message::{Message, Origin};
use oncegate_testkit::{Kafka, Record, unique};

use crate::data::offset;
use crate::stage::{place, within};

pub(crate) async fn open_reader(kafka: &Kafka, topic: &str) -> TopicReader {
    TopicReader::open(kafka.bootstrap(), topic, [])
        .await
        .expect("opens")
}

pub(crate) async fn read(reader: &mut TopicReader) -> Vec<Message> {
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

/// A random window, with times in milliseconds.
#[derive(Debug)]
struct Choice {
    partition: Option<i32>,
    from: Option<i64>,
    to: Option<i64>,
    since: Option<i64>,
    until: Option<i64>,
}

impl Choice {
    fn random(random: &mut fastrand::Rng, times: &[i64]) -> Self {
        let partition = random.bool().then(|| random.i32(0..3));
        let [from, to] = [0..80, 40..130].map(|range| random.bool().then(|| random.i64(range)));
        let [since, until] =
            [(); 2].map(|()| random.bool().then(|| times[random.usize(..times.len())]));
        Self {
            partition,
            from,
            to,
            since,
            until,
        }
    }

    fn window(&self) -> TopicWindow {
        let window = TopicWindow::new();
        let window = self
            .partition
            .into_iter()
            .fold(window, TopicWindow::partition);
        let window = self.from.into_iter().fold(window, TopicWindow::from_offset);
        let window = self.to.into_iter().fold(window, TopicWindow::to_offset);
        let since = self.since.map(time_of).into_iter();
        let window = since.fold(window, TopicWindow::since);
        let until = self.until.map(time_of).into_iter();
        until.fold(window, TopicWindow::until)
    }

    /// Returns whether the window has this message of a topic with `all`.
    fn has(&self, message: &Message, all: &[Message]) -> bool {
        let (at, offset) = place(message);
        self.partition.is_none_or(|partition| partition == at)
            && self.from.is_none_or(|from| offset >= from)
            && self.to.is_none_or(|to| offset < to)
            && self
                .since
                .is_none_or(|since| offset >= first_at(all, at, since))
            && self
                .until
                .is_none_or(|until| offset < first_at(all, at, until))
    }
}

fn time_of(millis: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(u64::try_from(millis).expect("after 1970"))
}

/// The offset in a partition from which on a time is reached.
fn first_at(all: &[Message], partition: i32, millis: i64) -> i64 {
    all.iter()
        .filter(|message| place(message).0 == partition)
        .filter(|message| message.timestamp_ms() >= Some(millis))
        .map(offset)
        .min()
        .unwrap_or(i64::MAX)
}

/// Every window is compared with the same choice from the whole topic.
#[tokio::test]
async fn a_window_reads_exactly_its_partitions_offsets_and_times() {
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
    let open = async |window| {
        TopicReader::open_window(kafka.bootstrap(), &*topic, [], window)
            .await
            .expect("opens")
    };
    for _ in 0..12 {
        let choice = Choice::random(&mut random, &times);
        let expected: BTreeSet<(i32, i64)> = all
            .iter()
            .filter(|message| choice.has(message, &all))
            .map(place)
            .collect();
        let mut reader = open(choice.window()).await;
        let found: BTreeSet<_> = read(&mut reader).await.iter().map(place).collect();
        assert_eq!(found, expected, "{choice:?}");
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
