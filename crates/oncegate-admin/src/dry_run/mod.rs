//! The dry run: checks whether a replay of these messages would run any handler a second time.
//!
//! It derives the key of every message as a consumer would, reads the record from the store, and
//! counts the answers that a claim would get. It claims nothing and writes nothing, so it can run
//! beside the consumers at any time.
//!
//! The memory does not grow with the number of messages: a dry run holds a few batches, two sets of
//! bounded size, and a few examples.

use std::sync::Arc;

use oncegate_core::key::{FingerprintSpec, Key, KeySpecError, Scope, StoreKey};
use oncegate_core::store::{Store, StoreError};

use oncegate_runtime::message::Message;

mod distinct;
mod lookups;
mod report;
mod selection;

pub(super) use lookups::{LOOK_TRIES, Lookups, MessageFinding, PATIENCE, Subject};
pub(super) use report::Standing;
pub use report::{Example, Examples, ReplayReport};
pub use selection::{RunAgain, Selector};

use distinct::Distinct;

/// The number of distinct keys that are counted exactly; more are estimated.
const EXACT_RERUN_KEYS_MAX: usize = 131_072;

/// Settings of a dry run, which checks that the messages of a scope, by this key, are completed in
/// this store.
///
/// ```
/// use oncegate::admin::dry_run::DryRun;
/// use oncegate::{Completion, Entry, Gate, Key, MemoryStore, Message, Origin};
/// use std::sync::Arc;
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), oncegate::BoxError> {
/// let message = |id: u64| {
///     let origin = Origin::Other(format!("line {id}").into());
///     Message::new("orders", origin, Some(format!(r#"{{"order_id": {id}}}"#).into()))
/// };
/// let store = Arc::new(MemoryStore::new());
/// let gate = Gate::new("billing", Key::json(["order_id"]), Arc::clone(&store));
/// if let Entry::Granted(lease) = gate.enter(&message(7)).await? {
///     assert_eq!(lease.complete(&()).await?, Completion::Applied);
/// }
///
/// let mut examination = DryRun::new("billing", Key::json(["order_id"]), store).open().await?;
/// examination.add(vec![message(7), message(7), message(8)]).await?;
/// let report = examination.finish().await?;
/// assert_eq!((report.messages, report.completed, report.would_run_again), (3, 2, 1));
/// assert_eq!(report.examples.would_run_again[0].origin, "line 8");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DryRun {
    scope: String,
    key: Key,
    fingerprint: Option<FingerprintSpec>,
    store: Arc<dyn Store>,
    exact_keys_max: usize,
}

impl DryRun {
    /// The default of the keys that are counted exactly: 1,000,000. The set of their digests takes
    /// 36 MB at the most.
    const DEFAULT_EXACT_KEYS_MAX: usize = 1_000_000;

    /// Takes the same scope, key and store as the [`Gate`](oncegate_runtime::Gate) whose work is to
    /// be checked.
    pub fn new(scope: impl Into<String>, key: Key, store: impl Store + 'static) -> Self {
        Self {
            scope: scope.into(),
            key,
            fingerprint: None,
            store: Arc::new(store),
            exact_keys_max: Self::DEFAULT_EXACT_KEYS_MAX,
        }
    }

    /// Compares the rest of the payload as well, as the gate does. Default: off. Then a message
    /// that would be a mismatch counts by the state of its record.
    pub fn fingerprint(mut self, fingerprint: FingerprintSpec) -> Self {
        self.fingerprint = Some(fingerprint);
        self
    }

    /// The number of distinct keys that are counted exactly, with 20 to 39 bytes each. More keys
    /// are estimated, with a standard error of 0.81 %. Default: a million.
    #[cfg(test)]
    fn exact_keys_max(mut self, keys: usize) -> Self {
        self.exact_keys_max = keys;
        self
    }

    fn subject(self) -> Subject {
        let Self {
            scope,
            key,
            fingerprint,
            store,
            ..
        } = self;
        Subject {
            scope,
            key,
            fingerprint,
            store,
        }
    }

    /// Checks the specifications, and compares them with those that the scope's records were made
    /// with.
    ///
    /// # Errors
    /// The text of the [`DryRunError`] names what to change.
    pub async fn open(self) -> Result<Examination, DryRunError> {
        let exact_keys_max = self.exact_keys_max;
        let lookups = Lookups::open(self.subject()).await?;
        Ok(Examination {
            lookups,
            counts: Counts {
                report: ReplayReport::default(),
                distinct: Distinct::new(exact_keys_max),
                rerun: Distinct::new(EXACT_RERUN_KEYS_MAX),
            },
        })
    }
}

/// The store's knowledge of the scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// The records of the scope were made with exactly these specifications.
    Same,
    /// The keys of the scope are the same, but its gate compares content by another fingerprint
    /// than this dry run: none, or one that was not given here.
    OtherFingerprint,
    /// No gate has ever opened the scope in this store: every message would run.
    Nothing,
}

/// An open dry run, to which messages are added.
///
/// Separate tasks examine the added messages while more are fetched. Dropping it ends them.
#[derive(Debug)]
pub struct Examination {
    lookups: Lookups,
    counts: Counts,
}

#[derive(Debug)]
struct Counts {
    report: ReplayReport,
    distinct: Distinct,
    rerun: Distinct,
}

impl Examination {
    /// Returns the store's knowledge of the scope.
    pub fn known(&self) -> Known {
        self.lookups.known()
    }

    /// Examines messages; waits while more than a few thousand are in flight.
    ///
    /// If the future is dropped, some of them are not counted.
    ///
    /// # Errors
    /// When the store did not answer for some ten seconds, or refuses: then there is no report.
    pub async fn add(&mut self, messages: Vec<Message>) -> Result<(), DryRunError> {
        let Self { lookups, counts } = self;
        let scope = lookups.scope().clone();
        lookups
            .add(messages, |finding| counts.count(&scope, &finding))
            .await
    }

    /// Waits for the messages in flight, and returns the report.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub async fn finish(mut self) -> Result<ReplayReport, DryRunError> {
        let Self { lookups, counts } = &mut self;
        let scope = lookups.scope().clone();
        // In the order of the messages, so that the examples are the first ones.
        lookups
            .finish(|finding| counts.count(&scope, &finding))
            .await?;
        let Counts {
            mut report,
            distinct,
            rerun,
        } = self.counts;
        (report.distinct_keys, report.distinct_keys_exact) = distinct.count();
        (
            report.would_run_again_keys,
            report.would_run_again_keys_exact,
        ) = rerun.count();
        Ok(report)
    }
}

impl Counts {
    fn count(&mut self, scope: &Scope, finding: &MessageFinding) {
        let MessageFinding {
            origin,
            digest,
            standing,
            uncompared,
            ..
        } = finding;
        if let Some(digest) = *digest {
            self.distinct.insert(digest);
            if matches!(
                standing,
                Standing::WithoutRecord | Standing::Abandoned | Standing::RetryDue
            ) {
                self.rerun.insert(digest);
            }
        }
        self.report.uncompared += u64::from(*uncompared);
        self.report.count(standing, |why| Example {
            origin: origin.to_string(),
            key: digest.map(|digest| StoreKey::new(scope, digest).to_string()),
            why: why.to_owned(),
        });
    }
}

/// The reason that there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DryRunError {
    /// The scope, key or fingerprint specification is invalid.
    #[error(transparent)]
    Specification(#[from] KeySpecError),
    /// The records of this scope were made with another specification: with this one, none would be
    /// found.
    #[error(
        "the records of scope `{scope}` were made by another specification of key or fingerprint; give that one.\n  the store has: {held}\n  given:         {ours}"
    )]
    OtherKey {
        /// The scope.
        scope: String,
        /// The specification in the store.
        held: String,
        /// The specification that was given.
        ours: String,
    },
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

#[cfg(test)]
mod tests;
