use super::super::scan::Scan;
use super::*;

fn order(topic: &str, key: usize) -> OrderOf {
    OrderOf::Key {
        topic: topic.into(),
        key: key.to_string().into(),
    }
}

fn unconfirmed() -> PublishError {
    PublishError::Unconfirmed(String::new())
}

#[test]
fn an_order_waits_longer_per_failure_and_is_free_after_success() {
    let mut held = HeldOrders::default();
    let now = Instant::now();
    let order = order("shipments", 1);
    held.failed((order.clone(), None), &unconfirmed(), now, 0.0);
    assert_eq!(held.at(now).keys.len(), 1);
    let soon = now + Duration::from_millis(250);
    assert_eq!(held.at(soon), HeldBack::default());
    held.failed((order.clone(), None), &unconfirmed(), soon, 0.0);
    assert_eq!(held.at(soon + Duration::from_millis(499)).keys.len(), 1);
    held.succeeded(&order, None);
    assert_eq!(held.at(soon), HeldBack::default());
}

#[test]
fn a_refused_topic_is_held_back_and_tried_with_one_order() {
    let mut held = HeldOrders::default();
    let now = Instant::now();
    let refused = PublishError::TopicRefused(String::new());
    for key in 0..750 {
        held.failed((order("denied", key), None), &refused, now, 0.0);
    }
    let topics = HeldBack {
        topics: vec!["denied".into()],
        ..HeldBack::default()
    };
    assert_eq!((held.at(now), held.full_until(now)), (topics.clone(), None));
    // The failures of one try count once.
    let free = now + Duration::from_millis(250);
    assert_eq!(held.at(free), HeldBack::default());
    let read = [order("denied", 1), order("denied", 2), order("other", 1)].map(|order| (order, ()));
    let taken: Vec<OrderOf> = held
        .take(read.into(), free, |_| None)
        .orders
        .into_iter()
        .map(|(order, ())| order)
        .collect();
    assert_eq!(taken, [order("denied", 1), order("other", 1)]);
    assert_eq!(held.at(free), topics, "it is tried twice");
    held.failed((order("denied", 1), None), &refused, free, 0.0);
    assert_eq!(held.at(free + Duration::from_millis(499)), topics);
    held.succeeded(&order("denied", 1), None);
    assert_eq!(held.at(free), HeldBack::default());
}

#[test]
fn a_topic_with_many_unconfirmed_orders_is_tried_with_some() {
    let mut held = HeldOrders::default();
    let now = Instant::now();
    for key in 0..UNCONFIRMED_MOST {
        assert_eq!(held.at(now).topics.len(), 0);
        held.failed((order("away", key), None), &unconfirmed(), now, 0.0);
    }
    assert_eq!((held.at(now).topics.len(), held.at(now).keys.len()), (1, 0));
    let all: Vec<_> = (0..100).map(|key| (order("away", key), ())).collect();
    assert_eq!(
        held.take(all, now + Duration::from_millis(250), |_| None)
            .orders
            .len(),
        PROBES
    );
}

#[test]
fn refused_messages_hold_back_no_other_order_of_their_topic() {
    let mut held = HeldOrders::default();
    let now = Instant::now();
    let refused = PublishError::Refused(String::new());
    for key in 0..ORDERS_MOST {
        held.failed((order("small", key), None), &refused, now, 0.0);
    }
    assert_eq!(
        (held.at(now).topics.len(), held.at(now).keys.len()),
        (0, ORDERS_MOST)
    );
    held.failed((order("small", ORDERS_MOST), None), &refused, now, 0.0);
    assert_eq!(
        (held.at(now).topics.len(), held.at(now).keys.len()),
        (1, 0),
        "it has a limit"
    );
}

#[test]
fn everything_waits_when_the_most_topics_wait() {
    let mut held = HeldOrders::default();
    let now = Instant::now();
    for topic in 0..TOPICS_MOST {
        assert_eq!(held.full_until(now), None);
        let refused = PublishError::TopicRefused(String::new());
        held.failed((order(&topic.to_string(), 1), None), &refused, now, 0.0);
    }
    let free = now + Duration::from_millis(250);
    assert_eq!(
        (held.full_until(now), held.full_until(free)),
        (Some(free), None)
    );
}

const PARTS: u32 = 12;

fn part(number: u32) -> Option<TopicPart> {
    Some(TopicPart { number, of: PARTS })
}

/// The part of an order of these tests: that of its key's number.
fn part_of(order: &OrderOf) -> Option<TopicPart> {
    let key = std::str::from_utf8(order.key().unwrap()).unwrap();
    part(key.parse::<u32>().unwrap() % PARTS)
}

/// Orders of a part, by the numbers of their keys.
fn of_part(number: u32, count: u32) -> Vec<(OrderOf, ())> {
    let keys = (0..count).map(|n| n * PARTS + number);
    keys.map(|key| (order("orders", key as usize), ()))
        .collect()
}

// invariant: outbox-dead-partition
#[test]
fn a_part_that_does_not_answer_is_held_back_and_no_other() {
    let mut held = HeldOrders::default();
    let now = Instant::now();
    let dead = of_part(3, 500);
    for (order, ()) in dead.iter().take(20) {
        held.failed((order.clone(), part(3)), &unconfirmed(), now, 0.0);
    }
    assert_eq!(held.at(now), HeldBack::default(), "a store knows no parts");
    let mut read = dead.clone();
    read.extend(of_part(4, 10));
    let taken = held.take(read.clone(), now, part_of);
    assert_eq!((taken.orders, taken.is_passing), (of_part(4, 10), true));
    // Others are tried each time.
    let mut free = now;
    let mut tried = HashSet::new();
    for _ in 0..10 {
        free += Duration::from_secs(31);
        let taken = held.take(dead.clone(), free, part_of);
        assert_eq!(taken.orders.len(), PROBES_OF_PART);
        for (order, ()) in taken.orders {
            assert!(tried.insert(order.clone()), "{order:?} is tried again");
            held.failed((order, part(3)), &unconfirmed(), free, 0.0);
        }
    }
    held.succeeded(&dead[0].0, part(3));
    assert_eq!(held.take(dead, free, part_of).orders.len(), 500);
}

#[test]
fn a_topic_whose_parts_are_all_held_back_is_not_read() {
    let mut held = HeldOrders::default();
    let now = Instant::now();
    for number in 0..PARTS {
        assert_eq!(held.at(now).topics.len(), 0);
        for (order, ()) in of_part(number, 16) {
            held.failed((order, part(number)), &unconfirmed(), now, 0.0);
        }
    }
    assert_eq!(held.at(now).topics, [Arc::from("orders")]);
}

fn up_to(scan: &mut Scan, held: &HeldOrders, at: Instant) -> Option<i64> {
    scan.and(HeldBack::default(), held, at).up_to
}

#[test]
fn a_place_is_tried_with_the_same_orders_when_it_has_no_others() {
    const ROUND: Duration = Duration::from_secs(31);
    let mut held = HeldOrders::default();
    let now = Instant::now();
    let mut scan = Scan::new(now);
    for order in of_part(3, 16).into_iter().chain(of_part(3, 2)) {
        held.failed((order.0, part(3)), &unconfirmed(), now, 0.0);
    }
    let only = of_part(3, 2);
    for round in 1..4 {
        let at = now + ROUND * round;
        assert_eq!(up_to(&mut scan, &held, at), None);
        let taken = held.take(only.clone(), at, part_of);
        assert!(taken.orders.is_empty(), "both were tried in vain");
        scan.note_read(Some(9), taken.is_passing);
        assert_eq!(up_to(&mut scan, &held, at), Some(9));
        scan.note_end(&mut held, at);
        assert_eq!(up_to(&mut scan, &held, at), None, "it begins again");
        assert_eq!(held.take(only.clone(), at, part_of).orders.len(), 2);
        for (order, ()) in only.clone() {
            held.failed((order, part(3)), &unconfirmed(), at, 0.0);
        }
    }
}
