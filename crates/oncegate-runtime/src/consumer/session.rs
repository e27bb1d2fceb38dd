//! Notes of what this process has received for a transactional handler and not finished, written
//! down so that others find them when the process ends without a word.
//!
//! A list is written when a message is to start that is on none yet, and then it has everything
//! received so far. With a backlog that is one write for thousands of messages.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::store::StoreError;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;
use tracing::warn;

use crate::transactional::{ListId, NewList, SessionId, Sessions, SilentList};

/// The most digests of one list, so that a row stays small.
const MOST_DIGESTS: usize = 4_096;

/// The longest time between two beats of a session that starts messages.
const BEAT_INTERVAL: Duration = Duration::from_secs(1);

/// A session that has not beaten for this long may have ended without a word. A broker that
/// delivers its messages to another process earlier says that they are
/// [redelivered](crate::Message::is_redelivered): such a message is suspect by itself.
const SILENCE: Duration = Duration::from_secs(3);

/// The session of a route whose handler is transactional.
pub(super) struct Session {
    id: SessionId,
    began: Instant,
    sessions: Arc<dyn Sessions>,
    received: Mutex<Received>,
    /// The number of the last list. Locked while one is written: a message that has waited for the
    /// lock may be on it.
    last_list: tokio::sync::Mutex<i64>,
}

/// The messages that were received and not finished, numbered from 1.
#[derive(Debug, Default)]
struct Received {
    /// Every message up to this one is on a list or finished.
    listed: u64,
    /// The digests of those after it; `None` for a finished one.
    unlisted: VecDeque<Option<i64>>,
    /// The lists, by the number of their last message.
    lists: BTreeMap<u64, List>,
    /// The lists of other sessions that may have ended without a word.
    silent: BTreeMap<ListId, Vec<i64>>,
    /// The digests in them.
    suspects: HashSet<i64>,
    /// The time when the session last beat, and was told the suspects.
    beaten_at: Option<Instant>,
}

impl Received {
    fn note_silent(&mut self, silent: Vec<SilentList>) {
        let mut before = std::mem::take(&mut self.silent);
        for SilentList { id, digests } in silent {
            let digests = digests.or_else(|| before.remove(&id)).unwrap_or_default();
            self.silent.insert(id, digests);
        }
        self.suspects = self.silent.values().flatten().copied().collect();
    }
}

#[derive(Debug)]
struct List {
    number: i64,
    unfinished: usize,
}

/// A message that was received. It is finished when this is dropped.
pub(super) struct SessionEntry {
    session: Arc<Session>,
    number: u64,
    digest: i64,
    /// A process that has ended may have had it, and may not yet count as silent.
    is_redelivered: bool,
}

impl Session {
    pub(super) fn new(scope: Scope, number: i64, sessions: Arc<dyn Sessions>) -> Arc<Self> {
        let id = SessionId { scope, number };
        let received = Mutex::default();
        let last_list = Default::default();
        Arc::new(Self {
            id,
            began: Instant::now(),
            sessions,
            received,
            last_list,
        })
    }

    /// Notes a message that was received; `is_redelivered` if its broker may have delivered it
    /// before.
    pub(super) fn receive(self: &Arc<Self>, key: &StoreKey, is_redelivered: bool) -> SessionEntry {
        let [a, b, c, d, e, f, g, h, ..] = *key.digest().as_bytes();
        let digest = i64::from_be_bytes([a, b, c, d, e, f, g, h]);
        let mut received = self.lock();
        received.unlisted.push_back(Some(digest));
        let number = received.listed + received.unlisted.len() as u64;
        SessionEntry {
            session: Arc::clone(self),
            number,
            digest,
            is_redelivered,
        }
    }

    /// Removes what is written down: every handler of this run has ended.
    pub(super) async fn end(&self) {
        if let Err(error) = self.sessions.end(self.id.clone()).await {
            let scope = self.id.scope.as_str();
            warn!(scope, %error, "the session was not removed; what it had received is claimed before it runs");
        }
    }

    /// Notes that the session is alive, and reads the suspects.
    ///
    /// # Errors
    /// The database did not answer, or refuses.
    pub(super) async fn beat(&self) -> Result<(), StoreError> {
        // This process may follow one that has ended a moment ago: at first every other session
        // counts as silent.
        let silent_for = if self.began.elapsed() < SILENCE * 2 {
            Duration::ZERO
        } else {
            SILENCE
        };
        let known = self.lock().silent.keys().copied().collect();
        let silent = self
            .sessions
            .beat(self.id.clone(), silent_for, known)
            .await?;
        let mut received = self.lock();
        received.note_silent(silent);
        received.beaten_at = Some(Instant::now());
        Ok(())
    }

    /// Writes the next list.
    async fn write(&self, last_list: &mut i64) -> Result<(), StoreError> {
        *last_list += 1;
        let (list, last) = {
            let received = self.lock();
            let next = received.unlisted.iter().take(MOST_DIGESTS);
            let last = received.listed + next.len() as u64;
            let digests = next.copied().flatten().collect();
            let finished = received.lists.values().filter(|list| list.unfinished == 0);
            let finished = finished.map(|list| list.number).collect();
            (
                NewList {
                    session: self.id.clone(),
                    number: *last_list,
                    digests,
                    finished,
                },
                last,
            )
        };
        let number = list.number;
        let finished = list.finished.clone();
        self.sessions.add(list).await?;
        let mut received = self.lock();
        let mut unfinished = 0;
        while received.listed < last {
            // Some may have finished meanwhile.
            unfinished += usize::from(matches!(received.unlisted.pop_front(), Some(Some(_))));
            received.listed += 1;
        }
        received
            .lists
            .retain(|_, list| !finished.contains(&list.number));
        received.lists.insert(last, List { number, unfinished });
        Ok(())
    }

    /// Locks the numbers. Each change leaves them consistent, so a panic elsewhere does no harm.
    fn lock(&self) -> MutexGuard<'_, Received> {
        self.received.lock()
    }
}

fn is_fresh(beaten_at: Option<Instant>) -> bool {
    beaten_at.is_some_and(|at| at.elapsed() < BEAT_INTERVAL)
}

/// The listing of the messages of one unit, which start together.
#[derive(Default)]
pub(super) struct UnitListing {
    unanswered: Option<StoreError>,
}

impl UnitListing {
    /// Lists a message as [`SessionEntry::list`] does. Once the database has not answered, it is
    /// not asked for the other messages of the unit: a unit would wait for it as many times as it
    /// has messages.
    ///
    /// # Errors
    /// Those of [`SessionEntry::list`], or that of an earlier message.
    pub(super) async fn list(&mut self, entry: &SessionEntry) -> Result<bool, StoreError> {
        if let Some(error) = &self.unanswered {
            return Err(error.clone());
        }
        entry
            .list()
            .await
            .inspect_err(|error| self.unanswered = Some(error.clone()))
    }
}

impl SessionEntry {
    /// Waits until the message is on a list that others can read. Returns whether another process
    /// may have died with it: its broker has delivered it before, or its key is on the list of a
    /// session that may have ended without a word.
    ///
    /// # Errors
    /// The database did not answer: do not start the message.
    pub(super) async fn list(&self) -> Result<bool, StoreError> {
        if let Some(is_suspect) = self.listed() {
            return Ok(is_suspect);
        }
        let mut last_list = self.session.last_list.lock().await;
        loop {
            if let Some(is_suspect) = self.listed() {
                return Ok(is_suspect);
            }
            if !is_fresh(self.session.lock().beaten_at) {
                self.session.beat().await?;
            }
            if self.number > self.session.lock().listed {
                self.session.write(&mut last_list).await?;
            }
        }
    }

    /// Returns whether the key is suspect; `None` if the message is on no list yet, or the suspects
    /// were read too long ago.
    fn listed(&self) -> Option<bool> {
        let received = self.session.lock();
        let is_listed = self.number <= received.listed && is_fresh(received.beaten_at);
        is_listed.then(|| self.is_redelivered || received.suspects.contains(&self.digest))
    }
}

impl Drop for SessionEntry {
    fn drop(&mut self) {
        let mut received = self.session.lock();
        match self.number.checked_sub(received.listed + 1) {
            // It is on no list yet.
            Some(ahead) => {
                let place = usize::try_from(ahead)
                    .ok()
                    .and_then(|ahead| received.unlisted.get_mut(ahead));
                place.into_iter().for_each(|place| *place = None);
                // A replay finishes messages that never start.
                while received.unlisted.front() == Some(&None) {
                    received.unlisted.pop_front();
                    received.listed += 1;
                }
            }
            // Its list is removed when all of its messages are finished.
            None => {
                let list = received.lists.range_mut(self.number..).next();
                list.into_iter()
                    .for_each(|(_, list)| list.unfinished = list.unfinished.saturating_sub(1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::collections::BTreeSet;

    use async_trait::async_trait;
    use oncegate_core::key::Digest;

    use super::*;

    /// The lists in memory, and what other sessions have.
    #[derive(Debug, Default)]
    struct Written {
        lists: Mutex<BTreeMap<i64, Vec<i64>>>,
        suspects: Mutex<Vec<i64>>,
        silent_for: Mutex<Vec<Duration>>,
        is_away: std::sync::atomic::AtomicBool,
        asked: std::sync::atomic::AtomicU32,
    }

    impl Written {
        fn answer(&self) -> Result<(), StoreError> {
            self.asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            if self.is_away.load(std::sync::atomic::Ordering::SeqCst) {
                return Err(StoreError::unavailable("simulated"));
            }
            Ok(())
        }

        fn sizes(&self) -> Vec<usize> {
            self.lists.lock().values().map(Vec::len).collect()
        }
    }

    #[async_trait]
    impl Sessions for Written {
        async fn add(&self, list: NewList) -> Result<(), StoreError> {
            self.answer()?;
            let mut lists = self.lists.lock();
            lists.retain(|number, _| !list.finished.contains(number));
            lists.insert(list.number, list.digests);
            Ok(())
        }

        async fn beat(
            &self,
            _: SessionId,
            silent_for: Duration,
            known: BTreeSet<ListId>,
        ) -> Result<Vec<SilentList>, StoreError> {
            self.answer()?;
            self.silent_for.lock().push(silent_for);
            let suspects = self.suspects.lock();
            let lists = suspects.iter().map(|digest| {
                let id = ListId {
                    session: *digest,
                    list: 1,
                };
                let digests = (!known.contains(&id)).then(|| vec![*digest]);
                SilentList { id, digests }
            });
            Ok(lists.collect())
        }

        async fn end(&self, _: SessionId) -> Result<(), StoreError> {
            self.lists.lock().clear();
            Ok(())
        }
    }

    fn session() -> (Arc<Session>, Arc<Written>) {
        let written = Arc::new(Written::default());
        let sessions = Arc::clone(&written) as Arc<dyn Sessions>;
        (
            Session::new(Scope::new("billing").unwrap(), 1, sessions),
            written,
        )
    }

    fn key(number: u8) -> StoreKey {
        StoreKey::new(
            &Scope::new("billing").unwrap(),
            Digest::from_bytes([number; 16]),
        )
    }

    fn digest(number: u8) -> i64 {
        i64::from_be_bytes([number; 8])
    }

    // invariant: transactional-poison
    #[tokio::test(start_paused = true)]
    async fn nothing_starts_before_it_is_listed_and_a_backlog_is_one_list() {
        let (session, written) = session();
        let backlog: Vec<_> = (1..=100)
            .map(|number| session.receive(&key(number), false))
            .collect();
        assert_eq!(
            written.sizes(),
            [0; 0],
            "what has not started is not written"
        );
        written
            .is_away
            .store(true, std::sync::atomic::Ordering::SeqCst);
        assert!(backlog[0].list().await.is_err(), "it may not start");
        written
            .is_away
            .store(false, std::sync::atomic::Ordering::SeqCst);
        for entry in &backlog {
            assert!(!entry.list().await.unwrap());
        }
        assert_eq!(written.sizes(), [100]);
        let next = session.receive(&key(101), false);
        assert!(!next.list().await.unwrap());
        assert_eq!(written.sizes(), [100, 1]);
        // A list goes when its last message is finished, with the next one that is written.
        drop(backlog);
        assert!(!session.receive(&key(102), false).list().await.unwrap());
        assert_eq!(written.sizes(), [1, 1]);
        session.end().await;
        assert_eq!(written.sizes(), [0; 0]);
    }

    // invariant: receive-without-handler
    #[tokio::test(start_paused = true)]
    async fn a_unit_asks_a_database_that_is_away_once() {
        let (session, written) = session();
        let unit: Vec<_> = (1..=20)
            .map(|number| session.receive(&key(number), false))
            .collect();
        written
            .is_away
            .store(true, std::sync::atomic::Ordering::SeqCst);
        let mut listing = UnitListing::default();
        for entry in &unit {
            assert!(listing.list(entry).await.is_err(), "it may not start");
        }
        assert_eq!(written.asked.load(std::sync::atomic::Ordering::SeqCst), 1);
        written
            .is_away
            .store(false, std::sync::atomic::Ordering::SeqCst);
        let mut listing = UnitListing::default();
        for entry in &unit {
            assert!(!listing.list(entry).await.unwrap());
        }
        assert_eq!(written.sizes(), [20], "the next time, all are on one list");
    }

    #[tokio::test(start_paused = true)]
    async fn messages_that_finish_without_a_start_are_on_no_list() {
        let (session, written) = session();
        let first = session.receive(&key(1), false);
        let second = session.receive(&key(2), false);
        let third = session.receive(&key(3), false);
        drop((first, second));
        assert!(!third.list().await.unwrap());
        assert_eq!(
            written
                .lists
                .lock()
                .values()
                .flatten()
                .copied()
                .collect::<Vec<_>>(),
            [digest(3)]
        );
        for number in 4..=250 {
            drop(session.receive(&key(number), false));
        }
        assert!(
            session.lock().unlisted.is_empty(),
            "a replay leaves nothing behind"
        );
        drop(third);
        assert!(
            session
                .lock()
                .lists
                .values()
                .all(|list| list.unfinished == 0)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn keys_of_a_silent_session_are_suspect_and_suspects_are_reread() {
        let (session, written) = session();
        *written.suspects.lock() = vec![digest(7)];
        let seven = session.receive(&key(7), false);
        let eight = session.receive(&key(8), false);
        assert!(seven.list().await.unwrap() && !eight.list().await.unwrap());
        // A process that started a moment ago may follow one that has just ended.
        assert_eq!(*written.silent_for.lock(), [Duration::ZERO]);
        tokio::time::advance(SILENCE * 2).await;
        // The list of the first is known by now, and comes without its digests.
        written.suspects.lock().push(digest(8));
        assert!(seven.list().await.unwrap() && eight.list().await.unwrap());
        assert_eq!(*written.silent_for.lock(), [Duration::ZERO, SILENCE]);
        tokio::time::advance(BEAT_INTERVAL).await;
        written.suspects.lock().remove(0);
        assert!(!seven.list().await.unwrap() && eight.list().await.unwrap());
    }

    // invariant: transactional-poison
    #[tokio::test(start_paused = true)]
    async fn what_its_broker_has_delivered_before_is_suspect_at_once() {
        let (session, written) = session();
        tokio::time::advance(SILENCE * 2).await;
        let again = session.receive(&key(7), true);
        assert!(again.list().await.unwrap(), "no session counts as silent");
        assert_eq!(written.sizes(), [1], "it is listed before it starts");
    }
}
