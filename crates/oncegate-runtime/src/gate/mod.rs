//! The gate: decides whether the handler runs for a message, and claims its key.
//!
//! Only the gate talks to a store. It knows no broker.
//!
//! # Not obvious
//!
//! Implementation notes: facts about claims and leases that this code depends on.
//!
//! - A claim whose answer was lost may have been granted. The next claim uses the same token. A
//!   dropped future leaves a pending operation to the lease renewer, which releases whatever that
//!   token was granted.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::key::{FingerprintSpec, Key, Scope};
use oncegate_core::settings::Finding;
use oncegate_core::store::{Checkup, Store};
use tokio::sync::OnceCell;

use crate::codec::Codec;
use crate::entropy::Entropy;
use crate::journal::Journal;
use crate::observe::{Counters, Observer};
use crate::results::ResultStore;

mod breaker_mark;
mod claim;
mod committed;
mod dead_letter_stop;
mod detached;
mod enter;
mod error;
mod fail_open;
mod journal;
mod lease;
mod lease_journal;
mod lease_renewer;
mod leases;
mod loss;
mod one_transaction;
mod open;
mod opening;
mod origin;
mod pause;
mod pending;
mod results;
mod scope_descriptor;
mod settings;
mod shard_markers;
mod store_position;
mod witnesses;

pub use crate::running::policy::AfterUnknown;
pub(crate) use claim::{Claimed, OpenClaim};
pub(crate) use committed::Committed;
pub use committed::NotCommitted;
pub use dead_letter_stop::replace_dead_letter_stop;
pub use enter::{Entry, Stored};
pub use error::GateError;
pub use lease::{Completion, Lease, ResultNotKept};
pub(crate) use lease_renewer::EXTENDS_PER_LEASE;
pub(crate) use one_transaction::{OnGrant, TransactionRun};
pub(crate) use open::{Identity, OpenGate};
pub use origin::CheckedSource;
pub use pause::{remove_pause, write_pause};
pub(crate) use results::Unfetched;
pub use settings::{GateSettings, OnStoreLoss, OtherBroker};
pub(crate) use store_position::StorePosition;

/// Decides for each message whether its handler runs.
///
/// It is made from a scope (the namespace of keys, one per logical consumer), a [`Key`] and a
/// [`Store`]. The settings are checked when the gate opens: by a `Consumer`, by
/// [`open`](Self::open), or at the first message.
///
/// ```
/// use std::time::Duration;
/// use oncegate::{Completion, Entry, Gate, Key, MemoryStore, Message, Origin};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), oncegate::BoxError> {
/// let gate = Gate::new("billing", Key::json(["order_id"]), MemoryStore::new())
///     .lease(Duration::from_secs(30))
///     .retention(Duration::from_secs(7 * 86_400));
///
/// let origin = Origin::Other("a loop of my own".into());
/// let message = Message::new("orders", origin, Some(r#"{"order_id": 7}"#.into()));
/// match gate.enter(&message).await? {
///     Entry::Granted(lease) => {
///         // … charge the card, with `lease.attempt().idempotency_key("charge")` …
///         if lease.complete("receipt 42").await? == Completion::Applied {
///             // … and only now acknowledge.
///         }
///     }
///     Entry::Completed(stored) => println!("done before: {}", stored.decode::<String>()?),
///     other => println!("not now, or not at all: {other:?}"),
/// }
/// assert!(matches!(gate.enter(&message).await?, Entry::Completed(_)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Gate {
    scope: String,
    key: Key,
    fingerprint: Option<FingerprintSpec>,
    pub(crate) settings: GateSettings,
    /// The time that the store may be away before messages run without it, which its consumer sets;
    /// `None`: messages always wait.
    fail_open_after: Option<Duration>,
    store: Arc<dyn Store>,
    results: Option<Arc<dyn ResultStore>>,
    journal: Option<Arc<dyn Journal>>,
    observer: Arc<dyn Observer>,
    entropy: Arc<Entropy>,
    heartbeats: lease_renewer::RenewerThread,
    opened: OnceCell<Arc<OpenGate>>,
}

impl Gate {
    /// Creates a gate for the keys of `scope`, derived by `key`, with records in `store`.
    ///
    /// The scope is 1 to 64 characters out of `A-Z a-z 0-9 . _ -`. Consumers with the same scope
    /// and store share their keys. With another scope, all completed records are unknown.
    pub fn new(scope: impl Into<String>, key: Key, store: impl Store + 'static) -> Self {
        Self {
            scope: scope.into(),
            key,
            fingerprint: None,
            settings: GateSettings::DEFAULT,
            fail_open_after: None,
            store: Arc::new(store),
            results: None,
            journal: None,
            observer: Arc::new(Counters::default()),
            entropy: Arc::default(),
            heartbeats: lease_renewer::RenewerThread::OwnThread,
            opened: OnceCell::new(),
        }
    }

    /// Sets all settings at once, such as those of a file.
    #[must_use]
    pub fn settings(mut self, settings: GateSettings) -> Self {
        self.settings = settings;
        self
    }

    /// Sets the [lease](GateSettings::lease): 30 s by default.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// Sets the [retention](GateSettings::retention) of completed records: 7 days by default.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.settings.retention = retention;
        self
    }

    /// Sets the [longest time of a run](GateSettings::max_run): 15 minutes by default.
    pub fn max_run(mut self, max_run: Duration) -> Self {
        self.settings.max_run = max_run;
        self
    }

    /// Gives each attempt a [fencing token](GateSettings::fenced),
    /// [`Attempt::fencing_token`](crate::Attempt::fencing_token). Off by default.
    pub fn fenced(mut self) -> Self {
        self.settings.fenced = true;
        self
    }

    /// Requires every handler to finish [in a transaction](GateSettings::transactional), by
    /// [`Attempt::commit_with`](crate::Attempt::commit_with) or
    /// [`Attempt::completing`](crate::Attempt::completing). Off by default.
    pub fn transactional(mut self) -> Self {
        self.settings.transactional = true;
        self
    }

    /// Sets what follows [an attempt without an outcome](field@GateSettings::after_unknown):
    /// [`AfterUnknown::Retry`] by default.
    pub fn after_unknown(mut self, after_unknown: AfterUnknown) -> Self {
        self.settings.after_unknown = after_unknown;
        self
    }

    /// Returns whether a message is given up after an attempt without an outcome.
    pub fn gives_up_unknown(&self) -> bool {
        self.settings.after_unknown() == AfterUnknown::GiveUp
    }

    /// Sets what happens [when the store has lost records](GateSettings::on_store_loss):
    /// [`OnStoreLoss::Halt`] by default.
    pub fn on_store_loss(mut self, on_store_loss: OnStoreLoss) -> Self {
        self.settings.on_store_loss = on_store_loss;
        self
    }

    /// Sets what it means that messages come [from another broker](GateSettings::other_broker) than
    /// those of the scope's records: [`OtherBroker::Refused`] by default.
    pub fn other_broker(mut self, other_broker: OtherBroker) -> Self {
        self.settings.other_broker = other_broker;
        self
    }

    /// Compares the rest of the payload as well: the same key with other content is then a
    /// mismatch, and goes to the dead letters instead of being answered with another message's
    /// result. Off by default.
    pub fn fingerprint(mut self, fingerprint: FingerprintSpec) -> Self {
        self.fingerprint = Some(fingerprint);
        self
    }

    /// Sets the encoding of results: JSON by default.
    pub fn codec(mut self, codec: Codec) -> Self {
        self.settings.codec = codec;
        self
    }

    /// Sets the [largest result of a record](GateSettings::max_result_bytes), in bytes: 64 KiB by
    /// default.
    pub fn max_result_bytes(mut self, bytes: usize) -> Self {
        self.settings.max_result_bytes = bytes;
        self
    }

    /// The store of results that are larger than a record keeps; the record keeps a reference. None
    /// by default.
    ///
    /// The result is stored before the record is completed. The effect has happened by then. So
    /// while the result store does not answer, the write is repeated for up to 30 s, under
    /// heartbeats; then the record is completed without its result, and this is counted. Duplicates
    /// read the result from there and verify its digest. A duplicate waits while the result store
    /// does not answer; a missing or damaged result goes to
    /// [`Handler::undecodable_duplicate`](crate::Handler::undecodable_duplicate).
    ///
    /// Results whose records have expired are deleted only by
    /// [`sweep_results`](Self::sweep_results).
    pub fn large_results(mut self, results: impl ResultStore + 'static) -> Self {
        self.results = Some(Arc::new(results));
        self
    }

    /// Sets the [largest result](GateSettings::max_large_result_bytes) that goes to the
    /// [`large_results`](Self::large_results), in bytes: 8 MiB by default.
    pub fn max_large_result_bytes(mut self, bytes: usize) -> Self {
        self.settings.max_large_result_bytes = bytes;
        self
    }

    /// The observer of this gate's events. A `Consumer` sets its own.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// A random number from 0 up to 1, for jitter.
    pub(crate) fn fraction(&self) -> f64 {
        self.entropy.fraction()
    }

    /// The namespace of its keys.
    pub fn scope(&self) -> &str {
        &self.scope
    }

    /// Returns the specification by which its keys are derived.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Returns how long one of its claims lasts without a heartbeat.
    pub fn lease_period(&self) -> Duration {
        self.settings.lease
    }

    /// Returns how long one run may take.
    pub fn run_period(&self) -> Duration {
        self.settings.max_run
    }

    /// Returns how long it keeps a completed record.
    pub fn retention_period(&self) -> Duration {
        self.settings.retention
    }

    /// The most bytes of a result that it keeps: in the record, or in its
    /// [`large_results`](Self::large_results).
    pub fn largest_result_bytes(&self) -> usize {
        let GateSettings {
            max_result_bytes,
            max_large_result_bytes,
            ..
        } = self.settings;
        if self.results.is_some() {
            max_result_bytes.max(max_large_result_bytes)
        } else {
            max_result_bytes
        }
    }

    /// The most bytes of a result in a record, and so of one that a transaction of the user
    /// completes.
    pub fn recorded_result_bytes(&self) -> usize {
        self.settings.max_result_bytes
    }

    /// Passes an event to the gate's observer.
    pub fn observe(&self, event: crate::observe::Event<'_>) {
        self.observer.observe(event);
    }

    /// Sets the observer. A gate that is open will be opened again, because its lease renewer has
    /// the old observer.
    pub(crate) fn set_observer(&mut self, observer: Arc<dyn Observer>) {
        self.observer = observer;
        self.opened = OnceCell::new();
    }

    /// Sets a consumer's choice to fail open. A gate that is open will be opened again.
    pub(crate) fn set_fail_open(&mut self, after: Duration) {
        self.fail_open_after = Some(after);
        self.opened = OnceCell::new();
    }

    /// The source of its random numbers.
    pub(crate) fn entropy(&self) -> Arc<Entropy> {
        Arc::clone(&self.entropy)
    }

    /// Takes tokens and jitter from a seed and sends heartbeats from the caller's runtime, so that
    /// a test on paused time runs the same way every time.
    #[cfg(feature = "testing")]
    pub fn simulated(mut self, seed: u64) -> Self {
        self.entropy = Arc::new(Entropy::Seeded(parking_lot::Mutex::new(
            fastrand::Rng::with_seed(seed),
        )));
        self.heartbeats = lease_renewer::RenewerThread::CallersRuntime;
        self
    }

    /// Checks the settings, the scope, the key and the fingerprint, as [`open`](Self::open) does
    /// first. It does not access the store.
    ///
    /// # Errors
    /// Returns the first defect found; the error names what to change.
    pub fn check(&self) -> Result<(), GateError> {
        self.check_settings()?;
        self.key.compile(&Scope::new(&self.scope)?)?;
        self.fingerprint
            .as_ref()
            .map(|spec| spec.compile(&self.key))
            .transpose()?;
        Ok(())
    }

    /// Checks the settings and the store, and compares the key specification with the one that the
    /// scope's records were made with.
    ///
    /// # Errors
    /// [`GateError`] names what to change. In that case nothing has been claimed.
    pub async fn open(&self) -> Result<Checkup, GateError> {
        Ok(self.opened().await?.checkup.clone())
    }

    pub(crate) async fn opened(&self) -> Result<&Arc<OpenGate>, GateError> {
        // Boxed: it happens once, and otherwise every message's future would be larger.
        self.opened
            .get_or_try_init(|| Box::pin(self.try_open()))
            .await
    }

    fn check_settings(&self) -> Result<(), GateError> {
        match self.settings.check().into_iter().next() {
            None => Ok(()),
            Some(Finding { what, .. }) => Err(GateError::Settings {
                scope: self.scope.clone(),
                what,
            }),
        }
    }
}
