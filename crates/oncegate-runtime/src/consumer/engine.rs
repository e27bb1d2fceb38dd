//! The loop that starts attempts and notes their ends. What starts when is decided by the
//! [`Schedule`]; this module has the clock, the permits, the tasks, and the log.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::store::StoreError;
use tokio::sync::mpsc;
use tokio::task::JoinError;
use tokio::time::{Instant, sleep_until};
use tracing::{error, info, warn};

use super::breaker::Admission;
use super::error::ConsumerError;
use super::item::{Item, Probe};
use super::lanes::PlaceId;
use super::member::{Ended, Member, Next};
use super::schedule::{AttemptEnd, NextStart, Schedule, Shard, Starting};
use super::shared::Shared;
use super::unit::{self, Tasks};
use crate::observe::Event;

pub(super) mod snapshot;
mod starts;
mod stop;

use starts::Starts;

/// The time between two counts of everything that waits, for the monitor.
const SNAPSHOT_EVERY: Duration = Duration::from_secs(1);
/// The handler times fade after this many counts.
const SNAPSHOTS_PER_FADE: u32 = 60;
/// The number of messages that the prefetch found completed and that are answered under one permit.
const ANSWERS_PER_PERMIT: usize = 64;

/// While this many tasks run, the ends of those that are ready to run are noted together.
const WORTH_GATHERING: usize = 8;

/// Everything that waits or runs.
pub(super) struct Engine {
    shared: Arc<Shared>,
    schedule: Schedule<Box<Item>>,
    tasks: Arc<Tasks>,
    /// Messages whose attempts have ended before others of their task.
    ended_early: mpsc::UnboundedReceiver<Vec<Ended>>,
    /// Probes of shards that have had an answer.
    probes_answered: mpsc::UnboundedReceiver<(PlaceId, Shard)>,
    /// The sender of `probes_answered`, for the probes.
    probe_answers: mpsc::UnboundedSender<(PlaceId, Shard)>,
    /// Messages, and their bytes, that have come since the counts were published.
    admitted: (usize, usize),
    failed: Option<ConsumerError>,
}

impl Engine {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let settings = &shared.settings;
        let limits = shared
            .routes()
            .filter_map(|route| Some((route.number, route.limits?)))
            .collect();
        let (tasks, ended_early) = Tasks::new(Arc::clone(&shared));
        let (probe_answers, probes_answered) = mpsc::unbounded_channel();
        Self {
            schedule: Schedule::new(settings.tenant_limit, settings.fail_open_after)
                .with_batches(limits),
            shared,
            tasks,
            ended_early,
            probes_answered,
            probe_answers,
            admitted: (0, 0),
            failed: None,
        }
    }

    /// Runs until the consumer stops and everything started has ended, or the deadline is over.
    pub(super) async fn run(
        mut self,
        mut intake: mpsc::Receiver<Vec<Box<Item>>>,
    ) -> Result<(), ConsumerError> {
        let mut more = true;
        let mut snapshot_at = Instant::now();
        let mut snapshot_count: u32 = 0;
        while more || !self.schedule.is_empty() {
            let may_bring_more = more && self.shared.in_flight.may_bring_more(self.admitted.0);
            self.schedule.note_supply(may_bring_more);
            self.dispatch();
            self.publish();
            // Before the wait: under load, something else would always be ready first.
            if Instant::now() >= snapshot_at {
                snapshot_at = Instant::now() + SNAPSHOT_EVERY;
                self.publish_snapshot();
                snapshot_count = snapshot_count.wrapping_add(1);
                if snapshot_count.is_multiple_of(SNAPSHOTS_PER_FADE) {
                    self.shared.watch.handler_times.fade();
                }
            }
            let wake_at = self
                .next_wake()
                .map_or(snapshot_at, |at| at.min(snapshot_at));
            tokio::select! {
                biased;
                () = self.shared.stopping.cancelled() => break,
                Some(ended) = self.tasks.join_next() => {
                    self.note_task(ended);
                    if self.tasks.len() >= WORTH_GATHERING {
                        unit::after_ready_tasks().await;
                    }
                    while let Some(ended) = self.tasks.try_join_next() {
                        self.note_task(ended);
                    }
                }
                Some(ended) = self.ended_early.recv() => self.note_all(ended),
                Some((place, shard)) = self.probes_answered.recv() => self.note_store_answered(place, shard),
                batch = intake.recv(), if more => match batch {
                    Some(batch) => batch.into_iter().for_each(|item| self.admit(item)),
                    None => more = false,
                },
                () = sleep_until(wake_at) => {}
            }
        }
        self.stop().await
    }

    fn admit(&mut self, item: Box<Item>) {
        self.admitted.0 += 1;
        self.admitted.1 += item.bytes;
        let arrival = item.arrival(self.shared.settings.ordering);
        self.schedule.arrive(item, arrival);
    }

    /// Tells the intake how much is in flight.
    fn publish(&mut self) {
        let admitted = std::mem::take(&mut self.admitted);
        let is_paused = self.schedule.is_every_store_away();
        let in_flight = &self.shared.in_flight;
        in_flight.publish(self.schedule.counts(), admitted, is_paused);
        // What a source would deliver now could not begin.
        in_flight.hold(self.shared.routes().all(|route| route.gate.is_paused()));
    }

    /// Starts everything that may start.
    fn dispatch(&mut self) {
        let now = now();
        self.bypass_outages(now);
        let shared = &self.shared;
        self.schedule
            .note_doubt(shared.routes().any(|route| route.breaker.is_in_doubt()));
        self.schedule.resume_handlers(|route| {
            shared
                .route_number(route)
                .map_or(usize::MAX, |route| route.admits())
        });
        self.schedule.advance(now);
        let mut starts = Starts::new(&self.tasks);
        while self.schedule.can_start(now) {
            let shared = &self.shared;
            if self.schedule.has_found(|route| !shared.is_paused(route)) {
                if !starts.has_permit() {
                    break;
                }
                let most = ANSWERS_PER_PERMIT;
                let found = self
                    .schedule
                    .start_answers(most, |route| !shared.is_paused(route));
                starts.answers(found);
                continue;
            }
            let next = self.schedule.next_start(now);
            let Some(item) = next.as_ref().and_then(|next| self.first_of(next)) else {
                break;
            };
            let shard = item.shard();
            // The oldest is first: while it has no room, nothing starts that came later.
            if !starts.has_room(item, shard) {
                break;
            }
            match next {
                None => break,
                Some(NextStart::One(place)) => {
                    if let Some(member) = self.admit_start(place, shard, now) {
                        starts.one(member);
                    }
                }
                Some(NextStart::Batch(places)) => {
                    let members = places.into_iter().filter_map(|place| {
                        let shard = self.schedule.content(place)?.shard();
                        self.admit_start(place, shard, now)
                    });
                    starts.batch(members.collect());
                }
            }
        }
        starts.end();
    }

    /// The first of the messages that start next.
    fn first_of(&self, next: &NextStart) -> Option<&Item> {
        let place = match next {
            NextStart::One(place) => Some(place),
            NextStart::Batch(places) => places.first(),
        };
        Some(self.schedule.content(*place?)?)
    }

    /// Makes a message ready for its unit; `None` if it waits for something.
    fn admit_start(
        &mut self,
        place: PlaceId,
        shard: Option<Shard>,
        now: std::time::Instant,
    ) -> Option<Member> {
        let Starting {
            place,
            content: mut item,
            asks,
            is_probe,
            without_store,
        } = self.schedule.offer(place, shard, now)?;
        if item.route.gate.is_paused() {
            self.schedule.refuse(place, item);
            return None;
        }
        if let Some(key) = item.breaker_key() {
            if item.route.breaker.admit(&item.route.gate, key) == Admission::Wait {
                self.schedule.refuse(place, item);
                return None;
            }
            item.admitted = Some(key);
        }
        item.without_store = without_store;
        let answered = &self.probe_answers;
        item.probe = asks.filter(|_| is_probe).map(|shard| Probe {
            answered: answered.clone(),
            place,
            shard,
        });
        Some(Member::new(place, item, asks))
    }

    /// Returns when the loop must wake even if nothing else happens.
    ///
    /// What is already due waits for a permit, and the end of a task wakes the loop.
    fn next_wake(&self) -> Option<Instant> {
        let now = now();
        let paused = self.schedule.paused_routes();
        let probes = paused
            .filter_map(|route| self.shared.route_number(route)?.breaker.probe_at())
            .filter(|at| *at > now);
        self.schedule
            .next_wake(now)
            .into_iter()
            .chain(probes)
            .min()
            .map(Instant::from_std)
    }

    /// Notes the end of a task.
    fn note_task(&mut self, ended: Result<Vec<Ended>, JoinError>) {
        match ended {
            Ok(ended) => self.note_all(ended),
            Err(panic) => self.fail(ConsumerError::Bug(panic.to_string())),
        }
    }

    fn note_all(&mut self, ended: Vec<Ended>) {
        for Ended { place, asked, next } in ended {
            self.note_answer(place, asked, &next);
            self.note_next(place, next);
        }
    }

    /// Ends an outage when that shard of the store has answered, not when a message ended that
    /// never asked it. A probe whose claim was answered has ended it already.
    fn note_answer(&mut self, place: PlaceId, asked: Option<Shard>, next: &Next) {
        let Some(shard) = asked else { return };
        let Next::NoAnswer { error, .. } = next else {
            return self.note_store_answered(place, shard);
        };
        if !self
            .schedule
            .no_answer(shard, place, error, now(), self.shared.random())
        {
            return;
        }
        match error {
            StoreError::Refused { .. } => {
                error!(reason = %error, "nothing is dispatched until this is changed");
            }
            // A store that is full answers, and refuses new claims.
            _ => {
                warn!(reason = %error, "operations of the store fail; nothing is dispatched until one succeeds");
            }
        }
        self.shared
            .observer
            .observe(Event::StorePaused { paused: true });
    }

    fn note_store_answered(&mut self, place: PlaceId, shard: Shard) {
        if self.schedule.answered(shard, place, now()) {
            info!("operations of the store succeed again");
            self.shared
                .observer
                .observe(Event::StorePaused { paused: false });
        }
    }

    fn note_next(&mut self, place: PlaceId, next: Next) {
        let end = match next {
            Next::Finished => AttemptEnd::Finished,
            Next::NoAnswer { item, .. } => AttemptEnd::NoAnswer { content: item },
            Next::Again { item, after, cause } => {
                if item.past.runs_alone {
                    self.schedule.keep_out_of_batches(place);
                }
                AttemptEnd::TryAgain {
                    content: item,
                    after,
                    cause,
                }
            }
            Next::Stop(error) => return self.fail(*error),
        };
        self.schedule.end(place, end, now());
    }

    /// Lets messages run that have waited for their store for as long as the consumer's patience.
    fn bypass_outages(&mut self, now: std::time::Instant) {
        for outage in self.schedule.bypass_outages(now) {
            let away_for = now.saturating_duration_since(outage.since);
            error!(
                ?away_for,
                error = &*outage.error,
                "messages run without their store until it answers"
            );
        }
    }

    /// Keeps the first failure and begins the stop; everything that has started may end.
    fn fail(&mut self, error: ConsumerError) {
        self.failed.get_or_insert(error);
        self.shared.stop();
    }
}

impl Drop for Engine {
    /// Ends what runs, with the consumer.
    fn drop(&mut self) {
        self.tasks.abort_all();
    }
}

/// The time for the schedule: in tests it stands still while tokio's does.
fn now() -> std::time::Instant {
    Instant::now().into_std()
}
