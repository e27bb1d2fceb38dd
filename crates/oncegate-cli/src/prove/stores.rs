//! The store of each round: an SQLite file in a temporary folder, or a server, in scopes that are
//! removed again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use oncegate::BoxError;
use oncegate::core::key::{Scope, StoreKey};
use oncegate::core::rules::Reply;
use oncegate::core::store::{Command, Store, StoreError, StoreWrapper};
use oncegate::sqlite::{SqliteStore, Synchronous};
use oncegate_testing::Trial;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::RwLock;

use crate::exit::{Exit, Problem};
use crate::stores::{TrialServer, redacted};

/// The most repetitions of the removal until nothing is found any more: an operation of an aborted
/// round may come late.
const REMOVALS_MOST: u32 = 10;

/// The stores in which the rounds of a trial keep their records.
pub(super) enum Stores {
    /// A file for each round in this folder.
    Files {
        folder: PathBuf,
        rounds: Arc<AtomicU64>,
    },
    /// A server, in scopes that begin with this one.
    Server {
        kept: Arc<KeptStore>,
        server: TrialServer,
        url: String,
        scope: String,
    },
}

impl Stores {
    /// `scope` is what the scopes on a server begin with, and `folder` the one of the trial.
    ///
    /// # Errors
    /// When the server cannot be used.
    pub(super) async fn of(url: Option<&str>, scope: &str, folder: &Path) -> Result<Self, Problem> {
        let Some(url) = url else {
            let folder = folder.to_owned();
            return Ok(Self::Files {
                folder,
                rounds: Arc::default(),
            });
        };
        let server = TrialServer::open(url).await?;
        // What each gate would be refused would look like a fault of the trial.
        server.store().check().await?;
        let kept = KeptStore {
            inner: server.store(),
            open: RwLock::new(true),
            written: Mutex::default(),
        };
        Ok(Self::Server {
            kept: Arc::new(kept),
            server,
            url: redacted(url),
            scope: scope.to_owned(),
        })
    }

    /// Lets the trial use these stores.
    pub(super) fn of_trial(&self, trial: Trial) -> Trial {
        match self {
            Self::Files { folder, rounds } => {
                let folder = folder.clone();
                let rounds = Arc::clone(rounds);
                trial.store_with(move || {
                    let number = rounds.fetch_add(1, Ordering::Relaxed);
                    RoundFile::open(folder.join(format!("{number}.db")))
                })
            }
            Self::Server { kept, scope, .. } => {
                let kept = Arc::clone(kept);
                trial
                    .scope(scope)
                    .store_with(move || std::future::ready(Ok(Arc::clone(&kept) as Arc<dyn Store>)))
            }
        }
    }

    /// Removes all that the trial has written.
    ///
    /// # Errors
    /// With the beginning of the scopes that are left.
    pub(super) async fn remove(&self) -> Result<(), Problem> {
        let Self::Server {
            kept,
            server,
            url,
            scope: first,
        } = self
        else {
            return Ok(());
        };
        for (scope, keys) in kept.closed().await {
            let keys: Vec<StoreKey> = keys.into_iter().collect();
            removed(server, &scope, &keys).await.map_err(|error| {
                let what = format!(
                    "records of the trial are left in {url}: {error}; remove the keys that begin with {first}"
                );
                Problem::new(Exit::Unreachable, what)
            })?;
        }
        Ok(())
    }
}

async fn removed(server: &TrialServer, scope: &Scope, keys: &[StoreKey]) -> Result<(), StoreError> {
    for _ in 0..REMOVALS_MOST {
        server.remove(scope, keys).await?;
        let store = server.store();
        let mut left = store.descriptor(scope).await?.is_some();
        for read in store.read(keys.to_vec()).await {
            left |= read?.is_some();
        }
        if !left {
            return Ok(());
        }
    }
    Err(StoreError::unavailable(
        "operations of the trial still arrive",
    ))
}

/// The file of a round, which is removed at its end.
struct RoundFile {
    store: SqliteStore,
    path: PathBuf,
}

impl RoundFile {
    async fn open(path: PathBuf) -> Result<Arc<dyn Store>, BoxError> {
        // A power cut would end the trial, too.
        let builder = SqliteStore::builder(&path)
            .without_purge()
            .synchronous(Synchronous::Normal);
        Ok(Arc::new(Self {
            store: builder.open().await?,
            path,
        }))
    }
}

impl Drop for RoundFile {
    fn drop(&mut self) {
        for suffix in ["", "-wal", "-shm"] {
            let mut path = self.path.clone().into_os_string();
            path.push(suffix);
            // What cannot be removed now is removed with the folder.
            drop(std::fs::remove_file(path));
        }
    }
}

impl fmt::Debug for RoundFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

impl StoreWrapper for RoundFile {
    fn inner(&self) -> &dyn Store {
        &self.store
    }
}

/// A store that remembers what was written, so that it can be removed. Once it is closed, nothing
/// more is written.
pub(super) struct KeptStore {
    inner: Arc<dyn Store>,
    open: RwLock<bool>,
    written: Mutex<WrittenKeys>,
}

/// The keys in each scope.
type WrittenKeys = BTreeMap<Scope, BTreeSet<StoreKey>>;

impl KeptStore {
    /// Waits for the operations that run, refuses others, and returns what was written.
    async fn closed(&self) -> WrittenKeys {
        *self.open.write().await = false;
        std::mem::take(&mut *self.written())
    }

    /// A panic elsewhere does no harm: each change is a single insert.
    fn written(&self) -> MutexGuard<'_, WrittenKeys> {
        self.written.lock()
    }
}

impl fmt::Debug for KeptStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// The error for an operation after the end of the trial.
fn closed() -> StoreError {
    StoreError::unavailable("the trial has ended")
}

#[async_trait]
impl StoreWrapper for KeptStore {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let open = self.open.read().await;
        if !*open {
            return commands.iter().map(|_| Err(closed())).collect();
        }
        for Command { key, .. } in &commands {
            if let Ok(scope) = Scope::new(key.scope()) {
                self.written().entry(scope).or_default().insert(key.clone());
            }
        }
        self.inner.execute(commands).await
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        let open = self.open.read().await;
        if !*open {
            return Err(closed());
        }
        self.written().entry(scope.clone()).or_default();
        self.inner.describe(scope, expected, proposed).await
    }
}
