//! Completes the records of messages whose effects the downstream system has.
//!
//! It is for the time after a loss of records: a replay would run every message of the window
//! again. With the list of effects, the records of those that have happened are written first, and
//! a replay runs what is missing. It is also for work that was done by hand.
//!
//! A record that is written is final, so this can be stopped at any moment and started again: the
//! next run finds what is completed. Memory: 17 bytes for each effect, and a few thousand messages.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use oncegate_core::key::{Fingerprint, FingerprintSpec, Key, StoreKey};
use oncegate_core::rules::Reply;
use oncegate_core::store::{Command, Store, StoreError};
use serde::Serialize;

use super::audit::Audit;
use super::dry_run::{
    DryRunError, Known, LOOK_TRIES, Lookups, MessageFinding, PATIENCE, Standing, Subject,
};
use super::{Decided, Decision, decide, read};
use oncegate_runtime::GateSettings;
use oncegate_runtime::attempt::idempotency_bits;
use oncegate_runtime::message::Message;

mod effects;

pub use effects::Effects;

use effects::SortedEffects;

/// The most records that are written by one call of the store.
const WRITES_MOST: usize = 1_000;

/// The most records in flight that are read, compared and written one by one.
const ONE_BY_ONE: usize = 32;

/// The examples of each kind that a report has.
const EXAMPLES_MOST: usize = 20;

/// Settings of a completion by effects.
///
/// ```
/// use oncegate::admin::complete::CompleteEffects;
/// use oncegate::{Entry, Gate, Key, MemoryStore, Message, Origin};
/// use std::sync::Arc;
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), oncegate::BoxError> {
/// let message = |id: i64| {
///     let origin = Origin::Kafka { topic: "orders".into(), partition: 0, offset: id };
///     Message::new("orders", origin, Some(format!(r#"{{"order_id": {id}}}"#).into()))
/// };
/// // Before the loss, message 7 was charged.
/// let lost = Gate::new("billing", Key::json(["order_id"]), MemoryStore::new());
/// let Entry::Granted(lease) = lost.enter(&message(7)).await? else { panic!("it is new") };
/// let charges = [lease.attempt().idempotency_key("charge")];
///
/// let store = Arc::new(MemoryStore::new());
/// let settings = CompleteEffects::new("billing", Key::json(["order_id"]), Arc::clone(&store));
/// let effects = charges.iter().map(String::as_str);
/// let mut completing = settings.step("charge").open(effects).await?;
/// completing.add(vec![message(7), message(8)]).await?;
/// let report = completing.finish().await?;
/// assert_eq!((report.messages, report.completed, report.without_effect), (2, 1, 1));
///
/// let gate = Gate::new("billing", Key::json(["order_id"]), store);
/// assert!(matches!(gate.enter(&message(7)).await?, Entry::Completed(_)));
/// assert!(matches!(gate.enter(&message(8)).await?, Entry::Granted(_)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CompleteEffects {
    subject: Subject,
    step: String,
    retention: Duration,
    dry_run: bool,
}

impl CompleteEffects {
    /// Takes the same scope, key and store as the [`Gate`](oncegate_runtime::Gate) whose messages
    /// they are.
    pub fn new(scope: impl Into<String>, key: Key, store: impl Store + 'static) -> Self {
        let subject = Subject {
            scope: scope.into(),
            key,
            fingerprint: None,
            store: Arc::new(store),
        };
        Self {
            subject,
            step: Audit::DEFAULT_STEP.to_owned(),
            retention: GateSettings::DEFAULT.retention,
            dry_run: false,
        }
    }

    /// Gives the records the fingerprint that the gate compares. Default: none.
    #[must_use]
    pub fn fingerprint(mut self, fingerprint: FingerprintSpec) -> Self {
        self.subject.fingerprint = Some(fingerprint);
        self
    }

    /// The step of [`Attempt::idempotency_key`](oncegate_runtime::Attempt::idempotency_key) under
    /// which the downstream system has the effects. Default:
    /// [`Audit::DEFAULT_STEP`](crate::audit::Audit::DEFAULT_STEP).
    #[must_use]
    pub fn step(mut self, step: impl Into<String>) -> Self {
        self.step = step.into();
        self
    }

    /// The time for which the records are kept, seven days by default. Take the gate's.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// Makes it a dry run, which only counts.
    #[must_use]
    pub fn dry_run(mut self) -> Self {
        self.dry_run = true;
        self
    }

    /// Checks the specifications, compares them with those that the scope's records were made with,
    /// and takes the idempotency keys of the effects. A text that is not a UUID is an effect of no
    /// message.
    ///
    /// # Errors
    /// The text of the [`DryRunError`] names what to change.
    pub async fn open<'a>(
        self,
        effects: impl IntoIterator<Item = &'a str> + Send,
    ) -> Result<CompletingEffects, DryRunError> {
        let effects = Effects::of(effects);
        self.open_with(effects).await
    }

    /// Opens it with effects that were collected before.
    ///
    /// # Errors
    /// As of [`open`](Self::open).
    pub async fn open_with(self, effects: Effects) -> Result<CompletingEffects, DryRunError> {
        let Self {
            subject,
            step,
            retention,
            dry_run,
        } = self;
        let lookups = Lookups::open(subject).await?;
        let report = CompletionReport {
            effects: effects.count(),
            ..CompletionReport::default()
        };
        Ok(CompletingEffects {
            store: lookups.store(),
            lookups,
            effects: effects.sorted(),
            step,
            retention,
            dry_run,
            report,
        })
    }
}

/// The counts of a completion by effects. Of several messages with one key, the first one counts,
/// and the others are `repeated`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CompletionReport {
    /// Messages that were read.
    pub messages: u64,
    /// Effects in the list.
    pub effects: u64,
    /// Records that were written, or would be.
    pub completed: u64,
    /// Of these, records of messages that had failed, or waited for another attempt.
    pub of_records: u64,
    /// Messages with an effect that were completed before.
    pub completed_before: u64,
    /// Messages with an effect of which an attempt runs, so that they were left alone.
    pub running: u64,
    /// Messages without an effect in the list, which were left as they are.
    pub without_effect: u64,
    /// Messages whose key another message of the window has.
    pub repeated: u64,
    /// Messages whose key has a record of other content.
    pub mismatched: u64,
    /// Messages without a key.
    pub without_key: u64,
    /// Messages with an effect whose records cannot be read.
    pub unreadable: u64,
    /// Effects of no message that was read, and texts that are no idempotency key.
    pub unexplained: u64,
    /// The first messages of `running`, `mismatched` and `unreadable`, by their origin.
    pub examples: Vec<String>,
}

/// An open completion, to which messages are added.
#[derive(Debug)]
pub struct CompletingEffects {
    store: Arc<dyn Store>,
    lookups: Lookups,
    effects: SortedEffects,
    step: String,
    retention: Duration,
    dry_run: bool,
    report: CompletionReport,
}

/// A message whose record is to be completed.
#[derive(Debug)]
struct Happened {
    key: StoreKey,
    origin: String,
    decision: Decision,
}

impl CompletingEffects {
    /// Returns the store's knowledge of the scope.
    pub fn known(&self) -> Known {
        self.lookups.known()
    }

    /// Returns the counts so far.
    pub fn report(&self) -> &CompletionReport {
        &self.report
    }

    /// Adds messages, and completes the records of those that were added before and have an effect;
    /// waits while more than a few thousand are in flight.
    ///
    /// # Errors
    /// When the store did not answer for some ten seconds, or refuses. What was written stays, and
    /// another run continues.
    pub async fn add(&mut self, messages: Vec<Message>) -> Result<(), DryRunError> {
        let mut findings = Vec::new();
        self.lookups
            .add(messages, |finding| findings.push(finding))
            .await?;
        Ok(self.act(findings).await?)
    }

    /// Completes the rest, and returns the counts.
    ///
    /// # Errors
    /// As of [`add`](Self::add).
    pub async fn finish(mut self) -> Result<CompletionReport, DryRunError> {
        let mut findings = Vec::new();
        self.lookups
            .finish(|finding| findings.push(finding))
            .await?;
        self.act(findings).await?;
        self.report.unexplained = self.effects.unexplained();
        Ok(self.report)
    }

    async fn act(&mut self, findings: Vec<MessageFinding>) -> Result<(), StoreError> {
        let mut new = Vec::new();
        let mut others = Vec::new();
        for finding in findings {
            let Some((happened, is_new)) = self.sort(finding) else {
                continue;
            };
            if self.dry_run {
                self.report.completed += 1;
                self.report.of_records += u64::from(!is_new);
            } else if is_new {
                new.push(happened);
            } else {
                others.push(happened);
            }
        }
        while !new.is_empty() {
            let some: Vec<Happened> = new.drain(..new.len().min(WRITES_MOST)).collect();
            others.extend(self.write_new(some).await?);
        }
        self.write_others(others).await
    }

    /// Counts a message. Returns it if its record is to be completed, and whether it has none.
    fn sort(&mut self, finding: MessageFinding) -> Option<(Happened, bool)> {
        let MessageFinding {
            origin,
            digest,
            fingerprint,
            standing,
            ..
        } = finding;
        let report = &mut self.report;
        report.messages += 1;
        let Some(digest) = digest else {
            report.without_key += 1;
            return None;
        };
        let key = StoreKey::new(self.lookups.scope(), digest);
        if standing == Standing::Mismatched {
            report.mismatched += 1;
            report.note(&origin.to_string());
            return None;
        }
        let is_first = match self
            .effects
            .find(idempotency_bits(key.as_str(), &self.step))
        {
            Some(is_first) => is_first,
            None => {
                report.without_effect += 1;
                return None;
            }
        };
        if !is_first {
            report.repeated += 1;
            return None;
        }
        match standing {
            Standing::Completed => report.completed_before += 1,
            Standing::InProgress => {
                report.running += 1;
                report.note(&origin.to_string());
            }
            Standing::Unreadable(_) => {
                report.unreadable += 1;
                report.note(&origin.to_string());
            }
            Standing::Undecodable { .. } | Standing::Mismatched => {}
            Standing::WithoutRecord
            | Standing::Abandoned
            | Standing::RetryDue
            | Standing::Waiting
            | Standing::Failed { .. } => {
                let is_new = standing == Standing::WithoutRecord;
                let decision = self.decision(fingerprint);
                let origin = origin.to_string();
                return Some((
                    Happened {
                        key,
                        origin,
                        decision,
                    },
                    is_new,
                ));
            }
        }
        None
    }

    fn decision(&self, fingerprint: Option<Fingerprint>) -> Decision {
        Decision::happened()
            .retention(self.retention)
            .fingerprint(fingerprint)
    }

    /// Writes the records of messages that have none. Returns those that have one meanwhile.
    async fn write_new(&mut self, new: Vec<Happened>) -> Result<Vec<Happened>, StoreError> {
        let mut left = new;
        let mut others = Vec::new();
        let mut failures = 0;
        while !left.is_empty() {
            let commands: Vec<Command> = left
                .iter()
                .filter_map(|one| one.decision.completion_of_absent(&one.key))
                .collect();
            let answers = self.store.execute(commands).await;
            let mut unanswered = None;
            let mut again = Vec::new();
            let answers = answers.into_iter().map(Some).chain(std::iter::repeat(None));
            for (one, answer) in left.into_iter().zip(answers) {
                match answer {
                    Some(Ok(Reply::Applied { .. })) => self.report.completed += 1,
                    Some(Ok(Reply::NotOwner | Reply::Verdict { .. })) => others.push(one),
                    Some(Err(error @ StoreError::Refused { .. })) => return Err(error),
                    Some(Err(StoreError::Unreadable { .. })) => {
                        self.report.unreadable += 1;
                        self.report.note(&one.origin);
                    }
                    // The same token is sent again: what was executed is not executed twice.
                    Some(Err(error)) => {
                        unanswered = Some(error);
                        again.push(one);
                    }
                    None => {
                        unanswered = Some(StoreError::unknown("the store gave no answer"));
                        again.push(one);
                    }
                }
            }
            left = again;
            if let Some(error) = unanswered {
                failures += 1;
                if failures == LOOK_TRIES {
                    return Err(error);
                }
                tokio::time::sleep(PATIENCE.wait(failures, fastrand::f64())).await;
            }
        }
        Ok(others)
    }

    /// Completes messages that have records, each compared with what was read.
    async fn write_others(&mut self, others: Vec<Happened>) -> Result<(), StoreError> {
        let store = &*self.store;
        let mut written = stream::iter(others)
            .map(|one| async move { (complete_one(store, &one).await, one.origin) })
            .buffer_unordered(ONE_BY_ONE);
        let mut failed = None;
        while let Some((decided, origin)) = written.next().await {
            let report = &mut self.report;
            match decided {
                Ok(Decided::Done) => {
                    report.completed += 1;
                    report.of_records += 1;
                }
                Ok(Decided::Final(_)) => report.completed_before += 1,
                // A message that changes all the time is one that runs.
                Ok(Decided::Runs(_) | Decided::Changed(_)) => {
                    report.running += 1;
                    report.note(&origin);
                }
                Err(StoreError::Unreadable { .. }) => {
                    report.unreadable += 1;
                    report.note(&origin);
                }
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

async fn complete_one(store: &dyn Store, one: &Happened) -> Result<Decided, StoreError> {
    let mut failures = 0;
    loop {
        let found = match read(store, &one.key).await {
            Ok(seen) => decide(store, &one.key, seen.as_ref(), &one.decision).await,
            Err(error) => Err(error),
        };
        match found {
            Err(StoreError::Unavailable { .. } | StoreError::Unknown { .. })
                if failures + 1 < LOOK_TRIES =>
            {
                failures += 1;
                tokio::time::sleep(PATIENCE.wait(failures, fastrand::f64())).await;
            }
            answer => return answer,
        }
    }
}

impl CompletionReport {
    fn note(&mut self, origin: &str) {
        if self.examples.len() < EXAMPLES_MOST {
            self.examples.push(origin.to_owned());
        }
    }
}
