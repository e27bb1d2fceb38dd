//! A run of a handler under a lease.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use oncegate_core::record::FencingToken;
use oncegate_core::rules::Grant;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::cancellation::Cancellation;
use crate::completing::RunCompletion;

/// The longest time that a handler may continue after its cancellation, before its future is
/// dropped.
pub const CANCELLATION_GRACE: Duration = Duration::from_secs(5);

/// A run of a handler under a lease: its number, cancellation, fencing token and idempotency keys.
///
/// A handler receives it with its message; your own loop gets it from
/// [`Lease::attempt`](crate::Lease::attempt), and an HTTP handler finds it in the extensions of its
/// request. Cheap to clone.
///
/// A message alone has no attempt, so none of these methods exists on it:
///
/// ```compile_fail,E0599
/// # fn example(message: &oncegate::Message) {
/// message.idempotency_key("charge");
/// # }
/// ```
/// ```compile_fail,E0599
/// # fn example(message: &oncegate::Message) {
/// message.attempt();
/// # }
/// ```
/// ```compile_fail,E0599
/// # async fn example(message: &oncegate::Message) {
/// message.cancelled().await;
/// # }
/// ```
/// ```compile_fail,E0599
/// # fn example(message: &oncegate::Message) {
/// message.completing(&());
/// # }
/// ```
/// On the attempt, they compile:
///
/// ```
/// # async fn example(attempt: &oncegate::Attempt) {
/// attempt.idempotency_key("charge");
/// attempt.number();
/// attempt.completing(&());
/// attempt.cancelled().await;
/// # }
/// ```
#[derive(Clone)]
pub struct Attempt {
    run: Arc<GrantedRun>,
}

/// The grant of the gate.
#[derive(Debug)]
struct GrantedRun {
    grant: Grant,
    /// `true` when an earlier attempt may have had its effect, although the record does not hold
    /// one.
    recovered: AtomicBool,
    /// The time at which the handler was called; `None` before that.
    began: Mutex<Option<Instant>>,
    cancellation: Cancellation,
    completion: RunCompletion,
    /// `true` when the attempt runs without the store.
    fail_open: bool,
    /// Set when no handler may begin any more; for handlers that begin after a wait for their
    /// transaction.
    stops: Option<Arc<AtomicBool>>,
}

impl Attempt {
    pub(crate) fn new(
        grant: Grant,
        cancellation: Cancellation,
        completion: RunCompletion,
        fail_open: bool,
        stops: Option<Arc<AtomicBool>>,
    ) -> Self {
        let recovered = AtomicBool::new(grant.recovery.recovered());
        Self {
            run: Arc::new(GrantedRun {
                grant,
                recovered,
                began: Mutex::new(None),
                cancellation,
                completion,
                fail_open,
                stops,
            }),
        }
    }

    /// Flags the attempt as recovered: an earlier attempt may have had its effect, although the
    /// record does not hold one.
    pub(crate) fn mark_recovered(&self) {
        self.run.recovered.store(true, Relaxed);
    }

    /// Returns whether the consumer stops, so that no handler may begin.
    pub(crate) fn is_stopped(&self) -> bool {
        let stops = self.run.stops.as_ref();
        stops.is_some_and(|stops| stops.load(Relaxed))
    }

    /// Notes that the handler is called.
    pub(crate) fn begin(&self, now: Instant) {
        *self.run.began.lock() = Some(now);
    }

    /// Returns when the handler was called last.
    pub(crate) fn began(&self) -> Option<Instant> {
        *self.run.began.lock()
    }

    pub(crate) fn cancellation(&self) -> &Cancellation {
        &self.run.cancellation
    }

    pub(crate) fn completion(&self) -> &RunCompletion {
        &self.run.completion
    }

    /// The number of this attempt of the key, from 1. It is counted in the record, so it survives
    /// crashes and restarts.
    ///
    /// Attempts that cost nothing have the number of the one before: those that an outage or a stop
    /// cut short, and those that fail while the [circuit breaker](crate::consumer::Breaker) is
    /// open.
    pub fn number(&self) -> u32 {
        u32::from(self.run.grant.attempt)
    }

    /// Returns whether an earlier attempt ended without an outcome, so that its effect may have
    /// happened.
    ///
    /// A handler that can ask its downstream system "did this happen?" should ask when this is
    /// true.
    ///
    /// Every attempt that [runs without its store](Self::is_fail_open) returns `true`, because the
    /// record is unknown then.
    pub fn recovered(&self) -> bool {
        self.run.fail_open || self.run.recovered.load(Relaxed)
    }

    /// Returns whether the attempt runs without its store, which is away, because the consumer
    /// [fails open](crate::Consumer::fail_open_after): the message may have run before, run
    /// elsewhere now, or run again.
    pub fn is_fail_open(&self) -> bool {
        self.run.fail_open
    }

    /// The fencing token, a number that only grows for this key, when the gate is
    /// [`fenced`](crate::Gate::fenced). A downstream system that remembers the largest one it saw
    /// can refuse a stale worker.
    pub fn fencing_token(&self) -> Option<u64> {
        self.run
            .grant
            .fencing_token
            .map(|FencingToken(number)| number)
    }

    /// An idempotency key to pass to a downstream system, in the form of a UUID (version 8).
    ///
    /// It is the same for every attempt and every delivery of the message, and differs between
    /// steps: two effects of one message must not share one.
    pub fn idempotency_key(&self, step: &str) -> String {
        idempotency_key(self.run.completion.key.as_str(), step)
    }

    /// Resolves when the run should stop: its lease is lost or may be, it has run for too long, or
    /// the consumer's stop deadline is over.
    ///
    /// If it is certain that the result cannot be used ([`discarded`](Self::discarded)), the
    /// handler's future is dropped a little later. It is not certain while the store gives no
    /// answer: another process may have taken over by now. A handler that goes on and returns `Ok`
    /// completes its message when the store answers, if none has.
    pub async fn cancelled(&self) {
        self.run.cancellation.cancelled().cancelled().await;
    }

    /// Resolves when the run should stop and its result would not be used; then
    /// [`cancelled`](Self::cancelled) has resolved, too. For a handler that waits for the answer of
    /// another program, and would throw it away.
    pub async fn discarded(&self) {
        self.run.cancellation.discarded().cancelled().await;
    }

    /// Returns whether the run was cancelled because it has lasted longer than the gate's
    /// [`max_run`](crate::GateSettings::max_run).
    pub fn is_overrun(&self) -> bool {
        self.run.cancellation.is_overrun()
    }

    /// Returns whether [`cancelled`](Self::cancelled) would resolve at once; for handlers that
    /// block their thread.
    pub fn is_cancelled(&self) -> bool {
        self.run.cancellation.is_cancelled()
    }
}

impl fmt::Debug for Attempt {
    /// Shows nothing that could complete the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("number", &self.number())
            .field("recovered", &self.recovered())
            .finish_non_exhaustive()
    }
}

fn idempotency_key(identity: &str, step: &str) -> String {
    uuid(idempotency_bits(identity, step))
}

/// Returns the text form of a UUID.
pub fn uuid(bits: u128) -> String {
    let [a, b, c, d, e] = [
        bits >> 96,
        bits >> 80 & 0xffff,
        bits >> 64 & 0xffff,
        bits >> 48 & 0xffff,
        bits & 0xffff_ffff_ffff,
    ];
    format!("{a:08x}-{b:04x}-{c:04x}-{d:04x}-{e:012x}")
}

/// Returns the idempotency key of a step of the message with this store key, as the 128 bits of its
/// UUID: an audit compares effects by it.
pub fn idempotency_bits(identity: &str, step: &str) -> u128 {
    let mut hasher = blake3::Hasher::new_derive_key("oncegate v1 downstream key");
    for part in [identity, step] {
        hasher.update(&(part.len() as u64).to_be_bytes());
        hasher.update(part.as_bytes());
    }
    let mut bits = [0; 16];
    hasher.finalize_xof().fill(&mut bits);
    // The version and variant of RFC 9562, so that systems that want a UUID accept it.
    u128::from_be_bytes(bits) & !(0xf << 76) & !(0x3 << 62) | (0x8 << 76) | (0x2 << 62)
}
