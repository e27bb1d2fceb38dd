//! An engine around the schedule, driven by random numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use oncegate_core::store::StoreError;

use super::super::*;

/// A message as its test sees it.
#[derive(Clone, Debug)]
pub(super) struct Content {
    number: u64,
    shard: Option<u64>,
    lanes: [Option<LaneId>; 2],
    tenant: Option<u64>,
    route: usize,
}

const TENANT_LIMIT: u32 = 2;
const PERMITS: usize = 5;

/// An engine whose tasks end when the random numbers say so.
pub(super) struct SimulatedEngine {
    pub(super) rng: fastrand::Rng,
    pub(super) schedule: Schedule<Content>,
    pub(super) now: Instant,
    pub(super) running: Vec<(PlaceId, Content, Option<Shard>)>,
    pub(super) answering: Vec<(PlaceId, Content)>,
    pub(super) arrived: BTreeMap<u64, [Option<LaneId>; 2]>,
    pub(super) ended: BTreeSet<u64>,
    /// The circuit breakers that admit no message, by route.
    pub(super) paused: BTreeSet<usize>,
}

impl SimulatedEngine {
    pub(super) fn new(seed: u64) -> Self {
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

    pub(super) fn arrive(&mut self) {
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

    pub(super) fn dispatch(&mut self) {
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
            let answers = self.schedule.start_answers(2, |_| true);
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

    /// Asserts that no earlier message of its lanes is unfinished, and that its tenant has room.
    fn may_run(&self, content: &Content) {
        let before = self
            .arrived
            .range(..content.number)
            .filter(|(number, _)| !self.ended.contains(number));
        let mut lanes_before = before.flat_map(|(_, lanes)| lanes).flatten();
        assert!(
            !lanes_before.any(|lane| content.lanes.contains(&Some(*lane))),
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

    pub(super) fn end_one(&mut self, always_finish: bool) {
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
    pub(super) fn check(&self) {
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
