//! Effects in the same database as the records: a transaction over the store in memory, which fails
//! as those of a server do.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use oncegate::core::key::StoreKey;
use oncegate::core::store::{Command, Store as _};
use oncegate::{BoxError, Completing, MemoryStore, SqlTransaction};
use tokio::time::sleep;

use crate::given::Lists;

/// Maximum latency of a transaction to the server or back, in milliseconds.
pub(crate) const LONGEST_MS: u64 = 1_500;

/// Committed charges, and the records beside them.
#[derive(Debug)]
pub(crate) struct Till {
    pub(crate) memory: Arc<MemoryStore>,
    charges: Mutex<BTreeMap<u64, u32>>,
    /// The keys that open transactions have taken.
    held: Mutex<Vec<StoreKey>>,
    /// What the workers have written down.
    pub(crate) lists: Lists,
    /// How often everything was lost.
    losses: AtomicU64,
    /// How often each thing has become of a transaction.
    fates: Mutex<BTreeMap<&'static str, u64>>,
    /// `None`: nothing goes wrong any more.
    rng: Mutex<Option<Rng>>,
}

/// What becomes of a commit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fate {
    Answered,
    /// The server rolls back and reports it.
    RolledBack,
    /// The connection breaks before the server has got it.
    RequestLost,
    /// The server commits, and the connection breaks before its answer has arrived.
    AnswerLost,
    /// The connection breaks, and the server gets it all the same, a while later.
    Late,
}

impl Till {
    pub(crate) fn new(memory: Arc<MemoryStore>, rng: Rng) -> Arc<Self> {
        Arc::new(Self {
            memory,
            charges: Mutex::default(),
            held: Mutex::default(),
            lists: Lists::default(),
            losses: AtomicU64::new(0),
            fates: Mutex::default(),
            rng: Mutex::new(Some(rng)),
        })
    }

    pub(crate) fn charges(&self) -> BTreeMap<u64, u32> {
        self.charges.lock().unwrap().clone()
    }

    /// The database has lost its data: records and charges together.
    pub(crate) fn lose_everything(&self) {
        self.memory.lose_everything();
        self.charges.lock().unwrap().clear();
        self.lists.lock().unwrap().clear();
        self.losses.fetch_add(1, Relaxed);
    }

    /// How often everything was lost.
    pub(crate) fn lost(&self) -> u64 {
        self.losses.load(Relaxed)
    }

    /// Takes a key for a transaction, if no other one has it.
    pub(crate) fn hold(&self, key: &StoreKey) -> bool {
        let mut held = self.held.lock().unwrap();
        let is_free = !held.contains(key);
        held.extend(is_free.then(|| key.clone()));
        is_free
    }

    /// Frees the keys of a transaction that has ended.
    pub(crate) fn release(&self, keys: &[StoreKey]) {
        self.held.lock().unwrap().retain(|key| !keys.contains(key));
    }

    /// Adds charges that are committed.
    pub(crate) fn add(&self, ids: &[u64]) {
        let mut charges = self.charges.lock().unwrap();
        ids.iter()
            .for_each(|id| *charges.entry(*id).or_default() += 1);
    }

    /// Whether a fault happens now that is one in so many.
    pub(crate) fn happens(&self, one_in: u32) -> bool {
        self.rng
            .lock()
            .unwrap()
            .as_mut()
            .is_some_and(|rng| rng.u32(..one_in) == 0)
    }

    /// How long a call takes.
    pub(crate) fn latency(&self) -> Duration {
        let mut rng = self.rng.lock().unwrap();
        Duration::from_millis(rng.as_mut().map_or(0, |rng| rng.u64(..LONGEST_MS / 10)))
    }

    /// Counts what has become of a transaction.
    pub(crate) fn note(&self, fate: &'static str) {
        *self.fates.lock().unwrap().entry(fate).or_default() += 1;
    }

    /// From now on every commit is answered at once.
    pub(crate) fn stop_faults(&self) {
        *self.rng.lock().unwrap() = None;
    }

    /// What has become of transactions, and how often.
    pub(crate) fn fates(&self) -> BTreeMap<&'static str, u64> {
        self.fates.lock().unwrap().clone()
    }

    /// A transaction in which this payment is charged.
    pub(crate) fn transaction(self: &Arc<Self>, id: u64) -> Transaction {
        Transaction {
            till: Arc::clone(self),
            id,
        }
    }

    pub(crate) fn fate(&self) -> (Fate, Duration) {
        let mut rng = self.rng.lock().unwrap();
        let Some(rng) = rng.as_mut() else {
            return (Fate::Answered, Duration::ZERO);
        };
        let (fate, name) = match rng.u32(..12) {
            0 => (Fate::RolledBack, "commit_rolled_back"),
            1 => (Fate::RequestLost, "commit_request_lost"),
            2 => (Fate::AnswerLost, "commit_answer_lost"),
            3..6 => (Fate::Late, "commit_late"),
            _ => (Fate::Answered, "commit_answered"),
        };
        self.note(name);
        (fate, Duration::from_millis(rng.u64(..LONGEST_MS)))
    }

    /// Nothing else happens meanwhile: no future in here ever waits.
    async fn commit(&self, id: u64, completing: &Completing) -> Result<(), BoxError> {
        let key = completing.key().clone();
        let snapshot = self.memory.read(vec![key.clone()]).await.remove(0)?;
        let (now, record) = snapshot.map_or_else(Default::default, |snapshot| {
            (snapshot.now, Some(snapshot.record))
        });
        completing.apply(now, record)?;
        self.memory
            .execute(vec![Command {
                key,
                operation: completing.operation(),
            }])
            .await
            .remove(0)?;
        self.add(&[id]);
        Ok(())
    }
}

/// One of a handler's.
pub(crate) struct Transaction {
    till: Arc<Till>,
    id: u64,
}

impl SqlTransaction<MemoryStore> for Transaction {
    async fn complete_and_commit(self, completing: &Completing) -> Result<(), BoxError> {
        let Self { till, id } = self;
        let (fate, time) = till.fate();
        match fate {
            Fate::Answered => {
                sleep(time).await;
                till.commit(id, completing).await
            }
            Fate::RolledBack => Err("simulated: rolled back".into()),
            Fate::RequestLost => Err("simulated: the connection broke".into()),
            Fate::AnswerLost => {
                let committed = till.commit(id, completing).await;
                sleep(time).await;
                committed.and(Err("simulated: the answer was lost".into()))
            }
            Fate::Late => {
                let completing = completing.clone();
                // It is the server that goes on, whatever becomes of the worker.
                tokio::spawn(async move {
                    sleep(time).await;
                    let committed = till.commit(id, &completing).await.is_ok();
                    let name = if committed {
                        "commit_late_and_done"
                    } else {
                        "commit_late_and_refused"
                    };
                    till.note(name);
                });
                Err("simulated: the connection broke during the commit".into())
            }
        }
    }
}
