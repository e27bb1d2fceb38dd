//! Redrive: sends the messages of dead letters back to their topic or queue.
//!
//! The steps for each dead letter are: read its record, decide, reopen the record, send the
//! message, save the progress. In this order, an end between any two steps loses nothing: a message
//! that is sent twice is answered by its record.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::State;
use oncegate_core::store::{RecordSnapshot, Store, StoreError};
use tokio::time::{Instant, sleep_until};

use super::redrive_action::{RedriveAction, Redriven, Step};
use super::{Reopened, is_reopened, reopen};
use oncegate_runtime::dead_letter_reader::{DeadLetterReader, Disposition, StoredDeadLetter};
use oncegate_runtime::dead_letters::{DeadLetterCause, DeadLetterRefused};
use oncegate_runtime::failure::BoxError;
use oncegate_runtime::source::SourceError;

/// The most dead letters in flight at once.
const AT_ONCE: usize = 64;

/// The most keys that a redrive remembers, so that two dead letters of one message are sent once.
/// Beyond this number, a message may be sent twice, and its record answers the second one.
const KEYS_REMEMBERED_MOST: usize = 1_000_000;

/// The reason that a redrive ended early. Dead letters that were not sent are still in their topic
/// or queue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedriveError {
    /// The dead-letter topic or queue failed.
    #[error(transparent)]
    Letters(#[from] SourceError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store has never had a gate of the scope that has written the dead letters.
    #[error(
        "the store knows no scope `{0}`, which has written the dead letters: their records are in another store; a \
         message that is sent without them is acknowledged as failed, and lost"
    )]
    UnknownScope(String),
    /// A message could not be sent. Its record is reopened, so the next redrive sends it.
    #[error("not sent: {0}")]
    Send(#[source] BoxError),
}

/// Sends the messages of dead letters back to their topic or queue.
///
/// It skips a dead letter whose message was completed since, runs, or waits for a retry. It reopens
/// the record of a failed message (attempts start again), if the record has not changed since it
/// was read; then it sends the message, and waits until it is durable.
///
/// It may be stopped at any moment and started again. If the reader saves its progress, sent
/// messages are not sent again. In the worst case those of the last batch are, and their records
/// answer them.
///
/// Messages with the same key (in a FIFO queue: the same group) are sent in the order of their dead
/// letters.
#[derive(Debug)]
pub struct Redrive {
    store: Arc<dyn Store>,
    to: Option<String>,
    per_second: Option<u32>,
    dry_run: bool,
    without_records: bool,
}

impl Redrive {
    /// Creates a redrive of dead letters whose records are in `store`.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            to: None,
            per_second: None,
            dry_run: false,
            without_records: false,
        }
    }

    /// Sends every message to this topic or queue. By default each goes back to the one where it
    /// was consumed.
    ///
    /// Its consumer must take the route from the header; otherwise the keys differ:
    /// `KafkaSource::routes_from_headers`, `SqsSource::routes_from_attributes`,
    /// `AmqpSource::routes_from_headers`.
    #[must_use]
    pub fn to(mut self, to: impl Into<String>) -> Self {
        self.to = Some(to.into());
        self
    }

    /// Limits the messages per second; no limit by default.
    #[must_use]
    pub fn per_second(mut self, per_second: u32) -> Self {
        self.per_second = Some(per_second.max(1));
        self
    }

    /// Makes it a dry run, which only decides, and changes nothing.
    #[must_use]
    pub fn dry_run(mut self) -> Self {
        self.dry_run = true;
        self
    }

    /// Sends messages whose records are missing from the store, too: the records have expired, or
    /// were lost.
    ///
    /// If they are in another store, in which they still say "failed", its consumers acknowledge
    /// the messages without a run.
    #[must_use]
    pub fn without_records(mut self) -> Self {
        self.without_records = true;
        self
    }

    /// Redrives the dead letters of an opened reader, and reports each `wanted` one when it is
    /// settled.
    ///
    /// # Errors
    /// When the broker, the store, or the destination does not answer, or the store is not that of
    /// the dead letters. The progress until then is saved.
    pub async fn run(
        &self,
        letters: &mut dyn DeadLetterReader,
        wanted: impl Fn(&StoredDeadLetter) -> Wanted + Send + Sync,
        mut tell: impl FnMut(Step<'_>) + Send,
    ) -> Result<Redriven, RedriveError> {
        let mut run = RedriveState {
            redriven: Redriven::default(),
            sent: HashSet::new(),
            scopes: HashSet::new(),
            next: Instant::now(),
        };
        while let Some(batch) = letters.next_batch().await? {
            for chunk in batch.chunks(self.at_once()) {
                let chunk: Vec<_> = chunk
                    .iter()
                    .map(|letter| (letter, wanted(letter)))
                    .collect();
                let outcome = self
                    .redrive_chunk(&mut run, letters, &chunk, &mut tell)
                    .await;
                if !self.dry_run {
                    // The progress of sent messages is saved after any error.
                    letters.save().await?;
                }
                outcome?;
            }
        }
        Ok(run.redriven)
    }

    /// Returns the number of messages to send at once: at most those of a second at the rate.
    fn at_once(&self) -> usize {
        self.per_second
            .map_or(AT_ONCE, |per_second| AT_ONCE.min(per_second as usize))
    }

    async fn redrive_chunk(
        &self,
        run: &mut RedriveState,
        letters: &mut dyn DeadLetterReader,
        chunk: &[(&StoredDeadLetter, Wanted)],
        tell: &mut (impl FnMut(Step<'_>) + Send),
    ) -> Result<(), RedriveError> {
        let actions = self.actions(run, letters, chunk).await?;
        if let Some(per_second) = self.per_second.filter(|_| !self.dry_run) {
            sleep_until(run.next).await;
            let sending = actions
                .iter()
                .flatten()
                .filter(|action| action.to().is_some())
                .count();
            let took = Duration::from_secs_f64(sending as f64 / f64::from(per_second));
            run.next = run.next.max(Instant::now()) + took;
        }
        let done = self.act_in_order(&*letters, chunk, &actions).await;
        let mut failed = None;
        for ((letter, wanted), done) in chunk.iter().zip(done) {
            run.redriven.seen += 1;
            let action = match (wanted, done) {
                (_, Ok(Some(action))) => action,
                (_, Err(error)) => {
                    letters.settle(letter, Disposition::Left);
                    failed = failed.or(Some(error));
                    continue;
                }
                (Wanted::NotNow, Ok(None)) => {
                    letters.settle(letter, Disposition::Left);
                    continue;
                }
                (_, Ok(None)) => {
                    letters.settle(letter, Disposition::Passed);
                    continue;
                }
            };
            run.redriven.wanted += 1;
            run.redriven.count(&action);
            letters.settle(letter, self.settled(&action));
            tell(Step {
                letter,
                action: &action,
            });
        }
        failed.map_or(Ok(()), Err)
    }

    fn settled(&self, action: &RedriveAction) -> Disposition {
        match action {
            _ if self.dry_run => Disposition::Left,
            RedriveAction::Reopen { .. } | RedriveAction::Send { .. } => Disposition::Sent,
            RedriveAction::RecordMissing | RedriveAction::Unreadable(_) => Disposition::Left,
            _ => Disposition::Passed,
        }
    }

    /// Decides the action for each wanted dead letter.
    async fn actions(
        &self,
        run: &mut RedriveState,
        letters: &dyn DeadLetterReader,
        chunk: &[(&StoredDeadLetter, Wanted)],
    ) -> Result<Vec<Option<Planned>>, RedriveError> {
        let keys: Vec<Option<StoreKey>> = chunk
            .iter()
            .map(|(letter, wanted)| key(letter, *wanted))
            .collect();
        let asked: Vec<StoreKey> = keys.iter().flatten().cloned().collect();
        let mut snapshots = self.store.read(asked).await.into_iter();
        let mut actions = Vec::with_capacity(chunk.len());
        for ((letter, wanted), key) in chunk.iter().zip(keys) {
            if *wanted != Wanted::Yes {
                actions.push(None);
                continue;
            }
            let Some(key) = key else {
                actions.push(Some(Planned::new(self.open_way(letters, letter))));
                continue;
            };
            // The store was asked for the keys of wanted letters alone, in the same order.
            let found = match snapshots
                .next()
                .unwrap_or_else(|| Err(StoreError::unknown("no answer")))
            {
                Ok(found) => found,
                Err(StoreError::Unreadable { reason, .. }) => {
                    actions.push(Some(Planned::new(RedriveAction::Unreadable(
                        reason.to_string(),
                    ))));
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let mut action = self.action(letters, letter, found.as_ref());
            if found.is_none() && action.to().is_some() && has_failed_in_a_store(letter) {
                self.check_scope(run, letter).await?;
                if !self.without_records {
                    action = RedriveAction::RecordMissing;
                }
            }
            let again = action.to().is_some() && !run.first(&key);
            let action = if again {
                RedriveAction::SentAlready
            } else {
                action
            };
            actions.push(Some(Planned {
                action,
                record: found.map(|found| (key, found)),
            }));
        }
        Ok(actions)
    }

    /// Checks that the store has had a gate of the dead letter's scope, once for each scope.
    async fn check_scope(
        &self,
        run: &mut RedriveState,
        letter: &StoredDeadLetter,
    ) -> Result<(), RedriveError> {
        let Some(letter) = letter.letter() else {
            return Ok(());
        };
        if run.scopes.contains(&letter.scope) {
            return Ok(());
        }
        let is_known = match Scope::new(letter.scope.as_str()) {
            Ok(scope) => self.store.descriptor(&scope).await?.is_some(),
            Err(_) => false,
        };
        if !is_known {
            return Err(RedriveError::UnknownScope(letter.scope.clone()));
        }
        run.scopes.insert(letter.scope.clone());
        Ok(())
    }

    /// Decides the action for a dead letter from its record.
    fn action(
        &self,
        letters: &dyn DeadLetterReader,
        letter: &StoredDeadLetter,
        found: Option<&RecordSnapshot>,
    ) -> RedriveAction {
        let mismatch = letter
            .letter()
            .is_some_and(|letter| letter.cause == DeadLetterCause::Mismatch);
        let Some(RecordSnapshot { record, .. }) = found else {
            return self.open_way(letters, letter);
        };
        match record.state {
            _ if mismatch => RedriveAction::Mismatched,
            State::Completed { .. } => RedriveAction::Completed,
            State::Failed { .. } => match self.open_way(letters, letter) {
                RedriveAction::Send { to } => RedriveAction::Reopen { to },
                other => other,
            },
            State::Released { .. } if is_reopened(record) => self.open_way(letters, letter),
            State::Released { .. } | State::Pending { .. } => RedriveAction::UnderWay,
        }
    }

    fn open_way(&self, letters: &dyn DeadLetterReader, letter: &StoredDeadLetter) -> RedriveAction {
        match letters.destination(letter, self.to.as_deref()) {
            Ok(to) => RedriveAction::Send { to },
            Err(why) => RedriveAction::NoWayBack(why),
        }
    }

    /// Carries out the actions: one after another for the same [order
    /// key](DeadLetterReader::order), and concurrently for others. After a failure, no later
    /// message with the same order key is sent.
    async fn act_in_order(
        &self,
        letters: &dyn DeadLetterReader,
        chunk: &[(&StoredDeadLetter, Wanted)],
        actions: &[Option<Planned>],
    ) -> Vec<Result<Option<RedriveAction>, RedriveError>> {
        let mut orders: Vec<Vec<usize>> = Vec::new();
        let mut known: HashMap<Vec<u8>, usize> = HashMap::new();
        for (place, (letter, _)) in chunk.iter().enumerate() {
            let order = letters
                .order(letter)
                .map(|order| *known.entry(order).or_insert(orders.len()));
            match order.and_then(|order| orders.get_mut(order)) {
                Some(order) => order.push(place),
                None => orders.push(vec![place]),
            }
        }
        let acting = orders
            .into_iter()
            .map(|places| self.act_on(letters, chunk, actions, places));
        let mut done: Vec<_> = join_all(acting).await.into_iter().flatten().collect();
        done.sort_by_key(|(place, _)| *place);
        done.into_iter().map(|(_, acted)| acted).collect()
    }

    /// Carries out the actions at these places one after another, up to the first failure.
    async fn act_on(
        &self,
        letters: &dyn DeadLetterReader,
        chunk: &[(&StoredDeadLetter, Wanted)],
        actions: &[Option<Planned>],
        places: Vec<usize>,
    ) -> Vec<(usize, Result<Option<RedriveAction>, RedriveError>)> {
        let mut done = Vec::with_capacity(places.len());
        let mut failed = false;
        for place in places {
            let (Some((letter, _)), Some(action)) = (chunk.get(place), actions.get(place)) else {
                continue;
            };
            let acted = if failed {
                Err(RedriveError::Send(
                    "an earlier message with the same order key was not sent".into(),
                ))
            } else {
                self.act(letters, letter, action.as_ref()).await
            };
            failed |= acted.is_err();
            done.push((place, acted));
        }
        done
    }

    /// Carries out an action, and returns the action that was taken.
    async fn act(
        &self,
        letters: &dyn DeadLetterReader,
        letter: &StoredDeadLetter,
        planned: Option<&Planned>,
    ) -> Result<Option<RedriveAction>, RedriveError> {
        let Some(Planned { action, record }) = planned else {
            return Ok(None);
        };
        let Some(to) = action.to().filter(|_| !self.dry_run) else {
            return Ok(Some(action.clone()));
        };
        if let (RedriveAction::Reopen { .. }, Some((key, seen))) = (action, record) {
            match reopen(&*self.store, key, &seen.record).await? {
                Reopened::Opened => {}
                Reopened::Changed(found) => {
                    let action = self.action(letters, letter, found.as_ref());
                    // Another process has changed it: another redrive, or a consumer that has
                    // dead-lettered it again.
                    return Ok(Some(if action.to().is_some() {
                        RedriveAction::UnderWay
                    } else {
                        action
                    }));
                }
            }
        }
        match letters.send(letter, to).await {
            Ok(()) => Ok(Some(action.clone())),
            // Another try would not help, and it must not hold up the dead letters behind it.
            Err(error) if error.is::<DeadLetterRefused>() => {
                Ok(Some(RedriveAction::NoWayBack(error.to_string())))
            }
            Err(error) => Err(RedriveError::Send(error)),
        }
    }
}

/// Returns whether a record of the dead letter's own says, or said, that its message has failed. A
/// message without a key has no record, and that of a mismatch belongs to another message.
fn has_failed_in_a_store(letter: &StoredDeadLetter) -> bool {
    let cause = letter.letter().map(|letter| letter.cause);
    cause.is_some_and(|cause| !matches!(cause, DeadLetterCause::BadKey | DeadLetterCause::Mismatch))
}

/// The answer of a filter to a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The dead letter is wanted.
    Yes,
    /// The dead letter is not wanted, and the same redrive will never want it.
    No,
    /// The dead letter is not wanted yet: the same redrive may want it later.
    NotNow,
}

/// The action for a dead letter, and the record that decided it.
#[derive(Debug)]
struct Planned {
    action: RedriveAction,
    record: Option<(StoreKey, RecordSnapshot)>,
}

impl Planned {
    fn new(action: RedriveAction) -> Self {
        Self {
            action,
            record: None,
        }
    }

    fn to(&self) -> Option<&str> {
        self.action.to()
    }
}

/// The state of a running redrive.
#[derive(Debug)]
struct RedriveState {
    redriven: Redriven,
    sent: HashSet<StoreKey>,
    /// The scopes of dead letters that the store knows.
    scopes: HashSet<String>,
    /// The time at which the next message may be sent.
    next: Instant,
}

impl RedriveState {
    /// Notes the key. Returns whether no dead letter with it has been sent.
    fn first(&mut self, key: &StoreKey) -> bool {
        if self.sent.len() < KEYS_REMEMBERED_MOST {
            self.sent.insert(key.clone())
        } else {
            !self.sent.contains(key)
        }
    }
}

/// Returns the store key of the message's record, if any.
fn key(letter: &StoredDeadLetter, wanted: Wanted) -> Option<StoreKey> {
    let letter = letter.letter().filter(|_| wanted == Wanted::Yes)?;
    letter.key.as_deref()?.parse().ok()
}
