//! The schedule against random events: counts, order, and that every message ends exactly once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::*;

/// A message as its test sees it.
#[derive(Clone, Debug)]
struct Content {
    number: u64,
    shard: Option<u64>,
    lanes: [Option<LaneId>; 2],
    tenant: Option<u64>,
    route: usize,
}

const TENANT_LIMIT: u32 = 2;
const PERMITS: usize = 5;

/// An engine whose tasks end when the random numbers say so.
struct SimulatedEngine {
    rng: fastrand::Rng,
    schedule: Schedule<Content>,
    now: Instant,
    running: Vec<(PlaceId, Content, Option<Shard>)>,
    answering: Vec<(PlaceId, Content)>,
    arrived: BTreeMap<u64, [Option<LaneId>; 2]>,
    ended: BTreeSet<u64>,
    /// The circuit breakers that admit no message, by route.
    paused: BTreeSet<usize>,
}

impl SimulatedEngine {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let patience = rng.bool().then_some(Duration::from_secs(5));
        let wait = Duration::from_millis(rng.u64(..1_000));
        let limits = BatchLimits::new(rng.usize(1..6))
            .bytes(rng.usize(1..200))
            .wait(wait);
        let batches = if rng.bool() {
            BTreeMap::from([(1, limits)])
        } else {
            BTreeMap::new()
        };
        Self {
            schedule: Schedule::new(rng.bool().then_some(TENANT_LIMIT), patience)
                .with_batches(batches),
            rng,
            now: Instant::now(),
            running: Vec::new(),
            answering: Vec::new(),
            arrived: BTreeMap::new(),
            ended: BTreeSet::new(),
            paused: BTreeSet::new(),
        }
    }

    fn arrive(&mut self) {
        let rng = &mut self.rng;
        let number = self.arrived.len() as u64;
        let lanes = [
            rng.bool().then(|| rng.u64(..5)),
            rng.bool().then(|| rng.u64(10..20)),
        ];
        let content = Content {
            number,
            shard: rng.bool().then(|| rng.u64(..3)),
            lanes,
            tenant: rng.bool().then(|| rng.u64(..3)),
            route: rng.usize(..2),
        };
        let Content { route, tenant, .. } = content;
        let arrival = Arrival {
            lanes,
            bytes: 10 + number as usize,
            route,
            tenant,
            is_completed: rng.u8(..4) == 0,
        };
        // A message that is answered at once is in no lane.
        let is_answered = arrival.is_completed && self.schedule.table.occupied(lanes) == 0;
        self.arrived
            .insert(number, if is_answered { [None; 2] } else { lanes });
        self.schedule.arrive(content, arrival);
    }

    fn dispatch(&mut self) {
        for outage in self.schedule.bypass_outages(self.now) {
            assert!(outage.is_bypassed);
        }
        let paused = self.paused.clone();
        self.schedule.resume_handlers(|route| {
            if paused.contains(&route) {
                0
            } else {
                usize::MAX
            }
        });
        self.schedule.advance(self.now);
        while self.running.len() + self.answering.len() < PERMITS
            && self.schedule.can_start(self.now)
        {
            let answers = self.schedule.start_answers(2);
            if !answers.is_empty() {
                self.answering.extend(answers);
                continue;
            }
            match self
                .schedule
                .next_start(self.now)
                .expect("something can start")
            {
                NextStart::One(place) => self.start(place),
                NextStart::Batch(places) => {
                    assert!(!places.is_empty(), "an empty batch starts");
                    places.into_iter().for_each(|place| self.start(place));
                }
            }
        }
    }

    fn start(&mut self, place: PlaceId) {
        let content = self
            .schedule
            .content(place)
            .expect("it does not run")
            .clone();
        let shard = content.shard.map(|number| Shard {
            route: content.route,
            number,
        });
        let Some(start) = self.schedule.offer(place, shard, self.now) else {
            return;
        };
        if self.paused.contains(&content.route) {
            return self.schedule.refuse(start.place, start.content);
        }
        self.may_run(&content);
        self.running.push((start.place, start.content, start.asks));
    }

    /// No earlier message of its lanes is unfinished, and its tenant has room.
    fn may_run(&self, content: &Content) {
        let shares = |lanes: &[Option<LaneId>; 2]| {
            lanes
                .iter()
                .flatten()
                .any(|lane| content.lanes.contains(&Some(*lane)))
        };
        let mut before = self
            .arrived
            .range(..content.number)
            .filter(|(number, _)| !self.ended.contains(number));
        assert!(
            !before.any(|(_, lanes)| shares(lanes)),
            "{} overtakes another message",
            content.number
        );
        let of_tenant = self
            .running
            .iter()
            .filter(|(_, other, _)| other.tenant.is_some() && other.tenant == content.tenant);
        let limit = self.schedule.tenant_limit.unwrap_or(usize::MAX);
        assert!(
            of_tenant.count() < limit,
            "too many messages of a tenant run"
        );
    }

    fn end_one(&mut self, always_finish: bool) {
        if !self.answering.is_empty() {
            let (place, content) = self
                .answering
                .swap_remove(self.rng.usize(..self.answering.len()));
            self.finish(place, &content);
        }
        if self.running.is_empty() {
            return;
        }
        let (place, content, asks) = self
            .running
            .swap_remove(self.rng.usize(..self.running.len()));
        let outcome = if always_finish { 0 } else { self.rng.u8(..4) };
        if outcome == 1
            && let Some(shard) = asks
        {
            let error = StoreError::Unavailable {
                reason: Arc::from("test"),
            };
            self.schedule.no_answer(shard, place, &error, self.now, 0.5);
            return self
                .schedule
                .end(place, AttemptEnd::NoAnswer { content }, self.now);
        }
        if let Some(shard) = asks {
            self.schedule.answered(shard, place, self.now);
        }
        match outcome {
            2 => {
                if self.rng.bool() {
                    self.schedule.keep_out_of_batches(place);
                }
                let after = Duration::from_millis(self.rng.u64(..2_000));
                let end = AttemptEnd::TryAgain {
                    content,
                    after,
                    cause: WaitCause::Retry,
                };
                self.schedule.end(place, end, self.now);
            }
            _ => self.finish(place, &content),
        }
    }

    fn finish(&mut self, place: PlaceId, content: &Content) {
        assert!(
            self.ended.insert(content.number),
            "{} ends twice",
            content.number
        );
        self.schedule.end(place, AttemptEnd::Finished, self.now);
    }

    /// The queues and counts are those of the table, every message that has not ended is somewhere,
    /// and no tenant waits for nothing.
    fn check(&self) {
        let mut derived = Index::default();
        for (place, scheduled) in self.schedule.table.iter() {
            derived.update(place, scheduled.fixed, MessageState::Gone, scheduled.state);
        }
        assert_eq!(self.schedule.index, derived);
        assert_eq!(
            derived.counts.messages,
            self.arrived.len() - self.ended.len()
        );
        let held = self.schedule.waiting().count() + self.running.len() + self.answering.len();
        assert_eq!(held, derived.counts.messages, "a message is lost");
        for of_tenant in derived
            .tenants
            .values()
            .filter(|of_tenant| !of_tenant.waiting.is_empty())
        {
            assert!(
                of_tenant.running + of_tenant.ready.len() >= TENANT_LIMIT as usize,
                "{of_tenant:?}"
            );
        }
    }
}

// invariant: schedule-loses-message
#[test]
fn whatever_happens_the_counts_are_those_of_the_table_and_every_message_ends_once() {
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
    let (mut schedule, now) = (Schedule::new(None, None), Instant::now());
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
fn an_answer_from_before_an_outage_does_not_end_it_and_the_shard_is_asked_at_once() {
    let (mut schedule, now) = (Schedule::new(None, None), Instant::now());
    let shard = Shard {
        route: 0,
        number: 0,
    };
    (0..3).for_each(|number| schedule.arrive(number, arrival(None)));
    let first = start_next(&mut schedule, now, Some(shard)).unwrap();
    let second = start_next(&mut schedule, now, Some(shard)).unwrap();
    let error = StoreError::Unavailable {
        reason: Arc::from("test"),
    };
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
    let (mut schedule, now) = (Schedule::new(None, None), Instant::now());
    let shard = Shard {
        route: 0,
        number: 0,
    };
    schedule.arrive(0, arrival(None));
    let first = start_next(&mut schedule, now, Some(shard)).unwrap();
    let error = StoreError::Unavailable {
        reason: Arc::from("test"),
    };
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
    let (mut schedule, now) = (Schedule::new(None, None), Instant::now());
    let shards = [0, 1].map(|number| Shard { route: 0, number });
    (0..2).for_each(|number| schedule.arrive(number, arrival(None)));
    let first = start_next(&mut schedule, now, Some(shards[0])).unwrap();
    schedule.end(first.place, AttemptEnd::Finished, now);
    let later = now + Duration::from_secs(3_600);
    let second = start_next(&mut schedule, later, Some(shards[1])).unwrap();
    let error = StoreError::Unavailable {
        reason: Arc::from("test"),
    };
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
fn a_message_of_a_full_tenant_starts_when_the_one_before_it_is_held_back() {
    let (mut schedule, now) = (Schedule::new(Some(1), None), Instant::now());
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
fn a_batch_starts_when_it_is_full_or_when_its_first_message_has_waited() {
    let (mut schedule, now) = (batching(BatchLimits::new(2)), Instant::now());
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
    let (mut schedule, now) = (batching(BatchLimits::new(9)), Instant::now());
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
fn the_bytes_of_a_batch_are_limited_and_a_larger_message_is_a_batch_of_its_own() {
    let (mut schedule, now) = (batching(BatchLimits::new(9).bytes(10)), Instant::now());
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
fn a_message_that_is_kept_out_of_batches_starts_alone_and_waits_for_no_other() {
    let (mut schedule, now) = (batching(BatchLimits::new(9)), Instant::now());
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
