//! Sending dead letters back to where their messages came from.
//!
//! For each letter: look at its record, decide, reopen the record, send the message, remember. In that order, so that
//! an end between any two of them loses nothing: a message that is sent twice is answered by its record.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use oncegate_core::key::StoreKey;
use oncegate_core::record::State;
use oncegate_core::store::{RecordSnapshot, Store, StoreError};
use tokio::time::{Instant, sleep_until};

use super::{Reopened, is_reopened, reopen};
use crate::dead_letter_reader::{DeadLetterReader, Disposition, StoredDeadLetter};
use crate::dead_letters::DeadLetterCause;
use crate::failure::BoxError;
use crate::source::SourceError;

/// How many letters are on their way at once.
const AT_ONCE: usize = 64;

/// How many keys a redrive remembers, so that two letters of one message are sent once. Beyond them a message may be
/// sent twice, and its record answers the second.
const KEYS_REMEMBERED_MOST: usize = 1_000_000;

/// What is to be done with a letter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RedriveAction {
    /// Open its record, then send its message to this topic or queue.
    Reopen {
        /// Where to.
        to: String,
    },
    /// Send its message to this topic or queue: no record is in its way. It was never made, is forgotten, or was
    /// opened by a redrive that did not come to its end.
    Send {
        /// Where to.
        to: String,
    },
    /// Nothing: the message has been completed since.
    Completed,
    /// Nothing: an attempt runs or a retry waits, so somebody holds a delivery.
    UnderWay,
    /// Nothing: another letter of the same message was sent by this redrive.
    SentAlready,
    /// Nothing: the record belongs to a message with other content, and would refuse this one again.
    Mismatched,
    /// Nothing: its record cannot be read, for this reason.
    Unreadable(String),
    /// Nothing: its message cannot be sent anywhere, for this reason.
    NoWayBack(String),
}

impl RedriveAction {
    /// One lower-case word.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Reopen { .. } => "reopen",
            Self::Send { .. } => "send",
            Self::Completed => "completed",
            Self::UnderWay => "under_way",
            Self::SentAlready => "sent_already",
            Self::Mismatched => "mismatched",
            Self::Unreadable(_) => "unreadable",
            Self::NoWayBack(_) => "no_way_back",
        }
    }

    /// Where the message goes, if it goes.
    pub fn to(&self) -> Option<&str> {
        match self {
            Self::Reopen { to } | Self::Send { to } => Some(to),
            _ => None,
        }
    }

    /// Whether somebody must see to the letter.
    pub const fn is_trouble(&self) -> bool {
        matches!(self, Self::Mismatched | Self::Unreadable(_) | Self::NoWayBack(_))
    }
}

/// What a redrive did, or would do, with one letter.
#[derive(Debug)]
pub struct Step<'a> {
    /// The letter.
    pub letter: &'a StoredDeadLetter,
    /// What is to be done with it.
    pub course: &'a RedriveAction,
}

/// How many letters went which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Redriven {
    /// Letters that were seen.
    pub seen: u64,
    /// Those that were asked for.
    pub wanted: u64,
    /// Messages that were sent, or would be.
    pub sent: u64,
    /// Those of them whose records were opened first.
    pub reopened: u64,
    /// Completed since.
    pub completed: u64,
    /// Running, or waiting for a retry.
    pub under_way: u64,
    /// Another letter of the same message was sent.
    pub sent_already: u64,
    /// Records of messages with other content.
    pub mismatched: u64,
    /// Records that cannot be read.
    pub unreadable: u64,
    /// Messages that cannot be sent anywhere.
    pub no_way_back: u64,
}

impl Redriven {
    /// Letters that somebody must see to.
    pub const fn troubles(&self) -> u64 {
        self.mismatched + self.unreadable + self.no_way_back
    }

    fn count(&mut self, course: &RedriveAction) {
        let counter = match course {
            RedriveAction::Reopen { .. } => {
                self.reopened += 1;
                &mut self.sent
            }
            RedriveAction::Send { .. } => &mut self.sent,
            RedriveAction::Completed => &mut self.completed,
            RedriveAction::UnderWay => &mut self.under_way,
            RedriveAction::SentAlready => &mut self.sent_already,
            RedriveAction::Mismatched => &mut self.mismatched,
            RedriveAction::Unreadable(_) => &mut self.unreadable,
            RedriveAction::NoWayBack(_) => &mut self.no_way_back,
        };
        *counter += 1;
    }
}

/// Why a redrive ended early. Letters that were not sent are still where they were.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedriveError {
    /// The letter box.
    #[error(transparent)]
    Letters(#[from] SourceError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A message could not be sent. Its record is open, so the next redrive sends it.
    #[error("not sent: {0}")]
    Send(#[source] BoxError),
}

/// Sends dead letters back.
///
/// A letter whose message was completed since is passed over, and so is one whose message runs or waits for a retry.
/// The record of a message that was given up is opened (attempts start again), provided it has not changed since it
/// was looked at; then the message is sent, and the delivery awaited.
///
/// It may be ended at any moment and started again. What has been sent is not sent again when the letter box remembers
/// it; in the worst case, the letters of the last batch are, and their records answer them.
///
/// Messages with one key (in a FIFO queue: of one group) are sent in the order in which the letter box has their letters.
#[derive(Debug)]
pub struct Redrive {
    store: Arc<dyn Store>,
    to: Option<String>,
    per_second: Option<u32>,
    dry_run: bool,
}

impl Redrive {
    /// A redrive of letters whose records are in `store`.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store, to: None, per_second: None, dry_run: false }
    }

    /// Sends every message to this topic or queue; each to where it was consumed, unless this is set.
    ///
    /// Whoever consumes there must take the route from the header, or the keys are others:
    /// `KafkaSource::routes_from_headers`, `SqsSource::routes_from_attributes`.
    #[must_use]
    pub fn to(mut self, to: impl Into<String>) -> Self {
        self.to = Some(to.into());
        self
    }

    /// At most so many messages a second; as fast as it goes unless this is set.
    #[must_use]
    pub fn per_second(mut self, per_second: u32) -> Self {
        self.per_second = Some(per_second.max(1));
        self
    }

    /// Only decides, and changes nothing.
    #[must_use]
    pub fn dry_run(mut self) -> Self {
        self.dry_run = true;
        self
    }

    /// Goes through the letters of an opened letter box, and tells of each that is `wanted` once it is settled.
    ///
    /// # Errors
    /// When the letter box, the store, or a topic or queue gives no answer. What was sent until then is remembered.
    pub async fn run(
        &self,
        letters: &mut dyn DeadLetterReader,
        wanted: impl Fn(&StoredDeadLetter) -> Wanted + Send + Sync,
        mut tell: impl FnMut(Step<'_>) + Send,
    ) -> Result<Redriven, RedriveError> {
        let mut run = Run { redriven: Redriven::default(), sent: HashSet::new(), next: Instant::now() };
        while let Some(batch) = letters.next_batch().await? {
            for chunk in batch.chunks(self.at_once()) {
                let chunk: Vec<_> = chunk.iter().map(|letter| (letter, wanted(letter))).collect();
                let outcome = self.redrive_chunk(&mut run, letters, &chunk, &mut tell).await;
                if !self.dry_run {
                    // What was sent is worth remembering, whatever else went wrong.
                    letters.save().await?;
                }
                outcome?;
            }
        }
        Ok(run.redriven)
    }

    /// Few enough that a second holds them.
    fn at_once(&self) -> usize {
        self.per_second.map_or(AT_ONCE, |per_second| AT_ONCE.min(per_second as usize))
    }

    async fn redrive_chunk(
        &self,
        run: &mut Run,
        letters: &mut dyn DeadLetterReader,
        chunk: &[(&StoredDeadLetter, Wanted)],
        tell: &mut (impl FnMut(Step<'_>) + Send),
    ) -> Result<(), RedriveError> {
        let courses = self.courses(run, letters, chunk).await?;
        if let Some(per_second) = self.per_second.filter(|_| !self.dry_run) {
            sleep_until(run.next).await;
            let sending = courses.iter().flatten().filter(|course| course.to().is_some()).count();
            let took = Duration::from_secs_f64(sending as f64 / f64::from(per_second));
            run.next = run.next.max(Instant::now()) + took;
        }
        let done = self.act_in_order(&*letters, chunk, &courses).await;
        let mut failed = None;
        for ((letter, wanted), done) in chunk.iter().zip(done) {
            run.redriven.seen += 1;
            let course = match (wanted, done) {
                (_, Ok(Some(course))) => course,
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
            run.redriven.count(&course);
            letters.settle(letter, self.settled(&course));
            tell(Step { letter, course: &course });
        }
        failed.map_or(Ok(()), Err)
    }

    fn settled(&self, course: &RedriveAction) -> Disposition {
        match course {
            _ if self.dry_run => Disposition::Left,
            RedriveAction::Reopen { .. } | RedriveAction::Send { .. } => Disposition::Sent,
            RedriveAction::Unreadable(_) => Disposition::Left,
            _ => Disposition::Passed,
        }
    }

    /// What is to be done with each letter that is wanted.
    async fn courses(
        &self,
        run: &mut Run,
        letters: &dyn DeadLetterReader,
        chunk: &[(&StoredDeadLetter, Wanted)],
    ) -> Result<Vec<Option<Planned>>, RedriveError> {
        let keys: Vec<Option<StoreKey>> = chunk.iter().map(|(letter, wanted)| key(letter, *wanted)).collect();
        let asked: Vec<StoreKey> = keys.iter().flatten().cloned().collect();
        let mut looked = self.store.read(asked).await.into_iter();
        let mut courses = Vec::with_capacity(chunk.len());
        for ((letter, wanted), key) in chunk.iter().zip(keys) {
            if *wanted != Wanted::Yes {
                courses.push(None);
                continue;
            }
            let Some(key) = key else {
                courses.push(Some(Planned::new(self.open_way(letters, letter))));
                continue;
            };
            let found = match looked.next().unwrap_or_else(|| Err(StoreError::unknown("no answer"))) {
                Ok(found) => found,
                Err(StoreError::Unreadable { reason, .. }) => {
                    courses.push(Some(Planned::new(RedriveAction::Unreadable(reason.to_string()))));
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let course = self.course(letters, letter, found.as_ref());
            let again = course.to().is_some() && !run.first(&key);
            let course = if again { RedriveAction::SentAlready } else { course };
            courses.push(Some(Planned { course, record: found.map(|found| (key, found)) }));
        }
        Ok(courses)
    }

    /// What the record says about a letter.
    fn course(
        &self,
        letters: &dyn DeadLetterReader,
        letter: &StoredDeadLetter,
        found: Option<&RecordSnapshot>,
    ) -> RedriveAction {
        let mismatch = letter.letter().is_some_and(|letter| letter.cause == DeadLetterCause::Mismatch);
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

    /// Does it for each letter: for those of one [order](DeadLetterReader::order) one after another, for others at once. After a failure
    /// nothing later of its order is sent.
    async fn act_in_order(
        &self,
        letters: &dyn DeadLetterReader,
        chunk: &[(&StoredDeadLetter, Wanted)],
        courses: &[Option<Planned>],
    ) -> Vec<Result<Option<RedriveAction>, RedriveError>> {
        let mut orders: Vec<Vec<usize>> = Vec::new();
        let mut known: HashMap<Vec<u8>, usize> = HashMap::new();
        for (place, (letter, _)) in chunk.iter().enumerate() {
            let order = letters.order(letter).map(|order| *known.entry(order).or_insert(orders.len()));
            match order.and_then(|order| orders.get_mut(order)) {
                Some(order) => order.push(place),
                None => orders.push(vec![place]),
            }
        }
        let act = async |places: Vec<usize>| {
            let (mut done, mut failed) = (Vec::with_capacity(places.len()), false);
            for place in places {
                let (Some((letter, _)), Some(course)) = (chunk.get(place), courses.get(place)) else {
                    continue;
                };
                let acted = match failed {
                    false => self.act(letters, letter, course.as_ref()).await,
                    true => Err(RedriveError::Send("an earlier message of its order was not sent".into())),
                };
                failed |= acted.is_err();
                done.push((place, acted));
            }
            done
        };
        let mut done: Vec<_> = join_all(orders.into_iter().map(act)).await.into_iter().flatten().collect();
        done.sort_by_key(|(place, _)| *place);
        done.into_iter().map(|(_, acted)| acted).collect()
    }

    /// Does it, and says what was done.
    async fn act(
        &self,
        letters: &dyn DeadLetterReader,
        letter: &StoredDeadLetter,
        planned: Option<&Planned>,
    ) -> Result<Option<RedriveAction>, RedriveError> {
        let Some(Planned { course, record }) = planned else { return Ok(None) };
        let Some(to) = course.to().filter(|_| !self.dry_run) else { return Ok(Some(course.clone())) };
        if let (RedriveAction::Reopen { .. }, Some((key, seen))) = (course, record) {
            match reopen(&*self.store, key, &seen.record).await? {
                Reopened::Opened => {}
                Reopened::Changed(found) => {
                    let course = self.course(letters, letter, found.as_ref());
                    // Somebody else is at it: another redrive, or a consumer that has given it up once more.
                    return Ok(Some(if course.to().is_some() { RedriveAction::UnderWay } else { course }));
                }
            }
        }
        letters.send(letter, to).await.map_err(RedriveError::Send)?;
        Ok(Some(course.clone()))
    }
}

/// Whether a letter is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// It is.
    Yes,
    /// It is not, and the same redrive will never ask for it.
    No,
    /// It is not yet: the same redrive may ask for it later.
    NotNow,
}

/// What is to be done, and the record that says so.
#[derive(Debug)]
struct Planned {
    course: RedriveAction,
    record: Option<(StoreKey, RecordSnapshot)>,
}

impl Planned {
    fn new(course: RedriveAction) -> Self {
        Self { course, record: None }
    }

    fn to(&self) -> Option<&str> {
        self.course.to()
    }
}

/// What a redrive remembers while it runs.
#[derive(Debug)]
struct Run {
    redriven: Redriven,
    sent: HashSet<StoreKey>,
    /// When the next message may be sent.
    next: Instant,
}

impl Run {
    /// Whether no letter of this key has been sent.
    fn first(&mut self, key: &StoreKey) -> bool {
        if self.sent.len() < KEYS_REMEMBERED_MOST {
            self.sent.insert(key.clone())
        } else {
            !self.sent.contains(key)
        }
    }
}

/// The key under which a letter's message has its record, if any.
fn key(letter: &StoredDeadLetter, wanted: Wanted) -> Option<StoreKey> {
    let letter = letter.letter().filter(|_| wanted == Wanted::Yes)?;
    letter.key.as_deref()?.parse().ok()
}
