//! Transactions that the runtime opens for handlers, at the same till: keys that they hold,
//! statements that cross others, commits without an answer, and the lists of what each worker has
//! received.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::Completing;
use oncegate::core::key::{Scope, StoreKey};
use oncegate::core::store::{Command, Store as _, StoreError};
use oncegate::transactional::{
    BatchBegun, Begun, CommitError, Excuse, Ground, ListId, NewList, SessionId, Sessions,
    SilentList, Transactions,
};
use tokio::time::{Instant, sleep};

use crate::till::{Fate, Till};

/// One beginning of that many fails, and one statement, and one answer about sessions.
const ONE_IN: u32 = 12;

/// The transactions of a till.
pub(crate) struct TillTransactions(pub(crate) Arc<Till>);

/// An open transaction. Nothing of it is anywhere before its commit.
pub(crate) struct Given {
    till: Arc<Till>,
    /// The payments that it charges.
    charged: Vec<u64>,
    /// The keys that no other transaction may take meanwhile.
    held: Vec<StoreKey>,
    /// How often the database had lost its data when it began.
    losses: u64,
}

/// An error of a statement.
#[derive(Debug)]
pub(crate) enum StatementError {
    /// It crosses another transaction, and is chosen to fail.
    Crossed,
    /// Its connection breaks.
    Cut,
}

impl fmt::Display for StatementError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "simulated: {self:?}")
    }
}

impl Error for StatementError {}

impl Given {
    fn on(till: &Arc<Till>, held: Vec<StoreKey>) -> Self {
        Self {
            till: Arc::clone(till),
            charged: Vec::new(),
            held,
            losses: till.lost(),
        }
    }

    /// Charges a payment, or fails as a statement does.
    pub(crate) fn charge(&mut self, id: u64) -> Result<(), StatementError> {
        self.charged.push(id);
        match self.till.happens(ONE_IN).then(|| self.till.happens(3)) {
            None => Ok(()),
            Some(true) => {
                self.till.note("given_cut");
                Err(StatementError::Cut)
            }
            Some(false) => {
                self.till.note("given_crossed");
                Err(StatementError::Crossed)
            }
        }
    }

    /// Commits charges and completions together. Nothing else happens meanwhile: no future in here
    /// ever waits.
    async fn commit(self, batch: &[(Ground, Completing)]) -> Result<(), CommitError> {
        let memory = &self.till.memory;
        if self.losses != self.till.lost() {
            return Err(CommitError::RolledBack(
                "simulated: the database has lost its data".into(),
            ));
        }
        for (ground, completing) in batch {
            let found = memory.read(vec![completing.key().clone()]).await.remove(0);
            let found = found.map_err(|error| CommitError::RolledBack(error.into()))?;
            match (ground, found) {
                (Ground::NoRecord, None) => {}
                // Another worker has claimed the key since this transaction has found no record.
                (Ground::NoRecord, Some(_)) => {
                    self.till.note("given_taken_meanwhile");
                    return Err(CommitError::Conflict(
                        "simulated: the key was taken meanwhile".into(),
                    ));
                }
                (Ground::Claimed, found) => {
                    let (now, record) =
                        found.map_or_else(Default::default, |it| (it.now, Some(it.record)));
                    completing
                        .apply(now, record)
                        .map_err(CommitError::RolledBack)?;
                }
            }
        }
        for (ground, completing) in batch {
            let claim = (*ground == Ground::NoRecord).then(|| completing.claim());
            for operation in claim.into_iter().chain([completing.operation()]) {
                let command = Command {
                    key: completing.key().clone(),
                    operation,
                };
                memory
                    .execute(vec![command])
                    .await
                    .remove(0)
                    .expect("a store in memory answers");
            }
        }
        self.till.note(if batch.len() > 1 {
            "given_batch_committed"
        } else {
            "given_committed"
        });
        self.till.add(&self.charged);
        Ok(())
    }

    /// Commits as a server over a network does.
    async fn send_commit(self, batch: Vec<(Ground, Completing)>) -> Result<(), CommitError> {
        let unknown = || {
            CommitError::Unknown(StoreError::unknown(
                "simulated: the commit was not answered",
            ))
        };
        let (fate, time) = self.till.fate();
        match fate {
            Fate::Answered => {
                sleep(time).await;
                self.commit(&batch).await
            }
            Fate::RolledBack => Err(CommitError::RolledBack("simulated: rolled back".into())),
            Fate::RequestLost => {
                sleep(time).await;
                Err(unknown())
            }
            Fate::AnswerLost => {
                self.commit(&batch).await?;
                sleep(time).await;
                Err(unknown())
            }
            Fate::Late => {
                // It is the server that goes on, whatever becomes of the worker; it holds the keys
                // until then.
                tokio::spawn(async move {
                    sleep(time).await;
                    let till = Arc::clone(&self.till);
                    let is_done = self.commit(&batch).await.is_ok();
                    till.note(if is_done {
                        "given_late_and_done"
                    } else {
                        "given_late_and_refused"
                    });
                });
                Err(unknown())
            }
        }
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        self.till.release(&self.held);
    }
}

impl TillTransactions {
    /// Takes the keys without a record.
    async fn take(
        &self,
        keys: impl Iterator<Item = &StoreKey>,
    ) -> Result<BatchBegun<Given, Ground>, StoreError> {
        let till = &self.0;
        sleep(till.latency()).await;
        if till.happens(ONE_IN) {
            till.note("given_not_begun");
            return Err(StoreError::unavailable("simulated: no connection"));
        }
        let mut given = Given::on(till, Vec::new());
        let mut holds = Vec::new();
        for key in keys {
            let is_new = till
                .memory
                .read(vec![key.clone()])
                .await
                .remove(0)?
                .is_none();
            holds.push(is_new.then_some(Ground::NoRecord));
            if is_new && !till.hold(key) {
                till.note("given_held");
                return Ok(Begun::Held);
            }
            given.held.extend(is_new.then(|| key.clone()));
        }
        if given.held.is_empty() {
            return Ok(Begun::RecordExists);
        }
        Ok(Begun::Open(given, holds))
    }
}

impl Transactions for TillTransactions {
    type Transaction = Given;
    type Hold = Ground;

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        self.0.memory.descriptor(scope).await
    }

    fn sessions(&self) -> Arc<dyn Sessions> {
        Arc::new(TillSessions(Arc::clone(&self.0)))
    }

    async fn begin(
        &self,
        completing: &Completing,
        ground: Ground,
        _: Duration,
    ) -> Result<Begun<Given, Ground>, StoreError> {
        if ground == Ground::Claimed {
            return Ok(Begun::Open(Given::on(&self.0, Vec::new()), Ground::Claimed));
        }
        Ok(match self.take([completing.key()].into_iter()).await? {
            Begun::Open(given, _) => Begun::Open(given, Ground::NoRecord),
            Begun::RecordExists => Begun::RecordExists,
            Begun::Held => Begun::Held,
        })
    }

    async fn commit(
        &self,
        given: Given,
        hold: Ground,
        completing: &Completing,
    ) -> Result<(), CommitError> {
        given.send_commit(vec![(hold, completing.clone())]).await
    }

    async fn begin_batch(
        &self,
        batch: &[Completing],
        _: Duration,
    ) -> Result<BatchBegun<Given, Ground>, StoreError> {
        self.take(batch.iter().map(Completing::key)).await
    }

    async fn commit_batch(
        &self,
        given: Given,
        batch: Vec<(Ground, Completing)>,
    ) -> Result<(), CommitError> {
        given.send_commit(batch).await
    }

    async fn roll_back(&self, _: Given) {}

    fn excuse(&self, error: &(dyn Error + 'static)) -> Option<Excuse> {
        Some(match error.downcast_ref::<StatementError>()? {
            StatementError::Crossed => Excuse::Conflict,
            StatementError::Cut => Excuse::ConnectionLost,
        })
    }
}

/// What each worker has received, in the till's database.
#[derive(Debug)]
struct TillSessions(Arc<Till>);

/// The lists of the workers, by their sessions.
pub(crate) type Lists = Mutex<BTreeMap<i64, Listed>>;

/// The lists of one worker.
pub(crate) struct Listed {
    beaten_at: Instant,
    digests: BTreeMap<i64, Vec<i64>>,
}

impl fmt::Debug for Listed {
    /// Without the instant: two runs of a seed show the same.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.digests, f)
    }
}

impl TillSessions {
    fn answer<T>(
        &self,
        session: &SessionId,
        answer: impl FnOnce(&mut Listed) -> T,
    ) -> Result<T, StoreError> {
        if self.0.happens(ONE_IN) {
            self.0.note("given_sessions_away");
            return Err(StoreError::unavailable("simulated: no connection"));
        }
        let mut lists = self.0.lists.lock().unwrap();
        let listed = Listed {
            beaten_at: Instant::now(),
            digests: BTreeMap::new(),
        };
        Ok(answer(lists.entry(session.number).or_insert(listed)))
    }
}

#[async_trait]
impl Sessions for TillSessions {
    async fn add(&self, list: NewList) -> Result<(), StoreError> {
        sleep(self.0.latency()).await;
        self.answer(&list.session, |listed| {
            listed
                .digests
                .retain(|number, _| !list.finished.contains(number));
            listed.digests.insert(list.number, list.digests.clone());
        })
    }

    async fn beat(
        &self,
        session: SessionId,
        silent_for: Duration,
        known: BTreeSet<ListId>,
    ) -> Result<Vec<SilentList>, StoreError> {
        sleep(self.0.latency()).await;
        self.answer(&session, |listed| listed.beaten_at = Instant::now())?;
        let lists = self.0.lists.lock().unwrap();
        let silent = lists.iter().filter(|(number, listed)| {
            **number != session.number && listed.beaten_at.elapsed() >= silent_for
        });
        let lists = silent.flat_map(|(session, listed)| {
            let session = *session;
            listed.digests.iter().map(move |(list, digests)| {
                let id = ListId {
                    session,
                    list: *list,
                };
                (id, digests)
            })
        });
        Ok(lists
            .map(|(id, digests)| SilentList {
                id,
                digests: (!known.contains(&id)).then(|| digests.clone()),
            })
            .collect())
    }

    async fn end(&self, session: SessionId) -> Result<(), StoreError> {
        self.answer(&session, |_| ())?;
        self.0.lists.lock().unwrap().remove(&session.number);
        Ok(())
    }
}
