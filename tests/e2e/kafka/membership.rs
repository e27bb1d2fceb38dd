//! Members that the group has dropped, and members with an id of their own.

use std::collections::BTreeSet;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::kafka::KafkaSource;
use oncegate::observe::{Counters, Event, Observer};
use oncegate::source::{Delivery, Source};
use oncegate_testkit::{Kafka, unique, until};

use crate::stage::{
    CLOSE, LIMIT, NEW, QUICK, finish, half_done, member, number, numbered, open, place, receive,
    until_committed,
};

/// An observer that holds up the poll thread, as one that blocks would, at the next revoke.
#[derive(Debug, Default)]
struct Hold {
    counters: Counters,
    /// The thread waits until the sender is dropped.
    until_dropped: Mutex<Option<Receiver<()>>>,
}

impl Hold {
    fn arm(&self) -> Sender<()> {
        let (hold, held) = mpsc::channel();
        *self.until_dropped.lock().unwrap() = Some(held);
        hold
    }
}

impl Observer for Hold {
    fn observe(&self, event: Event<'_>) {
        self.counters.observe(event);
        if matches!(event, Event::Rebalanced { revoked: 1.., .. }) {
            let held = self.until_dropped.lock().unwrap().take();
            let _ = held.map(|held| held.recv());
        }
    }
}

/// The first member's poll thread is held up in a revoke until the group has given everything to
/// the second one.
async fn held_up(properties: &[(&str, &str)], replaced: u64) {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("held", 4).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(400, 4)).await;
    let source =
        || member(&kafka, &group, &topic, properties).drain_timeout(Duration::from_millis(200));
    let first = source();
    let second = source();
    let hold = Arc::new(Hold::default());
    first.open(Arc::clone(&hold) as _).await.expect("opens");
    let (running, waiting) = half_done(receive(&first, 400).await);
    until_committed(
        &kafka,
        &group,
        &topic,
        &(0..4).map(|partition| (partition, 50)).collect(),
    )
    .await;

    let held = hold.arm();
    open(&second).await;
    // The group waits for the first member no longer than its poll interval; then the second one
    // has it all.
    let mut taken = receive(&second, 200).await;
    let numbers = |taken: &[Delivery]| {
        taken
            .iter()
            .map(|one| number(&one.message))
            .collect::<BTreeSet<_>>()
    };
    assert_eq!(numbers(&taken), (200..400).collect());
    let kept = taken
        .iter()
        .position(|one| place(&one.message) == (0, 60))
        .expect("it was received");
    let kept = taken.swap_remove(kept);
    finish(taken);

    drop(held);
    // What the first one still has is no longer its own, however late it finishes it.
    for delivery in running.iter().chain(&waiting) {
        delivery.ack_handle.ack();
        delivery.ack_handle.stop();
    }
    let refused = async || {
        let started = |delivery: &&Delivery| {
            let started = delivery.ack_handle.start();
            delivery.ack_handle.stop();
            started
        };
        match running.iter().chain(&waiting).filter(started).count() {
            0 => Ok(()),
            count => Err(format!("{count} of its messages can still be started")),
        }
    };
    until("the end of what the first member had", LIMIT, refused).await;
    kafka.produce(&topic, numbered(4_000, 4)).await;
    // Both are members again. Nothing of this is finished.
    receive(&first, 1).await;
    receive(&second, 1).await;
    let committed = kafka.committed_offsets(&group, &topic).await;
    assert!(
        committed[&0] <= 60,
        "committed past an unfinished message: {committed:?}"
    );
    drop(kept);
    assert_eq!(hold.counters.total("members_replaced"), replaced);
    first.close(CLOSE).await.expect("the first member closes");
    second.close(CLOSE).await.expect("the second member closes");
}

// invariant: commit-by-removed-member
#[tokio::test]
async fn a_classic_member_that_was_held_up_commits_nothing_of_before() {
    let short = [
        QUICK[0],
        ("session.timeout.ms", "3000"),
        ("max.poll.interval.ms", "3000"),
    ];
    held_up(&short, 0).await;
}

// invariant: commit-by-removed-member
#[tokio::test]
async fn a_member_of_the_new_protocol_that_was_held_up_is_replaced() {
    held_up(&[NEW[0], ("max.poll.interval.ms", "3000")], 1).await;
}

#[tokio::test]
async fn a_classic_member_whose_id_is_taken_stops_and_says_so() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("static", 2).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(100, 2)).await;
    let source = || member(&kafka, &group, &topic, QUICK).static_member("one");
    let first = source();
    let second = source();
    open(&first).await;
    finish(receive(&first, 100).await);
    until_committed(&kafka, &group, &topic, &kafka.end_offsets(&topic).await).await;

    open(&second).await;
    let error = first.receive(1).await.expect_err("its id is another's");
    assert!(error.to_string().contains("static_member"), "{error}");
    kafka.produce(&topic, numbered(100, 2)).await;
    finish(receive(&second, 100).await);
    until_committed(&kafka, &group, &topic, &kafka.end_offsets(&topic).await).await;
    second.close(CLOSE).await.expect("closes");
    // No group lets go of a member that it does not know.
    let _ = first.close(Duration::from_secs(1)).await;
}

#[tokio::test]
async fn in_the_new_protocol_a_member_waits_for_the_one_with_its_id() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("static", 2).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(100, 2)).await;
    let source = || member(&kafka, &group, &topic, NEW).static_member("one");
    let first = source();
    let second = source();
    open(&first).await;
    finish(receive(&first, 50).await);

    let counters = open(&second).await;
    let waits = async || match counters.get("members_replaced", "static_member") {
        0 => Err("the second member has not tried again".to_owned()),
        _ => Ok(()),
    };
    until("another try", LIMIT, waits).await;
    finish(receive(&first, 50).await);
    first.close(CLOSE).await.expect("closes");
    kafka.produce(&topic, numbered(100, 2)).await;
    finish(receive(&second, 100).await);
    second.close(CLOSE).await.expect("closes");
    assert_eq!(
        kafka.committed_offsets(&group, &topic).await,
        kafka.end_offsets(&topic).await
    );
}

// invariant: member-that-has-gone
#[tokio::test]
async fn a_static_member_gets_its_partitions_back_without_rebalance() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("back", 4).await;
    let group = unique("group");
    kafka.produce(&topic, numbered(400, 4)).await;
    // No member exceeds its session timeout, however busy the machine.
    let patient = [QUICK[0], ("session.timeout.ms", "45000")];
    let source = |id: &str| member(&kafka, &group, &topic, &patient).static_member(id);
    let first = source("first");
    let second = source("second");
    open(&first).await;
    let others = open(&second).await;
    // The member that joins first has all of them for a moment.
    let shared = async || match [&first, &second].map(|source| source.status().partitions.len()) {
        [2, 2] => Ok(()),
        counts => Err(format!("they have {counts:?} partitions")),
    };
    until("two partitions for each", LIMIT, shared).await;
    let before = others.total("rebalances");
    first.close(CLOSE).await.expect("closes");

    let again = source("first");
    open(&again).await;
    let mut ours = 0;
    let mut theirs = 0;
    while ours == 0 || theirs == 0 {
        tokio::select! {
            batch = again.receive(64) => ours += batch.expect("receives").expect("more").len(),
            batch = second.receive(64) => theirs += batch.expect("receives").expect("more").len(),
        }
    }
    assert_eq!(
        others.total("rebalances"),
        before,
        "only the returning member was reassigned"
    );
    again.close(CLOSE).await.expect("closes");
    second.close(CLOSE).await.expect("closes");
}

#[tokio::test]
async fn an_id_that_no_member_can_have_is_refused() {
    let source = KafkaSource::new("127.0.0.1:1", "g", ["t"]).static_member("a b");
    let error = source
        .open(Arc::new(Counters::default()))
        .await
        .expect_err("refused");
    assert!(error.to_string().contains("static_member"), "{error}");
}

/// The member has joined, and `open` has not been polled since.
// invariant: member-that-has-gone
#[tokio::test]
async fn a_source_dropped_while_it_opens_leaves_its_group() {
    let kafka = Kafka::shared().await;
    let topic = kafka.new_topic("dropped", 1).await;
    let group = unique("group");
    let source = member(&kafka, &group, &topic, &[]);
    let mut opening = source.open(Arc::new(Counters::default()));
    let ended = futures_util::poll!(&mut opening);
    assert!(ended.is_pending(), "the thread has just begun: {ended:?}");
    let members = async |count: usize| match kafka.members(&group).await {
        found if found == count => Ok(()),
        found => Err(format!("{found} members")),
    };
    until("it has joined", LIMIT, async || members(1).await).await;
    drop(opening);
    until("it has left", LIMIT, async || members(0).await).await;
}
