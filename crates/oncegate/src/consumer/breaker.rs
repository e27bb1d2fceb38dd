//! Circuit breaker: pauses a handler that fails for all messages alike, before they use up their attempts.
//!
//! A dependency that is down fails every message in the same way. Each message would use up its attempts and become a
//! dead letter. So the breaker counts the failures of *distinct keys*: when too many of the last ones failed, it opens,
//! that handler starts no more messages, and after a pause one message probes (half-open). If the probe succeeds, the
//! breaker closes; if not, the pause gets longer. Failures while it is not closed cost no attempt.
//!
//! All rules are in [`apply`], which is pure: time and outcomes are parameters.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use super::lanes::PlaceId;
use crate::backoff::Backoff;
use crate::gate::OpenGate;
use crate::observe::{BreakerState, Event};

/// The limits of the circuit breaker: when failures mean that a dependency of the handler is down, not that messages
/// are bad.
///
/// ```
/// use std::time::Duration;
/// use oncegate::Backoff;
/// use oncegate::consumer::Breaker;
///
/// let patient = Breaker { pause: Backoff::new(Duration::from_secs(5), Duration::from_secs(300)), ..Breaker::default() };
/// # let _ = patient;
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Breaker {
    /// How many of the last keys are counted; the breaker stays closed before it has seen that many. 20 by default, 2
    /// to 1,000.
    ///
    /// Failures of fewer keys are no evidence, however many they are: a few bad messages that are retried while no
    /// others arrive must reach the dead letters. With a source that gives one message at a time, as a partition in
    /// order does, up to this many messages are given up before the breaker opens.
    pub keys: u32,
    /// The share of them that must have failed at their last run. 0.5 by default, more than 0 and up to 1.
    pub share: f64,
    /// How long to wait before a message probes: 1 s, doubling up to 30 s, by default.
    pub pause: Backoff,
}

impl Breaker {
    /// Half of the last 20 keys; pauses of 1 s, doubling up to 30 s.
    pub const DEFAULT: Self =
        Self { keys: 20, share: 0.5, pause: Backoff::new(Duration::from_secs(1), Duration::from_secs(30)) };
    /// The most keys that can be counted.
    pub const MOST_KEYS: u32 = 1_000;

    /// Returns what is wrong with these limits, if anything.
    pub(super) fn defect(&self) -> Option<&'static str> {
        if !(2..=Self::MOST_KEYS).contains(&self.keys) {
            return Some("`breaker.keys` must be between 2 and 1,000");
        }
        if !(self.share > 0.0 && self.share <= 1.0) {
            return Some(
                "`breaker.share` must be more than 0 and at most 1; `without_breaker` switches it off",
            );
        }
        None
    }
}

impl Default for Breaker {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The breaker's state: its phase and the last runs.
#[derive(Clone, Debug, Default)]
struct State {
    phase: Phase,
    /// The last keys with the result of their last run, the latest at the end.
    last: VecDeque<(u64, RunResult)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Phase {
    /// Every message runs.
    #[default]
    Closed,
    /// No message runs before `probe_at`.
    Open { probe_at: Instant, pauses: u32 },
    /// Only the message of this key runs.
    HalfOpen { probe: u64, pauses: u32 },
}

/// The result of a run, as evidence of whether the handler's dependencies work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunResult {
    /// It succeeded, or gave the message up: either way the dependency answered.
    Success,
    Failure,
}

/// An input of the breaker.
#[derive(Clone, Copy, Debug, PartialEq)]
enum BreakerEvent {
    /// A message of this key is about to start.
    Asks { key: u64 },
    /// The handler has run for this key. `fraction` is random, for the jitter of the pause.
    Ran { key: u64, ran: RunResult, fraction: f64 },
    /// The attempt for this key is over; its handler need not have run.
    Over { key: u64 },
}

/// Returns the state after the event.
fn apply(now: Instant, limits: &Breaker, mut state: State, event: BreakerEvent) -> State {
    match (state.phase, event) {
        (Phase::Open { probe_at, pauses }, BreakerEvent::Asks { key }) if now >= probe_at => {
            state.phase = Phase::HalfOpen { probe: key, pauses };
        }
        (Phase::HalfOpen { probe, .. }, BreakerEvent::Ran { key, ran: RunResult::Success, .. })
            if key == probe =>
        {
            return State::default();
        }
        (Phase::HalfOpen { probe, pauses }, BreakerEvent::Ran { key, ran: RunResult::Failure, fraction })
            if key == probe =>
        {
            let pauses = pauses.saturating_add(1);
            state.phase = Phase::Open { probe_at: now + limits.pause.wait(pauses, fraction), pauses };
        }
        // A duplicate, or a key that is busy elsewhere: the probe found out nothing, so the next message may probe.
        (Phase::HalfOpen { probe, pauses }, BreakerEvent::Over { key }) if key == probe => {
            state.phase = Phase::Open { probe_at: now, pauses };
        }
        (Phase::Closed, BreakerEvent::Ran { key, ran, fraction }) => {
            state.note(limits, key, ran);
            if state.must_open(limits) {
                state.phase = Phase::Open { probe_at: now + limits.pause.wait(1, fraction), pauses: 1 };
            }
        }
        _ => {}
    }
    state
}

impl State {
    fn note(&mut self, limits: &Breaker, key: u64, ran: RunResult) {
        self.last.retain(|(known, _)| *known != key);
        self.last.push_back((key, ran));
        if self.last.len() > limits.keys as usize {
            self.last.pop_front();
        }
    }

    fn must_open(&self, limits: &Breaker) -> bool {
        let failed = self.last.iter().filter(|(_, ran)| *ran == RunResult::Failure).count();
        #[expect(clippy::cast_precision_loss, reason = "at most a thousand")]
        let share = failed as f64 / f64::from(limits.keys);
        self.last.len() >= limits.keys as usize && share >= limits.share
    }
}

/// The breaker of one handler.
#[derive(Debug)]
pub(super) struct Switch {
    limits: Option<Breaker>,
    state: Mutex<State>,
}

/// Whether a message may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    Run,
    Wait,
}

impl Switch {
    pub(super) fn new(limits: Option<Breaker>) -> Self {
        Self { limits, state: Mutex::default() }
    }

    /// Called right before a message starts. After `Run` the caller must call [`over`](Self::over) when the attempt
    /// ends.
    pub(super) fn admit(&self, gate: &OpenGate, key: u64) -> Admission {
        match self.tell(gate, BreakerEvent::Asks { key }) {
            (Phase::Closed, _) => Admission::Run,
            (Phase::Open { .. }, Phase::HalfOpen { .. }) => Admission::Run,
            _ => Admission::Wait,
        }
    }

    /// Notes that the handler has run. Returns whether that run, if it failed, counts as an attempt.
    pub(super) fn ran(&self, gate: &OpenGate, key: u64, ran: RunResult) -> bool {
        let fraction = gate.fraction();
        let (before, after) = self.tell(gate, BreakerEvent::Ran { key, ran, fraction });
        (before, after) == (Phase::Closed, Phase::Closed)
    }

    /// Notes that the attempt is over, whether or not the handler has run.
    pub(super) fn over(&self, gate: &OpenGate, key: u64) {
        self.tell(gate, BreakerEvent::Over { key });
    }

    pub(super) fn is_closed(&self) -> bool {
        self.phase() == Phase::Closed
    }

    fn phase(&self) -> Phase {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).phase
    }

    /// Applies an event, and returns the phases before and after it.
    fn tell(&self, gate: &OpenGate, event: BreakerEvent) -> (Phase, Phase) {
        let Some(limits) = &self.limits else { return (Phase::Closed, Phase::Closed) };
        let (before, after) = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let before = state.phase;
            *state = apply(Instant::now(), limits, std::mem::take(&mut *state), event);
            (before, state.phase)
        };
        let scope = gate.scope();
        let state = match (before, after) {
            (Phase::Closed, Phase::Open { .. }) => {
                warn!(
                    scope,
                    "the circuit breaker is open: the handler is paused, and one message at a time probes"
                );
                BreakerState::Open
            }
            (Phase::Open { .. }, Phase::HalfOpen { .. }) => BreakerState::HalfOpen,
            (Phase::HalfOpen { .. }, Phase::Open { .. }) => BreakerState::Open,
            (Phase::HalfOpen { .. }, Phase::Closed) => {
                info!(scope, "the circuit breaker is closed: the handler works again");
                BreakerState::Closed
            }
            _ => return (before, after),
        };
        gate.observe(Event::BreakerChanged { scope, state });
        (before, after)
    }
}

/// The messages that wait for their handler's breaker, by their route's number.
#[derive(Debug, Default)]
pub(super) struct Held {
    waiting: BTreeMap<usize, VecDeque<PlaceId>>,
}

impl Held {
    pub(super) fn push(&mut self, route: usize, place: PlaceId) {
        self.waiting.entry(route).or_default().push_back(place);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }

    /// Takes out the messages that may ask again: all when the breaker has closed, one when a probe is due.
    pub(super) fn due<'a>(&mut self, switch: impl Fn(usize) -> Option<&'a Switch>) -> Vec<PlaceId> {
        let now = Instant::now();
        let mut due = Vec::new();
        self.waiting.retain(|route, waiting| {
            match switch(*route).map(Switch::phase) {
                None | Some(Phase::Closed) => due.extend(waiting.drain(..)),
                Some(Phase::Open { probe_at, .. }) if probe_at <= now => due.extend(waiting.pop_front()),
                Some(Phase::Open { .. } | Phase::HalfOpen { .. }) => {}
            }
            !waiting.is_empty()
        });
        due
    }

    /// When the next probe is due. The task of a probe that runs reports its end.
    pub(super) fn next_probe<'a>(&self, switch: impl Fn(usize) -> Option<&'a Switch>) -> Option<Instant> {
        let phases = self.waiting.keys().filter_map(|route| Some(switch(*route)?.phase()));
        let probes = phases.filter_map(|phase| match phase {
            Phase::Open { probe_at, .. } => Some(probe_at),
            Phase::Closed | Phase::HalfOpen { .. } => None,
        });
        probes.min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Breaker =
        Breaker { keys: 4, share: 0.5, pause: Backoff::new(Duration::from_secs(1), Duration::from_secs(4)) };

    /// A breaker whose clock moves only on request.
    struct Bench {
        now: Instant,
        state: State,
    }

    impl Bench {
        fn new() -> Self {
            Self { now: Instant::now(), state: State::default() }
        }

        fn tell(&mut self, event: BreakerEvent) -> Phase {
            self.state = apply(self.now, &LIMITS, std::mem::take(&mut self.state), event);
            self.state.phase
        }

        fn ran(&mut self, key: u64, ran: RunResult) -> Phase {
            self.tell(BreakerEvent::Ran { key, ran, fraction: 0.0 })
        }

        fn opened() -> Self {
            let mut bench = Self::new();
            for key in 1..=4 {
                bench.ran(key, RunResult::Failure);
            }
            assert_ne!(bench.state.phase, Phase::Closed);
            bench
        }

        fn probe(&mut self, after_ms: u64, key: u64) -> Phase {
            self.now += Duration::from_millis(after_ms);
            self.tell(BreakerEvent::Asks { key })
        }
    }

    #[test]
    fn it_opens_when_half_of_enough_distinct_keys_failed() {
        let mut bench = Bench::new();
        bench.ran(1, RunResult::Success);
        bench.ran(2, RunResult::Success);
        assert_eq!(bench.ran(3, RunResult::Failure), Phase::Closed, "three keys are not enough to judge");
        let probe_at = bench.now + Duration::from_secs(1);
        assert_eq!(bench.ran(4, RunResult::Failure), Phase::Open { probe_at, pauses: 1 });
    }

    #[test]
    fn a_few_bad_messages_open_nothing_however_often_they_fail() {
        let mut bench = Bench::new();
        for _ in 0..100 {
            for key in 1..=3 {
                assert_eq!(bench.ran(key, RunResult::Failure), Phase::Closed);
            }
        }
        let mut bench = Bench::new();
        for key in 1..100 {
            bench.ran(0, RunResult::Failure);
            assert_eq!(bench.ran(key, RunResult::Success), Phase::Closed, "one key in four");
        }
    }

    #[test]
    fn a_few_bad_messages_open_nothing_though_nothing_goes_through_between() {
        let mut bench = Bench::new();
        for _ in 0..100 {
            for key in 1..=3 {
                assert_eq!(
                    bench.ran(key, RunResult::Failure),
                    Phase::Closed,
                    "three keys are not enough to judge"
                );
            }
        }
    }

    #[test]
    fn only_one_message_probes_and_its_success_closes() {
        let mut bench = Bench::opened();
        assert!(matches!(bench.probe(999, 5), Phase::Open { .. }), "not yet");
        assert_eq!(bench.probe(1, 5), Phase::HalfOpen { probe: 5, pauses: 1 });
        assert_eq!(bench.probe(60_000, 6), Phase::HalfOpen { probe: 5, pauses: 1 }, "one at a time");
        // A run that began before the change is no evidence about now.
        assert_eq!(bench.ran(1, RunResult::Success), Phase::HalfOpen { probe: 5, pauses: 1 });
        assert_eq!(bench.ran(1, RunResult::Failure), Phase::HalfOpen { probe: 5, pauses: 1 });
        assert_eq!(bench.ran(5, RunResult::Success), Phase::Closed);
        for key in 10..13 {
            assert_eq!(bench.ran(key, RunResult::Failure), Phase::Closed, "what was before is forgotten");
        }
    }

    #[test]
    fn a_failed_probe_makes_the_pause_longer_up_to_its_limit() {
        let mut bench = Bench::opened();
        for (key, wait_s) in [(5, 1), (6, 2), (7, 4), (8, 4)] {
            assert!(matches!(bench.probe(wait_s * 1_000 - 1, key), Phase::Open { .. }), "{key}");
            assert!(matches!(bench.probe(1, key), Phase::HalfOpen { .. }), "{key}");
            bench.ran(key, RunResult::Failure);
            // The end of an attempt whose handler has run changes nothing more.
            assert!(matches!(bench.tell(BreakerEvent::Over { key }), Phase::Open { .. }));
        }
    }

    #[test]
    fn a_probe_that_never_ran_leaves_its_turn_to_the_next() {
        let mut bench = Bench::opened();
        bench.probe(1_000, 5);
        bench.tell(BreakerEvent::Over { key: 5 });
        assert_eq!(bench.probe(0, 6), Phase::HalfOpen { probe: 6, pauses: 1 });
    }

    #[test]
    fn limits_that_make_no_sense_are_named() {
        let defect = |keys, share| Breaker { keys, share, ..LIMITS }.defect();
        assert_eq!(defect(20, 0.5), None);
        assert!(defect(1, 0.5).unwrap().contains("`breaker.keys`"));
        for share in [0.0, 1.1, f64::NAN] {
            assert!(defect(20, share).unwrap().contains("`breaker.share`"));
        }
    }
}
