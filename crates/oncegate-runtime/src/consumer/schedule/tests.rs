//! The schedule against random events: counts, order, and that every message ends exactly once.

use std::collections::BTreeMap;
use std::sync::Arc;

use oncegate_core::store::StoreError;

use super::*;

mod simulated;

use simulated::SimulatedEngine;

// invariant: schedule-loses-message
#[test]
fn whatever_happens_counts_match_and_each_message_ends_once() {
    let base = fastrand::u64(..);
    for seed in (0..200).map(|n| base.wrapping_add(n)) {
        println!("seed {seed}");
        let mut engine = SimulatedEngine::new(seed);
        for _ in 0..600 {
            match engine.rng.u8(..10) {
                0..3 if engine.schedule.counts().messages < 40 => engine.arrive(),
                3..7 => engine.end_one(false),
                7 => {
                    let route = engine.rng.usize(..2);
                    if !engine.paused.remove(&route) {
                        engine.paused.insert(route);
                    }
                }
                _ => engine.now += Duration::from_millis(engine.rng.u64(..500)),
            }
            engine.dispatch();
            engine.check();
        }
        engine.paused.clear();
        let mut steps = 0;
        while !engine.schedule.is_empty() {
            // Either something runs, or something starts when time has passed.
            engine.dispatch();
            if engine.running.is_empty() && engine.answering.is_empty() {
                engine.now = engine
                    .schedule
                    .next_wake(engine.now)
                    .expect("nothing can start any more");
            }
            engine.end_one(true);
            engine.check();
            steps += 1;
            assert!(steps < 10_000, "the schedule comes to no end");
        }
        assert_eq!(engine.schedule.counts(), MessageCounts::default());
        assert_eq!(engine.ended.len(), engine.arrived.len());
    }
}

// invariant: schedule-loses-message
#[test]
fn after_a_stop_only_what_runs_is_left() {
    let base = fastrand::u64(..);
    for seed in (0..200).map(|n| base.wrapping_add(n)) {
        println!("seed {seed}");
        let mut engine = SimulatedEngine::new(seed);
        for _ in 0..100 {
            engine.arrive();
            engine.dispatch();
            engine.end_one(false);
        }
        engine.schedule.stop();
        let runs = engine.running.len() + engine.answering.len();
        assert_eq!(engine.schedule.counts().messages, runs);
        assert!(
            !engine.schedule.can_start(engine.now + LONGEST_TIME),
            "nothing starts after a stop"
        );
        while !engine.running.is_empty() || !engine.answering.is_empty() {
            engine.end_one(true);
        }
        assert_eq!(engine.schedule.counts(), MessageCounts::default());
    }
}

fn arrival(tenant: Option<u64>) -> Arrival {
    Arrival {
        lanes: [None; 2],
        bytes: 1,
        route: 0,
        tenant,
        is_completed: false,
    }
}

fn start_next(
    schedule: &mut Schedule<u32>,
    now: Instant,
    shard: Option<Shard>,
) -> Option<Starting<u32>> {
    let NextStart::One(place) = schedule.next_start(now)? else {
        panic!("no route has batches")
    };
    schedule.offer(place, shard, now)
}

#[test]
fn the_oldest_ready_message_is_first_even_after_a_delay() {
    let mut schedule = Schedule::new(None, None);
    let now = Instant::now();
    (0..3).for_each(|number| schedule.arrive(number, arrival(None)));
    let Starting { place, content, .. } = start_next(&mut schedule, now, None).unwrap();
    let after = Duration::from_secs(1);
    schedule.end(
        place,
        AttemptEnd::TryAgain {
            content,
            after,
            cause: WaitCause::Retry,
        },
        now,
    );
    assert_eq!(schedule.next_wake(now), Some(now + after));
    schedule.advance(now + after);
    let order: Vec<u32> = std::iter::from_fn(|| start_next(&mut schedule, now, None))
        .map(|start| start.content)
        .collect();
    assert_eq!(order, [0, 1, 2]);
}

// invariant: outage-ends-too-early
#[test]
fn an_answer_from_before_an_outage_probes_and_does_not_end_it() {
    let mut schedule = Schedule::new(None, None);
    let now = Instant::now();
    let shard = Shard {
        route: 0,
        number: 0,
    };
    (0..3).for_each(|number| schedule.arrive(number, arrival(None)));
    let first = start_next(&mut schedule, now, Some(shard)).unwrap();
    let second = start_next(&mut schedule, now, Some(shard)).unwrap();
    let error = unavailable();
    assert!(schedule.no_answer(shard, first.place, &error, now, 0.5));
    schedule.end(
        first.place,
        AttemptEnd::NoAnswer {
            content: first.content,
        },
        now,
    );
    assert!(
        start_next(&mut schedule, now, Some(shard)).is_none(),
        "the shard is away"
    );

    assert!(!schedule.answered(shard, second.place, now));
    schedule.end(second.place, AttemptEnd::Finished, now);
    let probe = start_next(&mut schedule, now, Some(shard)).unwrap();
    assert!(
        start_next(&mut schedule, now, Some(shard)).is_none(),
        "one asks for all"
    );
    assert!(schedule.answered(shard, probe.place, now));
    schedule.end(probe.place, AttemptEnd::Finished, now);
    assert!(start_next(&mut schedule, now, Some(shard)).is_some());
}

// invariant: outage-without-end
#[test]
fn an_outage_ends_when_nothing_waits_for_it() {
    let mut schedule = Schedule::new(None, None);
    let now = Instant::now();
    let shard = Shard {
        route: 0,
        number: 0,
    };
    schedule.arrive(0, arrival(None));
    let first = start_next(&mut schedule, now, Some(shard)).unwrap();
    let error = unavailable();
    assert!(schedule.no_answer(shard, first.place, &error, now, 0.5));
    schedule.end(
        first.place,
        AttemptEnd::NoAnswer {
            content: first.content,
        },
        now,
    );
    assert!(schedule.is_every_store_away());
    // Its partition has gone to another consumer, so it ends without asking.
    let probe = start_next(&mut schedule, now + LONGEST_TIME, Some(shard)).unwrap();
    schedule.end(probe.place, AttemptEnd::Finished, now);
    assert!(
        !schedule.is_every_store_away(),
        "nothing would receive the message that ends it"
    );
    assert_eq!(schedule.outages().count(), 0);
}

// invariant: outage-without-end
#[test]
fn a_shard_that_has_left_does_not_count_as_one_that_answers() {
    let mut schedule = Schedule::new(None, None);
    let now = Instant::now();
    let shards = [0, 1].map(|number| Shard { route: 0, number });
    (0..2).for_each(|number| schedule.arrive(number, arrival(None)));
    let first = start_next(&mut schedule, now, Some(shards[0])).unwrap();
    schedule.end(first.place, AttemptEnd::Finished, now);
    let later = now + Duration::from_secs(3_600);
    let second = start_next(&mut schedule, later, Some(shards[1])).unwrap();
    let error = unavailable();
    assert!(schedule.no_answer(shards[1], second.place, &error, later, 0.5));
    schedule.end(
        second.place,
        AttemptEnd::NoAnswer {
            content: second.content,
        },
        later,
    );
    assert!(schedule.is_every_store_away());
}

#[test]
fn a_full_tenants_next_message_starts_when_one_is_held_back() {
    let mut schedule = Schedule::new(Some(1), None);
    let now = Instant::now();
    (0..3).for_each(|number| schedule.arrive(number, arrival(Some(7))));
    let first = start_next(&mut schedule, now, None).unwrap();
    assert!(
        start_next(&mut schedule, now, None).is_none()
            && start_next(&mut schedule, now, None).is_none()
    );
    assert_eq!(schedule.next_start(now), None, "both wait for the first");
    schedule.end(first.place, AttemptEnd::Finished, now);
    let second = start_next(&mut schedule, now, None).unwrap();
    schedule.refuse(second.place, second.content);
    assert_eq!(
        start_next(&mut schedule, now, None).unwrap().content,
        2,
        "it need not wait for a paused handler"
    );
}

/// The batches that start now, by the numbers of their messages.
fn start_batches(schedule: &mut Schedule<u32>, now: Instant) -> Vec<Vec<u32>> {
    schedule.advance(now);
    let mut batches = Vec::new();
    while schedule.can_start(now) {
        let places = match schedule.next_start(now).expect("something can start") {
            NextStart::One(place) => vec![place],
            NextStart::Batch(places) => places,
        };
        let started = places
            .into_iter()
            .filter_map(|place| schedule.offer(place, None, now));
        batches.push(started.map(|start| start.content).collect());
    }
    batches
}

const WAIT: Duration = Duration::from_millis(10);

fn batching(limits: BatchLimits) -> Schedule<u32> {
    Schedule::new(None, None).with_batches(BTreeMap::from([(0, limits.wait(WAIT))]))
}

// invariant: batch-waits
#[test]
fn a_batch_starts_when_full_or_when_its_first_has_waited() {
    let mut schedule = batching(BatchLimits::new(2));
    let now = Instant::now();
    (0..3).for_each(|number| schedule.arrive(number, arrival(None)));
    assert_eq!(start_batches(&mut schedule, now), [vec![0, 1]]);
    let later = now + WAIT / 2;
    assert_eq!(
        start_batches(&mut schedule, later),
        [[0; 0]; 0],
        "the third began to wait at once"
    );
    assert_eq!(schedule.next_wake(later), Some(now + WAIT));
    schedule.arrive(3, arrival(None));
    assert_eq!(
        start_batches(&mut schedule, later),
        [vec![2, 3]],
        "the wait ends when the batch is full"
    );
    schedule.arrive(4, arrival(None));
    assert_eq!(
        start_batches(&mut schedule, now + WAIT),
        [[0; 0]; 0],
        "a new batch has a wait of its own"
    );
    assert_eq!(schedule.next_wake(now + WAIT), Some(now + WAIT * 2));
    assert_eq!(start_batches(&mut schedule, now + WAIT * 2), [vec![4]]);
}

// invariant: batch-waits
#[test]
fn no_batch_waits_when_no_message_can_come() {
    let mut schedule = batching(BatchLimits::new(9));
    let now = Instant::now();
    (0..2).for_each(|number| schedule.arrive(number, arrival(None)));
    schedule.note_supply(false);
    assert_eq!(start_batches(&mut schedule, now), [vec![0, 1]]);
    schedule.arrive(2, arrival(None));
    assert_eq!(
        start_batches(&mut schedule, now),
        [[0; 0]; 0],
        "what runs may let others in by its end"
    );
}

#[test]
fn batches_have_a_byte_limit_and_larger_messages_run_alone() {
    let mut schedule = batching(BatchLimits::new(9).bytes(10));
    let now = Instant::now();
    for (number, bytes) in [(0, 4), (1, 6), (2, 30), (3, 1)] {
        schedule.arrive(
            number,
            Arrival {
                bytes,
                ..arrival(None)
            },
        );
    }
    assert_eq!(start_batches(&mut schedule, now), [vec![0, 1], vec![2]]);
    assert_eq!(start_batches(&mut schedule, now + WAIT), [vec![3]]);
}

#[test]
fn a_message_kept_out_of_batches_starts_alone_without_a_wait() {
    let mut schedule = batching(BatchLimits::new(9));
    let now = Instant::now();
    schedule.arrive(0, arrival(None));
    schedule.note_supply(false);
    let Some(NextStart::Batch(places)) = schedule.next_start(now) else {
        panic!("it is due")
    };
    let start = schedule.offer(places[0], None, now).unwrap();
    schedule.keep_out_of_batches(start.place);
    let end = AttemptEnd::TryAgain {
        content: 0,
        after: WAIT,
        cause: WaitCause::Retry,
    };
    schedule.end(start.place, end, now);
    schedule.note_supply(true);
    schedule.arrive(1, arrival(None));
    schedule.advance(now + WAIT);
    assert_eq!(
        schedule.next_start(now + WAIT),
        Some(NextStart::One(start.place))
    );
}

fn unavailable() -> StoreError {
    StoreError::Unavailable {
        reason: Arc::from("test"),
    }
}

const SHARD: Shard = Shard {
    route: 0,
    number: 0,
};

/// Ends the attempt: with an answer of the store, or without one. Returns whether an outage begins
/// with that.
fn end_attempt(
    schedule: &mut Schedule<u32>,
    start: Starting<u32>,
    is_answered: bool,
    now: Instant,
) -> bool {
    let Starting { place, content, .. } = start;
    if is_answered {
        schedule.answered(SHARD, place, now);
        schedule.end(place, AttemptEnd::Finished, now);
        return false;
    }
    let begins = schedule.no_answer(SHARD, place, &unavailable(), now, 0.5);
    schedule.end(place, AttemptEnd::NoAnswer { content }, now);
    begins
}

/// Starts and ends what can start now. `answers` returns whether the store answers for a message.
/// Returns the number of outages that begin.
fn run_all(schedule: &mut Schedule<u32>, answers: impl Fn(u32) -> bool, now: Instant) -> usize {
    let mut outages = 0;
    schedule.advance(now);
    while schedule.can_start(now) {
        let Some(start) = start_next(schedule, now, Some(SHARD)) else {
            continue;
        };
        let is_answered = answers(start.content);
        outages += usize::from(end_attempt(schedule, start, is_answered, now));
    }
    outages
}

// invariant: outage-of-one-key
#[test]
fn a_message_that_is_never_answered_holds_up_no_other() {
    let mut schedule = Schedule::new(None, None);
    let begin = Instant::now();
    let mut now = begin;
    (0..20).for_each(|number| schedule.arrive(number, arrival(None)));
    let mut outages = 0;
    while schedule.counts().messages > 1 {
        outages += run_all(&mut schedule, |number| number != 0, now);
        now = schedule.next_wake(now).expect("something waits for a time");
    }
    assert!(now - begin < Duration::from_secs(1), "{:?}", now - begin);
    assert_eq!(outages, 1, "the shard answers others");
    // Messages that come later do not wait for it either.
    for number in 20..200 {
        schedule.arrive(number, arrival(None));
        outages += run_all(&mut schedule, |number| number != 0, now);
        assert_eq!(schedule.counts().messages, 1, "{number}");
        now += Duration::from_millis(70);
    }
    assert_eq!((outages, schedule.outages().count()), (1, 0));
    let waiting: Vec<MessageState> = schedule.waiting().map(|(_, _, state)| state).collect();
    assert!(
        matches!(
            waiting[..],
            [MessageState::Delayed(Delay {
                cause: WaitCause::Unreadable,
                ..
            })]
        ),
        "{waiting:?}"
    );
    // It runs as soon as its key is answered.
    now += Duration::from_secs(3);
    run_all(&mut schedule, |_| true, now);
    assert!(schedule.is_empty());
}

// invariant: outage-of-one-key
#[test]
fn each_probe_that_fails_is_followed_by_one_of_another_message() {
    let mut schedule = Schedule::new(None, None);
    let mut now = Instant::now();
    (0..4).for_each(|number| schedule.arrive(number, arrival(None)));
    let begun: Vec<Starting<u32>> =
        std::iter::from_fn(|| start_next(&mut schedule, now, Some(SHARD))).collect();
    for start in begun {
        end_attempt(&mut schedule, start, false, now);
    }
    let mut probes = Vec::new();
    for _ in 0..8 {
        now = schedule.next_wake(now).expect("a probe has a time");
        let probe = start_next(&mut schedule, now, Some(SHARD)).unwrap();
        assert!(probe.is_probe);
        probes.push(probe.content);
        end_attempt(&mut schedule, probe, false, now);
    }
    assert_eq!(probes, [1, 2, 3, 0, 1, 2, 3, 0]);
}

// invariant: outage-of-one-key
#[test]
fn a_store_that_goes_away_again_is_noticed() {
    let mut schedule = Schedule::new(None, None);
    let mut now = Instant::now();
    (0..4).for_each(|number| schedule.arrive(number, arrival(None)));
    let begun: Vec<Starting<u32>> =
        std::iter::from_fn(|| start_next(&mut schedule, now, Some(SHARD))).collect();
    for start in begun {
        end_attempt(&mut schedule, start, false, now);
    }
    // It answers one probe, and nothing after that.
    now = schedule.next_wake(now).expect("a probe has a time");
    let probe = start_next(&mut schedule, now, Some(SHARD)).unwrap();
    end_attempt(&mut schedule, probe, true, now);
    assert_eq!(
        run_all(&mut schedule, |_| false, now),
        0,
        "each is in doubt"
    );
    while schedule.outages().count() == 0 {
        now = schedule.next_wake(now).expect("each tries again");
        assert!(run_all(&mut schedule, |_| false, now) <= 1);
    }
    assert!(schedule.is_every_store_away());
}
