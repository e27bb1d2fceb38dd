//! Circuit breaker: pauses a handler that fails for all messages alike, before they use up their
//! attempts.
//!
//! A dependency that is down fails every message in the same way. Each message would use up its
//! attempts and become a dead letter. So the breaker counts the failures of *distinct keys*: when
//! too many of the last ones failed, it opens, that handler starts no more messages, and after a
//! pause one message probes (half-open). If the probe succeeds, the breaker closes; if not, the
//! pause gets longer. Failures while it is not closed cost no attempt.
//!
//! In an outage, each restart would let as many messages fail as it takes to open the breaker, the
//! same ones each time, and a dozen restarts would use up their attempts. So the scope's descriptor
//! has a mark while a breaker is open (`breaker_mark.rs`), and a process that finds it begins with
//! an open breaker whose probe is due at once. The mark decides nothing else: a mark that is out of
//! date costs one probe.
//!
//! All rules are in [`apply`], which is pure: time and outcomes are parameters.

use std::collections::VecDeque;
use std::time::Duration;

use oncegate_core::settings::Finding;
#[cfg(feature = "config")]
use oncegate_core::settings::Time;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::backoff::Backoff;
use crate::failure::Failure;
use crate::gate::OpenGate;
use crate::health::{BreakerStatus, beginning};
use crate::observe::{BreakerState, Event};

/// The limits of the circuit breaker: when failures mean that a dependency of the handler is down,
/// not that messages are bad.
///
/// ```
/// use std::time::Duration;
/// use oncegate::consumer::Breaker;
///
/// let patient = Breaker { most: Duration::from_secs(300), ..Breaker::default() };
/// # let _ = patient;
/// ```
///
/// Failures before the breaker opens cost attempts: normally one for each of the
/// [`keys`](Self::keys). A process that starts while the breaker of its scope is open begins with
/// an open one.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct Breaker {
    /// Whether it is on.
    pub on: bool,
    /// How many of the last keys it takes into account, 2 to 1,000. It stays closed before it has
    /// seen that many.
    ///
    /// Failures of fewer keys are no evidence, however many they are: a few bad messages that are
    /// retried while no others arrive must reach the dead letters. With a source that gives one
    /// message at a time, as a partition in order does, up to this many messages are given up
    /// before the breaker opens.
    pub keys: u32,
    /// The share of them that must have failed at their last run, more than 0 and up to 1.
    pub share: f64,
    /// The first pause before a message probes; it doubles.
    ///
    /// A handler that requests a delay (`Failure::retry_after`) replaces the doubled pause, between
    /// the first and the longest one.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub first: Duration,
    /// The longest pause.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub most: Duration,
}

impl Breaker {
    /// Half of the last 20 keys; pauses of 1 s, doubling up to 30 s.
    pub const DEFAULT: Self = Self {
        on: true,
        keys: 20,
        share: 0.5,
        first: Duration::from_secs(1),
        most: Duration::from_secs(30),
    };
    /// The most keys that can be counted.
    const MOST_KEYS: u32 = 1_000;

    /// The time until a message probes: what the failed handler has requested, within the limits,
    /// or the pause of this number.
    fn wait(&self, requested: Option<Duration>, pauses: u32, fraction: f64) -> Duration {
        match requested {
            Some(requested) => requested.max(self.first).min(self.most),
            None => Backoff::new(self.first, self.most).wait(pauses, fraction),
        }
    }

    /// Returns what is wrong with these limits.
    pub(super) fn check(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        if !(2..=Self::MOST_KEYS).contains(&self.keys) {
            findings.push(Finding::new(
                "breaker.keys",
                "`breaker.keys` must be between 2 and 1,000",
            ));
        }
        if !(self.share > 0.0 && self.share <= 1.0) {
            findings.push(Finding::new(
                "breaker.share",
                "`breaker.share` must be more than 0 and at most 1; `breaker.on` switches it off",
            ));
        }
        findings
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
    phase: CircuitPhase,
    /// The last keys with the result of their last run, the latest at the end.
    last: VecDeque<(u64, RunResult)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum CircuitPhase {
    /// Every message runs.
    #[default]
    Closed,
    /// No message runs before `probe_at`. It has paused the handler `pauses` times in a row.
    Open { probe_at: Instant, pauses: u32 },
    /// Only the message of this key runs.
    HalfOpen { probe: u64, pauses: u32 },
}

/// The result of a run, as evidence of whether the handler's dependencies work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunResult {
    Success,
    /// The handler gave the message up, or wants it later: the dependency answered, if it was
    /// asked.
    Answer,
    Failure,
}

/// The cost of a failed run: an attempt of the message, or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureCount {
    Counted,
    /// The failure is due to an outage or a stop.
    Uncounted,
}

/// An input of the breaker.
#[derive(Clone, Copy, Debug, PartialEq)]
enum BreakerEvent {
    /// A message of this key is about to start.
    Asks { key: u64 },
    /// The handler has run for this key. `pause` is the one that a failed handler has requested,
    /// `fraction` is random, for the jitter of a pause.
    Ran {
        key: u64,
        ran: RunResult,
        pause: Option<Duration>,
        fraction: f64,
    },
    /// The attempt for this key is over; its handler need not have run.
    Over { key: u64 },
}

/// Returns the state after the event.
fn apply(now: Instant, limits: &Breaker, mut state: State, event: BreakerEvent) -> State {
    match (state.phase, event) {
        (CircuitPhase::Open { probe_at, pauses }, BreakerEvent::Asks { key })
            if now >= probe_at =>
        {
            state.phase = CircuitPhase::HalfOpen { probe: key, pauses };
        }
        (
            CircuitPhase::HalfOpen { probe, .. },
            BreakerEvent::Ran {
                key,
                ran: RunResult::Success | RunResult::Answer,
                ..
            },
        ) if key == probe => return State::default(),
        (
            CircuitPhase::HalfOpen { probe, pauses },
            BreakerEvent::Ran {
                key,
                ran: RunResult::Failure,
                pause,
                fraction,
            },
        ) if key == probe => {
            let pauses = pauses.saturating_add(1);
            state.phase = CircuitPhase::Open {
                probe_at: now + limits.wait(pause, pauses, fraction),
                pauses,
            };
        }
        // A duplicate, or a key that is busy elsewhere: the probe found out nothing, so the next
        // message may probe.
        (CircuitPhase::HalfOpen { probe, pauses }, BreakerEvent::Over { key }) if key == probe => {
            state.phase = CircuitPhase::Open {
                probe_at: now,
                pauses,
            };
        }
        (
            CircuitPhase::Closed,
            BreakerEvent::Ran {
                key,
                ran,
                pause,
                fraction,
            },
        ) => {
            state.note(limits, key, ran);
            if state.must_open(limits) {
                state.phase = CircuitPhase::Open {
                    probe_at: now + limits.wait(pause, 1, fraction),
                    pauses: 1,
                };
            }
        }
        _ => {}
    }
    state
}

impl State {
    /// The state of a process that starts while the breaker is marked as open.
    fn marked_open(now: Instant) -> Self {
        Self {
            phase: CircuitPhase::Open {
                probe_at: now,
                pauses: 0,
            },
            ..Self::default()
        }
    }

    fn note(&mut self, limits: &Breaker, key: u64, ran: RunResult) {
        self.last.retain(|(known, _)| *known != key);
        self.last.push_back((key, ran));
        if self.last.len() > limits.keys as usize {
            self.last.pop_front();
        }
    }

    fn must_open(&self, limits: &Breaker) -> bool {
        let failed = self
            .last
            .iter()
            .filter(|(_, ran)| *ran == RunResult::Failure)
            .count();
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
    /// The cause for which this process has opened it.
    opened: Mutex<Option<BreakerCause>>,
    /// `true` while it is open, for the mark. It is sent again with each probe that fails: another
    /// process may have removed the mark.
    is_open: watch::Sender<bool>,
}

/// The cause of an open breaker.
#[derive(Debug)]
struct BreakerCause {
    at: Instant,
    /// The reason of the last failure.
    reason: String,
}

/// The answer to a message that is about to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    Run,
    Wait,
}

impl Switch {
    /// The breaker of the handler behind this gate. It begins open if an earlier process has left
    /// it open.
    pub(super) fn new(limits: Option<Breaker>, gate: &OpenGate) -> Self {
        let is_open = limits.is_some() && gate.is_breaker_marked_open();
        let state = if is_open {
            State::marked_open(Instant::now())
        } else {
            State::default()
        };
        if is_open {
            let scope = gate.scope();
            warn!(
                scope,
                "the circuit breaker of an earlier process was open, so it is open: one message at a time probes"
            );
            gate.observe(Event::BreakerChanged {
                scope,
                state: BreakerState::Open,
            });
        }
        Self {
            limits,
            state: Mutex::new(state),
            opened: Mutex::default(),
            is_open: watch::Sender::new(is_open),
        }
    }

    /// Returns a receiver that gets `true` when the breaker opens, `false` when it closes, and
    /// `true` again after each probe that fails.
    pub(super) fn changes(&self) -> watch::Receiver<bool> {
        self.is_open.subscribe()
    }

    /// Called right before a message starts. After `Run` the caller must call [`over`](Self::over)
    /// when the attempt ends.
    pub(super) fn admit(&self, gate: &OpenGate, key: u64) -> Admission {
        match self.tell(gate, BreakerEvent::Asks { key }) {
            (CircuitPhase::Closed, _) => Admission::Run,
            (CircuitPhase::Open { .. }, CircuitPhase::HalfOpen { .. }) => Admission::Run,
            _ => Admission::Wait,
        }
    }

    /// Notes that the handler has run, and its failure, which may request a pause. Returns whether
    /// that run, if it failed, counts as an attempt.
    pub(super) fn ran(
        &self,
        gate: &OpenGate,
        key: u64,
        ran: RunResult,
        failure: Option<&Failure>,
    ) -> FailureCount {
        let fraction = gate.fraction();
        let pause = failure.and_then(Failure::requested_delay);
        let phases = self.tell(
            gate,
            BreakerEvent::Ran {
                key,
                ran,
                pause,
                fraction,
            },
        );
        match phases {
            (_, CircuitPhase::Open { .. }) if ran == RunResult::Failure => {
                self.note_opened(failure);
            }
            (CircuitPhase::HalfOpen { .. }, CircuitPhase::Closed) => *self.opened.lock() = None,
            _ => {}
        }
        match phases {
            (CircuitPhase::Closed, CircuitPhase::Closed) => FailureCount::Counted,
            _ => FailureCount::Uncounted,
        }
    }

    /// Notes that the attempt is over, whether or not the handler has run.
    pub(super) fn over(&self, gate: &OpenGate, key: u64) {
        self.tell(gate, BreakerEvent::Over { key });
    }

    /// Returns how many waiting messages may ask again now: all when the breaker is closed, one
    /// when a probe is due.
    pub(super) fn admits(&self) -> usize {
        match self.phase() {
            CircuitPhase::Closed => usize::MAX,
            CircuitPhase::Open { probe_at, .. } if probe_at <= Instant::now() => 1,
            CircuitPhase::Open { .. } | CircuitPhase::HalfOpen { .. } => 0,
        }
    }

    /// Returns the time of the next probe. The task of a probe that runs reports its end.
    pub(super) fn probe_at(&self) -> Option<std::time::Instant> {
        match self.phase() {
            CircuitPhase::Open { probe_at, .. } => Some(probe_at.into_std()),
            CircuitPhase::Closed | CircuitPhase::HalfOpen { .. } => None,
        }
    }

    /// Returns whether the last run has failed, which may be the beginning of an outage: a run of
    /// another key then says more than another run of a key that has failed already.
    pub(super) fn is_in_doubt(&self) -> bool {
        let state = self.state.lock();
        let has_failed = matches!(state.last.back(), Some((_, RunResult::Failure)));
        has_failed && state.phase == CircuitPhase::Closed
    }

    /// Returns whether a message that was admitted may still begin: the breaker has not opened
    /// since, or this message is the one that finds out whether the handler works again.
    pub(super) fn still_admits(&self, asking: u64) -> bool {
        match self.phase() {
            CircuitPhase::Closed => true,
            CircuitPhase::Open { .. } => false,
            CircuitPhase::HalfOpen { probe, .. } => probe == asking,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.phase() == CircuitPhase::Closed
    }

    /// Returns whether it keeps messages from running, for the status. An earlier process may have
    /// left it open, and no message may have come since: then nothing waits.
    pub(super) fn has_paused(&self) -> bool {
        match self.phase() {
            CircuitPhase::Closed => false,
            CircuitPhase::Open { pauses, .. } | CircuitPhase::HalfOpen { pauses, .. } => pauses > 0,
        }
    }

    /// Keeps the reason of a failure after which the breaker is open, and the time of the first.
    fn note_opened(&self, failure: Option<&Failure>) {
        let reason = failure.map_or_else(
            || "a handler panicked or was cancelled".to_owned(),
            Failure::reason,
        );
        let reason = beginning(&reason).to_owned();
        let mut opened = self.opened.lock();
        let at = opened
            .as_ref()
            .map_or_else(Instant::now, |before| before.at);
        *opened = Some(BreakerCause { at, reason });
    }

    /// Returns why and since when it keeps messages from running, and when the next one probes;
    /// `None` while it does not.
    pub(super) fn status(&self, now: Instant) -> Option<BreakerStatus> {
        if !self.has_paused() {
            return None;
        }
        let next_probe = match self.phase() {
            CircuitPhase::Open { probe_at, .. } => Some(probe_at.saturating_duration_since(now)),
            CircuitPhase::Closed | CircuitPhase::HalfOpen { .. } => None,
        };
        let opened = self.opened.lock();
        Some(BreakerStatus {
            lasts: opened
                .as_ref()
                .map(|opened| now.saturating_duration_since(opened.at)),
            reason: opened.as_ref().map(|opened| opened.reason.clone()),
            next_probe,
        })
    }

    fn phase(&self) -> CircuitPhase {
        self.state.lock().phase
    }

    /// Applies an event, and returns the phases before and after it.
    fn tell(&self, gate: &OpenGate, event: BreakerEvent) -> (CircuitPhase, CircuitPhase) {
        let Some(limits) = &self.limits else {
            return (CircuitPhase::Closed, CircuitPhase::Closed);
        };
        let (before, after) = {
            let mut state = self.state.lock();
            let before = state.phase;
            *state = apply(Instant::now(), limits, std::mem::take(&mut *state), event);
            if state.phase != before && matches!(event, BreakerEvent::Ran { .. }) {
                self.is_open
                    .send_replace(state.phase != CircuitPhase::Closed);
            }
            (before, state.phase)
        };
        let scope = gate.scope();
        let state = match (before, after) {
            (CircuitPhase::Closed, CircuitPhase::Open { .. }) => {
                warn!(
                    scope,
                    "the circuit breaker is open: the handler is paused, and one message at a time probes"
                );
                BreakerState::Open
            }
            (CircuitPhase::Open { .. }, CircuitPhase::HalfOpen { .. }) => BreakerState::HalfOpen,
            (CircuitPhase::HalfOpen { .. }, CircuitPhase::Open { .. }) => BreakerState::Open,
            (CircuitPhase::HalfOpen { .. }, CircuitPhase::Closed) => {
                info!(
                    scope,
                    "the circuit breaker is closed: the handler works again"
                );
                BreakerState::Closed
            }
            _ => return (before, after),
        };
        gate.observe(Event::BreakerChanged { scope, state });
        (before, after)
    }
}

#[cfg(test)]
mod tests;
