//! FIFO queues: the order of each group, beside many others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use oncegate::{Attempt, Consumer, Failure, Message};
use oncegate_testkit::{Moto, Sqs};

use crate::stage::{Book, MAX_ATTEMPTS, Stage, body, id};

const EACH: u32 = 6;

fn group(message: &Message) -> String {
    String::from_utf8(message.key().expect("the group is the key").to_vec()).unwrap()
}

/// The numbers of each group, in the order in which they were written.
fn by_group(book: &Book) -> BTreeMap<String, Vec<u32>> {
    let mut groups: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for line in book.lines() {
        let (group, number) = line.split_once(' ').unwrap();
        groups
            .entry(group.to_owned())
            .or_default()
            .push(number.parse().unwrap());
    }
    groups
}

/// Returns how many handlers ran at a time, at the most.
async fn groups_keep_their_order(sqs: &Sqs, groups: u32, concurrency: u32) -> usize {
    let stage = Stage::fifo_on(sqs).await;
    for n in 0..groups {
        stage
            .queue
            .send_to_group(&format!("g{n}"), (0..EACH).map(|m| body(n * EACH + m)))
            .await;
    }
    let book = Book::new();
    let running_now = Arc::new(AtomicUsize::new(0));
    let most_at_once = Arc::new(AtomicUsize::new(0));
    let witnesses = (
        book.clone(),
        Arc::clone(&running_now),
        Arc::clone(&most_at_once),
    );
    let handler = move |message: Message, _: Attempt| {
        let (book, running_now, most_at_once) = witnesses.clone();
        async move {
            most_at_once.fetch_max(running_now.fetch_add(1, SeqCst) + 1, SeqCst);
            // Long enough for others to come in between, if anything lets them.
            tokio::time::sleep(Duration::from_millis(20)).await;
            book.write(format!("{} {}", group(&message), id(&message)?));
            running_now.fetch_sub(1, SeqCst);
            Ok::<(), Failure>(())
        }
    };
    let tuned = |consumer: Consumer| consumer.concurrency(concurrency);
    let running = stage.start_with(stage.source(), handler, tuned).await;
    stage.queue.until_empty().await;
    running.stop().await;
    let numbers = by_group(&book);
    assert_eq!(numbers.len(), groups as usize);
    for n in 0..groups {
        assert_eq!(
            numbers[&format!("g{n}")],
            (n * EACH..(n + 1) * EACH).collect::<Vec<_>>()
        );
    }
    most_at_once.load(SeqCst)
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_keep_their_order_side_by_side_on_elasticmq() {
    let at_once = groups_keep_their_order(&Sqs::shared().await, 12, 64).await;
    assert!(at_once > 1, "groups run beside each other");
}

/// One after another: moto gives a group to two receives at once, which SQS never does.
// invariant: fifo-order
#[tokio::test(flavor = "multi_thread")]
async fn groups_keep_their_order_on_moto() {
    assert_eq!(
        groups_keep_their_order(Moto::shared().await.sqs(), 3, 1).await,
        1
    );
}

/// The second of three fails for ever. The third must not run before the second is a dead letter.
// invariant: fifo-order
#[tokio::test(flavor = "multi_thread")]
async fn nothing_later_of_a_group_runs_before_its_poison_is_buried() {
    let stage = Stage::fifo_on(&Sqs::shared().await).await;
    stage
        .queue
        .send_to_group("poisoned", [1, 2, 3].map(body))
        .await;
    stage
        .queue
        .send_to_group("healthy", [11, 12, 13].map(body))
        .await;
    let book = Book::new();
    let lines = book.clone();
    let handler = move |message: Message, _: Attempt| {
        let lines = lines.clone();
        async move {
            let id = id(&message)?;
            lines.write(format!("{} {id}", group(&message)));
            if id == 2 {
                Err(Failure::retry("poison"))
            } else {
                Ok(id)
            }
        }
    };
    let running = stage.start(handler).await;
    running.watched.until("acks", 6).await;
    let watched = running.stop().await;
    let groups = by_group(&book);
    let mut expected = vec![2; MAX_ATTEMPTS as usize];
    expected.insert(0, 1);
    expected.push(3);
    assert_eq!(groups["poisoned"], expected);
    assert_eq!(groups["healthy"], [11, 12, 13]);
    assert_eq!(watched.get("dead_letters", "attempts_used_up"), 1);
    let dead = stage.dead.take_all().await;
    assert_eq!(
        dead.iter()
            .map(|letter| letter.body().unwrap().to_owned())
            .collect::<Vec<_>>(),
        [body(2)]
    );
    stage.queue.until_empty().await;
}
