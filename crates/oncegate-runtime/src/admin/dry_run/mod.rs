//! The dry run: checks whether a replay of these messages would run any handler a second time.
//!
//! It derives the key of every message as a consumer would, reads the record from the store, and counts what a claim
//! would return. It claims nothing and writes nothing, so it can run beside the consumers at any time.
//!
//! Its memory does not grow with the number of messages: it holds a few batches, two sets of bounded size, and a few
//! examples.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::key::{
    CompiledFingerprint, CompiledKey, Descriptor, Digest, Fingerprint, FingerprintSpec, Key, KeyError,
    KeySpecError, Scope, StoreKey,
};
use oncegate_core::record::{State, StoreTime, Token};
use oncegate_core::rules::{Operation, Reply, Verdict, apply};
use oncegate_core::store::{RecordSnapshot, ScopeDescriptor, Store, StoreError};
use serde::Deserialize;
use tokio_util::task::AbortOnDropHandle;

use crate::backoff::Backoff;
use crate::message::{Message, Origin};

mod distinct;
mod report;

pub use report::{Example, Examples, ReplayReport};

use distinct::Distinct;
use report::Standing;

/// The number of keys of one read.
const LOOK_KEYS_MAX: usize = 1_000;

/// The most reads in flight.
const LOOKS_IN_FLIGHT_MAX: usize = 8;

/// The most tries of a read without an answer, with the waits of [`PATIENCE`] between: some ten seconds in all.
const LOOK_TRIES: u32 = 8;
const PATIENCE: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(4));

/// The number of distinct keys that are counted exactly; more are estimated.
const EXACT_RERUN_KEYS_MAX: usize = 131_072;

/// Settings of a dry run, which checks that the messages of a scope, by this key, are completed in this store.
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
    /// 1,000,000: the set of their digests takes 36 MB at the most.
    const DEFAULT_EXACT_KEYS_MAX: usize = 1_000_000;

    /// Takes the same scope, key and store as the [`Gate`](crate::Gate) whose work is to be checked.
    pub fn new(scope: impl Into<String>, key: Key, store: impl Store + 'static) -> Self {
        Self {
            scope: scope.into(),
            key,
            fingerprint: None,
            store: Arc::new(store),
            exact_keys_max: Self::DEFAULT_EXACT_KEYS_MAX,
        }
    }

    /// Compares the rest of the payload as well, as the gate does. Default: off. Then a message that would be a
    /// mismatch counts by the state of its record.
    pub fn fingerprint(mut self, fingerprint: FingerprintSpec) -> Self {
        self.fingerprint = Some(fingerprint);
        self
    }

    /// The number of distinct keys that are counted exactly, with 20 to 39 bytes each. More keys are estimated, with a
    /// standard error of 0.81 %. Default: a million.
    #[cfg(test)]
    fn exact_keys_max(mut self, keys: usize) -> Self {
        self.exact_keys_max = keys;
        self
    }

    /// Checks the specifications, and compares them with those that the scope's records were made with.
    ///
    /// # Errors
    /// The text of the [`DryRunError`] names what to change.
    pub async fn open(self) -> Result<Examination, DryRunError> {
        let scope = Scope::new(&self.scope)?;
        let key = self.key.compile(&scope)?;
        let fingerprint = self.fingerprint.as_ref().map(|spec| spec.compile(&self.key)).transpose()?;
        let ours = Descriptor::new(&self.key, self.fingerprint.as_ref())?;
        let known =
            match self.store.descriptor(&scope).await? {
                None => Known::Nothing,
                Some(held) => {
                    let held = ScopeDescriptor::parse(&scope, &held)?.keys;
                    compare(&held, &ours, self.fingerprint.is_some()).ok_or_else(|| {
                        DryRunError::OtherKey { scope: self.scope, held, ours: ours.to_string() }
                    })?
                }
            };
        let judge = Judge { key, fingerprint, store: self.store };
        Ok(Examination {
            judge: Arc::new(judge),
            known,
            looks: VecDeque::new(),
            report: ReplayReport::default(),
            distinct: Distinct::new(self.exact_keys_max),
            rerun: Distinct::new(EXACT_RERUN_KEYS_MAX),
        })
    }
}

/// What the store knows of the scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// Its records were made with exactly these specifications.
    Same,
    /// Its keys are the same, but its gate compares content by another fingerprint than this dry run: none, or one
    /// that was not given here.
    OtherFingerprint,
    /// No gate has ever opened the scope in this store: every message would run.
    Nothing,
}

/// `None` when the keys differ. A custom key is compared by its name and version only.
fn compare(held: &str, ours: &Descriptor, fingerprinted: bool) -> Option<Known> {
    /// The parts of a [`Descriptor`].
    #[derive(Deserialize, PartialEq)]
    struct Parts {
        format: u64,
        key: serde_json::Value,
    }
    if held == ours.as_str() {
        return Some(Known::Same);
    }
    let parts = |text: &str| serde_json::from_str::<Parts>(text).ok();
    // With another fingerprint than the gate's, every comparison would be meaningless.
    let same_keys = !fingerprinted && parts(held)? == parts(ours.as_str())?;
    same_keys.then_some(Known::OtherFingerprint)
}

/// An open dry run, to which messages are added.
///
/// Separate tasks examine the added messages while more are fetched. Dropping it ends them.
#[derive(Debug)]
pub struct Examination {
    judge: Arc<Judge>,
    known: Known,
    looks: VecDeque<AbortOnDropHandle<Result<Vec<MessageFinding>, StoreError>>>,
    report: ReplayReport,
    distinct: Distinct,
    rerun: Distinct,
}

impl Examination {
    /// What the store knows of the scope.
    pub fn known(&self) -> Known {
        self.known
    }

    /// Examines messages; waits while more than a few thousand are in flight.
    ///
    /// If the future is dropped, some of them are not counted.
    ///
    /// # Errors
    /// When the store did not answer for some ten seconds, or refuses: then there is no report.
    pub async fn add(&mut self, messages: Vec<Message>) -> Result<(), DryRunError> {
        let mut messages = messages.into_iter();
        loop {
            let some: Vec<Message> = messages.by_ref().take(LOOK_KEYS_MAX).collect();
            if some.is_empty() {
                return Ok(());
            }
            while self.looks.len() >= LOOKS_IN_FLIGHT_MAX {
                self.settle_oldest().await?;
            }
            let judge = Arc::clone(&self.judge);
            let look = tokio::spawn(async move { judge.examine(some).await });
            self.looks.push_back(AbortOnDropHandle::new(look));
        }
    }

    /// Waits for the messages in flight, and returns the report.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub async fn finish(mut self) -> Result<ReplayReport, DryRunError> {
        while !self.looks.is_empty() {
            self.settle_oldest().await?;
        }
        (self.report.distinct_keys, self.report.distinct_keys_exact) = self.distinct.count();
        let (keys, exact) = self.rerun.count();
        self.report.would_run_again_keys = keys;
        self.report.would_run_again_keys_exact = exact;
        Ok(self.report)
    }

    /// Counts in the order of the messages, so that the examples are the first ones.
    async fn settle_oldest(&mut self) -> Result<(), DryRunError> {
        let Some(oldest) = self.looks.front_mut() else { return Ok(()) };
        let findings = match oldest.await {
            Ok(findings) => findings?,
            Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
            Err(_) => return Err(StoreError::unavailable("the runtime is shutting down").into()),
        };
        self.looks.pop_front();
        for finding in findings {
            self.count(&finding);
        }
        Ok(())
    }

    fn count(&mut self, finding: &MessageFinding) {
        let MessageFinding { origin, digest, standing, uncompared } = finding;
        if let Some(digest) = *digest {
            self.distinct.insert(digest);
            if matches!(standing, Standing::WithoutRecord | Standing::Abandoned | Standing::RetryDue) {
                self.rerun.insert(digest);
            }
        }
        self.report.uncompared += u64::from(*uncompared);
        let scope = self.judge.key.scope();
        self.report.count(standing, |why| Example {
            origin: origin.to_string(),
            key: digest.map(|digest| StoreKey::new(scope, digest).to_string()),
            why: why.to_owned(),
        });
    }
}

/// The result for one message.
#[derive(Debug)]
struct MessageFinding {
    origin: Origin,
    digest: Option<Digest>,
    standing: Standing,
    uncompared: bool,
}

/// Finds out what a claim would return.
#[derive(Debug)]
struct Judge {
    key: CompiledKey,
    fingerprint: Option<CompiledFingerprint>,
    store: Arc<dyn Store>,
}

/// The identity of a message.
type Identity = (StoreKey, Option<Fingerprint>);

impl Judge {
    async fn examine(&self, messages: Vec<Message>) -> Result<Vec<MessageFinding>, StoreError> {
        let identified: Vec<(Origin, Result<Identity, KeyError>)> =
            messages.iter().map(|message| (message.origin().clone(), self.identify(message))).collect();
        // The payloads are not needed any more, and reads may take long.
        drop(messages);
        let keys = identified.iter().filter_map(|(_, identity)| Some(identity.as_ref().ok()?.0.clone()));
        let mut records = self.read(keys.collect()).await?.into_iter();
        let find = |(origin, identity)| match identity {
            Ok((key, fingerprint)) => {
                let record = records.next().expect("there is one answer for each key");
                let (standing, uncompared) = judge(record, fingerprint);
                MessageFinding { origin, digest: Some(StoreKey::digest(&key)), standing, uncompared }
            }
            Err(error) => {
                let standing = Standing::Undecodable { kind: KeyError::kind(&error), why: error.to_string() };
                MessageFinding { origin, digest: None, standing, uncompared: false }
            }
        };
        Ok(identified.into_iter().map(find).collect())
    }

    /// Derives key and fingerprint as a gate does.
    fn identify(&self, message: &Message) -> Result<Identity, KeyError> {
        let key = self.key.derive(message.route(), message)?;
        let fingerprint =
            self.fingerprint.as_ref().map(|fingerprint| fingerprint.derive(message)).transpose()?;
        Ok((key, fingerprint))
    }

    /// The records of the keys, in their order; an unreadable record is an answer too.
    async fn read(&self, keys: Vec<StoreKey>) -> Result<Vec<Seen>, StoreError> {
        let mut seen: Vec<Option<Seen>> = keys.iter().map(|_| None).collect();
        let mut failures = 0;
        loop {
            let open: Vec<StoreKey> = keys
                .iter()
                .zip(&seen)
                .filter(|(_, seen)| seen.is_none())
                .map(|(key, _)| key.clone())
                .collect();
            if open.is_empty() {
                return Ok(seen.into_iter().flatten().collect());
            }
            let asked = open.len();
            let answers = self.store.read(open).await;
            if answers.len() != asked {
                return Err(StoreError::refused(format!(
                    "it gave {} answers for {asked} keys",
                    answers.len()
                )));
            }
            let mut unanswered = None;
            for (slot, answer) in seen.iter_mut().filter(|slot| slot.is_none()).zip(answers) {
                match answer {
                    Ok(record) => *slot = Some(Ok(record)),
                    Err(StoreError::Unreadable { reason, .. }) => *slot = Some(Err(reason)),
                    Err(error @ StoreError::Refused { .. }) => return Err(error),
                    Err(error) => unanswered = Some(error),
                }
            }
            if let Some(error) = unanswered {
                failures += 1;
                if failures == LOOK_TRIES {
                    return Err(error);
                }
                tokio::time::sleep(PATIENCE.wait(failures, fastrand::f64())).await;
            }
        }
    }
}

/// A record, or why it cannot be read.
type Seen = Result<Option<RecordSnapshot>, Arc<str>>;

/// Returns what a claim would return by the rules, and discards its changes.
///
/// Also returns whether the contents could not be compared although a fingerprint was given.
fn judge(seen: Seen, fingerprint: Option<Fingerprint>) -> (Standing, bool) {
    let snapshot = match seen {
        Ok(snapshot) => snapshot,
        Err(reason) => return (Standing::Unreadable(reason.as_ref().to_owned()), false),
    };
    // Without a record, no lease is compared with the time.
    let now = snapshot.as_ref().map_or(StoreTime::default(), |snapshot| snapshot.now);
    let record = snapshot.map(|snapshot| snapshot.record);
    let (granted, busy) = match record.as_ref().map(|record| &record.state) {
        None => (Standing::WithoutRecord, Standing::Waiting),
        Some(State::Pending { .. }) => (Standing::Abandoned, Standing::InProgress),
        Some(_) => (Standing::RetryDue, Standing::Waiting),
    };
    // No owner has this token, because tokens are random.
    let stranger = Token::from_bits(0);
    let claim = Operation::Claim {
        token: stranger,
        lease: Duration::ZERO,
        fingerprint,
        fenced: false,
        longest_lease: Duration::MAX,
    };
    let (_, Reply::Verdict { verdict, uncompared }) = apply(now, record, &claim) else {
        unreachable!("the answer to a claim is a verdict");
    };
    let standing = match verdict {
        Verdict::Granted(_) => granted,
        Verdict::Busy { .. } => busy,
        Verdict::Completed { .. } => Standing::Completed,
        Verdict::Failed { handed_over, .. } => Standing::Failed { handed_over },
        Verdict::Mismatch => Standing::Mismatched,
    };
    (standing, uncompared && fingerprint.is_some())
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DryRunError {
    /// The scope, key or fingerprint specification is invalid.
    #[error(transparent)]
    Specification(#[from] KeySpecError),
    /// The records of this scope were made with another specification: with this one, none would be found.
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
